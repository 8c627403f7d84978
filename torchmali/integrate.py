"""Algorithm 1 of the paper: the one forward loop. It knows nothing of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchmali.controllers import ControllerState, Start, StepController
from torchmali.errors import NonFiniteError, warn
from torchmali.refresh import RefreshDetector, RefreshPlan
from torchmali.solution import Stats
from torchmali.solvers.base import Attempt, Slope, Solver
from torchmali.state.base import IN_RANGE, State
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors, Time, first_non_finite, number
from torchmali.tape import Output, Refresh, Rescale, Step, Tape

Emit = Callable[[int, Tensors], None]
C = TypeVar("C", ControllerState, RefreshDetector)
MAX_REGRIDS = 4  # of one step
LOOK_THERE = "Look at f there, use smaller steps, or an adaptive controller."


class SideEffects:
    """What a solve leaves behind beside its result, to be undone. Here: nothing."""

    eps = 0.0  # the precision in which f computes, where that is coarser than the state's

    def mark(self) -> Any:
        return None

    def back_to(self, mark: Any) -> None:
        pass


def integrate(
    f: Slope,
    z0: Tensors,
    times: Sequence[Time],
    solver: Solver,
    controller: StepController,
    emit: Emit,
    stats: Stats,
    *,
    arithmetic: Any = Floats,
    tape: Tape | None = None,
    through_search: bool = False,
    locate: bool = False,
    effects: SideEffects = SideEffects(),  # noqa: B008
    warns: bool = True,
) -> tuple[State, Tape]:
    """Solve from times[0] to times[-1]; returns the end state and the tape (the given one, filled).

    Calls emit(k, z(times[k])) for each output, in order. arithmetic: a State class, or what else has an `of`.
    warns: of a solution that alternates, where it was seen too late for a refresh.

    Times are advanced by the h that was used (the paper's listing adds the next one). What has to be read from a device
    is collected and read once per step. The end state is tested for finiteness; if it fails, the solve is repeated with
    `locate` to say where it went wrong, so that the loop itself need not look.

    On integers with fixed steps, several steps are taken before the range of their numbers is read. If it was left, all
    of them are taken back, with their outputs and whatever else they left behind, and taken again one by one.
    """
    loop = _Loop(f, times, solver, controller, emit, tape or Tape(), locate, effects)
    loop.begin(z0, arithmetic, through_search)
    while loop.t is not times[-1]:
        loop.attempt()
    loop.count(stats)
    if loop.alternated and warns:
        _warn_of_alternation(stats.n_steps)
    if first_non_finite(loop.state.point) is not None:
        with torch.no_grad():
            integrate(f, z0, [number(t) for t in times], solver, controller, lambda k, z: None, stats, locate=True)
        raise NonFiniteError("The solution is not finite, but a repetition of the same solve is: f is not repeatable.")
    return loop.state, loop.tape


class _Savepoint(NamedTuple):
    """Where the loop can go back to."""

    t: Time
    k: int
    waiting: int
    state: State
    carry: Tensors | None
    tape: Any
    effects: Any
    control: ControllerState
    detector: RefreshDetector
    range: Any


class _Verdict(NamedTuple):
    """On an attempt that counts."""

    changes: Sequence[Any] = ()  # of the grid, before the next step
    alternates: bool = False  # f - v
    knows_range: bool = False  # of this step, and of those before it


ACCEPTED = _Verdict()


class _Loop:
    """One solve in progress. `attempt` makes one step: a verdict on it, a commit, its outputs."""

    state: State
    carry: Tensors | None
    control: ControllerState
    detector: RefreshDetector
    range: Any  # what watches over the range of bounded numbers; None: nobody
    saved: _Savepoint

    def __init__(
        self,
        f: Slope,
        times: Sequence[Time],
        solver: Solver,
        controller: StepController,
        emit: Emit,
        tape: Tape,
        locate: bool,
        effects: SideEffects,
    ):
        self.f, self.times, self.solver, self.controller, self.emit = f, times, solver, controller, emit
        self.tape, self.locate, self.effects, self.t = tape, locate, effects, times[0]
        self.adaptive, self.ends_on_outputs = controller.adaptive, controller.ends_on_outputs(solver)
        self.k = 1 if self.ends_on_outputs else len(times) - 1  # the output on which steps land next
        self.waiting = 1  # the first output not yet handed out
        self.n_regrids = 0  # of the grid, for the sake of the step at hand
        self.alternated = False  # a short solve, when it was too late

    def begin(self, z0: Tensors, arithmetic: Any, through_search: bool) -> None:
        f, t, solver, effects = self.f, self.t, self.solver, self.effects
        before = effects.mark()
        state, carry = solver.start(f, t, z0, arithmetic)
        again = state.begins_again()
        if again is not None:
            effects.back_to(before)
            state, carry = solver.start(f, t, z0, again)
        before = before if carry is None else effects.mark()  # else it is the first stage of the first step
        if state.slope:
            self.tape.events.append(Refresh(t, 0, None))
        self.tape.events.append(Output(0, None))
        self.state, self.carry, self.range = state, carry, state.range()
        self.saves = self.adaptive or self.range is not None
        self.control = self.controller.begin(Start(f, solver, t, self.times[-1], state, carry, through_search))
        n_steps = self.controller.count([number(x) for x in self.times])
        self.detector = RefreshDetector(
            solver.refresh_policy, solver.n_reflects, self.adaptive, self.control.controlled, n_steps
        )
        effects.back_to(before)
        self.emit(0, z0)
        if self.locate:
            _raise_if_non_finite(state, f"in y0 or in f at the start, t = {number(t):.6g}")
        self._save()

    def attempt(self) -> None:
        t, target = self.t, self.times[self.k]
        t1, look = self.control.next(t, target), self.detector.plan()
        try:
            attempt = self.solver.step(self.f, t, t1, self.state, self.carry, self.adaptive, look.collects)
        except Exception:  # perhaps of an f that saw numbers which had wrapped round
            if not self._repeats(t, t1):
                raise
            return
        if self.adaptive or look.decides or self.range is not None:
            verdict = self._judge(t, t1, attempt, look)
        else:
            verdict = ACCEPTED  # without a look
        if verdict is None:
            return
        try:
            self._commit(t, t1, attempt, look, verdict)
        except Exception:  # perhaps of an output that nobody has looked at yet
            if self.range is None or not self.range.n_steps:
                raise
            self._take_back()

    def _repeats(self, t: Time, t1: Time) -> bool:
        """Go back and repeat a step in which f raised an error, if it was on account of numbers that did not fit."""
        if self.range is None:
            return False
        unread = self.range.n_steps
        are_right = not unread or self.range.judge(self.state, _read([self.range.signs(self.state)])).overflow is None
        if are_right and self.range.holds(self.state, lambda state: self._step(t, t1, state)):
            return False
        if unread:
            self._take_back()
            return True
        return self._regrid(t, t1, None)

    def _step(self, t: Time, t1: Time, state: State) -> Attempt:
        """A step that is not an attempt."""
        return self.solver.step(self.f, t, t1, state, None, adaptive=False)

    def _judge(self, t: Time, t1: Time, attempt: Attempt, look: RefreshPlan) -> _Verdict | None:
        """What to make of an attempt; None: it does not count, and the loop is where it was before."""
        is_last = t1 is self.times[-1]
        if self.range is not None:
            self.range.add(attempt.state)
        is_due = self.range is not None and (self.range.is_due or is_last or look.refreshes)
        if not (self.adaptive or look.decides or is_due):
            return ACCEPTED
        ratio = self.control.measure(self.state, attempt) if self.adaptive else None
        signs = [] if ratio is None else [ratio]
        if self.range is not None:
            signs.append(self.range.signs(attempt.state))
        if look.decides:
            h, eps = number(t1 - t), self.effects.eps
            signs.append(self.detector.alternation(attempt.residuals, self.state.point, h, eps))
        values = _read(signs)
        in_range, error = IN_RANGE, values[0]
        if self.range is not None:
            in_range = self.range.judge(attempt.state, values[self.adaptive : len(values) - look.decides])
        if self.range is not None and in_range.overflow is not None:
            if self.range.n_steps > 1:
                self._take_back()
                return None
            if self._regrid(t, t1, in_range.overflow):
                return None
            error = math.nan  # rejected, where a controller can reject it
            what = "Values that are not finite, or outgrow the integer grid within one step,"
            if not self.adaptive:
                raise NonFiniteError(f"{what} {_at(t, t1)}. {LOOK_THERE}")
        if ratio is not None and not self.control.accepts(t, t1, attempt, ratio, error):
            self._reject(attempt)
            return None
        return _Verdict(in_range.changes, look.decides and not values[-1] >= 0, self.range is not None)

    def _reject(self, attempt: Attempt) -> None:
        # The bits that fell off for the sake of a step too long are still wanted.
        self.state, self.n_regrids = self.saved.state, 0
        self.tape.back_to(self.saved.tape)
        self.effects.back_to(self.saved.effects)
        if attempt.stages:
            self.carry = attempt.stages[0]  # f(t, z) is known by now
        if self.range is not None:
            self.range.mark = self.saved.range
            # A repetition on another grid must not forget that h was too long.
            self.saved = self.saved._replace(control=_copy(self.control), carry=self.carry)

    def _regrid(self, t: Time, t1: Time, overflow: Any) -> bool:
        """Put the state on a grid on which the step from t to t1 fits, to repeat it there; false: there is none."""
        self._go_back()
        self.n_regrids += 1
        if self.n_regrids > MAX_REGRIDS:
            return False
        margin = self.n_regrids - 1
        regridded = self.range.regridded_for(self.state, overflow, margin, lambda state: self._step(t, t1, state))
        self.effects.back_to(self.saved.effects)
        if regridded is None:
            return False
        self.state = regridded.grid
        for change, lost in regridded.undo:
            self.tape.events.append(Rescale(change, self.tape.keep(lost) if self.tape.rewinds else None))
        return True

    def _take_back(self) -> None:
        """Back to the last step that was looked at. The next ones are looked at one by one."""
        self._go_back()
        self.range.go_singly()
        self.n_regrids = 0

    def _go_back(self) -> None:
        saved = self.saved
        self.t, self.k, self.waiting, self.state, self.carry = saved[:5]
        self.tape.back_to(saved.tape)
        self.effects.back_to(saved.effects)
        self.control, self.detector = _copy(saved.control), _copy(saved.detector)
        self.range.mark = saved.range

    def _save(self) -> None:
        """To come back to, where steps are rejected or taken back."""
        if not self.saves:
            return
        control, detector = (_copy(self.control), _copy(self.detector)) if self.range else (self.control, self.detector)
        marks = self.tape.mark(), self.effects.mark()
        begun = None if self.range is None else self.range.mark
        self.saved = _Savepoint(self.t, self.k, self.waiting, self.state, self.carry, *marks, control, detector, begun)

    def _commit(self, t: Time, t1: Time, attempt: Attempt, look: RefreshPlan, verdict: _Verdict) -> None:
        target, is_last = self.times[self.k], t1 is self.times[-1]
        segment = self.k - 1 if self.ends_on_outputs else 0  # the output from which the steps at hand began
        k1 = self.k if t1 is target else segment
        before, self.carry = self.state, attempt.carry
        self.tape.step(t, t1, segment, k1, before)
        if not self.ends_on_outputs:
            self._interpolate(t, t1, before, attempt)
        if self.locate:
            _raise_if_non_finite(attempt.state, _at(t, t1))
        self.state, self.t, self.n_regrids = attempt.state, t1, 0
        for change in verdict.changes:
            self.state = self._rescaled(self.state, change)
        if verdict.knows_range:
            self.range.accept(self.state, bool(verdict.changes))
        self.detector.after_step(attempt.residuals)
        # The only look there was came with the last step: too late for a renewal.
        self.alternated = is_last and verdict.alternates and self.detector.n_looks == 1 and not self.adaptive
        if (look.refreshes or verdict.alternates) and not is_last:
            # Where the grid moved, z is another one: the backward pass will evaluate f at that.
            self._refresh(k1, None if verdict.changes else self.carry)
        if t1 is target:
            self._land()
        if self.saves and (self.range is None or not self.range.n_steps):
            self._save()

    def _refresh(self, k1: int, slope: Tensors | None) -> None:
        """v <- f(t, z); slope: f(t, z), where it is known."""
        before = self.effects.mark()
        old = self.tape.keep(self.state.snapshot_before_refresh()) if self.tape.rewinds else None
        self.tape.events.append(Refresh(self.t, k1, old))
        self.state = self.solver.refresh_slope(self.f, self.t, self.state, slope)
        self.detector.after_refresh()
        if self.range is not None:
            self.range.refresh_slope(self.state)
        self.effects.back_to(before)

    def _interpolate(self, t: Time, t1: Time, before: State, attempt: Attempt) -> None:
        """Hand out the outputs inside a step."""
        inside = _between(self.times, self.waiting, self.k, t1)
        if inside:
            ys, self.carry = self.solver.interpolate(self.f, t, t1, before, attempt, [self.times[i] for i in inside])
            for i, y in zip(inside, ys, strict=True):
                self.tape.events.append(Output(i, self.times[i]))
                self.emit(i, y)
            self.waiting += len(inside)

    def _land(self) -> None:
        """Hand out the output on which a step has ended."""
        self.tape.events.append(Output(self.k, None))
        self.emit(self.k, self.state.point)
        self.k, self.waiting = self.k + 1, self.k + 1

    def _rescaled(self, state: State, change: Any) -> State:
        state, lost = state.rescaled(change)
        self.tape.events.append(Rescale(change, self.tape.keep(lost) if self.tape.rewinds else None))
        return state

    def count(self, stats: Stats) -> None:
        tape = self.tape
        stats.n_steps, stats.n_rejected = tape.n_steps, self.control.n_rejected
        stats.n_checkpoints = len(tape.checkpoints)
        n_refreshes = sum(isinstance(event, Refresh) for event in tape.events)
        stats.n_refreshes = n_refreshes - bool(self.state.slope)  # without the start
        stats.n_rescales = sum(isinstance(event, Rescale) for event in tape.events)
        sizes = [abs(event.t1 - event.t0) for event in tape.events if isinstance(event, Step)]
        stats.h_min, stats.h_max = number(min(sizes)), number(max(sizes))


def _copy(x: C) -> C:
    """copy.copy without its search for ways to copy, which would be half of the cost of a savepoint."""
    twin = object.__new__(type(x))
    vars(twin).update(vars(x))
    return twin


def _read(signs: list[Tensor]) -> list[float]:
    """All their values, in one host read."""
    if len(signs) == 1:
        return signs[0].reshape(-1).tolist() if signs[0].ndim else [signs[0].item()]
    return torch.cat([sign.detach().reshape(-1).to(signs[0]) for sign in signs]).tolist()


def _between(times: Sequence[Time], first: int, last: int, t1: Time) -> range:
    """The outputs first, ..., last - 1 as far as they do not lie beyond t1."""
    end = first
    forward = times[-1] > times[0]
    while end < last and (times[end] <= t1 if forward else times[end] >= t1):
        end += 1
    return range(first, end)


def _at(t0: Time, t1: Time) -> str:
    return f"at t = {number(t1):.6g} (h = {abs(number(t1 - t0)):.3g})"


def _warn_of_alternation(n_steps: int) -> None:
    warn(
        f"f contracts too much for so few steps: in these {n_steps} steps v parted from f(t, y), and the solution, "
        "which alternates from one step to the next, is probably far off. Use more steps, ALF(refresh=1), which renews "
        "v after each, or a Runge-Kutta solver."
    )


def _raise_if_non_finite(state: State, where: str) -> None:
    leaf = first_non_finite((*state.point, *state.slope))
    if leaf is not None:
        raise NonFiniteError(
            f"Non-finite values in leaf {leaf % len(state.point)} of the state, first seen {where}. {LOOK_THERE}"
        )
