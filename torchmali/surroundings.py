"""What f depends on beside its arguments: random numbers, autocast, the modes and buffers of its modules.

A solve calls f many times and a backward pass calls it again. Here these calls become calls of one function:

- All evaluations of a solve and of its backward pass draw the same random numbers. Afterwards the generators are where
  one evaluation would have left them.
- f alone runs under the autocast of the forward pass; the state and its moves keep their precision.
- Buffers that f changes (running statistics of a BatchNorm) are changed by the evaluations of accepted forward steps
  and by no others; or, frozen, by none.
- Where modules changed their mode or other buffers before the backward pass, f is asked whether that matters to it.

The first evaluation shows which of this f needs. An f that needs nothing pays nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchmali.solution import InvalidField, NonRepeatableField, require

LARGE = 2**20  # bytes: a buffer beyond this is a table, not a statistic; f may read it, but not change it

DRAWS_SOMETIMES = (
    "{} draws random numbers in some of its evaluations only, so that they cannot be the same in all. Draw them once, "
    "before the solve."
)


class Buffer(NamedTuple):
    """One that a module holds, by name: the tensor behind it may be replaced."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor:
        return getattr(self.module, self.name)

    @property
    def version(self) -> tuple[int, int]:
        return id(self.tensor), self.tensor._version

    def __str__(self) -> str:
        return f"{self.name} of {type(self.module).__name__}"


class Value(NamedTuple):
    """What a buffer was."""

    tensor: Tensor
    copy: Tensor | None  # None: it is too large
    version: tuple[int, int]

    @staticmethod
    def of(buffer: Buffer) -> Value:
        x = buffer.tensor
        return Value(x, x.detach().clone() if x.nbytes <= LARGE else None, buffer.version)

    def is_still(self, buffer: Buffer) -> bool:
        # A BatchNorm changes its statistics without counting it.
        same = buffer.version == self.version
        return same and (self.copy is None or torch.equal(self.tensor, self.copy))


Mark = Sequence[Value] | None  # None: from before the first evaluation


class Surroundings:
    def __init__(self, modules: Sequence[nn.Module], device: torch.device, buffers: str):
        what = f'buffers={buffers!r}: "update" (by each evaluation of an accepted step) or "freeze".'
        require(buffers in ("update", "freeze"), what)
        kinds = map(type, modules)
        sharded = [kind.__name__ for kind in kinds if any(base.__name__ == "FSDPModule" for base in kind.__mro__)]
        what = (
            f"{', '.join(sharded)} in f is sharded: its parameters are whole only while it runs, and the solve could "
            "not differentiate by them. Apply fully_shard to a module around the solve instead (an ODEBlock)."
        )
        require(not sharded, what, InvalidField)
        self.modules, self.device, self.freezes = modules, device, buffers == "freeze"
        self.is_cast = torch.is_autocast_enabled(device.type)
        self.dtype, self.caches = torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()
        self.draws = False
        self.changing: list[Buffer] = []  # by f
        self.at_first: Mark = None  # what they were in the beginning

    @property
    def coarseness(self) -> float:
        """How far f may be off where z is off by a rounding: under autocast, f jumps where z is rounded."""
        return 8 * torch.finfo(self.dtype).eps if self.is_cast else 0.0

    @property
    def is_active(self) -> bool:
        """Whether there is something to do around each evaluation."""
        return self.draws or self.is_cast or (self.freezes and bool(self.changing))

    @property
    def synchronises(self) -> bool:
        """Whether an evaluation waits for the same evaluation in other processes."""
        norms = [m for m in self.modules if isinstance(m, nn.SyncBatchNorm) and m.training]
        is_parallel = dist.is_available() and dist.is_initialized()
        return is_parallel and any(dist.get_world_size(norm.process_group) > 1 for norm in norms)

    @contextlib.contextmanager
    def first_evaluation(self) -> Iterator[None]:
        """Find out what f does beside returning something."""
        self.generators = self._generators()
        holders = [m for m in self.modules if m._buffers]
        buffers = [Buffer(m, name) for m in holders for name, _ in m.named_buffers(recurse=False)]
        values = list(map(Value.of, buffers))
        with self._as_cast():
            yield
        self.afterwards = self._generators()
        self.draws = not _equal(self.generators, self.afterwards)
        changed = [(x, value) for x, value in zip(buffers, values, strict=True) if not value.is_still(x)]
        large = [str(x) for x, value in changed if value.copy is None]
        what = f"f changes {', '.join(large)}, a buffer of more than {LARGE:,} bytes, which cannot be undone."
        require(not large, what, NonRepeatableField)
        self.changing, self.at_first = [x for x, _ in changed], [value for _, value in changed]
        self.modes = [m.training for m in self.modules]
        self.others = [(x, x.version) for x in buffers if x not in self.changing]
        if self.freezes:
            self.back_to(self.at_first)

    def draw_again(self) -> None:
        """Before a second try of an evaluation."""
        if self.draws or self.at_first is None:
            self._set_generators(self.generators)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        if self.draws:
            self._set_generators(self.generators)
        mark = self.mark() if self.freezes else ()
        with self._as_cast():
            yield
        self.back_to(mark)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Evaluations between those of another function, which is not to see that random numbers were drawn."""
        generators, is_first = self._generators(), self.at_first is None
        yield
        drawn = not is_first and not self.draws and not _equal(generators, self._generators())
        require(not drawn, DRAWS_SOMETIMES.format("observe"), NonRepeatableField)
        self._set_generators(generators if self.draws or is_first else ())

    def move_on(self) -> None:
        """After evaluations `apart`: what comes next is not to draw the same numbers again."""
        self._set_generators(self.afterwards if self.draws else ())

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        with self._uncast():
            yield
        if self.is_cast:
            torch.clear_autocast_cache()  # weights that were cast without a graph are no use to others
        drawn = self.at_first is not None and not _equal(self.afterwards, self._generators())
        require(self.draws or not drawn, DRAWS_SOMETIMES.format("f"), NonRepeatableField)

    @contextlib.contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Whatever f does beside is undone in the end."""
        generators, mark = self._generators() if self.draws else (), self.mark()
        try:
            with self._uncast():
                yield
        finally:
            self._set_generators(generators)
            self.back_to(mark)

    def mark(self) -> Mark:
        """What the buffers that f changes are now, to come `back_to`."""
        return None if self.at_first is None else list(map(Value.of, self.changing))

    def back_to(self, mark: Mark) -> None:
        for buffer, value in zip(self.changing, self.at_first or () if mark is None else mark, strict=False):
            if buffer.tensor is not value.tensor:
                setattr(buffer.module, buffer.name, value.tensor)
            if value.copy is not None:
                value.tensor.data.copy_(value.copy)  # data: a BatchNorm saves its statistics for its own backward

    def changes(self) -> str:
        """What is not as it was at the first evaluation, in words."""
        modes = {type(m).__name__ for m, mode in zip(self.modules, self.modes, strict=True) if m.training != mode}
        buffers = [str(x) for x, version in self.others if x.version != version]
        found = [f"{', '.join(sorted(modes))} went from train to eval mode, or back"] if modes else []
        return ", and ".join([*found, *([f"{', '.join(buffers)} changed"] if buffers else [])])

    def _as_cast(self) -> contextlib.AbstractContextManager:
        if not self.is_cast:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype, cache_enabled=self.caches)

    def _uncast(self) -> contextlib.AbstractContextManager:
        """What is not f runs in its own precision; f's casts of its weights are cached for as long as this lasts."""
        if not self.is_cast and not torch.is_autocast_enabled(self.device.type):
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, enabled=False, cache_enabled=self.caches)

    def _generators(self) -> tuple[Tensor, ...]:
        if self.device.type == "cpu":
            return (torch.get_rng_state(),)
        return torch.get_rng_state(), torch.get_device_module(self.device).get_rng_state(*self._index)

    def _set_generators(self, states: Sequence[Tensor]) -> None:
        for i, state in enumerate(states):
            if i == 0:
                torch.set_rng_state(state)
            else:
                torch.get_device_module(self.device).set_rng_state(state, *self._index)

    @property
    def _index(self) -> tuple[torch.device, ...]:
        return () if self.device.type == "mps" else (self.device,)  # there is one


def _equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, a, b))
