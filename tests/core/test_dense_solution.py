"""A dense solution has the values of outputs inside steps at any time, and the gradient of autograd."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from device import NAME
from torch import Tensor, nn

import torchmali as tm
from examples.extending.new_solver import Verlet
from torchmali.measure import peak_bytes
from torchmali.outputs.base import NoOutputs
from torchmali.solvers.base import InterpolatingSolver

FREE = [tm.AdaptiveStep(1e-4, 1e-5), tm.FixedStep(0.23, land=False)]
LANDING = [tm.FixedStep(0.23), tm.AdaptiveStep(1e-4, 1e-5, land=True)]
LEAPFROGS = [tm.ALF(), tm.ALF(eta=0.9), tm.ALF(order=4), tm.ALF(order=6), tm.ALF(refresh=2), tm.ALF(order=4, refresh=1)]
RUNGE_KUTTA = [tm.HeunEuler(), tm.Bosh3(), tm.Dopri5(), tm.Tsit5(), tm.Dopri8()]
CASES: list[tuple[tm.Solver, tm.StepController]] = [
    *((solver, controller) for solver in [*LEAPFROGS, *RUNGE_KUTTA] for controller in FREE),
    *((solver, controller) for solver in (tm.ALF(), tm.ALF(order=4), tm.Dopri5()) for controller in LANDING),
    *((tm.RK4(), controller) for controller in (FREE[1], LANDING[0])),
    (tm.Euler(), FREE[1]),
    (tm.Reversible(), FREE[1]),
    (tm.Reversible(tm.Dopri5(), coupling=0.9), FREE[0]),
    (tm.Reversible(tm.Dopri8()), LANDING[1]),
]
DIRECTIONS = pytest.mark.parametrize("backwards", [False, True], ids=["forward", "backward"])
DENSE = [tm.Naive(), tm.ACA()]


class Net(nn.Module):
    """A field on a tree of two leaves that depends on the time and on an argument."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)).to(dtype)

    def forward(self, t: Tensor, y: dict[str, Tensor], w: Tensor) -> dict[str, Tensor]:
        u = self.layers(torch.cat([y["a"], t.expand(5, 1)], 1))
        return {"a": u, "b": w * torch.sin(u.sum() + t) - 0.3 * y["b"]}


def start(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"a": torch.linspace(-1, 1, 15).to(dtype).reshape(5, 3), "b": torch.tensor(0.8, dtype=dtype)}


def turned(times: list[float], backwards: bool) -> list[float]:
    return [2.0 - t for t in times] if backwards else times


def oscillator(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[1], torch.sin(t) - y[0]])


def solved(solver: tm.Solver, controller: tm.StepController, times: Any, **options: Any) -> tm.Solution:
    w = torch.tensor(0.7, dtype=torch.float64)
    with torch.no_grad():
        how: Any = {"solver": solver, "controller": controller, "gradient": tm.ACA(), **options}
        return tm.solve(Net(), start(), times, args=(w,), **how)


# Values.


@DIRECTIONS
@pytest.mark.parametrize("solver", [*LEAPFROGS, *RUNGE_KUTTA], ids=repr)
@pytest.mark.parametrize("controller", FREE, ids=repr)
def test_values_are_those_of_outputs_at_the_same_times(solver, controller, backwards):
    inner = torch.linspace(0, 2, 37).tolist()[1:-1]
    times = turned([0.0, *inner, 2.0], backwards)
    dense = solved(solver, controller, [times[0], times[-1]], dense=True)
    outputs = solved(solver, controller, times)
    assert dense.stats.n_steps == outputs.stats.n_steps
    found = dense(torch.tensor(times, dtype=torch.float64))
    for name in ("a", "b"):
        torch.testing.assert_close(found[name][:-1], outputs.y[name][:-1], rtol=0, atol=1e-14)
        # At the last time: the sum over the stages there, in place of the end of the step.
        torch.testing.assert_close(found[name][-1], outputs.y[name][-1], rtol=0, atol=1e-13)


@DIRECTIONS
@pytest.mark.parametrize(("solver", "controller"), CASES, ids=repr)
def test_values_at_the_output_times_are_y(solver, controller, backwards):
    times = torch.tensor(turned([0.0, 0.31, 0.7, 1.9, 2.0], backwards), dtype=torch.float64)
    solution = solved(solver, controller, times, dense=True)
    plain = solved(solver, controller, times)
    for name, leaf in solution(times).items():
        torch.testing.assert_close(leaf, solution.y[name], rtol=0, atol=1e-13)
        assert torch.equal(leaf[0], start()[name])
        # Without dense=True several fixed steps are taken in one run, with other last bits.
        torch.testing.assert_close(solution.y[name], plain.y[name], rtol=0, atol=1e-13)
    assert solution.stats.n_steps == plain.stats.n_steps


def test_a_dense_solution_costs_no_evaluation_of_a_leapfrog_and_four_per_step_of_dopri8():
    for solver in (*LEAPFROGS, tm.Dopri5(), tm.Tsit5(), tm.Bosh3(), tm.HeunEuler(), tm.Dopri8()):
        plain, dense = (solved(solver, FREE[0], [0.0, 2.0], dense=dense).stats for dense in (False, True))
        extra = dense.n_evals_forward - plain.n_evals_forward
        # The slope at the end of a step of Dopri8 is the first stage of the next one.
        n = plain.n_steps
        assert extra == (3 * n + 1 if solver == tm.Dopri8() else 0), solver


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("derivative", [False, True])
def test_leaves_have_the_shape_of_the_times_and_their_own(shape, derivative):
    solution = solved(tm.ALF(), FREE[0], [0.0, 2.0], dense=True)
    torch.manual_seed(1)
    t = 2 * torch.rand(shape, dtype=torch.float64)
    found = solution(t, derivative)
    assert found["a"].shape == (*shape, 5, 3) and found["b"].shape == shape
    for i, time in enumerate(t.reshape(-1).tolist()):
        single = solution(time, derivative=derivative)
        assert single["a"].shape == (5, 3) and single["b"].shape == ()
        assert torch.equal(found["a"].reshape(-1, 5, 3)[i], single["a"])
        assert torch.equal(found["b"].reshape(-1)[i], single["b"])


def test_times_may_be_numbers_lists_and_tensors_of_any_dtype():
    solution = solved(tm.Dopri5(), FREE[0], [0.0, 2.0], dense=True)
    truth = solution(1.0)["a"]
    for t in (1, [1.0], torch.tensor(1), torch.tensor(1.0), torch.tensor([1.0]).half(), [torch.tensor(1.0)]):
        assert torch.equal(solution(t)["a"].reshape(5, 3), truth)
    with pytest.raises(tm.InvalidTimesError, match="a number, or a tensor"):
        solution("now")


def test_times_that_their_rounding_puts_outside_are_inside():
    f = oscillator
    y0 = torch.ones(2, dtype=torch.float64)
    solution = tm.solve(f, y0, [0.0, 0.1], dense=True)
    assert float(torch.tensor(0.1)) > 0.1
    torch.testing.assert_close(solution(torch.tensor(0.1)), solution.y[-1], rtol=0, atol=1e-8)
    rounded = tm.solve(f, y0, torch.tensor([0.0, 0.7]), dense=True)
    assert float(torch.tensor(0.7)) < 0.7
    torch.testing.assert_close(rounded(0.7), rounded.y[-1], rtol=0, atol=1e-7)


# The derivative.


@DIRECTIONS
@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4), tm.Dopri5(), tm.Dopri8(), tm.RK4()], ids=repr)
def test_the_derivative_is_that_of_the_values(solver, backwards):
    solution = solved(solver, tm.FixedStep(0.3, land=False), turned([0.0, 2.0], backwards), dense=True)
    t, e = torch.linspace(0.05, 1.95, 24).double(), 1e-5  # none is a grid point
    below, above, found = solution(t - e), solution(t + e), solution(t, derivative=True)
    for name in ("a", "b"):
        torch.testing.assert_close(found[name], (above[name] - below[name]) / (2 * e), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    "solver", [tm.ALF(), tm.ALF(order=4), tm.Bosh3(), tm.RK4(), tm.Dopri5(), tm.Dopri8()], ids=repr
)
def test_halving_h_brings_the_derivative_to_f_with_the_order_of_the_interpolant(solver: InterpolatingSolver):
    t, errors = torch.linspace(0, 2, 301).double(), []
    for h in (0.5, 0.25) if solver.order == 8 else (0.2, 0.1):  # its errors are round-off with short steps
        how: Any = {"solver": solver, "controller": tm.FixedStep(h), "gradient": tm.ACA()}
        solution = tm.solve(oscillator, torch.tensor([1.0, 0.5]).double(), [0.0, 2.0], dense=True, **how)
        f = torch.stack([oscillator(*pair) for pair in zip(t, solution(t), strict=True)])
        errors.append((solution(t, derivative=True) - f).abs().max().item())
    lowest = min(solver.interpolant_of(closes).order for closes in (False, True))
    assert math.log2(errors[0] / errors[1]) > lowest - 0.4


# Gradients.


def losses(solution: tm.Solution, queries: list[Any], of_y: bool) -> Tensor:
    """Sum of functions of the solution at these times, of its derivative and of y at the output times."""
    values = [leaf for t in queries for leaf in solution(t).values()]
    values += solution(queries[0], derivative=True).values()
    values += solution.y.values() if of_y else []
    return torch.stack(
        [(x.sin() * torch.linspace(-1, 2, x.numel()).to(x).reshape(x.shape)).sum() for x in values]
    ).sum()


def gradients(
    method: tm.GradientMethod,
    solver: tm.Solver,
    controller: tm.StepController,
    times: list[float],
    of_y: bool = True,
    moves: bool = True,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """By y0, an argument, the times that are asked for, the times of the solve if these move, and the parameters."""
    net, y0, t = Net(dtype), start(dtype), torch.tensor(times, dtype=torch.float64)
    w = torch.tensor(0.7, dtype=dtype)
    torch.manual_seed(2)
    q = min(times) + 2 * torch.rand(2, 3, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (*y0.values(), w, q, *([t] if moves else []))]
    solution = tm.solve(net, y0, t, args=(w,), solver=solver, controller=controller, gradient=method, dense=True)
    grid = solution.dense.grid.detach()
    ends_and_grid = torch.stack([grid[0], grid[-1], grid[1], grid[len(grid) // 2], grid[-2]])
    queries = [q, ends_and_grid, 0.37, q[0, 0]]
    return list(torch.autograd.grad(losses(solution, queries, of_y), [*inputs, *net.parameters()]))


def worst(found: list[Tensor], truth: list[Tensor]) -> float:
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(found, truth, strict=True))


@DIRECTIONS
@pytest.mark.parametrize(("solver", "controller"), CASES, ids=repr)
def test_gradients_are_those_of_autograd(solver, controller, backwards):
    """Of values, derivatives and outputs in one loss; some outputs lie inside steps, some end them."""
    times = turned([0.0, 0.11, 0.12, 0.46, 1.3, 2.0], backwards)
    truth, found = (gradients(method, solver, controller, times) for method in DENSE)
    assert worst(found, truth) < 1e-12


@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4, refresh=3), tm.Dopri5(), tm.Dopri8()], ids=repr)
@pytest.mark.parametrize("controller", FREE, ids=repr)
def test_gradients_without_outputs_and_without_those_of_the_times(solver, controller):
    how: Any = {"of_y": False, "moves": False}
    truth, found = (gradients(method, solver, controller, [0.0, 2.0], **how) for method in DENSE)
    assert worst(found, truth) < 1e-12


@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4), tm.Tsit5()], ids=repr)
def test_gradients_in_float32(solver):
    controller = tm.FixedStep(0.1, land=False)
    truth, found = (gradients(method, solver, controller, [0.0, 2.0], dtype=torch.float32) for method in DENSE)
    assert worst(found, truth) < 1e-5
    double = gradients(tm.Naive(), solver, controller, [0.0, 2.0])
    others = [i for i in range(len(double)) if i != 3]
    assert worst([found[i].double() for i in others], [double[i] for i in others]) < 1e-4
    # That of dy/dt by t is a second derivative: round-off of the stages, times weights of up to 90, over h.
    assert worst([found[3].double()], [double[3]]) < 1e-3


def test_a_loss_of_y_alone_does_not_pay_for_the_stages():
    counts = []
    for dense in (False, True):
        y0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
        how: Any = {"solver": tm.Dopri8(), "controller": tm.FixedStep(0.1), "gradient": tm.ACA()}
        solution = tm.solve(oscillator, y0, [0.0, 1.0], dense=dense, **how)
        (grad,) = torch.autograd.grad(solution.y[-1].sum(), y0)
        counts.append((solution.stats.n_evals_backward, grad.tolist()))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("method", DENSE, ids=repr)
@pytest.mark.parametrize("derivative", [False, True])
def test_finite_differences_agree_for_y0_and_for_both_kinds_of_times(method, derivative):
    """No step of this grid appears or vanishes where a time of the solve is moved a little."""
    y0 = torch.tensor([1.0, -0.5], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[0.05, 0.33], [0.71, 1.9]], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 0.6, 2.0], dtype=torch.float64, requires_grad=True)

    def run(y0: Tensor, q: Tensor, t: Tensor) -> Tensor:
        how: Any = {"solver": tm.ALF(order=4), "controller": tm.FixedStep(0.4), "gradient": method}
        return tm.solve(oscillator, y0, t, dense=True, **how)(q, derivative)

    assert torch.autograd.gradcheck(run, (y0, q, t))


def test_naive_can_be_differentiated_twice():
    y0 = torch.tensor([1.0, -0.5], dtype=torch.float64, requires_grad=True)

    def run(y0: Tensor) -> Tensor:
        how: Any = {"solver": tm.Dopri5(), "controller": tm.FixedStep(0.4), "gradient": tm.Naive()}
        return tm.solve(lambda t, y: -(y**3), y0, [0.0, 1.0], dense=True, **how)(0.5)

    assert torch.autograd.gradgradcheck(run, (y0,))


def test_a_search_that_is_differentiated_moves_the_grid():
    y0 = torch.tensor([1.0, -0.5], dtype=torch.float64, requires_grad=True)
    how: Any = {"controller": FREE[0], "gradient": tm.Naive(through_search=True)}
    solution = tm.solve(lambda t, y: -(y**3), y0, [0.0, 1.0], dense=True, **how)
    assert solution.dense.grid.requires_grad
    (grad,) = torch.autograd.grad(solution(0.5).sum(), y0)
    assert grad.isfinite().all() and grad.any()


# Methods that keep no steps.


@pytest.mark.parametrize(
    "method", [tm.MALI(), tm.MALI(exact=True), tm.MALI(exact="int64"), tm.Adjoint(), tm.Naive(), tm.ACA()], ids=repr
)
@pytest.mark.parametrize("order", [2, 4])
@pytest.mark.parametrize("controller", [*FREE, tm.FixedStep(0.05)], ids=repr)
def test_every_method_has_values_without_a_gradient(method, order, controller):
    t = torch.linspace(0, 2, 50).double()
    truth = solved(tm.ALF(order=order), controller, [0.0, 2.0], dense=True)(t)
    found = solved(tm.ALF(order=order), controller, [0.0, 2.0], gradient=method, dense=True)(t)
    for name in ("a", "b"):
        torch.testing.assert_close(found[name], truth[name], rtol=0, atol=1e-10 if method.on_integers else 0)


def test_exact_mode_forgets_the_steps_that_it_takes_back():
    """Numbers that grow leave the range of the integers: steps are taken back and taken again."""
    y0, times = torch.tensor([1e-3, 1.0, 30.0]), [0.0, 0.3, 2.0]
    how: Any = {"controller": tm.FixedStep(0.05, land=False), "dense": True}
    solution = tm.solve(lambda t, y: 9 * y, y0, times, gradient=tm.MALI(exact=True), return_code=True, **how)
    truth = tm.solve(lambda t, y: 9 * y, y0, times, gradient=tm.ACA(), **how)
    assert solution.stats.n_rescales > 0
    assert len(solution.dense.grid) == len(solution.dense.z[0]) + 1 == solution.stats.n_steps + 1
    t = torch.linspace(0, 2, 100)
    torch.testing.assert_close(solution(t), truth(t), rtol=1e-4, atol=0)
    assert torch.equal(tm.solve_back(lambda t, y: 9 * y, solution.code), solution.y[0])


@pytest.mark.parametrize("method", [tm.MALI(), tm.MALI(exact=True), tm.Adjoint()], ids=repr)
def test_methods_that_keep_no_steps_refuse_a_gradient(method):
    net, w = Net(), torch.tensor(0.7, dtype=torch.float64)
    with pytest.raises(tm.IncompatibleError, match="t=.*observe=.*ACA"):
        tm.solve(net, start(), [0.0, 1.0], args=(w,), gradient=method, dense=True)


def test_mali_says_that_its_memory_must_not_grow():
    with pytest.raises(tm.IncompatibleError, match="memory must not grow with the number of steps"):
        tm.solve(oscillator, torch.ones(2, requires_grad=True), [0.0, 1.0], dense=True)


# Errors.


@DIRECTIONS
@pytest.mark.parametrize("t", [-0.1, 2.1, math.nan, math.inf, [0.5, 2.0001], torch.tensor([[0.1], [-3.0]])], ids=str)
def test_times_outside_raise_with_the_interval(t, backwards):
    solution = solved(tm.ALF(), FREE[0], turned([0.0, 2.0], backwards), dense=True)
    interval = "from 2 to 0" if backwards else "from 0 to 2"
    with pytest.raises(tm.InvalidTimesError, match=interval):
        solution(t)


def test_a_solver_without_an_interpolant_is_refused():
    with pytest.raises(tm.IncompatibleError, match="interpolant"):
        tm.solve(oscillator, torch.ones(2), [0.0, 1.0], solver=Verlet(), controller=tm.FixedStep(0.1), dense=True)


@pytest.mark.parametrize("options", [{"observe": lambda t, y: y}, {"outputs": NoOutputs()}], ids=["observe", "outputs"])
def test_other_outputs_are_refused(options):
    with pytest.raises(tm.InvalidOptionError, match=f"dense=True.*{next(iter(options))}"):
        tm.solve(oscillator, torch.ones(2), [0.0, 1.0], dense=True, **options)


def test_a_solution_that_is_not_dense_says_how_to_make_it_so():
    solution = tm.solve(oscillator, torch.ones(2), [0.0, 1.0])
    with pytest.raises(tm.IncompatibleError, match="dense=True"):
        solution(0.5)


# Everything around.


def test_a_dense_solution_shows_it_and_can_be_pickled():
    solution = solved(tm.ALF(), FREE[1], [0.0, 2.0], dense=True)
    assert repr(solution) == "Solution(y: {'a': (2, 5, 3), 'b': (2,)}, 2 times from 0 to 2, 9 steps, dense)"
    again = pickle.loads(pickle.dumps(solution))
    assert torch.equal(again(0.3)["a"], solution(0.3)["a"])


def test_memory_is_a_state_and_the_stages_with_a_weight_per_step():
    y0, n, peaks = torch.ones(10_000, dtype=torch.float64), 20, []

    def run(h: float) -> None:
        with torch.no_grad():
            tm.solve(lambda t, y: -y, y0, [0.0, 2.0], controller=tm.FixedStep(h), dense=True)

    for h in (2 / n, 1 / n):
        peaks.append(peak_bytes(lambda h=h: run(h)))
    # z, v and u of each step; while they are stacked, one of them is there twice.
    assert 3 * n <= (peaks[1] - peaks[0]) / y0.nbytes <= 4 * n + 1


@pytest.mark.parametrize("solver", [tm.ALF(order=4), tm.Dopri8()], ids=repr)
def test_on_another_device_values_and_gradients_are_those_of_the_cpu(solver):
    def run(device: str) -> list[Tensor]:
        y0, q = (x.double().to(device).requires_grad_() for x in (torch.ones(2), torch.linspace(0, 1, 7)))
        w = torch.tensor(1.3, dtype=torch.float64, device=device, requires_grad=True)

        def f(t: Tensor, y: Tensor, w: Tensor) -> Tensor:
            return torch.sin(w * y) + t

        how: Any = {"solver": solver, "controller": tm.AdaptiveStep(1e-3, 1e-4), "gradient": tm.ACA()}
        solution = tm.solve(f, y0, [0.0, 0.3, 1.0], args=(w,), dense=True, **how)
        values = [solution(q), solution(0.4), solution(q, derivative=True), solution.y]
        loss = torch.stack([x.square().sum() for x in values]).sum()
        return [*values, *torch.autograd.grad(loss, [y0, w, q])]

    for x, y in zip(run(NAME), run("cpu"), strict=True):
        assert (x.device.type, y.device.type) == (NAME, "cpu")
        assert torch.equal(x.detach().cpu(), y.detach())
