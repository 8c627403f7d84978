"""Table 1, the paper's formulas beside what was counted."""

from __future__ import annotations

from typing import Any

from experiments.engine.record import Record
from experiments.report.claims import Check, Claim, check, verdict
from experiments.report.runs import Found, Shown
from experiments.report.tables import Cell, Table, short
from experiments.theory.accounting import METHODS

# method: (computation, memory, depth, reverse accuracy) of the paper; one evaluation costs N_z N_f
PAPER = {
    "naive": ("2 N_t m", "N_z N_f N_t m", "N_f N_t m", "yes"),
    "adjoint": ("(N_t + N_r) m", "N_z N_f", "N_f N_r", "no"),
    "ACA": ("N_t (m + 1)", "N_z (N_f + N_t)", "N_f N_t", "yes"),
    "MALI": ("N_t (m + 2)", "N_z (N_f + 1)", "N_f N_t", "yes"),
}


def formula(method: str, cell: dict[str, Any]) -> float | None:
    """The paper's number of evaluations, with the measured N_t, m and N_r. A VJP of naive counts as one."""
    n, trials = cell["steps"], cell["steps"] + cell["rejected"]
    if method == "adjoint":
        return trials + cell["back"]["steps"] if cell.get("back") else None
    return {"naive": 2.0 * trials, "ACA": trials + n, "MALI": trials + 2.0 * n}.get(method.split()[0].rstrip(","))


def expected(method: str, cell: dict[str, Any]) -> tuple[int, int] | None:
    """Evaluations of our methods: v0, then one per trial; backward one per step, and v0."""
    forward = 1 + cell["steps"] + cell["rejected"]
    if method == "adjoint":
        return None
    return forward, 0 if method.startswith("naive") else 1 + cell["steps"]


def tables(record: Record, path: str) -> list[Table]:
    results, rows = record.results, []
    for field in record.config["fields"]:
        state, f_depth = results["state_bytes"][field], results["cells"][f"{field} / depth of f"]
        for steps in ("fixed", "adaptive"):
            for method in METHODS:
                cell = results["cells"][f"{field} / {method} / {steps}"]
                trials = (cell["steps"] + cell["rejected"]) / cell["steps"]
                paper = PAPER.get(method, ("", "", "", ""))
                depth = f"{cell['depth']:,}" if cell["depth"] is not None else f"{f_depth} at a time"
                slope = results["fits"][f"{field} / {method}"]["slope"] / state
                texts = [
                    f"{cell['steps']} ({trials:.2f})",
                    f"{cell['forward']} + {cell['backward']}",
                    f"{abs(slope):.2f}",
                    depth,
                    short(cell["error"]),
                ]
                counted = formula(method, cell)
                said = f"{paper[0]} = {short(counted)}" if paper[0] and counted is not None else paper[0]
                rows.append([f"{field}, {steps}", method, said, *(Cell(text, path) for text in texts), paper[3]])
    columns = (
        "field, steps", "method", "paper: computation", "N_t (m)", "evaluations, forward + backward",
        "states of memory per step", "depth of the graph", "gradient against the discrete one",
        "paper: reverse accurate",
    )  # fmt: skip
    note = (
        "ALF for all. The paper's naive counts a backward pass as N_t m more. Its MALI evaluates f twice per step on "
        "the way back (m + 2); both are at the same point, so ours takes m + 1. Memory of ACA: (z, v) are two states."
    )
    return [Table("1", "Table 1: cost and accuracy of the methods, counted", columns, rows, note, [record.command])]


NEAR = 2  # evaluations that a formula may miss: the first slope, and the choice of the first step


def total(method: str, cell: dict[str, Any]) -> float:
    """Evaluations of both passes; the backward pass of naive goes through the graph, and counts as its forward one."""
    return cell["forward"] + (cell["forward"] if method == "naive" else cell["backward"])


def computation(record: Record, path: str, id_: str, method: str) -> Claim:
    """Compare the evaluations of a method with the paper's formula, with the measured N_t, m and N_r."""
    parts, said = [], []
    for field in record.config["fields"]:
        for steps in ("fixed", "adaptive"):
            cell = record.results["cells"][f"{field} / {method} / {steps}"]
            wanted, counted = formula(method, cell), total(method, cell)
            if wanted is not None:
                parts.append(abs(counted - wanted) <= NEAR)
                said.append(f"{field}, {steps}: {counted:g}, by the formula {wanted:g}")
    numbers = f"Evaluations of {method}: {'; '.join(said)}."
    if method == "MALI":
        numbers += " One of its two evaluations of a step on the way back is not needed: ours takes N_t (m + 1)."
    rule = f"evaluations within {NEAR} of the formula, in either direction"
    return Claim(id_, verdict(parts), numbers, rule, [path])


def _slopes(record: Record) -> dict[str, list[float]]:
    """States of memory for each step, by method."""
    results, fields = record.results, record.config["fields"]
    return {m: [results["fits"][f"{f} / {m}"]["slope"] / results["state_bytes"][f] for f in fields] for m in METHODS}


def memory_grows_for_naive_and_aca(record: Record, path: str) -> Claim:
    slopes = _slopes(record)
    numbers = ", ".join(f"{m} {' / '.join(f'{abs(x):.2f}' for x in xs)}" for m, xs in slopes.items())
    parts = [aca > 0.9 and naive > aca for aca, naive in zip(slopes["ACA"], slopes["naive"], strict=True)]
    rule = "peak memory grows by a state or more for each step with ACA, and by more with naive"
    fields = ", ".join(record.config["fields"])
    return Claim("memory-naive-aca", verdict(parts), f"States per step ({fields}): {numbers}.", rule, [path])


def memory_is_constant(record: Record, path: str) -> Claim:
    slopes = _slopes(record)
    parts = [abs(x) < 0.01 for m in ("MALI", "adjoint") for x in slopes[m]]
    numbers = ", ".join(f"{m} {' / '.join(f'{abs(x):.2f}' for x in slopes[m])}" for m in ("MALI", "adjoint"))
    rule = "peak memory of MALI and of the adjoint grows by less than 0.01 states for each step"
    return Claim("memory-constant", verdict(parts), f"States per step: {numbers}.", rule, [path])


def memory_beside_the_adjoint(record: Record, path: str) -> Claim:
    parts, said = [], []
    for field in record.config["fields"]:
        state = record.results["state_bytes"][field]
        extra = [record.results["fits"][f"{field} / {m}"]["base"] / state for m in ("MALI", "adjoint")]
        parts.append(extra[0] - extra[1] <= 1)
        said.append(f"{field}: MALI {extra[0]:.1f}, adjoint {extra[1]:.1f}")
    rule = "MALI's peak memory is at most one state above the adjoint's, with the same solver"
    return Claim("memory-v", verdict(parts), f"States of memory: {'; '.join(said)}.", rule, [path])


def _depths(record: Record) -> list[tuple[str, int, int, int]]:
    """Depth of the graphs of naive, of the accepted steps alone, and of f, for adaptive steps with trials."""
    cells = record.results["cells"]
    return [
        (
            f,
            *(cells[f"{f} / {m} / adaptive"]["depth"] for m in ("naive", "naive, h detached")),
            cells[f"{f} / depth of f"],
        )
        for f in record.config["fields"]
    ]


def search_deepens_the_graph(record: Record, path: str) -> Claim:
    depths = _depths(record)
    said = "; ".join(f"{field}: {through} nodes, {plain} without the search" for field, through, plain, _ in depths)
    rule = "the graph is deeper by a tenth or more with the search for h in it"
    return Claim("depth-naive", verdict([a > 1.1 * b for _, a, b, _ in depths]), f"{said}.", rule, [path])


def malis_graph_is_shallow(record: Record, path: str) -> Claim:
    depths = _depths(record)
    said = "; ".join(f"{field}: naive {naive} nodes, a step of MALI {own}" for field, naive, _, own in depths)
    rule = "the graph that exists at a time has less than half the depth of naive's"
    return Claim("depth-mali", verdict([2 * own < naive for _, naive, _, own in depths]), f"{said}.", rule, [path])


def counts_are_ours(record: Record, path: str) -> Check:
    wrong, n = [], 0
    for field in record.config["fields"]:
        for steps in ("fixed", "adaptive"):
            for method in METHODS:
                cell = record.results["cells"][f"{field} / {method} / {steps}"]
                wanted = expected(method, cell)
                n += wanted is not None
                if wanted and wanted != (cell["forward"], cell["backward"]):
                    wrong.append(f"{field} {method} {steps}")
    numbers = f"{n - len(wrong)} of {n} cells{': not ' + ', '.join(wrong) if wrong else ''}."
    text = "Evaluations are exactly 1 + N_t m forward, and backward 1 + N_t with MALI and ACA, none with naive"
    return check("our formulas for Table 1", text, [not wrong], numbers, [path])


COMPUTATION = {"cost-naive": "naive", "cost-adjoint": "adjoint", "cost-aca": "ACA", "cost-mali": "MALI"}


def show(found: list[Found]) -> Shown:
    one = found[0]
    claims = [
        *(computation(*one, id_, method) for id_, method in COMPUTATION.items()),
        memory_grows_for_naive_and_aca(*one),
        memory_is_constant(*one),
        memory_beside_the_adjoint(*one),
        search_deepens_the_graph(*one),
        malis_graph_is_shallow(*one),
        counts_are_ours(*one),
    ]
    return tables(*one), [], claims
