"""Gradients, outputs and inputs, whatever the state is made of: random trees, dtypes, memory formats, frozen parts.

Each property is tested on 25 problems that are always the same, and by `make test-all` on 500 new ones. A failure
prints the Spec of the smallest problem that shows it, and `Case(Spec(...))` makes that problem again.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import torchmali as tm

REVERSIBLE = [tm.ALF(), tm.ALF(order=4), tm.ALF(eta=0.9), tm.ALF(refresh=2), tm.Reversible(tm.RK4())]
REPLAYS = [(solver, method) for solver in REVERSIBLE for method in (tm.MALI(), tm.MALI(checkpoint_every=2), tm.ACA())]
REPLAYS += [(solver, tm.ACA()) for solver in (tm.Euler(), tm.RK4(), tm.Bosh3(), tm.Dopri5())]
EXACT = [
    (solver, tm.MALI(exact=exact))
    for solver in REVERSIBLE
    if isinstance(solver, tm.Leapfrog) and solver.is_exact_on_integers
    for exact in (True, "int64")
]
ADAPTIVE = [tm.AdaptiveStep(rtol, rtol, h0) for rtol in (1e-2, 1e-3, 1e-4) for h0 in (None, 1.0)]
DTYPES = [(torch.float64,), (torch.float64,), (torch.float32,), (torch.float64, torch.float32)]
FORMATS = {
    "contiguous": [(), (3,), (2, 3), (0, 3)],
    "channels_last": [(2, 3, 2, 2), (1, 3, 2, 2), (0, 3, 2, 2)],
    "transposed": [(2, 3), (2, 3, 2, 2), (2, 0)],
    "strided": [(), (2, 3)],
    "expanded": [(3,), (2, 3), (2, 3, 2, 2)],
}
LAYOUTS = [(memory_format, shape) for memory_format, shapes in FORMATS.items() for shape in shapes]


def formatted(x: Tensor, memory_format: str) -> Tensor:
    """x in another memory format, where its shape has it. Expanded: the first row, seen many times."""
    if memory_format == "channels_last" and x.ndim == 4:
        return x.contiguous(memory_format=torch.channels_last)
    if memory_format == "transposed" and x.ndim > 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if memory_format == "strided":
        return torch.stack([x, x], dim=-1)[..., 0]
    if memory_format == "expanded" and x.ndim > 0:
        return x[:1].expand(x.shape)
    return x.contiguous()


def said_otherwise(tree: Any, answer: str) -> Any:
    """The same tree with lists for tuples, tuples for lists, or its dicts in another order."""
    if isinstance(tree, dict):
        keys = reversed(tree) if "reordered" in answer else tree
        return {key: said_otherwise(tree[key], answer) for key in keys}
    if isinstance(tree, (tuple, list)):
        kind = list if "lists" in answer else tuple if "tuples" in answer else type(tree)
        return kind(said_otherwise(x, answer) for x in tree)
    return tree


@dataclass(frozen=True)
class Leaf:
    layout: tuple[str, tuple[int, ...]]
    dtype: torch.dtype
    wants_gradient: bool

    def make(self, rng: torch.Generator) -> Tensor:
        x = 0.5 + torch.rand(self.layout[1], generator=rng, dtype=self.dtype)  # of one scale
        return formatted(x, self.layout[0]).requires_grad_(self.wants_gradient)


@dataclass(frozen=True)
class Spec:
    tree: Any  # of Leaf
    sevenths: frozenset[int]  # output times
    backwards: bool
    n_steps: int  # about
    times_want_gradient: bool
    arg_wants_gradient: bool
    frozen: frozenset[int]  # which parameters
    same_parameter: bool  # one for all leaves
    same_module: bool  # twice in f
    parameter_in_args: bool  # and in f
    n_seen: int  # leaves that the loss looks at
    answer: str
    slope_format: str
    seed: int


def specs(dtypes: tuple[torch.dtype, ...]) -> st.SearchStrategy[Spec]:
    def nested(tree, least=1):
        parts = st.lists(tree, min_size=least, max_size=3)
        return parts | parts.map(tuple) | st.dictionaries(st.sampled_from("abc"), tree, min_size=least)

    leaf = st.builds(Leaf, st.sampled_from(LAYOUTS), st.sampled_from(dtypes), st.booleans())
    return st.builds(  # with booleans for the other fields, as these are annotated
        Spec,
        tree=leaf | nested(st.recursive(leaf, nested, max_leaves=2), least=2),
        sevenths=st.frozensets(st.integers(-4, 4), min_size=2, max_size=4),
        n_steps=st.integers(2, 6),
        frozen=st.frozensets(st.integers(0, 7)),
        n_seen=st.integers(1, 4),
        answer=st.sampled_from(["as y", "lists", "tuples", "reordered", "lists, reordered"]),
        slope_format=st.sampled_from(list(FORMATS)),
        seed=st.integers(0, 1000),
    )


FLOAT64, ANY = specs((torch.float64,)), st.sampled_from(DTYPES).flatmap(specs)


class Field(nn.Module):
    """A smooth f that couples all leaves with each other, with t and with its further arguments."""

    def __init__(self, spec: Spec, dtype: torch.dtype, rng: torch.Generator):
        super().__init__()
        shapes = [()] if spec.same_parameter else [leaf.layout[1][-1:] for leaf in pytree.tree_leaves(spec.tree)]
        self.gains = nn.ParameterList(nn.Parameter(torch.empty(shape, dtype=dtype)) for shape in shapes)
        self.spec, self.mix = spec, nn.Linear(2, 2, dtype=dtype)
        self.mix_again = self.mix if spec.same_module else nn.Linear(2, 2, dtype=dtype)
        for i, p in enumerate(self.parameters()):
            nn.init.uniform_(p, -1.0, 1.0, generator=rng).requires_grad_(i not in spec.frozen)

    def forward(self, t: Tensor, y: Any, options: dict, weight: Tensor) -> Any:
        leaves, structure = pytree.tree_flatten(y)
        total = torch.stack([z.sum() for z in leaves]).sum()
        x = self.mix(torch.stack([total.tanh(), t]).to(weight)).tanh()
        shift, rate = self.mix_again(x) + options["factor"] * options["x"][0] * weight.sum()
        gains = itertools.cycle(self.gains)  # there may be one for all
        slopes = [(torch.tanh(next(gains) * z + shift) + rate * z).to(z.dtype) for z in leaves]
        answer = pytree.tree_unflatten([formatted(u, self.spec.slope_format) for u in slopes], structure)
        return said_otherwise(answer, self.spec.answer)


class Case:
    """The problem that a Spec describes."""

    def __init__(self, spec: Spec):
        rng, leaves = torch.Generator().manual_seed(spec.seed), pytree.tree_leaves(spec.tree)
        self.dtype = min((leaf.dtype for leaf in leaves), key=lambda dtype: dtype.itemsize)  # the coarsest of the state
        self.spec, self.func = spec, Field(spec, self.dtype, rng)
        self.y0 = pytree.tree_map(lambda leaf: leaf.make(rng), spec.tree)
        times = [k / 7 for k in sorted(spec.sevenths, reverse=spec.backwards)]
        self.t = torch.tensor(times, dtype=self.dtype, requires_grad=spec.times_want_gradient)
        self.steps = tm.FixedStep(abs(times[-1] - times[0]) / spec.n_steps)
        x = torch.tensor(0.7, dtype=self.dtype, requires_grad=spec.arg_wants_gradient)
        weight = self.func.gains[0] if spec.parameter_in_args else torch.ones(2, dtype=self.dtype)
        self.args = {"x": [x], "factor": 0.5}, weight
        self.tensors = [*pytree.tree_leaves(self.y0), self.t, x, weight, *self.func.parameters()]

    def solve(self, solver: tm.Solver, method: tm.GradientMethod, controller: tm.StepController) -> tm.Solution:
        f, y0, t, args = self.func, self.y0, self.t, self.args
        return tm.solve(f, y0, t, solver=solver, controller=controller, gradient=method, args=args)

    def gradients(self, solution: tm.Solution) -> list[Tensor | None]:
        """dL/dx of all tensors of the problem, for a loss that looks at every output time."""
        for x in self.tensors:
            x.grad = None
        leaves = pytree.tree_leaves(solution.y)[: self.spec.n_seen]
        loss = torch.stack([((k + 1.5) * z).sin().sum() for leaf in leaves for k, z in enumerate(leaf)]).sum()
        if loss.requires_grad:
            loss.backward()
        return [x.grad for x in self.tensors]

    def assert_close(self, found: list, exact: list, tolerance: float) -> None:
        """Relative to the norm, or to 1 where that is smaller. No gradient where none is wanted, and None is zero."""
        for x, g, wanted in zip(self.tensors, found, exact, strict=True):
            assert x.requires_grad or g is None
            g, wanted = (torch.zeros_like(x) if y is None else y for y in (g, wanted))
            assert (g.shape, g.dtype) == (x.shape, x.dtype)
            assert (g - wanted).norm() <= tolerance * max(1.0, wanted.norm())


def holds_for(**strategies: st.SearchStrategy) -> Callable:
    """Makes a property two tests: with 25 examples that are always the same, and a slow one with 500 new ones."""

    def both(check: Callable) -> Callable:
        def test(n: int) -> None:
            how = settings(max_examples=n, derandomize=n == 25, deadline=None, database=None, print_blob=True)
            how(given(**strategies)(check))()

        return pytest.mark.parametrize("n", [25, pytest.param(500, marks=pytest.mark.slow)])(test)

    return both


@holds_for(spec=ANY, replay=st.sampled_from(REPLAYS))
def test_replayed_gradients_are_those_of_plain_autograd(spec, replay):
    case, (solver, method) = Case(spec), replay
    found, exact = (case.gradients(case.solve(solver, g, case.steps)) for g in (method, tm.Naive()))
    case.assert_close(found, exact, 1e-12 if case.dtype == torch.float64 else 1e-4)


@holds_for(spec=ANY, replay=st.sampled_from(EXACT))
def test_gradients_of_exact_mode_are_those_of_plain_autograd(spec, replay):
    case, (solver, method) = Case(spec), replay
    found, exact = (case.gradients(case.solve(solver, g, case.steps)) for g in (method, tm.Naive()))
    case.assert_close(found, exact, 1e-9 if case.dtype == torch.float64 else 1e-4)


@holds_for(spec=ANY, replay=st.sampled_from([*REPLAYS, *EXACT]))
def test_outputs_have_the_structure_dtypes_shapes_and_memory_formats_of_y0(spec, replay):
    case, (solver, method) = Case(spec), replay
    y, plain = (case.solve(solver, g, case.steps).y for g in (method, tm.Naive()))
    assert pytree.tree_structure(y) == pytree.tree_structure(plain) == pytree.tree_structure(case.y0)
    for leaf, z, exact in zip(*map(pytree.tree_leaves, (case.y0, y, plain)), strict=True):
        assert (z.shape, z.dtype) == (exact.shape, exact.dtype) == ((len(case.t), *leaf.shape), leaf.dtype)
        assert torch.equal(z[0], leaf)
        assert (z - exact).norm() <= (1e-12 if case.dtype == torch.float64 else 1e-5) * max(1.0, exact.norm())
        assert all(x.stride() == leaf.clone().stride() for x in z)  # a clone is dense, in the leaf's order


@holds_for(spec=ANY, replay=st.sampled_from([*REPLAYS, *EXACT, (tm.ALF(), tm.Naive()), (tm.RK4(), tm.Naive())]))
def test_a_solve_leaves_its_inputs_alone_and_can_be_repeated_to_the_bit(spec, replay):
    case, (solver, method), runs = Case(spec), replay, []
    before = [(x.detach().clone(), x._version) for x in case.tensors]
    for _ in range(2):
        solution = case.solve(solver, method, case.steps)
        runs.append([*pytree.tree_leaves(solution.y), *case.gradients(solution)])
        for x, (value, version) in zip(case.tensors, before, strict=True):
            assert torch.equal(x, value) and x._version == version
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(*runs, strict=True))


@holds_for(spec=FLOAT64, order=st.sampled_from([2, 4]), controller=st.sampled_from(ADAPTIVE))
def test_mali_and_aca_agree_on_adaptive_steps(spec, order, controller):
    case = Case(spec)
    mali, aca = (case.gradients(case.solve(tm.ALF(order), g, controller)) for g in (tm.MALI(), tm.ACA()))
    case.assert_close(mali, aca, 1e-11)


@holds_for(spec=ANY, factors=st.lists(st.sampled_from([0.25, 8.0, math.inf]), min_size=3))
def test_a_tree_of_tolerances_controls_each_leaf_by_its_own(spec, factors):
    # Powers of two scale the error without rounding, so a norm that does the same takes the very same steps.
    case, structure = Case(spec), pytree.tree_structure(spec.tree)
    factors = list(itertools.islice(itertools.cycle([1.0, *factors]), structure.num_leaves))

    def norm(error):
        return tm.rms_norm(tuple(x / c for x, c in zip(error, factors, strict=True) if c < math.inf))

    tree = pytree.tree_unflatten([1e-3 * c for c in factors], structure)
    controllers = tm.AdaptiveStep(tree, tree), tm.AdaptiveStep(1e-3, 1e-3, norm=norm)
    solution, same = (case.solve(tm.ALF(refresh="never"), tm.MALI(), controller) for controller in controllers)
    assert all(map(torch.equal, pytree.tree_leaves(solution.y), pytree.tree_leaves(same.y)))
    assert solution.stats == same.stats
