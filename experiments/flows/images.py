"""Table 6: images as samples of a continuous flow (FFJORD, RNODE), by gradient method: bits per dimension, samples."""

from __future__ import annotations

import base64
import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import torchmali as tm
from experiments.data import cifar, data_dir, digits, folder, mnist
from experiments.data.source import DataError
from experiments.engine.batches import Parts, even_shares, shares_in_tests
from experiments.engine.measure import live_peak
from experiments.engine.task import BadOption, Run, Task, TrainedConfig, require_known
from experiments.engine.trainer import LoggingModule, Trained, evaluating, log_solves, train
from experiments.flows.evaluation import EVALUATION, evaluation, solved_by
from experiments.methods import Method, Solve, pick, published_tolerances
from experiments.models.ffjord import FFJORD, Logit, bits_per_dim, log_prob
from torchmali.nn import CNF, Hutchinson, gaussian

SPLIT = 0


@dataclass(frozen=True)
class FlowsConfig(TrainedConfig):
    """Settings of a flow. None: for rtol, atol those of the method; for n_train, n_test all.

    weight: of both regularisers in the loss, for methods without a weight of their own. side: images are averaged to
    this side; None: they are not. batches: of training, in an epoch. workers: threads that read pictures.
    """

    data: str = "digits"  # mnist, cifar10, folder
    method: str = "mali"
    side: int | None = None
    widths: tuple[int, ...] = (32, 32)
    n_blocks: int = 1
    alpha: float = 0.05
    weight: float = 0.05
    rtol: float | None = None
    atol: float | None = None
    n_train: int | None = None
    n_validation: int = 270
    n_test: int | None = None
    epochs: int = 10
    batches: int = 40
    batch: int = 64
    lr: float = 5e-3
    warmup: int = 20
    flip: bool = False
    workers: int = 0


SMALL = FlowsConfig(n_train=5000, n_validation=200, n_test=500, batches=25, batch=32)
PAPER = FlowsConfig(
    widths=(64, 64, 64), n_blocks=2, alpha=1e-5, n_validation=1000, epochs=50, batch=200, lr=1e-3,
    warmup=1000,
)  # fmt: skip
PRESETS = {
    "smoke": FlowsConfig(widths=(8,), n_train=64, n_validation=16, n_test=16, epochs=1, batches=3, batch=32),
    "cpu": FlowsConfig(),
    "cpu-mnist": replace(SMALL, data="mnist", side=14),
    "cpu-cifar10": replace(SMALL, data="cifar10", side=16, flip=True, batch=20, epochs=8),
    "cpu-mnist-long": replace(SMALL, data="mnist", side=14, epochs=20),  # for pictures
    "paper-mnist": replace(PAPER, data="mnist", batches=295),
    "paper-cifar10": replace(PAPER, data="cifar10", batches=245, flip=True),
    "paper-imagenet64": replace(PAPER, data="folder", side=64, batch=60, batches=21_000, weight=0.01, workers=8),
}


# Methods


class FlowMethod(NamedTuple):
    """A method with the solver and tolerances as published. weight: of the regularisers; None: the config's.

    The published ALF never renews v; ours does where it must.
    """

    method: Method
    weight: float | None = None
    adaptive: bool = True


LOOSE = {"rtol": 1e-2, "atol": 1e-3}
METHODS = {
    "vanilla": FlowMethod(pick("adjoint", label="FFJORD (vanilla)"), 0.0),
    "rnode": FlowMethod(pick("adjoint", label="RNODE", fixed=tm.RK4()), 0.01, adaptive=False),
    "rnode05": FlowMethod(pick("adjoint", label="RNODE, weights 0.05", fixed=tm.RK4()), 0.05, adaptive=False),
    "seminorm": FlowMethod(pick("seminorm", label="SemiNorm"), 0.0),
    "aca": FlowMethod(pick("aca", **LOOSE)),
    "naive": FlowMethod(pick("naive", solver=tm.HeunEuler(), **LOOSE)),
    "mali": FlowMethod(pick("mali", **LOOSE)),
    "mali01": FlowMethod(pick("mali", label="MALI, weights 0.01", **LOOSE), 0.01),
    "alf4": FlowMethod(pick("alf4", **LOOSE)),
}
H = 0.25  # of fixed steps, and the first of those that adapt


def method_of(config: FlowsConfig) -> FlowMethod:
    require_known("method", config.method, METHODS)
    return METHODS[config.method]


def weight(config: FlowsConfig) -> float:
    own = method_of(config).weight
    return config.weight if own is None else own


def solve_of(config: FlowsConfig) -> Solve:
    """Solver, controller and gradient method of the flows in training."""
    method, _, adaptive = method_of(config)
    if adaptive:
        return method.adaptive_steps(config.rtol, config.atol, h0=H)
    if (config.rtol, config.atol) != (None, None):
        raise BadOption(f"{config.method} has fixed steps: leave out rtol and atol.")
    return method.fixed_steps(H)


def network(config: FlowsConfig, shape: tuple[int, int, int]) -> FFJORD:
    regularised, options = weight(config) > 0, solve_of(config).options()
    cnf = partial(CNF, trace=Hutchinson(gaussian), kinetic=regularised, jacobian=regularised, **options)
    return FFJORD(cnf, shape, config.widths, config.n_blocks, config.alpha)


# Data


@dataclass(frozen=True)
class Decoded:
    """Pictures that are read on demand."""

    paths: Sequence[Path]
    side: int

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: Tensor | slice) -> Tensor:
        wanted = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        return folder.centre_crops([self.paths[row] for row in wanted], self.side, self.side)


class Pixels(NamedTuple):
    """Sets of images (image, channel, height, width), each pixel one of 0 to levels - 1."""

    train: Tensor | Decoded
    validation: Tensor | Decoded
    test: Tensor | Decoded
    levels: int


def load(config: FlowsConfig, given: Path | None) -> Pixels:
    place = data_dir(given)
    if config.data == "digits":
        n_test = 270 if config.n_test is None else config.n_test
        train, validation, test = (x.images[:, None] for x in digits.load(SPLIT, config.n_validation, n_test))
        return Pixels(_first(train, config.n_train), validation, test, 17)
    if config.data in ("mnist", "cifar10"):
        loader: Any = {"mnist": mnist.load, "cifar10": partial(cifar.load, require_all=config.n_train is None)}
        train, test = loader[config.data](place, "train").images, loader[config.data](place, "test").images
        train, test = (x[:, None] if x.ndim == 3 else x for x in (train, test))
        return _pooled(config, train, test)
    if config.data == "folder":
        pictures = folder.index(place)
        order = torch.randperm(len(pictures.train), generator=torch.Generator().manual_seed(SPLIT)).tolist()
        paths, n = [pictures.train.paths[row] for row in order], _n_train(config, len(order))
        parts = paths[:n], paths[n : n + config.n_validation], pictures.val.paths[: config.n_test]
        train, validation, test = (Decoded(part, config.side or 64) for part in parts)
        return Pixels(train, validation, test, 256)
    raise BadOption(f"There is no data {config.data!r}; there are digits, mnist, cifar10, folder.")


def _pooled(config: FlowsConfig, train: Tensor, test: Tensor) -> Pixels:
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(SPLIT))
    n = _n_train(config, len(train))
    parts = [train[order[:n]], train[order[n : n + config.n_validation]], _first(test, config.n_test)]
    if config.side is not None:
        k, rest = divmod(train.shape[-1], config.side)
        if rest or k < 1:
            raise BadOption(f"side = {config.side}: it must divide {train.shape[-1]}.")
        parts = [F.avg_pool2d(x.float(), k).floor().to(torch.uint8) for x in parts]
    return Pixels(parts[0], parts[1], parts[2], 256)


def _n_train(config: FlowsConfig, there: int) -> int:
    n = there - config.n_validation if config.n_train is None else config.n_train
    if n < 1 or n + config.n_validation > there:
        raise DataError(f"{there:,} images are too few for {max(n, 1):,} and {config.n_validation:,}.")
    return n


def _first(images: Tensor, n: int | None) -> Tensor:
    if n is not None and not 0 < n <= len(images):
        raise DataError(f"{n} images are asked for: there are {len(images):,}.")
    return images if n is None else images[:n]


@dataclass(frozen=True)
class Drawn:
    """Batches of images, in an order that is drawn anew whenever all images were seen."""

    pixels: Pixels
    config: FlowsConfig

    def train(self, epoch: int, order: torch.Generator, subsample: torch.Generator) -> Iterable:
        images, n = self.pixels.train, self.config.batch * self.config.batches
        passes = math.ceil(n / len(images))
        rows = torch.cat([torch.randperm(len(images), generator=order) for _ in range(passes)])[:n]
        flips = (torch.rand(n, generator=order) < 0.5) & self.config.flip

        def read(part: Tensor) -> tuple[Tensor]:
            x = images[rows[part]].float()
            return (torch.where(flips[part, None, None, None], x.flip(3), x),)

        return Parts(even_shares(torch.arange(n), self.config.batch, self.config.devices), read, self.config.workers)

    def validation(self) -> Sequence[Iterable]:
        return [self._plain(self.pixels.validation)]

    def test(self) -> Iterable:
        return self._plain(self.pixels.test)

    def _plain(self, images: Tensor | Decoded) -> Iterable:
        rows = shares_in_tests(torch.arange(len(images)), 128, self.config.devices)
        return Parts(rows, lambda part: (images[part].float(),), self.config.workers)


# Training


class ImageFlow(LoggingModule):
    """A flow of images, trained for few bits per dimension by Adam, whose lr grows over the first steps.

    Batches are (pixels,), of so many levels. weight: of both regularisers.
    """

    def __init__(self, network: FFJORD, levels: int, weight: float, lr: float, warmup: int):
        super().__init__()
        self.network, self.levels, self.weight, self.lr, self.warmup = network, levels, weight, lr, warmup

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss, bits = self.loss(batch[0], torch.rand(batch[0].shape, device=batch[0].device))
        self.note("train_loss", loss, batch)
        self.note("train_bits", bits, batch)
        return loss

    def loss(self, pixels: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mapped = self.network((pixels + noise) / self.levels)
        bits = bits_per_dim(log_prob(mapped), mapped.z.shape[1], self.levels).mean()
        return bits + self.weight * (mapped.kinetic + mapped.jacobian).mean(), bits

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        log_solves(self, self.network)

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.note("validation_bits", self.bits(batch[0], batch_idx), batch)

    def test_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.note("test_bits", self.bits(batch[0], batch_idx), batch)
        self.note("test_bits_midpoint", self.bits(batch[0], batch_idx, midpoint=True), batch)

    def bits(self, pixels: Tensor, seed: int, midpoint: bool = False, solve: Solve = EVALUATION) -> Tensor:
        """Mean bits per dimension; the noise of pixels and of the trace is the same each time."""
        gpus = [pixels.device] if pixels.device.type == "cuda" else []
        with torch.random.fork_rng(gpus), solved_by(self.network.flows(), solve):
            torch.manual_seed(seed)
            noise = torch.rand(pixels.shape)
            x = (pixels + (0.5 if midpoint else noise.to(pixels.device))) / self.levels
            mapped = self.network(x)
        return bits_per_dim(log_prob(mapped), mapped.z.shape[1], self.levels).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(config: FlowsConfig, run: Run) -> dict[str, Any]:
    pixels = load(config, run.data_dir)
    if config.batch > len(pixels.train):
        raise BadOption(f"A batch of {config.batch} is more than the {len(pixels.train)} images to train with.")
    shape: Any = tuple(pixels.train[:1].shape[1:])
    batches = Drawn(pixels, config)

    def make() -> ImageFlow:
        return ImageFlow(network(config, shape), pixels.levels, weight(config), config.lr, config.warmup)

    n_shown = max(1, min(SHOWN, 60_000 // math.prod(shape)))
    solved = {name: str(value) for name, value in solve_of(config).options().items()}
    with published_tolerances():
        torch.manual_seed(run.seed("init"))
        run.so_far = {
            "untrained_validation_bits": None if run.replaying else untrained_bits(run, make(), batches),
            "solved": {**solved, "weight": weight(config)},
        }
        done = train(run, make, batches, config.epochs, best="validation_bits", lowest=True)
        return {**run.so_far, **summary(config, run, done, pixels, batches, shape, n_shown)}


def untrained_bits(run: Run, module: ImageFlow, batches: Drawn) -> float:
    with evaluating(run, module) as device:
        return mean_bits(module, batches.validation()[0], device)


def summary(
    config: FlowsConfig, run: Run, done: Trained, pixels: Pixels, batches: Drawn, shape: Sequence[int], n_shown: int
) -> dict[str, Any]:
    """Results of a run, evaluated on its device."""
    module: Any = done.module
    with evaluating(run, module) as device:
        return {
            "test_bits": done.last["test_bits"],
            "test_bits_midpoint": done.last["test_bits_midpoint"],
            "test_bits_of_best_epoch": done.best["test_bits"],
            "best_epoch": done.best_epoch,
            "test_bits_by_solver": by_solver(module, pixels.test[:128].float().to(device)),
            "gaussian_bits": gaussian_bits(config, pixels),
            "parameters": sum(p.numel() for p in module.parameters()),
            "peak_bytes": peak_bytes(
                module, next(iter(batches.train(0, run.generator(), run.generator())))[0].to(device)
            ),
            **round_trip(module, pixels.test[:64].to(device)),
            "samples": packed(samples(module, shape, n_shown, run.seed("samples"))),
            "real": packed(pixels.test[:n_shown]),
            "shape": shape,
            "levels": pixels.levels,
            "n_train": len(pixels.train),
            "seeds": done.seeds,
        }


SHOWN = 36
MANY = 5000


def gaussian_bits(config: FlowsConfig, pixels: Pixels) -> float:
    """Bits of a normal distribution with independent dimensions, fitted in the space of logits: a baseline."""
    logit, generator = Logit(config.alpha), torch.Generator().manual_seed(0)

    def mapped(x: Tensor) -> tuple[Tensor, Tensor]:
        y, log_det = logit((x.double() + torch.rand(x.shape, generator=generator)) / pixels.levels)
        return y.flatten(1), log_det

    y, _ = mapped(pixels.train[:MANY])
    normal = torch.distributions.Normal(y.mean(0), y.std(0))
    y, log_det = mapped(pixels.test[:MANY])
    return float(bits_per_dim(normal.log_prob(y).sum(1) + log_det, y.shape[1], pixels.levels).mean())


@torch.no_grad()
def mean_bits(module: ImageFlow, batches: Iterable, device: torch.device) -> float:
    found = [(len(x), float(module.bits(x.to(device), i))) for i, (x,) in enumerate(batches)]
    return sum(n * bits for n, bits in found) / sum(n for n, _ in found)


@torch.no_grad()
def by_solver(module: ImageFlow, pixels: Tensor) -> dict[str, float]:
    """Bits by several solvers, with the same noise: two solvers agree where both integrals are good."""
    solves = {
        "Dopri5 1e-5": EVALUATION,
        "ALF h 0.05": evaluation(tm.ALF(), tm.FixedStep(0.05)),
        "ALF h 0.025": evaluation(tm.ALF(), tm.FixedStep(0.025)),
        "ALF order 4, h 0.05": evaluation(tm.ALF(order=4), tm.FixedStep(0.05)),
    }
    return {name: float(module.bits(pixels, 0, solve=solve)) for name, solve in solves.items()}


@torch.no_grad()
def round_trip(module: ImageFlow, pixels: Tensor) -> dict[str, float]:
    """Largest difference of x from the inverse of its z: by Dopri5 at 1e-5, and in float64 at 1e-8."""

    def there_and_back(network: FFJORD, x: Tensor, solve: Solve) -> float:
        with solved_by(network.flows(), solve):
            return float((network.inverse(network(x).z) - x).abs().max())

    x, fine = (pixels.cpu().double() + 0.5) / module.levels, evaluation(tm.Dopri5(), tm.AdaptiveStep(1e-8, 1e-8))
    return {
        "round_trip": there_and_back(module.network, x.float().to(pixels.device), EVALUATION),
        "round_trip_fine": there_and_back(copy.deepcopy(module.network).cpu().double(), x, fine),
    }


@torch.no_grad()
def samples(module: ImageFlow, shape: Sequence[int], n: int, seed: int, temperature: float = 1.0) -> Tensor:
    """Samples as pixels. temperature: below 1, images that are more likely, and more alike."""
    z = torch.randn(n, math.prod(shape), generator=torch.Generator().manual_seed(seed))
    with solved_by(module.network.flows(), EVALUATION), published_tolerances():
        x = module.network.inverse(temperature * z.to(next(module.parameters()).device)).cpu()
    return (x * module.levels).floor().clamp(0, module.levels - 1)


def sampled(task: Task, n: int, seed: int, temperature: float) -> tuple[Tensor, Tensor, int]:
    """Images of the test, images by the weights of a finished run, and the levels of their pixels."""
    record = task.finished()
    weights_there = [path for path in (task.folder / "weights.pt", task.weights) if path.exists()]
    if record is None or not weights_there:
        raise BadOption(f"There are no weights of this run: {task.command}")
    config: Any = task.config
    shape: Any = tuple(record.results["shape"])
    module = ImageFlow(network(config, shape), record.results["levels"], 0.0, config.lr, config.warmup)
    module.load_state_dict(torch.load(weights_there[0], weights_only=True))
    return unpacked(record.results["real"], shape), samples(module, shape, n, seed, temperature), module.levels


def packed(pixels: Tensor) -> str:
    return base64.b64encode(pixels.to(torch.uint8).cpu().numpy().tobytes()).decode()


def unpacked(text: str, shape: Sequence[int]) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).view(-1, *shape)


def peak_bytes(module: ImageFlow, pixels: Tensor) -> int:
    """Peak bytes of live tensors in one training step."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    return live_peak(lambda: module.loss(pixels, torch.full_like(pixels, 0.5))[0].backward())
