"""Callbacks, which torchdiffeq finds as attributes of func: at each attempt at a step, and when that is judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.errors import warn
from torchmali.state.vectors import Tensors, Time, number

NAMES = ("callback_step", "callback_accept_step", "callback_reject_step")
State = Callable[[Tensors], Any]  # makes the state that a callback is given from the leaves of a solve


class Callbacks(NamedTuple):
    """Functions of (t0, y0, dt), or None."""

    step: Callable | None = None
    accept: Callable | None = None
    reject: Callable | None = None
    make_state: State = tuple

    def call(self, which: str, t0: Time, t1: Time, z: Tensors) -> None:
        """Call one of them, with the start of a step and its size, as a positive number."""
        callback = getattr(self, which)
        if callback is not None:
            times = [torch.tensor(x, dtype=torch.float64, device=z[0].device) for x in _start_and_size(t0, t1)]
            callback(times[0], self.make_state(tuple([x.clone() for x in z])), times[1])  # z belongs to the solver


def _start_and_size(t0: Time, t1: Time) -> tuple[float, float]:
    return number(t0), abs(number(t1) - number(t0))


NONE = Callbacks()


def callbacks_of(func: Any, kinds: tuple[str, ...], make_state: State, is_adjoint: bool = False) -> Callbacks | None:
    """The callbacks of func; None if it has none. kinds: those that the method supports: step, accept, reject."""
    suffix = "_adjoint" if is_adjoint else ""
    found = {name: x for name in NAMES if (x := getattr(func, name + suffix, None)) is not None}
    known = dict(zip(Callbacks._fields, NAMES, strict=False))
    lost = sorted(set(found) - {known[kind] for kind in kinds})
    if lost:
        warn(f"This method does not support {', '.join(lost)}: {'it is' if len(lost) == 1 else 'they are'} not called.")
    supported = {kind: found[known[kind]] for kind in kinds if known[kind] in found}
    return Callbacks(**supported, make_state=make_state) if supported else None


def tensors_of(make_y: State, n: int) -> State:
    """What an adjoint callback is given: (0, y, a, dL/dtheta, ...), from the leaves of z, of a and of dL/dtheta."""

    def make(x: Tensors) -> tuple[Tensor, ...]:
        return (x[0].new_zeros(()), make_y(x[:n]), make_y(x[n : 2 * n]), *x[2 * n :])

    return make
