"""solve(spans="own"): samples with a start and an end of their own, in a common time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchmali as tm

NAN = float("nan")
# Long and short, backwards, ragged, of length 0, without outputs.
TIMES = torch.tensor(
    [
        [0.0, 1.0, 2.0, -0.5, 0.4, 0.3],
        [0.31, 1.05, 1.5, NAN, NAN, NAN],
        [0.9, NAN, 0.3, 0.8, NAN, NAN],
        [1.7, 1.3, 0.25, NAN, 0.4, NAN],
    ],
    dtype=torch.float64,
)
N = TIMES.shape[1]
STEPS = 7
FREE = tm.FixedStep(1.75 / STEPS, land=False)  # of the longest span
METHODS: list[tuple[Any, Any]] = [
    (tm.ALF(refresh=3), tm.MALI()),
    (tm.ALF(order=4, refresh="never"), tm.MALI()),
    (tm.ALF(order=4, refresh="never"), tm.ACA()),
    (tm.Dopri5(), tm.ACA()),
    (tm.Dopri8(), tm.Naive()),
]
ENDS = torch.stack([TIMES[0], TIMES[3].where(~TIMES[3].isnan(), TIMES[2])])


class Net(nn.Module):
    """A field of rows, which takes t of any shape that suits y."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)).double()
        self.n_calls = 0

    def forward(self, t: Tensor, y: dict[str, Tensor], scale: Tensor) -> dict[str, Tensor]:
        self.n_calls += 1
        u = self.layers(torch.cat([y["a"], t.expand(len(y["a"]), 1)], 1)) * scale
        return {"a": u, "b": torch.sin(u.sum(1) + t.flatten()) - 0.3 * y["b"]}


class Case:
    """A field with all that may have a gradient."""

    def __init__(self, times: Tensor = TIMES):
        self.net = Net()
        self.y0 = {"a": torch.linspace(-1, 1, 3 * N).double().reshape(N, 3), "b": torch.linspace(0.5, 1, N).double()}
        self.scale = torch.tensor(0.7, dtype=torch.float64)
        self.t = times.clone()
        self.inputs = [x.requires_grad_() for x in (*self.y0.values(), self.scale, self.t)]
        self.inputs += self.net.parameters()

    def together(self, solver: Any, controller: Any, gradient: Any, **options: Any) -> tm.Solution:
        how: Any = {"solver": solver, "controller": controller, "gradient": gradient, **options}
        return tm.solve(self.net, self.y0, self.t, args=(self.scale,), spans="own", **how)

    def row(self, b: int) -> dict[str, Tensor]:
        return {name: leaf[b : b + 1] for name, leaf in self.y0.items()}

    def scaled(self, b: int, solver: Any) -> list[dict[str, Tensor]]:
        """Sample b by itself, in its scaled time, by plain autograd."""
        t = self.t[:, b][~self.t[:, b].isnan()]
        if len(t) == 1:
            return [self.row(b)]
        start, span = t[0], t[-1] - t[0]

        def f(s: Tensor, y: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: span * u for name, u in self.net(start + s * span, y, self.scale).items()}

        inner = (t[1:-1] - start) / span
        s = torch.cat([inner.new_zeros(1), inner, inner.new_ones(1)])
        how: Any = {"solver": solver, "controller": tm.FixedStep(1 / STEPS, land=False), "gradient": tm.Naive()}
        y = tm.solve(f, self.row(b), s, **how).y
        return [{name: leaf[k] for name, leaf in y.items()} for k in range(len(t))]

    def alone(self, b: int, solver: Any, controller: Any) -> list[dict[str, Tensor]]:
        """Sample b by itself, in its own time."""
        t = self.t[:, b][~self.t[:, b].isnan()]
        if t[0].item() == t[-1].item():
            return [self.row(b)] * len(t)
        how: Any = {"solver": solver, "controller": controller, "gradient": tm.Naive(), "args": (self.scale,)}
        y = tm.solve(self.net, self.row(b), t, **how).y
        return [{name: leaf[k] for name, leaf in y.items()} for k in range(len(t))]

    def stacked(self, samples: list[list[dict[str, Tensor]]]) -> dict[str, Tensor]:
        """Leaves of shape (K, B, ...) from the outputs of each sample."""
        found = {}
        for name, leaf in self.y0.items():
            rows = [[torch.full_like(leaf[0], NAN) for _ in range(N)] for _ in range(len(self.t))]
            for b, outputs in enumerate(samples):
                places = (~self.t[:, b].isnan()).nonzero().flatten().tolist()
                for k, y in zip(places, outputs, strict=True):
                    rows[k][b] = y[name][0]
            found[name] = torch.stack([torch.stack(row) for row in rows])
        return found

    def gradients(self, y: dict[str, Tensor]) -> list[Tensor]:
        terms = [torch.sin(x) * torch.linspace(-1, 2, x.numel()).double().reshape(x.shape) for x in y.values()]
        loss = terms[0].nansum() + terms[1].nansum()
        return list(torch.autograd.grad(loss, self.inputs))


def assert_same(found: list[Tensor], truth: list[Tensor], tolerance: float) -> None:
    for i, (x, y) in enumerate(zip(found, truth, strict=True)):
        assert float((x - y).norm() / y.norm()) < tolerance, i


@pytest.mark.parametrize("times", [TIMES, ENDS], ids=["ragged", "ends"])
@pytest.mark.parametrize(("solver", "gradient"), METHODS, ids=repr)
def test_samples_are_solved_as_one_by_one_in_their_scaled_time(solver, gradient, times):
    """The same grid, plain autograd: gradients of y0, parameters, arguments and all times."""
    case = Case(times)
    y = case.together(solver, FREE, gradient).y
    truth = case.stacked([case.scaled(b, solver) for b in range(N)])
    for name in y:
        torch.testing.assert_close(y[name], truth[name], rtol=1e-12, atol=1e-12, equal_nan=True)
    found, expected = case.gradients(y), case.gradients(truth)
    assert_same(found, expected, 1e-12)
    assert (found[3][times.isnan()] == 0).all()


@pytest.mark.parametrize(("solver", "gradient"), METHODS, ids=repr)
def test_the_grid_is_that_of_each_span_in_equal_parts(solver, gradient):
    """Fixed steps of each sample in its own time: the same y, and the same gradients of all but the times."""
    case = Case()
    y = case.together(solver, FREE, gradient).y
    sizes = ((ENDS[1] - ENDS[0]).abs() / STEPS).nan_to_num(1.0).clamp(min=1e-9).tolist()
    truth = case.stacked([case.alone(b, solver, tm.FixedStep(sizes[b], land=False)) for b in range(N)])
    for name in y:
        torch.testing.assert_close(y[name], truth[name], rtol=1e-12, atol=1e-12, equal_nan=True)
    found, expected = case.gradients(y), case.gradients(truth)
    assert_same([*found[:3], *found[4:]], [*expected[:3], *expected[4:]], 1e-12)


@pytest.mark.parametrize("gradient", [tm.MALI(), tm.ACA(), tm.Naive()], ids=repr)
def test_adaptive_steps_agree_to_the_tolerance(gradient):
    """dL/dt too, which is that of the solution. In a span of length 0 it is f at the start."""
    case, controller = Case(), tm.AdaptiveStep(1e-8, 1e-9)
    y = case.together(tm.ALF(order=4), controller, gradient).y
    samples = [case.alone(b, tm.Dopri8(), controller) for b in range(N)]
    t = case.t[:, 4]
    slope = case.net(t[0], case.row(4), case.scale)
    samples[4][1] = {name: leaf + (t[3] - t[0]) * slope[name] for name, leaf in case.row(4).items()}
    truth = case.stacked(samples)
    for name in y:
        torch.testing.assert_close(y[name], truth[name], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert_same(case.gradients(y), case.gradients(truth), 1e-6)


def test_sizes_of_steps_are_those_of_the_longest_span():
    t = torch.tensor([[0.0, 3.0, 1.0], [0.5, 1.0, 1.1]])
    stats = tm.solve(lambda t, y: -y, torch.ones(3), t, spans="own", controller=tm.FixedStep(0.25)).stats
    assert (stats.n_steps, stats.h_max) == (8, 0.25)
    same = tm.solve(lambda t, y: -y, torch.ones(2), torch.tensor([[3.0, 3.0], [1.0, 1.0]]), spans="own").stats
    alone = tm.solve(lambda t, y: -y, torch.ones(2), [3.0, 1.0]).stats
    assert same.n_steps == alone.n_steps and same.h_max == pytest.approx(alone.h_max)


def test_two_rows_go_with_any_controller_solver_and_gradient():
    case = Case(ENDS)
    truth = case.gradients(case.together(tm.Dopri8(), tm.AdaptiveStep(1e-10, 1e-11), tm.Naive()).y)
    for solver, controller, gradient in (
        (tm.ALF(order=4), tm.FixedStep(0.02), tm.MALI()),
        (tm.ALF(order=4), tm.FixedStep(0.02), tm.MALI(exact=True)),
        (tm.ALF(order=4), tm.AdaptiveStep(1e-8, 1e-9, land=True), tm.MALI()),
        (tm.Reversible(), tm.FixedStep(0.02), tm.MALI()),
        (tm.Dopri5(), tm.AdaptiveStep(1e-9, 1e-9), tm.Adjoint()),
    ):
        assert_same(case.gradients(case.together(solver, controller, gradient).y), truth, 1e-6)


def test_y_is_nan_where_an_end_is():
    t = torch.tensor([[0.0, 1.0], [1.0, NAN]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    y = tm.solve(lambda t, y: w * t.cos(), torch.ones(2).double(), t, spans="own", controller=tm.FixedStep(0.1)).y
    assert y.isnan().tolist() == [[False, False], [False, True]]
    of_t, of_w = torch.autograd.grad(y[1, 0], [t, w])
    torch.testing.assert_close(of_t, torch.tensor([[-0.5, 0.0], [0.5 * 0.5403023, 0.0]]).double(), rtol=0, atol=1e-3)
    assert of_w.isfinite() and of_w


def test_f_receives_the_time_of_each_sample():
    shapes: list[tuple[int, ...]] = []

    def f(t: Tensor, y: Any) -> Any:
        shapes.append(tuple(t.shape))
        low, high = torch.tensor([0.0, 2.0, 5.0]), torch.tensor([1.0, 2.5, 3.0])
        assert bool((t.flatten() >= torch.minimum(low, high)).all() and (t.flatten() <= torch.maximum(low, high)).all())
        return tuple(torch.zeros_like(x) for x in y) if isinstance(y, tuple) else torch.zeros_like(y)

    t = torch.tensor([[0.0, 2.0, 5.0], [1.0, 2.5, 3.0]])
    for y0 in (torch.ones(3), torch.ones(3, 2), torch.ones(3, 2, 4, 4), (torch.ones(3), torch.ones(3, 2))):
        tm.solve(f, y0, t, spans="own", controller=tm.FixedStep(0.5))
    assert list(dict.fromkeys(shapes)) == [(3,), (3, 1), (3, 1, 1, 1)]


@pytest.mark.parametrize(("solver", "gradient"), METHODS, ids=repr)
def test_observers_receive_the_time_of_each_sample(solver, gradient):
    case = Case()
    w = torch.linspace(1, 2, 3).double().requires_grad_()

    def observe(t: Tensor, y: dict[str, Tensor], mask: Tensor, k: Tensor) -> Tensor:
        return (y["a"] @ w) * torch.cos(t) + t**2 * y["b"] * (1 + k)

    solution = case.together(solver, FREE, gradient, observe=observe)
    y = case.together(solver, FREE, tm.Naive()).y
    values = []
    for k, t in enumerate(case.t):
        there = ~t.isnan()
        row = observe(t[there], {name: x[k][there] for name, x in y.items()}, there, torch.full((1,), k))
        values.append(torch.zeros(N).double().index_copy(0, there.nonzero().flatten(), row))
    expected = torch.stack(values).sum(0)
    torch.testing.assert_close(solution.observed, expected, rtol=1e-12, atol=1e-12)
    weights, inputs = torch.linspace(-1, 1, N).double(), [w, *case.inputs]
    found, truth = (list(torch.autograd.grad((x * weights).sum(), inputs)) for x in (solution.observed, expected))
    assert_same(found, truth, 1e-11)
    assert (found[4][TIMES.isnan()] == 0).all()


def test_spans_of_length_0_leave_y0_as_it_is():
    y0 = torch.randn(3, 2)
    t = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert torch.equal(tm.solve(lambda t, y: y * t, y0, t, spans="own").y, y0.expand(2, 3, 2))
    several = torch.tensor([[0.0, 1.0, 1.0], [0.5, 1.0, 1.0], [1.0, 1.0, NAN]])
    y = tm.solve(lambda t, y: y * t, y0, several, spans="own").y
    assert torch.equal(y[1, 1:], y0[1:]) and torch.equal(y[2, 1], y0[1])
    with pytest.raises(tm.InvalidTimesError, match="sample 1"):
        tm.solve(lambda t, y: y * t, y0, several.requires_grad_(), spans="own")


def test_float32_and_low_precision():
    net = nn.Linear(3, 3)
    t = torch.tensor([[0.0, 10.0, 1.0, 3.0], [1.0, 10.7, 0.0, 3.0]])

    def f(t: Tensor, y: Tensor) -> Tensor:
        return net(y) + torch.sin(t)

    y0 = torch.randn(4, 3)
    y = tm.solve(f, y0, t, spans="own", controller=tm.FixedStep(0.1)).y
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = tm.solve(f, y0, t, spans="own", controller=tm.FixedStep(0.1)).y
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, y, rtol=0, atol=0.03)
    with pytest.warns(tm.SolverWarning, match="10000000"):
        tm.solve(f, y0, t + torch.tensor([1e7, 0, 0, 0]), spans="own", controller=tm.FixedStep(0.5))


def bad(t: Any, f: Any = lambda t, y: -y, **options: Any) -> Any:
    return tm.solve(f, torch.ones(3, 2), torch.as_tensor(t), spans="own", **options)


@pytest.mark.parametrize(
    ("t", "said"),
    [
        ([0.0, 1.0], "times, samples"),
        ([[0.0, 0.0], [1.0, 1.0]], "as many samples"),
        ([[0.0, NAN, 0.0], [1.0, 1.0, 1.0]], "sample 1 is nan"),
        ([[0.0, 0.0, 0.0], [1.0, torch.inf, 1.0]], "finite"),
        ([[0.0, 0.0, 0.0], [1.0, -1.0, 1.0], [2.0, 1.0, 3.0]], r"t\[1, 1\] = -1"),
        ([[0.0, 0.0, 0.0], [1.0, 3.0, 1.0], [2.0, 2.0, 3.0]], r"t\[2, 1\] = 2"),
    ],
)
def test_times_that_make_no_sense_are_refused(t, said):
    with pytest.raises(tm.InvalidTimesError, match=said):
        bad(t)


@pytest.mark.parametrize(
    "options",
    [
        {"event": lambda t, y: y.sum()},
        {"dense": True},
        {"jumps": [0.5]},
        {"return_code": True, "gradient": tm.MALI(exact=True)},
    ],
)
def test_what_has_no_meaning_in_common_time_is_refused(options):
    with pytest.raises(tm.IncompatibleError, match=f"{next(iter(options))}="):
        bad([[0.0, 0.0, 0.0], [1.0, 0.5, 1.0]], **options)


def test_bad_options_and_slopes_are_refused():
    t = [[0.0, 0.0, 0.0], [1.0, 0.5, 1.0]]
    with pytest.raises(tm.InvalidOptionError, match='"own"'):
        tm.solve(lambda t, y: y, torch.ones(3, 2), torch.tensor(t), spans="mine")
    for f, said in (
        (lambda t, y: y[:1], r"\(1, 2\)"),
        (lambda t, y: (y, y), "tensors"),
        (lambda t, y: y.double(), "float64"),
        (lambda t, y: 1.0, "float"),
    ):
        with pytest.raises(tm.InvalidFieldError, match=said):
            bad(t, f)
