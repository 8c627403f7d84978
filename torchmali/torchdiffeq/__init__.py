"""torchdiffeq's functions, on top of `solve`: `import torchmali.torchdiffeq as torchdiffeq`.

`odeint`, `odeint_adjoint`, `odeint_event` and `odeint_dense` have the arguments, options and results of torchdiffeq
0.2.5. docs/coming-from-torchdiffeq.md lists them all, and says where the two differ.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from torchmali._torch import break_graph
from torchmali.compiled.in_graph import in_graph, is_followed
from torchmali.controllers import FixedStep, StepController
from torchmali.errors import InvalidOptionError, InvalidTimesError, SlopeMismatchError
from torchmali.events import Event
from torchmali.gradients.adjoint import Adjoint
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.gradients.naive import Naive
from torchmali.solution import Solution
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF, leapfrog_for
from torchmali.solving import solve, state_likes
from torchmali.state.vectors import Tensors
from torchmali.torchdiffeq.callbacks import tensors_of
from torchmali.torchdiffeq.controllers import GridStep
from torchmali.torchdiffeq.forms import LOW, Form, converted
from torchmali.torchdiffeq.methods import ADAPTIVE, GRADIENTS, METHODS, SOLVERS, gradient_named, solver_named
from torchmali.torchdiffeq.options import MANY_STEPS, Call, Steps, smallest, steps_of
from torchmali.tree import Structure

__all__ = ["GRADIENTS", "METHODS", "SOLVERS", "odeint", "odeint_adjoint", "odeint_dense", "odeint_event"]

# With event_fn the end time is not known, and a solve needs one. One far away is better than several solves over longer
# and longer spans: no step is cut short, and there is one tape. Adaptive steps depend on it only if they are as long,
# or below 1e-16 times as long (the least that a controller takes for a step); their number is limited in any case.
FAR = 1e9  # times |t0|, or 1
P = ParamSpec("P")


def in_graphs(interface: Callable[P, Any]) -> Callable[P, Any]:
    """Under torch.compile a call is one operation of the graph, if it can be (compiled/in_graph.py)."""

    def leaves(func: Callable, y0: Any, t: Any, how: dict[str, Any]) -> tuple[Tensor, ...]:
        call: Any = interface
        return Structure.of(y0).flatten(call(func, y0, t, **how))

    def operation(func: Any, y0: Any, t: Any, **how: Any) -> Any:
        given = how.keys() & {"params", "adjoint_params", "event_fn"}
        if given:
            return break_graph(f"torchmali: odeint with {sorted(given)} is not part of a graph (docs/compile.md).")
        low = [x for x in Structure.of(y0).flatten(y0) if x.dtype in LOW]
        if low and not torch.is_autocast_enabled(low[0].device.type):
            return break_graph("torchmali: odeint of y0 in low precision is not part of a graph (docs/compile.md).")
        found = in_graph(leaves, state_likes, func, "", (y0, t, how))
        return None if found is None else Structure.of(y0).rebuild(found)

    @functools.wraps(interface)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        followed: Any = operation
        y = followed(*args, **kwargs) if is_followed() else None
        return interface(*args, **kwargs) if y is None else y

    return call


@in_graphs
def odeint(
    func: Callable,
    y0: Any,
    t: Tensor | Sequence[float],
    *,
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    method: str | Solver | None = None,
    options: Mapping[str, Any] | None = None,
    event_fn: Callable | None = None,
    gradient: str | GradientMethod | None = None,
    args: tuple = (),
    params: Iterable[Tensor] | None = None,
    compile: bool = False,
) -> Any:
    """torchdiffeq's `odeint`, with `gradient` to choose the gradient method; returns y, time first.

    y0: a tensor, or a tree of them, of any real or complex floating-point type. float16 and bfloat16 are carried in
    float32, complex numbers as pairs of real ones: f and the results have the dtype of y0.

    method: with tolerances "dopri5" (default), "tsit5", "dopri8", "bosh3", "fehlberg2", "adaptive_heun"; in fixed steps
    "euler", "midpoint", "heun2", "heun3", "rk4" (3/8 rule), "rk4_classic", "explicit_adams", "implicit_adams"
    (= "fixed_adams"); either way "alf", "alf4", "alf4_5", "alf6", "alf6_14"; "scipy_solver" (without gradients); or a
    solver. With gradient="mali" the default is `leapfrog_for(rtol)` ("alf4_5", and below 1e-5 "alf6_14" if y is wanted
    at the end alone), with a step_size "alf". gradient: "naive" (default), "aca", "mali", "adjoint", "seminorm", or a
    gradient method.

    rtol, atol: numbers, one for each leaf of a tree, or tensors of them for single elements. options, with tolerances:
    first_step, safety, ifactor, dfactor, min_step, max_step, max_num_steps, norm, step_t, jump_t; in fixed steps:
    step_size or grid_constructor, interp, perturb, step_t, jump_t; max_order, max_iters (Adams); solver (scipy_solver).
    Others are ignored, with a warning. Adaptive steps and those of a step_size do not end on output times: outputs
    between them are interpolated. Fixed methods without a step_size take one step from each output time to the next.

    Random numbers that f draws are new ones at each evaluation with the "naive" gradient, as in torchdiffeq, and the
    same at all evaluations of a solve with the others. callback_step, callback_accept_step and callback_reject_step are
    called if func has them. event_fn: a function of (t, y). The solve goes on until one of its components changes its
    sign, and returns (event_t, y at t[0] and at event_t), both differentiable; of the other times only t[1] counts,
    which says in which direction. `solve(event=...)` can do more. compile: see `solve`; as in odeint(..., method="alf",
    gradient="mali", options={"step_size": 0.1}, compile=True), with two times, or a step from each time to the next.
    """
    form, chosen = Form.of(y0), gradient_named(gradient)
    if event_fn is None and _n_times(t) == 1:
        return form.structure.rebuild([x[None] for x in form.structure.flatten(y0)])
    call = Call(func, y0, as_times(t), form, rtol, atol, options, event_fn is not None)
    solver = solver_named(method, _default_solver(chosen, call))
    steps = steps_of(solver, isinstance(method, str) or method is None, call)
    how = {"gradient": chosen, "args": args, "params": params, "compile": compile}
    if event_fn is None:
        return form.outside(_solved(call, t, steps, how).y)
    event = Event(lambda t, y, *args: event_fn(form.time(t), form.outside(y)))
    solution = _solved(call, _without_end(call.t, steps.controller), steps, {**how, "event": event})
    pairs = zip(form.structure.flatten(solution.y), form.structure.flatten(solution.event_y), strict=True)
    y = form.structure.rebuild([torch.stack([y[0], end]) for y, end in pairs])
    assert solution.event_t is not None
    event_t = solution.event_t.to(call.t) if call.t.dtype in LOW else solution.event_t
    return event_t, form.outside(y)


@in_graphs
def odeint_adjoint(
    func: Callable,
    y0: Any,
    t: Tensor | Sequence[float],
    *,
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    method: str | Solver | None = None,
    options: Mapping[str, Any] | None = None,
    event_fn: Callable | None = None,
    adjoint_rtol: Any = None,
    adjoint_atol: Any = None,
    adjoint_method: str | Solver | None = None,
    adjoint_options: Mapping[str, Any] | None = None,
    adjoint_params: Iterable[Tensor] | None = None,
    args: tuple = (),
) -> Any:
    """torchdiffeq's `odeint_adjoint`: `odeint` with the continuous adjoint.

    adjoint_options may say norm="seminorm", or give a norm of (t, y, dL/dy, dL/dtheta, ...): leaves of a tree one by
    one, and t is 0 here. f is one function: both solves know the jump_t, step_t and perturbed grids of options and of
    adjoint_options. adjoint_params: the parameters that get a gradient; None: those that are found in func.
    """
    differ = adjoint_method is not None and adjoint_method != method
    if adjoint_options is None and options and differ:
        raise InvalidOptionError(
            "options are those of `method`; with another adjoint_method give adjoint_options too, {} for none."
        )
    if event_fn is None and _n_times(t) == 1:
        return odeint(func, y0, t)
    form = Form.of(y0)
    n, of_state = len(form.dtypes), (options or {}).get("norm")
    backward = dict(options or {}) if adjoint_options is None else dict(adjoint_options)
    norm = backward.pop("norm", None) if adjoint_options is not None else None
    backward |= {} if of_state is None else {"norm": of_state}  # of z and of its adjoint, unless there is another one
    tolerances = (rtol if adjoint_rtol is None else adjoint_rtol), (atol if adjoint_atol is None else adjoint_atol)
    call = Call(func, y0, as_times(t), form, *tolerances, backward, is_adjoint=True, state=tensors_of(form.state, n))
    solver = solver_named(adjoint_method or method, ADAPTIVE["dopri5"])
    steps = steps_of(solver, not isinstance(adjoint_method or method, Solver), call)
    of_leaves = _adjoint_norm(norm, form, n) if callable(norm) else None
    gradient = Adjoint(steps.solver, steps.controller, norm == "seminorm", of_leaves)
    forward = {"rtol": rtol, "atol": atol, "method": method, "options": _with_jumps(options, steps.jumps)}
    return odeint(func, y0, t, **forward, gradient=gradient, args=args, params=adjoint_params, event_fn=event_fn)


def odeint_event(
    func: Callable,
    y0: Any,
    t0: Tensor | float,
    *,
    event_fn: Callable,
    reverse_time: bool = False,
    odeint_interface: Callable = odeint,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """torchdiffeq's `odeint_event`: solve from t0 until event_fn(t, y) changes its sign.

    Returns event_t and, time first, y0 and y at the event, all differentiable. reverse_time: solve backwards in time.
    odeint_interface: `odeint`, `odeint_adjoint`, or a function that calls one of them. kwargs: options of that
    function.
    """
    t0 = t0 if isinstance(t0, Tensor) else torch.tensor(t0, dtype=torch.float64)
    t0 = t0.reshape(())
    t = torch.stack([t0, t0.detach() + (-1.0 if reverse_time else 1.0)])
    return odeint_interface(func, y0, t, event_fn=event_fn, **kwargs)


def odeint_dense(
    func: Callable,
    y0: Any,
    t0: Tensor | float,
    t1: Tensor | float,
    *,
    rtol: Any = 1e-7,
    atol: Any = 1e-9,
    method: str | Solver | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[[Any], Any]:
    """torchdiffeq's `odeint_dense`: y as a function of any time (or times) between t0 and t1."""
    t = torch.stack([torch.as_tensor(x, dtype=torch.float64).reshape(()) for x in (t0, t1)])
    call = Call(func, y0, t, Form.of(y0), rtol, atol, options)
    steps = steps_of(solver_named(method, ADAPTIVE["dopri5"]), not isinstance(method, Solver), call)
    solution = _solved(call, t, steps, {"gradient": Naive(), "dense": True})
    return lambda t: call.form.outside(solution(t))


def as_times(t: Any) -> Tensor:
    """The times of a call as a tensor; what is wrong with them, `solve` tells."""
    t = t if isinstance(t, Tensor) else torch.as_tensor(t, dtype=torch.float64)
    return t if t.ndim else t[None]


def _default_solver(gradient: GradientMethod, call: Call) -> Solver:
    if not isinstance(gradient, MALI):
        return ADAPTIVE["dopri5"]
    if "step_size" in call.given or "grid_constructor" in call.given:
        return ALF()
    return leapfrog_for(smallest(call.rtol), call.has_event or len(call.t) > 2)


def _solved(call: Call, t: Any, steps: Steps, how: dict[str, Any]) -> Solution:
    """Solve with what the user's f needs around it."""
    form, y0, func = call.form, call.y0, call.func
    how |= {"solver": steps.solver, "controller": steps.controller, "jumps": steps.jumps}
    if isinstance(how["gradient"], Naive):
        how["randomness"] = "different"
    if not form.is_plain:
        y0 = form.inside(y0)
    try:
        return solve(func if form.is_plain else form.slope(func), y0, t, **how)
    except SlopeMismatchError:
        func = converted(func, call.y0)
    return solve(func if form.is_plain else form.slope(func), y0, t, **how)


def _with_jumps(options: Mapping[str, Any] | None, jumps: list[float]) -> dict[str, Any]:
    """Options of the forward solve, with the jumps that the backward one knows."""
    given = dict(options or {})
    if not jumps:
        return given
    own = given.get("jump_t")
    return {**given, "jump_t": [*([] if own is None else torch.as_tensor(own).tolist()), *jumps]}


def _adjoint_norm(norm: Callable, form: Form, n: int) -> Callable[[Tensors], Tensor]:
    def of_leaves(x: Tensors) -> Tensor:
        parts = [*form.leaves_outside(x[:n]), *form.leaves_outside(x[n : 2 * n])]
        return norm((x[0].new_zeros(()), *parts, *x[2 * n :]))

    return of_leaves


def _without_end(t: Tensor, controller: StepController) -> Tensor:
    """The first of these times, and one far away in the direction of the second."""
    if t.ndim != 1 or len(t) < 2:
        raise InvalidTimesError(f"With event_fn, t is a start and a time in the direction to go; got {t.tolist()}.")
    if isinstance(controller, GridStep):
        raise InvalidOptionError("event_fn has no end time, up to which grid_constructor could make a grid.")
    t = t.double() if t.dtype in LOW else t  # float16 does not reach far
    start, direction = t[0].detach(), torch.sign(t[1] - t[0]).detach()
    distance = FAR * max(1.0, abs(start.item()))
    if isinstance(controller, FixedStep):
        if math.isinf(controller.h):
            raise InvalidOptionError(
                'event_fn with fixed steps needs their size, as in options={"step_size": 0.1}: there is no end time '
                "from which to take it."
            )
        distance = MANY_STEPS * controller.h
    return torch.stack([t[0], start + direction * distance])


def _n_times(t: Any) -> int:
    try:
        return len(t)
    except TypeError:  # a number, or a 0-d tensor: `solve` tells what t must be
        return 0
