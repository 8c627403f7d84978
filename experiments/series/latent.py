"""Table 4: a latent ODE that fills the gaps in trajectories of MuJoCo's Hopper, by gradient method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import torchmali as tm
from experiments.data import data_dir, hopper
from experiments.data.source import DataError
from experiments.engine.batches import Parts, even_shares, shares_in_tests
from experiments.engine.measure import by_h, live_peak
from experiments.engine.record import RUNS
from experiments.engine.task import Run, TrainedConfig
from experiments.engine.trainer import LoggingModule, log_solves, train
from experiments.models.latent_ode import LatentODE, Loss, errors, log_likelihood
from experiments.models.recurrent import Recurrent
from experiments.series import solving
from torchmali.nn import ODEBlock

WINDOWS = 1991  # seed of the published windows
FRACTIONS = (0.1, 0.2, 0.5)
SIZES = (0.005, 0.0025, 0.00125, 0.000625)  # of fixed steps, 1, 2, 4, 8 to an output: memory is measured for them


@dataclass(frozen=True)
class LatentConfig(TrainedConfig):
    """Settings of a latent ODE. fraction: of the 100 times, observed. n: trajectories, 80 % to train with.

    h: of the fixed steps of MALI; the others adapt with rtol and atol, as MALI does with --method free.
    """

    method: str = "mali"
    fraction: float = 0.1
    n: int = 1000
    n_simulated: int = 10_000  # all are normalised together
    latent: int = 15
    hidden: int = 20
    units: int = 100
    gru_units: int = 50
    layers: int = 2
    epochs: int = 60
    batch: int = 50
    lr: float = 1e-2
    kl_wait: int = 3  # epochs without the divergence
    h: float = 0.005
    rtol: float = 1e-3
    atol: float = 1e-4
    eta: float = 1.0
    unsafe_damping: bool = False


PRESETS = {
    "smoke": LatentConfig(n=40, n_simulated=40, units=20, gru_units=20, epochs=2, batch=16),
    "cpu": LatentConfig(),
    "paper": LatentConfig(n=10_000, hidden=30, units=300, gru_units=100, layers=3, epochs=300, kl_wait=10),
}
NETWORKS = ("rnn", "gru_d")
NAMES = (*solving.NAMES, *NETWORKS)


def block(config: LatentConfig, times: Sequence[float]) -> Callable[[nn.Module], ODEBlock]:
    """Make the module of the generative solve."""
    solve = solving.solve_of(config, naive=tm.Dopri5(), adaptive=(*solving.ADAPTIVE, "naive", "aca"))
    return partial(ODEBlock, t=times, all_outputs=True, **solve.options())


def network(config: LatentConfig, times: Sequence[float]) -> nn.Module:
    solving.check(config, NAMES)
    if config.method in NETWORKS:
        return Recurrent(hopper.N_CHANNELS, config.latent, config.units, decays=config.method == "gru_d")
    return latent_ode(config, block(config, times))


def latent_ode(config: LatentConfig, block: Callable[[nn.Module], nn.Module]) -> LatentODE:
    sizes = (hopper.N_CHANNELS, config.latent, config.hidden, config.units, config.gru_units, config.layers)
    return LatentODE(block, *sizes)


# Data


def trajectories(config: LatentConfig, folder: Path | None, tell: Callable[[str], None]) -> tuple[Tensor, str]:
    """Load or simulate trajectories, normalise them, cut a window of each, keep the first n; and say where from.

    folder: that of the data, if they are not to be looked for. tell: is told how far a simulation has come.
    """
    place = data_dir(folder)
    if config.n_simulated == 10_000 and place is not None and (place / "HopperPhysics").is_dir():
        x, source = hopper.load(place).float(), "file"
    else:
        progress: Any = lambda done, of: tell(f"simulating {done} of {of}")  # noqa: E731
        x, source = hopper.simulate(config.n_simulated, folder=RUNS / "data", tell=progress), "simulated"
    if config.n > len(x):
        raise DataError(f"n = {config.n}: there are {len(x):,} trajectories.")
    windows = hopper.windows(hopper.normalise(x), np.random.RandomState(WINDOWS))
    return windows[: config.n], f"{source}, {len(x):,} trajectories"


@dataclass(frozen=True)
class Gappy:
    """Batches (x, values, mask) in the published order, which is that of the data. Gaps are drawn anew for each."""

    train_set: Tensor
    test_set: Tensor
    fraction: float
    batch: int
    test_seed: int
    devices: int = 1

    def train(self, epoch: int, order: torch.Generator, subsample: torch.Generator) -> Iterable:
        shares = even_shares(torch.arange(len(self.train_set)), self.batch, self.devices)
        return self._parts(self.train_set, shares, subsample)

    def validation(self) -> Sequence[Iterable]:
        return [self.test()]

    def test(self) -> Iterable:
        shares = shares_in_tests(torch.arange(len(self.test_set)), len(self.test_set), self.devices)
        return self._parts(self.test_set, shares, torch.Generator().manual_seed(self.test_seed))

    def _parts(self, x: Tensor, shares: Sequence[Tensor], generator: torch.Generator) -> Iterable:
        observed = hopper.observe(x, self.fraction, generator)  # for all at once: the same in batches of any size

        def read(rows: Tensor) -> tuple[Tensor, ...]:
            return x[rows], observed.values[rows], observed.mask[rows]

        return Parts(shares, read)


# Training


class GapFiller(LoggingModule):
    """A network that fills gaps, with the published loss and optimizer (Adamax, lr falls by 0.1 % a step)."""

    def __init__(self, network: nn.Module, times: Tensor, lr: float, kl_wait: int):
        super().__init__()
        self.network, self.times, self.lr, self.kl_wait = network, times, lr, kl_wait

    def loss(self, batch: tuple[Tensor, ...], kl_weight: float) -> Loss:
        x, values, mask = batch
        if isinstance(self.network, LatentODE):
            return self.network.loss(x, values, mask, self.times, kl_weight)
        found = self.network(values, mask, self.times)
        return Loss(-log_likelihood(found, x).mean(), *errors(found, x))

    def kl_weight(self, epoch: int) -> float:
        over = epoch - self.kl_wait
        return 0.0 if over < 0 else 1 - 0.99**over

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        loss = self.loss(batch, self.kl_weight(self.current_epoch))
        self.note("train_loss", loss.total, batch)
        self.note("train_mse", loss.mse, batch)
        return loss.total

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(self.network, LatentODE):
            log_solves(self, self.network.generate)

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.note("validation_mse", self.loss(batch, 0.0).mse, batch)

    def test_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        loss = self.loss(batch, 0.0)
        self.note("test_mse", loss.mse, batch)
        self.note("test_mse_later", loss.later, batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adamax(self.parameters(), self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 0.999**step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(config: LatentConfig, run: Run) -> dict[str, Any]:
    found, source = trajectories(config, run.data_dir, partial(run.tell, 0.0))
    train_set, test_set = hopper.train_test(found)
    times = hopper.times(train_set.shape[1])
    batches = Gappy(train_set, test_set, config.fraction, config.batch, run.seed("gaps of the test"), config.devices)

    def make() -> GapFiller:
        return GapFiller(network(config, times.tolist()), times, config.lr, config.kl_wait)

    batch = next(iter(batches.train(0, run.generator(), run.generator())))
    run.so_far = {
        "mean_predictor_mse": mean_predictor(train_set, test_set),
        "parameters": sum(p.numel() for p in make().parameters()),
        "peak_bytes": live_peak(partial(one_step, make(), batch)),
        "source": source,
    }
    done = train(run, make, batches, config.epochs, best="validation_mse", lowest=True)
    return {
        **run.so_far,
        "peak_bytes": live_peak(partial(one_step, done.module, batch)),
        "peak_bytes_by_h": peaks(config, done.module),
        "test_mse": done.last["test_mse"],
        "test_mse_later": done.last["test_mse_later"],
        "test_mse_of_best_epoch": min(run.metrics["validation_mse"]),
        "shown": shown(done.module, next(iter(batches.test()))) if config.seed == 0 else None,
        "seeds": done.seeds,
    }


N_SHOWN, CHANNELS_SHOWN = 3, (0, 1, 2, 9)  # positions x, z, the body's angle; the speed of that


@torch.no_grad()
def shown(module: Any, batch: tuple[Tensor, ...]) -> list[dict[str, Any]]:
    """The first test series: all of it, the observed times, and what the network rebuilt (a latent ODE, by sample)."""
    torch.manual_seed(0)
    x, values, mask = (part[:N_SHOWN] for part in batch)
    found = module.network.eval()(values, mask, module.times)
    found = found[0] if isinstance(found, tuple) else found[None]

    def numbers(part: Tensor) -> list:
        return [[round(value, 4) for value in row] for row in part[:, CHANNELS_SHOWN].T.tolist()]

    return [
        {
            "x": numbers(x[i]),
            "observed": mask[i, :, 0].nonzero().flatten().tolist(),
            "rebuilt": [numbers(sample[i]) for sample in found],
        }
        for i in range(len(x))
    ]


def mean_predictor(train_set: Tensor, test_set: Tensor) -> float:
    """The error of predicting the mean of each channel."""
    return float((test_set - train_set.mean((0, 1))).square().mean())


def one_step(module: Any, batch: tuple[Tensor, ...]) -> None:
    module.zero_grad(set_to_none=True)
    module.loss(batch, 0.0).total.backward()


def peaks(config: LatentConfig, module: Any) -> dict[str, int]:
    """Peak bytes of the generative solve alone: the encoder is the same for all methods, and needs more."""
    if config.method in NETWORKS:
        return {}
    block, z0 = module.network.generate, torch.randn(3, config.batch, config.latent, requires_grad=True)
    return by_h(block, SIZES, lambda: block(z0).square().mean().backward())
