"""All benchmarks, one after the other; each says whether its limits were kept.

    python -m benchmarks [--full] [--only NAME,NAME] [--no-record]

A benchmark runs in a process of its own: it pins itself to a core. Without --full those that take long are left out,
and the suite (`benchmarks.suite`) measures some of its problems only. What the suite has measured with the code as it
is, it does not measure again. At the end docs/performance.md is made from the records.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """A module with a command line. quick: it is part of `make bench`. less: its options there."""

    module: str
    quick: bool = True
    less: tuple[str, ...] = ()

    def command(self, full: bool, more: list[str]) -> list[str]:
        return [sys.executable, "-m", self.module, *(() if full else self.less), *more]


BENCHMARKS = {
    "gradients": Benchmark("benchmarks.gradients"),
    "exact": Benchmark("benchmarks.exact"),
    "environment": Benchmark("benchmarks.environment"),
    "overhead": Benchmark("benchmarks.overhead"),
    "budget": Benchmark("benchmarks.budget"),
    "compiled": Benchmark("benchmarks.compiled", quick=False),
    "compiled_adaptive": Benchmark("benchmarks.compiled_adaptive", quick=False),
    "evaluations": Benchmark("benchmarks.evaluations", quick=False),
    "fixed": Benchmark("benchmarks.suite.fixed", less=("--quick",)),
    "adaptive": Benchmark("benchmarks.suite.adaptive", less=("--quick",)),
    "precision": Benchmark("benchmarks.suite.precision", less=("--quick",)),
    "outputs": Benchmark("benchmarks.suite.outputs", less=("--quick",)),
    "work_precision": Benchmark("benchmarks.work_precision", quick=False),
    "images": Benchmark("benchmarks.images", quick=False),
    "latent": Benchmark("benchmarks.latent", quick=False),
}
REPORT = [sys.executable, "-m", "benchmarks.report"]


def chosen(only: str | None, full: bool) -> dict[str, Benchmark]:
    """The benchmarks that are named, or those of `make bench` or `make bench-full`."""
    names = only.split(",") if only else [name for name, one in BENCHMARKS.items() if full or one.quick]
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        raise SystemExit(f"Unknown benchmarks {', '.join(unknown)}. Known: {', '.join(BENCHMARKS)}.")
    return {name: BENCHMARKS[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all benchmarks, all problems of the suite")
    parser.add_argument("--only", help=f"of {', '.join(BENCHMARKS)}")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args()
    more = ["--no-record"] if options.no_record else []
    commands = {name: one.command(options.full, more) for name, one in chosen(options.only, options.full).items()}
    missed = [name for name, command in commands.items() if subprocess.run(command, check=False).returncode]
    if not options.no_record:
        subprocess.run(REPORT, check=True)
    if missed:
        raise SystemExit(f"Limits were missed in: {', '.join(missed)}.")


if __name__ == "__main__":
    main()
