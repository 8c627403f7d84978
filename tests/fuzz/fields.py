"""Fields for random problems: one core for the first leaf of the state, simple slopes for the other leaves.

CORES names every core with the numbers of dimensions it works on. `FuzzField` is f: it couples all leaves with the
core, with t and with the further arguments, and returns its slopes in the memory layout that was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

import torchmali as tm

ANY = (0, 1, 2, 3, 4)


class Formula(nn.Module):
    """A slope by a formula of (t, y, a, b), with parameters a (a rate, the gain of the problem) and b (a shift)."""

    def __init__(self, formula: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], gain: float):
        super().__init__()
        self.formula = formula
        self.a, self.b = nn.Parameter(torch.tensor(gain)), nn.Parameter(torch.tensor(0.3))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.formula(t.to(y.dtype), y, self.a, self.b)


FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "tanh": lambda t, y, a, b: torch.tanh(a * y + b),
    "sine": lambda t, y, a, b: a * torch.sin(2 * y + t),
    "forced": lambda t, y, a, b: a * y * torch.cos(3 * t) + b,
    "decay": lambda t, y, a, b: -a * y,
    "growth": lambda t, y, a, b: a * y,
    "logistic": lambda t, y, a, b: a * y * (1 - y),
    "cubic": lambda t, y, a, b: b - a * y**3,
    "restoring": lambda t, y, a, b: -2 * a * torch.tanh(2 * y),
    "cubic, then decay": lambda t, y, a, b: -a * y**3 if t.item() < 0.6 else -b * y,
    "stiff": lambda t, y, a, b: -10 * a * (y - torch.cos(t)),
    "relu": lambda t, y, a, b: torch.relu(a * y + b) - b * y,
    "abs": lambda t, y, a, b: b - a * y.abs(),
    "where": lambda t, y, a, b: torch.where(y > 0, -a * y, b * y),
    "branch": lambda t, y, a, b: a * y if t.item() < 0.4 else -a * torch.sin(y) + b,
    "rotation": lambda t, y, a, b: a * (y.roll(1, -1) - y.roll(-1, -1)) if y.ndim else -a * y,
    "y itself": lambda t, y, a, b: y,
    "view of y": lambda t, y, a, b: y.view_as(y),
    "shared view": lambda t, y, a, b: y[:1].expand(y.shape) if y.ndim else y,
    "constant": lambda t, y, a, b: b.expand(y.shape),
    "time alone": lambda t, y, a, b: (a * torch.cos(t) + b).expand(y.shape),
    "without parameters": lambda t, y, a, b: torch.cos(y) - t,
    "half of y": lambda t, y, a, b: a * torch.sin(y.detach()) + b * y,
    "bounded": lambda t, y, a, b: a * torch.cos(y) / (1 + y * y) + b * torch.exp(-t * t),
}


class Layers(nn.Module):
    """A network of modules that maps y to its slope."""

    def __init__(self, net: nn.Module, gain: float):
        super().__init__()
        self.net, self.gain = net, gain

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.gain * self.net(y)


class MLP(nn.Module):
    """A network that sees the time as one more channel."""

    def __init__(self, c: int, gain: float, activation: nn.Module):
        super().__init__()
        self.gain, self.net = gain, nn.Sequential(nn.Linear(c + 1, 8), activation, nn.Linear(8, c))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.gain * self.net(torch.cat([y, t.to(y.dtype).expand(*y.shape[:-1], 1)], -1))


class Attention(nn.Module):
    """Scaled dot-product attention over the second dimension."""

    def __init__(self, c: int, gain: float, dropout: float):
        super().__init__()
        self.qkv, self.gain, self.dropout = nn.Linear(c, 3 * c), gain, dropout

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.qkv(y).chunk(3, -1)
        return self.gain * F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)


class SelfAttention(nn.Module):
    def __init__(self, c: int, gain: float):
        super().__init__()
        self.attention, self.gain = nn.MultiheadAttention(c, 2 if c % 2 == 0 else 1, batch_first=True), gain

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.gain * self.attention(y, y, y, need_weights=False)[0]


class Flow(nn.Module):
    """A field that differentiates itself, as continuous normalising flows do."""

    def __init__(self, c: int, gain: float):
        super().__init__()
        self.gain, self.net = gain, nn.Sequential(nn.Linear(c, 6), nn.Tanh(), nn.Linear(6, c))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        u = self.net(y)
        (g,) = torch.autograd.grad(u.sin().sum(), y, create_graph=True)
        return self.gain * (u - 0.3 * g)


class Nested(nn.Module):
    """A field that solves another ODE inside."""

    def __init__(self, c: int, gain: float, method: tm.GradientMethod):
        super().__init__()
        self.inner, self.gain, self.method = MLP(c, 1.0, nn.Tanh()), gain, method

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        end = tm.solve(self.inner, y, [0.0, 0.5], controller=tm.FixedStep(0.25), gradient=self.method).y[-1]
        return self.gain * torch.tanh(end - y)


def _spectral(c: int) -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(c, c)), nn.Tanh())


def _weight_normed(c: int) -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(c, 6)), nn.Tanh(), nn.Linear(6, c))


def _sequence(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(*modules)


Maker = Callable[[int, float], nn.Module]  # from the number of channels and the gain
LINEAR, ROWS, SEQUENCES, IMAGES = (1, 2, 3, 4), (2,), (3,), (4,)
NETWORKS: dict[str, tuple[tuple[int, ...], Maker]] = {
    "mlp": (LINEAR, lambda c, g: MLP(c, g, nn.Tanh())),
    "softplus mlp": (LINEAR, lambda c, g: MLP(c, g, nn.Softplus())),
    "relu mlp": (LINEAR, lambda c, g: MLP(c, g, nn.ReLU())),
    "layer norm": (LINEAR, lambda c, g: Layers(_sequence(nn.Linear(c, 6), nn.LayerNorm(6), nn.Linear(6, c)), g)),
    "dropout": (
        LINEAR,
        lambda c, g: Layers(_sequence(nn.Linear(c, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, c)), g),
    ),
    "weight norm": (LINEAR, lambda c, g: Layers(_weight_normed(c), g)),
    "spectral norm": (LINEAR, lambda c, g: Layers(_spectral(c), g)),
    "flow": (LINEAR, Flow),
    "nested mali": (LINEAR, lambda c, g: Nested(c, g, tm.MALI())),
    "nested naive": (LINEAR, lambda c, g: Nested(c, g, tm.Naive())),
    "batch norm": (
        ROWS,
        lambda c, g: Layers(_sequence(nn.Linear(c, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, c)), g),
    ),
    "attention": (SEQUENCES, lambda c, g: Attention(c, g, 0.0)),
    "attention with dropout": (SEQUENCES, lambda c, g: Attention(c, g, 0.2)),
    "multihead": (SEQUENCES, SelfAttention),
    "encoder layer": (
        SEQUENCES,
        lambda c, g: Layers(nn.TransformerEncoderLayer(c, 2 if c % 2 == 0 else 1, 8, dropout=0.0, batch_first=True), g),
    ),
    "conv": (IMAGES, lambda c, g: Layers(_sequence(nn.Conv2d(c, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, c, 1)), g)),
    "group norm": (
        IMAGES,
        lambda c, g: Layers(
            _sequence(nn.Conv2d(c, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, c, 1)), g
        ),
    ),
    "batch norm of images": (
        IMAGES,
        lambda c, g: Layers(
            _sequence(nn.BatchNorm2d(c), nn.Conv2d(c, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, c, 1)), g
        ),
    ),
    "dropout of channels": (
        IMAGES,
        lambda c, g: Layers(
            _sequence(nn.Conv2d(c, 4, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(4, c, 1)), g
        ),
    ),
    "conv in channels_last": (
        IMAGES,
        lambda c, g: Layers(
            _sequence(nn.Dropout(0.2), nn.Conv2d(c, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, c, 1)).to(
                memory_format=torch.channels_last  # type: ignore[call-overload]
            ),
            g,
        ),
    ),
}
CORES: dict[str, tuple[int, ...]] = {**dict.fromkeys(FORMULAS, ANY), **{k: dims for k, (dims, _) in NETWORKS.items()}}
DRAWING = {"dropout", "attention with dropout", "dropout of channels", "conv in channels_last"}  # random numbers
KEEPING = {"batch norm", "batch norm of images", "spectral norm"}  # buffers that change
COUPLING = {"rotation", "shared view"}  # elements of y with each other; other formulas act on each alone
JUMPY = {"cubic, then decay", "relu", "abs", "where", "branch", "relu mlp", "dropout of channels"}  # derivatives jump
NEEDS_ROWS = {"batch norm", "batch norm of images"}  # more than one


def make_core(name: str, shape: tuple[int, ...], gain: float) -> nn.Module:
    """Make a core for leaves of this shape, with weights that torch's default generator draws."""
    if name in FORMULAS:
        return Formula(FORMULAS[name], gain)
    channels = shape[1] if CORES[name] == IMAGES else shape[-1]
    return NETWORKS[name][1](channels, gain)


def in_layout(x: Tensor, layout: str) -> Tensor:
    """Return x in another memory layout, where its shape allows it. Expanded: the first row, repeated."""
    if layout == "channels_last" and x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "transposed" and x.ndim > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "sliced":
        return torch.stack([x, x], dim=-1)[..., 0]
    if layout == "expanded" and x.ndim > 0 and x.shape[0] > 0:
        return x[:1].expand(x.shape)
    return x.contiguous()


class FuzzField(nn.Module):
    """f of a random problem. Counts its calls."""

    def __init__(self, core: nn.Module, n_leaves: int, layout: str, answers_lists: bool):
        super().__init__()
        self.core, self.layout, self.answers_lists = core, layout, answers_lists
        self.gains = nn.ParameterList(nn.Parameter(torch.tensor(0.5 + 0.3 * i)) for i in range(n_leaves - 1))
        self.n_calls = 0

    def forward(self, t: Tensor, y: Any, *args: Any) -> Any:
        self.n_calls += 1
        first, *others = leaves = pytree.tree_leaves(y)
        middle = first.mean() if first.numel() else first.new_zeros(())
        u = self.core(t, first).to(first.dtype)
        if others and others[0].numel():
            u = u + 0.1 * others[0].mean().to(u.dtype)
        for x in pytree.tree_leaves(args):
            u = u * (x.to(u.dtype).mean() if isinstance(x, Tensor) else x)
        slopes = [u]
        for gain, z in zip(self.gains, others, strict=True):
            slopes.append(torch.tanh(gain.to(z.dtype) * z + 0.3 * middle.to(z.dtype)) - 0.2 * z)
        if self.layout != "as it comes":
            slopes = [in_layout(x, self.layout) for x in slopes]
        assert len(slopes) == len(leaves)
        answer = pytree.tree_unflatten(slopes, pytree.tree_structure(y))
        return list(answer) if self.answers_lists and isinstance(answer, tuple) else answer


class Watcher(nn.Module):
    """observe(t, y) with a parameter: one number for each output time."""

    def __init__(self, dtype: torch.dtype, dropout: float = 0.0):
        super().__init__()
        self.scale, self.dropout = nn.Parameter(torch.tensor(0.7, dtype=dtype)), nn.Dropout(dropout)

    def forward(self, t: Tensor, y: Any) -> Tensor:
        sums = [self.dropout(torch.sin(self.scale * z.to(self.scale.dtype))).sum() for z in pytree.tree_leaves(y)]
        return torch.stack(sums).sum() * (1 + torch.cos(t).to(self.scale.dtype))


class IndexedWatcher(Watcher):
    """observe(t, y, k) with a parameter."""

    def forward(self, t: Tensor, y: Any, k: int) -> Tensor:  # type: ignore[override]
        return (k + 1) * super().forward(t, y)


def gain_limit(span: float) -> float:
    """The largest gain with which most fields stay finite over a span."""
    return min(8.0, 6.0 / max(span, 1e-3)) if math.isfinite(span) else 1.0
