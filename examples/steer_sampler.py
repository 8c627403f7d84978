"""Optimise through a sampler in constant memory: the missing half of a digit, by the noise that it comes from.

    python -m examples.steer_sampler

A small U-Net was trained by flow matching (its weights are in experiments/records/matching/). Digits are drawn with 20
steps, half of each is hidden, and other noise is optimised so that the half that is seen is met. The gradient goes
through all steps exactly; with MALI its memory does not grow with their number.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor

from experiments.matching.trained import Unlabelled, velocity
from torchmali import MALI, Naive
from torchmali.flow import Sampler
from torchmali.measure import peak_bytes

N_IMAGES, SIDE = 4, 28


class Result(NamedTuple):
    truth: Tensor
    found: list[Tensor]  # images after 0, 1, 3, ... iterations
    losses: list[float]
    peaks: dict[int, tuple[int, int]]  # bytes by the number of steps: of MALI, of plain autograd


def half_seen(x: Tensor) -> Tensor:
    return x[..., : x.shape[-1] // 2]


def steered(sampler: Sampler, truth: Tensor, n_steps: int, iterations: int) -> tuple[list[Tensor], list[float]]:
    """Optimise noise by Adam, on the shell in which normal noise lies; return images on the way, and losses."""
    z = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    optimizer, images, losses = torch.optim.Adam([z], lr=0.2), [], []
    for i in range(iterations + 1):
        x = sampler.sample(z, n_steps=n_steps)
        loss = (half_seen(x) - half_seen(truth)).square().sum() / len(x)
        losses.append(loss.item())
        if i in (0, iterations // 4, iterations):
            images.append(x.detach())
        optimizer.zero_grad()
        loss.backward()  # through all steps
        optimizer.step()
        with torch.no_grad():
            z *= math.sqrt(z[0].numel()) / z.flatten(1).norm(dim=1)[:, None, None, None]
    return images, losses


def peaks(f: Unlabelled, truth: Tensor, n_steps: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Peak memory of one gradient by MALI and by plain autograd."""
    z, found = torch.randn(truth.shape).requires_grad_(), {}
    for n in n_steps:
        samplers = [Sampler(f, gradient=method) for method in (MALI(), Naive())]
        mali, naive = (
            peak_bytes(lambda s=sampler, n=n: torch.autograd.grad(s.sample(z, n_steps=n).square().sum(), z))
            for sampler in samplers
        )
        found[n] = (mali, naive)
    return found


def draw(result: Result) -> Figure:
    hidden = result.truth.clone()
    hidden[..., SIDE // 2 :] = 0  # grey
    rows = {"seen": hidden, "first": result.found[0], "on the way": result.found[1], "last": result.found[-1]}
    rows["hidden truth"] = result.truth
    figure = Figure(figsize=(1.4 * len(rows), 1.2 * len(result.truth)), layout="constrained")
    axes = figure.subplots(len(result.truth), len(rows), squeeze=False)
    for column, (title, images) in enumerate(rows.items()):
        for row, image in enumerate(images):
            axes[row][column].imshow(image[0].numpy(), cmap="gray", vmin=-1, vmax=1, interpolation="nearest")
            axes[row][column].set_axis_off()
        axes[0][column].set_title(title, fontsize=10)
    return figure


def main(args: Sequence[str] | None = None) -> Result:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="steps of the sampler")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="a folder for the picture")
    options = parser.parse_args(args)
    net, _ = velocity("cpu")
    f = Unlabelled(net)
    with torch.no_grad():
        noise = torch.randn(N_IMAGES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
        truth = Sampler(net).sample(noise, torch.tensor([3, 5, 7, 8]), n_steps=options.steps)
    images, losses = steered(Sampler(f), truth, options.steps, options.iterations)
    result = Result(truth, images, losses, peaks(f, truth, (options.steps // 4, options.steps)))
    table = Table(title=f"loss {losses[0]:.1f} -> {losses[-1]:.2f}; peak memory of one gradient")
    for column in ("steps", "MALI, MB", "plain autograd, MB"):
        table.add_column(column, justify="right")
    for n, (mali, naive) in result.peaks.items():
        table.add_row(str(n), f"{mali / 1e6:.1f}", f"{naive / 1e6:.1f}")
    Console().print(table)
    options.out.mkdir(parents=True, exist_ok=True)
    draw(result).savefig(options.out / "steer_sampler.png", dpi=120)
    return result


if __name__ == "__main__":
    main()
