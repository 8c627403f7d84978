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


class ObservedOutputs(Outputs):
    """Sum of observe(t, y) over n output times, and y at the last one."""

    def __init__(self, observer: Observer, n: int):
        self.observer, self.n, self.theta = observer, n, observer.theta
        self.sum: tuple[Tensor, Tensor] | None = None  # the sum, and by how much it is too large
        self.end: Tensors = ()

    def record(self, k: int, t: Time, z: Tensors) -> None:
        (value,) = self.observer.at(t, z, k)
        # Kahan summation: a plain sum of 100,000 terms in float32 would lose four digits.
        before, excess = self.sum or (torch.zeros_like(value), torch.zeros_like(value))
        value = value - torch.where(excess.isfinite(), excess, 0)  # inf - inf is no excess
        total = before + value
        self.sum = total, ((total - before) - value).detach()
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
        g, theta, g_t = self.observer.gradients_at(t, z, k, grad)
        return Pulled([_sum(x, y) for x, y in zip(a, g, strict=True)], theta, g_t)

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
        return self.observer.backward_pass(t, z)


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    """x + y, where None counts as zero."""
    if x is None or y is None:
        return y if x is None else x
    return x + y


class Observer(Field):
    """observe(t, y), or observe(t, y, k), with its parameters and environment."""

    called = "observe"
    remedy = "Keep it in a module, or name it in the function."

    def __init__(
        self,
        func: Callable,
        z0: Tensors,
        structure: Structure,
        source: Source | None = None,
        looks_for_leaves: bool = False,
    ):
        super().__init__(func, z0, structure, (), None, source=source, looks_for_leaves=looks_for_leaves)
        self.takes_k = _takes_k(func)
        self.kind: Any = None  # shape and dtype of its values

    def at(self, t: Time, z: Tensors, k: int) -> Tensors:
        self.args = (k,) if self.takes_k else ()
        return self(t, z)

    def gradients_at(
        self, t: Time, z: Tensors, k: int, a: Tensor
    ) -> tuple[Sequence[Tensor | None], Sequence[Tensor | None], Tensor | None]:
        """a^T d(observe)/d(z, theta, t)."""
        self.args = (k,) if self.takes_k else ()
        _, g, g_t = self.linearize(t, z, [a])
        return g[: len(z)], g[len(z) :], g_t

    def backward_pass(self, t: float, z: Tensors) -> AbstractContextManager:
        self.args = (0,) if self.takes_k else ()  # its first value may be asked for again
        return super().backward_pass(t, z)

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
        if self.environment.is_cast and value.dtype in (torch.bfloat16, torch.float16):
            value = value.float()
        self.kind = self.kind or (value.shape, value.dtype)
        if (value.shape, value.dtype) != self.kind:
            raise InvalidFieldError(
                "observe must return the same shape and dtype at all times, to be summed; first "
                f"{tuple(self.kind[0])}, {self.kind[1]}, now {tuple(value.shape)}, {value.dtype}."
            )
        return (value,)


def _takes_k(func: Any) -> bool:
    """Whether func has a third argument that is required, or that is called k."""
    func = uncompiled(func)
    for wrapped in ("module", "forward"):  # of DistributedDataParallel, of a module
        func = getattr(func, wrapped, func)
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):
        return False
    third = parameters[2] if len(parameters) > 2 else None
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    is_needed = third is not None and (third.default is inspect.Parameter.empty or third.name == "k")
    return third is not None and third.kind in positional and is_needed
