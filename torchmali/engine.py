"""The parts of the engine, for those who build on it: the solve on leaves, its tape, its states.

Solvers, controllers and outputs of one's own need the names at the top of the package, and the types State, Slope,
Tensors and Time from here for their annotations (docs/extending.md).
"""

from __future__ import annotations

from torchmali.compiled.solve import n_captured
from torchmali.controllers import AdaptiveStepState, FixedStepState, SolveStart
from torchmali.field.environment import Environment
from torchmali.integrate import integrate
from torchmali.loop.base import Integration
from torchmali.outputs.base import AcceptedStep, Pulled
from torchmali.solvers.base import Slope
from torchmali.solvers.cotangent import Cotangent
from torchmali.state.base import RewindableState, State
from torchmali.state.fixed_point import FixedPoint, FixedPointArithmetic
from torchmali.state.floats import Floats
from torchmali.state.traced import Traced
from torchmali.state.vectors import Tensors, Time, number
from torchmali.tape import Output, Refresh, Rescale, Start, Step, Tape, rewind
from torchmali.tree import Structure

__all__ = [
    "AcceptedStep",
    "AdaptiveStepState",
    "Cotangent",
    "Environment",
    "FixedPoint",
    "FixedPointArithmetic",
    "FixedStepState",
    "Floats",
    "Integration",
    "Output",
    "Pulled",
    "Refresh",
    "Rescale",
    "RewindableState",
    "Slope",
    "SolveStart",
    "Start",
    "State",
    "Step",
    "Structure",
    "Tape",
    "Tensors",
    "Time",
    "Traced",
    "integrate",
    "n_captured",
    "number",
    "rewind",
]
