"""Step controllers for measurements: one that writes its trials down, one with a fault of the paper's reference code.

The only module of the experiments that implements torchmali's protocol for controllers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

import torchmali as tm
from torchmali.engine import AdaptiveStepState, SolveStart, State, Structure, Time, number


class Trial(NamedTuple):
    """An attempted step, and the first component of z at both ends."""

    t0: float
    z0: float
    t1: float
    z1: float
    error: float  # as estimated: z1 minus the end of Euler's step from the same (z, v)
    accepted: bool


@dataclass(frozen=True)
class Recorded(tm.StepController):
    """A controller whose trials are written down."""

    controller: tm.StepController
    trials: list[Trial] = field(default_factory=list)
    adaptive = True

    def ends_on_outputs(self, solver: tm.Solver) -> bool:
        return self.controller.ends_on_outputs(solver)

    def bind(self, structure: Structure) -> Recorded:
        return replace(self, controller=self.controller.bind(structure))

    def begin(self, start: SolveStart) -> tm.ControllerState:
        inner = self.controller.begin(start)
        assert isinstance(inner, tm.AdaptiveControllerState)
        return _RecordedState(inner, self.trials)


class _RecordedState(tm.AdaptiveControllerState):
    def __init__(self, inner: tm.AdaptiveControllerState, trials: list[Trial]):
        self.inner, self.trials, self.controlled = inner, trials, inner.controlled
        self.z0 = math.nan

    def next_time(self, t: Time, target: Time) -> Time:
        return self.inner.next_time(t, target)

    def error_ratio(self, before: State, attempt: tm.Attempt) -> Tensor:
        self.z0 = float(before.point[0][0])
        return self.inner.error_ratio(before, attempt)

    def accepts(self, t0: Time, t1: Time, attempt: tm.Attempt, ratio: Tensor, value: float) -> bool:
        accepted = self.inner.accepts(t0, t1, attempt, ratio, value)
        assert attempt.error is not None
        z1, error = (float(leaf[0][0]) for leaf in (attempt.state.point, attempt.error))
        self.trials.append(Trial(number(t0), self.z0, number(t1), z1, error, accepted))
        self.n_rejected = self.inner.n_rejected
        return accepted


@dataclass(frozen=True)
class UnguardedLastStep(tm.AdaptiveStep):
    """Adaptive steps whose last one, cut off at the end, is accepted whatever its error: as in the reference code."""

    safety: float = 0.9

    def begin(self, start: SolveStart) -> tm.ControllerState:
        return _UnguardedState(self, start)


class _UnguardedState(AdaptiveStepState):
    def next_time(self, t: Time, target: Time) -> Time:
        return target if abs(target - t) <= abs(self.h) else t + self.h

    def accepts(self, t0: Time, t1: Time, attempt: tm.Attempt, ratio: Tensor, value: float) -> bool:
        return t1 is self.t_end or super().accepts(t0, t1, attempt, ratio, value)


def reference_end(h: float) -> float:
    """Return the time at which the reference code ends a solve over [0, 1]: after round(1 / h) whole steps."""
    return round(1 / h) * h
