"""MuJoCo's Hopper, thrown at random and left to fall: the data set of the latent ODE, simulated or read.

A trajectory has 14 channels, 7 positions and 7 speeds, every 0.005 s. The numbers depend on MuJoCo's version: they are
equal in distribution to those of 2019, not bit by bit.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.data import rollout
from experiments.data.source import DataError, Source, read_npy, shape_of

SOURCE = Source(
    name="The Hopper data set",
    files="HopperPhysics/training.npy (n, 200, 14)",
    home="www.cs.toronto.edu/~rtqichen/datasets/HopperPhysics (training.pt; save its tensor with NumPy)",
    without="the simulated Hopper, with mujoco and dm_control installed",
)
CHUNK = 250  # trajectories that are simulated and kept together
LENGTH, N_CHANNELS = 200, rollout.N_CHANNELS

Tell = Callable[[int, int], None]


class Observed(NamedTuple):
    """Observations (trajectory, time, channel): values, zero where not observed; mask, 1 where observed."""

    values: Tensor
    mask: Tensor


def simulate(
    n: int = 10_000,
    length: int = LENGTH,
    seed: int = 123,
    processes: int = 2,
    *,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    tell: Tell = lambda done, of: None,
) -> Tensor:
    """Simulate n trajectories (n, length, 14), or read those that are in the cache in `folder`.

    Finished chunks stay when the process is killed, and are not simulated again. tell: called with the number of
    trajectories that are done, and n. A process that may not have children simulates in itself.
    """
    if n < 1 or length < 2 or processes < 1:
        raise ValueError(f"n = {n}, length = {length}, processes = {processes}: at least 1, 2 and 1 are needed.")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"Trajectories are float32 or float64, not {dtype}.")
    kind = str(dtype).removeprefix("torch.")
    place = folder / f"hopper-{rollout.model().made_by}-seed-{seed}-length-{length}-{kind}"
    _sweep(place)
    start = starts(-(-n // CHUNK) * CHUNK, seed)
    chunks = {place / f"{i:06d}.npy": start[i : i + CHUNK] for i in range(0, len(start), CHUNK)}
    missing = {path: rows for path, rows in chunks.items() if not path.exists()}
    done = len(chunks) - len(missing)
    tell(min(done * CHUNK, n), n)
    n_workers = min(processes, len(missing))
    if n_workers < 2 or multiprocessing.current_process().daemon:
        for path, rows in missing.items():
            rollout.chunk(path, rows, length, kind)
            done += 1
            tell(min(done * CHUNK, n), n)
    else:
        spawn = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        with ProcessPoolExecutor(n_workers, spawn, initializer=rollout.end_with_parent) as pool:
            jobs = [pool.submit(rollout.chunk, path, rows, length, kind) for path, rows in missing.items()]
            try:
                for job in as_completed(jobs):
                    job.result()
                    done += 1
                    tell(min(done * CHUNK, n), n)
            except BrokenProcessPool:
                raise DataError(
                    "A process that simulated Hopper died. Finished chunks are kept: start again."
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)
    return torch.from_numpy(np.concatenate([_cached(path, length, kind) for path in chunks])[:n])


def starts(n: int, seed: int) -> np.ndarray:
    """Draw initial states (n, 14) in the published order, one trajectory after the other."""
    random = np.random.RandomState(seed)
    return np.stack(
        [
            np.concatenate([random.uniform(0, 0.5, 2), random.uniform(-2, 2, 5), random.uniform(-5, 5, 7)])
            for _ in range(n)
        ]
    )


def load(folder: Path | None) -> Tensor:
    """Load the data folder's trajectories, (n, 200, 14), in the float32 or float64 of the file."""
    path = None if folder is None else folder / "HopperPhysics" / "training.npy"
    if path is None or not path.is_file():
        raise SOURCE.missing(folder)
    array = read_npy(path, SOURCE.damaged)
    if array.dtype not in (np.float32, np.float64) or array.shape[1:] != (LENGTH, N_CHANNELS) or not len(array):
        raise SOURCE.damaged(path, f"has {shape_of(array)}, not floats (n, {LENGTH}, {N_CHANNELS})")
    if not np.isfinite(array).all():
        raise SOURCE.damaged(path, "has values that are not finite")
    return torch.from_numpy(array)


def normalise(x: Tensor) -> Tensor:
    """Scale each channel to (x - min) / max over all trajectories and times.

    The published code divides by max, not by max - min, and the published errors are in these units. Normalise before
    taking a part of the trajectories.
    """
    low, high = x.amin((0, 1)), x.amax((0, 1))
    return (x - low) / torch.where(high == 0, torch.ones_like(high), high)


def windows(x: Tensor, random: np.random.RandomState, length: int = 100) -> Tensor:
    """Cut a random window from each trajectory. The published windows are those of RandomState(1991)."""
    n, n_times = x.shape[:2]
    if not 0 < length <= n_times:
        raise ValueError(f"A window of {length} does not fit into {n_times} times.")
    first = torch.from_numpy(random.randint(0, n_times - length + 1, size=n))
    return x[torch.arange(n)[:, None], first[:, None] + torch.arange(length)]


def times(length: int = 100, of: int = LENGTH) -> Tensor:
    """Return the first `length` of 0, 1/of, 2/of, ... in float64: every window starts at 0, wherever it was cut."""
    return torch.arange(length, dtype=torch.float64) / of


def train_test(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split trajectories into the first 80 % and the rest."""
    n_train = int(len(x) * 0.8)
    return x[:n_train], x[n_train:]


def observe(x: Tensor, fraction: float, generator: torch.Generator) -> Observed:
    """Keep int(fraction * times) random times of each trajectory, all channels of them; drawn anew at each call."""
    n, n_times = x.shape[:2]
    n_kept = int(n_times * fraction)
    if not 0 < n_kept <= n_times:
        raise ValueError(f"A fraction of {fraction} keeps {n_kept} of {n_times} times.")
    order = torch.rand(n, n_times, generator=generator).argsort(1)
    mask = torch.zeros(n, n_times).scatter_(1, order[:, :n_kept], 1.0)
    mask = mask[..., None].expand_as(x).to(x)
    return Observed(x * mask, mask)


def _cached(path: Path, length: int, kind: str) -> np.ndarray:
    array = read_npy(path, _spoilt)
    if array.dtype != kind or array.shape != (CHUNK, length, N_CHANNELS) or not np.isfinite(array).all():
        raise _spoilt(path, f"has {shape_of(array)}, not finite {kind} {(CHUNK, length, N_CHANNELS)}")
    return array


def _spoilt(path: Path, why: str) -> DataError:
    return DataError(f"The cache of simulated Hoppers is damaged: {path} {why}. Delete this file and start again.")


def _sweep(place: Path) -> None:
    """Delete unfinished files of killed processes; no process takes a minute to write a chunk."""
    for draft in place.glob("*.draft"):
        if time.time() - draft.stat().st_mtime > 60:
            draft.unlink(missing_ok=True)
