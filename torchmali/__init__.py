"""Neural ODEs with exact discrete gradients, in memory that does not grow with the number of steps.

A public name is loaded, with all that it needs, when it is first used: `import torchmali` alone costs next to nothing.
Its types are in __init__.pyi.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

__version__ = "0.1.0.dev0"

PUBLIC: dict[str, tuple[str, ...]] = {  # a module, and its names
    "auditing": ("Audit", "audit"),
    "code": ("Code", "solve_back"),
    "controllers": (
        "AdaptiveControllerState",
        "AdaptiveStep",
        "ControllerState",
        "FixedStep",
        "SolveStart",
        "StepController",
        "rms_norm",
    ),
    "errors": (
        "DoubleBackwardError",
        "EventNotFoundError",
        "GrazingEventError",
        "IncompatibleError",
        "InvalidFieldError",
        "InvalidOptionError",
        "InvalidStateError",
        "InvalidTimesError",
        "NonFiniteError",
        "NonRepeatableFieldError",
        "SlopeMismatchError",
        "SolverError",
        "SolverWarning",
        "StepLimitError",
        "StepUnderflowError",
        "UnknownMethodError",
    ),
    "events": ("Event",),
    "gradients.aca": ("ACA",),
    "gradients.adjoint": ("Adjoint",),
    "gradients.base": ("GradientMethod",),
    "gradients.mali": ("MALI",),
    "gradients.naive": ("Naive",),
    "outputs.base": ("Outputs", "Pulled"),
    "solution": ("Solution", "Stats"),
    "solvers.adams": ("Adams",),
    "solvers.base": ("Attempt", "ReversibleSolver", "Solver"),
    "solvers.coupled": ("Reversible",),
    "solvers.leapfrog": ("ALF", "ErrorEstimate", "Leapfrog", "leapfrog_for"),
    "solvers.runge_kutta": (
        "Bosh3",
        "Dopri5",
        "Dopri8",
        "Euler",
        "Fehlberg2",
        "Heun",
        "Heun3",
        "HeunEuler",
        "Midpoint",
        "RK4",
        "RK4ThreeEighths",
        "RungeKutta",
        "Tableau",
        "Tsit5",
    ),
    "solving": ("solve",),
    "torchdiffeq": ("odeint", "odeint_adjoint", "odeint_dense", "odeint_event"),
}
MODULES = ("adapters", "engine", "errors", "flow", "nn", "torchdiffeq")
HOMES = {name: module for module, names in PUBLIC.items() for name in names}

__all__ = sorted(HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Load a public name or module."""
    if name in MODULES:
        return importlib.import_module(f"torchmali.{name}")
    if name not in HOMES:
        return _renamed_error(name)
    found = globals()[name] = getattr(importlib.import_module(f"torchmali.{HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES, *MODULES})


def _renamed_error(name: str) -> Any:
    """The errors under the names of release 0.1, without "Error" at the end. They will go with the release after."""
    if f"{name}Error" not in PUBLIC["errors"] or name == "Solver":
        raise AttributeError(f"module 'torchmali' has no attribute {name!r}")
    warnings.warn(f"torchmali.{name} is called torchmali.{name}Error now.", DeprecationWarning, stacklevel=3)
    return __getattr__(f"{name}Error")
