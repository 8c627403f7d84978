"""Steering a trained flow by its noise (D-Flow): gradients through all steps, by method; memory, time, and results."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchmali as tm
from experiments.engine.task import Config, Run
from experiments.flows.images import packed
from experiments.matching.trained import Classifier, Unlabelled, classifier, velocity
from experiments.matching.training import as_pixels, load
from torchmali.flow import Sampler
from torchmali.measure import LiveBytes

Map = Callable[[Tensor, Tensor], Tensor]  # a velocity


@dataclass(frozen=True)
class SteeringConfig(Config):
    """Settings. flow: the preset of `matching` that was trained. n_timed: steps in the comparison of times."""

    flow: str = "cpu"
    steps: tuple[int, ...] = (5, 20, 60, 200)
    batch: int = 2
    n_timed: int = 20
    rounds: int = 4
    n_images: int = 4
    n_steps: int = 15
    iterations: int = 25
    lr: float = 0.3
    classifier_images: int = 20_000


PRESETS = {
    "smoke": SteeringConfig(
        flow="smoke", steps=(5, 10), n_timed=5, rounds=1, n_images=2, n_steps=4, iterations=2, classifier_images=64
    ),
    "cpu": SteeringConfig(),
}


# Samplers of n steps, from noise to images


def alf_step(f: Map, t: float, h: float, z: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    z = z + h / 2 * v
    v = 2 * f(torch.tensor(t + h / 2), z) - v
    return z + h / 2 * v, v


def alf_steps(f: Map, first: int, last: int, n: int, z: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    for i in range(first, last):
        z, v = alf_step(f, i / n, 1 / n, z, v)
    return z, v


def checkpointed(f: Map, z: Tensor, n: int) -> Tensor:
    """ALF, whose graph autograd makes again for each sqrt(n) steps."""
    every = math.ceil(math.sqrt(n))
    v = checkpoint(f, torch.tensor(0.0), z, use_reentrant=False)
    for i in range(0, n, every):
        z, v = checkpoint(alf_steps, f, i, min(i + every, n), n, z, v, use_reentrant=False)  # pyright: ignore
    return z


def truncated(f: Map, z: Tensor, n: int, k: int) -> Tensor:
    """ALF, differentiated through its last k steps; the steps before them count as the identity."""
    with torch.no_grad():
        x, v = alf_steps(f, 0, n - k, n, z, f(torch.tensor(0.0), z))
    return alf_steps(f, n - k, n, n, x + (z - z.detach()), v)[0]


def sampled(f: Map, z: Tensor, n: int, **how: Any) -> Tensor:
    return Sampler(f, **how).sample(z, n_steps=n)


ORDER4 = tm.ALF(order=4, evals=5)
METHODS: dict[str, Callable[[Map, Tensor, int], Tensor]] = {
    "naive": partial(sampled, gradient=tm.Naive()),
    "ACA": partial(sampled, gradient=tm.ACA()),
    "checkpoint": checkpointed,
    "MALI": sampled,
    "MALI exact": partial(sampled, gradient=tm.MALI(exact="int64")),
    "MALI order 4": lambda f, z, n: sampled(f, z, max(1, n // 5), solver=ORDER4),
    "adjoint": partial(sampled, gradient=tm.Adjoint()),
    "last 5": lambda f, z, n: truncated(f, z, n, min(5, n)),
    "last 1": lambda f, z, n: truncated(f, z, n, 1),
}


def plain(f: Map, z: Tensor, n: int) -> Tensor:
    """ALF without a library, by plain autograd; v is never renewed."""
    return alf_steps(f, 0, n, n, z, f(torch.tensor(0.0), z))[0]


REFERENCES = {  # the exact gradients of the same steps; naive's for other methods
    **dict.fromkeys(("checkpoint", "last 5", "last 1"), plain),
    "MALI order 4": lambda f, z, n: sampled(f, z, max(1, n // 5), solver=ORDER4, gradient=tm.Naive()),
}
NAIVE = METHODS["naive"]


# Losses


class Losses:
    """Losses of generated images: what is seen of an image and what is hidden, and a class."""

    def __init__(self, images: Tensor, labels: Tensor, judge: Classifier):
        self.images, self.labels, self.judge = images, labels, judge
        self.seen = torch.ones_like(images[:1])
        side = images.shape[-1]
        self.seen[..., side // 2 :] = 0  # the right half is missing
        kernel = torch.exp(-0.5 * (torch.arange(-4, 5) / 2.0) ** 2)
        self.kernel = (kernel[:, None] * kernel / kernel.sum() ** 2)[None, None].repeat(images.shape[1], 1, 1, 1)

    def blurred(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel, padding=4, groups=x.shape[1])

    def inpainting(self, x: Tensor) -> Tensor:
        return (self.seen * (x - self.images)).square().sum() / len(x)

    def deblurring(self, x: Tensor) -> Tensor:
        return (self.blurred(x) - self.blurred(self.images)).square().sum() / len(x)

    def label(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.judge(x), self.labels)

    def of(self, task: str) -> Callable[[Tensor], Tensor]:
        return {"inpainting": self.inpainting, "deblurring": self.deblurring, "label": self.label}[task]

    def observed(self, task: str) -> Tensor:
        if task == "label":
            return torch.zeros_like(self.images)
        return self.blurred(self.images) if task == "deblurring" else self.images * self.seen - (1 - self.seen)

    def judged(self, task: str, x: Tensor) -> dict[str, float]:
        return {
            "loss": float(self.of(task)(x)),
            "error": float((x - self.images).square().mean()),
            "accuracy": self.judge.accuracy(x, self.labels),
        }


DIFFERENT = ("MALI", "MALI order 4", "adjoint", "last 5", "last 1")  # the others' gradients are MALI's
TASKS = {"inpainting": ("naive", *DIFFERENT), "deblurring": DIFFERENT, "label": DIFFERENT}
SHOWN = ("MALI", "last 5", "last 1")


# Measurements


def gradient(method: Callable, f: Map, z: Tensor, n: int, loss: Callable[[Tensor], Tensor]) -> Tensor:
    z = z.clone().requires_grad_()
    (found,) = torch.autograd.grad(loss(method(f, z, n)), z)
    return found


def cell(
    f: Map, z: Tensor, n: int, loss: Callable[[Tensor], Tensor], name: str, known: dict[Any, Tensor]
) -> dict[str, Any]:
    """Peak bytes of one gradient, and how far it is from the exact one of its steps, which is computed once."""
    with LiveBytes() as live:
        found = gradient(METHODS[name], f, z, n, loss)
    reference = REFERENCES.get(name, NAIVE)
    if (reference, n) not in known:
        known[reference, n] = gradient(reference, f, z, n, loss)
    exact = known[reference, n]
    a, b = found.double().flatten(), exact.double().flatten()
    return {
        "peak": live.peak,
        "cosine": float(F.cosine_similarity(a, b, dim=0)),
        "error": float((a - b).norm() / b.norm()),
        "norm": float(b.norm()),
        "refreshes": refreshes(f, z, n),
    }


@torch.no_grad()
def refreshes(f: Map, z: Tensor, n: int) -> int:
    sampler = Sampler(f)
    sampler.sample(z, n_steps=n)
    assert sampler.last_stats is not None
    return sampler.last_stats.n_refreshes


def times(f: Map, z: Tensor, config: SteeringConfig, loss: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Processor time of one gradient over that of naive, in turns: median and quartiles."""
    ratios: dict[str, list[float]] = {name: [] for name in METHODS}
    for i in range(config.rounds + 1):
        spent = {}
        for name, method in METHODS.items():
            start = time.process_time()
            gradient(method, f, z, config.n_timed, loss)
            spent[name] = time.process_time() - start
        if i:  # the first round warms up
            for name, seconds in spent.items():
                ratios[name].append(seconds / spent["naive"])
    return {name: _quartiles(found) for name, found in ratios.items()}


def _quartiles(found: list[float]) -> list[float]:
    return statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3


def stored(f: Map, z: Tensor, n: int, loss: Callable[[Tensor], Tensor], dtype: torch.dtype | None) -> dict[str, Any]:
    """Whether the gradient of exact mode is that of stored states, bit for bit; its error against naive."""

    def by(method: tm.GradientMethod) -> Tensor:
        return gradient(partial(sampled, gradient=method, dtype=dtype), f, z, n, loss)

    rebuilt, kept, naive = (
        by(method) for method in (tm.MALI(exact="int64"), tm.MALI(exact="int64", checkpoint_every=1), tm.Naive())
    )
    return {"equal": torch.equal(rebuilt, kept), "error": float((rebuilt - naive).norm() / naive.norm())}


def steered(f: Map, losses: Losses, config: SteeringConfig, task: str, name: str, seed: int) -> dict[str, Any]:
    """Optimise noise through the sampler by Adam."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(losses.images.shape, generator=generator).requires_grad_()
    optimizer, loss = torch.optim.Adam([z], config.lr), losses.of(task)
    curve = []
    for _ in range(config.iterations):
        optimizer.zero_grad()
        value = loss(METHODS[name](f, z, config.n_steps))
        value.backward()
        optimizer.step()
        curve.append(float(value.detach()))
    with torch.no_grad():
        x = NAIVE(f, z, config.n_steps)
    shown = {"images": packed(as_pixels(x))} if name in SHOWN else {}
    return {**losses.judged(task, x), "curve": [round(value, 4) for value in curve], **shown}


def main(config: SteeringConfig, run: Run) -> dict[str, Any]:
    net, flow = velocity(config.flow)
    judge, facts = classifier(run, flow, config.classifier_images)
    images, labels = (x[: config.n_images] for x in load(flow, run.data_dir)[1])
    f, losses = Unlabelled(net), Losses(images, labels, judge)
    few = Losses(images[: config.batch], labels[: config.batch], judge)
    z = torch.randn(few.images.shape, generator=run.generator("noise"))
    work: dict[str, Callable[[], Any]] = {}
    known: dict[Any, Tensor] = {}
    for n in config.steps:
        for name in METHODS:
            work[f"{name} / N {n}"] = partial(cell, f, z, n, few.inpainting, name, known)
    work["times"] = partial(times, f, z, config, few.inpainting)
    for task, names in TASKS.items():
        for name in names:
            work[f"{task} / {name}"] = partial(steered, f, losses, config, task, name, run.seed("start"))
    work["stored float32"] = partial(stored, f, z, max(config.steps), few.inpainting, None)
    low = Unlabelled(velocity(config.flow)[0].bfloat16())
    work["stored bfloat16"] = partial(stored, low, z, max(config.steps), few.inpainting, torch.bfloat16)
    found = run.pieces(work)
    return {
        **facts,
        "cells": {name: found[name] for name in work if " / N " in name},
        "times": found["times"],
        "steered": {name: found[name] for name in work if name.split(" / ")[0] in TASKS},
        "stored": {name: found[f"stored {name}"] for name in ("float32", "bfloat16")},
        "observed": {task: packed(as_pixels(losses.observed(task))) for task in ("inpainting", "deblurring")},
        "real": packed(as_pixels(images)),
        "shape": tuple(images.shape[1:]),
        "image_bytes": images[0].nbytes,
    }
