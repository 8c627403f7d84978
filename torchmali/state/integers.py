"""Integers that stand for floats: powers of two, shifts that can be undone, and the range of integer tensors.

A float x is held as the integer nearest to 2^k x. k is a number for a whole tensor, or a tensor of numbers.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}
BITS = {torch.int32: 27, torch.int64: 58}  # of the largest element on a new grid
LIMIT = {torch.int32: 0.99 * 2**30, torch.int64: 0.99 * 2**62}  # two numbers below it can be added
MANTISSA = {torch.float32: 24, torch.float64: 53}
FINEST = {torch.float32: 150, torch.float64: 1070}  # the largest exponent: the smallest floats keep most of their bits
_SINGLE = struct.Struct("f")


def single(x: float) -> float:
    """x rounded to float32."""
    return _SINGLE.unpack(_SINGLE.pack(x))[0]


def ldexp(x: float, k: int) -> float:
    """2^k x; infinity if that is too large."""
    try:
        return math.ldexp(x, k)
    except OverflowError:
        return math.inf


class Factor:
    """e 2^k as a factor of tensors, where k is an int or an integer tensor.

    It is applied in two halves if one would leave the range of the floats. A number is held as a 0-d tensor: a product
    with a Python number takes twice as long.
    """

    __slots__ = ("first", "second")

    def __init__(self, like: Tensor, dtype: torch.dtype, e: float, k: int | Tensor):
        if isinstance(k, Tensor):
            half = k >> 1
            self.first: Tensor = power(half, dtype).mul_(e)
            self.second: Tensor | None = power(k - half, dtype)
        elif abs(k) < 100:
            self.first, self.second = like.new_full((), e * 2.0**k, dtype=dtype), None
        else:
            self.first = like.new_full((), 2.0 ** (k // 2), dtype=dtype)
            self.second = like.new_full((), e * 2.0 ** (k - k // 2), dtype=dtype)

    def times(self, x: Tensor) -> Tensor:
        """The product, of floats or integers: floats."""
        product = x.mul(self.first)
        return product if self.second is None else product.mul_(self.second)


def power(k: Tensor, dtype: torch.dtype) -> Tensor:
    """2^k for an integer tensor."""
    # A power of two is its exponent among the bits of a float: no rounding, unlike exp2.
    if dtype == torch.float32:
        return ((k.to(torch.int32).clamp(-126, 127) + 127) << 23).view(torch.float32)
    return ((k.to(torch.int64).clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


def exponent(x: Tensor) -> Tensor:
    """The number of bits of |x| before the point, of floats or integers; of zero it is far below all others."""
    if not x.is_floating_point():
        x = x.double() if x.dtype == torch.int64 else x.float()
    return torch.where(x != 0, torch.frexp(x).exponent, -(2**14))


class Shifted(NamedTuple):
    """An integer tensor divided by 2^b and rounded."""

    x: Tensor
    lost: Tensor | None  # what fell off; None: nothing


def shift(x: Tensor, b: int | Tensor, most: int) -> Shifted:
    """x / 2^b, rounded. b may be negative, if the numbers have room to grow. most: the largest b."""
    longest = 8 * x.itemsize - 2
    if isinstance(b, int):
        if b <= 0:
            return Shifted(x << min(-b, longest), None)
        coarse = (x + 2 ** (b - 1)) >> b if b <= longest else torch.zeros_like(x)  # rounded: a bias would add up
        lost = x - (coarse << b) if b <= longest else x
        return Shifted(coarse, lost.to(torch.int8) if b <= 8 else lost)
    b = b.to(x.dtype)
    right, left = b.clamp(0, longest), (-b).clamp(0, longest)
    half = torch.where(b > 0, torch.ones_like(x) << (right - 1).clamp(min=0), 0)
    coarse = torch.where(b > longest, 0, (x + half) >> right)
    lost = torch.where(b > longest, x, x - (coarse << right))
    if most <= 0:
        return Shifted(coarse << left, None)
    return Shifted(coarse << left, lost.to(torch.int8) if most <= 8 else lost)


def unshift(x: Tensor, b: int | Tensor, lost: Tensor | None) -> Tensor:
    """`shift` undone."""
    longest = 8 * x.itemsize - 2
    if isinstance(b, int):
        if b <= 0:
            return x >> min(-b, longest)
        assert lost is not None
        return (x << b) + lost if b <= longest else lost.to(x.dtype)
    b = b.to(x.dtype)
    back = (x >> (-b).clamp(0, longest)) << b.clamp(0, longest)
    return back if lost is None else torch.where(b > longest, 0, back) + lost


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest element; nan if one is."""
    return x.aminmax() if x.numel() else (x.new_zeros(()), x.new_zeros(()))


def stacked(x: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """0-d tensors as one vector."""
    if all(part.dtype == x[0].dtype for part in x):
        return torch.stack([*x]).to(dtype)
    return torch.stack([part.to(dtype) for part in x])


def magnitudes(ends: Sequence[float], n: int) -> list[float]:
    """The largest magnitude for each of n leaves, from pairs of extremes, leaf after leaf; nan if one of them is."""
    found = []
    for i in range(0, 2 * n, 2):
        lows, highs = ends[i :: 2 * n], ends[i + 1 :: 2 * n]
        found.append(math.nan if math.isnan(sum(lows)) else max(-min(lows), *highs))
    return found


def max_or_nan(*x: float) -> float:
    """The largest number; nan if one is."""
    return math.nan if math.isnan(sum(x)) else max(x)
