"""Modules that solve ODEs: ODEBlock, CNF, NeuralCDE and the paths that drive it, ODE-RNN."""

from torchmali.nn.base import SolveModule
from torchmali.nn.block import ODEBlock
from torchmali.nn.cde import NeuralCDE
from torchmali.nn.cnf import CNF, ExactTrace, Flow, Hutchinson, gaussian, rademacher
from torchmali.nn.control import CubicControl, LinearControl, hermite_cubic_coeffs, linear_coeffs, natural_cubic_coeffs
from torchmali.nn.rnn import ODERNN, ODERNNCell

# fmt: off
__all__ = [
    "CNF", "ODERNN", "CubicControl", "ExactTrace", "Flow", "Hutchinson", "LinearControl", "NeuralCDE", "ODEBlock",
    "ODERNNCell", "SolveModule", "gaussian", "hermite_cubic_coeffs", "linear_coeffs", "natural_cubic_coeffs",
    "rademacher",
]
