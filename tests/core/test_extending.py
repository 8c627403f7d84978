"""The extensions of docs/extending.md: each file of examples/extending/ does what the page says, and stands on it."""

import gc
import math
import re
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import torchmali as tm
from examples.extending.new_controller import GradedStep, HalvingStep
from examples.extending.new_leapfrog import TripleJump
from examples.extending.new_output import MeanOutput
from examples.extending.new_solver import ExplicitMidpoint, Verlet
from examples.extending.new_tableau import Ralston3

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "examples" / "extending").glob("*.py") if path.name != "__init__.py")


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def forward(self, t, y):
        return self.layers(y) + torch.sin(t)


class Pendulum(nn.Module):
    """q' = p, p' = -g sin(q) + sin(t)"""

    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, t, y):
        q, p = y
        return p, -self.g * q.sin() + torch.sin(t)


def logistic(t, y):
    return y * (1 - y)


def logistic_at(t: float) -> float:
    return 1 / (1 + 4 * math.exp(-t))


def error(solver: tm.Solver, h: float) -> float:
    y0 = torch.tensor([0.2], dtype=torch.float64)
    solution = tm.solve(logistic, y0, [0.0, 2.0], solver=solver, controller=tm.FixedStep(h), gradient=tm.Naive())
    return abs(solution.y[-1].item() - logistic_at(2.0))


def measured_order(solver: tm.Solver, h: float) -> float:
    return math.log2(error(solver, h) / error(solver, h / 2))


def y_of(solution: tm.Solution) -> torch.Tensor:
    leaves = solution.y if isinstance(solution.y, tuple) else (solution.y,)
    return sum((leaf.square().sum() + leaf.sum() for leaf in leaves), torch.zeros((), dtype=torch.float64))


def gradients(f: nn.Module, y0, t: list[float], **how) -> list[torch.Tensor]:
    """Gradients of a function of y by y0, by the times and by the parameters."""
    leaves = tuple(x.clone().requires_grad_() for x in (y0 if isinstance(y0, tuple) else (y0,)))
    times = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    solution = tm.solve(f, leaves if isinstance(y0, tuple) else leaves[0], times, **how)
    return list(torch.autograd.grad(y_of(solution), [*leaves, times, *f.parameters()]))


def distance(found: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    pairs = zip(found, truth, strict=True)
    return max(((x - y).norm() / y.norm()).item() for x, y in pairs)


def batch() -> torch.Tensor:
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)


TIMES = [0.0, 0.4, 1.0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_page_shows_each_file_as_it_is(path: Path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)
    assert path.read_text() in blocks


def test_the_page_shows_no_code_that_is_not_run():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)
    names = {"Ralston3": Ralston3, "TripleJump": TripleJump, "GradedStep": GradedStep, "HalvingStep": HalvingStep}
    names |= {"MeanOutput": MeanOutput, "Verlet": Verlet, "ExplicitMidpoint": ExplicitMidpoint}
    names |= {"tm": tm, "func": MLP(), "y0": batch(), "times": TIMES, "pendulum": Pendulum()}
    names |= {"q0": torch.ones(2, dtype=torch.float64), "p0": torch.zeros(2, dtype=torch.float64)}
    for block in blocks:
        if block not in [path.read_text() for path in FILES]:
            exec(block, names)


@pytest.mark.parametrize(
    ("solver", "order", "h"),
    [(Ralston3(), 3, 0.1), (TripleJump, 4, 0.5), (ExplicitMidpoint(), 2, 0.1)],
    ids=["tableau", "leapfrog", "solver"],
)
def test_halving_h_divides_the_error_by_two_to_the_order(solver: tm.Solver, order: int, h: float):
    assert measured_order(solver, h) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("solver", [Ralston3(), TripleJump, ExplicitMidpoint()], ids=["tableau", "leapfrog", "solver"])
def test_the_gradient_of_a_new_solver_is_that_of_autograd(solver: tm.Solver):
    how = {"solver": solver, "controller": tm.FixedStep(0.2)}
    truth = gradients(MLP(), batch(), TIMES, gradient=tm.Naive(), **how)
    assert distance(gradients(MLP(), batch(), TIMES, gradient=tm.ACA(), **how), truth) < 1e-12


def test_a_new_tableau_takes_the_steps_of_the_same_method_under_another_name():
    y0 = batch()
    found, known = (
        tm.solve(MLP(), y0, TIMES, solver=solver, controller=tm.FixedStep(0.2), gradient=tm.ACA()).y
        for solver in (Ralston3(), tm.Bosh3())
    )
    assert torch.equal(found, known)


def test_adaptive_steps_of_a_new_tableau_follow_its_error_estimate():
    y0 = torch.tensor([0.2], dtype=torch.float64)
    times = [0.0, 0.5, 2.0]  # 0.5 is read from the cubic Hermite interpolant
    controller = tm.AdaptiveStep(1e-7, 1e-9)
    solution = tm.solve(logistic, y0, times, solver=Ralston3(), controller=controller, gradient=tm.ACA())
    assert solution.y[1:, 0].tolist() == pytest.approx([logistic_at(t) for t in times[1:]], rel=1e-6)


@pytest.mark.parametrize("gradient", [tm.MALI(), tm.MALI(exact=True)], ids=str)
def test_mali_of_a_new_leapfrog_list_is_aca(gradient: tm.MALI):
    how = {"solver": TripleJump, "controller": tm.FixedStep(0.2)}
    truth = gradients(MLP(), batch(), TIMES, gradient=tm.ACA(), **how)
    assert distance(gradients(MLP(), batch(), TIMES, gradient=gradient, **how), truth) < 1e-12


def test_verlet_is_undone_by_its_inverse_and_mali_keeps_no_state():
    y0 = torch.tensor([0.5, 1.0], dtype=torch.float64), torch.tensor([0.0, -0.3], dtype=torch.float64)
    how = {"solver": Verlet(), "controller": tm.FixedStep(0.05)}
    truth = gradients(Pendulum(), y0, TIMES, gradient=tm.Naive(), **how)
    for gradient in (tm.ACA(), tm.MALI()):
        assert distance(gradients(Pendulum(), y0, TIMES, gradient=gradient, **how), truth) < 1e-12
    solution = tm.solve(Pendulum(), y0, TIMES, gradient=tm.MALI(), **how)
    y_of(solution).backward()
    assert solution.stats.n_checkpoints == 0
    assert solution.stats.reconstruction_error is not None and solution.stats.reconstruction_error < 1e-12


def test_graded_steps_grow_by_their_ratio():
    y0 = batch()
    solution = tm.solve(MLP(), y0, [0.0, 0.3, 1.0], controller=GradedStep(2, ratio=2.0), gradient=tm.ACA())
    assert solution.stats.n_steps == 4
    assert (solution.stats.h_min, solution.stats.h_max) == pytest.approx((0.1, 1.4 / 3))


@pytest.mark.parametrize("controller", [GradedStep(5, 1.3), HalvingStep(1e-3, h0=0.5)], ids=str)
@pytest.mark.parametrize("solver", [tm.ALF(), tm.HeunEuler()], ids=str)
@pytest.mark.parametrize("times", [TIMES, [1.0, 0.3, 0.0]], ids=["forward", "backward"])
def test_the_gradient_with_a_new_controller_is_that_of_autograd(solver, controller, times):
    how = {"solver": solver, "controller": controller}
    truth = gradients(MLP(), batch(), times, gradient=tm.Naive(), **how)
    methods = [tm.ACA(), *([tm.MALI(), tm.MALI(exact=True)] if isinstance(solver, tm.ReversibleSolver) else [])]
    for method in methods:
        # On integers the steps themselves are rounded.
        limit = 1e-9 if method == tm.MALI(exact=True) else 1e-12
        assert distance(gradients(MLP(), batch(), times, gradient=method, **how), truth) < limit


def test_halving_steps_reject_what_is_too_inaccurate():
    y0 = torch.tensor([0.2], dtype=torch.float64)
    how = {"solver": tm.Bosh3(), "gradient": tm.ACA()}
    solution = tm.solve(logistic, y0, [0.0, 2.0], controller=HalvingStep(1e-8, h0=1.0), **how)
    assert solution.stats.n_rejected > 3
    assert solution.y[-1].item() == pytest.approx(logistic_at(2.0), abs=1e-6)
    with pytest.raises(tm.StepUnderflowError, match="raise tol"):
        tm.solve(
            lambda t, y: torch.where(t > 1, 1.0, 0.0) + 0 * y, y0, [0.0, 2.0], controller=HalvingStep(0, 1.0), **how
        )


METHODS = [tm.MALI(), tm.MALI(exact=True), tm.ACA(), tm.Naive()]


@pytest.mark.parametrize("gradient", METHODS, ids=str)
def test_the_mean_is_that_of_stored_outputs_with_its_gradient(gradient: tm.GradientMethod):
    times = [0.0, 0.3, 0.5, 1.0]
    y0, f = batch().requires_grad_(), MLP()
    t = torch.tensor(times, dtype=torch.float64, requires_grad=True)
    inputs = [y0, t, *f.parameters()]
    stored = tm.solve(f, y0, t, controller=tm.FixedStep(0.1), gradient=tm.Naive()).y.mean(0)
    found = tm.solve(f, y0, t, controller=tm.FixedStep(0.1), gradient=gradient, outputs=MeanOutput(len(times))).y
    weights = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    torch.testing.assert_close(found, stored, rtol=1e-12, atol=1e-12)
    truth = torch.autograd.grad(stored, inputs, weights)
    assert distance(list(torch.autograd.grad(found, inputs, weights)), list(truth)) < 1e-11


def test_the_mean_of_interpolated_outputs_has_the_gradient_of_autograd():
    times = [0.0, 0.11, 0.22, 1.0]
    how = {"solver": tm.Dopri5(), "controller": tm.AdaptiveStep(1e-3, 1e-4), "outputs": MeanOutput(len(times))}
    truth = gradients(MLP(), batch(), times, gradient=tm.Naive(), **how)
    assert distance(gradients(MLP(), batch(), times, gradient=tm.ACA(), **how), truth) < 1e-12


def test_the_adjoint_takes_new_outputs_too():
    outputs, f, y0 = MeanOutput(len(TIMES)), MLP(), batch().requires_grad_()
    how = {"controller": tm.FixedStep(0.01), "outputs": outputs}
    found, truth = (
        torch.autograd.grad(tm.solve(f, y0, TIMES, gradient=gradient, **how).y.square().sum(), y0)
        for gradient in (tm.Adjoint(), tm.Naive())
    )
    assert distance(list(found), list(truth)) < 1e-3


def test_one_outputs_object_serves_for_many_solves():
    outputs, f, y0 = MeanOutput(len(TIMES)), MLP(), batch()
    first, second = (tm.solve(f, y0, TIMES, outputs=outputs).y for _ in range(2))
    assert torch.equal(first, second)
    assert outputs.total == ()


@pytest.mark.parametrize("outputs", [MeanOutput, "mean", lambda k, t, z: z], ids=["class", "text", "function"])
def test_outputs_must_be_an_object_of_outputs(outputs):
    with pytest.raises(tm.InvalidOptionError, match="is not an Outputs"):
        tm.solve(MLP(), batch(), TIMES, outputs=outputs)


def test_observe_and_outputs_exclude_each_other():
    with pytest.raises(tm.InvalidOptionError, match="give one of the two"):
        tm.solve(MLP(), batch(), TIMES, outputs=MeanOutput(3), observe=lambda t, y: y.sum())


@pytest.mark.parametrize("gradient", [tm.MALI(), tm.ACA(), tm.Naive()], ids=str)
def test_results_of_new_outputs_are_freed_with_the_solution(gradient: tm.GradientMethod):
    """Without the garbage collector: the backward pass must not hold the object that holds the results."""
    solution = tm.solve(MLP(), batch().requires_grad_(), TIMES, outputs=MeanOutput(len(TIMES)), gradient=gradient)
    result = weakref.ref(solution.y)
    gc.collect()
    gc.disable()
    try:
        del solution
        assert result() is None
    finally:
        gc.enable()


def test_steps_that_exact_mode_takes_back_are_recorded_once():
    y0, times = torch.ones(4), torch.linspace(0, 2, 41).tolist()
    how = {"controller": tm.FixedStep(0.05), "gradient": tm.MALI(exact=True)}
    stored = tm.solve(lambda t, y: 8 * y, y0, times, **how)
    found = tm.solve(lambda t, y: 8 * y, y0, times, outputs=MeanOutput(len(times)), **how)
    assert stored.stats.n_rescales > 0
    torch.testing.assert_close(found.y, stored.y.mean(0))
