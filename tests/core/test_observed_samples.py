"""observe= with times of each sample: sums over the times of each sample, without keeping the states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm
from torchmali.measure import peak_bytes
from torchmali.solvers import interpolation

NAN = float("nan")
RAGGED = torch.tensor(
    [[0.0, 0.0, 0.0, 0.0], [0.11, 0.7, 0.2, NAN], [0.3, 0.71, NAN, NAN], [0.3, NAN, NAN, NAN], [1.2, 2.0, 0.2, NAN]],
    dtype=torch.float64,
)
FREE = [tm.AdaptiveStep(1e-4, 1e-5), tm.FixedStep(0.23, land=False)]
METHODS: list[tuple[Any, Any]] = [
    (tm.ALF(), tm.MALI()),
    (tm.ALF(order=4), tm.MALI()),
    (tm.ALF(order=6, refresh=2), tm.MALI(checkpoint_every=2)),
    (tm.ALF(order=4), tm.ACA()),
    (tm.Dopri5(), tm.ACA()),
    (tm.Dopri8(), tm.ACA()),
    (tm.Dopri5(), tm.Naive()),
]


class Case:
    """A field, a decoder and ragged data; everything that can have a gradient has one."""

    def __init__(self, times: Tensor):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.decoder = nn.Linear(3, 2).double()
        self.data = torch.randn(*times.shape, 2, dtype=torch.float64)
        self.data[times.isnan()] = NAN
        self.y0 = {"a": torch.linspace(-1, 1, 12).double().reshape(4, 3), "b": torch.linspace(0.5, 1, 4).double()}
        self.scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        self.t = times.clone().requires_grad_()
        self.inputs = [x.requires_grad_() for x in (*self.y0.values(), self.t, self.scale)]
        self.inputs += [*self.net.parameters(), *self.decoder.parameters()]

    def f(self, t: Tensor, y: dict[str, Tensor], scale: Tensor) -> dict[str, Tensor]:
        u = self.net(y["a"]) * (1 + t)
        return {"a": scale * u, "b": torch.sin(u.sum(1) + t) - 0.3 * y["b"]}

    def observe(self, t: Tensor, y: dict[str, Tensor], mask: Tensor, k: Tensor) -> Tensor:
        data = self.data[k, torch.arange(4)]
        off = self.decoder(y["a"]) * torch.cos(t).unsqueeze(1) - data
        return torch.stack([off.square().mean(1), y["b"] * torch.sqrt(1 + t**2) * (1 + k)], 1)

    def gradients(self, solver: Any, controller: Any, gradient: Any, on_the_fly: bool = True) -> list[Tensor]:
        how: Any = {"solver": solver, "controller": controller, "gradient": gradient, "args": (self.scale,)}
        if on_the_fly:
            solution = tm.solve(self.f, self.y0, self.t, **how, observe=self.observe)
            observed, end = solution.observed, [leaf[0] for leaf in solution.y.values()]
            assert [tuple(x.shape) for x in solution.y.values()] == [(1, 4, 3), (1, 4)]
        else:
            y = tm.solve(self.f, self.y0, self.t, **how).y
            observed, end = self.by_hand(y)
        assert observed.shape == (4, 2)
        loss = (observed * torch.linspace(-1, 2, 8).double().reshape(4, 2)).sum()
        loss = loss + sum((x * torch.linspace(-2, 1, x.numel()).double().reshape(x.shape)).sin().sum() for x in end)
        return [observed.detach(), *(x.detach() for x in end), *torch.autograd.grad(loss, self.inputs)]

    def by_hand(self, y: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """One output of one sample after the other."""
        self.data = self.data.nan_to_num()  # of the rows that are not looked at
        t = torch.cat([self.t[:1].mean(1, keepdim=True).expand(1, 4), self.t[1:]])  # the start is one number
        sums, ends = [], []
        for b in range(4):
            found = []
            for k in range(len(self.t)):
                if not self.t[k, b].isnan():
                    rows = {name: leaf[k, b].expand_as(leaf[k]) for name, leaf in y.items()}
                    found.append(self.observe(t[k, b].expand(4), rows, t[k].isnan(), torch.full((4,), k))[b])
                    end = k
            sums.append(torch.stack(found).sum(0))
            ends.append([leaf[end, b] for leaf in y.values()])
        return torch.stack(sums), [torch.stack(x) for x in zip(*ends, strict=True)]


def assert_same(found: list[Tensor], truth: list[Tensor], tolerance: float = 1e-12) -> None:
    for i, (x, y) in enumerate(zip(found, truth, strict=True)):
        assert float((x - y).norm() / y.norm()) < tolerance, i


@pytest.mark.parametrize("times", [RAGGED, 2.0 - RAGGED], ids=["forward", "backward"])
@pytest.mark.parametrize("controller", FREE, ids=repr)
@pytest.mark.parametrize(("solver", "gradient"), METHODS, ids=repr)
def test_the_sum_of_each_sample_and_its_gradients_are_those_of_autograd(solver, gradient, controller, times):
    found = Case(times).gradients(solver, controller, gradient)
    assert_same(found, Case(times).gradients(solver, controller, tm.Naive(), on_the_fly=False))
    of_t = found[5]
    assert (of_t[times.isnan()] == 0).all() and of_t[~times.isnan()].all()


def test_the_sums_of_exact_mode_are_those_of_its_stored_trajectory():
    case, kept = Case(RAGGED), tm.MALI(exact=True, checkpoint_every=1)
    found, stored = (case.gradients(tm.ALF(order=4), FREE[1], how) for how in (tm.MALI(exact=True), kept))
    assert all(map(torch.equal, found, stored))
    assert_same(found, case.gradients(tm.ALF(order=4), FREE[1], tm.Naive(), on_the_fly=False), 1e-8)


def test_steps_that_are_solved_again_are_observed_once():
    """All the growth is in the last tenth: what was rebuilt there is not trusted, and pulled back again."""
    times = torch.linspace(0, 1, 11, dtype=torch.float64).unsqueeze(1) ** torch.tensor([1.0, 2.0, 0.5, 1.0])

    def f(t, y):
        return torch.where(t > 0.9, 100.0, 0.0) * y + 0.1 * torch.sin(y)

    def gradients(gradient):
        y0 = torch.linspace(0.5, 1.5, 4, dtype=torch.float64, requires_grad=True)
        w = torch.linspace(0.5, 1.5, 4, dtype=torch.float64, requires_grad=True)
        how: Any = {"controller": tm.FixedStep(0.01, land=False), "gradient": gradient}
        solution = tm.solve(f, y0, times, **how, observe=lambda t, y: (w * y).abs() * (2 - t))
        return list(torch.autograd.grad(solution.observed.sum(), [y0, w])), solution.stats

    truth, _ = gradients(tm.ACA())
    found, stats = gradients(tm.MALI())
    assert stats.n_reruns > 1
    assert_same(found, truth, 1e-8)


def test_each_output_is_observed_once_and_the_other_rows_hold_the_start():
    seen: list[tuple[int, int, float, float]] = []
    times, y0 = RAGGED.clone(), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    def observe(t: Tensor, y: Tensor, k: Tensor, mask: Tensor) -> Tensor:
        assert t.shape == y.shape == k.shape == mask.shape == (4,) and mask.dtype == torch.bool
        assert torch.equal(t[~mask], times[0][~mask]) and torch.equal(y[~mask], y0[~mask]) and not k[~mask].any()
        seen.extend((int(k[b]), b, float(t[b]), float(y[b])) for b in mask.nonzero().flatten().tolist())
        return y

    how: Any = {"controller": FREE[1]}
    with torch.no_grad():
        solution = tm.solve(lambda t, y: -y, y0, times, **how, observe=observe)
        y = tm.solve(lambda t, y: -y, y0, times, **how).y
    assert sorted(seen) == [
        (k, b, float(times[k, b]), float(y[k, b])) for k in range(5) for b in range(4) if not times[k, b].isnan()
    ]
    torch.testing.assert_close(solution.observed, y.nansum(0), rtol=1e-14, atol=0)
    assert torch.equal(solution.y[0], torch.stack([y[4, 0], y[4, 1], y[4, 2], y[0, 3]]))


def test_a_sample_is_in_a_call_once_and_calls_are_few(monkeypatch):
    """64 samples with 100 times each, in one step: 100 calls beside that at the start, whatever the size of a chunk."""
    calls: list[int] = []

    def observe(t: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        calls.append(int(mask.sum()))
        return y.sum(1)

    t = torch.cat([torch.zeros(1, 64), torch.rand(99, 64).sort(0).values, torch.ones(1, 64)])
    values = []
    for chunk in (interpolation.CHUNK, 3, 1000):
        monkeypatch.setattr(interpolation, "CHUNK", chunk)
        calls.clear()
        solution = tm.solve(
            lambda t, y: -y, torch.ones(64, 5), t, controller=tm.FixedStep(1.0, land=False), observe=observe
        )
        values.append(solution.observed)
        assert sum(calls) == 101 * 64 and len(calls) <= 260
    torch.testing.assert_close(values[0], values[1])
    assert len(calls) == 102  # the last output of all is that at the end of the step


def test_memory_of_observed_outputs_of_samples_does_not_grow_with_their_number():
    def peak(n: int) -> int:
        net, y0 = nn.Linear(256, 256), torch.randn(16, 256)
        times = torch.cat([torch.zeros(1, 16), torch.rand(n, 16).sort(0).values])

        def run() -> None:
            y = y0.clone().requires_grad_()
            how: Any = {"solver": tm.ALF(order=4), "controller": tm.FixedStep(0.25, land=False)}
            solution = tm.solve(
                lambda t, y: torch.tanh(net(y)), y, times, observe=lambda t, y: y.square().sum(1) * t, **how
            )
            solution.observed.sum().backward()

        return peak_bytes(run)

    few, many = peak(100), peak(1000)
    of_times = 8 * 1000 * 16  # bytes of as many numbers; y at all of them takes 128 times as much
    assert many <= 1.02 * few + 12 * of_times


@pytest.mark.parametrize("gradient", [tm.Naive(), tm.ACA(), tm.MALI()], ids=repr)
def test_an_observer_that_draws_is_one_function(gradient):
    """Dropout in the decoder: each sample has the same numbers at all its times and in the backward pass."""
    dropout = nn.Dropout(0.5)
    y0 = torch.ones(4, 6, dtype=torch.float64, requires_grad=True)
    times = torch.cat([torch.zeros(1, 4), torch.rand(9, 4).sort(0).values]).double()
    how: Any = {"controller": FREE[1], "gradient": gradient}
    observed = tm.solve(lambda t, y: 0 * y, y0, times, **how, observe=lambda t, y: dropout(y)).observed
    assert set(observed.flatten().tolist()) == {0.0, 20.0}
    (g,) = torch.autograd.grad(observed.sum(), y0)
    torch.testing.assert_close(g, observed.detach(), rtol=1e-12, atol=0)


def test_a_module_may_observe():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, t: Tensor, y: Tensor, mask: Tensor) -> Tensor:
            return self.w * y.sum(1)

    loss, y0 = Loss(), torch.ones(4, 2)
    solution = tm.solve(lambda t, y: -y, y0, RAGGED, observe=loss)
    solution.observed.sum().backward()
    torch.testing.assert_close(loss.w.grad, solution.observed.sum().detach())


def test_padding_brings_no_nan_into_gradients():
    """Data is nan where t is, and the derivative of the loss infinite where y is 0, which no output is."""
    data = torch.where(RAGGED.isnan(), NAN, 1.0)
    w = torch.ones(4, dtype=torch.float64, requires_grad=True)

    def observe(t: Tensor, y: Tensor, k: Tensor) -> Tensor:
        return (w * y - data[k, torch.arange(4)]).abs().sqrt()

    y0 = torch.full((4,), 2.0, dtype=torch.float64, requires_grad=True)
    for gradient in (tm.MALI(), tm.Naive()):
        solution = tm.solve(lambda t, y: y, y0, RAGGED, controller=FREE[1], gradient=gradient, observe=observe)
        assert all(g.isfinite().all() and g.all() for g in torch.autograd.grad(solution.observed.sum(), [y0, w]))


@pytest.mark.parametrize(
    ("observe", "said"),
    [
        (lambda t, y: y.sum(), r"\(4, ...\); got \(\)"),
        (lambda t, y: y[:3], r"\(4, ...\); got \(3,\)"),
        (lambda t, y, i: y, "'i'"),
        (lambda t, y, scale=1.0, mask=None: y, "'mask'"),
        (lambda t, y, *, k: y, "'k'"),
    ],
)
def test_observers_that_do_not_suit_are_refused(observe, said):
    with pytest.raises(tm.InvalidFieldError, match=said):
        tm.solve(lambda t, y: -y, torch.ones(4), RAGGED, observe=observe)
