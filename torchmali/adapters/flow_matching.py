"""The `ODESolver` of flow_matching, with exact gradients through all steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchmali.errors import InvalidTimesError
from torchmali.gradients.aca import ACA
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.nn.cnf import ExactTrace, Hutchinson, augmented_slope
from torchmali.solvers.base import ReversibleSolver, Solver
from torchmali.torchdiffeq import SOLVERS, odeint

FROM_NOISE, FROM_DATA = (0.0, 1.0), (1.0, 0.0)


class ODESolver:
    """Solver of a flow model dx/dt = velocity_model(x=x, t=t, **extras), with the calls of flow_matching's `ODESolver`.

        >>> import torch
        >>> from torchmali.adapters.flow_matching import ODESolver  # for: from flow_matching.solver import ODESolver
        >>> solver = ODESolver(lambda x, t, slope: slope * x)
        >>> x_init, slope = torch.ones(2, 3, requires_grad=True), torch.tensor(0.5, requires_grad=True)
        >>> x = solver.sample(x_init, step_size=0.1, method="alf", enable_grad=True, slope=slope)
        >>> x.sum().backward()  # gradients for x_init and slope, in memory that does not grow with the number of steps
        >>> f"{x_init.grad[0, 0].item():.2f}"
        '1.65'

    method: the names of `torchmali.odeint`, among them those of torchdiffeq; "alf" is of order 2 in one evaluation per
    step. gradient: a gradient method; by default `MALI()` where the method has an inverse ("alf", "alf4_5", "alf6_14"),
    and else `ACA()`, which keeps one state for each step. Tensors in extras get gradients if they require them.
    """

    def __init__(self, velocity_model: Callable, gradient: GradientMethod | None = None):
        self.velocity_model, self.gradient = velocity_model, gradient

    def sample(
        self,
        x_init: Tensor,
        step_size: float | None,
        method: str | Solver = "euler",
        atol: float = 1e-5,
        rtol: float = 1e-5,
        time_grid: Tensor | tuple[float, ...] = FROM_NOISE,
        return_intermediates: bool = False,
        enable_grad: bool = False,
        **model_extras: Any,
    ) -> Tensor:
        """Return x at the last time of time_grid, or at all of them.

        step_size: None for adaptive methods; with other methods a step then goes from each time to the next.
        enable_grad: without it there is no gradient, as in flow_matching.
        """
        velocity = partial(_velocity, self.velocity_model)
        times, how = self._how(x_init, step_size, method, atol, rtol, time_grid)
        with torch.set_grad_enabled(enable_grad):
            y = odeint(velocity, x_init, times, args=(model_extras,), **how)
        return y if return_intermediates else y[-1]

    def compute_likelihood(
        self,
        x_1: Tensor,
        log_p0: Callable[[Tensor], Tensor],
        step_size: float | None,
        method: str | Solver = "euler",
        atol: float = 1e-5,
        rtol: float = 1e-5,
        time_grid: Tensor | tuple[float, ...] = FROM_DATA,
        return_intermediates: bool = False,
        exact_divergence: bool = False,
        enable_grad: bool = False,
        **model_extras: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return the source of x_1, at the last time or at all of them, and log p(x_1), (batch,).

        With enable_grad both are differentiable, the divergence too (flow_matching detaches it). exact_divergence: one
        vector-Jacobian product for each dimension, in place of Hutchinson's estimate.
        """
        first, last = float(time_grid[0]), float(time_grid[-1])
        if (first, last) != FROM_DATA:
            raise InvalidTimesError(
                f"time_grid must go from 1 to 0, from data to noise; it goes from {first} to {last}."
            )
        trace = ExactTrace() if exact_divergence else Hutchinson(_signs)
        slope = partial(augmented_slope, partial(_velocity, self.velocity_model), trace, (False, False))
        times, how = self._how(x_1, step_size, method, atol, rtol, time_grid)
        start = x_1, x_1.new_zeros(len(x_1))
        with torch.set_grad_enabled(enable_grad):
            y, log_det = odeint(slope, start, times, args=(trace.draw(x_1.detach()), (model_extras,)), **how)
            log_p = log_p0(y[-1]) + log_det[-1]
        return (y if return_intermediates else y[-1]), log_p

    def _how(
        self, x: Tensor, step_size: float | None, method: str | Solver, atol: float, rtol: float, time_grid: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        times = time_grid.to(x.device) if isinstance(time_grid, Tensor) else torch.tensor(time_grid, device=x.device)
        solver = SOLVERS.get(method) if isinstance(method, str) else method
        inverts = isinstance(solver, ReversibleSolver)
        options = {} if step_size is None else {"step_size": step_size}
        gradient = self.gradient or (MALI() if inverts else ACA())
        return times, {"method": method, "options": options, "atol": atol, "rtol": rtol, "gradient": gradient}


def _velocity(model: Callable, t: Tensor, x: Tensor, extras: dict[str, Any]) -> Tensor:
    return model(x=x, t=t, **extras)


def _signs(x: Tensor) -> Tensor:
    """Draw 1 or -1, with the random numbers of flow_matching."""
    return (torch.randn_like(x) < 0).to(x.dtype) * 2 - 1
