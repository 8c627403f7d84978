"""Fixed steps of MALI and ACA taken directly: nothing is asked that the schedule of the steps tells in advance.

Where y is wanted at the output times, and f is known from earlier solves to need no care, a solve in fixed steps of a
leapfrog is a list of runs (loop/schedule.py). The forward pass takes one after the other, the backward pass takes them
back, and no tape is kept: with a small f most of the time of a short solve is spent around its evaluations. The numbers
are those of the loop, to the bit. If anything turns up that is not in the schedule - f - v alternates, the end is not
finite, random numbers were drawn, a rebuilt state drifted - the loop, or `BackwardPass`, does it again.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate as running_sums
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.abstract import Abstract
from torchmali.controllers import FixedStep
from torchmali.field.environment import in_forward_pass
from torchmali.field.evaluate import Field
from torchmali.gradients.base import Problem, Solved, refuse_double_backward
from torchmali.gradients.replay import LIMITS, BackwardPass, Limits, OutputCotangents, PulledSegment, ReplayGradient
from torchmali.loop.base import Integration
from torchmali.loop.schedule import Schedule, schedule_of
from torchmali.outputs.stored import StoredOutputs
from torchmali.refresh import Refresher
from torchmali.solution import Stats
from torchmali.solvers.base import Record, StepBack
from torchmali.solvers.cotangent import Cotangent
from torchmali.solvers.leapfrog import Leapfrog
from torchmali.state.base import State
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors, first_non_finite
from torchmali.tape import Start, Step, Tape


class NotDirectError(Exception):
    """Something turned up for which the loop is needed."""


def direct_schedule(problem: Problem) -> Schedule | None:
    """The schedule of a solve that can be made directly; None for others."""
    return plain_schedule(problem) if problem.field.is_plain() else None


def plain_schedule(problem: Problem) -> Schedule | None:
    """The schedule of a solve, if all that happens in it is planned; None for others."""
    solver, controller, times = problem.solver, problem.controller, problem.times
    if type(controller) is not FixedStep or type(problem.outputs) is not StoredOutputs:
        return None
    if not isinstance(solver, Leapfrog) or solver.eta != 1 or problem.t is not None or problem.wants_code:
        return None
    schedule = schedule_of(solver, controller.h, times, controller.land, controller.n_steps(times))
    return schedule if schedule.is_plain else None


class Moves(Abstract):
    """How the steps of a schedule are taken."""

    saved: Sequence[Tensor] = ()  # what they read beside the state, f's tensors and the fixed arguments
    n_checkpoints: int = 0  # states that they kept

    def with_saved(self, saved: Sequence[Tensor]) -> Moves:
        """These moves for a backward pass, with `saved` as autograd kept it. (Until then they are without it.)"""
        return self

    @abstractmethod
    def forward(self, problem: Problem, schedule: Schedule) -> tuple[StoredOutputs, Floats]:
        """Follow a schedule from the start; raise NotDirectError if the loop has to do it."""

    @abstractmethod
    def backward(self, back: BackwardPath) -> tuple[Cotangent, Floats, Floats]:
        """Follow a schedule back: the cotangent at the start, the start as it was rebuilt, and as it is."""


class EagerMoves(Moves):
    """Steps taken by the solver, one evaluation of f after the other."""

    def forward(self, problem: Problem, schedule: Schedule) -> tuple[StoredOutputs, Floats]:
        return _run(problem, schedule)

    def backward(self, back: BackwardPath) -> tuple[Cotangent, Floats, Floats]:
        f, solver = back.f, back.solver
        a = back.cotangent()
        state: Any = back.end.fork()
        for run in reversed(back.schedule.runs):
            back.add_output(run.output, a.z)
            state = solver.pull_run(f, run.times, state, a)
        back.add_output(0, a.z)
        start: Any = solver.pull_start(f, back.times[0], Floats(back.z0), a)[0]
        return a, state, start


class KeptMoves(Moves):
    """Steps taken by the solver, whose starts are kept: each is pulled back from there."""

    def __init__(self, saved: Sequence[Tensor] = ()):
        self.saved = saved  # (z, v) at the start of each step

    def with_saved(self, saved: Sequence[Tensor]) -> Moves:
        return KeptMoves(saved)

    def forward(self, problem: Problem, schedule: Schedule) -> tuple[StoredOutputs, Floats]:
        kept: list[Tensor] = []

        def keep(i: int, make_start: Callable[[], State]) -> None:
            start = make_start()
            kept.extend((*start.point, *start.slope))

        found = _run(problem, schedule, keep)
        self.saved, self.n_checkpoints = kept, schedule.n_steps
        return found

    def backward(self, back: BackwardPath) -> tuple[Cotangent, Floats, Floats]:
        f, solver, n, i = back.f, back.solver, len(back.z0), len(self.saved)
        a, state, last = back.cotangent(), back.end.fork(), back.schedule.runs[-1].steps[-1]
        for run in reversed(back.schedule.runs):
            back.add_output(run.output, a.z)
            for step in reversed(run.steps):
                i -= 2 * n
                # Detached: an f that calls y.requires_grad_() leaves its mark.
                leaves = [x.detach() for x in self.saved[i : i + 2 * n]]
                before = Floats(tuple(leaves[:n]), tuple(leaves[n:]))
                # Looked at once, or another f would not be noticed.
                how = StepBack(step.t0, step.t1, before, None, step is last, step.closes, False)
                state: Any = solver.pullback(f, how, state, a)
                if step is last:
                    back.judge_kept(step, before, state, a)
        back.add_output(0, a.z)
        start: Any = solver.pull_start(f, back.times[0], Floats(back.z0), a)[0]
        return a, start, start


def solve_directly(
    method: ReplayGradient,
    problem: Problem,
    schedule: Schedule,
    moves: Moves = EagerMoves(),  # noqa: B008
) -> Solved:
    """Solve a problem along its schedule; raise NotDirectError if the loop has to do it."""
    if not problem.wants_gradient:
        with torch.no_grad():
            results, end, stats = _solved(problem, schedule, moves)
    else:
        found: list[tuple[Floats, Stats]] = []
        results = _Direct.apply(_Call(method, problem, schedule, moves, found), *problem.inputs)
        ((end, stats),) = found
    return Solved(results, stats, Integration(end, Tape(), 0))


def _solved(problem: Problem, schedule: Schedule, moves: Moves) -> tuple[Tensors, Floats, Stats]:
    field = problem.field
    source = field.environment.source
    source.begin(field.device)
    outputs, state = in_forward_pass([field.environment], moves.forward, problem, schedule)
    if first_non_finite(state.point) is not None or source.look():
        raise NotDirectError
    _, n_steps, h_min, h_max = schedule
    counts = {"n_evals_forward": field.n_evals, "n_checkpoints": moves.n_checkpoints}
    stats = Stats(n_steps=n_steps, h_min=h_min, h_max=h_max, **counts)
    return outputs.results(), state, stats


def _run(problem: Problem, schedule: Schedule, record: Record | None = None) -> tuple[StoredOutputs, Floats]:
    f, z0, times, _, solver, _, outputs, _ = problem
    assert isinstance(solver, Leapfrog) and isinstance(outputs, StoredOutputs)
    z0 = tuple([z.detach() for z in z0])
    state: Any = Floats(z0, f(times[0], z0))
    outputs.record(0, times[0], z0)
    refresher = None
    for grid, steps, n_observed, refresh, output, _ in schedule.runs:
        state, residuals = solver.run(f, grid, state, n_observed, record)
        if refresh.collects:
            refresher = refresher or Refresher(solver, False, range(len(z0)), schedule.n_steps)
        if refresher is not None:
            refresher.after_steps(len(steps) - 1, ())
            if refresh.decides:
                h, eps = abs(grid[-1] - grid[-2]), f.environment.eps
                if refresher.alternates(residuals, state.point, h, eps):
                    raise NotDirectError
            refresher.after_steps(1, residuals)
        if output is not None:
            outputs.record(output, times[output], state.point)
    return outputs, state


class _Kept(NamedTuple):
    """What a backward pass needs beside the tensors that autograd saves."""

    method: ReplayGradient
    field: Field
    solver: Leapfrog
    schedule: Schedule
    times: Sequence[float]
    stats: Stats
    moves: Moves
    sizes: Sequence[int]  # numbers of saved tensors: z0, theta, fixed ones, those of the moves, z and v at the end


class _Call(NamedTuple):
    """What a forward pass needs. One object: autograd looks at each input of a function."""

    method: ReplayGradient
    problem: Problem
    schedule: Schedule
    moves: Moves
    found: list[tuple[Floats, Stats]]  # to which it appends what is no tensor


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor | None) -> Tensors:
        method, problem, schedule, moves, found = call
        results, end, stats = _solved(problem, schedule, moves)
        found.append((end, stats))
        ctx.set_materialize_grads(False)
        field, solver, times = problem.field.without_tensors(), problem.solver, problem.times
        fixed, saved, n = problem.field.fixed, moves.saved, len(problem.z0)
        sizes = n, len(problem.field.theta), len(fixed), len(saved), n, n
        ctx.kept = _Kept(method, field, solver, schedule, times, stats, moves.with_saved(()), sizes)  # pyright: ignore
        ctx.save_for_backward(*inputs[1:], *fixed, *saved, *end.point, *end.slope)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        method, field, solver, schedule, times, stats, moves, sizes = ctx.kept
        refuse_double_backward(type(method).__name__)
        saved = ctx.saved_tensors  # once: each look unpacks all of them
        z0, theta, fixed, others, point, slope = [saved[i:j] for i, j in pairwise(running_sums(sizes, initial=0))]
        # Detached: an f that calls y.requires_grad_() leaves its mark.
        z0, point, slope = [tuple([x.detach() for x in part]) for part in (z0, point, slope)]
        f = field.with_tensors(theta, fixed, wants_t=False)
        back = BackwardPath(f, solver, schedule, times, grads, Floats(point, slope), z0)
        with f.backward_pass(times[0], z0), torch.enable_grad():
            a = back.run(method, moves.with_saved(others), stats)[0]
        return None, None, *a.sums


class BackwardPath(NamedTuple):
    """A backward pass over a schedule."""

    f: Field
    solver: Leapfrog
    schedule: Schedule
    times: Sequence[float]
    grads: Sequence[Sequence[Tensor | None] | Tensor | None]  # dL/dy
    end: Floats
    z0: Tensors
    of_end: tuple[Tensors, Tensors] | None = None  # dL/d(z, v) at the end, beside what the outputs give; None: zero

    def run(self, method: ReplayGradient, moves: Moves, stats: Stats) -> tuple[Cotangent, bool]:
        """Return the cotangent at the start, and whether all of the schedule could be rebuilt; count and warn."""
        if not method.inverts:
            a = moves.backward(self)[0]
            stats.count(n_evals_backward=self.f.n_evals, n_vjps=self.f.n_vjps, n_reruns=0)
            return a, True
        a, drift, rebuilt, start = self._pull(moves)
        n_reruns = 0
        if drift is None:
            passed, a = self._judged(method, a, rebuilt, start)
            drift, n_reruns = passed.drift, passed.n_reruns
            method.judge_backward(passed)
        counts = {"n_evals_backward": self.f.n_evals, "n_vjps": self.f.n_vjps, "n_reruns": n_reruns}
        stats.count(reconstruction_error=drift, **counts)
        return a, not n_reruns

    def cotangent(self) -> Cotangent:
        """dL/d(z, v) at the end, before the outputs."""
        a = Cotangent.zero(self.end, len(self.f.theta), 0, 0)
        if self.of_end is not None:
            for whole, part in zip((*a.z, *a.v), (*self.of_end[0], *self.of_end[1]), strict=True):
                whole.copy_(part)
        return a

    def _pull(self, moves: Moves) -> tuple[Cotangent, float | None, Floats, Floats]:
        """Return the cotangent at the start, and by how far that was missed (None: by more than can be trusted).

        Also: the state there as it was rebuilt, and as it is.
        """
        f, solver = self.f, self.solver
        a, state, start = moves.backward(self)
        limits: Limits = max([LIMITS[z.dtype] for z in self.z0])
        span = self.schedule.runs[-1].times[-1] - self.times[0]
        drift = state.deviation(start, self.end, solver.scale_of_v(span), limits[:2])
        is_small = limits.hold(drift, 8 * f.environment.eps_of_state * math.sqrt(self.schedule.n_steps))
        return a, drift.component if is_small else None, state, start

    def add_output(self, k: int | None, az: Sequence[Tensor]) -> None:
        """Add dL/dy[k] to dL/dz."""
        if k is not None:
            for z, g in zip(az, self.grads, strict=True):
                part = None if g is None else g[k]
                if part is not None:
                    z.add_(part)

    def judge_kept(self, step: Step, before: Floats, reached: Floats, a: Cotangent) -> None:
        """Raise if f is another one: `before`, where the last step begins, is not what that step was pulled back to."""
        outputs: Any = OutputCotangents(StoredOutputs(len(self.times)), self.times, self.grads)  # pyright: ignore
        passed = BackwardPass(self.f, self.solver, self.z0, outputs, compares=False, reruns=False)
        pulled = PulledSegment(step._replace(before=0), [step._replace(before=0)], before, reached, before, self.end)
        passed.judged(pulled, a, None)

    def _judged(
        self, method: ReplayGradient, a: Cotangent, rebuilt: Floats, start: Floats
    ) -> tuple[BackwardPass, Cotangent]:
        """Judge a start that was missed as the loop does, by the tape that it would have made; perhaps solve again."""
        outputs: Any = OutputCotangents(StoredOutputs(len(self.times)), self.times, self.grads)  # pyright: ignore
        passed = BackwardPass(self.f, self.solver, self.z0, outputs, method.inverts, bool(method.reruns))
        head, *segment = self.schedule.events
        assert isinstance(head, Start)
        pulled = PulledSegment(head, segment, Floats(self.z0), rebuilt, start, self.end.fork())
        return passed, passed.judged(pulled, a, None if self.of_end is None else self.cotangent())
