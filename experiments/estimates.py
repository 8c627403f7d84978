"""Estimates of the time and memory of runs at the published size, from FLOPs that are counted for one sample.

One training step of the published network with MALI, on random data and with random weights, is counted on the CPU with
one sample and with two: FLOPs, operations, bytes. A GPU is bound by FLOPs or by the time that it takes to start
operations. What a network needs once it is trained, with adaptive steps, is not known from that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from experiments.data import hopper
from experiments.engine.measure import live_peak
from experiments.engine.record import EXPERIMENTS as FOLDER
from experiments.engine.record import write_in_one_piece
from experiments.flows import images as flows
from experiments.images import recognition
from experiments.methods import published_tolerances
from experiments.models.neural_cde import CDEClassifier
from experiments.registry import EXPERIMENTS
from experiments.series import latent, paths

PATH = FOLDER / "estimates.json"
A100 = "A100"
FLOPS_PER_SECOND = 0.3 * 19.5e12  # three tenths of the peak of an A100 in float32, without tensor cores
SECONDS_PER_OPERATION = 1e-5  # that PyTorch takes to start one, however small it is


class Step(NamedTuple):
    """A training step with so many samples, and how many samples a whole run sees."""

    of: Callable[[int], tuple[nn.Module, Callable[[], None]]]
    samples: int
    batch: int  # on one device
    devices: int = 1


def _images(experiment: str, classes: int, side: int, n: int) -> Step:
    config: Any = replace(EXPERIMENTS[experiment].presets["paper"], method="mali")

    def of(batch: int) -> tuple[nn.Module, Callable[[], None]]:
        network = recognition.network(config, classes)
        x, y = torch.rand(batch, 3, side, side), torch.zeros(batch, dtype=torch.long)
        return network, lambda: F.cross_entropy(network(x), y).backward()

    return Step(of, n * config.epochs, config.batch // config.devices, config.devices)


def _latent() -> Step:
    config: Any = EXPERIMENTS["latent"].presets["paper"]
    times = hopper.times()

    def of(batch: int) -> tuple[nn.Module, Callable[[], None]]:
        network = latent.network(config, times.tolist())
        module = latent.GapFiller(network, times, config.lr, config.kl_wait)
        observed = hopper.observe(torch.rand(batch, 100, hopper.N_CHANNELS), config.fraction, torch.Generator())
        x = (torch.rand(batch, 100, hopper.N_CHANNELS), observed.values, observed.mask)
        return module, partial(latent.one_step, module, x)

    return Step(of, int(0.8 * config.n) * config.epochs, config.batch)


def _paths() -> Step:
    config: Any = EXPERIMENTS["paths"].presets["paper"]

    def of(batch: int) -> tuple[nn.Module, Callable[[], None]]:
        network = CDEClassifier(paths.cde(config), 21, 10, config.hidden, config.width, config.layers)
        x = torch.rand(batch, 161, 21)
        x[..., 0] = torch.arange(161)
        return network, paths.one_step(network, x, torch.zeros(batch, dtype=torch.long))

    return Step(of, int(0.7 * 34_975) * config.epochs, config.batch)


def _flows(preset: str, shape: tuple[int, int, int]) -> Step:
    config: Any = EXPERIMENTS["flows"].presets[preset]

    def of(batch: int) -> tuple[nn.Module, Callable[[], None]]:
        network = flows.network(config, shape)
        with torch.no_grad():
            for cnf in network.flows():
                last: Any = cnf.func.layers[-1].layer
                last.weight.normal_(std=0.02)  # flows that stand still would take one step
        module = flows.ImageFlow(network, 256, flows.weight(config), config.lr, config.warmup)
        pixels = torch.randint(256, (batch, *shape)).float()
        return module, lambda: _backward(module, pixels)

    return Step(of, config.batch * config.batches * config.epochs, config.batch // config.devices)


def _backward(module: flows.ImageFlow, pixels: Tensor) -> None:
    module.loss(pixels, torch.full_like(pixels, 0.5))[0].backward()


STEPS: dict[str, Callable[[], Step]] = {
    "cifar10 paper": partial(_images, "cifar10", 10, 32, 50_000),
    "imagenet paper": partial(_images, "imagenet", 1000, 224, 1_271_167),
    "latent paper": _latent,
    "paths paper": _paths,
    "flows paper-mnist": partial(_flows, "paper-mnist", (1, 28, 28)),
    "flows paper-cifar10": partial(_flows, "paper-cifar10", (3, 32, 32)),
    "flows paper-imagenet64": partial(_flows, "paper-imagenet64", (3, 64, 64)),
}


class CountedFlops(TorchDispatchMode):
    """FLOPs of products and convolutions. torch's own counter follows modules, and refuses gradients within a solve."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.operations = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def counted(step: Step) -> dict[str, float]:
    """Count FLOPs of a sample, and peak bytes of one sample and of two: a line through both gives those of a batch."""
    peaks = []
    flops, operations = 0.0, 0
    for n in (1, 2):
        torch.manual_seed(0)
        module, work = step.of(n)
        with published_tolerances():
            peaks.append(live_peak(work))
            if n == 2:
                with CountedFlops() as counter:
                    work()
                flops, operations = counter.total / n, counter.operations
        parameters = sum(p.numel() for p in module.parameters())
    beside = 3 * 4 * parameters  # weights, and two averages of the optimizer at most
    memory = peaks[0] + (step.batch - 1) * (peaks[1] - peaks[0]) + beside
    return {
        "flops_of_a_sample": flops,
        "samples": step.samples,
        "operations_of_a_step": operations,
        "steps": step.samples / (step.batch * step.devices),
        "bytes": memory,
    }


def write(names: list[str]) -> dict[str, dict[str, float]]:
    """Count anew for the named presets (all, if none is named), and write the file."""
    found = read()
    for name in names or STEPS:
        found[name] = counted(STEPS[name]())
    write_in_one_piece(PATH, (json.dumps(found, indent=1, sort_keys=True) + "\n").encode())
    return found


def read() -> dict[str, dict[str, float]]:
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def estimate(experiment: str, preset: str) -> str:
    """Say what a run with MALI would take on one GPU; an empty text where nothing was counted."""
    found = read().get(f"{experiment} {preset}")
    if not found:
        return ""
    by_flops = found["flops_of_a_sample"] * found["samples"] / FLOPS_PER_SECOND
    by_operations = found["operations_of_a_step"] * found["steps"] * SECONDS_PER_OPERATION
    hours, bound = max(by_flops, by_operations) / 3600, "FLOPs" if by_flops > by_operations else "starting operations"
    memory = f"{found['bytes'] / 1e9:.1g} GB" if found["bytes"] < 1e9 else f"{found['bytes'] / 1e9:.0f} GB"
    return f"estimate for one {A100}, MALI: {hours:,.0f} h (by {bound}), {memory}"
