"""A new kind of output: the mean of y over all output times, in memory that does not grow with their number."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import torchmali as tm
from torchmali.engine import Tensors, Time


class MeanOutput(tm.Outputs):
    """The mean of y over n output times. `solve` returns it as `solution.y`, with the structure and shapes of y0."""

    def __init__(self, n: int):
        self.n = n
        self.total: Tensors = ()

    def record(self, k: int, t: Time, z: Tensors) -> None:
        # Out of place: autograd follows the sum if gradient=Naive(), and z belongs to the solver.
        shares = [leaf / self.n for leaf in z]
        self.total = tuple(x + y for x, y in zip(self.total or [0.0] * len(z), shares, strict=True))

    def results(self) -> Tensors:
        return self.total

    def pull(self, k: int, t: Time, z: Tensors, grads: Sequence[Tensor | None]) -> tm.Pulled:
        # grads is dL/dresults, None for a result on which L does not depend.
        return tm.Pulled([None if g is None else g / self.n for g in grads])

    def fresh(self) -> tm.Outputs:
        return MeanOutput(self.n)

    # For MALI(exact=True), which may take steps back and take them again.

    def contents(self) -> Any:
        return self.total

    def restore_contents(self, contents: Any) -> None:
        self.total = contents
