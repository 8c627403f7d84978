"""Queue of tasks: runs them one after the other or side by side, and writes a record of each."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from experiments.data.source import DataError
from experiments.engine.check import check
from experiments.engine.devices import devices_of
from experiments.engine.record import DamagedRecord, Record, code_hash, made_with, set_aside
from experiments.engine.replay import DIFFERS
from experiments.engine.task import BadOption, OutOfTime, Run, Task, Tell, TrainedConfig, as_json

MAX_WEIGHTS = 5_000_000  # bytes that may be kept beside a record
RANK = int(os.environ.get("RANK", "0"))  # of several processes that torchrun started for one run; 0 writes the record


class Options(NamedTuple):
    force: bool = False
    max_seconds: float | None = None
    keep_weights: bool = False
    data_dir: Path | None = None
    any_code: bool = False
    accelerator: str = "auto"
    stale: bool = False  # make anew what the code of today would make differently


def perform(task: Task, options: Options, tell: Tell) -> str:
    """Run a task, or find that it is done; returns what happened, in a few words."""
    torch.set_num_threads(1)
    if RANK > 0:
        return _perform(task, options, lambda done, text: None)
    lock = FileLock(f"{task.folder}.lock")
    task.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with lock.acquire(timeout=0):
            return _perform(task, options, tell)
    except Timeout:
        raise BadOption("another process is at work on this run") from None


def _perform(task: Task, options: Options, tell: Tell) -> str:
    note = ""
    try:
        if not options.force and (record := task.finished()):
            said, stale = _found(task, record, options)
            if not stale:
                return (_kept_weights(task) if options.keep_weights else "") + said
            options = options._replace(force=True)
    except DamagedRecord as error:
        note = f"{error} Set aside as {set_aside(task.path).name}. " if RANK == 0 else ""
    if options.force:
        shutil.rmtree(task.folder, ignore_errors=True)
    deadline = float("inf") if options.max_seconds is None else time.monotonic() + options.max_seconds
    before = _before(task)
    usable = before if before and task.has_made(before) and task.weights.exists() and not options.force else None
    run = Run(task, tell, deadline, options.data_dir, options.any_code, usable, options.accelerator)
    start = time.perf_counter()
    try:
        results, finished = task.experiment.main(task.config, run), True
    except OutOfTime:
        results, finished = run.so_far, False
    note += "".join(f"{sentence} " for sentence in run.notes)
    spent = run.seconds.get("before", 0.0) + time.perf_counter() - start
    run.seconds["total"] = spent
    if RANK == 0 and (finished or run.metrics):
        config = as_json(dataclasses.asdict(task.config))
        record = Record(
            task.experiment.name, task.preset, config, task.command, as_json(results), run.metrics, run.seconds,
            finished=finished, made=_made(run), replay=run.replay,
        )  # fmt: skip
        if finished or _epochs(record) >= _epochs(before):
            record.written(task.path)
        else:
            note += "the record has more epochs than were trained now, and was kept. "
            options = options._replace(keep_weights=False)  # these weights are not the record's
    if options.keep_weights:
        note += _kept_weights(task)
    if not finished:
        return note + "stopped for time; the same command goes on from here"
    return note + f"done in {spent:.0f} s"


def _found(task: Task, record: Record, options: Options) -> tuple[str, bool]:
    """Say of a finished record what is known of the code that made it, and whether it is stale and to be made anew."""
    if record.made.get("code") == code_hash(task.experiment.main):
        return "finished before", False
    if not options.stale:
        return "finished before, by code that has changed since (see --stale)", False
    found = check(task, record, options.data_dir, accelerator=options.accelerator)
    return f"finished before; replay: {found.verdict} ({found.compared})", found.verdict == DIFFERS


def _made(run: Run) -> dict[str, Any]:
    """Say with what a run was made; with its parts, if more than one code or processor took part."""
    parts = {"parts": run.parts} if len(run.parts) > 1 else {}
    trains = isinstance(run.task.config, TrainedConfig)
    device = {"device": devices_of(run).device.type if trains else "cpu"}
    return {**made_with(), **device, "code": code_hash(run.task.experiment.main), **parts}


def _before(task: Task) -> Record | None:
    try:
        return Record.read(task.path) if task.path.exists() else None
    except DamagedRecord:
        return None


def _epochs(record: Record | None) -> int:
    return max(map(len, record.metrics.values()), default=0) if record else 0


def _kept_weights(task: Task) -> str:
    weights = task.folder / "weights.pt"
    if not weights.exists():
        return "there are no weights to keep. "
    size = weights.stat().st_size
    if size > MAX_WEIGHTS:
        return f"weights of {size:,} bytes stay in runs/ (limit {MAX_WEIGHTS:,}). "
    shutil.copyfile(weights, task.weights)
    return ""


def run_all(tasks: Sequence[Task], options: Options, jobs: int, console: Console) -> bool:
    """Run all tasks, `jobs` at a time, with a bar each; true if none failed."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and (jobs > 1 or options.force or options.stale):
        raise BadOption(
            "Several processes for a run (torchrun) go with neither --jobs, --force nor --stale: remove its record."
        )
    failed = []
    with _bars(console) as progress:
        bars = {
            task.path: progress.add_task(f"{task.experiment.name} {task.name}", total=1.0, text="") for task in tasks
        }
        for task, ok, text in _performed(tasks, options, jobs, progress, bars):
            progress.update(bars[task.path], visible=False)
            if RANK == 0 or not ok:
                said = f"{task.experiment.name} {task.name}: {text}"
                console.print(said, markup=False, highlight=False, soft_wrap=True)
            if not ok:
                failed.append(task)
    return not failed


def _performed(
    tasks: Sequence[Task], options: Options, jobs: int, progress: Progress, bars: Mapping[Path, TaskID]
) -> Iterator[tuple[Task, bool, str]]:
    if jobs == 1:
        for task in tasks:

            def tell(done: float, text: str, task: Task = task) -> None:
                progress.update(bars[task.path], completed=done, text=text)

            yield task, *_attempt(task, options, tell)
        return
    spawn = multiprocessing.get_context("spawn")
    news, waiting, working = spawn.Queue(), list(tasks), {}
    try:
        while waiting or working:
            while waiting and len(working) < jobs:
                task = waiting.pop(0)
                process = spawn.Process(target=_work, args=(task, options, news), daemon=True)
                process.start()
                working[task.path] = task, process
            path, done, text, ok = _next_news(news, working)
            task, process = working[path]
            if ok is None:
                progress.update(bars[path], completed=done, text=text)
            else:
                process.join()
                del working[path]
                yield task, ok, text
    finally:
        for _, process in working.values():
            process.kill()  # it loses nothing, and Lightning would have its say


def _next_news(news: Any, working: Mapping[Path, Any]) -> tuple[Path, float, str, bool | None]:
    while True:
        try:
            return news.get(timeout=1.0)
        except Exception:  # queue.Empty: check that all processes are alive
            for path, (_, process) in working.items():
                if not process.is_alive() and news.empty():
                    return path, 0.0, f"its process died (exit code {process.exitcode})", False


def _work(task: Task, options: Options, news: Any) -> None:
    """Run a task in a process of its own."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its children
    ok, text = _attempt(task, options, lambda done, text: news.put((task.path, done, text, None)))
    news.put((task.path, 1.0, text, ok))


def _end_with_parent() -> None:
    """End this process when its parent has ended: a killed parent cannot end its children."""
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _attempt(task: Task, options: Options, tell: Tell) -> tuple[bool, str]:
    try:
        return True, perform(task, options, tell)
    except (BadOption, DataError) as error:
        return False, str(error)
    except Exception:
        return False, f"failed\n{traceback.format_exc()}"


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(compact=True),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=RANK > 0 or not console.is_terminal) as progress:
        yield progress
