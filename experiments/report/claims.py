"""Claims of the paper, each with a verdict and the numbers it rests on.

A chapter has one function per claim. It returns None where the records cannot say anything about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

VERDICTS = ("holds", "holds in part", "does not hold here", "not testable here", "not run yet")


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, where it stands there, and what was found."""

    where: str
    text: str
    verdict: str
    numbers: str
    records: Sequence[str] = field(default=())

    def __post_init__(self):
        assert self.verdict in VERDICTS, self.verdict


def verdict(holds: Sequence[bool]) -> str:
    """Judge a claim by its parts."""
    if not holds:
        return "not testable here"
    return "holds" if all(holds) else "holds in part" if any(holds) else "does not hold here"


def made(*claims: Claim | None) -> list[Claim]:
    """Keep the claims that the records say something about."""
    return [claim for claim in claims if claim is not None]


AWAITED = (  # claims of chapters that have no record yet: chapter, claim, place in the paper
    ("images", "MALI is as accurate as ACA, more than naive and adjoint, two to three times as fast", "Figure 5"),
    ("solvers", "A network trained with MALI keeps its accuracy under other solvers; a ResNet does not", "Table 2"),
    ("solvers", "A Neural ODE is more robust to FGSM than a ResNet, across solvers", "Table 3"),
    ("feasibility", "On ImageNet MALI trains, naive and ACA cannot", "Section 4.2"),
    ("latent", "A latent ODE trained with MALI has the lowest error on MuJoCo", "Table 4"),
    ("speech", "A Neural CDE trained with MALI has the highest accuracy on Speech Commands", "Table 5"),
    ("flows", "MALI trains FFJORD to fewer bits per dimension", "Table 6"),
    ("damping", "Damping changes results little", "Table 7"),
)
