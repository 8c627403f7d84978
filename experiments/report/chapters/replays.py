"""Records and the code of today: on which processors they were made, and what their replays say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.engine.check import is_of
from experiments.engine.replay import DIFFERS, ROUND_OFF, SAME, UNKNOWN
from experiments.report.runs import Found
from experiments.report.tables import Cell, Table

NEVER = "not replayed"
VERDICTS = (SAME, ROUND_OFF, DIFFERS, UNKNOWN, NEVER)
COMMAND = "python -m experiments replay"
Checks = Mapping[str, Mapping[str, Any]]


def key_of(one: Found) -> str:
    return "/".join(one.path.split("/")[-2:])


def entry_of(one: Found, checks: Checks) -> Mapping[str, Any]:
    """Return the last check of a record; none, if it was of another record of that name."""
    entry = checks.get(key_of(one), {})
    return entry if entry and is_of(entry, one.record) else {}


def stale(found: Sequence[Found], checks: Checks) -> dict[str, str]:
    """Return, by path, what the code of today does differently than the code that made a record."""
    entries = {one.path: entry_of(one, checks) for one in found}
    return {path: entry.get("difference", "") for path, entry in entries.items() if entry.get("verdict") == DIFFERS}


def tables(found: Sequence[Found], checks: Checks) -> list[Table]:
    by_experiment: dict[str, list[Found]] = {}
    for one in found:
        by_experiment.setdefault(one.record.experiment, []).append(one)
    rows = [[name, *_counts(group, checks)] for name, group in by_experiment.items()]
    rows.append(["all", *_counts(found, checks)])
    notes = "A replay repeats a few steps of training, the first epoch of older records, or a few pieces, with the "
    notes += "code of the check, and compares losses, counts and values. It differs: the record is stale. Not "
    notes += "comparable: the record was made before replays existed, its first epoch is too long to repeat, and its "
    notes += "evaluations of a step do not contradict those of today. Records from before name no processor."
    columns = ("experiment", "records", "name their processor", *VERDICTS)
    return [Table("replays", "Records and their replays", columns, rows, notes, [COMMAND]), _differing(found, checks)]


def _counts(group: Sequence[Found], checks: Checks) -> list[str]:
    verdicts = Counter(entry_of(one, checks).get("verdict", NEVER) for one in group)
    named = sum(bool(one.record.made.get("cpu")) for one in group)
    return [str(len(group)), str(named), *(str(verdicts[verdict]) for verdict in VERDICTS)]


def _differing(found: Sequence[Found], checks: Checks) -> Table:
    rows = []
    for one in found:
        entry = entry_of(one, checks)
        if entry.get("verdict") == DIFFERS:
            name = Cell(key_of(one).removesuffix(".json"), one.path)
            rows.append([name, str(one.record.made.get("commit")), str(entry["commit"]), entry.get("difference", "")])
    columns = ("record", "made by", "replayed by", "first difference")
    remedy = "Their commands with --stale make them anew. What else has changed is in CHANGELOG.md."
    return Table("stale", "Stale records", columns, rows, remedy, [])
