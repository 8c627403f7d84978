"""Rules of the advice, and the sentences that follow from the rows.

The advice must not change from run to run. So an accuracy is claimed only where the reference can resolve it, a method
is called faster only where interleaved runs show it, and numbers in the sentences are errors, bytes and counts, which
repeat; never times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torchmali.auditing.rows import Row
from torchmali.auditing.show import as_html, as_text, brief, listed, shown_error, size
from torchmali.controllers import FixedStep
from torchmali.gradients.aca import ACA
from torchmali.gradients.adjoint import Adjoint
from torchmali.gradients.mali import TELL_LIMIT
from torchmali.gradients.naive import Naive

SMALL = 10e6  # bytes: a peak that fits anywhere
NOTABLE = 3  # a factor between two errors, or a number of renewals, that is worth a remark
YOURS = "yours"  # the row of a module's own solver, controller and gradient


@dataclass(frozen=True, repr=False)
class Audit:
    """Result of an audit: prints as a table; `rows`, `best`, `tied`, `advice` and audit["mali"].error can be read."""

    rows: list[Row]
    tolerance: float  # relative, as asked for: rtol, or atol if rtol is 0
    reference: str  # how the gradient that all are compared with was computed
    uncertainty: float  # relative error of the reference itself; infinite: there is no reference
    is_cut_short: bool = False  # the reference would be better if there had been more time
    max_seconds: float = math.inf
    eps: float = 0.0  # of the state's dtype

    def __getitem__(self, name: str) -> Row:
        return {row.name: row for row in self.rows}[name]

    @property
    def good(self) -> list[Row]:
        """Rows that are accurate enough: within the tolerance, whatever the error of the reference is."""
        return [row for row in self.rows if row.error + self.uncertainty <= self.tolerance]

    @property
    def lean(self) -> list[Row]:
        """Good rows that take little memory, or at most twice the memory of the leanest good row."""
        most = max(SMALL, 2 * min((row.peak_bytes for row in self.good), default=0.0))
        return [row for row in self.good if row.peak_bytes <= most]

    @property
    def tied(self) -> list[Row]:
        """The fastest lean row, and the lean rows that are not clearly slower."""
        fastest = min(self.lean, key=lambda row: row.seconds, default=None)
        return [row for row in self.lean if fastest and (row is fastest or not row.time_over(fastest).is_slower)]

    @property
    def best(self) -> Row | None:
        """The fastest lean row; among rows that tie, the one with the least memory, then the first in the table."""
        return min(self.tied, key=lambda row: row.peak_bytes, default=None)

    @property
    def advice(self) -> str:
        """One sentence that follows from the rows."""
        best = self.best
        choice = self._no_choice() if best is None else self._choice(best)
        return "; ".join([*choice, *self._remarks()]) + "."

    def _choice(self, best: Row) -> Iterator[str]:
        tied, good = self.tied, self.good
        rank = "the fastest that is accurate enough" if len(tied) == 1 else "accurate enough"
        rank += "" if len(self.lean) == len(good) else " and lean"
        choice = f"Use {best.name} ({best.method}), {rank}: error {self._error(best)}, {size(best.peak_bytes)}"
        leanest, largest = (find(good, key=lambda row: row.peak_bytes) for find in (min, max))
        if best.peak_bytes > 2 * leanest.peak_bytes:
            less = f"{leanest.name} takes {size(leanest.peak_bytes)} at error {self._error(leanest)}"
            choice += f", which fits anywhere; should it grow, {less}"
        yield choice
        if len(tied) > 1:
            is_alone = [row.peak_bytes for row in tied].count(best.peak_bytes) == 1
            why = f"{best.name} takes the least memory" + ("" if is_alone else " and comes first")
            yield f"{listed([row.name for row in tied])} tie, they take the same time within noise, and {why}"
        if largest not in self.lean:
            band, memory = largest.time_over(best), largest.peak_bytes / best.peak_bytes
            slower = "and more time" if band.is_slower else "and ties in time"
            time = "but less time" if band.is_faster else slower
            yield f"{largest.name} takes {memory:.1f} times the memory {time}"

    def _no_choice(self) -> Iterator[str]:
        none = "No method can be advised"
        measured = [row for row in self.rows if row.is_measured]
        if not measured:
            failed = all(row.failure for row in self.rows)
            late = (
                f"none of those that can be used was measured within {self._budget}; raise it, or audit fewer samples"
            )
            yield f"{none}: {'all failed' if failed else late}"
        elif math.isinf(self.uncertainty):
            late = f" within {self._budget}; raise it, or audit fewer samples" if self.is_cut_short else ""
            yield f"{none}: there is no reference gradient{late}"
        elif not self.uncertainty <= self.tolerance:
            only = f"the reference itself is only good to {brief(self.uncertainty)}"
            if self.is_cut_short:
                yield f"{none}: {only} within {self._budget}; raise it, or audit fewer samples"
            elif self.uncertainty > 0.1:
                yield f"{none}: gradients of this problem depend on the solver's rounding, {only}"
            else:
                yield f"{none}: {only}, and the tolerance is {brief(self.tolerance)}"
        else:
            closest = min(measured, key=lambda row: max(row.error, self.uncertainty))
            found = f"{closest.name} is closest with error {self._error(closest)}"
            yield f"No method is accurate to {brief(self.tolerance)}, the tolerance asked for: {found}"
            yield self._remedy(closest)

    def _remedy(self, row: Row) -> str:
        """Suggest how to meet the tolerance, if errors scale with the tolerances, or with a power of the step."""
        excess = (row.error + self.uncertainty) / self.tolerance
        if isinstance(row.method.controller, FixedStep):
            return f"take steps about {_rounded_up(excess ** (1 / row.method.solver.order)):g} times shorter"
        factor = _rounded_up(excess)
        more = " and use a float64 state" if self.tolerance / factor < 100 * self.eps else ""
        return f"tighten rtol and atol about {factor:g} times{more}"

    def _remarks(self) -> Iterator[str]:
        """Remarks on the problem that follow from the rows."""
        yield from self._inexact_gradients()
        yours = next((row for row in self.rows if row.name == YOURS and row.is_measured), None)
        if self.best and yours and yours.error - self.uncertainty > self.tolerance:
            yield f"{YOURS} has error {self._error(yours)}, above the tolerance of {brief(self.tolerance)}"
        renewed = max(self.rows, key=lambda row: row.stats.n_refreshes)
        if renewed.stats.n_refreshes >= NOTABLE:
            yield f"f contracts, {renewed.name} renewed v {renewed.stats.n_refreshes} times"
        yield from self._drift()
        late = [row.name for row in self.rows if row.unmeasured]
        if late and any(row.is_measured for row in self.rows):
            yield f"{listed(late)} {'was' if len(late) == 1 else 'were'} not measured within {self._budget}"

    def _inexact_gradients(self) -> Iterator[str]:
        """Compare the adjoint with an exact gradient of the same solver, where the reference can tell them apart."""
        known = [row for row in self.rows if NOTABLE * self.uncertainty < row.error < 0.1]
        exact = {row.method.solver: row for row in known if isinstance(row.method.gradient, (ACA, Naive))}
        for row in self.rows:
            other = exact.get(row.method.solver) if isinstance(row.method.gradient, Adjoint) else None
            if other and max(self.tolerance, NOTABLE * other.error) < row.error < math.inf:
                yield f"{row.name} is {row.error / other.error:.0f} times less accurate than {other.name}"

    def _drift(self) -> Iterator[str]:
        drifted = max(self.rows, key=lambda row: row.stats.reconstruction_error or 0.0)
        drift, again = drifted.stats.reconstruction_error or 0.0, drifted.stats.n_reruns
        if drift > TELL_LIMIT or again:
            more = f" and solved {again} of its segments again" if again else ""
            bits = [row.name for row in self.good if getattr(row.method.gradient, "exact", False)]
            remedy = f", where {bits[0]} rebuilds every bit" if bits else ""
            yield f"round-off grew, {drifted.name} rebuilt its states to {brief(drift)} only{more}{remedy}"

    def _error(self, row: Row) -> str:
        return shown_error(row.error, self.uncertainty)

    @property
    def _budget(self) -> str:
        return f"max_seconds = {self.max_seconds:g}"

    @property
    def caption(self) -> str:
        marked = any(row.error < self.uncertainty < math.inf for row in self.rows)
        below = " <: below what the reference can tell." if marked else ""
        return (
            f"error: relative, 2-norm over all gradients; up to {brief(self.tolerance)}, the tolerance asked for, is "
            f"accurate enough.{below} reference: {self.reference}. peak: bytes of live tensors. f fwd, f bwd: "
            "evaluations of f. time: of both passes. rebuilt: relative error of the states that MALI rebuilt. renewed: "
            "how often v <- f."
        )

    def __str__(self) -> str:
        return as_text(self.rows, self.uncertainty, self.caption, self.advice)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return as_html(self.rows, self.uncertainty, self.caption, self.advice)


def _rounded_up(factor: float) -> float:
    """Round a factor up to one significant digit, and to two at least."""
    unit = 10.0 ** math.floor(math.log10(max(2.0, factor)))
    return max(2.0, math.ceil(factor / unit - 0.05) * unit)
