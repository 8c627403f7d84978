"""Samplers that can be followed back, from their published formulas, for dx/dt = f(t, x) in steps of one size.

A state is a tuple of tensors, of which the first is x. `step` takes it over [t, t + h], `back` undoes that, in floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

Map = Callable[[float, Tensor], Tensor]
State = tuple[Tensor, ...]


class Coupling(Protocol):
    """One step and its inverse."""

    @property
    def evaluations(self) -> int:
        """Evaluations of f in a step."""
        ...

    def start(self, f: Map, t: float, h: float, x: Tensor) -> State: ...

    def step(self, f: Map, t: float, h: float, state: State) -> State: ...

    def back(self, f: Map, t: float, h: float, state: State) -> State: ...


@dataclass(frozen=True)
class RungeKutta:
    """Euler's or the midpoint rule, "inverted" by a step of -h from the end, as DDIM inversion does."""

    midpoint: bool = False

    @property
    def evaluations(self) -> int:
        return 2 if self.midpoint else 1

    def start(self, f: Map, t: float, h: float, x: Tensor) -> State:
        return (x,)

    def change(self, f: Map, t: float, h: float, x: Tensor) -> Tensor:
        u = f(t, x)
        return h * (f(t + h / 2, x + h / 2 * u) if self.midpoint else u)

    def step(self, f: Map, t: float, h: float, state: State) -> State:
        return (state[0] + self.change(f, t, h, state[0]),)

    def back(self, f: Map, t: float, h: float, state: State) -> State:
        return self.step(f, t + h, -h, state)


@dataclass(frozen=True)
class Drifts:
    """A leapfrog on (x, v) by its drift coefficients: ALF, and orders above 2."""

    coefficients: tuple[float, ...] = (0.5, 0.5)

    @property
    def evaluations(self) -> int:
        return len(self.coefficients) - 1

    def start(self, f: Map, t: float, h: float, x: Tensor) -> State:
        return x, f(t, x)

    def step(self, f: Map, t: float, h: float, state: State) -> State:
        x, v = state
        node = 0.0
        for c in self.coefficients[:-1]:
            x, node = x + c * h * v, node + c
            v = 2 * f(t + node * h, x) - v
        return x + self.coefficients[-1] * h * v, v

    def back(self, f: Map, t: float, h: float, state: State) -> State:
        return self.step(f, t + h, -h, state)  # symmetric: its inverse is a step of -h


@dataclass(frozen=True)
class ReversibleMidpoint:
    """McCallum and Foster's coupling of a Runge-Kutta step Psi (Rex, 2025), here the midpoint rule."""

    keep: float = 0.999  # lambda
    evaluations = 4
    base = RungeKutta(midpoint=True)

    def start(self, f: Map, t: float, h: float, x: Tensor) -> State:
        return x, x

    def step(self, f: Map, t: float, h: float, state: State) -> State:
        y, z = state
        y = self.keep * y + (1 - self.keep) * z + self.base.change(f, t, h, z)
        return y, z - self.base.change(f, t + h, -h, y)

    def back(self, f: Map, t: float, h: float, state: State) -> State:
        y, z = state
        z = z + self.base.change(f, t + h, -h, y)
        return (y - (1 - self.keep) * z - self.base.change(f, t, h, z)) / self.keep, z


@dataclass(frozen=True)
class EDICT:
    """Wallace, Gokul and Naik (2023): two states that move each other, mixed with weight p after each step."""

    p: float = 0.93
    evaluations = 2

    def start(self, f: Map, t: float, h: float, x: Tensor) -> State:
        return x, x

    def step(self, f: Map, t: float, h: float, state: State) -> State:
        x, y = state
        x = x + h * f(t, y)
        y = y + h * f(t, x)
        x = self.p * x + (1 - self.p) * y
        return x, self.p * y + (1 - self.p) * x

    def back(self, f: Map, t: float, h: float, state: State) -> State:
        x, y = state
        y = (y - (1 - self.p) * x) / self.p
        x = (x - (1 - self.p) * y) / self.p
        y = y - h * f(t, x)
        return x - h * f(t, y), y


@dataclass(frozen=True)
class TwoStep:
    """Linear two-step methods on (x_n, x_(n - 1)), begun with a step of Euler's.

    BDIA (Zhang, Lewis and Kleijn, 2023) averages with weight gamma, x_(n + 1) = gamma x_(n - 1) + (1 - gamma) x_n +
    (1 + gamma) h f: its inverse amplifies round-off by 1/gamma in each step. On equal steps gamma = 1 is O-BELM (Wang
    et al., 2024), the two-step method of the smallest local error.
    """

    gamma: float = 1.0
    evaluations = 1

    def start(self, f: Map, t: float, h: float, x: Tensor) -> State:
        return x, x - h * f(t, x)

    def step(self, f: Map, t: float, h: float, state: State) -> State:
        x, before = state
        return self.gamma * before + (1 - self.gamma) * x + (1 + self.gamma) * h * f(t, x), x

    def back(self, f: Map, t: float, h: float, state: State) -> State:
        x, before = state
        return before, (x - (1 - self.gamma) * before - (1 + self.gamma) * h * f(t, before)) / self.gamma


def carried(method: Coupling, f: Map, t0: float, t1: float, n: int, x: Tensor) -> State:
    """Take n steps from x."""
    h = (t1 - t0) / n
    state = method.start(f, t0, h, x)
    for i in range(n):
        state = method.step(f, t0 + i * h, h, state)
    return state


def carried_back(method: Coupling, f: Map, t0: float, t1: float, n: int, state: State) -> State:
    """Undo n steps."""
    h = (t1 - t0) / n
    for i in reversed(range(n)):
        state = method.back(f, t0 + i * h, h, state)
    return state
