"""Private APIs of torch are used in torchmali/_torch.py alone, and each has a public way that does the same."""

import ast
import functools
import importlib.util
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

import torchmali
import torchmali._torch as private
from torchmali.field.environment import _overlaps_itself
from torchmali.measure import LiveBytes

CORE = Path(torchmali.__file__).parent
SOURCES = [path for path in sorted(CORE.rglob("*.py")) if path.name != "_torch.py"]
ALSO_OURS = {"_size"}  # of a state, whose class is not torch's
NAMES_OF_PYTHON = {"_replace", "_make", "_fields", "_asdict", "_getframe", "_repr_html_"}
# Names of torch's that the owners below do not show, or not in every version (torch 2.10 does not have the last one).
NOT_LISTED = {"_is_replica", "_orig_mod", "_should_skip_dynamo"}
OF_TORCH = [
    torch, Tensor, nn.Module(), nn, torch.UntypedStorage, torch.ops.aten.add.Tensor, torch.autograd, forward_ad,
    torch.utils, _python_dispatch.TorchDispatchMode, torch.Generator, torch._C,
]  # fmt: skip
aten = torch.ops.aten


def load(name: str = "loaded") -> ModuleType:
    """_torch.py once more, beside the one in use."""
    spec = importlib.util.spec_from_file_location(name, private.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def public(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("TORCHMALI_PUBLIC_TORCH", "1")
    return load()


# ---- Where private names are


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


@functools.cache
def private_names_of_torch() -> set[str]:
    return {name for owner in OF_TORCH for name in dir(owner) if is_private(name)} | NOT_LISTED


@functools.cache
def own_names() -> set[str]:
    """Private names that torchmali gives itself."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
                found.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in found if is_private(name)} - private_names_of_torch()


def private_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines with names that are, or may be, private ones of torch."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".") if "torchmali" not in alias.name]
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(("torchmali", "__future__")):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ClassDef):  # a method may override torch's
            methods = [x.name for x in node.body if isinstance(x, ast.FunctionDef)]
            names = [name for name in methods if name in private_names_of_torch()]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            names = [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
        for name in names:
            if is_private(name) and name not in own_names() | NAMES_OF_PYTHON | ALSO_OURS:
                yield getattr(node, "lineno", 0), name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: ".".join(path.relative_to(CORE).with_suffix("").parts))
def test_private_names_of_torch_are_in_one_file(path: Path):
    assert list(private_uses(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "torch._foreach_add(x, y)", "x._version", "import torch.utils._pytree as pytree", "from torch import _C",
        "from torch.utils._pytree import tree_map", "from torch.utils import _pytree", "op._schema.arguments",
        "getattr(x, '_is_replica', False)", "module._parameters[name] = x",
        "class A(Mode):\n  def _should_skip_dynamo(cls): pass",
    ],
)  # fmt: skip
def test_private_names_are_seen(code: str):
    assert list(private_uses(ast.parse(code)))


def test_private_names_are_seen_in_the_one_file():
    assert {name for _, name in private_uses(ast.parse(Path(private.__file__).read_text()))} > {"_pytree", "_op_dk"}


# ---- The choice


def test_torch_has_all_private_names():
    """Else torchmali works, but is slower or sees less: time to look at what torch has instead."""
    assert private.foreach_add is torch._foreach_add
    assert private.run_backward == torch.autograd.Variable._execution_engine.run_backward
    assert private.is_wrapped is is_functorch_wrapped_tensor
    assert private._has_stack and private._has_kernels
    x = torch.ones(2)
    assert private.n_changes(x) == 0 and private.n_changes(x.add_(1)) == 1
    assert private.lend_parameter is private._lend_in_dict and private.put_buffer is private._put_in_dict
    assert private.storage_key is not id and private.hooks_of is not private._unknown


FOREACH = [name.removeprefix("_") for name in dir(torch) if hasattr(private, name.removeprefix("_"))]
FOREACH = [name for name in FOREACH if name.startswith("foreach_")]


@pytest.mark.parametrize("name", FOREACH)
def test_a_missing_name_is_replaced(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch, f"_{name}")
    there = load()
    assert getattr(there, name).__qualname__ == "_each.<locals>.loop"
    assert sum(getattr(there, other) is not getattr(private, other) for other in FOREACH) == 1


@pytest.mark.parametrize("name", private._STACK)
def test_a_missing_function_for_modes_replaces_all_of_them(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(_python_dispatch, name)
    assert not load()._has_stack


# ---- Each public way beside the private one


def test_all_operations_on_lists_are_compared():
    assert len(FOREACH) == 13 and set(FOREACH) == set(OPERANDS)


OPERANDS = {
    "foreach_abs": ((), {}),
    "foreach_add": (("list",), {"alpha": 0.3}),
    "foreach_add_": (("list",), {"alpha": 0.3}),
    "foreach_div": (("list",), {}),
    "foreach_lerp": (("list", 0.7), {}),
    "foreach_lerp_": (("list", 0.7), {}),
    "foreach_maximum": (("list",), {}),
    "foreach_mul": ((0.3,), {}),
    "foreach_mul_": ((0.3,), {}),
    "foreach_neg_": ((), {}),
    "foreach_norm": ((), {}),
    "foreach_sub": (("list",), {}),
    "foreach_zero_": ((), {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FOREACH)
def test_operations_on_lists(name: str, dtype: torch.dtype, public: ModuleType):
    operands, options = OPERANDS[name]
    leaves = [torch.randn(shape, dtype=dtype) for shape in [(3, 5), (7,), ()]]
    others = [torch.randn_like(x) for x in leaves]
    results = []
    for module in (private, public):
        x = tuple(leaf.clone() for leaf in leaves)
        out = getattr(module, name)(x, *(others if y == "list" else y for y in operands), **options)
        results.append(x if name.endswith("_") else out)
    assert all(map(torch.equal, *results)) and len(results[0]) == 3


def test_a_number_is_added_to_each(public: ModuleType):
    leaves = [torch.randn(3), torch.randn(2)]
    assert all(map(torch.equal, private.foreach_add(leaves, 0.1), public.foreach_add(leaves, 0.1)))


def test_a_gap_is_a_type_error_before_anything_is_changed(public: ModuleType):
    for module in (private, public):
        x, y = [torch.zeros(2), torch.zeros(2)], [torch.ones(2), None]
        with pytest.raises(TypeError):
            module.foreach_add_(x, y, alpha=1.0)
        with pytest.raises(TypeError):
            module.foreach_add_([x[0], None], [y[0], y[0]], alpha=1.0)
        assert x[0].eq(0).all()


def test_vector_jacobian_products(public: ModuleType):
    x, unused = torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)
    found = []
    for module in (private, public):
        ends = (x.sin(), x.square().sum())
        starts = (torch.ones(3), torch.tensor(2.0))
        found.append(module.run_backward(ends, starts, False, False, (x, unused), True, accumulate_grad=False))
        with pytest.raises(RuntimeError) as error:
            module.run_backward(ends, starts, False, False, (x, unused), True, accumulate_grad=False)
        assert module.is_of_freed_graph(error.value) and not module.lacks_graph(error.value)
        with pytest.raises(RuntimeError) as error:
            module.run_backward((torch.ones(3),), (torch.ones(3),), False, False, (x,), True, accumulate_grad=False)
        assert module.lacks_graph(error.value) and not module.is_of_freed_graph(error.value)
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] is found[1][1] is None
    assert x.grad is None


def test_the_text_of_errors_is_torchs():
    """As f meets them: it may call torch.autograd.grad itself."""
    y = torch.ones(3)
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(y.sum(), y)
    assert private.lacks_graph(error.value)
    x = y.clone().requires_grad_()
    with pytest.raises(RuntimeError) as error:
        torch.autograd.grad(x.sum(), y)
    assert private.lacks_graph(error.value)


def test_casts_of_weights_that_autocast_keeps(public: ModuleType, monkeypatch: pytest.MonkeyPatch):
    net, y0 = nn.Linear(3, 3), torch.ones(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            net(y0)
        assert net(y0).requires_grad == private.casts_have_graphs
    assert not public.casts_have_graphs
    found = []
    for has in (private.casts_have_graphs, False):
        monkeypatch.setattr("torchmali.field.environment.casts_have_graphs", has)
        # The adjoint evaluates f in its backward pass without a graph first, and then with one.
        with torch.autocast("cpu", torch.bfloat16):
            y = torchmali.solve(lambda t, y: net(y).tanh(), y0, (0.0, 1.0), gradient=torchmali.Adjoint()).y
        found.append(torch.autograd.grad(y[-1].sum(), net.weight)[0])
    assert found[0].any() and torch.equal(*found)


def test_changes_and_hooks_are_unknown_in_public(public: ModuleType):
    x = torch.ones(2, requires_grad=True)
    assert not private.hooks_of(x)
    x.register_hook(lambda g: g)
    hooks = private.hooks_of(x)
    assert hooks is not None and len(hooks) == 1
    assert public.hooks_of(x) is public.n_changes(x) is None


def test_tensors_within_torch_func(public: ModuleType):
    def look(x: Tensor) -> Tensor:
        seen.append((private.is_wrapped(x), public.is_wrapped(x)))
        return x.sum()

    seen: list[tuple[bool, bool]] = []
    x = torch.randn(2, 3)
    for plain in (x, nn.Parameter(x), torch.empty(0), x[:, 1], x.expand(4, 2, 3), torch.empty(2, device="meta")):
        look(plain)
    with torch.inference_mode():
        look(torch.ones(2))
    n_plain = len(seen)
    torch.func.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.func.functionalize(look)(x)
    assert seen == [(False, False)] * n_plain + [(True, True)] * 4


def test_storages(public: ModuleType, monkeypatch: pytest.MonkeyPatch):
    def run() -> int:
        with LiveBytes() as live:
            x = torch.randn(1000)
            for _ in range(5):
                x = x.view(10, 100).sin().flatten()
            y = [torch.randn(10) for _ in range(20)]
            del y
        return live.peak

    peak = run()
    monkeypatch.setattr("torchmali.measure.storage_key", public.storage_key)
    assert public.storage_key is id and run() == peak > 0


def test_tensors_that_overlap_themselves():
    x = torch.zeros(3, 4)
    for y in (x, x.T, x[:, :1], x[:, 1], x[:1].expand(5, 4), x[0, 0].expand(2), x[:1].expand(1, 4), torch.zeros(())):
        assert _overlaps_itself(y) == (torch._debug_has_internal_overlap(y) == 1)


def test_parameters_and_buffers_of_a_module(public: ModuleType):
    module = nn.BatchNorm1d(3)
    module.twin = module.weight
    module.inner = nn.Linear(2, 2)
    for name in ("parameters_of", "buffers_of"):
        mine, theirs = getattr(private, name)(module), getattr(public, name)(module)
        assert list(mine) == list(theirs) and all(mine[key] is theirs[key] for key in mine)
    assert not private.buffers_of(module.inner) and not public.buffers_of(module.inner)


def test_parameters_are_lent(public: ModuleType):
    x = torch.randn(4, 2)
    for lend in (private.lend_parameter, public.lend_parameter):
        module = nn.Linear(2, 2)
        names, weight, before = [name for name, _ in module.named_parameters()], module.weight, module(x)
        first, second = torch.zeros(2, 2), torch.ones(2, 2)
        undo = lend(module, "weight", first)
        undo_second = lend(module, "weight", second)  # a backward pass within a backward pass
        assert module.weight is second and torch.equal(module(x), x @ second + module.bias)
        undo_second()
        assert module.weight is first
        undo()
        assert module.weight is weight and torch.equal(module(x), before)
        assert [name for name, _ in module.named_parameters()] == names


def test_buffers_are_put_in_place(public: ModuleType):
    for module in (private, public):
        norm = nn.BatchNorm1d(3)
        names, before, mean = list(norm.state_dict()), dict(norm.named_buffers()), torch.ones(3)
        module.put_buffer(norm, "running_mean", mean)
        assert norm.running_mean is mean and list(norm.state_dict()) == names
        module.put_buffer(norm, "running_mean", None)
        assert norm.running_mean is None
        module.put_buffers(norm, before)
        assert dict(norm.named_buffers()) == before and list(norm.state_dict()) == names


def test_modes(public: ModuleType):
    for module in (private, public):

        class Seen(module.Mode):
            def __init__(self):
                self.seen: list[str] = []

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.seen.append(func.name())
                if func is not aten.mul.Tensor:
                    return func(*args, **(kwargs or {}))
                with self:  # what it is made of is seen, too
                    return args[0].add(1)

        outer, inner = Seen(), Seen()
        elsewhere: list[object] = []
        assert module.dispatch_modes() == []
        with outer:
            with inner:
                assert module.dispatch_modes() == [outer, inner]
                torch.mul(torch.ones(2), 3)
                thread = threading.Thread(target=lambda: elsewhere.extend(module.dispatch_modes()))  # noqa: B023
                thread.start()
                thread.join()
            assert module.dispatch_modes() == [outer]
            with pytest.raises(ZeroDivisionError), inner:
                raise ZeroDivisionError
            assert module.dispatch_modes() == [outer]
        assert module.dispatch_modes() == elsewhere == []
        assert inner.seen == ["aten::ones", "aten::mul.Tensor", "aten::add.Tensor"]
        assert outer.seen == ["aten::ones", "aten::add.Tensor"]


def test_operations_made_of_others(public: ModuleType):
    for op in (aten.dropout.default, aten.alpha_dropout.default, aten.dropout_.default, aten.alpha_dropout_.default):
        torch.manual_seed(0)
        x = private.run_parts(op, (torch.ones(50), 0.5, True), {})
        torch.manual_seed(0)
        y = public.run_parts(op, (torch.ones(50), 0.5, True), {})
        assert len(x.unique()) == len(y.unique()) == 2 and torch.equal(x, y)
    names = [name.partition(".") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    ops = [getattr(getattr(aten, name[6:], None), overload or "default", None) for name, _, overload in names]
    random = [op for op in ops if op is not None and torch.Tag.nondeterministic_seeded in op.tags]
    random = [op for op in random if "generator" not in [x.name for x in private.schema_of(op).arguments]]
    differ = {op.name().partition(".")[0] for op in random if private.is_composite(op) != public.is_composite(op)}
    # The first ones are refused if they have dropout, the last one has an overload with a generator.
    assert differ == {"aten::gru", "aten::lstm", "aten::rnn_relu", "aten::rnn_tanh", "aten::randn"}
    assert sum(map(public.is_composite, random)) == 10


# ---- Compilation


def test_compilation_has_no_public_way(public: ModuleType):
    assert private.CAN_COMPILE and not public.CAN_COMPILE


def test_a_function_is_traced_and_made_machine_code_of():
    def run(i: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        def condition(i: Tensor, *_: Tensor) -> Tensor:
            return i < 5

        return private.while_loop(condition, lambda i, x, y: (i + 1, x * y), (i, x), (y,))

    examples = [torch.zeros((), dtype=torch.int64), torch.zeros(3), torch.zeros(3)]
    graph = private.traced(run, examples, {aten.mul.Tensor: lambda x, y: torch.add(x, y)})
    inputs = torch.tensor(2), torch.ones(3), torch.tensor([1.0, 2.0, 3.0])
    for code in (graph, private.lowered(graph, examples)):
        i, x = code(*inputs)
        assert i == 5 and torch.equal(x, torch.tensor([4.0, 7.0, 10.0]))  # 3 rounds, of sums in place of products
    assert not private.is_traced(x)


def test_looks_at_values_are_told_from_other_errors():
    for function, is_look in (
        (lambda x: x if x > 0 else -x, True),
        (lambda x: x * float(x), True),
        (lambda x: x @ x, False),
    ):
        with pytest.raises(Exception) as error:  # noqa: B017, PT011 (it is looked at)
            private.traced(function, [torch.zeros(())], {})
        assert private.depends_on_data(error.value) == is_look


def test_what_modules_do_beside_returning_something():
    norm, weights = nn.BatchNorm1d(3), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    assert private.changes_in_training(norm) and private.changes_in_training(nn.Dropout(0.1))
    assert not any(map(private.changes_in_training, (nn.Dropout(0.0), nn.Linear(2, 2), weights)))
    assert not private.hooks_of_module(weights) and not private.hooks_of_module(norm)
    norm.register_forward_hook(lambda *_: None)
    assert len(private.hooks_of_module(norm)) == 1
    assert not private.is_compiled(norm) and not private.is_compiled(len)


# ---- All at once

SOLVES = """
import sys, torch
from torch import nn
from torch.func import functional_call
import torchmali
from torchmali import ACA, ALF, MALI, AdaptiveStep, FixedStep, solve
from torchmali import _torch

class F(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 8), nn.Linear(8, 4), nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)

    def forward(self, t, y):
        return {"x": self.b(self.drop(self.norm(self.a(y["x"]).tanh()))), "s": y["s"].cos()}

assert _torch.PUBLIC == (sys.argv[1] == "public")
found = []
for gradient in (MALI(), MALI(exact=True), ACA()):
    for controller in (FixedStep(8), AdaptiveStep(rtol=1e-3, atol=1e-4)):
        for lends in (False, True):
            torch.manual_seed(0)
            f = F().double()
            y0 = {"x": torch.randn(5, 4, dtype=torch.float64, requires_grad=True), "s": torch.ones(3).double()}
            lent = {name: (2 * p).detach().requires_grad_() for name, p in f.named_parameters()}
            g = (lambda t, y: functional_call(f, lent, (t, y))) if lends else f
            params = list((lent if lends else dict(f.named_parameters())).values())
            out = solve(g, y0, (0.0, 1.0), solver=ALF(), controller=controller, gradient=gradient, params=params)
            loss = out.y["x"].square().sum() + out.y["s"].sum()
            found += [loss.detach(), *torch.autograd.grad(loss, [y0["x"], *params]), *f.buffers()]
torch.save([x.detach() for x in found], sys.argv[2])
"""


def test_gradients_with_all_public_ways_at_once(tmp_path: Path):
    found = []
    for way in ("private", "public"):
        environment = {**os.environ, "TORCHMALI_PUBLIC_TORCH": "1" if way == "public" else ""}
        environment["PYTHONPATH"] = os.pathsep.join([str(CORE.parent), environment.get("PYTHONPATH", "")])
        target = tmp_path / f"{way}.pt"
        subprocess.run([sys.executable, "-c", SOLVES, way, str(target)], check=True, env=environment)
        found.append(torch.load(target))
    assert len(found[0]) == len(found[1]) > 50
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
