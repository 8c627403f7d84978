"""The backward walk over the tape, shared by ACA and MALI.

Which steps keep their state is the whole difference between the two: all, or none, or every K-th. What is kept divides
the tape into segments. The walk goes back over one segment after the other; where the solver is inverted, the state
that it rebuilt is compared with the one that was kept, the walk goes on from the latter, and a segment that could not
be rebuilt is solved and walked again, with more states kept.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchmali.field import Field
from torchmali.gradients.base import GradientMethod, Problem, forward, refuse_double_backward, require_same
from torchmali.outlet import Outlet
from torchmali.solvers.base import Cotangent, Inside, Passed, Solver, accumulate
from torchmali.state import Floats, Memento, State, Tensors
from torchmali.tape import Event, Output, Refresh, Rescale, Step, Tape

DRIFT_LIMITS = {torch.float32: 1e-3, torch.float64: 3e-10}  # a state rebuilt worse than this (relative) is not trusted


class ReplayGradient(GradientMethod):
    """A gradient method that keeps the tape of the forward pass and walks back over it."""

    inverts: ClassVar[bool]  # states are rebuilt, not kept: compare them where they are known
    reruns: ClassVar[bool] | bool = False  # and solve again what could not be rebuilt

    @property
    def arithmetic(self) -> type[State]:
        return Floats

    @abstractmethod
    def tape(self, problem: Problem) -> Tape:
        """What the forward pass is to keep."""

    def solve(self, problem: Problem) -> Tensors:
        if not problem.wants_gradient:
            tape = self.tape(problem) if problem.wants_code else None
            results, end, tape = forward(problem, arithmetic=self.arithmetic, tape=tape)
            self.judge_forward(problem, problem.outlet.states(results), end, tape)
            return results
        return _Replay.apply(self, problem, *problem.inputs)  # type: ignore[return-value]

    def judge_forward(self, problem: Problem, y: Tensors, end: State, tape: Tape) -> None:
        """Look at a finished forward pass."""

    def judge_backward(self, drift: float, limit: float, n_reruns: int) -> None:
        """Look at a finished backward pass: the worst that was rebuilt, and how many segments were solved again."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, method: ReplayGradient, problem: Problem, *inputs: Tensor | None) -> Tensors:
        results, end, tape = forward(problem, arithmetic=method.arithmetic, tape=method.tape(problem))
        outlet = problem.outlet
        method.judge_forward(problem, outlet.states(results), end, tape)
        ctx.set_materialize_grads(False)
        ctx.method, ctx.events, ctx.stats = method, tape.events, problem.stats
        ctx.times, ctx.outlet = problem.times, outlet.without_tensors()
        ctx.field, ctx.solver = problem.field.without_tensors(), problem.solver
        mementos = [end.put_away(), *tape.kept]
        ctx.forms = [(len(memento.tensors), memento.form) for memento in mementos]
        fixed = problem.field.fixed
        ctx.sizes = 1, len(problem.z0), len(problem.field.theta), len(outlet.theta), len(fixed)
        ctx.save_for_backward(*inputs, *fixed, *(x for memento in mementos for x in memento.tensors))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        method: ReplayGradient = ctx.method
        refuse_double_backward(type(method).__name__)
        saved = iter(ctx.saved_tensors)
        t, z0, theta, observer, fixed = (tuple(islice(saved, size)) for size in ctx.sizes)
        # Detached: an f that calls y.requires_grad_() leaves its mark.
        end, *kept = (Memento(tuple(x.detach() for x in islice(saved, size)), form) for size, form in ctx.forms)
        f = ctx.field.with_tensors(theta, fixed, wants_t=ctx.needs_input_grad[2])
        outputs = Outputs(ctx.outlet.with_tensors(observer, f.wants_t), ctx.times, grads)
        state = method.arithmetic.restore(end)
        way = Way(f, ctx.solver, tuple(z.detach() for z in z0), outputs, method.inverts, method.reruns)
        # Gradients for f and the observer; nothing else here requires one.
        start = ctx.times[0], way.z0
        with f.backward_pass(*start), outputs.outlet.backward_pass(*start), torch.enable_grad():
            _, a = way.back(ctx.events, kept, state, way.nothing(state))
        ctx.stats.n_evals_backward, ctx.stats.n_vjps, ctx.stats.n_reruns = f.n_evals, f.n_vjps, way.n_reruns
        if method.inverts:
            ctx.stats.reconstruction_error = way.drift
        method.judge_backward(way.drift, way.limit, way.n_reruns)
        a_t = torch.stack([f.time(x) for x in a.times]).to(t[0]) if f.wants_t else None
        return (None, None, a_t, *a.sums, *a.observer)


@dataclass(frozen=True)
class Outputs:
    """The output times, from behind."""

    outlet: Outlet
    times: Sequence[float]
    grads: Sequence[Tensor | None]  # dL/d(results)

    def pull(self, k: int, z: Tensors, a: Cotangent) -> Sequence[Tensor | None]:
        """dL/dy[k]; what else depends on it goes into `a`."""
        a_z, a_observer, a_t = self.outlet.pull(self.times[k], z, k, self.grads)
        accumulate(a.observer, a_observer)
        if a_t is not None:
            a.times[k] = a.times[k] + a_t
        return a_z


@dataclass
class Way:
    """The way back of one backward pass."""

    f: Field
    solver: Solver
    z0: Tensors
    outputs: Outputs
    compares: bool
    reruns: bool
    drift: float = 0.0
    n_reruns: int = 0

    def nothing(self, state: State) -> Cotangent:
        return Cotangent.zero(state, len(self.f.theta), len(self.outputs.outlet.theta), len(self.outputs.times))

    @property
    def limit(self) -> float:
        return max(self.f.surroundings.coarseness, *(DRIFT_LIMITS[z.dtype] for z in self.z0))

    def back(
        self, events: Sequence[Event], kept: Sequence[Memento], state: State, a: Cotangent
    ) -> tuple[State, Cotangent]:
        """Pull `a` back over the tape, from its end, where `state` is: the state at its start, and dL/d(...) there."""
        end = len(events)
        heads = [
            (i, event)
            for i, event in enumerate(events)
            if isinstance(event, Refresh) or (isinstance(event, Step) and event.before is not None)
        ]
        for i, head in reversed(heads):
            segment = events[i + isinstance(head, Refresh) : end]
            after, end = state.fork(), i
            aside = a.set_aside() if self.reruns and not a.is_new else None
            compares = self.compares or a.is_new  # a walk over kept states: once, for another f would not be noticed
            state = walk(self.f, self.solver, segment, kept, state, a, self.outputs)
            a.is_new = False
            if head.before is not None:
                truth = state.back_to(kept[head.before])
            else:
                truth = state.of(self.z0)
            start = self._renewed(head, truth, a) if isinstance(head, Refresh) else truth
            trusts = not compares or self._trusts(state, start, after, segment)
            again = None if trusts else self._again(segment, start, after, aside or self.nothing(state))
            if again is not None:
                a = again
                if isinstance(head, Refresh):
                    self._renewed(head, truth, a)
            elif aside:
                a.take_back(aside)
            state = truth
        return walk(self.f, self.solver, events[:end], kept, state, a, self.outputs), a

    def _renewed(self, head: Refresh, before: State, a: Cotangent) -> State:
        """Pull `a` back over a refresh; the state that it made."""
        renewed, g_t = self.solver.pull_renewal(self.f, head.t, before, a)
        if g_t is not None:
            a.times[head.k] = a.times[head.k] + g_t
        return renewed

    def _trusts(self, rebuilt: State, truth: State, after: State, segment: Sequence[Event]) -> bool:
        steps = [event for event in segment if isinstance(event, Step)]
        drift = rebuilt.distance(truth, after, self.solver.scale_of_v(steps[-1].t1 - steps[0].t0 if steps else 0.0))
        if rebuilt.is_bounded:  # nothing but another f can lead astray there
            self._require_same(drift)
        self.drift = max(self.drift, drift)
        return drift <= self.limit or (self.compares and not self.reruns)

    def _again(self, segment: Sequence[Event], state: State, after: State, a: Cotangent) -> Cotangent | None:
        """Solve a segment again from its start, keep about the root of its states, and walk back once more.

        None: it was walked over kept states already.
        """
        n = sum(isinstance(event, Step) for event in segment)
        tape = Tape(keep_every=max(1, math.isqrt(n)))
        with torch.no_grad():
            for event in segment:
                if isinstance(event, Step):
                    tape.step(*event[:4], state)
                    state = self.solver.step(self.f, event.t0, event.t1, state, None, adaptive=False).state
                else:
                    tape.events.append(event)
        self._require_same(state.distance(after, after, 1.0))
        if n < 2 or not self.reruns:
            return None
        self.n_reruns += 1
        return self.back(tape.events, tape.kept, state.fork(), a)[1]

    def _require_same(self, drift: float) -> None:
        require_same(drift <= self.limit)


def walk(
    f: Field,
    solver: Solver,
    events: Sequence[Event],
    kept: Sequence[Memento],
    state: State,
    a: Cotangent,
    outputs: Outputs,
) -> State:
    """Pull dL/dy back over a slice of the tape without renewals: the state at its start. Works on `a` in place."""
    inside: list[Inside] = []
    for event in reversed(events):
        if isinstance(event, Step):
            before = None if event.before is None else state.back_to(kept[event.before])
            state = solver.pullback(f, Passed(event.t0, event.t1, before, inside), state, a)
            if f.wants_t:
                a.times[event.k0] = a.times[event.k0] + a.t0
                a.times[event.k1] = a.times[event.k1] + a.t1
                for output, dt in zip(inside, a.inside, strict=True):
                    a.times[output.k] = a.times[output.k] + dt
                a.t0, a.t1, a.inside = 0.0, 0.0, ()
            inside = []
        elif isinstance(event, Output):
            if event.inside is not None:
                inside.append(Inside(event.k, event.inside, partial(outputs.pull, event.k, a=a)))
            else:
                z = () if outputs.outlet.keeps else state.point
                accumulate(a.z, outputs.pull(event.k, z, a))
        elif isinstance(event, Rescale):
            assert event.lost is not None
            state = state.unscaled(event.bits, kept[event.lost])
    return state
