"""What the paper's reference code does otherwise than it should; for comparisons with its published numbers alone."""

from __future__ import annotations

from dataclasses import dataclass

from torchmali.controllers import AdaptiveStep, Pace, Start, _AdaptivePace
from torchmali.solvers.base import Attempt
from torchmali.state import Time


@dataclass(frozen=True)
class UnguardedLastStep(AdaptiveStep):
    """What is left when a step would pass the end is done in one step whose error nobody looks at."""

    def pace(self, start: Start) -> Pace:
        return _UnguardedPace(self, start)


class _UnguardedPace(_AdaptivePace):
    def next(self, t: Time, target: Time) -> Time:
        return target if abs(target - t) <= abs(self.h) else t + self.h

    def accepts(self, t0: Time, t1: Time, attempt: Attempt, ratio, value: float) -> bool:
        return t1 is self.t_end or super().accepts(t0, t1, attempt, ratio, value)


def overshot(h: float) -> float:
    """Where a solve over [0, 1] with fixed steps ends: after round(1 / h) whole ones."""
    return round(1 / h) * h
