"""Solves with their tape, and what is rebuilt from it: states by the solver's inverse, the discrete gradient.

The only module of the experiments that reads a tape of torchmali's core. MALI's own backward pass is in
torchmali.gradients; here every rebuilt state is kept beside the one of the forward pass, to measure the difference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchmali as tm
from experiments.theory.problems import Problem
from torchmali.engine import (
    FixedPointArithmetic,
    Floats,
    Refresh,
    RewindableState,
    State,
    Step,
    Structure,
    Tape,
    Traced,
    integrate,
    rewind,
)


def is_exact(gradient: tm.GradientMethod) -> bool:
    """Tell whether a gradient method solves on integers."""
    return isinstance(gradient, tm.MALI) and bool(gradient.exact)


def arithmetic_of(gradient: tm.GradientMethod, span: float) -> Any:
    """Return the numbers that a gradient method solves with, for `solve_forward`."""
    return FixedPointArithmetic(span) if is_exact(gradient) else Floats


def solve_forward(
    problem: Problem, solver: tm.Solver, controller: tm.StepController, arithmetic: Any = Floats
) -> tuple[State, Tape]:
    """Return the end state, and a tape with all states on it."""
    controller = controller.bind(Structure.of(problem.z0))
    tape, times = Tape(keep_every=1, rewinds=True), (0.0, problem.span)
    with torch.no_grad():
        done = integrate(problem.slope, (problem.z0,), times, solver, controller, arithmetic=arithmetic, tape=tape)
    return done.state, done.tape


class Rebuilt(NamedTuple):
    """A state at the start of a step: z rebuilt by the inverse, and z of the forward pass."""

    t: Any
    z: Tensor
    original: Tensor


def rebuild(problem: Problem, solver: tm.ReversibleSolver, end: State, tape: Tape) -> list[Rebuilt]:
    """Rebuild the states from the end state, step by step, from last to first.

    As in MALI's backward pass, a refresh of v restores the state that was kept before it.
    """
    assert isinstance(end, RewindableState)
    found = []

    def undo_step(step: Step, state: RewindableState) -> State:
        assert step.before is not None
        before = solver.inverse(problem.slope, step.t0, step.t1, state)
        found.append(Rebuilt(step.t0, before.point[0], state.restore(tape.kept[step.before]).point[0]))
        return before

    with torch.no_grad():
        rewind(tape.events, tape.kept, end, undo_step)
    return found


def replayed_gradient(problem: Problem, solver: tm.Solver, tape: Tape) -> Tensor:
    """d(sum z(T)^2)/d(z0, theta) of the steps on a tape, by autograd through all of them, as one vector."""
    inputs = [x.detach().clone().requires_grad_() for x in (problem.z0, *problem.theta)]
    f = problem._replace(theta=tuple(inputs[1:])).slope
    state, _ = solver.start(f, 0.0, (inputs[0],), Traced)
    for event in tape.events:
        if isinstance(event, Refresh):
            assert isinstance(solver, tm.Leapfrog)
            state = solver.refreshed(f, event.t, state)
        elif isinstance(event, Step):
            state = solver.step(f, event.t0, event.t1, state, None, adaptive=False).state
    return torch.cat([g.flatten() for g in torch.autograd.grad((state.point[0] ** 2).sum(), inputs)])


class Interval(NamedTuple):
    """An accepted step from t0 to t1; v was renewed before it where `refreshed` says so."""

    t0: float
    t1: float
    refreshed: bool


def accepted_steps(tape: Tape) -> list[Interval]:
    """Return the accepted steps in order."""
    steps, refreshed = [], True  # v0 is made at the start
    for event in tape.events:
        if isinstance(event, Refresh):
            refreshed = True
        elif isinstance(event, Step):
            steps.append(Interval(event.t0, event.t1, refreshed))
            refreshed = False
    return steps


def refresh_times(tape: Tape) -> list[Any]:
    """Return the times at which v was renewed; the evaluation of v0 does not count."""
    return [event.t for event in tape.events if isinstance(event, Refresh)]


def relative(x: Tensor, truth: Tensor) -> float:
    return float((x - truth).norm() / truth.norm())
