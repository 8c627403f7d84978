"""Figures of the stability and explain records, on white cards. They take results and return `Figure`s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from experiments.report.style import (
    AXIS_LINE,
    CARD,
    CARD_WIDTH,
    COLORS,
    DAMPING,
    EXACT,
    FORWARD_PATH,
    INK,
    PALE_TEXT,
    QUIET,
    REJECTED,
    SOLVER_COLORS,
)


def _card(height: float) -> Figure:
    return Figure(figsize=(CARD_WIDTH, height), layout="constrained")


def _log(ax: Axes, *, x: bool = True, y: bool = True) -> None:
    """Logarithmic axes with few ticks."""
    for on, scale, axis in ((x, ax.set_xscale, ax.xaxis), (y, ax.set_yscale, ax.yaxis)):
        if on:
            scale("log")
            axis.set_major_locator(LogLocator(numticks=6))
            axis.set_minor_locator(NullLocator())
            axis.set_minor_formatter(NullFormatter())


def _note(ax: Axes, x: float, y: float, text: str, color: str, **how: Any) -> None:
    ax.annotate(text, (x, y), **{"xytext": (6, 0), "textcoords": "offset points", "va": "center", **how}, color=color)


# Stability.


def stability_figure(record_results: Mapping[str, Any]) -> Figure:
    """Regions of absolute stability as measured, and how much damping makes an oscillation grow."""
    regions: Mapping[str, Any] = record_results["regions"]
    with matplotlib.rc_context(CARD):
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
    ax.axhline(0, color=AXIS_LINE, lw=0.8, zorder=0)
    ax.axvline(0, color=AXIS_LINE, lw=0.8, zorder=0)
    for eta, found in sorted(regions.items(), key=lambda item: float(item[0])):
        xs, ys = zip(*found["boundary"], strict=True)
        color = DAMPING.get(eta, COLORS["MALI"])
        if found["area"] == 0:
            ax.plot(xs, ys, color=COLORS["naive"], lw=2.4, solid_capstyle="round")
        else:
            ax.fill(xs, ys, facecolor=color, edgecolor=COLORS["MALI"], lw=0.9)


def _mark_edges(ax: Axes, regions: Mapping[str, Any]) -> None:
    if "0.95" in regions:
        _note(
            ax, -0.053, -0.45, "0.95", INK, xytext=(20, -8), arrowprops={"arrowstyle": "-", "color": QUIET, "lw": 0.7}
        )
    if "1" in regions:
        _note(ax, 0.0, 0.75, "1: only\nthe line", COLORS["naive"], xytext=(5, 2), fontsize=9.5)


def _draw_growth(ax: Axes, regions: Mapping[str, Any]) -> None:
    names = sorted(regions, key=float)
    values = [100 * (regions[name]["growth at i/2"] - 1) for name in names]
    ax.hlines(range(len(names)), 0, values, color=AXIS_LINE, lw=2)
    ax.scatter(values, range(len(names)), color=[DAMPING.get(name, COLORS["MALI"]) for name in names], s=55, zorder=3,
               edgecolors=COLORS["MALI"], linewidths=0.9)  # fmt: skip
    for i, value in enumerate(values):
        _note(ax, value, i, f"{max(value, 0):.1f} %", INK, xytext=(8, 0))
    ax.set_yticks(range(len(names)), [rf"$\eta = {name}$" for name in names])
    ax.set(xlim=(-0.6, max(values) * 1.3), ylim=(-0.6, len(names) - 0.4), xlabel="growth per step, in %")
    ax.tick_params(left=False)
    ax.spines["left"].set_visible(False)
    ax.set_title(r"an oscillation, $h\sigma = i/2$")


# Orders.


def orders_figure(record_results: Mapping[str, Any]) -> Figure:
    """Errors against h on logarithmic axes, with slopes: one step, a fixed time, the gradient, the reverse solve."""
    orders = record_results["orders"]
    with matplotlib.rc_context(CARD):
        figure = _card(6.6)
        axes = figure.subplots(2, 2)
        for ax, kind, title in (
            (axes[0, 0], "local", "One step (Theorem 3.1)"),
            (axes[0, 1], "global", "At a fixed time"),
        ):
            for eta, found in orders[kind].items():
                color = DAMPING.get(eta, COLORS["MALI"])
                label = rf"$\eta = {eta}$" if float(eta) < 1 else "ALF"
                _line(ax, found, "z", color, f"{label}: {found['slopes']['z']:.2f}, {found['slopes']['v']:.2f}")
                _line(ax, found, "v", color, None, ls=(0, (2, 1.5)), mfc="white")
            ax.set_title(title)
            ax.legend(title="slopes of z (full), v (dashed)", title_fontsize=9, handlelength=1.2, alignment="left")
            _extend_below(ax, 3.2)
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
        color = shades.get(name) or COLORS[f"MALI {name}"]
        _line(ax, found, "error", color, None)
        text = rf"$\eta = {name.split()[-1]}$" if "eta" in name else name
        ink = color if "0.7" not in name else PALE_TEXT
        text = f"{text}: {found['slopes']['error']:.2f}"
        if name.startswith("alf"):
            _note(ax, found["h"][-1], found["error"][-1], text, ink, fontsize=9.5, xytext=(-7, 0), ha="right")
        else:
            _note(ax, found["h"][0], found["error"][0], text, ink, fontsize=9.5)
    ax.set_title("MALI's gradient, and slopes")


def _line(ax: Axes, found: Mapping[str, Any], what: str, color: str, label: str | None, **how: Any) -> None:
    _log(ax)
    ax.plot(found["h"], found[what], color=color, label=label, **{"marker": "o", **how})


def _extend_below(ax: Axes, decades: float) -> None:
    low, high = ax.get_ylim()
    ax.set_ylim(low / 10**decades, high)


def _draw_equal_steps(ax: Axes, equal: Mapping[str, Any]) -> None:
    _log(ax)
    for name, found in equal.items():
        color = SOLVER_COLORS.get(name, COLORS["MALI"])
        dashed = {"ls": (0, (2, 1.5)), "mfc": "white"} if name == "ALF solved back" else {}
        ax.plot(found["h"], [max(e, 1e-17) for e in found["back"]], color=color, marker="o", **dashed)
        slope = "" if name == "ALF inverse" else f" {found['slopes']['back']:.1f}"
        text = {"ALF solved back": "ALF anew", "ALF inverse": "ALF, inverse"}.get(name, name)
        nudge = {"midpoint": 7, "ALF solved back": -8}.get(name, 0)
        _note(ax, found["h"][0], found["back"][0], f"{text}{slope}", color, fontsize=9.5, xytext=(6, nudge))
    left, right = ax.get_xlim()
    ax.set_xlim(left, right * (right / left) ** 0.62)
    ax.set_title("|z(0) met again − z(0)|")


# Theorem 2.1.

LINES = {  # method: (label, label in the palette)
    "adjoint": ("adjoint, Dopri5", "adjoint"),
    "MALI float32": ("MALI, float32", "MALI float32"),
    "MALI": ("MALI", "MALI"),
    "alf4": ("MALI, alf4", "MALI alf4"),
    "MALI exact": ("MALI exact, float32", "MALI exact"),
}
FLOOR = 1e-18  # where a zero is drawn


def reverse_error_figure(record_results: Mapping[str, Any]) -> Figure:
    """Distance of a solve back in time from z(0), and its effect on the gradient, against the tolerance."""
    problems: Mapping[str, Any] = record_results["reverse"]["tolerances"]
    with matplotlib.rc_context(CARD):
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
    for name, (label, color) in LINES.items():
        cells = {float(tolerance): cell for tolerance, cell in methods.get(name, {}).items()}
        worst = {"back": "worst"}.get(what, what)
        points = [
            (tolerance, max(cell.get(worst, cell[what]), FLOOR)) for tolerance, cell in cells.items() if what in cell
        ]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        ax.plot(xs, ys, color=COLORS[color], marker="o", label=label)
        failed = [tolerance for tolerance, cell in cells.items() if what not in cell]
        ax.plot(failed, [20.0] * len(failed), "x", color=COLORS[color], ms=6, mew=1.6)
        if failed:
            _note(ax, min(failed), 20.0, "fails", COLORS[color], fontsize=9.5, xytext=(7, 0))


# Figures 1 to 3.


def explain_figures(results: Mapping[str, Any]) -> dict[str, Figure]:
    with matplotlib.rc_context(CARD):
        return {
            "search": _search_figure(results["search"]),
            "ways back": _reverse_paths_figure(results["ways back"]),
            "reconstruction": _reconstruction_figure(results["reconstruction"]),
        }


def _search_figure(found: Mapping[str, Any]) -> Figure:
    """Figure 1: accepted steps, and the trials that were too long."""
    figure = _card(5.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 1))
    accepted, rejected = found["accepted"], found["rejected"]
    above.plot(found["exact"]["t"], found["exact"]["z"], color=EXACT, lw=5, solid_capstyle="round", zorder=1)
    for t0, z0, t1, z1, error in zip(*rejected.values(), strict=True):
        above.plot((t0, t1, t1), (z0, z1 - error, z1), color=REJECTED, lw=1.1, zorder=2)
    above.plot(rejected["t1"], rejected["z1"], "o", color=REJECTED, mfc="white", mew=1.2, ms=4.5, zorder=3)
    above.plot([*accepted["t0"], accepted["t1"][-1]], [*accepted["z0"], accepted["z1"][-1]], "-o",
               color=COLORS["MALI"], ms=4, zorder=4)  # fmt: skip
    above.set(ylabel="$z(t)$")
    above.set_title("An adaptive solve: what is accepted, and what is tried")
    low, high = min(found["exact"]["z"]), max(found["exact"]["z"])
    above.set_ylim(low - 0.35 * (high - low), high + 0.25 * (high - low))
    names = (f"{len(accepted['t0'])} accepted steps", f"{len(rejected['t0'])} rejected (bar: estimated error)", "exact")
    handles = (
        above.plot([], [], "-o", color=COLORS["MALI"], ms=4)[0],
        above.plot([], [], "-o", color=REJECTED, mfc="white", lw=1.1)[0],
        above.plot([], [], color=EXACT, lw=5)[0],
    )
    above.legend(handles, names, loc="lower left", ncols=3, columnspacing=1.2, handlelength=1.6)
    for times, color, z in ((accepted, COLORS["MALI"], 3), (rejected, REJECTED, 2)):
        sizes = [t1 - t0 for t0, t1 in zip(times["t0"], times["t1"], strict=True)]
        below.plot(times["t0"], sizes, "o", color=color, mfc=color if z == 3 else "white", ms=4, zorder=z)
    _log(below, x=False)
    below.set(xlabel="$t$", ylabel="$h$")
    return figure


def _reverse_paths_figure(found: Mapping[str, Any]) -> Figure:
    """Figure 2: the adjoint's reverse trajectory leaves the forward one, MALI's does not."""
    figure = _card(5.9)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.35, 1))
    left = figure.add_subplot(grid[0, 0])
    right = figure.add_subplot(grid[0, 1], sharex=left, sharey=left)
    below = figure.add_subplot(grid[1, :])
    adjoint, mali, single = found["adjoint"], found["MALI"], found["MALI float32"]
    left.plot(*adjoint["forward"], color=FORWARD_PATH, lw=4.5, solid_capstyle="round")
    left.plot(*adjoint["back"], color=COLORS["adjoint"], lw=1.6, ls=(0, (4, 1.5)))
    right.plot(*mali["forward"], color=FORWARD_PATH, lw=4.5, solid_capstyle="round")
    right.plot(*mali["back"], "o", color=COLORS["MALI"], ms=2.2)
    for ax, title, path, color in (
        (left, "Adjoint: solved back", adjoint["back"], COLORS["adjoint"]),
        (right, "MALI: rebuilt", mali["back"], COLORS["MALI"]),
    ):
        ax.plot(*(c[-1] for c in path), "s", color=INK, ms=5.5)
        ax.plot(*(c[0] for c in adjoint["forward"]), "o", color=INK, mfc="white", mew=1.4, ms=7)
        ax.plot(*(c[0] for c in path), "X", color=color, mec="white", mew=0.7, ms=9)
        ax.set_title(title, color=color)
        ax.set(xlabel="$z_1$")
    left.set_ylabel("$z_2$")
    _note(left, adjoint["forward"][0][0], adjoint["forward"][1][0], "z(0)", INK, xytext=(8, 6))
    _note(left, adjoint["back"][0][-1], adjoint["back"][1][-1], "z(T)", INK, xytext=(-8, 9), ha="right")
    _note(
        left, adjoint["back"][0][0], adjoint["back"][1][0], "ends here", COLORS["adjoint"], xytext=(-8, 12), ha="center"
    )
    _log(below, x=False)
    for name, run in (("adjoint", adjoint), ("MALI float32", single), ("MALI", mali)):
        distances = [d or math.nan for d in run["distance"]]  # no logarithm of nothing
        below.plot(run["t"], distances, color=COLORS[name], lw=1.4)
        early = [d for t, d in zip(run["t"], distances, strict=True) if t < 0.15 * run["t"][-1] and d > 0]
        text = name.replace("MALI float32", "MALI, float32")
        _note(below, 0.1, max(early, default=1e-16), text, COLORS[name], xytext=(0, 10))
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
            ax.plot(ts, [3e-10] * len(ts), color=COLORS["MALI exact"], lw=2.2)
            _note(ax, ts[-1], 3e-10, "exact mode: 0, to the last bit", COLORS["MALI exact"], xytext=(2, 10))
            continue
        eta = name.removeprefix("eta = ")
        color = DAMPING.get(eta, COLORS["MALI"])
        ax.plot(ts, [e if e > 1e-9 else math.nan for e in errors], color=color, lw=2)
        last = (ts[-1], min(errors[-1], 1e3))
        lost = curve["lost at"] is not None
        text = rf"$\eta = {eta}$" + (", lost" if lost else "")
        place = {"xytext": (-6, 2), "ha": "right"} if lost else {"xytext": (4, 10 if last[1] < 1 else -4), "ha": "left"}
        _note(ax, *last, text, color if float(eta) > 0.8 else PALE_TEXT, **place)
    ax.set(xlim=(-0.02 * span, 1.01 * span), ylim=(1e-10, 3e3), ylabel="relative error of z")
    ax.set_xlabel("$t$ (rebuilt from right to left)")
    ax.set_yticks([1e-9, 1e-6, 1e-3, 1.0, 1e3])
    ax.set_title("The trajectory rebuilt from its end, float32")
    return figure
