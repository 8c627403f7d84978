"""Fixed steps of MALI with some memory to spare: plain autograd follows the last steps, MALI's inverse the others.

The steps are those of a schedule (direct.py). Where all graphs fit into the memory, the solve is plain autograd without
a loop. Else the first steps, the head, are taken without graphs, by an autograd.Function that returns the state at its
end, (z, v); autograd itself goes on from there through the tail, and hands dL/d(z, v) back to the head. So saved-tensor
hooks, retain_graph and changed parameters are PyTorch's own business in the tail. The cut may lie within a run: then
the merged drift there belongs to the tail. All numbers of the forward pass are those of the loop, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.field.environment import in_forward_pass
from torchmali.field.evaluate import Field
from torchmali.gradients.base import Problem, Solved, refuse_double_backward
from torchmali.gradients.direct import BackwardPath, EagerMoves, NotDirectError
from torchmali.gradients.replay import ReplayGradient
from torchmali.loop.base import Integration
from torchmali.loop.schedule import Run, Schedule
from torchmali.refresh import NO_REFRESH, Refresher
from torchmali.solution import Stats
from torchmali.solvers.leapfrog import Leapfrog, Residuals
from torchmali.state.base import State
from torchmali.state.floats import Floats
from torchmali.state.traced import Traced
from torchmali.state.vectors import Tensors, Time, added, first_non_finite
from torchmali.tape import Tape


class Cut(NamedTuple):
    """A schedule in two parts."""

    head: Sequence[Run]
    tail: Sequence[Run]
    is_open: bool  # it lies within a run: the drift that ends the head is one with the first of the tail

    @staticmethod
    def before_last(runs: Sequence[Run], n_steps: int) -> Cut:
        """The last n_steps steps are the tail."""
        i = len(runs)
        while i and len(runs[i - 1].steps) <= n_steps:
            i -= 1
            n_steps -= len(runs[i].steps)
        if not i or not n_steps:
            return Cut(runs[:i], runs[i:], False)
        run = runs[i - 1]
        at, n_observed = len(run.steps) - n_steps, max(0, run.n_observed - n_steps)
        first = Run(run.times[: at + 1], run.steps[:at], n_observed, NO_REFRESH, None, False)
        last = run._replace(times=run.times[at:], steps=run.steps[at:], n_observed=run.n_observed - n_observed)
        return Cut([*runs[: i - 1], first], [last, *runs[i:]], True)


def solve_with_graphs(method: ReplayGradient, problem: Problem, schedule: Schedule, n_steps: int) -> Solved:
    """Solve a problem along its schedule, with the graphs of its last n_steps steps; NotDirectError: see direct.py."""
    cut = Cut.before_last(schedule.runs, n_steps)
    if not cut.head:  # autograd sees every leaf that f depends on
        problem = problem._replace(field=problem.field.for_graphs())
    field = problem.field
    source = field.environment.source
    source.begin(field.device)
    stats = Stats()
    results, state = in_forward_pass([field.environment], lambda: _solved(method, problem, schedule, cut, stats))
    if first_non_finite([z.detach() for z in state.point]) is not None or source.look():
        raise NotDirectError
    _, n_all, h_min, h_max = schedule
    n_graphs = n_steps * _leapfrog(problem).n_reflects + (not cut.head)
    stats.count(n_steps=n_all, n_evals_forward=field.n_evals, n_graphs=n_graphs, h_min=h_min, h_max=h_max)
    end = Floats(*(tuple([x.detach() for x in leaves]) for leaves in (state.point, state.slope)))
    return Solved(results, stats, Integration(end, Tape(), 0))


def _leapfrog(problem: Problem) -> Leapfrog:
    assert isinstance(problem.solver, Leapfrog)
    return problem.solver


def _solved(
    method: ReplayGradient, problem: Problem, schedule: Schedule, cut: Cut, stats: Stats
) -> tuple[Tensors, State]:
    f, z0, times, solver = problem.field, problem.z0, problem.times, _leapfrog(problem)
    steps = Steps(f, solver, times, schedule.n_steps)
    ends: list[Tensors] = [z0]
    e: Time = 0.0
    if cut.head:
        n, n_ends = len(z0), len([run for run in cut.head if run.output is not None])
        found = _Head.apply(method, problem, cut, steps, stats, *problem.inputs)
        ends += [found[i * n : (i + 1) * n] for i in range(n_ends)]
        state: Any = Traced(found[-2 * n : -n], found[-n:])
        e = solver.last_drift(cut.head[-1].times) if cut.is_open else 0.0
    else:
        state = Traced(z0, f(times[0], z0))
    state = steps.take(cut.tail, state, ends, e)
    return tuple([torch.stack(leaf) for leaf in zip(*ends, strict=True)]), state


class Steps:
    """The steps of a schedule, taken run by run: f - v is looked at where the schedule says so."""

    def __init__(self, f: Field, solver: Leapfrog, times: Sequence[float], n_steps: int):
        self.f, self.solver, self.times, self.n_steps = f, solver, times, n_steps
        self.refresher: Refresher | None = None
        self.residuals: Residuals = []  # of the part of a run before a cut
        self.n_before = 0  # steps of that part

    def take(self, runs: Sequence[Run], state: Any, ends: list[Tensors], e: Time = 0.0, is_open: bool = False) -> Any:
        """Take runs from `state`; append y at output times to `ends`.

        e, is_open: see Leapfrog.run, of the first and the last of these runs.
        """
        for run in runs:
            leaves_open = is_open and run is runs[-1]
            state, residuals = self.solver.run(self.f, run.times, state, run.n_observed, None, e, leaves_open)
            e = 0.0
            self._look(run, [tuple([x.detach() for x in leaves]) for leaves in residuals], state, leaves_open)
            if run.output is not None:
                ends.append(state.point)
        return state

    def _look(self, run: Run, residuals: Residuals, state: State, is_part: bool) -> None:
        """Raise NotDirectError if f - v alternates. is_part: the run goes on behind the cut."""
        residuals, n = [*self.residuals, *residuals], self.n_before + len(run.steps)
        self.residuals, self.n_before = (residuals, n) if is_part else ([], 0)
        if is_part:
            return
        plan = run.refresh
        if plan.collects:
            self.refresher = self.refresher or Refresher(self.solver, False, range(len(state.point)), self.n_steps)
        if self.refresher is None:
            return
        self.refresher.after_steps(n - 1, ())
        end = Floats(tuple([x.detach() for x in state.point]))
        with torch.no_grad():
            h, eps = run.times[-1] - run.times[-2], self.f.environment.eps
            if plan.decides and self.refresher.alternates(residuals, end.point, h, eps):
                raise NotDirectError
        self.refresher.after_steps(1, residuals)


class _Kept(NamedTuple):
    """What the backward pass of a head needs beside the tensors that autograd saves."""

    method: ReplayGradient
    field: Field
    solver: Leapfrog
    schedule: Schedule  # of the head
    times: Sequence[float]
    stats: Stats
    n_leaves: int
    e: float  # the length of the last drift, which is the tail's


class _Head(torch.autograd.Function):
    """The first steps: y at the output times among them, and (z, v) at their end."""

    @staticmethod
    def forward(
        ctx: Any, method: ReplayGradient, problem: Problem, cut: Cut, steps: Steps, stats: Stats, *inputs: Tensor | None
    ) -> Tensors:
        times, solver = problem.times, steps.solver
        z0 = tuple([z.detach() for z in problem.z0])
        ends: list[Tensors] = []
        first: Any = Floats(z0, problem.field(times[0], z0))
        state: Any = steps.take(cut.head, first, ends, is_open=cut.is_open)
        e = solver.last_drift(cut.head[-1].times) if cut.is_open else 0.0
        closed = state.fork().drift(e) if cut.is_open else state
        ctx.set_materialize_grads(False)
        sizes = [abs(step.t1 - step.t0) for run in cut.head for step in run.steps]
        schedule = Schedule(cut.head, len(sizes), min(sizes), max(sizes))
        field = problem.field.without_tensors()
        ctx.kept = _Kept(method, field, solver, schedule, times, stats, len(z0), e)  # pyright: ignore
        ctx.save_for_backward(*inputs[1:], *closed.point, *closed.slope)
        is_output = bool(ends) and ends[-1] is state.point  # no tensor may be returned twice
        point = tuple([z.clone() for z in state.point]) if is_output else state.point
        return (*[z for end in ends for z in end], *point, *state.slope)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        method, field, solver, schedule, times, stats, n, e = ctx.kept
        refuse_double_backward(type(method).__name__)
        saved = ctx.saved_tensors
        z0, point, slope = [tuple([x.detach() for x in part]) for part in (saved[:n], saved[-2 * n : -n], saved[-n:])]
        f = field.with_tensors(saved[n : -2 * n], (), wants_t=False)
        of_z, of_v = (_filled(grads[i : i + n or None], z0) for i in (-2 * n, -n))
        if e:  # from the end before the last drift to the end behind it
            of_v = added(of_v, of_z, -e)
        of_outputs: list[list[Tensor | None]] = [[None] * len(times) for _ in range(n)]
        outputs = [run.output for run in schedule.runs if run.output is not None]
        for i, k in enumerate(outputs):
            for of_leaf, g in zip(of_outputs, grads[i * n : (i + 1) * n], strict=True):
                of_leaf[k] = g
        back = BackwardPath(f, solver, schedule, times, of_outputs, Floats(point, slope), z0, (of_z, of_v))
        with f.backward_pass(times[0], z0), torch.enable_grad():
            a, was_rebuilt = back.run(method, EagerMoves(), stats)
        if not was_rebuilt:
            f.is_restless()  # later solves take the loop, which keeps states
        return (*[None] * 6, *a.sums)


def _filled(grads: Sequence[Tensor | None], like: Tensors) -> Tensors:
    return tuple([torch.zeros_like(z) if g is None else g for g, z in zip(grads, like, strict=True)])
