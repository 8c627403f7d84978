"""Gradients are those of the discretisation: every method against plain autograd through the same steps."""

import functools
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torchdiffeq
from oracle import Case, worst_difference
from problems import RUNGE_KUTTA, Simple
from torch import nn

import torchmali as tm

FORWARD, BACKWARD_IN_TIME = (0.0, 0.31, 0.8, 1.3), (1.0, 0.45, 0.1, -0.4)
CONTROLLERS = [tm.FixedStep(0.0731), tm.AdaptiveStep(1e-3, 1e-4), tm.AdaptiveStep(1e-3, 1e-4, h0=2.0, land=True)]
REVERSIBLE = [
    tm.ALF(),
    tm.ALF(eta=0.95),
    tm.ALF(order=4),
    tm.ALF(order=6),
    tm.Reversible(tm.RK4()),
    tm.Reversible(tm.Dopri5(), coupling=0.9),
    tm.Reversible(tm.Euler()),
]
REPLAYS = [(solver, method) for solver in REVERSIBLE for method in (tm.ACA(), tm.MALI())]
REPLAYS += [(tm.ALF(order=order, refresh=3), method) for order in (2, 4) for method in (tm.ACA(), tm.MALI())]
REPLAYS += [(tm.ALF(refresh=5), tm.MALI(checkpoint_every=3)), (tm.ALF(order=4), tm.MALI(checkpoint_every=1))]
REPLAYS += [(solver, tm.ACA()) for solver in RUNGE_KUTTA]
COMBINATIONS = [
    (solver, method, controller)
    for solver, method in REPLAYS
    for controller in CONTROLLERS
    if solver.error_order is not None or not controller.adaptive
]


def double(*shape, **options):
    return torch.linspace(-1, 1, int(np.prod(shape)), dtype=torch.float64, **options).reshape(shape)


@pytest.mark.parametrize("times", [FORWARD, BACKWARD_IN_TIME], ids=["forward", "backward"])
@pytest.mark.parametrize(("solver", "method", "controller"), COMBINATIONS, ids=lambda x: repr(x).split(", h0=None")[0])
def test_replayed_gradient_equals_autograd_on_the_same_grid(solver, method, controller, times):
    case = Case.make(times)
    grads, _ = case.gradients(solver, controller, method)
    assert worst_difference(grads, case.exact_gradients(solver, controller)) < 1e-12


@pytest.mark.parametrize(
    ("eta", "n_steps", "method", "tolerance"),
    [
        (1.0, 1500, tm.MALI(), 1e-12),
        (0.95, 20, tm.MALI(), 1e-12),
        (0.9, 20, tm.MALI(), 1e-12),
        (0.7, 6, tm.MALI(), 1e-12),
        (0.3, 6, tm.MALI(), 1e-12),
        (0.7, 20, tm.MALI(), 1e-7),  # the inverse amplifies round-off 2.5 times per step
        (0.3, 20, tm.MALI(), 1e-7),
        (0.7, 20, tm.ACA(), 1e-12),
        (0.3, 20, tm.ACA(), 1e-12),
    ],
)
def test_damped_alf_is_differentiated_as_exactly_as_its_inverse_allows(eta, n_steps, method, tolerance):
    case = Case.make((0.0, 0.5, 1.0))
    solver, controller = tm.ALF(eta=eta), tm.FixedStep(1 / n_steps)
    grads, stats = case.gradients(solver, controller, method)
    assert stats.n_steps == n_steps
    assert worst_difference(grads, case.exact_gradients(solver, controller)) < tolerance


@pytest.mark.parametrize("method", [tm.MALI(), tm.ACA(), tm.Naive()], ids=repr)
def test_gradcheck_passes_with_steps_that_do_not_divide_the_segments(method):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    names = [name for name, _ in net.named_parameters()]

    def end(y0, t, scale, *params):
        def func(t, y, scale):
            x = torch.cat([y, t.reshape(1)])
            return scale * torch.func.functional_call(net, dict(zip(names, params, strict=True)), (x,))

        controller = tm.FixedStep(0.17)
        return tm.solve(func, y0, t, controller=controller, gradient=method, args=(scale,), params=params).y

    t = torch.tensor([0.0, 0.4, 1.1], dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    params = [p.detach().requires_grad_() for p in net.parameters()]
    # Grid points that step over the end of a segment would jump: eps is far smaller than any distance to one.
    assert torch.autograd.gradcheck(end, (double(2).requires_grad_(), t, scale, *params), eps=1e-6, atol=1e-6)


def test_the_gradient_of_all_times_is_that_of_the_interpolated_outputs():
    case = Case.make((0.0, 0.1, 0.2, 0.9, 1.3))
    grads, _ = case.gradients(tm.Dopri5(), tm.AdaptiveStep(1e-5, 1e-6), tm.ACA())
    # Against the continuous derivative dL/dt_k = <dL/dy_k, f(t_k, y_k)>, up to the tolerance.
    adjoint, _ = case.gradients(tm.Dopri5(), tm.AdaptiveStep(1e-9, 1e-10), tm.Adjoint())
    assert (grads["t"] - adjoint["t"]).abs().max() < 2e-4


def test_naive_through_the_search_differentiates_the_step_sizes_too():
    def end(y0, **options):
        controller = tm.AdaptiveStep(1e-2, 1e-3, h0=0.2)
        gradient = tm.Naive(**options)
        return tm.solve(
            lambda t, y: torch.sin(3 * y) + t,
            y0,
            [0.0, 2.0],
            solver=tm.HeunEuler(),
            controller=controller,
            gradient=gradient,
        ).y[-1]

    y0 = torch.tensor([0.3], dtype=torch.float64, requires_grad=True)
    (through,) = torch.autograd.grad(end(y0, through_search=True), y0)
    (detached,) = torch.autograd.grad(end(y0), y0)
    eps = 1e-7  # the whole adaptive solve, step sizes included, moved by hand
    moved = (end(y0.detach() + eps) - end(y0.detach() - eps)) / (2 * eps)
    assert (through - moved).abs() < 1e-6 * moved.abs()
    assert (detached - moved).abs() > 1e-4 * moved.abs()


METHODS = [tm.Naive(), tm.Adjoint(), tm.ACA(), tm.MALI()]
REPLAYED = [tm.Adjoint(), tm.ACA(), tm.MALI()]


def loss_of(func, y0, method, **options):
    how: dict[str, Any] = {"controller": tm.FixedStep(0.1), **options}
    return (tm.solve(func, y0, [0.0, 1.0], gradient=method, **how).y[-1] ** 2).sum()


def naive_gradients(func, params, y0, **options):
    return torch.autograd.grad(loss_of(func, y0, tm.Naive(), **options), params)


def ways_to_hold_a_module():
    module, scale = Simple(), 1.0

    def closure(t, y):
        return scale * module(t, y)

    class Holder:
        def __init__(self):
            self.module = module

        def slope(self, t, y):
            return self.module(t, y)

        def __call__(self, t, y):
            return self.module(t, y)

    def with_extra(factor, net, t, y):
        return factor * net(t, y)

    nested = {"nets": [module]}
    ways = {
        "module": module,
        "bound method": module.other,
        "closure": closure,
        "lambda in a partial": functools.partial(lambda k, t, y: k * module(t, y), 1.0),
        "module in a partial": functools.partial(with_extra, 1.0, module),
        "bound method of an object": Holder().slope,
        "callable object": Holder(),
        "closure over a container": lambda t, y: nested["nets"][0](t, y),
    }
    return [pytest.param(module, func, id=name) for name, func in ways.items()]


@pytest.mark.parametrize("method", REPLAYED, ids=repr)
@pytest.mark.parametrize(("module", "func"), ways_to_hold_a_module())
def test_parameters_are_found_however_f_holds_them(module, func, method):
    module.zero_grad()
    loss_of(func, double(2, 4), method).backward()
    exact = naive_gradients(module, list(module.parameters()), double(2, 4))
    tolerance = 1e-2 if isinstance(method, tm.Adjoint) else 1e-12
    for p, g in zip(module.parameters(), exact, strict=True):
        assert p.grad is not None
        assert (p.grad - g).norm() <= tolerance * g.norm()


GLOBAL_WEIGHT = double(4, 4).requires_grad_()


def test_a_tensor_that_f_reads_from_its_globals_is_found():
    loss = loss_of(lambda t, y: torch.tanh(y @ GLOBAL_WEIGHT), double(2, 4), tm.MALI())
    (g,) = torch.autograd.grad(loss, GLOBAL_WEIGHT)
    (exact,) = naive_gradients(lambda t, y: torch.tanh(y @ GLOBAL_WEIGHT), [GLOBAL_WEIGHT], double(2, 4))
    assert (g - exact).norm() < 1e-12 * exact.norm()


class Hidden:
    """Hides a tensor from any reasonable search."""

    def __init__(self, depth, tensor):
        self.inner: Any = Hidden(depth - 1, tensor) if depth else tensor


def test_a_leaf_that_would_get_no_gradient_is_warned_about_and_params_is_the_remedy():
    hidden = Hidden(2, double(4, 4).requires_grad_())

    def func(t, y):
        return torch.tanh(y @ hidden.inner.inner.inner)

    y0 = double(2, 4).requires_grad_()
    for method in REPLAYED:
        with pytest.warns(tm.SolverWarning, match=r"shape \(4, 4\).*params=\["):
            loss_of(func, y0, method)
    leaf = hidden.inner.inner.inner
    (g,) = torch.autograd.grad(loss_of(func, y0, tm.MALI(), params=[leaf]), leaf)
    (exact,) = naive_gradients(func, [leaf], y0)
    assert (g - exact).norm() < 1e-12 * exact.norm()


def test_a_tensor_with_a_history_gets_its_gradient_through_args_params_and_closures():
    source = double(4).requires_grad_()
    y0 = double(2, 4)

    def gradient(use):
        weight = torch.exp(source)  # not a leaf
        (g,) = torch.autograd.grad(use(weight), source)
        return g

    exact = gradient(lambda w: loss_of(lambda t, y: torch.tanh(w * y), y0, tm.Naive()))
    ways = [
        lambda w: loss_of(lambda t, y, v: torch.tanh(v * y), y0, tm.MALI(), args=(w,)),
        lambda w: loss_of(lambda t, y: torch.tanh(w * y), y0, tm.MALI(), params=[w]),
        lambda w: loss_of(lambda t, y: torch.tanh(w * y), y0, tm.MALI()),
        lambda w: loss_of(lambda t, y, v: torch.tanh(v["x"][0] * y), y0, tm.ACA(), args=({"x": [w], "name": "w"},)),
    ]
    for use in ways:
        assert (gradient(use) - exact).norm() < 1e-12 * exact.norm()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_frozen_and_unused_parameters_are_left_alone(method):
    class Partly(Simple):
        def __init__(self):
            super().__init__()
            self.unused = nn.Linear(3, 3).double()
            self.net[0].weight.requires_grad_(False)

    module = Partly()
    loss_of(module, double(2, 4).requires_grad_(), method).backward()
    assert module.net[0].weight.grad is None
    assert module.net[0].bias.grad is not None
    if not isinstance(method, tm.Adjoint):  # which integrates a zero
        assert module.unused.weight.grad is None


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_field_without_parameters_works(method):
    y0 = double(3).requires_grad_()
    (g,) = torch.autograd.grad(loss_of(lambda t, y: torch.sin(y) * t, y0, method), y0)
    (exact,) = naive_gradients(lambda t, y: torch.sin(y) * t, [y0], y0)
    assert (g - exact).norm() < (1e-2 if isinstance(method, tm.Adjoint) else 1e-12) * exact.norm()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_fields_that_return_their_input_a_parameter_or_a_constant_are_not_corrupted(method):
    weight = nn.Parameter(double(3))
    kept = weight.detach().clone()
    fields = {
        "input": lambda t, y: y,
        "parameter": lambda t, y: weight,
        "expanded": lambda t, y: t.expand(3),
        "constant": lambda t, y: torch.ones(3, dtype=torch.float64),
    }
    for func in fields.values():
        y0 = double(3).requires_grad_()
        start = y0.detach().clone()
        loss = loss_of(func, y0, method)
        (g,) = torch.autograd.grad(loss, y0)
        (exact,) = naive_gradients(func, [y0], y0)
        assert torch.equal(y0, start) and torch.equal(weight, kept)
        assert (g - exact).norm() < (1e-2 if isinstance(method, tm.Adjoint) else 1e-12) * exact.norm()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_second_backward_gives_the_same_gradient_again(method):
    module, y0 = Simple(), double(2, 4).requires_grad_()
    loss = loss_of(module, y0, method)
    inputs = [y0, *module.parameters()]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("method", REPLAYED, ids=repr)
def test_double_backward_raises_and_names_naive(method):
    y0 = double(2, 4).requires_grad_()
    loss = loss_of(Simple(), y0, method)
    with pytest.raises(tm.DoubleBackwardError, match=r"Naive\(\)"):
        torch.autograd.grad(loss, y0, create_graph=True)
    assert issubclass(tm.DoubleBackwardError, RuntimeError)


def test_naive_can_be_differentiated_twice():
    y0 = double(3).requires_grad_()

    def end(y0):
        return loss_of(lambda t, y: torch.sin(y), y0, tm.Naive())

    assert torch.autograd.gradgradcheck(end, (y0,))


@pytest.mark.parametrize("method", [tm.ACA(), tm.MALI()], ids=repr)
def test_parameters_changed_between_forward_and_backward_are_an_error(method):
    module = Simple()
    loss = loss_of(module, double(2, 4), method)
    with torch.no_grad():
        next(module.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_no_graph_is_built_where_none_is_wanted(method):
    module, y0 = Simple(), double(2, 4)
    with torch.no_grad():
        assert not loss_of(module, y0, method).requires_grad
    for p in module.parameters():
        p.requires_grad_(False)
    assert not loss_of(module, y0, method).requires_grad


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_leaf_of_the_output_may_go_unused(method):
    y0 = {"used": double(3).requires_grad_(), "unused": double(2).requires_grad_()}

    def func(t, y):
        return {"used": y["unused"].sum() - y["used"], "unused": torch.cos(y["unused"])}

    def gradients(gradient):
        y = tm.solve(func, y0, [0.0, 0.5, 1.0], controller=tm.FixedStep(0.1), gradient=gradient).y
        return torch.autograd.grad(y["used"].sum(), list(y0.values()))

    tolerance = 1e-2 if isinstance(method, tm.Adjoint) else 1e-12
    for g, exact in zip(gradients(method), gradients(tm.Naive()), strict=True):
        assert (g - exact).norm() < tolerance * exact.norm()


def test_mali_reports_how_well_it_rebuilt_the_start():
    module, y0 = Simple(), double(2, 4).requires_grad_()
    solution = tm.solve(module, y0, [0.0, 1.0], controller=tm.FixedStep(0.01))
    assert solution.stats.reconstruction_error is None
    solution.y[-1].sum().backward()
    assert solution.stats.reconstruction_error is not None
    assert 0 <= solution.stats.reconstruction_error < 1e-13


def test_mali_warns_when_round_off_grew_on_the_way_back():
    # Growth by e^10 in float32: the reconstruction is off by eps e^10, some 1e-3 and more.
    y0 = torch.linspace(0.5, 1.5, 4).requires_grad_()
    method = tm.MALI(checkpoint_every=None)
    solution = tm.solve(lambda t, y: 10 * y, y0, [0.0, 1.0], controller=tm.FixedStep(1 / 100), gradient=method)
    with pytest.warns(tm.SolverWarning, match=r"relative error above \d"):
        solution.y[-1].sum().backward()
    assert solution.stats.reconstruction_error is not None
    assert solution.stats.reconstruction_error > 1e-3


def test_training_that_drifts_at_every_step_says_so_once_for_each_power_of_ten():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        found = [drifted(growth) for growth in (10.0, 10.1, 10.2, 10.3)]
    assert len(set(found)) == 4 and len(told) == len({math.floor(math.log10(error)) for error in found}) < 4


def drifted(growth: float) -> float:
    y0 = torch.linspace(0.5, 1.5, 4).requires_grad_()
    method = tm.MALI(checkpoint_every=None)
    solution = tm.solve(lambda t, y: growth * y, y0, [0.0, 1.0], controller=tm.FixedStep(1 / 100), gradient=method)
    solution.y[-1].sum().backward()
    assert solution.stats.reconstruction_error is not None
    return solution.stats.reconstruction_error


def test_a_field_that_is_not_repeatable_shows_in_the_reconstruction():
    calls = []

    def func(t, y):
        calls.append(1)
        return torch.sin(y) + 0.01 * len(calls)

    def gradient(method):
        y0 = double(3).requires_grad_()
        tm.solve(func, y0, [0.0, 1.0], controller=tm.FixedStep(0.1), gradient=method).y[-1].sum().backward()

    with pytest.raises(tm.NonRepeatableFieldError, match="Usual causes"):
        gradient(tm.MALI())
    with pytest.raises(tm.NonRepeatableFieldError, match="Usual causes"):
        gradient(tm.MALI(exact=True))
    with pytest.warns(tm.SolverWarning, match="not the function it was"):
        gradient(tm.MALI(checkpoint_every=None))


# Evaluation counts.


@pytest.mark.parametrize("method", [tm.ACA(), tm.MALI()], ids=repr)
@pytest.mark.parametrize("n_steps", [1, 7, 50])
def test_a_fixed_step_gradient_costs_two_evaluations_and_one_vjp_per_step(method, n_steps):
    calls = []
    module = Simple()

    def func(t, y):
        calls.append(1)
        return module(t, y)

    y0 = double(2, 4).requires_grad_()
    solution = tm.solve(func, y0, [0.0, 1.0], controller=tm.FixedStep(1 / n_steps), gradient=method)
    assert len(calls) == solution.stats.n_evals_forward == n_steps + 1
    solution.y[-1].sum().backward()
    assert len(calls) == 2 * (n_steps + 1)
    assert solution.stats.n_evals_backward == solution.stats.n_vjps == n_steps + 1


@pytest.mark.parametrize("h0", [None, 0.5])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_an_adaptive_solve_evaluates_each_attempt_once(method, h0):
    module, y0 = Simple(), double(2, 4).requires_grad_()
    controller = tm.AdaptiveStep(1e-4, 1e-5, h0=h0)
    stats = tm.solve(module, y0, [0.0, 0.3, 1.0], controller=controller, gradient=method).stats
    assert stats.n_evals_forward == stats.n_steps + stats.n_rejected + 1 + (h0 is None)
    assert stats.n_rejected > 0 or h0 is None


def test_aca_with_runge_kutta_evaluates_each_stage_once_per_step_in_backward():
    module, y0 = Simple(), double(2, 4).requires_grad_()
    solution = tm.solve(module, y0, [0.0, 1.0], solver=tm.RK4(), controller=tm.FixedStep(0.1), gradient=tm.ACA())
    solution.y[-1].sum().backward()
    assert solution.stats.n_evals_forward == solution.stats.n_evals_backward == solution.stats.n_vjps == 40


# The adjoint.


@pytest.mark.parametrize("seminorm", [False, True])
def test_the_adjoint_agrees_with_torchdiffeq_at_tight_tolerance(seminorm):
    module, times = Simple(), [0.0, 0.4, 1.0]
    inputs = [double(2, 4).requires_grad_(), torch.tensor(times, dtype=torch.float64, requires_grad=True)]
    options = {"norm": "seminorm"} if seminorm else None

    def gradients(odeint_adjoint):
        y = odeint_adjoint(module, *inputs, rtol=1e-10, atol=1e-12, method="dopri5", adjoint_options=options)
        return torch.autograd.grad((y**3).sum(), [*inputs, *module.parameters()])

    for ours, theirs in zip(gradients(tm.odeint_adjoint), gradients(torchdiffeq.odeint_adjoint), strict=True):
        assert (ours - theirs).norm() < 1e-8 * theirs.norm()


def test_the_seminorm_saves_backward_evaluations():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).double()
    evaluations = {}
    for seminorm in (False, True):
        controller = tm.AdaptiveStep(1e-6, 1e-8)
        gradient = tm.Adjoint(seminorm=seminorm)
        y0 = double(16, 2).requires_grad_()
        solution = tm.solve(
            lambda t, y: 5 * net(y), y0, [0.0, 2.0], solver=tm.Dopri5(), controller=controller, gradient=gradient
        )
        (solution.y[-1] ** 2).sum().backward()
        evaluations[seminorm] = solution.stats.n_evals_backward
    assert evaluations[True] < evaluations[False]


def test_the_adjoint_takes_its_own_solver_and_tolerances():
    module, y0 = Simple(), double(2, 4).requires_grad_()
    (exact,) = naive_gradients(module, [y0], y0, solver=tm.Dopri8(), controller=tm.FixedStep(0.05))
    tight = tm.Adjoint(tm.Dopri8(), tm.AdaptiveStep(1e-11, 1e-12))
    (g,) = torch.autograd.grad(loss_of(module, y0, tight, solver=tm.Dopri5(), controller=tm.FixedStep(0.02)), y0)
    assert (g - exact).norm() < 1e-9 * exact.norm()


def test_the_adjoint_controls_each_leaf_by_its_own_tolerance():
    y0 = {"a": double(2).requires_grad_(), "b": double(3)}

    def func(t, y):
        return {"a": -y["a"] * y["b"].sum(), "b": torch.cos(y["b"])}

    controller = tm.AdaptiveStep(rtol={"a": 1e-9, "b": 1e-9}, atol={"a": 1e-10, "b": 1e-10})
    solution = tm.solve(func, y0, [0.0, 1.0], solver=tm.Dopri5(), controller=controller, gradient=tm.Adjoint())
    (g,) = torch.autograd.grad(solution.y["a"][-1].sum(), y0["a"])
    exact = tm.solve(func, y0, [0.0, 1.0], solver=tm.Dopri5(), controller=controller, gradient=tm.Naive())
    (wanted,) = torch.autograd.grad(exact.y["a"][-1].sum(), y0["a"])
    assert (g - wanted).norm() < 1e-6 * wanted.norm()


# Times and states.


@pytest.mark.parametrize(
    "t", [[0.0, 1.0], (0, 1), torch.tensor([0.0, 1.0]), np.array([0.0, 1.0]), [torch.tensor(0.0), 1.0]]
)
def test_times_may_be_given_in_any_form(t):
    solution = tm.solve(lambda t, y: -y, double(2), t, controller=tm.FixedStep(0.1))
    assert isinstance(solution.t, torch.Tensor)
    assert solution.t.tolist() == [0.0, 1.0]


def test_states_come_back_in_the_structure_they_were_given():
    y0 = {"x": double(2), "rest": [double(3, 1), (double(1),)]}
    y = tm.solve(lambda t, y: {"rest": y["rest"], "x": -y["x"]}, y0, [0.0, 0.5, 1.0], controller=tm.FixedStep(0.1)).y
    assert list(y) == ["x", "rest"]
    assert isinstance(y["rest"], list) and isinstance(y["rest"][1], tuple)
    assert y["x"].shape == (3, 2) and y["rest"][0].shape == (3, 3, 1)
    assert torch.equal(y["x"][0], y0["x"])


def test_leaves_of_mixed_dtype_keep_their_own():
    y0 = (torch.ones(2), torch.ones(3, dtype=torch.float64))
    times = []

    def func(t, y):
        times.append(t.dtype)
        return -y[0], -y[1]

    y = tm.solve(func, y0, [0.0, 1.0], controller=tm.FixedStep(0.1)).y
    assert (y[0].dtype, y[1].dtype) == (torch.float32, torch.float64)
    assert set(times) == {torch.float64}  # the widest of the state


def test_f_receives_a_0d_time_of_the_states_dtype():
    seen = []
    tm.solve(lambda t, y: seen.append(t) or -y, torch.ones(2), [0.0, 1.0], controller=tm.FixedStep(0.5))
    assert all(t.ndim == 0 and t.dtype == torch.float32 for t in seen)
    assert [t.item() for t in seen] == [0.0, 0.25, 0.75]
