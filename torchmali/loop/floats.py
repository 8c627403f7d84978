"""The forward loop on floats."""

from __future__ import annotations

from typing import Any

from torchmali.loop.base import Loop, read
from torchmali.solvers.base import Attempt
from torchmali.state.base import State
from torchmali.state.vectors import Tensors


class FloatLoop(Loop):
    """The forward loop on floats (or on tensors that autograd follows)."""

    def first_state(self, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        return self.solver.start(self.f, self.t, z0, arithmetic)

    def begun(self) -> None:
        pass

    def advance(self) -> None:
        mark = self.side_effects.mark() if self.is_adaptive else None
        t1, plan = self.next_time(), self.refresher.plan()
        attempt, residuals = self.attempt(t1, plan, self.state)
        alternates = False
        if self.is_adaptive or plan.decides:
            measured = self.measure(t1, attempt, residuals, plan)
            values = read(measured.tensors)
            if not self.accepts(t1, attempt, measured, values[0]):
                self._reject(attempt, mark)
                return
            alternates = plan.decides and not values[-1] >= 0
        t, before = self.t, self.state
        self.commit(t1, attempt, residuals)
        self.hand_out(t, before, attempt)
        self.refresh_if(alternates, plan, self.carry)

    def new_slope(self, slope: Tensors | None) -> Tensors:
        return self.f(self.t, self.state.point) if slope is None else slope

    def _reject(self, attempt: Attempt, mark: Any) -> None:
        self.side_effects.restore(mark)
        if attempt.start is not None and not mark:  # else the evaluation that gave it has just been undone
            self.carry = attempt.start
