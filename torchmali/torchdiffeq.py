"""torchdiffeq's `odeint`, `odeint_adjoint` and `odeint_event`, on top of `solve`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

import torchmali.solvers.runge_kutta as rk
from torchmali._torch import break_graph
from torchmali.compiled.in_graph import in_graph, is_followed
from torchmali.controllers import AdaptiveStep, FixedStep, StepController
from torchmali.errors import InvalidOptionError, InvalidTimesError, UnknownMethodError
from torchmali.events import Event
from torchmali.gradients.aca import ACA
from torchmali.gradients.adjoint import Adjoint
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.gradients.naive import Naive
from torchmali.jumps import jump_times
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF, leapfrog_for
from torchmali.solving import solve, state_likes
from torchmali.tree import Structure

# fmt: off
SOLVERS: dict[str, Solver] = {
    "alf": ALF(), "alf4": ALF(order=4), "alf4_5": ALF(order=4, evals=5), "alf6": ALF(order=6),
    "alf6_14": ALF(order=6, evals=14), "euler": rk.Euler(),
    "midpoint": rk.Midpoint(), "heun2": rk.Heun(), "heun3": rk.Heun3(),
    "rk4": rk.RK4ThreeEighths(), "rk4_classic": rk.RK4(), "adaptive_heun": rk.HeunEuler(), "bosh3": rk.Bosh3(),
    "dopri5": rk.Dopri5(), "tsit5": rk.Tsit5(), "dopri8": rk.Dopri8(),
}
GRADIENTS: dict[str, GradientMethod] = {
    "naive": Naive(), "adjoint": Adjoint(), "seminorm": Adjoint(seminorm=True), "aca": ACA(), "mali": MALI(),
}
ADAPTIVE_OPTIONS = {  # torchdiffeq's name: ours
    "first_step": "h0", "safety": "safety", "ifactor": "max_factor", "dfactor": "min_factor", "min_step": "h_min",
    "max_step": "h_max", "max_num_steps": "max_steps", "norm": "norm",
}
# fmt: on
# With event_fn the end time is not known, and a solve needs one. One far away is better than several solves over longer
# and longer spans: no step is cut short, and there is one tape. Adaptive steps depend on it only if they are as long,
# or below 1e-16 times as long (the least that a controller takes for a step); their number is limited in any case.
FAR = 1e9  # times |t0|, or 1
MANY_STEPS = 1_000_000  # of fixed size
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
    gradient: str | GradientMethod | None = None,
    args: tuple = (),
    params: Iterable[Tensor] | None = None,
    event_fn: Callable | None = None,
    compile: bool = False,
) -> Any:
    """torchdiffeq's `odeint`, with `gradient` to choose the gradient method; returns y, time first.

    method: "dopri5" (default), "alf", "alf4", "alf4_5", "alf6", "alf6_14", "tsit5", "dopri8", "bosh3", "adaptive_heun",
    "euler", "midpoint", "heun2", "heun3", "rk4" (3/8 rule), "rk4_classic", or a solver. With gradient="mali" the
    default is `leapfrog_for(rtol)` ("alf4_5", and below 1e-5 "alf6_14" if y is wanted at the end alone), with a
    step_size "alf". gradient: "naive" (default), "aca", "mali", "adjoint", "seminorm", or a gradient method.
    options: step_size, or first_step, safety, ifactor, dfactor, min_step, max_step, max_num_steps, norm; and jump_t,
    times at which f jumps (`jumps` of `solve`), with fixed steps, too. Adaptive steps and those of a step_size do not
    end on output times: outputs between them are interpolated, at no cost. Fixed methods without a step_size take one
    step from each output time to the next. Unlike in torchdiffeq, max_num_steps (10,000) limits the whole solve.
    event_fn: a function of (t, y). The solve goes on until one of its components changes its sign, and returns
    (event_t, y at t[0] and at event_t), both differentiable; of the other times only t[1] counts, which says in which
    direction. `solve(event=...)` can do more. compile: see `solve`; as in odeint(..., method="alf", gradient="mali",
    options={"step_size": 0.1}, compile=True), with two times, or a step from each time to the next.
    """
    chosen = _named(gradient, GRADIENTS, GradientMethod, "gradient method", Naive())
    options = dict(options or {})
    jumps = _popped_jumps(options)
    default: Solver = rk.Dopri5()
    if isinstance(chosen, MALI):
        default = ALF()
        if "step_size" not in options:
            are_inside = event_fn is not None or _n_times(t) > 2
            default = leapfrog_for(min(Structure.of(rtol).flatten(rtol)), are_inside)
    solver = _named(method, SOLVERS, Solver, "method", default)
    norm = options.get("norm")
    if norm is not None and isinstance(y0, Tensor):
        options["norm"] = lambda x: norm(x[0])  # torchdiffeq's norms take the tensor, ours a tuple of leaves
    controller = _controller(solver, rtol, atol, options)
    how: dict[str, Any] = {"solver": solver, "controller": controller, "gradient": chosen, "args": args}
    how |= {"params": params, "jumps": jumps, "compile": compile}
    if event_fn is None:
        return solve(func, y0, t, **how).y
    event = Event(lambda t, y, *args: event_fn(t, y))
    solution = solve(func, y0, _without_end(t, controller), **how, event=event)
    structure = Structure.of(y0)
    pairs = zip(structure.flatten(solution.y), structure.flatten(solution.event_y), strict=True)
    return solution.event_t, structure.rebuild([torch.stack([y[0], end]) for y, end in pairs])


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
    adjoint_rtol: Any = None,
    adjoint_atol: Any = None,
    adjoint_method: str | Solver | None = None,
    adjoint_options: Mapping[str, Any] | None = None,
    adjoint_params: Iterable[Tensor] | None = None,
    args: tuple = (),
    event_fn: Callable | None = None,
) -> Any:
    """torchdiffeq's `odeint_adjoint`: `odeint` with the continuous adjoint. adjoint_options may say norm="seminorm".

    f is one function: both solves know the jump_t of options and those of adjoint_options.
    """
    differ = adjoint_method is not None and adjoint_method != method
    if adjoint_options is None and options and differ:
        raise InvalidOptionError(
            "options are those of `method`; with another adjoint_method give adjoint_options too, {} for none."
        )
    backward = dict(options or {}) if adjoint_options is None else dict(adjoint_options)
    jumps = [*_popped_jumps(backward), *_popped_jumps(dict(options or {}))]
    seminorm = backward.get("norm") == "seminorm"
    if seminorm or adjoint_options is None:
        backward.pop("norm", None)
    if "norm" in backward:
        raise InvalidOptionError(
            'adjoint_options["norm"] can only be "seminorm" here. For another norm: gradient=Adjoint(controller=...).'
        )
    solver = _named(adjoint_method or method, SOLVERS, Solver, "method", rk.Dopri5())
    tolerances = rtol if adjoint_rtol is None else adjoint_rtol, atol if adjoint_atol is None else adjoint_atol
    gradient = Adjoint(solver, _controller(solver, *tolerances, backward), seminorm)
    forward = {"rtol": rtol, "atol": atol, "method": method, "options": {**(options or {}), "jump_t": jumps}}
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


def _without_end(t: Any, controller: StepController) -> Tensor:
    """The first of these times, and one far away in the direction of the second."""
    t = t if isinstance(t, Tensor) else torch.as_tensor(t, dtype=torch.float64)
    if t.ndim != 1 or len(t) < 2:
        raise InvalidTimesError(f"With event_fn, t is a start and a time in the direction to go; got {t.tolist()}.")
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


def _popped_jumps(options: dict[str, Any]) -> list[float]:
    """Take jump_t out of the options."""
    jumps = options.pop("jump_t", None)
    return [] if jumps is None else jump_times(jumps)


def _named(value: Any, known: Mapping[str, Any], base: type, what: str, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, base):
        return value
    if value in known:
        return known[value]
    raise UnknownMethodError(
        f"Unknown {what} {value!r}. Known: {', '.join(map(repr, known))}, or a {base.__name__} object."
    )


def _controller(solver: Solver, rtol: Any, atol: Any, options: Mapping[str, Any] | None) -> StepController:
    options = dict(options or {})
    size = options.pop("step_size", None)
    if size is not None or solver.error_order is None:
        if options:
            raise InvalidOptionError(f"Unknown options {sorted(options)} for fixed steps. Known: ['step_size'].")
        # Steps of a given size run on over output times, as torchdiffeq's do, which costs fewer of them.
        return FixedStep(math.inf) if size is None else FixedStep(size, land=not solver.interpolates)
    unknown = sorted(set(options) - set(ADAPTIVE_OPTIONS))
    if unknown:
        raise InvalidOptionError(f"Unknown options {unknown}. Known: {['step_size', *ADAPTIVE_OPTIONS]}.")
    return AdaptiveStep(rtol, atol, **{ADAPTIVE_OPTIONS[name]: value for name, value in options.items()})
