"""Systems on which adaptive solvers are compared: networks, physics, and fields too stiff for loose tolerances.

Float64, L = sum z(T)^2, as in problems.py. SUITE and FURTHER are those over which evaluations are counted; STIFF are
those on which a solver has to be right, or say that it is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.problems import PROBLEMS, Problem
from benchmarks.workloads import W1, W2, Workload
from experiments.theory.problems import van_der_pol_field


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# Networks.


def of_module(name: str, module: nn.Module, z0: Tensor, t_end: float) -> Problem:
    """The problem of a module's field, whose parameters are theta."""
    module, names = module.double(), [name for name, _ in module.named_parameters()]

    def f(t: Tensor, z: Tensor, *theta: Tensor) -> Tensor:
        return functional_call(module, dict(zip(names, theta, strict=True)), (t, z))

    theta = tuple(p.detach().clone() for p in module.parameters())
    return Problem(name, f, z0.double(), theta, t_end)


def of_workload(workload: Workload, t_end: float) -> Problem:
    module, z0 = workload.make()
    return of_module(f"{workload.name}, T={t_end:g}", module, z0, t_end)


class Flow(nn.Module):
    """W4: a field in the plane and minus its divergence, estimated with fixed noise. # z: (batch, 3)"""

    noise: Tensor

    def __init__(self, batch: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.register_buffer("noise", torch.empty(batch, 2).bernoulli_().mul(2).sub(1))

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        keeps = torch.is_grad_enabled()
        with torch.enable_grad():
            x = z[:, :2] if z.requires_grad else z[:, :2].detach().requires_grad_()
            u = self.net(torch.cat([x, t.expand(len(x), 1).to(x)], 1))
            (g,) = torch.autograd.grad(u, x, self.noise, create_graph=keeps, retain_graph=True)
        found = torch.cat([u, -(g * self.noise).sum(1, keepdim=True)], 1)
        return found if keeps else found.detach()


def flow(t_end: float) -> Problem:
    torch.manual_seed(0)
    module = Flow(256)
    return of_module(f"W4, T={t_end:g}", module, torch.cat([torch.randn(256, 2), torch.zeros(256, 1)], 1), t_end)


class Convolution(nn.Module):
    """Two convolutions with group norms: W3 on a smaller state, smooth."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False),
            nn.GroupNorm(2, 8),
        )

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.layers(z)


def convolution() -> Problem:
    torch.manual_seed(0)
    return of_module("convolution", Convolution(), torch.randn(2, 8, 8, 8), 1.0)


# Physics. Each field takes its parameters as one vector.


def lotka_volterra(t: Any, z: Tensor, theta: Tensor) -> Tensor:
    a, b, c, d = theta
    x, y = z
    return torch.stack([a * x - b * x * y, d * x * y - c * y])


def lorenz(t: Any, z: Tensor, theta: Tensor) -> Tensor:
    sigma, rho, beta = theta
    x, y, w = z
    return torch.stack([sigma * (y - x), x * (rho - w) - y, x * y - beta * w])


def pendulum(t: Any, z: Tensor, theta: Tensor) -> Tensor:
    return torch.stack([z[1], -theta[0] * torch.sin(z[0]) - theta[1] * z[1]])


def fitzhugh_nagumo(t: Any, z: Tensor, theta: Tensor) -> Tensor:
    a, b, rate, current = theta
    v, w = z
    return torch.stack([v - v**3 / 3 - w + current, rate * (v + a - b * w)])


def brusselator(t: Any, z: Tensor, theta: Tensor) -> Tensor:
    a, b = theta
    x, y = z
    return torch.stack([a + x * x * y - (b + 1) * x, b * x - x * x * y])


def epidemic(t: Any, z: Tensor, theta: Tensor) -> Tensor:
    infection, recovery = theta[0] * z[0] * z[1], theta[1] * z[1]
    return torch.stack([-infection, infection - recovery, recovery])


def duffing(t: Any, z: Tensor, theta: Tensor) -> Tensor:
    a, b, c = theta
    return torch.stack([z[1], z[0] - a * z[0] ** 3 - b * z[1] + c * torch.cos(1.2 * t)])


def kepler(t: Any, z: Tensor, theta: Tensor) -> Tensor:
    q, p = z[:2], z[2:]
    return torch.cat([p, -theta * q / (q @ q) ** 1.5])


def physical(name: str, f: Callable[..., Tensor], z0: Tensor, theta: Tensor, t_end: float) -> Problem:
    return Problem(name, f, z0, (theta,), t_end)


BY_NAME = {problem.name: problem for problem in PROBLEMS}
SUITE = (
    BY_NAME["MLP"],
    of_workload(W1, 1.0),
    of_workload(W1, 5.0),
    of_workload(W2, 1.0),
    flow(1.0),
    flow(5.0),
    physical("Lotka-Volterra", lotka_volterra, vector(1.0, 1.0), vector(1.5, 1.0, 3.0, 1.0), 10.0),
    physical("Van der Pol", van_der_pol_field, vector(2.0, 0.1), torch.tensor(2.0, dtype=torch.float64), 10.0),
    physical("Lorenz", lorenz, vector(1.0, 1.0, 20.0), vector(10.0, 28.0, 8 / 3), 1.0),
)
FURTHER = (
    BY_NAME["oscillator"],
    physical("pendulum", pendulum, vector(2.0, 0.0), vector(4.0, 0.1), 10.0),
    physical("FitzHugh-Nagumo", fitzhugh_nagumo, vector(-1.0, 1.0), vector(0.7, 0.8, 0.08, 0.5), 20.0),
    physical("Brusselator", brusselator, vector(1.5, 3.0), vector(1.0, 3.0), 10.0),
    physical("epidemic", epidemic, vector(0.99, 0.01, 0.0), vector(1.5, 0.5), 20.0),
    physical("Duffing", duffing, vector(1.0, 0.0), vector(1.0, 0.2, 0.3), 10.0),
    physical("Kepler", kepler, vector(0.5, 0.0, 0.0, math.sqrt(3.0)), vector(1.0), 2 * math.pi),
    convolution(),
)


# Stiff fields.


def relaxation(t: Any, z: Tensor, theta: Tensor) -> Tensor:
    return -theta * z


def follower(t: Any, z: Tensor, theta: Tensor) -> Tensor:
    return -theta * (z - torch.cos(t * torch.ones_like(z)))


def switch(t: Any, z: Tensor, theta: Tensor) -> Tensor:
    return -theta * torch.tanh(z)


def stiff_mlp(rate: float) -> Problem:
    mlp = BY_NAME["MLP"]

    def f(t: Any, z: Tensor, *theta: Tensor) -> Tensor:
        return mlp.f(t, z, *theta) - rate * z

    return Problem(f"MLP - {rate:g} z", f, mlp.z0, mlp.theta, 2.0)


STIFF = (
    *(physical(f"-{k:g} z", relaxation, vector(1.0), vector(k), 3.0) for k in (2.0, 5.0, 10.0, 20.0, 50.0, 200.0)),
    *(physical(f"-(1, {k:g}) z", relaxation, vector(1.0, 1.0), vector(1.0, k), 3.0) for k in (10.0, 50.0, 200.0)),
    *(physical(f"-{k:g} (z - cos t)", follower, vector(0.5), vector(k), 3.0) for k in (10.0, 50.0, 200.0)),
    *(physical(f"-{k:g} tanh z", switch, vector(2.0, 0.3), vector(k), 2.0) for k in (8.0, 40.0)),
    *(stiff_mlp(rate) for rate in (5.0, 20.0, 100.0)),
    *(
        physical(f"Van der Pol, mu={mu:g}", van_der_pol_field, vector(2.0, 0.1), torch.tensor(mu).double(), 5.0)
        for mu in (5.0, 20.0)
    ),
)
