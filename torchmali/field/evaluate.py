"""The user's f as solvers and gradients need it: on leaves, checked, counted, differentiable."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from torchmali._torch import is_of_freed_graph, lacks_graph, lend_parameter, n_changes, parameters_of, run_backward
from torchmali.copies import copied
from torchmali.errors import InvalidFieldError, InvalidOptionError, NonRepeatableFieldError, SlopeMismatchError, warn
from torchmali.field.arguments import NO_ARGUMENTS, Arguments, normal
from torchmali.field.behaviour import Behaviour, forget, recall, remember
from torchmali.field.environment import Environment, version_of
from torchmali.field.graph import forgotten_leaves, leaf_of, nodes_behind, saved_bytes, shares_storage
from torchmali.field.hooks import silence_hooks
from torchmali.field.parameters import search_of
from torchmali.field.randomness import Operations, Source
from torchmali.jumps import Jumps
from torchmali.state.vectors import Leaves, Tensors, Time, eps_of
from torchmali.tree import LEAF, Structure

F = TypeVar("F", bound="Field")


class Field:
    """f(t, y, *args) on the leaves of y.

    t reaches f as a 0-d tensor. y is lent to f for the call: it may be overwritten afterwards, so an f that wants to
    keep it has to clone it. `theta` holds what f depends on beside t and y: the tensors among args that require a
    gradient, then the parameters.
    """

    called = "f"
    remedy = "Pass it through args=(...), or list it in params=[...]."

    first_time: Tensor | None = None  # during the first evaluation: it is within the limits of the jumps
    wants_t = False
    returned: Sequence[tuple[weakref.ref, int | None]] = ()  # by the first evaluation, and their versions
    needs_care, needs_graph, n_careful = True, False, 0  # as the first evaluations show
    n_evals = n_vjps = 0
    graphs: Graphs | None = None  # that the forward pass kept, for the backward pass
    fingerprint: list[Tensor] | None = None  # of its first value
    key: Hashable = None  # under which its behaviour is remembered; None: it is not
    behaviour: Behaviour | None = None  # as remembered from an earlier solve

    def __init__(
        self,
        func: Callable,
        z0: Tensors,
        structure: Structure,
        args: tuple,
        params: Iterable[Tensor] | None,
        buffers: str = "update",
        source: Source | None = None,
        looks_for_leaves: bool = False,
        keeps_first_value: bool = False,
        remembers: bool = False,
        jumps: Jumps | None = None,
    ):
        self.func = self.original = func
        self.structure, self.is_leaf = structure, structure is LEAF
        self.form = form = form_of(tuple([(z.shape, z.dtype, z.device) for z in z0]))
        self.signature, self.device = form.signature, form.device
        self.zero = _zero(form.t_dtype, form.device)
        self.arguments = Arguments(args) if args else NO_ARGUMENTS
        self.args = self.arguments.args
        rest = tuple([x for x in self.arguments.leaves if not isinstance(x, Tensor)]) if args else ()
        search = search_of((func, rest) if rest else func)
        modules = list(search.modules.values())
        loose = [*search.loose.values(), *self.arguments.fixed] if search.loose or args else ()
        theta = self._set_theta(search.found.values() if params is None else _listed(params), modules)
        self.jumps = jumps
        self.environment = Environment(modules, form.device, buffers, source, loose, form.eps)
        self.looks_for_leaves = looks_for_leaves  # warn, once, of leaves that would get no gradient
        self.keeps_first_value = keeps_first_value  # a few numbers of it, for `is_as_first`
        self.told: set[int] = set()  # of these
        # In inference mode some operations take other kernels when they are looked at.
        if remembers and not (args or torch.is_inference_mode_enabled()) and self.environment.is_simple:
            modes = tuple([(id(m), m.training) for m in modules])
            found = form, tuple([id(p) for p in theta])
            self.key = modes, found, looks_for_leaves, torch.is_grad_enabled()
            self.behaviour = recall(func, self.key)

    def _set_theta(self, found: Iterable[Tensor], modules: Sequence[nn.Module]) -> Sequence[Tensor]:
        """Set what f depends on, and where modules hold it; return the parameters."""
        if not found:
            self.theta, self.behind, self.originals, self.held = self.arguments.moving, frozenset(), (), ()
            return ()
        theta, self.behind = _independent(found)
        self.theta = [*self.arguments.moving, *theta]
        self.originals = [weakref.ref(p) for p in theta]  # saved ones may come back as other objects
        places = {id(p): i for i, p in enumerate(theta)}
        self.held = [
            (m, name, places[id(p)]) for m in modules for name, p in parameters_of(m).items() if id(p) in places
        ]
        return theta

    @property
    def fixed(self) -> list[Tensor]:
        """The tensors among args that get no gradient."""
        return self.arguments.fixed

    @property
    def precision(self) -> float:
        """Rounding of the coarsest floating-point type in which f computes, as its first evaluation shows."""
        return self.environment.eps

    def without_tensors(self: F) -> F:
        """A copy without theta and `fixed`, to be kept until the backward pass."""
        return copied(self, arguments=self.arguments.without_tensors(), args=(), theta=[])

    def with_tensors(
        self: F, theta: Sequence[Tensor], fixed: Sequence[Tensor], wants_t: bool, graphs: Graphs | None = None
    ) -> F:
        """A copy for one backward pass: theta and `fixed` as saved (args detached), counters at zero.

        graphs: those that the forward pass kept.
        """
        n, arguments = len(self.arguments.slots), self.arguments
        moving = [x.detach().requires_grad_() for x in theta[:n]]
        if arguments is not NO_ARGUMENTS:
            arguments = arguments.with_tensors(moving, fixed)
        return copied(
            self,
            arguments=arguments,
            args=arguments.args,
            theta=[*moving, *theta[n:]],
            wants_t=wants_t,
            graphs=graphs,
            environment=self.environment.for_backward(),
            n_evals=0,
            n_vjps=0,
            jumps=None if self.jumps is None else copied(self.jumps),  # its limits are those of one pass
        )

    def enter(self, t0: Time, t1: Time) -> None:
        """Evaluate f between t0 and the first jump behind it, towards t1, until the next call."""
        if self.jumps is not None:
            self.jumps.enter(t0, t1)

    def time(self, t: Time) -> Tensor:
        """The time as f receives it."""
        if self.jumps is None or t is self.first_time:
            return self.scalar(t)
        if isinstance(t, Tensor):
            return self.jumps.limited(self.scalar(t))
        return self.scalar(min(max(t, self.jumps.low), self.jumps.high))

    def scalar(self, x: Time) -> Tensor:
        """A number as a 0-d tensor of the dtype and on the device of the times."""
        if isinstance(x, Tensor):
            return x.to(self.device, self.form.t_dtype)
        return self.zero.new_full((), x)  # no host-device wait, and cheaper than torch.full

    def __call__(self, t: Time, z: Tensors) -> Tensors:
        if self.needs_care:
            return self._evaluate_with_care(t, z)
        self.n_evals += 1
        # As `time` does, without its calls.
        now = self.zero.new_full((), t) if type(t) is float and self.jumps is None else self.time(t)
        if not self.is_leaf:
            return self._on_leaves(now, z)
        (y,) = z
        version = None if y.is_inference() else n_changes(y)
        u = self.func(now, y, *self.args)
        if version is not None and n_changes(y) != version:
            raise_for_change(self.called)
        shape, dtype = self.signature[0]
        if isinstance(u, Tensor) and u.shape == shape and u.dtype == dtype:
            return (u,)
        return (self._as_slope(0, u),)

    def _on_leaves(self, now: Tensor, z: Tensors) -> Tensors:
        """f of a nested y."""
        versions = [version_of(x) for x in z]
        u = self._leaves(self.func(now, self.structure.rebuild(z), *self.args))
        if versions != [version_of(x) for x in z]:
            raise_for_change(self.called)
        for i, leaf in enumerate(u):
            if not isinstance(leaf, Tensor) or (leaf.shape, leaf.dtype) != self.signature[i]:
                u = (*u[:i], self._as_slope(i, leaf), *u[i + 1 :])
        return u

    def _evaluate_with_care(self, t: Time, z: Tensors) -> Tensors:
        if self.behaviour is not None and not self.n_careful:
            return self._evaluate_as_remembered(self.behaviour, t, z)
        self.n_careful += 1
        around = self.environment
        if around.is_cast:  # autocast keeps the casts of all leaves until the solve ends; of views it keeps none
            z = tuple(x.view_as(x) if x.requires_grad and x.is_leaf else x for x in z)
        u = self._evaluate_first(t, z) if self.n_careful == 1 else self._evaluate_again(t, z)
        # The second one may be the first without gradients.
        self.needs_care = self.n_careful < 2 or self.needs_graph or around.is_active
        if not self.needs_care:
            self._remember()
        return u

    def _evaluate_first(self, t: Time, z: Tensors) -> Tensors:
        """The first evaluation, which shows what f does beside returning something."""
        now, evaluate = normal(self.time(t)), self._at  # made here, as that is not an operation of f's
        self.first_time = now
        if self.looks_for_leaves:
            z, evaluate = tuple([x.detach().requires_grad_(x.requires_grad) for x in z]), self._with_graph
        with self.environment.first_evaluation(self.looks_for_leaves or torch.is_grad_enabled()):
            u = self._tried(evaluate, now, z)
        self.first_time = None
        if self.looks_for_leaves:  # f may have made t and y require gradients itself
            self._tell_of_leaves(u, [*self.theta, now, *z], [x for x in z if not x.requires_grad])
            u = tuple([x.detach() for x in u])
        self._note_first_value(u)
        self.returned = [(weakref.ref(x), n_changes(x)) for x in u if not x.is_inference()]
        return u

    def _evaluate_again(self, t: Time, z: Tensors) -> Tensors:
        with self.environment.evaluation():
            u = self._tried(self._at, t, z)
        is_kept = all((x := there()) is None or n_changes(x) == version for there, version in self.returned)
        if not is_kept:
            raise InvalidFieldError(f"{self.called} overwrites what it returned before: let it return a new tensor.")
        self.returned = ()  # later the solver may work on them itself
        return u

    def _note_first_value(self, u: Tensors) -> None:
        """Keep a fingerprint of f's first value, if a backward pass may ask whether f is what it was."""
        if self.keeps_first_value or self.environment.modules or self.environment.loose:
            self.fingerprint = _fingerprint(u)

    def _remember(self, keeps_bits: bool | None = None) -> None:
        """Remember for later solves what the first evaluations showed: that f needs no care."""
        if self.key is not None and not (self.needs_care or self.told):
            remember(self.original, self.key, Behaviour(self.environment.eps, self.environment.operations, keeps_bits))

    def _evaluate_as_remembered(self, behaviour: Behaviour, t: Time, z: Tensors) -> Tensors:
        """The first evaluation of an f that is known to need no care."""
        self.environment.assume(behaviour.eps, behaviour.operations)
        self.needs_care, self.n_careful = False, 2
        if self.looks_for_leaves:  # with a graph, as in the first solve: some modules return other bits without one
            with torch.enable_grad():
                u = tuple([x.detach() for x in self(t, z)])
        else:
            u = self(t, z)
        self._note_first_value(u)
        return u

    def with_function(self: F, func: Callable) -> F:
        """A copy that calls another function in place of f, which is to return what f returns."""
        return copied(self, func=func)

    def settled(self: F) -> F:
        """A copy for which the one evaluation that was made with care is enough: f was traced, too."""
        needs_care = self.needs_graph or self.environment.is_active
        found = copied(self, needs_care=needs_care, n_careful=2)
        if self.behaviour is None:
            found._remember()
        return found

    def count(self, n_evals: int, n_vjps: int = 0) -> None:
        """Count evaluations that were made elsewhere."""
        self.n_evals, self.n_vjps = self.n_evals + n_evals, self.n_vjps + n_vjps

    def is_plain(self) -> bool:
        """Whether f is known to need no care, and to be calm in fixed steps."""
        known = self.behaviour
        return known is not None and known.is_calm and self.jumps is None and known.eps <= self.environment.eps_of_state

    def is_restless(self: F) -> F:
        """Remember that f is not calm in fixed steps; return it as it was before its first evaluation."""
        if self.behaviour is not None and self.key is not None:
            remember(self.original, self.key, self.behaviour._replace(is_calm=False))
        return copied(self, needs_care=True, n_careful=0, n_evals=0)

    def was_misjudged(self, error: Exception) -> bool:
        """Whether an error of a solve may be due to a behaviour of f that was remembered, and is now forgotten."""
        if self.behaviour is None:
            return False
        self.forget_behaviour()
        return isinstance(error, NonRepeatableFieldError) or (isinstance(error, RuntimeError) and lacks_graph(error))

    def forget_behaviour(self) -> None:
        forget(self.original)

    def _tried(self, evaluate: Callable[[Time, Tensors], Tensors], t: Time, z: Tensors) -> Tensors:
        """f may take derivatives by y itself, and expect a y that it can differentiate by."""
        if not self.needs_graph:
            around = self.environment
            mark = around.mark() if self.n_careful <= 2 else ()
            try:
                return evaluate(t, z)
            except RuntimeError as error:
                if not lacks_graph(error) or _is_followed(z):
                    raise
            self.needs_graph = True
            self.n_evals -= 1
            around.try_again(mark)
        return self._at(t, z) if _is_followed(z) else self._recorded(self._at, t, z)

    def _recorded(self, evaluate: Callable[[Time, Tensors], Tensors], t: Time, z: Tensors) -> Tensors:
        """With a graph, which is thrown away unless grad mode is on: then it leads to the parameters."""
        is_wanted = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.enable_grad():
            u = evaluate(t, tuple([(x.clone() if x.is_inference() else x.detach()).requires_grad_() for x in z]))
            return tuple(u) if is_wanted else tuple([x.detach() for x in u])

    def _at(self, t: Time, z: Tensors) -> Tensors:
        self.needs_care = False  # the care has been taken
        try:
            return self(t, z)
        except Exception:
            self.needs_care = True  # f may be called again, on another grid
            raise

    def as_in_backward(self, t: Time, z: Tensors) -> Tensors:
        """f(t, z) with the very operations of `linearize`."""
        return self._recorded(self, t, z)

    def with_bits_of_backward(self) -> Callable[[Time, Tensors], Tensors]:
        """f(t, z), to the bit as `linearize` returns it.

        Some modules have faster kernels where no graph is recorded. The first evaluation is made both ways: where both
        are made of the same operations and the bits agree, the others are made without a graph.
        """
        chosen: list[Callable[[Time, Tensors], Tensors]] = []
        if self.behaviour is not None and self.behaviour.keeps_bits is not None:
            return self if self.behaviour.keeps_bits else self.as_in_backward

        def evaluate(t: Time, z: Tensors) -> Tensors:
            if chosen:
                return chosen[0](t, z)
            u = self.as_in_backward(t, z)
            plain, operations = self._with_operations(t, z)
            differ = torch.stack([(x != y).any().to(u[0].device) for x, y in zip(u, plain, strict=True)]).any()
            is_same = operations == self.environment.operations and not bool(differ)
            chosen.append(self if is_same else self.as_in_backward)
            self._remember(is_same)
            return u

        return evaluate

    def _with_operations(self, t: Time, z: Tensors) -> tuple[Tensors, list[Any]]:
        """f(t, z), and the operations of which it is made."""
        func, operations = self.func, Operations()

        def recorded(*args: Any) -> Any:
            with operations:
                return func(*args)

        self.func = recorded
        try:
            return self(t, z), operations.seen
        finally:
            self.func = func

    @contextlib.contextmanager
    def refusing_draws(self) -> Iterator[None]:
        """Around a repetition of evaluations: random numbers that the first evaluation did not draw are an error.

        The evaluations are not counted.
        """
        n_evals, needs_care = self.n_evals, self.needs_care
        with self.environment.refusing_draws(self.called):
            self.needs_care = True
            try:
                yield
            finally:
                self.n_evals, self.needs_care = n_evals, needs_care

    def backward_pass(self, t: float, z: Tensors) -> contextlib.ExitStack:
        """A context around all evaluations of a backward pass. t, z: where f was evaluated first."""
        stack = contextlib.ExitStack()
        try:
            self.environment.begin_backward(stack)
            self._lend_parameters(stack)
            self._raise_for_changes(t, z)
            silence_hooks([x for original in self.originals if (x := original()) is not None], stack)
        except BaseException:
            stack.close()
            raise
        return stack

    def _raise_for_changes(self, t: float, z: Tensors) -> None:
        changes = self.environment.changes()
        if changes and not self.is_as_first(t, z):  # they may be of modules that f could reach but has no use for
            raise NonRepeatableFieldError(
                f"{self.called} is not what it was in the forward pass: {changes}. Call backward before that, or solve "
                "again after it."
            )

    def is_as_first(self, t: Time, z: Tensors) -> bool:
        """Whether f(t, z) is what the first evaluation gave. Not counted."""
        if self.fingerprint is None:
            return True
        n_evals = self.n_evals
        with torch.no_grad():
            now = _fingerprint(self(t, z))
        self.n_evals = n_evals
        accuracy = max(100 * max(torch.finfo(x.dtype).eps for x in now), self.environment.coarseness)
        first, second = (torch.stack([x.to(now[0]) for x in numbers]) for numbers in (self.fingerprint, now))
        return torch.allclose(second, first, accuracy, 0.0)  # one host read

    def _lend_parameters(self, stack: contextlib.ExitStack) -> None:
        """torch.func.functional_call lends parameters to a module for the forward pass only: they are lent again."""
        for module, name, i in self.held:
            if parameters_of(module)[name] is not self.originals[i]():
                stack.callback(lend_parameter(module, name, self.theta[len(self.arguments.slots) + i]))

    def _leaves(self, u: Any) -> Tensors:
        try:
            return self.structure.flatten(u)
        except ValueError as mismatch:
            raise InvalidFieldError(
                f"f must return a slope for each leaf of y, in y's structure; it returned {mismatch}."
            ) from None

    def _as_slope(self, i: int, leaf: Any) -> Tensor:
        """A leaf of f(t, y) that is not like y."""
        of = f" for leaf {i}" if len(self.signature) > 1 else ""
        if not isinstance(leaf, Tensor):
            raise InvalidFieldError(f"f must return tensors; it returned a {type(leaf).__name__}{of}.")
        shape, dtype = self.signature[i]
        if self.environment.is_cast and leaf.shape == shape and leaf.is_floating_point():
            return leaf.to(dtype)
        raise SlopeMismatchError(
            f"f must return dy/dt with y's shape and dtype{of}: y has shape {tuple(shape)}, {dtype}; f returned "
            f"{tuple(leaf.shape)}, {leaf.dtype}. (A different shape would be broadcast, a different dtype would "
            "change the precision of the state: reshape or cast inside f.)"
        )

    def _with_graph(self, t: Time, z: Tensors) -> Tensors:
        with torch.enable_grad():
            return self._at(t, z)

    def _tell_of_leaves(self, u: Leaves, known: Sequence[Tensor], fixed: Sequence[Tensor] = ()) -> None:
        """Warn of leaves behind u that are not known.

        fixed: tensors of y that require no gradient, so that an f which takes derivatives by y may make leaves of them.
        The first VJP looks again: there y does require one.
        """
        for leaf in forgotten_leaves(u, known):
            if fixed and shares_storage(leaf, fixed):
                continue
            if id(leaf) in self.behind:
                raise InvalidFieldError(
                    f"f depends on a tensor of shape {tuple(leaf.shape)} directly and through another tensor that was "
                    "made from it outside f, and only one of the two parts would be counted. Pass the other through "
                    "args=(...)."
                )
            if id(leaf) not in self.told:
                warn(
                    f"{self.called} depends on a tensor of shape {tuple(leaf.shape)} that requires a gradient but "
                    f"would get none: it is not among the parameters found in {self.called}. {self.remedy}"
                )
            self.told.add(id(leaf))

    def for_graphs(self: F) -> F:
        """A copy all of whose evaluations have graphs, if f is known to need no care."""
        return copied(self, looks_for_leaves=False)

    def for_recording(self: F, wants_t: bool) -> F:
        """A copy for `record` in the forward pass: with leaves for the tensors among args, as `with_tensors` makes."""
        if not self.arguments.slots:
            return copied(self, wants_t=wants_t)
        n = len(self.arguments.slots)
        moving = [x.detach().requires_grad_() for x in self.theta[:n]]
        arguments = self.arguments.with_tensors(moving, self.fixed)
        theta = [*moving, *self.theta[n:]]
        return copied(self, arguments=arguments, args=arguments.args, theta=theta, wants_t=wants_t)

    def count_evaluation(self) -> None:
        """Count one that a copy made."""
        self.n_evals += 1

    @contextlib.contextmanager
    def without_graphs(self) -> Iterator[None]:
        """Around evaluations that are none of the forward pass: graphs that it kept are not for them."""
        graphs, self.graphs = self.graphs, None
        try:
            yield
        finally:
            self.graphs = graphs

    @property
    def keeps_graphs(self) -> bool:
        """Whether the graph of an evaluation in the forward pass is that of one in the backward pass.

        Known after the first evaluations: nothing is to be done around each, and no buffers change.
        """
        return not self.needs_care and not self.environment.changing

    @property
    def last_n_evals(self) -> int | None:
        """How many evaluations the last forward pass with this f took, if it is remembered."""
        return None if self.behaviour is None else self.behaviour.n_evals or None

    def remember_n_evals(self) -> None:
        """Remember how many evaluations this forward pass took."""
        known = None if self.key is None else recall(self.original, self.key)
        if known is not None:
            remember(self.original, self.key, known._replace(n_evals=self.n_evals))

    def bytes_of_graph(self, t: Time, z: Tensors) -> int:
        """The bytes that a recorded evaluation keeps alive: one evaluation, unless it is remembered."""
        known = None if self.key is None else recall(self.original, self.key)
        if known is not None and known.graph_bytes is not None:
            return known.graph_bytes
        found: list[Recorded] = []

        def record() -> None:
            with torch.enable_grad():
                found.append(
                    copied(self, graphs=None, looks_for_leaves=False, needs_care=False).record(
                        t, tuple([x.clone() for x in z])
                    )
                )

        modules = [x for m in self.environment.modules for x in (*m.parameters(False), *m.buffers(False))]
        loose = [x for place in self.environment.loose if (x := place.tensor) is not None]
        self.count_evaluation()
        size = saved_bytes(
            record, [*self.theta, *self.fixed, *modules, *loose], lambda: (*found[0].inputs[: len(z)], *found[0].u)
        )
        if known is not None:
            remember(self.original, self.key, known._replace(graph_bytes=size))
        return size

    def linearize(self, t: Time, z: Tensors, a: Leaves) -> tuple[Tensors, Sequence[Tensor | None], Tensor | None]:
        """u = f(t, z), then a^T df/d(z, theta) and a^T df/dt (where wanted), from one evaluation.

        None where there is no dependence. Grad mode must be on.
        """
        if self.graphs or self.wants_t:
            recorded = self.record(t, z)
            return recorded.u, *recorded.pull(a)
        if self.is_leaf:  # the same without lists
            y = z[0].detach().requires_grad_()
            (u,) = outputs = self(t, (y,))
            return (u.detach(),), self.vjp(outputs, [y, *self.theta], a), None
        z = tuple([x.detach().requires_grad_() for x in z])
        outputs = self(t, z)
        return tuple([x.detach() for x in outputs]), self.vjp(outputs, [*z, *self.theta], a), None

    def record(self, t: Time, z: Tensors) -> Recorded:
        """f(t, z) with its graph. Grad mode must be on, and z must stay as it is until the graph is used.

        If the forward pass kept the graph of this evaluation, that one is taken, and f is not evaluated.
        """
        kept = self.graphs.take(t) if self.graphs else None
        if kept is not None:
            return kept.of(self)
        z = tuple([x.detach().requires_grad_() for x in z])
        inputs = [*z, *self.theta]
        if self.wants_t:
            t = self.time(t).requires_grad_()
            inputs.append(t)
        outputs = self(t, z)
        return Recorded(self, outputs, inputs, tuple([x.detach() for x in outputs]))

    def vjp(
        self, outputs: Leaves, inputs: list[Tensor], a: Sequence[Tensor | None], n_evals: int = 1
    ) -> Sequence[Tensor | None]:
        """a^T d(outputs)/d(inputs), through n_evals evaluations; None: no dependence."""
        if not self.n_vjps and self.looks_for_leaves:  # again, at the other end: f may be another one there
            self._tell_of_leaves(outputs, inputs)
        self.n_vjps += n_evals
        ends, starts = outputs, a
        if len(a) > 1 or a[0] is None or not outputs[0].requires_grad:
            pairs = [(x, g) for x, g in zip(outputs, a, strict=True) if x.requires_grad and g is not None]
            if not pairs:
                return [None] * len(inputs)
            ends, starts = zip(*pairs, strict=True)
        options = False, False, tuple(inputs), True  # retain and create graph, inputs, allow unused
        try:
            return run_backward(tuple(ends), tuple(starts), *options, accumulate_grad=False)
        except RuntimeError as error:
            if not is_of_freed_graph(error):
                raise
            raise InvalidFieldError(
                f"{self.called} reads a tensor that was computed outside it from its own parameters, and each step "
                "would have to go back through that. Pass the tensor through args=(...), or compute it inside."
            ) from error


class KeptGraph(NamedTuple):
    """One evaluation of f in the forward pass, with its graph."""

    number: int  # of the evaluation among those that were recorded
    t: Time
    outputs: Tensors
    inputs: list[Tensor]
    u: Tensors

    def of(self, field: Field) -> Recorded:
        z = tuple([x.detach() for x in self.inputs[: len(self.u)]])
        return Recorded(field, self.outputs, self.inputs, self.u, z)


class Graphs:
    """Graphs of evaluations that the forward pass kept, each to be taken once by the backward pass.

    The backward pass asks for them from the last step to the first, with the very times of the forward pass; within a
    step in any order. n_per_step: the largest number of evaluations in a step.
    """

    def __init__(self, kept: Iterable[KeptGraph], n_per_step: int):
        self.kept, self.n_per_step = list(kept), n_per_step

    def __len__(self) -> int:
        return len(self.kept)

    def take(self, t: Time) -> KeptGraph | None:
        """The last one at time t, if it belongs to one of the last evaluations that are there."""
        kept = self.kept
        for i in range(len(kept) - 1, max(-1, len(kept) - 2 - self.n_per_step), -1):
            if kept[i].t == t:
                found = kept.pop(i)
                while kept and kept[-1].number > found.number + self.n_per_step:
                    kept.pop()  # made for an error estimate: the backward pass has no use for it
                return found
        return None


def _listed(params: Iterable[Tensor]) -> list[Tensor]:
    found = list(params)
    if isinstance(params, Tensor) or not all(isinstance(p, Tensor) for p in found):
        raise InvalidOptionError("params must be a list of tensors, as in params=[w] or params=list(net.parameters()).")
    return found


def _independent(tensors: Iterable[Tensor]) -> tuple[Sequence[Tensor], Set[int]]:
    """Those that require a gradient and are not behind another one; and the ids of the leaves that are behind one.

    What another one is computed from gets its gradient through that one, outside: here it would be counted twice.
    """
    # By identity: one that is listed twice would get its gradient twice.
    unique = {id(p): p for p in tensors if p.requires_grad}
    roots = [p.grad_fn for p in unique.values() if p.grad_fn is not None]
    if not roots:
        return list(unique.values()), set()
    nodes = nodes_behind([node for root in roots for node, _ in root.next_functions], set())
    leaves = {id(x) for x in map(leaf_of, nodes)}
    return [p for p in unique.values() if id(p) not in leaves and p.grad_fn not in nodes], leaves


class StateForm(NamedTuple):
    """Everything about a state that a field depends on, beside its values."""

    signature: tuple[tuple[torch.Size, torch.dtype], ...]
    device: torch.device
    t_dtype: torch.dtype
    eps: float  # of the leaf with the fewest digits


@functools.lru_cache(maxsize=1000)
def form_of(kinds: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]) -> StateForm:
    """The form of a state whose leaves have these shapes, dtypes and devices."""
    dtypes = [dtype for _, dtype, _ in kinds]
    signature = tuple([(shape, dtype) for shape, dtype, _ in kinds])
    return StateForm(signature, kinds[0][2], _finest(dtypes), max(map(eps_of, dtypes)))


_zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-d tensor from which others are made. It is made once, unless some mode makes other kinds of tensors."""
    found = _zeros.get((dtype, device))
    if found is None:
        found = torch.zeros((), dtype=dtype, device=device)
        if type(found) is Tensor:
            _zeros[dtype, device] = found
    return found


def _finest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def time_dtype(z: Tensors) -> torch.dtype:
    """The dtype in which f receives t beside a state z: that of the leaf with the most digits."""
    return _finest([x.dtype for x in z])


class Recorded(NamedTuple):
    """One evaluation of f with its graph, which can be used once."""

    field: Field
    outputs: Tensors
    inputs: list[Tensor]
    u: Tensors  # the outputs without a graph
    z: Tensors | None = None  # where f was evaluated in the forward pass, if the graph was kept

    def pull(self, a: Leaves) -> tuple[Sequence[Tensor | None], Tensor | None]:
        """a^T df/d(z, theta), and a^T df/dt where it is wanted; None where there is no dependence."""
        g = self.field.vjp(self.outputs, self.inputs, a)
        return (g[:-1], g[-1]) if self.field.wants_t else (g, None)


def raise_for_change(called: str) -> NoReturn:
    raise InvalidFieldError(f"{called} changes y in place, but y is the state itself, or y0: let it work on y.clone().")


def _is_followed(z: Tensors) -> bool:
    """Whether autograd records what is done with z."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in z)


def _fingerprint(u: Tensors) -> list[Tensor]:
    """A few numbers that tell one value of f from another."""
    return [number for x in u for number in (torch.linalg.vector_norm(x.detach()), x.detach().sum())]
