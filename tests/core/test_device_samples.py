"""Times of each sample's own on a device that is not the CPU (tests/device.py): the CPU's values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device import NAME
from torch import Tensor, nn

import torchmali as tm
from torchmali.nn import ODERNN, ODERNNCell

NAN = float("nan")
FREE = tm.FixedStep(0.2, land=False)
CASES: list[tuple[Any, Any, Any]] = [
    (tm.ALF(), FREE, tm.MALI()),
    (tm.ALF(), FREE, tm.MALI(exact=True)),
    (tm.ALF(order=4), tm.AdaptiveStep(1e-2, 1e-3), tm.MALI()),
    (tm.Dopri5(), tm.AdaptiveStep(1e-2, 1e-3), tm.ACA()),
]


def assert_same_on_both(run: Any) -> None:
    for x, y in zip(run(NAME), run("cpu"), strict=True):
        assert (x.device.type, y.device.type) == (NAME, "cpu")
        torch.testing.assert_close(x.cpu(), y, rtol=1e-13, atol=1e-13, equal_nan=True)


def inputs(device: str, start: tuple[float, ...]) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double().to(device)
    t = torch.tensor([start, (1.1, 0.9, NAN), (1.5, NAN, NAN)]).double().to(device).requires_grad_()
    return net, torch.linspace(-1, 1, 9).double().reshape(3, 3).to(device).requires_grad_(), t


@pytest.mark.parametrize("spans", ["common", "own"])
@pytest.mark.parametrize("observes", [False, True])
@pytest.mark.parametrize(("solver", "controller", "gradient"), CASES, ids=repr)
def test_outputs_of_samples_and_their_gradients_are_those_of_the_cpu(solver, controller, gradient, observes, spans):
    def run(device: str) -> list[Tensor]:
        net, y0, t = inputs(device, (0.0, 0.0, 0.0) if spans == "common" else (0.1, 1.2, 2.0))
        data = torch.linspace(0, 1, 9).double().reshape(3, 3).to(device)

        def loss(t: Tensor, y: Tensor, mask: Tensor, k: Tensor) -> Tensor:
            return (y.sum(1) - data[k, torch.arange(3, device=device)]).square() * torch.cos(t)

        how: Any = {"solver": solver, "controller": controller, "gradient": gradient, "spans": spans}
        solution = tm.solve(lambda t, y: net(y) * torch.cos(t), y0, t, **how, observe=loss if observes else None)
        total = solution.y.nan_to_num().sin().sum() + (solution.observed.sum() if observes else 0.0)
        return [solution.y, *torch.autograd.grad(total, [y0, t, *net.parameters()])]

    assert_same_on_both(run)


@pytest.mark.parametrize("reverse", [False, True])
def test_series_with_times_of_their_own_are_read_as_on_the_cpu(reverse):
    def run(device: str) -> list[Tensor]:
        net, h0, t = inputs(device, (0.1, 0.2, 2.0))
        rnn = ODERNN(ODERNNCell(lambda t, h: net(h) * t, nn.RNNCell(2, 3).double().to(device)))
        x = torch.linspace(-1, 1, 18).double().reshape(3, 3, 2).to(device)
        states, last = rnn(x, t.T, h0, reverse=reverse)
        return [states, last, *torch.autograd.grad(last.sin().sum(), [h0, t, *net.parameters()])]

    assert_same_on_both(run)
