"""Base class of the modules that solve ODEs, and the times they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from torchmali._torch import break_graph
from torchmali.compiled.in_graph import in_graph, is_followed
from torchmali.controllers import FixedStep, StepController
from torchmali.errors import InvalidTimesError
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.solution import Solution, Stats
from torchmali.solvers.base import Solver
from torchmali.solving import solve

Times = Sequence[float] | Tensor


class SolveModule(nn.Module):
    """Base of modules that call `solve`; `last_stats` has the counts of the last solve."""

    func: Callable  # f, set by subclasses
    _last_stats: Stats | None = None

    def __init__(
        self, solver: Solver, controller: StepController, gradient: GradientMethod, buffers: str, compile: bool = False
    ):
        super().__init__()
        self.compiles = compile
        self.solver, self.controller, self.gradient, self.buffers_policy = solver, controller, gradient, buffers

    @property
    def last_stats(self) -> Stats | None:
        if is_followed():
            break_graph("torchmali: last_stats are known when the graph has run, not in it (docs/compile.md).")
        return self._last_stats

    def solve(self, func: Callable, y0: Any, t: Any, **changes: Any) -> Solution:
        """Call `solve` with the solver, controller and gradient method of this module, except for `changes`."""
        how = {
            "solver": self.solver,
            "controller": self.controller,
            "gradient": self.gradient,
            "compile": self.compiles,
        }
        solution = solve(func, y0, t, **{**how, "buffers": self.buffers_policy, **changes})
        self._last_stats = solution.stats
        return solution

    def in_graph(self, run: Callable, likes: Callable, *inputs: Any) -> Sequence[Tensor] | None:
        """The tensors of run(self, *inputs), as an operation of the graph where torch.compile follows; else None.

        run, likes: see `in_graph` of compiled/in_graph.py.
        """
        return in_graph(run, likes, self, "func", inputs) if is_followed() else None

    def extra_repr(self) -> str:
        how = f"solver={self.solver}, controller={self.controller}, gradient={self.gradient}"
        how = how if self.buffers_policy == "update" else f"{how}, buffers={self.buffers_policy!r}"
        return f"{how}, compile=True" if self.compiles else how


def default_controller(solver: Solver, on_outputs: bool = False) -> StepController:
    """Steps of the paper's size, which do not end on output times if the solver can interpolate.

    on_outputs: they end on output times in any case.
    """
    return FixedStep(0.25, land=on_outputs or not solver.interpolates)


def exact_gradient(gradient: GradientMethod) -> GradientMethod:
    """Return a method whose solves have a code: `gradient` itself, or MALI on integers wide enough for float32."""
    if gradient.on_integers:
        return gradient
    return replace(gradient, exact="int64") if isinstance(gradient, MALI) else MALI(exact="int64")


def checked_times(t: Times) -> Times:
    """Return a parameter (learned times) or numbers as given, and any other tensor as numbers.

    As a tensor, times that are not learned would be rounded by to(dtype).
    """
    if not isinstance(t, Tensor) or isinstance(t, nn.Parameter):
        return t
    if t.ndim != 1:
        raise InvalidTimesError(
            f"t must be one-dimensional; got shape {tuple(t.shape)}. Times of each sample belong to one batch: give "
            "them with it, as in block(y0, t=t)."
        )
    if t.requires_grad:
        raise InvalidTimesError(
            "t requires a gradient, but a tensor that is no parameter is kept as numbers. Give t=nn.Parameter(t)."
        )
    return tuple(t.tolist())


def shown_times(t: Times) -> str:
    return "learned" if isinstance(t, nn.Parameter) else f"({', '.join(f'{x:g}' for x in t)})"
