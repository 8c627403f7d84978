"""The continuous adjoint method: Eq. 2-3 of the paper, solved backwards in time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchmali.controllers import AdaptiveStep, Norm, StepController, checked_norm, rms_norm
from torchmali.errors import warn
from torchmali.field.evaluate import Field
from torchmali.gradients.base import (
    GradientMethod,
    Problem,
    Solved,
    refuse_double_backward,
    require_same,
    solve_without_graph,
    through_function,
)
from torchmali.integrate import integrate
from torchmali.outputs.base import Outputs
from torchmali.solution import TELL_LIMIT, short_repr
from torchmali.solvers.base import Solver
from torchmali.solvers.cotangent import accumulate
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors, Time, added, dot


@dataclass(frozen=True, repr=False)
class Adjoint(GradientMethod):
    """A second solve, of (z, a, dL/dtheta) backwards in time: constant memory, not exact.

    The backward trajectory parts from the forward one, and the gradient is that of the ODE up to the tolerance of both
    solves, not that of the discretisation. solver, controller: those of the backward solve (None: the forward ones).
    seminorm: leave dL/dtheta out of the error norm ("Hey, that's not an ODE", Kidger et al. 2021): fewer steps. norm:
    a norm of the scaled error of the whole backward state, in place of the largest of the norms of its parts. It maps
    the leaves of z, those of a and then dL/dtheta to a 0-d tensor.
    """

    solver: Solver | None = None
    controller: StepController | None = None
    seminorm: bool = False
    norm: Norm | None = None
    compares_first_value: ClassVar[bool] = True
    obstacle_to_dense: ClassVar[str | None] = "its backward solve takes steps of its own"

    __repr__ = short_repr

    def check(self, solver: Solver, controller: StepController) -> None:
        super().check(solver, controller)
        (self.controller or controller).check(self.solver or solver)

    def data_dependent_parts(self, solver: Solver, controller: StepController) -> list[str]:
        back = super().data_dependent_parts(self.solver or solver, self.controller or controller)
        return list(dict.fromkeys([*super().data_dependent_parts(solver, controller), *back]))

    def solve(self, problem: Problem) -> Solved:
        if not problem.wants_gradient:
            return solve_without_graph(problem)
        return through_function(_Adjoint, self, problem)

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
            norm=self.norm or _augmented_norm(controller.norm, n, self.seminorm),
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
    def forward(ctx: Any, method: Adjoint, problem: Problem, found: list[Solved], *inputs: Tensor | None) -> Tensors:
        solved, outputs = solve_without_graph(problem), problem.outputs
        found.append(solved)
        # The states from which the backward solve begins: at every output time, or at the last one.
        y = outputs.backward_states(solved.results, solved.integration.state.point)
        ctx.set_materialize_grads(False)
        ctx.solver = method.solver or problem.solver
        ctx.controller = method.backward_controller(problem.controller, problem.field)
        ctx.times, ctx.stats, ctx.outputs = outputs.times, solved.stats, outputs.fresh()
        ctx.field, fixed, n_theta = problem.field.without_tensors(), problem.field.fixed, len(problem.field.theta)
        ctx.sizes = 1, len(y), n_theta, len(outputs.theta), len(fixed), len(y)
        ctx.save_for_backward(*inputs, *fixed, *y)
        return solved.results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward("Adjoint")
        saved = iter(ctx.saved_tensors)
        (t,), z0, theta, observer, fixed, y = (tuple(islice(saved, size)) for size in ctx.sizes)
        z0 = tuple(x.detach() for x in z0)
        f: Field = ctx.field.with_tensors(theta, fixed, wants_t=False)
        outputs: Outputs = ctx.outputs.with_tensors(observer, wants_t=t is not None)
        back = _AdjointSolve(f, outputs, ctx.times, ctx.solver, ctx.controller, y, t is not None)
        f.enter(ctx.times[0], ctx.times[-1])
        with f.backward_pass(ctx.times[0], z0), outputs.backward_pass(ctx.times[0], z0):
            require_same(f.is_as_first(ctx.times[0], z0))
            last = len(ctx.times) - 1 if outputs.event_at is None else outputs.event_at
            for k in range(last, -1, -1):
                back.pull_output(k, grads)
                if k > 0:
                    back.solve_to(k - 1)
        if not outputs.keeps_states:
            _warn_of_drift(Floats(back.z, back.z), Floats(z0, z0), ctx.controller)
        ctx.stats.count(n_evals_backward=f.n_evals, n_vjps=f.n_vjps)
        a_t = None if t is None else torch.stack(outputs.of_given_times(back.a_t)).to(t)
        a_theta = [
            torch.view_as_complex(a) if p.is_complex() else a for a, p in zip(back.a_theta, f.theta, strict=True)
        ]
        return (None, None, None, a_t, *back.a, *a_theta, *back.a_observer)


class _AdjointSolve:
    """The backward solve: z and the adjoints of z, theta and the times, from the last output time to the first."""

    def __init__(
        self,
        f: Field,
        outputs: Outputs,
        times: Sequence[float],
        solver: Solver,
        controller: StepController,
        y: Tensors,
        wants_t: bool,
    ):
        self.f, self.outputs, self.times, self.y, self.wants_t = f, outputs, times, y, wants_t
        self.solver, self.controller, self.slope = solver, controller, _augmented(f)
        self.z = tuple(leaf[-1] for leaf in y)
        self.a = [torch.zeros_like(leaf[0]) for leaf in y]
        self.a_theta = tuple(_real(torch.zeros_like(p)) for p in f.theta)
        self.a_observer: list[Tensor | None] = [None] * len(outputs.theta)
        self.a_t = [f.scalar(0.0)] * len(times)

    def pull_output(self, k: int, grads: Sequence[Tensor | None]) -> None:
        """Add what the results depend on y[k]."""
        t = self.times[k]
        if self.outputs.keeps_states:
            self.z = tuple(leaf[k] for leaf in self.y)  # the backward solve begins anew at each output
        if self.wants_t and k == 0:
            self.f.enter(t, self.times[-1])
            self.a_t[0] = self.a_t[0] - dot(self.a, self.f(t, self.z))
        elif self.wants_t:
            self._pull_moving_jump(k)
        with torch.enable_grad():
            g, g_observer, g_t = self.outputs.pull(k, t, self.z, grads)
        accumulate(self.a, g)
        accumulate(self.a_observer, g_observer)
        if self.wants_t and k > 0:
            self.f.enter(t, self.times[0])
            pairs = [(x, u) for x, u in zip(g, self.f(t, self.z), strict=True) if x is not None]
            self.a_t[k] = self.a_t[k] + dot(*zip(*pairs, strict=True)) if pairs else self.a_t[k]
        if g_t is not None:
            self.a_t[k] = self.a_t[k] + g_t

    def _pull_moving_jump(self, k: int) -> None:
        """Add what the solution behind an output time depends on a jump there, which moves with it."""
        t, jumps = self.times[k], self.f.jumps
        goes_on = k + 1 < len(self.times) and self.times[k + 1] != t  # else it is the end, or an event ends it here
        if jumps is not None and jumps.is_at(t) and goes_on:
            self.f.enter(t, self.times[-1])
            behind = self.f(t, self.z)
            self.f.enter(t, self.times[0])
            self.a_t[k] = self.a_t[k] + dot(self.a, added(self.f(t, self.z), behind, -1.0))

    def solve_to(self, k: int) -> None:
        """Solve from times[k + 1] to times[k]."""
        n, start = len(self.z), (*self.z, *self.a, *self.a_theta)
        segment, how = (self.times[k + 1], self.times[k]), {"jumps": self.f.jumps, "warns": False}
        if segment[0] == segment[1]:  # an event at an output time
            return
        end = integrate(self.slope, start, segment, self.solver, self.controller, **how).state.point
        self.z, self.a, self.a_theta = end[:n], list(end[n : 2 * n]), end[2 * n :]


def _warn_of_drift(reached: Floats, start: Floats, controller: StepController) -> None:
    """Warn if the backward solve left the forward trajectory: without outputs to restart from, it may not return."""
    tolerance = max(controller.rtol) if isinstance(controller, AdaptiveStep) else 0.0
    drift = reached.deviation(start, start, 1.0).row  # tolerances are not meant for small components
    if drift > max(TELL_LIMIT, 10 * tolerance):
        warn(
            f"The backward solve of the adjoint missed y0 by a relative {drift:.2g}: it parted from the solution, and "
            "the gradient is about as wrong. Use gradient=MALI() or ACA(), or leave `observe` out: kept outputs lead "
            "it."
        )


def _augmented(f: Field) -> Callable[[Time, Tensors], Tensors]:
    """d/dt (z, a, dL/dtheta) = (f, -a df/dz, -a df/dtheta)"""
    n = f.structure.spec.num_leaves

    def slope(t: Time, x: Tensors) -> Tensors:
        with torch.enable_grad():
            u, g, _ = f.linearize(t, x[:n], x[n : 2 * n])
        grads = [torch.zeros_like(y) if dy is None else -_real(_dense(dy)) for dy, y in zip(g, x[n:], strict=True)]
        return (*u, *grads)

    return slope


def _real(x: Tensor) -> Tensor:
    """That of a complex parameter is solved for as pairs of real numbers."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _dense(x: Tensor) -> Tensor:
    """That of an embedding may be sparse."""
    return x if x.layout == torch.strided else x.to_dense()
