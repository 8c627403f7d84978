"""Graphs of the last evaluations of a forward pass, kept for the backward pass within some bytes.

The steps need not be known in advance: each evaluation is recorded on its own, and the oldest graphs are dropped. The
backward pass takes a graph in place of an evaluation (`Field.record`), so that all else is as without it. What is kept
are graphs of PyTorch's own, under the saved-tensor hooks of the caller; one that has been used is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchmali.field.evaluate import Field, Graphs, KeptGraph
from torchmali.state.vectors import Tensors, Time

SHARE = 8  # an 8th of the memory is for states, if not all graphs fit: they keep round-off small before these graphs


class Expected(NamedTuple):
    """The number of evaluations of a forward pass, as far as it is known in advance."""

    at_least: int  # the evaluations before the last so many are not worth recording
    about: int | None  # None: it is not known


class Recorder:
    """f in a forward pass. The graphs of its last evaluations are kept.

    budget: bytes. expected: how many evaluations there will be. begun: called before the first graph is kept, with the
    bytes that are left for other things.
    """

    def __init__(
        self,
        field: Field,
        budget: float,
        expected: Expected,
        n_per_step: int,
        wants_t: bool,
        begun: Callable[[float], None],
    ):
        self.field, self.budget, self.expected, self.wants_t = field, budget, expected, wants_t
        self.n_per_step, self.begun = n_per_step, begun
        self.recording: Field | None = None  # the copy of the field that is evaluated
        self.kept: deque[KeptGraph] = deque()
        self.most: int | None = None  # graphs
        self.first = 0  # the first evaluation to be recorded
        self.n_recorded = 0

    def __call__(self, t: Time, z: Tensors) -> Tensors:
        field = self.field
        if not field.keeps_graphs:
            return field(t, z)
        most = self._look(t, z) if self.most is None else self.most
        if not most or field.n_evals < self.first:
            return field(t, z)
        if len(self.kept) >= most:
            self.kept.popleft()
        field.count_evaluation()
        assert self.recording is not None
        with torch.enable_grad():
            # z is moved in place, but a graph needs the z that it was recorded at.
            recorded = self.recording.record(t, tuple([x.clone() for x in z]))
        self.kept.append(KeptGraph(self.n_recorded, t, recorded.outputs, recorded.inputs, recorded.u))
        self.n_recorded += 1
        return recorded.u

    def _look(self, t: Time, z: Tensors) -> int:
        """Set how many graphs fit, and with which evaluation to begin."""
        size, about = max(1, self.field.bytes_of_graph(t, z)), self.expected.about
        has_all = about is not None and size * about <= self.budget
        self.most = most = int((self.budget if has_all else self.budget * (1 - 1 / SHARE)) // size)
        self.first = self.expected.at_least - most
        if most:
            self.recording = self.field.for_recording(self.wants_t)
            self.begun(0.0 if has_all else self.budget / SHARE)
        return most

    def forget(self, n: int) -> None:
        """Drop the graphs of all evaluations but the first n that were recorded."""
        while self.kept and self.kept[-1].number >= n:
            self.kept.pop()

    @property
    def first_time(self) -> Time | None:
        """The time of the first evaluation whose graph is kept."""
        return self.kept[0].t if self.kept else None

    def graphs(self) -> Graphs | None:
        """What was kept, at the end of the forward pass.

        None if there is nothing, or if a buffer changed late, which a graph might have saved.
        """
        self.field.remember_n_evals()
        kept, self.kept = self.kept, deque()
        is_usable = kept and not self.field.environment.late
        return Graphs(kept, self.n_per_step) if is_usable else None


class RecordedEffects:
    """The side effects of an f that is recorded (loop/base.py): a rejected step takes its graphs with it."""

    def __init__(self, effects: Any, recorder: Recorder | Followed):
        self.effects, self.recorder = effects, recorder

    @property
    def eps(self) -> float:
        return self.effects.eps

    def mark(self) -> Any:
        return self.effects.mark(), self.recorder.n_recorded

    def restore(self, mark: Any) -> None:
        self.effects.restore(mark[0])

    def reject(self, mark: Any) -> None:
        self.restore(mark)
        self.recorder.forget(mark[1])


class TooManyEvaluationsError(Exception):
    """Their graphs would not fit into the memory."""


class Followed:
    """f in a forward pass that autograd follows, within so many evaluations."""

    n_recorded = 0

    def __init__(self, field: Field, most: int):
        self.field, self.most = field, most

    def __call__(self, t: Time, z: Tensors) -> Tensors:
        if self.field.n_evals >= self.most:
            raise TooManyEvaluationsError
        return self.field(t, z)

    def forget(self, n: int) -> None:
        """Nobody holds the graphs of a rejected step."""
