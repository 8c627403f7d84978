"""torchdiffeq's methods, options, tolerances and callbacks, beside torchdiffeq itself."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
import torchdiffeq
from problems import Simple
from torch import Tensor, nn

import torchmali as tm
import torchmali.torchdiffeq as ours
from torchmali.solvers.adams import bashforth, moulton
from torchmali.torchdiffeq.methods import FEHLBERG2

Y0 = torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4)
TIMES = torch.linspace(0, 1, 7, dtype=torch.float64)
FIXED = ["euler", "midpoint", "heun2", "heun3", "rk4", "explicit_adams", "implicit_adams", "fixed_adams"]
ADAPTIVE = ["adaptive_heun", "fehlberg2", "bosh3", "dopri5", "dopri8"]
LOOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}  # with which the corrector of implicit_adams converges


def forced(module: nn.Module) -> Any:
    return lambda t, y: torch.cos(3 * t) * module(t, y)


def both(func: Any, y0: Any = Y0, t: Tensor = TIMES, **how: Any) -> tuple[Any, Any]:
    """torchmali's y, without a warning, and torchdiffeq's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torchdiffeq.odeint(func, y0, t, **how)
    return ours.odeint(func, y0, t, **how), theirs


@pytest.mark.parametrize("method", FIXED)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_size": 0.065},
        {"step_size": 0.065, "interp": "cubic"},
        {"grid_constructor": lambda f, y, t: torch.linspace(0, 1, 31).double() ** 2},
    ],
    ids=["output times", "linear", "cubic", "grid"],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_fixed_steps_give_torchdiffeqs_very_numbers(method: str, options: Any, is_reversed: bool):
    if is_reversed and "grid_constructor" in options:
        options = {"grid_constructor": lambda f, y, t: torch.linspace(1, 0, 31).double() ** 2}
    t = TIMES.flip(0) if is_reversed else TIMES
    a, b = both(forced(Simple()), t=t, method=method, options=options, **LOOSE)
    assert (a - b).abs().max() < 1e-14


@pytest.mark.parametrize("method", FIXED[:5])
def test_perturb_shows_f_no_grid_point_and_gives_torchdiffeqs_numbers(method: str):
    module, seen = Simple(), []

    def func(t: Tensor, y: Tensor) -> Tensor:
        seen.append(t.item())
        return torch.where(t < 0.5, 1.0, -2.0) * module(t, y)

    a, b = both(func, t=TIMES[[0, -1]], method=method, options={"step_size": 0.25, "perturb": True})
    assert (a - b).abs().max() < 1e-14
    assert not {0.0, 0.25, 0.5, 0.75, 1.0} & set(seen)


@pytest.mark.parametrize("method", ADAPTIVE)
@pytest.mark.parametrize("options", [{}, {"first_step": 0.01}, {"max_step": 0.1}, {"step_t": [0.33], "jump_t": [0.7]}])
def test_adaptive_methods_agree_with_torchdiffeqs(method: str, options: Any):
    options = {k: torch.tensor(v, dtype=torch.float64) if isinstance(v, list) else v for k, v in options.items()}
    tolerances: dict[str, Any] = (
        {"rtol": 1e-4, "atol": 1e-6} if method == "adaptive_heun" else {"rtol": 1e-6, "atol": 1e-8}
    )
    a, b = both(forced(Simple()), method=method, options=options, **tolerances)
    assert (a - b).abs().max() < 2e-4  # torchdiffeq's bosh3 and dopri8 interpolate with such errors


@pytest.mark.parametrize(
    "how",
    [
        {"rtol": [1e-6], "atol": 1e-8},
        {"rtol": torch.tensor(1e-6), "atol": torch.tensor(1e-8)},
        {"rtol": torch.tensor([1e-6, 1e-7, 1e-6, 1e-7]), "atol": torch.full((2, 4), 1e-8)},
    ],
    ids=["list", "0-d", "elements"],
)
def test_tolerances_may_be_lists_and_tensors(how: Any):
    a, b = both(forced(Simple()), **how)
    assert (a - b).abs().max() < 1e-5


@pytest.mark.parametrize(
    "how", [{"rtol": (1e-6, 1e-7)}, {"rtol": torch.tensor([1e-6, 1e-7]), "atol": [1e-8, torch.full((3,), 1e-8)]}, {}]
)
def test_tolerances_of_a_tuple_may_be_given_for_its_leaves(how: Any):
    module, y0 = Simple(), (Y0, torch.ones(3, dtype=torch.float64))
    a, b = both(lambda t, y: (module(t, y[0]), -t * y[1]), y0, **how)
    assert max((x - y).abs().max().item() for x, y in zip(a, b, strict=True)) < 1e-6


def test_a_tight_tolerance_of_one_element_holds_for_it():
    def func(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([torch.cos(20 * t), torch.cos(20 * t)])

    y0, t, exact = torch.zeros(2).double(), torch.tensor([0.0, 1.0]).double(), torch.sin(torch.tensor(20.0).double())
    errors = []
    for atol in (1e-2, torch.tensor([1e-2, 1e-9]), 1e-9):
        y = ours.odeint(func, y0, t, rtol=0.0, atol=atol)
        errors.append(abs(20 * y[-1, 1] - exact).item())
    assert errors[1] < 1e-6 < errors[0] and errors[2] < 1e-6
    with pytest.raises(tm.InvalidOptionError, match="broadcast"):
        ours.odeint(func, y0, t, rtol=torch.tensor([1e-3, 1e-3, 1e-3]))
    with pytest.raises(tm.InvalidOptionError, match="one entry for each leaf"):
        ours.odeint(lambda t, y: y, (y0, y0), t, rtol=[1e-3])


def test_the_default_norm_of_a_tuple_is_the_largest_of_its_leaves():
    calls: list[int] = []

    def func(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return torch.cos(30 * t).expand(1), 0 * y[1]

    y0 = torch.zeros(1).double(), torch.zeros(10_000).double()  # 100 times the error, in a mean over all elements
    y = ours.odeint(func, y0, TIMES[[0, -1]], rtol=0.0, atol=1e-6)
    assert abs(y[0][-1].item() - torch.sin(torch.tensor(30.0)).item() / 30) < 1e-5
    assert len(calls) > 100


def test_default_tolerances_are_silent_in_float32_and_others_are_not():
    y = ours.odeint(lambda t, y: -y, torch.ones(2), torch.tensor([0.0, 1.0]))
    assert (y[-1] - torch.exp(torch.tensor(-1.0))).abs().max() < 1e-6
    with pytest.warns(tm.SolverWarning, match="round-off"):
        ours.odeint(lambda t, y: -y, torch.ones(2), torch.tensor([0.0, 1.0]), rtol=1e-6)


@pytest.mark.parametrize("func", [ours.odeint, ours.odeint_adjoint])
def test_one_time_returns_y0(func: Any):
    y0 = torch.ones(3, requires_grad=True), torch.zeros(2)
    a, b = func(lambda t, y: y, y0, torch.tensor([0.5]))
    assert a.shape == (1, 3) and b.shape == (1, 2) and torch.equal(a[0], y0[0])
    a.sum().backward()
    assert torch.equal(y0[0].grad, torch.ones(3))  # pyright: ignore[reportArgumentType]


def test_min_step_accepts_what_no_tolerance_would():
    f = lambda t, y: torch.where(t < 0.5, 1.0, -1000.0) * y  # noqa: E731
    y0, t = torch.ones(1).double(), TIMES[[0, -1]]
    calls: list[int] = []
    counted = lambda t, y: calls.append(1) or f(t, y)  # noqa: E731
    a, b = both(counted, y0, t, options={"min_step": 0.002}, rtol=1e-9, atol=1e-12)
    assert len(calls) < 2 * 6 * 600 and (a[0] == b[0]).all() and a.isfinite().all()
    with pytest.raises(tm.NonFiniteError):
        ours.odeint(lambda t, y: y**2, y0, 3 * t, options={"min_step": 0.01})


def test_the_limit_of_steps_is_one_for_each_output_interval():
    y0, options = torch.ones(1).double(), {"max_num_steps": 30}
    y = ours.odeint(lambda t, y: torch.cos(40 * t) * y, y0, torch.linspace(0, 10, 41).double(), options=options)
    assert y.isfinite().all()
    with pytest.raises(tm.StepLimitError, match="max_num_steps"):
        ours.odeint(lambda t, y: torch.cos(40 * t) * y, y0, torch.tensor([0.0, 10.0]), options=options)


@pytest.mark.parametrize(
    "method, options, match",
    [
        ("dopri5", {"step_size": 0.1}, "'step_size' is ignored"),
        ("dopri5", {"step_sise": 0.1}, "'step_sise' is ignored.*mean 'step_t'|'step_sise' is ignored"),
        ("rk4", {"step_size": 0.1, "max_iters": 100}, "'max_iters' is ignored"),
        ("explicit_adams", {"max_orders": 5}, "mean 'max_order'"),
        ("alf", {"step_size": 0.1, "interp": "linear"}, "interpolant of its own"),
        ("scipy_solver", {"sover": "RK45"}, "mean 'solver'"),
    ],
)
def test_options_without_effect_are_ignored_with_a_warning(method: str, options: Any, match: str):
    how: dict[str, Any] = {"method": method, "rtol": 1e-6, "atol": 1e-8}
    with pytest.warns(tm.SolverWarning, match=match):
        a = ours.odeint(forced(Simple()), Y0, TIMES, options=options, **how)
    known = {name: value for name, value in options.items() if name == "step_size" and method != "dopri5"}
    assert torch.equal(a, ours.odeint(forced(Simple()), Y0, TIMES, options=known, **how))


def test_options_that_contradict_each_other_are_refused():
    f, y0 = forced(Simple()), Y0
    with pytest.raises(tm.InvalidOptionError, match="one of the two"):
        options: Any = {"step_size": 0.1, "grid_constructor": lambda f, y, t: t}
        ours.odeint(f, y0, TIMES, method="rk4", options=options)
    with pytest.raises(tm.InvalidOptionError, match="from t\\[0\\] to t\\[-1\\]"):
        ours.odeint(f, y0, TIMES, method="rk4", options={"grid_constructor": lambda f, y, t: t[:-1]})
    with pytest.raises(tm.InvalidOptionError, match="linear"):
        ours.odeint(f, y0, TIMES, method="rk4", options={"interp": "quintic"})


# Adams methods.


def test_the_weights_of_adams_methods_are_those_of_the_textbooks():
    assert bashforth(4) == pytest.approx((55 / 24, -59 / 24, 37 / 24, -9 / 24), rel=1e-15)
    assert moulton(3) == pytest.approx((9 / 24, 19 / 24, -5 / 24, 1 / 24), rel=1e-15)
    assert all(abs(sum(weights(k)) - 1) < 1e-9 for k in range(1, 12) for weights in (bashforth, moulton))


@pytest.mark.parametrize("options", [{"max_order": 5}, {"max_order": 3}, {"max_order": 6, "max_iters": 8}])
@pytest.mark.parametrize("method", ["explicit_adams", "implicit_adams"])
def test_adams_methods_have_torchdiffeqs_options(method: str, options: Any):
    a, b = both(forced(Simple()), method=method, options={"step_size": 0.02, **options}, rtol=1e-6, atol=1e-8)
    assert (a - b).abs().max() < 1e-13


@pytest.mark.parametrize("implicit", [False, True])
def test_adams_methods_have_order_4(implicit: bool):
    errors = []
    for n in (40, 80):
        solver = tm.Adams(implicit=implicit, max_order=4 + (not implicit), rtol=1e-13, atol=1e-13, max_iters=30)
        y0 = torch.ones(1).double()
        y = ours.odeint(lambda t, y: -y * (1 + t), y0, TIMES[[0, -1]], method=solver, options={"step_size": 1 / n})
        errors.append(abs(y[-1].item() - torch.exp(torch.tensor(-1.5).double()).item()))
    assert 11 < errors[0] / errors[1] < 45


def test_an_iteration_that_does_not_converge_warns():
    with pytest.warns(tm.SolverWarning, match="not converged in 2"):
        how: dict[str, Any] = {"method": "implicit_adams", "options": {"step_size": 0.1, "max_iters": 2}}
        ours.odeint(forced(Simple()), Y0, TIMES, rtol=1e-13, atol=1e-13, **how)


@pytest.mark.parametrize("method", ["explicit_adams", "implicit_adams"])
def test_gradients_of_adams_methods_are_torchdiffeqs(method: str):
    module, grads = Simple(), []
    for package in (ours, torchdiffeq):
        y0, t = Y0.clone().requires_grad_(), TIMES.clone().requires_grad_()
        y = package.odeint(forced(module), y0, t, method=method, **LOOSE)
        grads.append(torch.autograd.grad((y**2).sum(), [y0, t, *module.parameters()]))
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(*grads, strict=True))
    with pytest.raises(tm.IncompatibleError, match="depend on earlier ones"):
        ours.odeint(module, Y0, TIMES, method=method, gradient="aca")


# SciPy's solvers.


@pytest.mark.parametrize("solver", ["LSODA", "RK45", "Radau"])
@pytest.mark.parametrize("is_reversed", [False, True])
def test_scipy_solvers_are_those_of_torchdiffeq(solver: str, is_reversed: bool):
    t = TIMES.flip(0) if is_reversed else TIMES
    a, b = both(forced(Simple()), t=t, method="scipy_solver", options={"solver": solver}, rtol=1e-6, atol=1e-8)
    assert (a - b).abs().max() < 1e-6


def test_scipy_has_gradients_by_the_adjoint_alone():
    module, y0 = Simple(), Y0.clone().requires_grad_()
    y = ours.odeint(module, y0, TIMES, method="scipy_solver")
    with pytest.raises(tm.IncompatibleError, match="no gradients"):
        y.sum().backward()
    how: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
    y = ours.odeint_adjoint(module, y0, TIMES, method="scipy_solver", options={"solver": "DOP853"}, **how)
    (g,) = torch.autograd.grad(y[-1].sum(), y0)
    (wanted,) = torch.autograd.grad(ours.odeint(module, y0, TIMES, **how)[-1].sum(), y0)
    assert (g - wanted).abs().max() < 1e-7


def test_without_scipy_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(tm.IncompatibleError, match="pip install scipy"):
        ours.odeint(Simple(), Y0, TIMES, method="scipy_solver")


# Callbacks.


class Told(nn.Module):
    """An f with callbacks, which note their calls."""

    def __init__(self, *names: str):
        super().__init__()
        self.module, self.calls, self.late = Simple(), [], -3.0
        for name in names:
            setattr(self, name, lambda t0, y0, dt, name=name: self.calls.append((name, t0.item(), y0, dt.item())))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.where(t < 0.5, 1.0, self.late) * self.module(t, y)

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


CALLBACKS = "callback_step", "callback_accept_step", "callback_reject_step"


@pytest.mark.parametrize("how", [{}, {"gradient": "mali"}, {"gradient": "aca"}])
def test_callbacks_see_each_attempt_and_its_verdict(how: Any):
    func = Told(*CALLBACKS)
    y = ours.odeint(func, Y0, TIMES[[0, -1]], rtol=1e-5, atol=1e-6, **how)
    steps, accepted, rejected = map(func.count, CALLBACKS)
    assert steps == accepted + rejected and rejected > 0
    first, *_, last = [call for call in func.calls if call[0] == CALLBACKS[1]]
    assert first[1] == 0.0 and torch.equal(first[2], Y0) and abs(last[1] + last[3] - 1) < 1e-12
    quiet = ours.odeint(lambda t, y: func(t, y), Y0, TIMES[[0, -1]], rtol=1e-5, atol=1e-6, **how)
    assert torch.equal(y, quiet)


@pytest.mark.parametrize("method", ["rk4", "explicit_adams", "alf"])
def test_callbacks_of_fixed_steps_get_torchdiffeqs_arguments(method: str):
    func = Told("callback_step")
    func.late = 1.0
    ours.odeint(func, Y0, TIMES.flip(0), method=method, options={"step_size": 0.25})
    assert [round(call[1], 12) for call in func.calls] == [1.0, 0.75, 0.5, 0.25]
    assert all(abs(call[3] - 0.25) < 1e-12 for call in func.calls)  # a size, also backwards in time
    if method == "rk4":
        theirs = Told("callback_step")
        theirs.late = 1.0
        torchdiffeq.odeint(theirs, Y0, TIMES.flip(0), method=method, options={"step_size": 0.25})
        for a, b in zip(func.calls, theirs.calls, strict=True):
            assert abs(a[1] - b[1]) < 1e-12 and (a[2] - b[2]).abs().max() < 1e-12


def test_adjoint_callbacks_see_the_backward_solve():
    func = Told("callback_step", "callback_step_adjoint")
    y = ours.odeint_adjoint(func, Y0, TIMES[[0, -1]], method="rk4", options={"step_size": 0.25})
    assert func.count("callback_step") == 4 and func.count("callback_step_adjoint") == 0
    y.sum().backward()
    zero, state, a, *parameters = func.calls[4][2]
    assert func.count("callback_step_adjoint") == 4 and zero == 0
    assert torch.equal(state, y[-1]) and torch.equal(a, torch.ones_like(a))
    assert [p.shape for p in parameters] == [p.shape for p in func.parameters()]


@pytest.mark.parametrize("method", ["euler", "scipy_solver"])
def test_callbacks_that_a_method_does_not_have_warn(method: str):
    with pytest.warns(tm.SolverWarning, match="callback_accept_step.*not called"):
        ours.odeint(Told("callback_accept_step"), Y0, TIMES, method=method)


# The adjoint's norms, grids and parameters.


def test_an_adjoint_norm_sees_the_state_its_adjoint_and_the_parameters():
    module, shapes = Simple(), set()

    def norm(state: tuple[Tensor, ...]) -> Tensor:
        shapes.add(tuple(x.shape for x in state))
        return torch.stack([x.abs().max() for x in state[:-2]]).max()

    y0 = Y0.clone().requires_grad_(), torch.ones(3, dtype=torch.float64)
    func = lambda t, y: (module(t, y[0]), -y[1])  # noqa: E731
    y = ours.odeint_adjoint(func, y0, TIMES, adjoint_params=tuple(module.parameters()), adjoint_options={"norm": norm})
    g = torch.autograd.grad(y[0][-1].sum(), y0[0])[0]
    (wanted,) = torch.autograd.grad(ours.odeint(func, y0, TIMES)[0][-1].sum(), y0[0])
    assert shapes == {((), (2, 4), (3,), (2, 4), (3,), *[p.shape for p in module.parameters()])}
    assert (g - wanted).abs().max() < 1e-6


def test_the_adjoint_makes_grids_of_its_own():
    asked: list[list[float]] = []

    def construct(func: Any, y0: Tensor, t: Tensor) -> Tensor:
        asked.append(t.tolist())
        return torch.linspace(t[0].item(), t[-1].item(), 11, dtype=t.dtype)

    y0 = torch.ones((), dtype=torch.float64, requires_grad=True)
    options = {"grid_constructor": construct}
    y = ours.odeint_adjoint(lambda t, y: y, y0, TIMES[[0, -1]], method="euler", options=options)
    y[-1].backward()
    assert asked[0] == [0.0, 1.0] and [1.0, 0.0] in asked
    assert y0.grad is not None and abs(y0.grad.item() - 1.1**10) < 1e-12


def test_only_adjoint_params_get_a_gradient():
    module = Simple()
    first, *others = module.parameters()
    with pytest.warns(tm.SolverWarning, match="would get none"):
        y = ours.odeint_adjoint(module, Y0, TIMES, adjoint_params=(first,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y[-1].sum().backward()
    assert first.grad is not None and all(p.grad is None for p in others)


# Random numbers, other results of f, dense output.


def test_plain_autograd_draws_new_numbers_at_each_evaluation():
    def noise(t: Tensor, y: Tensor) -> Tensor:
        return torch.randn_like(y)

    y0 = torch.zeros(1000, dtype=torch.float64)
    torch.manual_seed(0)
    y = ours.odeint(noise, y0, TIMES, method="euler")
    assert abs(y[-1].std().item() - 6**-0.5) < 0.05  # six independent increments of 1/6
    torch.manual_seed(0)
    assert torch.equal(y, ours.odeint(noise, y0, TIMES, method="euler"))
    same = ours.odeint(noise, y0, TIMES, method="euler", gradient="aca")
    assert abs(same[-1].std().item() - 1) < 0.1


def test_dropout_in_f_has_torchdiffeqs_expectation_and_can_be_differentiated():
    weight = torch.ones(2000, dtype=torch.float64, requires_grad=True)
    func = lambda t, y: nn.functional.dropout(weight.expand_as(y), 0.5)  # noqa: E731
    y = ours.odeint(func, torch.zeros_like(weight), TIMES, method="euler")
    (g,) = torch.autograd.grad(y[-1].sum(), weight)
    assert torch.allclose(g, y[-1], atol=1e-12) and len(set(g.tolist())) > 3


@pytest.mark.parametrize("how", [{"method": "rk4"}, {"rtol": 1e-4, "atol": 1e-6}, {"method": "rk4", "gradient": "aca"}])
@pytest.mark.parametrize("convert", [lambda u: u.double(), lambda u: u.reshape(3), lambda u: u[None].half().double()])
def test_f_may_return_another_float_type_or_shape_with_one_warning(how: Any, convert: Any):
    y0 = torch.linspace(0.5, 1, 3).reshape(3, 1).requires_grad_()
    with pytest.warns(tm.SolverWarning, match="is converted") as caught:
        y = ours.odeint(lambda t, y: convert(-y), y0, torch.tensor([0.0, 1.0]), **how)
    assert len(caught) == 1 and y.dtype == torch.float32 and y.shape == (2, 3, 1)
    assert (y[-1] - y0 * torch.exp(torch.tensor(-1.0))).abs().max() < 0.01
    (g,) = torch.autograd.grad(y[-1].sum(), y0)
    assert (g - torch.exp(torch.tensor(-1.0))).abs().max() < 0.01


def test_f_may_not_return_another_number_of_elements():
    with pytest.raises(tm.InvalidFieldError, match="shape"):
        ours.odeint(lambda t, y: torch.ones(4), torch.ones(3), torch.tensor([0.0, 1.0]))
    with pytest.raises(tm.InvalidFieldError, match="complex"):
        ours.odeint(lambda t, y: 1j * y, torch.ones(3), torch.tensor([0.0, 1.0]))


def test_odeint_dense_is_a_function_of_time():
    module, t = Simple(), torch.tensor(0.37, dtype=torch.float64)
    y = ours.odeint_dense(module, Y0, TIMES[0], TIMES[-1], rtol=1e-8, atol=1e-10)
    theirs: Any = torchdiffeq.odeint_dense(module, Y0, TIMES[0], TIMES[-1], rtol=1e-8, atol=1e-10)
    assert (y(t) - theirs(t)).abs().max() < 1e-6 and y(TIMES).shape == (7, 2, 4)


def test_a_first_slope_of_zero_does_not_make_the_first_steps_tiny():
    calls: list[int] = []
    func = lambda t, y: calls.append(1) or torch.sin(2 * t) * y  # noqa: E731
    y = ours.odeint(func, torch.ones(1).double(), TIMES[[0, -1]], rtol=1e-6, atol=1e-8)
    exact = torch.exp((1 - torch.cos(torch.tensor(2.0).double())) / 2)
    assert abs(y[-1] - exact) < 1e-5 and len(calls) < 50  # it was 92


def test_the_estimate_of_fehlbergs_method_is_a_512th_of_a_first_order_ones():
    assert FEHLBERG2.error_order == 2 and dict(FEHLBERG2.tableau.e) == {0: -1 / 512, 2: 1 / 512}


def test_the_adjoint_measures_states_by_the_norm_of_the_forward_solve_unless_it_has_its_own():
    seen: list[tuple[torch.Size, bool]] = []
    is_backward = False

    def norm(x: Tensor) -> Tensor:
        seen.append((x.shape, is_backward))
        return x.abs().max()

    y0 = Y0.clone().requires_grad_()
    for adjoint_options in (None, {"norm": "seminorm"}):
        is_backward = False
        how: dict[str, Any] = {"options": {"norm": norm}, "adjoint_options": adjoint_options}
        y = ours.odeint_adjoint(Simple(), y0, TIMES[[0, -1]], **LOOSE, **how)
        is_backward = True
        y[-1].sum().backward()
        assert {(Y0.shape, False), (Y0.shape, True)} == set(seen)
        seen.clear()


def test_the_adjoint_keeps_the_tolerances_of_each_leaf():
    module, calls = Simple(), []

    def func(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return module(t, y[0]), torch.cos(60 * t).expand(1) * y[1]

    counts = []
    for rtol, atol in (([1e-4, 1e20], [1e-5, 1e20]), (1e-4, 1e-5)):
        y0 = Y0.clone().requires_grad_(), torch.ones(1).double()
        y = ours.odeint_adjoint(func, y0, TIMES[[0, -1]], rtol=rtol, atol=atol)
        calls.clear()
        (y[0][-1].sum() + y[1][-1].sum()).backward()
        counts.append(len(calls))
    assert counts[0] < counts[1] / 2
