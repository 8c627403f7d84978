"""Checkpoints of a training run: written after each epoch with a checksum, and read again by a run that resumes."""

from __future__ import annotations

import hashlib
import io
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from experiments.engine.devices import synchronise
from experiments.engine.measure import evaluations
from experiments.engine.record import Record, by_whom, set_aside, write_in_one_piece
from experiments.engine.replay import DIFFERS, SAME, STEPS, UNKNOWN, compare, compare_epochs
from experiments.engine.task import Run

N_KEPT = 2  # checkpoints; one more than needed, should the last be damaged


class FirstSteps(lightning.Callback):
    """Callback that notes the first steps of training: their loss, and their evaluations of f."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if len(self.steps) < STEPS:
            self.steps.append({"loss": float(outputs["loss"]), **evaluations(pl_module)})


class CheckpointKeeper(FirstSteps):
    """Callback that keeps, after each epoch, all that is needed to go on, and reports progress.

    again: replays so many steps of the run with this code, or its first epoch (None).
    """

    def __init__(self, run: Run, epochs: int, best: str, lowest: bool, again: Callable[[int | None], dict[str, Any]]):
        super().__init__()
        self.me, self.again = by_whom(run.task.experiment.main), again
        self.parts: list[dict[str, Any]] = []  # who trained which epochs
        self.run, self.epochs, self.best, self.sign = run, epochs, best, -1 if lowest else 1
        self.history: list[dict[str, float]] = []
        self.seconds: list[float] = []
        self.wall: list[float | None] = []  # seconds of training alone by the clock, when the device has done its work
        self.cpu: list[float] = []  # seconds of the processor, for training alone: other work does not disturb them
        self.best_epoch, self.best_value, self.best_weights = 0, math.nan, {}
        self.spent_before, self.started = 0.0, time.perf_counter()
        self.checkpoint: Path | None = None
        self.late = False

    def resume(self, module: lightning.LightningModule) -> None:
        """Resume from the last checkpoint that is undamaged and whose first steps this code makes, too."""
        if rank_zero_only.rank == 0:
            for draft in self.run.folder.glob("*.draft"):  # of a process that was killed while it wrote
                draft.unlink()
        for path in sorted(self.run.folder.glob("epoch-*.ckpt"), reverse=True):
            try:
                state = _checked(path)
                kept = state["experiment"]
                said = self._compare_code(kept["code"], kept.get("replay", []), kept["history"], path.name)
            except UselessCheckpoint as error:
                self._set_aside(path, str(error))
                continue
            self.checkpoint = path
            module.load_state_dict(state["state_dict"])
            self._take_over(kept.get("replay", []), kept.get("parts", []), len(kept["history"]), kept["code"], said)
            self.history, self.seconds, self.cpu = kept["history"], kept["seconds"], kept["cpu"]
            self.wall = kept.get("wall") or [None] * len(self.history)  # nobody took it before
            self.best_epoch, self.best_value, self.best_weights = kept["best"]
            self.spent_before = kept["spent"]
            break
        if self.checkpoint is None and self.run.before is not None:
            self._resume_from(self.run.before, module)
        self._fill()

    def _resume_from(self, record: Record, module: lightning.LightningModule) -> None:
        """Resume without a checkpoint, as on another machine: from weights beside the record of an unfinished run."""
        n, code = max(map(len, record.metrics.values()), default=0), record.made.get("code", "")
        history = [{name: row[i] for name, row in record.metrics.items() if row[i] is not None} for i in range(n)]
        steps = record.replay.get("steps", [])
        try:
            said = self._compare_code(code, steps, history, f"The record of {n} epochs")
        except UselessCheckpoint as error:
            self.run.notes.append(f"{error} Its weights are not used: see --any-code.")
            return
        parts = record.made.get("parts") or [
            {name: record.made.get(name) for name in ("code", "commit", "cpu")} | {"first": 1, "last": n}
        ]
        self._take_over(steps, parts, n, code, said)
        module.load_state_dict(torch.load(self.run.task.weights, map_location="cpu", weights_only=True))
        self.history = history
        self.seconds, self.cpu = record.seconds["epochs"], record.seconds["training_cpu"]
        self.wall = record.seconds.get("training_wall") or [None] * n
        self.spent_before = record.seconds["total"]
        self._compare(module)  # there are weights of no other epoch
        self.run.notes.append(f"Went on from the weights of {n} epochs; the optimizer's averages began anew.")

    def _compare_code(self, code: str, steps: list[Any], history: list[dict[str, float]], name: str) -> str:
        """Compare a run's first steps with those of this code, if another made it; raises where they differ.

        Returns what is said of it in the record. Runs from before replays pin no steps: then it is the first epoch,
        whose means they have.
        """
        if code == self.me["code"]:
            return ""
        if self.run.any_code:
            return "not replayed (--any-code)"
        self.run.tell(0.0, "replaying the first steps with the code of today")
        if steps:
            verdict, what = compare(steps, self.again(STEPS)["steps"][: len(steps)]), f"first {len(steps)} steps"
        else:
            verdict, what = compare_epochs(history[0], self.again(None)["epoch"]), "first epoch"
        self._log_replay(name, verdict)
        if verdict in (DIFFERS, UNKNOWN):
            raise UselessCheckpoint(f"{name} was made by code that has changed since; its {what}: {verdict}.")
        said = f"{what} made again: {'the same' if verdict == SAME else 'the same up to round-off'}"
        self.run.notes.append(f"{name} was made by code that has changed since; {said}. Went on from it.")
        return said

    @rank_zero_only
    def _log_replay(self, name: str, verdict: str) -> None:
        self.run.log(event="replay", file=name, verdict=verdict)

    def _take_over(self, steps: list[Any], parts: list[dict[str, Any]], n: int, code: str, said: str) -> None:
        """Begin a part of the run after n epochs by others: a part ends where code or processor change."""
        self.steps, self.parts = list(steps), list(parts) or [{"code": code, "first": 1, "last": n}]
        if any(self.parts[-1].get(name) != value for name, value in self.me.items()):
            self.parts.append({**self.me, "first": n + 1, "last": n, **({"replay": said} if said else {})})

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Set epochs and schedules to where they were, if the run resumes from weights alone."""
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
        self.run.seconds["training_wall"] = list(self.wall)
        self.run.replay["steps"] = list(self.steps)
        self.run.parts[:] = [part for part in self.parts if part["last"] >= part["first"]]

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        synchronise(trainer.strategy.root_device)
        self._epoch_started, self._cpu_started = time.perf_counter(), time.process_time()
        self._validated, self._validated_wall = 0.0, 0.0
        if trainer.is_global_zero:
            self.run.log(event="epoch", epoch=trainer.current_epoch)
            self._tell(trainer.current_epoch, 0.0)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.history:  # the first epoch
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.is_global_zero:
            self._tell(trainer.current_epoch, (batch_idx + 1) / trainer.num_training_batches)

    def _tell(self, epoch: int, part: float) -> None:
        text = f"epoch {epoch + 1}/{self.epochs}"
        for name, value in (self.history[-1] if self.history else {}).items():
            if name in ("train_loss", self.best):
                text += f" {name.removeprefix('train_').replace('_', ' ')} {value:.4g}"
        self.run.tell(min(1.0, (epoch + part) / self.epochs), text)

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        synchronise(trainer.strategy.root_device)
        self._validation_started, self._validation_started_wall = time.process_time(), time.perf_counter()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        synchronise(trainer.strategy.root_device)
        self._validated += time.process_time() - self._validation_started
        self._validated_wall += time.perf_counter() - self._validation_started_wall

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        trainer.should_stop = True  # the next epoch is a fit of its own

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write the checkpoint, here and not at the end of the epoch: schedules by epoch make their step after that."""
        row = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self.best not in row:
            raise KeyError(f"The module logs no {self.best!r}; it logs {', '.join(row)}.")
        self.history.append(row)
        self.parts = self.parts or [{**self.me, "first": 1, "last": 0}]
        self.parts[-1]["last"] = len(self.history)
        synchronise(trainer.strategy.root_device)
        self.seconds.append(time.perf_counter() - self._epoch_started)
        self.wall.append(self.seconds[-1] - self._validated_wall)
        self.cpu.append(time.process_time() - self._cpu_started - self._validated)
        self._compare(pl_module)
        self._write(trainer)
        self._fill()
        late = len(self.history) < self.epochs and time.monotonic() > self.run.deadline
        self.late = trainer.strategy.broadcast(late)  # all processes stop, or none

    def _compare(self, module: lightning.LightningModule) -> None:
        """Compare the last epoch with the best before it."""
        value = self.history[-1][self.best]
        if math.isnan(self.best_value) or self.sign * value > self.sign * self.best_value:
            weights = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
            self.best_epoch, self.best_value, self.best_weights = len(self.history), value, weights

    def on_save_checkpoint(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["experiment"] = {
            "code": self.me["code"],
            "replay": self.steps,
            "parts": self.parts,
            "history": self.history,
            "seconds": self.seconds,
            "cpu": self.cpu,
            "wall": self.wall,
            "spent": self.spent_before + time.perf_counter() - self.started,
            "best": (self.best_epoch, self.best_value, self.best_weights),
        }

    def _write(self, trainer: lightning.Trainer) -> None:
        path = self.run.folder / f"epoch-{len(self.history):05d}.ckpt"
        draft = path.with_suffix(".lightning.draft")
        trainer.save_checkpoint(draft)  # by all processes
        if trainer.is_global_zero:
            content = draft.read_bytes()
            # The checksum is written first, so that every checkpoint that exists can be checked.
            write_in_one_piece(_checksum_of(path), hashlib.sha256(content).hexdigest().encode())
            write_in_one_piece(path, content)
            draft.unlink()
            for old in sorted(self.run.folder.glob("epoch-*.ckpt"))[:-N_KEPT]:
                old.unlink()
                _checksum_of(old).unlink(missing_ok=True)
        trainer.strategy.barrier()
        self.checkpoint = path


class UselessCheckpoint(Exception):
    """A checkpoint that is damaged, or whose first steps the code of today makes differently."""


def _checksum_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _checked(path: Path) -> dict[str, Any]:
    checksum = _checksum_of(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise UselessCheckpoint(f"{path.name} was set aside by another process.") from None
    if not checksum.exists():
        raise UselessCheckpoint(f"{path.name} has no checksum beside it.")
    if hashlib.sha256(content).hexdigest() != checksum.read_text(errors="replace").strip():
        raise UselessCheckpoint(f"{path.name} was changed since it was written: its checksum does not fit.")
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


@rank_zero_only
def save_weights(path: Path, weights: dict[str, Tensor]) -> None:
    buffer = io.BytesIO()
    torch.save(weights, buffer)
    write_in_one_piece(path, buffer.getvalue())
