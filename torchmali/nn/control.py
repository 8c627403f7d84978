"""Paths through data, which drive a controlled differential equation.

The coefficients have the layout of torchcde: each library can use those of the other. There is no loop over knots.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from torchmali.abstract import Abstract
from torchmali.errors import InvalidOptionError, InvalidStateError, InvalidTimesError, warn

# Distance in knots beyond which _solve_dominant leaves out the coupling of rows.
MAX_REACH = 128


def linear_coeffs(x: Tensor, t: Tensor | None = None, rectilinear: int | None = None) -> Tensor:
    """Values at the knots, for `LinearControl`: x itself, (..., length, channels), without missing values.

    A nan is a missing value: it is filled linearly between observations, and by the nearest observation before the
    first and after the last. A channel that was never observed is 0. t: the knots, increasing; by default 0, 1, ...,
    length - 1.

    rectilinear: the channel that holds time. Between two knots the path then changes the time first and the other
    channels (their last observation) after, so that it never shows a value that was not yet observed. Such a path has
    2 length - 1 knots, and t, if given, must have as many.
    """
    _check_data(x)
    if rectilinear is not None:
        x = _rectilinear(x, rectilinear)
    return _filled(x, _checked_knots(x, t))


def hermite_cubic_coeffs(x: Tensor, t: Tensor | None = None) -> Tensor:
    """Coefficients of cubic pieces with backward differences, for `CubicControl`: (..., length - 1, 4 channels).

    The slope at a knot is that of the line from the knot before, so the path up to any time needs no later knot than
    the next one. t and missing values: as in `linear_coeffs`.
    """
    _check_data(x)
    t = _checked_knots(x, t)
    x = _filled(x, t)
    h = _spacings(x, t)
    slope = x.diff(dim=-2) / h
    return _pieces(x, h, torch.cat((slope[..., :1, :], slope[..., :-1, :]), -2), slope)


def natural_cubic_coeffs(x: Tensor, t: Tensor | None = None) -> Tensor:
    """Coefficients of the natural cubic spline, for `CubicControl`: (..., length - 1, 4 channels).

    The spline is twice continuously differentiable, without curvature at both ends. Its slopes k at the knots solve

        k[i-1] / h[i-1] + 2 (1 / h[i-1] + 1 / h[i]) k[i] + k[i+1] / h[i] = 3 (dx[i-1] / h[i-1]**2 + dx[i] / h[i]**2)

    where h and dx are the differences of t and x, and terms beyond the ends are left out. t: as in `linear_coeffs`.
    """
    _check_data(x)
    t = _checked_knots(x, t)
    if x.isnan().any():
        raise InvalidStateError(
            "x has missing values (nan), and natural_cubic_coeffs takes none. Fill them first, as in "
            "natural_cubic_coeffs(linear_coeffs(x, t), t); or use hermite_cubic_coeffs, which fills them itself; or "
            "compute the coefficients with torchcde.natural_cubic_coeffs: they have the same layout."
        )
    h = _spacings(x, t)
    steep = 3 * x.diff(dim=-2) / h.square()
    lower, upper = F.pad(1 / h, (0, 0, 1, 0)), F.pad(1 / h, (0, 0, 0, 1))
    right = F.pad(steep, (0, 0, 1, 0)) + F.pad(steep, (0, 0, 0, 1))
    diagonal = 2 * (lower + upper)
    k = _solve_dominant(lower / diagonal, upper / diagonal, right / diagonal)
    return _pieces(x, h, k[..., :-1, :], k[..., 1:, :])


def _solve_dominant(lower: Tensor, upper: Tensor, right: Tensor) -> Tensor:
    """Solve lower[i] k[i-1] + k[i] + upper[i] k[i+1] = right[i] by parallel cyclic reduction along dimension -2.

    Each round inserts the equations of both neighbours into each row, so that rows refer to others twice as far away.
    Each row needs |lower| + |upper| <= 1/2. A round squares this bound, so once rows reach MAX_REACH knots away the
    rest weighs less than 2**-MAX_REACH and is left out.
    """
    reach, n = 1, right.shape[-2]
    while reach < min(n, MAX_REACH):
        diagonal = 1 - lower * _later(upper, reach) - upper * _earlier(lower, reach)
        by_lower, by_upper, old = -lower / diagonal, -upper / diagonal, right
        right = old / diagonal
        # In place, and without zeros at the ends, to save memory: only `right` and `old` are as large as x.
        right[..., reach:, :].addcmul_(by_lower[reach:], old[..., :-reach, :])
        right[..., :-reach, :].addcmul_(by_upper[:-reach], old[..., reach:, :])
        lower, upper = by_lower * _later(lower, reach), by_upper * _earlier(upper, reach)
        reach *= 2
    return right


def _later(x: Tensor, n: int = 1) -> Tensor:
    """x moved by n knots along dimension -2, with zeros before."""
    return F.pad(x[..., :-n, :], (0, 0, n, 0))


def _earlier(x: Tensor, n: int = 1) -> Tensor:
    return F.pad(x[..., n:, :], (0, 0, 0, n))


def _pieces(x: Tensor, h: Tensor, k0: Tensor, k1: Tensor) -> Tensor:
    """The cubics a + b s + c s**2 + d s**3 with slopes k0 and k1 at their ends, as (a, b, 2c, 3d)."""
    slope = x.diff(dim=-2) / h
    two_c = (6 * slope - 4 * k0 - 2 * k1) / h
    three_d = 3 * (k0 + k1 - 2 * slope) / h.square()
    return torch.cat((x[..., :-1, :], k0, two_c, three_d), -1)


def _spacings(x: Tensor, t: Tensor) -> Tensor:
    return t.diff().to(x.dtype).unsqueeze(-1)  # after the difference: t may have more digits than x


def _filled(x: Tensor, t: Tensor) -> Tensor:
    observed = ~x.isnan()
    if bool(observed.all()):
        return x
    n = x.shape[-2]
    index = torch.arange(n, device=x.device).unsqueeze(-1)
    before = torch.where(observed, index, -1).cummax(-2).values
    after = torch.where(observed, index, n).flip(-2).cummin(-2).values.flip(-2)
    # Beyond the first and last observation, the only neighbour stands for both. Without any, the clamps find zeros.
    before, after = torch.where(before < 0, after, before), torch.where(after == n, before, after)
    before, after = before.clamp(max=n - 1), after.clamp(min=0)
    zeroed = x.masked_fill(~observed, 0)
    x0, x1 = zeroed.gather(-2, before), zeroed.gather(-2, after)
    span = torch.where(before == after, 1, t[after] - t[before])
    ratio = (t.unsqueeze(-1) - t[before]) / span
    return torch.where(observed, x, x0 + ratio.to(x.dtype) * (x1 - x0))


def _rectilinear(x: Tensor, channel: int) -> Tensor:
    n, n_channels = x.shape[-2:]
    if not isinstance(channel, int) or not 0 <= channel < n_channels:
        raise InvalidOptionError(
            f"rectilinear={channel!r} must be the index of the channel that holds time, from 0 to {n_channels - 1}."
        )
    observed = ~x.isnan()
    if not observed[..., channel].all():
        raise InvalidStateError(
            f"channel {channel} of x, the time, has missing values (nan). Fill them: the time is always known."
        )
    if not bool(observed[..., 0, :].all()):
        warn(
            "x begins with missing values (nan), which are filled by the first observation: up to there the "
            "rectilinear path shows what was not yet observed. Give the first row values, such as the channels' means."
        )
    index = torch.arange(n, device=x.device).unsqueeze(-1)
    last = torch.where(observed, index, 0).cummax(-2).values
    corner = torch.arange(2 * n - 1, device=x.device)
    values = x.gather(-2, last).index_select(-2, corner // 2)
    times = x.index_select(-2, (corner + 1) // 2)
    return torch.where(torch.arange(n_channels, device=x.device) == channel, times, values)


def _check_data(x: Tensor) -> None:
    kind = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        raise InvalidStateError(
            f"x must be a tensor of float32 or float64 numbers; got {kind}. Convert it, as in x.float()."
        )
    if x.ndim < 2:
        raise InvalidStateError(
            f"x has shape {tuple(x.shape)}, but needs a dimension for time and one for channels: (..., length, "
            "channels). For a single channel: x.unsqueeze(-1)."
        )


def _checked_knots(x: Tensor, t: Tensor | None) -> Tensor:
    if t is None:
        return _knots(x, x.shape[-2], None)
    t = _knots(x, x.shape[-2], t)
    check_increasing(t)
    return t


def check_increasing(knots: Tensor) -> None:
    """Raise if the knots do not increase; waits for the device."""
    if not (knots.diff() > 0).all():
        i = int((knots.diff() > 0).int().argmin())
        pair = f"knot {i} is {knots[i].item():g}, knot {i + 1} is {knots[i + 1].item():g}"
        raise InvalidTimesError(f"the knots must increase: {pair}. Sort them, with their data, and drop doubles.")


def _knots(like: Tensor, n: int, knots: Tensor | None) -> Tensor:
    """Return the n knots of a path on the device of its data, without waiting for the device."""
    what = f"a path needs 2 or more knots; the data of shape {tuple(like.shape)} has {n}."
    if n < 2:
        raise InvalidTimesError(f"{what} Give data of a longer time, or repeat the only observation.")
    if knots is None:
        return torch.arange(n, dtype=like.dtype, device=like.device)
    kind = str(knots.dtype) if isinstance(knots, Tensor) else type(knots).__name__
    if not isinstance(knots, Tensor) or not knots.is_floating_point():
        raise InvalidTimesError(
            f"the knots must be a tensor of floating-point numbers; got {kind}. Convert them, as in torch.tensor(t)."
        )
    if knots.shape != (n,):
        raise InvalidTimesError(
            f"the knots have shape {tuple(knots.shape)}, but data of shape {tuple(like.shape)} needs ({n},): one time "
            "per knot, the same for all series of the batch."
        )
    return knots.to(like.device).contiguous()


class Control(Abstract):
    """A path X(t) made of pieces between knots. Beyond the ends the outer pieces are extended.

    A t on a knot belongs to the piece on its left. coeffs: made by one of the functions above, or by torchcde. knots:
    the t that was given to that function.
    """

    jumps: ClassVar[bool] = False  # whether dX/dt jumps at the knots

    def __init__(self, coeffs: Tensor, knots: Tensor | None = None):
        self.coeffs, self.knots = coeffs, _knots(coeffs, self._n_knots(coeffs), knots)

    @staticmethod
    @abstractmethod
    def _n_knots(coeffs: Tensor) -> int:
        """Return the number of knots of these coefficients; raise if their shape is wrong."""

    @abstractmethod
    def evaluate(self, t: Tensor | float) -> Tensor:
        """X(t), of shape (..., channels)."""

    @abstractmethod
    def derivative(self, t: Tensor | float) -> Tensor:
        """dX/dt at t, of shape (..., channels)."""

    def _locate(self, t: Tensor | float) -> tuple[Tensor, Tensor]:
        """Return the index of the piece that t is in, and the time since its start, both of shape (1,)."""
        knots = self.knots
        t = t.to(knots).reshape(1) if isinstance(t, Tensor) else knots.new_full((1,), t)
        # Searching the inner knots alone extends the outer pieces beyond the ends.
        i = torch.searchsorted(knots[1:-1].detach(), t.detach())
        return i, (t - knots.index_select(0, i)).to(self.coeffs.dtype)

    def _row(self, i: Tensor) -> Tensor:
        # Indexing with a 0-d tensor would wait for the device to tell its value.
        return self.coeffs.index_select(-2, i).squeeze(-2)


class CubicControl(Control):
    """X(t) = a + b s + c s**2 + d s**3, with s the time since the last knot. coeffs: (..., length - 1, 4 channels)."""

    @staticmethod
    def _n_knots(coeffs: Tensor) -> int:
        if coeffs.ndim < 2 or coeffs.shape[-1] % 4 != 0:
            raise InvalidStateError(
                f"cubic coefficients have shape (..., length - 1, 4 * channels); got {tuple(coeffs.shape)}. Compute "
                "them with natural_cubic_coeffs or hermite_cubic_coeffs. (Those of linear_coeffs are for "
                "LinearControl.)"
            )
        return coeffs.shape[-2] + 1

    def evaluate(self, t: Tensor | float) -> Tensor:
        i, s = self._locate(t)
        a, b, two_c, three_d = self._row(i).chunk(4, -1)
        return a + (b + (0.5 * two_c + three_d * s / 3) * s) * s

    def derivative(self, t: Tensor | float) -> Tensor:
        i, s = self._locate(t)
        _, b, two_c, three_d = self._row(i).chunk(4, -1)
        return b + (two_c + three_d * s) * s


class LinearControl(Control):
    """Straight lines from knot to knot. coeffs: (..., length, channels).

    dX/dt jumps at the knots, where `derivative` is the slope on the left. Give the knots to `solve` as `jumps`. Or let
    steps end on the knots as output times, and use ALF: it evaluates f only inside its steps and keeps its order.
    Without `jumps`, solvers that evaluate f at the ends, such as Heun and RK4, fall to order 1.
    """

    jumps = True

    @staticmethod
    def _n_knots(coeffs: Tensor) -> int:
        if coeffs.ndim < 2:
            raise InvalidStateError(
                f"linear coefficients have shape (..., length, channels); got {tuple(coeffs.shape)}. See linear_coeffs."
            )
        return coeffs.shape[-2]

    def evaluate(self, t: Tensor | float) -> Tensor:
        i, s = self._locate(t)
        x0, x1, h = self._ends(i)
        return x0 + s * (x1 - x0) / h

    def derivative(self, t: Tensor | float) -> Tensor:
        i, _ = self._locate(t)
        x0, x1, h = self._ends(i)
        return (x1 - x0) / h

    def _ends(self, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.knots.index_select(0, i + 1) - self.knots.index_select(0, i)
        return self._row(i), self._row(i + 1), h.to(self.coeffs.dtype)
