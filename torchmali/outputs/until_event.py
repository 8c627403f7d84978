"""Outputs of a solve that ends at an event, which becomes its last output.

An event is found in an accepted step, on the interpolant, so that f is not evaluated for it (beyond the stages that the
interpolant of some solvers needs). Its time is inserted among the output times. The state there is an output inside the
step like any other, and every gradient method differentiates it as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchmali.errors import EventNotFoundError
from torchmali.events import DIRECTIONS, EventFunctions, Root, first_root
from torchmali.field.evaluate import Field
from torchmali.jumps import Jumps
from torchmali.outputs.base import AcceptedStep, InnerPulled, Outputs, Pulled
from torchmali.solvers.interpolation import chunks
from torchmali.state.vectors import Tensors, Time, number
from torchmali.tape import InnerOutput, Output, StageOutput

POINTS = (0.2, 0.4, 0.6, 0.8)  # of a step, at which the signs of g are compared beside its ends
ROUND_OFF = 1000  # eps of the largest value in the first step: a smaller value at the start counts as zero


class Detector:
    """The search for roots of event functions, from step to step."""

    def __init__(self, functions: EventFunctions):
        self.functions = functions
        self.before: list[float] = []  # values at the end of the last step
        self.signs: list[float] = []  # of all components there
        self.t: float | None = None  # that end
        self.found: list[list[float]] = [[] for _ in functions.events]  # times of roots, for each event

    def mark(self) -> Any:
        return self.before, self.signs, self.t, [list(times) for times in self.found]

    def restore(self, mark: Any) -> None:
        self.before, self.signs, self.t, found = mark
        self.found = [list(times) for times in found]

    def look(self, step: AcceptedStep) -> Root | None:
        """Record the roots in a step; return the first one of a terminal event."""
        t0, t1 = number(step.t0), number(step.t1)
        if t0 == t1:  # too short to move the time
            return None
        times = [*[t0 + x * (t1 - t0) for x in POINTS], t1]
        rows = self.functions.values(times, step.at(times))
        if not self.signs:
            self._begin(t0, step.before.point, rows)
        a = t0
        for b, values in zip(times, rows, strict=True):
            root = self._between(step, a, b, values)
            if root is not None:
                t, i = root
                steepness = 0.0 if t == a else abs(self.before[i]) / abs(t - a)
                return Root(t, *self.functions.owner(i), step.slope_at(t), steepness)
            self.signs = [_sign(x) for x in values]
            a, self.before = b, values
        self.t = t1
        return None

    def _begin(self, t0: float, z: Tensors, rows: Sequence[Sequence[float]]) -> None:
        """Note the signs at the start, where the state may have been put on a root: then the sign after it counts."""
        (self.before,) = self.functions.values([t0], tuple([leaf[None] for leaf in z]))
        limit = ROUND_OFF * self.functions.eps
        largest = [max(map(abs, column)) for column in zip(*rows, strict=True)]
        self.signs = [0.0 if abs(x) <= limit * most else _sign(x) for x, most in zip(self.before, largest, strict=True)]

    def _between(self, step: AcceptedStep, a: float, b: float, values: list[float]) -> tuple[float, int] | None:
        """Record the roots between a and b; return the first one of a terminal event, and its component."""
        terminal, others = [], []
        for i, (sign, x) in enumerate(zip(self.signs, values, strict=True)):
            if sign and _sign(x) != sign:
                event = self.functions.events[self.functions.owner(i)[0]]
                if sign in DIRECTIONS[event.direction]:
                    (terminal if event.terminal else others).append(i)
        root = self._first_root(step, a, b, values, terminal) if terminal else None
        found = [self._first_root(step, a, b, values, [i]) for i in others]
        for t, i in sorted(found, key=lambda pair: abs(pair[0] - a)):
            if root is None or abs(t - a) <= abs(root[0] - a):
                self._record(t, i)
        if root is not None:
            self._record(*root)
        return root

    def _record(self, t: float, i: int) -> None:
        self.found[self.functions.owner(i)[0]].append(t)

    def _first_root(
        self, step: AcceptedStep, a: float, b: float, values: list[float], among: list[int]
    ) -> tuple[float, int]:
        """The first time between a and b at which one of some components has changed its sign, and that component."""
        last = values  # the latest values with a change

        def least(values: list[float]) -> float:
            return min(self.signs[i] * values[i] for i in among)

        def phi(t: float) -> float:
            nonlocal last
            (now,) = self.functions.values([t], step.at([t]))
            last = now if least(now) <= 0 else last
            return least(now)

        t = first_root(phi, a, b, least(self.before), least(values))
        return t, min(among, key=lambda i: self.signs[i] * last[i])

    def raise_for_none(self) -> None:
        """Say that no terminal event was found until the end."""
        assert self.functions.sizes is not None and self.t is not None
        rest, ends = iter(self.before), []
        for size in self.functions.sizes:
            ends.append([next(rest) for _ in range(size)])
        shown = "; ".join(", ".join(f"{x:.4g}" for x in end[:4]) + ", ..." * (len(end) > 4) for end in ends)
        raise EventNotFoundError(
            f"No event until the last time, t = {self.t:.6g}: there the event function was {shown}. Solve for longer, "
            "look at `direction` and at the sign of the function at the start, take shorter steps if it has two roots "
            'close to each other, or use on_no_event="flag".'
        )


def _sign(x: float) -> float:
    return float((x > 0) - (x < 0))


class EventOutputs(Outputs):
    """Other outputs up to an event, and the state at the event.

    detector: None in a backward pass. Results are those of the inner outputs, then the leaves of the state.
    """

    looks_at_steps = True

    def __init__(self, inner: Outputs, detector: Detector | None, n_leaves: int, event_at: int | None = None):
        self.inner, self.detector, self.n_leaves, self.event_at = inner, detector, n_leaves, event_at
        self.theta, self.keeps_states = inner.theta, inner.keeps_states
        self.root: Root | None = None
        self.y: Tensors = ()  # at the event

    # The forward pass.

    def begin(self, times: Sequence[Time], stops: bool, is_traced: bool, jumps: Jumps | None = None) -> None:
        super().begin(times, stops, is_traced, jumps)
        self.inner.begin(times, stops, is_traced, jumps)

    def passes_over(self, t1: Time) -> bool:
        return False

    def looks_inside(self, t: Time, t1: Time) -> bool:
        return True

    def record(self, k: int, t: Time, z: Tensors) -> None:
        self.inner.record(k, t, z)

    def record_inner(self, first: int, times: Sequence[Time], z: Tensors) -> None:
        self.inner.record_inner(first, times, z)

    def accept(self, step: AcceptedStep) -> list[Output | InnerOutput | StageOutput]:
        assert self.detector is not None
        step.stages()  # evaluated in the grad mode that is on
        with torch.no_grad():
            self.root = self.detector.look(step)
        return super().accept(step) if self.root is None else self._end_at(self.root, step)

    def _end_at(self, root: Root, step: AcceptedStep) -> list[Output | InnerOutput | StageOutput]:
        """Record the outputs up to a root, and the state there."""
        times, t, first, forward = self.times, root.t, self.waiting, self.times[-1] > self.times[0]
        end = first
        while end < len(times) and (times[end] <= t if forward else times[end] >= t):
            end += 1
        for i, j in chunks(end - first):
            inside = times[first + i : first + j]
            self.record_inner(first + i, inside, step.at(inside))
        self.y = tuple([leaf[0].clone() for leaf in step.at([t])])
        self.times, self.waiting, self.event_at = [*times[:end], t, *times[end:]], end, end
        return [InnerOutput(first, end + 1)]

    def results(self) -> Tensors:
        found = self.inner.results()
        if self.event_at is None:
            return found
        if self.keeps_states and not self.is_traced:
            found = tuple([leaf[: self.event_at].clone() for leaf in found])  # the rest was never written
        return *found, *self.y

    def solution(self, results: Tensors) -> tuple[Tensors, Tensor | None]:
        if self.event_at is None:
            return self.inner.solution(results)
        y, observed = self.inner.solution(results[: -self.n_leaves])
        return (y if self.keeps_states else tuple([z[None] for z in results[-self.n_leaves :]])), observed

    def backward_states(self, results: Tensors, end: Tensors) -> Tensors:
        if self.event_at is None:
            return self.inner.backward_states(results, end)
        at_event = [z[None] for z in results[-self.n_leaves :]]
        if not self.keeps_states:
            return tuple(at_event)
        return tuple([torch.cat(pair) for pair in zip(results[: -self.n_leaves], at_event, strict=True)])

    def contents(self) -> Any:
        return self.inner.contents(), None if self.detector is None else self.detector.mark()

    def restore_contents(self, contents: Any) -> None:
        inner, mark = contents
        self.inner.restore_contents(inner)
        if self.detector is not None:
            self.detector.restore(mark)

    # The backward pass.

    def pull(self, k: int, t: Time, z: Tensors, grads: Sequence[Tensor | None]) -> Pulled:
        of_inner, of_event = self._split(grads)
        return Pulled(of_event) if k == self.event_at else self.inner.pull(k, t, z, of_inner)

    def pull_inner(self, first: int, times: Sequence[Time], z: Tensors, grads: Sequence[Tensor | None]) -> InnerPulled:
        of_inner, of_event = self._split(grads)
        n = len(times) if self.event_at is None else min(len(times), self.event_at - first)
        pulled = InnerPulled([None] * self.n_leaves)
        if n > 0:
            pulled = self.inner.pull_inner(first, times[:n], tuple([leaf[:n] for leaf in z]), of_inner)
        if n == len(times):
            return pulled
        return pulled._replace(z=[_with_last(x, g, n) for x, g in zip(pulled.z, of_event, strict=True)])

    def _split(self, grads: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None]]:
        """dL/dresults of the inner outputs, and of the state at the event."""
        if self.event_at is None:
            return grads, ()
        of_inner, of_event = grads[: -self.n_leaves], grads[-self.n_leaves :]
        if not self.keeps_states and len(of_inner) == 1:  # an observer that did not meet its last output
            of_inner = [*of_inner, *[None] * self.n_leaves]
        return of_inner, of_event

    def fresh(self) -> Outputs:
        return EventOutputs(self.inner.fresh(), None, self.n_leaves, self.event_at)

    def again(self) -> Outputs:
        assert self.detector is not None
        return EventOutputs(self.inner.again(), Detector(self.detector.functions), self.n_leaves)

    def with_tensors(self, theta: Sequence[Tensor], wants_t: bool) -> Outputs:
        return EventOutputs(self.inner.with_tensors(theta, wants_t), None, self.n_leaves, self.event_at)

    @property
    def functions(self) -> Sequence[Field]:
        return self.inner.functions

    def backward_pass(self, t: float, z: Tensors) -> AbstractContextManager:
        return self.inner.backward_pass(t, z)


def _with_last(x: Tensor | None, last: Tensor | None, n: int) -> Tensor | None:
    """x, of n rows, and one more row, with zeros for None."""
    if x is None and last is None:
        return None
    if x is None:
        assert last is not None
        x = last.new_zeros(n, *last.shape)
    return torch.cat([x, x.new_zeros(1, *x.shape[1:]) if last is None else last[None]])
