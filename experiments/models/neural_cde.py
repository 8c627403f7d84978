"""The Neural CDE of Kidger et al. (2020) as a classifier of series."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from torchmali.nn import LinearControl, NeuralCDE, linear_coeffs, natural_cubic_coeffs


class Matrix(nn.Module):
    """f(z): relu layers, then a matrix (hidden, channels) of tanh."""

    def __init__(self, hidden: int, channels: int, width: int, n_layers: int):
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(hidden, width), nn.ReLU()]
        for _ in range(n_layers):
            layers += [nn.Linear(width, width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, hidden * channels), nn.Tanh())
        self.shape = hidden, channels

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.layers(z).unflatten(-1, self.shape)


class CDEClassifier(nn.Module):
    """Network from a series (batch, time, channel), a time each unit, to logits: z at the end, read out.

    cde: makes a `NeuralCDE` of f and the map from the first point of the path to z.
    """

    def __init__(
        self,
        cde: Callable[[nn.Module, nn.Module], NeuralCDE],
        channels: int,
        n_classes: int,
        hidden: int = 90,
        width: int = 40,
        n_layers: int = 3,
    ):
        super().__init__()
        self.cde = cde(Matrix(hidden, channels, width, n_layers), nn.Linear(channels, hidden))
        self.readout = nn.Linear(hidden, n_classes)

    def coeffs(self, x: Tensor) -> Tensor:
        return linear_coeffs(x) if self.cde.control is LinearControl else natural_cubic_coeffs(x)

    def along(self, coeffs: Tensor) -> Tensor:
        return self.readout(self.cde(coeffs))

    def forward(self, x: Tensor) -> Tensor:
        return self.along(self.coeffs(x))
