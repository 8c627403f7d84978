"""The structure of a nested tuple, list or dict of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchmali._torch import TreeSpec, tree_map, tree_structure, tree_unflatten


@dataclass(frozen=True)
class Structure:
    """The shape of a nested tuple, list or dict, without its leaves."""

    spec: TreeSpec

    @staticmethod
    def of(tree: Any) -> Structure:
        return LEAF if isinstance(tree, Tensor) else Structure(tree_structure(tree))

    def flatten(self, tree: Any) -> tuple:
        """Return the leaves of a tree of this structure, dicts in this structure's order; raise ValueError for another.

        A list may stand for a tuple and a tuple for a list.
        """
        if self is LEAF:
            return (tree,)
        try:
            return tuple(self.spec.flatten_up_to(tree))
        except ValueError:
            wanted = self.rebuild("*" * self.spec.num_leaves)
        try:
            return tuple(_aligned(tree, wanted))
        except ValueError:
            raise ValueError(f"{sketch(tree)} instead of {sketch(wanted)}") from None

    def rebuild(self, leaves: Sequence) -> Any:
        if self is LEAF:
            (tree,) = leaves
            return tree
        return tree_unflatten(leaves, self.spec)

    def __reduce__(self) -> tuple:
        return Structure.of, (self.rebuild(range(self.spec.num_leaves)),)  # a spec warns when it is unpickled


LEAF = Structure(tree_structure(None))


def _aligned(tree: Any, wanted: Any) -> Iterator[Any]:
    """Yield the leaves of a tree in the order of those of `wanted`."""
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
    """Return a tree as text, with stars for leaves: {'a': (*, *), 'b': *}."""
    return repr(tree_map(lambda _: "*", tree)).replace("'*'", "*")
