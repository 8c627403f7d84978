"""Measurement of the methods: first each on its own, then in interleaved rounds those whose order matters."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence

import torchmali.errors as errors
from torchmali._torch import tree_leaves
from torchmali.auditing.advise import Audit
from torchmali.auditing.budget import Budget, OutOfTime, Progress
from torchmali.auditing.problem import Problem
from torchmali.auditing.reference import Gradients, distance
from torchmali.auditing.rows import Method, Row
from torchmali.auditing.timing import median
from torchmali.controllers import StepController
from torchmali.errors import SolverWarning
from torchmali.measure import LiveBytes

N_ROUNDS = 20  # at most
BUSY = 0.25  # share of a run in which the calling thread itself must be at work for its clock to be used
FOR_ROUNDS = 0.3  # share of the whole time that the rounds may take


class Bench:
    """Measures methods on a problem. controller: for methods that have none. budget: time for all of it."""

    def __init__(self, problem: Problem, controller: StepController, budget: Budget, tell: Progress):
        self.problem, self.controller, self.budget, self.tell = problem, controller, budget, tell
        self.is_busy = False  # whether the calling thread was at work in some run

    def rows(self, methods: Mapping[str, Method], exact: Gradients | None) -> list[Row]:
        """Run each method twice. Each may take a quarter of the time that is left, the last four equal parts of it."""
        rows = []
        for i, (name, method) in enumerate(methods.items(), 1):
            self.tell(f"{name}, {i} of {len(methods)}")
            share = max(0.25, 1 / (len(methods) - i + 1))
            rows.append(self._row(name, method, exact, self.budget.deadline(share)))
        return rows

    def _row(self, name: str, method: Method, exact: Gradients | None, deadline: float) -> Row:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", SolverWarning)
            try:
                start, started = time.perf_counter(), time.thread_time()
                grads, stats = self._run(method, deadline)
                seconds, at_work = time.perf_counter() - start, time.thread_time() - started
                self.is_busy = self.is_busy or at_work > BUSY * seconds
                with LiveBytes() as live:
                    self._run(method, deadline)
            except OutOfTime:
                return Row(name, method, unmeasured=f"it takes more than its share of {self.budget}")
            except errors.InvalidOptionError:
                raise
            except (errors.SolverError, RuntimeError) as error:  # to run out of memory is a RuntimeError
                return Row(name, method, failure=str(error))
        notes = tuple(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, SolverWarning)))
        error = math.nan if exact is None else distance(grads, exact)
        return Row(name, method, error, live.peak, seconds, stats, notes)

    def _run(self, method: Method, deadline: float):
        problem = self.problem._replace(deadline=deadline)
        return problem.gradients(method.solver, method.controller or self.controller, method.gradient)

    def timed(self, rows: Sequence[Row], tolerance: float, uncertainty: float) -> list[Row]:
        """Return the rows with times from interleaved rounds, which end when the order of the rows is clear.

        The first round runs all rows that have numbers, later rounds only those whose order decides the advice. The
        direction of the rounds alternates, so that no row always runs after the same one.
        """
        found = {row.name: row for row in rows}
        active = [row.name for row in rows if row.is_measured]
        clock, end = self._clock(), self.budget.used + FOR_ROUNDS * self.budget.seconds
        for i in range(N_ROUNDS):
            self.tell(f"times, round {i + 1}: {', '.join(active)}")
            for name in active[:: -1 if i % 2 else 1]:
                row = found[name]
                if row.seconds > self.budget.left or not math.isfinite(seconds := self._seconds(row, clock)):
                    return list(found.values())
                times = *row.times, seconds
                found[name] = row._replace(times=times, seconds=median(times))
            active = undecided(list(found.values()), tolerance, uncertainty)
            if not active or self.budget.used > end:
                break
        return list(found.values())

    def _clock(self) -> Callable[[], float]:
        """Return a clock: the processor time of the calling thread, which other programs do not disturb, or wall time.

        The calling thread computes on the CPU itself and waits for helper threads in a busy loop, so that it is at work
        from the start to the end of a run. Wall time is for work that is done by another device or program.
        """
        is_fine = time.get_clock_info("thread_time").resolution < 1e-5
        on_cpu = all(z.device.type == "cpu" for z in tree_leaves(self.problem.y0))
        return time.thread_time if is_fine and on_cpu and self.is_busy else time.perf_counter

    def _seconds(self, row: Row, clock: Callable[[], float]) -> float:
        start = clock()
        try:
            self._run(row.method, self.budget.deadline(1.0))
        except (OutOfTime, RuntimeError):
            return math.inf
        return clock() - start


def undecided(rows: list[Row], tolerance: float, uncertainty: float) -> list[str]:
    """Names of the rows whose times decide the advice and are not yet known well enough, in the order of the table."""
    audit = Audit(rows, tolerance, "", uncertainty)
    fastest = min(audit.lean, key=lambda row: row.seconds, default=None)
    if fastest is None:
        return []
    largest = max(audit.good, key=lambda row: row.peak_bytes)
    others = [row for row in (*audit.lean, largest) if row is not fastest]
    open_ones = {row.name for row in others if not row.time_over(fastest).is_settled}
    return [row.name for row in rows if open_ones and row.name in {fastest.name, *open_ones}]
