"""Imports of torchmali go in one direction."""

import ast
import re
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "torchmali"
LAYERS = [  # a module may import those named before it
    "_torch",
    "abstract",
    "copies",
    "compiled.recording",
    "compiled.faster",
    "errors",
    "tree",
    "solution",
    "measure",
    "state.vectors",
    "jumps",
    "state.base",
    "state.floats",
    "state.traced",
    "state.integers",
    "state.fixed_point",
    "tape",
    "field.arguments",
    "field.behaviour",
    "field.randomness",
    "field.environment",
    "field.graph",
    "field.hooks",
    "field.parameters",
    "field.evaluate",
    "field.recorder",
    "solvers.cotangent",
    "solvers.dense",
    "solvers.interpolation",
    "solvers.base",
    "solvers.leapfrog",
    "solvers.runge_kutta",
    "solvers.adams",
    "solvers.coupled",
    "controllers",
    "refresh",
    "events",
    "outputs.base",
    "outputs.stored",
    "outputs.dense",
    "outputs.observed",
    "outputs.per_sample",
    "outputs.observed_samples",
    "spans",
    "outputs.until_event",
    "loop.base",
    "loop.schedule",
    "compiled.table",
    "compiled.capture",
    "compiled.loops",
    "compiled.attempts",
    "compiled.leapfrog",
    "loop.floats",
    "loop.fixed_point",
    "integrate",
    "code",
    "gradients.base",
    "gradients.naive",
    "gradients.adjoint",
    "gradients.replay",
    "gradients.direct",
    "gradients.aca",
    "compiled.traits",
    "compiled.solve",
    "gradients.graphed",
    "gradients.mali",
    "compiled.sites",
    "compiled.in_graph",
    "solving",
    "torchdiffeq.callbacks",
    "torchdiffeq.controllers",
    "torchdiffeq.forms",
    "torchdiffeq.scipy_solver",
    "torchdiffeq.methods",
    "torchdiffeq.options",
    "torchdiffeq.__init__",
    "engine",
    "nn.base",
    "nn.block",
    "nn.cnf",
    "nn.control",
    "nn.cde",
    "nn.rnn",
    "nn.__init__",
    "flow.velocity",
    "flow.sampler",
    "flow.__init__",
    "adapters.flow_matching",
    "adapters.torchcfm",
    "adapters.__init__",
    "auditing.double",
    "auditing.budget",
    "auditing.timing",
    "auditing.rows",
    "auditing.show",
    "auditing.advise",
    "auditing.problem",
    "auditing.modules",
    "auditing.reference",
    "auditing.measure",
    "auditing.__init__",
    "__init__",
    "__main__",
]
FORBIDDEN = {  # finer than the order above: importing module -> what it must not know
    "loop.base": ("field", "state.fixed_point", "gradients"),
    "loop.floats": ("field", "state.fixed_point"),
    "controllers": ("field", "tape", "solvers.leapfrog", "solvers.runge_kutta"),
    "gradients.replay": ("solvers.leapfrog", "solvers.runge_kutta"),
    "gradients.adjoint": ("gradients.replay", "solvers.leapfrog", "solvers.runge_kutta"),
    "solvers.runge_kutta": ("solvers.leapfrog",),
}
SOURCES = [path for path in sorted(CORE.rglob("*.py")) if path.read_text().strip()]


def module(path: Path) -> str:
    return ".".join(path.relative_to(CORE).with_suffix("").parts)


def imports(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path.name}"
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_imports_go_in_one_direction(path: Path):
    assert module(path) in LAYERS, "a new module needs a place in the order"
    allowed = set(LAYERS[: LAYERS.index(module(path))]) - set(FORBIDDEN.get(module(path), ()))
    for prefix in FORBIDDEN.get(module(path), ()):
        allowed -= {other for other in allowed if other.startswith(prefix)}
    for name in imports(path):
        if name.startswith("torchmali"):
            other = name.removeprefix("torchmali.")
            assert {other, f"{other}.__init__"} & allowed, f"{module(path)} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_the_core_needs_torch_and_the_standard_library_alone(path: Path):
    standard = {
        "__future__", "abc", "argparse", "bisect", "collections", "contextlib", "copy", "ctypes", "dataclasses",
        "difflib", "fractions", "functools", "gc", "html", "importlib", "inspect", "itertools", "math", "operator",
        "pathlib", "re", "runpy", "struct", "sys", "textwrap", "threading", "time", "types", "typing", "warnings",
        "weakref",
    }  # fmt: skip
    standard |= {"os"} if module(path) == "_torch" else set()
    for name in imports(path):
        assert name.split(".")[0] in standard | {"torch", "torchmali"}, f"{module(path)}: {name}"


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_imports_stand_at_the_top(path: Path):
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert id(node) in top, f"lazy import in {path.name}, line {node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_the_core_neither_prints_nor_reads_options_from_globals(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print"


OLD_WORDS = set(
    "outlet surroundings watch watched way walk pace memento fit fits fitted refit misfit lands lifts".split()
)
OLD_WORDS |= {"unsteady", "house", "room", "rooms"}
LONGEST = 60  # lines of a function, without its docstring


def words_of(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


def names_in(tree: ast.AST) -> set[str]:
    """Names of functions, classes, arguments, attributes and variables."""
    kinds = {ast.FunctionDef: "name", ast.ClassDef: "name", ast.arg: "arg", ast.Attribute: "attr", ast.Name: "id"}
    return {getattr(node, kinds[type(node)]) for node in ast.walk(tree) if type(node) in kinds}


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_names_are_textbook_words(path: Path):
    names = {module(path), *names_in(ast.parse(path.read_text()))}
    assert not {name for name in names if words_of(name) & OLD_WORDS or "put_away" in name}


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_functions_are_short_and_conditions_flat(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            has_docstring = ast.get_docstring(node) is not None
            first = node.body[1] if has_docstring and len(node.body) > 1 else node.body[0]
            assert (node.end_lineno or 0) - first.lineno < LONGEST, f"{node.name} in {path.name}"
        if isinstance(node, ast.IfExp):
            inner = [x for x in ast.walk(node) if isinstance(x, ast.IfExp) and x is not node]
            assert not inner, f"a conditional expression inside another: {path.name}, line {node.lineno}"


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_no_method_exists_only_to_say_that_it_does_not(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and node.exc is not None:
            assert "AssertionError" not in ast.unparse(node.exc), f"{path.name}, line {node.lineno}"


ELSEWHERE = {  # attributes that may be set on something else than self
    "ctx",  # of an autograd.Function
    "fork",  # a copy, in the method that makes it (FixedPoint.fork)
    "here",  # what a thread has for itself
    "_entered",
    "x.grad",  # a tensor's
}


def attributes_set(path: Path) -> list[str]:
    """The attributes that a module sets on something else than self."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else []:
            parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            found += [x for x in parts if isinstance(x, ast.Attribute) and ast.unparse(x.value) != "self"]
    return [ast.unparse(x) for x in found]


@pytest.mark.parametrize("path", SOURCES, ids=module)
def test_no_attribute_is_set_from_outside(path: Path):
    set_here = [x for x in attributes_set(path) if not ELSEWHERE & {x, *x.split(".")[:-1]}]
    assert not set_here
