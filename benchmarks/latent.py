"""One epoch of a latent ODE with 100 output times: steps that end on every one, and steps that run free.

    python -m benchmarks.latent [--rounds 5] [--steps 16]

The model is that of `experiments.series.latent` (preset cpu). The series are sums of damped waves, made here: no data
are needed. Every method trains its own copy of the same weights, an epoch of --steps batches of 50 series in each
round, in random order. Evaluations are those of the generative solve.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import torchmali as tm
from benchmarks.harness import finish, options_of, paired_ratio
from experiments.data import hopper
from experiments.models.latent_ode import LatentODE
from experiments.series.latent import GapFiller, LatentConfig
from torchmali.nn import ODEBlock

CONFIG = LatentConfig()
FREE, LANDING = tm.AdaptiveStep(CONFIG.rtol, CONFIG.atol), tm.AdaptiveStep(CONFIG.rtol, CONFIG.atol, land=True)
METHODS: dict[str, dict[str, Any]] = {
    "MALI, ALF, one step per output": {"solver": tm.ALF(), "controller": tm.FixedStep(CONFIG.h), "gradient": tm.MALI()},
    "MALI, order 4, steps end on outputs": {"solver": tm.ALF(order=4), "controller": LANDING, "gradient": tm.MALI()},
    "MALI, order 4, free steps": {"solver": tm.ALF(order=4), "controller": FREE, "gradient": tm.MALI()},
    "MALI, ALF, free steps": {"solver": tm.ALF(), "controller": FREE, "gradient": tm.MALI()},
    "naive, Dopri5": {"solver": tm.Dopri5(), "controller": FREE, "gradient": tm.Naive()},
}
BASE = "naive, Dopri5"


def series(n: int, times: Tensor) -> Tensor:
    """Sums of damped waves, of the shape of n Hopper trajectories."""
    g = torch.Generator().manual_seed(0)
    rate, phase, size = (torch.rand(n, 1, hopper.N_CHANNELS, 3, generator=g) for _ in range(3))
    t = times.float()[None, :, None, None] * 4
    return (size * torch.exp(-0.3 * rate * t) * torch.sin(6 * rate * t + 6 * phase)).sum(-1)


def model(options: dict[str, Any], times: Tensor) -> GapFiller:
    torch.manual_seed(0)
    c = CONFIG
    sizes = (hopper.N_CHANNELS, c.latent, c.hidden, c.units, c.gru_units, c.layers)

    def block(f: Any) -> ODEBlock:
        return ODEBlock(f, t=times.tolist(), all_outputs=True, **options)

    return GapFiller(LatentODE(block, *sizes), times, c.lr, c.kl_wait)


def one_epoch(module: Any, x: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Train an epoch; return its seconds of the processor, evaluations, and mean loss."""
    gaps = torch.Generator().manual_seed(1)
    found = {"seconds": 0.0, "forward": 0, "backward": 0, "loss": 0.0}
    start = time.process_time()
    for part in x.split(CONFIG.batch):
        observed = hopper.observe(part, CONFIG.fraction, gaps)
        optimizer.zero_grad()
        loss = module.loss((part, observed.values, observed.mask), 0.0).total
        loss.backward()
        optimizer.step()
        stats = module.network.generate.last_stats
        found["forward"] += stats.n_evals_forward
        found["backward"] += stats.n_evals_backward
        found["loss"] += loss.item()
    return found | {"seconds": time.process_time() - start}


def measure(rounds: int, n_batches: int) -> dict[str, Any]:
    times, order = hopper.times(), random.Random(0)
    x = series(n_batches * CONFIG.batch, times)
    modules = {name: model(options, times) for name, options in METHODS.items()}
    optimizers = {name: torch.optim.Adamax(module.parameters(), CONFIG.lr) for name, module in modules.items()}
    epochs: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    for i in range(rounds):
        Console().print(f"epoch {i + 1} of {rounds}")
        for name in order.sample(list(METHODS), len(METHODS)):
            torch.manual_seed(i)
            epochs[name].append(one_epoch(modules[name], x, optimizers[name]))
    seconds = {name: [epoch["seconds"] for epoch in found] for name, found in epochs.items()}
    return {
        "batches": n_batches,
        "time_ratios": {name: paired_ratio(seconds[name], seconds[BASE]) for name in METHODS},
        "epochs": epochs,
    }


def report(result: dict[str, Any]) -> bool:
    """Print the table of the last epoch."""
    table = Table(title=f"An epoch of a latent ODE: {result['batches']} batches, 100 output times")
    for column in ("method", "evaluations forward", "backward", "seconds", f"x {BASE}", "loss"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, epochs in result["epochs"].items():
        last, ratio = epochs[-1], result["time_ratios"][name]["median"]
        counts = [f"{last['forward']:,.0f}", f"{last['backward']:,.0f}"]
        table.add_row(
            name, *counts, f"{last['seconds']:.2f}", f"{ratio:.2f}", f"{last['loss'] / result['batches']:.1f}"
        )
    Console().print(table)
    return True


def main() -> None:
    options = options_of(__doc__, rounds=5, steps=16)
    result = measure(options.rounds, options.steps)
    finish("latent", options, result, ("torch", "torchmali"), report(result))


if __name__ == "__main__":
    main()
