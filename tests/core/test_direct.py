"""Solves in fixed steps that are made directly, once f is known: everything is as the loop makes it."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm
from torchmali.gradients import direct


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        self.rate = 0.0

    def forward(self, t: Tensor, y: Any) -> Any:
        if isinstance(y, dict):
            return {"a": self.net(y["a"]) * torch.sin(3 * t), "b": -y["b"] * t}
        return torch.sin(3 * t) * self.net(y) - self.rate * y


def start(dtype: torch.dtype = torch.float64, tree: bool = False) -> Any:
    y = torch.linspace(-1, 1, 12, dtype=dtype).reshape(4, 3).requires_grad_()
    return {"a": y, "b": torch.ones(2, dtype=dtype, requires_grad=True)} if tree else y


@pytest.fixture
def n_direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the direct forward passes that were begun."""
    count, run = [0], direct._run

    def counted(*how: Any) -> Any:
        count[0] += 1
        return run(*how)

    monkeypatch.setattr(direct, "_run", counted)
    return count


def solved(f: Any, y0: Any, times: list[float], **how: Any) -> tuple[list[Tensor], dict[str, Any], list[str]]:
    """All numbers of a solve and of its backward pass, its counts, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        solution = tm.solve(f, y0, times, **how)
        y = list(solution.y.values()) if isinstance(solution.y, dict) else [solution.y]
        leaves = list(y0.values()) if isinstance(y0, dict) else [y0]
        inputs = [*leaves, *(f.parameters() if isinstance(f, nn.Module) else [])]
        grads = torch.autograd.grad([(torch.sin(x) * x).sum() for x in y], inputs)
    counts = {name: x for name, x in asdict(solution.stats).items() if x is not None}
    return [*y, *grads], counts, [str(w.message) for w in caught]


def assert_twice_the_same(f: Any, y0: Any, times: list[float], **how: Any) -> list[str]:
    numbers, counts, told = solved(f, y0, times, **how)
    for _ in range(2):
        again, counts_again, told_again = solved(f, y0, times, **how)
        assert all(map(torch.equal, numbers, again))
        assert counts == pytest.approx(counts_again, rel=0, abs=0, nan_ok=True) and told == told_again
    return told


SOLVERS = [tm.ALF(), tm.ALF(refresh="never"), tm.ALF(order=4), tm.ALF(order=6)]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("times", [[0.0, 1.0], [1.0, 0.55, -0.3, -0.4]], ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["tensor", "tree"])
@pytest.mark.parametrize("h", [0.03, 0.5])
def test_numbers_and_counts_are_those_of_the_loop(solver, times, tree, h, n_direct):
    for dtype in (torch.float32, torch.float64):
        y0 = start(dtype, tree)
        assert not assert_twice_the_same(Net(dtype), y0, times, solver=solver, controller=tm.FixedStep(h))
    assert n_direct == [4]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize("times", [[0.0, 1.0], [1.0, 0.55, -0.3, -0.4]], ids=str)
@pytest.mark.parametrize("tree", [False, True], ids=["tensor", "tree"])
def test_numbers_and_counts_of_aca_are_those_of_the_loop(solver, times, tree, n_direct):
    for dtype, h in ((torch.float32, 0.03), (torch.float64, 0.5)):
        how: Any = {"solver": solver, "controller": tm.FixedStep(h), "gradient": tm.ACA()}
        assert not assert_twice_the_same(Net(dtype), start(dtype, tree), times, **how)
    assert n_direct == [4]


def test_a_gradient_by_aca_can_be_asked_for_twice(n_direct):
    f, y0 = Net(), start()
    how: Any = {"controller": tm.FixedStep(0.1), "gradient": tm.ACA()}
    tm.solve(f, y0, [0.0, 1.0], **how)
    y = tm.solve(f, y0, [0.0, 1.0], **how).y.sum()
    first, second = (torch.autograd.grad(y, [y0, *f.parameters()], retain_graph=True) for _ in range(2))
    assert n_direct == [1] and all(map(torch.equal, first, second))


def test_without_a_gradient(n_direct):
    f = Net()
    how: Any = {"controller": tm.FixedStep(0.1, land=False)}
    with torch.no_grad():
        first, *others = [tm.solve(f, start(), [0.0, 1.0], **how) for _ in range(3)]
    assert n_direct == [2]
    assert all(torch.equal(first.y, other.y) and first.stats == other.stats for other in others)


@pytest.mark.parametrize(
    "how",
    [
        {"controller": tm.AdaptiveStep()},
        {"controller": tm.FixedStep(0.1), "solver": tm.ALF(refresh=3)},
        {"controller": tm.FixedStep(0.1), "solver": tm.ALF(eta=0.9)},
        {"controller": tm.FixedStep(0.1), "solver": tm.Reversible()},
        {"controller": tm.AdaptiveStep(), "gradient": tm.ACA()},
        {"controller": tm.FixedStep(0.1), "gradient": tm.MALI(exact=True)},
        {"controller": tm.FixedStep(0.1), "gradient": tm.MALI(checkpoint_every=3)},
        {"controller": tm.FixedStep(0.1), "gradient": tm.MALI(memory="1MB")},
        {"controller": tm.FixedStep(0.1), "jumps": [0.5]},
        {"controller": tm.FixedStep(0.1), "observe": lambda t, y: y.sum()},
    ],
    ids=["adaptive", "refresh", "damped", "pair", "ACA", "exact", "checkpoints", "memory", "jumps", "observe"],
)
def test_other_solves_take_the_loop(how, n_direct):
    f = Net()
    for _ in range(3):
        tm.solve(f, start(), [0.0, 1.0], **how)
    assert n_direct == [0]


def test_times_that_are_learned_take_the_loop(n_direct):
    f, t = Net(), torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        tm.solve(f, start(), t, controller=tm.FixedStep(0.1)).y.sum().backward()
    assert n_direct == [0] and t.grad is not None


@pytest.mark.parametrize("gradient", [tm.MALI(), tm.ACA()], ids=repr)
def test_a_refresh_is_made_by_the_loop_and_remembered(gradient, n_direct):
    f = Net()
    f.rate = 30.0
    how: Any = {"controller": tm.FixedStep(0.02), "gradient": gradient}
    numbers, counts, _ = solved(f, start(), [0.0, 2.0], **how)
    assert counts["n_refreshes"] > 0
    assert_twice_the_same(f, start(), [0.0, 2.0], **how)
    assert n_direct == [1]  # and then no more


def test_a_solution_that_alternates_at_the_end_is_warned_of(n_direct):
    f = Net()
    f.rate = 6.0
    told = assert_twice_the_same(f, start(), [0.0, 1.0], controller=tm.FixedStep(0.25))
    assert len(told) == 1 and "contracts too much" in told[0] and n_direct == [1]


def test_a_solution_that_is_not_finite_is_an_error(n_direct):
    def f(t: Tensor, y: Tensor) -> Tensor:
        return y**3

    how: Any = {"controller": tm.FixedStep(0.05)}
    tm.solve(f, start(), [0.0, 0.1], **how)
    with pytest.raises(tm.NonFiniteError, match="first seen"):
        tm.solve(f, 100 * start(), [0.0, 1.0], **how)
    assert n_direct == [1]


def test_drift_is_made_good_as_by_the_loop(n_direct):
    """A field that contracts: its start is rebuilt with an error, and the segment is solved again."""

    def f(t: Tensor, y: Tensor) -> Tensor:
        return 8 * torch.tanh(y)

    how: Any = {"solver": tm.ALF(refresh="never"), "controller": tm.FixedStep(0.05)}
    y0 = torch.tensor([[1e-3, 2e-3, 0.1]], requires_grad=True)
    _, counts, _ = solved(f, y0, [0.0, 2.0], **how)
    assert counts["n_reruns"] > 0
    again, counts_again, _ = solved(f, y0, [0.0, 2.0], **how)
    assert n_direct == [1] and counts_again["n_reruns"] == counts["n_reruns"]
    truth, _, _ = solved(f, y0, [0.0, 2.0], gradient=tm.ACA(), **how)
    torch.testing.assert_close(again[1], truth[1], rtol=1e-4, atol=0)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.p = nn.Linear(3, 3).double(), 0.0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        y = self.net(y)
        return nn.functional.dropout(y, self.p) if self.p and t > 0 else y


def test_random_numbers_that_were_not_there_before_are_noticed(n_direct):
    f = Noisy()
    how: Any = {"controller": tm.FixedStep(0.25)}
    for _ in range(2):
        tm.solve(f, start(), [0.0, 1.0], **how)
    f.p = 0.5
    with pytest.raises(tm.NonRepeatableFieldError, match="in some of its evaluations only"):
        tm.solve(f, start(), [0.0, 1.0], **how)
    assert n_direct == [2]


@pytest.mark.parametrize("gradient", [tm.MALI(), tm.ACA()], ids=repr)
def test_a_function_that_changes_between_the_passes_is_noticed(gradient):
    f = Net()
    how: Any = {"controller": tm.FixedStep(0.1), "gradient": gradient}
    for _ in range(2):
        y = tm.solve(f, start(), [0.0, 1.0], **how).y
    f.rate = 1.0
    with pytest.raises(tm.NonRepeatableFieldError):
        y.sum().backward()


def test_parameters_that_are_replaced_or_frozen_are_seen(n_direct):
    f = Net()
    how: Any = {"controller": tm.FixedStep(0.1)}
    for _ in range(2):
        tm.solve(f, start(), [0.0, 1.0], **how).y.sum().backward()
    first, _, last = f.net
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    first.weight = nn.Parameter(first.weight.detach() + 1)
    last.bias.requires_grad_(False).zero_()
    found = []
    for gradient in (tm.MALI(), tm.MALI(), tm.Naive()):
        f.zero_grad()
        y0 = start()
        tm.solve(f, y0, [0.0, 1.0], gradient=gradient, **how).y.sum().backward()
        found.append([y0.grad, *(p.grad for p in f.parameters() if p.requires_grad)])
    for grads in found[:2]:
        assert all(torch.allclose(x, y, rtol=1e-12, atol=0) for x, y in zip(grads, found[2], strict=True))
    assert n_direct == [2] and last.bias.grad is None


def test_double_backward_is_refused(n_direct):
    f = Net()
    how: Any = {"controller": tm.FixedStep(0.1)}
    for _ in range(2):
        y0 = start()
        y = tm.solve(f, y0, [0.0, 1.0], **how).y
        with pytest.raises(tm.DoubleBackwardError):
            torch.autograd.grad(y.sum(), y0, create_graph=True)
    assert n_direct == [1]


def test_saved_tensors_are_unpacked_once(n_direct):
    """A hook such as save_on_cpu copies a tensor each time."""
    f, y0 = Net(), start()
    how: Any = {"controller": tm.FixedStep(0.1)}
    tm.solve(f, y0, [0.0, 1.0], **how)
    packed: list[list[Any]] = []

    def pack(x: Tensor) -> list[Any]:
        packed.append([x, 0])
        return packed[-1]

    def unpack(one: list[Any]) -> Tensor:
        one[1] += 1
        return one[0]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        y = tm.solve(f, y0, [0.0, 1.0], **how).y
    torch.autograd.grad(y.sum(), y0)
    assert n_direct == [1] and max(n for _, n in packed) == 1
