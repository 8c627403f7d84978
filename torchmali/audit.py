"""Every gradient method on the user's own problem, in one table with one sentence of advice."""

from __future__ import annotations

import contextlib
import html
import math
import re
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

import torchmali.solution as solution
from torchmali.controllers import AdaptiveStep, StepController
from torchmali.field import Field, find_parameters_and_modules
from torchmali.gradients.aca import ACA
from torchmali.gradients.adjoint import Adjoint
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI, TELL_LIMIT
from torchmali.gradients.naive import Naive
from torchmali.measure import peak_bytes
from torchmali.odeint import solve
from torchmali.solution import SolverWarning, Stats, require, short_repr
from torchmali.solvers.base import ReversibleSolver, Solver
from torchmali.solvers.leapfrog import ALF
from torchmali.solvers.runge_kutta import Dopri5, Dopri8
from torchmali.state import Structure

SMALL = 10e6  # bytes: a peak that fits anywhere
ENOUGH = 10  # a gradient error of so many times rtol, or of so many times the best one, is good enough,
AT_MOST = 0.1  # up to this
NOTABLE = 3  # a factor between two errors, or a number of renewals, that is worth a word
HEADS = ["method", "solver + gradient", "error", "peak", "f fwd", "f bwd", "time", "rebuilt", "renewed"]
DIFFICULTIES = (solution.NonFinite, solution.StepLimit, solution.StepUnderflow)  # of a problem, not of a call


class Method(NamedTuple):
    """A way to a gradient. controller=None: AdaptiveStep with the rtol and atol of the audit."""

    solver: Solver
    controller: StepController | None
    gradient: GradientMethod

    def __str__(self) -> str:
        return " + ".join(short_repr(x).removesuffix("()") for x in (self.solver, self.gradient))


METHODS: dict[str, Method] = {
    "naive": Method(Dopri5(), None, Naive()),
    "aca": Method(Dopri5(), None, ACA()),
    "adjoint": Method(Dopri5(), None, Adjoint()),
    "seminorm": Method(Dopri5(), None, Adjoint(seminorm=True)),
    "mali": Method(ALF(), None, MALI()),
    "mali4": Method(ALF(order=4), None, MALI()),
    "mali6": Method(ALF(order=6), None, MALI()),
    "exact": Method(ALF(), None, MALI(exact=True)),
}


class Row(NamedTuple):
    """What a method did. One that failed has infinite numbers and a reason."""

    name: str
    method: Method
    error: float = math.inf  # |g - reference| / |reference|, 2-norm over all gradients; nan: there is no reference
    peak_bytes: float = math.inf  # of live tensors, forward + backward
    seconds: float = math.inf  # forward + backward, once
    stats: Stats = Stats()
    notes: tuple[str, ...] = ()  # its warnings
    failure: str = ""

    def lines(self) -> list[list[str]]:
        """Its cells (or why it failed), and its notes."""
        stats, has_v = self.stats, isinstance(self.method.solver, ReversibleSolver)
        drift = "-" if stats.reconstruction_error is None else _brief(stats.reconstruction_error)
        work = [str(stats.n_evals_forward), str(stats.n_evals_backward), _duration(self.seconds)]
        found = [_brief(self.error), _size(self.peak_bytes), *work, drift, str(stats.n_refreshes) if has_v else "-"]
        cells = [f"failed: {_short(self.failure)}"] if self.failure else found
        return [[self.name, str(self.method), *cells], *(["", f"^ {_short(note)}"] for note in self.notes)]


@dataclass(frozen=True, repr=False)
class Audit:
    """A table to print, to show in a notebook or to read: `rows`, `best`, `advice`, audit["mali"].error."""

    rows: list[Row]
    rtol: float
    reference: str  # what the gradients were held against,
    uncertainty: float  # and its own relative error; infinite: there is none

    def __getitem__(self, name: str) -> Row:
        return {row.name: row for row in self.rows}[name]

    @property
    def limit(self) -> float:
        """The gradient error that is good enough."""
        return min(AT_MOST, ENOUGH * max(self.rtol, min(row.error for row in self.rows)))

    @property
    def good(self) -> list[Row]:
        """The rows that are accurate enough, as far as the reference can tell."""
        return [row for row in self.rows if row.error <= self.limit and self.uncertainty <= self.limit]

    @property
    def best(self) -> Row | None:
        """The fastest good row that takes little memory, or at most twice that of the leanest."""
        budget = max(SMALL, 2 * min((row.peak_bytes for row in self.good), default=0.0))
        return min((row for row in self.good if row.peak_bytes <= budget), key=lambda row: row.seconds, default=None)

    @property
    def advice(self) -> str:
        """One sentence that follows from the rows."""
        return "; ".join([self._choice(), *self._remarks()]) + "."

    def _choice(self) -> str:
        best, none = self.best, "No method can be advised"
        if math.isinf(self.uncertainty):
            return f"{none}: there is no reference gradient"
        if not self.uncertainty <= self.limit:
            only = f"the reference itself is only good to {_brief(self.uncertainty)}"
            return f"{none}: gradients of this problem depend on the solver's rounding, {only}"
        if best is None:
            closest = min(self.rows, key=lambda row: row.error)
            found = f"{closest.name} is closest with error {_brief(closest.error)}; tighten rtol and atol"
            return f"{none}: {'all failed' if closest.failure else found}"
        fastest = min(self.good, key=lambda row: row.seconds)
        leanest, largest = (find(self.good, key=lambda row: row.peak_bytes) for find in (min, max))
        why = "the fastest that is accurate enough" if best is fastest else "accurate enough, fast and lean"
        choice = f"Use {best.name} ({best.method}), {why}: error {_brief(best.error)}, {_size(best.peak_bytes)}"
        if best.peak_bytes > 2 * leanest.peak_bytes:
            less = f"{leanest.name} takes {_size(leanest.peak_bytes)} at error {_brief(leanest.error)}"
            return f"{choice}, which fits anywhere; should it grow, {less}"
        memory, duration = largest.peak_bytes / best.peak_bytes, largest.seconds / best.seconds
        more = f"; {largest.name} takes {memory:.1f} times the memory and {duration:.1f} times the time"
        return choice + (more if memory > 2 and largest.peak_bytes > SMALL else "")

    def _remarks(self) -> Iterator[str]:
        """What the rows tell about the problem."""
        known = [row for row in self.good if row.error > self.uncertainty]
        exact = {row.method.solver: row for row in known if isinstance(row.method.gradient, (ACA, Naive))}
        for row in self.rows:
            other = exact.get(row.method.solver) if isinstance(row.method.gradient, Adjoint) else None
            if other and max(self.rtol, NOTABLE * other.error) < row.error < math.inf:
                yield f"{row.name} is {row.error / other.error:.0f} times less accurate than {other.name}"
        renewed = max(self.rows, key=lambda row: row.stats.n_refreshes)
        if renewed.stats.n_refreshes >= NOTABLE:
            yield f"f contracts, {renewed.name} renewed v {renewed.stats.n_refreshes} times"
        drifted = max(self.rows, key=lambda row: row.stats.reconstruction_error or 0.0)
        drift, again = drifted.stats.reconstruction_error or 0.0, drifted.stats.n_reruns
        if drift > TELL_LIMIT or again:
            more = f" and solved {again} of its segments again" if again else ""
            bits = [row.name for row in self.good if getattr(row.method.gradient, "exact", False)]
            remedy = f", where {bits[0]} rebuilds every bit" if bits else ""
            yield f"round-off grew, {drifted.name} rebuilt its states to {_brief(drift)} only{more}{remedy}"

    @property
    def caption(self) -> str:
        return (
            f"error: relative, 2-norm over all gradients; up to {_brief(self.limit)} is good enough here. reference: "
            f"{self.reference}. peak: bytes of live tensors. f fwd, f bwd: evaluations of f. rebuilt: relative error "
            "of the states that MALI rebuilt. renewed: how often v <- f."
        )

    def _lines(self) -> list[list[str]]:
        return [HEADS, *(cells for row in self.rows for cells in row.lines())]

    def __str__(self) -> str:
        lines, n = self._lines(), len(HEADS)
        widths = [max(len(cells[i]) for cells in lines if i < len(cells) - (len(cells) < n)) for i in range(n)]
        sides = {n: "<<" + ">" * n}  # numbers to the right, reasons and notes to the left
        columns = [zip(cells, sides.get(len(cells), "<<<"), widths, strict=False) for cells in lines]
        head, *table = ("  ".join(f"{x:{side}{w}}" for x, side, w in cells).rstrip() for cells in columns)
        caption, advice = (textwrap.wrap(text, len(head)) for text in (self.caption, self.advice))
        return "\n".join([head, "-" * len(head), *table, "", *caption, "", *advice])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table = ""
        for cells in self._lines():
            *first, last = (html.escape(cell) for cell in cells)
            rest = f'<td colspan="{len(HEADS) - len(first)}" style="text-align:left">'  # a reason or a note
            end = "<td>" if len(cells) == len(HEADS) else rest
            table += f"<tr>{''.join(f'<td>{cell}</td>' for cell in first)}{end}{last}</td></tr>"
        return f"<table>{table}</table><p>{html.escape(self.advice)}</p><p>{html.escape(self.caption)}</p>"


def audit(
    func: Callable,
    y0: Any,
    t: Tensor | Sequence[float],
    loss: Callable[[Any], Tensor] | None = None,
    *,
    methods: Mapping[str, tuple] | Iterable[str] | None = None,
    rtol: Any = 1e-3,
    atol: Any = 1e-4,
    args: tuple = (),
    params: Iterable[Tensor] | None = None,
) -> Audit:
    """Differentiate this problem with every method and compare their errors, memory, work and time.

    func, y0, t, args and params are those of `solve`. loss: from the solution's y (time first) to a scalar; None: the
    sum of squares of the last output. methods: names of those in METHODS, or a dict of triples (solver, controller,
    gradient), as in {**METHODS, "mine": (ALF(), FixedStep(0.1), MALI())}.

    The gradients are those of y0, of the tensors in args that require one, and of the parameters. Modules, their
    buffers and the random number generators are left as they were.
    """
    chosen = _chosen(methods)
    params = params if params is None or isinstance(params, Tensor) else list(params)
    problem = Problem(func, y0, t, loss or _sum_of_squares, args, params)
    generators = torch.random.fork_rng(range(torch.cuda.device_count()))
    with _left_as_it_was((func, loss, args)), generators, torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", SolverWarning)
        n_steps = problem.probe(AdaptiveStep(rtol, atol))
        problem, loosest = problem.with_leaves(), max((x for x in tree_leaves(rtol) if math.isfinite(x)), default=0.0)
        exact, reference, uncertainty = _reference(problem, loosest, max_steps=300 + 30 * n_steps)
        # What takes a hundred times as many steps as Dopri5 does is not waited for.
        controller = AdaptiveStep(rtol, atol, max_steps=min(10_000, 1000 + 100 * n_steps))
        rows = [_measure(name, method, controller, problem, exact) for name, method in chosen.items()]
    return Audit(rows, loosest, reference, uncertainty)


def _chosen(methods: Mapping[str, tuple] | Iterable[str] | None) -> dict[str, Method]:
    if not isinstance(methods, Mapping):
        names = [methods] if isinstance(methods, str) else list(METHODS if methods is None else methods)
        unknown = [name for name in names if name not in METHODS]
        own = 'Or give a dict of your own, as in methods={"mine": (ALF(), FixedStep(0.1), MALI())}.'
        require(not unknown, f"Unknown methods {unknown}. Known: {list(METHODS)}. {own}", solution.UnknownMethod)
        methods = {name: METHODS[name] for name in names}
    require(len(methods) > 0, f"methods is empty. Known: {list(METHODS)}.")
    for name, method in methods.items():
        kinds = Solver, (StepController, type(None)), GradientMethod
        fits = isinstance(method, tuple) and len(method) == 3 and all(map(isinstance, method, kinds))
        require(fits, f"methods[{name!r}] must be a triple (solver, controller or None, gradient); got {method!r}.")
        method[2].check(method[0], method[1] or AdaptiveStep())
    return {name: Method._make(method) for name, method in methods.items()}


def _sum_of_squares(y: Any) -> Tensor:
    return torch.stack([leaf[-1].square().sum() for leaf in tree_leaves(y)]).sum()


class Problem(NamedTuple):
    """A call of `audit`."""

    func: Callable
    y0: Any
    t: Any
    loss: Callable[[Any], Tensor]
    args: tuple
    params: Any

    def solve(self, solver: Solver, controller: StepController, gradient: GradientMethod) -> solution.Solution:
        how = {"solver": solver, "controller": controller, "gradient": gradient}
        return solve(self.func, self.y0, self.t, **how, args=self.args, params=self.params)

    def probe(self, controller: StepController) -> int:
        """A first solve, where wrong input raises what it raises in `solve`: its number of steps."""
        try:
            y, stats = self.solve(Dopri5(), controller, Adjoint())[1:3]
        except DIFFICULTIES:  # for each method to tell
            return 0
        loss = self.loss(y)
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        fits = isinstance(loss, Tensor) and loss.numel() == 1
        require(fits, f"loss must make a tensor of one element from the solution's y (time first); it made {got}.")
        return stats.n_steps

    def with_leaves(self) -> Problem:
        """What gets a gradient is a leaf of its own, or a parameter."""
        structure = Structure.of(self.y0)
        field = Field(self.func, structure.flatten(self.y0), structure, self.args, self.params)
        t = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, self.t)
        u, again = (field(float(t[0]), structure.flatten(self.y0)) for _ in range(2))
        same = all(torch.allclose(a, b, rtol=1e-3, equal_nan=True) for a, b in zip(u, again, strict=True))
        what = "f gives two answers to the same t and y (dropout or noise in f?): try it in eval mode."
        require(same and not field.surroundings.draws, what, solution.NonRepeatableField)
        y0 = tree_map(lambda z: z.detach().clone().requires_grad_(), self.y0)
        return self._replace(y0=y0, t=t, args=tree_map(_leaf, self.args), params=field.theta[len(field.slots) :])

    def in_double(self) -> Problem:
        double = InDouble()
        params = [double.twin(p).requires_grad_() for p in self.params]
        y0, args = (tree_map(lambda x: _leaf(x, torch.float64), tree) for tree in (self.y0, self.args))
        return Problem(double.around(self.func), y0, self.t, double.around(self.loss), args, params)

    def gradients(self, *method: Any) -> tuple[Sequence, Stats]:
        """By one solve and its backward pass."""
        torch.manual_seed(torch.initial_seed())  # a loss with noise should be the same every time
        y, stats = self.solve(*method)[1:3]
        leaves = [x for x in tree_leaves((self.y0, self.args)) if isinstance(x, Tensor) and x.requires_grad]
        return torch.autograd.grad(self.loss(y), [*leaves, *self.params], allow_unused=True), stats


def _leaf(x: Any, dtype: torch.dtype | None = None) -> Any:
    """A floating-point tensor cut off from its history, and cast."""
    is_real = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().to(dtype or x.dtype).requires_grad_(x.requires_grad) if is_real else x


class InDouble(TorchFunctionMode):
    """Wherever f holds a float32 tensor, its operations meet a float64 twin: f in float64, without a copy of f."""

    def __init__(self):
        super().__init__()
        self.twins: dict[int, tuple[Tensor, Tensor]] = {}  # holds the float32 ones, too: a freed one's id comes back

    def twin(self, x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype == torch.float32:
            if id(x) not in self.twins:
                self.twins[id(x)] = x, x.detach().double()
            return self.twins[id(x)][1]
        if type(x) in (tuple, list):
            return type(x)(self.twin(part) for part in x)
        return torch.float64 if x is torch.float32 else x

    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = Tensor.double if func is Tensor.float else func
        result = func(*self.twin(args), **{name: self.twin(x) for name, x in (kwargs or {}).items()})
        return result if isinstance(result, Tensor) and result.dtype == torch.float64 else tree_map(_widened, result)

    def around(self, func: Callable) -> Callable:
        def in_double(*args: Any) -> Any:
            with self:
                return func(*args)

        return in_double


def _widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.dtype == torch.float32 else x


def _reference(problem: Problem, rtol: float, max_steps: int) -> tuple[Sequence | None, str, float]:
    """Dopri8 and ACA, tighter and tighter while max_steps will do; in y0's own dtype where f knows no float64."""
    finest, why = max(1e-13, min(1e-10, 1e-4 * rtol)), ""
    own = min((z.dtype for z in tree_leaves(problem.y0)), key=lambda dtype: dtype.itemsize)
    rungs = [finest * 10**k for k in (6, 4, 2, 0)]
    for in_double, tolerances in ((True, [*rungs, 1e-13]), (False, [3e-3, 3e-4, 3e-5])):
        found: list[Sequence] = []
        try:
            # In float64 the warning of a tensor without a gradient would say that f got round its twin.
            warnings.simplefilter("error" if in_double else "ignore", SolverWarning)
            case = problem.in_double() if in_double else problem
            for tol in tolerances:
                found.append(case.gradients(Dopri8(), AdaptiveStep(tol, 0.01 * tol, max_steps=max_steps), ACA())[0])
                if len(found) == len(rungs) and _relative(*found[-2:]) < 1e-3:
                    break  # the last rung is for those that need it
        except DIFFICULTIES as error:
            why = str(error)
        except Exception as error:  # f may say anything to numbers that it was not made for
            why, found = str(error) or type(error).__name__, []
        if len(found) > 1:
            uncertainty, tol = _relative(*found[-2:]), tolerances[len(found) - 1]
            dtype = "float64" if in_double else str(own).removeprefix("torch.")
            return (
                found[-1],
                f"{dtype}, Dopri8 + ACA at rtol {tol:.0e}, itself good to {_brief(uncertainty)}",
                uncertainty,
            )
    return None, f"none ({_short(why)})", math.inf


def _relative(grads: Sequence, exact: Sequence) -> float:
    """|grads - exact| / |exact|"""
    a, b = ([torch.zeros(()) if g is None else g.cpu().double() for g in gs] for gs in (grads, exact))
    differences = [x - y for x, y in zip(a, b, strict=True)]
    distance, size = (math.hypot(*(x.norm().item() for x in xs)) for xs in (differences, b))
    return distance / (size or 1.0)


def _measure(name: str, method: Method, controller: StepController, problem: Problem, exact: Sequence | None) -> Row:
    how = method.solver, method.controller or controller, method.gradient
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SolverWarning)
        try:
            peak = peak_bytes(lambda: problem.gradients(*how))
            start = time.perf_counter()
            grads, stats = problem.gradients(*how)
            grads[0].sum().item()  # waits for a device
            seconds = time.perf_counter() - start
        except solution.InvalidOption:
            raise
        except (solution.SolverError, RuntimeError) as error:  # to run out of memory is a RuntimeError
            return Row(name, method, failure=str(error))
    notes = tuple(dict.fromkeys(str(w.message) for w in caught if issubclass(w.category, SolverWarning)))
    return Row(name, method, math.nan if exact is None else _relative(grads, exact), peak, seconds, stats, notes)


@contextlib.contextmanager
def _left_as_it_was(root: Any) -> Iterator[None]:
    """Attributes and buffers of the modules in root are afterwards what they were before."""
    _, modules = find_parameters_and_modules(root)
    kept = [(m, dict(vars(m)), dict(m._buffers)) for m in modules if isinstance(m._buffers, dict)]  # else a script's
    values = [(b, b.detach().clone()) for m in modules for b in m.buffers(recurse=False)]
    try:
        yield
    finally:
        for m, attributes, buffers in kept:
            vars(m).clear()
            vars(m).update(attributes)
            m._buffers.update(buffers)
        for b, value in values:
            if not torch.equal(b, value):
                b.detach().copy_(value)


def _short(message: str) -> str:
    """What it says before it explains, without what is in brackets at the end."""
    return re.sub(r" \([^()]*\)$", "", re.split(r"[.:;] |\n", message)[0].rstrip("."))


def _brief(x: float) -> str:
    return f"{x:.1e}" if x else "0"


def _size(n: float) -> str:
    factor, unit = (1e9, "GB") if n >= 1e9 else (1e6, "MB") if n >= 1e6 else (1e3, "kB")
    return f"{n / factor:.1f} {unit}" if n >= 1e3 else f"{n:.0f} B"


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
