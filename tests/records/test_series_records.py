"""What the committed records of series show: floors below which nothing was learned, and claims that must hold."""

from __future__ import annotations

import pytest
import torch
from committed import RECORDS, holding, records

from experiments.report.chapters import series
from experiments.report.claims import Claim

METHODS = ("naive", "adjoint", "aca", "mali")


@pytest.fixture(scope="module")
def latent():
    return series.chosen(records("latent"), eta=1.0, unsafe_damping=False)


def seeds(found) -> set[int]:
    return {one.record.config["seed"] for one in found}


@pytest.mark.parametrize("fraction", series.FRACTIONS)
def test_every_method_of_table_4_was_run_with_two_seeds_or_more(latent, fraction):
    for method in (*METHODS, "rnn", "gru_d"):
        assert seeds(series.chosen(latent, method=method, fraction=fraction)) >= {0, 1}


def test_a_latent_ode_is_better_than_recurrent_networks_and_learns(latent):
    findings = series.latent(latent)[2]
    for start in ("mujoco-rnn", "MALI halves the error of the mean", "MALI's memory does not grow"):
        holding(findings, start)


@pytest.mark.parametrize(("preset", "n_seeds", "data"), [("cpu", 2, "table"), ("cpu-digits", 3, "digits")])
def test_neural_cdes_learn_and_seminorm_saves_evaluations(preset, n_seeds, data):
    found = series.chosen(records("paths", preset), eta=1.0, unsafe_damping=False, data=data)
    for method in (*METHODS, "seminorm"):
        assert len(seeds(series.chosen(found, method=method))) >= n_seeds
    claims = series.paths(found)[2]
    for start in ("The seminorm saves", "MALI learns", "MALI's memory does not grow"):
        holding(claims, start)


def test_mali_recognises_speakers():
    found = records("paths", "cpu-vowels")
    assert len(seeds(found)) >= 3
    holding(series.paths(found)[2], "MALI learns JapaneseVowels")


def test_damping_changes_little_and_its_way_back_needs_checkpoints():
    found = [*records("latent"), *records("paths", "cpu-digits")]
    claims = series.damping(found)[2]
    (claim,) = (one for one in claims if isinstance(one, Claim))
    assert claim.id == "damping" and claim.verdict != "does not hold here"
    assert all(part in claim.numbers for part in ("digits", "latent, 10 %", "latent, 20 %", "Speech Commands: not run"))
    safe = [one for one in series.chosen(found, method="mali", unsafe_damping=False) if one.record.config["eta"] < 1]
    assert {one.record.config["eta"] for one in safe} == set(series.ETAS) - {1.0}
    for one in safe:  # what drifted was solved again
        assert series.worst_reconstruction([one]) <= series.RELIABLE or max(one.record.metrics["reruns"]) > 0
    assert any("the inverse for eta < 1" in one.text for one in claims)


@pytest.mark.parametrize(
    ("experiment", "preset", "parameters"), [("latent", "paper", 617_619), ("paths", "cpu-published", 88_940)]
)
def test_networks_of_the_published_size_learned_and_can_go_on(experiment, preset, parameters):
    (one,) = records(experiment, preset, finished=False)
    record = one.record
    curve = record.metrics["validation_mse" if experiment == "latent" else "validation_accuracy"]
    assert record.results["parameters"] == parameters
    assert curve[-1] < 0.5 * record.results["mean_predictor_mse"] if experiment == "latent" else curve[-1] > 0.6
    assert max(record.metrics["reconstruction_error"]) < series.RELIABLE and record.results["peak_bytes"] > 0
    weights = torch.load((RECORDS / experiment / one.path).with_suffix(".pt"), weights_only=True)
    assert sum(x.numel() for x in weights.values()) >= parameters
