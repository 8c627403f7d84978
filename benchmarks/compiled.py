"""Time of one gradient of a fixed-step solve whose loops are compiled, beside the paper's own code and an eager solve.

    python -m benchmarks.compiled [--rounds 60] [--steps 50]

Each workload is compiled in two processes of its own, too: with a cache of torch's that is empty (cold), and with what
the first process left there (warm). The ratios are to TorchDiffEqPack's MALI, as in benchmarks.gradients.

The matrix products alone are timed beside it, in the order and with the shapes of an eager gradient.

The aims are those that were set for compiled solves; a missed one is said to be missed. The benchmark fails where a
gradient differs, where something is compiled a second time, or where a ratio is above its limit.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchmali as tm
from benchmarks.gradients import gradients_agree, one_gradient, reference_mali, say
from benchmarks.harness import Run, finish, options_of, paired_ratio, quiet_down, time_side_by_side
from benchmarks.workloads import W1, W2, Workload
from torchmali.engine import n_captured

AIMS = {"W1": 0.24, "W4": 0.22, "W2": 0.55}
LIMITS = {"W1": 1.5, "W4": 1.15, "W2": 1.1}  # x the products alone: what was reached, and some noise
SECONDS = {"cold": 30.0, "warm": 10.0}  # of W1
DIFFERENCE = {"float32": 1e-5, "float64": 1e-12}


class Concatenated(nn.Module):
    """f(t, y) of a flow in the plane: an MLP of (y, t)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(torch.cat([y, y.new_zeros(len(y), 1) + t], 1))  # TorchDiffEqPack's t is a float


class Traced(nn.Module):
    """dx/dt, and Hutchinson's estimate of the trace of its Jacobian in a last column, from one noise."""

    def __init__(self):
        super().__init__()
        self.f, self.noise = Concatenated(), torch.randn(256, 2).sign()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        keeps = torch.is_grad_enabled()
        with torch.enable_grad():
            x = (y.requires_grad_() if keeps else y.detach().requires_grad_())[:, :2]
            u = self.f(t, x)
            (g,) = torch.autograd.grad(u, x, self.noise, create_graph=keeps)
        return torch.cat([u if keeps else u.detach(), (g * self.noise).sum(1, keepdim=True)], 1)


@dataclass(frozen=True)
class Flow:
    """W4: a continuous normalising flow."""

    name: str = "W4"

    def make(self) -> tuple[Any, Tensor]:
        torch.manual_seed(0)
        return Traced(), torch.cat([torch.randn(256, 2), torch.zeros(256, 1)], 1)


WORKLOADS: tuple[Workload | Flow, ...] = (W1, Flow(), W2)


def solve_with(f: Any, n_steps: int, compiles: bool) -> Callable[[Tensor], Tensor]:
    controller = tm.FixedStep(1 / n_steps)
    return lambda y: tm.solve(f, y, (0.0, 1.0), controller=controller, gradient=tm.MALI(), compile=compiles).y[-1]


class Products(TorchDispatchMode):
    """Notes the factors of all matrix products, as tensors of the same shapes and strides."""

    def __init__(self):
        super().__init__()
        self.factors: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.factors.append((args[-2], args[-1]))
        return func(*args, **(kwargs or {}))


def _like(shape: torch.Size, stride: tuple[int, ...], which: int) -> Tensor:
    """A factor of a product, in memory that it shares with no other one."""
    return torch.empty_strided(shape, stride).normal_()


def products_of(run: Run) -> Run:
    """The matrix products of a gradient, and nothing else: no implementation of it takes less, with these products."""
    with Products() as found:
        run()
    like = functools.cache(_like)
    pairs = [(like(x.shape, x.stride(), 0), like(y.shape, y.stride(), 1)) for x, y in found.factors]
    results = [torch.empty(x.shape[0], y.shape[1]) for x, y in pairs]

    def products() -> None:
        with torch.no_grad():
            for (x, y), out in zip(pairs, results, strict=True):
                torch.mm(x, y, out=out)

    return products


def difference_in_double(workload: Workload | Flow, n_steps: int) -> float:
    """Largest relative difference of gradients from those of an eager solve, in float64."""
    made: tuple[Any, Tensor] = workload.make()
    f, y0 = made[0].double(), made[1].double()
    if isinstance(f, Traced):
        f.noise = f.noise.double()
    runs = {
        "naive" if eager else "compiled": one_gradient(f, y0, solve_with(f, n_steps, not eager)) for eager in (1, 0)
    }
    return gradients_agree(f, runs)


def measure(workload: Workload | Flow, n_steps: int, rounds: int) -> dict[str, Any]:
    made: tuple[Any, Tensor] = workload.make()
    f, y0 = made
    solves = {way: solve_with(f, n_steps, way == "compiled") for way in ("eager", "compiled")}
    runs: dict[str, Run] = {name: one_gradient(f, y0, solve) for name, solve in solves.items()}
    agreement = gradients_agree(f, {"naive": runs["eager"], "compiled": runs["compiled"]})
    runs["products"] = products_of(runs["eager"])
    runs["TDEPack MALI"] = one_gradient(f, y0, reference_mali(f, n_steps))
    before = n_captured()
    seconds = time_side_by_side(runs, rounds, workload.name)
    for n in (n_steps + 3, 7):
        one_gradient(f, 0.9 * y0, solve_with(f, n, True))()
    n_again = n_captured() - before
    ratio = {name: paired_ratio(seconds.cpu[name], seconds.cpu["TDEPack MALI"]) for name in (*solves, "products")}
    return {
        "n_steps": n_steps,
        "time_ratios": ratio,
        "difference": {"float32": agreement, "float64": difference_in_double(workload, n_steps)},
        "n_compiled_again": n_again,
        "compile_seconds": compile_seconds(workload.name),
        "cpu_seconds": seconds.cpu,
        "wall_seconds": seconds.wall,
    }


def compile_seconds(name: str, module: str = "benchmarks.compiled") -> dict[str, Any]:
    """Seconds of the first gradient in a new process, without and with torch's cache on disk.

    CPU seconds, which do not depend on what else runs, are those of the whole process, of its imports and the compilers
    that it starts; wall seconds those of the first gradient alone, which `print_first` of the module prints.
    """
    found: dict[str, Any] = {"cpu": {}, "wall": {}}
    with tempfile.TemporaryDirectory() as cache:
        for way in ("cold", "warm"):
            command = [sys.executable, "-c", f"from {module} import print_first; print_first({name!r})"]
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
            before = os.times()
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            found["wall"][way] = json.loads(done.stdout.splitlines()[-1])
            found["cpu"][way] = sum(os.times()[2:4]) - sum(before[2:4])
    return found


def print_first(name: str) -> None:
    """Print the seconds of the first gradient of a workload."""
    quiet_down()
    (workload,) = [w for w in WORKLOADS if w.name == name]
    made: tuple[Any, Tensor] = workload.make()
    f, y0 = made
    run = one_gradient(f, y0, solve_with(f, 50, True))
    start = time.perf_counter()
    run()
    print(json.dumps(time.perf_counter() - start))


def report(results: dict[str, dict[str, Any]]) -> bool:
    """Print what was measured; return whether all limits are kept. (Aims may be missed.)"""
    console, kept = Console(), True
    for name, result in results.items():
        ratio = result["time_ratios"]["compiled"]
        products = result["time_ratios"]["products"]["median"]
        console.print(f"{name}: matrix products alone / TDEPack MALI = {products:.3f}")
        quartiles = f"{ratio['lower']:.3f} - {ratio['upper']:.3f}"
        console.print(f"{name}: eager / TDEPack MALI = {result['time_ratios']['eager']['median']:.3f}")
        say(console, f"{name}: compiled / TDEPack MALI ({quartiles}), aim", ratio["median"], AIMS[name])
        to_products = paired_ratio(result["cpu_seconds"]["compiled"], result["cpu_seconds"]["products"])["median"]
        kept &= say(console, f"{name}: compiled / matrix products alone", to_products, LIMITS[name])
        for dtype, limit in DIFFERENCE.items():
            difference = result["difference"][dtype]
            console.print(f"{name}: difference of gradients in {dtype} = {difference:.1e}, limit {limit:.0e}")
            kept &= difference <= limit
        kept &= say(console, f"{name}: compiled again for other N and y0", result["n_compiled_again"], 0)
        for way, limit in SECONDS.items():
            cpu, wall = (result["compile_seconds"][kind][way] for kind in ("cpu", "wall"))
            console.print(f"{name}: seconds to compile, {way}: CPU {cpu:.1f}, wall {wall:.1f}")
            if name == "W1":
                say(console, f"{name}: CPU seconds to compile, {way}, aim", cpu, limit)
    return kept


def main() -> None:
    options = options_of(__doc__, rounds=60, steps=50)
    results = {w.name: measure(w, options.steps, options.rounds) for w in WORKLOADS}
    finish("compiled", options, results, ("torch", "torchmali", "TorchDiffEqPack"), report(results))


if __name__ == "__main__":
    main()
