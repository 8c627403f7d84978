"""`Sampler`: from noise to samples and back, along the velocity of a flow model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from torchmali.code import Code, solve_back
from torchmali.controllers import FixedStep, StepController
from torchmali.errors import IncompatibleError, InvalidOptionError
from torchmali.flow.velocity import Discount, Guidance, checked_discount, guided_velocity
from torchmali.gradients.base import GradientMethod
from torchmali.gradients.mali import MALI
from torchmali.nn.base import SolveModule, exact_gradient, shown_times
from torchmali.nn.cnf import CNF, Hutchinson, Trace
from torchmali.solution import Solution
from torchmali.solvers.base import Solver
from torchmali.solvers.leapfrog import ALF

N_STEPS = 50


class Coded(NamedTuple):
    """End of a solve, and its code: the integers from which the start is rebuilt to the last bit."""

    x: Tensor
    code: Code


class Sampler(SolveModule):
    """Sampler of a flow model: dx/dt = velocity(t, x, *args) from noise at t[0] to samples at t[1].

    `sample` goes from noise to samples, `encode` back, `log_prob` gives densities. All are differentiable by x, by the
    parameters of the velocity, by tensors in args, and by the scale of a `Guidance`, with the exact gradient of the
    very steps taken: with `MALI()` in memory that does not grow with their number.

        >>> import torch
        >>> from torchmali.flow import Guidance, Sampler
        >>> net, embed = torch.nn.Linear(6, 4), torch.nn.Embedding(11, 2)
        >>> def velocity(t, x, labels):
        ...     return net(torch.cat([x, embed(labels)], 1))
        >>> sampler = Sampler(velocity)
        >>> z, labels = torch.randn(8, 4, requires_grad=True), torch.arange(8)
        >>> scale = torch.tensor(2.0, requires_grad=True)
        >>> guidance = Guidance(scale, torch.full_like(labels, 10))  # 10 stands for "no label"
        >>> x = sampler.sample(z, labels, n_steps=20, guidance=guidance)
        >>> x.square().sum().backward()  # gradients for z, scale, net and embed
        >>> z.grad.shape, scale.grad.shape
        (torch.Size([8, 4]), torch.Size([]))
        >>> x, code = sampler.sample_with_code(z, labels, n_steps=20)
        >>> torch.equal(sampler.encode(code), z)  # every bit
        True

    t: (0, 1) for rectified flows and conditional flow matching; (1, 0) where noise is at 1. solver, gradient: any of
    the package. controller: by default 50 steps of one length; n_steps in a call takes so many in its place. `ALF()`
    takes one evaluation per step, and one more per solve.

    dtype: the precision in which the velocity is evaluated, such as torch.bfloat16: x and floating-point tensors in
    args are cast to it and the velocity is cast back, so that the state and all sums stay in float32. (A network that
    casts for itself, or autocast around the call, will do as well.) t is not cast: 0.996 and 1 are one number there.

    buffers, compile: see `solve`. `last_stats` has the counts of the last solve.
    """

    def __init__(
        self,
        velocity: Callable,
        t: tuple[float, float] = (0.0, 1.0),
        *,
        solver: Solver = ALF(),  # noqa: B008 (solvers, controllers and gradient methods are immutable values)
        controller: StepController | None = None,
        gradient: GradientMethod = MALI(),  # noqa: B008
        dtype: torch.dtype | None = None,
        buffers: str = "update",
        compile: bool = False,
    ):
        if len(t) != 2 or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in t) or t[0] == t[1]:
            raise InvalidOptionError(f"t={t!r}: give two different numbers, the time of the noise and of the samples.")
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidOptionError(f"dtype={dtype}: the precision of a velocity is a floating-point dtype, or None.")
        self.t = (float(t[0]), float(t[1]))
        super().__init__(solver, controller or self._equal_steps(N_STEPS), gradient, buffers, compile)
        self.velocity, self.dtype = velocity, dtype

    # From noise to samples, and back

    def sample(
        self,
        z: Tensor | Code | Sequence[int],
        *args: Any,
        n_steps: int | None = None,
        guidance: Guidance | None = None,
        discount: Discount | None = None,
        generator: Generator | None = None,
    ) -> Tensor:
        """Return samples x from noise z, from the shape of noise to be drawn, or to the last bit from `encode`'s code.

        discount: a number d from 0 to 1, or a function of t that returns one, for the gradient alone; x is the same.
        Each evaluation of the velocity in this solve is differentiated as velocity(t, d x + (1 - d) stop(x)), where
        stop passes no gradient: d J takes the place of its Jacobian J = dv/dx. A cotangent a at the end of an Euler
        step of size h is a + h d J^T a at its start, while dL/dparameters and dL/dargs of that evaluation are
        h (dv/d.)^T a, not discounted themselves. Other solvers do the same with each of their stages. d = 0 cuts all
        paths through the velocity's x, d = 1 is the exact gradient. (LeapAlign, 2026, discounts nested gradients so,
        as Jacobians of a chain of steps may explode.) With `Guidance` the guided velocity is discounted as a whole.
        """
        if isinstance(z, Code):
            _require_alone(args, n_steps, guidance, discount, generator)
            return self._start_of(z, self.t[1], "encode")
        if isinstance(z, Tensor) and generator is not None:
            raise InvalidOptionError("generator draws the noise of a shape, but z is a tensor: leave one of them out.")
        z = z if isinstance(z, Tensor) else self.noise(z, generator)
        return self._solved(z, self.t, args, n_steps, guidance, discount).y[-1]

    def encode(
        self,
        x: Tensor | Code,
        *args: Any,
        n_steps: int | None = None,
        guidance: Guidance | None = None,
        discount: Discount | None = None,
    ) -> Tensor:
        """Return the noise of samples x, by a solve from t[1] to t[0]; from the code of `sample_with_code` to the bit.

        The solve from x alone is as accurate as its steps: it has to begin with v = velocity(t, x), while `sample`
        ended with another v. The code has v, and the bits that rounding took from x. discount: see `sample`.
        """
        if isinstance(x, Code):
            _require_alone(args, n_steps, guidance, discount)
            return self._start_of(x, self.t[0], "sample")
        return self._solved(x, self.t[::-1], args, n_steps, guidance, discount).y[-1]

    def sample_with_code(
        self, z: Tensor | Sequence[int], *args: Any, n_steps: int | None = None, guidance: Guidance | None = None
    ) -> Coded:
        """Return samples, and the code from which `encode` rebuilds z to the last bit.

        The solve runs on integers, with gradients as those of `sample`. MALI(exact=True) rounds z to its grid first,
        and there `encode` rebuilds the rounded z; other gradient methods are replaced with MALI(exact="int64"), which
        keeps every bit of a float32 z. A code can be pickled; to read it takes the same velocity, device and kernels.
        """
        z = z if isinstance(z, Tensor) else self.noise(z)
        return self._coded(z, self.t, args, n_steps, guidance)

    def encode_with_code(
        self, x: Tensor, *args: Any, n_steps: int | None = None, guidance: Guidance | None = None
    ) -> Coded:
        """Return the noise of x, and the code from which `sample` rebuilds x to the bit. See `sample_with_code`."""
        return self._coded(x, self.t[::-1], args, n_steps, guidance)

    def noise(self, shape: Sequence[int], generator: Generator | None = None) -> Tensor:
        """Draw standard normal noise on the device of the parameters, in float64 if they are, and else in float32."""
        like = next(self.parameters(), torch.empty(()))
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        return torch.randn(*shape, dtype=dtype, device=like.device, generator=generator)

    # Densities

    def log_prob(
        self,
        x: Tensor,
        *args: Any,
        n_steps: int | None = None,
        guidance: Guidance | None = None,
        trace: Trace = Hutchinson(),  # noqa: B008
        noise: Tensor | None = None,
    ) -> Tensor:
        """Return log p(x), (batch,), for standard normal noise: by the change of variables along `encode`.

        trace: `ExactTrace()`, or `Hutchinson()` for an unbiased estimate, whose noise may be given. See `CNF`.
        """
        flow = CNF(
            self._velocity(None),
            self.t[::-1],
            trace=trace,
            solver=self.solver,
            controller=self._controller(n_steps),
            gradient=self.gradient,
            buffers=self.buffers_policy,
            compile=self.compiles,
        )
        found = flow.log_prob(x, *_arguments(args, guidance), noise=noise)
        self._last_stats = flow.last_stats
        return found

    # Parts

    def _solved(
        self,
        start: Tensor,
        t: tuple[float, ...],
        args: tuple,
        n_steps: int | None,
        guidance: Guidance | None,
        discount: Discount | None = None,
        **changes: Any,
    ) -> Solution:
        velocity, controller = self._velocity(checked_discount(discount)), self._controller(n_steps)
        return self.solve(velocity, start, t, args=_arguments(args, guidance), controller=controller, **changes)

    def _coded(
        self, start: Tensor, t: tuple[float, ...], args: tuple, n_steps: int | None, guidance: Guidance | None
    ) -> Coded:
        gradient = exact_gradient(self.gradient)
        solution = self._solved(start, t, args, n_steps, guidance, gradient=gradient, return_code=True)
        assert solution.code is not None
        return Coded(solution.y[-1], solution.code)

    def _start_of(self, code: Code, t0: float, other: str) -> Tensor:
        if code.t0 != t0:
            raise IncompatibleError(f"This code belongs to a solve from t = {code.t0:g}: give it to `{other}`.")
        return solve_back(self._velocity(None), code)

    def _velocity(self, discount: Discount | None) -> Callable:
        return partial(guided_velocity, self.velocity, self.dtype, discount)

    def _controller(self, n_steps: int | None) -> StepController:
        return self.controller if n_steps is None else self._equal_steps(n_steps)

    def _equal_steps(self, n: int) -> FixedStep:
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise InvalidOptionError(f"n_steps={n!r}: give a positive number of steps, or None for the controller's.")
        return FixedStep(abs(self.t[1] - self.t[0]) / n)

    def extra_repr(self) -> str:
        dtype = "" if self.dtype is None else f", dtype={self.dtype}"
        return f"t={shown_times(self.t)}{dtype}, {super().extra_repr()}"


def _require_alone(args: tuple, *options: Any) -> None:
    """Refuse arguments beside a code, which would not count."""
    if args or any(option is not None for option in options):
        raise InvalidOptionError("A code holds the arguments and steps of its solve: give it alone.")


def _arguments(args: tuple, guidance: Guidance | None) -> tuple:
    """The arguments of `guided_velocity` after t and x."""
    if guidance is None:
        return None, args, ()
    if not isinstance(guidance, Guidance):
        raise InvalidOptionError(f"guidance={guidance!r}: give Guidance(scale, *null_args).")
    return guidance.scale, args, guidance.null_args
