"""Tables 2 and 3, Figure 6: other solvers at the test, attacks, curves of training."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from experiments.images.solvers import ADAPTIVE, ATTACKERS, FIXED
from experiments.report.chapters.images import NAMES, TITLES
from experiments.report.claims import (
    GREATER,
    IN_PART,
    SIMILAR,
    Check,
    Claim,
    Finding,
    check,
    difference,
    greater,
    made,
    similar,
    verdict,
)
from experiments.report.figures import Picture
from experiments.report.runs import Found, Groups, Shown, by_seed, commands, seeds_of
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


def _claim(
    id_: str, here: str, parts: Sequence[bool | str], rule: str, numbers: str, *groups: Sequence[Found]
) -> Claim:
    its = {str(i): list(group) for i, group in enumerate(groups)}
    paths = [one.path for group in groups for one in group]
    return Claim(id_, verdict(parts), f"{numbers} ({seeds_of(its)}.)", rule, paths, here)


def cell_of(key: str, under: str | None = None) -> Callable[[Found], float]:
    def of(one: Found) -> float:
        cell = one.record.results["cells"][key]
        return 100 * (cell if under is None else cell[under])

    return of


def _own(one: Found) -> float:
    return 100 * one.record.results["test_accuracy_last"]


KEPT = 2.5  # points that may be lost or gained under another solver; the paper's Euler loses 2.2 with h = 0.25


def keeps_its_accuracy(groups: Groups, here: str) -> Claim:
    mali, said = groups["MALI"], []
    parts: list[bool | str] = []
    own_by_seed = by_seed(mali, _own)
    for solver in ("ALF", "RK2", "RK4", "Euler"):
        for h in _fine_sizes(groups):
            found = by_seed(mali, cell_of(f"corrected / {solver} / h {h:g}"))
            apart = difference(found, own_by_seed, paired=True)  # one network, the same images
            parts.append(similar(apart, KEPT))
            said.append(f"{solver} h {h:g}: {apart.mean:+.1f}")
    for solver in ("ALF", "Heun-Euler", "RK23", "Dopri5"):
        for tolerance in (x for x in mali[0].record.config["tolerances"] if x <= 0.1):
            found = by_seed(mali, cell_of(f"corrected / {solver} / tolerance {tolerance:g}"))
            apart = difference(found, own_by_seed, paired=True)
            parts.append(similar(apart, KEPT))
            said.append(f"{solver} {tolerance:g}: {apart.mean:+.1f}")
    numbers = f"Own {own(mali):.1f} %. Points more or less under other solvers: {', '.join(said)}."
    rule = f"under every solver with h <= 0.25 or tolerance <= 0.1 {SIMILAR.format(limit=f'{KEPT:g} points')}"
    return _claim("invariance", here, parts, rule, numbers, mali)


def resnet_is_no_ode(groups: Groups, here: str) -> Claim | None:
    if "ResNet" not in groups:
        return None
    twin = groups["ResNet"]
    cells = [percent(twin, f"corrected / {s} / h {h:g}") for s in ("RK2", "RK4") for h in _fine_sizes(groups)]
    chance = CHANCE[twin[0].record.config["data"]]
    numbers = f"Own {own(twin):.1f} %; as an ODE under RK2 and RK4 with h <= 0.25: {min(cells):.1f} to "
    numbers += f"{max(cells):.1f} %; guessing {chance:g} %."
    rule = f"every accuracy within 5 points of guessing ({chance:g} %); in part, where 30 points are lost or more"
    parts: list[bool | str] = [True if x <= chance + 5 else IN_PART if own(twin) - x >= 30 else False for x in cells]
    return _claim("resnet-random", here, parts, rule, numbers, twin)


CHANCE = {"digits": 10.0, "mnist": 10.0, "cifar10": 10.0, "folder": 0.1}  # percent


def one_step_of_alf_is_rk2(groups: Groups, here: str) -> Claim:
    mali = groups["MALI"]
    differences = [one.record.results["cells"]["ALF - RK2 at h 1"] for one in mali]
    numbers = f"Logits differ by {short(max(differences))} of the largest."
    return _claim("same-as-rk2", here, [max(differences) <= 1e-5], "logits equal to 1e-5", numbers, mali)


def higher_order_in_the_test_is_better(groups: Groups, here: str) -> Claim | None:
    mali, twin = groups["MALI"], groups.get("ResNet")
    if twin is None or 0.25 not in mali[0].record.config["sizes"]:
        return None
    best = max(_fine_sizes(groups), key=lambda h: percent(mali, f"corrected / RK4 / h {h:g}"))
    rk4 = by_seed(mali, cell_of(f"corrected / RK4 / h {best:g}"))
    beside_own, beside_twin = difference(rk4, by_seed(mali, _own), paired=True), difference(rk4, by_seed(twin, _own))
    numbers = f"RK4 with its best h <= 0.25, {best:g}: {statistics.fmean(rk4.values()):.1f} %; minus ALF in training "
    numbers += f"{beside_own}, minus ResNet {beside_twin}."
    rule = "RK4 is more accurate than ALF with h = 0.25 and than the ResNet, by two standard errors"
    return _claim("higher-order", here, [greater(beside_own), greater(beside_twin)], rule, numbers, mali, twin)


LOOSE = {"RK23": -18.8, "Dopri5": -17.3, "Heun-Euler": -1.1, "ALF": -7.0}  # the paper's points beside 69.59


def unchecked_last_steps_lose_accuracy(groups: Groups, here: str) -> Claim | None:
    mali = groups["MALI"]
    if 1.0 not in mali[0].record.config["tolerances"]:
        return None
    said, falls = [], []
    for solver, paper in LOOSE.items():
        checked, not_checked = (
            percent(mali, f"{version} / {solver} / tolerance 1") for version in ("corrected", "as reference")
        )
        lost = not_checked - own(mali)
        said.append(f"{solver} {not_checked:.1f} % (with its last step checked {checked:.1f} %)")
        falls.append(lost < -5 if paper < -5 else abs(lost) <= 5)
    numbers = f"Own {own(mali):.1f} %; {', '.join(said)}."
    rule = "as in the reference code, which does not check its last step: RK23, Dopri5 and MALI lose more than 5 "
    rule += "points, Heun-Euler no more"
    return _claim("loose", here, falls, rule, numbers, mali)


def memory_does_not_depend_on_h(groups: Groups, here: str) -> Check:
    mali = groups["MALI"]
    peaks = [mali[0].record.results["cells"][f"peak bytes / h {h:g}"] for h in mali[0].record.config["sizes"]]
    flat = [max(p[kind] for p in peaks) / min(p[kind] for p in peaks) for kind in ("as published", "with refresh")]
    numbers = f"Largest / smallest peak over h: {flat[0]:.2f} as published, {flat[1]:.2f} with refresh, which keeps a "
    numbers += f"state each time ({max(p['refreshes'] for p in peaks)} times at most)."
    text = "MALI's memory does not depend on h as published, and with refresh by no more than half"
    return check(f"Table 1; here {here}", text, [flat[0] <= 1.1, flat[1] <= 1.5], numbers, [mali[0].path])


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
        notes = f"Without attack {clean:.1f}. Means over {len(mali)} seeds; in parentheses the paper's, on ImageNet, "
        notes += (
            "where the ResNet is torchvision's pretrained one and the attack is advertorch's; here it is the twin, "
        )
        notes += "trained as the Neural ODE is, and FGSM and PGD are written out in `images/solvers.py`."
        all_ = [*mali, *groups.get("ResNet", [])]
        tables.append(Table(f"3-{name}-{epsilon:g}", title, columns, rows, notes, commands(all_)))
    return tables


HARMLESS = 5  # points; attacks by which a network loses less do not count
EVEN = 1.1  # points between solvers; the paper's largest difference (15.74 - 14.69)


def robustness_does_not_depend_on_the_solver(groups: Groups, here: str) -> Claim:
    mali, spreads = groups["MALI"], {}
    for epsilon in mali[0].record.config["epsilons"]:
        found = [percent(mali, f"FGSM {epsilon:g} / {a}", under) for a in ATTACKERS for under in ATTACKERS]
        if percent(mali, "clean", "ALF") - min(found) >= HARMLESS:
            spreads[epsilon] = max(found) - min(found)
    said = ", ".join(f"{x:.1f} at {epsilon:g}/255" for epsilon, x in spreads.items()) or "no attack did harm"
    rule = f"accuracies differ by {EVEN} points at most, the paper's own largest difference, over solvers that attack "
    rule += f"and infer; attacks that take less than {HARMLESS} points do not count"
    numbers = f"Largest difference in points: {said}."
    return _claim("fgsm-solvers", here, [x <= EVEN for x in spreads.values()], rule, numbers, mali)


def more_robust_than_a_resnet(groups: Groups, here: str) -> Claim | None:
    if "ResNet" not in groups or not groups["MALI"][0].record.config["epsilons"]:
        return None
    mali, resnet, said, better = groups["MALI"], groups["ResNet"], [], []
    for epsilon in mali[0].record.config["epsilons"]:
        twin = by_seed(resnet, cell_of(f"FGSM {epsilon:g} / Euler", "Euler"))
        kinds = [
            difference(by_seed(mali, cell_of(f"FGSM {epsilon:g} / {a}", u)), twin) for a in ATTACKERS for u in ATTACKERS
        ]
        if percent(resnet, "clean", "Euler") - statistics.fmean(twin.values()) >= HARMLESS:
            better += [greater(apart) for apart in kinds]
        low, high = (f(apart.mean for apart in kinds) for f in (min, max))
        errors = [apart.error for apart in kinds if not math.isnan(apart.error)]
        noise = f", standard errors up to {max(errors):.1f}" if errors else ""
        said.append(f"{epsilon:g}/255: {low:+.1f} to {high:+.1f}{noise}")
    numbers = f"Without attack {percent(mali, 'clean', 'ALF'):.1f} % against the twin's "
    numbers += f"{percent(resnet, 'clean', 'Euler'):.1f} %. Points above the twin, over solvers: {'; '.join(said)}."
    rule = "more accurate than its twin under FGSM for every pair of solvers and every size of attack, by two standard "
    rule += f"errors; attacks that take less than {HARMLESS} points from the ResNet do not count"
    return _claim("fgsm", here, better, rule, numbers, mali, resnet)


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


def more_accurate_than_the_adjoint(groups: Groups, here: str) -> Claim | None:
    if "adjoint" not in groups:
        return None
    its = {name: groups[name] for name in ("MALI", "adjoint")}
    mali, other = (by_seed(group, _own) for group in its.values())
    apart = difference(mali, other)
    numbers = f"MALI {own(its['MALI']):.1f} %, adjoint {own(its['adjoint']):.1f} %, both with h = 0.25: {apart}."
    return _claim(
        "imagenet-adjoint", here, [greater(apart, 1.0)], GREATER.format(limit="1 point"), numbers, *its.values()
    )


def follows_its_resnet_twin(groups: Groups, here: str) -> Claim | None:
    if "ResNet" not in groups:
        return None
    its = {name: groups[name] for name in ("MALI", "ResNet")}
    mali, other = (by_seed(group, _own) for group in its.values())
    apart = difference(mali, other)
    numbers = f"MALI {own(its['MALI']):.1f} %, ResNet {own(its['ResNet']):.1f} %: {apart}."
    return _claim(
        "imagenet-resnet", here, [similar(apart, 1.0)], SIMILAR.format(limit="1 point"), numbers, *its.values()
    )


def claims(groups: Groups, name: str) -> list[Finding]:
    here = TITLES[name]
    found = made(more_accurate_than_the_adjoint(groups, here), follows_its_resnet_twin(groups, here))
    if _fine_sizes(groups):
        found += made(
            keeps_its_accuracy(groups, here),
            resnet_is_no_ode(groups, here),
            one_step_of_alf_is_rk2(groups, here),
            higher_order_in_the_test_is_better(groups, here),
            unchecked_last_steps_lose_accuracy(groups, here),
            memory_does_not_depend_on_h(groups, here),
        )
    robust = robustness_does_not_depend_on_the_solver(groups, here), more_robust_than_a_resnet(groups, here)
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
