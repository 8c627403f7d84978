"""Operations that compiled loops make in another way than torch's library does, in less time, with other last bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

SMALL = 0.625  # up to here tanh is a polynomial, beyond 1 - 2 / (exp(2 x) + 1), which has no digits for small x
# (tanh(x) / x - 1) / x^2, of Cephes' tanhf.
POLYNOMIAL = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
NARROW = 8  # columns


def tanh(x: Tensor) -> Any:
    """tanh(x) in float32 with an error of 2 units in the last place, in half the time."""
    if x.dtype != torch.float32:
        return NotImplemented
    size, square, total = x.abs(), x * x, torch.zeros_like(x)
    large = 1 - 2 / (torch.exp(2 * size) + 1)
    for c in POLYNOMIAL:
        total = total * square + c
    return torch.where(size < SMALL, total * square * x + x, torch.where(x < 0, -large, large))


def narrow_product(x: Tensor, y: Tensor) -> Any:
    """x y for a y of few columns in row-major order: libraries take twice as long for it as for its transpose."""
    if x.is_complex() or not (y.shape[1] <= NARROW and x.shape[0] >= 4 * y.shape[1] and y.stride(1) == 1):
        return NotImplemented
    return torch.mm(y.t(), x.t()).t()


FASTER = {torch.ops.aten.tanh.default: tanh, torch.ops.aten.mm.default: narrow_product}
