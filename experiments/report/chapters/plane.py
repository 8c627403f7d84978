"""Densities in the plane: what a flow learned, and how points move in it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from experiments.flows.images import unpacked
from experiments.flows.plane import LIMIT, N_CELLS, N_TIMES
from experiments.report.claims import check
from experiments.report.figures import Picture
from experiments.report.runs import Found, Shown, commands
from experiments.report.style import COLORS, DARK
from experiments.report.tables import Cell, Table


def points(text: str) -> np.ndarray:
    steps = np.frombuffer(base64.b64decode(text), "<u2").reshape(-1, 2)
    return (steps / 65535 - 0.5) * 2 * LIMIT


def show(found: list[Found]) -> Shown:
    found = list({one.record.config["data"]: one for one in found}.values())  # one of each
    rows, claims = [], []
    for one in found:
        results, name = one.record.results, one.record.config["data"]
        lowest = results["lowest_nats"]
        texts = [
            *(f"{results[key]:.3f}" for key in ("test_nats", "gaussian_nats")),
            "-" if lowest is None else f"{lowest:.3f}",
            f"{results['density']['inside']:.3f}",
        ]
        rows.append([name, *(Cell(text, one.path) for text in texts)])
        numbers = f"{results['test_nats']:.3f} nats, the normal distribution {results['gaussian_nats']:.3f}."
        beaten = [results["test_nats"] < results["gaussian_nats"]]
        claims.append(
            check("a floor: it learns", f"A flow trained with MALI learns {name}", beaten, numbers, [one.path])
        )
    columns = (
        "data",
        "nats of the flow",
        "of a normal distribution",
        "lowest possible",
        "density inside the picture, sum",
    )
    notes = "Minus the log-likelihood of test points."
    table = Table("plane", "Densities in the plane", columns, rows, notes, commands(found))
    caption = "Top: points to learn from. Middle: the density of the flow. Bottom: samples. Trained with MALI, order 4."
    picture = Picture("plane", "Densities in the plane", caption, partial(_plane, found), commands(found))
    caption = "Normal noise becomes samples: points that follow the flow."
    film = partial(_film, found)
    moving = Picture("plane-way", "On the way from noise", caption, partial(_moving, found), commands(found), film)
    return [table], [picture, moving], claims


def _square(ax: Axes) -> Axes:
    ax.set(xlim=(-LIMIT, LIMIT), ylim=(-LIMIT, LIMIT), xticks=[], yticks=[], aspect="equal")
    return ax


def _plane(found: Sequence[Found]) -> Figure:
    figure = Figure(figsize=(6.4, 6.6), dpi=200, layout="constrained")  # points are pixels: as lines they are 1 MB
    axes = figure.subplots(3, len(found), squeeze=False)
    for column, one in enumerate(found):
        results = one.record.results
        _square(axes[0][column]).set_title(one.record.config["data"], fontsize=10)
        axes[0][column].plot(*points(results["real"]).T, ".", markersize=1.5, color=DARK, rasterized=True)
        cells = unpacked(results["density"]["cells"], (N_CELLS, N_CELLS))[0].numpy()
        extent = (-LIMIT, LIMIT, -LIMIT, LIMIT)
        _square(axes[1][column]).imshow(cells, origin="lower", extent=extent, cmap="magma", interpolation="nearest")
        samples = points(results["on_the_way"]).reshape(N_TIMES, -1, 2)[-1]
        _square(axes[2][column]).plot(*samples.T, ".", markersize=1.5, color=COLORS["MALI"], rasterized=True)
    return figure


def _moving(found: Sequence[Found]) -> Figure:
    figure = Figure(figsize=(6.4, 1.15 * len(found) + 0.2), dpi=200, layout="constrained")
    chosen_times = [round(k * (N_TIMES - 1) / 5) for k in range(6)]
    axes = figure.subplots(len(found), 6, squeeze=False)
    for row, one in enumerate(found):
        path = points(one.record.results["on_the_way"]).reshape(N_TIMES, -1, 2)
        for column, k in enumerate(chosen_times):
            ax = _square(axes[row][column])
            ax.plot(*path[k].T, ".", markersize=0.8, color=COLORS["MALI"], rasterized=True)
            if row == 0:
                ax.set_title(f"t = {1 - k / (N_TIMES - 1):.1f}", fontsize=8)
    return figure


def _film(found: Sequence[Found]) -> bytes:
    """Make a GIF of points that move from noise to samples, with a pause at both ends."""
    size, frames = 180, []
    paths = [points(one.record.results["on_the_way"]).reshape(N_TIMES, -1, 2) for one in found]
    ink = tuple(int(COLORS["MALI"][i : i + 2], 16) for i in (1, 3, 5))
    for k in [0] * 6 + list(range(N_TIMES)) + [N_TIMES - 1] * 12:
        frame = np.full((size, size * len(paths), 3), 255, np.uint8)
        for i, path in enumerate(paths):
            places = ((path[k] / (2 * LIMIT) + 0.5) * (size - 1)).round().astype(int).clip(1, size - 2)
            for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
                frame[size - 1 - places[:, 1] - dy, i * size + places[:, 0] + dx] = ink
        frames.append(Image.fromarray(frame).quantize(4))
    with io.BytesIO() as file:
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=80, loop=0)
        return file.getvalue()
