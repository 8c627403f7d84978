"""Base of all loaders: the data folder, errors that say what to do, files that are complete or not there.

This module needs NumPy only, so that the processes that simulate start quickly.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

VARIABLE = "TORCHMALI_DATA"


class DataError(Exception):
    """Data that is missing or damaged; the message says which files, where to get them, and what works without."""


@dataclass(frozen=True)
class Images:
    """Images with labels. found: their number, in words, where a part of a data set is enough."""

    images: Tensor  # uint8; (image, row, column) or (image, channel, row, column)
    labels: Tensor  # int64; (image,)
    found: str = ""

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Source:
    """A data set: its files under the data folder, its home page, and what can be run without it."""

    name: str
    files: str
    home: str
    without: str

    def missing(self, folder: Path | None, what: str = "") -> DataError:
        """Error for missing data. what: the part that is missing, when the rest is there."""
        if folder is None:
            where = f"but no data folder is given. Use --data-dir, or set {VARIABLE}"
        elif not folder.is_dir():
            where = f"but the data folder {folder} does not exist"
        else:
            where = f"under {folder}, which is the data folder"
        return DataError(f"{self.name} is missing{what and ': ' + what}. {self._looked_for(where)}")

    def damaged(self, path: Path, why: str) -> DataError:
        where = f"and the damaged file is {path}. Delete it and fetch it again"
        return DataError(f"{self.name} is damaged: {path.name} {why}. {self._looked_for(where)}")

    def _looked_for(self, where: str) -> str:
        return f"Looked for {self.files}, {where}. Published at {self.home}. Works without it: {self.without}."


def data_dir(given: str | Path | None) -> Path | None:
    """Return the folder with the data sets: that of --data-dir, or else of TORCHMALI_DATA, or else None."""
    place = given or os.environ.get(VARIABLE)
    return Path(place).expanduser() if place else None


def read_npy(path: Path, damaged: Callable[[Path, str], DataError]) -> np.ndarray:
    """Read an array; never runs code: arrays of Python objects are refused."""
    try:
        with path.open("rb") as file:  # np.load would leave a damaged file open
            array = np.load(file, allow_pickle=False)
            if isinstance(array, np.ndarray):
                return array
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        raise damaged(path, f"is not a whole .npy file ({error})") from None
    raise damaged(path, "is an .npz archive, not a .npy file")


def read_npz(path: Path, names: Sequence[str], source: Source) -> list[np.ndarray]:
    """Read the named arrays of an archive; never runs code."""
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise source.damaged(path, "is a single array, not an .npz archive")
            lacking = [name for name in names if name not in archive]
            if lacking:
                raise source.damaged(path, f"lacks {', '.join(lacking)}; it has {', '.join(archive)}")
            return [archive[name] for name in names]
    except (OSError, EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise source.damaged(path, f"is not a whole .npz archive ({error})") from None


def write_npy(path: Path, array: np.ndarray) -> None:
    """Write an array under another name first: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")
    try:
        with draft.open("wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def shape_of(array: np.ndarray) -> str:
    return f"{array.dtype} {tuple(array.shape)}"
