"""ODE-RNN: a recurrent network whose state follows an ODE between observations."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

from torchmali.controllers import FixedStep, StepController
from torchmali.errors import InvalidStateError, InvalidTimesError
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.nn.base import SolveModule
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF


class ODERNNCell(SolveModule):
    """One step of an ODE-RNN: h moves from t0 to t1 by dh/dt = func(t, h), then becomes cell(x, h).

    cell: an nn.GRUCell, or anything else from (x, h) to h. buffers: see `solve`. `last_stats`: see `ODEBlock`.
    """

    def __init__(
        self,
        func: Callable,
        cell: Callable,
        *,
        solver: Solver = ALF(),  # noqa: B008 (solvers, controllers and gradient methods are immutable values)
        controller: StepController = FixedStep(0.25),  # noqa: B008
        gradient: GradientMethod = MALI(),  # noqa: B008
        buffers: str = "update",
    ):
        super().__init__(solver, controller, gradient, buffers)
        self.func, self.cell = func, cell

    def forward(
        self, x: Tensor, h: Tensor, t0: float | Tensor, t1: float | Tensor, observed: Tensor | None = None
    ) -> Tensor:
        """Return h at t1, updated by x. Rows that are not `observed`, (batch,), follow the ODE but are not updated."""
        if t0 != t1:
            h = self.solve(self.func, h, (t0, t1)).y[-1]
        if observed is None:
            return self.cell(x, h)
        if observed.dtype != torch.bool or observed.shape != x.shape[:1]:
            raise InvalidStateError(
                f"observed must be bool of shape {tuple(x.shape[:1])}; got {observed.dtype} of {tuple(observed.shape)}."
            )
        observed = observed.unsqueeze(-1)
        # Values that were not observed may be nan, and would add 0 * nan to the gradient of the cell.
        return torch.where(observed, self.cell(x.masked_fill(~observed, 0), h), h)


class ODERNN(nn.Module):
    """Network that reads a series with an `ODERNNCell`, forwards or backwards in time (Rubanova et al., 2019)."""

    def __init__(self, cell: ODERNNCell):
        super().__init__()
        self.cell = cell

    def forward(
        self, x: Tensor, t: Tensor, h0: Tensor, observed: Tensor | None = None, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return h after each observation, (batch, length, hidden) in the order of x, and the last h, (batch, hidden).

        x: (batch, length, channels). h0: h at the first time that is read. observed: mask (batch, length), true where x
        was observed. reverse: read from the last time to the first, so that the last h is at t[0].
        """
        times = self._checked_times(x, t, observed)
        order = range(len(times))[:: -1 if reverse else 1]
        h, states = h0, []
        for before, i in pairwise((order[0], *order)):
            h = self.cell(x[:, i], h, times[before], times[i], None if observed is None else observed[:, i])
            states.append(h)
        return torch.stack(states[:: -1 if reverse else 1], 1), h

    @staticmethod
    def _checked_times(x: Tensor, t: Tensor, observed: Tensor | None) -> list[float] | list[Tensor]:
        shape = tuple(x.shape)
        if x.ndim != 3 or shape[1] < 1:
            raise InvalidStateError(
                f"x must have shape (batch, length, channels) with a length of 1 or more; got {shape}."
            )
        what = f"t has shape {tuple(t.shape)}, but x of shape {shape} needs ({shape[1]},): one time per observation."
        if t.shape != shape[1:2]:
            raise InvalidTimesError(f"{what} Merge the times of the batch and mark what is `observed`.")
        if observed is not None:
            what = f"observed must be bool of shape {shape[:2]}, (batch, length); got {observed.dtype} of"
            is_mask = observed.dtype == torch.bool and observed.shape == shape[:2]
            if not is_mask:
                raise InvalidStateError(f"{what} {tuple(observed.shape)}. For a mask of channels: mask.bool().any(-1).")
        times = t.tolist()  # all at once: each read waits for the device
        i = next((i for i, (a, b) in enumerate(pairwise(times)) if not a <= b), -1)
        what = f"t must not decrease: t[{i}] = {times[i]:g}, t[{i + 1}] = {times[i + 1]:g}."
        if i >= 0:
            raise InvalidTimesError(f"{what} Sort it, with x. (To read backwards: reverse=True.)")
        return list(t.unbind()) if t.requires_grad else times
