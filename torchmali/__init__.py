"""Neural ODEs with exact discrete gradients, in memory that does not grow with the number of steps."""

# ruff: noqa: I001 (names side by side rather than one to a line)
# fmt: off
from torchmali.audit import Audit, audit
from torchmali.code import Code, solve_back
from torchmali.controllers import AdaptiveStep, FixedStep, StepController, rms_norm
from torchmali.gradients.aca import ACA
from torchmali.gradients.adjoint import Adjoint
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.gradients.naive import Naive
from torchmali.odeint import odeint, odeint_adjoint, solve
from torchmali.solution import (
    DoubleBackward, Incompatible, InvalidField, InvalidOption, InvalidState, InvalidTimes, NonFinite,
    NonRepeatableField, Solution, SolverError, SolverWarning, Stats, StepLimit, StepUnderflow, UnknownMethod,
)
from torchmali.solvers.base import ReversibleSolver, Solver
from torchmali.solvers.coupled import Reversible
from torchmali.solvers.leapfrog import ALF
from torchmali.solvers.runge_kutta import (
    RK4, Bosh3, Dopri5, Dopri8, Euler, Heun, Heun3, HeunEuler, Midpoint, RK4ThreeEighths, Tsit5,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "ACA", "ALF", "MALI", "RK4", "AdaptiveStep", "Adjoint", "Audit", "Bosh3", "Code", "Dopri5", "Dopri8",
    "DoubleBackward", "Euler", "FixedStep", "GradientMethod", "Heun", "Heun3", "HeunEuler", "Incompatible",
    "InvalidField", "InvalidOption", "InvalidState", "InvalidTimes", "Midpoint", "Naive", "NonFinite",
    "NonRepeatableField", "RK4ThreeEighths", "Reversible", "ReversibleSolver", "Solution", "Solver", "SolverError",
    "SolverWarning", "Stats", "StepController", "StepLimit", "StepUnderflow", "Tsit5", "UnknownMethod", "audit",
    "odeint", "odeint_adjoint", "rms_norm", "solve", "solve_back",
]
