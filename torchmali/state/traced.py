"""The state as floats, moved out of place: autograd can follow."""

from __future__ import annotations

import torch

from torchmali.state.base import RebuildError, Snapshot, State
from torchmali.state.vectors import Tensors, Time, combine


class Traced(State):
    """Moves out of place, so that autograd can follow them; times may be tensors. Never walked back."""

    __slots__ = ("point", "slope")

    def __init__(self, point: Tensors, slope: Tensors = ()):
        self.point, self.slope = point, slope

    @classmethod
    def of(cls, z: Tensors) -> Traced:
        return cls(z)

    def with_slope(self, v: Tensors) -> Traced:
        return Traced(self.point, v)

    def fork(self) -> Traced:
        return self

    def drift(self, e: Time) -> Traced:
        return Traced(combine(self.point, (e,), (self.slope,)), self.slope)

    def reflect(self, u: Tensors, eta: float) -> Traced:
        return Traced(self.point, tuple(torch._foreach_lerp(self.slope, u, 2 * eta)))

    @classmethod
    def restore(cls, kept: Snapshot) -> Traced:
        raise AssertionError("autograd goes back over these")

    def distance(
        self, truth: Traced, end: Traced, span: float, limits: tuple[float, float] = (0.0, 0.0)
    ) -> RebuildError:
        raise AssertionError("autograd goes back over these")
