"""JapaneseVowels: nine speakers say two vowels; 12 LPC cepstrum coefficients, 7 to 29 frames."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.data.source import Source, read_npz, shape_of

SOURCE = Source(
    name="JapaneseVowels",
    files="JapaneseVowels/japanese_vowels.npz with {x,len,y}_{train,test}",
    home="timeseriesclassification.com (JapaneseVowels, padded with zeros to 29 frames and saved with NumPy)",
    without="the presets on scikit-learn's digits",
)
FRAMES, CHANNELS, SPEAKERS = 29, 12, 9


@dataclass(frozen=True)
class Sequences:
    x: Tensor  # float32; (sequence, frame, channel), zeros after the end
    lengths: Tensor  # int64; (sequence,)
    labels: Tensor  # int64; (sequence,)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Vowels:
    train: Sequences  # 270
    test: Sequences  # 370


def load(folder: Path | None) -> Vowels:
    path = None if folder is None else folder / "JapaneseVowels" / "japanese_vowels.npz"
    if path is None or not path.is_file():
        raise SOURCE.missing(folder)
    return Vowels(_part(path, "train"), _part(path, "test"))


def _part(path: Path, split: str) -> Sequences:
    x, lengths, labels = read_npz(path, [f"{name}_{split}" for name in ("x", "len", "y")], SOURCE)
    if x.dtype.kind != "f" or x.shape[1:] != (FRAMES, CHANNELS) or not len(x):
        raise SOURCE.damaged(path, f"has {shape_of(x)} as x_{split}, not floats (n, {FRAMES}, {CHANNELS})")
    for name, values, low, high in (("len", lengths, 1, FRAMES), ("y", labels, 0, SPEAKERS - 1)):
        if values.dtype.kind not in "iu" or values.shape != x.shape[:1]:
            raise SOURCE.damaged(path, f"has {shape_of(values)} as {name}_{split}, not {len(x)} integers")
        if values.min() < low or values.max() > high:
            raise SOURCE.damaged(path, f"has values in {name}_{split} that are not from {low} to {high}")
    after_end = np.arange(FRAMES) >= lengths[:, None]
    if not np.isfinite(x).all() or x[after_end].any():
        raise SOURCE.damaged(path, f"has values in x_{split} that are not finite, or not zero after a sequence's end")
    return Sequences(
        *(torch.from_numpy(a) for a in (x.astype(np.float32), lengths.astype(np.int64), labels.astype(np.int64)))
    )
