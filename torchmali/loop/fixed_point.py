"""The forward loop on integers, whose range has to be checked.

With fixed steps, several steps are taken before the range of their numbers is read. If it was left, all of them are
taken back, with their outputs and whatever else they left behind, and taken again one by one. A single step that does
not fit is repeated on a grid for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torchmali.controllers import ControllerState
from torchmali.errors import NonFiniteError
from torchmali.loop.base import LOOK_THERE, Job, Loop, at, copied, read
from torchmali.refresh import Refresher, RefreshPlan
from torchmali.solvers.base import Attempt
from torchmali.solvers.leapfrog import Residuals
from torchmali.state.base import State
from torchmali.state.fixed_point import FixedPoint, Overflow, Range
from torchmali.state.vectors import Tensors, Time
from torchmali.tape import Rescale

MAX_REGRIDS = 4  # of one step


class Savepoint(NamedTuple):
    """Where the loop can go back to."""

    t: Time
    state: FixedPoint
    carry: Tensors | None
    control: ControllerState
    refresher: Refresher
    tape: Any
    side_effects: Any
    outputs: Any
    range: Any


class Verdict(NamedTuple):
    """The verdict on an attempt that is accepted."""

    alternates: bool = False  # f - v
    knows_range: bool = False  # of this step, and of those before it
    changes: Sequence[Any] = ()  # of the grid, before the next step


class FixedPointLoop(Loop):
    """The forward loop on integers."""

    state: FixedPoint
    range: Range
    saved: Savepoint

    def __init__(self, job: Job):
        super().__init__(job)
        self.n_regrids = 0  # for the sake of the step at hand

    def first_state(self, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        mark = self.side_effects.mark()
        state, carry = self.solver.start(self.f, self.t, z0, arithmetic)
        assert isinstance(state, FixedPoint)
        again = state.begins_again()
        if again is not None:
            self.side_effects.restore(mark)
            state, carry = self.solver.start(self.f, self.t, z0, again)
        return state, carry

    def begun(self) -> None:
        self.range = Range(self.state)
        self._save()

    def advance(self) -> None:
        t1, plan = self.next_time(), self.refresher.plan()
        try:
            attempt, residuals = self.attempt(t1, plan)
        except Exception:  # perhaps of an f that saw numbers which had wrapped round
            if not self._repeats(t1):
                raise
            return
        verdict = self._judge(t1, attempt, residuals, plan)
        if verdict is None:
            return
        try:
            self._accept(t1, attempt, residuals, plan, verdict)
        except Exception:  # perhaps of an output that nobody has looked at yet
            if not self.range.n_steps:
                raise
            self._take_back()

    def _judge(self, t1: Time, attempt: Attempt, residuals: Residuals, plan: RefreshPlan) -> Verdict | None:
        """The verdict on an attempt; None: it is not accepted, and the loop is where it was before."""
        assert isinstance(attempt.state, FixedPoint)
        self.range.add(attempt.state)
        is_due = self.range.is_due or t1 is self.job.times[-1] or plan.refreshes
        if not (self.is_adaptive or plan.decides or is_due):
            return Verdict()
        measured = self.measure(t1, attempt, residuals, plan)
        first = [] if measured.ratio is None else [measured.ratio]
        last = [] if measured.alternation is None else [measured.alternation]
        values = read([*first, self.range.signs(attempt.state), *last])
        found = self.range.judge(attempt.state, values[len(first) : len(values) - len(last)])
        error = values[0]
        if found.overflow is not None:
            if self._goes_back(t1, found.overflow):
                return None
            error = math.nan  # rejected, if the controller can reject it
        if not self.accepts(t1, attempt, measured, error):
            self._reject(attempt)
            return None
        return Verdict(bool(last) and not values[-1] >= 0, True, found.changes)

    def _goes_back(self, t1: Time, overflow: Overflow) -> bool:
        """Go back from steps that left the range, to repeat them; false: this step fits no grid."""
        if self.range.n_steps > 1:
            self._take_back()
            return True
        if self._regrid(t1, overflow):
            return True
        if not self.is_adaptive:
            raise NonFiniteError(
                "Values that are not finite, or outgrow the integer grid within one step, "
                f"{at(self.t, t1)}. {LOOK_THERE}"
            )
        return False

    def _accept(self, t1: Time, attempt: Attempt, residuals: Residuals, plan: RefreshPlan, verdict: Verdict) -> None:
        step = self.commit(t1, attempt, residuals)
        self.n_regrids = 0
        for change in verdict.changes:
            self.state, lost = self.state.rescaled(change)
            self._put_on_tape(change, lost)
        if verdict.knows_range:
            self.range.accept(self.state, bool(verdict.changes))
        self.hand_out(step.ending_in(self.state))
        # Rescaling changed z, so f is evaluated again: the backward pass will evaluate it at the rescaled z.
        slope = None if verdict.changes else self.carry
        if self.refresh_if(verdict.alternates, plan, slope):
            self.range.refresh(self.state)
        if not self.range.n_steps:
            self._save()

    def _put_on_tape(self, change: Any, lost: Any) -> None:
        self.tape.events.append(Rescale(change, self.tape.keep(lost) if self.tape.rewinds else None))

    def _repeats(self, t1: Time) -> bool:
        """Go back and repeat a step in which f raised an error, if it was on account of numbers that did not fit."""
        unread = self.range.n_steps
        are_right = not unread or self.range.judge(self.state, read([self.range.signs(self.state)])).overflow is None
        if are_right and self.range.holds(self.state, lambda state: self._step(t1, state)):
            return False
        if unread:
            self._take_back()
            return True
        return self._regrid(t1, None)

    def _step(self, t1: Time, state: State) -> Attempt:
        """A step that is not an attempt."""
        return self.solver.step(self.f, self.t, t1, state, None, adaptive=False)

    def _reject(self, attempt: Attempt) -> None:
        # The bits that fell off for the sake of a step too long are still wanted.
        self.state, self.n_regrids = self.saved.state, 0
        self.tape.restore(self.saved.tape)
        self.side_effects.restore(self.saved.side_effects)
        if attempt.stages and not self.saved.side_effects:
            self.carry = attempt.stages[0]  # f(t, z) is known by now
        self.range.restore(self.saved.range)
        # A repetition on another grid must not forget that h was too long.
        self.saved = self.saved._replace(control=copied(self.control), carry=self.carry)

    def _regrid(self, t1: Time, overflow: Overflow | None) -> bool:
        """Put the state on a grid on which the step to t1 fits, to repeat it there; false: there is none."""
        self._go_back()
        self.n_regrids += 1
        if self.n_regrids > MAX_REGRIDS:
            return False
        margin = self.n_regrids - 1
        regridded = self.range.regridded_for(self.state, overflow, margin, lambda state: self._step(t1, state))
        self.side_effects.restore(self.saved.side_effects)
        if regridded is None:
            return False
        self.state = regridded.grid
        for change, lost in regridded.undo:
            self._put_on_tape(change, lost)
        return True

    def _take_back(self) -> None:
        """Back to the last step that was looked at. The next ones are looked at one by one."""
        self._go_back()
        self.range.go_singly()
        self.n_regrids = 0

    def _go_back(self) -> None:
        saved = self.saved
        self.t, self.state, self.carry = saved.t, saved.state, saved.carry
        self.control, self.refresher = copied(saved.control), copied(saved.refresher)
        self.tape.restore(saved.tape)
        self.side_effects.restore(saved.side_effects)
        self.outputs.restore(saved.outputs)
        self.range.restore(saved.range)

    def _save(self) -> None:
        self.saved = Savepoint(
            self.t,
            self.state,
            self.carry,
            copied(self.control),
            copied(self.refresher),
            self.tape.mark(),
            self.side_effects.mark(),
            self.outputs.mark(),
            self.range.mark(),
        )
