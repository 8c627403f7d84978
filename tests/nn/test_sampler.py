"""Sampler: gradients through all steps, the discount, codes, densities. The oracle is a loop that autograd unrolls."""

import doctest
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flow import Net
from torch import Tensor, nn

import torchmali as tm
import torchmali.flow.sampler as sampler_module
import torchmali.flow.velocity as velocity_module
from torchmali.flow import Coded, Guidance, Sampler
from torchmali.measure import LiveBytes
from torchmali.nn import ExactTrace, Hutchinson

N_STEPS, NO_LABEL = 12, 5


class Labelled(nn.Module):
    """A velocity with a label and a condition for each sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.embed = nn.Linear(6, 16), nn.Linear(16, 3), nn.Embedding(NO_LABEL + 1, 2)

    def forward(self, t: Tensor, x: Tensor, labels: Tensor, condition: Tensor) -> Tensor:
        moved = x + condition * t
        clock = t.to(x.dtype).expand(len(x), 1)
        return self.last(torch.tanh(self.first(torch.cat([moved, clock, self.embed(labels)], 1))))


class Problem:
    """Tensors that get gradients, and a loss by a sampler or by another function of them."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        g = torch.Generator().manual_seed(1)
        self.net = Labelled().to(dtype)
        self.z, self.condition = (torch.randn(5, 3, dtype=dtype, generator=g).requires_grad_() for _ in range(2))
        self.scale = torch.linspace(0.5, 3, 5, dtype=dtype).requires_grad_()
        self.labels = torch.arange(5)
        self.nothing = torch.full_like(self.labels, NO_LABEL), torch.zeros_like(self.condition)

    @property
    def guidance(self) -> Guidance:
        return Guidance(self.scale, *self.nothing)

    def velocity(self, t: Tensor, x: Tensor) -> Tensor:
        without = self.net(t, x, *self.nothing)
        return without + self.scale[:, None] * (self.net(t, x, self.labels, self.condition) - without)

    def gradients(self, x: Tensor) -> tuple[Tensor, ...]:
        wanted = [self.z, self.condition, self.scale, *self.net.parameters()]
        return torch.autograd.grad(x.pow(3).sum() + x.square().sum(), wanted)

    def sampled(self, n_steps: int | None = N_STEPS, discount: Any = None, **how: Any) -> tuple[Tensor, ...]:
        sampler = Sampler(self.net, **how)
        x = sampler.sample(
            self.z, self.labels, self.condition, n_steps=n_steps, guidance=self.guidance, discount=discount
        )
        return self.gradients(x)


def unrolled(velocity, z: Tensor, factor=lambda t: 1.0, scheme: str = "alf") -> Tensor:
    """Steps by plain autograd. factor: the discount at t."""

    def f(t: float, x: Tensor) -> Tensor:
        d = factor(t)
        return velocity(torch.tensor(t, dtype=torch.float64), d * x + (1 - d) * x.detach())

    h = 1 / N_STEPS
    v = f(0.0, z) if scheme == "alf" else z
    for i in range(N_STEPS):
        if scheme == "alf":
            z = z + h / 2 * v
            v = 2 * f((i + 0.5) * h, z) - v
            z = z + h / 2 * v
        elif scheme == "euler":
            z = z + h * f(i * h, z)
        else:
            z = z + h * f((i + 0.5) * h, z + h / 2 * f(i * h, z))
    return z


def assert_close(found: Any, wanted: Any, rtol: float = 1e-12) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= rtol * b.norm() and b.norm() > 0


METHODS = [tm.MALI(), tm.MALI(exact="int64"), tm.ACA(), tm.Naive()]


@pytest.mark.parametrize("gradient", METHODS, ids=repr)
def test_gradients_through_fixed_steps_with_guidance_are_those_of_an_unrolled_loop(gradient):
    problem = Problem()
    wanted = problem.gradients(unrolled(problem.velocity, problem.z))
    assert_close(problem.sampled(gradient=gradient), wanted)


@pytest.mark.parametrize("gradient", [tm.MALI(), tm.ACA()], ids=repr)
@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4), tm.Reversible(tm.RK4())], ids=repr)
def test_gradients_through_adaptive_steps_are_those_of_plain_autograd(gradient, solver):
    if isinstance(solver, tm.Reversible):
        how: Any = {"n_steps": 4}
    else:
        how = {"n_steps": None, "controller": tm.AdaptiveStep(1e-4, 1e-5)}
    problem = Problem()
    assert_close(
        problem.sampled(solver=solver, gradient=gradient, **how),
        problem.sampled(solver=solver, gradient=tm.Naive(), **how),
    )


@pytest.mark.parametrize("scheme, solver", [("alf", tm.ALF()), ("euler", tm.Euler()), ("midpoint", tm.Midpoint())])
@pytest.mark.parametrize("discount", [0.0, 0.6, "by time"])
def test_a_discount_scales_the_jacobian_of_each_evaluation(scheme, solver, discount):
    def factor(t):
        return 0.2 + 0.7 * t if discount == "by time" else discount

    problem = Problem()
    wanted = problem.gradients(unrolled(problem.velocity, problem.z, factor, scheme))
    given = factor if discount == "by time" else discount
    for gradient in [tm.ACA(), tm.Naive(), *([tm.MALI(), tm.MALI(exact="int64")] if scheme == "alf" else [])]:
        assert_close(problem.sampled(discount=given, solver=solver, gradient=gradient), wanted)
    exact = problem.gradients(unrolled(problem.velocity, problem.z, scheme=scheme))
    assert (exact[0] - wanted[0]).norm() > 0.01 * exact[0].norm()


def test_a_discount_leaves_every_bit_of_the_samples():
    problem = Problem(torch.float32)
    sampler, args = Sampler(problem.net), (problem.z, problem.labels, problem.condition)
    plain = sampler.sample(*args, n_steps=N_STEPS)
    assert torch.equal(plain, sampler.sample(*args, n_steps=N_STEPS, discount=0.3))
    assert torch.equal(plain, sampler.sample(*args, n_steps=N_STEPS, discount=1.0))


def test_with_discount_0_the_start_gets_the_gradient_of_the_end():
    problem = Problem()
    x = Sampler(problem.net).sample(problem.z, problem.labels, problem.condition, n_steps=N_STEPS, discount=0)
    (found,) = torch.autograd.grad(x.square().sum(), problem.z)
    torch.testing.assert_close(found, 2 * x.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_compiled_steps_have_the_same_gradients_with_guidance_and_discount():
    problem = Problem()
    how: Any = {"gradient": tm.MALI(), "compile": True}
    for discount in (None, 0.6):
        factor = float(1.0 if discount is None else discount)
        wanted = problem.gradients(unrolled(problem.velocity, problem.z, lambda t, d=factor: d))
        assert_close(problem.sampled(discount=discount, **how), wanted)


def test_a_network_in_bfloat16_leaves_the_state_in_float32():
    """Its own rounding, 2^-8 of each velocity, is a jump at every step: MALI meets other points of it by round-off."""
    problem = Problem(torch.float32)
    problem.net.bfloat16()
    found = {
        name: problem.sampled(gradient=gradient, dtype=torch.bfloat16)
        for name, gradient in {"mali": tm.MALI(), "exact": tm.MALI(exact="int64"), "naive": tm.Naive()}.items()
    }
    for name in ("mali", "exact"):
        # Gradients of parameters are sums over steps in float32, which autograd takes in bfloat16.
        assert_close(found[name][:3], found["naive"][:3], rtol=2e-2)
        assert_close([g.float() for g in found[name][3:]], [g.float() for g in found["naive"][3:]], rtol=5e-2)
    x = Sampler(problem.net, dtype=torch.bfloat16).sample(problem.z, problem.labels, problem.condition)
    assert x.dtype == torch.float32 and found["mali"][0].dtype == torch.float32
    assert not torch.equal(x, x.bfloat16().float())  # no sum was taken in bfloat16


def test_the_gradient_through_a_network_in_bfloat16_is_that_of_the_stored_trajectory():
    problem = Problem(torch.float32)
    problem.net.bfloat16()
    stored = problem.sampled(gradient=tm.MALI(exact="int64", checkpoint_every=1), dtype=torch.bfloat16)
    rebuilt = problem.sampled(gradient=tm.MALI(exact="int64"), dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(stored, rebuilt, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", [{"n_steps": N_STEPS}, {"n_steps": None}], ids=["fixed", "adaptive"])
def test_encode_undoes_sample_and_sample_undoes_encode_bit_for_bit(dtype, how):
    problem = Problem(torch.float32)
    problem.net.to(dtype)
    sampler = Sampler(problem.net, controller=tm.AdaptiveStep(1e-2, 1e-3), dtype=dtype)
    z, args = problem.z.detach(), (problem.labels, problem.condition.detach())
    forth = sampler.sample_with_code(z, *args, guidance=problem.guidance, **how)
    assert isinstance(forth, Coded) and torch.equal(sampler.encode(forth.code), z)
    back = sampler.encode_with_code(z, *args, guidance=problem.guidance, **how)
    assert torch.equal(sampler.sample(back.code), z)
    assert not torch.equal(sampler.sample(back.x, *args, guidance=problem.guidance, **how), z)  # without the code
    with pytest.raises(tm.InvalidOptionError, match="give it alone"):
        sampler.encode(forth.code, *args)
    with pytest.raises(tm.InvalidOptionError, match="give it alone"):
        sampler.sample(back.code, guidance=problem.guidance)
    with pytest.raises(tm.IncompatibleError, match="give it to `sample`"):
        sampler.encode(back.code)
    with pytest.raises(tm.IncompatibleError, match="give it to `encode`"):
        sampler.sample(forth.code)


def test_a_code_is_read_in_another_process(tmp_path):
    sampler = Sampler(Net(3))
    z = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    code = sampler.sample_with_code(z, n_steps=N_STEPS).code
    source, target = tmp_path / "code", tmp_path / "start"
    source.write_bytes(pickle.dumps((sampler, code)))
    script = Path(__file__).parents[1] / "flow.py"
    here = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    subprocess.run([sys.executable, script, source, target], check=True, env=here)
    assert torch.equal(pickle.loads(target.read_bytes()), z)


class Decay(nn.Module):
    """dx/dt = a x, in float64."""

    def __init__(self, a: float):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a, dtype=torch.float64))

    def forward(self, t: Tensor, x: Tensor, factor: float = 1.0) -> Tensor:
        return factor * self.a * x


@pytest.mark.parametrize("trace", [ExactTrace(), Hutchinson()], ids=repr)  # of a diagonal Jacobian both are exact
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_log_prob_of_a_linear_flow_has_its_closed_form(trace, scale):
    model = Decay(0.4)
    sampler = Sampler(model, solver=tm.ALF(order=6))
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    guidance = Guidance(scale, 0.5)  # v = 0.5 a x + scale (a x - 0.5 a x)
    rate = 0.4 * (0.5 + scale * 0.5)
    found = sampler.log_prob(x, n_steps=20, guidance=guidance, trace=trace)
    normal = torch.distributions.Normal(torch.zeros((), dtype=x.dtype), math.exp(rate))
    torch.testing.assert_close(found, normal.log_prob(x).sum(1), rtol=1e-8, atol=1e-8)
    found.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, -x.detach() * math.exp(-2 * rate), rtol=1e-7, atol=1e-8)
    assert sampler.last_stats is not None and sampler.last_stats.n_steps == 20


@pytest.mark.parametrize("t", [(0.0, 1.0), (1.0, 0.0), (0.0, 2.0)])
def test_noise_is_at_the_first_time(t):
    sampler = Sampler(Decay(0.3), t, solver=tm.ALF(order=4))
    z = torch.ones(2, 3, dtype=torch.float64)
    x = sampler.sample(z, n_steps=10)
    torch.testing.assert_close(x, z * math.exp(0.3 * (t[1] - t[0])))
    torch.testing.assert_close(sampler.encode(x, n_steps=10), z)


def test_noise_is_drawn_from_a_shape():
    sampler = Sampler(Net(3))
    drawn = [sampler.sample((4, 3), n_steps=5, generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*drawn) and drawn[0].shape == (4, 3) and drawn[0].dtype == torch.float32
    assert Sampler(Decay(0.3)).noise((2, 2)).dtype == torch.float64
    assert Sampler(Net(3).bfloat16(), dtype=torch.bfloat16).noise((2, 2)).dtype == torch.float32


def test_memory_of_a_gradient_does_not_grow_with_the_number_of_steps():
    problem = Problem(torch.float32)

    def peak(n_steps: int, gradient: tm.GradientMethod) -> int:
        problem.sampled(n_steps, gradient=gradient)
        with LiveBytes() as live:
            problem.sampled(n_steps, gradient=gradient)
        return live.peak

    assert peak(200, tm.MALI()) <= 1.05 * peak(20, tm.MALI())
    assert peak(200, tm.Naive()) > 5 * peak(20, tm.Naive())


TWO: Any = 2.0
WRONG: list[tuple[Any, str]] = [
    (lambda: Guidance(TWO.hex()), "a scale that is a number"),
    (lambda: Guidance(torch.ones(2, 2)), r"got a tensor of shape \(2, 2\)"),
    (lambda: Sampler(Net(3), t=(0.0, 0.0)), "two different numbers"),
    (lambda: Sampler(Net(3), dtype=torch.int8), "floating-point dtype"),
    (lambda: Sampler(Net(3)).sample((2, 3), n_steps=0), "positive number of steps"),
    (lambda: Sampler(Net(3)).sample((2, 3), discount=1.5), "a number from 0 to 1"),
    (lambda: Sampler(Net(3)).sample(torch.zeros(2, 3), generator=torch.Generator()), "leave one of them out"),
    (lambda: Sampler(Net(3)).sample((2, 3), guidance=TWO), r"give Guidance\(scale"),
    (lambda: Sampler(Net(3)).sample((2, 3), guidance=Guidance(torch.ones(3))), "3 scales for 2 samples"),
    (lambda: Sampler(lambda t, x: x[:, :2]).sample((2, 3)), "like x"),
]


@pytest.mark.parametrize("call, message", WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_said(call, message):
    with pytest.raises((tm.InvalidOptionError, tm.InvalidFieldError), match=message):
        call()


@pytest.mark.parametrize("module", [sampler_module, velocity_module])
def test_the_examples_of_the_docstrings_run(module):
    found = doctest.testmod(module)
    assert found.attempted > 3 and found.failed == 0


def test_the_examples_of_the_page_run():
    page = Path(__file__).parents[2] / "docs" / "flow.md"
    names: dict = {}
    for example in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
        exec(example, names)
    assert names["z"].grad is not None and names["scale"].grad is not None
    assert torch.equal(names["rebuilt"], names["images"]) and names["density"].shape == (4,)


def test_repr_says_how_it_samples():
    assert repr(Sampler(Decay(0.3), dtype=torch.bfloat16)).startswith(
        "Sampler(\n  t=(0, 1), dtype=torch.bfloat16, solver"
    )
    assert repr(Guidance(2.0)) == "Guidance(2)" and repr(Guidance(torch.ones(3))) == "Guidance(scale of shape (3,))"
