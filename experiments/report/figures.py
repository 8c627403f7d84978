"""Figures: drawn on demand, as SVG without what changes from one run to the next, or as a film."""

from __future__ import annotations

import base64
import functools
import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure


@dataclass
class Picture:
    """A figure. id: as in `figure 4`. draw: takes a second or so, and is called on demand."""

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
        """SVG text for the page, without what changes from one run to the next."""
        with matplotlib.rc_context({"svg.hashsalt": self.id, "svg.fonttype": "path"}), io.StringIO() as file:
            self.draw().savefig(file, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
            text = file.getvalue()
        text = text[text.index("<svg") :]
        # Ids must be unique on the page.
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
        """Write the files of the picture; the last one is the one to look at."""
        paths = [folder / f"{self.id}.svg"]
        paths[0].write_text(self.svg)
        if self.gif is not None:
            paths.append(folder / f"{self.id}.gif")
            paths[1].write_bytes(self.gif)
        return paths
