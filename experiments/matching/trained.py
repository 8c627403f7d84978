"""What the experiments on a trained flow share: its velocity, images of the test set, and a classifier that judges."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.engine.record import RECORDS, Record
from experiments.engine.task import BadOption, Run
from experiments.matching.training import N_CLASSES, PRESETS, MatchingConfig, load, network
from experiments.models.unet import UNet

COMMAND = "python -m experiments run matching --preset {} --keep-weights"


def velocity(preset: str) -> tuple[UNet, MatchingConfig]:
    """Velocity of the run of `matching` with this preset; untrained for the preset smoke, which keeps no weights."""
    config = PRESETS[preset]
    path = RECORDS / "matching" / f"{preset}.pt"
    if preset == "smoke":
        torch.manual_seed(0)
        net = network(config, 1)
        for p in net.parameters():  # its last layers are zero before training
            nn.init.normal_(p, std=0.1) if not p.any() else None
        return net.eval().requires_grad_(False), config
    if not path.exists():
        raise BadOption(f"There are no weights of flow matching: {COMMAND.format(preset)}")
    config = MatchingConfig(**{**Record.read(path.with_suffix(".json")).config, "widths": config.widths})
    weights = torch.load(path, map_location="cpu", weights_only=True)
    mean = {name.removeprefix("average."): x for name, x in weights.items() if name.startswith("average.")}
    net = network(config, mean["stem.weight"].shape[1] // 4)
    net.load_state_dict(mean)
    return net.eval().requires_grad_(False), config


class Unlabelled(nn.Module):
    """The velocity without labels."""

    def __init__(self, net: UNet):
        super().__init__()
        self.net = net

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.net(t, x, torch.full((len(x),), N_CLASSES, device=x.device))


class Classifier(nn.Module):
    """A small convolutional network; `features` are those before its last layer."""

    def __init__(self, channels: int, side: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 5, stride=2, padding=2), nn.SiLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.SiLU(), nn.Flatten(),
            nn.Linear(32 * (-(-side // 4)) ** 2, 64), nn.SiLU(),
        )  # fmt: skip
        self.head = nn.Linear(64, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        with torch.no_grad():
            return float((self(images).argmax(1) == labels).double().mean())


def classifier(run: Run, config: MatchingConfig, n_images: int) -> tuple[Classifier, dict[str, Any]]:
    """A classifier of the flow's images, trained once for n_images of them, and its accuracy on the test set."""
    path: Path = run.folder / "classifier.pt"
    train_set, test_set = load(config, run.data_dir)
    shape = train_set[0].shape
    torch.manual_seed(run.seed("classifier"))
    net = Classifier(shape[1], shape[2])
    if path.exists():
        net.load_state_dict(torch.load(path, weights_only=True))
    else:
        _train(net, train_set, n_images)
        torch.save(net.state_dict(), path)
    net = copy.deepcopy(net).eval().requires_grad_(False)
    return net, {"classifier_accuracy": net.accuracy(*test_set), "classifier_images": n_images}


def _train(net: Classifier, train_set: tuple[Tensor, ...], n_images: int, batch: int = 64) -> None:
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    n = len(train_set[0])
    rows = torch.cat([torch.randperm(n) for _ in range(-(-n_images // n))])[:n_images]
    for part in rows.split(batch):
        optimizer.zero_grad()
        F.cross_entropy(net(train_set[0][part]), train_set[1][part]).backward()
        optimizer.step()
