"""Fields of many kinds for compiled solves: those that compile, and those that are refused, each with the reason."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.utils import parametrizations

Y = (4, 6)


class Case(NamedTuple):
    """A field, where it begins, its further arguments, and what gets a gradient beside them and y0."""

    f: Callable
    y0: Any
    args: tuple = ()
    params: tuple[Tensor, ...] = ()


MAKERS: dict[str, Callable[[], Case]] = {}
REFUSED: dict[str, tuple[Callable[[], Case], str]] = {}


def field(make: Callable[[], Case]) -> Callable[[], Case]:
    MAKERS[make.__name__] = make
    return make


def refused(reason: str) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def listed(make: Callable[[], Case]) -> Callable[[], Case]:
        REFUSED[make.__name__] = make, reason
        return make

    return listed


def start(shape: tuple[int, ...] = Y, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()


class Of(nn.Module):
    """f(t, y) from a module and a function of (module, t, y)."""

    def __init__(self, module: nn.Module, slope: Callable = lambda m, t, y: m(y)):
        super().__init__()
        self.module, self.slope = module.double(), slope
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = 0.4 * torch.randn(p.shape, generator=generator, dtype=p.dtype)

    def forward(self, t: Tensor, y: Any) -> Any:
        return self.slope(self.module, t, y)


def of(module: nn.Module, slope: Callable = lambda m, t, y: m(y), y0: Any = None) -> Case:
    f = Of(module, slope)
    return Case(f, start() if y0 is None else y0, params=tuple(p for p in f.parameters() if p.requires_grad))


@field
def mlp() -> Case:
    return of(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))


@field
def time_dependent() -> Case:
    return of(nn.Linear(6, 6), lambda m, t, y: torch.sin(3 * t) * m(y).tanh() + t.exp())


@field
def time_concatenated() -> Case:
    return of(nn.Linear(7, 6), lambda m, t, y: m(torch.cat([y, t.expand(len(y), 1)], 1)).tanh())


@field
def activations() -> Case:
    return of(nn.Sequential(nn.Linear(6, 8), nn.Softplus(), nn.SiLU(), nn.GELU(), nn.ELU(), nn.Linear(8, 6)))


@field
def relu_in_place() -> Case:
    return of(nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6)))


@field
def convolutions() -> Case:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1))
    return of(net, y0=start((2, 3, 5, 5)))


@field
def channels_last() -> Case:
    y0 = start((2, 3, 5, 5)).detach().to(memory_format=torch.channels_last).requires_grad_()
    return of(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()), y0=y0)


@field
def layer_norm() -> Case:
    return of(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh()))


@field
def batch_norm_in_eval() -> Case:
    return of(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()).eval())


@field
def attention() -> Case:
    net = nn.MultiheadAttention(6, 2, batch_first=True)
    return of(net, lambda m, t, y: m(y, y, y, need_weights=False)[0], start((2, 3, 6)))


@field
def fused_attention() -> Case:
    def slope(m: nn.Module, t: Tensor, y: Tensor) -> Tensor:
        q = m(y)
        return nn.functional.scaled_dot_product_attention(q, y, y)

    return of(nn.Linear(4, 4), slope, start((2, 2, 3, 4)))


@field
def embedding() -> Case:
    index = torch.tensor([0, 2, 1, 2])
    return of(nn.Embedding(3, 6), lambda m, t, y: torch.tanh(y * m(index)))


@field
def shared_parameters() -> Case:
    net = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
    net[1].weight = net[0].weight  # pyright: ignore
    return of(net, lambda m, t, y: m[1](m[0](y).tanh()))


@field
def frozen_parameters() -> Case:
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    net[0].requires_grad_(False)
    return of(net)


@field
def recurrent_cells() -> Case:
    return of(nn.GRUCell(6, 6), lambda m, t, y: m(y, y) - y)


@field
def lstm_cell() -> Case:
    return of(nn.LSTMCell(6, 6), lambda m, t, y: m(y, (y, y.tanh()))[0])


@field
def weight_norm() -> Case:
    return of(nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh()))


@field
def old_weight_norm() -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return of(nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6).double()), nn.Tanh()))


@field
def spectral_norm_in_eval() -> Case:
    return of(nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh()).eval())


@field
def fourier() -> Case:
    def slope(m: nn.Module, t: Tensor, y: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(m(y)) * 0.5, n=6)

    return of(nn.Linear(6, 6), slope)


@field
def dict_of_two() -> Case:
    y0 = {"q": start((3, 4)), "p": start((3, 4), 2)}
    return of(nn.Linear(4, 4), lambda m, t, y: {"p": -m(y["q"]).tanh(), "q": y["p"] * torch.cos(t)}, y0)


@field
def two_dtypes() -> Case:
    y0 = (start((3, 4)), start((3,), 2).detach().float().requires_grad_())
    return of(nn.Linear(4, 4), lambda m, t, y: (m(y[0]).tanh(), (y[0].sum(1) * t).float() - y[1]), y0)


@field
def trace_by_autograd() -> Case:
    def slope(m: nn.Module, t: Tensor, y: Any) -> Any:
        keeps = torch.is_grad_enabled()
        with torch.enable_grad():
            x = y[0].requires_grad_() if keeps else y[0].detach().requires_grad_()
            u = m(x).tanh()
            (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return u, g.sum(1)

    return of(nn.Linear(6, 6), slope, (start(), start((4,), 2)))


@field
def trace_by_vjp() -> Case:
    def slope(m: nn.Module, t: Tensor, y: Any) -> Any:
        u, pull, *_ = vjp(lambda x: m(x).tanh(), y[0])
        return u, pull(torch.ones_like(u))[0].sum(1)

    return of(nn.Linear(6, 6), slope, (start(), start((4,), 2)))


@field
def controlled() -> Case:
    knots, values = torch.linspace(0, 1, 5, dtype=torch.float64), start((5, 4, 6), 3).detach()

    def slope(m: nn.Module, t: Tensor, y: Tensor) -> Tensor:
        i = (torch.searchsorted(knots, t.reshape(1).contiguous()) - 1).clamp(0, 3)
        return m(y).tanh() * values.index_select(0, i)[0]

    return of(nn.Linear(6, 6), slope)


@field
def closure() -> Case:
    w, b = start((6, 6), 4), start((6,), 5).detach()
    return Case(lambda t, y: torch.tanh(y @ w + b), start(), params=(w,))


@field
def partial() -> Case:
    w = start((6, 6), 4)
    return Case(functools.partial(lambda w, scale, t, y: scale * torch.tanh(y @ w), w, 0.7), start(), params=(w,))


class Physics:
    def __init__(self):
        self.w, self.rate = start((6, 6), 4), 0.3

    def slope(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.sin(y @ self.w) - self.rate * y


@field
def bound_method() -> Case:
    physics = Physics()
    return Case(physics.slope, start(), params=(physics.w,))


@field
def further_arguments() -> Case:
    w, noise = start((6, 6), 4), start(seed=5).detach()
    return Case(lambda t, y, w, more: torch.tanh(y @ w) * more["noise"], start(), (w, {"noise": noise}), (w,))


@field
def without_parameters() -> Case:
    return Case(lambda t, y: torch.stack([y[:, 1], -torch.sin(y[:, 0]) * t], 1), start((5, 2)))


@field
def constant() -> Case:
    return Case(lambda t, y: torch.ones_like(y), start())


@field
def of_a_number() -> Case:
    rate = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    return Case(lambda t, y: -rate * y + t, start(()), params=(rate,))


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


@field
def own_function() -> Case:
    return of(nn.Linear(6, 6), lambda m, t, y: Cube.apply(m(y).tanh()))


@field
def lent_parameters() -> Case:
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double()
    lent = {name: (2 * p).detach().requires_grad_() for name, p in net.named_parameters()}
    return Case(lambda t, y: functional_call(net, lent, (y,)), start(), params=tuple(lent.values()))


@field
def mapped() -> Case:
    return of(nn.Linear(6, 6), lambda m, t, y: vmap(lambda x: torch.tanh(m(x)) * x.sum())(y))


@field
def einsum_and_softmax() -> Case:
    w = start((6, 6), 4)
    return Case(lambda t, y: torch.einsum("bi,ij->bj", y, w).softmax(1) - y.cumsum(1), start(), params=(w,))


@field
def pieces() -> Case:
    def slope(m: nn.Module, t: Tensor, y: Tensor) -> Tensor:
        u = torch.where(y > 0, y, 0.1 * y)
        u = torch.cat([u[:, 3:], u[:, :3]], dim=-1)
        return m(u).clamp(-1, 1) + torch.arange(6.0, dtype=y.dtype) * y.mean(1, keepdim=True)

    return of(nn.Linear(6, 6), slope)


@field
def buffers() -> Case:
    net = nn.Linear(6, 6)
    net.register_buffer("scale", torch.linspace(0.5, 1, 6, dtype=torch.float64))
    return of(net, lambda m, t, y: m(y).tanh() * m.scale)


# ---- Refused


@refused("looks at the value of a tensor")
def branch_on_t() -> Case:
    return of(nn.Linear(6, 6), lambda m, t, y: m(y) if t < 0.5 else -y)


@refused("looks at the value of a tensor")
def branch_on_y() -> Case:
    return of(nn.Linear(6, 6), lambda m, t, y: m(y).tanh() if y.sum() < 100 else -y)


@refused("looks at the value of a tensor")
def time_as_a_number() -> Case:
    return of(nn.Linear(6, 6), lambda m, t, y: float(t) * m(y).tanh())


@refused("looks at the value of a tensor")
def item_of_a_tensor() -> Case:
    return of(nn.Linear(6, 6), lambda m, t, y: m(y).tanh() * y.detach().abs().amax().item())


@refused("looks at the value of a tensor")
def mask_as_an_index() -> Case:
    def slope(m: nn.Module, t: Tensor, y: Tensor) -> Tensor:
        return m(y).tanh() + y[y < 10].sum()

    return of(nn.Linear(6, 6), slope)


@refused("looks at the value of a tensor")
def index_from_the_time() -> Case:
    table = start((3, 6), 3).detach()
    return of(nn.Linear(6, 6), lambda m, t, y: m(y).tanh() * table[int(2 * t)])


@refused("draws random numbers")
def dropout() -> Case:
    return of(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Tanh()))


@refused("draws random numbers")
def noise() -> Case:
    return of(nn.Linear(6, 6), lambda m, t, y: m(y).tanh() + 0.1 * torch.randn_like(y))


@refused("changes its running statistics")
def batch_norm_in_training() -> Case:
    return of(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()))


@refused("changes a buffer")
def counting_buffer() -> Case:
    net = nn.Linear(6, 6)
    net.register_buffer("n", torch.zeros((), dtype=torch.float64))

    def slope(m: nn.Module, t: Tensor, y: Tensor) -> Tensor:
        m.n.add_(1)  # pyright: ignore
        return m(y).tanh()

    return of(net, slope)


@refused("precision lower than y's")
def low_precision() -> Case:
    return of(nn.Linear(6, 6), lambda m, t, y: m(y).bfloat16().tanh().double())


@refused("has hooks")
def hooks() -> Case:
    net = nn.Linear(6, 6)
    net.register_forward_hook(lambda module, inputs, output: output.tanh())
    return of(net)


@refused("cannot be traced")
def numpy() -> Case:
    def slope(t: Tensor, y: Tensor) -> Tensor:
        return -y * float(abs(t.detach().numpy()) + 1)

    return Case(slope, start())
