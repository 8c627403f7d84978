"""The state arithmetic on integers: what was added can be subtracted again to the last bit.

z and v live on grids of spacing 2^-k, one k for each leaf of each. Undamped, both moves add a rounded function of one
to the other, so the inverse move computes the same numbers and takes them away:

    drift    z <- z + Q(e v)          reflect  v <- Q(2 u) - v

float32 leaves are held as int32 (the memory of float32, with 3 bits more than its mantissa for the largest element),
float64 leaves as int64.

Integers overflow silently. Each reflect measures how large its numbers got, and `Range` reads the measurements of many
steps together. Where they did not fit, all of these steps are taken back and taken again one by one. A single step that
does not fit is made once in floats (`Peaks`), which shows how large each element gets, and repeated on a grid for that.

One spacing per leaf would leave the small elements of a leaf with fewer bits than floats have. A leaf that mixes scales
has exponents s for each element beside k, one for z and one for v, and spacing 2^-(k + s).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchmali.state.base import Deviation, RewindableState, Snapshot, State
from torchmali.state.floats import Floats
from torchmali.state.integers import (
    BITS,
    EXPONENT,
    FINER,
    FINEST,
    FURTHEST,
    LACKING,
    LACKING_ELEMENTS,
    LARGEST_S,
    MANTISSA,
    MOST,
    SHARE,
    WORDS,
    Exponents,
    Factor,
    Factors,
    excess_of,
    exponents_for,
    extremes,
    ldexp,
    magnitudes,
    max_or_nan,
    quantised,
    shift_left,
    shift_right,
    single,
    slice_sizes,
    spacings,
    stack_of,
    times_,
    times_power,
)
from torchmali.state.vectors import Tensors

LIMIT = {torch.int32: 0.99 * 2**30, torch.int64: 0.99 * 2**62}  # two numbers below it can be added
PERIOD = 8  # steps between two readings of the range, reflects between two looks at the mixture of scales


class FixedPoint(RewindableState):
    """Moves out of place, each on fresh tensors: a fork is free. z keeps the memory layout of y0."""

    __slots__ = (
        "_factors",
        "_steps_of_z",
        "finer",
        "given",
        "kv",
        "kz",
        "reals",
        "seen",
        "span",
        "v",
        "v_sizes",
        "z",
        "z_sizes",
    )

    def __init__(
        self,
        z: Tensors,
        v: Tensors,
        kz: tuple[int, ...],
        kv: tuple[int, ...],
        reals: tuple,
        span: float,
        finer: Mapping[int, Exponents],
    ):
        self.z, self.v, self.kz, self.kv, self.reals = z, v, kz, kv, reals
        self.span = span  # of the solve: how long v moves z
        self.finer = finer  # s of the leaves that mix scales
        self.seen: Seen | None = None  # of the moves since `fork`. The backward pass does not look.
        # By how much v moved each leaf of z in a time: a step ends with the move with which the next one begins.
        self._steps_of_z: list[tuple[float, Tensor]] | None = None
        self._factors: Factors | None = None
        self.z_sizes: Sequence[float] = ()  # the largest z of each leaf, where it was just made
        self.v_sizes: Sequence[float] = ()  # and the largest v
        self.given: Tensors = ()  # the z and v that a first state was made of

    @classmethod
    def of(
        cls, z: Tensors, wide: bool = False, span: float = 1.0, finer: Mapping[int, Exponents] | None = None
    ) -> FixedPoint:
        """wide: int64 for float32 leaves, too. finer: s for leaves that mix scales."""
        finer = finer or {}
        words = [torch.int64 if wide else WORDS[x.dtype] for x in z]
        fine = [times_power(x, finer[i].z) if i in finer else x for i, x in enumerate(z)]
        (k, sizes), reals = spacings(fine, words), tuple(x.dtype for x in z)
        grid = cls(quantised(fine, k, words), (), k, (), reals, span, finer)
        grid.z_sizes, grid.given = sizes, z
        return grid

    def started_at(self, z: Tensors) -> FixedPoint:
        return FixedPoint.of(z, self._is_wide, self.span, self.finer)

    @property
    def _is_wide(self) -> bool:
        return any(x.dtype != WORDS[real] for x, real in zip(self.z, self.reals, strict=True))

    def with_slope(self, v: Tensors) -> FixedPoint:
        words = [x.dtype for x in self.z]
        fine = [times_power(x, self.finer[i].v) if i in self.finer else x for i, x in enumerate(v)]
        k, sizes = spacings(fine, words)
        grid = FixedPoint(self.z, quantised(fine, k, words), self.kz, k, self.reals, self.span, self.finer)
        grid.z_sizes, grid.v_sizes, grid.given = self.z_sizes, sizes, (*self.given, *v)
        return grid

    @property
    def point(self) -> Tensors:
        x = self._floats(self.z, self.factors.point)
        for i, s in self.finer.items():
            x[i] = times_power(x[i], -s.z)
        return tuple(x)

    @property
    def slope(self) -> Tensors:
        x = self._floats(self.v, self.factors.slope)
        for i, s in self.finer.items():
            x[i] = times_power(x[i], -s.v)
        return tuple(x)

    @property
    def factors(self) -> Factors:
        self._factors = self._factors or Factors(self.z, self.kz, self.kv, self.reals)
        return self._factors

    def _floats(self, x: Tensors, factors: Sequence[Factor]) -> list[Tensor]:
        return [factor.times_(leaf.type(real)) for leaf, factor, real in zip(x, factors, self.reals, strict=True)]

    def fork(self) -> FixedPoint:
        fork = FixedPoint(self.z, self.v, self.kz, self.kv, self.reals, self.span, self.finer)
        fork.seen, fork._steps_of_z, fork._factors = Seen(), self._steps_of_z, self._factors
        return fork

    def drift(self, e: float) -> FixedPoint:
        moved, steps = [], self._steps_of_z or [(-1.0, z) for z in self.z]
        for i, (z, v, real) in enumerate(zip(self.z, self.v, self.reals, strict=True)):
            time = abs(e) if real is torch.float64 else single(abs(e))
            known, step = steps[i]
            if known != time:
                move = self.factors.of_drift(i, time).times_(v.type(real))
                if i in self.finer:
                    move = times_power(move, self.finer[i].apart)
                step = move.round_().type(z.dtype)
                steps[i] = time, step
            moved.append(z.add(step) if e >= 0 else z.sub(step))  # z first: the sum takes its layout
        self.z, self._steps_of_z = tuple(moved), steps
        if self.seen is not None:
            self.seen.time += abs(e)
        return self

    def reflect(self, u: Tensors, eta: float) -> FixedPoint:
        assert eta == 1
        turned, seen = [], self.seen
        for i, (x, v, factor) in enumerate(zip(u, self.v, self.factors.reflect, strict=True)):
            q = factor.times(x)
            if i in self.finer:
                q = times_power(q, self.finer[i].v)
            if seen is not None:
                seen.u += extremes(q)
            turned.append(q.round_().type(v.dtype).sub_(v))
            if seen is not None:
                seen.v += extremes(turned[-1])
        self.v, self._steps_of_z = tuple(turned), None
        if seen is not None:
            seen.last_u = u
        return self

    def begins_again(self) -> FixedPointArithmetic | None:
        """How to begin anew, where leaves mix scales and have no exponents for their elements yet. One host read."""
        n, leaves = len(self.z), [i for i in self.can_mix if i not in self.finer]
        # Of the floats: what is too small for the grid is zero on it.
        given = {i: (self.given[i].abs(), self.given[n + i].abs()) for i in leaves}
        sizes = {i: torch.maximum(z, v * self.span) for i, (z, v) in given.items()}
        self.given = ()
        if not leaves:
            return None
        real = max(self.reals, key=lambda real: real.itemsize)
        signs = torch.cat([self.signs_of_mixture(i, sizes[i]).to(real) for i in leaves]).tolist()
        mixed = self.mixed(leaves, signs)
        if not mixed:
            return None
        finer = dict(self.finer)
        for i in mixed:
            z, v = given[i]
            s_of_z, s_of_v = exponents_for(z, v * self.span), exponents_for(v, z / self.span)
            finer[i] = Exponents(s_of_z, s_of_v)
        return FixedPointArithmetic(self._is_wide, self.span, finer)

    def rescaled(self, change: Change) -> tuple[FixedPoint, Snapshot]:
        if isinstance(change, Spread):
            z, v = [x.abs() for x in self.point], [x.abs() for x in self.slope]
            if self.seen is not None and self.seen.last_u:
                v = [torch.maximum(x, u.abs()) for x, u in zip(v, self.seen.last_u, strict=True)]
            time = PERIOD * self.seen.time if self.seen is not None else self.span
            shifts = {i: self._shift(i, z[i], v[i], time, 0) for i in change.leaves}
            # What falls off is kept in a byte. Where that does not do, the next step will not fit, and see to it.
            return self._shifted({i: (bz.clamp(max=8), bv.clamp(max=8)) for i, (bz, bv) in shifts.items()})
        if isinstance(change, Widening):
            words = [torch.int64 if i in change.leaves else x.dtype for i, x in enumerate(self.z)]
            wide = [x.to(word) << b for x, word, b in zip((*self.z, *self.v), words * 2, change.bits, strict=True)]
            return self._on(wide, change.bits), Snapshot((), None)
        tensors, lost, coarse = [], [], None
        for x, b in zip((*self.z, *self.v), change, strict=True):
            if b > 0:  # rounded, not cut off: a bias would add up
                coarse = (x + 2 ** (b - 1)) >> b if b < 8 * x.itemsize - 1 else torch.zeros_like(x)
                fallen = x - (coarse << b)
                lost.append(fallen.to(torch.int8) if b <= 8 else fallen)
            tensors.append(coarse if b > 0 else x << -b)
        return self._on(tensors, [-b for b in change]), Snapshot(tuple(lost), None)

    def unscaled(self, change: Change, lost: Snapshot) -> FixedPoint:
        if isinstance(change, Spread):
            return self._unshifted(change, lost.tensors)
        if isinstance(change, Widening):
            words = [torch.int32 if i in change.leaves else x.dtype for i, x in enumerate(self.z)]
            narrow = [(x >> b).to(word) for x, word, b in zip((*self.z, *self.v), words * 2, change.bits, strict=True)]
            return self._on(narrow, [-b for b in change.bits])
        tensors, fallen = [], iter(lost.tensors)
        for x, b in zip((*self.z, *self.v), change, strict=True):
            tensors.append((x << b) + next(fallen) if b > 0 else x >> -b)
        return self._on(tensors, change)

    def _on(self, tensors: Sequence[Tensor], change: Sequence[int]) -> FixedPoint:
        n = len(self.z)
        k = [k + more for k, more in zip((*self.kz, *self.kv), change, strict=True)]
        kz, kv = tuple(k[:n]), tuple(k[n:])
        return FixedPoint(tuple(tensors[:n]), tuple(tensors[n:]), kz, kv, self.reals, self.span, self.finer)

    def regridded(self, peaks: Peaks, overflow: Overflow, margin: int) -> Regridded | None:
        """On a grid on which numbers as large as `peaks` fit, with `margin` bits to spare; None: there is none."""
        n, leaves = len(self.z), [i for i, z in enumerate(self.z) if z.numel()]
        real = max(self.reals, key=lambda real: real.itemsize)
        peak_sizes = peaks.sizes
        most = [x.amax().to(real) for i in leaves for x in peak_sizes[i]]
        found = torch.stack(most).tolist() if most else []
        if not all(map(math.isfinite, found)):
            return None
        sizes, bits, wide, by_element = iter(found), [0] * (2 * n), [], []
        for i in leaves:
            spare = self._spare(i)
            are_blank = [j in overflow.blank for j in (i, n + i)]
            needs = [
                self._need(next(sizes), k[i], i, margin, is_blank)
                for k, is_blank in zip((self.kz, self.kv), are_blank, strict=True)
            ]
            lost = [need for need, is_blank in zip(needs, are_blank, strict=True) if not is_blank]
            hurts = self.z[i].numel() > 1 and max(lost, default=0) > spare  # the elements that stay small
            if i in self.finer or i in overflow.mixed or hurts:
                by_element.append(i)
            else:
                bits[i], bits[n + i] = needs
                wide += [i] if len(lost) == 2 and min(lost) > spare + MOST[self.reals[i]] else []
        shifts = {i: self._shift(i, peak_sizes[i][0], peak_sizes[i][1], peaks.time, margin) for i in by_element}
        exploding, far = self._exploding(shifts)
        wide += exploding
        if wide:
            return self._widened(wide, peaks, overflow, margin)
        grid, undo = self, []
        if any(bits):
            grid, lost = grid.rescaled(tuple(bits))
            undo.append((tuple(bits), lost))
        if shifts:
            change = Spread(tuple(shifts), tuple(i for i in shifts if i not in self.finer))
            grid, lost = grid._shifted(shifts, far)
            undo.append((change, lost))
        return Regridded(grid, undo)

    def _widened(self, leaves: Sequence[int], peaks: Peaks, overflow: Overflow, margin: int) -> Regridded | None:
        """`fitted`, with int64 for these leaves."""
        if any(self.z[i].dtype is torch.int64 for i in leaves):
            return None
        n, more = len(self.z), BITS[torch.int64] - BITS[torch.int32]
        room = [max(0, min(more, FINEST[self.reals[j % n]] - k)) for j, k in enumerate((*self.kz, *self.kv))]
        change = Widening(tuple(leaves), tuple(b if j % n in leaves else 0 for j, b in enumerate(room)))
        grid, lost = self.rescaled(change)
        regridded = grid.regridded(peaks, overflow, margin)
        return None if regridded is None else Regridded(regridded.grid, [(change, lost), *regridded.undo])

    def _spare(self, i: int) -> int:
        """Bits of the largest element beyond a float's mantissa."""
        return BITS[self.z[i].dtype] - MANTISSA[self.reals[i]]

    def _need(self, size: float, k: int, i: int, margin: int, is_blank: bool) -> int:
        """By how many bits a tensor of leaf i has to be coarser (finer: negative) for numbers of this size."""
        if not size:
            return 0
        excess = math.frexp(size)[1] + k - BITS[self.z[i].dtype]
        need = excess if is_blank else max(0, excess - 1 + margin)
        return max(need, k - FINEST[self.reals[i]])

    def _shift(self, i: int, z: Tensor, v: Tensor, time: float, margin: int) -> tuple[Tensor, Tensor]:
        """By how many bits each element of leaf i has to be coarser (finer: negative) for numbers as large as z and v.

        Exponents that are there become finer by the larger of z and of what v does to it: a number that passes through
        zero is not small. time: for which v may move z before the range is read.
        """
        word, zero = self.z[i].dtype, torch.zeros_like(self.z[i], dtype=torch.int32)
        now, both = [zero, zero], ((z, z), (v, v))
        if i in self.finer:
            now = [s.to(torch.int32) for s in self.finer[i]]
            both = (z, torch.maximum(z, v * self.span)), (v, torch.maximum(v, z / self.span))
        moved = []
        for s, k, (size, joint) in zip(now, (self.kz[i], self.kv[i]), both, strict=True):
            excess, small = (torch.frexp(x).exponent + (k - BITS[word]) + s for x in (size, joint))
            need = torch.where(joint > 0, small.clamp(max=0), 0)
            need = torch.where((size > 0) & (excess > 1 - margin), excess - 1 + margin, need)
            moved.append((s - need).clamp(-LARGEST_S[self.reals[i]], LARGEST_S[self.reals[i]]))
        to_z, to_v = moved
        apart = 1 - math.frexp(time)[1] - self.kz[i] + self.kv[i]  # else the largest v may move the smallest z too far
        to_z = torch.minimum(to_z, to_v + min(apart, FURTHEST))
        to_v = torch.minimum(to_v, to_z + FURTHEST)
        longest = 31 if word is torch.int32 else 62
        return (now[0] - to_z).clamp(max=longest), (now[1] - to_v).clamp(max=longest)

    def _exploding(self, shifts: Mapping[int, tuple[Tensor, Tensor]]) -> tuple[list[int], list[int]]:
        """Leaves with elements of which both z and v would lose too much, and those that lose more than a byte."""
        if not shifts:
            return [], []
        both = [torch.minimum(*pair).amax() for pair in shifts.values()]
        one = [torch.maximum(*pair).amax() for pair in shifts.values()]
        found = torch.stack([*both, *one]).tolist()  # the one host read
        exploding = [i for i, b in zip(shifts, found, strict=False) if b > self._spare(i) + MOST[self.reals[i]]]
        return exploding, [i for i, b in zip(shifts, found[len(shifts) :], strict=True) if b > 8]

    def _shifted(
        self, shifts: Mapping[int, tuple[Tensor, Tensor]], far: Collection[int] = ()
    ) -> tuple[FixedPoint, Snapshot]:
        """far: leaves that lose more than 8 bits."""
        z, v, finer, kept = list(self.z), list(self.v), dict(self.finer), []
        for i, (bz, bv) in shifts.items():
            z[i], lost_z = shift_right(z[i], bz)
            v[i], lost_v = shift_right(v[i], bv)
            s = self.finer[i] if i in self.finer else Exponents(torch.zeros_like(bz), torch.zeros_like(bv))
            small, word = EXPONENT[self.reals[i]], z[i].dtype if i in far else torch.int8
            finer[i] = Exponents((s.z - bz).to(small), (s.v - bv).to(small))
            kept += [bz.to(torch.int16), bv.to(torch.int16), lost_z.to(word), lost_v.to(word)]
        return FixedPoint(tuple(z), tuple(v), self.kz, self.kv, self.reals, self.span, finer), Snapshot(
            tuple(kept), None
        )

    def _unshifted(self, change: Spread, kept: Tensors) -> FixedPoint:
        z, v, finer = list(self.z), list(self.v), dict(self.finer)
        for j, i in enumerate(change.leaves):
            bz, bv, lost_z, lost_v = kept[4 * j : 4 * j + 4]
            z[i], v[i] = shift_left(z[i], bz, lost_z), shift_left(v[i], bv, lost_v)
            small = EXPONENT[self.reals[i]]
            finer[i] = Exponents((finer[i].z + bz).to(small), (finer[i].v + bv).to(small))
            if i in change.fresh:
                del finer[i]
        return FixedPoint(tuple(z), tuple(v), self.kz, self.kv, self.reals, self.span, finer)

    @property
    def can_mix(self) -> list[int]:
        return [i for i, z in enumerate(self.z) if z.numel() > 1]

    def sizes(self, i: int) -> Tensor:
        """|z|, or by how much f moves it over the span, whichever is larger: of each element, in units of z's grid.

        By the last u, which is not rounded: an element may be zero on the grid, and move.
        """
        assert self.seen is not None
        move = times_(self.seen.last_u[i].abs(), self.span, self.kz[i])
        if i in self.finer:
            move = times_power(move, self.finer[i].z)
        return torch.maximum(self.z[i].type(self.reals[i]).abs_(), move)

    def signs_of_mixture(self, i: int, sizes: Tensor) -> Tensor:
        """For `mixed`: the largest element of leaf i, that of its smallest slice, how many elements lack bits.

        Where elements have exponents, every element is a slice.
        """
        if i in self.finer:
            slices = [sizes.flatten()]
        else:
            slices = [slice_sizes(sizes, d) for d, n in enumerate(sizes.shape) if n > 1]
        largest = slices[0].amax()
        smallest = torch.cat(slices) if len(slices) > 1 else slices[0]
        smallest = torch.where(smallest > 0, smallest, largest).amin()
        are_small = (sizes < 2.0 ** -(self._spare(i) + LACKING_ELEMENTS) * largest).logical_and_(sizes > 0)
        return torch.stack([largest, smallest, are_small.sum().to(sizes.dtype)])

    def mixed(self, leaves: Sequence[int], signs: Sequence[float]) -> list[int]:
        """Those of the leaves that mix scales; where elements have exponents, those with elements that lack bits."""
        found = []
        for i, largest, smallest, n_small in zip(leaves, signs[::3], signs[1::3], signs[2::3], strict=True):
            if i in self.finer:
                is_mixed = smallest < 2.0 ** MANTISSA[self.reals[i]]
            else:
                lacks = smallest < 2.0 ** -(self._spare(i) + LACKING) * largest
                is_mixed = lacks or n_small > SHARE * self.z[i].numel()
            found += [i] if is_mixed else []
        return found

    def snapshot(self) -> Snapshot:
        return Snapshot((*self.z, *self.v, *[x for s in self.finer.values() for x in s]), self._form(self.kz))

    def snapshot_before_refresh(self) -> Snapshot:
        return Snapshot(self.v, self._form(()))  # z is rebuilt to the bit

    def _form(self, kz: tuple[int, ...]) -> FixedPointForm:
        return FixedPointForm(kz, self.kv, self.reals, self.span, tuple(self.finer))

    @classmethod
    def restore(cls, kept: Snapshot) -> FixedPoint:
        kz, kv, reals, span, spread = kept.form
        n = len(kz)
        s = kept.tensors[2 * n :]
        finer = {i: Exponents(*pair) for i, *pair in zip(spread, s[::2], s[1::2], strict=True)}
        return cls(kept.tensors[:n], kept.tensors[n : 2 * n], kz, kv, reals, span, finer)

    def rebuilt_with(self, kept: Snapshot) -> FixedPoint:
        if kept.form.kz:
            return self.restore(kept)
        return FixedPoint(self.z, kept.tensors, self.kz, kept.form.kv, self.reals, self.span, self.finer)

    def deviation(
        self, truth: FixedPoint, end: FixedPoint, span: float, limits: tuple[float, float] = (0.0, 0.0)
    ) -> Deviation:
        """0 where all bits agree, of z and of v, else infinite."""
        mine, other = self.snapshot(), truth.snapshot()
        agree = mine.form == other.form
        if agree:
            differ = [(x != y).any() for x, y in zip(mine.tensors, other.tensors, strict=True)]
            agree = not bool(torch.stack(differ).any())  # the one host read
        return Deviation(*[0.0 if agree else math.inf] * 4)


class FixedPointForm(NamedTuple):
    """What a Grid is beside its tensors."""

    kz: tuple[int, ...]  # empty where z was not put away
    kv: tuple[int, ...]
    reals: tuple
    span: float
    spread: tuple[int, ...]  # leaves that have an s


@dataclass(frozen=True, eq=False)
class FixedPointArithmetic:
    """How a solve on integers begins."""

    wide: bool
    span: float
    finer: Mapping[int, Exponents] = field(default_factory=dict)

    def of(self, z: Tensors) -> FixedPoint:
        return FixedPoint.of(z, self.wide, self.span, self.finer)


class Spread(NamedTuple):
    """Exponents of elements, made or changed."""

    leaves: tuple[int, ...]
    fresh: tuple[int, ...]  # those that had one spacing before


class Widening(NamedTuple):
    """int64 in place of int32 for some leaves, which leaves room to grow within one step."""

    leaves: tuple[int, ...]
    bits: tuple[int, ...]  # by which each tensor of z and v is made finer


# Bits by which each tensor of z and v is made coarser, or something else.
Change: TypeAlias = "tuple[int, ...] | Spread | Widening"


class Overflow(NamedTuple):
    """What a grid did not suit, beside numbers that are too large."""

    mixed: Collection[int] = ()  # leaves that mix scales
    blank: Collection[int] = ()  # tensors of z and v that are zero when a step begins


class Regridded(NamedTuple):
    """A grid on which a step fits."""

    grid: FixedPoint
    undo: list[tuple[Change, Snapshot]]  # what was changed, in order, and what fell off


class RangeVerdict(NamedTuple):
    """How the numbers of the latest steps fit the range of the integers."""

    overflow: Overflow | None = None  # why they do not: then none of them can be trusted
    changes: Sequence[Change] = ()  # of the grid, for `rescaled`, before the next step


IN_RANGE = RangeVerdict()


class Peaks(Floats):
    """Floats that remember how large each element became: z, and v or 2 u. For one step."""

    __slots__ = ("time", "v", "z")

    def __init__(self, point: Tensors, slope: Tensors):
        super().__init__(point, slope)
        self.time = 0.0  # for which v moved z
        self.z, self.v = [x.abs() for x in point], [x.abs() for x in slope]

    def fork(self) -> Peaks:
        return self

    def drift(self, e: float) -> Peaks:
        super().drift(e)
        self.time += abs(e)
        self.z = [torch.maximum(x, y.abs()) for x, y in zip(self.z, self.point, strict=True)]
        return self

    @property
    def sizes(self) -> list[tuple[Tensor, Tensor]]:
        """Of z and v, for each leaf. A quarter of all that may have been added to z has to fit, too (Range)."""
        return [(torch.maximum(z, self.time / 4 * v), v) for z, v in zip(self.z, self.v, strict=True)]

    def reflect(self, u: Tensors, eta: float) -> Peaks:
        self.v = [torch.maximum(x, 2 * y.abs()) for x, y in zip(self.v, u, strict=True)]
        super().reflect(u, eta)
        self.v = [torch.maximum(x, y.abs()) for x, y in zip(self.v, self.slope, strict=True)]
        return self


class Seen:
    """What moves did to the range of the numbers: how long v moved z, and the extremes that reflects measured."""

    def __init__(self):
        self.time = 0.0
        self.u: list[Tensor] = []  # low and high of 2 u, reflect after reflect, leaf after leaf
        self.v: list[Tensor] = []  # low and high of the new v
        self.last_u: Tensors = ()


class Range:
    """The range of the integers in one solve: are the steps since the last reading what they seem to be?

    No number has wrapped round as long as v, 2 u and all that was added to z have stayed below the limit, where z began
    below it. What was added is at most the largest v times the time for which it moved z.
    """

    def __init__(self, state: FixedPoint):
        self.sizes = [*state.z_sizes, *state.v_sizes]  # at the last reading
        self.furthest = [0.0] * len(state.z)  # by how many bits z's elements are finer than v's, at most, beside k
        if state.finer:
            self.measure(state)
        self.steps: list[Seen] = []  # since the last reading
        self.n_singly = 0  # steps to come that are read one by one
        self.n_reflects = PERIOD  # since the last look at the mixture of scales: the first reading is one
        self.is_regridded = False  # the grid was made for the step to come

    def measure(self, state: FixedPoint) -> None:
        """Read how large z and v are on a grid that has changed."""
        real, n = max(state.reals, key=lambda real: real.itemsize), len(state.z)
        ends = [end for x in (*state.z, *state.v) for end in extremes(x)]
        apart = [s.apart.amax().to(real) for s in state.finer.values()]
        values = torch.cat([stack_of(ends, real), *[x.reshape(1) for x in apart]]).tolist()
        self.sizes, furthest = magnitudes(values[: 4 * n], 2 * n), dict(zip(state.finer, values[4 * n :], strict=True))
        self.furthest = [furthest.get(i, 0.0) for i in range(n)]

    def refresh(self, state: FixedPoint) -> None:
        """v is on a new grid."""
        self.sizes = [*self.sizes[: len(state.z)], *state.v_sizes]

    def mark(self) -> tuple[list[float], list[float]]:
        """The last reading, for `restore`."""
        return self.sizes, self.furthest

    def restore(self, mark: tuple[list[float], list[float]]) -> None:
        """Forget the steps since the last reading."""
        self.sizes, self.furthest = mark
        self.steps, self.is_regridded = [], False

    @property
    def n_steps(self) -> int:
        """Since the last reading."""
        return len(self.steps)

    @property
    def is_due(self) -> bool:
        return len(self.steps) >= PERIOD or self.n_singly > 0

    def add(self, state: FixedPoint) -> None:
        """A step that was taken, of which nothing is known yet."""
        assert state.seen is not None
        if self.steps:
            self.steps[-1].last_u = ()
        self.steps.append(state.seen)
        self.n_reflects += len(state.seen.u) // (2 * len(state.z))

    @property
    def _looks_at_mixture(self) -> bool:
        return self.n_reflects >= PERIOD or self.n_singly > 0

    def signs(self, state: FixedPoint) -> Tensor:
        """What has to be read to judge the steps that were added, the last of which led to `state`."""
        real = max(state.reals, key=lambda real: real.itemsize)
        u = [end for step in self.steps for end in step.u]
        v = [end for step in self.steps for end in step.v]
        parts = [stack_of(u, real), stack_of([*v, *[end for z in state.z for end in extremes(z)]], real)]
        if self._looks_at_mixture:
            parts += _signs_of_mixture(state, real)
        return torch.cat(parts)

    def judge(self, state: FixedPoint, values: list[float]) -> RangeVerdict:
        met, left = self._met(state, values)
        n, words = len(state.z), [x.dtype for x in (*state.z, *state.v)]
        if not all(peak <= LIMIT[word] for peak, word in zip(map(max_or_nan, met, left), words, strict=True)):
            return RangeVerdict(Overflow())  # nan, too: perhaps of numbers that wrapped round
        began = zip(self.sizes, met, strict=True)
        was_blank = not self.is_regridded and any(not size and added > 0 for size, added in began)
        signs = values[len(values) - 3 * len(state.can_mix) :]
        mixed = state.mixed(state.can_mix, signs) if self._looks_at_mixture else []
        bits = self._bits(state, left, words)
        coarser = [j % n for j, b in enumerate(bits) if b > 0]
        if any(i in state.can_mix for i in coarser) and not self._looks_at_mixture:
            real = max(state.reals, key=lambda real: real.itemsize)
            mixed = state.mixed(state.can_mix, torch.cat(_signs_of_mixture(state, real)).tolist())
        fresh = [] if self.is_regridded else [i for i in mixed if i not in state.finer]
        if was_blank or fresh:
            return RangeVerdict(Overflow(fresh))
        spread = tuple(sorted({i for i in (*mixed, *coarser) if i in state.finer}))
        bits = tuple(0 if j % n in state.finer else b for j, b in enumerate(bits))
        changes: list[Change] = [bits] if any(bits) else []
        changes += [Spread(spread, ())] if spread else []
        return RangeVerdict(None, changes) if changes else IN_RANGE

    def _bits(self, state: FixedPoint, left: Sequence[float], words: Sequence[torch.dtype]) -> list[int]:
        """By how many bits each tensor should be coarser (finer: negative) for the next steps."""
        bits = []
        for size, word, k, real in zip(left, words, (*state.kz, *state.kv), state.reals * 2, strict=True):
            b = max(excess_of(size, word) if size else 0, k - FINEST[real])
            bits.append(b if b > 1 or b < -FINER else 0)
        return bits

    def _met(self, state: FixedPoint, values: list[float]) -> tuple[list[float], list[float]]:
        """At most this was added to z, and the largest of 2 u and v; and the sizes of z and v in the end."""
        n, n_ends = len(state.z), sum([len(step.u) for step in self.steps])
        u, v, z = values[:n_ends], values[n_ends : 2 * n_ends], values[2 * n_ends : 2 * n_ends + 2 * n]
        v_most = list(map(max_or_nan, self.sizes[n:], magnitudes(v, n)))
        met_v = list(map(max_or_nan, v_most, magnitudes(u, n)))
        time = sum([step.time for step in self.steps])
        met_z = [
            ldexp(time * size, kz - kv + int(s))
            for size, kz, kv, s in zip(v_most, state.kz, state.kv, self.furthest, strict=True)
        ]
        self.left = [*magnitudes(z, n), *magnitudes(v[-2 * n :], n)]
        return [*met_z, *met_v], self.left

    def accept(self, state: FixedPoint, has_changed: bool) -> None:
        """The steps that were judged count; they led to `state`, perhaps on another grid."""
        self.sizes = self.left
        if has_changed:
            self.measure(state)
        self.n_reflects = 0 if self._looks_at_mixture else self.n_reflects
        self.n_singly = max(0, self.n_singly - len(self.steps))
        self.steps, self.is_regridded = [], False

    def regridded_for(
        self, state: FixedPoint, overflow: Overflow | None, margin: int, step: Callable[[State], Any]
    ) -> Regridded | None:
        """A state on a grid on which a step fits, for its repetition; None: there is none. Calls `step` once."""
        regridded = self._regridded(state, overflow.mixed if overflow else (), margin, step)
        if regridded is not None:
            self.measure(regridded.grid)
            self.is_regridded = True
        return regridded

    def holds(self, state: FixedPoint, step: Callable[[State], Any]) -> bool:
        """Whether a step fits the grid as it is. Calls `step` once."""
        regridded = self._regridded(state, (), 0, step)
        return regridded is not None and not regridded.undo

    def _regridded(
        self, state: FixedPoint, mixed: Collection[int], margin: int, step: Callable[[State], Any]
    ) -> Regridded | None:
        peaks = Peaks(state.point, state.slope)
        step(peaks)
        blank = [j for j, size in enumerate(self.sizes) if not size]
        return state.regridded(peaks, Overflow(mixed, blank), margin)

    def go_singly(self) -> None:
        """From here on the range is read after every step, for a while."""
        self.n_singly = PERIOD


def _signs_of_mixture(state: FixedPoint, real: torch.dtype) -> list[Tensor]:
    return [state.signs_of_mixture(i, state.sizes(i)).to(real) for i in state.can_mix]
