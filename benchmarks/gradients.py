"""Time of one gradient of a fixed-step solve: our methods beside the eager limit and the paper's own code.

    python -m benchmarks.gradients [--rounds 60] [--steps 50]

`lb_eager` is a lower bound for every eager method that forgets the trajectory: N evaluations of f
without a graph, and N with one, each followed by a vector-Jacobian product to y and all parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import torchmali as tm
from benchmarks.harness import Run, finish, options_of, paired_ratio, time_side_by_side
from benchmarks.workloads import MLP, W1, W2, Workload
from torchmali.measure import peak_bytes

LIMITS = {  # (numerator, denominator): workload -> largest ratio that we accept
    ("MALI as published", "lb_eager"): {"W1": 1.25, "W2": 1.25},
    ("MALI", "lb_eager"): {"W1": 1.30, "W2": 1.25},  # MALI also checks whether v needs a refresh
    ("MALI", "TDEPack MALI"): {"W1": 0.60, "W2": 0.80},
}
MEMORY_LIMIT = 0.70  # MALI's peak bytes against TorchDiffEqPack's


def one_gradient(f: nn.Module, y0: Tensor, solve: Callable[[Tensor], Tensor]) -> Run:
    """Zero the gradients, solve, and differentiate the loss by y0 and all parameters."""

    def run() -> None:
        f.zero_grad()
        y = y0.clone().requires_grad_()
        (solve(y) ** 2).sum().backward()

    return run


def ours(f: MLP, n_steps: int, gradient: tm.GradientMethod, solver: tm.Solver | None = None):
    solver = solver or tm.ALF()

    def solve(y: Tensor) -> Tensor:
        controller = tm.FixedStep(1 / n_steps)
        return tm.solve(f, y, (0.0, 1.0), solver=solver, controller=controller, gradient=gradient).y[-1]

    return solve


def reference_mali(f: nn.Module, n_steps: int):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports pyplot
        from TorchDiffEqPack import odesolve_adjoint_sym12  # pyright: ignore[reportMissingImports]

    options = {"method": "fixedstep_sym12async", "h": 1 / n_steps, "t0": 0.0, "t1": 1.0}
    options |= {"rtol": 1e-2, "atol": 1e-3, "print_neval": False, "neval_max": 10**6}
    options |= {"interpolation_method": "cubic", "regenerate_graph": False, "t_eval": None}
    return lambda y: odesolve_adjoint_sym12(f, y, options=dict(options))


def lb_eager(f: MLP, y0: Tensor, n_steps: int) -> Run:
    params, t, a = list(f.parameters()), torch.zeros(()), torch.ones_like(y0)

    def run() -> None:
        with torch.no_grad():
            for _ in range(n_steps):
                f(t, y0)
        for _ in range(n_steps):
            y = y0.detach().requires_grad_()
            torch.autograd.grad(f(t, y), [y, *params], a)

    return run


def measure(workload: Workload, n_steps: int, rounds: int) -> dict[str, Any]:
    f, y0 = workload.make()
    solves = {
        "MALI": ours(f, n_steps, tm.MALI()),
        "MALI as published": ours(f, n_steps, tm.MALI(), tm.ALF(refresh="never")),
        "ACA": ours(f, n_steps, tm.ACA()),
        "naive": ours(f, n_steps, tm.Naive()),
        "TDEPack MALI": reference_mali(f, n_steps),
    }
    runs = {name: one_gradient(f, y0, solve) for name, solve in solves.items()}
    agreement = gradients_agree(f, runs)
    runs["lb_eager"] = lb_eager(f, y0, n_steps)
    seconds = time_side_by_side(runs, rounds, workload.name)
    cpu = seconds.cpu
    ratios = {f"{name} / lb_eager": paired_ratio(cpu[name], cpu["lb_eager"]) for name in solves}
    for name in [name for name in solves if name != "TDEPack MALI"]:
        ratios[f"{name} / TDEPack MALI"] = paired_ratio(cpu[name], cpu["TDEPack MALI"])
    return {
        "n_steps": n_steps,
        "largest_gradient_difference": agreement,
        "time_ratios": ratios,
        "peak_bytes": {name: peak_bytes(run) for name, run in runs.items()},
        "cpu_seconds": cpu,
        "wall_seconds": seconds.wall,
    }


def gradients_agree(f: nn.Module, runs: dict[str, Run]) -> float:
    """Largest relative difference of parameter gradients from naive's: all must compute the same gradient."""
    grads: dict[str, Tensor] = {}
    for name, run in runs.items():
        run()
        grads[name] = torch.cat([p.grad.flatten() for p in f.parameters() if p.grad is not None])
    exact = grads["naive"]
    return max(float((g - exact).norm() / exact.norm()) for g in grads.values())


def report(results: dict[str, dict[str, Any]]) -> bool:
    """Print the tables; return whether all limits are kept."""
    console, kept = Console(), True
    for name, result in results.items():
        table = Table(title=f"{name}, {result['n_steps']} fixed steps: one gradient, CPU time")
        for column in ("method", "x lb_eager", "quartiles", "x TDEPack", "peak bytes"):
            table.add_column(column, justify="left" if column == "method" else "right")
        for method, peak in result["peak_bytes"].items():
            ratio = result["time_ratios"].get(f"{method} / lb_eager")
            other = result["time_ratios"].get(f"{method} / TDEPack MALI")
            table.add_row(
                method,
                f"{ratio['median']:.2f}" if ratio else "1",
                f"{ratio['lower']:.2f} - {ratio['upper']:.2f}" if ratio else "",
                f"{other['median']:.2f}" if other else "1" if "Pack" in method else "",
                f"{peak:,}",
            )
        console.print(table)
        for (a, b), limits in LIMITS.items():
            value = result["time_ratios"][f"{a} / {b}"]["median"]
            kept &= say(console, f"{name}: time of {a} / {b}", value, limits[name])
        peak = result["peak_bytes"]
        ratio = peak["MALI"] / peak["TDEPack MALI"]
        kept &= say(console, f"{name}: peak bytes of MALI / TorchDiffEqPack", ratio, MEMORY_LIMIT)
    return kept


def say(console: Console, what: str, value: float, limit: float) -> bool:
    verdict = "[green]kept[/]" if value <= limit else "[red]missed[/]"
    console.print(f"{what} = {value:.3f}, limit {limit:.2f}: {verdict}")
    return value <= limit


def main() -> None:
    options = options_of(__doc__, rounds=60, steps=50)
    results = {w.name: measure(w, options.steps, options.rounds) for w in (W1, W2)}
    finish("gradients", options, results, ("torch", "torchmali", "TorchDiffEqPack"), report(results))


if __name__ == "__main__":
    main()
