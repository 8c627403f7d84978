"""Tasks: an experiment with presets, one requested run of it, and the tools of a running task.

An experiment is a function from a frozen config to results. It computes in pieces through its `Run`: finished pieces
are kept in `runs/` and are not computed again, so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from experiments.engine.record import RECORDS, RUNS, Record, by_whom
from experiments.engine.replay import DIFFERS, PIECES, SAME, SECONDS, Replayed, Wanted, compare, quick, spread, worst


class BadOption(Exception):
    """An option of the command line that cannot be used; the message says what to do."""


def require_known(what: str, name: str, known: Iterable[str]) -> None:
    """Raise BadOption where a name that the command line gave is none of the known ones."""
    known = list(known)
    if name not in known:
        raise BadOption(f"There is no {what} {name!r}; there are {', '.join(known)}.")


class OutOfTime(Exception):
    """The time of --max-seconds is over."""


@dataclass(frozen=True)
class Config:
    """Settings of a run; each experiment adds its own fields."""

    seed: int = 0

    LATER: ClassVar[tuple[str, ...]] = ()  # fields that were added later: at their defaults a run is what it was before


@dataclass(frozen=True)
class TrainedConfig(Config):
    """Settings of a run that trains. devices: that share each batch. precision: Lightning's name for it.

    With bf16-mixed f is computed in bfloat16, and states stay in float32.
    """

    devices: int = 1
    precision: str = "32-true"

    LATER: ClassVar[tuple[str, ...]] = ("devices", "precision")


@dataclass(frozen=True)
class Experiment:
    """An experiment of the registry. main: from a config to results, with the help of a `Run`.

    methods: names that --method may give; empty: it has none.

    usual, seeds: the methods and seeds that are run where none are asked for.
    """

    name: str
    what: str
    shows: str  # tables and figures
    presets: Mapping[str, Config]
    main: Callable[[Any, Run], dict[str, Any]]
    takes: Mapping[str, str]  # how long a preset takes
    data: str = "none"
    methods: Sequence[str] = ()
    usual: Sequence[str] | None = None  # None: all methods
    seeds: Sequence[int] = (0,)
    replayed: Sequence[str] = ()  # pieces that are computed again for a record that names none; empty: a few

    def config(self, preset: str, changes: Mapping[str, Any]) -> Config:
        if preset not in self.presets:
            raise BadOption(f"{self.name} has no preset {preset!r}; it has {', '.join(self.presets)}.")
        return dataclasses.replace(self.presets[preset], **changes)


class Task(NamedTuple):
    """One requested run."""

    experiment: Experiment
    preset: str
    changes: dict[str, Any]  # of the preset

    @property
    def config(self) -> Config:
        return self.experiment.config(self.preset, self.changes)

    @property
    def name(self) -> str:
        """Name of its record: the preset, then what was changed of it."""
        parts = [self.preset, *(_part(key, value) for key, value in sorted(self.changes.items()))]
        return "-".join(parts)

    @property
    def path(self) -> Path:
        return RECORDS / self.experiment.name / f"{self.name}.json"

    @property
    def folder(self) -> Path:
        """Folder for what is not finished; another config of the same name has another one."""
        values, defaults = dataclasses.asdict(self.config), {f.name: f.default for f in dataclasses.fields(self.config)}
        later = [name for name in self.config.LATER if values[name] == defaults[name]]
        body = json.dumps({k: v for k, v in values.items() if k not in later}, sort_keys=True, default=str)
        return RUNS / self.experiment.name / f"{self.name}-{hashlib.sha256(body.encode()).hexdigest()[:8]}"

    @property
    def command(self) -> str:
        words = [f"python -m experiments run {self.experiment.name} --preset {self.preset}"]
        for key, value in sorted(self.changes.items()):
            words.append(f"--{key} {value}" if key in ("method", "seed") else f"--set {key}={_text(value)}")
        return " ".join(words)

    def finished(self) -> Record | None:
        """Return its record, if there is one that can be trusted and was made with this config."""
        if not self.path.exists():
            return None
        record = Record.read(self.path)
        return record if record.finished and self.has_made(record) else None

    def has_made(self, record: Record) -> bool:
        config = as_json(dataclasses.asdict(self.config))
        # A field that the record does not know was not there yet: then all was as its default has it now.
        defaults = as_json({f.name: f.default for f in dataclasses.fields(self.config) if f.name not in record.config})
        return {**defaults, **record.config} == config

    @property
    def weights(self) -> Path:
        """Path of the weights that are kept beside the record."""
        return self.path.with_suffix(".pt")


def _part(key: str, value: Any) -> str:
    if key in ("method", "seed"):
        return str(value) if key == "method" else f"{key}{value}"
    return f"{key}={_text(value)}".replace("/", "_")


def _text(value: Any) -> str:
    """Value of a field as --set reads it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


Tell = Callable[[float, str], None]


@dataclass
class Run:
    """A running task: its folder, progress bar and deadline, and the pieces that were finished before."""

    task: Task
    tell: Tell = lambda done, text: None  # noqa: E731
    deadline: float = float("inf")  # of time.monotonic()
    data_dir: Path | None = None
    any_code: bool = False  # continue from results of code that has changed since
    before: Record | None = None  # record of an earlier run, if there are weights beside it
    accelerator: str = "auto"
    devices: Any = None  # engine.devices.Devices, where they are not those of the config and the accelerator
    replaying: Wanted | None = None  # nothing is run but a replay, which ends with the exception Replayed
    place: Path | None = None  # a folder for what is not finished, other than the task's
    replay: dict[str, Any] = field(default_factory=dict)  # what later replays are compared with
    parts: list[dict[str, Any]] = field(default_factory=list)  # which code and processor made which part
    metrics: dict[str, list] = field(default_factory=dict)
    seconds: dict[str, Any] = field(default_factory=dict)
    so_far: dict[str, Any] = field(default_factory=dict)  # results, should time run out
    notes: list[str] = field(default_factory=list)  # problems, in sentences for the user

    def __post_init__(self):
        self.folder = self.task.folder if self.place is None else self.place
        self.folder.mkdir(parents=True, exist_ok=True)
        self._pieces: dict[str, Any] | None = None

    def seed(self, *of: Any) -> int:
        """One number for each use of random numbers, from the seed of the config."""
        text = "/".join(map(str, (getattr(self.task.config, "seed", 0), *of)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")

    def generator(self, *of: Any) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed(*of))

    def log(self, **facts: Any) -> None:
        """Append a line to the log of the run."""
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def pieces(self, work: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Return the values of all pieces, after computing those that are missing, one after the other."""
        if self.replaying:
            raise Replayed({"pieces": _again(work, self.replaying.pieces or spread(list(work))[:PIECES])})
        done, me = self._finished_pieces(work), by_whom(self.task.experiment.main)
        for i, (name, compute) in enumerate(work.items()):
            if name not in done:
                self.check_time()
                self.tell(i / len(work), name)
                start = time.perf_counter()
                value = as_json(compute())
                done[name] = {"name": name, "value": value, "seconds": time.perf_counter() - start, **me}
                with (self.folder / "pieces.jsonl").open("a") as file:
                    file.write(_line(done[name]))
                    file.flush()
                    os.fsync(file.fileno())
        self.tell(1.0, "done")
        found = {name: done[name] for name in work}
        self.replay.setdefault("pieces", quick({name: body["seconds"] for name, body in found.items()}))
        self._add_parts(found)
        return {name: body["value"] for name, body in found.items()}

    def _add_parts(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Say which code made how many pieces, if more than one took part."""
        makers = {body["code"]: {key: body.get(key) for key in ("code", "commit", "cpu")} for body in found.values()}
        if len(makers) > 1:
            for code, maker in makers.items():
                n = sum(body["code"] == code for body in found.values())
                self.parts.append({**maker, "pieces": n})

    def _finished_pieces(self, work: Mapping[str, Callable[[], Any]]) -> dict[str, dict[str, Any]]:
        """Return the finished pieces of a run that was killed; of other code, if their replay holds."""
        if self._pieces is None:
            path, code = self.folder / "pieces.jsonl", by_whom(self.task.experiment.main)["code"]
            lines = path.read_text().splitlines() if path.exists() else []
            bodies = [body for line in lines if (body := _checked(line))]
            others = {body["name"]: body for body in bodies if body["code"] != code}
            if others and not self.any_code and not self._hold(others, work):
                bodies = [body for body in bodies if body["code"] == code]
            if len(bodies) < len(lines):
                path.write_text("".join(map(_line, bodies)))
            self._pieces = {body["name"]: body for body in bodies}
        return self._pieces

    def _hold(self, others: Mapping[str, Mapping[str, Any]], work: Mapping[str, Callable[[], Any]]) -> bool:
        """Tell whether this code computes the same, from a few pieces by code that has changed since."""
        names = quick({name: body["seconds"] for name, body in others.items() if name in work})
        again = _again(work, names)
        verdict = worst(compare(others[name]["value"], value) for name, value in again.items()) if again else DIFFERS
        self.log(event="replay", verdict=verdict, pieces=list(again))
        said = f"{len(others)} pieces are by code that has changed since: of {len(again)} computed again "
        said += {SAME: "all are the same; kept.", DIFFERS: "some differ; all are computed anew."}.get(
            verdict, "all are the same up to round-off; kept."
        )
        self.notes.append(said)
        return verdict != DIFFERS

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime


def _again(work: Mapping[str, Callable[[], Any]], names: Iterable[str]) -> dict[str, Any]:
    """Compute pieces until the time of a replay is over."""
    found, start = {}, time.perf_counter()
    for name in names:
        if name in work and time.perf_counter() - start < SECONDS:
            found[name] = as_json(work[name]())
    return found


def _line(body: Mapping[str, Any]) -> str:
    text = json.dumps(body)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": text}) + "\n"


def _checked(line: str) -> dict[str, Any] | None:
    try:
        outer = json.loads(line)
        whole = hashlib.sha256(outer["body"].encode()).hexdigest() == outer["sha256"]
        return json.loads(outer["body"]) if whole else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def tasks_of(
    experiment: Experiment, preset: str, methods: Iterable[str], seeds: Iterable[int], changes: Mapping[str, Any]
) -> list[Task]:
    """Make one task for each method and seed."""
    methods, seeds = (
        list(methods) or list(experiment.methods if experiment.usual is None else experiment.usual),
        list(seeds) or list(experiment.seeds),
    )
    unknown = [m for m in methods if m not in experiment.methods]
    if unknown:
        known = ", ".join(experiment.methods) or "none"
        raise BadOption(f"{experiment.name} has no method {unknown[0]!r}; it has {known}.")
    own = dataclasses.asdict(experiment.presets[preset])
    differing = {key: value for key, value in changes.items() if key not in own or own[key] != value}
    found = []
    for seed in seeds:
        for method in methods or [None]:
            chosen: dict[str, Any] = {} if method is None else {"method": method}
            if seed != experiment.presets[preset].seed or len(experiment.seeds) > 1:
                chosen["seed"] = seed
            found.append(Task(experiment, preset, {**chosen, **differing}))
    for task in found:
        _ = task.config  # raises what is wrong with it
    return found


def parsed(experiment: Experiment, preset: str, assignments: Sequence[str]) -> dict[str, Any]:
    """Parse the assignments field=value of --set, with the type of each field."""
    if preset not in experiment.presets:
        raise BadOption(f"{experiment.name} has no preset {preset!r}; it has {', '.join(experiment.presets)}.")
    config = experiment.presets[preset]
    hints = {f.name: typing.get_type_hints(type(config))[f.name] for f in dataclasses.fields(config)}
    changes = {}
    for assignment in assignments:
        name, sign, text = assignment.partition("=")
        if not sign or name not in hints:
            raise BadOption(f"--set {assignment}: give field=value with one of the fields {', '.join(hints)}.")
        try:
            changes[name] = _value(text, hints[name])
        except (ValueError, TypeError):
            raise BadOption(f"--set {assignment}: {name} is a {hints[name]}, and {text!r} is none.") from None
    return changes


def _value(text: str, hint: Any) -> Any:
    if hint is bool:
        return {"true": True, "false": False}[text.lower()] if text.lower() in ("true", "false") else _no(text)
    if hint in (int, float, str):
        return hint(text)
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return tuple(_value(part, inner[0]) for part in text.split(",") if part)
    options = [kind for kind in inner if kind is not type(None)]
    return None if text.lower() == "none" else _value(text, options[0])


def _no(text: str) -> Any:
    raise ValueError(text)
