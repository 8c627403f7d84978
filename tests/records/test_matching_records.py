"""The committed records of flow matching, of gradients through its sampler and of its inversion."""

from __future__ import annotations

from typing import Any

import pytest
from committed import RECORDS

from experiments.engine.record import Record
from experiments.matching.inversion import METHODS as COUPLINGS
from experiments.report.chapters.matching import EXACT_METHODS

FLOW, STEERING, INVERSION = (RECORDS / name / "cpu.json" for name in ("matching", "steering", "inversion"))


@pytest.fixture(scope="module")
def steering() -> Record:
    return Record.read(STEERING)


@pytest.fixture(scope="module")
def inversion() -> Record:
    return Record.read(INVERSION)


def cells(record: Record, name: str) -> list[dict[str, Any]]:
    return [record.results["cells"][f"{name} / N {n}"] for n in record.config["steps"]]


def test_the_flow_was_trained_to_its_end_and_its_weights_are_there():
    found = Record.read(FLOW)
    losses = found.metrics["validation_loss"]
    assert found.finished and losses[-1] == min(losses) < 0.2
    assert FLOW.with_suffix(".pt").stat().st_size <= 5_000_000


def test_malis_memory_grows_by_the_states_of_refreshes_alone(steering):
    first, *others = cells(steering, "MALI")
    state = steering.config["batch"] * steering.results["image_bytes"]
    for cell in others:
        assert cell["peak"] <= first["peak"] + 3 * state * (1 + cell["refreshes"])
    naive = [cell["peak"] for cell in cells(steering, "naive")]
    steps = steering.config["steps"]
    assert naive[-1] / naive[0] > 0.9 * (steps[-1] + 1) / (steps[0] + 1)  # evaluations


def test_exact_methods_have_autograds_gradients_and_truncated_ones_do_not(steering):
    for name in EXACT_METHODS:
        assert all(cell["error"] <= 1e-4 for cell in cells(steering, name)), name
    for name in ("last 1", "last 5"):
        assert cells(steering, name)[-1]["cosine"] < 0.9
    assert all(cell["equal"] for cell in steering.results["stored"].values())


def test_exact_mode_rebuilds_every_image_in_both_processes_and_floats_do_not(inversion):
    n = min(inversion.config["evaluations"])
    exact = inversion.results["cells"][f"exact, int64 / {n}"]
    assert exact["images"] == exact["equal_to_the_bit"] == exact["equal_in_a_second_process"] == 1000
    for name in COUPLINGS:
        cell = inversion.results["cells"][f"{name} / {n}"]
        assert cell["equal_to_the_bit"] < inversion.config["n_images"]
        small = cell["error"] < 1e-3
        assert small == (name not in ("Euler", "midpoint", "BDIA, gamma 0.5")), name
