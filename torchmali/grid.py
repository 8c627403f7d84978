"""The same state arithmetic on integers: what was added can be subtracted again to the last bit.

z and v live on grids of spacing 2^-k, one k for each leaf of each. Undamped, both moves add a rounded function of one
to the other, so the inverse move computes the same numbers and takes them away:

    drift    z <- z + Q(e v)          reflect  v <- Q(2 u) - v

float32 leaves are held as int32 (the memory of float32, with 3 bits more than its mantissa for the largest element),
float64 leaves as int64. Integers overflow silently: each step reports how large its numbers got (`extent`), and the
grid is moved (`rescaled`) before the range is left, or the step is void and repeated on another grid. One spacing per
leaf means that small elements of a leaf have fewer bits than large ones (`WideGrid` has bits to spare).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from torchmali.solution import NonFinite
from torchmali.state import FITS, Fit, Memento, State, Tensors

BITS = {torch.int32: 27, torch.int64: 58}  # of the largest element on a new grid; twice that is room to grow
LIMIT = {torch.int32: 0.99 * 2**30, torch.int64: 0.99 * 2**62}  # two numbers below it can be added
FINEST = {torch.float32: 150, torch.float64: 1070}  # the largest k: the smallest floats keep most of their bits
MANTISSA = {torch.float32: 24, torch.float64: 53}
BLANK = -40  # k of a leaf of zeros: so coarse that what is added first shows what it should be
MOST = 5  # bits of a float's mantissa that both z and v may lose for one step
FINER = 4  # bits that the largest element may lose before the grid is made finer


class Grid(State):
    """Moves out of place, each on fresh tensors: a fork is free."""

    __slots__ = ("kv", "kz", "reals", "seen", "v", "z")
    is_bounded: ClassVar[bool] = True
    integers: ClassVar[dict] = {torch.float32: torch.int32, torch.float64: torch.int64}

    def __init__(self, z: Tensors, v: Tensors, kz: tuple[int, ...], kv: tuple[int, ...], reals: tuple):
        self.z, self.v, self.kz, self.kv, self.reals = z, v, kz, kv, reals
        # Extremes of what was added to z, and of v, in the moves since `fork`. The way back does not look.
        self.seen: list[list[Tensor]] | None = None

    @classmethod
    def of(cls, z: Tensors) -> Grid:
        words = [cls.integers[x.dtype] for x in z]
        k = tuple(_exponent(size, x.dtype, w) for size, x, w in zip(_sizes(z), z, words, strict=True))
        return cls(_quantised(z, k, words), (), k, (), tuple(x.dtype for x in z))

    def with_slope(self, v: Tensors) -> Grid:
        words = [x.dtype for x in self.z]
        k = tuple(_exponent(size, x.dtype, w) for size, x, w in zip(_sizes(v), v, words, strict=True))
        return type(self)(self.z, _quantised(v, k, words), self.kz, k, self.reals)

    @property
    def point(self) -> Tensors:
        return _floats(self.z, self.kz, self.reals)

    @property
    def slope(self) -> Tensors:
        return _floats(self.v, self.kv, self.reals)

    def fork(self) -> Grid:
        fork = type(self)(self.z, self.v, self.kz, self.kv, self.reals)
        fork.seen = [[] for _ in (*self.z, *self.v)]
        return fork

    def drift(self, e: float) -> Grid:
        moved = []
        for i, (z, v) in enumerate(zip(self.z, self.v, strict=True)):
            q = _times_(v.to(self.reals[i]), e, self.kz[i] - self.kv[i])
            if self.seen is not None:
                self.seen[i] += _extremes(q)
            moved.append(q.round_().to(z.dtype).add_(z))
        self.z = tuple(moved)
        return self

    def reflect(self, u: Tensors, eta: float) -> Grid:
        assert eta == 1
        turned = []
        for i, (x, v) in enumerate(zip(u, self.v, strict=True)):
            q = _times(x, 1.0, self.kv[i] + 1)
            ends = _extremes(q) if self.seen is not None else ()
            w = q.round_().to(v.dtype).sub_(v)
            if self.seen is not None:
                self.seen[len(self.z) + i] += *ends, *_extremes(w)
            turned.append(w)
        self.v = tuple(turned)
        return self

    def extent(self) -> Tensor:
        assert self.seen is not None
        real, n = max(self.reals, key=lambda real: real.itemsize), len(self.z)
        met = [torch.stack([x.to(real) for x in seen]).abs() for seen in self.seen]
        # Of z the sum over the drifts: z may have been larger on the way than it is at the end.
        met = [x.reshape(-1, 2).amax(1).sum() if i < n else x.amax() for i, x in enumerate(met)]
        left = [end.to(real).abs() for tensor in (*self.z, *self.v) for end in _extremes(tensor)]
        return torch.cat([torch.stack(met), torch.stack(left).reshape(-1, 2).amax(1)])

    def fit(self, extent: list[float], dropped: Sequence[tuple[int, ...]]) -> Fit:
        n, finest = 2 * len(self.z), [FINEST[real] for real in (*self.reals, *self.reals)]
        words = [x.dtype for x in (*self.z, *self.v)]
        # What was added comes on top of what was there: each must stay below the limit.
        peaks = [max(pair) for pair in zip(extent[:n], extent[n:], strict=True)]
        bits = [
            min(8, _excess(peak, word)) if LIMIT[word] < peak < math.inf else 0
            for peak, word in zip(peaks, words, strict=True)
        ]
        # z or v alone may grow as much as it likes in one step. If both do, then each out of what fell off the other.
        total = [sum(max(b, 0) for b in column) for column in zip(*dropped, strict=True)] or [0] * n
        most = min(BITS[x.dtype] - MANTISSA[real] + MOST for x, real in zip(self.z, self.reals, strict=True))
        explodes = min(max(total[: n // 2]), max(total[n // 2 :])) > most
        if any(bits) and not explodes:  # perhaps the cause of numbers that are not finite, too
            return Fit(True, True, tuple(bits))
        if explodes or not all(map(math.isfinite, extent)):
            return Fit(False, False, ())
        # Zeros, and what was added to them was rounded away.
        bits = [
            _excess(met, word) if 0 < met < 0.5 and not left and not lost else 0
            for met, left, lost, word in zip(extent[:n], extent[n:], total, words, strict=True)
        ]
        bits = [max(b, k - finest) for b, k, finest in zip(bits, (*self.kz, *self.kv), finest, strict=True)]
        if any(bits):
            return Fit(True, True, tuple(bits))
        bits = [_excess(size, word) if size else 0 for size, word in zip(extent[n:], words, strict=True)]
        bits = [max(b, k - finest) for b, k, finest in zip(bits, (*self.kz, *self.kv), finest, strict=True)]
        bits = tuple(b if b > 1 or b < -FINER else 0 for b in bits)
        return Fit(True, False, bits) if any(bits) else FITS

    def rescaled(self, bits: tuple[int, ...]) -> tuple[Grid, Memento]:
        tensors, lost = [], []
        for x, b in zip((*self.z, *self.v), bits, strict=True):
            if b > 0:
                lost.append((x & (2**b - 1)).to(torch.uint8))
            tensors.append(x >> b if b > 0 else x << -b)
        return self._on(tensors, [-b for b in bits]), Memento(tuple(lost), None)

    def unscaled(self, bits: tuple[int, ...], lost: Memento) -> Grid:
        tensors, fallen = [], iter(lost.tensors)
        for x, b in zip((*self.z, *self.v), bits, strict=True):
            tensors.append((x << b) | next(fallen).to(x.dtype) if b > 0 else x >> -b)
        return self._on(tensors, bits)

    def _on(self, tensors: Sequence[Tensor], change: Sequence[int]) -> Grid:
        n = len(self.z)
        k = [k + more for k, more in zip((*self.kz, *self.kv), change, strict=True)]
        return type(self)(tuple(tensors[:n]), tuple(tensors[n:]), tuple(k[:n]), tuple(k[n:]), self.reals)

    def put_away(self) -> Memento:
        return Memento((*self.z, *self.v), (self.kz, self.kv, self.reals))

    def put_away_before_refresh(self) -> Memento:
        return Memento(self.v, ((), self.kv, self.reals))  # z is rebuilt to the bit

    @classmethod
    def restore(cls, kept: Memento) -> Grid:
        kz, kv, reals = kept.form
        return cls(kept.tensors[: len(kz)], kept.tensors[len(kz) :], kz, kv, reals)

    def back_to(self, kept: Memento) -> Grid:
        kz, kv, reals = kept.form
        return self.restore(kept) if kz else type(self)(self.z, kept.tensors, self.kz, kv, reals)

    def distance(self, truth: Grid, end: Grid, span: float) -> float:
        """0 where all bits agree, of z and of v, else infinite."""
        mine, other = self.put_away(), truth.put_away()
        agree = mine.form == other.form and all(map(torch.equal, mine.tensors, other.tensors))
        return 0.0 if agree else math.inf


class WideGrid(Grid):
    """int64 for float32 leaves, too: twice their memory, and bits for elements 1e-10 of the largest."""

    __slots__ = ()
    integers: ClassVar[dict] = {torch.float32: torch.int64, torch.float64: torch.int64}


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = x.aminmax() if x.numel() else (x.new_zeros(()),) * 2
    return low, high


def _times(x: Tensor, e: float, k: int) -> Tensor:
    """e 2^k x. In two factors, where one would leave the range of the floats."""
    if abs(k) < 100:
        return x * (e * 2.0**k)
    return (x * 2.0 ** (k // 2)).mul_(e * 2.0 ** (k - k // 2))


def _times_(x: Tensor, e: float, k: int) -> Tensor:
    if abs(k) < 100:
        return x.mul_(e * 2.0**k)
    return x.mul_(2.0 ** (k // 2)).mul_(e * 2.0 ** (k - k // 2))


def _sizes(x: Tensors) -> list[float]:
    """The largest magnitude in each leaf. One host read."""
    real = max((leaf.dtype for leaf in x), key=lambda real: real.itemsize)
    extremes = [end.to(real).abs() for leaf in x for end in _extremes(leaf)]
    sizes = torch.stack(extremes).reshape(-1, 2).amax(1).tolist()
    if not all(map(math.isfinite, sizes)):
        raise NonFinite(f"Non-finite values in leaf {[*map(math.isfinite, sizes)].index(False)} of y0 or of f(t, y).")
    return sizes


def _exponent(size: float, real: torch.dtype, word: torch.dtype) -> int:
    """k such that 2^(bits - 1) <= size 2^k < 2^bits."""
    return min(FINEST[real], BITS[word] - math.frexp(size)[1]) if size else BLANK


def _excess(size: float, word: torch.dtype) -> int:
    """Bits by which a number of the grid is larger than it would be on a new grid."""
    return math.frexp(size)[1] - BITS[word]


def _quantised(x: Tensors, k: Sequence[int], words: Sequence[torch.dtype]) -> Tensors:
    return tuple(_times(leaf, 1.0, e).round_().to(word) for leaf, e, word in zip(x, k, words, strict=True))


def _floats(x: Tensors, k: Sequence[int], reals: Sequence[torch.dtype]) -> Tensors:
    return tuple(_times_(leaf.to(real), 1.0, -e) for leaf, e, real in zip(x, k, reals, strict=True))
