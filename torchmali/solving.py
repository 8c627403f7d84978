"""`solve`: the checks of a call, and the objects that a gradient method needs."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch
from torch import Generator, Tensor
from torch.nn.parameter import is_lazy

from torchmali._torch import break_graph
from torchmali.code import Code
from torchmali.compiled.in_graph import in_graph, is_followed, like_state
from torchmali.compiled.recording import NotCompiledError
from torchmali.controllers import AdaptiveStep, StepController
from torchmali.errors import (
    IncompatibleError,
    InvalidFieldError,
    InvalidOptionError,
    InvalidStateError,
    InvalidTimesError,
    warn,
)
from torchmali.events import EventFunctions, differentiable_root, events_of
from torchmali.field.evaluate import Field, time_dtype
from torchmali.field.randomness import Source
from torchmali.gradients.adjoint import Adjoint
from torchmali.gradients.base import GradientMethod, Problem, Solved, has_tangent
from torchmali.gradients.mali import MALI
from torchmali.gradients.naive import Naive
from torchmali.jumps import checked_jumps
from torchmali.outputs.base import Outputs
from torchmali.outputs.dense import DenseOutputs
from torchmali.outputs.observed import ObservedOutputs, Observer
from torchmali.outputs.observed_samples import ObservedSamples, wanted_arguments
from torchmali.outputs.per_sample import SampleOutputs, SampleTimes
from torchmali.outputs.stored import StoredOutputs
from torchmali.outputs.until_event import Detector, EventOutputs
from torchmali.solution import Solution
from torchmali.solvers.base import InterpolatingSolver, Solver
from torchmali.solvers.leapfrog import ALF
from torchmali.spans import OwnSpans, is_of_samples, own_spans
from torchmali.state.vectors import Tensors, eps_of
from torchmali.tree import Structure

IN_GRAPH = {"solver", "controller", "gradient", "args", "buffers", "spans", "compile"}
P = ParamSpec("P")
R = TypeVar("R")
LARGEST_RATIO = 100 * eps_of(torch.float32)  # of a time to the span above which f may not tell times apart


def outside_graphs(run: Callable[P, R]) -> Callable[P, R]:
    """Under torch.compile a solve is one operation of the graph, if it can be, or else one break between graphs.

    (f may be compiled itself.)
    """

    @functools.wraps(run)
    def outside(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return run(*args, **kwargs)
        followed: Any = _in_graph
        found = followed(*args, **kwargs) if is_followed() else None
        if found is not None:
            return found
        # Decided at the call: torch.compiler.disable imports what takes a second.
        now: Any = torch.compiler.disable(run)
        return now(*args, **kwargs)

    return outside


def _in_graph(func: Any, y0: Any, t: Any, **how: Any) -> Any:
    """The solution with y alone, as an operation of the graph that torch.compile makes; None: it cannot be one."""
    if not how.keys() <= IN_GRAPH:
        return break_graph(f"torchmali: in a graph, solve has the options {sorted(IN_GRAPH)} alone (docs/compile.md).")
    leaves = in_graph(_leaves, state_likes, func, "", (y0, t, how))
    if leaves is None:
        return None
    times: Any = t if isinstance(t, Tensor) else torch.tensor(t, dtype=torch.float64)
    stats: Any = None  # they are known when the graph has run
    return Solution(times, Structure.of(y0).rebuild(leaves), stats)


def _leaves(func: Callable, y0: Any, t: Any, how: dict[str, Any]) -> tuple[Tensor, ...]:
    return Structure.of(y0).flatten(solve(func, y0, t, **how).y)


def state_likes(func: Callable, y0: Any, t: Any, how: dict[str, Any]) -> list[Tensor]:
    """Tensors like the leaves of y at all times."""
    return [like_state(x, len(t)) for x in Structure.of(y0).flatten(y0)]


@outside_graphs
def solve(
    func: Callable,
    y0: Any,
    t: Tensor | Sequence[float],
    *,
    solver: Solver = ALF(),  # noqa: B008 (solvers, controllers and gradient methods are immutable values)
    controller: StepController = AdaptiveStep(1e-3, 1e-4),  # noqa: B008
    gradient: GradientMethod = MALI(),  # noqa: B008
    args: tuple = (),
    params: Iterable[Tensor] | None = None,
    buffers: str = "update",
    observe: Callable | None = None,
    outputs: Outputs | None = None,
    event: Any = None,
    on_no_event: str = "raise",
    return_code: bool = False,
    dense: bool = False,
    generator: Generator | None = None,
    randomness: str = "same",
    jumps: Sequence[float] | Tensor = (),
    spans: str = "common",
    compile: bool = False,
) -> Solution:
    """Solve dy/dt = func(t, y, *args) from y(t[0]) = y0 and return y at all times t, differentiable.

    y0: a tensor, or any nested tuple, list or dict of float32 or float64 tensors; func returns the same structure.
    Gradients flow to y0, to the tensors in args, to t, and to the parameters found in func (modules, bound methods,
    partials, closures), or to those listed in `params`.

    t: two or more times, increasing or decreasing. A tensor of shape (times, samples) gives each sample of the batch
    (dimension 0 of every leaf of y0) output times of its own, sorted, nan where it has none; t[0] is the common start.
    All samples share one grid of steps, and y has leaves of shape (times, samples, ...), nan where t is. dL/dt is 0
    there.

    spans: with "own", each sample of a t of shape (times, samples) goes from a start t[0] of its own to its last time,
    forwards or backwards. All spans are divided into steps in the same proportions; sizes of steps, in controllers and
    `stats`, are those of the sample with the longest span. f is evaluated at the time of each sample: it receives t of
    shape (samples, 1, ...), with as many dimensions as the largest leaf of y, and returns dy/dt as always. A span of
    length 0 leaves y0 as it is. With two rows (a start and an end) any controller, solver and gradient method will do.
    `event`, `dense`, `jumps`, `outputs` and `return_code` are refused.

    f runs under the autocast that is on around this call, in the backward pass too. buffers: "update" lets each
    evaluation of an accepted step update the running statistics of modules in f, "freeze" none.

    generator: where f's random numbers (dropout, noise) come from; None: a generator that gets its seed from PyTorch's
    default one. `generator` moves on as if f had been evaluated once. randomness: with "same" all evaluations of a
    solve and of its backward pass draw the same numbers, so that f is one function of t and y. With "different" each
    evaluation draws new ones, from `generator` or from the default one: for gradient=Naive() only, where nothing
    is evaluated again. (The names are those of torch.func.vmap.)

    observe: a function of (t, y), or of (t, y, k) with y = y(t[k]), that returns a tensor. Instead of keeping y at all
    times, its sum over them is returned as `observed`, differentiable (by its parameters, too), and y at the last time
    as y[-1]: with MALI and Adjoint no tensors are kept for the times.

    With times of each sample, observe receives t of shape (samples,) and returns a row for each sample, which must
    depend on that row of t and y alone. `observed` has a row for each sample, the sum over its times, and y[-1] has y
    at the last time of each. A call holds one output of some samples, in no order that should matter. `mask` (samples,)
    says of which, and `k` (samples,) which of its times it is: they are given if observe has arguments called `mask`
    and `k`. The other rows hold the start, with k = 0. They do not count, nor do they get a gradient.

    outputs: an object that makes something else of the solution than y at all times (docs/extending.md). It is given in
    place of `observe`.

    event: a function g(t, y, *args) that returns a tensor of any shape, an Event (which may have a direction, or let
    the solve go on), or a list of both. The solve ends where a component of g first changes its sign: at `event_t`; y
    there is `event_y`. Both have first derivatives by all that y has, and by the parameters of g. `event_index` says
    which event of the list it was, and which component of its flattened value. `t` and `y` are cut to the output times
    up to event_t. `event_times` has for each event the times of its roots, without gradients. on_no_event: without an
    event until t[-1], "raise" an EventNotFoundError, or "flag" it: event_t is None.

    Signs of g are compared at the ends of each step and at four points inside it, and the root is found there to
    round-off, on the interpolant of the step: f is not evaluated for it, unless the interpolant itself needs a stage
    (three with Dopri8). Two roots between neighbouring points are not seen (docs/limits.md): use shorter steps. If g is
    zero at t[0], the sign that it takes on after t[0] counts. g is one event for all samples of a batch. It must be a
    plain function, without random numbers and without buffers that change. With `observe`, the sum is over the output
    times up to the event, and y is event_y, as y[-1]. Events go with `jumps`, not with `dense` or times of each sample.

    jumps: times at which f, not y, is discontinuous, in any order. Steps end on each of them, and f is evaluated on the
    side on which the step lies, whatever its value at the jump itself; behind a jump no slope from before it is used
    (leapfrogs evaluate f once more there, and keep one state where a backward pass follows). Jumps get no gradient. An
    output time at a jump gets that of the two moving together.

    return_code: also return the integer end state, `code`, from which `solve_back(func, code)` gets y0 to the last bit.

    compile: make both loops of MALI machine code, in fixed or adaptive steps of an undamped leapfrog. Other solves
    (`event`, `dense`, `jumps`), and an f that cannot be traced (one that draws random numbers, or branches on t or y),
    run as without it, and a warning says why. The first solve takes seconds. Later ones with the same f compile
    nothing, whatever their steps, tolerances, times and parameters; other shapes, or an attribute of f that is another
    number, do (docs/compile.md).

    dense: the solution can be called, `solution(t)`, for y at any time between t[0] and t[-1], from the interpolant of
    the step that holds it, and `solution(t, derivative=True)` for dy/dt. The steps are those of a solve without it;
    Dopri8 takes four evaluations more in each, a method whose interpolant needs the slope at the end one more in all.
    Memory: for every step one state and all stages to which the interpolant gives a weight (2 for ALF, 6 for Dopri5),
    and what the gradient method keeps besides. Gradients of solution(t) flow wherever those of y do, and to the t that
    it is given, with gradient=ACA() and Naive(). Other methods give values only, where no gradient is wanted.
    """
    _check_parts(solver, controller, gradient, return_code)
    if not (outputs is None and event is None and on_no_event == "raise" and not dense):
        _check_outputs(outputs, observe)
        _check_event(event, on_no_event, solver, outputs, dense)
        _check_dense(dense, solver, outputs, observe)
    source = _source(generator, randomness, gradient)
    structure = Structure.of(y0)
    z0 = _checked_state(structure.flatten(y0))
    controller = controller.bind(structure)
    _warn_of_tolerance(controller, z0)
    no_jumps = isinstance(jumps, tuple) and not jumps
    own = None
    if spans != "common":
        others = {"event": event is not None, "outputs": outputs is not None, "jumps": not no_jumps, "dense": dense}
        own = own_spans(spans, t, z0, time_dtype(z0), {**others, "return_code": return_code})
    t_out, times, t_moving, samples = _times_of(t, z0, own, observe)
    if samples is not None:
        _check_sample_times(solver, controller, gradient, (outputs, dense or None, event))
    _warn_of_times(times if own is None else own.tightest, z0)
    found = None if no_jumps else checked_jumps(jumps, times, time_dtype(z0))
    _check_args(args)
    if own is not None:
        func, args = own.slope(func, structure), (own.line, *args)
    looks_for_leaves = torch.is_grad_enabled() and not isinstance(gradient, Naive)
    how = func, z0, structure, args, params, buffers, source, looks_for_leaves, gradient.compares_first_value
    field = Field(*how, remembers=True, jumps=found)
    observer = (
        None if observe is None else _observer_of(observe, samples, own, (z0, structure, source, looks_for_leaves))
    )
    _check_processes(field, observer, solver, controller, gradient, event)
    if looks_for_leaves:
        _check_lazy(field, observer)
    wants_t = t_moving.requires_grad or has_tangent(t_moving)
    if dense and isinstance(solver, InterpolatingSolver):
        interpolants = solver.interpolant_of(closes=False), solver.interpolant_of(closes=True)
        outputs = DenseOutputs(len(times), len(z0), interpolants, wants_t)
    functions = None if event is None else EventFunctions(events_of(event), field.scalar, structure, args)
    outputs = _outputs_of(outputs, observer, samples, functions, len(times))
    problem = Problem(field, z0, times, t_moving if wants_t else None, solver, controller, outputs, return_code)
    if dense:
        _check_gradient_of_dense(problem, gradient)
    make_field = functools.partial(Field, *how, jumps=found)
    (results, stats, done), outputs = _solved(problem, gradient, make_field, compile)
    y, observed = outputs.solution(results)
    y = y if own is None or observe is not None else own.masked(y)
    code = Code.of(done.state, done.tape, solver, structure, args, found) if return_code else None
    trajectory = outputs.trajectory(results, structure, t_out)
    solution = Solution(t_out, structure.rebuild(y), stats, observed, code, trajectory)
    return solution if event is None else _with_event(solution, outputs, results, on_no_event)


def _solved(
    problem: Problem, gradient: GradientMethod, make_field: Callable[..., Field], compile: bool
) -> tuple[Solved, Outputs]:
    """Solve a problem; return its outputs too. make_field: makes the field once more."""
    if compile:
        try:
            return gradient.solve_compiled(problem), problem.outputs
        except NotCompiledError as reason:
            if str(reason):
                warn(f"compile=True: this solve runs without it. {reason}.")
        except Exception as error:
            if not problem.field.was_misjudged(error):
                raise
        problem = problem._replace(field=make_field(remembers=True), outputs=problem.outputs.again())
    try:
        return gradient.solve(problem), problem.outputs
    except Exception as error:
        if not problem.field.was_misjudged(error):
            raise
    # f has changed since its behaviour was remembered: it is looked at again.
    problem = problem._replace(field=make_field(), outputs=problem.outputs.again())
    return gradient.solve(problem), problem.outputs


def _check_parts(solver: Any, controller: Any, gradient: Any, return_code: bool) -> None:
    for name, value, base in (
        ("solver", solver, Solver),
        ("controller", controller, StepController),
        ("gradient", gradient, GradientMethod),
    ):
        if not isinstance(value, base):
            raise InvalidOptionError(
                f"{name}={value!r} is not a {base.__name__}: give an object such as solver=ALF(), "
                "controller=FixedStep(0.1), gradient=MALI(). (Names as strings are understood by odeint.)"
            )
    gradient.check(solver, controller)
    if return_code and not gradient.on_integers:
        raise IncompatibleError(
            f"return_code=True needs a solve on integers: gradient=MALI(exact=True), not {gradient}."
        )


def _check_event(event: Any, on_no_event: str, solver: Solver, outputs: Any, dense: bool) -> None:
    if on_no_event not in ("raise", "flag"):
        raise InvalidOptionError(f'on_no_event={on_no_event!r}: "raise" (an error) or "flag" (event_t is None).')
    if event is None:
        return
    events_of(event)
    if not isinstance(solver, InterpolatingSolver):
        raise IncompatibleError(
            f"Events are found on the interpolant of a step, but {type(solver).__name__} has none. Use solver=ALF(), "
            "ALF(order=4), Dopri5() or another Runge-Kutta solver."
        )
    if outputs is not None:
        raise InvalidOptionError("outputs=... cannot end at an event=...: give one of the two, or observe=... .")
    if dense:
        raise IncompatibleError(
            "dense=True keeps whole steps, but an event=... ends the solve inside of one: give one of the two. For a "
            "dense solution up to an event, solve a second time, until event_t.detach()."
        )


def _with_event(solution: Solution, outputs: Outputs, results: Tensors, on_no_event: str) -> Solution:
    """Return the solution with the event at which it ended."""
    assert isinstance(outputs, EventOutputs)
    detector, t, root = outputs.detector, solution.t, outputs.root
    assert detector is not None
    functions = detector.functions
    kind: Any = {"dtype": t.dtype if t.is_floating_point() else torch.float64, "device": t.device}
    times = [torch.tensor(found, **kind) for found in detector.found]
    if root is None or outputs.event_at is None:
        if on_no_event == "raise" and any(event.terminal for event in functions.events):
            detector.raise_for_none()
        return solution._replace(event_times=times)
    now = torch.tensor(root.t, **kind)
    event_t, event_z = differentiable_root(root, now, results[-outputs.n_leaves :], functions)
    event_y = functions.structure.rebuild(event_z)
    y = solution.y if outputs.keeps_states else functions.structure.rebuild([z[None] for z in event_z])
    index = root.event, root.component
    return solution._replace(
        t=t[: outputs.event_at], y=y, event_t=event_t, event_y=event_y, event_index=index, event_times=times
    )


def _check_dense(dense: bool, solver: Solver, outputs: Any, observe: Any) -> None:
    if not dense:
        return
    if not isinstance(solver, InterpolatingSolver):
        raise IncompatibleError(
            f"dense=True needs a solver with an interpolant of its steps, but {solver} has none. Use ALF() or a "
            "Runge-Kutta solver such as Dopri5(), or give all times in t=."
        )
    if outputs is not None or observe is not None:
        name = "observe" if outputs is None else "outputs"
        raise InvalidOptionError(
            f"dense=True keeps every step, {name}=... something else in place of y: give one of the two. (A dense "
            "solution can be called at any time after the solve.)"
        )


def _check_gradient_of_dense(problem: Problem, gradient: GradientMethod) -> None:
    reason = gradient.obstacle_to_dense
    if reason is not None and problem.wants_gradient:
        raise IncompatibleError(
            f"dense=True keeps the stages of every step, which {gradient} does not differentiate: {reason}. In place "
            "of solution(t), give the times in t=, or a function of (t, y) as observe=. Or use gradient=ACA(), in "
            "memory of all steps; or torch.no_grad() around the solve, if no gradient is wanted."
        )


class Times(NamedTuple):
    """The times of a call."""

    given: Tensor
    numbers: list[float]  # in the order of the solve
    moving: Tensor  # these as a tensor that autograd follows
    samples: SampleTimes | None  # if each sample has its own


def _times_of(t: Any, z0: Tensors, own: OwnSpans | None, observe: Any) -> Times:
    if own is not None and len(t) == 2 and observe is None:
        # All spans end at the same common time: no times of each sample are left.
        numbers = [0.0, own.longest]
        return Times(t, numbers, torch.tensor(numbers, dtype=torch.float64), None)
    if is_of_samples(t):
        samples = SampleTimes(t if own is None else own.s, z0)
        return Times(t, samples.times, samples.sequence(), samples)
    given, numbers = _checked_times(t)
    return Times(given, numbers, given, None)


def _observer_of(observe: Callable, samples: SampleTimes | None, own: OwnSpans | None, how: tuple) -> Observer:
    if samples is None:
        return Observer(observe, *how)
    in_time = observe if own is None else own.observer(observe)
    return Observer(in_time, *how, wanted=wanted_arguments(observe), n_samples=samples.shape[1])


def _outputs_of(
    given: Outputs | None, observer: Observer | None, samples: SampleTimes | None, events: EventFunctions | None, n: int
) -> Outputs:
    """What is recorded in a solve with n output times."""
    if samples is not None and observer is not None:
        return ObservedSamples(observer, samples.rows, samples.samples)
    if samples is not None:
        return SampleOutputs(samples.shape, samples.rows, samples.samples)
    if observer is not None:
        found = ObservedOutputs(observer, n)
    else:
        found = StoredOutputs(n) if given is None else given.again()  # the given object stays as it is
    return found if events is None else EventOutputs(found, Detector(events), events.structure.spec.num_leaves)


def _check_sample_times(solver: Solver, controller: StepController, gradient: GradientMethod, others: tuple) -> None:
    """Raise if outputs at times of each sample's own are not possible."""
    if any(x is not None for x in others):
        raise IncompatibleError(
            "t of shape (times, samples) returns y at the times of each sample, nan where t is, or the sum of "
            "observe=: leave outputs=, dense= and event= out."
        )
    if isinstance(gradient, Adjoint):
        raise IncompatibleError(
            "Adjoint() begins anew at each output time, and with times of each sample there are too many of them. Use "
            "MALI(), ACA() or Naive()."
        )
    if controller.ends_on_outputs(solver):
        raise IncompatibleError(
            "t of shape (times, samples) is read from the interpolants of steps that all samples share, but with "
            f"{controller!r} and {type(solver).__name__} steps end on every output time. Use AdaptiveStep(...) or "
            "FixedStep(h, land=False), and a solver with an interpolant."
        )


def _check_args(args: Any) -> None:
    got = type(args).__name__
    if not isinstance(args, tuple):
        raise InvalidOptionError(f"args must be a tuple of further arguments of f, as in args=(x,); got a {got}.")


def _check_outputs(outputs: Any, observe: Any) -> None:
    if outputs is None:
        return
    if not isinstance(outputs, Outputs):
        raise InvalidOptionError(f"outputs={outputs!r} is not an Outputs: give an object of a subclass of Outputs.")
    if observe is not None:
        raise InvalidOptionError(
            "observe=... and outputs=... both say what becomes of y at the output times: give one of the two."
        )


def _check_lazy(field: Field, observer: Observer | None) -> None:
    """Raise if a function cannot be differentiated before it has been called. One that is known has been."""
    theta = [*(field.theta if field.behaviour is None else ()), *(() if observer is None else observer.theta)]
    if any(map(is_lazy, theta)):
        raise InvalidFieldError(
            "f has parameters without a shape yet, of a lazy module: call f once, with y0, before the first solve."
        )


def _check_processes(
    field: Field,
    observer: Observer | None,
    solver: Solver,
    controller: StepController,
    gradient: GradientMethod,
    event: Any,
) -> None:
    """Raise if processes that wait for each other could make different numbers of evaluations."""
    if observer is None and not field.environment.modules:
        return
    waits = field.environment.synchronises or (observer is not None and observer.environment.synchronises)
    parts = gradient.data_dependent_parts(solver, controller) if waits else []
    parts += ["event=..."] if waits and event is not None else []
    if parts:
        raise IncompatibleError(
            "A SyncBatchNorm makes each evaluation wait for the same one in all processes, but with "
            f"{', with '.join(parts)} their number depends on the data of each process: they would wait forever."
        )


def _source(generator: Any, randomness: Any, gradient: GradientMethod) -> Source:
    if generator is None and randomness == "same":
        return Source()
    if generator is not None and not isinstance(generator, Generator):
        raise InvalidOptionError(
            f"generator={generator!r}: give a torch.Generator, as in generator=torch.Generator().manual_seed(0)."
        )
    if randomness not in ("same", "different"):
        raise InvalidOptionError(
            f'randomness={randomness!r}: "same" (numbers in all evaluations of f) or "different" (in each).'
        )
    if randomness != "same" and not isinstance(gradient, Naive):
        raise IncompatibleError(
            f'randomness="different" draws new random numbers at every evaluation of f, but {type(gradient).__name__} '
            'evaluates f again in the backward pass and needs the old ones. Use gradient=Naive(), or randomness="same".'
        )
    return Source(generator, is_fresh=randomness == "different")


def _is_usual(z: Any) -> bool:
    """Whether a leaf of y0 can be used as it is, as most can."""
    return isinstance(z, Tensor) and z.dtype in (torch.float32, torch.float64) and z.is_contiguous()


def _uncast(z: Any) -> Any:
    """Under autocast the layer before may have made y0 a bfloat16: the state is a float32 all the same."""
    is_low = isinstance(z, Tensor) and z.dtype in (torch.bfloat16, torch.float16)
    return z.float() if is_low and torch.is_autocast_enabled(z.device.type) else z


def _dense(z: Any) -> Any:
    """A copy of a leaf whose elements overlap or have gaps between them: the states of a solve have neither.

    Random numbers that f draws for y follow its memory layout, which must be the same for all states.
    """
    if not isinstance(z, Tensor) or z.is_contiguous() or z.stride() == torch.empty_like(z, device="meta").stride():
        return z
    return z.clone()


def _checked_state(leaves: tuple) -> Tensors:
    """The leaves of y0, in a form that a solve can use."""
    if leaves and all([_is_usual(z) for z in leaves]):
        return leaves
    z0 = tuple([_dense(_uncast(z)) for z in leaves])
    if not z0:
        raise InvalidStateError("y0 has no leaves: give at least one tensor.")
    for i, z in enumerate(z0):
        of = f"leaf {i} of y0" if len(z0) > 1 else "y0"
        if not isinstance(z, Tensor):
            raise InvalidStateError(f"{of} is a {type(z).__name__}: the state must be made of torch tensors.")
        if z.dtype in (torch.bfloat16, torch.float16):
            raise InvalidStateError(
                f"{of} has dtype {z.dtype}, too coarse for a state that sums many small steps. Keep the state in "
                "float32 and call this under torch.autocast: then f alone runs in low precision. (odeint takes "
                "such a y0, and carries it in float32.)"
            )
        if z.dtype not in (torch.float32, torch.float64):
            raise InvalidStateError(
                f"{of} has dtype {z.dtype}: use a float32 or float64 state (torch.view_as_real for a complex one, "
                "or odeint)."
            )
    return z0


def _warn_of_tolerance(controller: StepController, z0: Tensors) -> None:
    if not isinstance(controller, AdaptiveStep) or not controller.warns_of_tolerance:
        return
    for rtol, z in zip(controller.rtol, z0, strict=True):
        limit = 100 * torch.finfo(z.dtype).eps
        if 0 < rtol < limit:
            warn(
                f"rtol = {rtol:g} is below 100 eps = {limit:.1e} of a {z.dtype} state: round-off may be mistaken for "
                "error and the step size underflow. Use a larger rtol, or a float64 state."
            )
            return


def _warn_of_times(times: list[float], z0: Tensors) -> None:
    largest = max(abs(times[0]), abs(times[-1]))
    if abs(times[-1] - times[0]) >= largest * LARGEST_RATIO:
        return
    eps = eps_of(time_dtype(z0))
    if abs(times[-1] - times[0]) < 100 * eps * largest:
        warn(
            f"t goes from {times[0]:.10g} to {times[-1]:.10g}, but f sees it in the precision of y, which tells times "
            f"{eps * largest:.2g} apart there. Count t from its start, or use a float64 state."
        )


def _checked_times(t: Any) -> tuple[Tensor, list[float]]:
    if isinstance(t, (list, tuple)):
        if any([isinstance(x, Tensor) for x in t]):
            t = torch.stack([x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for x in t])
        elif all([type(x) in (float, int) for x in t]):
            return torch.tensor(t, dtype=torch.float64), _ordered([float(x) for x in t])
    if not isinstance(t, Tensor):
        t = torch.as_tensor(t, dtype=torch.float64)
    if t.ndim != 1:
        raise InvalidTimesError(f"t must be one-dimensional, a sequence of times; got shape {tuple(t.shape)}.")
    is_readable = t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64)
    return t, _ordered(t.tolist() if is_readable else t.detach().to("cpu", torch.float64).tolist())


def _ordered(times: list[float]) -> list[float]:
    later = times[1:]
    in_order = all(map(operator.lt, times, later)) or all(map(operator.gt, times, later))
    if len(times) < 2 or not in_order or not all(map(math.isfinite, times)):
        _raise_for_times(times)
    return times


def _raise_for_times(times: list[float]) -> NoReturn:
    """Say what is wrong with times that are not in order, not finite or too few."""
    if len(times) < 2:
        raise InvalidTimesError(f"t needs a start and at least one output time; got {len(times)}.")
    k = next((k for k, t in enumerate(times) if not math.isfinite(t)), -1)
    if k >= 0:
        raise InvalidTimesError(f"t must be finite; got t[{k}] = {times[k]}.")
    forward = times[1] > times[0]
    k = next(k for k, (a, b) in enumerate(pairwise(times)) if a == b or (b > a) != forward)
    where = f"t[{k}] = {times[k]:g}, t[{k + 1}] = {times[k + 1]:g}"
    if times[k] == times[k + 1]:
        raise InvalidTimesError(f"t repeats a time: {where}. Give each output time once.")
    raise InvalidTimesError(f"t must be increasing or decreasing throughout: {where}. Sort it.")
