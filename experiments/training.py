"""Training that can be killed at any moment: Lightning for the loops, a checkpoint after each epoch.

Every epoch, also of an undisturbed run, is a `Trainer.fit` of its own that starts from the last checkpoint and from
seeds of its own. So nothing but the checkpoint is carried over, and a run that was killed ends with the same bits as
one that was not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.classification import MulticlassAccuracy

from experiments.batches import Batches, share
from experiments.record import Record, set_aside, write_in_one_piece
from experiments.runner import OutOfTime, Run, code_hash
from torchmali import ALF, FixedStep, Stats
from torchmali.measure import LiveBytes
from torchmali.nn.base import SolveModule

N_KEPT = 2  # checkpoints; one more than needed, should the last be damaged


ACCURACIES = ("train_accuracy", "validation_accuracy", "watched_accuracy", "test_accuracy")


class Noting(lightning.LightningModule):
    def note(self, name: str, value: Tensor, batch: Sequence[Any]) -> None:
        """The mean over an epoch."""
        self.log(name, value, on_step=False, on_epoch=True, batch_size=len(batch[0]), sync_dist=True)


class Classifier(Noting):
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
    """Evaluations and refreshes of the last step, means over an epoch, and the worst error of MALI's way back."""
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


def live_peak(step: Callable[[], None]) -> int:
    with LiveBytes() as live:
        step()
    return live.peak


def by_h(block: Any, sizes: Sequence[float], step: Callable[[], None]) -> dict[str, int]:
    """Peak bytes of live tensors in a step, with fixed steps in the block, and without refresh, which keeps states."""
    controller, solver, found = block.controller, block.solver, {}
    if isinstance(solver, ALF):
        block.solver = dataclasses.replace(solver, refresh="never")
    for h in sizes:
        block.controller = FixedStep(h)
        found[f"{h:g}"] = live_peak(step)
    block.controller, block.solver = controller, solver
    return found


def solves(module: nn.Module) -> list[Stats]:
    """The last of each ODE in a module."""
    return [m.last_stats for m in module.modules() if isinstance(m, SolveModule) and m.last_stats]


def evaluations(module: nn.Module) -> dict[str, int]:
    """Of f, in the last forward and backward pass, by all ODEs in a module (0 backward where autograd does it)."""
    counted = solves(module)
    return {
        "evaluations_forward": sum(stats.n_evals_forward for stats in counted),
        "evaluations_backward": sum(stats.n_evals_backward for stats in counted),
    }


@dataclass(frozen=True)
class Devices:
    """As in `lightning.Trainer`. On several, each process runs the same command (torchrun, strategy="ddp")."""

    devices: int | list[int] | str = 1
    accelerator: str = "cpu"
    strategy: str = "auto"
    precision: str = "32-true"


class Trained(NamedTuple):
    """best, last: what was found on the test set, by the weights of the best validation and by the last ones."""

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
    devices: Devices = Devices(),  # noqa: B008 (an immutable value)
) -> Trained:
    """Train for so many epochs, or for those that are missing; then test.

    All that the module logs by epoch becomes `run.metrics`. best: the metric by which an epoch is chosen for the test,
    the highest unless `lowest`. Raises OutOfTime after an epoch that ends beyond the run's deadline.
    """
    torch.manual_seed(run.seed("init"))
    module = make()
    keeper = _Keeper(run, epochs, best, lowest)
    keeper.resume(module)
    with _quiet():
        while len(keeper.history) < epochs:
            data = _Data(run, batches, len(keeper.history))
            try:
                _trainer(run, epochs, devices, keeper).fit(module, datamodule=data, ckpt_path=keeper.checkpoint)
            except SystemExit:  # Lightning's answer to Ctrl-C
                raise KeyboardInterrupt from None
            if keeper.late:
                _keep(run.folder / "weights.pt", module.state_dict())
                raise OutOfTime
        run.tell(1.0, "testing")
        last = _tested(run, module, batches, devices)
        weights = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
        found = last
        if keeper.best_epoch < epochs:
            module.load_state_dict(keeper.best_weights)
            found = _tested(run, module, batches, devices)
    module.load_state_dict(weights)
    _keep(run.folder / "weights.pt", weights)
    return Trained(module, keeper.best_epoch, found, last, seeds(run, epochs))


def seeds(run: Run, epochs: int) -> dict[str, Any]:
    """Of all uses of random numbers; a list has one for each epoch."""
    by_epoch = {use: [run.seed(use, epoch) for epoch in range(epochs)] for use in ("order", "subsample", "dropout")}
    return {"init": run.seed("init"), **by_epoch, "test": run.seed("test")}


def _trainer(run: Run, epochs: int, devices: Devices, *callbacks: lightning.Callback) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator=devices.accelerator, devices=devices.devices, strategy=devices.strategy, max_epochs=epochs,
        precision=devices.precision,  # pyright: ignore[reportArgumentType]
        callbacks=list(callbacks), default_root_dir=run.folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, use_distributed_sampler=False,
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
        return share(self.batches.train(self.epoch, order, subsample), rank, world, even=True)

    def val_dataloader(self) -> list[Iterable]:
        return [share(batches, *self._place(), even=False) for batches in self.batches.validation()]

    def test_dataloader(self) -> Iterable:
        return share(self.batches.test(), *self._place(), even=False)

    def _place(self) -> tuple[int, int]:
        assert self.trainer is not None
        return self.trainer.global_rank, self.trainer.world_size


class _Keeper(lightning.Callback):
    """Keeps, after each epoch, all that is needed to go on, and tells how far it is."""

    def __init__(self, run: Run, epochs: int, best: str, lowest: bool):
        self.code = code_hash(run.task.experiment.main)
        self.run, self.epochs, self.best, self.sign = run, epochs, best, -1 if lowest else 1
        self.history: list[dict[str, float]] = []
        self.seconds: list[float] = []
        self.cpu: list[float] = []  # seconds of the processor, for training alone: other work does not disturb them
        self.best_epoch, self.best_value, self.best_weights = 0, math.nan, {}
        self.spent_before, self.started = 0.0, time.perf_counter()
        self.checkpoint: Path | None = None
        self.late = False

    def resume(self, module: lightning.LightningModule) -> None:
        """From the last checkpoint that is what was once written, by the code that is to go on."""
        if rank_zero_only.rank == 0:
            for draft in self.run.folder.glob("*.draft"):  # killed while it wrote
                draft.unlink()
        for path in sorted(self.run.folder.glob("epoch-*.ckpt"), reverse=True):
            try:
                state = _checked(path, None if self.run.any_code else self.code)
            except UselessCheckpoint as error:
                self._set_aside(path, str(error))
                continue
            self.checkpoint = path
            module.load_state_dict(state["state_dict"])
            kept = state["experiment"]
            self.history, self.seconds, self.cpu = kept["history"], kept["seconds"], kept["cpu"]
            self.best_epoch, self.best_value, self.best_weights = kept["best"]
            self.spent_before = kept["spent"]
            break
        if self.checkpoint is None and self.run.before is not None:
            self._resume_from(self.run.before, module)
        self._fill()

    def _resume_from(self, record: Record, module: lightning.LightningModule) -> None:
        """Without a checkpoint, as on another machine: from the weights beside the record of a run that is not over."""
        n = max(map(len, record.metrics.values()), default=0)
        if not self.run.any_code and record.made.get("code") != self.code:
            self.run.notes.append(f"Weights of {n} epochs are by code that has changed since: see --any-code.")
            return
        module.load_state_dict(torch.load(self.run.task.weights, map_location="cpu", weights_only=True))
        self.history = [{name: row[i] for name, row in record.metrics.items() if row[i] is not None} for i in range(n)]
        self.seconds, self.cpu = record.seconds["epochs"], record.seconds["training_cpu"]
        self.spent_before = record.seconds["total"]
        self._compare(module)  # no other epoch's weights are there
        self.run.notes.append(f"Went on from the weights of {n} epochs; the optimizer's averages began anew.")

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """From weights alone: epochs and schedules are where they were."""
        n = 0 if self.checkpoint else len(self.history)
        if n == 0:
            return
        progress: Any = trainer.fit_loop.epoch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = n
        trainer.fit_loop._resuming_from_checkpoint = True  # or a later epoch would fetch its first batch once more
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
            for config in trainer.lr_scheduler_configs:
                scheduler: Any = config.scheduler
                for row in self.history:
                    for _ in range(1 if config.interval == "epoch" else int(trainer.num_training_batches)):
                        scheduler.step(*([row[str(config.monitor)]] if config.reduce_on_plateau else []))

    @rank_zero_only
    def _set_aside(self, path: Path, what: str) -> None:
        aside = set_aside(path)
        self.run.log(event="set aside", file=path.name, what=what)
        self.run.notes.append(f"{what} Set aside as {aside.name}.")

    def _fill(self) -> None:
        names = dict.fromkeys(name for row in self.history for name in row)
        self.run.metrics.update({name: [row.get(name) for row in self.history] for name in names})
        self.run.seconds.update(before=self.spent_before, epochs=list(self.seconds), training_cpu=list(self.cpu))

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._epoch_started, self._cpu_started, self._validated = time.perf_counter(), time.process_time(), 0.0
        if trainer.is_global_zero:
            self.run.log(event="epoch", epoch=trainer.current_epoch)
            self._tell(trainer.current_epoch, 0.0)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero:
            self._tell(trainer.current_epoch, (batch_idx + 1) / trainer.num_training_batches)

    def _tell(self, epoch: int, part: float) -> None:
        text = f"epoch {epoch + 1}/{self.epochs}"
        for name, value in (self.history[-1] if self.history else {}).items():
            if name in ("train_loss", self.best):
                text += f" {name.removeprefix('train_').replace('_', ' ')} {value:.4g}"
        self.run.tell(min(1.0, (epoch + part) / self.epochs), text)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._validation_started = time.process_time()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._validated += time.process_time() - self._validation_started

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        trainer.should_stop = True  # the next epoch is a fit of its own

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Not at the end of the epoch: schedules by epoch make their step after that."""
        row = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self.best not in row:
            raise KeyError(f"The module logs no {self.best!r}; it logs {', '.join(row)}.")
        self.history.append(row)
        self.seconds.append(time.perf_counter() - self._epoch_started)
        self.cpu.append(time.process_time() - self._cpu_started - self._validated)
        self._compare(pl_module)
        self._write(trainer)
        self._fill()
        late = len(self.history) < self.epochs and time.monotonic() > self.run.deadline
        self.late = trainer.strategy.broadcast(late)  # all processes stop, or none

    def _compare(self, module: lightning.LightningModule) -> None:
        """The last epoch with the best before it."""
        value = self.history[-1][self.best]
        if math.isnan(self.best_value) or self.sign * value > self.sign * self.best_value:
            weights = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
            self.best_epoch, self.best_value, self.best_weights = len(self.history), value, weights

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["experiment"] = {
            "code": self.code,
            "history": self.history,
            "seconds": self.seconds,
            "cpu": self.cpu,
            "spent": self.spent_before + time.perf_counter() - self.started,
            "best": (self.best_epoch, self.best_value, self.best_weights),
        }

    def _write(self, trainer: lightning.Trainer) -> None:
        path = self.run.folder / f"epoch-{len(self.history):05d}.ckpt"
        draft = path.with_suffix(".lightning.draft")
        trainer.save_checkpoint(draft)  # by all processes
        if trainer.is_global_zero:
            content = draft.read_bytes()
            # Its checksum first: a checkpoint that is there can be checked.
            write_in_one_piece(_checksum_of(path), hashlib.sha256(content).hexdigest().encode())
            write_in_one_piece(path, content)
            draft.unlink()
            for old in sorted(self.run.folder.glob("epoch-*.ckpt"))[:-N_KEPT]:
                old.unlink()
                _checksum_of(old).unlink(missing_ok=True)
        trainer.strategy.barrier()
        self.checkpoint = path


class UselessCheckpoint(Exception):
    """A file that is not what was once written to it, or of code that has changed since."""


def _checksum_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _checked(path: Path, code: str | None) -> dict[str, Any]:
    checksum = _checksum_of(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UselessCheckpoint(f"{path.name} was set aside by another process.") from None
    if not checksum.exists():
        raise UselessCheckpoint(f"{path.name} has no checksum beside it.")
    if hashlib.sha256(content).hexdigest() != checksum.read_text(errors="replace").strip():
        raise UselessCheckpoint(f"{path.name} was changed since it was written: its checksum does not fit.")
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if code is not None and state["experiment"]["code"] != code:
        raise UselessCheckpoint(f"{path.name} was made by code that has changed since.")
    return state


@rank_zero_only
def _keep(path: Path, weights: dict[str, Tensor]) -> None:
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    write_in_one_piece(path, buffer.getvalue())


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Lightning's messages: the run has a bar and a record of its own."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            # torch 2.9 and later say so of each loader; what Lightning does works all the same.
            message = r"`isinstance\(treespec, LeafSpec\)` is deprecated"
            warnings.filterwarnings("ignore", message, FutureWarning, r"lightning\.pytorch\.utilities\._pytree")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
