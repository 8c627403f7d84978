"""Small tensors on small machines: one thread is fastest, and the same everywhere."""

import pytest
import torch

torch.set_num_threads(1)


LONGEST = (
    "test_images",
    "test_experiments",
    "test_training",
    "test_exact",
    "test_exact_scales",
    "test_distributed",
    "test_cde",
)


def pytest_collection_modifyitems(items):
    # The longest files first: no worker is left alone with one in the end.
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
