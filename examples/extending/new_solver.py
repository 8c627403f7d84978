"""Two new solvers that are no Runge-Kutta or leapfrog methods of this package: `step`, and `inverse`, written out."""

from dataclasses import dataclass

import torchmali as tm
from torchmali.engine import Slope, State, Tensors, Time


@dataclass(frozen=True)
class ExplicitMidpoint(tm.Solver):
    """z1 = z0 + h f(t0 + h/2, z0 + h/2 f(t0, z0)): `order` and `step` are all that a solver needs."""

    @property
    def order(self) -> int:
        return 2

    def step(self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool) -> tm.Attempt:
        h, z = t1 - t0, state.point
        middle = tuple(x + h / 2 * u for x, u in zip(z, f(t0, z), strict=True))
        slopes = f(t0 + h / 2, middle)
        return tm.Attempt(state.of(tuple(x + h * u for x, u in zip(z, slopes, strict=True))))


@dataclass(frozen=True)
class Verlet(tm.ReversibleSolver):
    """Velocity Verlet for y = (q, p), where dq/dt depends on p and t alone and dp/dt on q and t alone.

    Each line of `step` adds something to one half of the state that depends on the other half alone, so `inverse`
    subtracts the same in the opposite order: MALI keeps no state of it.
    """

    @property
    def order(self) -> int:
        return 2

    def step(self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool) -> tm.Attempt:
        h, (q, p) = t1 - t0, state.point
        p = p + h / 2 * f(t0, (q, p))[1]
        q = q + h * f(t0 + h / 2, (q, p))[0]
        p = p + h / 2 * f(t1, (q, p))[1]
        return tm.Attempt(state.of((q, p)))

    def inverse(self, f: Slope, t0: Time, t1: Time, state: State) -> State:
        h, (q, p) = t1 - t0, state.point
        p = p - h / 2 * f(t1, (q, p))[1]
        q = q - h * f(t0 + h / 2, (q, p))[0]
        p = p - h / 2 * f(t0, (q, p))[1]
        return state.of((q, p))
