"""Plain autograd through the solver's own operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torchmali.gradients.base import GradientMethod, Problem, Solved, solve_forward
from torchmali.state.traced import Traced


@dataclass(frozen=True)
class Naive(GradientMethod):
    """Plain backpropagation through the accepted steps: exact, in memory of all their graphs.

    The search for step sizes is not differentiated. `through_search=True` keeps rejected attempts and the dependence of
    h on the state in the graph, as the paper describes the naive method: deeper, larger, and no more right.
    Differentiable any number of times.
    """

    through_search: bool = False
    obstacle_to_dense: ClassVar[str | None] = None

    def solve(self, problem: Problem) -> Solved:
        times: list[Any] = problem.times
        if problem.t is not None or self.through_search:
            # On the host: deciding where to step must not wait for a device.
            t = torch.tensor(times, dtype=torch.float64) if problem.t is None else problem.t.to("cpu", torch.float64)
            times = list(t.unbind())
        return solve_forward(problem, problem.z0, times, arithmetic=Traced, through_search=self.through_search)
