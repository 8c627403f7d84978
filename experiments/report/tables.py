"""Tables as data, and how they look: in a terminal, in Markdown, on the page."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import rich.table


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
    """A table. id: as in `table 1`. Columns whose name begins with "paper" hold the paper's numbers."""

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


def short(x: float | None, digits: int = 2) -> str:
    """Format a number: 1.1e-05 as 1.1e-5, 123456 as 123,456."""
    if x is None or math.isnan(x):
        return "-"
    if math.isinf(x):
        return "infinite"
    if isinstance(x, int) or (x == int(x) and abs(x) < 1e7):
        return f"{int(x):,}"
    text = f"{x:.{digits}g}" if abs(x) >= 1e-3 else f"{x:.{digits - 1}e}"
    return re.sub(r"e([+-])0*(\d+)", lambda m: f"e{'-' if m[1] == '-' else ''}{m[2]}", text)
