"""The leaves in an autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from torchmali._torch import storage_key
from torchmali.state.vectors import Leaves


def forgotten_leaves(u: Leaves, known: Sequence[Tensor]) -> list[Tensor]:
    """Leaves in the graph of u that are not known and not behind something known."""
    followed = [x for x in known if x.requires_grad]
    ids = {id(x) for x in followed}
    unknown = [x for x in u if x.requires_grad and id(x) not in ids]
    if not unknown:
        return []
    found = [x for x in unknown if x.grad_fn is None]
    nodes = [x.grad_fn for x in unknown if x.grad_fn is not None]
    found += _leaves_behind(nodes, {x.grad_fn for x in followed if x.grad_fn is not None})
    if all(id(x) in ids for x in found):
        return []
    # By their nodes: under saved-tensor hooks a saved leaf comes back as another object.
    return _leaves_behind([x.grad_fn or _node(x) for x in unknown], {x.grad_fn or _node(x) for x in followed})


def _leaves_behind(ends: Sequence[Any], stop: set) -> list[Tensor]:
    return [x for x in map(leaf_of, nodes_behind(list(ends), stop)) if x is not None]


def _node(leaf: Tensor) -> Any:
    """The node in which the gradient of a leaf ends."""
    return get_gradient_edge(leaf).node


def nodes_behind(nodes: list, stop: set) -> set:
    """The nodes behind these, and these, but nothing behind `stop`."""
    seen: set = set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen and node not in stop:
            seen.add(node)
            nodes += [parent for parent, _ in node.next_functions]
    return seen


def leaf_of(node: Any) -> Tensor | None:
    return getattr(node, "variable", None)


def shares_storage(x: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether x has its memory in common with one of the others."""
    key = _storage(x)[0]
    return any(_storage(other)[0] == key for other in others)


def saved_bytes(record: Callable[[], None], known: Sequence[Tensor], others: Callable[[], Sequence[Tensor]]) -> int:
    """The bytes of the tensors that the graphs made by `record` hold, and of others, without those that are known.

    Each storage counts once. others: called after `record`. Saved-tensor hooks of the caller do not see these graphs.
    """
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    def unpack(x: Tensor) -> Tensor:
        return x

    with saved_tensors_hooks(pack, unpack):
        record()
    everything = (*saved, *others())
    storages = [*map(_storage, everything), *map(_storage, known)]  # all alive at once, or a key might come back
    sizes = {key: size for key, size, _ in storages[: len(everything)]}
    for key, _, _ in storages[len(everything) :]:
        sizes.pop(key, None)
    return sum(sizes.values())


def _storage(x: Tensor) -> tuple[int, int, Any]:
    """What tells the storage of a tensor from others, its bytes, and the storage itself."""
    try:
        storage = x.untyped_storage()
        return storage_key(storage), storage.nbytes(), storage
    except (NotImplementedError, RuntimeError):  # a layout without one: sparse
        return id(x), x.element_size() * x.numel(), x
