"""Time that an audit may take, and the line that shows its progress."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any

from torchmali.errors import InvalidOptionError


class OutOfTime(Exception):
    """The time for a part of an audit ended while f was still being evaluated."""


class Budget:
    """Time for a whole audit, in seconds; None: no limit."""

    def __init__(self, max_seconds: float | None):
        is_number = isinstance(max_seconds, (int, float)) and max_seconds > 0
        if max_seconds is not None and not is_number:
            raise InvalidOptionError(
                f"max_seconds={max_seconds!r}: give a positive number of seconds for the whole audit, or None."
            )
        self.seconds = math.inf if max_seconds is None else float(max_seconds)
        self.start = time.perf_counter()

    @property
    def used(self) -> float:
        return time.perf_counter() - self.start

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.used)

    def deadline(self, share: float) -> float:
        """Return the reading of the clock after this share of the remaining time."""
        return time.perf_counter() + share * self.left

    def __str__(self) -> str:
        return f"max_seconds = {self.seconds:g}"


def until(deadline: float, func: Callable) -> Callable:
    """Wrap func so that it raises OutOfTime if it is called after the deadline."""
    if math.isinf(deadline):
        return func

    def in_time(*args: Any) -> Any:
        if time.perf_counter() > deadline:
            raise OutOfTime
        return func(*args)

    return in_time


class Progress:
    """Progress messages: one line on stderr that is overwritten, or calls of a user's function.

    to: the function; True: a line on stderr; None: a line if stderr is a terminal; False: nothing.
    """

    def __init__(self, to: Callable[[str], None] | bool | None, budget: Budget):
        if to is not None and not isinstance(to, bool) and not callable(to):
            raise InvalidOptionError(
                f"progress={to!r}: give True, False, None (if stderr is a terminal) or a function of a message."
            )
        self.is_terminal = sys.stderr is not None and sys.stderr.isatty()
        shows = to if isinstance(to, bool) else self.is_terminal
        line = self._on_stderr if shows else None
        self.write = to if callable(to) else line
        self.budget, self.width = budget, 0

    def __call__(self, message: str) -> None:
        of = f" of {self.budget.seconds:.0f}" if math.isfinite(self.budget.seconds) else ""
        if self.write is not None:
            self.write(f"audit: {message}, {self.budget.used:.0f}{of} s")

    def clear(self) -> None:
        if self.width:
            sys.stderr.write(f"\r{' ' * self.width}\r")
            sys.stderr.flush()

    def _on_stderr(self, message: str) -> None:
        if self.is_terminal:
            sys.stderr.write(f"\r{message:<{self.width}}")
            self.width = max(self.width, len(message))
        else:
            sys.stderr.write(f"{message}\n")
        sys.stderr.flush()
