"""torchmali.nn: solves as modules."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm
from examples.extending.new_solver import Verlet
from torchmali.nn import ODEBlock


class Slope(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, t: Tensor, y: Tensor, *args: Tensor) -> Tensor:
        return torch.tanh(self.linear(y)) * (1 + t) + sum(args, torch.zeros(()))


class ConvSlope(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.conv(y))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), ODEBlock(Slope()), nn.Linear(4, 1))


def test_the_default_is_the_papers_setting():
    block = ODEBlock(Slope())
    y = block(torch.randn(3, 4))
    assert y.shape == (3, 4)
    assert block.last_stats is not None
    assert (block.last_stats.n_steps, block.last_stats.n_evals_forward) == (4, 5)
    y.sum().backward()
    assert block.last_stats.n_vjps == 5


def test_outputs_of_a_block_cost_no_evaluations_by_default():
    counts = []
    for n in (2, 100):
        block = ODEBlock(Slope(), torch.linspace(0, 1, n), all_outputs=True)
        y = block(torch.randn(3, 4))
        y.sum().backward()
        assert y.shape == (n, 3, 4) and block.last_stats is not None
        counts.append((block.last_stats.n_evals_forward, block.last_stats.n_evals_backward))
    assert counts[0] == counts[1]
    assert ODEBlock(Slope(), solver=Verlet()).controller == tm.FixedStep(0.25)  # no interpolant


def test_a_block_is_solve():
    func, y0 = Slope(), torch.randn(3, 4)
    t, how = (0.0, 0.5, 2.0), {"solver": tm.ALF(order=4), "controller": tm.AdaptiveStep(), "gradient": tm.ACA()}
    expected = tm.solve(func, y0, t, **how, args=(torch.ones(4),)).y
    for times in (t, torch.tensor(t), nn.Parameter(torch.tensor(t))):
        every: Any = ODEBlock(func, times, **how, all_outputs=True)
        assert torch.equal(every(y0, torch.ones(4)), expected)
        assert torch.equal(ODEBlock(func, times, **how)(y0, torch.ones(4)), expected[-1])


def test_states_may_be_trees():
    block = ODEBlock(lambda t, y: {"a": -y["a"], "b": (y["a"],)})
    y = block({"a": torch.ones(2), "b": (torch.zeros(2),)})
    assert y["a"].shape == (2,) and y["b"][0].shape == (2,)


def test_learned_times_get_gradients():
    block = ODEBlock(Slope(), nn.Parameter(torch.tensor([0.0, 1.0])))
    block(torch.randn(3, 4)).sum().backward()
    assert isinstance(block.t, nn.Parameter) and block.t.grad is not None and block.t.grad.all()
    assert "t" in block.state_dict()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_blocks_are_copied_with_all_they_are(copied):
    net, x = model(), torch.randn(5, 2)
    y = net(x)
    again = copied(net)
    assert torch.equal(again(x), y)
    assert repr(again) == repr(net)
    again.load_state_dict(net.state_dict())
    assert [name for name, _ in net.named_parameters()][2:4] == ["1.func.linear.weight", "1.func.linear.bias"]


def test_blocks_go_to_other_dtypes():
    net = model().double()
    y = net(torch.randn(5, 2, dtype=torch.float64))
    assert y.dtype == torch.float64
    y.sum().backward()


@pytest.mark.parametrize("gradient", [tm.MALI(), tm.ACA(), tm.MALI(exact=True)], ids=repr)
def test_channels_last_stays(gradient):
    x = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last).requires_grad_()
    func: Any = ConvSlope()
    y = ODEBlock(func.to(memory_format=torch.channels_last), gradient=gradient)(x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.square().sum().backward()
    assert x.grad is not None and x.grad.is_contiguous(memory_format=torch.channels_last)


def test_a_tensor_of_times_that_would_lose_its_gradient_is_refused():
    with pytest.raises(tm.InvalidTimesError, match=r"nn.Parameter\(t\)"):
        ODEBlock(Slope(), torch.tensor([0.0, 1.0], requires_grad=True))


def test_a_block_says_what_it_is():
    text = repr(ODEBlock(Slope(), (0, 2), solver=tm.ALF(order=4), gradient=tm.MALI(exact=True)))
    assert "t=(0, 2), solver=ALF(order=4), controller=FixedStep(h=0.25, land=False), gradient=MALI(exact=True)" in text


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("compiles_f", [False, True])
@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_a_model_with_a_block_trains_under_torch_compile(backend, compiles_f):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    net, other, x = model(), model(), torch.randn(5, 2)
    block: Any = net[1]
    if compiles_f:
        block.func = torch.compile(block.func, backend=backend)
    compiled, graphs = torch.compile(net, backend=backend), []
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, other)]
    for _ in range(4):
        losses = [run(x).square().mean() for run in (compiled, other)]
        torch.testing.assert_close(*losses)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[-1] == graphs[0], "recompiled"
