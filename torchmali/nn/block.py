"""An ODE as a layer of a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchmali.compiled.in_graph import like_state
from torchmali.controllers import StepController
from torchmali.errors import InvalidTimesError
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.nn.base import SolveModule, Times, checked_times, default_controller, shown_times
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF
from torchmali.spans import ends, is_of_samples
from torchmali.tree import Structure


class ODEBlock(SolveModule):
    """Layer from y(t[0]) to y(t[-1]), where dy/dt = func(t, y, *args). The defaults are the paper's.

    controller: by default FixedStep(0.25, land=False), so that outputs between the two cost no evaluations.
    t: times, as numbers, or as a parameter to be learned. all_outputs: return y at all times, time first. buffers,
    compile: see `solve`. `last_stats` has the counts of the last call, and of its backward pass once this has run.

    A call may have times of its own, `block(y0, t=t)`, those of each sample too, of shape (times, samples); without
    `all_outputs` y is then that at the last time of each. spans="own": samples begin at times of their own, and func
    receives t of shape (samples, 1, ...). See `solve`.
    """

    def __init__(
        self,
        func: Callable,
        t: Times = (0.0, 1.0),
        *,
        solver: Solver = ALF(),  # noqa: B008 (solvers, controllers and gradient methods are immutable values)
        controller: StepController | None = None,
        gradient: GradientMethod = MALI(),  # noqa: B008
        all_outputs: bool = False,
        buffers: str = "update",
        spans: str = "common",
        compile: bool = False,
    ):
        super().__init__(solver, controller or default_controller(solver), gradient, buffers, compile)
        self.func, self.t, self.all_outputs, self.spans = func, checked_times(t), all_outputs, spans

    def forward(self, y0: Any, *args: Any, t: Times | None = None) -> Any:
        t = self.t if t is None else t
        if self.spans != "common" and not is_of_samples(t):
            raise InvalidTimesError(
                f"ODEBlock(spans={self.spans!r}) needs the times of each sample, of shape (times, samples), in each "
                "call: block(y0, t=t)."
            )
        if is_of_samples(t) and not self.all_outputs:
            t = ends(t)
        leaves = self.in_graph(_leaves, _likes, y0, args, t)
        if leaves is not None:
            return Structure.of(y0).rebuild(leaves)
        y = self.solve(self.func, y0, t, args=args, spans=self.spans).y
        if self.all_outputs:
            return y
        structure = Structure.of(y0)
        return structure.rebuild([leaf[-1] for leaf in structure.flatten(y)])

    def extra_repr(self) -> str:
        shown = f"t={shown_times(self.t)}, " if self.spans == "common" else f"spans={self.spans!r}, "
        return shown + super().extra_repr()


def _leaves(block: ODEBlock, y0: Any, args: tuple, t: Times) -> tuple[Tensor, ...]:
    return Structure.of(y0).flatten(block(y0, *args, t=t))


def _likes(block: ODEBlock, y0: Any, args: tuple, t: Times) -> list[Tensor]:
    """Tensors like the leaves that `forward` returns."""
    sizes = (len(t),) if block.all_outputs else ()
    return [like_state(x, *sizes) for x in Structure.of(y0).flatten(y0)]
