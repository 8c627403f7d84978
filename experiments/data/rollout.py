"""Simulation of Hopper in MuJoCo: one chunk of trajectories, in any process.

The model is dm_control's, read from its installed package without importing it, which would need a screen. This module
does without torch, which would take seconds to start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.data.source import DataError, write_npy

try:
    import mujoco
    import mujoco.rollout

    MISSING = ""
except ImportError as error:
    MISSING = str(error)

INSTALL = (
    "Simulating Hopper needs MuJoCo and the model that comes with dm_control: pip install mujoco dm_control. "
    "Or put the trajectories at HopperPhysics/training.npy in the data folder."
)
PARTS = ("skybox", "visual", "materials")
N_POSITIONS, N_CHANNELS = 7, 14


class Model(NamedTuple):
    """Model of Hopper: hopper.xml, the files that it includes, and the versions that give the same numbers."""

    text: str
    parts: dict[str, bytes]
    made_by: str


def model() -> Model:
    if MISSING:
        raise DataError(f"MuJoCo cannot be imported ({MISSING}). {INSTALL}")
    spec = importlib.util.find_spec("dm_control")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        raise DataError(f"dm_control is not installed. {INSTALL}")
    suite = Path(places[0]) / "suite"
    try:
        text = (suite / "hopper.xml").read_bytes()
        parts = {f"common/{name}.xml": (suite / "common" / f"{name}.xml").read_bytes() for name in PARTS}
    except OSError as error:
        raise DataError(f"dm_control is installed without its Hopper: {error}. {INSTALL}") from None
    digest = hashlib.sha256(b"".join([text, *parts.values()])).hexdigest()[:8]
    return Model(text.decode(), parts, f"mujoco-{mujoco.__version__}-{digest}")


def chunk(path: Path, start: np.ndarray, length: int, dtype: str) -> None:
    """Simulate from each row of start and write (trajectory, time, channel), unless it is there already."""
    if not path.exists():
        write_npy(path, trajectories(start, length).astype(dtype))


def trajectories(start: np.ndarray, length: int) -> np.ndarray:
    """Simulate from start (trajectory, channel). `mujoco.rollout` gives the same bits as single steps, in less time."""
    text, parts, _ = model()
    engine: Any = mujoco  # its type hints are incomplete
    hopper = engine.MjModel.from_xml_string(text, parts)
    if (hopper.nq, hopper.nv, hopper.na) != (N_POSITIONS, N_POSITIONS, 0):
        raise DataError(f"dm_control's Hopper has {hopper.nq} positions and {hopper.nv} speeds, not 7 and 7. {INSTALL}")
    clock = np.zeros((len(start), 1))
    steps, _ = engine.rollout.rollout(
        hopper, engine.MjData(hopper), np.concatenate([clock, start], 1), nstep=length - 1
    )
    # MuJoCo stops or restarts, with only a warning, where a state becomes too large: the clock shows it.
    times = np.arange(1, length) * hopper.opt.timestep
    states = steps[..., 1 : 1 + N_CHANNELS]
    if np.abs(steps[..., 0] - times).max() > 1e-9 or not np.isfinite(states).all():
        raise DataError("MuJoCo gave up on a trajectory: its state became too large.")
    return np.concatenate([start[:, None], states], 1)


def end_with_parent() -> None:
    """End this process when its parent has ended: a killed parent cannot end its children."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
