"""Table of an audit as text and as HTML."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Sequence

from torchmali.auditing.rows import Row
from torchmali.solvers.base import ReversibleSolver

HEADS = ["method", "solver + gradient", "error", "peak", "f fwd", "f bwd", "time", "rebuilt", "renewed"]


def cells(row: Row, uncertainty: float) -> list[list[str]]:
    """Return the cells of a row (or the reason why it has no numbers), and its notes."""
    stats, has_v = row.stats, isinstance(row.method.solver, ReversibleSolver)
    drift = "-" if stats.reconstruction_error is None else brief(stats.reconstruction_error)
    work = [str(stats.n_evals_forward), str(stats.n_evals_backward), duration(row.seconds)]
    error = shown_error(row.error, uncertainty)
    found = [error, size(row.peak_bytes), *work, drift, str(stats.n_refreshes) if has_v else "-"]
    reason = f"failed: {short(row.failure)}" if row.failure else f"not measured: {row.unmeasured}"
    notes = (["", f"^ {short(note)}"] for note in row.notes)
    return [[row.name, str(row.method), *(found if row.is_measured else [reason])], *notes]


def as_text(rows: Sequence[Row], uncertainty: float, caption: str, advice: str) -> str:
    lines, n = _lines(rows, uncertainty), len(HEADS)
    widths = [max(len(line[i]) for line in lines if i < len(line) - (len(line) < n)) for i in range(n)]
    sides = {n: "<<" + ">" * n}  # numbers to the right, reasons and notes to the left
    columns = [zip(line, sides.get(len(line), "<<<"), widths, strict=False) for line in lines]
    head, *table = ("  ".join(f"{x:{side}{w}}" for x, side, w in line).rstrip() for line in columns)
    below = [textwrap.wrap(text, len(head), break_on_hyphens=False) for text in (caption, advice)]
    return "\n".join([head, "-" * len(head), *table, "", *below[0], "", *below[1]])


def as_html(rows: Sequence[Row], uncertainty: float, caption: str, advice: str) -> str:
    table = ""
    for line in _lines(rows, uncertainty):
        *first, last = (html.escape(cell) for cell in line)
        rest = f'<td colspan="{len(HEADS) - len(first)}" style="text-align:left">'  # a reason or a note
        end = "<td>" if len(line) == len(HEADS) else rest
        table += f"<tr>{''.join(f'<td>{cell}</td>' for cell in first)}{end}{last}</td></tr>"
    return f"<table>{table}</table><p>{html.escape(advice)}</p><p>{html.escape(caption)}</p>"


def _lines(rows: Sequence[Row], uncertainty: float) -> list[list[str]]:
    return [HEADS, *(line for row in rows for line in cells(row, uncertainty))]


def shown_error(error: float, uncertainty: float) -> str:
    """Format an error; one below the reference's own error is marked: the reference cannot tell it from zero."""
    if math.isnan(error):
        return "-"
    return f"< {brief(uncertainty)}" if error < uncertainty else brief(error)


def short(message: str) -> str:
    """Shorten a message to its first clause, without a parenthesis at its end."""
    return re.sub(r" \([^()]*\)$", "", re.split(r"[.:;] |\n", message)[0].rstrip("."))


def brief(x: float) -> str:
    return f"{x:.1e}" if x else "0"


def size(n: float) -> str:
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n >= factor:
            return f"{n / factor:.1f} {unit}"
    return f"{n:.0f} B"


def duration(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
