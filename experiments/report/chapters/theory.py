"""The theorems, the appendix's figure of stability, and the paper's drawings from real runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from experiments.engine.record import Record
from experiments.report.chapters import theory_figures
from experiments.report.claims import Claim, verdict
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


def _ellipses(results: dict[str, Any]) -> dict[str, Any]:
    return {eta: r for eta, r in results["regions"].items() if "area / ellipse" in r}


def stability_regions(results: dict[str, Any], path: str) -> Claim:
    regions, deviation = _ellipses(results), results["eigenvalues"]["deviation"]
    ratios = [r["area / ellipse"] for r in regions.values()]
    samples = results["eigenvalues"]["samples"]
    numbers = f"Eigenvalues deviate by {short(deviation)} from the formula over {samples:,} samples. "
    numbers += f"Area / ellipse {', '.join(f'{x:.4f}' for x in ratios)} for eta = {', '.join(regions)}; undamped "
    numbers += f"{short(results['regions']['1']['area'])}. What the paper does not say: damping makes oscillations "
    numbers += (
        f"grow, by {', '.join(f'{_growth(r)} (eta {eta})' for eta, r in regions.items())} a step at h sigma = i/2."
    )
    parts = [deviation < 1e-12, *(r["area"] > 0 for r in regions.values()), results["regions"]["1"]["area"] == 0]
    rule = "eigenvalues as in the formula to 1e-12; the region has an area for eta < 1, and none for eta = 1"
    return Claim("stability", verdict(parts), numbers, rule, [path])


def stability_shrinks(results: dict[str, Any], path: str) -> Claim:
    areas = {eta: r["area"] for eta, r in sorted(results["regions"].items(), key=lambda pair: float(pair[0]))}
    numbers = ", ".join(f"eta {eta}: {short(x, 4)}" for eta, x in areas.items())
    parts = [b < a for a, b in itertools.pairwise(areas.values())]
    return Claim(
        "stability-shrinks", verdict(parts), f"{numbers}.", "every area is smaller than the one before", [path]
    )


def critical_boundary(results: dict[str, Any], path: str) -> Claim:
    region = results["regions"]["1"]
    growth = region["growth at i/2"]
    rule = "undamped: no area, and at h sigma = i/2 nothing grows or decays (to 1e-9)"
    numbers = f"Area {short(region['area'])}, growth per step at h sigma = i/2: {growth:.12f}."
    return Claim("boundary", verdict([region["area"] == 0, abs(growth - 1) < 1e-9]), numbers, rule, [path])


def _near(slopes: dict[str, float], z: float, v: float) -> list[bool]:
    return [abs(slopes["z"] - z) < 0.1, abs(slopes["v"] - v) < 0.1]


def local_orders(results: dict[str, Any], path: str) -> Claim:
    slopes = {k: results["orders"][k]["1"]["slopes"] for k in ("local", "global")}
    numbers = f"Local order of z {slopes['local']['z']:.2f}, of v {slopes['local']['v']:.2f}; global "
    numbers += f"{slopes['global']['z']:.2f} and {slopes['global']['v']:.2f}."
    rule = "fitted local orders within 0.1 of 3 (z) and 2 (v), in either direction"
    return Claim("order", verdict(_near(slopes["local"], 3, 2)), numbers, rule, [path])


def damped_orders(results: dict[str, Any], path: str) -> Claim:
    slopes = {eta: found["slopes"] for eta, found in results["orders"]["local"].items() if eta != "1"}
    numbers = "; ".join(f"eta {eta}: z {x['z']:.2f}, v {x['v']:.2f}" for eta, x in slopes.items())
    rule = "fitted local orders within 0.1 of 2 (z) and 1 (v), in either direction"
    parts = [ok for x in slopes.values() for ok in _near(x, 2, 1)]
    return Claim("order-damped", verdict(parts), f"{numbers}.", rule, [path])


def solving_back_misses_the_start(results: dict[str, Any], path: str) -> Claim:
    equal = {
        name: found["slopes"]["back"]
        for name, found in results["reverse"]["equal steps"].items()
        if "slopes" in found and name != "ALF inverse"
    }
    parts, missed = [], []
    for title, methods in results["reverse"]["tolerances"].items():
        back = [c.get("back") for c in methods["adjoint"].values()]
        missed += [not _is_number(x) or x > 1e-12 for x in back]
        told = [short(x) if _is_number(x) else "fails" for x in (back[0], back[-1])]
        parts.append(
            f"{title}: {told[0]} at {list(methods['adjoint'])[0]}, {told[1]} at {list(methods['adjoint'])[-1]}"
        )
    numbers = f"Relative miss of z(0) by a solve back with Dopri5: {'; '.join(parts)}. Orders of the miss at equal "
    numbers += f"steps: {', '.join(f'{name} {slope:.1f}' for name, slope in equal.items())}."
    rule = "a solve back in time misses z(0) by more than 1e-12 at every tolerance"
    return Claim("reverse-solve", verdict(missed), numbers, rule, [path])


RECONSTRUCTED = 1e-10  # relative, in float64


def trajectory_is_reconstructed(results: dict[str, Any], path: str) -> Claim:
    """Judge the inverse of the published method: a trajectory from its end alone."""
    parts, said = [], []
    for title, methods in results["reverse"]["tolerances"].items():
        for tolerance, cell in methods.get("MALI as published", {}).items():
            worst = cell.get("worst")
            parts.append(_is_number(worst) and worst <= RECONSTRUCTED)
            said.append(f"{title}, {tolerance}: {short(worst) if _is_number(worst) else 'no solve'}")
    cells = [c["worst"] for m in results["reverse"]["tolerances"].values() for c in m.get("MALI", {}).values()
             if _is_number(c.get("worst"))]  # fmt: skip
    numbers = (
        f"Worst state, as published: {'; '.join(said)}. Not judged, with refresh: {short(max(cells, default=None))}."
    )
    rule = f"every state is rebuilt to {RECONSTRUCTED:g} (relative, float64) from the end alone, at every tolerance"
    return Claim("reconstruct", verdict(parts), numbers, rule, [path])


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float))


THEOREMS = (
    solving_back_misses_the_start, trajectory_is_reconstructed, local_orders, stability_regions, critical_boundary,
    damped_orders, stability_shrinks,
)  # fmt: skip


def show_stability(found: list[Found]) -> Shown:
    record, path = found[0]
    return tables(record, path), pictures(record, path), [judge(record.results, path) for judge in THEOREMS]


def show_drawings(found: list[Found]) -> Shown:
    return [], explained(*found[0]), []
