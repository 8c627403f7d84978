"""ODE-RNN: a recurrent network whose state follows an ODE between observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from torchmali.compiled.in_graph import like_state
from torchmali.controllers import FixedStep, StepController
from torchmali.errors import InvalidStateError, InvalidTimesError
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.nn.base import SolveModule
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF


class ODERNNCell(SolveModule):
    """One step of an ODE-RNN: h moves from t0 to t1 by dh/dt = func(t, h), then becomes cell(x, h).

    t0, t1: two times for all rows, or tensors of shape (batch,) with those of each row: then func receives t of shape
    (batch, 1), see `solve(spans="own")`.

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
        found = self.in_graph(_leaves, _likes, h, t0, t1)
        h = self._moved(h, t0, t1) if found is None else found[0]
        if observed is None:
            return self.cell(x, h)
        if observed.dtype != torch.bool or observed.shape != x.shape[:1]:
            raise InvalidStateError(
                f"observed must be bool of shape {tuple(x.shape[:1])}; got {observed.dtype} of {tuple(observed.shape)}."
            )
        observed = observed.unsqueeze(-1)
        # Values that were not observed may be nan, and would add 0 * nan to the gradient of the cell.
        return torch.where(observed, self.cell(x.masked_fill(~observed, 0), h), h)

    def _moved(self, h: Tensor, t0: float | Tensor, t1: float | Tensor) -> Tensor:
        """h at t1, before it is updated."""
        if any(isinstance(t, Tensor) and t.ndim > 0 for t in (t0, t1)):
            times = torch.stack(torch.broadcast_tensors(torch.as_tensor(t0), torch.as_tensor(t1)))
            return h if torch.equal(times[0], times[1]) else self.solve(self.func, h, times, spans="own").y[-1]
        return h if t0 == t1 else self.solve(self.func, h, (t0, t1)).y[-1]


def _leaves(cell: ODERNNCell, h: Tensor, t0: float | Tensor, t1: float | Tensor) -> tuple[Tensor]:
    return (cell._moved(h, t0, t1),)


def _likes(cell: ODERNNCell, h: Tensor, t0: float | Tensor, t1: float | Tensor) -> list[Tensor]:
    return [like_state(h)]


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

        t: (length,), one time per observation for all series, or (batch, length), those of each. Then nan is padding:
        h stays as it is there, x is not read, and the last h is that at the last time of each series (with reverse at
        the first). func receives t of shape (batch, 1).
        """
        self._check_data(x, t, observed)
        if t.ndim == 2:
            observed = _observed_of_each(t, observed)
            times: Sequence[float] | Sequence[Tensor] = _times_of_each(t, reverse)
        else:
            times = self._checked_times(t)
        order = range(len(times))[:: -1 if reverse else 1]
        h, states = h0, []
        for before, i in pairwise((order[0], *order)):
            h = self.cell(x[:, i], h, times[before], times[i], None if observed is None else observed[:, i])
            states.append(h)
        return torch.stack(states[:: -1 if reverse else 1], 1), h

    @staticmethod
    def _check_data(x: Tensor, t: Tensor, observed: Tensor | None) -> None:
        shape = tuple(x.shape)
        if x.ndim != 3 or shape[1] < 1:
            raise InvalidStateError(
                f"x must have shape (batch, length, channels) with a length of 1 or more; got {shape}."
            )
        if t.shape not in (shape[1:2], shape[:2]):
            raise InvalidTimesError(
                f"t has shape {tuple(t.shape)}, but x of shape {shape} needs ({shape[1]},), one time per observation, "
                f"or {shape[:2]}, those of each series."
            )
        if observed is not None:
            what = f"observed must be bool of shape {shape[:2]}, (batch, length); got {observed.dtype} of"
            is_mask = observed.dtype == torch.bool and observed.shape == shape[:2]
            if not is_mask:
                raise InvalidStateError(f"{what} {tuple(observed.shape)}. For a mask of channels: mask.bool().any(-1).")

    @staticmethod
    def _checked_times(t: Tensor) -> list[float] | list[Tensor]:
        times = t.tolist()  # all at once: each read waits for the device
        i = next((i for i, (a, b) in enumerate(pairwise(times)) if not a <= b), -1)
        what = f"t must not decrease: t[{i}] = {times[i]:g}, t[{i + 1}] = {times[i + 1]:g}."
        if i >= 0:
            raise InvalidTimesError(f"{what} Sort it, with x. (To read backwards: reverse=True.)")
        return list(t.unbind()) if t.requires_grad else times


def _observed_of_each(t: Tensor, observed: Tensor | None) -> Tensor | None:
    """Return the mask of what was observed, from times of each series."""
    is_padding = t.isnan().to("cpu")
    if not bool(is_padding.any()):
        return observed
    if observed is None:
        return ~t.isnan()
    wrong = observed.to("cpu") & is_padding
    if bool(wrong.any()):
        b, i = wrong.nonzero()[0].tolist()
        raise InvalidTimesError(f"x[{b}, {i}] is `observed`, but t[{b}, {i}] is nan: give its time, or mask it.")
    return observed


def _times_of_each(t: Tensor, reverse: bool) -> list[Tensor]:
    """Return the times of each series, as `length` tensors (batch,). Padding has the time that was read before it.

    The times are on the host, where `solve` looks at them. Padding before the first time that is read has this time.
    """
    host = t.to("cpu", torch.float64)
    host = host.flip(1) if reverse else host
    is_there = ~host.isnan()
    places = torch.where(is_there, torch.arange(host.shape[1]), -1).cummax(1).values
    first = is_there.int().argmax(1, keepdim=True)
    filled = host.gather(1, torch.where(places < 0, first, places))
    filled = torch.where(is_there.any(1, keepdim=True), filled, 0.0)  # a series without any time
    filled = filled.flip(1) if reverse else filled
    _check_series(filled.detach())
    return list(filled.unbind(1))


def _check_series(t: Tensor) -> None:
    if not bool(t.isfinite().all()):
        raise InvalidTimesError("t must be finite; use nan, and no infinity, for padding.")
    falls = (t.diff(dim=1) < 0).nonzero()
    if len(falls):
        b, i = falls[0].tolist()
        raise InvalidTimesError(
            f"t must not decrease along a series: t[{b}, {i}] = {t[b, i].item():g}, t[{b}, {i + 1}] = "
            f"{t[b, i + 1].item():g}. Sort it, with x. (To read backwards: reverse=True.)"
        )
