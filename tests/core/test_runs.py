"""Runs: fixed steps between which nobody looks at the state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm
from torchmali.controllers import ControllerState, SolveStart
from torchmali.state.floats import Floats
from torchmali.tape import Start, Step, Tape, in_runs, rewind

METHODS = [tm.MALI(checkpoint_every=None), tm.MALI(checkpoint_every=3), tm.MALI(memory=2000), tm.ACA(), tm.Naive()]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.sin(3 * t) * self.net(y)


def start() -> Tensor:
    return torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.mark.parametrize("refresh", ["auto", "never", 5])
@pytest.mark.parametrize("times", [[0.0, 1.0], [1.0, 0.55, -0.3]], ids=str)
def test_the_solution_is_the_same_to_the_bit_with_every_gradient_method(refresh, times):
    f, how = Net(), {"solver": tm.ALF(refresh=refresh), "controller": tm.FixedStep(0.03)}
    with torch.no_grad():
        expected = tm.solve(f, start(), times, **how).y
    for method in METHODS:
        y0, t = start().requires_grad_(), torch.tensor(times, dtype=torch.float64, requires_grad=True)
        assert torch.equal(tm.solve(f, y0, times, gradient=method, **how).y, expected), method
        assert torch.equal(tm.solve(f, y0, t, gradient=method, **how).y, expected), method


def drifts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The lengths of all drifts of floats from now on."""
    found, drift = [], Floats.drift

    def noted(self: Floats, e: float) -> Floats:
        found.append(e)
        return drift(self, e)

    monkeypatch.setattr(Floats, "drift", noted)
    return found


def test_two_drifts_between_steps_are_one(monkeypatch):
    found = drifts(monkeypatch)
    how = {"solver": tm.ALF(refresh="never"), "controller": tm.FixedStep(0.1)}
    y = tm.solve(Net(), start().requires_grad_(), [0.0, 1.0, 1.5], **how).y
    assert len(found) == 11 + 6
    assert found[:2] == pytest.approx([0.05, 0.1]) and sum(found) == pytest.approx(1.5)
    y.sum().backward()
    assert len(found) == 2 * (11 + 6) and sum(found) == pytest.approx(0.0)


def test_a_look_at_every_step_makes_it_a_step_of_its_own(monkeypatch):
    found = drifts(monkeypatch)
    with torch.no_grad():
        solution = tm.solve(Net(), start(), [0.0, 1.0], controller=tm.FixedStep(0.1), dense=True)
    assert len(found) == 20 and torch.isfinite(solution(0.33)).all()


def test_rewind_gives_steps_in_one_piece_but_for_kept_states():
    tape = Tape()
    tape.events += [Start(0.0), Step(0.0, 1.0, 0, 0, None), Step(1.0, 2.0, 0, 0, None, False, True)]
    tape.events += [Step(2.0, 3.0, 0, 0, 7, False, True), Step(3.0, 4.0, 0, 0, None, False, True)]
    tape.events += [Step(4.0, 5.0, 0, 1, None, True, True)]
    undone: list[tuple[float, float]] = []

    def undo(steps: list[Step]) -> None:
        undone.append((steps[-1].t1, steps[0].t0))

    rewind(tape.events, [], None, lambda step, _: undo([step]), None, lambda steps, _: undo(list(steps)))  # pyright: ignore
    assert undone == [(5.0, 3.0), (3.0, 2.0), (2.0, 0.0)]
    assert [len(run) for run in in_runs(tape.events)] == [1, 5]


class Counting(tm.StepController):
    """Steps of 0.1 over outputs, by a state that changes in place and knows how often it was asked."""

    def __init__(self):
        self.asked: list[float] = []

    def ends_on_outputs(self, solver: tm.Solver) -> bool:
        return False

    def begin(self, start: SolveStart) -> ControllerState:
        return _CountingState(start, self.asked)


class _CountingState(ControllerState):
    def __init__(self, start: SolveStart, asked: list[float]):
        super().__init__(start)
        self.asked = asked

    def next_time(self, t: float, target: float) -> float:
        self.asked.append(t)
        return t + 0.1 if t + 0.15 < target else target


def test_a_controller_is_asked_once_for_each_step():
    controller = Counting()
    with torch.no_grad():
        solution = tm.solve(Net(), start(), [0.0, 0.25, 0.77, 1.0], controller=controller)
    assert len(controller.asked) == solution.stats.n_steps == 10
    assert controller.asked == pytest.approx([0.1 * i for i in range(10)])
