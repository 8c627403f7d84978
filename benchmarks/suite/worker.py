"""A process that solves problems by one framework: a JSON object per line in, one per line out.

    python -m benchmarks.suite.worker torch
    python -m benchmarks.suite.worker jax

It runs what `driver` asks for, one thing at a time, and sleeps in between. What methods print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import warnings
from importlib import metadata
from typing import Any

import numpy as np

from benchmarks.suite.problems import PROBLEMS


class Worker:
    def __init__(self, framework: str):
        self.methods: Any = importlib.import_module(f"benchmarks.suite.{framework}_methods")
        self.cases: dict[str, Any] = {}
        self.references: dict[str, np.ndarray] = {}

    def hello(self) -> dict[str, Any]:
        missing = self.methods.missing()
        packages = {name: metadata.version(name) for name in self.methods.PACKAGES if name not in missing.values()}
        return {"methods": [name for name in self.methods.METHODS if name not in missing], "packages": packages}

    def prepare(self, key: str, problem: str, method: str, how: dict[str, Any], dtype: str) -> dict[str, Any]:
        """Make a case and run it twice, to warm up. A method that takes long is run once."""
        self.cases[key] = case = self.methods.Case(PROBLEMS[problem], method, how, dtype)
        start = time.process_time()
        case.run()
        seconds = time.process_time() - start
        if seconds < 1.0:
            case.run()
        return {"compile_seconds": case.compile_seconds, "seconds": seconds}

    def forget(self) -> dict[str, Any]:
        self.cases.clear()
        return {}

    def time(self, key: str) -> dict[str, float]:
        case = self.cases[key]
        start = time.process_time(), time.perf_counter()
        case.run()
        return {"cpu": time.process_time() - start[0], "wall": time.perf_counter() - start[1]}

    def counts(self, key: str) -> dict[str, Any]:
        return self.cases[key].counts()

    def peak(self, key: str) -> dict[str, int]:
        return {"bytes": self.cases[key].peak_bytes()}

    def error(self, key: str, reference: str) -> dict[str, float | None]:
        """Relative error of the gradient; None: it is not finite."""
        if reference not in self.references:
            self.references[reference] = np.load(reference)
        exact, found = self.references[reference], self.cases[key].gradient()
        error = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
        return {"error": error if np.isfinite(error) else None}

    def reference(self, problem: str, path: str, n_times: int | None = None) -> dict[str, float]:
        gradient, difference = self.methods.reference(PROBLEMS[problem], n_times)
        np.save(path, gradient)
        return {"difference": difference}


def first_line(error: Exception) -> str:
    """What a method says when it fails: the first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:120] if lines else ''}"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    warnings.simplefilter("ignore")  # the record has what becomes of it: errors, failures
    worker = Worker(sys.argv[1])
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = getattr(worker, message.pop("do"))(**message)
        except Exception as error:
            answer = {"failure": first_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
