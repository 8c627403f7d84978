"""Latent ODEs, recurrent networks and Neural CDEs of the experiments."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchmali as tm
from experiments.data import DataError, speech
from experiments.engine import task as tasks
from experiments.engine.queue import Options, perform
from experiments.engine.record import Record
from experiments.engine.task import BadOption, Run, Task
from experiments.models.latent_ode import STD, Encoder, Gate, LatentODE
from experiments.models.neural_cde import CDEClassifier
from experiments.models.recurrent import Recurrent
from experiments.registry import EXPERIMENTS
from experiments.series import latent, paths

TIMES = torch.arange(6, dtype=torch.float64) / 200


def series(n: int = 3, length: int = 6, channels: int = 14, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and a mask of whole times; each series has one that is observed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, length, channels, generator=generator)
    mask = (torch.rand(n, length, 1, generator=generator) < 0.5).float()
    mask[:, 2] = 1
    return x, mask.expand_as(x)


def model(method: str = "mali", **sizes: Any) -> LatentODE:
    torch.manual_seed(0)
    config = latent.LatentConfig(method=method, **sizes)
    return latent.network(config, TIMES.tolist())  # pyright: ignore[reportReturnType]


def test_the_published_networks_have_the_published_number_of_parameters():
    config = latent.PRESETS["paper"]
    assert sum(p.numel() for p in latent.network(config, [0.0, 1.0]).parameters()) == 617_619
    net = CDEClassifier(paths.cde(paths.PRESETS["paper"]), 21, 10, 90, 40, 3)
    assert sum(p.numel() for p in net.parameters()) == 88_940


def test_the_encoder_reads_backwards_with_a_step_of_euler_between_observations():
    torch.manual_seed(0)
    encoder = Encoder(14, 4, 5, 8, 8, 1)
    x, mask = series()
    gate: Any = encoder.rnn.cell.cell
    mean, std = torch.zeros(3, 5), torch.zeros(3, 5)
    times, before = TIMES.tolist(), TIMES[-1].item() + 0.01
    for i in reversed(range(6)):
        mean = mean + (times[i] - before) * encoder.f(TIMES[i], mean)
        new = gate(torch.cat([x[:, i] * mask[:, i], mask[:, i]], -1), torch.cat([mean, std], -1))
        seen = mask[:, i, :1] > 0
        mean, std = (torch.where(seen, a, b) for a, b in zip(new.chunk(2, -1), (mean, std), strict=True))
        before = times[i]
    expected = encoder.head(torch.cat([mean, std], -1)).chunk(2, -1)
    found = encoder(x * mask, mask, TIMES)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1].abs())


def test_the_gate_is_the_published_one():
    torch.manual_seed(0)
    gate, x, h = Gate(2, 3, 4), torch.rand(5, 3), torch.rand(5, 4)
    update, reset = gate.update(torch.cat([h, x], -1)), gate.reset(torch.cat([h, x], -1))
    new = gate.candidate(torch.cat([h[:, :2] * reset, h[:, 2:] * reset, x], -1))
    mean = (1 - update) * new[:, :2] + update * h[:, :2]
    std = (1 - update) * new[:, 2:].abs() + update * h[:, 2:]
    torch.testing.assert_close(gate(x, h), torch.cat([mean, std.abs()], -1))


@pytest.mark.parametrize("kl_weight", [0.0, 0.7])
def test_the_loss_is_the_published_one(kl_weight):
    net = model()
    x, mask = series()
    torch.manual_seed(1)
    found = net.loss(x, x * mask, mask, TIMES, kl_weight)
    torch.manual_seed(1)
    rebuilt, mean, std = net(x * mask, mask, TIMES)
    assert rebuilt.shape == (3, 3, 6, 14)
    likelihood = torch.distributions.Normal(rebuilt, STD).log_prob(x.expand_as(rebuilt)).mean((1, 2, 3))
    kl = (0.5 * (std.square() + mean.square() - 1) - std.log()).mean()
    torch.testing.assert_close(found.total, -torch.logsumexp(likelihood - kl_weight * kl, 0))
    torch.testing.assert_close(found.mse, (rebuilt - x).square().mean())
    torch.testing.assert_close(found.later, (rebuilt - x)[:, :, 1:].square().mean())


@pytest.mark.parametrize("method", ["adjoint", "aca", "mali", "exact"])
def test_every_method_has_the_gradient_of_the_naive_one_with_its_solver(method):
    """Solvers differ: all are compared by fine steps."""
    gradients = []
    for name in (method, "naive"):
        net = model(name, h=0.001, rtol=1e-7, atol=1e-9).double()
        x, mask = (part.double() for part in series())
        torch.manual_seed(1)
        net.loss(x, x * mask, mask, TIMES, 0.0).total.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() <= 1e-4 * gradients[1].norm()


@pytest.mark.parametrize("decays", [False, True])
def test_recurrent_networks_predict_from_what_came_before(decays):
    torch.manual_seed(0)
    net = Recurrent(n_channels=4, n_hidden=6, units=8, decays=decays).eval()
    x, _ = series(channels=4)
    values = x.requires_grad_()
    mask = torch.ones_like(x)
    found = net(values, mask, TIMES)
    assert torch.equal(found[:, 0], values[:, 0])
    (gradient,) = torch.autograd.grad(found[:, 3].sum(), values)
    assert gradient[:, :3].abs().amax((0, 2)).min() > 0
    assert gradient[:, 3:].abs().max() == 0


@pytest.mark.parametrize("decays", [False, True])
def test_recurrent_networks_see_only_what_is_observed(decays):
    torch.manual_seed(0)
    net = Recurrent(n_channels=14, decays=decays).eval()
    x, mask = series()
    found = net(x * mask, mask, TIMES)
    assert torch.equal(found, net(x * mask, mask.clone(), TIMES)) and found.isfinite().all()
    nothing = net(torch.zeros_like(x), torch.zeros_like(x), TIMES)
    assert torch.equal(nothing[:, 1], nothing[:, -1])  # the state rests


def test_gaps_are_the_same_for_any_batch_and_others_in_each_epoch():
    x = torch.rand(10, 100, 14)

    def drawn(batch: int, seed: int) -> list[torch.Tensor]:
        gappy = latent.Gappy(x, x[:4], 0.1, batch, 3)
        parts: Any = list(gappy.train(0, torch.Generator(), torch.Generator().manual_seed(seed)))
        return [torch.cat([part[k] for part in parts]) for k in range(3)]

    one, other, next_epoch = drawn(5, 0), drawn(2, 0), drawn(5, 1)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(one[0], x) and not torch.equal(one[2], next_epoch[2])
    assert (one[2][..., 0].sum(1) == 10).all() and torch.equal(one[1], one[0] * one[2])
    gappy = latent.Gappy(x, x[:4], 0.1, 5, 3)
    first, again = (next(iter(gappy.test())) for _ in range(2))
    assert torch.equal(first[2], again[2])


def run_of(name: str, preset: str, changes: dict[str, Any], tmp_path: Path, monkeypatch) -> Run:
    monkeypatch.setattr(tasks, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(tasks, "RUNS", tmp_path / "runs")
    return Run(Task(EXPERIMENTS[name], preset, changes))


def test_series_are_scaled_by_the_training_set_and_begin_with_time(tmp_path, monkeypatch):
    config = dataclasses.replace(paths.PRESETS["smoke"], every=2)
    sets = paths.load(config, run_of("paths", "smoke", {}, tmp_path, monkeypatch))
    train = sets.train.x
    assert train.shape == (200, 4, 9) and torch.equal(train[5, :, 0], torch.arange(4.0))
    whole = paths.load(paths.PRESETS["smoke"], run_of("paths", "smoke", {}, tmp_path, monkeypatch)).train.x
    assert whole[..., 1:].min() == 0 and abs(float(whole[..., 1:].max()) - 1) < 1e-4  # pixels are not scaled
    assert torch.equal(whole[:, ::2, 1:], train[..., 1:])


def test_speech_is_scaled_by_the_training_set(tmp_path, monkeypatch):
    clips = torch.randn(60, 161, 20) * torch.arange(1.0, 21) + 5
    split = speech.Split(torch.arange(40), torch.arange(40, 50), torch.arange(50, 60))
    table = SimpleNamespace(mfcc=clips, labels=torch.zeros(60).long(), split=split)
    monkeypatch.setattr(speech, "load_table", lambda place: table)
    sets = paths.load(paths.PathsConfig(data="table", every=4), run_of("paths", "smoke", {}, tmp_path, monkeypatch))
    mean, std = clips[:40].mean((0, 1)), clips[:40].std((0, 1))
    assert torch.allclose(sets.test.x[..., 1:], (clips[50:, ::4] - mean) / std, atol=1e-4)
    assert torch.equal(sets.test.x[0, :, 0], torch.arange(41.0))


def test_a_series_that_has_ended_rests():
    x = torch.arange(10.0).view(1, 5, 2)
    held = paths._held(x, torch.tensor([3]))
    assert torch.equal(held[0, :, 0], torch.tensor([0.0, 1, 2, 2, 2]))
    assert torch.equal(held[0, 3:, 1:], x[0, 2].expand(2, 2)) and torch.equal(held[0, :3, 1:], x[0, :3])


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("latent", {"method": "mail"}, "no method 'mail'"),
        ("latent", {"n": 41}, "n = 41: there are 40 trajectories"),
        ("paths", {"method": "mail"}, "no method 'mail'"),
        ("paths", {"data": "music"}, "no data 'music'; there are digits, table"),
        ("paths", {"control": "quintic"}, "no control 'quintic'; there are cubic, linear"),
        ("paths", {"n_train": 5000}, "n_train = 5000: there are 1,257 series"),
        ("paths", {"method": "aca", "eta": 0.9}, "damping is for --method mali, not aca"),
        ("latent", {"method": "rnn", "unsafe_damping": True}, "damping is for --method mali, not rnn"),
        ("paths", {"batch": 300}, "batch of 300 is more than the 200 series"),
    ],
)
def test_what_does_not_fit_is_told(name, changes, match, tmp_path, monkeypatch):
    if name == "latent":
        monkeypatch.setattr(latent.hopper, "simulate", lambda n, **more: torch.rand(n, 200, 14))
    run = run_of(name, "smoke", changes, tmp_path, monkeypatch)
    with pytest.raises((BadOption, DataError), match=match):
        run.task.experiment.main(run.task.config, run)


@pytest.mark.parametrize(
    ("name", "method"), [("latent", "mali"), ("latent", "free"), ("latent", "gru_d"), ("paths", "mali")]
)
def test_smoke_presets_run(name, method, tmp_path, monkeypatch):
    if name == "latent":
        pytest.importorskip("mujoco")
    run = run_of(name, "smoke", {"method": method}, tmp_path, monkeypatch)
    if name == "latent":  # has two epochs
        perform(run.task, Options(max_seconds=0), lambda done, text: None)
        found = Record.read(run.task.path)
        assert not found.finished and found.results["parameters"] > 1000 and found.results["peak_bytes"] > 10_000
    perform(run.task, Options(), lambda done, text: None)
    found = Record.read(run.task.path)
    quality = found.results["test_mse" if name == "latent" else "test_accuracy"]
    assert found.finished and math.isfinite(quality)
    if method in ("mali", "free"):
        assert max(found.metrics["reconstruction_error"]) < 1e-3
        peaks = list(found.results["peak_bytes_by_h"].values())
        assert len(peaks) >= 3 and max(peaks) <= 1.1 * min(peaks)  # a drift that is looked into takes a little


def test_free_steps_take_a_fraction_of_the_evaluations_of_a_step_per_output():
    times, z0 = (torch.arange(100) / 200).tolist(), torch.linspace(-1, 1, 30).reshape(2, 15)
    config = latent.LatentConfig()
    f: Any = model().generate.func
    counts, found = {}, {}
    for method in ("mali", "free", "naive"):
        block = latent.block(dataclasses.replace(config, method=method), times)(f)
        found[method] = block(z0.clone().requires_grad_())
        found[method].sum().backward()
        stats = block.last_stats
        assert stats is not None
        counts[method] = stats.n_evals_forward, stats.n_evals_backward
    assert counts["mali"] == (100, 100) and max(counts["free"]) <= 20
    assert all((found[method] - found["naive"]).abs().max() < 1e-3 for method in ("mali", "free"))
    assert latent.block(config, times)(f).controller == tm.FixedStep(0.005)  # the published one, as before


def test_unsafe_damping_is_the_published_method():
    config = latent.LatentConfig(eta=0.9, unsafe_damping=True)
    block = latent.block(config, [0.0, 1.0])(torch.nn.Identity())
    assert isinstance(block.gradient, tm.MALI) and block.gradient.checkpoint_every is None
