"""Behaviour of f is remembered from solve to solve, and never at the price of a wrong number."""

import gc

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm
from torchmali.field import behaviour

TIMES = (0.0, 1.0)
STEPS = tm.FixedStep(0.25)


class Net(nn.Module):
    """A small network with switches that PyTorch knows nothing of."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.rate = 0.0
        self.differentiates = False
        self.overwrites = False

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        u = torch.tanh(self.layer(y))
        if self.rate:
            u = nn.functional.dropout(u, self.rate, training=True)
        if self.differentiates:
            (slope,) = torch.autograd.grad(u.sum(), y, create_graph=torch.is_grad_enabled())
            u = u + slope
        return u


def remembered(f) -> dict:
    return behaviour._behaviours.get(f, {})


def gradient(f: nn.Module, y0: Tensor, method: tm.GradientMethod, **options) -> tuple[Tensor, ...]:
    f.zero_grad()
    y = y0.clone().requires_grad_()
    solution = tm.solve(f, y, TIMES, controller=STEPS, gradient=method, **options)
    (solution.y[-1] ** 2).sum().backward()
    assert y.grad is not None
    return solution.y.detach(), y.grad, *(p.grad for p in f.parameters() if p.grad is not None)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def y0() -> Tensor:
    return torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)


@pytest.mark.parametrize("method", [tm.MALI(), tm.MALI(exact=True), tm.ACA(), tm.Naive(), tm.Adjoint()], ids=repr)
def test_the_second_solve_gives_the_numbers_of_the_first(method, net, y0):
    first = gradient(net, y0, method)
    assert remembered(net)
    for x, y in zip(first, gradient(net, y0, method), strict=True):
        assert torch.equal(x, y)


def test_a_remembered_f_is_evaluated_without_a_look(net, y0):
    counted = []
    hook = net.register_forward_hook(lambda *_: counted.append(torch.is_grad_enabled()))
    for _ in range(2):
        tm.solve(net, y0, TIMES, controller=STEPS)
    hook.remove()
    # The first evaluation of a solve has a graph, to look for leaves. In later solves it has one for the same bits.
    assert counted == [True, *[False] * 4] * 2


@pytest.mark.parametrize("method", [tm.MALI(), tm.MALI(exact=True), tm.ACA(), tm.Naive()], ids=repr)
def test_an_f_that_begins_to_draw_is_noticed(method, net, y0):
    gradient(net, y0, method)
    net.rate = 0.5
    now = gradient(net, y0, method, generator=torch.Generator().manual_seed(1))
    fresh = Net().double()
    fresh.load_state_dict(net.state_dict())
    fresh.rate = 0.5
    expected = gradient(fresh, y0, method, generator=torch.Generator().manual_seed(1))
    assert all(map(torch.equal, now, expected))
    assert not remembered(net)


def test_an_f_that_begins_to_differentiate_is_noticed(net, y0):
    gradient(net, y0, tm.MALI())
    net.differentiates = True
    now, expected = gradient(net, y0, tm.MALI()), gradient(net, y0, tm.Naive())
    for x, y in zip(now, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=0)


def test_modes_shapes_and_parameters_are_told_apart(net, y0):
    tm.solve(net, y0, TIMES, controller=STEPS)
    net.eval()
    tm.solve(net, y0, TIMES, controller=STEPS)
    tm.solve(net, y0[:1], TIMES, controller=STEPS)
    net.layer.weight.requires_grad_(False)
    tm.solve(net, y0[:1], TIMES, controller=STEPS)
    assert len(remembered(net)) == 4


def test_an_f_that_needs_care_is_not_remembered(net, y0):
    norm = nn.Sequential(net.layer, nn.BatchNorm1d(3)).double()
    scale, hidden = torch.ones(3, dtype=torch.float64), [[nn.Parameter(torch.ones(3, dtype=torch.float64))]]

    def buffers(t: Tensor, y: Tensor) -> Tensor:
        return 0.1 * norm(y)

    def closure(t: Tensor, y: Tensor) -> Tensor:
        return scale * y

    class Hidden:
        def __call__(self, t: Tensor, y: Tensor) -> Tensor:
            return next(iter(hidden))[0] * y

    for f in (buffers, closure):
        tm.solve(f, y0, TIMES, controller=STEPS)
        assert not remembered(f)
    net.rate = 0.5
    tm.solve(net, y0, TIMES, controller=STEPS)
    assert not remembered(net)
    f = Hidden()
    for _ in range(2):  # it is told each time
        with pytest.warns(tm.SolverWarning, match="would get none"):
            tm.solve(f, y0, TIMES, controller=STEPS)
    with torch.autocast("cpu"):
        tm.solve(Net(), y0.float(), TIMES, controller=STEPS)
    assert not any(isinstance(x, Net) and x is not net for x in behaviour._behaviours)


def test_behaviours_die_with_their_function(net, y0):
    gc.collect()  # functions of earlier tests
    n = len(behaviour._behaviours)
    f = Net().double()
    tm.solve(f, y0, TIMES, controller=STEPS)
    assert len(behaviour._behaviours) == n + 1
    del f
    gc.collect()
    assert len(behaviour._behaviours) == n


def test_a_bound_method_is_known_again(net, y0):
    tm.solve(net.forward, y0, TIMES, controller=STEPS)
    (key,) = remembered(net)
    assert key[0] is Net.forward


def test_the_number_of_behaviours_is_limited(net):
    for n in range(1, behaviour.MANY + 3):
        tm.solve(net, torch.zeros(n, 3, dtype=torch.float64), TIMES, controller=tm.FixedStep(1.0))
    assert len(remembered(net)) == 2


def test_exact_mode_asks_once_whether_bits_depend_on_a_graph(net, y0):
    stats = [
        tm.solve(net, y0, TIMES, controller=STEPS, gradient=tm.MALI(exact=True)).stats.n_evals_forward for _ in range(3)
    ]
    assert stats == [6, 5, 5]


def test_a_wrong_answer_to_that_is_an_error_and_is_forgotten(net, y0):
    exact = tm.MALI(exact=True)
    gradient(net, y0, exact)
    layer = net.layer.forward
    # From now on the bits depend on whether there is a graph.
    net.layer.forward = lambda x: layer(x) * (1 + 1e-9 * torch.is_grad_enabled())  # type: ignore[method-assign]
    with pytest.raises(tm.NonRepeatableFieldError):
        gradient(net, y0, exact)
    assert not remembered(net)
    gradient(net, y0, exact)


class OwnLeaf(nn.Module):
    """Takes a derivative by y, of which it makes a leaf: always, or where y requires no gradient itself."""

    def __init__(self, always: bool):
        super().__init__()
        self.layer, self.always = nn.Linear(3, 3), always

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        keep = torch.is_grad_enabled()
        with torch.enable_grad():
            part = y[:, :2] if y.requires_grad and not self.always else y[:, :2].detach().requires_grad_()
            u = torch.tanh(self.layer(torch.cat([part, y[:, 2:]], 1)))
            (slope,) = torch.autograd.grad(u.sum(), part, create_graph=keep)
        return u + nn.functional.pad(slope, (0, 1))


def test_a_leaf_that_f_makes_of_a_y_without_gradient_is_no_forgotten_one(y0):
    torch.manual_seed(0)
    net = OwnLeaf(always=False).double()
    found = [gradient(net, y0, tm.MALI()) for _ in range(2)]
    assert remembered(net), "f needs no care in later solves"
    wanted = gradient(net, y0, tm.Naive())
    for result in found:
        assert all(torch.allclose(x, y, 1e-12, 1e-12) for x, y in zip(result, wanted, strict=True))


def test_a_leaf_that_f_puts_in_the_place_of_y_is_told_of(y0):
    torch.manual_seed(0)
    with pytest.warns(tm.SolverWarning, match="would get none"):
        gradient(OwnLeaf(always=True).double(), y0, tm.MALI())
