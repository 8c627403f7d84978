"""Problem inside an ODEBlock, CNF, NeuralCDE or ODE-RNN: the arguments that the forward pass gives to `solve`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchmali._torch import tree_leaves, tree_map
from torchmali.auditing.problem import Problem
from torchmali.auditing.rows import Method
from torchmali.controllers import AdaptiveStep, StepController
from torchmali.errors import InvalidOptionError, InvalidStateError, InvalidTimesError
from torchmali.nn.base import SolveModule
from torchmali.nn.block import ODEBlock
from torchmali.nn.cde import NeuralCDE, _nothing, _slope, _with_knots
from torchmali.nn.cnf import CNF, _per_sample
from torchmali.nn.control import check_increasing
from torchmali.nn.rnn import ODERNN, ODERNNCell
from torchmali.solvers.leapfrog import ALF
from torchmali.spans import is_of_samples

Loss = Callable[[Any], Tensor]


def problem_of(func: Any, y0: Any, t: Any, loss: Loss | None, args: tuple, params: Any) -> Problem:
    """Return the problem of `solve(func, y0, t, args=args, params=params)`, or of `func(y0, *args)` for a module.

    Draws the noise of a CNF.
    """
    module = own_solver(func)
    if is_of_samples(t) or getattr(module, "spans", "common") != "common":
        raise InvalidTimesError(
            "An audit compares methods at times that all samples share, t of shape (times,): audit the function in it "
            "with such times, as in audit(func, y0, [t0, t1])."
        )
    if module is None:
        if t is None:
            raise InvalidTimesError(_no_times(func))
        return Problem(func, y0, t, loss or _sum_of_squares, args, params)
    kind = type(module).__name__
    got = type(args).__name__
    if not isinstance(args, tuple):
        raise InvalidOptionError(f"args must be a tuple of further arguments of the {kind}; got a {got}.")
    if params is not None:
        raise InvalidOptionError(
            f"params is for functions: those of the {kind} are found in it. Leave params out, or audit its func."
        )
    build = next(build for base, build in BUILDERS.items() if isinstance(module, base))
    return build(module, y0, t, loss, args)


def own_solver(func: Any) -> SolveModule | None:
    """Return the module whose solver, controller and gradient func uses, or None."""
    func = func.cell if isinstance(func, ODERNN) else func
    return func if isinstance(func, tuple(BUILDERS)) else None


def own_method(module: SolveModule) -> Method:
    return Method(module.solver, module.controller, module.gradient)


def _sum_of_squares(y: Any) -> Tensor:
    return torch.stack([leaf[-1].square().sum() for leaf in tree_leaves(y)]).sum()


def _no_times(func: Any) -> str:
    known = "ODEBlock or CNF, which know their times, or NeuralCDE, whose coefficients do"
    what = f"t is missing: func is a {type(func).__name__}, and no {known}. Give audit(func, y0, t)."
    inner = [m for m in func.modules() if own_solver(m)] if isinstance(func, nn.Module) else []
    kind = type(inner[0]).__name__ if inner else ""
    return f"{what} It contains a {kind}: audit that, with what comes after it as loss." if inner else what


def _of_block(block: ODEBlock, y0: Any, t: Any, loss: Loss | None, args: tuple) -> Problem:
    _require_no_times(block, t)

    def of_output(y: Any) -> Tensor:
        assert loss is not None
        return loss(y if block.all_outputs else tree_map(lambda leaf: leaf[-1], y))

    options = {"buffers": block.buffers_policy}
    return Problem(block.func, y0, block.t, of_output if loss else _sum_of_squares, args, options=options)


def _of_cnf(cnf: CNF, x: Any, t: Any, loss: Loss | None, args: tuple) -> Problem:
    _require_no_times(cnf, t)
    if not isinstance(x, Tensor):
        raise InvalidStateError(f"a CNF needs a tensor x of shape (batch, ...) as y0; got a {type(x).__name__}.")
    x, noise = cnf._checked(x, None)
    n_regularisers = cnf.kinetic + cnf.jacobian
    free = (math.inf,) * n_regularisers

    def adapted(controller: StepController) -> StepController:
        # The regularisers do not influence the step size. A tuple of tolerances already has one for each leaf.
        if not isinstance(controller, AdaptiveStep) or not free or isinstance(controller.rtol, tuple):
            return controller
        rtol, atol = controller.rtol, controller.atol
        return replace(controller, rtol=(rtol, rtol, *free), atol=(atol, atol, *free))

    def of_density(y: Any) -> Tensor:
        z, log_det = y[0][-1], y[1][-1]
        d = math.prod(z.shape[1:])
        log_prob = log_det - 0.5 * _per_sample(z.square()) - 0.5 * d * math.log(2 * math.pi)
        return -log_prob.mean() if loss is None else loss(log_prob)

    y0 = (x, *(x.new_zeros(len(x)) for _ in range(1 + n_regularisers)))
    options = {"buffers": cnf.buffers_policy}
    return Problem(cnf._slope(), y0, cnf.t, of_density, (noise, args), None, options, adapted, n_starts=1)


def _of_cde(cde: NeuralCDE, coeffs: Any, t: Any, loss: Loss | None, args: tuple) -> Problem:
    what = f"a NeuralCDE needs a tensor of coefficients as y0; got a {type(coeffs).__name__}."
    if not isinstance(coeffs, Tensor):
        raise InvalidStateError(f"{what} Make them with natural_cubic_coeffs(x).")
    if len(args) > 2:
        raise InvalidOptionError(
            f"a NeuralCDE takes args=(), (knots,) or (knots, z0), with None for those that it has not; got {len(args)}."
        )
    knots, z0 = (*args, None, None)[:2]
    path = cde.control(coeffs, knots)
    if knots is not None:
        check_increasing(knots)
        t = torch.stack((knots[0], knots[-1])) if t is None else t
    t = (0.0, len(path.knots) - 1.0) if t is None else t
    z0 = cde._start(path, t[0], z0).detach()
    options: dict[str, Any] = {"buffers": cde.buffers_policy}
    wanted = list(range(len(t)))
    if cde.control.jumps:
        t, wanted = _with_knots(t, path.knots)
        if not cde.all_outputs:  # as in its forward pass: z at the knots is not kept
            options["observe"] = _nothing
        if cde.crosses_knots:
            options["jumps"] = path.knots.tolist()

    def of_output(y: Tensor) -> Tensor:
        assert loss is not None
        return loss(y[wanted] if cde.all_outputs else y[-1])

    slope = partial(_slope, cde.func, cde.control)
    problem = Problem(slope, z0, t, of_output if loss else _sum_of_squares, (coeffs, path.knots), options=options)
    # Dopri8 evaluates f at the start of a step, where dX/dt is still that of the piece before; ALF does not.
    return problem._replace(adapted=_landing, accurate=ALF(order=6)) if cde.control.jumps else problem


def _landing(controller: StepController) -> StepController:
    return replace(controller, land=True) if isinstance(controller, AdaptiveStep) else controller


def _of_cell(cell: ODERNNCell, h: Any, t: Any, loss: Loss | None, args: tuple) -> Problem:
    what = "an ODE-RNN solves from one observation to the next: give audit(rnn, h, (t0, t1)) for one such time."
    if t is None:
        raise InvalidTimesError(f"t is missing: {what}")
    if args:
        raise InvalidOptionError(f"an ODE-RNN's func takes t and h alone; got {len(args)} args.")

    def of_output(y: Tensor) -> Tensor:
        assert loss is not None
        return loss(y[-1])

    options = {"buffers": cell.buffers_policy}
    return Problem(cell.func, h, t, of_output if loss else _sum_of_squares, options=options)


def _require_no_times(module: ODEBlock | CNF, t: Any) -> None:
    kind = type(module).__name__
    if t is not None:
        raise InvalidTimesError(
            f"t was given, but the {kind} has times of its own: leave t out, or give audit(module.func, y0, t)."
        )


BUILDERS: dict[type[SolveModule], Callable[..., Problem]] = {
    ODEBlock: _of_block,
    CNF: _of_cnf,
    NeuralCDE: _of_cde,
    ODERNNCell: _of_cell,
}
