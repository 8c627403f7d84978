"""torchdiffeq's tolerances and options, as a solver, a controller and the times at which f jumps."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali._torch import foreach_div, foreach_norm
from torchmali.controllers import AdaptiveStep, FixedStep, Norm, StepController, fixed_times
from torchmali.errors import InvalidOptionError, warn
from torchmali.jumps import jump_times
from torchmali.solvers.adams import Adams
from torchmali.solvers.base import Solver
from torchmali.solvers.runge_kutta import RungeKutta, StraightLines
from torchmali.state.vectors import Tensors
from torchmali.torchdiffeq.callbacks import NONE, Callbacks, callbacks_of
from torchmali.torchdiffeq.controllers import CalledFixedStep, CalledStep, GridStep, QuietStep
from torchmali.torchdiffeq.forms import Form
from torchmali.torchdiffeq.methods import ADAPTIVE, FEHLBERG2
from torchmali.torchdiffeq.scipy_solver import Scipy
from torchmali.tree import Structure

DEFAULT_RTOL = 1e-7  # no warning tells that it is beyond float32
SAFETY = 0.9  # torchdiffeq's, for its own methods
THEIRS = (*ADAPTIVE.values(), FEHLBERG2)
MOST_STEPS = 2**31 - 1
MANY_STEPS = 1_000_000  # up to an event that may never come

# fmt: off
ADAPTIVE_OPTIONS = {  # torchdiffeq's name: ours
    "first_step": "h0", "safety": "safety", "ifactor": "max_factor", "dfactor": "min_factor", "min_step": "h_min",
    "max_step": "h_max", "max_num_steps": "max_steps", "norm": "norm",
}
TIMES_OPTIONS = ("step_t", "jump_t")
FIXED_OPTIONS = ("step_size", "grid_constructor", "interp", "perturb")
ADAMS_OPTIONS = ("max_order", "max_iters")
SCIPY_OPTIONS = ("solver", "min_step", "max_step")
IGNORED = {  # known, and of no effect: they ask for what is done in any case, or for what the method does not have
    "adaptive": ("dtype",), "fixed": ("norm",), "scipy": ("norm", "grid_points", "eps"),
}
# fmt: on


class Call(NamedTuple):
    """What a call of `odeint` says of its steps."""

    func: Callable
    y0: Any
    t: Any
    form: Form
    rtol: Any
    atol: Any
    options: Mapping[str, Any] | None
    has_event: bool = False
    is_adjoint: bool = False  # the steps are those of a backward solve
    state: Callable[[Tensors], Any] | None = None  # what callbacks are given

    @property
    def given(self) -> dict[str, Any]:
        """The options, without those that are None, which is the default of all of them."""
        return {name: value for name, value in (self.options or {}).items() if value is not None}

    def callbacks(self, *kinds: str) -> Callbacks:
        found = callbacks_of(self.func, kinds, self.state or self.form.state, self.is_adjoint)
        return NONE if found is None else found


class Steps(NamedTuple):
    """The steps of a solve."""

    solver: Solver
    controller: StepController
    jumps: list[float]


def steps_of(solver: Solver, is_named: bool, call: Call) -> Steps:
    """The steps for which a call asks. is_named: whether the method was given by its name."""
    options = call.given
    if isinstance(solver, Scipy):
        return _scipy_steps(solver, call, options)
    # torchdiffeq's adaptive methods have no fixed steps; its other methods have no others.
    is_fixed = solver.error_order is None or (
        ("step_size" in options or "grid_constructor" in options) and not (is_named and solver in THEIRS)
    )
    if is_fixed:
        _tell_of_interpolant(solver, options.get("interp"))
    if is_fixed and is_named:
        options.setdefault("interp", "linear")
    return _fixed_steps(solver, call, options) if is_fixed else _adaptive_steps(solver, call, options)


def _tell_of_unknown(options: Mapping[str, Any], known: Iterable[str], what: str) -> None:
    """Warn of options that have no effect, as torchdiffeq does."""
    known = sorted(known)
    for name in sorted(set(options) - set(known)):
        near = difflib.get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        warn(f"The option {name!r} is ignored: {what} has none of this name.{hint} Known: {', '.join(known)}.")


def _scipy_steps(solver: Scipy, call: Call, options: dict[str, Any]) -> Steps:
    _tell_of_unknown(options, [*SCIPY_OPTIONS, *IGNORED["scipy"]], "scipy_solver")
    if call.has_event:
        raise InvalidOptionError('method="scipy_solver" finds no events: use another method, such as "dopri5".')
    call.callbacks()
    given = {name: options[name] for name in SCIPY_OPTIONS if name in options}
    name = given.pop("solver", solver.name)
    rtol, atol = (smallest(x) for x in (call.rtol, call.atol))
    times = () if call.is_adjoint else tuple(call.t.detach().to("cpu", torch.float64).tolist())
    return Steps(replace(solver, name=name, rtol=rtol, atol=atol, times=times, **given), FixedStep(math.inf), [])


def _fixed_steps(solver: Solver, call: Call, options: dict[str, Any]) -> Steps:
    is_adams = isinstance(solver, Adams)
    known = (*FIXED_OPTIONS, *TIMES_OPTIONS, *IGNORED["fixed"], *(ADAMS_OPTIONS if is_adams else ()))
    _tell_of_unknown(options, known, "a method in fixed steps")
    solver = _with_lines(_with_orders(solver, call, options), options.get("interp", "cubic"))
    callbacks = call.callbacks("step")
    size, construct = options.get("step_size"), options.get("grid_constructor")
    if size is not None and construct is not None:
        raise InvalidOptionError("step_size and grid_constructor both choose the steps: give one of the two.")
    jumps = _jumps(options)
    if construct is not None:
        grid = _grid(construct, call)
        controller: StepController = GridStep(grid, callbacks)
        points: Callable = grid
    else:
        h = math.inf if size is None else float(size)
        # Steps of a given size run on over output times, as torchdiffeq's do, which costs fewer of them.
        land = size is None or not solver.interpolates
        controller = FixedStep(h, land) if callbacks == NONE else CalledFixedStep(h, land, callbacks)
        points = lambda t0, t1: [t0, *fixed_times(t0, t1, h)]  # noqa: E731
    if options.get("perturb"):
        jumps += _perturbed(points, call, size is None and construct is None)
    return Steps(solver, controller, jumps)


def _with_orders(solver: Solver, call: Call, options: Mapping[str, Any]) -> Solver:
    if not isinstance(solver, Adams):
        return solver
    given = {name: int(options[name]) for name in ADAMS_OPTIONS if name in options}
    return replace(solver, rtol=smallest(call.rtol), atol=smallest(call.atol), **given)


def _with_lines(solver: Solver, interp: Any) -> Solver:
    """The solver, with straight lines or cubics between the points of its grid. Leapfrogs keep their interpolant."""
    if interp not in ("linear", "cubic"):
        raise InvalidOptionError(f'options["interp"] = {interp!r}: "linear" or "cubic".')
    if isinstance(solver, Adams):
        return replace(solver, is_cubic=interp == "cubic")
    return StraightLines(solver) if isinstance(solver, RungeKutta) and interp == "linear" else solver


def _tell_of_interpolant(solver: Solver, interp: Any) -> None:
    if interp == "linear" and not isinstance(solver, (Adams, RungeKutta)):
        warn(f'The option "interp" is ignored: {solver} has an interpolant of its own, or ends on all output times.')


def _grid(construct: Callable, call: Call) -> Callable[[float, float], Sequence[float]]:
    def grid(t0: float, t1: float) -> list[float]:
        # A backward solve goes from one output time to the one before it.
        t = torch.tensor([t0, t1], dtype=call.t.dtype) if call.is_adjoint else call.t
        found = torch.as_tensor(construct(call.func, call.y0, t)).detach().to("cpu", torch.float64)
        ends = t.detach().to("cpu", torch.float64)
        if found.ndim != 1 or len(found) < 2 or found[0] != ends[0] or found[-1] != ends[-1]:
            raise InvalidOptionError(
                "grid_constructor(func, y0, t) must return the times of a grid, from t[0] to t[-1]; it returned "
                f"{found.tolist()} for t from {ends[0].item()} to {ends[-1].item()}."
            )
        return found.tolist()

    return grid


def _perturbed(points: Callable, call: Call, is_outputs: bool) -> list[float]:
    """The points of the grid as jumps: f is evaluated beside them, on the side of its step."""
    if call.has_event:
        raise InvalidOptionError("perturb needs a grid that is known in advance, but event_fn has no end time.")
    times = call.t.detach().to("cpu", torch.float64).tolist()
    return times if is_outputs else list(points(times[0], times[-1]))


def _jumps(options: Mapping[str, Any]) -> list[float]:
    """step_t and jump_t. A kink in f is a jump of its derivative: steps end there, too."""
    return [t for name in TIMES_OPTIONS if name in options for t in jump_times(options[name])]


def _adaptive_steps(solver: Solver, call: Call, options: dict[str, Any]) -> Steps:
    known = [*ADAPTIVE_OPTIONS, *TIMES_OPTIONS, *IGNORED["adaptive"]]
    for name in ("step_size", "grid_constructor"):
        if name in options:
            options.pop(name)
            warn(f"The option {name!r} is ignored: this method chooses its steps by rtol and atol. See max_step.")
    _tell_of_unknown(options, known, "a method with tolerances")
    callbacks = call.callbacks("step", "accept", "reject")
    rtol, atol, per_element = tolerances(call)
    if call.is_adjoint:
        per_element = None  # a backward solve has other elements: the smallest of a leaf holds for all of it
    given = {ADAPTIVE_OPTIONS[name]: options[name] for name in ADAPTIVE_OPTIONS if name in options}
    n = max(1, len(call.t) - 1)  # torchdiffeq's limit is one for each output interval
    given["max_steps"] = n * int(given.get("max_steps", MANY_STEPS if call.has_event else MOST_STEPS))
    norm = _norm(given.pop("norm", None), call)
    given |= {} if norm is None else {"norm": norm}
    for name in ("h_min", "h_max", "safety", "min_factor", "max_factor"):
        given |= {name: float(given[name])} if name in given else {}
    if solver in THEIRS:
        given.setdefault("safety", SAFETY)
    how: dict[str, Any] = {"rtol": rtol, "atol": atol, **given}
    if callbacks != NONE or per_element is not None or given.get("h_min"):
        controller: AdaptiveStep = CalledStep(**how, per_element=per_element, callbacks=callbacks)
    else:
        is_default = type(call.rtol) is float and call.rtol == DEFAULT_RTOL
        controller = QuietStep(**how) if is_default else AdaptiveStep(**how)
    return Steps(solver, controller, _jumps(options))


def _norm(norm: Callable | None, call: Call) -> Norm | None:
    """A norm of leaves, from one of the user's states. None: ours is right."""
    if norm is not None:
        is_tensor, form = isinstance(call.y0, Tensor), call.form
        return lambda x: norm(form.leaves_outside(x)[0] if is_tensor else form.leaves_outside(x))
    return None if isinstance(call.y0, Tensor) else largest_rms


def largest_rms(x: Tensors) -> Tensor:
    """The largest root mean square of a leaf."""
    sizes = [math.sqrt(max(1, leaf.numel())) for leaf in x]
    return torch.stack([*foreach_div(foreach_norm(x), sizes)]).max()


def tolerances(call: Call) -> tuple[Any, Any, tuple | None]:
    """rtol and atol as AdaptiveStep takes them, and those of all elements, if they are not one number for each leaf."""
    leaves = call.form.structure.flatten(call.form.inside(call.y0))
    found = [_per_leaf(x, call) for x in (call.rtol, call.atol)]
    if all(isinstance(x, (int, float)) for values in found for x in values):
        is_number = [isinstance(x, (int, float, Tensor)) for x in (call.rtol, call.atol)]
        rebuilt = [call.form.structure.rebuild(values) for values in found]
        rtol, atol = (values[0] if n else x for values, n, x in zip(found, is_number, rebuilt, strict=True))
        return rtol, atol, None
    tensors = tuple(
        [_elements(x, leaf, i, call) for i, (x, leaf) in enumerate(zip(v, leaves, strict=True))] for v in found
    )
    rtol, atol = (call.form.structure.rebuild([smallest(x) for x in values]) for values in found)
    return rtol, atol, tensors


def _per_leaf(value: Any, call: Call) -> list[Any]:
    """A tolerance for each leaf: a number, or a tensor of several."""
    n = len(call.form.dtypes)
    if isinstance(value, (int, float)):
        return [value] * n
    if isinstance(call.y0, Tensor):  # torchdiffeq makes a tensor of lists, too
        return [_number_or_tensor(value)]
    if isinstance(value, Tensor) and value.ndim == 0:
        return [value.item()] * n
    if isinstance(value, Tensor):
        value = list(value)
    try:
        return [_number_or_tensor(x) for x in call.form.structure.flatten(value)]
    except ValueError as mismatch:
        raise InvalidOptionError(
            f"rtol and atol must be numbers, or have one entry for each leaf of y0; found {mismatch}."
        ) from None


def _number_or_tensor(value: Any) -> Any:
    x = torch.as_tensor(value, dtype=torch.float64).detach()
    return x.item() if x.numel() == 1 else x


def _elements(value: Any, leaf: Tensor, i: int, call: Call) -> Tensor:
    """A tolerance of a leaf as a tensor that broadcasts with it."""
    x = torch.as_tensor(value).to(leaf.device, leaf.dtype)
    dtype = call.form.dtypes[i]
    is_complex = dtype is not None and dtype.is_complex
    shape = leaf.shape[:-1] if is_complex else leaf.shape
    if not isinstance(call.y0, Tensor) and x.numel() == shape.numel():
        x = x.reshape(shape)
    try:
        x = x.expand(shape)
    except RuntimeError:
        raise InvalidOptionError(
            f"A tolerance of shape {tuple(x.shape)} does not broadcast to y of shape {tuple(shape)}."
        ) from None
    return x.unsqueeze(-1).expand(leaf.shape) if is_complex else x


def smallest(value: Any) -> float:
    """The smallest of these tolerances."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Tensor):
        return float(value.detach().min())
    return min(map(smallest, Structure.of(value).flatten(value)))
