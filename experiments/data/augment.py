"""Augmentation of batches of images that are tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def crop_and_flip(images: Tensor, shifts: Tensor, flips: Tensor, pad: int) -> Tensor:
    """Shift each image, with black beyond its edges, and mirror some.

    images: (image, channel, row, column). shifts: int64 (image, 2), down and right, from 0 to 2 pad, where pad is no
    shift. flips: bool (image,).
    """
    n, channels, height, width = images.shape
    padded = F.pad(images, (pad, pad, pad, pad))
    rows = shifts[:, 0, None] + torch.arange(height)
    columns = shifts[:, 1, None] + torch.arange(width)
    columns = torch.where(flips[:, None], columns.flip(1), columns)
    image, channel = torch.arange(n).view(-1, 1, 1, 1), torch.arange(channels).view(1, -1, 1, 1)
    return padded[image, channel, rows[:, None, :, None], columns[:, None, None, :]]
