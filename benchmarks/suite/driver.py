"""Workers, rounds and records, for all kinds of measurement of the suite.

All processes are pinned to one core; while one works, the others sleep. A round runs every case once, in random order,
and ratios are taken within a round. A record holds one problem, and is written when that is finished.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.suite.problems import PROBLEMS

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records" / "suite"
JAX = Path(os.environ.get("TORCHMALI_JAX_PYTHON", ROOT / ".venv-jax" / "bin" / "python"))
MISSING = "No environment for jax ({path}): rows of diffrax are left out. `make .venv-jax` makes it."
ONE_THREAD = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "JAX_PLATFORMS": "cpu",
}  # fmt: skip
EAGER_LIMIT = "eager limit"


class Failure(Exception):
    """A method could not do what was asked of it."""


class Worker:
    """A process of `worker`, and a way to ask it."""

    def __init__(self, python: str, framework: str, dtype: str):
        environment = os.environ | ONE_THREAD | {"JAX_ENABLE_X64": "1" if dtype == "float64" else "0"}
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.suite.worker", framework],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
            env=environment,
        )  # fmt: skip
        self.about = self.ask("hello")

    def ask(self, do: str, **more: Any) -> Any:
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("The worker has no pipes.")
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"A worker ended: {' '.join(map(str, self.process.args))}.")  # type: ignore[arg-type]
        answer = json.loads(line)
        if "failure" in answer:
            raise Failure(answer["failure"])
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(frozen=True)
class Case:
    """One method with one setting, in one worker."""

    worker: Worker
    key: str
    method: str
    how: Mapping[str, Any]

    def ask(self, do: str, **more: Any) -> Any:
        return self.worker.ask(do, key=self.key, **more)


@dataclass
class Bench:
    """The workers of one run, and what they know. `failures`: of methods, by key, for the record."""

    dtype: str
    tell: Callable[[str], None]
    workers: list[Worker] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Bench:
        self.workers = [Worker(sys.executable, "torch", self.dtype)]
        if JAX.exists():
            self.workers.append(Worker(str(JAX), "jax", self.dtype))
        else:
            self.tell(MISSING.format(path=JAX))
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.close()

    @property
    def methods(self) -> dict[str, Worker]:
        return {name: worker for worker in self.workers for name in worker.about["methods"]}

    @property
    def packages(self) -> dict[str, str]:
        return {name: version for worker in self.workers for name, version in worker.about["packages"].items()}

    def start(self, problem: str) -> None:
        """Begin a problem: forget the cases of the last one."""
        self.failures = {}
        for worker in self.workers:
            worker.ask("forget")

    def case(
        self, problem: str, method: str, how: Mapping[str, Any], dtype: str | None = None
    ) -> tuple[Case | None, dict[str, Any]]:
        """Prepare a case. None if the method fails; why is in `failures`."""
        worker = self.workers[0] if method == EAGER_LIMIT else self.methods[method]
        setting = ", ".join(f"{name}={value:.3g}" for name, value in how.items())
        case = Case(worker, f"{problem}, {method}, {setting}, {dtype or self.dtype}", method, how)
        try:
            about = case.ask("prepare", problem=problem, method=method, how=how, dtype=dtype or self.dtype)
        except Failure as failure:
            self.failures[f"{method}, {setting}"] = str(failure)
            return None, {}
        return case, about

    def reference(self, problem: str, folder: str, n_times: int | None = None) -> tuple[str, float]:
        """Write the gradient of the ODE to a file; return its path, and how far it can be trusted."""
        path = str(Path(folder) / f"{problem}.npy")
        return path, self.workers[0].ask("reference", problem=problem, path=path, n_times=n_times)["difference"]


def rounds(cases: Sequence[Case], seconds: float, fewest: int, most: int) -> dict[str, dict[str, list[float]]]:
    """Time all cases in rounds, until the seconds are over. Returns cpu and wall seconds by key, as lists."""
    order, start = random.Random(0), time.perf_counter()
    found: dict[str, dict[str, list[float]]] = {case.key: {"cpu": [], "wall": []} for case in cases}
    for i in range(most):
        if i >= fewest and time.perf_counter() - start > seconds:
            break
        for case in order.sample(cases, len(cases)):
            for clock, value in case.ask("time").items():
                found[case.key][clock].append(float(f"{value:.4g}"))
    return found


def sources() -> str:
    """A hash of the code that is measured and that measures, without what only reads records."""
    found = hashlib.sha256()
    folders = (ROOT / "torchmali", ROOT / "benchmarks" / "suite")
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        if path.name == "limits.py":
            continue
        found.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]


@dataclass(frozen=True)
class Kind:
    """One kind of measurement. quick: the problems of `make bench`. measure: of one problem. say: print what was found.

    smoke: settings that take seconds, and prove nothing.
    """

    name: str
    doc: str | None
    problems: Sequence[str]
    quick: Sequence[str]
    settings: Mapping[str, Any]
    smoke: Mapping[str, Any]
    dtype: str
    measure: Callable[[Bench, str, Mapping[str, Any]], dict[str, Any]]
    say: Callable[[dict[str, Any], Console], bool]


def run(kind: Kind, arguments: Sequence[str] | None = None, folder: Path = RECORDS) -> None:
    """Command line of a kind: measure the problems asked for that have no record of the code as it is."""
    parser = argparse.ArgumentParser(description=kind.doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", help=f"problems, with commas between; of {', '.join(kind.problems)}")
    parser.add_argument("--quick", action="store_true", help=f"the problems {', '.join(kind.quick)}")
    parser.add_argument("--again", action="store_true", help="measure also what has a record of this code")
    parser.add_argument("--smoke", action="store_true", help="tiny settings, no record")
    parser.add_argument("--no-record", action="store_true", help="print only")
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else kind.quick if options.quick else kind.problems
    if unknown := sorted(set(names) - set(kind.problems)):
        raise SystemExit(f"Unknown problems {', '.join(unknown)}. Known: {', '.join(kind.problems)}.")
    console = Console()
    settings = dict(kind.smoke if options.smoke else kind.settings)
    todo = [name for name in names if options.again or options.smoke or not is_done(kind, name, settings, folder)]
    for name in sorted(set(names) - set(todo)):
        console.print(f"{kind.name}, {name}: there is a record of this code (--again measures once more).")
    kept = True
    with Bench(kind.dtype, console.print) as bench:
        for name in todo:
            bench.start(name)
            record = measured(kind, bench, name, settings)
            if not (options.smoke or options.no_record):
                write(folder / f"{kind.name}-{name}.json", record)
            kept &= kind.say(record, console) or options.smoke
    if not kept:
        raise SystemExit("A limit was missed.")


def measured(kind: Kind, bench: Bench, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    load, start = os.getloadavg()[0], time.perf_counter()
    results = kind.measure(bench, name, settings)
    header = {
        "command": f"python -m benchmarks.suite.{kind.name} --only {name}",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "packages": bench.packages,
        "cores": os.cpu_count(),
        "threads": 1,
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],  # before and after
        "seconds": round(time.perf_counter() - start, 1),
        "code": sources(),
    }
    title = PROBLEMS[name].title
    head = {"header": header, "kind": kind.name, "problem": name, "title": title, "dtype": kind.dtype}
    return head | {"settings": dict(settings), "failures": bench.failures, "results": results}


def is_done(kind: Kind, name: str, settings: Mapping[str, Any], folder: Path) -> bool:
    path = folder / f"{kind.name}-{name}.json"
    if not path.exists():
        return False
    record = json.loads(path.read_text())
    return record["header"]["code"] == sources() and record["settings"] == json.loads(json.dumps(settings))


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as a whole or not at all. Lists of numbers take one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".draft", delete=False) as file:
        file.write(compact(record) + "\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def compact(x: Any, indent: str = "") -> str:
    """JSON with a line for each entry of a dict, and flat lists in one line."""
    inner = indent + " "
    if isinstance(x, Mapping) and any(isinstance(value, (Mapping, list, tuple)) for value in x.values()):
        rows = [f"{inner}{json.dumps(str(key))}: {compact(value, inner)}" for key, value in x.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(x, (list, tuple)) and any(isinstance(value, (Mapping, list, tuple)) for value in x):
        return "[\n" + ",\n".join(inner + compact(value, inner) for value in x) + f"\n{indent}]"
    return json.dumps(x)


def records(kind: str, folder: Path = RECORDS, problems: Iterable[str] = PROBLEMS) -> dict[str, dict[str, Any]]:
    """The committed records of a kind, by problem, in the order of the problems."""
    paths = {name: folder / f"{kind}-{name}.json" for name in problems}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
