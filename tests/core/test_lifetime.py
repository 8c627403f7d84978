"""What a solve leaves behind: nothing."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchmali as tm

METHODS: list[dict[str, Any]] = [
    {"gradient": tm.Naive()},
    {"gradient": tm.ACA()},
    {"gradient": tm.Adjoint()},
    {"gradient": tm.MALI()},
    {"gradient": tm.MALI(exact=True)},
    {"gradient": tm.MALI(checkpoint_every=3)},
    {"gradient": tm.MALI(), "solver": tm.Reversible(tm.Midpoint())},
]


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, t, y, x):
        return self.net(y) * x


def train(net: nn.Module, how: dict[str, Any]) -> None:
    y0 = torch.randn(4, 8, requires_grad=True)
    x = torch.ones(8)
    y = tm.solve(net, y0, (0.0, 0.8, 1.0), controller=tm.FixedStep(0.2), args=(x,), **how).y
    y.square().sum().backward()


def n_tensors() -> int:
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("how", METHODS, ids=lambda how: repr(list(how.values())))
def test_two_hundred_solves_leave_nothing_behind(how):
    net = Slope()
    for _ in range(20):
        train(net, how)
    gc.collect()
    gc.disable()  # what only a collection would free is a cycle
    try:
        tensors = n_tensors()
        resident = resident_bytes() if sys.platform == "linux" else 0
        for _ in range(200):
            train(net, how)
        assert n_tensors() == tensors
        if sys.platform == "linux":
            assert resident_bytes() - resident < 5e6
    finally:
        gc.enable()


@pytest.mark.parametrize("how", METHODS, ids=lambda how: repr(list(how.values())))
@pytest.mark.parametrize("goes_back", [False, True])
def test_to_delete_the_output_is_to_free_the_graph(how, goes_back):
    net, x = Slope(), torch.ones(8)
    y0 = torch.randn(4, 8, requires_grad=True) * 1.0
    solution = tm.solve(net, y0, (0.0, 1.0), controller=tm.FixedStep(0.1), args=(x,), **how)
    alive = [weakref.ref(z) for z in (y0, x)]
    gc.disable()
    try:
        del y0, x
        assert alive[1]() is not None  # it is needed to go back
        if goes_back:
            solution.y.sum().backward(retain_graph=True)
            solution.y.sum().backward()
        else:
            del solution
        assert not any(ref() is not None for ref in alive)
    finally:
        gc.enable()


@pytest.mark.parametrize("how", METHODS, ids=lambda how: repr(list(how.values())))
def test_a_second_backward_over_the_same_graph_gives_the_same(how):
    net, x = Slope(), torch.ones(8)
    y0 = torch.randn(4, 8, requires_grad=True)
    y = tm.solve(net, y0, (0.0, 1.0), controller=tm.FixedStep(0.1), args=(x,), **how).y
    first, second = (
        torch.autograd.grad(y.square().sum(), [y0, *net.parameters()], retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("gradient", [tm.Naive(), tm.ACA(), tm.MALI(), tm.Adjoint()], ids=repr)
def test_what_functions_close_over_is_free_when_the_solve_is(gradient):
    """Without the collector of cycles: a batch of data held until it comes by is a batch too many."""

    def solved() -> list[weakref.ref]:
        c, data = torch.randn(8, requires_grad=True), torch.randn(3, 4, 8)
        inner = 2 * c  # with a graph
        y0 = torch.randn(4, 8, requires_grad=True)
        how: Any = {"controller": tm.FixedStep(0.1), "gradient": gradient}
        solution = tm.solve(
            lambda t, y: inner - y, y0, (0.0, 0.5, 1.0), **how, observe=lambda t, y, k: (y - data[k]).sum()
        )
        solution.observed.backward()
        return [weakref.ref(x) for x in (c, data, inner, y0)]

    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in solved()] == [None] * 4
    finally:
        gc.enable()
