"""The gradient methods that Tables 4, 5 and 7 compare, each with the solver it is tested with."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torchmali as tm
from experiments.engine.task import BadOption

ADAPTIVE = ("adjoint", "seminorm")
METHODS = ("naive", *ADAPTIVE, "aca", "mali", "alf4", "exact")


class Steps(Protocol):
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


class Way(NamedTuple):
    solver: tm.Solver
    controller: tm.StepController
    gradient: tm.GradientMethod


def way(config: Steps, naive: tm.Solver, adaptive: tuple[str, ...] = ADAPTIVE) -> Way:
    """naive: the solver that is backpropagated through. adaptive: methods with rtol and atol; the others take h."""
    mali = tm.MALI(checkpoint_every=None, unsafe_damping=True) if config.unsafe_damping else tm.MALI()
    ways: dict[str, tuple[tm.Solver, tm.GradientMethod]] = {
        "naive": (naive, tm.Naive()),
        "adjoint": (tm.Dopri5(), tm.Adjoint()),
        "seminorm": (tm.Dopri5(), tm.Adjoint(seminorm=True)),
        "aca": (tm.HeunEuler(), tm.ACA()),
        "mali": (tm.ALF(eta=config.eta), mali),
        "alf4": (tm.ALF(order=4), mali),
        "exact": (tm.ALF(), tm.MALI(exact=True)),
    }
    check(config, tuple(ways))
    solver, gradient = ways[config.method]
    steps = tm.AdaptiveStep(config.rtol, config.atol) if config.method in adaptive else tm.FixedStep(config.h)
    return Way(solver, steps, gradient)


def check(config: Steps, methods: tuple[str, ...]) -> None:
    if config.method not in methods:
        raise BadOption(f"There is no method {config.method!r}; there are {', '.join(methods)}.")
    if config.method != "mali" and (config.eta != 1 or config.unsafe_damping):
        given = f"eta = {config.eta:g}, unsafe_damping = {config.unsafe_damping}"
        raise BadOption(f"{given}: damping is for --method mali, not {config.method}.")
