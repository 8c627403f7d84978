"""The state of a solve: a nested structure of tensors kept as a tuple of leaves.

`Structure` takes the user's tree apart and puts it together again. `Floats` and `Traced` are two arithmetics in which
a leapfrog solver moves its augmented state (z, v): in place, or out of place for autograd to follow. A third one, on
integers, lives in grid.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

Tensors: TypeAlias = tuple[Tensor, ...]
Leaves: TypeAlias = "tuple[Tensor, ...] | list[Tensor]"
Time: TypeAlias = "float | Tensor"  # tensors only where autograd follows the times (Naive)
S = TypeVar("S", bound="State")


@dataclass(frozen=True)
class Structure:
    """The shape of a nested tuple, list or dict, without its leaves."""

    spec: pytree.TreeSpec

    @staticmethod
    def of(tree: Any) -> Structure:
        return LEAF if type(tree) is Tensor else Structure(pytree.tree_structure(tree))

    def flatten(self, tree: Any) -> tuple:
        """The leaves of a tree of this structure, dicts in this structure's order; else a ValueError.

        A list may stand for a tuple and a tuple for a list.
        """
        try:
            return tuple(self.spec.flatten_up_to(tree))
        except ValueError:
            wanted = self.rebuild("*" * self.spec.num_leaves)
        try:
            return tuple(_aligned(tree, wanted))
        except ValueError:
            raise ValueError(f"{sketch(tree)} instead of {sketch(wanted)}") from None

    def rebuild(self, leaves: Sequence) -> Any:
        return pytree.tree_unflatten(leaves, self.spec)

    def __reduce__(self) -> tuple:
        return Structure.of, (self.rebuild(range(self.spec.num_leaves)),)  # a spec warns when it is unpickled


LEAF = Structure(pytree.tree_structure(None))


def _aligned(tree: Any, wanted: Any) -> Iterator[Any]:
    """The leaves of a tree in the order of another one."""
    if isinstance(wanted, dict) and isinstance(tree, dict) and wanted.keys() == tree.keys():
        pairs = [(tree[key], wanted[key]) for key in wanted]
    elif isinstance(wanted, (tuple, list)) and isinstance(tree, (tuple, list)) and len(wanted) == len(tree):
        pairs = list(zip(tree, wanted, strict=True))
    elif wanted == "*" and not isinstance(tree, (dict, tuple, list)):
        yield tree
        return
    else:
        raise ValueError
    for pair in pairs:
        yield from _aligned(*pair)


def sketch(tree: Any) -> str:
    """A tree as text, with stars for leaves: {'a': (*, *), 'b': *}."""
    return repr(pytree.tree_map(lambda _: "*", tree)).replace("'*'", "*")


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
        out = torch._foreach_mul(ks[0], numbers[0])
    else:
        out = torch._foreach_add(z, ks[0], alpha=numbers[0])
    for w, k in zip(numbers[1:], ks[1:], strict=True):
        torch._foreach_add_(out, k, alpha=w)
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


class Memento(NamedTuple):
    """A state put away: its tensors, and whatever else is needed to bring it back."""

    tensors: Tensors
    form: Any


class Drift(NamedTuple):
    """How far a rebuilt state is from the one that was there, relative to its scale.

    The scale of a component is the larger of |z| and of the change that v makes of it, so that a component which passes
    through zero is judged by how far it moves. One without a scale has that of its row.
    """

    component: float  # the worst one, on its own scale: a large component hides nothing
    most: float  # the share of the components of a row that are beyond a first limit, of the worst row
    some: float  # the share of the components of a leaf that are beyond a second one, of the worst leaf
    row: float  # the worst component, on the scale of the largest in its row


class Fit(NamedTuple):
    """How the numbers of the latest steps fit the range of a bounded state."""

    misfit: Any = None  # why they do not: then nothing of them can be trusted
    changes: Sequence[Any] = ()  # of the grid, for `rescaled`, before the next step


FITS = Fit()


class State(ABC):
    """The augmented state (z, v) and its moves. A move may work in place: `fork` first, go on with what it returns.

    Solvers other than leapfrogs have no v, or keep something else there.
    """

    __slots__ = ()
    is_bounded: ClassVar[bool] = False  # its numbers are integers, whose range has to be watched (Grid)
    point: Tensors  # z
    slope: Tensors  # v

    @classmethod
    @abstractmethod
    def of(cls: type[S], z: Tensors) -> S:
        """A state at z, without v."""

    def begun_at(self: S, z: Tensors) -> S:
        """The state without v at the beginning of the solve that led here."""
        return self.of(z)

    @abstractmethod
    def with_slope(self: S, v: Tensors) -> S:
        """This z with another v."""

    @abstractmethod
    def fork(self: S) -> S:
        """A state whose moves leave this one alone."""

    @abstractmethod
    def drift(self: S, e: Any) -> S:
        """z <- z + e v"""

    @abstractmethod
    def reflect(self: S, u: Tensors, eta: float) -> S:
        """v <- v + 2 eta (u - v)"""

    def unreflect(self: S, u: Tensors, eta: float) -> S:
        """v <- (v - 2 eta u) / (1 - 2 eta), which is a reflect with another eta."""
        return self.reflect(u, eta / (2 * eta - 1))

    def put_away(self) -> Memento:
        return Memento((*self.point, *self.slope), len(self.point))

    def put_away_before_refresh(self) -> Memento:
        """What `back_to` needs where v is renewed and z stays."""
        return self.put_away()

    def range(self) -> Any:
        """What watches over the range of the numbers in one solve (grid.Range); None: floats need nobody."""
        return None

    def begins_again(self) -> Any:
        """An arithmetic with which to begin the solve anew, where this first state asks for it."""
        return None

    def rescaled(self: S, change: Any) -> tuple[S, Memento]:
        """On another scale, and what fell off."""
        raise AssertionError("floats are not bounded")

    def unscaled(self: S, change: Any, lost: Memento) -> S:
        """`rescaled` undone."""
        raise AssertionError("floats are not bounded")

    @classmethod
    @abstractmethod
    def restore(cls: type[S], kept: Memento) -> S:
        """The state that was put away."""

    def back_to(self: S, kept: Memento) -> S:
        """The state that was put away where this one, rebuilt, is again."""
        return self.restore(kept)

    @abstractmethod
    def distance(self: S, truth: S, end: S, span: float, limits: tuple[float, float] = (0.0, 0.0)) -> Drift:
        """How far (z, v) is from the truth, where v counts as a change of z by span v. limits: those of `Drift`."""


class Floats(State):
    """Moves in place; the first one after `fork` is at the same time the copy."""

    __slots__ = ("owns_point", "owns_slope", "point", "slope")

    def __init__(self, point: Tensors, slope: Tensors = ()):
        self.point, self.slope = point, slope
        self.owns_point = self.owns_slope = False

    @classmethod
    def of(cls, z: Tensors) -> Floats:
        return cls(z)

    def with_slope(self, v: Tensors) -> Floats:
        return Floats(self.point, v)

    def fork(self) -> Floats:
        return Floats(self.point, self.slope)

    def drift(self, e: float) -> Floats:
        if self.owns_point:
            add_(self.point, self.slope, e)
        else:
            self.point, self.owns_point = added(self.point, self.slope, e), True
        return self

    def reflect(self, u: Tensors, eta: float) -> Floats:
        if self.owns_slope:
            torch._foreach_lerp_(self.slope, u, 2 * eta)
        else:
            self.slope, self.owns_slope = tuple(torch._foreach_lerp(self.slope, u, 2 * eta)), True
        return self

    @classmethod
    def restore(cls, kept: Memento) -> Floats:
        return cls(kept.tensors[: kept.form], kept.tensors[kept.form :])

    def distance(self, truth: Floats, end: Floats, span: float, limits: tuple[float, float] = (0.0, 0.0)) -> Drift:
        leaves = [i for i, z in enumerate(self.point) if z.numel()]
        if not leaves:
            return Drift(0.0, 0.0, 0.0, 0.0)
        drift = _worst([self._drift(truth, i, span, limits) for i in leaves])
        if not all(map(math.isfinite, drift)):  # perhaps of a component without a scale: 0 / 0, or more / 0
            drift = _worst([self._drift(truth, i, span, limits, end) for i in leaves])
        return Drift(*(math.inf if math.isnan(x) else x for x in drift))

    def _drift(
        self, truth: Floats, i: int, span: float, limits: tuple[float, float], end: Floats | None = None
    ) -> Tensor:
        """The four numbers of a Drift, for leaf i.

        end: to give a scale to components that have none; without it they make nan or infinity.
        """
        size = rows(truth._size(i, span))
        largest = size.amax(1, keepdim=True)
        if end is not None:
            other = rows(end._size(i, span)).amax(1, keepdim=True)
            largest = torch.where(largest > 0, largest, torch.where(other > 0, other, 1.0))
            size = torch.where(size > 0, size, largest)
        off = rows(self._off(truth, i, span))
        of_row = (off.amax(1, keepdim=True) / largest).amax()
        relative = off.div_(size)
        most, some = (~(relative <= limit) for limit in limits)  # nan counts
        shares = most.sum(1).amax() / most.shape[1], some.sum() / some.numel()
        return torch.stack([relative.amax(), *[share.to(of_row) for share in shares], of_row])

    def _size(self, i: int, span: float) -> Tensor:
        """The scale of each component of leaf i."""
        size = self.point[i].abs()
        return torch.maximum(size, self.slope[i].abs().mul_(span), out=size) if self.slope else size

    def _off(self, truth: Floats, i: int, span: float) -> Tensor:
        """By how much each component of leaf i is off."""
        off = (self.point[i] - truth.point[i]).abs_()
        if not self.slope:
            return off
        return torch.maximum(off, (self.slope[i] - truth.slope[i]).abs_().mul_(span), out=off)


def _worst(x: Sequence[Tensor]) -> list[float]:
    """The largest elements of vectors of the same length, in one host read."""
    return (x[0] if len(x) == 1 else torch.stack([part.to(x[0]) for part in x]).amax(0)).tolist()


class Traced(State):
    """Moves out of place, so that autograd can follow them; times may be tensors. Never walked back."""

    __slots__ = ("point", "slope")

    def __init__(self, point: Tensors, slope: Tensors = ()):
        self.point, self.slope = point, slope

    @classmethod
    def of(cls, z: Tensors) -> Traced:
        return cls(z)

    def with_slope(self, v: Tensors) -> Traced:
        return Traced(self.point, v)

    def fork(self) -> Traced:
        return self

    def drift(self, e: Time) -> Traced:
        return Traced(combine(self.point, (e,), (self.slope,)), self.slope)

    def reflect(self, u: Tensors, eta: float) -> Traced:
        return Traced(self.point, tuple(torch._foreach_lerp(self.slope, u, 2 * eta)))

    @classmethod
    def restore(cls, kept: Memento) -> Traced:
        raise AssertionError("autograd goes back over these")

    def distance(self, truth: Traced, end: Traced, span: float, limits: tuple[float, float] = (0.0, 0.0)) -> Drift:
        raise AssertionError("autograd goes back over these")


def added(x: Leaves, y: Leaves, alpha: float) -> Tensors:
    """x + alpha y. The plain call is cheaper than a foreach over one small leaf."""
    if len(x) == 1:
        return (x[0].add(y[0], alpha=alpha),)
    return tuple(torch._foreach_add(x, y, alpha=alpha))


def add_(x: Leaves, y: Leaves, alpha: float) -> None:
    """x += alpha y"""
    if len(x) == 1:
        x[0].add_(y[0], alpha=alpha)
    else:
        torch._foreach_add_(x, y, alpha=alpha)


def scale_(x: Leaves, factor: float) -> None:
    """x *= factor. A change of sign is cheaper than a product with a number."""
    if factor == -1:
        torch._foreach_neg_(x)
    else:
        torch._foreach_mul_(x, factor)


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
