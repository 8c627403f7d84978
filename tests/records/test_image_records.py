"""What the committed records of images show: floors below which nothing was learned, and claims that must hold."""

from __future__ import annotations

import statistics

import pytest
from committed import records

from experiments.report.chapters.images import accuracy, evaluations, grouped, percent
from experiments.report.claims import difference, similar
from experiments.report.runs import by_seed, mean, together

METHODS = ("mali", "adjoint", "resnet")


@pytest.mark.parametrize(("experiment", "percent", "seeds"), [("digits", 97, 5), ("mnist", 97, 1), ("cifar10", 50, 3)])
def test_mali_learns(experiment, percent, seeds):
    group = grouped(records(experiment))["MALI"]
    assert len(group) >= seeds and accuracy(group) >= percent


def test_every_method_of_digits_was_run_with_five_seeds():
    groups = grouped(records("digits"))
    for name in ("naive", "adjoint", "seminorm", "ACA", "MALI"):
        assert [one.record.config["seed"] for one in groups[name]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("experiment", ["cifar10", "digits"])
def test_mali_is_as_accurate_as_aca_and_evaluates_f_less_often_than_naive_and_adjoint(experiment):
    groups = grouped(records(experiment))
    assert len(groups["MALI"]) >= 3
    apart = difference(by_seed(groups["MALI"], percent), by_seed(groups["ACA"], percent))
    assert similar(apart, 1.0) != "does not hold here"  # of three seeds or five it may be inconclusive
    its = together(groups, "MALI", "naive", "adjoint")
    assert len(its["MALI"]) >= 2
    for name in ("naive", "adjoint"):
        assert mean(its[name], evaluations) > mean(its["MALI"], evaluations)


def test_a_neural_ode_keeps_its_accuracy_under_other_solvers_and_a_resnet_does_not():
    by = {m: [one.record.results for one in records("solvers") if one.record.config["method"] == m] for m in METHODS}
    assert all(len(runs) == 3 for runs in by.values())
    steps = [f"corrected / {solver} / h {h:g}" for solver in ("ALF", "RK2", "RK4") for h in (0.25, 0.15, 0.1)]

    def percent(method: str, cell: str) -> float:
        return 100 * statistics.fmean(run["cells"][cell] for run in by[method])

    def own(method: str) -> float:
        return 100 * statistics.fmean(run["test_accuracy_last"] for run in by[method])

    assert all(abs(percent("mali", cell) - own("mali")) <= 2 for cell in steps)
    assert all(percent("resnet", cell) <= own("resnet") - 30 for cell in steps)
    assert all(run["cells"]["ALF - RK2 at h 1"] <= 1e-5 for run in by["mali"])
