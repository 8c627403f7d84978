"""Adams methods: the slopes of earlier steps in place of further stages.

A step of k slopes f_0, f_1, ... (at its start, at the start of the step before, ...) moves z by

    h sum_j b_j f_j                     Adams-Bashforth: the integral of the polynomial through the k slopes
    h (m_0 f(t1, z1) + sum_j m_j f_j)   Adams-Moulton: that of the polynomial through f(t1, z1), too

as if all steps were as long as this one: they are of the order of the slopes on equal steps only. The first steps, for
which there are too few slopes, are of Kutta's 3/8 rule.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from torchmali.errors import InvalidOptionError, warn
from torchmali.solvers.base import Attempt, InterpolatingSolver, Slope
from torchmali.solvers.dense import Interpolant
from torchmali.solvers.runge_kutta import RK4ThreeEighths
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time, combine

FEWEST = 3  # slopes: with fewer of them a step is one of START
MOST = 12  # as max_order
START = RK4ThreeEighths()
STRAIGHT = Interpolant(1, ((1.0,),))  # from the mean slope of the step
HERMITE = Interpolant(3, ((1.0, -2.0, 1.0), (0.0, 3.0, -2.0), (0.0, -1.0, 1.0)))  # f_0, the mean slope, f(t1, z1)


@functools.cache
def _weights(nodes: Sequence[int]) -> tuple[float, ...]:
    """Integrals over [0, 1] of the Lagrange polynomials of these nodes."""
    found = []
    for node in nodes:
        polynomial = [Fraction(1)]  # coefficients of 1, s, s^2, ...
        for other in nodes:
            if other != node:
                shifted = [Fraction(0), *polynomial]
                lower = [*(-other * c for c in polynomial), Fraction(0)]
                polynomial = [(x + y) / (node - other) for x, y in zip(shifted, lower, strict=True)]
        found.append(float(sum(c / (i + 1) for i, c in enumerate(polynomial))))
    return tuple(found)


def bashforth(k: int) -> tuple[float, ...]:
    """b_0, ..., b_(k-1): weights of the slopes at the start of the last k steps."""
    return _weights(tuple(range(0, -k, -1)))


def moulton(k: int) -> tuple[float, ...]:
    """m_0, ..., m_k: weights of f(t1, z1) and of the slopes at the start of the last k steps."""
    return _weights(tuple(range(1, -k, -1)))


@dataclass(frozen=True)
class Adams(InterpolatingSolver):
    """Adams-Bashforth in fixed steps, or (implicit) Adams-Moulton with it as the predictor.

    max_order: one more than the slopes of which a step is made at most. max_iters: of the corrector, which stops when
    an iteration changes the step by less than atol + rtol times its size; if it does not, a warning says so, and the
    oldest slope is forgotten. is_cubic: cubics between grid points (one evaluation more), not straight lines.
    """

    implicit: bool = False
    max_order: int = 12
    max_iters: int = 4
    rtol: float = 1e-3
    atol: float = 1e-4
    is_cubic: bool = False
    remembers_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.max_order <= MOST:
            raise InvalidOptionError(f"Adams(max_order={self.max_order}): must lie between 1 and {MOST}.")
        if self.max_iters < 1:
            raise InvalidOptionError(f"Adams(max_iters={self.max_iters}): need at least one iteration.")

    @property
    def order(self) -> int:
        return 4  # that of the first steps

    @property
    def interpolates(self) -> bool:
        return True

    @property
    def interpolant(self) -> Interpolant:
        return HERMITE if self.is_cubic else STRAIGHT

    def step(self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool) -> Attempt:
        z, n, past = state.point, len(state.point), carry or ()
        slopes = [f(t0, z), *[past[i : i + n] for i in range(0, len(past), n)]][: max(1, self.max_order - 1)]
        if len(slopes) < FEWEST:
            stages = START.stages(f, t0, t1, z, slopes[0])
            mean = combine(None, [w for _, w in START.tableau.b], [stages[j] for j, _ in START.tableau.b])
        else:
            mean = combine(None, bashforth(len(slopes)), slopes)
        first = slopes[0]
        if self.implicit and len(slopes) >= FEWEST:
            mean, has_converged = self._corrected(f, t1, z, t1 - t0, mean, slopes)
            if not has_converged:
                slopes.pop()
        end = state.of(combine(z, (t1 - t0,), (mean,)))
        kept = tuple([x for slope in slopes for x in slope])
        return Attempt(end, carry=kept, stages=[first, mean] if self.is_cubic else [mean])

    def _corrected(
        self, f: Slope, t1: Time, z: Tensors, h: Time, mean: Tensors, slopes: Sequence[Tensors]
    ) -> tuple[Tensors, bool]:
        """The mean slope of the implicit step, from that of the explicit one; whether the iteration has converged."""
        weights = moulton(len(slopes))
        known = combine(None, weights[1:], slopes)
        for _ in range(self.max_iters):
            last = mean
            mean = combine(known, weights[:1], [f(t1, combine(z, (h,), (mean,)))])
            if self._agree(last, mean, h):
                return mean, True
        warn(
            f"The iteration of the implicit Adams step to t = {float(t1):.6g} has not converged in {self.max_iters} "
            "evaluations: use shorter steps, a larger max_iters, or larger tolerances."
        )
        return mean, False

    @torch.no_grad()
    def _agree(self, a: Tensors, b: Tensors, h: Time) -> bool:
        def ratio(x: Tensor, y: Tensor) -> Tensor:
            x, y = x * h, y * h
            return ((x - y).abs() / (self.atol + self.rtol * torch.maximum(x.abs(), y.abs()))).max()

        return bool(torch.stack([ratio(x, y) for x, y in zip(a, b, strict=True)]).max() < 1)

    def inner_stages(
        self, f: Slope, t0: Time, t1: Time, state: State, attempt: Attempt, closes: bool = False
    ) -> tuple[Sequence[Tensors], Tensors | None]:
        if not self.is_cubic:
            return attempt.stages, attempt.carry
        return [*attempt.stages, f(t1, attempt.state.point)], attempt.carry
