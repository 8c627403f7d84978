"""docs/performance.md and its pictures, from the records of the suite.

    python -m benchmarks.report

Every number, and every sentence that says who is faster, is made from the records here, so that the page is theirs
whenever something has been measured again (`tests/records/test_documents.py`).
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter

from benchmarks.suite import limits
from benchmarks.suite.driver import RECORDS, records
from benchmarks.suite.limits import Ratio, Record, Verdict
from experiments.report import style

DOCS = Path(__file__).parents[1] / "docs"
LATENT = RECORDS.parent / "latent.json"
Kinds = Mapping[str, Mapping[str, Record]]  # records by kind and problem
KINDS = ("fixed", "adaptive", "precision", "outputs")
METHODS = (
    "MALI", "MALI compiled", "ACA", "naive", "torchdiffeq naive", "torchdiffeq adjoint", "torchode",
    "TorchDiffEqPack MALI", "diffrax", "diffrax backsolve",
)  # fmt: skip
PEERS = METHODS[4:]
BASE = "torchdiffeq naive"
DRAWN_TARGETS = tuple(10 ** (-k / 8) for k in range(8, 73))
LINES: dict[str, dict[str, Any]] = {
    "MALI": {"linewidth": 2.4, "zorder": 5},
    "MALI compiled": {"linewidth": 2.0, "linestyle": ":", "zorder": 5},
    "ACA": {"linewidth": 1.6},
    "naive": {"linewidth": 1.6},
    **{name: {"linewidth": 1.3, "linestyle": "--"} for name in PEERS},
}

HEAD = """# Performance

What a gradient costs, by method: time, evaluations of f, peak memory. Made by `make bench-full` and `python -m
benchmarks.report`; every number on this page, and every sentence about who is faster, is made from the records in
[benchmarks/records/suite](../benchmarks/records/suite), which hold all samples.

- **MALI**, **ACA** and **naive** are ours. With tolerances, MALI is `odeint(gradient="mali")` with the solver that it
  chooses by itself, the others take Dopri5; fixed steps are those of ALF. **MALI compiled** is the same with
  `compile=True`: what it takes to compile is not counted, its memory is that of torch's allocator.
- **torchdiffeq** (naive and adjoint), **torchode** (plain autograd) and **diffrax** (its default, recursive
  checkpoints, and backsolve) take Dopri5 with tolerances. With fixed steps they take methods of order 2 with two
  evaluations in a step, the midpoint rule or (torchode) Heun's. **TorchDiffEqPack MALI** is the code of the paper.
  diffrax is compiled by jax, in a process of its own; its evaluations follow from its number of steps. Those of its
  backward pass are counted for the table of output times alone.
- Times are CPU seconds of the process, on one thread and one core. Every case runs once in a round, in random order;
  ratios are medians of those within a round, with quartiles in parentheses. Memory is the peak of live tensors during
  the forward and the backward pass (diffrax: what its compiled code says it needs). The time that jax takes to compile
  is not counted.
- A dash is something that failed, was not reached, or was not measured. The records say which, and why.

`python -m benchmarks.suite.KIND --only PROBLEM --again` measures one record again. `make .venv-jax` makes the
environment of jax; without it the rows of diffrax are left out.
"""


PRECISION = """## Work against precision

The tolerance is tightened, by half a decade or a decade at a time, until the gradient is right. Work for an error is
interpolated between two runs, log-log; float64. Where the error falls by several decades from one run to the next, the
interpolation promises what no tolerance gives: among the limits there is the ratio without it, too, of the loosest runs
that are good enough.

In a cell: CPU milliseconds / evaluations of f there + back / peak kB. What stands after ≤ is the work of the loosest
run that did not fail, which was right already. torchdiffeq's Dopri5 steps over the last time and interpolates there,
which is why it is less accurate than other Dopri5 with as many evaluations.

![CPU time against gradient error](performance-precision.png)
"""


FIXED = """## Fixed steps

float32. The eager limit is the time of evaluations alone: N without a graph, N with one and its vector-Jacobian
product.
Where round-off grew beyond a limit, as it may in float32 over a thousand steps, MALI solves again with states kept
([limits.md](limits.md)), which takes evaluations and memory: hence growth is shown for float64, too.
"""


def load() -> dict[str, dict[str, dict[str, Any]]]:
    return {kind: records(kind) for kind in KINDS}


# Tables


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def short(x: float | None, digits: int = 3) -> str:
    """Format a number with so many digits, without an exponent."""
    if x is None or not math.isfinite(x):
        return "-"
    if x == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(x))))
    return (
        f"{round(x, places):,.{places}f}" if places else f"{round(x, digits - 1 - math.floor(math.log10(abs(x)))):,.0f}"
    )


def megabytes(n: float | None) -> str:
    return "-" if n is None else short(n / 1e6, 2)


def median_ms(row: Mapping[str, Any] | None) -> float | None:
    return 1e3 * statistics.median(row["cpu"]) if row and "cpu" in row else None


def of_limits(found: Kinds) -> str:
    rows = [[it.text, it.shown, f"{it.limit:g}", f"**{it.word}**"] for it in verdicts(found)]
    return table(("", "measured", "limit", ""), rows)


def verdicts(found: Kinds) -> list[Verdict]:
    judges: tuple[tuple[str, Callable[[Record], Iterator[Verdict]]], ...] = (
        ("precision", limits.precision),
        ("fixed", limits.fixed),
        ("adaptive", limits.latent_solve),
    )
    judged = [it for kind, judge in judges for record in found[kind].values() for it in judge(record)]
    return [*judged, *limits.unmeasured(found), limits.latent_epoch(json.loads(LATENT.read_text()))]


def of_precision(found: Kinds) -> str:
    """One table for each problem: time, evaluations and memory to each error."""
    parts = []
    for record in found["precision"].values():
        rows = []
        for method in limits.methods_in(record):
            ratio = limits.time_ratio_to(record, method, BASE, limits.AT_TARGET)
            cells = [work_cell(record, method, target) for target in limits.TARGETS]
            rows.append([name_of(method), *cells, "1" if method == BASE else text_of(ratio)])
        head = ("", *(f"{x:.0e}" for x in limits.TARGETS), f"time / torchdiffeq naive, {limits.AT_TARGET:.0e}")
        parts.append(f"**{record['title']}**\n\n{table(head, rows)}")
    return "\n".join(parts)


def work_cell(record: Record, method: str, target: float) -> str:
    """Milliseconds / evaluations there + back / peak kB to an error."""
    errors = [row["error"] for row in limits.rows_of(record, method)]
    forward, backward, peak = (
        limits.counted_to(record, method, target, what) for what in ("forward", "backward", "peak_bytes")
    )
    if forward is None:
        return "-"
    seconds = limits.seconds_to(record, method, target)
    time = short(1e3 * statistics.median(seconds)) if seconds else "-"
    most = "≤ " if limits.is_upper_limit(target, errors) else ""
    return f"{most}{time} / {forward:,.0f} + {'?' if backward is None else f'{backward:,.0f}'} / {kilobytes(peak)}"


def kilobytes(n: float | None) -> str:
    return "-" if n is None else short(n / 1e3, 2)


def text_of(ratio: Ratio | None) -> str:
    return "-" if ratio is None else str(ratio)


def name_of(method: str) -> str:
    return "**MALI**" if method == "MALI" else method


def of_fixed(found: Kinds) -> str:
    """One table for each workload: time against the eager limit, peak memory by the number of steps."""
    parts = []
    for name, record in found["fixed"].items():
        rows = record["results"]["rows"]
        timed = min(row["steps"] for row in rows if "cpu" in row and row["method"] == BASE)
        counted = sorted({row["steps"] for row in rows if row["method"] == BASE})
        body = []
        for method in limits.methods_in(record):
            ratio = limits.cpu_ratio(rows, method, "eager limit", steps=timed)
            here = [limits.row_with(rows, method, steps=n) for n in counted]
            peaks = [megabytes(row["peak_bytes"]) if row else "-" for row in here]
            row = limits.row_with(rows, method, steps=timed)
            shown = "1" if method == "eager limit" else text_of(ratio)
            body.append([name_of(method), shown, short(median_ms(row)), *peaks])
        head = ("", f"time / eager limit, N = {timed}", "ms", *(f"peak MB, N = {n}" for n in counted))
        parts.append(f"**{record['title']}**\n\n{table(head, body)}")
        assert name == record["problem"]
    return "\n".join(parts)


def of_tolerances(found: Kinds) -> str:
    parts = []
    for record in found["adaptive"].values():
        rows, rtols, body = record["results"]["rows"], record_rtols(record), []
        for method in limits.methods_in(record):
            cells = []
            for rtol in rtols:
                row = limits.row_with(rows, method, rtol=rtol)
                ratio = limits.cpu_ratio(rows, method, BASE, rtol=rtol)
                cells += [short(median_ms(row)), text_of(ratio) if method != BASE else "1", counts(row)]
                cells.append(kilobytes(row["peak_bytes"] if row else None))
            body.append([name_of(method), *cells])
        columns = ("ms", "/ torchdiffeq naive", "f", "peak kB")
        head = ("", *(f"{what}, {rtol:.0e}" for rtol in rtols for what in columns))
        parts.append(f"**{record['title']}**\n\n{table(head, body)}")
    return "\n".join(parts)


def record_rtols(record: Record) -> list[float]:
    return sorted({row["rtol"] for row in record["results"]["rows"]}, reverse=True)


def counts(row: Mapping[str, Any] | None) -> str:
    """Evaluations there and back: 41 + 37."""
    if row is None:
        return "-"
    back = "?" if row["backward"] is None else f"{row['backward']:,}"
    return f"{row['forward']:,} + {back}"


def of_outputs(found: Kinds) -> str:
    parts = []
    for record in found["outputs"].values():
        rows = record["results"]["rows"]
        numbers = sorted({row["n_times"] for row in rows})
        body = [
            [name_of(method), *(counts(limits.row_with(rows, method, n_times=n)) for n in numbers)]
            for method in limits.methods_in(record)
        ]
        parts.append(f"**{record['title']}**\n\n{table(('', *(f'{n:,} times' for n in numbers)), body)}")
    return "\n".join(parts)


# Sentences


def who(found: Kinds) -> str:
    """MALI against each peer at a gradient error of 1e-5: where it is faster, where slower, and by how much memory."""
    lines = []
    for peer in (*PEERS, "ACA", "naive"):
        ratios = {
            name: limits.time_ratio_of_runs(record, "MALI", peer, limits.AT_TARGET)
            for name, record in found["precision"].items()
        }
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        if not known:
            continue
        faster = [f"{short_title(name)} ({r.median:.2f})" for name, r in known.items() if r.upper < 1]
        slower = [f"{short_title(name)} ({r.median:.2f})" for name, r in known.items() if r.lower > 1]
        level = [short_title(name) for name, r in known.items() if r.lower <= 1 <= r.upper]
        memory = memory_against(found, peer, list(known))
        words = [f"{word} on {', '.join(these)}" for word, these in (("faster", faster), ("slower", slower)) if these]
        words += [f"neither clearly on {', '.join(level)}"] if level else []
        lines.append(f"- **{peer}**: MALI is {'; '.join(words)}. {memory}\n")
    return "".join(lines)


def memory_against(found: Kinds, peer: str, names: Sequence[str]) -> str:
    shares = []
    for name in names:
        a, b = (
            limits.counted_to(found["precision"][name], method, limits.AT_TARGET, "peak_bytes")
            for method in ("MALI", peer)
        )
        if a and b:
            shares.append(a / b)
    return f"{span_of(shares)} times the other's memory." if shares else ""


def span_of(shares: Sequence[float]) -> str:
    ends = dict.fromkeys(f"{x:.2g}" for x in (min(shares), max(shares)))
    return f"It takes {' to '.join(ends)}"


SHORT = {
    "mlp": "MLP", "latent": "the latent ODE", "cde": "the Neural CDE", "odenet": "the ODE-Net block",
    "vdp": "Van der Pol", "lorenz": "Lorenz", "lv": "Lotka-Volterra",
}  # fmt: skip


def short_title(name: str) -> str:
    return SHORT.get(name, name)


def machine(found: Kinds) -> str:
    """The versions, dates and loads of the records, in a sentence or two."""
    headers = [record["header"] for kind in found.values() for record in kind.values()]
    packages: dict[str, set[str]] = {}
    for header in headers:
        for name, version in header["packages"].items():
            packages.setdefault(name, set()).add(version)
    versions = ", ".join(f"{name} {' and '.join(sorted(x))}" for name, x in packages.items())
    dates = sorted({header["date"] for header in headers})
    loads = [x for header in headers for x in header["load_average"]]
    codes = len({header["code"] for header in headers})
    states = "one state" if codes == 1 else f"{codes} states"
    return (
        f"{len(headers)} records of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, of {states} of the code, on "
        f"{headers[0]['cores']} cores; the load average was {min(loads):.1f} to {max(loads):.1f} (1: the suite alone)."
        "\n"
        f"{versions}.\n"
    )


def failures(found: Kinds) -> str:
    """How many cases of each method failed."""
    counted: dict[str, int] = {}
    for kind in found.values():
        for record in kind.values():
            for key in record["failures"]:
                method = next((name for name in sorted(METHODS, key=len, reverse=True) if name in key), key)
                counted[method] = counted.get(method, 0) + 1
    if not counted:
        return "No case failed.\n"
    shown = ", ".join(f"{name} {n}" for name, n in sorted(counted.items(), key=lambda item: -item[1]))
    return f"Cases that failed: {shown}.\n"


def page(found: Kinds) -> str:
    """The text of docs/performance.md."""
    parts = (
        HEAD,
        "## Limits\n\nWhat the project has set itself, and whether the records keep it.\n",
        of_limits(found),
        "## Where MALI wins and where it loses\n\nTime to a gradient error of 1e-5, MALI's over the other's: below 1, "
        "MALI is faster.\nOf each method that is the run with the loosest tolerance that is good enough, without "
        "interpolation. The quartiles decide:\nwhere they lie on both sides of 1, there is no clear difference.\n",
        who(found),
        "![Time and memory to a gradient error of 1e-5, by method](performance-memory.png)\n",
        PRECISION,
        of_precision(found),
        FIXED,
        of_fixed(found),
        "## Tolerances\n\nfloat32, rtol as in the head of a column and atol a tenth of it; evaluations there + back. "
        "Equal tolerance is not equal accuracy.\n",
        of_tolerances(found),
        "## Output times\n\nEvaluations, there + back, by the number of output times; rtol 1e-4.\n\n"
        "![Evaluations against the number of output times](performance-outputs.png)\n",
        of_outputs(found),
        "## Records\n",
        machine(found) + failures(found),
    )
    return "\n".join(parts)


# Pictures


def look(method: str) -> dict[str, Any]:
    return {"color": style.COLORS[method], **LINES[method]}


def legend(figure: Figure, methods: Sequence[str], **more: Any) -> None:
    handles = [Line2D([], [], label=name, **look(name), **more) for name in methods]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)


def draw_precision(path: Path, found: Kinds) -> None:
    chosen = found["precision"]
    n_rows = math.ceil(len(chosen) / 3)
    figure = Figure(figsize=(11, 1.0 + 2.7 * n_rows), layout="constrained")
    panels: Sequence[Axes] = list(figure.subplots(n_rows, 3, squeeze=False).flat)
    for i, (ax, record) in enumerate(zip(panels, chosen.values(), strict=False)):
        bottom = i + 3 >= len(chosen)
        style.plain_axes(ax, plain_title(record), "relative error of the gradient" if bottom else "")
        for method in limits.methods_in(record):
            ax.plot(*precision_line(record, method), **look(method))
        style.log_scale(ax, x=True)
        ax.set_xlim(1e-1, 1e-9)
    for ax in panels[len(chosen) :]:
        ax.set_visible(False)
    for ax in panels[::3]:
        ax.set_ylabel("CPU milliseconds", fontsize=9, color=style.INK)
    legend(figure, METHODS)
    figure.savefig(path, dpi=120)


def plain_title(record: Record) -> str:
    return record["title"].split(":")[0].split(",")[0]


def precision_line(record: Record, method: str) -> tuple[list[float], list[float]]:
    """Errors, and the milliseconds to reach them; those of a single run where none was timed in rounds."""
    rows = limits.rows_of(record, method)
    errors = [row["error"] for row in rows]
    times = [None if "seconds" not in row else median_ms(row) or 1e3 * row["seconds"] for row in rows]
    points = [(target, limits.work_to(target, errors, times)) for target in DRAWN_TARGETS]
    known = [(target, work) for target, work in points if work is not None]
    return [target for target, _ in known], [work for _, work in known]


def draw_memory(path: Path, found: Kinds) -> None:
    names = [name for name in ("W1", "W4", "W2", "latent") if name in found["precision"]]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False).flat
    for ax, name in zip(panels, names, strict=True):
        style.plain_axes(ax, short_title(name).removeprefix("the "), "CPU milliseconds", "")
        for method in METHODS:
            seconds = limits.seconds_of_run(found["precision"][name], method, limits.AT_TARGET)
            peak = limits.counted_to(found["precision"][name], method, limits.AT_TARGET, "peak_bytes")
            if seconds and peak:
                mark = "o" if method in METHODS[:3] else "D"
                x, y = 1e3 * statistics.median(seconds), peak / 1e6
                ax.plot(x, y, mark, color=style.COLORS[method], markersize=9 if method == "MALI" else 6.5)
        ax.set(xscale="log", yscale="log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        ax.margins(0.15)
    list(figure.axes)[0].set_ylabel("peak MB", fontsize=9, color=style.INK)
    handles = [
        Line2D([], [], label=name, color=style.COLORS[name], marker="o" if name in METHODS[:3] else "D", linestyle="")
        for name in METHODS
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def draw_outputs(path: Path, found: Kinds) -> None:
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    panels: Sequence[Axes] = list(figure.subplots(1, max(1, len(found["outputs"])), squeeze=False).flat)
    for ax, record in zip(panels, found["outputs"].values(), strict=False):
        style.plain_axes(ax, plain_title(record), "output times")
        for method in limits.methods_in(record):
            rows = [row for row in limits.rows_of(record, method) if row.get("backward") is not None]
            total = [row["forward"] + row["backward"] for row in rows]
            ax.plot([row["n_times"] for row in rows], total, marker="o", markersize=3.5, **look(method))
        style.log_scale(ax, x=True)
    panels[0].set_ylabel("evaluations of f, forward and backward", fontsize=9, color=style.INK)
    legend(figure, METHODS)
    figure.savefig(path, dpi=120)


def main() -> None:
    found = load()
    (DOCS / "performance.md").write_text(page(found))
    draw_precision(DOCS / "performance-precision.png", found)
    draw_memory(DOCS / "performance-memory.png", found)
    draw_outputs(DOCS / "performance-outputs.png", found)


if __name__ == "__main__":
    main()
