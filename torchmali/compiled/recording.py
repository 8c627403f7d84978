"""What f does, call by call: the record by which a compiled loop is found again.

f is evaluated once per solve in Python, under a mode that sees each function of torch that f calls, with its arguments.
Numbers, strings and the like are noted as they are, tensors by the order in which they appear. Two evaluations with the
same record are the same computation, whatever attributes, parameters or objects they got their tensors and numbers
from. A tensor that f neither got as an argument nor made is one from outside: a parameter, a buffer, a tensor in a
closure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torchmali._torch import is_traced, is_wrapped

LOOKS = "Python looks at the value of a tensor in f (a branch on t or y, float(t), .item(), a mask as an index)"
UNKNOWN = (torch.SymInt, torch.SymFloat, torch.SymBool)  # numbers that a trace does not know
INTERNAL = torch.ops.prim.device.default  # called where tensors without values are made, not by f
PLAIN = (str, bytes, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(Ellipsis), type)


class NotCompiledError(Exception):
    """A solve cannot be compiled, for the reason that the message gives, as in "f draws random numbers"."""


class CallRecorder(TorchFunctionMode):
    """The calls that f makes.

    twins: while f is traced, the tensor that stands for each tensor from outside, by id. It takes its place in calls.
    """

    def __init__(self, arguments: Sequence[Tensor], twins: Mapping[int, Tensor] | None = None):
        super().__init__()
        self.twins = twins
        self.calls: list[Hashable] = []
        self.kept: list[Any] = []  # an id is that of one object as long as the object lives
        self.numbers: dict[int, int] = {}
        self.unknown: dict[int, Tensor] = {}  # tensors that are no results of calls, by their numbers
        self._take_in(arguments)

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is INTERNAL:
            return func(*args)
        names, values = tuple(kwargs or ()), tuple((kwargs or {}).values())
        described, given = self._seen((tuple(args), values))
        self.calls.append((func, names, described))
        result = func(*given[0], **dict(zip(names, given[1], strict=True)))
        self._take_in(result)
        return result

    def returned(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Note what f returned; return it with twins in place of tensors from outside."""
        described, found = self._seen(tuple(leaves))
        self.calls.append(described)
        return found

    def _take_in(self, x: Any) -> None:
        """Give numbers to tensors that a call returned."""
        if isinstance(x, Tensor):
            self._number_of(x)
        elif isinstance(x, (tuple, list)):
            for part in x:
                self._take_in(part)

    def _number_of(self, x: Any) -> int:
        if id(x) not in self.numbers:
            self.numbers[id(x)] = len(self.kept)
            self.kept.append(x)
        return self.numbers[id(x)]

    def _seen(self, x: Any) -> tuple[Hashable, Any]:
        """Describe an argument; return it with twins in place of tensors from outside."""
        kind = type(x)
        if isinstance(x, Tensor):
            return self._seen_tensor(x)
        if kind in (bool, int, float, complex):
            return (kind, repr(x)), x  # 1, 1.0 and True are equal, and nan is not
        if kind is slice:
            described, parts = self._seen((x.start, x.stop, x.step))
            return (kind, described), slice(*parts)
        if isinstance(x, (tuple, list)):
            pairs = [self._seen(part) for part in x]
            parts = [part for _, part in pairs]
            is_plain = kind in (tuple, list)
            return (kind, tuple([pair[0] for pair in pairs])), kind(parts) if is_plain else x
        if kind is dict:
            described, parts = self._seen(tuple(x.values()))
            return (kind, tuple(x), described), dict(zip(x, parts, strict=True))
        if isinstance(x, PLAIN):
            return x, x
        if isinstance(x, UNKNOWN):
            raise NotCompiledError(LOOKS)
        raise NotCompiledError(
            f"f hands a {kind.__name__} to a function of torch, of which it is not known what it holds"
        )

    def _seen_tensor(self, x: Tensor) -> tuple[Hashable, Tensor]:
        number = self.numbers.get(id(x))
        if number is None:
            number = self._number_of(x)
            self.unknown[number] = x
            twin = None if self.twins is None else self.twins.get(id(x))
            if twin is not None:
                self.numbers[id(twin)] = number
                return ("tensor", number), twin
            if self.twins is not None and not (is_traced(x) or is_wrapped(x)):
                raise NotCompiledError(f"f reads a tensor of shape {tuple(x.shape)} only when it is traced")
        elif self.twins is not None:
            x = self.twins.get(id(x), x)
        return ("tensor", number), x
