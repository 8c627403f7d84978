"""The theorems in numbers: stability regions and eigenvalues (3.2), orders (3.1), the adjoint's reverse solve (2.1).

Regions and eigenvalues come from the solver's own steps on z' = sigma z; the paper's formula and the closed form of the
region are only what they are compared with. "Back" is always |z(0) rebuilt - z(0)| / |z(0)|.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchmali as tm
from experiments.engine.task import Config, Run
from experiments.methods import METHODS as TABLE
from experiments.methods import PUBLISHED_ALF, SOLVERS, Method
from experiments.theory.problems import Problem, mlp, van_der_pol
from experiments.theory.reconstruction import (
    arithmetic_of,
    is_exact,
    rebuild,
    relative,
    replayed_gradient,
    solve_forward,
)
from torchmali.engine import Floats, Slope

DIGITS = 6


@dataclass(frozen=True)
class StabilityConfig(Config):
    etas: tuple[float, ...] = (0.25, 0.7, 0.8, 0.95, 1.0)  # of the regions
    grid: int = 300  # points to a side, for areas
    rays: int = 120  # from the middle of a region, for its boundary
    samples: int = 20_000  # of (eta, h, sigma), for the formula of the eigenvalues
    damping: tuple[float, ...] = (1.0, 0.95, 0.7)  # etas of the orders
    n_halvings: int = 5
    tolerances: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8)  # rtol; atol is a tenth
    finest: tuple[float, ...] = (1e-4, 1e-6)  # of ALF and of alf4; below, they take too many steps
    problems: tuple[str, ...] = ("MLP", "Van der Pol, mu = 1", "Van der Pol, mu = 2")
    max_attempts: int = 2_500


PRESETS = {
    "smoke": StabilityConfig(
        etas=(0.25, 0.95, 1.0), grid=120, rays=24, samples=2_000, n_halvings=3, tolerances=(1e-2, 1e-5),
        finest=(1e-2, 1e-5), problems=("MLP", "Van der Pol, mu = 1"), max_attempts=1_000,
    ),
    "cpu": StabilityConfig(),
    "paper": StabilityConfig(grid=1000, rays=360, samples=200_000, finest=(1e-6, 1e-8), max_attempts=50_000),
}  # fmt: skip


def significant(x: float, digits: int = DIGITS) -> float:
    return float(f"{x:.{digits - 1}e}")


# Theorem 3.2: eigenvalues and regions.


def test_equation(sigma: Tensor) -> Slope:
    """z' = sigma z. The solver sees complex numbers as pairs of real ones: a rotation with a scaling. # (n), (n, 2)"""
    return lambda t, z: (torch.view_as_real(sigma * torch.view_as_complex(z[0])),)


def step_matrix(eta: float, h: float, sigma: Tensor) -> Tensor:
    """The linear map (z, v) -> (z, v) of one step on it, from what becomes of (1, 0) and (0, 1). # (n) -> (n, 2, 2)"""
    columns = []
    for z, v in ((1.0, 0.0), (0.0, 1.0)):
        start = Floats(*((torch.view_as_real(torch.full_like(sigma, x)),) for x in (z, v)))
        solver = tm.ALF(eta=eta, refresh="never")
        end = solver.step(test_equation(sigma), 0.0, h, start, None, adaptive=False).state
        columns.append(torch.stack([torch.view_as_complex(x) for x in (*end.point, *end.slope)], -1))
    return torch.stack(columns, -1)


def paper_eigenvalues(eta: float, s: Tensor) -> Tensor:
    """Theorem 3.2, s = h sigma. # (n) -> (n, 2)"""
    middle, root = 1 + eta * (s - 1), torch.sqrt(eta * (2 * s + eta * (s - 1) ** 2))
    return torch.stack([middle + root, middle - root], -1)


def eigenvalue_deviation(config: StabilityConfig) -> dict[str, Any]:
    """The largest distance of measured eigenvalues from the formula, relative to the larger one of a pair."""
    generator = torch.Generator().manual_seed(config.seed)
    n_sigmas = 100
    worst = worst_product = 0.0
    for _ in range(config.samples // n_sigmas):
        eta, size = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
        eta, h = 1e-3 + 0.999 * eta, 10 ** (-3 * size)  # h from 0.001 to 1
        parts = torch.randn(n_sigmas, 2, generator=generator, dtype=torch.float64) * 2
        s = torch.view_as_complex(parts)
        measured, formula = torch.linalg.eigvals(step_matrix(eta, h, s / h)), paper_eigenvalues(eta, s)
        size = formula.abs().amax(1)
        off = torch.minimum((measured - formula).abs().amax(1), (measured - formula.flip(1)).abs().amax(1))
        worst = max(worst, float((off / size).max()))
        # The paper writes the determinant of the step as if it depended on sigma.
        worst_product = max(worst_product, float(((measured.prod(1) - (1 - 2 * eta)).abs() / size**2).max()))
    return {"samples": config.samples, "deviation": worst, "product - (1 - 2 eta)": worst_product}


def growth(eta: float, s: Tensor) -> Tensor:
    """The larger modulus of the two eigenvalues at h sigma = s; the region is where it is below 1."""
    return torch.linalg.eigvals(step_matrix(eta, 1.0, s.flatten())).abs().amax(1).reshape(s.shape)


def lattice(x: tuple[float, float], y: tuple[float, float], nx: int, ny: int) -> tuple[Tensor, float]:
    """Middles of nx by ny cells of a box, as complex numbers, and the area of a cell."""
    dx, dy = (x[1] - x[0]) / nx, (y[1] - y[0]) / ny
    xs = x[0] + dx * (torch.arange(nx, dtype=torch.float64) + 0.5)
    ys = y[0] + dy * (torch.arange(ny, dtype=torch.float64) + 0.5)
    return torch.complex(*torch.meshgrid(xs, ys, indexing="ij")), dx * dy


def crossing(stable: Callable[[Tensor], Tensor], middle: complex, rays: Tensor) -> Tensor:
    """Points at which rays from the middle leave the region, by bisection between 0 and 10 times the ray."""
    inside, outside = torch.zeros_like(rays.real), torch.full_like(rays.real, 10.0)
    for _ in range(50):
        half = (inside + outside) / 2
        is_stable = stable(middle + half * rays)
        inside, outside = torch.where(is_stable, half, inside), torch.where(is_stable, outside, half)
    return middle + inside * rays


def region(config: StabilityConfig, eta: float) -> dict[str, Any]:
    """The region of absolute stability: boundary, area, and the ellipse it should be."""
    box = (-8.0, 1.0), (-1.3, 1.3)
    coarse, _ = lattice(*box, 600, 40)
    stable = coarse[growth(eta, coarse) < 1]
    half_axis = (1 - eta) / eta
    found: dict[str, Any] = {
        "ellipse": {"centre": -half_axis, "semi-axes": [half_axis, 1.0], "area": math.pi * half_axis},
        "growth at i/2": float(growth(eta, torch.tensor([0.5j], dtype=torch.complex128))),
    }
    if not len(stable):
        return {**found, "area": 0.0, **_edge_of_nothing(eta, coarse)}
    # The coarse cells are up to 0.065 long: the margin must be longer, or the tips are cut off.
    (x0, x1), (y0, y1) = ((float(p.min()) - 0.1, float(p.max()) + 0.1) for p in (stable.real, stable.imag))
    fine, cell = lattice((x0, x1), (y0, y1), config.grid, config.grid)
    is_stable = growth(eta, fine) < 1
    area, middle = float(is_stable.sum()) * cell, complex(fine[is_stable].mean())
    angles = torch.arange(config.rays, dtype=torch.float64) * (2 * math.pi / config.rays)
    # Regions are long or flat: rays that are even in the box around them.
    rays = torch.complex((x1 - x0) / 2 * angles.cos(), (y1 - y0) / 2 * angles.sin())
    edge = crossing(lambda s: growth(eta, s) < 1, middle, rays)
    on_ellipse = ((edge.real + half_axis) / half_axis) ** 2 + edge.imag**2
    return {
        **found,
        "area": area,
        "area / ellipse": area / (math.pi * half_axis),
        "boundary": [[round(z.real, DIGITS), round(z.imag, DIGITS)] for z in edge.tolist()],
        "boundary off the ellipse": float((on_ellipse.sqrt() - 1).abs().max()),
        "iterated": iterated(eta, (x0, x1), (y0, y1)),
    }


def _edge_of_nothing(eta: float, coarse: Tensor) -> dict[str, Any]:
    """Facts where nothing is stable: the least growth anywhere, and how far up the imaginary axis it is 1."""
    # Round-off counts by its root where the two eigenvalues meet, at +-i.
    ends = crossing(lambda s: growth(eta, s) < 1 + 1e-6, 0.0, torch.tensor([1j, -1j], dtype=torch.complex128))
    off_axis = coarse[coarse.real.abs() > 0.005]
    return {
        "boundary": [[0.0, round(z.imag, DIGITS)] for z in ends.tolist()],
        "least growth off the axis": float(growth(eta, off_axis).min()),
    }


def iterated(eta: float, x: tuple[float, float], y: tuple[float, float]) -> dict[str, Any]:
    """Share of points where a long run dies out as the eigenvalues say, on a coarse lattice without the edge."""
    s, _ = lattice(x, y, 24, 24)
    s, n_steps = s.flatten(), 400
    f, state = test_equation(s), Floats(*((torch.view_as_real(x),) for x in (torch.ones_like(s), s)))
    solver, sizes = tm.ALF(eta=eta, refresh="never"), []
    for i in range(n_steps):
        state = solver.step(f, float(i), float(i + 1), state, None, adaptive=False).state
        if i + 1 in (n_steps // 2, n_steps):
            sizes.append(torch.stack([x.norm(dim=1) for x in (*state.point, *state.slope)]).norm(dim=0))
    dies, radius = sizes[1] < sizes[0], growth(eta, s)
    clear = (radius - 1).abs() > 0.02
    return {"points": int(clear.sum()), "agree": float((dies == (radius < 1))[clear].double().mean())}


# The problems of the other two theorems.

HARDEST = "Van der Pol, mu = 2"


def problem_of(config: StabilityConfig, title: str) -> Problem:
    """A problem by name: one is easy to solve back in time, one is hard, one too hard from z(T) alone."""
    return {
        "MLP": mlp(config.seed, 5.0),
        "Van der Pol, mu = 1": van_der_pol(1.0, 10.0),
        HARDEST: van_der_pol(2.0, 10.0),
    }[title]


def gradient(problem: Problem, **how: Any) -> tuple[Tensor, tm.Stats]:
    """d(sum z(T)^2)/d(z0, theta) as one vector."""
    inputs = [x.detach().clone().requires_grad_() for x in (problem.z0, *problem.theta)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tm.SolverWarning)  # of a gradient in doubt: here it is measured
        solution = tm.solve(problem.f, inputs[0], (0.0, problem.span), **how, args=tuple(inputs[1:]))
        grads = torch.autograd.grad((solution.y[-1] ** 2).sum(), inputs)
    return torch.cat([g.flatten() for g in grads]), solution.stats


# Theorem 3.1: orders.


def slope_of(hs: Sequence[float], errors: Sequence[float]) -> float:
    """p in error = c h^p, by least squares on logarithms."""
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in (hs, errors))
    x = x - x.mean()
    return float((x * y).sum() / (x * x).sum())


def exact_end(problem: Problem, n_steps: int = 200) -> Tensor:
    return solve_forward(problem, tm.Dopri8(), tm.FixedStep(problem.span / n_steps))[0].point[0]


def curve(hs: Sequence[float], **errors: list[float]) -> dict[str, Any]:
    return {
        "h": [significant(h) for h in hs],
        **{name: [significant(e) for e in values] for name, values in errors.items()},
        "slopes": {name: slope_of(hs, values) for name, values in errors.items()},
    }


def local_order(config: StabilityConfig, eta: float) -> dict[str, Any]:
    """Errors of z and v after one step from v = f(0, z)."""
    problem, hs = mlp(config.seed, 1.0), [0.1 / 2**i for i in range(config.n_halvings)]
    z_errors, v_errors = [], []
    for h in hs:
        problem = problem._replace(span=h)
        end, _ = solve_forward(problem, tm.ALF(eta=eta, refresh="never"), tm.FixedStep(h))
        z = exact_end(problem, n_steps=4)
        z_errors.append(float((end.point[0] - z).norm()))
        v_errors.append(float((end.slope[0] - problem.slope(h, (z,))[0]).norm()))
    return curve(hs, z=z_errors, v=v_errors)


def global_order(config: StabilityConfig, eta: float) -> dict[str, Any]:
    """Errors of z and v at a fixed time."""
    problem, hs = mlp(config.seed, 2.0), [0.04 / 2**i for i in range(config.n_halvings)]
    z = exact_end(problem)
    v = problem.slope(problem.span, (z,))[0]
    z_errors, v_errors = [], []
    for h in hs:
        end, _ = solve_forward(problem, tm.ALF(eta=eta, refresh="never"), tm.FixedStep(h))
        z_errors.append(relative(end.point[0], z))
        v_errors.append(relative(end.slope[0], v))
    return curve(hs, z=z_errors, v=v_errors)


GRADIENTS = {  # solver: steps of the coarsest grid. Finer ones of the higher orders meet round-off.
    "ALF": (PUBLISHED_ALF, 50),
    "alf4": (tm.ALF(order=4, refresh="never"), 8),
    "alf6": (tm.ALF(order=6, refresh="never"), 8),
    "ALF, eta = 0.95": (tm.ALF(eta=0.95), 50),
    "ALF, eta = 0.7": (tm.ALF(eta=0.7), 50),
}


@functools.cache
def exact_gradient(span: float, seed: int) -> Tensor:
    return gradient(mlp(seed, span), solver=tm.Dopri8(), controller=tm.FixedStep(0.04), gradient=tm.ACA())[0]


def gradient_order(config: StabilityConfig, name: str) -> dict[str, Any]:
    """Errors of MALI's gradient against that of the ODE."""
    problem, (solver, coarsest) = mlp(config.seed, 2.0), GRADIENTS[name]
    truth = exact_gradient(problem.span, config.seed)
    ratio = 2.0 if solver.order == 2 else math.sqrt(2)
    counts = [round(coarsest * ratio**i) for i in range(config.n_halvings)]
    hs = [problem.span / count for count in counts]
    found = [gradient(problem, solver=solver, controller=tm.FixedStep(h), gradient=tm.MALI())[0] for h in hs]
    return {
        **curve(hs, error=[relative(g, truth) for g in found]),
        "evaluations": [solver.n_reflects * n for n in counts],
    }


# Theorem 2.1: the reverse solve.

REVERSED = {
    "Euler": SOLVERS["Euler"],
    "midpoint": SOLVERS["RK2"],
    "Bosh3": SOLVERS["RK23"],
    "RK4": SOLVERS["RK4"],
    "Dopri5": SOLVERS["Dopri5"],
    "ALF solved back": PUBLISHED_ALF,
    "ALF inverse": PUBLISHED_ALF,
}


def reverse_order(config: StabilityConfig, name: str) -> dict[str, Any]:
    """Errors of z(0) after equal steps to T and back: from z(T) anew, or with the inverse."""
    problem, solver, counts = mlp(config.seed, 2.0), REVERSED[name], (12, 24, 48, 96)
    errors = []
    for n in counts:
        controller = tm.FixedStep(problem.span / n)
        if name == "ALF inverse":
            *_, (_, z, _) = rebuild(problem, PUBLISHED_ALF, *solve_forward(problem, solver, controller))
        else:
            z = there_and_back(problem, solver, controller)
        errors.append(relative(z, problem.z0))
    return curve([problem.span / n for n in counts], back=errors)


def there_and_back(problem: Problem, solver: tm.Solver, controller: tm.StepController) -> Tensor:
    """Recover z(0) as the adjoint method does: by a solve to T, and a second solve from there back to 0."""
    z, how = problem.z0, {"solver": solver, "controller": controller, "gradient": tm.ACA(), "args": problem.theta}
    with torch.no_grad():
        for times in ((0.0, problem.span), (problem.span, 0.0)):
            z = tm.solve(problem.f, z, times, **how).y[-1]
    return z


class Compared(NamedTuple):
    """A method, and the numbers it computes with."""

    method: Method
    dtype: torch.dtype


METHODS = {
    "adjoint": Compared(TABLE["adjoint"], torch.float64),
    "MALI": Compared(TABLE["mali"], torch.float64),
    "MALI float32": Compared(TABLE["mali"], torch.float32),
    "MALI exact": Compared(TABLE["exact"], torch.float32),
    "MALI as published": Compared(TABLE["published"], torch.float64),
    "alf4": Compared(TABLE["alf4"], torch.float64),
}


def reverse_error(config: StabilityConfig, problem: Problem, name: str, tolerance: float) -> dict[str, Any]:
    """Error of z(0) rebuilt by a method, and its gradient against the exact one of the same discrete solve."""
    compared, controller = METHODS[name], tm.AdaptiveStep(tolerance, tolerance / 10, max_steps=config.max_attempts)
    problem, solver, own = problem.to(compared.dtype), compared.method.solver, compared.method.gradient
    try:
        end, tape = solve_forward(problem, solver, controller, arithmetic_of(own, problem.span))
    except tm.SolverError as error:
        return {"failed": f"on the way forward: {_first_sentence(error)}"}
    found: dict[str, Any] = {"steps": tape.n_steps}
    try:
        if isinstance(solver, tm.ReversibleSolver):
            errors = [relative(state.z, state.original) for state in rebuild(problem, solver, end, tape)]
            found |= {"back": significant(errors[-1]), "worst": significant(max(errors))}
        else:
            found["back"] = significant(relative(there_and_back(problem, solver, controller), problem.z0))
    except tm.SolverError as error:
        found["back failed"] = _first_sentence(error)
    how: Any = {"solver": solver, "controller": controller}
    # ACA takes the steps of floats; the solve on integers has its own.
    discrete = (
        replayed_gradient(problem, solver, tape) if is_exact(own) else gradient(problem, **how, gradient=tm.ACA())[0]
    )
    try:
        g, stats = gradient(problem, **how, gradient=own)
        found |= {"gradient": significant(relative(g, discrete)), "rejected": stats.n_rejected}
        found |= {"refreshes": stats.n_refreshes, "reruns": stats.n_reruns}
    except tm.SolverError as error:
        found["gradient failed"] = _first_sentence(error)
    return found


def _first_sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).split(' (')[0]}"


def finest(config: StabilityConfig, title: str, name: str) -> float:
    """The smallest tolerance that a method is asked to meet."""
    method, dtype = METHODS[name]
    if not isinstance(method.solver, tm.ALF):
        return 0.0
    limit = config.finest[method.solver.order // 4]
    if title == HARDEST:  # it takes the most steps, and the others add nothing
        return 10 * limit if name in ("MALI", "alf4") else math.inf
    if dtype == torch.float32:  # round-off would show; integers take time
        return max(limit, 1e-3 if is_exact(method.gradient) else 1e-4)
    return limit


def main(config: StabilityConfig, run: Run) -> dict[str, Any]:
    work: dict[tuple[str, ...], Callable[[], Any]] = {("eigenvalues",): functools.partial(eigenvalue_deviation, config)}
    for eta in config.etas:
        work["regions", f"{eta:g}"] = functools.partial(region, config, eta)
    for eta in config.damping:
        work["orders", "local", f"{eta:g}"] = functools.partial(local_order, config, eta)
        work["orders", "global", f"{eta:g}"] = functools.partial(global_order, config, eta)
    for name in GRADIENTS:
        work["orders", "gradient", name] = functools.partial(gradient_order, config, name)
    for name in REVERSED:
        work["reverse", "equal steps", name] = functools.partial(reverse_order, config, name)
    for title in config.problems:
        for name in METHODS:
            for tolerance in config.tolerances:
                if tolerance >= finest(config, title, name):
                    do = functools.partial(reverse_error, config, problem_of(config, title), name, tolerance)
                    work["reverse", "tolerances", title, name, f"{tolerance:g}"] = do
    found = run.pieces({" / ".join(path): do for path, do in work.items()})
    return nested({path: found[" / ".join(path)] for path in work})


def nested(flat: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for (*path, name), value in flat.items():
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[name] = value
    return tree
