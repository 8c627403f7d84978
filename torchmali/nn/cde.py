"""A controlled equation as a layer of a network: an ODE driven by a path through data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchmali.controllers import FixedStep, StepController
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.nn.control import Control, CubicControl, check_increasing
from torchmali.odeint import solve
from torchmali.solution import InvalidField, InvalidState, Stats, require
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF


class NeuralCDE(nn.Module):
    """From a path X to z at the last time, where dz/dt = func(t, z) dX/dt (Kidger et al., 2020).

    func: from z (..., hidden) to a matrix (..., hidden, channels). initial: z(t0) = initial(X(t0)); without it z0 is
    given to `forward`. control: what the coefficients are of, `CubicControl` or `LinearControl`. all_outputs: return z
    at all times, time first. buffers: see `solve`. `last_stats`: see `ODEBlock`.
    """

    last_stats: Stats | None

    def __init__(
        self,
        func: Callable,
        initial: Callable | None = None,
        *,
        control: type[Control] = CubicControl,
        solver: Solver = ALF(),  # noqa: B008 (solvers, controllers and gradient methods are immutable values)
        controller: StepController = FixedStep(0.25),  # noqa: B008
        gradient: GradientMethod = MALI(),  # noqa: B008
        all_outputs: bool = False,
        buffers: str = "update",
    ):
        super().__init__()
        self.func, self.initial, self.control = func, initial, control
        self.solver, self.controller, self.gradient = solver, controller, gradient
        self.all_outputs, self.buffers_policy = all_outputs, buffers
        self.last_stats = None

    def forward(
        self,
        coeffs: Tensor,
        knots: Tensor | None = None,
        *,
        t: Sequence[float] | Tensor | None = None,
        z0: Tensor | None = None,
    ) -> Tensor:
        """z at t[-1], or at all times t: by default at the first and the last knot. Coefficients get gradients, too.

        knots: the t that the coefficients were computed with; None if there was none.
        """
        path = self.control(coeffs, knots)
        if knots is not None:
            check_increasing(knots)
            t = torch.stack((knots[0], knots[-1])) if t is None else t
        elif t is None:
            t = (0.0, len(path.knots) - 1.0)  # known without a look at the device
        z0 = self._start(path, t[0], z0)
        # By args, not by closure: there they are found to need gradients, and are saved for the backward pass.
        slope, args = partial(_slope, self.func, self.control), (coeffs, path.knots)
        how: dict[str, Any] = {"solver": self.solver, "controller": self.controller, "gradient": self.gradient}
        solution = solve(slope, z0, t, **how, args=args, buffers=self.buffers_policy)
        self.last_stats = solution.stats
        return solution.y if self.all_outputs else solution.y[-1]

    def _start(self, path: Control, t0: Tensor | float, z0: Tensor | None) -> Tensor:
        if self.initial is None:
            require(z0 is not None, "there is no z(t0): give NeuralCDE(func, initial), or forward(coeffs, z0=z0).")
        else:
            what = "z(t0) comes from the module `initial`, but z0 was given, too: leave one of the two out."
            require(z0 is None, what)
            z0 = self.initial(path.evaluate(t0))
        assert z0 is not None
        batch, coeffs = tuple(z0.shape[:-1]), path.coeffs
        what = (
            f"z(t0) has shape {tuple(z0.shape)}, meaning batch dimensions {batch}, but the coefficients have shape "
            f"{tuple(coeffs.shape)}, meaning batch dimensions {tuple(coeffs.shape[:-2])}. Let them be the same; to "
            "repeat a path or a start, use expand, which takes no memory."
        )
        require(batch == coeffs.shape[:-2], what, InvalidState)
        return z0

    def extra_repr(self) -> str:
        how = f"solver={self.solver}, controller={self.controller}, gradient={self.gradient}"
        return f"control={self.control.__name__}, {how}"


def _slope(func: Callable, control: type[Control], t: Tensor, z: Tensor, coeffs: Tensor, knots: Tensor) -> Tensor:
    dx = control(coeffs, knots).derivative(t)
    matrix = func(t, z)
    needed = (*z.shape, dx.shape[-1])
    if not isinstance(matrix, Tensor) or matrix.shape != needed:
        got = f"shape {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else f"a {type(matrix).__name__}"
        raise InvalidField(
            f"func(t, z) must return a matrix (..., hidden, channels) that takes dX/dt to dz/dt: z has shape "
            f"{tuple(z.shape)}, meaning {z.shape[-1]} hidden, and dX/dt has shape {tuple(dx.shape)}, meaning "
            f"{dx.shape[-1]} channels, so shape {needed} is needed; func returned {got}. A network with hidden * "
            f"channels outputs needs .unflatten(-1, {needed[-2:]}) after it."
        )
    return (matrix @ dx.unsqueeze(-1)).squeeze(-1)
