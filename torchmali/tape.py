"""The record of a solve: accepted steps, refreshes, rescales and outputs, in order. Backward passes follow it.

At the end of a step the order is always Step, [Rescale], [InnerOutput], [Output], [StageOutput], [Refresh]; a Rescale
may also stand before a step that would not fit the old scale. Events hold numbers and positions in `Tape.kept`, no
tensors: these travel through `save_for_backward` as one flat list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torchmali.state.base import RewindableState, Snapshot, State
from torchmali.state.fixed_point import FixedPoint
from torchmali.state.vectors import Time


class Start(NamedTuple):
    """The solve began at z0. A solver that carries v beside z made it here."""

    t: Time
    k: int = 0  # t moves with times[k]


class Step(NamedTuple):
    """One accepted step. Forward and backward derive h and the stage times from t0 and t1.

    h is held fixed when times are differentiated: a grid point inside a segment moves with the output time at which
    the segment starts, its last one with the output time at which it ends. t0 moves with times[k0], t1 with times[k1].
    Jumps of f do not move, nor do grid points that are counted from a jump (k0, k1 = None).
    """

    t0: Any  # a float (under Naive perhaps a tensor)
    t1: Any
    k0: int | None
    k1: int | None
    before: int | None  # position in `kept` of the state at t0: ACA keeps all, MALI none or every K-th
    closes: bool = False  # no step begins with f(t1, z1) after it: it is the last one, or ends on a jump of f
    is_joined: bool = False  # it was taken in one run with the step before it (Leapfrog.run)


class Refresh(NamedTuple):
    """v was replaced by f(t, z)."""

    t: Time
    k: int | None  # t moves with times[k]; None: at a jump or behind it, which does not move
    before: int | None  # position in `kept` of what the refresh replaced; None if nobody will follow the tape back


class Rescale(NamedTuple):
    """The spacing of a fixed-point state changed."""

    change: Any  # see state/fixed_point.py
    lost: int | None  # position in `kept` of what is needed to undo it, such as the bits that fell off


class Output(NamedTuple):
    """z became y[k]."""

    k: int


class InnerOutput(NamedTuple):
    """y[first], ..., y[end - 1] were read from the interpolant of the last step."""

    first: int
    end: int


class StageOutput(NamedTuple):
    """z at the start of the last step, and its stages, became the i-th step of a dense solution."""

    i: int


Event: TypeAlias = "Start | Step | Refresh | Rescale | Output | InnerOutput | StageOutput"


@dataclass
class Tape:
    """The events of one solve, and the snapshots that they refer to.

    keep_every: keep the state before every n-th step. at_most: the largest number of such states; beyond it every
    second one is dropped and n doubled. rewinds: keep what is needed to undo refreshes and rescales.
    """

    keep_every: int | None = None
    at_most: int | None = None
    rewinds: bool = False
    events: list[Event] = field(default_factory=list)
    kept: list[Snapshot] = field(default_factory=list)
    n_steps: int = 0
    checkpoints: list[int] = field(default_factory=list)  # positions in `events` of steps whose state is kept

    def keeps(self) -> bool:
        """Whether the state before the next step is kept."""
        return self.keep_every is not None and self.n_steps % self.keep_every == 0

    def step(
        self,
        t0: Any,
        t1: Any,
        k0: int | None,
        k1: int | None,
        before: State | None,
        closes: bool,
        is_joined: bool = False,
    ) -> None:
        """Record a step. before: the state at its start, if it `keeps` that."""
        kept = None
        if self.keeps():
            assert isinstance(before, RewindableState)
            kept = self.keep(before.snapshot())
            self.checkpoints.append(len(self.events))
        self.events.append(Step(t0, t1, k0, k1, kept, closes, is_joined))
        self.n_steps += 1
        if self.at_most is not None and len(self.checkpoints) > self.at_most:
            self._thin_out()

    def add_steps(self, steps: Sequence[Step]) -> None:
        """Record steps before which no state is kept."""
        self.events += steps
        self.n_steps += len(steps)

    def record_output(self, k: int) -> None:
        self.events.append(Output(k))

    def insert_time(self, k: int) -> None:
        """Renumber the output times from the k-th on, before which the time of an event was inserted.

        Only the end of the last step can refer to them: the solve ends there.
        """
        i = max(i for i, event in enumerate(self.events) if isinstance(event, Step))
        step = self.events[i]
        assert isinstance(step, Step)
        self.events[i] = step if step.k1 is None or step.k1 < k else step._replace(k1=step.k1 + 1)

    def keep(self, snapshot: Snapshot) -> int:
        """Keep a snapshot and return its position."""
        self.kept.append(snapshot)
        return len(self.kept) - 1

    def mark(self) -> tuple[int, int, int]:
        """How far the tape has come, for `restore`."""
        return len(self.events), len(self.kept), self.n_steps

    def restore(self, mark: tuple[int, int, int]) -> None:
        """Remove everything since `mark`."""
        n_events, n_kept, self.n_steps = mark
        del self.events[n_events:], self.kept[n_kept:]
        self.checkpoints = [position for position in self.checkpoints if position < n_events]

    def limit(self, at_most: int) -> None:
        """Keep no more than so many states from now on."""
        if at_most:
            self.at_most = at_most
            while len(self.checkpoints) > at_most:
                self._thin_out()
            return
        for position in self.checkpoints:
            self._drop(position)
        self.keep_every, self.at_most, self.checkpoints = None, None, []

    def drop_after(self, t: Time) -> None:
        """Drop the states before all steps that end after time t."""
        steps = [(position, event) for position in self.checkpoints if isinstance(event := self.events[position], Step)]
        after = {position for position, step in steps if (step.t1 - t) * (step.t1 - step.t0) > 0}
        for position in after:
            self._drop(position)
        self.checkpoints = [position for position in self.checkpoints if position not in after]

    def _drop(self, position: int) -> None:
        """Drop the state before the step at this position in `events`."""
        step = self.events[position]
        assert isinstance(step, Step) and step.before is not None
        self.kept[step.before] = Snapshot((), None)
        self.events[position] = step._replace(before=None)

    def _thin_out(self) -> None:
        assert self.keep_every is not None
        for position in self.checkpoints[1::2]:
            self._drop(position)
        self.checkpoints = self.checkpoints[::2]
        self.keep_every *= 2


def rewind(
    events: Sequence[Event],
    kept: Sequence[Snapshot],
    state: State,
    undo_step: Callable[[Step, Any], Any],
    on_output: Callable[[Output | InnerOutput | StageOutput, Any], None] | None = None,
    undo_run: Callable[[Sequence[Step], Any], Any] | None = None,
) -> Any:
    """Follow events from the last to the first, beginning with the state after them; return the state before them.

    undo_step(step, state) returns the state at the start of a step; on_output(output, state) is told of the outputs.
    undo_run(steps, state) returns the state at the start of several steps that were taken in one run; without it they
    are undone one by one.
    """
    end = len(events)
    while end:
        event, start = events[end - 1], end - 1
        if isinstance(event, Step):
            start = end - 1 if undo_run is None else _start_of_run(events, end)
            if undo_run is None or start == end - 1:
                state = undo_step(event, state)
            else:
                state = undo_run([x for x in events[start:end] if isinstance(x, Step)], state)
        elif isinstance(event, (Output, InnerOutput, StageOutput)):
            if on_output is not None:
                on_output(event, state)
        elif isinstance(event, Rescale):
            assert isinstance(state, FixedPoint) and event.lost is not None
            state = state.unscaled(event.change, kept[event.lost])
        elif isinstance(event, Refresh):
            assert isinstance(state, RewindableState) and event.before is not None
            state = state.rebuilt_with(kept[event.before])
        end = start
    return state


def _start_of_run(events: Sequence[Event], end: int) -> int:
    """Where the run of steps begins that ends with events[end - 1]. A step from a kept state is not part of it."""
    start = end - 1
    while start and _continues(events[start - 1], events[start]):
        start -= 1
    return start


def _continues(before: Event, step: Event) -> bool:
    """Whether both are steps of one run without a kept state.

    Drifts that were two in the forward pass stay two: undone as one they would leave more round-off.
    """
    is_joined = isinstance(step, Step) and step.is_joined and step.before is None
    return is_joined and isinstance(before, Step) and before.before is None


def in_runs(events: Sequence[Event]) -> Iterator[Sequence[Event]]:
    """Events in order: the steps of a run together, all others one by one."""
    start = 0
    for end, event in enumerate([*events[1:], None], 1):
        if not (isinstance(event, Step) and event.is_joined):
            yield events[start:end]
            start = end
