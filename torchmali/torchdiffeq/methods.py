"""The names of methods and of gradient methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torchmali.solvers.runge_kutta as rk
from torchmali.errors import UnknownMethodError
from torchmali.gradients.aca import ACA
from torchmali.gradients.adjoint import Adjoint
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.gradients.naive import Naive
from torchmali.solvers.adams import Adams
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF
from torchmali.torchdiffeq.scipy_solver import Scipy

# fmt: off
FIXED: dict[str, Solver] = {  # of torchdiffeq, in fixed steps
    "euler": rk.Euler(), "midpoint": rk.Midpoint(), "heun2": rk.Heun(), "heun3": rk.Heun3(),
    "rk4": rk.RK4ThreeEighths(),
}
ADAPTIVE: dict[str, Solver] = {  # of torchdiffeq (tsit5: of its main branch), with tolerances
    "adaptive_heun": rk.HeunEuler(), "bosh3": rk.Bosh3(), "dopri5": rk.Dopri5(), "tsit5": rk.Tsit5(),
    "dopri8": rk.Dopri8(),
}
FEHLBERG2 = rk.Fehlberg2()  # its estimate is far below its error, so that it does not keep to the tolerance
OURS: dict[str, Solver] = {
    "alf": ALF(), "alf4": ALF(order=4), "alf4_5": ALF(order=4, evals=5), "alf6": ALF(order=6),
    "alf6_14": ALF(order=6, evals=14), "rk4_classic": rk.RK4(),
}
SOLVERS: dict[str, Solver] = {**OURS, **FIXED, **ADAPTIVE}
ADAMS: dict[str, Adams] = {
    "explicit_adams": Adams(), "implicit_adams": Adams(implicit=True), "fixed_adams": Adams(implicit=True),
}
METHODS: dict[str, Solver] = {**SOLVERS, "fehlberg2": FEHLBERG2, **ADAMS, "scipy_solver": Scipy()}
GRADIENTS: dict[str, GradientMethod] = {
    "naive": Naive(), "adjoint": Adjoint(), "seminorm": Adjoint(seminorm=True), "aca": ACA(), "mali": MALI(),
}
# fmt: on


def named(value: Any, known: Mapping[str, Any], base: type, what: str, default: Any) -> Any:
    """The object that a name stands for; an object stands for itself, and None for the default."""
    if value is None:
        return default
    if isinstance(value, base):
        return value
    if value in known:
        return known[value]
    raise UnknownMethodError(
        f"Unknown {what} {value!r}. Known: {', '.join(map(repr, known))}, or a {base.__name__} object."
    )


def solver_named(value: str | Solver | None, default: Solver) -> Solver:
    return named(value, METHODS, Solver, "method", default)


def gradient_named(value: str | GradientMethod | None) -> GradientMethod:
    return named(value, GRADIENTS, GradientMethod, "gradient method", GRADIENTS["naive"])
