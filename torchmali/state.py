"""The state of a solve: a nested structure of tensors kept as a tuple of leaves.

`Structure` takes the user's tree apart and puts it together again. `Floats` and `Traced` are the
two arithmetics in which a leapfrog solver moves its augmented state (z, v): in place, or out of
place for autograd to follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

Tensors: TypeAlias = tuple[Tensor, ...]
Leaves: TypeAlias = "tuple[Tensor, ...] | list[Tensor]"
Time: TypeAlias = "float | Tensor"  # tensors only where autograd follows the times (Naive)
S = TypeVar("S", bound="State")


class StructureMismatch(Exception):
    """Two trees differ; the message says where. Callers turn it into an error of their own."""


@dataclass(frozen=True)
class Structure:
    """The shape of a nested tuple, list, named tuple or dict, without its leaves."""

    kind: type | None  # None: a leaf
    keys: tuple = ()
    children: tuple[Structure, ...] = ()

    @staticmethod
    def of(tree: Any) -> Structure:
        if isinstance(tree, dict):
            return Structure(type(tree), tuple(tree), tuple(map(Structure.of, tree.values())))
        if isinstance(tree, (tuple, list)):
            return Structure(type(tree), (), tuple(map(Structure.of, tree)))
        return Structure(None)

    @property
    def n_leaves(self) -> int:
        return 1 if self.kind is None else sum(child.n_leaves for child in self.children)

    def flatten(self, tree: Any) -> tuple:
        """The leaves of a tree of this structure; dicts are read in this structure's order of
        keys.
        """
        if self.kind is None:
            return (tree,)
        leaves: list = []
        self._collect(tree, "", leaves)
        return tuple(leaves)

    def _collect(self, tree: Any, path: str, leaves: list) -> None:
        if self.kind is None:
            if isinstance(tree, (tuple, list, dict)):
                raise StructureMismatch(
                    f"a {type(tree).__name__} instead of a leaf at {path or 'top'}"
                )
            leaves.append(tree)
        elif issubclass(self.kind, dict):
            if not isinstance(tree, dict) or set(tree) != set(self.keys):
                found = (
                    f"keys {list(tree)}" if isinstance(tree, dict) else f"a {type(tree).__name__}"
                )
                raise StructureMismatch(
                    f"{found} instead of keys {list(self.keys)} at {path or 'top'}"
                )
            for key, child in zip(self.keys, self.children, strict=True):
                child._collect(tree[key], f"{path}[{key!r}]", leaves)
        else:
            if not isinstance(tree, (tuple, list)) or len(tree) != len(self.children):
                found = type(tree).__name__
                found += f" of {len(tree)}" if isinstance(tree, (tuple, list)) else ""
                raise StructureMismatch(
                    f"a {found} instead of a {self.kind.__name__} of {len(self.children)} at "
                    f"{path or 'top'}"
                )
            for i, (child, part) in enumerate(zip(self.children, tree, strict=True)):
                child._collect(part, f"{path}[{i}]", leaves)

    def rebuild(self, leaves: Sequence) -> Any:
        return leaves[0] if self.kind is None else self._build(iter(leaves))

    def _build(self, leaves) -> Any:
        if self.kind is None:
            return next(leaves)
        children = [child._build(leaves) for child in self.children]
        if issubclass(self.kind, dict):
            pairs = dict(zip(self.keys, children, strict=True))
            return pairs if self.kind is dict else self.kind(pairs)
        return self.kind(*children) if hasattr(self.kind, "_fields") else self.kind(children)


def combine(z: Tensors | None, weights: Sequence[Any], ks: Sequence[Tensors]) -> Tensors:
    """z + sum of weight * k, leaf by leaf (z=None: the sum alone)."""
    if isinstance(weights[0], Tensor):
        total = z
        for w, k in zip(weights, ks, strict=True):
            moved = tuple(scaled(x, w) for x in k)
            total = (
                moved if total is None else tuple(a + b for a, b in zip(total, moved, strict=True))
            )
        assert total is not None
        return total
    if z is None:
        out = torch._foreach_mul(ks[0], weights[0])
    else:
        out = torch._foreach_add(z, ks[0], alpha=weights[0])
    for w, k in zip(weights[1:], ks[1:], strict=True):
        torch._foreach_add_(out, k, alpha=w)
    return tuple(out)


def scaled(x: Tensor, e: Time) -> Tensor:
    """e x in x's own dtype (a 0-d x would be promoted by a float64 e)."""
    return (e * x).to(x.dtype)


def number(t: Time) -> float:
    """A time as a plain float, for decisions: what is decided is not differentiated."""
    return t.item() if isinstance(t, Tensor) else t


class State(Protocol):
    """The augmented state and its moves. A move may work in place: go on with what it returns, and
    `fork` first.
    """

    point: Tensors  # z
    slope: Tensors  # v; empty for solvers that carry none

    def fork(self: S) -> S: ...
    def drift(self: S, e: Any) -> S: ...
    def reflect(self: S, u: Tensors, eta: float) -> S: ...
    def unreflect(self: S, u: Tensors, eta: float) -> S: ...


Arithmetic: TypeAlias = Callable[[Tensors, Tensors], State]


class Floats:
    """z and v as float tensors. Moves work in place; the first one after `fork` is at the same time
    the copy.
    """

    __slots__ = ("point", "slope", "owns_point", "owns_slope")

    def __init__(self, point: Tensors, slope: Tensors = ()):
        self.point, self.slope = point, slope
        self.owns_point = self.owns_slope = False

    def fork(self) -> Floats:
        return Floats(self.point, self.slope)

    def drift(self, e: float) -> Floats:
        """z <- z + e v"""
        if self.owns_point:
            add_(self.point, self.slope, e)
        else:
            self.point, self.owns_point = (
                tuple(torch._foreach_add(self.point, self.slope, alpha=e)),
                True,
            )
        return self

    def reflect(self, u: Tensors, eta: float) -> Floats:
        """v <- v + 2 eta (u - v)"""
        if self.owns_slope:
            torch._foreach_lerp_(self.slope, u, 2 * eta)
        else:
            self.slope, self.owns_slope = tuple(torch._foreach_lerp(self.slope, u, 2 * eta)), True
        return self

    def unreflect(self, u: Tensors, eta: float) -> Floats:
        """v <- (v - 2 eta u) / (1 - 2 eta), as v + w (u - v)"""
        return self.reflect(u, eta / (2 * eta - 1))


class Traced:
    """The same moves out of place, so that autograd can follow them; times may be tensors."""

    __slots__ = ("point", "slope")

    def __init__(self, point: Tensors, slope: Tensors = ()):
        self.point, self.slope = point, slope

    def fork(self) -> Traced:
        return self

    def drift(self, e: Time) -> Traced:
        return Traced(combine(self.point, (e,), (self.slope,)), self.slope)

    def reflect(self, u: Tensors, eta: float) -> Traced:
        return Traced(self.point, tuple(torch._foreach_lerp(self.slope, u, 2 * eta)))

    def unreflect(self, u: Tensors, eta: float) -> Traced:
        return self.reflect(u, eta / (2 * eta - 1))


def add_(x: Leaves, y: Leaves, alpha: float) -> None:
    """x += alpha y. A foreach over one small leaf costs twice what the plain call does."""
    if len(x) == 1:
        x[0].add_(y[0], alpha=alpha)
    else:
        torch._foreach_add_(x, y, alpha=alpha)


def scale_(x: Leaves, factor: float) -> None:
    """x *= factor. A change of sign costs a third of a product with a number."""
    if factor == -1:
        torch._foreach_neg_(x)
    else:
        torch._foreach_mul_(x, factor)


def dot(x: Leaves, y: Leaves) -> Tensor:
    """<x, y> over all leaves, as a 0-d tensor."""
    return torch.stack([(a * b).sum() for a, b in zip(x, y, strict=True)]).sum()


def first_non_finite(x: Leaves) -> int | None:
    """The first leaf with a nan or an infinity. Reads the host once when there is none."""
    finite = [torch.isfinite(leaf).all() for leaf in x]
    if bool(finite[0] if len(finite) == 1 else torch.stack(finite).all()):
        return None
    return next(i for i, leaf_is_finite in enumerate(finite) if not bool(leaf_is_finite))
