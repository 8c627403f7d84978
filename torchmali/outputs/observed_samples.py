"""Outputs as a sum at times of each sample's own: observe(t, y), added up over the times of each sample.

Every call of `observe` has a row for each sample of the batch, as y has, so that random numbers that it draws have the
same shape. A sample that has no output in a call gets the row of its start, at which `observe` is evaluated anyway: no
row can bring a nan into a gradient that would not be there without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from inspect import Parameter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.errors import InvalidFieldError
from torchmali.field.evaluate import Field
from torchmali.outputs.base import InnerPulled, Outputs, Pulled
from torchmali.outputs.observed import POSITIONAL, Observer, added, parameters_after_two, total
from torchmali.solvers.interpolation import as_tensor
from torchmali.state.vectors import Tensors, Time

NAMES = ("mask", "k")


def wanted_arguments(observe: Callable) -> Sequence[str]:
    """Return the names of the arguments of observe after t and y: `mask` and `k`, if it has them, in its order."""
    parameters = parameters_after_two(observe)
    wanted = []
    for parameter in parameters:
        if parameter.name not in NAMES or parameter.kind not in POSITIONAL:
            break
        wanted.append(parameter.name)
    for parameter in parameters[len(wanted) :]:
        is_variable = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        is_needed = parameter.default is Parameter.empty and not is_variable
        if is_needed or parameter.name in NAMES:
            raise InvalidFieldError(
                "With times of each sample, observe takes t and y and then, if it has positional arguments with these "
                f"names, `mask` and `k`, each of shape (samples,); it has an argument {parameter.name!r}. Write it as "
                "observe(t, y, mask, k)."
            )
    return wanted


class _Call(NamedTuple):
    """One call of observe: outputs of different samples."""

    places: Tensor  # of the outputs among those that were given
    samples: Tensor  # to which they belong
    t: Tensor
    z: Tensors
    others: dict[str, Tensor]  # mask and k


class ObservedSamples(Outputs):
    """Sum of observe(t, y) over the times of each sample, and y at the last time of each.

    rows, samples: k and b of each output after the start, in the order of the solve.
    """

    def __init__(self, observer: Observer, rows: Tensor, samples: Tensor):
        assert observer.n_samples is not None
        self.observer, self.rows, self.samples, self.theta = observer, rows, samples, observer.theta
        self.n = observer.n_samples
        # The last output of each sample; 0, the start, if it has no other.
        order = torch.arange(1, len(samples) + 1)
        self.last = torch.zeros(self.n, dtype=torch.int64).scatter_reduce(0, samples, order, "amax")
        self.sum: tuple[Tensor, Tensor] | None = None  # the sum, and by how much it is too large
        self.start: tuple[Time, Tensors] = 0.0, ()
        self.end: Tensors = ()

    def samples_of(self, first: int, end: int) -> Tensor:
        return self.samples[first - 1 : end - 1]

    def record(self, k: int, t: Time, z: Tensors) -> None:
        if k > 0:
            self.record_inner(k, [t], self._row_of(k, z))
            return
        self._begin(t, z)
        (value,) = self.observer.at(self._everywhere(t), z, **self._others_at_start())
        self.sum = added(None, value)
        self.end = z if self.is_traced else tuple([leaf.clone() for leaf in z])

    def record_inner(self, first: int, times: Sequence[Time], z: Tensors) -> None:
        for call in self._calls(first, times, z):
            (value,) = self.observer.at(call.t, call.z, **call.others)
            self.sum = added(self.sum, _masked(value, call.others["mask"]))
        places, samples = self._last_among(first, len(times))
        if len(places):
            self.end = tuple(
                [_replaced(old, samples, _rows(new, places)) for old, new in zip(self.end, z, strict=True)]
            )

    def results(self) -> Tensors:
        assert self.sum is not None
        return self.sum[0], *[leaf.unsqueeze(0) for leaf in self.end]

    def solution(self, results: Tensors) -> tuple[Tensors, Tensor | None]:
        return results[1:], results[0]

    def contents(self) -> Any:
        return self.sum, self.observer.environment.mark()

    def restore_contents(self, contents: Any) -> None:
        self.sum, environment = contents
        self.observer.environment.restore(environment)

    def pull(self, k: int, t: Time, z: Tensors, grads: Sequence[Tensor | None]) -> Pulled:
        if k > 0:
            found = self.pull_inner(k, [t], self._row_of(k, z), grads)
            g_t = None if found.t is None else found.t[0]
            return Pulled([self._spread(x, k) for x in found.z], found.theta, g_t)
        grad, *ends = grads
        ended_here = self.last == 0
        a = [None if g is None else _masked(g[0], ended_here.to(g.device)) for g in ends]
        if grad is None:
            return Pulled(a)
        g, theta, g_t = self.observer.gradients_at(self._everywhere(t), z, grad, **self._others_at_start())
        return Pulled([total(x, y) for x, y in zip(a, g, strict=True)], theta, None if g_t is None else g_t.sum())

    def pull_inner(self, first: int, times: Sequence[Time], z: Tensors, grads: Sequence[Tensor | None]) -> InnerPulled:
        grad, *ends = grads
        found: list[Tensor | None] = self._pulled_ends(first, z, ends)
        theta: list[Tensor | None] = [None] * len(self.theta)
        dt: list[Tensor] = []
        for call in self._calls(first, times, z) if grad is not None else ():
            assert grad is not None
            a = _masked(grad, call.others["mask"])
            g, by_theta, g_t = self.observer.gradients_at(call.t, call.z, a, **call.others)
            found = [_with_rows(x, leaf, y, call) for x, leaf, y in zip(found, z, g, strict=True)]
            theta = [total(x, y) for x, y in zip(theta, by_theta, strict=True)]
            if g_t is not None:
                dt = dt or list(g_t.new_zeros(len(times)).unbind())
                for place, x in zip(call.places.tolist(), _rows(g_t, call.samples).unbind(), strict=True):
                    dt[place] = x
        return InnerPulled(found, theta, dt or None)

    def fresh(self) -> Outputs:
        return ObservedSamples(self.observer.without_tensors(), self.rows, self.samples)

    def again(self) -> Outputs:
        return ObservedSamples(self.observer, self.rows, self.samples)

    def with_tensors(self, theta: Sequence[Tensor], wants_t: bool) -> Outputs:
        return ObservedSamples(self.observer.with_tensors(theta, (), wants_t), self.rows, self.samples)

    @property
    def functions(self) -> Sequence[Field]:
        return (self.observer,)

    def backward_pass(self, t: float, z: Tensors) -> AbstractContextManager:
        self._begin(t, z)
        return self.observer.backward_pass_from(self._everywhere(t), z, **self._others_at_start())

    def _begin(self, t: Time, z: Tensors) -> None:
        self.start = t.detach() if isinstance(t, Tensor) else t, tuple([leaf.detach() for leaf in z])

    def _everywhere(self, t: Time) -> Tensor:
        """One time for all samples."""
        return as_tensor([t]).expand(self.n)

    def _others_at_start(self) -> dict[str, Tensor]:
        device = self.observer.device
        return {
            "mask": torch.ones(self.n, dtype=torch.bool, device=device),
            "k": torch.zeros(self.n, dtype=torch.int64, device=device),
        }

    def _calls(self, first: int, times: Sequence[Time], z: Tensors) -> Iterator[_Call]:
        """The calls of observe for outputs from `first` on, given as rows of z: each has a sample once at most."""
        samples, rows = self.samples_of(first, first + len(times)), self.rows[first - 1 : first - 1 + len(times)]
        t, turns = as_tensor(times), _turns(samples)
        t0, z0 = self.start
        start, nothing = self._everywhere(t0), torch.zeros(self.n, dtype=torch.int64)
        for turn in range(int(turns.max()) + 1):
            places = (turns == turn).nonzero().squeeze(1)
            now = samples[places]
            others = {"mask": nothing.bool().index_fill(0, now, True), "k": nothing.index_copy(0, now, rows[places])}
            others = {name: x.to(self.observer.device) for name, x in others.items()}
            y = tuple([_replaced(old, now, _rows(new, places)) for old, new in zip(z0, z, strict=True)])
            yield _Call(places, now, start.index_copy(0, now, t[places]), y, others)

    def _row_of(self, k: int, z: Tensors) -> Tensors:
        """The row of the sample to which the k-th output belongs."""
        return tuple([_rows(leaf, self.samples_of(k, k + 1)) for leaf in z])

    def _spread(self, x: Tensor | None, k: int) -> Tensor | None:
        """The row of one sample among zeros for the others."""
        if x is None:
            return None
        return _replaced(x.new_zeros(self.n, *x.shape[1:]), self.samples_of(k, k + 1), x)

    def _last_among(self, first: int, n: int) -> tuple[Tensor, Tensor]:
        """Places and samples of those among n outputs that are the last of their sample."""
        samples = self.samples_of(first, first + n)
        places = (self.last[samples] == torch.arange(first, first + n)).nonzero().squeeze(1)
        return places, samples[places]

    def _pulled_ends(self, first: int, z: Tensors, ends: Sequence[Tensor | None]) -> list[Tensor | None]:
        """dL/dy of those outputs that are the last of their sample, among zeros for the others."""
        places, samples = self._last_among(first, len(z[0]))
        if not len(places):
            return [None] * len(z)
        return [
            None if g is None else _replaced(torch.zeros_like(leaf), places, _rows(g[0], samples))
            for leaf, g in zip(z, ends, strict=True)
        ]


def _turns(samples: Tensor) -> Tensor:
    """For each entry, how often its value occurred before."""
    order = samples.argsort(stable=True)
    ordered = samples[order]
    turns = torch.arange(len(samples)) - torch.searchsorted(ordered, ordered)
    return torch.zeros_like(samples).index_copy(0, order, turns)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    """x, with zeros in the rows where mask is false."""
    return torch.where(mask.to(x.device).reshape(-1, *[1] * (x.ndim - 1)), x, 0)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index.to(x.device))


def _replaced(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """x, with other rows at some places."""
    return x.index_copy(0, index.to(x.device), rows)


def _with_rows(x: Tensor | None, leaf: Tensor, g: Tensor | None, call: _Call) -> Tensor | None:
    """x, in place, and dL/dy of one call in the places of its outputs; None counts as zero."""
    if g is None:
        return x
    x = torch.zeros_like(leaf) if x is None else x
    return x.index_add_(0, call.places.to(x.device), _rows(g, call.samples))
