"""Evaluation of flows: with solvers and tolerances of their own, whatever they were trained with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torchmali as tm
from experiments.methods import Solve
from torchmali.nn import CNF, ExactTrace, Hutchinson


def evaluation(solver: tm.Solver, controller: tm.StepController) -> Solve:
    return Solve(solver, controller, tm.Naive())


EVALUATION = evaluation(tm.Dopri5(), tm.AdaptiveStep(1e-5, 1e-5))  # as published
ACCURATE = evaluation(tm.Dopri5(), tm.AdaptiveStep(1e-4, 1e-5))  # in the plane


@contextmanager
def solved_by(flows: Sequence[CNF], solve: Solve) -> Iterator[None]:
    """Context in which flows are solved so, without regularisers, and with the trace noise of least variance."""
    fields = ("solver", "controller", "gradient", "kinetic", "jacobian", "trace")
    before = [{name: getattr(cnf, name) for name in fields} for cnf in flows]
    for cnf in flows:
        cnf.solver, cnf.controller, cnf.gradient = solve.solver, solve.controller, solve.gradient
        cnf.kinetic = cnf.jacobian = False
        cnf.trace = cnf.trace if isinstance(cnf.trace, ExactTrace) else Hutchinson()
    try:
        yield
    finally:
        for cnf, values in zip(flows, before, strict=True):
            for name, value in values.items():
                setattr(cnf, name, value)
