"""Sampling of flow models, with exact gradients through the sampler and exact inversion of its samples."""

from torchmali.flow.sampler import Coded, Sampler
from torchmali.flow.velocity import Guidance

__all__ = ["Coded", "Guidance", "Sampler"]
