"""One attempt at an adaptive step as machine code: the step, its error over the tolerance, whether f - v alternates.

What is decided on these two numbers is decided where eager solves do it, by the controller and the loop, in Python. An
attempt runs over the rows of a table, one for each evaluation of f. Table, times and tolerances are arguments: the same
code serves every leapfrog, and the start v = f(t0, z0), which is one row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali._torch import while_loop
from torchmali.compiled.loops import Loops, alternation, as_carried, row_of, zeros_like_leaf
from torchmali.compiled.table import ROWS
from torchmali.refresh import LARGE, MAGNIFIED, N_VALUES
from torchmali.solvers.leapfrog import Leapfrog, if_rough, norms
from torchmali.state.vectors import Tensors, eps_of

# Columns of a row: z <- z + c h v, u = f(t0 + node h, z), total <- total + d u, v <- alpha u + beta v; whether f - v is
# kept for the refresh, and whether it is the first reflect.
WIDTH = 7
NODE, C, ALPHA, BETA, D, KEEPS, FIRST = range(WIDTH)
# Numbers of a list: the drift behind the last row; weights in the error of v and f at the start, and of v at the end;
# whether a step may be rough; whether a step has three f - v of its own.
LAST, V_IN, F_IN, V_OUT, MAY_BE_ROUGH, OF_ONE_STEP = range(6)
T0, H, JUDGES = range(3)  # numbers of an attempt: its start, its length, and whether there are f - v enough to judge


class AttemptPlan(NamedTuple):
    """A leapfrog in the form that attempts need."""

    table: Tensor  # (ROWS, WIDTH)
    first: Tensor  # the first row: 0
    stop: Tensor  # the number of rows
    numbers: Tensor  # those of the list
    n_evals: int
    gives_slope: bool  # the last row is f at the end of the step


class Attempted(NamedTuple):
    """What an attempt leads to."""

    z: Tensors
    v: Tensors
    error: Tensors
    u: Tensors  # of the last row
    values: Sequence[Tensor]  # the latest three f - v, leaf by leaf
    numbers: Tensor  # the error over the tolerance, and the alternation
    slopes: Sequence[Tensor]  # f at all rows, if they were wanted: leaves of shape (n_slots, ...)


@functools.lru_cache(maxsize=64)
def plan_of_step(solver: Leapfrog) -> AttemptPlan:
    """The table of a leapfrog's steps."""
    first, rest, observed = solver.scheme
    n, weights = len(rest), solver.estimate and solver.estimate.weights
    cs = [first, *[c for _, c in rest]]
    rows = [_row(NODE=node, C=cs[j], ALPHA=2.0, BETA=-1.0, KEEPS=j in observed) for j, (node, _) in enumerate(rest)]
    rows[0][FIRST] = 1.0
    last, shares, gives_slope = cs[-1], (0.0, 0.0, 0.0), False
    if weights:
        shares = weights[0], 0.0, 0.0
        for row, d in zip(rows, weights[1:], strict=True):
            row[D] = d
    elif n == 1:  # h (u1 - v_in), see Leapfrog._judged
        shares, rows[0][D] = (-1.0, 0.0, 0.0), 1.0
    else:  # h (w_out - w_in), and f at the end of the step
        rows.append(_row(NODE=1.0, C=last, ALPHA=0.0, BETA=1.0, D=-1.0))
        last, shares, gives_slope = 0.0, (-1.0, 1.0, 1.0), True
    may_be_rough = bool(weights) and n % 2 == 1 and n > 1
    numbers = [last, *shares, float(may_be_rough), float(len(observed) == N_VALUES)]
    return _plan(rows, numbers, gives_slope)


@functools.lru_cache(maxsize=1)
def plan_of_start() -> AttemptPlan:
    """The table of v = f(t0, z0)."""
    return _plan([_row(ALPHA=1.0)], [0.0] * 6, True)


def _row(**columns: float) -> list[float]:
    row = [0.0] * WIDTH
    for name, value in columns.items():
        row[globals()[name]] = float(value)
    return row


def _plan(rows: list[list[float]], numbers: list[float], gives_slope: bool) -> AttemptPlan:
    table = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    table[: len(rows)] = torch.tensor(rows, dtype=torch.float64)
    first, stop = torch.tensor(0), torch.tensor(len(rows))
    return AttemptPlan(table, first, stop, torch.tensor(numbers, dtype=torch.float64), len(rows), gives_slope)


def tolerance_of(sizes: Sequence[int], rtol: Sequence[float], atol: Sequence[float]) -> Tensor:
    """Tolerances of all leaves as numbers: (number of elements, rtol, atol, whether the leaf counts).

    A leaf with an infinite tolerance does not count.
    """
    counts = [math.isfinite(r) and math.isfinite(a) for r, a in zip(rtol, atol, strict=True)]
    n = sum(size for size, is_counted in zip(sizes, counts, strict=True) if is_counted)
    relative = [r if is_counted else 0.0 for r, is_counted in zip(rtol, counts, strict=True)]
    absolute = [(a or 1e-36) if is_counted else 1.0 for a, is_counted in zip(atol, counts, strict=True)]
    return torch.tensor([max(n, 1), *relative, *absolute, *map(float, counts)], dtype=torch.float64)


class Attempts:
    """The code of attempts, for the f of some loops."""

    def __init__(self, loops: Loops):
        self.loops, self.n = loops, loops.n

    def __call__(
        self,
        plan: AttemptPlan,
        moment: Sequence[float],
        tolerance: Tensor,
        state: Sequence[Tensor],
        outside: Sequence[Tensor],
        n_slots: int = 0,
    ) -> Attempted:
        """moment: T0, H, JUDGES. state: z, v, f at the start (or v), and the latest three f - v.

        n_slots: of the memory in which f at all rows is kept; 0: it is not.
        """
        n, likes = self.n, self.loops.zero_state * 6
        state = [x if x.stride() == y.stride() else laid_out_like(x, y) for x, y in zip(state, likes, strict=True)]
        numbers = plan.numbers, torch.tensor(moment, dtype=torch.float64), tolerance
        code = self.loops.code(f"attempt {n_slots}", functools.partial(self._made, n_slots))
        found = code(plan.table, plan.first, plan.stop, *numbers, *state, *outside)
        z, v, error, u = (tuple(found[i * n : (i + 1) * n]) for i in range(4))
        return Attempted(z, v, error, u, found[4 * n : 7 * n], found[7 * n], found[7 * n + 1 :])

    def _made(self, n_slots: int) -> tuple[Callable, list[Tensor]]:
        n, z = self.n, self.loops.form.z
        numbers = [torch.zeros(k, dtype=torch.float64) for k in (6, 3, 1 + 3 * n)]
        table, integers = torch.zeros(ROWS, WIDTH, dtype=torch.float64), [torch.tensor(0), torch.tensor(0)]
        likes = [zeros_like_leaf(x) for x in (*z * 6, *self.loops.form.outside)]
        return functools.partial(self._run, n_slots), [table, *integers, *numbers, *likes]

    def _run(self, n_slots: int, table: Tensor, i: Tensor, stop: Tensor, *rest: Tensor) -> Sequence[Tensor]:
        n = self.n
        (numbers, moment, tolerance), z0 = rest[:3], rest[3 : 3 + n]
        v_in, f_in, values = rest[3 + n : 3 + 2 * n], rest[3 + 2 * n : 3 + 3 * n], rest[3 + 3 * n : 3 + 6 * n]
        outside = rest[3 + 6 * n :]
        totals = [
            _number(numbers, V_IN, x) * x + _number(numbers, F_IN, x) * y for x, y in zip(v_in, f_in, strict=True)
        ]
        zeros, sizes = self.loops.fresh_zeros(), [norms(x) * 0 for x in z0]
        # u, f - v at the first reflect, and the norm of each row of f there
        slots = [x.new_zeros(n_slots, *x.shape) for x in z0] if n_slots else []
        carried = [*z0, *v_in, *totals, *zeros, *self.loops.fresh_zeros(), *values, *sizes, *slots]
        body, goes_on = (functools.partial(part, len(carried)) for part in (self._body, self._goes_on))
        found = while_loop(goes_on, body, (i, *carried), (table, stop, moment, *outside))[1:]
        z, v, totals, u, first, values, sizes, slots = (found[i * n : (i + m) * n] for i, m in _PARTS)
        h, last = moment[H], numbers[LAST] * moment[H]
        z = [x + last.to(x.dtype) * y for x, y in zip(z, v, strict=True)]
        error = []
        for x, y, of_u, before, size in zip(totals, v, u, first, sizes, strict=True):
            rough = if_rough((y - of_u) - before, size, of_u)  # at a reflect f - v is v - f behind it
            whole = x + _number(numbers, V_OUT, x) * y + torch.where(numbers[MAY_BE_ROUGH] > 0, rough, 0.0)
            error.append(h.to(x.dtype) * whole)
        ratio = _ratio(tolerance, error, z0, z)
        alternates = self._alternation(numbers, moment, tolerance, z, values)
        laid_out = as_carried([*z, *v, *error, *u, *values], (*z0 * 4, *values))
        return [*laid_out, torch.stack([ratio, alternates]), *slots]

    def _goes_on(self, n_carried: int, i: Tensor, *rest: Tensor) -> Tensor:
        return i < rest[n_carried + 1]

    def _body(self, n_carried: int, i: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        n, carried, (table, _, moment, *outside) = self.n, rest[:n_carried], rest[n_carried:]
        z, v, totals, _, first, values, sizes, slots = (carried[i * n : (i + m) * n] for i, m in _PARTS)
        row = row_of(table, i)
        e, t = row[C] * moment[H], moment[T0] + row[NODE] * moment[H]
        z = [x + e.to(x.dtype) * y for x, y in zip(z, v, strict=True)]
        u = [x.clone() for x in self.loops.slope(t, z, outside)]  # it may be z, or a view of it
        latest = [x - y for x, y in zip(u, v, strict=True)]
        is_first, keeps = row[FIRST] > 0, row[KEEPS] > 0
        totals = [x + _number(row, D, x) * y for x, y in zip(totals, u, strict=True)]
        first = [torch.where(is_first, x, y) for x, y in zip(latest, first, strict=True)]
        sizes = [torch.where(is_first, norms(x), y) for x, y in zip(u, sizes, strict=True)]
        values = [torch.where(keeps, y, x) for x, y in zip(values, (*values[n:], *latest), strict=True)]
        v = [_number(row, BETA, x) * y + _number(row, ALPHA, x) * x for x, y in zip(u, v, strict=True)]
        slots = [torch.where(_is_at(i, x), y, x) for x, y in zip(slots, u, strict=False)]
        return i + 1, *as_carried([*z, *v, *totals, *u, *first, *values, *sizes, *slots], carried)

    def _alternation(
        self, numbers: Tensor, moment: Tensor, tolerance: Tensor, z: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """`Refresher.alternation`: the least of all leaves that count."""
        n, least = self.n, torch.ones((), dtype=torch.float64)
        for k, of_leaf in enumerate(zip(z, values[:n], values[n : 2 * n], values[2 * n :], strict=True)):
            x = of_leaf[0]
            if x.numel():
                noise = ((4 * eps_of(x.dtype) / moment[H].abs()).square() * MAGNIFIED).clamp(max=LARGE)
                found = alternation(*of_leaf, numbers[OF_ONE_STEP] > 0, noise.to(x.dtype)).to(torch.float64)
                least = torch.where(tolerance[1 + 2 * n + k] > 0, torch.minimum(least, found), least)
        return torch.where(moment[JUDGES] > 0, least, 1.0)


_PARTS = ((0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 3), (8, 1), (9, 1))  # of what is carried: where, and how many


def _is_at(i: Tensor, slots: Tensor) -> Tensor:
    """Which of the slots is the i-th one."""
    return (torch.arange(len(slots)) == i).reshape(-1, *[1] * (slots.ndim - 1))


def _number(numbers: Tensor, i: int, like: Tensor) -> Tensor:
    return numbers[i].to(like.dtype)


def _ratio(tolerance: Tensor, error: Sequence[Tensor], z0: Sequence[Tensor], z1: Sequence[Tensor]) -> Tensor:
    """`AdaptiveStepState.error_ratio` with `rms_norm`."""
    n, total = len(error), torch.zeros((), dtype=torch.float64)
    for k, (x, a, b) in enumerate(zip(error, z0, z1, strict=True)):
        rtol, atol, counts = (tolerance[1 + i * n + k] for i in range(3))
        scaled = x / (torch.maximum(a.abs(), b.abs()) * rtol.to(x.dtype) + atol.to(x.dtype))
        total = total + torch.where(counts > 0, scaled.square().sum().to(torch.float64), 0.0)
    return (total / tolerance[0]).sqrt()


def laid_out_like(x: Tensor, like: Any) -> Tensor:
    """x in the memory layout of another tensor."""
    return torch.empty_strided(like.shape, like.stride(), dtype=x.dtype).copy_(x)
