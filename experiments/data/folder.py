"""Any set of pictures sorted into folders, as ImageNet is: ROOT/{train,val}/<class>/*.{jpg,jpeg,png}."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from experiments.data.source import Source

SOURCE = Source(
    name="The folder of pictures",
    files="{train,val}/<class>/*.{jpg,jpeg,png}",
    home="image-net.org (ImageNet), or make one of your own",
    without="the presets on CIFAR-10 and on scikit-learn's digits",
)
SUFFIXES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True)
class Index:
    """Paths of the pictures, sorted by class and name; nothing is decoded yet."""

    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: Tensor  # int64; (picture,)

    def __len__(self) -> int:
        return len(self.paths)


class Pictures(NamedTuple):
    train: Index
    val: Index


class Box(NamedTuple):
    """A part of a picture, in pixels."""

    top: int
    left: int
    height: int
    width: int


def index(root: Path | None) -> Pictures:
    """Index both parts, which must have the same classes."""
    train, val = _index(root, "train"), _index(root, "val")
    if train.classes != val.classes:
        only = sorted(set(train.classes) ^ set(val.classes))
        some = ", ".join(only[:5]) + (f" and {len(only) - 5} more" if len(only) > 5 else "")
        raise SOURCE.missing(root, f"train and val must have the same classes, but only one of them has {some}")
    return Pictures(train, val)


def _index(root: Path | None, split: str) -> Index:
    place = None if root is None else root / split
    if place is None or not place.is_dir():
        raise SOURCE.missing(root, f"there is no folder {split}")
    classes = tuple(sorted(path.name for path in place.iterdir() if path.is_dir() and path.name[0] != "."))
    if not classes:
        raise SOURCE.missing(root, f"{split} has no class folders")
    paths, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(p for p in (place / name).iterdir() if p.suffix.lower() in SUFFIXES and p.name[0] != ".")
        if not found:
            raise SOURCE.missing(root, f"{split}/{name} has no pictures")
        paths += found
        labels += [label] * len(found)
    return Index(classes, tuple(paths), torch.tensor(labels))


def centre_crops(paths: Sequence[Path], shorter: int, size: int) -> Tensor:
    """Scale the shorter side to `shorter`, cut size x size from the middle: uint8 (n, 3, size, size)."""
    if not 0 < size <= shorter:
        raise ValueError(f"A crop of {size} needs a shorter side of at least {size}, not {shorter}.")
    return torch.stack([_centre_crop(read(path), shorter, size) for path in paths])


def random_crops(
    paths: Sequence[Path],
    size: int,
    generator: torch.Generator,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Cut a random part, scale it to size x size: uint8 (n, 3, size, size). See `draw_box`."""
    pictures = (read(path) for path in paths)
    return torch.stack([crop(x, draw_box(x.height, x.width, generator, scale, ratio), size) for x in pictures])


def draw_box(
    height: int, width: int, generator: torch.Generator, scale: tuple[float, float], ratio: tuple[float, float]
) -> Box:
    """Draw a part of a picture as torchvision does. scale: of the area; ratio: width over height, log-uniform."""

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item()

    for _ in range(10):
        area = height * width * uniform(*scale)
        shape = math.exp(uniform(math.log(ratio[0]), math.log(ratio[1])))
        h, w = round(math.sqrt(area / shape)), round(math.sqrt(area * shape))
        if 0 < h <= height and 0 < w <= width:
            top = int(torch.randint(height - h + 1, (), generator=generator))
            return Box(top, int(torch.randint(width - w + 1, (), generator=generator)), h, w)
    # A very long picture: the largest part in the middle with an allowed ratio.
    shape = min(max(width / height, ratio[0]), ratio[1])
    h, w = min(height, round(width / shape)), min(width, round(height * shape))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def crop(picture: Image.Image, box: Box, size: int) -> Tensor:
    """Cut out the box and scale it to size x size: uint8 (3, size, size)."""
    edges = (box.left, box.top, box.left + box.width, box.top + box.height)
    return _tensor(picture.crop(edges).resize((size, size), Image.Resampling.BILINEAR))


def read(path: Path) -> Image.Image:
    """Decode to RGB."""
    try:
        with Image.open(path) as file:
            # Through RGBA: straight to RGB, Pillow warns about palettes with transparency.
            return (file.convert("RGBA") if "transparency" in file.info else file).convert("RGB")
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise SOURCE.damaged(path, f"in class {path.parent.name} cannot be decoded ({error})") from None


def _centre_crop(picture: Image.Image, shorter: int, size: int) -> Tensor:
    short = min(picture.width, picture.height)
    width, height = (shorter if side == short else shorter * side // short for side in picture.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    scaled = picture.resize((width, height), Image.Resampling.BILINEAR)
    return _tensor(scaled.crop((left, top, left + size, top + size)))


def _tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
