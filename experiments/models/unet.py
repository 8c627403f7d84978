"""A small U-Net for the velocity of flow matching: of images, times and labels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PATCH = 2  # pixels of a patch along a side: the network works on images of half the side


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut; the embedding of time and label scales and shifts what lies between them."""

    def __init__(self, n_in: int, n_out: int, n_embedding: int):
        super().__init__()
        self.norm_in, self.norm_out = nn.GroupNorm(8, n_in), nn.GroupNorm(8, n_out)
        self.conv_in, self.conv_out = nn.Conv2d(n_in, n_out, 3, padding=1), nn.Conv2d(n_out, n_out, 3, padding=1)
        self.embed = nn.Linear(n_embedding, 2 * n_out)
        self.shortcut = nn.Identity() if n_in == n_out else nn.Conv2d(n_in, n_out, 1)
        nn.init.zeros_(self.conv_out.weight)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        scale, shift = self.embed(embedding)[:, :, None, None].chunk(2, 1)
        h = self.conv_in(F.silu(self.norm_in(x)))
        h = self.conv_out(F.silu(self.norm_out(h) * (1 + scale) + shift))
        return self.shortcut(x) + h


class UNet(nn.Module):
    """Velocity v(t, x, labels) of images x, (batch, channel, height, width), by a U-Net of two resolutions.

    t: one time, or one for each image. labels: from 0 to n_classes, where n_classes itself says "no label". Sides of x
    must be divisible by 4.
    """

    def __init__(self, channels: int, widths: Sequence[int], n_classes: int, n_embedding: int = 128):
        super().__init__()
        fine, coarse = widths
        self.n_classes, self.n_waves = n_classes, 32
        self.labels = nn.Embedding(n_classes + 1, n_embedding)
        self.time = nn.Sequential(
            nn.Linear(2 * self.n_waves, n_embedding), nn.SiLU(), nn.Linear(n_embedding, n_embedding)
        )
        self.stem = nn.Conv2d(PATCH * PATCH * channels, fine, 3, padding=1)
        self.down = nn.Conv2d(fine, coarse, 3, stride=2, padding=1)
        self.up = nn.Conv2d(coarse, fine, 3, padding=1)
        self.going_down = ResidualBlock(fine, fine, n_embedding)
        self.middle = nn.ModuleList([ResidualBlock(coarse, coarse, n_embedding) for _ in range(2)])
        self.going_up = ResidualBlock(2 * fine, fine, n_embedding)
        self.norm = nn.GroupNorm(8, fine)
        self.head = nn.Conv2d(fine, PATCH * PATCH * channels, 3, padding=1)
        nn.init.zeros_(self.head.weight)

    def forward(self, t: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        embedding = F.silu(self.time(self.waves(t, x)) + self.labels(labels))
        fine = self.going_down(self.stem(F.pixel_unshuffle(x, PATCH)), embedding)
        h = self.down(fine)
        for block in self.middle:
            h = block(h, embedding)
        h = self.up(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        h = self.going_up(torch.cat([h, fine], 1), embedding)
        return F.pixel_shuffle(self.head(F.silu(self.norm(h))), PATCH)

    def waves(self, t: Tensor, x: Tensor) -> Tensor:
        """Sines and cosines of t, from one half of a period in [0, 1] to a hundred times as many.

        At least in float32: bfloat16 has no digits for so many periods.
        """
        dtype = torch.promote_types(x.dtype, torch.float32)
        frequencies = torch.logspace(0, 2, self.n_waves, dtype=dtype, device=x.device) * math.pi
        angles = t.to(dtype).expand(len(x))[:, None] * frequencies
        return torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype)
