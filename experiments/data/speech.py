"""Speech Commands: one-second clips of ten words, as waves or as MFCCs, and splits of them.

The MFCCs are those of torchaudio with log_mels=True, n_mfcc=20, n_fft=200 and 64 mels, written out here because
torchaudio is not always there.
"""

from __future__ import annotations

import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.data.source import DataError, Source, read_npz, shape_of

try:
    from sklearn.model_selection import train_test_split
except ImportError:
    train_test_split = None  # pyright: ignore[reportAssignmentType]

WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")  # in the order of their labels
RATE = 16_000  # samples per second, and per clip
N_FFT, HOP, N_MELS, N_COEFFICIENTS = 200, 100, 64, 20
N_FRAMES = RATE // HOP + 1

HOME = "download.tensorflow.org/data/speech_commands_v0.02.tar.gz (described in arXiv 1804.03209)"
WITHOUT = "the presets on scikit-learn's digits"
CLIPS = Source(
    name="Speech Commands",
    files=f"SpeechCommands/speech_commands_v0.0{{1,2}}/<word>/<clip>.wav with the words {', '.join(WORDS)}",
    home=HOME,
    without=WITHOUT,
)
TABLE = Source(
    name="The table of MFCCs of Speech Commands",
    files="SpeechCommands/mfcc_10k.npz with mfcc, label and split",
    home=f"no place of its own; it is computed from the clips at {HOME}",
    without=WITHOUT,
)


@dataclass(frozen=True)
class Clips:
    """Paths of the clips, by label and then by file name; nothing is read yet."""

    version: str
    paths: tuple[Path, ...]
    labels: Tensor  # int64; (clip,)

    def __len__(self) -> int:
        return len(self.paths)


@dataclass(frozen=True)
class Features:
    mfcc: Tensor  # float32; (clip, frame, coefficient) = (n, 161, 20)
    labels: Tensor  # int64; (clip,)
    paths: tuple[Path, ...]
    n_dropped: int  # clips that are not exactly one second long

    def __len__(self) -> int:
        return len(self.labels)


class Split(NamedTuple):
    """Rows of each part."""

    train: Tensor
    validation: Tensor
    test: Tensor


@dataclass(frozen=True)
class Table:
    mfcc: Tensor  # float32; (clip, frame, coefficient) = (n, 161, 20)
    labels: Tensor  # int64; (clip,)
    split: Split  # no speaker is in two parts


def find(folder: Path | None, version: str | None = None) -> Clips:
    """Find the clips of a version, "0.01" or "0.02"; of the newest if none is given."""
    pattern = f"speech_commands_v{version or '0.0*'}"
    places = [] if folder is None else sorted(p for p in (folder / "SpeechCommands").glob(pattern) if p.is_dir())
    if not places:
        raise CLIPS.missing(folder, f"there is no folder SpeechCommands/{pattern}")
    place = places[-1]
    paths, labels = [], []
    for label, word in enumerate(WORDS):
        found = sorted((place / word).glob("*.wav"))
        if not found:
            raise CLIPS.missing(folder, f"{place.name}/{word} has no clips")
        paths += found
        labels += [label] * len(found)
    return Clips(place.name.removeprefix("speech_commands_v"), tuple(paths), torch.tensor(labels))


def read(path: Path) -> np.ndarray | None:
    """Read a clip as int16 (16000,); return None if it is longer or shorter."""
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, n, *_ = file.getparams()
            content = file.readframes(n)
    except (OSError, EOFError, wave.Error) as error:
        raise CLIPS.damaged(path, f"in {path.parent.name} is not a wave file ({error})") from None
    if (channels, width, rate) != (1, 2, RATE):
        found = f"{channels} channel(s) of {8 * width} bit at {rate} Hz"
        raise CLIPS.damaged(path, f"in {path.parent.name} has {found}; it must be 1 channel of 16 bit at {RATE} Hz")
    if len(content) != 2 * n:
        raise CLIPS.damaged(path, f"in {path.parent.name} ends after {len(content) // 2} of {n} samples")
    return np.frombuffer(content, "<i2").astype(np.int16) if n == RATE else None


def features(clips: Clips, batch: int = 256, tell: Callable[[int, int], None] = lambda done, of: None) -> Features:
    """Read all clips, drop those that are not one second long, compute MFCCs a batch at a time."""
    kept, parts = [], []
    for first in range(0, len(clips), batch):
        rows = range(first, min(first + batch, len(clips)))
        waves = {row: samples for row in rows if (samples := read(clips.paths[row])) is not None}
        if waves:
            kept += waves
            parts.append(mfcc(torch.from_numpy(np.stack(list(waves.values())))))
        tell(rows.stop, len(clips))
    if not kept:
        raise CLIPS.damaged(clips.paths[0], f"and the other {len(clips) - 1} clips are none of them one second long")
    paths = tuple(clips.paths[row] for row in kept)
    return Features(torch.cat(parts), clips.labels[kept], paths, len(clips) - len(kept))


def mfcc(waves: Tensor) -> Tensor:
    """Compute MFCCs, float32 (clip, frame, 20), of waves (clip, sample), int16 or in [-1, 1]; 161 frames for 16000.

    The steps are the power of the short-time Fourier transform, 64 mel filters, logarithm, discrete cosine transform;
    all in float64, because the logarithm of a quiet band shows the round-off of a loud one.
    """
    scale = 2.0**15 if waves.dtype == torch.int16 else 1.0
    window = torch.hann_window(N_FFT, periodic=True, dtype=torch.float64)
    spectrum = torch.stft(waves.double() / scale, N_FFT, HOP, window=window, pad_mode="reflect", return_complex=True)
    power = spectrum.real.square() + spectrum.imag.square()  # (clip, frequency, frame)
    mels = torch.log(power.mT @ mel_filters() + 1e-6)
    return (mels @ cosines()).float()


def mel_filters() -> Tensor:
    """Mel filters (frequency, mel): triangles between neighbours of 66 points, equally spaced in HTK's mel, 0 to 8 kHz.

    mel(f) = 2595 log10(1 + f / 700). A triangle is 1 at its middle, whatever its area. Two are so narrow that they hold
    no frequency of a transform of 200 samples: those columns are zero, as in torchaudio.
    """
    top = 2595.0 * np.log10(1.0 + RATE / 2 / 700.0)
    points = 700.0 * (10.0 ** (torch.linspace(0.0, top, N_MELS + 2, dtype=torch.float64) / 2595.0) - 1.0)
    frequencies = torch.linspace(0.0, RATE / 2, N_FFT // 2 + 1, dtype=torch.float64)[:, None]
    left, middle, right = points[:-2], points[1:-1], points[2:]
    rising, falling = (frequencies - left) / (middle - left), (right - frequencies) / (right - middle)
    return torch.minimum(rising, falling).clamp_min(0.0)


def cosines() -> Tensor:
    """Matrix (mel, coefficient) of the first 20 columns of the orthonormal DCT-II."""
    k = torch.arange(N_COEFFICIENTS, dtype=torch.float64)
    m = torch.arange(N_MELS, dtype=torch.float64)[:, None]
    matrix = torch.cos(torch.pi / N_MELS * (m + 0.5) * k) * (2.0 / N_MELS) ** 0.5
    matrix[:, 0] /= 2.0**0.5
    return matrix


def load_table(folder: Path | None) -> Table:
    """Load 10,000 clips of v0.01 whose MFCCs were computed before; split by speaker."""
    path = None if folder is None else folder / "SpeechCommands" / "mfcc_10k.npz"
    if path is None or not path.is_file():
        raise TABLE.missing(folder)
    values, label, split = read_npz(path, ("mfcc", "label", "split"), TABLE)
    if values.dtype.kind != "f" or values.shape[1:] != (N_FRAMES, N_COEFFICIENTS) or not len(values):
        raise TABLE.damaged(path, f"has {shape_of(values)} as mfcc, not floats (n, {N_FRAMES}, {N_COEFFICIENTS})")
    for name, numbers, n in (("label", label, len(WORDS)), ("split", split, 3)):
        if numbers.dtype.kind not in "iu" or numbers.shape != values.shape[:1]:
            raise TABLE.damaged(path, f"has {shape_of(numbers)} as {name}, not {len(values)} integers")
        if numbers.min() < 0 or numbers.max() >= n:
            raise TABLE.damaged(path, f"has values in {name} that are not from 0 to {n - 1}")
    if not np.isfinite(values).all():
        raise TABLE.damaged(path, "has values in mfcc that are not finite")
    rows = Split(*(torch.from_numpy(np.flatnonzero(split == part)) for part in range(3)))
    return Table(torch.from_numpy(values.astype(np.float32)), torch.from_numpy(label.astype(np.int64)), rows)


def random_split(labels: Tensor) -> Split:
    """Split 70 / 15 / 15 %, each word in proportion: scikit-learn's split with random states 0 and 1, as published.

    The published code takes files in the order of the file system; here they are sorted, so the parts are not the same
    clips, but they are the same on every machine. Speakers are in several parts.
    """
    if train_test_split is None:
        raise DataError("The split is scikit-learn's, which is not installed: pip install scikit-learn.")
    y, rows = labels.numpy(), np.arange(len(labels))
    try:
        train, rest = train_test_split(rows, train_size=0.7, random_state=0, stratify=y)
        validation, test = train_test_split(rest, train_size=0.5, random_state=1, stratify=y[rest])
    except ValueError as error:
        raise DataError(f"{len(labels)} clips cannot be split by word into 70 / 15 / 15 %: {error}") from None
    return Split(*(torch.from_numpy(part) for part in (train, validation, test)))


def speaker_split(paths: Sequence[Path], seed: int) -> Split:
    """Split clips into about 70 / 15 / 15 %; no speaker is in two parts."""
    speakers = [speaker_of(path) for path in paths]
    names = sorted(set(speakers))
    if len(names) < 3:
        raise DataError(f"{len(names)} speaker(s) cannot be split into three parts; at least 3 are needed.")
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    n_clips = dict.fromkeys(names, 0)
    for speaker in speakers:
        n_clips[speaker] += 1
    part_of, before = {}, 0
    for place, name in enumerate(names[i] for i in order):
        # The middle of a speaker's clips says which part they go to; the first three make sure that no part is empty.
        middle = (before + n_clips[name] / 2) / len(paths)
        part_of[name] = place if place < 3 else int(middle >= 0.7) + int(middle >= 0.85)
        before += n_clips[name]
    parts = torch.tensor([part_of[speaker] for speaker in speakers])
    return Split(*((parts == part).nonzero().flatten() for part in range(3)))


def speaker_of(path: Path) -> str:
    speaker, mark, _ = path.name.partition("_nohash_")
    if not (speaker and mark):
        raise CLIPS.damaged(path, "does not name its speaker, as <speaker>_nohash_<number>.wav does")
    return speaker
