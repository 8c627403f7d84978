"""Outputs as a sum: observe(t, y), added up over the output times."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchmali._torch import uncompiled
from torchmali.errors import InvalidFieldError
from torchmali.field.environment import version_of
from torchmali.field.evaluate import Field, raise_for_change
from torchmali.field.randomness import Source
from torchmali.outputs.base import Outputs, Pulled
from torchmali.state.vectors import Tensors, Time
from torchmali.tree import Structure

POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


class ObservedOutputs(Outputs):
    """Sum of observe(t, y) over n output times, and y at the last one."""

    def __init__(self, observer: Observer, n: int):
        self.observer, self.n, self.theta = observer, n, observer.theta
        self.sum: tuple[Tensor, Tensor] | None = None  # the sum, and by how much it is too large
        self.end: Tensors = ()

    def record(self, k: int, t: Time, z: Tensors) -> None:
        (value,) = self.observer.at(t, z, k=k)
        self.sum = added(self.sum, value)
        if k == self.n - 1:
            self.end = tuple((leaf if self.is_traced else leaf.clone()).unsqueeze(0) for leaf in z)

    def results(self) -> Tensors:
        assert self.sum is not None
        return self.sum[0], *self.end

    def solution(self, results: Tensors) -> tuple[Tensors, Tensor | None]:
        return results[1:], results[0]

    def contents(self) -> Any:
        return self.sum, self.observer.environment.mark()

    def restore_contents(self, contents: Any) -> None:
        self.sum, environment = contents
        self.observer.environment.restore(environment)

    def pull(self, k: int, t: Time, z: Tensors, grads: Sequence[Tensor | None]) -> Pulled:
        grad, *ends = grads
        a = [g[0] if k == self.n - 1 and g is not None else None for g in ends]
        if grad is None:
            return Pulled(a)
        g, theta, g_t = self.observer.gradients_at(t, z, grad, k=k)
        return Pulled([total(x, y) for x, y in zip(a, g, strict=True)], theta, g_t)

    @property
    def functions(self) -> Sequence[Field]:
        return (self.observer,)

    def fresh(self) -> Outputs:
        return ObservedOutputs(self.observer.without_tensors(), self.n)

    def again(self) -> Outputs:
        return ObservedOutputs(self.observer, self.n)

    def with_tensors(self, theta: Sequence[Tensor], wants_t: bool) -> Outputs:
        return ObservedOutputs(self.observer.with_tensors(theta, (), wants_t), self.n)

    def backward_pass(self, t: float, z: Tensors) -> AbstractContextManager:
        return self.observer.backward_pass_from(t, z, k=0)


def added(sum_so_far: tuple[Tensor, Tensor] | None, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sum with one more term, and by how much it is too large, from such a pair or None at the first term."""
    # Kahan summation: a plain sum of 100,000 terms in float32 would lose four digits.
    before, excess = sum_so_far or (torch.zeros_like(value), torch.zeros_like(value))
    value = value - torch.where(excess.isfinite(), excess, 0)  # inf - inf is no excess
    after = before + value
    return after, ((after - before) - value).detach()


def total(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """x + y, where None counts as zero."""
    if x is None or y is None:
        return y if x is None else x
    return x + y


class Observer(Field):
    """observe(t, y), or observe(t, y, k), with its parameters and environment.

    wanted: names of the arguments that it takes after t and y. n_samples: the rows that its value must have, if it is
    summed for each sample.
    """

    called = "observe"
    remedy = "Keep it in a module, or name it in the function."

    def __init__(
        self,
        func: Callable,
        z0: Tensors,
        structure: Structure,
        source: Source | None = None,
        looks_for_leaves: bool = False,
        wanted: Sequence[str] | None = None,
        n_samples: int | None = None,
    ):
        super().__init__(func, z0, structure, (), None, source=source, looks_for_leaves=looks_for_leaves)
        self.wanted, self.n_samples = _index_of(func) if wanted is None else wanted, n_samples
        self.kind: Any = None  # shape and dtype of its values

    def at(self, t: Time, z: Tensors, **others: Any) -> Tensors:
        """observe(t, y). others: all that it may take after t and y, by name."""
        self._take(others)
        return self(t, z)

    def gradients_at(
        self, t: Time, z: Tensors, a: Tensor, **others: Any
    ) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None], Tensor | None]:
        """a^T d(observe)/d(z, theta, t)."""
        self._take(others)
        _, g, g_t = self.linearize(t, z, [a])
        return g[: len(z)], g[len(z) :], g_t

    def backward_pass_from(self, t: Any, z: Tensors, **others: Any) -> AbstractContextManager:
        """A context around all calls of `gradients_at`; t, z, others: those of the first value."""
        self._take(others)  # it may be asked for again
        return self.backward_pass(t, z)

    def _take(self, others: dict[str, Any]) -> None:
        self.args = tuple([others[name] for name in self.wanted])

    def __call__(self, t: Time, z: Tensors) -> Tensors:
        if self.needs_care:
            return self._evaluate_with_care(t, z)
        versions = [version_of(x) for x in z]
        value = self.func(self.time(t), self.structure.rebuild(z), *self.args)
        if versions != [version_of(x) for x in z]:
            raise_for_change(self.called)
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        if not is_real:
            raise InvalidFieldError(f"observe must return a tensor of real numbers, to be summed; got {got}.")
        if self.n_samples is not None and value.shape[:1] != (self.n_samples,):
            raise InvalidFieldError(
                "With times of each sample, observe must return a row for each of the samples, to be summed over its "
                f"times: a tensor of shape ({self.n_samples}, ...); got {tuple(value.shape)}. Do not reduce dimension "
                "0: `observed` can be reduced after the solve."
            )
        if self.environment.is_cast and value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        self.kind = self.kind or (value.shape, value.dtype)
        if (value.shape, value.dtype) != self.kind:
            raise InvalidFieldError(
                "observe must return the same shape and dtype at all times, to be summed; first "
                f"{tuple(self.kind[0])}, {self.kind[1]}, now {tuple(value.shape)}, {value.dtype}."
            )
        return (value,)


def _index_of(func: Any) -> Sequence[str]:
    """Return ("k",) if func has a third argument that is required, or that is called k; else nothing."""
    parameters = parameters_after_two(func)
    third = parameters[0] if parameters else None
    if third is None or third.kind not in POSITIONAL:
        return ()
    return ("k",) if third.default is inspect.Parameter.empty or third.name == "k" else ()


def parameters_after_two(func: Any) -> list[inspect.Parameter]:
    """Return the parameters of a function or a module after the first two; none, if they cannot be found."""
    func = uncompiled(func)
    for wrapped in ("module", "forward"):  # of DistributedDataParallel, of a module
        func = getattr(func, wrapped, func)
    try:
        return list(inspect.signature(func).parameters.values())[2:]
    except (TypeError, ValueError):
        return []
