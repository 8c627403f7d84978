"""Leapfrog solvers, their inverse and their pullback, from two moves.

    drift    z <- z + e v
    reflect  v <- v + 2 eta (f(t, z) - v)          its inverse: v <- (v - 2 eta f) / (1 - 2 eta)

A leapfrog solver is a symmetric list of drift coefficients with one reflect between neighbours: the asynchronous
leapfrog integrator (ALF) has (1/2, 1/2). Undamped, two ALF steps are a Strang splitting of z' = f, v' = f' (2 f - v)
into a drift and a reflected drift, so the coefficients of any splitting scheme give a reversible method of its order.
Stage times are t0 + node (t1 - t0) in both directions: t + e - e is not t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate as running_sums
from typing import Any, ClassVar, NamedTuple

import torch

from torchmali.errors import InvalidOptionError
from torchmali.field.evaluate import Field, Recorded
from torchmali.solution import short_repr
from torchmali.solvers.base import Attempt, Cotangent, Passed, ReversibleSolver, Slope, accumulate, missed_by
from torchmali.state.base import State
from torchmali.state.traced import Traced
from torchmali.state.vectors import Tensors, Time, add_, added, combine, dot, scale_


class Scheme(NamedTuple):
    """A list of drift coefficients, as the moves need it."""

    first: float  # coefficient of the first drift
    rest: tuple[tuple[float, float], ...]  # (node of a reflect, coefficient of the drift after it)
    residuals: tuple[int, ...]  # reflects at which f - v is looked at: between them the parasite changes its sign
    error_order: int

    @staticmethod
    def of(coefficients: Sequence[float], error_order: int) -> Scheme:
        first, *others = coefficients
        nodes = running_sums(coefficients[:-1])
        ends = (0, len(others) - 1) if len(others) % 2 == 0 else (0,)  # odd: from one step to the next
        return Scheme(first, tuple(zip(nodes, others, strict=True)), ends, error_order)


def _splitting(a: Sequence[float], b: Sequence[float], error_order: int) -> Scheme:
    """From the first halves of a symmetric splitting scheme, without the middle ones (each list sums to 1)."""
    a = [*a, 1 - 2 * sum(a), *reversed(a)]
    b = [*b, 1 / 2 - sum(b)]
    b = [*b, *reversed(b)]
    pairs = [c / 2 for pair in zip(a, b, strict=False) for c in pair]
    return Scheme.of([*pairs, a[-1] / 2], error_order)


# Orders 4 and 6: S6 and S10 of Blanes and Moan, J. Comput. Appl. Math. 142 (2002) 313.
SCHEMES = {
    2: Scheme.of((0.5, 0.5), error_order=2),
    4: _splitting(
        (0.0792036964311957, 0.353172906049774, -0.0420650803577195),
        (0.209515106613362, -0.143851773179818),
        error_order=6,
    ),
    6: _splitting(
        (0.0502627644003922, 0.413514300428344, 0.0450798897943977, -0.188054853819569, 0.541960678450780),
        (0.148816447901042, -0.132385865767784, 0.067307604692185, 0.432666402578175),
        error_order=8,
    ),
}


@dataclass(frozen=True, repr=False)
class ALF(ReversibleSolver):
    """Asynchronous leapfrog (Algorithms 2 and 3), damped for eta < 1 (Appendix A.5), and its kin of order 4 and 6.

    order: 2 takes one evaluation of f per step, 4 takes 12, 6 takes 20 (and one more with AdaptiveStep, for the error
    estimate). eta: damping, with order 2 only. It makes the method first order and its inverse amplify round-off by
    1/|1 - 2 eta| per step; eta = 1/2 has no inverse. refresh: where f contracts, v parts from f(t, z) in an
    oscillation that no step size keeps small (docs/limits.md); "auto" renews v <- f(t, z) when that shows, n renews it
    every n steps, "never" is the method as published. Each renewal costs one evaluation, and one state of memory where
    a backward pass will need it.
    """

    order: int = 2
    eta: float = 1.0
    refresh: str | int = "auto"
    interpolates: ClassVar[bool] = False

    __repr__ = short_repr

    def __post_init__(self):
        order, eta, refresh = self.order, self.eta, self.refresh
        if order not in list(SCHEMES):
            raise InvalidOptionError(f"ALF(order={order}): there are orders {', '.join(map(str, SCHEMES))}.")
        if not 0 < eta <= 1:
            raise InvalidOptionError(f"ALF(eta={eta}): damping must lie in (0, 1], where 1 is undamped ALF.")
        if eta == 0.5:
            raise InvalidOptionError("ALF(eta=0.5) has no inverse (it divides by 1 - 2 eta). Use eta=0.45, 0.55 or 1.")
        if eta != 1 and order != 2:
            raise InvalidOptionError(
                f"ALF(order={order}, eta={eta}): damping makes any order the first. Use order=2, or eta=1 (the "
                "default)."
            )
        every_n = isinstance(refresh, int) and not isinstance(refresh, bool) and refresh > 0
        if not every_n and refresh not in ("auto", "never"):
            raise InvalidOptionError(f'ALF(refresh={refresh!r}): "auto", "never", or a number of steps.')

    @property
    def refresh_policy(self) -> str | int:
        damped = self.eta != 1 and self.refresh == "auto"  # damping does what a refresh is for
        return "never" if damped else self.refresh

    @property
    def n_reflects(self) -> int:
        return len(SCHEMES[self.order].rest)

    @property
    def error_order(self) -> int:
        return SCHEMES[self.order].error_order

    def start(self, f: Slope, t0: Time, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        return self.refresh_slope(f, t0, arithmetic.of(z0), None), None

    def slope(self, state: State, carry: Tensors | None) -> Tensors:
        return state.slope

    def refresh_slope(self, f: Slope, t: Time, state: State, carry: Tensors | None) -> State:
        return state.with_slope(f(t, state.point) if carry is None else carry)

    def pull_refresh(self, f: Field, t: Time, state: State, a: Cotangent) -> tuple[State, Time | None]:
        u, g, g_t = f.linearize(t, state.point, a.v)
        accumulate(a.sums, g)
        torch._foreach_zero_(a.v)
        return state.with_slope(u), g_t

    def step(
        self,
        f: Slope,
        t0: Time,
        t1: Time,
        state: State,
        carry: Tensors | None,
        adaptive: bool,
        with_residuals: bool = False,
    ) -> Attempt:
        h, eta, (first, rest, ends, _) = t1 - t0, self.eta, SCHEMES[self.order]
        v_in, residuals = state.slope if adaptive else (), []
        state = state.fork().drift(first * h)
        for j, (node, c) in enumerate(rest):
            u = f(t0 + node * h, state.point)
            if with_residuals and j in ends:
                residuals.append(added(u, state.slope, -1.0))
            state = state.reflect(u, eta).drift(c * h)
        error = end = None
        if adaptive and self.order == 2:
            # ALF minus Euler with v_in: eta h (u1 - v_in). From v, as u1 may be a view of the z that has moved on.
            error = combine(None, (h / 2, -h / 2), (state.slope, v_in))
        elif adaptive:
            # h (w_out - w_in), w = v - f(t, z). w_in is zero at the start and after a refresh.
            end = f(t1, state.point)
            f_in = v_in if carry is None else carry
            error = combine(None, (h, -h, -h, h), (state.slope, end, v_in, f_in))
        return Attempt(state, error, end, residuals=residuals)

    def inverse(self, f: Slope, t0: Time, t1: Time, state: State) -> State:
        h, (first, rest, _, _) = t1 - t0, SCHEMES[self.order]
        state = state.fork()
        for node, c in reversed(rest):
            state = state.drift(-c * h)
            state = state.unreflect(f(t0 + node * h, state.point), self.eta)
        return state.drift(-first * h)

    def pullback(self, f: Field, step: Passed, state: State, a: Cotangent) -> State:
        # On integers the start is rebuilt to the bit, so that a kept one has nothing to add.
        if step.before is None or state.is_bounded:
            return self._pull_from_end(f, step, state, a)
        return self._pull_from_start(f, step, step.before, state, a)

    def _pull_from_end(self, f: Field, step: Passed, state: State, a: Cotangent) -> State:
        # One evaluation per reflect serves twice: u1 gives v back, and its graph the VJP.
        t0, h, (first, rest, _, _) = step.t0, step.t1 - step.t0, SCHEMES[self.order]
        for node, c in reversed(rest):
            _pull_drift(c, h, state.slope if f.wants_t else (), a)
            state = state.drift(-c * h)
            recorded = f.record(t0 + node * h, state.point)
            self._pull_reflect(node, recorded, a)
            state = state.unreflect(recorded.u, self.eta)
            del recorded  # or it would still be there at the next evaluation
        _pull_drift(first, h, state.slope if f.wants_t else (), a)
        return state.drift(-first * h)

    def _pull_from_start(self, f: Field, step: Passed, before: State, state: State, a: Cotangent) -> State:
        """The step is made once more from its kept start: nothing is inverted that f may have contracted."""
        t0, h, (first, rest, _, _) = step.t0, step.t1 - step.t0, SCHEMES[self.order]
        # Out of place: a graph needs the z that it was recorded at.
        now, passed = Traced(before.point, before.slope).drift(first * h), []
        for node, c in rest:
            recorded = f.record(t0 + node * h, now.point)
            passed.append((node, c, recorded, now.slope))
            now = now.reflect(recorded.u, self.eta).drift(c * h)
            del recorded
        slope = now.slope
        while passed:
            node, c, recorded, v = passed.pop()
            _pull_drift(c, h, slope if f.wants_t else (), a)
            self._pull_reflect(node, recorded, a)
            slope = v
        _pull_drift(first, h, slope if f.wants_t else (), a)
        return missed_by(before, state, now) if step.compares else before

    def _pull_reflect(self, node: float, recorded: Recorded, a: Cotangent) -> None:
        eta = self.eta
        g, g_t = recorded.pull(a.v)
        accumulate(a.sums, g, 2 * eta)
        scale_(a.v, 1 - 2 * eta)
        if g_t is not None:
            a.t1 = a.t1 + 2 * eta * node * g_t
            a.t0 = a.t0 + 2 * eta * (1 - node) * g_t

    @property
    def amplification(self) -> float:
        return 1 / abs(1 - 2 * self.eta)

    @property
    def is_exact_on_integers(self) -> bool:
        return self.eta == 1


def _pull_drift(c: float, h: float, v: Tensors, a: Cotangent) -> None:
    """v: that of the drift, or empty where dL/dt is not wanted."""
    if v:
        dh = c * dot(a.z, v)
        a.t1 = a.t1 + dh
        a.t0 = a.t0 - dh
    add_(a.v, a.z, c * h)
