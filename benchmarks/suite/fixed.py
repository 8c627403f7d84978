"""One gradient with a given number of steps, in float32: time, evaluations, peak memory; and how they grow.

    python -m benchmarks.suite.fixed [--only W1,W2] [--quick] [--again] [--smoke] [--no-record]

Ours are steps of ALF. torchdiffeq and diffrax take the midpoint rule, torchode Heun's: two evaluations in a step of
order 2. The eager limit is the time of the evaluations alone that a method needs which forgets the steps: N without a
graph, and N with one, each with its vector-Jacobian product.
"""

from __future__ import annotations

from typing import Any

from benchmarks.suite.cases import Row, add_times, methods_for, row_of
from benchmarks.suite.driver import EAGER_LIMIT, Bench, Kind, run
from benchmarks.suite.limits import say_fixed

PROBLEMS = ("W1", "W2", "W3", "W4", "odenet")
SETTINGS = {
    "timed": [50], "counted": [10, 50, 200], "growth": [50, 100, 200, 500, 1000, 2000], "growth_of": ["W1"],
    "seconds": 12, "fewest": 7, "most": 40,
    "heavy": {"W2": {"counted": [10, 50]}, "W3": {"timed": [10], "counted": [10], "pair_at": 50}},
}  # fmt: skip
SMOKE = {
    "timed": [3], "counted": [3], "growth": [2, 4], "growth_of": ["W1"],
    "seconds": 0, "fewest": 2, "most": 2, "heavy": {},
}  # fmt: skip


def measure(bench: Bench, problem: str, settings: Any) -> dict[str, Any]:
    """heavy: problems with numbers of steps of their own; pair_at: where MALI and the limit alone are timed, too."""
    settings = {**settings, **settings["heavy"].get(problem, {})}
    rows, pairs = [], []
    for method in [EAGER_LIMIT, *methods_for(bench, problem)]:
        for n in sorted({*settings["timed"], *settings["counted"]}):
            case, row = row_of(bench, problem, method, {"steps": n})
            rows.append(row)
            if case and (n in settings["timed"]):
                pairs.append((case, row))
    add_times(pairs, settings)
    if "pair_at" in settings:
        here = [row_of(bench, problem, method, {"steps": settings["pair_at"]}) for method in (EAGER_LIMIT, "MALI")]
        add_times([(case, row) for case, row in here if case], settings | {"fewest": 5})
        rows = [
            row for row in rows if row["steps"] != settings["pair_at"] or row["method"] not in (EAGER_LIMIT, "MALI")
        ]
        rows += [row for _, row in here]
    growth = grown(bench, problem, settings) if problem in settings["growth_of"] else []
    return {"rows": rows, "growth": growth}


def grown(bench: Bench, problem: str, settings: Any) -> list[Row]:
    """MALI alone, also in float64: in float32 long solves may be solved again, as round-off grows."""
    found = [
        row_of(bench, problem, "MALI", {"steps": n}, dtype)
        for dtype in ("float32", "float64")
        for n in settings["growth"]
    ]
    add_times([(case, row) for case, row in found if case], settings | {"fewest": min(5, settings["fewest"])})
    return [row for _, row in found]


KIND = Kind("fixed", __doc__, PROBLEMS, ("W1", "W2", "W4"), SETTINGS, SMOKE, "float32", measure, say_fixed)


if __name__ == "__main__":
    run(KIND)
