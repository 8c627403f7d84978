"""scikit-learn's digits, which are always there: 1797 images of 8 x 8 with 17 grey levels, 0 to 16."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from experiments.data.source import DataError, Images

try:
    from sklearn.datasets import load_digits
except ImportError:
    load_digits = None  # pyright: ignore[reportAssignmentType]


class Digits(NamedTuple):
    train: Images
    validation: Images
    test: Images


def load(seed: int, n_validation: int = 270, n_test: int = 270) -> Digits:
    """Load images as uint8 (n, 8, 8). The same seed gives the same split."""
    if load_digits is None:
        raise DataError("The digits come with scikit-learn, which is not installed: pip install scikit-learn.")
    pixels, target = load_digits(return_X_y=True)
    images = torch.from_numpy(np.asarray(pixels).astype(np.uint8).reshape(-1, 8, 8))
    labels = torch.from_numpy(np.asarray(target).astype(np.int64))
    n_train = len(labels) - n_validation - n_test
    if min(n_train, n_validation, n_test) < 1:
        raise DataError(f"{len(labels)} digits cannot be split into {n_train}, {n_validation} and {n_test}.")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = torch.split(order, [n_train, n_validation, n_test])
    return Digits(*(Images(images[part], labels[part]) for part in parts))
