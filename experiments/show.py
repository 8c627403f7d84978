"""Tables, figures and verdicts as data, and how they look: in a terminal, in Markdown, on a page."""

from __future__ import annotations

import base64
import functools
import html
import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import matplotlib
import rich.table
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from experiments.engine.record import Record

COLORS = {
    "naive": "#c0504d", "adjoint": "#7f7f7f", "seminorm": "#a0a0a0", "ACA": "#d98c21", "MALI": "#1f5fa8",
    "MALI as published": "#7fb2e5", "MALI exact": "#2a9d8f", "MALI alf4": "#6a51a3", "torchdiffeq naive": "#d99694",
    "torchdiffeq adjoint": "#4a4a4a", "naive through the search": "#8c2d2a",
    "ResNet": "#3f7f4f", "naive, 0.1": "#e8a09d", "adjoint, 0.1": "#bdbdbd",
}  # fmt: skip
INK = "#333333"
VERDICTS = ("holds", "holds in part", "does not hold here", "not testable here", "not run yet")


@dataclass(frozen=True)
class Cell:
    """A value of a table; record: the path, from the project's root, of what it comes from."""

    text: str
    record: str | None = None

    def __str__(self) -> str:
        return self.text


Row = Sequence["Cell | str"]


@dataclass(frozen=True)
class Table:
    """id: as in `table 1`. Columns whose name begins with "paper" hold the paper's numbers."""

    id: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    notes: str = ""
    commands: Sequence[str] = ()

    def rich(self) -> rich.table.Table:
        table = rich.table.Table(title=self.title, caption=self.notes or None, caption_justify="left")
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in self.rows:
            table.add_row(*map(str, row))
        return table

    def markdown(self, to_root: str = "..") -> str:
        def cell(x: Cell | str) -> str:
            text = str(x).replace("|", "\\|")
            return f"[{text}]({to_root}/{x.record})" if isinstance(x, Cell) and x.record else text

        lines = [f"| {' | '.join(self.columns)} |", f"|{'---|' * len(self.columns)}"]
        lines += [f"| {' | '.join(map(cell, row))} |" for row in self.rows]
        notes = [self.notes, *(f"`{command}`" for command in self.commands)]
        return "\n".join([f"**{self.title}**", "", *lines, "", *(x for x in notes if x)])

    def html(self, to_root: str = "..") -> str:
        def cell(x: Cell | str, tag: str = "td") -> str:
            text = html.escape(str(x))
            if isinstance(x, Cell) and x.record:
                text = f'<a href="{to_root}/{html.escape(x.record)}">{text}</a>'
            return f"<{tag}>{text}</{tag}>"

        head = "".join(cell(column, "th") for column in self.columns)
        body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in self.rows)
        notes = f"<p class=note>{html.escape(self.notes)}</p>" if self.notes else ""
        commands = "".join(f"<pre>{html.escape(command)}</pre>" for command in self.commands)
        caption = f"<figcaption><b>{html.escape(self.title)}</b></figcaption>"
        table = f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        return f'<figure class=table id="table-{self.id}">{caption}{table}{notes}{commands}</figure>'


@dataclass
class Picture:
    """id: as in `figure 4`. draw: takes a second or so, and is asked when the picture is wanted."""

    id: str
    title: str
    caption: str
    draw: Callable[[], Figure]
    commands: Sequence[str] = ()
    film: Callable[[], bytes] | None = None  # a GIF that is shown in the place of the drawing

    @functools.cached_property
    def gif(self) -> bytes | None:
        return None if self.film is None else self.film()

    @functools.cached_property
    def svg(self) -> str:
        """Inline, without what changes from one run to the next."""
        with matplotlib.rc_context({"svg.hashsalt": self.id, "svg.fonttype": "path"}), io.StringIO() as file:
            self.draw().savefig(file, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
            text = file.getvalue()
        text = text[text.index("<svg") :]
        # Ids must be one of a kind on the page.
        text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{re.sub(r'[^a-z0-9]', '', self.id.lower())}-", text)
        # The page decides how wide it is.
        for size in ("width", "height"):
            text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
        return text

    def html(self) -> str:
        commands = "".join(f"<pre>{html.escape(command)}</pre>" for command in self.commands)
        label = f'role=img aria-label="{html.escape(self.title)}"'
        caption = f"<figcaption><b>{html.escape(self.title)}.</b> {html.escape(self.caption)}</figcaption>"
        film = "" if self.gif is None else base64.b64encode(self.gif).decode()
        shown = f'<img src="data:image/gif;base64,{film}" alt="">' if film else self.svg
        return f'<figure id="figure-{self.id}"><div class=card {label}>{shown}</div>{caption}{commands}</figure>'

    def write(self, folder: Path) -> list[Path]:
        """The last of these files is the one to look at."""
        paths = [folder / f"{self.id}.svg"]
        paths[0].write_text(self.svg)
        if self.gif is not None:
            paths.append(folder / f"{self.id}.gif")
            paths[1].write_bytes(self.gif)
        return paths


@dataclass(frozen=True)
class Claim:
    """Something that the paper says, and what was found. numbers: what the verdict rests on."""

    where: str
    text: str
    verdict: str
    numbers: str
    records: Sequence[str] = field(default=())

    def __post_init__(self):
        assert self.verdict in VERDICTS, self.verdict


class Found(NamedTuple):
    """A record, and its path from the project's root."""

    record: Record
    path: str


Shown = tuple[list[Table], list[Picture], list[Claim]]


def bare(ax: Axes, title: str = "", x: str = "", y: str = "") -> Axes:
    """Axes without what nobody reads."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#999999")
    ax.tick_params(colors=INK, labelsize=9, length=3)
    ax.set_title(title, fontsize=10, color=INK, loc="left")
    ax.set_xlabel(x, fontsize=9, color=INK)
    ax.set_ylabel(y, fontsize=9, color=INK)
    ax.grid(True, color="#e6e6e6", linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def log_scale(ax: Axes, x: bool = False) -> None:
    """Decades, and nothing written between them (unless there is but one)."""
    ax.set_yscale("log")
    if x:
        ax.set_xscale("log")
    for axis in (ax.xaxis, ax.yaxis) if x else (ax.yaxis,):
        low, high = axis.get_view_interval()
        if high > 10 * low:
            axis.set_minor_formatter(NullFormatter())


def log_time(ax: Axes) -> None:
    """Seconds over a decade or two: 10, 20, 50, 100, written as numbers."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())


def short(x: float | None, digits: int = 2) -> str:
    """1.1e-05 as 1.1e-5, 123456 as 123,456."""
    if x is None or math.isnan(x):
        return "-"
    if math.isinf(x):
        return "infinite"
    if isinstance(x, int) or (x == int(x) and abs(x) < 1e7):
        return f"{int(x):,}"
    text = f"{x:.{digits}g}" if abs(x) >= 1e-3 else f"{x:.{digits - 1}e}"
    return re.sub(r"e([+-])0*(\d+)", lambda m: f"e{'-' if m[1] == '-' else ''}{m[2]}", text)
