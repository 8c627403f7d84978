"""The backward walk over the tape, shared by ACA and MALI.

Which steps keep their state is the whole difference between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from torchmali.field import Field, without_hooks
from torchmali.gradients.base import GradientMethod, Problem, forward, refuse_double_backward
from torchmali.solvers.base import Cotangent, Inside, Passed, Solver, accumulate
from torchmali.state import Floats, State, Tensors
from torchmali.tape import Output, Refresh, Step


class ReplayGradient(GradientMethod):
    """A gradient method that keeps the tape of the forward pass and walks back over it."""

    keep_every: int | None

    def solve(self, problem: Problem) -> Tensors:
        if not problem.wants_gradient:
            return forward(problem)[0]
        return _Replay.apply(self, problem, *problem.inputs)  # type: ignore[return-value]

    def judge_forward(self, problem: Problem) -> None:
        """Look at a finished forward pass that is to be walked back."""

    def judge_backward(self, rebuilt: Tensors, z0: Tensors, z_end: Tensors) -> float | None:
        """Compare the start with what the walk made of it; gives Stats.reconstruction_error."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, method: ReplayGradient, problem: Problem, *inputs: Tensor | None) -> Tensors:
        outputs, end, tape = forward(problem, method.keep_every)
        method.judge_forward(problem)
        ctx.set_materialize_grads(False)
        ctx.method, ctx.events, ctx.stats = method, tape.events, problem.stats
        ctx.field, ctx.solver = problem.field.without_theta(), problem.solver
        ctx.sizes = len(problem.times), len(problem.z0), len(problem.field.theta), len(end.slope)
        ctx.save_for_backward(*inputs, *end.point, *end.slope, *tape.kept)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_y: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward(type(ctx.method).__name__)
        n_times, n, n_theta, n_slopes = ctx.sizes
        saved, sizes = iter(ctx.saved_tensors), (1, n, n_theta, n, n_slopes, None)
        t, z0, theta, point, slope, kept = (tuple(islice(saved, size)) for size in sizes)
        f = ctx.field.with_theta(theta, wants_t=ctx.needs_input_grad[2])
        point = tuple(x.detach() for x in point)  # an f that calls y.requires_grad_() leaves its mark
        with torch.enable_grad(), without_hooks(theta):  # for f; nothing else here requires a gradient
            state, a, a_t = walk(f, ctx.solver, ctx.events, Floats(point, slope), kept, grad_y, n_times)
        ctx.stats.n_evals_backward, ctx.stats.n_vjps = f.n_evals, f.n_vjps
        ctx.stats.reconstruction_error = ctx.method.judge_backward(state.point, z0, point)
        return (None, None, torch.stack([f.time(x) for x in a_t]).to(t[0]) if f.wants_t else None, *a.sums)


def walk(
    f: Field,
    solver: Solver,
    events: Sequence[Step | Refresh | Output],
    state: State,
    kept: Sequence[Tensor],
    grad_y: Sequence[Tensor | None],
    n_times: int,
) -> tuple[State, Cotangent, list]:
    """Pull dL/dy back over the tape: the state at its start, dL/d(z, v, theta) there, and dL/dt.

    Gradients of times hold h fixed: a grid point inside a segment moves with the segment's start, the last one with its
    end. `end` is the output time with which the boundary at hand moves, `start` that of the segment's start.
    """
    n, n_slopes = len(state.point), len(state.slope)
    a = Cotangent(state, len(f.theta))
    a_t: list = [0.0] * n_times
    landed = [event.k for event in events if isinstance(event, Output) and event.inside is None]
    start = end = landed[-1]
    inside: list[Inside] = []
    for event in reversed(events):
        if isinstance(event, Step):
            before = None
            if event.before is not None:
                split = event.before + n
                before = Floats(tuple(kept[event.before : split]), tuple(kept[split : split + n_slopes]))
            state = solver.pullback(f, Passed(event.t0, event.t1, before, inside), state, a)
            if f.wants_t:
                a_t[start] = a_t[start] + a.t0
                a_t[end] = a_t[end] + a.t1
                for output, dt in zip(inside, a.inside, strict=True):
                    a_t[output.k] = a_t[output.k] + dt
                a.t0, a.t1, a.inside = 0.0, 0.0, ()
            inside = []
            end = start
        elif isinstance(event, Output):
            slices = [None if g is None else g[event.k] for g in grad_y]
            if event.inside is not None:
                inside.append(Inside(event.k, event.inside, slices))
            else:
                accumulate(a.z, slices)
                end = landed.pop()
                start = landed[-1] if landed else end
        else:
            _, g, g_t = f.linearize(event.t, state.point, a.v)
            accumulate(a.sums, g)
            torch._foreach_zero_(a.v)
            if g_t is not None:
                a_t[end] = a_t[end] + g_t
    return state, a, a_t
