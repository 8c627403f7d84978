"""Training of flows: bits per dimension of images, by the noise of their pixels and at the middle of it; of points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchmali as tm
from experiments.engine.trainer import Noting, log_solves
from experiments.models.ffjord import FFJORD, bits_per_dim, log_prob
from torchmali.nn import CNF, ExactTrace, Hutchinson


class Solved(NamedTuple):
    solver: tm.Solver
    controller: tm.StepController


EVALUATION = Solved(tm.Dopri5(), tm.AdaptiveStep(1e-5, 1e-5))  # as published
ACCURATE = Solved(tm.Dopri5(), tm.AdaptiveStep(1e-4, 1e-5))  # in the plane


class Density(Noting):
    """Batches: (pixels,), of so many levels. weight: of both regularisers. Adam; its lr grows over the first steps."""

    def __init__(self, network: FFJORD, levels: int, weight: float, lr: float, warmup: int):
        super().__init__()
        self.network, self.levels, self.weight, self.lr, self.warmup = network, levels, weight, lr, warmup

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss, bits = self.loss(batch[0], torch.rand(batch[0].shape, device=batch[0].device))
        self.note("train_loss", loss, batch)
        self.note("train_bits", bits, batch)
        return loss

    def loss(self, pixels: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mapped = self.network((pixels + noise) / self.levels)
        bits = bits_per_dim(log_prob(mapped), mapped.z.shape[1], self.levels).mean()
        return bits + self.weight * (mapped.kinetic + mapped.jacobian).mean(), bits

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        log_solves(self, self.network)

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.note("validation_bits", self.bits(batch[0], batch_idx), batch)

    def test_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.note("test_bits", self.bits(batch[0], batch_idx), batch)
        self.note("test_bits_midpoint", self.bits(batch[0], batch_idx, midpoint=True), batch)

    def bits(self, pixels: Tensor, seed: int, midpoint: bool = False, how: Solved = EVALUATION) -> Tensor:
        """The noise of pixels and of the trace is the same each time."""
        gpus = [pixels.device] if pixels.device.type == "cuda" else []
        with torch.random.fork_rng(gpus), resolved(self.network.flows(), how):
            torch.manual_seed(seed)
            noise = torch.rand(pixels.shape)
            x = (pixels + (0.5 if midpoint else noise.to(pixels.device))) / self.levels
            mapped = self.network(x)
        return bits_per_dim(log_prob(mapped), mapped.z.shape[1], self.levels).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@contextmanager
def resolved(flows: Sequence[CNF], how: Solved) -> Iterator[None]:
    """For a while, with another solver, without regularisers, and with noise of the trace that varies least."""
    fields = ("solver", "controller", "gradient", "kinetic", "jacobian", "trace")
    before = [{name: getattr(cnf, name) for name in fields} for cnf in flows]
    for cnf in flows:
        cnf.solver, cnf.controller, cnf.gradient = how.solver, how.controller, tm.Naive()
        cnf.kinetic = cnf.jacobian = False
        cnf.trace = cnf.trace if isinstance(cnf.trace, ExactTrace) else Hutchinson()
    try:
        yield
    finally:
        for cnf, values in zip(flows, before, strict=True):
            for name, value in values.items():
                setattr(cnf, name, value)


class Plane(Noting):
    """A flow of points, by maximum likelihood."""

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
        with resolved([self.network], ACCURATE):
            return -self.network.log_prob(x).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)
        return {"optimizer": optimizer, "lr_scheduler": schedule}
