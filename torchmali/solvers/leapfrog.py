"""Leapfrog solvers, their inverse and their pullback, from two moves.

    drift    z <- z + e v
    reflect  v <- v + 2 eta (f(t, z) - v)          its inverse: v <- (v - 2 eta f) / (1 - 2 eta)

A leapfrog solver is a symmetric list of drift coefficients with one reflect between neighbours: the asynchronous
leapfrog integrator (ALF) has (1/2, 1/2). Undamped, two ALF steps are a Strang splitting of z' = f, v' = f' (2 f - v)
into a drift and a reflected drift, so the coefficients of any splitting scheme give a reversible method of its order.
Stage times are t0 + node (t1 - t0) in both directions: t + e - e is not t.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate as running_sums
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchmali._torch import foreach_add_, foreach_mul, foreach_sub, foreach_zero_
from torchmali.errors import InvalidOptionError
from torchmali.field.evaluate import Field, Recorded
from torchmali.solution import short_repr
from torchmali.solvers.base import (
    Attempt,
    AugmentedSolver,
    InterpolatingSolver,
    Record,
    RunningSolver,
    Slope,
    StepBack,
    add_inner,
    shifted_start,
)
from torchmali.solvers.cotangent import Cotangent, accumulate
from torchmali.solvers.dense import Interpolant, leapfrog_interpolant
from torchmali.solvers.interpolation import InnerCotangents, pull_inner
from torchmali.state.base import State
from torchmali.state.traced import Traced
from torchmali.state.vectors import Leaves, Tensors, Time, add_, added, combine, dot, rows, scale_

# A step is rough where f - v at its ends differ by more than this share of f (`_StageSum`). Resolved steps have at most
# 0.3 (y' = -k y up to k h = 2.5, oscillations up to 1.5), stiff ones more than 1 (k h from 3 on).
ROUGH = 0.5

Residuals = list[Tensors]  # f - v at some reflects of a step, in order (refresh.py)


class Scheme(NamedTuple):
    """A list of drift coefficients in the form that the moves need."""

    first: float  # coefficient of the first drift
    rest: tuple[tuple[float, float], ...]  # (node of a reflect, coefficient of the drift after it)
    observed: tuple[int, ...]  # reflects at which f - v is a residual: between them the parasite changes its sign


def _is_symmetric_list(c: Any) -> bool:
    if not isinstance(c, tuple) or len(c) < 2 or not all(isinstance(x, (int, float)) for x in c):
        return False
    return abs(math.fsum(c) - 1) < 1e-9 and all(abs(x - y) < 1e-9 for x, y in zip(c, reversed(c), strict=True))


@functools.cache
def scheme_of(coefficients: tuple[float, ...]) -> Scheme:
    first, *others = coefficients
    nodes = running_sums(coefficients[:-1])
    return Scheme(first, tuple(zip(nodes, others, strict=True)), _observed(coefficients))


def _observed(coefficients: tuple[float, ...]) -> tuple[int, ...]:
    """Reflects whose f - v points the same way on a smooth solution, while the parasite w alternates between them.

    The k-th f - v is m_k h z'' - (-1)^k w with m_0 = c_0, m_k = c_k - m_(k - 1). As w has changed its sign when the
    next step begins, too, a step with an odd number of reflects needs an odd number of them.
    """
    n, shares = len(coefficients) - 1, [coefficients[0]]
    for c in coefficients[1:-1]:
        shares.append(c - shares[-1])
    if n % 2 == 0:
        return (0, n - 1)
    between = [k for k in range(1, n - 1, 2) if shares[k] * shares[0] > 0]
    return (0, between[0], n - 1) if between else (0,)


def _from_splitting(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """Drift coefficients from the first halves of a symmetric splitting scheme, without the middle ones.

    Each list sums to 1.
    """
    a = [*a, 1 - 2 * sum(a), *reversed(a)]
    b = [*b, 1 / 2 - sum(b)]
    b = [*b, *reversed(b)]
    pairs = [c / 2 for pair in zip(a, b, strict=False) for c in pair]
    return (*pairs, a[-1] / 2)


@dataclass(frozen=True)
class ErrorEstimate:
    """An error estimate h sum_j d_j u_j from the stages of a leapfrog step: u_0 = v0, then f at each reflect.

    weights: the d_j, one for each drift coefficient. They sum to 0, as an f that is constant makes no error. order: q
    in error = O(h^q). d_0 = 0 is advisable: u_0 carries the parasite v - f(t, z), which says nothing about the error.
    """

    weights: tuple[float, ...]
    order: int

    def __post_init__(self):
        sums_to_zero = abs(math.fsum(self.weights)) <= 1e-9 * math.fsum(map(abs, self.weights))
        if not (any(self.weights) and sums_to_zero and self.order >= 1):
            raise InvalidOptionError(
                f"ErrorEstimate(weights={self.weights!r}, order={self.order!r}): give weights that are not all 0 and "
                "sum to 0, and an order of at least 1."
            )


class Listed(NamedTuple):
    """Drift coefficients of a list that ALF has, and its estimate from the stages at hand (None: see `Leapfrog`)."""

    coefficients: tuple[float, ...]
    estimate: ErrorEstimate | None = None


# Order 4 in 5 evaluations. The estimate is the only combination of order 4 of its stages without u_0.
L5_HALF = (0.13416504789087996, 0.45983076150869989, -0.09399580939957986)
L5_WEIGHTS = (0.018521923, 0.018521923 * (1 - 2 * L5_HALF[0]) / (2 * (L5_HALF[0] + L5_HALF[1]) - 1))
L5 = Listed(
    (*L5_HALF, *reversed(L5_HALF)), ErrorEstimate((0.0, -L5_WEIGHTS[0], -L5_WEIGHTS[1], 0.0, *reversed(L5_WEIGHTS)), 4)
)
# Order 6 in 14 evaluations.
L14_HALF = (
    *(0.05187093855777696, 0.19511307633120931, -0.35774287289099482, 0.00072996434384825),
    *(0.28285007066538731, -0.0359052253842185, 0.27302186366783054),
)
L14_WEIGHTS = tuple(
    1e-3 * d
    for d in (
        *(4.90597209306, -9.28796498015, 28.30308481705, -28.15197734424),
        *(11.76668300398, -13.50265880738, 5.96686121766),
    )
)
L14 = Listed(
    (*L14_HALF, 0.18012436941832188, *reversed(L14_HALF)), ErrorEstimate((0.0, *L14_WEIGHTS, *reversed(L14_WEIGHTS)), 5)
)
# The lists of each order by their evaluations per step; the first one is the default. S6 (12 evaluations) and S10 (20)
# are those of Blanes and Moan, J. Comput. Appl. Math. 142 (2002) 313.
LISTS: dict[int, dict[int, Listed]] = {
    2: {1: Listed((0.5, 0.5))},
    4: {
        12: Listed(
            _from_splitting(
                (0.0792036964311957, 0.353172906049774, -0.0420650803577195), (0.209515106613362, -0.143851773179818)
            )
        ),
        5: L5,
    },
    6: {
        20: Listed(
            _from_splitting(
                (0.0502627644003922, 0.413514300428344, 0.0450798897943977, -0.188054853819569, 0.541960678450780),
                (0.148816447901042, -0.132385865767784, 0.067307604692185, 0.432666402578175),
            )
        ),
        14: L14,
    },
}


@dataclass(frozen=True, repr=False)
class Leapfrog(AugmentedSolver, RunningSolver, InterpolatingSolver):
    """A reversible solver from a symmetric list of drift coefficients that sums to 1.

    A step takes one evaluation of f between two neighbours of the list. order: p in global error = O(h^p), which the
    list must have. eta: damping, with (1/2, 1/2) only. It makes the method first order and its inverse amplify
    round-off by 1/|1 - 2 eta| per step; eta = 1/2 has no inverse. refresh: if f contracts, v parts from f(t, z) in an
    oscillation that no step size keeps small (docs/limits.md); "auto" replaces v by f(t, z) when that shows, n does so
    every n steps, "never" is the method as published. Each refresh costs one evaluation, and one state of memory if a
    backward pass will need it.

    estimate: how AdaptiveStep judges a step, from the slopes that it has evaluated. Without one a step takes one more
    evaluation for that, unless the list has two coefficients; longer lists with an odd number of evaluations cannot
    take adaptive steps then. With an estimate their steps are also rejected where h is too long for a stiff f, of which
    the estimate alone may see nothing (docs/limits.md).
    """

    coefficients: tuple[float, ...]
    order: int = 2
    eta: float = 1.0
    refresh: str | int = "auto"
    estimate: ErrorEstimate | None = None

    __repr__ = short_repr

    def __post_init__(self):
        c, name = self.coefficients, type(self).__name__
        if not _is_symmetric_list(c):
            raise InvalidOptionError(
                f"{name}(coefficients={c!r}): give a tuple of two or more numbers that sum to 1 and read the same in "
                "both directions, as in (0.5, 0.5)."
            )
        if self.estimate is not None and len(self.estimate.weights) != len(c):
            raise InvalidOptionError(
                f"{name}(estimate={self.estimate!r}): it has {len(self.estimate.weights)} weights, but a step has "
                f"{len(c)} slopes: v at its start and f at {len(c) - 1} reflects. Give one weight for each."
            )
        self._check_damping()
        every_n = isinstance(self.refresh, int) and not isinstance(self.refresh, bool) and self.refresh > 0
        if not every_n and self.refresh not in ("auto", "never"):
            raise InvalidOptionError(f'{name}(refresh={self.refresh!r}): "auto", "never", or a number of steps.')

    def _check_damping(self) -> None:
        eta, order, name = self.eta, self.order, type(self).__name__
        if not 0 < eta <= 1:
            raise InvalidOptionError(f"{name}(eta={eta}): damping must lie in (0, 1], where 1 is undamped ALF.")
        if eta == 0.5:
            raise InvalidOptionError(
                f"{name}(eta=0.5) has no inverse (it divides by 1 - 2 eta). Use eta=0.45, 0.55 or 1."
            )
        if eta != 1 and (order != 2 or self.n_reflects > 1):
            raise InvalidOptionError(
                f"{name}(order={order}, eta={eta}): damping makes any order the first. Use order=2, or eta=1 (the "
                "default)."
            )

    @property
    def refresh_policy(self) -> str | int:
        """When v is refreshed: "auto", "never", or every so many steps."""
        is_damped = self.eta != 1 and self.refresh == "auto"  # damping does what a refresh is for
        return "never" if is_damped else self.refresh

    @property
    def scheme(self) -> Scheme:
        return scheme_of(self.coefficients)

    @property
    def n_reflects(self) -> int:
        """Evaluations of f in a step."""
        return len(self.coefficients) - 1

    @property
    def error_order(self) -> int | None:
        # ALF minus Euler; or h (w_out - w_in), where w = v - f(t, z) is of order p + 1. With an odd number of reflects
        # w changes its sign in a step, and the difference is of a low order.
        if self.estimate is not None:
            return self.estimate.order
        if self.n_reflects == 1:
            return 2
        return None if self.n_reflects % 2 else self.order + 2

    @property
    def amplification(self) -> float:
        return 1 / abs(1 - 2 * self.eta)

    @property
    def is_exact_on_integers(self) -> bool:
        """Whether each move adds a function of one half of the state to the other: it can be undone to the bit."""
        return self.eta == 1

    @property
    def interpolates(self) -> bool:
        return True

    @property
    def interpolant(self) -> Interpolant:
        return leapfrog_interpolant(self.coefficients, self.eta)

    def scale_of_v(self, span: float) -> float:
        return abs(span)

    def start(self, f: Slope, t0: Time, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        return self.refreshed(f, t0, arithmetic.of(z0)), None

    def first_slope(self, f: Slope, t0: Time, state: State, carry: Tensors | None) -> Tensors:
        return state.slope

    def refreshed(self, f: Slope, t: Time, state: State, slope: Tensors | None = None) -> State:
        """The state with v = f(t, z); slope: f(t, z), if it is known."""
        return state.with_slope(f(t, state.point) if slope is None else slope)

    def pull_start(self, f: Field, t: Time, state: State, a: Cotangent) -> tuple[State, Time | None]:
        u, g, g_t = f.linearize(t, state.point, a.v)
        accumulate(a.sums, g)
        foreach_zero_(a.v)
        return state.with_slope(u), g_t

    def step(self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool) -> Attempt:
        return self.step_with_residuals(f, t0, t1, state, carry, adaptive, None)

    def step_with_stages(
        self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool
    ) -> Attempt:
        return self.step_with_residuals(f, t0, t1, state, carry, adaptive, None, keeps_stages=True)

    def step_with_residuals(
        self,
        f: Slope,
        t0: Time,
        t1: Time,
        state: State,
        carry: Tensors | None,
        adaptive: bool,
        residuals: Residuals | None,
        keeps_stages: bool = False,
    ) -> Attempt:
        """`step`, which appends f - v of some reflects to `residuals`.

        keeps_stages: the Attempt has v at the start and f at all reflects, for the interpolant.
        """
        h, eta, (first, rest, observed) = t1 - t0, self.eta, self.scheme
        v_in = state.slope if adaptive or keeps_stages else ()
        stages = [v_in] if keeps_stages else []
        seen = _StageSum(self.estimate, v_in) if adaptive and self.estimate is not None else None
        state = state.fork().drift(first * h)
        for j, (node, c) in enumerate(rest):
            u = f(t0 + node * h, state.point)
            if keeps_stages:
                stages.append(state.apart(u))
            if seen is not None:
                seen.add(j + 1, u, state.slope)
            if residuals is not None and j in observed:
                residuals.append(added(u, state.slope, -1.0))
            state = state.reflect(u, eta).drift(c * h)
        if seen is not None:
            return Attempt(state, seen.error(h), stages=stages)
        if adaptive:
            return self._judged(f, t1, h, state, v_in, carry, stages)
        return Attempt(state, stages=stages)

    def _judged(
        self, f: Slope, t1: Time, h: Time, state: State, v_in: Tensors, carry: Tensors | None, stages: list[Tensors]
    ) -> Attempt:
        """The Attempt of a step to `state`, with the estimate of a list that has none of its own."""
        if self.n_reflects == 1:
            # ALF minus Euler with v_in: eta h (u1 - v_in). From v, as u1 may be a view of the z that has moved on.
            return Attempt(state, combine(None, (h / 2, -h / 2), (state.slope, v_in)), stages=stages)
        # h (w_out - w_in), w = v - f(t, z). w_in is zero at the start and after a refresh.
        end, f_in = f(t1, state.point), v_in if carry is None else carry
        return Attempt(state, combine(None, (h, -h, -h, h), (state.slope, end, v_in, f_in)), end, stages)

    def run(
        self,
        f: Slope,
        times: Sequence[Time],
        state: State,
        n_observed: int = 0,
        record: Record | None = None,
        e: Time = 0.0,
        is_open: bool = False,
    ) -> tuple[State, Residuals]:
        """`RunningSolver.run`. The drift that ends a step and the one that begins the next are one drift.

        is_open: leave out the last drift, `last_drift` long; e: that of the run before, if it was left out there.
        """
        eta, (first, rest, observed) = self.eta, self.scheme
        residuals: Residuals = []
        before, state, n_steps = state, state.fork(), len(times) - 1
        for i in range(n_steps):
            t0, h = times[i], times[i + 1] - times[i]
            if record is not None:
                record(i, partial(_drifted_copy, state, e) if i else partial(_itself, before))
            is_observed = n_steps - i <= n_observed
            e = e + first * h
            for j, (node, c) in enumerate(rest):
                state = state.drift(e)
                u = f(t0 + node * h, state.point)
                if is_observed and j in observed:
                    residuals.append(added(u, state.slope, -1.0))
                state, e = state.reflect(u, eta), c * h
        return state if is_open else state.drift(e), residuals

    def last_drift(self, times: Sequence[Time]) -> Time:
        """The length of the drift that ends a run over these times."""
        return self.scheme.rest[-1][1] * (times[-1] - times[-2])

    def inverse(self, f: Slope, t0: Time, t1: Time, state: State) -> State:
        h, (first, rest, _) = t1 - t0, self.scheme
        state = state.fork()
        for node, c in reversed(rest):
            state = state.drift(-c * h)
            state = state.unreflect(f(t0 + node * h, state.point), self.eta)
        return state.drift(-first * h)

    def pullback(self, f: Field, step: StepBack, state: State, a: Cotangent) -> State:
        if step.before is not None:
            return self._pull_from_start(f, step, step.before, state, a)
        if step.inside is not None and (step.inside.needs_states or f.wants_t):
            return self._pull_with_stages(f, step, state, a)
        return self._pull_from_end(f, step, state, a)

    def pull_run(self, f: Field, times: Sequence[float], state: State, a: Cotangent) -> State:
        eta, (first, rest, _) = self.eta, self.scheme
        e, backwards, sums = 0.0, rest[::-1], a.sums
        for i in range(len(times) - 1, 0, -1):
            t0, h = times[i - 1], times[i] - times[i - 1]
            for node, c in backwards:
                e += c * h
                add_(a.v, a.z, e)
                state = state.drift(-e)
                # One evaluation per reflect serves twice: u gives v back, and its graph the VJP.
                if f.graphs:
                    recorded = f.record(t0 + node * h, state.point)
                    state, u, (g, _) = _at_kept(state, recorded), recorded.u, recorded.pull(a.v)
                    del recorded
                else:
                    u, g, _ = f.linearize(t0 + node * h, state.point, a.v)
                accumulate(sums, g, 2 * eta)
                scale_(a.v, 1 - 2 * eta)
                state, e = state.unreflect(u, eta), 0.0
                del u, g  # or they would still be there at the next evaluation
            e = first * h
        add_(a.v, a.z, e)
        return state.drift(-e)

    def _pull_from_end(self, f: Field, step: StepBack, state: State, a: Cotangent) -> State:
        if step.inside is None and not f.wants_t:
            return self.pull_run(f, (step.t0, step.t1), state, a)
        t0, h, (first, rest, _) = step.t0, step.t1 - step.t0, self.scheme
        inner = self._pull_inner(f, step, state.point, ())
        for j in range(len(rest), 0, -1):
            node, c = rest[j - 1]
            _pull_drift(c, h, state.slope if f.wants_t else (), a)
            state = state.drift(-c * h)
            recorded = f.record(t0 + node * h, state.point)
            state = _at_kept(state, recorded)
            self._pull_reflect(node, recorded, a, inner and inner.stages[j])
            state = state.unreflect(recorded.u, self.eta)
            del recorded
        _pull_drift(first, h, state.slope if f.wants_t else (), a)
        pull_start_of_inner(a, inner)
        return state.drift(-first * h)

    def _pull_with_stages(self, f: Field, step: StepBack, state: State, a: Cotangent) -> State:
        """Outputs inside the step are needed for their own cotangents: all stages are rebuilt before the first VJP."""
        t0, h, (first, rest, _) = step.t0, step.t1 - step.t0, self.scheme
        passed, slope = [], state.apart(state.slope)
        for node, c in reversed(rest):
            state = state.drift(-c * h)
            recorded = f.record(t0 + node * h, state.apart(state.point))  # a graph needs the z that it was recorded at
            state = _at_kept(state, recorded).unreflect(recorded.u, self.eta)
            passed.append(Passed(node, c, recorded, state.apart(state.slope)))
        state = state.drift(-first * h)
        self._pull_passed(f, step, passed[::-1], slope, state.point, a)
        return state

    def _pull_from_start(self, f: Field, step: StepBack, before: State, state: State, a: Cotangent) -> State:
        """The step is made once more from its kept start: nothing is inverted that f may have contracted."""
        t0, h, (first, rest, _) = step.t0, step.t1 - step.t0, self.scheme
        if len(rest) == 1 and step.inside is None and not (step.compares or f.wants_t or f.graphs):
            return self._pull_one_reflect(f, step, before, a)
        # Out of place: a graph needs the z that it was recorded at.
        now, passed = Traced(before.point, before.slope).drift(first * h), []
        for node, c in rest:
            recorded = f.record(t0 + node * h, now.point)
            passed.append(Passed(node, c, recorded, now.slope))
            if len(passed) < len(rest) or step.compares or f.wants_t:  # else nobody looks at the end
                now = now.reflect(recorded.u, self.eta).drift(c * h)
            del recorded
        self._pull_passed(f, step, passed, now.slope, before.point, a)
        return shifted_start(before, state, now) if step.compares else before

    def _pull_one_reflect(self, f: Field, step: StepBack, before: State, a: Cotangent) -> State:
        """`_pull_from_start` of a step with one evaluation, where nothing but its VJP is wanted."""
        h, (first, ((node, c),), _) = step.t1 - step.t0, self.scheme
        add_(a.v, a.z, c * h)
        point = added(before.point, before.slope, first * h)
        accumulate(a.sums, f.linearize(step.t0 + node * h, point, a.v)[1], 2 * self.eta)
        scale_(a.v, 1 - 2 * self.eta)
        add_(a.v, a.z, first * h)
        return before

    def _pull_passed(
        self, f: Field, step: StepBack, passed: list[Passed], slope: Tensors, z: Tensors, a: Cotangent
    ) -> None:
        """Pull `a` back over reflects that have been recorded. slope: v at the end of the step. z: at its start."""
        h = step.t1 - step.t0
        inner = None
        if step.inside is not None:
            inner = self._pull_inner(f, step, z, [passed[0].slope, *(x.recorded.u for x in passed)])
        while passed:
            node, c, recorded, v = passed.pop()
            _pull_drift(c, h, slope if f.wants_t else (), a)
            self._pull_reflect(node, recorded, a, inner and inner.stages[len(passed) + 1])
            slope = v
        _pull_drift(self.scheme.first, h, slope if f.wants_t else (), a)
        pull_start_of_inner(a, inner)

    def _pull_inner(self, f: Field, step: StepBack, z: Tensors, stages: Sequence[Tensors]) -> InnerCotangents | None:
        if step.inside is None:
            return None
        return pull_inner(self.interpolant, z, step.t0, step.t1, stages, step.inside, f.wants_t)

    def _pull_reflect(
        self, node: float, recorded: Recorded, a: Cotangent, of_stage: list[Tensor] | None = None
    ) -> None:
        """of_stage: dL/du of outputs inside the step."""
        eta = self.eta
        g, g_t = recorded.pull(a.v if of_stage is None else added(a.v, of_stage, 1 / (2 * eta)))
        accumulate(a.sums, g, 2 * eta)
        scale_(a.v, 1 - 2 * eta)
        if g_t is not None:
            a.add_to_times(2 * eta * (1 - node) * g_t, 2 * eta * node * g_t)


class _StageSum:
    """sum_j d_j u_j of the stages of one step, summed up as they come, and whether the step is rough.

    On a smooth solution f - v is the same at the first and the last reflect up to O(h^2). So is the parasite's share of
    it where their number is odd: it changes its sign from one to the next. Where the two differ by more than half of f,
    h is too long for f, and the sum may be small by accident (as it is for y' = -k y near k h = 3).
    """

    def __init__(self, estimate: ErrorEstimate, v_in: Tensors):
        self.weights = estimate.weights
        self.last = len(self.weights) - 1
        self.total: Leaves = ()
        self.first: Leaves = ()  # f - v at the first reflect,
        self.sizes: list[Tensor] = []  # and the norm of each row of f
        self._add(0, v_in)

    def add(self, j: int, u: Tensors, v: Tensors) -> None:
        """Add f at the j-th reflect, v: before it. u is not kept: it may be a view of a z that is moved in place."""
        self._add(j, u)
        if self.last % 2 == 0:
            return
        if j == 1:
            self.first, self.sizes = added(u, v, -1.0), [norms(x) for x in u]
        elif j == self.last:
            difference = foreach_sub(added(u, v, -1.0), self.first)
            rough = [if_rough(*each) for each in zip(difference, self.sizes, u, strict=True)]
            foreach_add_(self.total, rough, alpha=1.0)

    def _add(self, j: int, u: Tensors) -> None:
        weight = self.weights[j]
        if self.total and weight:
            foreach_add_(self.total, u, alpha=weight)
        elif weight:
            self.total = foreach_mul(u, weight)

    def error(self, h: Time) -> Tensors:
        """h times the sum, and in rows that are rough h times the difference besides."""
        return combine(None, (h,), (tuple(self.total),))


def norms(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows(x), dim=1)


def if_rough(difference: Tensor, size: Tensor, u: Tensor) -> Tensor:
    """The difference in rows in which it is more than half of f, 0 in the others."""
    is_rough = norms(difference) > ROUGH * torch.maximum(size, norms(u))
    n = difference.ndim
    return difference * is_rough.reshape([-1] * (n > 1) + [1] * (n - 1))


def _itself(state: State) -> State:
    return state


def _at_kept(state: State, recorded: Recorded) -> State:
    """The state with the z of an evaluation whose graph was kept, without the round-off with which z was rebuilt."""
    return state if recorded.z is None else state.with_point(recorded.z)


def _drifted_copy(state: State, e: Time) -> State:
    """The state after a drift, in memory of its own."""
    return state.with_slope(state.apart(state.slope)).drift(e)


class Passed(NamedTuple):
    """A reflect that was recorded, waiting for its VJP."""

    node: float
    c: float  # coefficient of the drift after it
    recorded: Recorded
    slope: Tensors  # v before it


def pull_start_of_inner(a: Cotangent, inner: InnerCotangents | None) -> None:
    """Add the shares that outputs inside a step have in z and v at its start."""
    if inner is None:
        return
    add_inner(a, inner)
    if inner.stages[0] is not None:
        add_(a.v, inner.stages[0], 1.0)


def _pull_drift(c: float, h: float, v: Tensors, a: Cotangent) -> None:
    """v: that of the drift, or empty if dL/dt is not wanted."""
    if v:
        dh = c * dot(a.z, v)
        a.add_to_times(-dh, dh)
    add_(a.v, a.z, c * h)


@dataclass(frozen=True, repr=False)
class ALF(Leapfrog):
    """Asynchronous leapfrog (Algorithms 2 and 3), damped for eta < 1 (Appendix A.5), and its kin of order 4 and 6.

    order: 2 takes one evaluation of f per step. evals: of f per step: 12 (the default) or 5 with order 4, 20 (the
    default) or 14 with order 6. The two defaults take one more with AdaptiveStep, for the error estimate; the others
    are meant for adaptive steps and have one from the slopes at hand (`leapfrog_for` chooses by the tolerance). eta:
    damping, with order 2 only. refresh: when v is replaced by f(t, z). See `Leapfrog` for both.
    """

    coefficients: tuple[float, ...] = field(init=False, repr=False)
    estimate: ErrorEstimate | None = field(init=False, repr=False, default=None)
    evals: int | None = None

    def __post_init__(self):
        if self.order not in list(LISTS):
            known = ", ".join(map(str, LISTS))
            raise InvalidOptionError(f"ALF(order={self.order}): there are orders {known}.")
        lists = LISTS[self.order]
        default = next(iter(lists))
        evals = default if self.evals is None else self.evals
        if evals not in list(lists):
            known = " or ".join(map(str, lists))
            raise InvalidOptionError(
                f"ALF(order={self.order}, evals={self.evals}): a step of order {self.order} takes {known} evaluations."
            )
        object.__setattr__(self, "coefficients", lists[evals].coefficients)
        object.__setattr__(self, "estimate", lists[evals].estimate)
        object.__setattr__(self, "evals", None if evals == default else evals)
        super().__post_init__()


# The tolerance below which the list of order 6 takes fewer evaluations (benchmarks/records/evaluations.json).
TIGHT = 1e-5


def leapfrog_for(rtol: float, inside: bool = False) -> ALF:
    """The leapfrog that takes the fewest evaluations in adaptive steps with this relative tolerance.

    `odeint(gradient="mali")` and `CNF` take it where they are given no solver. inside: outputs lie inside the steps and
    are interpolated, so that the interpolant has to be as accurate as the steps are (docs/work-precision.md has the
    measurements behind it).

        solve(f, y0, [0.0, 1.0], solver=leapfrog_for(1e-4), controller=AdaptiveStep(1e-4, 1e-5))
    """
    if rtol < TIGHT and not inside:
        return ALF(order=6, evals=14)
    return ALF(order=4, evals=5)
