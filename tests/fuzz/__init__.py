"""Random problems against plain autograd: `python -m tests.fuzz --help`."""

from .cases import Problem, Spec, draw
from .judge import Outcome, judge, run
from .shrink import shrink

__all__ = ["Outcome", "Problem", "Spec", "draw", "judge", "run", "shrink"]
