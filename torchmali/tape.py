"""What happened in a solve, in order: the data that a backward pass walks over.

At a boundary the order is always Step, [Rescale], [Refresh], [Output]; a Rescale may also stand before a step that
would not fit the old scale. Events hold numbers and positions in `Tape.kept`, no tensors: the tensors travel through
`save_for_backward` as one flat list.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torchmali.state.base import Snapshot, State
from torchmali.state.vectors import Time


class Step(NamedTuple):
    """One accepted step. Forward and backward derive h and the stage times from t0 and t1.

    h is held fixed when times are differentiated: a grid point inside a segment moves with the output time at which
    the segment starts, its last one with the output time at which it ends. t0 moves with times[k0], t1 with times[k1].
    """

    t0: Any  # a float (under Naive perhaps a tensor)
    t1: Any
    k0: int
    k1: int
    before: int | None  # where `kept` holds the state at t0: ACA at every step, MALI at none or every K-th


class Refresh(NamedTuple):
    """v was renewed from z. The start of a leapfrog solve is one: v0 = f(t0, z0)."""

    t: Time
    k: int  # t moves with times[k]
    before: int | None  # where `kept` holds the state as it was; None at the start


class Rescale(NamedTuple):
    """The integer grid of a Grid state moved."""

    change: Any  # bits by which each tensor was made coarser (finer: negative), or a Spread over the elements of leaves
    lost: int | None  # where `kept` holds what is needed to undo it, such as the bits that fell off


class Output(NamedTuple):
    """z was handed out as y[k]."""

    k: int
    inside: Time | None  # the time, where y[k] was read from the interpolant of the step before; None: the boundary


Event: TypeAlias = "Step | Refresh | Rescale | Output"


@dataclass
class Tape:
    """keep_every: keep the state before every n-th step. at_most: but no more than so many; beyond, every second one is
    dropped and n doubled. rewinds: someone will walk back over this tape."""

    keep_every: int | None = None
    at_most: int | None = None
    rewinds: bool = False
    events: list[Event] = field(default_factory=list)
    kept: list[Snapshot] = field(default_factory=list)
    n_steps: int = 0
    checkpoints: list[int] = field(default_factory=list)  # positions of steps whose state is kept

    def step(self, t0: Any, t1: Any, k0: int, k1: int, before: State) -> None:
        kept = None
        if self.keep_every is not None and self.n_steps % self.keep_every == 0:
            kept = self.keep(before.snapshot())
            self.checkpoints.append(len(self.events))
        self.events.append(Step(t0, t1, k0, k1, kept))
        self.n_steps += 1
        if self.at_most is not None and len(self.checkpoints) > self.at_most:
            self._thin_out()

    def keep(self, snapshot: Snapshot) -> int:
        """Keep a state's tensors and return where they are."""
        self.kept.append(snapshot)
        return len(self.kept) - 1

    def mark(self) -> tuple[int, int, int]:
        """To come `back_to`."""
        return len(self.events), len(self.kept), self.n_steps

    def back_to(self, mark: tuple[int, int, int]) -> None:
        n_events, n_kept, self.n_steps = mark
        del self.events[n_events:], self.kept[n_kept:]
        self.checkpoints = [position for position in self.checkpoints if position < n_events]

    def _thin_out(self) -> None:
        assert self.keep_every is not None
        for position in self.checkpoints[1::2]:
            step = self.events[position]
            assert isinstance(step, Step) and step.before is not None
            self.kept[step.before] = Snapshot((), None)
            self.events[position] = step._replace(before=None)
        self.checkpoints = self.checkpoints[::2]
        self.keep_every *= 2
