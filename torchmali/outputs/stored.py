"""Outputs that are stored: y at all times."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchmali.outputs.base import InnerPulled, Outputs, Pulled
from torchmali.state.vectors import Tensors, Time


class StoredOutputs(Outputs):
    """y at n times, time first."""

    keeps_states = True

    def __init__(self, n: int):
        self.n = n
        self.start: Tensors = ()
        self.y: Tensors = ()
        self.traced: list[Tensors] = []  # those with a graph

    def record(self, k: int, t: Time, z: Tensors) -> None:
        if self.is_traced:
            self.traced.append(z)
        elif k == 0:
            self.start = z  # that of the solve, which stays as it is
        elif self.n == 2 and not self.y and all([leaf.stride() == _row_major(leaf.shape) for leaf in self.start]):
            self.y = tuple([torch.stack(pair) for pair in zip(self.start, z, strict=True)])  # the cheapest way
        else:
            for whole, part in zip(self._written(), z, strict=True):
                whole[k] = part

    def record_inner(self, first: int, times: Sequence[Time], z: Tensors) -> None:
        if self.is_traced:
            self.traced += zip(*(leaf.unbind() for leaf in z), strict=True)
            return
        for whole, part in zip(self._written(), z, strict=True):
            whole[first : first + len(times)] = part

    def _written(self) -> Tensors:
        """The tensors of all outputs, to be written in place: there is no list of states beside the result."""
        if not self.y:
            self.y = tuple([_empty_stack(self.n, leaf) for leaf in self.start])
            for whole, part in zip(self.y, self.start, strict=True):
                whole[0] = part
        return self.y

    def pull_inner(self, first: int, times: Sequence[Time], z: Tensors, grads: Sequence[Tensor | None]) -> InnerPulled:
        return InnerPulled([None if g is None else g[first : first + len(times)] for g in grads])

    def results(self) -> Tensors:
        if self.is_traced:
            return tuple([torch.stack(leaf) for leaf in zip(*self.traced, strict=True)])
        return self._written()

    def pull(self, k: int, t: Time, z: Tensors, grads: Sequence[Tensor | None]) -> Pulled:
        return Pulled([None if g is None else g[k] for g in grads])

    def fresh(self) -> Outputs:
        return StoredOutputs(self.n)


@functools.lru_cache(maxsize=1000)
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that torch.stack gives its rows. (Those of a contiguous tensor may differ where a size is 0 or 1.)"""
    return torch.empty(shape, device="meta").stride()


def _empty_stack(n: int, z: Tensor) -> Tensor:
    """An empty tensor for n tensors like z, each in z's memory format."""
    strides = z.stride() if z.is_contiguous() else torch.empty_like(z, device="meta").stride()
    return z.new_empty_strided((n, *z.shape), (max(1, z.numel()), *strides))
