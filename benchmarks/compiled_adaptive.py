"""Time of a gradient with a relative error of 1e-5 by compiled adaptive MALI, over that of torchdiffeq's naive Dopri5.

    python -m benchmarks.compiled_adaptive [--rounds 60] [--no-record]

Problems, references and choices are those of `benchmarks.suite.precision`: float64, `odeint(gradient="mali")` with the
solver that it chooses by the tolerance. For each method it is the loosest tolerance, in half decades, from which on the
error is below 1e-5. Memory is the peak of torch's allocator, also at a tolerance far below, where a solve takes
several times as many steps. Each problem is compiled in two processes of its own, too, as in benchmarks.compiled.

The benchmark fails where a ratio is above its limit, where a gradient differs from that of an eager solve, where memory
grows with the number of steps, or where something is compiled a second time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.compiled import compile_seconds
from benchmarks.gradients import say
from benchmarks.harness import allocated_peak, finish, options_of, paired_ratio, time_side_by_side
from benchmarks.suite.limits import first_below
from benchmarks.suite.problems import PROBLEMS
from benchmarks.suite.torch_methods import Case, error_of, reference
from torchmali.engine import n_captured

TARGET = 1e-5
LIMITS = {"W1": 0.75, "W4": 0.90, "W2": 1.0}  # x torchdiffeq's naive Dopri5
DIFFERENCE, FLAT = 1e-12, 1.05
METHODS = ("MALI compiled", "MALI", "torchdiffeq naive")
TOLERANCES = [10.0 ** -(1 + i / 2) for i in range(23)]
ENOUGH = 2.5e-9  # an error below which no more tolerances are tried
TIGHT = 1e-9


def case_of(name: str, method: str, rtol: float) -> Case:
    return Case(PROBLEMS[name], method, {"rtol": rtol, "atol": rtol / 10}, "float64")


def loosest(name: str, method: str, exact: np.ndarray) -> float:
    """The loosest tolerance from which on the error of the gradient is below the target."""
    errors: list[float] = []
    for rtol in TOLERANCES:
        case = case_of(name, method, rtol)
        case.run()
        errors.append(error_of(case.gradient(), exact))
        if len(errors) > 1 and max(errors[-2:]) < ENOUGH:
            break
    found = first_below(TARGET, errors)
    if found is None:
        raise SystemExit(f"{name}: {method} does not reach a gradient error of {TARGET:g}.")
    return TOLERANCES[found]


def difference(name: str, rtol: float) -> float:
    """The relative difference of the gradient from that of an eager solve."""
    gradients = []
    for method in METHODS[:2]:
        case = case_of(name, method, rtol)
        case.run()
        gradients.append(case.gradient())
    return error_of(*gradients)


def measure(name: str, rounds: int) -> dict[str, Any]:
    exact, _ = reference(PROBLEMS[name], None)
    rtols = {method: loosest(name, method, exact) for method in METHODS}
    cases = {method: case_of(name, method, rtol) for method, rtol in rtols.items()}
    before = n_captured()
    seconds = time_side_by_side({method: case.run for method, case in cases.items()}, rounds, name)
    tight = case_of(name, "MALI compiled", TIGHT)
    peaks = {method: allocated_peak(case.run) for method, case in {**cases, "MALI compiled, tight": tight}.items()}
    return {
        "rtol": rtols,
        "counts": {method: case.counts() for method, case in {**cases, "MALI compiled, tight": tight}.items()},
        "time_ratios": {m: paired_ratio(seconds.cpu[m], seconds.cpu["torchdiffeq naive"]) for m in METHODS[:2]},
        "difference": difference(name, rtols["MALI compiled"]),
        "peak_bytes": peaks,
        "n_compiled_again": n_captured() - before,
        "compile_seconds": compile_seconds(name, "benchmarks.compiled_adaptive"),
        "cpu_seconds": seconds.cpu,
        "wall_seconds": seconds.wall,
    }


def print_first(name: str) -> None:
    """Print the seconds of the first gradient of a problem."""
    print(case_of(name, "MALI compiled", 1e-3).compile_seconds)


def report(results: dict[str, dict[str, Any]]) -> bool:
    """Print what was measured; return whether all limits are kept."""
    console, kept = Console(), True
    for name, result in results.items():
        ratios, peaks = result["time_ratios"], result["peak_bytes"]
        console.print(f"{name}: loosest tolerances for a gradient error of {TARGET:g}: {result['rtol']}")
        console.print(f"{name}: evaluations: {result['counts']}")
        console.print(f"{name}: eager MALI / torchdiffeq's naive Dopri5 = {ratios['MALI']['median']:.3f}")
        ratio = ratios["MALI compiled"]
        quartiles = f"{ratio['lower']:.3f} - {ratio['upper']:.3f}"
        text = f"{name}: compiled MALI / torchdiffeq's naive Dopri5 ({quartiles})"
        kept &= say(console, text, ratio["median"], LIMITS[name])
        kept &= say(console, f"{name}: compiled again for other tolerances", result["n_compiled_again"], 0)
        console.print(f"{name}: difference from an eager gradient = {result['difference']:.1e}, limit {DIFFERENCE:.0e}")
        kept &= result["difference"] <= DIFFERENCE
        growth = peaks["MALI compiled, tight"] / peaks["MALI compiled"]
        kept &= say(console, f"{name}: peak memory at rtol {TIGHT:g} / that at the target", growth, FLAT)
        console.print(f"{name}: peak bytes {peaks}")
        for way in ("cold", "warm"):
            cpu, wall = (result["compile_seconds"][kind][way] for kind in ("cpu", "wall"))
            console.print(f"{name}: seconds to compile, {way}: CPU {cpu:.1f}, wall {wall:.1f}")
    return kept


def main() -> None:
    options = options_of(__doc__, rounds=60, steps=0)
    results = {name: measure(name, options.rounds) for name in LIMITS}
    finish("compiled_adaptive", options, results, ("torch", "torchmali", "torchdiffeq"), report(results))


if __name__ == "__main__":
    main()
