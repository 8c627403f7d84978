"""Outputs that are stored: y at all times."""

from __future__ import annotations

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
        self.y: Tensors = ()
        self.traced: list[Tensors] = []  # those with a graph

    def record(self, k: int, t: Time, z: Tensors) -> None:
        if self.is_traced:
            self.traced.append(z)
            return
        # Written in place: no list of states beside the result.
        self.y = self.y or tuple(_empty_stack(self.n, leaf) for leaf in z)
        for whole, part in zip(self.y, z, strict=True):
            whole[k] = part

    def record_inner(self, first: int, times: Sequence[Time], z: Tensors) -> None:
        if self.is_traced:
            self.traced += zip(*(leaf.unbind() for leaf in z), strict=True)
            return
        for whole, part in zip(self.y, z, strict=True):
            whole[first : first + len(times)] = part

    def pull_inner(self, first: int, times: Sequence[Time], z: Tensors, grads: Sequence[Tensor | None]) -> InnerPulled:
        return InnerPulled([None if g is None else g[first : first + len(times)] for g in grads])

    def results(self) -> Tensors:
        return tuple(torch.stack(leaf) for leaf in zip(*self.traced, strict=True)) if self.is_traced else self.y

    def pull(self, k: int, t: Time, z: Tensors, grads: Sequence[Tensor | None]) -> Pulled:
        return Pulled([None if g is None else g[k] for g in grads])

    def fresh(self) -> Outputs:
        return StoredOutputs(self.n)


def _empty_stack(n: int, z: Tensor) -> Tensor:
    """An empty tensor for n tensors like z, each in z's memory format."""
    strides = z.stride() if z.is_contiguous() else torch.empty_like(z, device="meta").stride()
    return z.new_empty_strided((n, *z.shape), (max(1, z.numel()), *strides))
