"""Controllers decide how long the next step is, and whether the last attempt is accepted.

A controller is an immutable value; its `begin` makes the mutable state that accompanies one solve.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from torchmali._torch import (
    foreach_abs,
    foreach_add,
    foreach_div,
    foreach_maximum,
    foreach_mul,
    foreach_norm,
    foreach_sub,
)
from torchmali.abstract import Abstract
from torchmali.errors import IncompatibleError, InvalidOptionError, NonFiniteError, StepLimitError, StepUnderflowError
from torchmali.jumps import Jumps
from torchmali.solution import short_repr
from torchmali.solvers.base import Attempt, InterpolatingSolver, Slope, Solver
from torchmali.state.base import State
from torchmali.state.vectors import Leaves, Tensors, Time, combine, first_non_finite, number
from torchmali.tree import Structure

Norm = Callable[[Tensors], Tensor]
Factors = Sequence[float] | Sequence[Tensor]  # one for each leaf
EVEN_STEPS = 4  # so many last steps before an end are made equally long


def rms_norm(x: Tensors) -> Tensor:
    """Root mean square over all elements of all leaves."""
    n = sum(leaf.numel() for leaf in x)
    norms = foreach_norm(x)
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return total / math.sqrt(max(n, 1))


def checked_norm(norm: Norm, x: Tensors) -> Tensor:
    """Return norm(x); raise if it is not one number."""
    value = norm(x)
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        got = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            got = f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
        raise InvalidOptionError(
            "AdaptiveStep(norm=...) must make one real number, as a 0-d tensor, from a tuple of the scaled error's "
            f"leaves; it returned {got}. As an example, norm=lambda x: torch.stack([e.abs().max() for e in x]).max()."
        )
    return value


class SolveStart(NamedTuple):
    """Start of a solve, as a controller's `begin` gets it."""

    f: Slope
    solver: Solver
    t0: Time
    t_end: Time
    state: State
    carry: Tensors | None
    through_search: bool  # keep the choice of h in the graph
    first_jump: float | None = None  # the first time after t0 at which f jumps: up to there f may be evaluated


class ControllerState(Abstract):
    """State of a controller in one solve.

    Its attributes must be values that are replaced, not changed in place: where several steps are taken back, the loop
    continues with a shallow copy of the state.
    """

    n_rejected = 0
    controlled: Sequence[int]  # the leaves whose accuracy counts

    def __init__(self, start: SolveStart):
        self.controlled = range(len(start.state.point))

    @abstractmethod
    def next_time(self, t: Time, target: Time) -> Time:
        """Return the time at which the next attempt from t should end: `target`, the same object, or a time before."""

    def attempting(self, t0: Time, t1: Time, before: State) -> None:
        """Called before each attempt at a step from `before`. (Steps of `FixedStep` that are taken in runs are not.)"""
        return None


class AdaptiveControllerState(ControllerState):
    """State of a controller that may reject an attempt, in one solve."""

    @abstractmethod
    def error_ratio(self, before: State, attempt: Attempt) -> Tensor:
        """Return the attempt's error over the tolerance, as a 0-d tensor."""

    @abstractmethod
    def accepts(self, t0: Time, t1: Time, attempt: Attempt, ratio: Tensor, value: float) -> bool:
        """Whether the attempt is accepted. ratio: its `error_ratio`; value: that as a float. Counts `n_rejected`."""


class StepController(Abstract):
    """Base of controllers, which choose the steps of a solve. A new controller needs `begin`.

    adaptive: whether `begin` returns an AdaptiveControllerState, which may reject steps.
    """

    adaptive: bool = False

    def check(self, solver: Solver) -> None:
        """Raise if this controller cannot drive this solver."""
        if self.adaptive and solver.error_order is None:
            raise IncompatibleError(
                f"{type(self).__name__} needs a solver with an error estimate, but {type(solver).__name__} has none. "
                "Use controller=FixedStep(h), or solver=HeunEuler(), Bosh3(), Dopri5(), Tsit5(), Dopri8() or ALF()."
            )

    def ends_on_outputs(self, solver: Solver) -> bool:
        """Whether steps end on every output time, or only on the last one (and interpolate)."""
        return True

    def n_steps(self, times: list[float]) -> int | None:
        """The number of steps of a solve over these times; None if it is not known in advance."""
        return None

    def n_steps_with_jumps(self, solver: Solver, times: list[float], jumps: Jumps | None) -> int | None:
        """The number of steps of a solve over these times whose steps end on each jump; None if it is not known."""
        if jumps is None:
            return self.n_steps(times)
        if self.ends_on_outputs(solver):
            return self.n_steps(jumps.merged_with(times))
        ends = jumps.merged_with([times[0], *filter(jumps.is_at, times[1:-1]), times[-1]])
        counts = [self.n_steps([a, b]) for a, b in pairwise(ends)]
        return None if None in counts else sum(n for n in counts if n is not None)

    def bind(self, structure: Structure) -> StepController:
        """Return this controller for a state of this structure."""
        return self

    @abstractmethod
    def begin(self, start: SolveStart) -> ControllerState:
        """Return the state of this controller for one solve."""


@dataclass(frozen=True, repr=False)
class FixedStep(StepController):
    """Steps of size h from each output time; the last one is shortened to end on the next output time.

    At jumps (see `solve`) steps end and begin as at output times. FixedStep(math.inf) takes one step per output
    interval. land=False: steps of size h from the first time (or jump) on, of which the last one is shortened; outputs
    inside steps are read from the solver's interpolant.
    """

    h: float
    land: bool = True
    adaptive = False

    __repr__ = short_repr

    def check(self, solver: Solver) -> None:
        super().check(solver)
        if not self.land and not isinstance(solver, InterpolatingSolver):
            raise IncompatibleError(
                f"FixedStep(land=False) reads outputs from the interpolant of a step, but {type(solver).__name__} has "
                "none. Use land=True, or another solver."
            )

    def ends_on_outputs(self, solver: Solver) -> bool:
        return self.land

    def __post_init__(self):
        positive = isinstance(self.h, (int, float)) and self.h > 0
        if not positive:
            raise InvalidOptionError(f"FixedStep(h={self.h!r}): the step must be a positive number (t gives the sign).")

    def n_steps(self, times: list[float]) -> int:
        if not self.land or len(times) == 2:
            return _n_steps(abs(times[-1] - times[0]), self.h)
        return sum(_n_steps(abs(b - a), self.h) for a, b in pairwise(times))

    def begin(self, start: SolveStart) -> ControllerState:
        return FixedStepState(self.h, start)


def _n_steps(span: float, size: float) -> int:
    return max(1, math.ceil(span / size - 1e-3))  # output times are often rounded to float32


def fixed_times(start: Time, end: Time, size: float) -> list[Time]:
    """Return the times at which steps of a size end, from start to end; the last one is shortened to end there."""
    span = number(end - start)
    h = math.copysign(size, span)
    return [*[start + i * h for i in range(1, _n_steps(abs(span), size))], end]


class FixedStepState(ControllerState):
    """State of `FixedStep` in one solve."""

    def __init__(self, size: float, start: SolveStart):
        super().__init__(start)
        self.size = size
        self.target: Time | None = None
        self.start: Time = start.t0  # of the steps up to the target
        self.i, self.n, self.h = 0, 0, 0.0

    def next_time(self, t: Time, target: Time) -> Time:
        # One of `fixed_times`, of which there are a million where an event is to end the solve.
        if target is not self.target:
            span = number(target - t)
            self.target, self.start, self.i = target, t, 0
            self.n, self.h = _n_steps(abs(span), self.size), math.copysign(self.size, span)
        self.i += 1
        return target if self.i >= self.n else self.start + self.i * self.h


@dataclass(frozen=True, repr=False)
class AdaptiveStep(StepController):
    """Steps as long as norm(error / (atol + rtol max(|z|, |z'|))) <= 1 allows; every step is checked.

    rtol, atol: numbers, or trees of numbers of y0's structure; a leaf with an infinite one is not controlled. h0: size
    of the first step (None: estimated, in one evaluation more). norm: maps the scaled error's leaves to a 0-d tensor.
    min_factor, max_factor: limits of the change of h from one attempt to the next. beta > 0: a PI controller, h <- h
    safety r^-((1 - 3/4 beta)/q) r_before^(beta/q), which changes h more smoothly (try 0.4). max_steps: attempts in one
    solve, not counting steps cut short by output times. land: end steps on output times although the solver can
    interpolate. Where at most four steps are left to the end (or to a jump, or an output time to be met), they are made
    equally long. Behind a jump (see `solve`) the controller goes on with the h that it had.
    """

    rtol: Any = 1e-3
    atol: Any = 1e-4
    h0: float | None = None
    norm: Norm = rms_norm
    safety: float = 0.8
    min_factor: float = 0.2
    max_factor: float = 10.0
    beta: float = 0.0
    h_min: float = 0.0
    h_max: float = math.inf
    max_steps: int = 10_000
    land: bool = False
    adaptive = True
    warns_of_tolerance: ClassVar[bool] = True  # if rtol is near the round-off of y0

    __repr__ = short_repr

    def __post_init__(self):
        me = "AdaptiveStep"
        for name, tol in (("rtol", self.rtol), ("atol", self.atol)):
            are_numbers = all(isinstance(x, (int, float)) and x >= 0 for x in Structure.of(tol).flatten(tol))
            if not are_numbers:
                raise InvalidOptionError(f"{me}({name}={tol!r}): tolerances must be numbers, and not negative.")
        if self.rtol == 0 and self.atol == 0:
            raise InvalidOptionError(f"{me}(rtol=0, atol=0): no step is ever accurate enough; give one.")
        positive = self.h0 is None or (isinstance(self.h0, (int, float, Tensor)) and self.h0 > 0)
        if not positive:
            raise InvalidOptionError(
                f"{me}(h0={self.h0!r}): the step must be a positive number (t gives the sign), or None."
            )
        if not 0 < self.safety < 1:
            raise InvalidOptionError(f"{me}(safety={self.safety}): must lie in (0, 1).")
        low, high = self.min_factor, self.max_factor
        if not 0 < low < 1 < high:
            raise InvalidOptionError(f"{me}: need 0 < min_factor < 1 < max_factor, got {low}, {high}.")
        if not 0 <= self.beta < 1:
            raise InvalidOptionError(f"{me}(beta={self.beta}): must lie in [0, 1), where 0 is the plain controller.")
        if not 0 <= self.h_min < self.h_max:
            raise InvalidOptionError(f"{me}: need 0 <= h_min < h_max, got {self.h_min}, {self.h_max}.")
        if self.max_steps < 1:
            raise InvalidOptionError(f"{me}(max_steps={self.max_steps}): need at least one step.")

    def ends_on_outputs(self, solver: Solver) -> bool:
        return self.land or not solver.interpolates

    def bind(self, structure: Structure) -> AdaptiveStep:
        rtol, atol = (self._per_leaf(name, structure) for name in ("rtol", "atol"))
        if not all(map(any, zip(rtol, atol, strict=True))):
            raise InvalidOptionError(
                f"AdaptiveStep(rtol={self.rtol}, atol={self.atol}): a leaf with both at 0 is never accurate enough."
            )
        return replace(self, rtol=rtol, atol=atol)

    def _per_leaf(self, name: str, structure: Structure) -> tuple[float, ...]:
        value = getattr(self, name)
        if isinstance(value, (int, float)):
            return (float(value),) * structure.spec.num_leaves
        try:
            return tuple(float(x) for x in structure.flatten(value))
        except (ValueError, TypeError) as mismatch:
            raise InvalidOptionError(
                f"AdaptiveStep({name}=...) must be a number or have one number for each leaf of y0; found {mismatch}."
            ) from None

    def tolerances(self, leaves: Sequence[int]) -> tuple[Factors, Factors]:
        """rtol and atol of these leaves, as factors of them."""
        # An atol of 1e-36 avoids 0 / 0.
        return [self.rtol[i] for i in leaves], [self.atol[i] or 1e-36 for i in leaves]

    def begin(self, start: SolveStart) -> ControllerState:
        return AdaptiveStepState(self, start)


def _smallest_step(t: float, span: float) -> float:
    """Smallest step at t that exceeds round-off, where a time `span` lies ahead."""
    return 10 * math.ulp(max(abs(t), 1e-10 * abs(span)))


class AdaptiveStepState(AdaptiveControllerState):
    """State of `AdaptiveStep` in one solve."""

    def __init__(self, controller: AdaptiveStep, start: SolveStart):
        super().__init__(start)
        assert start.solver.error_order is not None
        self.controller, self.q = controller, start.solver.error_order
        self.t_end, self.through_search = start.t_end, start.through_search
        tolerances = list(zip(controller.rtol, controller.atol, strict=True))
        self.controlled = [i for i, pair in enumerate(tolerances) if all(map(math.isfinite, pair))]
        self.rtol, self.atol = controller.tolerances(self.controlled)
        self.n_attempts, self.limit = 0, controller.max_steps
        self.just_rejected = False
        self.last = 1e-4  # error ratio of the last accepted step; Hairer's initial value
        span = abs(number(start.t_end - start.t0))
        smallest = _smallest_step(0.0, span)
        if controller.h0 is not None and not controller.h0 >= smallest:
            raise InvalidOptionError(
                f"AdaptiveStep(h0={controller.h0}) is too short for a solve over a time of {span:.3g}: steps below "
                f"{smallest:.2g} are no more than round-off of the time. Give a longer h0, or None to have it chosen."
            )
        size = controller.h0 or self._first_step(start)
        size = max(size, controller.h_min, 10 * math.ulp(number(start.t0)))  # the step must move the time
        self.h: Time = math.copysign(min(size, controller.h_max), number(start.t_end - start.t0))

    def _scaled(self, x: Leaves, z0: Tensors, z1: Tensors) -> Tensor:
        """norm(x / (atol + rtol max(|z0|, |z1|))) over the controlled leaves."""
        if len(self.controlled) < len(x):
            x, z0, z1 = (tuple(leaves[i] for i in self.controlled) for leaves in (x, z0, z1))
        if not x:
            return torch.zeros(())
        scale = foreach_maximum(foreach_abs(z0), foreach_abs(z1))
        scale = foreach_add(foreach_mul(scale, self.rtol), self.atol)
        return checked_norm(self.controller.norm, tuple(foreach_div(x, scale)))

    @torch.no_grad()
    def _first_step(self, start: SolveStart) -> float:
        """Choose the first step as any other: its error is to be the tolerance, with the same safety.

        From f at the start and at a point nearby (as in Hairer, Norsett, Wanner (1993), II.4) come the scaled norms d1
        of f and d2 of its derivative along the solution. With the rate lambda = d2 / d1, at which f changes, an
        estimate of order q is about h d1 (lambda h)^(q - 1) / (2^(q - 2) q!) (those of this package are, within a
        factor of 4 on linear problems).
        """
        end, z0 = start.t_end if start.first_jump is None else start.first_jump, start.state.point
        span = number(end - start.t0)
        f0 = start.solver.first_slope(start.f, start.t0, start.state, start.carry)
        d0, d1 = torch.stack([self._scaled(z0, z0, z0), self._scaled(f0, z0, z0)]).tolist()
        known = d0 > 1e-5 and 1e-5 < d1 < math.inf
        size = min(0.01 * d0 / d1 if known else 1e-6, abs(span))
        h = math.copysign(size, span)
        f1 = start.f(start.t0 + h, combine(z0, (h,), (f0,)))
        d2 = float(self._scaled(foreach_sub(f1, f0), z0, z0)) / size
        if not 1e-15 < max(d1, d2) < math.inf:
            return min(abs(span), max(1e-6, 1e-3 * size))
        # f may change faster than it seems to at the start: no slower than over the span, or while y moves by ten
        # times its size.
        if d1 <= 1e-5:  # f is zero at the start, and grows: it tells nothing of the rate
            d1 = max(d1, d2 * abs(span))
        rate = max(d2 / max(d1, 1e-15), 1 / abs(span), 0.1 * d1 / d0 if known else 0.0)
        constant = 2.0 ** (self.q - 2) * math.factorial(self.q)
        return min(self.controller.safety * (constant * rate / max(d1, 1e-15)) ** (1 / self.q) / rate, abs(span))

    def next_time(self, t: Time, target: Time) -> Time:
        # A step is stretched by 1 %, or 1e-6 where h is at its limit, rather than leave a tiny last step.
        size, left = number(abs(self.h)), number(abs(target - t))
        stretch = 1e-6 if 1.01 * size > self.controller.h_max else 0.01
        if not left <= (EVEN_STEPS + stretch) * size:
            return t + self.h
        n = math.ceil(left / size - stretch)
        if n <= 1:
            return target
        return t + (target - t if self.through_search else number(target - t)) / n

    def error_ratio(self, before: State, attempt: Attempt) -> Tensor:
        assert attempt.error is not None
        with torch.set_grad_enabled(self.through_search):
            return self._scaled(attempt.error, before.point, attempt.state.point)

    def accepts(self, t0: Time, t1: Time, attempt: Attempt, ratio: Tensor, value: float) -> bool:
        h = t1 - t0 if self.through_search else number(t1 - t0)
        accepted = value <= 1  # false for nan
        self.n_attempts += 1
        factor = self._factor(ratio, value)
        if accepted:
            self._adapt(h, factor, value)
        else:
            self.n_rejected += 1
            self.h = h * factor
        self.just_rejected = not accepted
        h_max = self.controller.h_max
        if abs(self.h) > h_max:
            self.h = math.copysign(h_max, number(h))
        if not accepted:
            self._check_size(number(t0), number(h), attempt, value)
        if self.n_attempts >= self.limit and not (accepted and t1 is self.t_end):
            self._raise_step_limit(number(t1 if accepted else t0))
        return accepted

    def _factor(self, ratio: Tensor, value: float) -> Time:
        """Return the factor by which h changes after a step with this error over the tolerance."""
        controller = self.controller
        low, high = controller.min_factor, controller.max_factor
        if value == 0:
            return high
        if not math.isfinite(value):
            return low
        beta = controller.beta
        power, rest = (0.75 * beta - 1) / self.q, controller.safety * self.last ** (beta / self.q)
        wish: Time = value**power * rest
        if self.through_search:  # adds zero and the derivative by r: h keeps its bits
            r = ratio.to("cpu", torch.float64)
            wish = wish + (r**power - r.detach() ** power) * rest
        return min(high, max(low, wish))

    def _adapt(self, h: Time, factor: Time, value: float) -> None:
        """Choose the next h after an accepted step."""
        self.last = max(value, 1e-4)
        if self.just_rejected:
            factor = min(1.0, factor)
        # A step cut short to land on an output says little about the next h: keep the longer.
        cut_short = 0 < abs(h) < 0.99 * abs(self.h)  # h = 0: too short to move the time
        self.h = max(h * factor, self.h, key=abs) if cut_short else h * factor
        self.limit += cut_short  # many output times are no sign of trouble

    def _raise_step_limit(self, t: float) -> NoReturn:
        raise StepLimitError(
            f"{self.n_attempts} steps reached t = {t:.6g} of "
            f"{number(self.t_end):.6g} (h = {abs(number(self.h)):.3g}, {self.n_rejected / self.n_attempts:.0%} "
            "rejected). The problem may be stiff, or contract too much for ALF without refresh; loosen rtol/atol, "
            'try another solver, or raise AdaptiveStep(max_steps=...), in odeint options={"max_num_steps": ...}.'
        )

    def _check_size(self, t: float, h: float, attempt: Attempt, ratio: float) -> None:
        smallest = max(self.controller.h_min, _smallest_step(t, number(self.t_end) - t))
        if abs(self.h) >= smallest:
            return
        if not math.isfinite(ratio):
            assert attempt.error is not None
            leaf = first_non_finite((*attempt.error, *attempt.state.point))
            where = "" if leaf is None else f" in leaf {leaf % len(attempt.state.point)}"
            raise NonFiniteError(
                f"The step from t = {t:.6g} gives non-finite values{where} even with h = {abs(h):.3g}. f is not "
                "finite there, or the solution grows without bound before the end time."
            )
        raise StepUnderflowError(
            f"At t = {t:.6g} the tolerance asks for steps below {smallest:.3g} (h = {abs(number(self.h)):.3g}, error "
            f"{ratio:.3g} x tolerance, {self.n_rejected / self.n_attempts:.0%} of {self.n_attempts} attempts "
            "rejected). Loosen rtol/atol (float32 cannot meet rtol below 1e-5), use a float64 state, or look "
            "whether there is a jump in f or the solution grows without bound at this time."
        )
