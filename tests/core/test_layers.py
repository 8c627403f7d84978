"""Imports of torchmali go in one direction."""

import ast
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "torchmali"
LAYERS = [  # a module may import those named before it
    "_torch",
    "errors",
    "tree",
    "solution",
    "measure",
    "state.vectors",
    "state.base",
    "state.floats",
    "state.traced",
    "state.integers",
    "state.fixed_point",
    "tape",
    "field.randomness",
    "field.environment",
    "field.graph",
    "field.hooks",
    "field.parameters",
    "field.evaluate",
    "solvers.cotangent",
    "solvers.base",
    "solvers.leapfrog",
    "solvers.runge_kutta",
    "solvers.coupled",
    "controllers",
    "refresh",
    "outputs.base",
    "outputs.stored",
    "outputs.observed",
    "loop.base",
    "loop.floats",
    "loop.fixed_point",
    "integrate",
    "code",
    "gradients.base",
    "gradients.naive",
    "gradients.adjoint",
    "gradients.replay",
    "gradients.aca",
    "gradients.mali",
    "solve",
    "torchdiffeq",
    "engine",
    "nn.base",
    "nn.block",
    "nn.cnf",
    "nn.control",
    "nn.cde",
    "nn.rnn",
    "nn.__init__",
    "audit.double",
    "audit.budget",
    "audit.timing",
    "audit.rows",
    "audit.show",
    "audit.advise",
    "audit.problem",
    "audit.modules",
    "audit.reference",
    "audit.measure",
    "audit.__init__",
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
        "__future__", "abc", "argparse", "collections", "contextlib", "copy", "dataclasses", "functools", "gc", "html",
        "importlib", "inspect", "itertools", "math", "pathlib", "re", "runpy", "struct", "sys", "textwrap", "threading",
        "time", "types", "typing", "warnings", "weakref",
    }  # fmt: skip
    standard |= {"operator", "os"} if module(path) == "_torch" else set()
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
