"""Solves that end at an event: the time of the event, the state there, and their derivatives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torchdiffeq
from torch import Tensor, nn

import torchmali as tm
from examples import bouncing_ball
from torchmali.events import first_root
from torchmali.loop.fixed_point import FixedPointLoop
from torchmali.measure import peak_bytes

GRAVITY = 9.81
ALF, RK4, FIXED = tm.ALF(), tm.RK4(), tm.FixedStep(0.3)
TIGHT = tm.AdaptiveStep(1e-10, 1e-10)
METHODS: list[Any] = [  # on steps that are exact for a parabola
    (tm.Naive(), RK4, FIXED),
    (tm.Naive(), ALF, FIXED),
    (tm.ACA(), RK4, FIXED),
    (tm.ACA(), tm.Dopri5(), TIGHT),
    (tm.ACA(), tm.Dopri8(), TIGHT),
    (tm.MALI(), ALF, FIXED),
    (tm.MALI(), ALF, tm.FixedStep(0.3, land=False)),
    (tm.MALI(checkpoint_every=2), tm.ALF(order=4), TIGHT),
    (tm.MALI(exact=True), ALF, FIXED),
    (tm.MALI(exact=True), tm.ALF(order=4), TIGHT),
    (tm.Adjoint(), tm.Dopri5(), TIGHT),
]
NAMES = [f"{type(solver).__name__}-{method}-{controller}" for method, solver, controller in METHODS]


def double(*x: float, grad: bool = False) -> Tensor:
    return torch.tensor(x[0] if len(x) == 1 else x, dtype=torch.float64, requires_grad=grad)


def fall(t: Tensor, y: Tensor, gravity: Any = GRAVITY) -> Tensor:
    return torch.stack([y[1], -gravity + 0 * y[1]])


def height(t: Tensor, y: Tensor, *args: Any) -> Tensor:
    return y[0]


def pendulum(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[1], -torch.sin(y[0])])


def turn(t: Tensor, y: Tensor) -> Tensor:
    """The circle (cos t, sin t), from (1, 0)."""
    return torch.stack([-y[1], y[0]])


def solve(f: Any, y0: Any, t: Any, event: Any, method: Any = None, **how: Any) -> Any:
    gradient, solver, controller = method or (tm.Naive(), tm.Dopri5(), TIGHT)
    return tm.solve(f, y0, t, event=event, solver=solver, controller=controller, gradient=gradient, **how)


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_falling_body_hits_the_ground_when_it_should_and_with_the_right_derivatives(method: Any):
    y0, gravity = double(10.0, 1.0, grad=True), double(GRAVITY, grad=True)
    solution = solve(fall, y0, torch.linspace(0, 5, 11).double(), height, method, args=(gravity,))
    root = math.sqrt(1 + 2 * GRAVITY * 10)
    t = (1 + root) / GRAVITY
    assert solution.event_t.shape == () and abs(solution.event_t.item() - t) < 1e-11
    assert solution.event_y.shape == (2,) and abs(solution.event_y[0].item()) < 1e-13
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


def test_twenty_bounces_of_a_ball_follow_the_closed_form():
    elasticity, state, t = 0.9, double(1.0, 0.0), 0.0
    event = tm.Event(height, direction="down")
    for n in range(20):
        solution = solve(fall, state, [t, t + 10.0], event, (tm.ACA(), tm.Dopri5(), tm.AdaptiveStep(1e-8, 1e-8)))
        t, state = solution.event_t.item(), torch.stack([double(0.0), -elasticity * solution.event_y[1]])
        first = math.sqrt(2 / GRAVITY)
        wanted = first * (1 + 2 * sum(elasticity**k for k in range(1, n + 1)))
        assert abs(t - wanted) < 1e-10


def test_a_ball_may_start_again_from_the_very_state_at_the_event():
    """Its height is round-off then, of either sign: no event, even without a direction."""
    state, t, times = double(1.0, 0.0), 0.0, []
    for _ in range(6):
        solution = solve(fall, state, [t, t + 10.0], height)
        t, state = solution.event_t.item(), solution.event_y * double(1.0, -1.0)
        times.append(t)
    first = math.sqrt(2 / GRAVITY)
    assert all(abs(t - (1 + 2 * n) * first) < 1e-9 for n, t in enumerate(times))


def test_all_zeros_of_a_pendulum_are_recorded_without_an_end():
    """Quarter periods of a pendulum that starts at rest at an angle a: K(sin a/2)."""
    k2 = math.sin(0.5) ** 2
    a, b = 1.0, math.sqrt(1 - k2)
    for _ in range(8):
        a, b = (a + b) / 2, math.sqrt(a * b)
    quarter = math.pi / 2 / a
    events = [tm.Event(height, terminal=False), tm.Event(lambda t, y: y[1], direction="up", terminal=False)]
    method = (tm.Naive(), tm.Dopri8(), tm.AdaptiveStep(1e-11, 1e-11))
    solution = solve(pendulum, double(1.0, 0.0), [0.0, 30.0], events, method)
    zeros, rests = solution.event_times
    n = len([k for k in range(20) if (2 * k + 1) * quarter < 30])
    assert torch.allclose(zeros, quarter * (2 * torch.arange(n).double() + 1), rtol=0, atol=1e-8)
    assert torch.allclose(rests, quarter * (4 * torch.arange(len(rests)).double() + 2), rtol=0, atol=1e-8)
    assert len(rests) == 4
    assert solution.event_t is None and solution.y.shape == (2, 2)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def forward(self, t: Tensor, y: dict[str, Tensor], w: Tensor) -> dict[str, Tensor]:
        u = self.layers(torch.stack([y["a"], y["b"][0], t]))
        return {"a": w + 0.3 * u[0] * torch.sin(t), "b": u[1:] - 0.1 * y["b"]}


class Surface(nn.Module):
    def __init__(self):
        super().__init__()
        self.level = nn.Parameter(double(1.2))

    def forward(self, t: Tensor, y: dict[str, Tensor], w: Tensor) -> Tensor:
        return torch.stack([y["b"][0] - 50, y["a"] + 0.2 * torch.sin(y["b"][0]) * w - self.level * torch.cos(0.1 * t)])


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


class Case:
    """A solve to an event with parameters everywhere, and the loss of its results."""

    def __init__(self, times: Any = (0.0, 0.5, 0.95, 1.0, 2.5)):
        self.f, self.g = Field(), Surface()
        self.y0 = {"a": double(0.1), "b": torch.full((1,), 0.4, dtype=torch.float64)}
        self.w, self.t = double(0.9), double(*times)
        self.inputs = [*self.y0.values(), self.w, self.t, self.g.level, *self.f.parameters()]
        for x in self.inputs:
            x.requires_grad_()

    def loss(self, method: Any, **how: Any) -> Tensor:
        s = solve(self.f, self.y0, self.t, self.g, method, args=(self.w,), **how)
        assert s.event_index == (0, 1)
        loss = 2 * s.event_t + torch.sin(s.event_y["a"]) + 3 * s.event_y["b"].sum()
        if s.observed is not None:
            return loss + s.observed
        assert len(s.t) == len(s.y["a"]) == 4
        return loss + (s.y["a"] ** 2).sum() + (s.y["b"][-1] * s.y["a"][1]).sum()


@pytest.mark.parametrize("controller", STEPS, ids=str)
@pytest.mark.parametrize("gradient, solver", SOLVERS, ids=str)
def test_gradients_on_fixed_steps_are_central_differences(gradient: Any, solver: Any, controller: Any):
    case, method = Case(), (gradient, solver, controller)
    grads = torch.autograd.grad(case.loss(method), case.inputs)
    plain = (tm.Naive(), solver, controller)
    torch.manual_seed(1)
    pairs = list(zip(case.inputs, grads, strict=True))
    # The inputs one by one, or all at once where each is compared with Naive's anyway.
    for group in [[pair] for pair in pairs] if isinstance(gradient, tm.Naive) else [pairs]:
        assert_central_differences(case, plain, group)


def assert_central_differences(case: Case, method: Any, group: list[tuple[Tensor, Tensor]]) -> None:
    """group: inputs with their gradients, which are moved together."""
    directions, e, ends = [torch.randn_like(x) for x, _ in group], 3e-5, []
    for move in (1, -1, 2, -2):
        with torch.no_grad():
            for (x, _), direction in zip(group, directions, strict=True):
                x.add_(direction, alpha=move * e)
            ends.append(case.loss(method).item())
            for (x, _), direction in zip(group, directions, strict=True):
                x.sub_(direction, alpha=move * e)
    found = (8 * (ends[0] - ends[1]) - (ends[2] - ends[3])) / (12 * e)
    wanted = sum((g * direction).sum().item() for (_, g), direction in zip(group, directions, strict=True))
    assert abs(found - wanted) < 1e-8 * max(1, abs(found))


@pytest.mark.parametrize("controller", [*STEPS, tm.AdaptiveStep(1e-4, 1e-5)], ids=str)
@pytest.mark.parametrize("gradient, solver", SOLVERS, ids=str)
def test_all_gradients_are_those_of_autograd_on_the_same_steps(gradient: Any, solver: Any, controller: Any):
    """Gradients by all output times, also by those after the event, on which its last step may end."""
    if controller.adaptive and solver.error_order is None:
        return
    limit = 1e-7 if gradient.on_integers else 1e-11
    for times in ((0.0, 0.5, 0.95, 1.0, 2.5), (0.0, 0.5, 0.95, 1.0, 1.26)):
        case = Case(times)
        found = torch.autograd.grad(case.loss((gradient, solver, controller)), case.inputs)
        wanted = torch.autograd.grad(case.loss((tm.Naive(), solver, controller)), case.inputs)
        for x, y in zip(found, wanted, strict=True):
            assert torch.allclose(x, y, rtol=limit, atol=limit)


def test_the_adjoint_agrees_where_its_tolerance_is_tight():
    case, method = Case(), (tm.Adjoint(), tm.Dopri5(), TIGHT)
    found = torch.autograd.grad(case.loss(method), case.inputs)
    wanted = torch.autograd.grad(case.loss((tm.Naive(), tm.Dopri5(), TIGHT)), case.inputs)
    for x, y in zip(found, wanted, strict=True):
        assert torch.allclose(x, y, rtol=1e-7, atol=1e-7)


def bend(t: Tensor, y: Tensor, slopes: Tensor) -> Tensor:
    """Up until t = 0.5, down until 1, then down less steeply."""
    return slopes[int(t >= 0.5) + int(t >= 1.0)] + 0 * y


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@pytest.mark.parametrize("level, wanted", [(0.4, 0.2), (0.9, 0.45), (-0.1, 0.5 + 1.1 / 3), (-0.7, 1.5), (-0.5, 1.0)])
def test_steps_to_an_event_end_on_jumps(method: Any, level: float, wanted: float):
    """Before, between and behind jumps, and on one."""
    y0, slopes = torch.zeros((), dtype=torch.float64, requires_grad=True), double(2.0, -3.0, -0.4, grad=True)
    how: dict[str, Any] = {"args": (slopes,), "jumps": [0.5, 1.0]}
    solution = solve(bend, y0, torch.linspace(0, 3, 7).double(), lambda t, y, _: y - level, method, **how)
    assert abs(solution.event_t.item() - wanted) < 1e-10
    assert abs(solution.event_y.item() - level) < 1e-10
    if wanted == 1:  # the time of an event on a jump has two derivatives
        return
    (g_y, g) = torch.autograd.grad(solution.event_t, [y0, slopes])
    piece = int(wanted > 0.5) + int(wanted > 1)
    spans = [min(wanted, 0.5), min(max(wanted - 0.5, 0), 0.5), max(wanted - 1, 0)]
    assert abs(g_y.item() + 1 / slopes[piece].item()) < 1e-9
    assert torch.allclose(g, -double(*spans) / slopes[piece].detach(), atol=1e-9)


class Jumping(Field):
    """A field that jumps at 0.3 and at 0.72."""

    def forward(self, t: Tensor, y: Any, w: Tensor) -> Any:
        slope = super().forward(t, y, w)
        side = int(t >= 0.3) - 2 * int(t >= 0.72)
        return {"a": slope["a"] + 0.1 * side * w, "b": slope["b"] + 0.2 * side * y["a"]}


class JumpingCase(Case):
    def __init__(self, times: Any = (0.0, 0.5, 0.95, 1.0, 2.5)):
        super().__init__(times)
        f = Jumping()
        f.load_state_dict(self.f.state_dict())
        self.f = f
        self.inputs = [*self.y0.values(), self.w, self.t, self.g.level, *f.parameters()]

    def loss(self, method: Any, **how: Any) -> Tensor:
        return super().loss(method, jumps=[0.3, 0.72], **how)


@pytest.mark.parametrize("controller", [*STEPS, tm.AdaptiveStep(1e-4, 1e-5)], ids=str)
@pytest.mark.parametrize("gradient, solver", SOLVERS, ids=str)
def test_gradients_of_events_behind_jumps(gradient: Any, solver: Any, controller: Any):
    if controller.adaptive and solver.error_order is None:
        return
    limit = 1e-7 if gradient.on_integers else 1e-11
    for times in ((0.0, 0.5, 0.95, 1.0, 2.5), (0.0, 0.5, 0.72, 1.0, 2.5)):
        case = JumpingCase(times)
        found = torch.autograd.grad(case.loss((gradient, solver, controller)), case.inputs)
        wanted = torch.autograd.grad(case.loss((tm.Naive(), solver, controller)), case.inputs)
        for x, y in zip(found, wanted, strict=True):
            assert torch.allclose(x, y, rtol=limit, atol=limit)
    if controller.adaptive:
        return
    case = JumpingCase()  # Naive's are those of central differences
    pairs = list(
        zip(case.inputs, torch.autograd.grad(case.loss((tm.Naive(), solver, controller)), case.inputs), strict=True)
    )
    assert_central_differences(case, (tm.Naive(), solver, controller), pairs)


def test_the_adjoint_of_an_event_behind_jumps():
    for times in ((0.0, 0.5, 0.95, 1.0, 2.5), (0.0, 0.5, 0.72, 1.0, 2.5)):
        case = JumpingCase(times)
        found = torch.autograd.grad(case.loss((tm.Adjoint(), tm.Dopri5(), TIGHT)), case.inputs)
        wanted = torch.autograd.grad(case.loss((tm.Naive(), tm.Dopri5(), TIGHT)), case.inputs)
        for x, y in zip(found, wanted, strict=True):
            assert torch.allclose(x, y, rtol=1e-7, atol=1e-7)


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


@pytest.mark.parametrize("direction, wanted", [("both", 0.5), ("up", 1.5), ("down", 0.5)])
def test_a_direction_says_which_sign_changes_count(direction: str, wanted: float):
    event = tm.Event(lambda t, y: y[0], direction=direction)
    solution = solve(turn, double(1.0, 0.0), [0.0, 10.0], event)
    assert abs(solution.event_t.item() - wanted * math.pi) < 1e-8


def test_the_first_of_several_events_ends_the_solve():
    events = [
        tm.Event(lambda t, y: t - 1.7, terminal=False),
        lambda t, y: y[0] + 0.5,  # t = 2 pi / 3
        tm.Event(lambda t, y: torch.stack([y, y - 0.9]), direction="down"),  # the first component: t = pi / 2
    ]
    solution = solve(turn, double(1.0, 0.0), torch.linspace(0, 5, 51).double(), events)
    assert abs(solution.event_t.item() - math.acos(0.9)) < 1e-9 and solution.event_index == (2, 2)
    solution = solve(turn, double(1.0, 0.0), torch.linspace(0, 5, 51).double(), events[:2])
    assert abs(solution.event_t.item() - 2 * math.pi / 3) < 1e-9 and solution.event_index == (1, 0)
    passed, last = solution.event_times
    assert torch.allclose(passed, double(1.7)[None]) and torch.equal(last, solution.event_t[None])
    assert len(solution.t) == 21 and solution.y.shape == (21, 2) and solution.t[-1] < solution.event_t
    assert torch.allclose(solution.y[:, 0], torch.cos(solution.t), atol=1e-8)


def test_two_events_in_one_interval_come_in_their_order():
    events = [lambda t, y: y - 0.52, lambda t, y: y - 0.51, lambda t, y: y - 0.53]
    solution = solve(lambda t, y: torch.ones_like(y), double(0.0), [0.0, 1.0], events, (tm.Naive(), RK4, FIXED))
    assert solution.event_index == (1, 0) and abs(solution.event_t.item() - 0.51) < 1e-15


@pytest.mark.parametrize("method", METHODS, ids=NAMES)
def test_a_zero_at_the_start_is_no_event(method: Any):
    solution = solve(fall, double(0.0, 5.0), [0.0, 3.0], height, method)
    assert abs(solution.event_t.item() - 10 / GRAVITY) < 1e-9


def test_backwards_in_time():
    y0, t = double(0.0, 0.0, grad=True), double(0.0, grad=True)
    for method in METHODS:
        times = torch.stack([t, t - 0.5, t - 2.0, t - 4.0])
        solution = solve(fall, y0, times, lambda s, y: y[0] + 10, method)
        assert abs(solution.event_t.item() + math.sqrt(20 / GRAVITY)) < 1e-9 and len(solution.t) == 2
        dy, dt = torch.autograd.grad(solution.event_t, [y0, t])
        assert torch.allclose(dy, double(-1.0, -solution.event_t.item()) / solution.event_y[1].item(), atol=1e-8)
        assert abs(dt.item() - 1) < 1e-8  # f does not depend on t


def test_an_event_at_an_output_time_keeps_that_output():
    for method in METHODS:
        y0 = double(1.0, grad=True)
        times = [0.0, 0.25, 0.5, 0.75, 1.0]
        solution = solve(lambda t, y: -torch.ones_like(y) + 0 * y, y0, times, lambda t, y: y - 0.25, method)
        assert abs(solution.event_t.item() - 0.75) < 1e-12
        assert len(solution.t) in (3, 4) and abs(torch.autograd.grad(solution.event_t, y0)[0].item() - 1) < 1e-9
    method = tm.MALI(), ALF, tm.FixedStep(0.25)
    solution = solve(lambda t, y: -torch.ones_like(y), y0, times, lambda t, y: y, method)
    assert solution.event_t.item() == 1 and len(solution.t) == 5


def test_no_event_raises_or_is_flagged():
    with pytest.raises(tm.EventNotFoundError, match=r"t = 2:.*was 1; -0\.4161"):
        solve(turn, double(1.0, 0.0), [0.0, 1.0, 2.0], [lambda t, y: y[0] ** 2 + y[1] ** 2, tm.Event(height, "up")])
    solution = solve(turn, double(1.0, 0.0), [0.0, 1.0], height, on_no_event="flag")
    assert solution.event_t is solution.event_y is solution.event_index is None
    assert solution.y.shape == (2, 2) and [len(times) for times in solution.event_times] == [0]


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


def test_f_is_not_evaluated_for_events():
    controller, events = tm.AdaptiveStep(1e-3, 1e-3), tm.Event(height, terminal=False)
    for solver in (tm.ALF(), tm.ALF(order=4), tm.Dopri5(), tm.Tsit5(), tm.Bosh3(), tm.HeunEuler()):
        plain, looked = (
            solve(pendulum, double(1.0, 0.0), [0.0, 10.0], event, (tm.ACA(), solver, controller))
            for event in (None, events)
        )
        assert looked.stats.n_evals_forward == plain.stats.n_evals_forward and len(looked.event_times[0]) == 3
        assert torch.equal(plain.y, looked.y)


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


def test_float32_states_and_inference():
    y0 = torch.tensor([10.0, 1.0])
    with torch.inference_mode():
        solution = tm.solve(fall, y0, [0.0, 5.0], event=height, controller=tm.AdaptiveStep(1e-4, 1e-4))
    assert solution.event_y.dtype == torch.float32 and solution.event_t.dtype == torch.float64
    assert abs(solution.event_t.item() - 1.53341) < 1e-4 and "event at 1.53" in repr(solution)


def test_a_function_of_the_time_alone_has_no_gradient_but_ends_the_solve():
    y0 = double(1.0, 0.0, grad=True)
    solution = solve(turn, y0, [0.0, 2.0], lambda t, y: t - 1, (tm.MALI(), tm.ALF(order=4), TIGHT))
    assert abs(solution.event_t.item() - 1) < 1e-15 and not solution.event_t.requires_grad
    g = torch.autograd.grad(solution.event_y[0], y0)[0]
    assert torch.allclose(g, double(math.cos(1), -math.sin(1)), atol=1e-8)


def test_what_cannot_be_an_event_is_refused():
    y0, t = double(1.0, 0.0), [0.0, 1.0]
    for event, error, match in (
        (3, tm.InvalidOptionError, "function of"),
        ([], tm.InvalidOptionError, "no events"),
        (lambda t, y: 1.0, tm.InvalidFieldError, "a float"),
        (lambda t, y: y[0] > 0, tm.InvalidFieldError, "torch.bool"),
        (lambda t, y: y[0] * math.nan, tm.NonFiniteError, "nan"),
        (lambda t, y: y[: 1 + bool(t > 0)], tm.InvalidFieldError, "same shape"),
    ):
        with pytest.raises(error, match=match):
            solve(turn, y0, t, event)
    with pytest.raises(tm.InvalidOptionError, match="direction"):
        tm.Event(height, direction="left")
    with pytest.raises(tm.InvalidOptionError, match="on_no_event"):
        solve(turn, y0, t, height, on_no_event="ignore")
    with pytest.raises(tm.IncompatibleError, match="Reversible has none"):
        solve(turn, y0, t, height, (tm.ACA(), tm.Reversible(), FIXED))
    with pytest.raises(tm.InvalidOptionError, match="observe"):
        tm.solve(turn, y0, t, event=height, outputs=tm.outputs.stored.StoredOutputs(2))  # pyright: ignore
    with pytest.raises(tm.IncompatibleError, match="dense=True"):
        solve(turn, y0, t, height, dense=True)
    with pytest.raises(tm.IncompatibleError, match="event= out"):
        solve(turn, y0, double(0.0, 1.0)[:, None].expand(2, 2), height)


@pytest.mark.parametrize(
    "phi, wanted",
    [
        (lambda x: 1 - x, 1.0),
        (lambda x: 2 - x**9, 2 ** (1 / 9)),
        (lambda x: math.exp(-9 * x) - 1e-4, math.log(1e4) / 9),
    ],
)
def test_roots_are_found_to_round_off_in_few_evaluations(phi: Any, wanted: float):
    n = 0

    def counted(x: float) -> float:
        nonlocal n
        n += 1
        return phi(x)

    root = first_root(counted, 0.0, 3.0, phi(0.0), phi(3.0))
    assert abs(root - wanted) <= 4 * math.ulp(wanted) and n < 70


def test_the_elasticity_of_a_ball_is_learned_from_the_time_of_a_bounce(tmp_path: Path):
    found = bouncing_ball.main(["--bounces", "3", "--iterations", "6", "--out", str(tmp_path)])
    assert abs(found[-1].elasticity - bouncing_ball.TRUTH) < 1e-12
    assert (tmp_path / "bouncing_ball.png").stat().st_size > 10_000


def test_the_code_of_a_solve_with_an_event_leads_back_to_the_start():
    y0 = double(1.0, 0.1)
    method = tm.MALI(exact=True), ALF, tm.FixedStep(0.1)
    solution = solve(pendulum, y0, [0.0, 0.7, 5.0], height, method, return_code=True)
    assert torch.equal(tm.solve_back(pendulum, solution.code), y0)


def test_the_code_of_a_solve_over_jumps_to_an_event_leads_back_to_the_start():
    y0, how = double(0.3, 0.1), {"jumps": [0.5, 1.0], "args": (double(2.0, -3.0, -0.4),), "return_code": True}
    solution = solve(bend, y0, [0.0, 3.0], lambda t, y, _: y[0] + 0.4, (tm.MALI(exact=True), ALF, FIXED), **how)
    assert abs(solution.event_t.item() - 1.5) < 1e-9
    assert torch.equal(tm.solve_back(bend, solution.code), y0)


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


# torchdiffeq's call.


class Ball(nn.Module):
    """A ball that falls with drag."""

    def __init__(self):
        super().__init__()
        self.gravity, self.drag = nn.Parameter(double(GRAVITY)), nn.Parameter(double(0.1))

    def forward(self, t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return y[1], -self.gravity - self.drag * y[1]


def bounces(odeint_event: Any, n: int, **how: Any) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Times of bounces, each with less speed than the last, and gradients by height, gravity, drag and the start."""
    f, h, t0 = Ball(), torch.full((1,), 2.0, dtype=torch.float64, requires_grad=True), double(0.3, grad=True)
    t, state, times = t0, (h, torch.zeros_like(h)), []
    for _ in range(n):
        t, (heights, speeds) = odeint_event(f, state, t, event_fn=lambda t, y: y[0], atol=1e-10, rtol=1e-10, **how)
        assert heights.shape == speeds.shape == (2, 1)
        state = heights[-1] + 1e-7, -0.9 * speeds[-1]
        times.append(t)
    loss = torch.stack(times).sum() + state[1].sum() ** 2
    return times, torch.autograd.grad(loss, [h, f.gravity, f.drag, t0])


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"gradient": "aca"},
        {"gradient": "mali"},
        {"gradient": tm.MALI(exact=True)},
        {"odeint_interface": tm.odeint_adjoint},
        {"odeint_interface": tm.odeint_adjoint, "method": "tsit5"},
    ],
)
def test_odeint_event_is_that_of_torchdiffeq(how: Any):
    times, grads = bounces(tm.odeint_event, 3, **how)
    wanted, expected = bounces(torchdiffeq.odeint_event, 3)
    assert all(abs(x - y).item() < 1e-7 for x, y in zip(times, wanted, strict=True))
    assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-5) for x, y in zip(grads, expected, strict=True))


def test_odeint_event_with_fixed_steps_and_backwards_in_time():
    f, state = Ball(), (torch.full((1,), 10.0).double(), torch.full((1,), 30.0).double())
    how: Any = {"event_fn": lambda t, y: y[0] * (3 + t), "options": {"step_size": 0.01}, "method": "rk4"}
    t, (heights, _) = tm.odeint_event(f, state, double(0.3), reverse_time=True, **how)
    wanted, _ = torchdiffeq.odeint_event(f, state, double(0.3), reverse_time=True, event_fn=how["event_fn"])
    assert abs(t - wanted).item() < 1e-8 and heights.shape == (2, 1)
    later, y = tm.odeint(turn, double(1.0, 0.0), [0.0, 1.0, 5.0], event_fn=lambda t, y: torch.sin(t) - 0.5, rtol=1e-9)
    assert abs(later.item() - math.pi / 6) < 1e-12 and torch.allclose(y[1, 1], double(0.5), atol=1e-7)


@pytest.mark.parametrize("interface", [tm.odeint, tm.odeint_adjoint])
def test_odeint_event_knows_jumps(interface: Any):
    y0, slopes = torch.zeros((), dtype=torch.float64), double(2.0, -3.0, -0.4, grad=True)
    how: dict[str, Any] = {"args": (slopes,), "options": {"jump_t": double(0.5, 1.0)}, "odeint_interface": interface}
    t, y = tm.odeint_event(bend, y0, 0.0, event_fn=lambda t, y: y + 0.7, **how)
    assert abs(t.item() - 1.5) < 1e-9 and abs(y[-1].item() + 0.7) < 1e-9
    (g,) = torch.autograd.grad(t, slopes)
    assert torch.allclose(g, double(0.5, 0.5, 0.5) / 0.4, atol=1e-7)


def test_odeint_event_says_what_it_lacks():
    with pytest.raises(tm.InvalidOptionError, match="step_size"):
        tm.odeint_event(turn, double(1.0, 0.0), 0.0, event_fn=height, method="rk4")
    with pytest.raises(tm.InvalidTimesError, match="direction to go"):
        tm.odeint(turn, double(1.0, 0.0), [0.0], event_fn=height)
    with pytest.raises(tm.StepLimitError):
        tm.odeint_event(turn, double(1.0, 0.0), 0.0, event_fn=lambda t, y: y + 2, options={"max_num_steps": 50})
    with pytest.raises(tm.EventNotFoundError):
        tm.odeint_event(lambda t, y: 1 + 0 * y, double(1.0), 0.0, event_fn=lambda t, y: y)
