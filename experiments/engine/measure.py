"""Measurements of networks that solve ODEs: peak memory of a step, evaluations of f in the last solves."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from experiments.methods import published_tolerances
from torchmali import ALF, FixedStep, Stats
from torchmali.measure import LiveBytes
from torchmali.nn import SolveModule


def live_peak(step: Callable[[], None]) -> int:
    """Peak bytes of live tensors in a step, beyond those before it."""
    with LiveBytes() as live:
        step()
    return live.peak


def classification_peak(network: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    """Peak bytes of live tensors in a forward and backward pass of cross-entropy."""
    network.zero_grad(set_to_none=True)
    with published_tolerances(), LiveBytes() as live:
        F.cross_entropy(network(batch[0]), batch[1]).backward()
    return live.peak


class OneStep(NamedTuple):
    peak_bytes: int
    stats: list[Stats]


def one_step(network: nn.Module, batch: tuple[Tensor, Tensor]) -> OneStep:
    """Measure a forward and backward pass with a batch, of a copy: BatchNorm would remember it."""
    twin = copy.deepcopy(network).train()
    peak = classification_peak(twin, batch)
    return OneStep(peak, solves(twin))


def by_h(block: Any, sizes: Sequence[float], step: Callable[[], None]) -> dict[str, int]:
    """Peak bytes of live tensors in a step, with fixed steps in the block, and without refresh, which keeps states."""
    controller, solver, found = block.controller, block.solver, {}
    if isinstance(solver, ALF):
        block.solver = dataclasses.replace(solver, refresh="never")
    for h in sizes:
        block.controller = FixedStep(h)
        found[f"{h:g}"] = live_peak(step)
    block.controller, block.solver = controller, solver
    return found


def solves(module: nn.Module) -> list[Stats]:
    """Statistics of the last solve of each ODE in a module."""
    return [m.last_stats for m in module.modules() if isinstance(m, SolveModule) and m.last_stats]


def evaluations(module: nn.Module) -> dict[str, int]:
    """Evaluations of f in the last forward and backward pass of a module (0 backward where autograd does it)."""
    counted = solves(module)
    return {
        "evaluations_forward": sum(stats.n_evals_forward for stats in counted),
        "evaluations_backward": sum(stats.n_evals_backward for stats in counted),
    }


def graph_depth(y: Tensor) -> int:
    """Number of nodes on the longest path of a tensor's autograd graph."""
    root = y.grad_fn
    longest: dict[Any, int] = {None: 0}
    stack = [root]
    while stack:
        node = stack[-1]
        parents = [parent for parent, _ in node.next_functions] if node is not None else []
        missing = [parent for parent in parents if parent not in longest]
        if missing:
            stack += missing
        else:
            stack.pop()
            longest[node] = 1 + max((longest[parent] for parent in parents), default=0)
    return longest[root]
