"""Fixed steps, planned before the solve begins.

Their times, the looks at f - v, the refreshes by number and the outputs are known in advance. Steps between which
nobody looks at the state are taken in one run, with one drift for the one that ends a step and the one that begins the
next. A schedule that has been made is remembered: many solves take the same steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchmali.controllers import fixed_times
from torchmali.refresh import NO_REFRESH, Refresher, RefreshPlan
from torchmali.solvers.base import RunningSolver
from torchmali.state.vectors import Time, number
from torchmali.tape import Event, Output, Start, Step

MANY = 512  # steps or output times: a schedule that has more is not remembered


class Run(NamedTuple):
    """Steps that are taken in one go."""

    times: Sequence[Any]  # at which they begin and end
    steps: Sequence[Step]  # as a tape records them that keeps no states
    n_observed: int  # for so many of the last steps f - v is collected
    refresh: RefreshPlan  # of the last step
    output: int | None  # the output time at which the last one ends, if a step has to
    holds_outputs: bool  # it is one step, inside of which outputs lie


class Schedule(NamedTuple):
    """All runs of a solve."""

    runs: Sequence[Run]
    n_steps: int
    h_min: float
    h_max: float

    @property
    def is_plain(self) -> bool:
        """Whether all runs go from output to output, or to a look at f - v, and no refresh is planned."""
        return not any([run.holds_outputs or run.refresh.refreshes for run in self.runs])

    @property
    def events(self) -> list[Event]:
        """What a tape holds that keeps no states, if v is never refreshed."""
        found: list[Event] = [Start(self.runs[0].times[0]), Output(0)]
        for run in self.runs:
            found += run.steps
            found += [] if run.output is None else [Output(run.output)]
        return found


def schedule_of(
    solver: RunningSolver, h: float, times: Sequence[Time], ends_on_outputs: bool, n_steps: int
) -> Schedule:
    """The runs of a solve with n_steps steps of size h. ends_on_outputs: steps end on every output time."""
    if any([isinstance(t, Tensor) for t in times]) or max(n_steps, len(times)) > MANY:
        return _schedule(solver, h, times, ends_on_outputs, n_steps)
    return _remembered(solver.value, h, tuple(times), ends_on_outputs, n_steps)


def _schedule(solver: RunningSolver, h: float, times: Sequence[Time], ends_on_outputs: bool, n_steps: int) -> Schedule:
    refresher, runs, last = Refresher(solver, False, (), n_steps), [], len(times) - 1
    n_planned, waiting = 0, 1
    for start, stop in [(k - 1, k) for k in range(1, last + 1)] if ends_on_outputs else [(0, last)]:
        grid, steps, n_observed = [times[start]], [], 0
        for t1 in fixed_times(times[start], times[stop], h):
            t0, first = grid[-1], waiting
            while not ends_on_outputs and waiting < stop and _has_reached(t1, times[waiting], times):
                waiting += 1
            holds_outputs = waiting > first
            if holds_outputs and steps:  # a step of its own, which keeps its stages
                runs.append(Run(grid, steps, n_observed, NO_REFRESH, None, False))
                grid, steps, n_observed = [t0], [], 0
            plan, is_end = refresher.plan(n_planned), t1 is times[stop]
            n_planned += 1
            grid.append(t1)
            steps.append(Step(t0, t1, start, stop if is_end else start, None, t1 is times[last], bool(steps)))
            n_observed += plan.collects
            if is_end or holds_outputs or plan.decides or plan.refreshes:
                runs.append(Run(grid, steps, n_observed, plan, stop if is_end else None, holds_outputs))
                grid, steps, n_observed = [t1], [], 0
    sizes = [abs(number(step.t1 - step.t0)) for run in runs for step in run.steps]
    return Schedule(runs, n_planned, min(sizes), max(sizes))


_remembered = functools.lru_cache(maxsize=16)(_schedule)


def _has_reached(t1: Time, t: Time, times: Sequence[Time]) -> bool:
    return bool(t <= t1 if times[0] < times[-1] else t >= t1)
