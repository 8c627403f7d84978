"""Compiled solves inside a model that torch.compile compiles: every gradient is right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm


class Model(nn.Module):
    """Two layers that share a width with the solve between them: their buffers may be reused by torch.compile."""

    def __init__(self, compiles: bool):
        super().__init__()
        torch.manual_seed(0)
        field = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.first, self.last, self.field = nn.Linear(8, 8), nn.Linear(8, 8), field
        self.block = tm.nn.ODEBlock(self.slope, controller=tm.FixedStep(0.05), compile=compiles)
        self.double()

    def slope(self, t: Tensor, y: Tensor) -> Tensor:
        return self.field(y)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(self.first(x).tanh())
        return (self.last(y) * y).square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # both of torch.compile's own
def test_gradients_inside_a_compiled_model():
    x = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, model = Model(False), Model(True)
    outer = torch.compile(model)
    for scale in (1.0, 0.5):
        wanted = torch.autograd.grad(plain(scale * x), list(plain.parameters()))
        found = torch.autograd.grad(outer(scale * x), list(model.parameters()))
        assert len(found) == 8
        for g, h in zip(found, wanted, strict=True):
            assert (g - h).norm() <= 1e-12 * h.norm()
