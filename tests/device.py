"""A device that is not the CPU, for machines that have none: "fake", whose tensors live on the CPU and do not show it.

torch keeps the device type PrivateUse1 for devices that others bring. Here it is a subclass of Tensor: each operation
takes the CPU tensors out, runs on them and wraps the result. So numbers are the CPU's bit for bit, and all that torch
does above an operation (autograd, modules, optimisers, foreach, autocast, generators) is what it does for a GPU:

- Backward runs in autograd's own thread for this device.
- An operation that is given a tensor of the device and one of the CPU raises. Numbers are no tensors. CUDA would let a
  0-d CPU tensor pass in a pointwise operation; here it passes inside `zero_dim_allowed` alone.
- F.dropout is torch.native_dropout, as on CUDA, which takes no generator.
- Random operations without a generator draw from the state of `torch.fake`, which torch.manual_seed sets, too. A
  generator of the CPU is taken as well, since torch.Generator("fake") cannot be made.
- Autocast casts for the operations in LOW_PRECISION, a part of the CPU's own list, and has no cache of cast weights.

`transfers` lists where the host waits for the device (`reads`) and where it sends something there (`writes`).

The device has no fused GRU and LSTM cells, pickling, numpy or streams.

Importing this module registers the device, once per process. This must happen before the first backward pass, at which
autograd counts the devices for good. (pytest imports all test files before it runs any.)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "fake"
CPU = torch.device("cpu")
aten = torch.ops.aten
LOW_PRECISION = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv1d", "conv2d", "conv3d")
# Some of the operations in which CUDA accepts a 0-d CPU tensor as a number.
POINTWISE = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.where.self}


class Transfers(NamedTuple):
    """Transfers by place in torchmali (or else in the caller) and operation: "integrate.py _read item"."""

    reads: list[str]
    writes: list[str]


_listening: list[Transfers] = []  # for all threads: backward runs in its own
_zero_dim_allowed = 0


@contextmanager
def transfers() -> Iterator[Transfers]:
    """List the transfers between host and device within the context, in any thread."""
    seen = Transfers([], [])
    _listening.append(seen)
    try:
        yield seen
    finally:
        # Compared by identity: two lists of the same entries are equal.
        _listening[:] = [other for other in _listening if other.reads is not seen.reads]


@contextmanager
def zero_dim_allowed() -> Iterator[bool]:
    """Context in which, as on CUDA, a 0-d CPU tensor is a number in pointwise operations."""
    global _zero_dim_allowed
    _zero_dim_allowed += 1
    try:
        yield True
    finally:
        _zero_dim_allowed -= 1


class Backend(_DummyBackendModule):
    """The module torch.fake."""

    def __init__(self):
        self.generator, self.lock = torch.Generator(), threading.Lock()

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, new_state: Tensor, device: Any = NAME) -> None:
        self.generator.set_state(new_state)

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class OnDevice(Tensor):
    """A tensor of the device; `raw` is the CPU tensor that it wraps."""

    raw: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnDevice:
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset()}
        x = Tensor._make_wrapper_subclass(cls, raw.shape, **layout, dtype=raw.dtype, device=DEVICE)
        x.raw = raw
        return x

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:  # torch refuses it to subclasses
        return self.cpu().tolist()

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, x: OnDevice) -> None:
        Tensor.data.__set__(self, x)  # type: ignore[attr-defined]
        self.raw = x.raw

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.raw!r} on {NAME}"


class Kind(NamedTuple):
    """Properties of an operation, from its schema."""

    draws: bool  # it draws random numbers
    generator: int | None  # position of the argument `generator`
    reads: bool  # the host gets its result, or the shape of the result
    is_view: bool
    is_in_place: bool

    @staticmethod
    def of(func: Any) -> Kind:
        names = [argument.name for argument in func._schema.arguments]
        aliases = [out.alias_info for out in func._schema.returns if out.alias_info is not None]
        return Kind(
            torch.Tag.nondeterministic_seeded in func.tags,
            names.index("generator") if "generator" in names else None,
            bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)),
            any(not alias.is_write for alias in aliases),
            any(alias.is_write for alias in aliases),
        )


_kinds: dict[Any, Kind] = {}


def _run(func: Any, args: tuple, kwargs: dict) -> Any:
    kind = _kinds.get(func) or _kinds.setdefault(func, Kind.of(func))
    known: dict[int, Tensor] = {}  # the device tensor that wraps a CPU tensor, by the id of the latter
    strangers: list[Tensor] = []  # CPU tensors among the arguments
    raw_args = [_unwrapped(x, known, strangers) for x in args]
    raw_kwargs = {name: _unwrapped(x, known, strangers) for name, x in kwargs.items()}
    target = torch.device(kwargs.get("device") or DEVICE)
    leaves = target.type != NAME
    if strangers and func is aten.copy_.default:
        _note("reads" if args[0] is strangers[0] else "writes", func)
    elif strangers and not (_zero_dim_allowed and func in POINTWISE and all(x.ndim == 0 for x in strangers)):
        shapes = ", ".join(str(tuple(x.shape)) for x in strangers)
        raise RuntimeError(f"{func} is given tensors on {DEVICE} and, of shape {shapes}, on the CPU.")
    elif kind.reads and not (func is aten.index.Tensor and not _has_mask(args[1])):
        _note("reads", func)
    elif func is aten._to_copy.default and target.type == "cpu":
        _note("reads", func)
    out = _drawn(func, kind, raw_args, raw_kwargs) if kind.draws else func(*raw_args, **raw_kwargs)
    if leaves:
        return out
    for x in strangers:
        known[id(x)] = x
    wrapped = _wrapped(out, known)
    if kind.is_view:
        _share_storage(wrapped, args[0])
    if kind.is_in_place and isinstance(wrapped, OnDevice) and _layout(wrapped) != _layout(wrapped.raw):
        Tensor.data.__set__(wrapped, OnDevice(wrapped.raw))  # type: ignore[attr-defined]
    return wrapped


def _layout(x: Tensor) -> tuple:
    return x.shape, x.stride(), x.storage_offset()


def _unwrapped(x: Any, known: dict[int, Tensor], strangers: list[Tensor]) -> Any:
    if isinstance(x, OnDevice):
        known[id(x.raw)] = x
        return x.raw
    if isinstance(x, Tensor):
        if x.device.type == "cpu":
            strangers.append(x)
        return x
    if isinstance(x, (list, tuple)):
        return [_unwrapped(part, known, strangers) for part in x]
    return CPU if isinstance(x, torch.device) and x.type == NAME else x


def _wrapped(out: Any, known: dict[int, Tensor]) -> Any:
    if isinstance(out, Tensor):
        return known[id(out)] if id(out) in known else OnDevice(out)
    if isinstance(out, (list, tuple)):
        return type(out)([_wrapped(part, known) for part in out])
    return out


def _share_storage(views: Any, base: Any) -> None:
    """Let views share the storage of their base, so that memory is not counted twice."""
    for view in views if isinstance(views, (list, tuple)) else (views,):
        if isinstance(view, OnDevice) and isinstance(base, OnDevice) and view is not base:
            if view.raw.untyped_storage()._cdata == base.raw.untyped_storage()._cdata:
                torch._functionalize_unsafe_set(view, base)  # type: ignore[attr-defined]


def _drawn(func: Any, kind: Kind, args: list, kwargs: dict) -> Any:
    given = kwargs.get("generator") or (args[kind.generator : kind.generator + 1] if kind.generator else None)
    if given and given != [None]:
        return func(*args, **kwargs)
    backend: Backend = torch.fake  # type: ignore[attr-defined]
    with backend.lock:
        if kind.generator is not None and kind.generator >= len(args):
            return func(*args, **{**kwargs, "generator": backend.generator})
        # native_dropout and the like take no generator: they draw from the CPU's, which gets this one's state.
        of_cpu = torch.get_rng_state()
        torch.set_rng_state(backend.generator.get_state())
        try:
            return func(*args, **kwargs)
        finally:
            backend.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(of_cpu)


def _has_mask(indices: Any) -> bool:
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _note(kind: str, func: Any) -> None:
    if _listening:
        entry = f"{_caller()} {func.overloadpacket.__name__}"
        for transfers in _listening:
            getattr(transfers, kind).append(entry)


def _caller() -> str:
    """Return the innermost calling function of torchmali, or else of code that is neither this file nor torch."""
    frame, other = sys._getframe(2), ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torchmali" in path.parts[-3:-1]:
            return f"{path.name} {frame.f_code.co_name}"
        if not other and path != Path(__file__) and "torch" not in path.parts:
            other = f"{path.name} {frame.f_code.co_name}"
        frame = frame.f_back
    return other or "autograd's engine"


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy for torch.tensor(..., device=), which bypasses the subclass."""
    return _run(aten.copy_.default, (target, source), {})


def _autocast(op: Any) -> Callable:
    keys = DispatchKeySet(DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]

    def cast(x: Any, dtype: torch.dtype) -> Any:
        is_wide = isinstance(x, OnDevice) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if is_wide else x

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(NAME)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*[cast(x, dtype) for x in args], **{name: cast(x, dtype) for name, x in kwargs.items()})

    return run


def _register() -> list[torch.library.Library]:
    _setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
    rest, named = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    rest.fallback(lambda op, *args, **kwargs: _run(op, args, kwargs), "PrivateUse1")  # what makes new tensors
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    named.impl("_copy_from", _copy_from, "PrivateUse1")
    for name in LOW_PRECISION:
        named.impl(name, _autocast(getattr(aten, name).default), "AutocastPrivateUse1")
    return [rest, named]


_libraries = _register()  # kept alive: without the libraries their kernels are gone
DEVICE = torch.device(NAME, 0)
