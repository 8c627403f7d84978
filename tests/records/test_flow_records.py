"""What the committed records of flows show: floors below which nothing was learned, and claims that must hold."""

from __future__ import annotations

import pytest
from committed import RECORDS, holding, records

from experiments.report.chapters import flow_memory, flows, plane

RUN = {
    "cpu": ("vanilla", "rnode", "seminorm", "mali"),
    "cpu-mnist": ("vanilla", "rnode", "mali"),
    "cpu-cifar10": ("vanilla", "rnode", "mali"),
}


@pytest.mark.parametrize("preset", RUN)
def test_methods_were_run_with_the_same_seeds_for_as_many_iterations(preset):
    by = flows.by_method(records("flows", preset))
    for method in RUN[preset]:
        assert {one.record.config["seed"] for one in by[method]} >= {0, 1}
    everyone = [one for method in RUN[preset] for one in by[method]]
    assert len(set(map(flows.iterations, everyone))) == 1
    assert (RECORDS / "flows" / by["mali"][0].path).with_suffix(".pt").exists()


@pytest.mark.parametrize("preset", RUN)
def test_flows_learn_and_faster_with_mali(preset):
    claims = flows.show(records("flows", preset))[2]
    for start in ("Flows beat a normal distribution", "An iteration of MALI is", "At equal training time"):
        holding(claims, start)


@pytest.mark.parametrize("preset", ["cpu", "cpu-cifar10"])
def test_mali_is_no_worse_than_rnode_and_what_it_trained_is_one_flow_with_an_inverse(preset):
    claims = flows.show(records("flows", preset))[2]
    for start in ("MALI is no worse than RNODE (", "What MALI trained is the same flow", "The flow can be inverted"):
        holding(claims, start)


def test_on_mnist_finer_steps_show_that_it_is_one_flow_with_an_inverse():
    mali = flows.by_method(records("flows", "cpu-mnist"))["mali"]
    assert flows.differences(mali)["ALF order 4, h 0.05"] < 0.01 and max(flows.bits(mali, "round_trip_fine")) < 1e-3


def test_in_training_on_mnist_mali_is_as_good_as_rnode_with_its_weights_and_not_with_five_times_them():
    by = flows.by_method(records("flows", "cpu-mnist"))
    assert flows.last_epoch(by["mali01"]) < flows.last_epoch(by["rnode"]) + 0.02 < flows.last_epoch(by["mali"])


def test_flows_learn_densities_in_the_plane():
    found = records("densities")
    assert {one.record.config["data"] for one in found} == {"circles", "pinwheel", "checkerboard"}
    assert {one.verdict for one in plane.show(found)[2]} == {"kept"}


def test_mali_trains_with_the_largest_batch_at_every_tolerance():
    (one,) = records("flow_memory")
    (claim,) = flow_memory.show([one])[2]
    assert "MALI 1.00" in claim.numbers  # the largest over the smallest peak
    for tolerance in one.record.config["tolerances"]:
        fits = [one.record.results["fits"][f"{m} / {tolerance:g}"]["largest_batch"] for m in ("mali", "aca", "naive")]
        assert fits[0] > fits[1] > fits[2]
