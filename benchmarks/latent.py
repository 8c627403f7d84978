"""An epoch of the latent ODE of Table 4, which has 100 output times: steps that end on each of them, and free ones.

    python -m benchmarks.latent [--rounds 8] [--steps 16]

Network, data (Hopper, simulated unless the data folder has it), batches, loss and optimizer are those of
`python -m experiments run latent --preset cpu`, whose epoch has 16 batches (--steps). Every method trains its own copy
of the same weights, an epoch in each round, in random order. Evaluations are those of the generative solve; the seconds
are of the whole epoch, most of which is the encoder's, the same for all.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torchmali as tm
from benchmarks.harness import finish, options_of, paired_ratio
from experiments.data import hopper
from experiments.series.latent import GapFiller, Gappy, LatentConfig, block, latent_ode, trajectories

CONFIG = LatentConfig()
LANDING = tm.AdaptiveStep(CONFIG.rtol, CONFIG.atol, land=True)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {  # names in `experiments`, and what is changed
    "MALI, one step per output": ("mali", {}),
    "MALI, adaptive, ends on outputs": ("free", {"controller": LANDING}),
    "MALI, free steps": ("free", {}),
    "naive, Dopri5": ("naive", {}),
}
BASE = "naive, Dopri5"


def model(method: str, changes: dict[str, Any], times: Tensor) -> GapFiller:
    torch.manual_seed(0)
    make = partial(block(replace(CONFIG, method=method), times.tolist()), **changes)
    return GapFiller(latent_ode(CONFIG, make), times, CONFIG.lr, CONFIG.kl_wait)


def one_epoch(module: Any, batches: Any, optimizer: torch.optim.Optimizer, schedule: Any, epoch: int) -> dict[str, Any]:
    """Train an epoch; return its seconds of the processor, evaluations, and mean loss."""
    found = {"seconds": 0.0, "forward": 0, "backward": 0, "loss": 0.0}
    start = time.process_time()
    for batch in batches:
        optimizer.zero_grad()
        loss = module.loss(batch, module.kl_weight(epoch)).total
        loss.backward()
        optimizer.step()
        schedule.step()
        stats = module.network.generate.last_stats
        found["forward"] += stats.n_evals_forward
        found["backward"] += stats.n_evals_backward
        found["loss"] += loss.item() / len(batches)
    return found | {"seconds": time.process_time() - start}


def measure(rounds: int, n_batches: int) -> dict[str, Any]:
    times, order = hopper.times(), random.Random(0)
    found, source = trajectories(CONFIG, None, Console().print)
    x = hopper.train_test(found)[0][: n_batches * CONFIG.batch]
    data = Gappy(x, x[:0], CONFIG.fraction, CONFIG.batch, test_seed=0)
    modules = {name: model(*how, times) for name, how in METHODS.items()}
    optimizers = {name: module.configure_optimizers() for name, module in modules.items()}
    epochs: dict[str, list[dict[str, float]]] = {name: [] for name in modules}
    for i in range(rounds):
        Console().print(f"epoch {i + 1} of {rounds}")
        for name in order.sample(list(modules), len(modules)):
            torch.manual_seed(i)
            gaps = torch.Generator().manual_seed(i)
            optimizer, schedule = optimizers[name]["optimizer"], optimizers[name]["lr_scheduler"]["scheduler"]
            batches = list(data.train(i, gaps, gaps))
            epochs[name].append(one_epoch(modules[name], batches, optimizer, schedule, i))
    seconds = {name: [epoch["seconds"] for epoch in found] for name, found in epochs.items()}
    return {
        "data": source,
        "batches": len(batches),
        "time_ratios": {name: paired_ratio(seconds[name], seconds[BASE]) for name in modules},
        "epochs": epochs,
    }


def report(result: dict[str, Any]) -> bool:
    """Print the table of the last epoch."""
    table = Table(title=f"Evaluations and time of an epoch: {result['batches']} batches, 100 output times")
    for column in ("method", "forward", "backward", "seconds", "x naive", "loss"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, epochs in result["epochs"].items():
        last, ratio = epochs[-1], result["time_ratios"][name]["median"]
        counts = [f"{last['forward']:,.0f}", f"{last['backward']:,.0f}"]
        table.add_row(name, *counts, f"{last['seconds']:.2f}", f"{ratio:.2f}", f"{last['loss']:.0f}")
    Console().print(table)
    return True


def main() -> None:
    options = options_of(__doc__, rounds=8, steps=16)
    result = measure(options.rounds, options.steps)
    finish("latent", options, result, ("torch", "torchmali", "mujoco"), report(result))


if __name__ == "__main__":
    main()
