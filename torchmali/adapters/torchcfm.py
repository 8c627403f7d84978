"""The `NeuralODE` with which torchcfm samples (torchdyn's), with exact gradients through all steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchmali.gradients.aca import ACA
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.solvers.base import ReversibleSolver, Solver
from torchmali.torchdiffeq import SOLVERS, odeint


class NeuralODE(nn.Module):
    """Flow dx/dt = vector_field(t, x) with the calls of torchdyn's `NeuralODE` that torchcfm's examples make.

        >>> import torch
        >>> from torchmali.adapters.torchcfm import NeuralODE  # for: from torchdyn.core import NeuralODE
        >>> node = NeuralODE(lambda t, x: torch.sin(x), solver="alf", step_size=0.05)
        >>> node.trajectory(torch.randn(8, 2), t_span=torch.linspace(0, 1, 5)).shape
        torch.Size([5, 8, 2])

    solver: a name that `torchmali.odeint` knows, among them "euler", "midpoint", "rk4", "tsit5" and "dopri5", or a
    solver. step_size: with solvers of fixed steps; None: one step from each time to the next. gradient: by default
    `MALI()` where the solver has an inverse, and else `ACA()`; torchdyn's `sensitivity` is accepted and has no part in
    it. torchcfm's `torch_wrapper(model)` makes a field of (t, x).
    """

    def __init__(
        self,
        vector_field: Callable,
        solver: str | Solver = "tsit5",
        atol: float = 1e-3,
        rtol: float = 1e-3,
        sensitivity: str | None = None,
        *,
        step_size: float | None = None,
        gradient: GradientMethod | None = None,
    ):
        super().__init__()
        self.vf, self.solver, self.atol, self.rtol, self.step_size = vector_field, solver, atol, rtol, step_size
        found = SOLVERS.get(solver) if isinstance(solver, str) else solver
        self.gradient = gradient or (MALI() if isinstance(found, ReversibleSolver) else ACA())

    def trajectory(self, x: Tensor, t_span: Tensor) -> Tensor:
        """Return x at all times, time first."""
        options = {} if self.step_size is None else {"step_size": self.step_size}
        how: Any = {"rtol": self.rtol, "atol": self.atol, "options": options, "gradient": self.gradient}
        return odeint(self.vf, x, t_span, method=self.solver, **how)

    def forward(self, x: Tensor, t_span: Tensor) -> tuple[Tensor, Tensor]:
        return t_span, self.trajectory(x, t_span)
