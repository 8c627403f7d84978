"""MALI: the memory-efficient ALF integrator."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torchmali.compiled.recording import NotCompiledError
from torchmali.compiled.solve import solve_compiled
from torchmali.controllers import StepController
from torchmali.errors import IncompatibleError, InvalidOptionError, warn
from torchmali.field.recorder import Expected, Followed, Recorder, TooManyEvaluationsError
from torchmali.gradients.base import Problem, Solved, solve_forward
from torchmali.gradients.direct import NotDirectError, direct_schedule, solve_directly
from torchmali.gradients.graphed import solve_with_graphs
from torchmali.gradients.replay import LIMITS, BackwardPass, ReplayGradient
from torchmali.loop.schedule import Schedule
from torchmali.outputs.stored import StoredOutputs
from torchmali.solution import TELL_LIMIT, short_repr
from torchmali.solvers.base import ReversibleSolver, Solver
from torchmali.solvers.leapfrog import Leapfrog
from torchmali.state.base import RewindableState
from torchmali.state.fixed_point import PERIOD, FixedPoint, FixedPointArithmetic
from torchmali.state.floats import Floats
from torchmali.state.traced import Traced
from torchmali.tape import Tape

VARIES = 1.1  # factor by which the number of evaluations differs from one adaptive solve to the next
FEW_STATES = 16  # beside graphs
GUESSED_STEPS = 32  # of an adaptive solve, before its first step
UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, repr=False)
class MALI(ReplayGradient):
    """Gradients in memory independent of the number of steps (Algorithm 4).

    The forward pass keeps the last state and the grid; the backward pass rebuilds each earlier state with the solver's
    inverse. One evaluation of f per reflect serves for both the inverse and the vector-Jacobian product. Exact up to
    round-off, which the backward pass amplifies where f contracts or expands.

    exact: integers in place of floats, so that every state is rebuilt to the last bit ("int64": wider ones than float32
    needs). checkpoint_every: keep every K-th state and go on from it; what drifts in between is solved
    again with more states kept. "auto" keeps none, unless the solver amplifies round-off by itself (damping): then as
    many as that takes; and if the start is not met, it solves again with about sqrt(n_steps) states. None: never.
    memory: as "2GiB", what "auto" may fill with graphs of the last evaluations, which the backward pass then takes in
    place of evaluations (plain autograd, if all fit), and with checkpoints. unsafe_damping: allow damped steps to be
    inverted without any, as published.
    """

    exact: bool | str = False
    checkpoint_every: int | str | None = "auto"
    memory: str | int | None = None
    unsafe_damping: bool = False
    inverts: ClassVar[bool] = True
    obstacle_to_dense: ClassVar[str | None] = "its memory must not grow with the number of steps"

    __repr__ = short_repr

    def __post_init__(self):
        if self.exact not in (False, True, "int64"):
            raise InvalidOptionError(f'MALI(exact={self.exact!r}): False, True or "int64".')
        every = self.checkpoint_every
        counts = isinstance(every, int) and not isinstance(every, bool) and every > 0
        if not counts and every not in ("auto", None):
            raise InvalidOptionError(
                f'MALI(checkpoint_every={every!r}): "auto", None, or a number of steps between checkpoints.'
            )
        if self.memory is not None and every != "auto":
            raise InvalidOptionError(
                f'MALI(memory={self.memory!r}) is for checkpoint_every="auto": give one of the two.'
            )
        if self.memory is not None:
            _bytes(self.memory)

    def check(self, solver: Solver, controller: StepController) -> None:
        # Messages are made where they are needed: this is called for every solve.
        if not isinstance(solver, ReversibleSolver):
            name = type(solver).__name__
            raise IncompatibleError(
                f"MALI needs a solver with an inverse, but {name} has none. Use solver=ALF(), or gradient=ACA()."
            )
        if self.exact and not (isinstance(solver, Leapfrog) and solver.is_exact_on_integers):
            raise IncompatibleError(
                f"MALI(exact={self.exact!r}) needs a solver that is exact on integers, ALF without damping; got "
                f"{solver}."
            )
        if self.checkpoint_every is None and not self.unsafe_damping and solver.amplification != 1:
            raise IncompatibleError(
                f"The inverse of {solver} amplifies round-off {solver.amplification:.3g} times per step: MALI needs "
                'checkpoints for it. Use checkpoint_every="auto" (the default), or unsafe_damping=True for the method '
                "as published."
            )
        super().check(solver, controller)

    def arithmetic(self, problem: Problem) -> Any:
        if not self.exact:
            return Floats
        jumps = problem.field.jumps
        t0, t1, *_ = problem.times if jumps is None else jumps.merged_with(problem.times)
        n_steps, n_first = problem.n_steps, problem.controller.n_steps([t0, t1])
        first = abs(t1 - t0) / n_first if n_first else 0.0
        return FixedPointArithmetic(PERIOD * problem.span / (n_steps or GUESSED_STEPS), first, self.exact == "int64")

    @property
    def state(self) -> type[RewindableState]:
        return FixedPoint if self.exact else Floats

    def data_dependent_parts(self, solver: Solver, controller: StepController) -> list[str]:
        again = self.reruns or self.on_integers  # segments that drifted, steps that left the grid
        found = [f"{self} (use MALI(checkpoint_every=None), or ACA())"] if again else []
        return [*super().data_dependent_parts(solver, controller), *found]

    @property
    def on_integers(self) -> bool:
        return bool(self.exact)

    @property
    def reruns(self) -> bool:
        return self.checkpoint_every is not None and not self.exact

    def solve(self, problem: Problem) -> Solved:
        is_plain = self.checkpoint_every in ("auto", None) and not self.exact
        schedule = direct_schedule(problem) if is_plain else None
        keeps_graphs = self.memory is not None and problem.wants_gradient and not self.exact
        if schedule is None:
            followed = self._followed(problem) if keeps_graphs else None
            return super().solve(problem) if followed is None else followed
        n_steps = self._steps_with_graphs(problem, schedule) if keeps_graphs else 0
        if keeps_graphs and not n_steps:
            return super().solve(problem)
        try:
            if n_steps:
                return solve_with_graphs(self, problem, schedule, n_steps)
            return solve_directly(self, problem, schedule)
        except NotDirectError:
            field, outputs = problem.field.is_restless(), problem.outputs.again()
            return super().solve(problem._replace(field=field, outputs=outputs))

    def solve_compiled(self, problem: Problem) -> Solved:
        if self.exact or self.memory is not None or self.checkpoint_every not in ("auto", None):
            raise NotCompiledError(f"{self} is not compiled (use MALI() without exact, memory and checkpoints)")
        return solve_compiled(self, problem)

    def _followed(self, problem: Problem) -> Solved | None:
        """Solve by plain autograd, if all graphs of a known f fit: as many as there were in the last solve with it.

        None: they do not.
        """
        field, last = problem.field, problem.field.last_n_evals
        if last is None:
            return None
        is_plain = type(problem.outputs) is StoredOutputs and problem.t is None and not problem.wants_code
        if not is_plain or not isinstance(problem.solver, Leapfrog) or problem.solver.eta != 1:
            return None
        most = int(self._n_graphs(problem))
        if VARIES * last > most:
            return None
        field = field.for_graphs()
        try:
            solved = solve_forward(
                problem._replace(field=field, outputs=problem.outputs.again()),
                problem.z0,
                problem.times,
                arithmetic=Traced,
                recorder=Followed(field, most),
            )
        except TooManyEvaluationsError:
            return None
        solved.stats.count(n_graphs=field.n_evals)
        return solved

    def _steps_with_graphs(self, problem: Problem, schedule: Schedule) -> int:
        """How many steps of a schedule have graphs that fit into the memory."""
        assert isinstance(problem.solver, Leapfrog)
        n_reflects, n_steps, n_graphs = problem.solver.n_reflects, schedule.n_steps, self._n_graphs(problem)
        # The evaluation of v0 has a graph if all have one.
        return n_steps if n_graphs >= n_steps * n_reflects + 1 else min(n_steps - 1, int(n_graphs / n_reflects))

    def _n_graphs(self, problem: Problem) -> float:
        """How many graphs of an evaluation fit into the memory."""
        assert self.memory is not None
        z0 = tuple([z.detach() for z in problem.z0])
        return _bytes(self.memory) / max(1, problem.field.bytes_of_graph(problem.times[0], z0))

    def tape(self, problem: Problem) -> Tape:
        longest = _longest(problem)
        if self.checkpoint_every is None and longest is not None:
            self._warn_of_damping(problem)
        if self.memory is not None:
            size = self._bytes_of_state(problem)
            at_most = int(_bytes(self.memory) // max(size, 1))
            if at_most < 1:
                raise InvalidOptionError(
                    f"MALI(memory={self.memory!r}) holds no state: one (z, v) here takes {size:,} bytes."
                )
            return Tape(keep_every=1, at_most=at_most, rewinds=True)
        every = longest if self.checkpoint_every == "auto" else self.checkpoint_every
        assert not isinstance(every, str)
        return Tape(keep_every=every, rewinds=True)

    def recorder(self, problem: Problem, tape: Tape) -> Recorder | None:
        solver, field = problem.solver, problem.field
        if self.memory is None or self.exact or not isinstance(solver, Leapfrog) or solver.eta != 1:
            return None
        n_steps, last = problem.n_steps, field.last_n_evals
        if n_steps is not None:
            n = n_steps * solver.n_reflects + 1
            expected = Expected(n, n)
        else:  # the number of adaptive steps varies from solve to solve
            expected = Expected(0 if last is None else int(last / VARIES), None if last is None else int(last * VARIES))
        size = max(1, self._bytes_of_state(problem))

        n_states = max(FEW_STATES, math.isqrt(n_steps or 0))  # more of them would take more time than they save

        def limit_states(n_bytes: float) -> None:
            tape.limit(min(n_states, int(n_bytes // size)))

        n_per_step, wants_t = solver.n_reflects + 1, problem.t is not None
        return Recorder(field, _bytes(self.memory), expected, n_per_step, wants_t, limit_states)

    def _bytes_of_state(self, problem: Problem) -> int:
        return 2 * sum(z.numel() * (8 if self.exact == "int64" else z.itemsize) for z in problem.z0)

    def _warn_of_damping(self, problem: Problem) -> None:
        solver, n_steps = problem.solver, problem.n_steps
        assert isinstance(solver, ReversibleSolver)
        factor = solver.amplification
        eps = torch.finfo(problem.coarsest).eps
        expected = f"{_power(factor, n_steps):.1e} in {n_steps} steps, " if n_steps else ""
        warn(
            f"The inverse of {solver} amplifies round-off {factor:.3g} times per step: {expected}and {1 / eps:.1e}, "
            f"which is all there is, in {math.log(1 / eps) / math.log(factor):.0f}. Where that is reached the gradient "
            'is wrong; checkpoint_every="auto" keeps it right.'
        )

    def judge_forward(self, problem: Problem, solved: Solved) -> None:
        if self.memory is None:
            return
        longest, every = _longest(problem), solved.integration.tape.keep_every
        if longest is not None and every is not None:
            needed = math.ceil(solved.stats.n_steps / longest) * self._bytes_of_state(problem)
            if every > longest:
                raise InvalidOptionError(
                    f"MALI(memory={self.memory!r}) leaves {every} steps between checkpoints, but {problem.solver} can "
                    f"be inverted over {longest} only, which takes {needed:,} bytes here. Give that much, or use "
                    "eta=1."
                )

    def judge_backward(self, passed: BackwardPass) -> None:
        if passed.gain > TELL_LIMIT:
            warn(
                f"{_told(passed.drift)}. Segments were solved again with more states kept, so the gradient is right, "
                "but took longer and more memory (stats.n_reruns). MALI(exact=True) or a smaller checkpoint_every=K "
                "avoids that."
            )
        elif not self.reruns and passed.drift > max(passed.coarseness, TELL_LIMIT):
            warn(
                f"{_told(passed.drift)}, or f is not the function it was in the forward pass, and the gradient is "
                'about as wrong. Use MALI(checkpoint_every="auto") or MALI(exact=True), or gradient=ACA().'
            )


def _told(drift: float) -> str:
    """A drift in words, with its order alone: what training says at every step in the same words, Python shows once."""
    size = f"above {10.0 ** math.floor(math.log10(drift)):g}" if 0 < drift < math.inf else f"of {drift:g}"
    return f"MALI rebuilt a state with a relative error {size}: round-off grew in the backward pass"


def _longest(problem: Problem) -> int | None:
    """How many steps can be inverted in a row before round-off grows to a tenth of the limit; None: any number."""
    assert isinstance(problem.solver, ReversibleSolver)
    factor = problem.solver.amplification
    if factor == 1:
        return None
    dtype = problem.coarsest
    reach = 0.1 * LIMITS[dtype].row / (torch.finfo(dtype).eps / 2)
    return max(1, int(math.log(reach) / math.log(factor)))


def _power(factor: float, n: int) -> float:
    return math.exp(min(700.0, n * math.log(factor)))


def _bytes(memory: str | int) -> float:
    """256, "256B", "256 kB", "1.5GiB" in bytes."""
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", str(memory))
    unit = UNITS.get((found[2] or "B").upper()) if found else None
    if unit is None:
        raise InvalidOptionError(
            f'MALI(memory={memory!r}): give a number of bytes, or a size such as "256MiB" or "2GB".'
        )
    assert found and unit
    return float(found[1]) * unit
