"""The adaptive checkpoint adjoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchmali.controllers import StepController
from torchmali.errors import IncompatibleError
from torchmali.gradients.base import Problem
from torchmali.gradients.replay import ReplayGradient
from torchmali.solvers.base import Solver
from torchmali.tape import Tape


@dataclass(frozen=True)
class ACA(ReplayGradient):
    """The exact discrete gradient with any solver, in memory of one state per step.

    The forward pass keeps every accepted state and no graph, the backward pass goes from one kept state to the one
    before. It evaluates every stage of a step once more; it does not repeat the forward solve.
    """

    inverts: ClassVar[bool] = False
    obstacle_to_dense: ClassVar[str | None] = None

    def check(self, solver: Solver, controller: StepController) -> None:
        super().check(solver, controller)
        if solver.remembers_steps:
            raise IncompatibleError(
                f"ACA() differentiates each step by itself, but those of {solver} depend on earlier ones. Use "
                "Naive() or Adjoint(), or a Runge-Kutta solver."
            )

    def tape(self, problem: Problem) -> Tape:
        return Tape(keep_every=1, rewinds=True)
