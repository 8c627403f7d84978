"""Outputs that are observed: the sum of observe(t, y) over the times."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from torchmali.errors import InvalidFieldError
from torchmali.field.environment import version_of
from torchmali.field.evaluate import Field, raise_for_change
from torchmali.field.randomness import Source
from torchmali.outputs.base import Outputs, Pulled
from torchmali.state.vectors import Tensors, Time
from torchmali.tree import Structure


class ObservedOutputs(Outputs):
    """The sum of observe(t, y) over the output times, and y at the last one."""

    keeps = False

    def __init__(self, observer: Observer, n: int):
        self.observer, self.n, self.theta = observer, n, observer.theta
        self.sum: tuple[Tensor, Tensor] | None = None  # and by how much it is too large
        self.end: Tensors = ()

    def show(self, t: Time, z: Tensors, k: int) -> Tensors:
        return (*self.observer.at(t, z, k), *z)

    def gather(self, shown: Sequence[Tensors]) -> Tensors:
        values, *_ = zip(*shown, strict=True)
        return torch.stack(values).sum(0), *(leaf.unsqueeze(0) for leaf in shown[-1][1:])

    def emit(self, t: Time, z: Tensors, k: int) -> None:
        (value,) = self.observer.at(t, z, k)
        # Kahan's sum: 100,000 terms in float32 would lose four digits.
        before, excess = self.sum or (torch.zeros_like(value), torch.zeros_like(value))
        value = value - torch.where(excess.isfinite(), excess, 0)  # inf - inf is no excess
        total = before + value
        self.sum = total, (total - before) - value
        if k == self.n - 1:
            self.end = tuple(leaf.clone().unsqueeze(0) for leaf in z)

    def mark(self) -> Any:
        return self.sum, self.observer.environment.mark()

    def back_to(self, mark: Any) -> None:
        self.sum, environment = mark
        self.observer.environment.back_to(environment)

    def results(self) -> Tensors:
        assert self.sum is not None
        return self.sum[0], *self.end

    def pull(self, t: Time, z: Tensors, k: int, grads: Sequence[Tensor | None]) -> Pulled:
        grad, *ends = grads
        a = [g[0] if k == self.n - 1 and g is not None else None for g in ends]
        if grad is None:
            return Pulled(a)
        g, theta, g_t = self.observer.gradients_at(t, z, k, grad)
        a = [x if y is None else y if x is None else x + y for x, y in zip(a, g, strict=True)]
        return Pulled(a, theta, g_t)

    def states(self, results: Tensors) -> Tensors:
        return results[1:]

    @property
    def functions(self) -> Sequence[Field]:
        return (self.observer,)

    def without_tensors(self) -> Outputs:
        return ObservedOutputs(self.observer.without_tensors(), self.n)

    def with_tensors(self, theta: Sequence[Tensor], wants_t: bool) -> Outputs:
        return ObservedOutputs(self.observer.with_tensors(theta, (), wants_t), self.n)

    def backward_pass(self, t: float, z: Tensors) -> AbstractContextManager:
        self.observer.args = (0,) if self.observer.takes_k else ()
        return self.observer.backward_pass(t, z)


class Observer(Field):
    """observe(t, y), or observe(t, y, k), with its parameters and surroundings."""

    called = "observe"
    remedy = "Keep it in a module, or name it in the function."

    def __init__(self, func: Callable, z0: Tensors, structure: Structure, source: Source | None = None):
        super().__init__(func, z0, structure, (), None, source=source)
        self.takes_k = _takes_k(func)
        self.kind: Any = None  # shape and dtype of what it returns

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
    """Whether there is a third argument that it cannot do without, or that is called k."""
    for wrapped in ("_orig_mod", "module", "forward"):  # of torch.compile, of DistributedDataParallel, of a module
        func = getattr(func, wrapped, func)
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):
        return False
    third = parameters[2] if len(parameters) > 2 else None
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    is_needed = third is not None and (third.default is inspect.Parameter.empty or third.name == "k")
    return third is not None and third.kind in positional and is_needed
