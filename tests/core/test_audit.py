"""The audit: its numbers are those of `solve`, its advice is that of its numbers, and it leaves no trace."""

import copy
import io
import itertools
import math
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from problems import LORENZ, MLP, VAN_DER_POL, mlp_weights, tanh_mlp
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import torchmali as tm
from torchmali.__main__ import main
from torchmali.auditing import HEADS, METHODS, Audit, Method, Row, audit
from torchmali.auditing.modules import own_method, own_solver, problem_of
from torchmali.auditing.show import cells
from torchmali.auditing.timing import MARGIN, Band, compare
from torchmali.measure import peak_bytes
from torchmali.nn import (
    CNF,
    ODERNN,
    ExactTrace,
    LinearControl,
    NeuralCDE,
    ODEBlock,
    ODERNNCell,
    linear_coeffs,
    natural_cubic_coeffs,
)

FEW = ("aca", "mali")
Y0 = torch.linspace(0.5, 1.5, 4, dtype=torch.float64)
OTHER = itertools.cycle((1.0, 2.0, 4.0))  # never the same twice in a row, nor with one between


def decay(t: Tensor, y: Tensor) -> Tensor:
    return -y


def capped(*names: str, max_steps: int = 400) -> dict[str, Method]:
    """Methods that give up early: some cannot do what is asked of them here."""
    controller = tm.AdaptiveStep(1e-3, 1e-4, max_steps=max_steps)
    return {name: METHODS[name]._replace(controller=controller) for name in names or METHODS}


# --------------------------------------------------------------------------------------------------------- the numbers


def test_the_rows_are_what_solve_gives():
    found = audit(decay, Y0, (0.0, 1.0), methods=("aca", "adjoint", "mali4"))
    truth = 2 * Y0 * math.exp(-2.0)  # d/dy0 of sum (y0 e^-1)^2
    assert found.uncertainty < 1e-8
    for row in found.rows:
        method = METHODS[row.name]

        def run(method: Method = method) -> tuple[Tensor, tm.Stats]:
            y0 = Y0.clone().requires_grad_()
            solution = tm.solve(decay, y0, (0.0, 1.0), solver=method.solver, gradient=method.gradient)
            return torch.autograd.grad(solution.y[-1].square().sum(), y0)[0], solution.stats

        g, stats = run()
        assert row.error == pytest.approx((g - truth).norm().item() / truth.norm().item(), rel=1e-3)
        assert row.stats == stats
        assert row.peak_bytes == pytest.approx(peak_bytes(run), rel=0.1)  # its own graph is a little different
        assert 0 < row.seconds < math.inf and not row.failure
    assert found["mali4"] is found.rows[2]


def test_the_error_is_that_of_y0_args_and_parameters_together():
    a, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (0.3, -0.5))
    found = audit(lambda t, y, a: (a + b) * y, Y0, (0.0, 1.0), lambda y: y[-1].sum(), args=(a,), methods=["mali"])
    y0 = Y0.clone().requires_grad_()
    y = tm.solve(lambda t, y, a: (a + b) * y, y0, (0.0, 1.0), args=(a,)).y[-1].sum()
    g = torch.cat([x.reshape(-1) for x in torch.autograd.grad(y, (y0, a, b))])
    growth = math.exp(-0.2)  # dL/dy0 = e^(a + b), dL/da = dL/db = sum(y0) e^(a + b)
    truth = growth * torch.cat([torch.ones_like(Y0), Y0.sum().expand(2)])
    assert found["mali"].error == pytest.approx(((g - truth).norm() / truth.norm()).item(), rel=1e-6)


def test_trees_tolerances_by_leaf_and_times_that_are_tensors_are_understood():
    y0 = {"x": Y0, "v": (Y0.float(),)}
    times = torch.linspace(0, 1, 4, requires_grad=True)
    rtol = {"x": 1e-3, "v": (math.inf,)}
    found = audit(lambda t, y: {"x": -y["x"], "v": (y["v"][0],)}, y0, times, methods=FEW, rtol=rtol)
    assert found.tolerance == 1e-3
    assert all(row.error < 1e-2 for row in found.rows)


def test_parameters_may_be_listed_in_any_iterable():
    weights = [torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)]
    found = audit(lambda t, y: y * weights[0], Y0, (0.0, 1.0), params=iter(weights), methods=["aca"])
    assert found["aca"].error < 1e-2 and not found["aca"].notes


def test_methods_may_be_ones_own():
    mine = {
        "mine": (tm.RK4(), tm.FixedStep(0.1), tm.ACA()),
        "tight": (tm.ALF(), tm.AdaptiveStep(1e-5, 1e-6), tm.MALI()),
    }
    found = audit(decay, Y0, (0.0, 1.0), methods={"mali": METHODS["mali"], **mine})
    assert [row.name for row in found.rows] == ["mali", "mine", "tight"]
    assert found["mine"].stats.n_steps == 10
    assert found["tight"].error < found["mali"].error / 10


# ------------------------------------------------------------------------------------------------------- the reference


class Field32(nn.Module):
    """A float32 network with a float32 constant that is no buffer, and memory that it fills itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = torch.linspace(0.5, 1.5, 4)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        out = torch.zeros(3, 4)
        out[:] = self.net(y.float()) * self.scale + torch.tensor(0.1)
        return out


def test_the_reference_of_a_float32_problem_is_that_of_its_float64_twin():
    f, y0 = Field32(), torch.linspace(-1, 1, 12).view(3, 4)
    found = audit(f, y0, (0.0, 1.0), methods=FEW)
    assert found.reference.startswith("float64") and found.uncertainty < 1e-8

    def twin(t: Tensor, y: Tensor) -> Tensor:
        return net(y) * f.scale.double() + torch.tensor(0.1).double()

    net, y64 = copy.deepcopy(f.net).double(), y0.double().requires_grad_()
    tight = tm.AdaptiveStep(1e-10, 1e-12)
    y = tm.solve(twin, y64, (0.0, 1.0), solver=tm.Dopri8(), controller=tight, gradient=tm.Naive()).y[-1]
    truth = torch.autograd.grad(y.square().sum(), (y64, *net.parameters()))
    y32 = y0.clone().requires_grad_()
    y = tm.solve(f, y32, (0.0, 1.0), solver=tm.Dopri5(), gradient=tm.ACA()).y[-1]
    grads = torch.autograd.grad(y.square().sum(), (y32, *f.parameters()))
    a, b = (torch.cat([g.double().flatten() for g in gs]) for gs in (grads, truth))
    # Both are at the level of float32's rounding, whose last bits may differ between two runs.
    assert found["aca"].error == pytest.approx(((a - b).norm() / b.norm()).item(), rel=0.1)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, w):
        ctx.save_for_backward(y, w)
        return y * w

    @staticmethod
    def backward(ctx, *grads):
        y, w = ctx.saved_tensors
        return grads[0] * w, grads[0] * y


def only_float32(t: Tensor, y: Tensor) -> Tensor:
    if y.dtype != torch.float32:
        raise ValueError("float32, please")
    return -y


@pytest.mark.parametrize("hides", ["refuses float64", "holds its parameter where no operation shows it"])
def test_an_f_that_knows_no_float64_has_a_float32_reference_and_says_so(hides):
    w = torch.full((4,), -1.0, requires_grad=True)
    f = only_float32 if hides == "refuses float64" else lambda t, y: Scaled.apply(y, w)
    found = audit(f, Y0.float(), (0.0, 1.0), methods=FEW)
    assert "reference: float32" in str(found).replace("\n", " ")
    assert 1e-9 < found.uncertainty < 1e-4
    assert found["aca"].error < 1e-2 and found["mali"].error < 1e-2


def test_without_a_reference_there_is_no_advice():
    found = audit(lambda t, y: y**2, Y0.abs() + 1, (0.0, 3.0), methods=FEW)  # infinite at t = 1/y0
    assert math.isinf(found.uncertainty) and found.reference.startswith("none (")
    assert found.best is None and found.advice == "No method can be advised: all failed."
    assert all("t = 0." in row.failure for row in found.rows)
    nan = [Row(name, METHODS[name], math.nan, 1e3, 1.0) for name in FEW]
    found = Audit(nan, 1e-3, "none (No.)", math.inf)
    assert found.best is None and found.advice == "No method can be advised: there is no reference gradient."
    assert " - " in str(found) and "nan" not in str(found)


@pytest.mark.slow
def test_the_reference_of_a_chaotic_problem_says_how_little_it_is_worth():
    found = audit(LORENZ.f, LORENZ.y0, (0.0, 48.0), methods=["aca"])  # e^43 times the round-off
    assert found.uncertainty > 0.1 and found.best is None
    assert f"the reference itself is only good to {found.uncertainty:.1e}" in found.advice


# ---------------------------------------------------------------------------------------------------------- the advice


@pytest.fixture(scope="module", params=["mlp", "van_der_pol", "lorenz"])
def table(request) -> Audit:
    if request.param == "mlp":
        weights = tuple(torch.from_numpy(w).requires_grad_() for w in mlp_weights())
        return audit(tanh_mlp, MLP.y0, MLP.span, args=weights)
    if request.param == "van_der_pol":
        return audit(VAN_DER_POL.f, VAN_DER_POL.y0, (0.0, 4.0), methods=capped("aca", "adjoint", "mali", "mali4"))
    return audit(LORENZ.f, LORENZ.y0, (0.0, 2.0), methods=capped("aca", "adjoint", "mali4"))


def test_the_advice_agrees_with_the_table(table: Audit):
    assert table.tolerance == 1e-3 and table.uncertainty < 1e-5, "these problems have a reference"
    good = [row for row in table.rows if row.error <= 1e-3 - table.uncertainty]
    assert table.good == good
    if good:
        best = re.match(r"Use (\w+) \((.*?)\), .*?: error (\S+), (\S+ k?B)", table.advice)
        assert best
        row, names = table[best[1]], re.search(r"; ([\w, ]+) tie, ", table.advice)
        tied = [table[name] for name in re.split(", | and ", names[1])] if names else [row]
        assert row is table.best and tied == table.tied and all(other in good for other in tied)
        assert min(good, key=lambda other: other.seconds) in tied, "all are small here: the fastest, or one that ties"
        assert row.peak_bytes == min(other.peak_bytes for other in tied)
        size = f"{row.peak_bytes} B" if row.peak_bytes < 1e3 else f"{row.peak_bytes / 1e3:.1f} kB"
        assert best.groups()[1:] == (str(row.method), f"{row.error:.1e}", size)
    else:
        closest = min(table.rows, key=lambda row: row.error)
        start = "No method is accurate to 1.0e-03, the tolerance asked for: "
        assert table.advice.startswith(f"{start}{closest.name} is closest with error {closest.error:.1e}; tighten rtol")

    factors = {name: float(factor) for name, factor in re.findall(r"(\w+) is (\d+) times less accurate", table.advice)}
    aca = table["aca"]
    for row in table.rows:
        wrong = max(3 * aca.error, 1e-3) < row.error < math.inf and aca.error < 0.1
        assert (row.name in factors) == (wrong and isinstance(row.method.gradient, tm.Adjoint))
    assert all(factor == round(table[name].error / aca.error) for name, factor in factors.items())

    renewals = max(row.stats.n_refreshes for row in table.rows)
    said = re.search(r"f contracts, (\w+) renewed v (\d+) times", table.advice)
    assert (said is not None) == (renewals >= 3)
    assert said is None or table[said[1]].stats.n_refreshes == int(said[2]) == renewals

    drift = max(row.stats.reconstruction_error or 0 for row in table.rows)
    again = max(row.stats.n_reruns for row in table.rows)
    assert ("round-off grew" in table.advice) == (drift > 1e-3 or again > 0)


def test_problems_that_contract_are_told_from_those_that_do_not():
    contracting = audit(decay, Y0, (0.0, 10.0), methods=["mali"])  # by e^10
    smooth = audit(decay, Y0, (0.0, 1.0), methods=["mali"])
    assert "f contracts" in contracting.advice and "f contracts" not in smooth.advice


def invented(*rows: Row, uncertainty: float = 1e-9) -> Audit:
    return Audit(list(rows), 1e-3, "float64", uncertainty)


def row(name: str, error: float, megabytes: float, seconds: float, **stats: float) -> Row:
    found = Row(name, METHODS[name], error, megabytes * 1e6, seconds, tm.Stats(**stats))  # type: ignore[arg-type]
    return found._replace(times=(seconds,) * 8)


def test_where_memory_is_small_the_fastest_is_advised():
    found = invented(row("naive", 1e-4, 9, 1.0), row("aca", 1e-4, 5, 1.5), row("mali", 2e-4, 1, 2.0))
    assert found.advice == (
        "Use naive (Dopri5 + Naive), the fastest that is accurate enough: error 1.0e-04, 9.0 MB, which fits anywhere; "
        "should it grow, mali takes 1.0 MB at error 2.0e-04."
    )


@pytest.mark.parametrize(
    ("seconds", "says"), [(1.0, "but less time"), (3.0, "and more time"), (2.1, "and ties in time")]
)
def test_where_memory_is_large_a_lean_one_is_advised(seconds, says):
    rows = row("naive", 1e-4, 800, seconds), row("aca", 1e-4, 90, 1.5), row("mali", 2e-4, 10, 9.0)
    found = invented(*rows, row("mali4", 1e-4, 16, 2.0))
    assert found.advice == (
        "Use mali4 (ALF(order=4) + MALI), the fastest that is accurate enough and lean: error 1.0e-04, 16.0 MB; naive "
        f"takes 50.0 times the memory {says}."
    )
    assert invented(*rows).best is rows[2], "twice as much memory as the leanest is the most that is spent on time"
    small = invented(row("naive", 1e-4, 8, 2.0), row("mali", 1e-4, 1, 1.0))
    assert small.advice.endswith("accurate enough: error 1.0e-04, 1.0 MB."), "8 MB would not hurt either"


def test_a_tie_is_said_and_goes_to_the_least_memory_and_then_to_the_first():
    rows = row("naive", 1e-4, 9, 1.00), row("aca", 1e-4, 5, 1.04), row("mali", 2e-4, 4, 2.0)
    found = invented(*rows)
    assert found.tied == list(rows[:2]) and found.best is rows[1]
    assert found.advice == (
        "Use aca (Dopri5 + ACA), accurate enough: error 1.0e-04, 5.0 MB; naive and aca tie, they take the same time "
        "within noise, and aca takes the least memory."
    )
    turned = invented(*(x._replace(seconds=y.seconds, times=y.times) for x, y in zip(rows, rows[1::-1], strict=False)))
    assert turned.advice == found.advice, "whichever of the two was the faster one"
    equal = invented(*(x._replace(peak_bytes=5e6) for x in rows))
    assert equal.best is equal.rows[0] and "and naive takes the least memory and comes first" in equal.advice


def test_a_difference_in_time_that_is_within_noise_is_a_tie():
    def noisy(name: str, *times: float) -> Row:
        return row(name, 1e-4, 1, sorted(times)[len(times) // 2])._replace(times=times)

    steady, shaken = (1.0, 1.1) * 5, (1.3, 2.0, 0.8, 1.3, 1.3, 0.9, 1.3, 3.0, 0.7, 1.3)
    assert len(invented(noisy("naive", *steady), noisy("aca", *shaken)).tied) == 2
    assert len(invented(noisy("naive", *steady), noisy("aca", *(1.3 * t for t in steady))).tied) == 1
    assert len(invented(noisy("naive", 1.0), noisy("aca", 2.0)).tied) == 2, "one run tells little"
    assert len(invented(noisy("naive", 1.0), noisy("aca", 4.0)).tied) == 1


def test_an_inaccurate_gradient_is_not_advised_however_cheap():
    wrong, right = row("adjoint", 2e-2, 0.1, 0.1), row("aca", 2e-4, 5, 1.5)
    found = invented(wrong, right)
    assert found.tolerance == 1e-3 and found.good == [right]
    assert found.advice.endswith("; adjoint is 100 times less accurate than aca.")
    within_rtol = invented(row("adjoint", 5e-4, 0.1, 0.1), row("aca", 5e-5, 5, 1.5))
    assert within_rtol.best is within_rtol["adjoint"] and "less accurate" not in within_rtol.advice


@pytest.mark.parametrize(("error", "factor"), [(1.1e-3, 2), (4e-3, 4), (4.2e-3, 5), (0.38, 400)])
def test_an_error_above_the_tolerance_is_never_accurate_enough(error, factor):
    found = invented(row("aca", error, 1, 1.0), row("mali", 2 * error, 1, 1.0))
    assert found.best is None and not found.good
    assert found.advice == (
        f"No method is accurate to 1.0e-03, the tolerance asked for: aca is closest with error {error:.1e}; tighten "
        f"rtol and atol about {factor} times."
    )


def test_the_remedy_fits_the_controller_and_the_dtype_of_the_closest():
    fixed = Row("mine", Method(tm.RK4(), tm.FixedStep(0.1), tm.ACA()), 0.016, 1e3, 1.0)
    assert invented(fixed).advice.endswith("; take steps about 2 times shorter."), "order 4"
    found = Audit([row("aca", 0.5, 1, 1.0)], 1e-4, "float64", 1e-9, eps=torch.finfo(torch.float32).eps)
    assert found.advice.endswith("; tighten rtol and atol about 5000 times and use a float64 state.")


def test_an_error_that_the_reference_cannot_resolve_gives_no_factor():
    found = invented(row("adjoint", 9e-3, 5, 2.0), row("aca", 2e-4, 5, 1.5), uncertainty=3e-4)
    assert found.best is found["aca"] and "less accurate" not in found.advice


def test_errors_below_the_uncertainty_are_marked_and_decide_nothing():
    errors = (1e-10, 1e-11, 9e-10)
    tables = []
    for chosen in itertools.permutations(errors):
        rows = [row(name, e, 5, 1.0) for name, e in zip(("aca", "adjoint", "mali"), chosen, strict=True)]
        tables.append(str(invented(*rows, uncertainty=1.2e-9)))
    assert len(set(tables)) == 1, "the numbers behind the marks make no difference"
    assert tables[0].count("< 1.2e-09") == 4 and "<: below what the reference can tell" in tables[0]
    assert "<: below" not in str(invented(row("aca", 1e-4, 5, 1.0)))


def test_what_the_reference_cannot_tell_to_be_accurate_is_not_called_so():
    rows = row("aca", 9e-4, 1, 1.0), row("mali", 2e-4, 1, 2.0)
    assert invented(*rows, uncertainty=2e-4).good == [rows[1]]
    unclear = invented(rows[0], uncertainty=2e-4)
    assert unclear.best is None and "aca is closest with error 9.0e-04" in unclear.advice
    only = invented(*rows, uncertainty=5e-3)
    assert only.advice == (
        "No method can be advised: the reference itself is only good to 5.0e-03, and the tolerance is 1.0e-03."
    )


def test_what_mali_could_not_rebuild_is_said_and_exact_is_named():
    drifted = row("mali", 1e-4, 3, 2.0, reconstruction_error=0.04, n_reruns=2)
    bits = row("exact", 1e-4, 3, 1.0, reconstruction_error=0.0)
    said = "round-off grew, mali rebuilt its states to 4.0e-02 only and solved 2 of its segments again"
    assert invented(drifted, bits).advice.endswith(f"; {said}, where exact rebuilds every bit.")
    assert invented(drifted, bits._replace(error=0.5)).advice.endswith(f"; {said}."), "no remedy if it is wrong"


def test_there_is_no_advice_where_no_number_supports_one():
    none = "No method can be advised: "
    chaotic = invented(row("aca", 1e-3, 1, 1.0), uncertainty=0.5)
    assert chaotic.best is None and chaotic.advice == (
        f"{none}gradients of this problem depend on the solver's rounding, the reference itself is only good to "
        "5.0e-01."
    )
    assert invented(Row("aca", METHODS["aca"], failure="No.")).advice == f"{none}all failed."


def test_the_advice_speaks_of_what_was_measured_and_lists_the_rest():
    late = [Row(name, METHODS[name], unmeasured="it takes more than its share") for name in ("adjoint", "exact")]
    found = Audit([row("aca", 1e-4, 5, 1.0), *late], 1e-3, "float64", 1e-9, max_seconds=60)
    assert found.best is found.rows[0]
    assert found.advice.endswith("5.0 MB; adjoint and exact were not measured within max_seconds = 60.")
    assert "exact    ALF + MALI(exact=True)  not measured: it takes more than its share\n" in str(found)
    found = Audit([row("aca", 1e-4, 5, 1.0), late[0]], 1e-3, "float64", 1e-9, max_seconds=60)
    assert found.advice.endswith("; adjoint was not measured within max_seconds = 60.")
    remedy = "within max_seconds = 60; raise it, or audit fewer samples"
    none = "No method can be advised: "
    found = Audit([*late, Row("mali", METHODS["mali"], failure="No.")], 1e-3, "none", math.inf, max_seconds=60)
    assert found.advice == f"{none}none of those that can be used was measured {remedy}."
    found = Audit([row("aca", math.nan, 5, 1.0)], 1e-3, "none", math.inf, True, 60)
    assert found.advice == f"{none}there is no reference gradient {remedy}."
    found = Audit([row("aca", 1e-3, 5, 1.0)], 1e-3, "float64", 0.3, True, 60)
    assert found.advice == f"{none}the reference itself is only good to 3.0e-01 {remedy}."


def test_what_the_module_uses_now_is_said_to_be_wrong_if_it_is():
    yours = Row("yours", Method(tm.ALF(), tm.FixedStep(0.25), tm.MALI()), 0.1, 1e6, 0.5)
    found = invented(yours, row("aca", 1e-4, 5, 1.0))
    assert found.advice.endswith("; yours has error 1.0e-01, above the tolerance of 1.0e-03.")
    assert invented(yours._replace(error=9e-4)).best == yours._replace(error=9e-4)


# ----------------------------------------------------------------------------------------------------------- the times


def test_the_band_of_ratios_is_wide_for_few_runs_and_holds_the_median_for_many():
    assert compare([2.0], [1.0]) == Band(2 / 3, 6.0)
    assert compare([2.0, 2.0], [1.0, 1.0]) == Band(1.0, 4.0)
    assert compare([2.0] * 4, [1.0] * 4) == Band(2 / 1.5, 3.0)
    assert compare([3.0] * 6, [1.0] * 6) == Band(3 / 1.2, 3 * 1.2)
    assert compare([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [1.0] * 8) == Band(1.0, 8.0)
    assert compare(range(1, 21), [1.0] * 30) == Band(4.0, 17.0), "the runs that have no partner do not count"
    assert compare([], [1.0]) == compare([math.inf], [1.0]) == Band(0.0, math.inf)
    # That 4 to 17 of 20 miss the median: 4 or fewer of 20 throws of a coin.
    assert (
        2 * sum(math.comb(20, k) for k in range(4)) / 2**20 < 0.01 < 2 * sum(math.comb(20, k) for k in range(5)) / 2**20
    )


def test_an_order_is_settled_if_it_is_clear_or_clearly_does_not_matter():
    assert Band(1.2, 3.0).is_slower and Band(1.2, 3.0).is_settled
    assert Band(0.2, 0.9).is_faster and Band(0.2, 0.9).is_settled
    same, open_one = Band(1 / MARGIN, MARGIN), Band(0.9, 1.3)
    assert same.is_settled and not same.is_faster and not same.is_slower
    assert not open_one.is_settled and not open_one.is_faster and not open_one.is_slower


class Clock:
    """A clock that evaluations of f alone move on: by a second each, times noise."""

    def __init__(self, monkeypatch, noise: float = 0.0, seed: int = 0):
        self.now, self.noise, self.random = 0.0, noise, random.Random(seed)
        info = SimpleNamespace(resolution=1e-9)
        fake = SimpleNamespace(perf_counter=self.read, thread_time=self.read, get_clock_info=lambda name: info)
        for name in ("budget", "measure"):
            monkeypatch.setattr(sys.modules[f"torchmali.auditing.{name}"], "time", fake)

    def read(self) -> float:
        return self.now

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        self.now += math.exp(self.random.gauss(0.0, self.noise))
        return -y


def test_rounds_end_as_soon_as_the_order_is_clear(monkeypatch):
    clock = Clock(monkeypatch)
    found = audit(clock.f, Y0, (0.0, 1.0), methods=("naive", "aca", "mali"), max_seconds=None, rtol=1e-2)
    naive, aca, mali = found.rows
    assert naive.seconds == naive.stats.n_evals_forward, "the clock counts evaluations"
    assert [len(row.times) for row in found.rows] == [5, 5, 5] or naive.seconds < aca.seconds / 1.2
    assert found.best is naive and "the fastest" in found.advice


def test_equal_times_are_found_to_be_a_tie(monkeypatch):
    clock = Clock(monkeypatch, noise=0.02)
    same = {name: METHODS["aca"] for name in ("one", "two")}
    found = audit(clock.f, Y0, (0.0, 1.0), methods={**same, "slow": METHODS["mali6"]}, max_seconds=None, rtol=1e-2)
    assert [len(row.times) >= 8 for row in found.rows] == [True, True, False], "runs are repeated where that matters"
    assert found.tied == found.rows[:2] and found.best is found.rows[0]
    assert "one and two tie, they take the same time within noise" in found.advice


@pytest.mark.parametrize("noise", [0.1, 2.0])
def test_the_advice_is_the_same_in_ten_noisy_runs_or_says_tie(monkeypatch, noise):
    said = []
    for seed in range(10):
        clock = Clock(monkeypatch, noise, seed)
        said.append(audit(clock.f, Y0, (0.0, 1.0), methods=("naive", "aca", "mali4"), max_seconds=None).advice)
    assert len({advice for advice in said if " tie" not in advice}) <= 1
    assert noise > 0.1 or all(advice == said[0] for advice in said)


def test_the_advice_is_the_same_in_ten_runs_on_this_machine_or_says_tie():
    said = [audit(decay, Y0, (0.0, 1.0), methods=("naive", "aca", "mali4")).advice for _ in range(10)]
    assert len({advice for advice in said if " tie" not in advice}) <= 1, said


# --------------------------------------------------------------------------------------------- the budget, the progress


def test_what_takes_too_long_is_listed_as_not_measured(monkeypatch):
    clock = Clock(monkeypatch)
    slow = Method(tm.RK4(), tm.FixedStep(1e-3), tm.ACA())
    methods = {"aca": METHODS["aca"], "slow": slow, "mali": METHODS["mali"]}
    found = audit(clock.f, Y0, (0.0, 1.0), methods=methods, max_seconds=4000.0)
    assert found["slow"].unmeasured and not found["slow"].failure
    assert found["aca"].is_measured and found["mali"].is_measured, "the others had their share"
    assert found.advice.startswith("Use ") and found.advice.endswith("slow was not measured within max_seconds = 4000.")
    assert clock.now < 4000.0 + 1


@pytest.mark.parametrize("max_seconds", [1.0, 20.0, 100.0, 300.0, 1000.0])
def test_an_audit_ends_in_time_whatever_it_is_at(monkeypatch, max_seconds):
    clock = Clock(monkeypatch)
    found = audit(clock.f, Y0, (0.0, 1.0), max_seconds=max_seconds)
    assert clock.now < max_seconds + 10, "4 evaluations test whether f is repeatable, one more is the last straw"
    assert len(found.rows) == len(METHODS) and str(found)
    assert not any(row.failure for row in found.rows)
    assert (found.best is not None) == any(row.error < 1e-3 for row in found.rows)
    if max_seconds < 10:
        assert found.advice == (
            "No method can be advised: none of those that can be used was measured within max_seconds = 1; raise it, "
            "or audit fewer samples."
        )


class Kinks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        self.n = 0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


def test_the_reference_of_a_field_with_kinks_is_bounded_work_and_says_how_good_it_is(monkeypatch):
    f, n_evals = Kinks(), []
    y0 = torch.randn(16, 16)
    found = audit(
        lambda t, y: n_evals.append(1) or f(t, y),
        y0,
        (0.0, 1.0),
        methods=["aca"],
        rtol=1e-2,
        atol=1e-3,
        max_seconds=None,
    )
    assert len(n_evals) < 50_000, "tolerances of 1e-10 would take steps without end"
    assert 1e-7 < found.uncertainty < 1e-2 and f"itself good to {found.uncertainty:.1e}" in found.caption


def test_progress_is_told_to_whom_it_may_concern(capsys, monkeypatch):
    def messages(progress):
        audit(decay, Y0, (0.0, 1.0), methods=FEW, progress=progress)
        return capsys.readouterr()

    assert messages(None) == messages(False) == ("", ""), "stderr is no terminal here"
    lines = messages(True).err.splitlines()
    assert all(re.fullmatch(r"audit: .*, \d+ of 60 s", line) for line in lines)
    assert [line for line in lines if line.startswith(("audit: aca, 1 of 2", "audit: mali, 2 of 2"))]
    heard: list[str] = []
    assert messages(heard.append) == ("", "") and len(heard) >= 5

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    messages(None)
    text = terminal.getvalue()
    assert "\n" not in text and "\raudit: mali, 2 of 2" in text, "one line"
    assert not text.split("\r")[-2].strip(), "which is empty in the end"


# -------------------------------------------------------------------------------------------------- failures and notes


def test_a_method_that_fails_is_a_row_that_says_why():
    def refuses_graphs(t: Tensor, y: Tensor) -> Tensor:
        if y.grad_fn is not None:
            raise RuntimeError("out of something: try less")
        return -y

    methods = {**capped("mali"), "short": METHODS["mali"]._replace(controller=tm.AdaptiveStep(max_steps=3))}
    found = audit(refuses_graphs, Y0, (0.0, 1.0), methods=methods | {"naive": METHODS["naive"]})
    assert found["mali"].failure == "" and found["mali"].stats.n_steps > 3
    assert "3 steps reached t = " in found["short"].failure
    lines = [line for line in str(found).splitlines() if line.startswith(("short", "naive"))]
    assert re.search(r"failed: 3 steps reached t = \S+ of 1$", lines[0]) and lines[1].endswith(
        "failed: out of something"
    )


def test_a_method_that_cannot_solve_the_problem_fails_in_its_row_alone():
    few = {"few": (tm.ALF(), tm.AdaptiveStep(1e-6, 1e-7, max_steps=3), tm.MALI()), "aca": METHODS["aca"]}
    found = audit(decay, torch.tensor([1.0, 0.5]), (0.0, 1.0), methods=few)
    assert "failed: 3 steps reached" in str(found) and found["few"].failure
    assert found["aca"].error < 1e-2


def test_warnings_of_a_method_are_notes_on_its_row():
    damped = {"damped": (tm.ALF(eta=0.9), tm.FixedStep(0.05), tm.MALI(checkpoint_every=None, unsafe_damping=True))}
    found = audit(decay, Y0, (0.0, 1.0), methods=damped | {"aca": METHODS["aca"]})
    assert len(found["damped"].notes) == 1 and not found["aca"].notes
    assert re.search(r"\^ The inverse of ALF\(eta=0.9.*\) amplifies round-off 1.25 times per step\n", str(found))


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (tm.InvalidStateError, lambda: audit(decay, Y0.half(), (0.0, 1.0))),
        (tm.InvalidStateError, lambda: audit(decay, [1.0], (0.0, 1.0))),
        (tm.InvalidTimesError, lambda: audit(decay, Y0, (0.0, 0.0))),
        (tm.SlopeMismatchError, lambda: audit(lambda t, y: y[:2], Y0, (0.0, 1.0))),
        (tm.InvalidOptionError, lambda: audit(lambda t, y, a: -y, Y0, (0.0, 1.0), args=[1.0])),  # type: ignore[arg-type]
        (tm.InvalidOptionError, lambda: audit(decay, Y0, (0.0, 1.0), params=Y0)),
        (tm.InvalidOptionError, lambda: audit(decay, Y0, (0.0, 1.0), rtol=-1.0)),
        (tm.InvalidOptionError, lambda: audit(decay, Y0, (0.0, 1.0), lambda y: y[-1])),
        (tm.InvalidOptionError, lambda: audit(decay, Y0, (0.0, 1.0), lambda y: 1.0)),  # type: ignore[arg-type]
        (tm.InvalidOptionError, lambda: audit(decay, Y0, (0.0, 1.0), methods=[])),
        (tm.InvalidOptionError, lambda: audit(decay, Y0, (0.0, 1.0), methods={"mine": (tm.ALF(), tm.MALI())})),
        (tm.IncompatibleError, lambda: audit(decay, Y0, (0.0, 1.0), methods={"mine": (tm.Dopri5(), None, tm.MALI())})),
        (tm.UnknownMethodError, lambda: audit(decay, Y0, (0.0, 1.0), methods="mali8")),
        (tm.NonRepeatableFieldError, lambda: audit(lambda t, y: -y * next(OTHER), Y0, (0.0, 1.0))),
        (tm.InvalidOptionError, lambda: audit(decay, Y0, (0.0, 1.0), max_seconds=0.0)),
        (tm.InvalidOptionError, lambda: audit(decay, Y0, (0.0, 1.0), max_seconds="1")),  # type: ignore[arg-type]
        (tm.InvalidOptionError, lambda: audit(decay, Y0, (0.0, 1.0), progress="yes")),  # type: ignore[arg-type]
        (tm.InvalidTimesError, lambda: audit(decay, Y0)),
        (tm.InvalidTimesError, lambda: audit(nn.Sequential(ODEBlock(decay)), Y0)),
        (tm.InvalidTimesError, lambda: audit(ODEBlock(decay), Y0, (0.0, 1.0))),
        (tm.InvalidOptionError, lambda: audit(ODEBlock(decay), Y0, params=[Y0])),
        (tm.InvalidOptionError, lambda: audit(ODEBlock(decay), Y0, args=[1.0])),  # type: ignore[arg-type]
        (tm.InvalidOptionError, lambda: audit(ODEBlock(decay), Y0, methods={"yours": METHODS["aca"]})),
        (tm.InvalidTimesError, lambda: audit(CNF(decay), Y0, (0.0, 1.0))),
        (tm.InvalidStateError, lambda: audit(CNF(decay), (Y0, Y0))),
        (tm.InvalidStateError, lambda: audit(CNF(decay), Y0)),
        (tm.InvalidStateError, lambda: audit(NeuralCDE(decay), [Y0])),
        (tm.InvalidOptionError, lambda: audit(NeuralCDE(decay), torch.ones(2, 4), args=(None,))),
        (tm.InvalidOptionError, lambda: audit(NeuralCDE(decay), torch.ones(2, 4), args=(None, Y0, Y0))),
        (tm.InvalidTimesError, lambda: audit(ODERNNCell(decay, nn.GRUCell(4, 4)), torch.ones(2, 4))),
        (
            tm.InvalidOptionError,
            lambda: audit(ODERNNCell(decay, nn.GRUCell(4, 4)), torch.ones(2, 4), (0.0, 1.0), args=(1,)),
        ),
        (ZeroDivisionError, lambda: audit(lambda t, y: y / (1 // 0), Y0, (0.0, 1.0))),
    ],
)
def test_wrong_input_raises_what_it_raises_in_solve(error, call):
    with pytest.raises(error) as raised:
        call()
    assert raised.type is error and str(raised.value)


# --------------------------------------------------------------------------------------------------- an f that repeats


def test_an_f_that_never_gives_the_same_twice_is_found_however_close_it_is():
    own = torch.Generator()
    noisy = {
        "a generator of its own": lambda t, y: -y * (1 + 1e-9 * torch.rand((), generator=own, dtype=y.dtype)),
        "another library": lambda t, y: -y * random.uniform(0.999999, 1.000001),
        "torch's generator": lambda t, y: -y * (1 + 1e-12 * torch.rand((), dtype=y.dtype)),
        "dropout": lambda t, y: nn.functional.dropout(-y, 1e-6),
    }
    for f in noisy.values():
        for _ in range(10):
            with pytest.raises(tm.NonRepeatableFieldError, match="two answers to the same t and y"):
                audit(f, Y0, (0.0, 1.0), methods=["aca"])


def test_an_f_that_is_not_a_number_somewhere_repeats_all_the_same():
    found = audit(lambda t, y: torch.where(y > 0, -y, math.nan), -Y0, (0.0, 1.0), methods=["aca"])
    assert "nan" in found["aca"].failure or "finite" in found["aca"].failure


# -------------------------------------------------------------------------------------------------- modules that solve


class Net(nn.Module):
    def __init__(self, n_in: int = 4, n_out: int = 4):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(n_in, 8), nn.Tanh(), nn.Linear(8, n_out)).double()

    def forward(self, t: Tensor, y: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        return scale * self.net(y)


class Matrix(Net):
    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return super().forward(t, y).unflatten(-1, (4, 3))


X = torch.linspace(-1, 1, 20, dtype=torch.float64).view(5, 4)
SERIES = torch.linspace(-1, 1, 5 * 6 * 3, dtype=torch.float64).sin().view(5, 6, 3)
KNOTS = torch.tensor([0.0, 0.5, 1.0, 1.5, 1.8, 2.0], dtype=torch.float64)
START = nn.Linear(3, 4).double()
MODULES = {
    "block": lambda: (ODEBlock(Net()), X, (), {}),
    "block with all outputs": lambda: (ODEBlock(Net(), (0.0, 0.4, 1.0), all_outputs=True), X, (0.5,), {}),
    "block of a tree": lambda: (
        ODEBlock(lambda t, y: {"a": -y["b"], "b": y["a"]}, controller=tm.AdaptiveStep(1e-4, 1e-5)),
        {"a": X, "b": X + 1},
        (),
        {},
    ),
    "flow": lambda: (CNF(Net()), X, (), {}),
    "flow with regularisers": lambda: (CNF(Net(), trace=ExactTrace(), kinetic=True, jacobian=True), X, (0.5,), {}),
    "cubic": lambda: (NeuralCDE(Matrix(4, 12), START), natural_cubic_coeffs(SERIES), (), {}),
    "cubic between times": lambda: (
        NeuralCDE(Matrix(4, 12), START, all_outputs=True),
        natural_cubic_coeffs(SERIES, KNOTS),
        (KNOTS,),
        {"t": (0.0, 0.7, 2.0)},
    ),
    "linear": lambda: (NeuralCDE(Matrix(4, 12), control=LinearControl), linear_coeffs(SERIES), (None, X), {}),
    "linear with all outputs": lambda: (
        NeuralCDE(
            Matrix(4, 12), START, control=LinearControl, all_outputs=True, controller=tm.AdaptiveStep(1e-4, 1e-5)
        ),
        linear_coeffs(SERIES, KNOTS),
        (KNOTS,),
        {},
    ),
}


def output(module: nn.Module, x, args: tuple, t=None):
    """What the module itself returns."""
    if isinstance(module, CNF):
        return module.log_prob(x, *args)
    if isinstance(module, NeuralCDE):
        knots, z0 = (*args, None, None)[:2]
        return module(x, knots, t=t, z0=z0)
    return module(x, *args)


def total(y) -> Tensor:
    return torch.stack([leaf.sin().sum() for leaf in tree_leaves(y)]).sum()


@pytest.mark.parametrize("kind", MODULES)
def test_the_problem_of_a_module_is_what_its_forward_pass_solves(kind):
    module, x, args, more = MODULES[kind]()
    torch.manual_seed(3)
    problem = problem_of(module, x, more.get("t"), total, args, None)
    solution = problem.solve(*own_method(module))  # type: ignore[misc]
    torch.manual_seed(3)
    truth = total(output(module, x, args, more.get("t")))
    assert problem.loss(solution.y) == truth
    assert solution.stats == module.last_stats


@pytest.mark.parametrize("kind", ["block with all outputs", "flow with regularisers", "cubic between times"])
def test_a_module_is_audited_with_what_it_uses_as_a_row(kind):
    module, x, args, more = MODULES[kind]()
    stats, generator = module.last_stats, torch.get_rng_state()
    found = audit(module, x, args=args, methods=["aca"], **more)
    assert [row.name for row in found.rows] == ["yours", "aca"]
    assert found["yours"].method == own_method(module)
    assert found.tolerance == getattr(module.controller, "rtol", 1e-3)
    assert found["aca"].error < 0.02 and found["yours"].stats.n_steps > 0 and not found["aca"].notes
    assert module.last_stats is stats and torch.equal(torch.get_rng_state(), generator)


def test_the_loss_of_a_flow_is_by_default_that_of_maximum_likelihood():
    flow = CNF(Net(), trace=ExactTrace())
    problem = problem_of(flow, X, None, None, (), None)
    assert problem.loss(problem.solve(*own_method(flow)).y) == -flow.log_prob(X).mean()  # type: ignore[misc]
    assert len(problem.with_leaves().gradients(*own_method(flow))[0]) == 1 + 4, "x and the parameters, not log_det = 0"


def test_a_flow_with_noise_has_one_noise_for_all_methods():
    found = audit(CNF(Net()), X, methods=FEW)
    assert all(row.error < 1e-3 for row in found.rows), "other noise is an error of about one"


@pytest.mark.slow
def test_a_linear_path_is_solved_from_knot_to_knot_by_every_method():
    module, x, args, more = MODULES["linear with all outputs"]()
    found = audit(module, x, args=args, methods={"loose": (tm.Dopri5(), tm.AdaptiveStep(1e-4, 1e-5), tm.ACA())})
    assert found.uncertainty < 1e-9, "solvers that cross the jumps of dX/dt, or look at them, would not get there"
    assert found["loose"].stats.n_steps >= 5 and found["yours"].error < 1e-4


def test_a_recurrent_network_is_audited_between_two_observations():
    cell = ODERNNCell(Net(), nn.GRUCell(3, 4).double())
    found = [audit(module, X, (0.0, 0.5), methods=["aca"]) for module in (cell, ODERNN(cell))]
    assert found[0]["yours"].error == found[1]["yours"].error < 0.02
    assert own_solver(ODERNN(cell)) is cell
    assert audit(cell, X, (0.0, 0.5), lambda h: h.sum(), methods=["aca"])["aca"].error < 1e-3


def test_wrong_combinations_say_what_to_do():
    with pytest.raises(
        tm.InvalidTimesError, match=r"It contains a ODEBlock: audit that, with what comes after it as loss"
    ):
        audit(nn.Sequential(ODEBlock(decay), nn.Linear(4, 1)), Y0)
    with pytest.raises(
        tm.InvalidTimesError, match=r"the ODEBlock has times of its own: leave t out, or give audit\(module"
    ):
        audit(ODEBlock(decay), Y0, (0.0, 1.0))
    with pytest.raises(tm.InvalidOptionError, match=r"give a positive number of seconds for the whole audit, or None"):
        audit(decay, Y0, (0.0, 1.0), max_seconds=-1.0)


# ------------------------------------------------------------------------------------------------------ leaves no trace


class Counting(nn.Module):
    """Changes its buffers and attributes at every call, in all the ways there are."""

    n_calls: Tensor
    total: Tensor

    def __init__(self):
        super().__init__()
        self.net, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("n_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(4))
        self.n = 0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.n += 1
        self.n_calls += 1
        self.total = self.total + y.detach().sum(0)
        self.last = y.detach()
        return self.norm(self.net(y))


@pytest.mark.parametrize("way", ["module", "closure", "method"])
def test_the_users_things_are_left_as_they_were(way):
    torch.manual_seed(0)
    f, head, y0 = Counting(), nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)), torch.randn(8, 4)
    funcs = {"module": f, "closure": lambda t, y: f(t, y), "method": f.forward}
    head[1].eval()
    f.net.weight.requires_grad_(False)
    f.net.bias.grad = torch.ones(4)
    modules = [m for root in (f, head) for m in root.modules()]
    states = [copy.deepcopy(m.state_dict()) for m in modules]
    attributes = [vars(m).copy() for m in modules]
    buffers = [dict(m.named_buffers(recurse=False)) for m in modules]
    generator, start = torch.get_rng_state(), y0.clone()
    found = audit(funcs[way], y0, (0.0, 0.5), lambda y: head(y[-1]).square().mean(), methods=FEW)
    assert found["aca"].stats.n_evals_forward > 0
    for m, state, attribute, buffer in zip(modules, states, attributes, buffers, strict=True):
        assert vars(m) == attribute
        assert all(torch.equal(x, state[name]) for name, x in m.state_dict().items())
        assert all(x is buffer[name] for name, x in m.named_buffers(recurse=False))
    assert f.n == 0 and not hasattr(f, "last")
    assert torch.equal(torch.get_rng_state(), generator) and torch.equal(y0, start) and not y0.requires_grad
    assert torch.equal(f.net.bias.grad, torch.ones(4)) and f.norm.weight.grad is None


def test_noise_in_the_loss_is_the_same_for_all_methods():
    drop = nn.Dropout(0.5)
    y0 = torch.ones(64, dtype=torch.float64)
    found = audit(decay, y0, (0.0, 1.0), lambda y: drop(y[-1]).sum(), methods=FEW)
    assert all(row.error < 1e-2 for row in found.rows), "another mask is an error of about one"


def test_an_audit_works_where_gradients_are_off():
    with torch.no_grad():
        assert audit(decay, Y0, (0.0, 1.0), methods=["aca"])["aca"].error < 1e-2


# ----------------------------------------------------------------------------------------------------------- the table


def test_the_text_is_aligned_and_holds_every_number():
    note = row("mali", 2.5e-3, 12.3, 2.5, n_evals_forward=9, n_evals_backward=8, reconstruction_error=5e-8)
    found = invented(note._replace(notes=("Mind this: it matters.",)), row("naive", 0.0, 0.0142, 0.0015))
    head, rule, *lines = str(found).splitlines()
    assert head.split() == " ".join(HEADS).split() and set(rule) == {"-"} and len(rule) == len(head)
    assert lines[0].split() == "mali ALF + MALI 2.5e-03 12.3 MB 9 8 2.50 s 5.0e-08 0".split()
    assert lines[1].strip() == "^ Mind this"
    assert lines[2].split() == "naive Dopri5 + Naive < 1.0e-09 14.2 kB 0 0 1.5 ms - -".split()
    for name in HEADS[2:]:
        end = head.index(name) + len(name)
        assert all(line[end - 1] != " " and line[end : end + 1] in ("", " ") for line in (lines[0], lines[2]))
    assert repr(found) == str(found) and found.advice in str(found).replace("\n", " ")


def test_the_html_has_a_cell_for_each_number_and_escapes_the_rest():
    failed = Row("<b>", METHODS["mali4"], failure="5 < 6. So there.")
    found = invented(row("mali", 2.5e-3, 12.3, 2.5), failed)
    text = found._repr_html_()
    first, second, third = re.findall(r"<tr>(.*?)</tr>", text)
    assert [cell for cell in re.findall(r"<td.*?>(.*?)</td>", first)] == HEADS
    assert re.findall(r"<td.*?>(.*?)</td>", second) == cells(found.rows[0], 1e-9)[0]
    assert re.findall(r"<td.*?>(.*?)</td>", third) == ["&lt;b&gt;", "ALF(order=4) + MALI", "failed: 5 &lt; 6"]
    assert f'colspan="{len(HEADS) - 2}"' in third and "<b>" not in text and found.advice in text


# ----------------------------------------------------------------------------------------------------- the command line

PROBLEM = """
import torch
import torchmali.nn

def decay(t, y):
    return -y

def good():
    return decay, torch.ones(3, dtype=torch.float64), [0.0, 1.0], lambda y: y[-1].sum()

def block():
    return {"func": torchmali.nn.ODEBlock(decay), "y0": torch.ones(3), "methods": ["aca"]}

def hurried():
    return {**block(), "max_seconds": 1e-6}

def short():
    return decay, torch.ones(3)

def single():
    return (decay,)

def strange():
    return {"f": decay, "y0": torch.ones(3)}

def partly():
    return {"y0": torch.ones(3)}

def lonely():
    return decay

def half():
    return decay, torch.ones(3).half(), [0.0, 1.0]
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    (tmp_path / "audited_problem.py").write_text(PROBLEM)
    (tmp_path / "broken_problem.py").write_text("import no_such_module_anywhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("place", ["audited_problem", "audited_problem.py"])
def test_the_command_audits_a_module_or_a_file(here, capsys, place):
    main(["audit", f"{place}:good", "--methods", "aca", "mali", "--rtol", "1e-4", "--html", "table.html"])
    out = capsys.readouterr().out
    assert out.startswith("method") and "Use aca (Dopri5 + ACA)" in out
    assert "up to 1.0e-04, the tolerance asked for" in out.replace("\n", " ")
    assert "<td>Dopri5 + ACA</td>" in (here / "table.html").read_text()


def test_the_command_takes_modules_a_time_limit_and_tells_of_its_progress(here, capsys):
    main(["audit", "audited_problem:block", "--max-seconds", "inf", "--progress"])
    out, err = capsys.readouterr()
    assert re.search(r"^yours +ALF \+ MALI", out, re.M) and re.search(r"^aca", out, re.M) and "mali4" not in out
    assert re.search(r"^audit: yours, 1 of 2, \d+ s$", err, re.M)
    for options in ([":block", "--max-seconds", "1e-6"], [":hurried"]):
        main(["audit", "audited_problem" + options[0], *options[1:], "--no-progress"])
        out, err = capsys.readouterr()
        assert "not measured" in out and not err


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ("audited_problem", "names no function: write MODULE:FUNCTION"),
        ("audited_problem:goo", "audited_problem has no function 'goo'; it has decay, good, block, "),
        ("audited_problem:short", "t is missing: func is a function"),
        ("audited_problem:single", "returned 1 values, but it must return the first arguments of audit, (func, y0, t)"),
        ("audited_problem:lonely", "returned a function, but it must return the first arguments of audit, (func, y0,"),
        ("audited_problem:strange", "returned a dict with ['f', 'y0'], but audit has no argument f; it has func, y0"),
        ("audited_problem:partly", "returned a dict with ['y0'], but audit needs func."),
        ("audited_problem:half", "y0 has dtype torch.float16"),
        ("no_such_problem:good", "There is no module 'no_such_problem' here."),
        ("torchmali.nowhere:good", "There is no module 'torchmali.nowhere' here."),
        ("nowhere.py:good", "There is no file nowhere.py."),
    ],
)
def test_the_command_says_what_is_wrong(here, capsys, problem, says):
    with pytest.raises(SystemExit) as left:
        main(["audit", problem])
    assert left.value.code == 2 and says in capsys.readouterr().err


def test_the_command_says_so_before_the_work_if_the_table_has_nowhere_to_go(here, capsys):
    with pytest.raises(SystemExit):
        main(["audit", "audited_problem:good", "--html", "nowhere/table.html"])
    assert "There is no folder nowhere" in capsys.readouterr().err


def test_what_the_module_itself_cannot_import_is_not_hidden(here):
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        main(["audit", "broken_problem:good"])


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([], "audit "),
        (["audit"], "MODULE:FUNCTION"),
        (["audit"], "--max-seconds SECONDS"),
        (["audit"], "--no-progress"),
    ],
)
def test_help_is_everywhere(capsys, command, says):
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0 and says in capsys.readouterr().out
