"""The runner, its command line, and the page made of records."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from experiments import cli, estimates
from experiments.engine import queue
from experiments.engine import task as tasks
from experiments.engine.check import Check, check, check_again, is_of, read_checks, task_of
from experiments.engine.queue import Options, perform, run_all
from experiments.engine.record import DamagedRecord, Record
from experiments.engine.replay import (
    DIFFERS,
    ROUND_OFF,
    SAME,
    UNKNOWN,
    compare,
    compare_epochs,
    difference_of_epochs,
    first_difference,
    quick,
    spread,
)
from experiments.engine.task import BadOption, Config, Experiment, Run, Task, parsed, tasks_of
from experiments.registry import EXPERIMENTS
from experiments.report import page as report

ROOT = Path(__file__).parents[2]


def command(*words: str, out: Path, **more: Any) -> subprocess.CompletedProcess:
    environment = {**os.environ, "TORCHMALI_OUT": str(out), "COLUMNS": "200"}
    line = [sys.executable, "-m", "experiments", *words]
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, **more)


# Records


def test_a_record_is_written_in_one_piece_and_a_changed_one_is_not_believed(tmp_path):
    path = tmp_path / "a" / "b.json"
    written = Record("x", "cpu", {"seed": 0}, "python -m x", {"value": 0.1, "none": None}).written(path)
    assert Record.read(path) == written
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]
    path.write_text(path.read_text().replace("0.1", "0.2"))
    with pytest.raises(DamagedRecord, match="checksum"):
        Record.read(path)
    path.write_text(path.read_text()[:50])
    with pytest.raises(DamagedRecord, match="no record"):
        Record.read(path)
    with pytest.raises(ValueError, match="more than 200,000"):
        Record("x", "cpu", {}, "", {"long": "x" * 200_000}).written(path)


# The runner


@dataclass(frozen=True)
class Counting(Config):
    n: int = 3
    scale: float = 1.0
    names: tuple[str, ...] = ("a",)
    flag: bool = False
    maybe: int | None = None
    method: str = "one"


computed: list[str] = []


def count(config: Counting, run: Run) -> dict[str, Any]:
    def piece(name: str) -> float:
        computed.append(name)
        return config.scale * len(computed)

    values = run.pieces({f"piece {i}": lambda i=i: piece(f"piece {i}") for i in range(config.n)})
    return {"values": values, "draw": int(run.generator("draw").initial_seed())}


COUNTING = Experiment(
    "counting", "counts", "nothing", {"cpu": Counting()}, count, {"cpu": "0 s"}, methods=("one", "two")
)


@pytest.fixture
def counting(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(tasks, "RUNS", tmp_path / "runs")
    computed.clear()
    return lambda changes=None, **options: perform(
        Task(COUNTING, "cpu", changes or {}), Options(**options), lambda done, text: None
    )


def test_a_finished_run_is_skipped_unless_forced(counting):
    assert "done" in counting() and len(computed) == 3
    assert counting() == "finished before" and len(computed) == 3
    assert "done" in counting(force=True) and len(computed) == 6
    assert "done" in counting({"scale": 2.0}) and len(computed) == 9


def test_finished_pieces_are_not_computed_again_but_broken_ones_are(counting):
    counting()
    task = Task(COUNTING, "cpu", {})
    pieces = task.folder / "pieces.jsonl"
    lines = pieces.read_text().splitlines(keepends=True)
    task.path.unlink()
    pieces.write_text(lines[0] + lines[1].replace("piece", "PIECE") + lines[2][:30])  # changed, and cut off
    counting()
    assert computed[3:] == ["piece 1", "piece 2"]


@pytest.mark.parametrize("holds", [True, False])
def test_pieces_by_other_code_are_kept_if_a_few_of_them_come_out_the_same(counting, monkeypatch, holds):
    """What `count` returns depends on how often it was called: then no piece comes out the same."""
    task = Task(COUNTING, "cpu", {"scale": 0.0 if holds else 1.0})
    counting(task.changes)
    task.path.unlink()
    monkeypatch.setattr(tasks, "by_whom", lambda main: {"code": "another", "commit": "c", "cpu": "a cpu"})
    said = counting(task.changes)
    again = ["piece 0", "piece 2", "piece 1"]  # spread over all
    assert computed[3:] == (again if holds else [*again, "piece 0", "piece 1", "piece 2"])
    assert ("all are the same; kept" in said) == holds
    assert Record.read(task.path).replay == {"pieces": again}
    assert "parts" not in Record.read(task.path).made


def test_a_record_says_which_code_made_which_pieces(counting, monkeypatch):
    counting({"scale": 0.0})
    task = Task(COUNTING, "cpu", {"scale": 0.0})
    pieces = task.folder / "pieces.jsonl"
    pieces.write_text("".join(pieces.read_text().splitlines(keepends=True)[:1]))
    task.path.unlink()
    monkeypatch.setattr(tasks, "by_whom", lambda main: {"code": "another", "commit": "c", "cpu": "a cpu"})
    counting({"scale": 0.0})
    assert [part["pieces"] for part in Record.read(task.path).made["parts"]] == [1, 2]


# Replays


def test_values_are_the_same_differ_by_round_off_or_differ():
    one = {"a": [1.0, 2], "b": "x", "c": math.nan}
    assert compare(one, {"a": [1.0, 2], "b": "x", "c": math.nan}) == SAME
    assert compare(one, {"a": [1.0 + 1e-7, 2], "b": "x", "c": math.nan}) == ROUND_OFF
    different = ({"a": [1.1, 2]}, {"a": [1.0, 3]}, {"b": "y"}, {"c": 0.0}, {"a": [1.0]}, {"a": [1.0, True]}, {"d": 1})
    for other in different:
        assert compare(one, {**one, **other}) == DIFFERS
    assert first_difference(one, {**one, "a": [1.1, 2]}) == "a[0] was 1, is 1.1"
    assert first_difference(one, one) == ""


def test_first_epochs_are_compared_by_losses_and_counts():
    then = {"train_loss": 1.0, "evaluations_forward": 10.0, "validation_accuracy": 0.5}
    assert compare_epochs(then, then) == SAME
    assert compare_epochs(then, {**then, "train_loss": 1.001}) == ROUND_OFF
    assert compare_epochs(then, {**then, "evaluations_forward": 11.0}) == DIFFERS
    assert compare_epochs(then, {"refreshes": 0.0}) == UNKNOWN
    assert difference_of_epochs(then, {**then, "train_loss": 2.0}) == "train_loss was 1, is 2"


def test_the_pieces_of_a_replay_are_quick_and_spread_over_all():
    assert spread(list("abcde")) == list("aecbd")
    assert quick({"slow": 100.0, "a": 0.1, "b": 0.1}) == ["a", "b"]
    assert quick({"slow": 100.0, "slower": 200.0}) == ["slow"]


@pytest.fixture
def checks(tmp_path) -> Path:
    return tmp_path / "replays.json"


def test_a_record_of_pieces_is_stale_if_some_come_out_differently(counting, checks):
    task = Task(COUNTING, "cpu", {"scale": 0.0})
    counting(task.changes)
    record = Record.read(task.path)
    assert check_again("a/b.json", COUNTING, record, None, checks).startswith("not comparable")
    named = dataclasses.replace(record, results={"cells": record.results["values"]})
    assert check_again("a/b.json", COUNTING, named, None, checks).startswith("same (pieces: piece 0")
    other = dataclasses.replace(named, results={"cells": {**named.results["cells"], "piece 0": 1.0}})
    assert check_again("a/b.json", COUNTING, other, None, checks).endswith("piece 0 was 1, is 0")
    entry = read_checks(checks)["a/b.json"]
    assert is_of(entry, other) and not is_of(entry, named) and entry["verdict"] == DIFFERS


def digits_record(counting, **changes: Any) -> tuple[Task, Record]:
    """A record of two epochs of four steps each, in the folders of the fixture `counting`."""
    small = {"epochs": 2, "n_train": 128, "batch": 32, "h": 0.25, "method": "mali", **changes}
    task = Task(EXPERIMENTS["digits"], "smoke", small)
    perform(task, Options(), lambda done, text: None)
    return task, Record.read(task.path)


def test_records_of_training_are_replayed_by_steps_or_by_the_first_epoch(counting, checks):
    task, record = digits_record(counting)
    assert record.made["cpu"] and len(record.replay["steps"]) == 4
    assert check(task, record) == Check(SAME, "4 first steps, of the record")
    counted = {**record.replay["steps"][0], "evaluations_forward": 11}
    assert check(task, dataclasses.replace(record, replay={"steps": [counted]})).verdict == DIFFERS
    old = dataclasses.replace(record, replay={})
    by_epoch = check(task, old)
    assert by_epoch == Check(SAME, "means of the first epoch", steps=record.replay["steps"])
    worse = {**record.metrics, "train_loss": [9.0, 9.0]}
    assert check(task, dataclasses.replace(old, metrics=worse)).verdict == DIFFERS
    assert task_of(EXPERIMENTS["digits"], record).config == task.config


def test_old_records_of_long_epochs_tell_by_counts_alone_and_their_steps_are_pinned_later(counting, checks):
    task, record = digits_record(counting)
    long = dataclasses.replace(record, replay={}, seconds={**record.seconds, "epochs": [1e3, 1e3]})
    for _ in range(2):
        said = check_again("digits/x.json", task.experiment, long, None, checks)
    assert said == "same (4 first steps, pinned later)"
    checks.unlink()
    assert "not comparable" in check_again("digits/x.json", task.experiment, long, None, checks)
    more = dataclasses.replace(long, metrics={**long.metrics, "evaluations_forward": [12.0, 12.0]})
    assert check(task, more)[:3] == (
        DIFFERS, "evaluations of a step, which never vary in the record", "evaluations_forward was 12, is 10"
    )  # fmt: skip
    vary = dataclasses.replace(long, metrics={**long.metrics, "evaluations_forward": [12.0, 13.0]})
    assert check(task, dataclasses.replace(vary, metrics={"evaluations_forward": [12.5]})).verdict == UNKNOWN


def test_only_what_is_stale_is_made_anew_if_asked(counting, monkeypatch):
    task, record = digits_record(counting)
    monkeypatch.setattr(queue, "code_hash", lambda main: "another")
    done = perform(task, Options(stale=True), lambda done, text: None)
    assert done == "finished before; replay: same (4 first steps, of the record)"
    dataclasses.replace(record, replay={"steps": [{**record.replay["steps"][0], "loss": 9.0}]}).written(task.path)
    assert "see --stale" in perform(task, Options(), lambda done, text: None)
    assert "done in" in perform(task, Options(stale=True), lambda done, text: None)
    assert Record.read(task.path).replay == record.replay


def test_a_damaged_record_is_set_aside_and_made_again(counting):
    counting()
    task = Task(COUNTING, "cpu", {})
    task.path.write_text("{}")
    said = counting()
    assert "is no record" in said and "Set aside as cpu.json.damaged" in said
    assert Record.read(task.path).finished and task.path.with_name("cpu.json.damaged").exists()


def test_fields_are_set_with_their_types_and_what_is_wrong_is_told():
    given = ["n=5", "scale=1e-3", "names=x,y", "flag=true", "maybe=none"]
    changes = parsed(COUNTING, "cpu", given)
    assert changes == {"n": 5, "scale": 1e-3, "names": ("x", "y"), "flag": True, "maybe": None}
    for bad, match in [
        ("n=x", "n is a"),
        ("unknown=1", "one of the fields seed, n"),
        ("n", "field=value"),
        ("flag=3", "flag"),
    ]:
        with pytest.raises(BadOption, match=match):
            parsed(COUNTING, "cpu", [bad])
    with pytest.raises(BadOption, match="no method 'three'; it has one, two"):
        tasks_of(COUNTING, "cpu", ["three"], [], {})
    with pytest.raises(BadOption, match="no preset 'gpu'; it has cpu"):
        parsed(COUNTING, "gpu", [])


def test_methods_and_seeds_make_a_run_each():
    tasks = tasks_of(COUNTING, "cpu", [], [0, 1], {"n": 2})
    assert [task.name for task in tasks] == ["cpu-one-n=2", "cpu-two-n=2", "cpu-one-n=2-seed1", "cpu-two-n=2-seed1"]
    assert tasks[3].command == "python -m experiments run counting --preset cpu --method two --set n=2 --seed 1"
    same = dataclasses.asdict(COUNTING.presets["cpu"])["n"]
    assert [task.name for task in tasks_of(COUNTING, "cpu", ["one"], [0], {"n": same})] == ["cpu-one"]


def test_a_record_from_before_a_field_was_added_still_counts(counting, monkeypatch):
    @dataclass(frozen=True)
    class Grown(Counting):
        new: int = 7

    counting()
    monkeypatch.setitem(COUNTING.presets, "cpu", Grown())
    assert counting() == "finished before"
    assert "done" in counting({"new": 8})
    monkeypatch.setitem(COUNTING.presets, "cpu", Grown(new=8))
    assert "done" in counting()


def test_the_command_of_a_run_asks_for_that_run():
    changes = {"names": ("x", "y"), "scale": 1e-3, "flag": True, "maybe": None}
    command = Task(COUNTING, "cpu", changes).command
    given = [word for word in command.split() if "=" in word]
    assert parsed(COUNTING, "cpu", given) == changes


def test_a_failing_run_does_not_stop_the_others(counting):
    def main(config: Counting, run: Run) -> dict[str, Any]:
        if config.method == "one":
            raise RuntimeError("on purpose")
        return count(config, run)

    experiment = Experiment("f", "", "", {"cpu": Counting()}, main, {}, methods=("one", "two"))
    console = Console(record=True, width=200)
    assert not run_all(tasks_of(experiment, "cpu", [], [], {}), Options(), 1, console)
    text = console.export_text()
    assert "on purpose" in text and "f cpu-two: done" in text


def test_the_command_line_runs(tmp_path):
    for jobs, said in (("2", "done in"), ("1", "finished before")):
        done = command("run", "explain", "--preset", "smoke", "--jobs", jobs, out=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith(f"explain smoke: {said}")


def test_the_command_line_lists_all_there_is(monkeypatch):
    with io.StringIO() as file:
        monkeypatch.setattr(cli, "console", Console(file=file, width=200))
        cli.list_()
        listed = file.getvalue()
    assert all(name in listed for name in EXPERIMENTS)
    assert "estimated" in listed  # what a run of the published size would cost
    assert "estimate for one A100, MALI" in re.sub(r"[\s│]+", " ", listed)


def test_what_a_step_costs_is_counted(monkeypatch, tmp_path):
    """A linear layer of 3 to 5, forward and backward, with two samples: 2 x 15 FLOPs each for y, dx and dW."""
    monkeypatch.setattr(estimates, "PATH", tmp_path / "estimates.json")

    def of(batch: int):
        layer, x = torch.nn.Linear(3, 5, bias=False), torch.ones(batch, 3, requires_grad=True)
        return layer, lambda: layer(x).sum().backward()

    found = estimates.counted(estimates.Step(of, samples=100, batch=10))
    assert found["flops_of_a_sample"] == 90 and found["steps"] == 10 and found["operations_of_a_step"] > 3
    monkeypatch.setitem(estimates.STEPS, "cifar10 paper", lambda: estimates.Step(of, samples=10**15, batch=10**15))
    estimates.write(["cifar10 paper"])
    hours = 90 * 10**15 / estimates.FLOPS_PER_SECOND / 3600
    assert f"estimate for one A100, MALI: {hours:,.0f} h (by FLOPs)" in estimates.estimate("cifar10", "paper")
    assert estimates.estimate("toy", "paper") == ""


@pytest.mark.parametrize(
    ("words", "said"), [("run nothing", "no experiment 'nothing'"), ("table 99", "There is no '99'")]
)
def test_what_is_not_there_is_told(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["experiments", *words.split()])
    with pytest.raises(SystemExit) as error:
        cli.main()
    assert error.value.code == 2 and said in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["toy", "memory", "accounting", "feasibility"]
)  # the others: above, test_theory.py, test_images.py
def test_smoke_presets_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(tasks, "RUNS", tmp_path / "runs")
    task = Task(EXPERIMENTS[name], "smoke", {})
    perform(task, Options(), lambda done, text: None)
    assert Record.read(task.path).finished


# The report


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href") and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    report.write(report.chapters(), folder)
    return folder


def test_the_page_needs_nothing_but_itself_and_its_links_lead_somewhere(made):
    text = (made / "results.html").read_text()
    page = Page()
    page.feed(text)
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids, link
        elif not link.startswith("data:"):
            assert link.startswith("../") and (ROOT / link[3:]).exists(), link
    assert not re.search(r'(src|href)="?https?:|@import|url\(http', text)


PROBE = """<!doctype html><meta charset=utf-8><body><iframe id=page style="width:390px;height:800px;border:0"></iframe>
<script>
const errors = [], frame = document.getElementById("page");
frame.addEventListener("load", () => {
  const page = frame.contentDocument, root = page.documentElement;
  const wide = [...page.querySelectorAll("body *")].filter(x => x.getBoundingClientRect().right > 391
    && !x.closest(".scroll") && !x.closest("svg"));
  const found = {scroll: root.scrollWidth, wide: wide.map(x => x.tagName), errors,
    svgs: page.querySelectorAll("svg").length,
    empty: [...page.querySelectorAll("svg")].filter(x => x.getBoundingClientRect().height < 50).length,
    broken: [...page.images].filter(x => !x.naturalWidth).length};
  document.body.dataset.found = JSON.stringify(found);
});
frame.srcdoc = CONTENT;
frame.contentWindow.addEventListener("error", e => errors.push(String(e.message)));
</script>"""


@pytest.mark.slow
def test_the_page_fits_a_phone_and_says_nothing_on_the_console(made, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    content = json.dumps((made / "results.html").read_text()).replace("</", "<\\/")
    page = tmp_path / "probe.html"
    page.write_text(PROBE.replace("CONTENT", content))
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    line = [chromium, *flags.split(), "--enable-logging=stderr", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    done = subprocess.run(
        [*line, "--virtual-time-budget=10000", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    shown = re.search(r'data-found="([^"]*)"', done.stdout)
    assert shown, done.stderr[-2000:]
    found = json.loads(html.unescape(shown[1]))
    assert found["scroll"] <= 390 and found["wide"] == [], found
    assert found["svgs"] == sum(len(chapter.pictures) for chapter in report.chapters())
    assert found["empty"] == found["broken"] == 0 and found["errors"] == []
    assert "CONSOLE" not in done.stderr, done.stderr
