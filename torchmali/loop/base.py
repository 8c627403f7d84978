"""The forward loop (Algorithm 1 of the paper): attempt a step, judge it, commit it, hand out its outputs.

Times are advanced by the h that was used (the paper's listing adds the next one). What has to be read from a device is
collected and read once per step. The loop knows nothing of gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.abstract import Abstract
from torchmali.controllers import AdaptiveControllerState, ControllerState, SolveStart, StepController
from torchmali.errors import InvalidOptionError, NonFiniteError
from torchmali.jumps import Jumps
from torchmali.outputs.base import AcceptedStep, Outputs
from torchmali.refresh import Refresher, RefreshPlan
from torchmali.solution import Stats
from torchmali.solvers.base import Attempt, InterpolatingSolver, RunningSolver, Slope, Solver
from torchmali.solvers.leapfrog import Leapfrog, Residuals
from torchmali.state.base import RewindableState, State
from torchmali.state.traced import Traced
from torchmali.state.vectors import Tensors, Time, first_non_finite, number
from torchmali.tape import Refresh, Rescale, Start, Step, Tape

LOOK_THERE = "Look at f there, use smaller steps, or an adaptive controller."


class SideEffects:
    """What evaluations of f change beside their result, to be undone. Here: nothing."""

    @property
    def eps(self) -> float:
        """The precision in which f computes, if it is coarser than the state's."""
        return 0.0

    def mark(self) -> Any:
        """The present state of what f changes, for `restore`. False (or empty): f changes nothing."""
        return None

    def restore(self, mark: Any) -> None:
        """Undo everything since `mark`."""

    def reject(self, mark: Any) -> None:
        """Undo the evaluations since `mark`: they were those of a step that is not taken."""
        self.restore(mark)


class Job(NamedTuple):
    """What a loop is to solve, and with what."""

    f: Slope
    times: Sequence[Time]
    solver: Solver
    controller: StepController
    outputs: Outputs
    tape: Tape
    side_effects: SideEffects
    through_search: bool = False
    locate: bool = False  # say in which step the solution stopped being finite
    jumps: Jumps | None = None  # times at which f is discontinuous, and the limits of its times: those of f itself


class Integration(NamedTuple):
    """A finished solve."""

    state: State
    tape: Tape
    n_rejected: int

    def stats(self, n_evals: int) -> Stats:
        """The counts of a forward pass."""
        steps = [event for event in self.tape.events if isinstance(event, Step)]
        sizes, kinds = [number(abs(step.t1 - step.t0)) for step in steps], [*map(type, self.tape.events)]
        return Stats(
            n_steps=self.tape.n_steps,
            n_rejected=self.n_rejected,
            n_evals_forward=n_evals,
            n_checkpoints=len(self.tape.checkpoints),
            n_refreshes=kinds.count(Refresh),
            n_rescales=kinds.count(Rescale),
            h_min=min(sizes),
            h_max=max(sizes),
        )


class Measured(NamedTuple):
    """Numbers by which an attempt is judged, before they are read from the device."""

    ratio: Tensor | None  # error over tolerance
    alternation: Tensor | None  # of f - v

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self if x is not None]


class Loop(Abstract):
    """One solve in progress. `advance` makes one attempt."""

    state: State
    carry: Tensors | None
    control: ControllerState
    refresher: Refresher

    def __init__(self, job: Job):
        self.job, self.t = job, job.times[0]
        self.f, self.solver, self.tape, self.outputs = job.f, job.solver, job.tape, job.outputs
        self.side_effects, self.jumps = job.side_effects, job.jumps
        self.is_adaptive, self.n_steps = False, None  # the number of steps, if it is known in advance
        self.alternated_at_the_end = False  # f - v of a short solve, when it was too late for a refresh

    def run(self, z0: Tensors, arithmetic: Any) -> Integration:
        self._begin(z0, arithmetic)
        self.begun()
        while not self.has_ended:
            self.advance()
        return Integration(self.state, self.tape, self.control.n_rejected)

    @property
    def has_ended(self) -> bool:
        """Whether the time is the last output time, or an event has ended the solve."""
        return self.t is self.job.times[-1] or self.outputs.event_at is not None

    @abstractmethod
    def first_state(self, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        """What the solver's `start` returns."""

    @abstractmethod
    def begun(self) -> None:
        """Called before the first attempt."""

    @abstractmethod
    def advance(self) -> None:
        """Attempt one step, and commit it if it is accepted."""

    def _begin(self, z0: Tensors, arithmetic: Any) -> None:
        job, t, times, jumps = self.job, self.t, self.job.times, self.jumps
        self._enter(times[-1])
        mark = self.side_effects.mark()
        self.state, self.carry = self.first_state(z0, arithmetic)
        if self.carry is not None:
            mark = self.side_effects.mark()  # this evaluation is the first stage of the first step
        self.tape.events.append(Start(t))
        first_jump = None if jumps is None else jumps.first_between(t, times[-1])
        start = SolveStart(self.f, job.solver, t, times[-1], self.state, self.carry, job.through_search, first_jump)
        self.control = job.controller.begin(start)
        self.is_adaptive = isinstance(self.control, AdaptiveControllerState)
        self.n_steps = job.controller.n_steps_with_jumps(job.solver, [number(x) for x in times], jumps)
        self.refresher = Refresher(job.solver, self.is_adaptive, self.control.controlled, self.n_steps)
        self.side_effects.restore(mark)
        self.outputs.begin(times, job.controller.ends_on_outputs(job.solver), arithmetic is Traced, jumps)
        self.tape.record_output(0)
        self.outputs.record(0, t, z0)
        if job.locate:
            _raise_if_non_finite(self.state, f"in y0 or in f at the start, t = {number(t):.6g}")

    def next_time(self, t: Time, target: Time) -> Time:
        """The time at which a step from t is to end; target: the next time on which one has to."""
        t1 = self.control.next_time(t, target)
        if t1 is not target and not (t < t1 < target or t > t1 > target):
            self._raise_for_time(t, t1, target)
        return t1

    def target(self) -> Time:
        """The next time on which a step has to end: a jump or an output time."""
        stop = self.job.times[self.outputs.stop]
        jump = None if self.jumps is None else self.jumps.first_between(self.t, stop)
        return stop if jump is None else jump

    def _enter(self, t1: Time) -> None:
        """Let f be evaluated on the side of a jump on which a step from the present time to t1 lies."""
        if self.jumps is not None:
            self.jumps.enter(self.t, t1)

    def _raise_for_time(self, t: Time, t1: Time, target: Time) -> None:
        """A time that is neither the target nor between it and t. Round-off alone may keep it where it is."""
        t, t1, target = number(t), number(t1), number(target)
        if t1 != t:
            raise InvalidOptionError(
                f"{type(self.control).__name__}.next_time({t:.6g}, {target:.6g}) returned {t1:.6g}: it must return its "
                "second argument, or a time between both."
            )

    def attempt(self, t1: Time, plan: RefreshPlan, state: State) -> tuple[Attempt, Residuals]:
        self._enter(t1)
        self.control.attempting(self.t, t1, state)
        how = self.f, self.t, t1, state, self.carry, self.is_adaptive
        looks_inside = self.outputs.looks_inside(self.t, t1)
        if plan.collects:
            return self.refresher.step(*how, looks_inside)
        if looks_inside:
            assert isinstance(self.solver, InterpolatingSolver)
            return self.solver.step_with_stages(*how), []
        return self.solver.step(*how), []

    def measure(self, t1: Time, attempt: Attempt, residuals: Residuals, plan: RefreshPlan) -> Measured:
        ratio = alternation = None
        if isinstance(self.control, AdaptiveControllerState):
            ratio = self.control.error_ratio(self.state, attempt) if attempt.ratio is None else attempt.ratio
        if plan.decides:
            h, found = number(t1 - self.t), attempt.alternation
            eps = self.side_effects.eps
            alternation = self.refresher.alternation(residuals, attempt.state.point, h, eps) if found is None else found
        return Measured(ratio, alternation)

    def accepts(self, t1: Time, attempt: Attempt, measured: Measured, error: float) -> bool:
        """The controller's verdict on an attempt whose error over the tolerance is `error`."""
        if not isinstance(self.control, AdaptiveControllerState) or measured.ratio is None:
            return True
        return self.control.accepts(self.t, t1, attempt, measured.ratio, error)

    def commit(self, t1: Time, attempt: Attempt, residuals: Residuals) -> None:
        """Go on from the end of an accepted attempt."""
        t, before = self.t, self.state
        k0, k1 = self.outputs.ends(t, t1)
        self.tape.step(t, t1, k0, k1, before, self._closes(t1), self._is_joined(t1))
        if self.job.locate:
            _raise_if_non_finite(attempt.state, at(t, t1))
        self.state, self.carry, self.t = attempt.state, attempt.carry, t1
        self.refresher.after_steps(1, residuals)

    def _is_joined(self, t1: Time) -> bool:
        """Whether a step to t1 can be taken back with the one before it."""
        joins = isinstance(self.solver, RunningSolver) and self.solver.joins_steps
        return joins and isinstance(self.tape.events[-1], Step) and not self.outputs.looks_inside(self.t, t1)

    def _closes(self, t1: Time) -> bool:
        """Whether no step begins with the slope at the end of a step to t1 (see tape.Step)."""
        return t1 is self.job.times[-1] or (self.jumps is not None and self.jumps.is_at(t1))

    def hand_out(self, t: Time, before: State, attempt: Attempt) -> None:
        """Outputs inside the last step, which began at t, and at its end."""
        if self.outputs.passes_over(self.t):
            return
        step = AcceptedStep(self.f, self.solver, t, self.t, before, attempt, self.state, self._closes(self.t))
        found = self.outputs.accept(step)
        if self.outputs.event_at is not None:
            self.tape.insert_time(self.outputs.event_at)
        self.tape.events.extend(found)
        self.carry = step.carry

    def refresh_if(self, alternates: bool, plan: RefreshPlan, slope: Tensors | None) -> bool:
        """v <- f(t, z), if the plan or the residuals ask for it; slope: f(t, z), if it is known."""
        if self.has_ended:
            # If the only look there was came with the last step, it is too late for a refresh.
            self.alternated_at_the_end = alternates and self.refresher.n_looks == 1 and not self.is_adaptive
            return False
        if self.jumps is not None and self.jumps.is_at(self.t):
            return self._leave_jump()
        if plan.refreshes or alternates:
            self._refresh(slope)
            return True
        return False

    def _leave_jump(self) -> bool:
        """Forget the slopes from before a jump; whether v was replaced by f on the other side."""
        # The controller goes on with its h. Choosing a new one as at the start spares rejections, but not evaluations.
        self.carry = None
        if isinstance(self.solver, Leapfrog):
            self._enter(self.job.times[-1])
            self._refresh(None)
            return True
        return False

    @abstractmethod
    def new_slope(self, slope: Tensors | None) -> Tensors:
        """f(t, z), for a refresh; slope: its value, if it is known."""

    def _refresh(self, slope: Tensors | None) -> None:
        mark, kept = self.side_effects.mark(), None
        slope = self.new_slope(slope)
        if self.tape.rewinds:
            assert isinstance(self.state, RewindableState)
            kept = self.tape.keep(self.state.snapshot_before_refresh())
        self.tape.events.append(Refresh(self.t, self.outputs.moves_with(self.t), kept))
        self.state = self.refresher.refreshed(self.f, self.t, self.state, slope)
        self.side_effects.restore(mark)


def read(tensors: Sequence[Tensor]) -> list[float]:
    """The values of all tensors, in one host read."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1).tolist() if tensors[0].ndim else [tensors[0].item()]
    return torch.cat([x.detach().reshape(-1).to(tensors[0]) for x in tensors]).tolist()


def at(t0: Time, t1: Time) -> str:
    return f"at t = {number(t1):.6g} (h = {abs(number(t1 - t0)):.3g})"


def _raise_if_non_finite(state: State, where: str) -> None:
    leaf = first_non_finite((*state.point, *state.slope))
    if leaf is not None:
        raise NonFiniteError(
            f"Non-finite values in leaf {leaf % len(state.point)} of the state, first seen {where}. {LOOK_THERE}"
        )
