"""The refresh of leapfrog solvers: when v has parted from f(t, z) and is to be replaced by it.

A leapfrog solver's w = v - f(t, z) obeys w' = -f' w: it grows where f contracts, and changes its sign at every reflect.
At a reflect f - v is a smooth part, about c h z'' (c h: the drift before it), minus w. As long as w is small, three
such values in a row are nearly parallel; once w dominates, they alternate. So v is refreshed when f - v has changed its
direction twice running (once is what the smooth part does, too, where z'' passes through zero). A step with an odd
number of reflects, from three on, has three such values of its own; there the larger part decides.

It is one sample that diverges, not the batch: inner products are taken per row (over all dimensions but the first; over
the whole leaf if it has one dimension or none), and any row refreshes v for all. Rows in which f - v is round-off do
not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchmali.solvers.base import Attempt, Slope, Solver
from torchmali.solvers.leapfrog import Leapfrog, Residuals
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time, rows

PERIOD = 8  # with fixed steps, w is looked at (and the host read) no more often than once in so many reflects
N_VALUES = 3  # of f - v in a row
LARGE = 1e38  # the largest factor: a float32
MAGNIFIED = 2.0**40  # as squares of small float32 numbers are zero


class RefreshPlan(NamedTuple):
    """What the next step is wanted for."""

    collects: bool  # its residuals are collected,
    decides: bool  # and judged
    refreshes: bool  # v is refreshed after it whatever the residuals say


NO_REFRESH, REFRESHES = RefreshPlan(False, False, False), RefreshPlan(False, False, True)


class Refresher:
    """The policy of a solver (`Leapfrog.refresh`) at work in one solve. Solvers that are no leapfrogs have none.

    n_steps: the number of steps of the solve, if it is known. A solve that ends before the first look is due is looked
    at in its last step: too late for a refresh, in time for a warning.
    """

    def __init__(self, solver: Solver, adaptive: bool, leaves: Sequence[int], n_steps: int | None = None):
        self.solver = solver
        self.leaves = leaves  # those that count
        policy = solver.refresh_policy if isinstance(solver, Leapfrog) else "never"
        self.every = policy if isinstance(policy, int) else None
        self.period = 0  # steps between two looks; 0: never
        self.of_one_step = isinstance(solver, Leapfrog) and len(solver.scheme.observed) == N_VALUES
        if policy == "auto" and isinstance(solver, Leapfrog):
            # Controllers read the host at every step anyway.
            self.period = 1 if adaptive else math.ceil(PERIOD / solver.n_reflects)
            if n_steps is not None and n_steps * len(solver.scheme.observed) < N_VALUES:
                self.period = 0  # there will not be enough values to judge
        self.n_to_come = n_steps
        self.first = self.period if n_steps is None else min(self.period, n_steps)
        self.n_steps = 0
        self.n_looks = 0  # that had enough values to judge
        self.values: Sequence[Tensors] = ()  # the latest residuals

    def plan(self, ahead: int = 0) -> RefreshPlan:
        """What to do in the next step, or so many steps later."""
        n_steps = self.n_steps + ahead
        refreshes = self.every is not None and (n_steps + 1) % self.every == 0
        if not self.period:
            return REFRESHES if refreshes else NO_REFRESH
        before_first = n_steps < self.first
        left = self.first - 1 - n_steps if before_first else self.period - 1 - n_steps % self.period
        return RefreshPlan(True, left == 0, refreshes) if left < N_VALUES else NO_REFRESH

    def step(
        self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool, keeps_stages: bool
    ) -> tuple[Attempt, Residuals]:
        """A step of the solver, and its residuals."""
        assert isinstance(self.solver, Leapfrog)
        residuals: Residuals = [*self.values]
        attempt = self.solver.step_with_residuals(f, t0, t1, state, carry, adaptive, residuals, keeps_stages)
        return attempt, residuals[len(self.values) :]

    def alternation(self, residuals: Residuals, z: Tensors, h: float, eps: float) -> Tensor:
        """A 0-d tensor that is negative or nan if f - v alternates in some row (nan: too large to tell).

        eps: the precision in which f was computed, if that is coarser than z's.
        """
        values = [*self.values, *residuals][-N_VALUES:]
        leaves = [i for i in self.leaves if z[i].numel()]
        if len(values) < N_VALUES or not leaves:
            return z[0].new_ones(())
        self.n_looks += 1
        x0, x1, x2 = values
        is_late = self.n_looks == 1 and self.n_steps + 1 == self.n_to_come  # not for a refresh, but for a warning
        found = [_alternation(x0[i], x1[i], x2[i], z[i], abs(h), eps, is_late, self.of_one_step) for i in leaves]
        widest = max((x.dtype for x in found), key=lambda dtype: dtype.itemsize)
        return found[0] if len(found) == 1 else torch.stack([x.to(z[0].device, widest) for x in found]).amin()

    def alternates(self, residuals: Residuals, z: Tensors, h: float, eps: float) -> bool:
        """Whether f - v alternates in some row, or is too large to tell. Reads the host."""
        values = [*self.values, *residuals][-N_VALUES:]
        if len(values) == N_VALUES and not self.of_one_step and self._is_steady(*values[1:]):
            self.n_looks += 1
            return False
        return not self.alternation(residuals, z, h, eps).item() >= 0

    def _is_steady(self, x1: Tensors, x2: Tensors) -> bool:
        """Whether the last two values of f - v point the same way in all rows: then `alternation` is not negative."""
        found = [torch.linalg.vecdot(rows(x1[i]) * MAGNIFIED, rows(x2[i])).amin() for i in self.leaves if x1[i].numel()]
        if not found:
            return False
        least = found[0] if len(found) == 1 else torch.stack([x.to(found[0]) for x in found]).amin()
        return 0 <= least.item() < math.inf

    def after_steps(self, n: int, residuals: Sequence[Tensors]) -> None:
        """Take note of accepted steps, and of the residuals of the last of them."""
        self.n_steps += n
        if residuals:
            self.values = [*self.values, *residuals][1 - N_VALUES :]

    def refreshed(self, f: Slope, t: Time, state: State, slope: Tensors | None) -> State:
        """The state with v = f(t, z); slope: f(t, z), if it is known."""
        assert isinstance(self.solver, Leapfrog)
        self.values = ()
        return self.solver.refreshed(f, t, state, slope)


def _alternation(
    x0: Tensor, x1: Tensor, x2: Tensor, z: Tensor, h: float, eps: float, growing: bool, of_one_step: bool
) -> Tensor:
    """The least max(<x0, x1>, <x1, x2>) of all rows, over what round-off explains.

    of_one_step: all three are of one step. Their smooth parts are m0, m1 and m0 times the same vector, m0, m1 > 0
    (`leapfrog.scheme_of`), and w changes its sign but grows besides, so that it may show in x2 alone. <x0 + x2, x1> is
    negative where the part that alternates is the larger one.
    growing: of those rows alone in which x2 is more than twice x0, and moves z by half in one step. A refresh too many
    does no harm, a warning does.
    """
    # The round-off of f is that of z times f', and with |f'| h > 1 no solution is followed.
    noise = 4 * max(eps, torch.finfo(z.dtype).eps) / h if h else math.inf
    x0, x1, x2, z = rows(x0), rows(x1) * MAGNIFIED, rows(x2), rows(z)
    dot = torch.linalg.vecdot
    least = dot(x0 + x2, x1) if of_one_step else torch.maximum(dot(x0, x1), dot(x1, x2))
    least = least.add_(dot(z, z), alpha=min(noise**2 * MAGNIFIED, LARGE))
    if growing:
        before, now, size = (torch.linalg.vector_norm(x, dim=1) for x in (x0, x2, z))
        least = torch.where((now > 2 * before) & (2 * h * now > size), least, 1.0)
    return least.amin()
