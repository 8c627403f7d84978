"""Ways in which a field can be written or used that once gave a wrong number, a crash or needless work."""

import math
import warnings
import weakref
from typing import Any

import pytest
import torch
from problems import VAN_DER_POL
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchmali as tm
from torchmali.nn import CubicControl, LinearControl, NeuralCDE, ODEBlock, linear_coeffs, natural_cubic_coeffs

FIXED = tm.FixedStep(0.1)

T = (0.0, 0.5, 1.0)
EXACT = [(tm.ALF(), tm.MALI()), (tm.ALF(), tm.ACA()), (tm.RK4(), tm.ACA()), (tm.Dopri5(), tm.ACA())]
exact_methods = pytest.mark.parametrize(("solver", "gradient"), EXACT, ids=repr)


def double(*shape):
    return torch.linspace(-1, 1, math.prod(shape), dtype=torch.float64).reshape(shape)


def net(seed=0, n_in=3, n_out=3):
    torch.manual_seed(seed)
    return nn.Linear(n_in, n_out).double()


def end(func, y0, solver, gradient, **options: Any):
    return tm.solve(func, y0, T, solver=solver, controller=tm.FixedStep(0.2), gradient=gradient, **options).y


def assert_same(grads, exact):
    for g, e in zip(grads, exact, strict=True):
        assert (g - e).norm() <= 1e-12 * e.norm()


@exact_methods
def test_a_leaf_that_f_does_not_read_keeps_its_gradient(solver, gradient):
    """A log-density or a running integral: dL/dz of such a leaf passes the step unchanged."""
    lin, x0, log_p0 = net(), double(2, 3).requires_grad_(), double(2).requires_grad_()

    def func(t, y):
        return torch.tanh(lin(y[0])), (y[0] ** 2).sum(-1)

    def gradients(method):
        return torch.autograd.grad(end(func, (x0, log_p0), solver, method)[1][-1].sum(), [lin.weight, x0, log_p0])

    assert_same(gradients(gradient), gradients(tm.Naive()))


@exact_methods
def test_a_closure_over_a_tensor_and_what_it_was_made_from_counts_nothing_twice(solver, gradient):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.dynamics = net(0), net(1, 6)

        def forward(self, x, y0, method):
            context = self.encoder(x)
            return end(lambda t, y: torch.tanh(self.dynamics(torch.cat([y, context], -1))), y0, solver, method)

    model, y0 = Model(), double(2, 3)

    def gradients(method):
        return torch.autograd.grad((model(double(2, 3), y0, method)[-1] ** 2).sum(), list(model.parameters()))

    assert_same(gradients(gradient), gradients(tm.Naive()))


@exact_methods
def test_a_weight_made_from_a_parameter_in_the_same_closure_is_not_doubled(solver, gradient):
    lin, y0 = net(), double(2, 3)

    def gradients(method):
        skew = lin.weight - lin.weight.T

        def func(t, y):
            return torch.tanh(y @ skew) + 0 * lin.bias.detach()

        return torch.autograd.grad((end(func, y0, solver, method)[-1] ** 2).sum(), lin.weight)

    assert_same(gradients(gradient), gradients(tm.Naive()))


@exact_methods
def test_a_parameter_and_what_was_made_from_it_are_told_apart_through_args(solver, gradient):
    lin, y0 = net(), double(2, 3)

    def func(t, y, skew):
        return torch.tanh(y @ skew) + lin(y)

    def by_args(skew):
        return end(func, y0, solver, gradient, args=(skew,))

    def by_closure(skew, method=gradient):
        return end(lambda t, y: func(t, y, skew), y0, solver, method)

    def gradients(solution):
        return torch.autograd.grad((solution(lin.weight - lin.weight.T)[-1] ** 2).sum(), lin.weight)

    with pytest.raises(tm.InvalidFieldError, match=r"directly and through another.*args=\("):
        gradients(by_closure)
    assert_same(gradients(by_args), gradients(lambda skew: by_closure(skew, tm.Naive())))


@exact_methods
def test_results_that_f_keeps_for_itself_do_not_disturb_the_next_solve(solver, gradient):
    class Keeper:
        def __init__(self):
            self.lin, self.energy, self.log = net(), None, []

        def __call__(self, t, y):
            u = torch.tanh(self.lin(y))
            self.energy = (u**2).sum()
            return u

    func, y0 = Keeper(), double(2, 3)
    for _ in range(2):
        loss = (end(func, y0, solver, gradient)[-1] ** 2).sum()
        func.log.append(loss)
        (g,) = torch.autograd.grad(loss, func.lin.weight)
    (exact,) = torch.autograd.grad((end(func, y0, solver, tm.Naive())[-1] ** 2).sum(), func.lin.weight)
    assert_same([g], [exact])


@exact_methods
def test_a_parameter_that_is_passed_as_an_argument_too_gets_both_parts(solver, gradient):
    lin, y0 = net(), double(2, 3)

    def gradients(method):
        y = end(lambda t, y, w: torch.tanh(lin(y) @ w), y0, solver, method, args=(lin.weight,))
        return torch.autograd.grad((y[-1] ** 2).sum(), lin.weight)

    assert_same(gradients(gradient), gradients(tm.Naive()))


@exact_methods
def test_a_parameter_that_is_listed_twice_gets_its_gradient_once(solver, gradient):
    w, y0 = double(3, 3).requires_grad_(), double(2, 3)

    def gradients(method, **options):
        return torch.autograd.grad(
            (end(lambda t, y: torch.tanh(y @ w), y0, solver, method, **options)[-1] ** 2).sum(), w
        )

    assert_same(gradients(gradient, params=[w, w]), gradients(tm.Naive()))


@pytest.mark.parametrize("params", [double(3, 3).requires_grad_(), [("w", double(3, 3))]], ids=["tensor", "named"])
def test_params_must_be_a_list_of_tensors(params):
    with pytest.raises(tm.InvalidOptionError, match=r"params=\[w\]"):
        tm.solve(lambda t, y: -y, double(3), T, params=params)


@exact_methods
def test_hooks_on_a_parameter_see_its_whole_gradient_once(solver, gradient):
    lin, calls = net(), []
    lin.weight.register_hook(lambda g: calls.append(1) or 2 * g)
    (g,) = torch.autograd.grad(
        (end(lambda t, y: torch.tanh(lin(y)), double(2, 3), solver, gradient)[-1] ** 2).sum(), lin.weight
    )
    assert len(calls) == 1
    (doubled,) = torch.autograd.grad(
        (end(lambda t, y: torch.tanh(lin(y)), double(2, 3), solver, tm.Naive())[-1] ** 2).sum(), lin.weight
    )
    assert_same([g], [doubled])
    assert len(lin.weight._backward_hooks or ()) == 1


@pytest.mark.parametrize("gradient", [tm.MALI(), tm.ACA(), tm.Adjoint()], ids=repr)
def test_a_field_may_make_its_arguments_require_gradients(gradient):
    """As every continuous normalising flow does, to take the divergence of its own f."""
    lin = net()

    def func(t, y):
        with torch.enable_grad():
            y = y.requires_grad_()
            u = torch.tanh(lin(y))
            (divergence,) = torch.autograd.grad(u.sum(), y, create_graph=True)
        return u + 0.1 * divergence

    y0 = double(2, 3)
    loss = (tm.solve(func, y0.clone(), T, controller=tm.FixedStep(0.2), gradient=gradient).y[-1] ** 2).sum()
    (g,) = torch.autograd.grad(loss, lin.weight)
    loss = (tm.solve(func, y0.clone(), T, controller=tm.FixedStep(0.2), gradient=tm.Naive()).y[-1] ** 2).sum()
    (exact,) = torch.autograd.grad(loss, lin.weight)
    assert (g - exact).norm() < (1e-1 if isinstance(gradient, tm.Adjoint) else 1e-12) * exact.norm()
    lin.requires_grad_(False)
    assert not tm.solve(func, y0.clone(), T, controller=tm.FixedStep(0.2), gradient=gradient).y.requires_grad


def test_forward_mode_is_refused_rather_than_zero():
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jacfwd(lambda y0: tm.solve(lambda t, y: -y, y0, T, controller=tm.FixedStep(0.2)).y[-1])(double(3))


def test_parameters_in_defaults_and_in_comprehensions_are_found():
    lin, y0 = net(), double(2, 3)

    def with_default(t, y, lin=lin):
        return torch.tanh(lin(y))

    def gradients(func, method):
        return torch.autograd.grad((end(func, y0, tm.ALF(), method)[-1] ** 2).sum(), lin.weight)

    exact = gradients(with_default, tm.Naive())
    assert_same(gradients(with_default, tm.MALI()), exact)
    nets = {"only": lin}
    assert_same(gradients(lambda t, y: sum(torch.tanh(n(y)) for n in nets.values()), tm.MALI()), exact)


def test_parameters_of_a_data_parallel_replica_are_found():
    module = net()
    replica = nn.Linear(3, 3).double()  # what replicate() makes: no parameters, but tensors with a history
    replica._parameters.clear()
    vars(replica).update({name: p * 1.0 for name, p in module.named_parameters()}, _is_replica=True)

    def gradients(method):
        y = end(lambda t, y: torch.tanh(nn.functional.linear(y, replica.weight)), double(2, 3), tm.ALF(), method)
        return torch.autograd.grad((y[-1] ** 2).sum(), module.weight, retain_graph=True)

    assert_same(gradients(tm.MALI()), gradients(tm.Naive()))


# Steps.


@pytest.mark.parametrize("n", [11, 101, 1001])
def test_float32_output_times_leave_no_slivers(n):
    stats = tm.solve(lambda t, y: -y, double(2), torch.linspace(0, 1, n), controller=tm.FixedStep(1 / (n - 1))).stats
    assert stats.n_steps == n - 1


def test_a_step_size_of_none_is_no_step_size():
    t = torch.tensor([0.0, 1.0])
    y = tm.odeint(lambda t, y: -10 * y, torch.ones(1).double(), t, method="dopri5", options={"step_size": None})
    assert abs(y[-1].item() - math.exp(-10)) < 1e-6


def test_alfs_error_estimate_does_not_mind_a_field_that_returns_its_input():
    def n_steps(func):
        stats = tm.solve(func, torch.ones(2).double(), [0.0, 3.0], controller=tm.AdaptiveStep(1e-3, 1e-4)).stats
        return stats.n_steps, stats.n_rejected

    assert n_steps(lambda t, y: y) == n_steps(lambda t, y: y.clone())
    assert n_steps(lambda t, y: y.flip(0)[:]) == n_steps(lambda t, y: y.flip(0).clone())


@pytest.mark.parametrize("solver", [tm.ALF(), tm.Dopri5()], ids=repr)
def test_a_field_that_is_not_finite_at_the_start_is_given_up_soon(solver):
    calls = []

    def func(t, y):
        calls.append(1)
        return y * float("nan")

    with pytest.raises(tm.NonFiniteError):
        tm.solve(func, torch.ones(2).double(), [0.0, 1.0], solver=solver, gradient=tm.ACA())
    assert len(calls) < 200


@pytest.mark.parametrize(("start", "limit"), [(0.0, 300), (0.005, 1000)])
def test_an_infinity_where_the_first_step_rule_looks_does_not_make_steps_of_length_zero(start, limit):
    """With 0.005 the first steps are good ones: from a length near zero they would have to grow over 300 decades."""
    calls = []

    def func(t, y):
        calls.append(1)
        return torch.full_like(y, math.inf if start < t < 0.5 else 1.0)

    with pytest.raises(tm.NonFiniteError):
        tm.solve(func, torch.ones(1).double(), [0.0, 1.0], solver=tm.Dopri5(), gradient=tm.ACA())
    assert len(calls) < limit


def test_steps_move_the_time_even_when_it_is_large():
    t0 = 1.7e9  # seconds since 1970
    solution = tm.solve(lambda t, y: -y, torch.ones(1).double(), [t0, t0 + 1.0], controller=tm.AdaptiveStep(h0=1e-12))
    assert abs(solution.y[-1].item() - math.exp(-1)) < 1e-2


def test_steps_too_short_to_move_the_time_end_at_the_step_limit():
    t0 = 1.7e9
    with pytest.raises(tm.StepLimitError):
        tm.solve(lambda t, y: -y, torch.ones(1).double(), [t0, t0 + 1.0], controller=tm.AdaptiveStep(h_max=1e-12))


def test_many_output_times_do_not_use_up_the_step_limit():
    controller = tm.AdaptiveStep(1e-2, 1e-3, max_steps=50, land=True)
    solution = tm.solve(lambda t, y: -y, torch.ones(1).double(), torch.linspace(0, 1, 201), controller=controller)
    assert solution.stats.n_steps >= 200


def test_an_accepted_step_that_was_too_bold_makes_the_next_one_shorter():
    """(t + h) - t is often an ulp shorter than h, which does not make it a step that was cut short to land."""
    how: Any = {"solver": tm.HeunEuler(), "controller": tm.AdaptiveStep(1e-4, 1e-5), "gradient": tm.ACA()}
    stats = tm.solve(VAN_DER_POL.f, VAN_DER_POL.y0, [0.0, 10.0], **how).stats
    assert stats.n_rejected < 0.01 * stats.n_steps


def test_without_atol_a_component_that_stays_zero_is_no_error():
    y0 = torch.tensor([1.0, 0.0], dtype=torch.float64)
    solution = tm.solve(
        lambda t, y: -y, y0, [0.0, 1.0], solver=tm.Dopri5(), controller=tm.AdaptiveStep(1e-6, 0.0), gradient=tm.ACA()
    )
    assert abs(solution.y[-1, 0].item() - math.exp(-1)) < 1e-5


# torchdiffeq's ways.


def test_a_list_may_stand_for_a_tuple():
    y0 = (double(2), {"x": double(3), "rest": (double(1),)})

    def as_lists(t, y):
        return [-y[0], {"x": -y[1]["x"], "rest": [-y[1]["rest"][0]]}]

    def as_tuples(t, y):
        return -y[0], {"x": -y[1]["x"], "rest": (-y[1]["rest"][0],)}

    controller = tm.AdaptiveStep(rtol=[1e-3, {"x": 1e-3, "rest": [1e-3]}])
    lists, tuples = (tm.solve(f, y0, T, controller=controller).y for f in (as_lists, as_tuples))
    assert torch.equal(lists[0], tuples[0]) and torch.equal(lists[1]["rest"][0], tuples[1]["rest"][0])


def test_a_norm_in_options_sees_the_tensor_as_torchdiffeqs_does():
    seen = []

    def norm(x):
        seen.append(x.shape)
        return x.abs().max()

    tm.odeint(lambda t, y: -y, double(2, 3), torch.tensor([0.0, 1.0]), rtol=1e-4, atol=1e-5, options={"norm": norm})
    assert set(seen) == {(2, 3)}


def test_the_seminorm_leaves_parameters_out_when_a_leaf_is_uncontrolled():
    lin = net()

    def evaluations(scale):
        """Parameters on another scale: their error must not matter to the seminorm."""

        def func(t, y):
            return torch.tanh(lin(y[0])), scale * (lin.bias * y[0]).sum(-1)

        y0 = (double(2, 3).requires_grad_(), double(2))
        controller = tm.AdaptiveStep((1e-5, math.inf), (1e-6, math.inf))
        gradient = tm.Adjoint(seminorm=True)
        solution = tm.solve(func, y0, [0.0, 2.0], solver=tm.Dopri5(), controller=controller, gradient=gradient)
        (solution.y[0][-1].sum() + 0 * solution.y[1][-1].sum()).backward()
        return solution.stats.n_evals_backward

    assert evaluations(1.0) == evaluations(1e6)


@pytest.mark.parametrize("method", [tm.ACA(), tm.MALI(), tm.MALI(checkpoint_every=None), tm.Adjoint()], ids=repr)
def test_an_arg_without_a_gradient_is_watched_and_set_free_like_any_saved_tensor(method):
    def solved(x):
        y0 = torch.ones(3, dtype=torch.float64, requires_grad=True)
        return tm.solve(
            lambda t, y, x: -x * y, y0, (0.0, 1.0), controller=tm.FixedStep(0.1), gradient=method, args=(x,)
        )

    x = torch.ones(3, dtype=torch.float64)
    y = solved(x).y
    x.mul_(1.0005)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = solved(x).y
    y.sum().backward()
    alive = weakref.ref(x)
    del x
    assert alive() is None


EVERY = [*EXACT, (tm.Dopri5(), tm.Adjoint(controller=tm.FixedStep(0.1)))]
every_method = pytest.mark.parametrize(("solver", "gradient"), EVERY, ids=repr)


def assert_agrees(grads, exact, gradient):
    limit = 1e-5 if isinstance(gradient, tm.Adjoint) else 1e-12
    for g, e in zip(grads, exact, strict=True):
        assert (g - e).norm() <= limit * e.norm()


class Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.context = net(), 0.0

    def forward(self, t, y):
        return torch.tanh(self.linear(y) + self.context)


@every_method
def test_parameters_that_a_functional_call_lends_get_their_gradient(solver, gradient):
    def gradients(method):
        block = ODEBlock(Tanh(), solver=solver, controller=tm.FixedStep(0.1), gradient=method)
        lent = {name: (2 * p).detach().requires_grad_() for name, p in block.named_parameters()}
        y = torch.func.functional_call(block, {name: torch.sin(p) for name, p in lent.items()}, (double(2, 3),))
        before = [p.clone() for p in block.parameters()]
        grads = torch.autograd.grad((y**2).sum(), list(lent.values()))
        assert all(map(torch.equal, before, block.parameters()))
        return grads

    assert_agrees(gradients(gradient), gradients(tm.Naive()), gradient)


@every_method
@pytest.mark.parametrize("through", ["closure", "observe"])
def test_hooks_on_a_tensor_with_a_history_see_its_whole_gradient_once(solver, gradient, through):
    def gradients(method):
        w, calls = (0.5 * double(3, 3)).requires_grad_(), []
        h = torch.tanh(w)
        h.retain_grad()
        h.register_hook(lambda g: calls.append(1) or -0.5 * g)
        options: dict = {"solver": solver, "controller": tm.FixedStep(0.1), "gradient": method}
        if through == "closure":
            loss = (tm.solve(lambda t, y: torch.sin(y @ h), double(2, 3), T, **options).y[-1] ** 2).sum()
        else:
            options["observe"] = lambda t, y: ((y @ h) ** 2).sum()
            loss = tm.solve(lambda t, y: torch.sin(y), double(2, 3), T, **options).observed
        loss.backward()
        assert len(calls) == 1 or isinstance(method, tm.Naive)
        return w.grad, h.grad

    assert_agrees(gradients(gradient), gradients(tm.Naive()), gradient)


@exact_methods
def test_hooks_see_the_whole_gradient_inside_a_checkpoint(solver, gradient):
    def gradients(method):
        lin = net()
        lin.weight.register_hook(lambda g: -2 * g)

        def run(y):
            return end(lambda t, y: torch.tanh(lin(y)), y, solver, method)[-1]

        y: Any = checkpoint(run, double(2, 3).requires_grad_(), use_reentrant=False)
        return torch.autograd.grad((y**2).sum(), lin.weight)

    assert_same(gradients(gradient), gradients(tm.Naive()))


LATE: dict = {}


@every_method
def test_a_leaf_that_f_first_reads_late_is_told_of(solver, gradient):
    LATE["w"], lin = double(3, 3).requires_grad_(), net()
    y = end(lambda t, y: lin(y) + (y @ LATE["w"] if t > 0.5 else 0), double(2, 3), solver, gradient)
    with pytest.warns(UserWarning, match="requires a gradient but would"):
        (y[-1] ** 2).sum().backward()


@every_method
def test_a_leaf_that_f_first_reads_late_and_through_another_is_refused(solver, gradient):
    w = double(3, 3).requires_grad_()
    h = torch.tanh(w)
    y = end(lambda t, y: torch.sin(y @ w) if t > 0.5 else torch.cos(y @ h), double(2, 3), solver, gradient)
    with pytest.raises(tm.InvalidFieldError, match="directly and through another"):
        (y[-1] ** 2).sum().backward()


@every_method
@pytest.mark.parametrize("h", [0.2, 1.0])
def test_a_field_that_is_set_up_for_the_next_solve_is_not_the_one_of_the_last(solver, gradient, h):
    field, loss = Tanh(), 0.0
    for context in (0.0, 1.0):
        field.context = context
        options: dict = {"solver": solver, "controller": tm.FixedStep(h), "gradient": gradient}
        loss = loss + (tm.solve(field, double(2, 3), (0.0, 1.0), **options).y[-1] ** 2).sum()
    assert isinstance(loss, torch.Tensor)
    with pytest.raises(tm.NonRepeatableFieldError, match=r"through args=\(...\)"):
        loss.backward()


@pytest.mark.parametrize("solver", [tm.ALF(), tm.RK4(), tm.Dopri5()], ids=repr)
def test_a_field_that_overwrites_what_it_returned_is_refused(solver):
    w, buffer = double(3, 3), torch.empty(2, 3, dtype=torch.float64)
    with pytest.raises(tm.InvalidFieldError, match="return a new tensor"):
        tm.solve(
            lambda t, y: torch.mm(y, w, out=buffer), double(2, 3), T, solver=solver, controller=FIXED, gradient=tm.ACA()
        )


@exact_methods
def test_a_tensor_computed_from_parameters_outside_f_is_refused_with_advice(solver, gradient):
    field: Any = Tanh()
    field.context = torch.tanh(field.linear(double(2, 3)))
    y = end(field, double(2, 3), solver, gradient)
    with pytest.raises(tm.InvalidFieldError, match=r"args=\(...\)"):
        y.sum().backward()


@exact_methods
def test_a_lazy_module_must_have_its_shapes(solver, gradient):
    lazy = nn.LazyLinear(3, dtype=torch.float64)

    def func(t, y):
        return torch.tanh(lazy(y))

    with pytest.raises(tm.InvalidFieldError, match="lazy"):
        end(func, double(2, 3), solver, gradient)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Lazy modules")
        assert end(func, double(2, 3), solver, tm.Naive()).shape == (3, 2, 3)
    end(func, double(2, 3), solver, gradient).sum().backward()
    assert lazy.weight.grad is not None


def test_complex_parameters_and_sparse_gradients_are_for_the_adjoint():
    w = torch.tensor([-0.5 + 0.25j, 0.25 - 0.5j], dtype=torch.complex128, requires_grad=True)

    def spectral(method):
        options: dict = {"solver": tm.Dopri5(), "controller": tm.FixedStep(0.02), "gradient": method}
        y = tm.solve(lambda t, y: torch.fft.irfft(torch.fft.rfft(y) * w, 3), double(2, 3), T, **options).y
        return torch.autograd.grad((y[-1] ** 2).sum(), w)[0]

    difference = (spectral(tm.Adjoint()) - spectral(tm.Naive())).abs().max()
    assert difference < 1e-8 < spectral(tm.Naive()).abs().min()
    table = nn.Embedding(4, 3, sparse=True, dtype=torch.float64)

    def gradients(method):
        options: dict = {"solver": tm.Dopri5(), "controller": tm.FixedStep(0.1), "gradient": method}
        y = tm.solve(lambda t, y: torch.tanh(y + table(torch.tensor([0, 2]))), double(2, 3), T, **options).y
        return [g.to_dense() for g in torch.autograd.grad((y[-1] ** 2).sum(), table.weight)]

    assert_agrees(gradients(tm.Adjoint()), gradients(tm.Naive()), tm.Adjoint())


@pytest.mark.parametrize("t", [(0.0, 5.0, 3.0), (1.0, 0.0, 3.0)])
@pytest.mark.parametrize("control", [LinearControl, CubicControl])
def test_times_of_a_neural_cde_are_in_order(t, control):
    lin, x = net(0, 4, 12), double(2, 6, 3)
    coeffs = linear_coeffs(x) if control is LinearControl else natural_cubic_coeffs(x)
    model = NeuralCDE(lambda t, z: torch.tanh(lin(z)).unflatten(-1, (4, 3)), control=control)
    with pytest.raises(tm.InvalidTimesError, match="throughout"):
        model(coeffs, t=t, z0=double(2, 4))


def test_options_are_not_taken_for_those_of_another_adjoint_method():
    lin, y0, t = net(), double(2, 3), torch.tensor([0.0, 1.0])
    call: dict = {"method": "rk4", "options": {"step_size": 0.5}, "adjoint_method": "dopri5"}
    with pytest.raises(tm.InvalidOptionError, match="adjoint_options"):
        tm.odeint_adjoint(lambda t, y: lin(y), y0, t, **call)
    assert tm.odeint_adjoint(lambda t, y: lin(y), y0, t, **call, adjoint_options={}).shape == (2, 2, 3)
