"""End of a solve as integers, from which the start is rebuilt to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchmali._torch import tree_map
from torchmali.copies import copied
from torchmali.errors import NonRepeatableFieldError
from torchmali.field.environment import in_forward_pass
from torchmali.field.evaluate import Field
from torchmali.jumps import Jumps
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import Leapfrog
from torchmali.state.base import Snapshot, State
from torchmali.state.fixed_point import FixedPoint
from torchmali.state.vectors import number
from torchmali.tape import Event, Start, Step, Tape, rewind
from torchmali.tree import Structure


@dataclass(frozen=True, eq=False, repr=False)
class Code:
    """End state of a solve as integers, with the steps that led there: all that `solve_back` needs beside f.

    A code can be pickled, and sent to another process.
    """

    t0: float
    end: Snapshot  # z and v at the last time as integers, and the exponents of their spacing
    events: Sequence[Event]  # those on the tape
    kept: Sequence[Snapshot]  # the bits that rescales dropped, and v before each refresh
    solver: Leapfrog
    structure: Structure
    args: tuple
    jumps: Jumps | None = None

    @staticmethod
    def of(
        end: State, tape: Tape, solver: Solver, structure: Structure, args: tuple, jumps: Jumps | None = None
    ) -> Code:
        assert isinstance(end, FixedPoint) and isinstance(solver, Leapfrog)
        args = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, args)
        checkpoints = {event.before for event in tape.events if isinstance(event, Step)}
        events = [event._replace(before=None) if isinstance(event, Step) else event for event in tape.events]
        kept = [Snapshot((), None) if i in checkpoints else snapshot for i, snapshot in enumerate(tape.kept)]
        (start,) = (event for event in tape.events if isinstance(event, Start))
        return Code(number(start.t), end.snapshot(), events, kept, solver, structure, args, jumps)

    def start(self, func: Callable) -> FixedPoint:
        """Rebuild the state at the start."""
        end = FixedPoint.restore(self.end)
        # Rebuilding the start must leave f's buffers as they are.
        jumps = None if self.jumps is None else copied(self.jumps)
        f = Field(func, end.point, self.structure, self.args, [], buffers="freeze", jumps=jumps)

        def undo_step(step: Step, state: FixedPoint) -> State:
            f.enter(step.t0, step.t1)
            return self.solver.inverse(f.as_in_backward, step.t0, step.t1, state)

        def run() -> tuple[FixedPoint, Any]:
            start = rewind(self.events, self.kept, end, undo_step)
            # The first step was the last to be undone: f is still evaluated on its side of a jump at t0.
            return start, self.solver.refreshed(f.as_in_backward, self.t0, start)

        with torch.no_grad():
            start, true_start = in_forward_pass([f.environment], run)
        if start.deviation(true_start, true_start, 0.0).component != 0:
            raise NonRepeatableFieldError(
                "This code was not made with this f: its rebuilt start has another v than f(t, y). f must be "
                "the very same function: weights, modes and buffers, dtype, device, autocast, and no random numbers "
                "drawn inside it."
            )
        return start

    def __repr__(self) -> str:
        n_bytes = sum(x.nbytes for snapshot in (self.end, *self.kept) for x in snapshot.tensors)
        n_steps = sum(isinstance(event, Step) for event in self.events)
        return f"Code({n_bytes:,} bytes, {n_steps} steps of {self.solver})"


def solve_back(func: Callable, code: Code) -> Any:
    """Rebuild y0 of the solve that made this code (`solve(..., return_code=True)`), to the last bit of its grid."""
    return code.structure.rebuild(code.start(func).point)
