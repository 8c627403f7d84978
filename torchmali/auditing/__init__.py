"""Every gradient method on the user's own problem, in one table with one sentence of advice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import torchmali.errors as errors
from torchmali._torch import tree_leaves
from torchmali.auditing.advise import YOURS, Audit
from torchmali.auditing.budget import Budget, OutOfTime, Progress
from torchmali.auditing.measure import Bench
from torchmali.auditing.modules import own_method, own_solver, problem_of
from torchmali.auditing.problem import left_as_it_was
from torchmali.auditing.reference import Reference, make_reference
from torchmali.auditing.rows import METHODS, Method, Row
from torchmali.auditing.show import HEADS
from torchmali.controllers import AdaptiveStep, StepController
from torchmali.errors import InvalidOptionError, SolverWarning
from torchmali.gradients.base import GradientMethod
from torchmali.solvers.base import Solver

__all__ = ["HEADS", "METHODS", "Audit", "Method", "Row", "audit"]

FOR_REFERENCE = 0.4  # share of the time that the reference may take


def audit(
    func: Callable,
    y0: Any,
    t: Tensor | Sequence[float] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    methods: Mapping[str, tuple] | Iterable[str] | None = None,
    rtol: Any = None,
    atol: Any = None,
    args: tuple = (),
    params: Iterable[Tensor] | None = None,
    max_seconds: float | None = 60.0,
    progress: Callable[[str], None] | bool | None = None,
) -> Audit:
    """Differentiate this problem with every method and compare their errors, memory, work and time.

    func, y0, t, args and params are those of `solve`. loss: maps the solution's y (time first) to a scalar; None: the
    sum of squares of the last output. methods: names of those in METHODS, or a dict of triples (solver, controller,
    gradient), as in {**METHODS, "mine": (ALF(), FixedStep(0.1), MALI())}. rtol, atol: tolerances of methods without a
    controller; gradients with an error above rtol are not accurate enough. None: 1e-3 and 1e-4.

    func may also be a module that solves an ODE. Its own solver, controller and gradient are then the row "yours", its
    tolerances the default of rtol and atol, and loss is a function of what it returns:
    - ODEBlock: y0 and args are those of its call.
    - CNF: y0 is x. loss is a function of log_prob, by default minus its mean. The trace's noise is drawn once.
    - NeuralCDE: y0 is its coefficients; args may be (knots,) or (knots, z0), and t the output times.
    - ODERNN or ODERNNCell: y0 is h, and t the times of two observations.

    max_seconds: time for the whole audit; None: no limit. Methods that could not be measured in this time are listed as
    such. progress: True: show on stderr what is being measured; None: do so if stderr is a terminal; or a function that
    gets each message.

    The gradients are those of y0, of the tensors in args that require one, and of the parameters. Modules, their
    buffers and the random number generators are left as they were.
    """
    budget = Budget(max_seconds)
    tell = Progress(progress, budget)
    chosen = _chosen(methods, func)
    controller = _controller(func, rtol, atol)
    tolerance = _loosest(controller.rtol) or _loosest(controller.atol)
    params = params if params is None or isinstance(params, Tensor) else list(params)
    generators = torch.random.fork_rng(range(torch.cuda.device_count()))
    with left_as_it_was((func, loss, args)), generators, torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", SolverWarning)
        problem = problem_of(func, y0, t, loss, args, params)
        try:
            tell("first solve")
            n_steps = problem._replace(deadline=budget.deadline(FOR_REFERENCE)).probe(controller)
            problem = problem.with_leaves()
            limited = problem._replace(deadline=budget.deadline(FOR_REFERENCE))
            reference = make_reference(limited, tolerance, n_steps, tell)
            # A method that takes a hundred times as many steps as Dopri5 is stopped.
            limits = AdaptiveStep(controller.rtol, controller.atol, max_steps=min(10_000, 1000 + 100 * n_steps))
            bench = Bench(problem, limits, budget, tell)
            rows = bench.rows(chosen, reference.gradients)
            rows = bench.timed(rows, tolerance, reference.uncertainty)
        except OutOfTime:  # in the first solve
            why = f"one solve takes more than its share of {budget}"
            reference = Reference(None, f"none ({why})", is_cut_short=True)
            rows = [Row(name, method, unmeasured=why) for name, method in chosen.items()]
        finally:
            tell.clear()
    eps = max(torch.finfo(z.dtype).eps for z in tree_leaves(problem.y0))
    return Audit(rows, tolerance, *reference[1:], budget.seconds, eps)


def _chosen(methods: Mapping[str, tuple] | Iterable[str] | None, func: Any) -> dict[str, Method]:
    if not isinstance(methods, Mapping):
        methods = METHODS if methods is None else methods
        names = [methods] if isinstance(methods, str) else list(methods)
        unknown = [name for name in names if name not in METHODS]
        own = 'Or give a dict of your own, as in methods={"mine": (ALF(), FixedStep(0.1), MALI())}.'
        if unknown:
            raise errors.UnknownMethodError(f"Unknown methods {unknown}. Known: {list(METHODS)}. {own}")
        methods = {name: METHODS[name] for name in names}
    if not methods:
        raise InvalidOptionError(f"methods is empty. Known: {list(METHODS)}.")
    module = own_solver(func)
    if module is not None:
        if YOURS in methods:
            raise InvalidOptionError(
                f"methods has a {YOURS!r}, but that is the name of what the module itself uses: choose another one."
            )
        methods = {YOURS: own_method(module), **methods}
    for name, method in methods.items():
        kinds = Solver, (StepController, type(None)), GradientMethod
        is_triple = isinstance(method, tuple) and len(method) == 3 and all(map(isinstance, method, kinds))
        if not is_triple:
            raise InvalidOptionError(
                f"methods[{name!r}] must be a triple (solver, controller or None, gradient); got {method!r}."
            )
        method[2].check(method[0], method[1] or AdaptiveStep())
    return {name: Method._make(method) for name, method in methods.items()}


def _controller(func: Any, rtol: Any, atol: Any) -> AdaptiveStep:
    """A controller with the tolerances asked for: those given, else the module's, else AdaptiveStep's."""
    own = getattr(own_solver(func), "controller", None)
    default = own if isinstance(own, AdaptiveStep) else AdaptiveStep()
    return AdaptiveStep(default.rtol if rtol is None else rtol, default.atol if atol is None else atol)


def _loosest(tolerances: Any) -> float:
    return max((x for x in tree_leaves(tolerances) if math.isfinite(x)), default=0.0)
