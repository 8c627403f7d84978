"""Holes in "never silently wrong" that an attack on the library found, and that are closed.

Others of that attack stand where they belong: random numbers in test_randomness.py, threads and hooks in
test_threads.py, mixed scales in test_exact_scales.py, the advice in test_audit.py.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm
from torchmali.measure import peak_bytes
from torchmali.nn import ODEBlock


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# Steps within which f contracts: a stage rebuilt from the end of a step is not the one that was there.


def slowing(t: Tensor, y: Tensor) -> Tensor:
    return torch.where(t < 1, -(y**3), -y)


def gradient(f: Any, y0: Tensor, times: list[float], **how: Any) -> Tensor:
    y = y0.clone().requires_grad_()
    return torch.autograd.grad(tm.solve(f, y, times, **how).y[-1].sum(), y)[0]


def told(run: Any) -> tuple[Any, list[str]]:
    """What it returns, and the warnings that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tm.SolverWarning)
        return run(), [str(w.message) for w in caught]


@pytest.mark.parametrize("method", [tm.ACA(), tm.MALI(), tm.MALI(checkpoint_every=1)], ids=repr)
@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4), tm.ALF(order=6), tm.Reversible(tm.RK4())], ids=repr)
@pytest.mark.parametrize(
    ("f", "size", "times", "h", "dtype"),
    [
        (slowing, 100.0, [0.0, 2.0], 1.0, torch.float64),
        (lambda t, y: -8 * torch.tanh(y), 2.0, [0.0, 1.0], 1.0, torch.float32),
        (lambda t, y: -8 * torch.tanh(y), 2.0, [0.0, 1.0], 0.5, torch.float32),
    ],
    ids=["cubic", "one step", "two steps"],
)
def test_a_step_that_contracts_is_differentiated_from_its_kept_start(f, size, times, h, dtype, solver, method):
    y0 = torch.tensor([size, 0.7 * size], dtype=dtype)
    if f is slowing and solver.order > 2:
        y0 = y0 / 80  # or higher orders leave the range of the floats
    how: dict[str, Any] = {"solver": solver, "controller": tm.FixedStep(h)}
    exact, _ = told(lambda: gradient(f, y0, times, gradient=tm.Naive(), **how))
    found, _ = told(lambda: gradient(f, y0, times, gradient=method, **how))
    # One ulp in y0 moves these float32 gradients by up to 5e-5.
    is_kept = method != tm.MALI()
    assert difference(found, exact) < (1e-12 if dtype == torch.float64 else 1e-5 if is_kept else 5e-4)


@pytest.mark.filterwarnings("ignore:f contracts too much")
def test_a_start_that_is_rebuilt_as_nan_is_no_start():
    """Logistic growth backwards in time: the inverse leaves the range of the floats."""
    y0 = torch.tensor([0.5, 1.0, 1000.0], dtype=torch.float64)
    how: dict[str, Any] = {"controller": tm.FixedStep(1.25)}
    exact = gradient(lambda t, y: y * (1 - y), y0, [0.0, -5.0], gradient=tm.Naive(), **how)
    found, _ = told(lambda: gradient(lambda t, y: y * (1 - y), y0, [0.0, -5.0], gradient=tm.MALI(), **how))
    assert (found / exact - 1).abs().max() < 1e-12


# What a large component hides.


def duffing(t: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    return p, q - q**3 + 0.3 * torch.cos(1.2 * t)


SHAPES = {
    "a row": (lambda q, p, c: torch.stack([q, p, c]), lambda y: y),
    "(1, n)": (lambda q, p, c: torch.stack([q, p, c])[None], lambda y: y[0]),
    "(n, 1)": (lambda q, p, c: torch.stack([q, p, c])[:, None], lambda y: y[:, 0]),
    "one sample of two": (lambda q, p, c: torch.stack([q, p, c]).expand(2, 3), lambda y: y.mT),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_clock_beside_an_oscillator_hides_no_drift(shape):
    join, split = SHAPES[shape]

    def f(t: Tensor, y: Tensor) -> Tensor:
        q, p, clock = split(y)
        dq, dp = duffing(t, q, p)
        dy = torch.stack([dq, dp, torch.ones_like(clock)])
        return dy.mT if shape == "one sample of two" else dy.reshape(y.shape)

    y0 = join(*torch.tensor([1.2, 0.0, 1e5])).clone()
    how: dict[str, Any] = {"controller": tm.FixedStep(0.1)}

    def oscillator(method: tm.GradientMethod) -> Tensor:
        y = y0.clone().requires_grad_()
        end = split(tm.solve(f, y, [0.0, 80.0], gradient=method, **how).y[-1])
        return torch.autograd.grad(end[:2].sum(), y)[0]

    exact = oscillator(tm.ACA())
    found, _ = told(lambda: oscillator(tm.MALI()))
    assert difference(found, exact) < 1e-3
    bare, messages = told(lambda: oscillator(tm.MALI(checkpoint_every=None)))
    assert difference(bare, exact) > 2e-3 and "about as wrong" in messages[0]


def test_components_that_pass_through_zero_raise_no_alarm():
    """A start at rest, an end at rest, and sines that cross zero at both: judged by how far they move."""
    y0 = torch.zeros(6)

    def f(t: Tensor, y: Tensor) -> Tensor:
        return torch.cos(torch.arange(1.0, 7.0) * t) * (1 + 0.1 * torch.sin(y))

    for n in (20, 200, 2000):
        how: dict[str, Any] = {"controller": tm.FixedStep(2 * math.pi / n)}
        found, messages = told(lambda how=how: gradient(f, y0, [0.0, 2 * math.pi], **how))
        assert not messages
        assert difference(found, gradient(f, y0, [0.0, 2 * math.pi], gradient=tm.ACA(), **how)) < 1e-5


@pytest.mark.parametrize("method", [tm.MALI(), tm.MALI(checkpoint_every=None)], ids=repr)
def test_a_component_that_starts_at_rest_in_zero_is_judged_on_the_scale_of_its_row(method):
    """z = v = 0 gives it no scale of its own, and the round-off of the backward pass is not infinite."""
    y0 = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)

    def f(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([-y[1], 1.3 * t * y[0]])

    got = tm.solve(f, y0, [0.0, 1.0], controller=tm.FixedStep(0.1), gradient=method)
    _, messages = told(lambda: torch.autograd.grad(got.y[-1].sum(), y0))
    assert got.stats.reconstruction_error is not None and got.stats.reconstruction_error < 1e-14 and not messages


# What a large state, or a large batch, hides.


def beside_one_that_contracts(
    n: int, k: float, h: float, solver: tm.ALF, dtype: torch.dtype, clock: float | None = None, logs: Any = None
) -> tuple[float, tm.Stats]:
    """How far off MALI's gradient is where 1 of n components contracts, and moves another. logs: a cast for a log."""
    p = torch.tensor(0.7, dtype=dtype, requires_grad=True)
    y0 = torch.linspace(1.1, 2, n, dtype=dtype)

    def f(t: Tensor, y: Tensor) -> Tensor:
        if logs is not None:
            y.detach().to(logs)
        rest = -0.1 * y[2:] if clock is None else torch.cat([-0.1 * y[2:-1], torch.ones_like(y[-1:])])
        return torch.cat([-k * (y[:1] - 1), p * torch.sin(3 * y[:1]) * y[1:2], rest])

    if clock is not None:
        y0[-1] = clock
    how: dict[str, Any] = {"solver": solver, "controller": tm.FixedStep(h)}
    exact, _ = told(lambda: tm.solve(f, y0, [0.0, 1.0], gradient=tm.Naive(), **how))
    (found, stats), _ = told(lambda: _derivative(tm.solve(f, y0, [0.0, 1.0], **how), p))
    return difference(found, _derivative(exact, p)[0]), stats


def _derivative(got: tm.Solution, p: Tensor) -> tuple[Tensor, tm.Stats]:
    return torch.autograd.grad(got.y[-1][1], p)[0], got.stats


@pytest.mark.parametrize("clock", [None, 1e6])
@pytest.mark.parametrize(
    ("k", "h", "order", "dtype", "limit"),
    [(25.0, 0.005, 6, torch.float64, 1e-12), (10.0, 0.02, 4, torch.float32, 1e-5)],
)
@pytest.mark.parametrize("n", [4, 200])
def test_a_component_that_contracts_in_a_large_state_is_solved_again(n, k, h, order, dtype, limit, clock):
    off, stats = beside_one_that_contracts(n, k, h, tm.ALF(order, refresh="never"), dtype, clock)
    assert off < limit and stats.n_reruns == 1


@pytest.mark.parametrize(
    ("k", "h", "order", "dtype", "limit"),
    [
        (15.0, 0.02, 6, torch.float64, 1e-12),
        (20.0, 0.002, 2, torch.float64, 1e-8),
        (9.0, 0.02, 4, torch.float32, 2e-5),  # drifts that are judged by what they do to the gradient
        (10.0, 0.02, 4, torch.float32, 2e-5),
    ],
)
def test_a_few_rows_that_contract_in_a_large_batch_are_solved_again(k, h, order, dtype, limit):
    """6 rows of 400: their share of the whole gradient is small, and their own is to be right."""
    torch.manual_seed(0)
    rate = torch.full((400,), 0.1, dtype=dtype)
    rate[:6] = k
    p, y0 = torch.full((400,), 0.7, dtype=dtype, requires_grad=True), torch.rand(400, 8, dtype=dtype) + 1

    def f(t: Tensor, y: Tensor) -> Tensor:
        a, b = y[:, 0], y[:, 1]
        return torch.cat([torch.stack([-rate * (a - 1), p * torch.sin(3 * a) * b], 1), -0.1 * y[:, 2:]], 1)

    def grads(method: tm.GradientMethod) -> tuple[Tensor, tm.Stats]:
        how: dict[str, Any] = {"solver": tm.ALF(order, refresh="never"), "controller": tm.FixedStep(h)}
        got = tm.solve(f, y0, [0.0, 1.0], gradient=method, **how)
        return torch.autograd.grad(got.y[-1][:, 1].square().sum(), p)[0], got.stats

    (exact, _), _ = told(lambda: grads(tm.Naive()))
    (found, stats), _ = told(lambda: grads(tm.MALI()))
    assert difference(found[:6], exact[:6]) < limit and stats.n_reruns == 1


def test_a_benign_solve_of_many_components_evaluates_f_no_more_often():
    """Components that are small by chance drift more on their own scale, and that says nothing."""
    net, y0 = mlp(), 0.5 * torch.randn(512, 64)
    got = tm.solve(lambda t, y: net(y), y0.requires_grad_(), [0.0, 1.0], controller=tm.FixedStep(0.02))
    torch.autograd.grad(got.y[-1].square().sum(), y0)
    assert (got.stats.n_evals_backward, got.stats.n_reruns) == (51, 0)
    assert (got.stats.reconstruction_error or 0.0) > 1e-5


# Integers and memory layouts: dropout masks follow the layout of what they are drawn for.


class Observer(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.5))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return nn.functional.dropout(self.w * y, 0.5).sum()


@pytest.mark.parametrize("exact", [False, True, "int64"])
def test_an_observer_with_dropout_sees_the_layout_of_y0_in_both_passes(exact):
    torch.manual_seed(0)
    y0, observe = torch.randn(5, 7), Observer()
    got = tm.solve(
        lambda t, y: -y.t().contiguous().t(),
        y0.requires_grad_(),
        torch.linspace(0, 1, 5),
        controller=tm.FixedStep(0.05),
        gradient=tm.MALI(exact=exact),
        observe=observe,
    )
    (g,) = torch.autograd.grad(got.observed, observe.w)
    assert difference(observe.w.detach() * g, got.observed.detach()) < 1e-6  # it is linear in w


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.conv.weight.data = self.conv.weight.data.to(memory_format=torch.channels_last)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.conv(nn.functional.dropout(torch.relu(y), 0.5))


LAYOUTS = {
    "contiguous": lambda y: y,
    "channels_last": lambda y: y.to(memory_format=torch.channels_last),
    "transposed": lambda y: y.transpose(1, 3).contiguous().transpose(1, 3),
    "every second": lambda y: torch.cat([y, y], 3)[..., ::2] + 0 * y,
    "expanded": lambda y: y[:1].expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("exact", [False, True, "int64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_under_any_memory_layout_is_differentiated_as_autograd_does(layout, exact):
    torch.manual_seed(0)
    f, y0 = Conv().double(), LAYOUTS[layout](torch.randn(2, 4, 6, 6, dtype=torch.float64))

    def grads(method: tm.GradientMethod) -> Tensor:
        torch.manual_seed(1)
        y = y0.detach().requires_grad_()
        got = tm.solve(f, y, [0.0, 1.0], controller=tm.FixedStep(0.1), gradient=method)
        found = torch.autograd.grad(got.y[-1].square().sum(), [y, *f.parameters()])
        return torch.cat([g.flatten() for g in found])

    assert difference(grads(tm.MALI(exact=exact)), grads(tm.Naive())) < 1e-11


def test_an_observer_with_dropout_sees_one_layout_of_an_expanded_y0():
    y0 = torch.ones(1, 3, dtype=torch.float64).expand(2, 3).detach().requires_grad_()
    drop = nn.Dropout(0.5)
    grads = []
    for method in (tm.Naive(), tm.ACA(), tm.MALI(), tm.MALI(exact=True)):
        torch.manual_seed(0)
        how: dict[str, Any] = {"controller": tm.FixedStep(0.25), "gradient": method}
        got = tm.solve(lambda t, y: -y.t().contiguous().t(), y0, [0.0, 1.0], observe=lambda t, y: drop(y).sum(), **how)
        grads.append(torch.autograd.grad(got.observed, y0)[0])
    assert all(difference(g, grads[0]) < 1e-12 for g in grads[1:])


# f that differentiates by y.


@pytest.mark.parametrize("method", [tm.Naive(), tm.ACA(), tm.MALI(), tm.Adjoint()], ids=repr)
def test_parameters_of_an_f_that_differentiates_by_y_get_their_gradient_whatever_y0_needs(method):
    net = mlp(2).double()

    def f(t: Tensor, y: Tensor) -> Tensor:
        u = net(y)
        return u + torch.autograd.grad(u.sum(), y, create_graph=True)[0]

    def grads(needs: bool) -> Tensor:
        y0 = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2).requires_grad_(needs)
        y = tm.solve(f, y0, [0.0, 1.0], controller=tm.FixedStep(0.25), gradient=method).y
        return torch.cat([g.flatten() for g in torch.autograd.grad(y[-1].square().sum(), list(net.parameters()))])

    assert torch.equal(grads(False), grads(True))
    y0 = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = tm.solve(f, y0, [0.0, 1.0], controller=tm.FixedStep(0.25), gradient=method).y
        assert not y.requires_grad and y.isfinite().all()


# Low precision.


def mlp(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [2, 4])
def test_the_rounding_of_a_cast_f_is_not_taken_for_a_parasite(dtype, order):
    net, y0 = mlp(), torch.randn(32, 64)
    controller = tm.FixedStep(1 / 200) if order == 2 else tm.AdaptiveStep(1e-3, 1e-4, h_max=1 / 32)
    with torch.autocast("cpu", dtype):
        stats = tm.solve(lambda t, y: net(y), y0, [0.0, 1.0], solver=tm.ALF(order=order), controller=controller).stats
    assert stats.n_refreshes == 0


def test_memory_under_autocast_is_flat_in_the_number_of_steps():
    net, y0 = mlp(), torch.randn(512, 64, requires_grad=True)

    def peak(n_steps: int) -> int:
        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                y = tm.solve(lambda t, y: net(y), y0, [0.0, 1.0], controller=tm.FixedStep(1 / n_steps)).y
            torch.autograd.grad(y[-1].square().sum(), [y0, *net.parameters()])

        return peak_bytes(run)

    assert peak(200) == pytest.approx(peak(25), rel=0.02)


def test_a_strong_contraction_is_refreshed_under_autocast_too():
    net, y0 = mlp(), torch.randn(8, 64)

    def f(t: Tensor, y: Tensor) -> Tensor:
        return net(y) - 20 * y

    how: dict[str, Any] = {"controller": tm.FixedStep(1 / 200)}
    with torch.autocast("cpu", torch.bfloat16):
        got = tm.solve(f, y0, [0.0, 2.0], **how)
    wanted = tm.solve(f, y0, [0.0, 2.0], solver=tm.RK4(), gradient=tm.ACA(), **how).y[-1]
    assert got.stats.n_refreshes > 0
    assert difference(got.y[-1].detach(), wanted.detach()) < 0.1


def test_an_f_that_computes_in_float32_does_not_drift_by_its_own_rounding():
    """A float64 state, and a network of float32 inside f: judged by what float32 can do."""
    net, y0 = mlp(8), torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    got = tm.solve(lambda t, y: net(y.float()).double(), y0, [0.0, 1.0], controller=tm.FixedStep(0.02))
    (g,) = torch.autograd.grad(got.y[-1].square().sum(), y0)
    assert got.stats.n_reruns == 0 and g.isfinite().all()


@pytest.mark.parametrize("logs", [None, torch.float32, torch.bfloat16])
def test_a_cast_whose_result_is_not_used_hides_no_drift(logs):
    off, stats = beside_one_that_contracts(3, 30.0, 0.01, tm.ALF(6), torch.float64, logs=logs)
    assert off < 1e-11 and stats.n_reruns == 1


@pytest.mark.parametrize("kind", ["alone", "beside a finer term", "in half of the components"])
def test_an_f_that_computes_in_bfloat16_is_not_solved_again_for_its_own_rounding(kind):
    """Large enough for a state to be rounded to another bfloat16 in the backward pass, far beyond float32."""
    net, y0 = mlp().bfloat16(), torch.randn(1024, 64, requires_grad=True)

    def f(t: Tensor, y: Tensor) -> Tensor:
        u = net(y.bfloat16()).float()
        if kind == "alone":
            return u
        return u - 0.1 * y if kind == "beside a finer term" else torch.cat([y[:, 32:], u[:, :32]], 1)

    got = tm.solve(f, y0, [0.0, 1.0], controller=tm.FixedStep(0.02))
    _, messages = told(lambda: torch.autograd.grad(got.y[-1].square().sum(), y0))
    assert (got.stats.reconstruction_error or 0.0) > 1e-4  # or nothing is tested
    assert got.stats.n_reruns == 0 and not messages


# Solves of a few fixed steps.


class Contracting(nn.Module):
    def __init__(self, rate: float, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.rate = rate

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) - self.rate * y


@pytest.mark.parametrize("rate", [0.0, 1.0, 2.0, 4.0, 6.0])
def test_a_block_of_four_steps_that_contracts_too_much_warns(rate):
    n_told = 0
    for seed in range(20):
        block = ODEBlock(Contracting(rate, seed))
        _, messages = told(lambda block=block: block(torch.randn(16, 8)))
        n_told += any("refresh=1" in message and "4 steps" in message for message in messages)
    assert n_told == (20 if rate >= 2 else 0)


def test_the_look_at_a_short_solve_costs_no_evaluation():
    for refresh in ("auto", "never"):
        got = tm.solve(
            Contracting(0.5, 0),
            torch.randn(4, 8),
            [0.0, 0.5, 1.0],
            solver=tm.ALF(refresh=refresh),
            controller=tm.FixedStep(0.25),
        )
        assert got.stats.n_evals_forward == 5
