"""Comparison of the times of two methods, from interleaved runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MARGIN = 1.1  # a smaller factor between two times does not matter for the choice of a method
DOUBT = 0.01  # the probability that a band of eight or more ratios misses their median
SPARE = {1: 3.0, 2: 2.0, 3: 1.5, 5: 1.2}  # least number of ratios: factor that widens the band, below eight


class Band(NamedTuple):
    """An interval that holds the median of the ratios of two times."""

    low: float
    high: float

    @property
    def is_slower(self) -> bool:
        return self.low > MARGIN

    @property
    def is_faster(self) -> bool:
        return self.high < 1 / MARGIN

    @property
    def is_settled(self) -> bool:
        """Whether more runs would change nothing: clearly faster, clearly slower, or the same within MARGIN."""
        is_same = self.low >= 1 / MARGIN and self.high <= MARGIN
        return self.is_slower or self.is_faster or is_same


def compare(times: Sequence[float], others: Sequence[float]) -> Band:
    """Return the band of times / others. Runs of equal index ran one after the other, under equal conditions.

    With n ratios, the number of those below their median is binomial whatever their distribution, so that a pair of
    order statistics holds the median with probability 1 - DOUBT. There is no such pair for n < 8: then the band
    reaches from the smallest to the largest ratio, and is widened by SPARE.
    """
    ratios = sorted(a / b for a, b in zip(times, others, strict=False))
    n = len(ratios)
    if not n or not all(map(math.isfinite, ratios)):
        return Band(0.0, math.inf)
    k, missed = 0, 2 * 0.5**n
    while missed <= DOUBT:
        k += 1
        missed += 2 * math.comb(n, k) * 0.5**n
    if k:
        return Band(ratios[k - 1], ratios[n - k])
    spare = SPARE[max(least for least in SPARE if least <= n)]
    return Band(ratios[0] / spare, ratios[-1] * spare)


def median(times: Sequence[float]) -> float:
    ordered, n = sorted(times), len(times)
    return 0.5 * (ordered[(n - 1) // 2] + ordered[n // 2]) if n else math.inf
