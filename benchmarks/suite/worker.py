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
        """Make a case and run it once."""
        self.cases[key] = case = self.methods.Case(PROBLEMS[problem], method, how, dtype)
        start = time.process_time()
        case.run()
        return {"compile_seconds": case.compile_seconds, "seconds": time.process_time() - start}

    def forget(self) -> dict[str, Any]:
        self.cases.clear()
        return {}

    def time(self, key: str) -> dict[str, float]:
        case = self.cases[key]
        start = time.process_time(), time.perf_counter()
        case.run()
        return {"cpu": time.process_time() - start[0], "wall": time.perf_counter() - start[1]}

    def measure(self, key: str, reference: str | None = None, memory: bool = True) -> dict[str, Any]:
        """Evaluations; peak bytes, or (memory=False) jax's evaluations in the backward pass.

        With a reference the error of the gradient, None if it is not finite.
        """
        case = self.cases[key]
        found = case.counts(both=not memory)
        if reference is not None:
            if reference not in self.references:
                self.references[reference] = np.load(reference)
            exact, gradient = self.references[reference], case.gradient()
            error = float(np.linalg.norm(gradient - exact) / np.linalg.norm(exact))
            found["error"] = float(f"{error:.4g}") if np.isfinite(error) else None
        return found | ({"peak_bytes": case.peak_bytes()} if memory else {})

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
