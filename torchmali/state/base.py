"""The augmented state (z, v) of a solve, and its moves.

`Floats` moves it in place, `Traced` out of place for autograd to follow, `FixedPoint` on integers, where each move can
be undone to the last bit.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple, TypeVar

from torchmali.abstract import Abstract
from torchmali.state.vectors import Tensors

S = TypeVar("S", bound="State")
R = TypeVar("R", bound="RewindableState")


class State(Abstract):
    """The augmented state (z, v) and its moves. A move may work in place: `fork` first, go on with what it returns.

    Solvers other than leapfrogs have no v (slope is empty), or use it for something else.
    """

    __slots__ = ()
    point: Tensors  # z
    slope: Tensors  # v

    @classmethod
    @abstractmethod
    def of(cls: type[S], z: Tensors) -> S:
        """A state at z, without v."""

    @abstractmethod
    def with_slope(self: S, v: Tensors) -> S:
        """The state with this z and another v."""

    def with_point(self: S, z: Tensors) -> S:
        """The state with this v and another z, which later moves leave alone."""
        return self.of(z).with_slope(self.slope)

    @abstractmethod
    def fork(self: S) -> S:
        """A state whose moves leave this one alone."""

    @abstractmethod
    def drift(self: S, e: Any) -> S:
        """z <- z + e v"""

    @abstractmethod
    def reflect(self: S, u: Tensors, eta: float) -> S:
        """v <- v + 2 eta (u - v)"""

    def apart(self, x: Tensors) -> Tensors:
        """x, which may be z, v or a view of them, in memory that later moves leave alone. Here: all do."""
        return x

    def unreflect(self: S, u: Tensors, eta: float) -> S:
        """v <- (v - 2 eta u) / (1 - 2 eta), which is a reflect with another eta."""
        return self.reflect(u, eta / (2 * eta - 1))


class Snapshot(NamedTuple):
    """The tensors of a state, and the other data from which `restore` makes it again."""

    tensors: Tensors
    form: Any


class Deviation(NamedTuple):
    """How far a rebuilt state is from the true one, relative to its scale.

    The scale of a component is the larger of |z| and of the change that v makes of it, so that a component which passes
    through zero is judged by how far it moves. A component without a scale has that of its row.
    """

    component: float  # the worst component, on its own scale: a large one beside it hides nothing. (An upper limit, if
    # all is within both limits.)
    most: float  # the share of the components of a row that are beyond a first limit, of the worst row
    some: float  # the share of the components of a leaf that are beyond a second limit, of the worst leaf
    row: float  # the worst component, on the scale of the largest in its row. (An upper limit there, too.)


class RewindableState(State):
    """A state that a backward pass can keep, restore and rebuild."""

    __slots__ = ()

    @abstractmethod
    def started_at(self: R, z: Tensors) -> R:
        """The state without v with which the solve that led here began at z."""

    def snapshot(self) -> Snapshot:
        return Snapshot((*self.point, *self.slope), len(self.point))

    def snapshot_before_refresh(self) -> Snapshot:
        """Snapshot for `rebuilt_with` of a state whose v is about to be replaced."""
        return self.snapshot()

    @classmethod
    @abstractmethod
    def restore(cls: type[R], kept: Snapshot) -> R:
        """The state of a snapshot."""

    def rebuilt_with(self: R, kept: Snapshot) -> R:
        """The state of a snapshot that was taken where this one, rebuilt, is again."""
        return self.restore(kept)

    @abstractmethod
    def deviation(self: R, truth: R, end: R, span: float, limits: tuple[float, float] = (0.0, 0.0)) -> Deviation:
        """How far (z, v) is from the truth, where v counts as a change of z by span v.

        end: the state at the other end of what was rebuilt. limits: the two of `Deviation`.
        """
