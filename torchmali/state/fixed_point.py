"""The state as integers: what was added can be subtracted again to the last bit.

z is held as the integers nearest to 2^kz z, and v as the integers nearest to 2^kv v. Undamped, both moves add a rounded
function of one to the other, so the inverse move computes the same numbers and takes them away:

    drift    z <- z + round(e 2^(kz - kv) v)          reflect  v <- round(2 2^kv u) - v

kz and kv are numbers for a whole leaf; a leaf that mixes scales has one of each for every element. float32 leaves are
held as int32 (the memory of float32, with 3 bits more than its mantissa for the largest element), float64 leaves as
int64.

Integers overflow silently: loop/fixed_point.py sees to it that their range is not left. A `Shift` changes the
exponents, and what falls off is kept to undo it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchmali.errors import NonFiniteError
from torchmali.state.base import Deviation, RewindableState, Snapshot
from torchmali.state.integers import (
    BITS,
    FINEST,
    MANTISSA,
    WORDS,
    Factor,
    exponent,
    extremes,
    ldexp,
    magnitudes,
    shift,
    single,
    stacked,
    unshift,
)
from torchmali.state.vectors import Tensors

Exponent: TypeAlias = "int | Tensor"  # of a leaf, or int16 of each of its elements
Bits: TypeAlias = "list[int | Tensor]"  # for each leaf of z, then for each leaf of v
MIDDLE, PACKED = {torch.float32: 24, torch.float64: 0}, {torch.float32: torch.int8, torch.float64: torch.int16}
SLACK = 1  # bits by which the largest element may exceed BITS before it gets a coarser grid
FINER = 2  # bits that it may lack before it gets a finer one
# A leaf mixes scales if all elements of a slice lack so many bits of a float's mantissa,
LACKING = 3
# or if more than a share of its elements lack so many, or a single one of n elements 7 + log2(n) / 2: z and v of one
# element are both small by chance beside those of many others, the more likely the more there are.
LACKING_SHARE, SHARE, LACKING_ONE = 6, 1 / 64, 7
N_SIGNS = 5
PERIOD = 8  # steps between two readings of the range; evaluations between two looks at the mixture of scales


class Shift(NamedTuple):
    """A change of exponents: the leaves of z, then of v, are divided by 2^bits and rounded."""

    bits: tuple[int, ...]  # the largest, for leaves whose elements have bits of their own, kept as a tensor
    each: tuple[int, ...] = ()  # those leaves
    fresh: tuple[tuple[int, int], ...] = ()  # those of them that had one exponent before, and that exponent
    from_end: int = 0  # of a shift within a step: the number of moves that came after it


class Seen:
    """What the moves of a step did to the range of the numbers."""

    def __init__(self):
        self.time = 0.0  # for which v moved z
        self.u: list[Tensor] = []  # low and high of 2 u, reflect after reflect, leaf after leaf
        self.v: list[Tensor] = []  # low and high of the new v
        self.moves: list[Tensor] = []  # low and high of what was added to z, for leaves with exponents of elements
        self.last_u: Tensors = ()  # of the last reflect

    def drift(self, e: float, moves: Sequence[Tensor]) -> None:
        self.time += abs(e)
        for move in moves:
            self.moves += extremes(move)

    def reflect(self, u: Tensors, q: Sequence[Tensor]) -> None:
        for x in q:
            self.u += extremes(x)
        self.last_u = u

    def reflected(self, v: Sequence[Tensor]) -> None:
        for x in v:
            self.v += extremes(x)

    def forget_u(self) -> None:
        self.last_u = ()


class Signs(NamedTuple):
    """Numbers by which the exponents of a leaf are judged."""

    z: float  # the largest integer of z
    v: float  # and of v
    point: float  # the largest |z|, in floats
    slope: float  # the largest |v| or |u|
    near_slice: float  # the largest `near` of the slice where that is smallest; zeros do not count
    n_lacking: float  # the number of elements that are small beside others
    smallest: float  # the smallest beside others; for a leaf with exponents of elements, the smallest `far` on its grid

    def far(self, time: float) -> float:
        """The larger of |z| and of what v adds to it in a time: what passes through zero is not small."""
        return max(self.point, self.slope * time)


class FixedPoint(RewindableState):
    """The state as integers. Moves are out of place, each on fresh tensors: a fork is free. z keeps y0's layout.

    log: the shifts that careful moves have made room with, each with the number of moves before it; None: moves are not
    careful. pending: shifts within the step that is being undone. given: the floats that v was made of. time: of a
    few steps, for the first v.
    """

    __slots__ = (
        "_factors",
        "_moves_of_z",
        "given",
        "kv",
        "kz",
        "log",
        "n_moves",
        "pending",
        "reals",
        "seen",
        "started",
        "time",
        "v",
        "z",
    )

    def __init__(
        self,
        z: Tensors,
        v: Tensors,
        kz: tuple[Exponent, ...],
        kv: tuple[Exponent, ...],
        reals: tuple[torch.dtype, ...],
        seen: Seen | None = None,
        log: list[tuple[int, Shift, Snapshot]] | None = None,
        pending: tuple[tuple[Shift, Snapshot], ...] = (),
        given: Tensors = (),
        time: float = 1.0,
    ):
        self.z, self.v, self.kz, self.kv, self.reals = z, v, kz, kv, reals
        self.seen, self.log, self.pending, self.given, self.time, self.n_moves = seen, log, pending, given, time, 0
        # What v adds to each leaf of z in a time: a step ends with the move with which the next one begins.
        self._moves_of_z: tuple[float, list[Tensor]] | None = None
        self._factors: Factors | None = None
        self.started: list[Seen] | None = None

    @classmethod
    def of(cls, z: Tensors) -> FixedPoint:
        return FixedPointArithmetic(1.0).of(z)

    def started_at(self, z: Tensors) -> FixedPoint:
        return FixedPoint(quantised(z, self.kz, self.words), (), self.kz, self.kv, self.reals)

    def with_slope(self, v: Tensors) -> FixedPoint:
        kv = self.kv or self._exponents_of_slope(v)
        return FixedPoint(self.z, quantised(v, kv, self.words), self.kz, kv, self.reals, given=v)

    def _exponents_of_slope(self, v: Tensors) -> tuple[Exponent, ...]:
        """Exponents for the first v. What is zero has the scale on which it would move z. One host read."""
        found: list[Exponent] = [*exponents_of(v, self.words)]
        for i, kz in enumerate(self.kz):
            finest, word = FINEST[self.reals[i]], self.z[i].dtype
            if isinstance(kz, Tensor):
                point = self.factors.point[i].times(self.z[i]).abs_()
                found[i] = exponents_of_elements(v[i], point / self.time, word, finest)
            elif found[i] == finest:
                found[i] = min(finest, kz + math.frexp(self.time)[1])
        return tuple(found)

    @property
    def words(self) -> list[torch.dtype]:
        return [x.dtype for x in self.z]

    @property
    def factors(self) -> Factors:
        self._factors = self._factors or Factors(self)
        return self._factors

    @property
    def point(self) -> Tensors:
        return tuple(map(Factor.times, self.factors.point, self.z))

    @property
    def slope(self) -> Tensors:
        return tuple(map(Factor.times, self.factors.slope, self.v))

    def fork(self) -> FixedPoint:
        log, seen = None if self.log is None else [], Seen()
        if self.started is not None:
            self.started[:] = [seen]
        fork = FixedPoint(self.z, self.v, self.kz, self.kv, self.reals, seen, log, self.pending)
        fork._moves_of_z, fork._factors = self._moves_of_z, self._factors
        return fork

    def seen_by(self, started: list[Seen]) -> FixedPoint:
        """This state, whose forks leave what their moves see in a list: a step may fail."""
        self.started = started
        return self

    def careful(self) -> FixedPoint:
        """This state, with moves that make room for their results. They wait for the device."""
        return FixedPoint(self.z, self.v, self.kz, self.kv, self.reals, log=[])

    def settled(self) -> FixedPoint:
        """This state, with moves that are not careful."""
        return FixedPoint(self.z, self.v, self.kz, self.kv, self.reals)

    def drift(self, e: float) -> FixedPoint:
        if self.log is not None:
            self._make_space([self._need_of_drift(i, e) for i in range(len(self.z))], None)
        moves = self._moves(abs(e))
        self.z = tuple(map(torch.add if e >= 0 else torch.sub, self.z, moves))  # z first: it gives the layout
        if self.seen is not None:
            each = self.factors.each  # leaves with exponents of elements
            self.seen.drift(e, [moves[i] for i in each] if each else ())
        self._moved()
        return self

    def _moves(self, time: float) -> list[Tensor]:
        """What v adds to each leaf of z in a time."""
        factors = self.factors
        if factors.are_single:
            time = single(time)  # times of steps differ in their last bits: the same move for all of them
        if self._moves_of_z is None or self._moves_of_z[0] != time:
            self._moves_of_z = time, list(map(_move, factors.of_drift(time), self.v))
        return self._moves_of_z[1]

    def reflect(self, u: Tensors, eta: float) -> FixedPoint:
        assert eta == 1
        if self.log is not None:
            self._make_space(None, [self._need_of_reflect(i, x) for i, x in enumerate(u)])
        q = list(map(Factor.times, self.factors.reflect, u))
        if self.seen is not None:
            self.seen.reflect(u, q)
        self.v = tuple(map(_turned, q, self.v))
        if self.seen is not None:
            self.seen.reflected(self.v)
        self._moves_of_z = None
        self._moved()
        return self

    def _moved(self) -> None:
        """Count a move, and undo the shifts that came before it when it was made."""
        self.n_moves += 1
        if not self.pending:
            return
        while self.pending and self.pending[0][0].from_end == self.n_moves:
            (change, lost), *rest = self.pending
            self._become(self.unscaled(change._replace(from_end=0), lost))
            self.pending = tuple(rest)

    def _become(self, other: FixedPoint) -> None:
        self.z, self.v, self.kz, self.kv = other.z, other.v, other.kz, other.kv
        self._moves_of_z = self._factors = None

    # Room for the results of careful moves.

    def _need_of_drift(self, i: int, e: float) -> Tensor:
        """Bits by which each element of leaf i of z has to become coarser for z + e v to be no larger than BITS."""
        real = self.reals[i]
        move = self.factors.of_drift(abs(e))[i].times(self.v[i])
        total = self.z[i].type(real) + (move if e >= 0 else -move)
        # If that is too large for a float, by its exponent alone.
        apart: Any = self.kz[i] - self.kv[i]
        limit = exponent(self.v[i]) + apart + math.frexp(abs(e))[1]
        return torch.where(total.isfinite(), exponent(total), limit) - BITS[self.z[i].dtype]

    def _need_of_reflect(self, i: int, u: Tensor) -> Tensor:
        """Bits by which each element of leaf i of v has to become coarser for 2 u - v to be no larger than BITS."""
        if not bool(torch.isfinite(u).all()):
            raise NonFiniteError(f"Non-finite values in leaf {i} of f(t, y).")
        q = self.factors.reflect[i].times(u)
        total = torch.maximum(q.abs(), (q - self.v[i]).abs())
        return torch.where(total.isfinite(), exponent(total), exponent(u) + 1 + self.kv[i]) - BITS[self.v[i].dtype]

    def _make_space(self, of_z: Sequence[Tensor] | None, of_v: Sequence[Tensor] | None) -> None:
        needs = of_z if of_z is not None else of_v
        assert needs is not None
        bits = self._bits(needs, self.kz if of_z is not None else self.kv)
        if bits is None:
            return
        none = self._no_bits()
        state, change, lost = self.rescaled([*bits, *none] if of_z is not None else [*none, *bits])
        assert self.log is not None
        self.log.append((self.n_moves, change, lost))
        self._become(state)

    def _bits(self, needs: Sequence[Tensor], exponents: Sequence[Exponent]) -> Bits | None:
        """Bits by which leaves become coarser, if their elements need it. One host read."""
        most = _largest(needs)
        if max(most, default=0) <= SLACK:
            return None
        bits: Bits = []
        for i, (need, m) in enumerate(zip(needs, most, strict=True)):
            is_one = isinstance(exponents[i], int)
            if m <= SLACK:
                bits.append(0 if is_one else torch.zeros_like(need))
            elif is_one and (m <= self._spare(i) or need.numel() == 1):
                bits.append(int(m))
            else:
                bits.append(torch.where(need > SLACK, need, 0))
        return bits

    def _no_bits(self) -> Bits:
        return [0 if isinstance(k, int) else torch.zeros_like(k) for k in self.kz]

    def bits_for_slope(self, v: Tensors) -> Bits | None:
        """Bits by which leaves have to become coarser for another v; None: it fits. One host read."""
        needs = [exponent(x) + k - BITS[z.dtype] for x, k, z in zip(v, self.kv, self.z, strict=True)]
        bits = self._bits(needs, self.kv)
        return None if bits is None else [*self._no_bits(), *bits]

    def inner_shifts(self) -> list[tuple[Shift, Snapshot]]:
        """The shifts within the step that led here."""
        return [(change._replace(from_end=self.n_moves - n), lost) for n, change, lost in self.log or ()]

    def _spare(self, i: int) -> int:
        """Bits of the largest element beyond a float's mantissa."""
        return BITS[self.z[i].dtype] - MANTISSA[self.reals[i]]

    # Exponents that suit the numbers.

    def signs(self, i: int, time: float) -> Tensor:
        """The numbers of `Signs` for leaf i but the first two. time: for which v moves z before the next look."""
        point, slope = self.sizes(i)
        return signs_of(point, slope, time, self.grid(i, time), self._spare(i))

    def sizes(self, i: int) -> tuple[Tensor, Tensor]:
        """|z|, and the larger of |v| and |u| of the last reflect: of each element of leaf i, in floats.

        u is not rounded: an element may be zero on the grid, and move.
        """
        slope = self.factors.slope[i].times(self.v[i]).abs_()
        if self.seen is not None and self.seen.last_u:
            slope = torch.maximum(slope, self.seen.last_u[i].abs())
        return self.factors.point[i].times(self.z[i]).abs_(), slope

    def grid(self, i: int, time: float) -> Tensor | None:
        """The exponent of the coarser of both grids of each element, for J; None: there is one for the leaf."""
        kz, kv = self.kz[i], self.kv[i]
        if isinstance(kz, int) or isinstance(kv, int):
            return None
        return torch.minimum(kz.int(), kv.int() - math.frexp(time)[1])

    def mixed(self, signs: Sequence[Signs], time: float) -> list[int]:
        """Leaves that mix scales and have one exponent."""
        sizes = [z.numel() if isinstance(k, int) else 0 for k, z in zip(self.kz, self.z, strict=True)]
        return [i for i, n in enumerate(sizes) if n > 1 and is_mixed(signs[i], time, self._spare(i), n)]

    def adjustment(self, signs: Sequence[Signs], time: float, fresh: Sequence[int] = ()) -> Bits | None:
        """Bits by which leaves should become coarser (negative: finer); None: they may stay.

        fresh: leaves that get exponents for their elements.
        """
        of_z: Bits = []
        of_v: Bits = []
        changes = False
        for i, found in enumerate(signs):
            kz, kv = self.kz[i], self.kv[i]
            if isinstance(kz, int) and isinstance(kv, int) and i not in fresh:
                of_z.append(self._bits_of_leaf(i, found.z, found.far(time), kz))
                of_v.append(self._bits_of_leaf(i, found.v, found.far(time) / time, kv))
                changes = changes or of_z[-1] != 0 or of_v[-1] != 0
            elif i in fresh or self._is_unsuited(i, found):
                point, slope = self.sizes(i)
                far = torch.maximum(point, slope * time)
                of_z.append(self._bits_of_elements(i, self.z[i], far, kz))
                of_v.append(self._bits_of_elements(i, self.v[i], far / time, kv))
                changes = True
            else:
                of_z.append(torch.zeros_like(self.z[i], dtype=torch.int16))
                of_v.append(torch.zeros_like(self.z[i], dtype=torch.int16))
        return [*of_z, *of_v] if changes else None

    def _bits_of_leaf(self, i: int, largest: float, joint: float, k: int) -> int:
        word, real = self.z[i].dtype, self.reals[i]
        excess = _excess(largest, word)
        if excess > SLACK:
            return excess
        excess = _excess(ldexp(joint, k), word)
        return max(excess, k - FINEST[real]) if joint and excess < -FINER else max(0, k - FINEST[real])

    def _is_unsuited(self, i: int, signs: Signs) -> bool:
        word = self.z[i].dtype
        is_large = max(_excess(signs.z, word), _excess(signs.v, word)) > SLACK
        return is_large or signs.smallest < 2.0 ** (BITS[word] - FINER)

    def _bits_of_elements(self, i: int, x: Tensor, joint: Tensor, k: Exponent) -> Tensor:
        """Bits for each element: none for those that are neither too large nor lack any."""
        word, real = self.z[i].dtype, self.reals[i]
        large, small = exponent(x) - BITS[word], exponent(joint) + k - BITS[word]
        bits = torch.where(small < -FINER, small, 0)
        bits = torch.where(large > SLACK, large, bits)
        finest: Any = k - FINEST[real]
        return torch.maximum(bits, torch.as_tensor(finest, dtype=bits.dtype, device=bits.device))

    def rescaled(self, bits: Sequence[int | Tensor]) -> tuple[FixedPoint, Shift, Snapshot]:
        """The state with other exponents, the change, and what is needed to undo it. bits: of z, then of v."""
        most = iter(_largest([b for b in bits if isinstance(b, Tensor)]))
        tensors, exponents, kept, numbers = [], [], [], []
        for x, k, b in zip((*self.z, *self.v), (*self.kz, *self.kv), bits, strict=True):
            largest = int(next(most)) if isinstance(b, Tensor) else b
            shifted = shift(x, b, largest)
            tensors.append(shifted.x)
            numbers.append(largest)
            kept += [] if shifted.lost is None else [shifted.lost]
            kept += [b.to(torch.int16)] if isinstance(b, Tensor) else []
            exponents.append((k - b).to(torch.int16) if isinstance(b, Tensor) else k - b)
        each = tuple(j for j, b in enumerate(bits) if isinstance(b, Tensor))
        fresh = tuple((j, k) for j in each if isinstance(k := (*self.kz, *self.kv)[j], int))
        return self._with(tensors, exponents), Shift(tuple(numbers), each, fresh), Snapshot(tuple(kept), None)

    def unscaled(self, change: Shift, lost: Snapshot) -> FixedPoint:
        """`rescaled` undone. A shift within a step waits for the moves that came after it to be undone."""
        if change.from_end:
            pending = (*self.pending, (change, lost))
            return FixedPoint(self.z, self.v, self.kz, self.kv, self.reals, pending=pending)
        tensors, exponents = [*self.z, *self.v], [*self.kz, *self.kv]
        kept, before = list(lost.tensors), dict(change.fresh)
        for j in reversed(range(len(tensors))):
            b: Any = kept.pop() if j in change.each else change.bits[j]
            tensors[j] = unshift(tensors[j], b, kept.pop() if change.bits[j] > 0 else None)
            k: Any = exponents[j] + b
            exponents[j] = before.get(j, k.to(torch.int16) if isinstance(k, Tensor) else k)
        return self._with(tensors, exponents)

    def _with(self, tensors: Sequence[Tensor], exponents: Sequence[Exponent]) -> FixedPoint:
        n = len(self.z)
        kz, kv = tuple(exponents[:n]), tuple(exponents[n:])
        return FixedPoint(tuple(tensors[:n]), tuple(tensors[n:]), kz, kv, self.reals)

    # Snapshots.

    def snapshot(self) -> Snapshot:
        exponents = zip((*self.kz, *self.kv), self.reals * 2, strict=False)
        packed = [(k - MIDDLE[real]).to(PACKED[real]) for k, real in exponents if isinstance(k, Tensor)]
        return Snapshot((*self.z, *self.v, *packed), self._form(len(self.z)))

    def snapshot_before_refresh(self) -> Snapshot:
        return Snapshot(self.v, self._form(0))  # z is rebuilt to the bit

    def _form(self, n: int) -> FixedPointForm:
        numbers = tuple(None if isinstance(k, Tensor) else k for k in (*self.kz, *self.kv))
        return FixedPointForm(n, numbers, self.reals)

    @classmethod
    def restore(cls, kept: Snapshot) -> FixedPoint:
        n, numbers, reals = kept.form
        packed = iter(kept.tensors[2 * n :])
        pairs = zip(numbers, reals * 2, strict=False)
        exponents = tuple(next(packed).to(torch.int16) + MIDDLE[real] if k is None else k for k, real in pairs)
        return cls(kept.tensors[:n], kept.tensors[n : 2 * n], exponents[:n], exponents[n:], reals)

    def rebuilt_with(self, kept: Snapshot) -> FixedPoint:
        if kept.form.n:
            return self.restore(kept)
        return FixedPoint(self.z, kept.tensors, self.kz, self.kv, self.reals)

    def deviation(
        self, truth: FixedPoint, end: FixedPoint, span: float, limits: tuple[float, float] = (0.0, 0.0)
    ) -> Deviation:
        """0 if all bits agree, of z and of v, else infinite."""
        mine, other = self.snapshot(), truth.snapshot()
        agree = mine.form == other.form
        if agree:
            differ = [(x != y).any() for x, y in zip(mine.tensors, other.tensors, strict=True)]
            agree = not bool(torch.stack(differ).any())  # the one host read
        return Deviation(*[0.0 if agree else math.inf] * 4)


def _move(factor: Factor, v: Tensor) -> Tensor:
    """What v adds to z, rounded."""
    return factor.times(v).round_().type(v.dtype)


def _turned(q: Tensor, v: Tensor) -> Tensor:
    """round(q) - v, which overwrites q."""
    return q.round_().type(v.dtype).sub_(v)


class FixedPointForm(NamedTuple):
    """What a FixedPoint is beside its tensors."""

    n: int  # leaves; 0 if z is not among the tensors
    exponents: tuple[int | None, ...]  # of z, then of v; None: a tensor
    reals: tuple[torch.dtype, ...]


class Factors:
    """The factors of the moves of a FixedPoint, for each leaf."""

    def __init__(self, state: FixedPoint):
        kinds = list(zip(state.z, state.reals, strict=True))
        self.point = [Factor(x, real, 1.0, -k) for (x, real), k in zip(kinds, state.kz, strict=True)]
        self.slope = [Factor(x, real, 1.0, -k) for (x, real), k in zip(kinds, state.kv, strict=False)]
        self.reflect = [Factor(x, real, 1.0, k + 1) for (x, real), k in zip(kinds, state.kv, strict=False)]
        self.are_single = torch.float64 not in state.reals
        self.each = [i for i, k in enumerate(state.kz) if isinstance(k, Tensor)]
        self.apart = [(x, real, kz - kv) for (x, real), kz, kv in zip(kinds, state.kz, state.kv, strict=False)]
        self.drifts: tuple[float, list[Factor]] = -1.0, []

    def of_drift(self, time: float) -> list[Factor]:
        """e 2^(kz - kv) for each leaf; the last ones are kept."""
        if self.drifts[0] != time:
            factors = [Factor(x, real, time if real is torch.float64 else single(time), k) for x, real, k in self.apart]
            self.drifts = time, factors
        return self.drifts[1]


def _largest(x: Sequence[Tensor]) -> list[float]:
    """The largest element of each tensor, in one host read."""
    if not x:
        return []
    return stacked([y.amax() if y.numel() else y.new_zeros(()) for y in x], torch.float32).tolist()


def _excess(size: float, word: torch.dtype) -> int:
    """Bits by which an integer is larger than it would be on a new grid; none for zero."""
    if size == 0 or not math.isfinite(size):
        return 0 if size == 0 else BITS[word]
    return math.frexp(size)[1] - BITS[word]


def signs_of(point: Tensor, slope: Tensor, time: float, grid: Tensor | None, spare: int) -> Tensor:
    """The numbers of `Signs` but the first two, from |z| and |v| of each element. grid: see `FixedPoint.grid`."""
    if not point.numel():
        return point.new_zeros(N_SIGNS)
    of_point, of_slope = point.amax(), slope.amax()
    if grid is not None:
        far = torch.maximum(point, slope * time)
        on_grid = Factor(far, far.dtype, 1.0, grid).times(far)
        smallest = torch.where(on_grid > 0, on_grid, math.inf).amin()
        return torch.stack([of_point, of_slope, of_point, torch.zeros_like(of_point), smallest])
    # With what v adds in one step: a slice that passes through zero is not small.
    near = torch.maximum(point, slope * (time / PERIOD))
    slices = [near.amax([k for k in range(near.ndim) if k != d]) for d, n in enumerate(near.shape) if n > 1]
    slices = [near] if near.ndim == 1 else slices or [near.reshape(1)]
    of_slices = torch.cat(slices) if len(slices) > 1 else slices[0]
    smallest_slice = torch.where(of_slices > 0, of_slices, math.inf).amin()
    # With what v adds until the next look: a single element with a small z and a large v only passes through zero, and
    # one with a small v stays behind where others grow. (A quotient may be too small for a float, but not nan then.)
    far = torch.maximum(point, slope * time)
    relative = torch.where(near > 0, far / far.amax(), 1.0)
    n_lacking = (relative < 2.0 ** -(spare + LACKING_SHARE)).sum().to(point.dtype)
    return torch.stack([of_point, of_slope, smallest_slice, n_lacking, relative.amin()])


def is_mixed(signs: Signs, time: float, spare: int, n: int) -> bool:
    """Whether a leaf of n elements with one exponent mixes scales."""
    return (
        signs.near_slice < 2.0 ** -(spare + LACKING) * signs.far(time / PERIOD)
        or signs.n_lacking > SHARE * n
        or signs.smallest < 2.0 ** -(spare + LACKING_ONE) / math.sqrt(n)
    )


def signs_from(values: Sequence[float], z: Sequence[float], v: Sequence[float]) -> list[Signs]:
    """`Signs` of all leaves, from the values that were read and the largest integers of z and v."""
    return [Signs(a, b, *values[N_SIGNS * i : N_SIGNS * (i + 1)]) for i, (a, b) in enumerate(zip(z, v, strict=True))]


def quantised(x: Sequence[Tensor], exponents: Sequence[Exponent], words: Sequence[torch.dtype]) -> Tensors:
    """round(2^k x) of each leaf."""
    leaves = zip(x, exponents, words, strict=True)
    return tuple(Factor(leaf, leaf.dtype, 1.0, k).times(leaf).round_().to(word) for leaf, k, word in leaves)


def exponents_of(x: Tensors, words: Sequence[torch.dtype]) -> tuple[int, ...]:
    """One exponent for each leaf. One host read."""
    widest = max((leaf.dtype for leaf in x), key=lambda dtype: dtype.itemsize)
    sizes = magnitudes(stacked([end for leaf in x for end in extremes(leaf)], widest).tolist(), len(x))
    if not all(map(math.isfinite, sizes)):
        i = [*map(math.isfinite, sizes)].index(False)
        raise NonFiniteError(f"Non-finite values in leaf {i} of y0 or of f(t, y).")
    return tuple(_exponent_for(size, word, leaf.dtype) for size, word, leaf in zip(sizes, words, x, strict=True))


def _exponent_for(size: float, word: torch.dtype, real: torch.dtype) -> int:
    """The exponent with which a number of this size has BITS bits. Zeros get the finest one: any move shows."""
    return min(FINEST[real], BITS[word] - math.frexp(size)[1]) if size else FINEST[real]


@dataclass(frozen=True, eq=False)
class FixedPointArithmetic:
    """How a solve on integers begins. time: of PERIOD steps. first: size of the first step; 0: it is not known. wide:
    int64 for float32 leaves, too. kz: exponents of z; empty: they are chosen for y0."""

    time: float
    first: float = 0.0
    wide: bool = False
    kz: tuple[Exponent, ...] = ()

    def of(self, z: Tensors) -> FixedPoint:
        words = [torch.int64 if self.wide else WORDS[x.dtype] for x in z]
        kz = self.kz or exponents_of(z, words)
        return FixedPoint(quantised(z, kz, words), (), kz, (), tuple(x.dtype for x in z), time=self.time)

    def suited(self, z: Tensors, first: FixedPoint) -> tuple[FixedPointArithmetic | None, bool]:
        """An arithmetic with which to begin again, if the first state mixes scales or has leaves of zeros that move.

        Of the floats: what is too small for the grid is zero on it. Also whether there are elements at rest in zero,
        whose scale shows when they begin to move. One host read.
        """
        widest, n = max(first.reals, key=lambda dtype: dtype.itemsize), len(z)
        sizes = [(x.abs(), y.abs()) for x, y in zip(z, first.given, strict=True)]
        parts = [signs_of(*pair, self.time, None, first._spare(i)).to(widest) for i, pair in enumerate(sizes)]
        at_rest = [(torch.maximum(*pair) == 0).any().to(widest).reshape(1) for pair in sizes]
        *values, are_at_rest = torch.cat([*parts, torch.cat(at_rest).amax(0, keepdim=True)]).tolist()
        signs = signs_from(values, [0.0] * n, [0.0] * n)
        kz, mixed = list(first.kz), first.mixed(signs, self.time)
        for i, found in enumerate(signs):
            (_, slope), word, real = sizes[i], first.z[i].dtype, first.reals[i]
            if i in mixed:
                kz[i] = exponents_of_elements(z[i], slope * self.first, word, FINEST[real])
            elif found.point == 0:
                kz[i] = _exponent_for(found.slope * self.first, word, real)
        if not mixed and kz == list(first.kz):
            return None, bool(are_at_rest)
        return FixedPointArithmetic(self.time, self.first, self.wide, tuple(kz)), bool(are_at_rest)


def exponents_of_elements(x: Tensor, others: Tensor, word: torch.dtype, finest: int) -> Tensor:
    """Exponents for the elements themselves; for zeros by what they will be."""
    sizes = torch.where(x == 0, others, x)
    return (BITS[word] - exponent(sizes)).clamp(max=finest).to(torch.int16)
