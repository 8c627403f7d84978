"""Every loader, on files written here in the published formats, whole and damaged; and on the real ones where they are.

The real files are found through TORCHMALI_DATA.
"""

import gzip
import importlib.util
import multiprocessing
import os
import pickle
import signal
import struct
import subprocess
import sys
import textwrap
import time
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.data import DataError, cifar, data_dir, digits, folder, hopper, mnist, rollout, source, speech, vowels

REAL = data_dir(None)


def real(place: str) -> pytest.MarkDecorator:
    there = REAL is not None and (REAL / place).exists()
    return pytest.mark.skipif(not there, reason=f"needs {place} in the folder that TORCHMALI_DATA names")


def has(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


simulates = pytest.mark.skipif(not has("mujoco", "dm_control"), reason="needs mujoco and dm_control")


def refused(load, *parts: str) -> str:
    """The load must fail with a message that has these parts."""
    with pytest.raises(DataError) as caught:
        load()
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


# Where data is


def test_the_data_folder_is_the_given_one_or_the_variables_or_none(monkeypatch):
    monkeypatch.setenv("TORCHMALI_DATA", "there")
    assert data_dir("here") == Path("here") and data_dir(Path("here")) == Path("here")
    assert data_dir(None) == Path("there")
    monkeypatch.setenv("TORCHMALI_DATA", "")
    assert data_dir(None) is None
    monkeypatch.delenv("TORCHMALI_DATA")
    assert data_dir(None) is None
    assert data_dir("~/x") == Path.home() / "x"


LOADERS = [
    (lambda place: mnist.load(place, "train"), "MNIST/raw/{train,t10k}", "yann.lecun.com/exdb/mnist", "digits"),
    (lambda place: cifar.load(place, "test"), "cifar-10-batches-py/", "cs.toronto.edu/~kriz", "digits"),
    (folder.index, "{train,val}/<class>/", "image-net.org", "digits"),
    (speech.find, "speech_commands_v0.0{1,2}/<word>/<clip>.wav", "speech_commands_v0.02", "digits"),
    (speech.load_table, "SpeechCommands/mfcc_10k.npz", "speech_commands_v0.02", "digits"),
    (hopper.load, "HopperPhysics/training.npy", "HopperPhysics", "simulated Hopper"),
    (vowels.load, "JapaneseVowels/japanese_vowels.npz", "timeseriesclassification.com", "digits"),
]


@pytest.mark.parametrize(("load", "files", "home", "without"), LOADERS, ids=[row[1] for row in LOADERS])
def test_a_missing_set_says_what_is_looked_for_where_it_is_published_and_what_works_without(
    load, files, home, without, tmp_path
):
    parts = (files, f"Published at {'no place' if 'mfcc' in files else ''}", home, without)
    refused(lambda: load(None), "--data-dir", "TORCHMALI_DATA", *parts)
    refused(lambda: load(tmp_path), f"under {tmp_path}", *parts)
    refused(lambda: load(tmp_path / "no"), f"{tmp_path / 'no'} does not exist", *parts)


# MNIST


def write_mnist(place: Path, images: bytes | None = None, labels: bytes | None = None, split: str = "train") -> Path:
    raw = place / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    pixels = (np.arange(3 * 784) % 251).astype(np.uint8).tobytes()
    images = struct.pack(">4I", 2051, 3, 28, 28) + pixels if images is None else images
    labels = struct.pack(">2I", 2049, 3) + bytes([7, 0, 9]) if labels is None else labels
    (raw / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    (raw / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return raw


def test_mnist_is_read(tmp_path):
    write_mnist(tmp_path, split="t10k")
    test = mnist.load(tmp_path, "test")
    assert test.images.dtype == torch.uint8 and test.images.shape == (3, 28, 28) and len(test) == 3
    assert test.images.flatten().tolist() == [i % 251 for i in range(3 * 784)]
    assert test.labels.dtype == torch.int64 and test.labels.tolist() == [7, 0, 9]
    refused(lambda: mnist.load(tmp_path, "train"), "there is no train-images-idx3-ubyte.gz")


BAD_MNIST = {
    "begins with the number 2052, not with 2051": {"images": struct.pack(">4I", 2052, 1, 28, 28) + bytes(784)},
    "announces 2 items and has 784 bytes": {"images": struct.pack(">4I", 2051, 2, 28, 28) + bytes(784)},
    "announces 3 items and has 2353 bytes": {"images": struct.pack(">4I", 2051, 3, 28, 28) + bytes(2353)},
    "images of 14 x 56": {"images": struct.pack(">4I", 2051, 1, 14, 56) + bytes(784)},
    "announces 0 items": {"images": struct.pack(">4I", 2051, 0, 28, 28)},
    "has 5 bytes, fewer than its header": {"images": b"12345"},
    "begins with the number 2051, not with 2049": {"labels": struct.pack(">2I", 2051, 3) + bytes(3)},
    "has 2 labels for 3 images": {"labels": struct.pack(">2I", 2049, 2) + bytes(2)},
    "has the label 10": {"labels": struct.pack(">2I", 2049, 3) + bytes([1, 10, 2])},
}


@pytest.mark.parametrize("why", BAD_MNIST)
def test_damaged_mnist_is_refused(why, tmp_path):
    write_mnist(tmp_path, BAD_MNIST[why].get("images"), BAD_MNIST[why].get("labels"))
    refused(lambda: mnist.load(tmp_path, "train"), "MNIST is damaged", why, str(tmp_path), "yann.lecun.com", "digits")


@pytest.mark.parametrize("keep", [0, 5, 30, -9])
def test_mnist_in_a_truncated_gzip_file_is_refused(keep, tmp_path):
    path = write_mnist(tmp_path) / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:keep])
    refused(lambda: mnist.load(tmp_path, "train"), "MNIST is damaged", "train-images-idx3-ubyte.gz")


def test_mnist_in_a_changed_gzip_file_is_refused(tmp_path):
    path = write_mnist(tmp_path) / "train-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[-6] ^= 1  # its checksum
    path.write_bytes(content)
    refused(lambda: mnist.load(tmp_path, "train"), "is not a whole gzip file")
    path.write_bytes(b"<html>")
    refused(lambda: mnist.load(tmp_path, "train"), "is not a whole gzip file")


@real("MNIST/raw")
def test_the_real_mnist_is_read():
    for part, n, ones in ((mnist.load(REAL, "train"), 60_000, 6742), (mnist.load(REAL, "test"), 10_000, 1135)):
        assert part.images.shape == (n, 28, 28) and len(part) == n
        assert part.labels.bincount()[1] == ones


# CIFAR-10


def write_cifar(place: Path, name: str = "data_batch_1", content: object = None) -> Path:
    path = place / "cifar-10-batches-py" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {b"data": PIXELS, b"labels": [3, 9]} if content is None else content
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol=2))
    return path


PIXELS = (np.arange(2 * 3072) % 253).astype(np.uint8).reshape(2, 3072)


def as_python_2(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch as published: written by Python 2, whose strings were bytes and whose NumPy said 0 and 1 for booleans."""
    data = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
        + b"J" + struct.pack("<i", len(pixels)) + b"J" + struct.pack("<i", 3072) + b"\x86"
        + b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + b"\x89T" + struct.pack("<i", len(data)) + data + b"tb"
    )  # fmt: skip
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x0bbatch_labelU\x15training batch 1 of 5U\x06labels" + numbers + b"U\x04data" + array + b"u."


@pytest.mark.parametrize("content", [None, as_python_2(PIXELS, [3, 9])], ids=["python 3", "python 2"])
def test_cifar_is_read(content, tmp_path):
    write_cifar(tmp_path, content=content)
    train = cifar.load(tmp_path, "train")
    assert train.images.dtype == torch.uint8 and train.images.shape == (2, 3, 32, 32)
    assert np.array_equal(train.images.numpy().reshape(2, 3072), PIXELS)
    assert train.labels.dtype == torch.int64 and train.labels.tolist() == [3, 9]


def test_cifar_takes_the_batches_it_finds_and_says_how_many(tmp_path):
    for name in ("data_batch_4", "data_batch_2"):
        write_cifar(tmp_path, name)
    train = cifar.load(tmp_path, "train")
    assert len(train) == 4 and train.found == "4 of 50,000 images, 2 of 5 batches"
    no = "there is no data_batch_1, data_batch_3, data_batch_5"
    refused(lambda: cifar.load(tmp_path, "train", require_all=True), no)
    refused(lambda: cifar.load(tmp_path, "test"), "there is no test_batch")
    for name in cifar.TRAINING:
        write_cifar(tmp_path, name)
    assert len(cifar.load(tmp_path, "train", require_all=True)) == 10


class Attack:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, "system"), (eval, "eval"), (getattr, "getattr"), (np.load, "numpy.load"), (Path, "Path")],
    ids=["system", "eval", "getattr", "load", "Path"],
)
def test_a_pickle_that_asks_for_more_than_arrays_is_refused_by_name_and_not_run(function, name, tmp_path):
    marker = tmp_path / "ran"
    attack = Attack(function, f"touch {marker}" if function is os.system else "1")
    write_cifar(tmp_path, content={b"data": attack, b"labels": [1]})
    refused(lambda: cifar.load(tmp_path, "train"), f"{name}, which a batch does not need and which is not run")
    assert not marker.exists()


BAD_CIFAR = {
    "is not a dict": [1, 2],
    "is not a dict with": {b"data": PIXELS},
    "has uint8 (2, 3071)": {b"data": PIXELS[:, 1:].copy(), b"labels": [1, 2]},
    "has int64 (2, 3072)": {b"data": PIXELS.astype(np.int64), b"labels": [1, 2]},
    "has uint8 (0, 3072)": pickle.dumps({b"data": PIXELS[:0].copy(), b"labels": []}, 4),
    "has list as images": {b"data": [1, 2], b"labels": [1, 2]},
    "has 3 labels for 2 images": {b"data": PIXELS, b"labels": [1, 2, 3]},
    "has dict as labels": {b"data": PIXELS, b"labels": {}},
    "not numbers from 0 to 9": {b"data": PIXELS, b"labels": [1, 10]},
    "numbers from 0 to 9": {b"data": PIXELS, b"labels": [-1, 0]},
    "numbers from 0": {b"data": PIXELS, b"labels": [True, 0]},
    "is not a whole pickle": b"<html>",
    "is not a whole pickle (": b"",
    "is not a whole pickle (U": pickle.dumps({b"data": PIXELS, b"labels": [1, 2]}, 2)[:3000],
}


@pytest.mark.parametrize("why", BAD_CIFAR)
def test_damaged_cifar_is_refused(why, tmp_path):
    path = write_cifar(tmp_path, content=BAD_CIFAR[why])
    refused(lambda: cifar.load(tmp_path, "train"), "CIFAR-10 is damaged", why, str(path), "kriz/cifar.html", "digits")


@real("cifar-10-batches-py")
def test_the_real_cifar_is_read():
    train, test = cifar.load(REAL, "train"), cifar.load(REAL, "test", require_all=True)
    assert len(test) == 10_000 and test.labels.bincount().tolist() == [1000] * 10
    assert len(train) % 10_000 == 0 and train.images.shape[1:] == (3, 32, 32)
    assert train.found.startswith(f"{len(train):,} of 50,000 images")


# digits


def test_digits_are_split_the_same_way_for_the_same_seed():
    first, again, other = digits.load(0), digits.load(0), digits.load(1)
    assert [len(part) for part in first] == [1257, 270, 270]
    assert first.train.images.shape == (1257, 8, 8) and first.train.images.dtype == torch.uint8
    assert first.train.images.max() == 16
    assert all(
        torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels) for a, b in zip(first, again, strict=True)
    )
    assert not torch.equal(first.test.images, other.test.images)
    counts = torch.cat([part.labels for part in first]).bincount()
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_that_cannot_be_had_are_an_error(monkeypatch):
    refused(lambda: digits.load(0, n_validation=1000, n_test=900), "1797 digits")
    monkeypatch.setattr(digits, "load_digits", None)
    refused(lambda: digits.load(0), "pip install scikit-learn")


# Folders of pictures


def write_pictures(root: Path, names: list[str], size: tuple[int, int] = (40, 20)) -> None:
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (10 * i, 100, 200)).save(path)


def test_pictures_are_indexed_in_order(tmp_path):
    write_pictures(
        tmp_path, ["train/cat/b.png", "train/cat/a.JPEG", "train/ant/z.jpg", "val/cat/1.png", "val/ant/2.png"]
    )
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not a picture")
    (tmp_path / "train" / "cat" / ".hidden.png").write_text("not a picture")
    (tmp_path / "train" / ".cache").mkdir()
    train, val = folder.index(tmp_path)
    assert train.classes == val.classes == ("ant", "cat")
    assert [path.name for path in train.paths] == ["z.jpg", "a.JPEG", "b.png"]
    assert train.labels.tolist() == [0, 1, 1] and val.labels.tolist() == [0, 1] and len(train) == 3


def test_folders_that_are_empty_or_do_not_match_are_refused(tmp_path):
    (tmp_path / "train").mkdir()
    refused(lambda: folder.index(tmp_path), "train has no class folders", str(tmp_path))
    write_pictures(tmp_path, ["train/a/1.png", "train/b/1.png"])
    refused(lambda: folder.index(tmp_path), "there is no folder val")
    write_pictures(tmp_path, ["val/a/1.png", "val/c/1.png"])
    refused(lambda: folder.index(tmp_path), "only one of them has b, c")
    (tmp_path / "val" / "c").rename(tmp_path / "val" / "b")
    (tmp_path / "val" / "b" / "1.png").unlink()
    refused(lambda: folder.index(tmp_path), "val/b has no pictures")


def test_a_centre_crop_is_the_middle_of_the_scaled_picture(tmp_path):
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, 10:30] = (1, 2, 3)
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    (whole,) = folder.centre_crops([tmp_path / "wide.png"], 20, 20)
    assert whole.dtype == torch.uint8 and whole.shape == (3, 20, 20)
    assert torch.equal(whole, torch.tensor([1, 2, 3], dtype=torch.uint8)[:, None, None].expand(3, 20, 20))
    Image.fromarray(pixels.transpose(1, 0, 2)).save(tmp_path / "tall.png")
    both = folder.centre_crops([tmp_path / "wide.png", tmp_path / "tall.png"], 32, 28)
    assert torch.equal(both[0], both[1].mT) and both.shape == (2, 3, 28, 28)
    with pytest.raises(ValueError, match="A crop of 30"):
        folder.centre_crops([tmp_path / "wide.png"], 28, 30)


def test_a_crop_is_the_box_it_is_given(tmp_path):
    pixels = np.random.RandomState(0).randint(0, 256, (20, 40, 3)).astype(np.uint8)
    part = folder.crop(Image.fromarray(pixels), folder.Box(top=3, left=11, height=8, width=8), 8)
    assert np.array_equal(part.permute(1, 2, 0).numpy(), pixels[3:11, 11:19])


def test_random_boxes_stay_inside_and_keep_to_scale_and_ratio():
    generator = torch.Generator().manual_seed(0)
    boxes = [folder.draw_box(60, 80, generator, (0.2, 0.5), (0.8, 1.25)) for _ in range(300)]
    for top, left, height, width in boxes:
        assert 0 <= top <= 60 - height and 0 <= left <= 80 - width
        assert 0.18 < height * width / 4800 < 0.53 and 0.75 < width / height < 1.3  # sides are rounded to pixels
    assert len(set(boxes)) > 250
    # Nothing with these ratios has half the area of so long a picture: the largest that fits is taken.
    assert folder.draw_box(10, 500, generator, (0.5, 1.0), (0.8, 1.25)) == (0, 244, 10, 12)


def test_random_crops_are_the_generators(tmp_path):
    write_pictures(tmp_path, ["a.png", "b.jpg"])
    paths = [tmp_path / "a.png", tmp_path / "b.jpg"]
    first, again = (folder.random_crops(paths, 16, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first.shape == (2, 3, 16, 16) and first.dtype == torch.uint8 and torch.equal(first, again)


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_pictures_of_other_kinds_become_rgb(mode, tmp_path):
    name = "x.jpg" if mode == "CMYK" else "x.png"
    picture = Image.new(mode, (16, 16))
    if mode == "P":
        picture.info["transparency"] = b"\x00\x10"
    picture.save(tmp_path / name)
    assert folder.centre_crops([tmp_path / name], 8, 8).shape == (1, 3, 8, 8)


@pytest.mark.parametrize("keep", [0, 20, 60, 200])
@pytest.mark.parametrize("name", ["x.png", "x.jpg"])
def test_a_picture_that_cannot_be_read_is_named(name, keep, tmp_path):
    path = tmp_path / "cat" / name
    path.parent.mkdir()
    Image.fromarray(np.random.RandomState(0).randint(0, 256, (30, 30, 3)).astype(np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:keep])
    refused(lambda: folder.centre_crops([path], 8, 8), f"{name} in class cat cannot be decoded", str(path))


# Speech Commands


def write_clip(
    path: Path, n: int = 16_000, rate: int = 16_000, channels: int = 1, width: int = 2, seed: int = 0
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(np.random.RandomState(seed).bytes(n * channels * width))


def write_clips(place: Path, version: str = "0.02") -> Path:
    tree = place / "SpeechCommands" / f"speech_commands_v{version}"
    for i, word in enumerate(speech.WORDS):
        for speaker in ("b", "a"):
            write_clip(tree / word / f"{speaker}_nohash_0.wav", seed=i)
    return tree


def test_clips_are_found_by_word_and_then_by_name(tmp_path):
    tree = write_clips(tmp_path)
    (tree / "yes" / "README.md").write_text("not a clip")
    write_clip(tree / "bird" / "a_nohash_0.wav")
    clips = speech.find(tmp_path)
    assert clips.version == "0.02" and len(clips) == 20
    assert clips.labels.tolist() == [i // 2 for i in range(20)]
    assert [f"{p.parent.name}/{p.name}" for p in clips.paths[:3]] == [
        "yes/a_nohash_0.wav", "yes/b_nohash_0.wav", "no/a_nohash_0.wav",
    ]  # fmt: skip
    write_clips(tmp_path, "0.01")
    assert speech.find(tmp_path).version == "0.02" and speech.find(tmp_path, "0.01").version == "0.01"
    refused(lambda: speech.find(tmp_path, "0.03"), "there is no folder SpeechCommands/speech_commands_v0.03")


def test_a_word_without_clips_is_refused(tmp_path):
    tree = write_clips(tmp_path)
    for path in (tree / "left").iterdir():
        path.unlink()
    refused(lambda: speech.find(tmp_path), "speech_commands_v0.02/left has no clips", str(tmp_path))
    (tree / "left").rmdir()
    refused(lambda: speech.find(tmp_path), "speech_commands_v0.02/left has no clips")


def test_a_clip_is_its_samples(tmp_path):
    write_clip(tmp_path / "x.wav", seed=5)
    samples = speech.read(tmp_path / "x.wav")
    assert samples is not None and samples.dtype == np.int16 and samples.shape == (16_000,)
    assert samples.tobytes() == np.random.RandomState(5).bytes(32_000)


def test_clips_that_are_not_one_second_long_are_dropped_and_counted(tmp_path):
    tree = write_clips(tmp_path)
    write_clip(tree / "yes" / "a_nohash_0.wav", n=15_999)
    write_clip(tree / "no" / "b_nohash_0.wav", n=16_001)
    write_clip(tree / "up" / "b_nohash_0.wav", n=0)
    told = []
    found = speech.features(speech.find(tmp_path), batch=6, tell=lambda done, of: told.append((done, of)))
    assert found.n_dropped == 3 and len(found) == 17 and found.mfcc.shape == (17, 161, 20)
    assert found.labels.bincount().tolist() == [1, 1, 1] + [2] * 7
    assert told == [(6, 20), (12, 20), (18, 20), (20, 20)]
    row = found.paths.index(tree / "go" / "a_nohash_0.wav")
    samples = speech.read(found.paths[row])
    assert samples is not None and torch.equal(found.mfcc[row], speech.mfcc(torch.from_numpy(samples)[None])[0])


def test_if_no_clip_is_one_second_long_it_is_an_error(tmp_path):
    tree = write_clips(tmp_path)
    for path in tree.glob("*/*.wav"):
        write_clip(path, n=100)
    refused(lambda: speech.features(speech.find(tmp_path)), "none of them one second long")


@pytest.mark.parametrize(
    ("form", "found"),
    [
        ({"rate": 8000}, "1 channel(s) of 16 bit at 8000 Hz"),
        ({"channels": 2}, "2 channel(s) of 16 bit at 16000 Hz"),
        ({"width": 1}, "1 channel(s) of 8 bit at 16000 Hz"),
        ({"width": 4, "n": 3}, "1 channel(s) of 32 bit at 16000 Hz"),
    ],
)
def test_clips_of_another_form_are_refused(form, found, tmp_path):
    path = write_clips(tmp_path) / "off" / "a_nohash_0.wav"
    write_clip(path, **form)
    message = refused(lambda: speech.features(speech.find(tmp_path)), found, str(path), "Speech Commands is damaged")
    assert "it must be 1 channel of 16 bit at 16000 Hz" in message


@pytest.mark.parametrize(
    ("keep", "why"), [(0, "not a wave file"), (30, "not a wave file"), (1044, "ends after 500 of 16000 samples")]
)
def test_truncated_clips_are_refused(keep, why, tmp_path):
    write_clip(tmp_path / "go" / "x.wav")
    path = tmp_path / "go" / "x.wav"
    path.write_bytes(path.read_bytes()[:keep])
    refused(lambda: speech.read(path), why, "x.wav in go", "speech_commands_v0.02")


def mfcc_by_scipy(samples: np.ndarray) -> np.ndarray:
    """Another road to the same numbers: SciPy's transforms, filters written as interpolation."""
    scipy_signal, scipy_fft = pytest.importorskip("scipy.signal"), pytest.importorskip("scipy.fft")
    padded = np.pad(samples / 32768.0, ((0, 0), (100, 100)), mode="reflect")
    window = scipy_signal.get_window("hann", 200)
    _, _, z = scipy_signal.stft(padded, window=window, nperseg=200, noverlap=100, boundary=None, padded=False)
    power = np.abs(z * window.sum()) ** 2
    hertz = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + 8000 / 700), 66) / 2595) - 1)
    grid = np.arange(101) * 80.0
    filters = np.stack([np.interp(grid, hertz[m : m + 3], [0, 1, 0], 0, 0) for m in range(64)])
    mels = np.log(np.einsum("mf,nft->ntm", filters, power) + 1e-6)
    return scipy_fft.dct(mels, type=2, norm="ortho", axis=-1)[..., :20]


def test_mfccs_are_scipys():
    random = np.random.RandomState(0)
    t = np.arange(16_000) / 16_000
    noise = random.randint(-32768, 32768, 16_000)
    chirp = 30_000 * np.sin(2 * np.pi * (200 + 3000 * t) * t)
    quiet = 3 * random.randn(16_000) + 8000 * (t > 0.7) * np.sin(2 * np.pi * 440 * t)
    waves = np.stack([noise, chirp, quiet, 0 * t]).astype(np.int16)
    found = speech.mfcc(torch.from_numpy(waves))
    assert found.dtype == torch.float32 and found.shape == (4, 161, 20)
    assert np.abs(found.numpy() - mfcc_by_scipy(waves)).max() < 1e-4
    assert torch.equal(found, speech.mfcc(torch.from_numpy(waves / 32768.0)))


def test_two_mel_filters_are_empty_and_the_cosines_are_orthonormal():
    filters, cosines = speech.mel_filters(), speech.cosines()
    assert filters.shape == (101, 64) and (filters.sum(0) == 0).sum() == 2
    assert torch.allclose(cosines.T @ cosines, torch.eye(20, dtype=torch.float64), atol=1e-12)


@real("SpeechCommands/mfcc_200_reference.npz")
def test_the_real_clips_have_torchaudios_mfccs():
    assert REAL is not None
    found = speech.features(speech.find(REAL, "0.01"))
    with np.load(REAL / "SpeechCommands" / "mfcc_200_reference.npz") as reference:
        rows = {name: i for i, name in enumerate(reference["name"].tolist())}
        order = [rows[f"{path.parent.name}/{path.name}"] for path in found.paths]
        assert len(found) == len(rows) == 200 and found.n_dropped == 0
        assert np.abs(found.mfcc.numpy() - reference["mfcc"][order]).max() < 5e-4
        assert found.labels.tolist() == reference["label"][order].tolist()
    waves = np.stack([speech.read(path) for path in found.paths[:40]])  # type: ignore[arg-type]
    assert np.abs(found.mfcc[:40].numpy() - mfcc_by_scipy(waves)).max() < 1e-4


def write_table(place: Path, **changes: object) -> Path:
    path = place / "SpeechCommands" / "mfcc_10k.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {
        "mfcc": np.ones((4, 161, 20), np.float32),
        "label": np.array([0, 9, 1, 2], np.uint8),
        "split": np.array([0, 2, 0, 1], np.uint8),
    }
    np.savez(path, **{name: value for name, value in (whole | changes).items() if value is not None})  # type: ignore
    return path


def test_the_table_of_mfccs_is_read(tmp_path):
    write_table(tmp_path)
    table = speech.load_table(tmp_path)
    assert table.mfcc.shape == (4, 161, 20) and table.mfcc.dtype == torch.float32
    assert table.labels.tolist() == [0, 9, 1, 2] and table.labels.dtype == torch.int64
    assert [part.tolist() for part in table.split] == [[0, 2], [3], [1]]


BAD_TABLES = {
    "lacks split": {"split": None},
    "has float32 (4, 160, 20) as mfcc": {"mfcc": np.ones((4, 160, 20), np.float32)},
    "has int64 (4, 161, 20) as mfcc": {"mfcc": np.ones((4, 161, 20), np.int64)},
    "has float32 (0, 161, 20) as mfcc": {"mfcc": np.ones((0, 161, 20), np.float32)},
    "values in mfcc that are not finite": {"mfcc": np.full((4, 161, 20), np.nan, np.float32)},
    "values in label that are not from 0 to 9": {"label": np.array([0, 10, 0, 0])},
    "values in split that are not from 0 to 2": {"split": np.array([0, -1, 0, 0])},
    "has uint8 (3,) as label, not 4": {"label": np.zeros(3, np.uint8)},
    "has float64 (4,) as split": {"split": np.zeros(4)},
    "is not a whole .npz archive": {"label": np.array([None] * 4)},
}


@pytest.mark.parametrize("why", BAD_TABLES)
def test_a_damaged_table_of_mfccs_is_refused(why, tmp_path):
    path = write_table(tmp_path, **BAD_TABLES[why])
    refused(lambda: speech.load_table(tmp_path), "is damaged", why, str(path), "digits")


@pytest.mark.parametrize("spoil", [lambda b: b[:-100], lambda b: b[:20], lambda b: b"", lambda b: b"<html>" * 50])
def test_a_truncated_table_of_mfccs_is_refused(spoil, tmp_path):
    path = write_table(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    refused(lambda: speech.load_table(tmp_path), "is not a whole .npz archive", str(path))


def test_an_array_in_place_of_an_archive_is_refused_and_the_other_way_round(tmp_path):
    path = write_table(tmp_path)
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    refused(lambda: speech.load_table(tmp_path), "is a single array")
    (tmp_path / "HopperPhysics").mkdir()
    with (tmp_path / "HopperPhysics" / "training.npy").open("wb") as file:
        np.savez(file, x=np.ones(3))
    refused(lambda: hopper.load(tmp_path), "is an .npz archive")


@real("SpeechCommands/mfcc_10k.npz")
def test_the_real_table_of_mfccs_is_read():
    table = speech.load_table(REAL)
    assert table.mfcc.shape == (10_000, 161, 20) and table.labels.bincount().tolist() == [1000] * 10
    assert [len(part) for part in table.split] == [7000, 1500, 1500]


def test_the_random_split_has_the_papers_sizes_and_all_words_alike():
    labels = torch.arange(34_975) % 10
    split = speech.random_split(labels)
    assert [len(part) for part in split] == [24_482, 5_246, 5_247]
    assert torch.equal(torch.cat(split).sort().values, torch.arange(34_975))
    for part in split:
        counts = labels[part].bincount()
        assert counts.max() - counts.min() <= 1
    assert all(torch.equal(a, b) for a, b in zip(split, speech.random_split(labels), strict=True))
    refused(lambda: speech.random_split(torch.arange(10)), "10 clips cannot be split")


def test_the_speaker_split_keeps_each_speaker_in_one_part():
    random = np.random.RandomState(0)
    paths = [Path(f"yes/{random.randint(150):08x}_nohash_{i}.wav") for i in range(2000)]
    split = speech.speaker_split(paths, seed=0)
    assert torch.equal(torch.cat(split).sort().values, torch.arange(2000))
    speakers = [{speech.speaker_of(paths[row]) for row in part} for part in split]
    assert not (speakers[0] & speakers[1] or speakers[0] & speakers[2] or speakers[1] & speakers[2])
    for part, share in zip(split, (0.7, 0.15, 0.15), strict=True):
        assert abs(len(part) / 2000 - share) < 0.03  # two speakers more or fewer
    assert all(torch.equal(a, b) for a, b in zip(split, speech.speaker_split(paths, seed=0), strict=True))
    assert not torch.equal(split.train, speech.speaker_split(paths, seed=1).train)
    few = [Path(f"{name}_nohash_0.wav") for name in "abc"]
    assert [len(part) for part in speech.speaker_split(few, 0)] == [1, 1, 1]
    refused(lambda: speech.speaker_split(few[:2], 0), "2 speaker(s) cannot be split")
    refused(lambda: speech.speaker_split([*few, Path("d.wav")], 0), "d.wav does not name its speaker")


# Hopper

# dm_control 1.0.50's own hopper/stand with mujoco 3.17.0: two trajectories, 20 times, 7 positions, then 7 speeds.
TABLE = """
0.348234592799 0.143069667475 -1.09259418574 0.205259076332 0.877875879142 -0.307574159502 1.92305679354
1.84829738585 -0.190680985156 -1.07882481806 -1.56821983849 2.29049707384 -0.614277553204 -4.4032210339
0.357006666015 0.143914668983 -1.0827283001 0.210004310774 0.839948271174 -0.283782475324 1.84103225537
1.7544146433 0.169000301536 1.97317712838 0.949046888439 -7.5855215936 4.75833683561 -16.4049076337
0.36561011047 0.145319038017 -1.06557559642 0.220361068549 0.779516101423 -0.248404858319 1.73408333879
1.72068889092 0.280873806843 3.43054073613 2.07135155502 -12.0864339503 7.0755234011 -21.3897833151
0.374234791901 0.146559780222 -1.0456362243 0.232386532575 0.711502743006 -0.209646730877 1.62133173873
1.72493628628 0.248148440977 3.98787442343 2.40509280518 -13.6026716834 7.75162548841 -22.550320013
0.38296083367 0.147330850219 -1.02515304333 0.244263728804 0.642951664902 -0.170875376102 1.50871609684
1.74520835378 0.154213999332 4.09663619453 2.37543924579 -13.7102156207 7.75427095497 -22.523128377
0.391791371569 0.147624949983 -1.00415357568 0.255978671836 0.573876331073 -0.132130365288 1.3962606787
1.76610757974 0.0588199528578 4.19989352985 2.34298860649 -13.8150667658 7.74900216275 -22.4910836291
0.400729182632 0.14743544418 -0.982668578808 0.267518148521 0.504296020735 -0.093452166129 1.28399007955
1.7875622125 -0.0379011606141 4.29699937475 2.3078953369 -13.9160620676 7.73563983179 -22.454119829
0.409776646837 0.146756478559 -0.960732082311 0.27886981971 0.434235736056 -0.054881812997 1.17192876838
1.80949284108 -0.135793124087 4.38729929929 2.27033423776 -14.0120569359 7.7140706264 -22.4122622358
0.418935710495 0.145583096435 -0.938381342071 0.290022320395 0.363725980372 -0.0164605416835 1.06010061333
1.83181273165 -0.234676424942 4.47014804815 2.23050013712 -14.1019511368 7.68425426269 -22.3656310099
0.428207852925 0.143911349333 -0.915656704268 0.300965354241 0.292802398639 0.0217706097249 0.948528402549
1.8544284859 -0.334349420382 4.54492756049 2.18860676919 -14.1847163466 7.64623028168 -22.3144421555
0.437594058097 0.141738397531 -0.89260137515 0.31168977826 0.221505277641 0.0597712302365 0.837233375589
1.87724103443 -0.434590360287 4.61106582372 2.14488480383 -14.2594241995 7.60012410233 -22.259005392
0.447094792908 0.139062596047 -0.869261096403 0.322187673434 0.149878910659 0.0975019900281 0.726234781822
1.90014696229 -0.535160296803 4.66805574931 2.09957903469 -14.3252733965 7.54615195832 -22.1997187534
0.456709993632 0.135883561787 -0.845683730783 0.33245239745 0.0779708393797 0.13492511173 0.615549482497
1.92304014467 -0.635806852086 4.71547312396 2.05294480319 -14.3816142558 7.48462434031 -22.1370598649
0.46643906188 0.132202218035 -0.821918767675 0.342478616486 0.00583099422215 0.172004849797 0.505191612359
1.94581364958 -0.736268750411 4.75299262175 2.00524380725 -14.4279690315 7.41594761338 -22.0715740277
0.476280871097 0.128020813259 -0.798016763254 0.352262314042 -0.0664892379249 0.208707967579 0.395172315138
1.9683618434 -0.836280955093 4.7804008841 1.95673951123 -14.4640464294 7.34062355656 -22.0038594441
0.486233784184 0.123342912298 -0.774028734275 0.361800776168 -0.138937983045 0.245004200932 0.285499564536
1.99058261741 -0.935580192364 4.79760579579 1.90769242513 -14.489749024 7.25924667042 -21.9345501205
0.496295682385 0.118173359289 -0.750005527749 0.371092553922 -0.211463846616 0.28086669698 0.176178078711
2.01237964026 -1.03391060169 4.80464130531 1.85835555094 -14.5051727142 7.17249920977 -21.8642971649
0.506464005066 0.112518213131 -0.725997190574 0.380137405391 -0.284016836158 0.316272417014 0.0672093320004
2.03366453624 -1.13102923161 4.80166743484 1.80897029372 -14.5105979084 7.08114400665 -21.7937493422
0.516735799525 0.106384657603 -0.702052363229 0.388936220909 -0.356549199873 0.351202493216 -0.0414083371237
2.05435889181 -1.22671110568 4.78896546911 1.75976310351 -14.506472743 6.98601524056 -21.7235338248
0.527107779545 0.0997808895292 -0.678217719936 0.397490936178 -0.429016146061 0.385642530096 -0.149679527577
2.07439600395 -1.32075361468 4.76692865846 1.71094305384 -14.4933892375 6.88800737589 -21.6542380907
0.199022127665 0.368997702866 -1.27003307819 -1.29819297541 0.126205495367 0.127310348387 0.537603834205
3.49431794078 2.24455324861 1.11023510678 2.2244338257 -1.77041086147 -1.38211344378 -2.71736769121
0.215597169936 0.380644784107 -1.29553137826 -1.24444913039 0.108000557833 0.117250465144 0.523494575432
3.31500845421 2.32941624823 -5.09966001479 10.7487690035 -3.64098750677 -2.01197664861 -2.82185175457
0.231829207946 0.392409769503 -1.33418376845 -1.17261130275 0.0858791119394 0.105826376697 0.509201858738
3.24640760196 2.35299707914 -7.73047803735 14.3675655292 -4.42428917881 -2.28481768947 -2.85854333888
0.248016143471 0.40411542508 -1.37616483043 -1.09614079869 0.06283067212 0.0940329460495 0.494909778717
3.23738710491 2.34113111544 -8.39621239663 15.2941008123 -4.60968796388 -2.35868612952 -2.85841600423
0.264257770608 0.415694015215 -1.41827865012 -1.01945116188 0.0398427786257 0.0822113950779 0.480677919497
3.24832542747 2.31571802694 -8.42276393763 15.3379273609 -4.59757869887 -2.36431019431 -2.84637184394
0.280630383459 0.427084316931 -1.4611791292 -0.943019521822 0.0157990774479 0.0766072010167 0.466178693777
3.27452257028 2.27806034328 -8.5800958173 15.2863280118 -4.80874023557 -1.12083881223 -2.89984514395
0.297094129487 0.438303264512 -1.50453814471 -0.866661737219 -0.00880659014521 0.0744653274519 0.451555319403
3.29274920555 2.24378951613 -8.67180310043 15.2715569205 -4.92113351861 -0.428374712962 -2.92467487495
0.313629862943 0.449361859948 -1.5481765771 -0.790269999129 -0.0336799714433 0.0741905612859 0.436893463371
3.30714669125 2.21171908718 -8.72768647914 15.278347618 -4.97467625963 -0.0549532332158 -2.93237120631
0.33022913995 0.460266239983 -1.59199589976 -0.713785482858 -0.0586459178936 0.0748678117815 0.422243711766
3.31985540138 2.180876007 -8.76386453217 15.2969032541 -4.99318929005 0.135450099129 -2.92995032098
0.346889188923 0.471019123993 -1.635941454 -0.637180099402 -0.0835998551007 0.0759795588817 0.407635724472
3.33200979462 2.1505768021 -8.78911084685 15.3210766913 -4.99078744143 0.222349420038 -2.92159745885
0.36361027232 0.481620947738 -1.67998232199 -0.560444962093 -0.108478733167 0.077239607684 0.393086858056
3.34421667934 2.12036474892 -8.80817359824 15.3470274618 -4.97577561318 0.252009760463 -2.90977328327
0.380394259261 0.49207062938 -1.72410016896 -0.48358327753 -0.133243744099 0.0784954313643 0.378607316102
3.35679738812 2.08993632845 -8.82356939503 15.3723369126 -4.95300218653 0.25116473605 -2.89590839072
0.397244361349 0.502365315017 -1.76828878079 -0.406611417286 -0.157882405647 0.0797366309856 0.364199773742
3.37002041757 2.05893712733 -8.83772236603 15.3943720488 -4.92773230956 0.248239924259 -2.88150847196
0.414163832069 0.512501702995 -1.8125421355 -0.329548551917 -0.182384934093 0.0809669654907 0.349866096241
3.38389414402 2.02727759561 -8.85067094048 15.4125730738 -4.9005056891 0.246066901027 -2.86673550032
0.431155815453 0.522476199783 -1.8568532048 -0.252415378101 -0.206741697742 0.0821903082416 0.335608058894
3.39839667696 1.99489935764 -8.86221386137 15.4266347631 -4.87135272987 0.244668550181 -2.85160746928
0.448223324767 0.532284930159 -1.90121404519 -0.175233957593 -0.230943283792 0.0834106249786 0.321427332302
3.41350186271 1.96174607518 -8.87216807796 15.4362841016 -4.84031720996 0.24406334741 -2.83614531849
0.465369221328 0.541923751156 -1.94561590585 -0.0980275293579 -0.254980565397 0.0846319492925 0.307325467866
3.42917931213 1.92776419947 -8.88037213207 15.441285647 -4.80745632111 0.244264862771 -2.82037288716
0.482596193887 0.551388269738 -1.99004935222 -0.0208202973462 -0.278844767666 0.0858583559947 0.293303883857
3.44539451187 1.89290371631 -8.88668927299 15.4414464023 -4.77284045366 0.245281340438 -2.80431680183
0.499906739001 0.560673864039 -2.03450440316 0.0563628026818 -0.302527531216 0.087093932879 0.279363852369
3.46210902282 1.85711886019 -8.89101018857 15.4366200056 -4.73655271001 0.247115376865 -2.7880062975
0.517303142832 0.569775707905 -2.07897067939 0.13349635298 -0.326020971929 0.0883427514544 0.2655064875
3.47928076614 1.82036877337 -8.89325524612 15.4267100596 -4.69868814261 0.24976371507 -2.77147297381
"""
STORED = np.array(TABLE.split(), float).reshape(2, 20, 14)


@simulates
def test_simulated_trajectories_are_the_stored_ones(tmp_path):
    mujoco = pytest.importorskip("mujoco")
    if not mujoco.__version__.startswith("3.17."):
        pytest.skip(f"the stored numbers are mujoco 3.17's; {mujoco.__version__} may differ")
    found = hopper.simulate(2, length=20, folder=tmp_path, dtype=torch.float64)
    assert found.shape == (2, 20, 14) and found.dtype == torch.float64
    assert np.abs(found.numpy() - STORED).max() < 1e-9


@simulates
def test_simulated_trajectories_are_dm_controls(tmp_path):
    script = """
    import sys
    import numpy as np
    try:
        from dm_control import suite
    except Exception as error:  # without a screen it may be any
        print(error)
        sys.exit(77)
    physics = suite.load("hopper", "stand").physics
    np.random.seed(123)
    found = np.empty((5, 200, 14))
    for trajectory in found:
        with physics.reset_context():
            physics.data.qpos[:2] = np.random.uniform(0, 0.5, size=2)
            physics.data.qpos[2:] = np.random.uniform(-2, 2, size=5)
            physics.data.qvel[:] = np.random.uniform(-5, 5, size=7)
        for state in trajectory:
            state[:7], state[7:] = physics.data.qpos, physics.data.qvel
            physics.step()
    np.save(sys.argv[1], found)
    """
    target = tmp_path / "theirs.npy"
    command = [sys.executable, "-c", textwrap.dedent(script), str(target)]
    done = subprocess.run(command, env={**os.environ, "MUJOCO_GL": "disable"}, capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip(f"dm_control cannot be imported here: {done.stdout}")
    assert done.returncode == 0, done.stderr
    theirs, ours = np.load(target), rollout.trajectories(hopper.starts(5, 123), 200)
    assert np.abs(theirs[:, :20] - ours[:, :20]).max() < 1e-9
    assert np.abs(theirs - ours).max() < 1e-9  # contacts make them chaotic: so late, only the same bits are so near
    assert "dm_control" not in sys.modules


@simulates
def test_a_rollout_has_the_bits_of_single_steps():
    mujoco = pytest.importorskip("mujoco")
    start = hopper.starts(3, 5)
    model = rollout.model()
    hopper_model = mujoco.MjModel.from_xml_string(model.text, model.parts)
    data, expected = mujoco.MjData(hopper_model), np.empty((3, 200, 14))
    for row, trajectory in zip(start, expected, strict=True):
        mujoco.mj_resetData(hopper_model, data)
        data.qpos[:], data.qvel[:] = row[:7], row[7:]
        for state in trajectory:
            state[:7], state[7:] = data.qpos, data.qvel
            mujoco.mj_step(hopper_model, data)
    assert np.array_equal(rollout.trajectories(start, 200), expected)


@simulates
def test_two_processes_simulate_what_one_does_and_say_how_far_they_are(tmp_path):
    told = []
    two = hopper.simulate(
        600, length=10, seed=7, folder=tmp_path / "2", tell=lambda done, of: told.append((done, of))
    )  # fmt: skip
    one = hopper.simulate(600, length=10, seed=7, processes=1, folder=tmp_path / "1")
    assert two.shape == (600, 10, 14) and two.dtype == torch.float32 and torch.equal(one, two)
    assert told == [(0, 600), (250, 600), (500, 600), (600, 600)]
    assert torch.equal(one[:, 0], torch.from_numpy(hopper.starts(600, 7)).float())
    assert not torch.equal(one[:250], one[250:500])


@simulates
def test_a_process_that_may_not_have_children_simulates_by_itself(tmp_path, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore
    monkeypatch.setattr(hopper, "ProcessPoolExecutor", None)
    assert hopper.simulate(300, length=5, folder=tmp_path).shape == (300, 5, 14)


@pytest.fixture
def simulated(monkeypatch):
    """The chunks that were simulated, by name."""
    names, chunk = [], rollout.chunk

    def counted(path, *arguments):
        names.append(path.name)
        chunk(path, *arguments)

    monkeypatch.setattr(rollout, "chunk", counted)
    return names


@simulates
def test_a_finished_chunk_is_never_simulated_again_but_another_seed_is(tmp_path, simulated):
    def simulate(n, **changes):
        simulated.clear()
        return hopper.simulate(n, **{"length": 5, "processes": 1, "folder": tmp_path} | changes), list(simulated)

    first, names = simulate(300)
    assert names == ["000000.npy", "000250.npy"]
    more, names = simulate(600)
    assert names == ["000500.npy"] and torch.equal(more[:300], first)
    fewer, names = simulate(10)
    assert names == [] and torch.equal(fewer, first[:10])
    for changes in ({"seed": 4}, {"length": 6}, {"dtype": torch.float64}):
        assert simulate(10, **changes)[1] == ["000000.npy"]


@simulates
def test_what_is_killed_goes_on_where_it_was(tmp_path, simulated):
    script = """
    import os, signal, sys
    from pathlib import Path
    from experiments.data import hopper
    def tell(done, of):
        if done >= 500:
            os.kill(os.getpid(), signal.SIGKILL)
    hopper.simulate(1000, length=5, processes=1, folder=Path(sys.argv[1]), tell=tell)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    killed = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (place,) = tmp_path.iterdir()
    assert sorted(path.name for path in place.iterdir()) == ["000000.npy", "000250.npy"]
    begun = place / "000500.npy.1.draft"
    begun.write_bytes(b"half")
    os.utime(begun, (time.time() - 100, time.time() - 100))
    resumed = hopper.simulate(1000, length=5, processes=1, folder=tmp_path)
    assert simulated == ["000500.npy", "000750.npy"] and not begun.exists()
    assert np.array_equal(resumed.numpy(), rollout.trajectories(hopper.starts(1000, 123), 5).astype(np.float32))


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(file, array, **options):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(source.np, "save", full)
    with pytest.raises(OSError, match="no space left"):
        source.write_npy(tmp_path / "x.npy", np.ones(3))
    assert list(tmp_path.iterdir()) == []


@simulates
def test_a_simulation_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    start = hopper.starts(250, 0)
    start[3, 9] = 1e300
    monkeypatch.setattr(hopper, "starts", lambda n, seed: start)
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to a log there
    refused(lambda: hopper.simulate(250, length=20, folder=tmp_path / "cache"), "MuJoCo gave up on a trajectory")
    assert not list((tmp_path / "cache").rglob("*.*"))


@simulates
@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-8], lambda b: b"", lambda b: b[:100] + b"9" + b[101:], lambda b: b.replace(b"<f4", b"<i4")]
)
def test_a_damaged_cache_is_refused_with_what_to_do(spoil, tmp_path):
    hopper.simulate(250, length=5, processes=1, folder=tmp_path)
    (path,) = tmp_path.rglob("*.npy")
    path.write_bytes(spoil(path.read_bytes()))
    refused(lambda: hopper.simulate(9, length=5, folder=tmp_path), "cache", str(path), "Delete this file")


def test_without_mujoco_or_dm_control_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "MISSING", "No module named mujoco")
    refused(lambda: hopper.simulate(1, folder=tmp_path), "MuJoCo cannot be imported", "pip install mujoco dm_control")
    assert list(tmp_path.iterdir()) == []


@simulates
def test_without_dm_control_the_error_says_what_to_install(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "dm_control", None)
        refused(lambda: hopper.simulate(1, folder=tmp_path), "dm_control is not installed", "pip install mujoco")
    (tmp_path / "dm_control").mkdir()
    (tmp_path / "dm_control" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    refused(lambda: hopper.simulate(1, folder=tmp_path), "without its Hopper", "hopper.xml")


def test_senseless_sizes_are_refused(tmp_path):
    for sizes in ((0, 200, 1, 2), (9, 1, 1, 2), (9, 200, 1, 0)):
        with pytest.raises(ValueError, match="are needed"):
            hopper.simulate(*sizes, folder=tmp_path)
    with pytest.raises(ValueError, match="not torch.float16"):
        hopper.simulate(folder=tmp_path, dtype=torch.float16)


def write_hopper(place: Path, array: np.ndarray) -> Path:
    path = place / "HopperPhysics" / "training.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array, allow_pickle=True)
    return path


def test_the_files_trajectories_are_read_or_refused(tmp_path):
    whole = np.random.RandomState(0).randn(3, 200, 14).astype(np.float32)
    path = write_hopper(tmp_path, whole)
    assert np.array_equal(hopper.load(tmp_path).numpy(), whole)
    path.write_bytes(path.read_bytes()[:-1])
    refused(lambda: hopper.load(tmp_path), "is not a whole .npy file", str(path), "simulated Hopper")
    for array, why in [
        (whole[:, 1:], "has float32 (3, 199, 14)"),
        (whole[:0], "has float32 (0, 200, 14)"),
        (whole.astype(np.int64), "has int64"),
        (np.where(whole > 2, np.nan, whole), "not finite"),
        (np.array([None]), "is not a whole .npy file"),
    ]:
        write_hopper(tmp_path, array)
        refused(lambda: hopper.load(tmp_path), "The Hopper data set is damaged", why)


@real("HopperPhysics/training.npy")
@simulates
def test_the_real_files_trajectories_are_the_simulated_ones_to_16_bit(tmp_path):
    theirs = hopper.load(REAL)
    assert theirs.shape == (10_000, 200, 14)
    ours = hopper.simulate(250, processes=1, folder=tmp_path)
    span = theirs.amax((0, 1)) - theirs.amin((0, 1))
    assert ((theirs[:250] - ours).abs() / span).max() < 8e-6


@pytest.mark.slow
@simulates
def test_ten_thousand_trajectories_take_less_than_three_minutes(tmp_path):
    start = time.perf_counter()
    found = hopper.simulate(folder=tmp_path)
    assert time.perf_counter() - start < 180
    assert found.shape == (10_000, 200, 14) and found.isfinite().all()
    if REAL is not None and (REAL / "HopperPhysics" / "training.npy").exists():
        theirs = hopper.load(REAL)
        assert ((theirs - found).abs() / (theirs.amax((0, 1)) - theirs.amin((0, 1)))).max() < 8e-6


def test_channels_are_divided_by_their_maximum_as_published():
    x = torch.tensor([[[1.0, -3.0, -2.0]], [[5.0, 4.0, 0.0]]])
    expected = torch.tensor([[[0.0, 0.0, 0.0]], [[4 / 5, 7 / 4, 2.0]]])  # a maximum of zero divides nothing
    assert torch.equal(hopper.normalise(x), expected)


def test_windows_are_stretches_that_the_published_numbers_choose():
    x = torch.arange(200.0).expand(50, 200)[..., None] + 1000 * torch.arange(50.0)[:, None, None]
    cut = hopper.windows(x, np.random.RandomState(1991))
    first = np.random.RandomState(1991).randint(0, 101, size=50)
    assert cut.shape == (50, 100, 1)
    for i in range(50):
        assert torch.equal(cut[i], x[i, first[i] : first[i] + 100])
    assert torch.equal(hopper.windows(x, np.random.RandomState(0), 200), x)
    with pytest.raises(ValueError, match="A window of 201"):
        hopper.windows(x, np.random.RandomState(0), 201)


def test_times_and_parts_are_the_published_ones():
    assert torch.allclose(hopper.times(), torch.linspace(0, 0.495, 100, dtype=torch.float64), atol=1e-15)
    train, test = hopper.train_test(torch.arange(10_000))
    assert torch.equal(train, torch.arange(8000)) and torch.equal(test, torch.arange(8000, 10_000))


@pytest.mark.parametrize(("fraction", "kept"), [(0.1, 10), (0.2, 20), (0.5, 50), (1.0, 100)])
def test_a_fraction_of_the_times_is_observed(fraction, kept):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20, 100, 14, dtype=torch.float64, generator=generator) + 1
    values, mask = hopper.observe(x, fraction, generator)
    assert mask.dtype == x.dtype and mask.shape == x.shape
    assert (mask.sum(1) == kept).all() and ((mask == 0) | (mask == 1)).all() and (mask == mask[..., :1]).all()
    assert torch.equal(values, torch.where(mask == 1, x, 0))
    again = hopper.observe(x, fraction, generator).mask
    assert kept == 100 or not torch.equal(mask, again)
    first, same = (hopper.observe(x, fraction, torch.Generator().manual_seed(1)).mask for _ in range(2))
    assert torch.equal(first, same)
    with pytest.raises(ValueError, match="keeps 0 of 100"):
        hopper.observe(x, 0.001, generator)


# JapaneseVowels


def write_vowels(place: Path, **changes: object) -> Path:
    path = place / "JapaneseVowels" / "japanese_vowels.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    x = np.ones((3, 29, 12), np.float32)
    x[0, 7:] = 0
    part = {"x": x, "len": np.array([7, 29, 29], np.int16), "y": np.array([0, 8, 3])}
    whole = {f"{name}_{split}": value for split in ("train", "test") for name, value in part.items()}
    np.savez(path, **{name: value for name, value in (whole | changes).items() if value is not None})  # type: ignore
    return path


def test_vowels_are_read(tmp_path):
    write_vowels(tmp_path)
    for part in (vowels.load(tmp_path).train, vowels.load(tmp_path).test):
        assert len(part) == 3 and part.x.shape == (3, 29, 12) and part.x.dtype == torch.float32
        assert part.lengths.tolist() == [7, 29, 29] and part.lengths.dtype == torch.int64
        assert part.labels.tolist() == [0, 8, 3] and part.labels.dtype == torch.int64


BAD_VOWELS = {
    "lacks y_test": {"y_test": None},
    "has float32 (3, 28, 12) as x_train": {"x_train": np.ones((3, 28, 12), np.float32)},
    "has int64 (3, 29, 12) as x_test": {"x_test": np.ones((3, 29, 12), np.int64)},
    "has int64 (2,) as y_train, not 3": {"y_train": np.array([0, 1])},
    "has float64 (3,) as len_train": {"len_train": np.ones(3)},
    "values in y_train that are not from 0 to 8": {"y_train": np.array([0, 9, 1])},
    "values in len_test that are not from 1 to 29": {"len_test": np.array([0, 29, 29])},
    "not zero after a sequence's end": {"len_train": np.array([7, 28, 29])},
    "x_train that are not finite": {"x_train": np.full((3, 29, 12), np.inf)},
}


@pytest.mark.parametrize("why", BAD_VOWELS)
def test_damaged_vowels_are_refused(why, tmp_path):
    path = write_vowels(tmp_path, **BAD_VOWELS[why])
    refused(lambda: vowels.load(tmp_path), "JapaneseVowels is damaged", why, str(path), "digits")


def test_truncated_vowels_are_refused(tmp_path):
    path = write_vowels(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    refused(lambda: vowels.load(tmp_path), "is not a whole .npz archive", str(path))


@real("JapaneseVowels")
def test_the_real_vowels_are_read():
    found = vowels.load(REAL)
    assert (len(found.train), len(found.test)) == (270, 370)
    assert found.train.labels.bincount().tolist() == [30] * 9
    assert (found.train.lengths.min(), found.test.lengths.max()) == (7, 29)
