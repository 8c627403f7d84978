"""Solves in several threads: none sees the random numbers, hooks or buffers of another."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchmali as tm

METHODS = [tm.MALI(), tm.ACA(), tm.MALI(exact=True), tm.Naive()]


class Net(nn.Module):
    """f with dropout and noise."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.tanh(F.dropout(self.first(y), 0.3))) + 0.1 * torch.randn_like(y)


def held(*leaves: Tensor) -> list[Tensor]:
    """Tensors that keep alive the nodes of autograd in which these leaves end, while threads share them.

    Making such a node takes a lock of the leaf and then the GIL (torch 2.13), while another thread may hold the GIL and
    wait for the lock: without this, two threads that use a leaf wait for each other now and then, solves or not.
    """
    return [x.view_as(x) for x in leaves]


def one_solve(f: nn.Module, i: int) -> Tensor:
    """The end and the gradient, from a generator of its own."""
    y0 = torch.linspace(-1, 1, 32).reshape(8, 4).requires_grad_()
    how: Any = {"controller": tm.FixedStep(0.25), "gradient": METHODS[i % len(METHODS)]}
    y = tm.solve(f, y0, (0.0, 1.0), generator=torch.Generator().manual_seed(i), **how).y[-1]
    grads = torch.autograd.grad(y.square().sum(), [y0, *f.parameters()])
    return torch.cat([y.detach().flatten(), *(g.flatten() for g in grads)])


class Meanwhile:
    """Repeats something in a thread of its own; n counts how often."""

    def __init__(self, run: Callable[[int], None]):
        self.run, self.n, self.error, self.ends = run, 0, None, threading.Event()
        self.thread = threading.Thread(target=self._repeat)

    def _repeat(self) -> None:
        try:
            while not self.ends.is_set() or not self.n:
                self.run(self.n)
                self.n += 1
        except BaseException as error:
            self.error = error

    def __enter__(self) -> "Meanwhile":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.set()
        self.thread.join()
        assert self.error is None, self.error


def in_threads(n: int, run: Callable[[int], None]) -> None:
    """run(0), ..., run(n - 1), each in a thread of its own."""
    errors: list[BaseException] = []

    def caught(i: int) -> None:
        try:
            run(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.parametrize("n", [80, pytest.param(1000, marks=pytest.mark.slow)])
def test_threads_that_solve_with_dropout_do_not_disturb_each_other(n):
    """Eight solve, a ninth draws from the default generator, a tenth runs backward with a hook on a parameter of f."""
    torch.manual_seed(0)
    f = Net()
    views = held(*f.parameters())
    alone = [one_solve(f, i) for i in range(n)]
    results: list[Any] = [None] * n
    drawn: list[Tensor] = []
    seen: list[int] = []
    handle = f.first.weight.register_hook(lambda g: seen.append(threading.get_ident()))

    def solves(thread: int) -> None:
        for i in range(thread, n, 8):
            results[i] = one_solve(f, i)

    def hooked(_: int) -> None:
        torch.autograd.grad(f.first.weight.sum(), f.first.weight)

    torch.manual_seed(1)
    with Meanwhile(lambda _: drawn.append(torch.rand(3))), Meanwhile(hooked) as other:
        in_threads(8, solves)
    handle.remove()
    assert views and all(map(torch.equal, results, alone))
    torch.manual_seed(1)
    assert all(torch.equal(x, torch.rand(3)) for x in drawn)
    assert seen.count(other.thread.ident or 0) == other.n
    # Each solve shows the whole gradient to the hook, once (Naive: once, too, as f's graph ends in one leaf).
    assert len(seen) == other.n + n
    assert f.first.weight._backward_hooks == {}


def test_a_plain_f_may_be_solved_while_another_thread_draws():
    """The default generator moves under a solve that draws nothing: it was taken for an f that draws sometimes."""
    f = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    y0 = torch.rand(8, 4)

    def solve(_: int = 0) -> Tensor:
        return tm.solve(lambda t, y: f(y), y0, (0.0, 1.0), controller=tm.FixedStep(0.1)).y

    alone = solve()
    with Meanwhile(lambda _: [torch.rand(10) for _ in range(10)]):  # type: ignore[arg-type, return-value]
        for _ in range(40):
            assert torch.equal(solve(), alone)


@pytest.mark.parametrize("has_history", [False, True])
def test_hooks_of_another_threads_backward_pass_are_called(has_history):
    """On a parameter, and on a tensor with a history: all of 300 and more, while solves with the same tensor run."""
    w = torch.full((4, 4), 0.1, requires_grad=True)
    h = torch.sin(w) if has_history else w
    seen, n, views = [], 0, held(w)
    h.register_hook(lambda g: seen.append(threading.get_ident()))

    def solves(_: int) -> None:
        y = tm.solve(lambda t, y: torch.tanh(y @ h), torch.ones(2, 4), (0.0, 1.0), controller=tm.FixedStep(0.02)).y
        torch.autograd.grad(y.sum(), w, retain_graph=True)

    with Meanwhile(solves) as other:
        while n < 300 or other.n < 10:
            torch.autograd.grad(h.sum(), w, retain_graph=True)
            n += 1
            if other.error:
                break
    assert views and seen.count(threading.get_ident()) == n
    assert len(seen) == n + other.n


def test_two_backward_passes_of_one_solve_at_the_same_time_draw_the_same_numbers():
    torch.manual_seed(0)
    f, y0 = Net(), torch.rand(8, 4).requires_grad_()
    y = tm.solve(f, y0, (0.0, 1.0), controller=tm.FixedStep(0.1), gradient=tm.ACA()).y[-1].sum()
    (alone,) = torch.autograd.grad(y, y0, retain_graph=True)

    def differentiates(_: int) -> None:
        for _ in range(5):
            assert torch.equal(torch.autograd.grad(y, y0, retain_graph=True)[0], alone)

    in_threads(4, differentiates)
