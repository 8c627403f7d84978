"""Theorems 2.1, 3.1 and 3.2 on the smoke runs of two experiments, and the figures drawn from them."""

from types import ModuleType
from typing import Any

import pytest

from experiments.engine import task as tasks
from experiments.engine.task import Experiment, Run, Task, as_json
from experiments.report.chapters import theory_figures as draw_theory
from experiments.theory import explain, stability


def results_of(name: str, module: ModuleType, folder) -> dict[str, Any]:
    task = Task(Experiment(name, "", "", module.PRESETS, module.main, {}), "smoke", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "RUNS", folder)
        return as_json(module.main(task.config, Run(task)))


@pytest.fixture(scope="module")
def theory(tmp_path_factory) -> dict[str, Any]:
    return results_of("stability", stability, tmp_path_factory.mktemp("stability"))


@pytest.fixture(scope="module")
def sketches(tmp_path_factory) -> dict[str, Any]:
    return results_of("explain", explain, tmp_path_factory.mktemp("explain"))


def test_measured_eigenvalues_are_those_of_theorem_3_2(theory):
    assert theory["eigenvalues"]["deviation"] < 1e-12
    assert theory["eigenvalues"]["product - (1 - 2 eta)"] < 1e-12


def test_regions_of_stability_are_ellipses_that_shrink_as_eta_grows(theory):
    regions = {eta: found for eta, found in theory["regions"].items() if float(eta) < 1}
    for found in regions.values():
        assert found["area / ellipse"] == pytest.approx(1, abs=0.01)
        assert found["boundary off the ellipse"] < 1e-6
        assert found["iterated"]["agree"] == 1
    areas = [regions[eta]["area"] for eta in sorted(regions, key=float)]
    assert areas == sorted(areas, reverse=True)


def test_undamped_alf_is_stable_nowhere_and_on_the_edge_up_to_i(theory):
    found = theory["regions"]["1"]
    assert found["area"] == 0
    assert found["least growth off the axis"] > 1
    assert found["boundary"] == [[0, pytest.approx(1, abs=1e-5)], [0, pytest.approx(-1, abs=1e-5)]]


def test_damping_makes_an_oscillation_grow(theory):
    growths = [theory["regions"][eta]["growth at i/2"] for eta in sorted(theory["regions"], key=float, reverse=True)]
    assert growths[0] == pytest.approx(1, abs=1e-12)
    assert growths == sorted(growths) and growths[1] > 1.005


@pytest.mark.parametrize(("kind", "undamped", "damped"), [("local", (3, 2), (2, 1)), ("global", (2, 2), (1, 1))])
def test_orders_of_z_and_v_are_those_of_theorem_3_1(theory, kind, undamped, damped):
    for eta, found in theory["orders"][kind].items():
        slopes = found["slopes"]["z"], found["slopes"]["v"]
        assert slopes == pytest.approx(undamped if eta == "1" else damped, abs=0.1), eta


def test_the_gradient_has_the_order_of_the_solver(theory):
    orders = {"ALF": 2, "alf4": 4, "alf6": 6, "ALF, eta = 0.95": 1, "ALF, eta = 0.7": 1}
    slopes = {name: found["slopes"]["error"] for name, found in theory["orders"]["gradient"].items()}
    assert slopes == pytest.approx(orders, abs=0.1)


def test_a_way_back_of_its_own_misses_the_start_by_the_order_of_the_solver_or_one_more_where_it_is_even(theory):
    """Theorem 2.1: there h^(p+1) and (-h)^(p+1) cancel. ALF is symmetric but for v, which it takes anew."""
    orders = {"Euler": 1, "midpoint": 3, "Bosh3": 3, "RK4": 5, "Dopri5": 5, "ALF solved back": 4}
    equal = theory["reverse"]["equal steps"]
    assert {name: equal[name]["slopes"]["back"] for name in orders} == pytest.approx(orders, abs=0.1)
    assert max(equal["ALF inverse"]["back"]) < 1e-14


@pytest.mark.parametrize("problem", stability.PRESETS["smoke"].problems)
def test_mali_meets_the_start_and_the_discrete_gradient_where_the_adjoint_does_not(theory, problem):
    methods = theory["reverse"]["tolerances"][problem]
    ours = [cell for name in ("MALI", "alf4") for cell in methods[name].values()]
    assert max(cell["back"] for cell in ours) < 1e-11
    assert max(cell["gradient"] for cell in methods["MALI"].values()) < 1e-10
    assert max(cell["gradient"] for cell in methods["alf4"].values()) < 1e-8  # 17 long steps amplify round-off more
    assert all(cell["worst"] == 0 for cell in methods["MALI exact"].values())
    assert all(cell["gradient"] < 1e-3 for name in ("MALI float32", "MALI exact") for cell in methods[name].values())
    loose, tight = methods["adjoint"]["0.01"], methods["adjoint"]["1e-05"]
    assert loose["back"] > tight["back"] > 1e6 * max(cell["worst"] for cell in ours)
    assert tight["gradient"] > 1e4 * methods["alf4"]["1e-05"]["gradient"]


def test_alf_as_published_does_not_get_through_van_der_pol(theory):
    cell = theory["reverse"]["tolerances"]["Van der Pol, mu = 1"]["MALI as published"]["0.01"]
    assert "StepLimitError" in cell["failed"]


def test_trials_are_recorded_and_start_where_the_last_accepted_one_ended(sketches):
    accepted, rejected = sketches["search"]["accepted"], sketches["search"]["rejected"]
    assert accepted["t0"][1:] == accepted["t1"][:-1] and accepted["z0"][1:] == accepted["z1"][:-1]
    assert rejected["t0"] and set(rejected["t0"]) <= set(accepted["t0"])
    kept = dict(zip(accepted["t0"], accepted["t1"], strict=True))
    assert all(t1 > kept[t0] for t0, t1 in zip(rejected["t0"], rejected["t1"], strict=True))


def test_the_adjoints_way_back_parts_from_the_way_forward_and_malis_does_not(sketches):
    ways = sketches["ways back"]
    assert max(ways["adjoint"]["distance"]) > 1
    assert ways["MALI"]["worst"] < 1e-13 and ways["MALI float32"]["worst"] < 1e-4


def test_damping_loses_what_undamped_and_exact_alf_rebuild(sketches):
    curves = sketches["reconstruction"]
    assert set(curves["exact"]["error"]) == {0}
    assert max(curves["eta = 1"]["error"]) < 1e-5
    assert curves["eta = 0.7"]["lost at"] > 0


def test_figures_are_drawn(theory, sketches):
    figures = [
        draw_theory.stability_figure(theory),
        draw_theory.orders_figure(theory),
        draw_theory.reverse_error_figure(theory),
        *draw_theory.explain_figures(sketches).values(),
    ]
    assert len(figures) == 6
    for figure in figures:
        figure.draw_without_rendering()
        assert any(ax.lines for ax in figure.axes)
