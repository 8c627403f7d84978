"""Behaviour of functions, remembered from one solve to the next.

The first evaluations of f in a solve show whether it draws random numbers, in which precision it computes, whether it
depends on tensors that would get no gradient (evaluate.py, environment.py). To look costs as much as a few evaluations
of a small f. Where nothing was found, later solves with the same f do not look again.

A behaviour is found again only for the same function object with the same parameters, modules and modes, for a state
of the same shapes, dtypes and device, and in the same grad mode. It is remembered only for an f without buffers,
without other tensors in closures or args, and neither under autocast nor in inference mode. Something else (an
attribute, a global) may make f behave otherwise. That is noticed by the state of the default generators, which is
compared after every solve, or by autograd's error if f takes derivatives by y. Then the behaviour is forgotten, and the
solve is made again with all care.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

MANY = 64  # behaviours of one function, for states of different shapes: beyond this all are forgotten


class Behaviour(NamedTuple):
    """What the first evaluations of a function showed, where it needs no care."""

    eps: float  # rounding of the coarsest floating-point type in which it computes
    operations: Sequence[Any]
    keeps_bits: bool | None = None  # whether it returns the same bits with and without a graph; None: not looked at
    is_calm: bool = True  # no solve in fixed steps has seen f - v alternate, or the like
    graph_bytes: int | None = None  # that the graph of one evaluation keeps alive; None: not looked at
    n_evals: int = 0  # of the last forward pass in steps whose number was not known in advance


_behaviours: WeakKeyDictionary[Any, dict[Hashable, Behaviour]] = WeakKeyDictionary()


def _owner(func: Callable) -> tuple[Any, Any]:
    """The object with which a behaviour lives, and what tells its methods apart: a bound method is a new object."""
    return (func.__self__, func.__func__) if isinstance(func, types.MethodType) else (func, None)


def recall(func: Callable, key: Hashable) -> Behaviour | None:
    owner, part = _owner(func)
    try:
        return _behaviours[owner].get((part, key))
    except (KeyError, TypeError):  # it is not known, or no weak reference to it can be made
        return None


def remember(func: Callable, key: Hashable, behaviour: Behaviour) -> None:
    owner, part = _owner(func)
    try:
        found = _behaviours.setdefault(owner, {})
    except TypeError:
        return
    if len(found) >= MANY:
        found.clear()
    found[part, key] = behaviour


def forget(func: Callable) -> None:
    try:
        _behaviours.pop(_owner(func)[0], None)
    except TypeError:
        return
