"""What a solve returns: made from its accepted steps, and differentiated from its last output time to its first.

A new kind of output is a subclass of `Outputs`. `solve(..., outputs=...)` takes it, with every gradient method.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.abstract import Abstract
from torchmali.field.evaluate import Field
from torchmali.jumps import Jumps
from torchmali.solvers.base import Attempt, InterpolatingSolver, Slope, Solver
from torchmali.solvers.cotangent import accumulate
from torchmali.solvers.dense import Interpolant
from torchmali.solvers.interpolation import RecordedStages, chunks, interpolated, slope_inside
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time
from torchmali.tape import InnerOutput, Output, StageOutput
from torchmali.tree import Structure


class AcceptedStep:
    """A step that was accepted, from `before` at t0 to `end` at t1. closes: see tape.Step."""

    __slots__ = ("_stages", "attempt", "before", "carry", "closes", "end", "f", "solver", "t0", "t1")

    def __init__(
        self,
        f: Slope,
        solver: Solver,
        t0: Time,
        t1: Time,
        before: State,
        attempt: Attempt,
        end: State,
        closes: bool = False,
    ):
        self.f, self.solver, self.t0, self.t1, self.closes = f, solver, t0, t1, closes
        self.before, self.attempt, self.end = before, attempt, end
        self.carry = attempt.carry  # f(t1, z1), if it is known
        self._stages: Sequence[Tensors] = ()

    def at(self, times: Sequence[Time], samples: Tensor | None = None) -> Tensors:
        """z at times inside the step, from the solver's interpolant, in leaves of shape (len(times), ...).

        samples: for each time the one sample of the batch that is wanted.
        """
        point, stages = self.before.point, self.stages()
        return interpolated(self._interpolant, point, self.t0, self.t1, times, stages, samples)

    def stages(self) -> Sequence[Tensors]:
        """The slopes to which the solver's interpolant gives weights; those that the step lacks are evaluated once."""
        assert isinstance(self.solver, InterpolatingSolver)
        if not self._stages:
            how = self.f, self.t0, self.t1, self.before, self.attempt, self.closes
            self._stages, self.carry = self.solver.inner_stages(*how)
        return self._stages

    def slope_at(self, t: float) -> Tensors:
        """dz/dt at a time inside the step, along the solver's interpolant."""
        return slope_inside(self._interpolant, self.t0, self.t1, t, self.stages())

    @property
    def _interpolant(self) -> Interpolant:
        assert isinstance(self.solver, InterpolatingSolver)
        return self.solver.interpolant_of(self.closes)


class Pulled(NamedTuple):
    """Cotangents of one output time, made from dL/dresults."""

    z: Sequence[Tensor | None]  # dL/dy
    theta: Sequence[Tensor | None] = ()  # dL/d(parameters of the outputs themselves)
    t: Tensor | None = None  # dL/dt, for the t that `record` was given


class InnerPulled(NamedTuple):
    """Cotangents of outputs inside a step, made from dL/dresults."""

    z: Sequence[Tensor | None]  # dL/dy, in leaves of shape (outputs, ...)
    theta: Sequence[Tensor | None] = ()  # dL/d(parameters of the outputs themselves)
    t: Sequence[Tensor] | None = None  # dL/dt, for the times that `record` was given


class Outputs(Abstract):
    """What becomes of y(t) at the output times.

    A subclass needs `record`, `results`, `pull` and `fresh`. Where steps are taken back (MALI(exact=True) only),
    `contents` and `restore_contents` must undo `record`, unless recording y[k] again replaces what was there. `solve`
    records into a fresh object: the one that it was given stays as it is, and serves for any number of solves.
    """

    theta: Sequence[Tensor] = ()  # tensors of the outputs themselves that may get a gradient
    keeps_states: bool = False  # the results hold y at every output time

    times: Sequence[Time] = ()
    stops: bool = True  # steps end on every output time; else on the last one, and others are interpolated
    waiting: int = 1  # the first output that has not been recorded
    stop: int = 1  # the output on which steps end next
    origin: int = 0  # the output on which a step ended last
    jumps: Jumps | None = None  # steps end on those outputs, too, at which f jumps
    event_at: int | None = None  # the output that is an event, at which the solve ended (see outputs/until_event.py)
    looks_at_steps: bool = False  # every accepted step is looked at, so that its numbers have to be in range
    is_traced: bool = False  # y has a graph that the results must not lose (Naive)

    @abstractmethod
    def record(self, k: int, t: Time, z: Tensors) -> None:
        """Take in y[k] = z, at time t. If `is_traced`, z has a graph."""

    @abstractmethod
    def results(self) -> Tensors:
        """The results: tensors that may be differentiated."""

    @abstractmethod
    def pull(self, k: int, t: Time, z: Tensors, grads: Sequence[Tensor | None]) -> Pulled:
        """From dL/dresults to y[k] = z. Called for k from the last output to the first.

        If `keeps_states`, z may be empty.
        """

    def samples_of(self, first: int, end: int) -> Tensor | None:
        """The sample of the batch to which each of the outputs from `first` to end - 1 belongs; None: they are of all.

        If there is one, `record_inner` and `pull_inner` deal with these samples alone.
        """
        return None

    def record_inner(self, first: int, times: Sequence[Time], z: Tensors) -> None:
        """Take in y[first], y[first + 1], ... at these times, from leaves of shape (len(times), ...)."""
        for i, t in enumerate(times):
            self.record(first + i, t, tuple([leaf[i] for leaf in z]))

    def pull_inner(self, first: int, times: Sequence[Time], z: Tensors, grads: Sequence[Tensor | None]) -> InnerPulled:
        """`pull` for y[first], y[first + 1], ... at these times, in leaves of shape (len(times), ...)."""
        found = [
            self.pull(first + i, times[i], tuple([leaf[i] for leaf in z]), grads) for i in reversed(range(len(times)))
        ]
        theta: list[Tensor | None] = [None] * max((len(pulled.theta) for pulled in found), default=0)
        for pulled in found:
            accumulate(theta, pulled.theta)
        dt = None if found[0].t is None else [x for pulled in reversed(found) if (x := pulled.t) is not None]
        return InnerPulled([_stacked(parts) for parts in zip(*(x.z for x in reversed(found)), strict=True)], theta, dt)

    def pull_stages(self, i: int, grads: Sequence[Tensor | None]) -> RecordedStages | None:
        """From dL/dresults to z and the stages of the i-th step, if the results hold these. Here: they do not."""
        return None

    def solution(self, results: Tensors) -> tuple[Tensors, Tensor | None]:
        """What `Solution` holds: the leaves of y, and what was observed."""
        return results, None

    def backward_states(self, results: Tensors, end: Tensors) -> Tensors:
        """y at the outputs from the last of which a second solve can go back, time first; end: the state at the end."""
        return results if self.keeps_states else tuple(z[None] for z in end)

    def of_given_times(self, per_time: Sequence[Any]) -> list[Any]:
        """Of numbers for all output times, those for the times that the solve was given: all but that of an event."""
        return [x for k, x in enumerate(per_time) if k != self.event_at]

    def trajectory(self, results: Tensors, structure: Structure, t: Tensor) -> Any:
        """The solution as a function of time (`Solution.dense`), if the results have all it takes. Here: None."""
        return None

    def contents(self) -> Any:
        """What has been recorded so far, for `restore_contents`."""
        return None

    def restore_contents(self, contents: Any) -> None:
        """Forget what was recorded since: it will be recorded again."""
        return None

    @abstractmethod
    def fresh(self) -> Outputs:
        """A new object for the same outputs, without what these have recorded and without tensors of their own.

        The backward pass holds it, and calls its `pull`.
        """

    def again(self) -> Outputs:
        """These outputs before the solve, to be recorded a second time."""
        return self.fresh()

    def with_tensors(self, theta: Sequence[Tensor], wants_t: bool) -> Outputs:
        """These outputs for a backward pass, with `theta` as it was saved."""
        return self

    @property
    def functions(self) -> Sequence[Field]:
        """The user's functions that are called by `record`."""
        return ()

    def backward_pass(self, t: float, z: Tensors) -> AbstractContextManager:
        """A context around all calls of `pull`. t, z: those of the first output."""
        return nullcontext()

    def begin(self, times: Sequence[Time], stops: bool, is_traced: bool, jumps: Jumps | None = None) -> None:
        """Begin a solve. stops: whether steps end on every output time. is_traced: whether autograd follows it."""
        self.times, self.stops, self.is_traced, self.jumps = times, stops, is_traced, jumps
        self.origin, self.waiting, self.stop = 0, 1, self._stop_from(1)

    def _stop_from(self, k: int) -> int:
        """Return the first output from the k-th on, on which steps end."""
        times, end, jumps = self.times, len(self.times) - 1, self.jumps
        if self.stops or k >= end:
            return k
        if jumps is None:
            return end
        # Times of each sample may repeat: the last one is the end of the step, the others lie inside.
        ends = (i for i in range(k, end) if times[0] != times[i] != times[i + 1] and jumps.is_at(times[i]))
        return next(ends, end)

    def ends(self, t: Time, t1: Time) -> tuple[int | None, int | None]:
        """The output times with which the ends of a step from t to t1 move (see tape.Step)."""
        return self.moves_with(t), self.stop if t1 is self.times[self.stop] else self.moves_with(t1)

    def moves_with(self, t: Time) -> int | None:
        """The output time with which a point of the grid moves; None if that is a jump, which does not move."""
        is_fixed = self.jumps is not None and self.jumps.was_passed(self.times[self.origin], t)
        return None if is_fixed else self.origin

    def passes_over(self, t1: Time) -> bool:
        """Whether `accept` need not see a step to t1. An output that looks at every step returns False."""
        return t1 is not self.times[self.stop] and not self._is_reached(t1)

    def _is_reached(self, t1: Time) -> bool:
        """Whether a step to t1 has outputs inside."""
        if self.stops or self.waiting >= self.stop:
            return False
        next_time = self.times[self.waiting]
        return bool(next_time <= t1 if self.times[0] < self.times[-1] else next_time >= t1)

    def looks_inside(self, t: Time, t1: Time) -> bool:
        """Whether there are outputs inside a step from t to t1."""
        return self._is_reached(t1)

    def accept(self, step: AcceptedStep) -> list[Output | InnerOutput | StageOutput]:
        """Record the outputs inside the step and at its end; return them for the tape."""
        stop = self.stop
        found: list[Output | InnerOutput | StageOutput] = [] if self.stops else [*self._inside(stop, step)]
        if step.t1 is self.times[stop]:
            found.append(self.end_at(step.t1, step.end.point))
        return found

    def end_at(self, t1: Time, z: Tensors) -> Output:
        """Record the output on which a step ends, and return it for the tape."""
        stop = self.stop
        self.record(stop, t1, z)
        self.origin, self.waiting, self.stop = stop, stop + 1, self._stop_from(stop + 1)
        return Output(stop)

    @property
    def skips_steps(self) -> bool:
        """Whether steps need not be seen which hold no outputs: fixed ones may then be taken many at once."""
        mine, there = type(self), Outputs
        return (mine.accept, mine.passes_over, mine.looks_inside) == (
            there.accept,
            there.passes_over,
            there.looks_inside,
        )

    def _inside(self, stop: int, step: AcceptedStep) -> list[InnerOutput]:
        times, first, forward = self.times, self.waiting, self.times[-1] > self.times[0]
        end = first
        while end < stop and (times[end] <= step.t1 if forward else times[end] >= step.t1):
            end += 1
        if end == first:
            return []
        is_of_one = self.samples_of(first, end) is not None
        for i, j in chunks(end - first, len(step.before.point[0]) if is_of_one else 1):
            inside = times[first + i : first + j]
            self.record_inner(first + i, inside, step.at(inside, self.samples_of(first + i, first + j)))
        self.waiting = end
        return [InnerOutput(first, end)]

    def mark(self) -> Any:
        """How far the outputs have come, for `restore`."""
        return self.origin, self.waiting, self.stop, self.contents()

    def restore(self, mark: Any) -> None:
        self.origin, self.waiting, self.stop, contents = mark
        self.restore_contents(contents)


def _stacked(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Tensors as one, with zeros in gaps; None if there are none."""
    like = next((x for x in parts if x is not None), None)
    if like is None:
        return None
    return torch.stack([torch.zeros_like(like) if x is None else x for x in parts])


class NoOutputs(Outputs):
    """No results: for those who want the end state or the tape alone."""

    def record(self, k: int, t: Time, z: Tensors) -> None:
        pass

    def results(self) -> Tensors:
        return ()

    def pull(self, k: int, t: Time, z: Tensors, grads: Sequence[Tensor | None]) -> Pulled:
        return Pulled([None] * len(z))

    def fresh(self) -> Outputs:
        return NoOutputs()
