"""The state as floats, moved in place."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchmali._torch import foreach_abs, foreach_lerp_, foreach_sub
from torchmali.state.base import Deviation, RewindableState, Snapshot
from torchmali.state.vectors import Tensors, add_, added, lerp, rows


class Floats(RewindableState):
    """The state as floats, with moves in place. The first move after `fork` makes the copy."""

    __slots__ = ("owns_point", "owns_slope", "point", "slope")

    def __init__(self, point: Tensors, slope: Tensors = ()):
        self.point, self.slope = point, slope
        self.owns_point = self.owns_slope = False

    @classmethod
    def of(cls, z: Tensors) -> Floats:
        return cls(z)

    def started_at(self, z: Tensors) -> Floats:
        return Floats(z)

    def with_slope(self, v: Tensors) -> Floats:
        return Floats(self.point, v)

    def with_point(self, z: Tensors) -> Floats:
        self.point, self.owns_point = z, False
        return self

    def fork(self) -> Floats:
        return Floats(self.point, self.slope)

    def drift(self, e: float) -> Floats:
        if not self.owns_point:
            self.point, self.owns_point = added(self.point, self.slope, e), True
        elif len(self.point) == 1:  # as `add_` does, without the call
            self.point[0].add_(self.slope[0], alpha=e)
        else:
            add_(self.point, self.slope, e)
        return self

    def reflect(self, u: Tensors, eta: float) -> Floats:
        v, weight = self.slope, 2 * eta
        if not self.owns_slope:
            self.slope, self.owns_slope = lerp(v, u, weight), True
        elif len(v) == 1:
            v[0].lerp_(u[0], weight)
        else:
            foreach_lerp_(v, u, weight)
        return self

    def apart(self, x: Tensors) -> Tensors:
        return tuple([leaf.clone() for leaf in x])

    @classmethod
    def restore(cls, kept: Snapshot) -> Floats:
        return cls(kept.tensors[: kept.form], kept.tensors[kept.form :])

    def deviation(self, truth: Floats, end: Floats, span: float, limits: tuple[float, float] = (0.0, 0.0)) -> Deviation:
        leaves = [i for i, z in enumerate(self.point) if z.numel()]
        if not leaves:
            return Deviation(0.0, 0.0, 0.0, 0.0)
        most = self._most(truth, span, leaves)
        if most <= min(limits):  # then no component is beyond a limit, and a row is off by no more
            return Deviation(most, 0.0, 0.0, most)
        worst = _worst([self._deviation(truth, i, span, limits) for i in leaves])
        if not all(map(math.isfinite, worst)):  # perhaps of a component without a scale: 0 / 0, or more / 0
            worst = _worst([self._deviation(truth, i, span, limits, end) for i in leaves])
        return Deviation(*(math.inf if math.isnan(x) else x for x in worst))

    def _deviation(
        self, truth: Floats, i: int, span: float, limits: tuple[float, float], end: Floats | None = None
    ) -> Tensor:
        """The four numbers of a Deviation, for leaf i.

        end: to give a scale to components that have none; without it they make nan or infinity.
        """
        size = rows(truth._size(i, span))
        largest = size.amax(1, keepdim=True)
        if end is not None:
            other = rows(end._size(i, span)).amax(1, keepdim=True)
            largest = torch.where(largest > 0, largest, torch.where(other > 0, other, 1.0))
            size = torch.where(size > 0, size, largest)
        off = rows(self._off(truth, i, span))
        of_row = (off.amax(1, keepdim=True) / largest).amax()
        relative = off.div_(size)
        most, some = (~(relative <= limit) for limit in limits)  # nan counts
        shares = most.sum(1).amax() / most.shape[1], some.sum() / some.numel()
        return torch.stack([relative.amax(), *[share.to(of_row) for share in shares], of_row])

    def _most(self, truth: Floats, span: float, leaves: Sequence[int]) -> float:
        """An upper limit of `Deviation.component`, at most four times as large, in few operations; nan for 0 / 0.

        It has sums in place of the larger of two: (a + b) / 2 <= max(a, b) <= a + b.
        """
        worst = [self._sum_of_off(truth, i, span).amax() for i in leaves]
        n = len(leaves)
        most = worst[0].item() if n == 1 else max(torch.stack([x.to(worst[0]) for x in worst]).tolist())
        return 2 * most if self.slope else most

    def _sum_of_off(self, truth: Floats, i: int, span: float) -> Tensor:
        """The relative deviation of each component of leaf i, with sums of what z and v have in place of the larger."""
        if not self.slope:
            return (self.point[i] - truth.point[i]).abs_().div_(truth.point[i].abs())
        known = truth.point[i], truth.slope[i]
        off, of_v = foreach_sub((self.point[i], self.slope[i]), known)
        off.abs_().add_(of_v.abs_(), alpha=span)
        del of_v
        size, of_v = foreach_abs(known)
        return off.div_(size.add_(of_v, alpha=span))

    def _size(self, i: int, span: float) -> Tensor:
        """The scale of each component of leaf i."""
        size = self.point[i].abs()
        return torch.maximum(size, self.slope[i].abs().mul_(span), out=size) if self.slope else size

    def _off(self, truth: Floats, i: int, span: float) -> Tensor:
        """By how much each component of leaf i is off."""
        off = (self.point[i] - truth.point[i]).abs_()
        if not self.slope:
            return off
        return torch.maximum(off, (self.slope[i] - truth.slope[i]).abs_().mul_(span), out=off)


def _worst(x: Sequence[Tensor]) -> list[float]:
    """The largest elements of vectors of the same length, in one host read."""
    return (x[0] if len(x) == 1 else torch.stack([part.to(x[0]) for part in x]).amax(0)).tolist()
