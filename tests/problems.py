"""Problems that the tests share: dy/dt = f(t, y) in float64, with closed forms where there are any; and solvers.

Each problem is given twice, in torch and in NumPy, so that SciPy's solution of the NumPy problem is an independent
reference for our solution of the torch problem.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

import torchmali as tm

Array = np.ndarray


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, for the caches
class ODE:
    """An initial value problem.

    f: for torch, on tensors of y0's shape. rhs: the same for NumPy. exact: the solution at a time,
    where it is known. strongly_contracting: some direction shrinks by more than about e^5 over the
    span, which undamped ALF cannot follow at any step size. chaotic: nearby solutions part so fast
    that the end state says little about the solver.
    """

    name: str
    f: Callable[[Tensor, Tensor], Tensor]
    rhs: Callable[[float, Array], Array]
    y0: Tensor
    span: tuple[float, float]
    exact: Callable[[float], Tensor] | None = None
    chaotic: bool = False
    strongly_contracting: bool = False

    def __repr__(self) -> str:  # pytest's name for it
        return self.name

    def until(self, t_end: float) -> ODE:
        """Return the same problem on another time span, up to t_end."""
        return replace(self, span=(self.span[0], t_end))

    def times(self, n: int) -> list[float]:
        """Return n evenly spaced times that begin and end with the span."""
        return np.linspace(*self.span, n).tolist()

    def at(self, t: float) -> Tensor:
        """Return the closed-form solution at t."""
        assert self.exact is not None, f"{self} has no closed form"
        return self.exact(t)

    def reference(self, times: Sequence[float] | None = None) -> Tensor:
        """Return SciPy's solution (DOP853 at rtol 1e-12) at these times; None: at the end of the span alone."""
        if times is None:
            return _scipy(self, self.span[1:])[0]
        return _scipy(self, tuple(times))

    def flat_rhs(self, t: float, y: Array) -> Array:
        """rhs on vectors, as SciPy wants it."""
        return self.rhs(t, y.reshape(self.y0.shape)).ravel()


@functools.cache
def _scipy(ode: ODE, times: tuple[float, ...]) -> Tensor:
    y0 = ode.y0.numpy().ravel()
    # atol is far below any solution here, yet not 0: a solution that passes through zero stays solvable.
    got = solve_ivp(ode.flat_rhs, ode.span, y0, method="DOP853", t_eval=times, rtol=1e-12, atol=1e-15)
    assert got.success, got.message
    return torch.from_numpy(got.y.T.copy()).reshape(len(times), *ode.y0.shape)


def scaled_error(y: Tensor, reference: Tensor, rtol: float, atol: float) -> float:
    """Return the error in units of the tolerance, in the controllers' own norm: rms(err / (atol + rtol |y|)).

    With several output times (one dimension more than the state, first), apply this function to each.
    """
    ratio = (y - reference) / (atol + rtol * reference.abs())
    return ratio.square().mean().sqrt().item()


def _vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mlp_weights() -> tuple[Array, Array, Array, Array]:
    """W1 (5, 16), b1, W2 (16, 4), b2 of the tanh network; row 4 of W1 belongs to the time."""
    rng = np.random.default_rng(0)
    w1 = rng.standard_normal((5, 16)) / math.sqrt(5)
    b1 = 0.1 * rng.standard_normal(16)
    w2 = rng.standard_normal((16, 4)) / 4
    b2 = 0.1 * rng.standard_normal(4)
    return w1, b1, w2, b2


def tanh_mlp(t: Tensor, z: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The network as a function of its weights, for tests that want gradients of them."""
    return torch.tanh(z @ w1[:4] + t * w1[4] + b1) @ w2 + b2


class Simple(nn.Module):
    """A network with parameters, for states of shape (..., 4)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)

    def other(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


def _mlp() -> ODE:
    w1, b1, w2, b2 = mlp_weights()
    weights = [torch.from_numpy(w) for w in (w1, b1, w2, b2)]
    return ODE(
        "mlp",
        lambda t, z: tanh_mlp(t, z, *weights),
        lambda t, z: np.tanh(z @ w1[:4] + t * w1[4] + b1) @ w2 + b2,
        torch.from_numpy(np.random.default_rng(1).standard_normal((3, 4))),
        (0.0, 5.0),
    )


def linear(name: str, rate: float, y0: Tensor, t_end: float) -> ODE:
    """y' = rate y"""
    return ODE(
        name,
        lambda t, y: rate * y,
        lambda t, y: rate * y,
        y0,
        (0.0, t_end),
        exact=lambda t: y0 * math.exp(rate * t),
        strongly_contracting=rate * t_end < -5,
    )


def _oscillator(stiffness: float, friction: float) -> ODE:
    """x'' = -stiffness x - friction x' from x = 1, x' = 0, under-damped."""
    decay = friction / 2
    omega = math.sqrt(stiffness - decay**2)

    def exact(t: float) -> Tensor:
        c, s, envelope = math.cos(omega * t), math.sin(omega * t), math.exp(-decay * t)
        return envelope * _vector(c + decay / omega * s, -stiffness / omega * s)

    return ODE(
        "oscillator",
        lambda t, y: torch.stack([y[1], -stiffness * y[0] - friction * y[1]]),
        lambda t, y: np.array([y[1], -stiffness * y[0] - friction * y[1]]),
        _vector(1.0, 0.0),
        (0.0, 3.0),
        exact=exact,
    )


def _logistic() -> ODE:
    y0 = _vector(0.05, 0.2, 0.6, 1.5)
    return ODE(
        "logistic",
        lambda t, y: y * (1 - y),
        lambda t, y: y * (1 - y),
        y0,
        (0.0, 4.0),
        exact=lambda t: y0 / (y0 + (1 - y0) * math.exp(-t)),
    )


def _forced() -> ODE:
    y0 = _vector(0.5, 2.0)
    return ODE(
        "forced",
        lambda t, y: y * torch.cos(t),
        lambda t, y: y * np.cos(t),
        y0,
        (0.0, 4.0),
        exact=lambda t: y0 * math.exp(math.sin(t)),
    )


def _lorenz_torch(t: Tensor, y: Tensor) -> Tensor:
    a, b, c = y
    return torch.stack([10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c])


def _lorenz_numpy(t: float, y: Array) -> Array:
    a, b, c = y
    return np.array([10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c])


MLP = _mlp()
DECAY = linear("decay", -1.0, torch.linspace(0.5, 1.5, 4, dtype=torch.float64), 1.0)
GROWTH = linear("growth", 1.0, torch.linspace(0.5, 1.5, 4, dtype=torch.float64), 2.0)
TOY = linear("toy", 0.1, _vector(1.0), 20.0)
OSCILLATOR = _oscillator(4.0, 0.2)
LOGISTIC = _logistic()
FORCED = _forced()  # the field depends on time, and the solution is known: y' = y cos t
VAN_DER_POL = ODE(
    "van_der_pol",
    lambda t, y: torch.stack([y[1], 2 * (1 - y[0] ** 2) * y[1] - y[0]]),
    lambda t, y: np.array([y[1], 2 * (1 - y[0] ** 2) * y[1] - y[0]]),
    _vector(2.0, 0.1),
    (0.0, 10.0),
    strongly_contracting=True,
)
LORENZ = ODE(
    "lorenz", _lorenz_torch, _lorenz_numpy, _vector(1.0, 1.0, 20.0), (0.0, 5.0), chaotic=True, strongly_contracting=True
)

PROBLEMS = [MLP, DECAY, GROWTH, TOY, OSCILLATOR, LOGISTIC, FORCED, VAN_DER_POL, LORENZ]
NOT_CHAOTIC = [ode for ode in PROBLEMS if not ode.chaotic]
BENIGN = [ode for ode in NOT_CHAOTIC if not ode.strongly_contracting]  # within ALF's reach, too
CLOSED_FORM = [ode for ode in PROBLEMS if ode.exact is not None]

RUNGE_KUTTA: list[tm.Solver] = [  # all that the package has
    tm.Euler(),
    tm.Midpoint(),
    tm.Heun(),
    tm.Heun3(),
    tm.RK4(),
    tm.RK4ThreeEighths(),
    tm.HeunEuler(),
    tm.Bosh3(),
    tm.Dopri5(),
    tm.Tsit5(),
    tm.Dopri8(),
]
