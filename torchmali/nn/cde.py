"""A controlled differential equation as a layer of a network: an ODE driven by a path through data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchmali.compiled.in_graph import like_state
from torchmali.controllers import StepController
from torchmali.errors import (
    IncompatibleError,
    InvalidFieldError,
    InvalidOptionError,
    InvalidStateError,
    InvalidTimesError,
)
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.nn.base import SolveModule, default_controller
from torchmali.nn.control import Control, CubicControl, check_increasing
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF
from torchmali.spans import ends, is_of_samples


class NeuralCDE(SolveModule):
    """Layer from a path X to z at the last time, where dz/dt = func(t, z) dX/dt (Kidger et al., 2020).

    func: maps z (..., hidden) to a matrix (..., hidden, channels). initial: z(t0) = initial(X(t0)); without `initial`,
    z0 is given to `forward`. control: the kind of path, `CubicControl` or `LinearControl`; with `LinearControl`, steps
    end on the knots, where dX/dt jumps. all_outputs: return z at all times, time first. buffers: see `solve`.
    `last_stats`: see `ODEBlock`.

    With AdaptiveStep (and with FixedStep(land=False)) the knots of a `LinearControl` are `jumps` of `solve`: any solver
    keeps its order, and no evaluations are lost to rejections there; a leapfrog keeps one state per knot for the
    backward pass. FixedStep takes the knots as output times, in constant memory with MALI.

    controller: by default FixedStep(0.25, land=False), so that outputs cost no evaluations; with `LinearControl`
    FixedStep(0.25), with which no slopes are renewed at the knots.
    """

    def __init__(
        self,
        func: Callable,
        initial: Callable | None = None,
        *,
        control: type[Control] = CubicControl,
        solver: Solver = ALF(),  # noqa: B008 (solvers, controllers and gradient methods are immutable values)
        controller: StepController | None = None,
        gradient: GradientMethod = MALI(),  # noqa: B008
        all_outputs: bool = False,
        buffers: str = "update",
    ):
        controller = controller or default_controller(solver, on_outputs=control.jumps)
        super().__init__(solver, controller, gradient, buffers)
        self.func, self.initial, self.control, self.all_outputs = func, initial, control, all_outputs

    def forward(
        self,
        coeffs: Tensor,
        knots: Tensor | None = None,
        *,
        t: Sequence[float] | Tensor | None = None,
        z0: Tensor | None = None,
    ) -> Tensor:
        """Return z at t[-1], or at all times t with `all_outputs`. Coefficients get gradients, too.

        knots: the t that the coefficients were computed with; None if there was none. t: output times, by default the
        first and the last knot; or those of each series, of shape (times, batch), nan where it has none, from one start
        (see `solve`): then z is that at the last time of each, as of series of different lengths on the same knots.
        """
        path = self.control(coeffs, knots)
        if knots is not None:
            t = torch.stack((knots[0], knots[-1])) if t is None else t
        elif t is None:
            t = (0.0, len(path.knots) - 1.0)  # from the shape: reading the knots would wait for the device
        z0 = self._start(path, t[0, 0] if is_of_samples(t) else t[0], z0)
        found = self.in_graph(_leaves, _likes, coeffs, knots, t, z0)
        return self._solved(coeffs, knots, t, z0) if found is None else found[0]

    def _solved(self, coeffs: Tensor, knots: Tensor | None, t: Sequence[float] | Tensor, z0: Tensor) -> Tensor:
        path = self.control(coeffs, knots)
        if knots is not None:
            check_increasing(knots)
        if is_of_samples(t):
            self._check_knots_of_samples(path)
            t = t if self.all_outputs else ends(t)
        # Coefficients and knots are args, not a closure: `solve` finds that args need gradients, and saves them.
        slope = partial(_slope, self.func, self.control)
        how: dict[str, Any] = {"args": (coeffs, path.knots)}
        if self.crosses_knots:
            how["jumps"] = path.knots.detach()
        if not self.control.jumps or is_of_samples(t) or (self.crosses_knots and not path.knots.requires_grad):
            y = self.solve(slope, z0, t, **how).y
            return y if self.all_outputs else y[-1]
        # As output times, knots get the gradient of the grid, too.
        times, wanted = _with_knots(t, path.knots)
        if not self.all_outputs:  # no need to keep z at the knots
            how["observe"] = _nothing
            return self.solve(slope, z0, times, **how).y[-1]
        return self.solve(slope, z0, times, **how).y[wanted]

    @property
    def crosses_knots(self) -> bool:
        """Whether the knots are given to `solve` as jumps: where its steps would not end on them by themselves."""
        is_free = self.controller.adaptive or not self.controller.ends_on_outputs(self.solver)
        return self.control.jumps and is_free

    def _check_knots_of_samples(self, path: Control) -> None:
        if self.control.jumps and path.knots.requires_grad:
            raise IncompatibleError(
                f"The knots of a {self.control.__name__} get their gradients as output times, which do not go with "
                "times of each series: give knots.detach(), or a CubicControl."
            )

    def _start(self, path: Control, t0: Tensor | float, z0: Tensor | None) -> Tensor:
        if self.initial is None:
            if z0 is None:
                raise InvalidOptionError("there is no z(t0): give NeuralCDE(func, initial), or forward(coeffs, z0=z0).")
        else:
            if z0 is not None:
                raise InvalidOptionError(
                    "z(t0) comes from the module `initial`, but z0 was given, too: leave one of the two out."
                )
            z0 = self.initial(path.evaluate(t0))
        assert z0 is not None
        batch, coeffs = tuple(z0.shape[:-1]), path.coeffs
        if batch != coeffs.shape[:-2]:
            raise InvalidStateError(
                f"z(t0) has shape {tuple(z0.shape)}, meaning batch dimensions {batch}, but the coefficients have shape "
                f"{tuple(coeffs.shape)}, meaning batch dimensions {tuple(coeffs.shape[:-2])}. Let them be the same; to "
                "repeat a path or a start, use expand, which takes no memory."
            )
        return z0

    def extra_repr(self) -> str:
        return f"control={self.control.__name__}, {super().extra_repr()}"


def _leaves(
    cde: NeuralCDE, coeffs: Tensor, knots: Tensor | None, t: Sequence[float] | Tensor, z0: Tensor
) -> tuple[Tensor]:
    return (cde._solved(coeffs, knots, t, z0),)


def _likes(
    cde: NeuralCDE, coeffs: Tensor, knots: Tensor | None, t: Sequence[float] | Tensor, z0: Tensor
) -> list[Tensor]:
    """A tensor like what `forward` returns."""
    return [like_state(z0, len(t)) if cde.all_outputs else like_state(z0)]


def _nothing(t: Tensor, z: Tensor) -> Tensor:
    return t.new_zeros(())


def _with_knots(t: Sequence[float] | Tensor, knots: Tensor) -> tuple[Tensor, list[int]]:
    """Return the times t merged with the knots between them, in order, and the indices of t in the result."""
    every = torch.cat([torch.as_tensor(t, dtype=knots.dtype, device=knots.device), knots])
    values, n = every.tolist(), len(t)
    low, high = sorted((values[0], values[n - 1]))
    inner = [i for i in range(n, len(values)) if low < values[i] < high and values[i] not in values[:n]]
    order = sorted([*range(n), *inner], key=lambda i: values[i], reverse=values[0] > values[n - 1])
    places = [order.index(i) for i in range(n)]
    if places != sorted(places):
        raise InvalidTimesError(
            f"t must be increasing or decreasing throughout; got {[round(x, 6) for x in values[:n]]}. Sort it."
        )
    return every[order], places


def _slope(func: Callable, control: type[Control], t: Tensor, z: Tensor, coeffs: Tensor, knots: Tensor) -> Tensor:
    dx = control(coeffs, knots).derivative(t)
    matrix = func(t, z)
    needed = (*z.shape, dx.shape[-1])
    if not isinstance(matrix, Tensor) or matrix.shape != needed:
        got = f"shape {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else f"a {type(matrix).__name__}"
        raise InvalidFieldError(
            f"func(t, z) must return a matrix (..., hidden, channels) that takes dX/dt to dz/dt: z has shape "
            f"{tuple(z.shape)}, meaning {z.shape[-1]} hidden, and dX/dt has shape {tuple(dx.shape)}, meaning "
            f"{dx.shape[-1]} channels, so shape {needed} is needed; func returned {got}. A network with hidden * "
            f"channels outputs needs .unflatten(-1, {needed[-2:]}) after it."
        )
    return (matrix @ dx.unsqueeze(-1)).squeeze(-1)
