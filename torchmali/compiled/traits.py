"""Which solves can be compiled, as far as that shows before f is evaluated."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from torchmali._torch import CAN_COMPILE, changes_in_training, hooks_of_module, is_compiled, is_wrapped
from torchmali.controllers import FixedStep
from torchmali.gradients.base import Problem
from torchmali.solvers.leapfrog import Leapfrog


def obstacle(problem: Problem) -> str | None:
    """Why this solve cannot be compiled, in words; None: nothing is in the way."""
    if not CAN_COMPILE:
        return f"torch {torch.__version__} lacks what it takes (2.10 is the oldest that has it)"
    return next((text for find in (_of_call, _of_solver, _of_place, _of_modules) for text in find(problem)), None)


def _of_call(problem: Problem) -> Iterator[str]:
    outputs, controller = problem.outputs, problem.controller
    if not controller.adaptive and type(controller) is not FixedStep:
        yield f"{type(controller).__name__} is neither FixedStep nor an adaptive controller"
    if not outputs.skips_steps:
        yield "event= and dense= look at every step"
    if problem.t is not None:
        yield "t requires a gradient"
    if problem.wants_code:
        yield "return_code=True needs integers"
    if problem.field.jumps is not None:
        yield "jumps= are given"


def _of_solver(problem: Problem) -> Iterator[str]:
    solver = problem.solver
    if not isinstance(solver, Leapfrog) or solver.eta != 1:
        yield f"{solver} is not an undamped leapfrog such as ALF()"


def _of_place(problem: Problem) -> Iterator[str]:
    if problem.field.device.type != "cpu" or any([z.device.type != "cpu" for z in problem.z0]):
        yield "loops are compiled for the CPU alone"
    if problem.field.environment.is_cast:
        yield "autocast is on, and a compiled loop would round otherwise"
    if torch.is_inference_mode_enabled():
        yield "inference mode is on (use torch.no_grad())"
    if any(map(is_wrapped, problem.z0)):
        yield "it is inside of a transform of torch.func"
    if problem.field.environment.source.outer is not None:
        yield "it is inside of the f of another solve"


def _of_modules(problem: Problem) -> Iterator[str]:
    field = problem.field
    if is_compiled(field.func):
        yield "f is compiled by torch.compile itself (give what it was made from)"
    for module in field.environment.modules:
        name = type(module).__name__
        if is_compiled(module):
            yield "f holds a module that is compiled by torch.compile (give what it was made from)"
        if hooks_of_module(module):
            yield f"{name} has hooks, which would be called once"
        if module.training and (change := changes_in_training(module)):
            yield f"{name} {change} in training mode"
