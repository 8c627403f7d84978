"""Whether ImageNet can be trained on GPUs of 11 GB: peak memory of one step of the full network, by method.

Bytes of live tensors in a forward and backward pass at 224 x 224, for two batch sizes; a line through both gives the
bytes per image. Random pixels, fresh weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import torchmali as tm
from experiments.engine.task import Config, Run
from experiments.images import METHODS, NORMALISE, one_step
from experiments.models.ode_resnet import RESNET, How, Normalise, resnet18

LIMIT = 11e9  # bytes of the paper's GPUs
PER_GPU = 64  # images of a batch of 256 on four
FIXED, TIGHT = "h 0.25", "tolerance 1e-5"


@dataclass(frozen=True)
class FeasibilityConfig(Config):
    """batches: two sizes for each stem; the small stem leaves images 16 times as large."""

    side: int = 224
    batches_large: tuple[int, ...] = (2, 4)
    batches_small: tuple[int, ...] = (1, 2)
    stems: tuple[str, ...] = ("large", "small")
    settings: tuple[str, ...] = (FIXED, TIGHT)


PRESETS = {
    "smoke": FeasibilityConfig(side=64, batches_large=(1, 2), stems=("large",), settings=(FIXED,)),
    "cpu": FeasibilityConfig(),
}


def ways(setting: str) -> dict[str, How]:
    """Methods with a solver each; MALI has none but its own, whose memory does not depend on the steps as published."""
    if setting == FIXED:
        own = {name: How(METHODS[name].fixed, tm.FixedStep(0.25), METHODS[name].gradient) for name in NAMES}
        return {"resnet": RESNET, **own}
    tight = tm.AdaptiveStep(1e-5, 1e-5)
    others = {name: How(tm.Dopri5(), tight, METHODS[name].gradient) for name in NAMES if name != "mali"}
    return {**others, "mali": How(tm.ALF(refresh="never"), tm.FixedStep(1 / 32), tm.MALI())}


NAMES = ("naive", "adjoint", "aca", "mali")


def peak(config: FeasibilityConfig, stem: str, how: How, batch: int) -> dict[str, Any]:
    torch.manual_seed(config.seed)
    network = resnet18(Normalise(*NORMALISE["folder"]), 1000, how, stem=stem)
    x, y = torch.rand(batch, 3, config.side, config.side), torch.randint(1000, (batch,))
    found, stats = one_step(network, (x, y))
    return {
        "peak": found,
        "steps": [s.n_steps for s in stats],
        "evaluations": [sum(s.n_evals_forward for s in stats), sum(s.n_evals_backward for s in stats)],
        "parameters": sum(p.numel() for p in network.parameters()),
    }


def main(config: FeasibilityConfig, run: Run) -> dict[str, Any]:
    sizes = {"large": config.batches_large, "small": config.batches_small}
    work: dict[str, Callable[[], Any]] = {}
    for stem in config.stems:
        for setting in config.settings:
            for method, how in ways(setting).items():
                for batch in sizes[stem]:
                    work[f"{stem} / {setting} / {method} / {batch}"] = partial(peak, config, stem, how, batch)
    cells = run.pieces(work)
    fits = {}
    for stem in config.stems:
        low, high = sizes[stem]
        for setting in config.settings:
            for method in ways(setting):
                one, other = (cells[f"{stem} / {setting} / {method} / {n}"]["peak"] for n in (low, high))
                each = (other - one) / (high - low)
                parameters = cells[f"{stem} / {setting} / {method} / {low}"]["parameters"]
                # Beside what was counted: weights and momentum; gradients were counted.
                wanted = one + each * (PER_GPU - low) + 2 * 4 * parameters
                steps = [cells[f"{stem} / {setting} / {method} / {n}"]["steps"] for n in (low, high)]
                fits[f"{stem} / {setting} / {method}"] = {
                    "same_steps": steps[0] == steps[1],  # else the line is a rough one
                    "bytes_per_image": each,
                    "bytes_for_64": wanted,
                    "fits": wanted <= LIMIT,
                    "largest_batch": max(0, int((LIMIT - 2 * 4 * parameters - one) // each + low)),
                }
    return {"cells": cells, "fits": fits}
