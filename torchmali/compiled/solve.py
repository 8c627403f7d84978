"""Solves whose loops are compiled: the moves of a direct solve (gradients/direct.py), made by machine code.

Each solve evaluates f once in Python, under a recorder (recording.py). Its record says which loops are the right ones,
and where the tensors are that they read: an attribute, a parameter or a closure that has changed is seen. Loops are
remembered by that record, by the shapes, dtypes and strides of all tensors, and by the modes of torch that count.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchmali.compiled.attempts import Attempts, tolerance_of
from torchmali.compiled.capture import OTHER_CALLS, Subject, capture
from torchmali.compiled.leapfrog import Code, CompiledLeapfrog, Outside, agrees
from torchmali.compiled.loops import Form, Loops
from torchmali.compiled.recording import CallRecorder, NotCompiledError
from torchmali.compiled.table import plan_of
from torchmali.compiled.traits import obstacle
from torchmali.controllers import AdaptiveStep, rms_norm
from torchmali.copies import copied
from torchmali.field.environment import in_forward_pass
from torchmali.field.evaluate import Field
from torchmali.gradients.base import Problem, Solved
from torchmali.gradients.direct import BackwardPath, Moves, NotDirectError, plain_schedule, solve_directly
from torchmali.gradients.replay import ReplayGradient
from torchmali.loop.schedule import Schedule
from torchmali.outputs.stored import StoredOutputs
from torchmali.refresh import N_VALUES
from torchmali.solvers.cotangent import Cotangent
from torchmali.solvers.leapfrog import Leapfrog
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors, add_

MANY = 64  # loops that are remembered; beyond this the oldest are forgotten


def solve_compiled(method: ReplayGradient, problem: Problem) -> Solved:
    """Solve a problem with compiled loops; raise NotCompiledError if it has to be solved eagerly."""
    reason = obstacle(problem)
    if reason is not None:
        raise NotCompiledError(reason)
    first, loops = _first_with_loops(problem)
    tensors, places = (_only(x, loops.event.used) for x in (first.outside, first.places))
    outside = Outside(places, [x for x, place in zip(tensors, places, strict=True) if place is None])
    if problem.wants_gradient and any([x.grad_fn is not None for x in outside.saved]):
        raise NotCompiledError("f reads a tensor that was computed outside it, and is not among its parameters")
    problem = problem._replace(field=first.field.settled())
    schedule, behaviour = plain_schedule(problem), problem.field.behaviour
    if schedule is not None and (behaviour is None or behaviour.is_calm):
        looks = isinstance(problem.solver, Leapfrog) and problem.solver.refresh_policy == "auto"
        try:
            return solve_directly(method, problem, schedule, CompiledMoves(loops, outside, first.u, looks))
        except NotDirectError:
            problem.field.is_restless()
            problem = problem._replace(field=first.field.settled(), outputs=problem.outputs.again())
    return ReplayGradient.solve(method, problem._replace(solver=_compiled_solver(problem, loops, outside, first.u)))


def _is_judged_plainly(controller: AdaptiveStep) -> bool:
    """Whether its error over the tolerance is that of `AdaptiveStep`: subclasses may have another one."""
    own, plain = type(controller), AdaptiveStep
    return own.begin is plain.begin and own.tolerances is plain.tolerances and controller.norm is rms_norm


def _compiled_solver(problem: Problem, loops: Loops, outside: Outside, first_value: Tensors) -> CompiledLeapfrog:
    solver, controller, sizes = problem.solver, problem.controller, [z.numel() for z in problem.z0]
    assert isinstance(solver, Leapfrog)
    if isinstance(controller, AdaptiveStep) and _is_judged_plainly(controller):
        judges, tolerance = True, tolerance_of(sizes, controller.rtol, controller.atol)
    else:
        judges, tolerance = False, tolerance_of(sizes, [0.0] * len(sizes), [0.0] * len(sizes))
    return CompiledLeapfrog.of(solver, Code(loops, Attempts(loops), outside, first_value, tolerance), judges)


class First(NamedTuple):
    """The first evaluation of f in a solve."""

    field: Field  # that knows what it showed
    u: Tensors
    calls: Sequence[Hashable]
    outside: Sequence[Tensor]  # the tensors that f read
    places: Sequence[int | None]  # where they are in field.theta; None: they get no gradient


def _first_with_loops(problem: Problem) -> tuple[First, Loops]:
    asks = problem.wants_gradient and _asks(problem.field.original)
    first = _evaluate_first(problem, is_followed=asks)
    try:
        return first, _loops_of(problem, first)
    except NotCompiledError as error:
        if str(error) != OTHER_CALLS or not problem.wants_gradient:
            raise
    # It may ask whether y requires a gradient, which y does where f is differentiated.
    followed = _evaluate_first(problem, is_followed=not asks)
    loops = _loops_of(problem, followed)
    if not asks:
        with contextlib.suppress(TypeError):  # no weak reference can be made to it
            _Remembered.asking.add(problem.field.original)
    return followed._replace(u=first.u), loops


def _asks(func: Callable) -> bool:
    """Whether a function is known to make other calls with a y that requires a gradient."""
    try:
        return func in _Remembered.asking
    except TypeError:
        return False


def _evaluate_first(problem: Problem, is_followed: bool = False) -> First:
    """is_followed: with a y that requires a gradient."""
    field = problem.field
    environment = field.environment
    found: list[CallRecorder] = []

    def recorded(t: Tensor, y: Any, *args: Any) -> Any:
        found[:] = [CallRecorder([t, *field.structure.flatten(y)])]
        with found[0]:
            u = field.func(t, y, *args)
        try:
            found[0].returned(field.structure.flatten(u))
        except ValueError:  # not of y's structure, as the field will say
            pass
        return u

    def run() -> tuple[Field, Tensors]:
        twin = field.with_function(recorded)
        u = twin(problem.times[0], tuple([z.detach().requires_grad_(is_followed) for z in problem.z0]))
        if environment.draws:
            raise NotCompiledError("f draws random numbers")
        if environment.changing or environment.lent:
            raise NotCompiledError("f changes a buffer, or a tensor in a closure")
        if environment.eps > environment.eps_of_state:
            raise NotCompiledError(
                "f computes in a precision lower than y's, and a compiled loop would round otherwise"
            )
        return twin.with_function(field.func), u

    with torch.no_grad(), _same_draws_later(problem):
        environment.source.begin(field.device)
        known, u = in_forward_pass([environment], run)
    (recorder,) = found
    outside = list(recorder.unknown.values())
    theta = {id(x): i for i, x in enumerate(known.theta)} if problem.wants_gradient else {}
    places = [theta.get(id(x)) for x in outside]
    return First(known, u, recorder.calls, outside, places)


@contextlib.contextmanager
def _same_draws_later(problem: Problem) -> Iterator[None]:
    """If a solve cannot be compiled, leave generators as they were: the eager one draws what it would have drawn."""
    given = problem.field.environment.source.given or torch.default_generator
    if problem.field.behaviour is not None:  # f is known to draw nothing
        yield
        return
    before = given.get_state()
    try:
        yield
    except NotCompiledError:
        if problem.field.environment.draws:
            given.set_state(before)
        raise


# ---- Which loops


class _Remembered:
    """The loops that were compiled, or the reasons why they could not be."""

    lock = threading.RLock()
    found: ClassVar[dict[Hashable, Loops | str]] = {}
    n_made: ClassVar[list[int]] = [0]
    asking: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()  # functions, see `_asks`


def forget_loops() -> None:
    """Forget all loops that were compiled."""
    with _Remembered.lock:
        _Remembered.found.clear()
        _Remembered.asking.clear()


def n_captured() -> int:
    """How often f was traced so far: a solve for which this stays the same compiled nothing."""
    return _Remembered.n_made[0]


def _loops_of(problem: Problem, first: First) -> Loops:
    """The loops of a solve, of the tensors from outside that they need."""
    field, known = first.field, _Remembered.found
    differentiates = problem.wants_gradient
    records = differentiates or field.looks_for_leaves or field.needs_graph
    kinds = tuple([(x.shape, x.dtype, x.stride(), x.device, type(x), x.requires_grad) for x in first.outside])
    state = tuple([(z.shape, z.dtype, z.stride()) for z in problem.z0])
    moves = tuple([place is not None for place in first.places])
    modes = torch.get_num_threads(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    key = tuple(first.calls), state, field.structure, kinds, moves, differentiates, records, modes
    with _Remembered.lock:
        loops = known.get(key)
        if loops is None:
            subject = Subject(field, problem.z0, first.outside, moves, first.calls, differentiates, records)
            loops = known[key] = _captured(subject)
            if len(known) > MANY:
                del known[next(iter(known))]
    if isinstance(loops, str):
        raise NotCompiledError(loops)
    return loops


def _captured(subject: Subject) -> Loops | str:
    _Remembered.n_made[0] += 1
    try:
        if any([type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) for x in subject.outside]):
            raise NotCompiledError("f reads a tensor of a class of its own")
        event = capture(subject)
    except NotCompiledError as reason:
        return str(reason)
    outside, moves = (_only(x, event.used) for x in (subject.outside, subject.moves))
    return Loops(event, Form(subject.z, outside, moves, subject.field.form.t_dtype))


def _only(x: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    return [part for part, is_wanted in zip(x, wanted, strict=True) if is_wanted]


# ---- The moves


class CompiledMoves(Moves):
    """The steps of a schedule, taken by compiled loops."""

    def __init__(self, loops: Loops, outside: Outside, first_value: Tensors, looks: bool):
        self.loops, self.looks, self.outside, self.first_value = loops, looks, outside, first_value
        self.saved = outside.saved

    def with_saved(self, saved: Sequence[Tensor]) -> Moves:
        return copied(self, saved=saved, outside=self.outside._replace(saved=saved), first_value=())

    def forward(self, problem: Problem, schedule: Schedule) -> tuple[StoredOutputs, Floats]:
        loops, field, times, outputs = self.loops, problem.field, problem.times, problem.outputs
        assert isinstance(outputs, StoredOutputs) and isinstance(problem.solver, Leapfrog)
        plan, outside = plan_of(problem.solver, schedule, tuple(times)), self.outside.tensors(field)
        z0 = tuple([z.detach() for z in problem.z0])
        outputs.record(0, times[0], z0)
        values: Sequence[Tensor] = loops.zero_state * N_VALUES if self.looks else ()
        z, v, values, _ = loops.forward(plan.start, plan.first, z0, loops.zero_state, values, outside)
        if not agrees(v, self.first_value):
            raise NotDirectError
        for leg in plan.forward:
            for piece in leg.pieces:
                z, v, values, alternates = loops.forward(piece, plan.first, z, v, values, outside)
                if alternates is not None and alternates.item():
                    raise NotDirectError
            add_(z, v, leg.rest)
            assert leg.output is not None
            outputs.record(leg.output, times[leg.output], z)
        field.count(plan.n_reflects)
        return outputs, Floats(z, v)

    def backward(self, back: BackwardPath) -> tuple[Cotangent, Floats, Floats]:
        loops, n, f = self.loops, len(back.z0), back.f
        plan, outside = plan_of(back.solver, back.schedule, tuple(back.times)), self.outside.tensors(f)
        state = [*back.end.point, *back.end.slope, *loops.fresh_zeros(), *loops.zero_state, *loops.zero_sums()]
        with torch.no_grad():
            for leg in plan.backward:
                back.add_output(leg.output, state[2 * n : 3 * n])
                for piece in leg.pieces:
                    state = list(loops.backward(piece, plan.first, state, outside))
                z, v, az, av = (state[i * n : (i + 1) * n] for i in range(4))
                add_(av, az, leg.rest)
                add_(z, v, -leg.rest)
            rebuilt = Floats(tuple(state[:n]), tuple(state[n : 2 * n]))
            back.add_output(0, state[2 * n : 3 * n])
            state[: 2 * n] = [*back.z0, *loops.zero_state]
            state = list(loops.backward(plan.start, plan.first, state, outside))
        f.count(plan.n_reflects + 1, plan.n_reflects + 1)
        z, v, az, av, sums = (*(state[i * n : (i + 1) * n] for i in range(4)), state[4 * n :])
        return Cotangent(az, av, self._gradients(f, sums), (), ()), rebuilt, Floats(back.z0, tuple(v))

    def _gradients(self, field: Field, sums: Sequence[Tensor]) -> list[Tensor | None]:
        """dL/dtheta from the sums of a loop."""
        theta: list[Tensor | None] = [None] * len(field.theta)
        moving = [place for place in self.outside.places if place is not None]
        for place, g in zip(moving, self.loops.gradients(sums), strict=True):
            theta[place] = g
        return theta
