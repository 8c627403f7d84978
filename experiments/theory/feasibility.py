"""Feasibility of ImageNet on GPUs of 11 GB: peak memory of one step of the full network, by method.

Bytes of live tensors in a forward and backward pass at 224 x 224, for two batch sizes; a line through both gives the
bytes per image. Pixels are random, weights untrained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torchmali as tm
from experiments.engine.measure import one_step
from experiments.engine.task import Config, Run
from experiments.methods import METHODS, PUBLISHED_ALF, Solve, pick
from experiments.models.ode_resnet import NORMALISE, RESNET, Normalise, resnet18

LIMIT = 11e9  # bytes of the paper's GPUs
PER_GPU = 64  # images of a batch of 256 on four
FIXED, TIGHT = "h 0.25", "tolerance 1e-5"


@dataclass(frozen=True)
class FeasibilityConfig(Config):
    """Settings of the measurement. batches: two sizes for each stem; the small stem leaves images 16 times as large."""

    side: int = 224
    batches_large: tuple[int, ...] = (2, 4)
    batches_small: tuple[int, ...] = (1, 2)
    stems: tuple[str, ...] = ("large", "small")
    settings: tuple[str, ...] = (FIXED, TIGHT)


PRESETS = {
    "smoke": FeasibilityConfig(side=64, batches_large=(1, 2), stems=("large",), settings=(FIXED,)),
    "cpu": FeasibilityConfig(),
}


NAMES = ("naive", "adjoint", "aca", "mali")


def solves_of(setting: str) -> dict[str, Solve]:
    """Methods with a solver each.

    MALI has only its own solver, which takes fixed steps also where the others adapt: as published, its memory does not
    depend on the steps.
    """
    if setting == FIXED:
        return {"resnet": RESNET, **{name: METHODS[name].fixed_steps(0.25) for name in NAMES}}
    others = {name: pick(name, solver=tm.Dopri5()).adaptive_steps(1e-5, 1e-5) for name in NAMES if name != "mali"}
    return {**others, "mali": pick("mali", fixed=PUBLISHED_ALF).fixed_steps(1 / 32)}


def peak(config: FeasibilityConfig, stem: str, solve: Solve, batch: int) -> dict[str, Any]:
    torch.manual_seed(config.seed)
    network = resnet18(Normalise(*NORMALISE["folder"]), 1000, solve, stem=stem)
    x, y = torch.rand(batch, 3, config.side, config.side), torch.randint(1000, (batch,))
    found, stats = one_step(network, (x, y))
    return {
        "peak": found,
        "steps": [s.n_steps for s in stats],
        "evaluations": [sum(s.n_evals_forward for s in stats), sum(s.n_evals_backward for s in stats)],
        "parameters": sum(p.numel() for p in network.parameters()),
    }


def line_through(cells: Mapping[str, Any], name: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Bytes per image from two batch sizes, and what follows from them for a GPU."""
    low, high = sizes
    one, other = (cells[f"{name} / {n}"] for n in (low, high))
    each = (other["peak"] - one["peak"]) / (high - low)
    beside = 2 * 4 * one["parameters"]  # weights and momentum; gradients were counted
    wanted = one["peak"] + each * (PER_GPU - low) + beside
    return {
        "same_steps": one["steps"] == other["steps"],  # else the line is a rough one
        "bytes_per_image": each,
        "bytes_for_64": wanted,
        "fits": wanted <= LIMIT,
        "largest_batch": max(0, int((LIMIT - beside - one["peak"]) // each + low)),
    }


def main(config: FeasibilityConfig, run: Run) -> dict[str, Any]:
    sizes = {"large": config.batches_large, "small": config.batches_small}
    work: dict[str, Callable[[], Any]] = {}
    measured: dict[str, tuple[int, ...]] = {}
    for stem in config.stems:
        for setting in config.settings:
            for method, solve in solves_of(setting).items():
                measured[f"{stem} / {setting} / {method}"] = sizes[stem]
                for batch in sizes[stem]:
                    work[f"{stem} / {setting} / {method} / {batch}"] = partial(peak, config, stem, solve, batch)
    cells = run.pieces(work)
    return {"cells": cells, "fits": {name: line_through(cells, name, batches) for name, batches in measured.items()}}
