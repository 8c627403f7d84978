"""Numbers in README.md and docs/ are those of the committed records."""

from __future__ import annotations

import json
import re

from committed import ROOT, cells, records, table_titled

from benchmarks import compiled_adaptive, evaluations, report, systems
from benchmarks.suite import limits
from experiments.report.chapters import flows, images, series

README = ROOT / "README.md"


def test_the_readmes_benchmark_is_the_record():
    record = json.loads((ROOT / "benchmarks" / "records" / "gradients.json").read_text())["results"]
    rows = {
        "MALI": r"\*\*MALI\*\*",
        "MALI as published": "MALI as published .*?",
        "ACA": "ACA",
        "naive": "naive .*?",
        "TDEPack MALI": "MALI of the paper's code .*?",
        "lb_eager": "lower limit.*?",
    }
    for method, label in rows.items():
        cells = []
        for workload in ("W1", "W2"):
            ratio = record[workload]["time_ratios"].get(f"{method} / lb_eager", {"median": 1})["median"]
            cells += ["1" if ratio == 1 else f"{ratio:.2f}", f"{record[workload]['peak_bytes'][method] / 1e6:.2f}"]
        assert re.search(rf"^\| {label} \| {re.escape(' | '.join(cells))} \|$", README.read_text(), re.M), method


def test_the_page_of_outputs_has_the_numbers_of_an_epoch_of_the_latent_ode():
    page = (ROOT / "docs" / "outputs.md").read_text()
    record = json.loads((ROOT / "benchmarks" / "records" / "latent.json").read_text())
    found = record["results"]
    assert (
        record["header"]["command"] in page
        and found["batches"] == 16
        and len(next(iter(found["epochs"].values()))) == 8
    )
    for name, epochs in found["epochs"].items():
        ratio = found["time_ratios"][name]["median"]
        row = f"{epochs[-1]['forward']:,} | {epochs[-1]['backward']:,} | {ratio:.2f}"
        assert re.search(rf"^\| \**{re.escape(name)}\**( \(.*\))? \| {re.escape(row)} \|$", page, re.M), name
    free, published, naive = (
        found["epochs"][name][-1] for name in ("MALI, free steps", "MALI, one step per output", "naive, Dopri5")
    )
    counts = [f"{epoch['forward']:,} + {epoch['backward']:,}" for epoch in (free, published)]
    assert f"{counts[0]} evaluations instead of {counts[1]}" in README.read_text()
    assert published["forward"] > 5 * free["forward"] and free["forward"] < 1.5 * naive["forward"]


def test_the_decision_on_exact_mode_quotes_its_records():
    text = (ROOT / "docs" / "choosing-a-gradient.md").read_text()
    *_, last = (ROOT / "tests" / "fuzz" / "records" / "float32.jsonl").read_text().splitlines()
    study = json.loads(last)["summary"]
    vain, silent = (study[f"share of {what}"] for what in ("false alarms", "reruns without"))
    assert (
        f"Of {study['problems']:,} random float32 problems (networks, physics, clocks, chaos) {study['misses']}" in text
    )
    assert f"{vain:.1%} are warned".replace("%", " %") in text and f"{silent:.1%} are".replace("%", " %") in text
    times = json.loads((ROOT / "benchmarks" / "records" / "exact.json").read_text())["results"]
    for workload in ("W1", "W2"):
        assert f"{times[workload]['time_ratio']['median']:.2f} times" in text


def test_the_table_of_memory_budgets_is_the_record():
    page = (ROOT / "docs" / "choosing-a-gradient.md").read_text()
    found = json.loads((ROOT / "benchmarks" / "records" / "budget.json").read_text())["results"]
    for name in found["W1"]["budgets"]:
        row = [name]
        for workload in ("W1", "W2"):
            one = found[workload]
            time, peak = one["time_ratios"][name]["median"], one["peak_bytes"][name] / 1e6
            row += [str(one["n_graphs"][name]), f"{time:.2f}", f"{peak:.2f}"]
        assert f"| {' | '.join(row)} |" in page
    power = found["growth"]["MALI()"]["exponents"]
    assert f"to the power {power['evaluations']:.2f} and {power['time']:.2f}" in page


def test_the_page_of_compiled_solves_has_the_numbers_of_its_record():
    page = (ROOT / "docs" / "compile.md").read_text()
    found = json.loads((ROOT / "benchmarks" / "records" / "compiled.json").read_text())["results"]
    for workload, one in found.items():
        ratio, seconds = one["time_ratios"]["compiled"], one["compile_seconds"]["cpu"]
        median, quartiles = f"{ratio['median']:.3f}", f"({ratio['lower']:.3f} - {ratio['upper']:.3f})"
        eager, costs = f"{one['time_ratios']['eager']['median']:.3f}", f"{seconds['cold']:.0f} / {seconds['warm']:.0f}"
        products = f"{one['time_ratios']['products']['median']:.3f}"
        row = (
            rf"^\| {workload}: .* \| {re.escape(f'{median} {quartiles}')} \| .* \| {products} \| {eager} \| {costs} \|$"
        )
        assert re.search(row, page, re.M), workload


def test_the_page_of_compiled_solves_has_the_numbers_of_adaptive_steps():
    page = (ROOT / "docs" / "compile.md").read_text()
    found = json.loads((ROOT / "benchmarks" / "records" / "compiled_adaptive.json").read_text())["results"]
    for workload, one in found.items():
        ratio, seconds, peaks = one["time_ratios"]["MALI compiled"], one["compile_seconds"]["cpu"], one["peak_bytes"]
        cells = [
            f"{ratio['median']:.3f} ({ratio['lower']:.3f} - {ratio['upper']:.3f})",
            f"{compiled_adaptive.LIMITS[workload]:.2f}",
            f"{one['time_ratios']['MALI']['median']:.3f}",
            f"{peaks['MALI compiled'] / 1e6:.2f}, {peaks['torchdiffeq naive'] / 1e6:.2f}",
            f"{seconds['cold']:.0f} / {seconds['warm']:.0f}",
        ]
        assert re.search(rf"^\| {workload}: .* {re.escape(' | '.join(cells))} \|$", page, re.M), workload
        assert (
            ratio["median"] <= compiled_adaptive.LIMITS[workload]
            and one["difference"] <= 1e-12
            and one["n_compiled_again"] == 0
        )


def test_the_record_of_the_fuzzer_has_no_failure():
    record = json.loads((ROOT / "tests" / "fuzz" / "records" / "fuzz.json").read_text())
    assert record["cases"] >= 10_000 and record["failures"] == []


def in_readme(method: str, found: list[str], remark: str = "") -> bool:
    """Tell whether README.md has a table row of this method, with or without a remark, that holds these cells."""
    line = rf"^\| \**{re.escape(method)}\**{remark} \| {re.escape(' | '.join(found))} \|$"
    return re.search(line, README.read_text(), re.M) is not None


IN_PARENTHESES = r" \(.*?\)"


def test_the_readme_has_the_numbers_of_cifar_10():
    table = table_titled(images.show(records("cifar10"))[0], "Figure 5 in numbers: CIFAR-10")
    for method in ("MALI", "ACA", "naive", "adjoint"):
        found = cells(table, method, "test accuracy, %", "s per epoch", "peak MB")
        assert in_readme(method, found, IN_PARENTHESES), (method, found)


def test_the_readme_has_the_numbers_of_flows():
    tables = [
        table_titled(flows.show(records("flows", preset))[0], f"Flows of {title}")
        for preset, title in flows.SMALL.items()
    ]
    for method in ("MALI", "RNODE", "FFJORD (vanilla)"):
        found = [x for table in tables for x in cells(table, method, "bits per dimension, noisy", "s per iteration")]
        assert in_readme(method, found, IN_PARENTHESES), (method, found)


def test_the_readme_has_the_numbers_of_series():
    latent = table_titled(series.latent(records("latent"))[0], "Table 4")
    paths = table_titled(series.paths(records("paths"))[0], "Table 5: Neural CDE, Speech Commands")
    for method in ("MALI", "ACA", "naive", "adjoint"):
        error, seconds = cells(latent, method, "10% observed", "s per epoch")
        found = [error.split(" (")[0], seconds, *cells(paths, method, "accuracy, %", "s per epoch", "peak MB")]
        assert in_readme(method, found), (method, found)  # without the paper's numbers


def test_the_page_of_work_and_precision_has_the_evaluations_of_adaptive_steps():
    page = (ROOT / "docs" / "work-precision.md").read_text()
    record = json.loads((ROOT / "benchmarks" / "records" / "evaluations.json").read_text())
    results = record["results"]
    for rows in (evaluations.ratio_table(results), evaluations.list_table(results)):
        assert evaluations.markdown(rows) in page
    assert record["header"]["command"] in page
    limits = (ROOT / "docs" / "limits.md").read_text()
    n_stiff = len(systems.STIFF)
    assert f"{n_stiff} stiff problems" in limits
    assert all(what.split(" at ")[0] in limits for what in evaluations.silently_wrong(results))
    assert "right" not in evaluations.silently_wrong(results).values()
    assert set(results["stiff"]) >= {problem.name for problem in systems.STIFF}


def test_every_limit_of_evaluations_is_kept():
    record = json.loads((ROOT / "benchmarks" / "records" / "evaluations.json").read_text())
    found = evaluations.limits(record["results"])
    assert len(found) == len(record["limits"]) == 17
    for (what, value, limit), noted in zip(found, record["limits"], strict=True):
        assert noted == {"what": what, "value": value, "limit": limit, "kept": True}


def test_the_page_of_the_audit_shows_its_record():
    record = json.loads((ROOT / "benchmarks" / "records" / "audit.json").read_text())
    page = (ROOT / "docs" / "audit.md").read_text()
    tables = re.findall(r"```text\n(.*?)\n```", page, re.S)
    assert tables == [found["text"] for found in record["results"].values()]
    assert record["header"]["command"] in page


def test_the_page_of_performance_is_made_of_its_records():
    found = report.load()
    assert (ROOT / "docs" / "performance.md").read_text() == report.page(found)
    for picture in ("precision", "memory", "outputs"):
        assert (ROOT / "docs" / f"performance-{picture}.png").exists()
    assert {"W1", "W2", "W4"} <= set(found["precision"]) & set(found["fixed"])
    assert {"W1", "latent"} <= set(found["adaptive"]) and {"mlp", "latent"} <= set(found["outputs"])


def test_the_suite_keeps_the_limits_of_memory_and_growth():
    """Those that are counted; limits of time are in docs/performance.md, with what became of them."""
    verdicts = {one.text: one.word for one in report.verdicts(report.load())}
    for name in ("W1", "W2", "W4"):
        assert verdicts[f"{name}, gradient error 1e-05: peak memory of MALI / torchdiffeq's adjoint"] == "pass"
    for what in ("distance from 1 of the exponent of evaluations in N", "largest peak memory / smallest"):
        assert verdicts[f"W1, 50 to 2000 steps, float64: {what}"] == "pass"


def test_mali_takes_no_more_evaluations_with_more_output_times():
    for record in report.load()["outputs"].values():
        counts = {}
        for row in limits.rows_of(record, "MALI"):
            counts[row["n_times"]] = row["forward"] + row["backward"]
        assert max(counts.values()) <= 1.5 * counts[2], record["problem"]
