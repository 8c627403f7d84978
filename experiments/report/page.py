"""All results on one page, and in docs/results.md, from committed records alone."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.engine.check import read_checks
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
    replays,
    series,
    solvers,
    theory,
    toy,
)
from experiments.report.checklist import SENTENCES, Sentence
from experiments.report.claims import NOT_RUN, NOT_TESTABLE, VERDICTS, Check, Claim, verdict
from experiments.report.figures import Picture
from experiments.report.runs import Found, Shown
from experiments.report.tables import Cell, Table

PAGE = ROOT / "docs" / "results.html"
MARKDOWN = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"

KINDS: dict[str, str] = dict(zip(VERDICTS, ("holds", "part", "not", "none", "none", "none"), strict=True))
KINDS |= {"kept": "holds", "broken": "not"}


class Chapter(NamedTuple):
    """Tables, figures and claims of one or several experiments."""

    name: str
    title: str
    tables: list[Table]
    pictures: list[Picture]
    claims: list[Claim]
    checks: list[Check]


class View(NamedTuple):
    """Description of a chapter. read: makes the chapter from its records, of which there is at least one."""

    name: str
    title: str
    experiments: tuple[str, ...]
    read: Callable[[list[Found]], Shown]
    presets: tuple[str, ...] = ()  # whose records it takes, also of runs that ran out of time; none: small ones
    suffix: str = ""  # of the ids of its tables and figures, where another view of the same experiment has them, too


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
    View("accounting-paper", "Table 1, published settings", ("accounting",), accounting.show, ("paper",), "-paper"),
    View("toy-paper", "Toy gradients, more times (Figure 4 a, b)", ("toy",), toy.show, ("paper",), "-paper"),
    View("memory-paper", "Memory, published settings (Figure 4 c)", ("memory",), memory.show, ("paper",), "-paper"),
    View("explain-paper", "Figures 1 to 3, finer", ("explain",), theory.show_drawings, ("paper",), "-paper"),
    View("stability-paper", "Theorems, finer", ("stability",), theory.show_stability, ("paper",), "-paper"),
    View("images-paper", "Images at the published size (Figures 5, 6)", ("cifar10", "imagenet"), images.show,
         ("paper",), "-paper"),
    View("solvers-paper", "Other solvers, attacks at the published size (Tables 2, 3)", ("solvers",), solvers.show,
         ("paper",), "-paper"),
)  # fmt: skip


def chapters() -> list[Chapter]:
    """Make the chapters of all experiments that have records."""
    shown = []
    for view in VIEWS:
        if found := [one for name in view.experiments for one in _records(name) if _is_for(view, one.record)]:
            tables, pictures, findings = view.read(found)
            claims = [one for one in findings if isinstance(one, Claim)]
            checks = [one for one in findings if isinstance(one, Check)]
            chapter = Chapter(view.name, view.title, *_renamed(tables, pictures, view.suffix), claims, checks)
            if chapter.tables or chapter.pictures:
                shown.append(chapter)
    return shown


def _renamed(tables: list[Table], pictures: list[Picture], suffix: str) -> tuple[list[Table], list[Picture]]:
    for picture in pictures if suffix else ():
        picture.id += suffix
    return [dataclasses.replace(table, id=table.id + suffix) for table in tables], pictures


def all_records(experiments: Sequence[str] = tuple(EXPERIMENTS)) -> list[Found]:
    """Return all records but those of smoke runs, whether a chapter shows them or not."""
    found = []
    for experiment in experiments:
        for path in sorted((RECORDS / experiment).glob("[cp]*.json")):
            name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.as_posix()
            found.append(Found(Record.read(path), name))
    return found


def _records(experiment: str) -> list[Found]:
    return [one for one in all_records([experiment]) if _is_shown(one.record)]


def _is_for(view: View, record: Record) -> bool:
    if view.presets:
        return record.preset in view.presets and (record.finished or view.name == "published")
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


# The verdicts


class Row(NamedTuple):
    """A sentence of the checklist, and the claims made of it; none: why not."""

    sentence: Sentence
    claims: list[Claim]
    why: str = ""

    @property
    def verdict(self) -> str:
        """Verdict over all data sets on which it was tried."""
        return verdict([claim.verdict for claim in self.claims]) if self.claims else self._without

    @property
    def _without(self) -> str:
        return NOT_TESTABLE if self.sentence.not_testable else NOT_RUN


def judged(found: Sequence[Chapter]) -> list[Row]:
    """Return a row for each sentence of the checklist that is not said elsewhere, in the order of the paper."""
    claims = [claim for chapter in found for claim in chapter.claims]
    rows = []
    for sentence in SENTENCES:
        own = [claim for claim in claims if claim.id == sentence.id]
        if own or not sentence.same_as:
            rows.append(Row(sentence, own, sentence.not_testable or "No record of it yet."))
    return rows


def counted(rows: Sequence[Row]) -> dict[str, int]:
    return {word: n for word in VERDICTS if (n := sum(row.verdict == word for row in rows))}


def verdict_table(rows: Sequence[Row]) -> Table:
    """The table that a reader remembers: each sentence, and its verdict."""
    lines = []
    for row in rows:
        said = "; ".join(f"{claim.here or 'here'}: {claim.verdict}" for claim in row.claims if len(row.claims) > 1)
        lines.append([f"\u201c{row.sentence.words}\u201d", row.sentence.where, row.verdict, said])
    return Table("verdicts", "The paper's sentences", ("the paper says", "where", "verdict", "by data"), lines)


def details_table(rows: Sequence[Row], stale: Mapping[str, str]) -> Table:
    lines = []
    for row in rows:
        for claim in row.claims:
            numbers = claim.numbers + _stale_of(claim.records, stale)
            lines.append(
                [claim.id, claim.here or "-", claim.verdict, claim.rule, Cell(numbers, (claim.records or [None])[0])]
            )
        if not row.claims:
            lines.append([row.sentence.id, "-", row.verdict, "-", row.why])
    notes = (
        "A rule is two-sided and takes all seeds. With two or three seeds a standard error is itself uncertain: such "
    )
    notes += "verdicts are provisional. Numbers link to the first of their records."
    return Table("rules", "Rules and numbers", ("claim", "tried on", "verdict", "rule", "numbers"), lines, notes)


def checks_table(found: Sequence[Chapter], stale: Mapping[str, str]) -> Table:
    lines = [
        [
            one.text,
            one.where,
            one.verdict,
            Cell(one.numbers + _stale_of(one.records, stale), (one.records or [None])[0]),
        ]
        for chapter in found
        for one in chapter.checks
    ]
    notes = (
        "What we ask of the runs beyond the paper: floors that show that something was learned, and what it does not "
    )
    notes += "say. None of it is counted above."
    return Table("checks", "Floors and further checks", ("what", "where", "here", "numbers"), lines, notes)


def same_table() -> Table:
    lines = [
        [f"\u201c{sentence.words}\u201d", sentence.where, ", ".join(sentence.same_as)]
        for sentence in SENTENCES
        if sentence.same_as
    ]
    return Table("same", "Sentences that say the same again", ("the paper says", "where", "judged as"), lines)


def _stale_of(records: Sequence[str], stale: Mapping[str, str]) -> str:
    n = sum(path in stale for path in records)
    return f" [Stale: {n} of {len(records)} records.]" if n else ""


def marked(table: Table, stale: Mapping[str, str]) -> Table:
    """Say under a table how many of its records the code of today would make differently."""
    paths = {cell.record for row in table.rows for cell in row if isinstance(cell, Cell) and cell.record}
    n = sum(path in stale for path in paths)
    if not n:
        return table
    said = f"Stale: {n} of {len(paths)} records that are linked here come out differently with the code of today."
    return dataclasses.replace(table, notes=f"{table.notes} {said}".strip())


def front(found: Sequence[Chapter]) -> list[tuple[str, list[Table]]]:
    """Return the sections that stand before and after the chapters: title, tables."""
    records, checks = all_records(), read_checks()
    stale = replays.stale(records, checks)
    rows = judged(found)
    return [
        ("Verdicts", [verdict_table(rows)]),
        ("Rules and numbers", [details_table(rows, stale), same_table(), checks_table(found, stale)]),
        ("Records and the code of today", replays.tables(records, checks)),
    ]


INTRODUCTION = (
    "Every table and figure here is made from records in the repository; numbers link to theirs, and the command that "
    "made it stands below. The paper's sentences are quoted and judged by two-sided rules over all seeds."
)


def _counts_in_words(found: Sequence[Chapter]) -> str:
    rows = judged(found)
    counts = ", ".join(f"{n} {word}" for word, n in counted(rows).items())
    return f"Of {len(rows)} sentences of the paper that claim something measurable: {counts}."


SHOWN_FIRST = ("4c", "5-cifar10", "6-cpu")  # figures


def page(found: list[Chapter]) -> str:
    """Page as one HTML file that needs no other."""
    (first, verdicts), *rest = front(found)
    stale = replays.stale(all_records(), read_checks())
    pictures = {picture.id: picture for chapter in found for picture in chapter.pictures}
    shown = [id_ for id_ in SHOWN_FIRST if id_ in pictures]
    body = ["<h1>torchmali: the paper's experiments, measured</h1>", f"<p>{html.escape(INTRODUCTION)}</p>"]
    body.append(f"<p><b>{html.escape(_counts_in_words(found))}</b></p>")
    links = "".join(f'<a href="#{c.name}">{html.escape(c.title)}</a>' for c in found)
    body.append(f'<nav><a href="#verdicts">{first}</a>{links}<a href="#records">{rest[-1][0]}</a></nav>')
    body += [pictures[id_].html() for id_ in shown]
    body += [f"<h2 id=verdicts>{first}</h2>", *(table.html() for table in verdicts)]
    for (title, tables), id_ in zip(rest, ("rules", "records"), strict=True):
        inner = "".join(table.html() for table in tables)
        body.append(f"<details id={id_}><summary>{html.escape(title)}</summary>{inner}</details>")
    for chapter in found:
        body.append(f'<h2 id="{chapter.name}">{html.escape(chapter.title)}</h2>')
        body += [picture.html() for picture in chapter.pictures if picture.id not in shown]
        body += [_folded(marked(table, stale)) for table in chapter.tables]
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    title = "<title>torchmali: results</title><link rel=icon href='data:,'>"
    head = f"<head>{head}{title}<style>{style.PAGE}</style></head>"
    return f"<!doctype html><html lang=en>{head}<body>{''.join(body)}</body></html>\n"


LONG_TABLE = 20  # rows; longer ones are folded


def _folded(table: Table) -> str:
    if len(table.rows) <= LONG_TABLE:
        return table.html()
    return f"<details><summary>{html.escape(table.title)}</summary>{table.html()}</details>"


def markdown(found: list[Chapter]) -> str:
    (_, verdicts), *rest = front(found)
    stale = replays.stale(all_records(), read_checks())
    lines = ["# Results", "", "Made by `make report` from the records in `experiments/records/`. " + INTRODUCTION, ""]
    lines += [f"**{_counts_in_words(found)}**", "", "## Verdicts", ""]
    lines += [x for table in verdicts for x in (table.markdown(), "")]
    for title, tables in rest:
        lines += [f"## {title}", "", *(x for table in tables for x in (table.markdown(), ""))]
    for chapter in found:
        lines += [f"## {chapter.title}", ""]
        for picture in chapter.pictures:
            file = f"figures/{picture.id}.{'svg' if picture.film is None else 'gif'}"
            lines += [f"![{picture.title}]({file})", "", f"*{picture.title}. {picture.caption}*", ""]
        for table in chapter.tables:
            lines += [marked(table, stale).markdown(), ""]
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
