"""MALI(exact=True): what was solved forward is rebuilt to the last bit, from the end alone, or an error says why not.

Equality here is equality of bits, without a tolerance. Where results are compared with plain floats, tolerances come
from float32: eps = 1.2e-7. Numbers of many scales are tested in test_exact_scales.py.
"""

from __future__ import annotations

import functools
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from exact_rebuild import ODES, WEIGHTS
from exact_solves import EXACT, ORDERS, PLAIN, Guarded
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from problems import tanh_mlp
from torch import Tensor, nn

import torchmali as tm
from torchmali.field.evaluate import Field
from torchmali.gradients.mali import GUESSED_STEPS
from torchmali.measure import peak_bytes
from torchmali.state.base import Snapshot
from torchmali.state.fixed_point import PERIOD, FixedPoint, FixedPointArithmetic
from torchmali.tree import Structure

STEPS = {2: 200, 4: 50, 6: 30}  # enough that no problem here diverges


# 1. Rebuilding the start from the end.


class Solved(NamedTuple):
    """A finished forward pass, with the state it began from for comparison."""

    name: str
    start: Snapshot
    code: tm.Code
    stats: tm.Stats


@functools.cache
def solved(name: str, solver: tm.ALF, controller: tm.StepController, wide: bool = False) -> Solved:
    ode, exact = ODES[name], tm.MALI(exact="int64" if wide else True)
    y0 = ode.y0.float()
    how: Any = {"solver": solver, "controller": controller, "gradient": exact}
    solution = tm.solve(ode.f, y0, [*ode.span], **how, return_code=True)
    field = Field(ode.f, (y0,), Structure.of(y0), (), [])
    span = ode.span[1] - ode.span[0]
    n_steps = controller.n_steps([*ode.span])
    first = span / n_steps if n_steps else 0.0
    arithmetic = FixedPointArithmetic(PERIOD * span / (n_steps or GUESSED_STEPS), first, wide)
    start, _ = solver.start(field.as_in_backward, ode.span[0], (y0,), arithmetic)
    assert isinstance(start, FixedPoint)
    again, _ = arithmetic.suited((y0,), start)
    if again is not None:
        start, _ = solver.start(field.as_in_backward, ode.span[0], (y0,), again)
    assert isinstance(start, FixedPoint)
    return Solved(name, start.snapshot(), solution.code, solution.stats)


def in_steps(name: str, n: int) -> tm.FixedStep:
    t0, t1 = ODES[name].span
    return tm.FixedStep((t1 - t0) / n)


def controllers(name: str, order: int) -> list[tm.StepController]:
    return [in_steps(name, STEPS[order]), tm.AdaptiveStep(1e-2 if order == 2 else 1e-3, 1e-5)]


CASES = [(name, order, controller) for name in ODES for order in ORDERS for controller in controllers(name, order)]


def case_id(value: Any) -> str | None:
    return type(value).__name__ if isinstance(value, tm.StepController) else None


def assert_same_bits(found: Snapshot, truth: Snapshot) -> None:
    assert found.form == truth.form  # exponents
    assert len(found.tensors) == len(truth.tensors) > 0
    for x, y in zip(found.tensors, truth.tensors, strict=True):
        assert not x.is_floating_point()
        assert torch.equal(x, y)


def assert_rebuilt(case: Solved) -> None:
    assert_same_bits(case.code.start(ODES[case.name].f).snapshot(), case.start)


@pytest.mark.parametrize(("name", "order", "controller"), CASES, ids=case_id)
def test_the_start_is_rebuilt_to_the_bit_from_the_end_and_the_tape(name, order, controller):
    assert_rebuilt(solved(name, tm.ALF(order=order), controller))


def test_refreshes_and_rescales_occur_in_these_solves():
    stats = {case: solved(case[0], tm.ALF(order=case[1]), case[2]).stats for case in CASES}
    for order in ORDERS:
        for adaptive in (False, True):
            these = [s for (_, p, controller), s in stats.items() if p == order and controller.adaptive == adaptive]
            assert sum(s.n_refreshes for s in these) > 0
            assert sum(s.n_rescales for s in these) > 0
            assert any(s.n_refreshes and s.n_rescales for s in these)
            assert not adaptive or any(s.n_rejected for s in these)


@pytest.mark.parametrize("refresh", ["never", 7])
@pytest.mark.parametrize("wide", [False, True])
def test_every_refresh_policy_is_rebuilt_to_the_bit_on_both_grids(refresh, wide):
    case = solved("oscillator", tm.ALF(refresh=refresh), in_steps("oscillator", 200), wide)
    assert case.stats.n_refreshes == (0 if refresh == "never" else 199 // refresh)
    assert_rebuilt(case)


@pytest.mark.parametrize("name", [pytest.param("van_der_pol", marks=pytest.mark.slow), "decay"])
def test_ten_thousand_steps_are_rebuilt_to_the_bit(name):
    case = solved(name, tm.ALF(), in_steps(name, 10_000))
    assert case.stats.n_steps == 10_000 and case.stats.n_refreshes > 0 and case.stats.n_rescales > 0
    assert_rebuilt(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ODES)
@pytest.mark.parametrize("order", ORDERS)
def test_ten_thousand_steps_of_every_order_are_rebuilt_to_the_bit(name, order):
    case = solved(name, tm.ALF(order=order), in_steps(name, 10_000))
    assert case.stats.n_steps == 10_000
    assert_rebuilt(case)


def test_another_process_that_never_saw_the_start_rebuilds_it(tmp_path):
    cases = [solved(name, tm.ALF(order=order), controller) for name, order, controller in CASES[::5]]
    cases += [solved(name, tm.ALF(), in_steps(name, 200), wide=True) for name in ("decay", "lorenz")]
    assert any(case.stats.n_refreshes and case.stats.n_rescales for case in cases)
    source, target = tmp_path / "ends", tmp_path / "starts"
    source.write_bytes(pickle.dumps([(case.name, case.code) for case in cases]))
    script = Path(__file__).parents[1] / "exact_rebuild.py"
    subprocess.run([sys.executable, str(script), str(source), str(target)], check=True)
    found = pickle.loads(target.read_bytes())
    for rebuilt, case in zip(found, cases, strict=True):
        assert_same_bits(rebuilt, case.start)


def test_what_is_kept_until_the_backward_pass_has_the_bytes_of_float32():
    for name, order, controller in CASES:
        case = solved(name, tm.ALF(order=order), controller)
        y0 = ODES[name].y0
        z_and_v = 2 * y0.float().nbytes
        # and a byte for each element of z and v where they are of several scales
        assert sum(x.nbytes for x in case.code.end.tensors) - z_and_v in (0, 2 * y0.numel())
        # Beside it v at each refresh, and three bytes at most for each element of z and v at each rescale.
        extra = sum(x.nbytes for snapshot in case.code.kept for x in snapshot.tensors)
        assert extra <= z_and_v / 2 * case.stats.n_refreshes + 3 * z_and_v / 4 * case.stats.n_rescales


def encoded(func: Any, y0: Any, args: tuple = (), **how: Any) -> tm.Solution:
    how = {"controller": tm.FixedStep(0.1), "gradient": EXACT} | how
    return tm.solve(func, y0, [0.0, 0.4, 1.0], **how, args=args, return_code=True)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_solve_back_gives_the_rounded_start_with_its_structure_and_arguments(requires_grad):
    a = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_(requires_grad)
    y0, w = {"a": a, "b": (torch.tensor(0.5),)}, torch.linspace(0.5, 1.5, 3).requires_grad_(requires_grad)

    def func(t, y, w):
        return {"a": torch.tanh(y["a"] * w) + y["b"][0], "b": (y["a"].mean() * t,)}

    solution = encoded(func, y0, args=(w,))
    assert solution.y["a"].requires_grad == requires_grad
    found = tm.solve_back(func, pickle.loads(pickle.dumps(solution.code)))
    for x, leaf in ((found["a"], a), (found["b"][0], y0["b"][0])):
        assert torch.equal(x, FixedPoint.of((leaf.detach(),)).point[0])
        assert (x - leaf).abs().max() <= 2.0**-26 * leaf.abs().max()
    if requires_grad:
        plain = encoded(func, y0, args=(w,))
        found, truth = (torch.autograd.grad(s.y["a"].sum(), [a, w]) for s in (solution, plain))
        assert all(map(torch.equal, found, truth))


def test_a_code_of_another_f_is_an_error():
    y0 = torch.linspace(-1, 1, 6)
    code = encoded(lambda t, y: torch.tanh(y), y0).code
    with pytest.raises(tm.NonRepeatableFieldError, match="not made with this f"):
        tm.solve_back(lambda t, y: 1.0001 * torch.tanh(y), code)


def test_the_way_back_leaves_no_trace_and_codes_hold_no_checkpoints():
    net = torch.nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
    y0 = torch.randn(4, 3)
    code = encoded(lambda t, y: net(y), y0, gradient=tm.MALI(exact=True, checkpoint_every=1)).code
    before = [x.clone() for x in net.buffers()]
    assert torch.equal(tm.solve_back(lambda t, y: net(y), code), FixedPoint.of((y0,)).point[0])
    assert all(map(torch.equal, before, net.buffers()))
    assert sum(x.nbytes for snapshot in code.kept for x in snapshot.tensors) < 10 * y0.nbytes  # with them: 20
    assert repr(code).startswith("Code(") and repr(code).endswith(" bytes, 10 steps of ALF())")


def test_a_code_needs_integers():
    with pytest.raises(
        tm.IncompatibleError, match=r"return_code=True needs .* gradient=MALI\(exact=True\), not ACA\(\)"
    ):
        encoded(lambda t, y: -y, torch.ones(2), gradient=tm.ACA())


# 2. The gradient of the stored trajectory.


def scaled_field(name: str) -> tuple[Any, list[Tensor]]:
    """f(t, y, *args) of a problem, and args to differentiate."""
    if name == "mlp":
        return tanh_mlp, [w.clone().requires_grad_() for w in WEIGHTS]
    f = ODES[name].f
    return lambda t, y, rate: rate * f(t, y), [torch.tensor(1.0, requires_grad=True)]


def gradients(name: str, solver: tm.ALF, controller: tm.StepController, method: tm.GradientMethod, shares=(0, 0.3, 1)):
    """dL/d(y0, args, t) of a loss that looks at every output."""
    ode, (func, args) = ODES[name], scaled_field(name)
    y0 = ode.y0.float().requires_grad_()
    t = torch.tensor([ode.span[0] + share * (ode.span[1] - ode.span[0]) for share in shares], requires_grad=True)
    got = tm.solve(func, y0, t, solver=solver, controller=controller, gradient=method, args=tuple(args))
    weights = torch.arange(1.0, 1.0 + len(t)).reshape(-1, *[1] * y0.ndim)
    return torch.autograd.grad((weights * got.y**2).sum(), [y0, *args, t]), got.stats


GRADIENT_CASES = [
    ("mlp", 2, 60), ("mlp", 4, None), ("oscillator", 6, None), ("toy", 4, 10), ("decay", 2, 150), ("decay", 4, None),
    ("growth", 2, None), ("growth", 6, 6), ("van_der_pol", 2, 150), ("van_der_pol", 4, None), ("lorenz", 2, 300),
    ("lorenz", 6, 40),
]  # fmt: skip


@pytest.mark.parametrize(("name", "order", "n"), GRADIENT_CASES)
@pytest.mark.parametrize("exact", [True, "int64"])
def test_the_gradient_equals_that_of_the_stored_trajectory(name, order, n, exact):
    solver, controller = tm.ALF(order=order), in_steps(name, n) if n else tm.AdaptiveStep(1e-2, 1e-4)
    grads, stats = gradients(name, solver, controller, tm.MALI(exact=exact))
    stored, kept = gradients(name, solver, controller, tm.MALI(exact=exact, checkpoint_every=1))
    assert (stats.n_checkpoints, kept.n_checkpoints) == (0, kept.n_steps)
    assert stats.n_steps == kept.n_steps and stats.reconstruction_error == 0.0
    for g, wanted in zip(grads, stored, strict=True):
        assert g.isfinite().all() and g.any()
        assert torch.equal(g, wanted)


@pytest.mark.parametrize("every", [7, 10_000])
@pytest.mark.parametrize("memory", [None, "300B"])
def test_checkpoints_change_nothing_of_an_exact_gradient(every, memory):
    solver, controller = tm.ALF(), in_steps("van_der_pol", 100)
    method = tm.MALI(exact=True, memory=memory) if memory else tm.MALI(exact=True, checkpoint_every=every)
    wanted, _ = gradients("van_der_pol", solver, controller, EXACT)
    for g, w in zip(gradients("van_der_pol", solver, controller, method)[0], wanted, strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["mlp", "toy", "growth"])
def test_the_gradient_is_that_of_plain_autograd_up_to_float32(name, order):
    """The only difference is rounding: of each step to the grid here, to float32 there."""
    solver, controller = tm.ALF(order=order), in_steps(name, STEPS[order])
    grads, _ = gradients(name, solver, controller, EXACT)
    wanted, _ = gradients(name, solver, controller, tm.Naive())
    for g, w in zip(grads, wanted, strict=True):
        assert (g - w).norm() < 1e-4 * w.norm()  # growth multiplies a rounding error by e^10


@pytest.mark.parametrize("order", [4, 6])
def test_a_refresh_where_the_grid_becomes_coarser_is_undone(order):
    """With adaptive steps of order 4 and 6 a refresh takes f from the step's error estimate."""
    y0 = torch.linspace(-1.0, 1.0, 2000).reshape(100, 20).requires_grad_()
    solver, controller = tm.ALF(order=order, refresh=1), tm.AdaptiveStep(1e-4, 1e-6)
    got = tm.solve(lambda t, y: y, y0, [0.0, 5.0], solver=solver, controller=controller, gradient=EXACT)
    assert got.stats.n_refreshes > 0 and got.stats.n_rescales > 0
    got.y[-1].sum().backward()
    assert got.stats.reconstruction_error == 0.0


def test_the_way_back_keeps_nothing_of_the_steps_it_has_passed():
    y0 = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)

    def run(n_steps):
        y = y0.clone().requires_grad_()
        got = tm.solve(torch.mul, y, [0.5, 1.0], controller=tm.FixedStep(0.5 / n_steps), gradient=EXACT)
        got.y[-1].sum().backward()

    # Within a few numbers that are read from time to time; a step kept would be 96 bytes.
    assert abs(peak_bytes(lambda: run(200)) - peak_bytes(lambda: run(40))) < 24


# 3. Any field, any state.


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype
    scale: float
    is_zero: bool  # at the start

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Spec(NamedTuple):
    """A random problem."""

    leaves: list[Leaf]
    container: type
    kind: str
    rate: float
    seed: int
    times: list[float]
    solver: tm.ALF
    controller: tm.StepController
    exact: bool | str

    def y0(self) -> Any:
        random = torch.Generator().manual_seed(self.seed)
        values = [
            (leaf.scale * (0 if leaf.is_zero else 1) * torch.randn(leaf.shape, generator=random, dtype=torch.float64))
            .to(leaf.dtype)
            .requires_grad_()
            for leaf in self.leaves
        ]
        return self.tree(values)

    def tree(self, values: list) -> Any:
        if self.container is dict:
            return {f"leaf{i}": x for i, x in enumerate(values)}
        return tuple(values) if self.container is tuple else values[0]

    def values(self, tree: Any) -> list:
        return list(tree.values()) if self.container is dict else list(tree) if self.container is tuple else [tree]

    def matrix(self) -> Tensor:
        n = sum(leaf.size for leaf in self.leaves)
        random = torch.Generator().manual_seed(self.seed + 1)
        return self.rate / math.sqrt(n) * torch.randn(n, n, generator=random, dtype=torch.float64)

    def func(self, t: Tensor, y: Any, a: Tensor) -> Any:
        leaves = list(zip(self.values(y), self.leaves, strict=True))
        x = torch.cat([value.double().flatten() / leaf.scale for value, leaf in leaves])
        if self.kind == "tanh":
            u = a @ torch.tanh(x + t.double())
        elif self.kind == "forced":
            u = a @ x * torch.cos(3 * t.double()) + a[0]
        else:
            u = a @ x
        parts = torch.split(u, [leaf.size for leaf in self.leaves])
        return self.tree(
            [
                (leaf.scale * part).reshape(leaf.shape).to(leaf.dtype)
                for part, leaf in zip(parts, self.leaves, strict=True)
            ]
        )


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda x: 10.0**x)


@st.composite
def specs(draw) -> Spec:
    dtypes = draw(st.sampled_from([(torch.float32,), (torch.float64,), (torch.float32, torch.float64)]))
    leaf = st.builds(
        Leaf,
        st.sampled_from([(), (1,), (4,), (2, 3), (2, 1, 3), (0,), (3, 0)]),
        st.sampled_from(dtypes),
        st.one_of(st.just(1.0), powers(-6, 6)),
        st.sampled_from([False, False, False, True]),
    )
    container = draw(st.sampled_from([Tensor, tuple, dict]))
    leaves = draw(st.lists(leaf, min_size=1, max_size=1 if container is Tensor else 3))
    assume(any(leaf.size for leaf in leaves))
    order = draw(st.sampled_from(ORDERS))
    span = draw(powers(-2, 1))
    if draw(st.booleans()):
        controller = tm.FixedStep(span / draw(st.integers(1, 60 // order)))
    else:
        rtol = draw(powers(-4, -1))
        h0 = draw(st.sampled_from([None, None, span]))
        controller = tm.AdaptiveStep(rtol, rtol * draw(powers(-6, 0)), h0=h0, max_steps=100)
    shares = [0.0, *draw(st.sampled_from([[], [0.5], [0.01, 0.77]])), 1.0]
    t0, sign = draw(st.sampled_from([0.0, -3.0, 100.0])), draw(st.sampled_from([1, -1]))
    return Spec(
        leaves,
        container,
        draw(st.sampled_from(["tanh", "linear", "forced"])),
        draw(powers(-2, 1.5)),
        draw(st.integers(0, 999)),
        [t0 + sign * span * share for share in shares],
        tm.ALF(order=order, refresh=draw(st.sampled_from(["auto", "never", 1, 3]))),
        controller,
        draw(st.sampled_from([True, "int64"])),
    )


def outcome(spec: Spec, method: tm.MALI) -> tuple[str, list[Tensor]]:
    """How a solve and its backward pass went, and the solution and all gradients."""
    y0, a = spec.y0(), spec.matrix().requires_grad_()
    t = torch.tensor(spec.times, dtype=torch.float64, requires_grad=True)
    try:
        got = tm.solve(
            Guarded(spec.func), y0, t, solver=spec.solver, controller=spec.controller, gradient=method, args=(a,)
        )
    except (tm.NonFiniteError, tm.StepLimitError, tm.StepUnderflowError) as error:
        return type(error).__name__, []
    ys, inputs = spec.values(got.y), [*spec.values(y0), a, t]
    loss = torch.stack([(torch.tanh(y.double() / leaf.scale)).sum() for y, leaf in zip(ys, spec.leaves, strict=True)])
    grads = torch.autograd.grad(loss.sum(), inputs)
    assert got.stats.reconstruction_error == 0.0
    return "rebuilt", [*ys, *grads]


@pytest.mark.parametrize("n", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_any_solve_is_rebuilt_to_the_bit_or_refused_with_a_reason(n):
    ends = []

    @settings(max_examples=n, deadline=None, derandomize=True)
    @given(specs())
    def holds(spec):
        end, found = outcome(spec, tm.MALI(exact=spec.exact))
        ends.append(end)
        stored_end, stored = outcome(spec, tm.MALI(exact=spec.exact, checkpoint_every=1))
        assert stored_end == end
        for x, y in zip(found, stored, strict=True):
            assert torch.equal(x.nan_to_num(), y.nan_to_num()) and torch.equal(x.isnan(), y.isnan())

    holds()
    assert ends.count("rebuilt") > len(ends) / 2


# 4. Fields that are other functions in training, or without gradients.


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 4))
        self.is_noisy = False
        self.noise = torch.Generator().manual_seed(0)  # its own: nobody can know of it

    def forward(self, t, y):
        noise = torch.randn(y.shape, generator=self.noise) if self.is_noisy else 0.0
        return self.net(y) + noise


def backward(module: nn.Module, y0: Tensor, **how: Any) -> tm.Stats:
    y = y0.clone().requires_grad_()
    got = tm.solve(module, y, [0.0, 1.0], gradient=EXACT, **how)
    (got.y[-1] ** 2).sum().backward()
    assert y.grad is not None and y.grad.any()
    return got.stats


@pytest.mark.filterwarnings("ignore:f contracts too much")  # noise may look like that
@pytest.mark.parametrize("order", ORDERS)
def test_dropout_is_repeated_and_other_noise_refused(order):
    module, y0 = Dropping(), torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
    how: dict[str, Any] = {"solver": tm.ALF(order=order), "controller": tm.FixedStep(0.2)}
    assert backward(module.train(), y0, **how).reconstruction_error == 0.0
    assert backward(module.eval(), y0, **how).reconstruction_error == 0.0
    module.is_noisy = True
    with pytest.raises(tm.NonRepeatableFieldError, match="noise drawn inside f"):
        backward(module, y0, **how)


class Attending(nn.Module):
    """In evaluation and without gradients, PyTorch takes another path through the layer, with other bits."""

    def __init__(self, is_trainable: bool):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.requires_grad_(is_trainable).eval()

    def forward(self, t, y):
        return self.layer(y) * torch.cos(t)


@pytest.mark.parametrize("is_trainable", [True, False], ids=["trainable", "frozen"])
@pytest.mark.parametrize("controller", [tm.FixedStep(0.1), tm.AdaptiveStep(1e-2, 1e-3)], ids=["fixed", "adaptive"])
def test_a_transformer_layer_is_undone_to_the_bit(controller, is_trainable):
    module, y0 = Attending(is_trainable), torch.linspace(-1.0, 1.0, 160).sin().reshape(2, 5, 16)
    assert backward(module, y0, controller=controller).reconstruction_error == 0.0


def test_equal_bits_at_the_start_alone_do_not_choose_the_path():
    """Two rows of two numbers: bits of another path may agree by chance, and part later."""
    for seed in range(20):
        torch.manual_seed(seed)
        layer = nn.TransformerEncoderLayer(2, 1, 4, batch_first=True).double().eval()
        y0 = torch.randn(1, 2, 2, dtype=torch.float64, requires_grad=True)
        got = tm.solve(lambda t, y, layer=layer: layer(y), y0, [0.0, 1.0], controller=tm.FixedStep(0.1), gradient=EXACT)
        torch.autograd.grad(got.y[-1].sum(), y0)
        assert got.stats.reconstruction_error == 0.0


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_the_forward_pass_records_no_graph_where_bits_do_not_depend_on_it(p):
    net, seen = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(p), nn.Linear(16, 4)), []

    def f(t, y):
        seen.append(torch.is_grad_enabled())
        return net(y)

    tm.solve(f, torch.randn(3, 4, requires_grad=True), [0.0, 1.0], controller=tm.FixedStep(0.1), gradient=EXACT)
    assert seen == [True] + [False] * 11


def test_the_transformer_layer_above_has_another_path_without_gradients():
    module, t = Attending(is_trainable=True), torch.tensor(0.0)
    y0 = torch.linspace(-1.0, 1.0, 160).sin().reshape(2, 5, 16)
    with torch.no_grad():
        fast = module(t, y0)
    assert not torch.equal(fast, module(t, y0))


# 5. Accuracy.

FINE = {2: 1000, 4: 200, 6: 100}  # so many steps that orders 4 and 6 show round-off rather than truncation


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ODES)
def test_exact_solves_are_as_accurate_as_plain_float32(name, order):
    """Within a factor of 4, which is the luck of three solves: mostly they are more accurate (3 bits more)."""
    ode = ODES[name]
    truth = ode.reference() if ode.exact is None else ode.at(ode.span[1])

    def error(method):
        errors = []
        for n in (FINE[order], FINE[order] * 11 // 10, FINE[order] * 13 // 10):
            how = {"solver": tm.ALF(order=order), "controller": in_steps(name, n), "gradient": method}
            y = tm.solve(ode.f, ode.y0.float(), ode.span, **how).y[-1]
            errors.append(float((y.double() - truth).norm() / truth.norm()))
        return sum(errors) / len(errors)

    assert error(EXACT) <= 4 * max(error(PLAIN), 5e-7)


# 6. What cannot be lifted to integers.


@pytest.mark.parametrize("solver", [tm.ALF(eta=0.9), tm.Reversible(tm.RK4())], ids=repr)
@pytest.mark.parametrize("exact", [True, "int64"])
def test_solvers_that_do_not_lift_to_integers_are_refused(solver, exact):
    with pytest.raises(tm.IncompatibleError, match="ALF without damping") as error:
        controller = tm.FixedStep(0.1)
        tm.solve(
            lambda t, y: -y, torch.ones(2), [0.0, 1.0], solver=solver, controller=controller, gradient=tm.MALI(exact)
        )
    assert repr(solver) in str(error.value)


def test_a_solver_without_an_inverse_is_refused_as_for_plain_mali():
    with pytest.raises(tm.IncompatibleError, match="needs a solver with an inverse, but Dopri5 has none"):
        tm.solve(lambda t, y: -y, torch.ones(2), [0.0, 1.0], solver=tm.Dopri5(), gradient=EXACT)


@pytest.mark.parametrize("exact", ["int32", 64, None])
def test_exact_is_false_true_or_int64(exact):
    with pytest.raises(tm.InvalidOptionError, match='False, True or "int64"'):
        tm.MALI(exact=exact)
