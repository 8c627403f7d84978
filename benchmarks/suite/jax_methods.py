"""One gradient of a problem by diffrax, compiled by jax: run in an environment of its own (`make .venv-jax`)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import diffrax  # pyright: ignore[reportMissingImports]
import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np

from benchmarks.suite.problems import Problem

PACKAGES = ("jax", "diffrax")
ADJOINTS: dict[str, Callable[[], Any]] = {
    "diffrax": diffrax.RecursiveCheckpointAdjoint,  # its default
    "diffrax backsolve": diffrax.BacksolveAdjoint,
}
METHODS = ADJOINTS
PER_STEP, AT_START = 6, 1  # evaluations of Dopri5: f(t1, y1) is the next step's first


class Ops:
    """The operations that fields are written in, by jax."""

    tanh, cos, relu = jnp.tanh, jnp.cos, staticmethod(jax.nn.relu)
    concatenate, stack, zeros_like, reshape = jnp.concatenate, jnp.stack, jnp.zeros_like, jnp.reshape

    @staticmethod
    def linear(x: Any, weight: Any, bias: Any) -> Any:
        return x @ weight.T + bias

    @staticmethod
    def conv3x3(x: Any, weight: Any) -> Any:
        return jax.lax.conv_general_dilated(x, weight, (1, 1), "SAME")

    @staticmethod
    def group_norm(x: Any, groups: int, weight: Any, bias: Any) -> Any:
        parts = x.reshape(x.shape[0], groups, -1)
        mean, variance = parts.mean(-1, keepdims=True), parts.var(-1, keepdims=True)
        parts = (parts - mean) * jax.lax.rsqrt(variance + 1e-5)
        return parts.reshape(x.shape) * weight[:, None, None] + bias[:, None, None]

    @staticmethod
    def vjp(fn: Callable[[Any], Any], y: Any, cotangent: Any) -> tuple[Any, Any]:
        out, pull = jax.vjp(fn, y)
        return out, pull(cotangent)[0]


def missing() -> dict[str, str]:
    return {}


def loss_of(problem: Problem, method: str, n_steps: int | None, n_times: int, dtype: str, tick: Any = None) -> Any:
    """The loss as a function of y0, the parameters, rtol and atol; tick is called at every evaluation of f."""
    constants = {name: jnp.asarray(x, dtype) for name, x in problem.constants.items()}
    times = np.linspace(0.0, problem.span, n_times)

    def field(t: Any, y: Any, params: Any) -> Any:
        if tick:
            jax.debug.callback(tick)
        return problem.rule(Ops, t, y, {**constants, **params})

    def loss(y0: Any, params: Any, rtol: Any, atol: Any) -> Any:
        if n_steps:
            solver, controller, most = diffrax.Midpoint(), diffrax.ConstantStepSize(), n_steps
        else:
            solver, controller, most = diffrax.Dopri5(), diffrax.PIDController(rtol=rtol, atol=atol), 4096
        h = problem.span / n_steps * (1 + 1e-6) if n_steps else None  # so that round-off does not add a step
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field), solver, 0.0, problem.span, h, y0, args=params, max_steps=most,
            saveat=diffrax.SaveAt(t1=True) if n_times == 2 else diffrax.SaveAt(ts=jnp.asarray(times)),
            stepsize_controller=controller, adjoint=ADJOINTS[method](),
        )  # fmt: skip
        return (solution.ys**2).sum() / (1 if n_times == 2 else n_times), solution.stats["num_steps"]

    return loss


def inputs_of(problem: Problem, dtype: str) -> tuple[Any, Any]:
    return jnp.asarray(problem.y0, dtype), {name: jnp.asarray(x, dtype) for name, x in problem.params.items()}


def gradient_of(loss: Any) -> Any:
    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


@functools.cache
def compiled(problem: Problem, method: str, n_steps: int | None, n_times: int, dtype: str) -> tuple[Any, float]:
    """Compile the gradient of a problem by y0 and its parameters; return it, and the seconds that took.

    Tolerances are arguments of what was compiled, the number of steps is not.
    """
    loss = loss_of(problem, method, n_steps, n_times, dtype)
    start = time.process_time()
    gradient = jax.jit(gradient_of(loss)).lower(*inputs_of(problem, dtype), 1e-3, 1e-4).compile()
    return gradient, time.process_time() - start


class Case:
    """One problem with one method and setting, ready to be run over and over."""

    def __init__(self, problem: Problem, method: str, how: Mapping[str, Any], dtype: str):
        self.problem, self.how = problem, how
        self.key = problem, method, how.get("steps"), how.get("n_times") or problem.n_times, dtype
        self.compiled, self.compile_seconds = compiled(*self.key)
        self.inputs = (*inputs_of(problem, dtype), how.get("rtol", 1e-3), how.get("atol", 1e-4))
        self.result: Any = None

    def run(self) -> None:
        self.result = jax.block_until_ready(self.compiled(*self.inputs))

    def counts(self, both: bool = False) -> dict[str, int | None]:
        """Evaluations of the forward pass, from the number of attempted steps.

        both: those of the backward pass, too; they are counted while all is compiled and run once more.
        """
        self.run()
        n_steps = int(self.result[0][1])
        forward = 2 * n_steps if "steps" in self.how else PER_STEP * n_steps + AT_START
        return {"forward": forward, "backward": self.count() - forward if both else None}

    def count(self) -> int:
        """Evaluations of both passes."""
        ticks: list[None] = []
        loss = loss_of(*self.key, tick=lambda: ticks.append(None))
        jax.block_until_ready(jax.jit(gradient_of(loss))(*self.inputs))
        jax.effects_barrier()
        return len(ticks)

    def peak_bytes(self) -> int:
        """The bytes that the compiled code takes beside its inputs, as it says itself."""
        found = self.compiled.memory_analysis()
        return found.temp_size_in_bytes + found.output_size_in_bytes

    def gradient(self) -> np.ndarray:
        """The gradient by y0 and all parameters of the last run, as one vector in float64."""
        by_y0, by_params = self.result[1]
        found = [by_y0, *(by_params[name] for name in self.problem.params)]
        return np.concatenate([np.asarray(x, np.float64).ravel() for x in found])
