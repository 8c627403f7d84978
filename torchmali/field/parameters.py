"""The tensors and modules that a function depends on, found by looking into it."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any, ClassVar

from torch import Tensor, nn

from torchmali._torch import is_replica, parameters_of

MANY = 1000  # entries: a global container beyond this is data


def find_parameters_and_modules(root: Any) -> tuple[list[Tensor], list[nn.Module]]:
    """The tensors requiring a gradient, and the modules, that f can be seen to hold."""
    search = search_of(root)
    return list(search.found.values()), list(search.modules.values())


def search_of(root: Any) -> Search:
    """The tensors and the modules that f can be seen to hold.

    Looks into modules, bound methods, partials, closures, globals that the code names, containers, and the attributes
    of other callables and of objects whose methods are bound.
    """
    if _holds_nothing(root):
        return NOTHING
    search = Search()
    search.look(root, True)
    return search


def _holds_nothing(x: Any) -> bool:
    """Whether x is a function that can only work on its arguments."""
    is_plain = type(x) is types.FunctionType and not (x.__closure__ or x.__defaults__ or x.__kwdefaults__)
    return is_plain and not _names_in(x.__code__)


@functools.lru_cache(maxsize=1000)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes in a code, and in the code of inner functions and comprehensions."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return (*code.co_names, *(name for part in inner for name in _names_in(part)))


class Search:
    """A class: a recursive inner function would hold itself, and with it all that it has seen."""

    def __init__(self):
        self.found: dict[int, Tensor] = {}  # tensors that require a gradient
        self.loose: dict[int, Tensor] = {}  # tensors that do not, outside of modules
        self.modules: dict[int, nn.Module] = {}
        self.seen: dict[int, Any] = {}  # keeps what it has seen alive: a freed list's id comes back

    def look(self, x: Any, deep: bool) -> None:
        """Look into x. deep: x is what f reads, not a mere attribute of an object that f holds."""
        if id(x) in self.seen or isinstance(x, (int, float, str)):
            return
        self.seen[id(x)] = x
        for kinds, into in self.by_kind:
            if isinstance(x, kinds):
                into(self, x, deep)
                return
        if deep and hasattr(x, "__dict__") and not isinstance(x, (type, types.ModuleType)):
            self.look(list(vars(x).values()), False)

    def _into_tensor(self, x: Tensor, deep: bool) -> None:
        # A result kept in some attribute or log is not what f reads, and its graph may be gone.
        if x.requires_grad and (deep or x.is_leaf):
            self.found[id(x)] = x
        elif not x.requires_grad:
            self.loose[id(x)] = x

    def _into_module(self, x: nn.Module, deep: bool) -> None:
        for module in x.modules():
            self.modules[id(module)] = module
            parameters = (p for p in parameters_of(module).values() if p is not None and p.requires_grad)
            self.found.update((id(p), p) for p in parameters)
        if is_replica(x):  # DataParallel's copies hold their parameters as plain attributes
            self.look(tuple(p for m in x.modules() for p in vars(m).values() if isinstance(p, Tensor)), True)

    def _into_sequence(self, x: Any, deep: bool) -> None:
        for part in x:
            self.look(part, deep and not isinstance(x, list))

    def _into_dict(self, x: dict, deep: bool) -> None:
        self.look(tuple(x.values()), deep)

    def _into_partial(self, x: functools.partial, deep: bool) -> None:
        self.look((x.func, x.args, x.keywords), deep)

    def _into_method(self, x: types.MethodType, deep: bool) -> None:
        self.look(x.__self__, True)

    def _into_function(self, x: types.FunctionType, deep: bool) -> None:
        for cell in x.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                self.look(cell.cell_contents, deep)
        used = [x.__globals__.get(name) for name in _names_in(x.__code__)]
        self.look(tuple(y for y in used if isinstance(y, (Tensor, nn.Module))), True)
        for y in used:
            self._look_for_loose(y)
        self.look((x.__defaults__, x.__kwdefaults__), deep)

    by_kind: ClassVar[list[tuple[Any, Any]]] = [
        (Tensor, _into_tensor),
        (nn.Module, _into_module),
        ((tuple, list), _into_sequence),
        (dict, _into_dict),
        (functools.partial, _into_partial),
        (types.MethodType, _into_method),
        (types.FunctionType, _into_function),
    ]

    def _look_for_loose(self, x: Any) -> None:
        """Tensors without a gradient in a global container, such as buffers for torch.func.functional_call."""
        if isinstance(x, (dict, list, tuple)) and len(x) <= MANY:
            tensors = [y for y in (x.values() if isinstance(x, dict) else x) if isinstance(y, Tensor)]
            self.loose.update((id(y), y) for y in tensors if not y.requires_grad)


NOTHING = Search()  # found: nobody writes to it
