"""Outputs inside steps cost no evaluation, are as accurate as the steps, and have the gradient of autograd."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from problems import NOT_CHAOTIC
from torch import Tensor, nn

import torchmali as tm
from examples.extending.new_solver import Verlet
from torchmali.gradients import replay
from torchmali.measure import LiveBytes, peak_bytes
from torchmali.solvers import interpolation

FREE = [tm.AdaptiveStep(1e-4, 1e-5), tm.FixedStep(0.23, land=False)]
LEAPFROGS = [tm.ALF(), tm.ALF(eta=0.9), tm.ALF(order=4), tm.ALF(order=6), tm.ALF(refresh=2), tm.ALF(order=4, refresh=1)]
PAIRS = [
    tm.Reversible(),
    tm.Reversible(tm.Dopri5(), coupling=0.9),
    tm.Reversible(tm.Dopri8()),
    tm.Reversible(tm.Euler(), 1),
]
RUNGE_KUTTA = [tm.HeunEuler(), tm.Bosh3(), tm.Dopri5(), tm.Tsit5(), tm.Dopri8()]
METHODS: list[tm.GradientMethod] = [
    tm.ACA(),
    tm.MALI(),
    tm.MALI(checkpoint_every=3),
    tm.MALI(memory="2kB"),
    tm.MALI(checkpoint_every=None, unsafe_damping=True),
]


class Net(nn.Module):
    """A field on a tree of two leaves that depends on the time and on an argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)).double()

    def forward(self, t: Tensor, y: dict[str, Tensor], w: Tensor) -> dict[str, Tensor]:
        u = self.layers(torch.cat([y["a"], t.expand(5, 1)], 1))
        return {"a": u, "b": w * torch.sin(u.sum() + t) - 0.3 * y["b"]}


class Kicked(Net):
    """The same field with a jump."""

    def forward(self, t: Tensor, y: dict[str, Tensor], w: Tensor) -> dict[str, Tensor]:
        kick = 3.0 * (t > 1.3)
        return {name: u + kick * torch.cos(y[name]) for name, u in super().forward(t, y, w).items()}


def observe(t: Tensor, y: dict[str, Tensor]) -> Tensor:
    return torch.sin(t) * (y["a"] ** 2).sum(1) + y["b"].sum()


def gradients(
    method: tm.GradientMethod, solver: tm.Solver, controller: tm.StepController, times: list[float], **options: Any
) -> tuple[list[Tensor], tm.Stats]:
    net = options.pop("field", Net)()
    y0 = {"a": torch.linspace(-1, 1, 15).double().reshape(5, 3), "b": torch.linspace(0.5, 1, 4).double()}
    t, w = torch.tensor(times, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (*y0.values(), w, *([] if options.pop("fixed_times", False) else [t]))]
    how = {"solver": solver, "controller": controller, "gradient": method, **options}
    solution = tm.solve(net, y0, t, args=(w,), **how)
    outputs = solution.y.values() if solution.observed is None else [solution.observed]
    loss = sum((torch.sin(y) * torch.linspace(-1, 2, y.numel()).double().reshape(y.shape)).sum() for y in outputs)
    assert isinstance(loss, Tensor)
    return list(torch.autograd.grad(loss, [*inputs, *net.parameters()])), solution.stats


def worst(found: list[Tensor], truth: list[Tensor]) -> float:
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(found, truth, strict=True))


MIXED = [0.0, 0.11, 0.12, 0.2, 0.23, 0.46, 0.7, 1.3, 1.31, 2.0]  # some at grid points of FixedStep(0.23)


def fits(solver: tm.Solver, controller: tm.StepController, method: tm.GradientMethod) -> bool:
    try:
        method.check(solver, controller)
    except tm.IncompatibleError:
        return False
    return True


@pytest.mark.parametrize("times", [MIXED, [2.0 - t for t in MIXED]], ids=["forward", "backward"])
@pytest.mark.parametrize("observer", [None, observe], ids=["stored", "observed"])
@pytest.mark.parametrize(
    ("solver", "controller"),
    [
        *((x, y) for x in [*LEAPFROGS, *RUNGE_KUTTA, PAIRS[1]] for y in FREE),
        *((x, FREE[1]) for x in [tm.RK4(), tm.Euler(), *PAIRS]),
    ],
    ids=repr,
)
def test_gradients_of_inner_outputs_are_those_of_autograd(solver, controller, observer, times):
    truth, _ = gradients(tm.Naive(), solver, controller, times, observe=observer)
    is_damped = isinstance(solver, tm.ReversibleSolver) and solver.amplification != 1
    for method in METHODS:
        if fits(solver, controller, method) and not (is_damped and "unsafe" in repr(method)):
            found, _ = gradients(method, solver, controller, times, observe=observer)
            # Between checkpoints of its own choice MALI lets damped steps amplify round-off to 3e-11.
            limit = 1e-10 if is_damped and method == tm.MALI() else 1e-12
            assert worst(found, truth) < limit, method


@pytest.mark.parametrize("times", [MIXED, [2.0 - t for t in MIXED]], ids=["forward", "backward"])
@pytest.mark.parametrize("order", [2, 4, 6])
@pytest.mark.parametrize("controller", FREE, ids=repr)
@pytest.mark.parametrize("observer", [None, observe], ids=["stored", "observed"])
def test_exact_mode_has_the_gradient_of_the_stored_trajectory(order, controller, observer, times):
    solver = tm.ALF(order=order)
    found, _ = gradients(tm.MALI(exact=True), solver, controller, times, observe=observer)
    stored, _ = gradients(tm.MALI(exact=True, checkpoint_every=1), solver, controller, times, observe=observer)
    assert all(map(torch.equal, found, stored))
    # Against floats: the resolution of the grid, which the steps amplify.
    truth, _ = gradients(tm.Naive(), solver, controller, times, observe=observer)
    assert worst(found, truth) < 1e-9


@pytest.mark.parametrize("checkpoint_every", [None, 2])
def test_exact_mode_rebuilds_the_stages_of_steps_within_which_the_grid_changed(checkpoint_every):
    results = []
    for method in (tm.MALI(exact=True, checkpoint_every=checkpoint_every), tm.MALI(exact=True, checkpoint_every=1)):
        y = torch.tensor([1e-3, 1.0, 30.0]).requires_grad_()
        solution = tm.solve(
            lambda t, y: 9 * y,
            y,
            [0.0, 0.3, 0.31, 1.1, 2.0],
            controller=tm.FixedStep(0.5, land=False),
            gradient=method,
            observe=lambda t, y: torch.sin(y).sum() * t,
        )
        assert solution.stats.n_rescales > 0
        results.append(torch.autograd.grad(solution.observed, y)[0])
    assert torch.equal(*results)


def test_a_segment_that_is_solved_again_has_its_inner_outputs():
    """Expansion: what was rebuilt is not trusted, and solved again with more states kept."""
    times, results = torch.linspace(0, 6, 50).tolist(), []
    for method in (tm.MALI(), tm.Naive()):
        y = torch.tensor([1e-3, 2e-3], dtype=torch.float32).requires_grad_()
        solution = tm.solve(
            lambda t, y: torch.stack([4 * y[0] - y[0] ** 3, y[1] - y[0] * y[1]]),
            y,
            times,
            solver=tm.ALF(order=4),
            controller=tm.FixedStep(0.1, land=False),
            gradient=method,
        )
        told = pytest.warns(tm.SolverWarning, match="the gradient is right") if method == tm.MALI() else nullcontext()
        with told:
            (grad,) = torch.autograd.grad(torch.sin(solution.y).sum(), y)
        results.append((grad, solution.stats.n_reruns))
    assert results[0][1] > 0
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=0)


@pytest.mark.parametrize("order", [2, 4, 6])
@pytest.mark.parametrize("observer", [None, lambda t, y: torch.sin(t) * (y**2).sum()], ids=["stored", "observed"])
def test_a_segment_that_is_solved_again_has_the_gradient_of_autograd(observer, order, monkeypatch):
    """By y0 and all times, where no drift is trusted that is larger than round-off of a step."""
    strict = replay.LIMITS[torch.float64]._replace(most=1e-16, some=1e-16, effect=0.0)
    monkeypatch.setitem(replay.LIMITS, torch.float64, strict)
    results = []
    for method in (tm.MALI(), tm.Naive()):
        y = torch.tensor([1e-3, 2e-3], dtype=torch.float64).requires_grad_()
        t = torch.linspace(0, 5, 50).double().requires_grad_()
        solution = tm.solve(
            lambda t, y: torch.stack([4 * y[0] - y[0] ** 3, y[1] - y[0] * y[1]]),
            y,
            t,
            solver=tm.ALF(order=order),
            controller=tm.FixedStep(0.1, land=False),
            gradient=method,
            observe=observer,
        )
        loss = torch.sin(solution.y).sum() if solution.observed is None else solution.observed
        results.append((*torch.autograd.grad(loss, [y, t]), solution.stats.n_reruns))
    (*found, n_reruns), (*truth, _) = results
    assert n_reruns > 0
    assert worst(found, truth) < 1e-12


@pytest.mark.parametrize(
    "options", [{}, {"jumps": [0.7, 1.3]}, {"observe": observe}], ids=["plain", "jumps", "observe"]
)
@pytest.mark.parametrize(
    ("solver", "controller"),
    [
        *((x, FREE[0]) for x in [*LEAPFROGS, *RUNGE_KUTTA[:-1], PAIRS[1]]),
        *((x, FREE[1]) for x in [tm.RK4(), tm.Dopri5(), *PAIRS]),
    ],
    ids=repr,
)
def test_outputs_cost_no_evaluation(solver, controller, options):
    counts = []
    method = tm.MALI() if isinstance(solver, tm.ReversibleSolver) else tm.ACA()
    for n in (2, 10, 100, 1000):
        times = torch.linspace(0, 2, n).tolist()
        _, stats = gradients(method, solver, controller, times, fixed_times=True, **options)
        counts.append((stats.n_steps, stats.n_rejected, stats.n_evals_forward, stats.n_evals_backward, stats.n_vjps))
    assert counts == [counts[0]] * 4


def test_outputs_of_dopri8_cost_four_evaluations_per_step_that_has_any():
    few, *others = (
        (n, gradients(tm.ACA(), tm.Dopri8(), tm.AdaptiveStep(1e-8, 1e-9), torch.linspace(0, 2, n).tolist())[1])
        for n in (2, 4, 10, 100, 1000)
    )
    for n, many in others:
        assert few[1].n_steps == many.n_steps
        most = 4 * min(n - 2, many.n_steps)
        for kind in ("n_evals_forward", "n_evals_backward", "n_vjps"):
            assert 0 < getattr(many, kind) - getattr(few[1], kind) <= most


@pytest.mark.parametrize("times", [MIXED, [2.0 - t for t in MIXED]], ids=["forward", "backward"])
@pytest.mark.parametrize("controller", FREE, ids=repr)
@pytest.mark.parametrize("solver", [tm.ALF(order=4), *RUNGE_KUTTA], ids=repr)
def test_no_slope_is_handed_over_a_jump(solver, controller, times):
    """At jumps the slopes of two steps that meet differ; one jump is an output time."""
    how: Any = {"field": Kicked, "jumps": [0.35, 1.3]}
    truth, _ = gradients(tm.Naive(), solver, controller, times, **how)
    assert worst(gradients(tm.ACA(), solver, controller, times, **how)[0], truth) < 1e-12


@pytest.mark.parametrize("solver", [tm.ALF(order=4), *RUNGE_KUTTA], ids=repr)
def test_outputs_before_an_event_have_the_gradient_of_autograd(solver):
    """The solve ends inside a step, which has outputs and no step after it."""
    results = []
    for method in (tm.ACA(), tm.Naive()):
        y = torch.tensor([1.0, 0.0], dtype=torch.float64).requires_grad_()
        how: Any = {"controller": tm.FixedStep(0.3, land=False), "gradient": method, "event": lambda t, y: y[0]}
        times = torch.linspace(0, 10, 60).tolist()
        solution = tm.solve(lambda t, y: torch.stack([y[1], -torch.sin(y[0])]), y, times, solver=solver, **how)
        assert solution.event_t is not None
        results.append(torch.autograd.grad(torch.sin(solution.y).sum() + solution.event_t, y))
    assert worst(*results) < 1e-12


ACCURACY = {
    tm.ALF(): 3.5,
    tm.ALF(order=4): 3.5,
    tm.ALF(order=4, evals=5): 25.0,  # 20 on logistic growth, where it settles; below 3 on the others
    tm.ALF(order=6): 10.0,
    tm.Dopri8(): 10.0,
    tm.HeunEuler(): 3.5,
    tm.Reversible(tm.Bosh3()): 3.5,
    tm.Reversible(tm.Dopri5()): 20.0,  # and 14 of Dopri5: on y' = y cos t at 1e-6 the grid's error is small by luck
}


@pytest.mark.parametrize("rtol", [1e-3, 1e-4, 1e-5, 1e-6])
@pytest.mark.parametrize(
    ("solver", "ode"),
    # Van der Pol's equation contracts too much for the steps of a pair, with or without outputs.
    [
        (x, ode)
        for x in ACCURACY
        for ode in NOT_CHAOTIC
        if ode.name != "van_der_pol" or not isinstance(x, tm.Reversible)
    ],
    ids=lambda x: repr(x),
)
def test_outputs_between_grid_points_are_as_accurate_as_those_at_them(solver, ode, rtol):
    grid = Grid()
    controller = tm.AdaptiveStep(rtol, rtol / 10, max_steps=100_000)
    how: Any = {"solver": solver, "controller": controller, "gradient": tm.ACA()}
    times = torch.linspace(ode.span[0], ode.span[1], 101).double().tolist()
    between = tm.solve(ode.f, ode.y0, times, **how).y
    at = tm.solve(ode.f, ode.y0, times[:: len(times) - 1], outputs=grid, **how)
    assert at.stats.n_steps == len(Grid.last)
    some = slice(None, None, max(1, len(Grid.last) // 100))  # of thousands: the largest error of some is not larger
    reference: Any = {"solver": tm.Dopri8(), "controller": tm.AdaptiveStep(1e-12, 1e-13, land=True)}
    truth = tm.solve(ode.f, ode.y0, times, gradient=tm.ACA(), **reference).y
    ends = torch.tensor([ode.span[0], *Grid.last[some]], dtype=torch.float64)
    on_grid = tm.solve(ode.f, ode.y0, ends, gradient=tm.ACA(), **reference).y[1:]
    error = (between - truth).abs().max()
    error_at = (torch.stack(Grid.states[some]) - on_grid).abs().max()
    assert error <= ACCURACY[solver] * error_at


class Grid(tm.Outputs):
    """The accepted steps themselves."""

    last: list[float] = []
    states: list[Tensor] = []

    def record(self, k, t, z):
        self.y = tuple(leaf[None] for leaf in z)

    def results(self):
        return self.y

    def pull(self, k, t, z, grads):
        raise NotImplementedError

    def fresh(self):
        Grid.last, Grid.states = [], []
        return Grid()

    def passes_over(self, t1):
        return False

    def accept(self, step):
        Grid.last.append(float(step.t1))
        Grid.states.append(step.end.point[0].clone())
        return super().accept(step)


@pytest.mark.parametrize("n", [2000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_of_observed_outputs_does_not_grow_with_their_number(n):
    net, y0 = nn.Linear(64, 64), torch.randn(64, 64)
    few_times, times = (torch.linspace(0, 1, k).tolist() for k in (200, n))

    def run(times: list[float]) -> None:
        y = y0.clone().requires_grad_()
        how: Any = {"solver": tm.ALF(), "controller": tm.FixedStep(0.5, land=False)}
        solution = tm.solve(lambda t, y: torch.tanh(net(y)), y, times, observe=lambda t, y: (y**2).sum(), **how)
        solution.observed.backward()

    few = peak_bytes(lambda: run(few_times))
    with LiveBytes() as many:  # warm by now
        run(times)
    assert abs(many.peak - few) <= 0.02 * few


def test_naive_gives_second_derivatives_through_inner_outputs():
    y = torch.tensor([1.0, 2.0], dtype=torch.float64).requires_grad_()
    how: Any = {"solver": tm.ALF(), "controller": tm.FixedStep(0.05, land=False), "gradient": tm.Naive()}

    def loss(y: Tensor) -> Tensor:
        return tm.solve(lambda t, y: -(y**2), y, [0.0, 0.52, 1.0], **how).y[1].sum()

    torch.autograd.gradgradcheck(loss, y)


def test_outputs_are_handled_in_chunks(monkeypatch):
    times = torch.linspace(0, 2, 60).tolist()
    truth = gradients(tm.MALI(), tm.ALF(order=4), FREE[0], times)[0]
    monkeypatch.setattr(interpolation, "CHUNK", 7)
    assert worst(gradients(tm.MALI(), tm.ALF(order=4), FREE[0], times)[0], truth) < 1e-13


def test_a_view_of_y_may_be_the_slope():
    """f returns y itself, which the solver moves on in place."""
    times = torch.linspace(0, 1, 23).double()
    for solver in (tm.ALF(order=4), tm.ALF(order=6)):
        y = tm.solve(lambda t, y: y, torch.ones(1).double(), times, solver=solver, controller=tm.AdaptiveStep(1e-6)).y
        torch.testing.assert_close(y[:, 0], times.exp(), rtol=1e-5, atol=0)


def test_fixed_steps_land_unless_they_are_told_not_to():
    times = [0.0, 0.3, 1.0]
    steps = [
        tm.solve(lambda t, y: -y, torch.ones(1), times, controller=tm.FixedStep(0.25, **land)).stats.n_steps
        for land in ({}, {"land": False})
    ]
    assert steps == [5, 4]
    assert repr(tm.FixedStep(0.25)) == "FixedStep(h=0.25)"


@pytest.mark.parametrize(
    ("solver", "n", "order"),
    [(tm.Reversible(tm.Midpoint()), 40, 2), (tm.Reversible(tm.Bosh3()), 20, 3), (tm.Reversible(), 20, 4)],
    ids=repr,
)
def test_errors_of_pairs_between_grid_points_have_the_order_of_their_base(solver, n, order):
    """At the middle of a step, where the interpolant has its own error; y' = cos(t) y."""
    errors = []
    for h in (2 / n, 1 / n):
        times = [0.0, 1.0 + h / 2, 2.0]
        how: Any = {"solver": solver, "controller": tm.FixedStep(h, land=False)}
        y = tm.solve(lambda t, y: torch.cos(t) * y, torch.ones(1).double(), times, **how).y
        errors.append(abs(y[1].item() - math.exp(math.sin(times[1]))))
    assert math.log2(errors[0] / errors[1]) > order - 0.3


def test_a_pair_without_coupling_and_one_with_many_stages():
    """lam = 1 needs no weight for z - y; of Dopri8's interpolants a pair has the one without further stages."""
    assert not any(tm.Reversible(coupling=1).interpolant.rows[-1])
    pair = tm.Reversible(tm.Dopri8())
    assert pair.interpolant.order == 5 and not pair.interpolant.extra and not pair.interpolates
    assert tm.Reversible(tm.Dopri5()).interpolates


def test_a_solver_without_an_interpolant_refuses_free_fixed_steps():
    with pytest.raises(tm.IncompatibleError, match="has none"):
        tm.solve(lambda t, y: -y, torch.ones(1), [0.0, 1.0], solver=Verlet(), controller=tm.FixedStep(0.1, land=False))
