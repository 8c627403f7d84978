"""Neural ODEs with exact discrete gradients, in memory that does not grow with the number of steps."""

from __future__ import annotations

import warnings
from typing import Any

import torchmali.errors as errors
from torchmali.audit import Audit, audit
from torchmali.code import Code, solve_back
from torchmali.controllers import (
    AdaptiveControllerState,
    AdaptiveStep,
    ControllerState,
    FixedStep,
    SolveStart,
    StepController,
    rms_norm,
)
from torchmali.errors import (
    DoubleBackwardError,
    EventNotFoundError,
    GrazingEventError,
    IncompatibleError,
    InvalidFieldError,
    InvalidOptionError,
    InvalidStateError,
    InvalidTimesError,
    NonFiniteError,
    NonRepeatableFieldError,
    SlopeMismatchError,
    SolverError,
    SolverWarning,
    StepLimitError,
    StepUnderflowError,
    UnknownMethodError,
)
from torchmali.events import Event
from torchmali.gradients.aca import ACA
from torchmali.gradients.adjoint import Adjoint
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.gradients.naive import Naive
from torchmali.outputs.base import Outputs, Pulled
from torchmali.solution import Solution, Stats
from torchmali.solve import solve
from torchmali.solvers.adams import Adams
from torchmali.solvers.base import Attempt, ReversibleSolver, Solver
from torchmali.solvers.coupled import Reversible
from torchmali.solvers.leapfrog import ALF, ErrorEstimate, Leapfrog, leapfrog_for
from torchmali.solvers.runge_kutta import (
    RK4,
    Bosh3,
    Dopri5,
    Dopri8,
    Euler,
    Fehlberg2,
    Heun,
    Heun3,
    HeunEuler,
    Midpoint,
    RK4ThreeEighths,
    RungeKutta,
    Tableau,
    Tsit5,
)
from torchmali.torchdiffeq import odeint, odeint_adjoint, odeint_dense, odeint_event

__version__ = "0.1.0.dev0"

__all__ = [
    "ACA",
    "ALF",
    "Adams",
    "AdaptiveControllerState",
    "AdaptiveStep",
    "Adjoint",
    "Attempt",
    "Audit",
    "Bosh3",
    "Code",
    "ControllerState",
    "Dopri5",
    "Dopri8",
    "DoubleBackwardError",
    "ErrorEstimate",
    "Euler",
    "Event",
    "EventNotFoundError",
    "Fehlberg2",
    "FixedStep",
    "GradientMethod",
    "GrazingEventError",
    "Heun",
    "Heun3",
    "HeunEuler",
    "IncompatibleError",
    "InvalidFieldError",
    "InvalidOptionError",
    "InvalidStateError",
    "InvalidTimesError",
    "Leapfrog",
    "MALI",
    "Midpoint",
    "Naive",
    "NonFiniteError",
    "NonRepeatableFieldError",
    "Outputs",
    "Pulled",
    "RK4",
    "RK4ThreeEighths",
    "Reversible",
    "ReversibleSolver",
    "RungeKutta",
    "SlopeMismatchError",
    "Solution",
    "SolveStart",
    "Solver",
    "SolverError",
    "SolverWarning",
    "Stats",
    "StepController",
    "StepLimitError",
    "StepUnderflowError",
    "Tableau",
    "Tsit5",
    "UnknownMethodError",
    "audit",
    "leapfrog_for",
    "odeint",
    "odeint_adjoint",
    "odeint_dense",
    "odeint_event",
    "rms_norm",
    "solve",
    "solve_back",
]


def __getattr__(name: str) -> Any:
    """The errors under the names of release 0.1, without "Error" at the end. They will go with the release after."""
    error = getattr(errors, f"{name}Error", None)
    if error is None or name == "Solver":
        raise AttributeError(f"module 'torchmali' has no attribute {name!r}")
    warnings.warn(f"torchmali.{name} is called torchmali.{name}Error now.", DeprecationWarning, stacklevel=2)
    return error
