"""Names of torchmali's core that are not public: experiments import them from here, and from nowhere else.

A public name that replaces one of these is swapped in here (tests/experiments/test_experiments_layers.py).
"""

from torchmali.controllers import Pace, Start, _AdaptivePace
from torchmali.integrate import integrate
from torchmali.measure import LiveBytes
from torchmali.nn.base import SolveModule
from torchmali.solvers.base import Attempt, Slope
from torchmali.state import Floats, State, Structure, Time, Traced, number
from torchmali.tape import Refresh, Rescale, Step, Tape

__all__ = [
    "Attempt",
    "Floats",
    "LiveBytes",
    "Pace",
    "Refresh",
    "Rescale",
    "Slope",
    "SolveModule",
    "Start",
    "State",
    "Step",
    "Structure",
    "Tape",
    "Time",
    "Traced",
    "_AdaptivePace",
    "integrate",
    "number",
]
