"""Linear algebra on tuples of tensors, the leaves of a state."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchmali._torch import foreach_add, foreach_add_, foreach_lerp, foreach_mul, foreach_mul_, foreach_neg_

Tensors: TypeAlias = tuple[Tensor, ...]
Leaves: TypeAlias = "tuple[Tensor, ...] | list[Tensor]"
Time: TypeAlias = "float | Tensor"  # tensors only where autograd follows the times (Naive)


def combine(z: Tensors | None, weights: Sequence[Any], ks: Sequence[Tensors]) -> Tensors:
    """z + sum of weight * k, leaf by leaf (z=None: the sum alone).

    The value is the same to the bit whether weights are numbers or tensors on the host that autograd follows. Those on
    a device are not waited for; their products may differ in the last bit.
    """
    if isinstance(weights[0], Tensor) and weights[0].device.type != "cpu":
        total = z
        for w, k in zip(weights, ks, strict=True):
            moved = tuple(scaled(x, w) for x in k)
            total = moved if total is None else tuple(x + y for x, y in zip(total, moved, strict=True))
        return total or ()
    numbers = [number(w) for w in weights]
    if z is None:
        out = foreach_mul(ks[0], numbers[0])
    else:
        out = foreach_add(z, ks[0], alpha=numbers[0])
    for w, k in zip(numbers[1:], ks[1:], strict=True):
        foreach_add_(out, k, alpha=w)
    for w, n, k in zip(weights, numbers, ks, strict=True):
        if isinstance(w, Tensor):  # (w - n) k is zero, and has the derivatives that n k lacks
            out = [x + scaled(y, w - n) for x, y in zip(out, k, strict=True)]
    return tuple(out)


def scaled(x: Tensor, e: Time) -> Tensor:
    """e x in x's own dtype (a 0-d x would be promoted by a float64 e)."""
    return (e * x).to(x.dtype)


def number(t: Time) -> float:
    """A time as a plain float, for decisions: what is decided is not differentiated."""
    return t.item() if isinstance(t, Tensor) else t


def added(x: Leaves, y: Leaves, alpha: float) -> Tensors:
    """x + alpha y. The plain call is cheaper than a foreach over one small leaf."""
    if len(x) == 1:
        return (x[0].add(y[0], alpha=alpha),)
    return tuple(foreach_add(x, y, alpha=alpha))


def lerp(x: Leaves, y: Leaves, weight: float) -> Tensors:
    """x + weight (y - x)"""
    return (torch.lerp(x[0], y[0], weight),) if len(x) == 1 else tuple(foreach_lerp(x, y, weight))


def add_(x: Leaves, y: Leaves, alpha: float) -> None:
    """x += alpha y"""
    if len(x) == 1:
        x[0].add_(y[0], alpha=alpha)
    else:
        foreach_add_(x, y, alpha=alpha)


def scale_(x: Leaves, factor: float) -> None:
    """x *= factor. A change of sign is cheaper than a product with a number."""
    if factor == -1 and len(x) == 1:
        x[0].neg_()
    elif factor == -1:
        foreach_neg_(x)
    else:
        foreach_mul_(x, factor)


@functools.cache
def eps_of(dtype: torch.dtype) -> float:
    """The distance of 1 to the next number of a dtype."""
    return torch.finfo(dtype).eps


def rows(x: Tensor) -> Tensor:
    """A leaf as a matrix with one row for each sample: all dimensions but the first, or the whole if it has one."""
    return x.flatten(1) if x.ndim > 1 else x.reshape(1, -1)


def dot(x: Leaves, y: Leaves) -> Tensor:
    """<x, y> over all leaves, as a 0-d tensor."""
    return torch.stack([(a * b).sum() for a, b in zip(x, y, strict=True)]).sum()


def first_non_finite(x: Leaves) -> int | None:
    """The first leaf with a nan or an infinity. Reads the host once when there is none."""
    sums = [leaf.sum() for leaf in x]
    if math.isfinite((sums[0] if len(sums) == 1 else torch.stack(sums).sum()).item()):
        return None
    return next((i for i, leaf in enumerate(x) if not bool(torch.isfinite(leaf).all())), None)
