"""MNIST, from the four published files."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from experiments.data.source import Images, Source

SOURCE = Source(
    name="MNIST",
    files="MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
    home="yann.lecun.com/exdb/mnist",
    without="the presets on scikit-learn's digits",
)
SIDE, CLASSES = 28, 10


def load(folder: Path | None, split: Literal["train", "test"]) -> Images:
    """Load images as uint8 (n, 28, 28)."""
    stem = {"train": "train", "test": "t10k"}[split]
    images = _read(folder, f"{stem}-images-idx3-ubyte.gz", 2051, (SIDE, SIDE))
    labels = _read(folder, f"{stem}-labels-idx1-ubyte.gz", 2049, ())
    path = _path(folder, f"{stem}-labels-idx1-ubyte.gz")
    if len(images) != len(labels):
        raise SOURCE.damaged(path, f"has {len(labels)} labels for {len(images)} images")
    if labels.max() >= CLASSES:
        raise SOURCE.damaged(path, f"has the label {labels.max()}; labels are 0 to {CLASSES - 1}")
    return Images(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


def _path(folder: Path | None, name: str) -> Path:
    path = None if folder is None else folder / "MNIST" / "raw" / name
    if path is None or not path.is_file():
        raise SOURCE.missing(folder, f"there is no {name}")
    return path


def _read(folder: Path | None, name: str, magic: int, shape: tuple[int, ...]) -> np.ndarray:
    """Read the idx format: magic number, number of items, size of an item, all big-endian; then bytes."""
    path = _path(folder, name)
    try:
        with gzip.open(path, "rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise SOURCE.damaged(path, f"is not a whole gzip file ({error})") from None
    n_numbers = 2 + len(shape)
    if len(content) < 4 * n_numbers:
        raise SOURCE.damaged(path, f"has {len(content)} bytes, fewer than its header needs")
    found, n, *size = struct.unpack(f">{n_numbers}I", content[: 4 * n_numbers])
    if found != magic:
        raise SOURCE.damaged(path, f"begins with the number {found}, not with {magic}")
    if tuple(size) != shape:
        raise SOURCE.damaged(path, f"has images of {size[0]} x {size[1]}, not {SIDE} x {SIDE}")
    body = np.frombuffer(content, np.uint8, offset=4 * n_numbers)
    if n == 0 or body.size != n * int(np.prod(shape)):
        raise SOURCE.damaged(path, f"announces {n} items and has {body.size} bytes of them")
    return body.reshape(n, *shape).copy()  # writable, as torch wants it
