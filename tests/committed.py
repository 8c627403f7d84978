"""The records that are committed."""

from __future__ import annotations

from pathlib import Path

from experiments.record import Record
from experiments.show import Claim, Found

RECORDS = Path(__file__).resolve().parents[1] / "experiments" / "records"


def records(experiment: str, preset: str = "cpu", finished: bool = True) -> list[Found]:
    found = [Found(Record.read(path), path.name) for path in sorted((RECORDS / experiment).glob("*.json"))]
    return [one for one in found if one.record.preset == preset and one.record.finished == finished]


def holding(claims: list[Claim], start: str) -> Claim:
    """The claim that begins so; it must hold."""
    (claim,) = (one for one in claims if one.text.startswith(start))
    assert claim.verdict == "holds", claim
    return claim
