"""The latent ODE of Rubanova et al. (2019), and the recurrent networks it is compared with.

Series have shape (batch, time, channel). A mask has 1 where something was observed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import torchmali as tm
from torchmali.nn import ODERNN, ODERNNCell

STD = 1e-3  # of the noise that the likelihood assumes
FIRST_GAP = 0.01  # before the first observation that is read, as in the published code

Block = Callable[[nn.Module], nn.Module]  # from f to a module that solves: z0 -> z at all times, time first


class Dynamics(nn.Module):
    """f(z): a network of tanh layers, with small weights."""

    def __init__(self, n: int, units: int, n_layers: int):
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(n, units)]
        for _ in range(n_layers):
            layers += [nn.Tanh(), nn.Linear(units, units)]
        self.layers = nn.Sequential(*layers, nn.Tanh(), nn.Linear(units, n))
        small_weights(self)

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return self.layers(z)


def small_weights(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.1)
            nn.init.zeros_(part.bias)


def two_layers(n_in: int, units: int, n_out: int, *last: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, units), nn.Tanh(), nn.Linear(units, n_out), *last)


class MeanOnly(nn.Module):
    """The mean of the recognition state moves by f; its standard deviation stays."""

    def __init__(self, f: nn.Module, n: int):
        super().__init__()
        self.f, self.n = f, n

    def forward(self, t: Tensor, h: Tensor) -> Tensor:
        mean, std = h.split(self.n, -1)
        return torch.cat([self.f(t, mean), torch.zeros_like(std)], -1)


class Gate(nn.Module):
    """A gated unit for a state of means and standard deviations."""

    def __init__(self, n: int, n_in: int, units: int):
        super().__init__()
        self.n = n
        self.update = two_layers(2 * n + n_in, units, n, nn.Sigmoid())
        self.reset = two_layers(2 * n + n_in, units, n, nn.Sigmoid())
        self.candidate = two_layers(2 * n + n_in, units, 2 * n)
        small_weights(self)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        mean, std = h.split(self.n, -1)
        both = torch.cat([h, x], -1)
        update, reset = self.update(both), self.reset(both)
        new_mean, new_std = self.candidate(torch.cat([mean * reset, std * reset, x], -1)).split(self.n, -1)
        mean = (1 - update) * new_mean + update * mean
        std = (1 - update) * new_std.abs() + update * std
        return torch.cat([mean, std.abs()], -1)


class Encoder(nn.Module):
    """Reads a series backwards, by an ODE-RNN with one step of Euler between observations; gives q(z0)."""

    def __init__(self, n_channels: int, n_latent: int, n_hidden: int, units: int, gru_units: int, n_layers: int):
        super().__init__()
        self.n_hidden, self.f = n_hidden, Dynamics(n_hidden, units, n_layers)
        cell = ODERNNCell(
            MeanOnly(self.f, n_hidden), Gate(n_hidden, 2 * n_channels, gru_units),
            solver=tm.Euler(), controller=tm.FixedStep(math.inf), gradient=tm.Naive(),
        )  # fmt: skip
        self.rnn = ODERNN(cell)
        self.head = two_layers(2 * n_hidden, 100, 2 * n_latent)
        small_weights(self.head)

    def forward(self, values: Tensor, mask: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        h0 = values.new_zeros(len(values), 2 * self.n_hidden)
        h0 = h0 - FIRST_GAP * MeanOnly(self.f, self.n_hidden)(t[-1], h0)
        x = torch.cat([values, mask], -1)
        _, h = self.rnn(x, t, h0, mask.bool().any(-1), reverse=True)
        mean, std = self.head(h).chunk(2, -1)
        return mean, std.abs()


class Loss(NamedTuple):
    """Loss of a batch. total: to be minimised. mse: over samples, times, channels. later: without the first time."""

    total: Tensor
    mse: Tensor
    later: Tensor


class LatentODE(nn.Module):
    """The latent ODE. block: makes the module that solves dz/dt = f(z), and decides how it is differentiated."""

    def __init__(
        self,
        block: Block,
        n_channels: int = 14,
        n_latent: int = 15,
        n_hidden: int = 30,
        units: int = 300,
        gru_units: int = 100,
        n_layers: int = 3,
        n_samples: int = 3,
    ):
        super().__init__()
        self.n_samples = n_samples
        self.encoder = Encoder(n_channels, n_latent, n_hidden, units, gru_units, n_layers)
        self.generate = block(Dynamics(n_latent, units, n_layers))
        self.decoder = nn.Linear(n_latent, n_channels)
        small_weights(self.decoder)

    def forward(self, values: Tensor, mask: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the rebuilt series, (sample, batch, time, channel), and mean and standard deviation of q(z0)."""
        mean, std = self.encoder(values, mask, t)
        z0 = mean + std * torch.randn(self.n_samples, *mean.shape, dtype=mean.dtype, device=mean.device)
        return self.decoder(self.generate(z0).movedim(0, -2)), mean, std

    def loss(self, x: Tensor, values: Tensor, mask: Tensor, t: Tensor, kl_weight: float) -> Loss:
        """Loss of all of x, observed or not."""
        rebuilt, mean, std = self(values, mask, t)
        likelihood = log_likelihood(rebuilt, x).mean((1, 2, 3))  # of each sample
        kl = torch.distributions.kl_divergence(
            torch.distributions.Normal(mean, std.clamp_min(1e-12)),
            torch.distributions.Normal(mean.new_zeros(()), mean.new_ones(())),
        ).mean()
        total = -torch.logsumexp(likelihood - kl_weight * kl, 0)
        return Loss(total, *errors(rebuilt, x))


def errors(found: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of squares, with and without the first time, which a recurrent network is given or does not know."""
    squares = (found - x).square()
    return squares.mean(), squares[..., 1:, :].mean()


def log_likelihood(found: Tensor, x: Tensor) -> Tensor:
    return -0.5 * ((found - x) / STD).square() - math.log(STD) - 0.5 * math.log(2 * math.pi)
