"""States of low precision and complex states in `odeint`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchdiffeq
from torch import Tensor, nn

import torchmali as tm
from torchmali import torchdiffeq as ours

TIMES = torch.linspace(0, 1, 5, dtype=torch.float64)
LOW = [torch.float16, torch.bfloat16]


class Sampler(nn.Module):
    """A velocity field of low precision, which notes the dtypes that it sees."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.linear, self.seen = nn.Linear(3, 3, dtype=dtype), set()
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-1, 1, 9).reshape(3, 3))
            self.linear.bias.fill_(0.25)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.seen.add((t.dtype, y.dtype))
        return torch.tanh(self.linear(y)) * (1 + t)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("how", [{"method": "euler"}, {"method": "midpoint"}, {"rtol": 1e-3, "atol": 1e-3}])
def test_low_precision_is_seen_by_f_and_returned_and_carried_in_float32(dtype: torch.dtype, how: Any):
    func, y0, t = Sampler(dtype), torch.linspace(-1, 1, 6).reshape(2, 3).to(dtype), torch.linspace(0, 1, 33).to(dtype)
    with torch.no_grad():
        y = ours.odeint(func, y0, t, **how)
    assert func.seen == {(dtype, dtype)} and y.dtype == dtype and y.shape == (33, 2, 3)
    exact = ours.odeint(Sampler(torch.float32), y0.float(), t.float(), **{**how, "rtol": 1e-4, "atol": 1e-4})
    theirs: Any = torchdiffeq.odeint(func, y0, t, **how) if "method" in how else None
    error = (y[-1] - exact[-1]).abs().max()
    assert error < 4 * torch.finfo(dtype).eps
    if theirs is not None:  # it rounds y to the low precision in each of 32 steps
        assert error <= (theirs[-1] - exact[-1]).abs().max()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("gradient", ["naive", "aca", "mali", "adjoint"])
def test_low_precision_can_be_trained(dtype: torch.dtype, gradient: str):
    grads = []
    for func, kind in ((Sampler(dtype), dtype), (Sampler(torch.float32), torch.float32)):
        y0 = torch.linspace(-1, 1, 6).reshape(2, 3).to(kind).requires_grad_()
        y = ours.odeint(func, y0, TIMES.to(kind), rtol=1e-3, atol=1e-3, gradient=gradient)
        y[-1].float().pow(2).sum().backward()
        grads.append([y0.grad, func.linear.weight.grad])
    for low, full in zip(*grads, strict=True):
        assert low.dtype == dtype and (low - full).norm() < 0.05 * full.norm()


def test_a_state_of_several_precisions_keeps_each():
    y0 = torch.ones(2, dtype=torch.float16), torch.ones(3, dtype=torch.float32), torch.ones(2, dtype=torch.complex64)
    y = ours.odeint(lambda t, y: (-y[0], -y[1], 1j * y[2]), y0, TIMES.float(), method="rk4")
    assert [x.dtype for x in y] == [x.dtype for x in y0]
    assert (y[2][-1] - torch.exp(torch.tensor(1j))).abs().max() < 1e-3
    t, end = ours.odeint_event(lambda t, y: -y, y0[0], torch.tensor(0.0), event_fn=lambda t, y: y.sum() - 1, rtol=1e-3)
    assert t.dtype == torch.float32 and abs(t.item() - 0.6931) < 2e-3 and end.dtype == torch.float16


def test_solve_stays_strict():
    with pytest.raises(tm.InvalidStateError, match="bfloat16"):
        tm.solve(lambda t, y: -y, torch.ones(2).bfloat16(), [0.0, 1.0])
    with pytest.raises(tm.InvalidStateError, match="view_as_real"):
        tm.solve(lambda t, y: -y, torch.ones(2, dtype=torch.complex64), [0.0, 1.0])


class Waves(nn.Module):
    """A complex f with a complex and a real parameter, which is not holomorphic."""

    def __init__(self):
        super().__init__()
        weight = torch.view_as_complex(torch.linspace(-0.6, 0.6, 18, dtype=torch.float64).reshape(3, 3, 2))
        self.weight, self.rate = nn.Parameter(weight), nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return 1j * self.rate * y + torch.tanh(y.abs()) * (y @ self.weight.to(y.dtype)) * torch.cos(t)


def complex_start() -> Tensor:
    return torch.view_as_complex(torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 3, 2)).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("method", ["dopri5", "bosh3", "euler", "rk4", "explicit_adams", "alf", "scipy_solver"])
def test_complex_solutions_are_torchdiffeqs(dtype: torch.dtype, method: str):
    y0, t = complex_start().detach().to(dtype), TIMES.float() if dtype == torch.complex64 else TIMES
    func = Waves()
    how: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    y = ours.odeint(func, y0, t, method=method, **how)
    plain: Any = torchdiffeq.odeint(func, y0, t, method=method if method in ("euler", "rk4") else "dopri5", **how)
    if method == "explicit_adams":
        plain = torchdiffeq.odeint(func, y0, t, method=method)
    assert y.dtype == dtype and y.shape == (5, 2, 3)
    assert (y - plain).abs().max() < (1e-6 if method in ("euler", "rk4", "explicit_adams") else 2e-3)


def complex_gradients(package: Any, func: Waves, **how: Any) -> list[Tensor]:
    y0, t = complex_start(), TIMES.clone().requires_grad_()
    function = getattr(package, how.pop("function", "odeint"))
    y = function(func, y0, t, rtol=1e-9, atol=1e-11, **how)
    loss = y.abs().pow(2).sum() + y.real.sum()
    return list(torch.autograd.grad(loss, [y0, t, *func.parameters()]))


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"gradient": "aca"},
        {"gradient": "mali"},
        {"gradient": "mali", "method": "alf6"},
        {"gradient": tm.MALI(exact=True)},
        {"gradient": "adjoint"},
        {"function": "odeint_adjoint"},
        {
            "function": "odeint_adjoint",
            "adjoint_options": {"norm": lambda x: torch.stack([z.abs().max() for z in x]).max()},
        },
    ],
)
def test_complex_gradients_are_those_of_plain_autograd(how: Any):
    func = Waves()
    expected = complex_gradients(torchdiffeq, func)
    found = complex_gradients(ours, func, **how)
    assert all((a - b).abs().max() < 1e-6 * (1 + b.abs().max()) for a, b in zip(found, expected, strict=True))


def test_norms_tolerances_events_and_callbacks_see_complex_states():
    seen: list[Any] = []

    class Told(Waves):
        def callback_step(self, t0: Tensor, y0: Tensor, dt: Tensor) -> None:
            seen.append(y0.dtype)

    def norm(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return x.abs().max()

    y0, how = complex_start().detach(), {"atol": torch.full((2, 3), 1e-8), "options": {"norm": norm}}
    y = ours.odeint(Told(), y0, TIMES, rtol=1e-6, **how)
    assert set(seen) == {torch.complex128}
    assert (y - torchdiffeq.odeint(Waves(), y0, TIMES)).abs().max() < 1e-5
    t, end = ours.odeint_event(
        lambda t, y: 1j * y, torch.tensor([1.0 + 0j], dtype=torch.complex128), 0.0, event_fn=lambda t, y: y.real.sum()
    )
    assert abs(t.item() - torch.pi / 2) < 1e-6 and abs(end[-1, 0].imag.item() - 1) < 1e-6
