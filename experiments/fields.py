"""Small fields whose memory and counts are measured: each with its state and number of layers N_f."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Field(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.layers(z)


class Made(NamedTuple):
    f: Field
    z0: Tensor
    n_layers: int  # N_f


def mlp(seed: int, dtype: torch.dtype = torch.float32) -> Made:
    torch.manual_seed(seed)
    f = Field(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).to(dtype)
    return Made(f, torch.randn(128, 64, dtype=dtype), 2)


def conv(seed: int, dtype: torch.dtype = torch.float32) -> Made:
    torch.manual_seed(seed)
    f = Field(nn.Conv2d(8, 32, 3, padding=1), nn.Tanh(), nn.Conv2d(32, 8, 3, padding=1)).to(dtype)
    return Made(f, torch.randn(16, 8, 8, 8, dtype=dtype), 2)


FIELDS: dict[str, Callable[..., Made]] = {"MLP": mlp, "conv": conv}
