"""Contraction makes v part from f(t, z): it is noticed, v is renewed, and gradients go through it."""

import functools
import math

import pytest
import torch
from problems import LORENZ, MLP, ODE, OSCILLATOR, VAN_DER_POL, linear

import torchmali as tm

DECAY_50 = linear("decay_50", -50.0, torch.linspace(0.5, 1.5, 4, dtype=torch.float64), 1.0)
CONTRACTING = [VAN_DER_POL, LORENZ, DECAY_50]


def solved(ode: ODE, n_steps: int, solver: tm.Solver, method: tm.GradientMethod, y0=None) -> tm.Solution:
    t0, t1 = ode.span
    controller = tm.FixedStep((t1 - t0) / n_steps)
    return tm.solve(
        ode.f, ode.y0 if y0 is None else y0, ode.span, solver=solver, controller=controller, gradient=method
    )


@functools.cache
def _lorenz() -> torch.Tensor:
    """Sharper than SciPy's at its tightest, which chaos leaves with 5e-12."""
    end = solved(LORENZ, 3000, tm.Dopri8(), tm.ACA()).y[-1]
    assert difference(end, LORENZ.reference()) < 1e-11
    return end


def end_error(ode: ODE, n_steps: int, solver: tm.Solver) -> tuple[float, tm.Stats]:
    solution = solved(ode, n_steps, solver, tm.ACA())
    exact = _lorenz() if ode is LORENZ else ode.reference() if ode.exact is None else ode.at(ode.span[1])
    return float((solution.y[-1] - exact).norm() / exact.norm()), solution.stats


def gradient(ode: ODE, n_steps: int, solver: tm.Solver, method: tm.GradientMethod):
    y0 = ode.y0.clone().requires_grad_()
    solution = solved(ode, n_steps, solver, method, y0)
    return torch.autograd.grad((solution.y[-1] ** 2).sum(), y0)[0], solution.stats


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


# Grids on which the leading term of the error rules, and is above round-off.
GRIDS = {2: (1000, 3000, 10_000), 4: (200, 400, 1000), 6: (100, 200)}
FINER_GRIDS = {("van_der_pol", 6): (150, 300), ("lorenz", 6): (400, 600), ("decay_50", 6): (200, 400)}


@pytest.mark.parametrize("order", [2, 4, 6])
@pytest.mark.parametrize("ode", CONTRACTING, ids=repr)
def test_with_refresh_contracting_problems_keep_the_order(ode, order):
    grids = FINER_GRIDS.get((ode.name, order)) or GRIDS[order]
    errors, stats = zip(*(end_error(ode, n, tm.ALF(order=order)) for n in grids), strict=True)
    slope = -math.log(errors[-1] / errors[0]) / math.log(grids[-1] / grids[0])
    assert slope == pytest.approx(order, abs=0.15)
    for n, stat in zip(grids, stats, strict=True):
        limit = 15 if order > 2 else 2.3 * 50 / math.log(n / 50) if ode is DECAY_50 else 20
        assert 0 < stat.n_refreshes <= limit
        assert stat.n_evals_forward == tm.ALF(order=order).n_reflects * n + 1 + stat.n_refreshes
    assert stats[-1].n_refreshes <= stats[0].n_refreshes  # the count does not grow with the number of steps


@pytest.mark.parametrize(
    ("order", "n_steps"), [(4, 100), (4, 2000), (6, 100), pytest.param(6, 2000, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("ode", CONTRACTING, ids=repr)
def test_the_ends_of_the_range_of_orders_4_and_6_are_accurate_too(ode, order, n_steps):
    error, stats = end_error(ode, n_steps, tm.ALF(order=order))
    # At the finest grid round-off is what is left: Lorenz amplifies it some 1e4 times over its time span.
    assert error < {(4, 100): 5e-5, (4, 2000): 5e-10, (6, 100): 1e-6, (6, 2000): 1e-11}[order, n_steps]
    assert stats.n_refreshes <= 15


@pytest.mark.parametrize("ode", [VAN_DER_POL, LORENZ], ids=repr)
def test_without_refresh_the_same_problems_diverge_at_any_step(ode):
    with pytest.raises(tm.NonFiniteError):
        solved(ode, 1000, tm.ALF(refresh="never"), tm.ACA())


@pytest.mark.parametrize("order", [2, 4, 6])
@pytest.mark.parametrize("ode", [MLP, OSCILLATOR], ids=repr)
@pytest.mark.parametrize("n_steps", [200, 500, 1000])
def test_benign_problems_are_not_refreshed(ode, n_steps, order):
    assert end_error(ode, n_steps, tm.ALF(order=order))[1].n_refreshes == 0


CASES = [(2, 1000), (4, 100), (6, 100)]


@pytest.mark.parametrize(("order", "n_steps"), CASES)
@pytest.mark.parametrize("ode", CONTRACTING, ids=repr)
def test_gradients_go_through_refreshes(ode, order, n_steps):
    """Against plain autograd through the same steps. The backward pass amplifies round-off between refreshes: 1e-10 for
    order 2 and 1e-9 for the others, where ACA, which does not invert, is at 1e-12.
    """
    solver = tm.ALF(order=order)
    exact, stats = gradient(ode, n_steps, solver, tm.Naive())
    assert stats.n_refreshes > 0
    kept, aca = gradient(ode, n_steps, solver, tm.ACA())
    rebuilt, mali = gradient(ode, n_steps, solver, tm.MALI())
    assert aca.n_refreshes == mali.n_refreshes == stats.n_refreshes
    assert difference(kept, exact) < 1e-12
    assert difference(rebuilt, exact) < (1e-10 if order == 2 else 1e-9)
    if not mali.n_reruns:  # Lorenz' equation drifts beyond 3e-10 between refreshes
        n_looks = 2 * (1 + stats.n_refreshes)  # at most, into a drift
        assert 0 <= mali.n_evals_backward - mali.n_evals_forward <= n_looks
        assert mali.n_evals_backward == mali.n_vjps
    assert mali.n_evals_forward == solver.n_reflects * n_steps + 1 + stats.n_refreshes


LONG = [(2, 10_000), (4, 400), (4, 2000), (6, 400), (6, 2000)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:MALI rebuilt a state")
@pytest.mark.parametrize(("order", "n_steps"), LONG)
@pytest.mark.parametrize("ode", CONTRACTING, ids=repr)
def test_gradients_of_long_solves_equal_those_with_kept_states(ode, order, n_steps):
    """Where round-off grows too much in the backward pass (Lorenz, order 6), segments are solved again."""
    solver = tm.ALF(order=order)
    kept, _ = gradient(ode, n_steps, solver, tm.ACA())
    rebuilt, stats = gradient(ode, n_steps, solver, tm.MALI())
    assert difference(rebuilt, kept) < (1e-10 if order == 2 else 1e-9)
    if not stats.n_reruns:
        assert stats.n_evals_forward == solver.n_reflects * n_steps + 1 + stats.n_refreshes
        # A drift that may matter is judged by what two evaluations more say of its effect, once per segment.
        assert stats.n_evals_backward - stats.n_evals_forward in range(0, 2 * (stats.n_refreshes + 1) + 1, 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ode", [VAN_DER_POL, pytest.param(LORENZ, marks=pytest.mark.slow)], ids=repr)
def test_checkpoints_spare_the_second_solve(ode):
    """With a state kept now and then nothing drifts, and every evaluation of the backward pass is needed once."""
    solver, n_steps = tm.ALF(order=6), 400
    kept, _ = gradient(ode, n_steps, solver, tm.ACA())
    rebuilt, stats = gradient(ode, n_steps, solver, tm.MALI(checkpoint_every=40))
    assert difference(rebuilt, kept) < 1e-9
    assert (stats.n_reruns, stats.n_checkpoints) == (0, 10)
    assert stats.n_evals_backward == stats.n_evals_forward


@pytest.mark.parametrize("times", [(0.0, 2.0, 5.0, 10.0), (10.0, 6.0, 5.9, 0.0)])
@pytest.mark.parametrize("refresh", ["auto", 7])
def test_gradients_of_output_times_go_through_refreshes(times, refresh):
    """A refresh on an output time moves with it, one inside a segment with the segment's start."""
    rate = torch.tensor(-2.0 if times[0] == 0 else 2.0, dtype=torch.float64, requires_grad=True)
    y0 = torch.tensor([1.0, 0.5], dtype=torch.float64, requires_grad=True)

    def func(t, y, rate):
        return rate * y + torch.sin(t)

    grads = []
    for method in (tm.Naive(), tm.ACA(), tm.MALI()):
        t = torch.tensor(times, dtype=torch.float64, requires_grad=True)
        solver, controller = tm.ALF(refresh=refresh), tm.FixedStep(0.0731)
        solution = tm.solve(func, y0, t, solver=solver, controller=controller, gradient=method, args=(rate,))
        assert solution.stats.n_refreshes > 2
        grads.append(torch.autograd.grad((solution.y**2).sum() + solution.y[1].sum(), (y0, rate, t)))
    for other in grads[1:]:
        for a, b in zip(other, grads[0], strict=True):
            assert difference(a, b) < 1e-11


@pytest.mark.parametrize("small", [1e-3, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("order", "n_steps"), [(2, 1000), (4, 200), (6, 100)])
def test_one_contracting_row_of_a_batch_is_solved_as_if_it_were_alone(order, n_steps, dtype, small):
    torch.manual_seed(0)
    y0 = torch.randn(64, 2, dtype=dtype)
    y0[17] = small * torch.tensor([1.0, 0.7])
    contracts = (torch.arange(64) == 17)[:, None]
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=dtype)

    def func(t, y):
        return torch.where(contracts, -20 * y, y @ turn)

    solver, controller = tm.ALF(order=order), tm.FixedStep(1 / n_steps)
    batch = tm.solve(func, y0, (0.0, 1.0), solver=solver, controller=controller)
    alone = tm.solve(lambda t, y: -20 * y, y0[17:18], (0.0, 1.0), solver=solver, controller=controller)
    exact = y0[17].double() * math.exp(-20)
    error = difference(batch.y[-1, 17].double(), exact)
    assert batch.stats.n_refreshes == alone.stats.n_refreshes > 0
    assert error == pytest.approx(difference(alone.y[-1, 0].double(), exact), rel=0.1)
    assert error < {2: 2e-3, 4: 3e-6, 6: 3e-6}[order]


@pytest.mark.parametrize("scale", [1e18, 1.0, 1e-18])
def test_states_of_any_size_are_refreshed(scale):
    """Squares of the largest are infinite in float32, squares of the smallest zero."""
    rates = torch.tensor([-20.0, 1.0])
    y0 = torch.full((3, 2), scale)
    solution = tm.solve(lambda t, y: rates * y, y0, (0.0, 2.0), controller=tm.FixedStep(0.005))
    assert (solution.y[-1] / scale - torch.exp(2 * rates)).abs().max() < 1e-4
    assert 3 <= solution.stats.n_refreshes <= 20


@pytest.mark.parametrize("shape", [(64, 1), (64, 3), (8, 2, 3, 3), (64,), ()])
def test_oscillation_is_no_reason_to_refresh(shape):
    """z'' of a row passes through zero now and then, and f - v changes its sign there, once."""
    torch.manual_seed(1)
    y0 = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    rates = 1 + torch.rand(shape, dtype=torch.float64)
    stats = tm.solve(lambda t, y: (rates * y[1], -rates * y[0]), y0, (0.0, 20.0), controller=tm.FixedStep(0.01)).stats
    assert stats.n_refreshes == 0


def test_noise_at_a_fixed_point_is_no_reason_to_refresh():
    """All rows rest at a fixed point that attracts them: there is nothing but round-off in f - v."""
    y0 = torch.full((16, 4), 0.7391, dtype=torch.float32)
    stats = tm.solve(lambda t, y: 3 * (torch.cos(y) - y), y0, (0.0, 20.0), controller=tm.FixedStep(0.01)).stats
    assert stats.n_refreshes <= 5
    longer = tm.solve(lambda t, y: 3 * (torch.cos(y) - y), y0, (0.0, 60.0), controller=tm.FixedStep(0.01)).stats
    assert longer.n_refreshes <= stats.n_refreshes + 2


@pytest.mark.parametrize(("order", "limit"), [(2, 1500), (4, 700), (6, 900)])
def test_adaptive_solves_of_contracting_problems_finish(order, limit):
    """dz/dt = -z over 10: the reference code never does. The error may be atol, which is 2 % of what is left of z."""
    y0 = torch.ones(1, dtype=torch.float64, requires_grad=True)
    controller = tm.AdaptiveStep(1e-5, 1e-6)
    solution = tm.solve(lambda t, y: -y, y0, (0.0, 10.0), solver=tm.ALF(order=order), controller=controller)
    assert solution.stats.n_evals_forward < limit
    assert solution.stats.n_refreshes > 0
    assert abs(solution.y[-1].item() - math.exp(-10)) < 1e-6
    kept = tm.solve(
        lambda t, y: -y, y0, (0.0, 10.0), solver=tm.ALF(order=order), controller=controller, gradient=tm.ACA()
    )
    grads = [torch.autograd.grad(s.y[-1].sum(), y0)[0] for s in (solution, kept)]
    assert difference(*grads) < 1e-10


def test_a_refresh_every_n_steps_is_done_every_n_steps():
    _, stats = end_error(MLP, 100, tm.ALF(refresh=7))
    assert stats.n_refreshes == 100 // 7
    assert stats.n_evals_forward == 100 + 1 + 14
    assert end_error(MLP, 98, tm.ALF(refresh=7))[1].n_refreshes == 13  # none at the end


def test_a_leaf_without_tolerance_is_not_watched():
    """As it does not influence the steps, it does not influence v."""
    y0 = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)

    def func(t, y):
        return torch.cos(t) * y[0], -30 * y[1]

    for atol, refreshes in ((1e-3, True), ((1e-3, math.inf), False)):
        stats = tm.solve(func, y0, (0.0, 2.0), controller=tm.AdaptiveStep(1e-3, atol, h_max=0.01)).stats
        assert (stats.n_refreshes > 0) is refreshes


def test_memory_grows_with_refreshes_and_not_with_steps():
    stats = [gradient(DECAY_50, n, tm.ALF(), tm.MALI())[1] for n in (1000, 4000)]
    assert stats[1].n_refreshes < stats[0].n_refreshes
    assert all(stat.n_checkpoints == 0 for stat in stats)
