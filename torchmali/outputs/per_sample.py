"""Outputs at times of each sample's own: y[k, b] at t[k, b]."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchmali.errors import InvalidTimesError
from torchmali.outputs.base import InnerPulled, Outputs, Pulled
from torchmali.state.vectors import Tensors, Time


class SampleTimes:
    """Times t of shape (K, B), as one sequence: the common start, then every other time with its place, in order.

    rows, samples: k and b of each time after the start. nan in t: that sample has no output there.
    """

    def __init__(self, t: Tensor, z0: Tensors):
        self.t, self.shape = t if t.is_floating_point() else t.double(), (t.shape[0], t.shape[1])
        check_shape(t, z0)
        host = t.detach().to("cpu", torch.float64)
        _check_values(host)
        rows, samples = host[1:].isfinite().nonzero().unbind(1)
        found = host[rows + 1, samples]
        self.start = host[0, 0].item()
        order = found.argsort(stable=True, descending=bool((found < self.start).any()))
        self.rows, self.samples = (rows + 1)[order], samples[order]
        self.times: list[float] = [self.start, *found[order].tolist()]

    def sequence(self) -> Tensor:
        """All times in their order as a tensor that autograd follows."""
        t = self.t[self.rows.to(self.t.device), self.samples.to(self.t.device)]
        return torch.cat([self.t[:1].mean(1), t])


def check_shape(t: Tensor, z0: Tensors) -> None:
    sizes = {tuple(z.shape[:1]) for z in z0}
    if t.shape[0] < 2 or t.shape[1] < 1 or sizes != {(t.shape[1],)}:
        shapes = ", ".join(str(tuple(z.shape)) for z in z0)
        raise InvalidTimesError(
            f"t of shape {tuple(t.shape)} holds the times of each sample, (times, samples), with the start as its "
            f"first row: it needs two rows, one sample, and y0 as many samples in dimension 0. y0 has {shapes}."
        )


def _check_values(t: Tensor) -> None:
    start = t[0, 0].item()
    if not bool((t[0] == start).all()):
        raise InvalidTimesError(
            "All samples begin at the same time: t[0] must hold one number, once for each sample. For samples with "
            'starts of their own: solve(..., spans="own"), where f receives t of shape (samples, 1, ...).'
        )
    rest = t[1:]
    found = rest[~rest.isnan()]
    if not math.isfinite(start) or not bool(found.isfinite().all()):
        raise InvalidTimesError("t must be finite; use nan, and no infinity, where a sample has no output.")
    if not bool((found != start).any()):
        raise InvalidTimesError("t needs an output time after the start for at least one sample.")
    if bool((found < start).any()) and bool((found > start).any()):
        raise InvalidTimesError(
            f'All times must lie on one side of the start, t[0] = {start:g}. (With spans="own" each sample has a '
            "direction of its own.)"
        )
    check_sorted(t, (found < start).any())


def check_sorted(t: Tensor, descends: Tensor) -> None:
    """Raise if the times of a sample, in a column of t, turn back. descends: whether those of each sample decrease."""
    along = torch.where(descends, -t, t)
    furthest = along.nan_to_num(nan=-math.inf).cummax(0).values
    is_back = along[1:] < furthest[:-1]
    if bool(is_back.any()):
        k, b = is_back.nonzero()[0].tolist()
        raise InvalidTimesError(
            f"The times of a sample must not turn back, but t[{k + 1}, {b}] = {t[k + 1, b].item():g} lies before an "
            "earlier row of its column. Sort t along dimension 0, with its data."
        )


class SampleOutputs(Outputs):
    """y[k, b] at t[k, b], in leaves of shape (K, B, ...); nan where t is."""

    keeps_states = True

    def __init__(self, shape: tuple[int, int], rows: Tensor, samples: Tensor):
        self.shape, self.rows, self.samples = shape, rows, samples
        self.y: Tensors = ()
        self.traced: list[Tensors] = []  # rows with a graph, the start first

    def samples_of(self, first: int, end: int) -> Tensor:
        return self.samples[first - 1 : end - 1]

    def record(self, k: int, t: Time, z: Tensors) -> None:
        if k > 0:
            self.record_inner(k, [t], tuple([leaf.index_select(0, self._on(self.samples, k, leaf)) for leaf in z]))
        elif self.is_traced:
            self.traced = [z]
        else:
            self.y = tuple([_empty(self.shape, leaf) for leaf in z])
            for whole, part in zip(self.y, z, strict=True):
                whole[0] = part

    def record_inner(self, first: int, times: Sequence[Time], z: Tensors) -> None:
        if self.is_traced:
            self.traced.append(z)
            return
        for whole, part in zip(self.y, z, strict=True):
            rows, samples = (self._on(x, first, whole, len(times)) for x in (self.rows, self.samples))
            whole[rows, samples] = part

    def _on(self, index: Tensor, first: int, like: Tensor, n: int = 1) -> Tensor:
        return index[first - 1 : first - 1 + n].to(like.device)

    def results(self) -> Tensors:
        if not self.is_traced:
            return self.y
        start, *parts = self.traced
        results = []
        for i, leaf in enumerate(start):
            places = self._on(self.rows, 1, leaf, len(self.rows)), self._on(self.samples, 1, leaf, len(self.rows))
            whole = torch.cat([leaf[None], _empty((self.shape[0] - 1, self.shape[1]), leaf)])
            results.append(whole.index_put(places, torch.cat([part[i] for part in parts])))
        return tuple(results)

    def pull(self, k: int, t: Time, z: Tensors, grads: Sequence[Tensor | None]) -> Pulled:
        if k == 0:
            return Pulled([None if g is None else g[0] for g in grads])
        found = self.pull_inner(k, [t], z, grads).z
        return Pulled([None if x is None else self._spread(x, k, g) for x, g in zip(found, grads, strict=True)])

    def _spread(self, x: Tensor, k: int, grad: Tensor | None) -> Tensor:
        """The row of one sample among zeros for the others."""
        assert grad is not None
        return torch.zeros_like(grad[0]).index_copy(0, self._on(self.samples, k, x), x)

    def pull_inner(self, first: int, times: Sequence[Time], z: Tensors, grads: Sequence[Tensor | None]) -> InnerPulled:
        n, found = len(times), []
        for g in grads:
            places = None if g is None else [self._on(x, first, g, n) for x in (self.rows, self.samples)]
            found.append(None if g is None or places is None else g[places[0], places[1]])
        return InnerPulled(found)

    def fresh(self) -> Outputs:
        return SampleOutputs(self.shape, self.rows, self.samples)


def _empty(shape: tuple[int, int], leaf: Tensor) -> Tensor:
    return leaf.new_full((*shape, *leaf.shape[1:]), math.nan)
