"""Batches of data: their protocol, sets of tensors in memory, and the share of one process of several."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Batch = tuple[Tensor, ...]


class Batches(Protocol):
    """Data of a run. Random numbers come from the generators, or from torch's global one, seeded for each epoch."""

    def train(self, epoch: int, order: torch.Generator, subsample: torch.Generator) -> Iterable: ...

    def validation(self) -> Sequence[Iterable]:
        """Sets for validation: an epoch is chosen by the first, the others are only reported."""
        ...

    def test(self) -> Iterable: ...


def even_shares(rows: Tensor, batch: int, devices: int) -> list[Tensor]:
    """Batches of `batch` rows for all devices together, one after the other, each in shares of one size."""
    shares = []
    for whole in rows.split(batch):
        shares += whole[: len(whole) // devices * devices].tensor_split(devices)
    return [share for share in shares if len(share)]


@dataclass(frozen=True)
class Parts:
    """Batches that are read on demand, each from its rows. workers: threads that read ahead; 0: none."""

    rows: Sequence[Tensor]
    read: Callable[[Tensor], Batch]
    workers: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Batch]:
        if not self.workers:
            yield from map(self.read, self.rows)
            return
        waiting: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(self.workers) as pool:  # Pillow and torch release the interpreter lock
            for rows in self.rows:
                waiting.append(pool.submit(self.read, rows))
                if len(waiting) > self.workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()


def share(batches: Iterable, rank: int, world: int, even: bool) -> Iterable:
    """Take every world-th batch. even: equally many for all processes; one with a batch more would wait for ever."""
    if isinstance(batches, Parts):  # the others need not be read
        n = len(batches) // world * world if even else len(batches)
        return Parts(batches.rows[rank:n:world], batches.read, batches.workers)
    return _Share(batches, rank, world, even)


class _Share:
    def __init__(self, batches: Iterable, rank: int, world: int, even: bool):
        self.batches, self.rank, self.world, self.even = batches, rank, world, even

    def __len__(self) -> int:
        if not isinstance(self.batches, Sized):
            raise TypeError("The number of batches is not known.")  # as Lightning expects it of an iterable
        n = len(self.batches)
        return n // self.world if self.even else len(range(self.rank, n, self.world))

    def __iter__(self) -> Iterator:
        rest = iter(self.batches)
        while group := list(itertools.islice(rest, self.world)):
            if len(group) == self.world or (not self.even and self.rank < len(group)):
                yield group[self.rank]


class Pinned:
    """Batches in pinned memory, from which a GPU takes them while it computes."""

    def __init__(self, batches: Iterable):
        self.batches = batches

    def __len__(self) -> int:
        if not isinstance(self.batches, Sized):
            raise TypeError("The number of batches is not known.")
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        return (tuple(tensor.pin_memory() for tensor in batch) for batch in self.batches)


def shares_in_tests(rows: Tensor, batch: int, devices: int) -> tuple[Tensor, ...]:
    """Batches of tests; each device gets one at least, or the others would wait for it."""
    return rows.split(min(batch, max(1, len(rows) // devices)))


@dataclass(frozen=True)
class InMemory:
    """Sets of tensors with the same number of rows. n_per_epoch: rows drawn for an epoch; None: all.

    batch: on all devices together.
    """

    train_set: Batch
    validation_set: Batch
    test_set: Batch
    batch: int
    n_per_epoch: int | None = None
    batch_in_tests: int = 128
    devices: int = 1

    def train(self, epoch: int, order: torch.Generator, subsample: torch.Generator) -> Iterable:
        n = len(self.train_set[0])
        if self.n_per_epoch is None:
            return self._train(torch.randperm(n, generator=order))
        drawn = torch.randperm(n, generator=subsample)[: self.n_per_epoch]
        return self._train(drawn[torch.randperm(len(drawn), generator=order)])

    def validation(self) -> Sequence[Iterable]:
        return [self._tests(self.validation_set)]

    def test(self) -> Iterable:
        return self._tests(self.test_set)

    def _train(self, rows: Tensor) -> Parts:
        return _parts(self.train_set, even_shares(rows, self.batch, self.devices))

    def _tests(self, tensors: Batch) -> Parts:
        rows = torch.arange(len(tensors[0]))
        return _parts(tensors, shares_in_tests(rows, self.batch_in_tests, self.devices))


def _parts(tensors: Batch, shares: Sequence[Tensor]) -> Parts:
    return Parts(shares, lambda part: tuple(tensor[part] for tensor in tensors))
