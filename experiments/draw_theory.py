"""Figures of the stability and explain records, on white cards. They take results and return `Figure`s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

COLOURS = {
    "naive": "#c0504d",
    "adjoint": "#7f7f7f",
    "seminorm": "#a0a0a0",
    "ACA": "#d98c21",
    "MALI": "#1f5fa8",
    "MALI float32": "#6fa3dc",
    "MALI exact": "#2a9d8f",
    "MALI as published": "#c0504d",
    "alf4": "#6a51a3",
    "alf6": "#a58fd0",
}
DAMPING = {"1": "#1f5fa8", "0.95": "#4f93d2", "0.9": "#7fb3dd", "0.8": "#86b9e0", "0.7": "#a9cbe8", "0.25": "#cfe1f2"}
INK, QUIET, SEARCH = "#333333", "#8a8a8a", "#2e9e5b"
WIDTH = 6.5
STYLE: Any = {
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


def _card(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), layout="constrained")


def _log(ax: Axes, *, x: bool = True, y: bool = True) -> None:
    """Logarithmic axes with few ticks."""
    for on, scale, axis in ((x, ax.set_xscale, ax.xaxis), (y, ax.set_yscale, ax.yaxis)):
        if on:
            scale("log")
            axis.set_major_locator(LogLocator(numticks=6))
            axis.set_minor_locator(NullLocator())
            axis.set_minor_formatter(NullFormatter())


def _note(ax: Axes, x: float, y: float, text: str, colour: str, **how: Any) -> None:
    ax.annotate(text, (x, y), **{"xytext": (6, 0), "textcoords": "offset points", "va": "center", **how}, color=colour)


# Stability.


def stability_figure(record_results: Mapping[str, Any]) -> Figure:
    """Regions of absolute stability as measured, and how much damping makes an oscillation grow."""
    regions: Mapping[str, Any] = record_results["regions"]
    with matplotlib.rc_context(STYLE):
        figure = _card(6.0)
        grid = figure.add_gridspec(2, 1, height_ratios=(1, 1.25))
        whole, below = figure.add_subplot(grid[0]), grid[1].subgridspec(1, 2, width_ratios=(1, 1.15))
        near, turning = figure.add_subplot(below[0]), figure.add_subplot(below[1])
        for ax in (whole, near):
            _draw_regions(ax, regions)
        whole.set(xlim=(-6.5, 0.8), ylim=(-1.35, 1.35), xlabel=r"Re $h\sigma$", ylabel=r"Im $h\sigma$")
        whole.set_title("Where damped ALF is stable")
        near.set(xlim=(-1.02, 0.3), ylim=(-1.15, 1.15), xlabel=r"Re $h\sigma$", ylabel=r"Im $h\sigma$")
        near.set_title("the same, near zero")
        for eta, found in regions.items():
            half_axis = found["ellipse"]["semi-axes"][0]
            if half_axis > 1:
                whole.text(-half_axis, 0, rf"$\eta = {eta}$", ha="center", va="center", color=INK)
            elif half_axis > 0.2:
                height = 0.32 if half_axis > 0.3 else -0.02
                near.text(-2 * half_axis + 0.03, height, f"{eta}", ha="left", va="center", color=INK)
        _mark_edges(near, regions)
        _draw_growth(turning, regions)
        return figure


def _draw_regions(ax: Axes, regions: Mapping[str, Any]) -> None:
    ax.set_aspect("equal")
    ax.axhline(0, color="#dddddd", lw=0.8, zorder=0)
    ax.axvline(0, color="#dddddd", lw=0.8, zorder=0)
    for eta, found in sorted(regions.items(), key=lambda item: float(item[0])):
        xs, ys = zip(*found["boundary"], strict=True)
        colour = DAMPING.get(eta, COLOURS["MALI"])
        if found["area"] == 0:
            ax.plot(xs, ys, color=COLOURS["naive"], lw=2.4, solid_capstyle="round")
        else:
            ax.fill(xs, ys, facecolor=colour, edgecolor=COLOURS["MALI"], lw=0.9)


def _mark_edges(ax: Axes, regions: Mapping[str, Any]) -> None:
    if "0.95" in regions:
        _note(
            ax, -0.053, -0.45, "0.95", INK, xytext=(20, -8), arrowprops={"arrowstyle": "-", "color": QUIET, "lw": 0.7}
        )
    if "1" in regions:
        _note(ax, 0.0, 0.75, "1: only\nthe line", COLOURS["naive"], xytext=(5, 2), fontsize=9.5)


def _draw_growth(ax: Axes, regions: Mapping[str, Any]) -> None:
    names = sorted(regions, key=float)
    values = [100 * (regions[name]["growth at i/2"] - 1) for name in names]
    ax.hlines(range(len(names)), 0, values, color="#dddddd", lw=2)
    ax.scatter(values, range(len(names)), color=[DAMPING.get(name, COLOURS["MALI"]) for name in names], s=55, zorder=3,
               edgecolors=COLOURS["MALI"], linewidths=0.9)  # fmt: skip
    for i, value in enumerate(values):
        _note(ax, value, i, f"{max(value, 0):.1f} %", INK, xytext=(8, 0))
    ax.set_yticks(range(len(names)), [rf"$\eta = {name}$" for name in names])
    ax.set(xlim=(-0.6, max(values) * 1.3), ylim=(-0.6, len(names) - 0.4), xlabel="growth per step, in %")
    ax.tick_params(left=False)
    ax.spines["left"].set_visible(False)
    ax.set_title(r"an oscillation, $h\sigma = i/2$")


# Orders.


def orders_figure(record_results: Mapping[str, Any]) -> Figure:
    """Errors against h on logarithmic axes, with their slopes: one step, a fixed time, the gradient, the way back."""
    orders = record_results["orders"]
    with matplotlib.rc_context(STYLE):
        figure = _card(6.6)
        axes = figure.subplots(2, 2)
        for ax, kind, title in (
            (axes[0, 0], "local", "One step (Theorem 3.1)"),
            (axes[0, 1], "global", "At a fixed time"),
        ):
            for eta, found in orders[kind].items():
                colour = DAMPING.get(eta, COLOURS["MALI"])
                label = rf"$\eta = {eta}$" if float(eta) < 1 else "ALF"
                _line(ax, found, "z", colour, f"{label}: {found['slopes']['z']:.2f}, {found['slopes']['v']:.2f}")
                _line(ax, found, "v", colour, None, ls=(0, (2, 1.5)), mfc="white")
            ax.set_title(title)
            ax.legend(title="slopes of z (full), v (dashed)", title_fontsize=9, handlelength=1.2, alignment="left")
            _room_below(ax, 3.2)
        _draw_gradients(axes[1, 0], orders["gradient"])
        _draw_equal_steps(axes[1, 1], record_results["reverse"]["equal steps"])
        for ax in axes.flat:
            sizes = [h for line in ax.lines for h in (line.get_xdata()[0], line.get_xdata()[-1])]
            ticks = sorted({min(sizes), max(sizes), *((0.04,) if ax is axes[1, 0] else ())})
            ax.set_xticks(ticks, [f"{h:.2g}" for h in ticks])
            ax.set_xlabel("$h$")
        for ax in axes[:, 0]:
            ax.set_ylabel("error")
        return figure


def _draw_gradients(ax: Axes, gradients: Mapping[str, Any]) -> None:
    shades = {"ALF": DAMPING["1"], "ALF, eta = 0.95": DAMPING["0.95"], "ALF, eta = 0.7": DAMPING["0.7"]}
    for name, found in gradients.items():
        colour = {**COLOURS, **shades}[name]
        _line(ax, found, "error", colour, None)
        text = rf"$\eta = {name.split()[-1]}$" if "eta" in name else name
        ink = colour if "0.7" not in name else "#6f9dc7"
        text = f"{text}: {found['slopes']['error']:.2f}"
        if name.startswith("alf"):
            _note(ax, found["h"][-1], found["error"][-1], text, ink, fontsize=9.5, xytext=(-7, 0), ha="right")
        else:
            _note(ax, found["h"][0], found["error"][0], text, ink, fontsize=9.5)
    ax.set_title("MALI's gradient, and slopes")


def _line(ax: Axes, found: Mapping[str, Any], what: str, colour: str, label: str | None, **how: Any) -> None:
    _log(ax)
    ax.plot(found["h"], found[what], color=colour, label=label, **{"marker": "o", **how})


def _room_below(ax: Axes, decades: float) -> None:
    low, high = ax.get_ylim()
    ax.set_ylim(low / 10**decades, high)


def _draw_equal_steps(ax: Axes, equal: Mapping[str, Any]) -> None:
    greys = {"Euler": "#b5b5b5", "midpoint": "#9a9a9a", "Bosh3": "#7f7f7f", "RK4": "#636363", "Dopri5": "#474747"}
    _log(ax)
    for name, found in equal.items():
        colour = greys.get(name, COLOURS["MALI"])
        dashed = {"ls": (0, (2, 1.5)), "mfc": "white"} if name == "ALF solved back" else {}
        ax.plot(found["h"], [max(e, 1e-17) for e in found["back"]], color=colour, marker="o", **dashed)
        slope = "" if name == "ALF inverse" else f" {found['slopes']['back']:.1f}"
        text = {"ALF solved back": "ALF anew", "ALF inverse": "ALF, inverse"}.get(name, name)
        nudge = {"midpoint": 7, "ALF solved back": -8}.get(name, 0)
        _note(ax, found["h"][0], found["back"][0], f"{text}{slope}", colour, fontsize=9.5, xytext=(6, nudge))
    left, right = ax.get_xlim()
    ax.set_xlim(left, right * (right / left) ** 0.62)
    ax.set_title("|z(0) met again − z(0)|")


# Theorem 2.1.

LINES = {  # method: (label, line style)
    "adjoint": ("adjoint, Dopri5", "-"),
    "MALI float32": ("MALI, float32", "-"),
    "MALI": ("MALI", "-"),
    "alf4": ("MALI, alf4", "-"),
    "MALI exact": ("MALI exact, float32", "-"),
}
FLOOR = 1e-18  # where a zero is drawn


def reverse_error_figure(record_results: Mapping[str, Any]) -> Figure:
    """How far the way back ends from z(0), and what that does to the gradient, against the tolerance."""
    problems: Mapping[str, Any] = record_results["reverse"]["tolerances"]
    with matplotlib.rc_context(STYLE):
        figure = _card(2.3 * len(problems) + 0.9)
        axes = figure.subplots(len(problems), 2, sharex=True, sharey=True, squeeze=False)
        for (back, grad), (title, methods) in zip(axes, problems.items(), strict=True):
            _draw_tolerances(back, methods, "back")
            _draw_tolerances(grad, methods, "gradient")
            back.set_title(title.replace("mu", r"$\mu$"))
            back.set_ylabel("relative error")
        axes[0, 0].set_title("z(0); MALI: worst state\n" + axes[0, 0].get_title(loc="left"))
        axes[0, 1].set_title("gradient against the discrete one\n")
        for ax in axes[-1]:
            ax.set_xlabel("tolerance")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, handlelength=1.6, columnspacing=1.4)
        return figure


def _draw_tolerances(ax: Axes, methods: Mapping[str, Any], what: str) -> None:
    _log(ax)
    ax.set(xlim=(2.5e-2, 4e-9), ylim=(FLOOR / 4, 2e2))
    ax.set_yticks([FLOOR, 1e-15, 1e-10, 1e-5, 1.0], ["0", "$10^{-15}$", "$10^{-10}$", "$10^{-5}$", "1"])
    ax.set_xticks([1e-2, 1e-4, 1e-6, 1e-8])
    for name, (label, style) in LINES.items():
        cells = {float(tolerance): cell for tolerance, cell in methods.get(name, {}).items()}
        worst = {"back": "worst"}.get(what, what)
        points = [
            (tolerance, max(cell.get(worst, cell[what]), FLOOR)) for tolerance, cell in cells.items() if what in cell
        ]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        ax.plot(xs, ys, color=COLOURS[name], ls=style, marker="o", label=label)
        failed = [tolerance for tolerance, cell in cells.items() if what not in cell]
        ax.plot(failed, [20.0] * len(failed), "x", color=COLOURS[name], ms=6, mew=1.6)
        if failed:
            _note(ax, min(failed), 20.0, "fails", COLOURS[name], fontsize=9.5, xytext=(7, 0))


# Figures 1 to 3.


def explain_figures(results: Mapping[str, Any]) -> dict[str, Figure]:
    with matplotlib.rc_context(STYLE):
        return {
            "search": _search_figure(results["search"]),
            "ways back": _ways_back_figure(results["ways back"]),
            "reconstruction": _reconstruction_figure(results["reconstruction"]),
        }


def _search_figure(found: Mapping[str, Any]) -> Figure:
    """Figure 1: accepted steps, and the trials that were too long."""
    figure = _card(5.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    accepted, rejected = found["accepted"], found["rejected"]
    above.plot(found["exact"]["t"], found["exact"]["z"], color="#d5d5d5", lw=5, solid_capstyle="round", zorder=1)
    for t0, z0, t1, z1, error in zip(*rejected.values(), strict=True):
        above.plot((t0, t1, t1), (z0, z1 - error, z1), color=SEARCH, lw=1.1, zorder=2)
    above.plot(rejected["t1"], rejected["z1"], "o", color=SEARCH, mfc="white", mew=1.2, ms=4.5, zorder=3)
    above.plot([*accepted["t0"], accepted["t1"][-1]], [*accepted["z0"], accepted["z1"][-1]], "-o",
               color=COLOURS["MALI"], ms=4, zorder=4)  # fmt: skip
    above.set(ylabel="$z(t)$")
    above.set_title("An adaptive solve: what is accepted, and what is tried")
    low, high = min(found["exact"]["z"]), max(found["exact"]["z"])
    above.set_ylim(low - 0.35 * (high - low), high + 0.25 * (high - low))
    names = (f"{len(accepted['t0'])} accepted steps", f"{len(rejected['t0'])} rejected (bar: estimated error)", "exact")
    handles = (
        above.plot([], [], "-o", color=COLOURS["MALI"], ms=4)[0],
        above.plot([], [], "-o", color=SEARCH, mfc="white", lw=1.1)[0],
        above.plot([], [], color="#d5d5d5", lw=5)[0],
    )
    above.legend(handles, names, loc="lower left", ncols=3, columnspacing=1.2, handlelength=1.6)
    for times, colour, z in ((accepted, COLOURS["MALI"], 3), (rejected, SEARCH, 2)):
        sizes = [t1 - t0 for t0, t1 in zip(times["t0"], times["t1"], strict=True)]
        below.plot(times["t0"], sizes, "o", color=colour, mfc=colour if z == 3 else "white", ms=4, zorder=z)
    _log(below, x=False)
    below.set(xlabel="$t$", ylabel="$h$")
    return figure


def _ways_back_figure(found: Mapping[str, Any]) -> Figure:
    """Figure 2: the adjoint's way back parts from the way forward, MALI's does not."""
    figure = _card(5.9)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.35, 1))
    left = figure.add_subplot(grid[0, 0])
    right = figure.add_subplot(grid[0, 1], sharex=left, sharey=left)
    below = figure.add_subplot(grid[1, :])
    adjoint, mali, single = found["adjoint"], found["MALI"], found["MALI float32"]
    left.plot(*adjoint["forward"], color="#c9d9ea", lw=4.5, solid_capstyle="round")
    left.plot(*adjoint["back"], color=COLOURS["adjoint"], lw=1.6, ls=(0, (4, 1.5)))
    right.plot(*mali["forward"], color="#c9d9ea", lw=4.5, solid_capstyle="round")
    right.plot(*mali["back"], "o", color=COLOURS["MALI"], ms=2.2)
    for ax, title, path, colour in (
        (left, "Adjoint: solved back", adjoint["back"], COLOURS["adjoint"]),
        (right, "MALI: rebuilt", mali["back"], COLOURS["MALI"]),
    ):
        ax.plot(*(c[-1] for c in path), "s", color=INK, ms=5.5)
        ax.plot(*(c[0] for c in adjoint["forward"]), "o", color=INK, mfc="white", mew=1.4, ms=7)
        ax.plot(*(c[0] for c in path), "X", color=colour, mec="white", mew=0.7, ms=9)
        ax.set_title(title, color=colour)
        ax.set(xlabel="$z_1$")
    left.set_ylabel("$z_2$")
    _note(left, adjoint["forward"][0][0], adjoint["forward"][1][0], "z(0)", INK, xytext=(8, 6))
    _note(left, adjoint["back"][0][-1], adjoint["back"][1][-1], "z(T)", INK, xytext=(-8, 9), ha="right")
    _note(
        left,
        adjoint["back"][0][0],
        adjoint["back"][1][0],
        "ends here",
        COLOURS["adjoint"],
        xytext=(-8, 12),
        ha="center",
    )
    _log(below, x=False)
    for name, run in (("adjoint", adjoint), ("MALI float32", single), ("MALI", mali)):
        distances = [d or math.nan for d in run["distance"]]  # no logarithm of nothing
        below.plot(run["t"], distances, color=COLOURS[name], lw=1.4)
        early = [d for t, d in zip(run["t"], distances, strict=True) if t < 0.15 * run["t"][-1] and d > 0]
        text = name.replace("MALI float32", "MALI, float32")
        _note(below, 0.1, max(early, default=1e-16), text, COLOURS[name], xytext=(0, 10))
    below.set(xlabel="$t$ (the way back goes from right to left)", ylabel="distance", ylim=(1e-17, 3e2))
    below.set_yticks([1e-15, 1e-10, 1e-5, 1.0])
    below.set_title("distance from the way forward (gaps: zero)")
    return figure


def _reconstruction_figure(found: Mapping[str, Any]) -> Figure:
    """Figure 3: the error of the rebuilt trajectory, from its end to its start."""
    figure = _card(3.9)
    ax = figure.subplots()
    _log(ax, x=False)
    span = max(max(curve["t"]) for curve in found.values())
    for name, curve in found.items():
        points = [(t, e) for t, e in zip(curve["t"], curve["error"], strict=True) if e is not None]
        ts, errors = zip(*points, strict=True)
        if name == "exact":
            ax.plot(ts, [3e-10] * len(ts), color=COLOURS["MALI exact"], lw=2.2)
            _note(ax, ts[-1], 3e-10, "exact mode: 0, to the last bit", COLOURS["MALI exact"], xytext=(2, 10))
            continue
        eta = name.removeprefix("eta = ")
        colour = DAMPING.get(eta, COLOURS["MALI"])
        ax.plot(ts, [e if e > 1e-9 else math.nan for e in errors], color=colour, lw=2)
        last = (ts[-1], min(errors[-1], 1e3))
        lost = curve["lost at"] is not None
        text = rf"$\eta = {eta}$" + (", lost" if lost else "")
        place = {"xytext": (-6, 2), "ha": "right"} if lost else {"xytext": (4, 10 if last[1] < 1 else -4), "ha": "left"}
        _note(ax, *last, text, colour if float(eta) > 0.8 else "#6f9dc7", **place)
    ax.set(xlim=(-0.02 * span, 1.01 * span), ylim=(1e-10, 3e3), ylabel="relative error of z")
    ax.set_xlabel("$t$ (rebuilt from right to left)")
    ax.set_yticks([1e-9, 1e-6, 1e-3, 1.0, 1e3])
    ax.set_title("The trajectory rebuilt from its end, float32")
    return figure
