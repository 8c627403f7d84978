"""One evaluation of f and its vector-Jacobian product as a graph, and the reasons why there may be none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchmali._torch import GIVES_NUMBER, buffers_of, depends_on_data, n_changes, parameters_of, traced
from torchmali.compiled.faster import FASTER
from torchmali.compiled.recording import LOOKS, CallRecorder, NotCompiledError
from torchmali.field.evaluate import Field
from torchmali.state.vectors import Tensors

OTHER_CALLS = "f makes other calls when it is traced than when it is evaluated"
LOW = (torch.float16, torch.bfloat16)


class Event(NamedTuple):
    """A traced evaluation: graph(t, *z, *a, *outside) = (*u, *gradients). Without gradients there is no a."""

    graph: torch.fx.GraphModule
    used: Sequence[bool]  # of the tensors from outside: whether f reads them. The graph has only these as arguments
    depends: Sequence[bool]  # of z, and then of the moving tensors from outside: whether there is a gradient


class Subject(NamedTuple):
    """What is to be traced.

    outside: the tensors that f reads beside its arguments. moves: which of them get a gradient. differentiates: the
    event has gradients. records: f runs with grad mode on.
    """

    field: Field
    z: Tensors
    outside: Sequence[Tensor]
    moves: Sequence[bool]
    calls: Sequence[Any]  # as they were recorded
    differentiates: bool
    records: bool

    @property
    def examples(self) -> list[Tensor]:
        """Tensors that are like t, z, a and those from outside; no two of them are the same, or share memory."""
        t = torch.zeros((), dtype=self.field.form.t_dtype)
        return [t, *map(_like, [*self.z, *(self.z if self.differentiates else ()), *self.outside])]


def capture(subject: Subject) -> Event:
    """Trace f; raise NotCompiledError, which says why, if that cannot be done."""
    found: list[Any] = []
    with _as_before(subject.field), torch.no_grad():
        try:
            graph = traced(lambda *inputs: _event(subject, found, inputs), subject.examples, FASTER)
        except NotCompiledError:
            raise
        except Exception as error:
            raise NotCompiledError(_reason_of(error)) from error
    _check(graph)
    (depends,) = found
    return Event(graph, _without_unused(graph, len(subject.outside)), depends)


def _event(subject: Subject, found: list[Any], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    field, n = subject.field, len(subject.z)
    n_a = n if subject.differentiates else 0
    t, z, a, rest = inputs[0], inputs[1 : n + 1], inputs[n + 1 : n + 1 + n_a], inputs[n + 1 + n_a :]
    with torch.set_grad_enabled(subject.records):
        z = [x.detach().requires_grad_(subject.records) for x in z]
        twins = [x.detach().requires_grad_(real.requires_grad) for x, real in zip(rest, subject.outside, strict=True)]
        by_id = {id(real): x for real, x in zip(subject.outside, twins, strict=True)}
        recorder, versions = CallRecorder([t, *z], by_id), [n_changes(x) for x in [*z, *twins]]
        with recorder:
            u = field.func(t, field.structure.rebuild(z), *field.args)
        u = recorder.returned(field.structure.flatten(u))
        if recorder.calls != list(subject.calls):
            raise NotCompiledError(OTHER_CALLS)
        if versions != [n_changes(x) for x in [*z, *twins]]:
            raise NotCompiledError("f changes a tensor in place that it did not make: a buffer, or one in a closure")
        moving = [x for x, moves in zip(twins, subject.moves, strict=True) if moves]
        grads = _pulled(u, [*z, *moving], a) if subject.differentiates else []
    found.append([g is not None for g in grads])
    return *[x.detach() for x in u], *[g for g in grads if g is not None]


def _pulled(u: Sequence[Tensor], inputs: Sequence[Tensor], a: Sequence[Tensor]) -> Sequence[Tensor | None]:
    ends = [(x, g) for x, g in zip(u, a, strict=True) if x.requires_grad]
    if not ends:
        return [None] * len(inputs)
    outputs, starts = zip(*ends, strict=True)
    return torch.autograd.grad(outputs, inputs, starts, allow_unused=True)


def _without_unused(graph: torch.fx.GraphModule, n: int) -> list[bool]:
    """Remove those of the last n arguments that nothing depends on; return which ones are left."""
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    graph.graph.eliminate_dead_code()
    used = [bool(node.users) for node in nodes[len(nodes) - n :]]
    for node, is_used in zip(nodes[len(nodes) - n :], used, strict=True):
        if not is_used:
            graph.graph.erase_node(node)
    graph.recompile()
    return used


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def _check(graph: torch.fx.GraphModule) -> None:
    """Raise if the graph has operations that a loop cannot repeat, or that it would round in another way."""
    for node in graph.graph.nodes:
        if node.target is GIVES_NUMBER:
            raise NotCompiledError(LOOKS)
        found = node.meta.get("val")
        tensors = [x for x in (found if isinstance(found, (tuple, list)) else [found]) if isinstance(x, Tensor)]
        if any([not isinstance(size, int) for x in tensors for size in x.shape]):
            raise NotCompiledError(LOOKS)
        if any([x.dtype in LOW for x in tensors]):
            raise NotCompiledError(
                "f computes in a precision lower than y's, and a compiled loop would round otherwise"
            )
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags and not _is_attention_without_dropout(node):
            raise NotCompiledError(f"f draws random numbers ({node.target})")


def _is_attention_without_dropout(node: torch.fx.Node) -> bool:
    if "attention" not in str(node.target):
        return False
    numbers = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, float)]
    return not any(numbers[:1])  # dropout_p is the first of the floats


def _reason_of(error: Exception) -> str:
    if depends_on_data(error):
        return LOOKS
    text = next(iter(str(error).strip().splitlines()), "")[:200]
    return f"f cannot be traced: {type(error).__name__}: {text}"


@contextlib.contextmanager
def _as_before(field: Field) -> Iterator[None]:
    """Take back what f keeps in its modules and attributes while it is traced: tensors without values."""
    owner = getattr(field.func, "__self__", field.func)
    dicts: list[Any] = [] if isinstance(owner, nn.Module) else [getattr(owner, "__dict__", {})]
    for module in field.environment.modules:
        dicts += [vars(module), parameters_of(module), buffers_of(module)]
    before = [(x, dict(x)) for x in dicts]
    try:
        yield
    finally:
        for now, then in before:
            if now.keys() != then.keys() or any(now[key] is not then[key] for key in then):
                now.clear()
                now.update(then)
