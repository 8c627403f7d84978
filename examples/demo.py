"""A first look at torchmali: train a small Neural ODE, then compare four ways to differentiate it.

    python -m examples.demo [--epochs 24] [--seed 0] [--threads 1] [--out demo]

Trains a classifier of scikit-learn's digits whose hidden layer is an ODE, in float32 with MALI
gradients; prints a table of the naive, adjoint, ACA and MALI gradients of the trained ODE block;
and draws their peak memory against the number of steps. Takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, PercentFormatter
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from examples.pictures import BLUE, GREY, INK, ORANGE, PALE, RED, bare_axes, label_ticks
from torchmali import ACA, ALF, MALI, Adjoint, FixedStep, GradientMethod, Naive, Solution, Stats, solve
from torchmali.measure import LiveBytes, peak_bytes

N_STEPS = 8  # of the ODE block, in training and in the table
BATCH = 64
CHANNELS = 16
LEARNING_RATE = 4e-3
N_HELD_OUT = 360
SPLIT_SEED = 0  # not --seed: the held-out images are the same in every run
N_ROUNDS = 30  # of timing
STEPS_IN_PICTURE = (4, 8, 16, 32, 64, 128, 256)

METHODS: dict[str, GradientMethod] = {"naive": Naive(), "adjoint": Adjoint(), "ACA": ACA(), "MALI": MALI()}
COLORS = {"naive": RED, "adjoint": GREY, "ACA": ORANGE, "MALI": BLUE}


class Dynamics(nn.Module):
    """f in dz/dt = f(t, z): two convolutions with a group norm before them."""

    def __init__(self, channels: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.GroupNorm(4, channels),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.layers(z)


def evolve(f: nn.Module, z0: Tensor, n_steps: int, gradient: GradientMethod) -> Solution:
    """Solve the ODE block: z from t = 0 to t = 1 in equal steps."""
    return solve(f, z0, [0.0, 1.0], solver=ALF(), controller=FixedStep(1 / n_steps), gradient=gradient)


class Classifier(nn.Module):
    """Stem, ODE block, head: 8 x 8 grey images to 10 logits."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, CHANNELS, 3, padding=1), nn.GroupNorm(4, CHANNELS), nn.ReLU())
        self.f = Dynamics(CHANNELS)
        self.head = nn.Sequential(
            nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(16 * CHANNELS, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        z0 = self.stem(images)
        return self.head(evolve(self.f, z0, N_STEPS, MALI()).y[-1])


class Digits(NamedTuple):
    train_images: Tensor  # (image, 1, 8, 8)
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


class Epoch(NamedTuple):
    loss: float  # mean over the training images
    accuracy: float  # on the held-out images


def read_digits() -> Digits:
    pixels, labels = (torch.as_tensor(x) for x in load_digits(return_X_y=True))
    images = (pixels / 16).float().view(-1, 1, 8, 8)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order[:N_HELD_OUT], order[N_HELD_OUT:]
    return Digits(images[train], labels[train], images[test], labels[test])


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    hits = model(images).argmax(1) == labels
    model.train()
    return hits.double().mean().item()


def train(model: nn.Module, digits: Digits, n_epochs: int, console: Console) -> list[Epoch]:
    """Train with AdamW and a one-cycle learning rate. The held-out images are for accuracies alone."""
    n = len(digits.train_images)
    n_batches = n_epochs * -(-n // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, n_batches)
    history: list[Epoch] = []
    with training_progress(console) as progress:
        task = progress.add_task("", total=n_batches, epoch=0, n_epochs=n_epochs, status="")
        for k in range(1, n_epochs + 1):
            progress.update(task, epoch=k)
            total = 0.0
            for batch in torch.randperm(n).split(BATCH):
                logits = model(digits.train_images[batch])
                loss = F.cross_entropy(logits, digits.train_labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                total += loss.item() * len(batch)
                progress.advance(task)
            epoch = Epoch(total / n, accuracy(model, digits.test_images, digits.test_labels))
            history.append(epoch)
            status = f"loss {epoch.loss:.4f}  held-out {epoch.accuracy:.1%}"
            progress.update(task, status=status)
            if not console.is_terminal and (k % 5 == 0 or k == n_epochs):
                console.print(f"epoch {k:2}/{n_epochs}  {status}")
    return history


def training_progress(console: Console) -> Progress:
    return Progress(
        TextColumn("epoch {task.fields[epoch]}/{task.fields[n_epochs]}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=console,
        disable=not console.is_terminal,
    )


class Block(NamedTuple):
    """The trained ODE block, with one batch at its input and the gradient of the loss at its output."""

    f: nn.Module
    z0: Tensor
    a1: Tensor  # dL/dz(1)

    def differentiate(self, gradient: GradientMethod, n_steps: int) -> tuple[list[Tensor], Stats]:
        """Return dL/dz(0) and dL/dtheta, by one forward and one backward pass, with the counts of the solve."""
        solution = evolve(self.f, self.z0, n_steps, gradient)
        inputs = [self.z0, *self.f.parameters()]
        grads = torch.autograd.grad(solution.y[-1], inputs, self.a1)
        return list(grads), solution.stats


def block_of(model: Classifier, images: Tensor, labels: Tensor) -> Block:
    model = model.eval()
    with torch.no_grad():
        z0 = model.stem(images)
        z1 = evolve(model.f, z0, N_STEPS, MALI()).y[-1]
    z1.requires_grad_()
    (a1,) = torch.autograd.grad(F.cross_entropy(model.head(z1), labels), z1)
    return Block(model.f, z0.requires_grad_(), a1)


@dataclass
class Row:
    error: float  # relative to the exact discrete gradient, in float64
    stats: Stats
    peak: int  # bytes
    time: float  # relative to naive


def compare(model: Classifier, images: Tensor, labels: Tensor) -> dict[str, Row]:
    single = block_of(model, images, labels)
    double = block_of(copy.deepcopy(model).double(), images.double(), labels)
    exact, _ = double.differentiate(Naive(), N_STEPS)
    times = relative_times(single)
    rows = {}
    for name, method in METHODS.items():
        grads, stats = double.differentiate(method, N_STEPS)
        peak = peak_bytes(lambda method=method: single.differentiate(method, N_STEPS))
        rows[name] = Row(relative_error(grads, exact), stats, peak, times[name])
    return rows


def relative_error(grads: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """|grads - exact| / |exact| in the 2-norm over all tensors together."""
    a, b = (torch.cat([g.flatten() for g in gs]) for gs in (grads, exact))
    return ((a - b).norm() / b.norm()).item()


def relative_times(block: Block) -> dict[str, float]:
    """Median over rounds of time / naive's time in the same round; the first round warms up."""
    ratios: dict[str, list[float]] = {name: [] for name in METHODS}
    for k in range(N_ROUNDS + 1):
        seconds = {}
        for name, method in METHODS.items():
            start = time.perf_counter()
            block.differentiate(method, N_STEPS)
            seconds[name] = time.perf_counter() - start
        if k > 0:
            for name in METHODS:
                ratios[name].append(seconds[name] / seconds["naive"])
    return {name: statistics.median(values) for name, values in ratios.items()}


def peaks_by_steps(block: Block) -> dict[str, list[int]]:
    peaks: dict[str, list[int]] = {name: [] for name in METHODS}
    for name, method in METHODS.items():
        for n_steps in STEPS_IN_PICTURE:
            with LiveBytes() as live:
                block.differentiate(method, n_steps)
            peaks[name].append(live.peak)
    return peaks


@contextmanager
def one_thread():
    """Context with one thread, on which times of small operations are steadier, above all on a busy machine."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n)


def as_bytes(n: float) -> str:
    return f"{n / 1e6:.3g} MB" if n >= 1e6 else f"{n / 1e3:.3g} kB"


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def table_of(rows: dict[str, Row]) -> Table:
    table = Table(
        title="Four gradients of the trained ODE block",
        caption=(
            f"{N_STEPS} ALF steps, a batch of {BATCH}. Error: relative distance (2-norm, block "
            "parameters and input) from autograd through the same steps, all in float64; naive "
            "is that reference. Peak: bytes of live tensors in forward + backward, float32. "
            f"Time: forward + backward, float32, one thread; median of {N_ROUNDS} within-round "
            "ratios, methods interleaved."
        ),
        caption_justify="left",
    )
    table.add_column("gradient")
    table.add_column("error", justify="right")
    table.add_column("evaluations of f\nforward + backward", justify="center")
    table.add_column("peak memory", justify="right")
    table.add_column("time\n(naive = 1)", justify="right")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row.error:.1e}" if row.error else "0",
            f"{row.stats.n_evals_forward} + {row.stats.n_evals_backward}",
            f"{row.peak / 1e6:.1f} MB",
            f"{row.time:.2f}",
            style="bold" if name == "MALI" else "",
        )
    return table


def verdict(rows: dict[str, Row]) -> str:
    mali, naive, adjoint, aca = (rows[name] for name in ("MALI", "naive", "adjoint", "ACA"))
    return (
        f"MALI's gradient is {mali.error:.1e} away from that of autograd, the adjoint's "
        f"{adjoint.error:.1e}. At {N_STEPS} steps MALI's peak is {mali.peak / naive.peak:.2f} of "
        f"naive's, {mali.peak / aca.peak:.2f} of ACA's and {mali.peak / adjoint.peak:.2f} of the "
        f"adjoint's, for {mali.time:.2f} times naive's time."
    )


def finding(peaks: dict[str, list[int]]) -> tuple[str, str]:
    """Title and second line of the picture: which methods are flat, and what the others take."""
    flat = [name for name, values in peaks.items() if max(values) <= 1.01 * min(values)]
    title = "Peak memory against the number of steps"
    if flat:
        title = f"The memory of {listed(flat[::-1])} does not grow with the number of steps"
    times_mali = [
        f"{name} takes {values[-1] / peaks['MALI'][-1]:.0f} times"
        for name, values in peaks.items()
        if name not in (*flat, "MALI")
    ]
    if not times_mali:
        return title, ""
    return title, f"At {STEPS_IN_PICTURE[-1]} steps, {listed(times_mali)} as much as MALI"


def log_axis(ax: Axes, label: Callable[[float], str]) -> None:
    """A vertical log axis with ticks at 1, 3, 10, 30, ..."""
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    label_ticks(ax, label)


def spread(values: Iterable[float], ratio: float) -> list[float]:
    """Heights for labels on a log axis, each at least `ratio` times the one below it."""
    values = list(values)
    heights = values.copy()
    floor = 0.0
    for i in sorted(range(len(values)), key=values.__getitem__):
        floor = heights[i] = max(values[i], floor * ratio)
    return heights


def draw_memory(peaks: dict[str, list[int]], path: Path) -> None:
    figure = Figure(figsize=(7.5, 4.6))
    ax = figure.add_axes((0.1, 0.12, 0.7, 0.66))
    bare_axes(ax)
    ax.set_xscale("log", base=2)
    ax.set_xticks(STEPS_IN_PICTURE, [str(n) for n in STEPS_IN_PICTURE])
    log_axis(ax, as_bytes)
    heights = spread((values[-1] for values in peaks.values()), ratio=1.32)
    for (name, values), height in zip(peaks.items(), heights, strict=True):
        weight, width = ("bold", 2.8) if name == "MALI" else ("normal", 1.8)
        ax.plot(STEPS_IN_PICTURE, values, "o-", color=COLORS[name], lw=width, ms=2 * width)
        ax.annotate(
            f"{name}  {as_bytes(values[-1])}",
            (STEPS_IN_PICTURE[-1], height),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=COLORS[name],
            fontweight=weight,
        )
    title, second = finding(peaks)
    figure.text(0.025, 0.935, title, fontsize=12.5, fontweight="bold", color=INK)
    figure.text(0.025, 0.877, second, color=INK)
    ax.set_xlabel("number of steps", color=PALE, fontsize=9, labelpad=6)
    unit = f"peak bytes of live tensors, forward + backward, batch of {BATCH}"
    figure.text(0.025, 0.822, unit, fontsize=9, color=PALE)
    figure.savefig(path, dpi=180)


def draw_training(history: list[Epoch], path: Path) -> None:
    figure = Figure(figsize=(7.5, 2.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = range(1, len(history) + 1)
    for ax, title, values in (
        (left, "training loss", [epoch.loss for epoch in history]),
        (right, "held-out accuracy", [epoch.accuracy for epoch in history]),
    ):
        bare_axes(ax, title, x="epoch")
        ax.plot(epochs, values, color=COLORS["MALI"], lw=2)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    log_axis(left, lambda loss: f"{loss:g}")
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    figure.savefig(path, dpi=180)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Train a Neural ODE on digits with MALI, then compare four gradient methods.",
    )
    parser.add_argument("--epochs", type=positive, default=24, help="epochs of training (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--threads", type=positive, default=1, help="of training (default 1: the tensors are small)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the pictures (%(default)s)")
    options = parser.parse_args()
    console = Console()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    digits, model = read_digits(), Classifier()
    n_parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"[bold]A Neural ODE learns handwritten digits[/]: {len(digits.train_images)} images to "
        f"learn from, {len(digits.test_images)} held out; {n_parameters} parameters, "
        f"{N_STEPS} ALF steps, MALI gradients, float32.",
        highlight=False,
    )
    start = time.perf_counter()
    history = train(model, digits, options.epochs, console)
    seconds = time.perf_counter() - start
    console.print(f"Held-out accuracy: [bold]{history[-1].accuracy:.1%}[/] after {seconds:.0f} s\n", highlight=False)

    images, labels = digits.train_images[:BATCH], digits.train_labels[:BATCH]
    with one_thread():
        rows = compare(model, images, labels)
        console.print(table_of(rows), "", verdict(rows), "", sep="\n", highlight=False)
        with console.status("Measuring memory against the number of steps ..."):
            peaks = peaks_by_steps(block_of(model, images, labels))
    options.out.mkdir(parents=True, exist_ok=True)
    draw_memory(peaks, options.out / "memory.png")
    draw_training(history, options.out / "training.png")
    console.print(f"Pictures: {options.out / 'memory.png'}, {options.out / 'training.png'}")


if __name__ == "__main__":
    main()
