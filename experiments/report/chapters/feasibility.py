"""The claim that naive and ACA cannot train on ImageNet, in bytes."""

from __future__ import annotations

from experiments.engine.record import Record
from experiments.methods import label
from experiments.report.claims import Claim, verdict
from experiments.report.runs import Found, Shown
from experiments.report.tables import Cell, Table
from experiments.theory.feasibility import LIMIT, PER_GPU, TIGHT, solves_of

STEMS = {"large": "7 x 7, pooled (torchvision)", "small": "3 x 3 (reference code)"}


def show(found: list[Found]) -> Shown:
    return [memory_table(*found[0])], [], [naive_and_aca_cannot_train(*found[0])]


def memory_table(record: Record, path: str) -> Table:
    fits, rows = record.results["fits"], []
    for stem in record.config["stems"]:
        for setting in record.config["settings"]:
            for method in solves_of(setting):
                fit = fits[f"{stem} / {setting} / {method}"]
                solver = "ALF, h 1/32" if (method, setting) == ("mali", TIGHT) else setting
                texts = [f"{fit['bytes_per_image'] / 1e6:.0f}", f"{fit['bytes_for_64'] / 1e9:.1f}"]
                texts.append(f"{fit['largest_batch']:,}")
                rows.append([STEMS[stem], label(method), solver, *(Cell(text, path) for text in texts)])
    columns = ("stem", "method", "solver", "MB per image", f"GB for {PER_GPU} images", "largest batch")
    notes = (
        f"A batch of 256 on four GPUs of {LIMIT / 1e9:.0f} GB. Live tensors, with weights and momentum; what a GPU's "
    )
    notes += "allocator and convolutions need beside them is not counted. Lines through two batch sizes"
    rough = [name for name, fit in fits.items() if not fit["same_steps"]]
    notes += (
        f"; the two took different numbers of steps, so that they are rough, in: {'; '.join(rough)}." if rough else "."
    )
    title = "One step of the network for ImageNet at 224 x 224, by method"
    return Table("imagenet", title, columns, rows, notes, [record.command])


def naive_and_aca_cannot_train(record: Record, path: str) -> Claim:
    held, parts = [], []
    for stem in record.config["stems"]:
        for setting in record.config["settings"]:
            names = ("naive", "aca", "adjoint", "mali")
            fits = {m: record.results["fits"][f"{stem} / {setting} / {m}"] for m in names}
            held += [fits[m]["fits"] == (m in ("mali", "adjoint")) for m in names]
            gigabytes = ", ".join(f"{label(m)} {fit['bytes_for_64'] / 1e9:.1f}" for m, fit in fits.items())
            parts.append(f"{stem} stem, {setting}: {gigabytes}")
    rule = f"{PER_GPU} images on a GPU of {LIMIT / 1e9:.0f} GB: MALI and the adjoint fit, naive and ACA do not"
    return Claim("imagenet-memory", verdict(held), f"GB for {PER_GPU} images: {'; '.join(parts)}.", rule, [path])
