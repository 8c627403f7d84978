"""Layers at times of each sample's own: ODEBlock and NeuralCDE (ODERNN: test_rnn.py)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm
from torchmali.nn import CubicControl, LinearControl, NeuralCDE, ODEBlock, linear_coeffs, natural_cubic_coeffs

NAN = float("nan")
FREE = tm.FixedStep(0.1, land=False)


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3).double()

    def forward(self, t: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.linear(y)) * torch.cos(t) * scale


def ragged(start: tuple[float, ...] = (0.0, 0.0, 0.0)) -> Tensor:
    after = torch.tensor([[0.5, 0.2, NAN], [1.0, NAN, NAN]]).double()
    return torch.cat([torch.tensor([start]).double(), after])


@pytest.mark.parametrize("spans", ["common", "own"])
def test_a_block_returns_y_at_the_last_time_of_each_sample(spans):
    t = ragged((0.0, 0.0, 0.0) if spans == "common" else (0.2, 1.5, 3.0))
    y0 = torch.linspace(-1, 1, 9).double().reshape(3, 3).requires_grad_()
    block = ODEBlock(Slope(), controller=FREE, spans=spans)
    every = ODEBlock(block.func, controller=FREE, spans=spans, all_outputs=True)
    how: Any = {"controller": FREE, "spans": spans, "args": (2.0,)}
    y = tm.solve(block.func, y0, t, **how).y
    torch.testing.assert_close(every(y0, 2.0, t=t), y, rtol=0, atol=0, equal_nan=True)
    last = torch.stack([y[2, 0], y[1, 1], y[0, 2]])
    torch.testing.assert_close(block(y0, 2.0, t=t), last, rtol=1e-12, atol=1e-12)
    inputs = [y0, *block.parameters()]
    found, truth = (torch.autograd.grad(x.square().sum(), inputs) for x in (block(y0, 2.0, t=t), last))
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_block_of_samples_with_their_own_spans_has_the_papers_setting():
    """With a start and an end of each, fixed steps need not be told to pass over output times."""
    block, y0 = ODEBlock(Slope(), spans="own"), torch.ones(3, 3).double()
    t = ragged((0.2, 1.5, 3.0)).requires_grad_()
    y = block(y0, t=t)
    (g,) = torch.autograd.grad(y.sum(), t)
    for b in range(2):
        n = 3 - b
        exact = ODEBlock(block.func, t[:n, b].tolist(), controller=tm.FixedStep(1e-3))(y0[b : b + 1])[0]
        torch.testing.assert_close(y[b], exact, rtol=0, atol=2e-2)
        assert bool(g[0, b]) and bool(g[n - 1, b]) and not g[1 : n - 1, b].any()
    assert torch.equal(y[2], y0[2])
    assert block.last_stats is not None and block.last_stats.n_steps == 6  # of the longest span, 1.3
    assert "spans='own'" in repr(block) and repr(copy.deepcopy(block)) == repr(block)
    with pytest.raises(tm.InvalidTimesError, match=r"block\(y0, t=t\)"):
        block(y0)
    with pytest.raises(tm.InvalidTimesError, match="share"):
        tm.audit(block, y0)


def test_a_call_may_have_times_that_all_samples_share():
    block, y0 = ODEBlock(Slope()), torch.ones(2, 3).double()
    assert torch.equal(block(y0, t=(0.0, 0.5)), ODEBlock(block.func, (0.0, 0.5))(y0))


def test_times_of_samples_are_not_those_of_a_block():
    with pytest.raises(tm.InvalidTimesError, match="belong to one batch"):
        ODEBlock(Slope(), ragged())
    with pytest.raises(tm.InvalidTimesError, match="share"):
        tm.audit(Slope(), torch.ones(3, 3).double(), ragged())


class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4 * 2).double()

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return torch.tanh(self.linear(z)).unflatten(-1, (4, 2))


@pytest.mark.parametrize("control", [CubicControl, LinearControl])
def test_series_of_different_lengths_end_at_their_own_times(control):
    """Each as by itself, up to its own end; dL/dt is dz/dt there."""
    torch.manual_seed(0)
    initial = nn.Linear(2, 4).double()
    x = torch.randn(3, 7, 2).double().requires_grad_()
    make = natural_cubic_coeffs if control is CubicControl else linear_coeffs
    coeffs = make(x)
    how: Any = {"control": control, "controller": tm.AdaptiveStep(1e-9, 1e-9), "solver": tm.ALF(order=6)}
    cde = NeuralCDE(Matrix(), initial, **how)
    t = torch.tensor([[0.0, 0.0, 0.0], [2.0, 1.5, NAN], [6.0, NAN, 4.2]]).double().requires_grad_()
    z = cde(coeffs, t=t)
    ends = [6.0, 1.5, 4.2]
    times = [torch.tensor([0.0, end]).double().requires_grad_() for end in ends]
    alone = torch.cat([cde(coeffs[b : b + 1], t=times[b]) for b in range(3)])
    torch.testing.assert_close(z, alone, rtol=0, atol=1e-6)
    inputs = [x, *cde.parameters()]
    found = torch.autograd.grad(z.square().sum(), [*inputs, t], retain_graph=True)
    truth = torch.autograd.grad(alone.square().sum(), [*inputs, *times])
    for ours, theirs in zip(found[:-1], truth, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    for b, row in enumerate((2, 1, 2)):
        torch.testing.assert_close(found[-1][row, b], truth[len(inputs) + b][1], rtol=0, atol=1e-4)
    every = NeuralCDE(cde.func, initial, all_outputs=True, **how)(coeffs, t=t)
    assert every.shape == (3, 3, 4) and torch.equal(every.isnan().any(-1), t.isnan())


def test_what_a_cde_cannot_do_at_times_of_each_series_is_refused():
    coeffs, knots = linear_coeffs(torch.randn(2, 5, 2).double()), torch.arange(5.0).double()
    t = torch.tensor([[0.0, 0.0], [2.0, 1.5]]).double()
    cde = NeuralCDE(Matrix(), nn.Linear(2, 4).double(), control=LinearControl)
    with pytest.raises(tm.IncompatibleError, match="land=False"):
        cde(coeffs, t=t)
    with pytest.raises(tm.IncompatibleError, match=r"knots.detach\(\)"):
        cde(coeffs, knots.requires_grad_(), t=t)
