"""Memory for time: MALI(memory=...) with budgets between nothing and the graphs of all steps, beside plain autograd.

    python -m benchmarks.budget [--rounds 60] [--steps 50]

Budgets are shares of the peak that `Naive()` has. The peak of MALI with a budget must not exceed that budget and what
MALI takes without one; its time must fall from each budget to the next, and be plain autograd's where all graphs fit.
Then the number of steps grows to 2,000: evaluations and time must grow in proportion to it, and the peak must not grow,
without a budget and with one of 1 MB.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

import torchmali as tm
from benchmarks.gradients import gradients_agree, one_gradient, ours, say
from benchmarks.harness import finish, options_of, paired_ratio, time_side_by_side
from benchmarks.workloads import MLP, W1, W2, Workload
from torchmali.measure import peak_bytes

SHARES = (0.15, 0.3, 0.5, 0.7, 0.9)  # of the peak of plain autograd
MANY_STEPS = (50, 100, 200, 500, 1000, 2000)
BUDGETS = {"MALI()": tm.MALI(), 'MALI(memory="1MB")': tm.MALI(memory="1MB")}
LIMIT = 1.05  # time with all graphs / time of plain autograd
EXPONENTS = {"evaluations": 0.05, "time": 0.15}  # how far from 1
FLAT = 1.02  # the largest peak / the smallest


def stats_of(f: MLP, y0: Tensor, n_steps: int, method: tm.GradientMethod) -> tm.Stats:
    solution = tm.solve(
        f, y0.clone().requires_grad_(), (0.0, 1.0), controller=tm.FixedStep(1 / n_steps), gradient=method
    )
    (solution.y[-1] ** 2).sum().backward()
    return solution.stats


def measure_budgets(workload: Workload, n_steps: int, rounds: int) -> dict[str, Any]:
    f, y0 = workload.make()
    for _ in range(2):  # so that f is known
        stats_of(f, y0, n_steps, tm.MALI(memory="1GB"))
    whole = peak_bytes(one_gradient(f, y0, ours(f, n_steps, tm.Naive())))
    bytes_of = {"none": 0, **{f"{share:.0%}": int(share * whole) for share in SHARES}, "all": 2 * whole}
    methods = {name: tm.MALI(memory=n) if n else tm.MALI() for name, n in bytes_of.items()}
    runs = {name: one_gradient(f, y0, ours(f, n_steps, method)) for name, method in methods.items()}
    runs["naive"] = one_gradient(f, y0, ours(f, n_steps, tm.Naive()))
    agreement = gradients_agree(f, runs)
    seconds = time_side_by_side(runs, rounds, workload.name).cpu
    names = list(bytes_of)
    return {
        "n_steps": n_steps,
        "largest_gradient_difference": agreement,
        "budgets": bytes_of,
        "peak_bytes": {name: peak_bytes(run) for name, run in runs.items()},
        "n_graphs": {name: stats_of(f, y0, n_steps, method).n_graphs for name, method in methods.items()},
        "time_ratios": {name: paired_ratio(seconds[name], seconds["naive"]) for name in names},
        "to_the_budget_before": {
            b: paired_ratio(seconds[b], seconds[a]) for a, b in zip(names, names[1:], strict=False)
        },
        "cpu_seconds": seconds,
    }


def measure_growth(workload: Workload, rounds: int) -> dict[str, Any]:
    f, y0 = workload.make()
    runs = {(name, n): one_gradient(f, y0, ours(f, n, method)) for name, method in BUDGETS.items() for n in MANY_STEPS}
    seconds = time_side_by_side({f"{name} {n}": run for (name, n), run in runs.items()}, rounds, "steps").cpu
    found: dict[str, Any] = {}
    for name, method in BUDGETS.items():
        stats = [stats_of(f, y0, n, method) for n in MANY_STEPS]
        evaluations = [s.n_evals_forward + s.n_evals_backward for s in stats]
        times = [statistics.median(seconds[f"{name} {n}"]) for n in MANY_STEPS]
        found[name] = {
            "n_steps": MANY_STEPS,
            "evaluations": evaluations,
            "cpu_seconds": times,
            "peak_bytes": [peak_bytes(runs[name, n]) for n in MANY_STEPS],
            "exponents": {"evaluations": exponent(evaluations), "time": exponent(times)},
        }
    return found


def exponent(values: list[Any]) -> float:
    """p in value = c n_steps^p, by least squares of the logarithms."""
    return statistics.linear_regression([math.log(n) for n in MANY_STEPS], [math.log(x) for x in values]).slope


def report_budgets(console: Console, name: str, result: dict[str, Any]) -> bool:
    table = Table(title=f"{name}, {result['n_steps']} fixed steps: one gradient with MALI(memory=...)")
    for column in ("budget", "bytes", "graphs", "peak bytes", "x naive", "quartiles"):
        table.add_column(column, justify="left" if column == "budget" else "right")
    for budget, n_bytes in result["budgets"].items():
        ratio = result["time_ratios"][budget]
        quartiles = f"{ratio['lower']:.2f} - {ratio['upper']:.2f}"
        peak, n_graphs = result["peak_bytes"][budget], result["n_graphs"][budget]
        table.add_row(budget, f"{n_bytes:,}", str(n_graphs), f"{peak:,}", f"{ratio['median']:.3f}", quartiles)
    console.print(table)
    floor = result["peak_bytes"]["none"]
    excess = max((result["peak_bytes"][budget] - n) / floor for budget, n in result["budgets"].items() if n)
    slowest = max(ratio["median"] for ratio in result["to_the_budget_before"].values())
    kept = [
        say(console, f"{name}: time with all graphs / naive", result["time_ratios"]["all"]["median"], LIMIT),
        say(console, f"{name}: time with a budget / with the next smaller one, the worst", slowest, 1.0),
        say(console, f"{name}: (peak - budget) / peak without a budget, the worst", excess, 1.0),
    ]
    return all(kept)


def report_growth(console: Console, name: str, result: dict[str, Any]) -> bool:
    kept = []
    for what, limit in EXPONENTS.items():
        off = abs(result["exponents"][what] - 1)
        kept.append(say(console, f"{name}: |exponent of {what} in the number of steps - 1|", off, limit))
    peaks = result["peak_bytes"]
    kept.append(say(console, f"{name}: largest / smallest peak, 50 to 2,000 steps", max(peaks) / min(peaks), FLAT))
    return all(kept)


def main() -> None:
    options = options_of(__doc__, rounds=60, steps=50)
    console, kept = Console(), True
    results: dict[str, Any] = {w.name: measure_budgets(w, options.steps, options.rounds) for w in (W1, W2)}
    for name, result in results.items():
        kept &= report_budgets(console, name, result)
    results["growth"] = measure_growth(W1, max(3, options.rounds // 8))
    for name, result in results["growth"].items():
        kept &= report_growth(console, f"W1, {name}", result)
    finish("budget", options, results, ("torch", "torchmali"), kept)


if __name__ == "__main__":
    main()
