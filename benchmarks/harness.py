"""Side-by-side measurements: interleaved rounds in random order, ratios paired within a round.

Ratios are of CPU seconds of this process on one thread and (where the system allows) one pinned core; a
ratio is the median over rounds of the ratio within a round, with its quartiles. Differences below
the quartiles' distance are not resolved.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from torch.profiler import ProfilerActivity, profile

RECORDS = Path(__file__).parent / "records"
Run = Callable[[], object]


def quiet_down() -> None:
    """Pin this process to one core and one thread, so that the rest of the machine matters as little as possible."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


class Seconds(NamedTuple):
    """Seconds of each run, as a list over rounds."""

    cpu: dict[str, list[float]]
    wall: dict[str, list[float]]


def time_side_by_side(runs: Mapping[str, Run], rounds: int, title: str) -> Seconds:
    """Measure the seconds of every run in every round. A round times every run once, in random order."""
    order = random.Random(0)
    names = list(runs)
    seconds = Seconds({name: [] for name in names}, {name: [] for name in names})
    for name in names:  # warm up
        runs[name]()
        runs[name]()
    with Progress(transient=True) as progress:
        for _ in progress.track(range(rounds), description=title):
            for name in order.sample(names, len(names)):
                start = time.process_time(), time.perf_counter()
                runs[name]()
                seconds.cpu[name].append(time.process_time() - start[0])
                seconds.wall[name].append(time.perf_counter() - start[1])
    return seconds


def paired_ratio(a: list[float], b: list[float]) -> dict[str, float]:
    """Return the median and the quartiles of a / b within each round."""
    lower, median, upper = statistics.quantiles([x / y for x, y in zip(a, b, strict=True)], n=4)
    return {"median": median, "lower": lower, "upper": upper}


def allocated_peak(run: Run) -> int:
    """Peak bytes that torch's allocator gives out during run(), after one run to warm up: to machine code, too.

    Of eager solves it is what `torchmali.measure.peak_bytes` finds, which sees operations alone.
    """
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    results: Any = profiler.profiler
    found = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())))


def header(command: str, packages: tuple[str, ...]) -> dict[str, Any]:
    """Describe the command, the versions and the kind of machine."""
    return {
        "command": command,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "device": "cpu",
    }


def write_record(name: str, record: Mapping[str, Any]) -> Path:
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def command_line(module: str) -> str:
    return " ".join(["python -m", module, *sys.argv[1:]])


def options_of(doc: str | None, rounds: int, steps: int) -> argparse.Namespace:
    """Parse the command line of a benchmark that times solves side by side, and call `quiet_down`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds (default {rounds})")
    parser.add_argument("--steps", type=int, default=steps, help=f"solver steps N (default {steps})")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    quiet_down()
    return options


def finish(name: str, options: argparse.Namespace, results: Any, packages: tuple[str, ...], kept: bool) -> None:
    """Write the record, and fail if a limit was missed."""
    if not options.no_record:
        head = header(command_line(f"benchmarks.{name}"), packages)
        path = write_record(name, {"header": head, "rounds": options.rounds, "results": results})
        Console().print(f"Record: {path.relative_to(path.parents[2])}")
    if not kept:
        raise SystemExit("A limit was missed.")
