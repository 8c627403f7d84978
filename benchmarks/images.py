"""Time of one training step of a small network with ODE blocks, by gradient method: the paper's claims of speed.

    python -m benchmarks.images [--rounds 20] [--steps 40]

The network is that of `python -m experiments run digits`, after --steps steps of training with MALI; the batch has 64
digits. Each method has the paper's solver and tolerances; naive and adjoint also run with MALI's tolerances. Weights do
not change.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import finish, options_of, paired_ratio, time_side_by_side
from experiments.engine.measure import evaluations
from experiments.images.recognition import DIGITS, ImagesConfig, batches, network, solve_of
from experiments.methods import published_tolerances

MATCHED = {"rtol": 1e-1, "atol": 1e-2}
CONFIGS: dict[str, dict[str, Any]] = {
    "MALI": {"method": "mali"},
    "ACA": {"method": "aca"},
    "adjoint, 1e-5": {"method": "adjoint"},
    "naive, 1e-5": {"method": "naive"},
    "adjoint, 0.1": {"method": "adjoint", **MATCHED},
    "naive, 0.1": {"method": "naive", **MATCHED},
    "ResNet": {"method": "resnet"},
}
PAPER = {"ACA": "similar", "adjoint, 1e-5": "almost 2", "naive, 1e-5": "3"}


def step(net: torch.nn.Module, x: Tensor, y: Tensor) -> None:
    net.zero_grad(set_to_none=True)
    F.cross_entropy(net(x), y).backward()


def measure(rounds: int, n_steps: int) -> dict[str, Any]:
    base: ImagesConfig = DIGITS["cpu"]
    torch.manual_seed(0)
    net, data = network(base, 10).train(), batches(base, None)
    optimizer = torch.optim.SGD(net.parameters(), base.lr, momentum=0.9, weight_decay=base.weight_decay)
    order, done = torch.Generator().manual_seed(0), 0
    while done < n_steps:
        for x, y in itertools.islice(data.train(0, order, order), n_steps - done):
            step(net, x, y)
            optimizer.step()
            done += 1
    x, y = next(iter(data.train(0, order, order)))
    runs, counts = {}, {}
    for name, changes in CONFIGS.items():
        other = copy.deepcopy(net)
        other.set_solve(solve_of(replace(base, **changes)))
        runs[name] = lambda other=other: step(other, x, y)
        runs[name]()
        counts[name] = evaluations(other)
    seconds = time_side_by_side(runs, rounds, "training steps")
    return {
        "n_steps": n_steps,
        "evaluations": counts,
        "time_ratio": {name: paired_ratio(seconds.cpu[name], seconds.cpu["MALI"]) for name in runs},
        "cpu_seconds": seconds.cpu,
    }


def report(results: dict[str, Any]) -> None:
    table = Table(title="One training step on digits: time over MALI's")
    for column in ("", "CPU time", "quartiles", "paper", "f forward", "f backward"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, ratio in results["time_ratio"].items():
        counts = results["evaluations"][name]
        table.add_row(
            name, f"{ratio['median']:.2f}", f"{ratio['lower']:.2f} - {ratio['upper']:.2f}", PAPER.get(name, ""),
            str(counts["evaluations_forward"]), str(counts["evaluations_backward"]),
        )  # fmt: skip
    Console().print(table)


def main() -> None:
    options = options_of(__doc__, rounds=20, steps=40)
    with published_tolerances():
        results = measure(options.rounds, options.steps)
    report(results)
    finish("images", options, results, ("torch", "torchmali"), kept=True)


if __name__ == "__main__":
    main()
