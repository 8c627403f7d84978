"""Training of networks that fill the gaps in series."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experiments.engine.trainer import Noting, log_solves
from experiments.models.latent_ode import LatentODE, Loss, errors, log_likelihood


class Filling(Noting):
    """The published loss and optimizer: Adamax, whose lr falls by 0.1 % after each step, to a tenth."""

    def __init__(self, network: nn.Module, times: Tensor, lr: float, kl_wait: int):
        super().__init__()
        self.network, self.times, self.lr, self.kl_wait = network, times, lr, kl_wait

    def loss(self, batch: tuple[Tensor, ...], kl_weight: float) -> Loss:
        x, values, mask = batch
        if isinstance(self.network, LatentODE):
            return self.network.loss(x, values, mask, self.times, kl_weight)
        found = self.network(values, mask, self.times)
        return Loss(-log_likelihood(found, x).mean(), *errors(found, x))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        over = self.current_epoch - self.kl_wait
        loss = self.loss(batch, 0.0 if over < 0 else 1 - 0.99**over)
        self.note("train_loss", loss.total, batch)
        self.note("train_mse", loss.mse, batch)
        return loss.total

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(self.network, LatentODE):
            log_solves(self, self.network.generate)

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.note("validation_mse", self.loss(batch, 0.0).mse, batch)

    def test_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        loss = self.loss(batch, 0.0)
        self.note("test_mse", loss.mse, batch)
        self.note("test_mse_later", loss.later, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adamax(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 0.999**step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
