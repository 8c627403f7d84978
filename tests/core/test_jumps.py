"""Jumps of f: steps end on them, f is evaluated on the side of the step, and gradients go through them."""

import itertools
import math
from bisect import bisect_left, bisect_right

import pytest
import torch
from problems import RUNGE_KUTTA

import torchmali as tm
from torchmali.jumps import Jumps
from torchmali.torchdiffeq import odeint, odeint_adjoint

JUMPS = [0.3, 0.7, 1.1]
SLOPES = [1.0, -2.0, 3.0, 0.5]
SOLVERS = [
    tm.ALF(),
    tm.ALF(order=4),
    tm.ALF(order=6),
    tm.ALF(eta=0.8),
    tm.ALF(refresh="never"),
    tm.ALF(refresh=2),
    *RUNGE_KUTTA,
    tm.Reversible(),
    tm.Reversible(tm.Dopri5()),
]
CONTROLLERS = [
    tm.FixedStep(0.17),
    tm.FixedStep(0.17, land=False),
    tm.AdaptiveStep(1e-2, 1e-3),
    tm.AdaptiveStep(1e-2, 1e-3, land=True),
]
METHODS = [tm.ACA(), tm.MALI(), tm.MALI(checkpoint_every=2), tm.MALI(checkpoint_every=None), tm.MALI(exact=True)]


def works(part: tm.StepController | tm.GradientMethod, *others) -> bool:
    try:
        part.check(*others)
    except tm.IncompatibleError:
        return False
    return True


PAIRS = [(solver, controller) for solver in SOLVERS for controller in CONTROLLERS if works(controller, solver)]


class Steps:
    """f(t, y) = SLOPES[i] between two jumps; at a jump, that of the piece on its left, or on its right."""

    def __init__(self, jumps, slopes, is_right: bool = True):
        self.jumps, self.slopes, self.find = jumps, slopes, bisect_right if is_right else bisect_left
        self.seen: list[float] = []

    def __call__(self, t, y):
        jumps = torch.tensor(self.jumps, dtype=t.dtype).tolist()  # as `t >= jump` compares
        self.seen.append(float(t))
        slope = self.slopes[self.find(jumps, float(t))]
        return {name: slope * torch.ones_like(x) for name, x in y.items()} if isinstance(y, dict) else slope + 0 * y

    def integral(self, t0: float, t1: float) -> float:
        a, b = sorted((t0, t1))
        ends = [a, *(jump for jump in self.jumps if a < jump < b), b]
        total = math.fsum((y - x) * self.slopes[bisect_right(self.jumps, x)] for x, y in itertools.pairwise(ends))
        return total if t0 < t1 else -total


@pytest.mark.parametrize("is_right", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_steps_in_f_are_integrated_to_round_off(solver, dtype, is_right):
    """In both directions, with outputs before, at and behind jumps, whatever the value of f at the jump itself."""
    f = Steps(JUMPS, SLOPES, is_right)
    for controller in (c for s, c in PAIRS if s is solver):
        for times in ([0.0, 0.2, 0.7, 1.5], [1.5, 0.7, 0.2, 0.0], [0.3, 1.1], [1.1, 0.3]):
            y0 = torch.tensor([0.5, -1.0], dtype=dtype)
            y = tm.solve(f, y0, times, solver=solver, controller=controller, gradient=tm.ACA(), jumps=JUMPS).y
            exact = torch.tensor([f.integral(times[0], t) for t in times], dtype=torch.float64)
            assert (y - y0 - exact[:, None]).abs().max() < 40 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", [tm.ALF(), tm.Heun(), tm.Dopri5()], ids=repr)
def test_many_jumps_lose_no_time_although_float32_is_coarse_there(solver, dtype):
    """Near t = 4000 float32 tells times 2.4e-4 apart: jumps that left out as much would lose 0.2 of 4."""
    jumps = [4000 + i / 250 for i in range(1, 1000)]
    f = Steps(jumps, [1.0, 2.0] * 500)
    y0 = {"a": torch.zeros(2, dtype=dtype), "b": torch.ones(3, 1, dtype=dtype)}
    options = {"solver": solver, "controller": tm.FixedStep(1.0), "gradient": tm.ACA()}
    y = tm.solve(f, y0, [4000.0, 4004.0], jumps=jumps, **options).y
    limit = 1e-11 if dtype == torch.float64 else 1e-3  # round-off of a sum of 1000 terms, and of the jumps
    assert abs(float(y["a"][-1, 0]) - f.integral(4000.0, 4004.0)) < limit
    assert abs(float(y["b"][-1, 0, 0]) - 1 - f.integral(4000.0, 4004.0)) < limit


@pytest.mark.parametrize("times", [[0.0, 2.0], [2.0, 0.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("solver", "controller"), PAIRS, ids=repr)
def test_f_never_sees_a_jump(solver, controller, dtype, times):
    """Jumps at the ends and at zero included."""
    jumps = [0.0, 0.1, 0.7, 1.1, 2.0]
    f = Steps(jumps, [9.0, 1.0, 2.0, 3.0, 4.0, 9.0])
    tm.solve(
        f, torch.zeros(1, dtype=dtype), times, solver=solver, controller=controller, gradient=tm.ACA(), jumps=jumps
    )
    seen, rounded = torch.tensor(f.seen, dtype=dtype), torch.tensor(jumps, dtype=dtype)
    assert not torch.isin(seen, rounded).any()
    assert 0 < seen.min() and seen.max() < 2


def switched(t, y):
    """A rotation whose speed, friction and drive jump at 1 and at 2.5."""
    i = int(t >= 1) + int(t >= 2.5)
    k, c, b = ((1.0, 0.1, 0.0), (5.0, 0.5, 2.0), (2.0, -0.3, -1.0))[i]
    return torch.stack([y[1], b - k * y[0] - c * y[1]])


def flow(i: int, span: float, y: torch.Tensor) -> torch.Tensor:
    k, c, b = ((1.0, 0.1, 0.0), (5.0, 0.5, 2.0), (2.0, -0.3, -1.0))[i]
    matrix = torch.tensor([[0.0, 1.0, 0.0], [-k, -c, b], [0.0, 0.0, 0.0]], dtype=torch.float64)
    return (torch.linalg.matrix_exp(span * matrix) @ torch.cat([y, torch.ones(1, dtype=torch.float64)]))[:2]


Y0 = torch.tensor([1.0, -0.5], dtype=torch.float64)
TIMES = [0.0, 0.6, 1.0, 1.7, 4.0]


def closed_form() -> torch.Tensor:
    at_1 = flow(0, 1.0, Y0)
    at_2 = flow(1, 1.5, at_1)
    return torch.stack([Y0, flow(0, 0.6, Y0), at_1, flow(1, 0.7, at_1), flow(2, 1.5, at_2)])


@pytest.mark.parametrize("solver", [tm.ALF(order=4), tm.ALF(order=6), tm.Dopri5(), tm.Tsit5(), tm.Dopri8()], ids=repr)
def test_a_piecewise_linear_field_meets_its_closed_form(solver):
    how = {"solver": solver, "controller": tm.AdaptiveStep(1e-8, 1e-9), "jumps": [2.5, 1.0, 1.0, -3.0, 7.0]}
    solution = tm.solve(switched, Y0, TIMES, gradient=tm.ACA(), **how)
    torch.testing.assert_close(solution.y, closed_form(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4), tm.Heun(), tm.RK4(), tm.Dopri5()], ids=repr)
def test_fixed_steps_keep_their_order(solver):
    errors = []
    for h in (0.1, 0.05):
        how = {"solver": solver, "controller": tm.FixedStep(h), "gradient": tm.ACA()}
        y = tm.solve(switched, Y0, [0.0, 4.0], jumps=[1.0, 2.5], **how).y
        errors.append((y[-1] - closed_form()[-1]).norm().item())
    assert solver.order - 0.4 < math.log2(errors[0] / errors[1]) < solver.order + 0.9


@pytest.mark.parametrize(
    ("solver", "share"), [(tm.ALF(order=4), 0.25), (tm.Dopri5(), 0.7), (tm.Bosh3(), 0.9), (tm.ALF(), 1.0)], ids=repr
)
def test_known_jumps_save_evaluations(solver, share):
    """Without them every jump is found by rejections."""

    def square_wave(t, y):
        return -y + (1.0 if int(t) % 2 == 0 else -1.0)

    found = []
    for jumps in ([], range(1, 20)):
        how = {"solver": solver, "controller": tm.AdaptiveStep(1e-4, 1e-5), "gradient": tm.ACA()}
        found.append(tm.solve(square_wave, Y0, [0.0, 20.0], jumps=jumps, **how).stats)
    assert found[1].n_evals_forward < share * found[0].n_evals_forward
    assert found[1].n_rejected < 0.5 * found[0].n_rejected


class Net(torch.nn.Module):
    """Another layer between each two jumps."""

    def __init__(self, jumps):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = len(jumps) + 1, 3, 3
        self.weight = torch.nn.Parameter(0.7 * torch.randn(shape, generator=generator, dtype=torch.float64))
        self.jumps = sorted(jumps)

    def forward(self, t, y, b):
        return torch.tanh(y @ self.weight[bisect_right(self.jumps, t.item())] + b * t)


NET_JUMPS = [0.9, 0.5, 1.3]


def gradients(method, solver, controller, times, jumps=NET_JUMPS):
    net = Net(NET_JUMPS)
    y0 = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    b = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64, requires_grad=True)
    t = torch.tensor(times, dtype=torch.float64, requires_grad=True)
    how = {"solver": solver, "controller": controller, "gradient": method}
    solution = tm.solve(net, y0, t, args=(b,), jumps=jumps, **how)
    loss = (solution.y.square() * torch.arange(1, len(times) + 1).reshape(-1, 1, 1)).sum()
    return torch.autograd.grad(loss, [y0, net.weight, b, t]), solution


def difference(found, expected) -> float:
    return max(float((x - y).norm() / y.norm()) for x, y in zip(found, expected, strict=True))


SPANS = [[0.0, 0.4, 0.9, 1.0, 2.0], [2.0, 1.3, 1.0, 0.3, 0.0], [0.0, 2.0], [0.5, 0.7, 1.3]]
SOME = [s for s in SOLVERS if s not in (tm.Midpoint(), tm.Heun3(), tm.RK4ThreeEighths(), tm.Tsit5(), tm.ALF(order=6))]


@pytest.mark.parametrize("times", SPANS, ids=str)
@pytest.mark.parametrize("solver", SOME, ids=repr)
def test_gradients_are_those_of_autograd_on_the_same_steps(solver, times):
    """Of y0, parameters, args and times: outputs before, at and behind jumps, jumps at the ends."""
    for controller in (c for s, c in PAIRS if s is solver):
        expected, reference = gradients(tm.Naive(), solver, controller, times)
        for method in METHODS:
            if not works(method, solver, controller):
                continue
            found, solution = gradients(method, solver, controller, times)
            assert difference(found, expected) < 2e-12, (controller, method)
            assert solution.stats.n_steps == reference.stats.n_steps
            assert solution.stats.n_refreshes == reference.stats.n_refreshes


@pytest.mark.parametrize("times", SPANS, ids=str)
def test_the_adjoint_crosses_the_jumps_in_both_directions(times):
    how = tm.Dopri5(), tm.AdaptiveStep(1e-9, 1e-11), times
    expected, _ = gradients(tm.Naive(), *how)
    found, solution = gradients(tm.Adjoint(), *how)
    assert difference(found, expected) < 1e-6
    _, blindly = gradients(tm.Adjoint(), *how, jumps=[])
    assert solution.stats.n_evals_backward < 0.7 * blindly.stats.n_evals_backward


def test_gradients_of_the_times_are_those_of_the_solution():
    """A jump stays where it is when times move; an output time at a jump takes it along."""
    how = tm.Dopri8(), tm.AdaptiveStep(1e-12, 1e-12)
    for times, moves in ((SPANS[0], 2), (SPANS[2], None)):
        found = gradients(tm.ACA(), *how, times)[0][3]
        for k in range(len(times)):
            losses = []
            for e in (1e-5, -1e-5):
                net, moved = Net(NET_JUMPS), list(times)
                moved[k] += e
                net.jumps[1] += e if k == moves else 0.0
                y0 = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
                b = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
                options = {"solver": how[0], "controller": how[1], "args": (b,), "jumps": net.jumps}
                y = tm.solve(net, y0, moved, gradient=tm.ACA(), **options).y.detach()
                losses.append(float((y.square() * torch.arange(1, len(times) + 1).reshape(-1, 1, 1)).sum()))
            assert found[k].item() == pytest.approx((losses[0] - losses[1]) / 2e-5, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("controller", CONTROLLERS, ids=repr)
@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4), tm.ALF(refresh=3)], ids=repr)
def test_exact_mode_has_the_gradient_of_the_stored_trajectory(solver, controller):
    for times in SPANS:
        found, _ = gradients(tm.MALI(exact=True), solver, controller, times)
        stored, _ = gradients(tm.MALI(exact=True, checkpoint_every=1), solver, controller, times)
        assert all(torch.equal(x, y) for x, y in zip(found, stored, strict=True))


def test_a_code_leads_back_across_jumps():
    net, b = Net(NET_JUMPS), torch.ones(3, dtype=torch.float64)
    y0 = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
    for times, controller in itertools.product(SPANS, CONTROLLERS):
        how = {"controller": controller, "gradient": tm.MALI(exact=True), "return_code": True, "jumps": NET_JUMPS}
        with torch.no_grad():
            code = tm.solve(net, y0, times, args=(b,), **how).code
        torch.testing.assert_close(tm.solve_back(net, code), y0, rtol=0, atol=1e-15)


@pytest.mark.parametrize("n", [1, 3])
def test_a_jump_costs_mali_one_evaluation_and_one_state(n):
    jumps = [(i + 1) / (n + 1) for i in range(n)]
    y0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    how = {"controller": tm.FixedStep(0.25 / (n + 1)), "gradient": tm.MALI(), "solver": tm.ALF(refresh="never")}
    solution = tm.solve(lambda t, y: -y, y0, [0.0, 1.0], jumps=jumps, **how)
    saved = solution.y.grad_fn.saved_tensors  # y0; z and v at the end; z and v at each jump
    assert len(saved) - sum(x is None for x in saved) == 1 + 2 + 2 * n
    solution.y[-1].sum().backward()
    stats = solution.stats
    assert stats.n_refreshes == n
    assert stats.n_steps == 4 * (n + 1)
    assert stats.n_evals_forward == stats.n_evals_backward == stats.n_vjps == stats.n_steps + 1 + n


@pytest.mark.parametrize("land", [True, False])
def test_the_grid_of_fixed_steps_begins_anew_behind_a_jump(land):
    controller = tm.FixedStep(0.4, land=land)
    f = Steps([0.5], [0.0, 0.0])
    tm.solve(f, Y0, [0.0, 0.8, 2.0], solver=tm.Midpoint(), controller=controller, gradient=tm.ACA(), jumps=[0.5])
    middles = [t for t in f.seen if t not in (0.0, math.nextafter(0.5, 1))]
    ends = [0.0, 0.4, 0.5, 0.8, 1.2, 1.6, 2.0] if land else [0.0, 0.4, 0.5, 0.9, 1.3, 1.7, 2.0]
    expected = {(a + b) / 2 for a, b in itertools.pairwise(ends)}
    assert all(any(abs(t - x) < 1e-12 for t in middles) for x in expected)
    n_steps = controller.n_steps_with_jumps(tm.Midpoint(), [0.0, 0.8, 2.0], Jumps([0.5], torch.float64))
    assert n_steps == len(ends) - 1


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4), tm.Dopri5(), tm.Dopri8()], ids=repr)
def test_the_first_step_does_not_look_across_the_first_jump(solver, sign):
    """f is flat up to the jump: nothing but the jump limits the step."""
    jump, seen = sign * 1e-3, []

    def f(t, y):
        seen.append(sign * float(t))
        return 0 * y + (1e6 if sign * float(t) >= 1e-3 else 1.0)

    tm.solve(f, Y0, [0.0, sign * 1.0], solver=solver, gradient=tm.ACA(), jumps=[jump])
    n = next(i for i, t in enumerate(seen) if t > 1e-3)
    assert all(t < 1e-3 for t in seen[:n]) and all(t > 1e-3 for t in seen[n:])


def test_a_jump_that_float32_cannot_tell_from_an_output_is_at_the_output():
    f = Steps(JUMPS, SLOPES)
    times = torch.tensor([0.0, 0.3, 0.7, 1.5])
    solution = tm.solve(f, torch.zeros(1), times, solver=tm.ALF(), controller=tm.FixedStep(1.0), jumps=JUMPS)
    assert solution.stats.n_steps == 4
    assert solution.stats.h_min > 0.2


@pytest.mark.parametrize("controller", CONTROLLERS[1:3], ids=repr)
@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4), tm.Dopri5()], ids=repr)
def test_samples_with_times_of_their_own_meet_jumps(solver, controller):
    """Times at a jump, of one sample, of several, and at both ends."""
    f, nan = Steps([0.0, *JUMPS, 1.5], [9.0, *SLOPES, 9.0]), math.nan
    t = torch.tensor([[0.0, 0.0, 0.0], [0.3, 0.0, 0.2], [0.7, 0.7, 0.7], [1.5, 1.1, nan]], dtype=torch.float64)
    expected = [[f.integral(0.0, x) if x == x else nan for x in row] for row in t.tolist()]
    found = []
    for method in (tm.Naive(), tm.ACA(), *([tm.MALI()] if isinstance(solver, tm.ALF) else [])):
        y0 = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
        how = {"solver": solver, "controller": controller, "gradient": method}
        y = tm.solve(lambda t, y: f(t, y) - 0.0 * y, y0, t, jumps=f.jumps, **how).y
        exact = torch.tensor(expected, dtype=torch.float64) + y0.detach()
        torch.testing.assert_close(y.detach(), exact, rtol=0, atol=1e-14, equal_nan=True)
        found.append(torch.autograd.grad((y.nan_to_num() ** 2).sum(), y0)[0])
        torch.testing.assert_close(found[-1], found[0], rtol=1e-12, atol=1e-12)


def test_jumps_are_sorted_unique_and_inside():
    f = Steps(JUMPS, SLOPES)
    how = {"controller": tm.FixedStep(1.0), "gradient": tm.ACA()}
    plain = tm.solve(f, Y0, [0.0, 1.5], jumps=JUMPS, **how)
    for jumps in ([1.1, 0.3, 0.7, 0.3, -4, 9.0], tuple(JUMPS), torch.tensor(JUMPS, dtype=torch.float64)):
        other = tm.solve(f, Y0, [0.0, 1.5], jumps=jumps, **how)
        assert torch.equal(other.y, plain.y) and other.stats.n_steps == plain.stats.n_steps == 4
    outside = tm.solve(f, Y0, [0.0, 0.2], jumps=[0.3, 5.0], **how)
    assert outside.stats.n_steps == 1 and outside.stats.n_refreshes == 0


@pytest.mark.parametrize("jumps", [0.5, [[0.5]], "0.5", None, [0.5, "x"]])
def test_jumps_that_are_no_sequence_of_times_are_refused(jumps):
    with pytest.raises(tm.InvalidTimesError, match=r"jumps must be a sequence of times, as in jumps=\[0.5, 1.0\]"):
        tm.solve(lambda t, y: y, Y0, [0.0, 1.0], jumps=jumps)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_jumps_that_are_not_finite_are_refused(value):
    with pytest.raises(tm.InvalidTimesError, match=r"jumps must be finite; got jumps\[1\]"):
        tm.solve(lambda t, y: y, Y0, [0.0, 1.0], jumps=[0.5, value])


def test_jumps_that_require_a_gradient_are_warned_of():
    with pytest.warns(tm.SolverWarning, match="jumps get no gradient"):
        tm.solve(lambda t, y: -y, Y0, [0.0, 1.0], jumps=torch.tensor([0.5], requires_grad=True))


def test_odeint_takes_jump_t():
    jumps, times = torch.tensor([1.0, 2.5]), torch.tensor(TIMES, dtype=torch.float64)
    for how in ({"method": "dopri5", "rtol": 1e-8, "atol": 1e-9}, {"method": "rk4", "options": {"step_size": 0.01}}):
        options = {**how.pop("options", {}), "jump_t": jumps}
        y = odeint(switched, Y0, times, options=options, **how)
        torch.testing.assert_close(y, closed_form(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("adjoint_options", [None, {}, {"jump_t": torch.tensor([2.5, 1.0])}])
def test_odeint_adjoint_knows_the_jumps_in_both_solves(adjoint_options):
    y0, times = Y0.clone().requires_grad_(), torch.tensor(TIMES, dtype=torch.float64)
    how = {"rtol": 1e-9, "atol": 1e-10, "adjoint_options": adjoint_options}
    y = odeint_adjoint(switched, y0, times, options={"jump_t": torch.tensor([1.0, 2.5])}, **how)
    (found,) = torch.autograd.grad(y[-1].sum(), y0)
    plain = odeint(switched, y0, times, rtol=1e-9, atol=1e-10, options={"jump_t": [1.0, 2.5]})
    (expected,) = torch.autograd.grad(plain[-1].sum(), y0)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
