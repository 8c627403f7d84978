"""Neural ODEs with gradients that are exact for the discretisation, in memory that does not grow
with the steps.
"""

from torchmali.controllers import AdaptiveStep, FixedStep, rms_norm
from torchmali.gradients.aca import ACA
from torchmali.gradients.adjoint import Adjoint
from torchmali.gradients.mali import MALI
from torchmali.gradients.naive import Naive
from torchmali.odeint import odeint, odeint_adjoint, solve
from torchmali.solution import (
    DoubleBackward,
    Incompatible,
    InvalidField,
    InvalidOption,
    InvalidState,
    InvalidTimes,
    NonFinite,
    Solution,
    SolverError,
    SolverWarning,
    Stats,
    StepLimit,
    StepUnderflow,
    UnknownMethod,
)
from torchmali.solvers.leapfrog import ALF
from torchmali.solvers.runge_kutta import (
    RK4,
    Bosh3,
    Dopri5,
    Dopri8,
    Euler,
    Heun,
    Heun3,
    HeunEuler,
    Midpoint,
    RK4ThreeEighths,
    Tsit5,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "ACA",
    "ALF",
    "MALI",
    "RK4",
    "AdaptiveStep",
    "Adjoint",
    "Bosh3",
    "Dopri5",
    "Dopri8",
    "DoubleBackward",
    "Euler",
    "FixedStep",
    "Heun",
    "Heun3",
    "HeunEuler",
    "Incompatible",
    "InvalidField",
    "InvalidOption",
    "InvalidState",
    "InvalidTimes",
    "Midpoint",
    "Naive",
    "NonFinite",
    "RK4ThreeEighths",
    "Solution",
    "SolverError",
    "SolverWarning",
    "Stats",
    "StepLimit",
    "StepUnderflow",
    "Tsit5",
    "UnknownMethod",
    "odeint",
    "odeint_adjoint",
    "rms_norm",
    "solve",
]
