"""How a state is carried in a solve: low precision in float32, complex numbers as pairs of real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.errors import InvalidFieldError, warn
from torchmali.state.vectors import Tensors
from torchmali.tree import Structure

LOW = (torch.float16, torch.bfloat16)


class Form(NamedTuple):
    """The structure of y0 and the dtypes of its leaves: the user's side. A solve has float32 or float64 leaves."""

    structure: Structure
    dtypes: tuple[torch.dtype | None, ...]  # None: no tensor, or one that autocast made

    @staticmethod
    def of(y0: Any) -> Form:
        structure = Structure.of(y0)
        return Form(structure, tuple([_dtype(x) for x in structure.flatten(y0)]))

    @property
    def is_plain(self) -> bool:
        """Whether a solve takes the state as it is."""
        return not any([dtype in LOW or (dtype is not None and dtype.is_complex) for dtype in self.dtypes])

    @property
    def low(self) -> torch.dtype | None:
        """The dtype in which f receives t, if all of y is of low precision."""
        dtypes = set(self.dtypes)
        return self.dtypes[0] if len(dtypes) == 1 and self.dtypes[0] in LOW else None

    def inside(self, y: Any) -> Any:
        """A state, or a slope, as a solve has it."""
        return self.structure.rebuild([_inside(x) for x in self.structure.flatten(y)])

    def leaves_outside(self, leaves: Tensors) -> Tensors:
        """Leaves of a solve, perhaps with further dimensions in front, as the user has them."""
        return tuple([_outside(x, dtype) for x, dtype in zip(leaves, self.dtypes, strict=True)])

    def outside(self, y: Any) -> Any:
        """A state of a solve as the user has it."""
        return y if self.is_plain else self.structure.rebuild(self.leaves_outside(self.structure.flatten(y)))

    def state(self, leaves: Tensors) -> Any:
        """The user's state from leaves of a solve."""
        return self.structure.rebuild(self.leaves_outside(leaves))

    def time(self, t: Tensor) -> Tensor:
        """A time of a solve as f receives it."""
        return t if self.low is None else t.to(self.low)

    def slope(self, func: Callable) -> Callable:
        """The user's f as a solve needs it."""
        return lambda t, y, *args: self.inside(func(self.time(t), self.outside(y), *args))


def _dtype(x: Any) -> torch.dtype | None:
    if not isinstance(x, Tensor):
        return None
    is_cast = x.dtype in LOW and torch.is_autocast_enabled(x.device.type)  # then `solve` makes it a float32
    return None if is_cast else x.dtype


def _inside(x: Tensor) -> Tensor:
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x.float() if x.dtype in LOW else x


def _outside(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return x
    return torch.view_as_complex(x.contiguous()) if dtype.is_complex else x.to(dtype)


def converted(func: Callable, y0: Any) -> Callable:
    """func, with what it returns in the dtypes and shapes of y0; warns of it once.

    As torchdiffeq does, where func returns another floating-point type, or as many numbers in another shape.
    """
    structure = Structure.of(y0)
    leaves = structure.flatten(y0)
    told: list[bool] = []

    def slope(t: Tensor, y: Any, *args: Any) -> Any:
        found = structure.flatten(func(t, y, *args))
        slopes = [_like(u, x) for u, x in zip(found, leaves, strict=True)]
        if not told:
            told.append(True)
            _warn_of_conversion(found, leaves)
        return structure.rebuild(slopes)

    return slope


def _like(u: Tensor, x: Tensor) -> Tensor:
    if u.numel() != x.numel() or (u.is_complex() and not x.is_complex()):
        raise InvalidFieldError(
            f"f must return dy/dt with y's shape and dtype: y has shape {tuple(x.shape)}, {x.dtype}; f returned "
            f"{tuple(u.shape)}, {u.dtype}."
        )
    return u.reshape(x.shape).to(x.dtype)


def _warn_of_conversion(found: Tensors, leaves: Tensors) -> None:
    pairs = [(u, x) for u, x in zip(found, leaves, strict=True) if (u.shape, u.dtype) != (x.shape, x.dtype)]
    if pairs:
        u, x = pairs[0]
        warn(
            f"f returned {tuple(u.shape)}, {u.dtype} for y of {tuple(x.shape)}, {x.dtype}, and is converted to that. "
            "Let f return dy/dt with y's shape and dtype."
        )
