"""What happened in a solve, in order: the data that a backward pass walks over.

At a boundary the order is always Step, [Refresh], [Output]. Events hold floats and positions in `Tape.kept`, no
tensors: the tensors travel through `save_for_backward` as one flat list.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from torchmali.state import State, Time


class Step(NamedTuple):
    """One accepted step. Forward and backward derive h and the stage times from these two numbers."""

    t0: Any  # a float (under Naive perhaps a tensor)
    t1: Any
    before: int | None  # where `kept` holds the state at t0: ACA at every step, MALI at none


class Refresh(NamedTuple):
    """v was set to f(t, z). The start of a leapfrog solve is one: v0 = f(t0, z0)."""

    t: Time


class Output(NamedTuple):
    """z was handed out as y[k]."""

    k: int
    inside: Time | None  # the time, where y[k] was read from the interpolant of the step before; None: the boundary


@dataclass
class Tape:
    events: list[Step | Refresh | Output] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    def keep(self, state: State) -> int:
        """Keep a state's tensors and return where they are."""
        at = len(self.kept)
        self.kept.extend(state.point)
        self.kept.extend(state.slope)
        return at
