"""Continuous extensions: tables of weights b_j(theta) with z(t0 + theta h) = z0 + h sum_j b_j(theta) k_j.

The k_j are the slopes that a step has evaluated, as those of an explicit Runge-Kutta method; a leapfrog step is one,
too. The tables are made from the coefficients of a method alone, once, from the order conditions: for every rooted tree

    sum_j b_j(theta) Phi_j(tree) = theta^|tree| / gamma(tree)

(Hairer, Norsett, Wanner, Solving Ordinary Differential Equations I, sections II.2 and II.6). This file is mathematics
only. It computes with Python floats, so that a table does not depend on a default dtype, a device or a tensor mode.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeAlias

from torchmali.state.vectors import Time, number

Tree: TypeAlias = "tuple[Tree, ...]"  # the subtrees at the root; () is a single vertex
Row: TypeAlias = "tuple[float, ...]"

HIGHEST_ORDER = 8  # beyond it the order of a method is not determined
ZERO = 1e-9  # a smaller residual of an order condition is round-off: coefficients are given with 10 digits and more

# Weights of the conditions that can only be satisfied in the sense of least squares; those of trees have the factor
# 1 / symmetry besides, as in the expansion of the error. The numbers are a compromise, one of some thousand that were
# tried with ALF(order=4), ALF(order=6) and L14-6 on adaptive solves of 21 problems at four tolerances.
DECAY = 0.3  # from one order to the next: the expansion is one in powers of h |f'|, which is about so large
CHAIN = 300.0  # for trees without branches: a linear problem has no others
BRANCH = 0.7  # for each leaf of a tree beyond the second: it stands for one more derivative of f
PARASITE = 0.03  # for the influence of v0 - f(t0, z0)
RIDGE = 0.5  # for the size of the weights b_j, times the error constant of the method

DOPRI8_NODES = (0.29, 0.71, 0.47)  # of extra stages: found by a random search for small errors of orders 7 and 8


# Rooted trees.


def order_of(tree: Tree) -> int:
    """The number of vertices of a tree."""
    return 1 + sum(map(order_of, tree))


@functools.cache
def density(tree: Tree) -> int:
    """gamma: the product of the orders of a tree and of all its subtrees."""
    return order_of(tree) * math.prod(map(density, tree))


@functools.cache
def symmetry(tree: Tree) -> int:
    """sigma: the number of ways to map a tree to itself."""
    return math.prod(math.factorial(n) * symmetry(subtree) ** n for subtree, n in Counter(tree).items())


@functools.cache
def rooted_trees(n: int) -> tuple[Tree, ...]:
    """All rooted trees with n vertices."""
    smaller = [tree for k in range(1, n) for tree in rooted_trees(k)]
    return tuple(_forests(n - 1, smaller))


def _forests(n: int, among: Sequence[Tree]) -> Iterator[Tree]:
    """All multisets of these trees with n vertices together."""
    if n == 0:
        yield ()
    for i, tree in enumerate(among):
        if order_of(tree) <= n:
            for rest in _forests(n - order_of(tree), among[i:]):
                yield (tree, *rest)


def trees_up_to(n: int) -> list[Tree]:
    """All rooted trees with at most n vertices, the smallest first."""
    return [tree for k in range(1, n + 1) for tree in rooted_trees(k)]


@functools.cache
def degrees(tree: Tree) -> tuple[int, ...]:
    """How many subtrees each vertex has, sorted. If y is a number, a tree stands for the product of such derivatives of
    f, so that trees with the same degrees stand for the same.
    """
    return tuple(sorted([len(tree), *(n for subtree in tree for n in degrees(subtree))]))


# Runge-Kutta stages.


class Stages:
    """Stages k_j = f(t0 + c_j h, z0 + h sum_i a_ji k_i) of an explicit method, a_ji = 0 for i >= j."""

    def __init__(self, a: Sequence[Sequence[float]]):
        """a: one row for each stage, the first one empty; zeros at the end of a row may be left out."""
        n = len(a)
        self.a: list[Row] = [(*row, *[0.0] * (n - len(row))) for row in a]
        self._known: dict[Tree, Row] = {(): (1.0,) * n}

    def __len__(self) -> int:
        return len(self.a)

    def applied(self, x: Row) -> Row:
        """sum_i a_ji x_i for each stage j."""
        return tuple(_dot(row, x) for row in self.a)

    def elementary_weights(self, tree: Tree) -> Row:
        """Phi_j(tree) for each stage j: the product of sum_i a_ji Phi_i(subtree) over the subtrees at the root."""
        if tree not in self._known:
            *others, last = tree
            factor = self.applied(self.elementary_weights(last))
            self._known[tree] = _times(self.elementary_weights(tuple(others)), factor)
        return self._known[tree]

    def with_stage(self, row: Sequence[float]) -> Stages:
        """These stages and one more after them."""
        return Stages([*self.a, row])

    def error(self, b: Sequence[float], n: int) -> float:
        """The 2-norm of the coefficients of order n in the expansion of the error of z0 + h sum_j b_j k_j."""
        residuals = ((_dot(b, self.elementary_weights(t)) - 1 / density(t)) / symmetry(t) for t in rooted_trees(n))
        return math.hypot(*residuals)

    def order(self, b: Sequence[float]) -> int:
        """The order of z0 + h sum_j b_j k_j at the end of a step, at most HIGHEST_ORDER."""
        n = 0
        while n < HIGHEST_ORDER and self.error(b, n + 1) < ZERO:
            n += 1
        return n

    def order_inside(self, rows: Sequence[Row]) -> int:
        """The order of z0 + h sum_j b_j(theta) k_j inside a step, where rows holds the coefficients of the b_j."""
        n = 0
        while n < HIGHEST_ORDER and all(self._holds(rows, tree) for tree in rooted_trees(n + 1)):
            n += 1
        return n

    def _holds(self, rows: Sequence[Row], tree: Tree) -> bool:
        """Whether the order condition of a tree holds for all theta."""
        powers = [_dot(column, self.elementary_weights(tree)) for column in zip(*rows, strict=True)]
        wanted = [0.0] * max(len(powers), order_of(tree))
        wanted[order_of(tree) - 1] = 1 / density(tree)
        return all(abs(x - y) < ZERO for x, y in zip_longest(powers, wanted, fillvalue=0.0))


class LeapfrogStages(NamedTuple):
    """A leapfrog step as an explicit Runge-Kutta step with the stages u_0 = v0 and u_1, ..., u_n, f at the reflects."""

    stages: Stages
    b: Row  # z1 = z0 + h sum_j b_j u_j
    v1: Row  # v1 = sum_j v1_j u_j


@functools.cache
def leapfrog_stages(coefficients: tuple[float, ...], eta: float = 1.0) -> LeapfrogStages:
    """The stages of the leapfrog step with these drift coefficients and the damping eta (`leapfrog.Leapfrog`).

    They come from the moves themselves, z <- z + c h v and v <- v + 2 eta (u_j - v), with z and v as combinations of
    the u_j. Where v0 is not f(t0, z0), the order conditions hold for the solution with v = f alone.
    """
    n = len(coefficients)
    v = _unit(0, n)
    z = _scaled(coefficients[0], v)
    a: list[Row] = [_scaled(0.0, v)]
    for j, c in enumerate(coefficients[1:], 1):
        a.append(z)
        v = _plus(_scaled(1 - 2 * eta, v), 2 * eta, _unit(j, n))
        z = _plus(z, c, v)
    return LeapfrogStages(Stages(a), z, v)


# Interpolants.


class ExtraStage(NamedTuple):
    """A stage that only the interpolant needs: f(t0 + node h, z0 + h sum_j row_j k_j) with the stages before it."""

    node: float
    row: Row


class Interpolant(NamedTuple):
    """z(t0 + theta h) = z0 + h sum_j b_j(theta) k_j, with b_j(theta) = sum_i rows[j][i - 1] theta^i.

    order: the order conditions hold up to it for every theta, so that the error between grid points is
    O(h^(order + 1)). extra: stages to be evaluated for the interpolant alone; their slopes are the last of the k_j.
    """

    order: int
    rows: tuple[Row, ...]
    extra: tuple[ExtraStage, ...] = ()

    @property
    def used(self) -> list[int]:
        """The stages with a weight that is not zero everywhere."""
        return [j for j, row in enumerate(self.rows) if any(row)]

    def weights(self, theta: Time) -> list[Time]:
        """b_j(theta), one for each stage; theta: a float, or a tensor that is differentiated by."""
        return [polynomial(row, theta) for row in self.rows]

    def slopes(self, theta: Time) -> list[Time]:
        """d b_j / d theta: dz/dt at t0 + theta h is the sum of these times k_j."""
        rows = [[i * c for i, c in enumerate(row, 1)] for row in self.rows]
        return [row[0] + polynomial(row[1:], theta) for row in rows]


def polynomial(row: Sequence[float], theta: Time) -> Time:
    """row[0] theta + row[1] theta^2 + ..., by Horner's rule: powers are rounded differently for floats and tensors."""
    total: Time = 0.0
    for c in reversed(row):
        total = (total + c) * theta
    return total


HEUN_EULER = Interpolant(2, ((1.0, -0.5), (0.0, 0.5)))  # all that two stages allow


@functools.cache
def leapfrog_interpolant(coefficients: tuple[float, ...], eta: float = 1.0, ends: bool = False) -> Interpolant:
    """The interpolant of the leapfrog step with these drift coefficients, from slopes that the step has evaluated.

    The stages are u_0 = v0, u_1, ..., u_n (`leapfrog_stages`). For a list of order p the interpolant has order p - 1
    (2 if p = 2), so that errors between grid points are O(h^p) as those at grid points are. The stages of ALF(order=6)
    do not allow as much: its interpolant has order 4 and small residuals at order 5, so the error is O(h^5), and with
    short steps it exceeds that at the grid points (BETWEEN in tests/core/test_dense.py has the orders).

    Where f contracts, w = v0 - f(t0, z0) is not small (refresh.py), but z1 hardly depends on it. So u_0 gets no weight
    unless the order needs it, as it does for ALF's own list (1/2, 1/2), and the influence of w through the other stages
    is kept small.

    ends: the stages are f(t0, z0), u_1, ..., u_n, f(t1, z1) instead, and the first and the last of them are the slopes
    of the interpolant at the ends of the step.
    """
    stages, b, _ = leapfrog_stages(coefficients, eta)
    p, n = stages.order(b), len(stages)
    if n == 2 and not ends:
        # The parabola through z0 and z1 with the slopes v0 and v1. Damped, it has order 1, as the method has.
        return Interpolant(p, ((1.0, -eta), (0.0, eta)))
    if ends:
        stages = stages.with_stage(b)
    by_w = stages.applied(_unit(0, len(stages)))  # by how much w moves the point of each stage, over h
    nodes = stages.applied((1.0,) * len(stages))
    unwanted = (by_w, _times(nodes, by_w), stages.applied(by_w))  # of order 2, 3 and 3 in h
    if ends:
        return _interpolant(_Problem(stages, (*b, 0.0), p, range(n + 1), unwanted, end=n))
    candidates = [_interpolant(_Problem(stages, b, p, range(n), unwanted))]
    if abs(b[0]) < ZERO:
        candidates.insert(0, _interpolant(_Problem(stages, b, p, range(1, n), unwanted)))
    return max(candidates, key=lambda it: it.order)  # of equals the first one, without u_0


@functools.cache
def runge_kutta_interpolant(a: tuple[Row, ...], b: Row, nodes: tuple[float, ...] | None = None) -> Interpolant:
    """An interpolant of an explicit Runge-Kutta method; a: one row for each stage after the first.

    nodes: None for an interpolant from the stages k_1, ..., k_s alone. Otherwise f(t1, z1) becomes one more stage,
    k_1 and f(t1, z1) are the slopes of the interpolant at the ends of the step, and each node adds a stage: f at that
    point of the interpolant of the stages before it. Such a stage is accurate enough to raise the order by one, or to
    lower the error (Enright, Jackson, Norsett and Thomsen, ACM Trans. Math. Software 12 (1986) 193). Dopri8 gets order
    5 without nodes, and 6 with DOPRI8_NODES.
    """
    stages, n = Stages([(), *a]), len(b)
    p = stages.order(b)
    if nodes is None:
        return _interpolant(_Problem(stages, b, p, range(n)))
    stages, b, extra = stages.with_stage(b), (*b, 0.0), []
    for node in nodes:
        so_far = _interpolant(_Problem(stages, b, p, range(len(b)), end=n))
        row = tuple(map(number, so_far.weights(node)))
        extra.append(ExtraStage(node, row))
        stages, b = stages.with_stage(row), (*b, 0.0)
    return _interpolant(_Problem(stages, b, p, range(len(b)), end=n))._replace(extra=tuple(extra))


class _Problem(NamedTuple):
    """What an interpolant has to satisfy."""

    stages: Stages
    b: Row  # weights at theta = 1
    order: int  # of the method
    allowed: Sequence[int]  # the stages that may have a weight
    unwanted: Sequence[Row] = ()  # combinations of the weights that are to be small
    end: int | None = None  # the stage that is f(t1, z1), if the slopes at both ends are to be those of the field

    @property
    def n_powers(self) -> int:
        """The degree of the interpolant, one more than the method's order; a cubic at least, for the ends."""
        return max(3, self.order + 1)

    def condition(self, weight: float, by_stage: Row, order: int = 1, value: float = 0.0) -> list[float]:
        """The condition weight sum_j b_j(theta) by_stage_j = weight value theta^order.

        As it has to hold for each power of theta, it is given as a row: its coefficients for the allowed stages, then
        its right-hand sides for theta, theta^2, ...
        """
        targets = [0.0] * self.n_powers
        targets[order - 1] = weight * value
        return [*(weight * by_stage[j] for j in self.allowed), *targets]

    def of_tree(self, tree: Tree, weight: float = 1.0) -> list[float]:
        """The order condition of a tree."""
        return self.condition(weight, self.stages.elementary_weights(tree), order_of(tree), 1 / density(tree))


def _interpolant(problem: _Problem) -> Interpolant:
    """The interpolant of the highest order below the method's that the stages allow, with small errors beyond it.

    The coefficients of each power of theta satisfy the conditions up to this order, and are a least-squares solution of
    those that follow, up to one order beyond the method's (and so are the weights at each theta). What the weights then
    lack at theta = 1 is no matter to the exact conditions, as b satisfies them, too. It is added times a cubic.
    """
    stages, b, p, allowed, _, end = problem
    highest = min(p, max(2, p - 1))
    order, exact = next(filter(None, (_exact_conditions(problem, q) for q in range(highest, 0, -1))))
    n = len(allowed)
    soft = [_projected(row, exact, n) for row in _soft_conditions(problem, order)]
    solutions = [_corrected(x, k, exact) for k, x in enumerate(_least_squares([*exact, *soft], n), n)]
    rows = dict(zip(allowed, map(list, zip(*solutions, strict=True)), strict=True))
    wanted = [b] if end is None else [b, _unit(0, len(b)), _unit(end, len(b))]
    for j, row in rows.items():
        _meet_ends(row, [target[j] for target in wanted])
    _round_alike(rows[allowed[0]], rows.values())
    unused = (0.0,) * problem.n_powers
    return Interpolant(order, tuple(tuple(rows.get(j, unused)) for j in range(len(stages))))


def _exact_conditions(problem: _Problem, order: int) -> tuple[int, list[Row]] | None:
    """The conditions of all trees up to this order as orthonormal rows; None if they contradict each other."""
    rows: list[Row] = []
    n = len(problem.allowed)
    for tree in trees_up_to(order):
        row = _projected(_projected(problem.of_tree(tree), rows, n), rows, n)  # twice, against round-off
        size = math.hypot(*row[:n])
        if size > ZERO:
            rows.append(_scaled(1 / size, row))
        elif math.hypot(*row[n:]) > ZERO:
            return None
    return order, rows


def _corrected(x: Sequence[float], k: int, exact: Iterable[Sequence[float]]) -> Sequence[float]:
    """x, which satisfies these conditions to round-off of the least squares, such that it does to that of one sum."""
    for row in exact:
        x = _plus(x, row[k] - _dot(row[: len(x)], x), row[: len(x)])
    return x


def _soft_conditions(problem: _Problem, order: int) -> Iterator[list[float]]:
    """Conditions beyond this order, which are satisfied as well as may be, with their weights."""
    stages, b, p, allowed, unwanted, _ = problem
    alike: dict[tuple[int, ...], list[list[float]]] = {}
    for tree in trees_up_to(p + 1):
        n, n_leaves = order_of(tree), degrees(tree).count(0)
        if n > order:
            factor = CHAIN if n_leaves == 1 else BRANCH ** (n_leaves - 2)
            row = problem.of_tree(tree, factor * DECAY ** (n - order - 1) / symmetry(tree))
            alike.setdefault(degrees(tree), []).append(row)
            yield row
    for rows in alike.values():
        if len(rows) > 1:  # where y is a number, their errors add up
            yield [math.fsum(column) for column in zip(*rows, strict=True)]
    for combination, weight in zip(unwanted, (PARASITE, PARASITE * DECAY, PARASITE * DECAY), strict=False):
        yield problem.condition(weight, combination)
    ridge = RIDGE * stages.error(b, p + 1)
    for j in allowed:
        yield problem.condition(ridge, _unit(j, len(b)))


# Cubics (coefficients of theta, theta^2, theta^3) with g(0) = 0 and one of g(1), g'(0), g'(1) equal to 1, the others 0.
HERMITE = ((0.0, 3.0, -2.0), (1.0, -2.0, 1.0), (0.0, -1.0, 1.0))


def _meet_ends(row: list[float], targets: Sequence[float]) -> None:
    """Give the polynomial g with these coefficients the values g(1), or g(1), g'(0) and g'(1), in place."""
    values = (math.fsum(row), row[0], math.fsum(i * c for i, c in enumerate(row, 1)))
    for target, value, cubic in zip(targets, values, HERMITE, strict=False):
        for i, c in enumerate(cubic):
            row[i] += (target - value) * c


def _round_alike(row: list[float], rows: Iterable[Sequence[float]]) -> None:
    """Let `row`, one of these rows, take up the round-off of all, such that the weights b_j(theta) sum to theta.

    Coefficients of Dopri8's table reach 1500. A constant f is then integrated to round-off between grid points, too.
    """
    for i, column in enumerate(zip(*rows, strict=True)):
        row[i] += float(i == 0) - math.fsum(column)


# Linear algebra on short lists.


def _times(x: Sequence[float], y: Sequence[float]) -> Row:
    return tuple(a * b for a, b in zip(x, y, strict=True))


def _dot(x: Sequence[float], y: Sequence[float]) -> float:
    return math.fsum(_times(x, y))


def _plus(x: Sequence[float], scale: float, y: Sequence[float]) -> Row:
    return tuple(a + scale * b for a, b in zip(x, y, strict=True))


def _scaled(scale: float, x: Sequence[float]) -> Row:
    return tuple(scale * a for a in x)


def _unit(j: int, n: int) -> Row:
    return tuple(float(i == j) for i in range(n))


def _projected(row: Sequence[float], basis: Iterable[Sequence[float]], n: int) -> Sequence[float]:
    """A row minus multiples of basis rows, such that its first n elements are orthogonal to theirs."""
    for other in basis:
        row = _plus(row, -_dot(row[:n], other[:n]), other)
    return row


def _least_squares(rows: Sequence[Sequence[float]], n: int) -> list[list[float]]:
    """The x that minimises |A x - y| for each y; a row: n elements of A, then one element of each y.

    By the modified Gram-Schmidt process on the columns, the y among them, which is as stable as Householder's.
    """
    columns: list[Sequence[float]] = [*zip(*rows, strict=True)]
    triangle: list[Row] = []
    for j in range(n):
        size = math.hypot(*columns[j])
        unit = _scaled(1 / size, columns[j])
        rest = [_dot(unit, column) for column in columns[j + 1 :]]
        columns[j + 1 :] = [_plus(x, -r, unit) for x, r in zip(columns[j + 1 :], rest, strict=True)]
        triangle.append((*(0.0,) * j, size, *rest))
    solutions = []
    for k in range(n, len(columns)):
        x = [0.0] * n
        for j in reversed(range(n)):
            x[j] = (triangle[j][k] - _dot(triangle[j][:n], x)) / triangle[j][j]
        solutions.append(x)
    return solutions
