"""Densities in the plane that a continuous flow learns: pictures of what it does."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torchmali as tm
from experiments.engine.batches import InMemory
from experiments.engine.task import Run, TrainedConfig, require_known
from experiments.engine.trainer import LoggingModule, log_solves, train
from experiments.flows.evaluation import ACCURATE, solved_by
from experiments.flows.images import packed
from experiments.models.ffjord import Field
from torchmali.nn import CNF, ExactTrace

LIMIT = 4.0  # of what is shown, in both directions


@dataclass(frozen=True)
class DensitiesConfig(TrainedConfig):
    """Settings. n: points to train with, drawn once; a tenth as many for validation, and for the test."""

    data: str = "checkerboard"  # circles, pinwheel
    widths: tuple[int, ...] = (64, 64, 64)
    n: int = 20_000
    batch: int = 500
    epochs: int = 32
    lr: float = 5e-3
    rtol: float = 1e-2
    atol: float = 1e-3


PRESETS = {"smoke": DensitiesConfig(widths=(8,), n=200, batch=100, epochs=1), "cpu": DensitiesConfig()}


# Data


def circles(n: int, generator: torch.Generator) -> Tensor:
    radius = torch.where(torch.rand(n, generator=generator) < 0.5, 1.5, 3.0)
    angle = 2 * math.pi * torch.rand(n, generator=generator)
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
    return x + 0.12 * torch.randn(n, 2, generator=generator)


def pinwheel(n: int, generator: torch.Generator) -> Tensor:
    """Draw from five arms, which are turned more the farther out they are."""
    arm = torch.randint(5, (n,), generator=generator)
    noise = torch.randn(n, 2, generator=generator) * torch.tensor([0.3, 0.1])
    along, across = noise[:, 0] + 1, noise[:, 1]
    angle = 2 * math.pi / 5 * arm + 0.25 * along.exp()
    cos, sin = angle.cos(), angle.sin()
    return 2 * torch.stack([along * cos - across * sin, along * sin + across * cos], 1)


def checkerboard(n: int, generator: torch.Generator) -> Tensor:
    """Draw from eight of sixteen squares of side 2."""
    x, y = (4 * torch.rand(n, generator=generator) for _ in range(2))
    column = x.floor()
    row = 2 * torch.randint(2, (n,), generator=generator) + column % 2
    return 2 * torch.stack([x, row + y % 1], 1) - 4


DATA: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "circles": circles, "pinwheel": pinwheel, "checkerboard": checkerboard,
}  # fmt: skip
LOWEST = {"checkerboard": math.log(32)}  # the entropy, where there is a formula


def gaussian_nats(train: Tensor, test: Tensor) -> float:
    """Minus the log-likelihood of a normal distribution: a baseline."""
    normal = torch.distributions.MultivariateNormal(train.mean(0), train.T.cov())
    return -float(normal.log_prob(test).mean())


# Training


class PlaneFlow(LoggingModule):
    """A flow of points, trained by maximum likelihood."""

    def __init__(self, network: CNF, lr: float, epochs: int):
        super().__init__()
        self.network, self.lr, self.epochs = network, lr, epochs

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        nats = -self.network.log_prob(batch[0]).mean()
        self.note("train_nats", nats, batch)
        return nats

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        log_solves(self, self.network)

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.note("validation_nats", self.nats(batch[0]), batch)

    def test_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.note("test_nats", self.nats(batch[0]), batch)

    def nats(self, x: Tensor) -> Tensor:
        with solved_by([self.network], ACCURATE):
            return -self.network.log_prob(x).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def flow(config: DensitiesConfig) -> CNF:
    """A flow with MALI, and ALF of order 4."""
    return CNF(
        Field(nn.Linear, 2, config.widths),
        trace=ExactTrace(),
        solver=tm.ALF(order=4),
        controller=tm.AdaptiveStep(config.rtol, config.atol),
    )


def main(config: DensitiesConfig, run: Run) -> dict[str, Any]:
    require_known("data", config.data, DATA)
    sizes = (config.n, max(1, config.n // 10), max(1, config.n // 10))
    sets = [DATA[config.data](n, run.generator("data", i)) for i, n in enumerate(sizes)]
    batches = InMemory((sets[0],), (sets[1],), (sets[2],), config.batch, batch_in_tests=1000, devices=config.devices)
    make = lambda: PlaneFlow(flow(config), config.lr, config.epochs)  # noqa: E731
    done = train(run, make, batches, config.epochs, best="validation_nats", lowest=True)
    network: Any = done.module.network
    return {
        "test_nats": done.last["test_nats"],  # of the weights that are shown
        "gaussian_nats": gaussian_nats(sets[0], sets[2]),
        "lowest_nats": LOWEST.get(config.data),
        "parameters": sum(p.numel() for p in done.module.parameters()),
        "real": quantised(sets[2][:N_SHOWN]),
        "density": density(network),
        "on_the_way": moving_points(network, run.seed("samples")),
        "seeds": done.seeds,
    }


N_SHOWN, N_TIMES, N_CELLS = 1000, 25, 80


def quantised(x: Tensor) -> str:
    """Encode points with two bytes per coordinate."""
    steps = ((x / (2 * LIMIT) + 0.5).clamp(0, 1) * 65535).round().to(torch.int32)
    return base64.b64encode(steps.cpu().numpy().astype("<u2").tobytes()).decode()


@torch.no_grad()
def density(network: CNF) -> dict[str, Any]:
    """Density on a grid of cells, from 0 to the highest as 0 to 255, and the share that lies in the picture."""
    side = (torch.arange(N_CELLS) + 0.5) / N_CELLS * 2 * LIMIT - LIMIT
    points = torch.cartesian_prod(side, side).flip(1)  # rows from below
    with solved_by([network], ACCURATE):
        p = torch.cat([network.log_prob(part) for part in points.split(1600)]).exp()
    cell = (2 * LIMIT / N_CELLS) ** 2
    return {"cells": packed((p / p.max() * 255).round()), "highest": float(p.max()), "inside": float(p.sum() * cell)}


@torch.no_grad()
def moving_points(network: CNF, seed: int) -> str:
    """Positions of points at several times, from normal noise to samples."""
    z = torch.randn(N_SHOWN // 2, 2, generator=torch.Generator().manual_seed(seed))
    times = torch.linspace(1, 0, N_TIMES)
    found = tm.solve(network.func, z, times, controller=tm.AdaptiveStep(1e-4, 1e-4)).y
    return quantised(found.flatten(0, 1))
