"""Any explicit Runge-Kutta method made reversible by a second copy of the state (McCallum and Foster, 2024).

With Psi_h(t, y) the increment of a step of the base method, the pair (y, z) moves by

    y1 = lam y + (1 - lam) z + Psi_h(t0, z)          z1 = z - Psi_{-h}(t1, y1)

The inverse solves the second line for z, then the first for y. The coupling lam < 1 pulls the copies together, at the
price that the inverse amplifies the round-off of y by 1/lam per step. In the code, y is the state's `point`, and z its
`slope`: the tensors that a state carries beside the solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali._torch import foreach_add_, foreach_mul_, foreach_zero_
from torchmali.errors import InvalidOptionError
from torchmali.field.evaluate import Field
from torchmali.solution import short_repr
from torchmali.solvers.base import Attempt, AugmentedSolver, Slope, StepBack, shifted_start
from torchmali.solvers.cotangent import Cotangent, followed
from torchmali.solvers.runge_kutta import RK4, RungeKutta
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time, combine


@dataclass(frozen=True, repr=False)
class Reversible(AugmentedSolver):
    """A Runge-Kutta method made reversible: the order of `base`, at twice its evaluations per step.

    An alternative to ALF(order=4 or 6) for high order in constant memory. `Reversible` has the same weakness on
    contracting problems, and no refresh.
    """

    base: RungeKutta = RK4()  # noqa: RUF009 (an immutable value)
    coupling: float = 0.99

    __repr__ = short_repr

    def __post_init__(self):
        if not isinstance(self.base, RungeKutta):
            raise InvalidOptionError(
                f"Reversible(base={self.base!r}): give a Runge-Kutta solver, as in Reversible(RK4())."
            )
        if not 0 < self.coupling <= 1:
            raise InvalidOptionError(f"Reversible(coupling={self.coupling}): must lie in (0, 1].")

    @property
    def order(self) -> int:
        return self.base.order

    @property
    def error_order(self) -> int | None:
        return self.base.error_order

    def start(self, f: Slope, t0: Time, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        return arithmetic.of(z0).with_slope(z0), f(t0, z0)

    def scale_of_v(self, span: float) -> float:
        return 1.0  # v is the other copy of z

    def pull_start(self, f: Field, t: Time, state: State, a: Cotangent) -> tuple[State, Time | None]:
        foreach_add_(a.z, a.v)
        foreach_zero_(a.v)
        return state.with_slope(state.point), None

    def step(self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool) -> Attempt:
        z = state.slope
        forth = self.base.step(f, t0, t1, state.of(z), carry, adaptive)
        y1 = self._moved(state, self.base.increment(t0, t1, forth.stages))
        back = self.base.increment(t1, t0, self.base.stages(f, t1, t0, y1))
        z1 = combine(z, (-1.0,), (back,))
        return Attempt(state.of(y1).with_slope(z1), forth.error)

    def inverse(self, f: Slope, t0: Time, t1: Time, state: State) -> State:
        z = combine(state.slope, (1.0,), (self.base.increment(t1, t0, self.base.stages(f, t1, t0, state.point)),))
        psi = self.base.increment(t0, t1, self.base.stages(f, t0, t1, z))
        return state.of(self._solved(state.point, z, psi)).with_slope(z)

    def _solved(self, y1: Tensors, z: Tensors, psi: Tensors) -> Tensors:
        lam = self.coupling
        return combine(None, (1 / lam, (lam - 1) / lam, -1 / lam), (y1, z, psi))

    def pullback(self, f: Field, step: StepBack, state: State, a: Cotangent) -> State:
        # The stages of each half step serve twice: for the state at its start, and with their graph for the VJP.
        t0, t1, before, y1 = step.t0, step.t1, step.before, state.point
        if before is None:
            back = self._recorded(f, t1, t0, y1)
            self._pull_back_half(back, a)
            z = combine(state.slope, (1.0,), (back.psi,))
            del back  # frees its graph before the other half
            forth = self._recorded(f, t0, t1, z)
            self._pull_forth_half(forth, a)
            return state.of(self._solved(y1, z, forth.psi)).with_slope(z)
        # With a kept start nothing has to be inverted, but the graphs of both halves are alive at once.
        forth = self._recorded(f, t0, t1, before.slope)
        y1 = self._moved(before, forth.psi)
        back = self._recorded(f, t1, t0, y1)
        self._pull_back_half(back, a)
        self._pull_forth_half(forth, a)
        led = before.of(y1).with_slope(combine(before.slope, (-1.0,), (back.psi,)))
        return shifted_start(before, state, led) if step.compares else before

    def _moved(self, state: State, psi: Tensors) -> Tensors:
        """y1 = lam y + (1 - lam) z + psi"""
        return combine(None, (self.coupling, 1 - self.coupling, 1.0), (state.point, state.slope, psi))

    def _pull_back_half(self, back: _Increment, a: Cotangent) -> None:
        """Pull back through z1 = z - psi(y1); afterwards a.z is all of dL/dy1."""
        g, (dt1, dt0) = back.pull([-x for x in a.v], a)
        a.add_to_times(dt0, dt1)
        foreach_add_(a.z, g)

    def _pull_forth_half(self, forth: _Increment, a: Cotangent) -> None:
        """Pull back through y1 = lam y + (1 - lam) z + psi(z)."""
        g, (dt0, dt1) = forth.pull(a.z, a)
        foreach_add_(a.v, a.z, alpha=1 - self.coupling)
        foreach_add_(a.v, g)
        foreach_mul_(a.z, self.coupling)
        a.add_to_times(dt0, dt1)

    def _recorded(self, f: Field, t0: Any, t1: Any, y: Tensors) -> _Increment:
        """Compute the increment from y over [t0, t1], with its graph."""
        y = tuple(x.detach().requires_grad_() for x in y)
        if f.wants_t:
            t0, t1 = followed((t0, t1), y)
        psi = self.base.increment(t0, t1, self.base.stages(f, t0, t1, y))
        times = [t0, t1] if f.wants_t else []
        return _Increment(f, psi, y, times, self.base.tableau.n_stages, tuple(x.detach() for x in psi))

    @property
    def amplification(self) -> float:
        return 1 / self.coupling


class _Increment(NamedTuple):
    """An increment of the base method with its graph, which can be used once."""

    f: Field
    outputs: Tensors
    y: Tensors
    times: list  # t0 and t1 where dL/dt is wanted
    n_evals: int
    psi: Tensors  # the outputs without a graph

    def pull(self, weights: Sequence[Tensor], a: Cotangent) -> tuple[list[Tensor], tuple[Time, Time]]:
        """Return the VJP with respect to y and to the two times; the VJP with respect to theta is added to `a`."""
        g: list = self.f.vjp(self.outputs, [*self.y, *self.f.theta, *self.times], weights, self.n_evals)
        n, m = len(self.y), len(self.y) + len(self.f.theta)
        a.add_to_theta(g[n:m])
        dt0, dt1 = (0.0 if x is None else x for x in (g[m:] or (None, None)))
        slopes = [torch.zeros_like(x) if dx is None else dx for dx, x in zip(g, self.y, strict=False)]
        return slopes, (dt0, dt1)
