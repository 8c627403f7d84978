"""Flow matching: samples, steering through the sampler, inversion."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure

from experiments.engine.record import Record
from experiments.flows.images import unpacked
from experiments.matching.inversion import EDITED, EXACT
from experiments.matching.inversion import METHODS as COUPLINGS
from experiments.matching.steering import METHODS, SHOWN, TASKS
from experiments.report.chapters.flows import beside, sheet
from experiments.report.claims import Finding, check
from experiments.report.figures import Picture
from experiments.report.runs import Found, Shown
from experiments.report.style import COLORS, REFERENCE, log_scale, plain_axes
from experiments.report.tables import Cell, Table, short

LINES: dict[str, dict[str, Any]] = {
    "naive": {"color": COLORS["naive"]},
    "ACA": {"color": COLORS["ACA"]},
    "checkpoint": {"color": COLORS["torchode"]},
    "MALI": {"color": COLORS["MALI"]},
    "MALI exact": {"color": COLORS["MALI exact"]},
    "MALI order 4": {"color": COLORS["MALI alf4"]},
    "adjoint": {"color": COLORS["adjoint"]},
    "last 5": {"color": REFERENCE, "linestyle": "--"},
    "last 1": {"color": REFERENCE, "linestyle": ":"},
}
EXACT_METHODS = ("naive", "ACA", "checkpoint", "MALI", "MALI exact", "MALI order 4")
GB_8 = 8e9


def show(found: list[Found]) -> Shown:
    views = {"matching": _matching, "steering": _steering, "inversion": _inversion}
    tables: list[Table] = []
    pictures: list[Picture] = []
    claims: list[Finding] = []
    for one in found:
        shown = views[one.record.experiment](one)
        tables, pictures, claims = tables + shown[0], pictures + shown[1], claims + shown[2]
    return tables, pictures, claims


def _pixels(record: Record, text: str) -> Any:
    return sheet(unpacked(text, record.results["shape"]), 256)


# Samples


def _matching(one: Found) -> Shown:
    caption = (
        "Left: images of the test set. Middle: samples for the labels 0 to 9 in turn. Right: the same with guidance."
    )
    picture = Picture(
        "matching", "Flow matching of MNIST", caption, partial(_samples, one.record), [one.record.command]
    )
    return [], [picture], []


def _samples(record: Record) -> Figure:
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    names = {"real": "test images", "samples_unguided": "samples", "samples": f"guidance {record.config['guidance']:g}"}
    for ax, (key, title) in zip(figure.subplots(1, 3), names.items(), strict=True):
        ax.imshow(_pixels(record, record.results[key]), interpolation="nearest")
        ax.set_title(title, fontsize=10)
        ax.set_axis_off()
    return figure


# Steering


def _steering(one: Found) -> Shown:
    record, path = one
    command = [record.command]
    caption = "One gradient by the noise, through N steps of a trained U-Net. Left: bytes of live tensors at the peak. "
    caption += "Middle: cosine to the exact gradient of the same steps. Right: its norm."
    curves = Picture("steering", "Gradients through a sampler", caption, partial(_curves, record), command)
    caption = "Top: what is observed (for a label: the image that has it). Below: images whose noise was optimised, by "
    caption += "gradient. The noise is free: a classifier alone is pleased by images that are no digits."
    shown = Picture("steered", "Images from optimised noise", caption, partial(_steered, record), command)
    return [_gradients(record, path), _results(record, path)], [curves, shown], _steering_claims(record, path)


def _cell(record: Record, name: str, n: int) -> dict[str, Any]:
    return record.results["cells"][f"{name} / N {n}"]


def _gradients(record: Record, path: str) -> Table:
    steps, batch = record.config["steps"], record.config["batch"]
    rows = []
    for name in METHODS:
        cells = [_cell(record, name, n) for n in (steps[0], steps[-1])]
        slowest = record.results["times"][name]
        batch_8gb = int(GB_8 / (cells[1]["peak"] / batch))
        texts = [
            *(f"{cell['peak'] / 1e6:.2f}" for cell in cells),
            f"{batch_8gb:,}",
            f"{slowest[1]:.2f} ({slowest[0]:.2f} to {slowest[2]:.2f})",
            *(f"{cell['cosine']:.4f}" for cell in cells),
            f"{cells[1]['error']:.1e}",
        ]
        rows.append([name, *(Cell(text, path) for text in texts)])
    first, last = steps[0], steps[-1]
    columns = (
        "method", f"MB, N = {first}", f"MB, N = {last}", f"batch in 8 GB, N = {last}",
        f"time / naive, N = {record.config['n_timed']}", f"cosine, N = {first}", f"cosine, N = {last}",
        f"error, N = {last}",
    )  # fmt: skip
    refreshed = max(_cell(record, "MALI", n)["refreshes"] for n in steps)
    notes = (
        f"A batch of {batch} images, float32. Peaks of live tensors beyond those before; the batch that fits is the "
        f"peak's share of an image in 8 GB. Errors are relative to plain autograd through the same steps. N counts "
        f"evaluations: order 4 takes N / 5 steps. Refreshes of v, each of which keeps a state: at most {refreshed}. "
        "Times are medians and quartiles of ratios in one process."
    )
    return Table("steering", "A gradient through N steps of a sampler", columns, rows, notes, [record.command])


def _results(record: Record, path: str) -> Table:
    rows = []
    for task, names in TASKS.items():
        for name in names:
            cell = record.results["steered"][f"{task} / {name}"]
            texts = [
                f"{cell['curve'][0]:.1f}",
                f"{cell['loss']:.2f}",
                f"{cell['error']:.3f}",
                f"{cell['accuracy']:.2f}",
            ]
            rows.append([task, name, *(Cell(text, path) for text in texts)])
    columns = ("task", "gradient", "first loss", "last loss", "mean square to the image", "labels by the classifier")
    config = record.config
    notes = (
        f"{config['iterations']} iterations of Adam on the noise of {config['n_images']} images, {config['n_steps']} "
        "steps, a velocity without labels. A classifier of test accuracy "
        f"{record.results['classifier_accuracy']:.3f} judges."
    )
    return Table("steered", "Noise optimised through the sampler", columns, rows, notes, [record.command])


def _curves(record: Record) -> Figure:
    steps = record.config["steps"]
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    memory, cosine, norm = figure.subplots(1, 3)
    for name, line in LINES.items():
        cells = [_cell(record, name, n) for n in steps]
        how: Any = {**line, "label": name, "marker": "o", "markersize": 3.5, "linewidth": 1.3}
        memory.plot(steps, [cell["peak"] / 1e6 for cell in cells], **how)
        cosine.plot(steps, [cell["cosine"] for cell in cells], **how)
    norm.plot(steps, [_cell(record, "naive", n)["norm"] for n in steps], "o-", color=COLORS["naive"], markersize=3.5)
    plain_axes(memory, "peak memory, MB", "steps")
    log_scale(memory, x=True)
    plain_axes(cosine, "cosine to the exact gradient", "steps").set_xscale("log")
    plain_axes(norm, "norm of the exact gradient", "steps").set_xscale("log")
    norm.set_ylim(bottom=0)
    handles, labels = memory.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _steered(record: Record) -> Figure:
    results = record.results
    rows = {"observed": results["observed"]}
    rows |= {name: {task: results["steered"][f"{task} / {name}"]["images"] for task in TASKS} for name in SHOWN}
    figure = Figure(figsize=(7.2, 2.5 * len(rows) * 0.9), layout="constrained")
    axes = figure.subplots(len(rows), len(TASKS))
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for ax, task in zip(line, TASKS, strict=True):
            text = images.get(task, results["real"])  # for a label nothing is observed: the image it belongs to
            ax.imshow(_pixels(record, text), interpolation="nearest")
            ax.set_title(f"{task}: {name}", fontsize=9)
            ax.set_axis_off()
    return figure


def _steering_claims(record: Record, path: str) -> list[Finding]:
    steps = record.config["steps"]
    peaks = {name: [_cell(record, name, n)["peak"] for n in steps] for name in METHODS}
    growth = {name: values[-1] / values[0] for name, values in peaks.items()}
    errors = {name: max(_cell(record, name, n)["error"] for n in steps) for name in METHODS}
    stored = record.results["stored"]
    cosines = {name: _cell(record, name, steps[-1])["cosine"] for name in ("adjoint", "last 5", "last 1")}
    numbers = f"Peak at N = {steps[-1]} over that at {steps[0]}: "
    numbers += ", ".join(f"{name} {short(x, 3)}" for name, x in growth.items()) + "."
    state = 2 * record.config["batch"] * record.results["image_bytes"]  # z and v
    n_refreshed = _cell(record, "MALI", steps[-1])["refreshes"]
    rest = (peaks["MALI"][-1] - n_refreshed * state) / peaks["MALI"][0]
    numbers += f" MALI without the states of {n_refreshed} refreshes: {short(rest, 3)}."
    text = "The memory of MALI's gradient through a sampler is flat, but for one state at each refresh of v"
    claims: list[Finding] = [check("a sampler", text, [rest <= 1.05], numbers, [path])]
    numbers = f"Largest relative error up to N = {steps[-1]}: "
    numbers += ", ".join(f"{name} {errors[name]:.1e}" for name in EXACT_METHODS) + ". Exact mode, stored states: "
    numbers += ", ".join(f"{name} {'equal' if cell['equal'] else 'not equal'}" for name, cell in stored.items()) + "."
    holds = [errors[name] <= 1e-4 for name in ("MALI", "MALI exact", "MALI order 4")]
    holds += [cell["equal"] for cell in stored.values()]
    text = "Gradients are those of autograd to 1e-4 in float32, and of stored states bit for bit in exact mode"
    claims.append(check("a sampler", text, holds, numbers, [path]))
    numbers = f"Cosine at N = {steps[-1]}: " + ", ".join(f"{name} {x:.3f}" for name, x in cosines.items()) + ". "
    losses = {name: record.results["steered"][f"inpainting / {name}"]["loss"] for name in TASKS["inpainting"]}
    numbers += "Inpainting, last loss: " + ", ".join(f"{name} {x:.1f}" for name, x in losses.items()) + "."
    worse = [losses[name] > 1.1 * losses["MALI"] for name in ("last 5", "last 1")]
    claims.append(check("a sampler", "Truncated gradients steer worse", worse, numbers, [path]))
    norms = [_cell(record, "naive", n)["norm"] for n in steps]
    numbers = "Norms of dL/dz0: " + ", ".join(f"{x:.1f} (N = {n})" for n, x in zip(steps, norms, strict=True)) + "."
    text = "The chained Jacobians of this sampler do not explode with the number of steps"
    claims.append(check("a sampler", text, [max(norms) < 2 * norms[0]], numbers, [path]))
    ratio = peaks["checkpoint"][-1] / peaks["MALI"][-1]
    slow = record.results["times"]["MALI"][1] / record.results["times"]["checkpoint"][1]
    numbers = (
        f"Memory of checkpoints over MALI's at N = {steps[-1]}: {ratio:.2f}. Time of MALI over theirs: {slow:.2f}."
    )
    text = "MALI takes less memory than checkpoints every sqrt(N) steps, and no more time"
    claims.append(check("a sampler", text, [ratio > 1, slow <= 1.05], numbers, [path]))
    return claims


# Inversion


def _inversion(one: Found) -> Shown:
    record, path = one
    caption = "Images, encoded with their labels, decoded with the next label and guidance."
    edited = Picture("edited", "Editing by inversion", caption, partial(_edited, record), [record.command])
    return [_round_trips(record, path), _edits(record, path)], [edited], _inversion_claims(record, path)


def _names(record: Record) -> Sequence[str]:
    exact = [f"{name} / {min(record.config['evaluations'])}" for name in EXACT]
    return [*exact, *(f"{name} / {n}" for n in record.config["evaluations"] for name in COUPLINGS)]


def _round_trips(record: Record, path: str) -> Table:
    rows = []
    for name in _names(record):
        cell = record.results["cells"][name]
        alone = cell.get("error_from_noise_alone")
        texts = [
            str(cell["evaluations"]),
            f"{cell['equal_to_the_bit']:,} of {cell.get('images', record.config['n_images']):,}",
            f"{cell['equal_pixels']:,}",
            f"{cell['error']:.1e}",
            "-" if alone is None else f"{alone:.1e}",
            f"{cell['kept_bytes'] / record.results['image_bytes']:.2f}",
            f"{cell['mean']:.3f}", f"{cell['std']:.3f}", f"{cell['excess_kurtosis']:.2f}", f"{cell['neighbours']:.3f}",
        ]  # fmt: skip
        rows.append([name.split(" / ")[0], *(Cell(text, path) for text in texts)])
    columns = (
        "method", "evaluations", "equal to the bit", "in 8-bit pixels", "error (rms)", "from the noise alone",
        "bytes kept / image", "mean", "deviation", "excess kurtosis", "neighbours",
    )  # fmt: skip
    notes = (
        "Image, noise, image, in float32, images in [-1, 1]. Error: back from all that is kept. From the noise alone: "
        "back by a new solve from the first tensor. Bytes kept: noise and second states, or the pickled code, over the "
        "bytes of an image. The last four columns are 0, 1, 0, 0 for normal noise. exact, int32 rounds the image to "
        "its grid first. BELM on equal steps is BDIA with gamma 1."
    )
    return Table("inversion", "Images to noise and back", columns, rows, notes, [record.command])


def _edits(record: Record, path: str) -> Table:
    rows = []
    for name in EDITED:
        cell = record.results["edited"][name]
        texts = [f"{cell['accuracy']:.2f}", f"{cell['distance']:.3f}", f"{cell['distance_of_others']:.3f}"]
        rows.append([name, *(Cell(text, path) for text in texts)])
    columns = ("inversion", "new label, by the classifier", "distance to the image", "of another edited image")
    notes = (
        f"{record.config['n_edited']} images; guidance {record.config['guidance']:g}; decoded by ALF. rms distances."
    )
    return Table("edited", "Editing: another label", columns, rows, notes, [record.command])


def _edited(record: Record) -> Figure:
    shown = {"images": record.results["real"]}
    shown |= {name: record.results["edited"][name]["images"] for name in ("ALF", "Euler")}
    figure = Figure(figsize=(7.2, 2.7), layout="constrained")
    ax = figure.subplots()
    ax.imshow(beside(*(_pixels(record, text) for text in shown.values())), interpolation="nearest")
    ax.set_title("images; next label after inversion by ALF; by Euler", fontsize=10)
    ax.set_axis_off()
    return figure


def _inversion_claims(record: Record, path: str) -> list[Finding]:
    cells, n = record.results["cells"], min(record.config["evaluations"])
    exact = cells[f"exact, int64 / {n}"]
    there = exact["equal_in_a_second_process"]
    numbers = f"{exact['equal_to_the_bit']:,} of {exact['images']:,} equal; {there:,} in a second process. Others at "
    numbers += f"{n} evaluations: "
    numbers += ", ".join(f"{name} {cells[f'{name} / {n}']['equal_to_the_bit']:,}" for name in COUPLINGS)
    pixels = [name for name in COUPLINGS if cells[f"{name} / {n}"]["equal_pixels"] == record.config["n_images"]]
    numbers += f" of {record.config['n_images']:,}. In 8-bit pixels all are equal with {', '.join(pixels)}, which keep "
    numbers += f"2 times the bytes of an image, the code {exact['kept_bytes'] / record.results['image_bytes']:.1f}."
    holds = [exact["equal_to_the_bit"] == exact["images"], there == exact["images"]]
    text = "Exact mode rebuilds images from noise and code bit for bit; couplings in floats do not"
    floats = [cells[f"{name} / {n}"]["equal_to_the_bit"] < record.config["n_images"] for name in COUPLINGS]
    claims: list[Finding] = [check("a sampler", text, [*holds, *floats], numbers, [path])]
    edited = record.results["edited"]
    numbers = "Distance to the image, and of another edited image to it: "
    numbers += (
        ", ".join(f"{name} {x['distance']:.2f}, {x['distance_of_others']:.2f}" for name, x in edited.items()) + "."
    )
    kept = [x["distance"] < 0.8 * x["distance_of_others"] for x in edited.values()]
    text = "A picture that is decoded with another label keeps what it can of its own"
    return [*claims, check("a sampler", text, kept, numbers, [path])]
