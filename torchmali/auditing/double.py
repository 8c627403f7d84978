"""Evaluation of f in float64 without a copy of f, for the reference gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchmali._torch import tree_map


class InDouble(TorchFunctionMode):
    """Mode in which operations get a float64 twin in place of each float32 tensor."""

    def __init__(self):
        super().__init__()
        self.twins: dict[int, tuple[Tensor, Tensor]] = {}  # keeps float32 tensors alive: ids are reused

    def twin(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype == torch.float32:
            if id(x) not in self.twins:
                self.twins[id(x)] = x, x.detach().double()
            return self.twins[id(x)][1]
        if type(x) in (tuple, list):
            return type(x)(self.twin(part) for part in x)
        return torch.float64 if x is torch.float32 else x

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = Tensor.double if func is Tensor.float else func
        result = func(*self.twin(args), **{name: self.twin(x) for name, x in (kwargs or {}).items()})
        return result if isinstance(result, Tensor) and result.dtype == torch.float64 else tree_map(_widened, result)

    def around(self, func: Callable) -> Callable:
        def in_double(*args: Any) -> Any:
            with self:
                return func(*args)

        return in_double


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x
