"""Every error and warning of torchmali."""

from __future__ import annotations

import sys
import warnings


class SolverError(Exception):
    """Base of every error that torchmali raises on purpose."""


class InvalidOptionError(SolverError, ValueError):
    """An option of a solver, controller or gradient method is out of its range, or unknown."""


class UnknownMethodError(SolverError, ValueError):
    """A name is not that of a solver or gradient method."""


class InvalidStateError(SolverError, TypeError):
    """y0 is not made of float32 or float64 tensors."""


class InvalidTimesError(SolverError, ValueError):
    """t has fewer than two times, repeats one, changes direction, or is not finite."""


class InvalidFieldError(SolverError, TypeError):
    """f did not return a slope for each leaf of the state."""


class SlopeMismatchError(InvalidFieldError):
    """f returned a tensor of another shape or dtype than y has."""


class IncompatibleError(SolverError, TypeError):
    """A solver, controller and gradient method cannot work together."""


class NonFiniteError(SolverError, RuntimeError):
    """The solution left the finite numbers."""


class StepLimitError(SolverError, RuntimeError):
    """The controller used up its steps before the end time."""


class StepUnderflowError(SolverError, RuntimeError):
    """The tolerance asks for steps too small to move the time."""


class NonRepeatableFieldError(SolverError, RuntimeError):
    """f was not the same function in the backward pass as in the forward pass."""


class DoubleBackwardError(SolverError, RuntimeError):
    """Second derivatives were asked of a method that gives first ones only."""


class EventNotFoundError(SolverError, RuntimeError):
    """No event was found until the end of a solve."""


class GrazingEventError(SolverError, RuntimeError):
    """The derivative of an event time was asked for where the event function only touches zero."""


class SolverWarning(UserWarning):
    """The solve continued, but its setup is probably not what was meant, or its result less exact than it should be."""


def warn(message: str) -> None:
    """Issue a SolverWarning that points to the user's line."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torchmali.", "torch.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, SolverWarning, stacklevel=level)
