"""Training can be killed, stopped and resumed, and its files damaged: the metrics are those of an undisturbed run.

Runs are made by forks of a helper, this file as a script, that has imported Lightning once: so they can be killed, and
start at once.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from filelock import FileLock
from rich.console import Console

from experiments.engine import queue
from experiments.engine import task as tasks
from experiments.engine.batches import InMemory
from experiments.engine.queue import Options, perform, run_all
from experiments.engine.record import Record
from experiments.engine.task import BadOption, Config, Experiment, Run, Task, tasks_of
from experiments.engine.trainer import Classifier, train
from experiments.registry import EXPERIMENTS

ROOT = Path(__file__).parents[2]
INTERRUPTED = 130
SMALL = {"epochs": 5, "n_train": 192, "batch": 32, "h": 0.25}  # of digits' smoke preset


@dataclass(frozen=True)
class TinyConfig(Config):
    epochs: int = 5
    schedule: str = "epoch"
    momentum: float = 0.9


def tiny(config: TinyConfig, run: Run) -> dict[str, Any]:
    """Momentum, a schedule by epoch or by step, dropout, and batches with noise from torch's global generator."""

    class Noisy(InMemory):
        def train(self, epoch, order, subsample):
            return Noise(super().train(epoch, order, subsample))

    class Noise(NamedTuple):
        batches: Any

        def __iter__(self):
            return ((x + torch.randn_like(x), y) for x, y in self.batches)

        def __len__(self):
            return len(self.batches)

    generator = torch.Generator().manual_seed(0)
    sets = [(torch.randn(n, 3, generator=generator), torch.arange(n) % 2) for n in (50, 20, 20)]
    network = lambda: torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))  # noqa: E731
    trained = train(
        run,
        lambda: Classifier(
            network(), 2,
            lambda parameters: torch.optim.SGD(parameters, 0.1, config.momentum),
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), config.schedule,
        ),
        Noisy(*sets, batch=10, n_per_epoch=30), config.epochs, best="train_loss", lowest=True,
    )  # fmt: skip
    return {"best_epoch": trained.best_epoch, "best": trained.best, "last": trained.last, "seeds": trained.seeds}


EXPERIMENTS["tiny"] = Experiment("tiny", "", "", {"smoke": TinyConfig()}, tiny, takes={})


class Ended(NamedTuple):
    status: int  # negative: the signal that killed it
    said: str


class Helper:
    """Forks a process for each command, and waits for it."""

    def __init__(self):
        # Python 3.12 warns of every fork where a library has a thread, if only a sleeping one.
        words = [sys.executable, "-W", "error", "-W", "ignore:This process:DeprecationWarning", __file__]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def start(self, out: Path, name: str = "digits", methods: tuple[str, ...] = ("mali",), jobs: int = 1, **more: Any):
        """A run below `out`; returns the process id.

        more: `Options`; `changes` of the preset; a hash of `code`, and `factor`, by which it multiplies the loss;
        `forks`: jobs need not import Lightning again.
        """
        out.mkdir(parents=True, exist_ok=True)
        changes = more.pop("changes", SMALL if name == "digits" else {})
        code, factor, forks = more.pop("code", ""), more.pop("factor", 1.0), more.pop("forks", False)
        command = {
            "out": str(out),
            "code": code,
            "factor": factor,
            "forks": forks,
            "name": name,
            "changes": changes,
            "jobs": jobs,
            "options": more,
        }
        command["methods"] = list(methods) if name == "digits" else []
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def end(self) -> Ended:
        assert self.process.stdout
        return Ended(*json.loads(self.process.stdout.readline()))

    def run(self, out: Path, *args: Any, **more: Any) -> str:
        """To its end; what it said."""
        self.start(out, *args, **more)
        ended = self.end()
        assert ended.status == 0, ended.said
        return ended.said


def helper_main() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        said = Path(command["out"]) / "said.txt"
        said.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            os._exit(_child(command, said))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), said.read_text() if said.exists() else ""]), flush=True)


def _child(command: dict[str, Any], said: Path) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are deaf to it
    os.environ["TORCHMALI_OUT"] = command["out"]  # for processes of --jobs 2
    patch = pytest.MonkeyPatch()
    if command["code"]:
        patch.setattr("experiments.engine.checkpoint.by_whom", lambda main: {"code": command["code"], "cpu": "a cpu"})
    if command["factor"] != 1:
        step = Classifier.training_step
        patch.setattr(Classifier, "training_step", lambda *args: command["factor"] * step(*args))
    if command["forks"]:
        fork = multiprocessing.get_context("fork")
        patch.setattr(multiprocessing, "get_context", lambda kind: fork)
    tasks.RECORDS, tasks.RUNS = Path(command["out"]) / "records", Path(command["out"]) / "runs"
    asked = tasks_of(EXPERIMENTS[command["name"]], "smoke", command["methods"], [0], command["changes"])
    with said.open("w") as file:
        console = Console(file=file, width=1000)
        try:
            return 0 if run_all(asked, Options(**command["options"]), command["jobs"], console) else 1
        except KeyboardInterrupt:
            return INTERRUPTED


@pytest.fixture(scope="module")
def helper():
    helper = Helper()
    yield helper
    helper.process.terminate()
    helper.process.communicate()


@pytest.fixture(scope="module")
def undisturbed(helper: Helper, tmp_path_factory: pytest.TempPathFactory) -> Record:
    out = tmp_path_factory.mktemp("undisturbed")
    helper.run(out)
    return record_in(out)


def record_path(out: Path, method: str = "mali") -> Path:
    (path,) = (out / "records").glob(f"*/*{method}*.json" if method else "*/*.json")
    return path


def record_in(out: Path, method: str = "mali") -> Record:
    return Record.read(record_path(out, method))


def folder_in(out: Path) -> Path:
    (folder,) = (path for path in (out / "runs").glob("*/*") if path.is_dir())
    return folder


def log_of(out: Path) -> str:
    return "".join(path.read_text() for path in (out / "runs").glob("*/*/log.jsonl"))


def alarms_in(out: Path, *events: str) -> list[str]:
    """The files of all that its log tells beside epochs, or of these events."""
    lines = [json.loads(line) for line in log_of(out).splitlines()]
    return [line["file"] for line in lines if (line["event"] in events if events else line["event"] != "epoch")]


def n_epochs_trained(out: Path) -> int:
    return log_of(out).count('"event": "epoch"')


def assert_same(one: Record, other: Record) -> None:
    """Bit for bit: JSON keeps floats exactly."""
    assert one.finished and other.finished
    assert json.dumps(one.metrics) == json.dumps(other.metrics)
    assert json.dumps(one.results) == json.dumps(other.results)


def test_a_finished_run_is_skipped_and_a_forced_one_gives_the_same_metrics_and_weights(helper, undisturbed, tmp_path):
    helper.run(tmp_path, keep_weights=True)
    path = record_path(tmp_path)
    first, written, weights = Record.read(path), path.stat().st_mtime_ns, weights_in(path.with_suffix(".pt"))
    assert_same(first, undisturbed)
    last = weights_in(folder_in(tmp_path) / "epoch-00005.ckpt")["state_dict"]
    assert weights.keys() == last.keys() and all(torch.equal(weights[name], last[name]) for name in weights)

    path.with_suffix(".pt").unlink()
    assert "finished before" in helper.run(tmp_path)
    assert path.stat().st_mtime_ns == written and n_epochs_trained(tmp_path) == 5

    assert "done" in helper.run(tmp_path, force=True)
    assert path.stat().st_mtime_ns > written and n_epochs_trained(tmp_path) == 5
    assert_same(Record.read(path), first)
    assert not path.with_suffix(".pt").exists()  # not asked for
    again = weights_in(folder_in(tmp_path) / "weights.pt")
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def weights_in(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def test_every_epoch_has_its_metrics_and_every_use_of_chance_its_seed(undisturbed):
    assert {"train_loss", "validation_accuracy", "evaluations_forward"} <= set(undisturbed.metrics)
    assert {len(values) for values in undisturbed.metrics.values()} == {5} == {len(undisturbed.seconds["epochs"])}
    seeds = undisturbed.results["seeds"]
    numbers = [seeds["init"], seeds["test"], *seeds["order"], *seeds["subsample"], *seeds["dropout"]]
    assert len(set(numbers)) == 2 + 3 * 5
    assert undisturbed.results["evaluations"] == {"forward": 10.0, "backward": 10.0}  # N + 1 of ALF, two blocks


def test_another_seed_gives_other_metrics(helper, undisturbed, tmp_path):
    helper.run(tmp_path, changes={**SMALL, "seed": 1})
    assert record_in(tmp_path).metrics["train_loss"] != undisturbed.metrics["train_loss"]


def kill_and_resume(helper: Helper, out: Path, changes: dict[str, Any], kills: int, epoch_seconds: float) -> None:
    for k in range(kills):
        begun = n_epochs_trained(out)
        pid = helper.start(out, changes=changes)
        if random.random() < 0.8:  # else perhaps before its first epoch
            wait_until(lambda begun=begun: n_epochs_trained(out) > begun, 60)
        wait_until(lambda begun=begun: n_epochs_trained(out) > begun + 1, random.uniform(0, 1.5 * epoch_seconds))
        os.kill(pid, signal.SIGKILL)
        assert helper.end().status == -signal.SIGKILL, f"It was done before kill {k + 1}."
    helper.run(out, changes=changes)


def wait_until(happened: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not happened():
        time.sleep(0.001)


def test_a_run_killed_twice_ends_as_an_undisturbed_one(helper, undisturbed, tmp_path):
    kill_and_resume(helper, tmp_path, SMALL, 2, min(undisturbed.seconds["epochs"]))
    assert_same(record_in(tmp_path), undisturbed)
    assert n_epochs_trained(tmp_path) <= 5 + 2
    assert alarms_in(tmp_path) == []


@pytest.mark.slow
def test_a_run_killed_ten_times_ends_as_an_undisturbed_one(helper, undisturbed, tmp_path):
    changes = {**SMALL, "epochs": 30}
    helper.run(tmp_path / "undisturbed", changes=changes)
    kill_and_resume(helper, tmp_path / "killed", changes, 10, min(undisturbed.seconds["epochs"]))
    assert_same(record_in(tmp_path / "killed"), record_in(tmp_path / "undisturbed"))
    assert n_epochs_trained(tmp_path / "killed") <= 30 + 10
    assert alarms_in(tmp_path / "killed") == []


def test_what_a_kill_leaves_behind_does_no_harm(helper, undisturbed, tmp_path):
    """Killed between two file operations: a draft, a checksum without its checkpoint, a checkpoint too many."""
    helper.run(tmp_path, max_seconds=0)
    folder = folder_in(tmp_path)
    first = (folder / "epoch-00001.ckpt").read_bytes(), (folder / "epoch-00001.ckpt.sha256").read_bytes()
    for _ in range(2):
        helper.run(tmp_path, max_seconds=0)
    for name, content in zip(("epoch-00001.ckpt", "epoch-00001.ckpt.sha256"), first, strict=True):
        (folder / name).write_bytes(content)
    (folder / "epoch-00004.ckpt.sha256").write_text("0" * 64)
    (folder / "epoch-00004.lightning.draft").write_bytes(first[0][:1000])
    helper.run(tmp_path)
    assert_same(record_in(tmp_path), undisturbed)
    assert n_epochs_trained(tmp_path) == 5
    kept = {f"epoch-0000{k}.ckpt{end}" for k in (4, 5) for end in ("", ".sha256")}
    assert {path.name for path in folder.iterdir()} == {"log.jsonl", "weights.pt", *kept}


DIFFERENT = {"code": "new", "factor": 2.0}  # a code whose first steps are others


@pytest.mark.parametrize("any_code", [False, True])
def test_what_ran_out_of_time_keeps_its_weights_and_goes_on_with_different_code_if_asked(helper, tmp_path, any_code):
    for _ in range(2):
        helper.run(tmp_path, max_seconds=0, code="old")
    assert (folder_in(tmp_path) / "weights.pt").exists() and not record_in(tmp_path).finished
    said = helper.run(tmp_path, max_seconds=0, any_code=any_code, **DIFFERENT)
    assert ("the record has more epochs" in said) != any_code  # it would begin anew
    assert len(record_in(tmp_path).metrics["train_loss"]) == (3 if any_code else 2)


@pytest.mark.parametrize(("factor", "word"), [(1.0, "the same."), (1 + 1e-5, "the same up to round-off.")])
def test_a_run_survives_a_change_of_code_if_its_first_steps_are_the_same(helper, undisturbed, tmp_path, factor, word):
    for code in ("old", "new", "newer"):
        said = helper.run(tmp_path, max_seconds=0, code=code, factor=1.0 if code == "old" else factor)
    assert f"first 4 steps made again: {word}" in said and alarms_in(tmp_path, "set aside") == []
    said = helper.run(tmp_path, code="newer", factor=factor)
    assert "made again" not in said and n_epochs_trained(tmp_path) == 5
    record = record_in(tmp_path)
    assert record.replay["steps"] == undisturbed.replay["steps"]  # of the code that began the run
    parts = [(part["code"], part["first"], part["last"]) for part in record.made["parts"]]
    assert parts == [("old", 1, 1), ("new", 2, 2), ("newer", 3, 5)]
    assert "replay" not in record.made["parts"][0] and word[:-1] in record.made["parts"][1]["replay"]
    if factor == 1:
        assert_same(record, undisturbed)


def test_a_run_from_before_replays_survives_by_the_means_of_its_first_epoch(helper, undisturbed, tmp_path):
    helper.run(tmp_path, max_seconds=0, code="old")
    path = folder_in(tmp_path) / "epoch-00001.ckpt"
    state = torch.load(path, weights_only=True)
    for name in ("replay", "parts"):
        del state["experiment"][name]
    torch.save(state, path)
    path.with_name(f"{path.name}.sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    shutil.copytree(tmp_path, tmp_path / "twin", ignore=shutil.ignore_patterns("twin"))
    assert "its first epoch: differs. Set aside" in helper.run(tmp_path / "twin", **DIFFERENT, max_seconds=0)
    assert "first epoch made again: the same. Went on from it." in helper.run(tmp_path, code="new")
    record = record_in(tmp_path)
    assert record.made["parts"][0] == {"code": "old", "first": 1, "last": 1}  # no processor is made up
    assert_same(record, undisturbed)


@pytest.mark.parametrize("schedule", ["epoch", "step"])
def test_momentum_schedules_dropout_and_noise_go_on_where_they_were(helper, tmp_path, schedule):
    changes = {"schedule": schedule}
    helper.run(tmp_path / "at once", "tiny", changes=changes)
    for _ in range(5):
        helper.run(tmp_path / "by epochs", "tiny", changes=changes, max_seconds=0)
    assert_same(record_in(tmp_path / "at once", ""), record_in(tmp_path / "by epochs", ""))


@pytest.mark.parametrize("schedule", ["epoch", "step"])
def test_without_its_checkpoints_a_run_goes_on_from_the_weights_beside_its_record(helper, tmp_path, schedule):
    """Without momentum an optimizer has nothing to remember: the metrics are those of an undisturbed run."""
    changes = {"schedule": schedule, "momentum": 0.0, "epochs": 3}
    helper.run(tmp_path / "at once", "tiny", changes=changes)
    moved = tmp_path / "moved"
    for _ in range(2):
        helper.run(moved, "tiny", changes=changes, max_seconds=0, keep_weights=True)
    weights = record_path(moved, "").with_suffix(".pt").read_bytes()
    shutil.rmtree(moved / "runs")
    said = helper.run(moved, "tiny", changes=changes, max_seconds=0, keep_weights=True, **DIFFERENT)
    assert "Its weights are not used: see --any-code" in said and "the record has more epochs" in said
    assert record_path(moved, "").with_suffix(".pt").read_bytes() == weights
    shutil.rmtree(moved / "runs")
    said = helper.run(moved, "tiny", changes=changes, code="new")
    assert "The record of 2 epochs was made by code that has changed since; first 3 steps made again: the same" in said
    assert "Went on from the weights of 2 epochs; the optimizer's averages began anew." in said
    assert n_epochs_trained(moved) == 1
    assert record_in(moved, "").metrics == record_in(tmp_path / "at once", "").metrics


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_jobs_give_the_metrics_of_one(helper, tmp_path, forks):
    changes = {"epochs": 2, "n_train": 64}
    for jobs in (1, 2):
        helper.run(tmp_path / str(jobs), methods=("mali", "aca"), changes=changes, jobs=jobs, forks=forks)
    for method in ("mali", "aca"):
        assert_same(record_in(tmp_path / "1", method), record_in(tmp_path / "2", method))


def test_the_same_run_cannot_be_made_twice_at_once(helper, tmp_path):
    folder = Task(EXPERIMENTS["tiny"], "smoke", {}).folder
    lock = tmp_path / "runs" / "tiny" / f"{folder.name}.lock"
    lock.parent.mkdir(parents=True)
    with FileLock(lock):
        helper.start(tmp_path, "tiny")
        status, said = helper.end()
    assert status == 1 and "another process is at work on this run" in said
    assert "done in" in helper.run(tmp_path, "tiny")


def test_ctrl_c_ends_the_queue_and_the_same_command_goes_on(helper, undisturbed, tmp_path):
    pid = helper.start(tmp_path)
    wait_until(lambda: n_epochs_trained(tmp_path) >= 2, seconds=60)
    os.kill(pid, signal.SIGINT)
    status, _ = helper.end()
    assert status == INTERRUPTED and n_epochs_trained(tmp_path) < SMALL["epochs"]
    helper.run(tmp_path)
    assert_same(record_in(tmp_path), undisturbed)
    assert n_epochs_trained(tmp_path) <= SMALL["epochs"] + 1


def test_only_rank_0_writes_records(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(tasks, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(queue, "RANK", 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    asked, console = tasks_of(EXPERIMENTS["explain"], "smoke", [], [], {}), Console(record=True, width=200)
    assert run_all(asked, Options(), 1, console)
    assert not asked[0].path.exists() and console.export_text() == ""
    for jobs, force in ((2, False), (1, True)):
        with pytest.raises(BadOption, match="torchrun"):
            run_all(asked, Options(force=force), jobs, console)


def test_time_out_stops_after_an_epoch_and_the_same_command_goes_on(helper, undisturbed, tmp_path):
    for n in (1, 2):
        assert "stopped for time" in helper.run(tmp_path, max_seconds=0)
        record = record_in(tmp_path)
        assert not record.finished and record.results == {}
        assert record.metrics == {name: values[:n] for name, values in undisturbed.metrics.items()}
    assert record.seconds["total"] > sum(record.seconds["epochs"])  # over both sessions
    helper.run(tmp_path)
    assert_same(record_in(tmp_path), undisturbed)
    assert n_epochs_trained(tmp_path) == 5


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose_the_checksum(path: Path) -> None:
    path.with_name(f"{path.name}.sha256").unlink()


@pytest.mark.parametrize("damage", [(truncate,), (flip_a_bit,), (lose_the_checksum, truncate)])
def test_a_damaged_checkpoint_is_told_set_aside_and_not_trusted(helper, undisturbed, tmp_path, damage):
    for _ in range(2):
        helper.run(tmp_path, max_seconds=0)
    folder = folder_in(tmp_path)
    names = ["epoch-00002.ckpt", "epoch-00001.ckpt"][: len(damage)]
    for name, spoil in zip(names, damage, strict=True):
        spoil(folder / name)
    said = helper.run(tmp_path)
    for name in names:
        assert f"Set aside as {name}.damaged." in said and (folder / f"{name}.damaged").exists()
    assert alarms_in(tmp_path) == names
    assert_same(record_in(tmp_path), undisturbed)
    assert n_epochs_trained(tmp_path) == 5 + len(damage)


def test_a_checkpoint_of_different_code_is_told_set_aside_and_not_trusted(helper, undisturbed, tmp_path):
    helper.run(tmp_path, max_seconds=0, **DIFFERENT)
    said = helper.run(tmp_path)
    assert "epoch-00001.ckpt was made by code that has changed since; its first 4 steps: differs. Set aside" in said
    assert alarms_in(tmp_path, "set aside") == ["epoch-00001.ckpt"]
    assert_same(record_in(tmp_path), undisturbed)
    assert n_epochs_trained(tmp_path) == 1 + 5


def test_a_damaged_record_is_told_set_aside_and_made_again_without_training(helper, undisturbed, tmp_path):
    helper.run(tmp_path)
    path = record_path(tmp_path)
    path.write_text(path.read_text().replace('"best_epoch": ', '"best_epoch": 1'))
    said = helper.run(tmp_path)
    assert "its checksum does not fit" in said and f"Set aside as {path.name}.damaged" in said
    assert path.with_name(f"{path.name}.damaged").exists()
    assert_same(record_in(tmp_path), undisturbed)
    assert n_epochs_trained(tmp_path) == 5


def test_every_method_trains(helper, tmp_path):
    methods = ("naive", "adjoint", "seminorm")  # ACA and MALI: above
    helper.run(tmp_path, methods=methods, changes={"epochs": 1, "n_train": 64})
    for method in methods:
        found = record_in(tmp_path, method)
        assert (found.results["evaluations"]["backward"] == 0) == (method == "naive")  # autograd asks f nothing


@pytest.mark.slow
def test_mali_reads_digits(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(tasks, "RUNS", tmp_path / "runs")
    (task,) = tasks_of(EXPERIMENTS["digits"], "cpu", ["mali"], [0], {})
    perform(task, Options(), lambda done, text: None)
    assert Record.read(task.path).results["test_accuracy"] >= 0.97


if __name__ == "__main__":
    helper_main()
