"""The forward loop on floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torchmali.loop.base import Loop, read
from torchmali.refresh import RefreshPlan
from torchmali.solvers.base import Attempt, RunningSolver
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time


class Planned(NamedTuple):
    """A step to be attempted."""

    t0: Time
    t1: Time
    refresh: RefreshPlan


class FloatLoop(Loop):
    """The forward loop on floats (or on tensors that autograd follows)."""

    takes_runs = False  # fixed steps between which nobody looks at the state are taken in one run
    ahead: Time | None = None  # the end of the next step, if the controller has been asked for it already

    def first_state(self, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        return self.solver.start(self.f, self.t, z0, arithmetic)

    def begun(self) -> None:
        self.takes_runs = isinstance(self.solver, RunningSolver) and not self.is_adaptive and not self.job.locate

    def advance(self) -> None:
        steps = self._next_steps()
        if len(steps) > 1:
            self._advance_many(steps)
        else:
            self._advance_one(steps[0])

    def _next_steps(self) -> list[Planned]:
        """The next step, or the run of steps up to the next output, jump, refresh or look at f - v.

        Not up to a checkpoint: the numbers of a solve must not depend on the gradient method.
        """
        found, t, target = [], self.t, self.target()
        while True:
            t1, self.ahead = self.next_time(t, target) if self.ahead is None else self.ahead, None
            plan = self.refresher.plan(len(found))
            if found and self.outputs.looks_inside(t, t1):  # a step of its own, which keeps its stages
                self.ahead = t1
                return found
            found.append(Planned(t, t1, plan))
            is_looked_at = plan.decides or plan.refreshes or not self.outputs.passes_over(t1)
            if not self.takes_runs or t1 is target or is_looked_at:
                return found
            t = t1

    def _advance_one(self, step: Planned) -> None:
        mark = self.side_effects.mark() if self.is_adaptive else None
        t, t1, plan = step
        attempt, residuals = self.attempt(t1, plan, self.state)
        alternates = False
        if self.is_adaptive or plan.decides:
            measured = self.measure(t1, attempt, residuals, plan)
            values = read(measured.tensors)
            if not self.accepts(t1, attempt, measured, values[0]):
                self._reject(attempt, mark)
                return
            alternates = plan.decides and not values[-1] >= 0
        before = self.state
        self.commit(t1, attempt, residuals)
        self.hand_out(t, before, attempt)
        self.refresh_if(alternates, plan, self.carry)

    def _advance_many(self, steps: Sequence[Planned]) -> None:
        assert isinstance(self.solver, RunningSolver)
        tape, outputs, before = self.tape, self.outputs, self.state

        def record(i: int, make_start: Callable[[], State]) -> None:
            t0, t1, _ = steps[i]
            start = make_start() if tape.keeps() else None
            tape.step(t0, t1, *outputs.ends(t0, t1), start, self._closes(t1), i > 0)

        t0, t1, plan = steps[-1]
        n_observed = sum([step.refresh.collects for step in steps])
        self._enter(t1)
        times = [steps[0].t0, *(step.t1 for step in steps)]
        state, residuals = self.solver.run(self.f, times, before, n_observed, record)
        attempt, alternates = Attempt(state), False
        self.t = t0
        self.refresher.after_steps(len(steps) - 1)
        if plan.decides:
            alternates = not read(self.measure(t1, attempt, residuals, plan).tensors)[0] >= 0
        self.refresher.after_step(residuals)
        self.state, self.carry, self.t = state, None, t1
        self.hand_out(t0, before, attempt)
        self.refresh_if(alternates, plan, None)

    def new_slope(self, slope: Tensors | None) -> Tensors:
        return self.f(self.t, self.state.point) if slope is None else slope

    def _reject(self, attempt: Attempt, mark: Any) -> None:
        self.side_effects.restore(mark)
        if attempt.start is not None and not mark:  # else the evaluation that gave it has just been undone
            self.carry = attempt.start
