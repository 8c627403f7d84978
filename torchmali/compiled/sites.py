"""A solve as one operation of a graph of torch.compile: what the operation does when the graph runs.

A site is a call of a solve in a traced model (in_graph.py makes it). The operation `torchmali::solve` gets the number
of a site and tensors: those of the call, and the parameters and buffers of f. It makes the solve as ever, in Python,
while the modules of f have these tensors. It returns the results and a ticket, a small tensor. What autograd needs for
the backward pass lives as long as the memory of the ticket does, which the graph keeps for its own backward pass: no
longer than the graph needs it, also where there is no backward pass. `torchmali::solve_backward` follows it back.

The graph may write to its memory as soon as it does not need it any more. So the solve works on copies of what the
graph has computed, and returns copies. Parameters and buffers that are those of the modules are not copied.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchmali._torch import autograd_again, hooks_of, lend_parameter, put_buffer, storage_key
from torchmali.errors import IncompatibleError, warn
from torchmali.field.environment import version_of

Run = Callable[..., Sequence[Tensor]]


class Place(NamedTuple):
    """A parameter or a buffer, by the names that the module which holds it has for it."""

    names: Sequence[tuple[str, str]]  # of the inner module, and of the tensor there
    is_buffer: bool

    def tensor(self, holder: nn.Module) -> Tensor | None:
        path, name = self.names[0]
        return getattr(holder.get_submodule(path), name, None)

    def lend(self, holder: nn.Module, x: Tensor) -> Iterator[Callable[[], Any]]:
        """Put x there. To undo it, call what is returned."""
        for path, name in self.names:
            module = holder.get_submodule(path)
            if self.is_buffer:
                yield functools.partial(put_buffer, module, name, getattr(module, name))
                put_buffer(module, name, x)
            else:
                yield lend_parameter(module, name, x)


class Site(NamedTuple):
    """A call in a traced model: run(subject, *inputs), where `form` makes the inputs from tensors and numbers.

    run returns a tuple of tensors, likes empty ones of their shapes and dtypes. Modules are not kept alive.
    """

    run: Run
    likes: Run
    subject: Callable[[], Any]
    method: Any  # the subject is this method of it; None: the subject itself
    holder: Callable[[], nn.Module | None]  # of the parameters and buffers of f
    form: Callable[[Sequence[Tensor], Sequence[float]], tuple]
    n_given: int  # tensors of the call; those in places come after them
    places: Sequence[Place]
    wants: Sequence[bool]  # of the tensors: whether a gradient is wanted
    records: bool  # grad mode is on
    cast: tuple[str, torch.dtype] | None  # autocast, where it is on: of which device, to what

    def arguments(self, tensors: Sequence[Tensor], numbers: Sequence[float]) -> tuple:
        """The arguments of `run` and of `likes`."""
        subject = self.subject()
        subject = subject if self.method is None else types.MethodType(self.method, subject)
        return subject, *self.form(tensors[: self.n_given], numbers)

    def own(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Leaves for autograd, in memory that is not the graph's: those of the modules themselves where they will do.

        (Hooks on them are called with what the graph adds up.)
        """
        holder, found = self.holder(), []
        for i, (x, wants) in enumerate(zip(tensors, self.wants, strict=True)):
            place = None if i < self.n_given or holder is None else self.places[i - self.n_given].tensor(holder)
            is_there = _share_memory(x, place)
            if (
                place is not None
                and is_there
                and place.is_leaf
                and place.requires_grad == wants
                and not hooks_of(place)
            ):
                found.append(place)
            else:
                found.append((x.detach() if is_there else x.detach().clone()).requires_grad_(wants))
        return found

    def changes(self, tensors: Sequence[Tensor]) -> tuple[list[int | None], list[int | None]]:
        """How often each of the tensors was changed that are copies; and those that are in the modules of f."""
        holder = self.holder()
        there = [] if holder is None else [place.tensor(holder) for place in self.places]
        places = [*[None] * self.n_given, *there]
        copies = [x for x, place in zip(tensors, places, strict=True) if not _share_memory(x, place)]
        return [version_of(x) for x in copies], [version_of(x) for x in there if x is not None]

    @contextlib.contextmanager
    def at_work(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """The modules of f have these tensors. Grad mode and autocast are those of the call."""
        holder = self.holder()
        with contextlib.ExitStack() as stack:
            for place, x in zip(self.places, tensors[self.n_given :], strict=True):
                assert holder is not None
                if x is not place.tensor(holder):
                    for undo in place.lend(holder, x):
                        stack.callback(undo)
            stack.enter_context(autograd_again())
            if self.cast is not None:
                stack.enter_context(torch.autocast(self.cast[0], self.cast[1]))
            yield


def _share_memory(x: Tensor, y: Tensor | None) -> bool:
    """Whether they are the same numbers, in the same memory."""
    return (
        y is not None
        and storage_key(x.untyped_storage()) == storage_key(y.untyped_storage())
        and (x.storage_offset(), x.shape, x.stride()) == (y.storage_offset(), y.shape, y.stride())
    )


class Kept(bytearray):
    """The memory of a ticket, and with it what a backward pass needs. edges: of the results."""

    def __init__(self, site: Site, tensors: Sequence[Tensor], edges: Sequence[GradientEdge | None]):
        super().__init__(8)
        self.site, self.tensors, self.edges = site, tensors, edges


SITES: dict[int, Site] = {}
CHANGING: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those that turned out to change their buffers
GENERATION = [0]  # of what is known about them: graphs of an older one are not used any more
_KEPT: weakref.WeakValueDictionary[int, Kept] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def add_site(site: Site) -> int:
    """Return its number."""
    define_operations()
    number = next(_numbers)
    SITES[number] = site
    subject = site.subject()
    if isinstance(subject, nn.Module):
        weakref.finalize(subject, SITES.pop, number, None)
    return number


def _site_of(number: int) -> Site:
    if number not in SITES:
        raise IncompatibleError(
            "A graph of torch.compile has a solve of a module that is gone, or of another process: compile the model "
            "here (torch.compile), and do not export it."
        )
    return SITES[number]


def _solve(tensors: list[Tensor], numbers: list[float], site: int) -> list[Tensor]:
    it = _site_of(site)
    own = it.own(tensors)
    before = it.changes(own)
    with it.at_work(own), torch.set_grad_enabled(it.records):
        results = it.run(*it.arguments(own, numbers))
    after = it.changes(own)
    if after != before:
        _note_changes(it, is_lost=after[0] != before[0])
    copies = [x.detach().clone(memory_format=torch.contiguous_format) for x in results]
    return [*copies, _ticket(it, own, results)]


def _note_changes(site: Site, is_lost: bool) -> None:
    """f changes a buffer: graphs are made anew, with a break at its solves. is_lost: what it changed was a copy."""
    holder = site.holder()
    if is_lost or holder is None:
        raise IncompatibleError(
            "f changes a tensor in place, one of its arguments or a buffer, which the graph of torch.compile has made. "
            "Let f return what it makes of it, or call the solve in a function under torch.compiler.disable."
        )
    if holder not in CHANGING:
        CHANGING.add(holder)
        GENERATION[0] += 1
        warn(
            f"{type(holder).__name__} changes a buffer in place when it is evaluated, of which the graph of "
            "torch.compile around the solve does not know: what it reads there in this call may be the old value. From "
            "the next call on, the solve is a break between two graphs."
        )


def _ticket(site: Site, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> Tensor:
    if not any([x.requires_grad for x in results]):
        return torch.zeros(1, dtype=torch.int64)
    number = next(_numbers)
    kept = Kept(site, tensors, [get_gradient_edge(x) if x.requires_grad else None for x in results])
    _KEPT[number] = kept
    return torch.frombuffer(kept, dtype=torch.int64).fill_(number)


def _solve_like(tensors: list[Tensor], numbers: list[float], site: int) -> list[Tensor]:
    it = _site_of(site)
    likes = it.likes(*it.arguments(tensors, numbers))
    return [*likes, torch.empty(1, dtype=torch.int64)]


def _pull(grads: list[Tensor | None], ticket: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    number = int(ticket)
    if number == 0:  # no result depends on them
        return [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in wanted]
    kept = _KEPT.get(number)
    if kept is None:
        raise IncompatibleError("A backward pass of torch.compile has lost what the solve in it had kept.")
    pairs = [(edge, g) for edge, g in zip(kept.edges, grads, strict=True) if edge is not None and g is not None]
    ends, starts = [edge for edge, _ in pairs], [g for _, g in pairs]
    inputs = [x for x, wants in zip(kept.tensors, kept.site.wants, strict=True) if wants]
    with kept.site.at_work(kept.tensors):
        # The graph is kept: the same results may be followed back twice, and it goes with the ticket.
        found = torch.autograd.grad(ends, inputs, starts, retain_graph=True, allow_unused=True)
    return [_fresh(g, x) for g, x in zip(found, inputs, strict=True)]


def _fresh(g: Tensor | None, x: Tensor) -> Tensor:
    """A gradient in memory of its own; zeros for None."""
    if g is None:
        return torch.zeros_like(x, memory_format=torch.contiguous_format, requires_grad=False)
    return g.clone(memory_format=torch.contiguous_format)


def _pull_like(grads: list[Tensor | None], ticket: Tensor, wanted: list[Tensor]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in wanted]


def _save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    tensors, numbers, site = inputs
    ctx.wants, ctx.no_gradients = _site_of(site).wants, (None if numbers else [], None)
    ctx.save_for_backward(output[-1], *[x for x, wants in zip(tensors, ctx.wants, strict=True) if wants])


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple:
    ticket, *wanted = ctx.saved_tensors
    found = iter(torch.ops.torchmali.solve_backward(grads[:-1], ticket, wanted))
    return [next(found) if wants else None for wants in ctx.wants], *ctx.no_gradients


@functools.lru_cache(maxsize=1)
def define_operations() -> None:
    """Make the operations known to torch: when a model is traced for the first time."""
    makes = torch.library.custom_op
    schema = "(Tensor[] tensors, float[] numbers, int site) -> Tensor[]"
    solve = makes("torchmali::solve", _solve, mutates_args=(), schema=schema)
    solve.register_fake(_solve_like)
    solve.register_autograd(_backward, setup_context=_save)
    schema = "(Tensor?[] grads, Tensor ticket, Tensor[] wanted) -> Tensor[]"
    makes("torchmali::solve_backward", _pull, mutates_args=(), schema=schema).register_fake(_pull_like)
