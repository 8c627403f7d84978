"""Times at which f jumps, and the side of them on which f is evaluated.

Steps end on each jump. A solver evaluates f at t0 + node h, and where that is a jump, or rounds to one in the dtype in
which f receives t, f would belong to the wrong side for some stage of the step before or of the step behind. So times
are limited on their way to f: between two jumps f sees no time but those strictly between them. h and z know nothing of
these limits: no part of the time is left out.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmali.errors import InvalidTimesError, warn
from torchmali.state.vectors import Time, number


class Jumps:
    """Times at which f is discontinuous, and the limits of the times at which f is evaluated at present.

    times: increasing. below, above: the neighbours of each in the dtype in which f receives t.
    """

    def __init__(self, times: Sequence[float], dtype: torch.dtype):
        self.times = list(times)
        self.below, self.above = (_neighbours(times, dtype, end) for end in (-math.inf, math.inf))
        self.low, self.high = -math.inf, math.inf

    def enter(self, t0: Time, t1: Time) -> None:
        """Limit the times at which f is evaluated to those between t0 and the first jump behind it, towards t1."""
        a, b = number(t0), number(t1)
        i = bisect_right(self.times, a) if a < b else bisect_left(self.times, a)
        self.low = self.above[i - 1] if i > 0 else -math.inf
        self.high = self.below[i] if i < len(self.times) else math.inf

    def limited(self, t: Tensor) -> Tensor:
        """Return t within the limits. Its graph is kept: derivatives are those of a t that was moved there."""
        value = t.detach().clamp(self.low, self.high)
        return value + (t - t.detach()) if t.requires_grad else value

    def first_between(self, t0: Time, t1: Time) -> float | None:
        """Return the first jump strictly between t0 and t1, in the direction of t1."""
        a, b = number(t0), number(t1)
        i = bisect_right(self.times, a) if a < b else bisect_left(self.times, a) - 1
        if not 0 <= i < len(self.times):
            return None
        jump = self.times[i]
        return jump if min(a, b) < jump < max(a, b) else None

    def was_passed(self, t0: Time, t1: Time) -> bool:
        """Whether there is a jump between t0 and t1, or at t1. One at t0 does not count."""
        return self.first_between(t0, t1) is not None or (self.is_at(t1) and number(t0) != number(t1))

    def is_at(self, t: Time) -> bool:
        """Whether t is a jump."""
        i = bisect_left(self.times, number(t))
        return i < len(self.times) and self.times[i] == number(t)

    def merged_with(self, times: Sequence[float]) -> list[float]:
        """Return these times and the jumps between them, in the order of the times."""
        low, high = sorted((times[0], times[-1]))
        every = {*times, *(jump for jump in self.times if low < jump < high)}
        return sorted(every, reverse=times[0] > times[-1])


def _neighbours(times: Sequence[float], dtype: torch.dtype, end: float) -> list[float]:
    """Return the next number in the direction of `end` for each time; beside zero the first that is not subnormal."""
    t = torch.tensor(times, dtype=torch.float64).to(dtype)
    found, tiny = torch.nextafter(t, torch.full_like(t, end)).tolist(), torch.finfo(dtype).tiny
    return [x if abs(x) >= tiny else math.copysign(tiny, end) for x in found]


def checked_jumps(jumps: Any, times: Sequence[float], dtype: torch.dtype) -> Jumps | None:
    """Return the jumps between the first and the last time, both included, each once; None if there are none.

    dtype: that in which f receives t. A jump that f cannot tell from an output time counts as the output time.
    """
    values = jump_times(jumps)
    rounded, outputs = (torch.tensor(x, dtype=torch.float64).to(dtype).tolist() for x in (values, times))
    known = dict(zip(outputs, times, strict=True))
    unique = {x: known.get(x, jump) for x, jump in zip(rounded, values, strict=True)}
    low, high = sorted((times[0], times[-1]))
    inside = sorted(jump for jump in unique.values() if low <= jump <= high)
    return Jumps(inside, dtype) if inside else None


def jump_times(jumps: Any) -> list[float]:
    """Return jumps as numbers; raise if they are not a sequence of finite times."""
    if isinstance(jumps, Tensor) and jumps.requires_grad:
        warn("jumps get no gradient, but require one. Give jumps.detach().")
    try:
        t = torch.as_tensor(jumps, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        t = None
    if t is None or t.ndim != 1:
        got = type(jumps).__name__ if t is None else f"shape {tuple(t.shape)}"
        raise InvalidTimesError(f"jumps must be a sequence of times, as in jumps=[0.5, 1.0]; got {got}.")
    values = t.detach().tolist()
    i = next((i for i, x in enumerate(values) if not math.isfinite(x)), -1)
    if i >= 0:
        raise InvalidTimesError(f"jumps must be finite; got jumps[{i}] = {values[i]}. Leave it out.")
    return values
