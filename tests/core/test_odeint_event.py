"""torchdiffeq's `odeint_event`, and `odeint` with an event function."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torchdiffeq
from event_cases import GRAVITY, bend, double, height, turn
from torch import Tensor, nn

import torchmali as tm


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
    how: Any = {"event_fn": lambda t, y: y[0] * (3 + t), "method": "rk4"}
    how["options"] = {"step_size": 0.01, "interp": "cubic"}
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
