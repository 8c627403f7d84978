"""MALI(memory=...): graphs of the last evaluations are kept as far as they fit, then states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import Case, worst_difference
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import torchmali as tm
from torchmali.measure import peak_bytes


class Net(nn.Module):
    """Called with a tensor or a dict."""

    def __init__(self, dtype: torch.dtype = torch.float64, width: int = 3, hidden: int = 8):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width)).to(dtype)

    def forward(self, t: Tensor, y: Any) -> Any:
        if isinstance(y, dict):
            return {"a": self.net(y["a"]) * torch.sin(3 * t), "b": -y["b"] * t}
        return torch.sin(3 * t) * self.net(y)


def start(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-1, 1, 12, dtype=dtype).reshape(4, 3)


def solved(f: nn.Module, y0: Any, times: Any, **how: Any) -> tuple[Any, list[Tensor]]:
    """The solution, and the gradients by y0 and the parameters."""
    leaves = list(y0.values()) if isinstance(y0, dict) else [y0]
    leaves = [x.requires_grad_() for x in leaves]
    solution = tm.solve(f, y0, times, **how)
    y = solution.y if isinstance(solution.y, dict) else {"": solution.y}
    loss = torch.stack([(torch.sin(x) * x).sum() for x in y.values()]).sum()
    return solution, list(torch.autograd.grad(loss, [*leaves, *[p for p in f.parameters() if p.requires_grad]]))


def differ(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True))


SOLVERS = [tm.ALF(), tm.ALF(refresh="never"), tm.ALF(order=4), tm.ALF(order=6)]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, 0.55, -0.3, -0.4)], ids=str)
def test_fixed_steps_of_a_known_field_with_any_number_of_graphs(solver, times):
    """The solution is the same to the bit, the gradient that of autograd, and each graph spares an evaluation."""
    f, how = Net(), {"solver": solver, "controller": tm.FixedStep(0.09)}
    exact, expected = solved(f, start(), times, **how, gradient=tm.Naive())
    for _ in range(2):
        plain, _ = solved(f, start(), times, **how)
    counts = []
    for memory in (4_000, 8_000, 20_000, 70_000, "1MB"):
        for _ in range(2):
            solution, grads = solved(f, start(), times, **how, gradient=tm.MALI(memory=memory))
        stats = solution.stats
        assert torch.equal(solution.y, exact.y)
        assert differ(grads, expected) < 1e-12
        assert stats.n_evals_backward == plain.stats.n_evals_backward - stats.n_graphs
        assert stats.n_evals_forward == plain.stats.n_evals_forward
        counts.append(stats.n_graphs)
    assert counts == sorted(counts) and counts[0] < counts[2] and counts[-1] == plain.stats.n_evals_forward


@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4), tm.ALF(order=6), tm.ALF(refresh=3)], ids=repr)
@pytest.mark.parametrize(
    "controller",
    [
        tm.FixedStep(0.17),
        tm.FixedStep(0.17, land=False),
        tm.AdaptiveStep(1e-3, 1e-3),
        tm.AdaptiveStep(1e-3, 1e-3, land=True),
    ],
    ids=repr,
)
@pytest.mark.parametrize("memory", [3_000, 30_000, "10MB"])
def test_a_field_with_arguments_that_is_met_for_the_first_time(solver, controller, memory):
    """A dict of mixed shapes, an argument that is learned, times that are: the loop records each evaluation."""
    case = Case.make()
    grads, stats = case.gradients(solver, controller, tm.MALI(memory=memory))
    assert worst_difference(grads, case.exact_gradients(solver, controller)) < 1e-12
    assert stats.n_graphs > 0
    assert stats.n_evals_backward <= stats.n_vjps - min(stats.n_graphs, 3) + 1
    if memory == "10MB":
        assert stats.n_evals_backward <= 2  # the first evaluations show what f is like


@pytest.mark.parametrize("tree", [False, True], ids=["tensor", "dict"])
@pytest.mark.parametrize("order", [2, 4])
def test_adaptive_steps_of_a_known_field(tree, order):
    f = Net()
    f.net[0].bias.requires_grad_(False)  # type: ignore[union-attr]
    times = [0.0, 0.31, 0.32, 1.0]

    def y0() -> Any:
        return {"a": start(), "b": torch.ones(2, dtype=torch.float64)} if tree else start()

    how: Any = {"solver": tm.ALF(order=order), "controller": tm.AdaptiveStep(1e-4, 1e-4)}
    _, expected = solved(f, y0(), times, **how, gradient=tm.Naive())
    found = []
    for memory in (2_000, 12_000, 40_000, "10MB", "10MB", "10MB"):
        solution, grads = solved(f, y0(), times, **how, gradient=tm.MALI(memory=memory))
        assert differ(grads, expected) < 1e-12
        found.append(solution.stats)
    assert [stats.n_graphs for stats in found] == sorted(stats.n_graphs for stats in found)
    assert found[1].n_evals_backward < found[0].n_evals_backward
    assert found[-1].n_evals_backward == found[-1].n_vjps == 0  # plain autograd
    assert found[-1].n_graphs == found[-1].n_evals_forward


def test_more_evaluations_than_last_time_stay_within_the_memory():
    """An adaptive solve that was thought to fit is made again with some of its graphs."""
    f, controller = Net(), tm.AdaptiveStep(1e-5, 1e-5)
    how: Any = {"controller": controller, "gradient": tm.MALI(memory=16_000)}
    for _ in range(3):
        solution, _ = solved(f, start(), (0.0, 0.1), **how)
    assert solution.stats.n_evals_backward == 0
    y0 = start()
    solution, grads = solved(f, y0, (0.0, 2.0), **how)
    _, expected = solved(f, y0, (0.0, 2.0), controller=controller, gradient=tm.Naive())
    assert 0 < solution.stats.n_graphs * 448 <= 16_000 and solution.stats.n_evals_backward > 50
    assert differ(grads, expected) < 1e-12


@pytest.mark.parametrize("how", ["observe", "event", "jumps", "learned times", "samples"])
def test_other_kinds_of_solves(how):
    f, controller = Net(), tm.AdaptiveStep(1e-3, 1e-3)
    options: dict[str, Any] = {
        "observe": {"observe": lambda t, y: (y**2).sum()},
        "event": {"event": lambda t, y: y[0, 0] + 1.1},
        "jumps": {"jumps": [0.4]},
        "learned times": {},
        "samples": {},
    }[how]

    def gradient(method: tm.GradientMethod) -> tuple[Any, list[Tensor]]:
        y0 = start().requires_grad_()
        t = torch.tensor([0.0, 0.4, 1.0], dtype=torch.float64, requires_grad=how == "learned times")
        if how == "samples":
            t = torch.stack([t, t, 2 * t, t], dim=1)
        s = tm.solve(f, y0, t, controller=controller, gradient=method, **options)
        loss = {"observe": s.observed, "event": s.event_t}.get(how)
        loss = (torch.sin(s.y) * s.y).sum() if loss is None else loss
        inputs = [y0, *f.parameters(), *([t] if how == "learned times" else [])]
        return s, [g for g in torch.autograd.grad(loss, inputs, allow_unused=True) if g is not None]

    _, expected = gradient(tm.ACA())
    for _ in range(3):
        solution, grads = gradient(tm.MALI(memory="1MB"))
    assert solution.stats.n_graphs > 3 and solution.stats.n_evals_backward <= 2
    assert differ(grads, expected) < 1e-11


def test_a_refresh_where_f_contracts():
    def f(t: Tensor, y: Tensor) -> Tensor:
        return -30 * y + torch.sin(y)

    how: Any = {"controller": tm.FixedStep(0.02)}
    grads = []
    for method in (tm.ACA(), *[tm.MALI(memory="1MB")] * 3):
        y0 = start().requires_grad_()
        solution = tm.solve(f, y0, (0.0, 2.0), gradient=method, **how)
        grads += torch.autograd.grad(solution.y[-1].norm(), y0)
    assert solution.stats.n_refreshes > 0 and solution.stats.n_graphs > 100 and solution.stats.n_reruns == 0
    assert solution.stats.n_evals_backward <= 1
    assert all(differ([g], grads[:1]) < 1e-10 for g in grads[1:])


@pytest.mark.parametrize("controller", [tm.FixedStep(0.02), tm.AdaptiveStep(1e-3, 1e-3)], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("memory", [8_000, "1MB"])
def test_a_second_backward_pass(controller, memory):
    """Graphs are used once; then all states are rebuilt, or autograd has kept its own."""
    f = Net()
    for _ in range(3):
        y0 = start().requires_grad_()
        solution = tm.solve(f, y0, (0.0, 1.0), controller=controller, gradient=tm.MALI(memory=memory))
        inputs = [y0, *f.parameters()]
        first = torch.autograd.grad(solution.y[-1].norm(), inputs, retain_graph=True)
        n_first = solution.stats.n_evals_backward
        second = torch.autograd.grad(solution.y[-1].norm(), inputs, retain_graph=True)
        third = torch.autograd.grad(solution.y[-1].norm(), inputs)
        assert differ(list(second), list(first)) < 1e-12 and differ(list(third), list(first)) < 1e-12
        assert solution.stats.n_evals_backward >= n_first
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(solution.y[-1].norm(), inputs)


@pytest.mark.parametrize("controller", [tm.FixedStep(0.05), tm.AdaptiveStep(1e-3, 1e-3)], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("memory", [6_000, "1MB"])
def test_saved_tensor_hooks_see_the_graphs(controller, memory):
    f = Net()
    _, expected = solved(f, start(), (0.0, 1.0), controller=controller, gradient=tm.Naive())
    n_packed, n_unpacked = [], []
    for _ in range(3):
        packed: list[int] = []
        unpacked: list[int] = []

        def pack(x: Tensor, packed: list[int] = packed) -> Tensor:
            packed.append(x.numel())
            return x.clone() if not x.is_leaf else x

        def unpack(x: Tensor, unpacked: list[int] = unpacked) -> Tensor:
            unpacked.append(x.numel())
            return x

        with saved_tensors_hooks(pack, unpack):
            solution, grads = solved(f, start(), (0.0, 1.0), controller=controller, gradient=tm.MALI(memory=memory))
        assert differ(grads, expected) < 1e-12
        n_packed.append(len(packed))
        n_unpacked.append(len(unpacked))
    assert all(n >= 2 * solution.stats.n_graphs > 0 for n in (*n_packed, *n_unpacked))
    with save_on_cpu():
        _, grads = solved(f, start(), (0.0, 1.0), controller=controller, gradient=tm.MALI(memory=memory))
    assert differ(grads, expected) < 1e-12


@pytest.mark.parametrize("controller", [tm.FixedStep(0.05), tm.AdaptiveStep(1e-3, 1e-3)], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("memory", [6_000, "1MB"])
def test_a_parameter_that_is_changed_between_the_passes_raises(controller, memory):
    f = Net()
    for _ in range(3):
        y = tm.solve(f, start().requires_grad_(), (0.0, 1.0), controller=controller, gradient=tm.MALI(memory=memory)).y
        with torch.no_grad():
            f.net[0].weight.mul_(2)  # type: ignore[union-attr]
            f.net[2].weight.mul_(2)  # type: ignore[union-attr]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class Careful(nn.Module):
    """Needs care: dropout, statistics that it changes, or its own derivatives."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 3).double()
        self.kind = kind
        self.norm = nn.BatchNorm1d(3).double()

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        if self.kind == "dropout":
            return nn.functional.dropout(torch.tanh(self.net(y)), 0.5)
        if self.kind == "statistics":
            return torch.tanh(self.norm(self.net(y)))
        return -torch.autograd.grad(torch.tanh(self.net(y)).sum(), y, create_graph=True)[0]


@pytest.mark.parametrize("kind", ["dropout", "statistics", "potential"])
def test_a_field_that_needs_care_keeps_states_as_before(kind):
    f = Careful(kind)
    for _ in range(3):
        found = []
        for method in (tm.ACA(), tm.MALI(memory="1MB")):
            torch.manual_seed(1)
            solution, grads = solved_by_all(f, method)
            found.append(grads)
        assert solution.stats.n_graphs == 0 and solution.stats.n_checkpoints == 10
        assert differ(found[1], found[0]) < 1e-10


def solved_by_all(f: nn.Module, method: tm.GradientMethod) -> tuple[Any, list[Tensor]]:
    y0 = start().requires_grad_()
    solution = tm.solve(f, y0, (0.0, 1.0), controller=tm.FixedStep(0.1), gradient=method)
    grads = torch.autograd.grad(solution.y[-1].norm(), [y0, *f.parameters()], allow_unused=True)
    return solution, [g for g in grads if g is not None]


def test_hooks_on_parameters_see_the_whole_gradient_once():
    f, seen = Net(), []
    f.net[0].weight.register_hook(seen.append)  # type: ignore[union-attr]
    for memory in (8_000, 8_000, 8_000, "1MB"):
        seen.clear()
        _, grads = solved(f, start(), (0.0, 1.0), controller=tm.FixedStep(0.02), gradient=tm.MALI(memory=memory))
        assert len(seen) == 1 and torch.equal(seen[0], grads[1])


@pytest.mark.parametrize("order", [2, 4])
def test_the_peak_stays_within_the_budget_and_what_mali_takes_without(order):
    """In bytes; and fewer evaluations are made, the larger the budget is."""
    f, y0 = Net(torch.float32, 8, 64), torch.linspace(-1, 1, 1024).reshape(128, 8)
    how: Any = {"solver": tm.ALF(order=order), "controller": tm.FixedStep(0.02 if order == 2 else 0.2)}
    found: list[Any] = []

    def run(method: tm.GradientMethod) -> None:
        found.append(solved(f, y0.clone(), (0.0, 1.0), **how, gradient=method)[0].stats)

    run(tm.MALI())
    floor, whole = peak_bytes(lambda: run(tm.MALI())), peak_bytes(lambda: run(tm.Naive()))
    counts = []
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        method = tm.MALI(memory=int(share * whole)) if share else tm.MALI()
        peak = peak_bytes(lambda method=method: run(method))
        assert peak <= share * whole + floor
        counts.append(found[-1].n_evals_backward)
        kept = found[-1].n_graphs / found[0].n_evals_forward
        assert kept >= share - (0.06 if order == 2 else 0.2)  # it is used; order 4: in steps of 12 evaluations
    assert all(more > fewer for more, fewer in zip(counts, counts[1:], strict=False)) and counts[-1] == 0


def test_adaptive_solves_stay_within_the_budget():
    f, y0 = Net(torch.float32, 8, 64), torch.linspace(-1, 1, 1024).reshape(128, 8)
    how: Any = {"controller": tm.AdaptiveStep(1e-4, 1e-4)}
    found: list[Any] = []

    def run(method: tm.GradientMethod) -> None:
        found.append(solved(f, y0.clone(), (0.0, 2.0), **how, gradient=method)[0].stats)

    run(tm.MALI())
    floor, whole = peak_bytes(lambda: run(tm.MALI())), peak_bytes(lambda: run(tm.Naive()))
    counts = []
    for share in (0.2, 0.4, 0.6, 0.8, 1.2):
        assert peak_bytes(lambda share=share: run(tm.MALI(memory=int(share * whole)))) <= share * whole + floor
        counts.append(found[-1].n_evals_backward)
    assert all(more > fewer for more, fewer in zip(counts, counts[1:], strict=False)) and counts[-1] == 0


def test_a_long_solve_whose_start_is_missed_by_little_is_pulled_back_once():
    """The drift is judged by its effect, two evaluations, before anything is done a second time."""
    f, y0 = Net(torch.float32, 4, 16), torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    how: Any = {"solver": tm.ALF(refresh="never"), "controller": tm.FixedStep(0.005)}
    counts = {solved(f, y0.clone(), (0.0, 5.0), **how)[0].stats.n_evals_backward for _ in range(2)}
    assert len(counts) == 1 and counts <= {1001, 1003}


def test_what_memory_does_not_reach_is_as_before():
    f, n_evals = Net(), set()
    for method in (tm.MALI(exact=True, memory="1MB"), tm.MALI(exact=True)):
        for _ in range(2):
            solution, _ = solved(f, start(), (0.0, 1.0), controller=tm.FixedStep(0.1), gradient=method)
        assert solution.stats.n_graphs == 0
        n_evals.add(solution.stats.n_evals_backward)
    assert n_evals == {11}
    with torch.no_grad():
        solution = tm.solve(f, start(), (0.0, 1.0), controller=tm.FixedStep(0.1), gradient=tm.MALI(memory="1MB"))
    assert solution.stats.n_graphs == 0 and not solution.y.requires_grad
