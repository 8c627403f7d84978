"""Outputs inside a step, read from its interpolant, and their cotangents.

    y(t0 + theta h) = z0 + h sum_j b_j(theta) k_j          (dense.py makes the table b)

A cotangent a_y of such an output goes to z0 as it is, to each stage as h b_j(theta) a_y, and to the three times: with
D = <a_y, sum_j b_j'(theta) k_j> and M = <a_y, sum_j b_j(theta) k_j>,

    dL/dt = D          dL/dt1 = M - theta D          dL/dt0 = -M - (1 - theta) D
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.solvers.cotangent import accumulate
from torchmali.solvers.dense import Interpolant
from torchmali.state.vectors import Tensors, Time, combine, number

CHUNK = 16  # outputs that are handled at once: their memory does not grow with the number of outputs in a step


class RecordedStages(NamedTuple):
    """Cotangents of what a dense solution holds of a step (outputs/dense.py)."""

    z: Sequence[Tensor | None]  # dL/dz0
    stages: Mapping[int, Sequence[Tensor | None]]  # dL/dk_j, of stages with a weight and perhaps of others
    t0: float = 0.0
    t1: float = 0.0


def _no_cotangents(i: int, j: int, y: Tensors) -> Sequence[Tensor | None]:
    return ()


class InnerOutputs(NamedTuple):
    """Outputs y[first], y[first + 1], ... that were read from the interpolant of a step, as a backward pass meets them.

    pull(i, j, y): dL/dy of the outputs from the i-th to the one before the j-th, leaves of shape (j - i, ...), where y
    holds these outputs in the same way. needs_states: whether `pull` needs y; else y may be empty. recorded: cotangents
    of z and of the stages themselves, which may be there beside such outputs, or alone.
    """

    first: int = 0
    times: Sequence[Any] = ()
    needs_states: bool = False
    pull: Callable[[int, int, Tensors], Sequence[Tensor | None]] = _no_cotangents
    recorded: RecordedStages | None = None
    samples: Tensor | None = None  # the sample of the batch to which each belongs; None: outputs are of all


class InnerCotangents(NamedTuple):
    """Cotangents of all outputs inside a step, pulled back to what the interpolant is made of."""

    z: list[Tensor]  # dL/dz0
    stages: list[list[Tensor] | None]  # dL/dk_j; None for stages without a weight
    t0: Time = 0.0
    t1: Time = 0.0
    times: Sequence[Time] = ()  # dL/dt of the outputs, if it is wanted


def chunks(n: int, n_samples: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges that divide n outputs. n_samples: how many of them are as large as a state (of one sample each)."""
    size = CHUNK * max(1, n_samples)
    for i in range(0, n, size):
        yield i, min(n, i + size)


def thetas(t0: Time, t1: Time, times: Sequence[Time]) -> Tensor:
    """(t - t0) / (t1 - t0) for each time, in float64 on the host. Autograd follows times that are tensors."""
    return (as_tensor(times) - t0) / (t1 - t0)


def as_tensor(times: Sequence[Time]) -> Tensor:
    """Times in one tensor, in float64 on the host. Autograd follows those that are tensors."""
    if any(isinstance(t, Tensor) for t in times):
        return torch.stack([torch.as_tensor(t, dtype=torch.float64) for t in times])
    return torch.tensor(times, dtype=torch.float64)


def weights(rows: Sequence[Sequence[float]], theta: Tensor) -> Tensor:
    """rows[j][0] theta + rows[j][1] theta^2 + ..., of shape (stages, *theta.shape), by Horner's rule."""
    coefficients = torch.tensor(rows, dtype=torch.float64).to(theta).reshape(len(rows), -1, *[1] * theta.ndim)
    total = torch.zeros_like(theta)
    for i in reversed(range(coefficients.shape[1])):
        total = (total + coefficients[:, i]) * theta
    return total


def interpolated(
    interpolant: Interpolant,
    z: Tensors,
    t0: Time,
    t1: Time,
    times: Sequence[Time],
    stages: Sequence[Tensors],
    samples: Tensor | None = None,
) -> Tensors:
    """y at times inside the step from z over [t0, t1], in leaves of shape (len(times), ...).

    samples: for each time the one sample that is wanted.
    """
    used = interpolant.used
    w = (t1 - t0) * weights([interpolant.rows[j] for j in used], thetas(t0, t1, times))
    outputs = []
    for i, leaf in enumerate(z):
        y = _rows(leaf, samples)
        for factor, j in zip(factors(w, y), used, strict=True):
            y = torch.addcmul(y, factor, _rows(stages[j][i], samples))
        outputs.append(y)
    return tuple(outputs)


def slope_inside(interpolant: Interpolant, t0: Time, t1: Time, t: float, stages: Sequence[Tensors]) -> Tensors:
    """dy/dt at a time inside the step over [t0, t1], along its interpolant."""
    used = interpolant.used
    w = weights_of_slopes([interpolant.rows[j] for j in used], thetas(number(t0), number(t1), [t]))
    return combine(None, w[:, 0].tolist(), [stages[j] for j in used])


def _rows(leaf: Tensor, samples: Tensor | None) -> Tensor:
    """A leaf with one dimension more, for outputs; or the rows of these samples."""
    return leaf.unsqueeze(0) if samples is None else leaf.index_select(0, samples.to(leaf.device))


def factors(w: Tensor, rows: Tensor) -> Tensor:
    """Weights of shape (stages, n) as factors of rows of outputs."""
    return w.to(rows.device, rows.dtype).reshape(*w.shape, *[1] * (rows.ndim - 1))


def pull_inner(
    interpolant: Interpolant,
    z: Tensors,
    t0: float,
    t1: float,
    stages: Sequence[Tensors],
    inner: InnerOutputs,
    wants_t: bool,
) -> InnerCotangents:
    """Pull the cotangents of outputs inside a step back to z and the stages.

    stages: may be empty, unless `inner` needs y or dL/dt is wanted.
    """
    used = interpolant.used
    sums = _Sums(interpolant, z, used, t1 - t0)
    dt0: Time = 0.0
    dt1: Time = 0.0
    dt: list[Time] = []
    if inner.recorded is not None:
        sums.add_recorded(inner.recorded)
        dt0, dt1 = inner.recorded.t0, inner.recorded.t1
    for i, j in chunks(len(inner.times), 1 if inner.samples is None else len(z[0])):
        times = inner.times[i:j]
        with torch.no_grad():
            samples = None if inner.samples is None else inner.samples[i:j]
            y = interpolated(interpolant, z, t0, t1, times, stages, samples) if inner.needs_states else ()
        a = inner.pull(i, j, y)
        theta = thetas(t0, t1, times)
        with torch.no_grad():
            sums.add(a, theta, samples)
            if wants_t:
                theta = theta.to(z[0].device) if z[0].device.type != "mps" else theta.to(z[0])  # MPS has no float64
                d, m = sums.along(a, theta, stages, samples)
                dt += d.unbind()
                dt0, dt1 = dt0 - (m + (1 - theta) * d).sum(), dt1 + (m - theta * d).sum()
    return InnerCotangents(sums.z, sums.stages, dt0, dt1, dt)


class _Sums:
    """Sums over the outputs inside one step."""

    def __init__(self, interpolant: Interpolant, z: Tensors, used: Sequence[int], h: float):
        self.rows = [interpolant.rows[j] for j in used]
        self.used, self.h = used, h
        self.z = [torch.zeros_like(leaf) for leaf in z]
        self.stages: list[list[Tensor] | None] = [None] * len(interpolant.rows)
        for j in used:
            self.stages[j] = [torch.zeros_like(leaf) for leaf in z]

    def add(self, a: Sequence[Tensor | None], theta: Tensor, samples: Tensor | None) -> None:
        """Add the shares of z and of the stages in some outputs."""
        w = self.h * weights(self.rows, theta)
        for i, g in enumerate(a):
            if g is None:
                continue
            _add_rows(self.z[i], g, samples)
            for factor, j in zip(factors(w, g), self.used, strict=True):
                stage = self.stages[j]
                assert stage is not None
                _add_rows(stage[i], factor * g, samples)

    def add_recorded(self, recorded: RecordedStages) -> None:
        """Add the cotangents of z and of the stages themselves."""
        accumulate(self.z, recorded.z)
        for j in self.used:
            stage = self.stages[j]
            assert stage is not None
            accumulate(stage, recorded.stages[j])

    def along(
        self, a: Sequence[Tensor | None], theta: Tensor, stages: Sequence[Tensors], samples: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """D and M of each output."""
        slopes = weights_of_slopes(self.rows, theta)
        means = weights(self.rows, theta)
        d, m = torch.zeros_like(theta), torch.zeros_like(theta)
        for i, g in enumerate(a):
            for n, j in enumerate(self.used):
                if g is not None:
                    products = g * _rows(stages[j][i], samples)
                    dots = products.reshape(len(theta), -1).sum(1).to(theta)
                    d, m = d + slopes[n] * dots, m + means[n] * dots
        return d, m


def _add_rows(total: Tensor, rows: Tensor, samples: Tensor | None) -> None:
    """Add the sum of all rows, or each to that of its sample."""
    if samples is None:
        total += rows.sum(0)
    else:
        total.index_add_(0, samples.to(total.device), rows)


def weights_of_slopes(rows: Sequence[Sequence[float]], theta: Tensor) -> Tensor:
    """d b_j / d theta, in the shape of `weights`."""
    constant = torch.tensor([row[0] for row in rows], dtype=torch.float64).to(theta).reshape(-1, *[1] * theta.ndim)
    derived = [[i * c for i, c in enumerate(row, 1)][1:] for row in rows]
    return constant + (weights(derived, theta) if derived[0] else torch.zeros_like(theta))
