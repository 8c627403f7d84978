"""Solves inside models that torch.compile compiles as one graph: right gradients, and nothing is out of date."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported

import torchmali as tm
from torchmali._torch import CAN_COMPILE
from torchmali.compiled import sites

# Both of torch.compile's own.
pytestmark = [
    pytest.mark.skipif(not CAN_COMPILE, reason="needs private parts of torch"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]
STEPS = tm.FixedStep(0.25)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Field(nn.Module):
    last: nn.Module

    def __init__(self):
        super().__init__()
        self.first, self.last, self.rate = nn.Linear(3, 4), nn.Linear(4, 3), 1.0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.rate * self.last(self.first(y).tanh())


class Model(nn.Module):
    """A layer, something that is solved, and another layer."""

    before: nn.Module
    after: nn.Module

    def __init__(self, **how):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.field, self.after = nn.Linear(3, 3), Field(), nn.Linear(3, 3)
        self.block = self.block_of(self.field, **how)
        self.double()

    @staticmethod
    def block_of(func: Callable, **how) -> tm.nn.ODEBlock:
        return tm.nn.ODEBlock(func, **{"controller": STEPS, **how})

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.solved(self.before(x)))

    def solved(self, y: Tensor) -> Tensor:
        return self.block(y)

    def slope(self, t: Tensor, y: Tensor) -> Tensor:
        return self.field(t, y)


class WithMethod(Model):
    def solved(self, y: Tensor) -> Tensor:
        how = {"method": "alf", "gradient": "mali", "options": {"step_size": 0.25}}
        return tm.odeint(self.slope, y, [0.0, 0.4, 1.0], **how).sum(0)


class WithOdeint(Model):
    def solved(self, y: Tensor) -> Tensor:
        return tm.odeint(self.field, y, torch.tensor([0.0, 1.0]), rtol=1e-4, atol=1e-4)[-1]


class WithAdjoint(Model):
    def solved(self, y: Tensor) -> Tensor:
        return tm.odeint_adjoint(self.field, y, torch.tensor([0.0, 1.0]), rtol=1e-4, atol=1e-4)[-1]


class WithSolve(Model):
    def solved(self, y: Tensor) -> Tensor:
        return tm.solve(self.field, y, (0.0, 1.0), controller=STEPS).y[-1]


class WithPlainFunction(Model):
    def solved(self, y: Tensor) -> Tensor:
        weight = self.field.first.weight
        return tm.solve(pulled, y, (0.0, 1.0), controller=STEPS, args=({"w": weight},)).y[-1]


def pulled(t: Tensor, y: Tensor, args: dict[str, Tensor]) -> Tensor:
    return -y * args["w"].square().sum(0)


class WithFlow(Model):
    def __init__(self):
        super().__init__()
        self.flow = tm.nn.CNF(self.field, controller=STEPS, kinetic=True).double()

    def solved(self, y: Tensor) -> Tensor:
        density = self.flow.log_prob(y).unsqueeze(1)
        return density + self.flow.inverse(y) + self.flow(y, noise=torch.ones_like(y)).kinetic.unsqueeze(1)


class WithPath(Model):
    def __init__(self):
        super().__init__()
        self.cde = tm.nn.NeuralCDE(lambda t, z: z.unsqueeze(-1) * 0.3, nn.Linear(1, 3), controller=STEPS).double()

    def solved(self, y: Tensor) -> Tensor:
        return self.cde(y.unsqueeze(-1).cumsum(1).repeat(1, 1, 4))


class WithCell(Model):
    def __init__(self):
        super().__init__()
        self.cell = tm.nn.ODERNNCell(self.field, nn.GRUCell(3, 3)).double()

    def solved(self, y: Tensor) -> Tensor:
        return self.cell(y, y, 0.0, 0.5)


class Twice(Model):
    """The same solve twice, and others on it; results are changed in place. There is much memory to be used again."""

    def solved(self, y: Tensor) -> Tensor:
        y = (y * self.field.rate).sin()
        z = self.block(y) * self.block(y)
        w = (z + 1).cos()
        z = self.block(w)
        z = z * 2
        z += w
        return z * z.tanh()


class Nested(Model):
    def solved(self, y: Tensor) -> Tensor:
        out = NESTED({"u": y, "v": (y * 2,)}, self.before.bias)
        return out["u"] + out["v"][0]


def coupled(t: Tensor, y: dict, c: Tensor) -> dict:
    return {"u": -y["v"][0] * c, "v": (y["u"],)}


NESTED = tm.nn.ODEBlock(coupled, controller=STEPS)


def data(n: int = 4) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


def compiled(model: nn.Module, backend: str = "aot_eager", **how) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, fullgraph=True, backend=backend, **how)


def gradients(y: Tensor, model: nn.Module) -> list[Tensor]:
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(wanted, torch.autograd.grad(y.square().sum(), wanted, allow_unused=True), strict=True)
    ]


def assert_same(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
    """The same value and gradients as without torch.compile."""
    torch.manual_seed(1)
    wanted = model(x)
    torch.manual_seed(1)
    found = run(x)
    assert (found - wanted).norm() <= 1e-12 * wanted.norm()
    for g, h in zip(gradients(found, model), gradients(wanted, model), strict=True):
        assert (g - h).norm() <= 1e-12 * h.norm()


MODELS = {
    "block": Model,
    "all outputs, learned times": lambda: AllOutputs(t=nn.Parameter(torch.tensor([0.0, 0.4, 1.0]))),
    "naive": lambda: Model(gradient=tm.Naive(), solver=tm.RK4()),
    "adaptive": lambda: Model(controller=tm.AdaptiveStep(1e-3, 1e-4)),
    "method": WithMethod,
    "odeint": WithOdeint,
    "adjoint": WithAdjoint,
    "solve": WithSolve,
    "plain function": WithPlainFunction,
    "flow": WithFlow,
    "path": WithPath,
    "cell": WithCell,
    "twice": Twice,
    "nested": Nested,
}


class AllOutputs(Model):
    def __init__(self, t: nn.Parameter):
        super().__init__(t=t, all_outputs=True)

    def solved(self, y: Tensor) -> Tensor:
        return self.block(y).sum(0)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_a_solve_is_one_graph_with_the_gradients_of_the_eager_model(name: str):
    model = MODELS[name]()
    assert_same(compiled(model), model, data())


@pytest.mark.parametrize("gradient", [tm.Adjoint(), tm.MALI(), tm.Naive()], ids=lambda x: type(x).__name__)
def test_the_graph_may_write_to_its_memory_when_the_solve_is_done(gradient):
    model = Model(gradient=gradient)
    model.before = model.after = nn.Identity()
    run, x = compiled(model, "eager"), data().requires_grad_()
    found, wanted = run(x), model(x)
    found.data.fill_(torch.nan)
    wanted = torch.autograd.grad(wanted.sum(), list(model.parameters()))
    x.data.fill_(torch.nan)
    found = torch.autograd.grad(found.sum(), list(model.parameters()))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [tm.Adjoint(), tm.MALI()], ids=["adjoint", "mali"])
def test_memory_that_inductor_uses_again_is_not_that_of_the_solve(gradient):
    """Without copies of the results, gradients of Adjoint are wrong by up to 160 % here, silently."""
    model = Twice(gradient=gradient)
    assert_same(torch.compile(model, fullgraph=True), model, data())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_solve_in_a_compiled_model(backend: str):
    model = Twice(compile=True)
    run = compiled(model, backend)
    assert_same(run, model, data())
    assert_same(run, model, 0.5 * data())


def test_other_values_and_other_parameters_run_in_the_same_graph():
    model = Model()
    run = compiled(model)
    assert_same(run, model, data())
    with warnings.catch_warnings(), torch.compiler.set_stance("fail_on_recompile"):
        warnings.simplefilter("error")
        assert_same(run, model, 2 * data())
        model.field.first.weight = nn.Parameter(0.5 * model.field.first.weight.detach())
        assert_same(run, model, data())
        model.load_state_dict({name: 0.9 * x for name, x in model.state_dict().items()})
        assert_same(run, model, data())
        for p in model.parameters():
            p.data = 1.1 * p.data
        assert_same(run, model, data())
        model.field.rate = 0.3  # f itself runs, not a trace of it
        assert_same(run, model, data())


def test_sizes_of_the_batch_and_times_may_change():
    class Timed(Model):
        def forward(self, x: Tensor, t: float = 0.4) -> Tensor:
            return self.block(self.before(x), t=(0.0, t))

    model = Timed()
    run = compiled(model)
    for n in (4, 5, 7):
        assert_same(run, model, data(n))
    for t in (0.5, 0.6, 0.7, 1.3):
        assert torch.equal(run(data(), t), model(data(), t))  # pyright: ignore


def test_a_frozen_parameter_gets_no_gradient_and_the_others_theirs():
    model = Model()
    run = compiled(model)
    assert_same(run, model, data())
    model.field.first.weight.requires_grad_(False)
    assert_same(run, model, data())
    model.field.requires_grad_(False)
    assert_same(run, model, data())
    x = data().requires_grad_()
    (g,) = torch.autograd.grad(run(x).sum(), x)
    assert torch.equal(g, torch.autograd.grad(model(x).sum(), x)[0])


def test_two_passes_may_be_followed_back_in_any_order():
    model = Model()
    run, twin = compiled(model), copy.deepcopy(model)
    first, second = run(data()), run(2 * data())
    for found, x in ((first, data()), (second, 2 * data())):
        for g, h in zip(gradients(found, model), gradients(twin(x), twin), strict=True):
            assert torch.equal(g, h)


def test_nothing_is_kept_longer_than_the_graph_needs_it():
    model = Model()
    run = compiled(model)
    with torch.no_grad():
        assert torch.equal(run(data()), model(data()))
    y = run(data())
    gc.collect()
    assert len(sites._KEPT) == 1
    del y
    gc.collect()
    assert len(sites._KEPT) == 0
    number = max(sites.SITES)
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert number not in sites.SITES


def test_another_module_of_the_same_class_is_another_solve():
    first, second = Model(), Model()
    second.field.rate = 0.5

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    run = torch.compile(call, fullgraph=True, backend="aot_eager")
    for model in (first, second):
        assert_same(lambda x, model=model: run(model, x), model, data())


def test_parameters_and_buffers_that_the_graph_has_changed_reach_f():
    class Scaled(Model):
        scale: Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(3, dtype=torch.float64))
            self.block = self.block_of(self.slope)

        def slope(self, t: Tensor, y: Tensor) -> Tensor:
            return self.scale * self.field(t, y)

        def solved(self, y: Tensor) -> Tensor:
            with torch.no_grad():
                self.scale.mul_(0.9)
                self.field.first.weight.mul_(0.9)
            return self.block(y)

    model, twin = Scaled(), Scaled()
    run = compiled(model)
    for _ in range(2):
        found, wanted = run(data()), twin(data())
        assert torch.equal(found, wanted) and torch.equal(model.scale, twin.scale)
        for g, h in zip(gradients(found, model), gradients(wanted, twin), strict=True):
            assert torch.equal(g, h)


def test_hooks_on_parameters_are_called_once():
    model, calls = Model(), []
    weight = model.field.first.weight
    weight.register_hook(lambda g: [calls.append(1), 2 * g][1])
    run = compiled(model)
    assert_same(run, model, data())
    assert len(calls) == 2  # one for each of the two models


def test_autocast_and_modes_are_those_of_the_call():
    class Low(Model):
        def solved(self, y: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.block(y)

    model = Low().float()
    x = data().float()
    assert torch.equal(compiled(model)(x), model(x))
    assert not torch.equal(Model().float()(x), model(x))
    model = Model()
    model.field.last = nn.Sequential(nn.Dropout(0.5), model.field.last)
    run = compiled(model)
    assert_same(run, model, data())
    model.eval()
    assert_same(run, model, data())
    with torch.inference_mode():
        assert torch.equal(run(data()), model(data()))


# ---- What cannot be in one graph


class ChangesAttribute(Model):
    def solved(self, y: Tensor) -> Tensor:
        self.field.rate = 0.5
        return self.block(y)


class MakesController(Model):
    def solved(self, y: Tensor) -> Tensor:
        return tm.solve(self.field, y, (0.0, 1.0), controller=tm.FixedStep(0.25)).y[-1]


class HoldsTensor(Model):
    def __init__(self):
        super().__init__()
        scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.block = self.block_of(lambda t, y: scale * self.field(t, y))


class Normalises(Model):
    def __init__(self):
        super().__init__()
        self.field.last = nn.Sequential(nn.BatchNorm1d(4), self.field.last).double()


class ReadsStats(Model):
    def solved(self, y: Tensor) -> Tensor:
        y = self.block(y)
        assert self.block.last_stats is not None
        return y * self.block.last_stats.n_steps


class Observes(Model):
    def solved(self, y: Tensor) -> Tensor:
        return tm.solve(self.field, y, (0.0, 1.0), controller=STEPS, jumps=(0.5,)).y[-1]


REFUSED = {
    ChangesAttribute: "changes an attribute",
    MakesController: "FixedStep is made in the forward pass",
    HoldsTensor: "no parameter or buffer",
    Normalises: "BatchNorm1d in f changes its running statistics",
    ReadsStats: "last_stats are known when the graph has run",
    Observes: "solve has the options",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_in_the_graph_is_an_error_if_there_must_be_one_graph(kind: type[Model]):
    with pytest.raises(Unsupported, match=REFUSED[kind]):
        compiled(kind())(data())


@pytest.mark.parametrize(
    "kind", [HoldsTensor, *[pytest.param(x, marks=pytest.mark.slow) for x in REFUSED if x is not HoldsTensor]]
)
def test_what_cannot_be_in_the_graph_is_a_break_between_two(kind: type[Model]):
    model, twin = kind(), kind()
    run = torch.compile(model, backend="aot_eager")
    for x in (data(), 2 * data()):
        found, wanted = run(x), twin(x)
        assert torch.equal(found, wanted)
        for g, h in zip(gradients(found, model), gradients(wanted, twin), strict=True):
            assert (g - h).norm() <= 1e-12 * h.norm()


class Counts(Model):
    n: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(1))
        self.block = self.block_of(self.slope)

    def slope(self, t: Tensor, y: Tensor) -> Tensor:
        self.n += 1
        return self.field(t, y)


def test_an_f_that_changes_a_buffer_is_told_of_and_a_break_from_then_on():
    model, twin = Counts(), Counts()
    run = torch.compile(model, backend="aot_eager")
    with pytest.warns(tm.SolverWarning, match="changes a buffer in place"):
        y = run(data())
    assert torch.equal(y, twin(data())) and torch.equal(model.n, twin.n)
    assert torch.equal(run(data()), twin(data())) and torch.equal(model.n, twin.n)
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="changes a buffer in place"):
        compiled(model)(data())

    class ChangedBefore(Counts):
        def solved(self, y: Tensor) -> Tensor:
            self.n.mul_(2)
            return self.block(y)

    with pytest.raises(tm.IncompatibleError, match="which the graph of torch.compile has made"):
        compiled(ChangedBefore())(data())


def test_second_derivatives_are_refused():
    model = Model()
    y = compiled(model, "eager")(data())
    grads = torch.autograd.grad(y.sum(), list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        grads[0].sum().backward()


def test_the_compiler_is_not_imported_before_it_is_needed():
    """It takes longer than all the rest of torch."""
    code = "import sys, torchmali; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class Decay(nn.Module):
    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return -y


class Doubled(nn.Module):
    """Twice the end of a solve by `odeint`."""

    def __init__(self):
        super().__init__()
        self.f = Decay()

    def forward(self, y: Tensor) -> Tensor:
        return 2 * tm.odeint(self.f, y, [0.0, 1.0], method="rk4", options={"step_size": 0.25})[-1]


def test_a_state_of_low_precision_is_a_break_between_two_graphs():
    model, y0 = Doubled(), torch.ones(3, dtype=torch.bfloat16)
    found = torch.compile(model, backend="eager")(y0)
    assert found.dtype == torch.bfloat16 and torch.equal(found, model(y0))
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="low precision"):
        torch.compile(model, backend="eager", fullgraph=True)(y0)
