"""Small tensors on small machines: one thread is fastest, and the same everywhere."""

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)
