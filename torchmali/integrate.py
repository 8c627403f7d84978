"""Algorithm 1 of the paper: the one forward loop. It knows nothing of gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchmali.controllers import Start, StepController
from torchmali.solution import NonFinite, Stats, require
from torchmali.solvers.base import Slope, Solver
from torchmali.state import FITS, Floats, State, Tensors, Time, first_non_finite, number
from torchmali.tape import Output, Refresh, Rescale, Step, Tape
from torchmali.watch import Watch

Emit = Callable[[int, Tensors], None]
LOOK_THERE = "Look at f there, use smaller steps, or an adaptive controller."


class Effects:
    """What evaluations leave behind beside their value, to be undone. Here: nothing."""

    def mark(self) -> Any:
        return None

    def back_to(self, mark: Any) -> None:
        pass


def integrate(
    f: Slope,
    z0: Tensors,
    times: Sequence[Time],
    solver: Solver,
    controller: StepController,
    emit: Emit,
    stats: Stats,
    *,
    arithmetic: type[State] = Floats,
    tape: Tape | None = None,
    through_search: bool = False,
    locate: bool = False,
    effects: Effects = Effects(),  # noqa: B008
) -> tuple[State, Tape]:
    """Solve from times[0] to times[-1]; returns the end state and the tape (the given one, filled).

    Calls emit(k, z(times[k])) for each output, in order.

    Times are advanced by the h that was used (the paper's listing adds the next one). What has to be read from a device
    is collected and read once per step. The end state is tested for finiteness; if it fails, the solve is repeated with
    `locate` to say where it went wrong, so that the loop itself need not look.
    """
    tape, t, before = tape or Tape(), times[0], effects.mark()
    state, carry = solver.start(f, t, z0, arithmetic)
    before = before if carry is None else effects.mark()  # else it is the first stage of the first step
    if state.slope:
        tape.events.append(Refresh(t, 0, None))
    tape.events.append(Output(0, None))
    pace = controller.pace(Start(f, solver, t, times[-1], state, carry, through_search))
    effects.back_to(before)
    emit(0, z0)
    if locate:
        _raise_if_non_finite(state, f"in y0 or in f at the start, t = {number(t):.6g}")

    lands, adaptive = controller.lands(solver), controller.adaptive
    watch = Watch(solver.renewal, solver.n_reflects, adaptive, pace.controlled)
    k = 1 if lands else len(times) - 1  # the output on which steps land next
    waiting = 1  # the first output not yet handed out
    while k < len(times):
        target = times[k]
        segment = k - 1 if lands else 0  # the output from which the steps at hand began
        while t is not target:
            t1, (looks, decides) = pace.next(t, target), watch.plan()
            before = effects.mark() if adaptive or state.is_bounded else None
            attempt, fit, renews = solver.step(f, t, t1, state, carry, adaptive, looks), FITS, False
            if adaptive or decides or state.is_bounded:
                start, mark, dropped = state, tape.mark(), []
                while True:
                    signs = [pace.measure(state, attempt)] if adaptive else []
                    if state.is_bounded:
                        signs.append(attempt.state.extent())
                    if decides:
                        signs.append(watch.alternation(attempt.evidence, state.point, number(t1 - t)))
                    values = _read(signs)
                    extent = values[adaptive : len(values) - decides]
                    fit = attempt.state.fit(extent, dropped) if state.is_bounded else FITS
                    if not fit.is_void:
                        break
                    # Nothing of the attempt can be trusted: the same once more, on another grid.
                    effects.back_to(before)
                    state = _rescaled(state, fit.bits, tape)
                    dropped.append(fit.bits)
                    attempt = solver.step(f, t, t1, state, carry, adaptive, looks)
                renews = decides and not values[-1] >= 0
                if not fit.finite:
                    values[0] = math.nan  # rejected, where a controller can reject it
                    what = "Values that are not finite, or outgrow the integer grid within one step,"
                    require(adaptive, f"{what} {_at(t, t1)}. {LOOK_THERE}", NonFinite)
                if adaptive and not pace.accepts(t, t1, attempt, signs[0], values[0]):
                    # The bits that fell off for the sake of a step too long are still wanted.
                    state = start
                    tape.back_to(mark)
                    effects.back_to(before)
                    carry = attempt.stages[0] if attempt.stages else carry  # f(t, z) is known by now
                    continue
            tape.step(t, t1, segment, k if t1 is target else segment, state)
            carry = attempt.carry
            inside = () if lands else _between(times, waiting, k, t1)
            if inside:
                ys, carry = solver.interpolate(f, t, t1, state, attempt, [times[i] for i in inside])
                for i, y in zip(inside, ys, strict=True):
                    tape.events.append(Output(i, times[i]))
                    emit(i, y)
                waiting += len(inside)
            if locate:
                _raise_if_non_finite(attempt.state, _at(t, t1))
            state = _rescaled(attempt.state, fit.bits, tape) if fit.bits else attempt.state
            if (watch.after_step(attempt.evidence) or renews) and t1 is not times[-1]:
                before = effects.mark()
                old = tape.keep(state.put_away_before_refresh()) if tape.rewinds else None
                tape.events.append(Refresh(t1, k if t1 is target else segment, old))
                # The way back will see f at the z that is left, without the bits that just fell off.
                state = solver.renew(f, t1, state, None if fit.bits else carry)
                watch.after_renewal()
                effects.back_to(before)
            t = t1
        tape.events.append(Output(k, None))
        emit(k, state.point)
        k, waiting = k + 1, k + 1

    stats.n_steps, stats.n_rejected, stats.n_checkpoints = tape.n_steps, pace.n_rejected, len(tape.checkpoints)
    stats.n_refreshes = sum(isinstance(event, Refresh) for event in tape.events) - bool(state.slope)  # not the start
    stats.n_rescales = sum(isinstance(event, Rescale) for event in tape.events)
    sizes = [abs(event.t1 - event.t0) for event in tape.events if isinstance(event, Step)]
    stats.h_min, stats.h_max = number(min(sizes)), number(max(sizes))
    if first_non_finite(state.point) is not None:
        with torch.no_grad():
            integrate(f, z0, [number(t) for t in times], solver, controller, lambda k, z: None, stats, locate=True)
        raise NonFinite("The solution is not finite, but a repetition of the same solve is: f is not repeatable.")
    return state, tape


def _read(signs: list[Tensor]) -> list[float]:
    """All their values, in one host read."""
    if not signs:
        return []
    if len(signs) == 1 and signs[0].ndim == 0:
        return [signs[0].item()]
    return torch.cat([sign.detach().reshape(-1).to(signs[0]) for sign in signs]).tolist()


def _rescaled(state: State, bits: tuple[int, ...], tape: Tape) -> State:
    state, lost = state.rescaled(bits)
    tape.events.append(Rescale(bits, tape.keep(lost) if tape.rewinds else None))
    return state


def _between(times: Sequence[Time], first: int, last: int, t1: Time) -> range:
    """The outputs first, ..., last - 1 as far as they do not lie beyond t1."""
    end = first
    forward = times[-1] > times[0]
    while end < last and (times[end] <= t1 if forward else times[end] >= t1):
        end += 1
    return range(first, end)


def _at(t0: Time, t1: Time) -> str:
    return f"at t = {number(t1):.6g} (h = {abs(number(t1 - t0)):.3g})"


def _raise_if_non_finite(state: State, where: str) -> None:
    leaf = first_non_finite((*state.point, *state.slope))
    if leaf is not None:
        raise NonFinite(
            f"Non-finite values in leaf {leaf % len(state.point)} of the state, first seen {where}. {LOOK_THERE}"
        )
