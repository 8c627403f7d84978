"""What f depends on beside its arguments: random numbers, autocast, the modes and buffers of its modules.

A solve calls f many times and a backward pass calls it again. Here these calls become calls of one function:

- All evaluations of a solve and of its backward pass draw the same random numbers (randomness.py).
- f alone runs under the autocast of the forward pass; the state and its moves keep their precision.
- Buffers that f changes (running statistics of a BatchNorm) are changed by the evaluations of accepted forward steps
  and by no others; or, frozen, by none. The same holds for small tensors that f holds outside of modules, such as
  buffers for torch.func.functional_call.
- Where modules changed their mode or other buffers before the backward pass, f is asked whether that matters to it.

The first evaluation shows which of this f needs. An f that needs nothing pays nothing.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from torchmali._torch import buffers_of, casts_have_graphs, is_wrapped, n_changes, put_buffer
from torchmali.copies import copied
from torchmali.errors import InvalidFieldError, InvalidOptionError, NonRepeatableFieldError
from torchmali.field.randomness import Draws, First, Redirected, Refused, Source

P = ParamSpec("P")
R = TypeVar("R")
NOTHING: contextlib.AbstractContextManager = contextlib.nullcontext()
LARGE = 2**20  # bytes: a buffer beyond this is a table, not a statistic; f may read it, but not change it
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # to compare, by size
SMALL = 2**16  # bytes: a tensor outside of modules up to this may be a statistic


class Buffer(NamedTuple):
    """One that a module holds, by name: the tensor behind it may be replaced."""

    module: nn.Module
    name: str

    @property
    def tensor(self) -> Tensor | None:
        return getattr(self.module, self.name)

    @property
    def holder(self) -> int:
        return id(self.module)

    def put(self, x: Tensor | None) -> None:
        put_buffer(self.module, self.name, x)

    @property
    def can_be_undone(self) -> bool:
        x = self.tensor
        return x is not None and _has_values(x) and x.nbytes <= LARGE

    def __str__(self) -> str:
        return f"{self.name} of {type(self.module).__name__}"


class Loose(NamedTuple):
    """A tensor without a gradient that f holds in a closure or container, or gets through args."""

    there: weakref.ref[Tensor]

    @property
    def tensor(self) -> Tensor | None:
        return self.there()

    @property
    def holder(self) -> int:
        return 0  # f itself, for all of them

    def put(self, x: Tensor | None) -> None:
        pass  # it has no place where it could be replaced

    @property
    def can_be_undone(self) -> bool:
        x = self.tensor
        return x is not None and x.nbytes <= SMALL

    def __str__(self) -> str:
        x = self.tensor
        return "a tensor that f holds" if x is None else f"a tensor of shape {tuple(x.shape)} that f holds"


Changeable = Buffer | Loose


def version_of(x: Tensor) -> int | None:
    """How often x was changed in place; None for a tensor of inference mode, which does not count."""
    return None if x.is_inference() else n_changes(x)


class Value(NamedTuple):
    """What a buffer was."""

    tensor: Tensor
    copy: Tensor | None  # None: it is too large, or cannot be copied
    version: int | None

    @staticmethod
    def of(x: Tensor, copies: bool = True) -> Value:
        return Value(x, x.detach().clone() if copies else None, version_of(x))

    def is_still(self, now: Tensor | None) -> bool:
        # A BatchNorm changes its statistics without counting it.
        same = now is self.tensor and version_of(self.tensor) == self.version
        return same and (self.copy is None or _are_equal(self.tensor, self.copy))


Mark = Sequence[Value | None] | None  # None: from before the first evaluation; in it: a place without a tensor


class Environment:
    """What one function of a solve (f, or the observer) depends on beside its arguments.

    loose: tensors without a gradient that it holds outside of modules. eps: rounding of the coarsest floating-point
    type in which it computes; before the first evaluation, the one that is given.
    """

    dtype: torch.dtype | None = None  # of autocast, where it is on
    caches: bool = True  # autocast keeps the casts of weights
    mode: Redirected | None = None  # under which each evaluation runs
    operations: Sequence[Any] = ()  # of the first evaluation
    lent: Sequence[tuple[Buffer, Tensor]] = ()  # frozen ones that f changes: it works on copies of these values
    changing: Sequence[Changeable] = ()  # by f, in their places
    at_first: Sequence[Value] | None = None  # what they were in the beginning
    late: Sequence[Changeable] = ()  # among the others: changed in the forward pass, not at the first evaluation
    with_residuals: Sequence[tuple[Changeable, Value]] = ()  # during the first evaluation
    others: Sequence[tuple[Changeable, Tensor | None, int | None]] = ()  # not changed by f, with their versions

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
        buffers: str,
        source: Source | None = None,
        loose: Sequence[Tensor] = (),
        eps: float = 0.0,
    ):
        if buffers not in ("update", "freeze"):
            raise InvalidOptionError(
                f'buffers={buffers!r}: "update" (by each evaluation of an accepted step) or "freeze".'
            )
        if modules:
            _raise_for_sharded(modules)
        self.modules, self.device, self.freezes = modules, device, buffers == "freeze"
        self.eps = self.eps_of_state = eps  # until the first evaluation shows a coarser one
        self.loose = [Loose(weakref.ref(x)) for x in loose if _is_plain(x)] if loose else ()
        self.is_cast = torch.is_autocast_enabled(device.type)
        if self.is_cast:
            self.dtype, self.caches = torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()
        self.source = source or Source()
        self.random = Draws(self.source)

    @property
    def coarseness(self) -> float:
        """How far f may be off where z is off by a rounding: in low precision, f jumps where z is rounded."""
        return 8 * self.eps if self.eps > self.eps_of_state else 0.0

    @property
    def draws(self) -> bool:
        """Whether the first evaluation drew random numbers."""
        return self.random.is_used

    @property
    def is_active(self) -> bool:
        """Whether there is something to do around each evaluation."""
        return self.mode is not None or self.is_cast or (self.freezes and bool(self.changing or self.lent))

    @property
    def synchronises(self) -> bool:
        """Whether an evaluation waits for the same evaluation in other processes."""
        if not (self.modules and dist.is_available() and dist.is_initialized()):
            return False
        norms = [m for m in self.modules if isinstance(m, nn.SyncBatchNorm) and m.training]
        return any(dist.get_world_size(norm.process_group) > 1 for norm in norms)

    @contextlib.contextmanager
    def first_evaluation(self, may_differentiate: bool = True) -> Iterator[None]:
        """Find out what f does beside returning something."""
        holders = [m for m in self.modules if buffers_of(m)]
        found: list[Changeable] = [Buffer(m, name) for m in holders for name, _ in m.named_buffers(recurse=False)]
        there = [(x, tensor) for x in [*found, *self.loose] if (tensor := x.tensor) is not None]
        with_residuals = [(x, Value.of(tensor, x.can_be_undone)) for x, tensor in there]
        lendable = _lendable(with_residuals) if self.freezes else []
        lent = _lend(lendable)
        twins = {
            id(before): Value(x, copy, version_of(x)) for (_, copy), (_, before, x) in zip(lendable, lent, strict=True)
        }
        self.with_residuals = [
            (x, twins.get(id(value.tensor), value) if isinstance(x, Buffer) else value) for x, value in with_residuals
        ]
        mode = First(self.random, may_differentiate, self.eps)
        try:
            with self._as_cast(), mode:
                yield
            are_still = [value.is_still(x.tensor) for x, value in self.with_residuals]
        except BaseException:
            _restore_changed(self.with_residuals)
            raise
        finally:
            self.with_residuals = ()
            _take_back(lent)
        self.random.advance()
        self.eps, self.operations = mode.eps, mode.operations
        if self.draws or (self.source.is_fresh and self.source.given is not None):
            self.mode = Redirected(self.random)
        lent_later, changing, at_first, others, large = [], [], [], [], []
        for (x, value), is_still in zip(with_residuals, are_still, strict=True):
            if is_still:
                # A loose tensor is not kept alive for the sake of this comparison.
                others.append((x, value.tensor if isinstance(x, Buffer) else None, value.version))
            elif isinstance(x, Buffer) and (twin := twins.get(id(value.tensor))) is not None and twin.copy is not None:
                lent_later.append((x, twin.copy))
            elif value.copy is not None:
                changing.append(x)
                at_first.append(value)
            elif isinstance(x, Buffer):
                large.append(str(x))
        self.lent, self.changing, self.at_first, self.others = lent_later, changing, at_first, others
        if large:
            raise NonRepeatableFieldError(
                f"f changes {', '.join(large)}, which cannot be undone: a buffer of more than {LARGE:,} bytes, or one "
                "that is sparse, nested or without values."
            )
        self.modes = [m.training for m in self.modules]
        if self.freezes:
            self.restore(at_first)

    @property
    def is_simple(self) -> bool:
        """Whether there is nothing that evaluations could change or depend on beside modes and random numbers."""
        return not (self.is_cast or self.loose or self.source.is_fresh or any(map(buffers_of, self.modules)))

    def assume(self, eps: float, operations: Sequence[Any]) -> None:
        """Do without a look at the first evaluation: it is known to need no care. eps, operations: what it showed."""
        self.eps, self.operations, self.at_first = eps, operations, ()
        self.modes = [m.training for m in self.modules] if self.modules else ()

    def try_again(self, mark: Mark) -> None:
        """Before a second try of an evaluation. mark: from before the first one."""
        if mark is None:
            _restore_changed(self.with_residuals)
        else:
            self.restore(mark)
            _lend(self.lent)
        self.random.restart()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        mark, lent = (self.mark(), _lend(self.lent)) if self.freezes else ((), [])
        self.random.restart()
        try:
            with self._as_cast(), self.mode or contextlib.nullcontext():
                yield
        finally:
            _take_back(lent)
            self.restore(mark)

    @contextlib.contextmanager
    def refusing_draws(self, called: str) -> Iterator[None]:
        """Around evaluations that draw nothing, or else are an error. Buffers are left as they were."""
        mode, places = self.mode, [*self.changing, *self.late]
        values = _values(places)
        self.mode = mode or Refused(called)
        try:
            yield
        finally:
            self.mode = mode
            _restore(zip(places, values, strict=True))

    def begin_backward(self, stack: contextlib.ExitStack) -> None:
        """Prepare a backward pass. When `stack` is closed, whatever f did beside is undone."""
        # torch.func.functional_call lends buffers to a module for the forward pass only: they are lent again.
        for x, then, _ in self.others:
            if then is not None and (now := x.tensor) is not then:
                x.put(then)
                stack.callback(x.put, now)
        places = [*self.changing, *self.late]
        if places:
            stack.callback(_restore, list(zip(places, _values(places), strict=True)))
        if self._is_cast_now:
            stack.enter_context(self._uncast())

    def for_backward(self) -> Environment:
        """A copy for one backward pass, with generators of its own."""
        if not self.draws:
            return self
        random = self.random.copy()
        return copied(self, random=random, mode=Redirected(random))

    def mark(self) -> Mark:
        """What the buffers that f changes are now, for `restore`."""
        if self.at_first is None:
            return None
        return _values(self.changing)

    def restore(self, mark: Mark) -> None:
        _restore(zip(self.changing, self.at_first or () if mark is None else mark, strict=False))

    def reject(self, mark: Mark) -> None:
        """Undo the evaluations since `mark`: they were those of a step that is not taken."""
        self.restore(mark)

    def changes(self) -> str:
        """What is not as it was at the first evaluation, in words."""
        if not (self.modules or self.others):
            return ""
        modes = {type(m).__name__ for m, mode in zip(self.modules, self.modes, strict=True) if m.training != mode}
        now = [(x, x.tensor, version) for x, _, version in self.others]
        buffers = [str(x) for x, tensor, version in now if tensor is not None and version_of(tensor) != version]
        found = [f"{', '.join(sorted(modes))} went from train to eval mode, or back"] if modes else []
        return ", and ".join([*found, *([f"{', '.join(buffers)} changed"] if buffers else [])])

    def end_forward(self) -> None:
        """Look back at a forward pass that has come to its end."""
        if not (self.others or self.is_cast):
            return
        changed = [x.holder for x, then, version in self.others if _has_changed(x.tensor, then, version)]
        if changed:  # then its neighbours may be changed without being counted, as the statistics of a BatchNorm are
            holders = set(changed)
            self.late = [x for x, _, _ in self.others if x.holder in holders and x.can_be_undone]
        if self.is_cast:
            torch.clear_autocast_cache()  # weights that were cast without a graph are no use to others

    def _as_cast(self) -> contextlib.AbstractContextManager:
        if not self.is_cast:
            return contextlib.nullcontext()
        caches = self.caches and (casts_have_graphs or torch.is_grad_enabled())
        return torch.autocast(self.device.type, self.dtype, cache_enabled=caches)

    @property
    def _is_cast_now(self) -> bool:
        return self.is_cast or torch.is_autocast_enabled(self.device.type)

    def _uncast(self) -> contextlib.AbstractContextManager:
        """What is not f runs in its own precision; f's casts of its weights are cached for as long as this lasts."""
        if not self._is_cast_now:
            return NOTHING
        return torch.autocast(self.device.type, enabled=False, cache_enabled=self.caches)


def in_forward_pass(environments: Sequence[Environment], run: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """run(...), in which functions with these environments are evaluated.

    If it fails, buffers are as they were before.
    """
    try:
        with environments[0]._uncast():
            result = run(*args, **kwargs)
    except BaseException:
        for environment in environments:
            environment.restore(None)
        raise
    for environment in environments:
        environment.end_forward()
    return result


@functools.lru_cache(maxsize=1000)
def _is_sharded(kind: type) -> bool:
    return any([base.__name__ == "FSDPModule" for base in kind.__mro__])


def _raise_for_sharded(modules: Sequence[nn.Module]) -> None:
    sharded = [type(m).__name__ for m in modules if _is_sharded(type(m))]
    if sharded:
        raise InvalidFieldError(
            f"{', '.join(sharded)} in f is sharded: its parameters are whole only while it runs, and the solve "
            "could not differentiate by them. Apply fully_shard to a module around the solve instead (an ODEBlock)."
        )


def _has_changed(x: Tensor | None, then: Tensor | None, version: int | None) -> bool:
    """Whether x is another one than then (None: not known), or was changed since, as far as PyTorch counts that."""
    return x is not None and ((then is not None and x is not then) or version_of(x) != version)


Lent = list[tuple[Buffer, Tensor | None, Tensor]]  # places, what was there before, and the copy that is there now


def _lend(values: Iterable[tuple[Buffer, Tensor]]) -> Lent:
    """Put a copy of each tensor in its place: a graph may hold it, and nothing has to be restored."""
    lent: Lent = []
    twins: dict[int, Tensor] = {}  # one for all places of a tensor
    # For graphs; the context takes longer than a copy.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
        for x, value in values:
            twin = twins.get(id(value))
            if twin is None:
                twin = twins[id(value)] = value.clone()
            lent.append((x, x.tensor, twin))
            x.put(twin)
    return lent


def _take_back(lent: Lent) -> None:
    for x, before, _ in lent:
        x.put(before)


def _lendable(with_residuals: Sequence[tuple[Changeable, Value]]) -> list[tuple[Buffer, Tensor]]:
    """Places of buffers, with their copies: those that f finds in modules alone, in memory that no other tensor has."""
    plain = [(x, value.tensor, value.copy) for x, value in with_residuals if _is_plain(value.tensor)]
    owners: dict[int, set[int]] = {}  # of memory
    copies: dict[int, Tensor] = {}  # one for all places of a tensor
    for x, tensor, copy_ in plain:
        is_buffer = isinstance(x, Buffer)
        owners.setdefault(tensor.untyped_storage().data_ptr(), set()).add(id(tensor) if is_buffer else id(x))
        if is_buffer and copy_ is not None and not tensor.requires_grad:
            copies.setdefault(id(tensor), copy_)
    alone = [(x, tensor) for x, tensor, _ in plain if len(owners[tensor.untyped_storage().data_ptr()]) == 1]
    return [(x, copies[id(tensor)]) for x, tensor in alone if isinstance(x, Buffer) and id(tensor) in copies]


def _values(places: Sequence[Changeable]) -> list[Value | None]:
    """What is there now; None where there is no tensor."""
    return [None if (x := place.tensor) is None else Value.of(x, _has_values(x)) for place in places]


def _restore(values: Iterable[tuple[Changeable, Value | None]]) -> None:
    for x, value in values:
        x.put(None if value is None else value.tensor)
        # One that overlaps itself, as an expanded one does, cannot be written to, not by f either.
        if value is None or value.copy is None or _overlaps_itself(value.tensor):
            continue
        is_counted = version_of(value.tensor) != value.version
        value.tensor.data.copy_(value.copy)  # data: a BatchNorm saves its statistics for its own backward
        if is_counted:  # a graph that holds what f made of it must not take this for it
            increment_version(value.tensor)


def _overlaps_itself(x: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def _restore_changed(values: Iterable[tuple[Changeable, Value]]) -> None:
    """Others are not written to: their memory may be read-only."""
    _restore([(x, value) for x, value in values if not value.is_still(x.tensor)])


def _are_equal(x: Tensor, y: Tensor) -> bool:
    """Whether all values are the same; nan is the same as nan."""
    if not (x.is_floating_point() and _is_plain(x)) or x.is_neg():
        return torch.equal(x, y)
    bits = BITS[x.itemsize]
    return torch.equal(x.detach().view(bits), y.view(bits))


def _has_values(x: Tensor) -> bool:
    """Whether its values can be copied and compared."""
    return x.layout == torch.strided and not x.is_meta and not x.is_nested


def _is_plain(x: Tensor) -> bool:
    """Not one that could not be copied and compared: a subclass, a sparse one, or one within torch.func."""
    wrapped = is_wrapped(x)
    return type(x) is Tensor and _has_values(x) and not x.is_quantized and not wrapped
