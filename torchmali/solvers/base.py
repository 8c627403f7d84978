"""What a solver is: an immutable value that takes steps, undoes them and differentiates them.

A new solver needs `order` and `step` (Solver), or `order`, `step` and `inverse` (ReversibleSolver, which MALI needs).
Gradients then come from autograd through one step at a time. docs/extending.md has examples.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchmali.abstract import Abstract
from torchmali.field.evaluate import Field
from torchmali.solvers.cotangent import Cotangent, accumulate, followed
from torchmali.solvers.dense import Interpolant
from torchmali.solvers.interpolation import InnerCotangents, InnerOutputs, interpolated, pull_inner
from torchmali.state.base import State
from torchmali.state.traced import Traced
from torchmali.state.vectors import Tensors, Time

Slope = Callable[[Time, Tensors], Tensors]  # f on leaves
Record = Callable[[int, Callable[[], State]], None]  # gets the number of a step, and what makes the state at its start


class Attempt(NamedTuple):
    """A step that the controller has yet to accept."""

    state: State
    error: Tensors | None = None  # estimated error of z, if the controller asked for it
    carry: Tensors | None = None  # f at the end of the step, if it is known: the next step begins with it
    stages: Sequence[Tensors] = ()  # slopes from which an interpolant is made
    start: Tensors | None = None  # f at the start of the step, if the step evaluated it
    ratio: Tensor | None = None  # the error over the tolerance, if the step has worked it out,
    alternation: Tensor | None = None  # and that of f - v (refresh.py)


class StepBack(NamedTuple):
    """An accepted step as a backward pass meets it."""

    t0: Any
    t1: Any
    before: State | None  # the state at t0, if the tape kept it
    inside: InnerOutputs | None  # outputs that were read from the interpolant of the step
    compares: bool  # the caller will compare the returned state with `before`
    closes: bool = False  # see tape.Step
    hands_over: bool = False  # f(t0, z0) is left to the step before, for whose outputs it is the slope at the end


class Solver(Abstract):
    """A one-step method. An immutable value: two solves never influence each other.

    remembers_steps: its steps depend on earlier ones through the carry, so that none can be repeated by itself.
    """

    remembers_steps: ClassVar[bool] = False

    saved: Sequence[Tensor] = ()  # what it reads beside the state, f's tensors and the fixed arguments

    def with_saved(self, saved: Sequence[Tensor]) -> Solver:
        """This solver for a backward pass, with `saved` as autograd kept it. (Until then it is without it.)"""
        return self

    @property
    @abstractmethod
    def order(self) -> int:
        """p in global error = O(h^p)."""

    @property
    def error_order(self) -> int | None:
        """q in error = O(h^q) of the error estimate; None if the solver has none and cannot take adaptive steps."""
        return None

    @property
    def interpolates(self) -> bool:
        """Whether it has an interpolant as accurate as its steps (an InterpolatingSolver may)."""
        return False

    def start(self, f: Slope, t0: Time, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        """The first state, made by arithmetic.of(z0), and f(t0, z0) if the first step begins with it."""
        return arithmetic.of(z0), None

    def first_slope(self, f: Slope, t0: Time, state: State, carry: Tensors | None) -> Tensors:
        """f(t0, z0), from what `start` returned."""
        return f(t0, state.point) if carry is None else carry

    @abstractmethod
    def step(self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool) -> Attempt:
        """A step over [t0, t1] that leaves `state` as it is. carry: that of the last Attempt. adaptive: with an error.

        Make the new state with state.of(z), or with moves of state.fork(): then it works for every gradient method.
        """

    def pullback(self, f: Field, step: StepBack, state: State, a: Cotangent) -> State:
        """Take `a` from the end of a step, where `state` is, to its start; return the state there.

        A step whose start was kept is differentiated from that start, and the state returned is the kept one (if
        `step.compares`, `shifted_start`). Works in place on `state` and `a`, and adds dL/dt0 and dL/dt1 to `a`.
        """
        assert step.before is not None
        return pull_local_step(self, f, step, step.before, state, a)


class InterpolatingSolver(Solver):
    """A solver with a continuous extension of its steps."""

    @property
    @abstractmethod
    def interpolant(self) -> Interpolant:
        """The weights of the stages inside a step. Its `order`: errors between grid points are O(h^(order + 1))."""

    def interpolant_of(self, closes: bool) -> Interpolant:
        """The interpolant of a step. closes: no step begins with f(t1, z1) after it. Here: it makes no difference."""
        return self.interpolant

    @property
    def shares_end_slope(self) -> bool:
        """Whether the last stage of the interpolant is f(t1, z1), and the other stages do not depend on it.

        The next step begins with it. So it costs no evaluation in the backward pass either, which takes its cotangent
        to the first stage of that step.
        """
        return False

    def step_with_stages(
        self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool
    ) -> Attempt:
        """`step`, whose Attempt has the stages that `inner_stages` needs. Here: every step has them."""
        return self.step(f, t0, t1, state, carry, adaptive)

    def inner_stages(
        self, f: Slope, t0: Time, t1: Time, state: State, attempt: Attempt, closes: bool = False
    ) -> tuple[Sequence[Tensors], Tensors | None]:
        """The slopes to which `interpolant_of(closes)` gives weights, and the carry for the next step."""
        return attempt.stages, attempt.carry

    def interpolate(
        self, f: Slope, t0: Time, t1: Time, state: State, attempt: Attempt, times: Sequence[Time]
    ) -> tuple[Tensors, Tensors | None]:
        """z at times inside the step from `state` to `attempt`, in leaves of shape (len(times), ...), and the carry."""
        stages, carry = self.inner_stages(f, t0, t1, state, attempt)
        return interpolated(self.interpolant, state.point, t0, t1, times, stages), carry


class ReversibleSolver(Solver):
    """A solver whose step is a bijection: MALI rebuilds each state with `inverse` and keeps none."""

    @abstractmethod
    def inverse(self, f: Slope, t0: Time, t1: Time, state: State) -> State:
        """The state at t0 from the state at t1 (which is left as it is)."""

    @property
    def amplification(self) -> float:
        """Factor by which the inverse of one step amplifies round-off, whatever f is."""
        return 1.0

    def pullback(self, f: Field, step: StepBack, state: State, a: Cotangent) -> State:
        """`Solver.pullback`. Here: the inverse, then autograd through the step from there."""
        if step.before is not None:
            return pull_local_step(self, f, step, step.before, state, a)
        with torch.no_grad():
            before = self.inverse(f, step.t0, step.t1, state)
        return pull_local_step(self, f, step._replace(compares=False), before, state, a)


class AugmentedSolver(ReversibleSolver):
    """A reversible solver that carries v beside z and makes the first v from z0."""

    @abstractmethod
    def pull_start(self, f: Field, t: Time, state: State, a: Cotangent) -> tuple[State, Time | None]:
        """Take `a` from (z, v) to z alone, where v was made from z; return the state with that v, and dL/dt."""

    @abstractmethod
    def scale_of_v(self, span: float) -> float:
        """The factor that turns v into a change of z over a time."""


class RunningSolver(ReversibleSolver):
    """A reversible solver that can take several steps in one go.

    joins_steps: whether steps that were taken one by one are taken back in one go, too.
    """

    joins_steps: ClassVar[bool] = False

    @property
    def value(self) -> RunningSolver:
        """The solver as a value that can be remembered: without tensors."""
        return self

    @abstractmethod
    def run(
        self, f: Slope, times: Sequence[Time], state: State, n_observed: int = 0, record: Record | None = None
    ) -> tuple[State, list[Tensors]]:
        """Steps from each time to the next; leaves `state` as it is, and returns the one at the last time.

        record: called at the start of each step. n_observed: for so many of the last steps the numbers by which a
        refresh is decided are collected (see refresh.py) and returned, too.
        """

    @abstractmethod
    def pull_run(self, f: Field, times: Sequence[float], state: State, a: Cotangent) -> State:
        """`pullback` of the steps of a `run`, where dL/dt is not wanted and no outputs lie inside."""


def pull_local_step(solver: Solver, f: Field, step: StepBack, before: State, state: State, a: Cotangent) -> State:
    """`Solver.pullback` by autograd: the step is made once more from `before`, with a graph."""
    z, v = (tuple(x.detach().requires_grad_() for x in leaves) for leaves in (before.point, before.slope))
    first = f.record(step.t0, before.point) if step.hands_over else None
    carry = None if first is None else tuple([u.detach().requires_grad_() for u in first.u])
    t0, t1 = followed((step.t0, step.t1), z) if f.wants_t else (step.t0, step.t1)
    n_evals, local = f.n_evals, Traced(z, v)
    take_step = solver.step
    if step.inside is not None:
        assert isinstance(solver, InterpolatingSolver)
        take_step = solver.step_with_stages
    attempt = take_step(f, t0, t1, local, carry, adaptive=False)
    results: list[Tensor] = [*attempt.state.point, *attempt.state.slope]
    inner, stages = _pull_inside(solver, f, step, (t0, t1), local, attempt, a)
    _pull_end_slope(a, inner)
    grads: list[Tensor | None] = [*a.z, *a.v]
    for stage, of_stage in zip(stages, inner.stages if inner else (), strict=True):
        results += stage if of_stage is not None else ()
        grads += of_stage or ()
    inputs = {"z": z, "v": v, "theta": f.theta, "first": carry or (), "t": [t0, t1] if f.wants_t else []}
    found: Iterator = iter(f.vjp(results, [x for part in inputs.values() for x in part], grads, f.n_evals - n_evals))
    g = {name: list(islice(found, len(part))) for name, part in inputs.items()}
    # A gradient may be the very tensor of `a` (if f does not depend on z), so that `a` must not be cleared before.
    for total, new in zip([*a.z, *a.v], g["z"] + g["v"], strict=True):
        total.zero_() if new is None else total.copy_(new)
    a.add_to_theta(g["theta"])
    if f.wants_t:
        dt0, dt1 = (0.0 if x is None else x for x in g["t"])
        a.add_to_times(dt0, dt1)
    if inner is not None:
        add_inner(a, inner)
    if first is not None:
        a.hand_over(first, g["first"])
    if not step.compares:
        return before
    end = attempt.state.of(tuple(x.detach() for x in attempt.state.point))
    return shifted_start(before, state, end.with_slope(tuple(x.detach() for x in attempt.state.slope)))


def _pull_inside(
    solver: Solver, f: Field, step: StepBack, times: tuple[Time, Time], local: State, attempt: Attempt, a: Cotangent
) -> tuple[InnerCotangents | None, Sequence[Tensors]]:
    """Cotangents of what lies inside a step that was made once more, and the stages to which they belong."""
    if step.inside is None:
        return None, ()
    assert isinstance(solver, InterpolatingSolver)
    if a.end_slope is not None:
        attempt = attempt._replace(stages=[*attempt.stages, a.end_slope.recorded.u])
    stages, _ = solver.inner_stages(f, times[0], times[1], local, attempt, step.closes)
    point, *values = (tuple([x.detach() for x in leaves]) for leaves in (local.point, *stages))
    table = solver.interpolant_of(step.closes)
    return pull_inner(table, point, step.t0, step.t1, values, step.inside, f.wants_t), stages


def _pull_end_slope(a: Cotangent, inner: InnerCotangents | None) -> None:
    """Pull back f at the end of a step, which the step after it has left: with the share of the outputs inside."""
    if a.end_slope is None:
        return
    recorded, of_slope = a.end_slope
    if inner is not None:
        accumulate(of_slope, inner.stages[-1])
    g, g_t = recorded.pull(of_slope)
    accumulate(a.sums, g)
    a.add_to_times(0.0, 0.0 if g_t is None else g_t)
    a.took_over()


def add_inner(a: Cotangent, inner: InnerCotangents) -> None:
    """Add what outputs inside a step contribute at its start, beside their shares in the stages."""
    for total, g in zip(a.z, inner.z, strict=True):
        total += g
    a.add_to_times(inner.t0, inner.t1, inner.times)


def shifted_start(before: State, reached: State, led: State) -> State:
    """`before`, shifted by the difference between the end that was reached and the one to which the step leads.

    The backward pass may have reached that end by inverting later steps, or f may have become another function.
    """
    point, slope = (
        tuple(x + (y - z) for x, y, z in zip(*leaves, strict=True))
        for leaves in ((before.point, reached.point, led.point), (before.slope, reached.slope, led.slope))
    )
    return before.of(point).with_slope(slope)
