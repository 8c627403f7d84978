"""Import order of experiments/: packages in one direction, no cycles, imports at the top, one door to the core."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchmali
import torchmali.auditing
import torchmali.engine
import torchmali.flow
import torchmali.measure
import torchmali.nn
import torchmali.torchdiffeq

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
LAYERS = (  # a package or module may import those named before it, and its own modules
    "methods", "data", "engine", "models", "theory", "images", "series", "flows", "matching", "registry", "estimates",
    "report",
    "cli", "__main__",
)  # fmt: skip
PUBLIC = {
    "torchmali": torchmali,
    "torchmali.nn": torchmali.nn,
    "torchmali.torchdiffeq": torchmali.torchdiffeq,
    "torchmali.flow": torchmali.flow,
    "torchmali.auditing": torchmali.auditing,
    "torchmali.engine": torchmali.engine,
    "torchmali.measure": torchmali.measure,
}
PRIVATE_WORDS = (
    "outlet", "surroundings", "watch", "way", "ways", "walk", "pace", "memento", "put_away", "lands", "lifts",
    "unsteady", "house", "rooms",
)  # fmt: skip


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


SOURCES = {module_name(path): path for path in sorted(EXPERIMENTS.rglob("*.py"))}


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Yield (module, name) of each import; the name is None for `import module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)


def own_imports(name: str) -> set[str]:
    """Return the modules of experiments/ that a module imports."""
    found = set()
    for module, attribute in imports(ast.parse(SOURCES[name].read_text())):
        if module.split(".")[0] == "experiments":
            inner = f"{module}.{attribute}"
            found.add(inner if inner in SOURCES else module)
    return found


def layer(name: str) -> int:
    return LAYERS.index(name.split(".")[1]) if "." in name else -1


@pytest.mark.parametrize("name", SOURCES)
def test_packages_import_in_one_direction(name):
    for other in own_imports(name):
        assert layer(other) <= layer(name), f"{name} imports {other}"


def test_modules_have_no_cycle():
    graph = {name: own_imports(name) for name in SOURCES}
    while leaves := [name for name, others in graph.items() if not others & set(graph)]:
        for name in leaves:
            del graph[name]
    assert not graph, f"these modules import each other: {', '.join(graph)}"


@pytest.mark.parametrize("name", SOURCES)
def test_imports_stand_at_the_top(name):
    tree = ast.parse(SOURCES[name].read_text())
    top = {id(node) for node in tree.body}
    for node in tree.body:  # packages that may be missing, and names for type checkers alone
        if isinstance(node, ast.Try) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            top |= {id(inner) for inner in node.body}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert id(node) in top, f"lazy import in {name}, line {node.lineno}"


OTHERS = {
    module_name(path): path for name in ("benchmarks", "examples") for path in sorted((ROOT / name).rglob("*.py"))
}


@pytest.mark.parametrize("name", [*SOURCES, *OTHERS])
def test_only_public_names_of_the_core_are_imported(name):
    for module, attribute in imports(ast.parse((SOURCES | OTHERS)[name].read_text())):
        if module.split(".")[0] == "torchmali":
            assert module in PUBLIC, f"{name} imports {module}, which is not public"
            assert attribute is None or hasattr(PUBLIC[module], attribute)


@pytest.mark.parametrize("name", SOURCES)
def test_names_are_textbook_words(name):
    for node in ast.walk(ast.parse(SOURCES[name].read_text())):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name).lower().split("_")
            assert not set(words) & set(PRIVATE_WORDS), f"{node.name} in {name}"


def test_there_is_one_palette():
    for name, path in SOURCES.items():
        if name != "experiments.report.style":
            assert not re.search(r'"#[0-9a-fA-F]{6}"', path.read_text()), f"{name} has colours of its own"
