"""torchdiffeq's call: its results, its steps, and the gradient methods that it can be given."""

from typing import Any

import pytest
import torch
import torchdiffeq
from problems import Simple

import torchmali as tm

Y0 = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)


@pytest.mark.parametrize("method", ["dopri5", "dopri8", "bosh3", "adaptive_heun"])
def test_odeint_is_a_drop_in_for_torchdiffeq(method):
    module, y0, t = Simple(), Y0, torch.linspace(0, 1, 5, dtype=torch.float64)
    ours = tm.odeint(module, y0, t, rtol=1e-6, atol=1e-8, method=method)
    theirs: Any = torchdiffeq.odeint(module, y0, t, rtol=1e-6, atol=1e-8, method=method)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-4  # torchdiffeq's bosh3 interpolates with an error of 6e-5 here
    assert torch.equal(tm.odeint(module, y0, t), tm.odeint(module, y0, t, rtol=1e-7, atol=1e-9, method="dopri5"))


@pytest.mark.parametrize("method", ["euler", "midpoint", "heun2", "heun3", "rk4"])
@pytest.mark.parametrize("options", [None, {"step_size": 0.125}])
def test_fixed_step_odeint_takes_torchdiffeqs_very_steps(method, options):
    module, t = Simple(), torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)
    y0 = (Y0, Y0[0, :3])

    def func(t, y):
        return module(t, y[0]) * t, torch.sin(y[1])

    ours = tm.odeint(func, y0, t, method=method, options=options)
    theirs = torchdiffeq.odeint(func, y0, t, method=method, options=options)
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() < 1e-14


@pytest.mark.parametrize(("method", "n_stages"), [("midpoint", 2), ("heun3", 3), ("rk4", 4)])
def test_fixed_steps_of_odeint_run_on_over_output_times_as_torchdiffeqs_do(method, n_stages):
    module, times = Simple(), torch.linspace(0, 1, 41, dtype=torch.float64)
    counts, found = [], []
    for odeint in (tm.odeint, torchdiffeq.odeint):
        calls = []
        func = lambda t, y, calls=calls: calls.append(1) or torch.cos(5 * t) * module(t, y)  # noqa: E731
        options = {"step_size": 0.25, "interp": "cubic"}
        found.append(odeint(func, Y0, times, method=method, options=options))
        counts.append(len(calls))
    assert (found[0] - found[1])[::10].abs().max() < 1e-14  # at grid points
    assert (found[0] - found[1]).abs().max() < 0.02  # between them
    assert counts[0] <= 4 * (n_stages + 1) < counts[1]


@pytest.mark.parametrize("options", [None, {"step_size": 0.25}], ids=["adaptive", "fixed"])
def test_output_times_cost_odeint_with_mali_no_evaluations(options):
    module, counts = Simple(), []
    for n in (2, 200):
        calls, y0 = [], Y0.clone().requires_grad_()
        func = lambda t, y, calls=calls: calls.append(1) or module(t, y)  # noqa: E731
        t = torch.linspace(0, 1, n, dtype=torch.float64)
        y = tm.odeint(func, y0, t, rtol=1e-3, atol=1e-4, gradient="mali", options=options)
        y[-1].sum().backward()
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_one_changed_import_and_gradient_mali_gives_exact_gradients():
    module, y0, t = Simple(), Y0.clone().requires_grad_(), torch.tensor([0.0, 1.0], dtype=torch.float64)
    y = tm.odeint(module, y0, t, rtol=1e-3, atol=1e-4, gradient="mali")
    (g,) = torch.autograd.grad((y[-1] ** 2).sum(), y0)
    y = tm.odeint(module, y0, t, rtol=1e-3, atol=1e-4, method="alf4_5", gradient="naive")
    (exact,) = torch.autograd.grad((y[-1] ** 2).sum(), y0)
    assert (g - exact).norm() < 1e-12 * exact.norm()


@pytest.mark.parametrize("gradient", ["naive", "mali"])
@pytest.mark.parametrize("t", [torch.tensor(1.0), 3.0], ids=["0-d tensor", "number"])
def test_times_that_are_none_are_refused_whatever_the_default_solver(t, gradient):
    with pytest.raises(tm.InvalidTimesError, match="one-dimensional"):
        tm.odeint(lambda t, y: -y, torch.ones(2, dtype=torch.float64), t, gradient=gradient)
