"""solve(observe=fn): losses at many times without keeping the states."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm
from torchmali.measure import LiveBytes

METHODS: list[tuple[tm.Solver, tm.StepController, tm.GradientMethod]] = [
    (tm.ALF(), tm.FixedStep(0.1), tm.MALI()),
    (tm.ALF(), tm.FixedStep(0.1), tm.MALI(exact=True)),
    (tm.ALF(), tm.FixedStep(0.1), tm.MALI(checkpoint_every=3)),
    (tm.ALF(eta=0.9), tm.FixedStep(0.1), tm.MALI()),
    (tm.ALF(order=4), tm.AdaptiveStep(1e-5, 1e-6), tm.MALI()),
    (tm.ALF(), tm.FixedStep(0.1), tm.ACA()),
    (tm.RK4(), tm.FixedStep(0.1), tm.ACA()),
    (tm.Dopri5(), tm.AdaptiveStep(1e-3, 1e-3), tm.ACA()),  # outputs from the interpolant
    (tm.Dopri5(), tm.AdaptiveStep(1e-3, 1e-3), tm.Naive()),
    (tm.ALF(), tm.FixedStep(0.1), tm.Naive()),
]


class Case:
    """A field, a decoder and data to compare with; everything that can have a gradient has one."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        self.decoder = nn.Linear(3, 2).to(dtype)
        self.data = torch.randn(7, 4, 2, dtype=dtype)
        self.y0 = torch.linspace(-1, 1, 12, dtype=dtype).reshape(4, 3).requires_grad_()
        self.t = torch.linspace(0, 2, 7, dtype=dtype).requires_grad_()

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) * (1 + t)

    def observe(self, t: Tensor, y: Tensor, k: int) -> Tensor:
        return ((self.decoder(y) * torch.cos(t) - self.data[k]) ** 2).mean(1)

    def gradients(self, solver: Any, controller: Any, gradient: Any, on_the_fly: bool) -> tuple[Tensor, ...]:
        how = {"solver": solver, "controller": controller, "gradient": gradient}
        if on_the_fly:
            solution = tm.solve(self.f, self.y0, self.t, **how, observe=self.observe)
            assert solution.y.shape == (1, *self.y0.shape)
            total = solution.observed
        else:
            solution = tm.solve(self.f, self.y0, self.t, **how)
            total = torch.stack([self.observe(self.t[k], y, k) for k, y in enumerate(solution.y)]).sum(0)
        loss = (total * torch.arange(4.0)).sum() + solution.y[-1].sin().sum()
        inputs = [self.y0, self.t, *self.net.parameters(), *self.decoder.parameters()]
        return loss.detach(), *torch.autograd.grad(loss, inputs)


def worst(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, truth, strict=True))


@pytest.mark.parametrize(("solver", "controller", "gradient"), METHODS, ids=repr)
def test_an_observed_loss_is_the_sum_over_the_outputs_and_so_is_its_gradient(solver, controller, gradient):
    case = Case()
    found, truth = (case.gradients(solver, controller, gradient, on_the_fly) for on_the_fly in (True, False))
    assert worst(found, truth) < 1e-12


@pytest.mark.parametrize("seminorm", [False, True])
def test_the_adjoint_observes_within_its_tolerance(seminorm):
    how = tm.Dopri5(), tm.AdaptiveStep(1e-9, 1e-9)
    found = Case().gradients(*how, tm.Adjoint(seminorm=seminorm), True)
    assert worst(found, Case().gradients(*how, tm.ACA(), False)) < 1e-6


def test_a_segment_that_is_pulled_back_twice_is_observed_once():
    """All the growth is in the last tenth: what was rebuilt there is not trusted, and pulled back again."""
    times = torch.linspace(0, 1, 11, dtype=torch.float64)

    def f(t, y):
        return torch.where(t > 0.9, 100.0, 0.0) * y + 0.1 * torch.sin(y)

    def gradients(gradient):
        y0 = torch.linspace(0.5, 1.5, 4, dtype=torch.float64, requires_grad=True)
        w = torch.linspace(0.5, 1.5, 4, dtype=torch.float64, requires_grad=True)
        how: Any = {"controller": tm.FixedStep(0.01), "gradient": gradient}
        solution = tm.solve(f, y0, times, **how, observe=lambda t, y: (w * y).norm() * (2 - t))
        return torch.autograd.grad(solution.observed, [y0, w]), solution.stats

    truth, _ = gradients(tm.ACA())
    found, stats = gradients(tm.MALI())
    assert stats.n_reruns > 1
    assert worst(found, truth) < 1e-8


def test_the_index_is_given_to_those_who_ask_for_it():
    seen: list = []
    times = [0.0, 0.5, 1.0]

    def two(t, y, unit=1.0):
        seen.append(("two", float(t)))
        return y.sum() * unit

    def three(t, y, k):
        seen.append((k, float(t)))
        return y.sum()

    class Module(nn.Module):
        def forward(self, t, y, k):
            seen.append((k, "module"))
            return y.sum()

    for observe in (two, three, Module()):
        with torch.no_grad():
            tm.solve(lambda t, y: -y, torch.ones(2), times, observe=observe)
    assert seen == [("two", t) for t in times] + list(enumerate(times)) + [(k, "module") for k in range(3)]


def test_states_may_be_trees():
    y0 = {"a": torch.ones(2), "b": (torch.zeros(3, requires_grad=True),)}
    solution = tm.solve(
        lambda t, y: {"a": -y["a"], "b": (y["a"].sum() - y["b"][0],)},
        y0,
        [0.0, 1.0, 2.0],
        observe=lambda t, y: y["b"][0].sum() * y["a"].prod(),
    )
    assert solution.y["a"].shape == (1, 2) and solution.y["b"][0].shape == (1, 3)
    solution.observed.backward()
    assert y0["b"][0].grad is not None and y0["b"][0].grad.all()


def test_many_terms_are_summed_without_losing_digits():
    """0.1 in float32, added 20,000 times one after the other, is off by 3e-5."""
    times = torch.linspace(0, 1, 20_000, dtype=torch.float64)
    with torch.no_grad():
        how: Any = {"controller": tm.FixedStep(1.0), "solver": tm.Euler(), "gradient": tm.ACA()}
        solution = tm.solve(lambda t, y: 0 * y, torch.tensor(0.1), times, **how, observe=lambda t, y: y)
    assert float(solution.observed) == pytest.approx(2000, rel=1e-6)


@pytest.mark.parametrize("gradient", [tm.Naive(), tm.ACA(), tm.MALI(), tm.Adjoint()], ids=repr)
def test_an_observer_that_draws_is_one_function_and_does_not_disturb_f(gradient):
    """Dropout in the decoder: the same mask at all times and in the backward pass, another one in the next solve."""
    last = nn.Linear(3, 1).double()
    decoder = nn.Sequential(nn.Dropout(0.5), last)

    def run(f):
        y0 = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
        how: Any = {"controller": tm.FixedStep(0.1), "gradient": gradient}
        return y0, tm.solve(f, y0, [0.0, 0.3, 1.0], **how, observe=lambda t, y: decoder(y).sum()).observed

    def still(t, y):
        return 0 * y

    def noisy(t, y):
        return 0 * torch.randn_like(y)

    for f in (still, noisy):
        torch.manual_seed(0)
        y0, observed = run(f)
        (found,) = torch.autograd.grad(observed, y0)
        # y stays what it was, and the observer is linear in y
        assert torch.allclose((found * y0).sum() + 3 * last.bias * 4, observed)
        assert not torch.equal(run(f)[1], observed), "the same numbers again"


def test_a_decoder_in_another_mode_at_the_backward_pass_is_an_error():
    decoder = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1))
    y0 = torch.ones(4, 3, requires_grad=True)
    solution = tm.solve(lambda t, y: -y, y0, [0.0, 1.0], observe=lambda t, y: decoder(y).sum())
    decoder.eval()
    with pytest.raises(tm.NonRepeatableFieldError, match="mode"):
        solution.observed.backward()


def test_running_statistics_of_a_decoder_are_updated_once_per_time():
    decoder = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    y0 = torch.randn(4, 3, requires_grad=True)
    solution = tm.solve(lambda t, y: -y, y0, [0.0, 0.5, 1.0], observe=lambda t, y: decoder(y).square().sum())
    norm: Any = decoder[0]
    mean = norm.running_mean.clone()
    assert int(norm.num_batches_tracked) == 3
    solution.observed.backward()
    assert int(norm.num_batches_tracked) == 3 and torch.equal(norm.running_mean, mean)


def test_under_autocast_the_sum_is_a_float32():
    decoder = nn.Linear(3, 1)
    y0 = torch.randn(4, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        solution = tm.solve(lambda t, y: -y, y0, [0.0, 0.5, 1.0], observe=lambda t, y: decoder(y).sum())
    assert solution.observed.dtype == torch.float32
    solution.observed.backward()
    assert decoder.weight.grad is not None and decoder.weight.grad.dtype == torch.float32


def test_what_cannot_be_summed_is_an_error():
    y0 = torch.ones(2)
    for observe, match in [
        (lambda t, y: 1.0, "got float"),
        (lambda t, y: y > 0, "got torch.bool"),
        (lambda t, y, k: y if k else y.sum(), "same shape"),
    ]:
        with pytest.raises(tm.InvalidFieldError, match=match):
            tm.solve(lambda t, y: -y, y0, [0.0, 0.5, 1.0], observe=observe)


def test_a_forgotten_leaf_of_the_observer_is_warned_of():
    w = torch.ones(2, requires_grad=True)
    holder = [[w * 2]]
    with pytest.warns(tm.SolverWarning, match="would get none"):
        tm.solve(lambda t, y: -y, torch.ones(2), [0.0, 1.0], observe=lambda t, y: (holder[0][0] * y).sum())


def test_an_observer_that_changes_y_in_place_is_an_error():
    y0 = torch.ones(3)
    with torch.no_grad(), pytest.raises(tm.InvalidFieldError, match="observe changes y in place"):
        tm.solve(lambda t, y: -y, y0, [0.0, 0.5, 1.0], observe=lambda t, y, k: (y.mul_(2) if k == 2 else y).sum())


def test_an_observer_that_draws_at_some_times_only_is_an_error():
    y0 = torch.ones(5, 3, requires_grad=True)
    for f in (lambda t, y: 0 * torch.randn_like(y), lambda t, y: 0 * y):
        with pytest.raises(tm.NonRepeatableFieldError, match="observe draws random numbers in some"):
            tm.solve(
                f, y0, [0.0, 0.5, 1.0], observe=lambda t, y, k: (y * torch.randn_like(y)).sum() if k else 0 * y.sum()
            )


def test_an_adjoint_that_loses_its_way_without_outputs_is_warned_of():
    """On a contracting problem the backward solve is unstable; kept outputs would lead it."""
    rate = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    y0, t = torch.ones(1, dtype=torch.float64, requires_grad=True), torch.linspace(0, 4, 41, dtype=torch.float64)

    def gradients(gradient: Any) -> tuple[Tensor, ...]:
        how: Any = {"solver": tm.Dopri5(), "controller": tm.AdaptiveStep(1e-6, 1e-8), "gradient": gradient}
        f = lambda t, y: -rate * y * (1 + 0.3 * torch.sin(y))  # noqa: E731
        observed = tm.solve(f, y0, t, **how, observe=lambda t, y: y.square().sum()).observed
        return torch.autograd.grad(observed, [y0, rate])

    with pytest.warns(tm.SolverWarning, match="The backward solve of the adjoint missed y0"):
        found = gradients(tm.Adjoint())
    assert worst(found, gradients(tm.ACA())) > 0.1  # the warning is right


def test_an_infinite_loss_is_infinite():
    observed = tm.solve(
        lambda t, y: -y, torch.ones(2), [0.0, 0.5, 1.0], observe=lambda t, y, k: y.sum() + (math.inf if k == 1 else 0.0)
    ).observed
    assert float(observed) == math.inf


@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_wrapped_modules_and_those_with_a_default_for_k_get_it():
    class Module(nn.Module):
        def forward(self, t, y, k):
            return y.sum() * k

    def by_name(t, y, k=0):
        return y.sum() * k

    def another(t, y, scale=1):
        return y.sum() * scale

    times, y0 = [0.0, 0.5, 1.0], torch.ones(2)
    still: Any = {"controller": tm.FixedStep(0.5)}
    for observe, wanted in [(torch.compile(Module(), backend="eager"), 6.0), (by_name, 6.0), (another, 6.0)]:
        assert float(tm.solve(lambda t, y: 0 * y, y0, times, **still, observe=observe).observed) == wanted


def test_a_norm_shared_with_f_is_updated_by_both():
    norm: Any = nn.BatchNorm1d(3)
    tm.solve(
        lambda t, y: torch.tanh(norm(y)),
        torch.randn(4, 3),
        [0.0, 0.5, 1.0],
        controller=tm.FixedStep(0.25),
        observe=lambda t, y: norm(y).sum(),
    )
    assert int(norm.num_batches_tracked) == 4 + 3  # steps, and times


def peak(n: int) -> int:
    """Of a gradient with n observation times, t apart. (Each operation is followed: the field has few.)"""
    y, w, u = (torch.linspace(0.1, 1, 4096, requires_grad=True) for _ in range(3))
    times = torch.linspace(0, 1, n, dtype=torch.float64)
    how: Any = {"solver": tm.ALF(refresh="never"), "controller": tm.FixedStep(1.0), "params": [w]}
    with LiveBytes() as live:
        tm.solve(lambda t, y: w * y, y, times, **how, observe=lambda t, y: torch.dot(u, y)).observed.backward()
    return live.peak


@pytest.mark.parametrize("n", [4000, *(pytest.param(n, marks=pytest.mark.slow) for n in (20_000, 100_000))])
def test_peak_memory_does_not_grow_with_the_number_of_observation_times(n):
    assert peak(n) <= 1.02 * peak(200)
