"""Outputs that keep every step, and the solution at any time that is made from them.

A step is kept as z at its start and the stages to which the solver's interpolant gives a weight. They are tensors of
their own that autograd follows, so that what is made of them after the solve can be differentiated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmali.errors import InvalidTimesError
from torchmali.jumps import Jumps
from torchmali.outputs.base import AcceptedStep, InnerPulled, Outputs, Pulled
from torchmali.outputs.stored import StoredOutputs
from torchmali.solvers.dense import Interpolant
from torchmali.solvers.interpolation import RecordedStages, factors, weights, weights_of_slopes
from torchmali.state.vectors import Tensors, Time
from torchmali.tape import InnerOutput, Output, StageOutput
from torchmali.tree import Structure


class DenseOutputs(StoredOutputs):
    """y at n times and, of every step, z at its start and the stages with a weight in an interpolant.

    The results are y, z and each of these stages, leaf by leaf, the latter two of shape (steps, ...). If wants_t, the
    times of the grid follow: they move with the output times (tape.Step). interpolants: the solver's, and the one of
    steps that close (tape.Step).
    """

    def __init__(self, n: int, n_leaves: int, interpolants: tuple[Interpolant, Interpolant], wants_t: bool):
        super().__init__(n)
        self.n_leaves, self.interpolants, self.wants_t = n_leaves, interpolants, wants_t
        self.used = sorted({j for interpolant in interpolants for j in interpolant.used})
        self.grid: list[Time] = []  # the start of the first step, and the ends of all
        self.closes: list[bool] = []  # of each step
        self.steps: list[list[Tensor]] = [[] for _ in range(n_leaves * (1 + len(self.used)))]

    def begin(self, times: Sequence[Time], stops: bool, is_traced: bool, jumps: Jumps | None = None) -> None:
        super().begin(times, stops, is_traced, jumps)
        self.grid = [times[0]]

    def passes_over(self, t1: Time) -> bool:
        return False

    def looks_inside(self, t: Time, t1: Time) -> bool:
        return True

    def accept(self, step: AcceptedStep) -> list[Output | InnerOutput | StageOutput]:
        found, z = super().accept(step), step.before.point
        stages = dict(enumerate(step.stages()))
        without = tuple([torch.zeros_like(leaf) for leaf in z]) if len(stages) <= self.used[-1] else ()
        leaves = [*z, *(leaf for j in self.used for leaf in stages.get(j, without))]
        for kept, leaf in zip(self.steps, leaves, strict=True):
            kept.append(leaf)
        self.grid.append(step.t1)
        self.closes.append(step.closes)
        return [*found, StageOutput(len(self.grid) - 2)]

    def contents(self) -> Any:
        return len(self.grid)

    def restore_contents(self, contents: Any) -> None:
        del self.grid[contents:], self.closes[contents - 1 :]
        for kept in self.steps:
            del kept[contents - 1 :]

    def results(self) -> Tensors:
        stacked = []
        for kept in self.steps:
            stacked.append(torch.stack(kept))
            kept.clear()  # or all would be there twice
        return *super().results(), *stacked, *([self._times()] if self._moves else ())

    @property
    def _moves(self) -> bool:
        """Whether the grid is differentiated."""
        return self.wants_t or any(isinstance(t, Tensor) for t in self.grid)

    def _times(self) -> Tensor:
        """The grid in float64 on the host."""
        if not any(isinstance(t, Tensor) for t in self.grid):
            return torch.tensor(self.grid, dtype=torch.float64, device="cpu")
        return torch.stack([torch.as_tensor(t, dtype=torch.float64, device="cpu") for t in self.grid])

    def solution(self, results: Tensors) -> tuple[Tensors, Tensor | None]:
        return results[: self.n_leaves], None

    def trajectory(self, results: Tensors, structure: Structure, t: Tensor) -> Trajectory:
        n, m = self.n_leaves, len(self.used)
        _, z, *stages = (results[i * n : (i + 1) * n] for i in range(2 + m))
        grid = results[-1] if self._moves else self._times()
        rows = tuple([_rows_of(interpolant, self.used) for interpolant in self.interpolants])
        return Trajectory(rows, torch.tensor(self.closes), structure, grid, z, stages, _eps(t))

    def pull(self, k: int, t: Time, z: Tensors, grads: Sequence[Tensor | None]) -> Pulled:
        return super().pull(k, t, z, grads[: self.n_leaves])

    def pull_inner(self, first: int, times: Sequence[Time], z: Tensors, grads: Sequence[Tensor | None]) -> InnerPulled:
        return super().pull_inner(first, times, z, grads[: self.n_leaves])

    def pull_stages(self, i: int, grads: Sequence[Tensor | None]) -> RecordedStages | None:
        n, m = self.n_leaves, len(self.used)
        of_grid = grads[-1] if self.wants_t else None
        of_steps = grads[n : (2 + m) * n]
        if of_grid is None and all(g is None for g in of_steps):
            return None
        z, *leaves = ([None if g is None else g[i] for g in of_steps[j * n : (j + 1) * n]] for j in range(1 + m))
        stages = dict(zip(self.used, leaves, strict=True))
        if of_grid is None:
            return RecordedStages(z, stages)
        # The end of a step is the start of the next one: each time counts once.
        is_last = i == len(of_grid) - 2
        return RecordedStages(z, stages, of_grid[i].item(), of_grid[i + 1].item() if is_last else 0.0)

    def fresh(self) -> Outputs:
        return DenseOutputs(self.n, self.n_leaves, self.interpolants, self.wants_t)


def _rows_of(interpolant: Interpolant, stages: Sequence[int]) -> Sequence[Sequence[float]]:
    """The weights of these stages as polynomials, zero for those that the interpolant does not have."""
    unused = (0.0,) * len(interpolant.rows[0])
    return [interpolant.rows[j] if j < len(interpolant.rows) else unused for j in stages]


@dataclass(frozen=True, repr=False, eq=False)
class Trajectory:
    """The solution as a function of time: the interpolants of all steps.

    rows: for each stage the polynomial of its weight, in most steps and in those that close (`closes`). z, and each of
    the stages: leaves of shape (steps, ...). grid: the steps + 1 times between which the steps are, on the host. eps:
    times that lie outside by as much as their rounding are inside.
    """

    rows: tuple[Sequence[Sequence[float]], ...]
    closes: Tensor
    structure: Structure
    grid: Tensor
    z: Tensors
    stages: Sequence[Tensors]
    eps: float

    def __call__(self, t: Any, derivative: bool = False) -> Any:
        """y (or dy/dt) at a time, or at a tensor of times: leaves of shape (*t.shape, *leaf.shape)."""
        t, eps = _checked_times(t)
        times = t.to("cpu", torch.float64).reshape(-1)
        self._check_inside(times.detach(), max(eps, self.eps))
        steps = self._steps_of(times.detach())
        t0, t1 = self.grid[steps], self.grid[steps + 1]
        theta = (times - t0) / (t1 - t0)
        most, closing = (
            weights_of_slopes(x, theta) if derivative else (t1 - t0) * weights(x, theta) for x in self.rows
        )
        w = torch.where(self.closes[steps], closing, most)
        leaves = [self._leaf(i, steps, w, derivative) for i in range(len(self.z))]
        return self.structure.rebuild([leaf.reshape(t.shape + leaf.shape[1:]) for leaf in leaves])

    def _leaf(self, i: int, steps: Tensor, w: Tensor, derivative: bool) -> Tensor:
        """Leaf i, in shape (times, ...). The stages are summed one after the other: only one is gathered at a time."""
        z = self.z[i]
        steps = steps.to(z.device)
        y = torch.zeros_like(z[:1]) if derivative else z.index_select(0, steps)
        for factor, stage in zip(factors(w, z), self.stages, strict=True):
            y = torch.addcmul(y, factor, stage[i].index_select(0, steps))
        return y

    def _steps_of(self, times: Tensor) -> Tensor:
        """The step that holds each time; of two that meet there, the one that begins with it."""
        grid = self.grid.detach()
        sign = 1.0 if bool(grid[-1] > grid[0]) else -1.0
        found = torch.searchsorted(sign * grid, sign * times, right=True) - 1
        return found.clamp(0, len(grid) - 2)

    def _check_inside(self, times: Tensor, eps: float) -> None:
        first, last = self.grid.detach()[[0, -1]].tolist()
        slack = eps * max(abs(first), abs(last))
        is_inside = (times >= min(first, last) - slack) & (times <= max(first, last) + slack)
        if not bool(is_inside.all()):
            given = times[~is_inside][0].item()
            raise InvalidTimesError(
                f"t = {given:.10g} is outside of the solve, which went from {first:.10g} to {last:.10g}: a solution is "
                "known between these times alone. Let the times of the solve, t=, go further."
            )


def _checked_times(t: Any) -> tuple[Tensor, float]:
    """The times as a tensor, and the relative precision in which they were given."""
    if isinstance(t, Tensor):
        return t, _eps(t)
    try:
        if isinstance(t, (list, tuple)) and any(isinstance(x, Tensor) for x in t):
            eps = max(_eps(x) for x in t if isinstance(x, Tensor))
            return torch.stack([torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in t]), eps
        return torch.as_tensor(t, dtype=torch.float64), 0.0
    except (TypeError, ValueError, RuntimeError):
        raise InvalidTimesError(f"solution(t={t!r}): give a number, or a tensor of times.") from None


def _eps(t: Tensor) -> float:
    """The relative precision of times."""
    return torch.finfo(t.dtype).eps if t.is_floating_point() else 0.0
