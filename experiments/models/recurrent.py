"""Recurrent networks for series with gaps: what the latent ODE is compared with (Rubanova et al., 2019).

They predict each point from those before it. Series have shape (batch, time, channel).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.models.latent_ode import two_layers


class DecayCell(nn.Module):
    """A GRU whose state fades between observations (GRU-D): h <- h exp(-max(0, w dt + b))."""

    def __init__(self, n_in: int, n_hidden: int):
        super().__init__()
        self.cell, self.decay = nn.GRUCell(n_in, n_hidden), nn.Linear(1, n_hidden)

    def forward(self, x: Tensor, h: Tensor, gap: Tensor) -> Tensor:
        return self.cell(x, h * torch.exp(-self.decay(gap).relu()))


class PlainCell(nn.Module):
    """A GRU that is told the time since the last observation (RNN dt)."""

    def __init__(self, n_in: int, n_hidden: int):
        super().__init__()
        self.cell = nn.GRUCell(n_in, n_hidden)

    def forward(self, x: Tensor, h: Tensor, gap: Tensor) -> Tensor:
        return self.cell(x, h)


class Recurrent(nn.Module):
    """Recurrent network for series with gaps. decays: the state fades between observations (GRU-D).

    GRU-D's fading inputs are left out: here a time has all channels or none, and without any the state stays.
    """

    def __init__(self, n_channels: int = 14, n_hidden: int = 15, units: int = 100, decays: bool = False):
        super().__init__()
        self.n_hidden = n_hidden
        self.cell = (DecayCell if decays else PlainCell)(2 * n_channels + 1, n_hidden)
        self.decoder = two_layers(n_hidden, units, n_channels)

    def forward(self, values: Tensor, mask: Tensor, t: Tensor) -> Tensor:
        """Predict each point of the series from those before; the first is given.

        In training, an input point is replaced by its prediction with probability 1/2.
        """
        n, length, _ = values.shape
        h, gap = values.new_zeros(n, self.n_hidden), values.new_zeros(n, 1)
        found = [values[:, 0]]
        steps = torch.diff(t, prepend=t[:1]).to(values)
        for i in range(length - 1):
            seen, here = mask[:, i], values[:, i]
            gap = gap + steps[i]
            if self.training and i > 0:
                tossed = torch.rand(n, 1, device=values.device) < 0.5
                here = torch.where(tossed, found[-1], here)
            new = self.cell(torch.cat([here, seen, gap], -1), h, gap)
            observed = seen.bool().any(-1, keepdim=True)
            h = torch.where(observed, new, h)
            gap = torch.where(observed, torch.zeros_like(gap), gap)
            found.append(self.decoder(h))
        return torch.stack(found, 1)
