"""Python's garbage collector, paused while the package is imported."""

from __future__ import annotations

import gc


class PausedCollection:
    """A context in which no garbage is collected.

    An import makes no garbage, but enough objects for a pass over all objects that there are, those of torch too: that
    takes longer than the import.
    """

    def __enter__(self) -> None:
        self.was_on = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was_on:
            gc.enable()
