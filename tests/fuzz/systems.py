"""Systems of a few components for the float32 study, as functions of lists of components with named parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn

Components = Sequence[Tensor]


@dataclass(frozen=True)
class System:
    """dy/dt of a list of components. sizes: typical magnitudes, by which the loss divides."""

    slope: Callable[[Tensor, Components, dict[str, Tensor]], list[Tensor]]
    parameters: dict[str, float]
    start: list[float]
    sizes: list[float]


def pendulum(rng: Random) -> System:
    def slope(t: Tensor, y: Components, p: dict[str, Tensor]) -> list[Tensor]:
        return [y[1], -p["k"] * torch.sin(y[0])]

    return System(slope, {"k": rng.uniform(0.5, 4)}, [rng.uniform(-2.8, 2.8), rng.uniform(-1, 1)], [1.0, 1.0])


def kepler(rng: Random) -> System:
    e = rng.uniform(0.0, 0.6)

    def slope(t: Tensor, y: Components, p: dict[str, Tensor]) -> list[Tensor]:
        x1, x2, p1, p2 = y
        pull = -p["mass"] / (x1 * x1 + x2 * x2) ** 1.5
        return [p1, p2, pull * x1, pull * x2]

    return System(slope, {"mass": 1.0}, [1 - e, 0.01, 0.02, math.sqrt((1 + e) / (1 - e))], [1.0] * 4)


def duffing(rng: Random) -> System:
    def slope(t: Tensor, y: Components, p: dict[str, Tensor]) -> list[Tensor]:
        q, v = y
        return [v, p["a"] * q - p["b"] * q**3 + p["c"] * torch.cos(p["w"] * t)]

    names = {"a": rng.choice([-1.0, 1.0]) * rng.uniform(0.5, 2), "b": rng.uniform(0.5, 2), "c": rng.uniform(0, 0.5)}
    return System(slope, {**names, "w": rng.uniform(0.5, 2)}, [rng.uniform(-1.5, 1.5), rng.uniform(-1, 1)], [1.0, 1.0])


def lotka_volterra(rng: Random) -> System:
    def slope(t: Tensor, y: Components, p: dict[str, Tensor]) -> list[Tensor]:
        prey, hunters = y
        return [prey * (p["a"] - p["b"] * hunters), hunters * (p["c"] * prey - p["d"])]

    names = {name: rng.uniform(0.5, 1.5) for name in "abcd"}
    return System(slope, names, [rng.uniform(0.3, 3), rng.uniform(0.3, 3)], [1.0, 1.0])


def van_der_pol(rng: Random) -> System:
    def slope(t: Tensor, y: Components, p: dict[str, Tensor]) -> list[Tensor]:
        return [y[1], p["mu"] * (1 - y[0] ** 2) * y[1] - y[0]]

    return System(slope, {"mu": rng.uniform(0.1, 2)}, [rng.uniform(-2, 2), rng.uniform(-2, 2)], [1.0, 1.0])


def chain(rng: Random) -> System:
    """Masses on a line with springs that stiffen (Fermi, Pasta, Ulam)."""
    n = rng.randint(2, 4)

    def slope(t: Tensor, y: Components, p: dict[str, Tensor]) -> list[Tensor]:
        q = [torch.zeros_like(y[0]), *y[:n], torch.zeros_like(y[0])]
        stretch = [b - a for a, b in zip(q, q[1:], strict=False)]
        force = [p["k"] * d + p["b"] * d**3 for d in stretch]
        return [*y[n:], *(right - left for left, right in zip(force, force[1:], strict=False))]

    start = [rng.uniform(-1, 1) for _ in range(2 * n)]
    return System(slope, {"k": rng.uniform(0.5, 3), "b": rng.uniform(0, 1)}, start, [1.0] * (2 * n))


def lorenz(rng: Random) -> System:
    def slope(t: Tensor, y: Components, p: dict[str, Tensor]) -> list[Tensor]:
        a, b, c = y
        return [p["s"] * (b - a), a * (p["r"] - c) - b, a * b - p["b"] * c]

    start = [rng.uniform(-10, 10), rng.uniform(-10, 10), rng.uniform(10, 30)]
    return System(slope, {"s": 10.0, "r": 28.0, "b": 8 / 3}, start, [10.0, 10.0, 20.0])


def double_pendulum(rng: Random) -> System:
    """Two rods of length 1 with masses 1: angles and angular velocities."""

    def slope(t: Tensor, y: Components, p: dict[str, Tensor]) -> list[Tensor]:
        a, b, u, v = y
        d, g = a - b, p["g"]
        bottom = 3 - torch.cos(2 * d)
        du = -3 * g * torch.sin(a) - g * torch.sin(a - 2 * b) - 2 * torch.sin(d) * (v * v + u * u * torch.cos(d))
        dv = 2 * torch.sin(d) * (2 * u * u + 2 * g * torch.cos(a) + v * v * torch.cos(d))
        return [u, v, du / bottom, dv / bottom]

    start = [rng.uniform(-2.5, 2.5), rng.uniform(-2.5, 2.5), rng.uniform(-0.5, 0.5), rng.uniform(-0.5, 0.5)]
    return System(slope, {"g": rng.uniform(1, 5)}, start, [1.0] * 4)


def henon_heiles(rng: Random) -> System:
    def slope(t: Tensor, y: Components, p: dict[str, Tensor]) -> list[Tensor]:
        q1, q2, p1, p2 = y
        return [p1, p2, -q1 - 2 * p["c"] * q1 * q2, -q2 - p["c"] * (q1 * q1 - q2 * q2)]

    return System(slope, {"c": 1.0}, [rng.uniform(-0.3, 0.3) for _ in range(4)], [0.3] * 4)


def beside_a_clock(system: System, size: float, rate: float) -> System:
    """Return the system with one more component, which counts from `size` by `rate` per unit of time."""

    def slope(t: Tensor, y: Components, p: dict[str, Tensor]) -> list[Tensor]:
        return [*system.slope(t, y[:-1], p), rate * torch.ones_like(y[-1])]

    return System(slope, system.parameters, [*system.start, size], [*system.sizes, size])


PHYSICS = [pendulum, kepler, duffing, lotka_volterra, van_der_pol, chain]
OSCILLATORS = [pendulum, duffing, chain, henon_heiles, van_der_pol]
CHAOTIC = {lorenz: (0.5, 4.0), double_pendulum: (1.0, 8.0), henon_heiles: (10.0, 60.0), duffing: (10.0, 60.0)}
RATES = {"lorenz": 6.0, "double_pendulum": 2.5, "chain": 1.5, "van_der_pol": 1.5}  # others: 1

FORMS = ["(d,)", "(1, d)", "(B, d)", "(d, B)", "(B d,)", "tuple of (B,)", "tuple of 0-d"]


class SystemField(nn.Module):
    """A system as f(t, y) of a state in one of FORMS."""

    def __init__(self, system: System, form: str):
        super().__init__()
        self.system, self.form = system, form
        self.p = nn.ParameterDict({name: nn.Parameter(torch.tensor(x)) for name, x in system.parameters.items()})

    def forward(self, t: Tensor, y: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        p = {name: self.p[name] for name in self.p}
        if isinstance(y, tuple):
            return tuple(self.system.slope(t, y, p))
        if self.form == "(d, B)":
            return torch.stack(self.system.slope(t, y.unbind(0), p))
        if self.form == "(B d,)":
            rows = y.reshape(-1, len(self.system.start))
            return torch.stack(self.system.slope(t, rows.unbind(1), p), 1).reshape(-1)
        return torch.stack(self.system.slope(t, y.unbind(-1), p), -1)


def in_form(rows: Tensor, form: str) -> Tensor | tuple[Tensor, ...]:
    """Return rows of components, (B, d), as a state in one of FORMS. Forms of one sample take the first row."""
    return {
        "(d,)": lambda: rows[0].clone(),
        "(1, d)": lambda: rows[:1].clone(),
        "(B, d)": lambda: rows.clone(),
        "(d, B)": lambda: rows.t().contiguous(),
        "(B d,)": lambda: rows.reshape(-1).clone(),
        "tuple of (B,)": lambda: tuple(x.contiguous() for x in rows.unbind(1)),
        "tuple of 0-d": lambda: tuple(x.clone() for x in rows[0]),
    }[form]()
