"""All results on one page, and in docs/results.md, from committed records alone."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from experiments.engine.record import RECORDS, ROOT, Record
from experiments.engine.task import as_json
from experiments.registry import EXPERIMENTS
from experiments.report import style
from experiments.report.chapters import (
    accounting,
    feasibility,
    flow_memory,
    flows,
    images,
    matching,
    memory,
    plane,
    series,
    solvers,
    theory,
    toy,
)
from experiments.report.claims import AWAITED, VERDICTS, Claim
from experiments.report.figures import Picture
from experiments.report.runs import Found, Shown
from experiments.report.tables import Table

PAGE = ROOT / "docs" / "results.html"
MARKDOWN = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"

KINDS: dict[str, str] = dict(zip(VERDICTS, ("holds", "part", "not", "none", "none"), strict=True))


class Chapter(NamedTuple):
    """Tables, figures and claims of one or several experiments."""

    name: str
    title: str
    tables: list[Table]
    pictures: list[Picture]
    claims: list[Claim]


class View(NamedTuple):
    """Description of a chapter. read: makes the chapter from its records, of which there is at least one."""

    name: str
    title: str
    experiments: tuple[str, ...]
    read: Callable[[list[Found]], Shown]
    presets: tuple[str, ...] = ()  # whose records it takes, also of runs that ran out of time; none: small ones


PUBLISHED = ("paper", "cpu-published")
VIEWS = (
    View("explain", "How it works (Figures 1 to 3)", ("explain",), theory.show_drawings),
    View("accounting", "Cost of the methods (Table 1)", ("accounting",), accounting.show),
    View("toy", "Toy gradients (Figure 4 a, b)", ("toy",), toy.show),
    View("memory", "Memory (Figure 4 c)", ("memory",), memory.show),
    View("images", "Images (Figure 5)", ("cifar10", "digits", "mnist"), images.show),
    View("solvers", "Other solvers, attacks (Tables 2, 3, Figure 6)", ("solvers",), solvers.show),
    View("feasibility", "ImageNet on GPUs of 11 GB", ("feasibility",), feasibility.show),
    View("latent", "Latent ODE (Table 4)", ("latent",), series.latent),
    View("speech", "Neural CDE (Table 5)", ("paths",), series.paths),
    View("damping", "Damping (Table 7)", ("paths", "latent"), series.damping),
    View("flows", "Continuous flows (Table 6)", ("flows",), flows.show),
    View("flow_memory", "Memory of flows", ("flow_memory",), flow_memory.show),
    View("plane", "Flows in the plane", ("densities",), plane.show),
    View("matching", "Flow matching: steering and inversion", ("matching", "steering", "inversion"), matching.show),
    View("published", "Series at the published size", ("latent", "paths"), series.published, PUBLISHED),
    View("stability", "Theorems: stability, orders, ways back", ("stability",), theory.show_stability),
)


def awaited(found: list[Chapter]) -> list[Claim]:
    there = {chapter.name for chapter in found}
    return [Claim(where, text, "not run yet", "") for name, text, where in AWAITED if name not in there]


def chapters() -> list[Chapter]:
    """Make the chapters of all experiments that have records."""
    shown = []
    for view in VIEWS:
        if found := [one for name in view.experiments for one in _records(name) if _is_for(view, one.record)]:
            chapter = Chapter(view.name, view.title, *view.read(found))
            if chapter.tables or chapter.pictures:
                shown.append(chapter)
    return shown


def _records(experiment: str) -> list[Found]:
    found = []
    for path in sorted((RECORDS / experiment).glob("[cp]*.json")):  # not those of smoke runs
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()
        record = Record.read(path)
        if _is_shown(record):
            found.append(Found(record, name))
    return found


def _is_for(view: View, record: Record) -> bool:
    if view.presets:
        return record.preset in view.presets
    return record.finished and record.preset not in PUBLISHED


# Which fields may differ from the preset, beside method and seed
VARIED = {
    "cifar10": {"rtol", "atol"},
    "densities": {"data", "epochs"},
    "latent": {"fraction", "eta", "unsafe_damping"},
    "paths": {"eta", "unsafe_damping"},
}
MATCHED = {"rtol": 0.1, "atol": 0.01}  # of naive and adjoint: those of MALI


def _is_shown(record: Record) -> bool:
    changes = _changes(record)
    tolerances = {name: changes[name] for name in ("rtol", "atol") if name in changes}
    return set(changes) <= VARIED.get(record.experiment, set()) and tolerances in ({}, MATCHED)


def _changes(record: Record) -> dict[str, Any]:
    preset = as_json(dataclasses.asdict(EXPERIMENTS[record.experiment].presets[record.preset]))
    differ = {name for name in preset if record.config.get(name, preset[name]) != preset[name]} - {"method", "seed"}
    return {name: record.config[name] for name in preset if name in differ}


def page(found: list[Chapter]) -> str:
    """Page as one HTML file that needs no other."""
    body = ["<h1>torchmali: the paper's experiments, measured</h1>"]
    body.append(
        "<p>Every table and figure here is made from records in the repository; numbers link to theirs, and the "
        "command that made it stands below. What the paper claims is followed by what was found.</p>"
    )
    links = "".join(f'<a href="#{c.name}">{html.escape(c.title)}</a>' for c in found)
    body.append(f'<nav><a href="#verdicts">Verdicts</a>{links}</nav>')
    body.append("<h2 id=verdicts>Verdicts</h2>")
    body += [_claim(claim) for chapter in found for claim in chapter.claims]
    body += map(_claim, awaited(found))
    for chapter in found:
        body.append(f'<h2 id="{chapter.name}">{html.escape(chapter.title)}</h2>')
        body += [picture.html() for picture in chapter.pictures] + [table.html() for table in chapter.tables]
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    title = "<title>torchmali: results</title><link rel=icon href='data:,'>"
    head = f"<head>{head}{title}<style>{style.PAGE}</style></head>"
    return f"<!doctype html><html lang=en>{head}<body>{''.join(body)}</body></html>\n"


def _claim(claim: Claim) -> str:
    links = " ".join(f'<a href="../{html.escape(path)}">record</a>' for path in claim.records)
    where, text, numbers = map(html.escape, (claim.where, claim.text, claim.numbers))
    said = f"<p><span class=v>{html.escape(claim.verdict)}</span>: {text} <span class=note>({where})</span></p>"
    return f'<div class="claim {KINDS[claim.verdict]}">{said}<p class=note>{numbers} {links}</p></div>'


def markdown(found: list[Chapter]) -> str:
    lines = ["# Results", ""]
    lines += ["Made by `make report` from the records in `experiments/records/`; numbers link to theirs.", ""]
    lines += ["## Verdicts", "", "| the paper says | where | here | numbers |", "|---|---|---|---|"]
    for chapter in found:
        for claim in chapter.claims:
            cells = (claim.text, claim.where, f"**{claim.verdict}**", claim.numbers)
            lines.append(f"| {' | '.join(x.replace('|', chr(92) + '|') for x in cells)} |")
    lines += [f"| {claim.text} | {claim.where} | **{claim.verdict}** | |" for claim in awaited(found)]
    for chapter in found:
        lines += ["", f"## {chapter.title}", ""]
        for picture in chapter.pictures:
            file = f"figures/{picture.id}.{'svg' if picture.film is None else 'gif'}"
            lines += [f"![{picture.title}]({file})", "", f"*{picture.title}. {picture.caption}*", ""]
        for table in chapter.tables:
            lines += [table.markdown(), ""]
    return "\n".join(lines).rstrip() + "\n"


def write(found: list[Chapter], folder: Path | None = None) -> list[Path]:
    """Write the page, the Markdown and the figures."""
    page_path, markdown_path, figures = (
        (PAGE, MARKDOWN, FIGURES)
        if folder is None
        else (folder / "results.html", folder / "results.md", folder / "figures")
    )
    figures.mkdir(parents=True, exist_ok=True)
    page_path.write_text(page(found))
    markdown_path.write_text(markdown(found))
    written = [page_path, markdown_path]
    for chapter in found:
        for picture in chapter.pictures:
            written += picture.write(figures)
    return written
