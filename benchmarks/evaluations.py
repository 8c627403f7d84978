"""Evaluations of f that a gradient of a given accuracy takes in adaptive steps: MALI as it comes, against Dopri5.

    python -m benchmarks.evaluations [--from-record] [--no-record]

The systems are those of systems.py, in float64; the error is that of (dL/dz0, dL/dtheta), relative, in the 2-norm,
against Dopri8 at rtol 1e-12. MALI has the list that `leapfrog_for` chooses by the tolerance; Dopri5 has the same
controller. Tolerances are swept; evaluations of the forward pass (v0, the first step's size, rejected attempts and
refreshes included) are interpolated between two runs, from where the error stays below the target. Counts, not times:
the record does not depend on the machine but by round-off. Renews the tables under "Adaptive steps" in
docs/work-precision.md. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

import torchmali as tm
from benchmarks.gradients import say
from benchmarks.harness import RECORDS, command_line, header, write_record
from benchmarks.problems import Problem, relative_error
from benchmarks.systems import FURTHER, STIFF, SUITE
from benchmarks.work_precision import Run, evaluations_to

DOCS = Path(__file__).parents[1] / "docs" / "work-precision.md"
TARGETS = (1e-3, 1e-4, 1e-5, 1e-6)
TOLERANCES = tuple(10 ** (-k / 2) for k in range(2, 21))  # rtol; atol is a tenth of it
ENOUGH = min(TARGETS) / 4  # two runs in a row with a smaller error end a scan
MEDIANS, WORST = (1.0, 1.2, 1.25, 1.5), (1.7, 1.8, 2.0, 2.5)  # limits of MALI's evaluations / Dopri5's
MARGIN = 1.15  # FURTHER may exceed them by so much
LOOSE = (1e-1, 1e-2, 1e-3)  # tolerances at which stiff fields are solved
WRONG = 0.5  # a relative error beyond which a gradient is wrong
BETWEEN = (1e-3, 1e-4, 1e-5, 1e-6)  # tolerances at which interpolants are compared
L5, L14, ALF4 = tm.ALF(order=4, evals=5), tm.ALF(order=6, evals=14), tm.ALF(order=4)
METHODS: dict[str, tuple[Callable[[float], tm.Solver], tm.GradientMethod]] = {
    "MALI": (tm.leapfrog_for, tm.MALI()),
    "Dopri5": (lambda tolerance: tm.Dopri5(), tm.ACA()),
    "alf4_5": (lambda tolerance: L5, tm.MALI()),
    "alf6_14": (lambda tolerance: L14, tm.MALI()),
    "alf4": (lambda tolerance: ALF4, tm.MALI()),
}


def controller(tolerance: float) -> tm.AdaptiveStep:
    return tm.AdaptiveStep(tolerance, tolerance / 10, max_steps=100_000)


@functools.cache
def reference(problem: Problem) -> Tensor:
    fine = tm.AdaptiveStep(1e-12, 1e-16, max_steps=10**6)
    return problem.solved_gradient(solver=tm.Dopri8(), controller=fine, gradient=tm.ACA())[0]


def rounded(x: float) -> float | None:
    return float(f"{x:.3g}") if math.isfinite(x) else None


# Evaluations for an accuracy.


def scan(problem: Problem, method: str) -> list[Run]:
    """Run with tighter and tighter tolerances."""
    choose, gradient = METHODS[method]
    runs: list[Run] = []
    for tolerance in TOLERANCES:
        try:
            how: Any = {"solver": choose(tolerance), "controller": controller(tolerance), "gradient": gradient}
            g, stats = problem.solved_gradient(**how)
            error = rounded(relative_error(g, reference(problem)))
            runs.append(Run(stats.n_steps, stats.n_evals_forward, error, stats.n_refreshes, stats.n_rejected))
        except tm.SolverError:
            runs.append(Run(0, 0, None, 0, 0))
        if len(runs) > 1 and all(run.error is not None and run.error < ENOUGH for run in runs[-2:]):
            break
    return runs


def scanned(problem: Problem) -> dict[str, Any]:
    found = {}
    for method in METHODS:
        runs = scan(problem, method)
        steps, evaluations, errors, refreshes, rejected = map(list, zip(*runs, strict=True))
        found[method] = {
            "to_target": [abs(x) if (x := evaluations_to(target, runs)) is not None else None for target in TARGETS],
            "evaluations": evaluations,
            "error": errors,
            "n_steps": steps,
            "n_rejected": rejected,
            "n_refreshes": refreshes,
        }
    return found


def ratios(found: Mapping[str, Any]) -> list[float]:
    """MALI's evaluations over Dopri5's at each target."""
    pairs = zip(found["MALI"]["to_target"], found["Dopri5"]["to_target"], strict=True)
    return [math.inf if x is None or y is None else x / y for x, y in pairs]


# Stiff fields.


def verdict(problem: Problem, method: str, tolerance: float) -> dict[str, Any]:
    """Whether a gradient is right, or its error was told of: by a warning, or by an error of the solver.

    The error is relative to the gradient and to the tolerance times that of L at the start, below which an absolute
    tolerance says nothing about it.
    """
    choose, gradient = METHODS[method]
    how: Any = {"solver": choose(tolerance), "controller": controller(tolerance), "gradient": gradient}
    truth = reference(problem)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tm.SolverWarning)
        try:
            g, stats = problem.solved_gradient(**how)
        except tm.SolverError as error:
            return {"verdict": type(error).__name__, "error": None, "evaluations": None}
    error = ((g - truth).norm() / (truth.norm() + 2 * tolerance * problem.z0.norm())).item()
    told = "warned" if caught else "silently wrong"
    return {
        "verdict": "right" if error < WRONG else told,
        "error": rounded(error),
        "evaluations": stats.n_evals_forward,
    }


# Between grid points.


class Grid(tm.Outputs):
    """The accepted steps: the times at which they end, and the states there."""

    def __init__(self):
        self.step_ends: list[float] = []
        self.step_states: list[Tensor] = []

    def record(self, k: int, t: Any, z: Any) -> None: ...

    def results(self) -> tuple[Tensor, ...]:
        return (torch.zeros(()),)

    def pull(self, k: int, t: Any, z: Any, grads: Any) -> tm.Pulled:
        raise NotImplementedError

    def fresh(self) -> tm.Outputs:
        self.step_ends, self.step_states = [], []  # the solve of before, if it is made again
        return self

    def passes_over(self, t1: Any) -> bool:
        return False

    def accept(self, step: Any) -> Any:
        self.step_ends.append(float(step.t1))
        self.step_states.append(step.end.point[0].clone())
        return super().accept(step)


def between(problem: Problem, solver: tm.Solver) -> list[float | None]:
    """The largest error between grid points over the largest at them, for each tolerance."""
    times, found = torch.linspace(0, problem.t_end, 101).double().tolist(), []
    fine: Any = {"solver": tm.Dopri8(), "controller": tm.AdaptiveStep(1e-12, 1e-13, land=True)}
    how: Any = {"gradient": tm.ACA(), "args": problem.theta}
    with torch.no_grad():
        truth = tm.solve(problem.f, problem.z0, times, **fine, **how).y
        for tolerance in BETWEEN:
            grid, steps = Grid(), {"solver": solver, "controller": controller(tolerance)}
            y = tm.solve(problem.f, problem.z0, times, **steps, **how).y
            tm.solve(problem.f, problem.z0, times[:: len(times) - 1], outputs=grid, **steps, **how)
            at = tm.solve(problem.f, problem.z0, [0.0, *grid.step_ends], **fine, **how).y[1:]
            ratio = (y - truth).abs().max() / (torch.stack(grid.step_states) - at).abs().max()
            found.append(rounded(ratio.item()))
    return found


# All of it.


def measure() -> dict[str, Any]:
    results: dict[str, Any] = {"suite": {}, "further": {}, "stiff": {}, "between": {}}
    everything = (*SUITE, *FURTHER, *STIFF)
    with Progress(transient=True) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", tm.SolverWarning)
        task = progress.add_task("", total=len(SUITE) + len(FURTHER) + len(everything) + len(SUITE))
        for group, problems in (("suite", SUITE), ("further", FURTHER)):
            for problem in problems:
                progress.update(task, advance=1, description=problem.name)
                results[group][problem.name] = scanned(problem)
        for problem in everything:
            progress.update(task, advance=1, description=f"{problem.name}, loose")
            results["stiff"][problem.name] = {
                f"{tolerance:g}": {name: verdict(problem, name, tolerance) for name in ("MALI", "Dopri5")}
                for tolerance in LOOSE
            }
        for problem in SUITE:
            progress.update(task, advance=1, description=f"{problem.name}, between")
            results["between"][problem.name] = {
                name: between(problem, solver) for name, solver in (("alf4_5", L5), ("alf6_14", L14), ("alf4", ALF4))
            }
    return results


def silently_wrong(results: Mapping[str, Any]) -> dict[str, str]:
    """Where MALI's gradient is wrong in silence and Dopri5's is not: what became of Dopri5's."""
    return {
        f"{name} at {tolerance}": found["Dopri5"]["verdict"]
        for name, by_tolerance in results["stiff"].items()
        for tolerance, found in by_tolerance.items()
        if found["MALI"]["verdict"] == "silently wrong" and found["Dopri5"]["verdict"] != "silently wrong"
    }


def limits(results: Mapping[str, Any]) -> list[tuple[str, float, float]]:
    """What is limited, its value and its limit."""
    found: list[tuple[str, float, float]] = []
    for group, margin in (("suite", 1.0), ("further", MARGIN)):
        columns = list(zip(*map(ratios, results[group].values()), strict=True))
        for name, function, wanted in (("median", statistics.median, MEDIANS), ("worst", max, WORST)):
            for target, column, limit in zip(TARGETS, columns, wanted, strict=True):
                what = f"{group}, {target:.0e}: {name} of MALI's evaluations / Dopri5's"
                found.append((what, function(column), limit * margin))
    n_wrong = list(silently_wrong(results).values()).count("right")
    return [*found, ("gradients silently wrong where Dopri5's are right", float(n_wrong), 0.0)]


def verdicts(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"what": what, "value": value, "limit": limit, "kept": value <= limit} for what, value, limit in limits(results)
    ]


# What is shown.


def ratio_table(results: Mapping[str, Any]) -> list[list[str]]:
    rows = [["problem", *(f"{target:.0e}" for target in TARGETS)]]
    for group in ("suite", "further"):
        everyone = [ratios(found) for found in results[group].values()]
        for name, found in results[group].items():
            pairs = zip(found["MALI"]["to_target"], found["Dopri5"]["to_target"], ratios(found), strict=True)
            rows.append([name, *(f"{x:.0f} / {y:.0f} = {r:.2f}" for x, y, r in pairs)])
        for what, function in (("median", statistics.median), ("worst", max)):
            columns = zip(*everyone, strict=True)
            rows.append([f"**{group}, {what}**", *(f"**{function(column):.2f}**" for column in columns)])
    return rows


def list_table(results: Mapping[str, Any]) -> list[list[str]]:
    names = ("alf4_5", "alf6_14", "alf4")
    rows = [["problem", *(f"{target:.0e}" for target in TARGETS), "between / at, " + " / ".join(names)]]
    for name, found in results["suite"].items():
        counts = zip(*(found[it]["to_target"] for it in names), strict=True)
        worst = [max(x for x in results["between"][name][it] if x is not None) for it in names]
        cells = [" / ".join("-" if x is None else f"{x:.0f}" for x in column) for column in counts]
        rows.append([name, *cells, " / ".join(f"{x:.1f}" for x in worst)])
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))


def renew_tables(path: Path, results: Mapping[str, Any]) -> None:
    """Replace the two tables under "Adaptive steps"."""
    before, heading, after = path.read_text().partition("## Adaptive steps\n")
    tables = iter([markdown(ratio_table(results)), markdown(list_table(results))])
    path.write_text(before + heading + re.sub(r"(^\|.*\n)+", lambda _: next(tables), after, count=2, flags=re.M))


def report(results: Mapping[str, Any]) -> bool:
    console, kept = Console(), True
    for row in ratio_table(results):
        console.print(f"{row[0].strip('*'):18}" + "".join(f"{cell.strip('*'):>22}" for cell in row[1:]))
    for what, value, limit in limits(results):
        kept &= say(console, what, value, limit)
    for what, other in silently_wrong(results).items():
        console.print(f"silently wrong: {what}; Dopri5: {other}")
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--from-record", action="store_true", help="no runs: tables from the last record")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = RECORDS / "evaluations.json"
    results = json.loads(path.read_text())["results"] if options.from_record else measure()
    kept = report(results)
    if not options.no_record:
        if not options.from_record:
            head = header(command_line("benchmarks.evaluations"), ("torch", "torchmali"))
            settings = {"targets": TARGETS, "tolerances": TOLERANCES, "between": BETWEEN}
            write_record("evaluations", {"header": head, **settings, "limits": verdicts(results), "results": results})
        renew_tables(DOCS, results)
    if not kept:
        raise SystemExit("A limit was missed.")


if __name__ == "__main__":
    main()
