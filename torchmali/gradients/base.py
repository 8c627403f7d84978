"""What a gradient method is: a value that solves a problem differentiably."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from torchmali.controllers import StepController
from torchmali.field import Field
from torchmali.solution import DoubleBackward, Stats
from torchmali.solvers.base import Solver
from torchmali.state import Tensors


@dataclass(frozen=True)
class Problem:
    """A checked call of `solve`, on leaves."""

    field: Field
    z0: Tensors
    times: list[float]
    t: Tensor | None  # the times as a tensor, where they require a gradient
    solver: Solver
    controller: StepController
    stats: Stats

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """All that may get a gradient, in the order of the autograd.Functions' inputs."""
        return (self.t, *self.z0, *self.field.theta)

    @property
    def wants_gradient(self) -> bool:
        return torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in self.inputs
        )


class GradientMethod(ABC):
    def check(self, solver: Solver, controller: StepController) -> None:
        """Raise if this method cannot differentiate this solver's steps."""
        controller.check(solver)

    @abstractmethod
    def solve(self, problem: Problem) -> Tensors:
        """The solution at all times, each leaf of shape (len(times), *leaf.shape)."""


class Outputs:
    """Outputs written in place as they come: no list of states beside the stacked result."""

    def __init__(self, z0: Tensors, n_times: int):
        self.y = tuple(x.new_empty((n_times, *x.shape)) for x in z0)

    def __call__(self, k: int, z: Tensors) -> None:
        for y, x in zip(self.y, z, strict=True):
            y[k] = x


def refuse_double_backward(method: str) -> None:
    """To be called in `backward`: grad mode is on there exactly under create_graph=True."""
    if torch.is_grad_enabled():
        raise DoubleBackward(
            f"{method} gives first derivatives only, but backward was called with "
            "create_graph=True. Use gradient=Naive() for second derivatives."
        )
