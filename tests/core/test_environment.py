"""f as part of a model: with dropout, BatchNorm, autocast it is one function, in a solve and in its backward pass."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

import torchmali as tm
from torchmali.measure import peak_bytes
from torchmali.nn import ODEBlock

FIXED, ADAPTIVE = tm.FixedStep(0.1), tm.AdaptiveStep(1e-3, 1e-4, h0=1.0)
REPLAYS = [tm.ACA(), tm.MALI(), tm.MALI(exact=True), tm.MALI(checkpoint_every=3)]


class Block(nn.Module):
    """BatchNorm and dropout in f."""

    def __init__(self, p: float = 0.3):
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 4)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(p)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.last(torch.tanh(self.drop(self.norm(self.first(y) * (1 + t)))))


def block(dtype: torch.dtype = torch.float64, p: float = 0.3) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block(p).to(dtype), torch.randn(32, 4, dtype=dtype)


def gradient(f: nn.Module, y0: Tensor, around: Any = contextlib.nullcontext, **how: Any) -> tuple[Tensor, tm.Solution]:
    """Of the end, by y0 and all parameters. f is left alone, and the dice are the same each time."""
    y0 = y0.clone().requires_grad_()
    torch.manual_seed(1)
    with around():
        solution = tm.solve(f, y0, (0.0, 1.0), **how)
    grads = torch.autograd.grad(solution.y[-1].square().sum(), [y0, *f.parameters()], allow_unused=True)
    return torch.cat([g.flatten() for g in grads if g is not None]), solution


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def statistics(f: Block) -> Tensor:
    assert f.norm.running_mean is not None and f.norm.running_var is not None
    return torch.stack([f.norm.running_mean, f.norm.running_var])


def n_updates(f: Block) -> int:
    assert f.norm.num_batches_tracked is not None
    return int(f.norm.num_batches_tracked)


@pytest.mark.parametrize("solver", [tm.ALF(), tm.ALF(order=4)], ids=repr)
@pytest.mark.parametrize("controller", [FIXED, ADAPTIVE], ids=repr)
@pytest.mark.parametrize("method", REPLAYS, ids=repr)
def test_dropout_and_batchnorm_in_f_are_differentiated_as_autograd_does(method, controller, solver):
    f, y0 = block()
    naive, replayed = copy.deepcopy(f), copy.deepcopy(f)
    how: dict[str, Any] = {"solver": solver, "controller": controller}
    exact, _ = gradient(naive, y0, gradient=tm.Naive(), **how)
    grads, solution = gradient(replayed, y0, gradient=method, **how)
    assert difference(grads, exact) < 1e-12
    assert n_updates(replayed) == n_updates(naive)
    tolerance = 1e-12 if getattr(method, "exact", False) else 0.0  # on a grid, the states differ in their last bits
    torch.testing.assert_close(statistics(replayed), statistics(naive), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("solver", "per_step"), [(tm.ALF(), 1), (tm.ALF(order=4), 12), (tm.RK4(), 4), (tm.Euler(), 1)], ids=repr
)
@pytest.mark.parametrize("method", [tm.Naive(), tm.ACA(), tm.Adjoint()], ids=repr)
def test_running_statistics_are_updated_by_each_evaluation_of_a_step(method, solver, per_step):
    f, y0 = block()
    gradient(f, y0, solver=solver, controller=FIXED, gradient=method)
    assert n_updates(f) == 10 * per_step


@pytest.mark.parametrize("h0", [None, 1.0], ids=["guessed", "too long"])
@pytest.mark.parametrize(("solver", "per_step"), [(tm.ALF(), 1), (tm.Dopri5(), 6)], ids=repr)
def test_rejected_attempts_and_the_first_guess_of_h_leave_no_trace(solver, per_step, h0):
    f, y0 = block(p=0.0)
    controller = tm.AdaptiveStep(1e-6, 1e-7, h0=h0)
    stats = tm.solve(f, y0, (0.0, 1.0), solver=solver, controller=controller, gradient=tm.ACA()).stats
    assert stats.n_rejected > 0 if h0 else stats.n_evals_forward > per_step * stats.n_steps + 1
    assert n_updates(f) == per_step * stats.n_steps + (per_step == 6)  # k1 of the first step


def test_frozen_statistics_stay_and_gradients_are_the_same():
    f, y0 = block()
    exact, _ = gradient(copy.deepcopy(f), y0, controller=FIXED, gradient=tm.Naive())
    before = copy.deepcopy(f.state_dict())
    grads, _ = gradient(f, y0, controller=FIXED, buffers="freeze")
    assert difference(grads, exact) < 1e-12
    assert all(torch.equal(before[name], x) for name, x in f.state_dict().items())
    with pytest.raises(tm.InvalidOptionError, match='"update".*"freeze"'):
        gradient(f, y0, buffers="thaw")


@pytest.mark.parametrize("policy", ["update", "freeze"])
@pytest.mark.parametrize("at", [1, 2, 7])
@pytest.mark.parametrize("method", [tm.Naive(), *REPLAYS], ids=repr)
def test_a_solve_that_fails_leaves_buffers_as_they_were(method, at, policy):
    f, y0 = block()
    before, calls = copy.deepcopy(f.state_dict()), []

    def func(t: Tensor, y: Tensor) -> Tensor:
        u = f(t, y)
        calls.append(1)
        if len(calls) == at:
            raise ZeroDivisionError
        return u

    with pytest.raises(ZeroDivisionError):
        tm.solve(func, y0, (0.0, 1.0), controller=FIXED, gradient=method, buffers=policy)
    assert all(torch.equal(before[name], x) for name, x in f.state_dict().items())


def test_a_backward_pass_that_fails_leaves_buffers_as_they_were():
    f, y0 = block()
    calls = []

    def func(t: Tensor, y: Tensor) -> Tensor:
        u = f(t, y)
        calls.append(1)
        if len(calls) == 15:
            raise ZeroDivisionError
        return u

    y = tm.solve(func, y0.requires_grad_(), (0.0, 1.0), controller=FIXED).y
    before = copy.deepcopy(f.state_dict())
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert all(torch.equal(before[name], x) for name, x in f.state_dict().items())


LENT: dict[str, Tensor] = {}


@pytest.mark.parametrize("place", ["closure", "args", "global"])
@pytest.mark.parametrize("method", [tm.Naive(), *REPLAYS, tm.Adjoint()], ids=repr)
def test_buffers_that_f_lends_to_a_module_are_updated_by_accepted_steps_alone(method, place):
    f, y0 = block(p=0.0)
    plain = copy.deepcopy(f)
    exact, _ = gradient(plain, y0, controller=FIXED, gradient=method)
    params = {name: p.detach().requires_grad_() for name, p in f.named_parameters()}
    held = {name: x.clone() for name, x in f.named_buffers()}
    buffers: Any = held if place == "closure" else None
    y0 = y0.clone().requires_grad_()

    def func(t: Tensor, y: Tensor, lent: Any = None) -> Tensor:
        return functional_call(f, {**params, **(LENT if place == "global" else lent or buffers)}, (t, y))

    LENT.update(held if place == "global" else {})
    args = (held,) if place == "args" else ()
    how: Any = {"controller": FIXED, "gradient": method, "args": args, "params": list(params.values())}
    y = tm.solve(func, y0, (0.0, 1.0), **how).y
    for _ in range(2):  # once more, after the backward pass
        assert all(torch.equal(x, dict(plain.named_buffers())[name]) for name, x in held.items())
        assert n_updates(f) == 0
        if y.requires_grad:
            grads = torch.autograd.grad(y[-1].square().sum(), [y0, *params.values()])
            torch.testing.assert_close(torch.cat([g.flatten() for g in grads]), exact, rtol=1e-8, atol=1e-10)
            y = y.detach()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("method", [tm.Naive(), *REPLAYS, tm.Adjoint()], ids=repr)
def test_buffers_that_are_lent_to_a_layer_are_there_in_the_backward_pass(method, training):
    f, y0 = block(p=0.0)
    layer = ODEBlock(f, controller=FIXED, gradient=method).train(training)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for x in (*other.parameters(), *other.buffers()):
            x += 1
    lent = {name: x.detach().clone() for name, x in [*other.named_parameters(), *other.named_buffers()]}
    params = [lent[name].requires_grad_() for name, _ in other.named_parameters()]
    exact = torch.autograd.grad(other(y0).square().sum(), list(other.parameters()))
    before = copy.deepcopy(layer.state_dict())
    grads = torch.autograd.grad(functional_call(layer, lent, (y0,)).square().sum(), params)
    torch.testing.assert_close(grads, exact)
    assert all(torch.equal(lent[name], x) for name, x in other.named_buffers())
    assert all(torch.equal(before[name], x) for name, x in layer.state_dict().items())


def test_a_tensor_that_f_holds_and_that_changes_before_the_backward_pass_is_named():
    c, y0 = torch.ones(3), torch.ones(3, requires_grad=True)
    y = tm.solve(lambda t, y: -c * y, y0, (0.0, 1.0), controller=FIXED, gradient=tm.ACA()).y
    c.mul_(2)
    with pytest.raises(tm.NonRepeatableFieldError, match=r"a tensor of shape \(3,\) that f holds changed"):
        y.sum().backward()


def test_tensors_that_cannot_be_compared_are_left_alone():
    """Sparse ones, large ones that f writes to, and those of inference mode."""
    with torch.inference_mode():
        c = torch.ones(3)
    matrix, log, n = torch.eye(3).to_sparse(), torch.zeros(2**15), [0]

    def f(t: Tensor, y: Tensor) -> Tensor:
        log[n[0]] = t
        n[0] += 1
        return c - torch.sparse.mm(matrix, y[:, None])[:, 0]

    y0 = torch.ones(3, requires_grad=True)
    tm.solve(f, y0, (0.0, 1.0), controller=FIXED).y.sum().backward()
    assert n == [22] and log[10] == pytest.approx(0.95)


def test_a_spectral_norm_is_one_function_when_frozen():
    """Each call improves its singular vectors, on which the next depends."""
    torch.manual_seed(0)
    net = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh()).double()
    y0 = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def solve(buffers: str) -> tm.Solution:
        how: dict[str, Any] = {"controller": FIXED, "gradient": tm.MALI(exact=True), "buffers": buffers}
        return tm.solve(lambda t, y: net(y), y0, (0.0, 1.0), **how)

    solve("freeze").y[-1].sum().backward()
    with pytest.raises(tm.NonRepeatableFieldError, match="spectral norm"):
        solve("update").y[-1].sum().backward()


def test_one_seed_is_all_that_a_solve_takes_from_the_default_generator():
    f, y0 = block()
    torch.manual_seed(5)
    torch.empty((), dtype=torch.int64).random_()
    after_one = torch.get_rng_state()
    torch.manual_seed(5)
    y0.requires_grad_()
    y = tm.solve(f, y0, (0.0, 1.0), controller=FIXED).y
    assert torch.equal(torch.get_rng_state(), after_one)
    torch.randn(3)
    before = torch.get_rng_state()
    y[-1].sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    again = tm.solve(f, y0, (0.0, 1.0), controller=FIXED).y
    assert not torch.equal(y, again)  # another seed
    f.eval()
    before = torch.get_rng_state()
    tm.solve(f, y0, (0.0, 1.0), controller=FIXED)
    assert torch.equal(torch.get_rng_state(), before)  # nothing was drawn


def test_a_solve_with_dropout_takes_no_more_steps_than_without():
    f, y0 = block(p=0.3)
    counts = []
    for mode in (True, False):
        f.train(mode)
        controller = tm.AdaptiveStep(1e-6, 1e-7)
        solution = tm.solve(f, y0, (0.0, 1.0), solver=tm.Dopri5(), controller=controller, gradient=tm.ACA())
        counts.append(solution.stats.n_evals_forward)
    assert counts[0] <= 2 * counts[1]


def test_random_numbers_in_some_evaluations_only_are_refused():
    y0 = torch.ones(3, requires_grad=True)
    with pytest.raises(tm.NonRepeatableFieldError, match="some of its evaluations only"):
        tm.solve(lambda t, y: -y + (torch.rand(3) if t > 0.5 else 0.0), y0, (0.0, 1.0), controller=FIXED)


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("method", [*REPLAYS, tm.Adjoint()], ids=repr)
def test_under_autocast_f_is_cast_and_the_state_is_not(method):
    f, y0 = block(torch.float32)
    dtypes = []
    exact, _ = gradient(copy.deepcopy(f), y0, controller=FIXED, gradient=tm.ACA())
    f.last.register_forward_hook(lambda m, args, u: dtypes.append(u.dtype))
    grads, solution = gradient(f, y0, bfloat16, controller=FIXED, gradient=method)  # backward: outside of it
    assert set(dtypes) == {torch.bfloat16}
    assert solution.y.dtype == torch.float32
    assert 1e-4 < difference(grads, exact) < 2e-2
    if isinstance(method, tm.MALI):
        assert solution.stats.reconstruction_error == pytest.approx(0, abs=0.0 if method.exact else 0.06)


def test_a_state_from_a_cast_layer_is_float32_again():
    f, y0 = block(torch.float32, p=0.0)
    before = nn.Linear(4, 4)
    with bfloat16():
        y = tm.solve(f, before(y0), (0.0, 1.0), controller=FIXED).y
    assert y.dtype == torch.float32
    y.sum().backward()
    assert before.weight.grad is not None and before.weight.grad.dtype == torch.float32
    with pytest.raises(tm.InvalidStateError, match="under torch.autocast"):
        tm.solve(f, y0.bfloat16(), (0.0, 1.0), controller=FIXED)


@pytest.mark.parametrize("method", REPLAYS, ids=repr)
def test_autocast_of_the_backward_pass_is_that_of_the_forward_pass(method):
    """Wherever backward is called: the same numbers."""
    f, y0 = block(torch.float32)
    y0.requires_grad_()

    def grads(forward: Any, backward: Any) -> Tensor:
        torch.manual_seed(0)
        with forward():
            y = tm.solve(f, y0, (0.0, 1.0), controller=FIXED, gradient=method).y
        with backward():
            return torch.autograd.grad(y[-1].sum(), f.first.weight)[0]

    plain = contextlib.nullcontext
    assert torch.equal(grads(bfloat16, plain), grads(bfloat16, bfloat16))
    assert torch.equal(grads(plain, bfloat16), grads(plain, plain))


def test_ACA_and_MALI_agree_under_autocast():
    f, y0 = block(torch.float32)
    kept, _ = gradient(copy.deepcopy(f), y0, bfloat16, controller=FIXED, gradient=tm.ACA())
    rebuilt, _ = gradient(copy.deepcopy(f), y0, bfloat16, controller=FIXED, gradient=tm.MALI())
    assert difference(rebuilt, kept) < 1e-3


def test_a_solve_without_gradients_leaves_no_casts_behind():
    """autocast caches the weights it casts; those cast without a graph would get no gradient."""
    f, y0 = block(torch.float32)
    with bfloat16():
        with torch.no_grad():
            tm.solve(f, y0, (0.0, 1.0), controller=FIXED)
        f(torch.zeros(()), y0).sum().backward()
    assert f.first.weight.grad is not None and f.first.weight.grad.any()


def test_a_grad_scaler_scales_and_unscales():
    f, y0 = block(torch.float32, p=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(f.parameters(), lr=0.0)
    grads = []
    for scale in (lambda loss: loss, scaler.scale):
        f.zero_grad()
        with bfloat16():
            y = tm.solve(f, y0, (0.0, 1.0), controller=FIXED).y
        scale(y[-1].square().sum()).backward()
        if grads:
            scaler.unscale_(optimizer)
        grads.append(torch.cat([p.grad.flatten() for p in f.parameters() if p.grad is not None]))
    assert difference(grads[1], grads[0]) < 1e-2


def descent(t: Tensor, y: Tensor) -> Tensor:
    """Along the gradient of a potential, by autograd."""
    energy = (y.square() / 2 + torch.cos(y)).sum()
    return -torch.autograd.grad(energy, y, create_graph=True)[0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", [tm.Naive(), *REPLAYS, tm.Adjoint()], ids=repr)
def test_an_f_that_takes_derivatives_may_be_solved_in_any_mode(method, mode):
    y0 = torch.linspace(0.5, 2.0, 4, dtype=torch.float64)
    with mode():
        solution = tm.solve(descent, y0 * 1.0, (0.0, 1.0), controller=FIXED, gradient=method)
    expected = tm.solve(lambda t, y: torch.sin(y) - y, y0, (0.0, 1.0), controller=FIXED).y
    torch.testing.assert_close(torch.Tensor(solution.y.tolist()), expected.float())
    is_exact = getattr(method, "exact", False)  # it compares the first evaluation with one without a graph
    assert solution.stats.n_evals_forward == 11 + bool(is_exact)


@pytest.mark.parametrize("method", REPLAYS, ids=repr)
def test_an_f_that_takes_derivatives_is_differentiated(method):
    y0 = torch.linspace(0.5, 2.0, 4, dtype=torch.float64, requires_grad=True)
    exact, grads = (
        torch.autograd.grad(tm.solve(f, y0, (0.0, 1.0), controller=FIXED, gradient=m).y[-1].sum(), y0)[0]
        for f, m in ((lambda t, y: torch.sin(y) - y, tm.Naive()), (descent, method))
    )
    assert difference(grads, exact) < 1e-12


def solved(f: nn.Module, method: tm.GradientMethod) -> Tensor:
    y0 = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    return tm.solve(f, y0, (0.0, 1.0), controller=FIXED, gradient=method).y[-1].sum()


@pytest.mark.parametrize("method", [*REPLAYS, tm.Adjoint()], ids=repr)
def test_what_was_changed_before_the_backward_pass_is_named(method):
    f, _ = block(torch.float32)
    loss = solved(f, method)
    f.eval()
    with pytest.raises(tm.NonRepeatableFieldError, match="BatchNorm1d.*train to eval mode"):
        loss.backward()
    f.eval()
    loss = solved(f, method)
    assert f.norm.running_mean is not None
    f.norm.running_mean.add_(1.0)
    with pytest.raises(tm.NonRepeatableFieldError, match="running_mean of BatchNorm1d"):
        loss.backward()
    loss = solved(f, method)
    with torch.no_grad():
        f.first.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_solves_before_one_backward_are_no_change():
    """The second one updates the statistics; nothing reads them in training."""
    f, _ = block(torch.float32)
    (solved(f, tm.MALI()) + solved(f, tm.MALI())).backward()
    assert n_updates(f) == 20


class Table(nn.Module):
    """A large buffer that f reads."""

    table: Tensor

    def __init__(self, changes: bool):
        super().__init__()
        self.register_buffer("table", torch.zeros(2**20))
        self.changes = changes

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        if self.changes:
            self.table.add_(1.0)
        return -y + self.table[:3]


def test_a_large_buffer_may_be_read_but_not_changed():
    y0 = torch.ones(3)
    f = Table(changes=False)
    size = f.table.nbytes
    assert peak_bytes(lambda: tm.solve(f, y0, (0.0, 1.0), controller=FIXED)) < size
    with pytest.raises(tm.NonRepeatableFieldError, match="table of Table"):
        tm.solve(Table(changes=True), y0, (0.0, 1.0), controller=FIXED)


class Replacing(nn.Module):
    """Puts another tensor in the place of its buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return -y


def test_buffers_that_are_replaced_count_as_changed():
    f, y0 = Replacing(), torch.ones(3, requires_grad=True)
    tm.solve(f, y0, (0.0, 1.0), controller=FIXED).y.sum().backward()
    assert f.calls == 10


class Model(nn.Module):
    """f is a method of a model that also has other modules, with buffers and modes of their own."""

    n_calls: Tensor
    scale: Tensor

    def __init__(self):
        super().__init__()
        self.slope, self.head = nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 1))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("n_calls", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()))

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.slope(y)) * self.scale

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(self.norm(y))

    def observe(self, t: Tensor, y: Tensor) -> Tensor:
        return y.sum()


@pytest.mark.parametrize("gradient", [tm.ACA(), tm.MALI(), tm.MALI(exact=True), tm.Adjoint()], ids=repr)
def test_modules_that_f_could_reach_but_does_not_use_may_change(gradient):
    model, x = Model(), torch.randn(5, 3, requires_grad=True)
    how: Any = {"controller": tm.FixedStep(0.1), "gradient": gradient, "observe": model.observe}
    first = tm.solve(model.f, x, (0.0, 1.0), **how)
    second = tm.solve(model.g, first.y[-1], (0.0, 1.0), **how)
    loss = model.head(second.y[-1]).sum() + first.observed
    model.n_calls += 1
    model.head.eval()
    loss.backward()
    assert x.grad is not None and model.slope.weight.grad is not None


@pytest.mark.parametrize("gradient", [tm.ACA(), tm.MALI(), tm.MALI(exact=True), tm.Adjoint()], ids=repr)
def test_buffers_that_f_uses_may_not(gradient):
    model, x = Model(), torch.randn(5, 3, requires_grad=True)
    y = tm.solve(model.f, x, (0.0, 1.0), controller=tm.FixedStep(0.1), gradient=gradient).y
    model.scale *= 1.1
    with pytest.raises(
        tm.NonRepeatableFieldError, match="f is not what it was in the forward pass: scale of Model changed"
    ):
        y.sum().backward()


def test_an_f_that_changes_y_in_place_is_an_error():
    """With gradients PyTorch itself says so."""
    with torch.no_grad(), pytest.raises(tm.InvalidFieldError, match="f changes y in place"):
        tm.solve(lambda t, y: y.mul_(-1), torch.ones(3), (0.0, 1.0))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("method", [tm.Naive(), *REPLAYS], ids=repr)
def test_an_f_that_changes_y_in_place_at_any_evaluation_is_an_error(method, tree):
    def late(t: Tensor, y: Tensor) -> Tensor:
        return y.mul_(-1) if t > 0.5 else -y

    f, y0 = ((lambda t, y: (late(t, y[0]),)), (torch.ones(3),)) if tree else (late, torch.ones(3))
    with pytest.raises(tm.InvalidFieldError, match="f changes y in place"):
        tm.solve(f, y0, (0.0, 1.0), controller=FIXED, gradient=method)
    observe = lambda t, y, k: y.mul_(2).sum() if k == 2 else y.sum()  # noqa: E731
    with torch.no_grad(), pytest.raises(tm.InvalidFieldError, match="observe changes y in place"):
        tm.solve(lambda t, y: -y, torch.ones(3), (0.0, 0.5, 1.0), gradient=method, observe=observe)


def test_tensors_of_inference_mode_may_be_args():
    w = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        c, y0 = torch.randn(3), torch.randn(4, 3)
        for gradient in (tm.MALI(exact=True), tm.MALI(), tm.ACA()):
            y = tm.solve(lambda t, y, c: torch.tanh(y * w * c), y0, (0.0, 1.0), gradient=gradient, args=(c,)).y
            assert y.shape == (2, 4, 3)


class Holder(nn.Module):
    """f reads a buffer."""

    held: Tensor

    def __init__(self, held: Tensor):
        super().__init__()
        self.register_buffer("held", held)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return -(self.held @ y[:, None])[:, 0] if self.held.ndim == 2 else -y


@pytest.mark.parametrize("buffers", ["update", "freeze"])
@pytest.mark.parametrize("kind", ["coo", "csr", "nested", "jagged", "meta"])
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_buffers_that_cannot_be_compared_are_left_alone(kind, buffers):
    """The matrix of a graph, above all."""
    eye, parts = torch.eye(4), [torch.ones(2), torch.ones(3)]
    held = {
        "coo": eye.to_sparse,
        "csr": eye.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor(parts),
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
        "meta": lambda: torch.ones(3, device="meta"),
    }[kind]()
    f, y0 = Holder(held), torch.ones(4, requires_grad=True)
    how: Any = {"controller": FIXED, "gradient": tm.ACA(), "buffers": buffers}
    if kind in ("nested", "jagged"):
        f.forward = lambda t, y: -y
    y = tm.solve(f, y0, (0.0, 1.0), **how).y
    y[-1].sum().backward()
    plain = tm.solve(lambda t, y: -y, torch.ones(4), (0.0, 1.0), controller=FIXED).y
    torch.testing.assert_close(y, plain)
    assert f.held is held


def test_a_sparse_buffer_that_f_changes_is_named():
    f = Holder(torch.eye(4).to_sparse())
    f.register_forward_pre_hook(lambda *_: (f.held.mul_(2), None)[1])
    with pytest.raises(tm.NonRepeatableFieldError, match="held of Holder, which cannot be undone"):
        tm.solve(f, torch.ones(4), (0.0, 1.0), controller=FIXED)


@pytest.mark.parametrize("place", ["buffer", "args", "closure"])
def test_expanded_tensors_do_not_hide_what_is_wrong_with_f(place):
    wide = torch.ones(1).expand(4)
    holder = Holder(wide)
    fs = {
        "buffer": lambda t, y: holder(t, y)[:2],
        "args": lambda t, y, wide: y[:2],
        "closure": lambda t, y: (y * wide)[:2],
    }
    with pytest.raises(tm.InvalidFieldError, match="shape"):
        tm.solve(fs[place], torch.ones(4), (0.0, 1.0), controller=FIXED, args=(wide,) if place == "args" else ())


@pytest.mark.parametrize("buffers", ["update", "freeze"])
def test_an_expanded_buffer_of_nan_is_no_change(buffers):
    f, y0 = Holder(torch.tensor([torch.nan]).expand(4)), torch.ones(4, requires_grad=True)
    y = tm.solve(f, y0, (0.0, 1.0), controller=tm.AdaptiveStep(1e-3, 1e-4, h0=1.0), buffers=buffers).y
    y.sum().backward()
    assert f.held.isnan().all()


class Coming(nn.Module):
    """Two buffers that f changes, one of which comes and goes."""

    a: Tensor | None
    b: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.zeros(2))
        self.register_buffer("b", torch.zeros(3))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.a = torch.zeros(2) if self.a is None else None
        self.b.add_(1.0)
        return -y


@pytest.mark.parametrize("buffers", ["update", "freeze"])
@pytest.mark.parametrize("method", [tm.Naive(), *REPLAYS], ids=repr)
def test_a_buffer_that_is_none_at_times_is_not_exchanged_with_another(method, buffers):
    f, y0 = Coming(), torch.ones(3, requires_grad=True)
    n_calls = 5 if buffers == "update" else 0
    y = tm.solve(f, y0, (0.0, 1.0), controller=tm.FixedStep(0.2), gradient=method, buffers=buffers).y
    for _ in range(2):
        assert torch.equal(f.b, torch.full((3,), float(n_calls)))
        assert (f.a is None) == (n_calls == 5)
        if y.requires_grad:
            y.sum().backward()
            y = y.detach()


class Counter(nn.Module):
    """f changes a buffer, and then uses it."""

    c: Tensor

    def __init__(self, replaces: bool = False):
        super().__init__()
        self.register_buffer("c", torch.ones(3, dtype=torch.float64))
        self.w, self.replaces = nn.Parameter(torch.ones(3, dtype=torch.float64)), replaces

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        if self.replaces:
            self.c = self.c + 1
        else:
            self.c.add_(1.0)
        return -self.w * y * self.c


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize(
    ("method", "solver"),
    [*((m, tm.ALF()) for m in [tm.Naive(), *REPLAYS]), (tm.Naive(), tm.RK4()), (tm.ACA(), tm.RK4())],
    ids=repr,
)
def test_a_frozen_buffer_that_f_changes_and_uses_is_differentiated_as_it_was_used(method, solver, replaces):
    f, y0 = Counter(replaces), torch.ones(3, dtype=torch.float64)
    c = f.c
    how: dict[str, Any] = {"solver": solver, "controller": FIXED}
    grads, _ = gradient(f, y0, gradient=method, buffers="freeze", **how)
    plain = Counter()
    plain.forward = lambda t, y: -plain.w * y * 2
    exact, _ = gradient(plain, y0, gradient=tm.Naive(), **how)
    assert difference(grads, exact) < 1e-12
    assert f.c is c and f.c._version == 0 and torch.equal(c, torch.ones_like(c))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", [tm.Naive(), *REPLAYS], ids=repr)
def test_frozen_buffers_are_lent_in_any_mode(method, mode):
    f, y0 = Counter(), torch.ones(3, dtype=torch.float64)
    with mode():
        y = tm.solve(f, y0, (0.0, 1.0), controller=FIXED, gradient=method, buffers="freeze").y
    expected = tm.solve(lambda t, y: -2 * y, y0, (0.0, 1.0), controller=FIXED, gradient=method).y
    torch.testing.assert_close(torch.tensor(y.tolist()), expected.float())
    assert torch.equal(f.c, torch.ones_like(f.c))


def test_a_frozen_buffer_in_two_places_is_one():
    f, g = Counter(), Counter()
    g.c = c = f.c

    def func(t: Tensor, y: Tensor) -> Tensor:
        f(t, y)
        return -y * g.c

    y0 = torch.ones(3, dtype=torch.float64, requires_grad=True)
    grads = [
        torch.autograd.grad(tm.solve(h, y0, (0.0, 1.0), controller=FIXED, buffers="freeze").y[-1].sum(), y0)[0]
        for h in (func, lambda t, y: -2 * y)
    ]
    assert difference(*grads) < 1e-12
    assert f.c is c and g.c is c and c.sum() == 3


@pytest.mark.parametrize("place", ["closure", "args", "view"])
@pytest.mark.parametrize("method", [tm.Naive(), tm.ACA(), tm.MALI()], ids=repr)
def test_a_frozen_tensor_that_cannot_be_lent_is_an_error_where_its_old_values_are_wanted(method, place):
    c, f = torch.ones(3, dtype=torch.float64), Counter()
    f.c = c[:] if place == "view" else f.c

    def func(t: Tensor, y: Tensor, lent: Tensor = c) -> Tensor:
        lent.add_(1.0)
        return -f.w * y * (f.c if place == "view" else lent)

    y0, args = torch.ones(3, dtype=torch.float64, requires_grad=True), (c,) if place == "args" else ()
    y = tm.solve(func, y0, (0.0, 1.0), controller=FIXED, gradient=method, args=args, buffers="freeze").y
    assert torch.equal(c, torch.ones_like(c))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y[-1].sum().backward()
    assert torch.equal(c, torch.ones_like(c))


@pytest.mark.parametrize("method", [tm.Naive(), *REPLAYS], ids=repr)
def test_frozen_statistics_that_f_lends_to_a_module_stay(method):
    f, y0 = block(p=0.0)
    exact, _ = gradient(copy.deepcopy(f), y0, controller=FIXED, gradient=tm.Naive())
    held = {name: x.clone() for name, x in f.named_buffers()}
    y0, params = y0.requires_grad_(), dict(f.named_parameters())

    def func(t: Tensor, y: Tensor) -> Tensor:
        return functional_call(f, {**params, **held}, (t, y))

    how: Any = {"params": list(params.values()), "buffers": "freeze"}
    y = tm.solve(func, y0, (0.0, 1.0), controller=FIXED, gradient=method, **how).y
    grads = torch.autograd.grad(y[-1].square().sum(), [y0, *params.values()])
    assert difference(torch.cat([g.flatten() for g in grads]), exact) < 1e-12
    assert all(torch.equal(held[name], x) for name, x in f.named_buffers())


class Descent(nn.Module):
    """Along the gradient of a potential with a BatchNorm in it, by autograd."""

    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        energy = torch.tanh(self.norm(self.lin(y))).sum()
        return torch.autograd.grad(energy, y, create_graph=True)[0]


@pytest.mark.parametrize("buffers", ["update", "freeze"])
@pytest.mark.parametrize(
    ("method", "solver"),
    [*((m, tm.ALF()) for m in [tm.Naive(), *REPLAYS]), (tm.Naive(), tm.Euler()), (tm.ACA(), tm.Euler())],
    ids=repr,
)
def test_an_f_that_takes_derivatives_updates_statistics_once_per_evaluation(method, solver, buffers):
    torch.manual_seed(0)
    f, y0 = Descent(), torch.randn(8, 4)
    tm.solve(f, y0, (0.0, 1.0), solver=solver, controller=tm.FixedStep(0.5), gradient=method, buffers=buffers)
    assert f.norm.num_batches_tracked is not None
    assert int(f.norm.num_batches_tracked) == (2 if buffers == "update" else 0)
    fresh = Descent()
    assert fresh.norm.running_mean is not None and f.norm.running_mean is not None
    assert torch.equal(f.norm.running_mean, fresh.norm.running_mean) == (buffers == "freeze")


class Late(nn.Module):
    """f changes buffers in the second half only."""

    n: Tensor
    m: Tensor

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("m", torch.zeros(()))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        if t > 0.5:
            self.n += 1
            self.m = self.m + 1
            self.norm(y)
        return -y


@pytest.mark.parametrize("is_loose", [False, True])
@pytest.mark.parametrize("method", [tm.Naive(), *REPLAYS], ids=repr)
def test_buffers_that_f_changes_late_are_not_changed_by_the_backward_pass(method, is_loose):
    f, y0 = Late(), torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    f.norm.double()
    # m is replaced, and f's dict has no place that is watched.
    held = {name: x.clone() for name, x in f.named_buffers() if name != "m"}
    func = (lambda t, y: functional_call(f, held, (t, y))) if is_loose else f
    y = tm.solve(func, y0, (0.0, 1.0), controller=FIXED, gradient=method).y
    now = held if is_loose else dict(f.named_buffers())
    before = copy.deepcopy(now)
    assert now["n"] == now["norm.num_batches_tracked"] == 5
    y.sum().backward()
    now = held if is_loose else dict(f.named_buffers())
    assert all(torch.equal(now[name], x) for name, x in before.items())


def test_an_f_that_reads_what_it_changes_late_is_named():
    f, y0 = Late(), torch.ones(5, 3, requires_grad=True)
    y = tm.solve(lambda t, y: f(t, y) * (1 + f.n), y0, (0.0, 1.0), controller=FIXED, gradient=tm.ACA()).y
    n = f.n.clone()
    with pytest.raises(tm.NonRepeatableFieldError, match="n of Late"):
        y.sum().backward()
    assert torch.equal(f.n, n)
