"""Flows of images: densities by brute force and closed form, ways back, the published sizes, runs."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import torchmali as tm
from experiments.data.source import DataError
from experiments.engine import task as tasks
from experiments.engine.queue import Options, perform
from experiments.engine.record import Record
from experiments.engine.task import BadOption, Run, Task
from experiments.flows import images as flows
from experiments.flows import plane as densities
from experiments.flows.images import ImageFlow
from experiments.methods import published_tolerances
from experiments.models import ffjord
from experiments.models.ffjord import FFJORD, Logit, bits_per_dim, log_prob
from experiments.registry import EXPERIMENTS
from experiments.report.chapters import flow_memory
from experiments.report.chapters import plane as plane_chapter
from experiments.report.runs import Found
from torchmali.nn import CNF, ExactTrace, Hutchinson, gaussian, rademacher

TIGHT = {"solver": tm.Dopri5(), "controller": tm.AdaptiveStep(1e-10, 1e-10), "gradient": tm.Naive()}
PUBLISHED = {"solver": tm.Dopri5(), "controller": tm.AdaptiveStep(1e-5, 1e-5), "gradient": tm.Naive()}


def flow(shape: tuple[int, int, int] = (1, 8, 8), dtype: torch.dtype = torch.float64, **how: Any) -> FFJORD:
    torch.manual_seed(0)
    made = FFJORD(partial(CNF, **{"trace": ExactTrace(), **TIGHT, **how}), shape, (4,), 1, 0.05).to(dtype)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 / shape[0] * torch.randn_like(p))  # with more channels it would be wild
    return made


@pytest.mark.parametrize(
    ("shape", "parameters", "n_flows"),
    [((1, 28, 28), 800_636, 10), ((3, 32, 32), 1_358_868, 14), ((3, 64, 64), 1_996_116, 18)],
)
def test_the_published_flows_have_the_published_number_of_parameters(shape, parameters, n_flows):
    made = flows.network(flows.PAPER, shape)
    assert sum(p.numel() for p in made.parameters()) == parameters and len(made.flows()) == n_flows


def test_the_small_flow_has_the_size_of_the_design():
    made = flows.network(flows.PRESETS["cpu"], (1, 8, 8))
    assert sum(p.numel() for p in made.parameters()) == 33_670 and len(made.flows()) == 3


def test_pixels_become_channels_in_the_published_order():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    assert torch.nn.functional.pixel_unshuffle(x, 2)[0, :, 0, 0].tolist() == [0, 1, 4, 5]


def test_time_is_the_first_channel_and_the_last_weights_are_zero():
    field = ffjord.Field(ffjord.conv, 2, (3,))
    layers: Any = field.layers
    first, last = (layer.layer for layer in layers)
    assert first.weight.shape[1] == 3 and not last.weight.any() and last.bias.any()
    seen = []
    first.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    field(torch.tensor(0.5), torch.zeros(1, 2, 4, 4))
    assert torch.equal(seen[0][:, 0], torch.full((1, 4, 4), 0.5)) and not seen[0][:, 1:].any()


@pytest.mark.parametrize("side", [4, 8])  # one scale and two
def test_the_log_determinant_is_that_of_the_jacobian(side):
    made, x = flow((1, side, side)), torch.rand(1, 1, side, side, dtype=torch.float64)
    with torch.no_grad():
        mapped = made(x)
    z = mapped.z.repeat(side**2, 1).requires_grad_()  # a copy for each row of the Jacobian
    (back,) = torch.autograd.grad(made.inverse(z).flatten(1).diagonal().sum(), z)
    assert float(mapped.log_det) == pytest.approx(-float(torch.linalg.slogdet(back)[1]), abs=1e-8)


@torch.no_grad()
@pytest.mark.parametrize("noise", [rademacher, gaussian])
def test_hutchinsons_estimate_has_the_right_mean(noise):
    x = torch.rand(1, 1, 8, 8, dtype=torch.float64).expand(1000, -1, -1, -1)
    controller = tm.AdaptiveStep(1e-5, 1e-5)
    exact = float(flow(controller=controller)(x[:1]).log_det)
    found = flow(trace=Hutchinson(noise), controller=controller)(x).log_det
    assert found.std() > 0
    assert abs(float(found.mean()) - exact) < 4 * float(found.std()) / math.sqrt(len(x))


@torch.no_grad()
def test_a_flow_that_stands_still_has_the_density_of_its_base():
    made = flow()
    for cnf in made.flows():
        last: Any = cnf.func.layers[-1].layer
        last.weight.zero_()
        last.bias.zero_()
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    s = 0.05 + 0.9 * x
    log_p = torch.distributions.Normal(0, 1).log_prob(torch.logit(s)) + math.log(0.9) - (s * (1 - s)).log()
    wanted = -(log_p.flatten(1).sum(1) / 64 - math.log(17)) / math.log(2)
    assert torch.allclose(bits_per_dim(log_prob(made(x)), 64, 17), wanted, rtol=0, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 14, 14), (3, 16, 16)])
def test_images_come_back(shape):
    made, x = flow(shape, torch.float32, trace=Hutchinson(), **PUBLISHED), torch.rand(2, *shape)
    with published_tolerances():
        mapped = made(x)
        back = made.inverse(mapped.z)
    assert (
        mapped.z.shape == (2, math.prod(shape)) and (mapped.z.unflatten(1, shape) - made.logit(x)[0]).abs().max() > 0.1
    )
    assert (back - x).abs().max() < 1e-3


@torch.no_grad()
def test_every_flow_leads_back_from_its_code_to_the_last_bit():
    made = flow(
        dtype=torch.float32,
        trace=Hutchinson(),
        solver=tm.ALF(),
        controller=tm.FixedStep(0.1),
        gradient=tm.MALI(exact="int64"),
    )
    for cnf in made.flows():
        x = torch.randn(4, cnf.func.layers[-1].layer.out_channels, 4, 4)
        there = cnf(x, return_code=True)
        assert not torch.equal(there.z, x) and torch.equal(cnf.inverse(there.code), x)


@pytest.mark.parametrize("method", ["mali", "aca", "rnode", "vanilla"])
def test_regularisers_are_in_the_loss_with_the_weights_of_the_method(method):
    torch.manual_seed(0)
    config = flows.FlowsConfig(method=method, widths=(4,))
    made = flows.network(config, (1, 8, 8))
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 * torch.randn_like(p))
    module = ImageFlow(made, 17, flows.weight(config), 1e-3, 50)
    pixels, noise = torch.randint(17, (8, 1, 8, 8)).float(), torch.rand(8, 1, 8, 8)
    with published_tolerances():
        loss, bits = module.loss(pixels, noise)
    weight = {"mali": 0.05, "aca": 0.05, "rnode": 0.01, "vanilla": 0.0}[method]
    assert module.weight == weight
    assert (float(loss.detach()) > float(bits.detach())) == (weight > 0)


def test_the_gaussian_to_be_beaten_is_that_of_the_logits():
    """Of uniform noise, whose bits are known: with one level none, less what a normal distribution misses."""
    black = torch.zeros(4000, 1, 2, 2)
    pixels = flows.Pixels(black, black, black, 1)
    found = flows.gaussian_bits(flows.FlowsConfig(alpha=0.05), pixels)
    y = Logit(0.05)(torch.rand(100_000, 1, dtype=torch.float64))
    normal = torch.distributions.Normal(y[0].mean(), y[0].std())
    wanted = -float((normal.log_prob(y[0])[:, 0] + y[1]).mean()) / math.log(2)
    assert found == pytest.approx(wanted, abs=0.02) and found > 0


def test_an_epoch_has_so_many_batches_and_goes_through_all_images_before_one_comes_again():
    config = flows.FlowsConfig(batch=4, batches=5)
    images = torch.arange(10).view(10, 1, 1, 1)
    pixels = flows.Pixels(images, images, images, 256)
    seen = [x.flatten().tolist() for (x,) in flows.Drawn(pixels, config).train(0, *2 * [torch.Generator()])]
    assert len(seen) == 5 and sorted(sum(seen, [])[:10]) == sorted(sum(seen, [])[10:]) == list(range(10))


def test_images_are_packed_and_unpacked():
    pixels = torch.randint(256, (3, 2, 4, 5))
    assert torch.equal(flows.unpacked(flows.packed(pixels), (2, 4, 5)), pixels.to(torch.uint8))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"method": "none"}, "There is no method 'none'"),
        ({"data": "none"}, "There is no data 'none'"),
        ({"method": "rnode", "rtol": 0.1}, "rnode has fixed steps"),
        ({"batch": 5000}, "more than the 64 images"),
        ({"n_train": 5000}, "5000 images are asked for"),
    ],
)
def test_what_does_not_fit_is_told(changes, match, tmp_path, monkeypatch):
    run = run_of(changes, tmp_path, monkeypatch)
    with pytest.raises((BadOption, DataError), match=match):
        run.task.experiment.main(run.task.config, run)


def run_of(changes: dict[str, Any], tmp_path: Path, monkeypatch, name: str = "flows") -> Run:
    monkeypatch.setattr(tasks, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(tasks, "RUNS", tmp_path / "runs")
    return Run(Task(EXPERIMENTS[name], "smoke", changes))


def test_a_flow_is_trained_inverted_and_the_same_under_another_solver(tmp_path, monkeypatch):
    changes = {"method": "mali", "batches": 20, "lr": 0.03, "warmup": 1}
    run = run_of(changes, tmp_path, monkeypatch)
    perform(run.task, Options(), lambda done, text: None)
    found = Record.read(run.task.path).results
    assert found["test_bits"] < 4.2  # untrained: 5.2
    assert found["round_trip"] < 1e-3 and found["round_trip_fine"] < 1e-6
    assert found["test_bits"] != found["test_bits_midpoint"]
    reference, *others = found["test_bits_by_solver"].values()
    assert all(abs(reference - other) < 0.01 for other in others) and reference != others[0]  # another solver it was
    assert flows.unpacked(found["samples"], found["shape"]).max() <= 16
    real, drawn, levels = flows.sampled(run.task, flows.SHOWN, run.seed("samples"), 1.0)
    assert levels == 17 and flows.packed(drawn) == found["samples"] and flows.packed(real) == found["real"]
    assert found["untrained_validation_bits"] > 5 and found["solved"]["weight"] == 0.05
    assert not torch.equal(flows.sampled(run.task, flows.SHOWN, run.seed("samples"), 0.5)[1], drawn)


def test_without_weights_there_are_no_samples(tmp_path, monkeypatch):
    with pytest.raises(BadOption, match="no weights of this run: python -m experiments run flows"):
        flows.sampled(run_of({}, tmp_path, monkeypatch).task, 4, 0, 1.0)


@pytest.mark.parametrize("preset", [name for name in flows.PRESETS if name.startswith("paper")])
def test_published_settings_are_those_of_each_method(preset):
    wanted = {"vanilla": (1e-5, 1e-5, 0.0), "seminorm": (1e-5, 1e-5, 0.0), "mali": (1e-2, 1e-3, 0.05)}
    for method, (rtol, atol, weight) in wanted.items():
        config = dataclasses.replace(flows.PRESETS[preset], method=method)
        assert flows.solve_of(config).controller == tm.AdaptiveStep(rtol, atol, h0=0.25)
        assert flows.weight(config) == (0.01 if weight and preset == "paper-imagenet64" else weight)
    assert flows.solve_of(dataclasses.replace(flows.PRESETS[preset], method="rnode")).controller == tm.FixedStep(0.25)
    assert flows.weight(dataclasses.replace(flows.PRESETS[preset], method="rnode")) == 0.01


def test_regularisers_do_not_change_the_steps():
    steps = []
    for weight in (0.0, 0.05):
        torch.manual_seed(0)
        made = flows.network(flows.FlowsConfig(widths=(4,), weight=weight, rtol=1e-4, atol=1e-5), (1, 8, 8))
        with torch.no_grad():
            for cnf in made.flows():
                cnf.func.layers[-1].layer.weight.normal_()  # pyright: ignore[reportCallIssue]
            torch.manual_seed(1)
            made(torch.rand(4, 1, 8, 8))
        steps.append([cnf.last_stats.n_steps for cnf in made.flows()])  # pyright: ignore[reportOptionalMemberAccess]
    assert steps[0] == steps[1] and max(steps[0]) > 4


# The plane


@pytest.mark.parametrize("name", list(densities.DATA))
def test_points_lie_in_the_picture(name):
    x = densities.DATA[name](2000, torch.Generator().manual_seed(0))
    assert x.shape == (2000, 2) and (x.abs() < densities.LIMIT).all(1).float().mean() > 0.99


def test_a_checkerboard_has_eight_squares_with_as_many_points():
    x = densities.checkerboard(8000, torch.Generator().manual_seed(0))
    squares = ((x + 4) / 2).floor().long()
    counts = torch.bincount(4 * squares[:, 0] + squares[:, 1], minlength=16).view(4, 4)
    black = (torch.arange(4)[:, None] + torch.arange(4)) % 2 == 0
    assert (counts[black] > 850).all() and not counts[~black].any()


def test_points_are_packed_to_a_ten_thousandth():
    x = 7 * torch.rand(50, 2) - 3.5
    assert np.abs(plane_chapter.points(densities.quantised(x)) - x.numpy()).max() < 1e-4


@pytest.mark.parametrize("name", ["densities", "flow_memory"])
def test_other_smoke_presets_run_and_are_shown(name, tmp_path, monkeypatch):
    run = run_of({}, tmp_path, monkeypatch, name)
    perform(run.task, Options(), lambda done, text: None)
    found = [Found(Record.read(run.task.path), "a record")]
    tables, pictures, claims = plane_chapter.show(found) if name == "densities" else flow_memory.show(found)
    assert tables[0].rows and claims
    if name == "densities":
        assert all(picture.svg.startswith("<svg") for picture in pictures)
        assert pictures[1].write(tmp_path)[-1].read_bytes().startswith(b"GIF89a")
    else:
        cells = found[0].record.results["cells"]
        assert all(
            cells[f"{m} / {x:g} / 1"]["steps"] == cells[f"{m} / {x:g} / 2"]["steps"]
            for m in ("mali", "aca", "naive")
            for x in (1e-2, 1e-3)
        )
        assert claims[0].verdict in ("holds", "holds in part") and "MALI 1.00" in claims[0].numbers
