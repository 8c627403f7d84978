"""Fixed steps of MALI taken directly: nothing is asked that the schedule of the steps tells in advance.

Where y is wanted at the output times, and f is known from earlier solves to need no care, a solve in fixed steps of a
leapfrog is a list of runs (loop/schedule.py). The forward pass takes one after the other, the backward pass takes them
back, and no tape is kept: with a small f most of the time of a short solve is spent around its evaluations. The numbers
are those of the loop, to the bit. If anything turns up that is not in the schedule - f - v alternates, the end is not
finite, random numbers were drawn, a rebuilt state drifted - the loop, or `BackwardPass`, does it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.controllers import FixedStep
from torchmali.field.environment import in_forward_pass
from torchmali.field.evaluate import Field
from torchmali.gradients.base import Problem, Solved, refuse_double_backward
from torchmali.gradients.replay import LIMITS, BackwardPass, Limits, OutputCotangents, ReplayGradient
from torchmali.loop.base import Integration, read
from torchmali.loop.schedule import Schedule, schedule_of
from torchmali.outputs.stored import StoredOutputs
from torchmali.refresh import Refresher
from torchmali.solution import Stats
from torchmali.solvers.cotangent import Cotangent
from torchmali.solvers.leapfrog import Leapfrog
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors, first_non_finite
from torchmali.tape import Tape


class NotDirectError(Exception):
    """Something turned up for which the loop is needed."""


def direct_schedule(problem: Problem) -> Schedule | None:
    """The schedule of a solve that can be made directly; None for others."""
    solver, controller, times = problem.solver, problem.controller, problem.times
    if type(controller) is not FixedStep or type(problem.outputs) is not StoredOutputs or not problem.field.is_plain():
        return None
    if not isinstance(solver, Leapfrog) or solver.eta != 1 or problem.t is not None or problem.wants_code:
        return None
    schedule = schedule_of(solver, controller.h, times, controller.land, controller.n_steps(times))
    return schedule if schedule.is_plain else None


def solve_directly(method: ReplayGradient, problem: Problem, schedule: Schedule) -> Solved:
    """Solve a problem along its schedule; raise NotDirectError if the loop has to do it."""
    if not problem.wants_gradient:
        with torch.no_grad():
            results, end, stats = _solved(problem, schedule)
    else:
        found: list[tuple[Floats, Stats]] = []
        results = _Direct.apply(method, problem, schedule, found, *problem.inputs)
        ((end, stats),) = found
    return Solved(results, stats, Integration(end, Tape(), 0))


def _solved(problem: Problem, schedule: Schedule) -> tuple[Tensors, Floats, Stats]:
    field = problem.field
    source = field.environment.source
    source.begin(field.device)
    outputs, state = in_forward_pass([field.environment], lambda: _run(problem, schedule))
    if first_non_finite(state.point) is not None or source.look():
        raise NotDirectError
    _, n_steps, h_min, h_max = schedule
    stats = Stats(n_steps=n_steps, n_evals_forward=field.n_evals, h_min=h_min, h_max=h_max)
    return outputs.results(), state, stats


def _run(problem: Problem, schedule: Schedule) -> tuple[StoredOutputs, Floats]:
    f, z0, times, _, solver, _, outputs, _ = problem
    assert isinstance(solver, Leapfrog) and isinstance(outputs, StoredOutputs)
    z0 = tuple([z.detach() for z in z0])
    state: Any = Floats(z0, f(times[0], z0))
    outputs.record(0, times[0], z0)
    refresher = None
    for grid, steps, n_observed, refresh, output, _ in schedule.runs:
        state, residuals = solver.run(f, grid, state, n_observed)
        if refresh.collects:
            refresher = refresher or Refresher(solver, False, range(len(z0)), schedule.n_steps)
        if refresher is not None:
            refresher.after_steps(len(steps) - 1, ())
            if refresh.decides and _alternates(f, refresher, residuals, state, grid):
                raise NotDirectError
            refresher.after_steps(1, residuals)
        if output is not None:
            outputs.record(output, times[output], state.point)
    return outputs, state


def _alternates(f: Field, refresher: Refresher, residuals: list[Tensors], state: Floats, grid: Sequence[Any]) -> bool:
    alternation = refresher.alternation(residuals, state.point, grid[-1] - grid[-2], f.environment.eps)
    return not read([alternation])[0] >= 0


class _Kept(NamedTuple):
    """What a backward pass needs beside the tensors that autograd saves."""

    method: ReplayGradient
    field: Field
    solver: Leapfrog
    schedule: Schedule
    times: Sequence[float]
    stats: Stats
    n_leaves: int


class _Direct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, method: ReplayGradient, problem: Problem, schedule: Schedule, found: list, *inputs: Tensor | None
    ) -> Tensors:
        results, end, stats = _solved(problem, schedule)
        found.append((end, stats))
        ctx.set_materialize_grads(False)
        field, solver, times = problem.field.without_tensors(), problem.solver, problem.times
        ctx.kept = _Kept(method, field, solver, schedule, times, stats, len(problem.z0))  # pyright: ignore
        ctx.save_for_backward(*inputs[1:], *end.point, *end.slope)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        method, field, solver, schedule, times, stats, n = ctx.kept
        refuse_double_backward(type(method).__name__)
        saved = ctx.saved_tensors
        # Detached: an f that calls y.requires_grad_() leaves its mark.
        z0, point, slope = [tuple([x.detach() for x in part]) for part in (saved[:n], saved[-2 * n : -n], saved[-n:])]
        f, end = field.with_tensors(saved[n : -2 * n], (), wants_t=False), Floats(point, slope)
        with f.backward_pass(times[0], z0), torch.enable_grad():
            a, start, rebuilt = _pulled_back(f, solver, schedule, times, grads, end, z0)
            drift = _drift(rebuilt, start, end, times, solver, schedule.n_steps, f)
            if drift is None:
                a, passed = _rerun(method, f, solver, schedule, times, grads, end, z0)
                stats.count(reconstruction_error=passed.drift, n_reruns=passed.n_reruns)
                method.judge_backward(passed)
            else:
                stats.count(reconstruction_error=drift, n_reruns=0)
        stats.count(n_evals_backward=f.n_evals, n_vjps=f.n_vjps)
        return None, None, None, None, None, *a.sums


def _pulled_back(
    f: Field,
    solver: Leapfrog,
    schedule: Schedule,
    times: Sequence[float],
    grads: Sequence[Tensor | None],
    end: Floats,
    z0: Tensors,
) -> tuple[Cotangent, Floats, Floats]:
    """The cotangent at the start, the state there, and that state as it was rebuilt."""
    a = Cotangent.zero(end, len(f.theta), 0, 0)
    state: Any = end.fork()
    for run in reversed(schedule.runs):
        _add_output(a, run.output, grads)
        state = solver.pull_run(f, run.times, state, a)
    _add_output(a, 0, grads)
    start: Any = solver.pull_start(f, times[0], Floats(z0), a)[0]
    return a, start, state


def _add_output(a: Cotangent, k: int | None, grads: Sequence[Tensor | None]) -> None:
    if k is not None:
        for z, g in zip(a.z, grads, strict=True):
            if g is not None:
                z.add_(g[k])


def _drift(
    rebuilt: Floats, start: Floats, end: Floats, times: Sequence[float], solver: Leapfrog, n_steps: int, f: Field
) -> float | None:
    """By how far the start was missed; None if that is more than can be trusted without a closer look."""
    limits: Limits = max([LIMITS[z.dtype] for z in start.point])
    drift = rebuilt.deviation(start, end, solver.scale_of_v(times[-1] - times[0]), limits[:2])
    is_small = limits.hold(drift, 8 * f.environment.eps_of_state * math.sqrt(n_steps))
    return drift.component if is_small else None


def _rerun(
    method: ReplayGradient,
    f: Field,
    solver: Leapfrog,
    schedule: Schedule,
    times: Sequence[float],
    grads: Sequence[Tensor | None],
    end: Floats,
    z0: Tensors,
) -> tuple[Cotangent, BackwardPass]:
    """The backward pass over the tape that the loop would have made."""
    outputs = StoredOutputs(len(times))
    passed = BackwardPass(f, solver, z0, OutputCotangents(outputs, times, grads), method.inverts, bool(method.reruns))
    return passed.run(schedule.events, [], end.fork(), passed.zero(end))[1], passed
