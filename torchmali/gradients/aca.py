"""The adaptive checkpoint adjoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchmali.gradients.replay import ReplayGradient


@dataclass(frozen=True)
class ACA(ReplayGradient):
    """The exact discrete gradient with any solver, in memory of one state per step.

    The forward pass keeps every accepted state and no graph, the backward pass goes from one kept state to the one
    before. Every stage of a step is evaluated once more on the way; the forward solve is not repeated.
    """

    keep_every: ClassVar[int | None] = 1
