"""The adaptive checkpoint adjoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torchmali.gradients.replay import ReplayGradient


@dataclass(frozen=True)
class ACA(ReplayGradient):
    """The exact discrete gradient with any solver, in memory of one state per step.

    The forward pass keeps every accepted state (and no graph); the backward pass takes one step at a time from there,
    forwards with a graph and back.
    """

    keep_every: ClassVar[int | None] = 1
