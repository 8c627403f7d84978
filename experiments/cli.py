"""Command line of the experiments: list, run, table, figure, sample, report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.image import imsave
from rich.console import Console
from rich.table import Table

from experiments import estimates
from experiments.data.source import DataError
from experiments.engine.check import check_again, is_of, read_checks
from experiments.engine.queue import Options, run_all
from experiments.engine.record import RECORDS, Record, code_hash
from experiments.engine.task import BadOption, Experiment, parsed, require_known, tasks_of
from experiments.flows import images as flows
from experiments.registry import EXPERIMENTS
from experiments.report import page as report_
from experiments.report.chapters.flows import beside, sheet

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)
console = Console()


@app.command("list")
def list_() -> None:
    """List the experiments: what they show, presets, data, time."""
    table = Table(title="Experiments")
    for column in ("name", "what", "shows", "presets (time)", "methods", "data"):
        table.add_column(column)
    for experiment in EXPERIMENTS.values():
        presets = "\n".join(_preset(experiment, name) for name in experiment.presets)
        methods = ", ".join(experiment.methods) or "-"
        table.add_row(experiment.name, experiment.what, experiment.shows, presets, methods, experiment.data)
    console.print(table)


def _preset(experiment: Experiment, name: str) -> str:
    gpu = estimates.estimate(experiment.name, name)
    return f"{name} ({experiment.takes.get(name, '?')}{'; ' + gpu if gpu else ''})"


@app.command()
def estimate(
    preset: Annotated[str, typer.Argument(help="as in 'cifar10 paper'; default: all of the published size")] = "",
) -> None:
    """Count FLOPs, operations and bytes of a step at the published size, for what `list` says of an A100."""
    torch.set_num_threads(1)
    require_known("estimate of", preset or next(iter(estimates.STEPS)), estimates.STEPS)
    for name in estimates.write([preset] if preset else []):
        console.print(f"{name}: {estimates.estimate(*name.split())}", markup=False, highlight=False)


@app.command()
def run(
    name: Annotated[str, typer.Argument(help="of an experiment, or of several, as in toy,memory; `list` shows all")],
    preset: Annotated[str, typer.Option(help="smoke: seconds; cpu: two cores; paper: as published")] = "cpu",
    method: Annotated[str, typer.Option(help="one or several, as in mali,aca; default: all")] = "",
    seed: Annotated[str, typer.Option(help="one or several, as in 0,1,2; default: the experiment's")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="field=value of the config; may be repeated")] = None,
    jobs: Annotated[int, typer.Option(help="runs side by side, with one thread each")] = 1,
    max_seconds: Annotated[float | None, typer.Option(help="for each run; the same command goes on later")] = None,
    force: Annotated[bool, typer.Option("--force", help="run again what is finished")] = False,
    keep_weights: Annotated[bool, typer.Option("--keep-weights", help="beside the record, up to 5 MB")] = False,
    any_code: Annotated[
        bool, typer.Option("--any-code", help="go on also from what the code of today would make differently")
    ] = False,
    accelerator: Annotated[str, typer.Option(help="auto (CUDA where there is a GPU), cpu, cuda, mps")] = "auto",
    devices: Annotated[
        int, typer.Option(help="that share each batch, a process for each (DDP, started by torchrun)")
    ] = 1,
    stale: Annotated[
        bool, typer.Option("--stale", help="run again what is finished, if its replay with the code of today differs")
    ] = False,
    data_dir: Annotated[Path | None, typer.Option(help="where data sets are; default: TORCHMALI_DATA")] = None,
) -> None:
    """Run an experiment; go on with one that was stopped; skip one that is finished."""
    if devices > 1:
        set_ = [*(set_ or []), f"devices={devices}"]
        if "WORLD_SIZE" not in os.environ:
            raise typer.Exit(_several_processes(devices))
    seeds, methods, tasks = _numbers(seed), [m for m in method.split(",") if m], []
    for experiment in map(_known, name.split(",")):
        tasks += tasks_of(experiment, preset, methods, seeds, parsed(experiment, preset, set_ or []))
    try:
        done = run_all(
            tasks, Options(force, max_seconds, keep_weights, data_dir, any_code, accelerator, stale), jobs, console
        )
    except KeyboardInterrupt:
        console.print("Stopped. The same command goes on from the last finished piece or epoch.", highlight=False)
        raise typer.Exit(130) from None
    if not done:
        raise typer.Exit(1)


def _several_processes(n: int) -> int:
    """Run the same command in n processes, and return its exit code."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)]
    return subprocess.run([*words, "-m", "experiments", *sys.argv[1:]], check=False).returncode


@app.command()
def replay(
    name: Annotated[str, typer.Argument(help="of an experiment, or of several; default: all")] = "",
    again: Annotated[bool, typer.Option("--again", help="also what was replayed by the code of today before")] = False,
    data_dir: Annotated[Path | None, typer.Option(help="where data sets are; default: TORCHMALI_DATA")] = None,
) -> None:
    """Tell of all records whether the code of today would still make them, and write it down for the report."""
    torch.set_num_threads(1)
    for experiment in map(_known, name.split(",") if name else EXPERIMENTS):
        for path in sorted((RECORDS / experiment.name).glob("[cp]*.json")):
            record, key = Record.read(path), f"{experiment.name}/{path.name}"
            entry = read_checks().get(key)
            if entry and is_of(entry, record) and entry["code"] == code_hash(experiment.main) and not again:
                continue
            console.print(f"{key}: {_replayed(key, experiment, record, data_dir)}", markup=False, highlight=False)


def _replayed(key: str, experiment: Experiment, record: Record, data_dir: Path | None) -> str:
    try:
        return check_again(key, experiment, record, data_dir)
    except (BadOption, DataError) as error:
        return f"cannot be replayed here: {error}"


@app.command()
def table(number: Annotated[str, typer.Argument(help="1, 4c, toy, ...; `all` for all")]) -> None:
    """Print a table of the paper with our numbers, from the records."""
    found = [table for chapter in report_.chapters() for table in chapter.tables]
    for one in _chosen(found, number):
        console.print(one.rich())


@app.command()
def figure(
    number: Annotated[str, typer.Argument(help="4ab, 4c, ...; `all` for all")],
    out: Annotated[Path, typer.Option(help="a folder for SVG files and films")] = Path("figures"),
) -> None:
    """Draw a figure of the paper from the records."""
    found = [picture for chapter in report_.chapters() for picture in chapter.pictures]
    out.mkdir(parents=True, exist_ok=True)
    for picture in _chosen(found, number):
        console.print(f"{picture.title}: {picture.write(out)[-1]}", markup=False, highlight=False)


@app.command()
def sample(
    preset: Annotated[str, typer.Option(help="of `flows`; the run must be finished")] = "cpu",
    method: Annotated[str, typer.Option(help="that it was trained with")] = "mali",
    seed: Annotated[int, typer.Option(help="of the run")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="field=value, as for the run")] = None,
    n: Annotated[int, typer.Option(help="images")] = 36,
    temperature: Annotated[float, typer.Option(help="of the noise; below 1: likelier images, more alike")] = 1.0,
    noise_seed: Annotated[int, typer.Option(help="other images")] = 0,
    out: Annotated[Path, typer.Option(help="a picture")] = Path("samples.png"),
) -> None:
    """Draw images from a flow that was trained, beside those of the test."""
    experiment = _known("flows")
    (task,) = tasks_of(experiment, preset, [method], [seed], parsed(experiment, preset, set_ or []))
    real, pixels, levels = flows.sampled(task, n, noise_seed, temperature)
    imsave(out, beside(sheet(real, levels), sheet(pixels, levels)).repeat(4, 0).repeat(4, 1))
    console.print(f"{out}: left, test images; right, {n} samples", markup=False, highlight=False)


@app.command()
def report(out: Annotated[Path | None, typer.Option(help="another folder than docs/")] = None) -> None:
    """Write all tables, figures and verdicts as one page, and in Markdown."""
    for path in report_.write(report_.chapters(), out):
        console.print(path.name, markup=False, highlight=False)


def _chosen(found: list, number: str) -> list:
    chosen = [x for x in found if number in (x.id, x.id.partition("-")[0], "all")]  # 2: also 2-digits
    if not chosen:
        raise BadOption(f"There is no {number!r}; there are {', '.join(x.id for x in found) or 'none: no records'}.")
    return chosen


def _known(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise BadOption(f"There is no experiment {name!r}; there are {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise BadOption(f"--seed {text}: give numbers, as in --seed 0,1,2.") from None


def main() -> None:
    try:
        app()
    except BadOption as error:
        console.print(str(error), markup=False, highlight=False)
        sys.exit(2)
