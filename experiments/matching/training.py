"""Flow matching: the velocity that carries noise to images, learned without solving an ODE."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchmali as tm
from experiments.data import cifar, data_dir, digits, mnist
from experiments.data.source import Images
from experiments.engine.batches import Batch, InMemory
from experiments.engine.task import BadOption, Config, Run
from experiments.engine.trainer import LoggingModule, train
from experiments.flows.images import packed
from experiments.models.unet import UNet

N_CLASSES = 10


@dataclass(frozen=True)
class MatchingConfig(Config):
    """Settings. n_per_epoch: images drawn for an epoch. no_label: share of images that are learned without theirs.

    decay: of the moving average of the weights, by which samples are drawn. guidance: of the samples that are kept.
    """

    data: str = "mnist"  # cifar10, digits
    widths: tuple[int, ...] = (48, 80)
    n_per_epoch: int = 10_000
    n_test: int = 1000
    epochs: int = 24
    batch: int = 64
    lr: float = 1e-3
    decay: float = 0.999
    no_label: float = 0.1
    guidance: float = 2.0


PRESETS = {
    "smoke": MatchingConfig(data="digits", widths=(8, 8), n_per_epoch=64, n_test=32, epochs=1, batch=32),
    "cpu": MatchingConfig(),
    "cpu-cifar10": MatchingConfig(data="cifar10", widths=(64, 96), epochs=60),
}


# Data


def load(config: MatchingConfig, given: Path | None) -> tuple[Batch, Batch]:
    """Images in [-1, 1] with labels, for training and test."""
    place = data_dir(given)
    if config.data == "digits":
        train_set, _, test_set = digits.load(0, 270, 270)
        return _scaled(train_set, 16, 270), _scaled(test_set, 16, config.n_test)
    loaders: dict[str, Any] = {"mnist": mnist.load, "cifar10": cifar.load}
    if config.data not in loaders:
        raise BadOption(f"There is no data {config.data!r}; there are mnist, cifar10, digits.")
    load_split = loaders[config.data]
    return _scaled(load_split(place, "train"), 255), _scaled(load_split(place, "test"), 255, config.n_test)


def _scaled(data: Images, highest: int, n: int | None = None) -> Batch:
    images = data.images[:n].float() / highest * 2 - 1
    return (images[:, None] if images.ndim == 3 else images), data.labels[:n]


def as_pixels(images: Tensor) -> Tensor:
    return ((images + 1) / 2 * 255).round().clamp(0, 255).to(torch.uint8)


# Training


class FlowMatching(LoggingModule):
    """Regress v(t, x) on x1 - x0 along the straight line from noise x0 to an image x1: conditional flow matching."""

    def __init__(self, network: UNet, config: MatchingConfig):
        super().__init__()
        self.network, self.config = network, config
        self.average = copy.deepcopy(network).requires_grad_(False)

    def loss(self, network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        noise, t = torch.randn_like(images), torch.rand(len(images), device=images.device)
        x = torch.lerp(noise, images, t[:, None, None, None])
        return (network(t, x, labels) - (images - noise)).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        hidden = torch.rand(len(labels), device=labels.device) < self.config.no_label
        loss = self.loss(self.network, images, labels.masked_fill(hidden, N_CLASSES))
        self.note("train_loss", loss, batch)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        decay = min(self.config.decay, (1 + self.trainer.global_step) / (10 + self.trainer.global_step))
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.network.parameters(), strict=True):
                mean.lerp_(now, 1 - decay)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.note("validation_loss", self._test_loss(batch, batch_idx), batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.note("test_loss", self._test_loss(batch, batch_idx), batch)

    def _test_loss(self, batch: tuple[Tensor, Tensor], seed: int) -> Tensor:
        """The loss of the averaged weights, with the same noise and times each time."""
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return self.loss(self.average, *batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.network.parameters(), self.config.lr)
        n_steps = self.config.epochs * math.ceil(self.config.n_per_epoch / self.config.batch)
        factor = partial(_warmed_cosine, n_steps=n_steps)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _warmed_cosine(step: int, n_steps: int, n_warmup: int = 100) -> float:
    return min(1.0, (step + 1) / n_warmup) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, step / n_steps)))


def network(config: MatchingConfig, channels: int) -> UNet:
    return UNet(channels, config.widths, N_CLASSES)


def main(config: MatchingConfig, run: Run) -> dict[str, Any]:
    train_set, test_set = load(config, run.data_dir)
    n = min(config.n_per_epoch, len(train_set[0]))
    shape = tuple(train_set[0].shape[1:])
    batches = InMemory(train_set, test_set, test_set, config.batch, n_per_epoch=n)
    done = train(
        run,
        lambda: FlowMatching(network(config, shape[0]), config),
        batches,
        config.epochs,
        best="validation_loss",
        lowest=True,
    )
    module: Any = done.module
    velocity = module.average.eval()
    return {
        "test_loss": done.last["test_loss"],
        "parameters": sum(p.numel() for p in velocity.parameters()),
        "shape": shape,
        "samples": packed(as_pixels(samples(velocity, shape, N_SHOWN, config.guidance, run.seed("samples")))),
        "samples_unguided": packed(as_pixels(samples(velocity, shape, N_SHOWN, 1.0, run.seed("samples")))),
        "real": packed(as_pixels(test_set[0][:N_SHOWN])),
        "seeds": done.seeds,
    }


N_SHOWN = 50


@torch.no_grad()
def samples(velocity: nn.Module, shape: Sequence[int], n: int, guidance: float, seed: int) -> Tensor:
    """Images with the labels 0 to 9 in turn."""
    noise = torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))
    labels = torch.arange(n) % N_CLASSES

    def guided(t: Tensor, x: Tensor) -> Tensor:
        without = velocity(t, x, torch.full_like(labels, N_CLASSES))
        return torch.lerp(without, velocity(t, x, labels), guidance)

    return tm.solve(guided, noise, (0.0, 1.0), solver=tm.ALF(order=4), controller=tm.FixedStep(1 / 20)).y[-1]
