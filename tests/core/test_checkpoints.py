"""MALI with checkpoints: damping, drift, budgets."""

import math
import warnings

import pytest
import torch
from oracle import Case, worst_difference
from torch import nn

import torchmali as tm
from torchmali.measure import peak_bytes
from torchmali.tree import Structure

ETAS = {
    0.95: 70,
    0.9: 33,
    0.85: 20,
    0.7: 8,
    0.3: 8,
}  # eta: float32 steps to 1e-4, ln(1e-4 / 6e-8) / ln(1 / |1 - 2 eta|)


def problem(dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    return net, torch.randn(8, 4, dtype=dtype)


def gradient(net, y0, solver, n_steps, method, span=(0.0, 5.0)):
    y0 = y0.clone().requires_grad_()
    controller = tm.FixedStep((span[1] - span[0]) / n_steps)
    solution = tm.solve(lambda t, y: net(y), y0, span, solver=solver, controller=controller, gradient=method)
    grads = torch.autograd.grad((solution.y[-1] ** 2).sum(), [y0, *net.parameters()])
    return torch.cat([g.flatten() for g in grads]), solution.stats


def difference(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("eta", ETAS)
def test_a_thousand_damped_steps_are_differentiated_in_float32(eta):
    """Where the published method gives noise. Checkpoints are as many as the formula says."""
    net, y0 = problem()
    exact, _ = gradient(net, y0, tm.ALF(eta=eta), 1000, tm.Naive())
    rebuilt, stats = gradient(net, y0, tm.ALF(eta=eta), 1000, tm.MALI())
    assert difference(rebuilt, exact) < 1e-4
    assert stats.n_checkpoints == math.ceil(1000 / ETAS[eta])
    assert stats.n_reruns == 0
    assert 1001 <= stats.n_evals_backward <= 1001 + 2 * stats.n_checkpoints  # where a drift is looked into


@pytest.mark.parametrize("eta", [pytest.param(0.95, marks=pytest.mark.slow), 0.7])
def test_checkpoints_take_the_bytes_of_the_formula(eta):
    """Between 500 and 1500 steps the peak grows by (z, v) for each further checkpoint."""
    net, y0 = problem()
    y0 = y0.repeat(40, 1)
    peaks = [peak_bytes(lambda n=n: gradient(net, y0, tm.ALF(eta=eta), n, tm.MALI())) for n in (500, 1500)]
    further = math.ceil(1500 / ETAS[eta]) - math.ceil(500 / ETAS[eta])
    assert peaks[1] - peaks[0] == pytest.approx(2 * y0.nbytes * further, rel=0.02)


@pytest.mark.parametrize("eta", [0.9, 0.7])
def test_the_published_damped_method_is_there_and_wrong(eta):
    net, y0 = problem()
    method = tm.MALI(checkpoint_every=None, unsafe_damping=True)
    exact, _ = gradient(net, y0, tm.ALF(eta=eta), 200, tm.ACA())
    with pytest.warns(tm.SolverWarning) as caught:
        rebuilt, stats = gradient(net, y0, tm.ALF(eta=eta), 200, method)
    assert "times per step" in str(caught[0].message) and "in 200 steps" in str(caught[0].message)
    assert "relative error" in str(caught[1].message)
    assert stats.n_checkpoints == stats.n_reruns == 0
    assert not difference(rebuilt, exact) < 1e-2  # perhaps nan
    with pytest.warns(tm.SolverWarning, match="in 8 steps"):
        few, _ = gradient(net, y0, tm.ALF(eta=eta), 8, method, span=(0.0, 1.0))
    exact, _ = gradient(net, y0, tm.ALF(eta=eta), 8, tm.ACA(), span=(0.0, 1.0))
    assert difference(few, exact) < 1e-3  # as in the paper's experiments: few steps


def grow(t, y):
    return y


def growth_gradient(method, dtype=torch.float32):
    """L = sum y(10)^2 and y' = y: the gradient of the 200 steps, and its value by plain autograd in float64."""
    y0 = torch.linspace(0.5, 1.5, 4, dtype=dtype, requires_grad=True)
    solution = tm.solve(grow, y0, (0.0, 10.0), controller=tm.FixedStep(0.05), gradient=method)
    return torch.autograd.grad((solution.y[-1] ** 2).sum(), y0)[0], solution.stats


def through_a_field(method, dtype=torch.float32):
    """The same with a field that is not linear, so that a wrong trajectory makes a wrong gradient."""
    torch.manual_seed(0)
    net = nn.Linear(4, 4).to(dtype)
    y0 = torch.linspace(0.5, 1.5, 4, dtype=dtype, requires_grad=True)
    controller = tm.FixedStep(0.05)
    solution = tm.solve(lambda t, y: y + torch.tanh(net(y)), y0, (0.0, 10.0), controller=controller, gradient=method)
    grads = torch.autograd.grad((solution.y[-1] ** 2).sum(), [y0, *net.parameters()])
    return torch.cat([g.flatten() for g in grads]), solution.stats


@pytest.mark.parametrize("run", [growth_gradient, through_a_field])
def test_forced_drift_is_warned_about_without_checkpoints_and_repaired_with_them(run):
    exact, _ = run(tm.ACA())
    with pytest.warns(tm.SolverWarning, match=r"relative error above .*the gradient is about as wrong"):
        _, stats = run(tm.MALI(checkpoint_every=None))
    assert stats.reconstruction_error > 1e-3 and stats.n_reruns == 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        repaired, stats = run(tm.MALI())
    # A linear field has the right gradient on a wrong trajectory, too.
    messages = [str(w.message) for w in caught]
    assert len(messages) == (run is through_a_field)
    assert all("solved again with more states kept, so the gradient is right" in message for message in messages)
    assert stats.reconstruction_error > 1e-3 and stats.n_reruns > 0
    assert difference(repaired, exact) < 1e-5
    kept, stats = run(tm.MALI(checkpoint_every=20))  # warns of nothing
    assert stats.reconstruction_error < 1e-3 and stats.n_reruns == 0
    assert difference(kept, exact) < 1e-4
    bits, stats = run(tm.MALI(exact=True))
    assert stats.reconstruction_error == 0
    assert difference(bits, exact) < 1e-4


@pytest.mark.filterwarnings("ignore:MALI rebuilt a state")
def test_a_second_solve_keeps_about_the_root_of_the_states():
    peaks = {method: peak_bytes(lambda m=method: through_many(m)) for method in (tm.ACA(), tm.MALI())}
    assert peaks[tm.MALI()] < 0.25 * peaks[tm.ACA()]


def through_many(method):
    y0 = torch.linspace(0.5, 1.5, 4000, requires_grad=True)
    solution = tm.solve(grow, y0, (0.0, 10.0), controller=tm.FixedStep(0.01), gradient=method)
    return torch.autograd.grad((solution.y[-1] ** 2).sum(), y0)[0]


@pytest.mark.filterwarnings("ignore:MALI rebuilt a state")
def test_a_second_backward_after_a_second_solve_gives_the_same():
    torch.manual_seed(0)
    net = nn.Linear(4, 4)
    y0 = torch.linspace(0.5, 1.5, 4, requires_grad=True)
    controller = tm.FixedStep(0.05)
    y = tm.solve(lambda t, y: y + torch.tanh(net(y)), y0, (0.0, 3.0, 10.0), controller=controller).y
    first = torch.autograd.grad((y**2).sum(), [y0, *net.parameters()], retain_graph=True)
    second = torch.autograd.grad((y**2).sum(), [y0, *net.parameters()])
    assert all(map(torch.equal, first, second))


@pytest.mark.filterwarnings("ignore:MALI rebuilt a state")
@pytest.mark.parametrize(("dtype", "growth", "others"), [(torch.float32, 12.0, 100.0), (torch.float64, 20.0, 1e4)])
def test_a_small_sample_that_drifts_is_not_hidden_by_its_batch(dtype, growth, others):
    """One of 256 grows by e^growth, from 1e-5; the others only turn. By the norm of the batch all would be well."""
    w = torch.tensor([[0.3, 0.5], [-0.2, 0.1]], dtype=dtype, requires_grad=True)
    turn = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=dtype)
    y0 = others * torch.randn(256, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))
    y0[17] = 1e-5 * torch.tensor([1.0, 0.7], dtype=dtype)
    grows = (torch.arange(256) == 17)[:, None]

    def f(t, y):
        r = y.norm(dim=-1, keepdim=True)
        return torch.where(grows, growth * y + torch.tanh(y / r @ w) * r, y @ turn)

    def gradient(method):
        solution = tm.solve(f, y0, (0.0, 1.0), controller=tm.FixedStep(1 / 200), gradient=method, params=[w])
        return torch.autograd.grad(solution.y[-1][17, 0], w)[0], solution.stats

    exact, _ = gradient(tm.Naive())
    rebuilt, stats = gradient(tm.MALI())
    assert stats.n_reruns == 1
    assert difference(rebuilt, exact) < 20 * torch.finfo(dtype).eps


@pytest.mark.filterwarnings("ignore:MALI rebuilt a state")
@pytest.mark.parametrize("order", [2, 4, 6])
@pytest.mark.parametrize("rate", [100.0, 200.0])
def test_what_drifts_again_is_solved_again(order, rate):
    """All the growth is in the last tenth: the last segment of the second solve drifts, too."""
    y0 = torch.linspace(0.5, 1.5, 4, dtype=torch.float64, requires_grad=True)

    def f(t, y):
        return torch.where(t > 0.9, rate, 0.0) * y + 0.1 * torch.sin(y)

    def gradient(method):
        controller = tm.FixedStep(0.01)
        solution = tm.solve(f, y0, (0.0, 1.0), solver=tm.ALF(order=order), controller=controller, gradient=method)
        return torch.autograd.grad(solution.y[-1].norm(), y0)[0], solution.stats

    exact, _ = gradient(tm.ACA())
    rebuilt, stats = gradient(tm.MALI())
    assert stats.n_reruns > 1
    assert difference(rebuilt, exact) < 1e-8


@pytest.mark.parametrize("every", [1, 2, 7, 100])
@pytest.mark.parametrize("eta", [1.0, 0.9])
def test_checkpoints_at_any_interval_leave_the_gradient_alone(every, eta):
    case, controller = Case.make(), tm.FixedStep(0.0731)
    solver = tm.ALF(eta=eta)
    grads, stats = case.gradients(solver, controller, tm.MALI(checkpoint_every=every))
    assert stats.n_checkpoints == math.ceil(stats.n_steps / every)
    assert worst_difference(grads, case.exact_gradients(solver, controller)) < 1e-12


def test_a_memory_budget_is_filled_and_not_passed():
    net, y0 = problem()
    size = 2 * y0.nbytes
    exact, _ = gradient(net, y0, tm.ALF(), 100, tm.ACA())
    graph = 2 * y0.nbytes + 8 * 16 * y0.itemsize  # y, its slope, and the hidden layer
    counts = []
    for memory in (size, 10 * size, f"{200 * size / 1024}KiB"):
        rebuilt, stats = gradient(net, y0, tm.ALF(), 100, tm.MALI(memory=memory))
        assert difference(rebuilt, exact) < 1e-5
        counts.append((stats.n_graphs, stats.n_checkpoints))
    # An eighth is for states: every 128th, and every 8th of the first 42, where there are no graphs.
    assert graph == 3 * size and counts == [(0, 1), (2, 1), (58, 6)]


def test_a_budget_counts_the_integers_of_a_wide_grid():
    y0 = torch.randn(100, 10)  # (z, v): 8,000 bytes in float32, 16,000 in int64
    solution = tm.solve(
        lambda t, y: -0.1 * y,
        y0.requires_grad_(),
        (0.0, 1.0),
        controller=tm.FixedStep(0.01),
        gradient=tm.MALI(exact="int64", memory="64kB"),
    )
    assert 2 <= solution.stats.n_checkpoints <= 4
    solution.y[-1].sum().backward()


def test_an_empty_batch_fits_any_budget():
    y0 = torch.zeros(0, 3, requires_grad=True)
    y = tm.solve(lambda t, y: -y, y0, (0.0, 1.0), controller=tm.FixedStep(0.1), gradient=tm.MALI(memory="1kB")).y
    assert torch.autograd.grad(y.sum(), y0)[0].shape == (0, 3)


def test_a_budget_too_small_for_damping_says_how_much_it_takes():
    net, y0 = problem()
    size = 2 * y0.nbytes
    with pytest.raises(tm.InvalidOptionError, match=f"takes {math.ceil(1000 / 33) * size:,} bytes"):
        gradient(net, y0, tm.ALF(eta=0.9), 1000, tm.MALI(memory=4 * size))
    with pytest.raises(tm.InvalidOptionError, match="holds no state"):
        gradient(net, y0, tm.ALF(), 10, tm.MALI(memory=size - 1))


def test_budgets_may_be_written_as_people_do():
    for memory in (1000, "1000", "1000B", "1 kB", "1.5MiB", "2GB", "1e6"):
        tm.MALI(memory=memory)
    for memory in ("lots", "5 apples", "-1MB", "", "1.2.3MB", "."):
        with pytest.raises(tm.InvalidOptionError, match="256MiB"):
            tm.MALI(memory=memory)
    with pytest.raises(tm.InvalidOptionError, match="one of the two"):
        tm.MALI(memory="1MB", checkpoint_every=3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tm.MALI(exact="yes"),
        lambda: tm.MALI(checkpoint_every=0),
        lambda: tm.MALI(checkpoint_every=True),
        lambda: tm.MALI(checkpoint_every="often"),
        lambda: tm.ALF(order=3),
        lambda: tm.ALF(order=4, eta=0.9),
        lambda: tm.ALF(refresh=0),
        lambda: tm.ALF(refresh="always"),
        lambda: tm.ALF(refresh=True),
        lambda: tm.Reversible(tm.RK4(), coupling=0.0),
        lambda: tm.Reversible(tm.ALF()),  # type: ignore[arg-type]
        lambda: tm.AdaptiveStep(beta=-0.1),
        lambda: tm.AdaptiveStep(None),
        lambda: tm.FixedStep("0.1"),  # type: ignore[arg-type]
        lambda: tm.ALF(order=[4]),  # type: ignore[arg-type]
        lambda: tm.AdaptiveStep((1e-3, 0.0), (0.0, 0.0)).bind(Structure.of((1, 2))),
    ],
)
def test_options_out_of_their_range_are_refused(make):
    with pytest.raises(tm.InvalidOptionError):
        make()


def test_values_are_written_as_one_would_write_them():
    assert repr(tm.MALI()) == "MALI()"
    assert repr(tm.ALF(order=4)) == "ALF(order=4)"
    assert repr(tm.MALI(exact=True, checkpoint_every=None)) == "MALI(exact=True, checkpoint_every=None)"
    assert repr(tm.Reversible(tm.RK4(), coupling=0.9)) == "Reversible(coupling=0.9)"
