"""Solves of Tables 4, 5 and 7: the methods of the table with fixed or adaptive steps, and MALI with damping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torchmali as tm
from experiments.engine.task import BadOption, require_known
from experiments.methods import METHODS, Solve, pick

ADJOINTS = ("adjoint", "seminorm")
ADAPTIVE = (*ADJOINTS, "free")
NAMES = ("naive", *ADJOINTS, "aca", "mali", "alf4", "exact", "free")


class Steps(Protocol):
    """The fields of a config that say how an ODE is solved."""

    @property
    def method(self) -> str: ...
    @property
    def h(self) -> float: ...
    @property
    def rtol(self) -> float: ...
    @property
    def atol(self) -> float: ...
    @property
    def eta(self) -> float: ...
    @property
    def unsafe_damping(self) -> bool: ...


def solve_of(config: Steps, naive: tm.Solver, adaptive: Sequence[str] = ADAPTIVE) -> Solve:
    """Pick a method of the table for a config.

    naive: the solver that is backpropagated through. adaptive: methods with rtol and atol; the others take h.
    """
    check(config, NAMES)
    method = METHODS[config.method]
    if config.method == "naive":
        method = pick("naive", solver=naive, fixed=naive)
    elif config.method == "mali":
        gradient = tm.MALI(checkpoint_every=None, unsafe_damping=True) if config.unsafe_damping else tm.MALI()
        damped = tm.ALF(eta=config.eta)
        method = pick("mali", solver=damped, fixed=damped, gradient=gradient)
    elif config.method in ADJOINTS:
        method = pick(config.method, fixed=tm.Dopri5())
    if config.method in adaptive:
        return method.adaptive_steps(config.rtol, config.atol)
    return method.fixed_steps(config.h)


def check(config: Steps, names: Sequence[str]) -> None:
    require_known("method", config.method, names)
    if config.method != "mali" and (config.eta != 1 or config.unsafe_damping):
        given = f"eta = {config.eta:g}, unsafe_damping = {config.unsafe_damping}"
        raise BadOption(f"{given}: damping is for --method mali, not {config.method}.")
