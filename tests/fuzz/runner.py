"""Runner of many random cases, in several processes, with a record that can be continued after an interruption."""

from __future__ import annotations

import json
import multiprocessing
import time
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.engine.record import made_with

from .cases import draw
from .judge import Outcome, judge
from .shrink import shrink


class Fuzzer(NamedTuple):
    """A kind of random problems."""

    command: str
    imports: str  # the line that makes a spec's repr and `judge` known
    draw: Callable[[int, int], Any]
    judge: Callable[[Any], Outcome]
    shrink: Callable[[Any, Outcome], tuple[Any, Outcome]]


CASES = Fuzzer("python -m tests.fuzz", "from tests.fuzz import *", draw, judge, shrink)
SHRUNK_PER_KIND = 3  # in each process: further failures of a kind are printed as they were drawn
_shrunk: Counter[str] = Counter()


def work(case: int, seed: int, shrinks: bool, fuzzer: Fuzzer = CASES) -> dict[str, Any]:
    """Judge one case. A failure is shrunk, and comes with the command and the code that repeat it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    spec, started = fuzzer.draw(case, seed), time.perf_counter()
    try:
        outcome = fuzzer.judge(spec)
    except Exception as error:
        outcome = Outcome("failed", f"the fuzzer itself: {type(error).__name__}", traceback.format_exc()[-600:])
    row = {"case": case, "outcome": outcome.name, "seconds": round(time.perf_counter() - started, 3)}
    if outcome.verdict == "failed":
        row |= {"spec": repr(spec), "detail": outcome.detail}
        _shrunk[outcome.kind] += 1
        if shrinks and _shrunk[outcome.kind] <= SHRUNK_PER_KIND and not outcome.kind.startswith("the fuzzer"):
            small, found = fuzzer.shrink(spec, outcome)
            row |= {"smallest": repr(small), "smallest detail": found.detail}
    return row


def results(
    cases: Sequence[int], seed: int, jobs: int, shrinks: bool, fuzzer: Fuzzer = CASES
) -> Iterator[dict[str, Any]]:
    one = partial(work, seed=seed, shrinks=shrinks, fuzzer=fuzzer)
    if jobs == 1:
        yield from map(one, cases)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(one, cases, chunksize=4)


def run(n: int, seed: int, jobs: int, record: Path | None, resume: bool, shrinks: bool, fuzzer: Fuzzer = CASES) -> int:
    """Judge cases 0, ..., n - 1 and return the number of failures."""
    log = record.with_suffix(".log.jsonl") if record else None
    rows = [row for row in _finished(log, seed) if row["case"] < n] if log and resume else []
    done = {row["case"] for row in rows}
    command = f"{fuzzer.command} --cases {n} --seed {seed}"
    started, failures = time.perf_counter(), sum("spec" in row for row in rows)
    if log and not rows:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(json.dumps({"seed": seed}) + "\n")
    for row in results([case for case in range(n) if case not in done], seed, jobs, shrinks, fuzzer):
        rows.append(row)
        if log:
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if "spec" in row:
            failures += 1
            print("\r" + described(row, seed, fuzzer), flush=True)
        rate = (len(rows) - len(done)) / (time.perf_counter() - started)
        left = (n - len(rows)) / rate if rate else 0.0
        print(f"\r{len(rows)} of {n} cases, {failures} failures, {rate:.1f}/s, {left:.0f} s left  ", end="", flush=True)
    rows.sort(key=lambda row: row["case"])
    print("\n\n" + table(rows))
    if record:
        made = {"command": command, **made_with(), "seconds": round(time.perf_counter() - started)}
        body = {**made, "cases judged before a resume": len(done), **summary(rows, seed, fuzzer)}
        record.write_text(json.dumps(body, indent=1) + "\n")
    return failures


def _finished(log: Path, seed: int) -> list[dict[str, Any]]:
    """Return the rows of an earlier run, whose last line may have been cut short."""
    if not log.exists():
        return []
    first, *lines = log.read_text().splitlines() or ["{}"]
    if json.loads(first).get("seed") != seed:
        raise SystemExit(f"{log.name} is of another seed: {first}. Give --seed as there, or another --record.")
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def described(row: dict[str, Any], seed: int, fuzzer: Fuzzer = CASES) -> str:
    """Return a failure as text, with the lines that repeat it."""
    lines = [f"case {row['case']}: {row['outcome']}", f"  {row['detail'][:400]}"]
    if "smallest" in row:
        lines += [f"  smallest: {row['smallest']}", f"    {row['smallest detail'][:400]}"]
        lines += [f"    {fuzzer.imports}; print(judge({row['smallest']}))"]
    else:
        lines.append(f"  {row['spec']}")
    return "\n".join([*lines, f"  {fuzzer.command} --only {row['case']} --seed {seed}", ""])


def summary(rows: Sequence[dict[str, Any]], seed: int, fuzzer: Fuzzer = CASES) -> dict[str, Any]:
    """Return the counts of outcomes, altogether and by feature, and every failure."""
    by_feature: dict[str, dict[str, Counter]] = defaultdict(lambda: defaultdict(Counter))
    for row in rows:
        verdict = row["outcome"].split(":")[0]
        for name, value in fuzzer.draw(row["case"], seed).features.items():
            by_feature[name][value][verdict] += 1
    return {
        "cases": len(rows),
        "outcomes": dict(Counter(row["outcome"] for row in rows).most_common()),
        "features": {name: {value: dict(c) for value, c in sorted(v.items())} for name, v in by_feature.items()},
        "failures": [row for row in rows if "spec" in row],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    counts = Counter(row["outcome"] for row in rows).most_common()
    return "\n".join(f"{n:7d}  {name}" for name, n in counts)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=1000, help="how many, from number 0 on (1000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another list of cases (0)")
    parser.add_argument("--only", type=int, metavar="CASE", help="judge this one and stop")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write a JSON record; finished cases are logged beside it"
    )
    parser.add_argument("--resume", action="store_true", help="skip the cases in the log beside --record")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they were drawn")


def main(options: Namespace, fuzzer: Fuzzer = CASES) -> bool:
    """Do what the options say; return whether a case failed."""
    if options.only is not None:
        return only(options.only, options.seed, not options.no_shrink, fuzzer)
    how = options.jobs, options.record, options.resume, not options.no_shrink
    return run(options.cases, options.seed, *how, fuzzer) > 0


def only(case: int, seed: int, shrinks: bool, fuzzer: Fuzzer) -> bool:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    spec = fuzzer.draw(case, seed)
    outcome = fuzzer.judge(spec)
    print(f"{spec}\n{outcome.name}\n{outcome.detail}")
    if outcome.verdict == "failed" and shrinks:
        small, found = fuzzer.shrink(spec, outcome)
        print(f"\nThe same failure, made simple:\n{small}\n{found.detail}")
    return outcome.verdict == "failed"
