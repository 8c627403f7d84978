"""Records: one JSON file for each run, with all that is needed to repeat it, and a checksum."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import torchmali

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
OUT = os.environ.get("TORCHMALI_OUT")  # a folder for records and runs other than the project's own
RECORDS = Path(OUT) / "records" if OUT else EXPERIMENTS / "records"
RUNS = Path(OUT) / "runs" if OUT else ROOT / "runs"
MAX_BYTES = 200_000
PACKAGES = ("torch", "torchmali", "numpy", "scipy", "scikit-learn", "lightning", "mujoco", "torchdiffeq")


class DamagedRecord(Exception):
    """A record that was changed since it was written, or a file that is no record."""


@dataclass(frozen=True)
class Record:
    """Record of a run: what was asked for, with what it was made, metrics over epochs, results in the end.

    seconds holds times, which are never the same twice; all else is, for the same config, packages and machine.
    replay: what tells whether today's code would still make the record (engine/replay.py); older records have none.
    """

    experiment: str
    preset: str
    config: dict[str, Any]
    command: str
    results: dict[str, Any]
    metrics: dict[str, list] = field(default_factory=dict)
    seconds: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    finished: bool = True
    replay: dict[str, Any] = field(default_factory=dict)

    def written(self, path: Path) -> Record:
        """Write the record, completely or not at all."""
        record = replace(self, made=self.made or made_with())
        body = asdict(record)
        text = _laid_out({"sha256": checksum(body), **body})
        if len(text.encode()) > MAX_BYTES:
            raise ValueError(f"The record {path.name} has {len(text.encode()):,} bytes, more than {MAX_BYTES:,}.")
        write_in_one_piece(path, text.encode())
        return record

    @staticmethod
    def read(path: Path) -> Record:
        try:
            body = json.loads(path.read_text())
            wanted = body.pop("sha256")
        except (ValueError, KeyError, AttributeError) as error:
            raise DamagedRecord(f"{path.name} is no record: {error}") from None
        if checksum(body) != wanted:
            raise DamagedRecord(f"{path.name} was changed since it was written: its checksum does not fit.")
        return Record(**body)


def _laid_out(body: Mapping[str, Any]) -> str:
    """JSON with a line for each entry of the first three levels: readable, and small enough."""

    def lines(value: Any, depth: int) -> str:
        if depth == 0 or not isinstance(value, Mapping) or not value:
            return json.dumps(value)
        pad = " " * (4 - depth)
        inner = ",\n".join(f"{pad}{json.dumps(str(key))}: {lines(x, depth - 1)}" for key, x in value.items())
        return "{\n" + inner + "\n" + pad[:-1] + "}"

    return lines(body, 3) + "\n"


def checksum(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def write_in_one_piece(path: Path, content: bytes) -> None:
    """Write a file so that a reader, or the next run after a crash, sees the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged file, to be looked at later."""
    aside = path.with_name(f"{path.name}.damaged")
    path.replace(aside)
    return aside


def made_with() -> dict[str, Any]:
    """Versions, and facts of the machine, without names or paths."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": _commit(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


@functools.cache
def cpu_model() -> str | None:
    """Model of the processor, as its maker calls it; None where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    if names:
        return names[0]
    if platform.system() == "Darwin":
        words = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or None
    return platform.processor() or None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the code that ran, with a + where it was changed since."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        return run.stdout.strip() if run.returncode == 0 else ""

    changed = git("status", "--porcelain", "--", "torchmali", "experiments/*.py")
    return (git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")) or None


NOT_HASHED = tuple(
    EXPERIMENTS / "engine" / name for name in ("task.py", "queue.py", "replay.py", "check.py")
)  # they compute no results


def by_whom(main: Callable) -> dict[str, Any]:
    """Return the code and the processor that are at work on a part of a run."""
    return {"code": code_hash(main), "commit": _commit(), "cpu": cpu_model()}


@functools.cache
def code_hash(main: Callable) -> str:
    """Hash of the code that computes: the module of `main`, what it imports of the experiments, and torchmali."""
    core = sorted(Path(torchmali.__file__).parent.rglob("*.py"))
    ours = sorted(_imported(Path(inspect.getfile(main)), set()))
    return hashlib.sha256(b"".join(path.read_bytes() for path in [*ours, *core])).hexdigest()[:16]


def _imported(path: Path, seen: set[Path]) -> set[Path]:
    if path in seen or path in NOT_HASHED:
        return seen
    seen.add(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "experiments":
            base = EXPERIMENTS.joinpath(*node.module.split(".")[1:])
            for other in (base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)):
                if other.exists():
                    _imported(other, seen)
    return seen
