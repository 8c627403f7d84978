"""Names of torchmali's core that are not public: benchmarks import them from here, and from nowhere else."""

from torchmali import field
from torchmali.measure import peak_bytes
from torchmali.solvers.leapfrog import SCHEMES, Scheme
from torchmali.surroundings import Surroundings

__all__ = ["SCHEMES", "Scheme", "Surroundings", "field", "peak_bytes"]
