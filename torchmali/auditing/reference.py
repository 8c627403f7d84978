"""Reference gradient, which all others are compared with."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchmali._torch import tree_leaves
from torchmali.auditing.budget import OutOfTime, Progress
from torchmali.auditing.problem import DIFFICULTIES, Problem
from torchmali.auditing.show import brief, short
from torchmali.controllers import AdaptiveStep
from torchmali.errors import SolverWarning
from torchmali.gradients.aca import ACA
from torchmali.solution import short_repr

Gradients = Sequence[Tensor | None]
ROUNDING = 1e-12  # tighter tolerances would not improve on this
FINE = 0.01  # share of the tolerance; a reference that is good to this is accurate enough for all decisions


class Reference(NamedTuple):
    """Gradients that all others are compared with, and how they were computed."""

    gradients: Gradients | None
    text: str
    uncertainty: float = math.inf  # relative error of the reference itself
    is_cut_short: bool = False  # the reference would be better with more time


class Rung(NamedTuple):
    """Gradients at one tolerance, and their distance from those at the tolerance before."""

    gradients: Gradients
    n_steps: int
    tol: float
    uncertainty: float = math.inf

    def next(self, gradients: Gradients, n_steps: int, tol: float) -> Rung:
        # If both solves took the same steps, their agreement says no more than that both tolerances were met.
        least = tol if n_steps == self.n_steps else 0.0
        return Rung(gradients, n_steps, tol, max(least, distance(self.gradients, gradients)))


def make_reference(problem: Problem, tolerance: float, n_steps: int, tell: Progress) -> Reference:
    """Compute gradients by ACA at tighter and tighter tolerances; in y0's own dtype where f does not run in float64.

    n_steps: steps of Dopri5 at the tolerance asked for. Where f has kinks (ReLU), tight tolerances take steps without
    end, so the number of steps is bounded: generously until the reference is FINE, more strictly for further digits.
    """
    finest, why, is_late = max(1e-13, min(1e-10, 1e-4 * tolerance)), "", False
    own = min((z.dtype for z in tree_leaves(problem.y0)), key=lambda dtype: dtype.itemsize)
    tight = [finest * 10**k for k in (6, 4, 2, 0)]
    for in_double, tolerances in ((True, [*tight, 1e-13]), (False, [3e-3, 3e-4, 3e-5])):
        rung: Rung | None = None
        dtype = "float64" if in_double else str(own).removeprefix("torch.")
        try:
            case = problem.in_double() if in_double else problem
            for tol in tolerances:
                tell(f"reference in {dtype} at rtol {tol:.0e}")
                is_fine = rung is not None and rung.uncertainty <= FINE * tolerance
                controller = AdaptiveStep(tol, 0.01 * tol, max_steps=_max_steps(n_steps, is_fine))
                with warnings.catch_warnings():
                    # In float64, a warning about a tensor without a gradient would mean that f bypassed its twin.
                    warnings.simplefilter("error" if in_double else "ignore", SolverWarning)
                    grads, stats = case.gradients(problem.accurate, controller, ACA())
                found = grads, stats.n_steps, tol
                rung = Rung(*found) if rung is None else rung.next(*found)
                is_last = (
                    in_double and tol <= finest and rung.uncertainty < 1e-3
                )  # the last tolerance is for problems that need it
                if is_last or rung.uncertainty < ROUNDING:
                    break
        except OutOfTime:
            why, is_late = "it takes more than the time left for it", True
        except DIFFICULTIES as error:
            why = str(error)
        except Exception as error:  # f may raise anything in a dtype that it was not made for
            why, rung = str(error) or type(error).__name__, None
        if rung is not None and math.isfinite(rung.uncertainty):
            method = f"{short_repr(problem.accurate).removesuffix('()')} + ACA"
            text = f"{dtype}, {method} at rtol {rung.tol:.0e}, itself good to {brief(rung.uncertainty)}"
            return Reference(rung.gradients, text, rung.uncertainty, is_late)
        if is_late:
            break
    return Reference(None, f"none ({short(why)})", is_cut_short=is_late)


def _max_steps(n_steps: int, is_fine: bool) -> int:
    return 100 + 10 * n_steps if is_fine else min(30_000, 1000 + 100 * n_steps)


def distance(grads: Gradients, exact: Gradients) -> float:
    """Return |grads - exact| / |exact|."""
    a, b = ([torch.zeros(()) if g is None else g.cpu().double() for g in gs] for gs in (grads, exact))
    differences = [x - y for x, y in zip(a, b, strict=True)]
    difference, norm = (math.hypot(*(x.norm().item() for x in xs)) for xs in (differences, b))
    return difference / (norm or 1.0)
