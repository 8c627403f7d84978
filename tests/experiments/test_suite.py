"""The suite of benchmarks: problems that all workers solve alike, rounds, records, and numbers made of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import __main__ as benchmarks
from benchmarks import report
from benchmarks.suite import adaptive, driver, fixed, limits, outputs, precision
from benchmarks.suite.problems import PROBLEMS
from benchmarks.suite.torch_methods import LIMIT, METHODS, Case, error_of, missing, reference
from torchmali.compiled import loops

KINDS = {kind.name: kind for kind in (fixed.KIND, adaptive.KIND, precision.KIND, outputs.KIND)}
SMALL = [name for name in PROBLEMS if name not in ("W2", "W3")]


class Here:
    """A worker in this process, and only with methods that take little time."""

    def __init__(self, methods: tuple[str, ...]):
        self.about = {"methods": methods, "packages": {"torch": torch.__version__}}
        self.cases: dict[str, Case] = {}
        self.asked: list[str] = []

    def ask(self, do: str, key: str = "", **more: Any) -> Any:
        self.asked.append(do)
        if do == "prepare":
            if more["how"].get("steps") == 13:
                raise driver.Failure("13 is unlucky")
            self.cases[key] = Case(PROBLEMS[more["problem"]], more["method"], more["how"], more["dtype"])
            return {"compile_seconds": None, "seconds": 0.01}
        if do == "time":
            self.cases[key].run()
            return {"cpu": 0.01, "wall": 0.02}
        if do == "reference":
            gradient, difference = reference(PROBLEMS[more["problem"]], more["n_times"])
            self.exact = gradient
            return {"difference": difference}
        found: dict[str, Any] = {**self.cases[key].counts(), "peak_bytes": self.cases[key].peak_bytes()}
        return found | ({"error": error_of(self.cases[key].gradient(), self.exact)} if more["reference"] else {})


def bench(dtype: str, *methods: str) -> driver.Bench:
    worker: Any = Here(methods)
    return driver.Bench(dtype, print, [worker])


# Where f is looked at with a y that needs no gradient, the y that a CNF makes for its trace looks like a parameter.
@pytest.mark.filterwarnings("ignore:f depends on a tensor of shape")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of torchode and TorchDiffEqPack
@pytest.mark.parametrize("name", SMALL)
def test_all_methods_that_are_installed_solve_the_same_problem(name, monkeypatch):
    """Over a tenth of the time, in twelve steps of order 2. Loops are traced, but not made machine code."""
    monkeypatch.setattr(loops, "lowered", lambda graph, examples: graph)
    problem = replace(PROBLEMS[name], span=0.1 * PROBLEMS[name].span)

    def gradient(method: str, **how: float) -> np.ndarray:
        case = Case(problem, method, how | {"n_times": 2}, "float64")
        case.run()
        return case.gradient()

    exact = gradient("ACA", rtol=1e-6, atol=1e-7)
    for method in METHODS:
        if method not in missing():
            assert error_of(gradient(method, steps=12), exact) < 0.02, method


def test_every_method_counts_its_evaluations(monkeypatch):
    monkeypatch.setattr(loops, "lowered", lambda graph, examples: graph)
    found = {
        method: Case(PROBLEMS["W1"], method, {"steps": 4}, "float32").counts()
        for method in (LIMIT, *METHODS)
        if method not in missing()
    }
    assert found[LIMIT] == {"forward": 4, "backward": 4}
    assert found["MALI"] == found["MALI compiled"] == found["ACA"] == {"forward": 5, "backward": 5}
    assert found["naive"] == {"forward": 5, "backward": 0}
    assert found["torchdiffeq naive"] == {"forward": 8, "backward": 0}


@pytest.mark.parametrize("name", KINDS)
def test_a_record_holds_what_its_kind_says(name, tmp_path):
    kind = KINDS[name]
    problem = kind.problems[0] if name != "outputs" else "lv"
    one = bench(kind.dtype, "MALI", "torchdiffeq naive")
    record = driver.measured(kind, one, problem, kind.smoke)
    driver.write(tmp_path / f"{name}-{problem}.json", record)
    text = StringIO()
    kind.say(record, Console(file=text, width=150))
    assert PROBLEMS[problem].title in text.getvalue()
    found = driver.records(name, tmp_path)[problem]
    assert found == json.loads(json.dumps(record))
    rows = found["results"]["rows"]
    assert {"MALI", "torchdiffeq naive"} <= {row["method"] for row in rows}
    assert all(row["forward"] > 0 and (name == "outputs" or row["peak_bytes"] > 0) for row in rows)
    assert driver.is_done(kind, problem, kind.smoke, tmp_path)
    assert not driver.is_done(kind, problem, kind.settings, tmp_path)


def test_a_method_that_fails_leaves_a_row_and_a_reason():
    one = bench("float32", "MALI")
    record = driver.measured(fixed.KIND, one, "W2", {**fixed.SMOKE, "counted": [13]})
    unlucky = [row for row in record["results"]["rows"] if row["steps"] == 13]
    assert unlucky and all("forward" not in row for row in unlucky)
    assert set(record["failures"].values()) == {"13 is unlucky"}


def test_a_round_runs_every_case_once_until_the_time_is_over():
    one = bench("float32", "MALI")
    cases = [driver.Case(one.workers[0], key, "MALI", {}) for key in "ab"]
    worker: Any = one.workers[0]
    worker.cases = {key: Case(PROBLEMS["lv"], "MALI", {"steps": 1}, "float32") for key in "ab"}
    found = driver.rounds(cases, seconds=0.0, fewest=3, most=10)
    assert {key: len(one["cpu"]) for key, one in found.items()} == {"a": 3, "b": 3}
    assert len(driver.rounds(cases, seconds=60.0, fewest=1, most=4)["a"]["wall"]) == 4


# Numbers that are made of records


def test_the_work_for_an_error_is_interpolated_where_the_error_falls_below_it_for_good():
    errors, work = [1e-1, 1e-4, 1e-3, 1e-5], [10.0, 20.0, 40.0, 80.0]
    assert limits.work_to(1e-4, errors, work) == pytest.approx(40 * math.sqrt(2))
    assert limits.work_to(1e-6, errors, work) is None
    assert limits.work_to(1.0, errors, work) == 10.0
    assert limits.is_upper_limit(1.0, errors) and not limits.is_upper_limit(1e-4, errors)
    assert limits.work_to(1e-2, [None, 1e-3], [None, 5.0]) == 5.0


def record_of(**seconds: list[float]) -> dict[str, Any]:
    """Two runs of each method, a decade of the error on each side of 1e-5."""
    rows = [
        {"method": name.replace("_", " "), "error": error, "forward": 10, "backward": 5, "peak_bytes": 100, "cpu": cpu}
        for name, cpu in seconds.items()
        for error in (1e-4, 1e-6)
    ]
    return {"problem": "W1", "results": {"rows": rows}}


def test_ratios_are_taken_within_a_round():
    record = record_of(
        MALI=[1.0, 2.0, 4.0],
        MALI_compiled=[0.9, 3.6, 7.2],
        torchdiffeq_naive=[1.0, 4.0, 8.0],
        torchdiffeq_adjoint=[2.0, 1.0, 1.0],
    )
    found = limits.time_ratio_to(record, "MALI", "torchdiffeq naive", 1e-5)
    assert found is not None and found.median == pytest.approx(0.5)
    verdicts = {one.text: one.word for one in limits.precision(record)}
    assert verdicts == {
        "W1, gradient error 1e-05: time of MALI / torchdiffeq's naive Dopri5": "pass",
        "W1, gradient error 1e-05: the same without interpolation": "pass",
        "W1, gradient error 1e-05: time of compiled MALI / torchdiffeq's naive Dopri5": "FAIL",
        "W1, gradient error 1e-05: time of MALI / torchdiffeq's adjoint": "FAIL",
        "W1, gradient error 1e-05: peak memory of MALI / torchdiffeq's adjoint": "pass",
    }


def test_what_is_not_in_a_record_is_not_called_a_pass():
    verdicts = list(limits.precision(record_of(MALI=[1.0, 1.0])))
    assert [one.word for one in verdicts] == ["not measured"] * 5


def test_what_is_compiled_is_held_to_diffrax():
    rows = [
        {"method": method, "steps": 50, "forward": 51, "cpu": cpu}
        for method, cpu in (("MALI compiled", [1.0, 2.0]), ("diffrax", [2.0, 4.0]), ("diffrax backsolve", [0.9, 1.8]))
    ]
    words = {
        name: {
            one.text.split(" / ")[1]: one.word
            for one in limits.fixed({"problem": name, "results": {"rows": rows, "growth": []}})
        }
        for name in ("W1", "W4", "W3")
    }
    assert words["W1"] == {"eager limit": "not measured", "diffrax": "pass"}
    assert words["W4"] == {"eager limit": "not measured", "diffrax": "pass", "diffrax backsolve": "FAIL"}
    assert words["W3"] == {"eager limit": "not measured"}


def test_an_exponent_is_the_slope_of_the_logarithms():
    assert limits.exponent([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2.0)


def test_the_page_says_who_is_faster_by_the_quartiles():
    record = record_of(
        MALI=[1.0, 1.0, 1.0, 1.0], torchode=[2.0, 2.0, 2.1, 2.0], diffrax=[0.5, 0.5, 0.5, 0.4], ACA=[0.5, 2.0, 0.9, 1.1]
    )
    lines = report.who({"precision": {"W1": record}}).splitlines()
    assert lines[0].startswith("- **torchode**: MALI is faster on W1 (0.50).")
    assert lines[1].startswith("- **diffrax**: MALI is slower on W1 (2.00).")
    assert lines[2].startswith("- **ACA**: MALI is neither clearly on W1.")


@pytest.mark.parametrize(("x", "text"), [(1234.5, "1,230"), (0.01234, "0.0123"), (12.0, "12.0"), (None, "-"), (0, "0")])
def test_numbers_are_short(x, text):
    assert report.short(x) == text


def test_the_registry_names_modules_that_exist_and_quick_ones():
    for one in benchmarks.BENCHMARKS.values():
        assert (driver.ROOT / (one.module.replace(".", "/") + ".py")).exists()
    quick, full = benchmarks.chosen(None, full=False), benchmarks.chosen(None, full=True)
    assert set(quick) < set(full) == set(benchmarks.BENCHMARKS)
    assert quick["fixed"].command(False, [])[-1] == "--quick"
    with pytest.raises(SystemExit, match="Unknown benchmarks nonsense"):
        benchmarks.chosen("nonsense", full=False)


def test_limits_of_problems_without_a_record_are_shown_as_not_measured():
    found = {one.text: one.word for one in limits.unmeasured({"fixed": {"W1": {}}, "precision": {"W1": {}}})}
    assert set(found.values()) == {"not measured"} and len(found) == 5
