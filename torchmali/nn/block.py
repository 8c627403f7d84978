"""An ODE as a layer of a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchmali.controllers import FixedStep, StepController
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.nn.base import SolveModule, Times, checked_times, shown_times
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF
from torchmali.tree import Structure


class ODEBlock(SolveModule):
    """Layer from y(t[0]) to y(t[-1]), where dy/dt = func(t, y, *args). The defaults are the paper's.

    t: times, as numbers, or as a parameter to be learned. all_outputs: return y at all times, time first. buffers: see
    `solve`. `last_stats` has the counts of the last call, and of its backward pass once this has run.
    """

    def __init__(
        self,
        func: Callable,
        t: Times = (0.0, 1.0),
        *,
        solver: Solver = ALF(),  # noqa: B008 (solvers, controllers and gradient methods are immutable values)
        controller: StepController = FixedStep(0.25),  # noqa: B008
        gradient: GradientMethod = MALI(),  # noqa: B008
        all_outputs: bool = False,
        buffers: str = "update",
    ):
        super().__init__(solver, controller, gradient, buffers)
        self.func, self.t, self.all_outputs = func, checked_times(t), all_outputs

    def forward(self, y0: Any, *args: Any) -> Any:
        y = self.solve(self.func, y0, self.t, args=args).y
        if self.all_outputs:
            return y
        structure = Structure.of(y0)
        return structure.rebuild([leaf[-1] for leaf in structure.flatten(y)])

    def extra_repr(self) -> str:
        return f"t={shown_times(self.t)}, {super().extra_repr()}"
