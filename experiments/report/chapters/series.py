"""Tables 4, 5 and 7: latent ODEs, Neural CDEs, damping."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from experiments.methods import label
from experiments.report.claims import Claim, made, verdict
from experiments.report.figures import Picture
from experiments.report.runs import Found, Groups, Shown, chosen, commands, seeds_of, spread, together
from experiments.report.style import COLORS, OBSERVED, REFERENCE, TRUTH, plain_axes
from experiments.report.tables import Cell, Table, short

NAMES = {
    name: label(name)
    for name in ("rnn", "gru_d", "adjoint", "seminorm", "naive", "aca", "mali", "alf4", "exact", "free")
}

# The paper's: test MSE x 0.01 by fraction observed; accuracy on Speech Commands; both by damping
PAPER_4 = {
    "rnn": (2.45, 1.71, 0.79), "gru_d": (1.97, 1.42, 0.75), "adjoint": (0.47, 0.44, 0.40), "naive": (0.36, 0.30, 0.29),
    "aca": (0.31, 0.27, 0.26), "mali": (0.35, 0.27, 0.26),
}  # fmt: skip
PAPER_5 = {
    "adjoint": "92.8 ± 0.4",
    "seminorm": "92.9 ± 0.4",
    "naive": "93.2 ± 0.2",
    "aca": "93.2 ± 0.2",
    "mali": "93.7 ± 0.3",
}
PAPER_7 = {
    1.0: ("93.7 ± 0.3", 0.35, 0.27),
    0.95: ("93.7 ± 0.1", 0.36, 0.25),
    0.9: ("93.5 ± 0.2", 0.33, 0.26),
    0.85: ("93.7 ± 0.3", 0.33, 0.27),
}
FRACTIONS = (0.1, 0.2, 0.5)
ByFraction = dict[float, Groups]


def by_method(found: Sequence[Found]) -> Groups:
    return {method: group for method in NAMES if (group := chosen(found, method=method))}


def errors(found: Sequence[Found], key: str = "test_mse") -> list[float]:
    """Mean squared errors x 0.01, as in the paper."""
    return [100 * one.record.results[key] for one in found]


# Table 4


def latent(found: list[Found]) -> Shown:
    plain = chosen(found, eta=1.0, unsafe_damping=False)
    if not plain:
        return [], [], []
    rows, kept = [], []
    for method, name in NAMES.items():
        cells: list[Cell | str] = []
        for i, fraction in enumerate(FRACTIONS):
            here = chosen(plain, method=method, fraction=fraction)
            paper = f" ({PAPER_4[method][i]:.2f})" if method in PAPER_4 else ""
            cells.append(Cell(spread(errors(here), 2) + paper, here[0].path) if here else "-")
            kept += here
        counts = chosen(plain, method=method, fraction=0.1)
        if any(isinstance(cell, Cell) for cell in cells):
            rows.append([name, *cells, *_costs(counts)])
    columns = (
        "method",
        *(f"{fraction:.0%} observed" for fraction in FRACTIONS),
        "s per epoch",
        "evaluations of f",
        "peak MB",
    )
    config = plain[0].record.config
    mean = 100 * plain[0].record.results["mean_predictor_mse"]
    notes = (
        f"Test MSE x 0.01, {config['n']:,} trajectories, {config['epochs']} epochs; in parentheses the paper's, with "
    )
    notes += f"10,000 and 300. The mean of each channel as prediction has {mean:.2f}."
    if chosen(plain, method="free"):
        notes += f" {NAMES['free']}: run two days after the others and with newer code, so that its seconds do not "
        notes += "compare with theirs; `python -m benchmarks.latent` times it beside them."
    table = Table("4", "Table 4: latent ODE on MuJoCo's Hopper", columns, rows, notes, commands(kept))
    runs = [one for one in chosen(plain, method="mali", fraction=0.1) if one.record.results["shown"]]
    pictures = []
    if runs:
        caption = (
            "Test series of Hopper (grey), the points that were seen (dots), and three samples of what the latent ODE "
        )
        caption += "makes of them; trained with MALI, 10 % observed."
        draw = partial(_draw, runs[0])
        pictures.append(Picture("latent", "Gaps filled by a latent ODE", caption, draw, commands(runs[:1])))
    return [table], pictures, latent_claims(plain, mean)


CHANNELS = ("position x", "position z", "angle", "speed of the angle")


def _draw(one: Found) -> Figure:
    series = one.record.results["shown"]
    figure = Figure(figsize=(6.4, 1.7 * len(CHANNELS) + 0.3), layout="constrained")
    axes = figure.subplots(len(CHANNELS), len(series), squeeze=False, sharex=True, sharey="row")
    for column, found in enumerate(series):
        for row, name in enumerate(CHANNELS):
            ax = plain_axes(
                axes[row][column], f"series {column + 1}" if row == 0 else "", "", name if column == 0 else ""
            )
            x, seen = found["x"][row], found["observed"]
            ax.plot(x, color=TRUTH, linewidth=3)
            for sample in found["rebuilt"]:
                ax.plot(sample[row], color=COLORS["MALI"], linewidth=1, alpha=0.7)
            ax.plot(seen, [x[i] for i in seen], "o", color=OBSERVED, markersize=3.5)
        axes[-1][column].set_xlabel("time", fontsize=9)
    return figure


def _costs(found: Sequence[Found]) -> list[Cell | str]:
    if not found:
        return ["-", "-", "-"]
    record, path = found[0].record, found[0].path
    seconds = statistics.fmean(record.seconds["training_cpu"])
    metrics = record.metrics
    counts = (
        f"{metrics['evaluations_forward'][-1]:.0f} + {metrics['evaluations_backward'][-1]:.0f}"
        if "evaluations_forward" in metrics
        else "-"
    )
    return [Cell(f"{seconds:.1f}", path), Cell(counts, path), Cell(f"{record.results['peak_bytes'] / 1e6:.1f}", path)]


# Claims: each of the methods that it names, with the same seeds; none where one of them was not run.


def _claim(where: str, text: str, holds: Sequence[bool], numbers: str, groups: Sequence[Groups]) -> Claim:
    paths = [group[0].path for its in groups for group in its.values()]
    return Claim(where, text, verdict(holds), f"{numbers} ({seeds_of(groups[0])}.)", paths)


def error_falls_with_observations(at: ByFraction, where: str) -> Claim | None:
    by_fraction = {m: {f"{f}": groups[m] for f, groups in at.items() if m in groups} for m in NAMES}
    falling = {m: its for m, groups in by_fraction.items() if (its := together(groups, *map(str, FRACTIONS)))}
    if not falling:
        return None
    means = {m: [statistics.fmean(errors(group)) for group in its.values()] for m, its in falling.items()}
    numbers = "; ".join(f"{NAMES[m]} {', '.join(short(x, 3) for x in values)}" for m, values in means.items())
    holds = [values[0] > values[1] > values[2] for values in means.values()]
    text = "The error falls as more points are observed (10, 20, 50 %)"
    return _claim(where, text, holds, f"x 0.01: {numbers}.", list(falling.values()))


def better_than_recurrent_networks(at: ByFraction, where: str) -> Claim | None:
    its = together(at[0.1], "mali", "rnn", "gru_d")
    if not its:
        return None
    mean_error = {m: statistics.fmean(errors(group)) for m, group in its.items()}
    later = {m: statistics.fmean(errors(group, "test_mse_later")) for m, group in its.items()}
    said = [", ".join(f"{NAMES[m]} {short(x, 3)}" for m, x in of.items()) for of in (mean_error, later)]
    numbers = f"At 10 %: {said[0]}; without the first point, which those are given, or do not know: {said[1]}."
    holds = [of["mali"] < of[m] for of in (mean_error, later) for m in ("rnn", "gru_d")]
    return _claim(where, "A latent ODE has a smaller error than recurrent networks", holds, numbers, [its])


def error_is_that_of_aca_and_naive(at: ByFraction, where: str) -> Claim | None:
    shared = {f: its for f in FRACTIONS if (its := together(at[f], "mali", *ALLOWED))}
    if not shared:
        return None
    holds, parts = [], []
    for method, (low, high) in ALLOWED.items():
        ratios = [statistics.fmean(errors(x["mali"])) / statistics.fmean(errors(x[method])) for x in shared.values()]
        holds += [low <= ratio <= high for ratio in ratios]
        parts.append(f"{NAMES[method]}'s {', '.join(f'{x:.2f}' for x in ratios)}")
    text = "MALI's error is that of ACA and naive (15 % allowed) and no larger than the adjoint's (5 % allowed)"
    fractions = ", ".join(f"{f:.0%}" for f in shared)
    numbers = f"At {fractions}, MALI's over {'; over '.join(parts)}."
    return _claim(where, text, holds, numbers, list(shared.values()))


def halves_the_error_of_the_mean(at: ByFraction, mean: float) -> Claim | None:
    its = together(at[0.1], "mali")
    if not its:
        return None
    error = statistics.fmean(errors(its["mali"]))
    numbers = f"MALI {short(error, 3)} at 10 %, the mean as prediction {short(mean, 3)}."
    return _claim("a floor: it learns", "MALI halves the error of the mean", [error <= mean / 2], numbers, [its])


def latent_claims(found: Sequence[Found], mean: float) -> list[Claim]:
    at, where = {f: by_method(chosen(found, fraction=f)) for f in FRACTIONS}, "Section 4.3, Table 4"
    return made(
        error_falls_with_observations(at, where),
        better_than_recurrent_networks(at, where),
        error_is_that_of_aca_and_naive(at, where),
        halves_the_error_of_the_mean(at, mean),
        memory_does_not_grow(at[0.1], where, "of the generative solve"),
    )


ALLOWED = {"aca": (1 / 1.15, 1.15), "naive": (1 / 1.15, 1.15), "adjoint": (0.0, 1.05)}  # MALI's error over theirs


def memory_does_not_grow(groups: Groups, where: str, what: str) -> Claim | None:
    """Claim on memory. Flat: within 5 %. Linear: what halving h adds doubles each time, within 20 %."""
    its = together(groups, "mali", "aca", "naive")
    if not its:
        return None
    peaks = {m: list(group[0].record.results["peak_bytes_by_h"].values()) for m, group in its.items()}
    parts = [f"{NAMES[m]} {', '.join(f'{x / 1e6:.3g}' for x in values)} MB" for m, values in peaks.items()]
    holds = [max(peaks["mali"]) <= 1.05 * min(peaks["mali"])]
    for method in ("aca", "naive"):
        more = [late - early for early, late in itertools.pairwise(peaks[method])]
        holds.append(all(early > 0 and 1.6 <= late / early <= 2.4 for early, late in itertools.pairwise(more)))
    text = "MALI's memory does not grow with the steps; that of ACA and naive grows in proportion"
    sizes = ", ".join(its["mali"][0].record.results["peak_bytes_by_h"])
    numbers = f"Peak {what}, there and back, with steps of {sizes} (ALF without refresh): {'; '.join(parts)}."
    return Claim(where, text, verdict(holds), numbers, [group[0].path for group in its.values()])


# Table 5

DATA = {"table": "Speech Commands", "digits": "digits, row by row", "vowels": "JapaneseVowels"}
FLOORS = {"table": 60, "digits": 95, "vowels": 90}


def accuracies(found: Sequence[Found]) -> list[float]:
    return [100 * one.record.results["test_accuracy"] for one in found]


def paths(found: list[Found]) -> Shown:
    tables, claims = [], []
    plain = chosen(found, eta=1.0, unsafe_damping=False)
    for data, title in DATA.items():
        here = chosen(plain, data=data)
        by = by_method(here)
        if "mali" not in by:
            continue
        rows = []
        for method, group in by.items():
            cell = Cell(spread(accuracies(group), 1), group[0].path)
            paper = PAPER_5.get(method, "-") if data == "table" else "-"
            rows.append([NAMES[method], str(len(group)), cell, paper, *_costs(group)])
        columns = ("method", "seeds", "accuracy, %", "paper, %", "s per epoch", "evaluations of f", "peak MB")
        config = here[0].record.config
        n = config["n_train"] or "all"
        notes = (
            f"{n} series to train with, {config['epochs']} epochs, {here[0].record.results['parameters']:,} parameters."
        )
        if data == "table":
            notes += " The paper: 24,482 clips of v0.02, no split by speaker, 88,940 parameters: not comparable."
        tables.append(Table(f"5-paths-{data}", f"Table 5: Neural CDE, {title}", columns, rows, notes, commands(here)))
        claims += path_claims(data, title, by)
    return tables, [], claims


def as_accurate_as_the_best(by: Groups, where: str) -> Claim | None:
    its = together(by, *ORDER)
    if not its:
        return None
    mean = {method: statistics.fmean(accuracies(group)) for method, group in its.items()}
    text = "MALI is as accurate as the best of the others (1 point allowed)"
    return _claim(where, text, [mean["mali"] >= max(mean.values()) - 1], _accuracies_in_words(its), [its])


def order_of_methods(by: Groups, where: str) -> Claim | None:
    its = together(by, *ORDER)
    if not its:
        return None
    values, apart = {method: accuracies(group) for method, group in its.items()}, {}
    for first, second in itertools.pairwise(ORDER):
        noise = max(statistics.stdev(values[m]) if len(values[m]) > 1 else 0.0 for m in (first, second))
        difference = statistics.fmean(values[first]) - statistics.fmean(values[second])
        equal = (first, second) == ("aca", "naive")
        pair = f"{NAMES[first]} {'=' if equal else '>'} {NAMES[second]}"
        apart[pair] = abs(difference) <= noise if equal else difference > noise
    seen = ", ".join(pair for pair, holds in apart.items() if holds)
    numbers = f"{_accuracies_in_words(its)} Of the four relations, seen here: {seen or 'none'}."
    text = "In the order MALI, ACA = naive, seminorm, adjoint, apart by more than the deviation over seeds"
    return _claim(where, text, list(apart.values()), numbers, [its])


def _accuracies_in_words(its: Groups) -> str:
    return f"{', '.join(f'{NAMES[m]} {spread(accuracies(group), 1)} %' for m, group in its.items())}."


def seminorm_saves_evaluations(by: Groups, where: str) -> Claim | None:
    its = together(by, "adjoint", "seminorm")
    if not its:
        return None
    back = {
        m: statistics.fmean(statistics.fmean(one.record.metrics["evaluations_backward"]) for one in group)
        for m, group in its.items()
    }
    numbers = f"Evaluations backward: adjoint {short(back['adjoint'], 3)}, seminorm {short(back['seminorm'], 3)}."
    text = "The seminorm saves evaluations on the adjoint's way back"
    return _claim(where, text, [back["seminorm"] < back["adjoint"]], numbers, [its])


def learns(by: Groups, data: str, title: str) -> Claim | None:
    its = together(by, "mali")
    if not its:
        return None
    found = statistics.fmean(accuracies(its["mali"]))
    numbers = f"MALI {found:.1f} %, {FLOORS[data]} % asked for."
    return _claim("a floor: it learns", f"MALI learns {title}", [found >= FLOORS[data]], numbers, [its])


def path_claims(data: str, title: str, by: Groups) -> list[Claim]:
    where = f"Section 4.3, Table 5; here {title}"
    return made(
        as_accurate_as_the_best(by, where),
        order_of_methods(by, where),
        seminorm_saves_evaluations(by, where),
        learns(by, data, title),
        memory_does_not_grow(by, where, "of the solve"),
    )


ORDER = ("mali", "aca", "naive", "seminorm", "adjoint")  # the paper's


# Table 7

ETAS = (1.0, 0.95, 0.9, 0.85)
TASKS = {
    "digits, row by row, %": ("paths", {"data": "digits"}),
    "latent, 10 % observed, x 0.01": ("latent", {"fraction": 0.1}),
    "latent, 20 % observed, x 0.01": ("latent", {"fraction": 0.2}),
}
RELIABLE = 1e-3  # largest error of a rebuilt state
Damped = dict[tuple[str, float, bool], list[Found]]  # by task, eta, and whether without checkpoints


def damping(found: list[Found]) -> Shown:
    """Table 7, from the runs of both experiments with MALI."""
    runs = {
        (task, eta, unsafe): group
        for task, (experiment, fields) in TASKS.items()
        for eta in ETAS
        for unsafe in (False, True)
        if (group := _damped(found, experiment, {**fields, "eta": eta, "unsafe_damping": unsafe}))
    }
    if not any(eta < 1 for _, eta, _ in runs):
        return [], [], []
    kept = [one for group in runs.values() for one in group]
    values = [[f"{eta:g}", *_damped_results(runs, eta)] for eta in ETAS]
    errors_back = [[f"{eta:g}", *_damped_errors(runs, eta)] for eta in ETAS]
    columns = ("eta", *(f"{task}: {kind}" for task in TASKS for kind in ("safe", "as published")))
    notes = "Safe: with checkpoints that keep the way back exact. As published: without, beside the safe runs with "
    notes += "the same seeds. In parentheses the paper's (on Speech Commands, and on Hopper at full size)."
    tables = [Table("7", "Table 7: damped MALI", columns, values, notes, commands(kept))]
    notes = "Largest relative error of a state on the way back, over all steps of training. As published, beyond "
    notes += f"{RELIABLE:g} gradients are not those of the solve; in the safe columns such a part is solved again."
    title = "Table 7: how exact the way back was"
    tables.append(Table("7-back", title, columns, errors_back, notes, commands(kept)))
    return tables, [], made(damping_changes_little(runs), reconstruction_without_checkpoints_is_exact(runs))


def _damped_results(runs: Damped, eta: float) -> list[Cell | str]:
    cells: list[Cell | str] = []
    for i, task in enumerate(TASKS):
        digits = 1 if i == 0 else 2
        for unsafe in (False, True):
            group = runs.get((task, eta, unsafe), [])
            said = spread(_quality(group), digits) if group else "-"
            if not unsafe:
                said += f" ({PAPER_7[eta][i]})"
            elif its := _both(runs, task, eta):
                said += f"; safe, {seeds_of(its)}: {spread(_quality(its['safe']), digits)}"
            cells.append(Cell(said, group[0].path) if group else "-")
    return cells


def _damped_errors(runs: Damped, eta: float) -> list[Cell | str]:
    groups = [runs.get((task, eta, unsafe), []) for task in TASKS for unsafe in (False, True)]
    return [Cell(short(worst_reconstruction(group)), group[0].path) if group else "-" for group in groups]


def _damped(found: Sequence[Found], experiment: str, fields: dict[str, Any]) -> list[Found]:
    return [one for one in chosen(found, method="mali", **fields) if one.record.experiment == experiment]


def _both(runs: Damped, task: str, eta: float) -> Groups:
    """Safe and unsafe runs with the same seeds."""
    groups = {name: runs.get((task, eta, name == "unsafe"), []) for name in ("safe", "unsafe")}
    return together(groups, *groups)


def _quality(group: Sequence[Found]) -> list[float]:
    return accuracies(group) if group[0].record.experiment == "paths" else errors(group)


def worst_reconstruction(group: Sequence[Found]) -> float:
    return max(max(one.record.metrics["reconstruction_error"]) for one in group)


def damping_changes_little(runs: Damped) -> Claim | None:
    holds, parts, paths = [], [], []
    for task in TASKS:
        found = {f"{eta}": runs[task, eta, False] for eta in ETAS if (task, eta, False) in runs}
        its = together(found, *map(str, ETAS))
        if not its:
            continue
        means = [statistics.fmean(_quality(group)) for group in its.values()]
        in_points = task.startswith("digits")
        wide = max(means) - min(means) if in_points else 100 * (max(means) / min(means) - 1)
        holds.append(wide <= (2 if in_points else 20))
        parts.append(f"{task.split(',')[0]} {wide:.1f} points" if in_points else f"{task[:12]} {wide:.0f} %")
        paths += [group[0].path for group in its.values()]
    if not holds:
        return None
    text = "Damping changes results little (2 points, 20 % allowed)"
    numbers = f"Largest against smallest: {', '.join(parts)}."
    return Claim("Appendix, Table 7", text, verdict(holds), numbers, paths)


def reconstruction_without_checkpoints_is_exact(runs: Damped) -> Claim | None:
    unsafe = {(task, eta): group for (task, eta, unsafe), group in runs.items() if unsafe and eta < 1}
    if not unsafe:
        return None
    wrong = [f"{task.split(', x')[0].split(', row')[0]}, eta {eta:g}: {short(worst_reconstruction(group))}"
             for (task, eta), group in unsafe.items() if worst_reconstruction(group) > RELIABLE]  # fmt: skip
    text = "The way back without checkpoints, as published, is exact for eta < 1"
    cells = f"{len(wrong)} of {len(unsafe)} cells ({3 * len(TASKS) - len(unsafe)} not run)"
    numbers = f"Beyond {RELIABLE:g} in {cells}: {'; '.join(wrong) or 'none'}."
    pairs = [its for task, eta in unsafe if (its := _both(runs, task, eta))]
    means = [[statistics.fmean(_quality(group)) for group in its.values()] for its in pairs]
    if means:
        apart = max(abs(other / safe - 1) for safe, other in means)
        numbers += (
            f" What was learned does not show it: within {100 * apart:.0f} % of the safe runs with the same seeds."
        )
    exact = [worst_reconstruction(group) <= RELIABLE for group in unsafe.values()]
    paths = [group[0].path for group in unsafe.values()]
    return Claim("Appendix A.5, implied", text, verdict(exact), numbers, paths)


# At the published size


def published(found: list[Found]) -> Shown:
    """Runs of the published networks for as long as there was time; finished or not."""
    found = chosen(found, method="mali", eta=1.0, unsafe_damping=False)
    found = [one for one in found if one.record.config.get("fraction", 0.1) == 0.1]
    if not found:
        return [], [], []
    rows = []
    for one in found:
        record = one.record
        latent_run = record.experiment == "latent"
        curve = record.metrics["validation_mse" if latent_run else "validation_accuracy"]
        quality = f"{100 * curve[-1]:.2f} x 0.01" if latent_run else f"{100 * curve[-1]:.1f} %"
        paper = "0.35 x 0.01" if latent_run else "93.7 %"
        texts = [
            f"{record.seconds['total'] / 3600:.1f}", f"{len(curve)} of {record.config['epochs']}",
            f"{record.results['parameters']:,}", quality,
            f"{statistics.fmean(record.seconds['training_cpu']):.0f}",
            f"{record.metrics['evaluations_forward'][-1]:.0f} + {record.metrics['evaluations_backward'][-1]:.0f}",
            f"{record.metrics['refreshes'][-1]:.1f}", short(worst_reconstruction([one])),
            f"{record.results['peak_bytes'] / 1e6:.0f}",
        ]  # fmt: skip
        name = "latent ODE, 10 % observed: test MSE" if latent_run else "Neural CDE: validation accuracy"
        rows.append([name, *(Cell(text, one.path) for text in texts), paper])
    columns = (
        "network", "hours", "epochs", "parameters", "after the last epoch", "s per epoch", "evaluations of f per step",
        "refreshes per step", "worst error of the way back", "peak MB", "paper, after all epochs",
    )  # fmt: skip
    notes = "Networks of the published size, trained with MALI on one thread: the latent ODE with all 10,000 "
    notes += (
        "trajectories; the Neural CDE with 640 steps of h = 0.25, where the preset is cpu-published on 7,000 clips "
    )
    notes += (
        "in batches of 256 (as published: 24,482, of 1024). The same command goes on: from the last checkpoint or, on "
    )
    notes += "another machine, from the weights beside the record; then the optimizer's averages begin anew."
    caption = "Learning curves of the networks of the published size; dashed, the paper's result after all epochs."
    picture = Picture(
        "published", "The published size, as far as we got", caption, partial(_draw_published, found), commands(found)
    )
    table = Table("published", "The published size, as far as we got", columns, rows, notes, commands(found))
    return [table], [picture], []


def _draw_published(found: Sequence[Found]) -> Figure:
    figure = Figure(figsize=(6.4, 2.9 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), 1, squeeze=False)[:, 0]
    for ax, one in zip(axes, found, strict=True):
        metrics = one.record.metrics
        latent_run = one.record.experiment == "latent"
        title = "latent ODE: MSE x 0.01" if latent_run else "Neural CDE: accuracy, %"
        plain_axes(ax, f"{title} (training thin, held out thick)", "epoch")
        keys = ("train_mse", "validation_mse") if latent_run else ("train_accuracy", "validation_accuracy")
        for key, width in zip(keys, (1, 2), strict=True):
            values = [100 * x for x in metrics[key]]
            ax.plot(range(1, 1 + len(values)), values, "o-", markersize=3, linewidth=width, color=COLORS["MALI"])
        ax.axhline(0.35 if latent_run else 93.7, color=REFERENCE, linestyle="--", linewidth=1)
        if latent_run:
            ax.set_yscale("log")
    return figure
