"""Continuous extensions (solvers/dense.py): trees, order conditions, ends of a step, errors between grid points."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from problems import MLP, ODE, OSCILLATOR, VAN_DER_POL
from torch import Tensor

import torchmali as tm
from torchmali.engine import Floats, State, Step, Structure, Tape, integrate, number
from torchmali.solvers.dense import (
    DOPRI8_NODES,
    HEUN_EULER,
    ExtraStage,
    Interpolant,
    Stages,
    density,
    leapfrog_interpolant,
    leapfrog_stages,
    order_of,
    polynomial,
    rooted_trees,
    runge_kutta_interpolant,
    symmetry,
    trees_up_to,
)

# Lists of benchmarks/work_precision.py.
L5_HALF = (0.13416504789087996, 0.45983076150869989, -0.09399580939957986)
L14_HALF = (
    *(0.05187093855777696, 0.19511307633120931, -0.35774287289099482, 0.00072996434384825),
    *(0.28285007066538731, -0.0359052253842185, 0.27302186366783054),
)
LISTS = {
    "alf": tm.ALF().coefficients,
    "alf4": tm.ALF(order=4).coefficients,
    "alf6": tm.ALF(order=6).coefficients,
    "L5": (*L5_HALF, *reversed(L5_HALF)),
    "L14-6": (*L14_HALF, 0.18012436941832188, *reversed(L14_HALF)),
    "two ALF": (0.25, 0.5, 0.25),
    "arbitrary": (0.2, 0.3, 0.3, 0.2),
    "order one": (0.3, 0.4, 0.3),  # z1 has a weight on v0
}
ORDERS = {"alf": 2, "alf4": 4, "alf6": 6, "L5": 4, "L14-6": 6, "two ALF": 2, "arbitrary": 2, "order one": 1}
BETWEEN = {"alf": 2, "alf4": 3, "alf6": 4, "L5": 3, "L14-6": 4, "two ALF": 2, "arbitrary": 2, "order one": 1}
WITHOUT_U0 = ("alf4", "alf6", "L5", "L14-6", "two ALF", "arbitrary")
THETAS = (0.15, 0.35, 0.5, 0.65, 0.85)


def tableau(solver: tm.RungeKutta) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    """a and b of a Runge-Kutta method, without gaps."""
    it = solver.tableau
    a = [tuple(dict(row).get(j, 0.0) for j in range(i + 1)) for i, row in enumerate(it.a)]
    return tuple(a), tuple(dict(it.b).get(j, 0.0) for j in range(it.n_stages))


DOPRI8_A, DOPRI8_B = tableau(tm.Dopri8())
DOPRI8 = runge_kutta_interpolant(DOPRI8_A, DOPRI8_B, DOPRI8_NODES)


class Table(NamedTuple):
    """An interpolant, its stages, and what it has to be at the end of a step."""

    interpolant: Interpolant
    stages: Stages
    b: Sequence[float]


def tables() -> dict[str, Table]:
    found = {}
    for name, c in LISTS.items():
        stages, b, _ = leapfrog_stages(c)
        found[name] = Table(leapfrog_interpolant(c), stages, b)
        found[name + ", ends"] = Table(leapfrog_interpolant(c, ends=True), stages.with_stage(b), (*b, 0.0))
    stages, b, _ = leapfrog_stages((0.5, 0.5), 0.8)
    found["damped alf"] = Table(leapfrog_interpolant((0.5, 0.5), 0.8), stages, b)
    a, b = tableau(tm.HeunEuler())
    found["HeunEuler"] = Table(HEUN_EULER, Stages([(), *a]), b)
    stages = Stages([(), *DOPRI8_A]).with_stage(DOPRI8_B)
    for extra in DOPRI8.extra:
        stages = stages.with_stage(extra.row)
    found["Dopri8"] = Table(DOPRI8, stages, (*DOPRI8_B, *[0.0] * 4))
    return found


TABLES = tables()


def dot(x: Sequence[float], y: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def test_rooted_trees_are_counted_as_in_the_textbook():
    assert [len(rooted_trees(n)) for n in range(1, 10)] == [1, 1, 2, 4, 9, 20, 48, 115, 286]
    assert len(set(trees_up_to(7))) == 85
    assert all(order_of(tree) == n for n in range(1, 8) for tree in rooted_trees(n))


def test_density_and_symmetry_of_known_trees():
    leaf = ()
    chain, cherry = ((leaf,),), (leaf, leaf)  # [[.]] and [., .]
    assert (density(leaf), symmetry(leaf)) == (1, 1)
    assert (density(chain), symmetry(chain)) == (6, 1)
    assert (density(cherry), symmetry(cherry)) == (3, 2)
    assert (density((leaf, leaf, leaf)), symmetry((leaf, leaf, leaf))) == (4, 6)
    assert (density((leaf, (leaf,))), symmetry((leaf, (leaf,)))) == (8, 1)
    assert (density((cherry,)), symmetry((cherry,))) == (12, 2)
    assert density(((leaf,), (leaf,))) == 20 and symmetry(((leaf,), (leaf,))) == 2
    # n! / (gamma sigma) ways to label a tree of order n in increasing order: (n - 1)! together.
    for n in range(1, 8):
        labelled = sum(math.factorial(n) // (density(t) * symmetry(t)) for t in rooted_trees(n))
        assert labelled == math.factorial(n - 1)


@pytest.mark.parametrize(
    ("solver", "order"), [(tm.RK4(), 4), (tm.Dopri5(), 5), (tm.Tsit5(), 5), (tm.Dopri8(), 8)], ids=repr
)
def test_the_order_of_a_runge_kutta_method_follows_from_its_elementary_weights(solver, order):
    a, b = tableau(solver)
    assert Stages([(), *a]).order(b) == order


@pytest.mark.parametrize("name", LISTS)
def test_the_order_of_a_leapfrog_list_follows_from_its_stages(name):
    stages, b, _ = leapfrog_stages(LISTS[name])
    assert stages.order(b) == ORDERS[name]


@pytest.mark.parametrize("eta", [1.0, 0.8])
@pytest.mark.parametrize("name", LISTS)
def test_leapfrog_stages_are_those_of_the_moves(name, eta):
    """z1, v1 and the points of the stages, on a linear problem from a v0 that is not f."""
    (stages, b, v1), c = leapfrog_stages(LISTS[name], eta), LISTS[name]
    z, v, points, u = 1.0, 0.3, [], [0.3]
    for j, drift in enumerate(c):
        z += drift * v
        if j < len(c) - 1:
            points.append(z)
            u.append(-2 * z + 0.5)
            v += 2 * eta * (u[-1] - v)
    assert [1 + x for x in stages.applied(tuple(u))][1:] == pytest.approx(points, abs=1e-13)
    assert 1 + dot(b, u) == pytest.approx(z, abs=1e-13)
    assert dot(v1, u) == pytest.approx(v, abs=1e-12)


@pytest.mark.parametrize("name", TABLES)
def test_order_conditions_hold_for_every_power_of_theta(name):
    (order, rows, _), stages, _ = TABLES[name]
    tolerance = 1e-10 if name == "Dopri8" else 1e-11  # its coefficients go up to 2000, those of the lists to 1000
    for tree in trees_up_to(order):
        weights = stages.elementary_weights(tree)
        for k, column in enumerate(zip(*rows, strict=True), 1):
            expected = 1 / density(tree) if order_of(tree) == k else 0.0
            assert dot(column, weights) == pytest.approx(expected, abs=tolerance), (tree, k)


@pytest.mark.parametrize("name", TABLES)
def test_a_step_begins_at_z0_and_ends_at_z1(name):
    interpolant, _, b = TABLES[name]
    assert interpolant.weights(0.0) == [0.0] * len(b)
    assert interpolant.weights(1.0) == pytest.approx(list(b), abs=1e-12)


@pytest.mark.parametrize("name", LISTS)
def test_the_order_between_grid_points_is_that_of_the_list_minus_one_where_the_stages_allow_it(name):
    assert leapfrog_interpolant(LISTS[name]).order == BETWEEN[name]
    assert leapfrog_interpolant(LISTS[name], ends=True).order == BETWEEN[name]
    assert (HEUN_EULER.order, DOPRI8.order) == (2, 6)


@pytest.mark.parametrize(
    ("solver", "order"), [(tm.Bosh3(), 2), (tm.Dopri5(), 4), (tm.Tsit5(), 4), (tm.RK4(), 3)], ids=repr
)
def test_the_last_step_has_an_interpolant_without_the_slope_at_its_end(solver, order):
    it, (a, b) = solver.interpolant_of(closes=True), tableau(solver)
    assert len(it.rows) == len(b) < len(solver.interpolant_of(closes=False).rows)
    assert it.order == order == Stages([(), *a]).order_inside(it.rows)


@pytest.mark.parametrize("name", LISTS)
def test_the_slope_at_the_start_has_no_weight_where_the_order_does_without(name):
    used = leapfrog_interpolant(LISTS[name]).used
    assert used == list(range(1 if name in WITHOUT_U0 else 0, len(LISTS[name])))


@pytest.mark.parametrize("name", [*(name + ", ends" for name in LISTS), "Dopri8"])
def test_slopes_at_the_ends_are_those_of_the_field(name):
    interpolant, _, b = TABLES[name]
    end = len(DOPRI8_B) if name == "Dopri8" else len(b) - 1
    for theta, stage in ((0.0, 0), (1.0, end)):
        unit = [float(j == stage) for j in range(len(b))]
        assert interpolant.slopes(theta) == pytest.approx(unit, abs=1e-10)


@pytest.mark.parametrize("eta", [1.0, 0.8, 0.3])
def test_alf_has_the_parabola_with_slopes_v0_and_v1(eta):
    interpolant = leapfrog_interpolant((0.5, 0.5), eta)
    _, b, v1 = leapfrog_stages((0.5, 0.5), eta)
    assert interpolant.order == (2 if eta == 1 else 1)
    assert interpolant.weights(1.0) == pytest.approx(list(b))
    assert interpolant.slopes(0.0) == [1.0, 0.0]
    assert interpolant.slopes(1.0) == pytest.approx(list(v1))
    assert interpolant.weights(0.5) == pytest.approx([0.5 - eta / 4, eta / 4])


def test_heun_euler_has_what_its_two_stages_allow():
    derived = runge_kutta_interpolant(*tableau(tm.HeunEuler()))
    assert derived.order == 2
    for row, known in zip(derived.rows, HEUN_EULER.rows, strict=True):
        assert row == pytest.approx((*known, 0.0), abs=1e-14)


@pytest.mark.parametrize(("nodes", "order"), [((), 5), ((0.7,), 6), (DOPRI8_NODES, 6)])
def test_an_extra_stage_raises_the_order_of_dopri8(nodes, order):
    assert runge_kutta_interpolant(DOPRI8_A, DOPRI8_B, nodes).order == order


def test_extra_stages_of_dopri8_lie_at_their_nodes():
    assert [extra.node for extra in DOPRI8.extra] == list(DOPRI8_NODES)
    for i, extra in enumerate(DOPRI8.extra):
        assert len(extra.row) == len(DOPRI8_B) + 1 + i
        assert math.fsum(extra.row) == pytest.approx(extra.node, abs=1e-11)


@pytest.mark.parametrize("name", ["alf", "alf6", "Dopri8"])
def test_slopes_are_the_derivatives_of_the_weights(name):
    interpolant = TABLES[name].interpolant
    theta = torch.tensor(0.37, dtype=torch.float64, requires_grad=True)
    for b, row, slope in zip(interpolant.weights(theta), interpolant.rows, interpolant.slopes(0.37), strict=True):
        expected = torch.autograd.grad(b, theta)[0].item() if any(row) and isinstance(b, Tensor) else 0.0
        assert slope == pytest.approx(expected, abs=1e-9)
        assert float(torch.as_tensor(b).detach()) == pytest.approx(polynomial(row, 0.37), abs=1e-12)


@pytest.mark.parametrize("name", TABLES)
def test_weights_are_of_the_size_of_those_of_the_step(name):
    """Large weights of both signs would amplify round-off, and what the higher orders leave."""
    interpolant = TABLES[name].interpolant
    assert max(abs(w) for i in range(21) for w in interpolant.weights(i / 20)) < 2


# Errors between grid points, on the library's own steps.


class Errors(NamedTuple):
    """The largest errors of a solve."""

    at: float  # grid points
    between: float


def with_slopes(ode: ODE, solver: tm.Solver, step: Step, state: State, extra: Sequence[ExtraStage], ends: bool):
    """The slopes of an accepted step from its kept start, in the order of the tables' stages, and its end."""
    slopes: list[Tensor] = [*state.slope]

    def f(t, z):
        slopes.append(ode.f(torch.as_tensor(t, dtype=torch.float64), z[0]).clone())
        return (slopes[-1],)

    (z0,), h = state.point, step.t1 - step.t0
    (z1,) = solver.step(f, step.t0, step.t1, state, None, False).state.point
    if ends:
        slopes[: len(state.slope)] = [ode.f(torch.tensor(step.t0, dtype=torch.float64), z0)] if state.slope else []
        f(step.t1, (z1,))
    for node, row in extra:
        f(step.t0 + node * h, (z0 + h * sum(w * k for w, k in zip(row, slopes, strict=True)),))
    return slopes, z1


def errors(ode: ODE, solver: tm.Solver, controller: tm.StepController, it: Interpolant, ends: bool = False) -> Errors:
    """it: the interpolant of the solver. ends: it uses f at the ends of the step."""

    def f(t, z):
        return (ode.f(torch.as_tensor(t, dtype=torch.float64), z[0]),)

    with torch.no_grad():
        tape = Tape(keep_every=1)
        integrate(f, (ode.y0,), ode.span, solver, controller.bind(Structure.of(ode.y0)), tape=tape)
        times, found = [ode.span[0]], [ode.y0]
        for step in (event for event in tape.events if isinstance(event, Step)):
            assert step.before is not None
            state = Floats.restore(tape.kept[step.before])
            slopes, z1 = with_slopes(ode, solver, step, state, it.extra, ends)
            h = step.t1 - step.t0
            for theta in THETAS:
                times.append(step.t0 + theta * h)
                weights = it.weights(theta)
                found.append(state.point[0] + h * sum(w * k for w, k in zip(weights, slopes, strict=True)))
            times.append(step.t1)
            found.append(z1)
        off = (torch.stack(found) - reference(ode, tuple(times))).flatten(1).norm(dim=1)
    n = len(THETAS) + 1
    is_grid = torch.arange(len(times)) % n == 0
    return Errors(off[is_grid].max().item(), off[~is_grid].max().item())


@functools.cache
def reference(ode: ODE, times: tuple[float, ...]) -> Tensor:
    """The solution at these times. Dopri8's steps land on them, so that no interpolant is trusted."""
    controller = tm.AdaptiveStep(1e-13, 1e-15, max_steps=10**6, land=True)
    return tm.solve(ode.f, ode.y0, torch.tensor(times, dtype=torch.float64), solver=tm.Dopri8(), controller=controller,
                    gradient=tm.ACA()).y  # fmt: skip


def leapfrog(name: str, **how) -> tm.Leapfrog:
    return tm.Leapfrog(LISTS[name], order=ORDERS[name], **how)


# Two numbers of steps over MLP's time span between which the leading term of the error rules.
GRIDS = {"alf": (60, 120), "alf4": (16, 32), "alf6": (8, 16), "L5": (24, 48), "L14-6": (12, 24), "arbitrary": (40, 80)}


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("name", GRIDS)
def test_errors_between_grid_points_have_the_order_of_the_list(name, ends):
    it = leapfrog_interpolant(LISTS[name], ends=ends)
    coarse, fine = (errors(MLP, leapfrog(name), tm.FixedStep(5 / n), it, ends) for n in GRIDS[name])
    expected = min(ORDERS[name], BETWEEN[name] + 1)
    assert math.log2(coarse.between / fine.between) > expected - 0.3
    assert max(coarse.between / coarse.at, fine.between / fine.at) < (3.5 if ORDERS[name] < 6 else 10)


def test_errors_between_grid_points_of_damped_alf_have_order_one():
    it = leapfrog_interpolant((0.5, 0.5), 0.8)
    coarse, fine = (errors(MLP, tm.ALF(eta=0.8), tm.FixedStep(5 / n), it) for n in (100, 200))
    assert coarse.between / fine.between == pytest.approx(2, abs=0.2)
    assert fine.between < 1.1 * fine.at


@pytest.mark.parametrize(
    ("solver", "it", "grid", "order"),
    [(tm.HeunEuler(), HEUN_EULER, (60, 120), 2), (tm.Dopri8(), DOPRI8, (6, 12), 7)],
    ids=["HeunEuler", "Dopri8"],
)
def test_errors_between_grid_points_of_runge_kutta_methods(solver, it, grid, order):
    coarse, fine = (errors(MLP, solver, tm.FixedStep(5 / n), it, ends=bool(it.extra)) for n in grid)
    assert math.log2(coarse.between / fine.between) > order - 0.3
    assert coarse.between < 10 * coarse.at


VAN_DER_POL_5 = VAN_DER_POL.until(5.0)


@pytest.mark.parametrize("rtol", [1e-3, 1e-5])
@pytest.mark.parametrize("ode", [MLP, OSCILLATOR, VAN_DER_POL_5], ids=repr)
@pytest.mark.parametrize(("name", "limit"), [("alf4", 3.5), ("alf6", 10.0)])
def test_adaptive_steps_are_hardly_less_accurate_between_grid_points(name, limit, ode, rtol):
    it, controller = leapfrog_interpolant(LISTS[name]), tm.AdaptiveStep(rtol, rtol / 10)
    found = errors(ode, leapfrog(name), controller, it)
    assert found.between < limit * found.at


@pytest.mark.parametrize("ode", [MLP, VAN_DER_POL_5], ids=repr)
def test_adaptive_steps_of_dopri8_are_hardly_less_accurate_between_grid_points(ode):
    found = errors(ode, tm.Dopri8(), tm.AdaptiveStep(1e-6, 1e-7), DOPRI8, ends=True)
    assert found.between < 10 * found.at


@pytest.mark.parametrize("name", ["alf4", "alf6", "L5", "L14-6"])
def test_a_parasite_in_v_does_not_show_between_grid_points(name):
    """z' = -z from a v0 that is off by w, which z1 hardly feels. A weight b_0 on v0 would shift z by b_0 h w."""
    z0, h, w = 1.0, 0.1, 1e-3
    stages, b, _ = leapfrog_stages(LISTS[name])
    shifts = {}
    for theta in (*THETAS, 1.0):
        weights = [number(x) for x in leapfrog_interpolant(LISTS[name]).weights(theta)] if theta < 1 else b
        values = []
        for v0 in (-z0, -z0 + w):
            u = [v0]
            for row in stages.a[1:]:
                u.append(-(z0 + h * dot(row[: len(u)], u)))
            values.append(z0 + h * dot(weights, u))
        shifts[theta] = abs(values[1] - values[0])
    assert shifts.pop(1.0) < 1e-4 * h * w
    assert max(shifts.values()) < (6e-3 if name == "L5" else 3e-3) * h * w
