"""A bouncing ball whose elasticity is learned from one observation: the time of a late bounce.

    python -m examples.bouncing_ball [--bounces 8] [--iterations 8] [--out demo]

The ball falls with the drag of the air. Each flight is a solve that ends at an event, the ground; each bounce turns the
velocity round and takes a part of it. The time of the last bounce is a differentiable function of the elasticity,
through all flights and all bounces, so that Newton's method finds the elasticity that explains an observed time. Its
quadratic convergence shows that the derivative is right. Takes a few seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from rich.console import Console
from rich.table import Table
from torch import Tensor

from examples.pictures import BLUE, INK, PALE, RED, bare_axes, label_ticks
from torchmali import ALF, MALI, Event, FixedStep, Solution, solve

GRAVITY, DRAG = 9.81, 0.05  # m / s^2, 1 / m
HEIGHT = 2.0  # m, from which the ball is dropped
TRUTH, GUESS = 0.85, 0.7  # elasticity: speed after a bounce over speed before it
LONGEST = 5.0  # s, more than any flight takes
N_POINTS = 500  # of a flight in the picture, most of them after its end


def fall(t: Tensor, y: Tensor) -> Tensor:
    """dy/dt of y = (height, velocity)."""
    return torch.stack([y[1], -GRAVITY - DRAG * y[1] * y[1].abs()])


GROUND = Event(lambda t, y: y[0], direction="down")


def fly(start: Tensor, state: Tensor, n_times: int = 2) -> Solution:
    """Solve one flight, from a time and a state up to the ground."""
    t = start + torch.linspace(0, LONGEST, n_times, dtype=torch.float64)
    controller = FixedStep(0.05, land=False)  # fixed, so that the time of a bounce is a smooth function of everything
    return solve(fall, state, t, solver=ALF(order=4), controller=controller, gradient=MALI(), event=GROUND)


def bounce(state: Tensor, elasticity: Tensor) -> Tensor:
    """Put the ball on the ground and turn its velocity round."""
    return torch.stack([torch.zeros_like(state[0]), -elasticity * state[1]])


def time_of_bounce(elasticity: Tensor, n: int) -> Tensor:
    """Return the time of the n-th bounce, differentiable."""
    t, state = torch.zeros((), dtype=torch.float64), torch.tensor([HEIGHT, 0.0], dtype=torch.float64)
    for _ in range(n):
        flight = fly(t, state)
        t, state = flight.event_t, bounce(flight.event_y, elasticity)
    return t


class Iteration(NamedTuple):
    elasticity: float
    time: float  # of the last bounce, with this elasticity
    slope: float  # its derivative


def learn(observed: float, n_bounces: int, n_iterations: int) -> list[Iteration]:
    """Find the elasticity with which the last bounce comes at the observed time, by Newton's method."""
    elasticity, found = torch.tensor(GUESS, dtype=torch.float64, requires_grad=True), []
    for _ in range(n_iterations):
        t = time_of_bounce(elasticity, n_bounces)
        (slope,) = torch.autograd.grad(t, elasticity)
        found.append(Iteration(elasticity.item(), t.item(), slope.item()))
        with torch.no_grad():
            elasticity -= (t - observed) / slope
    return found


@torch.no_grad()
def path(elasticity: float, n: int) -> tuple[list[float], list[float]]:
    """Return times and heights from the drop to the n-th bounce."""
    t, state = torch.zeros((), dtype=torch.float64), torch.tensor([HEIGHT, 0.0], dtype=torch.float64)
    times, heights = [], []
    for _ in range(n):
        flight = fly(t, state, N_POINTS)
        times += [*flight.t.tolist(), flight.event_t.item()]
        heights += [*flight.y[:, 0].tolist(), 0.0]
        t, state = flight.event_t, bounce(flight.event_y, torch.tensor(elasticity, dtype=torch.float64))
    return times, heights


def table_of(found: Sequence[Iteration], observed: float) -> Table:
    table = Table(title="Newton's method, with the derivative of the event time")
    for name in ("iteration", "elasticity", "error of the time", "d time / d elasticity"):
        table.add_column(name, justify="right")
    for k, x in enumerate(found):
        table.add_row(str(k), f"{x.elasticity:.12f}", f"{x.time - observed:+.1e} s", f"{x.slope:.6f} s")
    return table


def draw(found: Sequence[Iteration], observed: float, n_bounces: int, file: Path) -> None:
    """Draw the flights with the first and the last elasticity, and the error of the time by iteration."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    bare_axes(left, "height of the ball (m)", x="time (s)")
    for x, color, name in ((found[0], RED, "guess"), (found[-1], BLUE, "learned")):
        left.plot(*path(x.elasticity, n_bounces), color=color, lw=1.6, label=f"{name}: {x.elasticity:.4g}")
    left.plot([observed], [0.0], "o", color=INK, ms=6, clip_on=False, zorder=3)
    left.annotate(
        f"observed: bounce {n_bounces}",
        (observed, 0),
        (0, 50),
        textcoords="offset points",
        ha="right",
        color=INK,
        arrowprops={"arrowstyle": "-", "color": PALE, "relpos": (1, 0), "shrinkB": 4},
    )
    left.legend(frameon=False, fontsize=9, labelcolor="linecolor", handlelength=0)
    left.set_ylim(bottom=0)
    bare_axes(right, "error of the time (s)", x="iteration")
    errors = [max(abs(x.time - observed), 1e-16) for x in found]
    right.plot(range(len(errors)), errors, "o-", color=BLUE, lw=2, ms=4)
    right.set_yscale("log")
    right.yaxis.set_major_locator(LogLocator(numticks=6))
    label_ticks(right, lambda value: f"{value:.0e}")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(file, dpi=180)


def main(arguments: Sequence[str] | None = None) -> list[Iteration]:
    parser = argparse.ArgumentParser(
        prog="python -m examples.bouncing_ball",
        description="Learn the elasticity of a bouncing ball from the time of one bounce.",
    )
    parser.add_argument("--bounces", type=int, default=8, help="the bounce that is observed (%(default)s)")
    parser.add_argument("--iterations", type=int, default=8, help="of Newton's method (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the picture (%(default)s)")
    options = parser.parse_args(arguments)
    console = Console()
    truth = torch.tensor(TRUTH, dtype=torch.float64)
    observed = time_of_bounce(truth, options.bounces).item()
    console.print(
        f"A ball with elasticity {TRUTH} falls from {HEIGHT:g} m. "
        f"Observed: bounce {options.bounces} at {observed:.4f} s.",
        highlight=False,
    )
    found = learn(observed, options.bounces, options.iterations)
    console.print(table_of(found, observed))
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "bouncing_ball.png"
    draw(found, observed, options.bounces, picture)
    console.print(f"Picture: {picture}")
    return found


if __name__ == "__main__":
    main()
