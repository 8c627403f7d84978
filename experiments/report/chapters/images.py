"""Figure 5: accuracy of ResNets and Neural ODEs by method, against epochs and against time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.images import recognition
from experiments.methods import label
from experiments.report.claims import (
    GREATER,
    SIMILAR,
    Check,
    Claim,
    Difference,
    Finding,
    check,
    difference,
    greater,
    made,
    similar,
    verdict,
)
from experiments.report.figures import Picture
from experiments.report.runs import (
    Found,
    Groups,
    Shown,
    all_seeds_of,
    by_seed,
    commands,
    each,
    mean,
    results,
    spread,
    training_seconds,
)
from experiments.report.style import COLORS, log_time_axis, plain_axes
from experiments.report.tables import Cell, Table, short

NAMES = {name: label(name) for name in recognition.NAMES}
TITLES = {"cifar10": "CIFAR-10", "digits": "digits", "mnist": "MNIST", "imagenet": "ImageNet", "folder": "ImageNet"}
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


ACCURACY = "test_accuracy_last"  # one rule for all tables: the weights after the last epoch


def percent(one: Found) -> float:
    return 100 * one.record.results[ACCURACY]


def accuracy(group: Sequence[Found]) -> float:
    """Mean test accuracy over seeds, in percent."""
    return mean(group, percent)


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
    plain_axes(box, "test accuracy after the last epoch, %: a point for each seed, and their mean")
    for i, (name, group) in enumerate(groups.items()):
        values = [percent(one) for one in group]
        box.plot([i] * len(values), values, "o", markersize=5, alpha=0.8, color=COLORS[name])
        box.plot([i - 0.25, i + 0.25], [statistics.fmean(values)] * 2, "-", linewidth=2, color=COLORS[name])
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
            spread([100 * x for x in results(group, key)]) for key in (ACCURACY, "test_accuracy_of_best_test_epoch")
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
    notes += "Seconds of the processor, on one thread, without validation. Accuracies are those after the last epoch. "
    notes += "Convolutions give other bits on other processors, and training amplifies that: equal seeds do not pair "
    notes += "runs, and differences are judged over all seeds."
    all_ = [one for group in groups.values() for one in group]
    return Table(f"5-{name}", f"Figure 5 in numbers: {TITLES[name]}", columns, rows, notes, commands(all_))


# Claims: each of the methods that it names, with all seeds; none where one of them was not run.

LIMIT = 1.0  # points of accuracy
SIMILAR_RULE, GREATER_RULE = (rule.format(limit="1 point") for rule in (SIMILAR, GREATER))
Range = tuple[float, float]
SPEED: dict[str, Range] = {"naive": (2.5, 3.5), "adjoint": (1.5, 2.5), "ACA": (2 / 3, 1.5)}  # of times over MALI's


def _apart(its: Groups, one: str, other: str) -> Difference:
    return difference(by_seed(its[one], percent), by_seed(its[other], percent))


def _accuracies(its: Groups) -> str:
    return ", ".join(f"{name} {spread([percent(one) for one in group])} %" for name, group in its.items())


def _claim(id_: str, here: str, parts: Sequence[bool | str], rule: str, numbers: str, its: Groups) -> Claim:
    paths = [one.path for group in its.values() for one in group]
    return Claim(id_, verdict(parts), f"{numbers} ({all_seeds_of(its)}.)", rule, paths, here)


def accurate_as_aca_and_more_than_the_others(groups: Groups, here: str) -> Claim | None:
    its = each(groups, "MALI", "ACA", "naive", "adjoint")
    if not its:
        return None
    alike = _apart(its, "MALI", "ACA")
    better = {(a, b): _apart(its, a, b) for a in ("MALI", "ACA") for b in ("naive", "adjoint")}
    parts = {"MALI - ACA": similar(alike, LIMIT)} | {f"{a} - {b}": greater(d, LIMIT) for (a, b), d in better.items()}
    apart = {"MALI - ACA": alike} | {f"{a} - {b}": d for (a, b), d in better.items()}
    said = "; ".join(f"{pair} {apart[pair]}: {word}" for pair, word in parts.items())
    numbers = f"{_accuracies(its)}, each at its own tolerances. {said}."
    rule = f"MALI and ACA {SIMILAR_RULE}. Each of them {GREATER_RULE}"
    return _claim("cifar-accuracy", here, list(parts.values()), rule, numbers, its)


def speed(groups: Groups, here: str) -> Claim | None:
    its = each(groups, "MALI", *SPEED)
    if not its:
        return None
    times, said = _times(its)
    aca = times["ACA"]
    parts = [low <= times[name] <= high for name, (low, high) in SPEED.items()]
    parts += [low <= times[name] / aca <= high for name, (low, high) in SPEED.items() if name != "ACA"]
    rule = "; ".join(f"{name} {low:.2g} to {high:.2g} x" for name, (low, high) in SPEED.items())
    rule = f"time of an epoch over MALI's, and over ACA's, within a range in both directions: {rule}"
    numbers = f"Time of an epoch over MALI's, each at its own tolerances: {', '.join(said)}; over ACA's: "
    numbers += ", ".join(f"{name} {short(times[name] / aca)} x" for name in SPEED if name != "ACA") + "."
    return _claim("cifar-speed", here, parts, rule, numbers, its)


def better_than_its_resnet_twin(groups: Groups, here: str) -> Claim | None:
    its = each(groups, "MALI", "ResNet")
    if not its:
        return None
    apart = _apart(its, "MALI", "ResNet")
    numbers = f"{_accuracies(its)}; MALI - ResNet {apart}."
    rule = "more accurate than the ResNet by two standard errors; inconclusive within these"
    return _claim("intro-resnet", here, [greater(apart)], rule, numbers, its)


def same_number_of_parameters(groups: Groups, here: str) -> Claim | None:
    its = each(groups, "MALI", "ResNet")
    if not its:
        return None
    counts = {name: group[0].record.results["parameters"] for name, group in its.items()}
    numbers = ", ".join(f"{name} {n:,}" for name, n in counts.items()) + " parameters."
    return _claim("same-parameters", here, [len(set(counts.values())) == 1], "equal numbers", numbers, its)


def faster_at_the_same_tolerances(groups: Groups, here: str) -> Check | None:
    its = each(groups, "MALI", "naive, 0.1", "adjoint, 0.1")
    if not its:
        return None
    times, said = _times(its)
    numbers = f"Time of an epoch over MALI's, all at 0.1 / 0.01: {', '.join(said)}. ({all_seeds_of(its)}.)"
    paths = [one.path for group in its.values() for one in group]
    text = "At the same tolerances MALI is faster than naive and adjoint"
    where = f"not in the paper, whose tolerances differ; here {here}"
    return check(where, text, [ratio > 1 for ratio in times.values()], numbers, paths)


def less_memory(groups: Groups, here: str, naive: str, tolerances: str) -> Check | None:
    its = each(groups, "MALI", "ACA", naive)
    if not its:
        return None
    peaks = {name: statistics.fmean(results(group, "peak_bytes")) / 1e6 for name, group in its.items()}
    numbers = f"Peak MB of one step: {', '.join(f'{n} {x:.1f}' for n, x in peaks.items())}; "
    numbers += f"naive with Dopri5 at {tolerances}. ({all_seeds_of(its)}.)"
    ordered = [peaks["MALI"] <= peaks["ACA"], peaks["ACA"] <= peaks[naive]]
    text = f"Memory at the same batch: MALI <= ACA <= {naive}"
    return check(f"Table 1, memory; here {here}", text, ordered, numbers, [one.path for g in its.values() for one in g])


def claims(groups: Groups, of: str) -> list[Finding]:
    return made(
        accurate_as_aca_and_more_than_the_others(groups, of),
        speed(groups, of),
        better_than_its_resnet_twin(groups, of),
        same_number_of_parameters(groups, of),
        faster_at_the_same_tolerances(groups, of),
        less_memory(groups, of, "naive", "1e-5"),
        less_memory(groups, of, "naive, 0.1", "0.1 / 0.01, as the others"),
    )


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
