"""Explicit Runge-Kutta solvers: one step, interpolant and pullback for all of them, and a tableau for each."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torchmali.solvers.base import Attempt, InterpolatingSolver, Slope
from torchmali.solvers.dense import DOPRI8_NODES, HEUN_EULER, Interpolant, Stages, runge_kutta_interpolant
from torchmali.state.base import State
from torchmali.state.vectors import Tensors, Time, combine

Row = tuple[float, ...]


def _sparse(row: Sequence[float]) -> list[tuple[int, float]]:
    return [(j, w) for j, w in enumerate(row) if w != 0]


def _hermite(b: Row) -> tuple[Row, ...]:
    """The cubic through z0, z1 with slopes k_1 and f(t1, z1), as polynomials in theta for each stage."""
    rows = [[0.0, 3 * w, -2 * w] for w in b] + [[0.0, -1.0, 1.0]]
    rows[0] = [x + y for x, y in zip(rows[0], (1.0, -2.0, 1.0), strict=True)]
    return tuple(map(tuple, rows))


class ExtraNodes(NamedTuple):
    """An interpolant from the end slope and from one further stage at each of these nodes."""

    nodes: tuple[float, ...]


class Tableau:
    """Coefficients of an explicit method. The slope at the end, f(t1, z1), counts as one more stage after the last.

    a: one row for each stage after the first. e: weights of the error estimate; if the estimate uses the end slope, the
    method is FSAL. dense: for each stage (and the end slope) coefficients of theta, theta^2, ... of the interpolant, or
    an Interpolant, or ExtraNodes; None means cubic Hermite. interpolates: whether this interpolant is as accurate as
    the steps; if not, adaptive steps end on every output time.
    """

    def __init__(
        self,
        order: int,
        a: Sequence[Row],
        b: Row,
        e: Row = (),
        dense: Sequence[Row] | Interpolant | ExtraNodes | None = None,
        interpolates: bool = True,
    ):
        self.order, self.interpolates = order, interpolates
        self.c = [sum(row) for row in a]
        self.a = [_sparse(row) for row in a]
        self.b = _sparse(b)
        self.e = _sparse(e)
        self.n_stages = len(b)
        self.fsal = len(e) > len(b)
        self._coefficients = tuple(a), b, dense

    @functools.cached_property
    def with_straight_lines(self) -> Tableau:
        """These coefficients with a linear interpolant."""
        a, b, _ = self._coefficients
        return Tableau(self.order, a, b, dense=[(w,) for w in b])

    @functools.cached_property
    def interpolant(self) -> Interpolant:
        """The interpolant, made when it is first needed."""
        a, b, dense = self._coefficients
        if isinstance(dense, Interpolant):
            return dense
        if isinstance(dense, ExtraNodes):
            return runge_kutta_interpolant(a, b, dense.nodes)
        rows = _hermite(b) if dense is None else tuple(tuple(row) for row in dense)
        stages = Stages([(), *a, *([b] if len(rows) > len(b) else [])])
        return Interpolant(stages.order_inside(rows), rows)

    @functools.cached_property
    def closing_interpolant(self) -> Interpolant:
        """The interpolant of a step after which no step begins with f(t1, z1): one that does without this slope.

        Where such an interpolant has an order below p - 1, so that errors in this step would not be O(h^p), it is the
        usual one. Its errors are larger than those of the usual one, but this is one step of many.
        """
        a, b, _ = self._coefficients
        if not self.shares_end_slope:
            return self.interpolant
        found = runge_kutta_interpolant(a, b)
        return found if found.order >= min(self.order - 1, self.interpolant.order) else self.interpolant

    @functools.cached_property
    def interpolant_of_ends(self) -> Interpolant:
        """An interpolant from the stages of a step and the slope at its end, without further evaluations."""
        a, b, _ = self._coefficients
        return runge_kutta_interpolant(a, b, ())

    @functools.cached_property
    def shares_end_slope(self) -> bool:
        """Whether f(t1, z1) is a stage of the interpolant on which no other stage depends."""
        return len(self.interpolant.rows) > self.n_stages and not self.interpolant.extra


@dataclass(frozen=True)
class RungeKutta(InterpolatingSolver):
    """Explicit one-step method given by its tableau: a subclass needs only the class attribute `tableau`."""

    tableau: ClassVar[Tableau]

    @property
    def order(self) -> int:
        return self.tableau.order

    @property
    def error_order(self) -> int | None:
        return self.order if self.tableau.e else None  # the embedded method is one order lower

    @property
    def interpolates(self) -> bool:
        return self.tableau.interpolates

    def start(self, f: Slope, t0: Time, z0: Tensors, arithmetic: Any) -> tuple[State, Tensors]:
        return arithmetic.of(z0), f(t0, z0)

    def step(self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool) -> Attempt:
        tableau, h, z = self.tableau, t1 - t0, state.point
        k = self.stages(f, t0, t1, z, carry)
        # The increment is summed up before it is added: that rounds z once.
        z_out = (
            combine(z, (1.0,), (_moved(None, h, tableau.b, k),)) if len(tableau.b) > 1 else _moved(z, h, tableau.b, k)
        )
        if not adaptive:
            return Attempt(state.of(z_out), stages=k, start=k[0])
        end_slope = f(t1, z_out) if tableau.fsal else None
        if end_slope is not None:
            k.append(end_slope)
        return Attempt(state.of(z_out), _moved(None, h, tableau.e, k), end_slope, k, k[0])

    def stages(self, f: Slope, t0: Time, t1: Time, z: Tensors, first: Tensors | None = None) -> list[Tensors]:
        """Return k_1, ..., k_s of the step from z over [t0, t1]. first: k_1, if it is known."""
        h, k = t1 - t0, [f(t0, z) if first is None else first]
        for c, row in zip(self.tableau.c, self.tableau.a, strict=True):
            k.append(f(t0 + c * h, _moved(z, h, row, k)))
        return k

    def increment(self, t0: Time, t1: Time, k: Sequence[Tensors]) -> Tensors:
        """Return the change of z in a step with these stages."""
        return _moved(None, t1 - t0, self.tableau.b, k)

    @property
    def interpolant(self) -> Interpolant:
        return self.tableau.interpolant

    def interpolant_of(self, closes: bool) -> Interpolant:
        return self.tableau.closing_interpolant if closes else self.tableau.interpolant

    @property
    def shares_end_slope(self) -> bool:
        return self.tableau.shares_end_slope

    def inner_stages(
        self, f: Slope, t0: Time, t1: Time, state: State, attempt: Attempt, closes: bool = False
    ) -> tuple[Sequence[Tensors], Tensors | None]:
        h, k, table, n = t1 - t0, list(attempt.stages), self.interpolant_of(closes), self.tableau.n_stages
        uses_end = len(table.rows) - len(table.extra) > n
        if uses_end and len(k) == n:
            k.append(f(t1, attempt.state.point))
        carry = k[n] if uses_end else attempt.carry
        for node, row in table.extra:
            k.append(f(t0 + node * h, _moved(state.point, h, _sparse(row), k)))
        return k[: len(table.rows)], carry


def _moved(z: Tensors | None, h: Time, row: Sequence[tuple[int, Time]], k: Sequence[Tensors]) -> Tensors:
    return combine(z, [h * w for _, w in row], [k[j] for j, _ in row])


@dataclass(frozen=True)
class StraightLines(RungeKutta):
    """The steps of another method, and straight lines between the points of its grid."""

    base: RungeKutta

    @property
    def tableau(self) -> Tableau:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.base.tableau.with_straight_lines


class Euler(RungeKutta):
    """Explicit Euler, order 1."""

    tableau = Tableau(1, [], (1.0,))


class Midpoint(RungeKutta):
    """Explicit midpoint, order 2: the paper's RK2."""

    tableau = Tableau(2, [(1 / 2,)], (0.0, 1.0))


class Heun(RungeKutta):
    """Heun's second-order method (explicit trapezoid)."""

    tableau = Tableau(2, [(1.0,)], (1 / 2, 1 / 2))


class Heun3(RungeKutta):
    """Heun's third-order method."""

    tableau = Tableau(3, [(1 / 3,), (0.0, 2 / 3)], (1 / 4, 0.0, 3 / 4))


class RK4(RungeKutta):
    """The classic fourth-order method, as in the paper."""

    tableau = Tableau(4, [(1 / 2,), (0.0, 1 / 2), (0.0, 0.0, 1.0)], (1 / 6, 1 / 3, 1 / 3, 1 / 6))


class RK4ThreeEighths(RungeKutta):
    """Kutta's 3/8 rule, order 4: what torchdiffeq calls "rk4"."""

    tableau = Tableau(4, [(1 / 3,), (-1 / 3, 1.0), (1.0, -1.0, 1.0)], (1 / 8, 3 / 8, 3 / 8, 1 / 8))


class HeunEuler(RungeKutta):
    """Heun-Euler 2(1): the paper's RK12."""

    tableau = Tableau(2, [(1.0,)], (1 / 2, 1 / 2), e=(-1 / 2, 1 / 2), dense=HEUN_EULER)


class Fehlberg2(RungeKutta):
    """Fehlberg's 2(1) pair of three stages (1969), of which the last is not the slope at the end."""

    tableau = Tableau(2, [(1 / 2,), (1 / 256, 255 / 256)], (1 / 512, 255 / 256, 1 / 512), e=(-1 / 512, 0.0, 1 / 512))


class Bosh3(RungeKutta):
    """Bogacki-Shampine 3(2) (1989): the paper's RK23. FSAL."""

    tableau = Tableau(3, [(1 / 2,), (0.0, 3 / 4)], (2 / 9, 1 / 3, 4 / 9), e=(-5 / 72, 1 / 12, 1 / 9, -1 / 8))


class Dopri5(RungeKutta):
    """Dormand-Prince 5(4) (1980), FSAL, with Shampine's quartic interpolant (1986)."""

    tableau = Tableau(
        5,
        [
            (1 / 5,),
            (3 / 40, 9 / 40),
            (44 / 45, -56 / 15, 32 / 9),
            (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
            (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        ],
        (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
        e=(-71 / 57600, 0.0, 71 / 16695, -71 / 1920, 17253 / 339200, -22 / 525, 1 / 40),
        dense=[
            (1.0, -8048581381 / 2820520608, 8663915743 / 2820520608, -12715105075 / 11282082432),
            (0.0, 0.0, 0.0, 0.0),
            (0.0, 131558114200 / 32700410799, -68118460800 / 10900136933, 87487479700 / 32700410799),
            (0.0, -1754552775 / 470086768, 14199869525 / 1410260304, -10690763975 / 1880347072),
            (0.0, 127303824393 / 49829197408, -318862633887 / 49829197408, 701980252875 / 199316789632),
            (0.0, -282668133 / 205662961, 2019193451 / 616988883, -1453857185 / 822651844),
            (0.0, 40617522 / 29380423, -110615467 / 29380423, 69997945 / 29380423),
        ],
    )


def _factored(c: float, root: float, p: float, q: float) -> Row:
    """c theta (theta - root)(theta^2 - p theta + q), as coefficients of theta, ..., theta^4."""
    return -c * root * q, c * (q + root * p), -c * (p + root), c


# fmt: off
class Tsit5(RungeKutta):
    """Tsitouras 5(4) (2011), FSAL, with its own fourth-order interpolant."""

    tableau = Tableau(
        5,
        [
            (0.161,),
            (-0.008480655492356989, 0.335480655492357),
            (2.8971530571054935, -6.359448489975075, 4.3622954328695815),
            (5.325864828439257, -11.748883564062828, 7.4955393428898365, -0.09249506636175525),
            (5.86145544294642, -12.92096931784711, 8.159367898576159, -0.071584973281401, -0.028269050394068383),
        ],
        (0.09646076681806523, 0.01, 0.4798896504144996, 1.379008574103742, -3.290069515436081, 2.324710524099774),
        e=(-0.00178001105222577714, -0.0008164344596567469, 0.007880878010261995,
           -0.1447110071732629, 0.5823571654525552, -0.45808210592918697, 0.015151515151515152),
        dense=[
            _factored(-1.0530884977290216, 1.3299890189751412, 1.4364028541716351, 0.7139816917074209),
            _factored(0.1017, 0.0, 2.1966568338249754, 1.2949852507374631),
            _factored(2.490627285651252793, 0.0, 2.38535645472061657, 1.57803468208092486),
            _factored(-16.54810288924490272, 0.0, 1.21712927295533244 + 0.61620406037800089,
                      1.21712927295533244 * 0.61620406037800089),
            _factored(47.37952196281928122, 0.0, 1.203071208372362603 + 0.658047292653547382,
                      1.203071208372362603 * 0.658047292653547382),
            _factored(-34.87065786149660974, 0.0, 1.2 + 2 / 3, 1.2 * 2 / 3),
            _factored(2.5, 0.0, 1.6, 0.6),
        ],
    )


_DOPRI8_B = (14005451 / 335480064, 0, 0, 0, 0, -59238493 / 1068277825, 181606767 / 758867731,
             561292985 / 797845732, -1041891430 / 1371343529, 760417239 / 1151165299,
             118820643 / 751138087, -528747749 / 2220607170, 1 / 4)
_DOPRI8_B7 = (13451932 / 455176623, 0, 0, 0, 0, -808719846 / 976000145, 1757004468 / 5645159321,
              656045339 / 265891186, -3867574721 / 1518517206, 465885868 / 322736535,
              53011238 / 667516719, 2 / 45, 0)


class Dopri8(RungeKutta):
    """Prince-Dormand 8(7) with 13 stages (1981).

    Its interpolant has order 6 and takes four evaluations more in steps that have outputs inside.
    """

    tableau = Tableau(
        8,
        [
            (1 / 18,),
            (1 / 48, 1 / 16),
            (1 / 32, 0, 3 / 32),
            (5 / 16, 0, -75 / 64, 75 / 64),
            (3 / 80, 0, 0, 3 / 16, 3 / 20),
            (29443841 / 614563906, 0, 0, 77736538 / 692538347, -28693883 / 1125000000, 23124283 / 1800000000),
            (16016141 / 946692911, 0, 0, 61564180 / 158732637, 22789713 / 633445777, 545815736 / 2771057229,
             -180193667 / 1043307555),
            (39632708 / 573591083, 0, 0, -433636366 / 683701615, -421739975 / 2616292301, 100302831 / 723423059,
             790204164 / 839813087, 800635310 / 3783071287),
            (246121993 / 1340847787, 0, 0, -37695042795 / 15268766246, -309121744 / 1061227803, -12992083 / 490766935,
             6005943493 / 2108947869, 393006217 / 1396673457, 123872331 / 1001029789),
            (-1028468189 / 846180014, 0, 0, 8478235783 / 508512852, 1311729495 / 1432422823,
             -10304129995 / 1701304382, -48777925059 / 3047939560, 15336726248 / 1032824649,
             -45442868181 / 3398467696, 3065993473 / 597172653),
            (185892177 / 718116043, 0, 0, -3185094517 / 667107341, -477755414 / 1098053517, -703635378 / 230739211,
             5731566787 / 1027545527, 5232866602 / 850066563, -4093664535 / 808688257, 3962137247 / 1805957418,
             65686358 / 487910083),
            (403863854 / 491063109, 0, 0, -5068492393 / 434740067, -411421997 / 543043805, 652783627 / 914296604,
             11173962825 / 925320556, -13158990841 / 6184727034, 3936647629 / 1978049680, -160528059 / 685178525,
             248638103 / 1413531060, 0),
        ],
        _DOPRI8_B,
        e=tuple(x - y for x, y in zip(_DOPRI8_B, _DOPRI8_B7, strict=True)),
        dense=ExtraNodes(DOPRI8_NODES),
    )
# fmt: on
