"""One gradient at given tolerances, in float32: time, evaluations, peak memory.

    python -m benchmarks.suite.adaptive [--only W1,W2] [--quick] [--again] [--smoke] [--no-record]

MALI is `odeint(gradient="mali")` with the solver that it chooses by itself; the others take Dopri5. Equal tolerance is
not equal accuracy: for that see `precision`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.suite.cases import add_times, methods_for, row_of
from benchmarks.suite.driver import Bench, Kind, run
from benchmarks.suite.limits import say_adaptive

PROBLEMS = ("W1", "W2", "W3", "W4", "latent", "cde", "odenet", "mlp", "vdp", "lorenz", "lv")
SETTINGS = {
    "rtol": [1e-3, 1e-5], "seconds": 10, "fewest": 5, "most": 30, "too_slow": 5.0,
    "heavy": {"W3": {"rtol": [1e-3], "fewest": 3}},
}  # fmt: skip
SMOKE = {"rtol": [1e-2], "seconds": 0, "fewest": 2, "most": 2, "too_slow": 5.0, "heavy": {}}


def measure(bench: Bench, problem: str, settings: Any) -> dict[str, Any]:
    """rtol: atol is a tenth of it. too_slow: seconds of a first run beyond which a case is not timed in rounds."""
    settings = {**settings, **settings["heavy"].get(problem, {})}
    rows, pairs = [], []
    for method in methods_for(bench, problem):
        for rtol in settings["rtol"]:
            case, row = row_of(bench, problem, method, {"rtol": rtol, "atol": rtol / 10})
            rows.append(row)
            if case and row["seconds"] < settings["too_slow"]:
                pairs.append((case, row))
    add_times(pairs, settings)
    return {"rows": rows}


KIND = Kind(
    "adaptive", __doc__, PROBLEMS, ("W1", "W4", "latent", "lv"), SETTINGS, SMOKE, "float32", measure, say_adaptive
)


if __name__ == "__main__":
    run(KIND)
