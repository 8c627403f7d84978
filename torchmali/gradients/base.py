"""What a gradient method is: a value that solves a problem differentiably."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchmali.controllers import StepController
from torchmali.errors import DoubleBackwardError, NonRepeatableFieldError
from torchmali.field.environment import Environment
from torchmali.field.evaluate import Field
from torchmali.integrate import Emit, SideEffects, integrate
from torchmali.outputs.base import Outputs
from torchmali.solution import Stats
from torchmali.solvers.base import Slope, Solver
from torchmali.state.base import State
from torchmali.state.floats import Floats
from torchmali.state.traced import Traced
from torchmali.state.vectors import Tensors, Time
from torchmali.tape import Tape


@dataclass
class Problem:
    """A checked call of `solve`, on leaves."""

    field: Field
    z0: Tensors
    times: list[float]
    t: Tensor | None  # the times as a tensor, where they require a gradient
    solver: Solver
    controller: StepController
    outputs: Outputs
    stats: Stats
    wants_code: bool = False
    record: tuple[State, Tape] | None = None  # how it ended, where a code of it is wanted

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """All that may get a gradient, in the order of the autograd.Functions' inputs."""
        return (self.t, *self.z0, *self.field.theta, *self.outputs.theta)

    @property
    def coarsest(self) -> torch.dtype:
        """The dtype of the leaf with the fewest digits."""
        return max((z.dtype for z in self.z0), key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def span(self) -> float:
        return abs(self.times[-1] - self.times[0])

    def integrate(self, z0: Tensors, times: Sequence[Time], emit: Emit, **how: Any) -> tuple[State, Tape]:
        # Where bits count, f has to return those of the backward pass.
        is_exact = how.get("arithmetic", Floats) is not Floats and how["arithmetic"] is not Traced
        f = self.field.with_bits_of_backward() if is_exact else self.field
        source = self.field.environment.source
        source.begin(self.field.device)
        with ExitStack() as stack:
            for function in (self.field, *self.outputs.functions):
                stack.enter_context(function.environment.forward_pass())
            how["effects"] = _SideEffects(self.field.environment, self.outputs)
            end, tape = integrate(f, z0, times, self.solver, self.controller, emit, self.stats, **how)
        self.stats.n_evals_forward = self.field.n_evals
        self._look_for_late_draws(f, z0, times, how)
        return end, tape

    def _look_for_late_draws(self, f: Slope, z0: Tensors, times: Sequence[Time], how: dict[str, Any]) -> None:
        """Raise if a function drew random numbers, but none in its first evaluation, after which nothing is redirected.

        If the default generators are where they were, none did. If they moved, it may have been another thread: the
        solve is repeated, and only that tells.
        """
        source, functions = self.field.environment.source, (self.field, *self.outputs.functions)
        suspects = [function for function in functions if not function.environment.draws]
        if source.is_fresh or not suspects or not source.look():
            return

        def emit(k: int, z: Tensors) -> None:
            self.outputs.show(times[k], z, k)

        how = {name: value for name, value in how.items() if name != "tape"}
        with ExitStack() as stack:
            for function in functions:
                stack.enter_context(function.refusing_draws())
            stack.enter_context(torch.no_grad())
            integrate(f, z0, times, self.solver, self.controller, emit, Stats(), **how)

    @property
    def wants_gradient(self) -> bool:
        # Forward-mode tangents count too: autograd then says that there is no rule for them, instead of giving zero.
        inputs = [x for x in self.inputs if x is not None]
        return torch.is_grad_enabled() and any(x.requires_grad or has_tangent(x) for x in inputs)


def has_tangent(x: Tensor) -> bool:
    """Whether forward-mode differentiation follows x."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


class _SideEffects(SideEffects):
    """What the evaluations of f, and the outputs, leave behind."""

    def __init__(self, around: Environment, outputs: Outputs):
        self.around, self.outputs = around, outputs

    @property
    def eps(self) -> float:
        return self.around.eps

    def mark(self) -> Any:
        return self.around.mark(), self.outputs.mark()

    def back_to(self, mark: Any) -> None:
        around, outputs = mark
        self.around.back_to(around)
        self.outputs.back_to(outputs)


class GradientMethod(ABC):
    @property
    def on_integers(self) -> bool:
        """Whether it solves on an integer grid."""
        return False

    def check(self, solver: Solver, controller: StepController) -> None:
        """Raise if this method cannot differentiate this solver's steps."""
        controller.check(solver)

    def data_dependent_parts(self, solver: Solver, controller: StepController) -> list[str]:
        """What lets the number of evaluations of f depend on the data, each with what to use in its place."""
        found = [f"{type(controller).__name__} (use FixedStep(h))"] if controller.adaptive else []
        if solver.refresh_policy == "auto":
            found.append(f'{solver} (use refresh="never", or a number of steps)')
        return found

    @abstractmethod
    def solve(self, problem: Problem) -> Tensors:
        """What the outlet makes of the solution."""


@torch.no_grad()
def forward(problem: Problem, **how: Any) -> tuple[Tensors, State, Tape]:
    """Solve without a graph: the results, the end state and the tape. how: arithmetic and tape of `integrate`."""
    outputs, times = problem.outputs, problem.times
    z0 = tuple(z.detach() for z in problem.z0)
    end, tape = problem.integrate(z0, times, lambda k, z: outputs.emit(times[k], z, k), **how)
    problem.record = (end, tape) if problem.wants_code else None
    return outputs.results(), end, tape


def refuse_double_backward(method: str) -> None:
    """To be called in `backward`: grad mode is on there exactly under create_graph=True."""
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            f"{method} gives first derivatives only, but backward was called with create_graph=True. Use "
            "gradient=Naive() for second derivatives."
        )


def require_same(is_same: bool) -> None:
    if not is_same:
        raise NonRepeatableFieldError(
            "f is not the same function in the backward pass as in the forward pass: the same steps from the same "
            "state led elsewhere. Usual causes: noise drawn inside f from NumPy or from a generator of its own (draw "
            'it once, outside f), a buffer that f reads and changes, as in a spectral norm (buffers="freeze"), f or '
            "its inputs changed between forward and backward (pass what changes from call to call through "
            "args=(...)), or kernels that are not deterministic (torch.use_deterministic_algorithms)."
        )
