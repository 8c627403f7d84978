"""The physics of a bouncing ball, learned from the heights at which it was seen.

    python -m examples.learn_physics [--iterations 25] [--seed 0] [--out demo]

A ball falls through air and bounces; a camera sees its height 30 times a second, with an error of 5 mm. A model learns
all three parts of what happens: the acceleration in flight, a network of the velocity; the height at which the ball
touches the ground; and the part of its speed that a bounce leaves. Each flight is a solve that ends at an event, the
ground, and the next one begins there, so that the loss is differentiated through the times of all bounces. A Neural ODE
without events is trained in the same way, with many more parameters. Then both predict a throw that neither has seen.
Takes less than a minute on one core.
"""

from __future__ import annotations

import argparse
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from examples.pictures import BLUE, INK, ORANGE, bare_axes
from torchmali import ALF, MALI, AdaptiveStep, Dopri5, Event, FixedStep, Naive, Solution, solve

GRAVITY, DRAG = 9.81, 0.1  # m / s^2, 1 / m
ELASTICITY, RADIUS = 0.8, 0.12  # speed after a bounce over speed before it; height of the ball on the ground, in m
SEEN, UNSEEN = (2.0, 0.0), (0.8, 4.5)  # height and velocity at the start of two throws
DURATION, RATE, NOISE = 3.0, 30, 0.005  # s, frames per second, m
FIRST_SPAN, N_SPANS = (
    0.9,
    6,
)  # s; a bounce has to be right before a later one can be: longer and longer spans are learned
STEPS = FixedStep(0.025, land=False)  # fixed, so that the loss is smooth; outputs are read between them
MAX_BOUNCES = 12  # then the ball is at rest
FASTEST = 5.5  # m / s, about what the seen ball reaches

Tell = Callable[[float, float], None]  # is told of a span of time and of the error in it


def number(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


class Prediction(NamedTuple):
    heights: Tensor
    bounces: list[Tensor]  # their times


class Ball(nn.Module):
    """A ball that flies by its acceleration until it touches the ground, and bounces."""

    how = {"solver": ALF(), "controller": STEPS, "gradient": MALI()}

    @abstractmethod
    def acceleration(self, velocity: Tensor) -> Tensor: ...

    @abstractmethod
    def ground(self) -> tuple[Tensor, Tensor]:
        """The height of the ball when it touches the ground, and its speed after a bounce over that before it."""

    def slope(self, t: Tensor, y: Tensor) -> Tensor:
        """dy/dt of y = (height, velocity)."""
        return torch.stack([y[1], self.acceleration(y[1:])[0]])

    def forward(self, start: Sequence[float], times: Tensor) -> Prediction:
        """Predict the heights at these times after a start with a height and a velocity."""
        radius, elasticity = self.ground()
        t, y = times[0], torch.tensor(start, dtype=torch.float64)
        heights, bounces = [y[:1]], []
        while len(bounces) < MAX_BOUNCES and times[-1] > t:
            flight = self.fly(y, torch.cat([t[None], times[times > t]]), radius)
            heights.append(flight.y[1:, 0])
            if flight.event_t is None:
                break
            bounces.append(flight.event_t)
            t, y = flight.event_t, torch.stack([radius, -elasticity * flight.event_y[1]])
        at_rest = radius.expand(len(times) - sum(map(len, heights)))
        return Prediction(torch.cat([*heights, at_rest]), bounces)

    def fly(self, y: Tensor, times: Tensor, radius: Tensor) -> Solution:
        """Solve one flight: up to the ground, or to the last time."""
        touches = Event(lambda t, y: y[0] - radius, direction="down")
        return solve(self.slope, y, times, event=touches, on_no_event="flag", **self.how)


class World(Ball):
    """The ball that is seen."""

    how = {"solver": Dopri5(), "controller": AdaptiveStep(1e-9, 1e-9), "gradient": Naive()}

    def acceleration(self, velocity: Tensor) -> Tensor:
        return -GRAVITY - DRAG * velocity * velocity.abs()

    def ground(self) -> tuple[Tensor, Tensor]:
        return number(RADIUS), number(ELASTICITY)


class LearnedBall(Ball):
    """A ball of which nothing is known but that it falls and bounces."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).double()
        self.radius, self.logit = nn.Parameter(number(0.0)), nn.Parameter(number(1.0))

    def acceleration(self, velocity: Tensor) -> Tensor:
        return 10 * self.net(velocity[:, None] / 5)[:, 0] - 5

    def ground(self) -> tuple[Tensor, Tensor]:
        return self.radius, torch.sigmoid(self.logit)


class SmoothBall(nn.Module):
    """A Neural ODE without events, whose state has two more dimensions to keep what it likes."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 4)).double()

    def slope(self, t: Tensor, y: Tensor) -> Tensor:
        return 5 * self.net(y)

    def forward(self, start: Sequence[float], times: Tensor) -> Prediction:
        y = torch.tensor([*start, 0.0, 0.0], dtype=torch.float64)
        solution = solve(self.slope, y, times, solver=ALF(), controller=STEPS, gradient=MALI())
        return Prediction(solution.y[:, 0], [])


def rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def train(model: nn.Module, times: Tensor, seen: Tensor, n_iterations: int, tell: Tell) -> None:
    """Fit the seen heights by L-BFGS, over longer and longer spans; the last one gets four times as many iterations."""
    for span in torch.linspace(FIRST_SPAN, DURATION, N_SPANS).tolist():
        fit(model, times[times <= span + 1e-6], seen, n_iterations * (4 if span == DURATION else 1), tell)


def fit(model: nn.Module, times: Tensor, seen: Tensor, n_iterations: int, tell: Tell) -> None:
    how = {"line_search_fn": "strong_wolfe", "history_size": 50, "tolerance_change": 1e-12}
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=n_iterations, **how)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = ((model(SEEN, times).heights - seen[: len(times)]) / NOISE).square().mean()
        value.backward()
        tell(times[-1].item(), NOISE * value.item() ** 0.5)
        return value

    optimizer.step(loss)


class Throw(NamedTuple):
    """A throw of the true ball, and what the two models predict of it."""

    times: Tensor
    truth: Prediction
    learned: Prediction
    smooth: Prediction

    @property
    def errors(self) -> tuple[float, float]:
        """Root mean squares of the errors of the two predictions, in m."""
        learned, smooth = (rms(x.heights - self.truth.heights).item() for x in (self.learned, self.smooth))
        return learned, smooth


class Result(NamedTuple):
    ball: LearnedBall
    observed: Tensor  # heights at frames()
    seen: Throw
    unseen: Throw


def frames(rate: int = RATE) -> Tensor:
    return torch.linspace(0, DURATION, round(DURATION * rate) + 1, dtype=torch.float64)


def learn(seed: int, n_iterations: int, console: Console) -> Result:
    """Train both models on what the camera sees, and let them predict two throws."""
    torch.manual_seed(seed)
    with torch.no_grad():
        heights = World()(SEEN, frames()).heights
    observed = heights + NOISE * torch.randn(len(heights), dtype=torch.float64)
    ball, smooth = LearnedBall(), SmoothBall()
    for name, model in (("flights and bounces", ball), ("without events", smooth)):
        with progress_of(name, console) as tell:
            train(model, frames(), observed, n_iterations, tell)
    fine = frames(10 * RATE)
    with torch.no_grad():
        seen, unseen = (Throw(fine, *(x(start, fine) for x in (World(), ball, smooth))) for start in (SEEN, UNSEEN))
    return Result(ball, observed, seen, unseen)


@contextmanager
def progress_of(name: str, console: Console) -> Iterator[Tell]:
    """Show how far a training has come: a line that changes, or, where there is no terminal, one line at its end."""
    status = ""
    with console.status(name) as line:

        def tell(span: float, error: float) -> None:
            nonlocal status
            status = f"{name}: the first {span:.2f} s, error {1000 * error:.1f} mm"
            line.update(status)

        yield tell
    console.print(status, highlight=False)


@torch.no_grad()
def table_of(result: Result) -> Table:
    table = Table(title="What was learned")
    for column in ("", "learned", "true"):
        table.add_column(column, justify="right" if column else "left")
    radius, elasticity = result.ball.ground()
    gravity = -result.ball.acceleration(number(0.0)[None]).item()
    table.add_row("gravity (acceleration at rest)", f"{gravity:.2f} m/s²", f"{GRAVITY:.2f} m/s²")
    table.add_row("height of the ball on the ground", f"{radius.item():.4f} m", f"{RADIUS:.4f} m")
    table.add_row("speed that a bounce leaves", f"{elasticity.item():.4f}", f"{ELASTICITY:.4f}")
    for k, (x, y) in enumerate(zip(result.seen.learned.bounces, result.seen.truth.bounces, strict=False)):
        table.add_row(f"time of bounce {k + 1}", f"{x.item():.4f} s", f"{y.item():.4f} s")
    return table


def verdict(result: Result) -> str:
    (seen, smooth_seen), (unseen, smooth_unseen) = result.seen.errors, result.unseen.errors
    return (
        f"Error of the heights: {1000 * seen:.1f} mm where the ball was seen, {1000 * unseen:.1f} mm for a throw that "
        f"was not. Without events: {1000 * smooth_seen:.0f} mm and {1000 * smooth_unseen:.0f} mm."
    )


def draw_throw(ax: Axes, throw: Throw, title: str) -> None:
    bare_axes(ax, title, x="time (s)")
    learned, smooth = throw.errors
    label, top = f"learned without events: off by {100 * smooth:.0f} cm", 1.1 * throw.truth.heights.max()
    below_labels = throw.smooth.heights.where(throw.smooth.heights < top, torch.nan)
    ax.plot(throw.times, below_labels, color=ORANGE, lw=1.4, label=label)
    label = f"learned flights and bounces: off by {1000 * learned:.1f} mm"
    ax.plot(throw.times, throw.learned.heights, color=BLUE, lw=2, label=label)
    ax.set_ylim(0, 1.4 * top.item())


def show_labels(ax: Axes) -> None:
    how = {"facecolor": "white", "edgecolor": "none", "framealpha": 1, "borderaxespad": 0}  # no grid behind the labels
    ax.legend(fontsize=9, labelcolor="linecolor", loc="upper right", **how)


@torch.no_grad()
def draw(result: Result, file: Path) -> None:
    """Draw the throw that was seen, the one that was not, and the acceleration."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(3, 3, 2))
    draw_throw(left, result.seen, "height of the ball that was seen (m)")
    left.plot(frames(), result.observed, "o", color=INK, ms=2.2, zorder=3, label="seen by the camera")
    draw_throw(middle, result.unseen, "a throw that was not seen (m)")
    middle.plot(result.unseen.times, result.unseen.truth.heights, "--", color=INK, lw=0.9, zorder=3, label="true")
    bare_axes(right, "acceleration in flight (m/s²)", x="velocity (m/s)")
    velocity = torch.linspace(-FASTEST, FASTEST, 100, dtype=torch.float64)
    right.plot(velocity, result.ball.acceleration(velocity), color=BLUE, lw=2, label="learned")
    right.plot(velocity, World().acceleration(velocity), "--", color=INK, lw=0.9, label="true")
    for ax in (left, middle, right):
        show_labels(ax)
    figure.savefig(file, dpi=180)


def main(arguments: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(
        prog="python -m examples.learn_physics",
        description="Learn how a ball flies and bounces from the heights at which it was seen.",
    )
    parser.add_argument("--iterations", type=int, default=25, help="of L-BFGS for each span of time (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and the weights (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the picture (%(default)s)")
    options = parser.parse_args(arguments)
    console = Console()
    console.print(
        f"A ball falls from {SEEN[0]:g} m and bounces for {DURATION:g} s. Its height is seen {RATE} times a second.",
        highlight=False,
    )
    result = learn(options.seed, options.iterations, console)
    console.print(table_of(result), verdict(result), highlight=False)
    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "learn_physics.png"
    draw(result, picture)
    console.print(f"Picture: {picture}")
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are small
    main()
