"""Figures 1 to 3 of the paper, which are sketches there, from real runs.

Figure 1: an adaptive solve with the trials that its controller rejected. Figure 2: the reverse trajectories of the
adjoint and of MALI on the Van der Pol oscillator. Figure 3: the whole trajectory rebuilt from the end state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchmali as tm
from experiments.engine.task import Config, Run
from experiments.theory.controllers import Recorded, Trial
from experiments.theory.problems import Problem, mlp, van_der_pol
from experiments.theory.reconstruction import arithmetic_of, rebuild, refresh_times, relative, solve_forward
from experiments.theory.stability import significant


@dataclass(frozen=True)
class ExplainConfig(Config):
    mu: float = 1.0  # of Van der Pol
    search_rtol: float = 0.1  # of Figure 1: loose, so that single steps can be seen
    search_span: float = 7.0
    rtol: float = 1e-3  # of Figure 2; atol is a tenth
    span: float = 10.0
    etas: tuple[float, ...] = (1.0, 0.95, 0.9, 0.7)  # of Figure 3
    n_steps: int = 200
    n_points: int = 300  # of a curve, at most


PRESETS = {
    "smoke": ExplainConfig(search_span=4.0, n_steps=60, n_points=60),
    "cpu": ExplainConfig(),
    "paper": ExplainConfig(n_steps=400, n_points=400),
}


def row(values: Any) -> list[float]:
    return [significant(float(x)) for x in values]


def thinned(values: Sequence[Any], at_most: int) -> list[Any]:
    """Choose values evenly, with the first and the last."""
    if len(values) <= at_most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (at_most - 1))] for i in range(at_most)]


# Figure 1.


def search(config: ExplainConfig) -> dict[str, Any]:
    """An adaptive ALF solve: its trials, accepted and rejected, beside the exact solution (the first component)."""
    problem = van_der_pol(config.mu, config.search_span)
    controller = Recorded(tm.AdaptiveStep(config.search_rtol, config.search_rtol))
    _, tape = solve_forward(problem, tm.ALF(), controller)
    t = [problem.span * i / (config.n_points - 1) for i in range(config.n_points)]
    exact = solved(problem, t, tm.Dopri8(), tm.AdaptiveStep(1e-10, 1e-12))
    return {
        "accepted": _columns([trial for trial in controller.trials if trial.accepted]),
        "rejected": _columns([trial for trial in controller.trials if not trial.accepted]),
        "refreshes": row(refresh_times(tape)),
        "exact": {"t": row(t), "z": row(exact[:, 0])},
    }


def _columns(trials: Sequence[Trial]) -> dict[str, list[float]]:
    return {name: row(getattr(trial, name) for trial in trials) for name in ("t0", "z0", "t1", "z1", "error")}


def solved(problem: Problem, t: Sequence[float], solver: tm.Solver, controller: tm.StepController) -> Tensor:
    """z at these times; they may run backwards, from problem.z0 at the first. # (time, component)"""
    with torch.no_grad():
        how: Any = {"solver": solver, "controller": controller, "gradient": tm.ACA(), "args": problem.theta}
        return tm.solve(problem.f, problem.z0, t, **how).y


# Figure 2.


def two_reverse_paths(config: ExplainConfig) -> dict[str, Any]:
    """Solve with Dopri5 to T and back again; solve with ALF to T and rebuild its states by the inverse."""
    problem = van_der_pol(config.mu, config.span)
    controller = tm.AdaptiveStep(config.rtol, config.rtol / 10, safety=0.9)
    t = [problem.span * i / (config.n_points - 1) for i in range(config.n_points)]
    there = solved(problem, t, tm.Dopri5(), controller)
    back = solved(problem._replace(z0=there[-1]), t[::-1], tm.Dopri5(), replace(controller, h0=0.1)).flip(0)
    return {
        "adjoint": {
            "t": row(t),
            "forward": [row(there[:, i]) for i in (0, 1)],
            "back": [row(back[:, i]) for i in (0, 1)],
            "distance": row((there - back).norm(dim=1)),
        },
        "MALI": rebuilt(config, problem, controller),
        "MALI float32": rebuilt(config, problem.to(torch.float32), controller, path=False),
    }


def rebuilt(
    config: ExplainConfig, problem: Problem, controller: tm.StepController, path: bool = True
) -> dict[str, Any]:
    end, tape = solve_forward(problem, tm.ALF(), controller)
    states = list(rebuild(problem, tm.ALF(), end, tape))[::-1]
    shown = thinned(states, config.n_points)
    found: dict[str, Any] = {
        "t": row(t for t, _, _ in shown),
        "distance": row((z - kept).norm() for _, z, kept in shown),
        "worst": significant(max(float((z - kept).norm()) for _, z, kept in states)),
        "steps": len(states),
        "refreshes": len(refresh_times(tape)),
    }
    if path:
        found["forward"] = [row(kept[i] for _, _, kept in shown) for i in (0, 1)]
        found["back"] = [row(z[i] for _, z, _ in shown) for i in (0, 1)]
    return found


# Figure 3.


def reconstruction(config: ExplainConfig, eta: float, exact: bool) -> dict[str, Any]:
    """Errors of z rebuilt from (z, v) at T alone, relative, in float32, until it is lost."""
    problem, solver = mlp(config.seed, 5.0).to(torch.float32), tm.ALF(eta=eta, refresh="never")
    controller = tm.FixedStep(problem.span / config.n_steps)
    arithmetic = arithmetic_of(tm.MALI(exact=exact), problem.span)
    end, tape = solve_forward(problem, solver, controller, arithmetic)
    errors = [(t, relative(z, kept)) for t, z, kept in rebuild(problem, solver, end, tape)]
    first_lost = next((i for i, (_, e) in enumerate(errors) if not e < 1e3), len(errors))
    shown = thinned(errors[: first_lost + 1], config.n_points)
    found = {"t": row(t for t, _ in shown), "error": [significant(e) if e < 1e30 else None for _, e in shown]}
    return {**found, "lost at": errors[first_lost][0] if first_lost < len(errors) else None}


def main(config: ExplainConfig, run: Run) -> dict[str, Any]:
    work: dict[str, Callable[[], Any]] = {
        "search": partial(search, config),
        "ways back": partial(two_reverse_paths, config),
        **{f"eta = {eta:g}": partial(reconstruction, config, eta, exact=False) for eta in config.etas},
        "exact": partial(reconstruction, config, 1.0, exact=True),
    }
    found = run.pieces(work)
    curves = {name: value for name, value in found.items() if name not in ("search", "ways back")}
    return {"search": found["search"], "ways back": found["ways back"], "reconstruction": curves}
