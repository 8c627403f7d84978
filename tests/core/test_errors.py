"""Every way to be told that something is wrong: the error's type, and that its message helps."""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import torchmali
from torchmali import (
    ACA,
    ALF,
    MALI,
    RK4,
    AdaptiveStep,
    Adjoint,
    Dopri5,
    Euler,
    FixedStep,
    IncompatibleError,
    InvalidFieldError,
    InvalidOptionError,
    InvalidStateError,
    InvalidTimesError,
    NonFiniteError,
    SolverError,
    SolverWarning,
    StepLimitError,
    StepUnderflowError,
    UnknownMethodError,
    odeint,
    odeint_adjoint,
    solve,
)

Y0 = torch.ones(3, dtype=torch.float64)
SPAN = (0.0, 1.0)


def decay(t: Tensor, y: Tensor) -> Tensor:
    return -y


@contextmanager
def complaint(error: type[SolverError], parent: type[Exception], *fragments: str):
    """The block raises this error, which is also a built-in one, and says all of these things."""
    with pytest.raises(error) as caught:
        yield
    assert isinstance(caught.value, SolverError)
    assert isinstance(caught.value, parent)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message


@contextmanager
def warning(*fragments: str):
    with pytest.warns(SolverWarning) as caught:
        yield
    assert len(caught) == 1
    for fragment in fragments:
        assert fragment in str(caught[0].message)


def test_every_error_of_torchmali_is_a_solver_error_and_a_built_in_one():
    errors = [
        x
        for x in vars(torchmali).values()
        if isinstance(x, type) and issubclass(x, Exception) and not issubclass(x, Warning)
    ]
    assert len(errors) > 5
    for error in errors:
        assert issubclass(error, SolverError)
        if error is not SolverError:
            assert issubclass(error, (ValueError, TypeError, RuntimeError))


def test_unknown_method_lists_the_known_ones():
    with complaint(UnknownMethodError, ValueError, "method 'dopri6'", "'dopri5'", "'alf'", "'rk4'"):
        odeint(decay, Y0, SPAN, method="dopri6")


def test_unknown_gradient_lists_the_known_ones():
    with complaint(UnknownMethodError, ValueError, "gradient method 'magic'", "'mali'", "'aca'", "'adjoint'"):
        odeint(decay, Y0, SPAN, gradient="magic")


@pytest.mark.parametrize("name", ["method", "adjoint_method"])
def test_unknown_method_of_the_adjoint_lists_the_known_ones(name):
    with complaint(UnknownMethodError, ValueError, "'dopri6'", "'dopri5'"):
        options: dict[str, Any] = {name: "dopri6"}
        odeint_adjoint(decay, Y0, SPAN, **options)


def test_unknown_option_for_adaptive_steps_is_ignored_with_the_nearest_known_one():
    with pytest.warns(SolverWarning, match="'frist_step' is ignored.*mean 'first_step'.*max_num_steps"):
        odeint(decay, Y0, SPAN, options={"frist_step": 0.1})


@pytest.mark.parametrize("method, options", [("rk4", {}), ("alf", {"step_size": 0.1})])
def test_option_for_adaptive_steps_is_ignored_by_fixed_steps(method, options):
    with pytest.warns(SolverWarning, match="'first_step' is ignored.*fixed steps.*step_size"):
        odeint(decay, Y0, SPAN, method=method, options={**options, "first_step": 0.1})


@pytest.mark.parametrize("name", ["solver", "controller", "gradient"])
@pytest.mark.parametrize("value", ["alf", None, ALF])
def test_solve_wants_objects_and_not_names_or_classes(name, value):
    with complaint(InvalidOptionError, ValueError, f"{name}={value!r}", "solver=ALF()", "odeint"):
        solve(decay, Y0, SPAN, **{name: value})


def test_args_must_be_a_tuple():
    with complaint(InvalidOptionError, ValueError, "args must be a tuple", "args=(x,)", "Tensor"):
        solve(lambda t, y, a: -a * y, Y0, SPAN, args=torch.ones(()))  # type: ignore[arg-type]


@pytest.mark.parametrize("eta", [0.0, 1.1, -0.3, math.nan])
def test_damping_must_lie_in_its_range(eta):
    with complaint(InvalidOptionError, ValueError, f"eta={eta}", "(0, 1]"):
        ALF(eta=eta)


def test_damping_of_one_half_has_no_inverse():
    with complaint(InvalidOptionError, ValueError, "eta=0.5", "no inverse", "1 - 2 eta", "0.45"):
        ALF(eta=0.5)


@pytest.mark.parametrize("h", [0, -0.1, math.nan])
def test_fixed_step_must_be_positive(h):
    with complaint(InvalidOptionError, ValueError, f"h={h}", "positive", "sign"):
        FixedStep(h)


@pytest.mark.parametrize(
    "options, fragments",
    [
        ({"rtol": -1e-3}, ["rtol=-0.001", "negative"]),
        ({"atol": -1e-3}, ["atol=-0.001", "negative"]),
        ({"atol": math.nan}, ["atol=nan"]),
        ({"rtol": 0, "atol": 0}, ["rtol=0, atol=0", "give one"]),
        ({"h0": 0.0}, ["h0=0.0", "positive", "sign"]),
        ({"h0": -0.1}, ["h0=-0.1", "positive"]),
        ({"safety": 0.0}, ["safety=0.0", "(0, 1)"]),
        ({"safety": 1.0}, ["safety=1.0", "(0, 1)"]),
        ({"min_factor": 0.0}, ["0 < min_factor < 1 < max_factor", "0.0"]),
        ({"min_factor": 1.0}, ["0 < min_factor < 1 < max_factor", "1.0"]),
        ({"max_factor": 1.0}, ["0 < min_factor < 1 < max_factor", "1.0"]),
        ({"h_min": -1.0}, ["0 <= h_min < h_max", "-1.0"]),
        ({"h_min": 1.0, "h_max": 0.5}, ["0 <= h_min < h_max", "1.0", "0.5"]),
        ({"h_max": 0.0}, ["0 <= h_min < h_max", "0.0"]),
        ({"max_steps": 0}, ["max_steps=0", "at least one"]),
    ],
    ids=repr,
)
def test_adaptive_step_refuses_options_out_of_range(options, fragments):
    with complaint(InvalidOptionError, ValueError, "AdaptiveStep", *fragments):
        AdaptiveStep(**options)


@pytest.mark.parametrize("name", ["rtol", "atol"])
@pytest.mark.parametrize("value", [(1e-3,), (1e-3, 1e-3, 1e-3), {"x": 1e-3}, (1e-3, (1e-3, 1e-3))])
def test_tolerances_must_have_the_structure_of_y0(name, value):
    controller = AdaptiveStep(**{name: value})
    with complaint(InvalidOptionError, ValueError, f"AdaptiveStep({name}=", "each leaf of y0"):
        solve(lambda t, y: y, (Y0, Y0), SPAN, controller=controller)


@pytest.mark.parametrize("name", ["rtol", "atol"])
@pytest.mark.parametrize("bad", [-1e-3, math.nan])
def test_tolerance_of_one_leaf_must_not_be_negative(name, bad):
    options: dict[str, Any] = {name: (1e-3, bad)}
    with complaint(InvalidOptionError, ValueError, name, f"{bad}", "negative"):
        solve(lambda t, y: y, (Y0, Y0), SPAN, controller=AdaptiveStep(**options))


def test_mali_needs_a_solver_with_an_inverse():
    with complaint(IncompatibleError, TypeError, "MALI", "inverse", "Dopri5", "solver=ALF()", "gradient=ACA()"):
        solve(decay, Y0, SPAN, solver=Dopri5(), gradient=MALI())
    with complaint(IncompatibleError, TypeError, "Dopri5"):
        odeint(decay, Y0, SPAN, method="dopri5", gradient="mali")


def test_adaptive_steps_need_a_solver_with_an_error_estimate():
    with complaint(IncompatibleError, TypeError, "AdaptiveStep", "error estimate", "RK4", "FixedStep", "Dopri5()"):
        solve(decay, Y0, SPAN, solver=RK4(), controller=AdaptiveStep(), gradient=ACA())


def test_adaptive_steps_of_the_backward_solve_need_an_error_estimate_too():
    gradient = Adjoint(solver=RK4(), controller=AdaptiveStep())
    with complaint(IncompatibleError, TypeError, "error estimate", "RK4"):
        solve(decay, Y0, SPAN, solver=Dopri5(), gradient=gradient)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.complex128])
def test_state_must_be_real_numbers(dtype):
    with complaint(InvalidStateError, TypeError, "y0", str(dtype), "float32 or float64"):
        solve(decay, Y0.to(dtype), SPAN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_are_sent_to_float32(dtype):
    with complaint(InvalidStateError, TypeError, "y0", str(dtype), "float32", "autocast"):
        solve(decay, Y0.to(dtype), SPAN)


@pytest.mark.parametrize("y0", [1.0, None, "y"])
def test_state_must_be_made_of_tensors(y0):
    with complaint(InvalidStateError, TypeError, "y0", type(y0).__name__, "tensors"):
        solve(decay, y0, SPAN)


def test_leaf_of_a_wrong_type_is_named():
    with complaint(InvalidStateError, TypeError, "leaf 1", "float"):
        solve(decay, (Y0, 1.0), SPAN)
    with complaint(InvalidStateError, TypeError, "leaf 1", "torch.int64"):
        solve(decay, (Y0, Y0.long()), SPAN)


@pytest.mark.parametrize("y0", [(), {}, [[], ()]])
def test_state_must_have_a_leaf(y0):
    with complaint(InvalidStateError, TypeError, "no leaves"):
        solve(decay, y0, SPAN)


@pytest.mark.parametrize("kind", [list, torch.tensor])
@pytest.mark.parametrize(
    "times, fragments",
    [
        ([0.0, 1.0, 0.5], ["increasing or decreasing", "t[1] = 1", "t[2] = 0.5"]),
        ([1.0, 0.5, 0.7], ["increasing or decreasing", "t[1] = 0.5", "t[2] = 0.7"]),
        ([0.0, 0.5, 0.5], ["repeats", "t[1] = ", "t[2] = 0.5"]),
        ([0.0, 0.0], ["repeats", "t[0] = ", "t[1] = 0"]),
        ([0.0], ["at least one output time", "got 1"]),
        ([], ["at least one output time", "got 0"]),
        ([0.0, math.nan], ["finite", "nan"]),
        ([0.0, math.inf], ["finite", "inf"]),
    ],
)
def test_times_must_be_a_sequence_that_goes_one_way(kind, times, fragments):
    with complaint(InvalidTimesError, ValueError, *fragments):
        solve(decay, Y0, kind(times))


@pytest.mark.parametrize("times", [[[0.0, 1.0], [2.0, 3.0]], [[0.0], [1.0]]], ids=repr)
def test_times_of_each_sample_are_a_tensor_with_a_column_for_each(times):
    with complaint(InvalidTimesError, ValueError, "one-dimensional"):
        solve(decay, Y0, times)
    with complaint(InvalidTimesError, ValueError, "as many samples"):
        solve(decay, Y0, torch.tensor(times))


@pytest.mark.parametrize("t", [1.0, 1, torch.tensor(1.0), torch.zeros(1, 1, 1)], ids=repr)
def test_one_time_is_not_a_sequence(t):
    with complaint(InvalidTimesError, ValueError, "one-dimensional"):
        solve(decay, Y0, t)


@pytest.mark.parametrize("controller", [FixedStep(0.5), AdaptiveStep()], ids=["fixed", "adaptive"])
@pytest.mark.parametrize(
    "f, fragments",
    [
        (lambda t, y: y.sum(), ["shape", "(3,)", "()", "broadcast"]),
        (lambda t, y: y[:, None], ["shape", "(3,)", "(3, 1)"]),
        (lambda t, y: y.float(), ["dtype", "torch.float64", "torch.float32", "cast"]),
        (lambda t, y: y.to(torch.complex128), ["torch.complex128"]),
        (lambda t, y: 1.0, ["tensors", "float"]),
        (lambda t, y: None, ["tensors", "NoneType"]),
        (lambda t, y: (y,), ["tensors", "tuple"]),
    ],
)
def test_f_must_return_a_tensor_like_y(f, fragments, controller):
    with complaint(InvalidFieldError, TypeError, "f must return", *fragments):
        solve(f, Y0, SPAN, controller=controller)


def test_wrong_leaf_that_f_returns_is_named():
    with complaint(InvalidFieldError, TypeError, "leaf 1", "(3,)", "(2,)"):
        solve(lambda t, y: (y[0], y[1][:2]), (Y0, Y0), SPAN)
    with complaint(InvalidFieldError, TypeError, "leaf 1", "float"):
        solve(lambda t, y: (y[0], 0.0), (Y0, Y0), SPAN)


@pytest.mark.parametrize(
    "f, found",
    [
        (lambda t, y: {"x": y["x"]}, "{'x': *}"),
        (lambda t, y: {**y, "a": y["x"]}, "{'x': *, 'v': *, 'a': *}"),
        (lambda t, y: (y["x"], y["v"]), "(*, *)"),
        (lambda t, y: y["x"], "*"),
    ],
)
def test_f_must_return_the_keys_of_y(f, found):
    with complaint(InvalidFieldError, TypeError, "structure", f"{found} instead of {{'x': *, 'v': *}}"):
        solve(f, {"x": Y0, "v": Y0}, SPAN)


@pytest.mark.parametrize(
    "f, found",
    [
        (lambda t, y: y[:1], "(*,)"),
        (lambda t, y: (*y, y[0]), "(*, *, *)"),
        (lambda t, y: y[0], "*"),
        (lambda t, y: {"x": y[0], "v": y[1]}, "{'x': *, 'v': *}"),
    ],
)
def test_f_must_return_as_many_leaves_as_y_has(f, found):
    with complaint(InvalidFieldError, TypeError, "structure", f"{found} instead of (*, *)"):
        solve(f, (Y0, Y0), SPAN)


def test_f_must_return_the_structure_of_y_at_every_depth():
    with complaint(InvalidFieldError, TypeError, "{'p': (*, (*,))} instead of {'p': (*, (*, *))}"):
        solve(lambda t, y: {"p": (Y0, (Y0,))}, {"p": (Y0, (Y0, Y0))}, SPAN)
    with complaint(InvalidFieldError, TypeError, "leaf 1", "tuple"):
        solve(lambda t, y: (Y0, (Y0, Y0)), (Y0, Y0), SPAN)


def test_order_of_the_keys_that_f_returns_does_not_matter():
    """x'' = -x: exchanged leaves would give another solution."""

    def oscillator(t, y):
        return {"v": -y["x"], "x": y["v"]}

    y0 = {"x": torch.ones(1).double(), "v": torch.zeros(1).double()}
    solution = solve(oscillator, y0, (0.0, 1.0), controller=AdaptiveStep(1e-6, 1e-6))
    assert list(solution.y) == ["x", "v"]
    assert solution.y["x"][-1].item() == pytest.approx(math.cos(1), abs=1e-4)
    assert solution.y["v"][-1].item() == pytest.approx(-math.sin(1), abs=1e-4)


@pytest.mark.parametrize("y0", [Y0, (Y0, Y0)], ids=["tensor", "tuple"])
@pytest.mark.parametrize("gradient", [ACA(), MALI(), Adjoint(), torchmali.Naive()], ids=repr)
@pytest.mark.parametrize("at", [0.0, 0.5])
def test_an_exception_of_f_itself_passes_through_unchanged(y0, gradient, at):
    class Mine(Exception):
        pass

    mine = Mine("from f")

    def f(t, y):
        if t >= at:
            raise mine
        return y

    with pytest.raises(Mine) as caught:
        solve(f, y0, SPAN, gradient=gradient)
    assert caught.value is mine
    assert mine.__cause__ is None and mine.__context__ is None


def leaf_1_breaks_after_half(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return -y[0], torch.where(t > 0.5, math.nan, 1.0) * y[1]


@pytest.mark.parametrize("gradient", [ACA(), torchmali.Naive(), Adjoint()], ids=repr)
def test_non_finite_values_at_fixed_steps_are_located(gradient):
    """The Euler step from .5625 on is the first to see them: it ends at .625."""
    with complaint(
        NonFiniteError, RuntimeError, "leaf 1", "t = 0.625", "h = 0.0625", "smaller steps", "adaptive controller"
    ):
        solve(leaf_1_breaks_after_half, (Y0, Y0), SPAN, solver=Euler(), controller=FixedStep(1 / 16), gradient=gradient)


def test_non_finite_values_of_alf_are_located():
    """The midpoint of the step from .5 to .5625 is the first time beyond .5."""
    with complaint(NonFiniteError, RuntimeError, "leaf 1", "t = 0.5625", "h = 0.0625"):
        solve(leaf_1_breaks_after_half, (Y0, Y0), SPAN, controller=FixedStep(1 / 16))


@pytest.mark.parametrize("controller", [FixedStep(0.1), AdaptiveStep()], ids=["fixed", "adaptive"])
def test_non_finite_start_is_refused(controller):
    y0 = (Y0, torch.tensor([1.0, math.nan]).double())
    with complaint(NonFiniteError, RuntimeError, "leaf 1", "t = 0", "finite"):
        solve(lambda t, y: y, y0, SPAN, controller=controller)


@pytest.mark.parametrize("solver", [ALF(), Dopri5()], ids=repr)
def test_non_finite_values_inside_adaptive_steps_are_located(solver):
    with complaint(NonFiniteError, RuntimeError, "t = 0.5", "leaf 1", "f is not finite there"):
        solve(leaf_1_breaks_after_half, (Y0, Y0), SPAN, solver=solver, gradient=ACA())


@pytest.mark.parametrize("solver", [ALF(), Dopri5()], ids=repr)
def test_growth_without_bound_in_finite_time_stops_the_solve(solver):
    """y' = y^2 from 1 reaches infinity at t = 1. Discrete solutions do so a little early or late, in ever smaller
    steps, of which one is too small or the last of the finite ones.
    """
    with pytest.raises((NonFiniteError, StepUnderflowError)) as caught:
        solve(lambda t, y: y**2, Y0, (0.0, 2.0), solver=solver, gradient=ACA())
    message = str(caught.value)
    assert re.search(r"t = (0\.99\d*|1|1\.0\d*) ", message)
    assert re.search(r"h = \d\S*e-\d\d", message)
    assert "grows without bound" in message


def test_f_that_is_not_repeatable_is_told_apart():
    """The repetition that looks for the place of a nan does not meet it again."""
    calls = []

    def f(t, y):
        calls.append(t)
        return y * (math.nan if len(calls) == 3 else 1.0)

    with complaint(NonFiniteError, RuntimeError, "repeat"):
        solve(f, Y0, SPAN, solver=Euler(), controller=FixedStep(0.1), gradient=ACA())


def test_step_limit_says_how_far_it_came_and_what_to_try():
    with complaint(
        StepLimitError,
        RuntimeError,
        "20 steps reached t = 0.",
        "of 1 ",
        "h = ",
        "% rejected",
        "stiff",
        "loosen rtol/atol",
        "another solver",
        "max_steps",
    ):
        controller = AdaptiveStep(1e-6, 1e-7, max_steps=20)
        solve(lambda t, y: 30 * torch.cos(30 * t) * y, Y0, SPAN, controller=controller)


def test_step_limit_gives_the_share_of_rejected_attempts():
    """h0 = 1 is rejected once or more before anything is accepted: all of three attempts."""
    controller = AdaptiveStep(1e-9, 1e-9, h0=1.0, max_steps=3)
    with complaint(StepLimitError, RuntimeError, "3 steps reached t = 0 of 1", "100% rejected"):
        solve(decay, Y0, SPAN, controller=controller)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", [ALF(), Dopri5()], ids=repr)
def test_a_jump_too_high_for_any_step_is_an_underflow(dtype, solver):
    def jump(t, y):
        return torch.where(t > 0.3, 1e16, 0.0).to(y.dtype) * y

    with complaint(
        StepUnderflowError,
        RuntimeError,
        "t = 0.3",
        "h = ",
        "x tolerance",
        "rejected",
        "Loosen rtol/atol",
        "float64",
        "jump in f",
    ):
        controller = AdaptiveStep(1e-4, 1e-6)
        solve(jump, Y0.to(dtype), SPAN, solver=solver, controller=controller, gradient=ACA())


def test_steps_below_h_min_are_an_underflow():
    controller = AdaptiveStep(1e-9, 1e-9, h0=0.5, h_min=0.1)
    with complaint(StepUnderflowError, RuntimeError, "t = 0 ", "below 0.1", "Loosen rtol/atol"):
        solve(decay, Y0, SPAN, controller=controller)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_a_tolerance_near_round_off_is_warned_about(dtype, rtol):
    controller = AdaptiveStep(rtol, 1.0)  # the large atol keeps the solve short
    with warning(f"rtol = {rtol:g}", "100 eps", str(dtype), "larger rtol", "float64"):
        solve(decay, Y0.to(dtype), SPAN, controller=controller)


def test_a_tolerance_near_round_off_of_one_leaf_is_warned_about():
    controller = AdaptiveStep((1e-6, 1e-6), 1.0)
    with warning("rtol = 1e-06", "torch.float32"):
        solve(lambda t, y: y, (Y0, Y0.float()), SPAN, controller=controller)


def test_damping_without_checkpoints_is_refused_with_the_remedy():
    y0 = Y0.clone().requires_grad_()
    gradient = MALI(checkpoint_every=None)
    with complaint(
        IncompatibleError, TypeError, "eta=0.7", "2.5 times per step", 'checkpoint_every="auto"', "unsafe_damping=True"
    ):
        solve(decay, y0, SPAN, solver=ALF(eta=0.7), controller=FixedStep(0.1), gradient=gradient)


def test_the_published_damping_warns_of_the_expected_amplification_before_the_solve():
    """2.5^20 = 9.1e7. The field fails at its first evaluation: by then the warning is out."""

    def func(t, y):
        raise ZeroDivisionError

    y0, gradient = Y0.clone().requires_grad_(), MALI(checkpoint_every=None, unsafe_damping=True)
    with (
        warning("eta=0.7", "2.5 times per step", "9.1e+07 in 20 steps", 'checkpoint_every="auto"'),
        pytest.raises(ZeroDivisionError),
    ):
        solve(func, y0, SPAN, solver=ALF(eta=0.7), controller=FixedStep(1 / 20), gradient=gradient)


def test_a_warning_points_to_the_line_of_the_user():
    with pytest.warns(SolverWarning) as caught:
        solve(lambda t, y: -y, torch.ones(2), (0.0, 1.0), controller=AdaptiveStep(1e-7, 1e-9, h0=0.1, max_steps=10**6))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("old", ["InvalidOption", "StepLimit", "NonRepeatableField"])
def test_errors_are_still_found_under_their_old_names(old):
    with pytest.warns(DeprecationWarning, match=f"{old} is called torchmali.{old}Error now"):
        assert getattr(torchmali, old) is getattr(torchmali, f"{old}Error")


@pytest.mark.parametrize("name", ["nothing", "Solver_", "_hidden"])
def test_there_are_no_names_but_those_of_errors_to_fall_back_on(name):
    with pytest.raises(AttributeError, match=name):
        getattr(torchmali, name)
