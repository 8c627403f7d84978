"""The limits that the records of the suite are held to, and the numbers that they are about."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

Record = Mapping[str, Any]
Row = Mapping[str, Any]
TARGETS = tuple(10.0**-k for k in range(2, 9))  # gradient errors
EAGER = {"W1": 1.15, "W2": 1.10, "W3": 1.10, "W4": 1.10}  # x the eager limit, 50 fixed steps
TO_TARGET, AT_TARGET = {"W1": 1.6, "W2": 1.6, "W4": 1.6}, 1e-5  # x torchdiffeq's naive Dopri5, to this gradient error
# What is compiled: x diffrax with its recursive checkpoints and with its backsolve, in 50 fixed steps; x naive Dopri5.
COMPILED = {"diffrax": {"W1": 1.0, "W2": 1.0, "W4": 1.0}, "diffrax backsolve": {"W2": 1.0, "W4": 1.0}}
COMPILED_TO_TARGET = {"W1": 0.75, "W2": 1.0, "W4": 0.90}
PRECISE, LATENT = "torchdiffeq naive", 1.3
TIME_EXPONENT, COUNT_EXPONENT, FLAT = 0.15, 0.05, 1.02


class Ratio(NamedTuple):
    """Median and quartiles of the ratios within the rounds."""

    median: float
    lower: float
    upper: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.lower:.2f} - {self.upper:.2f})"


class Verdict(NamedTuple):
    """A limit, and the number that it is about. None: no record has it."""

    text: str
    value: float | Ratio | None
    limit: float

    @property
    def number(self) -> float:
        return self.value.median if isinstance(self.value, Ratio) else math.nan if self.value is None else self.value

    @property
    def word(self) -> str:
        return "not measured" if self.value is None else "pass" if self.number <= self.limit else "FAIL"

    @property
    def shown(self) -> str:
        return "-" if self.value is None else str(self.value) if isinstance(self.value, Ratio) else f"{self.value:.3g}"


def ratio(a: Sequence[float], b: Sequence[float]) -> Ratio | None:
    found = [x / y for x, y in zip(a, b, strict=False) if math.isfinite(x) and math.isfinite(y)]
    if len(found) < 2:
        return None
    lower, median, upper = statistics.quantiles(found, n=4)
    return Ratio(median, lower, upper)


def row_with(rows: Sequence[Row], method: str, **how: Any) -> Row | None:
    """The row of a method and a setting that was not a failure, or None."""
    found = [it for it in rows if it["method"] == method and all(it[key] == value for key, value in how.items())]
    return next((it for it in found if "forward" in it), None)


def cpu_ratio(rows: Sequence[Row], method: str, other: str, **how: Any) -> Ratio | None:
    a, b = row_with(rows, method, **how), row_with(rows, other, **how)
    return ratio(a["cpu"], b["cpu"]) if a and b and "cpu" in a and "cpu" in b else None


# Work to an error


def first_below(target: float, errors: Sequence[float | None]) -> int | None:
    """Where the error falls below the target for good."""
    known = [math.inf if error is None else error for error in errors]
    return next((i for i in range(len(known)) if max(known[i:]) <= target), None)


def work_to(target: float, errors: Sequence[float | None], work: Sequence[float | None]) -> float | None:
    """The work for an error, interpolated log-log between two runs; None if it was not reached.

    If the first finite run is good enough already, its work is returned: an upper limit.
    """
    i = first_below(target, errors)
    if i is None or work[i] is None:
        return None
    now = float(work[i] or 0.0)
    before, error_before, error = (work[i - 1], errors[i - 1], errors[i]) if i else (None, None, None)
    if not before or error_before is None or not error:
        return now
    share = math.log(error_before / target) / math.log(error_before / error)
    return float(before * (now / before) ** share)


def is_upper_limit(target: float, errors: Sequence[float | None]) -> bool:
    i = first_below(target, errors)
    return i is not None and (i == 0 or errors[i - 1] is None)


def rows_of(record: Record, method: str) -> list[Row]:
    """The runs of a method, from the loosest tolerance to the tightest."""
    return [row for row in record["results"]["rows"] if row["method"] == method]


def methods_in(record: Record) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in record["results"]["rows"]))


def counted_to(record: Record, method: str, target: float, what: str) -> float | None:
    """Work that is counted, not timed: "forward" or "backward" evaluations, "peak_bytes"."""
    rows = rows_of(record, method)
    return work_to(target, [row["error"] for row in rows], [row.get(what) for row in rows])


def seconds_of_run(record: Record, method: str, target: float) -> list[float]:
    """CPU seconds of the loosest run from which on the error is small enough, without interpolation."""
    rows = rows_of(record, method)
    i = first_below(target, [row["error"] for row in rows])
    return [] if i is None else list(rows[i].get("cpu", ()))


def seconds_to(record: Record, method: str, target: float) -> list[float]:
    """CPU seconds to an error, one number for each round; empty if that was not reached, or not timed."""
    rows = rows_of(record, method)
    n_rounds = max((len(row.get("cpu", ())) for row in rows), default=0)
    errors = [row["error"] for row in rows]
    found = [
        work_to(target, errors, [row["cpu"][i] if "cpu" in row else None for row in rows]) for i in range(n_rounds)
    ]
    return [x for x in found if x is not None]


def time_ratio_of_runs(record: Record, method: str, other: str, target: float) -> Ratio | None:
    return ratio(seconds_of_run(record, method, target), seconds_of_run(record, other, target))


def time_ratio_to(record: Record, method: str, other: str, target: float) -> Ratio | None:
    return ratio(seconds_to(record, method, target), seconds_to(record, other, target))


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of log y over log x."""
    a, b = [math.log(it) for it in x], [math.log(it) for it in y]
    mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
    return sum((p - mean_a) * (q - mean_b) for p, q in zip(a, b, strict=True)) / sum((p - mean_a) ** 2 for p in a)


# Verdicts


def fixed(record: Record) -> Iterator[Verdict]:
    """50 fixed steps against the eager limit; growth with the number of steps."""
    name, rows = record["problem"], record["results"]["rows"]
    if name in EAGER:
        found = cpu_ratio(rows, "MALI", "eager limit", steps=50)
        yield Verdict(f"{name}, 50 fixed steps: time of MALI / eager limit", found, EAGER[name])
    for other, limits in COMPILED.items():
        if name in limits:
            found = cpu_ratio(rows, "MALI compiled", other, steps=50)
            yield Verdict(f"{name}, 50 fixed steps: time of compiled MALI / {other}", found, limits[name])
    for dtype in ("float32", "float64"):
        growth = [row for row in record["results"]["growth"] if "forward" in row and row["dtype"] == dtype]
        if not growth:
            continue
        n = [row["steps"] for row in growth]
        counts = exponent(n, [row["forward"] + row["backward"] for row in growth])
        seconds = exponent(n, [statistics.median(row["cpu"]) for row in growth])
        peaks = [row["peak_bytes"] for row in growth]
        which = f"{name}, {n[0]} to {n[-1]} steps, {dtype}"
        yield Verdict(f"{which}: distance from 1 of the exponent of evaluations in N", abs(counts - 1), COUNT_EXPONENT)
        yield Verdict(f"{which}: distance from 1 of the exponent of time in N", abs(seconds - 1), TIME_EXPONENT)
        yield Verdict(f"{which}: largest peak memory / smallest", max(peaks) / min(peaks), FLAT)


def precision(record: Record) -> Iterator[Verdict]:
    """Work to a gradient error of 1e-5."""
    name = record["problem"]
    if name not in TO_TARGET:
        return
    which = f"{name}, gradient error {AT_TARGET:.0e}"
    yield Verdict(
        f"{which}: time of MALI / torchdiffeq's naive Dopri5",
        time_ratio_to(record, "MALI", PRECISE, AT_TARGET),
        TO_TARGET[name],
    )
    yield Verdict(
        f"{which}: the same without interpolation",
        time_ratio_of_runs(record, "MALI", PRECISE, AT_TARGET),
        TO_TARGET[name],
    )
    yield Verdict(
        f"{which}: time of compiled MALI / torchdiffeq's naive Dopri5",
        time_ratio_of_runs(record, "MALI compiled", PRECISE, AT_TARGET),
        COMPILED_TO_TARGET[name],
    )
    adjoint = "torchdiffeq adjoint"
    yield Verdict(
        f"{which}: time of MALI / torchdiffeq's adjoint", time_ratio_to(record, "MALI", adjoint, AT_TARGET), 1.0
    )
    a, b = (counted_to(record, method, AT_TARGET, "peak_bytes") for method in ("MALI", adjoint))
    yield Verdict(f"{which}: peak memory of MALI / torchdiffeq's adjoint", a / b if a and b else None, 1.0)


def latent_solve(record: Record) -> Iterator[Verdict]:
    """The generative solve of the latent ODE, without encoder and decoder."""
    if record["problem"] != "latent":
        return
    for rtol in record["settings"]["rtol"]:
        found = cpu_ratio(record["results"]["rows"], "MALI", PRECISE, rtol=rtol)
        text = f"latent ODE, 100 times, rtol {rtol:g}: time of MALI's solve / torchdiffeq's naive Dopri5"
        yield Verdict(text, found, LATENT)


def latent_epoch(record: Record) -> Verdict:
    """The issue's own number: a whole epoch, of `python -m benchmarks.latent`."""
    found = record["results"]["time_ratios"]["MALI, free steps"]
    text = "latent ODE, 100 times, rtol 0.001: time of an epoch with adaptive MALI / naive Dopri5"
    return Verdict(text, Ratio(found["median"], found["lower"], found["upper"]), LATENT)


def unmeasured(found: Mapping[str, Mapping[str, Record]]) -> Iterator[Verdict]:
    """The limits of problems of which there is no record."""
    for name in [name for name in EAGER if name not in found["fixed"]]:
        yield Verdict(f"{name}, 50 fixed steps: time of MALI / eager limit", None, EAGER[name])
    for name in [name for name in TO_TARGET if name not in found["precision"]]:
        text = f"{name}, gradient error {AT_TARGET:.0e}: time of MALI / torchdiffeq's naive Dopri5"
        yield Verdict(text, None, TO_TARGET[name])


# Printing


def _say(verdicts: Sequence[Verdict], console: Console) -> bool:
    for it in verdicts:
        color = "green" if it.word == "pass" else "red"
        console.print(f"{it.text} = {it.shown}, limit {it.limit:g}: [{color}]{it.word}[/]", highlight=False)
    return all(it.word != "FAIL" for it in verdicts)


def _rows(record: Record, console: Console, columns: Sequence[str]) -> None:
    table = Table(title=f"{record['kind']}: {record['title']}")
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
    for row in record["results"]["rows"]:
        table.add_row(*(_cell(row, column) for column in columns))
    console.print(table)
    for what, why in record["failures"].items():
        console.print(f"failed: {what}: {why}", highlight=False, markup=False)


def _cell(row: Row, column: str) -> str:
    if column == "ms":
        seconds = statistics.median(row["cpu"]) if "cpu" in row else row.get("seconds")
        return "-" if seconds is None else f"{1e3 * seconds:.1f}"
    value = row.get(column)
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def say_fixed(record: Record, console: Console) -> bool:
    _rows(record, console, ("method", "steps", "ms", "forward", "backward", "peak_bytes"))
    return _say(list(fixed(record)), console)


def say_adaptive(record: Record, console: Console) -> bool:
    _rows(record, console, ("method", "rtol", "ms", "forward", "backward", "peak_bytes"))
    return _say(list(latent_solve(record)), console)


def say_precision(record: Record, console: Console) -> bool:
    _rows(record, console, ("method", "rtol", "error", "ms", "forward", "backward", "peak_bytes"))
    return _say(list(precision(record)), console)


def say_outputs(record: Record, console: Console) -> bool:
    _rows(record, console, ("method", "n_times", "forward", "backward"))
    return True
