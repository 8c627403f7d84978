"""Problems with events that the tests share: bodies that fall, and a solve with parameters everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torchmali as tm

GRAVITY = 9.81
ALF, RK4, FIXED = tm.ALF(), tm.RK4(), tm.FixedStep(0.3)
TIGHT = tm.AdaptiveStep(1e-10, 1e-10)
METHODS: list[Any] = [  # on steps that are exact for a parabola
    (tm.Naive(), RK4, FIXED),
    (tm.Naive(), ALF, FIXED),
    (tm.ACA(), RK4, FIXED),
    (tm.ACA(), tm.Dopri5(), TIGHT),
    (tm.ACA(), tm.Dopri8(), TIGHT),
    (tm.MALI(), ALF, FIXED),
    (tm.MALI(), ALF, tm.FixedStep(0.3, land=False)),
    (tm.MALI(checkpoint_every=2), tm.ALF(order=4), TIGHT),
    (tm.MALI(exact=True), ALF, FIXED),
    (tm.MALI(exact=True), tm.ALF(order=4), TIGHT),
    (tm.Adjoint(), tm.Dopri5(), TIGHT),
]
NAMES = [f"{type(solver).__name__}-{method}-{controller}" for method, solver, controller in METHODS]


def double(*x: float, grad: bool = False) -> Tensor:
    return torch.tensor(x[0] if len(x) == 1 else x, dtype=torch.float64, requires_grad=grad)


def fall(t: Tensor, y: Tensor, gravity: Any = GRAVITY) -> Tensor:
    return torch.stack([y[1], -gravity + 0 * y[1]])


def height(t: Tensor, y: Tensor, *args: Any) -> Tensor:
    return y[0]


def pendulum(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack([y[1], -torch.sin(y[0])])


def turn(t: Tensor, y: Tensor) -> Tensor:
    """The circle (cos t, sin t), from (1, 0)."""
    return torch.stack([-y[1], y[0]])


def bend(t: Tensor, y: Tensor, slopes: Tensor) -> Tensor:
    """Up until t = 0.5, down until 1, then down less steeply."""
    return slopes[int(t >= 0.5) + int(t >= 1.0)] + 0 * y


def solve(f: Any, y0: Any, t: Any, event: Any, method: Any = None, **how: Any) -> Any:
    gradient, solver, controller = method or (tm.Naive(), tm.Dopri5(), TIGHT)
    return tm.solve(f, y0, t, event=event, solver=solver, controller=controller, gradient=gradient, **how)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()

    def forward(self, t: Tensor, y: dict[str, Tensor], w: Tensor) -> dict[str, Tensor]:
        u = self.layers(torch.stack([y["a"], y["b"][0], t]))
        return {"a": w + 0.3 * u[0] * torch.sin(t), "b": u[1:] - 0.1 * y["b"]}


class Surface(nn.Module):
    def __init__(self):
        super().__init__()
        self.level = nn.Parameter(double(1.2))

    def forward(self, t: Tensor, y: dict[str, Tensor], w: Tensor) -> Tensor:
        return torch.stack([y["b"][0] - 50, y["a"] + 0.2 * torch.sin(y["b"][0]) * w - self.level * torch.cos(0.1 * t)])


class Jumping(Field):
    """A field that jumps at 0.3 and at 0.72."""

    def forward(self, t: Tensor, y: Any, w: Tensor) -> Any:
        slope = super().forward(t, y, w)
        side = int(t >= 0.3) - 2 * int(t >= 0.72)
        return {"a": slope["a"] + 0.1 * side * w, "b": slope["b"] + 0.2 * side * y["a"]}


class Case:
    """A solve to an event with parameters everywhere, and the loss of its results.

    jumps: times at which f jumps; none, or those of `Jumping`.
    """

    def __init__(self, times: Sequence[float] = (0.0, 0.5, 0.95, 1.0, 2.5), jumps: Sequence[float] = ()):
        self.f, self.g, self.jumps = Jumping() if jumps else Field(), Surface(), jumps
        self.y0 = {"a": double(0.1), "b": torch.full((1,), 0.4, dtype=torch.float64)}
        self.w, self.t = double(0.9), double(*times)
        self.inputs = [*self.y0.values(), self.w, self.t, self.g.level, *self.f.parameters()]
        for x in self.inputs:
            x.requires_grad_()

    def loss(self, method: Any, **how: Any) -> Tensor:
        s = solve(self.f, self.y0, self.t, self.g, method, args=(self.w,), jumps=self.jumps, **how)
        assert s.event_index == (0, 1)
        loss = 2 * s.event_t + torch.sin(s.event_y["a"]) + 3 * s.event_y["b"].sum()
        if s.observed is not None:
            return loss + s.observed
        assert len(s.t) == len(s.y["a"]) == 4
        return loss + (s.y["a"] ** 2).sum() + (s.y["b"][-1] * s.y["a"][1]).sum()

    def gradients(self, method: Any, **how: Any) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.loss(method, **how), self.inputs)
