"""Step-size control: which steps are taken, which attempts count, and what accuracy comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torchdiffeq
from problems import (
    BENIGN,
    CLOSED_FORM,
    DECAY,
    FORCED,
    GROWTH,
    LOGISTIC,
    LORENZ,
    MLP,
    ODE,
    OSCILLATOR,
    TOY,
    VAN_DER_POL,
    linear,
    scaled_error,
)
from scipy.integrate import solve_ivp
from torch import Tensor

import torchmali as tm
from torchmali import (
    ACA,
    ALF,
    RK4,
    AdaptiveStep,
    Bosh3,
    Dopri5,
    Dopri8,
    FixedStep,
    Heun,
    HeunEuler,
    InvalidOptionError,
    Naive,
    Reversible,
    Solution,
    Tsit5,
    rms_norm,
    solve,
)
from torchmali.solvers.base import Attempt, Solver
from torchmali.state.floats import Floats
from torchmali.torchdiffeq import SOLVERS

ADAPTIVE = [solver for solver in SOLVERS.values() if solver.error_order is not None]
# Of one sign, or of many components: |y| is never much smaller than it was at the ends of a step,
# which is what the controller scales its errors with.
SMOOTH = [MLP, TOY, LOGISTIC, FORCED]


class Recorder:
    """f that remembers the times at which it was evaluated."""

    def __init__(self, f: Callable[[Tensor, Tensor], Tensor] = lambda t, y: torch.ones_like(y)):
        self.f, self.times = f, []

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        self.times.append(t.item())
        return self.f(t, y)


def run(ode: ODE, solver: Solver, rtol: float, times: Any = None, **options) -> Solution:
    """Solve with atol = rtol / 10, the tolerance that scaled_error is told below."""
    controller = AdaptiveStep(rtol, rtol / 10, **options)
    times = ode.span if times is None else times
    return solve(ode.f, ode.y0, times, solver=solver, controller=controller, gradient=ACA())


def worst_error(ode: ODE, solution: Solution, times: list[float], rtol: float) -> float:
    """The error of the worst output, in tolerances."""
    pairs = zip(solution.y, ode.reference(times), strict=True)
    return max(scaled_error(y, y_ref, rtol, rtol / 10) for y, y_ref in pairs)


def allowed(solver: Solver) -> float:
    """How many tolerances the error may be away: it adds up over the steps, and ALF is only of the
    order of its error estimate.
    """
    return 30 if isinstance(solver, ALF) else 10


@pytest.mark.parametrize("ode", CLOSED_FORM, ids=repr)
def test_scipys_reference_agrees_with_the_closed_form(ode):
    times = ode.times(7)
    exact = torch.stack([ode.at(t) for t in times])
    torch.testing.assert_close(ode.reference(times), exact, rtol=1e-10, atol=1e-12)


def heun_steps(times: list[float], h: float) -> list[tuple[float, float]]:
    """The steps that FixedStep(h) takes, seen from inside f: Heun evaluates at their two ends."""
    f = Recorder()
    solution = solve(f, torch.zeros(1).double(), times, solver=Heun(), controller=FixedStep(h), gradient=ACA())
    steps = list(zip(f.times[::2], f.times[1::2], strict=True))
    assert len(steps) == solution.stats.n_steps
    # dy/dt = 1 measures the time that the steps really cover, at every output.
    torch.testing.assert_close(solution.y[:, 0] + times[0], torch.tensor(times, dtype=torch.float64))
    return steps


@pytest.mark.parametrize(
    "times, h, n_steps",
    [
        ([0.0, 1.0], 0.1, 10),
        ([0.0, 0.3], 0.1, 3),  # .3 / .1 rounds to less than 3
        ([0.0, 3 * 0.1], 0.1, 3),  # 3 * .1 / .1 rounds to more than 3
        ([0.0, 1.0], 0.15, 7),
        ([0.0, 1.0], 2.0, 1),
        ([1.0, 0.0], 0.1, 10),
        ([1.0, 0.0], 0.15, 7),
        ([0.0, 0.25, 1.0], 0.1, 3 + 8),
        ([0.5, 0.25, -1.0], 0.2, 2 + 7),
        ([0.0, 0.3, 1.0, 1.5], math.inf, 3),
    ],
)
def test_fixed_steps_cover_each_interval_in_as_few_steps_as_fit(times, h, n_steps):
    steps = heun_steps(times, h)
    assert len(steps) == n_steps
    starts, ends = zip(*steps, strict=True)
    assert (starts[0], ends[-1]) == (times[0], times[-1])  # exactly: 1, not 1.05
    assert starts[1:] == ends[:-1]
    assert set(times[1:]) <= set(ends)  # outputs are landed on, not interpolated
    sizes = [abs(b - a) for a, b in steps]
    assert max(sizes) <= h * (1 + 1e-12)
    shortened = [s for s, end in zip(sizes, ends, strict=True) if s < 0.999 * h]
    assert len(shortened) < len(times)  # at most the last one of each interval


def test_fixed_steps_do_not_add_up_their_rounding():
    ends = [end for _, end in heun_steps([0.5, 100.5], 0.1)]
    assert ends == [0.5 + i * 0.1 for i in range(1, 1000)] + [100.5]


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=repr)
def test_fixed_steps_back_in_time_retrace_the_solution(solver):
    """The two errors do not cancel, but both are small: 1e-2 for Euler, the worst."""
    ode = FORCED.until(1.0)
    back = solve(ode.f, ode.at(1.0), (1.0, 0.0), solver=solver, controller=FixedStep(0.01), gradient=ACA())
    torch.testing.assert_close(back.y[-1], ode.y0, rtol=1e-2, atol=0)


def test_fixed_steps_report_their_sizes():
    solution = solve(DECAY.f, DECAY.y0, (0, 1), controller=FixedStep(0.15))
    assert solution.stats.h_max == pytest.approx(0.15)
    assert solution.stats.h_min == pytest.approx(0.1)


TOLERANCES = [
    (solver, rtol) for solver in ADAPTIVE for rtol in ((1e-3, 1e-5) if isinstance(solver, ALF) else (1e-3, 1e-6, 1e-9))
]


def within_reach(ode: ODE, solver: Solver, rtol: float) -> ODE:
    """HeunEuler at 1e-9 takes steps of about sqrt(1e-9), some 20 000 in a unit of time: a short time has to do."""
    too_long = isinstance(solver, HeunEuler) and rtol < 1e-6
    return ode.until(ode.span[1] / 100) if too_long else ode


@pytest.mark.parametrize("ode", BENIGN, ids=repr)
@pytest.mark.parametrize("solver, rtol", TOLERANCES, ids=repr)
def test_adaptive_solution_ends_within_ten_tolerances_of_scipys(ode, solver, rtol):
    ode = within_reach(ode, solver, rtol)
    solution = run(ode, solver, rtol)
    assert scaled_error(solution.y[-1], ode.reference(), rtol, rtol / 10) < allowed(solver)


@pytest.mark.parametrize("solver, rtol", [pair for pair in TOLERANCES if not isinstance(pair[0], ALF)], ids=repr)
def test_adaptive_runge_kutta_ends_within_ten_tolerances_of_scipys_on_van_der_pol(solver, rtol):
    """Contracts too much for ALF. Up to 5: at 10 and rtol 1e-3, Dopri5 is 10.4 tolerances off, as SciPy's RK45 is."""
    ode = within_reach(VAN_DER_POL.until(5.0), solver, rtol)
    solution = run(ode, solver, rtol, max_steps=100_000)
    assert scaled_error(solution.y[-1], ode.reference(), rtol, rtol / 10) < allowed(solver)


@pytest.mark.parametrize("solver", ADAPTIVE, ids=repr)
def test_a_tighter_tolerance_gives_a_smaller_error(solver):
    errors = [
        torch.dist(run(LOGISTIC, solver, rtol).y[-1], LOGISTIC.at(LOGISTIC.span[1])).item() for rtol in (1e-3, 1e-6)
    ]
    assert errors[0] > 50 * errors[1]  # ALF(order=4) follows tol^(4/6): 100 times


@pytest.mark.parametrize("ode", SMOOTH, ids=repr)
@pytest.mark.parametrize("solver, rtol", TOLERANCES, ids=repr)
def test_each_of_a_hundred_outputs_is_within_ten_tolerances_of_scipys(ode, solver, rtol):
    """Read from interpolants, or landed on (ALF, Dopri8)."""
    ode = within_reach(ode, solver, rtol)
    times = ode.times(100)
    solution = run(ode, solver, rtol, times)
    assert worst_error(ode, solution, times, rtol) < allowed(solver)


@pytest.mark.parametrize("solver", ADAPTIVE, ids=repr)
@pytest.mark.parametrize("ode", [LOGISTIC, FORCED], ids=repr)
def test_adaptive_steps_back_in_time_retrace_the_solution(ode, solver):
    ode, rtol = ode.until(1.0), 1e-5
    times = ode.times(8)[::-1]
    back = solve(ode.f, ode.at(1.0), times, solver=solver, controller=AdaptiveStep(rtol, rtol / 10), gradient=ACA())
    for y, t in zip(back.y, times, strict=True):
        assert scaled_error(y, ode.at(t), rtol, rtol / 10) < allowed(solver)


@pytest.mark.parametrize("rtol", [1e-3, 1e-6])
@pytest.mark.parametrize("solver", ADAPTIVE, ids=repr)
def test_the_last_step_is_checked_too(solver, rtol):
    """The reference code takes y' = -5 y over [0, 1] in the one unchecked step h0 = 1: error 8.5."""
    ode = linear("fast decay", -5.0, torch.ones(1).double(), 1.0)
    # Bosh3's estimate for y' = lambda y is (h lambda)^3 (1 + h lambda) / 48. After h0 = 1 is rejected, h = .2 makes it
    # zero by accident, and the step is accepted with an error of 1e4 tolerances (by SciPy's RK23, too).
    h0 = 0.9 if isinstance(solver, Bosh3) else 1.0
    solution = run(ode, solver, rtol, h0=h0)
    assert solution.stats.n_rejected >= 1
    assert scaled_error(solution.y[-1], ode.at(ode.span[1]), rtol, rtol / 10) < allowed(solver)


@pytest.mark.parametrize("solver, fresh", [(ALF(), 1), (Bosh3(), 3), (Dopri5(), 6), (Tsit5(), 6)], ids=str)
@pytest.mark.parametrize("h0", [None, 0.5])
@pytest.mark.parametrize("ode", [MLP, FORCED, LOGISTIC], ids=repr)
def test_adaptive_steps_evaluate_f_as_often_as_they_must(solver, fresh, h0, ode):
    """FSAL solvers get the first stage from the step before, accepted or not; one evaluation for
    the start, one more for choosing the first step; ALF one for each refresh.
    """
    f = Recorder(ode.f)
    stats = solve(f, ode.y0, ode.span, solver=solver, controller=AdaptiveStep(1e-4, 1e-5, h0=h0), gradient=ACA()).stats
    attempts = stats.n_steps + stats.n_rejected
    assert stats.n_evals_forward == len(f.times) == fresh * attempts + stats.n_refreshes + 1 + (h0 is None)


@pytest.mark.parametrize("solver, stages", [(HeunEuler(), 2), (Dopri8(), 13)], ids=str)
@pytest.mark.parametrize("h0", [None, 0.001])
def test_solvers_without_fsal_evaluate_every_stage_of_a_step(solver, stages, h0):
    stats = run(TOY, solver, 1e-4, h0=h0).stats
    assert stats.n_rejected == 0
    assert stats.n_evals_forward == stages * stats.n_steps + (h0 is None)


@pytest.mark.parametrize("solver, stages", [(HeunEuler(), 2), (Dopri8(), 13)], ids=str)
def test_a_rejected_attempt_does_not_evaluate_its_first_stage_again(solver, stages):
    stats = run(VAN_DER_POL.until(3.0), solver, 1e-4, h0=1.0).stats
    assert stats.n_rejected >= 1
    assert stats.n_evals_forward == stages * stats.n_steps + (stages - 1) * stats.n_rejected


def test_rejected_attempts_are_counted():
    f = Recorder(DECAY.f)
    controller = AdaptiveStep(1e-6, 1e-7, h0=1.0)
    stats = solve(f, DECAY.y0, (0, 1), solver=Dopri5(), controller=controller, gradient=ACA()).stats
    # Dopri5 ends each attempt at its t1; stages 1/5, 3/10, 4/5, 8/9, 1 and the end slope.
    n_attempts = (len(f.times) - 1) // 6
    assert stats.n_rejected >= 1
    assert stats.n_steps + stats.n_rejected == n_attempts


@pytest.mark.parametrize("rtol", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("ode", [*BENIGN, VAN_DER_POL, LORENZ.until(2.0)], ids=repr)
@pytest.mark.parametrize("solver, method", [(Bosh3(), "RK23"), (Dopri5(), "RK45")], ids=str)
def test_no_more_evaluations_than_scipy_needs(solver, method, ode, rtol):
    if isinstance(solver, Bosh3) and rtol < 1e-6:
        ode = ode.until(ode.span[1] / 5)  # thousands of steps otherwise, all alike
    y0 = ode.y0.numpy().ravel()
    theirs = solve_ivp(ode.flat_rhs, ode.span, y0, method=method, rtol=rtol, atol=rtol / 10).nfev
    assert run(ode, solver, rtol).stats.n_evals_forward <= 1.3 * theirs


@pytest.mark.parametrize("rtol", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("ode", SMOOTH, ids=repr)
def test_a_hundred_outputs_cost_no_more_evaluations_than_torchdiffeq_needs(ode, rtol):
    """Both read them from the interpolant: the outputs themselves are free."""
    times = ode.times(100)
    theirs = Recorder(ode.f)
    torchdiffeq.odeint(
        theirs, ode.y0, torch.tensor(times, dtype=torch.float64), rtol=rtol, atol=rtol / 10, method="dopri5"
    )
    ours = run(ode, Dopri5(), rtol, times).stats.n_evals_forward
    assert ours <= 1.2 * len(theirs.times)
    assert ours == run(ode, Dopri5(), rtol).stats.n_evals_forward


def test_outputs_lie_inside_the_steps_of_dopri5_unless_it_is_told_to_land():
    times = MLP.times(11)
    free, landing = Recorder(MLP.f), Recorder(MLP.f)
    for f, land in ((free, False), (landing, True)):
        controller = AdaptiveStep(1e-3, 1e-4, land=land)
        solve(f, MLP.y0, times, solver=Dopri5(), controller=controller, gradient=ACA())
    assert not set(times[1:-1]) & set(free.times)
    assert set(times) <= set(landing.times)


@pytest.mark.parametrize("solver", [HeunEuler(), Bosh3(), Dopri5(), Tsit5()], ids=repr)
def test_landing_and_interpolating_agree(solver):
    times, rtol = MLP.times(21), 1e-4
    for land in (False, True):
        solution = run(MLP, solver, rtol, times, land=land)
        assert worst_error(MLP, solution, times, rtol) < 10
        assert (solution.stats.n_steps >= 20) or not land


@pytest.mark.parametrize("t_end, n_steps", [(1.0, 10), (2.0, 20), (0.95, 10), (1.0005, 11)])
def test_no_step_is_longer_than_h_max(t_end, n_steps):
    """1.0005: not even the last one, in order not to leave a sliver. 1.0: ten times .1 adds up to less than 1, and yet
    rounding is no reason for an eleventh step.
    """
    stats = run(TOY.until(t_end), Dopri5(), 1e-3, h0=0.5, h_max=0.1).stats
    assert stats.h_max <= 0.1 * (1 + 1e-9)
    assert stats.n_steps == n_steps


def test_the_first_step_that_is_chosen_is_no_longer_than_h_max():
    assert run(TOY, Dopri5(), 1e-3).stats.h_min > 0.1
    assert run(TOY, Dopri5(), 1e-3, h_max=0.1).stats.h_max <= 0.1 * (1 + 1e-9)


def test_first_step_is_h0():
    f = Recorder(TOY.f)
    controller = AdaptiveStep(1e-3, 1e-4, h0=0.01)
    solve(f, TOY.y0, TOY.span, solver=HeunEuler(), controller=controller, gradient=ACA())
    assert f.times[:2] == [0.0, 0.01]


@pytest.mark.parametrize("ode", [MLP, DECAY, GROWTH, OSCILLATOR], ids=repr)
@pytest.mark.parametrize("solver", ADAPTIVE, ids=repr)
def test_the_first_step_that_is_chosen_is_neither_too_long_nor_tiny(solver, ode):
    """Hairer's rule aims at 1 % of the tolerance: at most a factor (1/100)^(1/q) below what fits, and 100 leaves room
    for a short last step. One attempt may still be rejected, later on.
    """
    stats = run(ode.until(ode.span[1] / 10), solver, 1e-4).stats
    assert stats.n_rejected <= 1
    assert stats.h_min >= stats.h_max / 100


def wild(t: Tensor, y: Tensor) -> Tensor:
    """Needs hundreds of steps where the tame leaf needs a few."""
    return 50 * torch.cos(50 * t) * torch.ones_like(y)


TAME_Y0, WILD_Y0 = LOGISTIC.y0, torch.zeros(2, dtype=torch.float64)


def pair(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return LOGISTIC.f(t, y[0]), wild(t, y[1])


def named_pair(t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"wild": wild(t, y["wild"]), "tame": LOGISTIC.f(t, y["tame"])}


@pytest.mark.parametrize("solver", ADAPTIVE, ids=repr)
def test_a_leaf_with_an_infinite_tolerance_does_not_influence_the_steps(solver):
    alone = run(LOGISTIC, solver, 1e-3).stats
    for rtol, atol in (((1e-3, math.inf), 1e-4), (1e-3, (1e-4, math.inf))):
        both = solve(
            pair, (TAME_Y0, WILD_Y0), LOGISTIC.span, solver=solver, controller=AdaptiveStep(rtol, atol), gradient=ACA()
        ).stats
        assert both == alone


def test_tolerances_may_differ_from_leaf_to_leaf_and_follow_the_structure_of_y0():
    y0 = {"tame": TAME_Y0, "wild": WILD_Y0}
    steps = []
    for wild_tolerance in (1e-3, 1e-8):
        tolerance = {"wild": wild_tolerance, "tame": 1e-2}  # in another order than y0
        solution = solve(
            named_pair, y0, (0.0, 1.0), solver=Dopri5(), controller=AdaptiveStep(tolerance, tolerance), gradient=ACA()
        )
        error = (solution.y["wild"][-1] - math.sin(50)).abs().max().item()
        assert error < 10 * wild_tolerance
        steps.append(solution.stats.n_steps)
    assert steps[1] > 3 * steps[0]


def test_a_custom_norm_decides_what_counts():
    shapes = []

    def tame_alone(error: tuple[Tensor, ...]) -> Tensor:
        shapes.append([x.shape for x in error])
        return rms_norm(error[:1])

    controller = AdaptiveStep(1e-3, 1e-4, norm=tame_alone)
    stats = solve(pair, (TAME_Y0, WILD_Y0), LOGISTIC.span, solver=Dopri5(), controller=controller, gradient=ACA()).stats
    assert stats == run(LOGISTIC, Dopri5(), 1e-3).stats
    assert all(shape == [TAME_Y0.shape, WILD_Y0.shape] for shape in shapes)


def test_a_maximum_norm_takes_no_larger_steps_than_the_mean():
    def maximum(error: tuple[Tensor, ...]) -> Tensor:
        return torch.stack([x.abs().max() for x in error]).max()

    mean = run(MLP, Dopri5(), 1e-6).stats.n_steps
    assert run(MLP, Dopri5(), 1e-6, norm=maximum).stats.n_steps > mean


def test_rms_norm_is_the_mean_over_all_elements_of_all_leaves():
    leaves = (torch.tensor([3.0]).double(), torch.tensor([[1.0, -1.0], [1.0, 2.0]]).double())
    assert rms_norm(leaves).item() == pytest.approx(math.sqrt((9 + 1 + 1 + 1 + 4) / 5))


def test_an_absolute_tolerance_alone_is_enough():
    controller = AdaptiveStep(rtol=0, atol=1e-6)
    solution = solve(DECAY.f, DECAY.y0, (0, 1), solver=Dopri5(), controller=controller, gradient=ACA())
    torch.testing.assert_close(solution.y[-1], DECAY.at(1.0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("solver", ADAPTIVE, ids=repr)
def test_a_solution_at_rest_is_stepped_over(solver):
    """Error estimates of zero: nothing to divide by, and the steps grow as fast as they may."""
    y0 = torch.zeros(3).double()
    controller = AdaptiveStep(1e-6, 1e-9)
    solution = solve(lambda t, y: 0 * y, y0, (0, 100), solver=solver, controller=controller, gradient=ACA())
    assert torch.equal(solution.y[-1], y0)
    assert solution.stats.n_steps <= 12  # from 1e-6 (of 100) on, ten times as long each time


def test_tensor_times_and_float_times_give_the_same_solution():
    times = MLP.times(5)
    a = run(MLP, Dopri5(), 1e-5, times)
    b = run(MLP, Dopri5(), 1e-5, torch.tensor(times, dtype=torch.float64))
    assert torch.equal(a.y, b.y) and torch.equal(a.t, b.t) and a.stats == b.stats


class Scripted(Solver):
    """Steps that make the errors and the moves of y that they are told to, and none after these."""

    error_order: ClassVar[int | None] = 2  # type: ignore[assignment]
    order = 1  # type: ignore[assignment]

    def __init__(self, *errors: float, moves: Sequence[float] = ()):
        self.errors, self.moves, self.attempts = list(errors), list(moves), []

    def start(self, f, t0, z0, arithmetic):
        return arithmetic.of(z0), None

    def first_slope(self, f, t0, state, carry):
        return tuple(torch.zeros_like(z) for z in state.point)

    def step(self, f, t0, t1, state, carry, adaptive):
        self.attempts.append((t0, t1))
        error = float(self.errors.pop(0)) if self.errors else 0.01
        move = self.moves.pop(0) if self.moves else 0.0
        return Attempt(Floats((state.point[0] + move,)), (torch.full((1,), error, dtype=torch.float64),), None)


def sizes_of(errors: list[float], times=(0.0, 100.0), h0: float = 1.0, **options) -> list[float]:
    """The sizes of the attempts that follow upon these errors, the first of them h0."""
    solver = Scripted(*errors)
    y0 = torch.zeros(1).double()  # so that the scale is atol alone
    controller = AdaptiveStep(rtol=1.0, atol=1.0, h0=h0, **options)
    solve(lambda t, y: 0 * y, y0, times, solver=solver, controller=controller, gradient=ACA())
    return [abs(b - a) for a, b in solver.attempts[: len(errors) + 1]]


@pytest.mark.parametrize(
    "error, factor",
    [
        (0.25, 0.8 * 2),  # safety / sqrt(error)
        (1.0, 0.8),  # still accepted
        (4.0, 0.8 / 2),  # rejected
        (0.0, 10.0),
        (1e-9, 10.0),  # at most
        (1e9, 0.2),  # at least
        (math.nan, 0.2),
        (math.inf, 0.2),
    ],
)
def test_next_step_size_follows_from_the_error(error, factor):
    assert sizes_of([error]) == pytest.approx([1, factor])


@pytest.mark.parametrize("times", [(0.0, 100.0), (100.0, 0.0)])
def test_only_an_error_above_the_tolerance_is_rejected(times):
    solver = Scripted(0.999, 1.0, 1.001, math.nan, 0.5)
    y0 = torch.zeros(1).double()
    stats = solve(
        lambda t, y: 0 * y, y0, times, solver=solver, controller=AdaptiveStep(1.0, 1.0, h0=30.0), gradient=ACA()
    ).stats
    starts = [a for a, _ in solver.attempts]
    assert starts[0] != starts[1] != starts[2] == starts[3] == starts[4] != starts[5]
    assert stats.n_rejected == 2
    assert stats.n_steps == len(solver.attempts) - 2


@pytest.mark.parametrize("y0, move", [(1.0, 3.0), (4.0, -3.0), (-1.0, -3.0), (4.0, -8.0)])
def test_error_is_relative_to_the_larger_end_of_the_step(y0, move):
    """Scale .5 + .25 * 4 = 1.5."""
    for error, n_rejected in ((1.49, 0), (1.51, 1)):
        solver = Scripted(error, moves=[move, move])
        controller = AdaptiveStep(rtol=0.25, atol=0.5, h0=1.0)
        start = torch.full((1,), y0, dtype=torch.float64)
        stats = solve(DECAY.f, start, (0, 10), solver=solver, controller=controller, gradient=ACA()).stats
        assert stats.n_rejected == n_rejected


def test_options_limit_the_change_of_the_step_size():
    options = {"safety": 0.5, "min_factor": 0.4, "max_factor": 3.0}
    assert sizes_of([0.25], **options) == pytest.approx([1, 0.5 * 2])
    assert sizes_of([1e-9], **options) == pytest.approx([1, 3])
    assert sizes_of([1e9], **options) == pytest.approx([1, 0.4])


def test_the_step_after_a_rejection_does_not_grow():
    shrunk = 0.8 / 2
    assert sizes_of([4.0, 1e-9, 1e-9]) == pytest.approx([1, shrunk, shrunk, 10 * shrunk])


def test_a_step_cut_short_for_an_output_does_not_shorten_the_next():
    # The second output is met with steps of 1 again, not with .8 * .25.
    sizes = sizes_of([0.64, 0.64, 0.64], times=(0.0, 0.25, 100.0))
    assert sizes == pytest.approx([0.25, 1, 1, 1])


def test_a_step_cut_short_may_lengthen_the_next():
    assert sizes_of([1e-9], times=(0.0, 0.25, 100.0)) == pytest.approx([0.25, 2.5])


def test_a_step_cut_short_and_rejected_shrinks_from_its_own_size():
    # 0.1, and as three equal steps are left to the output, a third of it.
    assert sizes_of([4.0], times=(0.0, 0.25, 100.0)) == pytest.approx([0.25, 0.25 / 3])


def test_no_sliver_is_left_before_an_output():
    assert sizes_of([0.64], times=(0.0, 1.005)) == pytest.approx([1.005])


@pytest.mark.parametrize(
    ("t_end", "sizes"),
    [
        (1.5, [0.75] * 2),
        (3.005, [3.005 / 3] * 3),  # stretched by less than 1 %
        (3.2, [0.8] * 4),
        (4.5, [1.0, 3.5 / 4, 3.5 / 4, 3.5 / 4, 3.5 / 4]),
    ],
)
@pytest.mark.parametrize("back", [1, -1])
def test_the_last_four_steps_before_an_end_are_equally_long(t_end, sizes, back):
    found = sizes_of([0.64] * 5, times=(0.0, back * t_end))
    assert found == pytest.approx(sizes)


def test_an_even_tail_respects_the_largest_step():
    assert sizes_of([1e-9] * 4, times=(0.0, 3.005), h_max=1.0) == pytest.approx([3.005 / 4] * 4)


def test_a_longer_step_than_was_planned_ends_an_even_tail_early():
    assert sizes_of([1e-9] * 4, times=(0.0, 3.6)) == pytest.approx([0.9, 2.7])


def test_the_last_attempt_that_max_steps_allows_may_finish():
    assert len(sizes_of([0.64] * 4, times=(0.0, 5.0), max_steps=5)) == 5


def test_a_fixed_step_ignores_the_error_estimate():
    solver = Scripted(1e9, math.nan)
    y0 = torch.zeros(1).double()
    controller = FixedStep(0.5)
    stats = solve(lambda t, y: 0 * y, y0, (0, 1), solver=solver, controller=controller, gradient=ACA()).stats
    assert solver.attempts == [(0.0, 0.5), (0.5, 1.0)]
    assert stats.n_rejected == 0


def test_two_solves_with_the_same_objects_do_not_influence_each_other():
    controller, solver = AdaptiveStep(1e-5, 1e-6), Dopri5()
    first, second = (
        solve(MLP.f, MLP.y0, MLP.span, solver=solver, controller=controller, gradient=ACA()) for _ in range(2)
    )
    assert torch.equal(first.y, second.y) and first.stats == second.stats


def test_solvers_without_an_estimate_run_at_fixed_steps_within_their_own_error():
    y = solve(MLP.f, MLP.y0, MLP.span, solver=RK4(), controller=FixedStep(0.05), gradient=ACA()).y
    torch.testing.assert_close(y[-1], MLP.reference(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("norm", "got"),
    [
        (lambda x: [1.0], "a list"),
        (lambda x: 1.0, "a float"),
        (lambda x: x[0], r"a tensor of shape \(2,\), torch.float64"),
        (lambda x: x[0].norm()[None], r"a tensor of shape \(1,\)"),
        (lambda x: (x[0] > 1).any(), r"a tensor of shape \(\), torch.bool"),
        (lambda x: None, "a NoneType"),
    ],
)
def test_a_norm_that_makes_no_number_is_told_of_at_once(norm, got):
    for h0 in (None, 0.1):
        with pytest.raises(InvalidOptionError, match=f"norm=.*0-d tensor.*it returned {got}"):
            solve(lambda t, y: -y, torch.ones(2).double(), (0, 1), controller=AdaptiveStep(h0=h0, norm=norm))


@pytest.mark.parametrize("h0", [1e-300, 5e-324, 1e-30])
@pytest.mark.parametrize("t", [(0.0, 1.0), (1.0, 0.0), (1e6, 1e6 + 1)])
def test_a_first_step_of_no_length_is_told_of(h0, t):
    with pytest.raises(InvalidOptionError, match=rf"h0={h0}\) is too short .* time of 1: steps below 1.3e-25"):
        solve(lambda t, y: -y, torch.ones(2).double(), t, controller=AdaptiveStep(h0=h0))


@pytest.mark.parametrize("h0", [0.0, -1.0, math.nan, "0.1"])
def test_a_first_step_is_a_positive_number(h0):
    with pytest.raises(InvalidOptionError, match="h0=.*must be a positive number"):
        AdaptiveStep(h0=h0)


GRIDS: list[Any] = [*ADAPTIVE, Reversible(RK4()), ALF(eta=0.9), RK4()]


@pytest.mark.parametrize("through_search", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", GRIDS, ids=repr)
def test_the_grid_and_the_values_do_not_depend_on_whether_times_are_differentiated(solver, dtype, through_search):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).to(dtype)
    y0 = torch.randn(4, 3, dtype=dtype), torch.randn((), dtype=dtype)
    t = torch.linspace(0, 1, 5, dtype=torch.float64)

    def f(t: Tensor, y: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return net(y[0]) * (1 + torch.sin(5 * t)), -y[1] * torch.cos(t)

    controllers: list[Any] = [FixedStep(0.07)]
    if solver.error_order is not None:
        controllers += [AdaptiveStep(1e-4, 1e-5), AdaptiveStep(1e-4, 1e-5, beta=0.4)]
    for controller in controllers:
        how: dict[str, Any] = {"solver": solver, "controller": controller}
        plain = solve(f, y0, t, gradient=Naive(), **how)
        traced = solve(f, y0, t.clone().requires_grad_(), gradient=Naive(through_search), **how)
        assert traced.stats.n_steps == plain.stats.n_steps
        assert traced.stats.n_rejected == plain.stats.n_rejected
        assert all(map(torch.equal, plain.y, traced.y))


@pytest.mark.parametrize("solver", [ALF(), ALF(order=4), Dopri5(), Reversible(RK4())], ids=repr)
def test_times_can_be_differentiated_twice_and_in_forward_mode(solver):
    def end(t: Tensor) -> Tensor:
        times = torch.stack([torch.zeros_like(t), t / 3, t])
        how: dict[str, Any] = {"solver": solver, "controller": FixedStep(0.2), "gradient": Naive()}
        return solve(lambda t, y: torch.sin(y) * t, torch.ones(3).double(), times, **how).y[1:].sum()

    t = torch.tensor(1.1, dtype=torch.float64)
    torch.autograd.gradcheck(end, t.requires_grad_(), check_forward_ad=True)
    torch.autograd.gradgradcheck(end, t)
    slope = torch.func.jvp(end, (t.detach(),), (torch.ones_like(t),))[1]
    torch.testing.assert_close(slope, torch.func.grad(end)(t.detach()))


class _Strays(tm.ControllerState):
    def next_time(self, t, target):
        return t + 2 * (target - t)


class _Straying(tm.StepController):
    def begin(self, start):
        return _Strays(start)


def test_a_controller_that_steps_past_its_target_is_told_so():
    with pytest.raises(tm.InvalidOptionError, match=r"_Strays.next_time\(0, 1\) returned 2: it must return its second"):
        solve(lambda t, y: -y, torch.ones(2), (0.0, 1.0), solver=ALF(), controller=_Straying(), gradient=ACA())


def test_a_long_list_of_odd_length_has_no_error_estimate():
    third = 1 / (2 - 2 ** (1 / 3))
    solver = tm.Leapfrog((third / 2, (1 - third) / 2, (1 - third) / 2, third / 2), order=4)
    with pytest.raises(tm.IncompatibleError, match="needs a solver with an error estimate, but Leapfrog has none"):
        solve(lambda t, y: -y, torch.ones(2), (0.0, 1.0), solver=solver, controller=AdaptiveStep(1e-3, 1e-3))
