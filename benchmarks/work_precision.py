"""Evaluations of f that a gradient of a given accuracy takes, with fixed steps, in float64.

    python -m benchmarks.work_precision [--from-record] [--no-record]

The error is that of (dL/dz0, dL/dtheta), L = sum z(T)^2, relative, in the 2-norm, against the gradient of the ODE.
Every method is run over a geometric grid of step counts; the evaluations (of the forward pass) at which the error falls
below a target for good are interpolated between two runs. Also draws docs/work-precision.png and renews the table in
docs/work-precision.md. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import torchmali as tm
from benchmarks.gradients import say
from benchmarks.harness import RECORDS, command_line, header, write_record
from benchmarks.problems import PROBLEMS, Problem, relative_error

DOCS = Path(__file__).parents[1] / "docs"
TARGETS = (1e-4, 1e-6, 1e-8)
ENOUGH = min(TARGETS) / 4  # two runs in a row with a smaller error end a scan
MAX_EVALUATIONS = 16_000
COARSE_GRID = 1_000  # evaluations beyond which the grid of step counts is coarser
REFERENCE_LIMIT = 1e-10  # the two references must agree to this
ALF4_LIMIT = 1 / 8  # evaluations of alf4 against those of ALF, MLP, 1e-6
ALF6_LIMIT = 1.0  # of alf6 against the best other one of its kind, each problem, 1e-8

NO_REFRESH = ", no refresh"  # ends the name of such a method


@dataclass(frozen=True)
class Method:
    name: str
    solver: tm.Solver
    per_step: int  # evaluations
    gradient: tm.GradientMethod = tm.MALI()  # noqa: RUF009 (an immutable value)

    @property
    def kind(self) -> str:
        """Memory, and whether the gradient is exact."""
        if isinstance(self.gradient, tm.Adjoint):
            return "constant, not exact"
        return "linear" if isinstance(self.gradient, tm.ACA) else "constant"


def methods() -> list[Method]:
    return [
        Method("ALF", tm.ALF(), 1),
        Method("alf4", tm.ALF(order=4), 12),
        Method("alf6", tm.ALF(order=6), 20),
        Method("ALF" + NO_REFRESH, tm.ALF(refresh="never"), 1),
        Method("alf4" + NO_REFRESH, tm.ALF(order=4, refresh="never"), 12),
        Method("alf6" + NO_REFRESH, tm.ALF(order=6, refresh="never"), 20),
        Method("L5", tm.ALF(order=4, evals=5), 5),
        Method("L14-6", tm.ALF(order=6, evals=14), 14),
        Method("Reversible RK4", tm.Reversible(tm.RK4()), 8),
        Method("Reversible Dopri5", tm.Reversible(tm.Dopri5()), 12),
        Method("ACA RK4", tm.RK4(), 4, tm.ACA()),
        Method("ACA Dopri5", tm.Dopri5(), 6, tm.ACA()),
        Method("Adjoint Dopri5", tm.Dopri5(), 6, tm.Adjoint()),
    ]


# Rivals of alf6: all other methods in the library that are exact in constant memory.
RIVALS = ("ALF", "alf4", "Reversible RK4", "Reversible Dopri5", *(name + NO_REFRESH for name in ("ALF", "alf4")))


def step_counts(per_step: int) -> Iterator[int]:
    """Step counts from about 8 to MAX_EVALUATIONS evaluations, each a quarter (beyond COARSE_GRID 60 %) more."""
    n, last = math.ceil(8 / per_step), MAX_EVALUATIONS // per_step
    while n < last:
        yield n
        n = max(n + 1, round(n * (1.25 if n * per_step < COARSE_GRID else 1.6)))
    yield last


class Run(NamedTuple):
    n_steps: int
    n_evaluations: int
    error: float | None  # None: the solve or its gradient was not finite
    n_refreshes: int
    n_reruns: int


def run(problem: Problem, method: Method, n: int, reference: Tensor) -> Run:
    how = {"solver": method.solver, "controller": tm.FixedStep(problem.t_end / n), "gradient": method.gradient}
    try:
        g, stats = problem.solved_gradient(**how)
    except tm.SolverError:  # steps too coarse for the problem
        return Run(n, n * method.per_step, None, 0, 0)
    error = relative_error(g, reference)
    known = float(f"{error:.4g}") if math.isfinite(error) else None
    return Run(n, stats.n_evals_forward, known, stats.n_refreshes, stats.n_reruns)


def scan(problem: Problem, method: Method, reference: Tensor, twin: Sequence[Run] = ()) -> list[Run]:
    """Run with more and more steps. twin: runs of the same method with refresh; those without a refresh are reused."""
    known = {it.n_steps: it for it in twin if it.n_refreshes == 0 and it.error is not None}
    runs: list[Run] = []
    for n in step_counts(method.per_step):
        runs.append(known.get(n) or run(problem, method, n, reference))
        if len(runs) > 1 and all(it.error is not None and it.error < ENOUGH for it in runs[-2:]):
            break
    return runs


def evaluations_to(target: float, runs: Sequence[Run]) -> float | None:
    """Evaluations at which the error falls below the target for good, interpolated log-log; None: it never does.

    A negative number is an upper limit: the error is below the target from the first finite run on.
    """
    errors = [math.inf if it.error is None else it.error for it in runs]
    first = next((i for i in range(len(errors)) if max(errors[i:]) <= target), None)
    if first is None:
        return None
    if first == 0 or errors[first - 1] == math.inf:
        return -float(runs[first].n_evaluations)
    (x0, y0), (x1, y1) = ((math.log(runs[i].n_evaluations), math.log(errors[i])) for i in (first - 1, first))
    return math.exp(x0 + (x1 - x0) * (math.log(target) - y0) / (y1 - y0))


def measure() -> dict[str, Any]:
    results, chosen = {}, methods()
    with Progress(transient=True) as progress, warnings.catch_warnings():
        warnings.simplefilter("ignore", tm.SolverWarning)  # about coarse steps, whose error is measured
        task = progress.add_task("", total=len(PROBLEMS) * len(chosen))
        for problem in PROBLEMS:
            reference, difference = problem.reference()
            if not difference < REFERENCE_LIMIT:
                raise SystemExit(f"{problem.name}: two references differ by {difference:.1e}.")
            result: dict[str, Any] = {"t_end": problem.t_end, "reference_difference": difference, "methods": {}}
            scans: dict[str, list[Run]] = {}
            for method in chosen:
                progress.update(task, advance=1, description=f"{problem.name}, {method.name}")
                runs = scan(problem, method, reference, scans.get(method.name.removesuffix(NO_REFRESH), ()))
                scans[method.name] = runs
                found = [evaluations_to(target, runs) for target in TARGETS]
                columns = dict(zip(Run._fields, zip(*runs, strict=True), strict=True))
                result["methods"][method.name] = {"kind": method.kind, "evaluations_to_target": found, **columns}
            results[problem.name] = result
    return results


def cell(found: list[float | None]) -> str:
    """Format the evaluations to the targets: 34 / 102 / 324, "≤" in front of an upper limit, "-" for none."""
    return " / ".join("-" if x is None else f"≤{-x:.0f}" if x < 0 else f"{x:.0f}" for x in found)


def rows(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the rows of the table, its head first."""
    yield ["method", "memory", *(f"{name}, T={result['t_end']:g}" for name, result in results.items())]
    for name, first in next(iter(results.values()))["methods"].items():
        cells = [cell(result["methods"][name]["evaluations_to_target"]) for result in results.values()]
        yield [name, first["kind"], *cells]


def markdown(results: Mapping[str, Any]) -> str:
    """Return the table of docs/work-precision.md."""
    head, *body = rows(results)
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *body))


def renew_table(path: Path, results: Mapping[str, Any]) -> None:
    """Replace the first table of a markdown file."""
    text = path.read_text()
    path.write_text(re.sub(r"(^\|.*\n)+", lambda _: markdown(results), text, count=1, flags=re.M))


# The hue (Okabe and Ito) shows the solver; dashed lines are methods that are not exact or not in constant memory.
BLACK, BLUE, RED, SKY, ORANGE, GREEN, PURPLE, GREY = (
    *("#000000", "#0072B2", "#D55E00", "#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#777777"),
)
STYLES: dict[str, dict[str, Any]] = {  # of matplotlib's Line2D
    "ALF": {"color": BLACK, "marker": "o"},
    "alf4": {"color": BLUE, "marker": "s"},
    "alf6": {"color": RED, "marker": "D"},
    "L5": {"color": SKY, "marker": "s", "markerfacecolor": "white"},
    "L14-6": {"color": ORANGE, "marker": "D", "markerfacecolor": "white"},
    "Reversible RK4": {"color": GREEN, "marker": "^"},
    "Reversible Dopri5": {"color": PURPLE, "marker": "v"},
    "ACA RK4": {"color": GREEN, "linestyle": "--"},
    "ACA Dopri5": {"color": PURPLE, "linestyle": "--"},
    "Adjoint Dopri5": {"color": GREY, "linestyle": (0, (1, 1))},
}
WITHOUT_REFRESH: dict[str, Any] = {"linewidth": 4, "alpha": 0.25}


def draw(path: Path, results: Mapping[str, Any]) -> None:
    figure = Figure(figsize=(11, 8), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, (problem, result) in zip(panels.flat, results.items(), strict=True):
        for name, found in result["methods"].items():
            base = name.removesuffix(NO_REFRESH)
            points = [(x, y) for x, y in zip(found["n_evaluations"], found["error"], strict=True) if y is not None]
            style = {"linewidth": 1.4, "markersize": 3.5} | STYLES[base]
            if name != base:
                style = WITHOUT_REFRESH | {"color": style["color"], "zorder": 1}
            axes.plot(*zip(*points, strict=True), **style)
        axes.set(xscale="log", yscale="log", xlim=(8, 2e4), ylim=(2e-10, 3), title=f"{problem}, T={result['t_end']:g}")
        axes.set_yticks([10.0**-k for k in range(0, 10, 2)])
        axes.grid(color="#e0e0e0", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set_xlabel("evaluations of f, forward")
    for axes in panels[:, 0]:
        axes.set_ylabel("relative error of the gradient")
    handles = [Line2D([], [], label=name, **style) for name, style in STYLES.items()]
    handles.append(Line2D([], [], label="ALF, alf4, alf6 without refresh", color=GREY, **WITHOUT_REFRESH))
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, dpi=120)


def report(results: Mapping[str, Any]) -> bool:
    """Print the table, two problems at a time, and the limits; return whether all limits are kept."""
    console, kept = Console(), True
    names = list(results)
    for pair in zip(names[::2], names[1::2], strict=True):
        head, *body = rows({name: results[name] for name in pair})
        table = Table(title=f"Evaluations of f to a gradient error of {' / '.join(f'{x:.0e}' for x in TARGETS)}")
        for i, column in enumerate(("method", *head[2:])):
            table.add_column(column, justify="right" if i else "left", no_wrap=True)
        for name, kind, *cells in body:
            table.add_row(name if kind == "constant" else f"{name} ({kind.split(', ')[-1]})", *cells)
        console.print(table)
    found = {
        problem: {name: _number(method["evaluations_to_target"]) for name, method in result["methods"].items()}
        for problem, result in results.items()
    }
    mlp = found["MLP"]
    kept &= say(console, "MLP, 1e-6: evaluations of alf4 / ALF", mlp["alf4"][1] / mlp["ALF"][1], ALF4_LIMIT)
    for problem, numbers in found.items():
        best = min(RIVALS, key=lambda name: numbers[name][2])
        what = f"{problem}, 1e-8: evaluations of alf6 / the best rival, {best}"
        kept &= say(console, what, numbers["alf6"][2] / numbers[best][2], ALF6_LIMIT)
    return kept


def _number(found: list[float | None]) -> list[float]:
    return [math.inf if x is None else abs(x) for x in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--from-record", action="store_true", help="no runs: table and figure from the last record")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads((RECORDS / "work_precision.json").read_text())["results"] if options.from_record else measure()
    kept = report(results)
    if not options.no_record:
        if not options.from_record:
            head = header(command_line("benchmarks.work_precision"), ("torch", "torchmali"))
            write_record("work_precision", {"header": head, "targets": TARGETS, "results": results})
        draw(DOCS / "work-precision.png", results)
        renew_table(DOCS / "work-precision.md", results)
    if not kept:
        raise SystemExit("A limit was missed.")


if __name__ == "__main__":
    main()
