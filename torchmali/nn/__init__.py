"""Modules made of solves: ODEBlock."""

from torchmali.nn.block import ODEBlock

__all__ = ["ODEBlock"]
