"""The one palette, the look of axes, and the style sheet of the page."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter

COLORS = {  # by label of a method; labels are those of experiments/methods.py where it has the method
    "naive": "#c0504d",
    "naive, 0.1": "#e8a09d",
    "naive through the search": "#8c2d2a",
    "torchdiffeq naive": "#d99694",
    "adjoint": "#7f7f7f",
    "adjoint, 0.1": "#bdbdbd",
    "seminorm": "#a0a0a0",
    "torchdiffeq adjoint": "#4a4a4a",
    "ACA": "#d98c21",
    "MALI": "#1f5fa8",
    "MALI compiled": "#3a86c8",
    "MALI, free steps": "#3a86c8",
    "MALI float32": "#6fa3dc",
    "MALI as published": "#7fb2e5",
    "MALI exact": "#2a9d8f",
    "MALI alf4": "#6a51a3",
    "MALI alf6": "#a58fd0",
    "ResNet": "#3f7f4f",
    "FFJORD (vanilla)": "#4a4a4a",
    "RNODE": "#3f7f4f",
    "RNODE, weights 0.05": "#9bc48f",
    "SemiNorm": "#b07aa1",
    "MALI, weights 0.01": "#8fb4dc",
    "torchode": "#b07aa1",
    "TorchDiffEqPack MALI": "#6fa3dc",
    "diffrax": "#3f7f4f",
    "diffrax backsolve": "#9bc48f",
    "eager limit": "#b5b5b5",
}
SOLVER_COLORS = {  # of solvers that are run back in time
    "Euler": "#b5b5b5", "midpoint": "#9a9a9a", "Bosh3": "#7f7f7f", "RK4": "#636363", "Dopri5": "#474747",
}  # fmt: skip
DAMPING = {  # by eta: MALI's blue, the paler the stronger the damping
    "1": "#1f5fa8", "0.95": "#4f93d2", "0.9": "#7fb3dd", "0.8": "#86b9e0", "0.7": "#a9cbe8", "0.25": "#cfe1f2",
}  # fmt: skip
PALE_TEXT = "#6f9dc7"  # text beside a line of strong damping, whose own blue is too pale to be read
INK, DARK, QUIET = "#333333", "#303030", "#8a8a8a"
FRAME, GRID, AXIS_LINE = "#999999", "#e6e6e6", "#dddddd"
REFERENCE = "#808080"  # lines that results are compared with
TRUTH, EXACT, FORWARD_PATH = "#b0b0b0", "#d5d5d5", "#c9d9ea"
OBSERVED, REJECTED = "#d98c21", "#2e9e5b"


def plain_axes(ax: Axes, title: str = "", x: str = "", y: str = "") -> Axes:
    """Give axes a title and labels, and take the frame and strong ticks away."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FRAME)
    ax.tick_params(colors=INK, labelsize=9, length=3)
    ax.set_title(title, fontsize=10, color=INK, loc="left")
    ax.set_xlabel(x, fontsize=9, color=INK)
    ax.set_ylabel(y, fontsize=9, color=INK)
    ax.grid(True, color=GRID, linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def log_scale(ax: Axes, x: bool = False) -> None:
    """Set logarithmic scales that label decades alone, unless there is but one."""
    ax.set_yscale("log")
    if x:
        ax.set_xscale("log")
    for axis in (ax.xaxis, ax.yaxis) if x else (ax.yaxis,):
        low, high = axis.get_view_interval()
        if high > 10 * low:
            axis.set_minor_formatter(NullFormatter())


def log_time_axis(ax: Axes) -> None:
    """Set a logarithmic x axis of seconds over a decade or two, labelled 10, 20, 50, 100."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter(NullFormatter())


# Small figures of theory, on white cards

CARD_WIDTH = 6.5
CARD: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.labelsize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "path",
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
}


# The page

PAGE = """
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
