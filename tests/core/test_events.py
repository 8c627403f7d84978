"""Solves that end at an event: its time, the state there, and what comes before it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from event_cases import ALF, FIXED, GRAVITY, METHODS, NAMES, RK4, bend, double, fall, height, pendulum, solve, turn

import torchmali as tm
from examples.extending.new_solver import Verlet
from torchmali.events import first_root


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


def test_times_of_events_are_no_integers():
    events = [height, tm.Event(lambda t, y: y[0] - 5, terminal=False)]
    solution = solve(fall, double(10.0, 0.0), torch.tensor([0, 1, 5]), events)
    assert abs(solution.event_t.item() - math.sqrt(20 / GRAVITY)) < 1e-10
    assert abs(solution.event_times[1].item() - math.sqrt(10 / GRAVITY)) < 1e-10
    assert solution.t.tolist() == [0, 1]


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


def test_f_is_not_evaluated_for_events():
    controller, events = tm.AdaptiveStep(1e-3, 1e-3), tm.Event(height, terminal=False)
    for solver in (tm.ALF(), tm.ALF(order=4), tm.Dopri5(), tm.Tsit5(), tm.Bosh3(), tm.HeunEuler()):
        plain, looked = (
            solve(pendulum, double(1.0, 0.0), [0.0, 10.0], event, (tm.ACA(), solver, controller))
            for event in (None, events)
        )
        assert looked.stats.n_evals_forward == plain.stats.n_evals_forward and len(looked.event_times[0]) == 3
        assert torch.equal(plain.y, looked.y)


def test_float32_states_and_inference():
    y0 = torch.tensor([10.0, 1.0])
    with torch.inference_mode():
        solution = tm.solve(fall, y0, [0.0, 5.0], event=height, controller=tm.AdaptiveStep(1e-4, 1e-4))
    assert solution.event_y.dtype == torch.float32 and solution.event_t.dtype == torch.float64
    assert abs(solution.event_t.item() - 1.53341) < 1e-4 and "event at 1.53" in repr(solution)


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
    with pytest.raises(tm.IncompatibleError, match="Verlet has none"):
        solve(turn, y0, t, height, (tm.ACA(), Verlet(), FIXED))
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
