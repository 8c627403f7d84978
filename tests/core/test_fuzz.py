"""A hundred cases of the fuzzer (`make fuzz` for more), and bugs planted for its judge to find."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from fuzz import Outcome, Spec, draw, float32, judge, runner, scales, shrink
from fuzz.cases import CORES, consistent
from fuzz.shrink import simpler

import torchmali as tm
import torchmali.gradients.mali as mali

EXPANDING = Spec(core="growth", gain=6.0, shape=(2, 3), dtype="float32", times=(0.0, 3.0), controller="FixedStep(0.1)")
STEPS = Spec(core="mlp", shape=(3, 4), controller="FixedStep(0.1)")


def small(case: int) -> Spec:
    """A drawn case with few steps and no nested solves: a hundred of them take seconds."""
    spec = draw(case, seed=7)
    span = abs(spec.times[-1] - spec.times[0])
    adaptive = spec.controller.startswith("Adaptive") and case % 3 == 0
    spec = spec if adaptive else replace(spec, controller=f"FixedStep({span / 5:.6g})")
    return consistent(replace(spec, core="tanh" if "nested" in spec.core else spec.core))


@pytest.mark.parametrize("first", range(0, 100, 10))
def test_random_cases_agree_with_plain_autograd(first):
    found = {case: judge(small(case)) for case in range(first, first + 10)}
    assert {case: (outcome, small(case)) for case, outcome in found.items() if outcome.verdict == "failed"} == {}


def small_scales(case: int) -> scales.Spec:
    """A drawn case of many scales with one small leaf and few steps."""
    spec = scales.draw(case, seed=7)
    leaf = replace(spec.leaves[0], shape=scales.SHAPES[case % 11], rate=min(20.0, spec.leaves[0].rate))
    controller = spec.controller if case % 4 == 0 else f"FixedStep({spec.span / 20!r})"
    return replace(spec, leaves=(leaf,), times=(spec.times[0], spec.times[-1]), controller=controller)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_elements_of_many_scales_are_followed_on_integers(first):
    found = {case: scales.judge(small_scales(case)) for case in range(first, first + 10)}
    assert {case: (outcome, small_scales(case)) for case, outcome in found.items() if outcome.verdict == "failed"} == {}


# The judge finds what is planted.


def with_results(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """MALI.solve, with a change to its results."""
    honest = tm.MALI.solve

    def solve(self: tm.MALI, problem: Any) -> Any:
        solved = honest(self, problem)
        return solved._replace(results=change(problem, solved.results))

    monkeypatch.setattr(tm.MALI, "solve", solve)


def scaled_gradient(factor: float) -> Any:
    def change(problem: Any, results: tuple) -> tuple:
        for x in results:
            if x.requires_grad:
                x.register_hook(lambda g: g * factor)
        return results

    return change


def test_a_case_is_the_same_each_time_it_is_drawn():
    assert [draw(case, 3) for case in range(50)] == [draw(case, 3) for case in range(50)]
    assert draw(1, 3) != draw(1, 4)
    assert {draw(case).core for case in range(1000)} == set(CORES)


def test_the_judge_finds_nothing_in_an_honest_method():
    assert judge(STEPS).name == "agrees"


def test_a_gradient_wrong_by_a_millionth_is_found(monkeypatch):
    with_results(monkeypatch, scaled_gradient(1 + 1e-6))
    assert judge(STEPS).name == "failed: gradient"


def test_a_gradient_wrong_by_a_millionth_is_within_the_round_off_of_float32(monkeypatch):
    with_results(monkeypatch, scaled_gradient(1 + 1e-6))
    assert judge(replace(STEPS, dtype="float32")).name == "agrees"


def test_a_solution_wrong_by_a_millionth_is_found(monkeypatch):
    with_results(monkeypatch, lambda problem, results: tuple(x * (1 + 1e-6) for x in results))
    assert judge(STEPS).kind == "solution"


def test_a_gradient_that_is_not_finite_is_found(monkeypatch):
    with_results(monkeypatch, scaled_gradient(float("nan")))
    assert judge(STEPS).name == "failed: not finite"


def test_a_warning_is_an_answer_and_its_absence_is_found(monkeypatch):
    spec = replace(EXPANDING, gradient="MALI(checkpoint_every=None)")
    assert judge(spec).name == "warned: drift"
    monkeypatch.setattr(mali, "warn", lambda message: None)
    assert judge(spec).name == "failed: gradient"


def test_a_warning_that_calls_a_wrong_gradient_right_is_found(monkeypatch):
    spec = replace(EXPANDING, gradient="MALI()")
    assert judge(spec).name == "warned: drift, solved again"
    with_results(monkeypatch, scaled_gradient(1.1))
    assert judge(spec).name == "failed: gradient said to be right"


def test_a_buffer_updated_twice_is_found(monkeypatch):
    def change(problem: Any, results: tuple) -> tuple:
        for name, b in problem.field.func.named_buffers():
            if name.endswith("num_batches_tracked"):
                b += 1
        return results

    spec = replace(STEPS, core="batch norm")
    assert judge(spec).name == "agrees"
    with_results(monkeypatch, change)
    assert judge(spec).kind == "buffers"


def test_a_draw_too_many_and_a_changed_input_are_found(monkeypatch):
    with monkeypatch.context() as patch:
        with_results(patch, lambda problem, results: (torch.rand(()), results)[1])
        assert judge(STEPS).kind == "generator"
    with monkeypatch.context() as patch:  # without a backward pass, which would notice it
        with_results(patch, lambda problem, results: (problem.z0[0].data.add_(1e-3), results)[1])
        assert judge(replace(STEPS, wants="no_grad")).kind == "inputs changed"


def test_bits_that_differ_from_the_stored_trajectory_are_found(monkeypatch):
    spec = replace(STEPS, gradient="MALI(exact=True)")
    assert judge(spec).name == "agrees"
    honest = tm.MALI.solve

    def solve(self: tm.MALI, problem: Any) -> Any:
        solved = honest(self, problem)
        if self.checkpoint_every == 1:
            return solved
        return solved._replace(results=scaled_gradient(1 + 1e-15)(problem, solved.results))

    monkeypatch.setattr(tm.MALI, "solve", solve)
    assert judge(spec).kind == "bits"


def test_a_crash_and_an_obscure_message_are_found(monkeypatch):
    def crash(problem: Any, results: tuple) -> tuple:
        raise KeyError("z")

    def mumble(problem: Any, results: tuple) -> tuple:
        raise tm.NonFiniteError("no")

    for change, name in ((crash, "failed: crash: KeyError"), (mumble, "failed: obscure message: NonFiniteError")):
        with monkeypatch.context() as patch:
            with_results(patch, change)
            assert judge(STEPS).name == name


def test_an_error_of_the_problem_is_an_answer_and_one_of_the_method_alone_is_not(monkeypatch):
    spec = Spec(core="cubic", gain=8.0, scale=1e4, controller="FixedStep(0.1)")
    assert judge(spec).name == "refused: NonFiniteError by all"

    def refuse(problem: Any, results: tuple) -> tuple:
        raise tm.NonFiniteError("The solution is not finite at t = 0.1: use smaller steps there.")

    with_results(monkeypatch, refuse)
    assert judge(STEPS).name == "failed: refused alone: NonFiniteError"


def test_a_failure_is_shrunk_to_the_feature_that_causes_it():
    drawn = next(spec for case in range(1000) if (spec := draw(case)).slope_layout == "sliced" and spec.others)
    rule = {True: Outcome("failed", "planted"), False: Outcome("agrees")}
    shrunk, outcome = shrink(drawn, rule[True], judged=lambda spec: rule[spec.slope_layout == "sliced"])
    assert outcome.kind == "planted"
    assert shrunk == Spec(slope_layout="sliced")


def test_every_step_of_shrinking_is_a_problem_that_can_be_judged():
    for case in range(200):
        for candidate in map(consistent, simpler(draw(case))):
            assert len(candidate.shape) in CORES[candidate.core]


def test_a_run_that_was_interrupted_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    judged: list[int] = []

    def work(case: int, seed: int, shrinks: bool, fuzzer: runner.Fuzzer) -> dict[str, Any]:
        judged.append(case)
        row: dict[str, Any] = {"case": case, "outcome": "agrees", "seconds": 0.0}
        return row if case != 2 else row | {"outcome": "failed: gradient", "spec": "Spec()", "detail": "off"}

    monkeypatch.setattr(runner, "work", work)
    record = tmp_path / "fuzz.json"
    assert runner.run(3, 0, 1, record, resume=False, shrinks=False) == 1
    assert runner.run(6, 0, 1, record, resume=True, shrinks=False) == 1
    assert judged == [0, 1, 2, 3, 4, 5]
    body = json.loads(record.read_text())
    assert body["outcomes"] == {"agrees": 5, "failed: gradient": 1}
    assert [row["case"] for row in body["failures"]] == [2]
    assert sum(counts["agrees"] for counts in body["features"]["dtype"].values() if "agrees" in counts) == 5
    assert "python -m tests.fuzz --only 2 --seed 0" in capsys.readouterr().out


# The judge of many scales.

DRIVEN = scales.Spec((scales.Leaf((3, 4), kinds=("driven", "grow"), scales="elements", spread=9.0),))


def planted(spec: scales.Spec, change: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The verdict on an exact solve whose results were changed."""
    honest = tm.MALI.solve

    def solve(self: tm.MALI, problem: Any) -> Any:
        solved = honest(self, problem)
        return solved._replace(results=tuple(change(self, x) for x in solved.results))

    with monkeypatch.context() as patch:
        patch.setattr(tm.MALI, "solve", solve)
        return scales.judge(spec).name


def test_the_judge_of_scales_finds_what_is_planted(monkeypatch):
    def in_one_element(method: tm.MALI, y: Any) -> Any:
        factor = torch.ones_like(y)
        factor[-1, 0, 0] += 1e-5
        return y * factor

    def in_what_is_stored(method: tm.MALI, y: Any) -> Any:
        return y * (1 + 2.0**-20) if method.checkpoint_every == 1 else y

    def refused(method: tm.MALI, y: Any) -> Any:
        raise tm.NonFiniteError("The solution is not finite at t = 0.1: use smaller steps there.")

    assert scales.judge(DRIVEN).name == "agrees"
    assert planted(DRIVEN, in_one_element, monkeypatch) == "failed: inaccurate y"
    assert planted(DRIVEN, in_what_is_stored, monkeypatch) == "failed: bits"
    assert planted(DRIVEN, refused, monkeypatch) == "failed: refused alone: NonFiniteError"


def test_the_grid_of_a_leaf_with_one_exponent_is_allowed_as_far_as_the_rule_goes():
    assert [scales.bits_lacking(shape) for shape in [(), (1,), (300,), (1, 5), (3, 4), (64, 4)]] == [0, 0, 3, 3, 6, 11]


def test_a_case_of_many_scales_is_the_same_each_time_and_its_repr_makes_it():
    drawn = [scales.draw(case, 3) for case in range(50)]
    assert drawn == [scales.draw(case, 3) for case in range(50)] != [scales.draw(case, 4) for case in range(50)]
    assert [eval(repr(spec), dict(vars(scales))) for spec in drawn] == drawn


def test_a_failure_of_scales_is_shrunk(monkeypatch):
    drawn = next(spec for case in range(100) if len((spec := scales.draw(case)).leaves) == 3)
    monkeypatch.setattr(scales, "judge", lambda spec: Outcome("failed", "planted"))
    shrunk, outcome = scales.shrink(drawn, Outcome("failed", "planted"))
    assert outcome.kind == "planted"
    assert shrunk.leaves[0].scales == "one" and len(shrunk.leaves) == 1 and shrunk.times == (0.0, 1.0)


def test_the_float32_study_tells_misses_and_false_alarms(tmp_path):
    row = float32.measure(3)
    assert row["error"] <= row["bound"] and not row["told"]
    assert not float32.is_miss(row) and not float32.is_false_alarm(row)
    assert float32.is_miss(row | {"error": 2 * row["bound"]})
    assert not float32.is_miss(row | {"error": 2 * row["bound"], "told": ["drift"]})
    assert float32.is_false_alarm(row | {"told": ["drift"]})
    assert float32.is_miss(row | {"error": float("nan")})
    counts = float32.summary([row, {"seed": 5, "family": "chaos", "unsolved": "NonFiniteError: y"}])
    assert (counts["problems"], counts["misses"], counts["unsolved"]) == (1, 0, {"NonFiniteError": 1})
    unsolved = {"seed": 5, "family": "chaos", "unsolved": "NonFiniteError: y"}
    float32.write(tmp_path / "record", {"command": "none"}, [row, unsolved])
    header, rows = float32.load(tmp_path / "record")
    assert header["command"] == "none" and [r["seed"] for r in rows] == [3, 5]
    assert rows[0]["error"] == pytest.approx(row["error"], rel=1e-2) and "unsolved" not in rows[0]
    assert float32.summary(rows)["unsolved"] == {"NonFiniteError": 1}
