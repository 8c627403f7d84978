"""A new Runge-Kutta method: Ralston's third-order method with an embedded method of second order."""

import torchmali as tm


class Ralston3(tm.RungeKutta):
    """Ralston (1962): the smallest bound of the local error among methods of order 3 in 3 stages.

    Bosh3 takes the same steps, with another error estimate.
    """

    tableau = tm.Tableau(
        order=3,
        a=[(1 / 2,), (0.0, 3 / 4)],  # one row for each stage after the first
        b=(2 / 9, 1 / 3, 4 / 9),
        e=(2 / 9, -2 / 3, 4 / 9),  # b minus the weights of the explicit midpoint rule, (0, 1, 0)
    )
