"""The arguments of f after t and y."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchmali.copies import copied
from torchmali.tree import Structure


class Arguments:
    """The arguments of f after t and y: nested tuples, lists and dicts of tensors and of anything else.

    slots: positions among their leaves of the tensors that require a gradient; fixed_slots: of the other tensors.
    """

    def __init__(self, args: tuple):
        self.structure = Structure.of(args)
        self.leaves = tuple(map(normal, self.structure.flatten(args)))
        self.args = self.structure.rebuild(self.leaves)
        tensors = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        self.slots = [i for i in tensors if self.leaves[i].requires_grad]
        self.fixed_slots = [i for i in tensors if i not in self.slots]

    @property
    def moving(self) -> list[Tensor]:
        """The tensors that require a gradient."""
        return [self.leaves[i] for i in self.slots]

    @property
    def fixed(self) -> list[Tensor]:
        """The tensors that get no gradient."""
        return [self.leaves[i] for i in self.fixed_slots]

    def without_tensors(self) -> Arguments:
        if not (self.slots or self.fixed_slots):
            return self
        return copied(self, leaves=tuple([None if isinstance(x, Tensor) else x for x in self.leaves]), args=())

    def with_tensors(self, moving: Sequence[Tensor], fixed: Sequence[Tensor]) -> Arguments:
        if not (self.slots or self.fixed_slots):
            return self
        leaves = list(self.leaves)
        for i, x in zip((*self.slots, *self.fixed_slots), (*moving, *fixed), strict=True):
            leaves[i] = x
        return copied(self, leaves=tuple(leaves), args=self.structure.rebuild(leaves))


def normal(x: Any) -> Any:
    """Not a tensor made in inference mode: no graph could hold it, and f may need one."""
    if not isinstance(x, Tensor) or not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


NO_ARGUMENTS = Arguments(())
