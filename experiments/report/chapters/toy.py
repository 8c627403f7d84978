"""Figure 4 a, b, its appendix, and what the paper says about them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from experiments.engine.record import Record
from experiments.report.claims import Claim
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


def claims(toy: Toy) -> list[Claim]:
    return [
        smaller_errors_than_adjoint_and_naive(toy),
        no_worse_than_an_adjoint_of_its_order(toy),
        reverse_accuracy(toy),
        smaller_errors_for_short_times(toy),
        every_alpha_is_solved(toy),
        graph_through_the_search(toy),
    ]


def _compare(toy: Toy, panel: str, a: str, b: str, long: bool, factor: float = 1.0) -> dict[float, tuple[int, int]]:
    """Count, for each alpha, the cells (both gradients) where the error of a is at most that of b."""
    counts = {}
    for alpha in toy.alphas:
        pairs = [(toy.errors(panel, a, alpha, s), toy.errors(panel, b, alpha, s)) for s in toy.spans(long)]
        values = [(x, y) for p, q in pairs if p and q for x, y in zip(p, q, strict=True)]
        counts[alpha] = sum(x <= factor * y for x, y in values), len(values)
    return counts


def _told(counts: dict[float, tuple[int, int]]) -> str:
    return ", ".join(f"alpha {alpha:g}: {n} of {of}" for alpha, (n, of) in counts.items())


def _verdict(counts: Sequence[tuple[int, int]]) -> str:
    good, of = sum(n for n, _ in counts), sum(of for _, of in counts)
    return "holds" if good == of else "does not hold here" if good == 0 else "holds in part"


def smaller_errors_than_adjoint_and_naive(toy: Toy) -> Claim:
    found = {(a, b): _compare(toy, "literal", a, b, True) for a in ("MALI", "ACA") for b in ("adjoint", "naive")}
    numbers = ". ".join(f"{a} <= {b} (own solvers, T from 20): {_told(counts)}" for (a, b), counts in found.items())
    verdict = _verdict([pair for counts in found.values() for pair in counts.values()])
    text = "MALI and ACA have smaller gradient errors than the adjoint and naive methods (T > 20)"
    return Claim("Section 4.1, Figure 4 a, b", text, verdict, numbers + ".", [toy.path])


def no_worse_than_an_adjoint_of_its_order(toy: Toy) -> Claim:
    counts = _compare(toy, "equal order", "MALI", "adjoint", True, 1.05)
    positive = [pair for alpha, pair in counts.items() if alpha > 0]
    same = _compare(toy, "equal order", "MALI", "ACA", True, 1.05)
    brief = _compare(toy, "equal order", "MALI", "adjoint", False, 1.05)
    numbers = f"MALI <= 1.05 x adjoint with Heun-Euler, T from 20: {_told(counts)}; T up to 1: {_told(brief)}. "
    numbers += f"MALI <= 1.05 x ACA, T from 20: {_told(same)}."
    text = "The same with solvers of one order: MALI is no worse than the adjoint (judged for T > 20, alpha > 0)"
    return Claim("Figure 4 a, b, equal order", text, _verdict(positive), numbers, [toy.path])


def reverse_accuracy(toy: Toy) -> Claim:
    def worst(label: str) -> float:
        every = [toy.errors("reverse accuracy", label, a, s) for a in toy.alphas for s in _all(toy) if a * s > -10]
        return max(max(e) for e in every if e)

    mali, adjoint = worst("MALI"), worst("adjoint")
    numbers = "Largest relative error against the exact derivative of the discrete solve, |alpha| T < 10 or growing: "
    numbers += f"MALI {short(mali)}, ACA {short(worst('ACA'))}, naive (h detached) {short(worst('naive'))}, "
    numbers += f"adjoint {short(adjoint)}."
    verdict = "holds" if mali < 1e-10 and adjoint > 1e3 * mali else "does not hold here"
    text = "MALI is reverse accurate: its gradient is that of the discrete forward pass; the adjoint's is not"
    return Claim("Sections 2.3, 3.2", text, verdict, numbers, [toy.path])


def _all(toy: Toy) -> list[float]:
    return [*toy.spans(True), *toy.spans(False)]


def smaller_errors_for_short_times(toy: Toy) -> Claim:
    counts = {b: _compare(toy, "literal", "MALI", b, False) for b in ("adjoint", "naive")}
    numbers = ". ".join(f"MALI <= {b} (own solvers, T up to 1): {_told(c)}" for b, c in counts.items())
    verdict = _verdict([pair for c in counts.values() for pair in c.values()])
    text = "Also for T < 1 MALI and ACA have smaller errors"
    return Claim("Appendix, figure for t < 1", text, verdict, numbers + ".", [toy.path])


def every_alpha_is_solved(toy: Toy) -> Claim:
    failed = []
    for alpha in toy.alphas:
        spans = [s for s in toy.spans(True) if "failed" in toy.cell("MALI as published", alpha, s)]
        if spans:
            where = toy.cell("MALI as published", alpha, spans[0])["failed"].split(" (")[0].split(": ", 1)[1]
            failed.append(f"alpha {alpha:g}, T {', '.join(f'{s:g}' for s in spans)} ({where})")
    mended = [a for a in toy.alphas if all("failed" not in toy.cell("MALI", a, s) for s in toy.spans(True))]
    numbers = f"MALI as published used up its attempts for {'; '.join(failed) or 'none'}. "
    numbers += f"With refresh it finishes for alpha {', '.join(f'{a:g}' for a in mended)}."
    verdict = "holds" if not failed else "holds in part"
    return Claim("Section 3.1", "ALF solves the toy problem adaptively for every alpha", verdict, numbers, [toy.path])


def graph_through_the_search(toy: Toy) -> Claim:
    parts, deeper, off = [], [], []
    for alpha in toy.alphas:
        span = toy.spans(False)[-1]
        cell = toy.cell("search", alpha, span)
        plain, through = cell["detached"], cell["through the search"]
        change = max(abs(a - b) / abs(b) for a, b in zip(through["gradient"], plain["gradient"], strict=True))
        deeper.append(through["depth"] / plain["depth"])
        off.append(change)
        parts.append(
            f"alpha {alpha:g}: m = {through['trials per step']:.2f}, depth {through['depth']:,} against "
            f"{plain['depth']:,}, gradient changed by {short(change)}"
        )
    verdict = (
        "holds in part"
        if min(deeper) > 1.2 and max(off) < 0.5
        else "holds"
        if min(deeper) > 1.2
        else "does not hold here"
    )
    text = "Backpropagation through the search for h makes a deeper graph, with exploding or vanishing gradients"
    numbers = (
        "; ".join(parts) + ". The graph is deeper; the gradient is perturbed, but neither explodes nor vanishes here."
    )
    return Claim("Section 2.2, naive method", text, verdict, numbers, [toy.path])


def show(found: list[Found]) -> Shown:
    toy = Toy(*found[0])
    return tables(toy), pictures(toy), claims(toy)
