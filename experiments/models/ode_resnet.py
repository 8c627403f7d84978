"""ResNets and their Neural ODE twins: the same f in y = x + f(x) and in dz/dt = f(z), the same parameters.

The twin that is a ResNet is the network whose ODE blocks are solved by one step of Euler's method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchmali as tm
from experiments.methods import Solve
from torchmali.nn import ODEBlock

Norm = Callable[[int], nn.Module]


def batch_norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels)


def group_norm(channels: int) -> nn.Module:
    """Norm over groups of 16 channels, of 4 where there are few. It is the same on any number of processes."""
    return nn.GroupNorm(max(channels // 16, channels // 4 if channels < 32 else 1), channels)


NORMS: dict[str, Norm] = {"batch": batch_norm, "group": group_norm}


RESNET = Solve(tm.Euler(), tm.FixedStep(1.0), tm.Naive())  # one step of Euler's method
NORMALISE = {  # mean and standard deviation of the pixels, by data set
    "digits": ((0.31,), (0.38,)),
    "mnist": ((0.1307,), (0.3081,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "folder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


def ode_block(f: nn.Module, solve: Solve) -> ODEBlock:
    return ODEBlock(f, (0.0, solve.end), **solve.options())


class Field(nn.Module):
    """f(z) = relu(norm(conv(relu(norm(conv(z)))))). It ends with a ReLU, as in the reference code: f >= 0."""

    def __init__(self, channels: int, norm: Norm = batch_norm):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), norm(channels), nn.ReLU(),
        )  # fmt: skip

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.layers(z)


class BasicBlock(nn.Module):
    """The ordinary block that changes the shape, before the ODE block of a stage."""

    def __init__(self, n_in: int, n_out: int, stride: int, norm: Norm = batch_norm):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False), norm(n_out), nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, padding=1, bias=False), norm(n_out),
        )  # fmt: skip
        same = stride == 1 and n_in == n_out
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(nn.Conv2d(n_in, n_out, 1, stride, bias=False), norm(n_out))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + self.shortcut(x))


class Normalise(nn.Module):
    """Pixels in [0, 1] to zero mean and unit variance: a part of the network, so that attacks see pixels."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Network(nn.Sequential):
    """Network from pixels in [0, 1] to logits: normalise, stem, body, head."""

    def set_solve(self, solve: Solve) -> None:
        """Set the solver, controller and gradient method of all ODE blocks."""
        for block in self.blocks():
            block.solver, block.controller, block.gradient = solve.solver, solve.controller, solve.gradient
            block.t = (0.0, solve.end)

    def blocks(self) -> list[ODEBlock]:
        return [module for module in self.modules() if isinstance(module, ODEBlock)]


def head(channels: int, n_classes: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, n_classes))


def stages(widths: Sequence[int], strides: Sequence[int], n_in: int, solve: Solve, norm: Norm) -> nn.Module:
    """Stages of an ordinary block and an ODE block each."""
    parts = []
    for width, stride in zip(widths, strides, strict=True):
        parts += [BasicBlock(n_in, width, stride, norm), ode_block(Field(width, norm), solve)]
        n_in = width
    return nn.Sequential(*parts)


def small_stem(n_in: int, width: int, stride: int, norm: Norm) -> nn.Module:
    return nn.Sequential(nn.Conv2d(n_in, width, 3, stride, padding=1, bias=False), norm(width), nn.ReLU())


def large_stem(n_in: int, width: int, norm: Norm) -> nn.Module:
    """Stem of networks for ImageNet: a quarter of the width and height remain."""
    conv = nn.Conv2d(n_in, width, 7, 2, padding=3, bias=False)
    return nn.Sequential(conv, norm(width), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))


def resnet18(
    normalise: Normalise, n_classes: int, solve: Solve, norm: Norm = batch_norm, stem: str = "small", n_in: int = 3
) -> Network:
    """ResNet18: 11,173,962 parameters with the small stem and 10 classes, 11,689,512 with the large one and 1000."""
    first = small_stem(n_in, 64, 1, norm) if stem == "small" else large_stem(n_in, 64, norm)
    body = stages((64, 128, 256, 512), (1, 2, 2, 2), 64, solve, norm)
    return Network(normalise, first, body, head(512, n_classes))


def small(
    normalise: Normalise, n_classes: int, solve: Solve, norm: Norm = batch_norm, n_in: int = 3, stride: int = 2
) -> Network:
    """Network of two stages, of 16 and 32 channels: 43,226 parameters for 3 channels, 42,938 for one."""
    return Network(
        normalise, small_stem(n_in, 16, stride, norm), stages((16, 32), (1, 2), 16, solve, norm), head(32, n_classes)
    )


def node_stack(
    normalise: Normalise,
    n_classes: int,
    solve: Solve,
    norm: Norm = batch_norm,
    n_in: int = 1,
    stride: int = 1,
    width: int = 12,
    n_blocks: int = 4,
) -> Network:
    """Network of ODE blocks alone: ordinary blocks between them would hide the effect of other solvers."""
    body = nn.Sequential(*(ode_block(Field(width, norm), solve) for _ in range(n_blocks)))
    return Network(normalise, small_stem(n_in, width, stride, norm), body, head(width, n_classes))
