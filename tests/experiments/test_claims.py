"""Rules by which the paper is judged: for each verdict there are made-up records that get it; and the checklist."""

from __future__ import annotations

import math
from typing import Any

import pytest

from experiments.engine.check import identity
from experiments.engine.record import Record
from experiments.report import page as report
from experiments.report.chapters import accounting, flow_memory, memory, replays, theory, toy
from experiments.report.checklist import BY_ID, SENTENCES
from experiments.report.claims import (
    HOLDS,
    IN_PART,
    INCONCLUSIVE,
    NOT,
    NOT_TESTABLE,
    Claim,
    Difference,
    difference,
    greater,
    similar,
    verdict,
)
from experiments.report.runs import Found
from experiments.theory.toy import PANELS, SOLVES


def found(experiment: str, config: dict[str, Any], results: dict[str, Any]) -> list[Found]:
    return [Found(Record(experiment, "cpu", config, "python -m x", results), f"records/{experiment}/cpu.json")]


def of(shown: Any) -> dict[str, str]:
    """Verdicts of claims by id, and of checks by their text."""
    return {one.id if isinstance(one, Claim) else one.text: one.verdict for one in shown[2]}


# Rules


def test_parts_make_a_verdict():
    assert [verdict(x) for x in ([True], [True, False], [False], [])] == [HOLDS, IN_PART, NOT, NOT_TESTABLE]
    assert verdict([INCONCLUSIVE, INCONCLUSIVE]) == INCONCLUSIVE
    assert verdict([INCONCLUSIVE, True]) == IN_PART and verdict([INCONCLUSIVE, False]) == NOT
    assert verdict([NOT_TESTABLE, True]) == HOLDS


def test_differences_take_all_seeds_and_pair_them_where_asked():
    one, other = {0: 1.0, 1: 3.0, 2: 8.0}, {0: 0.0, 1: 2.0}
    apart = difference(one, other)
    assert apart.mean == pytest.approx(3.0) and apart.error == pytest.approx(math.sqrt(13 / 3 + 1))
    paired = difference(one, other, paired=True)
    assert (paired.mean, paired.error) == (1.0, 0.0)
    assert math.isnan(difference({0: 1.0}, {0: 2.0}).error) and math.isnan(difference({0: 1.0}, {1: 1.0}, True).mean)
    assert difference({0: math.nan}, {0: 1.0}).error == 0.0  # diverged


@pytest.mark.parametrize(
    ("mean", "error", "word"),
    [
        (0.9, 0.4, HOLDS), (-0.9, 0.4, HOLDS), (1.1, 0.4, NOT), (-1.1, 0.4, NOT), (0.0, 0.6, INCONCLUSIVE),
        (2.0, 0.6, INCONCLUSIVE), (-2.3, 0.6, NOT), (0.0, math.nan, INCONCLUSIVE), (math.nan, math.nan, NOT_TESTABLE),
        (math.nan, 0.0, NOT),
    ],
)  # fmt: skip
def test_comparable_is_two_sided_and_inconclusive_within_the_noise(mean, error, word):
    assert similar(Difference(mean, error), 1.0) == word


@pytest.mark.parametrize(
    ("mean", "error", "limit", "word"),
    [
        (1.1, 0.4, 1.0, HOLDS), (0.9, 0.4, 1.0, NOT), (1.1, 0.6, 1.0, INCONCLUSIVE), (1.3, 0.6, 1.0, HOLDS),
        (-0.3, 0.6, 1.0, NOT), (0.1, 0.6, 0.0, INCONCLUSIVE), (-1.3, 0.6, 0.0, NOT), (9.0, math.nan, 1.0, INCONCLUSIVE),
        (math.nan, 0.0, 0.0, NOT), (math.nan, math.nan, 0.0, NOT_TESTABLE),
    ],
)  # fmt: skip
def test_outperforms_asks_for_the_limit_and_for_two_standard_errors(mean, error, limit, word):
    assert greater(Difference(mean, error), limit) == word


# Table 1


def counted(**changes: Any) -> dict[str, str]:
    """MLP with 10 steps and 5 rejected trials; everything as in the paper's formulas unless changed."""
    backward = {"naive": 0, "naive, h detached": 0, "adjoint": 10, "ACA": 11, "MALI": 21, "MALI exact": 11}
    backward |= changes.get("backward", {})
    cells: dict[str, Any] = {"MLP / depth of f": changes.get("own", 6)}
    for method, n in backward.items():
        depth = {"naive": changes.get("through", 300), "naive, h detached": 100}.get(method)
        back = {"steps": 10} if method == "adjoint" else None
        cell = {"steps": 10, "rejected": 5, "forward": 16, "backward": n, "depth": depth, "error": 0.0, "back": back}
        cells |= {f"MLP / {method} / {steps}": cell for steps in ("fixed", "adaptive")}
    slopes = {"naive": 5.0, "naive, h detached": 7.0, "adjoint": 0.0, "ACA": 2.0, "MALI": 0.0, "MALI exact": 0.0}
    slopes |= changes.get("slopes", {})
    bases = {"MALI": 21.0, "adjoint": 20.0, **changes.get("bases", {})}
    fits = {f"MLP / {m}": {"slope": 8 * slope, "base": 8 * bases.get(m, 20.0)} for m, slope in slopes.items()}
    results = {"cells": cells, "fits": fits, "state_bytes": {"MLP": 8}}
    return of(accounting.show(found("accounting", {"fields": ["MLP"]}, results)))


def test_table_1_holds_if_counts_are_those_of_the_formulas():
    judged = counted()
    assert {judged[id_] for id_ in BY_ID if id_ in judged} == {HOLDS}


@pytest.mark.parametrize(
    ("changes", "id_", "word"),
    [
        ({"backward": {"MALI": 11}}, "cost-mali", NOT),  # one of two evaluations is not needed
        ({"backward": {"adjoint": 100}}, "cost-adjoint", NOT),
        ({"backward": {"ACA": 21}}, "cost-aca", NOT),
        ({"slopes": {"ACA": 0.0}}, "memory-naive-aca", NOT),
        ({"slopes": {"naive": 1.0}}, "memory-naive-aca", NOT),
        ({"slopes": {"MALI": 0.5}}, "memory-constant", IN_PART),
        ({"slopes": {"MALI": 0.5, "adjoint": 0.5}}, "memory-constant", NOT),
        ({"bases": {"MALI": 25.0}}, "memory-v", NOT),
        ({"through": 100}, "depth-naive", NOT),
        ({"own": 200}, "depth-mali", NOT),
    ],
)
def test_table_1_is_judged_in_both_directions(changes, id_, word):
    assert counted(**changes)[id_] == word


def test_the_cost_of_naive_is_judged():
    one = {"steps": 10, "rejected": 5, "forward": 40, "backward": 0, "depth": None, "error": 0.0, "back": None}
    cells = {f"MLP / naive / {steps}": one for steps in ("fixed", "adaptive")}
    record = Record("accounting", "cpu", {"fields": ["MLP"]}, "", {"cells": cells})
    assert accounting.computation(record, "x", "cost-naive", "naive").verdict == NOT


# Figure 4


def toy_record(errors: dict[str, float], **cells: Any) -> Record:
    """alpha = 1 and -0.1 with T = 20 and 1: relative errors of both gradients by solve; others have 1e-5."""
    from_ode = {f"{name}": 1e-5 for name in {s for panel in PANELS.values() for s in panel.values()}} | errors
    found: dict[str, Any] = {}
    for alpha in (1.0, -0.1):
        for span in (20.0, 1.0):
            exact = toy.analytic(alpha, span)
            where = f"{alpha:g} {span:g}"
            for name, error in from_ode.items():
                found[f"{name} / {where}"] = {"gradient": [x * (1 + error) for x in exact], "evaluations": [1, 1]}
            found[f"discrete / {where}"] = list(exact)
        plain = {"gradient": [1.0, 1.0], "depth": 10, "steps": 3, "trials per step": 1.1}
        through = {**plain, "depth": 50, "gradient": [cells.get("through", 1.0)] * 2}
        found[f"search / {alpha:g} 1"] = {"detached": plain, "through the search": through}
    found |= cells.get("cells", {})
    return Record("toy", "cpu", {"alphas": [1.0, -0.1], "long": [20.0], "short": [1.0]}, "", {"cells": found})


def toy_verdicts(errors: dict[str, float] | None = None, **cells: Any) -> dict[str, str]:
    one = toy.Toy(toy_record(errors or {}, **cells), "records/toy/cpu.json")
    return {x.id if isinstance(x, Claim) else x.text: x.verdict for x in toy.claims(one)}


GOOD = {"MALI as published": 1e-6, "ACA, Heun-Euler": 1e-6, "MALI": 1e-14, "ACA, ALF": 1e-14, "naive, ALF": 1e-14}


@pytest.mark.parametrize(
    ("errors", "word"),
    [
        (GOOD, HOLDS),
        ({**GOOD, "MALI as published": 2e-6}, IN_PART),  # not similar
        ({**GOOD, "torchdiffeq naive": 1e-9}, IN_PART),
        ({"MALI as published": 1e-3, "ACA, Heun-Euler": 1e-4}, NOT),
    ],
)
def test_the_toy_is_judged_by_the_published_method_beside_torchdiffeq(errors, word):
    judged = toy_verdicts(errors)
    assert judged["toy"] == judged["toy-short"] == word


def test_reverse_accuracy_is_judged_for_every_alpha_and_time():
    judged = toy_verdicts(GOOD)
    assert judged["reverse-mali"] == judged["reverse-adjoint"] == judged["more-accurate"] == HOLDS
    judged = toy_verdicts({**GOOD, "MALI": 1e-3, "adjoint, ALF": 1e-5})
    assert judged["reverse-mali"] == judged["reverse-adjoint"] == judged["more-accurate"] == NOT
    assert toy_verdicts({**GOOD, "naive, ALF": 1e-3})["reverse-mali"] == IN_PART
    worse = [x * 1.01 for x in toy.analytic(-0.1, 20.0)]
    cells = {"MALI / -0.1 20": {"gradient": worse, "evaluations": [1, 1]}}
    judged = toy_verdicts(GOOD, cells=cells)
    assert judged["reverse-mali"] == judged["more-accurate"] == judged["reverse-adjoint"] == IN_PART


def test_failed_solves_and_the_graph_of_the_search_are_judged():
    judged = toy_verdicts(GOOD)
    assert judged["bounded"] == HOLDS and judged["deep-graph"] == NOT
    failed = {"failed": "StepLimitError: 9 steps reached t = 1 of 20 (h = 1). Why."}
    assert toy_verdicts(GOOD, cells={"MALI as published / 1 20": failed})["bounded"] == IN_PART
    both = {f"MALI as published / {alpha} 20": failed for alpha in ("1", "-0.1")}
    assert toy_verdicts(GOOD, cells=both)["bounded"] == NOT
    assert toy_verdicts(GOOD, cells=both)["toy"] == IN_PART  # what failed has no small error
    assert toy_verdicts(GOOD, through=3.0)["deep-graph"] == HOLDS
    one = toy_record(GOOD).results["cells"]["search / 1 1"]
    exploded = {"search / 1 1": {**one, "through the search": {**one["detached"], "gradient": [1.0, 9.0]}}}
    assert toy_verdicts(GOOD, cells=exploded)["deep-graph"] == IN_PART


def test_what_the_published_inverse_does_has_a_row():
    text = "Relative errors of dL/dalpha stay below 0.01 for every alpha and T: what drifted is solved again"
    shown = toy.claims(toy.Toy(toy_record({**GOOD, "MALI as published": 1e3}), "x"))
    (row,) = (one for one in shown if one.text == text)
    assert row.verdict == "kept" and "alpha 1, T = 20: as published 1,000" in row.numbers
    assert toy_verdicts({**GOOD, "MALI": 1.0})[text] == "broken"
    assert set(SOLVES) >= {"MALI as published"}


def memory_verdict(peaks: dict[str, list[float]], slopes: dict[str, float]) -> str:
    config = {"fields": ["MLP"], "tolerances": [0.1, 0.01]}
    pairs = [(m, t, x) for m, xs in peaks.items() for t, x in zip((0.1, 0.01), xs, strict=True)]
    cells = {f"MLP / {m} / tolerance {t:g}": {"peak": x} for m, t, x in pairs}
    fits = {f"MLP / {m}": {"slope": 8 * x, "r2": 1.0} for m, x in slopes.items()}
    record = Record("memory", "cpu", config, "", {"cells": cells, "fits": fits, "state_bytes": {"MLP": 8}})
    return memory.memory_is_constant_for_mali(record, "x").verdict


def test_memory_by_tolerance_is_judged_for_each_method():
    flat, grows = [10.0, 10.0], [10.0, 30.0]
    slopes = {"naive": 7.0, "ACA": 2.0, "MALI": 0.0}
    assert memory_verdict({"MALI": flat, "adjoint": flat, "ACA": grows, "naive": grows}, slopes) == HOLDS
    assert memory_verdict({"MALI": grows, "adjoint": flat, "ACA": grows, "naive": grows}, slopes) == IN_PART
    assert memory_verdict({"MALI": grows, "adjoint": grows, "ACA": flat, "naive": flat}, slopes) == NOT


def test_memory_of_flows_by_tolerance_is_judged():
    def judged(**by: list[float]) -> str:
        fits = {
            f"{m} / {t:g}": {"bytes_per_image": x, "largest_batch": 1}
            for m, xs in by.items()
            for t, x in zip((0.1, 0.01), xs, strict=True)
        }
        config = {"methods": list(by), "tolerances": [0.1, 0.01]}
        record = Record("flow_memory", "cpu", config, "", {"fits": fits})
        return flow_memory.memory_does_not_depend_on_the_tolerance(record, "x").verdict

    assert judged(mali=[1.0, 1.0], aca=[1.0, 2.0], naive=[1.0, 9.0]) == HOLDS
    assert judged(mali=[1.0, 1.0], aca=[1.0, 1.1], naive=[1.0, 9.0]) == IN_PART
    assert judged(mali=[1.0, 2.0], aca=[1.0, 1.0], naive=[1.0, 1.0]) == NOT


# Theorems


def theorems(**changes: Any) -> dict[str, str]:
    areas = {"0.25": 9.4, "0.7": 1.3, "1": 0.0} | changes.get("areas", {})
    regions: dict[str, Any] = {
        eta: {"area": x, "growth at i/2": 1.0 if eta == "1" else 1.1} | ({} if eta == "1" else {"area / ellipse": 1.0})
        for eta, x in areas.items()
    }
    regions["1"]["growth at i/2"] = changes.get("growth", 1.0)
    local = {"1": {"slopes": {"z": changes.get("z", 3.0), "v": changes.get("v", 2.0)}}}
    local["0.95"] = {"slopes": {"z": changes.get("damped z", 2.0), "v": changes.get("damped v", 1.0)}}
    missed, worst = changes.get("missed", 1e-3), changes.get("worst", 1e-14)
    tolerances = {
        "MLP": {
            "adjoint": {"0.1": {"back": missed}, "0.01": {"back": 1e-3}},
            "MALI as published": {"0.1": {"worst": worst}, "0.01": {"worst": 1e-14}} if worst else {"0.1": {}},
            "MALI": {"0.1": {"worst": 1e-14}},
        }
    }
    results = {
        "regions": regions, "eigenvalues": {"deviation": changes.get("deviation", 1e-15), "samples": 9},
        "orders": {"local": local, "global": local, "gradient": {}},
        "reverse": {"tolerances": tolerances, "equal steps": {"RK4": {"slopes": {"back": 5.0}}}},
    }  # fmt: skip
    return {claim.id: claim.verdict for claim in (judge(results, "x") for judge in theory.THEOREMS)}


def test_theorems_hold_if_numbers_are_theirs():
    assert set(theorems().values()) == {HOLDS}


@pytest.mark.parametrize(
    ("changes", "id_", "word"),
    [
        ({"missed": 0.0}, "reverse-solve", IN_PART),
        ({"worst": 1e-3}, "reconstruct", IN_PART),
        ({"worst": None}, "reconstruct", NOT),
        ({"z": 2.0}, "order", IN_PART),
        ({"z": 2.0, "v": 3.0}, "order", NOT),
        ({"deviation": 1.0}, "stability", IN_PART),
        ({"areas": {"0.25": 0.0, "0.7": 0.0, "1": 1.0}, "deviation": 1.0}, "stability", NOT),
        ({"areas": {"0.7": 20.0}}, "stability-shrinks", IN_PART),
        ({"areas": {"0.25": 1.0, "0.7": 2.0, "1": 3.0}}, "stability-shrinks", NOT),
        ({"growth": 1.1}, "boundary", IN_PART),
        ({"growth": 1.1, "areas": {"1": 1.0}}, "boundary", NOT),
        ({"damped z": 3.0}, "order-damped", IN_PART),
        ({"damped z": 3.0, "damped v": 2.0}, "order-damped", NOT),
    ],
)
def test_theorems_can_fail(changes, id_, word):
    assert theorems(**changes)[id_] == word


# The checklist, held against the claims that chapters make of the committed records


@pytest.fixture(scope="module")
def chapters() -> list[report.Chapter]:
    return report.chapters()


@pytest.fixture(scope="module")
def rows(chapters) -> list[report.Row]:
    return report.judged(chapters)


def test_every_sentence_of_the_checklist_is_judged_said_elsewhere_or_named_as_not_testable(rows):
    judged = {row.sentence.id for row in rows if row.claims}
    for sentence in SENTENCES:
        reasons = [sentence.id in judged, bool(sentence.same_as), bool(sentence.not_testable)]
        assert sum(reasons) == 1, sentence.id
        assert all(other in judged or BY_ID[other].not_testable for other in sentence.same_as), sentence.id
    assert len(BY_ID) == len(SENTENCES) >= 60


def test_every_claim_has_a_rule_numbers_and_records(rows):
    for row in rows:
        for claim in row.claims:
            assert claim.rule and any(character.isdigit() for character in claim.numbers), claim
            assert claim.records and all((report.ROOT / path).exists() for path in claim.records), claim


def test_every_section_of_the_paper_with_results_is_in_the_checklist():
    places = " ".join(sentence.where for sentence in SENTENCES)
    for place in ("Abstract", "Section 1", "Theorem 2.1", "Theorem 3.1", "Theorem 3.2", "Section 6", "Appendix A.4"):
        assert place in places
    assert all(f"Table {n}" in places for n in range(1, 8)) and all(f"Figure {n}" in places for n in (4, 5, 6))


def test_the_page_begins_with_a_count_of_verdicts(chapters, rows):
    counts = report.counted(rows)
    assert sum(counts.values()) == len(rows)
    text = report.markdown(chapters)
    assert f"Of {len(rows)} sentences" in text[:1000]


# Records and the code of today


def test_stale_records_are_marked():
    one = found("toy", {}, {"cells": {}})[0]
    entry = {"record": identity(one.record), "verdict": "differs", "difference": "x was 1, is 2"}
    entry |= {"commit": "abc"}
    checks = {"toy/cpu.json": entry}
    stale = replays.stale([one], checks)
    assert stale == {one.path: "x was 1, is 2"}
    counts, differing = replays.tables([one], checks)
    assert [str(x) for x in counts.rows[0]] == ["toy", "1", "0", "0", "0", "1", "0", "0"]
    assert [str(x) for x in differing.rows[0]] == ["toy/cpu", "None", "abc", "x was 1, is 2"]
    table = report.Table("x", "", ("a",), [[report.Cell("1", one.path)]], "A note.")
    assert report.marked(table, stale).notes.startswith("A note. Stale: 1 of 1 records")
    assert report.marked(table, {}) == table
    another = {"toy/cpu.json": {**entry, "record": "of another record"}}
    assert replays.stale([one], another) == {}
