"""Where exact solves began, from what their backward pass would have: the end state and the tape, and no z0.

As a script it is the second process of test_exact.py: python exact_rebuild.py FILE RESULT
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from problems import LORENZ, MLP, ODE, OSCILLATOR, TOY, VAN_DER_POL, linear, mlp_weights, tanh_mlp

from torchmali.field import Field
from torchmali.gradients.replay import walk
from torchmali.solvers.base import Cotangent, Solver
from torchmali.state import Memento, State, Structure
from torchmali.tape import Event, Refresh

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


def rebuild(func: Callable, solver: Solver, end: State, events: Sequence[Event], kept: Sequence[Memento]) -> State:
    """(z0, v0), by the library's own walk with nothing to pull back."""
    f = Field(func, end.point, Structure.of(end.point[0]), (), [])
    state, stop, nothing = end.fork(), len(events), Cotangent.zero(end, 0, 0)
    renewals = [(i, event) for i, event in enumerate(events) if isinstance(event, Refresh)]
    with torch.enable_grad():
        for i, renewal in reversed(renewals):
            state = walk(f, solver, events[i + 1 : stop], kept, state, nothing, [None])
            if renewal.before is not None:
                state = state.back_to(kept[renewal.before])
            stop = i
    assert stop == 0  # a leapfrog solve begins with v0 = f(t0, z0)
    return state


def main(source: str, target: str) -> None:
    torch.set_num_threads(1)
    cases = pickle.loads(Path(source).read_bytes())
    found = [
        rebuild(ODES[name].f, solver, arithmetic.restore(end), events, kept).put_away()
        for name, solver, arithmetic, end, events, kept in cases
    ]
    Path(target).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
