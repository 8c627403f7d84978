"""The committed records, and helpers that read tables and claims made of them by name, not by position."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.engine.record import Record
from experiments.report.claims import Claim
from experiments.report.runs import Found
from experiments.report.tables import Table

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "experiments" / "records"


def records(experiment: str, preset: str = "cpu", finished: bool = True) -> list[Found]:
    found = [Found(Record.read(path), path.name) for path in sorted((RECORDS / experiment).glob("*.json"))]
    return [one for one in found if one.record.preset == preset and one.record.finished == finished]


def holding(claims: Sequence[Claim], start: str) -> Claim:
    """Return the claim that begins so; it must hold."""
    (claim,) = (one for one in claims if one.text.startswith(start))
    assert claim.verdict == "holds", claim
    return claim


def table_titled(tables: Sequence[Table], start: str) -> Table:
    (table,) = (one for one in tables if one.title.startswith(start))
    return table


def cells(table: Table, row: str, *columns: str) -> list[str]:
    """Return the texts of a table's row, named by its first cell, in the columns named."""
    (found,) = (one for one in table.rows if str(one[0]) == row)
    return [str(found[list(table.columns).index(name)]) for name in columns]
