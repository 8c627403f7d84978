"""Memory of one training step of the published flow of CIFAR-10, by gradient method, tolerance and batch.

Two batch sizes give the bytes of an image, and from those the largest batch on a GPU of 8 GB. Pixels and weights are
random: with the weights that training begins with, flows stand still and one step spans the whole flow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.engine.task import Config, Run
from experiments.flows.images import PRESETS as FLOWS
from experiments.flows.images import ImageFlow, network, peak_bytes, weight
from torchmali.nn import Hutchinson

LIMIT = 8e9  # bytes


@dataclass(frozen=True)
class FlowMemoryConfig(Config):
    """Settings. noise: of the weights of the last layers, which begin as zeros. of: a preset of `flows`."""

    of: str = "paper-cifar10"
    side: int = 32
    methods: tuple[str, ...] = ("mali", "aca", "naive")
    tolerances: tuple[float, ...] = (1e-2, 1e-3, 1e-4)
    batches: tuple[int, ...] = (1, 2)
    noise: float = 0.02


PRESETS = {"smoke": FlowMemoryConfig(side=4, tolerances=(1e-2, 1e-3)), "cpu": FlowMemoryConfig()}


def cell(config: FlowMemoryConfig, method: str, tolerance: float, batch: int) -> dict[str, Any]:
    flow = replace(FLOWS[config.of], method=method, rtol=tolerance, atol=tolerance / 10)
    torch.manual_seed(config.seed)
    made = network(flow, (3, config.side, config.side))
    with torch.no_grad():
        for cnf in made.flows():
            last: Any = cnf.func.layers[-1].layer
            last.weight.normal_(std=config.noise)
            cnf.trace = Hutchinson(same_for_all)
    module = ImageFlow(made, 256, weight(flow), flow.lr, flow.warmup)
    pixels = torch.randint(256, (1, 3, config.side, config.side)).float().repeat(batch, 1, 1, 1)
    peak = peak_bytes(module, pixels)
    stats = [cnf.last_stats for cnf in made.flows()]
    return {
        "peak": peak,
        "steps": sum(s.n_steps for s in stats if s),
        "parameters": sum(p.numel() for p in made.parameters()),
    }


def same_for_all(x: Tensor) -> Tensor:
    """Draw noise that is the same for all images.

    A batch of equal images then takes the steps of one image, and bytes are in proportion to the batch.
    """
    return torch.randn_like(x[:1]).expand_as(x).clone()


def main(config: FlowMemoryConfig, run: Run) -> dict[str, Any]:
    work: dict[str, Callable[[], Any]] = {
        f"{method} / {tolerance:g} / {batch}": partial(cell, config, method, tolerance, batch)
        for method in config.methods
        for tolerance in config.tolerances
        for batch in config.batches
    }
    cells, fits, (low, high) = run.pieces(work), {}, config.batches
    for method in config.methods:
        for tolerance in config.tolerances:
            one, other = (cells[f"{method} / {tolerance:g} / {n}"]["peak"] for n in (low, high))
            each = (other - one) / (high - low)
            fixed = 3 * 4 * cells[f"{method} / {tolerance:g} / {low}"]["parameters"]  # weights, Adam's two means
            fits[f"{method} / {tolerance:g}"] = {
                "bytes_per_image": each,
                "largest_batch": max(0, int((LIMIT - fixed - one) // each + low)),
            }
    return {"cells": cells, "fits": fits}
