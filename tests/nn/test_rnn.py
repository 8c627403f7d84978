"""Recurrent networks whose state moves between observations."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm
from torchmali.nn.rnn import ODERNN, ODERNNCell

NAN = float("nan")
BATCH, LENGTH, CHANNELS, HIDDEN = 3, 6, 2, 4
EULER: dict[str, Any] = {"solver": tm.Euler(), "controller": tm.FixedStep(float("inf")), "gradient": tm.ACA()}


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        self.n_calls = 0

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        self.n_calls += 1
        return torch.tanh(self.linear(h)) * (1 + t)


def network(**how: Any) -> ODERNN:
    return ODERNN(ODERNNCell(Slope(), nn.GRUCell(CHANNELS, HIDDEN, dtype=torch.float64), **how))


def data() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(BATCH, LENGTH, CHANNELS, dtype=torch.float64)
    t = (0.1 + torch.rand(LENGTH, dtype=torch.float64)).cumsum(0)
    return x, t, torch.randn(BATCH, HIDDEN, dtype=torch.float64)


def by_hand(net: ODERNN, x: Tensor, t: Tensor, h: Tensor, observed: Tensor, order: list[int]) -> list[Tensor]:
    """One Euler step from time to time; row by row. By position in time."""
    states, before = [h] * len(order), order[0]
    for i in order:
        h = h + (t[i] - t[before]) * net.cell.func(t[before], h)
        rows = [net.cell.cell(x[b : b + 1, i], h[b : b + 1]) if observed[b, i] else h[b : b + 1] for b in range(BATCH)]
        states[i], before = (h := torch.cat(rows)), i
    return states


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
def test_a_series_is_read_as_by_hand(reverse, is_masked):
    net, (x, t, h0) = network(**EULER), data()
    observed = torch.rand(BATCH, LENGTH) < (0.5 if is_masked else 2.0)
    order = list(range(LENGTH))[:: -1 if reverse else 1]
    expected = by_hand(net, x, t, h0, observed, order)
    states, last = net(x, t, h0, observed if is_masked else None, reverse=reverse)
    torch.testing.assert_close(states, torch.stack(expected, 1), rtol=1e-12, atol=1e-12)
    assert torch.equal(last, states[:, 0 if reverse else -1])


def test_rows_without_an_observation_keep_the_state_that_moved():
    cell, (x, _, h) = network().cell, data()
    observed = torch.tensor([True, False, True])
    moved = tm.solve(cell.func, h, (0.5, 1.75), controller=tm.FixedStep(0.25)).y[-1]
    out = cell(x[:, 0], h, 0.5, 1.75, observed)
    assert torch.equal(out[1], moved[1])
    assert torch.equal(out[observed], cell.cell(x[:, 0], moved)[observed])
    assert not torch.equal(out[0], moved[0])


def test_what_was_not_observed_may_be_nan():
    net, (x, t, h0) = network(), data()
    observed = torch.rand(BATCH, LENGTH) < 0.5
    gradients = []
    for missing in (torch.nan, 7.0):
        x[~observed] = missing
        states, _ = net(x, t, h0, observed)
        gradients.append(torch.autograd.grad(states.square().sum(), list(net.parameters())))
    for ours, expected in zip(*gradients, strict=True):
        assert torch.equal(ours, expected)


def test_times_that_repeat_are_not_solved_between():
    net, (x, _, h0) = network(**EULER), data()
    net(x[:, :4], torch.tensor([1.0, 1.0, 2.0, 2.0]), h0)
    assert net.cell.func.n_calls == 1
    cell, h = net.cell, h0
    assert torch.equal(cell(x[:, 0], h, 0.3, 0.3), cell.cell(x[:, 0], h))


@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_of_mali_are_those_of_autograd(reverse):
    x, t, h0 = data()
    observed, gradients = torch.rand(BATCH, LENGTH) < 0.5, []
    for gradient in (tm.MALI(), tm.Naive()):
        torch.manual_seed(1)
        net = network(gradient=gradient)
        inputs = [
            *net.parameters(),
            x.clone().requires_grad_(),
            t.clone().requires_grad_(),
            h0.clone().requires_grad_(),
        ]
        states, _ = net(*inputs[-3:], observed, reverse=reverse)
        gradients.append(torch.autograd.grad(states.square().sum(), inputs))
    assert all(g.abs().max() > 1e-3 for g in gradients[0])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def ragged() -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Series of 6, 3, 1 and 0 observations, with times of each."""
    lengths = [6, 3, 1, 0]
    x, h0 = torch.randn(4, LENGTH, CHANNELS).double(), torch.randn(4, HIDDEN).double()
    t = (0.1 + torch.rand(4, LENGTH).double()).cumsum(1) + torch.arange(4).double().unsqueeze(1)
    for b, n in enumerate(lengths):
        x[b, n:], t[b, n:] = NAN, NAN
    return x, t, h0, lengths


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {"solver": tm.ALF(order=4), "controller": tm.FixedStep(1.0), "gradient": tm.MALI()},
        {"solver": tm.ALF(order=4), "controller": tm.FixedStep(1.0), "gradient": tm.Naive()},
        {"solver": tm.Dopri5(), "controller": tm.FixedStep(1.0), "gradient": tm.ACA()},
    ],
    ids=repr,
)
def test_series_with_times_of_their_own_are_read_as_one_by_one(how, reverse):
    """One step over each gap, on both sides: the same y and gradients, those of the times too."""
    net, (x, t, h0, lengths) = network(**how), ragged()
    x, t, h0 = (z.requires_grad_() for z in (x, t, h0))
    inputs = [x, t, h0, *net.parameters()]
    states, last = net(x, t, h0, reverse=reverse)
    alone: list[Any] = [
        net(x[b : b + 1, :n], t[b, :n], h0[b : b + 1], reverse=reverse) if n else (None, h0[b : b + 1])
        for b, n in enumerate(lengths)
    ]
    for b, n in enumerate(lengths):
        if n:
            torch.testing.assert_close(states[b, :n], alone[b][0][0], rtol=1e-12, atol=1e-12)
        rest = h0[b] if reverse or not n else alone[b][1][0]
        torch.testing.assert_close(states[b, n:], rest.expand(LENGTH - n, HIDDEN), rtol=1e-12, atol=1e-12)
    expected = torch.cat([h for _, h in alone])
    torch.testing.assert_close(last, expected, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, 4 * HIDDEN).double().reshape(4, HIDDEN)
    found, truth = (torch.autograd.grad((h * weights).sum(), inputs) for h in (last, expected))
    for ours, theirs in zip(found, truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    assert found[1][0].all() and not found[1][t.isnan()].any() and not found[0][t.isnan()].any()


def test_a_mask_marks_what_was_not_observed_of_series_with_times_of_their_own():
    net, (x, t, h0, _) = network(**EULER), ragged()
    observed = ~t.isnan()
    observed[0, 2:4] = False
    _, last = net(x, t, h0, observed)
    kept = [0, 1, 4, 5]
    h = h0[:1]
    for before, i in zip([0, *range(5)], range(6), strict=True):
        h = net.cell(x[:1, i], h, t[0, before].item(), t[0, i].item(), torch.tensor([i in kept]))
    torch.testing.assert_close(last[:1], h, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(last[0], net(x, t, h0)[1][0])


def test_gaps_of_padding_alone_are_not_solved():
    net, (x, t, h0, _) = network(**EULER), ragged()
    t[0, 3:] = NAN
    net(x, t, h0)
    assert net.cell.func.n_calls == 2
    cell = net.cell
    one, other = torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    assert torch.equal(cell(x[:, 0].nan_to_num(), h0, one, other), cell.cell(x[:, 0].nan_to_num(), h0))


def test_the_default_is_the_papers_setting():
    cell, (x, _, h) = network().cell, data()
    same = ODERNNCell(cell.func, cell.cell, solver=tm.ALF(), controller=tm.FixedStep(0.25), gradient=tm.MALI())
    assert repr(same) == repr(cell)
    cell(x[:, 0], h, 0.0, 1.0).sum().backward()
    assert cell.last_stats is not None
    assert (cell.last_stats.n_steps, cell.last_stats.n_vjps) == (4, 5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_networks_are_copied_with_all_they_are(copied):
    net, series = network(controller=tm.FixedStep(0.5)), data()
    again = copied(net)
    assert torch.equal(again(*series)[0], net(*series)[0])
    assert "controller=FixedStep(h=0.5)" in repr(net) and repr(again) == repr(net)


@pytest.mark.parametrize(
    ("change", "error", "fragments"),
    [
        ({"x": torch.zeros(3, 6)}, tm.InvalidStateError, ["(batch, length, channels)", "(3, 6)"]),
        ({"x": torch.zeros(3, 0, 2), "t": torch.zeros(0)}, tm.InvalidStateError, ["1 or more", "(3, 0, 2)"]),
        ({"t": torch.zeros(2, 6)}, tm.InvalidTimesError, ["(2, 6)", "needs (6,)", "or (3, 6)"]),
        ({"t": torch.tensor([0.0, 1, 3, 2, 4, 5]).expand(3, 6)}, tm.InvalidTimesError, ["t[0, 2] = 3, t[0, 3] = 2"]),
        ({"t": torch.tensor([0.0, 1, 2, 3, 4, torch.inf]).expand(3, 6)}, tm.InvalidTimesError, ["finite"]),
        (
            {"t": torch.tensor([0.0, 1, 2, 3, 4, NAN]).expand(3, 6), "observed": torch.ones(3, 6).bool()},
            tm.InvalidTimesError,
            ["x[0, 5] is `observed`"],
        ),
        ({"t": torch.tensor([0.0, 1, 3, 2, 4, 5])}, tm.InvalidTimesError, ["t[2] = 3, t[3] = 2", "reverse=True"]),
        ({"observed": torch.ones(3, 6, 2).bool()}, tm.InvalidStateError, ["(3, 6, 2)", "any(-1)"]),
        ({"observed": torch.ones(3, 6)}, tm.InvalidStateError, ["torch.float32", "bool of shape (3, 6)"]),
    ],
)
def test_series_that_do_not_fit_are_refused(change, error, fragments):
    x, t, h0 = data()
    with pytest.raises(error) as caught:
        network()(**{"x": x, "t": t, "h0": h0, **change})
    for fragment in fragments:
        assert fragment in str(caught.value)
