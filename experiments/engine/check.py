"""Checks of records: their replays with the code of today, and a file with the last verdict on each."""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from experiments.engine.record import RECORDS, Record, by_whom, checksum, write_in_one_piece
from experiments.engine.replay import (
    DIFFERS,
    STEPS,
    UNKNOWN,
    Replayed,
    Wanted,
    compare,
    compare_epochs,
    difference_of_epochs,
    first_difference,
    value_in,
)
from experiments.engine.task import Experiment, Run, Task

CHECKS = RECORDS.parent / "replays.json"

LONGEST_EPOCH = 15.0  # seconds; of records that pin no steps a first epoch is replayed as a whole up to this long


class Check(NamedTuple):
    """Verdict on a record, what was compared, and the steps of today where the record has none to compare with."""

    verdict: str
    compared: str
    difference: str = ""
    steps: list[dict[str, float]] | None = None


def check(
    task: Task, record: Record, data_dir: Path | None = None, pinned: list[Any] | None = None, accelerator: str = "auto"
) -> Check:
    """Replay a record with the code of today.

    pinned: first steps that were made later than the record, which itself has none.
    """
    steps = record.replay.get("steps") or pinned
    if steps:
        now = _replayed(task, Wanted(len(steps)), data_dir, accelerator)["steps"]
        since = "of the record" if "steps" in record.replay else "pinned later"
        said, kept = f"{len(steps)} first steps, {since}", None if record.replay else steps
        return Check(compare(steps, now), said, first_difference(steps, now), kept)
    if record.metrics:
        return _check_training(task, record, data_dir, accelerator)
    found = _replayed(task, Wanted(pieces=tuple(record.replay.get("pieces", task.experiment.replayed))), data_dir)
    values = {name: value for name, value in found["pieces"].items() if value_in(record.results, name) is not None}
    if not values:
        return Check(UNKNOWN, "no piece of the record could be computed again")
    then = {name: value_in(record.results, name) for name in values}
    return Check(compare(then, values), f"pieces: {'; '.join(values)}", first_difference(then, values))


def _check_training(task: Task, record: Record, data_dir: Path | None, accelerator: str) -> Check:
    """Check a training run that pins no steps: by the means of its first epoch, or by counts that never change."""
    first = {name: values[0] for name, values in record.metrics.items() if values[0] is not None}
    if record.seconds["epochs"][0] <= LONGEST_EPOCH:
        found = _replayed(task, Wanted(None), data_dir, accelerator)
        verdict, said = compare_epochs(first, found["epoch"]), "means of the first epoch"
        apart = difference_of_epochs(first, found["epoch"]) if verdict == DIFFERS else ""
        return Check(verdict, said, apart, found["steps"])
    steps = _replayed(task, Wanted(STEPS), data_dir, accelerator)["steps"]
    counts = {name: value for name, value in first.items() if name.startswith("evaluations") and value == int(value)}
    if not counts or not all(record.metrics[name][0] == statistics.fmean(record.metrics[name]) for name in counts):
        return Check(UNKNOWN, "made before replays existed; its steps vary, and its first epoch is long", "", steps)
    said = "evaluations of a step, which never vary in the record"
    for step in steps:
        for name, value in counts.items():
            if step[name] != value:
                return Check(DIFFERS, said, f"{name} was {value:g}, is {step[name]:g}", steps)
    return Check(UNKNOWN, "made before replays existed; evaluations of a step are the same", "", steps)


def _replayed(task: Task, wanted: Wanted, data_dir: Path | None, accelerator: str = "auto") -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        run = Run(task, data_dir=data_dir, accelerator=accelerator, replaying=wanted, place=Path(place))
        try:
            task.experiment.main(task.config, run)
        except Replayed as replayed:
            return replayed.found
    raise AssertionError(f"{task.experiment.name} ended before it replayed anything.")


# The file of verdicts


def read_checks(path: Path = CHECKS) -> dict[str, dict[str, Any]]:
    """Read the last check of each record, by experiment/name."""
    return json.loads(path.read_text()) if path.exists() else {}


def is_of(entry: Mapping[str, Any], record: Record) -> bool:
    """Tell whether a check is of this record, not of one that was there before."""
    return entry["record"] == identity(record)


def identity(record: Record) -> str:
    return checksum(dataclasses.asdict(dataclasses.replace(record, replay={})))[:16]


def task_of(experiment: Experiment, record: Record) -> Task:
    """Return the task that makes a record; fields that the record does not know have their default."""
    preset = experiment.presets[record.preset]
    given = {name: tuple(x) if isinstance(x, list) else x for name, x in record.config.items() if hasattr(preset, name)}
    return Task(experiment, record.preset, {k: v for k, v in given.items() if v != getattr(preset, k)})


def check_again(name: str, experiment: Experiment, record: Record, data_dir: Path | None, path: Path = CHECKS) -> str:
    """Check a record, write down the verdict and return it in words. Steps that are pinned later are kept."""
    entries, task = read_checks(path), task_of(experiment, record)
    before = entries.get(name, {})
    pinned = before.get("steps") if before and is_of(before, record) else None
    found = check(task, record, data_dir, pinned)
    entry: dict[str, Any] = {"record": identity(record), "verdict": found.verdict, "compared": found.compared}
    entry |= {"date": datetime.now(timezone.utc).date().isoformat(), **by_whom(experiment.main)}
    if found.difference:
        entry["difference"] = found.difference
    if found.steps:
        entry["steps"] = found.steps
    entries[name] = entry
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(entries[key])}" for key in sorted(entries))
    write_in_one_piece(path, f"{{\n{lines}\n}}\n".encode())
    return f"{found.verdict} ({found.compared})" + (f": {found.difference}" if found.difference else "")
