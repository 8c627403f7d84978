"""Workloads that benchmarks share: float32, t in [0, 1], loss = sum(z(1)^2).

W1 is small enough to show the overhead of a library, W2 large enough to show its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class MLP(nn.Module):
    """f(t, y): three linear layers with tanh between."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, width)
        )

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


@dataclass(frozen=True)
class Workload:
    name: str
    batch: int
    width: int
    hidden: int

    def make(self) -> tuple[MLP, Tensor]:
        torch.manual_seed(0)
        return MLP(self.width, self.hidden), 0.5 * torch.randn(self.batch, self.width)


W1 = Workload("W1", batch=128, width=8, hidden=64)
W2 = Workload("W2", batch=512, width=64, hidden=256)
