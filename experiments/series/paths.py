"""Tables 5 and 7: Neural CDEs that recognise spoken words, speakers, or digits read row by row, by gradient method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchmali as tm
from experiments.data import data_dir, digits, speech, vowels
from experiments.data.source import DataError
from experiments.engine.batches import InMemory
from experiments.engine.measure import by_h, live_peak
from experiments.engine.task import BadOption, Run, TrainedConfig, require_known
from experiments.engine.trainer import Classifier, train
from experiments.models.neural_cde import CDEClassifier
from experiments.series import solving
from torchmali.nn import CubicControl, LinearControl, NeuralCDE

SPLIT = 0
SIZES = (1.0, 0.5, 0.25, 0.125)  # of fixed steps for which memory is measured


@dataclass(frozen=True)
class PathsConfig(TrainedConfig):
    """Settings of a Neural CDE. every: one of so many frames is kept. h: of fixed steps; two frames are 1 apart.

    adjoint and seminorm take steps that adapt, with rtol and atol. plateau: lr falls to a tenth where the loss has not
    fallen for so many epochs; 0: along a cosine.
    """

    data: str = "digits"  # table (MFCCs of 10,000 clips), speech (wave files), vowels
    method: str = "mali"
    control: str = "cubic"  # linear
    every: int = 1
    n_train: int | None = None
    n_test: int | None = None
    hidden: int = 32
    width: int = 32
    layers: int = 3
    h: float = 0.25
    rtol: float = 1e-3
    atol: float = 1e-6
    eta: float = 1.0
    unsafe_damping: bool = False
    epochs: int = 60
    batch: int = 128
    lr: float = 4e-3
    weight_decay: float = 0.01
    plateau: int = 0
    split: str = "random"  # speaker; of wave files


PUBLISHED = PathsConfig(data="speech", hidden=90, width=40, layers=3, batch=1024, plateau=20, epochs=100)
PRESETS = {
    "smoke": PathsConfig(n_train=200, n_test=100, hidden=8, width=8, layers=1, epochs=1),
    "cpu": PathsConfig(data="table", every=4, n_train=3000, n_test=1500, epochs=15, batch=256),
    "cpu-digits": PathsConfig(),
    "cpu-vowels": PathsConfig(data="vowels", epochs=60, batch=90),
    "cpu-published": replace(PUBLISHED, data="table", batch=256),  # a quarter: 28 steps an epoch, not 7
    "paper": PUBLISHED,
}


def cde(config: PathsConfig) -> Callable[[nn.Module, nn.Module], NeuralCDE]:
    controls = {"cubic": CubicControl, "linear": LinearControl}
    require_known("control", config.control, controls)
    solve = solving.solve_of(config, naive=tm.RK4())
    return partial(NeuralCDE, control=controls[config.control], **solve.options())


# Data


class Series(NamedTuple):
    """Series (series, time, channel) with labels."""

    x: Tensor
    labels: Tensor


class Sets(NamedTuple):
    train: Series
    validation: Series
    test: Series
    n_classes: int


def _table(config: PathsConfig, place: Path | None, run: Run) -> Sets:
    found = speech.load_table(place)
    return _split(found.mfcc, found.labels, found.split)


def _speech(config: PathsConfig, place: Path | None, run: Run) -> Sets:
    require_known("split", config.split, ("random", "speaker"))
    clips = speech.find(place)
    found = speech.features(clips, tell=lambda done, of: run.tell(0.0, f"reading {done} of {of} clips"))
    if found.n_dropped:
        run.notes.append(f"{found.n_dropped:,} clips that are not one second long were left out.")
    by_word = config.split == "random"
    split = speech.random_split(found.labels) if by_word else speech.speaker_split(found.paths, SPLIT)
    return _split(found.mfcc, found.labels, split)


def _split(x: Tensor, labels: Tensor, split: speech.Split) -> Sets:
    train, validation, test = (Series(x[rows], labels[rows]) for rows in split)
    return Sets(train, validation, test, len(speech.WORDS))


def _vowels(config: PathsConfig, place: Path | None, run: Run) -> Sets:
    """Load vowels. A series keeps its last value after its end: z rests. A fifth of training is for validation."""
    found = vowels.load(place)
    train, test = (Series(_held(part.x, part.lengths), part.labels) for part in (found.train, found.test))
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(SPLIT))
    n = len(order) // 5
    validation = Series(*(tensor[order[:n]] for tensor in train))
    return Sets(Series(*(tensor[order[n:]] for tensor in train)), validation, test, vowels.SPEAKERS)


def _held(x: Tensor, lengths: Tensor) -> Tensor:
    last = torch.minimum(torch.arange(x.shape[1]), lengths[:, None] - 1)
    time = last[..., None].to(x)
    return torch.cat([time, x.gather(1, last[..., None].expand_as(x))], -1)


def _digits(config: PathsConfig, place: Path | None, run: Run) -> Sets:
    """Load digits, as series of eight rows of eight pixels."""
    found = digits.load(SPLIT)
    train, validation, test = (Series(part.images.float() / 16, part.labels) for part in found)
    return Sets(train, validation, test, 10)


LOADERS: dict[str, Callable[[PathsConfig, Path | None, Run], Sets]] = {
    "digits": _digits, "table": _table, "speech": _speech, "vowels": _vowels,
}  # fmt: skip


def load(config: PathsConfig, run: Run) -> Sets:
    """Load series: frames thinned out, channels scaled by mean and deviation of the training set, time as channel 0.

    Pixels are not scaled: those of the margins are dark but for a few, which would become huge.
    """
    require_known("data", config.data, LOADERS)
    sets = LOADERS[config.data](config, data_dir(run.data_dir), run)
    first = 1 if config.data == "vowels" else 0  # the channel of time is there
    train, test = _taken(sets.train, config.n_train, "n_train"), _taken(sets.test, config.n_test, "n_test")
    mean, std = (f(train.x[..., first:], (0, 1)) for f in (torch.mean, torch.std))
    if config.data == "digits":
        mean, std = torch.zeros_like(mean), torch.ones_like(std)

    def scaled(part: Series) -> Series:
        x = part.x[:, :: config.every]
        time = x[..., :1] if first else torch.arange(x.shape[1]).expand(len(x), -1)[..., None].to(x)
        return Series(torch.cat([time, (x[..., first:] - mean) / (std + 1e-5)], -1), part.labels)

    return Sets(scaled(train), scaled(sets.validation), scaled(test), sets.n_classes)


def _taken(part: Series, n: int | None, name: str) -> Series:
    if n is not None and not 0 < n <= len(part.labels):
        raise DataError(f"{name} = {n}: there are {len(part.labels):,} series.")
    order = torch.randperm(len(part.labels), generator=torch.Generator().manual_seed(SPLIT))
    return part if n is None else Series(part.x[order[:n]], part.labels[order[:n]])


# Training


def main(config: PathsConfig, run: Run) -> dict[str, Any]:
    sets = load(config, run)
    if config.batch > len(sets.train.labels):
        raise BadOption(f"A batch of {config.batch} is more than the {len(sets.train.labels)} series to train with.")
    batches = InMemory(*sets[:3], config.batch, batch_in_tests=min(512, len(sets.test.labels)), devices=config.devices)
    optimizer = partial(torch.optim.AdamW, lr=config.lr, weight_decay=config.weight_decay)
    schedule = (
        partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=config.plateau)
        if config.plateau
        else partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=config.epochs)
    )
    channels = sets.train.x.shape[-1]

    def make() -> Classifier:
        network = CDEClassifier(cde(config), channels, sets.n_classes, config.hidden, config.width, config.layers)
        return Classifier(network, sets.n_classes, optimizer, schedule)

    x, y = (tensor[: config.batch] for tensor in sets.train)
    run.so_far = {
        "parameters": sum(p.numel() for p in make().parameters()),
        "peak_bytes": live_peak(one_step(make().network, x, y)),  # pyright: ignore[reportArgumentType]
        "n_train": len(sets.train.labels),
    }
    done = train(run, make, batches, config.epochs)
    network: Any = done.module.network
    step = one_step(network, x, y)
    return {
        **run.so_far,
        "peak_bytes": live_peak(step),
        "peak_bytes_by_h": by_h(network.cde, SIZES, step),
        "test_accuracy": done.best["test_accuracy"],
        "best_epoch": done.best_epoch,
        "test_accuracy_last": done.last["test_accuracy"],
        "seeds": done.seeds,
    }


def one_step(network: CDEClassifier, x: Tensor, y: Tensor) -> Callable[[], None]:
    """A forward and backward pass; the spline, which needs memory too, is made before."""
    coeffs = network.coeffs(x)

    def step() -> None:
        network.zero_grad(set_to_none=True)
        F.cross_entropy(network.along(coeffs), y).backward()

    return step
