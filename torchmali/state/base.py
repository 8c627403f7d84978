"""The augmented state (z, v) of a solve, and its moves.

Floats moves it in place, Traced out of place for autograd to follow, and FixedPoint on integers, without rounding
errors that could not be undone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

from torchmali.state.vectors import Tensors

S = TypeVar("S", bound="State")


class Snapshot(NamedTuple):
    """A state put away: its tensors, and whatever else is needed to bring it back."""

    tensors: Tensors
    form: Any


class RebuildError(NamedTuple):
    """How far a rebuilt state is from the one that was there, relative to its scale.

    The scale of a component is the larger of |z| and of the change that v makes of it, so that a component which passes
    through zero is judged by how far it moves. One without a scale has that of its row.
    """

    component: float  # the worst one, on its own scale: a large component hides nothing
    most: float  # the share of the components of a row that are beyond a first limit, of the worst row
    some: float  # the share of the components of a leaf that are beyond a second one, of the worst leaf
    row: float  # the worst component, on the scale of the largest in its row


class RangeVerdict(NamedTuple):
    """How the numbers of the latest steps fit the range of a bounded state."""

    overflow: Any = None  # why they do not: then nothing of them can be trusted
    changes: Sequence[Any] = ()  # of the grid, for `rescaled`, before the next step


IN_RANGE = RangeVerdict()


class State(ABC):
    """The augmented state (z, v) and its moves. A move may work in place: `fork` first, go on with what it returns.

    Solvers other than leapfrogs have no v, or keep something else there.
    """

    __slots__ = ()
    is_bounded: ClassVar[bool] = False  # its numbers are integers, whose range has to be watched (Grid)
    point: Tensors  # z
    slope: Tensors  # v

    @classmethod
    @abstractmethod
    def of(cls: type[S], z: Tensors) -> S:
        """A state at z, without v."""

    def started_at(self: S, z: Tensors) -> S:
        """The state without v at the beginning of the solve that led here."""
        return self.of(z)

    @abstractmethod
    def with_slope(self: S, v: Tensors) -> S:
        """This z with another v."""

    @abstractmethod
    def fork(self: S) -> S:
        """A state whose moves leave this one alone."""

    @abstractmethod
    def drift(self: S, e: Any) -> S:
        """z <- z + e v"""

    @abstractmethod
    def reflect(self: S, u: Tensors, eta: float) -> S:
        """v <- v + 2 eta (u - v)"""

    def unreflect(self: S, u: Tensors, eta: float) -> S:
        """v <- (v - 2 eta u) / (1 - 2 eta), which is a reflect with another eta."""
        return self.reflect(u, eta / (2 * eta - 1))

    def snapshot(self) -> Snapshot:
        return Snapshot((*self.point, *self.slope), len(self.point))

    def snapshot_before_refresh(self) -> Snapshot:
        """What `back_to` needs where v is renewed and z stays."""
        return self.snapshot()

    def range(self) -> Any:
        """What watches over the range of the numbers in one solve (grid.Range); None: floats need nobody."""
        return None

    def begins_again(self) -> Any:
        """An arithmetic with which to begin the solve anew, where this first state asks for it."""
        return None

    def rescaled(self: S, change: Any) -> tuple[S, Snapshot]:
        """On another scale, and what fell off."""
        raise AssertionError("floats are not bounded")

    def unscaled(self: S, change: Any, lost: Snapshot) -> S:
        """`rescaled` undone."""
        raise AssertionError("floats are not bounded")

    @classmethod
    @abstractmethod
    def restore(cls: type[S], kept: Snapshot) -> S:
        """The state that was put away."""

    def back_to(self: S, kept: Snapshot) -> S:
        """The state that was put away where this one, rebuilt, is again."""
        return self.restore(kept)

    @abstractmethod
    def distance(self: S, truth: S, end: S, span: float, limits: tuple[float, float] = (0.0, 0.0)) -> RebuildError:
        """How far (z, v) is from the truth, where v counts as a change of z by span v. limits: those of `Drift`."""
