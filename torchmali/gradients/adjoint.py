"""The continuous adjoint method: Eq. 2-3 of the paper, solved backwards in time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from torchmali.controllers import AdaptiveStep, Norm, StepController, checked_norm, rms_norm
from torchmali.errors import IncompatibleError, warn
from torchmali.field.evaluate import Field
from torchmali.gradients.base import GradientMethod, Problem, forward, refuse_double_backward, require_same
from torchmali.integrate import integrate
from torchmali.outputs.base import Outputs
from torchmali.solution import TELL_LIMIT, Stats, short_repr
from torchmali.solvers.base import Solver, accumulate
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors, Time, dot


@dataclass(frozen=True, repr=False)
class Adjoint(GradientMethod):
    """A second solve, of (z, a, dL/dtheta) backwards in time: constant memory, not exact.

    The backward trajectory parts from the forward one, and the gradient is that of the ODE up to the tolerance of both
    solves, not that of the discretisation. solver, controller: those of the backward solve (None: the forward ones).
    seminorm: leave dL/dtheta out of the error norm ("Hey, that's not an ODE", Kidger et al. 2021): fewer steps.
    """

    solver: Solver | None = None
    controller: StepController | None = None
    seminorm: bool = False

    __repr__ = short_repr

    def check(self, solver: Solver, controller: StepController) -> None:
        super().check(solver, controller)
        (self.controller or controller).check(self.solver or solver)

    def data_dependent_parts(self, solver: Solver, controller: StepController) -> list[str]:
        back = super().data_dependent_parts(self.solver or solver, self.controller or controller)
        return list(dict.fromkeys([*super().data_dependent_parts(solver, controller), *back]))

    def solve(self, problem: Problem) -> Tensors:
        if not problem.wants_gradient:
            return forward(problem)[0]
        if any(x.is_complex() for x in problem.field.theta):
            raise IncompatibleError(
                "Adjoint() integrates dL/dtheta, which must be real: f has complex parameters. Use MALI() or ACA()."
            )
        return _Adjoint.apply(self, problem, *problem.inputs)  # type: ignore[return-value]

    def backward_controller(self, forward: StepController, field: Field) -> StepController:
        """The controller of the augmented state (z, a, dL/dtheta)."""
        controller = forward if self.controller is None else self.controller.bind(field.structure)
        if not isinstance(controller, AdaptiveStep):
            return controller
        tolerances, m = zip(controller.rtol, controller.atol, strict=True), len(field.theta)
        n = sum(all(map(math.isfinite, pair)) for pair in tolerances)  # leaves that the norm will see
        return replace(
            controller,
            rtol=(*controller.rtol, *controller.rtol, *[min(controller.rtol)] * m),
            atol=(*controller.atol, *controller.atol, *[min(controller.atol)] * m),
            norm=_augmented_norm(controller.norm, n, self.seminorm),
            land=True,
        )


def _augmented_norm(norm: Norm, n: int, seminorm: bool) -> Norm:
    def augmented_norm(x: Tensors) -> Tensor:
        norms = [checked_norm(norm, x[:n]), checked_norm(norm, x[n : 2 * n])]
        if not seminorm:
            norms += [rms_norm((g,)) for g in x[2 * n :]]
        return torch.stack(norms).max()

    return augmented_norm


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, method: Adjoint, problem: Problem, *inputs: Tensor | None) -> Tensors:
        results, _, _ = forward(problem)
        y, outputs = problem.outputs.states(results), problem.outputs
        ctx.set_materialize_grads(False)
        ctx.solver = method.solver or problem.solver
        ctx.controller = method.backward_controller(problem.controller, problem.field)
        ctx.times, ctx.stats, ctx.outputs = problem.times, problem.stats, outputs.without_tensors()
        ctx.field, fixed, n_theta = problem.field.without_tensors(), problem.field.fixed, len(problem.field.theta)
        ctx.sizes = 1, len(y), n_theta, len(outputs.theta), len(fixed), len(y)
        ctx.save_for_backward(*inputs, *fixed, *y)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("Adjoint")
        saved = iter(ctx.saved_tensors)
        (t,), z0, theta, observer, fixed, y = (tuple(islice(saved, size)) for size in ctx.sizes)
        z0 = tuple(x.detach() for x in z0)
        f: Field = ctx.field.with_tensors(theta, fixed, wants_t=False)
        outputs: Outputs = ctx.outputs.with_tensors(observer, wants_t=t is not None)
        n, times, z = len(y), ctx.times, tuple(leaf[-1] for leaf in y)
        a = [torch.zeros_like(leaf[0]) for leaf in y]
        a_theta = tuple(torch.zeros_like(p) for p in f.theta)
        a_t, slope = [f.time(0.0)] * len(times), _augmented(f)
        a_observer: list[Tensor | None] = [None] * len(observer)
        with f.backward_pass(times[0], z0), outputs.backward_pass(times[0], z0):
            require_same(f.is_as_first(times[0], z0))
            for k in range(len(times) - 1, -1, -1):
                if outputs.keeps:
                    z = tuple(leaf[k] for leaf in y)  # the way back begins anew at each output
                if t is not None and k == 0:
                    a_t[0] = a_t[0] - dot(a, f(times[0], z))
                with torch.enable_grad():
                    g, g_observer, g_t = outputs.pull(times[k], z, k, grads)
                accumulate(a, g)
                accumulate(a_observer, g_observer)
                if t is not None and k > 0:
                    pairs = [(x, u) for x, u in zip(g, f(times[k], z), strict=True) if x is not None]
                    a_t[k] = dot(*zip(*pairs, strict=True)) if pairs else a_t[k]
                if g_t is not None:
                    a_t[k] = a_t[k] + g_t
                if k > 0:
                    start, segment = (*z, *a, *a_theta), (times[k], times[k - 1])
                    end, _ = integrate(
                        slope, start, segment, ctx.solver, ctx.controller, lambda k, z: None, Stats(), warns=False
                    )
                    z, a, a_theta = end.point[:n], list(end.point[n : 2 * n]), end.point[2 * n :]
        if not outputs.keeps:
            _warn_of_drift(Floats(z, z), Floats(z0, z0), ctx.controller)
        ctx.stats.n_evals_backward, ctx.stats.n_vjps = f.n_evals, f.n_vjps
        return (None, None, None if t is None else torch.stack(a_t).to(t), *a, *a_theta, *a_observer)


def _warn_of_drift(reached: Floats, start: Floats, controller: StepController) -> None:
    """Without the outputs to begin anew from, the way back may part from the way forward for good."""
    tolerance = max(controller.rtol) if isinstance(controller, AdaptiveStep) else 0.0
    drift = reached.distance(start, start, 1.0).row  # tolerances are not meant for small components
    if drift > max(TELL_LIMIT, 10 * tolerance):
        warn(
            f"The adjoint's way back missed y0 by a relative {drift:.2g}: it parted from the solution, and the "
            "gradient is about as wrong. Use gradient=MALI() or ACA(), or leave `observe` out: kept outputs lead it."
        )


def _augmented(f: Field) -> Callable[[Time, Tensors], Tensors]:
    """d/dt (z, a, dL/dtheta) = (f, -a df/dz, -a df/dtheta)"""
    n = f.structure.spec.num_leaves

    def slope(t: Time, x: Tensors) -> Tensors:
        with torch.enable_grad():
            u, g, _ = f.linearize(t, x[:n], x[n : 2 * n])
        grads = [torch.zeros_like(y) if dy is None else -_dense(dy) for dy, y in zip(g, x[n:], strict=True)]
        return (*u, *grads)

    return slope


def _dense(x: Tensor) -> Tensor:
    """That of an embedding may be sparse."""
    return x if x.layout == torch.strided else x.to_dense()
