"""Integers that stand for floats: spacings, exponents of elements, shifts, and how to measure their range.

A float x is held as the integer nearest to 2^k x. Which k, and for which tensors, is decided in grid.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchmali.errors import NonFiniteError
from torchmali.state.vectors import Tensors

WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}
BITS = {torch.int32: 27, torch.int64: 58}  # of the largest element on a new grid; twice that is room to grow
FINEST = {torch.float32: 150, torch.float64: 1070}  # the largest k: the smallest floats keep most of their bits
MANTISSA = {torch.float32: 24, torch.float64: 53}
# Bits of a float's mantissa that both z and v may lose for one step: few, where there are wider integers.
MOST = {torch.float32: 3, torch.float64: 16}
LARGEST_S = {torch.float32: 126, torch.float64: 1000}  # such that 2^s and 2^-s are normal floats
EXPONENT = {torch.float32: torch.int8, torch.float64: torch.int16}  # the type of s
FURTHEST = 100  # that s of z and v may be apart
BLANK = 0  # k of a tensor of zeros, until something is added to it
FINER = 4  # bits that the largest element may lose before the grid is made finer
# A leaf mixes scales where all elements of a slice lack so many bits of a float's mantissa,
LACKING = 3
# or where so many of its elements lack so many: single ones are often small by chance.
SHARE, LACKING_ELEMENTS = 1 / 64, 6
_SINGLE = struct.Struct("f")


class Exponents(NamedTuple):
    """s of each element of a leaf."""

    z: Tensor
    v: Tensor

    @property
    def apart(self) -> Tensor:
        return self.z.to(torch.int16) - self.v


class Factor:
    """e 2^k as a 0-d tensor: a product with a number takes twice as long. Two, where one would leave the floats."""

    __slots__ = ("rest", "value")

    def __init__(self, like: Tensor, real: torch.dtype, e: float, k: int):
        is_one = abs(k) < 100
        self.value = like.new_full((), e * 2.0**k if is_one else 2.0 ** (k // 2), dtype=real)
        self.rest = None if is_one else like.new_full((), e * 2.0 ** (k - k // 2), dtype=real)

    def times(self, x: Tensor) -> Tensor:
        product = x.mul(self.value)
        return product if self.rest is None else product.mul_(self.rest)

    def times_(self, x: Tensor) -> Tensor:
        product = x.mul_(self.value)
        return product if self.rest is None else product.mul_(self.rest)


class Factors:
    """What the moves of a Grid multiply by, for each leaf."""

    def __init__(self, z: Tensors, kz: Sequence[int], kv: Sequence[int], reals: Sequence[torch.dtype]):
        self.k_of_drift = [a - b for a, b in zip(kz, kv, strict=False)]
        self.point = [Factor(x, real, 1.0, -k) for x, real, k in zip(z, reals, kz, strict=True)]
        self.slope = [Factor(x, real, 1.0, -k) for x, real, k in zip(z, reals, kv, strict=False)]
        self.reflect = [Factor(x, real, 1.0, k + 1) for x, real, k in zip(z, reals, kv, strict=False)]
        self.drifts: dict[int, tuple[float, Factor]] = {}  # the last ones

    def of_drift(self, i: int, time: float) -> Factor:
        known, factor = self.drifts.get(i, (-1.0, None))
        if factor is None or known != time:
            like = self.point[i].value
            factor = Factor(like, like.dtype, time, self.k_of_drift[i])
            self.drifts[i] = time, factor
        return factor


def exponents_for(sizes: Tensor, others: Tensor) -> Tensor:
    """s that makes all elements alike. The middle of the scales has s = 0. others: what zeros will become, or more."""
    sizes = torch.where(sizes > 0, sizes, torch.minimum(others, sizes.amax()))
    e = torch.frexp(sizes).exponent
    largest = torch.where(sizes > 0, e, e.amin()).amax()
    e = torch.where(sizes > 0, e, largest)  # what is zero throughout is left alone
    middle = (largest + e.amin()) // 2
    return (middle - e).clamp(-LARGEST_S[sizes.dtype], LARGEST_S[sizes.dtype]).to(EXPONENT[sizes.dtype])


def shift_right(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """x 2^-b, rounded, and what fell off. b is limited by the word where it is positive; zeros may go left further."""
    b = b.to(x.dtype)
    right, left = b.clamp(min=0), (-b).clamp(0, 8 * x.itemsize - 2)
    half = torch.where(b > 0, torch.ones_like(x) << (right - 1).clamp(min=0), 0)
    coarse = (x + half) >> right
    return coarse << left, x - (coarse << right)


def shift_left(x: Tensor, b: Tensor, lost: Tensor) -> Tensor:
    """`shift_right` undone."""
    b = b.to(x.dtype)
    return ((x >> (-b).clamp(0, 8 * x.itemsize - 2)) << b.clamp(min=0)) + lost


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = x.aminmax() if x.numel() else (x.new_zeros(()),) * 2
    return low, high


def stack_of(x: Sequence[Tensor], real: torch.dtype) -> Tensor:
    if all(part.dtype == x[0].dtype for part in x):
        return torch.stack([*x]).to(real)
    return torch.stack([part.to(real) for part in x])


def magnitudes(ends: list[float], n: int) -> list[float]:
    """The largest magnitude for each of n leaves, from pairs of extremes, leaf after leaf; nan if one of them is."""
    found = []
    for i in range(0, 2 * n, 2):
        lows, highs = ends[i :: 2 * n], ends[i + 1 :: 2 * n]
        found.append(math.nan if math.isnan(sum(lows)) else max(-min(lows), *highs))
    return found


def max_or_nan(*x: float) -> float:
    """nan if one of them is."""
    return math.nan if math.isnan(sum(x)) else max(x)


def slice_sizes(x: Tensor, d: int) -> Tensor:
    """The largest element of each slice along dimension d."""
    others = [i for i in range(x.ndim) if i != d]
    return x.amax(others) if others else x


def single(x: float) -> float:
    return _SINGLE.unpack(_SINGLE.pack(x))[0]


def ldexp(x: float, k: int) -> float:
    try:
        return math.ldexp(x, k)
    except OverflowError:
        return math.inf


def times(x: Tensor, e: float, k: int) -> Tensor:
    """e 2^k x. In two factors, where one would leave the range of the floats."""
    if abs(k) < 100:
        return x * (e * 2.0**k)
    return (x * 2.0 ** (k // 2)).mul_(e * 2.0 ** (k - k // 2))


def times_(x: Tensor, e: float, k: int) -> Tensor:
    if abs(k) < 100:
        return x.mul_(e * 2.0**k)
    return x.mul_(2.0 ** (k // 2)).mul_(e * 2.0 ** (k - k // 2))


def times_power(x: Tensor, s: Tensor) -> Tensor:
    """2^s x."""
    # A power of two is its exponent among the bits of a float: no rounding, unlike exp2.
    if x.dtype == torch.float32:
        return x * ((s.to(torch.int32) + 127) << 23).view(torch.float32)
    return x * ((s.to(torch.int64) + 1023) << 52).view(torch.float64)


def spacings(x: Sequence[Tensor], words: Sequence[torch.dtype]) -> tuple[tuple[int, ...], list[float]]:
    """k of each leaf, such that 2^(bits - 1) <= 2^k max |x| < 2^bits, and 2^k max |x|. One host read."""
    real = max((leaf.dtype for leaf in x), key=lambda real: real.itemsize)
    sizes = magnitudes(stack_of([end for leaf in x for end in extremes(leaf)], real).tolist(), len(x))
    if not all(map(math.isfinite, sizes)):
        raise NonFiniteError(
            f"Non-finite values in leaf {[*map(math.isfinite, sizes)].index(False)} of y0 or of f(t, y)."
        )
    k = tuple(
        min(FINEST[leaf.dtype], BITS[word] - math.frexp(size)[1]) if size else BLANK
        for leaf, word, size in zip(x, words, sizes, strict=True)
    )
    return k, list(map(ldexp, sizes, k))


def excess_of(size: float, word: torch.dtype) -> int:
    """Bits by which a number of the grid is larger than it would be on a new grid."""
    return math.frexp(size)[1] - BITS[word]


def quantised(x: Sequence[Tensor], k: Sequence[int], words: Sequence[torch.dtype]) -> Tensors:
    return tuple(times(leaf, 1.0, e).round_().to(word) for leaf, e, word in zip(x, k, words, strict=True))
