"""What modules made of solves share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from torchmali.controllers import StepController
from torchmali.errors import InvalidTimesError
from torchmali.gradients.base import GradientMethod
from torchmali.solution import Solution, Stats
from torchmali.solve import solve
from torchmali.solvers.base import Solver

Times = Sequence[float] | Tensor


class SolveModule(nn.Module):
    """A module that solves; `last_stats` has the counts of its last solve."""

    last_stats: Stats | None

    def __init__(self, solver: Solver, controller: StepController, gradient: GradientMethod, buffers: str):
        super().__init__()
        self.solver, self.controller, self.gradient, self.buffers_policy = solver, controller, gradient, buffers
        self.last_stats = None

    def solve(self, func: Callable, y0: Any, t: Any, **changes: Any) -> Solution:
        """With the solver, controller and gradient method of this module, but for `changes`."""
        how = {"solver": self.solver, "controller": self.controller, "gradient": self.gradient}
        solution = solve(func, y0, t, **{**how, "buffers": self.buffers_policy, **changes})
        self.last_stats = solution.stats
        return solution

    def extra_repr(self) -> str:
        how = f"solver={self.solver}, controller={self.controller}, gradient={self.gradient}"
        return how if self.buffers_policy == "update" else f"{how}, buffers={self.buffers_policy!r}"


def checked_times(t: Times) -> Times:
    """A parameter, to be learned, or numbers: another tensor would be rounded by to(dtype), and is not learned."""
    if not isinstance(t, Tensor) or isinstance(t, nn.Parameter):
        return t
    if t.requires_grad:
        raise InvalidTimesError(
            "t requires a gradient, but a tensor that is no parameter is kept as numbers. Give t=nn.Parameter(t)."
        )
    return tuple(t.tolist())


def shown_times(t: Times) -> str:
    return "learned" if isinstance(t, nn.Parameter) else f"({', '.join(f'{x:g}' for x in t)})"
