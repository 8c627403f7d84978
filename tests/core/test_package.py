"""What a package that depends on torchmali sees, and the settings of the repository."""

import gc
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import torchmali as tm
from torchmali.collection import PausedCollection

ROOT = Path(__file__).parents[2]
USER = """
import torch
from torch import Tensor, nn

import torchmali as tm
from torchmali.engine import Slope, State, Tensors, Time
from torchmali.nn import ODEBlock


class Decay(nn.Module):
    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return -y


class Euler(tm.Solver):
    @property
    def order(self) -> int:
        return 1

    def step(self, f: Slope, t0: Time, t1: Time, state: State, carry: Tensors | None, adaptive: bool) -> tm.Attempt:
        z = tuple(x + (t1 - t0) * u for x, u in zip(state.point, f(t0, state.point)))
        return tm.Attempt(state.of(z))


class Kutta(tm.RungeKutta):
    tableau = tm.Tableau(3, [(1 / 2,), (-1.0, 2.0)], (1 / 6, 2 / 3, 1 / 6))


y0 = torch.ones(2)
controller = tm.AdaptiveStep(1e-3, 1e-4)
solution: tm.Solution = tm.solve(
    Decay(), y0, [0.0, 1.0], solver=tm.ALF(order=4), controller=controller, gradient=tm.MALI()
)
steps: int = solution.stats.n_steps
times: Tensor = solution.t
for solver in (Euler(), Kutta(), tm.Leapfrog((0.5, 0.5)), tm.Reversible(Kutta())):
    tm.solve(Decay(), y0, torch.linspace(0, 1, 3), solver=solver, controller=tm.FixedStep(0.1), gradient=tm.ACA())
y = tm.odeint(Decay(), {"a": torch.ones(2)}, [0.0, 1.0], gradient="mali")
layer: nn.Module = ODEBlock(Decay())
try:
    tm.solve(Decay(), torch.ones(2), [0.0], outputs=None)
except tm.InvalidTimesError as error:
    raise tm.SolverError(str(error)) from error
"""


def decay(t, y):
    return -y


def type_errors(folder: Path, source: str) -> subprocess.CompletedProcess:
    """pyright in its mode "standard", which is what users have if they say nothing."""
    (folder / "user.py").write_text(source)
    settings = {"include": ["user.py"], "extraPaths": [str(ROOT)], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--project", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_code_that_uses_the_public_names_has_no_type_errors(tmp_path: Path):
    run = type_errors(tmp_path, USER)
    assert run.returncode == 0 and "0 errors" in run.stdout, run.stdout + run.stderr


def test_code_that_misuses_a_public_name_has_a_type_error(tmp_path: Path):
    run = type_errors(tmp_path, USER + "tm.solve(Decay(), y0, [0.0, 1.0], solver='alf')\n")
    assert run.returncode == 1 and "1 error," in run.stdout, run.stdout + run.stderr


def test_the_package_says_that_it_has_types():
    assert (ROOT / "torchmali" / "py.typed").exists()
    assert 'torchmali = ["py.typed"]' in (ROOT / "pyproject.toml").read_text()


def test_the_hooks_have_the_versions_of_the_constraints():
    (hook,) = re.findall(r"ruff-pre-commit\n\s+rev: v(.+)", (ROOT / ".pre-commit-config.yaml").read_text())
    (tested,) = re.findall(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert hook == tested


def test_a_solution_shows_shapes():
    solution = tm.solve(decay, torch.ones(4, 2), [0.0, 0.5, 2.0], controller=tm.FixedStep(0.25))
    assert repr(solution) == "Solution(y: (3, 4, 2), 3 times from 0 to 2, 8 steps)"


def test_a_solution_of_a_tree_shows_the_tree():
    def f(t, y):
        return {"a": -y["a"], "b": (-y["b"][0],)}

    y0 = {"a": torch.ones(2), "b": (torch.ones(3, 1),)}
    times = torch.tensor([1.0, 0.0], requires_grad=True)
    how = {"controller": tm.FixedStep(0.5), "gradient": tm.MALI(exact=True)}
    solution = tm.solve(f, y0, times, observe=lambda t, y: y["a"], return_code=True, **how)
    shown = "y: {'a': (1, 2), 'b': ((1, 3, 1),)}, 2 times from 1 to 0, 2 steps, observed: (2,)"
    assert repr(solution) == f"Solution({shown}, code: {solution.code!r})"


def test_a_solution_without_times_can_be_shown():
    assert repr(tm.Solution(torch.empty(0), None, tm.Stats())) == "Solution(y: None, 0 times, 0 steps)"


def test_stats_show_what_was_counted():
    assert repr(tm.Stats()) == "Stats()"
    assert repr(tm.Stats(n_steps=3, h_min=0.5)) == "Stats(n_steps=3, h_min=0.5)"
    stats = tm.solve(decay, torch.ones(2), [0.0, 1.0], controller=tm.FixedStep(0.5)).stats
    assert repr(stats) == "Stats(n_steps=2, n_evals_forward=3, h_min=0.5, h_max=0.5)"


def test_an_import_collects_no_garbage_and_leaves_the_collector_as_it_was():
    code = """
        import gc, torch
        before = [x["collections"] for x in gc.get_stats()]
        import torchmali
        after = [x["collections"] for x in gc.get_stats()]
        assert after[1:] == before[1:] and after[0] - before[0] <= 1, (before, after)
        assert gc.isenabled()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


@pytest.mark.parametrize("is_on", [True, False])
def test_a_pause_of_the_collector_ends_as_it_began(is_on: bool):
    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(ImportError), PausedCollection():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if was_on else gc.disable)()
