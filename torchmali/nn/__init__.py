"""Modules made of solves: ODEBlock, CNF, NeuralCDE and the paths that drive it, ODE-RNN."""

from torchmali.nn.block import ODEBlock
from torchmali.nn.cde import NeuralCDE
from torchmali.nn.control import CubicControl, LinearControl, hermite_cubic_coeffs, linear_coeffs, natural_cubic_coeffs
from torchmali.nn.rnn import ODERNN, ODERNNCell

__all__ = [
    "ODERNN",
    "CubicControl",
    "LinearControl",
    "NeuralCDE",
    "ODEBlock",
    "ODERNNCell",
    "hermite_cubic_coeffs",
    "linear_coeffs",
    "natural_cubic_coeffs",
]
