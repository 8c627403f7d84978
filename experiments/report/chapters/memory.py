"""Figure 4 c: peak memory by method."""

from __future__ import annotations

from functools import partial
from typing import Any

from matplotlib.figure import Figure

from experiments.engine.record import Record
from experiments.report.claims import Claim, verdict
from experiments.report.figures import Picture
from experiments.report.runs import Found, Shown
from experiments.report.style import COLORS, log_scale, plain_axes
from experiments.report.tables import Cell, Table, short
from experiments.theory.memory import METHODS, SEARCH


def pictures(record: Record, path: str) -> list[Picture]:
    caption = "Bytes of live tensors in one forward and backward pass, all methods with the same solver (ALF), float64."
    return [Picture("4c", "Figure 4 c: peak memory", caption, partial(_draw, record), [record.command])]


def _draw(record: Record) -> Figure:
    config, cells = record.config, record.results["cells"]
    figure = Figure(figsize=(7.2, 3.1 * len(config["fields"]) + 0.6), layout="constrained")
    axes = figure.subplots(len(config["fields"]), 2, squeeze=False)
    for row, field in enumerate(config["fields"]):
        by_tolerance, by_steps = axes[row]
        for method in METHODS:
            color: Any = {"color": COLORS[method], "label": method}
            peaks = [cells[f"{field} / {method} / tolerance {t:g}"]["peak"] / 1e6 for t in config["tolerances"]]
            by_tolerance.plot(config["tolerances"], peaks, "o-", markersize=3.5, linewidth=1.3, **color)
            if method != SEARCH:
                peaks = [cells[f"{field} / {method} / N {n}"]["peak"] / 1e6 for n in config["steps"]]
                by_steps.plot(config["steps"], peaks, "o-", markersize=3.5, linewidth=1.3, **color)
        for ax, x in ((by_tolerance, "tolerance (rtol = atol)"), (by_steps, "fixed steps")):
            plain_axes(ax, field, x, "peak memory, MB")
            log_scale(ax, x=True)
        by_tolerance.invert_xaxis()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def tables(record: Record, path: str) -> list[Table]:
    results, config, rows = record.results, record.config, []
    for field in config["fields"]:
        state = results["state_bytes"][field]
        for method in METHODS:
            peaks = [results["cells"][f"{field} / {method} / tolerance {t:g}"]["peak"] for t in config["tolerances"]]
            fit = results["fits"].get(f"{field} / {method}")
            slope = "-" if fit is None else f"{abs(fit['slope'] / state):.2f}"
            r2 = "-" if fit is None or abs(fit["slope"]) < 1e-3 * state else f"{fit['r2']:.4f}"
            texts = [f"{peaks[0] / 1e6:.2f}", f"{peaks[-1] / 1e6:.2f}", f"{max(peaks) / min(peaks):.2f}", slope, r2]
            rows.append([field, method, *(Cell(text, path) for text in texts)])
    first, last = (f"{config['tolerances'][i]:g}" for i in (0, -1))
    columns = ("field", "method", f"MB at {first}", f"MB at {last}", "largest / smallest", "states per step", "R^2")
    note = "The last two columns: a line through the peaks of fixed steps; its slope in bytes of z per step."
    return [
        Table("4c", "Peak memory against the tolerance and the number of steps", columns, rows, note, [record.command])
    ]


def memory_is_constant_for_mali(record: Record, path: str) -> Claim:
    results, config = record.results, record.config

    def flatness(method: str) -> float:
        ratios = []
        for field in config["fields"]:
            peaks = [results["cells"][f"{field} / {method} / tolerance {t:g}"]["peak"] for t in config["tolerances"]]
            ratios.append(max(peaks) / min(peaks))
        return max(ratios)

    def slope(method: str, field: str) -> float:
        return results["fits"][f"{field} / {method}"]["slope"] / results["state_bytes"][field]

    flat = {method: flatness(method) for method in ("MALI", "adjoint", "ACA", "naive")}
    slopes = {m: [slope(m, field) for field in config["fields"]] for m in ("naive", "ACA", "MALI")}
    parts = [flat[m] <= 1.1 for m in ("MALI", "adjoint")]
    parts += [flat[m] > 1.1 and min(slopes[m]) > 1 for m in ("ACA", "naive")]
    numbers = "Largest / smallest peak over tolerances "
    numbers += ", ".join(f"{m} {short(x, 3)}" for m, x in flat.items()) + ". States per step "
    numbers += ", ".join(f"{m} {' / '.join(f'{abs(x):.2f}' for x in xs)}" for m, xs in slopes.items()) + "."
    rule = (
        "over tolerances the largest peak is at most 1.1 x the smallest for MALI and the adjoint, and more for naive "
    )
    rule += "and ACA, which need more than a state for each step"
    return Claim("toy-memory", verdict(parts), numbers, rule, [path])


def show(found: list[Found]) -> Shown:
    return tables(*found[0]), pictures(*found[0]), [memory_is_constant_for_mali(*found[0])]
