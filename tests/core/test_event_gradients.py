"""Derivatives of events: of their times, of the state there, and of the outputs before them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from event_cases import ALF, GRAVITY, METHODS, NAMES, RK4, TIGHT, Case, double, fall, height, solve, turn
from torch import Tensor, nn

import torchmali as tm
from torchmali.loop.fixed_point import FixedPointLoop
from torchmali.measure import peak_bytes

STEPS = [tm.FixedStep(0.11), tm.FixedStep(0.11, land=False)]
SOLVERS = [
    (tm.Naive(), ALF),
    (tm.ACA(), ALF),
    (tm.MALI(), ALF),
    (tm.MALI(), tm.ALF(order=4)),
    (tm.MALI(checkpoint_every=3), tm.ALF(order=4)),
    (tm.MALI(exact=True), tm.ALF(order=4)),
    (tm.ACA(), tm.RK4()),
    (tm.ACA(), tm.Euler()),
    (tm.Naive(), tm.Dopri5()),
]
JUMPS = (0.3, 0.72)
# Outputs on both sides of the event; the last step may end on the output behind it, or an output lie on a jump.
TIMES = {
    (): ((0.0, 0.5, 0.95, 1.0, 2.5), (0.0, 0.5, 0.95, 1.0, 1.26)),
    JUMPS: ((0.0, 0.5, 0.95, 1.0, 2.5), (0.0, 0.5, 0.72, 1.0, 2.5)),
}


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_falling_body_hits_the_ground_when_it_should_and_with_the_right_derivatives(method: Any):
    y0, gravity = double(10.0, 1.0, grad=True), double(GRAVITY, grad=True)
    solution = solve(fall, y0, torch.linspace(0, 5, 11).double(), height, method, args=(gravity,))
    root = math.sqrt(1 + 2 * GRAVITY * 10)
    t = (1 + root) / GRAVITY
    assert solution.event_t.shape == () and abs(solution.event_t.item() - t) < 1e-11
    assert solution.event_y.shape == (2,) and abs(solution.event_y[0].item()) < 1e-12  # round-off of 10 m
    assert abs(solution.event_y[1].item() + root) < 1e-10
    assert solution.event_index == (0, 0)
    # h + v t - g t^2 / 2 = 0, whose slope in t is -root
    wanted = [double(1 / root, t / root), double(-(t**2) / 2 / root)]
    for g, x in zip(torch.autograd.grad(solution.event_t, [y0, gravity], retain_graph=True), wanted, strict=True):
        assert torch.allclose(g, x, rtol=0, atol=1e-10)
    # the speed is -sqrt(v^2 + 2 g h)
    wanted = [double(-GRAVITY / root, -1 / root), double(-10 / root)]
    for g, x in zip(torch.autograd.grad(solution.event_y[1], [y0, gravity], retain_graph=True), wanted, strict=True):
        assert torch.allclose(g, x, rtol=0, atol=1e-9)
    # the height stays at zero
    for g in torch.autograd.grad(solution.event_y[0], [y0, gravity]):
        assert torch.allclose(g, torch.zeros_like(g), atol=1e-11)


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_twenty_bounces_of_a_ball_follow_the_closed_form(method: Any):
    """The n-th bounce comes at first * (1 + 2 (e + ... + e^(n - 1))); it is differentiated through all before it."""
    elasticity, state, t = double(0.9, grad=True), double(1.0, 0.0), double(0.0)
    event, first = tm.Event(height, direction="down"), math.sqrt(2 / GRAVITY)
    for n in range(20):
        solution = solve(fall, state, torch.stack([t, t + 10.0]), event, method)
        t, state = solution.event_t, torch.stack([double(0.0), -elasticity * solution.event_y[1]])
        assert abs(t.item() - first * (1 + 2 * sum(0.9**k for k in range(1, n + 1)))) < 1e-10
    (slope,) = torch.autograd.grad(t, elasticity)
    assert abs(slope.item() - 2 * first * sum(k * 0.9 ** (k - 1) for k in range(1, 20))) < 1e-7


@pytest.mark.parametrize("jumps", [(), JUMPS], ids=["smooth", "jumps"])
@pytest.mark.parametrize("controller", STEPS, ids=str)
@pytest.mark.parametrize("gradient, solver", SOLVERS, ids=str)
def test_gradients_on_fixed_steps_are_central_differences(gradient: Any, solver: Any, controller: Any, jumps: Any):
    case, plain = Case(jumps=jumps), (tm.Naive(), solver, controller)
    torch.manual_seed(1)
    for x, g in zip(case.inputs, case.gradients((gradient, solver, controller)), strict=True):
        direction = torch.randn_like(x)
        found = central_difference(case, plain, x, direction)
        assert abs(found - (g * direction).sum().item()) < 1e-8 * max(1, abs(found))


@torch.no_grad()
def central_difference(case: Case, method: Any, x: Tensor, direction: Tensor) -> float:
    """The derivative of the loss by x in a direction, of order 4."""
    e, ends, start = 3e-5, [], x.clone()
    for move in (1, -1, 2, -2):
        x.copy_(start + move * e * direction)
        ends.append(case.loss(method).item())
    x.copy_(start)
    return (8 * (ends[0] - ends[1]) - (ends[2] - ends[3])) / (12 * e)


@pytest.mark.parametrize("jumps", [(), JUMPS], ids=["smooth", "jumps"])
@pytest.mark.parametrize("controller", [*STEPS, tm.AdaptiveStep(1e-4, 1e-5)], ids=str)
@pytest.mark.parametrize("gradient, solver", SOLVERS, ids=str)
def test_gradients_are_those_of_autograd_on_the_same_steps(gradient: Any, solver: Any, controller: Any, jumps: Any):
    """Gradients by all output times, also by those after the event."""
    if controller.adaptive and solver.error_order is None:
        return
    limit = 1e-7 if gradient.on_integers else 1e-11
    compare_with_naive((gradient, solver, controller), jumps, limit)


@pytest.mark.parametrize("jumps", [(), JUMPS], ids=["smooth", "jumps"])
def test_the_adjoint_agrees_where_its_tolerance_is_tight(jumps: Any):
    compare_with_naive((tm.Adjoint(), tm.Dopri5(), TIGHT), jumps, 1e-7)


def compare_with_naive(method: Any, jumps: Any, limit: float) -> None:
    for times in TIMES[jumps]:
        case = Case(times, jumps)
        for x, y in zip(case.gradients(method), case.gradients((tm.Naive(), *method[1:])), strict=True):
            assert torch.allclose(x, y, rtol=limit, atol=limit)


def seen(t: Tensor, y: dict[str, Tensor]) -> Tensor:
    return torch.sin(t) * y["a"] + y["b"].sum() ** 2


@pytest.mark.parametrize("gradient", [tm.ACA(), tm.MALI(), tm.MALI(exact=True), tm.Adjoint()], ids=str)
def test_an_observer_sees_y_up_to_the_event(gradient: Any):
    solver, controller = tm.ALF(order=4), tm.AdaptiveStep(1e-9, 1e-9)
    case = Case()
    found = torch.autograd.grad(case.loss((gradient, solver, controller), observe=seen), case.inputs)
    s = solve(case.f, case.y0, case.t, case.g, (tm.Naive(), solver, controller), args=(case.w,))
    total = torch.stack([seen(t, {"a": a, "b": b}) for t, a, b in zip(s.t, *s.y.values(), strict=True)]).sum()
    loss = total + 2 * s.event_t + torch.sin(s.event_y["a"]) + 3 * s.event_y["b"].sum()
    for x, y in zip(found, torch.autograd.grad(loss, case.inputs), strict=True):
        assert torch.allclose(x, y, rtol=1e-6, atol=1e-7)
    s = solve(case.f, case.y0, case.t, case.g, (gradient, solver, controller), args=(case.w,), observe=seen)
    assert abs(s.observed.item() - total.item()) < 1e-9
    assert torch.equal(s.y["a"][-1], s.event_y["a"]) and len(s.t) == 4


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_gradients_of_a_flagged_solve_are_those_without_an_event(method: Any):
    y0 = double(1.0, 0.0, grad=True)
    grads = []
    for how in ({"event": lambda t, y: y[0] + 9, "on_no_event": "flag"}, {}):
        gradient, solver, controller = method
        s = tm.solve(turn, y0, [0.0, 0.4, 1.0], gradient=gradient, solver=solver, controller=controller, **how)
        grads.append(torch.autograd.grad(s.y.sum(), y0)[0])
    assert torch.allclose(*grads, rtol=1e-8 if gradient.on_integers else 1e-12)


def test_a_root_that_only_touches_zero_has_no_derivative():
    y0 = double(-1.0, grad=True)
    at_most_zero = lambda t, y: -(torch.clamp(t - 1 - y - 1, max=0) ** 2)  # noqa: E731 (zero from t = 1 on)
    solution = solve(lambda t, y: 0 * y, y0, [0.0, 2.0], at_most_zero, (tm.ACA(), RK4, tm.FixedStep(0.5)))
    assert abs(solution.event_t.item() - 1) < 1e-6
    for x in (solution.event_t, solution.event_y):
        with pytest.raises(tm.GrazingEventError, match="only touches zero"):
            torch.autograd.grad(x, y0, retain_graph=True)
    cubic = solve(lambda t, y: 1 + 0 * y, y0, [0.0, 2.3], lambda t, y: y**3, (tm.Naive(), RK4, tm.FixedStep(0.5)))
    with pytest.raises(tm.GrazingEventError):
        cubic.event_t.backward()


def test_second_derivatives_are_refused():
    y0 = double(10.0, 1.0, grad=True)
    solution = solve(fall, y0, [0.0, 5.0], height)
    with pytest.raises(tm.DoubleBackwardError):
        torch.autograd.grad(solution.event_t, y0, create_graph=True)


def test_a_function_of_the_time_alone_has_no_gradient_but_ends_the_solve():
    y0 = double(1.0, 0.0, grad=True)
    solution = solve(turn, y0, [0.0, 2.0], lambda t, y: t - 1, (tm.MALI(), tm.ALF(order=4), TIGHT))
    assert abs(solution.event_t.item() - 1) < 1e-15 and not solution.event_t.requires_grad
    g = torch.autograd.grad(solution.event_y[0], y0)[0]
    assert torch.allclose(g, double(math.cos(1), -math.sin(1)), atol=1e-8)


def grows(t: Tensor, y: Tensor) -> Tensor:
    """Growth by a factor of a thousand million until t = 21."""
    return y * double(1.0, 0.2)


def leaps(t: Tensor, y: Tensor) -> Tensor:
    """Growth that begins so suddenly that integers leave their range."""
    return torch.where(t > 10.2, 1e5, 1.0) * torch.ones_like(y) + 0.01 * y


@pytest.mark.parametrize("f", [grows, leaps])
def test_solves_on_integers_whose_grid_changes_lose_no_event(f: Any, monkeypatch: Any):
    taken_back, take_back = [], FixedPointLoop._take_back
    monkeypatch.setattr(FixedPointLoop, "_take_back", lambda *args: (taken_back.append(1), take_back(*args)))
    y0 = double(1e-3, 1.0, grad=True)
    events = [lambda t, y: y[0] - 1e6, tm.Event(lambda t, y: y[0] - 2.5, terminal=False)]
    for controller in (tm.FixedStep(0.15), tm.AdaptiveStep(1e-5, 1e-8)):
        found = []
        for gradient in (tm.MALI(exact=True), tm.Naive()):
            s = solve(f, y0, torch.linspace(0, 30, 31).double(), events, (gradient, tm.ALF(order=4), controller))
            found.append((s, torch.autograd.grad(s.event_t + s.event_y[1] + s.y.sum() / 1e6, y0)[0]))
        (exact, g), (naive, wanted) = found
        assert exact.stats.n_rescales > 0 and len(exact.t) == len(naive.t)
        assert abs(exact.event_t.item() - naive.event_t.item()) < 1e-8
        assert torch.allclose(g, wanted, rtol=1e-7)
        assert len(exact.event_times[1]) == len(naive.event_times[1]) > 0
        assert torch.allclose(exact.event_times[1], naive.event_times[1], rtol=1e-8)
    assert taken_back or f is grows


def test_the_time_of_an_event_can_be_learned():
    """A network in f, of which only the time of the event is known."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    f = lambda t, y: torch.cat([y[1:], net(y) - 2])  # noqa: E731
    optimizer, losses = torch.optim.Adam(net.parameters(), 0.05), []
    for _ in range(12):
        solution = tm.solve(f, double(1.0, 0.0), [0.0, 20.0], params=list(net.parameters()), event=height)
        loss = (solution.event_t - 1.6) ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5


def test_memory_of_mali_does_not_grow_with_the_number_of_steps_to_an_event():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).double()

    def peak(h: float) -> int:
        f, y0 = lambda t, y: 0.1 * net(y), torch.ones(32, 64, dtype=torch.float64)

        def run() -> None:
            method = tm.MALI(), ALF, tm.FixedStep(h)
            s = solve(f, y0, [0.0, 9.0], lambda t, y: t - 1 + 1e-3 * y.mean(), method, params=list(net.parameters()))
            (s.event_t + s.event_y.sum()).backward()

        return peak_bytes(run)

    assert peak(0.02) < 1.05 * peak(0.2)
