"""Peak memory of a piece of code, in bytes of live tensors: deterministic, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from torchmali._torch import TorchDispatchMode, storage_key


class LiveBytes(TorchDispatchMode):
    """Context that follows the storages made by operations inside it, until they are freed.

    `peak` is the largest sum of bytes that were alive at once. Tensors from before the context do not count.
    """

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()  # addresses; a freed address may be reused by another storage

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._follow(args, is_new=False)
        self._follow(tuple(kwargs.values()), is_new=False)
        result = func(*args, **kwargs)
        self._follow(result, is_new=True)
        return result

    def _follow(self, x: Any, is_new: bool) -> None:
        if isinstance(x, (tuple, list)):
            for part in x:
                self._follow(part, is_new)
        if not isinstance(x, torch.Tensor):
            return
        storage = x.untyped_storage()
        key = storage_key(storage)
        if key not in self._known:
            size = storage.nbytes() if is_new else 0
            self._known.add(key)
            self.live += size
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def peak_bytes(run: Callable[[], Any]) -> int:
    """Return the peak bytes of live tensors during run(), after one run to warm up."""
    run()
    with LiveBytes() as live:
        run()
    return live.peak
