"""The smallest training: scikit-learn's digits, by a network with an ODE in the middle. Needs no files of data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import torchmali as tm
from experiments.runner import BadOption, Config, Run
from torchmali.nn import ODEBlock

N_VALIDATION, N_TEST = 360, 360
Images = tuple[Tensor, Tensor]  # with their labels
SPLIT_SEED = 0  # not the config's: the test images are the same in every run

METHODS = ("naive", "adjoint", "seminorm", "aca", "mali")
GRADIENTS: dict[str, tuple[tm.GradientMethod, str]] = {  # with the solver that the paper gives it
    "naive": (tm.Naive(), "dopri5"),
    "adjoint": (tm.Adjoint(), "dopri5"),
    "seminorm": (tm.Adjoint(seminorm=True), "dopri5"),
    "aca": (tm.ACA(), "heun_euler"),
    "mali": (tm.MALI(), "alf"),
}
SOLVERS: dict[str, tm.Solver] = {"alf": tm.ALF(), "heun_euler": tm.HeunEuler(), "dopri5": tm.Dopri5()}


@dataclass(frozen=True)
class DigitsConfig(Config):
    """h: of ALF and Heun-Euler; Dopri5 chooses its own by rtol and atol. n_per_epoch: images drawn; None: all."""

    method: str = "mali"
    solver: str | None = None  # None: that of the method
    h: float = 0.25
    rtol: float = 1e-2
    atol: float = 1e-2
    channels: int = 16
    dropout: float = 0.25
    epochs: int = 20
    batch: int = 64
    lr: float = 4e-3
    n_per_epoch: int | None = None


PRESETS = {"smoke": DigitsConfig(epochs=2, channels=4, n_per_epoch=128), "cpu": DigitsConfig()}


def read_digits() -> tuple[Images, Images, Images]:
    """Images and labels to learn from, to choose an epoch by, and to test with."""
    from sklearn.datasets import load_digits

    pixels, labels = (torch.as_tensor(x) for x in load_digits(return_X_y=True))
    images = (pixels / 16).float().view(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    n_train = len(images) - N_VALIDATION - N_TEST
    train, validation, test = order.split([n_train, N_VALIDATION, N_TEST])
    return (images[train], labels[train]), (images[validation], labels[validation]), (images[test], labels[test])


class Field(nn.Module):
    """f in dz/dt = f(t, z): two convolutions. No dropout or batch statistics: f has to be pure."""

    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(4, channels),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.layers(z)


def network(config: DigitsConfig) -> nn.Module:
    """Stem, ODE block, head: 8 x 8 grey images to 10 logits."""
    n = config.channels
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, n, 3, padding=1), nn.GroupNorm(4, n), nn.ReLU()),
        block(config),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(config.dropout), nn.Linear(16 * n, 10)),
    )


def block(config: DigitsConfig) -> ODEBlock:
    if config.method not in GRADIENTS:
        raise BadOption(f"digits has no method {config.method!r}; it has {', '.join(METHODS)}.")
    gradient, own = GRADIENTS[config.method]
    name = config.solver or own
    if name not in SOLVERS:
        raise BadOption(f"digits has no solver {name!r}; it has {', '.join(SOLVERS)}.")
    adaptive = name == "dopri5"
    controller = tm.AdaptiveStep(config.rtol, config.atol) if adaptive else tm.FixedStep(config.h)
    return ODEBlock(Field(config.channels), solver=SOLVERS[name], controller=controller, gradient=gradient)


def main(config: DigitsConfig, run: Run) -> dict[str, Any]:
    from experiments.training import Classifier, InMemory, train  # takes seconds: not for a list of experiments

    digits = InMemory(*read_digits(), config.batch, config.n_per_epoch)
    n_batches = config.epochs * digits.n_batches
    optimizer = partial(torch.optim.AdamW, lr=config.lr)
    schedule = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=config.lr, total_steps=n_batches)
    trained = train(run, lambda: Classifier(network(config), 10, optimizer, schedule, "step"), digits, config.epochs)
    return {
        "test_accuracy": trained.best["test_accuracy"],
        "best_epoch": trained.best_epoch,
        "test_accuracy_last": trained.last["test_accuracy"],
        "evaluations": {name: run.metrics[f"evaluations_{name}"][-1] for name in ("forward", "backward")},
        "parameters": sum(p.numel() for p in trained.module.parameters()),
        "seeds": trained.seeds,
    }
