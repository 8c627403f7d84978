"""Fixed steps of a few solvers in plain torch, written from their textbook formulas: an oracle without the library."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

import torchmali as tm

Leaves = list[Tensor]
F = Callable[[Any, Leaves], Leaves]
TABLEAUX: dict[str, tuple[list[float], list[list[float]], list[float]]] = {  # nodes, matrix, weights
    "Euler": ([0], [[]], [1]),
    "Midpoint": ([0, 1 / 2], [[], [1 / 2]], [0, 1]),
    "Heun": ([0, 1], [[], [1]], [1 / 2, 1 / 2]),
    "RK4": ([0, 1 / 2, 1 / 2, 1], [[], [1 / 2], [0, 1 / 2], [0, 0, 1]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
}


def moved(z: Leaves, e: Any, v: Leaves) -> Leaves:
    """z + e v, each in its own dtype."""
    return [x + (e * y).to(x.dtype) for x, y in zip(z, v, strict=True)]


def alf_step(f: F, t0: Any, t1: Any, z: Leaves, v: Leaves, eta: float) -> tuple[Leaves, Leaves]:
    """Algorithm 2 of the paper."""
    h = t1 - t0
    k = moved(z, h / 2, v)
    u = f(t0 + h / 2, k)
    v = [y + 2 * eta * (x - y) for x, y in zip(u, v, strict=True)]
    return moved(k, h / 2, v), v


def runge_kutta_step(f: F, t0: Any, t1: Any, z: Leaves, name: str) -> Leaves:
    h, (nodes, matrix, weights), slopes = t1 - t0, TABLEAUX[name], []
    for c, row in zip(nodes, matrix, strict=True):
        y = z
        for a, k in zip(row, slopes, strict=True):
            y = moved(y, h * a, k)
        slopes.append(f(t0 + c * h, y))
    for b, k in zip(weights, slopes, strict=True):
        z = moved(z, h * b, k)
    return z


def knows(solver: tm.Solver, controller: tm.StepController, n_refreshes: int) -> bool:
    """Whether `solve` below takes the steps of this solver and controller."""
    if not isinstance(controller, tm.FixedStep) or not controller.land:
        return False
    if isinstance(solver, tm.ALF):
        return solver.order == 2 and (solver.refresh_policy != "auto" or n_refreshes == 0)
    return type(solver).__name__ in TABLEAUX


def solve(func: Callable, y0: Any, t: Any, solver: tm.Solver, controller: tm.FixedStep, args: tuple) -> Any:
    """Return y at all times, by steps of size h from each output time."""
    leaves, structure = pytree.tree_flatten(y0)
    widest = max((z.dtype for z in leaves), key=lambda dtype: dtype.itemsize)
    wants_t = isinstance(t, Tensor) and t.requires_grad
    times: Sequence[Any] = list(t.double().unbind()) if wants_t else [float(x) for x in t]

    def f(t: Any, z: Leaves) -> Leaves:
        t = t.to(widest) if isinstance(t, Tensor) else torch.tensor(t, dtype=widest)
        z = [x if x.requires_grad else x.detach().requires_grad_() for x in z]  # func may differentiate by z
        answer = func(t, pytree.tree_unflatten(z, structure), *args)
        return pytree.tree_leaves(answer)

    z, outputs, n, is_alf = leaves, [leaves], 0, isinstance(solver, tm.ALF)
    v = f(times[0], z) if is_alf else []
    for start, target in pairwise(times):
        span = float(torch.as_tensor(target - start).detach())
        n_steps = max(1, math.ceil(abs(span) / controller.h - 1e-3))
        grid = [start, *(start + math.copysign(controller.h * i, span) for i in range(1, n_steps)), target]
        for t0, t1 in pairwise(grid):
            if isinstance(solver, tm.ALF):
                z, v = alf_step(f, t0, t1, z, v, solver.eta)
                n += 1
                is_due = isinstance(solver.refresh_policy, int) and n % solver.refresh_policy == 0
                v = f(t1, z) if is_due and t1 is not times[-1] else v
            else:
                z = runge_kutta_step(f, t0, t1, z, type(solver).__name__)
        outputs.append(z)
    return pytree.tree_unflatten([torch.stack(leaf) for leaf in zip(*outputs, strict=True)], structure)
