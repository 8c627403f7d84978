"""Simplification of failures: features are turned off one by one, as long as the same failure stays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import TypeVar

from .cases import SHAPES, Spec, consistent
from .fields import CORES
from .judge import Outcome, judge

SIMPLER = {  # values to try beside the default of each field, the simplest first
    "core": ["tanh", "decay", "mlp"],
    "shape": [(), (2,), (1, 2), (2, 3)],
    "tree": ["tensor", "tuple"],
    "gradient": ["MALI()", "ACA()", "MALI(exact=True)"],
    "solver": ["ALF()", "Euler()", "ALF(refresh='never')"],
    "observe": ["none", "plain"],
    "loss": ["end"],
}


def simpler(spec: Spec) -> Iterator[Spec]:
    """Yield problems that differ from this one in one feature, towards the simplest."""
    for x in fields(spec):
        if x.name in ("controller", "times", "others", "core", "shape"):
            continue
        candidates = [x.default, *SIMPLER.get(x.name, [])]
        now = getattr(spec, x.name)
        end = candidates.index(now) if now in candidates else len(candidates)
        for value in candidates[:end]:
            yield replace(spec, **{x.name: value})
    for i in range(len(spec.others)):
        yield replace(spec, others=(*spec.others[:i], *spec.others[i + 1 :]))
    for times in ((0.0, 1.0), (0.0, spec.times[-1] - spec.times[0]), (spec.times[0], spec.times[-1])):
        yield replace(spec, times=times, controller=_scaled(spec.controller, spec.times, times))
    for i in range(1, len(spec.times) - 1):
        yield replace(spec, times=(*spec.times[:i], *spec.times[i + 1 :]))
    for core in SIMPLER["core"]:
        if spec.core not in SIMPLER["core"] and len(spec.shape) in CORES[core]:
            yield replace(spec, core=core)
    for shape in (*SIMPLER["shape"], *SHAPES[len(spec.shape)]):
        if len(shape) in CORES[spec.core] and sum(shape) < sum(spec.shape):
            yield replace(spec, shape=shape)
    span = abs(spec.times[-1] - spec.times[0])
    if spec.controller.startswith("Adaptive"):
        yield from (replace(spec, controller=f"FixedStep({span / n:.6g})") for n in (4, 20))
        yield replace(spec, controller=",".join(spec.controller.split(",")[:2]).rstrip(")") + ")")
    elif spec.controller != "FixedStep(inf)":
        h, _ = _size_and_rest(spec.controller)
        yield replace(spec, controller="FixedStep(inf)")
        yield replace(spec, controller=_fixed_step(h, ""))
        yield from (replace(spec, controller=_with_size(spec, c)) for c in (1.0, 0.5, 8 * h, 2 * h) if h < c < span)


def _size_and_rest(controller: str) -> tuple[float, str]:
    """Return h and the other options of "FixedStep(h, ...)"."""
    h, *rest = controller.removeprefix("FixedStep(").rstrip(")").split(", ")
    return float(h), ", ".join(rest)


def _fixed_step(h: float, rest: str) -> str:
    return f"FixedStep({h:.6g}, {rest})" if rest else f"FixedStep({h:.6g})"


def _with_size(spec: Spec, h: float) -> str:
    return _fixed_step(h, _size_and_rest(spec.controller)[1])


def _scaled(controller: str, old: tuple[float, ...], new: tuple[float, ...]) -> str:
    """Return a controller with the same number of fixed steps on another span."""
    if not controller.startswith("FixedStep(") or controller == "FixedStep(inf)":
        return controller
    h, rest = _size_and_rest(controller)
    return _fixed_step(h * abs((new[-1] - new[0]) / (old[-1] - old[0])), rest)


def candidates_of(spec: Spec) -> Iterator[Spec]:
    return map(consistent, simpler(spec))


AnySpec = TypeVar("AnySpec")


def shrink(
    spec: AnySpec,
    outcome: Outcome,
    seconds: float = 30.0,
    judged: Callable[[AnySpec], Outcome] = judge,
    candidates: Callable[[AnySpec], Iterator[AnySpec]] = candidates_of,
) -> tuple[AnySpec, Outcome]:
    """Return the simplest problem that was found to fail in the same way, and its outcome."""
    stop, seen = time.perf_counter() + seconds, {spec}
    is_simpler = True
    while is_simpler:
        is_simpler = False
        for candidate in candidates(spec):
            if candidate in seen:
                continue
            if time.perf_counter() > stop:
                return spec, outcome
            seen.add(candidate)
            found = judged(candidate)
            if (found.verdict, found.kind) == (outcome.verdict, outcome.kind):
                spec, outcome, is_simpler = candidate, found, True
                break
    return spec, outcome
