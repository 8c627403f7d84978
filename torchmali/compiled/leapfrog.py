"""A leapfrog that takes its steps, and takes them back, by machine code: what the loop and the backward pass are given
in place of the solver of a compiled solve.

Loop, controller, refreshes, outputs and the tape are those of an eager solve. A step that machine code does not take
(with outputs inside, from a kept state) is taken by `Leapfrog` itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.linalg import vector_norm

from torchmali.compiled.attempts import Attempts, laid_out_like, plan_of_start, plan_of_step
from torchmali.compiled.loops import Loops
from torchmali.compiled.recording import NotCompiledError
from torchmali.compiled.table import Piece, pieces_back, pieces_of, start_piece
from torchmali.copies import copied
from torchmali.field.evaluate import Field
from torchmali.refresh import N_VALUES
from torchmali.solvers.base import Attempt, Record, Slope, StepBack
from torchmali.solvers.cotangent import Cotangent
from torchmali.solvers.leapfrog import Leapfrog, Residuals, pull_start_of_inner
from torchmali.state.base import State
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors, Time, add_, eps_of, first_non_finite, number

SLOTS = (8, 24)  # of memory for the slopes of a step
ROUNDINGS = 1e4  # of f(t0, y0): by so many of them the value of machine code may differ


class Outside(NamedTuple):
    """The tensors that f reads beside its arguments: each is a place in theta, or one of `saved` (None)."""

    places: Sequence[int | None]
    saved: Sequence[Tensor]

    def tensors(self, field: Field) -> list[Tensor]:
        others = iter(self.saved)
        return [(next(others) if place is None else field.theta[place]).detach() for place in self.places]


def agrees(found: Tensors, wanted: Tensors) -> bool:
    """Whether the first value of machine code is that of f itself. Raise if it is not, and f is finite.

    False: f is not finite.
    """
    for x, y in zip(found, wanted, strict=True):
        if not bool(vector_norm(x - y) <= ROUNDINGS * eps_of(x.dtype) * vector_norm(y)):
            if first_non_finite((y,)) is None:
                raise NotCompiledError("f returns other numbers than its trace does: it has a state of its own")
            return False
    return True


@dataclass(frozen=True)
class Code:
    """The machine code of a solve. tolerance: of the controller, if code is to judge attempts."""

    loops: Loops
    attempts: Attempts
    outside: Outside
    first_value: Tensors
    tolerance: Tensor


@dataclass(frozen=True, repr=False)
class CompiledLeapfrog(Leapfrog):
    """A leapfrog whose moves are machine code, for one solve and its backward pass.

    given: the solver that it stands for. judges: whether the controller's error over the tolerance is that of the code.
    """

    given: Any = field(default=None, compare=False)
    code: Any = field(default=None, compare=False)
    judges: bool = field(default=False, compare=False)

    joins_steps = True

    @classmethod
    def of(cls, given: Leapfrog, code: Code, judges: bool) -> CompiledLeapfrog:
        twin = object.__new__(cls)  # `given` has been checked
        vars(twin).update(vars(given), given=given, code=code, judges=judges)
        return twin

    def __repr__(self) -> str:
        return repr(self.given)

    @property
    def value(self) -> Leapfrog:
        return self.given

    @property
    def saved(self) -> Sequence[Tensor]:
        return self.code.outside.saved

    def with_saved(self, saved: Sequence[Tensor]) -> CompiledLeapfrog:
        code = copied(self.code, outside=self.code.outside._replace(saved=saved), first_value=())
        return copied(self, code=code)

    def start(self, f: Slope, t0: Time, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors | None]:
        assert isinstance(f, Field) and isinstance(t0, float)
        code, zeros = self.code, self.code.loops.zero_state
        inputs = *z0, *zeros, *zeros, *zeros * N_VALUES
        found = code.attempts(plan_of_start(), (t0, 0.0, 0.0), code.tolerance, inputs, code.outside.tensors(f))
        agrees(found.v, code.first_value)
        return arithmetic.of(z0).with_slope(found.v), None

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
        n_slots, plan = self._n_slots if keeps_stages else 0, plan_of_step(self.given)
        if n_slots is None or (plan.gives_slope and not adaptive):  # nobody wants the slope at the end
            return super().step_with_residuals(f, t0, t1, state, carry, adaptive, residuals, keeps_stages)
        assert isinstance(f, Field) and isinstance(t0, float) and isinstance(t1, float)
        code, n = self.code, len(state.point)
        n_new, before = len(self.scheme.observed), [] if residuals is None else residuals[-N_VALUES:]
        judges = residuals is not None and len(before) + n_new >= N_VALUES
        values = [*code.loops.zero_state * (N_VALUES - len(before)), *[x for leaves in before for x in leaves]]
        inputs = *state.point, *state.slope, *(carry or state.slope), *values
        moment = t0, t1 - t0, float(judges)
        found = code.attempts(plan, moment, code.tolerance, inputs, code.outside.tensors(f), n_slots)
        f.count(plan.n_evals)
        if residuals is not None:
            residuals += [tuple(found.values[i * n : (i + 1) * n]) for i in range(N_VALUES)][-n_new:]
        ratio, alternation = found.numbers.unbind()
        return Attempt(
            Floats(found.z, found.v),
            found.error if adaptive else None,
            found.u if plan.gives_slope else None,
            [state.slope, *zip(*[x[: self.n_reflects] for x in found.slopes], strict=True)] if n_slots else (),
            ratio=ratio if self.judges else None,
            alternation=alternation if self.judges else None,
        )

    @property
    def _n_slots(self) -> int | None:
        """Slots for the slopes of a step; None: it has too many. Code is made for each number of slots."""
        return next((n for n in SLOTS if n > self.n_reflects), None)

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
        if record is not None:
            return super().run(f, times, state, n_observed, record, e, is_open)
        assert isinstance(f, Field) and not (e or is_open)
        code, (pieces, rest) = self.code, pieces_of(self.given, [number(t) for t in times], n_observed)
        z, v, outside, n = state.point, state.slope, code.outside.tensors(f), len(state.point)
        looks = self.refresh_policy == "auto"
        values: Sequence[Tensor] = code.loops.zero_state * N_VALUES if looks else ()
        for piece in pieces:
            z, v, values, _ = code.loops.forward(piece, plan_of_start().first, z, v, values, outside)
        add_(z, v, rest)
        f.count((len(times) - 1) * self.n_reflects)
        n_kept = min(N_VALUES, n_observed * len(self.scheme.observed)) if looks else 0
        residuals = [tuple(values[i * n : (i + 1) * n]) for i in range(N_VALUES - n_kept, N_VALUES)]
        return Floats(z, v), residuals

    def pull_run(self, f: Field, times: Sequence[float], state: State, a: Cotangent) -> State:
        assert not f.wants_t
        pieces, rest = pieces_back(self.given, times)
        point, slope = self._pulled(f, pieces, state.point, state.slope, a)
        add_(a.v, a.z, rest)
        add_(point, slope, -rest)
        n_reflects = (len(times) - 1) * self.n_reflects
        f.count(n_reflects, n_reflects)
        return Floats(point, slope)

    def _pull_from_end(self, f: Field, step: StepBack, state: State, a: Cotangent) -> State:
        n_slots = self._n_slots
        if step.inside is None or n_slots is None:
            return super()._pull_from_end(f, step, state, a)
        inner = self._pull_inner(f, step, state.point, ())
        assert inner is not None
        pieces, rest = pieces_back(self.given, (step.t0, step.t1))
        slots = [x.new_zeros(n_slots, *x.shape) for x in state.point]
        for j, of_stage in enumerate(inner.stages[1:]):
            for whole, part in zip(slots, of_stage or (), strict=False):
                whole[j] = part
        point, slope = self._pulled(f, pieces, state.point, state.slope, a, slots)
        add_(a.v, a.z, rest)
        pull_start_of_inner(a, inner)
        add_(point, slope, -rest)
        f.count(self.n_reflects, self.n_reflects)
        return Floats(point, slope)

    def pull_start(self, f: Field, t: Time, state: State, a: Cotangent) -> tuple[State, Time | None]:
        assert isinstance(t, float) and not f.wants_t
        _, slope = self._pulled(f, [start_piece(t)], state.point, self.code.loops.zero_state, a)
        f.count(1, 1)
        return state.with_slope(slope), None

    def _pulled(
        self,
        f: Field,
        pieces: Sequence[Piece],
        point: Tensors,
        slope: Tensors,
        a: Cotangent,
        inner: Sequence[Tensor] = (),
    ) -> tuple[Tensors, Tensors]:
        """Follow pieces back with `a`; return z and v before them. inner: see `Loops.backward`."""
        loops, outside, n = self.code.loops, self.code.outside, len(point)
        moving = [place for place in outside.places if place is not None]
        places = [n + place for place, depends in zip(moving, loops.depends, strict=False) if depends]
        sums = [zero if a.sums[k] is None else a.sums[k] for k, zero in zip(places, loops.zero_sums(), strict=True)]
        likes = (*loops.zero_state * 4, *loops.summed)
        state = [*point, *slope, *a.z, *a.v, *sums]
        state = [x if x.stride() == y.stride() else laid_out_like(x, y) for x, y in zip(state, likes, strict=True)]
        tensors = outside.tensors(f)
        for piece in pieces:
            state = list(loops.backward(piece, plan_of_start().first, state, tensors, inner))
        z, v, az, av = (tuple(state[i * n : (i + 1) * n]) for i in range(4))
        a.replace(az, av, dict(zip(places, state[4 * n :], strict=True)))
        return z, v
