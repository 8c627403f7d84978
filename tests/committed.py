"""The committed records, and helpers that read tables and claims made of them by name, not by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.engine.record import Record
from experiments.report.claims import Claim, Finding
from experiments.report.runs import Found
from experiments.report.tables import Table

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "experiments" / "records"


def records(experiment: str, preset: str = "cpu", finished: bool = True) -> list[Found]:
    found = [Found(Record.read(path), path.name) for path in sorted((RECORDS / experiment).glob("*.json"))]
    return [one for one in found if one.record.preset == preset and one.record.finished == finished]


def holding(findings: Sequence[Finding], start: str) -> Finding:
    """Return the claim with this id, or the check that begins so; it must hold."""
    (one,) = (x for x in findings if (x.id == start if isinstance(x, Claim) else x.text.startswith(start)))
    assert one.verdict in ("holds", "kept"), one
    return one


def table_titled(tables: Sequence[Table], start: str) -> Table:
    (table,) = (one for one in tables if one.title.startswith(start))
    return table


def cells(table: Table, row: str, *columns: str) -> list[str]:
    """Return the texts of a table's row, named by its first cell, in the columns named."""
    (found,) = (one for one in table.rows if str(one[0]) == row)
    return [str(found[list(table.columns).index(name)]) for name in columns]
