"""torchdiffeq's own tests, run on `torchmali.torchdiffeq`.

    python -m benchmarks.torchdiffeq_tests CHECKOUT [--theirs] [--only NAME]

CHECKOUT is the path of a checkout of torchdiffeq's repository, release 0.2.5 or the main branch. `import torchdiffeq`
in its tests finds `torchmali.torchdiffeq`, or with --theirs the package that is installed. Tests of implicit methods,
which the main branch adds, are left out. Prints each test function with the number of its sub-tests that failed, and
the first error of each kind; returns 1 if a test function failed that is neither in `LOOKS_AT_INTERNALS` nor in
`FAILS_THERE_TOO`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import unittest
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torchmali.torchdiffeq

MODULES = ("api_tests", "event_tests", "gradient_tests", "norm_tests", "odeint_tests")
LOOKS_AT_INTERNALS = {  # test functions that cannot pass, and why
    "TestNorms.test_adjoint_norm": "reads and replaces `adjoint_options` of the autograd node of torchdiffeq's adjoint"
}
FAILS_THERE_TOO = {  # with --theirs, and why
    "TestMinMaxStep.test_min_max_step": "SciPy 1.17's LSODA takes steps below min_step: 191 evaluations in either"
}


class Result(unittest.TestResult):
    """What became of the sub-tests of one test function."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []  # the sub-tests that failed, and the last line of their errors

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802 (unittest's name)
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note(subtest, err)

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self._note(test, err)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self._note(test, err)

    def _note(self, test: Any, err: Any) -> None:
        kind, value, _ = err
        text = (str(value).splitlines() or [""])[0]
        self.found.append((test.id().partition(" ")[2], f"{kind.__name__}: {text}"))


def without_implicit_methods(problems: Any) -> None:
    """Take the implicit methods of the main branch out of the lists of methods that its tests use."""
    implicit = set(getattr(problems, "FIXED_IMPLICIT_METHODS", ()))
    for name in ("FIXED_METHODS", "METHODS", "FIXED_IMPLICIT_METHODS", "IMPLICIT_METHODS"):
        if hasattr(problems, name):
            setattr(problems, name, tuple(x for x in getattr(problems, name) if x not in implicit))


def test_functions(checkout: Path, is_theirs: bool) -> list[unittest.TestCase]:
    """The test functions of a checkout."""
    if not is_theirs:
        sys.modules["torchdiffeq"] = torchmali.torchdiffeq
    sys.path.insert(0, str(checkout / "tests"))
    without_implicit_methods(importlib.import_module("problems"))
    found: list[unittest.TestCase] = []
    for name in MODULES:
        for suite in unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(name)):
            tests: Any = suite
            found += [test for test in tests if isinstance(test, unittest.TestCase)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="torchdiffeq's own tests, run on torchmali.torchdiffeq.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--theirs", action="store_true", help="run them on the torchdiffeq that is installed")
    parser.add_argument("--only", default="", help="test functions with this in their name")
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    for test in test_functions(options.checkout, options.theirs):
        name = ".".join(test.id().split(".")[-2:])
        if options.only not in name:
            continue
        result = Result()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            test.run(result)
        outcome = "passed" if result.wasSuccessful() else "FAILED"
        known = {**LOOKS_AT_INTERNALS, **FAILS_THERE_TOO}.get(name)
        if outcome == "FAILED" and known:
            outcome = "looks at internals" if name in LOOKS_AT_INTERNALS else "fails there, too"
        outcomes[outcome] += 1
        print(f"{name:55}{outcome}{f'  {len(result.found)} sub-tests' if result.found else ''}", flush=True)
        for error, n in Counter(error for _, error in result.found).most_common(6):
            where = next(where for where, e in result.found if e == error)
            print(f"    {n:4} x {error[:150]}\n           first: {where}", flush=True)
        if known:
            print(f"    {known}", flush=True)
    print(", ".join(f"{n} {outcome}" for outcome, n in outcomes.items()))
    return int(outcomes["FAILED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
