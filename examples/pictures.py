"""The look of the pictures that the examples draw: colours, axes and titles."""

from __future__ import annotations

from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

INK, PALE, GRID = "#222222", "#6b6b6b", "#e6e6e6"
BLUE, RED, ORANGE, GREY = "#1f5fa8", "#c0504d", "#d98c21", "#7f7f7f"


def bare_axes(ax: Axes, title: str = "", x: str = "") -> None:
    """Take the frame and the ticks away, and set a title and the label of the horizontal axis."""
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.spines["bottom"].set_color(PALE)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, labelsize=9, labelcolor=PALE)
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    ax.set_xlabel(x, color=PALE, fontsize=9)


def label_ticks(ax: Axes, label: Callable[[float], str]) -> None:
    """Label the vertical axis of a log scale, at its major ticks alone."""
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
    ax.minorticks_off()
