"""One gradient of a problem by each method that runs on torch: ours, torchdiffeq, torchode, TorchDiffEqPack."""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torchdiffeq
from torch import Tensor, nn
from torch.nn import functional as F

import torchmali as tm
from benchmarks.harness import allocated_peak
from benchmarks.suite.problems import Problem
from torchmali.measure import LiveBytes

PACKAGES = ("torch", "torchmali", "torchdiffeq", "torchode", "TorchDiffEqPack")
MAX_STEPS = 10_000
CALLS = [0]  # evaluations of f so far, in this process

Solve = Callable[[nn.Module, Tensor], Tensor]  # f, y0 -> y at all output times, time first, or at the last one alone


class Ops:
    """The operations that fields are written in, by torch."""

    linear, tanh, relu, cos = F.linear, torch.tanh, torch.relu, torch.cos
    concatenate, stack, zeros_like, reshape = torch.concatenate, torch.stack, torch.zeros_like, torch.reshape
    group_norm = F.group_norm

    @staticmethod
    def conv3x3(x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, padding=1)

    @staticmethod
    def vjp(fn: Callable[[Tensor], Tensor], y: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """Return fn(y) and cotangent^T dfn/dy, with a graph where one is being recorded."""
        keep = torch.is_grad_enabled()
        with torch.enable_grad():
            y = y if keep and y.requires_grad else y.detach().requires_grad_()
            out = fn(y)
            (found,) = torch.autograd.grad(out, y, cotangent, create_graph=keep)
        return (out, found) if keep else (out.detach(), found)


class Field(nn.Module):
    """f of a problem."""

    def __init__(self, problem: Problem, dtype: torch.dtype):
        super().__init__()
        self.rule = problem.rule
        self.arrays = {name: torch.tensor(x, dtype=dtype) for name, x in problem.constants.items()}
        for name, x in problem.params.items():
            parameter = nn.Parameter(torch.tensor(x, dtype=dtype))
            self.register_parameter(name, parameter)
            self.arrays[name] = parameter

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        CALLS[0] += 1
        return self.rule(Ops, t, y, self.arrays)


class Flat(nn.Module):
    """f for a state of two dimensions, which torchode needs."""

    def __init__(self, f: nn.Module, shape: torch.Size):
        super().__init__()
        self.f, self.shape = f, shape

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.f(t.to(y.dtype), y.reshape(self.shape)).flatten(1)


class Timed(nn.Module):
    """f for a solver that gives it the time as a float."""

    def __init__(self, f: nn.Module):
        super().__init__()
        self.f = f

    def forward(self, t: Any, y: Tensor) -> Tensor:
        return self.f(torch.as_tensor(t, dtype=y.dtype), y)


# Methods: each takes the problem, its output times and the tolerances or the number of steps.


def ours(times: Tensor, how: Mapping[str, Any], gradient: str, compiles: bool = False) -> Solve:
    """Our odeint, with the choices that it makes by default for this gradient method; fixed steps are those of ALF."""
    if "steps" in how:
        methods = {"mali": tm.MALI(), "aca": tm.ACA(), "naive": tm.Naive()}
        controller = tm.FixedStep(float(times[-1]) / how["steps"])
        return lambda f, y: tm.solve(f, y, times, controller=controller, gradient=methods[gradient], compile=compiles).y
    tolerances = {"rtol": how["rtol"], "atol": how["atol"]}
    return lambda f, y: tm.odeint(f, y, times, **tolerances, gradient=gradient, compile=compiles)


def theirs(times: Tensor, how: Mapping[str, Any], solve: Any) -> Solve:
    """Return torchdiffeq's odeint or odeint_adjoint."""
    if "steps" in how:
        options: dict[str, Any] = {"method": "midpoint", "options": {"step_size": float(times[-1]) / how["steps"]}}
    else:
        options = {"method": "dopri5", "rtol": how["rtol"], "atol": how["atol"]}
        options["options"] = {"max_num_steps": MAX_STEPS}
    return lambda f, y: solve(f, y, times, **options)


def torchode(times: Tensor, how: Mapping[str, Any]) -> Solve:
    to = importlib.import_module("torchode")

    def solve(f: nn.Module, y: Tensor) -> Tensor:
        n = len(y)
        term = to.ODETerm(Flat(f, y.shape))
        if "steps" in how:  # a little longer, so that round-off does not add a step
            step, controller = to.Heun(term=term), to.FixedStepController()
            dt0 = torch.full((n,), float(times[-1]) / how["steps"] * (1 + 1e-6), dtype=times.dtype)
        else:
            step = to.Dopri5(term=term)
            controller, dt0 = to.IntegralController(atol=how["atol"], rtol=how["rtol"], term=term), None
        solver = to.AutoDiffAdjoint(step, controller, max_steps=MAX_STEPS)
        problem = to.InitialValueProblem(y0=y.flatten(1), t_eval=times.to(y.dtype).expand(n, -1))
        solution = solver.solve(problem, dt0=dt0)
        if solution.status.any():
            raise RuntimeError(f"torchode ended with status {solution.status.max().item()}.")
        return solution.ys.movedim(1, 0).reshape(-1, *y.shape)

    return solve


def their_mali(times: Tensor, how: Mapping[str, Any]) -> Solve:
    """MALI of the paper's code. It has no output times: there is a solve from each to the next."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports pyplot
        solve = importlib.import_module("TorchDiffEqPack").odesolve_adjoint_sym12
    options: dict[str, Any] = {"print_neval": False, "neval_max": MAX_STEPS, "interpolation_method": "cubic"}
    options |= {"regenerate_graph": False, "t_eval": None}
    if "steps" in how:
        options |= {"method": "fixedstep_sym12async", "h": float(times[-1]) / how["steps"], "rtol": 1e-2, "atol": 1e-3}
    else:
        options |= {"method": "sym12async", "h": None, "rtol": how["rtol"], "atol": how["atol"]}
    ends = times.tolist()

    def all_outputs(f: nn.Module, y: Tensor) -> Tensor:
        ys, f = [y], Timed(f)
        for t0, t1 in zip(ends, ends[1:], strict=False):
            ys.append(solve(f, ys[-1], options=options | {"t0": t0, "t1": t1}))
        return torch.stack(ys)

    return all_outputs


METHODS: dict[str, Callable[[Tensor, Mapping[str, Any]], Solve]] = {
    "MALI": lambda times, how: ours(times, how, "mali"),
    "MALI compiled": lambda times, how: ours(times, how, "mali", compiles=True),
    "ACA": lambda times, how: ours(times, how, "aca"),
    "naive": lambda times, how: ours(times, how, "naive"),
    "torchdiffeq naive": lambda times, how: theirs(times, how, torchdiffeq.odeint),
    "torchdiffeq adjoint": lambda times, how: theirs(times, how, torchdiffeq.odeint_adjoint),
    "torchode": torchode,
    "TorchDiffEqPack MALI": their_mali,
}
COMPILED = {"MALI compiled": "MALI"}  # methods that do not call f for each evaluation, and those that count for them
LIMIT = "eager limit"  # the fixed-step method that only evaluates


def missing() -> dict[str, str]:
    """Methods whose package is not installed, and what is missing."""
    needed = {"torchode": "torchode", "TorchDiffEqPack MALI": "TorchDiffEqPack"}
    return {name: package for name, package in needed.items() if importlib.util.find_spec(package) is None}


class Case:
    """One problem with one method and setting, ready to be run over and over."""

    compile_seconds: float | None = None

    def __init__(self, problem: Problem, method: str, how: Mapping[str, Any], dtype: str):
        self.f = Field(problem, getattr(torch, dtype))
        self.y0 = torch.tensor(problem.y0, dtype=getattr(torch, dtype))
        self.times = torch.tensor(problem.times(how.get("n_times")), dtype=torch.float64)
        self.method, self.how = method, how
        self.solve = None if method == LIMIT else METHODS[method](self.times, how)
        self.y = self.y0
        self.forward = 0  # evaluations in the forward pass of the last run
        self.of_problem = problem, how, dtype
        if method in COMPILED:
            start = time.perf_counter()
            self.run()
            self.compile_seconds = time.perf_counter() - start

    def run(self) -> None:
        """Zero the gradients, solve, and differentiate the loss by y0 and all parameters."""
        if self.solve is None:
            return self.evaluate_only(self.how["steps"])
        self.f.zero_grad()
        self.y = self.y0.clone().requires_grad_()
        before = CALLS[0]
        y = self.solve(self.f, self.y)
        self.forward = CALLS[0] - before
        loss = (y[-1] ** 2).sum() if len(self.times) == 2 else (y**2).sum() / len(self.times)
        loss.backward()

    def evaluate_only(self, n_steps: int) -> None:
        """Evaluate f as often as MALI does, with n_steps steps: no method that forgets the steps can take less."""
        params, t, a = list(self.f.parameters()), torch.zeros((), dtype=self.y0.dtype), torch.ones_like(self.y0)
        with torch.no_grad():
            for _ in range(n_steps):
                self.f(t, self.y0)
        self.forward = n_steps
        for _ in range(n_steps):
            y = self.y0.detach().requires_grad_()
            torch.autograd.grad(self.f(t, y), [y, *params], a, allow_unused=True)

    def counts(self, both: bool = True) -> dict[str, int]:
        """Evaluations of both passes, which are always known."""
        before = CALLS[0]
        self.run()
        if self.method in COMPILED:
            problem, how, dtype = self.of_problem
            return Case(problem, COMPILED[self.method], how, dtype).counts()
        return {"forward": self.forward, "backward": CALLS[0] - before - self.forward}

    def peak_bytes(self) -> int:
        """Peak bytes of live tensors; the case has been run before."""
        if self.method in COMPILED:
            return allocated_peak(self.run)
        with LiveBytes() as live:
            self.run()
        return live.peak

    def gradient(self) -> np.ndarray:
        """The gradient by y0 and all parameters of the last run, as one vector in float64."""
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in (self.y, *self.f.parameters())]
        return torch.cat([x.double().flatten() for x in found]).numpy()


def reference(problem: Problem, n_times: int | None) -> tuple[np.ndarray, float]:
    """The gradient of the ODE, by Dopri8 and ACA in float64 at 1e-12, and its relative distance from that at 1e-10."""
    case = Case(problem, "ACA", {"rtol": 1e-12, "atol": 1e-14, "n_times": n_times}, "float64")
    found = []
    for rtol in (1e-12, 1e-10):
        controller = tm.AdaptiveStep(rtol, rtol / 100, max_steps=10**6)

        def solve(f: nn.Module, y: Tensor, controller: Any = controller) -> Tensor:
            return tm.solve(f, y, case.times, solver=tm.Dopri8(), controller=controller, gradient=tm.ACA()).y

        case.solve = solve
        case.run()
        found.append(case.gradient())
    return found[0], error_of(found[1], found[0])


def error_of(gradient: np.ndarray, reference: np.ndarray) -> float:
    if gradient.shape != reference.shape:
        raise RuntimeError(f"A gradient of {gradient.size} numbers; {reference.size} were expected.")
    error = float(np.linalg.norm(gradient - reference) / np.linalg.norm(reference))
    return error if math.isfinite(error) else math.inf
