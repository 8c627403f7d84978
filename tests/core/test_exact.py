"""MALI(exact=True): what was solved forward is rebuilt to the last bit, from the end alone, or an error says why not.

Equality here is equality of bits, without a tolerance. Where results are compared with plain floats, tolerances come
from float32: eps = 1.2e-7.
"""

from __future__ import annotations

import functools
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from exact_rebuild import ODES, WEIGHTS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import tanh_mlp
from torch import Tensor, nn

import torchmali as tm
from torchmali.field.evaluate import Field
from torchmali.gradients.mali import GUESSED_STEPS
from torchmali.measure import peak_bytes
from torchmali.state.base import Snapshot
from torchmali.state.fixed_point import PERIOD, FixedPoint, FixedPointArithmetic
from torchmali.tape import Rescale
from torchmali.tree import Structure

ORDERS = (2, 4, 6)
STEPS = {2: 200, 4: 50, 6: 30}  # enough that no problem here diverges
EXACT = tm.MALI(exact=True)
PLAIN = tm.MALI(checkpoint_every=None)


# 1. Rebuilding the start from the end.


class Solved(NamedTuple):
    """A finished forward pass, with the state it began from for comparison."""

    name: str
    start: Snapshot
    code: tm.Code
    stats: tm.Stats


@functools.cache
def solved(name: str, solver: tm.ALF, controller: tm.StepController, wide: bool = False) -> Solved:
    ode, exact = ODES[name], tm.MALI(exact="int64" if wide else True)
    y0 = ode.y0.float()
    how: Any = {"solver": solver, "controller": controller, "gradient": exact}
    solution = tm.solve(ode.f, y0, [*ode.span], **how, return_code=True)
    field = Field(ode.f, (y0,), Structure.of(y0), (), [])
    span = ode.span[1] - ode.span[0]
    n_steps = controller.n_steps([*ode.span])
    first = span / n_steps if n_steps else 0.0
    arithmetic = FixedPointArithmetic(PERIOD * span / (n_steps or GUESSED_STEPS), first, wide)
    start, _ = solver.start(field.as_in_backward, ode.span[0], (y0,), arithmetic)
    assert isinstance(start, FixedPoint)
    again = arithmetic.suited((y0,), start)
    if again is not None:
        start, _ = solver.start(field.as_in_backward, ode.span[0], (y0,), again)
    assert isinstance(start, FixedPoint)
    return Solved(name, start.snapshot(), solution.code, solution.stats)


def in_steps(name: str, n: int) -> tm.FixedStep:
    t0, t1 = ODES[name].span
    return tm.FixedStep((t1 - t0) / n)


def controllers(name: str, order: int) -> list[tm.StepController]:
    return [in_steps(name, STEPS[order]), tm.AdaptiveStep(1e-2 if order == 2 else 1e-3, 1e-5)]


CASES = [(name, order, controller) for name in ODES for order in ORDERS for controller in controllers(name, order)]


def case_id(value: Any) -> str | None:
    return type(value).__name__ if isinstance(value, tm.StepController) else None


def assert_same_bits(found: Snapshot, truth: Snapshot) -> None:
    assert found.form == truth.form  # exponents
    assert len(found.tensors) == len(truth.tensors) > 0
    for x, y in zip(found.tensors, truth.tensors, strict=True):
        assert not x.is_floating_point()
        assert torch.equal(x, y)


def assert_rebuilt(case: Solved) -> None:
    assert_same_bits(case.code.start(ODES[case.name].f).snapshot(), case.start)


@pytest.mark.parametrize(("name", "order", "controller"), CASES, ids=case_id)
def test_the_start_is_rebuilt_to_the_bit_from_the_end_and_the_tape(name, order, controller):
    assert_rebuilt(solved(name, tm.ALF(order=order), controller))


def test_refreshes_and_rescales_occur_in_these_solves():
    stats = {case: solved(case[0], tm.ALF(order=case[1]), case[2]).stats for case in CASES}
    for order in ORDERS:
        for adaptive in (False, True):
            these = [s for (_, p, controller), s in stats.items() if p == order and controller.adaptive == adaptive]
            assert sum(s.n_refreshes for s in these) > 0
            assert sum(s.n_rescales for s in these) > 0
            assert any(s.n_refreshes and s.n_rescales for s in these)
            assert not adaptive or any(s.n_rejected for s in these)


@pytest.mark.parametrize("refresh", ["never", 7])
@pytest.mark.parametrize("wide", [False, True])
def test_every_refresh_policy_is_rebuilt_to_the_bit_on_both_grids(refresh, wide):
    case = solved("oscillator", tm.ALF(refresh=refresh), in_steps("oscillator", 200), wide)
    assert case.stats.n_refreshes == (0 if refresh == "never" else 199 // refresh)
    assert_rebuilt(case)


@pytest.mark.parametrize("name", [pytest.param("van_der_pol", marks=pytest.mark.slow), "decay"])
def test_ten_thousand_steps_are_rebuilt_to_the_bit(name):
    case = solved(name, tm.ALF(), in_steps(name, 10_000))
    assert case.stats.n_steps == 10_000 and case.stats.n_refreshes > 0 and case.stats.n_rescales > 0
    assert_rebuilt(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ODES)
@pytest.mark.parametrize("order", ORDERS)
def test_ten_thousand_steps_of_every_order_are_rebuilt_to_the_bit(name, order):
    case = solved(name, tm.ALF(order=order), in_steps(name, 10_000))
    assert case.stats.n_steps == 10_000
    assert_rebuilt(case)


def test_another_process_that_never_saw_the_start_rebuilds_it(tmp_path):
    cases = [solved(name, tm.ALF(order=order), controller) for name, order, controller in CASES[::5]]
    cases += [solved(name, tm.ALF(), in_steps(name, 200), wide=True) for name in ("decay", "lorenz")]
    assert any(case.stats.n_refreshes and case.stats.n_rescales for case in cases)
    source, target = tmp_path / "ends", tmp_path / "starts"
    source.write_bytes(pickle.dumps([(case.name, case.code) for case in cases]))
    script = Path(__file__).parents[1] / "exact_rebuild.py"
    subprocess.run([sys.executable, str(script), str(source), str(target)], check=True)
    found = pickle.loads(target.read_bytes())
    for rebuilt, case in zip(found, cases, strict=True):
        assert_same_bits(rebuilt, case.start)


def test_what_is_kept_until_the_backward_pass_has_the_bytes_of_float32():
    for name, order, controller in CASES:
        case = solved(name, tm.ALF(order=order), controller)
        y0 = ODES[name].y0
        z_and_v = 2 * y0.float().nbytes
        # and a byte for each element of z and v where they are of several scales
        assert sum(x.nbytes for x in case.code.end.tensors) - z_and_v in (0, 2 * y0.numel())
        # Beside it v at each refresh, and three bytes at most for each element of z and v at each rescale.
        extra = sum(x.nbytes for snapshot in case.code.kept for x in snapshot.tensors)
        assert extra <= z_and_v / 2 * case.stats.n_refreshes + 3 * z_and_v / 4 * case.stats.n_rescales


def encoded(func: Any, y0: Any, args: tuple = (), **how: Any) -> tm.Solution:
    how = {"controller": tm.FixedStep(0.1), "gradient": EXACT} | how
    return tm.solve(func, y0, [0.0, 0.4, 1.0], **how, args=args, return_code=True)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_solve_back_gives_the_rounded_start_with_its_structure_and_arguments(requires_grad):
    a = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_(requires_grad)
    y0, w = {"a": a, "b": (torch.tensor(0.5),)}, torch.linspace(0.5, 1.5, 3).requires_grad_(requires_grad)

    def func(t, y, w):
        return {"a": torch.tanh(y["a"] * w) + y["b"][0], "b": (y["a"].mean() * t,)}

    solution = encoded(func, y0, args=(w,))
    assert solution.y["a"].requires_grad == requires_grad
    found = tm.solve_back(func, pickle.loads(pickle.dumps(solution.code)))
    for x, leaf in ((found["a"], a), (found["b"][0], y0["b"][0])):
        assert torch.equal(x, FixedPoint.of((leaf.detach(),)).point[0])
        assert (x - leaf).abs().max() <= 2.0**-26 * leaf.abs().max()
    if requires_grad:
        plain = encoded(func, y0, args=(w,))
        found, truth = (torch.autograd.grad(s.y["a"].sum(), [a, w]) for s in (solution, plain))
        assert all(map(torch.equal, found, truth))


def test_a_code_of_another_f_is_an_error():
    y0 = torch.linspace(-1, 1, 6)
    code = encoded(lambda t, y: torch.tanh(y), y0).code
    with pytest.raises(tm.NonRepeatableFieldError, match="not made with this f"):
        tm.solve_back(lambda t, y: 1.0001 * torch.tanh(y), code)


def test_the_way_back_leaves_no_trace_and_codes_hold_no_checkpoints():
    net = torch.nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
    y0 = torch.randn(4, 3)
    code = encoded(lambda t, y: net(y), y0, gradient=tm.MALI(exact=True, checkpoint_every=1)).code
    before = [x.clone() for x in net.buffers()]
    assert torch.equal(tm.solve_back(lambda t, y: net(y), code), FixedPoint.of((y0,)).point[0])
    assert all(map(torch.equal, before, net.buffers()))
    assert sum(x.nbytes for snapshot in code.kept for x in snapshot.tensors) < 10 * y0.nbytes  # with them: 20
    assert repr(code).startswith("Code(") and repr(code).endswith(" bytes, 10 steps of ALF())")


def test_a_code_needs_integers():
    with pytest.raises(
        tm.IncompatibleError, match=r"return_code=True needs .* gradient=MALI\(exact=True\), not ACA\(\)"
    ):
        encoded(lambda t, y: -y, torch.ones(2), gradient=tm.ACA())


# 2. The gradient of the stored trajectory.


def scaled_field(name: str) -> tuple[Any, list[Tensor]]:
    """f(t, y, *args) of a problem, and args to differentiate."""
    if name == "mlp":
        return tanh_mlp, [w.clone().requires_grad_() for w in WEIGHTS]
    f = ODES[name].f
    return lambda t, y, rate: rate * f(t, y), [torch.tensor(1.0, requires_grad=True)]


def gradients(name: str, solver: tm.ALF, controller: tm.StepController, method: tm.GradientMethod, shares=(0, 0.3, 1)):
    """dL/d(y0, args, t) of a loss that looks at every output."""
    ode, (func, args) = ODES[name], scaled_field(name)
    y0 = ode.y0.float().requires_grad_()
    t = torch.tensor([ode.span[0] + share * (ode.span[1] - ode.span[0]) for share in shares], requires_grad=True)
    got = tm.solve(func, y0, t, solver=solver, controller=controller, gradient=method, args=tuple(args))
    weights = torch.arange(1.0, 1.0 + len(t)).reshape(-1, *[1] * y0.ndim)
    return torch.autograd.grad((weights * got.y**2).sum(), [y0, *args, t]), got.stats


GRADIENT_CASES = [
    ("mlp", 2, 60), ("mlp", 4, None), ("oscillator", 6, None), ("toy", 4, 10), ("decay", 2, 150), ("decay", 4, None),
    ("growth", 2, None), ("growth", 6, 6), ("van_der_pol", 2, 150), ("van_der_pol", 4, None), ("lorenz", 2, 300),
    ("lorenz", 6, 40),
]  # fmt: skip


@pytest.mark.parametrize(("name", "order", "n"), GRADIENT_CASES)
@pytest.mark.parametrize("exact", [True, "int64"])
def test_the_gradient_equals_that_of_the_stored_trajectory(name, order, n, exact):
    solver, controller = tm.ALF(order=order), in_steps(name, n) if n else tm.AdaptiveStep(1e-2, 1e-4)
    grads, stats = gradients(name, solver, controller, tm.MALI(exact=exact))
    stored, kept = gradients(name, solver, controller, tm.MALI(exact=exact, checkpoint_every=1))
    assert (stats.n_checkpoints, kept.n_checkpoints) == (0, kept.n_steps)
    assert stats.n_steps == kept.n_steps and stats.reconstruction_error == 0.0
    for g, wanted in zip(grads, stored, strict=True):
        assert g.isfinite().all() and g.any()
        assert torch.equal(g, wanted)


@pytest.mark.parametrize("every", [7, 10_000])
@pytest.mark.parametrize("memory", [None, "300B"])
def test_checkpoints_change_nothing_of_an_exact_gradient(every, memory):
    solver, controller = tm.ALF(), in_steps("van_der_pol", 100)
    method = tm.MALI(exact=True, memory=memory) if memory else tm.MALI(exact=True, checkpoint_every=every)
    wanted, _ = gradients("van_der_pol", solver, controller, EXACT)
    for g, w in zip(gradients("van_der_pol", solver, controller, method)[0], wanted, strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["mlp", "toy", "growth"])
def test_the_gradient_is_that_of_plain_autograd_up_to_float32(name, order):
    """The only difference is rounding: of each step to the grid here, to float32 there."""
    solver, controller = tm.ALF(order=order), in_steps(name, STEPS[order])
    grads, _ = gradients(name, solver, controller, EXACT)
    wanted, _ = gradients(name, solver, controller, tm.Naive())
    for g, w in zip(grads, wanted, strict=True):
        assert (g - w).norm() < 1e-4 * w.norm()  # growth multiplies a rounding error by e^10


@pytest.mark.parametrize("order", [4, 6])
def test_a_refresh_where_the_grid_becomes_coarser_is_walked_back(order):
    """With adaptive steps of order 4 and 6 a refresh takes f from the step's error estimate."""
    y0 = torch.linspace(-1.0, 1.0, 2000).reshape(100, 20).requires_grad_()
    solver, controller = tm.ALF(order=order, refresh=1), tm.AdaptiveStep(1e-4, 1e-6)
    got = tm.solve(lambda t, y: y, y0, [0.0, 5.0], solver=solver, controller=controller, gradient=EXACT)
    assert got.stats.n_refreshes > 0 and got.stats.n_rescales > 0
    got.y[-1].sum().backward()
    assert got.stats.reconstruction_error == 0.0


def test_the_way_back_keeps_nothing_of_the_steps_it_has_passed():
    y0 = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)

    def run(n_steps):
        y = y0.clone().requires_grad_()
        got = tm.solve(torch.mul, y, [0.5, 1.0], controller=tm.FixedStep(0.5 / n_steps), gradient=EXACT)
        got.y[-1].sum().backward()

    # Within a few numbers that are read from time to time; a step kept would be 96 bytes.
    assert abs(peak_bytes(lambda: run(200)) - peak_bytes(lambda: run(40))) < 24


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


# 3. Any field, any state.


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float
    is_zero: bool  # at the start

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Spec(NamedTuple):
    """A random problem."""

    leaves: list[Leaf]
    container: type
    kind: str
    rate: float
    seed: int
    times: list[float]
    solver: tm.ALF
    controller: tm.StepController
    exact: bool | str

    def y0(self) -> Any:
        random = torch.Generator().manual_seed(self.seed)
        values = [
            (leaf.scale * (0 if leaf.is_zero else 1) * torch.randn(leaf.shape, generator=random, dtype=torch.float64))
            .to(leaf.dtype)
            .requires_grad_()
            for leaf in self.leaves
        ]
        return self.tree(values)

    def tree(self, values: list) -> Any:
        if self.container is dict:
            return {f"leaf{i}": x for i, x in enumerate(values)}
        return tuple(values) if self.container is tuple else values[0]

    def values(self, tree: Any) -> list:
        return list(tree.values()) if self.container is dict else list(tree) if self.container is tuple else [tree]

    def matrix(self) -> Tensor:
        n = sum(leaf.size for leaf in self.leaves)
        random = torch.Generator().manual_seed(self.seed + 1)
        return self.rate / math.sqrt(n) * torch.randn(n, n, generator=random, dtype=torch.float64)

    def func(self, t: Tensor, y: Any, a: Tensor) -> Any:
        leaves = list(zip(self.values(y), self.leaves, strict=True))
        x = torch.cat([value.double().flatten() / leaf.scale for value, leaf in leaves])
        if self.kind == "tanh":
            u = a @ torch.tanh(x + t.double())
        elif self.kind == "forced":
            u = a @ x * torch.cos(3 * t.double()) + a[0]
        else:
            u = a @ x
        parts = torch.split(u, [leaf.size for leaf in self.leaves])
        return self.tree(
            [
                (leaf.scale * part).reshape(leaf.shape).to(leaf.dtype)
                for part, leaf in zip(parts, self.leaves, strict=True)
            ]
        )


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda x: 10.0**x)


@st.composite
def specs(draw) -> Spec:
    dtypes = draw(st.sampled_from([(torch.float32,), (torch.float64,), (torch.float32, torch.float64)]))
    leaf = st.builds(
        Leaf,
        st.sampled_from([(), (1,), (4,), (2, 3), (2, 1, 3), (0,), (3, 0)]),
        st.sampled_from(dtypes),
        st.one_of(st.just(1.0), powers(-6, 6)),
        st.sampled_from([False, False, False, True]),
    )
    container = draw(st.sampled_from([Tensor, tuple, dict]))
    leaves = draw(st.lists(leaf, min_size=1, max_size=1 if container is Tensor else 3))
    assume(any(leaf.size for leaf in leaves))
    order = draw(st.sampled_from(ORDERS))
    span = draw(powers(-2, 1))
    if draw(st.booleans()):
        controller = tm.FixedStep(span / draw(st.integers(1, 60 // order)))
    else:
        rtol = draw(powers(-4, -1))
        h0 = draw(st.sampled_from([None, None, span]))
        controller = tm.AdaptiveStep(rtol, rtol * draw(powers(-6, 0)), h0=h0, max_steps=100)
    shares = [0.0, *draw(st.sampled_from([[], [0.5], [0.01, 0.77]])), 1.0]
    t0, sign = draw(st.sampled_from([0.0, -3.0, 100.0])), draw(st.sampled_from([1, -1]))
    return Spec(
        leaves,
        container,
        draw(st.sampled_from(["tanh", "linear", "forced"])),
        draw(powers(-2, 1.5)),
        draw(st.integers(0, 999)),
        [t0 + sign * span * share for share in shares],
        tm.ALF(order=order, refresh=draw(st.sampled_from(["auto", "never", 1, 3]))),
        controller,
        draw(st.sampled_from([True, "int64"])),
    )


class Guarded:
    """A field that notices when a solve does not end."""

    def __init__(self, func: Any, most: int = 20_000):
        self.func, self.left = func, most

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        assert self.left >= 0, "an endless solve"
        return self.func(*args)


def outcome(spec: Spec, method: tm.MALI) -> tuple[str, list[Tensor]]:
    """How a solve and its backward pass went, and the solution and all gradients."""
    y0, a = spec.y0(), spec.matrix().requires_grad_()
    t = torch.tensor(spec.times, dtype=torch.float64, requires_grad=True)
    try:
        got = tm.solve(
            Guarded(spec.func), y0, t, solver=spec.solver, controller=spec.controller, gradient=method, args=(a,)
        )
    except (tm.NonFiniteError, tm.StepLimitError, tm.StepUnderflowError) as error:
        return type(error).__name__, []
    ys, inputs = spec.values(got.y), [*spec.values(y0), a, t]
    loss = torch.stack([(torch.tanh(y.double() / leaf.scale)).sum() for y, leaf in zip(ys, spec.leaves, strict=True)])
    grads = torch.autograd.grad(loss.sum(), inputs)
    assert got.stats.reconstruction_error == 0.0
    return "rebuilt", [*ys, *grads]


@pytest.mark.parametrize("n", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_any_solve_is_rebuilt_to_the_bit_or_refused_with_a_reason(n):
    ends = []

    @settings(max_examples=n, deadline=None, derandomize=True)
    @given(specs())
    def holds(spec):
        end, found = outcome(spec, tm.MALI(exact=spec.exact))
        ends.append(end)
        stored_end, stored = outcome(spec, tm.MALI(exact=spec.exact, checkpoint_every=1))
        assert stored_end == end
        for x, y in zip(found, stored, strict=True):
            assert torch.equal(x.nan_to_num(), y.nan_to_num()) and torch.equal(x.isnan(), y.isnan())

    holds()
    assert ends.count("rebuilt") > len(ends) / 2


# 4. Numbers that leave their range.


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


# 5. Leaves that mix scales.

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
@pytest.mark.parametrize("controller", [tm.FixedStep(0.02), tm.AdaptiveStep(1e-4, 1e-7)], ids=["fixed", "adaptive"])
def test_a_leaf_that_mixes_scales_is_followed_as_floats_do(layout, dtype, controller):
    """In units of each component's own scale, against finer arithmetic on the same steps where there is one."""
    solver = tm.ALF(order=4)
    exact, exact_grads, stats = mixed_solve(layout, dtype, EXACT, solver, controller)
    plain, plain_grads, _ = mixed_solve(layout, dtype, PLAIN, solver, controller)
    assert stats.reconstruction_error == 0.0
    eps = torch.finfo(dtype).eps
    assert (exact - plain).abs().max() < 100 * eps  # 13 evaluations in each of 150 steps
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


# 6. Fields that are other functions in training, or without gradients.


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 4))
        self.is_noisy = False
        self.noise = torch.Generator().manual_seed(0)  # its own: nobody can know of it

    def forward(self, t, y):
        noise = torch.randn(y.shape, generator=self.noise) if self.is_noisy else 0.0
        return self.net(y) + noise


def backward(module: nn.Module, y0: Tensor, **how: Any) -> tm.Stats:
    y = y0.clone().requires_grad_()
    got = tm.solve(module, y, [0.0, 1.0], gradient=EXACT, **how)
    (got.y[-1] ** 2).sum().backward()
    assert y.grad is not None and y.grad.any()
    return got.stats


@pytest.mark.filterwarnings("ignore:f contracts too much")  # noise may look like that
@pytest.mark.parametrize("order", ORDERS)
def test_dropout_is_repeated_and_other_noise_refused(order):
    module, y0 = Dropping(), torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
    how: dict[str, Any] = {"solver": tm.ALF(order=order), "controller": tm.FixedStep(0.2)}
    assert backward(module.train(), y0, **how).reconstruction_error == 0.0
    assert backward(module.eval(), y0, **how).reconstruction_error == 0.0
    module.is_noisy = True
    with pytest.raises(tm.NonRepeatableFieldError, match="noise drawn inside f"):
        backward(module, y0, **how)


class Attending(nn.Module):
    """In evaluation and without gradients, PyTorch takes another path through the layer, with other bits."""

    def __init__(self, is_trainable: bool):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.requires_grad_(is_trainable).eval()

    def forward(self, t, y):
        return self.layer(y) * torch.cos(t)


@pytest.mark.parametrize("is_trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("controller", [tm.FixedStep(0.1), tm.AdaptiveStep(1e-2, 1e-3)], ids=["fixed", "adaptive"])
def test_a_transformer_layer_is_walked_back_to_the_bit(controller, is_trainable):
    module, y0 = Attending(is_trainable), torch.linspace(-1.0, 1.0, 160).sin().reshape(2, 5, 16)
    assert backward(module, y0, controller=controller).reconstruction_error == 0.0


def test_equal_bits_at_the_start_alone_do_not_choose_the_path():
    """Two rows of two numbers: bits of another path may agree by chance, and part later."""
    for seed in range(20):
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(2, 1, 4, batch_first=True).double().eval()
        y0 = torch.randn(1, 2, 2, dtype=torch.float64, requires_grad=True)
        got = tm.solve(lambda t, y, layer=layer: layer(y), y0, [0.0, 1.0], controller=tm.FixedStep(0.1), gradient=EXACT)
        torch.autograd.grad(got.y[-1].sum(), y0)
        assert got.stats.reconstruction_error == 0.0


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_forward_pass_records_no_graph_where_bits_do_not_depend_on_it(p):
    net, seen = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 4)), []

    def f(t, y):
        seen.append(torch.is_grad_enabled())
        return net(y)

    tm.solve(f, torch.randn(3, 4, requires_grad=True), [0.0, 1.0], controller=tm.FixedStep(0.1), gradient=EXACT)
    assert seen == [True] + [False] * 11


def test_the_transformer_layer_above_has_another_path_without_gradients():
    module, t = Attending(is_trainable=True), torch.tensor(0.0)
    y0 = torch.linspace(-1.0, 1.0, 160).sin().reshape(2, 5, 16)
    with torch.no_grad():
        fast = module(t, y0)
    assert not torch.equal(fast, module(t, y0))


# 7. Accuracy.

FINE = {2: 1000, 4: 200, 6: 100}  # so many steps that orders 4 and 6 show round-off rather than truncation


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ODES)
def test_exact_solves_are_as_accurate_as_plain_float32(name, order):
    """Within a factor of 4, which is the luck of three solves: mostly they are more accurate (3 bits more)."""
    ode = ODES[name]
    truth = ode.reference() if ode.exact is None else ode.at(ode.span[1])

    def error(method):
        errors = []
        for n in (FINE[order], FINE[order] * 11 // 10, FINE[order] * 13 // 10):
            how = {"solver": tm.ALF(order=order), "controller": in_steps(name, n), "gradient": method}
            y = tm.solve(ode.f, ode.y0.float(), ode.span, **how).y[-1]
            errors.append(float((y.double() - truth).norm() / truth.norm()))
        return sum(errors) / len(errors)

    assert error(EXACT) <= 4 * max(error(PLAIN), 5e-7)


# 8. What cannot be lifted to integers.


@pytest.mark.parametrize("solver", [tm.ALF(eta=0.9), tm.Reversible(tm.RK4())], ids=repr)
@pytest.mark.parametrize("exact", [True, "int64"])
def test_solvers_that_do_not_lift_to_integers_are_refused(solver, exact):
    with pytest.raises(tm.IncompatibleError, match="ALF without damping") as error:
        controller = tm.FixedStep(0.1)
        tm.solve(
            lambda t, y: -y, torch.ones(2), [0.0, 1.0], solver=solver, controller=controller, gradient=tm.MALI(exact)
        )
    assert repr(solver) in str(error.value)


def test_a_solver_without_an_inverse_is_refused_as_for_plain_mali():
    with pytest.raises(tm.IncompatibleError, match="needs a solver with an inverse, but Dopri5 has none"):
        tm.solve(lambda t, y: -y, torch.ones(2), [0.0, 1.0], solver=tm.Dopri5(), gradient=EXACT)


@pytest.mark.parametrize("exact", ["int32", 64, None])
def test_exact_is_false_true_or_int64(exact):
    with pytest.raises(tm.InvalidOptionError, match='False, True or "int64"'):
        tm.MALI(exact=exact)


@pytest.mark.parametrize("first", [1e-2, 1e-3])
def test_an_element_that_begins_to_move_beside_another_has_its_bits_at_the_first_output(first):
    how = lambda t, y: torch.sin(t) + 0 * y, [1.0, 0.0], [0.0, first, 0.5, 1.0], tm.ALF(), tm.FixedStep(0.5)  # noqa: E731
    found, wanted = (first_output(*how, method) for method in (EXACT, tm.Naive()))
    assert ((found - wanted).abs() <= 4 * 2.0**-23 * wanted.abs()).all()
