"""Memory of one training step of the published flow, by method and tolerance."""

from __future__ import annotations

from experiments.engine.record import Record
from experiments.report.chapters.flows import NAMES
from experiments.report.claims import Claim, verdict
from experiments.report.runs import Found, Shown
from experiments.report.tables import Cell, Table


def memory_table(record: Record, path: str) -> Table:
    results, config = record.results, record.config
    rows, tolerances = [], config["tolerances"]
    for method in config["methods"]:
        cells: list[Cell | str] = []
        for tolerance in tolerances:
            fit = results["fits"][f"{method} / {tolerance:g}"]
            steps = results["cells"][f"{method} / {tolerance:g} / {config['batches'][0]}"]["steps"]
            text = f"{fit['bytes_per_image'] / 1e6:.0f} MB, {steps} steps: {fit['largest_batch']} images"
            cells.append(Cell(text, path))
        rows.append([NAMES[method], *cells])
    notes = "Peak bytes of live tensors for each image, steps of all flows, and the largest batch that 8 GB hold; the "
    notes += "flow of CIFAR-10 at the published size, with random weights."
    return Table(
        "6-memory", "Memory of the published flow", ("method", *(f"tolerance {x:g}" for x in tolerances)), rows, notes,
        [record.command],
    )  # fmt: skip


def memory_does_not_depend_on_the_tolerance(record: Record, path: str) -> Claim:
    results, config, tolerances = record.results, record.config, record.config["tolerances"]
    by = {m: [results["fits"][f"{m} / {x:g}"]["bytes_per_image"] for x in tolerances] for m in config["methods"]}
    ratios = {m: max(values) / min(values) for m, values in by.items()}
    largest = {m: [results["fits"][f"{m} / {x:g}"]["largest_batch"] for x in tolerances] for m in by}
    said = ", ".join(f"{NAMES[m]} {x:.2f}" for m, x in ratios.items())
    said += "; images on 8 GB: " + "; ".join(f"{NAMES[m]} {', '.join(map(str, n))}" for m, n in largest.items())
    grow = [ratios[m] > 1.5 for m in by if m != "mali"]
    rule = "bytes of an image change by at most 5 % over tolerances with MALI, and by more than half with ACA and naive"
    numbers = f"Largest over smallest bytes of an image: {said} (by tolerance)."
    return Claim("flow-memory", verdict([ratios["mali"] <= 1.05, *grow]), numbers, rule, [path])


def show(found: list[Found]) -> Shown:
    return [memory_table(*found[0])], [], [memory_does_not_depend_on_the_tolerance(*found[0])]
