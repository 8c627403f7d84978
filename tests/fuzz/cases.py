"""Random problems as values: `draw(case, seed)` gives a Spec, `Problem(spec)` the problem it describes.

A Spec holds plain values only, so that it can be printed, compared, and made simpler one feature at a time. Solvers,
controllers and gradient methods stand in it as they would be written in code.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

import torchmali as tm

from .fields import (
    CORES,
    COUPLING,
    DRAWING,
    FORMULAS,
    JUMPY,
    KEEPING,
    NEEDS_ROWS,
    FuzzField,
    IndexedWatcher,
    Watcher,
    gain_limit,
    in_layout,
    make_core,
)

SHAPES: dict[int, list[tuple[int, ...]]] = {
    0: [()],
    1: [(1,), (3,), (6,)],
    2: [(1, 1), (1, 4), (3, 4), (3, 4), (5, 2), (0, 3), (2, 1)],
    3: [(2, 3, 4), (1, 2, 2), (2, 1, 4)],
    4: [(2, 3, 4, 4), (1, 2, 3, 3), (2, 2, 1, 1)],
}
OTHERS: list[tuple[int, ...]] = [(), (2,), (3, 2), (1, 3), (0,), (2, 0), (2, 2, 2, 2)]
LAYOUTS = ["contiguous", "transposed", "channels_last", "expanded", "sliced"]
RUNGE_KUTTA = ["Euler", "Midpoint", "Heun", "Heun3", "RK4", "RK4ThreeEighths", "HeunEuler", "Bosh3", "Dopri5", "Tsit5"]
RUNGE_KUTTA += ["Dopri8"]
REVERSIBLE = ["Reversible(RK4())", "Reversible(Dopri5(), coupling=0.9)", "Reversible(Euler())", "Reversible(Bosh3())"]
ALFS = ["ALF()"] * 6 + ["ALF(refresh='never')", "ALF(refresh=1)", "ALF(refresh=3)"]
ALFS += ["ALF(eta=0.95)", "ALF(eta=0.7)", "ALF(eta=0.3)"]
ALFS += ["ALF(order=4)"] * 3 + ["ALF(order=6)"] * 2 + ["ALF(order=4, refresh=2)", "ALF(order=6, refresh='never')"]
ALFS += ["ALF(order=4, evals=5)"] * 3 + ["ALF(order=6, evals=14)", "ALF(order=4, evals=5, refresh='never')"]
MALIS = ["MALI()"] * 5 + ["MALI(checkpoint_every=1)", "MALI(checkpoint_every=2)", "MALI(checkpoint_every=7)"]
MALIS += ["MALI(checkpoint_every=None)", "MALI(memory='20kB')", "MALI(memory='1MB')", "ACA()", "ACA()"]
EXACT = ["MALI(exact=True)"] * 3 + ["MALI(exact='int64')", "MALI(exact=True, checkpoint_every=3)"]
LOOSE = ["Adjoint()", "Adjoint(seminorm=True)"]
TAKES_GENERATOR = "generator" in inspect.signature(tm.solve).parameters
NAMES = {name: getattr(tm, name) for name in tm.__all__} | {"inf": math.inf}


@dataclass(frozen=True)
class Spec:
    """A problem. The defaults are the simplest one; `repr` shows the fields that differ from their defaults."""

    core: str = "tanh"  # of fields.CORES
    gain: float = 1.0
    shape: tuple[int, ...] = ()
    others: tuple[tuple[int, ...], ...] = ()  # shapes of further leaves
    tree: str = "tensor"  # "tuple", "list", "dict", "nested"
    dtype: str = "float64"  # "float32", "mixed"
    layout: str = "contiguous"  # of y0
    slope_layout: str = "as it comes"
    answers_lists: bool = False  # f returns a list for a tuple
    scale: float = 1.0  # of y0
    spread: float = 1.0  # of the last element of y0 over the first: each is an ODE of its own, and judged alone
    times: tuple[float, ...] = (0.0, 1.0)
    times_as: str = "list"  # "float64", "float32", "requires_grad"
    solver: str = "ALF()"
    controller: str = "FixedStep(inf)"
    gradient: str = "MALI()"
    args: str = "none"  # "tensor", "requires_grad", "nested"
    wants: str = "all"  # what requires a gradient: "y0", "parameters", "one leaf", "nothing", "no_grad", "inference"
    params: str = "found"  # "listed"
    observe: str = "none"  # "plain", "with k", "with dropout"
    loss: str = "all"  # outputs that it looks at: "end", "some"
    buffers: str = "update"  # "freeze"
    evaluates: bool = False  # f in eval mode
    threads: int = 1
    autocast: bool = False
    generator: bool = False  # f draws from a generator that is given to the solve
    jumps: tuple[
        float, ...
    ] = ()  # times at which f could jump: it does not, but steps end there and slopes are renewed
    seed: int = 0

    def __repr__(self) -> str:
        shown = [(x.name, getattr(self, x.name)) for x in fields(self)]
        changed = [
            f"{name}={value!r}" for (name, value), x in zip(shown, fields(self), strict=True) if value != x.default
        ]
        return f"Spec({', '.join(changed)})"

    @property
    def method(self) -> tm.GradientMethod:
        return eval(self.gradient, NAMES)

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn in f or in observe."""
        return (self.core in DRAWING and not self.evaluates) or self.observe == "with dropout"

    @property
    def is_exact(self) -> bool:
        return "exact" in self.gradient

    @property
    def is_loose(self) -> bool:
        """Whether its gradient is that of the ODE up to a tolerance, not that of the steps."""
        return self.gradient in LOOSE

    @property
    def features(self) -> dict[str, str]:
        """Values by which outcomes are counted."""
        step = self.controller.split("(")[0]
        names = (
            "core",
            "tree",
            "dtype",
            "spread",
            "layout",
            "slope_layout",
            "times_as",
            "solver",
            "gradient",
            "args",
            "wants",
        )
        shown = {
            name: str(getattr(self, name))
            for name in (*names, "observe", "loss", "buffers", "threads", "autocast", "generator")
        }
        return {**shown, "controller": step, "jumps": str(bool(self.jumps))}


def draw(case: int, seed: int = 0) -> Spec:
    """Draw the problem of this number."""
    rng = Random(f"{seed}/{case}")
    core = rng.choice(list(CORES))
    shape = rng.choice(SHAPES[rng.choice(CORES[core])])
    dtype = rng.choices(["float64", "float32", "mixed"], [70, 22, 8])[0]
    others = tuple(rng.choice(OTHERS) for _ in range(rng.choice([0, 0, 0, 1, 2, 3])))
    if dtype == "mixed" and not others:
        others = (rng.choice(OTHERS),)
    tree = rng.choice(["tuple", "list", "dict", "nested"]) if others else rng.choice(["tensor"] * 4 + ["tuple", "dict"])
    times = _times(rng)
    span = abs(times[-1] - times[0])
    gain = gain_limit(span) * rng.random() ** 2 * rng.choice([0.5, 1, 1, 2]) + 0.05
    family = rng.choices(["alf", "runge-kutta", "reversible"], [70, 20, 10])[0]
    solver = {
        "alf": rng.choice(ALFS),
        "runge-kutta": rng.choice(RUNGE_KUTTA) + "()",
        "reversible": rng.choice(REVERSIBLE),
    }
    spec = Spec(
        core,
        round(gain, 4),
        shape,
        others,
        tree,
        dtype,
        layout=rng.choice(["contiguous"] * 4 + LAYOUTS),
        slope_layout=rng.choice(["as it comes"] * 4 + LAYOUTS),
        answers_lists=rng.random() < 0.1,
        scale=rng.choice([1.0] * 6 + [1e-3, 10.0, 1e4]),
        spread=rng.choice([1.0] * 7 + [1e-6, 1e3, 1e6]),
        times=times,
        times_as=rng.choice(["list", "list", "float64", "float32", "requires_grad"]),
        solver=solver[family],
        args=rng.choice(["none", "none", "none", "tensor", "requires_grad", "nested"]),
        wants=rng.choice(["all"] * 8 + ["y0", "parameters", "one leaf", "nothing", "no_grad", "inference"]),
        params=rng.choice(["found", "found", "found", "listed"]),
        observe=rng.choice(["none"] * 6 + ["plain", "with k", "with dropout"]),
        loss=rng.choice(["all", "all", "end", "some"]),
        buffers=rng.choice(["update", "update", "freeze"]),
        evaluates=rng.random() < 0.15,
        threads=3 if rng.random() < 0.03 else 1,
        autocast=rng.random() < 0.03,
        seed=rng.randrange(1000),
    )
    spec = _completed(spec, rng)
    return replace(spec, jumps=_jumps(rng, spec.times))


def _jumps(rng: Random, times: Sequence[float]) -> tuple[float, ...]:
    """Return times inside and at output times, sometimes."""
    if rng.random() < 0.85:
        return ()
    inside = [times[0] + rng.uniform(0.02, 0.98) * (times[-1] - times[0]) for _ in range(rng.choice([1, 2, 4]))]
    return (*inside, *rng.sample(times, rng.choice([0, 0, 1, 2])))


def _times(rng: Random) -> tuple[float, ...]:
    n = rng.choice([2, 2, 2, 3, 4, 7])
    span = rng.choice([1e-6, 1e-2, 0.3, 0.5, 1.0, 1.0, 1.0, 2.0, 3.0, 5.0])
    start = rng.choice([0.0] * 5 + [-1.0, 0.3, 100.0, 1e6])
    cuts = (
        sorted(rng.uniform(0.02, 0.98) for _ in range(n - 2))
        if rng.random() < 0.5
        else [k / (n - 1) for k in range(1, n - 1)]
    )
    times = [start, *(start + span * x for x in cuts), start + span]
    return tuple(reversed(times)) if rng.random() < 0.25 else tuple(times)


def _completed(spec: Spec, rng: Random) -> Spec:
    """Add a controller and a gradient method that suit the solver, and remove features that exclude each other."""
    solver: tm.Solver = eval(spec.solver, NAMES)
    span = abs(spec.times[-1] - spec.times[0])
    costly = (isinstance(solver, tm.Leapfrog) and solver.n_reflects > 1) or "nested" in spec.core
    if solver.error_order is not None and rng.random() < 0.35:
        controller = _adaptive(rng, solver, spec.dtype)
    elif rng.random() < 0.1:
        controller = "FixedStep(inf)"
    else:
        n = rng.choice([1, 2, 3, 5]) if costly else rng.choice([1, 2, 4, 8, 15, 25, 40, 80])
        is_free = solver.interpolates and rng.random() < 0.25
        controller = f"FixedStep({span / n * rng.choice([1.0, 1.0, 0.93]):.6g}{', land=False' if is_free else ''})"
    is_alf, damped = spec.solver.startswith("ALF"), "eta" in spec.solver
    if isinstance(solver, tm.ReversibleSolver):
        choices = MALIS + (EXACT * 2 if is_alf and not damped else [])
        gradient = rng.choice(
            [x for x in choices if solver.amplification == 1 or ("None" not in x and "memory" not in x)]
        )
    else:
        gradient = rng.choice(["ACA()"] * 4 + ["Naive()"])
    spec = replace(spec, controller=controller, gradient=gradient)
    if rng.random() < 0.02:
        spec = replace(spec, gradient=rng.choice(LOOSE), solver="Dopri5()", controller="AdaptiveStep(1e-8, 1e-8)")
    return consistent(replace(spec, generator=rng.random() < 0.4))


def _adaptive(rng: Random, solver: tm.Solver, dtype: str) -> str:
    finest = -3.5 if solver.order <= 2 else -4.5 if dtype != "float64" else -6.5
    rtol = f"{10 ** rng.uniform(finest, -1):.2g}"
    options = [
        "h0=0.1",
        "h0=10.0",
        "beta=0.4",
        "land=True",
        "h_max=0.2",
        "max_factor=2.0",
        "safety=0.5",
        "min_factor=0.5",
    ]
    chosen = rng.sample(options, rng.choice([0, 0, 1, 2]))
    chosen = [x for i, x in enumerate(chosen) if x.split("=")[0] not in [y.split("=")[0] for y in chosen[:i]]]
    return f"AdaptiveStep({', '.join([rtol, rtol, *chosen, 'max_steps=1000'])})"


def consistent(spec: Spec) -> Spec:
    """Return the problem without features that exclude each other; also used for problems made simpler."""
    if len(spec.shape) not in CORES[spec.core]:
        spec = replace(spec, shape=SHAPES[CORES[spec.core][0]][-1])
    if spec.core in NEEDS_ROWS and spec.shape[0] * math.prod(spec.shape[2:]) < 2:
        spec = replace(spec, shape=SHAPES[len(spec.shape)][2] if len(spec.shape) == 2 else (2, 3, 4, 4))
    if spec.core == "group norm" and 0 in spec.shape:
        spec = replace(spec, shape=(2, 3, 4, 4))
    if spec.core == "spectral norm" and not spec.evaluates:
        spec = replace(spec, buffers="freeze")  # it reads what it changes
    alone = spec.core in FORMULAS and spec.core not in COUPLING and not spec.others and spec.observe == "none"
    if spec.spread != 1 and (
        not alone or spec.layout == "expanded" or spec.slope_layout == "expanded" or spec.autocast
    ):
        spec = replace(spec, spread=1.0)
    if spec.others and spec.tree == "tensor":
        spec = replace(spec, tree="tuple")
    if spec.dtype == "mixed" and not spec.others:
        spec = replace(spec, dtype="float32")
    if spec.is_loose and (spec.core in JUMPY or spec.dtype != "float64" or spec.observe != "none" or spec.gain > 2):
        spec = replace(spec, gradient="ACA()", controller="AdaptiveStep(1e-4, 1e-4)")
    if spec.is_loose and (spec.core in KEEPING or "nested" in spec.core):
        spec = replace(spec, core="tanh")
    if spec.is_loose and spec.core == "half of y" and spec.times_as == "requires_grad":
        spec = replace(spec, times_as="float64")  # dL/dt0 = -a f holds where f's derivative is not cut off
    if not TAKES_GENERATOR or not spec.draws:
        spec = replace(spec, generator=False)
    if spec.threads > 1 and (
        (spec.draws and not spec.generator) or spec.wants in ("nothing", "no_grad", "inference") or spec.autocast
    ):
        spec = replace(spec, threads=1)
    if spec.autocast and (spec.dtype != "float32" or spec.is_loose):
        spec = replace(spec, autocast=False)
    if spec.dtype != "float64" and abs(spec.times[-1] - spec.times[0]) < 1e-5 * max(map(abs, spec.times)):
        spec = replace(spec, times=tuple(t - spec.times[0] for t in spec.times))
    if spec.times_as == "float32" and len({float(torch.tensor(t)) for t in spec.times}) < len(spec.times):
        spec = replace(spec, times_as="float64")
    return spec


class Problem:
    """Problem that a Spec describes. It is made anew for each solve: equal to the bit, and nothing is shared."""

    def __init__(self, spec: Spec, shift: int = 0):
        self.spec = spec
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed + 1000 * shift)
            shapes = [spec.shape, *spec.others]
            self.dtypes = [_dtype(spec.dtype, i) for i in range(len(shapes))]
            core = make_core(spec.core, spec.shape, spec.gain).to(self.dtypes[0])
            self.func = FuzzField(core, len(shapes), spec.slope_layout, spec.answers_lists)
            self.func.gains.to(self.dtypes[-1])
            self.func.train(not spec.evaluates)
            leaves = [
                spec.scale * torch.randn(shape, dtype=kind) for shape, kind in zip(shapes, self.dtypes, strict=True)
            ]
            self.watcher = _watcher(spec.observe, max(self.dtypes, key=lambda kind: kind.itemsize))
        leaves[0] = leaves[0] * _powers(spec.spread, leaves[0])
        self.leaves = [in_layout(z, spec.layout) for z in leaves]
        self.t = self._times()
        self.w = torch.tensor(1.2, dtype=self.dtypes[0])
        self._ask_for_gradients()

    def _times(self) -> Tensor | list[float]:
        kinds = {"float32": torch.float32, "float64": torch.float64, "requires_grad": torch.float64}
        times, kind = list(self.spec.times), kinds.get(self.spec.times_as)
        return times if kind is None else torch.tensor(times, dtype=kind)

    def _ask_for_gradients(self) -> None:
        wants = self.spec.wants
        asked = wants in ("all", "no_grad", "inference")
        for i, z in enumerate(self.leaves):
            z.requires_grad_(asked or wants == "y0" or (wants == "one leaf" and i == 0))
        modules = [self.func, *([self.watcher] if self.watcher is not None else [])]
        for p in (p for module in modules for p in module.parameters()):
            p.requires_grad_(asked or wants == "parameters")
        if isinstance(self.t, Tensor):
            self.t.requires_grad_(self.spec.times_as == "requires_grad" and asked)
        self.w.requires_grad_(self.spec.args != "tensor" and asked)

    def move(self, relative: Sequence[Tensor]) -> None:
        """Change y0 by these small numbers."""
        for i, (z, d) in enumerate(zip(self.leaves, relative, strict=True)):
            moved = in_layout(z.detach() + d, self.spec.layout)
            self.leaves[i] = moved.requires_grad_(z.requires_grad)

    def first_move(self, h: float) -> list[Tensor]:
        """h |f(t0, y0)|, the size of what a step adds to y0, leaf by leaf."""
        widest = max(self.dtypes, key=lambda kind: kind.itemsize)
        leaves = [z.detach().clone().requires_grad_() for z in self.leaves]  # f may differentiate by y
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            t0 = torch.tensor(self.spec.times[0], dtype=widest)
            u = self.func(t0, in_tree(leaves, self.spec.tree), *self.args)
        return [h * x.detach().abs().to(z.dtype) for x, z in zip(pytree.tree_leaves(u), leaves, strict=True)]

    @property
    def y0(self) -> Any:
        return in_tree(self.leaves, self.spec.tree)

    @property
    def args(self) -> tuple:
        kinds = {
            "none": (),
            "tensor": (self.w,),
            "requires_grad": (self.w,),
            "nested": ({"w": [self.w], "factor": 0.5},),
        }
        return kinds[self.spec.args]

    @property
    def inputs(self) -> dict[str, Tensor]:
        """All that may get a gradient, by name."""
        named = {f"y0[{i}]": z for i, z in enumerate(self.leaves)} | dict(self.func.named_parameters())
        named |= {"args": self.w} if self.spec.args != "none" else {}
        named |= {"t": self.t} if isinstance(self.t, Tensor) else {}
        return named | ({"observe": self.watcher.scale} if self.watcher is not None else {})

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(self.func.named_buffers())

    def solve(self, method: tm.GradientMethod, controller: tm.StepController | None = None) -> tm.Solution:
        spec = self.spec
        how: dict[str, Any] = {"solver": eval(spec.solver, NAMES), "gradient": method, "args": self.args}
        how["controller"] = controller or eval(spec.controller, NAMES)
        if spec.params == "listed":
            how["params"] = list(self.func.parameters())
        if self.watcher is not None:
            how["observe"] = self.watcher
        if spec.generator:
            how["generator"] = torch.Generator().manual_seed(spec.seed)
        return tm.solve(self.func, self.y0, self.t, buffers=spec.buffers, jumps=spec.jumps, **how)

    def loss(self, solution: tm.Solution) -> Tensor:
        """Loss that is smooth, finite for large y, and different for each element."""
        total = torch.zeros((), dtype=torch.float64)
        for z in pytree.tree_leaves(solution.y):
            x = {"all": z, "end": z[-1:], "some": z[::2]}[self.spec.loss].double()
            c = torch.linspace(-1.0, 1.3, x.numel(), dtype=torch.float64).reshape(x.shape)
            total = total + (c * x).sum() + torch.sqrt(1 + x * x).sum()
        return total if solution.observed is None else total + solution.observed.double().sum()


def _powers(last: float, like: Tensor) -> Tensor:
    """Return numbers from 1 to `last` in equal factors."""
    return torch.logspace(0.0, math.log10(last), like.numel(), dtype=like.dtype).reshape(like.shape)


def _dtype(name: str, i: int) -> torch.dtype:
    mixed = torch.float32 if i % 2 else torch.float64
    return {"float64": torch.float64, "float32": torch.float32, "mixed": mixed}[name]


def _watcher(name: str, dtype: torch.dtype) -> Watcher | None:
    if name == "none":
        return None
    return IndexedWatcher(dtype) if name == "with k" else Watcher(dtype, 0.3 if name == "with dropout" else 0.0)


def in_tree(leaves: Sequence[Tensor], tree: str) -> Any:
    first, *others = leaves
    if tree == "tensor":
        return first
    if tree in ("tuple", "list"):
        return tuple(leaves) if tree == "tuple" else list(leaves)
    if tree == "dict":
        return dict(zip("abcd", leaves, strict=False))
    return {"x": (first,), "rest": [others[0], {"more": tuple(others[1:])}] if len(others) > 1 else others}
