"""Two new controllers: steps that grow in a fixed ratio, and steps that are halved and doubled."""

from dataclasses import dataclass

import torch
from torch import Tensor

import torchmali as tm
from torchmali.engine import State, Time, number


@dataclass(frozen=True)
class GradedStep(tm.StepController):
    """n steps in each output interval, each `ratio` times as long as the one before."""

    n: int
    ratio: float = 1.0

    def n_steps(self, times: list[float]) -> int:
        return self.n * (len(times) - 1)

    def begin(self, start: tm.SolveStart) -> tm.ControllerState:
        return GradedStepState(self, start)


class GradedStepState(tm.ControllerState):
    """`GradedStep` at work in one solve."""

    def __init__(self, controller: GradedStep, start: tm.SolveStart):
        super().__init__(start)
        sizes = [controller.ratio**i for i in range(controller.n)]
        self.ends = [sum(sizes[: i + 1]) / sum(sizes) for i in range(controller.n)]  # fractions of an interval
        self.target: Time | None = None
        self.start: Time = 0.0
        self.span, self.i = 0.0, 0

    def next_time(self, t: Time, target: Time) -> Time:
        if target is not self.target:  # a new interval begins at t
            self.target, self.start, self.span, self.i = target, t, number(target - t), 0
        self.i += 1
        # `target` itself, not a number equal to it: that is how the loop knows that it has arrived.
        return target if self.i == len(self.ends) else self.start + self.ends[self.i - 1] * self.span


@dataclass(frozen=True)
class HalvingStep(tm.StepController):
    """Steps whose error is at most `tol` in every component: halved where it is larger, doubled where that is safe."""

    tol: float
    h0: float
    adaptive = True

    def begin(self, start: tm.SolveStart) -> tm.ControllerState:
        return HalvingStepState(self, start)


class HalvingStepState(tm.AdaptiveControllerState):
    """`HalvingStep` at work in one solve."""

    def __init__(self, controller: HalvingStep, start: tm.SolveStart):
        super().__init__(start)
        assert start.solver.error_order is not None
        self.tol, self.safe = controller.tol, 0.5 * 2.0**-start.solver.error_order
        self.h = controller.h0 if number(start.t_end) > number(start.t0) else -controller.h0

    def next_time(self, t: Time, target: Time) -> Time:
        return target if abs(number(target - t)) <= abs(self.h) else t + self.h

    def error_ratio(self, before: State, attempt: tm.Attempt) -> Tensor:
        assert attempt.error is not None
        return torch.stack([x.detach().abs().max() for x in attempt.error]).max() / self.tol

    def accepts(self, t0: Time, t1: Time, attempt: tm.Attempt, ratio: Tensor, value: float) -> bool:
        if value <= 1:  # false for nan
            self.h = 2 * self.h if value < self.safe else self.h
            return True
        self.n_rejected += 1
        self.h = number(t1 - t0) / 2
        if number(t0) + self.h == number(t0):
            raise tm.StepUnderflowError(f"At t = {number(t0):.6g} no step has an error of {self.tol:g}: raise tol.")
        return False
