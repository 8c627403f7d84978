"""Random numbers of f: repeated throughout a solve, taken from nowhere else, and left alone elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.checkpoint import checkpoint

import torchmali as tm
from torchmali.field.evaluate import Field
from torchmali.field.randomness import (
    HARMLESS,
    Draws,
    First,
    Redirected,
    Refused,
    Source,
    decompose,
    drop_out,
    fill_like,
    refuse,
    refuse_dropout,
    rule_of,
)
from torchmali.tree import Structure

FIXED = tm.FixedStep(0.1)
METHODS = [tm.ACA(), tm.MALI(), tm.MALI(exact=True), tm.MALI(checkpoint_every=3)]
aten = torch.ops.aten


def tagged() -> list[Any]:
    """All random operations of this version of PyTorch."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        name, _, overload = name.partition(".")
        op = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
        if torch.Tag.nondeterministic_seeded in op.tags:
            found.append(op)
    return found


def redirected(seed: int = 0) -> Redirected:
    return Redirected(Draws(Source(torch.Generator().manual_seed(seed))))


def test_every_random_operation_has_a_rule():
    """It is redirected, or harmless, or refused: what would be refused is listed here, and can be read in limits.md."""
    refused, fused = [], []
    for op in tagged():
        rule = rule_of(op)
        if op._schema.name in HARMLESS:
            assert rule is None
            continue
        assert rule is not None, op
        if rule is refuse:
            refused.append(op.name())
        elif rule is refuse_dropout:
            fused.append(op.name())
    # Inductor's own operations are there once something was compiled; they never reach the mode.
    assert [name for name in sorted(refused) if not name.startswith("prims::")] == ["aten::native_dropout.out"]
    kinds = ("attention", "rnn", "lstm", "_cudnn_init_dropout_state")
    assert all(any(kind in name for kind in kinds) for name in fused)
    assert rule_of(aten.dropout.default) is decompose
    assert rule_of(aten.native_dropout.default) is drop_out
    assert rule_of(aten.rand_like.default) is fill_like


X, GRU = torch.rand(6, 4) + 0.5, nn.GRU(4, 4, 2, dropout=0.5)
CALLS: dict[str, Callable[[], Any]] = {
    "rand": lambda: torch.rand(3),
    "rand out": lambda: torch.rand(3, out=torch.empty(3)),
    "randn": lambda: torch.randn(3),
    "randn out": lambda: torch.randn(3, out=torch.empty(3)),
    "randint": lambda: torch.randint(1000, (3,)),
    "randint low": lambda: torch.randint(-1000, 1000, (3,)),
    "randperm": lambda: torch.randperm(10),
    "rand_like": lambda: torch.rand_like(X),
    "randn_like": lambda: torch.randn_like(X),
    "randint_like": lambda: torch.randint_like(X, 1000),
    "randint_like low": lambda: torch.randint_like(X, -1000, 1000),
    "normal": lambda: torch.normal(X, X),
    "normal numbers": lambda: torch.normal(0.0, 1.0, (3,)),
    "normal_": lambda: torch.empty(3).normal_(),
    "uniform_": lambda: torch.empty(3).uniform_(),
    "random_": lambda: torch.empty(3, dtype=torch.int64).random_(),
    "exponential_": lambda: torch.empty(3).exponential_(),
    "cauchy_": lambda: torch.empty(3).cauchy_(),
    "log_normal_": lambda: torch.empty(3).log_normal_(),
    "geometric_": lambda: torch.empty(30).geometric_(0.1),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5)),
    "bernoulli_": lambda: torch.empty(64).bernoulli_(0.5),
    "bernoulli_ tensor": lambda: torch.empty(64).bernoulli_(torch.full((64,), 0.5)),
    "binomial": lambda: torch.binomial(torch.full((64,), 100.0), torch.full((64,), 0.5)),
    "poisson": lambda: torch.poisson(100 * X),
    "multinomial": lambda: torch.multinomial(torch.ones(100), 10),
    "gamma": lambda: torch._standard_gamma(X),
    "dirichlet": lambda: torch._sample_dirichlet(X),
    "dropout": lambda: F.dropout(X, 0.5),
    "dropout in place": lambda: F.dropout(X.clone(), 0.5, inplace=True),
    "dropout1d": lambda: F.dropout1d(X, 0.5),
    "alpha_dropout": lambda: F.alpha_dropout(X, 0.5, True),
    "feature_alpha_dropout": lambda: F.feature_alpha_dropout(X, 0.5, True),
    "native_dropout": lambda: torch.native_dropout(X, 0.5, True),
    "rrelu": lambda: F.rrelu(-X, training=True),
    "gumbel": lambda: F.gumbel_softmax(X),
    "attention": lambda: F.scaled_dot_product_attention(X[None], X[None], X[None], dropout_p=0.5),
    "rnn": lambda: GRU(X)[0],
    "distribution": lambda: torch.distributions.Dirichlet(X).rsample(),
    "vmap": lambda: vmap(lambda x: F.dropout(x, 0.5), randomness="different")(X),
}


def flat(out: Any) -> Tensor:
    parts = out if isinstance(out, tuple) else (out,)
    return torch.cat([x.detach().flatten().double() for x in parts])


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_random_operations_draw_from_the_given_generator(call, around):
    before = torch.get_rng_state()
    with around():
        values = []
        for seed in (0, 0, 1):
            mode = redirected(seed)
            with mode:
                values.append(flat(call()))
            assert mode.n_drawn > 0
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert torch.equal(torch.get_rng_state(), before)


def test_an_operation_that_is_given_a_generator_keeps_it():
    own, mode = torch.Generator().manual_seed(3), redirected()
    with mode:
        x = torch.rand(4, generator=own)
    assert torch.equal(x, torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert mode.n_drawn == 0


def test_dropout_that_drops_nothing_draws_nothing():
    mode = redirected()
    with mode, torch.inference_mode():
        F.dropout(X, 0.5, training=False)
        F.rrelu(X)
        F.scaled_dot_product_attention(X[None, None], X[None, None], X[None, None])
    assert mode.n_drawn == 0


def test_native_dropout_is_differentiated_by_its_mask():
    x = X.clone().requires_grad_()
    with redirected():
        y, mask = torch.native_dropout(x, 0.25, True)
    (g,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(y, x * mask / 0.75)
    torch.testing.assert_close(g, mask / 0.75)
    with redirected():
        assert torch.equal(torch.native_dropout(x, 1.0, True)[0], torch.zeros_like(x))
        assert torch.equal(torch.native_dropout(x, 0.5, False)[0], x)


def test_fused_kernels_with_dropout_are_refused_with_a_remedy():
    q = X[None, None]
    with redirected(), pytest.raises(tm.NonRepeatableFieldError, match="flash_attention_for_cpu.*SDPBackend.MATH"):
        aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)
    with redirected(), pytest.raises(tm.NonRepeatableFieldError, match="native_dropout.out.*another operation"):
        aten.native_dropout.out(X, 0.5, True, out0=torch.empty_like(X), out1=torch.empty_like(X, dtype=torch.bool))
    with redirected():
        aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0)


class Noisy(nn.Module):
    """Dropout and noise in f."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(F.dropout(self.first(y), 0.3)) * (1 + t)
        return self.last(x) + 0.1 * torch.randn_like(y)


def problem(kind: type[nn.Module] = Noisy) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return kind().double(), torch.randn(8, 4, dtype=torch.float64)


def gradient(f: Callable, y0: Tensor, by: Any, **how: Any) -> Tensor:
    y0 = y0.clone().requires_grad_()
    how = {"controller": FIXED, **how}
    y = tm.solve(f, y0, (0.0, 1.0), **how).y[-1]
    grads = torch.autograd.grad(y.square().sum(), [y0, *by])
    return torch.cat([y.detach().flatten(), *(g.flatten() for g in grads)])


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_numbers_come_from_the_generator_and_from_nowhere_else(method):
    f, y0 = problem()
    before = torch.get_rng_state()
    exact = gradient(f, y0, f.parameters(), gradient=tm.Naive(), generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(1)
    torch.testing.assert_close(gradient(f, y0, f.parameters(), gradient=method, generator=g), exact)
    assert torch.equal(torch.get_rng_state(), before)
    alone = torch.Generator().manual_seed(1)
    with Redirected(Draws(Source(alone, is_fresh=True))):
        f(torch.zeros(()), y0)
    assert torch.equal(g.get_state(), alone.get_state())  # where one evaluation leaves it
    other = gradient(f, y0, f.parameters(), gradient=method, generator=g)
    assert not torch.allclose(other, exact)


def test_numbers_do_not_depend_on_draws_elsewhere():
    f, y0 = problem()
    values = []
    for disturbs in (False, True):
        y0 = y0.detach().requires_grad_()
        torch.manual_seed(2)
        y = tm.solve(f, y0, (0.0, 1.0), controller=FIXED).y
        if disturbs:
            torch.rand(100)
            torch.manual_seed(7)
        values.append(torch.autograd.grad(y.sum(), y0)[0])
    assert torch.equal(*values)


@pytest.mark.parametrize("seeded", ["default", "given"])
@pytest.mark.parametrize("method", [tm.Naive(), *METHODS], ids=repr)
def test_f_and_the_observer_draw_different_numbers(method, seeded):
    """f draws some numbers, the observer others; both the same at all times."""
    drawn: dict[str, list[Tensor]] = {"f": [], "observe": []}

    def noise(where: str, y: Tensor) -> Tensor:
        drawn[where].append(torch.randn(3))
        return drawn[where][-1]

    def f(t: Tensor, y: Tensor) -> Tensor:
        return noise("f", y) - y

    y0 = torch.zeros(3, requires_grad=True)
    how = {"generator": torch.Generator().manual_seed(0)} if seeded == "given" else {}
    options: Any = {"controller": FIXED, "gradient": method, **how}
    solution = tm.solve(f, y0, [0.0, 0.5, 1.0], observe=lambda t, y: (noise("observe", y) * y).sum(), **options)
    solution.observed.backward()
    assert all(torch.equal(x, drawn[where][0]) for where in drawn for x in drawn[where])
    assert not torch.equal(drawn["f"][0], drawn["observe"][0])


@pytest.mark.parametrize("method", [tm.Naive(), *METHODS], ids=repr)
def test_a_solve_inside_f_is_repeated_too(method):
    inner, _ = problem()
    w = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)

    def f(t: Tensor, y: Tensor) -> Tensor:
        return w * tm.solve(inner, y, (0.0, 0.5), controller=tm.FixedStep(0.25), gradient=tm.ACA()).y[-1] - y

    y0 = torch.randn(2, 4, dtype=torch.float64)
    values = [
        gradient(f, y0, [w, *inner.parameters()], gradient=m, generator=torch.Generator().manual_seed(3))
        for m in (tm.Naive(), method)
    ]
    torch.testing.assert_close(*values)


def test_an_inner_f_that_draws_late_is_noticed():
    def inner(t: Tensor, y: Tensor) -> Tensor:
        return -y + (torch.rand(3) if t > 0.2 else 0.0)

    def f(t: Tensor, y: Tensor) -> Tensor:
        return tm.solve(inner, y + torch.rand(3), (0.0, 0.5), controller=tm.FixedStep(0.25)).y[-1]

    with pytest.raises(tm.NonRepeatableFieldError, match="some of its evaluations only"):
        tm.solve(f, torch.ones(3), (0.0, 1.0), controller=FIXED)


@pytest.mark.parametrize("method", [tm.Naive(), *METHODS, tm.Adjoint()], ids=repr)
def test_draws_in_later_evaluations_only_are_refused(method):
    y0 = torch.ones(3, requires_grad=True)
    for observe in (None, lambda t, y: y.sum()):
        with pytest.raises(tm.NonRepeatableFieldError, match="f draws random numbers in some of its evaluations only"):
            f = lambda t, y: -y + (torch.rand(3) if t > 0.5 else 0.0)  # noqa: E731
            tm.solve(f, y0, (0.0, 1.0), controller=FIXED, gradient=method, observe=observe)


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_an_f_that_draws_less_after_the_first_evaluation_is_repeated(method):
    def f(t: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(4, dtype=torch.float64) if t < 0.3 else 0.0
        return torch.sin(y) + noise + (torch.randn(9, dtype=torch.float64).sum() if 0.1 < t < 0.6 else 0.0)

    y0 = torch.ones(2, 4, dtype=torch.float64)
    values = [gradient(f, y0, [], gradient=m, generator=torch.Generator()) for m in (tm.Naive(), method)]
    torch.testing.assert_close(*values)


def test_draws_of_another_thread_are_not_taken_for_those_of_f():
    """Here f itself stands for the other thread: it draws from the default generator unseen by the mode."""
    calls = []

    def f(t: Tensor, y: Tensor) -> Tensor:
        calls.append(float(t))
        if len(calls) == 5:
            torch.manual_seed(len(calls))
        return -y

    norm = nn.BatchNorm1d(3)
    solution = tm.solve(lambda t, y: f(t, y) + 0 * norm(y), torch.rand(4, 3), (0.0, 1.0), controller=FIXED)
    assert len(calls) == 22  # the solve was repeated, and nothing else shows it
    assert norm.num_batches_tracked == 10
    assert solution.stats.n_evals_forward == 11


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a checkpoint with nothing to do
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", [tm.Naive(), tm.MALI()], ids=repr)
def test_random_numbers_in_a_checkpoint_inside_f_are_refused(method, reentrant):
    f, y0 = problem()

    def func(t: Tensor, y: Tensor) -> Any:
        return checkpoint(f, t, y, use_reentrant=reentrant)

    with pytest.raises(tm.NonRepeatableFieldError, match="torch.utils.checkpoint inside f"):
        gradient(func, y0, [], gradient=method)
    with torch.no_grad():
        tm.solve(func, y0, (0.0, 1.0), controller=FIXED, gradient=method)  # nothing will be called again
    if not reentrant:  # which torch.autograd.grad cannot differentiate
        gradient(func, y0, [], gradient=tm.Naive(), randomness="different")  # nothing is redirected


@pytest.mark.parametrize("method", [tm.Naive(), tm.MALI()], ids=repr)
def test_a_checkpoint_around_a_solve_is_fine(method):
    f, y0 = problem()

    def end(y0: Tensor) -> Tensor:
        return tm.solve(f, y0, (0.0, 1.0), controller=FIXED, gradient=method).y[-1]

    values = []
    for run in (end, lambda y0: checkpoint(end, y0, use_reentrant=False)):
        torch.manual_seed(4)
        values.append(torch.autograd.grad(run(y0.requires_grad_()).square().sum(), list(f.parameters()))[0])
    assert torch.equal(*values)


def test_different_numbers_at_each_evaluation_are_for_naive():
    f, y0 = problem()
    seen: list[Tensor] = []

    def func(t: Tensor, y: Tensor) -> Tensor:
        seen.append(torch.rand(()))
        return f(t, y)

    with pytest.raises(tm.IncompatibleError, match="gradient=Naive"):
        tm.solve(func, y0, (0.0, 1.0), controller=FIXED, randomness="different")
    with pytest.raises(tm.InvalidOptionError, match='"same".*"different"'):
        tm.solve(func, y0, (0.0, 1.0), controller=FIXED, randomness="fresh")
    with pytest.raises(tm.InvalidOptionError, match="torch.Generator"):
        tm.solve(func, y0, (0.0, 1.0), controller=FIXED, generator=3)  # type: ignore[arg-type]
    solver = tm.ALF(refresh="never")
    how: Any = {"solver": solver, "controller": FIXED, "gradient": tm.Naive(), "randomness": "different"}
    ends = []
    for generator in (None, torch.Generator().manual_seed(1)):
        for _ in range(2):
            seen.clear()
            torch.manual_seed(1)
            state = torch.get_rng_state()
            if generator is not None:
                generator.manual_seed(1)
            ends.append(tm.solve(func, y0, (0.0, 1.0), generator=generator, **how).y[-1])
            assert len(set(map(float, seen))) == 11
            assert torch.equal(torch.get_rng_state(), state) == (generator is not None)
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[2], ends[3])
    late = lambda t, y: -y + (torch.rand(4).double() if t > 0.5 else 0.0)  # noqa: E731
    tm.solve(late, y0, (0.0, 1.0), **how)  # no reason to refuse it


@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
@pytest.mark.parametrize("backend", ["inductor", "aot_eager", "eager"])
def test_a_compiled_f_draws_from_the_generator_too(backend):
    f, y0 = problem()
    torch._dynamo.reset()
    compiled: Any = torch.compile(f, backend=backend)
    before, values = torch.get_rng_state(), []
    for method in (tm.Naive(), tm.MALI(), tm.ACA()):
        g = torch.Generator().manual_seed(1)
        values.append(gradient(compiled, y0, f.parameters(), gradient=method, generator=g))
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(values[2], values[0])


@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
def test_a_compiled_f_that_draws_nothing_is_compiled_from_its_first_evaluation():
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled: Any = torch.compile(net, backend=backend)
    with torch.no_grad():
        tm.solve(lambda t, y: compiled(y), torch.rand(2, 4), (0.0, 1.0), controller=tm.FixedStep(1.0))
    assert len(graphs) == 1


def precision(f: Callable, y0: Tensor) -> tuple[float, float]:
    field = Field(f, (y0,), Structure.of(y0), (), [])
    before = field.precision
    field(0.0, (y0,))
    return before, field.precision


def test_the_precision_of_f_is_that_of_its_coarsest_operation():
    y0, lin = torch.ones(2, 3), nn.Linear(3, 3)
    eps, half = torch.finfo(torch.float32).eps, torch.finfo(torch.float16).eps
    assert precision(lambda t, y: lin(y), y0) == (eps, eps)
    assert precision(lambda t, y: lin(y.double().float()), y0) == (eps, eps)
    assert precision(lambda t, y: lin(y.half().float()), y0) == (eps, half)
    double = torch.finfo(torch.float64).eps
    assert precision(lambda t, y: -y.float().double(), y0.double()) == (double, eps)
    # Nothing is rounded by a constant in a precision of its own, nor by the time alone.
    assert precision(lambda t, y: torch.where(t > 0.5, 100.0, 0.0) * y, y0.double()) == (double, double)
    assert precision(lambda t, y: t.float().sin() * y, y0.double()) == (double, double)
    with torch.autocast("cpu", torch.bfloat16):
        assert precision(lambda t, y: lin(y), y0) == (eps, torch.finfo(torch.bfloat16).eps)


def test_the_mode_is_gone_after_an_error():
    def f(t: Tensor, y: Tensor) -> Tensor:
        torch.rand(2)
        raise KeyError("f")

    with pytest.raises(KeyError):
        tm.solve(f, torch.ones(3), (0.0, 1.0))
    assert torch._C._len_torch_dispatch_stack() == 0
    with pytest.raises(tm.NonRepeatableFieldError), Refused("f"):
        torch.rand(3)
    assert First(Draws(Source()), False, 1e-3).eps == 1e-3
