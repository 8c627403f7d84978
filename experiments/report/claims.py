"""Claims of the paper, judged, and the rules by which they are judged.

A chapter has one function per sentence of the checklist. It returns None where the records cannot say anything about
it. Rules are two-sided and take all seeds. What we ask of the runs beyond the paper is a `Check`, not a claim.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from experiments.report.checklist import BY_ID

HOLDS, IN_PART, NOT, INCONCLUSIVE = "holds", "holds in part", "does not hold here", "inconclusive"
NOT_TESTABLE, NOT_RUN = "not testable here", "not run yet"
VERDICTS = (HOLDS, IN_PART, NOT, INCONCLUSIVE, NOT_TESTABLE, NOT_RUN)


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper and what was found. id: of the checklist. here: the data that it was tried on."""

    id: str
    verdict: str
    numbers: str
    rule: str
    records: Sequence[str] = field(default=())
    here: str = ""

    def __post_init__(self):
        assert self.verdict in VERDICTS, self.verdict
        assert self.id in BY_ID, self.id

    @property
    def text(self) -> str:
        return BY_ID[self.id].words

    @property
    def where(self) -> str:
        return BY_ID[self.id].where + (f"; here {self.here}" if self.here else "")


@dataclass(frozen=True)
class Check:
    """A floor that a run must reach, or something that the paper does not say. verdict: kept or broken."""

    where: str
    text: str
    verdict: str
    numbers: str
    records: Sequence[str] = field(default=())


Finding = Claim | Check


def check(where: str, text: str, parts: Sequence[bool], numbers: str, records: Sequence[str]) -> Check:
    """Check something that the paper does not claim; all parts must hold."""
    return Check(where, text, "kept" if parts and all(parts) else "broken", numbers, records)


def verdict(parts: Sequence[bool | str]) -> str:
    """Judge a claim by its parts, which are true, false, or verdicts.

    Parts that hold beside others that do not: in part. One that does not hold, and none that does: it does not.
    """
    words = [part if isinstance(part, str) else (HOLDS if part else NOT) for part in parts]
    if not words or set(words) == {NOT_TESTABLE}:
        return NOT_TESTABLE
    words = [word for word in words if word != NOT_TESTABLE]
    if len(set(words)) == 1:
        return words[0]
    if HOLDS in words or IN_PART in words:
        return IN_PART
    return NOT


def made(*found: Any) -> list[Any]:
    """Keep what the records say something about."""
    return [one for one in found if one is not None]


# Means over seeds


@dataclass(frozen=True)
class Difference:
    """Difference of two means over seeds, and its standard error; NaN: not known from one seed.

    A mean of NaN with a known error: a run diverged.
    """

    mean: float
    error: float

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return "not a number"
        error = "unknown" if math.isnan(self.error) else f"{self.error:.2g}"
        return f"{self.mean:+.3g} (standard error {error})"


def difference(one: Mapping[int, float], other: Mapping[int, float], paired: bool = False) -> Difference:
    """Compare two methods by their values over seeds.

    paired: the runs with one seed differ in nothing but the method, to the last bit; then seeds that both have are
    compared one by one. Convolutions give other bits on other processors, and training amplifies that: equal seeds do
    not pair their runs.
    """
    if not all(map(math.isfinite, (*one.values(), *other.values()))):
        return Difference(math.nan, 0.0)
    if paired:
        both = [one[seed] - other[seed] for seed in one.keys() & other.keys()]
        if not both:
            return Difference(math.nan, math.nan)
        error = statistics.stdev(both) / math.sqrt(len(both)) if len(both) > 1 else math.nan
        return Difference(statistics.fmean(both), error)
    values = list(one.values()), list(other.values())
    variances = [statistics.variance(x) / len(x) if len(x) > 1 else math.nan for x in values]
    return Difference(statistics.fmean(values[0]) - statistics.fmean(values[1]), math.sqrt(sum(variances)))


def similar(found: Difference, limit: float) -> str:
    """Judge "comparable": apart by no more than the limit, in either direction."""
    size, noise = abs(found.mean), 2 * found.error
    if math.isnan(size):
        return NOT_TESTABLE if math.isnan(noise) else NOT
    if math.isnan(noise) or limit < noise:
        return NOT if not math.isnan(noise) and size > limit + noise else INCONCLUSIVE
    return HOLDS if size <= limit else NOT


def greater(found: Difference, limit: float = 0.0) -> str:
    """Judge "outperforms": more by the limit, and by two standard errors."""
    noise = 2 * found.error
    if math.isnan(found.mean):
        return NOT_TESTABLE if math.isnan(noise) else NOT
    if math.isnan(noise):
        return INCONCLUSIVE
    if found.mean > max(limit, noise):
        return HOLDS
    return NOT if limit >= noise or found.mean + noise < limit else INCONCLUSIVE


SIMILAR = "comparable: apart by {limit}, in either direction; inconclusive where that is below two standard errors"
GREATER = "outperforms: by {limit} and by two standard errors; inconclusive where the limit is below these"
