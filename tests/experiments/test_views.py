"""Verdicts follow from numbers: made-up records on both sides of what they are judged by."""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from experiments.engine.record import Record
from experiments.images.solvers import ADAPTIVE, ATTACKERS, FIXED
from experiments.report import page as report
from experiments.report.chapters import feasibility, flows, images, series, solvers
from experiments.report.checklist import BY_ID
from experiments.report.claims import Claim
from experiments.report.runs import Found
from experiments.report.tables import Cell


def image_run(method: str, accuracy: float, seconds: float = 10.0, seed: int = 0, **more: Any) -> Found:
    config = {"method": method, "rtol": more.get("rtol"), "epochs": 2, "seed": seed}
    change = " --set rtol=0.1 --set atol=0.01" if more.get("rtol") else ""
    line = f"python -m experiments run cifar10 --preset cpu --method {method} --seed {seed}{change}"
    results = {
        "test_accuracy_last": accuracy, "test_accuracy_of_best_test_epoch": accuracy, "parameters": 7,
        "peak_bytes": more.get("peak", 1e6),
    }  # fmt: skip
    curve = [accuracy / 2, accuracy]
    metrics = {"watched_accuracy": curve, "evaluations_forward": [10.0, 12.0], "evaluations_backward": [10.0, 10.0]}
    record = Record("cifar10", "cpu", config, line, results, metrics, {"training_cpu": [seconds, seconds]})
    return Found(record, f"records/{method}-{seed}.json")


def verdicts(found: list[Found], show: Any = images.show) -> dict[str, str]:
    """By id of a claim, or by the text of a check."""
    return {one.id if isinstance(one, Claim) else one.text: one.verdict for one in show(found)[2]}


def by_words(found: dict[str, str], words: str) -> str:
    (verdict,) = [verdict for text, verdict in found.items() if words in text]
    return verdict


def seeded(run: Any, method: str, *values: float, **more: Any) -> list[Found]:
    """Runs with a value for each seed."""
    return [run(method, value, seed=seed, **more) for seed, value in enumerate(values)]


@pytest.mark.parametrize(
    ("naive", "adjoint", "aca", "word"),
    [
        (3.0, 1.9, 1.1, "holds"),
        (3.0, 5.6, 1.1, "holds in part"),  # faster than said is not what was said
        (3.0, 1.9, 10.0, "holds in part"),
        (1.0, 1.0, 0.3, "holds in part"),  # over ACA's they fit
        (1.0, 1.0, 2.0, "does not hold here"),
        (9.0, 9.0, 0.1, "does not hold here"),
    ],
)
def test_the_paper_s_words_for_speed_are_taken_one_by_one_in_both_directions(naive, adjoint, aca, word):
    times = {"naive": naive, "adjoint": adjoint, "aca": aca}
    found = verdicts([image_run("mali", 0.6), *(image_run(name, 0.6, 10 * ratio) for name, ratio in times.items())])
    assert found["cifar-speed"] == word


def images_of(mali: Sequence[float], aca: Sequence[float], naive: Sequence[float], adjoint: Sequence[float]) -> str:
    named = {"mali": mali, "aca": aca, "naive": naive, "adjoint": adjoint}
    return verdicts([one for name, values in named.items() for one in seeded(image_run, name, *values)])[
        "cifar-accuracy"
    ]


def test_accuracies_on_images_are_judged_over_all_seeds():
    high, low, noisy = (0.602, 0.600, 0.601), (0.560, 0.562), (0.5, 0.6, 0.7)
    assert images_of(high, high, low, low) == "holds"
    assert images_of(high, low, low, low) == "holds in part"
    assert images_of(low, low, high, high) == "holds in part"  # alike, and no better
    assert images_of(low, (0.5, 0.502), high, high) == "does not hold here"
    assert images_of(noisy, noisy, noisy, noisy) == "inconclusive"
    assert images_of((0.6,), (0.6,), (0.5,), (0.5,)) == "inconclusive"  # one seed
    assert images_of((*high, 0.55), high, low, low) == "holds in part"  # the worst seed counts, too
    runs = [*seeded(image_run, "mali", 0.6, 0.6), *seeded(image_run, "naive", 0.5, 0.5)]
    assert "cifar-accuracy" not in verdicts(runs)  # without ACA and the adjoint


def test_the_twin_and_its_parameters_are_judged():
    def judged(mali: Sequence[float], resnet: Sequence[float]) -> dict[str, str]:
        return verdicts([*seeded(image_run, "mali", *mali), *seeded(image_run, "resnet", *resnet)])

    assert judged((0.62, 0.621), (0.60, 0.601))["intro-resnet"] == "holds"
    assert judged((0.60, 0.601), (0.62, 0.621))["intro-resnet"] == "does not hold here"
    assert judged((0.60, 0.61), (0.60, 0.62))["intro-resnet"] == "inconclusive"
    assert judged((0.6,), (0.6,))["same-parameters"] == "holds"
    more = image_run("resnet", 0.6)
    more.record.results["parameters"] = 8
    assert verdicts([image_run("mali", 0.6), more])["same-parameters"] == "does not hold here"


def test_equal_tolerances_and_memory_are_checked():
    runs = [image_run("mali", 0.6), image_run("aca", 0.6), image_run("naive", 0.6, peak=9e6)]
    runs += [image_run("naive", 0.6, 5.0, rtol=0.1), image_run("adjoint", 0.6, 9.0, rtol=0.1)]
    found = verdicts(runs)
    assert by_words(found, "At the same tolerances") == "broken"
    assert found["Memory at the same batch: MALI <= ACA <= naive"] == "kept"


def test_commands_ask_for_what_was_run_and_nothing_else():
    runs = [image_run(method, 0.5, seed=seed) for method in ("mali", "aca") for seed in (0, 1)]
    runs += [image_run("naive", 0.5), image_run("naive", 0.5, rtol=0.1)]
    base = "python -m experiments run cifar10 --preset cpu"
    assert images.commands(runs) == [
        f"{base} --method mali,aca --seed 0,1",
        f"{base} --method naive --seed 0",
        f"{base} --set rtol=0.1 --set atol=0.01 --method naive --seed 0",
    ]


def test_pictures_and_tables_are_made():
    runs = [image_run(method, 0.5, seed=seed) for method in ("mali", "aca", "resnet") for seed in (0, 1)]
    tables, pictures, _ = images.show(runs)
    assert tables[0].rows[0][:2] == ["ResNet", "2"] and "50.0 ± 0.0" in str(tables[0].rows[0][2])
    assert pictures[0].svg.startswith("<svg")


def solver_run(method: str, accuracy: float, cells: dict[str, Any] | None = None, seed: int = 0) -> Found:
    sizes, tolerances, epsilons = [1.0, 0.25], [1.0, 0.1], [1.0, 16.0]
    config = {
        "method": method,
        "data": "digits",
        "seed": seed,
        "sizes": sizes,
        "tolerances": tolerances,
        "epsilons": epsilons,
    }
    found: dict[str, Any] = {}
    for version in ("corrected", "as reference"):
        found |= {f"{version} / {solver} / h {h:g}": accuracy for solver in FIXED for h in sizes}
        found |= {f"{version} / {solver} / tolerance {x:g}": accuracy for solver in ADAPTIVE for x in tolerances}
    ways = ["Euler"] if method == "resnet" else list(ATTACKERS)
    for name in ways:
        for epsilon in epsilons:
            here = dict.fromkeys(ways, accuracy - 0.02 * epsilon)
            found |= {f"FGSM {epsilon:g} / {name}": here, f"PGD {epsilon:g} / {name}": here}
    found |= {"clean": dict.fromkeys(ways, accuracy), "ALF - RK2 at h 1": 1e-7}
    for h in sizes:
        found[f"peak bytes / h {h:g}"] = {"as published": 100, "with refresh": 105, "refreshes": 1}
    results = {"cells": {**found, **(cells or {})}, "test_accuracy_last": accuracy}
    metrics = {name: [0.5, 0.4] for name in ("train_loss", "train_accuracy", "validation_accuracy")}
    line = f"python -m experiments run solvers --preset cpu --method {method} --seed {seed}"
    return Found(Record("solvers", "cpu", config, line, results, metrics), f"records/{method}-{seed}.json")


def solver_verdicts(changes: dict[str, Any], twin: dict[str, Any] | None = None, own: float = 0.9) -> dict[str, str]:
    """Two seeds of each, 0.1 points apart."""
    runs = [solver_run("mali", own + 0.001 * seed, changes, seed) for seed in (0, 1)]
    return verdicts([*runs, *(solver_run("resnet", 0.9 + 0.001 * seed, twin, seed) for seed in (0, 1))], solvers.show)


EVEN_RK4 = {"corrected / RK4 / h 0.25": 0.9005}
ATTACKED = "FGSM 16 / {}"


@pytest.mark.parametrize(
    ("changes", "id_", "word"),
    [
        ({}, "invariance", "holds"),
        ({"corrected / Euler / h 0.25": 0.86}, "invariance", "holds in part"),
        ({"corrected / Euler / h 0.25": 0.94}, "invariance", "holds in part"),  # in either direction
        (
            {f"corrected / {s} / h 0.25": 0.8 for s in FIXED}
            | {f"corrected / {s} / tolerance 0.1": 0.8 for s in ADAPTIVE},
            "invariance",
            "does not hold here",
        ),
        ({"corrected / RK4 / h 0.25": 0.92}, "higher-order", "holds"),
        (EVEN_RK4, "higher-order", "inconclusive"),
        ({"corrected / RK4 / h 0.25": 0.8}, "higher-order", "does not hold here"),
        ({"as reference / RK23 / tolerance 1": 0.5}, "loose", "holds in part"),
        ({f"as reference / {s} / tolerance 1": 0.5 for s in ("RK23", "Dopri5", "ALF")}, "loose", "holds"),
        ({"as reference / Heun-Euler / tolerance 1": 0.5}, "loose", "does not hold here"),
        ({"ALF - RK2 at h 1": 1e-4}, "same-as-rk2", "does not hold here"),
        ({}, "same-as-rk2", "holds"),
        ({}, "fgsm-solvers", "holds"),
        ({"FGSM 1 / ALF": dict.fromkeys(ATTACKERS, 0.87)}, "fgsm-solvers", "holds"),  # the attack does little
        ({"FGSM 16 / ALF": dict.fromkeys(ATTACKERS, 0.5)}, "fgsm-solvers", "does not hold here"),
        ({}, "fgsm", "inconclusive"),
        ({ATTACKED.format(a): dict.fromkeys(ATTACKERS, 0.9) for a in ATTACKERS}, "fgsm", "holds"),
        ({ATTACKED.format(a): dict.fromkeys(ATTACKERS, 0.1) for a in ATTACKERS}, "fgsm", "does not hold here"),
        ({ATTACKED.format("ALF"): dict.fromkeys(ATTACKERS, 0.9)}, "fgsm", "holds in part"),
        ({}, "resnet-random", "does not hold here"),
        ({}, "imagenet-resnet", "holds"),
    ],
)
def test_verdicts_on_other_solvers(changes, id_, word):
    assert solver_verdicts(changes)[id_] == word


def test_verdicts_on_the_twin():
    as_ode = [f"corrected / {solver} / h 0.25" for solver in ("RK2", "RK4")]
    assert solver_verdicts({}, dict.fromkeys(as_ode, 0.11))["resnet-random"] == "holds"
    assert (
        solver_verdicts({}, dict.fromkeys(as_ode, 0.4))["resnet-random"] == "holds in part"
    )  # lost, and not by chance
    assert solver_verdicts({}, own=0.95)["imagenet-resnet"] == "does not hold here"  # too good to follow it
    assert (
        solver_verdicts({"peak bytes / h 0.25": {"as published": 300, "with refresh": 105, "refreshes": 9}})[
            "MALI's memory does not depend on h as published, and with refresh by no more than half"
        ]
        == "broken"
    )


def test_training_at_fixed_steps_is_judged_beside_the_adjoint():
    def judged(*adjoint: float) -> str:
        runs = [solver_run("mali", 0.9 + 0.001 * seed, seed=seed) for seed in (0, 1)]
        runs += [solver_run("adjoint", x, seed=seed) for seed, x in enumerate(adjoint)]
        return verdicts(runs, solvers.show)["imagenet-adjoint"]

    assert judged(0.85, 0.851) == "holds" and judged(0.9, 0.901) == "does not hold here"
    assert judged(0.80, 0.95) == judged(0.8) == "inconclusive"


def test_published_numbers_stand_beside_the_step_they_belong_to():
    (table, *_), pictures, _ = solvers.show([solver_run("mali", 0.9), solver_run("resnet", 0.9)])
    assert [str(cell) for cell in table.rows[0][:4]] == ["NODE (MALI)", "ALF", "90.0 (42.3)", "90.0 (69.6)"]
    assert pictures[0].svg.startswith("<svg")


def feasibility_run(fits: dict[str, bool]) -> list[Found]:
    sizes = {"bytes_per_image": 1e8, "bytes_for_64": 6.4e9, "largest_batch": 100, "same_steps": True}
    results = {"fits": {f"large / h 0.25 / {m}": {**sizes, "fits": fit} for m, fit in fits.items()}}
    config = {"stems": ["large"], "settings": ["h 0.25"]}
    return [Found(Record("feasibility", "cpu", config, "python", results), "records/x.json")]


def test_the_claim_about_imagenet_is_judged():
    all_ = ("resnet", "naive", "adjoint", "aca", "mali")
    for unfit, word in [
        (("naive", "aca"), "holds"),
        (("naive",), "holds in part"),
        (("naive", "aca", "adjoint"), "holds in part"),
        (("adjoint", "mali"), "does not hold here"),
    ]:
        found = feasibility.show(feasibility_run({m: m not in unfit for m in all_}))
        assert found[2][0].verdict == word


def test_only_runs_of_a_preset_are_shown():
    preset = report.as_json(report.dataclasses.asdict(report.EXPERIMENTS["cifar10"].presets["cpu"]))

    def shown(**more: Any) -> bool:
        return report._is_shown(Record("cifar10", "cpu", {**preset, **more}, "", {}))

    assert shown(method="aca", seed=3) and shown(rtol=0.1, atol=0.01)
    assert not shown(epochs=1) and not shown(rtol=0.1)


# Series


TIMES = {"training_cpu": [1.0], "total": 3600.0}


def latent_run(method: str, fraction: float, mse: float, seed: int = 0, **more: Any) -> Found:
    config = {
        "method": method, "fraction": fraction, "seed": seed, "n": 100, "epochs": 2, "eta": more.get("eta", 1.0),
        "unsafe_damping": more.get("unsafe", False),
    }  # fmt: skip
    grows = {"mali": 0, "aca": 1, "naive": 5}.get(method, 0)
    results = {
        "test_mse": mse, "test_mse_later": mse, "mean_predictor_mse": 0.1, "peak_bytes": 1e6, "parameters": 7,
        "shown": None, "peak_bytes_by_h": {f"{h:g}": 1e6 + grows * 1e5 / h for h in (1.0, 0.5, 0.25, 0.125)},
    }  # fmt: skip
    metrics = {
        "evaluations_forward": [9.0], "evaluations_backward": [more.get("back", 9.0)], "refreshes": [0.0],
        "reconstruction_error": [more.get("error", 1e-6)], "validation_mse": [2 * mse, mse], "train_mse": [mse, mse],
    }  # fmt: skip
    line = f"python -m experiments run latent --preset cpu --method {method} --seed {seed}"
    preset, finished = more.get("preset", "cpu"), more.get("finished", True)
    record = Record("latent", preset, config, line, results, metrics, TIMES, finished=finished)
    return Found(record, f"records/{method}-{fraction}-{seed}.json")


def path_run(method: str, accuracy: float, seed: int = 0, **more: Any) -> Found:
    one = latent_run(method, 0.0, 0.0, seed, **more)
    config = {**one.record.config, "data": "digits", "n_train": None}
    results = {**one.record.results, "test_accuracy_last": accuracy}
    metrics = {**one.record.metrics, "validation_accuracy": [0.1, accuracy], "train_accuracy": [0.1, accuracy]}
    record = dataclasses.replace(one.record, experiment="paths", config=config, results=results, metrics=metrics)
    return Found(record, one.path)


def all_latent(**changes: Sequence[float]) -> list[Found]:
    """Three seeds, which differ alike for all solved methods."""
    wanted: dict[str, Sequence[float]] = {"mali": (0.004, 0.0042, 0.0041), "aca": (0.004, 0.0042, 0.0041)}
    wanted |= {"naive": (0.0045, 0.0047, 0.0046), "adjoint": (0.005, 0.0052, 0.0051)}
    wanted |= {"rnn": (0.02, 0.021, 0.022), "gru_d": (0.02, 0.021, 0.022), **changes}
    parts = {0.1: 1.0, 0.2: 0.9, 0.5: 0.8}
    return [
        latent_run(m, f, x * part, s) for m, xs in wanted.items() for f, part in parts.items() for s, x in enumerate(xs)
    ]


@pytest.mark.parametrize(
    ("changes", "id_", "word"),
    [
        ({}, "mujoco", "holds"),
        ({"naive": (0.004, 0.0042, 0.0041)}, "mujoco", "holds in part"),
        ({"mali": (0.003, 0.0032, 0.0031)}, "mujoco", "holds in part"),  # not similar to ACA's
        ({"mali": (0.009, 0.0092, 0.0091), "aca": (0.007, 0.0072, 0.0071)}, "mujoco", "does not hold here"),
        (
            {"aca": (0.004, 0.012, 0.008), "naive": (0.012, 0.004, 0.008), "adjoint": (0.008, 0.012, 0.004)},
            "mujoco",
            "inconclusive",
        ),
        ({m: (0.004,) for m in ("mali", "aca", "naive", "adjoint")}, "mujoco", "inconclusive"),
        ({}, "mujoco-rnn", "holds"),
        ({"rnn": (0.003, 0.003, 0.0031)}, "mujoco-rnn", "holds in part"),
        ({"rnn": (0.003, 0.003, 0.003), "gru_d": (0.003, 0.003, 0.003)}, "mujoco-rnn", "does not hold here"),
        ({"rnn": (0.001, 0.02, 0.003), "gru_d": (0.001, 0.02, 0.003)}, "mujoco-rnn", "inconclusive"),
        ({}, "mujoco-ratios", "holds"),
        ({"mali": (0.002, 0.004, 0.006)}, "mujoco-ratios", "inconclusive"),
        ({}, "intro-series", "holds"),
        ({"mali": (0.006, 0.0062, 0.0061)}, "intro-series", "does not hold here"),
        ({"mali": (0.002, 0.008, 0.004)}, "intro-series", "inconclusive"),
        ({}, "halves", "kept"),
        ({"mali": (0.06, 0.06, 0.06)}, "halves", "broken"),
        ({"mali": (math.nan, 0.1, 0.1)}, "halves", "broken"),
        ({}, "memory does not grow", "kept"),
    ],
)
def test_latent_odes_are_judged(changes, id_, word):
    assert by_words({k: v for k, v in verdicts(all_latent(**changes), series.latent).items() if id_ in (k, "mujoco-")
                     or (id_ in k and k not in BY_ID)}, id_) == word  # fmt: skip


def test_latent_odes_are_judged_only_by_what_was_run():
    assert series.latent([latent_run("mali", 0.1, 0.004, eta=0.9)]) == ([], [], [])
    some = [one for one in all_latent() if one.record.config["method"] in ("mali", "aca")]
    assert not {"mujoco", "mujoco-rnn"} & set(verdicts(some, series.latent))
    rising = [latent_run("mali", f, x, s) for f, x in ((0.1, 0.1), (0.2, 0.2), (0.5, 0.3)) for s in (0, 1)]
    assert verdicts(rising, series.latent)["mujoco-ratios"] == "does not hold here"


CDES = {"mali": 0.97, "aca": 0.96, "naive": 0.96, "seminorm": 0.95, "adjoint": 0.94}


def cde_verdicts(back: float = 5.0, **changes: Sequence[float]) -> dict[str, str]:
    wanted: dict[str, Sequence[float]] = {m: (x, x + 0.002) for m, x in CDES.items()} | changes
    return verdicts(
        [
            path_run(m, x, seed, back=back if m == "seminorm" else 9.0)
            for m, xs in wanted.items()
            for seed, x in enumerate(xs)
        ],
        series.paths,
    )


def test_neural_cdes_are_judged():
    found = cde_verdicts()
    assert found["speech"] == found["intro-series"] == "holds" and "broken" not in found.values() and len(found) == 5
    assert cde_verdicts(mali=(0.955, 0.957))["speech"] == "holds in part"
    worse = cde_verdicts(10.0, mali=(0.93, 0.932))
    assert worse["speech"] == worse["intro-series"] == "does not hold here"
    assert by_words(worse, "seminorm saves") == by_words(worse, "MALI learns") == "broken"
    assert cde_verdicts(mali=(0.90, 0.99))["speech"] == cde_verdicts(mali=(0.97,))["speech"] == "inconclusive"
    assert cde_verdicts(mali=(0.94, 0.97))["intro-series"] == "inconclusive"


def damped(digits: Mapping[float, Sequence[float]], unsafe_error: float = 1e-6) -> dict[str, str]:
    runs = [path_run("mali", x, seed, eta=eta) for eta, xs in digits.items() for seed, x in enumerate(xs)]
    runs += [
        latent_run("mali", f, 0.004 + 0.0001 * s, s, eta=eta) for eta in series.ETAS for f in (0.1, 0.2) for s in (0, 1)
    ]
    runs += [latent_run("mali", 0.1, 0.004, eta=0.95, unsafe=True, error=unsafe_error)]
    return verdicts(runs, series.damping)


def test_damping_is_judged_by_results_and_by_the_way_back():
    even = {eta: (0.95, 0.951) for eta in series.ETAS}
    assert damped(even)["damping"] == "holds" and by_words(damped(even), "the inverse for eta < 1") == "kept"
    assert damped({**even, 0.9: (0.92, 0.921)})["damping"] == "holds in part"
    assert damped({**even, 0.9: (0.9, 0.98)})["damping"] == "holds in part"  # the latent ODE's holds
    assert by_words(damped(even, math.inf), "the inverse for eta < 1") == "broken"
    only = [path_run("mali", 0.95 - (1 - eta) / 2, seed, eta=eta) for eta in series.ETAS for seed in (0, 1)]
    assert verdicts(only, series.damping)["damping"] == "does not hold here"
    single = [path_run("mali", 0.95, eta=eta) for eta in series.ETAS]
    assert verdicts(single, series.damping)["damping"] == "inconclusive"
    (claim,) = (one for one in series.damping(only)[2] if isinstance(one, Claim))
    assert "Speech Commands: not run with eta 1, 0.95, 0.9, 0.85" in claim.numbers


def test_what_ran_out_of_time_is_shown_at_the_published_size_alone():
    one = latent_run("mali", 0.1, 0.01, preset="paper", finished=False)
    tables, pictures, _ = series.published([one])
    assert (
        tables[0].rows[0][1] == Cell("1.0", one.path)
        and tables[0].rows[0][2] == Cell("2 of 2", one.path)
        and pictures[0].svg.startswith("<svg")
    )
    assert series.published([latent_run("aca", 0.1, 0.01, preset="paper")]) == ([], [], [])
    views = {view.name: view for view in report.VIEWS}
    assert report._is_for(views["published"], one.record) and not report._is_for(views["latent"], one.record)


# Flows


def flow_run(method: str, curve: list[float], seconds: float = 10.0, seed: int = 0, **more: Any) -> Found:
    """curve: of validation; the test is as its end."""
    config = {"method": method, "seed": seed, "batches": 50, "epochs": len(curve), "alpha": 0.05}
    pixels = base64.b64encode(bytes(36 * 64)).decode()
    results = {
        "test_bits": curve[-1], "test_bits_midpoint": curve[-1] - 0.1, "gaussian_bits": 3.2, "parameters": 7,
        "n_train": 5, "peak_bytes": 1e6, "round_trip": more.get("back", 1e-5),
        "samples": pixels, "real": pixels, "shape": [1, 8, 8], "levels": 17,
        "test_bits_by_solver": {"Dopri5 1e-5": 2.0, "ALF h 0.05": more.get("other", 2.001)},
        "untrained_validation_bits": 5.0, "solved": {"solver": "ALF()", "controller": "FixedStep(1)", "weight": 0.1},
    }  # fmt: skip
    counts = {"evaluations_forward": [9.0], "evaluations_backward": [9.0], "refreshes": [0.0]}
    metrics = {"validation_bits": curve, "train_bits": curve, **counts}
    preset = more.get("preset", "cpu")
    line = f"python -m experiments run flows --preset {preset} --method {method} --seed {seed}"
    times = {"training_cpu": [seconds] * len(curve)}
    return Found(Record("flows", preset, config, line, results, metrics, times), f"records/{method}-{seed}.json")


@pytest.mark.parametrize(
    ("mali", "rnode", "word"),
    [
        ((2.0, 2.001), (2.1, 2.101), "holds"),
        ((2.1, 2.101), (2.0, 2.001), "does not hold here"),
        ((2.0, 2.2), (2.1, 2.1), "inconclusive"),
        ((2.0,), (2.1,), "inconclusive"),
    ],
)
def test_the_lowest_bits_are_judged_over_seeds(mali, rnode, word):
    runs = [flow_run(m, [3.0, x], seed=s) for m, xs in (("mali", mali), ("rnode", rnode)) for s, x in enumerate(xs)]
    assert verdicts(runs, flows.show)["flows"] == word
    (claim,) = (one for one in flows.show(runs)[2] if isinstance(one, Claim))
    assert "FFJORD (vanilla) was not run. SemiNorm was not run." in claim.numbers


def test_the_lowest_bits_may_hold_in_part():
    bits = {"mali": (2.0, 2.001), "rnode": (2.1, 2.101), "vanilla": (1.9, 1.901)}
    runs = [flow_run(m, [x], seed=s) for m, xs in bits.items() for s, x in enumerate(xs)]
    assert verdicts(runs, flows.show)["flows"] == "holds in part"


def test_flows_are_checked_at_equal_time_and_by_what_they_learned():
    runs = [flow_run("mali", [3.0, 2.5, 2.2, 2.0]), flow_run("rnode", [2.9, 2.4], 20.0)]
    found = verdicts([*runs, flow_run("vanilla", [3.0, 2.6], 30.0)], flows.show)
    assert by_words(found, "At equal training time") == "kept"  # after 40 s 2.0 against 2.4 and 3.0
    assert by_words(found, "no worse than RNODE") == by_words(found, "is faster than one of the adjoint") == "kept"
    assert by_words(found, "the same flow") == by_words(found, "beat a normal distribution") == "kept"
    worse = [flow_run("mali", [3.5, 3.4], 40.0, other=2.5, back=0.1), runs[1], flow_run("vanilla", [3.0, 2.6], 30.0)]
    found = verdicts(worse, flows.show)
    others = (
        "At equal training time",
        "than RNODE",
        "one of the adjoint",
        "the same flow",
        "inverted",
        "beat a normal",
    )
    assert {by_words(found, words) for words in others} == {"broken"}


def test_before_its_first_epoch_a_flow_is_on_its_way_from_where_it_began():
    slow = flow_run("rnode", [2.9, 2.4], 20.0)
    assert flows.at_time(slow, 5.0) == pytest.approx(5.0 - (5.0 - 2.9) / 4)
    assert flows.at_time(slow, 30.0) == pytest.approx(2.65)
    found = verdicts([flow_run("mali", [3.0, 2.5], 1.0), slow], flows.show)
    assert by_words(found, "At equal training time") == "kept"


def test_table_6_stands_beside_the_papers_and_says_what_was_not_run():
    tables, pictures, _ = flows.show([flow_run("mali", [2.0]), flow_run("mali", [2.2], seed=1)])
    rows = {str(row[0]): [str(cell) for cell in row] for row in tables[0].rows}
    assert rows["MALI"] == ["MALI", "0.87", "-", "3.27", "-", "3.71", "-", "2.10 ± 0.14", "-", "-"]
    assert rows["Glow"][:2] == ["Glow", "1.05"] and "--preset paper-imagenet64" in tables[0].notes
    assert all(picture.svg.startswith("<svg") for picture in pictures)


def test_flows_of_the_published_size_stand_beside_the_papers():
    runs = [flow_run("mali", [3.2], preset="paper-cifar10"), flow_run("mali", [2.0])]
    tables, pictures, _ = flows.show(runs)
    assert [str(cell) for cell in tables[0].rows[-1]][3:8] == ["3.27", "3.20", "3.71", "-", "2.00"]
    assert "CIFAR-10" not in tables[0].notes.split("published size: ")[1]
    assert {picture.id for picture in pictures} >= {"6-cpu", "6-paper-cifar10"}


def test_samples_are_of_the_longest_training_which_is_in_no_comparison():
    runs = [flow_run("mali", [2.5]), flow_run("mali", [2.0, 1.5], preset="cpu-long")]
    for found, words, preset in (
        (runs, "after 100 iterations with MALI (1.50 bits)", "cpu-long"),
        (runs[:1], "after 50", "cpu"),
    ):
        tables, pictures, _ = flows.show(found)
        assert words in pictures[1].caption and f"--preset {preset} " in pictures[1].commands[0]
        assert str(tables[0].rows[-1][7]) == str(Cell("2.50", "records/mali-0.json"))
