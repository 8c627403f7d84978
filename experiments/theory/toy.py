"""Figure 4 a, b and its appendix: the error of gradients on dz/dt = alpha z, L = z(T)^2.

Panel A, literal: each method with its own solver, as in the paper, against the gradient of the ODE. Panel B, equal
order: the adjoint and naive methods with Heun-Euler, as ACA has it. Panel C, reverse accuracy: all methods on one
forward solve (adaptive ALF), against the exact derivative of that discrete solve, and how well z(0) is recovered.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torchdiffeq
from torch import Tensor

import torchmali as tm
from experiments.engine.measure import graph_depth
from experiments.engine.task import Config, Run
from experiments.methods import EXACT_INT64, METHODS, SOLVERS, Method, label, pick
from experiments.theory.problems import Problem, linear_field
from experiments.theory.reconstruction import accepted_steps, solve_forward

Z0 = 1.0


@dataclass(frozen=True)
class ToyConfig(Config):
    alphas: tuple[float, ...] = (0.1, 1.0, -0.1, -0.5)
    long: tuple[float, ...] = (20.0, 30.0, 40.0)
    short: tuple[float, ...] = (0.1, 0.4, 0.7, 1.0)
    rtol: float = 1e-5
    atol: float = 1e-6
    max_attempts: int = 20_000


PRESETS = {
    "smoke": ToyConfig(alphas=(0.1, -0.5), long=(20.0,), short=(0.5,), max_attempts=500),
    "cpu": ToyConfig(),
    "paper": ToyConfig(long=tuple(20.0 + 2 * i for i in range(11)), short=tuple(0.1 * i for i in range(1, 11))),
}

ALF, HEUN = SOLVERS["ALF"], SOLVERS["Heun-Euler"]
SOLVES: dict[str, Method] = {
    **{f"{name}, Dopri5": METHODS[name] for name in ("naive", "adjoint", "seminorm")},
    **{f"{label(name)}, Heun-Euler": pick(name, solver=HEUN) for name in ("naive", "adjoint", "aca")},
    **{f"{label(name)}, ALF": pick(name, solver=ALF) for name in ("naive", "adjoint", "aca")},
    **{label(name): METHODS[name] for name in ("mali", "published", "alf4")},
    label("exact"): pick("exact", gradient=EXACT_INT64),
}
PEERS = ("torchdiffeq naive", "torchdiffeq adjoint")  # with Dopri5: to show that our baselines are as good
PANELS = {  # label: solve
    "literal": {
        "naive": "naive, Dopri5",
        "adjoint": "adjoint, Dopri5",
        "seminorm": "seminorm, Dopri5",
        **{name: name for name in PEERS},
        "ACA": "ACA, Heun-Euler",
        **{name: name for name in ("MALI as published", "MALI", "MALI alf4", "MALI exact")},
    },
    "equal order": {
        "naive": "naive, Heun-Euler",
        "adjoint": "adjoint, Heun-Euler",
        "ACA": "ACA, Heun-Euler",
        "MALI": "MALI",
    },
    "reverse accuracy": {
        "naive": "naive, ALF",
        "adjoint": "adjoint, ALF",
        "ACA": "ACA, ALF",
        "MALI": "MALI",
        "MALI exact": "MALI exact",
    },
}


def inputs(alpha: float) -> tuple[Tensor, Tensor]:
    z0, a = torch.tensor(Z0, dtype=torch.float64), torch.tensor(alpha, dtype=torch.float64)
    return z0.requires_grad_(), a.requires_grad_()


def analytic(alpha: float, span: float) -> tuple[float, float]:
    """dL/dz0, dL/dalpha of the ODE."""
    growth = math.exp(2 * alpha * span)
    return 2 * Z0 * growth, 2 * span * Z0**2 * growth


def adaptive(config: ToyConfig) -> tm.AdaptiveStep:
    return tm.AdaptiveStep(config.rtol, config.atol, max_steps=config.max_attempts)


def gradient_by(config: ToyConfig, name: str, alpha: float, span: float) -> dict[str, Any]:
    """Return dL/dz0, dL/dalpha and counts, or how far the solve came when its attempts were used up."""
    z0, a = inputs(alpha)
    try:
        return _peer(config, name, z0, a, span) if name in PEERS else _ours(config, name, z0, a, span)
    except (tm.SolverError, AssertionError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def _ours(config: ToyConfig, name: str, z0: Tensor, a: Tensor, span: float) -> dict[str, Any]:
    method = SOLVES[name]
    how: Any = {"solver": method.solver, "controller": adaptive(config), "gradient": method.gradient}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        solution = tm.solve(linear_field, z0, (0.0, span), **how, args=(a,))
        grads = torch.autograd.grad(solution.y[-1] ** 2, [z0, a])
    stats = solution.stats
    return {
        "gradient": [float(g) for g in grads],
        "steps": stats.n_steps,
        "rejected": stats.n_rejected,
        "refreshes": stats.n_refreshes,
        "reruns": stats.n_reruns,
        "evaluations": [stats.n_evals_forward, stats.n_evals_backward],
        "rebuilt": stats.reconstruction_error,
        "warned": len(told) > 0,
    }


def _peer(config: ToyConfig, name: str, z0: Tensor, a: Tensor, span: float) -> dict[str, Any]:
    solve: Any = torchdiffeq.odeint_adjoint if name.endswith("adjoint") else torchdiffeq.odeint
    f, t = Counted(a), torch.tensor([0.0, span], dtype=torch.float64)
    how: Any = {"rtol": config.rtol, "atol": config.atol, "options": {"max_num_steps": config.max_attempts}}
    y = solve(f, z0, t, method="dopri5", **how)
    forward = f.n
    grads = torch.autograd.grad(y[-1] ** 2, [z0, a])
    return {"gradient": [float(g) for g in grads], "evaluations": [forward, f.n - forward]}


class Counted(torch.nn.Module):
    def __init__(self, alpha: Tensor):
        super().__init__()
        self.alpha, self.n = alpha, 0

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        self.n += 1
        return self.alpha * z

    def parameters(self, recurse: bool = True):
        yield self.alpha  # a leaf, not a copy in a Parameter


def discrete(config: ToyConfig, alpha: float, span: float) -> list[float] | None:
    """dL/dz0, dL/dalpha of the discrete solve, by dual numbers over the steps and refreshes that it took.

    No autograd, and nothing of the solver's code but its choice of steps: an independent truth for panel C.
    """
    z0, theta = (torch.tensor(x, dtype=torch.float64) for x in (Z0, alpha))
    try:
        _, tape = solve_forward(Problem(linear_field, z0, (theta,), span), ALF, adaptive(config))
    except tm.SolverError:
        return None
    z, dz0, dalpha = Z0, 1.0, 0.0  # the value, and its derivatives
    v, v_z0, v_alpha = alpha * Z0, alpha, Z0
    for t0, t1, refreshed in accepted_steps(tape):
        if refreshed:
            v, v_z0, v_alpha = alpha * z, alpha * dz0, alpha * dalpha + z
        half = (t1 - t0) / 2
        z, dz0, dalpha = z + half * v, dz0 + half * v_z0, dalpha + half * v_alpha
        v, v_z0, v_alpha = 2 * alpha * z - v, 2 * alpha * dz0 - v_z0, 2 * (alpha * dalpha + z) - v_alpha
        z, dz0, dalpha = z + half * v, dz0 + half * v_z0, dalpha + half * v_alpha
    return [2 * z * dz0, 2 * z * dalpha]


def return_error(config: ToyConfig, alpha: float, span: float) -> float | None:
    """|z(0) - z0| after a solve to T and one from there back in time, as the adjoint method makes it."""
    z, a = inputs(alpha)
    try:
        with torch.no_grad():
            for times in ((0.0, span), (span, 0.0)):
                z = tm.solve(linear_field, z, times, solver=ALF, controller=adaptive(config), args=(a,)).y[-1]
    except tm.SolverError:
        return None
    return abs(float(z) - Z0)


def search(config: ToyConfig, alpha: float, span: float) -> dict[str, Any]:
    """The naive method with the search for h in the graph, as the paper describes it, and without.

    h0 is too long, so that attempts are rejected and every later h depends on them.
    """
    found: dict[str, Any] = {}
    for name, through in (("detached", False), ("through the search", True)):
        z0, a = inputs(alpha)
        controller = tm.AdaptiveStep(config.rtol, config.atol, h0=span, max_steps=config.max_attempts)
        how: Any = {"solver": HEUN, "controller": controller, "gradient": tm.Naive(through_search=through)}
        solution = tm.solve(linear_field, z0, (0.0, span), **how, args=(a,))
        loss, stats = solution.y[-1] ** 2, solution.stats
        found[name] = {
            "gradient": [float(g) for g in torch.autograd.grad(loss, [z0, a], retain_graph=True)],
            "depth": graph_depth(loss),
            "steps": stats.n_steps,
            "trials per step": (stats.n_steps + stats.n_rejected) / stats.n_steps,
        }
    return found


def main(config: ToyConfig, run: Run) -> dict[str, Any]:
    work: dict[str, Callable[[], Any]] = {}
    for alpha in config.alphas:
        for span in (*config.long, *config.short):
            where = f"{alpha:g} {span:g}"
            for name in (*SOLVES, *PEERS):
                work[f"{name} / {where}"] = partial(gradient_by, config, name, alpha, span)
            work[f"discrete / {where}"] = partial(discrete, config, alpha, span)
            work[f"way back / {where}"] = partial(return_error, config, alpha, span)
        span = config.short[-1]
        work[f"search / {alpha:g} {span:g}"] = partial(search, config, alpha, span)
    return {"cells": run.pieces(work)}
