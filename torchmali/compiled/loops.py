"""Both loops of a solve as machine code: forward, and back with the vector-Jacobian products.

A loop runs over the rows of a table (table.py). Its state is carried from row to row. Everything else that it reads is
an argument, so that parameters may change between two calls. A loop is compiled when it is called first.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchmali._torch import lowered, traced, while_loop
from torchmali.compiled.capture import Event
from torchmali.compiled.recording import NotCompiledError
from torchmali.compiled.table import (
    ALPHA,
    BETA,
    FLOATS,
    JUDGES,
    KEEPS,
    NOISE,
    OF_ONE_STEP,
    REST,
    ROWS,
    STAGE,
    WIDTH,
    E,
    Piece,
    T,
)
from torchmali.refresh import MAGNIFIED
from torchmali.state.vectors import Tensors, rows

Code = Callable[..., Sequence[Tensor]]


class Form(NamedTuple):
    """What a loop is made for, beside the event: tensors like those of the state and those from outside."""

    z: Tensors
    outside: Sequence[Tensor]
    moves: Sequence[bool]  # which of those get a gradient
    t_dtype: torch.dtype


class Loops:
    """The compiled loops of an event. The forward loop may look whether f - v alternates (refresh.py)."""

    lock = threading.RLock()

    def __init__(self, event: Event, form: Form):
        self.event = event
        # Without memory: loops outlive the tensors that they were made for.
        self.form = form._replace(z=tuple(map(_likeness, form.z)), outside=tuple(map(_likeness, form.outside)))
        self.n = len(form.z)
        moving = [x for x, moves in zip(self.form.outside, form.moves, strict=True) if moves]
        self.depends = event.depends[self.n :]
        self.summed = [x for x, depends in zip(moving, self.depends, strict=False) if depends]
        self.codes: dict[str, Code] = {}
        self.zero_state: Tensors = tuple(map(zeros_like_leaf, form.z))  # not written to

    def forward(
        self, piece: Piece, first: Tensor, z: Tensors, v: Tensors, values: Sequence[Tensor], outside: Sequence[Tensor]
    ) -> tuple[Tensors, Tensors, Sequence[Tensor], Tensor | None]:
        """Follow a piece: z, v, the latest three f - v, and whether they alternate. values: empty if nobody looks."""
        n, name = self.n, "judged" if values else "forward"
        made = self._judged if values else self._forward
        found = self.code(name, made)(piece.rows, first, piece.stop, *z, *v, *values, *outside)
        z, v, rest = tuple(found[:n]), tuple(found[n : 2 * n]), found[2 * n :]
        return (z, v, rest[:-1], rest[-1]) if values else (z, v, (), None)

    def backward(
        self,
        piece: Piece,
        first: Tensor,
        state: Sequence[Tensor],
        outside: Sequence[Tensor],
        inner: Sequence[Tensor] = (),
    ) -> Sequence[Tensor]:
        """Follow a piece back. state: z, v, a_z, a_v, and the sums of `zero_sums`.

        inner: cotangents of f beside those that come from v, leaves of shape (slots, ...), by the STAGE of a row.
        """
        n_slots = len(inner[0]) if inner else 0
        code = self.code(f"backward {n_slots}", functools.partial(self._backward, n_slots))
        return code(piece.rows, first, piece.stop, *state, *inner, *outside)

    def fresh_zeros(self) -> list[Tensor]:
        """Zeros like the leaves of the state, to be written to."""
        return [zeros_like_leaf(x) for x in self.form.z]

    def zero_sums(self) -> list[Tensor]:
        """Zeros for the gradients of those tensors from outside on which f depends."""
        return [zeros_like_leaf(x) for x in self.summed]

    def gradients(self, sums: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradient of each moving tensor from outside; None: no dependence."""
        left = iter(sums)
        return [next(left) if depends else None for depends in self.depends]

    def code(self, name: str, made: Callable[[], tuple[Callable, list[Tensor]]]) -> Code:
        code = self.codes.get(name)
        if code is not None:
            return code
        with self.lock, torch.no_grad():
            if name not in self.codes:
                function, examples = made()
                try:
                    self.codes[name] = lowered(traced(function, examples, {}), examples)
                except Exception as error:
                    text = next(iter(str(error).strip().splitlines()), "")[:200]
                    raise NotCompiledError(f"torch cannot compile it: {type(error).__name__}: {text}") from error
        return self.codes[name]

    def _examples(self, *carried: Sequence[Tensor]) -> list[Tensor]:
        """Tensors like the table, the first row, the last one, what is carried, and those from outside."""
        table = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        likes = [zeros_like_leaf(x) for part in carried for x in part]
        numbers = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
        return [table, *numbers, *likes, *map(zeros_like_leaf, self.form.outside)]

    def _forward(self) -> tuple[Callable, list[Tensor]]:
        z, n = self.form.z, self.n

        def body(i: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            state, (table, _, *outside) = rest[: 2 * n], rest[2 * n :]
            moved, v, _ = self._moved(row_of(table, i), state, outside)
            return i + 1, *as_carried([*moved, *v], state)

        def run(table: Tensor, i: Tensor, stop: Tensor, *rest: Tensor) -> Sequence[Tensor]:
            return while_loop(_is_before, body, (i, *rest[: 2 * n]), (table, stop, *rest[2 * n :]))[1:]

        def _is_before(i: Tensor, *rest: Tensor) -> Tensor:
            return i < rest[2 * n + 1]

        return run, self._examples(z, z)

    def _judged(self) -> tuple[Callable, list[Tensor]]:
        z, n = self.form.z, self.n

        def body(i: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            state, (_, table, _, *outside) = rest[: 5 * n], rest[5 * n :]
            row = row_of(table, i)
            moved, v, u = self._moved(row, state[: 2 * n], outside)
            latest = [x - y for x, y in zip(u, state[n : 2 * n], strict=True)]
            values, keeps = state[2 * n :], row[KEEPS] > 0
            kept = [torch.where(keeps, y, x) for x, y in zip(values, (*values[n:], *latest), strict=True)]
            of_leaves = zip(moved, v, kept[:n], kept[n : 2 * n], kept[2 * n :], strict=True)
            found = [_alternation(row, *x) for x in of_leaves if x[0].numel()]
            alternates = _any([(row[JUDGES] > 0) & ~(x >= 0) for x in found], row)
            return i + 1, *as_carried([*moved, *v, *kept], state), alternates

        def run(table: Tensor, i: Tensor, stop: Tensor, *rest: Tensor) -> Sequence[Tensor]:
            state, outside = rest[: 5 * n], rest[5 * n :]
            no = torch.zeros((), dtype=torch.bool)
            return while_loop(_goes_on, body, (i, *state, no), (table, stop, *outside))[1:]

        def _goes_on(i: Tensor, *rest: Tensor) -> Tensor:
            return (i < rest[5 * n + 2]) & ~rest[5 * n]

        return run, self._examples(z, z, z, z, z)

    def _backward(self, n_slots: int) -> tuple[Callable, list[Tensor]]:
        z, n = self.form.z, self.n
        k = 4 * n + len(self.summed)
        inner = [x.new_empty(n_slots, *x.shape) for x in z] if n_slots else []

        def body(i: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            carried, (table, _, *others) = rest[:k], rest[k:]
            row, inner_, outside = row_of(table, i), others[: len(inner)], others[len(inner) :]
            stage = row[STAGE].to(torch.int64).reshape(1)
            of_stage = [torch.index_select(x, 0, stage)[0] for x in inner_]
            return i + 1, *as_carried(self._pulled(row, carried, outside, of_stage), carried)

        def run(table: Tensor, i: Tensor, stop: Tensor, *rest: Tensor) -> Sequence[Tensor]:
            return while_loop(_is_before, body, (i, *rest[:k]), (table, stop, *rest[k:]))[1:]

        def _is_before(i: Tensor, *rest: Tensor) -> Tensor:
            return i < rest[k + 1]

        return run, self._examples(z, z, z, z, self.summed, inner)

    def _moved(self, row: Tensor, state: Sequence[Tensor], outside: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
        """z and v behind a row, and u."""
        n = self.n
        z = [x + row[E].to(x.dtype) * y for x, y in zip(state[:n], state[n:], strict=True)]
        u = self.slope(row[T], z, outside)
        v = [_combined(row, x, y) for x, y in zip(u, state[n:], strict=True)]
        return z, v, u

    def slope(self, t: Tensor, z: Sequence[Tensor], outside: Sequence[Tensor]) -> list[Tensor]:
        """f(t, z) in a loop that is traced. t: of any dtype."""
        a = [torch.zeros_like(x) for x in z] if self.event.depends else []
        return list(self.event.graph(t.to(self.form.t_dtype), *z, *a, *outside)[: self.n])

    def _pulled(
        self, row: Tensor, carried: Sequence[Tensor], outside: Sequence[Tensor], of_stage: Sequence[Tensor]
    ) -> list[Tensor]:
        """z, v, their cotangents and the sums before a row that is taken back. of_stage: another cotangent of f."""
        n, graph = self.n, self.event.graph
        z, v, az, av = (carried[i * n : (i + 1) * n] for i in range(4))
        z = [x - row[E].to(x.dtype) * y for x, y in zip(z, v, strict=True)]
        av = [x + row[E].to(x.dtype) * y for x, y in zip(av, az, strict=True)]
        a = [row[ALPHA].to(x.dtype) * x for x in av]
        a = [x + y for x, y in zip(a, of_stage, strict=True)] if of_stage else a
        found = graph(row[T].to(self.form.t_dtype), *z, *a, *outside)
        u, grads = found[:n], iter(found[n:])
        depends = self.event.depends[:n]
        az = [x + next(grads) if is_new else x for x, is_new in zip(az, depends, strict=True)]
        sums = [x + g for x, g in zip(carried[4 * n :], grads, strict=True)]
        av = [row[BETA].to(x.dtype) * x for x in av]
        v = [_combined(row, x, y) for x, y in zip(u, v, strict=True)]
        return [*z, *v, *az, *av, *sums]


def row_of(table: Tensor, i: Tensor) -> Tensor:
    return torch.index_select(table, 0, i.reshape(1)).reshape(table.shape[1])


def _combined(row: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """alpha u + beta v"""
    return row[BETA].to(v.dtype) * v + row[ALPHA].to(v.dtype) * u


def _alternation(row: Tensor, z: Tensor, v: Tensor, x0: Tensor, x1: Tensor, x2: Tensor) -> Tensor:
    """`alternation` at the end of a step."""
    kind, is_of_one_step = z.dtype, row[JUDGES] == OF_ONE_STEP
    noise = row[NOISE + FLOATS.index(kind)].to(kind)
    return alternation(z + row[REST].to(kind) * v, x0, x1, x2, is_of_one_step, noise)


def alternation(z: Tensor, x0: Tensor, x1: Tensor, x2: Tensor, is_of_one_step: Tensor, noise: Tensor) -> Tensor:
    """`_alternation` of refresh.py, as if there were refreshes to come. noise: the factor of |z|^2."""
    z, x0, x1, x2 = rows(z), rows(x0), rows(x1) * MAGNIFIED, rows(x2)
    first, second = (x0 * x1).sum(1), (x1 * x2).sum(1)
    least = torch.where(is_of_one_step, first + second, torch.maximum(first, second))
    return (least + noise * (z * z).sum(1)).amin()


def _any(found: list[Tensor], row: Tensor) -> Tensor:
    total = row[0] != row[0]
    for x in found:
        total = total | x
    return total


def as_carried(found: Sequence[Tensor], carried: Sequence[Tensor]) -> list[Tensor]:
    """What a row made, in the memory layout of what it got, and none of it the very same tensor."""
    laid_out = []
    for x, like in zip(found, carried, strict=True):
        if x is like:
            x = x.clone()
        laid_out.append(x if x.stride() == like.stride() else zeros_like_leaf(like).copy_(x))
    return laid_out


def zeros_like_leaf(x: Tensor) -> Tensor:
    """Zeros in the memory layout of x, to the last stride."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu").zero_()


def _likeness(x: Tensor) -> Tensor:
    """The shape, the dtype and the layout of x, without memory."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
