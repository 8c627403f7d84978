"""Paths through data, and equations that they drive. torchcde is the reference."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torchcde
from scipy.interpolate import CubicSpline
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchmali as tm
from torchmali.nn.cde import NeuralCDE, _slope
from torchmali.nn.control import CubicControl, LinearControl, hermite_cubic_coeffs, linear_coeffs, natural_cubic_coeffs

COEFFS = {  # ours and theirs
    "linear": (linear_coeffs, torchcde.linear_interpolation_coeffs),
    "hermite": (hermite_cubic_coeffs, torchcde.hermite_cubic_coefficients_with_backward_differences),
    "natural": (natural_cubic_coeffs, torchcde.natural_cubic_coeffs),
}
CONTROLS = {
    "linear": (LinearControl, torchcde.LinearInterpolation),
    "hermite": (CubicControl, torchcde.CubicSpline),
    "natural": (CubicControl, torchcde.CubicSpline),
}
BATCHES = [(), (3,), (2, 3)]
HIDDEN, CHANNELS = 5, 3


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


def series(length: int, batch: tuple[int, ...] = ()) -> Tensor:
    return torch.randn(*batch, length, CHANNELS, dtype=torch.float64)


def uneven(length: int) -> Tensor:
    return (0.2 + torch.rand(length, dtype=torch.float64)).cumsum(0)


def same(ours: Tensor, theirs: Tensor) -> None:
    """Up to round-off: the same formulas in another order."""
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class Matrix(nn.Module):
    """From z to a matrix (..., hidden, channels)."""

    def __init__(self, hidden: int = HIDDEN, channels: int = CHANNELS):
        super().__init__()
        self.channels = channels
        self.linear = nn.Linear(hidden, hidden * channels, dtype=torch.float64)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + 0.1 * t).unflatten(-1, (-1, self.channels))


def model(**how: Any) -> Any:
    return NeuralCDE(Matrix(), nn.Linear(CHANNELS, HIDDEN, dtype=torch.float64), **how)


class Operations(TorchDispatchMode):
    """The names of all operations that are run inside."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


# Coefficients


@pytest.mark.parametrize("has_knots", [False, True])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("length", [2, 3, 17])
@pytest.mark.parametrize("kind", COEFFS)
def test_coefficients_are_those_of_torchcde(kind, length, batch, has_knots):
    ours, theirs = COEFFS[kind]
    x, t = series(length, batch), uneven(length) if has_knots else None
    same(ours(x, t), theirs(x, t))


@pytest.mark.parametrize("has_knots", [False, True])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("length", [2, 3, 17])
@pytest.mark.parametrize("kind", ["linear", "hermite"])
def test_missing_values_are_filled_as_torchcde_does(kind, length, batch, has_knots):
    ours, theirs = COEFFS[kind]
    x, t = series(length, batch), uneven(length) if has_knots else None
    x[torch.rand_like(x) < 0.5] = torch.nan
    x[..., 0] = torch.nan  # never observed
    x[..., 0, 1], x[..., -1, 1] = torch.nan, 1.0  # first and last
    x[..., 0, 2], x[..., -1, 2] = 2.0, torch.nan
    same(ours(x, t), theirs(x, t))


def test_filling_keeps_observations_and_passes_gradients_around_gaps():
    x = torch.tensor([[1.0], [torch.nan], [torch.nan], [4.0], [torch.inf]], dtype=torch.float64, requires_grad=True)
    y = linear_coeffs(x)
    assert y.flatten().tolist() == pytest.approx([1, 2, 3, 4, torch.inf])
    y[:4].sum().backward()
    assert x.grad is not None and x.grad.flatten().tolist() == pytest.approx([2, 0, 0, 2, 0])


def test_rectilinear_paths_are_those_of_torchcde():
    x = series(6, (2,))
    x[..., 1] = uneven(6)
    x[0, 2:4, 0] = x[1, 5, 2] = torch.nan
    y = linear_coeffs(x, rectilinear=1)
    assert y.shape == (2, 11, CHANNELS)
    same(y, torchcde.linear_interpolation_coeffs(x, rectilinear=1))
    x[1, 0, 0] = torch.nan
    with pytest.warns(tm.SolverWarning, match="not yet observed"):
        y = linear_coeffs(x, rectilinear=1)
    with pytest.warns(UserWarning, match="begins with missing values"):
        same(y, torchcde.linear_interpolation_coeffs(x, rectilinear=1))


def test_a_long_natural_spline_is_that_of_scipy():
    x, t = series(5000), uneven(5000)
    d, c, b, a = torch.tensor(CubicSpline(t.numpy(), x.numpy(), bc_type="natural").c)
    torch.testing.assert_close(natural_cubic_coeffs(x, t), torch.cat((a, b, 2 * c, 3 * d), -1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("coeffs", [natural_cubic_coeffs, hermite_cubic_coeffs])
def test_coefficients_can_be_differentiated(coeffs):
    x, t = series(6, (2,)).requires_grad_(), uneven(6).requires_grad_()
    assert torch.autograd.gradcheck(coeffs, (x, t))


def test_knots_may_have_more_digits_than_the_data():
    t = 1e6 + uneven(9)  # in float32 all spacings would be wrong
    x = series(9)
    y = natural_cubic_coeffs(x.float(), t)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), natural_cubic_coeffs(x, t), rtol=1e-4, atol=1e-4)
    for ours, exact in ((CubicControl(y, t), CubicControl(y.double(), t)), (LinearControl(x.float(), t), None)):
        slope = ours.derivative(t[4] + 0.1)
        expected = exact.derivative(t[4] + 0.1) if exact else (x[5] - x[4]) / (t[5] - t[4])
        torch.testing.assert_close(slope.double(), expected, rtol=1e-4, atol=1e-4)


def test_the_work_on_a_natural_spline_grows_as_the_logarithm_of_its_length():
    def count(length: int) -> int:
        x = series(length)
        with Operations() as operations:
            natural_cubic_coeffs(x)
        return len(operations.names)

    per_round = count(9) - count(5)
    assert per_round > 0
    assert [count(2 * n) - count(n) for n in (4, 8, 16, 32)] == [per_round] * 4
    assert count(5000) == count(300)  # the rest is below round-off


@pytest.mark.parametrize("kind", ["linear", "hermite"])
def test_the_work_of_filling_does_not_grow_with_the_length(kind):
    def count(length: int) -> int:
        x = series(length)
        x[1::2] = torch.nan
        with Operations() as operations:
            COEFFS[kind][0](x)
        return len(operations.names)

    assert count(10) == count(1000)


# Controls


@pytest.mark.parametrize("has_knots", [False, True])
@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("length", [2, 3, 17])
@pytest.mark.parametrize("kind", CONTROLS)
def test_controls_have_the_values_and_slopes_of_torchcde(kind, length, batch, has_knots):
    t = uneven(length) if has_knots else torch.arange(length, dtype=torch.float64)
    coeffs = COEFFS[kind][1](series(length, batch), t)  # theirs
    control, reference = (c(coeffs, t if has_knots else None) for c in CONTROLS[kind])
    between = (t[1:] + t[:-1]) / 2
    for s in (*t, *between, t[0] - 0.7, t[-1] + 0.7):
        for time in (s, s.item()):
            assert control.evaluate(time).shape == (*batch, CHANNELS)
            same(control.evaluate(time), reference.evaluate(s))
            same(control.derivative(time), reference.derivative(s))


@pytest.mark.parametrize("kind", CONTROLS)
def test_a_path_goes_through_its_data(kind):
    x, t = series(6, (2,)), uneven(6)
    control = CONTROLS[kind][0](COEFFS[kind][0](x, t), t)
    for i, s in enumerate(t):
        same(control.evaluate(s), x[:, i])


@pytest.mark.parametrize("kind", CONTROLS)
def test_the_slope_is_the_derivative_of_the_value(kind):
    x, t = series(6), uneven(6)
    control = CONTROLS[kind][0](COEFFS[kind][0](x, t), t)
    for s in (t[1:] + t[:-1]) / 2:
        jvp: Any = torch.autograd.functional.jvp(control.evaluate, s, torch.ones_like(s))
        same(control.derivative(s), jvp[1])


@pytest.mark.parametrize("kind", CONTROLS)
def test_a_control_never_waits_for_the_device(kind):
    control = CONTROLS[kind][0](COEFFS[kind][0](series(6)))
    s = torch.tensor(2.5, dtype=torch.float64)
    with Operations() as operations:
        control.evaluate(s)
        control.derivative(s)
    assert operations.names and not any("_local_scalar_dense" in name for name in operations.names)
    with Operations() as operations:
        control.coeffs[..., torch.tensor(1), :]  # what it does not do
    assert any("_local_scalar_dense" in name for name in operations.names)


def test_knots_may_be_a_channel_of_the_data():
    x = series(6)
    x[:, 0] = uneven(6)
    t = x[:, 0]
    assert not t.is_contiguous()  # searchsorted would warn
    control = CubicControl(natural_cubic_coeffs(x, t), t)
    same(control.evaluate(t[3])[0], t[3])


# Controlled equations


@pytest.mark.parametrize("h", [0.25, 0.3])  # 0.3: the last step is cut short
@pytest.mark.parametrize("has_knots", [False, True])
@pytest.mark.parametrize("kind", CONTROLS)
def test_a_solution_is_that_of_torchcde_on_the_same_steps(kind, has_knots, h):
    t = uneven(8) if has_knots else None
    coeffs = COEFFS[kind][0](series(8, (2,)), t)
    ours, theirs = CONTROLS[kind]
    net = model(control=ours, solver=tm.RK4ThreeEighths(), controller=tm.FixedStep(h), gradient=tm.ACA())
    path = theirs(coeffs, t)
    z0 = net.initial(path.evaluate(path.interval[0]))
    options: Any = {"step_size": h}
    if kind == "linear":  # our steps end on the knots, where the slope jumps

        def grid(func, y0, t):
            ends = [*path.grid_points.tolist()]
            steps = [np.append(np.arange(a, b - 1e-9, h), b)[:-1] for a, b in itertools.pairwise(ends)]
            return torch.tensor([*np.concatenate(steps), ends[-1]])

        options = {"grid_constructor": grid}
    how = {"adjoint": False, "method": "rk4", "options": options}
    expected: Any = torchcde.cdeint(path, net.func, z0, path.interval, **how)
    torch.testing.assert_close(net(coeffs, t), expected[..., -1, :], rtol=0, atol=1e-12)


def test_a_solution_is_that_of_torchcde_at_all_times():
    coeffs, times = natural_cubic_coeffs(series(8, (2, 3))), torch.tensor([1.0, 2.5, 6.0], dtype=torch.float64)
    controller = tm.AdaptiveStep(1e-8, 1e-10)
    net = model(solver=tm.Dopri5(), controller=controller, gradient=tm.ACA(), all_outputs=True)
    path = torchcde.CubicSpline(coeffs)
    z0 = net.initial(path.evaluate(times[0]))
    expected = torchcde.cdeint(path, net.func, z0, times, adjoint=False, method="dopri5", rtol=1e-8, atol=1e-10)
    z = net(coeffs, t=times)
    assert z.shape == (3, 2, 3, HIDDEN)
    torch.testing.assert_close(z.movedim(0, -2), expected, rtol=0, atol=1e-5)  # 120 steps' errors, grown since


@pytest.mark.parametrize("all_outputs", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {"solver": tm.ALF(order=4), "controller": tm.FixedStep(0.03)},
        {"solver": tm.Dopri5(), "controller": tm.AdaptiveStep(1e-6, 1e-8)},
    ],
)
def test_steps_end_on_the_knots_of_a_linear_path(how, all_outputs):
    """On irregular knots, with outputs in between, in both directions. With steps over the knots: errors of 0.1."""
    t, x = uneven(12), 3 * series(12, (2,))
    net = model(control=LinearControl, gradient=tm.ACA(), all_outputs=all_outputs, **how)
    times = torch.tensor([float(t[0]), float(t[0] + t[-1]) / 2.7, float(t[-1])], dtype=torch.float64)
    for span in (times, times.flip(0)):
        found = net(x, t, t=span)
        path = torchcde.LinearInterpolation(x, t)
        z0 = net.initial(path.evaluate(span[0]))
        way = {"adjoint": False, "method": "dopri5", "rtol": 1e-6, "atol": 1e-8, "options": {"jump_t": t}}
        expected: Any = torchcde.cdeint(path, net.func, z0, span, **way)
        expected = expected.movedim(-2, 0)
        torch.testing.assert_close(found, expected if all_outputs else expected[-1], rtol=0, atol=2e-3)


def test_times_that_float32_cannot_tell_apart_are_warned_of():
    x, t = series(6, (2,)).float(), torch.arange(6.0, dtype=torch.float64) + 1e7
    net = model().float()
    with pytest.warns(tm.SolverWarning, match="Count t from its start"):
        net(natural_cubic_coeffs(x, t), t)


def test_with_a_constant_matrix_z_follows_the_path():
    matrix = torch.randn(HIDDEN, CHANNELS, dtype=torch.float64)
    x, t, z0 = series(6, (2,)), uneven(6), torch.randn(2, HIDDEN, dtype=torch.float64)
    net = NeuralCDE(lambda s, z: matrix.expand(2, -1, -1), control=LinearControl, all_outputs=True)
    z = net(x, t, t=t, z0=z0)  # steps end on the knots
    same(z, z0 + ((x - x[:, :1]) @ matrix.T).movedim(1, 0))


@pytest.mark.parametrize(("solver", "least", "most"), [(tm.ALF(order=4), 3.7, 6), (tm.RK4(), 0.7, 1.3)])
def test_along_lines_alf_keeps_its_order_and_runge_kutta_does_not(solver, least, most):
    """At a knot the slope on the left is seen: ALF does not look there."""
    x = series(6)
    net = model(control=LinearControl, solver=solver, gradient=tm.ACA())
    z = net.initial(x[0])
    fine: Any = {"solver": tm.Dopri5(), "controller": tm.FixedStep(2**-6), "gradient": tm.ACA()}
    line = NeuralCDE(net.func, control=LinearControl, **fine)
    for i in range(5):
        z = line(x[i : i + 2], torch.tensor([i, i + 1.0]), z0=z)
    errors = []
    for h in (2**-4, 2**-5):
        net.controller = tm.FixedStep(h)
        errors.append((net(x) - z).abs().max().item())
    assert least < math.log2(errors[0] / errors[1]) < most


@pytest.mark.parametrize("kind", CONTROLS)
def test_gradients_of_mali_are_those_of_autograd(kind):
    """Of the parameters, the coefficients and the knots, on the same steps."""
    coeffs, t = COEFFS[kind][0](series(8, (2,)), uneven(8)), uneven(8)
    gradients = []
    for gradient in (tm.MALI(), tm.Naive()):
        torch.manual_seed(1)
        net = model(control=CONTROLS[kind][0], gradient=gradient, all_outputs=True)
        inputs = [*net.parameters(), coeffs.clone().requires_grad_(), t.clone().requires_grad_()]
        z = net(*inputs[-2:])
        gradients.append(torch.autograd.grad(z.square().sum(), inputs))
    assert all(g.abs().max() > 1e-3 for g in gradients[0])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


COUNTS = {"alf": (tm.ALF(), 0.8), "alf4": (tm.ALF(order=4), 0.1), "dopri5": (tm.Dopri5(), 0.5)}


@pytest.mark.parametrize("rectilinear", [None, 0])
@pytest.mark.parametrize("name", COUNTS)
def test_knots_as_jumps_save_evaluations_of_adaptive_steps(name, rectilinear):
    """Beside steps that merely end on the knots, at rtol 1e-3."""
    solver, share = COUNTS[name]
    x = torch.cat([torch.arange(20.0).expand(4, -1).unsqueeze(-1), series(20, (4,))[..., 1:]], -1).double()
    coeffs = linear_coeffs(x, rectilinear=rectilinear)
    controller = tm.AdaptiveStep(1e-3, 1e-4)
    torch.manual_seed(0)
    net = model(control=LinearControl, solver=solver, controller=controller, gradient=tm.ACA())
    z = net(coeffs)
    knots = torch.arange(coeffs.shape[-2], dtype=torch.float64)
    slope = partial(_slope, net.func, LinearControl)
    how = {"solver": solver, "controller": replace(controller, land=True), "gradient": tm.ACA()}
    merely = tm.solve(slope, net.initial(coeffs[:, 0]), knots, args=(coeffs, knots), **how)
    fine = {"solver": tm.ALF(order=6), "controller": tm.FixedStep(0.2), "gradient": tm.ACA()}
    expected = NeuralCDE(net.func, net.initial, control=LinearControl, **fine)(coeffs)
    assert net.last_stats is not None
    assert net.last_stats.n_evals_forward < share * merely.stats.n_evals_forward
    assert net.last_stats.n_rejected < 0.3 * merely.stats.n_rejected
    assert (z - expected).abs().max() < 1.5 * (merely.y[-1] - expected).abs().max()
    assert net.last_stats.n_refreshes == (0 if name == "dopri5" else len(knots) - 2)


@pytest.mark.parametrize("controller", [tm.AdaptiveStep(1e-3, 1e-4), tm.FixedStep(0.3, land=False)], ids=repr)
@pytest.mark.parametrize("wants_knots", [False, True])
def test_gradients_across_knots_are_those_of_autograd(controller, wants_knots):
    x, t = series(8, (2,)), uneven(8)
    gradients, values = [], []
    for gradient in (tm.MALI(), tm.Naive()):
        torch.manual_seed(1)
        net = model(control=LinearControl, gradient=gradient, all_outputs=True, controller=controller)
        inputs = [*net.parameters(), x.clone().requires_grad_(), t.clone().requires_grad_(wants_knots)]
        z = net(*inputs[-2:], t=[float(t[0]), float(t[1] + t[2]) / 2, float(t[3]), float(t[-1])])
        gradients.append(torch.autograd.grad(z.square().sum(), inputs if wants_knots else inputs[:-1]))
        values.append(z.detach())
    torch.testing.assert_close(*values, rtol=1e-13, atol=1e-13)
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)


def test_the_gradient_of_knots_is_that_of_the_solution():
    x, t = series(6), uneven(6).requires_grad_()
    net = model(control=LinearControl, solver=tm.Dopri8(), controller=tm.AdaptiveStep(1e-11, 1e-12), gradient=tm.ACA())
    assert torch.autograd.gradcheck(lambda t: net(x, t), (t,), eps=1e-5, atol=1e-6)


def test_gradients_reach_the_data():
    x, net = series(5).requires_grad_(), model()
    assert torch.autograd.gradcheck(lambda x: net(natural_cubic_coeffs(x)), (x,))


def test_the_default_is_the_papers_setting():
    net, coeffs = model(), natural_cubic_coeffs(0.1 * series(8, (2,)))  # so slow that v is never refreshed
    z = net(coeffs)
    assert z.shape == (2, HIDDEN) and net.last_stats is not None
    assert (net.last_stats.n_steps, net.last_stats.n_evals_forward) == (28, 29)
    z.sum().backward()
    assert net.last_stats.n_vjps == 29
    how = {"solver": tm.ALF(), "controller": tm.FixedStep(0.25), "gradient": tm.MALI(), "control": CubicControl}
    assert torch.equal(NeuralCDE(net.func, net.initial, **how)(coeffs), z)


def test_outputs_of_a_cubic_path_cost_no_evaluations_by_default():
    counts, coeffs = [], natural_cubic_coeffs(0.1 * series(8, (2,)))
    for n in (2, 100):
        net = model(all_outputs=True)
        net(coeffs, t=torch.linspace(0, 7, n)).sum().backward()
        assert net.last_stats is not None
        counts.append((net.last_stats.n_evals_forward, net.last_stats.n_evals_backward))
    assert counts[0] == counts[1]
    assert model(control=LinearControl).controller == tm.FixedStep(0.25)  # its steps end on the knots


def test_the_start_may_be_given():
    net, x = model(), series(8, (2,))
    coeffs = natural_cubic_coeffs(x)
    assert torch.equal(NeuralCDE(net.func)(coeffs, z0=net.initial(x[:, 0])), net(coeffs))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_modules_are_copied_with_all_they_are(copied):
    net, coeffs = model(control=LinearControl, controller=tm.FixedStep(0.5)), series(8, (2,))
    z = net(coeffs)
    again = copied(net)
    assert torch.equal(again(coeffs), z)
    assert repr(again) == repr(net)
    assert list(net.state_dict()) == ["func.linear.weight", "func.linear.bias", "initial.weight", "initial.bias"]
    other = model(control=LinearControl, controller=tm.FixedStep(0.5))
    assert not torch.equal(other(coeffs), z)
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(coeffs), z)


def test_modules_go_to_other_dtypes():
    net, x = model(), series(8, (2,))
    z = net.float()(natural_cubic_coeffs(x.float()))
    assert z.dtype == torch.float32
    z.sum().backward()
    torch.testing.assert_close(net.double()(natural_cubic_coeffs(x)), z.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("buffers", "n_batches"), [("update", 12), ("freeze", 0)])
def test_running_statistics_in_func_are_updated_or_frozen(buffers, n_batches):
    norm = nn.BatchNorm1d(HIDDEN, dtype=torch.float64)
    matrix, net = Matrix(), model(solver=tm.ALF(refresh="never"), buffers=buffers)
    net.func = nn.ModuleList([norm, matrix])  # so that both are part of the network
    net.func.forward = lambda t, z: matrix(t, norm(z))
    net.initial = nn.Sequential(net.initial, nn.BatchNorm1d(HIDDEN, dtype=torch.float64))
    net(natural_cubic_coeffs(series(4, (2,)))).sum().backward()
    assert norm.num_batches_tracked == n_batches
    assert net.initial[1].num_batches_tracked == 1  # not a part of func


def test_a_module_says_what_it_is():
    what = "control=CubicControl, solver=ALF(), controller=FixedStep(h=0.25, land=False), gradient=MALI()"
    assert what in repr(model())


# Errors


@pytest.mark.parametrize("coeffs", [linear_coeffs, hermite_cubic_coeffs, natural_cubic_coeffs])
@pytest.mark.parametrize(
    ("x", "t", "error", "fragments"),
    [
        (torch.ones(4, 2, dtype=torch.int64), None, tm.InvalidStateError, ["torch.int64", "x.float()"]),
        ([[1.0], [2.0]], None, tm.InvalidStateError, ["got list"]),
        (torch.ones(4), None, tm.InvalidStateError, ["(4,)", "(..., length, channels)", "unsqueeze"]),
        (torch.ones(1, 2), None, tm.InvalidTimesError, ["(1, 2)", "2 or more", "has 1"]),
        (torch.ones(4, 2), torch.arange(3.0), tm.InvalidTimesError, ["(3,)", "(4, 2)", "needs (4,)"]),
        (torch.ones(4, 2), torch.ones(4, 2), tm.InvalidTimesError, ["(4, 2)", "needs (4,)"]),
        (torch.ones(4, 2), torch.arange(4), tm.InvalidTimesError, ["torch.int64"]),
        (torch.ones(4, 2), torch.tensor([0.0, 1, 1, 2]), tm.InvalidTimesError, ["knot 1 is 1, knot 2 is 1", "Sort"]),
        (torch.ones(4, 2), torch.tensor([0.0, 3, 2, 4]), tm.InvalidTimesError, ["knot 1 is 3, knot 2 is 2"]),
        (torch.ones(4, 2), torch.tensor([0.0, 1, 2, torch.nan]), tm.InvalidTimesError, ["knot 2 is 2, knot 3 is nan"]),
    ],
)
def test_data_and_knots_that_make_no_path_are_refused(coeffs, x, t, error, fragments):
    with pytest.raises(error) as caught:
        coeffs(x, t)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_natural_spline_of_missing_values_says_what_to_do():
    x = series(4)
    x[1, 0] = torch.nan
    with pytest.raises(tm.InvalidStateError, match=r"linear_coeffs\(x, t\).*torchcde.natural_cubic_coeffs"):
        natural_cubic_coeffs(x)


def test_a_rectilinear_path_needs_a_channel_of_time():
    x = series(4)
    with pytest.raises(tm.InvalidOptionError, match="rectilinear=3 .* from 0 to 2"):
        linear_coeffs(x, rectilinear=3)
    x[1, 0] = torch.nan
    with pytest.raises(tm.InvalidStateError, match="channel 0 of x, the time, has missing values"):
        linear_coeffs(x, rectilinear=0)


def test_coefficients_that_are_none_are_refused():
    with pytest.raises(tm.InvalidStateError, match=r"length - 1, 4 \* channels\); got \(4, 3\)"):
        CubicControl(series(4))
    with pytest.raises(tm.InvalidStateError, match=r"\(\.\.\., length, channels\); got \(4,\)"):
        LinearControl(torch.ones(4))
    with pytest.raises(tm.InvalidTimesError, match=r"knots have shape \(4,\).*needs \(5,\)"):
        CubicControl(natural_cubic_coeffs(series(5)), torch.arange(4.0))


def test_a_func_of_the_wrong_shape_is_told_both_shapes_and_what_they_mean():
    coeffs = natural_cubic_coeffs(series(4, (2,)))
    with pytest.raises(tm.InvalidFieldError) as caught:
        NeuralCDE(Matrix(channels=4), nn.Linear(3, 5, dtype=torch.float64))(coeffs)
    for fragment in ("(2, 5), meaning 5 hidden", "(2, 3), meaning 3 channels", "(2, 5, 3) is", "shape (2, 5, 4)"):
        assert fragment in str(caught.value)
    with pytest.raises(tm.InvalidFieldError, match="func returned a tuple"):
        NeuralCDE(lambda t, z: (z,), nn.Linear(3, 5, dtype=torch.float64))(coeffs)


def test_a_start_that_does_not_fit_is_refused():
    coeffs, z0 = natural_cubic_coeffs(series(4, (2,))), torch.zeros(2, HIDDEN, dtype=torch.float64)
    with pytest.raises(tm.InvalidOptionError, match="no z"):
        NeuralCDE(Matrix())(coeffs)
    with pytest.raises(tm.InvalidOptionError, match="leave one of the two out"):
        model()(coeffs, z0=z0)
    with pytest.raises(tm.InvalidStateError, match=r"batch dimensions \(\),.*batch dimensions \(2,\)"):
        NeuralCDE(Matrix())(coeffs, z0=z0[0])


def test_a_solve_along_knots_that_do_not_increase_is_refused():
    with pytest.raises(tm.InvalidTimesError, match="knot 0 is 3, knot 1 is 2"):
        model()(natural_cubic_coeffs(series(4)), torch.arange(4.0, dtype=torch.float64).flip(0))
