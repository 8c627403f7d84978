"""Table 1, the paper's formulas beside what was counted."""

from __future__ import annotations

from typing import Any

from experiments.engine.record import Record
from experiments.report.claims import Claim
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


def evaluations_of_mali_and_aca(record: Record, path: str) -> Claim:
    results, wrong, saved = record.results, [], []
    for field in record.config["fields"]:
        for steps in ("fixed", "adaptive"):
            for method in METHODS:
                cell = results["cells"][f"{field} / {method} / {steps}"]
                wanted = expected(method, cell)
                if wanted and wanted != (cell["forward"], cell["backward"]):
                    wrong.append(f"{field} {method} {steps}")
                if method == "MALI":
                    saved.append((cell["forward"] + cell["backward"]) / (formula("MALI", cell) or 1))
    where = f"but for {', '.join(wrong)}" if wrong else "in all cells"
    numbers = f"Counts equal 1 + N_t m forward and 1 + N_t backward {where}; "
    numbers += f"that is {min(saved):.2f} to {max(saved):.2f} of the paper's N_t (m + 2)."
    return Claim(
        "Table 1, computation", "MALI takes N_t (m + 2) evaluations, ACA N_t (m + 1)",
        "holds" if not wrong else "holds in part", numbers + " One of MALI's is not needed.", [path],
    )  # fmt: skip


def memory_grows_for_naive_and_aca(record: Record, path: str) -> Claim:
    results, fields = record.results, record.config["fields"]
    slopes = {m: [results["fits"][f"{f} / {m}"]["slope"] / results["state_bytes"][f] for f in fields] for m in METHODS}
    flat = max(abs(x) for m in ("MALI", "adjoint") for x in slopes[m]) < 0.01
    steep = min(slopes["naive, h detached"]) >= 3 * max(slopes["ACA"])
    numbers = ", ".join(f"{m} {' / '.join(f'{abs(x):.2f}' for x in xs)}" for m, xs in slopes.items())
    return Claim(
        "Table 1, memory", "Memory grows with the number of steps for naive and ACA, not for MALI and the adjoint",
        "holds" if flat and min(slopes["ACA"]) > 0.9 else "does not hold here",
        f"States per step ({', '.join(fields)}): {numbers}. naive is {'' if steep else 'not '}3 x ACA or more.", [path],
    )  # fmt: skip


def show(found: list[Found]) -> Shown:
    claims = [evaluations_of_mali_and_aca(*found[0]), memory_grows_for_naive_and_aca(*found[0])]
    return tables(*found[0]), [], claims
