"""Recognition of images by a ResNet or its Neural ODE twin: data, methods and training of Figures 5 and 6."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from experiments.data import cifar, data_dir, digits, folder, mnist
from experiments.data.augment import crop_and_flip
from experiments.data.source import DataError, Images
from experiments.engine.batches import Parts, even_shares
from experiments.engine.devices import devices_of
from experiments.engine.measure import one_step
from experiments.engine.task import BadOption, Run, TrainedConfig, require_known
from experiments.engine.trainer import Classifier, Trained, train
from experiments.methods import METHODS, Solve, published_tolerances
from experiments.models import ode_resnet
from experiments.models.ode_resnet import NORMALISE, RESNET, Network, Normalise

SPLIT = 0  # seed of the split; not the config's: every run is tested with the same images


@dataclass(frozen=True)
class ImagesConfig(TrainedConfig):
    """Settings. None: for rtol, atol the method's; for h adaptive steps; for n_train, n_validation, n_test all.

    drops: epochs after which lr falls to a tenth; none: a cosine. pad: largest shift of the augmentation. batch: on all
    devices together.
    """

    data: str = "digits"  # mnist, cifar10, folder
    network: str = "small"  # stack, resnet18, resnet18_large
    norm: str = "batch"  # group, sync
    momentum_in_f: float = 0.1  # of BatchNorm's running statistics, which every evaluation of f updates
    method: str = "mali"
    rtol: float | None = None
    atol: float | None = None
    h: float | None = None
    n_train: int | None = None
    n_validation: int = 270
    n_test: int | None = None
    epochs: int = 30
    batch: int = 64
    lr: float = 0.05
    weight_decay: float = 5e-4
    drops: tuple[int, ...] = ()
    pad: int = 0
    flip: bool = False
    channels_last: bool = False  # the layout that convolutions of GPUs are fastest with
    workers: int = 0  # that decode pictures, for each device
    LATER: ClassVar[tuple[str, ...]] = ("channels_last",)

    size: int = 224  # of crops of pictures, in tests of the middle of pictures with a shorter side of 8/7 of it


SMALL_CIFAR = ImagesConfig(
    data="cifar10", n_train=10_000, n_validation=1000, n_test=2000, epochs=8, batch=128, pad=2, flip=True
)
DIGITS = {
    "smoke": ImagesConfig(n_train=256, n_validation=100, n_test=100, epochs=1),
    "cpu": ImagesConfig(momentum_in_f=0.01),
}
MNIST = {
    "smoke": ImagesConfig(data="mnist", n_train=128, n_validation=64, n_test=64, epochs=1),
    "cpu": ImagesConfig(data="mnist", n_train=10_000, n_validation=1000, n_test=2000, epochs=5, batch=128, pad=2),
}
CIFAR = {
    "smoke": ImagesConfig(data="cifar10", n_train=128, n_validation=64, n_test=64, epochs=1, pad=2, flip=True),
    "cpu": SMALL_CIFAR,
    "paper": ImagesConfig(
        data="cifar10",
        network="resnet18",
        n_validation=0,
        epochs=90,
        batch=128,
        lr=0.01,
        drops=(30, 60),
        pad=4,
        flip=True,
    ),
}
FOLDER = {
    "smoke": ImagesConfig(data="folder", network="resnet18_large", h=0.25, n_validation=4, epochs=1, batch=4, size=64),
    "paper": ImagesConfig(
        data="folder",
        network="resnet18_large",
        h=0.25,
        n_validation=10_000,
        epochs=80,
        batch=256,
        lr=0.1,
        weight_decay=1e-4,
        drops=(30, 60),
        flip=True,
        devices=4,
        workers=8,
    ),
}


# Methods

NAMES = ("resnet", "naive", "adjoint", "seminorm", "aca", "mali", "alf4", "exact")
SYNCHRONOUS = {  # every process evaluates f equally often: no refresh, nothing solved again
    **{name: METHODS[name] for name in ("naive", "adjoint", "aca")},
    "mali": METHODS["published"],
}


def solve_of(config: ImagesConfig) -> Solve:
    """Solver, controller and gradient method of the ODE blocks."""
    require_known("method", config.method, NAMES)
    if config.method == "resnet":
        return RESNET
    method = SYNCHRONOUS.get(config.method) if config.norm == "sync" else METHODS[config.method]
    if method is None or (config.norm == "sync" and config.h is None):
        what = "SyncBatchNorm needs as many evaluations of f in every process"
        raise BadOption(f"{what}: fixed steps (--set h=0.25), and one of the methods {', '.join(SYNCHRONOUS)}.")
    return method.adaptive_steps(config.rtol, config.atol) if config.h is None else method.fixed_steps(config.h)


# Data


class Sets(NamedTuple):
    """Sets of images. levels: the pixel that is white."""

    train: Images
    validation: Images
    test: Images
    levels: int


def _digits(config: ImagesConfig, place: Path | None) -> Sets:
    n_test = 270 if config.n_test is None else config.n_test
    found = digits.load(SPLIT, config.n_validation, n_test)
    sets = [Images(x.images[:, None], x.labels) for x in found]
    return Sets(_first(sets[0], config.n_train, "n_train"), sets[1], sets[2], 16)


def _mnist(config: ImagesConfig, place: Path | None) -> Sets:
    train, test = (mnist.load(place, split) for split in ("train", "test"))
    train, test = (Images(x.images[:, None], x.labels) for x in (train, test))
    return Sets(*_split(config, train), _first(test, config.n_test, "n_test"), 255)


def _cifar10(config: ImagesConfig, place: Path | None) -> Sets:
    train = cifar.load(place, "train", require_all=config.n_train is None)
    test = cifar.load(place, "test")
    return Sets(*_split(config, train), _first(test, config.n_test, "n_test"), 255)


def _split(config: ImagesConfig, images: Images) -> tuple[Images, Images]:
    """Split images into a part for training and a part for validation; the rest is not used."""
    n = len(images) - config.n_validation if config.n_train is None else config.n_train
    if n < 1 or n + config.n_validation > len(images):
        what = f"{max(n, 1):,} to train with and {config.n_validation:,} for validation"
        raise DataError(f"{len(images):,} images of {config.data} are too few for {what}: set n_train, n_validation.")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT))
    train, validation = order[:n], order[n : n + config.n_validation]
    return Images(images.images[train], images.labels[train]), Images(
        images.images[validation], images.labels[validation]
    )


def _first(images: Images, n: int | None, name: str) -> Images:
    if n is not None and not 0 < n <= len(images):
        raise DataError(f"{name} = {n}: there are {len(images):,} images.")
    return images if n is None else Images(images.images[:n], images.labels[:n])


LOADERS: dict[str, Callable[[ImagesConfig, Path | None], Sets]] = {
    "digits": _digits, "mnist": _mnist, "cifar10": _cifar10,
}  # fmt: skip
KNOWN = (*LOADERS, "folder")


def pixels(images: Tensor, levels: int) -> Tensor:
    """Scale pixels to [0, 1]."""
    return images.float() / levels


@dataclass(frozen=True)
class Augmented:
    """Batches of images in memory. All that is drawn for an epoch is drawn by row: batches of any size see the same."""

    sets: Sets
    config: ImagesConfig
    n_classes: int = 10

    @property
    def n_test(self) -> int:
        return len(self.sets.test)

    def train(self, epoch: int, order: torch.Generator, subsample: torch.Generator) -> Iterable:
        images, labels, _ = self.sets.train.images, self.sets.train.labels, epoch
        n, pad = len(labels), self.config.pad
        rows = torch.randperm(n, generator=order)
        shifts = torch.randint(2 * pad + 1, (n, 2), generator=order)
        flips = (torch.rand(n, generator=order) < 0.5) & self.config.flip

        def read(part: Tensor) -> tuple[Tensor, Tensor]:
            moved = crop_and_flip(images[part], shifts[part], flips[part], pad)
            return pixels(moved, self.sets.levels), labels[part]

        return Parts(even_shares(rows, self.config.batch, self.config.devices), read)

    def validation(self) -> Sequence[Iterable]:
        """Validation set, and the test set beside it; the test set alone where there is no other (as in the paper)."""
        return [self._plain(self.sets.validation), self.test()] if len(self.sets.validation) else [self.test()]

    def test(self) -> Iterable:
        return self._plain(self.sets.test)

    def _plain(self, images: Images) -> Iterable:
        def read(part: Tensor) -> tuple[Tensor, Tensor]:
            return pixels(images.images[part], self.sets.levels), images.labels[part]

        return Parts(torch.arange(len(images)).split(in_tests(len(images), self.config.devices)), read)


def in_tests(n: int, devices: int) -> int:
    """Return the size of batches in tests: each device needs at least one batch."""
    return min(128, max(1, n // devices))


@dataclass(frozen=True)
class Read:
    """Decodes pictures. seed: of random crops, for each row its own; None: the middle."""

    pictures: folder.Index
    size: int
    flip: bool = False
    seed: int | None = None

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        paths = [self.pictures.paths[row] for row in rows.tolist()]
        if self.seed is None:
            crops = folder.centre_crops(paths, self.size * 8 // 7, self.size)
        else:
            crops = torch.cat([self._drawn(path, row) for path, row in zip(paths, rows.tolist(), strict=True)])
        return pixels(crops, 255), self.pictures.labels[rows]

    def _drawn(self, path: Path, row: int) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed or 0) + row)
        crop = folder.random_crops([path], self.size, generator)
        return crop.flip(3) if self.flip and torch.rand((), generator=generator) < 0.5 else crop


@dataclass(frozen=True)
class FolderBatches:
    """Batches of pictures in folders, decoded on demand."""

    pictures: folder.Pictures
    config: ImagesConfig

    @property
    def n_classes(self) -> int:
        return len(self.pictures.train.classes)

    @property
    def n_test(self) -> int:
        return len(self.pictures.val)

    def _rows(self) -> tuple[Tensor, Tensor]:
        n, n_validation = len(self.pictures.train), self.config.n_validation
        order = torch.randperm(n, generator=torch.Generator().manual_seed(SPLIT))
        return order[n_validation:], order[:n_validation]

    def train(self, epoch: int, order: torch.Generator, subsample: torch.Generator) -> Iterable:
        rows, _ = self._rows()
        seed = int(torch.randint(2**62, (), generator=order))
        read = Read(self.pictures.train, self.config.size, self.config.flip, seed)
        shuffled = rows[torch.randperm(len(rows), generator=order)]
        return Parts(even_shares(shuffled, self.config.batch, self.config.devices), read, self.config.workers)

    def validation(self) -> Sequence[Iterable]:
        _, rows = self._rows()
        read = Read(self.pictures.train, self.config.size)
        return [self._parts(rows, read), self.test()] if len(rows) else [self.test()]

    def test(self) -> Iterable:
        read = Read(self.pictures.val, self.config.size)
        return self._parts(torch.arange(len(self.pictures.val)), read)

    def _parts(self, rows: Tensor, read: Read) -> Parts:
        return Parts(rows.split(in_tests(len(rows), self.config.devices)), read, self.config.workers)


def batches(config: ImagesConfig, given: Path | None) -> Augmented | FolderBatches:
    place = data_dir(given)
    require_known("data", config.data, KNOWN)
    if min(config.batch, config.devices, config.epochs) < 1 or config.batch % config.devices:
        what = f"batch = {config.batch}, devices = {config.devices}, epochs = {config.epochs}"
        raise BadOption(f"{what}: all must be 1 or more, and the devices must divide the batch.")
    if config.data == "folder":
        if config.n_train is not None or config.n_test is not None:
            raise BadOption("n_train and n_test are not for folders: all pictures are used.")
        pictures = folder.index(place)
        found, n = FolderBatches(pictures, config), len(pictures.train) - config.n_validation
        n_validation, n_test = config.n_validation, len(pictures.val)
    else:
        sets = LOADERS[config.data](config, place)
        found, n, n_validation, n_test = Augmented(sets, config), len(sets.train), len(sets.validation), len(sets.test)
    if config.batch > n:
        raise BadOption(f"A batch of {config.batch} is more than the {n} images to train with: set batch={max(n, 1)}.")
    if min(n_validation or n_test, n_test) < config.devices:
        what = f"{n_validation} images for validation and {n_test} for the test"
        raise BadOption(f"{what} are too few for {config.devices} devices.")
    return found


# Networks

STRIDES = {"digits": 1, "mnist": 2, "cifar10": 2, "folder": 4}  # of the small networks' stem


def network(config: ImagesConfig, n_classes: int) -> Network:
    normalise, norm = Normalise(*NORMALISE[config.data]), ode_resnet.NORMS.get(config.norm, ode_resnet.batch_norm)
    n_in, stride, solve = len(NORMALISE[config.data][0]), STRIDES[config.data], solve_of(config)
    make: dict[str, Callable[[], Network]] = {
        "small": lambda: ode_resnet.small(normalise, n_classes, solve, norm, n_in, stride),
        "stack": lambda: ode_resnet.node_stack(normalise, n_classes, solve, norm, n_in, stride),
        "resnet18": lambda: ode_resnet.resnet18(normalise, n_classes, solve, norm, "small", n_in),
        "resnet18_large": lambda: ode_resnet.resnet18(normalise, n_classes, solve, norm, "large", n_in),
    }
    require_known("network", config.network, make)
    require_known("norm", config.norm, (*ode_resnet.NORMS, "sync"))
    found = make[config.network]()
    for block in found.blocks():
        for part in block.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.momentum = config.momentum_in_f
    if config.channels_last:
        found.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if config.norm == "sync":
        nn.SyncBatchNorm.convert_sync_batchnorm(found)  # in place
    return found


# Training


def trained(config: ImagesConfig, run: Run) -> tuple[Trained, Augmented | FolderBatches]:
    if config.norm == "sync" and not torch.cuda.is_available():
        raise BadOption("SyncBatchNorm is for GPUs; without, --set norm=group does not depend on the processes either.")
    devices_of(run)  # raises what is wrong with them, before anything is read
    found = batches(config, run.data_dir)
    optimizer = partial(torch.optim.SGD, lr=config.lr, momentum=0.9, weight_decay=config.weight_decay)
    schedule = (
        partial(torch.optim.lr_scheduler.MultiStepLR, milestones=list(config.drops))
        if config.drops
        else partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=config.epochs)
    )
    make = lambda: Classifier(network(config, found.n_classes), found.n_classes, optimizer, schedule)  # noqa: E731
    with published_tolerances():
        return train(run, make, found, config.epochs), found


def main(config: ImagesConfig, run: Run) -> dict[str, Any]:
    done, found = trained(config, run)
    return summary(config, run, done, found)


def summary(config: ImagesConfig, run: Run, done: Trained, found: Augmented | FolderBatches) -> dict[str, Any]:
    """Results of a run. test_accuracy: of the epoch that was best in validation; published: best in the test."""
    parameters = sum(p.numel() for p in done.module.parameters())
    by_epoch = run.metrics.get("watched_accuracy") or run.metrics["validation_accuracy"]
    return {
        "test_accuracy": done.best["test_accuracy"],
        "best_epoch": done.best_epoch,
        "chosen_by": "validation" if "watched_accuracy" in run.metrics else "test",
        "test_accuracy_last": done.last["test_accuracy"],
        "test_accuracy_of_best_test_epoch": max(by_epoch),
        "evaluations": {name: run.metrics[f"evaluations_{name}"][-1] for name in ("forward", "backward")},
        "parameters": parameters,
        "peak_bytes": _peak_of_a_step(run, done, found) if parameters < LARGE else None,
        "seeds": done.seeds,
    }


LARGE = 1_000_000  # parameters: then memory is what `feasibility` measures, and a processor would take long


def _peak_of_a_step(run: Run, done: Trained, found: Augmented | FolderBatches) -> int:
    batch: Any = next(iter(found.train(0, run.generator("order", 0), run.generator("subsample", 0))))
    network: Any = done.module.network
    return one_step(network, batch).peak_bytes
