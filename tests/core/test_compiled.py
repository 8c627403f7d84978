"""Compiled solves: their numbers are those of eager ones, and nothing in them is ever out of date."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm
from tests.compiled_fields import MAKERS, REFUSED, Case, of, start
from torchmali.compiled import loops, solve, traits
from torchmali.compiled.faster import product, tanh
from torchmali.engine import FixedStepState, SolveStart

HOW: dict[str, Any] = {"controller": tm.FixedStep(0.1)}
CALM: dict[str, Any] = {"solver": tm.ALF(refresh="never")}  # for fields that contract a little


@pytest.fixture(autouse=True)
def nothing_remembered():
    solve.forget_loops()
    yield
    solve.forget_loops()


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops are traced, but not made machine code: everything else is as it is, and takes no seconds."""
    monkeypatch.setattr(loops, "lowered", lambda graph, examples: graph)


def leaves(y: Any) -> list[Tensor]:
    if isinstance(y, Tensor):
        return [y]
    return [x for part in (y.values() if isinstance(y, dict) else y) for x in leaves(part)]


def numbers(case: Case, times: list[float], **how: Any) -> tuple[list[Tensor | None], tm.Stats]:
    """y and all gradients of a solve, and its counts."""
    solution = tm.solve(case.f, case.y0, times, args=case.args, **{**HOW, **how})
    y = leaves(solution.y)
    loss = torch.stack([((i + 1) * torch.sin(x) * x).sum().double() for i, x in enumerate(y)]).sum()
    grads = torch.autograd.grad(loss, [*leaves(case.y0), *case.params], allow_unused=True)
    return [*[x.detach() for x in y], *grads], solution.stats


def assert_as_eager(case: Case, times: list[float], tolerance: float = 1e-12, **how: Any) -> None:
    found, stats = numbers(case, times, compile=True, **how)
    wanted, eager = numbers(case, times, **how)
    is_double = all(y is None or y.dtype == torch.float64 for y in wanted)
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        if x is not None and y is not None:
            assert (x - y).norm() <= (tolerance if is_double else 1e-5) * y.norm()
    counts = ("n_steps", "n_rejected", "n_evals_forward", "n_evals_backward", "n_vjps", "n_refreshes")
    assert [getattr(stats, name) for name in counts] == [getattr(eager, name) for name in counts]
    is_adaptive = {**HOW, **how}["controller"].adaptive
    for name in ("h_min", "h_max"):  # an adaptive h follows an error estimate, a small difference
        size = getattr(eager, name)
        assert abs(getattr(stats, name) - size) <= ((1e-7 if is_double else 1e-3) * size if is_adaptive else 0)


def n_new(run: Callable[[], Any]) -> int:
    """How often f was traced in run()."""
    before = solve.n_captured()
    run()
    return solve.n_captured() - before


TIMES = [[0.0, 1.0], [1.0, 0.55, -0.3, -0.4], [0.0, 3.0]]
SOLVERS = [tm.ALF(), tm.ALF(refresh="never"), tm.ALF(order=4), tm.ALF(order=6), tm.Leapfrog((0.25, 0.5, 0.25), order=2)]
SOLVERS += [tm.ALF(order=4, evals=5, refresh="never"), tm.ALF(order=6, evals=14, refresh="never")]


def assert_many_as_eager(case: Case) -> None:
    """Other solvers, times and step sizes with the same loops."""
    for solver in SOLVERS:
        for times in TIMES:
            for h in (0.04, 0.5):
                assert_as_eager(case, times, solver=solver, controller=tm.FixedStep(h))


def test_numbers_are_those_of_eager_solves_and_one_trace_serves_all(interpreted):
    case = MAKERS["time_dependent"]()
    assert n_new(lambda: assert_many_as_eager(case)) == 1


def test_two_pieces_of_code_serve_all_step_sizes(interpreted, monkeypatch):
    case, made = MAKERS["mlp"](), []
    monkeypatch.setattr(loops, "lowered", lambda graph, examples: made.append(graph) or graph)
    for h in (1.0, 0.5, 0.1, 0.003):
        assert_as_eager(case, [0.0, 1.0], controller=tm.FixedStep(h))
    assert len(made) == 2


ADAPTIVE = [tm.ALF(), tm.ALF(order=4), tm.ALF(order=4, evals=5), tm.ALF(order=6), tm.ALF(order=6, evals=14)]


@pytest.mark.parametrize("name", ["dict_of_two", "time_dependent"])
def test_adaptive_steps_are_those_of_eager_solves_and_one_trace_serves_all(name, interpreted):
    case, n_rejected = MAKERS[name](), 0

    def solve_all() -> None:
        for solver in ADAPTIVE:
            for controller in (tm.AdaptiveStep(1e-2, 1e-3), tm.AdaptiveStep(1e-4, 1e-5, h0=0.5, land=True)):
                for times in TIMES[:2]:
                    assert_as_eager(case, times, solver=solver, controller=controller)

    assert n_new(solve_all) == 1
    n_rejected = numbers(case, [0.0, 1.0], controller=tm.AdaptiveStep(1e-5, 1e-6, h0=0.5), compile=True)[1].n_rejected
    assert n_rejected > 0


@pytest.mark.parametrize("solver", ADAPTIVE, ids=repr)
def test_adaptive_steps_renew_v_where_eager_ones_do(solver, interpreted):
    case = Case(lambda t, y: -8 * y + torch.sin(t), start())
    how: Any = {"solver": solver, "controller": tm.AdaptiveStep(1e-3, 1e-4)}
    for times in ([0.0, 2.0], [0.0, 0.3, 0.31, 0.32, 2.0]):
        assert_as_eager(case, times, **how)
    assert numbers(case, [0.0, 2.0], compile=True, **how)[1].n_refreshes > 0


@pytest.mark.parametrize(
    "controller",
    [
        tm.AdaptiveStep(1e-4, 1e-5, norm=lambda e: torch.stack([x.abs().max() for x in e]).max()),
        tm.AdaptiveStep(1e-4, 1e-5, beta=0.4, safety=0.7, max_factor=2.0, h_max=0.2),
        tm.AdaptiveStep({"q": 1e-4, "p": math.inf}, {"q": 0.0, "p": 1.0}),
        tm.AdaptiveStep({"q": 1e-3, "p": 1e-5}, 1e-6),
    ],
    ids=["norm", "PI", "one leaf", "each leaf"],
)
def test_adaptive_controllers_of_other_kinds(controller, interpreted):
    case = MAKERS["dict_of_two"]()
    for solver in (tm.ALF(), tm.ALF(order=4, evals=5)):
        assert_as_eager(case, [0.0, 0.8], solver=solver, controller=controller)


def test_what_adaptive_solves_say_is_what_eager_ones_say(interpreted):
    case = MAKERS["time_dependent"]()
    for controller in (tm.AdaptiveStep(1e-6, 1e-7, max_steps=3), tm.AdaptiveStep(1e-6, 1e-7, h_min=0.3)):
        said = []
        for compiles in (False, True):
            with pytest.raises((tm.StepLimitError, tm.StepUnderflowError)) as error:
                tm.solve(case.f, case.y0, [0.0, 3.0], controller=controller, compile=compiles)
            said.append(str(error.value))
        assert said[0] == said[1]


def test_steps_between_which_nothing_happens_are_taken_back_in_one_call(interpreted, monkeypatch):
    calls, backward = [], loops.Loops.backward
    monkeypatch.setattr(loops.Loops, "backward", lambda *how: calls.append(how) or backward(*how))
    case = MAKERS["time_dependent"]()
    for times, n_calls in (([0.0, 1.0], 1), ([0.0, 0.3, 1.0], 2)):
        calls.clear()
        how: Any = {"solver": tm.ALF(order=4, evals=5), "controller": tm.AdaptiveStep(1e-5, 1e-6, land=True)}
        _, stats = numbers(case, times, compile=True, **how)
        assert stats.n_steps > 2 and stats.n_refreshes == 0
        assert len(calls) == n_calls + 1  # and one for the start


def test_sums_of_observations_are_those_of_eager_solves(interpreted):
    case = MAKERS["mlp"]()
    w = torch.linspace(0.5, 1.5, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for compiles in (False, True):
        for controller in (tm.FixedStep(0.1), tm.AdaptiveStep(1e-4, 1e-5)):
            how: Any = {"observe": lambda t, y: (t * w * y**2).sum(), "controller": controller, "compile": compiles}
            observed = tm.solve(case.f, case.y0, [0.0, 0.2, 0.5, 0.55, 1.0], **how).observed
            found.append([observed.detach(), *torch.autograd.grad(observed, [w, case.y0, *case.params])])
    for eager, compiled in (found[::2], found[1::2]):
        assert all((x - y).norm() <= 1e-12 * x.norm() for x, y in zip(eager, compiled, strict=True))


QUICK = (
    "convolutions attention shared_parameters weight_norm dict_of_two two_dtypes trace_by_autograd trace_by_vjp "
    "further_arguments constant of_a_number own_function lent_parameters mapped buffers"
).split()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MAKERS]
)
def test_fields_of_many_kinds(name, interpreted):
    case = MAKERS[name]()
    assert n_new(lambda: [assert_as_eager(case, [0.0, 0.4, 1.0], **CALM) for _ in range(2)]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_fields_of_many_kinds_as_machine_code(name):
    assert_as_eager(MAKERS[name](), [0.0, 0.4, 1.0], **CALM)
    assert_as_eager(MAKERS[name](), [0.0, 1.0], controller=tm.AdaptiveStep(1e-3, 1e-4))


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_fields_of_many_kinds_in_adaptive_steps(name, interpreted):
    for solver in ADAPTIVE:
        for times in ([0.0, 1.0], [1.0, 0.7, 0.2]):
            assert_as_eager(MAKERS[name](), times, solver=solver, controller=tm.AdaptiveStep(1e-3, 1e-4))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_solved_eagerly_with_one_warning(name, interpreted):
    make, reason = REFUSED[name]
    torch.manual_seed(0)
    case = make()
    state = [x.clone() for x in case.f.buffers()] if isinstance(case.f, nn.Module) else []
    torch.manual_seed(1)
    wanted, _ = numbers(case, [0.0, 1.0])
    after = [x.clone() for x in case.f.buffers()] if isinstance(case.f, nn.Module) else []
    for _ in range(2):
        for x, y in zip(case.f.buffers() if isinstance(case.f, nn.Module) else [], state, strict=False):
            x.copy_(y)
        torch.manual_seed(1)
        with pytest.warns(tm.SolverWarning, match=reason) as told:
            found, _ = numbers(case, [0.0, 1.0], compile=True)
        assert len(told) == 1
        assert all(x is y is None or torch.equal(x, y) for x, y in zip(found, wanted, strict=True))  # pyright: ignore
        if isinstance(case.f, nn.Module):
            assert all(map(torch.equal, case.f.buffers(), after))


class Halved(tm.StepController):
    """Steps of a size of its own choosing."""

    def begin(self, start: SolveStart) -> FixedStepState:
        return FixedStepState(0.05, start)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"controller": Halved()}, "neither FixedStep nor an adaptive controller"),
        ({"solver": tm.ALF(eta=0.9)}, "not an undamped leapfrog"),
        ({"solver": tm.Reversible()}, "not an undamped leapfrog"),
        ({"gradient": tm.ACA()}, "ACA"),
        ({"gradient": tm.MALI(exact=True)}, "exact"),
        ({"gradient": tm.MALI(checkpoint_every=3)}, "checkpoint"),
        ({"jumps": [0.5]}, "jumps="),
        ({"event": lambda t, y: y.sum() - 100, "on_no_event": "flag"}, "look at every step"),
    ],
    ids=["controller", "damped", "pair", "ACA", "exact", "checkpoints", "jumps", "event"],
)
def test_other_solves_say_why_they_run_eagerly(how, reason, interpreted):
    case = MAKERS["mlp"]()
    with pytest.warns(tm.SolverWarning, match=reason) as told:
        y = tm.solve(case.f, case.y0, [0.0, 0.4, 1.0], compile=True, **{**HOW, **how}).y
    assert len(told) == 1
    assert torch.equal(y, tm.solve(case.f, case.y0, [0.0, 0.4, 1.0], **{**HOW, **how}).y)


def test_an_old_torch_and_a_missing_compiler_are_told(interpreted, monkeypatch):
    case = MAKERS["mlp"]()

    def fails(graph: Any, examples: Any) -> Any:
        raise RuntimeError("no C++ compiler was found")

    monkeypatch.setattr(loops, "lowered", fails)
    with pytest.warns(tm.SolverWarning, match="no C\\+\\+ compiler was found"):
        tm.solve(case.f, case.y0, [0.0, 1.0], compile=True, **HOW)
    monkeypatch.setattr(traits, "CAN_COMPILE", False)
    with pytest.warns(tm.SolverWarning, match="torch .* lacks"):
        tm.solve(case.f, case.y0, [0.0, 1.0], compile=True, **HOW)


def test_autocast_inference_mode_and_learned_times_are_refused(interpreted):
    case = MAKERS["mlp"]()
    f = case.f.float() if isinstance(case.f, nn.Module) else case.f
    y0 = case.y0.detach().float()
    for around, t, reason in (
        (torch.autocast("cpu", torch.bfloat16), [0.0, 1.0], "autocast"),
        (torch.inference_mode(), [0.0, 1.0], "inference mode"),
        (torch.enable_grad(), torch.tensor([0.0, 1.0], requires_grad=True), "t requires a gradient"),
    ):
        with around, pytest.warns(tm.SolverWarning, match=reason):
            tm.solve(f, y0, t, compile=True, **HOW)


# ---- Never a number that is out of date


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.p, self.rate = nn.Linear(6, 8), nn.Linear(8, 6), 0.0, 0.1
        self.register_buffer("scale", torch.ones(6))
        self.scale: Tensor
        self.plain, self.n_calls = torch.ones(6, dtype=torch.float64), 0
        self.double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.n_calls += 1
        y = nn.functional.dropout(self.last(self.first(y).tanh()), self.p) * self.scale - self.rate * y
        return y * self.plain

    def case(self) -> Case:
        return Case(self, start(), params=tuple(p for p in self.parameters() if p.requires_grad))


def test_what_changes_between_solves_is_seen(interpreted):
    f = Net()
    assert n_new(lambda: assert_as_eager(f.case(), [0.0, 1.0])) == 1
    f.first.weight = nn.Parameter(f.first.weight.detach() + 1)
    f.scale = torch.full((6,), 0.5, dtype=torch.float64)
    f.plain = 2 * f.plain
    with torch.no_grad():
        f.last.bias.add_(1)
    assert n_new(lambda: assert_as_eager(f.case(), [0.0, 1.0])) == 0  # only the loops' arguments are others
    f.rate = 0.2
    assert n_new(lambda: assert_as_eager(f.case(), [0.0, 1.0])) == 1
    f.first.weight.requires_grad_(False)
    assert n_new(lambda: assert_as_eager(f.case(), [0.0, 1.0])) == 1
    f.first.weight.requires_grad_(True)
    f.last.weight.requires_grad_(False)  # as many frozen ones as before
    assert n_new(lambda: assert_as_eager(f.case(), [0.0, 1.0])) == 1
    assert n_new(lambda: tm.solve(f, start((3, 6)), [0.0, 1.0], compile=True, **HOW)) == 1
    f.p = 0.5
    with pytest.warns(tm.SolverWarning, match="draws random numbers"):
        tm.solve(f, start(), [0.0, 1.0], compile=True, **HOW)
    f.p = 0.0
    f.rate = 0.1
    f.last.weight.requires_grad_(True)
    assert n_new(lambda: assert_as_eager(f.case(), [0.0, 1.0])) == 0  # the first loops again


def test_f_is_called_once_per_solve_and_a_trace_leaves_no_mark(interpreted):
    f = Net()
    for _ in range(2):
        f.n_calls = 0
        tm.solve(f, start(), [0.0, 1.0], compile=True, **HOW).y.sum().backward()
        assert f.n_calls == 1
    assert f.plain.sum().item() == 6 and not f.scale.requires_grad


@pytest.mark.filterwarnings("ignore:f depends on a tensor of shape")  # the y that it makes itself, in the first pass
def test_f_may_look_whether_y_requires_a_gradient(interpreted):
    def slope(m: nn.Module, t: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            x = y if y.requires_grad else y.detach().requires_grad_()
            (g,) = torch.autograd.grad(m(x).tanh().sum(), x, create_graph=True)
        return g

    made, n_calls = of(nn.Linear(6, 6), slope), [0]

    def f(t: Tensor, y: Tensor) -> Tensor:
        n_calls[0] += 1
        return made.f(t, y)

    case = Case(f, made.y0, params=made.params)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compile=True")
        assert_as_eager(case, [0.0, 1.0])
        assert n_new(lambda: assert_as_eager(case, [0.0, 1.0])) == 0
        n_calls[0] = 0
        numbers(case, [0.0, 1.0], compile=True)
        assert n_calls[0] == 1


class Counting:
    """A function whose numbers depend on how often it was called, behind torch's back."""

    def __init__(self):
        self.shift = torch.zeros(6, dtype=torch.float64)

    def __call__(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(y) + self.shift


def test_tensors_of_any_object_are_arguments_of_the_loops(interpreted):
    f = Counting()
    case = Case(f, start())
    assert_as_eager(case, [0.0, 1.0])
    f.shift.add_(1)
    assert n_new(lambda: assert_as_eager(case, [0.0, 1.0])) == 0
    f.shift = -f.shift
    assert n_new(lambda: assert_as_eager(case, [0.0, 1.0])) == 0


def test_values_changed_before_the_backward_pass_are_an_error(interpreted):
    case = MAKERS["buffers"]()
    assert isinstance(case.f, nn.Module)
    y = tm.solve(case.f, case.y0, [0.0, 1.0], compile=True, **HOW).y
    next(case.f.buffers()).mul_(2)
    with pytest.raises((RuntimeError, tm.NonRepeatableFieldError)):
        y.sum().backward()


def test_a_first_value_that_differs_is_refused(interpreted, monkeypatch):
    """As the last resort: a record that is the same, and numbers that are not."""
    case, forward = MAKERS["mlp"](), loops.Loops.forward

    def wrong(*how: Any) -> Any:
        z, v, values, alternates = forward(*how)
        return z, tuple(1.001 * x for x in v), values, alternates

    monkeypatch.setattr(loops.Loops, "forward", wrong)
    with pytest.warns(tm.SolverWarning, match="other numbers than its trace"):
        y = tm.solve(case.f, case.y0, [0.0, 1.0], compile=True, **HOW).y
    assert torch.equal(y, tm.solve(case.f, case.y0, [0.0, 1.0], **HOW).y)


# ---- What the loop has to do


@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4), tm.ALF(order=4, evals=5)], ids=repr)
def test_v_is_renewed_between_compiled_runs(solver, interpreted):
    case = Case(lambda t, y: -30 * y + torch.sin(t), start())
    how: Any = {"solver": solver, "controller": tm.FixedStep(0.01 * solver.n_reflects)}
    for _ in range(2):  # the second solve knows that f contracts
        assert_as_eager(case, [0.0, 0.7, 2.0], **how)
    assert numbers(case, [0.0, 2.0], compile=True, **how)[1].n_refreshes > 0
    calmer = Case(lambda t, y: -8 * y + torch.sin(t), start())
    how["controller"] = replace(how["controller"], land=False)
    assert_as_eager(calmer, [0.0, 0.7, 2.0], **how)
    assert_as_eager(calmer, [0.0, 0.7], **{**how, "solver": replace(solver, refresh=3)})


def test_drift_is_made_good(interpreted):
    def f(t: Tensor, y: Tensor) -> Tensor:
        return 8 * torch.tanh(y)

    how: Any = {"solver": tm.ALF(refresh="never"), "controller": tm.FixedStep(0.05)}
    y0 = torch.tensor([[1e-4, 2e-3, 0.1]], requires_grad=True)
    solution = tm.solve(f, y0, [0.0, 2.0], compile=True, **how)
    (g,) = torch.autograd.grad(solution.y.sum(), y0)
    (truth,) = torch.autograd.grad(tm.solve(f, y0, [0.0, 2.0], gradient=tm.ACA(), **how).y.sum(), y0)
    assert solution.stats.n_reruns > 0
    torch.testing.assert_close(g, truth, rtol=1e-4, atol=0)


def test_a_solution_that_is_not_finite_is_an_error_without_a_warning(interpreted):
    for controller in (tm.FixedStep(0.1), tm.AdaptiveStep()):
        with pytest.raises((tm.NonFiniteError, tm.StepUnderflowError)) as eager:
            tm.solve(lambda t, y: y**3, 100 * start(), [0.0, 1.0], controller=controller)
        with pytest.raises(type(eager.value)) as compiled:
            tm.solve(lambda t, y: y**3, 100 * start(), [0.0, 1.0], controller=controller, compile=True)
        assert str(compiled.value) == str(eager.value)


class Holder:
    """Reads a tensor that was computed from its own parameter."""

    def __init__(self):
        self.w = torch.ones(6, dtype=torch.float64, requires_grad=True)
        self.twice = 2 * self.w

    def history(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(y * self.w) * self.twice


class Overwriting(nn.Module):
    """Returns memory that it writes to again."""

    def __init__(self):
        super().__init__()
        self.out = torch.zeros(4, 6, dtype=torch.float64)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.mul(y, t, out=self.out)


def test_what_an_eager_solve_refuses_is_refused(interpreted):
    f = Holder()
    with pytest.warns(tm.SolverWarning, match="computed outside it"), pytest.raises(tm.InvalidFieldError):
        tm.solve(f.history, start(), [0.0, 1.0], compile=True, **HOW).y.sum().backward()
    for _ in range(2):
        with pytest.warns(tm.SolverWarning, match="compile=True"), torch.no_grad():
            with pytest.raises(tm.InvalidFieldError, match="overwrites"):
                tm.solve(Overwriting(), start().detach(), [0.0, 1.0], compile=True, **HOW)


def test_errors_of_f_are_those_of_an_eager_solve(interpreted):
    with pytest.raises(tm.InvalidFieldError, match="y's shape"):
        tm.solve(lambda t, y: y[:2], start(), [0.0, 1.0], compile=True, **HOW)
    with pytest.raises(tm.InvalidFieldError, match="in place"):
        tm.solve(lambda t, y: y.mul_(2), start(), [0.0, 1.0], compile=True, **HOW)


def test_double_backward_is_refused_and_a_graph_can_be_kept(interpreted):
    case = MAKERS["mlp"]()
    y = tm.solve(case.f, case.y0, [0.0, 1.0], compile=True, **HOW).y
    first = torch.autograd.grad(y.sum(), case.y0, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.sum(), case.y0, retain_graph=True)[0])
    with pytest.raises(tm.DoubleBackwardError):
        torch.autograd.grad(y.sum(), case.y0, create_graph=True)


def test_solves_without_a_gradient(interpreted):
    case = MAKERS["mlp"]()
    with torch.no_grad():
        found = tm.solve(case.f, case.y0, [0.0, 1.0], compile=True, **HOW).y
        assert (found - tm.solve(case.f, case.y0, [0.0, 1.0], **HOW).y).norm() < 1e-12
        assert n_new(lambda: tm.solve(case.f, case.y0, [0.0, 2.0], compile=True, **HOW)) == 0


def test_memory_does_not_grow_with_the_number_of_steps(interpreted):
    case = MAKERS["mlp"]()
    saved: list[list[int]] = []
    tm.solve(case.f, case.y0, [0.0, 1.0], compile=True, **HOW)
    for h in (0.1, 0.001):
        saved.append([])
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved[-1].append(x.nbytes) or x, lambda x: x):
            tm.solve(case.f, case.y0, [0.0, 1.0], compile=True, controller=tm.FixedStep(h))
    assert saved[0] == saved[1] and len(saved[0]) > 0


def test_through_odeint_blocks_and_flows(interpreted):
    case = MAKERS["mlp"]()
    block = tm.nn.ODEBlock(case.f, compile=True)
    plain = tm.nn.ODEBlock(case.f)
    assert n_new(lambda: block(case.y0)) == 1 and "compile=True" in repr(block) and "compile" not in repr(plain)
    assert (block(case.y0) - plain(case.y0)).norm() < 1e-12
    options: Any = {"method": "alf", "gradient": "mali", "options": {"step_size": 0.1}}
    one, two = (tm.odeint(case.f, case.y0, [0.0, 1.0], compile=way, **options) for way in (True, False))
    assert (one - two).norm() < 1e-12
    flow_field = of(nn.Linear(6, 6), lambda m, t, y: m(y).tanh())

    def density(way: bool, x: Tensor) -> Tensor:
        flow = tm.nn.CNF(flow_field.f, controller=tm.FixedStep(0.25), compile=way)
        return flow.log_prob(x, noise=torch.ones_like(x))

    assert (density(True, case.y0.detach()) - density(False, case.y0.detach())).norm() < 1e-12
    assert n_new(lambda: density(True, 2 * case.y0.detach())) == 0  # other noise, and another function object


def test_tanh_is_accurate():
    x = torch.cat([torch.linspace(-12, 12, 100_001), torch.logspace(-30, 2, 1000)])
    exact = x.double().tanh()
    assert ((tanh(x) - exact).abs() <= 3e-7 * exact.abs()).all()
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    assert torch.equal(tanh(special)[:2], torch.tensor([1.0, -1.0])) and tanh(special)[2].isnan()
    assert tanh(special)[3] == 0


# ---- Machine code


def test_machine_code_of_one_field():
    case = MAKERS["mlp"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_as_eager(case, [0.0, 1.0])
        assert n_new(lambda: [assert_as_eager(case, [0.0, 0.3, 2.0], solver=tm.ALF(order=4)) for _ in range(2)]) == 0
        for rtol, solver in ((1e-3, tm.ALF()), (1e-5, tm.ALF(order=4, evals=5)), (1e-6, tm.ALF(order=6, evals=14))):
            how: Any = {"solver": solver, "controller": tm.AdaptiveStep(rtol, rtol / 10)}
            assert n_new(lambda how=how: assert_as_eager(case, [0.0, 0.3, 2.0], **how)) == 0


@pytest.mark.slow
def test_machine_code_in_single_precision_and_with_every_solver():
    case = MAKERS["time_dependent"]()
    assert_many_as_eager(case)
    assert isinstance(case.f, nn.Module)
    f = case.f.float()
    y0 = case.y0.detach().float().requires_grad_()
    for controller in (tm.FixedStep(0.1), tm.AdaptiveStep(1e-2, 1e-3), tm.AdaptiveStep(1e-3, 1e-4)):
        for solver in (tm.ALF(), tm.ALF(order=4, evals=5)):
            single = Case(f, y0, params=tuple(f.parameters()))
            assert_as_eager(single, [0.0, 1.0], solver=solver, controller=controller)


@pytest.mark.parametrize("shapes", [((64, 16), (16, 3)), ((3, 64), (64, 16)), ((1, 1024), (1024, 5))])
def test_products_that_libraries_are_slow_at_are_those_of_the_library(shapes):
    x, y = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    assert (product(x, y) - x @ y).norm() <= 1e-14 * (x @ y).norm()
    assert (product(x.t().contiguous().t(), y) - x @ y).norm() <= 1e-14 * (x @ y).norm()


@pytest.mark.parametrize("shapes", [((64, 64), (64, 64)), ((3, 2048), (2048, 16)), ((3, 8), (8, 16))])
def test_other_products_are_left_to_the_library(shapes):
    assert product(*map(torch.randn, shapes)) is NotImplemented
