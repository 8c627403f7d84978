"""Training that can be killed at any moment: Lightning for the loops, a checkpoint after each epoch.

Every epoch, also of an undisturbed run, is a `Trainer.fit` of its own that starts from the last checkpoint and from
seeds of its own. So nothing but the checkpoint is carried over, and a run that was killed ends with the same bits as
one that was not.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassAccuracy

from experiments.engine.batches import Batches, Pinned, share
from experiments.engine.checkpoint import CheckpointKeeper, FirstSteps, save_weights
from experiments.engine.devices import Devices, devices_of
from experiments.engine.measure import evaluations, solves
from experiments.engine.replay import Replayed
from experiments.engine.task import OutOfTime, Run

ACCURACIES = ("train_accuracy", "validation_accuracy", "watched_accuracy", "test_accuracy")


class LoggingModule(lightning.LightningModule):
    """Base of the modules that are trained."""

    def note(self, name: str, value: Tensor, batch: Sequence[Any]) -> None:
        """Log the mean of a value over an epoch."""
        self.log(name, value, on_step=False, on_epoch=True, batch_size=len(batch[0]), sync_dist=True)


class Classifier(LoggingModule):
    """A network that is trained by cross-entropy; counts the evaluations of f by all that it solves."""

    def __init__(
        self,
        network: nn.Module,
        n_classes: int,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        schedule: Callable[[Optimizer], LRScheduler] | None = None,
        schedule_each: str = "epoch",  # or "step"
    ):
        super().__init__()
        self.network, self.optimizer, self.schedule, self.schedule_each = network, optimizer, schedule, schedule_each
        self.accuracies = nn.ModuleDict({name: MulticlassAccuracy(n_classes, average="micro") for name in ACCURACIES})

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self.network(images)
        loss = F.cross_entropy(logits, labels)
        self.note("train_loss", loss, batch)
        self._count("train_accuracy", logits.detach(), labels)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        log_solves(self, self.network)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        images, labels = batch
        self._count(("validation_accuracy", "watched_accuracy")[dataloader_idx], self.network(images), labels)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        self._count("test_accuracy", self.network(images), labels)

    def _count(self, name: str, logits: Tensor, labels: Tensor) -> None:
        metric = self.accuracies[name]
        metric.update(logits, labels)  # pyright: ignore[reportCallIssue]
        how: Any = {"on_step": False, "on_epoch": True, "add_dataloader_idx": False}
        self.log(name, metric, batch_size=len(labels), **how)  # pyright: ignore[reportArgumentType]

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        if self.schedule is None:
            return optimizer
        schedule = {"scheduler": self.schedule(optimizer), "interval": self.schedule_each, "monitor": "train_loss"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def log_solves(module: lightning.LightningModule, network: nn.Module) -> None:
    """Log evaluations and refreshes of the last step, means over an epoch, and the worst reconstruction error."""
    solved = solves(network)
    if not solved:
        return
    counts = {
        **evaluations(network),
        "refreshes": sum(stats.n_refreshes for stats in solved),
        "reruns": sum(stats.n_reruns for stats in solved),
    }
    for name, count in counts.items():
        module.log(name, float(count), on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
    errors = [stats.reconstruction_error for stats in solved if stats.reconstruction_error is not None]
    if errors:
        how: Any = {"on_step": False, "on_epoch": True, "reduce_fx": "max", "batch_size": 1, "sync_dist": True}
        module.log("reconstruction_error", max(errors), **how)


class Trained(NamedTuple):
    """A trained module, and its results on the test set: by the weights of the best validation, by the last ones."""

    module: lightning.LightningModule  # with the last weights
    best_epoch: int  # from 1
    best: dict[str, float]
    last: dict[str, float]
    seeds: dict[str, Any]


def train(
    run: Run,
    make: Callable[[], lightning.LightningModule],
    batches: Batches,
    epochs: int,
    *,
    best: str = "validation_accuracy",
    lowest: bool = False,
) -> Trained:
    """Train for so many epochs, or for those that are missing; then test.

    All that the module logs by epoch becomes `run.metrics`. best: the metric by which an epoch is chosen for the test,
    the highest unless `lowest`. Raises OutOfTime after an epoch that ends beyond the run's deadline.
    """
    devices = devices_of(run)
    again = functools.cache(functools.partial(replayed, run, make, batches, devices))
    if run.replaying:
        raise Replayed(again(run.replaying.steps))
    keeper = CheckpointKeeper(run, epochs, best, lowest, again)
    torch.manual_seed(run.seed("init"))
    module = make()
    keeper.resume(module)
    with _quiet():
        while len(keeper.history) < epochs:
            data = _Data(run, batches, len(keeper.history))
            try:
                _trainer(run, epochs, devices, keeper).fit(module, datamodule=data, ckpt_path=keeper.checkpoint)
            except SystemExit:  # Lightning's answer to Ctrl-C
                raise KeyboardInterrupt from None
            if keeper.late:
                save_weights(run.folder / "weights.pt", module.state_dict())
                raise OutOfTime
        run.tell(1.0, "testing")
        last = _tested(run, module, batches, devices)
        weights = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
        found = last
        if keeper.best_epoch < epochs:
            module.load_state_dict(keeper.best_weights)
            found = _tested(run, module, batches, devices)
    module.load_state_dict(weights)
    save_weights(run.folder / "weights.pt", weights)
    return Trained(module, keeper.best_epoch, found, last, seeds(run, epochs))


@contextmanager
def evaluating(run: Run, *modules: nn.Module) -> Iterator[torch.device]:
    """Context in which trained modules are on the run's device, where Lightning has taken them away from.

    Beside a GPU what is left to the processor has all its threads.
    """
    device, threads = devices_of(run).device, torch.get_num_threads()
    if device.type != "cpu":
        torch.set_num_threads(os.cpu_count() or 1)
    try:
        for module in modules:
            module.to(device)
        yield device
    finally:
        torch.set_num_threads(threads)
        for module in modules:
            module.cpu()


def replayed(
    run: Run, make: Callable[[], lightning.LightningModule], batches: Batches, devices: Devices, steps: int | None
) -> dict[str, Any]:
    """Train for the first steps of a run, or for its first epoch where there is no number; nothing is kept.

    Returns loss and evaluations of each of the first steps and, of a whole epoch, the means that a run logs.
    """
    torch.manual_seed(run.seed("init"))
    module, first = make(), FirstSteps()
    with _quiet():
        trainer = _trainer(run, 1, devices, first, limit_train_batches=steps, limit_val_batches=0)
        trainer.fit(module, datamodule=_Data(run, batches, 0))
    means = {name: float(value) for name, value in trainer.callback_metrics.items()}
    steps_of_rank_0 = trainer.strategy.broadcast(first.steps)
    return {"steps": steps_of_rank_0, **({"epoch": means} if steps is None else {})}


def seeds(run: Run, epochs: int) -> dict[str, Any]:
    """Seeds of all uses of random numbers; a list has one for each epoch."""
    by_epoch = {use: [run.seed(use, epoch) for epoch in range(epochs)] for use in ("order", "subsample", "dropout")}
    return {"init": run.seed("init"), **by_epoch, "test": run.seed("test")}


def _trainer(run: Run, epochs: int, devices: Devices, *callbacks: lightning.Callback, **more: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator=devices.accelerator, devices=devices.devices, max_epochs=epochs,
        strategy=copy.deepcopy(devices.strategy),  # an object would remember this trainer
        precision=devices.precision,  # pyright: ignore[reportArgumentType]
        callbacks=list(callbacks), default_root_dir=run.folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, use_distributed_sampler=False,
        **more,
    )  # fmt: skip


def _tested(run: Run, module: lightning.LightningModule, batches: Batches, devices: Devices) -> dict[str, float]:
    torch.manual_seed(run.seed("test"))
    (found,) = _trainer(run, 0, devices).test(module, datamodule=_Data(run, batches, 0), verbose=False)
    return {name: float(value) for name, value in found.items()}


class _Data(lightning.LightningDataModule):
    """The batches of one epoch; each process has its share."""

    def __init__(self, run: Run, batches: Batches, epoch: int):
        super().__init__()
        self.run, self.batches, self.epoch = run, batches, epoch

    def train_dataloader(self) -> Iterable:
        order, subsample = self.run.generator("order", self.epoch), self.run.generator("subsample", self.epoch)
        rank, world = self._place()
        # Here, not when the epoch starts: by then Lightning has fetched its first batch.
        torch.manual_seed(self.run.seed("dropout", self.epoch, *([rank] if rank else [])))
        return self._pinned(share(self.batches.train(self.epoch, order, subsample), rank, world, even=True))

    def val_dataloader(self) -> list[Iterable]:
        return [self._pinned(share(part, *self._place(), even=False)) for part in self.batches.validation()]

    def test_dataloader(self) -> Iterable:
        return self._pinned(share(self.batches.test(), *self._place(), even=False))

    def _pinned(self, batches: Iterable) -> Iterable:
        assert self.trainer is not None
        return Pinned(batches) if self.trainer.strategy.root_device.type == "cuda" else batches

    def _place(self) -> tuple[int, int]:
        assert self.trainer is not None
        return self.trainer.global_rank, self.trainer.world_size


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's messages: the run has a bar and a record of its own."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            # torch 2.9 and later warn so for each loader; Lightning works all the same.
            message = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
            warnings.filterwarnings("ignore", message, FutureWarning, r"lightning\.pytorch\.utilities\._pytree")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
