"""Cost of a solve beside its evaluations: one step of an identity f, beside torchdiffeq's midpoint.

    python -m benchmarks.overhead [--rounds 1000] [--steps 1]

f costs nothing, so all that is timed is what a solver does around it. torchdiffeq's midpoint takes two evaluations in a
step, as ALF does with v0. Its gradient is plain autograd; ours is by MALI, which evaluates f twice more, and by Naive.
Steps end on the output times, of which there is one for each step: torchdiffeq is fastest without a step size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torchdiffeq import odeint

import torchmali as tm
from benchmarks.gradients import say
from benchmarks.harness import Run, finish, options_of, paired_ratio, time_side_by_side

SHAPE = (128, 8)
AIMS = {"forward": 1.25, "gradient by MALI": 1.15, "gradient by Naive": 1.15}  # ours against torchdiffeq's
LIMITS = {
    "forward": 1.25,
    "gradient by MALI": 1.75,
    "gradient by Naive": 1.25,
}  # what was reached before, and some noise
THEIRS = {name: "torchdiffeq " + name.split()[0] for name in LIMITS}


def identity(t: Tensor, y: Tensor) -> Tensor:
    return y


def runs_of(n_steps: int) -> dict[str, Run]:
    y0, t = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), torch.linspace(0.0, 1.0, n_steps + 1)
    controller = tm.FixedStep(math.inf)

    def ours(y: Tensor, gradient: tm.GradientMethod) -> Tensor:
        return tm.solve(identity, y, t, controller=controller, gradient=gradient).y[-1]

    def theirs(y: Tensor) -> Any:
        return odeint(identity, y, t, method="midpoint")[-1]

    def forward(solve: Any) -> Run:
        def run() -> None:
            with torch.no_grad():
                solve(y0)

        return run

    def gradient(solve: Any) -> Run:
        return lambda: solve(y0.clone().requires_grad_()).sum().backward()

    return {
        "forward": forward(lambda y: ours(y, tm.MALI())),
        "torchdiffeq forward": forward(theirs),
        "gradient by MALI": gradient(lambda y: ours(y, tm.MALI())),
        "gradient by Naive": gradient(lambda y: ours(y, tm.Naive())),
        "torchdiffeq gradient": gradient(theirs),
    }


def report(result: dict[str, Any]) -> bool:
    """Print the table and the limits; true if all limits are kept."""
    console, kept = Console(), True
    table = Table(title=f"{result['n_steps']} step of an identity f, CPU time against torchdiffeq's midpoint")
    for column in ("", "ratio", "quartiles", "microseconds"):
        table.add_column(column, justify="left" if not column else "right")
    for name, ratio in result["time_ratios"].items():
        quartiles = f"{ratio['lower']:.2f} - {ratio['upper']:.2f}"
        table.add_row(name, f"{ratio['median']:.2f}", quartiles, f"{1e6 * result['median_seconds'][name]:.0f}")
    console.print(table)
    for name, limit in LIMITS.items():
        ratio = result["time_ratios"][name]["median"]
        say(console, f"{name} / torchdiffeq's, aim", ratio, AIMS[name])
        kept &= say(console, f"{name} / torchdiffeq's", ratio, limit)
    return kept


def main() -> None:
    options = options_of(__doc__, rounds=1000, steps=1)
    seconds = time_side_by_side(runs_of(options.steps), options.rounds, "overhead")
    result = {
        "n_steps": options.steps,
        "time_ratios": {name: paired_ratio(seconds.cpu[name], seconds.cpu[other]) for name, other in THEIRS.items()},
        "median_seconds": {name: sorted(x)[len(x) // 2] for name, x in seconds.cpu.items()},
        "cpu_seconds": seconds.cpu,
    }
    finish("overhead", options, result, ("torch", "torchmali", "torchdiffeq"), report(result))


if __name__ == "__main__":
    main()
