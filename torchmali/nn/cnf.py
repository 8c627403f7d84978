"""Continuous normalising flows: densities by the change of variables along an ODE."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali.abstract import Abstract
from torchmali.code import Code, solve_back
from torchmali.compiled.in_graph import like_state
from torchmali.controllers import AdaptiveStep, StepController
from torchmali.errors import InvalidFieldError, InvalidOptionError, InvalidStateError
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.nn.base import SolveModule, Times, checked_times, exact_gradient, shown_times
from torchmali.solution import short_repr
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF, leapfrog_for


def rademacher(x: Tensor) -> Tensor:
    """Draw 1 or -1, each with probability 1/2: the noise with the smallest variance of the estimated trace."""
    return torch.empty_like(x).bernoulli_(0.5).mul_(2).sub_(1)


def gaussian(x: Tensor) -> Tensor:
    """Draw standard normal noise."""
    return torch.randn_like(x)


class Trace(Abstract):
    """Base of computations of tr(df/dx), the rate at which the flow expands."""

    @abstractmethod
    def draw(self, x: Tensor) -> Tensor | None:
        """Draw the noise for one call of the flow."""

    @abstractmethod
    def of(self, u: Tensor, x: Tensor, noise: Tensor | None, keeps: bool) -> tuple[Tensor, Tensor]:
        """Return tr J and |J|^2, J = du/dx, of each sample: (batch,). keeps: whether the results have a graph."""


@dataclass(frozen=True, repr=False)
class Hutchinson(Trace):
    """Estimator of tr J = E[e^T J e] and |J|^2 = E[|e^T J|^2], by one vector-Jacobian product with noise e.

    e is drawn once per call of the flow and is the same throughout its solve and backward pass, since f must be the
    same function at every evaluation. noise: draws e from x: `rademacher`, `gaussian`, or another function with mean 0
    and variance 1.
    """

    noise: Callable[[Tensor], Tensor] = rademacher

    def draw(self, x: Tensor) -> Tensor:
        return self.noise(x)

    def of(self, u: Tensor, x: Tensor, noise: Tensor | None, keeps: bool) -> tuple[Tensor, Tensor]:
        assert noise is not None
        g = _vjp(u, x, noise, keeps)
        return _per_sample(g * noise), _per_sample(g.square())

    def __repr__(self) -> str:
        return f"Hutchinson({getattr(self.noise, '__name__', self.noise)})"


@dataclass(frozen=True, repr=False)
class ExactTrace(Trace):
    """tr J and |J|^2 by one vector-Jacobian product for each dimension of x."""

    __repr__ = short_repr

    def draw(self, x: Tensor) -> None:
        return None

    def of(self, u: Tensor, x: Tensor, noise: Tensor | None, keeps: bool) -> tuple[Tensor, Tensor]:
        if noise is not None:
            raise InvalidOptionError("ExactTrace() needs no noise: leave it out, or use trace=Hutchinson().")
        trace = square = x.new_zeros(len(x))
        for i in range(math.prod(x.shape[1:])):
            unit = torch.zeros_like(u)
            unit.flatten(1)[:, i] = 1
            g = _vjp(u, x, unit, keeps)
            trace, square = trace + g.flatten(1)[:, i], square + _per_sample(g.square())
        return trace, square


def _vjp(u: Tensor, x: Tensor, a: Tensor, keeps: bool) -> Tensor:
    if not u.requires_grad:  # a constant
        return torch.zeros_like(x)
    (g,) = torch.autograd.grad(u, x, a, create_graph=keeps, retain_graph=True, allow_unused=True)
    return torch.zeros_like(x) if g is None else g


def _per_sample(x: Tensor) -> Tensor:
    return x.flatten(1).sum(1)


class Flow(NamedTuple):
    """Result of a flow: z, its log-determinant and the integrated regularisers, which have shape (batch,)."""

    z: Tensor
    log_det: Tensor  # log |det dz/dx|
    kinetic: Tensor | None = None  # 1/2 the mean over dimensions of f^2
    jacobian: Tensor | None = None  # the mean over dimensions of |df/dx|^2
    code: Code | None = None  # the integer end state


def _default_solver(controller: StepController) -> Solver:
    rtol = controller.rtol if isinstance(controller, AdaptiveStep) else None
    return leapfrog_for(rtol) if isinstance(rtol, (int, float)) else ALF(order=4)


class CNF(SolveModule):
    """Continuous normalising flow from data x at t[0] to normal noise z at t[1], where dx/dt = func(t, x, *args).

    log p(x) = log N(z) + integral of tr(df/dx) dt. trace: `Hutchinson()` (unbiased for the log-density, one
    vector-Jacobian product) or `ExactTrace()`. kinetic, jacobian: also integrate the regularisers of RNODE (Finlay et
    al., 2020), which do not influence the step size. solver: None for `leapfrog_for(rtol)` with AdaptiveStep, and for
    ALF(order=4) with other controllers. buffers, compile: see `solve`; for compile=True give a FixedStep.
    `last_stats`: see `ODEBlock`.
    """

    def __init__(
        self,
        func: Callable,
        t: Times = (0.0, 1.0),
        *,
        trace: Trace = Hutchinson(),  # noqa: B008 (these, solvers, controllers and gradient methods are immutable values)
        kinetic: bool = False,
        jacobian: bool = False,
        solver: Solver | None = None,
        controller: StepController = AdaptiveStep(1e-4, 1e-5),  # noqa: B008
        gradient: GradientMethod = MALI(),  # noqa: B008
        buffers: str = "update",
        compile: bool = False,
    ):
        super().__init__(solver or _default_solver(controller), controller, gradient, buffers, compile)
        if not isinstance(trace, Trace):
            raise InvalidOptionError(f"trace={trace!r}: give Hutchinson() or ExactTrace().")
        if len(t) != 2:
            raise InvalidOptionError(f"t must be the start and the end of the flow; got {len(t)} times.")
        numbers = not isinstance(controller, AdaptiveStep) or all(
            isinstance(x, (int, float)) for x in (controller.rtol, controller.atol)
        )
        if not numbers:
            raise InvalidOptionError(f"{controller}: give numbers as tolerances; they are for x and log_det alike.")
        self.func, self.t, self.trace, self.kinetic, self.jacobian = func, checked_times(t), trace, kinetic, jacobian

    def forward(self, x: Tensor, *args: Any, noise: Tensor | None = None, return_code: bool = False) -> Flow:
        """Map x, (batch, ...), to z. noise: of the trace, like x; by default it is drawn once, in this call.

        return_code: also return the integer end state, from which `inverse` rebuilds x to the last bit. The solve then
        runs on integers. MALI(exact=True) rounds x to its grid first; there `inverse` rebuilds the rounded x.
        """
        if not return_code and (found := self.in_graph(_flow_leaves, _flow_likes, x, args, noise)) is not None:
            return self._flow(found, None)
        if torch.is_inference_mode_enabled():  # the trace is itself a derivative, which needs autograd
            with torch.inference_mode(False), torch.no_grad():
                x, noise = x.clone(), None if noise is None else noise.clone()
                return self.forward(x, *args, noise=noise, return_code=return_code)
        x, noise = self._checked(x, noise)
        gradient = exact_gradient(self.gradient) if return_code else self.gradient
        n_regularisers = self.kinetic + self.jacobian
        y0 = (x if x.requires_grad else x.detach(), *(x.new_zeros(len(x)) for _ in range(1 + n_regularisers)))
        how: dict[str, Any] = {"controller": self._for_leaves(n_regularisers), "gradient": gradient}
        solution = self.solve(self._slope(), y0, self.t, **how, args=(noise, args), return_code=return_code)
        return self._flow([leaf[-1] for leaf in solution.y], solution.code)

    def _flow(self, leaves: Sequence[Tensor], code: Code | None) -> Flow:
        z, log_det, *rest = leaves
        kinetic = rest.pop(0) if self.kinetic else None
        return Flow(z, log_det, kinetic, rest.pop() if self.jacobian else None, code)

    def _checked(self, x: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if x.ndim < 2:
            raise InvalidStateError(
                f"x has shape {tuple(x.shape)}: a flow needs (batch, ...). For numbers: x.unsqueeze(1)."
            )
        if noise is None:
            return x, self.trace.draw(x.detach())
        if (noise.shape, noise.dtype) != (x.shape, x.dtype):
            raise InvalidStateError(
                f"noise must be like x: x has shape {tuple(x.shape)}, {x.dtype}; got {tuple(noise.shape)}, "
                f"{noise.dtype}."
            )
        return x, noise

    def _slope(self) -> Callable:
        return partial(augmented_slope, self.func, self.trace, (self.kinetic, self.jacobian))

    def _for_leaves(self, n_regularisers: int) -> StepController:
        controller = self.controller
        if not isinstance(controller, AdaptiveStep) or not n_regularisers:
            return controller
        rtol, atol = controller.rtol, controller.atol
        free = (math.inf,) * n_regularisers
        return replace(controller, rtol=(rtol, rtol, *free), atol=(atol, atol, *free))

    def inverse(self, z: Tensor | Code, *args: Any) -> Tensor:
        """Return x: from the code of `forward` to the last bit, or from z by a solve in the other direction.

        The code is exact, because it holds v and the bits that rounding took from z. A solve from z alone has to begin
        with v = f(t, z), so its x is as accurate as both solves together: about the controller's tolerance.
        """
        if isinstance(z, Code):
            return solve_back(self._slope(), z)[0]
        if (found := self.in_graph(_inverse_leaves, _inverse_likes, z, args)) is not None:
            return found[0]
        t = self.t.flip(0) if isinstance(self.t, Tensor) else tuple(reversed(self.t))
        return self.solve(self.func, z, t, args=args).y[-1]

    def log_prob(self, x: Tensor, *args: Any, noise: Tensor | None = None) -> Tensor:
        """Return log p(x), (batch,), for a standard normal z. With Hutchinson's trace it is an unbiased estimate."""
        flow = self.forward(x, *args, noise=noise)
        d = math.prod(x.shape[1:])
        return flow.log_det - 0.5 * _per_sample(flow.z.square()) - 0.5 * d * math.log(2 * math.pi)

    def sample(
        self,
        shape: Sequence[int],
        *args: Any,
        temperature: float = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Draw x, (batch, ...), from z ~ N(0, temperature^2). dtype, device: by default those of the parameters."""
        like = next(self.parameters(), torch.empty(()))
        z = torch.randn(*shape, dtype=dtype or like.dtype, device=device or like.device)
        return self.inverse(temperature * z, *args)

    def extra_repr(self) -> str:
        extra = "".join(f", {name}=True" for name in ("kinetic", "jacobian") if getattr(self, name))
        return f"t={shown_times(self.t)}, trace={self.trace}{extra}, {super().extra_repr()}"


def augmented_slope(
    func: Callable,
    trace: Trace,
    wanted: tuple[bool, bool],
    t: Tensor,
    y: tuple[Tensor, ...],
    noise: Tensor | None,
    args: tuple,
) -> tuple[Tensor, ...]:
    """Return the rates of x, log_det and the wanted regularisers."""
    keeps = torch.is_grad_enabled()  # if not, the trace still needs a graph of f, but has none itself
    with torch.enable_grad():
        # Not a detached copy: `solve` would take a new leaf for a parameter that it was not told of.
        x = y[0].requires_grad_() if keeps else y[0].detach().requires_grad_()
        u = func(t, x, *args)
        got = tuple(u.shape) if isinstance(u, Tensor) else f"a {type(u).__name__}"
        if not isinstance(u, Tensor) or u.shape != x.shape:
            raise InvalidFieldError(f"func must return dx/dt like x, of shape {tuple(x.shape)}; got {got}.")
        rate, square = trace.of(u, x, noise, keeps)
    u = u if keeps else u.detach()
    kinetic, jacobian = wanted
    energy = [0.5 * u.flatten(1).square().mean(1)] if kinetic else []
    return u, rate, *energy, *([square / math.prod(x.shape[1:])] if jacobian else [])


# ---- Operations of a graph of torch.compile (compiled/in_graph.py)


def _flow_leaves(flow: CNF, x: Tensor, args: tuple, noise: Tensor | None) -> tuple[Tensor, ...]:
    return tuple([part for part in flow(x, *args, noise=noise) if part is not None])


def _flow_likes(flow: CNF, x: Tensor, args: tuple, noise: Tensor | None) -> list[Tensor]:
    z = like_state(x)
    return [z, *[z.new_empty(len(x)) for _ in range(1 + flow.kinetic + flow.jacobian)]]


def _inverse_leaves(flow: CNF, z: Tensor, args: tuple) -> tuple[Tensor]:
    return (flow.inverse(z, *args),)


def _inverse_likes(flow: CNF, z: Tensor, args: tuple) -> list[Tensor]:
    return [like_state(z)]
