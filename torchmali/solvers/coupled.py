"""Any explicit Runge-Kutta method made reversible by a second copy of the state (McCallum and Foster, 2024).

With Psi_h(t, y) the increment of a step of the base method, the pair (y, z) moves by

    y1 = lam y + (1 - lam) z + Psi_h(t0, z)          z1 = z - Psi_{-h}(t1, y1)

The inverse solves the second line for z, then the first for y. The coupling lam < 1 pulls the copies together, at the
price that the inverse amplifies the round-off of y by 1/lam per step. In the code, y is the state's `point`, and z its
`slope`: the tensors that a state carries beside the solution.

Between grid points, with the interpolant of the base method, whose slope at the end is f(t1, y1),

    y(t0 + theta h) = y + (1 - lam) theta (z - y) + h sum_j b_j(theta) k_j

The stages k_j and f(t1, y1) are known: outputs cost no evaluation in either pass.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali._torch import foreach_add_, foreach_mul_, foreach_zero_
from torchmali.errors import InvalidOptionError
from torchmali.field.evaluate import Field
from torchmali.solution import short_repr
from torchmali.solvers.base import (
    Attempt,
    AugmentedSolver,
    InterpolatingSolver,
    Slope,
    StepBack,
    add_inner,
    shifted_start,
)
from torchmali.solvers.cotangent import Cotangent, followed
from torchmali.solvers.dense import Interpolant
from torchmali.solvers.interpolation import InnerCotangents, pull_inner
from torchmali.solvers.runge_kutta import RK4, RungeKutta, Tableau
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time, combine, dot, number


@dataclass(frozen=True, repr=False)
class Reversible(AugmentedSolver, InterpolatingSolver):
    """A Runge-Kutta method made reversible: the order of `base`, at twice its evaluations per step.

    An alternative to ALF(order=4 or 6) for high order in constant memory. `Reversible` has the same weakness on
    contracting problems, and no refresh. Its interpolant is that of `base`, or for Dopri8 one of order 5 without
    further stages, which is less accurate than the steps: adaptive steps of Reversible(Dopri8()) end on output times.
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

    @property
    def interpolates(self) -> bool:
        return self.base.interpolates and not self.base.interpolant.extra

    @property
    def interpolant(self) -> Interpolant:
        """The stages are those of `base`, f(t1, y1), and (z - y) / h."""
        return _coupled_interpolant(self.base.tableau, self.coupling)

    def step(self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool) -> Attempt:
        return self.step_with_stages(f, t0, t1, state, carry, adaptive)._replace(stages=())

    def step_with_stages(
        self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool
    ) -> Attempt:
        z = state.slope
        forth = self.base.step(f, t0, t1, state.of(z), carry, adaptive)
        y1 = self._moved(state, self.base.increment(t0, t1, forth.stages))
        back = self.base.stages(f, t1, t0, y1)
        z1 = combine(z, (-1.0,), (self.base.increment(t1, t0, back),))
        stages = [*forth.stages[: self.base.tableau.n_stages], back[0]]
        return Attempt(state.of(y1).with_slope(z1), forth.error, stages=stages)

    def inner_stages(
        self, f: Slope, t0: Time, t1: Time, state: State, attempt: Attempt, closes: bool = False
    ) -> tuple[Sequence[Tensors], Tensors | None]:
        return self._with_distance(attempt.stages, t1 - t0, state), attempt.carry

    def _with_distance(self, stages: Sequence[Tensors], h: Time, state: State) -> Sequence[Tensors]:
        """The stages of a step from `state`, and (z - y) / h after them."""
        rate = _inverse(h)
        return [*stages, combine(None, (rate, -rate), (state.slope, state.point))]

    def inverse(self, f: Slope, t0: Time, t1: Time, state: State) -> State:
        z = combine(state.slope, (1.0,), (self.base.increment(t1, t0, self.base.stages(f, t1, t0, state.point)),))
        psi = self.base.increment(t0, t1, self.base.stages(f, t0, t1, z))
        return state.of(self._solved(state.point, z, psi)).with_slope(z)

    def _solved(self, y1: Tensors, z: Tensors, psi: Tensors) -> Tensors:
        lam = self.coupling
        return combine(None, (1 / lam, (lam - 1) / lam, -1 / lam), (y1, z, psi))

    def pullback(self, f: Field, step: StepBack, state: State, a: Cotangent) -> State:
        inside = step.inside
        if step.before is not None:
            return self._pull_from_start(f, step, step.before, state, a)
        if inside is not None and (inside.needs_states or f.wants_t):
            return self._pull_with_stages(f, step, state, a)
        # The stages of each half step serve twice: for the state at its start, and with their graph for the VJP.
        t0, t1, y1 = step.t0, step.t1, state.point
        inner = self._pull_inner(f, step, state, ())
        back = self._recorded(f, t1, t0, y1)
        self._pull_back_half(back, a, inner)
        z = combine(state.slope, (1.0,), (back.psi,))
        del back  # frees its graph before the other half
        forth = self._recorded(f, t0, t1, z)
        self._pull_forth_half(forth, a, inner)
        self._pull_start_of_inner(f, step, state, a, inner)
        return state.of(self._solved(y1, z, forth.psi)).with_slope(z)

    def _pull_with_stages(self, f: Field, step: StepBack, state: State, a: Cotangent) -> State:
        """Outputs inside the step are needed for their own cotangents: both halves are there before the first VJP."""
        back = self._recorded(f, step.t1, step.t0, state.point)
        z = combine(state.slope, (1.0,), (back.psi,))
        forth = self._recorded(f, step.t0, step.t1, z)
        before = state.of(self._solved(state.point, z, forth.psi)).with_slope(z)
        self._pull_halves(f, step, before, forth, back, a)
        return before

    def _pull_from_start(self, f: Field, step: StepBack, before: State, state: State, a: Cotangent) -> State:
        # With a kept start nothing has to be inverted, but the graphs of both halves are alive at once.
        forth = self._recorded(f, step.t0, step.t1, before.slope)
        y1 = self._moved(before, forth.psi)
        back = self._recorded(f, step.t1, step.t0, y1)
        self._pull_halves(f, step, before, forth, back, a)
        led = before.of(y1).with_slope(combine(before.slope, (-1.0,), (back.psi,)))
        return shifted_start(before, state, led) if step.compares else before

    def _pull_halves(
        self, f: Field, step: StepBack, before: State, forth: _Increment, back: _Increment, a: Cotangent
    ) -> None:
        """Pull `a` back over both halves of a step from `before`, which have been recorded."""
        stages = self._with_distance([*forth.stages, back.stages[0]], step.t1 - step.t0, before) if step.inside else ()
        inner = self._pull_inner(f, step, before, [tuple([x.detach() for x in stage]) for stage in stages])
        self._pull_back_half(back, a, inner)
        self._pull_forth_half(forth, a, inner)
        self._pull_start_of_inner(f, step, before, a, inner)

    def _pull_inner(self, f: Field, step: StepBack, state: State, stages: Sequence[Tensors]) -> InnerCotangents | None:
        """Cotangents of outputs inside the step from `state`; without stages, any other state of its shape will do."""
        if step.inside is None:
            return None
        return pull_inner(self.interpolant, state.point, step.t0, step.t1, stages, step.inside, f.wants_t)

    def _pull_start_of_inner(
        self, f: Field, step: StepBack, before: State, a: Cotangent, inner: InnerCotangents | None
    ) -> None:
        """Add the shares that outputs inside a step have in y and z at its start, where `a` is."""
        if inner is None:
            return
        add_inner(a, inner)
        of_distance, rate = inner.stages[-1], _inverse(step.t1 - step.t0)
        if of_distance is None:  # lam = 1
            return
        foreach_add_(a.v, of_distance, alpha=rate)
        foreach_add_(a.z, of_distance, alpha=-rate)
        if f.wants_t:
            dh = dot(of_distance, combine(None, (-(rate**2), rate**2), (before.slope, before.point)))
            a.add_to_times(-dh, dh)

    def _moved(self, state: State, psi: Tensors) -> Tensors:
        """y1 = lam y + (1 - lam) z + psi"""
        return combine(None, (self.coupling, 1 - self.coupling, 1.0), (state.point, state.slope, psi))

    def _pull_back_half(self, back: _Increment, a: Cotangent, inner: InnerCotangents | None) -> None:
        """Pull back through z1 = z - psi(y1) and f(t1, y1); afterwards a.z is all of dL/dy1."""
        of_end = None if inner is None else inner.stages[self.base.tableau.n_stages]
        g, (dt1, dt0) = back.pull([-x for x in a.v], [of_end], a)
        a.add_to_times(dt0, dt1)
        foreach_add_(a.z, g)

    def _pull_forth_half(self, forth: _Increment, a: Cotangent, inner: InnerCotangents | None) -> None:
        """Pull back through y1 = lam y + (1 - lam) z + psi(z), and through the stages of psi."""
        of_stages = () if inner is None else inner.stages[: self.base.tableau.n_stages]
        g, (dt0, dt1) = forth.pull(a.z, of_stages, a)
        foreach_add_(a.v, a.z, alpha=1 - self.coupling)
        foreach_add_(a.v, g)
        foreach_mul_(a.z, self.coupling)
        a.add_to_times(dt0, dt1)

    def _recorded(self, f: Field, t0: Any, t1: Any, y: Tensors) -> _Increment:
        """Compute the increment from y over [t0, t1], with its graph."""
        y = tuple(x.detach().requires_grad_() for x in y)
        if f.wants_t:
            t0, t1 = followed((t0, t1), y)
        stages = self.base.stages(f, t0, t1, y)
        psi = self.base.increment(t0, t1, stages)
        times = [t0, t1] if f.wants_t else []
        return _Increment(f, psi, stages, y, times, tuple(x.detach() for x in psi))

    @property
    def amplification(self) -> float:
        return 1 / self.coupling


class _Increment(NamedTuple):
    """An increment of the base method with its graph, which can be used once."""

    f: Field
    outputs: Tensors
    stages: Sequence[Tensors]
    y: Tensors
    times: list  # t0 and t1 where dL/dt is wanted
    psi: Tensors  # the outputs without a graph

    def pull(
        self, weights: Sequence[Tensor], of_stages: Sequence[list[Tensor] | None], a: Cotangent
    ) -> tuple[list[Tensor], tuple[Time, Time]]:
        """Return the VJP with respect to y and to the two times; the VJP with respect to theta is added to `a`.

        weights: cotangents of the outputs. of_stages: those of the first stages, None where they are zero.
        """
        results, cotangents = [*self.outputs], [*weights]
        for stage, of_stage in zip(self.stages, of_stages, strict=False):
            results += stage if of_stage is not None else ()
            cotangents += of_stage or ()
        g = self.f.vjp(results, [*self.y, *self.f.theta, *self.times], cotangents, len(self.stages))
        n, m = len(self.y), len(self.y) + len(self.f.theta)
        a.add_to_theta(g[n:m])
        dt0, dt1 = (0.0 if x is None else x for x in (g[m:] or (None, None)))
        slopes = [torch.zeros_like(x) if dx is None else dx for dx, x in zip(g, self.y, strict=False)]
        return slopes, (dt0, dt1)


def _inverse(h: Time) -> Time:
    """1 / h; 0 for a step that is too short to move the time, which has no outputs inside."""
    return 1 / h if number(h) else 0.0


@functools.cache
def _coupled_interpolant(tableau: Tableau, coupling: float) -> Interpolant:
    """The interpolant of a base method without further stages, and the weight (1 - lam) theta of (z - y) / h."""
    order, rows, _ = tableau.interpolant_of_ends if tableau.interpolant.extra else tableau.interpolant
    zeros = (0.0,) * len(rows[0])
    ends = rows if len(rows) > tableau.n_stages else (*rows, zeros)
    return Interpolant(order, (*ends, (1 - coupling, *zeros[1:])))
