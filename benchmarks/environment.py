"""Cost of the care for f's environment for an f that needs none: no dropout, no autocast, no changing buffers.

    python -m benchmarks.environment [--rounds 200] [--steps 10]

Compares one gradient with MALI as it is and with the care taken out, in float32, with fixed steps. The care is taken
once per solve: random numbers and buffers are compared around the first evaluation, unless earlier solves have shown
that f needs no care, as here. A short solve shows most of what remains.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

import torchmali as tm
from benchmarks.gradients import one_gradient, ours, say
from benchmarks.harness import finish, options_of, paired_ratio, time_side_by_side
from benchmarks.workloads import W1, W2, Workload
from torchmali.engine import Environment

TIME_LIMIT = 1.03  # time with care over time without: no cost, as far as it can be measured


class NoSource:
    """Replacement of `Source` that draws nothing."""

    is_fresh = True  # late draws are not looked for

    def begin(self, device: torch.device) -> None:
        pass


class NoEnvironment:
    """Replacement of `Environment` for an f without side effects."""

    draws = is_cast = is_active = is_simple = synchronises = False
    coarseness = eps = eps_of_state = 0.0
    modules, loose, source = (), (), NoSource()

    def __init__(self, *_: Any):
        pass

    def first_evaluation(self, *_: Any) -> nullcontext:
        return nullcontext()

    evaluation = _uncast = first_evaluation

    def begin_backward(self, stack: ExitStack) -> None:
        pass

    def end_forward(self) -> None:
        pass

    def for_backward(self) -> NoEnvironment:
        return self

    def changes(self) -> str:
        return ""

    def mark(self) -> None:
        pass

    def restore(self, mark: None) -> None:
        pass


def with_class(kind: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    def patched() -> Any:
        with mock.patch("torchmali.field.evaluate.Environment", kind):
            return run()

    return patched


def measure(workload: Workload, n_steps: int, rounds: int) -> dict[str, Any]:
    f, y0 = workload.make()
    run = one_gradient(f, y0, ours(f, n_steps, tm.MALI()))
    runs = {"care": with_class(Environment, run), "none": with_class(NoEnvironment, run)}
    seconds = time_side_by_side(runs, rounds, workload.name)
    return {
        "n_steps": n_steps,
        "time_ratio": paired_ratio(seconds.cpu["care"], seconds.cpu["none"]),
        "cpu_seconds": seconds.cpu,
        "wall_seconds": seconds.wall,
    }


def report(results: dict[str, dict[str, Any]]) -> bool:
    console, kept = Console(), True
    table = Table(title="One gradient with care for f's environment, against none")
    for column in ("", "steps", "CPU time", "quartiles"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, result in results.items():
        ratio = result["time_ratio"]
        quartiles = f"{ratio['lower']:.3f} - {ratio['upper']:.3f}"
        table.add_row(name, str(result["n_steps"]), f"{ratio['median']:.3f}", quartiles)
    console.print(table)
    for name, result in results.items():
        kept &= say(console, f"{name}: time with care / without", result["time_ratio"]["median"], TIME_LIMIT)
    return kept


def main() -> None:
    options = options_of(__doc__, rounds=200, steps=10)
    results = {w.name: measure(w, options.steps, options.rounds) for w in (W1, W2)}
    finish("environment", options, results, ("torch", "torchmali"), report(results))


if __name__ == "__main__":
    main()
