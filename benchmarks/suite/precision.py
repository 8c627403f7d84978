"""Work against precision: time, evaluations and peak memory of a gradient by its error, in float64.

    python -m benchmarks.suite.precision [--only W1,W2] [--quick] [--again] [--smoke] [--no-record]

Each method is run at tighter and tighter tolerances. The error is that of (dL/dy0, dL/dtheta), relative, in the 2-norm,
against Dopri8 with ACA at 1e-12. The work for an error is interpolated between two runs (`limits.work_to`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from benchmarks.suite.cases import Row, add_times, methods_for, row_of
from benchmarks.suite.driver import Bench, Case, Kind, run
from benchmarks.suite.limits import TARGETS, first_below, say_precision

PROBLEMS = ("W1", "W2", "W4", "mlp", "latent", "cde", "vdp", "lorenz", "lv")
SETTINGS = {
    "tightest": 12.0, "decades": 0.5, "enough": 2.5e-9, "too_slow": 2.0, "timed": list(TARGETS),
    "seconds": 15, "fewest": 5, "most": 20,
    "heavy": {
        "W2": {"decades": 1.0, "timed": [1e-3, 1e-5], "too_slow": 6.0, "fewest": 4},
        "latent": {"decades": 1.0, "timed": [1e-3, 1e-5], "fewest": 4},
    },
}  # fmt: skip
SMOKE = {
    "tightest": 3.0, "decades": 1.0, "enough": 1e-3, "too_slow": 1.0, "timed": [1e-2], "seconds": 0, "fewest": 2,
    "most": 2, "heavy": {},
}  # fmt: skip


def measure(bench: Bench, problem: str, settings: Any) -> dict[str, Any]:
    """Tolerances go from 1e-1 down by `decades`, until two errors are small enough or a run takes too long."""
    settings = {**settings, **settings["heavy"].get(problem, {})}
    with tempfile.TemporaryDirectory() as folder:
        path, difference = bench.reference(problem, folder)
        found = [scan(bench, problem, method, path, settings) for method in methods_for(bench, problem)]
        pairs = [pair for runs in found for pair in needed(runs, settings["timed"])]
        add_times(pairs, settings)
    return {"reference_difference": difference, "rows": [row for runs in found for _, row in runs]}


def scan(bench: Bench, problem: str, method: str, reference: str, settings: Any) -> list[tuple[Case | None, Row]]:
    runs: list[tuple[Case | None, Row]] = []
    for i in range(round((settings["tightest"] - 1) / settings["decades"]) + 1):
        rtol = 10.0 ** -(1 + i * settings["decades"])
        case, row = row_of(bench, problem, method, {"rtol": rtol, "atol": rtol / 10}, reference=reference)
        runs.append((case, {"error": None} | row))
        small = [it["error"] is not None and it["error"] < settings["enough"] for _, it in runs]
        if small[-2:] == [True, True] or row.get("seconds", 0.0) > settings["too_slow"]:
            break
        if len(runs) > 3 and all(case is None for case, _ in runs[-3:]):
            break
    return runs


def needed(runs: Sequence[tuple[Case | None, Row]], targets: Sequence[float]) -> list[tuple[Case, Row]]:
    """The runs on both sides of the targets."""
    errors = [row["error"] for _, row in runs]
    places = {i for target in targets for i in (first_below(target, errors),) if i is not None}
    places |= {i - 1 for i in places if i > 0}
    return [(case, row) for i in sorted(places) for case, row in [runs[i]] if case]


KIND = Kind(
    "precision", __doc__, PROBLEMS, ("W1", "W2", "W4", "lv"), SETTINGS, SMOKE, "float64", measure, say_precision
)


if __name__ == "__main__":
    run(KIND)
