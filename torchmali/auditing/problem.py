"""Problem that an audit solves repeatedly, with one method after the other."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchmali.errors as errors
from torchmali._torch import buffers_of, put_buffers, tree_leaves, tree_map
from torchmali.auditing.budget import until
from torchmali.auditing.double import InDouble
from torchmali.controllers import StepController
from torchmali.errors import InvalidOptionError
from torchmali.field.evaluate import Field
from torchmali.field.parameters import find_parameters_and_modules
from torchmali.gradients.adjoint import Adjoint
from torchmali.gradients.base import GradientMethod
from torchmali.solution import Solution, Stats
from torchmali.solvers.base import Solver
from torchmali.solvers.runge_kutta import Dopri5, Dopri8
from torchmali.solving import solve
from torchmali.state.vectors import Tensors
from torchmali.tree import Structure

DIFFICULTIES = (errors.NonFiniteError, errors.StepLimitError, errors.StepUnderflowError)  # of a problem, not of a call
N_REPEATS = 4  # evaluations of f that must agree
FEW_ULP = 8  # by which the evaluations may differ on devices that sum in any order: not on the CPU


def unchanged(controller: StepController) -> StepController:
    return controller


class Problem(NamedTuple):
    """A solve, with a loss that is a function of its y (time first)."""

    func: Callable
    y0: Any
    t: Any
    loss: Callable[[Any], Tensor]
    args: tuple = ()
    params: Any = None
    options: Mapping[str, Any] = MappingProxyType({})  # further options of `solve`
    adapted: Callable[[StepController], StepController] = unchanged  # adapts a controller to this problem
    n_starts: int | None = None  # leaves of y0 whose gradient is compared; None: all
    accurate: Solver = Dopri8()  # for the reference
    deadline: float = math.inf  # f raises OutOfTime after this reading of the clock

    def solve(self, solver: Solver, controller: StepController, gradient: GradientMethod) -> Solution:
        how = {"solver": solver, "controller": self.adapted(controller), "gradient": gradient}
        func = until(self.deadline, self.func)
        return solve(func, self.y0, self.t, **how, args=self.args, params=self.params, **self.options)

    def probe(self, controller: StepController) -> int:
        """Solve once and return the number of steps. Wrong input raises the same errors as in `solve`."""
        try:
            y, stats = self.solve(Dopri5(), controller, Adjoint())[1:3]
        except DIFFICULTIES:  # each method reports its own
            return 0
        loss = self.loss(y)
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        is_number = isinstance(loss, Tensor) and loss.numel() == 1
        if not is_number:
            raise InvalidOptionError(
                f"loss must make a tensor of one element from the solution (y, time first); it made {got}."
            )
        return stats.n_steps

    def with_leaves(self) -> Problem:
        """Return the problem with a leaf or a parameter for each gradient; raise if f is not repeatable."""
        structure = Structure.of(self.y0)
        z0 = structure.flatten(self.y0)
        field = Field(self.func, z0, structure, self.args, self.params)
        t = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, self.t)
        values = [field(float(t[0]), z0) for _ in range(N_REPEATS)]
        draws = field.environment.draws
        if draws or not all(_agree(values[0], u) for u in values[1:]):
            raise errors.NonRepeatableFieldError(
                "f gives two answers to the same t and y (dropout or noise in f?): try it in eval mode."
            )
        starts = [z.detach().clone() for z in z0]
        for z in starts[: self.n_starts]:
            z.requires_grad_()
        args, params = tree_map(_leaf, self.args), field.theta[len(field.arguments.slots) :]
        return self._replace(y0=structure.rebuild(starts), t=t, args=args, params=params)

    def in_double(self) -> Problem:
        double = InDouble()
        params = [double.twin(p).requires_grad_() for p in self.params]
        y0, args = (tree_map(lambda x: _leaf(x, torch.float64), tree) for tree in (self.y0, self.args))
        func, loss = double.around(self.func), double.around(self.loss)
        return self._replace(func=func, y0=y0, loss=loss, args=args, params=params)

    def gradients(self, *method: Any) -> tuple[Sequence[Tensor | None], Stats]:
        """Return gradients of the loss, and counts, of one solve and its backward pass."""
        torch.manual_seed(torch.initial_seed())  # a loss with noise should be the same every time
        y, stats = self.solve(*method)[1:3]
        leaves = [x for x in tree_leaves((self.y0, self.args)) if isinstance(x, Tensor) and x.requires_grad]
        grads = torch.autograd.grad(self.loss(y), [*leaves, *self.params], allow_unused=True)
        for g in grads:
            if g is not None and g.device.type != "cpu":
                g.flatten()[:1].cpu()  # waits for the device, which has only queued the work
        return grads, stats


def _agree(u: Tensors, again: Tensors) -> bool:
    """Whether two values of f are the same: in all bits on the CPU, to a few ulp of the largest number elsewhere."""
    return all(_same(a.detach(), b.detach()) for a, b in zip(u, again, strict=True))


def _same(a: Tensor, b: Tensor) -> bool:
    if a.device.type == "cpu":
        return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    largest = a.abs().nan_to_num().amax().item() if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=FEW_ULP * torch.finfo(a.dtype).eps * largest, equal_nan=True)


def _leaf(x: Any, dtype: torch.dtype | None = None) -> Any:
    """Detach and cast x if it is a floating-point tensor."""
    is_real = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().to(dtype or x.dtype).requires_grad_(x.requires_grad) if is_real else x


@contextlib.contextmanager
def left_as_it_was(root: Any) -> Iterator[None]:
    """Restore the attributes and buffers of the modules in root at the end of the context."""
    _, modules = find_parameters_and_modules(root)
    plain = [m for m in modules if isinstance(buffers_of(m), dict)]  # not so for scripted modules
    kept = [(m, dict(vars(m)), dict(buffers_of(m))) for m in plain]
    values = [(b, b.detach().clone()) for m in modules for b in m.buffers(recurse=False)]
    try:
        yield
    finally:
        for m, attributes, buffers in kept:
            vars(m).clear()
            vars(m).update(attributes)
            put_buffers(m, buffers)
        for b, value in values:
            if not torch.equal(b, value):
                b.detach().copy_(value)
