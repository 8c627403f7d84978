"""Leapfrogs whose error estimate comes from the stages at hand: the estimate, what it costs, and its guard."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from oracle import Case, worst_difference
from problems import LOGISTIC, MLP, OSCILLATOR, VAN_DER_POL, linear
from torch import Tensor, nn

import torchmali as tm
from torchmali.measure import peak_bytes
from torchmali.solvers.dense import leapfrog_stages, trees_up_to
from torchmali.solvers.leapfrog import ErrorEstimate
from torchmali.state.floats import Floats
from torchmali.torchdiffeq import SOLVERS
from torchmali.tree import Structure

L5, L14 = tm.ALF(order=4, evals=5), tm.ALF(order=6, evals=14)
LISTS = [L5, L14]
ADAPTIVE = [solver for solver in SOLVERS.values() if solver.error_order is not None]


def estimate_of(solver: tm.Leapfrog) -> ErrorEstimate:
    assert solver.estimate is not None
    return solver.estimate


def attempt(solver: tm.Solver, f: Any, z0: Tensor, h: float, t0: float = 0.0) -> tm.Attempt:
    """One step of h from z0, with its error estimate."""
    state, carry = solver.start(f, t0, (z0,), Floats)
    return solver.step(f, t0, t0 + h, state, carry, True)


# The estimate.


@pytest.mark.parametrize("solver", LISTS, ids=repr)
def test_the_weights_satisfy_the_conditions_below_their_order_and_not_those_of_it(solver):
    """h sum d_j u_j is O(h^q) if sum d_j Phi_j(tree) = 0 for all trees with fewer than q vertices."""
    stages, _, _ = leapfrog_stages(solver.coefficients)
    weights, q = estimate_of(solver).weights, estimate_of(solver).order
    left = {n: 0.0 for n in range(1, q + 1)}
    for tree in trees_up_to(q):
        n = 1 + str(tree).count("(") - 1  # vertices
        phi = stages.elementary_weights(tree)
        left[n] = max(left[n], abs(math.fsum(d * x for d, x in zip(weights, phi, strict=True))))
    assert max(left[n] for n in range(1, q)) < 1e-12
    assert left[q] > 1e-4


@pytest.mark.parametrize("solver", LISTS, ids=repr)
def test_the_estimate_has_its_order_and_is_no_smaller_than_half_the_error(solver):
    """y' = y cos t from t = 0.3: y = exp(sin t - sin 0.3)."""
    f = lambda t, z: (z[0] * math.cos(t),)  # noqa: E731
    z0 = torch.ones(1).double()
    found, hs = {}, (0.4, 0.2) if solver is L5 else (0.1, 0.05)
    for h in hs:
        it = attempt(solver, f, z0, h, 0.3)
        assert it.error is not None
        found[h] = it.error[0].item()
        truth = math.exp(math.sin(0.3 + h) - math.sin(0.3))
        assert abs(it.state.point[0].item() - truth) < 2 * abs(found[h])
    assert math.log2(abs(found[hs[0]] / found[hs[1]])) == pytest.approx(estimate_of(solver).order, abs=0.6)
    assert solver.error_order == estimate_of(solver).order


@pytest.mark.parametrize("solver", LISTS, ids=repr)
def test_a_parasite_does_not_show_in_the_estimate(solver):
    """w = v0 - f(t0, z0) enters with d_0 and, to first order in h, with sum d_j a_j0 (of L5's list: with neither)."""
    stages, _, _ = leapfrog_stages(solver.coefficients)
    weights = estimate_of(solver).weights
    assert weights[0] == 0
    if solver is L5:
        assert abs(math.fsum(d * row[0] for d, row in zip(weights, stages.a, strict=True))) < 1e-12


@pytest.mark.parametrize("solver", LISTS, ids=repr)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_error_follows_the_tolerance(solver, exact, dtype):
    errors = []
    for rtol in (1e-2, 1e-4):
        how: Any = {"controller": tm.AdaptiveStep(rtol, rtol / 10), "gradient": tm.MALI(exact=exact)}
        end = tm.solve(LOGISTIC.f, LOGISTIC.y0.to(dtype), LOGISTIC.span, solver=solver, **how).y[-1]
        errors.append(((end - LOGISTIC.at(LOGISTIC.span[1])).norm() / end.norm()).item())
        assert errors[-1] < rtol
    assert errors[1] < errors[0] / 5 or errors[1] < 1e-6


# What it costs.


@pytest.mark.parametrize("h0", [None, 2.0])
@pytest.mark.parametrize("solver", LISTS, ids=repr)
@pytest.mark.parametrize("ode", [MLP, VAN_DER_POL.until(3.0)], ids=repr)
@pytest.mark.parametrize("method", [tm.MALI(), tm.ACA(), tm.MALI(exact=True)], ids=repr)
def test_a_step_takes_no_evaluation_beyond_its_stages(method, ode, solver, h0):
    calls = []

    def f(t: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        return ode.f(t, y)

    how: Any = {"controller": tm.AdaptiveStep(1e-4, 1e-5, h0=h0), "gradient": method}
    stats = tm.solve(f, ode.y0, ode.span, solver=solver, **how).stats
    attempts = stats.n_steps + stats.n_rejected
    assert stats.n_rejected > 0 or h0 is None
    wanted = solver.n_reflects * attempts + stats.n_refreshes + 1 + (h0 is None)
    assert len(calls) == stats.n_evals_forward
    # Exact mode evaluates f once more at the start, and may take a step again with careful moves.
    extra = (1, 1 + solver.n_reflects) if method.on_integers else (0,)
    assert stats.n_evals_forward - wanted in extra


def test_the_stages_are_not_kept():
    y0 = torch.ones(100_000)
    peaks = [
        peak_bytes(lambda solver=solver: _one_step(solver, y0)) / (y0.numel() * y0.element_size()) for solver in LISTS
    ]
    assert abs(peaks[1] - peaks[0]) < 2.5  # states of 14 stages and of 5
    assert max(peaks) < 13


def _one_step(solver: tm.Solver, y0: Tensor) -> None:
    with torch.no_grad():
        tm.solve(lambda t, y: -y, y0, (0.0, 0.1), solver=solver, controller=tm.AdaptiveStep(1e-2, 1e-2, h0=1.0))


# Gradients.


CONTROLLERS = [tm.AdaptiveStep(1e-3, 1e-4), tm.AdaptiveStep(1e-5, 1e-6, h0=2.0), tm.AdaptiveStep(1e-3, 1e-4, land=True)]


@pytest.mark.parametrize("times", [(0.0, 0.31, 0.8, 1.3), (1.0, 0.45, -0.4)], ids=["forward", "backward"])
@pytest.mark.parametrize("controller", CONTROLLERS, ids=repr)
@pytest.mark.parametrize("method", [tm.ACA(), tm.MALI(), tm.MALI(checkpoint_every=2)], ids=repr)
@pytest.mark.parametrize("solver", [*LISTS, tm.ALF(order=4, evals=5, refresh=2)], ids=repr)
def test_gradients_are_those_of_autograd_on_the_same_grid(solver, method, controller, times):
    case = Case.make(times)
    grads, _ = case.gradients(solver, controller, method)
    assert worst_difference(grads, case.exact_gradients(solver, controller)) < 1e-12


@pytest.mark.parametrize("solver", LISTS, ids=repr)
def test_exact_mode_has_the_gradient_of_the_stored_trajectory(solver):
    case, controller = Case.make(), CONTROLLERS[0]
    found, _ = case.gradients(solver, controller, tm.MALI(exact=True))
    stored, _ = case.gradients(solver, controller, tm.MALI(exact=True, checkpoint_every=1))
    assert all(torch.equal(found[name], stored[name]) for name in found)
    assert worst_difference(found, case.gradients(solver, controller, tm.Naive())[0]) < 1e-9


def test_a_list_of_ones_own_with_its_estimate_is_that_of_alf():
    own = tm.Leapfrog(L5.coefficients, order=4, estimate=L5.estimate)
    ends = [
        tm.solve(MLP.f, MLP.y0, MLP.span, solver=solver, controller=tm.AdaptiveStep(1e-5, 1e-6)).y
        for solver in (own, L5)
    ]
    assert torch.equal(*ends)


# The guard.


@pytest.mark.parametrize("kh", [3.0, 4.0, 6.0, 10.0, 30.0])
def test_a_step_that_is_too_long_for_a_stiff_f_is_rejected_at_any_tolerance(kh):
    """y' = -k y: without a guard the estimate is 3e-4 at kh = 3, where y is 3 times what it should be."""
    it = attempt(L5, lambda t, z: (-kh * z[0],), torch.ones(1).double(), 1.0)
    assert it.error is not None
    size = max(1.0, it.state.point[0].abs().item())
    assert it.error[0].abs().item() > 0.5 * size


@pytest.mark.parametrize("rate", [0.5, 1.0, 1.5, -1.0, -2.0])
def test_the_guard_leaves_resolved_steps_alone(rate):
    def f(t: float, z: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append(-rate * z[0])
        return (seen[-1],)

    seen: list[Tensor] = []
    it = attempt(L5, f, torch.ones(1).double(), 1.0)
    assert it.error is not None
    plain = math.fsum(d * u.item() for d, u in zip(estimate_of(L5).weights, seen, strict=True))
    assert abs(it.error[0].item() - plain) < 1e-15


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0)])
@pytest.mark.parametrize("method", [tm.MALI(), tm.Naive(), tm.MALI(exact=True)], ids=repr)
def test_leaves_without_dimensions_or_elements_are_judged_too(method, shape):
    y0 = torch.ones(2), torch.ones(shape)
    how: Any = {"controller": tm.AdaptiveStep(1e-3, 1e-4), "gradient": method}
    y = tm.solve(lambda t, y: (-y[0], -0.5 * y[1]), y0, (0.0, 1.0), solver=L5, **how).y
    torch.testing.assert_close(y[0][-1], y0[0] * math.exp(-1), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(y[1][-1], y0[1] * math.exp(-0.5), rtol=1e-3, atol=1e-4)


def test_one_stiff_sample_of_many_is_guarded():
    rates = torch.ones(64, 1).double()
    rates[17] = 30.0
    it = attempt(L5, lambda t, z: (-rates * z[0],), torch.ones(64, 2).double(), 0.2)
    assert it.error is not None
    rough = it.error[0].abs().amax(1) > 0.1
    assert rough.nonzero().flatten().tolist() == [17]


@pytest.mark.parametrize("rtol", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize("k", [5.0, 20.0, 50.0, 200.0])
def test_stiff_and_loose_is_not_silently_wrong(k, rtol):
    """k = 50 at 1e-1: with the estimate alone dL/dy0 was wrong by a factor of 3e45."""
    ode = linear("stiff", -k, torch.tensor([1.0, 0.5]).double(), 3.0)
    y0 = ode.y0.clone().requires_grad_()
    controller = tm.AdaptiveStep(rtol, rtol / 10)
    y = tm.solve(ode.f, y0, ode.span, solver=L5, controller=controller).y[-1]
    (grad,) = torch.autograd.grad(y.square().sum(), y0)
    assert y.abs().max() < rtol
    assert grad.norm() < rtol


# The first step.


@pytest.mark.parametrize("rate", [-1.0, 1.0])
@pytest.mark.parametrize("solver", ADAPTIVE, ids=repr)
def test_the_first_step_has_about_the_error_that_the_tolerance_allows(solver, rate):
    f = lambda t, z: (rate * z[0],)  # noqa: E731
    z0 = torch.ones(3).double()
    state, carry = solver.start(f, 0.0, (z0,), Floats)
    for rtol in (1e-3, 1e-6):
        controller = tm.AdaptiveStep(rtol, 0.0).bind(Structure.of(z0))
        h = controller.begin(tm.SolveStart(f, solver, 0.0, 1e3, state, carry, False)).next_time(0.0, 1e3)
        it = solver.step(f, 0.0, h, state, carry, True)
        assert it.error is not None
        ratio = (it.error[0] / (rtol * torch.maximum(z0, it.state.point[0]))).abs().max().item()
        assert 0.002 < ratio <= 2


def test_a_first_step_is_no_longer_than_the_way_to_a_jump():
    seen = []

    def f(t: Tensor, y: Tensor) -> Tensor:
        seen.append(t.item())
        return 0.1 * y

    how: Any = {"solver": L5, "controller": tm.AdaptiveStep(1e-2, 1e-2), "jumps": [0.25]}
    tm.solve(f, torch.ones(2).double(), (0.0, 10.0), **how)
    behind = next(i for i, t in enumerate(seen) if t > 0.25)
    assert behind <= 1 + 1 + L5.n_reflects + 1  # v0, the first step's size, one step, and v behind the jump


def test_a_field_at_rest_at_first_is_not_stepped_over():
    """f changes where nothing at the start tells of it: rejected, not missed."""
    f = lambda t, y: torch.where(t > 5.0, (t - 5.0) ** 2, 0 * t) + 0 * y  # noqa: E731
    y0 = torch.ones(1).double()
    y = tm.solve(f, y0, (0.0, 10.0), solver=L5, controller=tm.AdaptiveStep(1e-4, 1e-5)).y[-1]
    assert y.item() == pytest.approx(1 + 125 / 3, rel=1e-3)


# Choices.


def test_lists_are_chosen_by_tolerance():
    assert tm.leapfrog_for(1e-1) == tm.leapfrog_for(1e-5) == L5
    assert tm.leapfrog_for(1e-6) == L14
    assert tm.leapfrog_for(1e-8, inside=True).order == 4


def test_interpolants_have_no_weight_on_the_slope_at_the_start():
    """u_0 carries the parasite."""
    for solver in LISTS:
        assert not any(solver.interpolant.rows[0])


def test_repr_and_equality_name_the_list():
    assert repr(L5) == "ALF(order=4, evals=5)" and repr(tm.ALF(order=4, evals=12)) == "ALF(order=4)"
    assert tm.ALF(order=4, evals=12) == tm.ALF(order=4) != L5
    assert tm.ALF(order=6, evals=14) == L14


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tm.ALF(order=4, evals=7), r"ALF\(order=4, evals=7\): .* takes 12 or 5 evaluations"),
        (lambda: tm.ALF(evals=5), r"order 2 takes 1 evaluations"),
        (lambda: ErrorEstimate((0.0, 1.0, -0.5), 2), "sum to 0"),
        (lambda: ErrorEstimate((0.0, 0.0), 2), "not all 0"),
        (lambda: tm.Leapfrog((0.25, 0.5, 0.25), estimate=ErrorEstimate((1.0, -1.0), 2)), "2 weights, but .* 3 slopes"),
    ],
)
def test_errors_say_what_is_needed(make, message):
    with pytest.raises(tm.InvalidOptionError, match=message):
        make()


def test_naive_mali_and_aca_take_one_grid_with_the_tail_even():
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    grids = []
    for method in (tm.Naive(), tm.ACA(), tm.MALI(), tm.MALI(exact=True)):
        for wants_t in (False, True):
            t = torch.tensor([0.0, 3.0], dtype=torch.float64, requires_grad=wants_t)
            how: Any = {"solver": L5, "controller": tm.AdaptiveStep(1e-4, 1e-5), "gradient": method}
            stats = tm.solve(lambda t, y: net(y), torch.ones(3, 2).double(), t, **how).stats
            grids.append((stats.n_steps, stats.n_rejected, round(stats.h_min, 9), round(stats.h_max, 9)))
    assert len(set(grids)) == 1


def test_an_oscillator_in_even_steps_of_odeint():
    y0 = OSCILLATOR.y0.clone().requires_grad_()
    y = tm.odeint(OSCILLATOR.f, y0, torch.tensor([0.0, 3.0]), rtol=1e-4, atol=1e-5, gradient="mali")
    torch.testing.assert_close(y[-1], OSCILLATOR.at(3.0), rtol=1e-3, atol=1e-4)
