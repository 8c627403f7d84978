"""What a gradient method is: an immutable value that solves a problem differentiably."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torchmali._torch import may_have_tangents
from torchmali.abstract import Abstract
from torchmali.compiled.recording import NotCompiledError
from torchmali.controllers import StepController
from torchmali.errors import DoubleBackwardError, NonRepeatableFieldError
from torchmali.field.environment import in_forward_pass
from torchmali.field.evaluate import Field
from torchmali.field.recorder import Followed, RecordedEffects, Recorder
from torchmali.integrate import integrate
from torchmali.loop.base import Integration
from torchmali.outputs.base import Outputs
from torchmali.solution import Stats
from torchmali.solvers.base import Slope, Solver
from torchmali.solvers.leapfrog import Leapfrog
from torchmali.state.fixed_point import FixedPointArithmetic
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors
from torchmali.tape import Tape


class Problem(NamedTuple):
    """A checked call of `solve`, on leaves."""

    field: Field
    z0: Tensors
    times: list[float]
    t: Tensor | None  # the times as a tensor, if they require a gradient
    solver: Solver
    controller: StepController
    outputs: Outputs
    wants_code: bool = False

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """All tensors that may get a gradient, in the order of the autograd.Functions' inputs."""
        return (self.t, *self.z0, *self.field.theta, *self.outputs.theta)

    @property
    def coarsest(self) -> torch.dtype:
        """The dtype of the leaf with the fewest digits."""
        return max((z.dtype for z in self.z0), key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def n_steps(self) -> int | None:
        """The number of steps; None if it is not known in advance."""
        return self.controller.n_steps_with_jumps(self.solver, self.times, self.field.jumps)

    @property
    def span(self) -> float:
        return abs(self.times[-1] - self.times[0])

    @property
    def wants_gradient(self) -> bool:
        # Forward-mode tangents count too: autograd then says that there is no rule for them, instead of giving zero.
        if not torch.is_grad_enabled():
            return False
        inputs = [x for x in self.inputs if x is not None]
        return any([x.requires_grad for x in inputs]) or any([has_tangent(x) for x in inputs])


class Solved(NamedTuple):
    """A solved problem."""

    results: Tensors  # of its outputs
    stats: Stats
    integration: Integration


def solve_forward(
    problem: Problem,
    z0: Tensors,
    times: Sequence[Any],
    arithmetic: Any = Floats,
    tape: Tape | None = None,
    through_search: bool = False,
    recorder: Recorder | Followed | None = None,
) -> Solved:
    """Solve a problem from z0 in the grad mode that is on. arithmetic, tape, through_search: see `integrate`.

    recorder: evaluates f in its place.
    """
    field, outputs = problem.field, problem.outputs
    # If bits count, f has to return those of the backward pass.
    f = field.with_bits_of_backward() if isinstance(arithmetic, FixedPointArithmetic) else field
    solver, controller, jumps = problem.solver, problem.controller, field.jumps
    effects: Any = field.environment

    def run(f: Slope, effects: Any, outputs: Outputs, tape: Tape | None) -> Integration:
        return integrate(
            f,
            z0,
            times,
            solver,
            controller,
            outputs,
            arithmetic=arithmetic,
            tape=tape,
            side_effects=effects,
            through_search=through_search,
            jumps=jumps,
        )

    effects.source.begin(field.device)
    environments = [effects, *[function.environment for function in outputs.functions]]
    if recorder is None:
        done = in_forward_pass(environments, lambda: run(f, effects, outputs, tape))
    else:
        recorded = RecordedEffects(effects, recorder)
        done = in_forward_pass(environments, lambda: run(recorder, recorded, outputs, tape))
    stats = done.stats(field.n_evals)
    _raise_for_late_draws(problem, lambda: run(f, effects, outputs.again(), None))
    return Solved(outputs.results(), stats, done)


def _raise_for_late_draws(problem: Problem, repeat: Callable[[], Any]) -> None:
    """Raise if a function drew random numbers, but none in its first evaluation, after which nothing is redirected.

    If the default generators are where they were, none did. If they moved, it may have been another thread: the solve
    is repeated, and only that tells.
    """
    source, functions = problem.field.environment.source, (problem.field, *problem.outputs.functions)
    suspects = [function for function in functions if not function.environment.draws]
    if source.is_fresh or not suspects or not source.look():
        return
    with ExitStack() as stack:
        for function in functions:
            stack.enter_context(function.refusing_draws())
        stack.enter_context(torch.no_grad())
        repeat()


def solve_without_graph(
    problem: Problem, arithmetic: Any = Floats, tape: Tape | None = None, recorder: Recorder | None = None
) -> Solved:
    """Solve a problem without a graph."""
    z0 = tuple([z.detach() for z in problem.z0])
    with torch.no_grad():
        return solve_forward(problem, z0, problem.times, arithmetic, tape, recorder=recorder)


def through_function(function: Any, method: GradientMethod, problem: Problem) -> Solved:
    """Solve through an autograd.Function, whose forward appends what it solved to a list: it returns tensors alone."""
    found: list[Solved] = []
    results = function.apply(method, problem, found, *problem.inputs)
    return found[0]._replace(results=results)


def has_tangent(x: Tensor) -> bool:
    """Whether forward-mode differentiation follows x."""
    return may_have_tangents() and forward_ad.unpack_dual(x).tangent is not None


class GradientMethod(Abstract):
    """How a solve is differentiated.

    compares_first_value: its backward pass evaluates f at the start, to see whether it is the same function.
    obstacle_to_dense: the reason why it does not differentiate a dense solution; None: it does.
    """

    compares_first_value: ClassVar[bool] = False
    obstacle_to_dense: ClassVar[str | None] = "its backward pass does not see them"

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
        if isinstance(solver, Leapfrog) and solver.refresh_policy == "auto":
            found.append(f'{solver} (use refresh="never", or a number of steps)')
        return found

    @abstractmethod
    def solve(self, problem: Problem) -> Solved:
        """The solution, with results that can be differentiated."""

    def solve_compiled(self, problem: Problem) -> Solved:
        """The same from compiled loops; raise NotCompiledError with a reason if there are none for this problem."""
        raise NotCompiledError(f"{self} is not compiled (use gradient=MALI())")


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
