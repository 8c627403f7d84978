"""Solves with their tape, and what is rebuilt from it: states by the solver's inverse, the discrete gradient.

The only module of the experiments that reads a tape of torchmali's core. MALI's own backward pass is in
torchmali.gradients; here every rebuilt state is kept beside the one of the forward pass, to measure the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchmali as tm
from experiments._core import Floats, Refresh, Rescale, State, Step, Structure, Tape, Traced, integrate
from experiments.theory.problems import Problem


def is_exact(gradient: tm.GradientMethod) -> bool:
    """Tell whether a gradient method solves on integers."""
    return isinstance(gradient, tm.MALI) and bool(gradient.exact)


def arithmetic_of(gradient: tm.GradientMethod, span: float) -> Any:
    """Return the numbers that a gradient method solves with, for `solve_forward`."""
    return gradient.arithmetic(span) if isinstance(gradient, tm.MALI) else Floats


def solve_forward(
    problem: Problem, solver: tm.Solver, controller: tm.StepController, arithmetic: Any = Floats
) -> tuple[State, Tape]:
    """Return the end state, and a tape with all states on it."""
    controller = controller.bind(Structure.of(problem.z0))
    tape, times = Tape(keep_every=1, rewinds=True), (0.0, problem.span)
    with torch.no_grad():
        return integrate(
            problem.slope, (problem.z0,), times, solver, controller, lambda k, z: None, tm.Stats(),
            arithmetic=arithmetic, tape=tape,
        )  # fmt: skip


class Rebuilt(NamedTuple):
    """A state at the start of a step: z rebuilt by the inverse, and z of the forward pass."""

    t: Any
    z: Tensor
    original: Tensor


def rebuild(problem: Problem, solver: tm.ReversibleSolver, end: State, tape: Tape) -> Iterator[Rebuilt]:
    """Rebuild the states from the end state, step by step, from last to first.

    As in MALI's backward pass, a refresh of v restores the state that was kept before it.
    """
    state = end
    with torch.no_grad():
        for event in reversed(tape.events):
            if isinstance(event, Step):
                assert event.before is not None
                state = solver.inverse(problem.slope, event.t0, event.t1, state)
                yield Rebuilt(event.t0, state.point[0], type(end).restore(tape.kept[event.before]).point[0])
            elif isinstance(event, Rescale):
                assert event.lost is not None
                state = state.unscaled(event.change, tape.kept[event.lost])
            elif isinstance(event, Refresh) and event.before is not None:
                state = state.back_to(tape.kept[event.before])


def replayed_gradient(problem: Problem, solver: tm.Solver, tape: Tape) -> Tensor:
    """d(sum z(T)^2)/d(z0, theta) of the steps on a tape, by autograd through all of them, as one vector."""
    inputs = [x.detach().clone().requires_grad_() for x in (problem.z0, *problem.theta)]
    f, state = problem._replace(theta=tuple(inputs[1:])).slope, Traced.of((inputs[0],))
    for event in tape.events:
        if isinstance(event, Refresh):
            state = solver.renew(f, event.t, state, None)
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
    steps, refreshed = [], False
    for event in tape.events:
        if isinstance(event, Refresh):
            refreshed = True
        elif isinstance(event, Step):
            steps.append(Interval(event.t0, event.t1, refreshed))
            refreshed = False
    return steps


def refresh_times(tape: Tape) -> list[Any]:
    """Return the times at which v was renewed; the evaluation of v0 does not count."""
    return [event.t for event in tape.events if isinstance(event, Refresh)][1:]


def relative(x: Tensor, truth: Tensor) -> float:
    return float((x - truth).norm() / truth.norm())
