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
from experiments.show import VERDICTS, Claim, Found, Picture, Shown, Table
from experiments.views import accounting, feasibility, flows, images, memory, series, solvers, theory, toy

PAGE = ROOT / "docs" / "results.html"
MARKDOWN = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures"

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --pale: #666; --line: #ddd; --card: #fff; --link: #1f5fa8;
  --good: #2e7d32; --part: #b26a00; --bad: #b3261e; --none: #777; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; --pale: #a0a0a0; --line: #3a3d44;
  --card: #f4f4f2; --link: #8ab8ea; --good: #7bc67e; --part: #e0a94a; --bad: #f08a80; --none: #9a9a9a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 62rem; font: 16px/1.55 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { margin-top: 2.6rem; border-bottom: 1px solid var(--line); }
a { color: var(--link); } .note, figcaption { color: var(--pale); font-size: .9rem; }
figcaption b { color: var(--ink); }
figure { margin: 1.6rem 0; } .card { background: var(--card); border-radius: 6px; padding: .5rem; }
.card svg, .card img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; max-width: 100%; } table { border-collapse: collapse; font-size: .86rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
thead th { border-bottom: 2px solid var(--line); }
pre { font-size: .8rem; color: var(--pale); white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0; }
.claim { border-left: 4px solid var(--none); padding: .1rem 0 .1rem .8rem; margin: 1rem 0; overflow-wrap: anywhere; }
.claim p { margin: .25rem 0; } .v { font-weight: 600; }
.holds { border-color: var(--good); } .part { border-color: var(--part); } .not { border-color: var(--bad); }
.holds .v { color: var(--good); } .part .v { color: var(--part); } .not .v { color: var(--bad); }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; }
"""
KINDS: dict[str, str] = dict(zip(VERDICTS, ("holds", "part", "not", "none", "none"), strict=True))


class Chapter(NamedTuple):
    """What one experiment shows."""

    name: str
    title: str
    tables: list[Table]
    pictures: list[Picture]
    claims: list[Claim]


class View(NamedTuple):
    """read: from the records of its experiments, of which there is at least one."""

    name: str
    title: str
    experiments: tuple[str, ...]
    read: Callable[[list[Found]], Shown]
    presets: tuple[str, ...] = ()  # whose records it takes, also of runs that ran out of time; none: small ones


def _toy(found: list[Found]) -> Shown:
    one = toy.Toy(*found[0])
    return toy.tables(one), toy.pictures(one), toy.claims(one)


def _memory(found: list[Found]) -> Shown:
    return memory.tables(*found[0]), memory.pictures(*found[0]), memory.claims(*found[0])


def _accounting(found: list[Found]) -> Shown:
    return accounting.tables(*found[0]), [], accounting.claims(*found[0])


def _stability(found: list[Found]) -> Shown:
    return theory.tables(*found[0]), theory.pictures(*found[0]), theory.claims(*found[0])


def _explain(found: list[Found]) -> Shown:
    return [], theory.explained(*found[0]), []


PUBLISHED = ("paper", "cpu-published")
VIEWS = (
    View("explain", "How it works (Figures 1 to 3)", ("explain",), _explain),
    View("accounting", "Cost of the methods (Table 1)", ("accounting",), _accounting),
    View("toy", "Toy gradients (Figure 4 a, b)", ("toy",), _toy),
    View("memory", "Memory (Figure 4 c)", ("memory",), _memory),
    View("images", "Images (Figure 5)", ("cifar10", "digits", "mnist"), images.show),
    View("solvers", "Other solvers, attacks (Tables 2, 3, Figure 6)", ("solvers",), solvers.show),
    View("feasibility", "ImageNet on GPUs of 11 GB", ("feasibility",), feasibility.show),
    View("latent", "Latent ODE (Table 4)", ("latent",), series.latent),
    View("speech", "Neural CDE (Table 5)", ("paths",), series.paths),
    View("damping", "Damping (Table 7)", ("paths", "latent"), series.damping),
    View("flows", "Continuous flows (Table 6)", ("flows",), flows.show),
    View("flow_memory", "Memory of flows", ("flow_memory",), flows.memory),
    View("plane", "Flows in the plane", ("densities",), flows.plane),
    View("published", "Series at the published size", ("latent", "paths"), series.published, PUBLISHED),
    View("stability", "Theorems: stability, orders, ways back", ("stability",), _stability),
)
AWAITED = (  # claims of views that have no record yet: which view, what, where
    ("images", "MALI is as accurate as ACA, more than naive and adjoint, two to three times as fast", "Figure 5"),
    ("solvers", "A network trained with MALI keeps its accuracy under other solvers; a ResNet does not", "Table 2"),
    ("solvers", "A Neural ODE is more robust to FGSM than a ResNet, across solvers", "Table 3"),
    ("feasibility", "On ImageNet MALI trains, naive and ACA cannot", "Section 4.2"),
    ("latent", "A latent ODE trained with MALI has the lowest error on MuJoCo", "Table 4"),
    ("speech", "A Neural CDE trained with MALI has the highest accuracy on Speech Commands", "Table 5"),
    ("flows", "MALI trains FFJORD to fewer bits per dimension", "Table 6"),
    ("damping", "Damping changes results little", "Table 7"),
)


def awaited(found: list[Chapter]) -> list[Claim]:
    there = {chapter.name for chapter in found}
    return [Claim(where, text, "not run yet", "") for name, text, where in AWAITED if name not in there]


def chapters() -> list[Chapter]:
    """Of every experiment that has records."""
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
    """One file that needs no other."""
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
    head = f"<head>{head}{title}<style>{STYLE}</style></head>"
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
    """The page, the Markdown and the figures."""
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
