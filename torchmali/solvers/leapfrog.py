"""The asynchronous leapfrog integrator (ALF), its inverse and its pullback, from two moves.

    drift    z <- z + e v
    reflect  v <- v + 2 eta (f(t, z) - v)          its inverse: v <- (v - 2 eta f) / (1 - 2 eta)

A leapfrog solver is a list of drift coefficients with one reflect between neighbours; ALF has (1/2, 1/2). Stage times
are t0 + node (t1 - t0) in both directions: t + e - e is not t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torchmali.field import Field
from torchmali.solution import require
from torchmali.solvers.base import Attempt, Cotangent, Passed, ReversibleSolver, Slope, accumulate
from torchmali.state import State, Tensors, Time, add_, combine, dot, scale_


@dataclass(frozen=True)
class ALF(ReversibleSolver):
    """Asynchronous leapfrog (Algorithms 2 and 3), damped for eta < 1 (Appendix A.5).

    Second order with eta = 1. Damping makes it first order and its inverse amplify round-off by 1/|1 - 2 eta| per step;
    eta = 1/2 has no inverse. Without damping, directions in which f contracts strongly over the time span excite an
    oscillation of v that ordinary step sizes do not keep small (docs/limits.md).
    """

    eta: float = 1.0
    interpolates: ClassVar[bool] = False
    first: ClassVar[float] = 0.5  # coefficient of the first drift
    # (node of a reflect, coefficient of the drift after it)
    rest: ClassVar[tuple[tuple[float, float], ...]] = ((0.5, 0.5),)

    def __post_init__(self):
        require(0 < self.eta <= 1, f"ALF(eta={self.eta}): damping must lie in (0, 1], where 1 is undamped ALF.")
        require(self.eta != 0.5, "ALF(eta=0.5) has no inverse (it divides by 1 - 2 eta). Use eta=0.45, 0.55 or 1.")

    @property
    def order(self) -> int:
        return 2 if self.eta == 1 else 1

    @property
    def error_order(self) -> int:
        return 2

    def start(self, f: Slope, t0: Time, z0: Tensors, arithmetic: type[State]) -> tuple[State, None]:
        return arithmetic(z0, f(t0, z0)), None

    def slope(self, state: State, carry: Tensors | None) -> Tensors:
        return state.slope

    def step(self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool) -> Attempt:
        h, eta = t1 - t0, self.eta
        v_in = state.slope
        state = state.fork().drift(self.first * h)
        for node, c in self.rest:
            state = state.reflect(f(t0 + node * h, state.point), eta).drift(c * h)
        # ALF minus explicit Euler with v_in: eta h (u1 - v_in). From v, as u1 may be a view of the z that has moved on.
        error = combine(None, (h / 2, -h / 2), (state.slope, v_in)) if adaptive else None
        return Attempt(state, error, None)

    def inverse(self, f: Slope, t0: Time, t1: Time, state: State) -> State:
        h = t1 - t0
        state = state.fork()
        for node, c in reversed(self.rest):
            state = state.drift(-c * h)
            state = state.unreflect(f(t0 + node * h, state.point), self.eta)
        return state.drift(-self.first * h)

    def pullback(self, f: Field, step: Passed, state: State, a: Cotangent) -> State:
        # One evaluation per reflect serves twice: u1 gives v back, and its graph the VJP.
        t0, h, eta = step.t0, step.t1 - step.t0, self.eta
        for node, c in reversed(self.rest):
            state = self._pull_drift(c, h, state, a, f.wants_t)
            u1, g, g_t = f.linearize(t0 + node * h, state.point, a.v)
            state = state.unreflect(u1, eta)
            accumulate(a.sums, g, 2 * eta)
            scale_(a.v, 1 - 2 * eta)
            if g_t is not None:
                a.t1 = a.t1 + 2 * eta * node * g_t
                a.t0 = a.t0 + 2 * eta * (1 - node) * g_t
            del u1, g  # or they would still be there at the next evaluation
        state = self._pull_drift(self.first, h, state, a, f.wants_t)
        return state if step.before is None else step.before.fork()

    def _pull_drift(self, c: float, h: float, state: State, a: Cotangent, wants_t: bool) -> State:
        if wants_t:
            dh = c * dot(a.z, state.slope)
            a.t1 = a.t1 + dh
            a.t0 = a.t0 - dh
        add_(a.v, a.z, c * h)
        return state.drift(-c * h)

    def amplification(self, n_steps: int) -> float:
        return math.exp(min(700.0, -n_steps * math.log(abs(1 - 2 * self.eta))))
