"""Figure 4 a, b, its appendix, and what the paper says about them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from experiments.engine.record import Record
from experiments.report.claims import HOLDS, IN_PART, NOT, NOT_TESTABLE, Check, Claim, Finding, check, made, verdict
from experiments.report.figures import Picture
from experiments.report.runs import Found, Shown
from experiments.report.style import COLORS, log_scale, plain_axes
from experiments.report.tables import Cell, Table, short
from experiments.theory.toy import PANELS, analytic

NAMES = ("dL/dz0", "dL/dalpha")


class Toy(NamedTuple):
    """The cells of a record, and where it is."""

    record: Record
    path: str

    @property
    def cells(self) -> dict[str, Any]:
        return self.record.results["cells"]

    @property
    def alphas(self) -> Sequence[float]:
        return self.record.config["alphas"]

    def spans(self, long: bool) -> Sequence[float]:
        return self.record.config["long" if long else "short"]

    def cell(self, solve: str, alpha: float, span: float) -> Any:
        return self.cells[f"{solve} / {alpha:g} {span:g}"]

    def errors(self, panel: str, label: str, alpha: float, span: float) -> tuple[float, float] | None:
        """Relative errors of dL/dz0 and dL/dalpha; None where the solve failed."""
        cell = self.cell(PANELS[panel][label], alpha, span)
        discrete = self.cell("discrete", alpha, span)
        truth = discrete if panel == "reverse accuracy" else analytic(alpha, span)
        if "failed" in cell or truth is None:
            return None
        a, b = (abs(g - x) / abs(x) for g, x in zip(cell["gradient"], truth, strict=True))
        return a, b


def pictures(toy: Toy) -> list[Picture]:
    found = []
    for id_, long, title in (("4ab", True, "Figure 4 a, b: T from 20 to 40"), ("A.T", False, "Appendix: T up to 1")):
        for panel, explained in (
            ("literal", "each method with its own solver, as in the paper; error against the gradient of the ODE"),
            ("equal order", "solvers of order 2 for all; error against the gradient of the ODE"),
            ("reverse accuracy", "one forward solve (adaptive ALF) for all; error against its exact derivative"),
        ):
            name = {"literal": "", "equal order": "-order", "reverse accuracy": "-reverse"}[panel]
            caption = (
                f"dz/dt = alpha z, L = z(T)^2, rtol 1e-5, atol 1e-6, float64: {explained}. Relative errors; a gap is "
            )
            caption += "a solve that failed or used up its attempts."
            draw = partial(_panel, toy, panel, long)
            found.append(Picture(f"{id_}{name}", f"{title}, {panel}", caption, draw, [toy.record.command]))
    return found


def _panel(toy: Toy, panel: str, long: bool) -> Figure:
    spans = toy.spans(long)
    n = len(toy.alphas)  # one below the other: a phone is narrow
    figure = Figure(figsize=(6.4, 2.1 * n + 0.6), layout="constrained")
    axes = figure.subplots(n, 2, squeeze=False, sharex=True)
    for row, alpha in enumerate(toy.alphas):
        for column, name in enumerate(NAMES):
            title = f"error of {name}" if row == 0 else ""
            ax = plain_axes(
                axes[row][column], title, "T" if row == n - 1 else "", f"alpha = {alpha:g}" if not column else ""
            )
            for label in PANELS[panel]:
                errors = [toy.errors(panel, label, alpha, span) for span in spans]
                points = [(s, max(e[column], 1e-17)) for s, e in zip(spans, errors, strict=True) if e]
                if points:
                    line = ax.plot(*zip(*points, strict=True), "o-", markersize=3.5, linewidth=1.3, label=label)[0]
                    line.set_color(COLORS[label])
                    # Exact lies on MALI where both are right: show both.
                    line.set_linestyle("--" if "torchdiffeq" in label else ":" if label == "MALI exact" else "-")
            log_scale(ax)
    handles, labels = {}, {}
    for ax in axes.flat:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
            labels[label] = label
    figure.legend(handles.values(), labels.values(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def tables(toy: Toy) -> list[Table]:
    found = []
    for panel in PANELS:
        rows = []
        for alpha in toy.alphas:
            for span in (toy.spans(True)[0], toy.spans(True)[-1], toy.spans(False)[-1]):
                for label, solve in PANELS[panel].items():
                    rows.append([f"{alpha:g}, {span:g}", label, *_entries(toy, panel, label, solve, alpha, span)])
        columns = (
            "alpha, T",
            "method",
            *(f"error of {name}" for name in NAMES),
            "steps",
            "evaluations",
            "what happened",
        )
        note = (
            "Relative errors against the exact derivative of the discrete solve."
            if panel.startswith("reverse")
            else ("Relative errors against the gradient of the ODE. Evaluations: forward + backward.")
        )
        id_ = {"literal": "toy", "equal order": "toy-order", "reverse accuracy": "toy-reverse"}[panel]
        found.append(Table(id_, f"Toy gradients, {panel}", columns, rows, note, [toy.record.command]))
    return found


def _entries(toy: Toy, panel: str, label: str, solve: str, alpha: float, span: float) -> list[Cell]:
    cell, errors = toy.cell(solve, alpha, span), toy.errors(panel, label, alpha, span)
    if errors is None:
        said = cell.get("failed", "the discrete solve failed").split(". ")[0]
        return [Cell("-")] * 4 + [Cell(said, toy.path)]
    happened = []
    if cell.get("refreshes"):
        happened.append(f"{cell['refreshes']} refreshes")
    if cell.get("reruns"):
        happened.append(f"rebuilt with error {short(cell['rebuilt'])}, {cell['reruns']} segment solved again")
    evaluations = " + ".join(map(short, cell["evaluations"]))
    texts = [short(errors[0]), short(errors[1]), short(cell.get("steps")), evaluations, ", ".join(happened)]
    return [Cell(text, toy.path) for text in texts]


def claims(toy: Toy) -> list[Finding]:
    return made(
        similar_and_smaller_errors(toy, "toy", True),
        similar_and_smaller_errors(toy, "toy-short", False),
        more_accurate_than_the_adjoint(toy),
        reverse_accuracy(toy),
        adjoint_is_inaccurate(toy),
        alf_performs_well(toy),
        graph_through_the_search(toy),
        no_worse_than_an_adjoint_of_its_order(toy),
        the_published_inverse_amplifies_round_off(toy),
    )


def _compare(toy: Toy, panel: str, a: str, b: str, long: bool, factor: float = 1.0) -> dict[float, tuple[int, int]]:
    """Count, for each alpha, the cells (both gradients) where the error of a is at most that of b.

    A failed solve of a counts as larger; where b failed, there is nothing to compare with.
    """
    counts = {}
    for alpha in toy.alphas:
        pairs = [(toy.errors(panel, a, alpha, s), toy.errors(panel, b, alpha, s)) for s in toy.spans(long)]
        values = [(x, y) for p, q in pairs if q for x, y in zip(p or (math.inf, math.inf), q, strict=True)]
        counts[alpha] = sum(x <= factor * y for x, y in values), len(values)
    return counts


def _told(counts: dict[float, tuple[int, int]]) -> str:
    return ", ".join(f"alpha {alpha:g}: {n} of {of}" for alpha, (n, of) in counts.items())


def _judged(counts: dict[float, tuple[int, int]]) -> str:
    good, of = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
    return NOT_TESTABLE if not of else HOLDS if good == of else NOT if good == 0 else IN_PART


LIKE = 1.5  # errors within this factor of each other are similar
PUBLISHED, OTHERS = ("MALI as published", "ACA"), ("torchdiffeq adjoint", "torchdiffeq naive")


def similar_and_smaller_errors(toy: Toy, id_: str, long: bool) -> Claim:
    ours, aca = (_compare(toy, "literal", a, b, long, LIKE) for a, b in (PUBLISHED, PUBLISHED[::-1]))
    alike = {alpha: (min(ours[alpha][0], aca[alpha][0]), ours[alpha][1]) for alpha in toy.alphas}
    smaller = {(a, b): _compare(toy, "literal", a, b, long) for a in PUBLISHED for b in OTHERS}
    parts = [f"similar: {_told(alike)}", *(f"{a} <= {b}: {_told(counts)}" for (a, b), counts in smaller.items())]
    refreshed = _compare(toy, "literal", "MALI", "torchdiffeq adjoint", long)
    parts.append(f"not judged, with refresh and checkpoints, MALI <= torchdiffeq adjoint: {_told(refreshed)}")
    rule = (
        f"MALI as published and ACA within a factor of {LIKE} of each other, each at most the error of torchdiffeq's "
    )
    rule += "adjoint and naive methods, for every alpha, T and both gradients; each with its own solver"
    found = verdict([_judged(alike), *map(_judged, smaller.values())])
    return Claim(id_, found, f"{'; '.join(parts)}.", rule, [toy.path])


def more_accurate_than_the_adjoint(toy: Toy) -> Claim:
    found = {long: _compare(toy, "reverse accuracy", "MALI", "adjoint", long) for long in (True, False)}
    numbers = f"T from 20: {_told(found[True])}; T up to 1: {_told(found[False])}."
    rule = "error of the gradient at most the adjoint's, against the exact derivative of one discrete solve by ALF"
    return Claim("more-accurate", verdict([_judged(x) for x in found.values()]), numbers, rule, [toy.path])


def no_worse_than_an_adjoint_of_its_order(toy: Toy) -> Check:
    counts = _compare(toy, "equal order", "MALI", "adjoint", True, 1.05)
    growing = [pair for alpha, pair in counts.items() if alpha > 0]
    same = _compare(toy, "equal order", "MALI", "ACA", True, 1.05)
    brief = _compare(toy, "equal order", "MALI", "adjoint", False, 1.05)
    numbers = f"MALI <= 1.05 x adjoint with Heun-Euler, T from 20: {_told(counts)}; T up to 1: {_told(brief)}. "
    numbers += f"MALI <= 1.05 x ACA, T from 20: {_told(same)}."
    text = "With solvers of one order MALI is no worse than the adjoint (T > 20, alpha > 0)"
    return check("Figure 4 a, b, equal order", text, [n == of for n, of in growing], numbers, [toy.path])


def _worst(toy: Toy, label: str) -> dict[float, float]:
    """Largest error by alpha against the exact derivative of the discrete solve, over all T."""
    found = {}
    for alpha in toy.alphas:
        every = [e for s in _all(toy) if (e := toy.errors("reverse accuracy", label, alpha, s))]
        found[alpha] = max((max(e) for e in every), default=math.nan)
    return found


def _errors_told(toy: Toy, *labels: str) -> str:
    worst = {label: _worst(toy, label) for label in labels}
    said = [f"{m} {', '.join(f'alpha {a:g}: {short(x)}' for a, x in by.items())}" for m, by in worst.items()]
    return f"Largest relative error over all T, against the exact derivative of the discrete solve: {'; '.join(said)}."


ACCURATE = 1e-8  # relative; the same number in other digits is of the order of 1e-16


def reverse_accuracy(toy: Toy) -> Claim:
    worst = _worst(toy, "MALI")
    rule = f"relative error of MALI's gradient at most {ACCURATE:g} for every alpha and T, of ACA's and naive's, too"
    parts = [x <= ACCURATE for label in ("MALI", "ACA", "naive") for x in _worst(toy, label).values()]
    numbers = _errors_told(toy, "MALI", "ACA", "naive")
    found = verdict(parts) if any(x <= ACCURATE for x in worst.values()) else NOT
    return Claim("reverse-mali", found, numbers, rule, [toy.path])


def adjoint_is_inaccurate(toy: Toy) -> Claim:
    worst, mali = _worst(toy, "adjoint"), _worst(toy, "MALI")
    rule = "the adjoint's largest error above 1e-6 and above 1,000 x MALI's, for every alpha"
    parts = [x > 1e-6 and x > 1e3 * mali[alpha] for alpha, x in worst.items()]
    return Claim("reverse-adjoint", verdict(parts), _errors_told(toy, "adjoint", "MALI"), rule, [toy.path])


def _all(toy: Toy) -> list[float]:
    return [*toy.spans(True), *toy.spans(False)]


def alf_performs_well(toy: Toy) -> Claim:
    failed, parts = [], []
    for alpha in toy.alphas:
        spans = [s for s in toy.spans(True) if "failed" in toy.cell("MALI as published", alpha, s)]
        parts.append(not spans)
        if spans:
            where = toy.cell("MALI as published", alpha, spans[0])["failed"].split(" (")[0].split(": ", 1)[1]
            failed.append(f"alpha {alpha:g}, T {', '.join(f'{s:g}' for s in spans)} ({where})")
    mended = [a for a in toy.alphas if all("failed" not in toy.cell("MALI", a, s) for s in toy.spans(True))]
    numbers = f"ALF without refresh used up its attempts for {'; '.join(failed) or 'none'}. "
    numbers += f"With refresh it finishes for alpha {', '.join(f'{a:g}' for a in mended) or 'none'}."
    rule = "the adaptive solve of the toy problem ends within its attempts for every alpha and T"
    return Claim("bounded", verdict(parts), numbers, rule, [toy.path])


def graph_through_the_search(toy: Toy) -> Claim:
    parts, vanishes = [], []
    for alpha in toy.alphas:
        cell = toy.cell("search", alpha, toy.spans(False)[-1])
        plain, through = cell["detached"], cell["through the search"]
        ratios = [abs(a / b) for a, b in zip(through["gradient"], plain["gradient"], strict=True)]
        vanishes.append(any(not 0.5 < ratio < 2 for ratio in ratios))
        change = max(abs(ratio - 1) for ratio in ratios)
        said = f"alpha {alpha:g}: m = {through['trials per step']:.2f}, depth {through['depth']:,} against "
        parts.append(f"{said}{plain['depth']:,}, gradient changed by {short(change)}")
    rule = "a gradient through the search for h is twice that of the accepted steps, or half of it"
    return Claim("deep-graph", verdict(vanishes), f"{'; '.join(parts)}.", rule, [toy.path])


def the_published_inverse_amplifies_round_off(toy: Toy) -> Check:
    """Where the solution grows, the inverse of the published method amplifies round-off by as much."""
    parts, kept = [], []
    for alpha in toy.alphas:
        for span in toy.spans(True):
            published, ours = (toy.errors("literal", m, alpha, span) for m in ("MALI as published", "MALI"))
            if published and ours and max(published) > 100 * max(ours):
                said = f"alpha {alpha:g}, T = {span:g}: as published {short(published[1])}, ours {short(ours[1])}"
                parts.append(said)
            kept.append(ours is not None and max(ours) < 0.01)
    text = "Relative errors of dL/dalpha stay below 0.01 for every alpha and T: what drifted is solved again"
    numbers = f"As published the inverse amplifies round-off where f grows: {'; '.join(parts) or 'nowhere here'}."
    large = [s for s in toy.spans(True) for a in toy.alphas if a * s < -8]
    numbers += " Not judged: alpha T < -8, where z(T) is below atol." if large else ""
    judged = [ok for ok, (a, s) in zip(kept, _cells(toy), strict=True) if a * s >= -8]
    return check("not in the paper; Figure 4 b", text, judged, numbers, [toy.path])


def _cells(toy: Toy) -> list[tuple[float, float]]:
    return [(alpha, span) for alpha in toy.alphas for span in toy.spans(True)]


def show(found: list[Found]) -> Shown:
    toy = Toy(*found[0])
    return tables(toy), pictures(toy), claims(toy)
