"""The base of abstract classes."""

from __future__ import annotations

from abc import ABCMeta


class _AbstractMeta(ABCMeta):
    # isinstance asks the class itself: no class of ours has registered subclasses, and a solve asks dozens of times.
    __instancecheck__ = type.__instancecheck__


class Abstract(metaclass=_AbstractMeta):
    """A class that cannot be instantiated before all its abstract methods are defined."""
