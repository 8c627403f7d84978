"""Verdicts follow from numbers: made-up records on both sides of what they are judged by."""

from __future__ import annotations

import base64
import dataclasses
import math
from typing import Any

import pytest

from experiments.engine.record import Record
from experiments.images.solvers import ADAPTIVE, ATTACKERS, FIXED
from experiments.report import page as report
from experiments.report.chapters import feasibility, flows, images, series, solvers
from experiments.report.runs import Found
from experiments.report.tables import Cell


def image_run(method: str, accuracy: float, seconds: float = 10.0, seed: int = 0, **more: Any) -> Found:
    config = {"method": method, "rtol": more.get("rtol"), "epochs": 2, "seed": seed}
    change = " --set rtol=0.1 --set atol=0.01" if more.get("rtol") else ""
    line = f"python -m experiments run cifar10 --preset cpu --method {method} --seed {seed}{change}"
    results = {
        "test_accuracy": accuracy, "test_accuracy_of_best_test_epoch": accuracy, "parameters": 7,
        "peak_bytes": more.get("peak", 1e6),
    }  # fmt: skip
    curve = [accuracy / 2, accuracy]
    metrics = {"watched_accuracy": curve, "evaluations_forward": [10.0, 12.0], "evaluations_backward": [10.0, 10.0]}
    record = Record("cifar10", "cpu", config, line, results, metrics, {"training_cpu": [seconds, seconds]})
    return Found(record, f"records/{method}-{seed}.json")


def verdicts(found: list[Found], show: Any = images.show) -> dict[str, str]:
    return {claim.text: claim.verdict for claim in show(found)[2]}


def by_words(found: dict[str, str], words: str) -> str:
    (verdict,) = [verdict for text, verdict in found.items() if words in text]
    return verdict


def test_nothing_is_no_proof():
    assert images.verdict([]) == "not testable here"
    assert [images.verdict(x) for x in ([True], [True, False], [False])] == [
        "holds", "holds in part", "does not hold here",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("naive", "adjoint", "aca", "verdict"),
    [
        (3.0, 1.9, 1.1, "holds"),
        (3.0, 1.9, 10.0, "holds in part"),
        (1.6, 1.6, 0.3, "holds in part"),
        (1.0, 1.0, 2.0, "does not hold here"),
    ],
)
def test_the_paper_s_words_for_speed_are_taken_one_by_one(naive, adjoint, aca, verdict):
    times = {"naive": naive, "adjoint": adjoint, "aca": aca}
    found = verdicts([image_run("mali", 0.6), *(image_run(name, 0.6, 10 * ratio) for name, ratio in times.items())])
    assert by_words(found, "almost two times") == verdict


def test_accuracies_and_equal_tolerances_are_judged():
    runs = [image_run("mali", 0.600), image_run("aca", 0.612), image_run("resnet", 0.605), image_run("naive", 0.595)]
    runs += [image_run("naive", 0.6, 5.0, rtol=0.1), image_run("adjoint", 0.6, 9.0, rtol=0.1)]
    assert not [text for text in verdicts(runs) if "more accurate than naive" in text]  # without the adjoint
    seeds = [
        image_run(name, x, seed=s) for name, x in (("mali", 0.6), ("naive", 0.58), ("adjoint", 0.595)) for s in (0, 1)
    ]
    assert by_words(verdicts(seeds), "more accurate than naive") == "holds in part"  # the adjoint by half a point
    noisy = [*seeds[:2], image_run("naive", 0.52), image_run("naive", 0.64, seed=1), *seeds[4:]]
    assert by_words(verdicts(noisy), "more accurate than naive") == "does not hold here"
    found = verdicts([*runs, image_run("adjoint", 0.598)])
    assert by_words(found, "as accurate as ACA") == "does not hold here"
    assert by_words(found, "as its ResNet twin") == "holds"
    assert by_words(found, "more accurate than naive") == "not testable here"  # with one seed
    assert by_words(found, "At the same tolerances") == "does not hold here"


def test_methods_are_compared_with_the_same_seeds():
    runs = [
        image_run("mali", 0.6),
        image_run("mali", 0.9, seed=1),
        image_run("aca", 0.6),
        image_run("aca", 0.1, seed=2),
    ]
    assert by_words(verdicts(runs), "as accurate as ACA") == "holds"
    assert verdicts([image_run("mali", 0.6), image_run("aca", 0.6, seed=1)]) == {}


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


def solver_run(method: str, accuracy: float, cells: dict[str, Any] | None = None) -> Found:
    sizes, tolerances, epsilons = [1.0, 0.25], [1.0, 0.1], [1.0, 16.0]
    config = {"method": method, "data": "digits", "sizes": sizes, "tolerances": tolerances, "epsilons": epsilons}
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
    line = f"python -m experiments run solvers --preset cpu --method {method} --seed 0"
    return Found(Record("solvers", "cpu", config, line, results, metrics), f"records/{method}.json")


def solver_verdicts(changes: dict[str, Any], twin: dict[str, Any] | None = None) -> dict[str, str]:
    return verdicts([solver_run("mali", 0.9, changes), solver_run("resnet", 0.9, twin)], solvers.show)


@pytest.mark.parametrize(
    ("changes", "words", "verdict"),
    [
        ({}, "keeps its accuracy", "holds"),
        ({"corrected / Euler / h 0.25": 0.86}, "keeps its accuracy", "holds in part"),
        ({"corrected / RK4 / h 0.25": 0.87, "corrected / Euler / h 0.25": 0.8}, "keeps its accuracy", "does not hold"),
        ({"corrected / RK4 / h 0.25": 0.905}, "higher order", "not testable"),
        ({"corrected / RK4 / h 0.25": 0.92}, "higher order", "holds"),
        ({"as reference / ALF4 / tolerance 1": 0.99}, "fall to 51", "does not hold"),
        ({"as reference / RK23 / tolerance 1": 0.5}, "fall to 51", "holds in part"),
        ({"ALF - RK2 at h 1": 1e-4}, "is RK2", "does not hold"),
        (
            {"peak bytes / h 0.25": {"as published": 100, "with refresh": 150, "refreshes": 9}},
            "memory",
            "holds in part",
        ),
        ({}, "whatever solver attacks", "holds"),
        (
            {"FGSM 1 / ALF": dict.fromkeys(ATTACKERS, 0.87)},
            "whatever solver attacks",
            "holds",
        ),  # the attack does little
        ({"FGSM 16 / ALF": dict.fromkeys(ATTACKERS, 0.5)}, "whatever solver attacks", "does not hold"),
        ({}, "more robust", "does not hold"),
    ],
)
def test_verdicts_on_other_solvers(changes, words, verdict):
    assert by_words(solver_verdicts(changes), words).startswith(verdict)


def test_verdicts_on_the_twin():
    assert by_words(solver_verdicts({}), "as an ODE") == "does not hold here"
    assert by_words(solver_verdicts({}, {"corrected / RK4 / h 0.25": 0.59}), "as an ODE") == "holds"
    weak = {"FGSM 16 / Euler": {"Euler": 0.3}}
    assert by_words(solver_verdicts({}, weak), "more robust") == "holds"


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
    for unfit, verdict in [(("naive", "aca"), "holds"), (("naive",), "holds in part"), ((), "does not hold here")]:
        found = feasibility.show(feasibility_run({m: m not in unfit for m in all_}))
        assert found[2][0].verdict == verdict


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
    results = {**one.record.results, "test_accuracy": accuracy}
    metrics = {**one.record.metrics, "validation_accuracy": [0.1, accuracy], "train_accuracy": [0.1, accuracy]}
    record = dataclasses.replace(one.record, experiment="paths", config=config, results=results, metrics=metrics)
    return Found(record, one.path)


def all_latent(**changes: float) -> list[Found]:
    wanted = {"mali": 0.004, "aca": 0.004, "naive": 0.004, "adjoint": 0.005, "rnn": 0.02, "gru_d": 0.02, **changes}
    parts = {0.1: 1.0, 0.2: 0.9, 0.5: 0.8}
    return [latent_run(m, f, mse * part) for m, mse in wanted.items() for f, part in parts.items()]


def test_latent_odes_are_judged():
    found = verdicts(all_latent(), series.latent)
    assert set(found.values()) == {"holds"} and len(found) == 5
    assert by_words(verdicts(all_latent(mali=0.0047), series.latent), "15 % allowed") == "holds in part"
    assert by_words(verdicts(all_latent(rnn=0.003), series.latent), "recurrent") == "holds in part"
    assert by_words(verdicts(all_latent(mali=0.06), series.latent), "halves") == "does not hold here"
    assert (
        by_words(verdicts(all_latent(mali=0.003), series.latent), "15 % allowed") == "holds in part"
    )  # not that of ACA
    assert by_words(verdicts(all_latent(mali=math.nan), series.latent), "halves") == "does not hold here"
    assert series.latent([latent_run("mali", 0.1, 0.004, eta=0.9)]) == ([], [], [])
    some = [one for one in all_latent() if one.record.config["method"] in ("mali", "aca")]
    assert not [text for text in verdicts(some, series.latent) if "recurrent" in text or "naive" in text]


def test_neural_cdes_are_judged():
    wanted = {"mali": 0.97, "aca": 0.96, "naive": 0.96, "seminorm": 0.95, "adjoint": 0.94}
    runs = [path_run(m, x, back=5.0 if m == "seminorm" else 9.0) for m, x in wanted.items()]
    found = verdicts(runs, series.paths)
    assert set(found.values()) == {"holds"} and len(found) == 5
    worse = [path_run("mali", 0.94), *runs[1:3], path_run("seminorm", 0.95, back=10.0), runs[4]]
    found = verdicts(worse, series.paths)
    assert by_words(found, "best of the others") == "does not hold here"
    assert by_words(found, "In the order") == "holds in part"
    assert by_words(found, "seminorm saves") == by_words(found, "MALI learns") == "does not hold here"


def test_damping_is_judged_by_results_and_by_the_way_back():
    etas = (1.0, 0.95, 0.9, 0.85)
    runs = [path_run("mali", 0.95, eta=eta) for eta in etas]
    runs += [latent_run("mali", f, 0.004, eta=eta) for eta in etas for f in (0.1, 0.2)]
    runs += [latent_run("mali", 0.1, 0.004, eta=0.95, unsafe=True)]
    found = verdicts(runs, series.damping)
    assert by_words(found, "changes results little") == by_words(found, "is exact for eta < 1") == "holds"
    runs[1] = path_run("mali", 0.92, eta=0.95)
    runs[-1] = latent_run("mali", 0.1, 0.004, eta=0.95, unsafe=True, error=math.inf)
    found = verdicts(runs, series.damping)
    assert by_words(found, "changes results little") == "holds in part"
    assert by_words(found, "is exact for eta < 1") == "does not hold here"


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


def test_flows_are_judged_at_equal_iterations_and_at_equal_time():
    runs = [flow_run("mali", [3.0, 2.5, 2.2, 2.0]), flow_run("rnode", [2.9, 2.4], 20.0)]
    found = verdicts([*runs, flow_run("vanilla", [3.0, 2.6], 30.0)], flows.show)
    assert by_words(found, "At equal iterations") == "holds in part"  # 2.5 against 2.4 and 2.6
    assert by_words(found, "At equal training time") == "holds"  # after 40 s 2.0 against 2.4 and 3.0
    assert by_words(found, "no worse than RNODE") == by_words(found, "is faster than one of the adjoint") == "holds"
    assert by_words(found, "the same flow") == by_words(found, "beat a normal distribution") == "holds"
    worse = [flow_run("mali", [3.5, 3.4], 40.0, other=2.5, back=0.1), runs[1], flow_run("vanilla", [3.0, 2.6], 30.0)]
    found = verdicts(worse, flows.show)
    assert by_words(found, "beat a normal distribution") == "holds in part"
    others = (
        "At equal iterations",
        "At equal training time",
        "than RNODE",
        "one of the adjoint",
        "the same flow",
        "inverted",
    )
    assert {by_words(found, words) for words in others} == {"does not hold here"}


def test_before_its_first_epoch_a_flow_is_on_its_way_from_where_it_began():
    slow = flow_run("rnode", [2.9, 2.4], 20.0)
    assert flows.at_time(slow, 5.0) == pytest.approx(5.0 - (5.0 - 2.9) / 4)
    assert flows.at_time(slow, 30.0) == pytest.approx(2.65)
    found = verdicts([flow_run("mali", [3.0, 2.5], 1.0), slow], flows.show)
    assert by_words(found, "At equal training time") == "holds"


def test_a_flow_has_fewer_bits_only_if_it_has_with_every_seed():
    runs = [flow_run("mali", [2.0]), flow_run("mali", [2.2], seed=1), flow_run("rnode", [2.1])]
    claims = flows.show([*runs, flow_run("rnode", [2.205], seed=1)])[2]
    (claim,) = (claim for claim in claims if claim.text.startswith("At equal iterations"))
    assert claim.verdict == "does not hold here"
    assert "MALI 2.100 ± 0.141, RNODE 2.152 ± 0.074 (2 seeds)" in claim.numbers
    assert "FFJORD (vanilla) was not run; SemiNorm was not run" in claim.numbers


def test_table_6_stands_beside_the_papers_and_says_what_was_not_run():
    tables, pictures, _ = flows.show([flow_run("mali", [2.0]), flow_run("mali", [2.2], seed=1)])
    rows = {str(row[0]): row for row in tables[0].rows}
    assert str(rows["MALI"][1]) == str(Cell("2.10 ± 0.14", "records/mali-0.json")) and rows["MALI"][-1] == "not run"
    assert rows["Glow"][2] == "1.05" and "--preset paper-imagenet64" in tables[0].notes
    assert all(picture.svg.startswith("<svg") for picture in pictures)


def test_samples_are_of_the_longest_training_which_is_in_no_comparison():
    runs = [flow_run("mali", [2.5]), flow_run("mali", [2.0, 1.5], preset="cpu-long")]
    for found, words, preset in (
        (runs, "after 100 iterations with MALI (1.50 bits)", "cpu-long"),
        (runs[:1], "after 50", "cpu"),
    ):
        tables, pictures, _ = flows.show(found)
        assert words in pictures[1].caption and f"--preset {preset} " in pictures[1].commands[0]
        assert str(tables[0].rows[-1][1]) == str(Cell("2.50", "records/mali-0.json"))
