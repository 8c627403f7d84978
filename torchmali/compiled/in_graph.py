"""A solve inside of a model that torch.compile compiles: one operation of the graph of that model (sites.py).

torch.compile traces Python code, but must not trace a solve: f is called in loops and differentiated there. `in_graph`
is traced up to the operation. `_site`, which it calls, runs while that is done, on the objects themselves. Its result
is a constant of the graph, guarded by the identity of these objects: another module gets another graph.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchmali._torch import (
    CAN_COMPILE,
    break_graph,
    constant_in_trace,
    has_running_statistics,
    is_made_in_trace,
    traced_changes,
)
from torchmali.compiled.sites import CHANGING, GENERATION, Place, Run, Site, add_site
from torchmali.field.parameters import search_of


def is_followed() -> bool:
    """Whether torch.compile follows the code that asks."""
    return torch.compiler.is_dynamo_compiling()


def in_graph(run: Run, likes: Run, subject: Any, holds: str, inputs: tuple) -> Sequence[Tensor] | None:
    """The tensors of run(subject, *inputs), as an operation of the graph that is being made.

    None: that cannot be done, and the solve is a break between two graphs. (Where breaks are not allowed, torch raises
    an error with the reason.)

    run: solves, and returns a tuple of tensors. likes: returns empty tensors of their shapes and dtypes. subject: f; or
    a module that has f as its attribute `holds`.
    """
    func = getattr(subject, holds) if holds else subject
    owner, method = _parts_of(subject)
    tensors: list[Tensor] = []
    numbers: list[float] = []
    objects: list[Any] = []
    form = _apart(inputs, tensors, numbers, objects)
    n_given, device = len(tensors), tensors[0].device.type
    holder = _holder_of(func)
    names, modes = ((), ()), ()
    if holder is not None:
        parameters, buffers = dict(holder.named_parameters()), dict(holder.named_buffers())
        names = tuple(parameters), tuple(buffers)
        tensors = [*tensors, *parameters.values(), *buffers.values()]
        modes = tuple([module.training for module in holder.modules()])  # `_site` looks at them: a guard for each
    known = GENERATION[0]  # a guard: `_site` is asked again when more is known
    wants = tuple([torch.is_grad_enabled() and x.requires_grad for x in tensors])
    site = _site(
        run, likes, owner, method, holds, holder, (form, n_given, names, wants, device, modes, known), *objects
    )
    if isinstance(site, str):
        break_graph(site)
        return None
    return torch.ops.torchmali.solve(tensors, numbers, site)[:-1]


# ---- Parts of a call, by what torch.compile can follow


def _parts_of(func: Any) -> tuple[Any, Any]:
    """A module and None; a module and the function of its method; a plain function and None; or None twice."""
    if isinstance(func, nn.Module):
        return func, None
    if isinstance(func, types.MethodType) and isinstance(func.__self__, nn.Module):
        return func.__self__, func.__func__
    if type(func) is types.FunctionType and getattr(func, "__closure__", func) is None:
        return func, None
    return None, None


def _holder_of(func: Any) -> nn.Module | None:
    """The module from which f gets its parameters."""
    owner, _ = _parts_of(func)
    return owner if isinstance(owner, nn.Module) else None


def _apart(x: Any, tensors: list[Tensor], numbers: list[float], objects: list[Any]) -> tuple:
    """The form of x, whose tensors, floats and objects are appended to the lists."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return "tensor", len(tensors) - 1
    if isinstance(x, float):
        numbers.append(x)
        return "number", len(numbers) - 1
    if x is None or isinstance(x, (bool, int, str)):
        return "constant", x
    if type(x) is tuple:
        return "tuple", tuple([_apart(part, tensors, numbers, objects) for part in x])
    if type(x) is list:
        return "list", tuple([_apart(part, tensors, numbers, objects) for part in x])
    if type(x) is dict:
        return "dict", tuple([_apart(part, tensors, numbers, objects) for part in x.values()]), tuple(x)
    objects.append(x)
    return "object", len(objects) - 1


def _together(form: tuple, objects: Sequence[Any], tensors: Sequence[Tensor], numbers: Sequence[float]) -> Any:
    """The inverse of `_apart`."""
    kind, content = form[:2]
    if kind in ("tuple", "list", "dict"):
        parts = [_together(part, objects, tensors, numbers) for part in content]
        if kind == "dict":
            return dict(zip(form[2], parts, strict=True))
        return tuple(parts) if kind == "tuple" else parts
    if kind == "constant":
        return content
    where: Any = {"tensor": tensors, "number": numbers, "object": objects}[kind]
    return where[content]


# ---- What runs while a model is traced


@constant_in_trace
def _site(
    run: Run, likes: Run, owner: Any, method: Any, holds: str, holder: nn.Module | None, how: tuple, *objects: Any
) -> int | str:
    """The number of a new site; or the reason why there can be none, in words."""
    form, n_given, names, wants, device, *_ = how
    func = owner if method is None else types.MethodType(method, owner)
    func = getattr(owner, holds) if holds else func
    reason = _obstacle(func, holder, objects)
    if reason is not None:
        return f"torchmali: this solve cannot be an operation of the graph: {reason} (docs/compile.md)."
    cast = (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None
    together = functools.partial(_together, form, objects)
    places = _places(holder, *names)
    parts = run, likes, _weakly(owner), method, _weakly(holder), together, n_given
    return add_site(Site(*parts, places, wants, torch.is_grad_enabled(), cast))


def _obstacle(func: Any, holder: nn.Module | None, objects: Sequence[Any]) -> str | None:
    if not CAN_COMPILE:
        return f"torch {torch.__version__} lacks what it takes"
    found = _of_call(func, objects), _of_modules(holder), _of_tensors(func, holder)
    return next((reason for reasons in found for reason in reasons), None)


def _of_call(func: Any, objects: Sequence[Any]) -> Iterator[str]:
    if torch.compiler.is_exporting():
        yield "torch.export would need it without Python"
    if func is None:
        yield "f is no module, no method of one, and no function without a closure"
    for x in objects:
        name = type(x).__name__
        if is_made_in_trace(x):
            yield f"{name} is made in the forward pass; make it before, as in __init__"
        if not isinstance(x, (torch.dtype, torch.device)) and not is_dataclass(x):
            yield f"it has a {name} as an argument, of which it is not known whether it stays what it is"
    changes = traced_changes()
    if changes is None:
        yield "what the model changed before the solve is not known"
    elif changes:
        yield f"the model changes an attribute, a list or a dict before it ({', '.join(changes)}), and f may read it"


def _of_modules(holder: nn.Module | None) -> Iterator[str]:
    if holder in CHANGING:
        yield f"{type(holder).__name__} changes a buffer in place when it is evaluated"
    for module in () if holder is None else holder.modules():
        if module.training and has_running_statistics(module):
            yield f"{type(module).__name__} in f changes its running statistics in training mode"


def _of_tensors(func: Any, holder: nn.Module | None) -> Iterator[str]:
    """The operation must get all tensors that f reads, as they are in the graph."""
    search = search_of(func)
    inside: list[nn.Module] = [] if holder is None else list(holder.modules())
    known = {id(x) for module in inside for x in (*module.parameters(), *module.buffers())}
    found = [*search.found.values(), *search.loose.values()]
    for module in search.modules.values():
        found += [*module.parameters(), *module.buffers()]
    if any([id(x) not in known for x in found]):
        yield "f reads a tensor that is no parameter or buffer of the module that f is, or is a method of; make it one"


def _places(holder: nn.Module | None, parameters: Sequence[str], buffers: Sequence[str]) -> list[Place]:
    """The place of each name, with the other names of the same tensor that are not listed themselves."""
    if holder is None:
        return []
    listed = {*parameters, *buffers}
    every = [*holder.named_parameters(remove_duplicate=False), *holder.named_buffers(remove_duplicate=False)]
    by_name, found = dict(every), []
    for name in (*parameters, *buffers):
        others = [other for other, x in every if x is by_name.get(name) and other not in listed]
        split = [(path, last) for path, _, last in (full.rpartition(".") for full in (name, *others))]
        found.append(Place(split, is_buffer=len(found) >= len(parameters)))
    return found


def _weakly(x: Any) -> Callable[[], Any]:
    return weakref.ref(x) if isinstance(x, nn.Module) else lambda: x


def like_state(x: Tensor, *sizes: int) -> Tensor:
    """An empty tensor like a leaf of y, with more dimensions in front."""
    is_low = x.dtype in (torch.bfloat16, torch.float16)  # under autocast
    return x.new_empty((*sizes, *x.shape), dtype=torch.float32 if is_low else x.dtype)
