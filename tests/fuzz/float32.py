"""How exact MALI's gradients are in float32, and how often it warns in vain: a study over random problems.

    python -m tests.fuzz float32 --problems 1000 --record tests/fuzz/records/float32.jsonl

For each problem, all numbers relative 2-norms over all gradients together (y0 and parameters):

    g_aca     ACA's gradient, on the same accepted steps
    error     |g_mali - g_aca| of MALI() as a user gets it, with its warnings
    bare      |g_bare - g_aca| of MALI(checkpoint_every=None): nothing is solved again
    u         the effect of one ulp in y0: the largest |g(y0 (1 +- eps)) - g_aca| over 8 random patterns of signs
    bound     10 max(u, eps sqrt(N)), eps = 2^-23, N the number of accepted steps

A miss: error > bound and no warning. A false alarm: any SolverWarning although bare <= bound. Patterns that make an
adaptive controller take another number of steps (or refreshes) say nothing of rounding and are left out of u, unless
all of them do.

The record is a line of JSON with a header, one for each problem (a list of the values of COLUMNS), one with a summary.
`load` reads it.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

import torchmali as tm
from experiments.engine.record import made_with

from . import systems

EPS = 2.0**-23
FACTOR = 10
N_PATTERNS = 8
WEIGHTS = {"network": 40, "physics": 25, "clock": 20, "chaos": 15}  # per cent of the problems
ACTIVATIONS = [nn.Tanh, nn.Softplus, nn.GELU, nn.SiLU, nn.ReLU, nn.ELU, nn.Sigmoid]
NETWORK_FORMS = ["(B,)", "(1, B)", "(B, C)", "(B, C)", "(B, C)", "0-d", "tuple"]


@dataclass
class Problem:
    """A random float32 problem. about: what was drawn, as text and numbers for the record."""

    about: dict[str, Any]
    func: nn.Module
    y0: Any
    times: list[float]
    solver: tm.ALF
    controller: tm.StepController
    sizes: Any  # of y0's structure: the loss divides by them
    seed: int

    def gradient(self, method: tm.GradientMethod, y0: Any = None) -> Gradient:
        """Solve and differentiate a loss that looks at the end, or at all outputs."""
        y0 = pytree.tree_map(lambda z: z.detach().clone().requires_grad_(), self.y0 if y0 is None else y0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            solution = tm.solve(
                self.func, y0, self.times, solver=self.solver, controller=self.controller, gradient=method
            )
            inputs = [*pytree.tree_leaves(y0), *self.func.parameters()]
            grads = torch.autograd.grad(self._loss(solution.y), inputs, allow_unused=True)
        told = [str(w.message) for w in caught if issubclass(w.category, tm.SolverWarning)]
        g = torch.cat(
            [x.new_zeros(x.numel()) if g is None else g.flatten() for x, g in zip(inputs, grads, strict=True)]
        )
        n_state = sum(z.numel() for z in pytree.tree_leaves(y0))
        return Gradient(g.double(), n_state, solution.stats, told)

    def _loss(self, y: Any) -> Tensor:
        rng, total = torch.Generator().manual_seed(self.seed + 1), torch.zeros(())
        for z, size in zip(pytree.tree_leaves(y), pytree.tree_leaves(self.sizes), strict=True):
            x = (z if self.about["loss"] == "all" else z[-1:]) / size
            total = total + (torch.randn(x.shape, generator=rng) * x + 0.5 * x * x).sum()
        return total


@dataclass
class Gradient:
    """A gradient as one vector (y0 first), with counts and warnings."""

    g: Tensor
    n_state: int
    stats: tm.Stats
    told: list[str]

    def off(self, other: Gradient) -> float:
        """Relative difference from another gradient."""
        return _relative(self.g, other.g)


def _relative(x: Tensor, y: Tensor) -> float:
    size = y.norm().item()
    return (x - y).norm().item() / size if size else (0.0 if x.norm().item() == 0 else math.inf)


class Network(nn.Module):
    """A network of one or two hidden layers on the last dimension, of all leaves together."""

    def __init__(self, width: int, hidden: int, depth: int, activation: type[nn.Module], gain: float, uses_t: bool):
        super().__init__()
        sizes = [width + uses_t, *[hidden] * depth]
        layers = [x for a, b in zip(sizes, sizes[1:], strict=False) for x in (nn.Linear(a, b), activation())]
        self.net, self.uses_t, self.gain = nn.Sequential(*layers, nn.Linear(sizes[-1], width)), uses_t, gain

    def forward(self, t: Tensor, y: Any) -> Any:
        leaves = [y] if isinstance(y, Tensor) else list(y)
        x = torch.cat([z.reshape(-1) if z.ndim == 0 else z for z in leaves], -1)
        x = torch.cat([x, t.expand(*x.shape[:-1], 1)], -1) if self.uses_t else x
        u = self.gain * self.net(x)
        if isinstance(y, Tensor):
            return u.reshape(y.shape)
        return tuple(u.split([z.shape[-1] for z in leaves], -1))


class BesideClock(nn.Module):
    """A network on all channels but the last, which counts by `rate` per unit of time."""

    def __init__(self, net: Network, rate: float):
        super().__init__()
        self.net, self.rate = net, rate

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return torch.cat([self.net(t, y[..., :-1]), torch.full_like(y[..., -1:], self.rate)], -1)


def make(seed: int) -> Problem:
    """Draw the problem of this seed."""
    rng = Random(seed)
    family = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        learned = family == "network" or (family == "clock" and rng.random() < 0.4)
        func, y0, sizes, span, about = (_network if learned else _system)(rng, family)
    order = rng.choice([2, 2, 2, 4, 6])
    n_out = rng.choice([2, 2, 3, 5, 9])
    times = [span * k / (n_out - 1) for k in range(n_out)]
    adaptive = rng.random() < 0.5
    if adaptive:
        rtol = 10 ** rng.uniform(*{2: (-4, -1.5), 4: (-4.8, -2), 6: (-4.8, -2)}[order])  # above 100 eps
        controller: tm.StepController = tm.AdaptiveStep(rtol, rtol, max_steps=1500 if order == 2 else 200)
    else:
        n = _n_steps(rng, order, span * systems.RATES.get(about["field"], 1.0), learned)
        rtol, controller = None, tm.FixedStep(span / n)
    loss = rng.choice(["end", "all"])
    about = {"seed": seed, "family": family, **about, "span": span, "order": order, "n_out": n_out, "rtol": rtol}
    return Problem({**about, "loss": loss}, func, y0, times, tm.ALF(order), controller, sizes, seed)


def _n_steps(rng: Random, order: int, span: float, learned: bool) -> int:
    """Draw a number of fixed steps that follow the solution, coarsely or finely. span: in units of the system."""
    if learned:
        return round(10 ** rng.uniform(*{2: (1.3, 2.7), 4: (0.7, 1.6), 6: (0.5, 1.4)}[order]))
    low, high, most = {2: (4.0, 30.0, 1000), 4: (0.8, 4.0, 150), 6: (0.5, 2.5, 80)}[order]
    return min(most, max(3, round(span * math.exp(rng.uniform(math.log(low), math.log(high))))))


def _network(rng: Random, family: str) -> tuple[nn.Module, Any, Any, float, dict[str, Any]]:
    forms = NETWORK_FORMS[:3] if family == "clock" else NETWORK_FORMS
    form, width, depth = rng.choice(forms), rng.choice([8, 16, 32, 64, 128]), rng.choice([1, 1, 2])
    activation, gain, batch = rng.choice(ACTIVATIONS), 10 ** rng.uniform(-0.5, 0.9), rng.choice([1, 4, 16])
    channels = {"0-d": 1}.get(form, width)
    func = Network(channels, width, depth, activation, gain, rng.random() < 0.5)
    shapes: Any = {"(B,)": (width,), "(1, B)": (1, width), "(B, C)": (batch, width), "0-d": ()}.get(form)
    y0 = torch.randn(shapes) if shapes is not None else tuple(torch.randn(batch, width // 2) for _ in range(2))
    about = {"field": "network", "form": form, "activation": activation.__name__, "width": width, "gain": gain}
    span, sizes = rng.uniform(1, 10), pytree.tree_map(torch.ones_like, y0)
    if family == "clock":
        assert isinstance(y0, Tensor)
        clock = 10 ** rng.uniform(2, 6)
        func = BesideClock(func, rng.choice([1.0, clock / span]))
        y0, sizes = (torch.cat([x, torch.full_like(x[..., :1], size)], -1) for x, size in ((y0, clock), (sizes, clock)))
        about["clock"] = clock
    return func, y0, sizes, span, about


def _system(rng: Random, family: str) -> tuple[nn.Module, Any, Any, float, dict[str, Any]]:
    form, batch, clock = rng.choice(systems.FORMS), rng.choice([2, 4, 8]), None
    if family == "physics":
        draw, span = rng.choice(systems.PHYSICS), rng.uniform(1, 10)
    elif family == "chaos":
        draw, (low, high) = rng.choice(list(systems.CHAOTIC.items()))
        span = rng.uniform(low, high)
    else:
        draw, span = rng.choice(systems.OSCILLATORS), 10 ** rng.uniform(0.5, 1.9)
    states = [draw(Random(rng.random())) for _ in range(batch)]  # the rows of a batch differ
    if family == "clock":
        clock = 10 ** rng.uniform(2, 6)
        rate = rng.choice([1.0, clock / span])
        depth = min(len(s.start) for s in states)
        states = [systems.beside_a_clock(s, clock, rate) for s in states if len(s.start) == depth]
    states = [s for s in states if len(s.start) == len(states[0].start)]  # chains have two to four masses
    func = systems.SystemField(states[0], form)
    y0 = systems.in_form(torch.tensor([s.start for s in states]), form)
    sizes = systems.in_form(torch.tensor([s.sizes for s in states]), form)
    return func, y0, sizes, span, {"field": draw.__name__, "form": form, "clock": clock}


def measure(seed: int) -> dict[str, Any]:
    """Measure the row of one problem; "unsolved" says why it has no gradient."""
    torch.set_num_threads(1)
    started, problem = time.perf_counter(), make(seed)
    row = dict(problem.about)
    try:
        aca = problem.gradient(tm.ACA())
        naive = problem.gradient(tm.Naive())
        bare = problem.gradient(tm.MALI(checkpoint_every=None))
        mali = problem.gradient(tm.MALI())
    except tm.SolverError as error:
        return row | {"unsolved": f"{type(error).__name__}: {str(error)[:200]}"}
    if not all(torch.isfinite(x.g).all() for x in (aca, naive)):
        return row | {"unsolved": "the gradient is not finite"}
    n, u, u_all, n_same = mali.stats.n_steps, 0.0, 0.0, 0
    for moved in moved_by_an_ulp(problem.y0, seed, N_PATTERNS):
        try:
            other = problem.gradient(tm.ACA(), moved)
        except tm.SolverError:
            continue
        effect, u_all = other.off(aca), max(u_all, other.off(aca))
        if (other.stats.n_steps, other.stats.n_refreshes) == (n, aca.stats.n_refreshes):
            u, n_same = max(u, effect), n_same + 1
    u = u if n_same else u_all
    bound, k = FACTOR * max(u, EPS * math.sqrt(n)), mali.n_state
    return row | {
        "n_steps": n,
        "n_refreshes": mali.stats.n_refreshes,
        "u": u,
        "u_any_grid": u_all,
        "n_same_grid": n_same,
        "bound": bound,
        "error": mali.off(aca),
        "bare": bare.off(aca),
        "aca_error": aca.off(naive),
        "error_y0": _relative(mali.g[:k], aca.g[:k]),
        "bare_y0": _relative(bare.g[:k], aca.g[:k]),
        "drift": mali.stats.reconstruction_error,
        "bare_drift": bare.stats.reconstruction_error,
        "n_reruns": mali.stats.n_reruns,
        "told": [kind_of(text) for text in mali.told],
        "bare_told": [kind_of(text) for text in bare.told],
        "seconds": round(time.perf_counter() - started, 3),
    }


def moved_by_an_ulp(y0: Any, seed: int, n: int) -> Iterator[Any]:
    """Yield y0 (1 +- eps) with n random patterns of signs."""
    rng = torch.Generator().manual_seed(seed + 2)
    for _ in range(n):
        yield pytree.tree_map(
            lambda z: z * (1 + torch.finfo(z.dtype).eps * (2.0 * torch.randint(0, 2, z.shape, generator=rng) - 1)), y0
        )


def kind_of(warning: str) -> str:
    """Return a warning without its numbers: its first eight words and whether it reports a second solve."""
    again = " (solved again)" if "solved again" in warning else ""
    words = ["#" if any(c.isdigit() for c in word) else word for word in warning.split()[:8]]
    return " ".join(words) + again


def is_miss(row: dict[str, Any]) -> bool:
    return not row["told"] and not row["error"] <= row["bound"]


def is_false_alarm(row: dict[str, Any]) -> bool:
    return bool(row["told"]) and row["bare"] <= row["bound"]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return counts and quantiles of the solved problems, altogether and by family."""
    solved = [row for row in rows if "unsolved" not in row]
    families = sorted({row["family"] for row in solved})
    return {
        **_counts(solved),
        "unsolved": dict(Counter(row["unsolved"].split(":")[0] for row in rows if "unsolved" in row)),
        "missed": [row["seed"] for row in solved if is_miss(row)],
        "false alarms": [row["seed"] for row in solved if is_false_alarm(row)],
        "warnings": dict(Counter(told for row in solved for told in row["told"])),
        "quantiles": {name: _quantiles([row[name] for row in solved]) for name in QUANTITIES},
        "families": {name: _counts([row for row in solved if row["family"] == name]) for name in families},
    }


COLUMNS = ["seed", "family", "field", "form", "activation", "width", "gain", "clock", "span", "order", "n_out", "rtol"]
COLUMNS += ["loss", "n_steps", "n_refreshes", "u", "n_same_grid", "bound", "error", "bare", "aca_error", "error_y0"]
COLUMNS += ["bare_y0", "drift", "bare_drift", "n_reruns", "told", "unsolved"]
QUANTITIES = ("error", "bare", "aca_error", "drift", "u", "bound")


def _counts(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    n = max(1, len(rows))
    reruns = [row for row in rows if row["n_reruns"]]
    return {
        "problems": len(rows),
        "misses": sum(map(is_miss, rows)),
        "share of false alarms": sum(map(is_false_alarm, rows)) / n,
        "share of warnings": sum(bool(row["told"]) for row in rows) / n,
        "share of reruns with a warning": sum(bool(row["told"]) for row in reruns) / n,
        "share of reruns without": sum(not row["told"] for row in reruns) / n,
        "needed a warning": sum(not row["bare"] <= row["bound"] for row in rows) / n,
        "warned and still off": sum(bool(row["told"]) and not row["error"] <= row["bound"] for row in rows) / n,
    }


def _quantiles(values: Sequence[float | None]) -> dict[str, float]:
    x = sorted(float(v) for v in values if v is not None)
    places = {"0.1": 0.1, "0.5": 0.5, "0.9": 0.9, "0.99": 0.99, "max": 1.0}
    return {name: float(f"{x[min(len(x) - 1, int(q * len(x)))]:.3g}") for name, q in places.items()} if x else {}


def load(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the header of a record and the rows of its problems, unsolved ones included, as dictionaries by column."""
    header, *rows = map(json.loads, Path(path).read_text().splitlines())
    names = header["header"]["columns"]
    named = [dict(zip(names, row, strict=True)) for row in rows if isinstance(row, list)]
    solved = [{k: x for k, x in row.items() if k != "unsolved"} if not row["unsolved"] else row for row in named]
    return header["header"], solved


def write(path: Path, header: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write a record with three digits of each number."""
    lines: list[Any] = [{"header": header | {"columns": COLUMNS}}]
    for row in rows:
        values = [row.get(name) for name in COLUMNS]
        lines.append([float(f"{x:.3g}") if isinstance(x, float) else x for x in values])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, [*lines, {"summary": summary(rows)}])) + "\n")


def study(n: int, first: int, jobs: int) -> Iterator[dict[str, Any]]:
    """Yield rows of problems first, first + 1, ..., until n of them were solved."""
    seeds = iter(range(first, first + 10 * n))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        solved = 0
        for row in map(measure, seeds) if jobs == 1 else pool.imap(measure, seeds, chunksize=1):
            yield row
            solved += "unsolved" not in row
            if solved == n:
                pool.terminate()
                return


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz float32", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=1000, help="number of solved problems")
    parser.add_argument("--seed", type=int, default=0, help="number of the first problem")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--only", type=int, help="print the row of this problem, and stop")
    parser.add_argument("--record", type=Path, help="file of JSON lines")
    options = parser.parse_args(words)
    if options.only is not None:
        print(json.dumps(measure(options.only), indent=1))
        return
    started, rows = time.perf_counter(), []
    how = f"python -m tests.fuzz float32 --problems {options.problems} --seed {options.seed}"
    definitions = {"eps": EPS, "factor": FACTOR, "patterns": N_PATTERNS, "N": "accepted steps", "text": __doc__}
    header = {"command": how, "definitions": definitions, **made_with()}
    for row in study(options.problems, options.seed, options.jobs):
        rows.append(row)
        if "unsolved" not in row and is_miss(row):
            print(f"\rmiss: {row['seed']} ({row['field']}), off {row['error']:.2g}, bound {row['bound']:.2g}")
        if len(rows) % 20 == 0:
            print(f"\r{len(rows)} problems, {time.perf_counter() - started:.0f} s", end="", flush=True)
    print("\n" + json.dumps(summary(rows), indent=1))
    if options.record:
        write(options.record, header, rows)


if __name__ == "__main__":
    main()
