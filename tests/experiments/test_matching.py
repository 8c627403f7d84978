"""Flow matching: the network, its loss, couplings of others, and smoke runs."""

import math

import pytest
import torch
from torch import Tensor, nn

import experiments.engine.task as tasks
from experiments.engine.queue import Options, perform
from experiments.engine.record import RECORDS, Record
from experiments.engine.task import BadOption, Task
from experiments.matching import steering, trained
from experiments.matching.couplings import carried, carried_back
from experiments.matching.inversion import METHODS, normality
from experiments.matching.training import N_CLASSES, FlowMatching, MatchingConfig, as_pixels, network
from experiments.registry import EXPERIMENTS


def field(t: float, x: Tensor) -> Tensor:
    return math.cos(3 * t) * torch.sin(x) - 0.5 * x


def start() -> Tensor:
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


ORDERS = {"ALF": 2, "ALF order 4": 4, "Euler": 1, "midpoint": 2, "Reversible(Midpoint)": 2, "EDICT, p 0.93": 1}
ORDERS |= {"BDIA, gamma 0.96": 1, "BDIA, gamma 0.5": 1, "BELM": 2}


@pytest.mark.parametrize("name", METHODS)
def test_a_coupling_has_its_order(name):
    wanted = carried(METHODS["ALF order 4"], field, 1.0, 0.0, 400, start())[0]
    errors = [(carried(METHODS[name], field, 1.0, 0.0, n, start())[0] - wanted).norm() for n in (40, 80)]
    order = math.log2(errors[0] / errors[1])
    assert order > ORDERS[name] - 0.25


@pytest.mark.parametrize("name", METHODS)
def test_couplings_are_undone_to_round_off_and_others_to_their_error(name):
    x = start()
    state = carried(METHODS[name], field, 1.0, 0.0, 20, x)
    error = float((carried_back(METHODS[name], field, 1.0, 0.0, 20, state)[0] - x).abs().max())
    if name in ("Euler", "midpoint"):
        assert 1e-6 < error < 0.1
    else:
        assert error < (1e-9 if "0.5" in name else 1e-13)  # gamma = 0.5 doubles round-off in each step


def test_velocities_depend_on_time_label_and_image():
    torch.manual_seed(0)
    net = network(MatchingConfig(widths=(8, 8)), 1)
    for p in net.parameters():
        nn.init.normal_(p, std=0.1) if not p.any() else None
    x, labels = torch.randn(3, 1, 8, 8), torch.arange(3)
    base = net(torch.tensor(0.3), x, labels)
    assert base.shape == x.shape
    assert torch.allclose(base, net(torch.full((3,), 0.3), x, labels), atol=1e-6)  # a time for each image
    t, nothing = torch.tensor(0.3), torch.full_like(labels, N_CLASSES)
    for other in (net(torch.tensor(0.4), x, labels), net(t, x, nothing), net(t, x + 1, labels)):
        assert not torch.allclose(base, other, atol=1e-3)


def test_the_loss_is_zero_for_the_velocity_of_the_straight_line():
    config = MatchingConfig(widths=(8, 8))
    module = FlowMatching(network(config, 1), config)
    images = torch.randn(16, 1, 8, 8)

    class Straight(nn.Module):
        def forward(self, t: Tensor, x: Tensor, labels: Tensor) -> Tensor:
            return (images - x) / (1 - t[:, None, None, None])

    assert float(module.loss(Straight(), images, torch.zeros(16, dtype=torch.long))) < 1e-6


def test_pixels_are_from_0_to_255():
    assert as_pixels(torch.tensor([-1.3, -1.0, 0.0, 1.0, 2.0])).tolist() == [0, 0, 128, 255, 255]


def test_normal_noise_is_found_normal_and_equal_rows_are_not():
    z = torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = normality(z)
    assert abs(found["mean"]) < 0.05 and abs(found["std"] - 1) < 0.05 and abs(found["neighbours"]) < 0.05
    assert normality(z[..., :1].expand_as(z))["neighbours"] > 0.8


def test_plain_steps_and_checkpoints_take_the_steps_of_the_sampler():
    net, _ = trained.velocity("smoke")
    f, z = trained.Unlabelled(net), 0.3 * torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def loss(x: Tensor) -> Tensor:
        return x.square().sum()

    wanted = steering.gradient(steering.plain, f, z, 9, loss)
    for name in ("checkpoint", "last 5", "last 1"):
        found = steering.gradient(steering.METHODS[name], f, z, 9, loss)
        close = torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
        assert close == (name == "checkpoint")


def test_weights_that_are_not_there_are_told(monkeypatch, tmp_path):
    monkeypatch.setattr(trained, "RECORDS", tmp_path)
    with pytest.raises(BadOption, match="experiments run matching --preset cpu --keep-weights"):
        trained.velocity("cpu")


@pytest.mark.skipif(not (RECORDS / "matching" / "cpu.pt").exists(), reason="needs the trained weights")
def test_the_committed_weights_are_those_of_a_network_that_knows_velocities():
    net, config = trained.velocity("cpu")
    found = Record.read(RECORDS / "matching" / "cpu.json")
    assert found.finished and found.results["parameters"] == sum(p.numel() for p in net.parameters())
    assert found.results["test_loss"] < 0.2 and config.data == "mnist"


LONGER = [pytest.param(name, marks=pytest.mark.slow) for name in ("steering", "inversion")]


@pytest.mark.parametrize("name", ["matching", *LONGER])
def test_smoke_presets_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(tasks, "RUNS", tmp_path / "runs")
    task = Task(EXPERIMENTS[name], "smoke", {})
    perform(task, Options(), lambda done, text: None)
    assert Record.read(task.path).finished
