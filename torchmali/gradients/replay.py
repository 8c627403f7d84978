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
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchmali.field.evaluate import Field
from torchmali.gradients.base import GradientMethod, Problem, forward, refuse_double_backward, require_same
from torchmali.outputs.base import Outputs
from torchmali.solvers.base import Cotangent, Inside, Passed, Solver, accumulate
from torchmali.state.base import RebuildError, Snapshot, State
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors, rows
from torchmali.tape import Event, Output, Refresh, Rescale, Step, Tape


class Limits(NamedTuple):
    """How well a state has to be rebuilt for the gradient to be trusted."""

    most: float  # for half of the components of a row, each on its own scale, and for all on the scale of the row
    some: float  # for all components, each on its own scale, but those that are small by chance
    row: float  # above this drift on the scale of a row it is not trusted: perhaps f is another function
    effect: float  # in between: by what the drift does to the gradient, relative, for each root of a step

    def hold(self, drift: RebuildError, rounding: float) -> bool:
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
    """A gradient method that keeps the tape of the forward pass and walks back over it."""

    inverts: ClassVar[bool]  # states are rebuilt, not kept: compare them where they are known
    reruns: ClassVar[bool] | bool = False  # and solve again what could not be rebuilt

    state: ClassVar[type[State]] = Floats

    def arithmetic(self, span: float) -> Any:
        """What makes the first state of a solve over a time span."""
        return self.state

    @abstractmethod
    def tape(self, problem: Problem) -> Tape:
        """What the forward pass is to keep."""

    def solve(self, problem: Problem) -> Tensors:
        if not problem.wants_gradient:
            tape = self.tape(problem) if problem.wants_code else None
            results, end, tape = forward(problem, arithmetic=self.arithmetic(problem.span), tape=tape)
            self.judge_forward(problem, problem.outputs.states(results), end, tape)
            return results
        return _Replay.apply(self, problem, *problem.inputs)  # type: ignore[return-value]

    def judge_forward(self, problem: Problem, y: Tensors, end: State, tape: Tape) -> None:
        """Look at a finished forward pass."""

    def judge_backward(self, way: BackwardPass) -> None:
        """Look at a finished backward pass."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, method: ReplayGradient, problem: Problem, *inputs: Tensor | None) -> Tensors:
        results, end, tape = forward(problem, arithmetic=method.arithmetic(problem.span), tape=method.tape(problem))
        outputs = problem.outputs
        method.judge_forward(problem, outputs.states(results), end, tape)
        ctx.set_materialize_grads(False)
        ctx.method, ctx.events, ctx.stats = method, tape.events, problem.stats
        ctx.times, ctx.outputs = problem.times, outputs.without_tensors()
        ctx.field, ctx.solver = problem.field.without_tensors(), problem.solver
        snapshots = [end.snapshot(), *tape.kept]
        ctx.forms = [(len(snapshot.tensors), snapshot.form) for snapshot in snapshots]
        fixed = problem.field.fixed
        ctx.sizes = 1, len(problem.z0), len(problem.field.theta), len(outputs.theta), len(fixed)
        ctx.save_for_backward(*inputs, *fixed, *(x for snapshot in snapshots for x in snapshot.tensors))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        method: ReplayGradient = ctx.method
        refuse_double_backward(type(method).__name__)
        saved = iter(ctx.saved_tensors)
        t, z0, theta, observer, fixed = (tuple(islice(saved, size)) for size in ctx.sizes)
        # Detached: an f that calls y.requires_grad_() leaves its mark.
        end, *kept = (Snapshot(tuple(x.detach() for x in islice(saved, size)), form) for size, form in ctx.forms)
        f = ctx.field.with_tensors(theta, fixed, wants_t=ctx.needs_input_grad[2])
        cotangents = OutputCotangents(ctx.outputs.with_tensors(observer, f.wants_t), ctx.times, grads)
        state = method.state.restore(end)
        way = BackwardPass(f, ctx.solver, tuple(z.detach() for z in z0), cotangents, method.inverts, method.reruns)
        # Gradients for f and the observer; nothing else here requires one.
        start = ctx.times[0], way.z0
        with f.backward_pass(*start), cotangents.outputs.backward_pass(*start), torch.enable_grad():
            _, a = way.back(ctx.events, kept, state, way.nothing(state))
        ctx.stats.n_evals_backward, ctx.stats.n_vjps, ctx.stats.n_reruns = f.n_evals, f.n_vjps, way.n_reruns
        if method.inverts:
            ctx.stats.reconstruction_error = way.drift
        method.judge_backward(way)
        a_t = torch.stack([f.time(x) for x in a.times]).to(t[0]) if f.wants_t else None
        return (None, None, a_t, *a.sums, *a.observer)


@dataclass(frozen=True)
class OutputCotangents:
    """The output times, from behind."""

    outputs: Outputs
    times: Sequence[float]
    grads: Sequence[Tensor | None]  # dL/d(results)

    def pull(self, k: int, z: Tensors, a: Cotangent) -> Sequence[Tensor | None]:
        """dL/dy[k]; what else depends on it goes into `a`."""
        a_z, a_observer, a_t = self.outputs.pull(self.times[k], z, k, self.grads)
        accumulate(a.observer, a_observer)
        if a_t is not None:
            a.times[k] = a.times[k] + a_t
        return a_z


@dataclass
class BackwardPass:
    """The way back of one backward pass."""

    f: Field
    solver: Solver
    z0: Tensors
    cotangents: OutputCotangents
    compares: bool
    reruns: bool
    drift: float = 0.0  # the worst of what was rebuilt
    n_reruns: int = 0
    gain: float = 0.0  # how wrong the gradient would have been without them, relative
    coarseness: float = 0.0  # of f, where it computes in lower precision: what it jumps by where z is rounded
    is_sure: bool = True  # of that; else a cast was seen, whose result f may have no use for

    def __post_init__(self):
        around = self.f.environment
        self.coarseness, self.is_sure = around.coarseness, around.is_cast

    def nothing(self, state: State) -> Cotangent:
        return Cotangent.zero(state, len(self.f.theta), len(self.cotangents.outputs.theta), len(self.cotangents.times))

    @property
    def limits(self) -> Limits:
        return max(LIMITS[z.dtype] for z in self.z0)

    @property
    def same(self) -> float:
        """The drift on the scale of a row up to which f is the function that it was."""
        return self.f.environment.coarseness or self.limits.row

    def back(
        self, events: Sequence[Event], kept: Sequence[Snapshot], state: State, a: Cotangent
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
            state = pull_back(self.f, self.solver, segment, kept, state, a, self.cotangents, compares)
            a.is_new = False
            if head.before is not None:
                truth = state.back_to(kept[head.before])
            else:
                truth = state.started_at(self.z0)
            start = self._refreshed(head, truth, a) if isinstance(head, Refresh) else truth
            is_wanting = compares and not self._trusts(state, start, after, segment, a)
            if aside:
                a.take_back(aside)
            again = self._again(segment, start, after, aside or self.nothing(state)) if is_wanting else None
            if again is not None:
                if isinstance(head, Refresh):
                    self._refreshed(head, truth, again)
                self.gain = max(self.gain, _difference(a.sums, again.sums))
                a = again
            state = truth
        return pull_back(self.f, self.solver, events[:end], kept, state, a, self.cotangents), a

    def _refreshed(self, head: Refresh, before: State, a: Cotangent) -> State:
        """Pull `a` back over a refresh; the state that it made."""
        renewed, g_t = self.solver.pull_refresh(self.f, head.t, before, a)
        if g_t is not None:
            a.times[head.k] = a.times[head.k] + g_t
        return renewed

    def _trusts(self, rebuilt: State, truth: State, after: State, segment: Sequence[Event], a: Cotangent) -> bool:
        steps = [event for event in segment if isinstance(event, Step)]
        if not steps:
            return True
        span = steps[-1].t1 - steps[0].t0
        limits = self.limits
        drift = rebuilt.distance(truth, after, self.solver.scale_of_v(span), limits[:2])
        if rebuilt.is_bounded:  # nothing but another f can lead astray there
            require_same(drift.component == 0)
        is_small = limits.hold(drift, 8 * self.f.environment.eps_of_state * math.sqrt(len(steps)))
        if self.coarseness and not self.is_sure and not is_small:
            self.is_sure = True
            self.coarseness = self.coarseness if self._is_coarse(steps[-1].t1, after.point) else 0.0
        coarse = self.coarseness
        self.drift = max(self.drift, drift.row if coarse else drift.component)
        if drift.row <= coarse if coarse else is_small:
            return True
        if not self.reruns:
            return self.compares  # else states were kept, and f is another one
        if coarse or drift.row > limits.row:
            return False
        return self._effect(steps[0].t0, rebuilt, truth, span, a) <= limits.effect * math.sqrt(len(steps))

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

    def _again(self, segment: Sequence[Event], state: State, after: State, a: Cotangent) -> Cotangent | None:
        """Solve a segment again from its start, keep about the root of its states, and walk back once more.

        None: it was one step that was differentiated from its start already.
        """
        steps = [event for event in segment if isinstance(event, Step)]
        n, from_start = len(steps), bool(steps) and steps[0].before is not None
        tape = Tape(keep_every=max(1, math.isqrt(n)))
        with torch.no_grad():
            for event in segment:
                if isinstance(event, Step):
                    tape.step(*event[:4], state)
                    state = self.solver.step(self.f, event.t0, event.t1, state, None, adaptive=False).state
                else:
                    tape.events.append(event)
        require_same(state.distance(after, after, 1.0).row <= self.same)
        if n == 0 or (n == 1 and from_start) or not self.reruns:
            return None
        self.n_reruns += 1
        return self.back(tape.events, tape.kept, state.fork(), a)[1]


def _norm(x: Sequence[Tensor | None]) -> Tensor:
    norms = torch._foreach_norm([leaf for leaf in x if leaf is not None])
    return torch.stack([norm.to(norms[0]) for norm in norms]).norm()


def _quotient(off: Tensor, size: Tensor) -> float:
    """0 where nothing is off, infinite where it cannot be told. One host read."""
    a, b = torch.stack([off, size]).tolist()
    return 0.0 if a == 0 else a / b if b > 0 and math.isfinite(a) else math.inf


def _difference(found: Sequence[Tensor | None], truth: Sequence[Tensor | None]) -> float:
    """|found - truth| / |truth|"""
    pairs = [(x, y) for x, y in zip(found, truth, strict=True) if x is not None and y is not None]
    return _quotient(_norm([x - y for x, y in pairs]), _norm([y for _, y in pairs]))


def pull_back(
    f: Field,
    solver: Solver,
    events: Sequence[Event],
    kept: Sequence[Snapshot],
    state: State,
    a: Cotangent,
    cotangents: OutputCotangents,
    compares: bool = False,
) -> State:
    """Pull dL/dy back over a slice of the tape without renewals: the state at its start. Works on `a` in place.

    compares: the caller looks at how well that state meets the kept one.
    """
    inside: list[Inside] = []
    for event in reversed(events):
        if isinstance(event, Step):
            before = None if event.before is None else state.back_to(kept[event.before])
            state = solver.pullback(f, Passed(event.t0, event.t1, before, inside, compares), state, a)
            if f.wants_t:
                a.times[event.k0] = a.times[event.k0] + a.t0
                a.times[event.k1] = a.times[event.k1] + a.t1
                for output, dt in zip(inside, a.inside, strict=True):
                    a.times[output.k] = a.times[output.k] + dt
                a.t0, a.t1, a.inside = 0.0, 0.0, ()
            inside = []
        elif isinstance(event, Output):
            if event.inside is not None:
                inside.append(Inside(event.k, event.inside, partial(cotangents.pull, event.k, a=a)))
            else:
                z = () if cotangents.outputs.keeps else state.point
                accumulate(a.z, cotangents.pull(event.k, z, a))
        elif isinstance(event, Rescale):
            assert event.lost is not None
            state = state.unscaled(event.change, kept[event.lost])
    return state
