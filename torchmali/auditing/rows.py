"""Methods that are compared, and the row of results of each."""

from __future__ import annotations

import math
from typing import NamedTuple

from torchmali.auditing.timing import Band, compare
from torchmali.controllers import StepController
from torchmali.gradients.aca import ACA
from torchmali.gradients.adjoint import Adjoint
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.gradients.naive import Naive
from torchmali.solution import Stats, short_repr
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF
from torchmali.solvers.runge_kutta import Dopri5


class Method(NamedTuple):
    """A solver, a controller and a gradient. controller=None: AdaptiveStep with the rtol and atol of the audit."""

    solver: Solver
    controller: StepController | None
    gradient: GradientMethod

    def __str__(self) -> str:
        return " + ".join(short_repr(x).removesuffix("()") for x in (self.solver, self.gradient))


METHODS: dict[str, Method] = {
    "naive": Method(Dopri5(), None, Naive()),
    "aca": Method(Dopri5(), None, ACA()),
    "adjoint": Method(Dopri5(), None, Adjoint()),
    "seminorm": Method(Dopri5(), None, Adjoint(seminorm=True)),
    "mali": Method(ALF(), None, MALI()),
    "mali4": Method(ALF(order=4), None, MALI()),
    "mali6": Method(ALF(order=6), None, MALI()),
    "exact": Method(ALF(), None, MALI(exact=True)),
}


class Row(NamedTuple):
    """Results of a method. A method that failed or was not measured has infinite numbers and a reason."""

    name: str
    method: Method
    error: float = math.inf  # |g - reference| / |reference|, 2-norm over all gradients; nan: there is no reference
    peak_bytes: float = math.inf  # of live tensors, forward + backward
    seconds: float = math.inf  # forward + backward, median of `times`
    stats: Stats = Stats()
    notes: tuple[str, ...] = ()  # its warnings
    failure: str = ""
    unmeasured: str = ""  # the reason, if it was not measured
    times: tuple[float, ...] = ()  # by round; all rows that were in a round ran one after the other

    @property
    def is_measured(self) -> bool:
        return not self.failure and not self.unmeasured

    def time_over(self, other: Row) -> Band:
        """Return the band of the ratio of this row's time to another row's time."""
        return compare(self.times or (self.seconds,), other.times or (other.seconds,))
