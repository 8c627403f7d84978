"""The steps of a schedule as tables: each row is one evaluation of f, with the moves around it.

    forward     z <- z + e v,  u = f(t, z),  v <- alpha u + beta v
    backward    z <- z - e v,  a_v <- a_v + e a_z,  u = f(t, z),  (a_z, a_theta) += alpha a_v df/d(z, theta),
                a_v <- beta a_v,  v <- alpha u + beta v

A reflect is (alpha, beta) = (2, -1), the start v = f(t0, z0) is (1, 0). Steps of every leapfrog, in any number,
are rows of tables of one shape: a compiled loop serves them all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchmali.loop.schedule import Run, Schedule
from torchmali.refresh import LARGE, MAGNIFIED, N_VALUES
from torchmali.solvers.leapfrog import Leapfrog
from torchmali.state.vectors import eps_of

ROWS = 256  # of a table: a longer one is divided
# Columns: t, e, alpha, beta; whether f - v is kept, and judged (0, OF_SEVERAL_STEPS or OF_ONE_STEP); the drift behind
# the row, at the end of the step; what round-off explains, for float32 and for float64. Backward: which reflect of its
# step a row is, from 0 on, in place of the looks.
WIDTH = 9
T, E, ALPHA, BETA, KEEPS, JUDGES, REST, NOISE = range(8)
STAGE = KEEPS
FLOATS = (torch.float32, torch.float64)
OF_SEVERAL_STEPS, OF_ONE_STEP = 1.0, 2.0


class Piece(NamedTuple):
    """Rows of a table, from the first up to `stop`."""

    rows: Tensor  # (ROWS, WIDTH)
    stop: Tensor  # 0-d


class Leg(NamedTuple):
    """The rows from one output time to the next, or back."""

    pieces: Sequence[Piece]
    rest: float  # the drift behind the last row
    output: int | None  # forward: the output at its end. Backward: at its beginning, the later time


class Plan(NamedTuple):
    """All rows of a solve and of its backward pass."""

    start: Piece  # v = f(t0, z0), in both directions
    forward: Sequence[Leg]
    backward: Sequence[Leg]
    first: Tensor  # 0: the row with which each piece begins
    n_reflects: int


def plan_of(solver: Leapfrog, schedule: Schedule, times: tuple[float, ...]) -> Plan:
    """The tables of a schedule; those of the latest schedules are remembered."""
    return _remembered(_Key(solver, schedule, times))


class _Key:
    """A schedule by its identity: it is remembered itself, and to compare two takes long."""

    def __init__(self, solver: Leapfrog, schedule: Schedule, times: tuple[float, ...]):
        self.solver, self.schedule, self.times = solver, schedule, times

    def __hash__(self) -> int:
        return hash((id(self.schedule.runs), self.times))

    def __eq__(self, other: object) -> bool:
        is_key = isinstance(other, _Key)
        return is_key and other.schedule.runs is self.schedule.runs and other.solver == self.solver


@functools.lru_cache(maxsize=16)
def _remembered(key: _Key) -> Plan:
    solver, schedule, times = key.solver, key.schedule, key.times
    legs = _legs_of(schedule.runs)
    forward, n_kept = [], 0
    for runs in legs:
        rows, e = [], 0.0
        for run in runs:
            e, n_kept = _append_run(rows, solver, run, e, n_kept)
        forward.append(Leg(_pieces(rows), e, runs[-1].output))
    backward = []
    for runs in reversed(legs):
        rows, e = [], 0.0
        for run in reversed(runs):
            e = _append_run_back(rows, solver, run.times, e)
        backward.append(Leg(_pieces(rows), e, runs[-1].output))
    n_reflects = schedule.n_steps * solver.n_reflects
    return Plan(start_piece(times[0]), forward, backward, torch.zeros((), dtype=torch.int64), n_reflects)


def _legs_of(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs between two outputs."""
    found: list[list[Run]] = [[]]
    for run in runs:
        found[-1].append(run)
        if run.output is not None:
            found.append([])
    return [leg for leg in found if leg]


def pieces_of(solver: Leapfrog, times: Sequence[float], n_observed: int) -> tuple[list[Piece], float]:
    """Steps from each time to the next, of which so many of the last keep f - v; and the drift behind them."""
    rows: list[list[float]] = []
    rest = _append_steps(rows, solver, times, n_observed, 0.0)
    return _pieces(rows), rest


def _append_steps(
    rows: list[list[float]], solver: Leapfrog, times: Sequence[float], n_observed: int, e: float
) -> float:
    """Append the rows of steps that begin with a drift e; return the drift behind them."""
    first, rest, observed = solver.scheme
    n_steps = len(times) - 1
    for i in range(n_steps):
        t0, h = times[i], times[i + 1] - times[i]
        keeps = n_steps - i <= n_observed
        e = e + first * h
        for j, (node, c) in enumerate(rest):
            rows.append(_row(t0 + node * h, e, 2.0, -1.0, keeps and j in observed))
            e = c * h
    return e


def _append_run(rows: list[list[float]], solver: Leapfrog, run: Run, e: float, n_kept: int) -> tuple[float, int]:
    """Append the rows of a run that begins with a drift e; return the drift behind it, and how many f - v were kept."""
    observed = solver.scheme.observed
    e = _append_steps(rows, solver, run.times, run.n_observed, e)
    n_kept += min(run.n_observed, len(run.times) - 1) * len(observed)
    if run.refresh.decides and n_kept >= N_VALUES:
        h = run.times[-1] - run.times[-2]
        noise = [_noise(dtype, abs(h)) for dtype in FLOATS]
        kind = OF_ONE_STEP if len(observed) == N_VALUES else OF_SEVERAL_STEPS
        rows[-1][JUDGES:] = [kind, e, *noise]
    return e, n_kept


def _noise(dtype: torch.dtype, h: float) -> float:
    """The factor of |z|^2 that round-off explains in products of f - v (refresh.py)."""
    noise = 4 * eps_of(dtype) / h if h else math.inf
    return min(noise**2 * MAGNIFIED, LARGE)


def pieces_back(solver: Leapfrog, times: Sequence[float]) -> tuple[list[Piece], float]:
    """Steps from each time to the next, taken back, and the drift before them."""
    rows: list[list[float]] = []
    rest = _append_run_back(rows, solver, times, 0.0)
    return _pieces(rows), rest


def start_piece(t: float) -> Piece:
    """v = f(t, z), in both directions."""
    return _pieces([_row(t, 0.0, 1.0, 0.0)])[0]


def _append_run_back(rows: list[list[float]], solver: Leapfrog, times: Sequence[float], e: float) -> float:
    """Append the rows of a run taken back, behind a drift e; return the drift before it."""
    first, rest, _ = solver.scheme
    for i in range(len(times) - 1, 0, -1):
        t0, h = times[i - 1], times[i] - times[i - 1]
        for j, (node, c) in zip(reversed(range(len(rest))), reversed(rest), strict=True):
            rows.append(_row(t0 + node * h, e + c * h, 2.0, -1.0, j))
            e = 0.0
        e = first * h
    return e


def _row(t: float, e: float, alpha: float, beta: float, keeps_or_stage: int = 0) -> list[float]:
    return [t, e, alpha, beta, float(keeps_or_stage), *[0.0] * (WIDTH - 5)]


def _pieces(rows: list[list[float]]) -> list[Piece]:
    return list(_divided(torch.tensor(rows, dtype=torch.float64)))


def _divided(rows: Tensor) -> Iterator[Piece]:
    for part in rows.split(ROWS):
        whole = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        whole[: len(part)] = part
        yield Piece(whole, torch.tensor(len(part)))
