"""Table 6 and its samples: continuous flows of images; densities in the plane."""

from __future__ import annotations

import base64
import io
import math
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from experiments.flows.images import unpacked
from experiments.flows.plane import LIMIT, N_CELLS, N_TIMES
from experiments.show import COLORS, Cell, Claim, Found, Picture, Shown, Table, bare, log_time
from experiments.views.images import Groups, commands, seeds_of, spread, together, verdict
from experiments.views.series import chosen

NAMES = {
    "vanilla": "FFJORD (vanilla)", "rnode": "RNODE", "rnode05": "RNODE, weights 0.05", "seminorm": "SemiNorm",
    "aca": "ACA", "naive": "naive", "mali": "MALI", "mali01": "MALI, weights 0.01", "alf4": "MALI alf4",
}  # fmt: skip
DATA = {"cpu": "digits, 8 x 8", "cpu-mnist": "MNIST, 14 x 14", "cpu-cifar10": "CIFAR-10, 16 x 16"}
LONG = "{}-long"  # where the same flow was trained on, for its pictures

# The paper's bits per dimension: MNIST, CIFAR-10, ImageNet of 64 x 64
PAPER = {
    "vanilla": ("0.99", "3.40", "-"), "rnode": ("0.97", "3.38", "3.83"), "seminorm": ("0.96", "3.35", "-"),
    "mali": ("0.87", "3.27", "3.71"),
}  # fmt: skip
DISCRETE = {
    "RealNVP": ("1.06", "3.49", "3.98"), "i-ResNet": ("1.05", "3.45", "-"), "Glow": ("1.05", "3.35", "3.81"),
    "Flow++": ("-", "3.28", "-"), "Residual Flow": ("0.97", "3.28", "3.76"),
}  # fmt: skip
NOT_RUN = "python -m experiments run flows --preset paper-imagenet64 --method mali --seed 0 --data-dir IMAGENET"


def by_method(found: Sequence[Found]) -> Groups:
    return {method: group for method in NAMES if (group := chosen(found, method=method))}


def bits(group: Sequence[Found], key: str = "test_bits") -> list[float]:
    return [one.record.results[key] for one in group]


def mean_bits(group: Sequence[Found]) -> float:
    return statistics.fmean(bits(group))


def last_epoch(group: Sequence[Found]) -> float:
    """Bits in training, over the last epoch: they do not jump as the bits at its end do."""
    return statistics.fmean(one.record.metrics["train_bits"][-1] for one in group)


def seconds_each(group: Sequence[Found]) -> float:
    """Of an iteration."""
    return statistics.fmean(sum(one.record.seconds["training_cpu"]) / iterations(one) for one in group)


def iterations(one: Found) -> int:
    return len(one.record.metrics["validation_bits"]) * one.record.config["batches"]


def show(found: list[Found]) -> Shown:
    tables, pictures, claims, groups = [], [], [], {}
    for preset, title in DATA.items():
        here = [one for one in found if one.record.preset == preset]
        if not here:
            continue
        by = groups[preset] = by_method(here)
        tables.append(_costs(preset, title, by))
        claims += _claims(title, by)
        draw = partial(_curves, by)
        caption = "Noisy bits per dimension of validation images, Dopri5 at 1e-5; each line a seed. Dashed: a normal "
        caption += "distribution with independent dimensions, fitted to the logits."
        pictures.append(Picture(f"6-{preset}", f"Bits per dimension: {title}", caption, draw, commands(here)))
        longest = [one for one in found if one.record.preset == LONG.format(preset)] or by.get("mali", [])
        if longest:
            one = longest[0]
            caption = f"Left, test images; right, samples of the flow after {iterations(one)} iterations with MALI "
            caption += f"({bits([one])[0]:.2f} bits)."
            name, draw = f"6-{preset}-samples", partial(_grid, one)
            pictures.append(Picture(name, f"Real and generated: {title}", caption, draw, commands([one])))
    return [_paper(groups, commands(found)), *tables], pictures, claims


def _paper(groups: dict[str, Groups], lines: list[str]) -> Table:
    def here(preset: str, method: str) -> Cell | str:
        group = groups.get(preset, {}).get(method)
        return Cell(spread(bits(group), 2), group[0].path) if group else "-"

    rows: list[list[Cell | str]] = [
        [name, "-", paper[0], "-", paper[1], "-", paper[2], "-"] for name, paper in DISCRETE.items()
    ]
    for method, name in NAMES.items():
        if any(method in by for by in groups.values()):
            paper = PAPER.get(method, ("-", "-", "-"))
            ours = [here(preset, method) for preset in DATA]
            rows.append([name, ours[0], paper[0], ours[1], paper[1], ours[2], paper[2], "not run"])
    columns = (
        "flow", DATA["cpu"], "MNIST, paper", DATA["cpu-mnist"], "CIFAR-10, paper", DATA["cpu-cifar10"],
        "ImageNet 64 x 64, paper", "here",
    )  # fmt: skip
    notes = (
        "Bits per dimension. Ours are those of pixels with noise, which bound the bits of a lossless code from above; "
        "the paper's are, by its scripts, of the middle of each pixel, which bound nothing. Other sizes, other data: "
        f"not to be compared across columns. ImageNet was not run here: {NOT_RUN}"
    )
    return Table("6", "Table 6: bits per dimension", columns, rows, notes, lines)


def _costs(preset: str, title: str, by: Groups) -> Table:
    rows = []
    for method, group in by.items():
        counts = [_mean_metric(group, name) for name in ("evaluations_forward", "evaluations_backward", "refreshes")]
        peak = max(one.record.results["peak_bytes"] for one in group)
        texts = [
            _how(group[0]), spread(bits(group), 2), spread(bits(group, "test_bits_midpoint"), 2),
            f"{iterations(group[0])}", f"{seconds_each(group):.2f}", f"{counts[0]:.0f} + {counts[1]:.0f}",
            f"{counts[2]:.1f}", f"{peak / 1e6:.0f}",
        ]  # fmt: skip
        rows.append([NAMES[method], str(len(group)), *(Cell(text, group[0].path) for text in texts)])
    columns = (
        "method", "seeds", "solved with", "bits per dimension, noisy", "at the middle of pixels", "iterations",
        "s per iteration", "evaluations of f", "refreshes", "peak MB",
    )  # fmt: skip
    first = next(iter(by.values()))[0].record
    notes = f"{first.results['parameters']:,} parameters, {first.results['n_train']:,} images, alpha = "
    notes += f"{first.config['alpha']:g}. A normal distribution with independent dimensions, fitted in the space of "
    notes += f"logits, has {first.results['gaussian_bits']:.2f}. Only the noisy bits are a bound."
    lines = commands([one for group in by.values() for one in group])
    return Table(f"{preset.replace('cpu', '6')}-costs", f"Flows of {title}", columns, rows, notes, lines)


def _mean_metric(group: Sequence[Found], name: str) -> float:
    return statistics.fmean(statistics.fmean(one.record.metrics[name]) for one in group)


def _how(one: Found) -> str:
    how = one.record.results["solved"]
    return f"{how['solver']}, {how['controller']}, weight {how['weight']:g}"


def at_epoch(one: Found, n: int) -> float:
    return one.record.metrics["validation_bits"][n - 1]


def at_time(one: Found, seconds: float) -> float:
    """On the line between the two epochs around it; before the first, from the flow as it began."""
    times = [0.0, *accumulate(one.record.seconds["training_cpu"])]
    curve = [one.record.results["untrained_validation_bits"], *one.record.metrics["validation_bits"]]
    return float(np.interp(seconds, times, curve))


LESS = 0.01  # bits that tell two apart
CLAIMED = ("vanilla", "rnode", "seminorm")  # to have more than MALI


def _claims(title: str, by: Groups) -> list[Claim]:
    where, claims = f"Section 4.4, Table 6; here {title}", []

    def claim(text: str, holds: list[bool], numbers: str, its: Sequence[Groups], where: str = where) -> None:
        paths = list(dict.fromkeys(one.path for groups in its for group in groups.values() for one in group))
        claims.append(Claim(where, text, verdict(holds), numbers, paths))

    pairs = {m: its for m in (*CLAIMED, "rnode05") if (its := together(by, "mali", m))}
    missing = [f"{NAMES[m]} was not run" for m in CLAIMED if m not in pairs]
    for kind in ("iterations", "training time") if pairs else ():
        holds, parts = [], []
        for method, its in pairs.items():
            mali, other, when = _side_by_side(its, method, kind)
            parts.append(f"{when} MALI {spread(mali, 3)}, {NAMES[method]} {spread(other, 3)} ({seeds_of(its)})")
            if method in CLAIMED:
                holds.append(all(a < b - LESS for a, b in zip(mali, other, strict=True)))
        others = ", ".join(NAMES[m] for m in CLAIMED if m in pairs)
        text = f"At equal {kind} MALI has fewer bits per dimension than {others}"
        numbers = f"Noisy, of validation images: {'; '.join(parts + missing)}. Fewer: by {LESS}, with every seed."
        if kind == "training time":
            numbers += " Seconds of the processor, for training alone."
        claim(text, holds, numbers, list(pairs.values()))
    for mine, other, why in (
        ("mali", "rnode", ""), ("mali", "rnode05", ", both with weights 0.05"), ("mali01", "rnode", ", both with 0.01"),
    ):  # fmt: skip
        if its := together(by, mine, other):
            ours, theirs = mean_bits(its[mine]), mean_bits(its[other])
            numbers = (
                f"Noisy, of test images: {NAMES[mine]} {ours:.3f}, {NAMES[other]} {theirs:.3f} ({seeds_of(its)}); in "
            )
            ours_then, theirs_then = (last_epoch(its[method]) for method in (mine, other))
            numbers += f"training, over the last epoch, {ours_then:.3f} and {theirs_then:.3f}."
            claim(f"MALI is no worse than RNODE{why} (0.02 allowed)", [ours <= theirs + 0.02], numbers, [its])
    if its := together(by, "mali", "vanilla"):
        each = {m: seconds_each(group) for m, group in its.items()}
        numbers = f"Seconds of the processor: MALI {each['mali']:.2f}, adjoint at 1e-5 {each['vanilla']:.2f}."
        text = "An iteration of MALI is faster than one of the adjoint at 1e-5"
        claim(text, [each["mali"] < each["vanilla"]], numbers, [its])
    floor = next(iter(by.values()))[0].record.results["gaussian_bits"]
    numbers = f"{', '.join(f'{NAMES[m]} {mean_bits(group):.2f}' for m, group in by.items())}; it has {floor:.2f}."
    text = "Flows beat a normal distribution fitted in the space of logits"
    claim(text, [mean_bits(group) < floor for group in by.values()], numbers, [by], "a floor: they learn")
    if its := together(by, "mali"):
        off = differences(its["mali"])
        said = ", ".join(f"{way} {x:.2g}" for way, x in off.items())
        numbers = f"Largest difference of bits from those by Dopri5 at 1e-5: {said}."
        text = "What MALI trained is the same flow under ALF with h = 0.05 (0.01 allowed)"
        claim(text, [off["ALF h 0.05"] < 0.01], numbers, [its])
        worst = max(bits(its["mali"], "round_trip"))
        numbers = f"Largest difference of a pixel (from 0 to 1) there and back, Dopri5 at 1e-5: {worst:.2g}"
        fine = [x for one in its["mali"] if (x := one.record.results.get("round_trip_fine")) is not None]
        numbers += f"; at 1e-8, as float64: {max(fine):.2g}." if fine else "."
        claim("The flow can be inverted (0.001 allowed)", [worst < 1e-3], numbers, [its], "a check")
    gaps = {m: mean_bits(group) - statistics.fmean(bits(group, "test_bits_midpoint")) for m, group in by.items()}
    if len(by) > 1:
        wide = max(map(mean_bits, by.values())) - min(map(mean_bits, by.values()))
        numbers = f"Lower by {', '.join(f'{NAMES[m]} {x:.3f}' for m, x in gaps.items())}; methods differ by {wide:.3f}."
        text = "Bits at the middle of pixels, which bound nothing, are lower than those with noise"
        claim(text, [gap > 0 for gap in gaps.values()], numbers, [by], "not in the paper, which mixes them")
    return claims


def _side_by_side(its: Groups, method: str, kind: str) -> tuple[list[float], list[float], str]:
    """MALI's bits, the other's, by seed, and when."""
    everyone = [*its["mali"], *its[method]]
    if kind == "iterations":
        n = min(len(one.record.metrics["validation_bits"]) for one in everyone)
        of, when = partial(at_epoch, n=n), f"after {n * everyone[0].record.config['batches']} iterations"
    else:
        t = min(sum(one.record.seconds["training_cpu"]) for one in everyone)
        of, when = partial(at_time, seconds=t), f"after {t:.0f} s"
    mali, other = ([of(one) for one in sorted(its[m], key=_seed)] for m in ("mali", method))
    return mali, other, when


def differences(group: Sequence[Found]) -> dict[str, float]:
    """The largest difference of bits by another solver from those by Dopri5."""
    found: dict[str, float] = {}
    for one in group:
        by = dict(one.record.results["test_bits_by_solver"])
        reference = by.pop("Dopri5 1e-5")
        for way, value in by.items():
            found[way] = max(found.get(way, 0.0), abs(value - reference))
    return found


def _seed(one: Found) -> int:
    return one.record.config["seed"]


def memory(found: list[Found]) -> Shown:
    record, path = found[0]
    results, config = record.results, record.config
    rows, tolerances = [], config["tolerances"]
    for method in config["methods"]:
        cells: list[Cell | str] = []
        for tolerance in tolerances:
            fit = results["fits"][f"{method} / {tolerance:g}"]
            steps = results["cells"][f"{method} / {tolerance:g} / {config['batches'][0]}"]["steps"]
            text = f"{fit['bytes_per_image'] / 1e6:.0f} MB, {steps} steps: {fit['largest_batch']} images"
            cells.append(Cell(text, path))
        rows.append([NAMES[method], *cells])
    notes = "Peak bytes of live tensors for each image, steps of all flows, and the largest batch that 8 GB hold; the "
    notes += "flow of CIFAR-10 at the published size, with random weights."
    table = Table(
        "6-memory", "Memory of the published flow", ("method", *(f"tolerance {x:g}" for x in tolerances)), rows, notes,
        [record.command],
    )  # fmt: skip
    by = {m: [results["fits"][f"{m} / {x:g}"]["bytes_per_image"] for x in tolerances] for m in config["methods"]}
    ratios = {m: max(values) / min(values) for m, values in by.items()}
    largest = {m: [results["fits"][f"{m} / {x:g}"]["largest_batch"] for x in tolerances] for m in by}
    said = ", ".join(f"{NAMES[m]} {x:.2f}" for m, x in ratios.items())
    said += "; images on 8 GB: " + "; ".join(f"{NAMES[m]} {', '.join(map(str, n))}" for m, n in largest.items())
    claim = Claim(
        "Table 1; here flows", "MALI's memory does not depend on the tolerance",
        verdict([ratios["mali"] <= 1.05]), f"Largest over smallest bytes of an image: {said} (by tolerance).", [path],
    )  # fmt: skip
    return [table], [], [claim]


# Pictures


def _curves(by: Groups) -> Figure:
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    by_step, by_time = figure.subplots(2, 1)
    bare(by_step, "", "iterations", "bits per dimension")
    bare(by_time, "", "training, seconds of the processor", "bits per dimension")
    for method, group in by.items():
        for i, one in enumerate(group):
            curve = one.record.metrics["validation_bits"]
            steps = [(k + 1) * one.record.config["batches"] for k in range(len(curve))]
            times = list(accumulate(one.record.seconds["training_cpu"]))
            style: Any = {"color": _color(method), "label": None if i else NAMES[method], "linewidth": 1.5}
            by_step.plot(steps, curve, "o-", markersize=3, **style)
            by_time.plot(times, curve, "o-", markersize=3, **style)
    floor = next(iter(by.values()))[0].record.results["gaussian_bits"]
    log_time(by_time)
    for ax in (by_step, by_time):
        ax.axhline(floor, color="#808080", linestyle="--", linewidth=1, label="normal distribution")
    handles, labels = by_step.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _color(method: str) -> str:
    own = {"vanilla": "#4a4a4a", "rnode": "#3f7f4f", "rnode05": "#9bc48f", "seminorm": "#b07aa1", "mali01": "#8fb4dc"}
    return own.get(method) or COLORS[NAMES[method]]


def _grid(one: Found) -> Figure:
    results = one.record.results
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    for ax, key, title in zip(figure.subplots(1, 2), ("real", "samples"), ("test images", "samples"), strict=True):
        pixels = unpacked(results[key], results["shape"])
        ax.imshow(sheet(pixels, results["levels"]), vmin=0, vmax=1, interpolation="nearest")
        ax.set_title(title, fontsize=10)
        ax.set_axis_off()
    return figure


def sheet(pixels: Tensor, levels: int) -> np.ndarray:
    """Images in a square, with white lines between them: (height, width, 3), from 0 to 1."""
    n, _, h, w = pixels.shape
    side = math.ceil(math.sqrt(n))
    found = np.ones((side * (h + 1) - 1, side * (w + 1) - 1, 3))
    for k, image in enumerate(pixels.numpy() / (levels - 1)):
        row, column = (k // side) * (h + 1), (k % side) * (w + 1)
        found[row : row + h, column : column + w] = image.transpose(1, 2, 0)
    return found


def beside(*sheets: np.ndarray) -> np.ndarray:
    """Side by side, on white."""
    height, gap = max(map(len, sheets)), 4
    padded = [np.pad(x, ((0, height - len(x)), (0, gap), (0, 0)), constant_values=1.0) for x in sheets]
    return np.concatenate(padded, 1)[:, :-gap]


# The plane


def points(text: str) -> np.ndarray:
    steps = np.frombuffer(base64.b64decode(text), "<u2").reshape(-1, 2)
    return (steps / 65535 - 0.5) * 2 * LIMIT


def plane(found: list[Found]) -> Shown:
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
            Claim("a floor: it learns", f"A flow trained with MALI learns {name}", verdict(beaten), numbers, [one.path])
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
    way = Picture("plane-way", "On the way from noise", caption, partial(_way, found), commands(found), film)
    return [table], [picture, way], claims


def _square(ax: Axes) -> Axes:
    ax.set(xlim=(-LIMIT, LIMIT), ylim=(-LIMIT, LIMIT), xticks=[], yticks=[], aspect="equal")
    return ax


def _plane(found: Sequence[Found]) -> Figure:
    figure = Figure(figsize=(6.4, 6.6), dpi=200, layout="constrained")  # points are pixels: as lines they are 1 MB
    axes = figure.subplots(3, len(found), squeeze=False)
    for column, one in enumerate(found):
        results = one.record.results
        _square(axes[0][column]).set_title(one.record.config["data"], fontsize=10)
        axes[0][column].plot(*points(results["real"]).T, ".", markersize=1.5, color="#303030", rasterized=True)
        cells = unpacked(results["density"]["cells"], (N_CELLS, N_CELLS))[0].numpy()
        extent = (-LIMIT, LIMIT, -LIMIT, LIMIT)
        _square(axes[1][column]).imshow(cells, origin="lower", extent=extent, cmap="magma", interpolation="nearest")
        samples = points(results["on_the_way"]).reshape(N_TIMES, -1, 2)[-1]
        _square(axes[2][column]).plot(*samples.T, ".", markersize=1.5, color=COLORS["MALI"], rasterized=True)
    return figure


def _way(found: Sequence[Found]) -> Figure:
    figure = Figure(figsize=(6.4, 1.15 * len(found) + 0.2), dpi=200, layout="constrained")
    chosen_times = [round(k * (N_TIMES - 1) / 5) for k in range(6)]
    axes = figure.subplots(len(found), 6, squeeze=False)
    for row, one in enumerate(found):
        way = points(one.record.results["on_the_way"]).reshape(N_TIMES, -1, 2)
        for column, k in enumerate(chosen_times):
            ax = _square(axes[row][column])
            ax.plot(*way[k].T, ".", markersize=0.8, color=COLORS["MALI"], rasterized=True)
            if row == 0:
                ax.set_title(f"t = {1 - k / (N_TIMES - 1):.1f}", fontsize=8)
    return figure


def _film(found: Sequence[Found]) -> bytes:
    """A GIF: points on their way from noise, a little rest at both ends."""
    size, frames = 180, []
    ways = [points(one.record.results["on_the_way"]).reshape(N_TIMES, -1, 2) for one in found]
    ink = tuple(int(COLORS["MALI"][i : i + 2], 16) for i in (1, 3, 5))
    for k in [0] * 6 + list(range(N_TIMES)) + [N_TIMES - 1] * 12:
        frame = np.full((size, size * len(ways), 3), 255, np.uint8)
        for i, way in enumerate(ways):
            places = ((way[k] / (2 * LIMIT) + 0.5) * (size - 1)).round().astype(int).clip(1, size - 2)
            for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
                frame[size - 1 - places[:, 1] - dy, i * size + places[:, 0] + dx] = ink
        frames.append(Image.fromarray(frame).quantize(4))
    with io.BytesIO() as file:
        frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=80, loop=0)
        return file.getvalue()
