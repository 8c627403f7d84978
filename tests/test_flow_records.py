"""What the committed records of flows show: floors below which nothing was learned, and claims that must hold."""

from __future__ import annotations

import pytest
from committed import RECORDS, holding, records

from experiments.views import flows

RUN = {"cpu": ("vanilla", "rnode", "seminorm", "mali"), "cpu-mnist": ("vanilla", "rnode", "mali")}


@pytest.mark.parametrize("preset", RUN)
def test_methods_were_run_for_as_many_iterations_and_a_quarter_of_an_hour_at_most(preset):
    by = flows.by_method(records("flows", preset))
    for method in RUN[preset]:
        seeds = {one.record.config["seed"] for one in by[method]}
        assert seeds >= ({0, 1} if preset == "cpu" else {0})
    everyone = [one for method in RUN[preset] for one in by[method]]
    assert len(set(map(flows.iterations, everyone))) == 1
    assert all(sum(one.record.seconds["training_cpu"]) <= 15 * 60 for one in everyone)
    assert (RECORDS / "flows" / by["mali"][0].path).with_suffix(".pt").exists()


@pytest.mark.parametrize("preset", RUN)
def test_flows_learn_and_do_not_depend_on_the_solver(preset):
    claims = flows.show(records("flows", preset))[2]
    for start in ("Flows beat a normal distribution", "What MALI trained is the same flow", "An iteration of MALI is"):
        holding(claims, start)


def test_at_equal_time_mali_has_fewer_bits_on_digits_in_the_end_no_more_than_rnode_and_its_flow_can_be_inverted():
    claims = flows.show(records("flows"))[2]
    for start in ("At equal training time", "MALI is no worse than RNODE (", "The flow can be inverted"):
        holding(claims, start)
