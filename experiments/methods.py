"""The one table of methods: gradient methods with the solvers and tolerances that the paper gives them.

A task picks from the table by name, and overrides a solver, a gradient method or tolerances as data:
`pick("naive", solver=tm.HeunEuler(), rtol=1e-2)`. Labels are those of tables and figures.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torchmali as tm


@dataclass(frozen=True)
class Solve:
    """Solver, controller and gradient method for an ODE on [0, end]."""

    solver: tm.Solver
    controller: tm.StepController
    gradient: tm.GradientMethod
    end: float = 1.0

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `torchmali.solve` and of the modules of `torchmali.nn`."""
        return {"solver": self.solver, "controller": self.controller, "gradient": self.gradient}


@dataclass(frozen=True)
class Method:
    """A gradient method, its solver for adaptive steps with rtol and atol, and its solver for fixed steps."""

    label: str
    gradient: tm.GradientMethod
    solver: tm.Solver
    fixed: tm.Solver
    rtol: float
    atol: float

    def adaptive_steps(self, rtol: float | None = None, atol: float | None = None, h0: float | None = None) -> Solve:
        """Solve with adaptive steps; None: the method's own tolerances, and a first step that is estimated."""
        rtol, atol = self.rtol if rtol is None else rtol, self.atol if atol is None else atol
        return Solve(self.solver, tm.AdaptiveStep(rtol, atol, h0), self.gradient)

    def fixed_steps(self, h: float) -> Solve:
        return Solve(self.fixed, tm.FixedStep(h), self.gradient)


SOLVERS: dict[str, tm.Solver] = {
    "ALF": tm.ALF(),
    "ALF4": tm.ALF(order=4),
    "Euler": tm.Euler(),
    "RK2": tm.Midpoint(),
    "Heun-Euler": tm.HeunEuler(),
    "RK23": tm.Bosh3(),
    "RK4": tm.RK4(),
    "Dopri5": tm.Dopri5(),
}
PUBLISHED_ALF = tm.ALF(refresh="never")  # v is never renewed
METHODS: dict[str, Method] = {
    "naive": Method("naive", tm.Naive(), tm.Dopri5(), tm.Midpoint(), 1e-5, 1e-5),
    "naive_search": Method(
        "naive through the search", tm.Naive(through_search=True), tm.Dopri5(), tm.Midpoint(), 1e-5, 1e-5
    ),
    "adjoint": Method("adjoint", tm.Adjoint(), tm.Dopri5(), tm.Midpoint(), 1e-5, 1e-5),
    "seminorm": Method("seminorm", tm.Adjoint(seminorm=True), tm.Dopri5(), tm.Midpoint(), 1e-5, 1e-5),
    "aca": Method("ACA", tm.ACA(), tm.HeunEuler(), tm.HeunEuler(), 1e-1, 1e-2),
    "mali": Method("MALI", tm.MALI(), tm.ALF(), tm.ALF(), 1e-1, 1e-2),
    "free": Method("MALI, free steps", tm.MALI(), tm.ALF(), tm.ALF(), 1e-3, 1e-4),  # not the paper's: always adaptive
    "published": Method("MALI as published", tm.MALI(checkpoint_every=None), PUBLISHED_ALF, PUBLISHED_ALF, 1e-1, 1e-2),
    "alf4": Method("MALI alf4", tm.MALI(), tm.ALF(order=4), tm.ALF(order=4), 1e-1, 1e-2),
    "exact": Method("MALI exact", tm.MALI(exact=True), tm.ALF(), tm.ALF(), 1e-1, 1e-2),
}
EXACT_INT64 = tm.MALI(exact="int64")  # wider integers than those of exact=True
NETWORKS = {"resnet": "ResNet", "rnn": "RNN, dt", "gru_d": "GRU-D"}  # compared with the methods, but without an ODE


def pick(name: str, **changes: Any) -> Method:
    """Take a method from the table, with some of its fields changed."""
    return replace(METHODS[name], **changes)


def gradients(*names: str) -> dict[str, tm.GradientMethod]:
    """Take gradient methods from the table, by their labels."""
    return {METHODS[name].label: METHODS[name].gradient for name in names}


def label(name: str) -> str:
    """Name of a method or network in tables and figures."""
    return NETWORKS[name] if name in NETWORKS else METHODS[name].label


@contextmanager
def published_tolerances() -> Iterator[None]:
    """Ignore the warning that the paper's 1e-5 is near the round-off of float32: it is compared on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "rtol = 1e-05 is below 100 eps", tm.SolverWarning)
        yield
