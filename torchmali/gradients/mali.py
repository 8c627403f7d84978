"""MALI: the memory-efficient ALF integrator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from torchmali.controllers import StepController
from torchmali.gradients.base import Problem
from torchmali.gradients.replay import ReplayGradient
from torchmali.solution import Incompatible, require, warn
from torchmali.solvers.base import ReversibleSolver, Solver
from torchmali.state import Tensors

DRIFT_LIMIT = 1e-3  # a reconstruction of z0 worse than this (relative) is warned about


@dataclass(frozen=True)
class MALI(ReplayGradient):
    """Gradients in memory independent of the number of steps (Algorithm 4).

    The forward pass keeps the last state and the grid; the backward pass rebuilds each earlier state with the solver's
    inverse. One evaluation of f per step serves for both the inverse and the vector-Jacobian product. Exact up to
    round-off for undamped ALF; with damping, round-off grows as |1 - 2 eta|**-n_steps (docs/limits.md).
    """

    keep_every: ClassVar[int | None] = None

    def check(self, solver: Solver, controller: StepController) -> None:
        name = type(solver).__name__
        what = f"MALI needs a solver with an inverse, but {name} has none. Use solver=ALF(), or gradient=ACA()."
        require(isinstance(solver, ReversibleSolver), what, Incompatible)
        super().check(solver, controller)

    def judge_forward(self, problem: Problem) -> None:
        solver, n_steps = problem.solver, problem.stats.n_steps
        assert isinstance(solver, ReversibleSolver)
        growth = solver.amplification(n_steps)
        error = growth * max(torch.finfo(z.dtype).eps for z in problem.z0)
        if error > DRIFT_LIMIT:
            warn(
                f"The inverse of {n_steps} damped steps ({solver}) amplifies round-off {growth:.1e} times, to about "
                f"{error:.1e}: the gradient will be wrong. Use eta=1, fewer steps, or gradient=ACA()."
            )

    def judge_backward(self, rebuilt: Tensors, z0: Tensors, z_end: Tensors) -> float:
        error = _relative_distance(rebuilt, z0, z_end)
        if not error <= DRIFT_LIMIT:
            warn(
                f"MALI rebuilt the start of the solve with a relative error of {error:.2g} (limit {DRIFT_LIMIT:g}): "
                "round-off grew on the way back, or f is not the function it was in the forward pass, and the "
                "gradient is about as wrong. Use gradient=ACA(), a float64 state, eta=1, or a shorter time span."
            )
        return error


def _relative_distance(rebuilt: Tensors, z0: Tensors, z_end: Tensors) -> float:
    """|rebuilt - z0| / |z0| of the worst leaf; one that starts at zero is compared with its end. One host read."""
    norms = torch._foreach_norm((*torch._foreach_sub(rebuilt, z0), *z0, *z_end))
    values, n = torch.stack(norms).tolist(), len(z0)
    distances, starts, ends = values[:n], values[n : 2 * n], values[2 * n :]
    return max(d / (s or e or 1.0) for d, s, e in zip(distances, starts, ends, strict=True))
