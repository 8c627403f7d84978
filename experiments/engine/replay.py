"""Replays: a few steps of training, or a few pieces of a run, computed again and compared with what they gave.

A record is stale when its replay differs, not when a file of the code has changed. Equal bits are the same; numbers
that differ in round-off alone are what another processor gives; anything else, a count above all, is another run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

STEPS = 4  # of training, that a record pins and a replay repeats
PIECES = 6  # at most, of a run that is made of pieces
SECONDS = 10.0  # after which a replay begins no further piece
RELATIVE, ABSOLUTE = 1e-3, 1e-9  # what round-off may change in a few steps

SAME, ROUND_OFF, DIFFERS, UNKNOWN = "same", "round-off", "differs", "not comparable"


class Wanted(NamedTuple):
    """What a replay computes: so many steps of the first epoch (None: all of it), or pieces (none named: a few)."""

    steps: int | None = STEPS
    pieces: tuple[str, ...] = ()


class Replayed(Exception):
    """Ends a run that only replays. found: {"steps": [...], "epoch": {...}} or {"pieces": {...}}."""

    def __init__(self, found: dict[str, Any]):
        super().__init__("This run only replays the beginning of another.")
        self.found = found


def compare(then: Any, now: Any) -> str:
    """Compare two JSON values: the same, different by round-off, or different.

    Integers (counts, bytes), texts and the structure must be equal. NaN is equal to NaN.
    """
    return worst(verdict for _, _, _, verdict in _compared(then, now, ""))


def first_difference(then: Any, now: Any) -> str:
    """Say where two values differ first, and how; an empty text if they do not."""
    for place, one, other, verdict in _compared(then, now, ""):
        if verdict == DIFFERS:
            return f"{place or 'value'} was {_brief(one)}, is {_brief(other)}"
    return ""


def _brief(x: Any) -> str:
    text = f"{x:.6g}" if isinstance(x, float) else json.dumps(x)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _compared(then: Any, now: Any, place: str) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield place, both values and the verdict of each leaf."""
    if isinstance(then, Mapping) and isinstance(now, Mapping) and then.keys() == now.keys():
        for name in then:
            yield from _compared(then[name], now[name], f"{place} {name}".strip())
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for i, (one, other) in enumerate(zip(then, now, strict=True)):
            yield from _compared(one, other, f"{place}[{i}]")
    elif isinstance(then, float) or isinstance(now, float):
        yield place, then, now, _compare_floats(then, now)
    else:
        yield place, then, now, SAME if then == now and type(then) is type(now) else DIFFERS


def _compare_floats(then: Any, now: Any) -> str:
    if not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in (then, now)):
        return DIFFERS
    if then == now or (math.isnan(then) and math.isnan(now)):
        return SAME
    return ROUND_OFF if math.isclose(then, now, rel_tol=RELATIVE, abs_tol=ABSOLUTE) else DIFFERS


def worst(verdicts: Any) -> str:
    """Return the worst of several verdicts; of none: the same."""
    return max(verdicts, key=(SAME, ROUND_OFF, DIFFERS, UNKNOWN).index, default=SAME)


def spread(names: Sequence[str]) -> list[str]:
    """Order names so that the first few are spread over all: halves, then quarters, and so on."""
    width = max(1, (len(names) - 1).bit_length())
    return [names[i] for k in range(2**width) if (i := int(f"{k:0{width}b}"[::-1], 2)) < len(names)]


def quick(seconds: Mapping[str, float]) -> list[str]:
    """Choose the pieces that a replay repeats: a few that are spread over all those that are quick."""
    limit = max(SECONDS / PIECES, min(seconds.values(), default=0.0))
    return spread([name for name, time in seconds.items() if time <= limit])[:PIECES]


def value_in(results: Mapping[str, Any], name: str) -> Any:
    """Return the value of a piece in the results of a record, or None where it is not there under its name."""
    if name in results.get("cells", {}):
        return results["cells"][name]
    branch: Any = results
    for part in name.split(" / "):
        if not isinstance(branch, Mapping) or part not in branch:
            return None
        branch = branch[part]
    return branch


# Old records have means over an epoch, and no steps

EPOCH_LOSS, EPOCH_COUNTS = 1e-2, 5e-3  # relative differences that another processor makes over an epoch


def compare_epochs(then: Mapping[str, float], now: Mapping[str, float]) -> str:
    """Compare the first epoch of a record that pins no steps: losses and counts, which are means over the epoch."""
    names = _comparable(then, now)
    if not names:
        return UNKNOWN
    if all(then[name] == now[name] for name in names):
        return SAME
    return DIFFERS if difference_of_epochs(then, now) else ROUND_OFF


def difference_of_epochs(then: Mapping[str, float], now: Mapping[str, float]) -> str:
    """Say what differs by more than another processor makes it differ; an empty text if nothing does."""
    for name in _comparable(then, now):
        limit = EPOCH_COUNTS if name.startswith("evaluations") else EPOCH_LOSS
        if not math.isclose(then[name], now[name], rel_tol=limit):
            return f"{name} was {then[name]:.5g}, is {now[name]:.5g}"
    return ""


def _comparable(then: Mapping[str, float], now: Mapping[str, float]) -> list[str]:
    names = [name for name in sorted(then) if name.startswith(("train_", "evaluations_")) and name in now]
    return [name for name in names if name != "train_accuracy"]
