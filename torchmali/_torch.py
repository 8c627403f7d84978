"""The private parts of torch that torchmali uses, all of them, each with the public way beside it.

Where torch lacks a private name, the public way is taken, and what that costs is said there. The choice is made once,
at import, and names are bound to torch's own functions where possible: a call costs what it costs in torch.

TORCHMALI_PUBLIC_TORCH=1 in the environment takes every public way. It is for tests.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

# Without a public way. torch's notes on extending it name this very module for modes. As for trees, users register
# their own types there, which a flattening of ours would not know.
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")

PUBLIC = os.environ.get("TORCHMALI_PUBLIC_TORCH") == "1"


def _has(owner: Any, name: str) -> bool:
    return not PUBLIC and hasattr(owner, name)


def _found(owner: Any, name: str, public: Any) -> Any:
    """The private function, or else the public one."""
    return getattr(owner, name) if _has(owner, name) else public


def _unknown(_: Any) -> None:
    """Of something that torch tells in private alone."""


# ---- Arithmetic on lists of tensors: one call for all leaves. Public: a loop, with a call for each leaf.


def _each(operation: Callable) -> Callable[..., Any]:
    def loop(x: Sequence[Tensor], *others: Any, **options: Any) -> list[Tensor]:
        columns = [x, *(y if isinstance(y, (tuple, list)) else [y] * len(x) for y in others)]
        if any(leaf is None for column in columns for leaf in column):
            raise TypeError("a list of tensors has a gap")  # as torch does, before anything is changed
        return [operation(*leaves, **options) for leaves in zip(*columns, strict=True)]

    return loop


foreach_abs = _found(torch, "_foreach_abs", _each(torch.abs))
foreach_add = _found(torch, "_foreach_add", _each(torch.add))
foreach_add_ = _found(torch, "_foreach_add_", _each(Tensor.add_))
foreach_div = _found(torch, "_foreach_div", _each(torch.div))
foreach_lerp = _found(torch, "_foreach_lerp", _each(torch.lerp))
foreach_lerp_ = _found(torch, "_foreach_lerp_", _each(Tensor.lerp_))
foreach_maximum = _found(torch, "_foreach_maximum", _each(torch.maximum))
foreach_mul = _found(torch, "_foreach_mul", _each(torch.mul))
foreach_mul_ = _found(torch, "_foreach_mul_", _each(Tensor.mul_))
foreach_neg_ = _found(torch, "_foreach_neg_", _each(Tensor.neg_))
foreach_norm = _found(torch, "_foreach_norm", _each(torch.linalg.vector_norm))
foreach_sub = _found(torch, "_foreach_sub", _each(torch.sub))
foreach_zero_ = _found(torch, "_foreach_zero_", _each(Tensor.zero_))


# ---- Autograd


def _grad(
    ends: Sequence[Tensor],
    starts: Sequence[Tensor],
    retain_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor],
    allow_unused: bool,
    accumulate_grad: bool,
) -> Sequence[Tensor | None]:
    assert not accumulate_grad
    return torch.autograd.grad(ends, inputs, starts, retain_graph, create_graph, allow_unused=allow_unused)


# torch.autograd.grad without its checks of the arguments: they are a good part of the VJP of a small f.
run_backward: Callable[..., Sequence[Tensor | None]] = _found(
    getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", _grad
)

# How often a tensor was changed in place. Public: unknown, as for tensors of inference mode. Changes of small buffers
# are still seen by their values; an f that changes y, and buffers changed between the passes, are not told of.
n_changes: Callable[[Tensor], int | None] = attrgetter("_version") if _has(Tensor, "_version") else _unknown

# The hooks of a tensor, a dict that may be written to. Public: unknown; a hook on a parameter is then called with the
# share of each step, too.
hooks_of: Callable[[Tensor], dict | None] = (
    attrgetter("_backward_hooks") if _has(Tensor, "_backward_hooks") else _unknown
)


def _is_in_dual_level() -> bool:
    return forward_ad._current_level >= 0


def _perhaps() -> bool:
    return True


# Whether forward-mode differentiation may follow a tensor. Public: each tensor is asked.
may_have_tangents: Callable[[], bool] = _is_in_dual_level if _has(forward_ad, "_current_level") else _perhaps


def lacks_graph(error: RuntimeError) -> bool:
    """Whether autograd was asked for a derivative by something that it does not follow.

    torch raises a RuntimeError for anything: there is its text alone.
    """
    return "does not require grad" in str(error)


def is_of_freed_graph(error: RuntimeError) -> bool:
    """Whether autograd was sent twice through the same graph. Here, too, there is the text alone."""
    return "second time" in str(error)


# ---- Autocast

# Whether the casts of weights that autocast keeps have graphs, also those made while none was recorded. Before torch
# 2.11 they do not, and whoever uses such a cast later gets no gradient for the weight. There is no name to look for, so
# the version decides. Public: no; weights are cast in each evaluation that records no graph.
casts_have_graphs: bool = not PUBLIC and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)


# ---- Tensors


def _lacks_storage(x: Tensor) -> bool:
    try:
        x.untyped_storage().data_ptr()
    except RuntimeError:
        return True
    return False


# Whether a tensor stands for others within torch.func. Public: also one of another layout, which has no storage either.
is_wrapped: Callable[[Tensor], bool] = _found(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", _lacks_storage
)

# What tells one living storage from another. Public: the id of the object, which lives as long as the storage does.
storage_key: Callable[[torch.UntypedStorage], int] = (
    attrgetter("_cdata") if _has(torch.UntypedStorage, "_cdata") else id
)


# ---- Modules


def _named_parameters(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(recurse=False, remove_duplicate=False))


def _named_buffers(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_buffers(recurse=False, remove_duplicate=False))


# Those of a module itself, to be read. Public: slower, and without those that are None.
parameters_of: Callable[[nn.Module], Mapping[str, Tensor | None]] = (
    attrgetter("_parameters") if _has(nn.Module(), "_parameters") else _named_parameters
)
buffers_of: Callable[[nn.Module], Mapping[str, Tensor | None]] = (
    attrgetter("_buffers") if _has(nn.Module(), "_buffers") else _named_buffers
)


def _lend_in_dict(module: nn.Module, name: str, x: Tensor) -> Callable[[], Any]:
    parameters: Any = module._parameters
    before, parameters[name] = parameters[name], x
    return partial(parameters.__setitem__, name, before)


def _lend_in_front(module: nn.Module, name: str, x: Tensor) -> Callable[[], Any]:
    own: Any = vars(module)  # is looked at before the parameters; setattr would not let a tensor take the place of one
    before, own[name] = own.get(name), x
    return partial(own.pop, name) if before is None else partial(own.__setitem__, name, before)


# Put a tensor in the place of a parameter. To undo it, call what is returned.
lend_parameter: Callable[[nn.Module, str, Tensor], Callable[[], Any]] = (
    _lend_in_dict if _has(nn.Module(), "_parameters") else _lend_in_front
)


def _put_in_dict(module: nn.Module, name: str, x: Tensor | None) -> None:
    buffers = module._buffers
    if type(buffers) is dict and name in buffers:
        buffers[name] = x  # as setattr, which takes its time
    else:
        _set_buffer(module, name, x)


def _set_buffer(module: nn.Module, name: str, x: Tensor | None) -> None:
    if getattr(module, name) is not x:
        setattr(module, name, x)


def _update_dict(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    module._buffers.update(buffers)


def _set_buffers(module: nn.Module, buffers: Mapping[str, Tensor | None]) -> None:
    for name, x in buffers.items():
        _set_buffer(module, name, x)


# Put a tensor in the place of a buffer, or all buffers of a module in theirs.
put_buffer: Callable[[nn.Module, str, Tensor | None], None] = (
    _put_in_dict if _has(nn.Module(), "_buffers") else _set_buffer
)
put_buffers: Callable[[nn.Module, Mapping[str, Tensor | None]], None] = (
    _update_dict if _has(nn.Module(), "_buffers") else _set_buffers
)


def is_replica(module: nn.Module) -> bool:
    """Whether it is one of DataParallel's copies. No public way: it would count as a module without parameters."""
    return getattr(module, "_is_replica", False)


def uncompiled(func: Any) -> Any:
    """The module that torch.compile was given. No public way: its signature would be unknown."""
    return getattr(func, "_orig_mod", func)


# ---- Dispatch modes and operations

_STACK = ("_push_mode", "_pop_mode", "_get_current_dispatch_mode_stack", "_len_torch_dispatch_stack")
_has_stack = all(_has(_python_dispatch, name) for name in _STACK)
_entered = threading.local()  # modes: those of ours that this thread is in, where torch does not tell


def _modes() -> list[TorchDispatchMode]:
    stack = _python_dispatch
    return stack._get_current_dispatch_mode_stack() if stack._len_torch_dispatch_stack() else []


def _enter(mode: TorchDispatchMode) -> None:
    TorchDispatchMode.__enter__(mode)
    _entered.modes = [*_entered_modes(), mode]


def _exit(_: None) -> None:
    *_entered.modes, mode = _entered_modes()
    TorchDispatchMode.__exit__(mode, None, None, None)


def _entered_modes() -> list[TorchDispatchMode]:
    return getattr(_entered, "modes", [])


# The modes that this thread is in, the innermost last. Public: those of ours alone, also while one is at work.
dispatch_modes: Callable[[], list[TorchDispatchMode]] = _modes if _has_stack else _entered_modes
_push_mode: Callable[[Any], None] = _python_dispatch._push_mode if _has_stack else _enter
_pop_mode: Callable[[None], Any] = _python_dispatch._pop_mode if _has_stack else _exit


class Mode(TorchDispatchMode):
    """A dispatch mode that does without PyTorch's global flags, which are not safe with several threads.

    torch.compile goes on under it: the code that it makes shows its random operations to the mode. Public: with the
    flags.
    """

    supports_higher_order_operators = True

    def __init__(self):
        pass  # what the base class sets up here is for its own __enter__, which does it if need be

    def __enter__(self) -> Any:
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode(None)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import all of torch.compile, which takes a second


# Names, types and defaults of an operation's arguments. No public way.
schema_of: Callable[[Any], Any] = attrgetter("_schema")


def _is_composite(op: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


_DROPOUTS = {f"aten::{kind}dropout{end}" for kind in ("", "alpha_", "feature_", "feature_alpha_") for end in ("", "_")}
_ATTENTION = {"aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math"}


def _is_simple(op: Any) -> bool:
    return op.name() in _DROPOUTS | _ATTENTION


def _run_parts(op: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _run_decomposition(op: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    return op.decompose(*args, **kwargs)


# Whether an operation is made of others, and to run these: the kernel in C++, as decompositions in Python differ in
# what they draw (that of a GRU has no dropout). Public: of the operations that draw, dropout
# and attention; a recurrent module with dropout is then refused in inference mode.
_has_keys = _has(torch._C, "_dispatch_has_kernel_for_dispatch_key") and _has(torch._C, "DispatchKey")
_has_kernels = _has_keys and _has(torch.ops.aten.dropout.default, "_op_dk")
is_composite: Callable[[Any], bool] = _is_composite if _has_kernels else _is_simple
run_parts: Callable[[Any, tuple, Mapping[str, Any]], Any] = _run_parts if _has_kernels else _run_decomposition


# ---- Compilation. These modules take a second to import: that is done where a solve is compiled for the first time. No
# public way: torch has while loops and the tracing of derivatives in private alone. Such solves are not compiled.

CAN_COMPILE: bool = not PUBLIC and tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)


def _imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch itself imports
        return importlib.import_module(name)


def traced(function: Callable, examples: Sequence[Tensor], instead: Mapping[Any, Callable]) -> torch.fx.GraphModule:
    """The graph of a function of tensors, with the shapes of these examples. instead: functions for some operations."""
    make_fx = _imported("torch.fx.experimental.proxy_tensor").make_fx
    return make_fx(function, decomposition_table=dict(instead), tracing_mode="fake")(*examples)


def is_traced(x: Tensor) -> bool:
    """Whether x stands for others while a function is traced."""
    return isinstance(x, _imported("torch._subclasses.fake_tensor").FakeTensor)


def while_loop(condition: Callable, body: Callable, carried: Sequence[Tensor], others: Sequence[Tensor]) -> Any:
    """A loop for `traced`: carried = body(*carried, *others) while condition(*carried, *others)."""
    loop = _imported("torch._higher_order_ops.while_loop").while_loop_op
    return loop(condition, body, tuple(carried), tuple(others))


def lowered(graph: torch.fx.GraphModule, examples: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """A graph as machine code. Buffers are not written to twice: a loop would return those that it still reads."""
    options = {"cpp_wrapper": True, "inplace_buffers": False}
    compile_fx = _imported("torch._inductor.compile_fx").compile_fx
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what it imports and how it multiplies
        return compile_fx(graph, list(examples), config_patches=options)


def depends_on_data(error: Exception) -> bool:
    """Whether a function could not be traced because Python looks at the value of a tensor."""
    fake = _imported("torch._subclasses.fake_tensor")
    symbolic = _imported("torch.fx.experimental.symbolic_shapes")
    kinds = fake.DataDependentOutputException, fake.DynamicOutputShapeException, symbolic.GuardOnDataDependentSymNode
    return isinstance(error, kinds)


# The operation that hands a value to Python.
GIVES_NUMBER: Any = torch.ops.aten._local_scalar_dense.default


# Hooks of a module that a trace would call once instead of at every evaluation. Those by which torch's own weight and
# spectral norm compute a weight are as good as a part of the module. Public: none are seen.
_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks", "_forward_pre_hooks")


def hooks_of_module(module: nn.Module) -> list[Any]:
    """The hooks of a module that have effects of their own."""
    own = vars(module)
    found = [hook for kind in _HOOKS if (hooks := own.get(kind)) for hook in hooks.values()]
    return [hook for hook in found if not type(hook).__module__.startswith("torch.nn.utils.")]


def changes_in_training(module: nn.Module) -> str | None:
    """What a module of torch does in training mode beside returning something: why it is not compiled."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
        return "draws random numbers"
    return "changes its running statistics" if has_running_statistics(module) else None


def has_running_statistics(module: nn.Module) -> bool:
    """Whether a module of torch is one that keeps statistics of what it gets in training mode."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and bool(module.track_running_stats)


def is_compiled(func: Any) -> bool:
    """Whether torch.compile made a function or a module."""
    if isinstance(func, nn.Module):
        return "_orig_mod" in vars(func).get("_modules", ())  # cheaper than an attribute that is not there
    return hasattr(func, "_torchdynamo_orig_callable")


# ---- Inside of a model that torch.compile traces. Without a public way: solves are then breaks between graphs.


def _current_trace() -> Any:
    translator = _imported("torch._dynamo.symbolic_convert").InstructionTranslator
    try:
        return translator.current_tx()
    except AttributeError:  # nothing is traced
        return None


def traced_changes() -> list[str] | None:
    """The classes of what the code that is being traced has changed: objects, lists and dicts that it did not make.

    The changes are made only when its graph has run. None: not known.
    """
    trace = _current_trace()
    if trace is None:
        return None
    kinds = _imported("torch._dynamo.variables.base")
    effects, made = trace.output.side_effects, (kinds.AttributeMutationNew, kinds.ValueMutationNew)
    known = list(effects.id_to_variable.values())
    changed = [x for x in known if not isinstance(x.mutation_type, made) and effects.is_modified(x)]
    return sorted({x.python_type_name() for x in changed})


def is_made_in_trace(x: Any) -> bool:
    """Whether x stands for an object that the code which is being traced makes, and has no content yet."""
    kinds = _imported("torch._dynamo.variables.base")
    known = _current_trace().output.side_effects.id_to_variable.get(id(x))
    return known is not None and isinstance(known.mutation_type, (kinds.AttributeMutationNew, kinds.ValueMutationNew))


def constant_in_trace(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs while the code that calls it is traced: its result is a constant of the graph.

    The same is torch.compiler.assume_constant_result, which imports what takes a second.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def break_graph(reason: str) -> None:
    """To be traced: an end of the graph. Where there must be one graph alone, torch raises an error with the reason."""
    torch._dynamo.graph_break(msg=reason)


@contextlib.contextmanager
def autograd_again() -> Iterator[None]:
    """Autograd sees operations also inside of one, where it does not."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor, keys.ADInplaceOrView):
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded):
        yield
