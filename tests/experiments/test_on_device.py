"""Every task trains on a device that is not the CPU (tests/device.py) as on the CPU, and in two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from device import DEVICE, NAME
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from experiments.engine import task as tasks
from experiments.engine.devices import Devices, accelerator_of, devices_of
from experiments.engine.record import Record
from experiments.engine.replay import Replayed, Wanted, compare
from experiments.engine.task import BadOption, Run, Task
from experiments.engine.trainer import LoggingModule
from experiments.registry import EXPERIMENTS

ROOT = Path(__file__).parents[2]


class FakeAccelerator(Accelerator):
    def setup_device(self, device: torch.device) -> None:
        pass

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> Any:
        return [DEVICE]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}


class FakeStrategy(SingleDeviceStrategy):
    """The device has no pickling: checkpoints are written from copies on the CPU."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(move_data_to_device(checkpoint, "cpu"), filepath, storage_options)


def fake_devices() -> Devices:
    return Devices(accelerator=FakeAccelerator(), strategy=FakeStrategy(DEVICE))


@pytest.fixture
def places(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(tasks, "RUNS", tmp_path / "runs")


@pytest.fixture
def seen(monkeypatch) -> set[str]:
    """Device types of the parameters and batches of all training steps."""
    found: set[str] = set()

    def on_train_batch_start(self: LoggingModule, batch: Any, batch_idx: int) -> None:
        found.update(x.device.type for x in (*self.parameters(), *batch))

    monkeypatch.setattr(LoggingModule, "on_train_batch_start", on_train_batch_start, raising=False)
    return found


CASES = {
    "digits": {"method": "mali", "n_train": 64},
    "solvers": {"method": "mali", "n_train": 64, "h": 0.5},
    "latent": {"method": "mali", "epochs": 1, "n": 20, "batch": 8, "units": 8},
    "paths": {"method": "mali"},
    "flows": {"method": "mali"},
    "densities": {},
}


def replayed(name: str, changes: dict[str, Any], devices: Devices | None, place: Path) -> dict[str, Any]:
    task = Task(EXPERIMENTS[name], "smoke", changes)
    run = Run(task, devices=devices, accelerator="cpu", replaying=Wanted(None), place=place)
    with pytest.raises(Replayed) as ended:
        task.experiment.main(task.config, run)
    return ended.value.found


@pytest.mark.parametrize("name", CASES)
def test_an_epoch_of_every_task_trains_on_the_device_as_on_the_cpu(name, seen, places, tmp_path):
    on_device = replayed(name, CASES[name], fake_devices(), tmp_path / "device")
    assert seen == {NAME}
    seen.clear()
    on_cpu = replayed(name, CASES[name], None, tmp_path / "cpu")
    assert seen == {"cpu"}
    assert len(on_device["steps"]) >= 1 and compare(on_cpu["steps"], on_device["steps"]) == "same"


SLOW = ("solvers", "latent", "paths", "flows")


@pytest.mark.parametrize("name", [pytest.param(x, marks=pytest.mark.slow) if x in SLOW else x for x in CASES])
def test_every_task_runs_to_its_end_on_the_device(name, seen, places, tmp_path, monkeypatch):
    """Training, checkpoint, validation, test, and what is measured afterwards. The device has no inference mode."""
    monkeypatch.setattr(lightning, "Trainer", partial(lightning.Trainer, inference_mode=False))
    task = Task(EXPERIMENTS[name], "smoke", CASES[name])
    run = Run(task, devices=fake_devices(), place=tmp_path / "run")
    results = task.experiment.main(task.config, run)
    assert seen == {NAME} and results and run.metrics["train_loss" if name != "densities" else "train_nats"]
    assert len(run.seconds["training_wall"]) == len(run.seconds["training_cpu"]) == 1
    again = Run(task, accelerator="cpu", place=tmp_path / "run")  # from the checkpoint, on another device
    found = task.experiment.main(task.config, again)
    assert found.keys() == results.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_task_trains_in_two_processes(name, tmp_path):
    """--devices 2 starts torchrun; on the CPU the processes talk by gloo."""
    words = ["run", name, "--preset", "smoke", "--seed", "0", "--devices", "2", "--accelerator", "cpu"]
    words += ["--method", "mali"] if name != "densities" else []
    line = [sys.executable, "-m", "experiments", *words]
    environment = {**os.environ, "TORCHMALI_OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "records" / name).glob("*.json")
    record = Record.read(path)
    assert record.finished and record.config["devices"] == 2 and "--set devices=2" in record.command
    assert record.replay["steps"] and record.made["device"] == "cpu"


def test_accelerators_are_taken_as_they_are_there(monkeypatch):
    assert accelerator_of("cpu") == "cpu"
    with pytest.raises(BadOption, match="no accelerator 'tpu'; there are auto, cpu, cuda, mps"):
        accelerator_of("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert accelerator_of("auto") == "cpu"
    with pytest.raises(BadOption, match="--accelerator cuda: there is none here"):
        accelerator_of("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert accelerator_of("auto") == "cuda" and Devices(accelerator="cuda").device == torch.device("cuda", 0)


def test_the_devices_of_a_run_are_those_of_its_config_and_its_processes(monkeypatch, tmp_path):
    task = Task(EXPERIMENTS["flows"], "smoke", {"devices": 2, "precision": "bf16-mixed"})
    run = Run(task, accelerator="cpu", place=tmp_path)
    with pytest.raises(BadOption, match="torchrun --nproc-per-node 2"):
        devices_of(run)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert devices_of(run) == Devices(2, "cpu", "ddp", "bf16-mixed")


def test_new_settings_at_their_defaults_leave_a_run_where_it_was():
    """An unfinished run of the latent ODE from before it had devices goes on in its folder."""
    old = "paper-mali-seed0-009a3af9"
    task = Task(EXPERIMENTS["latent"], "paper", {"method": "mali", "seed": 0})
    assert task.folder.name == old
    assert Task(EXPERIMENTS["latent"], "paper", {"method": "mali", "seed": 0, "devices": 2}).folder.name != old


def test_channels_last_and_bfloat16_change_little(places, tmp_path):
    plain = replayed("digits", CASES["digits"], None, tmp_path / "a")["steps"][0]["loss"]
    for changes, limit in (({"channels_last": True}, 1e-4), ({"precision": "bf16-mixed"}, 0.05)):
        found = replayed("digits", {**CASES["digits"], **changes}, None, tmp_path / "b")["steps"][0]["loss"]
        assert found == pytest.approx(plain, rel=limit)
