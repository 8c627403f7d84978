"""Tables 2 and 3, Figure 6: a network trained with one solver, run and attacked with others; a ResNet run as an ODE."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import torchmali as tm
from experiments.engine.devices import is_first_process
from experiments.engine.measure import one_step
from experiments.engine.task import Run, require_known
from experiments.engine.trainer import evaluating
from experiments.images.recognition import Augmented, FolderBatches, ImagesConfig, summary, trained
from experiments.methods import PUBLISHED_ALF, SOLVERS, Solve
from experiments.models.ode_resnet import RESNET, Network
from experiments.theory.controllers import UnguardedLastStep, reference_end

NAMES = ("mali", "adjoint", "resnet")


@dataclass(frozen=True)
class SolversConfig(ImagesConfig):
    """Settings. epsilons: sizes of attacks, in parts of 255."""

    network: str = "stack"
    h: float | None = 0.25
    momentum_in_f: float = 0.02  # a solve evaluates f five times: of 0.1 each, it would remember two batches
    sizes: tuple[float, ...] = (1.0, 0.5, 0.25, 0.15, 0.1)
    tolerances: tuple[float, ...] = (1.0, 0.1, 0.01)
    epsilons: tuple[float, ...] = (1.0, 2.0, 16.0, 32.0)
    n_attacked: int | None = None  # None: all test images
    pgd_steps: int = 10


PRESETS = {
    "smoke": SolversConfig(
        n_train=256,
        n_validation=100,
        n_test=64,
        epochs=1,
        sizes=(1.0, 0.5),
        tolerances=(0.1,),
        epsilons=(8.0,),
        pgd_steps=2,
    ),
    "cpu": SolversConfig(epochs=25, drops=(15,)),
    "cpu-cifar10": SolversConfig(
        data="cifar10",
        n_train=10_000,
        n_validation=1000,
        n_test=2000,
        epochs=12,
        batch=128,
        drops=(7,),
        pad=2,
        flip=True,
        epsilons=(1.0, 2.0, 4.0),
        n_attacked=1000,
    ),
    "paper": SolversConfig(
        data="folder",
        network="resnet18_large",
        n_validation=10_000,
        epochs=80,
        batch=256,
        lr=0.1,
        weight_decay=1e-4,
        drops=(30, 60),
        flip=True,
        devices=4,
        workers=8,
        epsilons=(1.0, 2.0),
    ),
}

FIXED = {name: SOLVERS[name] for name in ("ALF", "Euler", "RK2", "RK4", "ALF4")}
ADAPTIVE = {name: SOLVERS[name] for name in ("ALF", "Heun-Euler", "RK23", "Dopri5", "ALF4")}
AS_PUBLISHED = {"ALF": PUBLISHED_ALF, "ALF4": tm.ALF(order=4, refresh="never")}
ATTACKERS = {  # with the tolerances of the paper's appendix
    "ALF": (0.1, 0.01), "Heun-Euler": (0.1, 0.01), "RK23": (1e-2, 1e-3), "Dopri5": (1e-4, 1e-5),
}  # fmt: skip
H0 = 0.25  # first step of adaptive solves, as in the reference code


def fixed(name: str, h: float, as_reference: bool = False) -> Solve:
    if as_reference:
        return Solve(AS_PUBLISHED.get(name, FIXED[name]), tm.FixedStep(h), tm.Naive(), reference_end(h))
    return Solve(FIXED[name], tm.FixedStep(h), tm.Naive())


def adaptive(name: str, rtol: float, atol: float, as_reference: bool = False) -> Solve:
    if as_reference:
        return Solve(AS_PUBLISHED.get(name, ADAPTIVE[name]), UnguardedLastStep(rtol, atol, H0), tm.Naive())
    return Solve(ADAPTIVE[name], tm.AdaptiveStep(rtol, atol, H0), tm.Naive())


@dataclass(frozen=True)
class Tested:
    """The first n test images in batches, on a device; from memory, or decoded each time. None: all."""

    batches: Augmented | FolderBatches
    device: torch.device
    n: int | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        left = len(self)
        for x, y in self.batches.test():
            if left > 0:
                yield x[:left].to(self.device), y[:left].to(self.device)
            left -= len(y)

    def __len__(self) -> int:
        there = self.batches.n_test
        return there if self.n is None else min(there, self.n)


@torch.no_grad()
def logits(network: Network, solve: Solve, images: Tensor) -> Tensor:
    network.set_solve(solve)
    return network(images)


def right(network: Network, solve: Solve, images: Tensor, labels: Tensor) -> int:
    """Number of images that are recognised."""
    return int((logits(network, solve, images).argmax(1) == labels).sum())


def accuracy(network: Network, solve: Solve, tested: Tested) -> float:
    return sum(right(network, solve, x, y) for x, y in tested) / len(tested)


def attacked(
    network: Network, solve: Solve, images: Tensor, labels: Tensor, epsilon: float, steps: int = 1, size: float = 1.0
) -> Tensor:
    """FGSM: epsilon times the sign of the gradient of the loss, clamped to [0, 1]; with several steps: PGD.

    size: of a step, in parts of epsilon.
    """
    network.set_solve(solve)
    found = []
    for x, y in zip(images.split(128), labels.split(128), strict=True):
        moved = x
        for _ in range(steps):
            moved = moved.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(F.cross_entropy(network(moved), y), moved)
            moved = moved.detach() + size * epsilon * gradient.sign()
            moved = moved.clamp(x - epsilon, x + epsilon).clamp(0, 1)
        found.append(moved)
    return torch.cat(found)


def invariance(config: SolversConfig, network: Network, tested: Tested) -> dict[str, Callable[[], float]]:
    """Table 2: accuracy under other solvers, with the last step as ours is, and as the reference code has it."""
    work: dict[str, Callable[[], float]] = {}
    for version in ("corrected", "as reference"):
        as_reference = version == "as reference"
        for name in FIXED:
            for h in config.sizes:
                work[f"{version} / {name} / h {h:g}"] = partial(accuracy, network, fixed(name, h, as_reference), tested)
        for name in ADAPTIVE:
            for tolerance in config.tolerances:
                solve = adaptive(name, tolerance, tolerance / 10, as_reference)
                work[f"{version} / {name} / tolerance {tolerance:g}"] = partial(accuracy, network, solve, tested)
    return work


def attacking_solves(config: SolversConfig) -> dict[str, Solve]:
    """The solvers of Table 3; a ResNet has one."""
    if config.method == "resnet":
        return {"Euler": RESNET}
    return {name: adaptive(name, *tolerances) for name, tolerances in ATTACKERS.items()}


def attacks(config: SolversConfig, network: Network, tested: Tested) -> dict[str, Callable[[], Any]]:
    """Table 3: accuracy after an attack with one solver, under others. One piece for each attack."""

    def under_all(attacker: Solve, epsilon: float, steps: int = 1, size: float = 1.0) -> dict[str, float]:
        counts = dict.fromkeys(attacking_solves(config), 0)
        for x, y in tested:
            moved = attacked(network, attacker, x, y, epsilon / 255, steps, size)
            for name, inference in attacking_solves(config).items():
                counts[name] += right(network, inference, moved, y)
        return {name: count / len(tested) for name, count in counts.items()}

    work: dict[str, Callable[[], Any]] = {}
    for epsilon in config.epsilons:
        for name, solve in attacking_solves(config).items():
            work[f"FGSM {epsilon:g} / {name}"] = partial(under_all, solve, epsilon)
        first, solve = next(iter(attacking_solves(config).items()))
        work[f"PGD {epsilon:g} / {first}"] = partial(under_all, solve, epsilon, config.pgd_steps, 0.25)
    return work


N_MEASURED = 16  # pictures of a folder, with which memory is measured


def main(config: SolversConfig, run: Run) -> dict[str, Any]:
    require_known("method", config.method, NAMES)
    done, found = trained(config, run)
    if not is_first_process():
        return {}
    network: Any = done.module.network
    results = summary(config, run, done, found)
    network.eval()
    with evaluating(run, network) as device:
        return {**results, **under_other_solvers(config, run, network, found, device)}


def under_other_solvers(
    config: SolversConfig, run: Run, network: Network, found: Augmented | FolderBatches, device: torch.device
) -> dict[str, Any]:
    tested, few = Tested(found, device), Tested(found, device, config.n_attacked)

    def difference() -> float:
        apart, largest = 0.0, 0.0
        for x, _ in tested:
            one, other = (logits(network, fixed(name, 1.0), x) for name in ("ALF", "RK2"))
            apart, largest = max(apart, float((one - other).abs().max())), max(largest, float(one.abs().max()))
        return apart / largest

    work: dict[str, Callable[[], Any]] = {
        **invariance(config, network, tested),
        **attacks(config, network, few),
        "ALF - RK2 at h 1": difference,
        "clean": lambda: {name: accuracy(network, solve, few) for name, solve in attacking_solves(config).items()},
    }
    if config.method == "mali":
        n = config.batch if isinstance(found, Augmented) else N_MEASURED
        parts = list(itertools.islice(tested, -(-n // 128)))
        x, y = (torch.cat(tensors)[:n] for tensors in zip(*parts, strict=True))
        for h in config.sizes:
            work[f"peak bytes / h {h:g}"] = partial(peak, network, h, (x, y))
    return {"cells": run.pieces(work), "n_test": len(tested), "n_attacked": len(few)}


def peak(network: Network, h: float, batch: tuple[Tensor, Tensor]) -> dict[str, int]:
    """Peak bytes with and without refresh, which keeps a state; as published there is none."""
    found = {}
    for name, solver in (("as published", PUBLISHED_ALF), ("with refresh", tm.ALF())):
        network.set_solve(Solve(solver, tm.FixedStep(h), tm.MALI()))
        found[name], stats = one_step(network, batch)
        found["refreshes"] = sum(each.n_refreshes for each in stats)
    return found
