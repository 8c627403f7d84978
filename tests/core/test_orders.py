"""Orders 2, 4 and 6 of the leapfrogs, and of coupled Runge-Kutta methods: of the state, and of the gradient."""

import functools
import math
from typing import Any

import pytest
import torch
from problems import MLP, OSCILLATOR, VAN_DER_POL, mlp_weights, tanh_mlp

import torchmali as tm


def solve_mlp(solver: tm.Solver, n_steps: int, method: tm.GradientMethod):
    weights = tuple(torch.from_numpy(w).requires_grad_() for w in mlp_weights())
    y0 = MLP.y0.clone().requires_grad_()
    how = {"solver": solver, "controller": tm.FixedStep(5 / n_steps), "gradient": method, "args": weights}
    y = tm.solve(tanh_mlp, y0, (0.0, 5.0), **how).y[-1]
    return y, torch.autograd.grad((y**2).sum(), (y0, *weights))


def solve_oscillator(solver: tm.Solver, n_steps: int, method: tm.GradientMethod):
    stiffness = torch.tensor([4.0, 0.2], dtype=torch.float64, requires_grad=True)
    y0 = OSCILLATOR.y0.clone().requires_grad_()

    def func(t, y, c):
        return torch.stack([y[1], -c[0] * y[0] - c[1] * y[1]])

    how = {"solver": solver, "controller": tm.FixedStep(3 / n_steps), "gradient": method, "args": (stiffness,)}
    y = tm.solve(func, y0, (0.0, 3.0), **how).y[-1]
    return y, torch.autograd.grad((y**2).sum(), (y0, stiffness))


RUNS = {"mlp": solve_mlp, "oscillator": solve_oscillator}


@functools.cache
def reference(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    y, grads = RUNS[name](tm.Dopri8(), 400, tm.ACA())
    return y.detach(), torch.cat([g.flatten() for g in grads])


def errors(name: str, solver: tm.Solver, n_steps: int) -> tuple[float, float]:
    """Of the end state, and of the gradient of the sum of its squares."""
    y, grads = RUNS[name](solver, n_steps, tm.MALI())
    exact_y, exact = reference(name)
    gradient = torch.cat([g.flatten() for g in grads])
    return float((y.detach() - exact_y).norm() / exact_y.norm()), float((gradient - exact).norm() / exact.norm())


# Solver: two grids between which the leading term of the error rules, above round-off.
GRIDS = {
    ("mlp", tm.ALF()): (200, 400),
    ("mlp", tm.ALF(order=4)): (20, 40),
    ("mlp", tm.ALF(order=6)): (24, 36),
    ("mlp", tm.Reversible(tm.RK4())): (100, 200),
    ("oscillator", tm.ALF()): (200, 400),
    ("oscillator", tm.ALF(order=4)): (20, 40),
    ("oscillator", tm.ALF(order=6)): (10, 20),
    ("oscillator", tm.Reversible(tm.Midpoint())): (200, 400),
}


@pytest.mark.parametrize(("name", "solver"), GRIDS, ids=repr)
def test_state_and_gradient_converge_with_the_solvers_order(name, solver):
    grids = GRIDS[name, solver]
    coarse, fine = (errors(name, solver, n) for n in grids)
    for i, what in enumerate(("state", "gradient")):
        slope = math.log(coarse[i] / fine[i]) / math.log(grids[1] / grids[0])
        assert slope == pytest.approx(solver.order, abs=0.15), what


@pytest.mark.parametrize("order", [2, 4, 6])
def test_a_step_is_symmetric(order):
    """psi_{-h} is the inverse of psi_h, as the list of coefficients is its own mirror image."""
    solver = tm.ALF(order=order)
    drifts, rest = solver.coefficients, solver.scheme.rest
    assert drifts == pytest.approx(drifts[::-1], abs=1e-15)
    assert sum(drifts) == pytest.approx(1, abs=1e-15)
    nodes = [node for node, _ in rest]
    assert nodes == pytest.approx([1 - node for node in nodes[::-1]], abs=1e-14)
    assert len(rest) == {2: 1, 4: 12, 6: 20}[order]


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_a_pi_controller_rejects_less(beta):
    """Van der Pol: h follows fast changes. (It is not cheaper by itself.)"""
    controller = tm.AdaptiveStep(1e-5, 1e-6, beta=beta, safety=0.9)
    stats = tm.solve(VAN_DER_POL.f, VAN_DER_POL.y0, VAN_DER_POL.span, controller=controller).stats
    share = stats.n_rejected / (stats.n_steps + stats.n_rejected)
    assert share > 0.1 if beta == 0 else share < 0.02


@pytest.mark.parametrize("rtol", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("order", [4, 6])
def test_the_error_of_adaptive_higher_orders_stays_below_the_tolerance_on_a_smooth_problem(order, rtol):
    stats_and_end = tm.solve(
        MLP.f, MLP.y0, MLP.span, solver=tm.ALF(order=order), controller=tm.AdaptiveStep(rtol, rtol / 10)
    )
    error = (stats_and_end.y[-1] - MLP.reference()).norm() / MLP.reference().norm()
    assert error < rtol
    stats = stats_and_end.stats
    attempts = stats.n_steps + stats.n_rejected
    # One more in each attempt for the error estimate, one for v0, one for the first step's size.
    assert stats.n_evals_forward == (tm.ALF(order=order).n_reflects + 1) * attempts + 2
    assert stats.n_evals_forward < 400


def test_mali_by_name_takes_the_order_that_the_tolerance_asks_for():
    evaluations = []

    def func(t, y):
        evaluations.append(t.item())
        return MLP.f(t, y)

    def n_evals(n_times=2, **how):
        evaluations.clear()
        tm.odeint(func, MLP.y0, torch.linspace(0, 1, n_times), gradient="mali", **how)
        return len(evaluations)

    for rtol in (1e-1, 1e-3):
        loose: Any = {"rtol": rtol, "atol": rtol / 10}
        assert n_evals(**loose) == n_evals(method="alf4_5", **loose) != n_evals(method="alf", **loose)
    tight: Any = {"rtol": 1e-7, "atol": 1e-8}
    assert n_evals(**tight) == n_evals(method="alf6_14", **tight) != n_evals(method="alf4_5", **tight)
    assert n_evals(n_times=3, **tight) == n_evals(method="alf4_5", **tight)  # outputs between grid points
    fixed: Any = {"options": {"step_size": 0.25}}
    assert n_evals(**fixed) == n_evals(method="alf", **fixed) == 5
    assert n_evals(method="alf6", **fixed) == 81
    assert n_evals(method=tm.Reversible(tm.RK4()), **fixed) == 32
