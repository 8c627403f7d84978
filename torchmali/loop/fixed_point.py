"""The forward loop on integers, whose range has to be checked.

With fixed steps, several steps are taken before the range of their numbers is read. If it was left, or small elements
of a leaf have lost their bits beside large ones, all of these steps are taken back, with their outputs and whatever
else they left behind. They are taken again one by one, with careful moves that make room for their results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.controllers import AdaptiveControllerState, ControllerState
from torchmali.copies import copied
from torchmali.errors import NonFiniteError
from torchmali.loop.base import LOOK_THERE, Job, Loop, at, read
from torchmali.refresh import Refresher, RefreshPlan
from torchmali.solvers.base import Attempt
from torchmali.solvers.leapfrog import Residuals
from torchmali.state.base import Snapshot, State
from torchmali.state.fixed_point import PERIOD, SLACK, FixedPoint, FixedPointArithmetic, Seen, Shift, Signs, signs_from
from torchmali.state.integers import BITS, LIMIT, extremes, ldexp, magnitudes, max_or_nan, stacked
from torchmali.state.vectors import Tensors, Time, number
from torchmali.tape import Rescale

MAX_REFRESHES = 4  # evaluations of one refresh, each on a coarser grid


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


class Verdict(NamedTuple):
    """The verdict on an attempt that is accepted."""

    alternates: bool = False  # f - v
    signs: Sequence[Signs] | None = None  # of all leaves, if the range was read


ACCEPTED = Verdict()


class FixedPointLoop(Loop):
    """The forward loop on integers."""

    state: FixedPoint
    saved: Savepoint

    def __init__(self, job: Job):
        super().__init__(job)
        self.n_careful = 0  # steps to come that are taken with careful moves
        self.unread: list[Seen] = []  # of the steps since the last reading
        self.n_reflects = PERIOD  # since the last look at the mixture of scales: the first reading is one
        self.sizes_of_v: list[float] = []  # upper limits of its integers at the last reading
        self.time = 1.0  # of PERIOD steps like the last one
        self.started: list[Seen] = []  # of the attempt at hand
        self.begins_at_rest = False  # elements are zero at first: their scale shows when they have begun to move

    def first_state(self, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        mark = self.side_effects.mark()
        state, carry = self.solver.start(self.f, self.t, z0, arithmetic)
        assert isinstance(state, FixedPoint) and isinstance(arithmetic, FixedPointArithmetic)
        again, self.begins_at_rest = arithmetic.suited(z0, state)
        if again is not None:
            self.side_effects.restore(mark)
            state, carry = self.solver.start(self.f, self.t, z0, again)
        return state, carry

    def begun(self) -> None:
        self._limit_v()
        self._save()

    def advance(self) -> None:
        t1, plan = self.next_time(self.t, self.target()), self.refresher.plan()
        is_careful = self.n_careful > 0
        try:
            state = self.state.careful() if is_careful else self.state.seen_by(self.started)
            attempt, residuals = self.attempt(t1, plan, state)
        except Exception as error:
            self._after_error(error, t1, is_careful)
            return
        verdict = self._judge(t1, attempt, residuals, plan, is_careful)
        if verdict is None:
            return
        try:
            self._accept(t1, attempt, residuals, plan, verdict)
        except Exception:  # perhaps of an output that nobody has looked at yet
            if not self.unread:
                raise
            self._take_back()

    def _after_error(self, error: Exception, t1: Time, is_careful: bool) -> None:
        """f raised an error: perhaps because it saw numbers that had wrapped round. Careful moves do not wrap."""
        if not is_careful:
            self.unread += self.started
            if not self.unread or self._is_within(self.state, read(self._ends(self.state))):
                raise error
            self._take_back()
            return
        if not isinstance(error, NonFiniteError):
            raise error
        if not isinstance(self.control, AdaptiveControllerState):
            raise NonFiniteError(f"{error} It was first seen {at(self.t, t1)}. {LOOK_THERE}") from None
        nowhere = Attempt(self.state, tuple(torch.full_like(x, math.nan) for x in self.state.point))
        self.control.accepts(self.t, t1, nowhere, torch.tensor(math.nan), math.nan)
        self._reject(nowhere)

    def _judge(
        self, t1: Time, attempt: Attempt, residuals: Residuals, plan: RefreshPlan, is_careful: bool
    ) -> Verdict | None:
        """The verdict on an attempt; None: it is not accepted, and the loop is where it was before."""
        assert isinstance(attempt.state, FixedPoint) and attempt.state.seen is not None
        if self.unread:
            self.unread[-1].forget_u()
        self.unread.append(attempt.state.seen)
        self.n_reflects += attempt.state.n_moves // 2
        is_due = is_careful or len(self.unread) >= PERIOD or t1 is self.job.times[-1] or plan.refreshes
        is_due = is_due or self.outputs.looks_at_steps
        is_due = is_due or (self.begins_at_rest and self.t is self.job.times[0])
        is_due = is_due or (self.jumps is not None and self.jumps.is_at(t1))  # v is refreshed there
        if not (self.is_adaptive or plan.decides or is_due):
            return ACCEPTED
        self.time = PERIOD * abs(number(t1 - self.t))
        measured = self.measure(t1, attempt, residuals, plan)
        first = [] if measured.ratio is None else [measured.ratio]
        last = [] if measured.alternation is None else [measured.alternation]
        looks = self.n_reflects >= PERIOD or is_careful
        values = read([*first, *self._ends(attempt.state), *self._signs(attempt.state, looks), *last])
        error, values = values[0], values[len(first) :]
        alternates = bool(last) and not values[-1] >= 0
        signs = self._judge_range(attempt.state, values[: len(values) - len(last)], looks, is_careful)
        if signs is None:
            return None
        if not self.accepts(t1, attempt, measured, error):
            self._reject(attempt)
            return None
        self.n_reflects = 0 if looks else self.n_reflects
        return Verdict(alternates, signs)

    # The range of the integers.

    def _ends(self, state: FixedPoint) -> list[Tensor]:
        """Extremes of 2 u, of v, of moves and of z, in the order in which `_judge_range` takes them apart."""
        widest = max(state.reals, key=lambda dtype: dtype.itemsize)
        u = [end for step in self.unread for end in step.u]
        v = [end for step in self.unread for end in step.v]
        moves = [end for step in self.unread for end in step.moves]
        return [
            *([stacked(u, widest)] if u else []),
            stacked([*v, *moves, *[end for z in state.z for end in extremes(z)]], widest),
        ]

    def _signs(self, state: FixedPoint, looks: bool) -> list[Tensor]:
        widest = max(state.reals, key=lambda dtype: dtype.itemsize)
        return [state.signs(i, self.time).to(widest) for i in range(len(state.z))] if looks else []

    def _judge_range(
        self, state: FixedPoint, values: list[float], looks: bool, is_careful: bool
    ) -> Sequence[Signs] | None:
        """Signs of all leaves; None: the range was left, or scales have parted, and the steps were taken back."""
        if not self._is_within(state, values) and not is_careful:
            self._take_back()
            return None
        n, n_ends = len(state.z), sum(len(step.u) for step in self.unread)
        ends = values[2 * n_ends + sum(len(step.moves) for step in self.unread) :]
        left_z, left_v = magnitudes(ends[: 2 * n], n), magnitudes(values[2 * n_ends - 2 * n : 2 * n_ends], n)
        if not looks:
            # Without a look nothing becomes finer.
            return [
                Signs(a, b, math.inf, math.inf, math.inf, 0.0, math.inf) for a, b in zip(left_z, left_v, strict=True)
            ]
        signs = signs_from(ends[2 * n :], left_z, left_v)
        mixed = state.mixed(signs, self.time)
        if mixed:
            self._take_back(mixed)
            return None
        return signs

    def _is_within(self, state: FixedPoint, values: Sequence[float]) -> bool:
        """Whether the numbers of the steps since the last reading stayed within their range.

        None has wrapped round as long as v, 2 u and all that was added to z have stayed below the limit, where z began
        below it. What was added is at most the largest v times the time for which it moved z.
        """
        n, n_ends = len(state.z), sum(len(step.u) for step in self.unread)
        n_moves, rest = sum(len(step.moves) for step in self.unread), iter(values)
        u, v, moves, z = (list(islice(rest, size)) for size in (n_ends, n_ends, n_moves, 2 * n))
        sizes_of_u, sizes_of_v = (magnitudes(x, n) if x else [0.0] * n for x in (u, v))
        met = [*self._added(state, sizes_of_v, moves), *magnitudes(z, n), *sizes_of_u, *sizes_of_v]
        words = [x.dtype for x in state.z] * 4
        return all(x <= LIMIT[word] for x, word in zip(met, words, strict=True))  # not nan, of wrapped numbers

    def _added(self, state: FixedPoint, v: Sequence[float], moves: Sequence[float]) -> list[float]:
        """The largest sum that may have been added to z, for each leaf."""
        n, time = len(state.z), sum(step.time for step in self.unread)
        each = [i for i, k in enumerate(state.kz) if isinstance(k, Tensor)]
        added = [0.0] * n
        for i, (kz, kv) in enumerate(zip(state.kz, state.kv, strict=True)):
            if isinstance(kz, int) and isinstance(kv, int):
                added[i] = ldexp(time * max_or_nan(v[i], self.sizes_of_v[i]), kz - kv)
        for j, i in enumerate(each):
            pairs = [moves[m : m + 2] for m in range(2 * j, len(moves), 2 * len(each))]
            added[i] = sum(max_or_nan(-low, high) for low, high in pairs)
        return added

    def _accept(self, t1: Time, attempt: Attempt, residuals: Residuals, plan: RefreshPlan, verdict: Verdict) -> None:
        t, before = self.t, self.state
        self.commit(t1, attempt, residuals)
        is_same = True
        if verdict.signs is not None:
            for change, lost in self.state.inner_shifts():
                self._put_on_tape(change, lost)
            is_same = not self._adjust(verdict.signs)
            self.unread, self.n_careful = [], max(0, self.n_careful - 1)
            self._limit_v()
            self.state = self.state if self.state.log is None else self.state.settled()
        self.hand_out(t, before, attempt)
        # Rescaling changed z, so f is evaluated again: the backward pass will evaluate it at the rescaled z.
        self.refresh_if(verdict.alternates, plan, self.carry if is_same else None)
        if not self.unread:
            self._save()

    def _limit_v(self) -> None:
        """Where the range was read, v is no larger than this: it would have become coarser."""
        self.sizes_of_v = [2.0 ** (BITS[v.dtype] + SLACK) for v in self.state.v]

    # Changes of the grid.

    def new_slope(self, slope: Tensors | None) -> Tensors:
        for _ in range(MAX_REFRESHES):
            slope = self.f(self.t, self.state.point) if slope is None else slope
            bits = self.state.bits_for_slope(slope)
            if bits is None:
                return slope
            self.state, change, lost = self.state.rescaled(bits)
            self._put_on_tape(change, lost)
            slope = None  # rescaling changed z
        raise NonFiniteError(f"f grows without bound when y is rounded, at t = {number(self.t):.6g}. {LOOK_THERE}")

    def _adjust(self, signs: Sequence[Signs], fresh: Sequence[int] = ()) -> bool:
        """Give leaves exponents that suit their numbers; whether any changed."""
        bits = self.state.adjustment(signs, self.time, fresh)
        if bits is None:
            return False
        self.state, change, lost = self.state.rescaled(bits)
        self._put_on_tape(change, lost)
        return True

    def _signs_now(self) -> list[Signs]:
        state, n = self.state, len(self.state.z)
        widest = max(state.reals, key=lambda dtype: dtype.itemsize)
        ends = stacked([end for x in (*state.z, *state.v) for end in extremes(x)], widest)
        values = read([ends, *self._signs(state, True)])
        return signs_from(values[4 * n :], magnitudes(values[: 2 * n], n), magnitudes(values[2 * n : 4 * n], n))

    def _put_on_tape(self, change: Shift, lost: Snapshot) -> None:
        self.tape.events.append(Rescale(change, self.tape.keep(lost) if self.tape.rewinds else None))

    # Going back.

    def _reject(self, attempt: Attempt) -> None:
        self.state, self.unread = self.saved.state, []
        self.tape.restore(self.saved.tape)
        self.side_effects.restore(self.saved.side_effects)
        if attempt.start is not None and not self.saved.side_effects:
            self.carry = attempt.start
        # A repetition with careful moves must not forget that h was too long.
        self.saved = self.saved._replace(control=copied(self.control), carry=self.carry)

    def _take_back(self, mixed: Sequence[int] = ()) -> None:
        """Back to the last step that was looked at. The next ones are taken with careful moves."""
        saved = self.saved
        self.t, self.state, self.carry = saved.t, saved.state, saved.carry
        self.control, self.refresher = copied(saved.control), copied(saved.refresher)
        self.tape.restore(saved.tape)
        self.side_effects.restore(saved.side_effects)
        self.outputs.restore(saved.outputs)
        self.unread, self.n_careful = [], PERIOD
        self._limit_v()
        if mixed:
            self._adjust(self._signs_now(), mixed)

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
        )
