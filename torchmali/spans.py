"""Samples with a start and an end of their own, solved together in a common time.

    t = t0 + s r,    dy/ds = r f(t, y),    r = (t1 - t0) / S,    s from 0 to S

with t0 and t1 of each sample and S the longest |t1 - t0|: the sample with the longest span keeps its pace, the others
are slower, so that the size of a step means what it means without them. t0 and r are arguments of the scaled f, through
which the times get their gradients. S is a unit and moves with nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from torchmali.errors import IncompatibleError, InvalidOptionError, InvalidTimesError
from torchmali.outputs.per_sample import check_shape, check_sorted
from torchmali.state.vectors import Tensors
from torchmali.tree import Structure


class OwnSpans:
    """Times t of shape (K, B) whose columns each have a start and an end, in the common time s.

    s: the times in common time, nan where t is. longest: S. line: t0 and r of each sample, (2, B), as f needs them.
    Autograd follows s and `line`.
    """

    def __init__(self, t: Tensor, z0: Tensors, dtype: torch.dtype):
        """dtype: that in which f receives t."""
        check_shape(t, z0)
        host = t.to("cpu", torch.float64)
        last = last_rows(host)
        _check_values(host.detach(), last, t.requires_grad)
        # Padding is filled before it is divided: its nan would reach the gradient of every time of its sample.
        self.has_output = ~host.isnan()
        filled = torch.where(self.has_output, host, host[0])
        start, end = filled[0], filled.gather(0, last[None])[0]
        span = end - start
        self.numbers = start.detach(), end.detach()
        self.longest = span.detach().abs().max().item() or 1.0
        is_end = torch.arange(len(host)).unsqueeze(1) == last
        is_end[0] = False
        # The end is at S wherever it moves, in a span of length 0 too: dy/dt1 = f comes through r there.
        s = torch.where(is_end, 1.0, (filled - start) / torch.where(span == 0, 1.0, span)) * self.longest
        self.s = torch.where(self.has_output, s, math.nan)
        # One tensor: of two, one that is made from the other would get no gradient as what an observer holds.
        self.line = torch.stack([start, span / self.longest]).to(z0[0].device, dtype)

    @property
    def tightest(self) -> list[float]:
        """Start and end of the sample whose span is shortest beside its times; spans of length 0 do not count."""
        start, end = self.numbers
        size = (end - start).abs() / torch.maximum(start.abs(), end.abs())
        size = torch.where(size > 0, size, math.inf)
        b = int(size.argmin())
        return [start[b].item(), end[b].item()] if bool(size.isfinite().any()) else [0.0, 1.0]

    def slope(self, func: Callable, structure: Structure) -> Callable:
        """The scaled f, as a function of (s, y, line, *args)."""
        return functools.partial(_slope, func, structure)

    def observer(self, observe: Callable) -> Callable:
        """`observe` as a function of s of shape (B,) in place of t."""
        return functools.partial(_observe, observe, self.line)

    def masked(self, y: Tensors) -> Tensors:
        """Leaves of shape (K, B, ...), with nan where t is."""
        if bool(self.has_output.all()):
            return y
        return tuple([torch.where(columns(self.has_output.to(x.device), x.ndim), x, math.nan) for x in y])


def is_of_samples(t: Any) -> TypeGuard[Tensor]:
    """Return whether t holds times of each sample."""
    return isinstance(t, Tensor) and t.ndim == 2


def last_rows(t: Tensor) -> Tensor:
    """Return the row of the last time of each column that is not nan, (B,)."""
    rows = torch.arange(len(t), device=t.device).unsqueeze(1)
    return torch.where(t.isnan(), 0, rows).amax(0)


def ends(t: Tensor) -> Tensor:
    """Return the first and the last time of each column, (2, B)."""
    return torch.stack([t[0], t.gather(0, last_rows(t)[None])[0]])


def columns(x: Tensor, n_dims: int) -> Tensor:
    """Return x with as many dimensions, of size 1 at its end, that there are n_dims."""
    return x.reshape(*x.shape, *[1] * (n_dims - x.ndim))


def _slope(func: Callable, structure: Structure, s: Tensor, y: Any, line: Tensor, *args: Any) -> Any:
    leaves = structure.flatten(y)
    start, rate = line.unbind()
    t = columns(start + s * rate, max(leaf.ndim for leaf in leaves))
    slopes = func(t, y, *args)
    try:
        found = structure.flatten(slopes)
    except ValueError:
        return slopes  # it is refused as that of any f
    return structure.rebuild([_scaled(u, leaf, rate) for u, leaf in zip(found, leaves, strict=True)])


def _scaled(u: Any, leaf: Tensor, rate: Tensor) -> Any:
    """A slope in common time; one that is not like its leaf as it is, to be refused as that of any f."""
    if not isinstance(u, Tensor) or u.shape != leaf.shape:
        return u
    is_cast = u.dtype != leaf.dtype and u.is_floating_point() and torch.is_autocast_enabled(u.device.type)
    if u.dtype != leaf.dtype and not is_cast:
        return u
    return u.to(leaf.dtype) * columns(rate.to(leaf.device, leaf.dtype), leaf.ndim)


def _observe(observe: Callable, line: Tensor, s: Tensor, y: Any, *others: Tensor) -> Tensor:
    start, rate = line.unbind()
    return observe(start + s * rate, y, *others)


def own_spans(spans: str, t: Any, z0: Tensors, dtype: torch.dtype, others: dict[str, bool]) -> OwnSpans:
    """Return the spans of each sample. others: which of the options were given that do not go with them."""
    if spans != "own":
        raise InvalidOptionError(f'spans={spans!r}: "common" (one start for all samples) or "own" (a start of each).')
    if not is_of_samples(t):
        got = f"shape {tuple(t.shape)}" if isinstance(t, Tensor) else f"a {type(t).__name__}"
        raise InvalidTimesError(
            f'spans="own" needs t as a tensor of shape (times, samples), whose first row has the starts; got {got}.'
        )
    given = [name for name, is_given in others.items() if is_given]
    if given:
        raise IncompatibleError(
            f'With spans="own" samples are at different times at the same moment of the solve, where {given[0]}= has '
            "no meaning. Leave it out, or let all samples begin at the same time."
        )
    return OwnSpans(t, z0, dtype)


def _check_values(t: Tensor, last: Tensor, wants_gradient: bool) -> None:
    if not bool(t[0].isfinite().all()):
        b = int((~t[0].isfinite()).int().argmax())
        raise InvalidTimesError(
            f"Each sample needs a start, t[0]; that of sample {b} is {t[0, b].item()}. Leave samples without data out."
        )
    if bool(t.isinf().any()):
        raise InvalidTimesError("t must be finite; use nan, and no infinity, where a sample has no output.")
    end = t.gather(0, last[None])[0]
    check_sorted(t, end < t[0])
    repeats = (end == t[0]) & ((~t[1:].isnan()).sum(0) > 1)
    if wants_gradient and bool(repeats.any()):
        raise InvalidTimesError(
            f"All times of sample {int(repeats.int().argmax())} are its start: in a span of length 0 the gradient of "
            "one output time is known, not those of several. Pad t with nan, or detach it."
        )
