"""When v has parted from f(t, z) and has to be renewed.

A leapfrog solver's w = v - f(t, z) obeys w' = -f' w: it grows where f contracts, and changes its sign at every reflect.
At a reflect f - v is a smooth part, about c h z'' (c h: the drift before it), minus w. As long as w is small, three
such values in a row are nearly parallel; once w dominates, they alternate. So v is renewed when f - v has changed its
direction twice running (once is what the smooth part does, too, where z'' passes through zero).

It is one sample that diverges, not the batch: inner products are taken per row (over all dimensions but the first; over
the whole leaf if it has one dimension or none), and any row renews v for all. Rows in which f - v is round-off do not
count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchmali.state import Tensors

PERIOD = 8  # with fixed steps, w is looked at (and the host read) no more often than once in so many reflects
N_VALUES = 3  # of f - v in a row
Evidence = Sequence[Sequence[Tensor]]


class Watch:
    """The policy ALF(refresh=...) at work in one solve."""

    def __init__(self, policy: str | int, n_reflects: int, adaptive: bool, leaves: Sequence[int]):
        self.leaves = leaves  # those that count
        self.every = policy if isinstance(policy, int) else None
        # Controllers read the host at every step anyway.
        self.period = 0 if policy != "auto" else 1 if adaptive else math.ceil(PERIOD / n_reflects)
        self.n_steps = 0
        self.values: list[Sequence[Tensor]] = []

    def looks(self) -> bool:
        """Whether the next step should bring its evidence."""
        return self.period == 1 or (self.period > 1 and self.n_steps % self.period >= self.period - N_VALUES)

    def decides(self) -> bool:
        """Whether that evidence is to be judged."""
        return self.period > 0 and self.n_steps % self.period == self.period - 1

    @torch.no_grad()
    def alternates(self, evidence: Evidence, z: Tensors, h: float) -> Tensor:
        """Whether f - v alternates in some row, as a 0-d tensor of zeros and ones, like z."""
        values = [*self.values, *evidence][-N_VALUES:]
        if len(values) < N_VALUES or not any(z[i].numel() for i in self.leaves):
            return z[0].new_zeros(())
        x0, x1, x2 = values
        found = [_alternates(x0[i], x1[i], x2[i], z[i], abs(h)) for i in self.leaves if z[i].numel()]
        return (found[0] if len(found) == 1 else torch.stack(found).any()).to(z[0].dtype)

    def after_step(self, evidence: Evidence) -> bool:
        """Take note of an accepted step; true if it is time for a renewal without looking."""
        self.n_steps += 1
        if evidence:
            self.values = [*self.values, *evidence][1 - N_VALUES :]
        return self.every is not None and self.n_steps % self.every == 0

    def after_renewal(self) -> None:
        self.values = []


def _alternates(x0: Tensor, x1: Tensor, x2: Tensor, z: Tensor, h: float) -> Tensor:
    # Divided by the largest element, as squares of small float32 numbers are zero. The round-off of f is that of z
    # times f', and with |f'| h > 1 no solution is followed.
    x0, x1, x2, z = torch._foreach_div((x0, x1, x2, z), x1.abs().amax())
    rate = 4 * torch.finfo(z.dtype).eps / h if h else math.inf
    noise = -rate * rate * _per_row(z * z)
    return ((_per_row(x0 * x1) < noise) & (_per_row(x1 * x2) < noise)).any()


def _per_row(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1) if x.ndim > 1 else x.sum()
