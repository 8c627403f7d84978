"""The examples of README.md and of pages in docs/ are run as they stand, and the files that the pages name exist."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torchmali as tm
from torchmali.nn import ODERNN, ODERNNCell
from torchmali.torchdiffeq import METHODS, options
from torchmali.torchdiffeq.methods import GRADIENTS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, t, y):
        return torch.tanh(self.linear(y))


def examples(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


def test_the_readmes_examples_run(capsys):
    first, second, outputs, third, fourth = examples(README)
    names: dict = {}
    exec(first, names)
    assert names["solution"].y.shape == (3, 128, 2)
    assert names["solution"].stats.n_vjps == 21
    names |= {"func": names["Field"](), "y0": torch.randn(4, 2, requires_grad=True), "t": torch.tensor([0.0, 1.0])}
    exec(second, names)
    names["y"].sum().backward()
    assert names["y0"].grad is not None
    exec(outputs, names)
    t = (2 * 10 / 9.81) ** 0.5
    assert abs(names["solution"].event_t.item() - t) < 1e-3
    assert torch.allclose(names["ball"].grad, torch.tensor([1 / (9.81 * t), 1 / 9.81]), atol=1e-3)
    assert abs(names["path"](0.123)[0].item() - (10 - 9.81 / 2 * 0.123**2)) < 1e-4
    exec(third, names)
    assert "mali4" in capsys.readouterr().out
    exec(fourth, names)
    assert all(p.grad is not None for p in names["flow"].parameters())
    assert names["model"](torch.randn(4, 8)).shape == (4, 10)


def test_the_examples_of_docs_models_run():
    layers, observed, per_sample, spans = examples(ROOT / "docs" / "models.md")
    names: dict = {"func": Slope(), "y0": torch.randn(4, 16, requires_grad=True), "times": torch.linspace(0, 1, 5)}
    exec(layers, names)
    assert names["model"](torch.randn(4, 2)).shape == (4, 1)
    names |= {"decoder": nn.Linear(16, 3), "data": torch.randn(5, 4, 3), "solve": tm.solve}
    exec(observed, names)
    assert names["y0"].grad is not None and names["decoder"].weight.grad is not None
    names |= {"torch": torch, "batch": torch.randn(3, 16), "series": torch.randn(3, 3, 3)}
    exec(per_sample, names)
    assert names["y"].shape == (3, 3, 16) and names["y"].isnan().any(-1).sum() == 1
    assert names["observed"].shape == (3,) and names["observed"].isfinite().all()
    names |= {"ODERNN": ODERNN, "ODERNNCell": ODERNNCell, "x": torch.randn(3, 4, 2)}
    names["times_of_each"] = torch.rand(3, 4).cumsum(1)
    exec(spans, names)
    assert names["y"].shape == (2, 3, 16) and names["states"].shape == (3, 4, 16)


def test_the_example_of_choosing_a_gradient_runs():
    (lists,) = examples(ROOT / "docs" / "choosing-a-gradient.md")
    names: dict = {"func": Slope(), "y0": torch.randn(4, 16, requires_grad=True)}
    exec(lists, names)
    assert names["solution"].y.shape == (2, 4, 16) and names["solution"].stats.n_steps > 0


def test_the_examples_of_docs_outputs_run():
    names: dict = {}
    between, dense, *others = examples(ROOT / "docs" / "outputs.md")
    exec(between, names)
    y = names["many"].y
    assert y.shape == (1000, 2) and (y[-1] - names["few"].y[-1]).abs().max() < 1e-12
    exec(dense, names)
    before = names["y0"].grad.clone()
    assert names["angle"].shape == (77,) and before.norm() > 0
    events, as_in_torchdiffeq, jumps, samples = others
    exec(events, names)
    assert abs(names["solution"].event_t.item() - 1.6749957) < 1e-3  # a quarter period, K(sin(1/2))
    assert (names["y0"].grad - before).norm() > 0 and len(names["record"].event_times[0]) == 4
    exec(as_in_torchdiffeq, names)
    assert abs(names["t"].item() - 1.6749957) < 1e-5 and names["y"].shape == (2, 2)
    exec(jumps, names)  # compares the numbers of rejected steps itself
    exec(samples, names)
    wanted = names["starts"] * torch.exp(-names["times"])[..., None]
    assert torch.allclose(names["solution"].y, wanted, atol=1e-3, equal_nan=True)


PAGES = [
    README,
    *(
        ROOT / "docs" / name
        for name in (
            "architecture.md",
            "coming-from-torchdiffeq.md",
            "extending.md",
            "limits.md",
            "outputs.md",
            "reading-guide.md",
        )
    ),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path):
    folders = [ROOT, ROOT / "torchmali", ROOT / "tests" / "core"]
    named = set(re.findall(r"`([\w./]+\.py)`", page.read_text()))
    assert not [name for name in named if not any((folder / name).exists() for folder in folders)]


def test_the_page_for_those_who_come_from_torchdiffeq_names_every_method_and_option():
    text = (ROOT / "docs" / "coming-from-torchdiffeq.md").read_text()
    known = (*METHODS, *GRADIENTS, *options.ADAPTIVE_OPTIONS, *options.TIMES_OPTIONS, *options.FIXED_OPTIONS)
    known += (*options.ADAMS_OPTIONS, *options.SCIPY_OPTIONS, *inspect.signature(tm.odeint_adjoint).parameters)
    words = set(re.findall(r"\w+", text))
    assert not [name for name in known if name not in words]
    names: dict = {"func": Slope(), "y0": torch.randn(4, 16, requires_grad=True), "t": torch.tensor([0.0, 1.0])}
    for block in examples(ROOT / "docs" / "coming-from-torchdiffeq.md"):
        exec(block, names)
    assert names["torchdiffeq"].odeint is names["odeint"] is tm.odeint and names["y"].shape == (2, 4, 16)


def test_every_module_of_the_core_has_a_row_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text()
    core = ROOT / "torchmali"
    modules = [path.relative_to(core) for path in core.rglob("*.py") if path.read_text().strip()]
    in_folders = {"nn", "auditing"}  # one row each
    assert not [m for m in modules if f"`{m}`" not in text and m.parts[0] not in in_folders and m.name != "__init__.py"]
