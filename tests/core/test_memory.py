"""Peak memory in bytes of live tensors, and how often the host waits for a device."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchmali as tm
from torchmali.measure import LiveBytes, peak_bytes

STEPS = (16, 64, 256, 1024)


def two_layers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    return net, torch.randn(32, 8)


def one_gradient(net, y0, method, n_steps, solver):
    def run():
        net.zero_grad()
        y = y0.clone().requires_grad_()
        controller = tm.FixedStep(1 / n_steps)
        solution = tm.solve(lambda t, y: net(y), y, [0.0, 1.0], solver=solver, controller=controller, gradient=method)
        (solution.y[-1] ** 2).sum().backward()

    return run


def peaks(method, solver, steps=STEPS):
    net, y0 = two_layers()
    return [peak_bytes(one_gradient(net, y0, method, n, solver)) for n in steps], y0.nbytes


def slope(method, solver, steps=(32, 64, 128)):
    """Bytes per step, as multiples of the bytes of z."""
    peak, state = peaks(method, solver, steps)
    return (peak[-1] - peak[0]) / (steps[-1] - steps[0]) / state


@pytest.mark.parametrize("method", [tm.MALI(), tm.Adjoint()], ids=repr)
def test_peak_memory_does_not_grow_with_the_number_of_steps(method):
    peak, _ = peaks(method, tm.ALF())
    assert max(peak) <= 1.02 * min(peak)


@pytest.mark.parametrize(("solver", "states"), [(tm.ALF(), 2), (tm.RK4(), 1), (tm.Dopri5(), 1)], ids=repr)
def test_aca_keeps_one_state_of_the_solver_per_step(solver, states):
    assert slope(tm.ACA(), solver) == pytest.approx(states, rel=0.02)


def test_naive_keeps_the_graphs_of_all_steps():
    assert slope(tm.Naive(), tm.ALF()) >= 3 * slope(tm.ACA(), tm.ALF())


def test_naive_through_the_search_keeps_rejected_attempts_too():
    net, y0 = two_layers()

    def run(through_search):
        y = y0.clone().requires_grad_()
        controller = tm.AdaptiveStep(1e-3, 1e-4, h0=1.0)  # too long: several attempts are rejected
        solution = tm.solve(
            lambda t, y: net(y), y, [0.0, 1.0], controller=controller, gradient=tm.Naive(through_search)
        )
        assert solution.stats.n_rejected > 1
        (solution.y[-1] ** 2).sum().backward()

    assert peak_bytes(lambda: run(True)) > 1.05 * peak_bytes(lambda: run(False))


def test_a_solve_without_gradients_keeps_no_states():
    net, y0 = two_layers()

    def run(n_steps):
        with torch.no_grad():
            tm.solve(lambda t, y: net(y), y0, [0.0, 1.0], controller=tm.FixedStep(1 / n_steps), gradient=tm.ACA())

    assert peak_bytes(lambda: run(256)) == peak_bytes(lambda: run(16))


def test_live_bytes_counts_what_is_alive():
    kept = torch.ones(1000)
    with LiveBytes() as live:
        a = kept * 2  # 4000 bytes
        b = a + 1  # 8000
        del a
        c = b.view(10, 100)  # no new memory
        kept.add_(1)  # from before
        del b
        assert live.live == 4000
        del c
        assert live.live == 0
    assert live.peak == 8000


@pytest.mark.parametrize("method", [tm.Adjoint(), tm.ACA(), tm.MALI()], ids=repr)
def test_deleting_the_output_frees_everything(method):
    net, y0 = two_layers()
    y0.requires_grad_()
    solution = tm.solve(lambda t, y: net(y), y0, [0.0, 1.0], controller=tm.FixedStep(0.1), gradient=method)
    node = weakref.ref(solution.y.grad_fn)
    gc.disable()
    try:
        del solution
        assert node() is None  # no reference cycle keeps it
    finally:
        gc.enable()


@pytest.mark.cuda
@pytest.mark.parametrize("method", [tm.Adjoint(), tm.ACA(), tm.MALI()], ids=repr)
def test_a_gpu_gives_the_cpus_gradient(method):
    net, y0 = two_layers()

    def gradient(device):
        net.to(device)
        y = y0.to(device).requires_grad_()
        t = torch.tensor([0.0, 0.3, 1.0], requires_grad=True)
        solution = tm.solve(lambda t, y: net(y), y, t, controller=tm.FixedStep(0.1), gradient=method)
        return [g.cpu() for g in torch.autograd.grad((solution.y**2).sum(), [y, t, *net.parameters()])]

    for on_gpu, on_cpu in zip(gradient("cuda"), gradient("cpu"), strict=True):
        assert torch.allclose(on_gpu, on_cpu, rtol=1e-3, atol=1e-4)


class HostReads(TorchDispatchMode):
    """Counts .item(), bool(tensor), .tolist() and the like."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __enter__(self):
        self.tolist = torch.Tensor.tolist  # on the CPU it goes past the dispatcher

        def counted(tensor):
            self.n += 1
            return self.tolist(tensor)

        torch.Tensor.tolist = counted  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error):
        torch.Tensor.tolist = self.tolist  # type: ignore[method-assign]
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Times are float64 numbers on the host, wherever the state is (here float32): no device waits for them.
        self.n += func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.float64
        return func(*args, **(kwargs or {}))


def host_reads(method: tm.GradientMethod, controller: tm.StepController, solver: tm.Solver):
    net, y0 = two_layers()
    y0.requires_grad_()
    t = torch.tensor([0.0, 0.4, 1.0], requires_grad=not isinstance(method, tm.Naive))
    with HostReads() as forward:
        solution = tm.solve(lambda t, y: net(y), y0, t, solver=solver, controller=controller, gradient=method)
    loss = (solution.y**2).sum()
    with HostReads() as backward:
        loss.backward()
    return forward.n, backward.n, solution.stats


def test_the_counter_counts():
    with HostReads() as reads:
        bool(torch.ones(()) > 0)
        torch.ones(()).item()
        float(torch.ones(()))
    assert reads.n == 3


PER_SOLVE = 2  # the times, and whether the end is finite


@pytest.mark.parametrize("solver", [tm.ALF(refresh="never"), tm.ALF(refresh=10), tm.RK4(), tm.Dopri5()], ids=repr)
@pytest.mark.parametrize("method", [tm.Naive(), tm.ACA(), tm.MALI()], ids=repr)
def test_a_fixed_step_loop_reads_nothing_from_the_device(method, solver):
    if isinstance(method, tm.MALI) and not isinstance(solver, tm.ReversibleSolver):
        method = tm.ACA()
    for h in (0.2, 0.01):
        forward, backward, stats = host_reads(method, tm.FixedStep(h), solver)
        assert forward <= PER_SOLVE
        # What was rebuilt is compared with the truth; with ACA the last step alone, in case that f is another one. One
        # read tells that all components are close, a second one how far the others are off.
        compared = {tm.Naive: 0, tm.ACA: 1, tm.MALI: 1 + stats.n_refreshes}[type(method)]
        assert compared <= backward <= 2 * compared


@pytest.mark.parametrize("method", [tm.Naive(), tm.ACA(), tm.MALI()], ids=repr)
@pytest.mark.parametrize(("order", "period"), [(2, 8), (4, 1), (6, 1)])
def test_the_refresh_detector_reads_once_in_eight_evaluations_or_more(order, period, method):
    forward, _, stats = host_reads(method, tm.FixedStep(0.025), tm.ALF(order=order))
    assert stats.n_refreshes == 0
    assert forward == PER_SOLVE + stats.n_steps // period


def test_exact_mode_reads_once_per_step():
    forward, _, stats = host_reads(tm.MALI(exact=True), tm.FixedStep(0.025), tm.ALF())
    starts = 2  # the scales of z0 and v0
    assert stats.n_refreshes == 0
    assert forward <= PER_SOLVE + starts + stats.n_steps + stats.n_rescales + 1  # 1: scales that are mixed


@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4), tm.Dopri5(), tm.Bosh3()], ids=repr)
@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
def test_an_adaptive_attempt_reads_once(solver, tolerance):
    controller = tm.AdaptiveStep(tolerance, tolerance / 10, h0=0.3)
    forward, backward, stats = host_reads(tm.ACA(), controller, solver)
    assert forward == PER_SOLVE + stats.n_steps + stats.n_rejected
    assert backward == 1


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
def test_an_adaptive_attempt_in_exact_mode_reads_once(tolerance):
    controller = tm.AdaptiveStep(tolerance, tolerance / 10, h0=0.3)
    forward, _, stats = host_reads(tm.MALI(exact=True), controller, tm.ALF())
    assert forward <= PER_SOLVE + 4 + stats.n_steps + stats.n_rejected + 2 * stats.n_refreshes + stats.n_rescales


def test_hairers_rule_reads_a_fixed_number_of_times():
    forward, _, stats = host_reads(tm.MALI(), tm.AdaptiveStep(1e-3, 1e-4), tm.ALF())
    assert forward - (stats.n_steps + stats.n_rejected + 1) <= 3
