"""FFJORD for images (Grathwohl et al., 2019) in the form of RNODE: continuous flows at several scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchmali.nn import CNF

MakeCNF = Callable[[nn.Module], CNF]


class WithTime(nn.Module):
    """A layer with the time as an additional first channel."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        time = t.to(x).expand(x.shape[0], 1, *x.shape[2:])
        return self.layer(torch.cat([time, x], 1))


class Field(nn.Module):
    """f(t, x): layers with softplus between them. The last begins with weights of zero."""

    def __init__(self, layer: Callable[[int, int], nn.Module], channels: int, widths: Sequence[int]):
        super().__init__()
        sizes = [channels, *widths, channels]
        pairs = zip(sizes, sizes[1:], strict=False)
        self.layers = nn.ModuleList(WithTime(layer(n_in + 1, n_out)) for n_in, n_out in pairs)
        last: WithTime = self.layers[-1]  # pyright: ignore[reportAssignmentType]
        nn.init.zeros_(last.layer.weight)  # pyright: ignore[reportArgumentType]

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.softplus(layer(t, x))
        return self.layers[-1](t, x)


def conv(n_in: int, n_out: int) -> nn.Module:
    return nn.Conv2d(n_in, n_out, 3, padding=1)


class Mapped(NamedTuple):
    """Result of a flow: z (batch, dimensions), its log-determinant and regularisers, of shape (batch,)."""

    z: Tensor
    log_det: Tensor
    kinetic: Tensor
    jacobian: Tensor


class Logit(nn.Module):
    """Map from (0, 1) to the line: logit(alpha + (1 - 2 alpha) x)."""

    def __init__(self, alpha: float):
        super().__init__()
        self.alpha = alpha

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        s = self.alpha + (1 - 2 * self.alpha) * x
        log_det = math.log(1 - 2 * self.alpha) - s.log() - (1 - s).log()
        return s.logit(), log_det.flatten(1).sum(1)

    def inverse(self, y: Tensor) -> Tensor:
        return (y.sigmoid() - self.alpha) / (1 - 2 * self.alpha)


class Chain(nn.Module):
    """Flows, one after the other."""

    def __init__(self, cnf: MakeCNF, n: int, channels: int, widths: Sequence[int]):
        super().__init__()
        self.flows: list[CNF] = nn.ModuleList(cnf(Field(conv, channels, widths)) for _ in range(n))  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor, sums: list[Tensor]) -> Tensor:
        """Apply the flows. sums: of log_det, kinetic, jacobian, which grow."""
        for cnf in self.flows:
            flow = cnf(x)
            for i, more in enumerate((flow.log_det, flow.kinetic, flow.jacobian)):
                sums[i] = sums[i] if more is None else sums[i] + more
            x = flow.z
        return x

    def inverse(self, x: Tensor) -> Tensor:
        for cnf in reversed(self.flows):
            x = cnf.inverse(x)
        return x


class Scale(nn.Module):
    """Flows, then pixels into channels, flows, and half of the channels is split off; at the last scale only flows."""

    def __init__(self, cnf: MakeCNF, channels: int, widths: Sequence[int], n_blocks: int, last: bool):
        super().__init__()
        self.before = Chain(cnf, n_blocks, channels, widths)
        self.after = None if last else Chain(cnf, n_blocks, 4 * channels, widths)

    def forward(self, x: Tensor, sums: list[Tensor]) -> tuple[Tensor, ...]:
        x = self.before(x, sums)
        return (x,) if self.after is None else self.after(F.pixel_unshuffle(x, 2), sums).chunk(2, 1)

    def inverse(self, *parts: Tensor) -> Tensor:
        x = parts[0] if self.after is None else F.pixel_shuffle(self.after.inverse(torch.cat(parts, 1)), 2)
        return self.before.inverse(x)


class FFJORD(nn.Module):
    """Map from images in (0, 1), of a shape (channels, height, width), to as many normal numbers.

    There is a scale for each halving of the sides that leaves 4 or more. cnf: makes a flow of its field.
    """

    def __init__(
        self, cnf: MakeCNF, shape: tuple[int, int, int], widths: Sequence[int] = (64, 64, 64), n_blocks: int = 2,
        alpha: float = 1e-5,
    ):  # fmt: skip
        super().__init__()
        self.shape, self.logit = shape, Logit(alpha)
        channels, side = shape[0], min(shape[1:])
        scales = []
        while side >= 4:
            last = side // 2 < 4
            scales.append(Scale(cnf, channels, widths, n_blocks, last))
            channels, side = 2 * channels, side // 2
        self.scales: list[Scale] = nn.ModuleList(scales)  # pyright: ignore[reportAttributeAccessIssue]

    def flows(self) -> list[CNF]:
        return [module for module in self.modules() if isinstance(module, CNF)]

    def forward(self, x: Tensor) -> Mapped:
        x, log_det = self.logit(x)
        sums = [log_det, torch.zeros_like(log_det), torch.zeros_like(log_det)]
        parts = []
        for scale in self.scales:
            x, *out = scale(x, sums)
            parts += out
        return Mapped(torch.cat([part.flatten(1) for part in (*parts, x)], 1), *sums)

    def inverse(self, z: Tensor) -> Tensor:
        """Map normal numbers to images."""
        outs, (channels, height, width) = [], self.shape
        for _ in self.scales[:-1]:
            channels, height, width = 2 * channels, height // 2, width // 2
            out, z = z.split([channels * height * width, z.shape[1] - channels * height * width], 1)
            outs.append(out.unflatten(1, (channels, height, width)))
        x = z.unflatten(1, (channels, height, width))
        for scale in reversed(self.scales):
            x = scale.inverse(x) if scale.after is None else scale.inverse(x, outs.pop())
        return self.logit.inverse(x)


def log_prob(mapped: Mapped) -> Tensor:
    """Log-density of x, (batch,), where z is standard normal."""
    d = mapped.z.shape[1]
    return mapped.log_det - 0.5 * mapped.z.square().sum(1) - 0.5 * d * math.log(2 * math.pi)


def bits_per_dim(log_p: Tensor, d: int, levels: int) -> Tensor:
    """Bits per dimension of pixels of so many levels, where x = (pixel + noise) / levels."""
    return -(log_p / d - math.log(levels)) / math.log(2)
