"""An ODE as a layer of a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from torchmali.controllers import FixedStep, StepController
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.odeint import solve
from torchmali.solution import Stats
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF
from torchmali.state import Structure


class ODEBlock(nn.Module):
    """From y(t[0]) to y(t[-1]), where dy/dt = func(t, y, *args). The defaults are the paper's.

    t: times, as numbers, or as a parameter to be learned. all_outputs: return y at all times, time first. buffers: see
    `solve`. `last_stats` has the counts of the last call, and once its backward pass is done those of that, too.
    """

    last_stats: Stats | None

    def __init__(
        self,
        func: Callable,
        t: Sequence[float] | Tensor = (0.0, 1.0),
        *,
        solver: Solver = ALF(),  # noqa: B008 (solvers, controllers and gradient methods are immutable values)
        controller: StepController = FixedStep(0.25),  # noqa: B008
        gradient: GradientMethod = MALI(),  # noqa: B008
        all_outputs: bool = False,
        buffers: str = "update",
    ):
        super().__init__()
        self.func = func
        # A tensor that is no parameter would be rounded by to(dtype), and is no part of what was learned.
        self.t = tuple(t.tolist()) if isinstance(t, Tensor) and not isinstance(t, nn.Parameter) else t
        self.solver, self.controller, self.gradient = solver, controller, gradient
        self.all_outputs, self.buffers_policy = all_outputs, buffers
        self.last_stats = None

    def forward(self, y0: Any, *args: Any) -> Any:
        how: dict[str, Any] = {"solver": self.solver, "controller": self.controller, "gradient": self.gradient}
        solution = solve(self.func, y0, self.t, **how, args=args, buffers=self.buffers_policy)
        self.last_stats = solution.stats
        if self.all_outputs:
            return solution.y
        structure = Structure.of(y0)
        return structure.rebuild([leaf[-1] for leaf in structure.flatten(solution.y)])

    def extra_repr(self) -> str:
        t = "learned" if isinstance(self.t, nn.Parameter) else f"({', '.join(f'{x:g}' for x in self.t)})"
        return f"t={t}, solver={self.solver}, controller={self.controller}, gradient={self.gradient}"
