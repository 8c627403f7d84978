"""Results of a solve: the solution and its statistics."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor

from torchmali.errors import IncompatibleError
from torchmali.tree import Structure

TELL_LIMIT = 1e-3  # a gradient wrong by more than about this is warned about


def short_repr(self: Any) -> str:
    """Return the call that makes a dataclass, without the fields that are at their default."""
    pairs = [(x, getattr(self, x.name)) for x in fields(self) if x.repr]
    changed = [(x.name, value) for x, value in pairs if value is not x.default and value != x.default]  # nan is not nan
    return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"


@dataclass(repr=False)
class Stats:
    """Counts of one solve. The backward fields are filled in by the latest backward pass (Naive leaves them at 0)."""

    n_steps: int = 0
    n_rejected: int = 0
    n_refreshes: int = 0  # times v was renewed: v <- f(t, z)
    n_checkpoints: int = 0  # states kept for the backward pass, beside those at refreshes
    n_graphs: int = 0  # MALI(memory=...): evaluations whose graphs were kept for the backward pass
    n_rescales: int = 0  # exact mode: times the integer grid moved
    n_reruns: int = 0  # backward: segments that were solved again because they could not be rebuilt
    n_evals_forward: int = 0
    n_evals_backward: int = 0
    n_vjps: int = 0
    h_min: float = float("nan")  # sizes of accepted steps
    h_max: float = float("nan")
    reconstruction_error: float | None = None  # MALI: |rebuilt - kept| / |kept| of z or v, the worst leaf's

    __repr__ = short_repr

    def count(self, **counts: Any) -> None:
        """Fill in counts, by name."""
        vars(self).update(counts)


class Solution(NamedTuple):
    """Result of `solve`: y has y0's structure, each leaf of shape (len(t), *leaf.shape)."""

    t: Tensor
    y: Any
    stats: Stats
    observed: Any = None  # the sum of what `observe` returned; y is then at t[-1:] only
    code: Any = None  # with return_code=True: a Code
    dense: Any = None  # with dense=True: the solution as a function of time
    event_t: Any = None  # with event=...: the time at which the solve ended, 0-d, differentiable
    event_y: Any = None  # y there, with y0's structure and shapes, differentiable
    event_index: Any = None  # (which event of the list, which component of its flattened value)
    event_times: Any = None  # for each event its roots, those of terminal=False too; without gradients

    def __call__(self, t: Any, derivative: bool = False) -> Any:
        """Return y at any time between t[0] and t[-1] (dense=True), differentiable.

        t: a number or a tensor of any shape; a leaf of the result has shape (*t.shape, *leaf.shape). derivative: return
        dy/dt of the interpolant; where two steps meet, it is that of the step which begins there. t may require a
        gradient. The host reads it, so that a tensor on a device is waited for.
        """
        if self.dense is None:
            raise IncompatibleError(
                "This solution holds y at its times t alone. For y at other times, give these in t=, or use "
                "solve(..., dense=True)."
            )
        return self.dense(t, derivative)

    def __repr__(self) -> str:
        """Shapes instead of values: Solution(y: (3, 128, 2), 3 times from 0 to 1, 20 steps)."""
        n, numbers = len(self.t), self.t.detach()[~self.t.detach().isnan()]
        ends = f" from {self.t.detach().reshape(-1)[0]:g} to {_furthest(numbers):g}" if n else ""
        parts = [f"y: {_shapes(self.y)}", f"{n} times{ends}", f"{self.stats.n_steps} steps"]
        for name, value in (("observed", self.observed), ("code", self.code)):
            parts += [] if value is None else [f"{name}: {_shapes(value)}"]
        parts += [] if self.dense is None else ["dense"]
        parts += [] if self.event_t is None else [f"event at {self.event_t.item():.6g}"]
        return f"Solution({', '.join(parts)})"


def _furthest(t: Tensor) -> float:
    """The time that is furthest from the first one."""
    return t[(t - t[0]).abs().argmax()].item()


def _shapes(tree: Any) -> str:
    """Return the repr of a tree, with shapes in place of its tensors."""
    structure = Structure.of(tree)
    shapes = [tuple(x.shape) if isinstance(x, Tensor) else x for x in structure.flatten(tree)]
    return repr(structure.rebuild(shapes))
