"""Controllers with what torchdiffeq has beside ours: callbacks, a shortest step, tolerances of elements."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from torchmali.controllers import (
    AdaptiveStep,
    AdaptiveStepState,
    ControllerState,
    Factors,
    FixedStep,
    FixedStepState,
    SolveStart,
    StepController,
)
from torchmali.solution import short_repr
from torchmali.solvers.base import Attempt, Solver
from torchmali.state.base import State
from torchmali.state.vectors import Time, number
from torchmali.torchdiffeq.callbacks import NONE, Callbacks

Grid = Callable[[float, float], Sequence[float]]  # the grid of a solve from one time to another, both included


@dataclass(frozen=True, repr=False)
class CalledFixedStep(FixedStep):
    """`FixedStep` with callbacks."""

    callbacks: Callbacks = NONE

    def begin(self, start: SolveStart) -> ControllerState:
        return CalledFixedStepState(self, start)


class CalledFixedStepState(FixedStepState):
    """State of `CalledFixedStep` in one solve."""

    def __init__(self, controller: CalledFixedStep, start: SolveStart):
        super().__init__(controller.h, start)
        self.callbacks = controller.callbacks

    def attempting(self, t0: Time, t1: Time, before: State) -> None:
        self.callbacks.call("step", t0, t1, before.point)


@dataclass(frozen=True, repr=False)
class GridStep(StepController):
    """Steps from each time of a grid to the next; outputs between them are interpolated."""

    grid: Grid
    callbacks: Callbacks = NONE

    __repr__ = short_repr

    def ends_on_outputs(self, solver: Solver) -> bool:
        return False

    def begin(self, start: SolveStart) -> ControllerState:
        return GridStepState(self, start)


class GridStepState(ControllerState):
    """State of `GridStep` in one solve."""

    def __init__(self, controller: GridStep, start: SolveStart):
        super().__init__(start)
        self.callbacks = controller.callbacks
        t0, t_end = number(start.t0), number(start.t_end)
        self.times = sorted(controller.grid(t0, t_end))

    def next_time(self, t: Time, target: Time) -> Time:
        now, end = number(t), number(target)
        i = bisect_right(self.times, now) if end > now else bisect_left(self.times, now) - 1
        if not 0 <= i < len(self.times):
            return target
        found = self.times[i]
        return found if min(now, end) < found < max(now, end) else target

    def attempting(self, t0: Time, t1: Time, before: State) -> None:
        self.callbacks.call("step", t0, t1, before.point)


@dataclass(frozen=True, repr=False)
class QuietStep(AdaptiveStep):
    """`AdaptiveStep` without a warning of tolerances near round-off."""

    warns_of_tolerance: ClassVar[bool] = False


@dataclass(frozen=True, repr=False)
class CalledStep(QuietStep):
    """`AdaptiveStep` with callbacks, and with tolerances for single elements.

    per_element: rtol and atol for each leaf, as numbers or tensors; None: rtol and atol are meant. h_min: the shortest
    step that is asked for; a step as short as that is accepted whatever its error.
    """

    per_element: tuple[Sequence[Any], Sequence[Any]] | None = None
    callbacks: Callbacks = NONE

    def tolerances(self, leaves: Sequence[int]) -> tuple[Factors, Factors]:
        if self.per_element is None:
            return super().tolerances(leaves)
        rtol, atol = ([values[i] for i in leaves] for values in self.per_element)
        return rtol, [x.clamp(min=1e-36) for x in atol]

    def begin(self, start: SolveStart) -> ControllerState:
        return CalledStepState(self, start)


class CalledStepState(AdaptiveStepState):
    """State of `CalledStep` in one solve."""

    before: State

    def __init__(self, controller: CalledStep, start: SolveStart):
        super().__init__(controller, start)
        self.callbacks, self.shortest = controller.callbacks, controller.h_min

    def attempting(self, t0: Time, t1: Time, before: State) -> None:
        self.callbacks.call("step", t0, t1, before.point)

    def error_ratio(self, before: State, attempt: Attempt) -> Tensor:
        self.before = before
        return super().error_ratio(before, attempt)

    def accepts(self, t0: Time, t1: Time, attempt: Attempt, ratio: Tensor, value: float) -> bool:
        size = abs(number(t1 - t0))
        if size <= self.shortest * (1 + 1e-9) and math.isfinite(value):
            value = min(value, 1.0)
        accepted = super().accepts(t0, t1, attempt, ratio, value)
        if accepted:
            self._lengthen()
        self.callbacks.call("accept" if accepted else "reject", t0, t1, self.before.point)
        return accepted

    def _lengthen(self) -> None:
        """Let the next step be no shorter than the shortest."""
        if abs(self.h) < self.shortest:
            self.h = math.copysign(self.shortest, number(self.h))

    def _check_size(self, t: float, h: float, attempt: Attempt, ratio: float) -> None:
        if math.isfinite(ratio):
            self._lengthen()
        super()._check_size(t, h, attempt, ratio)
