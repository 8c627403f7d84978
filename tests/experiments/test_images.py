"""Recognition of images: networks, augmentation, batches, other solvers, attacks."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import image_worker
import pytest
import torch
from torch import nn

import torchmali as tm
from experiments.data import DataError, cifar
from experiments.data.augment import crop_and_flip
from experiments.engine import task as tasks
from experiments.engine.batches import even_shares
from experiments.engine.queue import Options, perform
from experiments.engine.record import Record
from experiments.engine.task import BadOption, Run, Task
from experiments.images import recognition as images
from experiments.images import solvers
from experiments.methods import Solve
from experiments.models import ode_resnet
from experiments.models.ode_resnet import RESNET, Normalise
from experiments.registry import EXPERIMENTS
from experiments.report.chapters import solvers as solvers_chapter
from experiments.report.claims import Claim
from experiments.report.runs import Found
from experiments.theory.controllers import UnguardedLastStep, reference_end

ROOT = Path(__file__).parents[2]
MALI = Solve(tm.ALF(), tm.FixedStep(0.25), tm.MALI())


def normalise(n: int) -> Normalise:
    return Normalise((0.5,) * n, (0.5,) * n)


# Networks


@pytest.mark.parametrize(
    ("make", "n_parameters"),
    [
        (lambda how: ode_resnet.resnet18(normalise(3), 10, how), 11_173_962),
        (lambda how: ode_resnet.resnet18(normalise(3), 1000, how, stem="large"), 11_689_512),
        (lambda how: ode_resnet.small(normalise(3), 10, how), 43_226),
        (lambda how: ode_resnet.small(normalise(1), 10, how, n_in=1), 42_938),
        (lambda how: ode_resnet.node_stack(normalise(1), 10, how), 10_822),
    ],
)
def test_a_network_and_its_twin_have_the_published_number_of_parameters(make, n_parameters):
    with torch.device("meta"):
        assert {sum(p.numel() for p in make(how).parameters()) for how in (RESNET, MALI)} == {n_parameters}


def test_the_twin_adds_f_once():
    torch.manual_seed(0)
    network = ode_resnet.node_stack(normalise(1), 10, RESNET, n_blocks=2).eval()
    x = torch.rand(3, 1, 8, 8)
    z = network[1](network[0](x))
    for block in network.blocks():
        z = z + block.func(torch.tensor(0.0), z)
    assert torch.equal(network[3](z), network(x))


def test_one_step_of_alf_is_one_of_the_midpoint_rule():
    torch.manual_seed(0)
    network = ode_resnet.node_stack(normalise(1), 10, MALI).double().eval()
    x = torch.rand(4, 1, 8, 8, dtype=torch.float64)
    one, other = (solvers.logits(network, solvers.fixed(name, 1.0), x) for name in ("ALF", "RK2"))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    half = solvers.logits(network, solvers.fixed("ALF", 0.5), x)
    assert (half - other).abs().max() > 1e-6


def test_running_statistics_in_f_have_a_momentum_of_their_own():
    config = images.ImagesConfig(momentum_in_f=0.02)
    net = images.network(config, 10)
    inside = [part.momentum for block in net.blocks() for part in block.modules() if isinstance(part, nn.BatchNorm2d)]
    everywhere = [part.momentum for part in net.modules() if isinstance(part, nn.BatchNorm2d)]
    assert inside == [0.02] * 4 and everywhere.count(0.1) == len(everywhere) - 4 > 0


def test_group_norm_sees_one_image_at_a_time():
    torch.manual_seed(0)
    network = ode_resnet.small(normalise(1), 10, MALI, ode_resnet.group_norm, n_in=1)
    x = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(network(x)[:2], network(x[:2]), rtol=1e-4, atol=1e-5)


# Augmentation and batches


def test_images_are_shifted_with_black_and_mirrored():
    torch.manual_seed(0)
    x = torch.randint(256, (6, 3, 5, 7), dtype=torch.uint8)
    shifts, flips = torch.randint(5, (6, 2)), torch.tensor([True, False] * 3)
    moved = crop_and_flip(x, shifts, flips, pad=2)
    for i, (down, right) in enumerate((shifts - 2).tolist()):
        for row in range(5):
            for column in range(7):
                source = (row + down, (6 - column if flips[i] else column) + right)
                inside = 0 <= source[0] < 5 and 0 <= source[1] < 7
                wanted = x[i, :, source[0], source[1]] if inside else torch.zeros(3, dtype=torch.uint8)
                assert torch.equal(moved[i, :, row, column], wanted)
    still = crop_and_flip(x, torch.full((6, 2), 2), torch.zeros(6, dtype=torch.bool), pad=2)
    assert torch.equal(still, x)


def drawn(config: images.ImagesConfig, seed: int = 0) -> list:
    made = images.batches(config, None)
    return list(made.train(0, torch.Generator().manual_seed(seed), torch.Generator()))


def test_two_devices_see_what_one_sees():
    config = dataclasses.replace(images.DIGITS["smoke"], pad=1, flip=True)
    one, two = drawn(config), drawn(dataclasses.replace(config, devices=2))
    assert len(two) == 2 * len(one) and len(one[0][1]) == 64
    for i, (x, y) in enumerate(one):
        for k, whole in enumerate((x, y)):
            assert torch.equal(whole, torch.cat([two[2 * i][k], two[2 * i + 1][k]]))
    other = drawn(config, seed=1)
    assert not torch.equal(one[0][0], other[0][0])
    assert one[0][0].min() == 0 and one[0][0].max() == 1


def test_training_validation_and_test_share_no_image():
    made: Any = images.batches(images.ImagesConfig(), None)
    sets = [{x.numpy().tobytes() for x in part.images} for part in made.sets[:3]]
    assert not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])
    assert [len(part) for part in made.sets[:3]] == [1257, 270, 270]


def test_what_an_epoch_is_chosen_by_is_not_the_test_unless_nothing_else_is_there():
    config = images.DIGITS["smoke"]
    made: Any = images.batches(config, None)
    chosen_by, watched = made.validation()
    assert torch.equal(next(iter(chosen_by))[1], made.sets.validation.labels)
    assert torch.equal(next(iter(watched))[1], made.sets.test.labels)
    alone = dataclasses.replace(made, sets=made.sets._replace(validation=images.Images(torch.empty(0), torch.empty(0))))
    assert len(alone.validation()) == 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"batch": 512}, "batch of 512 is more than the 256 images"),
        ({"data": "svhn"}, "no data 'svhn'; there are digits, mnist, cifar10, folder"),
        ({"epochs": 0}, "epochs = 0: all must be 1 or more"),
        ({"norm": "sync"}, "SyncBatchNorm is for GPUs"),
        ({"devices": 2}, "torchrun --nproc-per-node 2"),
        ({"method": "mail"}, "no method 'mail'; there are resnet, naive"),
        ({"network": "vgg"}, "no network 'vgg'; there are small"),
        ({"norm": "layer"}, "no norm 'layer'; there are batch, group, sync"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_trained(changes, match, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RUNS", tmp_path)
    task = Task(EXPERIMENTS["digits"], "smoke", changes)
    with pytest.raises(BadOption, match=match):
        task.experiment.main(task.config, Run(task))


def test_a_batch_that_cannot_be_shared_is_told():
    with pytest.raises(BadOption, match="batch = 63, devices = 2.*must divide the batch"):
        images.batches(images.ImagesConfig(batch=63, devices=2), None)


def test_more_images_than_there_are_and_a_missing_folder_are_told(tmp_path):
    with pytest.raises(DataError, match="CIFAR-10 is missing.*does not exist"):
        images.batches(images.CIFAR["cpu"], tmp_path / "nowhere")
    few = images.Images(torch.zeros(10, 1, 8, 8), torch.zeros(10))
    with pytest.raises(DataError, match="10 images of digits are too few for 8 to train with and 270"):
        images._split(images.ImagesConfig(n_train=8), few)
    with pytest.raises(DataError, match="n_train = 5000: there are 1,257 images"):
        images.batches(images.ImagesConfig(n_train=5000), None)


def test_every_batch_is_shared_evenly():
    shares = even_shares(torch.arange(23), 8, 2)
    assert [len(share) for share in shares] == [4, 4, 4, 4, 3, 3]
    assert torch.equal(torch.cat(shares), torch.arange(22))
    assert [len(share) for share in even_shares(torch.arange(23), 8, 1)] == [8, 8, 7]


@pytest.mark.parametrize("method", ["naive", "adjoint", "aca", "mali"])
def test_synchronised_norms_get_methods_that_evaluate_f_equally_often(method):
    solve = images.solve_of(images.ImagesConfig(norm="sync", h=0.25, method=method))
    assert solve.gradient.data_dependent_parts(solve.solver, solve.controller) == []


@pytest.mark.parametrize("changes", [{"method": "exact", "h": 0.25}, {"method": "mali"}])
def test_synchronised_norms_refuse_the_others(changes):
    with pytest.raises(BadOption, match="as many evaluations of f in every process"):
        images.solve_of(images.ImagesConfig(norm="sync", **changes))


def test_a_truncated_cifar_batch_is_told(tmp_path):
    place = tmp_path / "cifar-10-batches-py"
    place.mkdir()
    (place / "data_batch_1").write_bytes(b"\x80\x02}q\x00(U\x04data")
    with pytest.raises(DataError, match="data_batch_1"):
        cifar.load(tmp_path, "train")


# Other solvers


def by_hand(rtol: float, atol: float, h: float) -> tuple[float, int]:
    """dz/dt = z, z(0) = 1, by Heun-Euler steps whose last one is not looked at."""
    t, z, n = 0.0, 1.0, 0
    while t + h < 1:
        k1 = z
        k2 = z + h * k1
        error, new = abs(h / 2 * (k2 - k1)), z + h / 2 * (k1 + k2)
        ratio = error / (atol + rtol * max(abs(z), abs(new)))
        factor = 0.9 * ratio**-0.5
        if ratio <= 1:
            t, z, n, h = t + h, new, n + 1, h * min(10, max(0.2, factor))
        else:
            h = h * max(0.2, factor)
    h = 1 - t
    return z + h / 2 * (z + z + h * z), n + 1


@pytest.mark.parametrize(("rtol", "h0"), [(1.0, 0.25), (0.1, 0.25), (1e-3, 0.05), (1.0, 2.0), (1e-3, 2.0)])
def test_an_unguarded_last_step_is_that_of_the_reference_code(rtol, h0):
    controller = UnguardedLastStep(rtol, rtol / 10, h0)
    y0 = torch.ones(1, dtype=torch.float64)
    solution = tm.solve(
        lambda t, z: z, y0, (0.0, 1.0), solver=tm.HeunEuler(), controller=controller, gradient=tm.Naive()
    )
    value, n = by_hand(rtol, rtol / 10, h0)
    assert solution.stats.n_steps == n and float(solution.y[-1]) == pytest.approx(value, rel=1e-12)
    guarded = tm.AdaptiveStep(rtol, rtol / 10, h0)
    safe = tm.solve(lambda t, z: z, y0, (0.0, 1.0), solver=tm.HeunEuler(), controller=guarded, gradient=tm.Naive())
    assert abs(float(safe.y[-1]) - math.e) <= abs(value - math.e) + 1e-12


def test_fixed_steps_of_the_reference_code_pass_the_end():
    assert reference_end(0.15) == pytest.approx(1.05) and [reference_end(h) for h in (1.0, 0.5, 0.25, 0.1)] == [
        1,
        1,
        1,
        1,
    ]
    assert solvers.fixed("RK4", 0.15, as_reference=True).end == pytest.approx(1.05)


def test_measuring_memory_leaves_the_network_as_it_is():
    torch.manual_seed(0)
    network = ode_resnet.small(normalise(1), 10, MALI, n_in=1)
    before = copy.deepcopy(network.state_dict())
    assert images.one_step(network, (torch.rand(4, 1, 8, 8), torch.arange(4))).peak_bytes > 10_000
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters())


# Attacks


def test_attacks_are_those_of_foolbox():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports from where SciPy no longer keeps things
        foolbox = pytest.importorskip("foolbox")
        torch.manual_seed(0)
        network = ode_resnet.node_stack(Normalise((0.3,), (0.4,)), 10, MALI, n_blocks=2).eval()
        x, y = torch.rand(16, 1, 8, 8), torch.arange(16) % 10
        model = foolbox.PyTorchModel(network, bounds=(0, 1), device="cpu")
        fgsm, _, _ = foolbox.attacks.FGSM()(model, x, y, epsilons=8 / 255)
        pgd = foolbox.attacks.LinfPGD(rel_stepsize=0.25, steps=3, random_start=False)
        several, _, _ = pgd(model, x, y, epsilons=8 / 255)
    raw = [fgsm, several]
    ours = [solvers.attacked(network, MALI, x, y, 8 / 255), solvers.attacked(network, MALI, x, y, 8 / 255, 3, 0.25)]
    for one, other in zip(ours, raw, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        assert one.min() >= 0 and one.max() <= 1 and (one - x).abs().max() <= 8 / 255 + 1e-6
    assert not torch.equal(ours[0], ours[1])


def test_an_attack_raises_the_loss():
    torch.manual_seed(0)
    network = ode_resnet.node_stack(normalise(1), 10, MALI, n_blocks=2).eval()
    x, y = torch.rand(32, 1, 8, 8), torch.arange(32) % 10
    moved = solvers.attacked(network, solvers.adaptive("Dopri5", 1e-4, 1e-5), x, y, 4 / 255)
    losses = [nn.functional.cross_entropy(solvers.logits(network, MALI, part), y) for part in (x, moved)]
    assert losses[1] > losses[0] + 1e-3


# Whole runs


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A folder of JPEG files in two classes, dark and bright."""
    image = pytest.importorskip("PIL.Image")
    root, generator = tmp_path_factory.mktemp("pictures"), torch.Generator().manual_seed(0)
    for split, n in (("train", 10), ("val", 4)):
        for label, light in (("dark", 0), ("bright", 128)):
            place = root / split / label
            place.mkdir(parents=True)
            for i in range(n):
                height, width = (int(side) for side in torch.randint(70, 100, (2,), generator=generator))
                noise = torch.randint(100, (height, width, 3), generator=generator) + light
                image.fromarray(noise.to(torch.uint8).numpy()).save(place / f"{i}.jpg")
    return root


def performed(name: str, preset: str, changes: dict, out: Path, monkeypatch, data: Path | None = None) -> Record:
    monkeypatch.setattr(tasks, "RECORDS", out / "records")
    monkeypatch.setattr(tasks, "RUNS", out / "runs")
    task = Task(EXPERIMENTS[name], preset, changes)
    perform(task, Options(data_dir=data), lambda done, text: None)
    return Record.read(task.path)


def test_the_network_of_imagenet_trains_on_a_folder_of_pictures(pictures, tmp_path, monkeypatch):
    small = {"epochs": 2, "batch": 4, "n_validation": 4, "size": 64, "devices": 1, "workers": 0}
    found = performed("imagenet", "paper", small, tmp_path, monkeypatch, pictures)
    assert found.results["parameters"] == 11_689_512 - 998 * 513  # of two classes
    assert found.results["evaluations"] == {"forward": 20.0, "backward": 20.0}  # N + 1 in each of four blocks
    assert len(found.metrics["watched_accuracy"]) == 2


@pytest.mark.slow
def test_tables_2_and_3_of_a_folder_of_pictures_come_up_to_the_cell_of_the_report(pictures, tmp_path, monkeypatch):
    small = {"epochs": 1, "batch": 4, "n_validation": 4, "size": 64, "devices": 1, "workers": 0, "sizes": (1.0, 0.25)}
    small |= {"tolerances": (1.0,), "epsilons": (1.0,), "pgd_steps": 1, "network": "stack"}
    runs = []
    for method in ("mali", "resnet"):
        found = performed("solvers", "paper", {**small, "method": method}, tmp_path, monkeypatch, pictures)
        assert found.finished and found.results["n_test"] == 8
        runs.append(Found(found, f"records/{method}.json"))
    tables, _, findings = solvers_chapter.show(runs)
    (table,) = (one for one in tables if one.id == "2-folder")
    assert re.fullmatch(r"[0-9.]+ \(69.6\)", str(table.rows[0][3])) and "ImageNet" in table.title
    assert {"invariance", "resnet-random", "fgsm"} <= {one.id for one in findings if isinstance(one, Claim)}


def test_a_corrupt_picture_is_told(pictures, tmp_path, monkeypatch):
    spoilt = next((pictures / "train" / "dark").glob("*.jpg"))
    content = spoilt.read_bytes()
    try:
        spoilt.write_bytes(content[:200])
        with pytest.raises(DataError, match=f"{spoilt.name} in class dark cannot be decoded"):
            performed("imagenet", "smoke", {"n_validation": 0, "method": "resnet"}, tmp_path, monkeypatch, pictures)
    finally:
        spoilt.write_bytes(content)


def test_pictures_are_the_same_from_workers_and_for_any_batch(pictures):
    config = dataclasses.replace(images.FOLDER["smoke"], flip=True, size=32)
    one, two = (
        list(images.batches(config_, pictures).train(3, torch.Generator().manual_seed(1), torch.Generator()))
        for config_ in (config, dataclasses.replace(config, batch=8, workers=1))
    )
    for k in range(2):
        whole, parts = (torch.cat([batch[k] for batch in found]) for found in (two, one))
        assert torch.equal(whole, parts)


def test_solvers_run_and_attack(tmp_path, monkeypatch):
    changes = {"n_train": 64, "n_test": 32, "sizes": (1.0,), "method": "mali"}
    found = performed("solvers", "smoke", changes, tmp_path, monkeypatch)
    cells = found.results["cells"]
    assert cells["ALF - RK2 at h 1"] <= 1e-5
    assert set(cells["FGSM 8 / ALF"]) == set(solvers.ATTACKERS) == set(cells["PGD 8 / ALF"])
    assert cells["corrected / ALF / h 1"] == cells["corrected / RK2 / h 1"]
    assert len([name for name in cells if name.startswith("as reference")]) == 5 + 5


def start_torchrun(out: Path, changes: dict) -> subprocess.Popen:
    out.mkdir(parents=True, exist_ok=True)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    line += [str(Path(image_worker.__file__)), str(out), json.dumps({**changes, "devices": 2})]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    how: Any = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(line, start_new_session=True, **how)


def finished(process: subprocess.Popen) -> None:
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said


def losses(out: Path, n_processes: int) -> torch.Tensor:
    """Of each step: the mean over processes, whose shares of a batch are of one size."""
    found = []
    for rank in range(n_processes):
        lines = [json.loads(line) for line in (out / f"losses-{rank}.jsonl").read_text().splitlines()]
        found.append([loss for *_, loss in sorted(lines)])
    return torch.tensor(found, dtype=torch.float64).mean(0)


def record_in(out: Path) -> Record:
    (path,) = (out / "records").glob("*/*.json")
    return Record.read(path)


@pytest.mark.slow
def test_two_processes_train_as_one_and_can_be_killed(tmp_path, monkeypatch):
    """With GroupNorm, that is; BatchNorm sees half a batch, and the loss is another."""
    monkeypatch.setattr(tasks, "RECORDS", None)  # put back in the end
    monkeypatch.setattr(tasks, "RUNS", None)
    changes = {"norm": "group", "epochs": 3, "h": 0.5, "pad": 1}
    alone, together = tmp_path / "alone", tmp_path / "together"
    process = start_torchrun(together, changes)
    alone.mkdir()
    image_worker.run(alone, changes)
    end = time.monotonic() + 100
    while not list(together.glob("runs/*/*/epoch-00001.ckpt")) and time.monotonic() < end:
        time.sleep(0.01)
    for pid in (process.pid, *(int((together / f"pid-{rank}").read_text()) for rank in (0, 1))):
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert not list(together.glob("records/*/*.json"))
    first, expected = losses(together, 2)[:4], losses(alone, 1)
    torch.testing.assert_close(first, expected[:4], rtol=0, atol=1e-5)
    assert first.std() > 1e-3  # it learns something

    finished(start_torchrun(together, changes))
    assert next(together.glob("runs/*/*/log.jsonl")).read_text().count('"event": "epoch"') <= 3 + 1
    one, other = record_in(alone), record_in(together)
    torch.testing.assert_close(one.metrics["train_loss"], other.metrics["train_loss"], rtol=0, atol=1e-4)
    assert other.finished and len(other.metrics["validation_accuracy"]) == 3


@pytest.mark.slow
def test_batch_norm_makes_two_processes_differ_from_one(tmp_path, monkeypatch):
    """By how much, docs/models.md says: each process normalises by its half of the batch."""
    monkeypatch.setattr(tasks, "RECORDS", None)
    monkeypatch.setattr(tasks, "RUNS", None)
    alone, together = tmp_path / "alone", tmp_path / "together"
    alone.mkdir()
    changes = {"h": 0.5, "pad": 1, "epochs": 1}
    finished(start_torchrun(together, changes))
    image_worker.run(alone, changes)
    differences = (losses(together, 2) - losses(alone, 1)).abs()
    assert 1e-4 < differences.max() < 0.5, differences
