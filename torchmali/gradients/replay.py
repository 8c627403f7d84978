"""The backward pass over a tape, shared by ACA and MALI.

Which steps keep their state is the whole difference between the two: all, or none, or every K-th. The kept states
divide the tape into segments. The backward pass pulls the cotangent back over one segment after the other. If the
solver is inverted, the state that it rebuilds at the start of a segment is compared with the kept one, and the pass
goes on from the latter; a segment that could not be rebuilt is solved again with more states kept, and pulled back once
more.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate as running_sums
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchmali._torch import foreach_norm
from torchmali.field.evaluate import Field, Graphs
from torchmali.field.recorder import Recorder
from torchmali.gradients.base import (
    GradientMethod,
    Problem,
    Solved,
    refuse_double_backward,
    require_same,
    solve_without_graph,
    through_function,
)
from torchmali.outputs.base import Outputs
from torchmali.solution import Stats
from torchmali.solvers.base import AugmentedSolver, InterpolatingSolver, RunningSolver, Solver, StepBack
from torchmali.solvers.cotangent import Cotangent, accumulate
from torchmali.solvers.interpolation import InnerOutputs
from torchmali.state.base import Deviation, RewindableState, Snapshot, State
from torchmali.state.fixed_point import FixedPoint
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors, rows
from torchmali.tape import Event, InnerOutput, Output, Refresh, StageOutput, Start, Step, Tape, in_runs, rewind


class Limits(NamedTuple):
    """How well a state has to be rebuilt for the gradient to be trusted."""

    most: float  # for half of the components of a row, each on its own scale, and for all on the scale of the row
    some: float  # for all components, each on its own scale, but those that are small by chance
    row: float  # above this drift on the scale of a row it is not trusted: perhaps f is another function
    effect: float  # in between: by what the drift does to the gradient, relative, for each root of a step

    def hold(self, drift: Deviation, rounding: float) -> bool:
        """Whether a drift is small whatever f is. rounding: what round-off makes of a row where nothing amplifies it.

        Where all components of a row are off by `drift.row` of the largest, those smaller than drift.row / some of it
        are beyond `some`: about that share of them is, by chance. More of them drifted beside a large one.
        """
        return drift.most < 1 / 2 and drift.row <= max(self.most, rounding) and drift.some <= drift.row / self.some


LIMITS = {
    torch.float32: Limits(1e-5, 1e-3, 1e-3, 40 * torch.finfo(torch.float32).eps),
    torch.float64: Limits(3e-11, 3e-10, 3e-10, 1e-10),
}
SMALL = 1e-3  # of the largest gradient: rows and parameters with less are judged on this scale


class ReplayGradient(GradientMethod):
    """A gradient method that keeps the tape of the forward pass and follows it back."""

    inverts: ClassVar[bool]  # states are rebuilt, not kept: compare them where they are known
    reruns: ClassVar[bool] | bool = False  # and solve again what could not be rebuilt

    state: ClassVar[type[RewindableState]] = Floats

    def arithmetic(self, problem: Problem) -> Any:
        """What makes the first state of a solve."""
        return self.state

    @abstractmethod
    def tape(self, problem: Problem) -> Tape:
        """An empty tape that says what the forward pass is to keep."""

    def solve(self, problem: Problem) -> Solved:
        if problem.wants_gradient:
            return through_function(_Replay, self, problem)
        return self.solve_forward(problem, self.tape(problem) if problem.wants_code else None)

    def recorder(self, problem: Problem, tape: Tape) -> Recorder | None:
        """What evaluates f in a forward pass whose graphs are kept, as far as they fit. Here: none are kept."""
        return None

    def solve_forward(self, problem: Problem, tape: Tape | None, recorder: Recorder | None = None) -> Solved:
        solved = solve_without_graph(problem, self.arithmetic(problem), tape, recorder)
        self.judge_forward(problem, solved)
        return solved

    def judge_forward(self, problem: Problem, solved: Solved) -> None:
        """Look at a finished forward pass."""

    def judge_backward(self, passed: BackwardPass) -> None:
        """Look at a finished backward pass."""


class _Kept(NamedTuple):
    """What a backward pass needs beside the tensors that autograd saves."""

    method: ReplayGradient
    field: Field
    solver: Solver
    outputs: Outputs
    times: Sequence[Any]  # numbers
    events: Sequence[Event]
    stats: Stats
    # Numbers of saved tensors: t, z0, theta, those of the outputs, fixed ones, those of the solver, and snapshots.
    sizes: Sequence[int]
    forms: Sequence[Any]  # of the snapshots


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, method: ReplayGradient, problem: Problem, found: list[Solved], *inputs: Tensor | None
    ) -> Tensors:
        tape = method.tape(problem)
        recorder = method.recorder(problem, tape)
        solved = method.solve_forward(problem, tape, recorder)
        found.append(solved)
        # Used once, and gone: a second backward pass rebuilds all states.
        ctx.graphs = None if recorder is None else _graphs(recorder, tape)
        n_checkpoints = len(tape.checkpoints)
        solved.stats.count(n_graphs=len(ctx.graphs or ()), n_checkpoints=n_checkpoints)
        field, outputs, solver = problem.field, problem.outputs, problem.solver
        fixed, saved = field.fixed, solver.saved
        end, tape, _ = solved.integration
        assert isinstance(end, RewindableState)
        snapshots = [end.snapshot(), *tape.kept]
        sizes = 1, len(problem.z0), len(field.theta), len(outputs.theta), len(fixed), len(saved)
        ctx.set_materialize_grads(False)
        ctx.kept = _Kept(
            method,
            field.without_tensors(),
            solver.with_saved(()),
            outputs.fresh(),
            outputs.times,
            tape.events,
            solved.stats,
            [*sizes, *[len(snapshot.tensors) for snapshot in snapshots]],
            [snapshot.form for snapshot in snapshots],
        )
        ctx.save_for_backward(*inputs, *fixed, *saved, *[x for snapshot in snapshots for x in snapshot.tensors])
        return solved.results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        method, field, solver, outputs, times, events, stats, sizes, forms = ctx.kept
        refuse_double_backward(type(method).__name__)
        t, z0, theta, observer, fixed, saved, *states = _split(ctx.saved_tensors, sizes)
        # Detached: an f that calls y.requires_grad_() leaves its mark.
        z0, *states = [tuple([x.detach() for x in leaves]) for leaves in (z0, *states)]
        end, *kept = map(Snapshot, states, forms)
        graphs, ctx.graphs = ctx.graphs, None
        f = field.with_tensors(theta, fixed, wants_t=ctx.needs_input_grad[3], graphs=graphs)
        solver = solver.with_saved(saved)
        cotangents = OutputCotangents(outputs.with_tensors(observer, f.wants_t), times, grads)
        state = method.state.restore(end)
        passed = BackwardPass(f, solver, z0, cotangents, method.inverts, method.reruns)
        f.enter(times[0], times[-1])
        # Gradients for f and the observer; nothing else here requires one.
        with f.backward_pass(times[0], z0), cotangents.outputs.backward_pass(times[0], z0), torch.enable_grad():
            _, a = passed.run(events, kept, state, passed.zero(state))
        stats.count(n_evals_backward=f.n_evals, n_vjps=f.n_vjps, n_reruns=passed.n_reruns)
        if method.inverts:
            stats.count(reconstruction_error=passed.drift)
        method.judge_backward(passed)
        a_t = torch.stack([f.scalar(x) for x in outputs.of_given_times(a.times)]).to(t[0]) if f.wants_t else None
        return (None, None, None, a_t, *a.sums, *a.observer)


def _graphs(recorder: Recorder, tape: Tape) -> Graphs | None:
    """The graphs that a forward pass kept. Nothing amplifies round-off there, and no state has to be kept."""
    t, graphs = recorder.first_time, recorder.graphs()
    if graphs is not None and t is not None:
        tape.drop_after(t)
    return graphs


def _split(x: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[Tensor]]:
    """Parts of these sizes."""
    ends = [0, *running_sums(sizes)]
    return [x[i:j] for i, j in pairwise(ends)]


class OutputCotangents(NamedTuple):
    """Cotangents of the outputs, consumed from the last to the first."""

    outputs: Outputs
    times: Sequence[float]
    grads: Sequence[Tensor | None]  # dL/d(results)

    def pull(self, k: int, z: Tensors, a: Cotangent) -> Sequence[Tensor | None]:
        """dL/dy[k]; the other gradients go into `a`."""
        pulled = self.outputs.pull(k, self.times[k], z, self.grads)
        accumulate(a.observer, pulled.theta)
        a.add_to_time(k, pulled.t)
        return pulled.z

    def inner(self, output: InnerOutput, a: Cotangent) -> InnerOutputs:
        """Outputs inside a step; what they have beside dL/dy goes into `a`."""
        first, times = output.first, self.times[output.first : output.end]

        def pull(i: int, j: int, y: Tensors) -> Sequence[Tensor | None]:
            pulled = self.outputs.pull_inner(first + i, times[i:j], y, self.grads)
            accumulate(a.observer, pulled.theta)
            for k, g_t in enumerate(pulled.t or (), first + i):
                a.add_to_time(k, g_t)
            return pulled.z

        samples = self.outputs.samples_of(output.first, output.end)
        return InnerOutputs(first, times, not self.outputs.keeps_states, pull, samples=samples)


class PulledSegment(NamedTuple):
    """A segment over which a cotangent was pulled back."""

    head: Start | Refresh | Step
    segment: Sequence[Event]
    truth: RewindableState  # the known state before the head
    rebuilt: RewindableState  # the one with which the segment begins, as it was rebuilt
    start: RewindableState  # and as it is
    after: RewindableState  # the state at the end


@dataclass
class BackwardPass:
    """One backward pass over a tape, from segment to segment between known states."""

    f: Field
    solver: Solver
    z0: Tensors
    cotangents: OutputCotangents
    compares: bool
    reruns: bool
    drift: float = 0.0  # the worst of what was rebuilt
    n_reruns: int = 0
    gain: float = 0.0  # how wrong the gradient would have been without them, relative
    coarseness: float = 0.0  # of f, if it computes in lower precision: what it jumps by where z is rounded
    is_sure: bool = True  # of that; else a cast was seen, whose result f may have no use for

    def __post_init__(self):
        environment = self.f.environment
        self.coarseness, self.is_sure = environment.coarseness, environment.is_cast

    def zero(self, state: State) -> Cotangent:
        """The cotangent at the end, before the last output."""
        return Cotangent.zero(state, len(self.f.theta), len(self.cotangents.outputs.theta), len(self.cotangents.times))

    @property
    def limits(self) -> Limits:
        return max(LIMITS[z.dtype] for z in self.z0)

    @property
    def same(self) -> float:
        """The drift on the scale of a row up to which f is the function that it was."""
        return self.f.environment.coarseness or self.limits.row

    def run(
        self, events: Sequence[Event], kept: Sequence[Snapshot], state: RewindableState, a: Cotangent
    ) -> tuple[RewindableState, Cotangent]:
        """Pull `a` back over a tape, from its end, where `state` is; return the state and the cotangent at its start.

        A segment begins where the state is known: at the start, at a refresh, at a step whose state was kept.
        """
        heads = [
            (i, event)
            for i, event in enumerate(events)
            if isinstance(event, (Start, Refresh)) or (isinstance(event, Step) and event.before is not None)
        ]
        end = len(events)
        for i, head in reversed(heads):
            segment, end = events[i + (not isinstance(head, Step)) : end], i
            state, a = self._pull_segment(head, segment, kept, state, a, self._hands_over(events, i))
        return (self.pull_back(events[:end], kept, state, a) if end else state), a

    def _hands_over(self, events: Sequence[Event], i: int) -> bool:
        """Whether the i-th event is a step that begins with a slope which outputs inside the step before depend on.

        Not where a segment may be pulled back twice.
        """
        solver, has_outputs = self.solver, False
        if self.reruns or not (isinstance(solver, InterpolatingSolver) and solver.shares_end_slope):
            return False
        for j in range(i - 1, -1, -1):
            event = events[j]
            if isinstance(event, Step):
                return has_outputs and not event.closes
            has_outputs = has_outputs or isinstance(event, (InnerOutput, StageOutput))
        return False

    def _pull_segment(
        self,
        head: Start | Refresh | Step,
        segment: Sequence[Event],
        kept: Sequence[Snapshot],
        state: RewindableState,
        a: Cotangent,
        hands_over: bool,
    ) -> tuple[RewindableState, Cotangent]:
        """Pull `a` back over one segment, and over the event at its head; solve the segment again if it drifted.

        hands_over: see StepBack, for the first step of the segment.
        """
        if len(segment) == 1 and isinstance(head, Step) and not (self.compares or self.reruns or a.is_new):
            return self._undo_step(head, kept, state, a, None, False, hands_over), a
        after = state.fork()
        aside = a.set_aside() if self.reruns and not a.is_new else None
        compares = self.compares or a.is_new  # over kept states once, or another f would not be noticed
        state = self.pull_back(segment, kept, state, a, compares, hands_over)
        a.begun()
        if isinstance(head, Start):
            truth = state.started_at(self.z0)
        else:
            assert head.before is not None
            truth = state.rebuilt_with(kept[head.before])
        start = self._pull_head(head, truth, a)
        pulled = PulledSegment(head, segment, truth, state, start, after)
        if not compares:
            if aside:
                a.take_back(aside)
            return truth, a
        return truth, self.judged(pulled, a, aside)

    def judged(self, pulled: PulledSegment, a: Cotangent, aside: Cotangent | None) -> Cotangent:
        """The cotangent at the start of a segment over which `a` was pulled back: `a`, if the state there was rebuilt.

        Else the segment is solved again. aside: the cotangent at its end; None: that is zero.
        """
        head, segment, truth, rebuilt, start, after = pulled
        with self.f.without_graphs():
            is_wanting = not self._trusts(rebuilt, start, after, segment, a)
            if aside:
                a.take_back(aside)
            again = self._rerun(segment, start, after, aside or self.zero(rebuilt)) if is_wanting else None
            if again is None:
                return a
            self._pull_head(head, truth, again)
        self.gain = max(self.gain, _difference(a.sums, again.sums))
        return again

    def _pull_head(self, head: Start | Refresh | Step, before: RewindableState, a: Cotangent) -> RewindableState:
        """Pull `a` back over the event at the head of a segment; return the state with which the segment begins."""
        if isinstance(head, Step) or not isinstance(self.solver, AugmentedSolver):
            return before
        self.f.enter(head.t, self.cotangents.times[-1])
        started, g_t = self.solver.pull_start(self.f, head.t, before, a)
        a.add_to_time(head.k, g_t)
        assert isinstance(started, RewindableState)
        return started

    def pull_back(
        self,
        segment: Sequence[Event],
        kept: Sequence[Snapshot],
        state: RewindableState,
        a: Cotangent,
        compares: bool = False,
        hands_over: bool = False,
    ) -> RewindableState:
        """Pull `a` back over events without refreshes; return the state before them.

        compares: the caller compares that state with the kept one. hands_over: see StepBack, for a kept step.
        """
        f, solver, cotangents = self.f, self.solver, self.cotangents
        inside: list[InnerOutputs] = []

        def undo_step(step: Step, state: RewindableState) -> Any:
            return self._undo_step(step, kept, state, a, inside.pop() if inside else None, compares, hands_over)

        def on_output(output: Output | InnerOutput | StageOutput, state: RewindableState) -> None:
            if isinstance(output, StageOutput):
                recorded = cotangents.outputs.pull_stages(output.i, cotangents.grads)
                inside.extend([] if recorded is None else [InnerOutputs(recorded=recorded)])
                return
            if isinstance(output, InnerOutput):
                recorded = inside.pop().recorded if inside else None
                inside.append(cotangents.inner(output, a)._replace(recorded=recorded))
                return
            z = () if cotangents.outputs.keeps_states else state.point
            accumulate(a.z, cotangents.pull(output.k, z, a))

        def undo_run(steps: Sequence[Step], state: RewindableState) -> State:
            assert isinstance(solver, RunningSolver)
            f.enter(steps[0].t0, steps[-1].t1)
            return solver.pull_run(f, _grid(steps), state, a)

        several = isinstance(solver, RunningSolver) and isinstance(state, Floats) and not f.wants_t
        return rewind(segment, kept, state, undo_step, on_output, undo_run if several else None)

    def _undo_step(
        self,
        step: Step,
        kept: Sequence[Snapshot],
        state: RewindableState,
        a: Cotangent,
        inner: InnerOutputs | None,
        compares: bool,
        hands_over: bool,
    ) -> Any:
        """Pull `a` back over one step, with the outputs inside it; return the state at its start."""
        f, before = self.f, None
        # On integers the start is rebuilt to the bit, so that a kept one has nothing to add.
        if step.before is not None and not isinstance(state, FixedPoint):
            before = state.rebuilt_with(kept[step.before])
        f.enter(step.t0, step.t1)
        gives = hands_over and before is not None
        how = StepBack(step.t0, step.t1, before, inner, compares, step.closes, gives)
        back = self.solver.pullback(f, how, state, a)
        if f.wants_t:
            a.finish_step(step.k0, step.k1, 0 if inner is None else inner.first)
        return back

    def _trusts(
        self,
        rebuilt: RewindableState,
        truth: RewindableState,
        after: RewindableState,
        segment: Sequence[Event],
        a: Cotangent,
    ) -> bool:
        steps = [event for event in segment if isinstance(event, Step)]
        if not steps:
            return True
        span = steps[-1].t1 - steps[0].t0
        limits = self.limits
        drift = rebuilt.deviation(truth, after, self._scale_of_v(span), limits[:2])
        if isinstance(rebuilt, FixedPoint) and drift.component:  # nothing but another f can lead astray there
            self.f.forget_behaviour()
            require_same(False)
        is_small = limits.hold(drift, 8 * self.f.environment.eps_of_state * math.sqrt(len(steps)))
        if self.coarseness and not self.is_sure and not is_small:
            self.is_sure = True
            self.f.enter(steps[-1].t1, steps[-1].t0)
            self.coarseness = self.coarseness if self._is_coarse(steps[-1].t1, after.point) else 0.0
        coarse = self.coarseness
        self.drift = max(self.drift, drift.row if coarse else drift.component)
        if drift.row <= coarse if coarse else is_small:
            return True
        if not self.reruns:
            return self.compares  # else states were kept, and f is another one
        if coarse or drift.row > limits.row:
            return False
        self.f.enter(steps[0].t0, steps[0].t1)
        return self._effect(steps[0].t0, rebuilt, truth, span, a) <= limits.effect * math.sqrt(len(steps))

    def _scale_of_v(self, span: float) -> float:
        return self.solver.scale_of_v(span) if isinstance(self.solver, AugmentedSolver) else 1.0

    def _is_coarse(self, t: float, z: Tensors) -> bool:
        """Whether f rounds z: moved by far less than that rounding, it does not follow as it does a larger move.

        It stays where it is, or jumps, in a good part of its components. What does not depend on z tells nothing.
        """
        coarse = self.coarseness
        move = math.sqrt(coarse * self.f.environment.eps_of_state)
        with torch.no_grad():
            here, near, far = (self.f(t, tuple(x * (1 + e) for x in z)) for e in (0.0, move, coarse))
        parts = []
        for u, x, y in zip(here, near, far, strict=True):
            change, wanted = (x - u) / move, (y - u) / coarse
            is_off = (change - wanted).abs() > wanted.abs() / 2
            parts.append(torch.stack([is_off.sum(), ((change != 0) | (wanted != 0)).sum()]))
        n_off, n_moved = torch.stack([part.to(parts[0]) for part in parts]).sum(0).tolist()
        return n_off > n_moved / 4

    def _effect(self, t: float, rebuilt: State, truth: State, span: float, a: Cotangent) -> float:
        """How wrong the gradient may be because of a drift, relative: as if f had been differentiated for the whole of
        `span` where it is at the start, which is where it is largest.

        The worst row of dL/dz or parameter counts: one bad row of a large batch shows.
        """
        _, wrong, _ = self.f.linearize(t, rebuilt.point, a.z)
        _, right, _ = self.f.linearize(t, truth.point, a.z)
        off, size = [], []
        for i, (x, y, whole) in enumerate(zip(wrong, right, a.sums, strict=True)):
            if x is None or y is None or whole is None:
                continue
            for norms, g in ((off, x - y), (size, whole)):
                norms.append(rows(g).norm(dim=1) if i < len(a.z) else g.norm()[None])
        if not off:
            return 0.0
        sizes, offs = (torch.cat([x.to(norms[0]) for x in norms]) for norms in (size, off))
        offs, sizes = abs(span) * offs, torch.maximum(sizes, SMALL * sizes.amax())
        effect = torch.where(offs == 0, 0.0, offs / sizes).amax().item()
        return effect if math.isfinite(effect) else math.inf

    def _rerun(
        self, segment: Sequence[Event], state: RewindableState, after: RewindableState, a: Cotangent
    ) -> Cotangent | None:
        """Solve a segment again from its start, keep about the root of its states, and pull back once more.

        None: it was one step that was differentiated from its start already.
        """
        steps = [event for event in segment if isinstance(event, Step)]
        n, from_start = len(steps), bool(steps) and steps[0].before is not None
        tape = Tape(keep_every=max(1, math.isqrt(n)))
        now: Any = state
        with torch.no_grad():
            for run in in_runs(segment):
                if isinstance(run[0], Step):
                    now = self._step_again([step for step in run if isinstance(step, Step)], now, tape)
                else:
                    tape.events.extend(run)
        require_same(now.deviation(after, after, 1.0).row <= self.same)
        if n == 0 or (n == 1 and from_start) or not self.reruns:
            return None
        self.n_reruns += 1
        return self.run(tape.events, tape.kept, now.fork(), a)[1]

    def _step_again(self, steps: Sequence[Step], state: State, tape: Tape) -> State:
        """Take the steps of a run once more, by the same operations; return the state at their end."""

        def record(i: int, make_start: Callable[[], State]) -> None:
            step = steps[i]
            tape.step(*step[:4], make_start() if tape.keeps() else None, step.closes, step.is_joined)

        t0, t1 = steps[0].t0, steps[-1].t1
        self.f.enter(t0, t1)
        if len(steps) > 1:
            assert isinstance(self.solver, RunningSolver)
            return self.solver.run(self.f, _grid(steps), state, record=record)[0]
        record(0, lambda: state)
        return self.solver.step(self.f, t0, t1, state, None, adaptive=False).state


def _grid(steps: Sequence[Step]) -> list[float]:
    return [steps[0].t0, *(step.t1 for step in steps)]


def _norm(x: Sequence[Tensor | None]) -> Tensor:
    norms = foreach_norm([leaf for leaf in x if leaf is not None])
    return torch.stack([norm.to(norms[0]) for norm in norms]).norm()


def _quotient(off: Tensor, size: Tensor) -> float:
    """0 where nothing is off, infinite where it cannot be told. One host read."""
    a, b = torch.stack([off, size]).tolist()
    if a == 0:
        return 0.0
    return a / b if b > 0 and math.isfinite(a) else math.inf


def _difference(found: Sequence[Tensor | None], truth: Sequence[Tensor | None]) -> float:
    """|found - truth| / |truth|"""
    pairs = [(x, y) for x, y in zip(found, truth, strict=True) if x is not None and y is not None]
    return _quotient(_norm([x - y for x, y in pairs]), _norm([y for _, y in pairs]))
