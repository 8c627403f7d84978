"""Hooks on parameters, silenced during a backward pass."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from torchmali._torch import hooks_of


class Quiet:
    """A hook that is not called in backward passes of solves, each in its own thread. Other threads do not notice."""

    lock = threading.Lock()  # for the counts of all hooks
    here = threading.local()  # depth: how many of our backward passes this thread is in

    def __init__(self, hook: Callable):
        self.hook, self.n_users = hook, 0

    def count_users(self, change: int) -> int:
        """Add to the number of backward passes that want this hook to be quiet, and return it."""
        self.n_users += change
        return self.n_users

    def __call__(self, *args: Any) -> Any:
        return None if getattr(Quiet.here, "depth", 0) else self.hook(*args)


def silence_hooks(tensors: Sequence[Tensor], stack: contextlib.ExitStack) -> None:
    """Silence the hooks of parameters in this thread until `stack` is closed.

    A hook is for the whole gradient of a parameter, which autograd shows it, not for the share of each step.
    """
    # Autograd itself holds the dict of a tensor with a history, and another thread may be about to call what is in it:
    # the hooks stay there, but keep quiet in this thread.
    hooked = [hooks for x in tensors if (hooks := hooks_of(x))]
    retained = [(x, x.grad) for x in tensors if x.retains_grad]
    if hooked or retained:
        stack.enter_context(_silence(hooked, retained))


@contextlib.contextmanager
def _silence(hooked: Sequence[dict], retained: Sequence[tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    quiet = _quieted(hooked)
    Quiet.here.depth = getattr(Quiet.here, "depth", 0) + 1
    try:
        yield
    finally:
        Quiet.here.depth -= 1
        _unquieted(quiet)
        for x, grad in retained:
            x.grad = grad


def _quieted(hooked: Sequence[dict]) -> list[tuple[dict, Any, Quiet]]:
    """Wrap all hooks; those that another thread has wrapped already are shared."""
    found = []
    with Quiet.lock:
        for hooks in hooked:
            for key, hook in list(hooks.items()):
                quiet = hook if isinstance(hook, Quiet) else Quiet(hook)
                quiet.count_users(1)
                hooks[key] = quiet
                found.append((hooks, key, quiet))
    return found


def _unquieted(found: list[tuple[dict, Any, Quiet]]) -> None:
    with Quiet.lock:
        for hooks, key, quiet in found:
            if not quiet.count_users(-1) and hooks.get(key) is quiet:  # it may have been removed
                hooks[key] = quiet.hook
