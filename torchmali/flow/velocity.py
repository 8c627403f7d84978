"""The velocity that a sampler integrates: a network in its own precision, with guidance, and with a discount."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchmali._torch import tree_map
from torchmali.errors import InvalidFieldError, InvalidOptionError

Discount = float | Callable[[Tensor], float | Tensor]


class Guidance:
    """Classifier-free guidance: v = v_null + scale (v - v_null), where v_null = velocity(t, x, *null_args).

    scale: a number, a 0-d tensor, or a tensor with a number for each sample; a tensor may get a gradient. 1 is the
    velocity itself, 0 that of null_args. Each evaluation calls the network twice.

        >>> from torchmali.flow import Guidance, Sampler
        >>> sampler = Sampler(lambda t, x, slope: slope * x)
        >>> z = torch.ones(1, 1, dtype=torch.float64)
        >>> f"{sampler.sample(z, 0.5, guidance=Guidance(3.0, 0.2)).log().item():.3f}"  # 0.2 + 3 (0.5 - 0.2)
        '1.100'
    """

    def __init__(self, scale: float | Tensor, *null_args: Any):
        is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not (is_number or (isinstance(scale, Tensor) and scale.ndim <= 1 and scale.is_floating_point())):
            got = f"a tensor of shape {tuple(scale.shape)}, {scale.dtype}" if isinstance(scale, Tensor) else repr(scale)
            raise InvalidOptionError(
                "Guidance needs a scale that is a number, or a floating-point tensor of shape () or (batch,); got "
                f"{got}."
            )
        self.scale, self.null_args = scale, null_args

    def __repr__(self) -> str:
        scale = f"scale of shape {tuple(self.scale.shape)}" if isinstance(self.scale, Tensor) else f"{self.scale:g}"
        return f"Guidance({scale})"


def checked_discount(discount: Discount | None) -> Discount | None:
    """Return a discount, or None for one of 1."""
    is_number = isinstance(discount, (int, float)) and not isinstance(discount, bool)
    if not (discount is None or callable(discount) or (is_number and 0 <= discount <= 1)):
        raise InvalidOptionError(f"discount={discount!r}: a number from 0 to 1, or a function of t that returns one.")
    return None if is_number and discount == 1 else discount


def discounted(x: Tensor, factor: float | Tensor) -> Tensor:
    """Return x itself, whose derivative by x is `factor` in place of 1."""
    still = x.detach()
    return still + factor * (x - still)  # still + 0: x, but for the sign of a zero


def guided_velocity(
    network: Callable,
    dtype: torch.dtype | None,
    discount: Discount | None,
    t: Tensor,
    x: Tensor,
    scale: float | Tensor | None,
    args: tuple,
    null_args: tuple,
) -> Tensor:
    """Return the velocity at (t, x) in the precision of x, with guidance unless `scale` is None."""
    if discount is not None:
        x = discounted(x, discount(t) if callable(discount) else discount)
    v = _evaluated(network, dtype, t, x, args)
    if scale is None:
        return v
    without = _evaluated(network, dtype, t, x, null_args)
    return without + _for_samples(scale, x) * (v - without)


def _for_samples(scale: float | Tensor, x: Tensor) -> float | Tensor:
    if not isinstance(scale, Tensor) or scale.ndim == 0:
        return scale
    if len(scale) != len(x):
        raise InvalidOptionError(f"Guidance has {len(scale)} scales for {len(x)} samples: give one for each, or one.")
    return scale.view(-1, *[1] * (x.ndim - 1))


def _evaluated(network: Callable, dtype: torch.dtype | None, t: Tensor, x: Tensor, args: tuple) -> Tensor:
    """Evaluate the network, in dtype if one is given, and return its velocity in the precision of x."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    v = network(t, x, *args) if dtype is None else network(t, x.to(dtype), *tree_map(cast, args))
    got = tuple(v.shape) if isinstance(v, Tensor) else f"a {type(v).__name__}"
    if not isinstance(v, Tensor) or v.shape != x.shape:
        raise InvalidFieldError(f"The network must return dx/dt like x, of shape {tuple(x.shape)}; got {got}.")
    is_coarser = v.is_floating_point() and torch.finfo(v.dtype).eps > torch.finfo(x.dtype).eps
    return v.to(x.dtype) if is_coarser else v  # `solve` refuses others
