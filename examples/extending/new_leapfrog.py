"""A new leapfrog solver: the triple jump, which makes a method of order 4 from ALF."""

import torchmali as tm


def composed(fractions: tuple[float, ...]) -> tuple[float, ...]:
    """Drift coefficients of ALF steps over these fractions of h, each fraction in two steps.

    ALF over a time s is drift(s/2), reflect, drift(s/2). The drifts that meet between two reflects are one drift.
    """
    steps = [fraction / 2 for fraction in fractions for _ in range(2)]
    inner = [(s + r) / 2 for s, r in zip(steps, steps[1:], strict=False)]
    return (steps[0] / 2, *inner, steps[-1] / 2)


OUTER = 1 / (2 - 2 ** (1 / 3))  # Yoshida (1990)
INNER = 1 - 2 * OUTER
TripleJump = tm.Leapfrog(composed((OUTER, INNER, OUTER)), order=4)
