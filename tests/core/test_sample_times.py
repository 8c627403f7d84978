"""Times of each sample's own: one grid of steps for all, outputs of each sample where it wants them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm

NAN = float("nan")
RAGGED = torch.tensor(
    [[0.0, 0.0, 0.0, 0.0], [0.11, 0.7, 0.2, 0.3], [0.3, 0.71, NAN, 0.3], [1.2, 2.0, NAN, 0.9]], dtype=torch.float64
)
FREE = [tm.AdaptiveStep(1e-4, 1e-5), tm.FixedStep(0.23, land=False)]
CASES = [
    (tm.ALF(), tm.MALI()),
    (tm.ALF(order=4), tm.MALI()),
    (tm.ALF(order=6, refresh=2), tm.MALI(checkpoint_every=2)),
    (tm.ALF(order=4), tm.ACA()),
    (tm.Dopri5(), tm.ACA()),
    (tm.Dopri8(), tm.ACA()),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)).double()

    def forward(self, t: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
        u = self.layers(torch.cat([y["a"], t.expand(4, 1)], 1))
        return {"a": u, "b": torch.sin(u.sum(1) + t) - 0.3 * y["b"]}


def start() -> dict[str, Tensor]:
    return {"a": torch.linspace(-1, 1, 12).double().reshape(4, 3), "b": torch.linspace(0.5, 1, 4).double()}


def loss_of(y: dict[str, Tensor]) -> Tensor:
    """A loss of all that is not nan, with a weight of its own for each number."""
    terms = [
        torch.where(x.isnan(), 0.0, torch.sin(x) * torch.linspace(-1, 2, x.numel()).double().reshape(x.shape)).sum()
        for x in y.values()
    ]
    return terms[0] + terms[1]


def gradients(t: Tensor, solver, method, controller, at_all_times: bool = False) -> tuple[dict, list[Tensor]]:
    """at_all_times: every sample at every time, from which those that are wanted are taken."""
    net, y0, t = Net(), start(), t.clone().requires_grad_()
    inputs = [x.requires_grad_() for x in y0.values()]
    how: Any = {"solver": solver, "controller": controller, "gradient": method}
    if at_all_times:
        t = t.detach()  # dL/dt is compared elsewhere
        numbers = t[1:][~t[1:].isnan()].unique()
        numbers = numbers.flip(0) if numbers[0] < t[0, 0] else numbers
        everything = tm.solve(net, y0, torch.cat([t[0, :1], numbers]), **how).y
        y = {}
        for name, leaf in everything.items():
            rows = [[leaf[0, b] for b in range(4)]]
            for k in range(1, len(t)):
                found = [(numbers == t[k, b]).nonzero().flatten().tolist() for b in range(4)]
                rows.append([leaf[i[0] + 1, b] if i else torch.full_like(leaf[0, b], NAN) for b, i in enumerate(found)])
            y[name] = torch.stack([torch.stack(row) for row in rows])
    else:
        y = tm.solve(net, y0, t, **how).y
    return y, list(torch.autograd.grad(loss_of(y), [*inputs, *net.parameters(), *([] if at_all_times else [t])]))


@pytest.mark.parametrize("times", [RAGGED, 2.0 - RAGGED], ids=["forward", "backward"])
@pytest.mark.parametrize("controller", FREE, ids=repr)
@pytest.mark.parametrize(("solver", "method"), CASES, ids=repr)
def test_each_sample_has_its_own_times(solver, method, controller, times):
    y, grads = gradients(times, solver, method, controller)
    expected, truth = gradients(times, solver, tm.Naive(), controller, at_all_times=True)
    for name in y:
        assert y[name].shape == (4, 4, *start()[name].shape[1:])
        torch.testing.assert_close(y[name], expected[name], rtol=1e-12, atol=1e-12, equal_nan=True)
        assert torch.equal(y[name].flatten(2).isnan().any(-1) if y[name].ndim > 2 else y[name].isnan(), times.isnan())
    for x, g in zip(grads[:-1], truth, strict=True):
        torch.testing.assert_close(x, g, rtol=1e-11, atol=1e-12)
    _, by_naive = gradients(times, solver, tm.Naive(), controller)
    for x, g in zip(grads, by_naive, strict=True):
        torch.testing.assert_close(x, g, rtol=1e-11, atol=1e-12)
    assert (grads[-1][times.isnan()] == 0).all()


def test_the_gradient_of_the_times_is_that_of_a_loop_over_samples():
    """A field without coupling between samples, on the same fixed steps: the times of a sample move its own y alone."""
    times = torch.tensor([[0.0, 0.0], [0.31, 0.5], [0.9, 0.77], [1.0, 1.0]], dtype=torch.float64)
    how: Any = {"solver": tm.ALF(order=4, refresh="never"), "controller": tm.FixedStep(0.25, land=False)}
    w = torch.tensor([1.0, 2.0], dtype=torch.float64)

    def f(t: Tensor, y: Tensor) -> Tensor:
        return torch.cos(3 * t) - y**2

    t = times.clone().requires_grad_()
    (together,) = torch.autograd.grad((tm.solve(f, w, t, **how).y[1:3] ** 2).sum(), t)
    for b in range(2):
        t = times[:, b].clone().requires_grad_()
        (alone,) = torch.autograd.grad((tm.solve(f, w[b : b + 1], t, **how).y[1:3] ** 2).sum(), t)
        torch.testing.assert_close(together[1:3, b], alone[1:3], rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", [2, 4])
def test_exact_mode_has_the_gradient_of_its_stored_trajectory(order):
    solver = tm.ALF(order=order)
    found = gradients(RAGGED, solver, tm.MALI(exact=True), FREE[1])[1]
    stored = gradients(RAGGED, solver, tm.MALI(exact=True, checkpoint_every=1), FREE[1])[1]
    assert all(map(torch.equal, found, stored))


def test_outputs_cost_no_evaluation():
    y0, counts = torch.randn(64, 5), []
    for n in (2, 200):
        t = torch.cat([torch.zeros(1, 64), torch.rand(n - 1, 64).sort(0).values, torch.ones(1, 64)])
        solution = tm.solve(lambda t, y: torch.tanh(y) - y, y0, t, solver=tm.ALF(order=4))
        counts.append(solution.stats.n_evals_forward)
        assert solution.y.shape == (n + 1, 64, 5)
    assert counts[0] == counts[1]
    assert "201 times from 0 to 1" in repr(solution)


def test_times_may_be_integers():
    t, y0 = torch.tensor([[0, 0], [1, 2]]), torch.ones(2).double()
    y, expected = (tm.solve(lambda t, y: -y, y0, x).y for x in (t, t.double()))
    assert torch.equal(y, expected)


def bad(t: Any, **options: Any) -> Any:
    return tm.solve(lambda t, y: -y, torch.ones(3, 2), torch.as_tensor(t), **options)


@pytest.mark.parametrize(
    ("t", "said"),
    [
        ([[0.0, 0.0], [1.0, 1.0]], "as many samples"),
        ([[0.0, 0.0, 0.0]], "two rows, one sample"),
        ([[0.0, 0.0, 0.1], [1.0, 1.0, 1.0]], "same time"),
        ([[0.0, 0.0, 0.0], [1.0, -1.0, 1.0]], "one side"),
        ([[0.0, 0.0, 0.0], [1.0, torch.inf, 1.0]], "finite"),
        ([[0.0, 0.0, 0.0], [NAN, NAN, NAN]], "at least one sample"),
        ([[NAN, NAN, NAN], [1.0, 1.0, 1.0]], "same time"),
        ([[0.0, 0.0, 0.0], [1.0, 1.0, 0.5], [2.0, NAN, 0.4]], r"t\[2, 2\] = 0.4"),
        ([[0.0, 0.0, 0.0], [-1.0, -1.0, -0.5], [-0.5, NAN, -0.6]], r"t\[2, 0\] = -0.5"),
    ],
)
def test_times_that_make_no_sense_are_refused(t, said):
    with pytest.raises(tm.InvalidTimesError, match=said):
        bad(t)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"controller": tm.FixedStep(0.1)}, "land=False"),
        ({"controller": tm.AdaptiveStep(land=True)}, "land=False"),
        ({"solver": tm.Reversible(tm.Dopri8()), "controller": tm.AdaptiveStep()}, "interpolant"),
        ({"gradient": tm.Adjoint()}, "too many"),
        ({"dense": True}, "leave outputs"),
        ({"event": lambda t, y: y.sum() - 1}, "leave outputs"),
    ],
)
def test_what_cannot_be_combined_is_refused(options, said):
    with pytest.raises(tm.IncompatibleError, match=said):
        bad([[0.0, 0.0, 0.0], [1.0, 0.5, 1.0]], **options)


def test_a_state_without_samples_is_refused():
    with pytest.raises(tm.InvalidTimesError, match="as many samples"):
        tm.solve(lambda t, y: -y, torch.ones(()), torch.zeros(2, 1))
