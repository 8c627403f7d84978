"""What the README shows is run as it stands."""

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_the_readmes_examples_run():
    first, second = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    names: dict = {}
    exec(first, names)
    assert names["solution"].y.shape == (3, 128, 2)
    assert names["solution"].stats.n_vjps == 21
    names |= {"func": names["Field"](), "y0": torch.randn(4, 2, requires_grad=True), "t": torch.tensor([0.0, 1.0])}
    exec(second, names)
    names["y"].sum().backward()
    assert names["y0"].grad is not None
