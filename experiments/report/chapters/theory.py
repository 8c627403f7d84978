"""The theorems, the appendix's figure of stability, and the paper's drawings from real runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from experiments.engine.record import Record
from experiments.report.chapters import theory_figures
from experiments.report.claims import Claim
from experiments.report.figures import Picture
from experiments.report.runs import Found, Shown
from experiments.report.tables import Cell, Table, short


def pictures(record: Record, path: str) -> list[Picture]:
    results, command = record.results, [record.command]
    regions = (
        "Boundaries found by bisection on the eigenvalues of the solver's own steps, over the closed form: ellipses."
    )
    orders = "Errors against h, float64, on a small tanh MLP; slopes are fitted."
    back = "How far a solve back in time misses z(0), and the gradient's error, against the tolerance."
    return [
        Picture(
            "stability", "Stability of damped ALF", regions, partial(theory_figures.stability_figure, results), command
        ),
        Picture(
            "orders", "Orders of states and gradients", orders, partial(theory_figures.orders_figure, results), command
        ),
        Picture("reverse", "Ways back", back, partial(theory_figures.reverse_error_figure, results), command),
    ]


def explained(record: Record, path: str) -> list[Picture]:
    titles = {
        "search": ("1", "Figure 1: trials and steps", "An adaptive ALF solve: accepted steps, and rejected trials."),
        "ways back": (
            "2", "Figure 2: two ways back", "Van der Pol: the adjoint's solve back in time parts from the way it came; "
            "MALI's states do not.",
        ),
        "reconstruction": (
            "3", "Figure 3: reconstruction from the end",
            "Error of states rebuilt from the end state, float32, 200 steps, for several dampings, and on integers.",
        ),
    }  # fmt: skip

    def draw(name: str) -> Figure:
        return theory_figures.explain_figures(record.results)[name]

    found = []
    for name, (id_, title, caption) in titles.items():
        make: Callable[[], Figure] = partial(draw, name)
        found.append(Picture(id_, title, caption, make, [record.command]))
    return found


def tables(record: Record, path: str) -> list[Table]:
    results = record.results
    rows = [
        [eta, *(Cell(text, path) for text in (short(r["area"], 4), short(r["ellipse"]["area"], 4), _growth(r)))]
        for eta, r in results["regions"].items()
    ]
    columns = ("eta", "area, measured", "area of the ellipse", "growth per step at h sigma = i/2")
    regions = Table("stability", "Regions of stability", columns, rows, "", [record.command])
    rows = []
    for kind in ("local", "global"):
        for eta, found in results["orders"][kind].items():
            slopes = found["slopes"]
            rows.append([f"{kind} error", f"ALF, eta = {eta}", *(Cell(f"{slopes[x]:.2f}", path) for x in ("z", "v"))])
    for name, found in results["orders"]["gradient"].items():
        rows.append(["gradient", name, Cell(f"{found['slopes']['error']:.2f}", path), "-"])
    orders = Table("orders", "Orders", ("", "method", "order (z)", "order (v)"), rows, "", [record.command])
    return [regions, orders]


def _growth(region: dict[str, Any]) -> str:
    return f"{100 * (region['growth at i/2'] - 1):.1f} %"


def damped_alf_is_stable(results: dict[str, Any], path: str) -> Claim:
    regions = {eta: r for eta, r in results["regions"].items() if "area / ellipse" in r}
    ratios = [r["area / ellipse"] for r in regions.values()]
    deviation = results["eigenvalues"]["deviation"]
    damped = max((float(eta) for eta in regions), default=1.0)
    holds = deviation < 1e-12 and all(abs(x - 1) < 0.01 for x in ratios)
    samples = results["eigenvalues"]["samples"]
    numbers = f"Eigenvalues deviate by {short(deviation)} from the formula over {samples:,} samples. "
    numbers += (
        f"Area / ellipse {', '.join(f'{x:.4f}' for x in ratios)} for eta = {', '.join(regions)}; undamped, nothing is "
    )
    numbers += "stable. What the paper does not say: damping makes oscillations grow, by "
    numbers += f"{_growth(regions[f'{damped:g}'])} per step at h sigma = i/2 for eta = {damped:g}."
    text = "Damped ALF is stable for some h sigma, the less so the closer eta is to 1"
    return Claim("Theorem 3.2, appendix figure", text, "holds" if holds else "does not hold here", numbers, [path])


def local_orders(results: dict[str, Any], path: str) -> Claim:
    slopes = {k: results["orders"][k]["1"]["slopes"] for k in ("local", "global")}
    holds = abs(slopes["local"]["z"] - 3) < 0.1 and abs(slopes["local"]["v"] - 2) < 0.1
    numbers = f"Local order of z {slopes['local']['z']:.2f}, of v {slopes['local']['v']:.2f}; global "
    numbers += f"{slopes['global']['z']:.2f} and {slopes['global']['v']:.2f}; damping makes it "
    numbers += f"{results['orders']['global']['0.95']['slopes']['z']:.2f} (eta 0.95)."
    text = "The local error of ALF is O(h^3) in z and O(h^2) in v"
    return Claim("Theorem 3.1", text, "holds" if holds else "does not hold here", numbers, [path])


def solving_back_misses_the_start(results: dict[str, Any], path: str) -> Claim:
    equal = {
        name: found["slopes"]["back"] for name, found in results["reverse"]["equal steps"].items() if "slopes" in found
    }
    parts, worst = [], 0.0
    for title, methods in results["reverse"]["tolerances"].items():
        back = [
            f"{short(c['back']) if _is_number(c.get('back')) else 'fails'} at {t}"
            for t, c in methods["adjoint"].items()
        ]
        parts.append(f"{title}: {back[0]}, {back[-1]}")
        cells = [c for c in methods.get("MALI", {}).values() if _is_number(c.get("worst"))]
        worst = max([worst, *(c["worst"] for c in cells)])
    numbers = f"Relative miss of z(0) by a solve back with Dopri5: {'; '.join(parts)}. MALI's worst state (float64): "
    numbers += f"{short(worst)}. Orders of the miss at equal steps: "
    numbers += ", ".join(f"{name} {slope:.1f}" for name, slope in equal.items() if slope > 0.5) + "."
    text = "Solving back in time does not lead back: an error of the order of the solver's remains, and MALI has none"
    return Claim("Theorem 2.1", text, "holds" if worst < 1e-10 else "holds in part", numbers, [path])


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float))


def show_stability(found: list[Found]) -> Shown:
    record, path = found[0]
    claims = [
        damped_alf_is_stable(record.results, path),
        local_orders(record.results, path),
        solving_back_misses_the_start(record.results, path),
    ]
    return tables(record, path), pictures(record, path), claims


def show_drawings(found: list[Found]) -> Shown:
    return [], explained(*found[0]), []
