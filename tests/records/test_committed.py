"""The committed records: each is whole, and what they show is what the paper claims or the report says."""

from __future__ import annotations

import re

import pytest
from committed import RECORDS, ROOT

from experiments.engine import record
from experiments.engine.record import Record
from experiments.report import page as report
from experiments.report.chapters import accounting
from experiments.report.chapters.toy import Toy

COMMITTED = [path for path in sorted(RECORDS.rglob("*.json")) if not path.name.startswith("smoke")]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.relative_to(RECORDS).as_posix())
def test_a_committed_record_is_whole_small_and_says_how_it_was_made(path):
    found = Record.read(path)
    assert path.stat().st_size <= record.MAX_BYTES
    assert found.command.startswith(f"python -m experiments run {found.experiment} --preset {found.preset}")
    assert found.made["packages"]["torch"] and found.made["commit"] and found.made["threads"] == 1
    assert not re.search(r"/(home|root|work|tmp|Users)/", path.read_text())


@pytest.fixture(scope="module")
def toy() -> Toy:
    path = RECORDS / "toy" / "cpu.json"
    return Toy(Record.read(path), path.name)


def test_malis_gradient_is_that_of_the_discrete_solve(toy):
    for alpha in toy.alphas:
        for span in (*toy.spans(True), *toy.spans(False)):
            if alpha * span > -15:  # beyond, z(T) has no correct digit: it is below atol
                for method in ("MALI", "ACA", "naive"):
                    errors = toy.errors("reverse accuracy", method, alpha, span)
                    assert errors is not None and max(errors) <= 1e-10, (alpha, span, method)


def test_mali_is_no_worse_than_an_adjoint_of_its_order_where_solutions_grow(toy):
    for alpha in (a for a in toy.alphas if a > 0):
        for span in toy.spans(True):
            mali, adjoint = (toy.errors("equal order", m, alpha, span) for m in ("MALI", "adjoint"))
            assert mali and adjoint
            assert all(x <= 1.05 * y for x, y in zip(mali, adjoint, strict=True)), (alpha, span)


def test_memory_is_flat_for_mali_and_the_adjoint_and_linear_for_aca_and_naive():
    found = Record.read(RECORDS / "memory" / "cpu.json").results
    config = Record.read(RECORDS / "memory" / "cpu.json").config
    for field in config["fields"]:
        state = found["state_bytes"][field]
        for method in ("MALI", "MALI exact", "adjoint"):
            peaks = [found["cells"][f"{field} / {method} / tolerance {t:g}"]["peak"] for t in config["tolerances"]]
            assert max(peaks) <= 1.1 * min(peaks), (field, method)
        aca, naive = (found["fits"][f"{field} / {method}"] for method in ("ACA", "naive"))
        assert aca["slope"] == pytest.approx(2 * state, rel=0.05) and aca["r2"] > 0.99  # z and v
        assert naive["slope"] >= 3 * aca["slope"] and naive["r2"] > 0.99


def test_evaluations_are_exactly_those_of_the_formulas():
    found = Record.read(RECORDS / "accounting" / "cpu.json")
    n = 0
    for name, cell in found.results["cells"].items():
        _, method, *kind = name.split(" / ")
        wanted = accounting.expected(method, cell) if kind in (["fixed"], ["adaptive"]) else None
        if wanted:
            assert (cell["forward"], cell["backward"]) == wanted, name
            n += 1
    assert n >= 20


def test_the_committed_report_is_that_of_the_committed_records():
    assert report.markdown(report.chapters()) == (ROOT / "docs" / "results.md").read_text(), "make report"


def test_every_finding_has_a_verdict_with_numbers():
    findings = [one for chapter in report.chapters() for one in (*chapter.claims, *chapter.checks)]
    assert len(findings) >= 50
    for one in findings:
        assert any(character.isdigit() for character in one.numbers), one
        assert all((ROOT / path).exists() for path in one.records)
