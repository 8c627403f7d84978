"""What a solver is: a value that takes steps, and undoes and differentiates them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchmali.field.evaluate import Field
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time

Slope = Callable[[Time, Tensors], Tensors]  # f on leaves


class Attempt(NamedTuple):
    """A step that the controller has yet to accept."""

    state: State
    error: Tensors | None  # estimated error of z, where the controller asked for it
    carry: Tensors | None  # what this step leaves for the next one (f at its end)
    stages: Sequence[Tensors] = ()  # what an interpolant is made of
    residuals: Sequence[Sequence[Tensor]] = ()  # f - v at one or two reflects, where it was asked for (watch.py)


class Cotangent:
    """a = dL/d(z, v) and what has been summed up on the way back. Worked on in place."""

    def __init__(
        self,
        z: Sequence[Tensor],
        v: Sequence[Tensor],
        theta: Sequence[Tensor | None],
        observer: Sequence[Tensor | None],
        times: Sequence[Time],
    ):
        self.z, self.v = list(z), list(v)
        # dL/dz and dL/dtheta; None until f is seen to depend on it.
        self.sums: list = [*self.z, *theta]
        self.observer = list(observer)  # dL/d(parameters of the observer)
        self.times = list(times)  # dL/dt of the output times
        self.t0: Time = 0.0  # dL/dt0 and dL/dt1 of the step that was pulled back last,
        self.t1: Time = 0.0
        self.inside: Sequence[Time] = ()  # and dL/dt of the outputs inside it
        self.is_new = False  # nothing has been pulled back yet

    @staticmethod
    def zero(state: State, n_theta: int, n_observer: int, n_times: int) -> Cotangent:
        z, v = ([torch.zeros_like(x) for x in leaves] for leaves in (state.point, state.slope))
        a = Cotangent(z, v, [None] * n_theta, [None] * n_observer, [0.0] * n_times)
        a.is_new = True
        return a

    @property
    def theta(self) -> list:
        return self.sums[len(self.z) :]

    def set_aside(self) -> Cotangent:
        """A copy from which to try again. It takes the sums of parameters along: here they begin anew."""
        z, v = ([x.clone() for x in leaves] for leaves in (self.z, self.v))
        copy = Cotangent(z, v, self.theta, self.observer, self.times)
        self.sums = [*self.z, *[None] * len(self.theta)]
        self.observer = [None] * len(self.observer)
        return copy

    def take_back(self, copy: Cotangent) -> None:
        """Add the sums of parameters that were set aside."""
        accumulate(self.sums, [*[None] * len(self.z), *copy.theta])
        accumulate(self.observer, copy.observer)


def followed(times: Sequence[float], z: Tensors) -> list[Tensor]:
    """Times for autograd to follow, next to the state z that they are multiplied with.

    The product of a time on the host and a state on a device would send the gradient of the time to the host: a wait
    for each product. Where there is no such place (a state on several devices, MPS without float64) it is the host.
    """
    devices = {x.device for x in z}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    device = torch.device("cpu") if device.type == "mps" else device
    return [torch.full((), t, dtype=torch.float64, device=device, requires_grad=True) for t in times]


def accumulate(total: list, grads: Any, scale: float = 1.0) -> None:
    """total += scale * grads, with gaps in both. Keeps no tensor of grads: it may be shared."""
    if not grads:
        return
    try:
        torch._foreach_add_(total, grads, alpha=scale)
    except TypeError:  # there is a gap
        for i, g in enumerate(grads):
            if g is not None:
                total[i] = g * scale if total[i] is None else total[i].add_(g, alpha=scale)


class Inside(NamedTuple):
    """An output read from the interpolant of a step."""

    k: int
    t: Any
    pull: Callable[[Tensors], Sequence[Tensor | None]]  # from y to dL/dy


class Passed(NamedTuple):
    """A step as the backward walk meets it."""

    t0: Any
    t1: Any
    before: State | None  # the state at t0, where the tape kept it
    inside: Sequence[Inside]
    compares: bool  # someone looks at how well the returned state meets `before`


def missed_by(before: State, reached: State, led: State) -> State:
    """`before`, shifted by how far the state at the end of a step is from where the step from `before` leads.

    The backward pass may have reached that end by inverting later steps, or f may have become another function.
    """
    point, slope = (
        tuple(x + (y - z) for x, y, z in zip(*leaves, strict=True))
        for leaves in ((before.point, reached.point, led.point), (before.slope, reached.slope, led.slope))
    )
    return before.of(point).with_slope(slope)


class Solver(ABC):
    """A one-step method. An immutable value: two solves never influence each other."""

    interpolates: ClassVar[bool]  # it has an interpolant as accurate as its steps
    refresh_policy: str | int = "never"  # when v is renewed: "auto", "never", or every so many steps
    n_reflects: int = 0  # in a step

    @property
    @abstractmethod
    def order(self) -> int:
        """p in global error = O(h^p)."""

    @property
    @abstractmethod
    def error_order(self) -> int | None:
        """q in error = O(h^q) of the estimate; None: there is none."""

    @abstractmethod
    def start(self, f: Slope, t0: Time, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        """The first state, arithmetic.of(z0) with its v, and the carry, from one evaluation of f."""

    def refresh_slope(self, f: Slope, t: Time, state: State, carry: Tensors | None) -> State:
        """v anew from z, as `start` makes it."""
        raise AssertionError("a solver without v has nothing to refresh")

    def pull_refresh(self, f: Field, t: Time, state: State, a: Cotangent) -> tuple[State, Time | None]:
        """Take `a` from behind a refresh to before it; the renewed state and dL/dt."""
        raise AssertionError("a solver without v has nothing to refresh")

    def scale_of_v(self, span: float) -> float:
        """What turns v into a change of z over a time."""
        return abs(span)

    @abstractmethod
    def slope(self, state: State, carry: Tensors | None) -> Tensors:
        """f at the start of a solve, from what `start` returned."""

    @abstractmethod
    def step(
        self,
        f: Slope,
        t0: Time,
        t1: Time,
        state: State,
        carry: Tensors | None,
        adaptive: bool,
        with_residuals: bool = False,
    ) -> Attempt:
        """psi over [t0, t1]; leaves `state` as it is. adaptive: with an error estimate. watched: with evidence."""

    def interpolate(
        self, f: Slope, t0: Time, t1: Time, state: State, attempt: Attempt, times: Sequence[Time]
    ) -> tuple[list[Tensors], Tensors | None]:
        """z at times inside the step from `state` to `attempt`, and the carry for the next step."""
        raise AssertionError("steps of a solver without an interpolant land on output times")

    @abstractmethod
    def pullback(self, f: Field, step: Passed, state: State, a: Cotangent) -> State:
        """Take `a` from the end of a step, where `state` is, to its start; return the state there.

        A step whose start was kept is differentiated from that start, and the state returned is the kept one (where
        `step.compares`, `missed_by`). Works in place on `state` and `a`; leaves dL/dt0 and dL/dt1 of the step in `a`.
        """


class ReversibleSolver(Solver):
    """A solver whose step is a bijection: `pullback` needs no kept states."""

    @abstractmethod
    def inverse(self, f: Slope, t0: Time, t1: Time, state: State) -> State:
        """psi^-1: the state at t0 from the state at t1 (which is left as it is)."""

    @property
    @abstractmethod
    def amplification(self) -> float:
        """How much the inverse of one step amplifies round-off of v, whatever f is."""

    @property
    @abstractmethod
    def is_exact_on_integers(self) -> bool:
        """Whether each of its moves adds a function of one half of the state to the other: exact on integers."""
