"""Table 1: computation, memory, depth and reverse accuracy of each method, measured, beside the paper's formulas.

The paper counts evaluations of f (times N_z N_f each) with N_t accepted steps, m trials per step, N_r steps of the
reverse solve. All methods solve the same problem with ALF: fixed steps (m = 1) and adaptive ones with a first step far
too long (m > 1). Our counts exceed the formulas by one evaluation for v0, and one for the choice of the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchmali as tm
from experiments.engine.measure import graph_depth
from experiments.engine.task import Config, Run
from experiments.methods import EXACT_INT64, PUBLISHED_ALF, gradients
from experiments.methods import METHODS as TABLE
from experiments.theory.memory import least_squares
from experiments.theory.problems import NETWORKS
from torchmali.measure import LiveBytes

METHODS: dict[str, tm.GradientMethod] = {  # the paper's naive method differentiates the search for h
    "naive": TABLE["naive_search"].gradient,
    "naive, h detached": TABLE["naive"].gradient,
    **gradients("adjoint", "aca", "mali"),
    "MALI exact": EXACT_INT64,
}


@dataclass(frozen=True)
class AccountingConfig(Config):
    fields: tuple[str, ...] = ("MLP", "conv")
    steps: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256)
    counted: int = 32  # fixed steps at which counts and accuracy are taken
    tolerance: float = 1e-4
    h0: float = 1.0  # too long: trials are rejected


PRESETS = {
    "smoke": AccountingConfig(fields=("MLP",), steps=(4, 16), counted=8, tolerance=1e-2),
    "cpu": AccountingConfig(),
    "paper": AccountingConfig(),
}


def controllers(config: AccountingConfig) -> dict[str, tm.StepController]:
    adaptive = tm.AdaptiveStep(config.tolerance, config.tolerance, h0=config.h0)
    return {"fixed": tm.FixedStep(1 / config.counted), "adaptive": adaptive}


def counts(config: AccountingConfig, field: str, method: str, steps: str) -> dict[str, Any]:
    """Evaluations, steps and the gradient, in float64."""
    f, z0, _ = NETWORKS[field](config.seed, torch.float64)
    z0.requires_grad_()
    calls = {"forward": 0, "backward": 0}
    phase = "forward"

    def counted(t: Tensor, z: Tensor) -> Tensor:
        calls[phase] += 1
        return f(t, z)

    controller = controllers(config)[steps]
    how: Any = {"solver": PUBLISHED_ALF, "controller": controller, "gradient": METHODS[method]}
    solution = tm.solve(counted, z0, (0.0, 1.0), **how)
    loss, stats, phase = solution.y[-1].square().sum(), solution.stats, "backward"
    is_naive = method.startswith("naive")
    graph = graph_depth(loss) if is_naive else None
    grads = torch.autograd.grad(loss, [z0, *f.parameters()])
    exact = tm.solve(f, z0, (0.0, 1.0), **{**how, "gradient": tm.Naive()}).y[-1].square().sum()
    truth = torch.autograd.grad(exact, [z0, *f.parameters()])
    a, b = (torch.cat([g.flatten() for g in gs]) for gs in (grads, truth))
    return {
        "steps": stats.n_steps,
        "rejected": stats.n_rejected,
        "forward": calls["forward"],
        "backward": calls["backward"],
        "vjps": stats.n_vjps,
        "depth": graph,
        "error": float((a - b).norm() / b.norm()),
        "rebuilt": stats.reconstruction_error,
        "back": _reverse_solve(f, z0.detach(), controller) if method == "adjoint" else None,
    }


def _reverse_solve(f: Any, z0: Tensor, controller: tm.StepController) -> dict[str, float]:
    """Return the steps N_r of a solve back in time alone, and its distance from z0."""
    how: Any = {"solver": PUBLISHED_ALF, "controller": controller}
    with torch.no_grad():
        z = tm.solve(f, z0, (0.0, 1.0), **how).y[-1]
        solution = tm.solve(f, z, (1.0, 0.0), **how)
    return {"steps": solution.stats.n_steps, "missed": float((solution.y[-1] - z0).norm() / z0.norm())}


def peak(config: AccountingConfig, field: str, method: str, n: int) -> int:
    f, z0, _ = NETWORKS[field](config.seed)
    z0.requires_grad_()
    how: Any = {"solver": PUBLISHED_ALF, "controller": tm.FixedStep(1 / n), "gradient": METHODS[method]}
    with LiveBytes() as live:
        tm.solve(f, z0, (0.0, 1.0), **how).y[-1].square().sum().backward()
    return live.peak


def one_step_depth(config: AccountingConfig, field: str) -> int:
    """Nodes of the graph of f alone: all that ACA and MALI ever hold at once."""
    f, z0, _ = NETWORKS[field](config.seed)
    return graph_depth(f(torch.zeros(()), z0.requires_grad_()).sum())


def main(config: AccountingConfig, run: Run) -> dict[str, Any]:
    work: dict[str, Callable[[], Any]] = {}
    for field in config.fields:
        for method in METHODS:
            for steps in controllers(config):
                work[f"{field} / {method} / {steps}"] = partial(counts, config, field, method, steps)
            for n in config.steps:
                work[f"{field} / {method} / peak {n}"] = partial(peak, config, field, method, n)
        work[f"{field} / depth of f"] = partial(one_step_depth, config, field)
    cells = run.pieces(work)
    fits = {
        f"{field} / {method}": least_squares(
            config.steps, [cells[f"{field} / {method} / peak {n}"] for n in config.steps]
        )
        for field in config.fields
        for method in METHODS
    }
    sizes = {field: NETWORKS[field](config.seed).z0.nbytes for field in config.fields}
    return {"cells": cells, "fits": fits, "state_bytes": sizes}
