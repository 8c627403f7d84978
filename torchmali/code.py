"""A solution as integers, and the way from it back to where it began, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torchmali.errors import NonRepeatableFieldError
from torchmali.field.evaluate import Field
from torchmali.solvers.base import ReversibleSolver, Solver
from torchmali.state.base import Snapshot, State
from torchmali.state.fixed_point import FixedPoint
from torchmali.tape import Event, Refresh, Rescale, Step, Tape
from torchmali.tree import Structure


@dataclass(frozen=True, eq=False, repr=False)
class Code:
    """What `solve_back` needs beside f: it can be pickled, and sent to another process."""

    end: Snapshot  # z and v at the last time as integers, and the exponents of their spacing
    events: Sequence[Event]  # the steps, and where v was renewed or the grid moved
    kept: Sequence[Snapshot]  # the bits that fell off where the grid moved, and v before it was renewed
    solver: ReversibleSolver
    grid: type[State]
    structure: Structure
    args: tuple

    @staticmethod
    def of(end: State, tape: Tape, solver: Solver, structure: Structure, args: tuple) -> Code:
        assert isinstance(end, FixedPoint) and isinstance(solver, ReversibleSolver)
        args = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, args)
        checkpoints = {event.before for event in tape.events if isinstance(event, Step)}
        events = [event._replace(before=None) if isinstance(event, Step) else event for event in tape.events]
        kept = [Snapshot((), None) if i in checkpoints else snapshot for i, snapshot in enumerate(tape.kept)]
        return Code(end.snapshot(), events, kept, solver, type(end), structure, args)

    def unwind(self, func: Callable) -> State:
        """The state at the start."""
        state: State = self.grid.restore(self.end)
        f = Field(func, state.point, self.structure, self.args, [], buffers="freeze")  # it leaves no trace
        with torch.no_grad(), f.environment.forward_pass():
            for event in reversed(self.events):
                if isinstance(event, Step):
                    state = self.solver.inverse(f.as_in_backward, event.t0, event.t1, state)
                elif isinstance(event, Rescale):
                    assert event.lost is not None
                    state = state.unscaled(event.change, self.kept[event.lost])
                elif isinstance(event, Refresh) and event.before is not None:
                    state = state.back_to(self.kept[event.before])
                elif isinstance(event, Refresh):
                    # The start: v is f(t, z) there, if nothing went wrong.
                    begun = self.solver.refresh_slope(f.as_in_backward, event.t, state, None)
                    if state.distance(begun, begun, 0.0).component != 0:
                        raise NonRepeatableFieldError(
                            "This code was not made with this f: the way back does not end in a state with v = f(t, "
                            "y). f must be the very same function: weights, modes and buffers, dtype, device, "
                            "autocast, and no random numbers drawn inside it."
                        )
        return state

    def __repr__(self) -> str:
        n_bytes = sum(x.nbytes for snapshot in (self.end, *self.kept) for x in snapshot.tensors)
        n_steps = sum(isinstance(event, Step) for event in self.events)
        return f"Code({n_bytes:,} bytes, {n_steps} steps of {self.solver})"


def solve_back(func: Callable, code: Code) -> Any:
    """y0 of the solve that made this code (`solve(..., return_code=True)`), to the last bit of its integer grid."""
    return code.structure.rebuild(code.unwind(func).point)
