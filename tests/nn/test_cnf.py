"""CNF: densities, traces, regularisers, and ways back. Linear flows have closed forms."""

import copy
import itertools
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flow import Net, flow
from torch import Tensor, nn

import torchmali as tm
from torchmali.nn import CNF, ExactTrace, Hutchinson, gaussian, rademacher
from torchmali.state.fixed_point import FixedPoint, FixedPointArithmetic

TIGHT: Any = {"solver": tm.ALF(order=6), "controller": tm.AdaptiveStep(1e-10, 1e-11)}


def points(n: int = 5, d: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, dtype=dtype, generator=torch.Generator().manual_seed(1))


class Linear(nn.Module):
    """dx/dt = a x."""

    def __init__(self, a: float):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a, dtype=torch.float64))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.a * x


def test_the_log_determinant_is_that_of_the_jacobian_of_the_flow():
    model, x = flow(trace=ExactTrace(), **TIGHT).double(), points()

    def move(row):
        return model(row.unsqueeze(0)).z[0]

    brute = [torch.autograd.functional.jacobian(move, row) for row in x]
    wanted = torch.stack([torch.linalg.slogdet(j).logabsdet for j in brute])
    torch.testing.assert_close(model(x).log_det, wanted, rtol=0, atol=1e-8)
    assert wanted.abs().min() > 0.01


def test_hutchinsons_trace_averages_to_the_exact_one():
    """Over all signs, and over a basis of the right length, the mean is no estimate."""
    x = points()
    how: Any = {"controller": tm.FixedStep(0.25), "kinetic": True, "jacobian": True}
    exact = flow(trace=ExactTrace(), **how).double()(x)
    model = flow(**how).double()
    signs = [torch.tensor(e, dtype=x.dtype).expand_as(x) for e in itertools.product((-1.0, 1.0), repeat=3)]
    basis = [math.sqrt(3) * e.expand_as(x) for e in torch.eye(3, dtype=x.dtype)]
    for noises in (signs, basis):
        found = [model(x, noise=noise) for noise in noises]
        assert not torch.allclose(found[0].log_det, exact.log_det)
        for name in ("z", "log_det", "kinetic", "jacobian"):
            mean = torch.stack([getattr(one, name) for one in found]).mean(0)
            torch.testing.assert_close(mean, getattr(exact, name), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("noise", [rademacher, gaussian])
def test_noise_is_drawn_once_per_call_with_mean_0_and_variance_1(noise):
    e = noise(torch.zeros(100_000))
    assert abs(float(e.mean())) < 0.02 and abs(float(e.var()) - 1) < 0.02  # 5 standard deviations and more
    drawn: list = []

    def draw(x):
        drawn.append(noise(x))
        return drawn[-1]

    x, model = points(), flow(trace=Hutchinson(draw)).double()
    found = model(x)
    assert len(drawn) == 1
    assert torch.equal(model(x, noise=drawn[0]).log_det, found.log_det)
    assert not torch.equal(model(x).log_det, found.log_det)


@pytest.mark.parametrize("trace", [ExactTrace(), Hutchinson(), Hutchinson(gaussian)], ids=repr)
@pytest.mark.parametrize("gradient", [tm.MALI(), tm.ACA(), tm.MALI(exact="int64")], ids=repr)
def test_gradients_are_those_of_plain_autograd(trace, gradient):
    x, context, noise = points().requires_grad_(), points(5, 1).requires_grad_(), None
    noise = trace.draw(points())

    def gradients(gradient):
        model = flow(
            trace=trace, kinetic=True, jacobian=True, gradient=gradient, controller=tm.FixedStep(0.25), context=1
        ).double()
        found = model(x, context, noise=noise)
        loss = found.z.square().sum() - found.log_det.sum() + found.kinetic.sum() + 0.3 * found.jacobian.sum()
        return torch.autograd.grad(loss, [x, context, *model.parameters()])

    for found, wanted in zip(gradients(gradient), gradients(tm.Naive()), strict=True):
        assert (found - wanted).norm() <= 1e-12 * wanted.norm()


def test_two_calls_before_the_backward_pass_do_not_mix_their_noise():
    x, model = points(), flow(controller=tm.FixedStep(0.25)).double()
    noises = [rademacher(x), rademacher(x)]
    together = sum(model(x, noise=noise).log_det.sum() for noise in noises)
    assert isinstance(together, Tensor)
    parts = [torch.autograd.grad(model(x, noise=noise).log_det.sum(), [*model.parameters()]) for noise in noises]
    for found, *wanted in zip(torch.autograd.grad(together, [*model.parameters()]), *parts, strict=True):
        torch.testing.assert_close(found, sum(wanted))


@pytest.mark.parametrize("rate", [0.7, -1.3])
def test_a_linear_flow_has_its_closed_form(rate):
    x = points()
    model = CNF(Linear(rate), trace=ExactTrace(), kinetic=True, jacobian=True, **TIGHT)
    found = model(x)
    close: Any = {"rtol": 1e-8, "atol": 1e-9}
    torch.testing.assert_close(found.z, x * math.exp(rate), **close)
    torch.testing.assert_close(found.log_det, torch.full((5,), 3 * rate, dtype=x.dtype), **close)
    energy = 0.5 * rate**2 * x.square().mean(1) * (math.exp(2 * rate) - 1) / (2 * rate)
    torch.testing.assert_close(found.kinetic, energy, rtol=1e-4, atol=1e-6)  # nobody controls its error
    torch.testing.assert_close(found.jacobian, torch.full((5,), rate**2, dtype=x.dtype), **close)
    normal = torch.distributions.Normal(torch.zeros(1, dtype=x.dtype), math.exp(-rate))
    torch.testing.assert_close(model.log_prob(x), normal.log_prob(x).sum(1), **close)


def test_regularisers_do_not_change_the_steps():
    x, steps = points(), []
    for regularised in (False, True):
        model = flow(trace=ExactTrace(), kinetic=regularised, jacobian=regularised).double()
        model.func.gain = 3.0  # the kinetic energy is large
        model(x)
        assert model.last_stats is not None
        steps.append((model.last_stats.n_steps, model.last_stats.n_evals_forward))
    assert steps[0] == steps[1]


def test_the_density_of_a_flow_integrates_to_one():
    model = flow(trace=ExactTrace(), d=2, controller=tm.AdaptiveStep(1e-4, 1e-5))
    line = torch.linspace(-8, 8, 161)
    grid = torch.cartesian_prod(line, line)
    with torch.no_grad():
        total = model.log_prob(grid).exp().sum() * 0.1**2
    assert float(total) == pytest.approx(1, abs=1e-3)


def test_samples_have_the_density_of_the_flow():
    torch.manual_seed(0)
    model = CNF(Linear(-1.0))  # data is wider than the noise
    with torch.no_grad():
        x = model.sample((20_000, 2), temperature=0.5)
    assert x.shape == (20_000, 2) and x.dtype == torch.float64
    assert float(x.std()) == pytest.approx(0.5 * math.e, rel=0.02)


def test_the_way_back_from_floats_is_within_1e_5():
    model, x = flow(d=2, controller=tm.AdaptiveStep(2e-5, 2e-6)), points(256, 2, torch.float32)
    with torch.no_grad():
        found = model.inverse(model(x).z)
    assert (found - x).abs().max() < 1e-5
    assert not torch.equal(found, x)


@pytest.mark.parametrize("gradient", [tm.MALI(), tm.MALI(exact=True), tm.ACA()], ids=repr)
@pytest.mark.parametrize("trace", [ExactTrace(), Hutchinson()], ids=repr)
def test_the_way_back_from_a_code_is_exact(gradient, trace):
    model = flow(trace=trace, gradient=gradient, kinetic=True)
    x = points(16, 3, torch.float32)
    found = model(x, return_code=True)
    assert found.code is not None
    back = model.inverse(pickle.loads(pickle.dumps(found.code)))
    assert torch.equal(back, FixedPointArithmetic(1.0, wide=gradient != tm.MALI(exact=True)).of((x,)).point[0])
    assert (back - x).abs().max() <= 2.0**-26 * x.abs().max()
    plain = model(x, noise=found.code.args[0])
    torch.testing.assert_close((found.z, found.log_det), (plain.z, plain.log_det))
    assert found.z.requires_grad


def test_another_process_that_never_saw_x_finds_it_from_the_code(tmp_path):
    model, x = flow(gradient=tm.MALI(exact=True), jacobian=True), points(16, 3, torch.float32)
    source, target = tmp_path / "code", tmp_path / "x"
    source.write_bytes(pickle.dumps((model, model(x, return_code=True).code)))
    script = Path(__file__).parents[1] / "flow.py"
    subprocess.run([sys.executable, str(script), str(source), str(target)], check=True)
    assert torch.equal(pickle.loads(target.read_bytes()), FixedPoint.of((x,)).point[0])


def test_the_forward_pass_builds_no_graph_of_the_trace(monkeypatch):
    model, x, made = flow(controller=tm.FixedStep(0.25)), points(5, 3, torch.float32), []
    grad = torch.autograd.grad

    def watched(*args, create_graph=False, **kwargs):
        made.append(create_graph)
        return grad(*args, create_graph=create_graph, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    loss = model.log_prob(x).sum()
    assert made and sum(made) == 1, "but for the first evaluation, which looks for forgotten leaves"
    n = len(made)
    loss.backward()
    assert all(made[n:]) and len(made) > n


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_densities_need_no_outer_gradients(mode):
    model, x = flow(), points(5, 3, torch.float32)
    wanted = model.log_prob(x, noise=torch.ones_like(x)).detach()
    with mode():
        found = model.log_prob(x.clone(), noise=torch.ones_like(x))
        assert model.inverse(x).shape == x.shape
    assert torch.equal(found, wanted)
    assert not x.requires_grad


def test_flows_that_do_not_look_at_x_have_no_trace():
    x = points()
    for func in (lambda t, x: torch.ones_like(x), lambda t, x: t.expand_as(x)):
        for trace in (ExactTrace(), Hutchinson()):
            assert not CNF(func, trace=trace)(x).log_det.any()


def test_images_and_empty_batches_flow():
    conv = nn.Conv2d(2, 2, 3, padding=1)
    model = CNF(lambda t, x: torch.tanh(conv(x)), controller=tm.FixedStep(0.25), solver=tm.ALF())
    x = torch.randn(3, 2, 4, 4).to(memory_format=torch.channels_last)
    found = model(x)
    assert found.z.is_contiguous(memory_format=torch.channels_last) and found.log_det.shape == (3,)
    assert model(x[:0]).z.shape == (0, 2, 4, 4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_flows_are_copied_with_all_they_are(copied):
    model, x = flow(), points(5, 3, torch.float32)
    other = copied(model)
    assert repr(other) == repr(model)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x, noise=x).z, model(x, noise=x).z)


def test_a_flow_says_what_it_is():
    text = repr(CNF(Net(3), trace=Hutchinson(gaussian), kinetic=True, solver=tm.ALF()))
    wanted = "t=(0, 1), trace=Hutchinson(gaussian), kinetic=True, solver=ALF(), controller=AdaptiveStep(rtol=0.0001, "
    assert wanted in text


def test_learned_times_get_gradients():
    model = CNF(Net(3), nn.Parameter(torch.tensor([0.0, 1.0])))
    model.log_prob(points(5, 3, torch.float32)).sum().backward()
    assert isinstance(model.t, nn.Parameter) and model.t.grad is not None and model.t.grad.all()
    assert model.sample((2, 3)).shape == (2, 3)


def test_bad_input_is_told_so():
    model, x = flow(), points(5, 3, torch.float32)
    with pytest.raises(tm.InvalidStateError, match=r"shape \(5,\): a flow needs \(batch, ...\)"):
        model(x[:, 0])
    with pytest.raises(tm.InvalidStateError, match="noise must be like x"):
        model(x, noise=x.double())
    with pytest.raises(tm.InvalidOptionError, match="needs no noise"):
        flow(trace=ExactTrace())(x, noise=x)
    with pytest.raises(tm.InvalidFieldError, match=r"of shape \(5, 3\); got \(5, 1\)"):
        CNF(lambda t, x: x[:, :1])(x)
    with pytest.raises(tm.InvalidFieldError, match=r"of shape \(5, 3\); got a tuple"):
        CNF(lambda t, x: (x,))(x)
    with pytest.raises(tm.InvalidOptionError, match="give numbers as tolerances"):
        CNF(Net(3), controller=tm.AdaptiveStep((1e-3, 1e-4), 1e-5))
    with pytest.raises(tm.InvalidOptionError, match="got 3 times"):
        CNF(Net(3), (0.0, 0.5, 1.0))
    unfit: Any = "exact"
    with pytest.raises(tm.InvalidOptionError, match="trace='exact'"):
        CNF(Net(3), trace=unfit)
    with pytest.raises(tm.IncompatibleError, match="MALI needs a solver with an inverse"):
        flow(solver=tm.Dopri5(), gradient=tm.ACA())(x, return_code=True)
