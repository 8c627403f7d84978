"""Random problems against plain autograd.

    python -m tests.fuzz --cases 10000 --record FILE        judge cases 0 to 9999
    python -m tests.fuzz --only 123                         judge one case, and shrink it if it fails
    python -m tests.fuzz float32 --problems 1000            MALI's gradients in float32 (has its own --help)
    python -m tests.fuzz scales --cases 1000                elements of many scales on integers (has its own --help)

A case is drawn from its number and the seed: field, state, dtypes, memory layouts, times, solver, controller, gradient
method, arguments, observer, what requires a gradient. judge.py says what is compared with what, and by which measure.
Outcomes: "agrees"; "warned" (a SolverWarning told of the gradient); "refused" (an error of torchmali that tells what to
do); "failed" (anything else), which is printed with the simplest problem that fails in the same way.
"""

from __future__ import annotations

import argparse
import sys

from . import float32, runner, scales


def main() -> None:
    others = {"float32": float32.main, "scales": scales.main}
    if sys.argv[1:] and sys.argv[1] in others:
        others[sys.argv[1]](sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner.add_options(parser)
    raise SystemExit(runner.main(parser.parse_args()))


if __name__ == "__main__":
    main()
