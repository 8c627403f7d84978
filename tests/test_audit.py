"""The audit: its numbers are those of `solve`, its advice is that of its numbers, and it leaves no trace."""

import copy
import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from problems import LORENZ, MLP, VAN_DER_POL, mlp_weights, tanh_mlp
from torch import Tensor, nn

import torchmali as tm
from torchmali.__main__ import main
from torchmali.audit import HEADS, METHODS, Audit, Method, Row, audit
from torchmali.measure import peak_bytes

ROOT = Path(__file__).parent.parent
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
    assert found.rtol == 1e-3
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
    assert found.best is None and found.advice == "No method can be advised: there is no reference gradient."
    assert all("t = 0." in row.failure for row in found.rows)


@pytest.mark.slow
def test_the_reference_of_a_chaotic_problem_says_how_little_it_is_worth():
    found = audit(LORENZ.f, LORENZ.y0, (0.0, 40.0), methods=["aca"])  # e^36 times the round-off
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
    errors = [row.error for row in table.rows]
    limit = min(0.1, 10 * max(1e-3, min(errors)))
    good = [row for row in table.rows if row.error <= limit]
    assert table.uncertainty < 1e-4 < limit, "these problems have a reference"
    best = re.match(r"Use (\w+) \((.*?)\), .*?: error (\S+), (\S+ k?B)", table.advice)
    assert best and good
    row = table[best[1]]
    assert row is table.best and row in good
    assert row.seconds == min(other.seconds for other in good), "all are small here: the fastest"
    size = f"{row.peak_bytes} B" if row.peak_bytes < 1e3 else f"{row.peak_bytes / 1e3:.1f} kB"
    assert best.groups()[1:] == (str(row.method), f"{row.error:.1e}", size)

    factors = {name: float(factor) for name, factor in re.findall(r"(\w+) is (\d+) times less accurate", table.advice)}
    aca = table["aca"]
    for row in table.rows:
        wrong = max(3 * aca.error, 1e-3) < row.error < math.inf and aca in good
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
    return Row(name, METHODS[name], error, megabytes * 1e6, seconds, tm.Stats(**stats))  # type: ignore[arg-type]


def test_where_memory_is_small_the_fastest_is_advised():
    found = invented(row("naive", 1e-4, 9, 1.0), row("aca", 1e-4, 5, 1.5), row("mali", 2e-3, 1, 2.0))
    assert found.advice == (
        "Use naive (Dopri5 + Naive), the fastest that is accurate enough: error 1.0e-04, 9.0 MB, which fits anywhere; "
        "should it grow, mali takes 1.0 MB at error 2.0e-03."
    )


def test_where_memory_is_large_a_lean_one_is_advised():
    rows = row("naive", 1e-4, 800, 1.0), row("aca", 1e-4, 90, 1.5), row("mali", 2e-3, 10, 9.0)
    found = invented(*rows, row("mali4", 1e-4, 16, 2.0))
    assert found.advice == (
        "Use mali4 (ALF(order=4) + MALI), accurate enough, fast and lean: error 1.0e-04, 16.0 MB; naive takes 50.0 "
        "times the memory and 0.5 times the time."
    )
    assert invented(*rows).best is rows[2], "twice as much memory as the leanest is the most that is spent on time"
    small = invented(row("naive", 1e-4, 8, 2.0), row("mali", 1e-4, 1, 1.0))
    assert small.advice.endswith("accurate enough: error 1.0e-04, 1.0 MB."), "8 MB would not hurt either"


def test_an_inaccurate_gradient_is_not_advised_however_cheap():
    wrong, right = row("adjoint", 2e-2, 0.1, 0.1), row("aca", 2e-4, 5, 1.5)
    found = invented(wrong, right)
    assert found.limit == 1e-2 and found.good == [right]
    assert found.advice.endswith("; adjoint is 100 times less accurate than aca.")
    within_rtol = invented(row("adjoint", 5e-4, 0.1, 0.1), row("aca", 5e-5, 5, 1.5))
    assert within_rtol.best is within_rtol["adjoint"] and "less accurate" not in within_rtol.advice


def test_an_error_that_the_reference_cannot_resolve_gives_no_factor():
    found = invented(row("adjoint", 9e-3, 5, 2.0), row("aca", 2e-4, 5, 1.5), uncertainty=1e-3)
    assert found.best is found["aca"] and "less accurate" not in found.advice


def test_what_mali_could_not_rebuild_is_said_and_exact_is_named():
    drifted = row("mali", 1e-3, 3, 2.0, reconstruction_error=0.04, n_reruns=2)
    bits = row("exact", 1e-3, 3, 1.0, reconstruction_error=0.0)
    said = "round-off grew, mali rebuilt its states to 4.0e-02 only and solved 2 of its segments again"
    assert invented(drifted, bits).advice.endswith(f"; {said}, where exact rebuilds every bit.")
    assert invented(drifted, bits._replace(error=0.5)).advice.endswith(f"; {said}."), "no remedy if it is wrong"


def test_there_is_no_advice_where_no_number_supports_one():
    none = "No method can be advised: "
    far = invented(row("aca", 0.4, 1, 1.0), row("mali", 0.7, 1, 1.0))
    assert far.advice == f"{none}aca is closest with error 4.0e-01; tighten rtol and atol."
    chaotic = invented(row("aca", 1e-3, 1, 1.0), uncertainty=0.5)
    assert chaotic.best is None and chaotic.advice == (
        f"{none}gradients of this problem depend on the solver's rounding, the reference itself is only good to "
        "5.0e-01."
    )
    assert invented(Row("aca", METHODS["aca"], failure="No.")).advice == f"{none}all failed."


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


def test_a_state_that_does_not_fit_the_integer_grid_fails_in_its_row_alone():
    y0 = torch.tensor([1.0, 1e-5])
    found = audit(decay, y0, (0.0, 1.0), methods=("exact", "mali"))
    assert "exact   ALF + MALI(exact=True)  failed: Leaf 0 of the state mixes scales\n" in str(found)
    assert found["mali"].error < 1e-2


def test_warnings_of_a_method_are_notes_on_its_row():
    damped = {"damped": (tm.ALF(eta=0.9), tm.FixedStep(0.05), tm.MALI(checkpoint_every=None, unsafe_damping=True))}
    found = audit(decay, Y0, (0.0, 1.0), methods=damped | {"aca": METHODS["aca"]})
    assert len(found["damped"].notes) == 1 and not found["aca"].notes
    assert re.search(r"\^ The inverse of ALF\(eta=0.9.*\) amplifies round-off 1.25 times per step\n", str(found))


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (tm.InvalidState, lambda: audit(decay, Y0.half(), (0.0, 1.0))),
        (tm.InvalidState, lambda: audit(decay, [1.0], (0.0, 1.0))),
        (tm.InvalidTimes, lambda: audit(decay, Y0, (0.0, 0.0))),
        (tm.InvalidField, lambda: audit(lambda t, y: y[:2], Y0, (0.0, 1.0))),
        (tm.InvalidOption, lambda: audit(lambda t, y, a: -y, Y0, (0.0, 1.0), args=[1.0])),  # type: ignore[arg-type]
        (tm.InvalidOption, lambda: audit(decay, Y0, (0.0, 1.0), params=Y0)),
        (tm.InvalidOption, lambda: audit(decay, Y0, (0.0, 1.0), rtol=-1.0)),
        (tm.InvalidOption, lambda: audit(decay, Y0, (0.0, 1.0), lambda y: y[-1])),
        (tm.InvalidOption, lambda: audit(decay, Y0, (0.0, 1.0), lambda y: 1.0)),  # type: ignore[arg-type]
        (tm.InvalidOption, lambda: audit(decay, Y0, (0.0, 1.0), methods=[])),
        (tm.InvalidOption, lambda: audit(decay, Y0, (0.0, 1.0), methods={"mine": (tm.ALF(), tm.MALI())})),
        (tm.Incompatible, lambda: audit(decay, Y0, (0.0, 1.0), methods={"mine": (tm.Dopri5(), None, tm.MALI())})),
        (tm.UnknownMethod, lambda: audit(decay, Y0, (0.0, 1.0), methods="mali8")),
        (tm.NonRepeatableField, lambda: audit(lambda t, y: -y * next(OTHER), Y0, (0.0, 1.0))),
        (ZeroDivisionError, lambda: audit(lambda t, y: y / (1 // 0), Y0, (0.0, 1.0))),
    ],
)
def test_wrong_input_raises_what_it_raises_in_solve(error, call):
    with pytest.raises(error) as raised:
        call()
    assert raised.type is error and str(raised.value)


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
    assert lines[2].split() == "naive Dopri5 + Naive 0 14.2 kB 0 0 1.5 ms - -".split()
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
    assert re.findall(r"<td.*?>(.*?)</td>", second) == found.rows[0].lines()[0]
    assert re.findall(r"<td.*?>(.*?)</td>", third) == ["&lt;b&gt;", "ALF(order=4) + MALI", "failed: 5 &lt; 6"]
    assert f'colspan="{len(HEADS) - 2}"' in third and "<b>" not in text and found.advice in text


# ----------------------------------------------------------------------------------------------------- the command line

PROBLEM = """
import torch

def decay(t, y):
    return -y

def good():
    return decay, torch.ones(3, dtype=torch.float64), [0.0, 1.0], lambda y: y[-1].sum()

def short():
    return decay, torch.ones(3)

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
    assert "up to 1.0e-03 is good enough" in out, "10 rtol"
    assert "<td>Dopri5 + ACA</td>" in (here / "table.html").read_text()


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        ("audited_problem", "names no function: write MODULE:FUNCTION"),
        ("audited_problem:goo", "audited_problem has no function 'goo'; it has decay, good, short, lonely, half."),
        ("audited_problem:short", "returned 2 values, but it must return (func, y0, t) or (func, y0, t, loss)"),
        ("audited_problem:lonely", "returned a function, but it must return (func, y0, t)"),
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


@pytest.mark.parametrize(("command", "says"), [([], "audit "), (["audit"], "MODULE:FUNCTION")])
def test_help_is_everywhere(capsys, command, says):
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0 and says in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- the page


def test_the_page_shows_the_record():
    record = json.loads((ROOT / "benchmarks" / "records" / "audit.json").read_text())
    page = (ROOT / "docs" / "audit.md").read_text()
    tables = re.findall(r"```text\n(.*?)\n```", page, re.S)
    assert tables == [found["text"] for found in record["results"].values()]
    assert record["header"]["command"] in page
