"""What a solve gives back, and the ways in which it can fail."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor


@dataclass
class Stats:
    """Counts of one solve. The backward fields are filled in by the latest backward pass (Naive leaves them at 0)."""

    n_steps: int = 0
    n_rejected: int = 0
    n_evals_forward: int = 0
    n_evals_backward: int = 0
    n_vjps: int = 0
    h_min: float = float("nan")  # sizes of accepted steps
    h_max: float = float("nan")
    reconstruction_error: float | None = None  # MALI: |psi^-N(z_N) - z0| / |z0|, the worst leaf's


class Solution(NamedTuple):
    """Result of `solve`: y has y0's structure, each leaf of shape (len(t), *leaf.shape)."""

    t: Tensor
    y: Any
    stats: Stats


class SolverError(Exception):
    """Base of every error that torchmali raises on purpose."""


class InvalidOption(SolverError, ValueError):
    """An option of a solver, controller or gradient method is out of its range, or unknown."""


def require(holds: bool, message: str, error: type[SolverError] = InvalidOption) -> None:
    if not holds:
        raise error(message)


class UnknownMethod(SolverError, ValueError):
    """A name that stands for no solver or gradient method."""


class InvalidState(SolverError, TypeError):
    """y0 is not made of float32 or float64 tensors."""


class InvalidTimes(SolverError, ValueError):
    """t has fewer than two times, repeats one, changes direction, or is not finite."""


class InvalidField(SolverError, TypeError):
    """f did not return a slope for each leaf of the state."""


class Incompatible(SolverError, TypeError):
    """A solver, controller and gradient method that cannot work together."""


class NonFinite(SolverError, RuntimeError):
    """The solution left the finite numbers."""


class StepLimit(SolverError, RuntimeError):
    """The controller used up its steps before the end time."""


class StepUnderflow(SolverError, RuntimeError):
    """The tolerance asks for steps too small to move the time."""


class DoubleBackward(SolverError, RuntimeError):
    """Second derivatives were asked of a method that gives first ones only."""


class SolverWarning(UserWarning):
    """The solve went on, but something is probably not as it was meant, or less exact than it should be."""


def warn(message: str) -> None:
    """Warn at the line of the user that led here."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torchmali.", "torch.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, SolverWarning, stacklevel=level)
