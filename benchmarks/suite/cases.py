"""What all kinds of measurement do with a case: count, measure, time in rounds, and make a row of the record of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.suite.driver import Bench, Case, Failure, rounds

JAX_IS_SLOW = ("W3",)  # convolutions: minutes where torch takes seconds
CONVOLUTIONS = ("W3", "odenet")  # machine code has nothing to gain there
Row = dict[str, Any]


def methods_for(bench: Bench, problem: str, without: Sequence[str] = ()) -> list[str]:
    """The methods that are there and can solve this problem in bearable time."""
    slow = [name for name in bench.methods if name.startswith("diffrax")] if problem in JAX_IS_SLOW else []
    idle = ["MALI compiled"] if problem in CONVOLUTIONS else []
    return [name for name in bench.methods if name not in (*without, *slow, *idle)]


def row_of(
    bench: Bench,
    problem: str,
    method: str,
    how: Mapping[str, Any],
    dtype: str | None = None,
    reference: str | None = None,
    memory: bool = True,
) -> tuple[Case | None, Row]:
    """Prepare a case and count; return it with its row, or None and a row without counts if the method fails.

    dtype: another one than that of the measurement. reference: the file of a gradient, if errors are wanted.
    memory: whether peak bytes are wanted; if not, jax's evaluations in the backward pass are counted, each case being
    compiled once more.
    """
    how = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in how.items()}
    case, about = bench.case(problem, method, how, dtype)
    row: Row = {"method": method, **how} | ({"dtype": dtype} if dtype else {})
    if case is None:
        return None, row
    row["seconds"] = float(f"{about['seconds']:.4g}")  # of the first run
    if about["compile_seconds"] is not None:
        row["compile_seconds"] = round(about["compile_seconds"], 2)
    try:
        return case, row | case.ask("measure", reference=reference, memory=memory)
    except Failure as failure:
        bench.failures[case.key] = str(failure)
        return None, row


def add_times(pairs: Sequence[tuple[Case, Row]], settings: Mapping[str, Any]) -> None:
    """Time these cases in rounds, and put the seconds into their rows."""
    cases = [case for case, _ in pairs]
    found = rounds(cases, settings["seconds"], settings["fewest"], settings["most"])
    for case, row in pairs:
        row.update(found[case.key])
