"""torchdiffeq's six examples, run as they are on torchdiffeq and on `torchmali.torchdiffeq`.

    python -m benchmarks.torchdiffeq_examples CHECKOUT [--rounds 3] [--only NAME]

CHECKOUT is the path of a checkout of torchdiffeq's repository. Each example runs in a process of its own, with few
iterations, the same seeds and one thread, in turns on torchdiffeq, on ours, and on ours with gradient="mali" (which has
no use for a method that is not reversible: there it chooses its own). The MNIST example gets random pictures in place
of its data. Prints the last numbers that the example printed, and the time of the CPU beside torchdiffeq's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchdiffeq
from torch.utils.data import TensorDataset

import torchmali.torchdiffeq as ours

EXAMPLES = {  # name: its arguments, and what its lines say of the result
    "ode_demo": (["--niters", "40", "--test_freq", "40", "--batch_time", "10"], r"Total Loss ([\d.]+)"),
    "latent_ode": (["--niters", "6"], r"avg elbo: (-?[\d.]+)"),
    "cnf": (["--niters", "4"], r"avg loss: ([\d.]+)"),
    "bouncing_ball": (["5"], r"(Gradient check \w+)"),
    "learn_physics": (["--num_iterations", "3"], r"^\d+ ([\d.]+)"),
    "odenet_mnist": (["--nepochs", "1", "--batch_size", "64", "--data_aug", "False"], r"Acc ([\d.]+)"),
}
PACKAGES = ("torchdiffeq", "ours", "ours, MALI")
N_PICTURES = 1000


def pictures(**how: Any) -> TensorDataset:
    """Random pictures of two kinds, in place of MNIST."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (N_PICTURES,), generator=generator)
    images = torch.rand(N_PICTURES, 1, 28, 28, generator=generator) * (1 + labels.reshape(-1, 1, 1, 1))
    return TensorDataset(images, labels)


def stand_in_for_torchvision() -> None:
    """Let `torchvision.datasets.MNIST` be `pictures`, and transforms do nothing."""
    datasets, transforms = types.ModuleType("torchvision.datasets"), types.ModuleType("torchvision.transforms")
    vars(datasets)["MNIST"] = pictures
    for name in ("Compose", "RandomCrop", "ToTensor"):
        vars(transforms)[name] = lambda *args, **how: None
    package = types.ModuleType("torchvision")
    vars(package).update(datasets=datasets, transforms=transforms)
    sys.modules |= {"torchvision": package, "torchvision.datasets": datasets, "torchvision.transforms": transforms}


def with_mali(func: Any, y0: Any, t: Any, *, method: Any = None, **how: Any) -> Any:
    return ours.odeint(func, y0, t, gradient="mali", **how)


def mali_event(*args: Any, odeint_interface: Any = None, **how: Any) -> Any:
    return ours.odeint_event(*args, odeint_interface=with_mali, **how)


def package_named(name: str) -> Any:
    if name == "ours, MALI":
        return types.SimpleNamespace(odeint=with_mali, odeint_adjoint=with_mali, odeint_event=mali_event)
    return torchdiffeq if name == "torchdiffeq" else ours


def run(example: Path, package: str, arguments: list[str]) -> float:
    """Run an example in this process; return the time of the CPU that it took."""
    sys.modules["torchdiffeq"] = package_named(package)
    stand_in_for_torchvision()
    sys.path.insert(0, str(example.parent))
    sys.argv = [str(example), *arguments]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    start = time.process_time()
    runpy.run_path(str(example), run_name="__main__")
    return time.process_time() - start


def measure(example: Path, package: str) -> tuple[float, list[str]]:
    """The time of an example in a process of its own, and the last numbers that it printed (or its error)."""
    arguments, pattern = EXAMPLES[example.stem]
    command = [sys.executable, "-m", "benchmarks.torchdiffeq_examples", "--run", str(example), package, *arguments]
    root = Path(__file__).parents[1]
    environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        return float("nan"), done.stderr.splitlines()[-1:]
    *lines, last = done.stdout.splitlines()
    found = [x for line in [*done.stderr.splitlines(), *lines] for x in re.findall(pattern, line)]
    return json.loads(last)["seconds"], found[-4:]


def main() -> int:
    parser = argparse.ArgumentParser(description="torchdiffeq's examples on torchmali.torchdiffeq.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for name in EXAMPLES:
        if options.only not in name:
            continue
        example = (options.checkout / "examples" / f"{name}.py").resolve()
        times: dict[str, list[float]] = {package: [] for package in PACKAGES}
        for _ in range(options.rounds):
            for package in PACKAGES:
                seconds, numbers = measure(example, package)
                times[package].append(seconds)
                if len(times[package]) == 1:
                    print(f"{name:15}{package:14}{numbers}", flush=True)
        for package in PACKAGES[1:]:
            ratios = [a / b for a, b in zip(times[package], times["torchdiffeq"], strict=True)]
            print(f"{name:15}{package:14}time / torchdiffeq's {statistics.median(ratios):.2f}  {times}", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        taken = run(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
        print(json.dumps({"seconds": taken}))
    else:
        sys.exit(main())
