"""Audit of a smooth, a contracting and a chaotic problem.

    python -m benchmarks.audit [--from-record]

The chaotic problem is audited once more over a time in which its gradient is lost. Also draws docs/audit.png and renews
the tables in docs/audit.md. Takes about four minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator
from matplotlib.transforms import Bbox
from rich.console import Console
from torch import Tensor

from benchmarks.harness import RECORDS, command_line, header, quiet_down, write_record
from benchmarks.workloads import MLP
from experiments.report import style
from torchmali import Audit, audit

DOCS = Path(__file__).parents[1] / "docs"
Problem = tuple[Callable[[Tensor, Tensor], Tensor], Tensor, tuple[float, float]]
TITLES = {
    "smooth": "A smooth network",
    "contracting": "A problem that contracts",
    "chaotic": "A chaotic problem",
    "lost": "The chaotic problem over a longer time",
}
IN_PICTURE = ("smooth", "contracting", "chaotic")
LABELS = {  # name of a method: its label in the palette
    "naive": "naive", "aca": "ACA", "adjoint": "adjoint", "seminorm": "adjoint",
    **dict.fromkeys(("mali", "mali4", "mali6", "exact"), "MALI"),
}  # fmt: skip
COLORS = {name: style.COLORS[label] for name, label in LABELS.items()}
INK, PALE = "#222222", "#6b6b6b"


def smooth() -> Problem:
    """A tanh network of width 128, its weights at twice their usual size; state (1024, 64), float32."""
    torch.manual_seed(0)
    net = MLP(64, 128)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)
    return net, torch.randn(1024, 64), (0.0, 2.0)


def contracting() -> Problem:
    """Van der Pol's oscillator, which forgets where it began; float32."""

    def f(t: Tensor, z: Tensor) -> Tensor:
        x, y = z
        return torch.stack([y, 2 * (1 - x**2) * y - x])

    return f, torch.tensor([2.0, 0.1]), (0.0, 10.0)


def chaotic(t_end: float = 2.0) -> Problem:
    """Lorenz' equations, which never forget where they began; float32."""

    def f(t: Tensor, z: Tensor) -> Tensor:
        x, y, w = z
        return torch.stack([10 * (y - x), x * (28 - w) - y, x * y - 8 / 3 * w])

    return f, torch.tensor([1.0, 1.0, 20.0]), (0.0, t_end)


def measure() -> dict[str, Any]:
    problems = {"smooth": smooth(), "contracting": contracting(), "chaotic": chaotic()}
    results = {name: as_record(audit(*problem, max_seconds=None)) for name, problem in problems.items()}
    results["lost"] = as_record(audit(*chaotic(40.0), methods=["aca"], max_seconds=None))
    return results


def as_record(found: Audit) -> dict[str, Any]:
    """Return the table as it is printed, and its numbers."""
    rows = {
        row.name: {
            "method": str(row.method),
            "error": row.error if math.isfinite(row.error) else None,
            "peak_bytes": row.peak_bytes if math.isfinite(row.peak_bytes) else None,
            "seconds": row.seconds if math.isfinite(row.seconds) else None,
            "times": row.times,
            "n_evals_forward": row.stats.n_evals_forward,
            "n_evals_backward": row.stats.n_evals_backward,
            "reconstruction_error": row.stats.reconstruction_error,
            "n_refreshes": row.stats.n_refreshes,
            "notes": row.notes,
            "failure": row.failure,
            "unmeasured": row.unmeasured,
        }
        for row in found.rows
    }
    about = {"tolerance": found.tolerance, "reference": found.reference, "uncertainty": found.uncertainty}
    best = found.best.name if found.best else None
    return {
        **about,
        "best": best,
        "tied": [row.name for row in found.tied],
        "advice": found.advice,
        "rows": rows,
        "text": str(found),
    }


def report(results: Mapping[str, Any]) -> None:
    for name, found in results.items():
        Console().print(f"[bold]{TITLES[name]}[/]\n\n{found['text']}\n", highlight=False, soft_wrap=True)


def renew_tables(path: Path, results: Mapping[str, Any]) -> None:
    """Put the tables of the record into the text blocks of a markdown file, in their order."""
    texts = (f"```text\n{found['text']}\n```" for found in results.values())
    path.write_text(re.sub(r"```text\n(?:.*?\n)??```", lambda _: next(texts), path.read_text(), flags=re.S))


def as_bytes(n: float, _: object = None) -> str:
    return f"{n / 1e6:g} MB" if n >= 1e6 else f"{n / 1e3:g} kB" if n >= 1e3 else f"{n:g} B"


def draw(path: Path, results: Mapping[str, Any]) -> None:
    figure = Figure(figsize=(11.5, 4.6))
    FigureCanvasAgg(figure)  # to measure labels
    for i, name in enumerate(IN_PICTURE):
        found = results[name]
        left = 0.06 + 0.32 * i
        draw_problem(figure.add_axes((left, 0.17, 0.265, 0.54)), found)
        figure.text(left, 0.765, TITLES[name], fontsize=10.5, fontweight="bold", color=INK)
        failed = [name for name, row in found["rows"].items() if row["failure"]]
        figure.text(left, 0.025, f"failed: {', '.join(failed) or 'none'}", fontsize=9, color=PALE)
    title = "Error of the gradient against peak memory, all methods at the same tolerance"
    figure.text(0.012, 0.925, title, fontsize=12.5, fontweight="bold", color=INK)
    note = "Across: peak bytes of live tensors. Up: relative error. Shaded: accurate enough. Ring: the method advised."
    figure.text(0.012, 0.86, note, fontsize=9.5, color=PALE)
    figure.savefig(path, dpi=160)


def draw_problem(ax: Axes, found: Mapping[str, Any]) -> None:
    points = {name: (row["peak_bytes"], row["error"]) for name, row in found["rows"].items() if not row["failure"]}
    sizes, errors = zip(*points.values(), strict=True)
    ax.set(xscale="log", yscale="log", xlim=(min(sizes) / 3, max(sizes) * 4), ylim=(min(errors) / 4, max(errors) * 4))
    ax.axhspan(min(errors) / 4, found["tolerance"], color=style.COLORS["MALI"], alpha=0.07, lw=0)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.xaxis.set_major_formatter(FuncFormatter(as_bytes))
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#cccccc")
    ax.tick_params(length=0, labelsize=8.5, labelcolor=PALE)
    ax.grid(color=style.GRID, linewidth=0.7)
    ax.set_axisbelow(True)
    for name, (x, y) in points.items():
        ax.plot(x, y, "o", ms=6, color=COLORS[name], zorder=3)
        if name == found["best"]:
            ax.plot(x, y, "o", ms=12, mfc="none", mec=INK, mew=1.3, zorder=3)
    label(ax, points, found["best"])


def label(ax: Axes, points: Mapping[str, tuple[float, float]], best: str | None) -> None:
    """Put a name beside each point, in the first place that is clear of all other points and names."""
    spots = {name: ax.transData.transform(point) for name, point in points.items()}
    taken: list[Bbox] = []
    places = [(9, 0, "left"), (-10, 0, "right"), (0, 12, "center"), (0, -12, "center")]
    places += [(9, 10, "left"), (9, -10, "left"), (-9, 10, "right"), (-9, -10, "right"), (0, 22, "center")]
    places += [(14, 20, "left"), (14, -20, "left"), (-14, 20, "right"), (-14, -20, "right"), (0, -22, "center")]
    for name, point in sorted(points.items(), key=lambda item: item[1], reverse=True):
        others = [Bbox.from_bounds(x - 13, y - 10, 26, 20) for other, (x, y) in spots.items() if other != name]
        for dx, dy, side in places:
            style: dict[str, Any] = {"color": COLORS[name], "fontsize": 9, "ha": side, "va": "center"}
            weight = "bold" if name == best else "normal"
            text = ax.annotate(name, point, (dx, dy), textcoords="offset points", fontweight=weight, **style)
            box = text.get_window_extent()
            if not box.count_overlaps([*taken, *others]) and ax.bbox.x0 < box.x0:
                taken.append(box)
                break
            text.remove()
        else:
            raise SystemExit(f"No place for the name of {name}: give the picture more room.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--from-record", action="store_true", help="no runs: tables and picture from the last record")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    quiet_down()
    if options.from_record:
        results = json.loads((RECORDS / "audit.json").read_text())["results"]
    else:
        results = measure()
    report(results)
    if options.no_record:
        return
    if not options.from_record:
        head = header(command_line("benchmarks.audit"), ("torch", "torchmali"))
        write_record("audit", {"header": head, "results": results})
    draw(DOCS / "audit.png", results)
    renew_tables(DOCS / "audit.md", results)


if __name__ == "__main__":
    main()
