"""ODE problems of the theory experiments: three with a gradient to compare, two networks whose memory is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchmali.engine import Time

# Initial value problems in float64.


class Problem(NamedTuple):
    """dz/dt = f(t, z, *theta) on [0, span]."""

    f: Callable[..., Tensor]
    z0: Tensor
    theta: tuple[Tensor, ...]
    span: float

    def to(self, dtype: torch.dtype) -> Problem:
        return self._replace(z0=self.z0.to(dtype), theta=tuple(w.to(dtype) for w in self.theta))

    def slope(self, t: Time, z: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """f with its parameters, on a tuple of one tensor, as the core calls it."""
        return (self.f(t, z[0], *self.theta),)


def linear_field(t: Any, z: Tensor, alpha: Tensor) -> Tensor:
    return alpha * z


def mlp_field(t: Any, z: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """A tanh network that sees the time; row 4 of w1 belongs to it."""
    return torch.tanh(z @ w1[:4] + t * w1[4] + b1) @ w2 + b2


def van_der_pol_field(t: Any, z: Tensor, mu: Tensor) -> Tensor:
    x, y = z.unbind()
    return torch.stack([y, torch.addcmul(-x, mu - mu * x * x, y)])  # mu (1 - x^2) y - x


def mlp(seed: int, span: float) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    theta = normal(5, 16) / math.sqrt(5), 0.1 * normal(16), normal(16, 4) / 4, 0.1 * normal(4)
    return Problem(mlp_field, normal(3, 4), theta, span)


def van_der_pol(mu: float, span: float) -> Problem:
    z0, theta = torch.tensor([2.0, 0.0], dtype=torch.float64), torch.tensor(mu, dtype=torch.float64)
    return Problem(van_der_pol_field, z0, (theta,), span)


# Networks whose memory and evaluations are measured.


class Network(nn.Module):
    """f(t, z) = layers(z)."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.layers(z)


class Measured(NamedTuple):
    """A network with its initial state; n_layers is the paper's N_f."""

    f: Network
    z0: Tensor
    n_layers: int


def mlp_network(seed: int, dtype: torch.dtype = torch.float32) -> Measured:
    torch.manual_seed(seed)
    f = Network(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(dtype)
    return Measured(f, torch.randn(128, 64, dtype=dtype), 2)


def conv_network(seed: int, dtype: torch.dtype = torch.float32) -> Measured:
    torch.manual_seed(seed)
    f = Network(nn.Conv2d(8, 32, 3, padding=1), nn.Tanh(), nn.Conv2d(32, 8, 3, padding=1)).to(dtype)
    return Measured(f, torch.randn(16, 8, 8, 8, dtype=dtype), 2)


NETWORKS: dict[str, Callable[..., Measured]] = {"MLP": mlp_network, "conv": conv_network}
