"""The one table of methods, and what tasks pick from it."""

from __future__ import annotations

import pytest

import torchmali as tm
from experiments.flows import images as flows
from experiments.methods import METHODS, NETWORKS, gradients, label, pick
from experiments.registry import EXPERIMENTS
from experiments.report.style import COLORS


def test_labels_are_one_of_a_kind_and_have_a_colour():
    labels = [*(method.label for method in METHODS.values()), *NETWORKS.values()]
    assert len(labels) == len(set(labels))
    assert {method.label for method in METHODS.values()} <= set(COLORS)
    assert {found.method.label for found in flows.METHODS.values()} <= set(COLORS)


@pytest.mark.parametrize("name", [name for name, experiment in EXPERIMENTS.items() if experiment.methods])
def test_tasks_name_methods_of_the_table(name):
    known = {*METHODS, *NETWORKS, *(flows.METHODS if name == "flows" else ())}
    assert set(EXPERIMENTS[name].methods) <= known
    assert set(EXPERIMENTS[name].usual or ()) <= set(EXPERIMENTS[name].methods)


def test_a_pick_changes_the_fields_that_are_given_and_no_others():
    naive = pick("naive", solver=tm.HeunEuler(), rtol=1e-2)
    assert (naive.solver, naive.rtol, naive.atol) == (tm.HeunEuler(), 1e-2, METHODS["naive"].atol)
    assert METHODS["naive"].solver == tm.Dopri5()
    with pytest.raises(TypeError, match="tolerance"):
        pick("naive", tolerance=1e-2)


def test_a_method_solves_with_its_own_tolerances_unless_others_are_given():
    mali = METHODS["mali"]
    assert mali.adaptive_steps().controller == tm.AdaptiveStep(0.1, 0.01)
    assert mali.adaptive_steps(1e-3, h0=0.5).controller == tm.AdaptiveStep(1e-3, 0.01, h0=0.5)
    assert METHODS["naive"].fixed_steps(0.25).options() == {
        "solver": tm.Midpoint(), "controller": tm.FixedStep(0.25), "gradient": tm.Naive(),
    }  # fmt: skip
    assert gradients("aca", "mali") == {label("aca"): tm.ACA(), "MALI": tm.MALI()}
