"""Random problems of many scales for MALI(exact=True), judged element by element.

    python -m tests.fuzz scales --cases 1000 --record FILE     judge cases 0 to 999
    python -m tests.fuzz scales --only 123                     judge one case, and shrink it if it fails

Every element of every leaf is an ODE of its own: it is still, grows, decays, is driven, is hit by a pulse, and so on,
at a scale of its own. An exact solve must

1. be rebuilt to the bit, and be equal to the bit to MALI(exact=True, checkpoint_every=1),
2. follow each element as floats do,
3. not be refused where plain floats succeed.

For the second, the truth is given by the same steps and refreshes in float64, in a few lines of torch (`replay`). The
allowed error is FACTOR times the largest of: the error of these lines in the leaf's own dtype, an ulp, and the effect
of noise in every move; or once the effect of noise of the same sign in every move, as round-off is where moves are
equal. The noise is an ulp of each element. In a leaf with one exponent it is the spacing of the leaf, as far as the
rule by which a leaf gets exponents for its elements lets small elements share it (`bits_lacking`). The size of an
element is its largest within the last 8 evaluations, between which exact mode does not check sizes.

Steps resolve the rates (|h rate| <= 4), but for one case in 20, which is judged by its bits alone. Outcomes: "agrees";
"refused" (by floats, too); "failed" (anything else).
"""

from __future__ import annotations

import argparse
import math
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

import torchmali as tm
from torchmali.solvers.leapfrog import scheme_of
from torchmali.state.fixed_point import LACKING, LACKING_ONE, LACKING_SHARE, PERIOD, SHARE
from torchmali.state.integers import BITS, MANTISSA, WORDS
from torchmali.state.vectors import number
from torchmali.tape import Event, Output, Refresh, Rescale, Start, Step

from . import runner
from .cases import NAMES
from .judge import Outcome
from .shrink import shrink as shrunk

FACTOR = 10.0
N_PATTERNS = 6  # of noise, at most
SMALLEST = {torch.float32: 1e-37, torch.float64: 1e-290}  # below it floats lose their bits, too
LARGEST = {torch.float32: 1e37, torch.float64: 1e300}
DECADES = {"float32": 28, "float64": 100}  # scales lie within 10^-n and 10^n
SHAPES: list[tuple[int, ...]] = [(), (1,), (2,), (3,), (8,), (20,), (70,), (300,), (2, 2), (3, 4), (64, 4), (4, 64)]
SHAPES += [(1, 5), (5, 1), (2, 3, 4), (2, 3, 8, 8), (4, 1, 6), (0,), (40, 1, 2)]
KINDS = ["still", "grow", "decay", "driven", "pulled", "logistic", "switch", "sine", "pulse", "burst", "fast", "drift"]
FORCED = ("driven", "switch", "pulse", "drift", "fast")
MAX_STEPS = 600  # evaluations of an adaptive solve in floats; on integers twice as many


@dataclass(frozen=True)
class Leaf:
    """A leaf of y0, and how its elements move. The defaults are the simplest one."""

    shape: tuple[int, ...] = (2,)
    dtype: str = "float32"
    kinds: tuple[str, ...] = ("still",)  # each element is of one of them
    scales: str = "one"  # of elements: "rows", "columns", "elements", "one small", "one large", "few small"
    spread: float = 1.0  # decades between the smallest and the largest scale
    scale: float = 1.0  # in their middle
    start: str = "scale"  # "zero", "some zero", "tiny"
    force: str = "unit"  # in units of the scale: "big", "small", "own" of each element
    rate: float = 1.0  # of all that moves, over the span
    layout: str = "contiguous"  # "transposed"

    def __repr__(self) -> str:
        return _shown(self)


@dataclass(frozen=True)
class Spec:
    """A problem. `repr` shows what differs from the simplest one."""

    leaves: tuple[Leaf, ...] = (Leaf(),)
    times: tuple[float, ...] = (0.0, 1.0)
    solver: str = "ALF()"
    controller: str = "FixedStep(0.1)"
    bits_only: bool = False
    seed: int = 0

    def __repr__(self) -> str:
        return _shown(self)

    @property
    def span(self) -> float:
        return abs(self.times[-1] - self.times[0])

    @property
    def direction(self) -> float:
        return 1.0 if self.times[-1] > self.times[0] else -1.0

    @property
    def h(self) -> float:
        """The fixed step, or a guess of adaptive ones."""
        return _step(self.controller) or self.span / 50

    @property
    def features(self) -> dict[str, str]:
        """Values by which outcomes are counted."""
        first, words = self.leaves[0], {name: str(getattr(self.leaves[0], name)) for name in ("dtype", "scales")}
        words |= {"start": first.start, "force": first.force, "kind": first.kinds[0], "leaves": str(len(self.leaves))}
        return {**words, "solver": self.solver, "controller": self.controller.split("(")[0]}


def _shown(spec: Spec | Leaf) -> str:
    changed = [(x.name, getattr(spec, x.name)) for x in fields(spec) if getattr(spec, x.name) != x.default]
    return f"{type(spec).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"


def _step(controller: str) -> float | None:
    return float(controller[10:-1]) if controller.startswith("FixedStep(") else None


# Drawing.


def draw(case: int, seed: int = 0) -> Spec:
    """Draw the problem of this number."""
    rng = Random(f"scales/{seed}/{case}")
    dtypes = rng.choice([["float32"], ["float32"], ["float32"], ["float64"], ["float32", "float64"]])
    order, adaptive = rng.choice([2, 2, 2, 4, 6]), rng.random() < 0.3
    n = max(1, int({2: 500, 4: 60, 6: 30}[order] ** rng.random()))
    bits_only = rng.random() < 0.05
    most = 20.0 if adaptive else 60.0 * n if bits_only else float(n)
    leaves = tuple(_leaf(rng, rng.choice(dtypes), most) for _ in range(rng.choice([1, 1, 1, 2, 3])))
    span = rng.choice([1.0, 1.0, 10 ** rng.uniform(-4, 4)])
    start, direction = rng.choice([0.0, 0.0, -3.0 * span, 7.0 * span]), rng.choice([1, 1, -1])
    shares = rng.choice([[0, 1], [0, 1], [0, 0.01, 0.5, 1], [i / 13 for i in range(14)], [0, 0.999, 1]])
    times = tuple(start + direction * span * share for share in shares)
    refresh = rng.choice(["auto", "auto", "never", 1, 1, 3])
    rtol = 10 ** rng.uniform(-5, -2)
    first = rng.choice(["", "", f", h0={span:.6g}"])
    adaptive_step = f"AdaptiveStep({rtol:.2g}, {rtol / 1000:.2g}{first}, max_steps={MAX_STEPS // order}, land=True)"
    controller = adaptive_step if adaptive else f"FixedStep({span / n!r})"
    return Spec(
        leaves, times, f"ALF(order={order}, refresh={refresh!r})", controller, bits_only, seed=rng.randrange(10**6)
    )


def _leaf(rng: Random, dtype: str, most: float) -> Leaf:
    """Draw a leaf. most: the largest rate over the span."""
    rate = min(most, rng.choice([1.0, 1.0, 5.0, 20.0, 60.0]) if most <= 500 else most)
    spread = rng.choice([1.0, 2.0, 3.0, 6.0, 9.0, 20.0, 2.0 * DECADES[dtype] - 6])
    room = max(0.0, DECADES[dtype] - spread / 2 - min(rate, 20.0) / 2)
    return Leaf(
        rng.choice(SHAPES),
        dtype,
        tuple(rng.sample(KINDS, rng.choice([1, 1, 2, 3, len(KINDS)]))),
        rng.choice(["one", "one", "rows", "columns", "elements", "one small", "one large", "few small"]),
        spread,
        float(f"{10 ** rng.choice([0.0, rng.uniform(-room, room)]):.6g}"),
        rng.choice(["scale", "scale", "scale", "zero", "some zero", "tiny"]),
        rng.choice(["unit", "unit", "big", "small", "own"]),
        rate,
        rng.choice(["contiguous", "contiguous", "transposed"]),
    )


# The problem.


class Elements:
    """A leaf as tensors: the start, the parameters of f, the weights of the loss.

    y' = y (a + b cos(w t + p) - q k y) + force(t) + d sin(k y + t)
    force(t) = c cos(w2 t + p2) exp(-((t - m) / width)^2)       c: before, from the time `at` on: after
    """

    def __init__(self, leaf: Leaf, spec: Spec, rng: torch.Generator):
        self.leaf, self.spec, self.rng = leaf, spec, rng
        self.dtype = getattr(torch, leaf.dtype)
        self.kinds = torch.tensor([KINDS.index(x) for x in leaf.kinds])[
            torch.randint(len(leaf.kinds), leaf.shape, generator=rng)
        ]
        scale, sign = self._scale(), torch.where(self._random() < 0.5, -1.0, 1.0)
        self.start = self._laid(self._start(sign * scale * (0.3 + self._random())))
        self.parameters = {name: self._laid(x) for name, x in self._parameters(scale, sign).items()}
        self.in_float64 = {name: x.double() for name, x in self.parameters.items()}
        self.weights = torch.stack([0.5 + self._random() for _ in spec.times])  # of one sign: nothing cancels

    def parameters_in(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return self.in_float64 if dtype == torch.float64 else self.parameters

    def _random(self, *shape: int) -> Tensor:
        return torch.rand(shape or self.leaf.shape, generator=self.rng, dtype=torch.float64)

    def _laid(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        return x.mT.contiguous().mT if self.leaf.layout == "transposed" and x.ndim > 1 else x

    def _are(self, *kinds: str) -> Tensor:
        """1 for elements of these kinds, 0 for others."""
        return sum(((self.kinds == KINDS.index(kind)).double() for kind in kinds), torch.zeros(()))

    def _scale(self) -> Tensor:
        leaf, shape = self.leaf, self.leaf.shape
        place = torch.zeros(shape, dtype=torch.float64)  # from -1/2 to 1/2
        if leaf.scales == "rows" and shape:
            place += self._random(shape[0]).reshape(-1, *[1] * (len(shape) - 1)) - 0.5
        elif leaf.scales == "columns" and shape:
            place += self._random(shape[-1]) - 0.5
        elif leaf.scales == "elements":
            place += self._random() - 0.5
        elif leaf.scales != "one" and place.numel():
            number = max(1, place.numel() // 50) if leaf.scales == "few small" else 1
            chosen = torch.randperm(place.numel(), generator=self.rng)[:number]
            place += 0.5
            place.view(-1)[chosen] = -0.5
            place *= -1 if leaf.scales == "one large" else 1
        return leaf.scale * 10 ** (leaf.spread * place)

    def _start(self, start: Tensor) -> Tensor:
        if self.leaf.start == "some zero":
            return torch.where(self._random() < 0.4, 0.0, start)
        tiny = 1e-8 if self.leaf.dtype == "float32" else 1e-14
        return start * {"scale": 1.0, "zero": 0.0, "tiny": tiny}[self.leaf.start]

    def _parameters(self, scale: Tensor, sign: Tensor) -> dict[str, Tensor]:
        spec, span, are = self.spec, self.spec.span, self._are
        rate = self.leaf.rate / span * (0.2 + 0.8 * self._random())
        if self.leaf.rate > 20:
            rate = rate / (1 + 3 * are("grow", "burst"))  # e^60 is too large for most starts
        force = scale / span * {"big": 1e4, "small": 1e-4}.get(self.leaf.force, 1.0) * (0.3 + self._random())
        if self.leaf.force == "own":
            force = force * 10 ** (10 * (self._random() - 0.5))
        net = are("grow", "logistic") - are("decay", "pulled") + 0.1 * are("sine")
        return {
            "a": spec.direction * rate * net,  # the same behaviour if times decrease
            "b": 4 * rate * are("burst"),
            "w": 2 * math.pi / span * (1 + 3 * self._random()),
            "p": 2 * math.pi * self._random(),
            "q": spec.direction * rate * are("logistic"),
            "k": are("sine", "logistic") / scale,
            "before": self._force(force) + are("pulled") * rate * scale * sign,
            "after": self._force(force) + are("pulled") * rate * scale * sign,
            "at": self._time(),
            "w2": torch.where(
                are("fast") > 0,
                (0.1 + self._random()) / spec.h,
                (1 - are("drift")) * 6 * math.pi / span * self._random() * (1 - are("pulled")),
            ),
            "p2": 2 * math.pi * self._random() * (1 - are("drift", "pulled")),
            "m": self._time(),
            "width": torch.where(are("pulse") > 0, span * (0.05 + 0.1 * self._random()), 1e20),
            "d": 0.3 * rate * scale * are("sine"),
        }

    def _time(self) -> Tensor:
        times = self.spec.times
        return times[0] + (times[-1] - times[0]) * self._random()

    def _force(self, force: Tensor) -> Tensor:
        """Return the force, which a switch may turn down by up to 8 decades."""
        is_down = self._are("switch") * (self._random() < 0.6) > 0
        return force * torch.where(is_down, 10 ** (8 * self._random() - 8), 1.0) * self._are(*FORCED)


def slope(t: Tensor, y: Tensor, p: dict[str, Tensor]) -> Tensor:
    t = t.to(y.dtype)
    rate = p["a"] + p["b"] * torch.cos(p["w"] * t + p["p"]) - p["q"] * (p["k"] * y)
    pulse = torch.exp(-(((t - p["m"]) / p["width"]) ** 2))
    force = torch.where(t < p["at"], p["before"], p["after"]) * torch.cos(p["w2"] * t + p["p2"]) * pulse
    return y * rate + force + p["d"] * torch.sin(p["k"] * y + t)


class Solved:
    """Outputs and gradients by name, each with the number of its leaf."""

    def __init__(self, y: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]):
        n = len(y)
        together = [w.to(x.dtype) for w, x in zip(weights, y, strict=True)]
        grads = torch.autograd.grad(y, inputs, together, allow_unused=True, materialize_grads=True)
        names = ["y", "dL/dy0", "dL/da", "dL/dbefore"]
        self.names = [(f"{name}[{i}]", i) for name in names for i in range(n)]
        self.tensors = [x.detach() for x in (*y, *grads)]


class Problem:
    """Problem that a Spec describes, with the same tensors each time it is made."""

    def __init__(self, spec: Spec):
        rng = torch.Generator().manual_seed(spec.seed)
        self.spec, self.leaves = spec, [Elements(leaf, spec, rng) for leaf in spec.leaves]
        self.widest = max((leaf.dtype for leaf in self.leaves), key=lambda dtype: dtype.itemsize)

    def inputs(self, dtype: torch.dtype | None = None) -> list[list[Tensor]]:
        """Return y0, a and `before` of all leaves, which get gradients."""
        chosen = ([x.start for x in self.leaves], *([x.parameters[n] for x in self.leaves] for n in ("a", "before")))
        return [[x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in part] for part in chosen]

    def solve(self, method: tm.GradientMethod, patience: int = 1) -> tuple[Solved, tm.Solution]:
        y0, a, before = self.inputs()

        def func(t: Tensor, y: Any, *args: Tensor) -> Any:
            u = self._slopes(t, y if isinstance(y, tuple) else (y,), args[: len(a)], args[len(a) :])
            return tuple(u) if isinstance(y, tuple) else u[0]

        solver, controller = (eval(text, NAMES) for text in (self.spec.solver, self.spec.controller))
        if isinstance(controller, tm.AdaptiveStep) and controller.max_steps is not None:
            controller = replace(controller, max_steps=patience * controller.max_steps)
        how: dict[str, Any] = {"solver": solver, "controller": controller, "gradient": method, "args": (*a, *before)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = tuple(y0) if len(y0) > 1 else y0[0]
            got = tm.solve(func, start, self.spec.times, **how, return_code=isinstance(method, tm.MALI))
            y = got.y if isinstance(got.y, tuple) else (got.y,)
            return Solved(y, [*y0, *a, *before], [leaf.weights for leaf in self.leaves]), got

    def _slopes(self, t: Tensor, y: Sequence[Tensor], a: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
        u = []
        for i, (x, leaf) in enumerate(zip(y, self.leaves, strict=True)):
            u.append(slope(t, x, {**leaf.parameters_in(x.dtype), "a": a[i], "before": before[i]}))
        return u

    def replay(self, events: Sequence[Event], wide: bool, noise: Noise | None = None) -> Solved:
        """Repeat the steps of a solve in plain torch. wide: in float64."""
        y0, a, before = self.inputs(torch.float64 if wide else None)
        noise = noise or Noise()
        order = eval(self.spec.solver, NAMES).order
        first, rest, _ = scheme_of(tm.ALF(order=order).coefficients)
        outputs: dict[int, list[Tensor]] = {}

        def f(t: float, z: Sequence[Tensor]) -> list[Tensor]:
            return noise.in_slope(self._slopes(torch.tensor(t, dtype=self.widest), z, a, before))

        z, v = noise.in_point(y0), [torch.zeros_like(y) for y in y0]
        for event in events:
            if isinstance(event, (Start, Refresh)):
                v = f(number(event.t), z)
            elif isinstance(event, Output):
                outputs[event.k] = z
            elif isinstance(event, Rescale):
                noise.part(leaf for leaf, _ in event.change.fresh)
            elif isinstance(event, Step):
                h = event.t1 - event.t0
                noise.look(z, v, abs(h))
                z = noise.in_point([x + first * h * s for x, s in zip(z, v, strict=True)])
                for node, e in rest:
                    u = f(event.t0 + node * h, z)
                    v = noise.in_slope([2 * x - s for x, s in zip(u, v, strict=True)], u)
                    noise.look(z, v, abs(h))
                    z = noise.in_point([x + e * h * s for x, s in zip(z, v, strict=True)])
        y = [torch.stack([outputs[k][i] for k in range(len(self.spec.times))]) for i in range(len(z))]
        return Solved(y, [*y0, *a, *before], [leaf.weights for leaf in self.leaves])


def bits_lacking(shape: Sequence[int]) -> int:
    """Bits of a float's mantissa that an element of a leaf with one exponent may lack (is_mixed in fixed_point.py)."""
    n = math.prod(shape)
    if n <= 1:
        return 0
    if n in shape:  # each element is a slice
        return LACKING
    return LACKING_SHARE if SHARE * n < 1 else math.ceil(LACKING_ONE + math.log2(n) / 2)


class Noise:
    """An ulp in every move, forward and backward, or the spacing of a leaf with one exponent. Without leaves: none."""

    def __init__(
        self, leaves: Sequence[Elements] = (), has_one: Sequence[bool] = (), seed: int = 0, is_constant: bool = False
    ):
        """has_one: leaves that begin with one exponent. is_constant: noise of one sign, as round-off at equal moves."""
        self.is_constant = is_constant
        self.leaves, self.has_one, self.rng = leaves, list(has_one), torch.Generator().manual_seed(seed)
        self.seen: list[list[tuple[Tensor, float]]] = [[] for _ in leaves]  # sizes at the last evaluations
        self.coarse: list[Tensor | float] = [0.0 for _ in leaves]  # what the leaf adds to the sizes of elements
        self.h = math.inf

    def part(self, leaves: Iterable[int]) -> None:
        """Give these leaves exponents for their elements."""
        for i in leaves:
            if i < len(self.leaves):
                self.has_one[i] = False

    def look(self, z: Sequence[Tensor], v: Sequence[Tensor], h: float) -> None:
        """Record sizes of elements and of leaves: |z| with what v adds in a step (near) and in PERIOD steps (far)."""
        self.h = h
        for i, leaf in enumerate(self.leaves):
            if not z[i].numel():
                continue
            point, move = z[i].detach().abs(), h * v[i].detach().abs()
            near, far = torch.maximum(point, move), torch.maximum(point, PERIOD * move)
            self.seen[i] = [*self.seen[i][1 - PERIOD :], (near, far.amax().item())]
            own = torch.stack([x for x, _ in self.seen[i]]).amax(0)
            self.coarse[i] = own
            if self.has_one[i]:
                spare = BITS[WORDS[leaf.dtype]] - MANTISSA[leaf.dtype]
                largest, farthest = own.amax().item(), max(x for _, x in self.seen[i])
                shared = (own * 2.0 ** bits_lacking(point.shape)).clamp(max=largest * 2.0**-spare)
                self.coarse[i] = torch.maximum(own, shared * (farthest / largest if largest else 1.0))

    def in_point(self, z: Sequence[Tensor]) -> list[Tensor]:
        return [self._shaken(i, x, self.coarse[i]) if self.leaves else x for i, x in enumerate(z)]

    def in_slope(self, v: Sequence[Tensor], u: Sequence[Tensor] = ()) -> list[Tensor]:
        """Add noise to v. u: the slope at which v was reflected, if it was."""
        if not self.leaves:
            return list(v)
        sizes = [torch.as_tensor(x / (PERIOD * self.h)) for x in self.coarse]
        sizes = [torch.maximum(x, 2 * y.detach().abs()) for x, y in zip(sizes, u, strict=True)] if u else [0.0] * len(v)
        return [self._shaken(i, x, size) for i, (x, size) in enumerate(zip(v, sizes, strict=True))]

    def _random(self, shape: Sequence[int]) -> Tensor:
        """Draw from 1 to 2, with a random sign: less would often be rounded away, and equal numbers would cancel."""
        size, sign = (torch.rand(shape, generator=self.rng, dtype=torch.float64) for _ in range(2))
        return (1 + size) * torch.where(sign < 0.5, -1.0, 1.0)

    def _shaken(self, i: int, x: Tensor, size: Tensor | float) -> Tensor:
        eps = torch.finfo(self.leaves[i].dtype).eps
        forward, back = (self._random(x.shape) for _ in range(2))
        forward = torch.ones_like(forward) if self.is_constant else forward
        x = x + eps * forward * torch.maximum(x.detach().abs(), torch.as_tensor(size, dtype=x.dtype))
        if x.requires_grad:
            x.register_hook(lambda g: g + eps * back * g.abs())
        return x


# Judging.


def judge(spec: Spec) -> Outcome:
    """Return the verdict on one problem."""
    problem, exact = Problem(spec), tm.MALI(exact=True)
    try:
        found, got = problem.solve(exact, patience=2)
    except tm.SolverError as error:
        return _refused(problem, error)
    except Exception as error:
        return Outcome("failed", f"crash: {type(error).__name__}", traceback.format_exc()[-600:])
    if got.stats.reconstruction_error != 0:
        return Outcome("failed", "not rebuilt", f"reconstruction_error = {got.stats.reconstruction_error}")
    stored, _ = problem.solve(replace(exact, checkpoint_every=1), patience=2)
    pairs = zip(found.names, found.tensors, stored.tensors, strict=True)
    differ = [name for (name, _), x, y in pairs if not _same(x, y)]
    if differ:
        return Outcome("failed", "bits", f"{', '.join(differ)} differ from those of the stored trajectory")
    if spec.bits_only:
        return Outcome("agrees", "in its bits")
    return _followed(problem, found, got.code)


def _same(x: Tensor, y: Tensor) -> bool:
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def _refused(problem: Problem, error: tm.SolverError) -> Outcome:
    name = type(error).__name__
    try:
        problem.solve(tm.ACA())
    except tm.SolverError as other:
        return Outcome("refused", "by floats, too", f"{name}; {type(other).__name__} by floats")
    return Outcome("failed", f"refused alone: {name}", str(error))


def _followed(problem: Problem, found: Solved, code: tm.Code) -> Outcome:
    """Judge whether each element is followed as floats do."""
    truth, plain = (problem.replay(code.events, wide) for wide in (True, False))
    errors = [(x.double() - y).abs() for x, y in zip(plain.tensors, truth.tensors, strict=True)]
    allowed = [_floor(problem, i, e, y) for (_, i), e, y in zip(truth.names, errors, truth.tensors, strict=True)]
    worst = _worst(found, truth, allowed)
    if worst[0] <= FACTOR:
        return Outcome("agrees")
    has_one = _has_one(code)
    ratio, j, at = worst
    for seed in range(N_PATTERNS):
        noise = Noise(problem.leaves, has_one, seed, is_constant=seed == 1)
        moved = problem.replay(code.events, True, noise)
        for j, (x, y) in enumerate(zip(moved.tensors, truth.tensors, strict=True)):
            effect = (x - y).abs().nan_to_num(math.inf, math.inf, math.inf)
            allowed[j] = torch.maximum(allowed[j], effect / (FACTOR if noise.is_constant else 1.0))
        ratio, j, at = _worst(found, truth, allowed)
        if ratio <= FACTOR:
            return Outcome("agrees")
    name, i = found.names[j]
    x, y, z, unit = (t.flatten()[at].item() for t in (found.tensors[j], truth.tensors[j], plain.tensors[j], allowed[j]))
    element = at % max(1, problem.leaves[i].start.numel())
    kind = KINDS[int(problem.leaves[i].kinds.flatten()[element])]
    exponents = "one exponent at first" if has_one[i] else "exponents of elements"
    text = f"{name}, element {element} ({kind}, {exponents}): {x:.9g}, "
    text += f"truth {y:.9g}, plain floats {z:.9g}; {abs(x - y):.3g} off, {ratio:.1f} times the round-off of {unit:.3g}"
    return Outcome("failed", f"inaccurate {name.split('[')[0]}", text)


def _has_one(code: tm.Code) -> list[bool]:
    """Whether each leaf began with one exponent: it has one at the end, or a rescale gave it more."""
    fresh = {leaf for event in code.events if isinstance(event, Rescale) for leaf, _ in event.change.fresh}
    return [k is not None or i in fresh for i, k in enumerate(code.end.form.exponents[: code.end.form.n])]


def _floor(problem: Problem, i: int, error: Tensor, truth: Tensor) -> Tensor:
    """Return the error of plain floats, or an ulp if it is larger; infinite where floats leave their range."""
    dtype = problem.leaves[i].dtype
    floor = torch.maximum(error, torch.finfo(dtype).eps * truth.abs()) + SMALLEST[dtype]
    is_fine = torch.isfinite(error) & (truth.abs() < LARGEST[dtype])
    return torch.where(is_fine, floor, math.inf)


def _worst(found: Solved, truth: Solved, allowed: Sequence[Tensor]) -> tuple[float, int, int]:
    """Return the largest ratio of an error to the allowed error, with its tensor and place."""
    worst = 0.0, 0, 0
    for j, (x, y, unit) in enumerate(zip(found.tensors, truth.tensors, allowed, strict=True)):
        if not x.numel():
            continue
        off = (x.double() - y).abs().nan_to_num(math.inf, math.inf, math.inf)
        ratio = torch.where(unit < math.inf, off / unit, 0.0).flatten()
        at = int(ratio.argmax())
        worst = max(worst, (ratio[at].item(), j, at))
    return worst


# Shrinking, and the command.


def simpler(spec: Spec) -> Iterator[Spec]:
    """Yield problems that differ from this one in one feature, towards the simplest."""
    for i in range(len(spec.leaves) if len(spec.leaves) > 1 else 0):
        yield replace(spec, leaves=(*spec.leaves[:i], *spec.leaves[i + 1 :]))
    for solver in ("ALF()", "ALF(refresh='never')", "ALF(refresh=1)"):
        if spec.solver not in ("ALF()", "ALF(refresh='never')", "ALF(refresh=1)"):
            yield replace(spec, solver=solver)
    if len(spec.times) > 2:
        yield replace(spec, times=(spec.times[0], spec.times[-1]))
    if spec.times != (0.0, 1.0) and len(spec.times) == 2 and (h := _step(spec.controller)):
        yield replace(spec, times=(0.0, 1.0), controller=f"FixedStep({h / spec.span!r})")
    h, rate = _step(spec.controller), max(leaf.rate for leaf in spec.leaves)
    for n in (2, 10, 50):
        if (h is None or n < 0.9 * spec.span / h) and rate <= n:
            yield replace(spec, controller=f"FixedStep({spec.span / n!r})")
    for i, leaf in enumerate(spec.leaves):
        for other in _simpler_leaves(leaf):
            yield replace(spec, leaves=(*spec.leaves[:i], other, *spec.leaves[i + 1 :]))


def _simpler_leaves(leaf: Leaf) -> Iterator[Leaf]:
    for x in fields(leaf):
        if x.name not in ("shape", "kinds", "spread", "dtype") and getattr(leaf, x.name) != x.default:
            yield replace(leaf, **{x.name: x.default})
    yield from (replace(leaf, spread=x) for x in (1.0, 3.0, 6.0) if x < leaf.spread)
    yield from (replace(leaf, kinds=(kind,)) for kind in leaf.kinds if len(leaf.kinds) > 1)
    yield from (replace(leaf, shape=x) for x in SHAPES if 0 < math.prod(x) < math.prod(leaf.shape))


def shrink(spec: Spec, outcome: Outcome) -> tuple[Spec, Outcome]:
    return shrunk(spec, outcome, judged=judge, candidates=simpler)


FUZZER = runner.Fuzzer("python -m tests.fuzz scales", "from tests.fuzz.scales import *", draw, judge, shrink)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog=FUZZER.command, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runner.add_options(parser)
    raise SystemExit(runner.main(parser.parse_args(words), FUZZER))
