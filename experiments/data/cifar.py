"""CIFAR-10, from the published Python batches, read without running what a pickle might ask for."""

from __future__ import annotations

import codecs
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from experiments.data.source import Images, Source, shape_of

SOURCE = Source(
    name="CIFAR-10",
    files="cifar-10-batches-py/{data_batch_1 to data_batch_5,test_batch}",
    home="www.cs.toronto.edu/~kriz/cifar.html (the Python version)",
    without="the presets on scikit-learn's digits",
)
TRAINING = tuple(f"data_batch_{i}" for i in range(1, 6))
CLASSES, PER_BATCH = 10, 10_000


def load(folder: Path | None, split: Literal["train", "test"], require_all: bool = False) -> Images:
    """Load images as uint8 (n, 3, 32, 32). Training batches that are missing are left out, unless require_all."""
    names = {"train": TRAINING, "test": ("test_batch",)}[split]
    place = None if folder is None else folder / "cifar-10-batches-py"
    paths = [] if place is None else [place / name for name in names if (place / name).is_file()]
    if not paths or (require_all and len(paths) < len(names)):
        there = {path.name for path in paths}
        raise SOURCE.missing(folder, f"there is no {', '.join(name for name in names if name not in there)}")
    batches = [_batch(path) for path in paths]
    images = torch.cat([images for images, _ in batches])
    labels = torch.cat([labels for _, labels in batches])
    found = f"{len(labels):,} of {PER_BATCH * len(names):,} images, {len(paths)} of {len(names)} batches"
    return Images(images, labels, found)


def _batch(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
    except _Forbidden as error:
        raise SOURCE.damaged(path, f"asks for {error}, which a batch does not need and which is not run") from None
    except Exception as error:  # damaged pickles raise almost anything
        raise SOURCE.damaged(path, f"is not a whole pickle ({type(error).__name__}: {error})") from None
    if not isinstance(content, dict) or not {b"data", b"labels"} <= content.keys():
        raise SOURCE.damaged(path, "is not a dict with b'data' and b'labels'")
    images, labels = content[b"data"], content[b"labels"]
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (3072,) or not len(images):
        found = shape_of(images) if isinstance(images, np.ndarray) else type(images).__name__
        raise SOURCE.damaged(path, f"has {found} as images, not uint8 (n, 3072)")
    if not isinstance(labels, list) or len(labels) != len(images):
        found = f"{len(labels)} labels" if isinstance(labels, list) else f"{type(labels).__name__} as labels"
        raise SOURCE.damaged(path, f"has {found} for {len(images)} images")
    if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        raise SOURCE.damaged(path, f"has labels that are not numbers from 0 to {CLASSES - 1}")
    return torch.from_numpy(images.reshape(-1, 3, 32, 32).copy()), torch.tensor(labels)


class _Forbidden(Exception):
    pass


def _dtype(name: str | bytes, align: bool = False, copy: bool = False) -> np.dtype:
    # The published batches say 0 and 1 where NumPy 2.4 wants booleans, and bytes where it wants str.
    return np.dtype(name.decode() if isinstance(name, bytes) else name, align=bool(align), copy=bool(copy))


# numpy.core moved to numpy._core, and asking for the old name warns: take the function from NumPy itself.
_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): _dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("_codecs", "encode"): codecs.encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise _Forbidden(f"{module_name}.{global_name}")
        return _ALLOWED[module_name, global_name]
