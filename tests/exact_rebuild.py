"""Starts of exact solves, rebuilt from their codes: from the end state and the tape, without z0.

As a script it is the second process of test_exact.py: python exact_rebuild.py FILE RESULT
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from pathlib import Path

import torch
from problems import LORENZ, MLP, ODE, OSCILLATOR, TOY, VAN_DER_POL, linear, mlp_weights, tanh_mlp

WEIGHTS = [torch.from_numpy(w).float() for w in mlp_weights()]
FOUR = torch.linspace(0.5, 1.5, 4, dtype=torch.float64)
# Fields that keep float32, on spans long enough for refreshes and rescales.
ODES: dict[str, ODE] = {
    ode.name: ode
    for ode in (
        replace(MLP, f=lambda t, z: tanh_mlp(t, z, *WEIGHTS)),
        replace(OSCILLATOR, span=(0.0, 20.0)),
        TOY,
        linear("decay", -50.0, FOUR, 1.0),
        linear("growth", 10.0, FOUR, 1.0),
        VAN_DER_POL,
        LORENZ,
    )
}


def main(source: str, target: str) -> None:
    torch.set_num_threads(1)
    cases = pickle.loads(Path(source).read_bytes())
    found = [code.start(ODES[name].f).snapshot() for name, code in cases]
    Path(target).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
