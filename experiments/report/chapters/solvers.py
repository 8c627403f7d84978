"""Tables 2 and 3, Figure 6: other solvers at the test, attacks, curves of training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from experiments.images.solvers import ADAPTIVE, ATTACKERS, FIXED
from experiments.report.chapters.images import NAMES, TITLES
from experiments.report.claims import Claim, made, verdict
from experiments.report.figures import Picture
from experiments.report.runs import Found, Groups, Shown, commands
from experiments.report.style import COLORS, plain_axes
from experiments.report.tables import Cell, Table, short

# The paper's top-1 accuracies on ImageNet, by step size and by tolerance
PAPER_SIZES, PAPER_TOLERANCES = (1.0, 0.5, 0.25, 0.15, 0.1), (1.0, 0.1, 0.01)
PAPER_2 = {
    "ALF": ((42.33, 66.4, 69.59, 70.17, 69.94), (62.56, 69.89, 69.87)),
    "Euler": ((21.94, 61.25, 67.38, 68.69, 70.02), ()),
    "RK2": ((42.33, 69.0, 69.72, 70.14, 69.92), ()),
    "RK4": ((12.6, 69.99, 69.91, 70.21, 69.96), ()),
    "Heun-Euler": ((), (68.48, 69.87, 69.88)),
    "RK23": ((), (50.77, 69.89, 69.93)),
    "Dopri5": ((), (52.3, 68.58, 69.71)),
}
PAPER_3 = {  # by attacker, for 1/255: under ALF, Heun-Euler, RK23, Dopri5; then for 2/255
    "ALF": ((14.69, 14.72, 14.77, 15.71), (10.38, 10.46, 10.62, 10.62)),
    "Heun-Euler": ((14.77, 14.75, 14.80, 15.74), (10.63, 10.47, 10.44, 10.49)),
    "RK23": ((14.82, 14.77, 14.79, 15.69), (10.78, 10.53, 10.48, 10.56)),
    "Dopri5": ((14.82, 14.78, 14.79, 15.15), (10.76, 10.49, 10.48, 10.51)),
}
PAPER_RESNET = (13.02, 9.57)


def percent(group: Sequence[Found], key: str, under: str | None = None) -> float:
    """Mean of a cell over seeds, in percent."""
    cells = [one.record.results["cells"][key] for one in group]
    return 100 * statistics.fmean(cell if under is None else cell[under] for cell in cells)


def own(group: Sequence[Found]) -> float:
    return 100 * statistics.fmean(one.record.results["test_accuracy_last"] for one in group)


# Table 2


def _row(group: Sequence[Found], version: str, solver: str, published: bool) -> list[Cell | str]:
    """Accuracies under a solver, by step size and by tolerance; published: with the paper's in parentheses."""
    cells: list[Cell | str] = []
    config = group[0].record.config
    for kind, known, values, place, theirs in (
        ("h", FIXED, config["sizes"], 0, PAPER_SIZES),
        ("tolerance", ADAPTIVE, config["tolerances"], 1, PAPER_TOLERANCES),
    ):
        numbers = PAPER_2[solver][place] if published and solver in PAPER_2 else ()
        paper = dict(zip(theirs, numbers, strict=False))
        for value in values:
            if solver not in known:
                cells.append("-")
                continue
            text = f"{percent(group, f'{version} / {solver} / {kind} {value:g}'):.1f}"
            text += f" ({paper[value]:.1f})" if value in paper else ""
            cells.append(Cell(text, group[0].path))
    return cells


def _invariance(name: str, groups: Groups, version: str) -> Table:
    config, rows = groups["MALI"][0].record.config, []
    for method, trained in (("MALI", "NODE (MALI)"), ("ResNet", "ResNet as an ODE")):
        if method in groups:
            for solver in dict.fromkeys([*FIXED, *ADAPTIVE]):
                rows.append([trained, solver, *_row(groups[method], version, solver, method == "MALI")])
    columns = ["network", "solver", *(f"h = {h:g}" for h in config["sizes"])]
    columns += [f"tolerance {t:g}" for t in config["tolerances"]]
    last_step = {
        "corrected": "every step checked, ends at t = 1",
        "as reference": "last step unchecked, h = 0.15 ends at 1.05",
    }
    title = f"Table 2: accuracy in % under other solvers, {TITLES[name]}, {last_step[version]}"
    n = " and ".join(f"{len(groups[m])} seeds ({m})" for m in ("MALI", "ResNet") if m in groups)
    notes = f"Trained with ALF, h = 0.25 (the ResNet: one step of Euler). Means over {n}; "
    notes += "in parentheses the paper's, on ImageNet. atol is a tenth of the tolerance."
    id_ = f"2-{name}" if version == "corrected" else f"2-{name}-reference"
    return Table(id_, title, columns, rows, notes, commands([*groups["MALI"], *groups.get("ResNet", [])]))


FINE = 0.25  # the largest h that counts as fine


def _fine_sizes(groups: Groups) -> list[float]:
    return [h for h in groups["MALI"][0].record.config["sizes"] if h <= FINE]


def keeps_its_accuracy(groups: Groups, where: str) -> Claim:
    mali, fine = groups["MALI"], _fine_sizes(groups)
    found = {
        solver: [percent(mali, f"corrected / {solver} / h {h:g}") for h in fine]
        for solver in ("ALF", "RK2", "RK4", "Euler")
    }
    others = [x for solver in ("ALF", "RK2", "RK4") for x in found[solver]]
    lost = own(mali) - min(found["Euler"])
    numbers = (
        f"Own {own(mali):.1f} %. ALF, RK2, RK4 at h <= 0.25: {min(others):.1f} to {max(others):.1f} %; Euler from "
    )
    numbers += f"{min(found['Euler']):.1f} %, {lost:.1f} points lost."
    invariant = [max(others) - min(others) <= 2, lost <= 3]
    text = "A Neural ODE trained with MALI keeps its accuracy under other solvers and steps (h <= 0.25)"
    return Claim(where, text, verdict(invariant), numbers, [mali[0].path])


def resnet_is_no_ode(groups: Groups, where: str) -> Claim | None:
    if "ResNet" not in groups:
        return None
    twin = groups["ResNet"]
    rk4 = [percent(twin, f"corrected / RK4 / h {h:g}") for h in _fine_sizes(groups)]
    numbers = f"Own {own(twin):.1f} %; as an ODE under RK4 with h <= 0.25: {min(rk4):.1f} to {max(rk4):.1f} %."
    text = "A ResNet cannot be run as an ODE: its accuracy is lost under another solver"
    return Claim(where, text, verdict([own(twin) - max(rk4) >= 30]), numbers, [twin[0].path])


def one_step_of_alf_is_rk2(groups: Groups, where: str) -> Claim:
    mali = groups["MALI"]
    difference = max(one.record.results["cells"]["ALF - RK2 at h 1"] for one in mali)
    numbers = f"Logits differ by {short(difference)} of the largest."
    text = "With h = 1 MALI's solver is RK2 (both 42.33 %)"
    return Claim(where, text, verdict([difference <= 1e-5]), numbers, [mali[0].path])


def higher_order_in_the_test_is_better(groups: Groups, where: str) -> Claim | None:
    mali = groups["MALI"]
    if 0.25 not in mali[0].record.config["sizes"]:
        return None
    alf, rk4 = (percent(mali, f"corrected / {solver} / h 0.25") for solver in ("ALF", "RK4"))
    numbers = f"At h = 0.25: ALF {alf:.1f} %, RK4 {rk4:.1f} % (told apart from 1 point on)."
    text = "A solver of higher order in the test beats the one of the training (ALF 69.6 %, RK4 69.9 %)"
    return Claim(where, text, verdict([] if abs(rk4 - alf) < 1 else [rk4 > alf]), numbers, [mali[0].path])


def unchecked_last_steps_lose_accuracy(groups: Groups, where: str) -> Claim | None:
    mali = groups["MALI"]
    if 1.0 not in mali[0].record.config["tolerances"]:
        return None
    parts, falls = [], []
    for solver in ("RK23", "Dopri5"):
        checked, not_checked = (
            percent(mali, f"{version} / {solver} / tolerance 1") for version in ("corrected", "as reference")
        )
        parts.append(f"{solver} {not_checked:.1f} % (with its last step checked {checked:.1f} %)")
        falls.append(own(mali) - not_checked > 5)
    numbers = f"Own {own(mali):.1f} %; {', '.join(parts)}."
    text = "At tolerance 1 RK23 and Dopri5 fall to 51 % (the reference code does not check its last step)"
    return Claim(where, text, verdict(falls), numbers, [mali[0].path])


def memory_does_not_depend_on_h(groups: Groups, name: str) -> Claim:
    mali = groups["MALI"]
    peaks = [mali[0].record.results["cells"][f"peak bytes / h {h:g}"] for h in mali[0].record.config["sizes"]]
    flat = [max(p[kind] for p in peaks) / min(p[kind] for p in peaks) for kind in ("as published", "with refresh")]
    numbers = f"Largest / smallest peak over h: {flat[0]:.2f} as published, {flat[1]:.2f} with refresh, which keeps a "
    numbers += f"state each time ({max(p['refreshes'] for p in peaks)} times at most)."
    holds = verdict([flat[0] <= 1.1, flat[1] <= 1.1])
    return Claim(f"Table 1; here {TITLES[name]}", "MALI's memory does not depend on h", holds, numbers, [mali[0].path])


# Table 3


def _attacks(name: str, groups: Groups) -> list[Table]:
    mali, tables = groups["MALI"], []
    for epsilon in mali[0].record.config["epsilons"]:
        rows = []
        published = {1.0: 0, 2.0: 1}.get(epsilon)
        for kind, attackers in (("FGSM", list(ATTACKERS)), ("PGD", ["ALF"])):
            for attacker in attackers:
                cells = []
                for i, under in enumerate(ATTACKERS):
                    text = f"{percent(mali, f'{kind} {epsilon:g} / {attacker}', under):.1f}"
                    if kind == "FGSM" and published is not None:
                        text += f" ({PAPER_3[attacker][published][i]:.1f})"
                    cells.append(Cell(text, mali[0].path))
                rows.append([f"{kind} by {attacker}", *cells])
        if "ResNet" in groups:
            for kind in ("FGSM", "PGD"):
                text = f"{percent(groups['ResNet'], f'{kind} {epsilon:g} / Euler', 'Euler'):.1f}"
                if kind == "FGSM" and published is not None:
                    text += f" ({PAPER_RESNET[published]:.1f})"
                rows.append([f"{kind} on the ResNet", Cell(text, groups["ResNet"][0].path), "", "", ""])
        columns = ("attack", *(f"under {solver}" for solver in ATTACKERS))
        clean = percent(mali, "clean", "ALF")
        title = f"Table 3: accuracy in % after attacks of {epsilon:g}/255, {TITLES[name]}"
        notes = f"Without attack {clean:.1f}. Means over {len(mali)} seeds; in parentheses the paper's, on ImageNet."
        all_ = [*mali, *groups.get("ResNet", [])]
        tables.append(Table(f"3-{name}-{epsilon:g}", title, columns, rows, notes, commands(all_)))
    return tables


HARMLESS = 5  # points; attacks by which a network loses less do not count


def robustness_does_not_depend_on_the_solver(groups: Groups, where: str) -> Claim:
    mali, spreads = groups["MALI"], {}
    for epsilon in mali[0].record.config["epsilons"]:
        found = [percent(mali, f"FGSM {epsilon:g} / {a}", under) for a in ATTACKERS for under in ATTACKERS]
        if percent(mali, "clean", "ALF") - min(found) >= HARMLESS:
            spreads[epsilon] = max(found) - min(found)
    numbers = "Largest difference between solvers of attack and inference: "
    numbers += ", ".join(f"{x:.1f} at {epsilon:g}/255" for epsilon, x in spreads.items()) + " points (2 allowed)."
    text = "Robustness to FGSM is the same whatever solver attacks or infers"
    return Claim(where, text, verdict([x <= 2 for x in spreads.values()]), numbers, [mali[0].path])


def more_robust_than_a_resnet(groups: Groups, where: str) -> Claim | None:
    if "ResNet" not in groups or not groups["MALI"][0].record.config["epsilons"]:
        return None
    mali, resnet, parts, better = groups["MALI"], groups["ResNet"], [], []
    for epsilon in mali[0].record.config["epsilons"]:
        twin = percent(resnet, f"FGSM {epsilon:g} / Euler", "Euler")
        here = percent(mali, f"FGSM {epsilon:g} / ALF", "ALF")
        if percent(resnet, "clean", "Euler") - twin >= HARMLESS:
            better.append(here > twin + 1)
        parts.append(f"{epsilon:g}/255: {here:.1f} against {twin:.1f}")
    text = "Neural ODEs are more robust to FGSM than a ResNet"
    numbers = f"NODE against twin, %: without attack {percent(mali, 'clean', 'ALF'):.1f} against "
    numbers += f"{percent(resnet, 'clean', 'Euler'):.1f}; {'; '.join(parts)} (more: by 1 point)."
    return Claim(where, text, verdict(better), numbers, [mali[0].path])


# Figure 6


def _draw(groups: Groups) -> Figure:
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    loss, accuracy = figure.subplots(2, 1, sharex=True)
    plain_axes(loss, "loss in training", "", "cross-entropy")
    plain_axes(accuracy, "accuracy: training (dashed), validation", "epoch", "%")
    for name, group in groups.items():
        metrics = [one.record.metrics for one in group]

        def mean(key: str, metrics: list[dict[str, Any]] = metrics) -> list[float]:
            return [statistics.fmean(column) for column in zip(*(m[key] for m in metrics), strict=True)]

        epochs = range(1, 1 + len(mean("train_loss")))
        loss.plot(epochs, mean("train_loss"), "o-", markersize=3, linewidth=1.5, color=COLORS[name], label=name)
        for key, style in (("train_accuracy", "--"), ("validation_accuracy", "-")):
            accuracy.plot(epochs, [100 * x for x in mean(key)], style, linewidth=1.5, color=COLORS[name])
    loss.set_yscale("log")
    loss.legend(frameon=False, fontsize=9)
    return figure


def more_accurate_than_the_adjoint(groups: Groups, where: str) -> Claim | None:
    if "adjoint" not in groups:
        return None
    mali, adjoint = own(groups["MALI"]), own(groups["adjoint"])
    numbers = f"MALI {mali:.1f} %, adjoint {adjoint:.1f} %, both with h = 0.25."
    text = "Trained at h = 0.25, MALI is more accurate than the adjoint (70 against 63 on ImageNet)"
    paths = [group[0].path for group in groups.values()]
    return Claim(where, text, verdict([mali > adjoint + 1]), numbers, paths)


def as_accurate_as_its_resnet_twin(groups: Groups, where: str) -> Claim | None:
    if "ResNet" not in groups:
        return None
    mali, resnet = own(groups["MALI"]), own(groups["ResNet"])
    numbers = f"MALI {mali:.1f} %, ResNet {resnet:.1f} %."
    text = "MALI trains a Neural ODE to the accuracy of its ResNet twin (69.6 and 70.1 on ImageNet)"
    paths = [group[0].path for group in groups.values()]
    return Claim(where, text, verdict([mali >= resnet - 1]), numbers, paths)


def claims(groups: Groups, name: str) -> list[Claim]:
    figure_6, table_2, table_3 = (
        f"Section 4.2, {place}; here {TITLES[name]}" for place in ("Figure 6", "Table 2", "Table 3")
    )
    found = made(more_accurate_than_the_adjoint(groups, figure_6), as_accurate_as_its_resnet_twin(groups, figure_6))
    if _fine_sizes(groups):
        found += made(
            keeps_its_accuracy(groups, table_2),
            resnet_is_no_ode(groups, table_2),
            one_step_of_alf_is_rk2(groups, table_2),
            higher_order_in_the_test_is_better(groups, table_2),
            unchecked_last_steps_lose_accuracy(groups, table_2),
            memory_does_not_depend_on_h(groups, name),
        )
    robust = robustness_does_not_depend_on_the_solver(groups, table_3), more_robust_than_a_resnet(groups, table_3)
    return [*found, *made(*robust)]


def show(found: list[Found]) -> Shown:
    tables, pictures, all_claims = [], [], []
    for name, title in TITLES.items():
        groups: Groups = {}
        for one in found:
            if one.record.config["data"] == name:
                groups.setdefault(NAMES[one.record.config["method"]], []).append(one)
        if "MALI" not in groups:
            continue
        tables += [_invariance(name, groups, version) for version in ("corrected", "as reference")]
        tables += _attacks(name, groups)
        all_claims += claims(groups, name)
        caption = "Networks of ODE blocks, trained with fixed steps of 0.25, and their ResNet twin; means over seeds."
        all_ = [one for group in groups.values() for one in group]
        draw = partial(_draw, groups)
        pictures.append(Picture(f"6-{name}", f"Figure 6: training, {title}", caption, draw, commands(all_)))
    return tables, pictures, all_claims
