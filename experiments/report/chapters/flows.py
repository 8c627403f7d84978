"""Table 6 and its samples: continuous flows of images."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from experiments.flows.images import METHODS, unpacked
from experiments.report.claims import Check, Claim, Finding, check, difference, greater, made, verdict
from experiments.report.figures import Picture
from experiments.report.runs import Found, Groups, Shown, all_seeds_of, by_seed, chosen, commands, each, spread
from experiments.report.style import COLORS, REFERENCE, log_time_axis, plain_axes
from experiments.report.tables import Cell, Table

NAMES = {name: found.method.label for name, found in METHODS.items()}
SMALL = {"cpu": "digits, 8 x 8", "cpu-mnist": "MNIST, 14 x 14", "cpu-cifar10": "CIFAR-10, 16 x 16"}
PUBLISHED = {"paper-mnist": "MNIST", "paper-cifar10": "CIFAR-10", "paper-imagenet64": "ImageNet, 64 x 64"}
DATA = SMALL | PUBLISHED
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
    """Mean time of an iteration."""
    return statistics.fmean(sum(one.record.seconds["training_cpu"]) / iterations(one) for one in group)


def iterations(one: Found) -> int:
    return len(one.record.metrics["validation_bits"]) * one.record.config["batches"]


def show(found: list[Found]) -> Shown:
    tables, pictures, all_claims, groups = [], [], [], {}
    for preset, title in DATA.items():
        here = [one for one in found if one.record.preset == preset]
        if not here:
            continue
        by = groups[preset] = by_method(here)
        tables.append(_costs(preset, title, by))
        all_claims += claims(title, by)
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
    return [_paper(groups, commands(found)), *tables], pictures, all_claims


def _paper(groups: dict[str, Groups], lines: list[str]) -> Table:
    def here(preset: str, method: str) -> Cell | str:
        group = groups.get(preset, {}).get(method)
        return Cell(spread(bits(group), 2), group[0].path) if group else "-"

    rows: list[list[Cell | str]] = []
    for name, paper in DISCRETE.items():
        rows.append([name, *(x for number in paper for x in (number, "-")), *("-" for _ in SMALL)])
    for method, name in NAMES.items():
        if any(method in by for by in groups.values()):
            paper = PAPER.get(method, ("-", "-", "-"))
            ours = [here(preset, method) for preset in PUBLISHED]
            pairs = [x for pair in zip(paper, ours, strict=True) for x in pair]
            rows.append([name, *pairs, *(here(preset, method) for preset in SMALL)])
    columns = ["flow", *(x for title in PUBLISHED.values() for x in (f"{title}, paper", "here")), *SMALL.values()]
    missing = [title for preset, title in PUBLISHED.items() if preset not in groups]
    notes = (
        "Bits per dimension. Ours are those of pixels with noise, which bound the bits of a lossless code from above; "
        "the paper's are, by its scripts, of the middle of each pixel, which bound nothing. The small flows to the "
        "right have other sizes and other data: not to be compared with the columns to the left."
    )
    if missing:
        line = "python -m experiments run flows --preset paper-imagenet64 --method mali --seed 0 --data-dir IMAGENET"
        notes += f" Not run here at the published size: {', '.join(missing)}; for example, {line}"
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
    """Bits at a time, interpolated between epochs; before the first, from the untrained flow."""
    times = [0.0, *accumulate(one.record.seconds["training_cpu"])]
    curve = [one.record.results["untrained_validation_bits"], *one.record.metrics["validation_bits"]]
    return float(np.interp(seconds, times, curve))


LESS = 0.01  # bits that tell two apart
CLAIMED = ("vanilla", "rnode", "seminorm")  # to have more than MALI


# Claims: each of the methods that it names, with all seeds; none where one of them was not run. Convolutions do not
# repeat on another processor: seeds are not pairs.


def _paths(its: Sequence[Groups]) -> list[str]:
    return list(dict.fromkeys(one.path for groups in its for group in groups.values() for one in group))


def _check(where: str, text: str, holds: Sequence[bool], numbers: str, its: Sequence[Groups]) -> Check:
    return check(where, text, holds, numbers, _paths(its))


def test_bits(one: Found) -> float:
    return one.record.results["test_bits"]


def lowest_bits(by: Groups, here: str) -> Claim | None:
    """Judge the last weights, with noisy pixels."""
    its = {m: by[m] for m in ("mali", *CLAIMED) if m in by}
    if "mali" not in its or len(its) < 2:
        return None
    ours = by_seed(its["mali"], test_bits)
    apart = {m: difference(by_seed(its[m], test_bits), ours) for m in CLAIMED if m in its}
    parts: list[bool | str] = [greater(x, LESS) for x in apart.values()]
    numbers = (
        f"Noisy, of test images: {', '.join(f'{NAMES[m]} {spread(bits(group), 3)}' for m, group in its.items())}; "
    )
    numbers += f"above MALI: {'; '.join(f'{NAMES[m]} {x}' for m, x in apart.items())}."
    numbers += "".join(f" {NAMES[m]} was not run." for m in CLAIMED if m not in its)
    rule = (
        f"MALI has fewer bits than each, by {LESS} and by two standard errors, after as many iterations; inconclusive "
    )
    rule += "where that limit is below these"
    return Claim("flows", verdict(parts), f"{numbers} ({all_seeds_of(its, NAMES)}.)", rule, _paths([its]), here)


def fewer_bits_at_equal_time(by: Groups, where: str) -> Check | None:
    """Check at equal training time, which the paper does not claim."""
    pairs = {m: its for m in (*CLAIMED, "rnode05") if (its := each(by, "mali", m))}
    if not pairs:
        return None
    holds, parts = [], []
    for method, its in pairs.items():
        mali, other, when = _side_by_side(its, method, "training time")
        parts.append(f"{when} MALI {spread(mali, 3)}, {NAMES[method]} {spread(other, 3)} ({all_seeds_of(its, NAMES)})")
        if method in CLAIMED:
            holds.append(statistics.fmean(mali) < statistics.fmean(other) - LESS)
    others = ", ".join(NAMES[m] for m in CLAIMED if m in pairs)
    text = f"At equal training time MALI has fewer bits per dimension than {others}"
    numbers = (
        f"Noisy, of validation images: {'; '.join(parts)}. Fewer: by {LESS}, in the mean. Seconds of the processor, "
    )
    numbers += "for training alone."
    return _check(where, text, holds, numbers, list(pairs.values()))


def no_worse_than_rnode(by: Groups, where: str, mine: str, other: str, why: str = "") -> Check | None:
    its = each(by, mine, other)
    if not its:
        return None
    ours, theirs = mean_bits(its[mine]), mean_bits(its[other])
    numbers = f"Noisy, of test images: {NAMES[mine]} {ours:.3f}, {NAMES[other]} {theirs:.3f} "
    numbers += f"({all_seeds_of(its, NAMES)}); in "
    ours_then, theirs_then = (last_epoch(its[method]) for method in (mine, other))
    numbers += f"training, over the last epoch, {ours_then:.3f} and {theirs_then:.3f}."
    return _check(where, f"MALI is no worse than RNODE{why} (0.02 allowed)", [ours <= theirs + 0.02], numbers, [its])


def faster_than_the_adjoint(by: Groups, where: str) -> Check | None:
    its = each(by, "mali", "vanilla")
    if not its:
        return None
    seconds = {m: seconds_each(group) for m, group in its.items()}
    numbers = f"Seconds of the processor: MALI {seconds['mali']:.2f}, adjoint at 1e-5 {seconds['vanilla']:.2f}."
    text = "An iteration of MALI is faster than one of the adjoint at 1e-5"
    return _check(where, text, [seconds["mali"] < seconds["vanilla"]], numbers, [its])


def better_than_a_normal_distribution(by: Groups) -> Check:
    floor = next(iter(by.values()))[0].record.results["gaussian_bits"]
    numbers = f"{', '.join(f'{NAMES[m]} {mean_bits(group):.2f}' for m, group in by.items())}; it has {floor:.2f}."
    text = "Flows beat a normal distribution fitted in the space of logits"
    return _check("a floor: they learn", text, [mean_bits(group) < floor for group in by.values()], numbers, [by])


def same_flow_under_other_solvers(by: Groups, where: str) -> Check | None:
    its = each(by, "mali")
    if not its:
        return None
    off = differences(its["mali"])
    said = ", ".join(f"{solver} {x:.2g}" for solver, x in off.items())
    numbers = f"Largest difference of bits from those by Dopri5 at 1e-5: {said}."
    text = "What MALI trained is the same flow under ALF with h = 0.05 (0.01 allowed)"
    return _check(where, text, [off["ALF h 0.05"] < 0.01], numbers, [its])


def flow_can_be_inverted(by: Groups) -> Check | None:
    its = each(by, "mali")
    if not its:
        return None
    worst = max(bits(its["mali"], "round_trip"))
    numbers = f"Largest difference of a pixel (from 0 to 1) there and back, Dopri5 at 1e-5: {worst:.2g}"
    fine = [x for one in its["mali"] if (x := one.record.results.get("round_trip_fine")) is not None]
    numbers += f"; at 1e-8, as float64: {max(fine):.2g}." if fine else "."
    return _check("a check", "The flow can be inverted (0.001 allowed)", [worst < 1e-3], numbers, [its])


def bits_at_the_middle_are_lower(by: Groups) -> Check | None:
    if len(by) < 2:
        return None
    gaps = {m: mean_bits(group) - statistics.fmean(bits(group, "test_bits_midpoint")) for m, group in by.items()}
    wide = max(map(mean_bits, by.values())) - min(map(mean_bits, by.values()))
    numbers = f"Lower by {', '.join(f'{NAMES[m]} {x:.3f}' for m, x in gaps.items())}; methods differ by {wide:.3f}."
    text = "Bits at the middle of pixels, which bound nothing, are lower than those with noise"
    return _check("not in the paper, which mixes them", text, [gap > 0 for gap in gaps.values()], numbers, [by])


def claims(title: str, by: Groups) -> list[Finding]:
    where = f"not in the paper; Table 6, here {title}"
    return made(
        lowest_bits(by, title),
        fewer_bits_at_equal_time(by, where),
        no_worse_than_rnode(by, where, "mali", "rnode"),
        no_worse_than_rnode(by, where, "mali", "rnode05", ", both with weights 0.05"),
        no_worse_than_rnode(by, where, "mali01", "rnode", ", both with 0.01"),
        faster_than_the_adjoint(by, where),
        better_than_a_normal_distribution(by),
        same_flow_under_other_solvers(by, where),
        flow_can_be_inverted(by),
        bits_at_the_middle_are_lower(by),
    )


def _side_by_side(its: Groups, method: str, kind: str) -> tuple[list[float], list[float], str]:
    """Return MALI's bits and the other method's, by seed, and the point at which they are compared, in words."""
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
        for solver, value in by.items():
            found[solver] = max(found.get(solver, 0.0), abs(value - reference))
    return found


def _seed(one: Found) -> int:
    return one.record.config["seed"]


# Pictures


def _curves(by: Groups) -> Figure:
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    by_step, by_time = figure.subplots(2, 1)
    plain_axes(by_step, "", "iterations", "bits per dimension")
    plain_axes(by_time, "", "training, seconds of the processor", "bits per dimension")
    for method, group in by.items():
        for i, one in enumerate(group):
            curve = one.record.metrics["validation_bits"]
            steps = [(k + 1) * one.record.config["batches"] for k in range(len(curve))]
            times = list(accumulate(one.record.seconds["training_cpu"]))
            style: Any = {"color": COLORS[NAMES[method]], "label": None if i else NAMES[method], "linewidth": 1.5}
            by_step.plot(steps, curve, "o-", markersize=3, **style)
            by_time.plot(times, curve, "o-", markersize=3, **style)
    floor = next(iter(by.values()))[0].record.results["gaussian_bits"]
    log_time_axis(by_time)
    for ax in (by_step, by_time):
        ax.axhline(floor, color=REFERENCE, linestyle="--", linewidth=1, label="normal distribution")
    handles, labels = by_step.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


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
    """Put sheets side by side, on white."""
    height, gap = max(map(len, sheets)), 4
    padded = [np.pad(x, ((0, height - len(x)), (0, gap), (0, 0)), constant_values=1.0) for x in sheets]
    return np.concatenate(padded, 1)[:, :-gap]
