"""The forward loop on floats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torchmali.controllers import FixedStep
from torchmali.loop.base import Loop, read
from torchmali.loop.schedule import Run, schedule_of
from torchmali.refresh import RefreshPlan
from torchmali.solvers.base import Attempt, RunningSolver
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time, number


class FloatLoop(Loop):
    """The forward loop on floats (or on tensors that autograd follows)."""

    runs: Iterator[Run] = iter(())  # those that are planned

    def first_state(self, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        return self.solver.start(self.f, self.t, z0, arithmetic)

    def begun(self) -> None:
        solver, controller, times = self.solver, self.job.controller, self.job.times
        if type(controller) is not FixedStep or not isinstance(solver, RunningSolver):
            return
        if self.jumps is None and self.outputs.skips_steps and not self.job.locate:
            assert self.n_steps is not None
            self.runs = iter(schedule_of(solver, controller.h, times, self.outputs.stops, self.n_steps).runs)

    def advance(self) -> None:
        run = next(self.runs, None)
        if run is None:
            self._advance_one(self.next_time(self.t, self.target()), self.refresher.plan())
        elif run.holds_outputs:
            self._advance_one(run.times[-1] if run.output is None else self.job.times[run.output], run.refresh)
        else:
            self._advance_many(run)

    def _advance_one(self, t1: Time, plan: RefreshPlan) -> None:
        mark = self.side_effects.mark() if self.is_adaptive else None
        attempt, residuals = self.attempt(t1, plan, self.state)
        alternates = False
        if self.is_adaptive or plan.decides:
            measured = self.measure(t1, attempt, residuals, plan)
            values = read(measured.tensors)
            if not self.accepts(t1, attempt, measured, values[0]):
                self._reject(attempt, mark)
                return
            alternates = plan.decides and not values[-1] >= 0
        t, before = self.t, self.state
        self.commit(t1, attempt, residuals)
        self.hand_out(t, before, attempt)
        self.refresh_if(alternates, plan, self.carry)

    def _advance_many(self, run: Run) -> None:
        assert isinstance(self.solver, RunningSolver)
        times, steps, n_observed, plan, output, _ = run
        record = None if self.tape.keep_every is None else self._recorder(run)
        state, residuals = self.solver.run(self.f, times, self.state, n_observed, record)
        if record is None:
            self.tape.add_steps(steps)
        alternates, self.t = False, times[-2]
        self.refresher.after_steps(len(steps) - 1, ())
        if plan.decides:
            h = number(times[-1] - times[-2])
            alternates = self.refresher.alternates(residuals, state.point, h, self.side_effects.eps)
        self.refresher.after_steps(1, residuals)
        self.state, self.t = state, times[-1]
        if output is not None:
            self.t = self.job.times[output]
            self.tape.events.append(self.outputs.end_at(self.t, state.point))
        self.refresh_if(alternates, plan, None)

    def _recorder(self, run: Run) -> Callable[[int, Callable[[], State]], None]:
        """What keeps states at the start of some steps."""
        tape = self.tape

        def record(i: int, make_start: Callable[[], State]) -> None:
            step = run.steps[i]
            tape.step(*step[:4], make_start() if tape.keeps() else None, step.closes, step.is_joined)

        return record

    def new_slope(self, slope: Tensors | None) -> Tensors:
        return self.f(self.t, self.state.point) if slope is None else slope

    def _reject(self, attempt: Attempt, mark: Any) -> None:
        self.side_effects.reject(mark)
        if attempt.start is not None and not mark:  # else the evaluation that gave it has just been undone
            self.carry = attempt.start
