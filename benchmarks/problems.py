"""Small problems with a gradient known to ten digits and more: float64, L = sum z(T)^2.

The problems are those of the design notes; the gradient is that by z0 and by the parameters theta.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchmali as tm
from experiments.theory.problems import linear_field, mlp_field, van_der_pol_field


@dataclass(frozen=True, eq=False)
class Problem:
    """z' = f(t, z, *theta) from z0 over [0, t_end]. flow: z(t_end) from (z0, *theta), where there is a closed form."""

    name: str
    f: Callable[..., Tensor]
    z0: Tensor
    theta: tuple[Tensor, ...]
    t_end: float
    flow: Callable[..., Tensor] | None = None

    def gradient(self, end: Callable[..., Tensor]) -> Tensor:
        """Return (dL/dz0, dL/dtheta) as one vector, where end(z0, *theta) = z(t_end)."""
        inputs = [x.clone().requires_grad_() for x in (self.z0, *self.theta)]
        end(*inputs).square().sum().backward()
        return torch.cat([x.grad.flatten() for x in inputs if x.grad is not None])

    def solved_gradient(self, **how: Any) -> tuple[Tensor, tm.Stats]:
        """Return the gradient of a solve, and its counts. how: solver, controller and gradient of `solve`."""
        stats = []

        def end(z0: Tensor, *theta: Tensor) -> Tensor:
            solution = tm.solve(self.f, z0, (0.0, self.t_end), args=theta, **how)
            stats.append(solution.stats)
            return solution.y[-1]

        return self.gradient(end), stats[0]

    def reference(self) -> tuple[Tensor, float]:
        """Return the gradient, and its relative difference from that of a second method.

        The two methods are the first two of: the closed form, ACA with Dopri8, plain autograd with Tsit5. Both solves
        have rtol 1e-12.
        """
        controller = tm.AdaptiveStep(rtol=1e-12, atol=1e-16, max_steps=10**6)
        methods = [(tm.Dopri8(), tm.ACA()), (tm.Tsit5(), tm.Naive())]
        found = [] if self.flow is None else [self.gradient(self.flow)]
        for solver, gradient in methods[: 2 - len(found)]:
            found.append(self.solved_gradient(solver=solver, controller=controller, gradient=gradient)[0])
        first, second = found
        return first, relative_error(second, first)


def relative_error(g: Tensor, reference: Tensor) -> float:
    return float((g - reference).norm() / reference.norm())


def _vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _mlp() -> Problem:
    rng = np.random.default_rng(0)
    w1, b1 = rng.standard_normal((5, 16)) / math.sqrt(5), 0.1 * rng.standard_normal(16)
    w2, b2 = rng.standard_normal((16, 4)) / 4, 0.1 * rng.standard_normal(4)
    z0 = np.random.default_rng(1).standard_normal((3, 4))

    return Problem("MLP", mlp_field, torch.from_numpy(z0), tuple(map(torch.from_numpy, (w1, b1, w2, b2))), 5.0)


def _toy(alpha: float, t_end: float) -> Problem:
    return Problem(
        f"toy {alpha:+g}",
        linear_field,
        _vector(1.0),
        (_vector(alpha),),
        t_end,
        flow=lambda z, alpha: z * torch.exp(t_end * alpha),
    )


def _van_der_pol(mu: float, t_end: float) -> Problem:
    return Problem("Van der Pol", van_der_pol_field, _vector(2.0, 0.1), (torch.tensor(mu, dtype=torch.float64),), t_end)


def _oscillator(stiffness: float, friction: float, t_end: float) -> Problem:
    def f(t: Tensor, z: Tensor, theta: Tensor) -> Tensor:
        return torch.stack([z[1], -theta[0] * z[0] - theta[1] * z[1]])

    def flow(z: Tensor, theta: Tensor) -> Tensor:
        matrix = torch.stack([_vector(0.0, 1.0), -theta])
        return torch.matrix_exp(t_end * matrix) @ z

    return Problem("oscillator", f, _vector(1.0, 0.0), (_vector(stiffness, friction),), t_end, flow)


PROBLEMS = (
    _mlp(),
    _toy(0.1, 20.0),
    _toy(-0.1, 20.0),
    _toy(-1.0, 10.0),
    _van_der_pol(2.0, 5.0),
    _oscillator(4.0, 0.2, 10.0),
)
