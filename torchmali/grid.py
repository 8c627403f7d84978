"""The state arithmetic on integers: what was added can be subtracted again to the last bit.

z and v live on grids of spacing 2^-k, one k for each leaf of each. Undamped, both moves add a rounded function of one
to the other, so the inverse move computes the same numbers and takes them away:

    drift    z <- z + Q(e v)          reflect  v <- Q(2 u) - v

float32 leaves are held as int32 (the memory of float32, with 3 bits more than its mantissa for the largest element),
float64 leaves as int64.

Integers overflow silently. Each reflect measures how large its numbers got, the measurements of several steps are read
together, and `Range` says whether the steps count, whether they must be repeated on another grid, and whether the grid
should move before the next ones.

One spacing per leaf would leave the small elements of a leaf with fewer bits than floats have. A leaf that mixes scales
has an exponent s for each element beside k (one byte), and spacing 2^-(k + s) for z and v alike. s cancels in a drift.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchmali.solution import NonFinite
from torchmali.state import FITS, Drift, Fit, Memento, State, Tensors

WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}
BITS = {torch.int32: 27, torch.int64: 58}  # of the largest element on a new grid; twice that is room to grow
LIMIT = {torch.int32: 0.99 * 2**30, torch.int64: 0.99 * 2**62}  # two numbers below it can be added
FINEST = {torch.float32: 150, torch.float64: 1070}  # the largest k: the smallest floats keep most of their bits
FINEST_SPREAD = {torch.float32: 120, torch.float64: 1000}  # the largest k + s, whose power of two is a normal float
MANTISSA = {torch.float32: 24, torch.float64: 53}
BLANK = -40  # k of a leaf of zeros: so coarse that what is added first shows what it should be
# Bits of a float's mantissa that both z and v may lose for one step: none, where there are wider integers.
MOST = {torch.float32: 0, torch.float64: 16}
FINER = 4  # bits that the largest element may lose before the grid is made finer
CALM = {word: (2.0 ** (bits - 1 - FINER), 2.0 ** (bits + 1)) for word, bits in BITS.items()}  # no change: see `judge`
# A leaf mixes scales where all elements of a slice lack so many bits of a float's mantissa,
LACKING = 3
# or where so many of its elements lack so many: single ones are often small by chance.
SHARE, LACKING_ELEMENTS = 1 / 64, 6
_SINGLE = struct.Struct("f")
PERIOD = 8  # steps between two readings of the range
LOOK = 2 * PERIOD  # steps between two looks at the mixture of scales


class Grid(State):
    """Moves out of place, each on fresh tensors: a fork is free. z keeps the memory layout of y0."""

    __slots__ = ("_factors", "_steps_of_z", "finer", "given", "kv", "kz", "reals", "seen", "span", "v", "v_sizes", "z")
    is_bounded = True

    def __init__(
        self,
        z: Tensors,
        v: Tensors,
        kz: tuple[int, ...],
        kv: tuple[int, ...],
        reals: tuple,
        span: float,
        finer: Mapping[int, Tensor],
    ):
        self.z, self.v, self.kz, self.kv, self.reals = z, v, kz, kv, reals
        self.span = span  # of the solve: how long v moves z
        self.finer = finer  # s of the leaves that mix scales, as int8
        self.seen: Seen | None = None  # of the moves since `fork`. The backward pass does not look.
        # By how much v moved each leaf of z in a time: a step ends with the move with which the next one begins.
        self._steps_of_z: list[tuple[float, Tensor]] | None = None
        self._factors: Factors | None = None
        self.v_sizes: Sequence[float] = ()  # the largest v of each leaf, where it was just made
        self.given: Tensors = ()  # the z and v that a first state was made of

    @classmethod
    def of(cls, z: Tensors, wide: bool = False, span: float = 1.0, finer: Mapping[int, Tensor] | None = None) -> Grid:
        """wide: int64 for float32 leaves, too. finer: s for leaves that mix scales."""
        finer = finer or {}
        words = [torch.int64 if wide else WORDS[x.dtype] for x in z]
        fine = [_times_power(x, 1, finer.get(i)) for i, x in enumerate(z)]
        (k, _), reals = _exponents(fine, words), tuple(x.dtype for x in z)
        grid = cls(_quantised(fine, k, words), (), k, (), reals, span, finer)
        grid.given = z
        return grid

    def begun_at(self, z: Tensors) -> Grid:
        return Grid.of(z, self._is_wide, self.span, self.finer)

    @property
    def _is_wide(self) -> bool:
        return any(x.dtype != WORDS[real] for x, real in zip(self.z, self.reals, strict=True))

    def with_slope(self, v: Tensors) -> Grid:
        words = [x.dtype for x in self.z]
        fine = [_times_power(x, 1, self.finer.get(i)) for i, x in enumerate(v)]
        k, sizes = _exponents(fine, words)
        grid = Grid(self.z, _quantised(fine, k, words), self.kz, k, self.reals, self.span, self.finer)
        grid.v_sizes, grid.given = sizes, (*self.given, *v)
        return grid

    @property
    def point(self) -> Tensors:
        return self._floats(self.z, self.factors.point)

    @property
    def slope(self) -> Tensors:
        return self._floats(self.v, self.factors.slope)

    @property
    def factors(self) -> Factors:
        self._factors = self._factors or Factors(self.z, self.kz, self.kv, self.reals)
        return self._factors

    def _floats(self, x: Tensors, factors: Sequence[Factor]) -> Tensors:
        scaled = [factor.times_(leaf.type(real)) for leaf, factor, real in zip(x, factors, self.reals, strict=True)]
        for i, s in self.finer.items():
            scaled[i] = _times_power(scaled[i], -1, s)
        return tuple(scaled)

    def fork(self) -> Grid:
        fork = Grid(self.z, self.v, self.kz, self.kv, self.reals, self.span, self.finer)
        fork.seen, fork._steps_of_z, fork._factors = Seen(), self._steps_of_z, self._factors
        return fork

    def drift(self, e: float) -> Grid:
        moved, steps = [], self._steps_of_z or [(-1.0, z) for z in self.z]
        for i, (z, v, real) in enumerate(zip(self.z, self.v, self.reals, strict=True)):
            time = abs(e) if real is torch.float64 else _float32(abs(e))
            known, step = steps[i]
            if known != time:
                step = self.factors.of_drift(i, time).times_(v.type(real)).round_().type(z.dtype)
                steps[i] = time, step
            moved.append(z.add(step) if e >= 0 else z.sub(step))  # z first: the sum takes its layout
        self.z, self._steps_of_z = tuple(moved), steps
        if self.seen is not None:
            self.seen.time += abs(e)
        return self

    def reflect(self, u: Tensors, eta: float) -> Grid:
        assert eta == 1
        turned, seen = [], self.seen
        for i, (x, v, factor) in enumerate(zip(u, self.v, self.factors.reflect, strict=True)):
            q = factor.times(x)
            if i in self.finer:
                q = _times_power(q, 1, self.finer[i])
            if seen is not None:
                seen.u += _extremes(q)
            turned.append(q.round_().type(v.dtype).sub_(v))
            if seen is not None:
                seen.v += _extremes(turned[-1])
        self.v, self._steps_of_z = tuple(turned), None
        return self

    def range(self) -> Range:
        return Range(self)

    def begins_again(self) -> GridArithmetic | None:
        """How to begin anew, where leaves mix scales and have no exponents for their elements yet. One host read."""
        n, leaves = len(self.z), [i for i in self._can_mix if i not in self.finer]
        # Of the floats: what is too small for the grid is zero on it.
        sizes = {i: torch.maximum(self.given[i].abs(), self.given[n + i].abs() * self.span) for i in leaves}
        self.given = ()
        if not leaves:
            return None
        real = max(self.reals, key=lambda real: real.itemsize)
        signs = iter(torch.cat([self._signs_of_mixture(i, sizes[i]).to(real) for i in leaves]).tolist())
        mixed = [i for i in leaves if self._is_mixed(i, next(signs), next(signs), next(signs))]
        return self._for_mixed({i: sizes[i] for i in mixed}) if mixed else None

    def rescaled(self, change: Change) -> tuple[Grid, Memento]:
        if isinstance(change, Spread):
            return self._spread(change)
        if isinstance(change, Widening):
            words = [torch.int64 if i in change.leaves else x.dtype for i, x in enumerate(self.z)]
            wide = [x.to(word) << b for x, word, b in zip((*self.z, *self.v), words * 2, change.bits, strict=True)]
            return self._on(wide, change.bits), Memento((), None)
        tensors, lost, coarse = [], [], None
        for x, b in zip((*self.z, *self.v), change, strict=True):
            if b > 0:  # rounded, not cut off: a bias would add up
                coarse = (x + 2 ** (b - 1)) >> b
                lost.append((x - (coarse << b)).to(torch.int8))
            tensors.append(coarse if b > 0 else x << -b)
        return self._on(tensors, [-b for b in change]), Memento(tuple(lost), None)

    def unscaled(self, change: Change, lost: Memento) -> Grid:
        if isinstance(change, Spread):
            return self._unspread(change, lost.tensors)
        if isinstance(change, Widening):
            words = [torch.int32 if i in change.leaves else x.dtype for i, x in enumerate(self.z)]
            narrow = [(x >> b).to(word) for x, word, b in zip((*self.z, *self.v), words * 2, change.bits, strict=True)]
            return self._on(narrow, [-b for b in change.bits])
        tensors, fallen = [], iter(lost.tensors)
        for x, b in zip((*self.z, *self.v), change, strict=True):
            tensors.append((x << b) + next(fallen) if b > 0 else x >> -b)
        return self._on(tensors, change)

    def _on(self, tensors: Sequence[Tensor], change: Sequence[int]) -> Grid:
        n = len(self.z)
        k = [k + more for k, more in zip((*self.kz, *self.kv), change, strict=True)]
        kz, kv = tuple(k[:n]), tuple(k[n:])
        return Grid(tuple(tensors[:n]), tuple(tensors[n:]), kz, kv, self.reals, self.span, self.finer)

    def _spread(self, change: Spread) -> tuple[Grid, Memento]:
        z, v, finer, bits = list(self.z), list(self.v), dict(self.finer), []
        for i in change.leaves:
            more = self._bits_to_spare(i)
            z[i], v[i] = z[i] << more, v[i] << more
            finer[i] = finer[i] + more if i in finer else more
            bits.append(more)
        return Grid(tuple(z), tuple(v), self.kz, self.kv, self.reals, self.span, finer), Memento(tuple(bits), None)

    def _unspread(self, change: Spread, bits: Tensors) -> Grid:
        z, v, finer = list(self.z), list(self.v), dict(self.finer)
        for i, more in zip(change.leaves, bits, strict=True):
            z[i], v[i] = z[i] >> more, v[i] >> more
            finer[i] = finer[i] - more
            if i in change.fresh:
                del finer[i]
        return Grid(tuple(z), tuple(v), self.kz, self.kv, self.reals, self.span, finer)

    def _bits_to_spare(self, i: int) -> Tensor:
        """By how many bits each element of a leaf can be made finer, as int8."""
        largest = torch.maximum(self.z[i].abs(), self.v[i].abs())
        bits = BITS[largest.dtype] - torch.frexp(largest.to(self.reals[i])).exponent
        bits = torch.where((largest > 0) & (bits >= FINER), bits, 0)
        return torch.minimum(bits, self._room(i, bits)).clamp_(0).to(torch.int8)

    def _room(self, i: int, like: Tensor) -> Tensor:
        """How much larger s can become."""
        most = min(127, FINEST_SPREAD[self.reals[i]] - max(self.kz[i], self.kv[i]))
        room = torch.full_like(like, most)
        return room - self.finer[i] if i in self.finer else room

    def _for_mixed(self, sizes: Mapping[int, Tensor]) -> GridArithmetic:
        finer = dict(self.finer)
        for i, size in sizes.items():
            bits = torch.frexp(size.amax()).exponent - torch.frexp(size).exponent
            bits = torch.where(size > 0, bits, 0)
            finer[i] = torch.minimum(bits, self._room(i, bits)).clamp_(0).to(torch.int8)
        return GridArithmetic(self._is_wide, self.span, finer)

    @property
    def _can_mix(self) -> list[int]:
        return [i for i, z in enumerate(self.z) if z.numel() > 1]

    def _sizes(self, i: int) -> Tensor:
        """|z|, or by how much v moves it over the span, whichever is larger: of each element, in units of z's grid."""
        z, v = self.z[i].to(self.reals[i]).abs_(), self.v[i].to(self.reals[i]).abs_()
        return torch.maximum(z, _times_(v, self.span, self.kz[i] - self.kv[i]))

    def _signs_of_mixture(self, i: int, sizes: Tensor) -> Tensor:
        """For `_is_mixed`: the largest element of leaf i, that of its smallest slice, how many elements lack bits."""
        full = 2.0 ** (MANTISSA[self.reals[i]] - BITS[self.z[i].dtype])
        slices = [_slice_sizes(sizes, d) for d, n in enumerate(sizes.shape) if n > 1]
        largest = slices[0].amax()
        smallest = torch.cat(slices) if len(slices) > 1 else slices[0]
        smallest = torch.where(smallest > 0, smallest, largest).amin()
        are_small = (sizes < full * 2.0**-LACKING_ELEMENTS * largest).logical_and_(sizes > 0)
        return torch.stack([largest, smallest, are_small.sum().to(sizes.dtype)])

    def _is_mixed(self, i: int, largest: float, smallest: float, n_small: float) -> bool:
        lacking = 0 if i in self.finer else LACKING  # where bits are spread anyway, more of that costs little
        full = 2.0 ** (MANTISSA[self.reals[i]] - BITS[self.z[i].dtype])
        return n_small > SHARE * self.z[i].numel() or full * 2.0**-lacking * largest > smallest

    def put_away(self) -> Memento:
        return Memento((*self.z, *self.v, *self.finer.values()), self._form(self.kz))

    def put_away_before_refresh(self) -> Memento:
        return Memento(self.v, self._form(()))  # z is rebuilt to the bit

    def _form(self, kz: tuple[int, ...]) -> GridForm:
        return GridForm(kz, self.kv, self.reals, self.span, tuple(self.finer))

    @classmethod
    def restore(cls, kept: Memento) -> Grid:
        kz, kv, reals, span, spread = kept.form
        n = len(kz)
        finer = dict(zip(spread, kept.tensors[2 * n :], strict=True))
        return cls(kept.tensors[:n], kept.tensors[n : 2 * n], kz, kv, reals, span, finer)

    def back_to(self, kept: Memento) -> Grid:
        if kept.form.kz:
            return self.restore(kept)
        return Grid(self.z, kept.tensors, self.kz, kept.form.kv, self.reals, self.span, self.finer)

    def distance(self, truth: Grid, end: Grid, span: float, limits: tuple[float, float] = (0.0, 0.0)) -> Drift:
        """0 where all bits agree, of z and of v, else infinite."""
        mine, other = self.put_away(), truth.put_away()
        agree = mine.form == other.form
        if agree:
            differ = [(x != y).any() for x, y in zip(mine.tensors, other.tensors, strict=True)]
            agree = not bool(torch.stack(differ).any())  # the one host read
        return Drift(*[0.0 if agree else math.inf] * 4)


class GridForm(NamedTuple):
    """What a Grid is beside its tensors."""

    kz: tuple[int, ...]  # empty where z was not put away
    kv: tuple[int, ...]
    reals: tuple
    span: float
    spread: tuple[int, ...]  # leaves that have an s


@dataclass(frozen=True, eq=False)
class GridArithmetic:
    """How a solve on integers begins."""

    wide: bool
    span: float
    finer: Mapping[int, Tensor] = field(default_factory=dict)

    def of(self, z: Tensors) -> Grid:
        return Grid.of(z, self.wide, self.span, self.finer)


class Spread(NamedTuple):
    """More bits for the small elements of some leaves."""

    leaves: tuple[int, ...]
    fresh: tuple[int, ...]  # those that had one spacing before


class Widening(NamedTuple):
    """int64 in place of int32 for some leaves, which leaves room to grow within one step."""

    leaves: tuple[int, ...]
    bits: tuple[int, ...]  # by which each tensor of z and v is made finer


# Bits by which each tensor of z and v is made coarser, or something else.
Change: TypeAlias = "tuple[int, ...] | Spread | Widening"


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


class Seen:
    """What moves did to the range of the numbers: how long v moved z, and the extremes that reflects measured."""

    def __init__(self):
        self.time = 0.0
        self.u: list[Tensor] = []  # low and high of 2 u, reflect after reflect, leaf after leaf
        self.v: list[Tensor] = []  # low and high of the new v


class Range:
    """The range of the integers in one solve: are the steps since the last reading what they seem to be?

    No number has wrapped round as long as v, 2 u and all that was added to z have stayed below the limit, where z began
    below it. What was added is at most the largest v times the time for which it moved z.
    """

    def __init__(self, state: Grid):
        self.v_sizes = state.v_sizes  # at the last reading
        self.steps: list[Seen] = []  # since the last reading
        self.n_singly = 0  # steps to come that are read one by one
        self.n_until_look = PERIOD  # steps until the mixture of scales is looked at

    @property
    def n_steps(self) -> int:
        """Since the last reading."""
        return len(self.steps)

    @property
    def is_due(self) -> bool:
        return len(self.steps) >= PERIOD or self.n_singly > 0

    def add(self, state: Grid) -> None:
        """A step that was taken, of which nothing is known yet."""
        assert state.seen is not None
        self.steps.append(state.seen)

    def forget(self, n_steps: int = 0) -> None:
        """The steps that were added since the last reading, but the first n, are taken back."""
        del self.steps[n_steps:]

    def signs(self, state: Grid) -> Tensor:
        """What has to be read to judge the steps that were added, the last of which led to `state`."""
        real = max(state.reals, key=lambda real: real.itemsize)
        u, v = ([end for step in self.steps for end in ends(step)] for ends in (lambda x: x.u, lambda x: x.v))
        parts = [_stack(u, real), _stack([*v, *[end for z in state.z for end in _extremes(z)]], real)]
        if self._looks_at_mixture:
            parts += [state._signs_of_mixture(i, state._sizes(i)).to(real) for i in state._can_mix]
        return torch.cat(parts)

    @property
    def _looks_at_mixture(self) -> bool:
        return self.n_until_look <= len(self.steps)

    def judge(self, state: Grid, values: list[float], dropped: Sequence[Change]) -> Fit:
        """dropped: the changes that were made for these very steps."""
        met, left = self._met(state, values, dropped)
        finest = [FINEST[real] for real in (*state.reals, *state.reals)]
        words, k = [x.dtype for x in (*state.z, *state.v)], (*state.kz, *state.kv)
        n = len(words)
        if not dropped and not self._looks_at_mixture and _is_calm(met, left, words, k, finest):
            return FITS
        bits = [
            min(8, _excess(peak, word)) if LIMIT[word] < peak < math.inf else 0
            for peak, word in zip(map(max, met, left), words, strict=True)
        ]
        # z or v alone may grow as much as it likes in one step. If both do, then each out of what fell off the other.
        coarser = [change for change in dropped if not isinstance(change, (Spread, Widening))]
        total = [sum(max(b, 0) for b in column) for column in zip(*coarser, strict=True)] or [0] * n
        most = [BITS[x.dtype] - MANTISSA[real] + MOST[real] for x, real in zip(state.z, state.reals, strict=True)]
        explode = [i for i in range(n // 2) if min(total[i], total[n // 2 + i]) > most[i]]
        if any(bits) and not explode:  # perhaps the cause of numbers that are not finite, too
            return Fit(True, True, (*dropped, tuple(bits)))
        if explode:
            can_widen = all(state.z[i].dtype is torch.int32 for i in explode)
            k = [e + sum(column) for e, *column in zip(k, *coarser, strict=True)]  # as they were before
            wider = [change for change in dropped if isinstance(change, Widening)]
            return Fit(False, False, (*wider, _widening(explode, k, finest)) if can_widen else ())
        if not all(map(math.isfinite, (*met, *left))):
            return Fit(False, False, ())
        # Zeros, and what was added to them was rounded away.
        bits = [
            _excess(added, word) if 0 < added < 0.5 and not size and not lost else 0
            for added, size, lost, word in zip(met, left, total, words, strict=True)
        ]
        bits = [max(b, e - limit) for b, e, limit in zip(bits, k, finest, strict=True)]
        if any(bits):
            return Fit(True, True, (*dropped, tuple(bits)))
        bits = [_excess(size, word) if size else 0 for size, word in zip(left, words, strict=True)]
        bits = [max(b, e - limit) for b, e, limit in zip(bits, k, finest, strict=True)]
        bits = tuple(b if b > 1 or b < -FINER else 0 for b in bits)
        changes: tuple[Change, ...] = (bits,) if any(bits) else ()
        if self._looks_at_mixture:
            signs = iter(values[-3 * len(state._can_mix) :])
            mixed = [i for i in state._can_mix if state._is_mixed(i, next(signs), next(signs), next(signs))]
            fresh = tuple(i for i in mixed if i not in state.finer)
            changes += (Spread(tuple(mixed), fresh),) if mixed else ()
        return Fit(True, False, changes)

    def _met(self, state: Grid, values: list[float], dropped: Sequence[Change]) -> tuple[list[float], list[float]]:
        """At most this was added to z, and the largest of 2 u and v; and the sizes of z and v in the end."""
        n, n_ends = len(state.z), sum([len(step.u) for step in self.steps])
        u, v, z = values[:n_ends], values[n_ends : 2 * n_ends], values[2 * n_ends : 2 * n_ends + 2 * n]
        v_begun = _sizes_after(dropped, self.v_sizes, state)
        v_most = [_max(x, y) for x, y in zip(v_begun, _magnitudes(v, n), strict=True)]
        met_v = [_max(x, y) for x, y in zip(v_most, _magnitudes(u, n), strict=True)]
        time = sum([step.time for step in self.steps])
        met_z = [_ldexp(time * size, kz - kv) for size, kz, kv in zip(v_most, state.kz, state.kv, strict=True)]
        self.v_left = _magnitudes(v[-2 * n :], n)
        return [*met_z, *met_v], [*_magnitudes(z, n), *self.v_left]

    def accept(self, state: Grid, changes: Sequence[Change]) -> None:
        """The steps that were judged count, and the changes were made to the grid."""
        self.v_sizes = _sizes_after(changes, self.v_left, state)
        n_steps, self.steps = len(self.steps), []
        self.n_singly = max(0, self.n_singly - n_steps)
        self.n_until_look = LOOK if self.n_until_look <= n_steps else self.n_until_look - n_steps

    def renew(self, state: Grid) -> None:
        """v is on a new grid."""
        self.v_sizes = state.v_sizes

    def go_singly(self) -> None:
        """From here on the range is read after every step, for a while."""
        self.n_singly = PERIOD


def _sizes_after(changes: Sequence[Change], v_sizes: Sequence[float], state: Grid) -> Sequence[float]:
    """The largest v of each leaf after changes of the grid, which led to `state`."""
    for change in changes:
        if isinstance(change, Spread):  # small ones became larger, but not larger than on a new grid
            v_sizes = [max(x, 2.0 ** BITS[v.dtype]) for x, v in zip(v_sizes, state.v, strict=True)]
        else:
            finer = change.bits if isinstance(change, Widening) else [-b for b in change]
            v_sizes = [math.ldexp(x, b) for x, b in zip(v_sizes, finer[len(state.z) :], strict=True)]
    return v_sizes


def _widening(leaves: Sequence[int], k: Sequence[int], finest: Sequence[int]) -> Widening:
    """For z and v with these exponents."""
    n, more = len(k) // 2, BITS[torch.int64] - BITS[torch.int32]
    room = [max(0, min(more, limit - e)) for e, limit in zip(k, finest, strict=True)]
    return Widening(tuple(leaves), tuple(b if i % n in leaves else 0 for i, b in enumerate(room)))


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = x.aminmax() if x.numel() else (x.new_zeros(()),) * 2
    return low, high


def _stack(x: Sequence[Tensor], real: torch.dtype) -> Tensor:
    if all(part.dtype == x[0].dtype for part in x):
        return torch.stack([*x]).to(real)
    return torch.stack([part.to(real) for part in x])


def _magnitudes(ends: list[float], n: int) -> list[float]:
    """The largest magnitude for each of n leaves, from pairs of extremes, leaf after leaf; nan if one of them is."""
    found = []
    for i in range(0, 2 * n, 2):
        lows, highs = ends[i :: 2 * n], ends[i + 1 :: 2 * n]
        found.append(math.nan if math.isnan(sum(lows)) else max(-min(lows), *highs))
    return found


def _max(*x: float) -> float:
    """nan if one of them is."""
    return math.nan if math.isnan(sum(x)) else max(x)


def _slice_sizes(x: Tensor, d: int) -> Tensor:
    """The largest element of each slice along dimension d."""
    others = [i for i in range(x.ndim) if i != d]
    return x.amax(others) if others else x


def _float32(x: float) -> float:
    return _SINGLE.unpack(_SINGLE.pack(x))[0]


def _ldexp(x: float, k: int) -> float:
    try:
        return math.ldexp(x, k)
    except OverflowError:
        return math.inf


def _times(x: Tensor, e: float, k: int) -> Tensor:
    """e 2^k x. In two factors, where one would leave the range of the floats."""
    if abs(k) < 100:
        return x * (e * 2.0**k)
    return (x * 2.0 ** (k // 2)).mul_(e * 2.0 ** (k - k // 2))


def _times_(x: Tensor, e: float, k: int) -> Tensor:
    if abs(k) < 100:
        return x.mul_(e * 2.0**k)
    return x.mul_(2.0 ** (k // 2)).mul_(e * 2.0 ** (k - k // 2))


def _times_power(x: Tensor, sign: int, s: Tensor | None) -> Tensor:
    """2^s x, or 2^-s x; x itself without s."""
    if s is None:
        return x
    # A power of two is its exponent among the bits of a float: no rounding, unlike exp2.
    if x.dtype == torch.float32:
        return x * ((sign * s.to(torch.int32) + 127) << 23).view(torch.float32)
    return x * ((sign * s.to(torch.int64) + 1023) << 52).view(torch.float64)


def _exponents(x: Sequence[Tensor], words: Sequence[torch.dtype]) -> tuple[tuple[int, ...], list[float]]:
    """k of each leaf, such that 2^(bits - 1) <= 2^k max |x| < 2^bits, and 2^k max |x|. One host read."""
    real = max((leaf.dtype for leaf in x), key=lambda real: real.itemsize)
    sizes = _magnitudes(_stack([end for leaf in x for end in _extremes(leaf)], real).tolist(), len(x))
    if not all(map(math.isfinite, sizes)):
        raise NonFinite(f"Non-finite values in leaf {[*map(math.isfinite, sizes)].index(False)} of y0 or of f(t, y).")
    k = tuple(
        min(FINEST[leaf.dtype], BITS[word] - math.frexp(size)[1]) if size else BLANK
        for leaf, word, size in zip(x, words, sizes, strict=True)
    )
    return k, list(map(_ldexp, sizes, k))


def _is_calm(
    met: Sequence[float], left: Sequence[float], words: Sequence[torch.dtype], k: Sequence[int], finest: Sequence[int]
) -> bool:
    """Whether numbers stayed in their range, and end where a grid need not move: the usual case, told quickly."""
    for peak, size, word, e, limit in zip(met, left, words, k, finest, strict=True):
        if not (peak <= LIMIT[word] and CALM[word][0] <= size < CALM[word][1] and e <= limit):
            return False
    return True


def _excess(size: float, word: torch.dtype) -> int:
    """Bits by which a number of the grid is larger than it would be on a new grid."""
    return math.frexp(size)[1] - BITS[word]


def _quantised(x: Sequence[Tensor], k: Sequence[int], words: Sequence[torch.dtype]) -> Tensors:
    return tuple(_times(leaf, 1.0, e).round_().to(word) for leaf, e, word in zip(x, k, words, strict=True))
