"""Devices of a run: the accelerator that was asked for, how many of it, and the processes that share them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from experiments.engine.task import BadOption, Run, require_known

ACCELERATORS = ("auto", "cpu", "cuda", "mps")


@dataclass(frozen=True)
class Devices:
    """Devices, as in `lightning.Trainer`. On several, each process runs the same command (torchrun, strategy="ddp").

    accelerator, strategy: names, or objects of Lightning, as for a device that it does not know.
    """

    devices: int | list[int] | str = 1
    accelerator: Any = "cpu"
    strategy: Any = "auto"
    precision: str = "32-true"

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        if not isinstance(self.strategy, str):
            return self.strategy.root_device
        local = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", local) if self.accelerator == "cuda" else torch.device(self.accelerator)


def accelerator_of(name: str) -> str:
    """Return the accelerator of a name; "auto" takes CUDA where there is a GPU, and else the processor.

    MPS, which has no float64, must be asked for.
    """
    require_known("accelerator", name, ACCELERATORS)
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return "cuda" if there["cuda"] else "cpu"
    if not there[name]:
        raise BadOption(f"--accelerator {name}: there is none here; --accelerator auto takes what there is.")
    return name


def devices_of(run: Run) -> Devices:
    """Return the devices of a run; its config says how many, and with which precision."""
    if run.devices is not None:
        return run.devices
    config: Any = run.task.config
    n, precision = getattr(config, "devices", 1), getattr(config, "precision", "32-true")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != n:
        line = f"torchrun --nproc-per-node {n} -m experiments run ..."
        raise BadOption(f"The run is for {n} devices, this is for {world}: {line}, or --set devices={world}.")
    return Devices(n, accelerator_of(run.accelerator), "auto" if n == 1 else "ddp", precision)


def is_first_process() -> bool:
    """Tell whether this is the only process of a run, or the one of several that writes its record."""
    return int(os.environ.get("RANK", "0")) == 0


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what was asked of it: before that a clock tells nothing."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
