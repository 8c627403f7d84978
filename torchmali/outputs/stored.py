"""Outputs that are stored: y at all times."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchmali.outputs.base import Outputs, Pulled
from torchmali.state.vectors import Tensors, Time


class StoredOutputs(Outputs):
    """y at all times, time first."""

    keeps = True

    def __init__(self, n: int):
        self.n, self.y = n, ()

    def show(self, t: Time, z: Tensors, k: int) -> Tensors:
        return z

    def gather(self, shown: Sequence[Tensors]) -> Tensors:
        return tuple(torch.stack(leaf) for leaf in zip(*shown, strict=True))

    def emit(self, t: Time, z: Tensors, k: int) -> None:
        # Written in place as they come: no list of states beside the result.
        self.y = self.y or tuple(_empty_stack(self.n, leaf) for leaf in z)
        for whole, part in zip(self.y, z, strict=True):
            whole[k] = part

    def results(self) -> Tensors:
        return self.y

    def pull(self, t: Time, z: Tensors, k: int, grads: Sequence[Tensor | None]) -> Pulled:
        return Pulled([None if g is None else g[k] for g in grads])

    def without_tensors(self) -> Outputs:
        return StoredOutputs(self.n)


def _empty_stack(n: int, z: Tensor) -> Tensor:
    """For n tensors like z, each in z's memory format."""
    strides = z.stride() if z.is_contiguous() else torch.empty_like(z, device="meta").stride()
    return z.new_empty_strided((n, *z.shape), (max(1, z.numel()), *strides))
