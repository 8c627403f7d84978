"""Exact solves, for the tests of them: orders, gradient methods, and a guard against solves that do not end."""

from __future__ import annotations

from typing import Any

import torchmali as tm

ORDERS = (2, 4, 6)
EXACT = tm.MALI(exact=True)
PLAIN = tm.MALI(checkpoint_every=None)


class Guarded:
    """A field that notices when a solve does not end."""

    def __init__(self, func: Any, most: int = 20_000):
        self.func, self.left = func, most

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        assert self.left >= 0, "an endless solve"
        return self.func(*args)
