"""The adaptive checkpoint adjoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchmali.controllers import StepController
from torchmali.errors import IncompatibleError
from torchmali.gradients.base import Problem, Solved
from torchmali.gradients.direct import EagerMoves, KeptMoves, NotDirectError, direct_schedule, solve_directly
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

    def solve(self, problem: Problem) -> Solved:
        schedule = direct_schedule(problem)
        if schedule is None:
            return super().solve(problem)
        try:
            return solve_directly(self, problem, schedule, KeptMoves() if problem.wants_gradient else EagerMoves())
        except NotDirectError:
            return super().solve(problem._replace(field=problem.field.is_restless(), outputs=problem.outputs.again()))

    def tape(self, problem: Problem) -> Tape:
        return Tape(keep_every=1, rewinds=True)
