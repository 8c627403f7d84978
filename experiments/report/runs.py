"""Runs as the report sees them: records with their paths, chosen and grouped, their means and their commands."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.engine.record import Record
from experiments.report.claims import Finding
from experiments.report.figures import Picture
from experiments.report.tables import Table


class Found(NamedTuple):
    """A record, and its path from the project's root."""

    record: Record
    path: str


Groups = dict[str, list[Found]]  # by method
Shown = tuple[list[Table], list[Picture], list[Finding]]


def chosen(found: Sequence[Found], **config: Any) -> list[Found]:
    """Choose the runs whose config has these values."""
    return [one for one in found if all(one.record.config.get(name) == value for name, value in config.items())]


def together(groups: Groups, *names: str) -> Groups:
    """Return the named groups with the seeds that all of them have; no groups where one is missing."""
    if any(name not in groups for name in names):
        return {}
    seeds = set.intersection(*({one.record.config["seed"] for one in groups[name]} for name in names))
    kept = {name: [one for one in groups[name] if one.record.config["seed"] in seeds] for name in names}
    return kept if seeds else {}


def each(groups: Groups, *names: str) -> Groups:
    """Return the named groups with all their seeds; no groups where one is missing."""
    return {name: groups[name] for name in names} if all(name in groups for name in names) else {}


def by_seed(group: Sequence[Found], of: Callable[[Found], float]) -> dict[int, float]:
    return {one.record.config.get("seed", 0): of(one) for one in group}


def all_seeds_of(groups: Groups, names: Mapping[str, str] | None = None) -> str:
    """Say how many seeds there are of each method."""
    counts = {(names or {}).get(name, name): len(group) for name, group in groups.items()}
    if len(set(counts.values())) == 1:
        return seeds_of(groups)
    return "seeds: " + ", ".join(f"{name} {n}" for name, n in counts.items())


def seeds_of(groups: Groups) -> str:
    n = len(next(iter(groups.values())))
    return f"{n} seeds" if n > 1 else "1 seed"


def results(group: Sequence[Found], name: str) -> list[Any]:
    return [one.record.results[name] for one in group]


def mean(group: Sequence[Found], of: Callable[[Found], float]) -> float:
    return statistics.fmean(of(one) for one in group)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean, and the standard deviation over seeds."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return (
        text
        if len(values) < 2 or not all(map(math.isfinite, values))
        else f"{text} ± {statistics.stdev(values):.{digits}f}"
    )


def training_seconds(one: Found) -> float:
    """Mean time of an epoch in seconds of the processor, which other work on the machine disturbs little.

    On a GPU, for which the processor waits or not: by the clock.
    """
    seconds = one.record.seconds
    on_gpu = one.record.made.get("device", "cpu") != "cpu" and "training_wall" in seconds
    return statistics.fmean(x for x in seconds["training_wall" if on_gpu else "training_cpu"] if x is not None)


def commands(found: Sequence[Found]) -> list[str]:
    """Commands of runs: one for all methods with the same seeds that differ in nothing else."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for one in found:
        words = one.record.command.split()  # python -m experiments run NAME, then pairs
        pairs = dict.fromkeys(zip(words[5::2], words[6::2], strict=True))
        flags = dict(pair for pair in pairs if pair[0] != "--set")
        method, seed = flags.pop("--method", ""), flags.pop("--seed", "")
        rest = [*flags.items(), *(pair for pair in pairs if pair[0] == "--set")]
        line = " ".join([*words[:5], *(f"{flag} {value}" for flag, value in rest)])
        seeds.setdefault((line, method), []).append(seed)
    methods: dict[tuple[str, str], list[str]] = {}
    for (line, method), its in seeds.items():
        methods.setdefault((line, ",".join(its)), []).append(method)
    lines = []
    for (line, its), names in methods.items():
        line += f" --method {','.join(names)}" if any(names) else ""
        lines.append(line + (f" --seed {its}" if its else ""))
    return lines
