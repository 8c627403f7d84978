"""Figure 5: accuracy of ResNets and Neural ODEs by method, against epochs and against time."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.images import recognition
from experiments.methods import label
from experiments.report.claims import Claim, made, verdict
from experiments.report.figures import Picture
from experiments.report.runs import (
    Found,
    Groups,
    Shown,
    commands,
    mean,
    results,
    seeds_of,
    spread,
    together,
    training_seconds,
)
from experiments.report.style import COLORS, log_time_axis, plain_axes
from experiments.report.tables import Cell, Table, short

NAMES = {name: label(name) for name in recognition.NAMES}
TITLES = {"cifar10": "CIFAR-10", "digits": "digits", "mnist": "MNIST"}
ORDER = (
    "ResNet",
    "naive",
    "naive, 0.1",
    "adjoint",
    "adjoint, 0.1",
    "seminorm",
    "ACA",
    "MALI",
    "MALI alf4",
    "MALI exact",
)


def label_of(one: Found) -> str:
    """Label of the method, with the tolerance where it is not the method's own."""
    config = one.record.config
    return NAMES[config["method"]] + (f", {config['rtol']:g}" if config["rtol"] is not None else "")


def grouped(found: Sequence[Found]) -> Groups:
    groups: Groups = {}
    for one in sorted(found, key=lambda one: ORDER.index(label_of(one))):
        groups.setdefault(label_of(one), []).append(one)
    return groups


def accuracy(group: Sequence[Found]) -> float:
    """Mean test accuracy over seeds, in percent."""
    return 100 * statistics.fmean(results(group, "test_accuracy"))


def standard_error(*groups: Sequence[Found]) -> float:
    """Standard error of the difference of two means over seeds; NaN: not known from one."""
    if any(len(group) < 2 for group in groups):
        return math.nan
    return math.sqrt(
        sum(statistics.variance(100 * x for x in results(group, "test_accuracy")) / len(group) for group in groups)
    )


def evaluations(one: Found) -> float:
    """Mean evaluations of a training step, forward and backward; naive's backward pass counts as its forward one."""
    metrics = one.record.metrics
    forward, backward = (statistics.fmean(metrics[f"evaluations_{way}"]) for way in ("forward", "backward"))
    return forward + (backward if backward else forward)


# Pictures


def _draw(groups: Groups) -> Figure:
    figure = Figure(figsize=(6.4, 8.4), layout="constrained")
    box, by_epoch, by_time = figure.subplots(3, 1, height_ratios=(1, 1.2, 1.2))
    names = list(groups)
    plain_axes(box, "test accuracy, %: each point a seed")
    for i, (name, group) in enumerate(groups.items()):
        values = [100 * value for value in results(group, "test_accuracy")]
        drawn = box.boxplot([values], positions=[i], widths=0.5, patch_artist=True, showfliers=False)
        drawn["boxes"][0].set(facecolor=COLORS[name], alpha=0.35, edgecolor=COLORS[name])
        for part in (*drawn["medians"], *drawn["whiskers"], *drawn["caps"]):
            part.set_color(COLORS[name])
        box.plot([i] * len(values), values, "o", markersize=4, color=COLORS[name])
    box.set_xticks(range(len(names)), names, rotation=25 if len(names) > 6 else 0)
    for ax, what in ((by_epoch, "epoch"), (by_time, "training, seconds of the processor")):
        plain_axes(ax, "", what, "test accuracy, %")
        for name, group in groups.items():
            _curve(ax, group, what == "epoch", COLORS[name], name)
    log_time_axis(by_time)
    handles, labels = by_epoch.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def _curve(ax: Axes, group: Sequence[Found], by_epoch: bool, color: str, name: str) -> None:
    """The mean over seeds, with a band from the lowest to the highest."""
    curves = [[100 * x for x in one.record.metrics["watched_accuracy"]] for one in group]
    epochs = range(1, 1 + len(curves[0]))
    times = [list(accumulate(one.record.seconds["training_cpu"])) for one in group]
    x = list(epochs) if by_epoch else [statistics.fmean(column) for column in zip(*times, strict=True)]
    columns = list(zip(*curves, strict=True))
    ax.plot(
        x, [statistics.fmean(column) for column in columns], "o-", markersize=3, linewidth=1.5, color=color, label=name
    )
    ax.fill_between(x, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.15, linewidth=0)


# The table


def _table(name: str, groups: Groups) -> Table:
    rows = []
    for method, group in groups.items():
        record, first = group[0].path, group[0].record
        test, published = (
            spread([100 * x for x in results(group, key)])
            for key in ("test_accuracy", "test_accuracy_of_best_test_epoch")
        )
        steps = mean(group, lambda one: statistics.fmean(one.record.metrics["evaluations_forward"]))
        back = mean(group, lambda one: statistics.fmean(one.record.metrics["evaluations_backward"]))
        texts = [
            test, published, f"{mean(group, training_seconds):.0f}", f"{steps:.0f} + {back:.0f}",
            f"{statistics.fmean(results(group, 'peak_bytes')) / 1e6:.0f}",
        ]  # fmt: skip
        rows.append([method, str(len(group)), *(Cell(text, record) for text in texts)])
        n, parameters = first.config["epochs"], first.results["parameters"]
    columns = (
        "method", "seeds", "test accuracy, %", "of the best test epoch (as published), %", "s per epoch",
        "evaluations of f per step, forward + backward", "peak MB",
    )  # fmt: skip
    notes = (
        f"{parameters:,} parameters, {n} epochs. Naive's backward pass evaluates nothing: it goes through the graph. "
    )
    notes += "Seconds of the processor, on one thread, without validation."
    all_ = [one for group in groups.values() for one in group]
    return Table(f"5-{name}", f"Figure 5 in numbers: {TITLES[name]}", columns, rows, notes, commands(all_))


# Claims: each of the methods that it names, with the same seeds; none where one of them was not run.


def _claim(where: str, text: str, holds: Sequence[bool], numbers: str, its: Groups) -> Claim:
    return Claim(
        where, text, verdict(holds), f"{numbers} ({seeds_of(its)}.)", [group[0].path for group in its.values()]
    )


def as_accurate_as_aca(groups: Groups, where: str) -> Claim | None:
    its = together(groups, "MALI", "ACA")
    if not its:
        return None
    mali, aca = accuracy(its["MALI"]), accuracy(its["ACA"])
    numbers = f"MALI {mali:.1f} %, ACA {aca:.1f} %: a difference of {abs(mali - aca):.2f} points; 1 allowed, "
    numbers += f"its standard error is {short(standard_error(its['MALI'], its['ACA']))}."
    same = abs(mali - aca) <= 1 + 1e-4  # accuracies are float32
    return _claim(where, "MALI is as accurate as ACA", [same], numbers, its)


def more_accurate_than_naive_and_adjoint(groups: Groups, where: str) -> Claim | None:
    its = together(groups, "MALI", "naive", "adjoint")
    if not its:
        return None
    found = {name: accuracy(group) for name, group in its.items()}
    error = {name: standard_error(its["MALI"], its[name]) for name in ("naive", "adjoint")}
    numbers = ", ".join(f"{name} {x:.1f} %" for name, x in found.items())
    numbers += f", each at its own tolerances; standard errors of the differences {short(error['naive'])} and "
    numbers += f"{short(error['adjoint'])}. More accurate: by 1 point, and by two of these."
    better = [found["MALI"] - found[name] > max(1.0, 2 * e) for name, e in error.items() if not math.isnan(e)]
    return _claim(where, "MALI is more accurate than naive and adjoint", better, numbers, its)


def faster_than_naive_and_adjoint(groups: Groups, where: str) -> Claim | None:
    its = together(groups, "MALI", *SPEED)
    if not its:
        return None
    times, parts = _times(its)
    numbers = f"Time of an epoch over MALI's, each at its own tolerances: {', '.join(parts)}."
    text = "MALI is almost two times as fast as the adjoint, three times as fast as naive, and similar to ACA"
    return _claim(where, text, [fits(times[name]) for name, fits in SPEED.items()], numbers, its)


def faster_at_the_same_tolerances(groups: Groups, where: str) -> Claim | None:
    its = together(groups, "MALI", "naive, 0.1", "adjoint, 0.1")
    if not its:
        return None
    times, parts = _times(its)
    numbers = f"Time of an epoch over MALI's, all at 0.1 / 0.01: {', '.join(parts)}."
    text = "At the same tolerances MALI is faster than naive and adjoint"
    return _claim(where, text, [ratio > 1 for ratio in times.values()], numbers, its)


def less_memory(groups: Groups, where: str, naive: str, tolerances: str) -> Claim | None:
    its = together(groups, "MALI", "ACA", naive)
    if not its:
        return None
    peaks = {name: statistics.fmean(results(group, "peak_bytes")) / 1e6 for name, group in its.items()}
    numbers = f"Peak MB of one step: {', '.join(f'{n} {x:.1f}' for n, x in peaks.items())}; "
    numbers += f"naive with Dopri5 at {tolerances}."
    ordered = [peaks["MALI"] <= peaks["ACA"], peaks["ACA"] <= peaks[naive]]
    return _claim(where, f"Memory at the same batch: MALI <= ACA <= {naive}", ordered, numbers, its)


def as_accurate_as_its_resnet_twin(groups: Groups, where: str) -> Claim | None:
    its = together(groups, "MALI", "ResNet")
    if not its:
        return None
    mali, resnet = accuracy(its["MALI"]), accuracy(its["ResNet"])
    numbers = f"MALI {mali:.1f} %, its ResNet twin {resnet:.1f} %: same f, same parameters; 1 point allowed."
    text = "A Neural ODE trained with MALI is at least as accurate as its ResNet twin"
    return _claim(where, text, [mali >= resnet - 1], numbers, its)


def claims(groups: Groups, of: str) -> list[Claim]:
    where = f"Section 4.2, Figure 5; here {of}"
    return made(
        as_accurate_as_aca(groups, where),
        more_accurate_than_naive_and_adjoint(groups, where),
        faster_than_naive_and_adjoint(groups, where),
        faster_at_the_same_tolerances(groups, f"not in the paper, whose tolerances differ; here {of}"),
        less_memory(groups, where, "naive", "1e-5"),
        less_memory(groups, where, "naive, 0.1", "0.1 / 0.01, as the others"),
        as_accurate_as_its_resnet_twin(groups, where),
    )


SPEED: dict[str, Callable[[float], bool]] = {  # what a time over MALI's must be for the paper's words to fit
    "naive": lambda ratio: ratio >= 2.5,  # three times
    "adjoint": lambda ratio: ratio >= 1.5,  # almost two times
    "ACA": lambda ratio: 1 / 1.5 <= ratio <= 1.5,  # similar
}


def _times(groups: Groups) -> tuple[dict[str, float], list[str]]:
    """Times of the others over MALI's, and the same in words."""
    mali, times, parts = groups["MALI"], {}, []
    for name, group in groups.items():
        if name != "MALI":
            times[name] = mean(group, training_seconds) / mean(mali, training_seconds)
            asked = mean(group, evaluations) / mean(mali, evaluations)
            parts.append(f"{name} {short(times[name])} x ({short(asked)} x the evaluations)")
    return times, parts


def show(found: list[Found]) -> Shown:
    tables, pictures, all_claims = [], [], []
    for name, title in TITLES.items():
        here = [one for one in found if one.record.experiment == name]
        if not here:
            continue
        groups = grouped(here)
        tables.append(_table(name, groups))
        all_claims += claims(groups, title)
        if len(groups) > 2:
            caption = "Own tolerances: 0.1 / 0.01 for ACA and MALI, 1e-5 for naive, adjoint, seminorm (Dopri5); "
            caption += "those with 0.1 have MALI's. Bands: lowest to highest seed. One thread, two runs at a time."
            draw = partial(_draw, groups)
            pictures.append(Picture(f"5-{name}", f"Figure 5: {title}", caption, draw, commands(here)))
    return tables, pictures, all_claims
