"""Figure 4 c: peak memory of one gradient against the tolerance, and against the number of steps.

All methods have the same solver, adaptive or fixed ALF, so that they take the same steps. Peaks are bytes of live
tensors in the forward and backward pass, beyond those before: deterministic, on any machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torchmali as tm
from experiments.engine.task import Config, Run
from experiments.methods import gradients, label
from experiments.theory.problems import NETWORKS
from torchmali.measure import LiveBytes

# The adjoint's seminorm changes its steps, not its memory.
METHODS = gradients("naive", "naive_search", "adjoint", "aca", "mali", "exact")
SEARCH = label("naive_search")  # with fixed steps there is no search


@dataclass(frozen=True)
class MemoryConfig(Config):
    fields: tuple[str, ...] = ("MLP", "conv")
    tolerances: tuple[float, ...] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    steps: tuple[int, ...] = (4, 16, 64, 256, 1024)


PRESETS = {
    "smoke": MemoryConfig(fields=("MLP",), tolerances=(1e-1, 1e-2, 1e-3), steps=(4, 16, 64)),
    "cpu": MemoryConfig(),
    "paper": MemoryConfig(steps=(4, 8, 16, 32, 64, 128, 256, 512, 1024)),
}


def peak(config: MemoryConfig, field: str, method: str, controller: tm.StepController) -> dict[str, Any]:
    f, z0, _ = NETWORKS[field](config.seed, torch.float64)  # tolerances go down to 1e-6
    z0.requires_grad_()
    how: Any = {"solver": tm.ALF(), "controller": controller, "gradient": METHODS[method]}
    with LiveBytes() as live:
        solution = tm.solve(f, z0, (0.0, 1.0), **how)
        solution.y[-1].square().sum().backward()
    stats = solution.stats
    return {
        "peak": live.peak,
        "steps": stats.n_steps,
        "rejected": stats.n_rejected,
        "refreshes": stats.n_refreshes,
        "evaluations": [stats.n_evals_forward, stats.n_evals_backward],
    }


def least_squares(n: Sequence[float], peaks: Sequence[float]) -> dict[str, float]:
    """Fit peak = base + slope n by least squares; r2 is R^2."""
    slope, base = statistics.linear_regression(n, peaks)  # not torch's: its last bit changes from run to run
    mean = statistics.fmean(peaks)
    rest = sum((y - base - slope * x) ** 2 for x, y in zip(n, peaks, strict=True))
    spread = sum((y - mean) ** 2 for y in peaks)
    return {"base": base, "slope": slope, "r2": 1 - rest / spread if spread > 0 else 1.0}


def main(config: MemoryConfig, run: Run) -> dict[str, Any]:
    work: dict[str, Callable[[], Any]] = {}
    for field in config.fields:
        for method in METHODS:
            for n in config.steps:
                if method != SEARCH:
                    work[f"{field} / {method} / N {n}"] = partial(peak, config, field, method, tm.FixedStep(1 / n))
            for tolerance in config.tolerances:
                controller = tm.AdaptiveStep(tolerance, tolerance)
                work[f"{field} / {method} / tolerance {tolerance:g}"] = partial(peak, config, field, method, controller)
    cells = run.pieces(work)
    fits = {
        f"{field} / {method}": least_squares(
            config.steps, [cells[f"{field} / {method} / N {n}"]["peak"] for n in config.steps]
        )
        for field in config.fields
        for method in METHODS
        if method != SEARCH
    }
    sizes = {field: NETWORKS[field](config.seed, torch.float64).z0.nbytes for field in config.fields}
    return {"cells": cells, "fits": fits, "state_bytes": sizes}
