"""Random numbers of f: a solve draws from generators of its own.

A solve neither sees nor disturbs draws elsewhere, in this thread or in others. A dispatch mode, which PyTorch keeps per
thread, hands each random operation of f a generator that belongs to the solve. The generators are set back before each
evaluation, so that all evaluations of a solve and of its backward pass draw the same numbers.

The first evaluation runs under the mode and shows whether f draws. An f that does not is left alone afterwards.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils import checkpoint

from torchmali._torch import Mode, dispatch_modes, is_composite, run_parts, schema_of
from torchmali.copies import copied
from torchmali.errors import NonRepeatableFieldError

aten = torch.ops.aten
OpOverload = type(aten.add.Tensor)
Rule = Callable[["Redirected", Any, tuple, Mapping[str, Any]], Any]  # (mode, operation, args, kwargs) -> result

DRAWS_SOMETIMES = (
    "{} draws random numbers in some of its evaluations only, and not in the first, so that they cannot be the same in "
    "all. Draw them once, before the solve, or in every evaluation."
)
REMEDIES = {
    "attention": "call it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
    "rnn": "set the dropout of the recurrent module to 0 and use nn.Dropout between single layers",
    "lstm": "set the dropout of the recurrent module to 0 and use nn.Dropout between single layers",
}
HARMLESS = {  # tagged as random, but functions of their arguments
    "aten::_cudnn_attention_forward_no_dropout_inplace",
    "aten::_fill_mem_eff_dropout_mask_",
    "aten::_fused_sdp_choice",
    "aten::_nested_tensor_softmax_with_shape",
    "rngprims::philox_rand",
}


class Source:
    """Origin of the random numbers of one solve: a given generator, or one seed of the default generator per function.

    is_fresh: every evaluation draws new numbers (randomness="different").
    """

    outer: Redirected | None = None  # the mode of a solve in whose f this one runs
    device = torch.device("cpu")
    before: tuple[bytes, ...] | int | None = None  # what `begin` saw
    is_disturbed = False

    def __init__(self, given: Generator | None = None, is_fresh: bool = False):
        self.given, self.is_fresh = given, is_fresh

    def begin(self, device: torch.device) -> None:
        """Note where the default generators are, or the outer solve's."""
        self.device, self.outer, self.is_disturbed = device, _innermost(), False
        self.before = self._now()

    def look(self) -> bool:
        """Whether anything was drawn since `begin` beside the seeds given out here: by f, or by another thread."""
        now, before = self._now(), self.before
        self.is_disturbed = self.is_disturbed or now != before
        return self.is_disturbed

    def seed(self) -> int:
        """A seed from the default generator; within another solve's f, from that solve."""
        is_begun = self.before is not None
        if is_begun:
            self.look()
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self.before = self._now() if is_begun else None
        return seed

    def _now(self) -> tuple[bytes, ...] | int:
        if self.outer is not None:
            return self.outer.n_drawn
        states = (_bytes_of(torch.default_generator.get_state()),)
        if self.device.type == "cpu":
            return states
        index = () if self.device.type == "mps" else (self.device,)  # there is one generator for MPS
        try:
            return *states, _bytes_of(torch.get_device_module(self.device).get_rng_state(*index))
        except (AttributeError, RuntimeError):  # a device without generators
            return states


def _bytes_of(x: Tensor) -> bytes:
    """The bytes of a generator's state: to compare them takes a hundredth of what it takes to compare two tensors."""
    return ctypes.string_at(x.data_ptr(), x.nbytes)


class Draws:
    """Generators of one function's own, one per device, and the state in which each evaluation finds them."""

    def __init__(self, source: Source):
        self.source = source
        self.own: dict[torch.device, tuple[Generator, Tensor]] = {}  # with the state at the start
        self.seed: int | None = None

    @property
    def is_used(self) -> bool:
        return bool(self.own)

    def copy(self) -> Draws:
        """The same numbers from other generators: two backward passes may run at the same time."""
        return copied(self, own={on: (_at(own, state), state) for on, (own, state) in self.own.items()})

    def restart(self) -> None:
        """Back to the start, before an evaluation."""
        if not self.source.is_fresh:
            for own, state in self.own.values():
                own.set_state(state)

    def generator(self, device: torch.device) -> Generator:
        if device.index is None and device.type != "cpu":
            device = torch.empty(0, device=device).device
        if device not in self.own:
            self.own[device] = self._made(device)
        return self.own[device][0]

    def _made(self, device: torch.device) -> tuple[Generator, Tensor]:
        given = self.source.given
        if given is not None and given.device == device:
            start = given.get_state()
            return (given if self.source.is_fresh else _at(given, start)), start
        if self.seed is None:
            # Not from the generator with which f goes on: its numbers must not depend on when this one was asked for.
            self.seed = self.source.seed() if given is None else _number(_at(given, given.get_state()))
        own = _new_generator(device).manual_seed(self.seed)
        return own, own.get_state()

    def advance(self) -> None:
        """After the first evaluation: leave the given generator where this evaluation would have left it."""
        given = self.source.given
        if given is None or not self.own:
            return
        if given.device in self.own:
            given.set_state(self.own[given.device][0].get_state())
        else:
            _number(given)


def _new_generator(device: torch.device) -> Generator:
    try:
        return Generator(device)
    except (RuntimeError, TypeError):  # a device without generators
        return Generator()


def _at(generator: Generator, state: Tensor) -> Generator:
    """Another generator, in this state."""
    return _new_generator(generator.device).set_state(state)


def _number(generator: Generator) -> int:
    return int(torch.empty((), dtype=torch.int64, device=generator.device).random_(generator=generator))


class Operations(Mode):
    """Operations in the order in which they are called, as a list; without the detachments that autograd adds."""

    def __init__(self):
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None):
        if func is not aten.detach.default:
            self.seen.append(func)
        return func(*args, **kwargs) if kwargs else func(*args)


class Redirected(Mode):
    """Random operations draw from `draws`."""

    def __init__(self, draws: Draws):
        self.draws, self.n_drawn = draws, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None):
        try:
            rule = _rules[func]
        except KeyError:
            rule = rule_of(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(self, func, args, kwargs or {})

    def before_draw(self) -> None:
        self.n_drawn += 1

    def generator_for(self, args: tuple, kwargs: Mapping[str, Any]) -> Generator:
        """The generator for an operation with these arguments."""
        self.before_draw()
        device = kwargs.get("device")
        if device is None:
            tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            device = next((x.device for x in tensors), torch.device("cpu"))
        return self.draws.generator(torch.device(device))


class First(Redirected):
    """The mode of the first evaluation: it also notes to which precision f rounds what it computes from y.

    refuses_checkpoints: a gradient may follow, for which torch.utils.checkpoint inside f would draw other numbers.
    eps: rounding of y itself.
    """

    def __init__(self, draws: Draws, refuses_checkpoints: bool, eps: float):
        super().__init__(draws)
        self.eps = eps
        self.operations: list[Any] = []  # as in Operations
        self.is_within_rule = False
        # The calls of this module and of evaluate.py are more than the two that are left out here.
        self.depth = sum(1 for _ in _frames()) - 2 if refuses_checkpoints else -1
        self.leaves_alone = draws.source.is_fresh and draws.source.given is None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None):
        try:  # not a call of rule_of: this is done for every operation of the first evaluation
            rule = _rules[func]
        except KeyError:
            rule = rule_of(func)
        if func is not aten.detach.default and not self.is_within_rule:
            self.operations.append(func)
        if rule is None or self.leaves_alone:
            out = func(*args, **kwargs) if kwargs else func(*args)
        else:
            self.is_within_rule = True  # what a rule calls is not an operation of f
            try:
                out = rule(self, func, args, kwargs or {})
            finally:
                self.is_within_rule = False
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()):
                eps = torch.finfo(x.dtype).eps
                if eps > self.eps and _are_rounded(args, eps):
                    self.eps = eps
        return out

    def before_draw(self) -> None:
        super().before_draw()
        if self.depth < 0:
            return
        files = [frame.f_code.co_filename for frame in _frames()]
        inside = files[: len(files) - self.depth]  # calls made since the evaluation began
        if checkpoint.__file__ in inside:
            raise NonRepeatableFieldError(
                "torch.utils.checkpoint inside f calls a part of f again in the backward pass, and that part draws "
                "random numbers (dropout), which would then be other ones. Put checkpoint around the solve, or leave "
                "it out: MALI and ACA keep no graph of f between its evaluations anyway."
            )


def _are_rounded(args: tuple, eps: float) -> bool:
    """Whether an operation with results of this precision rounds one of its arguments.

    A constant is made in a precision of its own, and nothing is rounded. A single number, such as the time, is not what
    drifts.
    """
    tensors = (x for x in args if isinstance(x, Tensor) and x.ndim and (x.is_floating_point() or x.is_complex()))
    return any(torch.finfo(x.dtype).eps < eps for x in tensors)


class Refused(Redirected):
    """The mode that tells whether a function draws at all: the first random operation is an error."""

    def __init__(self, called: str):
        super().__init__(Draws(Source()))
        self.called = called

    def before_draw(self) -> None:
        raise NonRepeatableFieldError(DRAWS_SOMETIMES.format(self.called))


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _innermost() -> Redirected | None:
    """The mode of the evaluation in which this thread is."""
    modes = dispatch_modes()
    return next((mode for mode in reversed(modes) if isinstance(mode, Redirected)), None) if modes else None


_rules: dict[Any, Rule | None] = {}  # of the operations seen so far


def rule_of(op: Any) -> Rule | None:
    """What the mode does with an operation. None: nothing, the operation is run as it is."""
    if op not in _rules:
        _rules[op] = _made_rule(op)
    return _rules[op]


def _made_rule(op: Any) -> Rule | None:
    if not isinstance(op, OpOverload):
        return run_higher_order
    if torch.Tag.nondeterministic_seeded not in op.tags or schema_of(op).name in HARMLESS:
        return None
    names = [x.name for x in schema_of(op).arguments]
    if "generator" in names:
        return _Given(names.index("generator"), "training" in names)
    if is_composite(op):
        return decompose
    if op in LIKE:
        return fill_like
    if op is aten.native_dropout.default:
        return drop_out
    twin = _with_generator(op)
    if twin is not None:
        return _Twin(twin)
    return refuse_dropout if "dropout_p" in names or "dropout" in names else refuse


class _Given:
    """Rule of an operation with an argument `generator`."""

    def __init__(self, place: int, may_be_idle: bool):
        self.place, self.may_be_idle = place, may_be_idle

    def __call__(self, mode: Redirected, op: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        generator = args[self.place] if len(args) > self.place else kwargs.get("generator")
        if generator is not None or (self.may_be_idle and _is_idle(op, args, kwargs)):
            return op(*args, **kwargs)
        generator = mode.generator_for(args, kwargs)
        if len(args) > self.place:
            return op(*args[: self.place], generator, *args[self.place + 1 :], **kwargs)
        return op(*args, **{**kwargs, "generator": generator})


class _Twin:
    """Rule of an operation with an overload that takes a generator."""

    def __init__(self, twin: Any):
        self.twin = twin

    def __call__(self, mode: Redirected, op: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        return self.twin(*args, **kwargs, generator=mode.generator_for(args, kwargs))


def _with_generator(op: Any) -> Any:
    """The overload with the same arguments and a generator."""
    packet = op.overloadpacket
    wanted = [(x.name, str(x.type)) for x in schema_of(op).arguments]
    for name in packet.overloads():
        other = getattr(packet, name)
        arguments = [(x.name, str(x.type)) for x in schema_of(other).arguments]
        if [x for x in arguments if x[0] != "generator"] == wanted and len(arguments) == len(wanted) + 1:
            return other
    return None


def _is_idle(op: Any, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws nothing with these arguments: dropout with p = 0, or outside training."""
    values = _values(op, args, kwargs)
    p = values.get("dropout_p", values.get("dropout", 1.0))
    return p == 0 or not values.get("train", values.get("training", True))


def _values(op: Any, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with defaults."""
    arguments = schema_of(op).arguments
    values = {x.name: x.default_value for x in arguments if x.has_default_value()}
    values.update(zip([x.name for x in arguments], args, strict=False))
    values.update(kwargs)
    return values


def decompose(mode: Redirected, op: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Rule of an operation made of others (F.dropout in inference mode): those are looked at."""
    with mode:
        return run_parts(op, args, kwargs)


LIKE: dict[Any, Callable[..., Tensor]] = {
    aten.rand_like.default: Tensor.uniform_,
    aten.randn_like.default: Tensor.normal_,
    aten.randint_like.default: lambda x, high, generator: x.random_(0, high, generator=generator),
    aten.randint_like.low_dtype: Tensor.random_,
}


def fill_like(mode: Redirected, op: Any, args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    """Rule of rand_like and its kin, which take a generator in recent versions of PyTorch only."""
    like, *limits = args
    out = aten.empty_like.default(like, **kwargs)
    return LIKE[op](out, *limits, generator=mode.generator_for((out,), {}))


def drop_out(mode: Redirected, op: Any, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Rule of native_dropout, whose derivative uses the mask that it returns."""
    values = _values(op, args, kwargs)
    x, p, train = values["input"], values["p"], values["train"]
    if train is False or x.numel() == 0:
        return op(*args, **kwargs)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p, generator=mode.generator_for(args, kwargs))
    return x.mul(mask).mul_(1 / (1 - p) if p < 1 else 0.0), mask


def refuse_dropout(mode: Redirected, op: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Rule of fused kernels, which draw from the default generator: they may run without dropout."""
    return op(*args, **kwargs) if _is_idle(op, args, kwargs) else refuse(mode, op, args, kwargs)


def refuse(mode: Redirected, op: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    mode.before_draw()
    name = op.name()
    remedies: Iterable[str] = (remedy for part, remedy in REMEDIES.items() if part in name)
    remedy = next(iter(remedies), "use another operation of PyTorch, or draw the numbers once, before the solve")
    raise NonRepeatableFieldError(
        f"f calls {name}, which draws random numbers that cannot be repeated: it takes no generator. To avoid it, "
        f"{remedy}."
    )


def run_higher_order(mode: Redirected, op: Any, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Rule of operators on functions (torch.cond): the mode does not see inside, so they must not draw."""
    before = torch.get_rng_state()
    out = op(*args, **kwargs)
    if not torch.equal(before, torch.get_rng_state()):
        refuse(mode, op, args, kwargs)
    return out
