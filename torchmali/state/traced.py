"""The state that autograd follows."""

from __future__ import annotations

from torchmali._torch import foreach_lerp
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time, combine


class Traced(State):
    """The state as floats, with moves out of place that autograd can follow. Times may be tensors."""

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
        return Traced(self.point, tuple(foreach_lerp(self.slope, u, 2 * eta)))
