"""Verdict on a gradient method on a random problem: `judge(spec)` solves it in several ways and compares.

The truth is plain autograd (Naive) through the same accepted steps, and for fixed steps of the simple solvers a few
lines of torch that know nothing of the library (plain.py). A difference counts when it exceeds

    floor |g_i| + 1000 eps |g|          of the gradient g_i of one tensor, with |g| of all together,
    + FACTOR x the effect of one ulp in y0, or in what the first step adds to it, on g_i,

the largest over some random patterns of signs: what the problem's own conditioning explains. MALI(exact=...) has the
resolution of its integer grid instead of the ulp, and must equal its own stored trajectory (checkpoint_every=1) to the
bit. A warning excuses a difference, unless it says that the gradient is right. An error that torchmali raises on
purpose is an answer, if it says what to do and plain autograd fails, too, or the message names a limit of the method.
"""

from __future__ import annotations

import contextlib
import math
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

import torchmali as tm

from . import plain
from .cases import NAMES, Problem, Spec
from .fields import DRAWING, KEEPING

FLOORS = {torch.float64: 1e-9, torch.float32: 1e-5}
FACTOR = 30.0
N_PATTERNS = 4
LOOSE = 1e-3  # Adjoint: the tolerance of its solves, and what they amplify
COARSE = 0.2  # f in bfloat16
REMEDIES = (
    "use",
    "give",
    "loosen",
    "look",
    "draw",
    "pass",
    "smaller",
    "raise",
    "keep",
    "call",
    "sort",
    "needs",
    "count",
)
ABOUT_INPUTS = ("t goes from", "rtol =")  # warnings that say nothing of the gradient
SHARED = {"NonFiniteError", "StepLimitError", "StepUnderflowError"}  # errors of a problem, not of a method


@dataclass
class Outcome:
    """Outcome of a case. verdict: "agrees", "warned", "refused" or "failed". kind: to count by. detail: to read."""

    verdict: str
    kind: str = ""
    detail: str = ""
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.verdict}: {self.kind}" if self.kind else self.verdict


@dataclass
class Result:
    """Results and side effects of one solve and its backward pass."""

    grads: dict[str, Tensor | None]
    y: list[Tensor]  # outputs, and what was observed
    stats: tm.Stats
    told: list[str] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    generator: Tensor | None = None  # its state after the solve
    moves_generator: bool = False  # in the backward pass
    changed: list[str] = field(default_factory=list)  # inputs that are not what they were
    n_calls: tuple[int, int] = (0, 0)  # of f, in both passes

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.stats.n_steps, self.stats.n_rejected, self.stats.n_refreshes

    @property
    def tensors(self) -> dict[str, Tensor | None]:
        outputs: dict[str, Tensor | None] = {f"output {i}": y for i, y in enumerate(self.y)}
        return outputs | self.grads  # in this order: where the solution differs, so do gradients

    def size(self) -> float:
        """|g| of all gradients together."""
        return math.hypot(*(g.double().norm().item() for g in self.grads.values() if g is not None))


def run(spec: Spec, method: tm.GradientMethod, moved: list[Tensor] | None = None, is_known: bool = False) -> Result:
    """Solve the problem once, from the same random numbers each time, and differentiate its loss.

    is_known: solve it once before, so that f's behaviour may be remembered.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(spec.seed)
        problem = Problem(spec)
        if is_known and not problem.buffers:
            before = torch.get_rng_state()
            with _mode(spec):
                problem.solve(method)
            torch.set_rng_state(before)
            problem.func.n_calls = 0
        result = solved(problem, method, moved)
    result.told = [str(w.message) for w in caught if issubclass(w.category, tm.SolverWarning)]
    return result


def solved(problem: Problem, method: tm.GradientMethod, moved: list[Tensor] | None = None) -> Result:
    """Solve and differentiate, and record everything that should not change."""
    if moved is not None:
        problem.move(moved)
    inputs, buffers = problem.inputs, problem.buffers
    before = {name: (x.detach().clone(), x._version) for name, x in inputs.items()}
    with _mode(problem.spec):
        solution = problem.solve(method)
    n_forward, generator = problem.func.n_calls, torch.get_rng_state()
    kept = {name: b.detach().clone() for name, b in buffers.items()}
    loss = problem.loss(solution)
    wanted = {name: x for name, x in inputs.items() if x.requires_grad}
    grads: dict[str, Tensor | None] = dict.fromkeys(wanted)
    if loss.requires_grad and wanted:
        found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        grads = dict(zip(wanted, found, strict=True))
    changed = [
        name for name, x in inputs.items() if not _same(x.detach(), before[name][0]) or x._version != before[name][1]
    ]
    changed += [f"buffer {name} in backward" for name, b in problem.buffers.items() if not _same(b, kept[name])]
    outputs = [z.detach().clone() for z in pytree.tree_leaves((solution.y, solution.observed)) if isinstance(z, Tensor)]
    return Result(
        grads=grads,
        y=outputs,
        stats=solution.stats,
        buffers=kept,
        generator=generator,
        moves_generator=not torch.equal(generator, torch.get_rng_state()),
        changed=changed,
        n_calls=(n_forward, problem.func.n_calls - n_forward),
    )


@contextlib.contextmanager
def _mode(spec: Spec) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if spec.wants == "no_grad":
            stack.enter_context(torch.no_grad())
        if spec.wants == "inference":
            stack.enter_context(torch.inference_mode())
        if spec.autocast:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        yield


def _same(x: Tensor | None, y: Tensor | None) -> bool:
    """Whether two tensors are equal to the bit, nan included."""
    if x is None or y is None:
        return x is y
    return x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())


def judge(spec: Spec) -> Outcome:
    """Return the verdict on one problem."""
    try:
        found = run(spec, spec.method)
    except tm.SolverError as error:
        return _refused(spec, error)
    except Exception as error:
        return _crashed(error)
    try:
        truth = run(spec, tm.Naive())
    except tm.SolverError as error:
        return Outcome("failed", f"Naive alone refuses: {type(error).__name__}", str(error))
    except Exception as error:
        return _crashed(error, "Naive alone: ")
    try:
        problems = [*_side_effects(spec, found, truth), *_differences(spec, found, truth), *_others(spec, found, truth)]
    except Exception as error:
        return _crashed(error, "in a comparison: ")
    if problems:
        kinds, details = zip(*problems, strict=True)
        return Outcome("failed", kinds[0], "; ".join(f"{k}: {d}" for k, d in zip(kinds, details, strict=True)))
    if not all(g is None or bool(g.isfinite().all()) for g in found.grads.values()):
        return Outcome("agrees", "no gradient is finite")
    if excuses(found):
        return Outcome("warned", "drift, solved again" if found.stats.n_reruns else "drift")
    return Outcome("agrees", "on a grid of its own" if spec.is_exact and found.grid != truth.grid else "")


def _crashed(error: Exception, where: str = "") -> Outcome:
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {str(error)[:300]} (line {last.lineno} of {last.filename.rsplit('/', 1)[-1]})"
    return Outcome("failed", f"{where}crash: {type(error).__name__}", text)


def _refused(spec: Spec, error: tm.SolverError) -> Outcome:
    """Judge an error of torchmali: it is an answer, if it says what to do and is not the method's own fault."""
    name, text = type(error).__name__, str(error)
    if len(text) < 40 or not any(word in text.lower() for word in REMEDIES):
        return Outcome("failed", f"obscure message: {name}", text)
    if name not in SHARED and name != "NonRepeatableFieldError":
        return Outcome("refused", name, text)
    try:
        truth = run(spec, tm.Naive())
    except tm.SolverError as other:
        both = type(other).__name__
        return Outcome("refused", f"{name} by all" if both == name else f"{name}, {both} by Naive", text)
    except Exception as other:
        return _crashed(other, "Naive alone: ")
    is_huge = any(not bool(y.isfinite().all()) or y.abs().max() > 1e8 * spec.scale for y in truth.y if y.numel())
    if is_huge and name in SHARED:
        return Outcome("refused", f"{name} where y grows without bound", text)
    return Outcome("failed", f"refused alone: {name}", text)


def excuses(found: Result) -> list[str]:
    """Return the warnings about the gradient."""
    return [text for text in found.told if not text.startswith(ABOUT_INPUTS)]


def _side_effects(spec: Spec, found: Result, truth: Result) -> Iterator[tuple[str, str]]:
    """Compare everything that should be as under Naive, or unchanged."""
    if found.changed:
        yield "inputs changed", ", ".join(found.changed)
    if found.moves_generator:
        yield "generator moved by backward", "the default generator is not where the solve left it"
    assert found.generator is not None and truth.generator is not None
    if not torch.equal(found.generator, truth.generator):
        yield "generator", "the default generator is not where Naive leaves it"
    same_grid = found.grid == truth.grid
    if not same_grid and not spec.is_exact and not spec.is_loose:
        yield "grid", f"(steps, rejected, refreshes) = {found.grid}, Naive: {truth.grid}"
    # On integers the last bits of an error estimate, and so of h, differ.
    is_coarse = spec.dtype != "float64" or (spec.is_exact and spec.controller.startswith("Adaptive"))
    for name, b in found.buffers.items() if same_grid else ():
        other = truth.buffers[name]
        if not torch.allclose(b.double(), other.double(), 1e-3 if is_coarse else 1e-7, 1e-7 * spec.scale):
            yield "buffers", f"{name} = {b.flatten()[:3].tolist()}, after Naive {other.flatten()[:3].tolist()}"
    counted = found.stats.n_evals_forward, found.stats.n_evals_backward
    # Not counted: a flow is tried again where y needs no gradient; Adjoint asks f whether it is the same function.
    slack = 2 if spec.core == "flow" else 1 if spec.is_loose else 0
    if spec.gradient != "Naive()" and any(abs(a - b) > slack for a, b in zip(counted, found.n_calls, strict=True)):
        yield "counters", f"stats say {counted} evaluations, f was called {found.n_calls} times"
    wanted = spec.wants not in ("no_grad", "inference", "nothing")
    if not wanted and any(g is not None for g in found.grads.values()):
        yield "gradient unasked", "a result requires a gradient although none was asked for"


def _differences(spec: Spec, found: Result, truth: Result) -> Iterator[tuple[str, str]]:
    """Compare gradients and outputs with the truth."""
    worst = compared(spec, found, truth)
    if worst is None:
        return
    name, off, allowed, size = worst
    text = f"{name} is {off:.3g} off, allowed {allowed:.3g}, its size {size:.3g}"
    told = excuses(found)
    is_output = name.startswith("output")
    kind = "not finite" if not math.isfinite(off) else "solution" if is_output else "gradient"
    if not is_output and any("gradient is right" in x for x in told):
        yield "gradient said to be right", text
    elif is_output or not told:
        yield kind, text


def compared(
    spec: Spec, found: Result, truth: Result, factor: float = FACTOR
) -> tuple[str, float, float, float] | None:
    """Return the first tensor that differs by more than is allowed: name, difference, allowed difference, size.

    In a state that mixes scales (spec.spread) each element of y and dL/dy0 is compared alone.
    """
    if spec.is_exact and found.grid != truth.grid:
        return None  # other steps, chosen by the last bits
    parts = [part for pair in _pairs(found, truth) for part in _parts(spec, *pair)]
    bad = [(name, x, y, i) for name, x, y, i in parts if not _off(x, y) <= _floor(spec, truth, name, y, i)]
    if not bad:
        return None
    effects = conditioning(spec, truth)
    for name, x, y, i in bad:
        effect = effects.get(name, torch.zeros_like(y))  # none where the truth has no gradient at all
        effect = effect if i is None else effect.reshape(-1)[i]
        off, allowed = _off(x, y), _floor(spec, truth, name, y, i) + factor * effect.norm().item()
        both_infinite = not bool(y.isfinite().all())
        if not off <= allowed and not both_infinite:
            return name if i is None else f"{name}.flatten()[{i}]", off, allowed, y.norm().item()
    return None


def _parts(spec: Spec, name: str, x: Tensor, y: Tensor) -> Iterator[tuple[str, Tensor, Tensor, int | None]]:
    """Yield a pair of tensors as it is, or element by element."""
    if spec.spread == 1 or name not in ("output 0", "y0[0]") or x.shape != y.shape:
        yield name, x, y, None
        return
    for i, (a, b) in enumerate(zip(x.reshape(-1), y.reshape(-1), strict=True)):
        yield name, a, b, i


def _pairs(found: Result, truth: Result) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield tensors of the same name, as float64; a gradient that is None is zero."""
    for name, y in truth.tensors.items():
        x = found.tensors.get(name)
        if x is None and y is None:
            continue
        like = x if y is None else y
        assert like is not None
        x, y = ((torch.zeros_like(like) if z is None else z).double() for z in (x, y))
        yield name, x, y


def _off(x: Tensor, y: Tensor) -> float:
    off = (x - y).norm().item() if x.shape == y.shape else math.inf
    return math.inf if math.isnan(off) else off


def _floor(spec: Spec, truth: Result, name: str, y: Tensor, i: int | None) -> float:
    size = y.norm().item()
    whole = truth.size() if name in truth.grads and i is None else size
    whole = whole if math.isfinite(whole) else size  # another gradient is not finite: that one is judged by itself
    if spec.autocast or spec.is_loose:
        return (COARSE if spec.autocast else LOOSE) * max(size, whole, 1e-3)
    dtype = torch.float64 if spec.dtype == "float64" else torch.float32
    eps = torch.finfo(dtype).eps
    round_off = 1000 if dtype == torch.float64 else 30 * math.sqrt(truth.stats.n_steps)
    return FLOORS[dtype] * size + round_off * eps * whole


def conditioning(spec: Spec, truth: Result) -> dict[str, Tensor]:
    """The effect of one ulp in y0 on every element of every tensor, the largest over some patterns of signs.

    The ulp is that of the first step's increment where this is larger, since the increment is rounded, too. On an
    integer grid all elements of a leaf of one scale are rounded to the same spacing, z and v at every step.
    """
    rng = torch.Generator().manual_seed(spec.seed)
    leaves, added = Problem(spec).leaves, Problem(spec).first_move(truth.stats.h_max)
    same: dict[str, Tensor] = {}
    other: dict[str, Tensor] = {}
    for _ in range(N_PATTERNS):
        moves = []
        for z, move in zip(leaves, added, strict=True):
            eps = torch.finfo(z.dtype).eps
            size = torch.maximum(z.detach().abs(), move.nan_to_num(0.0, 0.0, 0.0))
            if spec.is_exact and z.numel():
                eps = eps * math.sqrt(1 + truth.stats.n_steps)
                size = size.amax() if spec.spread == 1 else size
            moves.append(eps * size * (2.0 * torch.randint(0, 2, z.shape, generator=rng) - 1))
        try:
            moved = run(spec, tm.Naive(), [d.to(z.dtype) for d, z in zip(moves, leaves, strict=True)])
        except tm.SolverError:  # one ulp decides whether there is a solution
            return {name: torch.full_like(y, math.inf) for name, _, y in _pairs(truth, truth)}
        effects = same if moved.grid == truth.grid else other  # another grid is another discretisation
        for name, x, y in _pairs(moved, truth):
            off = (x - y).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            effects[name] = torch.maximum(effects[name], off) if name in effects else off
    return same or other


def _others(spec: Spec, found: Result, truth: Result) -> Iterator[tuple[str, str]]:
    """Compare further solves of the same problem: repeated, stored, in threads, without the library."""
    again = run(spec, spec.method, is_known=True)
    # With a budget, graphs are kept in another way once f is known: the last bits of gradients depend on that.
    has_budget = "memory" in spec.gradient
    names = [name for name in found.tensors if not (has_budget and name in found.grads)]
    differs = [name for name in names if not _same(found.tensors[name], again.tensors[name])]
    if differs:
        yield "not repeatable", f"{', '.join(differs)} differ between two runs"
    wrong = compared(spec, again, truth) if has_budget and compared(spec, found, truth) is None else None
    if wrong is not None:
        yield "gradient of a known field", "{}: off by {:.3g}, allowed {:.3g}, size {:.3g}".format(*wrong)
    if spec.is_exact:
        stored = run(spec, replace(_exact(spec), checkpoint_every=1))
        differs = [name for name, x in found.tensors.items() if not _same(x, stored.tensors[name])]
        if differs:
            yield "bits", f"{', '.join(differs)} differ from those of the stored trajectory"
    if spec.threads > 1:
        yield from _in_threads(spec)
    yield from _without_the_library(spec, truth)


def _exact(spec: Spec) -> tm.MALI:
    method = spec.method
    assert isinstance(method, tm.MALI)
    return method


def _in_threads(spec: Spec) -> Iterator[tuple[str, str]]:
    """Compare several problems solved at once with each solved alone."""
    try:
        alone = [solved(Problem(spec, shift), spec.method) for shift in range(spec.threads)]
    except tm.SolverError:  # another problem, which this method may refuse
        return
    problems = [Problem(spec, shift) for shift in range(spec.threads)]  # here: their weights are drawn
    results: list[Any] = [None] * spec.threads

    def work(i: int) -> None:
        try:
            results[i] = solved(problems[i], spec.method)
        except Exception as error:
            results[i] = error

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=work, args=(i,)) for i in range(spec.threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i, (one, result) in enumerate(zip(alone, results, strict=True)):
        if isinstance(result, Exception):
            yield "threads", f"thread {i}: {type(result).__name__}: {str(result)[:200]}"
        elif not all(_same(x, result.tensors[name]) for name, x in one.tensors.items()):
            yield "threads", f"thread {i} has another result than alone"


def _without_the_library(spec: Spec, truth: Result) -> Iterator[tuple[str, str]]:
    """Compare Naive with a few lines of plain torch."""
    solver, controller = eval(spec.solver, NAMES), eval(spec.controller, NAMES)
    if not plain.knows(solver, controller, truth.stats.n_refreshes) or spec.observe != "none" or spec.autocast:
        return
    if spec.jumps or spec.wants in ("nothing", "no_grad", "inference") or spec.core in DRAWING | KEEPING:
        return
    problem = Problem(spec)
    y = plain.solve(problem.func, problem.y0, problem.t, solver, controller, problem.args)
    wanted = {name: x for name, x in problem.inputs.items() if x.requires_grad}
    loss = problem.loss(tm.Solution(torch.empty(0), y, tm.Stats()))
    if not loss.requires_grad:
        return
    found = torch.autograd.grad(loss, [*wanted.values()], allow_unused=True)
    outputs = [z.detach() for z in pytree.tree_leaves(y)]
    plainly = Result(dict(zip(wanted, found, strict=True)), outputs, truth.stats)
    worst = compared(replace(spec, gradient="Naive()"), truth, plainly)
    if worst is not None:
        yield "Naive differs from plain steps", f"{worst[0]} is {worst[1]:.3g} off, allowed {worst[2]:.3g}"
