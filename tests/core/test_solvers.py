"""Solvers by themselves, at fixed steps: their orders, coefficients, interpolants and evaluations.

Parametrised over torchmali's own table of solvers, so that a new one is tested by being listed
there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from problems import BENIGN, CLOSED_FORM, FORCED, LOGISTIC, LORENZ, MLP, ODE
from torch import Tensor

from torchmali import (
    ACA,
    ALF,
    RK4,
    Bosh3,
    Dopri5,
    Dopri8,
    Euler,
    FixedStep,
    Heun,
    Heun3,
    HeunEuler,
    Midpoint,
    RK4ThreeEighths,
    Tsit5,
    solve,
)
from torchmali.solvers.base import Solver
from torchmali.solvers.runge_kutta import RungeKutta
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors
from torchmali.torchdiffeq import SOLVERS

ALL = list(SOLVERS.values())
TABLEAUX = [solver for solver in ALL if isinstance(solver, RungeKutta)]
ESTIMATING = [solver for solver in TABLEAUX if solver.error_order is not None]
INTERPOLATING = [solver for solver in TABLEAUX if solver.interpolates]
DAMPED = [0.95, 0.9, 0.7, 0.3]

ORDERS = {
    ALF: (2, 4, 6),
    Euler: (1,),
    Midpoint: (2,),
    Heun: (2,),
    Heun3: (3,),
    RK4: (4,),
    RK4ThreeEighths: (4,),
    HeunEuler: (2,),
    Bosh3: (3,),
    Dopri5: (5,),
    Tsit5: (5,),
    Dopri8: (8,),
}


def on_leaves(ode: ODE) -> Callable[[float | Tensor, Tensors], Tensors]:
    """The problem's f as solvers call it: a float time, a tuple of leaves."""
    return lambda t, z: (ode.f(torch.as_tensor(t, dtype=torch.float64), z[0]),)


def end_of(ode: ODE, solver: Solver, n_steps: int) -> Tensor:
    t0, t1 = ode.span
    solution = solve(ode.f, ode.y0, ode.span, solver=solver, controller=FixedStep((t1 - t0) / n_steps), gradient=ACA())
    assert solution.stats.n_steps == n_steps
    return solution.y[-1]


def slopes(errors: list[float]) -> list[float]:
    """log2 of what each halving of h divides the error by."""
    return [math.log2(a / b) for a, b in zip(errors, errors[1:], strict=False)]


def global_slopes(ode: ODE, solver: Solver, n_steps: int, n_halvings: int = 2) -> list[float]:
    return slopes(
        [torch.dist(end_of(ode, solver, n_steps * 2**k), ode.reference()).item() for k in range(n_halvings + 1)]
    )


@pytest.mark.parametrize("solver", ALL, ids=repr)
def test_solver_claims_its_textbook_order(solver):
    assert solver.order in ORDERS[type(solver)]


# Order: end time, coarsest grid. Fine enough for the leading term of the error to rule, coarse
# enough for the finest error (a quarter of h) to stay above 1e-12, the reference's own.
GRIDS = {1: (0.5, 500), 2: (0.5, 100), 3: (0.5, 100), 4: (0.5, 50), 5: (1.0, 128), 6: (0.5, 10), 8: (0.5, 8)}


@pytest.mark.parametrize("solver", ALL, ids=repr)
def test_halving_h_divides_the_error_by_two_to_the_order(solver):
    """On the nonlinear Lorenz field (too short a time for chaos), where no term of a low order
    happens to vanish.
    """
    t_end, n_steps = GRIDS[solver.order]
    slope = global_slopes(LORENZ.until(t_end), solver, n_steps)[-1]
    assert slope == pytest.approx(solver.order, abs=0.2)


@pytest.mark.parametrize("solver", ALL, ids=repr)
def test_order_holds_for_a_field_that_depends_on_time(solver):
    """Stages at wrong times leave no solver but Euler its order. At least, not exactly: some
    leading error terms are so small on this field that the next one shows.
    """
    n_steps = {1: 160, 2: 80, 3: 40, 4: 20, 5: 20, 6: 6, 8: 6}[solver.order]
    assert global_slopes(MLP, solver, n_steps, n_halvings=1)[0] > solver.order - 0.2


@pytest.mark.parametrize("ode", BENIGN, ids=repr)
def test_halving_h_divides_the_error_of_alf_by_four(ode):
    assert global_slopes(ode, ALF(), 320) == pytest.approx([2, 2], abs=0.15)


@pytest.mark.parametrize("eta", DAMPED)
@pytest.mark.parametrize("ode", BENIGN, ids=repr)
def test_halving_h_divides_the_error_of_damped_alf_by_two(ode, eta):
    # With eta = .95 the first-order term is small: only fine grids show it (and not the second).
    assert global_slopes(ode, ALF(eta=eta), 640)[-1] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("eta, z_order, v_order", [(1.0, 3, 2), *((eta, 2, 1) for eta in DAMPED)])
@pytest.mark.parametrize("ode", [FORCED, LOGISTIC], ids=repr)
def test_local_errors_of_alf_are_of_the_order_of_theorem_3_1(ode, eta, z_order, v_order):
    """One step from (z0, f(z0)), against z and dz/dt of the exact solution."""
    f, t0, z_errors, v_errors = on_leaves(ode), ode.span[0], [], []
    for h in (2**-9, 2**-10, 2**-11):
        start = Floats((ode.y0,), f(t0, (ode.y0,)))
        end = ALF(eta=eta).step(f, t0, t0 + h, start, None, adaptive=False).state
        z = ode.at(t0 + h)
        z_errors.append(torch.dist(end.point[0], z).item())
        v_errors.append(torch.dist(end.slope[0], f(t0 + h, (z,))[0]).item())
    assert slopes(z_errors) == pytest.approx([z_order] * 2, abs=0.1)
    assert slopes(v_errors) == pytest.approx([v_order] * 2, abs=0.1)


@pytest.mark.parametrize("solver", [s for s in ALL if s.error_order is not None], ids=repr)
def test_halving_h_divides_the_error_estimate_as_the_controller_is_told(solver):
    f, norms = on_leaves(LORENZ), []
    coarse = 2**-7 if solver == ALF(order=6, evals=14) else 2**-6  # its next term is still felt at 2**-6
    for h in (coarse, coarse / 2):
        start, carry = solver.start(f, 0.0, (LORENZ.y0,), Floats)
        norms.append(solver.step(f, 0.0, h, start, carry, adaptive=True).error[0].norm().item())
    assert slopes(norms) == [pytest.approx(solver.error_order, abs=0.2)]


Tree = tuple  # a rooted tree is the sorted tuple of the trees that hang from its root


def trees(n_nodes: int) -> set[Tree]:
    """All rooted trees with so many nodes: one order condition each."""
    if n_nodes == 1:
        return {()}
    grown: set[Tree] = set()

    def with_one_more_leaf(tree: Tree) -> Iterator[Tree]:
        yield tuple(sorted((*tree, ())))
        for i, branch in enumerate(tree):
            for taller in with_one_more_leaf(branch):
                yield tuple(sorted((*tree[:i], taller, *tree[i + 1 :])))

    for tree in trees(n_nodes - 1):
        grown.update(with_one_more_leaf(tree))
    return grown


def size(tree: Tree) -> int:
    return 1 + sum(map(size, tree))


def density(tree: Tree) -> int:
    return size(tree) * math.prod(map(density, tree))


def n_slopes(solver: RungeKutta) -> int:
    """The stages, the end slope, and what the interpolant needs beside them."""
    return solver.tableau.n_stages + 1 + len(solver.interpolant.extra)


def matrix(solver: RungeKutta) -> Tensor:
    """The tableau's a with the end slope and the interpolant's own stages as the last ones."""
    tableau, n = solver.tableau, n_slopes(solver)
    a = torch.zeros(n, n, dtype=torch.float64)
    extra = [list(enumerate(stage.row)) for stage in solver.interpolant.extra]
    for i, row in enumerate([*tableau.a, tableau.b, *extra], start=1):
        for j, weight in row:
            a[i, j] = weight
    return a


def weights(row: list[tuple[int, float]], n_stages: int) -> Tensor:
    dense = torch.zeros(n_stages, dtype=torch.float64)
    for j, weight in row:
        dense[j] = weight
    return dense


def interpolant(solver: RungeKutta, theta: float) -> Tensor:
    """Weights of z(t0 + theta h)."""
    dense = torch.zeros(n_slopes(solver), dtype=torch.float64)
    for j, row in enumerate(solver.interpolant.rows):
        dense[j] = sum(c * theta ** (power + 1) for power, c in enumerate(row))
    return dense


def elementary(a: Tensor, tree: Tree) -> Tensor:
    """The stages' elementary weights of a tree (Butcher)."""
    total = torch.ones(len(a), dtype=torch.float64)
    for branch in tree:
        total = total * (a @ elementary(a, branch))
    return total


def condition_defect(solver: RungeKutta, b: Tensor, n_nodes: int, theta: float = 1.0) -> float:
    """By how much the worst order condition with so many nodes fails for the weights b."""
    a = matrix(solver)
    return max(abs((b @ elementary(a, tree)).item() - theta**n_nodes / density(tree)) for tree in trees(n_nodes))


# Order conditions hold to rounding (1e-14 for Tsit5, whose coefficients reach 13), or else fail by
# far more: the smallest failure among these solvers is Dopri8's, 8e-6.
HOLDS, FAILS = 1e-13, 1e-6


def test_there_are_as_many_rooted_trees_as_the_books_say():
    assert [len(trees(n)) for n in range(1, 10)] == [1, 1, 2, 4, 9, 20, 48, 115, 286]


@pytest.mark.parametrize("solver", TABLEAUX, ids=repr)
def test_weights_satisfy_all_conditions_of_their_order_and_no_more(solver):
    b = weights(solver.tableau.b, n_slopes(solver))
    assert b.sum().item() == pytest.approx(1, abs=1e-14)
    for n_nodes in range(1, solver.order + 1):
        assert condition_defect(solver, b, n_nodes) < HOLDS
    assert condition_defect(solver, b, solver.order + 1) > FAILS


@pytest.mark.parametrize("solver", ESTIMATING, ids=repr)
def test_error_estimate_is_of_the_order_that_the_controller_is_told(solver):
    """b - e is a method of order error_order - 1: the estimate is its local error."""
    n_stages = n_slopes(solver)
    e = weights(solver.tableau.e, n_stages)
    assert e.sum().item() == pytest.approx(0, abs=1e-14)
    embedded = weights(solver.tableau.b, n_stages) - e
    for n_nodes in range(1, solver.error_order):
        assert condition_defect(solver, embedded, n_nodes) < HOLDS
    assert condition_defect(solver, embedded, solver.error_order) > FAILS


@pytest.mark.parametrize("solver", TABLEAUX, ids=repr)
def test_only_solvers_with_error_weights_give_an_error_order(solver):
    assert (solver.error_order is not None) == bool(solver.tableau.e)


@pytest.mark.parametrize("solver", TABLEAUX, ids=repr)
def test_interpolant_joins_the_two_ends_of_the_step(solver):
    b = weights(solver.tableau.b, n_slopes(solver))
    assert torch.equal(interpolant(solver, 0.0), torch.zeros_like(b))
    torch.testing.assert_close(interpolant(solver, 1.0), b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("theta", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("solver", INTERPOLATING, ids=repr)
def test_interpolant_is_as_accurate_as_the_solution(solver, theta):
    """Conditions up to order p - 1 make its error O(h^p), that of the solution after many steps. Dopri8 has 6."""
    order = solver.interpolant.order
    assert order >= (6 if isinstance(solver, Dopri8) else max(solver.order - 1, 1))
    holds = 1e-10 if isinstance(solver, Dopri8) else HOLDS  # its coefficients reach 2,000
    for n_nodes in range(1, order + 1):
        assert condition_defect(solver, interpolant(solver, theta), n_nodes, theta) < holds


@pytest.mark.parametrize(
    "solver, local_order", [(HeunEuler(), 3), (Bosh3(), 4), (Dopri5(), 5), (Tsit5(), 5), (ALF(), 3)]
)
def test_interpolated_values_inside_a_step_converge_with_the_interpolants_order(solver, local_order):
    f, t0, errors = on_leaves(LOGISTIC), 0.0, []
    for h in (2**-3, 2**-4, 2**-5):
        start, carry = solver.start(f, t0, (LOGISTIC.y0,), Floats)
        attempt = solver.step_with_stages(f, t0, t0 + h, start, carry, adaptive=True)
        times = [t0 + theta * h for theta in (0.2, 0.5, 0.9)]
        (y,), _ = solver.interpolate(f, t0, t0 + h, start, attempt, times)
        errors.append(max(torch.dist(y[i], LOGISTIC.at(t)).item() for i, t in enumerate(times)))
    assert slopes(errors) == pytest.approx([local_order] * 2, abs=0.2)


@pytest.mark.parametrize("solver", INTERPOLATING, ids=repr)
def test_interpolant_leaves_the_end_slope_for_the_next_step(solver):
    f, t1 = on_leaves(MLP), 0.3
    start, carry = solver.start(f, 0.0, (MLP.y0,), Floats)
    attempt = solver.step(f, 0.0, t1, start, carry, adaptive=solver.error_order is not None)
    _, carry = solver.interpolate(f, 0.0, t1, start, attempt, [0.1])
    if carry is None:  # there is no slope at the end among its stages
        assert isinstance(solver, HeunEuler)
        return
    assert torch.equal(carry[0], f(t1, attempt.state.point)[0])


def two_leaves(t: float | Tensor, z: Tensors) -> Tensors:
    """A field in which both leaves and the time matter."""
    x, y = z
    return torch.sin(t + x) * y.sum(), torch.cos(y) - float(t) * x.mean()


def augmented_state() -> Floats:
    """z and a v that is not f(z), as after some steps."""
    x, y = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3), torch.ones(4).double() / 3
    return Floats((x, y), (torch.cos(3 * x), 0.7 - y))


def tensors_of(state) -> list[Tensor]:
    return [*state.point, *state.slope]


@pytest.mark.parametrize("ode", CLOSED_FORM, ids=repr)
def test_first_step_of_alf_is_the_explicit_midpoint_rule(ode):
    ode = ode.until(ode.span[0] + 0.3)
    alf, midpoint = end_of(ode, ALF(), 1), end_of(ode, Midpoint(), 1)
    torch.testing.assert_close(alf, midpoint, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("eta", [1.0, *DAMPED])
@pytest.mark.parametrize("h", [0.2, -0.2])
def test_alf_step_is_that_of_algorithm_2(eta, h):
    state, t0 = augmented_state(), 0.4
    end = ALF(eta=eta).step(two_leaves, t0, t0 + h, state, None, adaptive=True)
    assert end.error is not None
    k1 = tuple(z + h / 2 * v for z, v in zip(state.point, state.slope, strict=True))
    u1 = two_leaves(t0 + h / 2, k1)
    for i in range(2):
        v_out = 2 * eta * u1[i] + (1 - 2 * eta) * state.slope[i]
        z_out = k1[i] + h / 2 * v_out
        torch.testing.assert_close(end.state.slope[i], v_out, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(end.state.point[i], z_out, rtol=1e-14, atol=1e-14)
        # Its distance from the explicit Euler step with v_in.
        error = z_out - (state.point[i] + h * state.slope[i])
        torch.testing.assert_close(end.error[i], error, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("eta", [1.0, *DAMPED])
@pytest.mark.parametrize("h", [0.2, -0.2])
def test_alf_inverse_undoes_step_to_round_off(eta, h):
    before, t0 = augmented_state(), 0.4
    after = ALF(eta=eta).step(two_leaves, t0, t0 + h, before, None, adaptive=False).state
    back = ALF(eta=eta).inverse(two_leaves, t0, t0 + h, after)
    # v is rebuilt with 1/|1 - 2 eta| times the round-off of v_out and f, all of them below 10.
    round_off = 20 * torch.finfo(torch.float64).eps / abs(1 - 2 * eta)
    for x, y in zip(tensors_of(back), tensors_of(before), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=round_off)


def test_alf_inverse_undoes_a_thousand_steps():
    f, h = on_leaves(MLP), 5 / 1000
    start = Floats((MLP.y0,), f(0.0, (MLP.y0,)))
    state = start
    for i in range(1000):
        state = ALF().step(f, i * h, (i + 1) * h, state, None, adaptive=False).state
    assert torch.dist(state.point[0], MLP.y0) > 1  # it went somewhere
    for i in reversed(range(1000)):
        state = ALF().inverse(f, i * h, (i + 1) * h, state)
    for x, y in zip(tensors_of(state), tensors_of(start), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("solver", ALL, ids=repr)
def test_step_leaves_its_start_as_it_is(solver):
    f = on_leaves(MLP)
    state, carry = solver.start(f, 0.0, (MLP.y0.clone(),), Floats)
    before = [x.clone() for x in tensors_of(state)]
    solver.step(f, 0.0, 0.3, state, carry, adaptive=solver.error_order is not None)
    assert all(map(torch.equal, tensors_of(state), before))


def test_alf_inverse_leaves_its_end_as_it_is():
    state = augmented_state()
    before = [x.clone() for x in tensors_of(state)]
    ALF().inverse(two_leaves, 0.0, 0.3, state)
    assert all(map(torch.equal, tensors_of(state), before))


@pytest.mark.parametrize("solver", ALL, ids=repr)
@pytest.mark.parametrize("n_steps", [1, 7])
def test_fixed_steps_evaluate_f_once_per_stage(solver, n_steps):
    """ALF: once per reflect and once for v0. Runge-Kutta: the start's slope is the first stage."""
    calls = []

    def f(t, y):
        calls.append(t.item())
        return MLP.f(t, y)

    solution = solve(f, MLP.y0, (0, 1), solver=solver, controller=FixedStep(1 / n_steps), gradient=ACA())
    per_step = {Dopri5: 6, Tsit5: 6, Dopri8: 13, Heun: 2, HeunEuler: 2, Midpoint: 2, Euler: 1}
    per_step |= {Heun3: 3, Bosh3: 3, RK4: 4, RK4ThreeEighths: 4}
    stages = solver.n_reflects if isinstance(solver, ALF) else per_step[type(solver)]
    expected = n_steps * stages + isinstance(solver, ALF)
    assert len(calls) == expected
    assert solution.stats.n_evals_forward == expected
    assert (solution.stats.n_steps, solution.stats.n_rejected) == (n_steps, 0)
