"""The cotangents that a backward pass carries from the end of a solve to its start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali._torch import foreach_add_
from torchmali.field.evaluate import Recorded
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time


class EndSlope(NamedTuple):
    """f(t, z), evaluated as the first stage of the step that begins there, and its cotangent.

    It is pulled back with the step that ends there, whose outputs have a share in it.
    """

    recorded: Recorded
    cotangent: list


class Cotangent:
    """a = dL/d(z, v) at the current time, and the gradients summed up so far. Solvers work on it in place.

    sums: dL/dz and dL/dtheta; None until f is seen to depend on a parameter. observer: dL/d(parameters of the
    observer). times: dL/dt of the output times. is_new: nothing has been pulled back yet.
    """

    def __init__(
        self,
        z: Sequence[Tensor],
        v: Sequence[Tensor],
        theta: Sequence[Tensor | None],
        observer: Sequence[Tensor | None],
        times: Sequence[Time],
        is_new: bool = False,
    ):
        self.z, self.v = list(z), list(v)
        self.sums: list = [*self.z, *theta]
        self.observer, self.times, self.is_new = list(observer), list(times), is_new
        self.end_slope: EndSlope | None = None
        # Of the step that is being pulled back: dL/dt0, dL/dt1, and dL/dt of the outputs inside it.
        self._t0: Time = 0.0
        self._t1: Time = 0.0
        self._inside: Sequence[Time] = ()

    @staticmethod
    def zero(state: State, n_theta: int, n_observer: int, n_times: int) -> Cotangent:
        z, v = [torch.zeros_like(x) for x in state.point], [torch.zeros_like(x) for x in state.slope]
        return Cotangent(z, v, [None] * n_theta, [None] * n_observer, [0.0] * n_times, is_new=True)

    @property
    def theta(self) -> list:
        return self.sums[len(self.z) :]

    def replace(self, z: Sequence[Tensor], v: Sequence[Tensor], sums: Mapping[int, Tensor]) -> None:
        """Take other tensors for dL/d(z, v), and for some of the sums, by their places."""
        self.z, self.v = list(z), list(v)
        self.sums[: len(self.z)] = self.z
        for k, g in sums.items():
            self.sums[k] = g

    def add_to_theta(self, grads: Sequence[Tensor | None]) -> None:
        """Add dL/dtheta of one step."""
        accumulate(self.sums, [*[None] * len(self.z), *grads])

    def add_to_times(self, dt0: Time, dt1: Time, inside: Sequence[Time] = ()) -> None:
        """Add to dL/dt0 and dL/dt1 of the step that is being pulled back; inside: dL/dt of the outputs inside it."""
        self._t0, self._t1 = self._t0 + dt0, self._t1 + dt1
        self._inside = inside or self._inside

    def finish_step(self, k0: int | None, k1: int | None, first: int) -> None:
        """Hand the step's dL/dt on to the output times with which its ends move, and begin the next step.

        first: the first output inside the step.
        """
        self.add_to_time(k0, self._t0)
        self.add_to_time(k1, self._t1)
        for k, dt in enumerate(self._inside, first):
            self.add_to_time(k, dt)
        self._t0, self._t1, self._inside = 0.0, 0.0, ()

    def add_to_time(self, k: int | None, dt: Time | None) -> None:
        """Add to dL/dt of an output time; k=None: of a time that does not move."""
        if k is not None and dt is not None:
            self.times[k] = self.times[k] + dt

    def hand_over(self, recorded: Recorded, grads: Sequence[Tensor | None]) -> None:
        """Leave the first stage of a step to the step before; grads: dL/du, None where it is zero."""
        grads = [torch.zeros_like(u) if g is None else g.clone() for u, g in zip(recorded.u, grads, strict=True)]
        self.end_slope = EndSlope(recorded, grads)

    def took_over(self) -> None:
        """What was handed over has been pulled back."""
        self.end_slope = None

    def begun(self) -> None:
        """Something has been pulled back."""
        self.is_new = False

    def set_aside(self) -> Cotangent:
        """A snapshot for a rerun. It takes the sums of parameters along, and those here are reset."""
        z, v = ([x.clone() for x in leaves] for leaves in (self.z, self.v))
        snapshot = Cotangent(z, v, self.theta, self.observer, self.times)
        self.sums = [*self.z, *[None] * len(self.theta)]
        self.observer = [None] * len(self.observer)
        return snapshot

    def take_back(self, snapshot: Cotangent) -> None:
        """Add the sums of parameters that were set aside."""
        self.add_to_theta(snapshot.theta)
        accumulate(self.observer, snapshot.observer)


def accumulate(total: list, grads: Any, scale: float = 1.0) -> None:
    """total += scale * grads, with gaps (None) in both. No tensor of grads is kept: it may be shared."""
    if not grads:
        return
    if len(grads) == 1 and total[0] is not None:  # cheaper than a list of one
        if grads[0] is not None:
            total[0].add_(grads[0], alpha=scale)
        return
    try:
        foreach_add_(total, grads, alpha=scale)
    except TypeError:  # there is a gap
        for i, g in enumerate(grads):
            if g is not None:
                total[i] = g * scale if total[i] is None else total[i].add_(g, alpha=scale)


def followed(times: Sequence[float], z: Tensors) -> list[Tensor]:
    """Times for autograd to follow, on the device of the state z that they are multiplied with.

    The product of a time on the host and a state on a device would send the gradient of the time to the host: a wait
    for each product. If the state has no single device, or one without float64 (MPS), the times are on the host.
    """
    devices = {x.device for x in z}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    device = torch.device("cpu") if device.type == "mps" else device
    return [torch.full((), t, dtype=torch.float64, device=device, requires_grad=True) for t in times]
