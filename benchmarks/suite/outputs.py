"""Evaluations of f against the number of output times, at one tolerance, in float32.

    python -m benchmarks.suite.outputs [--only latent,lv] [--quick] [--again] [--smoke] [--no-record]

The loss is the mean over the output times. Counts repeat from run to run, so nothing is timed.
"""

from __future__ import annotations

from typing import Any

from benchmarks.suite.cases import methods_for, row_of
from benchmarks.suite.driver import Bench, Kind, run
from benchmarks.suite.limits import say_outputs

PROBLEMS = ("mlp", "latent", "lv")
SETTINGS = {"rtol": 1e-4, "n_times": [2, 11, 101, 1001], "too_slow": 0.5}
SMOKE = {"rtol": 1e-2, "n_times": [2, 5], "too_slow": 1.5}


def measure(bench: Bench, problem: str, settings: Any) -> dict[str, Any]:
    """A method that took longer than too_slow is not run with more output times."""
    rows = []
    for method in methods_for(bench, problem, without=["MALI compiled"]):
        for n in settings["n_times"]:
            how = {"rtol": settings["rtol"], "atol": settings["rtol"] / 10, "n_times": n}
            case, row = row_of(bench, problem, method, how, memory=False)
            rows.append(row)
            if case is None or row["seconds"] > settings["too_slow"]:
                break
    return {"rows": rows}


KIND = Kind("outputs", __doc__, PROBLEMS, ("mlp", "latent"), SETTINGS, SMOKE, "float32", measure, say_outputs)


if __name__ == "__main__":
    run(KIND)
