"""What a solve gives back, and the ways in which it can fail."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor

TELL_LIMIT = 1e-3  # a gradient wrong by more than about this is warned about


@dataclass
class Stats:
    """Counts of one solve. The backward fields are filled in by the latest backward pass (Naive leaves them at 0)."""

    n_steps: int = 0
    n_rejected: int = 0
    n_refreshes: int = 0  # times v was renewed: v <- f(t, z)
    n_checkpoints: int = 0  # states kept for the backward pass, beside those at refreshes
    n_rescales: int = 0  # exact mode: times the integer grid moved
    n_reruns: int = 0  # backward: segments that were solved again because they could not be rebuilt
    n_evals_forward: int = 0
    n_evals_backward: int = 0
    n_vjps: int = 0
    h_min: float = float("nan")  # sizes of accepted steps
    h_max: float = float("nan")
    reconstruction_error: float | None = None  # MALI: |rebuilt - kept| / |kept| of z or v, the worst leaf's


class Solution(NamedTuple):
    """Result of `solve`: y has y0's structure, each leaf of shape (len(t), *leaf.shape)."""

    t: Tensor
    y: Any
    stats: Stats
    observed: Any = None  # the sum of what `observe` returned; y is then at t[-1:] only
    code: Any = None  # with return_code=True: a Code


class SolverError(Exception):
    """Base of every error that torchmali raises on purpose."""


class InvalidOption(SolverError, ValueError):
    """An option of a solver, controller or gradient method is out of its range, or unknown."""


def require(holds: bool, message: str, error: type[SolverError] = InvalidOption) -> None:
    if not holds:
        raise error(message)


def short_repr(self: Any) -> str:
    """A dataclass as one would write it: without the fields that are at their default."""
    changed = [(x.name, getattr(self, x.name)) for x in fields(self) if getattr(self, x.name) != x.default]
    return f"{type(self).__name__}({', '.join(f'{name}={x!r}' for name, x in changed)})"


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


class NonRepeatableField(SolverError, RuntimeError):
    """f was not the same function in the backward pass as in the forward pass."""


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
