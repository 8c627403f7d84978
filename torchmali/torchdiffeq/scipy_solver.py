"""SciPy's solvers as steps from each output time to the next: without gradients of their own."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchmali.errors import IncompatibleError, NonFiniteError
from torchmali.solvers.base import Attempt, Slope, Solver
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time, number


@dataclass(frozen=True)
class Scipy(Solver):
    """`scipy.integrate.solve_ivp` over each step. Results have no gradient: the backward pass raises an error.

    name: of SciPy's solver, such as "LSODA", "RK45", "DOP853", "Radau", "BDF". It works in float64 on the host. times:
    those of a solve, all of which are solved for in its first step; without them SciPy begins anew in each.
    """

    name: str = "LSODA"
    rtol: float = 1e-7
    atol: float = 1e-9
    min_step: float = 0.0
    max_step: float = math.inf
    times: tuple[float, ...] = ()
    remembers_steps: ClassVar[bool] = True

    @property
    def order(self) -> int:
        return 1  # of no meaning: its steps are not those of the solve

    def step(self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool) -> Attempt:
        z, n = state.point, len(state.point)
        if carry is None:
            is_start = self.times[:1] == (number(t0),)
            found = self._solved(f, z, self.times if is_start else (number(t0), number(t1)))
            carry = tuple([leaf for column in found[:, 1:].T for leaf in _leaves(column, z)])
        end = [_WithoutGradient.apply(x, y) for x, y in zip(carry[:n], z, strict=True)]
        return Attempt(state.of(tuple(end)), carry=carry[n:] or None)

    @torch.no_grad()
    def _solved(self, f: Slope, z: Tensors, times: Sequence[float]) -> Any:
        """The flattened states at all times, as columns."""
        how: dict[str, Any] = {"rtol": self.rtol, "atol": self.atol, "max_step": self.max_step, "t_eval": times}
        if self.name == "LSODA":  # the only one that has it
            how["min_step"] = self.min_step
        ends, start = (times[0], times[-1]), _flat(z).numpy()
        found = _solve_ivp()(lambda t, y: _flat(f(t, _leaves(y, z))).numpy(), ends, start, self.name, **how)
        if not found.success:
            raise NonFiniteError(f"SciPy's {self.name} stopped at t = {found.t[-1]:.6g}: {found.message}")
        return found.y


def _solve_ivp() -> Callable:
    try:
        return importlib.import_module("scipy.integrate").solve_ivp
    except ImportError as missing:
        raise IncompatibleError(
            f'method="scipy_solver" needs SciPy, which is not installed ({missing}): pip install scipy, or another '
            'method, such as "dopri5".'
        ) from None


def _flat(z: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1).to("cpu", torch.float64) for x in z])


def _leaves(flat: Any, like: Tensors) -> Tensors:
    parts = torch.tensor(flat).split([x.numel() for x in like])
    return tuple([part.to(x).reshape(x.shape) for part, x in zip(parts, like, strict=True)])


class _WithoutGradient(torch.autograd.Function):
    """The end of a step; in the backward pass an error, in place of a gradient that is missing."""

    @staticmethod
    def forward(ctx: Any, end: Tensor, start: Tensor) -> Tensor:
        return end.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise IncompatibleError(
            'odeint(method="scipy_solver") has no gradients: SciPy knows nothing of autograd. Use odeint_adjoint, or '
            'another method, such as "dopri5".'
        )
