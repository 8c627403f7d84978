"""Oracle for gradients: plain autograd through the very steps that another method took."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torchmali as tm
from torchmali.controllers import ControllerState, SolveStart
from torchmali.integrate import integrate
from torchmali.tape import Step
from torchmali.tree import Structure


@dataclass(frozen=True)
class SameGrid(tm.StepController):
    """Controller that repeats a recorded grid. Times may be tensors: interior points move with the segment's start."""

    boundaries: tuple[float, ...]
    lands_on_outputs: bool
    adaptive = False

    def check(self, solver: tm.Solver) -> None:
        pass

    def ends_on_outputs(self, solver: tm.Solver) -> bool:
        return self.lands_on_outputs

    def bind(self, structure: Structure) -> SameGrid:
        return self

    def begin(self, start: SolveStart) -> ControllerState:
        state = _SameGridState(list(self.boundaries))
        state.controlled = range(len(start.state.point))
        return state


class _SameGridState(ControllerState):
    def __init__(self, boundaries: list[float]):
        self.boundaries, self.target = boundaries, None

    def next_time(self, t: Any, target: Any) -> Any:
        if target is not self.target:
            self.target, self.start = target, t
        boundary, *self.boundaries = self.boundaries
        if boundary == float(target.detach()):
            return target
        return self.start + (boundary - float(self.start.detach()))


def recorded_grid(func, y0, times: list[float], solver: tm.Solver, controller: tm.StepController, args=()) -> SameGrid:
    """Record the grid that `solver` and `controller` take on this problem."""
    structure = Structure.of(y0)

    def f(t, z):
        with torch.no_grad():
            return structure.flatten(func(torch.tensor(t, dtype=torch.float64), structure.rebuild(z), *args))

    z0 = tuple(z.detach() for z in structure.flatten(y0))
    controller = controller.bind(structure)
    tape = integrate(f, z0, times, solver, controller).tape
    boundaries = tuple(event.t1 for event in tape.events if isinstance(event, Step))
    return SameGrid(boundaries, controller.ends_on_outputs(solver))


class Field(nn.Module):
    """A time-dependent field on a dict of mixed shapes, with parameters and a differentiable argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, t: Tensor, y: dict, w: Tensor) -> dict:
        u = self.net(torch.cat([y["a"], t.expand(y["a"].shape[0], 1)], dim=1)) * w
        slow, fast = y["b"]
        return {"a": u + 0.1 * slow, "b": (u.mean() - 0.3 * t * slow, torch.sin(fast + t) - 0.2 * fast)}


@dataclass
class Case:
    """A problem with everything that can have a gradient."""

    func: Any
    y0: dict
    t: Tensor
    w: Tensor

    @staticmethod
    def make(times=(0.0, 0.31, 0.8, 1.3)) -> Case:
        def leaf(*shape):
            return torch.linspace(-1.0, 0.9, math.prod(shape), dtype=torch.float64).reshape(shape).requires_grad_()

        y0 = {"a": leaf(2, 3), "b": (torch.tensor(0.4, dtype=torch.float64, requires_grad=True), leaf(5))}
        t = torch.tensor(times, dtype=torch.float64, requires_grad=True)
        w = torch.linspace(0.5, 1.5, 3, dtype=torch.float64).requires_grad_()
        return Case(Field(), y0, t, w)

    def gradients(self, solver, controller, gradient) -> tuple[dict[str, Tensor], tm.Stats]:
        """Return gradients of a loss of every output of every leaf."""
        solution = tm.solve(
            self.func, self.y0, self.t, solver=solver, controller=controller, gradient=gradient, args=(self.w,)
        )
        a, (slow, fast) = solution.y["a"], solution.y["b"]
        weights = torch.arange(1.0, len(self.t) + 1, dtype=torch.float64)
        loss = (weights * (a**2).sum((1, 2))).sum() + (weights * slow).sin().sum() + (fast**3).mean()
        inputs = {"a": self.y0["a"], "slow": self.y0["b"][0], "fast": self.y0["b"][1], "t": self.t, "w": self.w}
        inputs |= dict(self.func.named_parameters())
        grads = torch.autograd.grad(loss, list(inputs.values()))
        return dict(zip(inputs, grads, strict=True)), solution.stats

    def exact_gradients(self, solver, controller) -> dict[str, Tensor]:
        """Return gradients by plain autograd through the grid that solver and controller take here."""
        grid = recorded_grid(self.func, self.y0, self.t.tolist(), solver, controller, args=(self.w.detach(),))
        return self.gradients(solver, grid, tm.Naive())[0]


def worst_difference(grads: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Return the largest relative difference, in the 2-norm."""
    return max(float((grads[name] - exact[name]).norm() / exact[name].norm()) for name in exact)
