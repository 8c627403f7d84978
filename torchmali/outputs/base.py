"""What becomes of y at the output times: it is kept, or observed and let go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from torchmali.field.evaluate import Field
from torchmali.state.vectors import Tensors, Time


class Pulled(NamedTuple):
    """What dL/dresults makes of one output time."""

    z: Sequence[Tensor | None]  # dL/dy
    theta: Sequence[Tensor | None] = ()  # dL/d(parameters of the observer)
    t: Tensor | None = None  # dL/dt, for the t that the observer sees


class Outputs(ABC):
    theta: Sequence[Tensor] = ()  # what may get a gradient here
    keeps: bool  # every y

    @abstractmethod
    def show(self, t: Time, z: Tensors, k: int) -> Tensors:
        """What there is to collect of y[k] = z, differentiably."""

    @abstractmethod
    def gather(self, shown: Sequence[Tensors]) -> Tensors:
        """The results, from what was shown at each output time."""

    @abstractmethod
    def emit(self, t: Time, z: Tensors, k: int) -> None:
        """The same without a graph and without a list: take y[k] in."""

    @abstractmethod
    def results(self) -> Tensors:
        """Of all that was emitted."""

    @abstractmethod
    def pull(self, t: Time, z: Tensors, k: int, grads: Sequence[Tensor | None]) -> Pulled:
        """Back from dL/dresults to y[k] = z."""

    def mark(self) -> Any:
        """What has been taken in so far, to come `back_to`."""
        return None

    def back_to(self, mark: Any) -> None:
        """Forget what was emitted since: it will be emitted again."""
        return None

    def states(self, results: Tensors) -> Tensors:
        """Those of the results that are states, time first."""
        return results

    def without_tensors(self) -> Outputs:
        """For the backward pass."""
        return self

    def with_tensors(self, theta: Sequence[Tensor], wants_t: bool) -> Outputs:
        return self

    @property
    def functions(self) -> Sequence[Field]:
        """The functions of the user's that are called here."""
        return ()

    def backward_pass(self, t: float, z: Tensors) -> AbstractContextManager:
        """Around all calls of `pull`. t, z: of the first output."""
        return nullcontext()
