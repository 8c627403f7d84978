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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchmali.solution import NonFinite
from torchmali.state import Drift, Fit, Memento, State, Tensors

WORDS = {torch.float32: torch.int32, torch.float64: torch.int64}
BITS = {torch.int32: 27, torch.int64: 58}  # of the largest element on a new grid; twice that is room to grow
LIMIT = {torch.int32: 0.99 * 2**30, torch.int64: 0.99 * 2**62}  # two numbers below it can be added
FINEST = {torch.float32: 150, torch.float64: 1070}  # the largest k: the smallest floats keep most of their bits
FINEST_SPREAD = {torch.float32: 120, torch.float64: 1000}  # the largest k + s, whose power of two is a normal float
MANTISSA = {torch.float32: 24, torch.float64: 53}
BLANK = -40  # k of a leaf of zeros: so coarse that what is added first shows what it should be
MOST = 5  # bits of a float's mantissa that both z and v may lose for one step
FINER = 4  # bits that the largest element may lose before the grid is made finer
# A leaf mixes scales where all elements of a slice lack so many bits of a float's mantissa,
LACKING = 3
# or where so many of its elements lack so many: single ones are often small by chance.
SHARE, LACKING_ELEMENTS = 1 / 64, 6
PERIOD = 8  # steps between two readings of the range, and between two looks at the mixture of scales


class Grid(State):
    """Moves out of place, each on fresh tensors: a fork is free. z keeps the memory layout of y0."""

    __slots__ = ("_v_real", "finer", "given", "kv", "kz", "reals", "seen", "span", "v", "v_sizes", "z")
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
        self.seen: list[Move] | None = None  # the moves since `fork`. The backward pass does not look.
        self._v_real: list[Tensor] | None = None
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
        return self._floats(self.z, self.kz)

    @property
    def slope(self) -> Tensors:
        return self._floats(self.v, self.kv)

    def _floats(self, x: Tensors, k: Sequence[int]) -> Tensors:
        scaled = (_times_(leaf.to(real), 1.0, -e) for leaf, e, real in zip(x, k, self.reals, strict=True))
        return tuple(_times_power(leaf, -1, self.finer.get(i)) for i, leaf in enumerate(scaled))

    def fork(self) -> Grid:
        fork = self._with(self.z, self.v)
        fork.seen, fork._v_real = [], self._v_real
        return fork

    def _with(self, z: Tensors, v: Tensors) -> Grid:
        return Grid(z, v, self.kz, self.kv, self.reals, self.span, self.finer)

    def drift(self, e: float) -> Grid:
        if self._v_real is None:  # the same for the drift that ends a step and for the one that begins the next
            self._v_real = [v.to(real) for v, real in zip(self.v, self.reals, strict=True)]
        moved = []
        for z, v, kz, kv in zip(self.z, self._v_real, self.kz, self.kv, strict=True):
            moved.append(z.add(_times(v, e, kz - kv).round_().to(z.dtype)))  # z first: the sum takes its layout
        self.z = tuple(moved)
        if self.seen is not None:
            self.seen.append(Move(e, (), ()))
        return self

    def reflect(self, u: Tensors, eta: float) -> Grid:
        assert eta == 1
        turned, u_ends, v_ends = [], [], []
        for i, (x, v) in enumerate(zip(u, self.v, strict=True)):
            q = _times(x, 1.0, self.kv[i] + 1)
            if i in self.finer:
                q = _times_power(q, 1, self.finer[i])
            if self.seen is not None:
                u_ends += _extremes(q)
            turned.append(q.round_().to(v.dtype).sub_(v))
            if self.seen is not None:
                v_ends += _extremes(turned[-1])
        self.v, self._v_real = tuple(turned), None
        if self.seen is not None:
            self.seen.append(Move(0.0, tuple(u_ends), tuple(v_ends)))
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
        values = _stack([self._mixture(i, sizes[i]) for i in leaves], real).tolist()
        mixed = [i for i, value in zip(leaves, values, strict=True) if value > 1]
        return self._for_mixed({i: sizes[i] for i in mixed}) if mixed else None

    def rescaled(self, change: Change) -> tuple[Grid, Memento]:
        if isinstance(change, Spread):
            return self._spread(change)
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
        z, v = self.z[i].abs().to(self.reals[i]), self.v[i].abs().to(self.reals[i])
        return torch.maximum(z, _times_(v, self.span, self.kz[i] - self.kv[i]))

    def _mixture(self, i: int, sizes: Tensor | None = None) -> Tensor:
        """Above 1 where the leaf mixes scales (0-d)."""
        sizes = self._sizes(i) if sizes is None else sizes
        largest, full = sizes.amax(), 2.0 ** (MANTISSA[self.reals[i]] - BITS[self.z[i].dtype])
        lacking = 0 if i in self.finer else LACKING  # where bits are spread anyway, more of that costs little
        are_small = (sizes > 0) & (sizes < full * 2.0**-LACKING_ELEMENTS * largest)
        share = are_small.sum().to(sizes) / (SHARE * sizes.numel())
        slices = [sizes.movedim(d, 0).reshape(n, -1).amax(1) for d, n in enumerate(sizes.shape) if n > 1]
        smallest = torch.stack([torch.where(x > 0, x, largest).amin() for x in slices]).amin()
        return torch.maximum(share, full * 2.0**-lacking * largest / smallest)

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


Change: TypeAlias = "tuple[int, ...] | Spread"  # bits by which each tensor of z and v is made coarser, or a Spread


class Move(NamedTuple):
    """What one move did to the range: a drift by e, or a reflect and the extremes that it measured, leaf by leaf."""

    e: float
    u: tuple[Tensor, ...]  # low and high of 2 u
    v: tuple[Tensor, ...]  # low and high of the new v


class Range:
    """The range of the integers in one solve: are the steps since the last reading what they seem to be?

    No number has wrapped round as long as v, 2 u and all that was added to z have stayed below the limit, where z began
    below it. What drifts add follows from v.
    """

    def __init__(self, state: Grid):
        self.v_sizes = state.v_sizes  # at the last reading
        self.moves: list[Move] = []
        self.n_steps = 0  # since the last reading
        self.n_singly = 0  # steps to come that are read one by one
        self.n_until_look = PERIOD  # steps until the mixture of scales is looked at

    @property
    def pending(self) -> tuple[list[Move], int]:
        """The steps that were added since the last reading."""
        return [*self.moves], self.n_steps

    @pending.setter
    def pending(self, steps: tuple[list[Move], int]) -> None:
        self.moves, self.n_steps = steps

    @property
    def is_due(self) -> bool:
        return self.n_steps >= PERIOD or self.n_singly > 0

    def add(self, state: Grid) -> None:
        """A step that was taken, of which nothing is known yet."""
        assert state.seen is not None
        self.moves += state.seen
        self.n_steps += 1

    def signs(self, state: Grid) -> Tensor:
        """What has to be read to judge the steps that were added, the last of which led to `state`."""
        real = max(state.reals, key=lambda real: real.itemsize)
        parts = [[x for move in self.moves for x in move.u], [x for move in self.moves for x in move.v]]
        parts.append([end for z in state.z for end in _extremes(z)])
        if self.n_until_look <= self.n_steps:
            parts.append([state._mixture(i) for i in state._can_mix])
        return torch.cat([_stack(part, real) for part in parts if part])

    def judge(self, state: Grid, values: list[float], dropped: Sequence[tuple[int, ...]]) -> Fit:
        """dropped: the rescales that were made for this very step."""
        met_z, met_v, left = self._met(state, iter(values))
        finest = [FINEST[real] for real in (*state.reals, *state.reals)]
        words, k = [x.dtype for x in (*state.z, *state.v)], (*state.kz, *state.kv)
        met, n = [*met_z, *met_v], len(words)
        bits = [
            min(8, _excess(peak, word)) if LIMIT[word] < peak < math.inf else 0
            for peak, word in zip(map(max, met, left), words, strict=True)
        ]
        # z or v alone may grow as much as it likes in one step. If both do, then each out of what fell off the other.
        total = [sum(max(b, 0) for b in column) for column in zip(*dropped, strict=True)] or [0] * n
        most = [BITS[x.dtype] - MANTISSA[real] + MOST for x, real in zip(state.z, state.reals, strict=True)]
        explodes = any(min(total[i], total[n // 2 + i]) > most[i] for i in range(n // 2))
        if any(bits) and not explodes:  # perhaps the cause of numbers that are not finite, too
            return Fit(True, True, (tuple(bits),))
        if explodes or not all(map(math.isfinite, (*met, *left))):
            return Fit(False, False, ())
        # Zeros, and what was added to them was rounded away.
        bits = [
            _excess(added, word) if 0 < added < 0.5 and not size and not lost else 0
            for added, size, lost, word in zip(met, left, total, words, strict=True)
        ]
        bits = [max(b, e - limit) for b, e, limit in zip(bits, k, finest, strict=True)]
        if any(bits):
            return Fit(True, True, (tuple(bits),))
        bits = [_excess(size, word) if size else 0 for size, word in zip(left, words, strict=True)]
        bits = [max(b, e - limit) for b, e, limit in zip(bits, k, finest, strict=True)]
        bits = tuple(b if b > 1 or b < -FINER else 0 for b in bits)
        changes: tuple[Change, ...] = (bits,) if any(bits) else ()
        mixed = tuple(i for i, value in zip(state._can_mix, values[-len(state._can_mix) :], strict=False) if value > 1)
        if mixed and self.n_until_look <= self.n_steps:
            changes += (Spread(mixed, tuple(i for i in mixed if i not in state.finer)),)
        return Fit(True, False, changes)

    def _met(self, state: Grid, values: Iterator[float]) -> tuple[list[float], list[float], list[float]]:
        """The sum of what was added to z, the largest of 2 u and v, and the sizes of z and v in the end."""
        n, reflects = len(state.z), [move for move in self.moves if move.u]
        u, v = ([_pairs(values, n) for _ in reflects] for _ in range(2))
        ends, v_now, n_met = _pairs(values, n), list(self.v_sizes), 0
        met_z, met_v = [0.0] * n, [0.0] * n
        for move in self.moves:
            if move.u:
                v_now = v[n_met]
                met_v = list(map(_max, met_v, u[n_met], v_now))
                n_met += 1
            else:
                for i in range(n):
                    met_z[i] += _ldexp(abs(move.e) * v_now[i], state.kz[i] - state.kv[i])
        self.v_left = v_now
        return met_z, met_v, [*ends, *v_now]

    def accept(self, state: Grid, changes: Sequence[Change]) -> None:
        """The steps that were judged count, and the changes were made to the grid."""
        self.v_sizes = self.v_left
        for change in changes:
            if isinstance(change, Spread):  # small ones became larger, but not larger than on a new grid
                self.v_sizes = [max(x, 2.0 ** BITS[v.dtype]) for x, v in zip(self.v_sizes, state.v, strict=True)]
            else:
                bits = change[len(state.z) :]
                self.v_sizes = [math.ldexp(x, -b) for x, b in zip(self.v_sizes, bits, strict=True)]
        self.n_singly = max(0, self.n_singly - self.n_steps)
        self.n_until_look = PERIOD if self.n_until_look <= self.n_steps else self.n_until_look - self.n_steps
        self.moves, self.n_steps = [], 0

    def renew(self, state: Grid) -> None:
        """v is on a new grid."""
        self.v_sizes = state.v_sizes

    def forget(self) -> None:
        """The steps that were added since the last reading are taken back."""
        self.moves, self.n_steps = [], 0

    def go_singly(self) -> None:
        """From here on the range is read after every step, for a while."""
        self.n_singly = PERIOD


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    low, high = x.aminmax() if x.numel() else (x.new_zeros(()),) * 2
    return low, high


def _stack(x: Sequence[Tensor], real: torch.dtype) -> Tensor:
    if all(part.dtype == x[0].dtype for part in x):
        return torch.stack([*x]).to(real)
    return torch.stack([part.to(real) for part in x])


def _pairs(values: Iterator[float], n: int) -> list[float]:
    """The larger magnitudes of the next n pairs of extremes."""
    return [_max(abs(next(values)), abs(next(values))) for _ in range(n)]


def _max(*x: float) -> float:
    """nan if one of them is."""
    return math.nan if any(map(math.isnan, x)) else max(x)


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
    values = iter(_stack([end for leaf in x for end in _extremes(leaf)], real).tolist())
    sizes = _pairs(values, len(x))
    if not all(map(math.isfinite, sizes)):
        raise NonFinite(f"Non-finite values in leaf {[*map(math.isfinite, sizes)].index(False)} of y0 or of f(t, y).")
    k = tuple(
        min(FINEST[leaf.dtype], BITS[word] - math.frexp(size)[1]) if size else BLANK
        for leaf, word, size in zip(x, words, sizes, strict=True)
    )
    return k, list(map(_ldexp, sizes, k))


def _excess(size: float, word: torch.dtype) -> int:
    """Bits by which a number of the grid is larger than it would be on a new grid."""
    return math.frexp(size)[1] - BITS[word]


def _quantised(x: Sequence[Tensor], k: Sequence[int], words: Sequence[torch.dtype]) -> Tensors:
    return tuple(_times(leaf, 1.0, e).round_().to(word) for leaf, e, word in zip(x, k, words, strict=True))
