"""The solve of an ODE on leaves, without gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchmali.controllers import StepController
from torchmali.errors import NonFiniteError, warn
from torchmali.jumps import Jumps
from torchmali.loop.base import Integration, Job, SideEffects
from torchmali.loop.fixed_point import FixedPointLoop
from torchmali.loop.floats import FloatLoop
from torchmali.outputs.base import NoOutputs, Outputs
from torchmali.solvers.base import Slope, Solver
from torchmali.state.fixed_point import FixedPointArithmetic
from torchmali.state.floats import Floats
from torchmali.state.vectors import Tensors, Time, first_non_finite, number
from torchmali.tape import Tape


def integrate(
    f: Slope,
    z0: Tensors,
    times: Sequence[Time],
    solver: Solver,
    controller: StepController,
    outputs: Outputs | None = None,
    *,
    arithmetic: Any = Floats,
    tape: Tape | None = None,
    side_effects: SideEffects | None = None,
    through_search: bool = False,
    jumps: Jumps | None = None,
    warns: bool = True,
) -> Integration:
    """Solve from times[0] to times[-1]; returns the end state and the tape (the given one, filled).

    arithmetic: Floats, Traced, or a FixedPointArithmetic. through_search: keep the choice of h in the graph. warns: of
    a solution that alternates, if it was seen too late for a refresh. jumps: times at which f is discontinuous, the
    object by which f limits its times.

    The end state is tested for finiteness. If it is not finite, the solve is repeated to say where it stopped being so,
    so that the loop itself need not look.
    """
    effects = side_effects or SideEffects()
    job = Job(
        f, times, solver, controller, outputs or NoOutputs(), tape or Tape(), effects, through_search, False, jumps
    )
    loop = FixedPointLoop(job) if isinstance(arithmetic, FixedPointArithmetic) else FloatLoop(job)
    done = loop.run(z0, arithmetic)
    if loop.alternated_at_the_end and warns:
        _warn_of_alternation(done.tape.n_steps)
    if first_non_finite(done.state.point) is not None:
        with torch.no_grad():
            plain = [number(t) for t in times]
            job = Job(f, plain, solver, controller, NoOutputs(), Tape(), SideEffects(), locate=True, jumps=jumps)
            FloatLoop(job).run(z0, Floats)
        raise NonFiniteError("The solution is not finite, but a repetition of the same solve is: f is not repeatable.")
    return done


def _warn_of_alternation(n_steps: int) -> None:
    warn(
        f"f contracts too much for so few steps: in these {n_steps} steps v parted from f(t, y), and the solution, "
        "which alternates from one step to the next, is probably far off. Use more steps, ALF(refresh=1), which renews "
        "v after each, or a Runge-Kutta solver."
    )
