"""Problems of the suite: y' = f(t, y) from y0 over [0, span], with the loss sum y(span)^2 if there is one output.

No torch and no jax in here: f is written once, on the operations that `torch_methods.Ops` and `jax_methods.Ops` have,
and numbers are drawn by NumPy, so that all workers solve the same problem. States have the batch first, also where it
is 1, as torchode needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Rule = Callable[[Any, Any, Any, Any], Any]  # operations, t, y, arrays by name -> dy/dt


@dataclass(frozen=True, eq=False)
class Problem:
    """f is rule(ops, t, y, arrays). params get a gradient, constants do not. n_times: output times, the start too."""

    name: str
    title: str
    rule: Rule
    y0: np.ndarray
    params: Arrays
    span: float = 1.0
    constants: Arrays = field(default_factory=dict)
    n_times: int = 2

    def times(self, n_times: int | None = None) -> np.ndarray:
        return np.linspace(0.0, self.span, n_times or self.n_times)


def _linear(rng: np.random.Generator, name: str, n_in: int, n_out: int) -> Arrays:
    """Weights and biases as those of a new nn.Linear."""
    bound = 1 / math.sqrt(n_in)
    weight, bias = rng.uniform(-bound, bound, (n_out, n_in)), rng.uniform(-bound, bound, n_out)
    return {f"w{name}": weight, f"b{name}": bias}


def _column(ops: Any, t: Any, like: Any) -> Any:
    """Return t, one number or one for each sample, as a column beside `like`."""
    return ops.zeros_like(like[:, :1]) + ops.reshape(t, (-1, 1))


def _three_layers(ops: Any, t: Any, y: Any, p: Any) -> Any:
    h = ops.tanh(ops.linear(y, p["w1"], p["b1"]))
    return ops.linear(ops.tanh(ops.linear(h, p["w2"], p["b2"])), p["w3"], p["b3"])


def _network(name: str, batch: int, width: int, hidden: int) -> Problem:
    rng = np.random.default_rng(0)
    params = _linear(rng, "1", width, hidden) | _linear(rng, "2", hidden, hidden) | _linear(rng, "3", hidden, width)
    title = f"{name}: state ({batch}, {width}), three linear layers of width {hidden}"
    return Problem(name, title, _three_layers, 0.5 * rng.standard_normal((batch, width)), params)


def _residual(ops: Any, t: Any, y: Any, p: Any) -> Any:
    h = ops.relu(ops.group_norm(ops.conv3x3(y, p["c1"]), 8, p["g1"], p["h1"]))
    return ops.group_norm(ops.conv3x3(h, p["c2"]), 8, p["g2"], p["h2"])


def _convolutions(rng: np.random.Generator, channels: int, extra: int) -> Arrays:
    """Two 3x3 convolutions with `extra` channels of input more, each with the scale and shift of a group norm."""
    bound, shape = 1 / math.sqrt(9 * (channels + extra)), (channels, channels + extra, 3, 3)
    one, zero = np.ones(channels), np.zeros(channels)
    return {
        "c1": rng.uniform(-bound, bound, shape), "g1": one, "h1": zero,
        "c2": rng.uniform(-bound, bound, shape), "g2": one.copy(), "h2": zero.copy(),
    }  # fmt: skip


def _w3() -> Problem:
    rng = np.random.default_rng(0)
    y0, title = rng.standard_normal((32, 64, 16, 16)), "W3: state (32, 64, 16, 16), two convolutions with GroupNorm"
    return Problem("W3", title, _residual, y0, _convolutions(rng, 64, 0))


def _odenet_field(ops: Any, t: Any, y: Any, p: Any) -> Any:
    time = ops.zeros_like(y[:, :1]) + ops.reshape(t, (-1, 1, 1, 1))
    h = ops.relu(ops.group_norm(y, 8, p["g0"], p["h0"]))
    h = ops.conv3x3(ops.concatenate([time, h], 1), p["c1"])
    h = ops.relu(ops.group_norm(h, 8, p["g1"], p["h1"]))
    h = ops.conv3x3(ops.concatenate([time, h], 1), p["c2"])
    return ops.group_norm(h, 8, p["g2"], p["h2"])


def _odenet() -> Problem:
    rng = np.random.default_rng(0)
    params = _convolutions(rng, 16, 1) | {"g0": np.ones(16), "h0": np.zeros(16)}
    title = "ODE-Net block: state (32, 16, 7, 7), norm, ReLU and convolution of (t, y), twice"
    return Problem("odenet", title, _odenet_field, rng.standard_normal((32, 16, 7, 7)), params)


def _cnf_field(ops: Any, t: Any, y: Any, p: Any) -> Any:
    def velocity(z: Any) -> Any:
        return _three_layers(ops, t, ops.concatenate([z, _column(ops, t, z)], 1), p)

    dz, traced = ops.vjp(velocity, y[:, :2], p["noise"])
    return ops.concatenate([dz, -(traced * p["noise"]).sum(-1).reshape(-1, 1)], 1)


def _w4() -> Problem:
    rng = np.random.default_rng(0)
    params = _linear(rng, "1", 3, 64) | _linear(rng, "2", 64, 64) | _linear(rng, "3", 64, 2)
    y0 = np.concatenate([rng.standard_normal((256, 2)), np.zeros((256, 1))], 1)
    noise = {"noise": rng.choice([-1.0, 1.0], (256, 2))}
    title = "W4, a CNF: 256 points of the plane with log-density, Hutchinson's trace, width 64"
    return Problem("W4", title, _cnf_field, y0, params, constants=noise)


def _mlp_field(ops: Any, t: Any, y: Any, p: Any) -> Any:
    return ops.linear(ops.tanh(ops.linear(y, p["w1"], p["b1"]) + _column(ops, t, y) * p["wt"]), p["w2"], p["b2"])


def _mlp() -> Problem:
    rng = np.random.default_rng(0)
    params = {
        "w1": rng.standard_normal((16, 4)) / math.sqrt(5), "wt": rng.standard_normal(16) / math.sqrt(5),
        "b1": 0.1 * rng.standard_normal(16), "w2": rng.standard_normal((4, 16)) / 4, "b2": 0.1 * rng.standard_normal(4),
    }  # fmt: skip
    title = "MLP: state (3, 4), a tanh network of 16 units that sees the time, T = 5"
    return Problem("mlp", title, _mlp_field, rng.standard_normal((3, 4)), params, 5.0)


def _latent_field(ops: Any, t: Any, y: Any, p: Any) -> Any:
    h = ops.linear(y, p["w1"], p["b1"])
    for name in "23":
        h = ops.linear(ops.tanh(h), p["w" + name], p["b" + name])
    return ops.linear(ops.tanh(h), p["w4"], p["b4"])


def _latent() -> Problem:
    """The generative solve of `python -m experiments run latent`, with weights five times as large as a new one's."""
    rng, sizes, params = np.random.default_rng(0), (15, 100, 100, 100, 15), {}
    for i, (n_in, n_out) in enumerate(zip(sizes, sizes[1:], strict=False), 1):
        params |= {f"w{i}": 1.6 * rng.standard_normal((n_out, n_in)) / math.sqrt(n_in), f"b{i}": np.zeros(n_out)}
    title = "Latent ODE: state (150, 15), four linear layers of width 100, 100 output times"
    return Problem("latent", title, _latent_field, rng.standard_normal((150, 15)), params, 1.0, n_times=100)


def _cde_field(ops: Any, t: Any, y: Any, p: Any) -> Any:
    h = ops.tanh(ops.linear(y, p["w1"], p["b1"]))
    matrix = ops.tanh(ops.linear(h, p["w2"], p["b2"])).reshape(y.shape[0], 16, 4)
    angle = ops.reshape(t, (-1, 1, 1)) * p["frequency"] + p["phase"]
    control = (p["amplitude"] * p["frequency"] * ops.cos(angle)).sum(-1)  # dX/dt
    return (matrix * control.reshape(y.shape[0], 1, 4)).sum(-1)


def _cde() -> Problem:
    rng, shape = np.random.default_rng(0), (64, 4, 3)
    params = _linear(rng, "1", 16, 32) | _linear(rng, "2", 32, 64)
    constants = {
        "frequency": rng.uniform(1.0, 8.0, shape), "phase": rng.uniform(0.0, 6.0, shape),
        "amplitude": rng.uniform(0.1, 0.5, shape),
    }  # fmt: skip
    title = "Neural CDE: state (64, 16), four channels that are sums of sines"
    return Problem("cde", title, _cde_field, rng.standard_normal((64, 16)), params, 1.0, constants)


def _van_der_pol(ops: Any, t: Any, y: Any, p: Any) -> Any:
    x, v = y[:, 0], y[:, 1]
    return ops.stack([v, p["mu"] * (1 - x * x) * v - x], 1)


def _lorenz(ops: Any, t: Any, y: Any, p: Any) -> Any:
    x, v, w, k = y[:, 0], y[:, 1], y[:, 2], p["k"]
    return ops.stack([k[0] * (v - x), x * (k[1] - w) - v, x * v - k[2] * w], 1)


def _lotka_volterra(ops: Any, t: Any, y: Any, p: Any) -> Any:
    x, v, k = y[:, 0], y[:, 1], p["k"]
    return ops.stack([k[0] * x - k[1] * x * v, k[2] * x * v - k[3] * v], 1)


def _small(name: str, title: str, rule: Rule, y0: tuple[float, ...], params: dict[str, Any], span: float) -> Problem:
    return Problem(name, title, rule, np.array([y0]), {key: np.array(x) for key, x in params.items()}, span)


PROBLEMS = {
    problem.name: problem
    for problem in (
        _network("W1", 128, 8, 64),
        _network("W2", 512, 64, 256),
        _w3(),
        _w4(),
        _mlp(),
        _latent(),
        _cde(),
        _odenet(),
        _small("vdp", "Van der Pol, mu = 2, T = 5", _van_der_pol, (2.0, 0.1), {"mu": [2.0]}, 5.0),
        _small("lorenz", "Lorenz, T = 1", _lorenz, (1.0, 1.0, 20.0), {"k": [10.0, 28.0, 8 / 3]}, 1.0),
        _small("lv", "Lotka-Volterra, T = 5", _lotka_volterra, (1.0, 1.0), {"k": [1.5, 1.0, 1.0, 3.0]}, 5.0),
    )
}
