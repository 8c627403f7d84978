"""Algorithm 1 of the paper: the one forward loop. It knows nothing of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchmali.controllers import Start, StepController
from torchmali.solution import NonFinite, Stats
from torchmali.solvers.base import Slope, Solver
from torchmali.state import Floats, State, Tensors, Time, first_non_finite, number
from torchmali.tape import Output, Refresh, Step, Tape

Emit = Callable[[int, Tensors], None]


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
    keep_every: int | None = None,
    through_search: bool = False,
    locate: bool = False,
) -> tuple[State, Tape]:
    """Solve from times[0] to times[-1]; returns the end state and the tape.

    Calls emit(k, z(times[k])) for each output, in order.

    keep_every: keep the state before every n-th step on the tape. Times are advanced by the h that was used (the
    paper's listing adds the next one). The end state is tested for finiteness; if it fails, the solve is repeated with
    `locate` to say where it went wrong, so that the loop itself need not look.
    """
    tape, t = Tape(), times[0]
    state, carry = solver.start(f, t, z0, arithmetic)
    if state.slope:
        tape.events.append(Refresh(t))
    tape.events.append(Output(0, None))
    emit(0, state.point)
    pace = controller.pace(Start(f, solver, t, times[-1], state, carry, through_search))
    if locate:
        _raise_if_non_finite(state, f"in y0 or in f at the start, t = {number(t):.6g}")

    lands, adaptive = controller.lands(solver), controller.adaptive
    k = 1 if lands else len(times) - 1  # the output on which steps land next
    waiting = 1  # the first output not yet handed out
    n_steps = 0
    while k < len(times):
        target = times[k]
        while t is not target:
            t1 = pace.next(t, target)
            attempt = solver.step(f, t, t1, state, carry, adaptive)
            if adaptive and not pace.accepts(t, t1, state, attempt):
                carry = attempt.stages[0] if attempt.stages else carry  # f(t, z) is known by now
                continue
            kept = keep_every is not None and n_steps % keep_every == 0
            tape.events.append(Step(t, t1, tape.keep(state) if kept else None))
            n_steps += 1
            carry = attempt.carry
            inside = () if lands else _between(times, waiting, k, t1)
            if inside:
                ys, carry = solver.interpolate(f, t, t1, state, attempt, [times[i] for i in inside])
                for i, y in zip(inside, ys, strict=True):
                    tape.events.append(Output(i, times[i]))
                    emit(i, y)
                waiting += len(inside)
            if locate:
                _raise_if_non_finite(attempt.state, f"at t = {number(t1):.6g} (h = {abs(number(t1 - t)):.3g})")
            state, t = attempt.state, t1
        tape.events.append(Output(k, None))
        emit(k, state.point)
        k, waiting = k + 1, k + 1

    stats.n_steps, stats.n_rejected = n_steps, pace.n_rejected
    sizes = [abs(event.t1 - event.t0) for event in tape.events if isinstance(event, Step)]
    stats.h_min, stats.h_max = number(min(sizes)), number(max(sizes))
    if first_non_finite(state.point) is not None:
        with torch.no_grad():
            integrate(f, z0, [number(t) for t in times], solver, controller, lambda k, z: None, stats, locate=True)
        raise NonFinite("The solution is not finite, but a repetition of the same solve is: f is not repeatable.")
    return state, tape


def _between(times: Sequence[Time], first: int, last: int, t1: Time) -> range:
    """The outputs first, ..., last - 1 as far as they do not lie beyond t1."""
    end = first
    forward = times[-1] > times[0]
    while end < last and (times[end] <= t1 if forward else times[end] >= t1):
        end += 1
    return range(first, end)


def _raise_if_non_finite(state: State, where: str) -> None:
    leaf = first_non_finite((*state.point, *state.slope))
    if leaf is not None:
        raise NonFinite(
            f"Non-finite values in leaf {leaf % len(state.point)} of the state, first seen {where}. Look at f there, "
            "use smaller steps, or an adaptive controller."
        )
