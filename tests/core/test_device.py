"""On a device that is not the CPU: the CPU's values and gradients, no tensor of the CPU, no needless wait.

tests/device.py is that device. It runs each operation on the CPU, so equality here is equality of bits.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from device import NAME, transfers, zero_dim_allowed
from oracle import Case
from problems import VAN_DER_POL
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

import torchmali as tm
from torchmali.auditing import audit
from torchmali.measure import peak_bytes
from torchmali.nn import CNF, ODERNN, NeuralCDE, ODEBlock, ODERNNCell
from torchmali.nn.cnf import ExactTrace, Hutchinson
from torchmali.nn.control import LinearControl, hermite_cubic_coeffs, linear_coeffs, natural_cubic_coeffs

# How often a solve and its backward pass wait for the device, where t is given as numbers and y has one leaf.
STEPS_PER_LOOK = 8  # of order 2 with fixed steps: at the refresh detector
EXACT_STEPS_PER_LOOK = 8  # at the range of the integers
AT_THE_END = 1  # whether the end is finite
COMPARISON = 1  # of a rebuilt state with the one that was kept: at the start, at each refresh and checkpoint
FIRST_STEP = 2  # Hairer's rule: |y0| and |f|, then the difference of two f
SAME_F = 1  # Adjoint: whether f(t0, y0) is what it was
EXACT_START = 2  # the largest of y0 and of v0
BATCHNORM = 2  # whether f changes its mean and its variance; that its counter changes is known on the host
ONE_SCALE = 1  # exact: whether leaves mix scales
SAME_BITS = 1  # exact: whether f returns the same bits without a graph

ALF, FIXED, ADAPTIVE = tm.ALF(), tm.FixedStep(0.2), tm.AdaptiveStep(1e-2, 1e-3)
METHODS = [tm.Naive(), tm.ACA(), tm.MALI(), tm.MALI(exact=True), tm.Adjoint()]
VARIANTS = [tm.MALI(exact="int64"), tm.MALI(checkpoint_every=3), tm.MALI(memory="1kB")]
REVERSIBLE = [tm.ALF(eta=0.95), tm.ALF(order=4), tm.ALF(order=6), tm.ALF(refresh=3), tm.Reversible(tm.HeunEuler())]
CASES: list[tuple[tm.Solver, tm.StepController, tm.GradientMethod]] = [
    *((ALF, controller, method) for controller in (FIXED, ADAPTIVE) for method in METHODS),
    *((ALF, FIXED, method) for method in VARIANTS),
    *((solver, controller, tm.MALI()) for controller in (FIXED, ADAPTIVE) for solver in REVERSIBLE),
    *((solver, ADAPTIVE, tm.ACA()) for solver in (tm.Dopri5(), tm.Dopri8(), tm.Reversible(tm.HeunEuler()))),
    *((tm.Dopri5(), ADAPTIVE, method) for method in (tm.Naive(), tm.Naive(through_search=True), tm.Adjoint())),
    *((tm.RK4(), FIXED, method) for method in (tm.Naive(), tm.ACA(), tm.Adjoint())),
    (tm.Dopri5(), ADAPTIVE, tm.Adjoint(seminorm=True)),
    (tm.ALF(order=4), ADAPTIVE, tm.MALI(exact=True)),
    (tm.ALF(order=6), FIXED, tm.ACA()),
]


def assert_same_on_both(run: Callable[[str], Sequence[Tensor]], but: int | None = None, rounded: bool = False) -> None:
    """run(device) gives tensors on that device, with the same bits (but for this one) and the same strides.

    rounded: up to a few roundings of the type with the fewest digits, in which the others may have been computed.
    """
    truth, found = run("cpu"), run(NAME)
    assert len(found) == len(truth) > 0
    eps = max(torch.finfo(y.dtype).eps for y in truth if y.is_floating_point())
    for i, (x, y) in enumerate(zip(found, truth, strict=True)):
        assert (x.device.type, y.device.type) == (NAME, "cpu")
        assert (x.dtype, x.stride()) == (y.dtype, y.stride())
        tolerance = 32 * eps if rounded and y.is_floating_point() else 1e-13 if i == but else 0.0
        torch.testing.assert_close(
            x.cpu(), y, rtol=tolerance, atol=tolerance, msg=lambda msg, i=i: f"tensor {i}: {msg}"
        )
        assert y.isfinite().all() and y.any()


def moved(x: Tensor, device: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return x.detach().to(device, dtype).requires_grad_()


def on_host(method: tm.GradientMethod) -> AbstractContextManager[bool]:
    """Naive has times that require a gradient as 0-d tensors on the CPU, which it multiplies with the state: deciding
    where to step must not wait for a device. CUDA takes them for numbers."""
    return zero_dim_allowed() if isinstance(method, tm.Naive) else nullcontext(False)


# 1. Values and gradients.


@pytest.mark.parametrize(("solver", "controller", "method"), CASES, ids=repr)
def test_all_gradients_of_a_tree_are_those_of_the_cpu(solver, controller, method):
    """By y0, its parameters, an argument and the times."""
    dtype = torch.float32 if isinstance(method, tm.MALI) else torch.float64  # with exact=True: int32

    def run(device: str) -> list[Tensor]:
        case = Case.make((0.0, 0.3, 0.7))
        func, t = case.func.to(device, dtype), moved(case.t, device)
        y0, w = tree_map(lambda x: moved(x, device, dtype), (case.y0, case.w))
        y = tm.solve(func, y0, t, solver=solver, controller=controller, gradient=method, args=(w,)).y
        a, (slow, fast) = y["a"], y["b"]
        weights = torch.arange(1, 4, dtype=dtype, device=device)
        loss = (weights * (a**2).sum((1, 2))).sum() + (weights * slow).sin().sum() + (fast**3).mean()
        inputs = [y0["a"], *y0["b"], t, w, *func.parameters()]
        return [a, slow, fast, *torch.autograd.grad(loss, inputs)]

    with on_host(method) as mixed:
        # Two threads add up the gradient of a time then, one for each device, in an order of their own. The products
        # with differentiated times of Runge-Kutta steps are rounded otherwise on a device.
        assert_same_on_both(run, but=6 if mixed else None, rounded=not isinstance(solver, tm.ALF))


@pytest.mark.parametrize(("solver", "controller", "method"), CASES[:10], ids=repr)
def test_an_event_and_its_gradients_are_those_of_the_cpu(solver, controller, method):
    def run(device: str) -> list[Tensor]:
        y0, level, t = (moved(torch.tensor(x), device) for x in ([1.0, 0.1], 0.3, [0.0, 0.5, 4.0]))
        solution = tm.solve(
            lambda t, y: torch.stack([y[1], -torch.sin(y[0])]),
            *(y0, t),
            solver=solver,
            controller=controller,
            gradient=method,
            event=lambda t, y: y[0] - level,
        )
        loss = solution.event_t + solution.event_y.sin().sum() + solution.y.sum()
        return [solution.event_t, solution.event_y, solution.y, *torch.autograd.grad(loss, [y0, level, t])]

    with on_host(method) as mixed:
        assert_same_on_both(run, but=5 if mixed else None)


@pytest.mark.filterwarnings("ignore:MALI rebuilt a state")
@pytest.mark.parametrize("method", [tm.ACA(), tm.MALI(), tm.MALI(exact=True)], ids=repr)
def test_refreshes_and_rescales_are_those_of_the_cpu(method):
    def run(device: str) -> list[Tensor]:
        y0 = moved(VAN_DER_POL.y0, device, torch.float32)
        solution = tm.solve(VAN_DER_POL.f, y0 / 100, (0.0, 12.0), controller=tm.FixedStep(0.05), gradient=method)
        assert solution.stats.n_refreshes > 0
        assert solution.stats.n_rescales > 0 or not getattr(method, "exact", False)
        return [solution.y, *torch.autograd.grad(solution.y[-1].square().sum(), y0)]

    assert_same_on_both(run)


@pytest.mark.filterwarnings("ignore:MALI rebuilt a state")
def test_a_segment_that_drifted_is_solved_again_as_on_the_cpu():
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        net, y0 = nn.Linear(4, 4).to(device), moved(torch.linspace(0.5, 1.5, 4), device, torch.float32)
        solution = tm.solve(lambda t, y: y + torch.tanh(net(y)), y0, (0.0, 10.0), controller=tm.FixedStep(0.05))
        grads = torch.autograd.grad(solution.y[-1].square().sum(), [y0, *net.parameters()])
        assert solution.stats.n_reruns > 0
        return [solution.y, *grads]

    assert_same_on_both(run)


class Decoded(nn.Module):
    """A field, a loss at each output time, and all that they depend on."""

    data: Tensor

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.decoder = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)), nn.Linear(3, 2)
        self.register_buffer("data", torch.randn(7, 4, 2))
        self.double()

    def field(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) * (1 + t)

    def loss(self, t: Tensor, y: Tensor, k: int) -> Tensor:
        return ((self.decoder(y) * torch.cos(t) - self.data[k]) ** 2).mean(1)


@pytest.mark.parametrize(
    ("solver", "controller", "method"),
    [
        (tm.ALF(), FIXED, tm.MALI()),
        (tm.ALF(), FIXED, tm.MALI(exact=True)),
        (tm.ALF(order=4), ADAPTIVE, tm.MALI()),
        (tm.Dopri5(), ADAPTIVE, tm.ACA()),
        (tm.ALF(), FIXED, tm.Naive()),
        (tm.RK4(), FIXED, tm.Adjoint()),
    ],
    ids=repr,
)
def test_an_observed_loss_is_that_of_the_cpu(solver, controller, method):
    def run(device: str) -> list[Tensor]:
        case = Decoded().to(device)
        y0 = moved(torch.linspace(-1, 1, 12).reshape(4, 3), device)
        t = moved(torch.linspace(0, 2, 7), device)
        how: dict[str, Any] = {"solver": solver, "controller": controller, "gradient": method}
        solution = tm.solve(case.field, y0, t, **how, observe=case.loss)
        assert solution.observed is not None
        loss = solution.observed.sum() + solution.y[-1].sin().sum()
        return [solution.observed, solution.y, *torch.autograd.grad(loss, [y0, t, *case.parameters()])]

    with on_host(method) as mixed:
        assert_same_on_both(run, but=3 if mixed else None, rounded=not isinstance(solver, tm.ALF))


@pytest.mark.parametrize("exact", [True, "int64"])
def test_a_code_leads_back_to_the_same_bits(exact):
    def run(device: str) -> list[Tensor]:
        y0 = VAN_DER_POL.y0.to(device, torch.float32)
        how: dict[str, Any] = {"controller": tm.FixedStep(0.05), "gradient": tm.MALI(exact=exact)}
        solution = tm.solve(VAN_DER_POL.f, y0, (0.0, 4.0), **how, return_code=True)
        assert solution.code is not None
        back = tm.solve_back(VAN_DER_POL.f, solution.code)
        assert torch.allclose(back, y0, atol=1e-7)  # y0 as the grid has it
        return [solution.y, back]

    assert_same_on_both(run)


# 2. Modules.


class Drop(nn.Module):
    """F.dropout as it is on CUDA and here, and on the CPU is not: fused, with other bits."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.3, True)[0]


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        first, last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.net = nn.Sequential(first, nn.BatchNorm2d(8), nn.Tanh(), Drop(), last)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y) * (1 + t)


@pytest.mark.filterwarnings("ignore:f contracts too much")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("method", [tm.Naive(), tm.ACA(), tm.MALI(), tm.MALI(exact="int64"), tm.Adjoint()], ids=repr)
def test_a_block_with_batchnorm_and_dropout_is_that_of_the_cpu(method, layout):
    def run(device: str) -> list[Tensor]:
        block = ODEBlock(Convolved(), gradient=method).to(device)
        block.to(memory_format=layout)  # type: ignore[call-overload]
        x = torch.linspace(-1, 1, 2 * 3 * 5 * 5).reshape(2, 3, 5, 5).to(memory_format=layout)
        x = x.to(device).requires_grad_()
        torch.manual_seed(1)
        y = block(x)
        assert y.is_contiguous(memory_format=layout)
        grads = torch.autograd.grad(y.square().sum(), [x, *block.parameters()])
        return [y, *grads, *block.buffers()]

    assert_same_on_both(run)


def test_a_block_with_learned_times_is_trained_to_the_same_weights():
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        func = Decoded().float()
        block = ODEBlock(func.field, nn.Parameter(torch.tensor([0.0, 1.0])), all_outputs=True)
        model = nn.ModuleList([func, block]).to(device)
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.05)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(3):
            optimiser.zero_grad()
            block(func.data[0, :, :1].expand(4, 3).contiguous()).square().sum().backward()
            optimiser.step()
        after = [p.detach() for p in model.parameters() if p.grad is not None]
        assert len(after) == len(before) - 2  # the decoder has no part in it
        assert not any(map(torch.equal, after[:2], before[:2]))
        return after

    assert_same_on_both(run)


class Net(nn.Module):
    def __init__(self, d: int = 3):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(d + 1, 16), nn.Linear(16, d)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(torch.cat([x, t.expand(len(x), 1)], 1))))


@pytest.mark.parametrize(
    ("method", "trace"),
    [
        (tm.MALI(), Hutchinson()),
        (tm.MALI(), ExactTrace()),
        (tm.MALI(exact=True), Hutchinson()),
        (tm.Adjoint(), Hutchinson()),
    ],
    ids=repr,
)
def test_a_flow_is_that_of_the_cpu(method, trace):
    def run(device: str) -> list[Tensor]:
        flow = CNF(Net(), trace=trace, kinetic=True, jacobian=True, gradient=method).to(device)
        x = moved(torch.linspace(-1, 1, 15).reshape(5, 3), device, torch.float32)
        torch.manual_seed(1)
        found = flow(x)
        assert found.kinetic is not None and found.jacobian is not None
        loss = (found.z.square().sum(1) - found.log_det + found.kinetic + found.jacobian).sum()
        return [*found[:4], *torch.autograd.grad(loss, [x, *flow.parameters()])]

    assert_same_on_both(run)


def test_a_flow_samples_and_inverts_its_code_as_on_the_cpu():
    def run(device: str) -> list[Tensor]:
        flow = CNF(Net()).to(device)
        torch.manual_seed(1)
        x = flow.sample((5, 3)).detach()
        back = flow.inverse(flow(x, return_code=True).code)
        assert torch.allclose(back, x, atol=1e-6)
        return [x, back, flow.log_prob(x)]

    assert_same_on_both(run)


class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 15)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + 0.1 * t).unflatten(-1, (5, 3))


@pytest.mark.parametrize("coeffs", [natural_cubic_coeffs, hermite_cubic_coeffs, linear_coeffs])
@pytest.mark.parametrize("all_outputs", [False, True])
def test_a_neural_cde_is_that_of_the_cpu(coeffs, all_outputs):
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        how: dict[str, Any] = {"control": LinearControl} if coeffs is linear_coeffs else {}
        model = NeuralCDE(Matrix(), nn.Linear(3, 5), all_outputs=all_outputs, **how).to(device)
        x, knots = torch.randn(2, 6, 3).to(device), torch.tensor([0.0, 0.5, 1.5, 2.0, 3.5, 4.0]).to(device)
        path = coeffs(x, knots).requires_grad_()
        z = model(path, knots)
        return [z, *torch.autograd.grad(z.square().sum(), [path, *model.parameters()])]

    assert_same_on_both(run)


def test_an_ode_rnn_is_that_of_the_cpu():
    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        net = ODERNN(ODERNNCell(Decoded().float().field, nn.RNNCell(2, 3))).to(device)
        slope = net.cell.func.__self__.to(device)
        x, t, h0 = torch.randn(4, 6, 2), torch.linspace(0, 2, 6), torch.zeros(4, 3)
        x, t, h0 = (moved(tensor, device, torch.float32) for tensor in (x, t, h0))
        states, h = net(x, t, h0, observed=x[..., 0] > 0)
        return [states, h, *torch.autograd.grad(states.square().sum(), [x, t, h0, *slope.net.parameters()])]

    assert_same_on_both(run)


@pytest.mark.parametrize("method", [tm.ACA(), tm.MALI(), tm.MALI(exact=True), tm.Adjoint()], ids=repr)
def test_under_autocast_f_is_cast_as_on_the_cpu(method):
    """The backward pass outside of it. Without the cache of cast weights: a python backend cannot fill it."""
    dtypes = []

    def run(device: str) -> list[Tensor]:
        net = Net().to(device)
        net.last.register_forward_hook(lambda module, args, u: dtypes.append(u.dtype))
        y0 = moved(torch.linspace(-1, 1, 12).reshape(4, 3), device, torch.float32)
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            y = tm.solve(net, y0, (0.0, 1.0), controller=FIXED, gradient=method).y
        return [y, *torch.autograd.grad(y[-1].square().sum(), [y0, *net.parameters()])]

    assert_same_on_both(run)
    assert set(dtypes) == {torch.bfloat16}


def test_an_audit_counts_the_same_errors_and_bytes():
    def rows(device: str) -> list[tuple]:
        y0 = torch.linspace(0.5, 1.5, 64, dtype=torch.float64).to(device)
        found = audit(lambda t, y: -y, y0, (0.0, 1.0), methods=("aca", "mali", "exact"))
        return [(row.name, row.error, row.stats, row.failure, row.peak_bytes) for row in found.rows]

    for (*found, peak), (*wanted, wanted_peak) in zip(rows(NAME), rows("cpu"), strict=True):
        assert found == wanted
        assert peak == pytest.approx(wanted_peak, rel=0.1)  # numbers that are read are copied first


def test_memory_of_mali_on_the_device_does_not_grow_with_the_number_of_steps():
    net, y0 = Net().to(NAME), moved(torch.ones(64, 3), NAME, torch.float32)

    def peak(n: int) -> int:
        return peak_bytes(lambda: tm.solve(net, y0, (0.0, 1.0), controller=tm.FixedStep(1 / n)).y.sum().backward())

    assert peak(40) == peak(20) > 0


# 3. Random numbers.


@pytest.mark.parametrize("method", [tm.ACA(), tm.MALI(), tm.MALI(exact=True)], ids=repr)
def test_dropout_on_the_device_is_one_draw_per_solve_and_its_backward(method):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 4)).double().to(NAME)
    y0 = moved(torch.randn(8, 4), NAME)

    def gradient(method: tm.GradientMethod) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        y = tm.solve(lambda t, y: net(y), y0, (0.0, 1.0), controller=FIXED, gradient=method).y
        (g,) = torch.autograd.grad(y[-1].square().sum(), y0)
        return g.cpu(), y[-1].detach().cpu()

    (found, y), (truth, _) = gradient(method), gradient(tm.Naive())
    torch.testing.assert_close(found, truth, rtol=1e-10, atol=1e-12)
    y_next = tm.solve(lambda t, y: net(y), y0, (0.0, 1.0), controller=FIXED, gradient=method).y[-1].cpu()
    assert not torch.equal(y_next, y)  # other dice


def test_random_operations_draw_from_the_generator_they_are_given_or_from_the_device():
    given = torch.Generator().manual_seed(3)
    truth = torch.randn(5, generator=torch.Generator().manual_seed(3))
    of_cpu, of_device = torch.get_rng_state(), torch.get_device_module(NAME).get_rng_state()
    assert torch.equal(torch.randn(5, device=NAME, generator=given).cpu(), truth)
    assert torch.equal(torch.empty(5, device=NAME).normal_(generator=given.manual_seed(3)).cpu(), truth)
    assert torch.equal(torch.get_device_module(NAME).get_rng_state(), of_device)
    x = torch.ones(64, device=NAME)
    for draw in (lambda: torch.rand(5, device=NAME), lambda: F.dropout(x), lambda: F.rrelu(-x, training=True)):
        torch.get_device_module(NAME).set_rng_state(of_device)
        first, second = draw(), draw()
        assert not torch.equal(first, second)
        torch.get_device_module(NAME).set_rng_state(of_device)
        assert torch.equal(draw(), first)
    assert torch.equal(torch.get_rng_state(), of_cpu)


# 4. Accidents, and waits.


@pytest.mark.parametrize(
    ("f", "operation"),
    [
        (lambda t, y: y * torch.ones(3), "mul"),
        (lambda t, y: y + torch.tensor(2.0), "add"),  # which CUDA takes for a number
        (lambda t, y: torch.where(torch.tensor([True, False, True]), y, -y), "where"),
        (lambda t, y: y[torch.tensor([2, 1, 0])], "index"),
        (lambda t, y: F.linear(y, torch.eye(3)), "mm"),
        (lambda t, y: torch.cat([y[:1], torch.zeros(2)]), "cat"),
    ],
)
def test_a_tensor_of_the_cpu_in_f_fails(f, operation):
    with pytest.raises(
        RuntimeError, match=rf"aten\.({operation})\..* is given tensors on {NAME}:0 and, of shape .* CPU"
    ):
        tm.solve(f, torch.ones(3, device=NAME), (0.0, 1.0), controller=FIXED)


def test_naive_alone_multiplies_the_state_with_times_on_the_host():
    t, y0 = torch.tensor([0.0, 1.0], requires_grad=True), torch.ones(3, device=NAME)
    with pytest.raises(RuntimeError, match=r"aten.mul.Tensor is given .*, of shape \(\), on the CPU"):
        tm.solve(lambda t, y: -y, y0, t, controller=FIXED, gradient=tm.Naive())


def waits(controller: tm.StepController, method: tm.GradientMethod, solver: tm.Solver = ALF) -> tuple[Counter, Any]:
    net, y0 = Net().to(NAME), moved(torch.linspace(-1, 1, 12).reshape(4, 3), NAME, torch.float32)
    with transfers() as seen:
        solution = tm.solve(net, y0, (0.0, 1.0), solver=solver, controller=controller, gradient=method)
        solution.y[-1].sum().backward()
    assert not seen.writes
    assert not solution.stats.n_refreshes and not solution.stats.n_reruns
    return Counter(seen.reads), solution.stats


@pytest.mark.parametrize("n", [40, 400])
def test_fixed_steps_wait_once_in_eight_and_twice_per_solve(n):
    found, stats = waits(tm.FixedStep(1 / n), tm.MALI())
    assert stats.n_steps == n
    assert found.total() == n // STEPS_PER_LOOK + AT_THE_END + COMPARISON, found


@pytest.mark.parametrize("n", [40, 120])
@pytest.mark.parametrize(
    ("method", "per_solve"),
    [
        (tm.Naive(), AT_THE_END),
        (tm.ACA(), AT_THE_END + COMPARISON),
        (tm.MALI(checkpoint_every=None), AT_THE_END + COMPARISON),
        (tm.MALI(checkpoint_every=20), AT_THE_END + COMPARISON),  # and one at each checkpoint
        (tm.Adjoint(), 2 * AT_THE_END + SAME_F),
    ],
    ids=repr,
)
def test_every_method_waits_as_often_for_many_steps_as_for_few_but_for_the_detector(method, per_solve, n):
    found, stats = waits(tm.FixedStep(1 / n), method)
    assert stats.n_steps == n
    looks = n // STEPS_PER_LOOK * (2 if isinstance(method, tm.Adjoint) else 1)
    # ACA looks at the last step alone; the first checkpoint is the start.
    compared = 0 if isinstance(method, tm.ACA) else max(0, stats.n_checkpoints - 1)
    assert found.total() == looks + per_solve + compared * COMPARISON, found


@pytest.mark.parametrize("solver", [tm.RK4(), tm.ALF(refresh="never"), tm.ALF(eta=0.95, refresh="never")], ids=repr)
def test_fixed_steps_without_a_detector_do_not_wait(solver):
    found, _ = waits(tm.FixedStep(0.05), tm.ACA(), solver)
    assert found.total() == AT_THE_END + COMPARISON, found


@pytest.mark.parametrize("order", [4, 6])
def test_fixed_steps_of_high_order_wait_once_per_step(order):
    """They have 12 and 20 evaluations."""
    found, stats = waits(tm.FixedStep(0.1), tm.MALI(), tm.ALF(order=order))
    assert found.total() == stats.n_steps + AT_THE_END + COMPARISON, found


@pytest.mark.parametrize("controller", [tm.AdaptiveStep(1e-4, 1e-5), tm.AdaptiveStep(1e-3, 1e-4, h0=0.5)], ids=repr)
@pytest.mark.parametrize(
    ("solver", "method"), [(tm.ALF(), tm.MALI()), (tm.ALF(order=4), tm.MALI()), (tm.Dopri5(), tm.ACA())], ids=repr
)
def test_adaptive_steps_wait_once_per_attempt(solver, method, controller):
    found, stats = waits(controller, method, solver)
    start = FIRST_STEP if controller.h0 is None else 0
    assert found.total() == stats.n_steps + stats.n_rejected + start + AT_THE_END + COMPARISON, found


@pytest.mark.parametrize("exact", [True, "int64"])
@pytest.mark.parametrize("controller", [tm.FixedStep(1 / 40), tm.FixedStep(1 / 80), tm.AdaptiveStep(1e-3, 1e-4)])
def test_exact_steps_wait_as_often_as_their_range_is_looked_at(controller, exact):
    found, stats = waits(controller, tm.MALI(exact=exact))
    assert not stats.n_rescales  # a step that does not fit is repeated
    n = stats.n_steps + stats.n_rejected
    looks = n + FIRST_STEP if controller.adaptive else math.ceil(n / EXACT_STEPS_PER_LOOK)
    per_solve = EXACT_START + ONE_SCALE + SAME_BITS + AT_THE_END + COMPARISON
    assert found.total() == looks + per_solve, found


@pytest.mark.parametrize(
    ("solver", "method"),
    [
        (tm.ALF(refresh="never"), tm.ACA()),
        (tm.ALF(refresh="never"), tm.MALI(checkpoint_every=None)),
        (tm.RK4(), tm.ACA()),
        (tm.Dopri5(), tm.ACA()),
        (tm.Reversible(), tm.MALI(checkpoint_every=None, unsafe_damping=True)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("h", [0.1, 0.05])
@pytest.mark.filterwarnings("ignore:The inverse of Reversible")
def test_gradients_of_times_do_not_wait_either(solver, method, h):
    t, y0 = torch.tensor([0.0, 0.5, 1.0], requires_grad=True), torch.ones(3, device=NAME)
    with transfers() as seen:
        y = tm.solve(lambda t, y: -t * y, y0, t, solver=solver, controller=tm.FixedStep(h), gradient=method).y
        y.sum().backward()
    assert len(seen.reads) == AT_THE_END + COMPARISON + 1 and not seen.writes, seen  # dL/dt goes where t is
    assert t.grad is not None and t.grad.all()


@pytest.mark.parametrize("h", [0.1, 0.05])
def test_running_statistics_are_compared_once_per_solve(h):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4)).to(NAME)
    y0, controller = moved(torch.randn(8, 4), NAME, torch.float32), tm.FixedStep(h)
    with transfers() as seen:
        y = tm.solve(lambda t, y: net(y), y0, (0.0, 1.0), solver=tm.RK4(), controller=controller, gradient=tm.ACA()).y
        y[-1].sum().backward()
    assert len(seen.reads) == BATCHNORM + AT_THE_END + COMPARISON and not seen.writes, seen


def test_times_on_the_device_are_read_once():
    t, y0 = torch.linspace(0, 1, 11, device=NAME), torch.ones(3, device=NAME)
    with transfers() as seen, torch.no_grad():
        tm.solve(lambda t, y: -y, y0, t, controller=tm.FixedStep(0.1), solver=tm.ALF(refresh="never"))
    assert len(seen.reads) == 1 + AT_THE_END and not seen.writes, seen


# 5. The device itself.


def test_waits_are_listed_with_where_they_are():
    x = torch.linspace(-1, 1, 5).to(NAME)
    actions: list[Callable[[], Any]] = [
        lambda: x.sum().item(),
        lambda: float(x.sum()),
        lambda: bool(x[0] > 0),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: torch.zeros(5).copy_(x),
        lambda: torch.equal(x, x),
        lambda: torch.allclose(x, x),
        lambda: x.nonzero(),
        lambda: x[x > 0],
    ]
    for i, action in enumerate(actions):
        with transfers() as seen:
            action()
        assert len(seen.reads) == 1 and "test_device.py" in seen.reads[0] and not seen.writes, i
    with transfers() as seen, transfers() as inner:
        _ = x[torch.tensor([0, 2]).to(NAME)] + 2 * x.clamp(min=0)[:2].exp().sum()  # indices that are no mask, numbers
        torch.tensor([1.0, 2.0], device=NAME)
        torch.arange(3, device=NAME)
    assert seen == inner and not seen.reads and len(seen.writes) == 2
    x.tolist()
    assert not seen.reads


def test_operations_in_place_views_out_and_foreach_work_on_the_device():
    def run(device: str) -> list[Tensor]:
        x, y = torch.arange(12.0, device=device).reshape(3, 4), torch.full((3, 4), 2.0).to(device)
        version, view = x._version, x.t()[1:, :2]
        view.add_(1).mul_(y.t()[1:, :2])
        assert x._version == version + 2 and view._base is not None
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        out = torch.empty(0, device=device)
        torch.add(x, y, out=out)  # resized
        torch._foreach_add_([x, y], [y, x], alpha=0.5)
        products = torch._foreach_mul([x, y], 3.0)
        return [x, y, view, out, *products, x.unsqueeze_(0), *y.chunk(2)]

    assert_same_on_both(run)


def test_modules_on_the_device_are_copied_cast_and_loaded():
    torch.manual_seed(0)
    net = nn.Linear(3, 3).to(NAME)
    twin = copy.deepcopy(net)
    twin.weight.detach().zero_()
    assert net.weight.any() and isinstance(twin.weight, nn.Parameter)
    twin.load_state_dict(net.state_dict())
    assert torch.equal(twin.weight, net.weight)
    y = twin.double()(torch.ones(2, 3, device=NAME, dtype=torch.float64))
    assert y.dtype == torch.float64 and y.device.type == NAME
    assert all(p.device.type == "cpu" for p in twin.cpu().parameters())


class Modes(torch.autograd.Function):
    """Notes thread and modes in which its backward pass runs."""

    seen: list[tuple]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        modes = len(_get_current_dispatch_mode_stack()), len(_get_current_function_mode_stack())
        cast = torch.is_autocast_enabled(NAME), torch.get_autocast_dtype(NAME), torch.is_autocast_cache_enabled()
        Modes.seen.append((threading.current_thread().name, modes, cast))
        return g


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_backward_runs_in_a_thread_of_the_device_under_the_modes_of_the_caller():
    Modes.seen = []
    with Dispatched(), Called(), torch.autocast(NAME, torch.bfloat16, cache_enabled=False):
        y = Modes.apply(torch.ones(2, device=NAME, requires_grad=True)).sum()
        # Through the engine: Tensor.backward is a call that a function mode sees, and it is off in what it sees.
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((y,), (torch.ones_like(y),), False, False, (), True, accumulate_grad=True)
    ((thread, modes, cast),) = Modes.seen
    assert thread != threading.current_thread().name
    assert modes == (1, 1)
    assert cast == (True, torch.bfloat16, True)  # the cache alone is as in a new thread


def test_several_threads_solve_on_the_device_at_once():
    net = Net().to(NAME)

    def gradient(seed: int) -> Tensor:
        y0 = moved(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)), NAME, torch.float32)
        y = tm.solve(net, y0, (0.0, 1.0), controller=FIXED).y
        return torch.autograd.grad(y[-1].square().sum(), y0)[0].cpu()

    truth, found = [gradient(seed) for seed in range(4)], {}
    threads = [threading.Thread(target=lambda s=seed: found.update({s: gradient(s)})) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[seed], truth[seed]) for seed in range(4))
