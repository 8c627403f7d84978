"""A small flow for test_cnf.py and test_sampler.py.

As a script it is their second process: python flow.py CODE RESULT
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchmali.nn import CNF


class Net(nn.Module):
    def __init__(self, d: int, context: int = 0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.gain = nn.Linear(d + 1 + context, 16), nn.Linear(16, d), 1.0

    def forward(self, t: Tensor, x: Tensor, *context: Tensor) -> Tensor:
        return self.gain * self.last(torch.tanh(self.first(torch.cat([x, t.expand(len(x), 1), *context], 1))))


def flow(d: int = 3, context: int = 0, **how: Any) -> CNF:
    return CNF(Net(d, context), **how)


def main(source: str, target: str) -> None:
    model, code = pickle.loads(Path(source).read_bytes())
    undo = model.encode if hasattr(model, "encode") else model.inverse
    Path(target).write_bytes(pickle.dumps(undo(code)))


if __name__ == "__main__":
    sys.modules["flow"] = sys.modules["__main__"]  # the name under which the model was pickled
    main(*sys.argv[1:])
