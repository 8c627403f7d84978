"""Any explicit Runge-Kutta method made reversible by a second copy of the state (McCallum and Foster, 2024).

With Psi_h(t, y) the increment of a step of the base method, the pair (y, z) moves by

    y1 = lam y + (1 - lam) z + Psi_h(t0, z)          z1 = z - Psi_{-h}(t1, y1)

and back by solving the second line for z, then the first for y. The coupling lam < 1 pulls the copies together, at the
price that the inverse amplifies the round-off of y by 1/lam per step. Here z is the state's `point` for y and `slope`
for z: what the state carries beside the solution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchmali.field import Field
from torchmali.solution import require, short_repr
from torchmali.solvers.base import Attempt, Cotangent, Passed, ReversibleSolver, Slope, accumulate
from torchmali.solvers.runge_kutta import RK4, RungeKutta
from torchmali.state import State, Tensors, Time, combine


@dataclass(frozen=True, repr=False)
class Reversible(ReversibleSolver):
    """A Runge-Kutta method with an inverse, of its order, at twice its evaluations per step.

    The other road to high order in constant memory, beside ALF(order=4 or 6). It has the same weakness on contracting
    problems, and no refresh.
    """

    base: RungeKutta = RK4()  # noqa: RUF009 (an immutable value)
    coupling: float = 0.99
    interpolates: ClassVar[bool] = False

    __repr__ = short_repr

    def __post_init__(self):
        what = f"Reversible(base={self.base!r}): give a Runge-Kutta solver, as in Reversible(RK4())."
        require(isinstance(self.base, RungeKutta), what)
        require(0 < self.coupling <= 1, f"Reversible(coupling={self.coupling}): must lie in (0, 1].")

    @property
    def order(self) -> int:
        return self.base.order

    @property
    def error_order(self) -> int | None:
        return self.base.error_order

    def start(self, f: Slope, t0: Time, z0: Tensors, arithmetic: type[State]) -> tuple[State, Tensors | None]:
        return arithmetic.of(z0).with_slope(z0), f(t0, z0)

    def scale_of_v(self, span: float) -> float:
        return 1.0  # v is the other copy of z

    def slope(self, state: State, carry: Tensors | None) -> Tensors:
        assert carry is not None
        return carry

    def pull_renewal(self, f: Field, t: Time, state: State, a: Cotangent) -> tuple[State, Time | None]:
        torch._foreach_add_(a.z, a.v)
        torch._foreach_zero_(a.v)
        return state.with_slope(state.point), None

    def step(
        self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool, watched: bool = False
    ) -> Attempt:
        y, z, lam = state.point, state.slope, self.coupling
        forth = self.base.step(f, t0, t1, state.of(z), carry, adaptive)
        psi = self.base.increment(t0, t1, forth.stages)
        y1 = combine(None, (lam, 1 - lam, 1.0), (y, z, psi))
        back = self.base.increment(t1, t0, self.base.stages(f, t1, t0, y1))
        z1 = combine(z, (-1.0,), (back,))
        return Attempt(state.of(y1).with_slope(z1), forth.error, None)

    def inverse(self, f: Slope, t0: Time, t1: Time, state: State) -> State:
        z = combine(state.slope, (1.0,), (self.base.increment(t1, t0, self.base.stages(f, t1, t0, state.point)),))
        psi = self.base.increment(t0, t1, self.base.stages(f, t0, t1, z))
        return state.of(self._solved(state.point, z, psi)).with_slope(z)

    def _solved(self, y1: Tensors, z: Tensors, psi: Tensors) -> Tensors:
        lam = self.coupling
        return combine(None, (1 / lam, (lam - 1) / lam, -1 / lam), (y1, z, psi))

    def pullback(self, f: Field, step: Passed, state: State, a: Cotangent) -> State:
        # The stages of each half serve twice: for the inverse, and with their graph for the VJP.
        lam, y1 = self.coupling, state.point
        minus_psi, g, (dt1, dt0) = self._pulled(f, step.t1, step.t0, y1, [-x for x in a.v], a)
        torch._foreach_add_(a.z, g)  # now all of dL/dy1
        z = combine(state.slope, (1.0,), (minus_psi,))
        psi, g, (dt2, dt3) = self._pulled(f, step.t0, step.t1, z, a.z, a)
        torch._foreach_add_(a.v, a.z, alpha=1 - lam)
        torch._foreach_add_(a.v, g)
        torch._foreach_mul_(a.z, lam)
        a.t0, a.t1 = dt0 + dt2, dt1 + dt3
        return state.of(self._solved(y1, z, psi)).with_slope(z)

    def _pulled(
        self, f: Field, t0: Any, t1: Any, y: Tensors, weights: list[Tensor], a: Cotangent
    ) -> tuple[Tensors, list[Tensor], tuple[Time, Time]]:
        """The increment from y over [t0, t1], and its VJP with respect to y and to the two times."""
        y = tuple(x.detach().requires_grad_() for x in y)
        if f.wants_t:
            t0, t1 = (torch.tensor(t, dtype=torch.float64).requires_grad_() for t in (t0, t1))
        psi = self.base.increment(t0, t1, self.base.stages(f, t0, t1, y))
        times = [t0, t1] if f.wants_t else []
        g: list = f.vjp(psi, [*y, *f.theta, *times], weights, self.base.tableau.n_stages)
        n, m = len(y), len(y) + len(f.theta)
        accumulate(a.sums, [*[None] * n, *g[n:m]])
        dt0, dt1 = (0.0 if x is None else x for x in (g[m:] or (None, None)))
        slopes = [torch.zeros_like(x) if dx is None else dx for dx, x in zip(g, y, strict=False)]
        return tuple(x.detach() for x in psi), slopes, (dt0, dt1)

    @property
    def amplification(self) -> float:
        return 1 / self.coupling

    @property
    def lifts(self) -> bool:
        return False
