"""Events: functions g(t, y) whose zeros are looked for during a solve, and their derivatives.

The event time t* solves G(t*, p) = g(t*, y(t*; p)) = 0, where y is the interpolant of the step. By the implicit
function theorem, with y' = dy/dt along the interpolant,

    dt*/dp = -(dG/dp at fixed t*) / (g_t + g_y y')          d/dp y(t*) = dy/dp at fixed t* + y' dt*/dp
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.errors import (
    DoubleBackwardError,
    GrazingEventError,
    InvalidFieldError,
    InvalidOptionError,
    NonFiniteError,
)
from torchmali.solution import short_repr
from torchmali.state.vectors import Tensors
from torchmali.tree import Structure

DIRECTIONS = {"both": (-1.0, 1.0), "up": (-1.0,), "down": (1.0,)}  # signs that g may have before its root
N_SECANTS = 12  # bisections follow: they end after 60 at most


@dataclass(frozen=True, repr=False)
class Event:
    """A function g(t, y, *args) whose sign changes are looked for: `solve(..., event=Event(g))`.

    g returns a tensor of real numbers of any shape, and each of its components may change its sign. direction: "up"
    (from negative to positive, in the order in which the solve meets them), "down", or "both". terminal: the solve ends
    at the first root. Otherwise the roots are recorded and the solve goes on.
    """

    func: Callable
    direction: str = "both"
    terminal: bool = True

    __repr__ = short_repr

    def __post_init__(self):
        if not callable(self.func):
            raise InvalidOptionError(
                f"Event({self.func!r}): give a function of (t, y), as in Event(lambda t, y: y[0]), or a list of Events."
            )
        if self.direction not in DIRECTIONS:
            raise InvalidOptionError(f'Event(direction={self.direction!r}): "both", "up" or "down".')


def events_of(event: Any) -> list[Event]:
    """Return the events that the argument `event` of a solve stands for."""
    parts = list(event) if isinstance(event, (list, tuple)) else [event]
    if not parts:
        raise InvalidOptionError("event=[] has no events: leave it out, or give a function of (t, y).")
    return [part if isinstance(part, Event) else Event(part) for part in parts]


class Root(NamedTuple):
    """A root at which a solve ended."""

    t: float
    event: int  # position in the list of events
    component: int  # position in the flattened value of its function
    slope: Tensors  # dy/dt along the interpolant
    steepness: float  # |dg/dt|, as a mean between the root and the last point at which g was looked at


class EventFunctions:
    """The functions of several events, with their values one after the other in one list.

    time: makes the 0-d tensor that a function gets as t. structure: that of y. args: further arguments.
    """

    def __init__(self, events: Sequence[Event], time: Callable[[Any], Tensor], structure: Structure, args: tuple):
        self.events, self.time, self.structure, self.args = events, time, structure, args
        self.sizes: list[int] | None = None  # numbers of components
        self.eps = 0.0  # the precision of the values

    def values(self, times: Sequence[float], z: Tensors) -> list[list[float]]:
        """The values of all functions at each time, in one host read. z: leaves of shape (len(times), ...)."""
        parts = []
        for i, t in enumerate(times):
            y = tuple([leaf[i] for leaf in z])
            parts.append([self.value(k, self.time(t), y) for k in range(len(self.events))])
        sizes = [x.numel() for x in parts[0]]
        self.sizes = self.sizes or sizes
        if any([x.numel() for x in part] != self.sizes for part in parts):
            raise InvalidFieldError("An event function must return the same shape at all times.")
        flat = [x.detach().reshape(-1) for part in parts for x in part]
        self.eps = max(torch.finfo(x.dtype).eps for x in flat)
        read = torch.cat([x.to(flat[0].device) for x in flat]).tolist()
        n = sum(self.sizes)
        rows = [read[i * n : (i + 1) * n] for i in range(len(times))]
        for t, row in zip(times, rows, strict=True):
            if any(map(math.isnan, row)):
                raise NonFiniteError(f"An event function returned nan at t = {t:.6g}: it has no sign there.")
        return rows

    def value(self, i: int, t: Tensor, z: Tensors) -> Tensor:
        """The value of the i-th function."""
        value = self.events[i].func(t, self.structure.rebuild(z), *self.args)
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        if not is_real:
            got = value.dtype if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise InvalidFieldError(f"An event function must return a tensor of real numbers; got {got}.")
        return value

    def owner(self, i: int) -> tuple[int, int]:
        """The event to which the i-th component of all belongs, and its position there."""
        assert self.sizes is not None
        for k, size in enumerate(self.sizes):
            if i < size:
                return k, i
            i -= size
        raise IndexError(i)


def first_root(phi: Callable[[float], float], a: float, b: float, phi_a: float, phi_b: float) -> float:
    """The root of phi between a and b, to round-off, where phi is positive at a and not at b.

    Secants of the Illinois method, then bisections. If phi is not positive at a (round-off), the result is next to a.
    """
    fa, fb, side = phi_a, phi_b, 0
    n = 0
    while fb != 0:
        middle = a + (b - a) / 2
        if middle in (a, b):
            break
        x = a + (b - a) * (fa / (fa - fb)) if fa > 0 and n < N_SECANTS else middle
        x = x if min(a, b) < x < max(a, b) else middle
        fx, n = phi(x), n + 1
        if fx > 0:
            a, fa, phi_a = x, fx, fx
            fb, side = (fb / 2, 1) if side == 1 else (fb, 1)
        else:
            b, fb, phi_b = x, fx, fx
            fa, side = (fa / 2, -1) if side == -1 else (fa, -1)
    return a if 0 < phi_a < -phi_b else b


def differentiable_root(root: Root, t: Tensor, z: Tensors, functions: EventFunctions) -> tuple[Tensor, Tensors]:
    """The event time and the state there, with their derivatives.

    t: the event time. z: the state there, with the derivatives that it has at a fixed time.
    """
    if not torch.is_grad_enabled():
        return t, z
    value = functions.value(root.event, functions.time(root.t), z).reshape(-1)[root.component]
    if not value.requires_grad:
        return t, z
    slope = _slope_of(root, z, functions)
    event_t = _RootTime.apply(value, t, slope, root)
    shift = event_t - t  # zero, with a derivative
    return event_t, tuple([x + u * shift.to(x) for x, u in zip(z, root.slope, strict=True)])


def _slope_of(root: Root, z: Tensors, functions: EventFunctions) -> Tensor:
    """g_t + g_y y', without a graph."""
    with torch.enable_grad():
        t, *leaves = (x.detach().clone().requires_grad_() for x in (functions.time(root.t), *z))
        value = functions.value(root.event, t, tuple(leaves)).reshape(-1)[root.component]
        if not value.requires_grad:
            return torch.zeros_like(t)
        g_t, *g = torch.autograd.grad(value, [t, *leaves], allow_unused=True)
    slope = torch.zeros_like(t) if g_t is None else g_t
    for x, u in zip(g, root.slope, strict=True):
        slope = slope if x is None else slope + (x * u).sum().to(slope)
    return slope


class _RootTime(torch.autograd.Function):
    """The event time t as a function of the value of g at a fixed time: dt = -dg / slope."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, t: Tensor, slope: Tensor, root: Root) -> Tensor:
        ctx.save_for_backward(value, slope)
        ctx.root = root.t, root.event, root.component, root.steepness
        return t.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (value, slope) = grads, ctx.saved_tensors
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "Event times and the states there have first derivatives only, but backward was called with "
                "create_graph=True."
            )
        t, event, component, usual = ctx.root
        steepness = abs(slope.item())
        # Round-off moves a root by about eps usual / steepness of the time since the last point. Where g is as flat as
        # below, it is another slope there.
        if not steepness > 8 * math.sqrt(torch.finfo(value.dtype).eps) * usual:
            raise GrazingEventError(
                f"Component {component} of event {event} only touches zero at t = {t:.6g}: its slope in time is "
                f"{steepness:.2g} there, {usual:.2g} just before, so that the event time has no derivative. "
                "Use a function that passes through zero, or detach event_t and event_y."
            )
        return -(grad.to(slope) / slope).to(value), None, None, None
