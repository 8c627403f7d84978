"""What the README shows is run as it stands, and its numbers are those of the committed record."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from committed import records
from torch import nn

import torchmali as tm
from experiments.views import flows, images, series

ROOT = Path(__file__).parent.parent
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
    first, second, third, fourth = examples(README)
    names: dict = {}
    exec(first, names)
    assert names["solution"].y.shape == (3, 128, 2)
    assert names["solution"].stats.n_vjps == 21
    names |= {"func": names["Field"](), "y0": torch.randn(4, 2, requires_grad=True), "t": torch.tensor([0.0, 1.0])}
    exec(second, names)
    names["y"].sum().backward()
    assert names["y0"].grad is not None
    exec(third, names)
    assert "mali4" in capsys.readouterr().out
    exec(fourth, names)
    assert all(p.grad is not None for p in names["flow"].parameters())
    assert names["model"](torch.randn(4, 8)).shape == (4, 10)


def test_the_examples_of_docs_models_run():
    layers, observed = examples(ROOT / "docs" / "models.md")
    names: dict = {"func": Slope(), "y0": torch.randn(4, 16, requires_grad=True), "times": torch.linspace(0, 1, 5)}
    exec(layers, names)
    assert names["model"](torch.randn(4, 2)).shape == (4, 1)
    names |= {"decoder": nn.Linear(16, 3), "data": torch.randn(5, 4, 3), "solve": tm.solve}
    exec(observed, names)
    assert names["y0"].grad is not None and names["decoder"].weight.grad is not None


def test_the_readmes_benchmark_is_the_record():
    record = json.loads((ROOT / "benchmarks" / "records" / "gradients.json").read_text())["results"]
    rows = {
        "MALI": r"\*\*MALI\*\*",
        "MALI as published": "MALI as published .*?",
        "ACA": "ACA",
        "naive": "naive .*?",
        "TDEPack MALI": "MALI of the paper's code .*?",
        "lb_eager": "lower limit.*?",
    }
    for method, label in rows.items():
        cells = []
        for workload in ("W1", "W2"):
            ratio = record[workload]["time_ratios"].get(f"{method} / lb_eager", {"median": 1})["median"]
            cells += ["1" if ratio == 1 else f"{ratio:.2f}", f"{record[workload]['peak_bytes'][method] / 1e6:.2f}"]
        assert re.search(rf"^\| {label} \| {re.escape(' | '.join(cells))} \|$", README.read_text(), re.M), method


def test_the_decision_on_exact_mode_quotes_its_records():
    text = (ROOT / "docs" / "choosing-a-gradient.md").read_text()
    *_, last = (ROOT / "tests" / "fuzz" / "records" / "float32.jsonl").read_text().splitlines()
    study = json.loads(last)["summary"]
    vain, silent = (study[f"share of {what}"] for what in ("false alarms", "reruns without"))
    assert (
        f"Of {study['problems']:,} random float32 problems (networks, physics, clocks, chaos) {study['misses']}" in text
    )
    assert f"{vain:.1%} are warned".replace("%", " %") in text and f"{silent:.1%} are".replace("%", " %") in text
    times = json.loads((ROOT / "benchmarks" / "records" / "exact.json").read_text())["results"]
    for workload in ("W1", "W2"):
        assert f"{times[workload]['time_ratio']['median']:.2f} times" in text


def test_the_record_of_the_fuzzer_has_no_failure():
    record = json.loads((ROOT / "tests" / "fuzz" / "records" / "fuzz.json").read_text())
    assert record["cases"] >= 10_000 and record["failures"] == []


def test_the_readme_has_the_numbers_of_cifar_10():
    rows: dict[str, Any] = {str(row[0]): row for row in images.show(records("cifar10"))[0][0].rows}
    for method in ("MALI", "ACA", "naive", "adjoint"):
        cells = " | ".join(rows[method][i].text for i in (2, 4, 6))
        assert re.search(rf"^\| \**{method}\** \(.*?\) \| {re.escape(cells)} \|$", README.read_text(), re.M), method


def test_the_readme_has_the_numbers_of_flows():
    tables: Any = [flows.show(records("flows", preset))[0][1].rows for preset in flows.DATA]
    for method in ("MALI", "RNODE", "FFJORD (vanilla)"):
        rows = [row for table in tables for row in table if row[0] == method]
        cells = " | ".join(row[i].text for row in rows for i in (3, 6))
        line = rf"^\| \**{re.escape(method)}\** \(.*?\) \| {re.escape(cells)} \|$"
        assert re.search(line, README.read_text(), re.M), (method, cells)


def test_the_readme_has_the_numbers_of_series():
    tables = [series.latent(records("latent"))[0][0], series.paths(records("paths"))[0][0]]
    rows: Any = [{str(row[0]): row for row in table.rows} for table in tables]
    latent, paths = rows
    for method in ("MALI", "ACA", "naive", "adjoint"):
        error = str(latent[method][1].text).split(" (")[0]  # without the paper's
        cells = " | ".join([error, latent[method][4].text, *(paths[method][i].text for i in (2, 4, 6))])
        assert re.search(rf"^\| \**{method}\** \| {re.escape(cells)} \|$", README.read_text(), re.M), method
