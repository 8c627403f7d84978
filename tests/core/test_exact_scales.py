"""MALI(exact=True) on numbers of many scales: each element is followed as floats follow it, or an error says why not.

Integers have a grid: its spacing may be too coarse for small elements, and its range too short for those that grow.
Where results are compared with plain floats, tolerances come from their eps: 1.2e-7 for float32.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from exact_solves import EXACT, ORDERS, PLAIN, Guarded
from torch import Tensor

import torchmali as tm
from torchmali.tape import Rescale

# 1. Single elements.


GRID_ATTACKS = {  # f, y0, times, order, h: what a grid of one spacing, or one that is looked at too late, gets wrong
    "a small element grows": (lambda t, y: torch.stack([0 * y[0], torch.sin(t) + 0 * y[1]]), [1.2345678, 1e-9], 2, 0.1),
    "it grows by itself": (lambda t, y: torch.stack([0 * y[0], 10 * y[1]]), [1.2345678, 1e-9], 2, 0.05),
    "it grows and turns": (lambda t, y: torch.stack([0 * y[0], torch.sin(t) * y[0].cos()]), [1.2345678, 1e-9], 2, 0.1),
    "from zero to 1e13": (lambda t, y: 1e13 * torch.cos(t) + 0 * y, [0.0], 2, 0.1),
    "from zero to 1e20": (lambda t, y: 1e20 * torch.cos(t) + 0 * y, [0.0], 4, 0.1),
    "from a slope of zero": (lambda t, y: 1e14 * t + 0 * y, [1e13], 2, 0.1),
    "zero beside 1000": (lambda t, y: torch.stack([y[0] / 2, 1e-5 * t + 0 * y[1]]), [1000.0, 0.0], 2, 0.05),
    "zero beside 1000, less": (lambda t, y: torch.stack([y[0] / 2, 1e-3 * t + 0 * y[1]]), [1000.0, 0.0], 2, 0.05),
    "scales that part": (lambda t, y: torch.stack([0 * y[0], -6 * y[1]]), [1.0, 1.0], 4, 0.05),
    "1e20 and 1e-20": (lambda t, y: y / 2, [1e20, 1e-20], 2, 0.1),
    "1e30 and 1e-30": (lambda t, y: y / 2, [1e30, 1e-30], 2, 0.1),
}


@pytest.mark.parametrize("refresh", ["auto", 1])
@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("attack", GRID_ATTACKS)
def test_each_element_is_followed_as_floats_follow_it(attack, adaptive, refresh):
    func, start, order, h = GRID_ATTACKS[attack]
    y0 = torch.tensor(start, requires_grad=True)
    controller = tm.AdaptiveStep(1e-3, 1e-9, h_max=h) if adaptive else tm.FixedStep(h)
    y, grads = {}, {}
    for method in (EXACT, tm.ACA()):
        solver = tm.ALF(order=order, refresh=refresh)
        got = tm.solve(func, y0, [0.0, 1.0], solver=solver, controller=controller, gradient=method)
        y[method] = got.y[-1].detach()
        grads[method] = torch.autograd.grad((got.y[-1] / y[method].abs().clamp(1e-30)).sum(), y0)[0]
    # Elements one by one. Adaptive steps differ in their last bits, and so do their errors; a slice may lack 3 bits.
    rtol = 1e-3 if adaptive else 1e-5
    assert torch.allclose(y[EXACT], y[tm.ACA()], rtol=rtol, atol=0.0)
    assert torch.allclose(grads[EXACT], grads[tm.ACA()], rtol=rtol, atol=1e-12)


def pulses(t, y):
    """Two forces of their own scale, one after the other."""
    m, c = torch.tensor([[0.5, 0.8], [50.0, 0.05]]).to(y)
    return c * torch.exp(-(((t - m) / 0.05) ** 2)) + 0 * y


def with_rates(*rates: float):
    return lambda t, y: torch.tensor(rates).to(y) * y


def growing_beside_a_driven_one(t, y):
    return torch.stack([0.1 * y[0], 0.1 * y[1], 1e-4 * torch.sin(t) + 0 * y[2]])


def driven_by_1e23_and_1e_minus_24(t, y):
    return torch.tensor([1e23, 1e-24]).to(y) * torch.cos(t) + 0 * y


ONE_SMALL = torch.ones(64, 4)
ONE_SMALL[37, 2] = 1e-9
STEPWISE = {  # f, y0, the last time, h, solver: what a grid was once too coarse for, or looked at too late
    "pulses, from their scale": (pulses, [50.0, 0.05], 1.0, 0.05, tm.ALF()),
    "pulses, from their scale, in small steps": (pulses, [50.0, 0.05], 1.0, 0.01, tm.ALF()),
    "pulses, from zero": (pulses, [0.0, 0.0], 1.0, 0.05, tm.ALF()),
    "pulses, from zero, in small steps": (pulses, [0.0, 0.0], 1.0, 0.01, tm.ALF()),
    "y and v are zero beside two scales": (growing_beside_a_driven_one, [1e4, 1e-6, 0.0], 1.0, 1 / 8, tm.ALF()),
    "zero beside 2.5e-23": (with_rates(0.5, 0.5), [0.0, 2.5e-23], 1.0, 0.1, tm.ALF()),
    "zero, driven, beside 2.5e-23": (
        lambda t, y: torch.stack([1e-25 * torch.sin(t) + 0 * y[0], y[1] / 2]),
        [0.0, 2.5e-23],
        1.0,
        0.1,
        tm.ALF(),
    ),
    "one of 1e-9 among ones": (lambda t, y: y / 2, ONE_SMALL.tolist(), 1.0, 0.1, tm.ALF()),
    "still beside growth": (with_rates(0.0, 3.4), [1.2345678, 1.0], 1.0, 0.1, tm.ALF(refresh="never")),
    "still beside decay": (with_rates(0.0, -40.0), [1.2345678, 1.0], 1.0, 0.002, tm.ALF(refresh=1)),
    "still beside fast decay": (with_rates(0.0, -80.0), [1.2345678, 1.0], 1.0, 0.002, tm.ALF(refresh=1)),
    "1e16 and 1e-32, driven": (driven_by_1e23_and_1e_minus_24, [1e16, 1e-32], 1.0, 0.25, tm.ALF(order=6)),
    "a rate of 1e18": (lambda t, y: -1e18 * y, [1.0, 0.5], 1e-18, 1e-20, tm.ALF()),
}


def each_element(func, start, t1: float, solver, controller, dtype, method) -> tuple[Tensor, Tensor]:
    """The end, and by how much it moves with the start."""
    y0 = torch.tensor(start, dtype=dtype, requires_grad=True)
    y = tm.solve(func, y0, [0.0, t1], solver=solver, controller=controller, gradient=method).y[-1]
    (g,) = torch.autograd.grad(y.sum(), y0)
    return y.detach(), g


def assert_followed(case: str, controller: tm.StepController, dtype: torch.dtype, rtol: float) -> None:
    func, start, t1, _, solver = STEPWISE[case]
    methods = (EXACT, tm.MALI(exact=True, checkpoint_every=1), tm.Naive())
    exact, stored, plain = (each_element(func, start, t1, solver, controller, dtype, method) for method in methods)
    assert all(map(torch.equal, exact, stored))
    for x, y in zip(exact, plain, strict=True):
        assert ((x - y).abs() <= rtol * y.abs()).all(), (x, y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", STEPWISE)
def test_each_element_is_followed_to_its_last_bits(case, dtype):
    _, _, t1, h, _ = STEPWISE[case]
    assert_followed(case, tm.FixedStep(h), dtype, (5 + t1 / h / 10) * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["pulses, from their scale", "pulses, from zero"])
def test_pulses_are_followed_by_adaptive_steps(case, dtype):
    assert_followed(case, tm.AdaptiveStep(1e-3, 1e-6), dtype, 100 * torch.finfo(dtype).eps)  # h differs a little


def first_output(func, start, times, solver, controller, method) -> Tensor:
    return tm.solve(func, torch.tensor(start), times, solver=solver, controller=controller, gradient=method).y[1]


@pytest.mark.parametrize("first", [1e-2, 1e-3, 1e-4])
def test_an_output_soon_after_a_start_from_zero_has_its_bits(first):
    """The step to it is shorter than all others."""
    how = lambda t, y: torch.cos(3 * t) + 0 * y, [0.0], [0.0, first, 1.0], tm.ALF(), tm.FixedStep(0.5)  # noqa: E731
    found, wanted = (first_output(*how, method) for method in (EXACT, tm.Naive()))
    assert abs(found - wanted) <= 4 * 2.0**-23 * abs(wanted)


@pytest.mark.parametrize("first", [1e-2, 1e-3])
def test_an_element_that_begins_to_move_beside_another_has_its_bits_at_the_first_output(first):
    how = lambda t, y: torch.sin(t) + 0 * y, [1.0, 0.0], [0.0, first, 0.5, 1.0], tm.ALF(), tm.FixedStep(0.5)  # noqa: E731
    found, wanted = (first_output(*how, method) for method in (EXACT, tm.Naive()))
    assert ((found - wanted).abs() <= 4 * 2.0**-23 * wanted.abs()).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("force", [1e6, 1e8])
def test_scales_that_part_in_the_steps_that_leave_the_range_are_followed(force, order):
    """The first element leaves the range within 8 steps, the second one begins to move beside it."""
    driven = lambda t, y: torch.tensor([force, 1.0]) * torch.sin(t) + 0 * y  # noqa: E731
    how = driven, [4e4, 0.0], [0.0, 0.01, 0.5, 1.0], tm.ALF(order=order, refresh="never"), tm.FixedStep(0.2)
    found, wanted = (first_output(*how, method) for method in (EXACT, tm.Naive()))
    assert ((found - wanted).abs() <= 4 * 2.0**-23 * wanted.abs()).all()


@pytest.mark.parametrize("refresh", [1, "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_small_elements_that_are_driven_are_rebuilt_to_the_bit(seed, refresh):
    """From 1e-9 to what a force makes of them: more bits fall off at once than a byte holds."""
    rng = torch.Generator().manual_seed(seed)
    small = 1e-6 * torch.randn(20, generator=rng) * 10 ** (5 * torch.rand(20, generator=rng) - 2.5)
    y0 = (small.requires_grad_(), 1e-9 * torch.randn(20, generator=rng), 1e5 * torch.randn(3, 2, generator=rng))
    w = torch.randn(3, generator=rng)

    def driven(t, y):
        return tuple(c * torch.sin(3 * t) + 0.1 * x * v for c, x, v in zip((2.3, 0.016, 52.0), y, w, strict=True))

    how = {"solver": tm.ALF(refresh=refresh), "controller": tm.AdaptiveStep(1e-4, 1e-5), "gradient": EXACT}
    got = tm.solve(driven, y0, [1.18, 0.0], **how)
    got.y[0][-1].sum().backward()  # raises, if the start is not met
    assert got.stats.reconstruction_error == 0.0


def test_an_element_of_1e_60_is_followed_beside_one():
    y0 = torch.tensor([1.0, 1e-60], dtype=torch.float64)
    y = tm.solve(lambda t, y: y / 2, y0, [0.0, 1.0], controller=tm.FixedStep(0.1), gradient=EXACT).y[-1]
    assert (y[1] / y[0]).item() == pytest.approx(1e-60, rel=1e-12)


# 2. Leaves that mix scales.

SCALES = torch.tensor([1.0, 1e3, 1e6], dtype=torch.float64)
TURN = torch.tensor([[0, -1, 1], [1, 0, -1], [-1, 1, 0]], dtype=torch.float64)  # about (1, 1, 1)
MIXED = SCALES[:, None] * TURN / SCALES
MIXED_START = SCALES * torch.tensor([1.0, 0.5, -0.3], dtype=torch.float64)
MIXED_TIMES = torch.linspace(0.0, 3.0, 7, dtype=torch.float64)
LAYOUTS = {
    "elements": (lambda y: y, lambda y: y),
    "channels": (lambda y: y.expand(4, 3), lambda y: y),
    "last of three dimensions": (lambda y: y.expand(2, 4, 3), lambda y: y),
    "rows": (lambda y: y[:, None].expand(3, 4), lambda y: y.mT),
    "one row of 1e-6 beside many": (lambda y: y[[0, *[2] * 40]], None),
    "element by element": (lambda y: y[torch.arange(48) % 3].reshape(6, 8), None),
    "scattered": (lambda y: y[torch.arange(48) * 7 % 5 % 3].reshape(4, 3, 4), None),
}


def mixed_solve(layout: str, dtype: torch.dtype, method: tm.GradientMethod, solver: tm.ALF, controller: Any):
    """The solution, and the gradient of a loss in which all scales count alike, by y0 and a matrix or a rate."""
    spread, gather = LAYOUTS[layout]
    y0 = spread(MIXED_START).to(dtype).clone().requires_grad_()
    scale = spread(SCALES).to(dtype)
    a = (MIXED.to(dtype) if gather else torch.ones((), dtype=dtype)).clone().requires_grad_()

    def func(t, y, a):
        if gather:
            return gather(gather(y) @ a.mT)
        return a * scale * torch.sin(3 * y / scale + t)

    times = MIXED_TIMES.tolist()
    got = tm.solve(func, y0, times, solver=solver, controller=controller, gradient=method, args=(a,))
    grads = torch.autograd.grad(torch.tanh(got.y / scale).sum(), [y0, a])
    return got.y.detach().double() / scale.double(), [g.double() for g in (grads[0] * scale, grads[1])], got.stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "controller", [tm.FixedStep(0.02), tm.AdaptiveStep(1e-4, 1e-7, land=True)], ids=["fixed", "adaptive"]
)
def test_a_leaf_that_mixes_scales_is_followed_as_floats_do(layout, dtype, controller):
    """In units of each component's own scale, against finer arithmetic on the same steps where there is one."""
    solver = tm.ALF(order=4)
    exact, exact_grads, stats = mixed_solve(layout, dtype, EXACT, solver, controller)
    plain, plain_grads, _ = mixed_solve(layout, dtype, PLAIN, solver, controller)
    assert stats.reconstruction_error == 0.0
    eps = torch.finfo(dtype).eps
    # 13 evaluations in each of 150 steps; adaptive ones are as long as the rounded error allows, which differs.
    assert (exact - plain).abs().max() < (200 if controller.adaptive else 100) * eps
    for g, wanted in zip(exact_grads, plain_grads, strict=True):
        assert (g - wanted).abs().max() < 300 * eps * wanted.abs().max()


def mixed_errors(y: Tensor) -> Tensor:
    """The largest error of each component, in units of its scale."""
    truth = torch.stack([torch.matrix_exp(t * MIXED) @ MIXED_START for t in MIXED_TIMES])
    return ((y.double() - truth) / SCALES).abs().amax(0)


@pytest.mark.parametrize("exact", [True, "int64"])
@pytest.mark.parametrize(("order", "h"), [(4, 0.02), (6, 0.05)])
def test_the_error_on_mixed_scales_is_that_of_plain_float32(order, h, exact):
    a, y0, how = MIXED.float(), MIXED_START.float(), {"solver": tm.ALF(order=order), "controller": tm.FixedStep(h)}

    def whole(method):
        return tm.solve(lambda t, y: a @ y, y0.clone().requires_grad_(), MIXED_TIMES, gradient=method, **how).y.detach()

    allowed = 2 * mixed_errors(whole(PLAIN)) + 1.2e-7
    assert allowed.max() < 1e-5
    assert (mixed_errors(whole(tm.MALI(exact=exact))) <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rates", [(4.0, 0.1, -4.0), (4.0, 0.1, -2.0), (2.0, 0.1, -1.0)])
def test_scales_that_part_on_the_way_are_followed_as_floats_do(dtype, rates):
    """Channels that grow and shrink at rates of their own from a common start."""
    a = torch.tensor(rates, dtype=dtype)
    y0 = torch.linspace(0.5, 1.5, 12).reshape(4, 3)

    def end(dtype, method):
        y = y0.to(dtype).requires_grad_()
        how: Any = {"solver": tm.ALF(order=4), "controller": tm.FixedStep(0.03), "gradient": method}
        got = tm.solve(lambda t, y: a.to(y) * y, y, [0.0, 3.0], **how)
        (g,) = torch.autograd.grad(got.y[-1].log().sum(), y)
        return torch.stack([got.y[-1].detach(), g]).double(), got.stats

    found, stats = end(dtype, EXACT)
    plain, _ = end(dtype, tm.ACA())
    assert stats.reconstruction_error == 0.0 and stats.n_rescales > 0
    truth = plain if dtype == torch.float64 else end(torch.float64, tm.ACA())[0]
    error, allowed = ((x / truth - 1).abs().amax((0, 1)) for x in (found, plain))
    # f contracts the last channel: v parts from f there, and round-off with it.
    assert (error <= 4 * allowed + torch.tensor([100, 100, 4e3]) * torch.finfo(dtype).eps).all()


def test_float64_rows_of_1e_minus_6_beside_1e12_keep_their_digits():
    y0 = torch.tensor([[1e-6] * 4, [1e12] * 4], dtype=torch.float64, requires_grad=True)
    y = tm.solve(lambda t, y: y, y0, [0.0, 1.0], controller=tm.FixedStep(0.01), gradient=EXACT).y[-1]
    assert (y / y0 - y[1, 0] / y0[1, 0]).abs().max() < 1e-12


def test_a_component_that_only_passes_zero_at_the_output_times_is_no_other_scale():
    """x'' = -x after one period: (1, 0) again."""
    y0 = torch.tensor([1.0, 0.0], requires_grad=True)
    y = tm.solve(
        lambda t, y: torch.stack([y[1], -y[0]]),
        y0,
        [0.0, 2 * math.pi],
        solver=tm.ALF(order=4),
        controller=tm.FixedStep(0.1),
        gradient=EXACT,
    ).y
    assert (y[-1] - y0).norm() < 1e-5


# 3. Numbers that leave their range.


@pytest.mark.parametrize("rate", [300.0, 1000.0, 3000.0])
def test_a_step_in_which_all_grows_a_thousandfold_takes_wider_integers(rate):
    """int32 has 6 bits more than a float's mantissa: z and v may not both outgrow that within one step."""
    fixed = torch.linspace(1.0, 2.0, 6).reshape(2, 3)

    def gradients(gradient):
        y0 = (torch.linspace(-1.0, 2.0, 6).reshape(2, 3).requires_grad_(), torch.ones(3))
        field = lambda t, y: (torch.where(t < 0.5, rate, 1.0) * y[0] * fixed, -y[1])  # noqa: E731
        got = tm.solve(field, y0, [0.0, 1.0, 2.0], controller=tm.FixedStep(1.0), gradient=gradient)
        y, other = got.y
        return y.detach(), torch.autograd.grad(y[-1].sum() + other[-1].sum(), y0[0])[0], got.stats

    y, grad, stats = gradients(EXACT)
    truth, wanted, _ = gradients(tm.ACA())
    assert stats.reconstruction_error == 0.0 and stats.n_rescales > 0
    assert (y - truth).norm() < 1e-6 * truth.norm()
    assert (grad - wanted).norm() < 1e-6 * wanted.norm()


def test_leaves_that_explode_one_after_the_other_are_widened_together():
    """A repetition of the step for one of them keeps the room that was made for the other."""
    y0 = (torch.full((2,), 1e-3), torch.ones(3))

    def field(t, y):
        return -12 * (y[0] - torch.cos(t)), 300 * y[1]

    def ends(gradient):
        return tm.solve(field, y0, [0.0, 1.0, 2.0], controller=tm.FixedStep(1.0), gradient=gradient).y

    for found, truth in zip(ends(EXACT), ends(tm.ACA()), strict=True):
        assert (found - truth).norm() < 1e-6 * truth.norm()


def test_functions_that_raise_at_numbers_which_wrapped_round_are_called_again():
    """One is 2^26 on the grid: 1 + 100 wraps round before anybody has looked."""

    def positive(t, y):
        if not bool((y > 0).all()):
            raise ArithmeticError("y is negative")
        return 100 + 0 * y

    def observe(t, y):
        return positive(t, y) * y.sum()

    for controller in (tm.FixedStep(1.0), tm.AdaptiveStep(1e-3, 1e-3, h0=1.0)):
        y = tm.solve(positive, torch.ones(1), [0.0, 3.0], controller=controller, gradient=EXACT).y[-1]
        assert y.item() == pytest.approx(301)
    how = {"controller": tm.FixedStep(1.0), "observe": observe}
    found, truth = (
        tm.solve(lambda t, y: 60 + 0 * y, torch.ones(1), [0.0, 1.0, 2.0, 3.0], gradient=method, **how).observed
        for method in (EXACT, tm.ACA())
    )
    assert found is not None and torch.equal(found, truth)


def test_an_error_of_f_itself_is_passed_on():
    def fails(t, y):
        if t > 1.3:
            raise ArithmeticError("f fails here")
        return 0 * y

    for h in (0.1, 1.0):
        with pytest.raises(ArithmeticError, match="f fails here"):
            tm.solve(fails, torch.ones(1), [0.0, 3.0], controller=tm.FixedStep(h), gradient=EXACT)


def ends(func, y0, times, solver, controller) -> tuple[Tensor, Tensor, tm.Stats]:
    """The end with exact=True, after a backward pass, and the same steps of plain float64."""
    y = y0.clone().requires_grad_()
    got = tm.solve(Guarded(func), y, times, solver=solver, controller=controller, gradient=EXACT)
    got.y[-1].sum().backward()
    assert got.stats.reconstruction_error == 0.0
    assert y.grad is not None and y.grad.isfinite().all()
    wide = tm.solve(func, y0.double(), times, solver=solver, controller=controller, gradient=PLAIN)
    if not controller.adaptive:
        assert got.stats.n_steps == wide.stats.n_steps
    return got.y[-1].detach().double(), wide.y[-1], got.stats


def switches(at: float, before: float, after: float):
    """f jumps from one constant to another."""
    return lambda t, y: torch.where(t > at, after, before).to(y) * torch.ones_like(y)


JUMPS = {
    "up": (switches(0.55, 1.0, 1e3), 1.0, 0.1),
    "up in the last step": (switches(0.93, 1.0, 1e3), 1.0, 0.1),
    "down": (switches(0.55, 1.0, 1e-6), 1.0, 0.1),
    "from nothing": (switches(0.55, 0.0, 1e-9), 1e-9, 0.1),
    "in one long step": (switches(9.0, 54.0, 0.0), 1.0, 1.0),  # 1 + 54 is -9 in 32 bits, where 1 is 2^26
    "from a small start": (switches(9.0, 1.0, 0.0), 1e-12, 0.1),
    "from zero": (switches(9.0, 1.0, 0.0), 0.0, 0.1),
    "from zero, a little": (switches(9.0, 1e-9, 0.0), 0.0, 0.1),
    "from zero, in small steps": (switches(9.0, 1e-4, 0.0), 0.0, 0.01),
    "from zero to nothing to a little": (switches(0.55, 0.0, 1e-9), 0.0, 0.1),
    "through zero": (lambda t, y: torch.cos(20 * t) * torch.ones_like(y), 0.0, 0.02),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("jump", JUMPS)
def test_a_jump_of_the_slope_is_followed_as_floats_do(jump, order):
    func, y0, h = JUMPS[jump]
    solver = tm.ALF(order=order, refresh="never")
    found, wanted, _ = ends(func, torch.tensor([y0]), [0.0, 1.0], solver, tm.FixedStep(h))
    assert abs(found - wanted) <= 1e-5 * abs(wanted)  # round-off of 100 steps, eps each


EXPLOSIONS = {
    "a jump to 1e6": (switches(0.55, 1.0, 1e6), 1.0, 1.0, 0.1),
    "1e6 y": (lambda t, y: 1e6 * y, 1.0, 1.0, 0.5),
    "3 y": (lambda t, y: 3 * y, 1.0, 10.0, 10.0),
    "-3 y": (lambda t, y: -3 * y, 1.0, 10.0, 10.0),
    "y^2": (lambda t, y: y * y, 1.0, 2.0, 0.1),
    "-y^3": (lambda t, y: -(y**3), 10.0, 1.0, 0.1),
    "e^y": (lambda t, y: torch.exp(y), 0.0, 2.0, 0.1),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("explosion", EXPLOSIONS)
def test_fixed_steps_that_explode_are_those_of_floats_or_an_error(explosion, order):
    func, y0, t, h = EXPLOSIONS[explosion]
    solver = tm.ALF(order=order, refresh="never")
    try:
        found, wanted, _ = ends(func, torch.tensor([y0, 2 * y0]), [0.0, t], solver, tm.FixedStep(h))
    except tm.NonFiniteError as error:
        assert "smaller steps" in str(error)
        return
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rate", [10.0, -10.0])
def test_adaptive_steps_recover_from_a_first_step_far_too_long(rate, order):
    solver, controller = tm.ALF(order=order), tm.AdaptiveStep(1e-3, 1e-5, h0=2.0)
    y0 = torch.tensor([1.0, 2.0])
    found, plain, stats = ends(lambda t, y: rate * y, y0, [0.0, 2.0], solver, controller)
    assert stats.n_rejected > 0
    truth = y0 * math.exp(2 * rate)
    for y in (found, plain):
        assert (y - truth).norm() < 5e-2 * truth.norm() + 1e-3  # 1e-3 for each of |rate| t = 20, or 100 atol


@pytest.mark.parametrize("order", ORDERS)
def test_a_rejected_attempt_costs_no_bits(order):
    """A solution that shrinks needs no coarser grid. The first attempts, far too long, do."""
    y0 = torch.tensor([1.0, -2.0])
    how: Any = {"solver": tm.ALF(order=order), "controller": tm.AdaptiveStep(1e-3, 1e-6, h0=10.0), "gradient": EXACT}
    solution = tm.solve(lambda t, y: -y, y0, [0.0, 10.0], **how, return_code=True)
    assert solution.stats.n_rejected > 0
    rescales = [event.change for event in solution.code.events if isinstance(event, Rescale)]
    assert rescales and max(max(change.bits) for change in rescales) <= 0


@pytest.mark.parametrize("order", ORDERS)
def test_an_adaptive_solve_passes_a_jump_of_the_slope(order):
    solver, controller = tm.ALF(order=order), tm.AdaptiveStep(1e-3, 1e-3)
    found, wanted, _ = ends(switches(0.55, 1.0, 1e6), torch.tensor([1.0]), [0.0, 1.0], solver, controller)
    assert abs(found - wanted) < 1e-2 * wanted


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("controller", [tm.FixedStep(0.1), tm.AdaptiveStep(1e-3, 1e-4)], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_slope_that_is_not_finite_is_an_error(value, controller, order):
    def func(t, y):
        return {"good": -y["good"], "bad": switches(0.55, 1.0, value)(t, y["bad"])}

    y0 = {"good": torch.ones(3, requires_grad=True), "bad": torch.ones(2)}
    with pytest.raises(tm.NonFiniteError):
        tm.solve(Guarded(func), y0, [0.0, 1.0], solver=tm.ALF(order=order), controller=controller, gradient=EXACT)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("explosion", [lambda t, y: y * y, lambda t, y: torch.exp(y)], ids=["y^2", "e^y"])
def test_adaptive_steps_end_at_a_blow_up(explosion, order):
    y0 = torch.tensor([1.0], requires_grad=True)  # the solutions end at t = 1 and 1 / e
    with pytest.raises((tm.NonFiniteError, tm.StepUnderflowError, tm.StepLimitError)) as error:
        controller = tm.AdaptiveStep(1e-3, 1e-4, max_steps=1000)
        tm.solve(Guarded(explosion), y0, [0.0, 2.0], solver=tm.ALF(order=order), controller=controller, gradient=EXACT)
    assert "t = " in str(error.value)


@pytest.mark.parametrize("size", [1e-50, 1e39])
def test_a_float64_leaf_keeps_its_range_beside_a_float32_one(size):
    y0 = (torch.ones(1, requires_grad=True), torch.tensor([size], dtype=torch.float64))
    got = tm.solve(lambda t, y: (y[0] * t, y[1] * t), y0, [0.0, 1.0], controller=tm.FixedStep(0.1), gradient=EXACT)
    narrow, wide = (y[-1].item() for y in got.y)
    assert wide / size == pytest.approx(narrow, rel=1e-6)


@pytest.mark.parametrize("exact", [True, "int64"])
def test_a_solution_that_decays_to_1e_35_is_followed(exact):
    """float32 goes down to 1e-38."""
    y = tm.solve(lambda t, y: -y, torch.ones(1), [0.0, 80.0], controller=tm.FixedStep(0.02), gradient=tm.MALI(exact)).y
    assert y[-1].item() == pytest.approx(math.exp(-80), rel=2e-2)


def test_an_element_that_stays_behind_where_others_grow_keeps_its_bits():
    """All begin at 1e-14; two of them are driven to 1 within a step, the others are not."""
    start = 1e-14 * torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    force = torch.tensor([[0.0, 1.3], [0.6, 0.0]], dtype=torch.float64)
    results = []
    for method in (tm.MALI(exact=True), tm.Naive()):
        y0, a = start.clone().requires_grad_(), torch.full((2, 2), 1.5, dtype=torch.float64, requires_grad=True)
        y = tm.solve(
            lambda t, y, a: a * y + force, y0, [0.0, 1.0], args=(a,), controller=tm.FixedStep(0.5), gradient=method
        ).y[-1]
        results.append([y.detach(), *torch.autograd.grad(y.sum(), [y0, a])])
    for found, truth in zip(*results, strict=True):
        torch.testing.assert_close(found, truth, rtol=1e-13, atol=0)
