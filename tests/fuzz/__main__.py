"""Random problems against plain autograd.

    python -m tests.fuzz --cases 10000 --record FILE        judge cases 0 to 9999
    python -m tests.fuzz --only 123                         judge one case, and shrink it if it fails
    python -m tests.fuzz float32 --problems 1000            MALI's gradients in float32 (has its own --help)

A case is drawn from its number and the seed: field, state, dtypes, memory layouts, times, solver, controller, gradient
method, arguments, observer, what requires a gradient. judge.py says what is compared with what, and by which measure.
Outcomes: "agrees"; "warned" (a SolverWarning told of the gradient); "refused" (an error of torchmali that tells what to
do); "failed" (anything else), which is printed with the simplest problem that fails in the same way.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

from . import float32, runner
from .cases import draw
from .judge import judge
from .shrink import shrink


def main() -> None:
    if sys.argv[1:2] == ["float32"]:
        float32.main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000, help="how many, from number 0 on (1000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another list of cases (0)")
    parser.add_argument("--only", type=int, metavar="CASE", help="judge this one and stop")
    parser.add_argument("--jobs", type=int, default=2, help="processes (2)")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="write a JSON record; finished cases are logged beside it"
    )
    parser.add_argument("--resume", action="store_true", help="skip the cases in the log beside --record")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they were drawn")
    options = parser.parse_args()
    if options.only is not None:
        only(options.only, options.seed, not options.no_shrink)
        return
    how = options.jobs, options.record, options.resume, not options.no_shrink
    failures = runner.run(options.cases, options.seed, *how)
    raise SystemExit(failures > 0)


def only(case: int, seed: int, shrinks: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    spec = draw(case, seed)
    outcome = judge(spec)
    print(f"{spec}\n{outcome.name}\n{outcome.detail}")
    if outcome.verdict == "failed" and shrinks:
        small, found = shrink(spec, outcome)
        print(f"\nThe same failure, made simple:\n{small}\n{found.detail}")
    raise SystemExit(outcome.verdict == "failed")


if __name__ == "__main__":
    main()
