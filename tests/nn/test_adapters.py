"""Adapters: the calls of flow_matching and torchcfm, held to torchdiffeq and closed forms."""

import doctest
import math
from typing import Any

import pytest
import torch
import torchdiffeq
from flow import Net
from torch import Tensor

import torchmali as tm
import torchmali.adapters.flow_matching as flow_matching
import torchmali.adapters.torchcfm as torchcfm
from torchmali.adapters.flow_matching import ODESolver
from torchmali.adapters.torchcfm import NeuralODE
from torchmali.measure import LiveBytes

NET = Net(3, context=1).double()


def model(x: Tensor, t: Tensor, condition: Tensor) -> Tensor:
    return NET(t, x, condition)


def inputs() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return tuple(torch.randn(5, n, dtype=torch.float64, generator=g).requires_grad_() for n in (3, 1))  # pyright: ignore


def gradients(loss: Tensor, x: Tensor, condition: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, [x, condition, *NET.parameters()])


GRIDS: list[tuple[dict[str, Any], str]] = [
    ({"step_size": 0.1, "method": "euler"}, "0 1"),
    ({"step_size": 0.07, "method": "midpoint"}, "0 1"),
    ({"step_size": None, "method": "heun3"}, "0 0.2 0.5 1"),
    ({"step_size": 0.1, "method": "euler"}, "1 0.5 0"),
]


@pytest.mark.parametrize("how, grid", GRIDS, ids=lambda x: str(x))
def test_samples_and_gradients_are_those_of_torchdiffeq(how, grid):
    (x, condition), times = inputs(), torch.tensor([float(t) for t in grid.split()])
    found = ODESolver(model).sample(
        x, time_grid=times, return_intermediates=True, enable_grad=True, condition=condition, **how
    )
    options = {} if how["step_size"] is None else {"step_size": how["step_size"]}
    wanted = torchdiffeq.odeint(
        lambda t, x: model(x, t, condition), x, times, method=how["method"], options=options, atol=1e-5, rtol=1e-5
    )
    assert isinstance(wanted, Tensor)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)  # times are float32
    pairs = zip(*(gradients(y.pow(3).sum(), x, condition) for y in (found, wanted)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    last = ODESolver(model).sample(x, time_grid=times, condition=condition, **how)
    assert torch.equal(last, found[-1].detach()) and not last.requires_grad


@pytest.mark.parametrize("method", ["alf", "alf4_5"])
def test_the_default_gradient_of_a_leapfrog_is_malis(method):
    (x, condition), how = inputs(), {"step_size": 0.05, "method": method, "enable_grad": True}
    found = gradients(ODESolver(model).sample(x, condition=condition, **how).pow(3).sum(), x, condition)
    naive = ODESolver(model, gradient=tm.Naive()).sample(x, condition=condition, **how)
    for a, b in zip(found, gradients(naive.pow(3).sum(), x, condition), strict=True):
        assert (a - b).norm() <= 1e-12 * b.norm()

    def peak(step_size: float) -> int:
        with LiveBytes() as live:
            y = ODESolver(model).sample(x, condition=condition, **{**how, "step_size": step_size})
            gradients(y.sum(), x, condition)
        return live.peak

    assert peak(0.005) <= 1.05 * peak(0.05)


@pytest.mark.parametrize("exact", [True, False])
def test_the_likelihood_of_a_linear_flow_has_its_closed_form(exact):
    rate = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def log_p0(z: Tensor) -> Tensor:
        return -0.5 * z.square().sum(1) - 1.5 * math.log(2 * math.pi)

    source, found = ODESolver(lambda x, t, rate: rate * x).compute_likelihood(
        x, log_p0, 0.01, "alf4_5", exact_divergence=exact, enable_grad=True, rate=rate
    )
    torch.testing.assert_close(source, x * math.exp(-0.4), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(found, log_p0(x * math.exp(-0.4)) - 3 * 0.4, rtol=1e-8, atol=1e-8)
    (slope,) = torch.autograd.grad(found.sum(), rate)
    wanted = (x.square().sum() * math.exp(-0.8) - 3 * len(x)).item()
    assert slope.item() == pytest.approx(wanted, rel=1e-8)


def test_a_likelihood_needs_times_from_data_to_noise():
    with pytest.raises(tm.InvalidTimesError, match="from 1 to 0"):
        ODESolver(model).compute_likelihood(torch.zeros(2, 3), lambda z: z.sum(1), 0.1, time_grid=(0.0, 1.0))


@pytest.mark.parametrize("solver", ["euler", "rk4_classic", "alf"])
def test_a_trajectory_has_exact_gradients(solver):
    (x, condition), times = inputs(), torch.linspace(0, 1, 6)

    def field(t: Tensor, x: Tensor) -> Tensor:
        return NET(t, x, condition)

    node = NeuralODE(field, solver=solver, sensitivity="adjoint", step_size=0.05)
    t_span, found = node(x, times)
    assert torch.equal(t_span, times) and found.shape == (6, 5, 3)
    naive = NeuralODE(field, solver=solver, step_size=0.05, gradient=tm.Naive()).trajectory(x, times)
    assert isinstance(node.gradient, tm.MALI if solver == "alf" else tm.ACA)
    pairs = zip(*(gradients(y.pow(3).sum(), x, condition) for y in (found, naive)), strict=True)
    for a, b in pairs:
        assert (a - b).norm() <= 1e-12 * b.norm()


@pytest.mark.parametrize("module", [flow_matching, torchcfm])
def test_the_examples_of_the_docstrings_run(module):
    found = doctest.testmod(module)
    assert found.attempted >= 4 and found.failed == 0
