"""Inversion of a trained flow: image, noise, image; by exact mode, leapfrogs, and couplings of others. Editing."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchmali as tm
from experiments.engine.task import Config, Run
from experiments.flows.images import packed
from experiments.matching.couplings import (
    EDICT,
    Coupling,
    Drifts,
    ReversibleMidpoint,
    RungeKutta,
    TwoStep,
    carried,
    carried_back,
)
from experiments.matching.trained import Classifier, classifier, velocity
from experiments.matching.training import N_CLASSES, as_pixels, load
from experiments.models.unet import UNet
from torchmali.flow import Guidance, Sampler
from torchmali.measure import LiveBytes


@dataclass(frozen=True)
class InversionConfig(Config):
    """Settings. evaluations: of the velocity, in each direction; a method takes as many steps as that allows."""

    flow: str = "cpu"
    n_exact: int = 1000
    n_images: int = 64
    evaluations: tuple[int, ...] = (20, 40)
    batch: int = 100
    n_edited: int = 50
    guidance: float = 2.0
    classifier_images: int = 20_000


PRESETS = {
    "smoke": InversionConfig(
        flow="smoke", n_exact=20, n_images=10, evaluations=(20,), batch=5, n_edited=10, classifier_images=64
    ),
    "cpu": InversionConfig(),
}
METHODS: dict[str, Coupling] = {
    "ALF": Drifts(),
    "ALF order 4": Drifts(tm.ALF(order=4, evals=5).coefficients),
    "Euler": RungeKutta(),
    "midpoint": RungeKutta(midpoint=True),
    "Reversible(Midpoint)": ReversibleMidpoint(),
    "EDICT, p 0.93": EDICT(),
    "BDIA, gamma 0.96": TwoStep(0.96),
    "BDIA, gamma 0.5": TwoStep(0.5),
    "BELM": TwoStep(1.0),
}
EXACT: dict[str, tm.MALI] = {"exact, int32": tm.MALI(exact=True), "exact, int64": tm.MALI(exact="int64")}
DATA, NOISE = 1.0, 0.0  # times


def conditional(net: UNet, labels: Tensor) -> Callable[[float, Tensor], Tensor]:
    return lambda t, x: net(torch.tensor(t), x, labels)


@torch.no_grad()
def inverted(
    method: Coupling, net: UNet, images: Tensor, labels: Tensor, evaluations: int, batch: int
) -> dict[str, Any]:
    """Take images to noise; back from the whole state, by the inverse; and back from the noise alone."""
    n = max(1, evaluations // method.evaluations)
    noise, rebuilt, anew, kept = [], [], [], 0
    for x, y in zip(images.split(batch), labels.split(batch), strict=True):
        f = conditional(net, y)
        state = carried(method, f, DATA, NOISE, n, x)
        kept = sum(part[0].nbytes for part in state)
        noise.append(state[0])
        rebuilt.append(carried_back(method, f, DATA, NOISE, n, state)[0])
        anew.append(carried(method, f, NOISE, DATA, n, state[0])[0])
    back = torch.cat(rebuilt)
    return {
        "steps": n,
        "evaluations": n * method.evaluations,
        "kept_bytes": kept,
        **differences(back, images),
        "error_from_noise_alone": rms(torch.cat(anew) - images),
        **normality(torch.cat(noise)),
        "peak": peak(lambda: carried(method, conditional(net, labels[:batch]), DATA, NOISE, n, images[:batch])),
    }


def differences(back: Tensor, images: Tensor) -> dict[str, Any]:
    equal = (back == images).flatten(1).all(1)
    pixels = (as_pixels(back) == as_pixels(images)).flatten(1).all(1)
    largest = float((back - images).abs().max())
    return {
        "error": rms(back - images),
        "largest_error": largest,
        "equal_to_the_bit": int(equal.sum()),
        "equal_pixels": int(pixels.sum()),
    }


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def normality(z: Tensor) -> dict[str, float]:
    """Moments of all elements, and the mean product of neighbours in a row: 0, 1, 0 and 0 for normal noise."""
    z = z.double()
    mean, std = z.mean(), z.std()
    return {
        "mean": float(mean),
        "std": float(std),
        "excess_kurtosis": float(((z - mean) / std).pow(4).mean() - 3),
        "neighbours": float(((z[..., 1:] - mean) * (z[..., :-1] - mean)).mean() / std**2),
    }


def peak(run: Callable[[], Any]) -> int:
    with LiveBytes() as live:
        run()
    return live.peak


@torch.no_grad()
def exact(sampler: Sampler, images: Tensor, labels: Tensor, n_steps: int, batch: int, folder: Path) -> dict[str, Any]:
    """Exact mode: back from the codes, here and in a second process, which reads them from a file."""
    noise, back, codes = [], [], []
    for x, y in zip(images.split(batch), labels.split(batch), strict=True):
        z, code = sampler.encode_with_code(x, y, n_steps=n_steps)
        noise.append(z)
        codes.append(code)
        back.append(sampler.sample(code))
    path = folder / "codes.pickle"
    path.write_bytes(pickle.dumps((sampler, codes)))
    process = multiprocessing.get_context("spawn").Process(target=decode, args=(path,))
    process.start()
    process.join()
    there = torch.load(path.with_suffix(".pt"), weights_only=True)
    n_bytes = sum(len(pickle.dumps(code)) for code in codes) - sum(y.nbytes for y in labels.split(batch))
    return {
        "steps": n_steps,
        "images": len(images),
        "evaluations": n_steps + 1,
        "kept_bytes": n_bytes / len(images),
        **differences(torch.cat(back), images),
        "equal_in_a_second_process": int((there == images).flatten(1).all(1).sum()),
        **normality(torch.cat(noise)),
        "peak": peak(lambda: sampler.encode_with_code(images[:batch], labels[:batch], n_steps=n_steps)),
    }


def decode(path: Path) -> None:
    """In a second process: images from codes in a file."""
    torch.set_num_threads(1)
    sampler, codes = pickle.loads(path.read_bytes())
    torch.save(torch.cat([sampler.sample(code) for code in codes]), path.with_suffix(".pt"))


@torch.no_grad()
def edited(
    method: Coupling, net: UNet, images: Tensor, labels: Tensor, judge: Classifier, guidance: float, evaluations: int
) -> dict[str, Any]:
    """Take images to noise with their label, and from there to images with the next label."""
    n, wanted = max(1, evaluations // method.evaluations), (labels + 1) % N_CLASSES
    z = carried(method, conditional(net, labels), DATA, NOISE, n, images)[0]
    sampler = Sampler(net)
    x = sampler.sample(z, wanted, n_steps=evaluations, guidance=Guidance(guidance, torch.full_like(labels, N_CLASSES)))
    return {
        "accuracy": judge.accuracy(x, wanted),
        "distance": rms(x - images),
        "distance_of_others": rms(x.roll(1, 0) - images),
        "images": packed(as_pixels(x[:N_SHOWN])),
    }


N_SHOWN = 16
EDITED = ("ALF", "ALF order 4", "Euler", "EDICT, p 0.93", "BELM")


def main(config: InversionConfig, run: Run) -> dict[str, Any]:
    net, flow = velocity(config.flow)
    judge, facts = classifier(run, flow, config.classifier_images)
    images, labels = (x[: config.n_exact] for x in load(flow, run.data_dir)[1])
    few = images[: config.n_images], labels[: config.n_images]
    work: dict[str, Callable[[], Any]] = {}
    for evaluations in config.evaluations:
        for name, method in METHODS.items():
            work[f"{name} / {evaluations}"] = partial(inverted, method, net, *few, evaluations, config.batch)
    n = min(config.evaluations)
    for name, gradient in EXACT.items():
        sampler = Sampler(net, gradient=gradient)
        part = (images, labels) if name == "exact, int64" else few
        work[f"{name} / {n}"] = partial(exact, sampler, *part, n, config.batch, run.folder)
    some = images[: config.n_edited], labels[: config.n_edited]
    for name in EDITED:
        work[f"edited / {name}"] = partial(edited, METHODS[name], net, *some, judge, config.guidance, n)
    found = run.pieces(work)
    return {
        **facts,
        "cells": {name: value for name, value in found.items() if not name.startswith("edited")},
        "edited": {name: found[f"edited / {name}"] for name in EDITED},
        "real": packed(as_pixels(images[:N_SHOWN])),
        "shape": tuple(images.shape[1:]),
        "image_bytes": images[0].nbytes,
    }
