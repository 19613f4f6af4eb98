"""Train a small deep network on real images, watch its gradients vanish or die, and see what keeps
them alive.

    python examples/training.py                              crops of the photos in assets/, to be
                                                             told by photo
    python examples/training.py path/to/tiny-imagenet-200    the first classes of a folder of
                                                             labelled images

A folder has one folder of images for each class, in itself or in ``train/``, as torchvision's
ImageFolder takes them. Ten convolutions are trained four times, for 300 steps each: with sigmoids,
and with ReLU and batch normalisation; then with ReLU alone at a learning rate that is far too high,
without and with a `GradientClipper`. A `GradientFlow` watches each run. It is made before the
clipper, so what it sees is not yet clipped. The figure is written to ``--output``.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

from explain.data.opening import EXTENSIONS
from explain.training import GradientClipper, GradientFlow

ASSETS = Path(__file__).resolve().parents[1] / "assets"
SIDE = 32
DEPTH = 10
WIDTH = 32
BATCH = 64


@dataclass(frozen=True)
class Data:
    pixels: torch.Tensor
    labels: torch.Tensor

    def batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(self.labels), (BATCH,), generator=generator)
        return self.pixels[chosen], self.labels[chosen]


@dataclass(frozen=True)
class Variant:
    title: str
    activation: type[nn.Module]
    rate: float
    normalised: bool = False
    clip: float | None = None


@dataclass
class Run:
    variant: Variant
    flow: GradientFlow
    losses: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    clipped: int = 0

    def sizes(self, layer: str) -> list[float]:
        """Return the root mean square of a layer's gradient at each step."""
        return [step[f"{layer}.weight"].rms for step in self.flow.steps]


PAIRS = {
    "Ten layers at a learning rate of 0.05": (
        Variant("sigmoid", nn.Sigmoid, 0.05),
        Variant("ReLU and batch normalisation", nn.ReLU, 0.05, normalised=True),
    ),
    "Ten layers with ReLU alone at a learning rate of 0.3": (
        Variant("not clipped", nn.ReLU, 0.3),
        Variant("each gradient clipped to a norm of 0.02", nn.ReLU, 0.3, clip=0.02),
    ),
}
LAYERS = [*(f"conv{i}" for i in range(1, DEPTH + 1)), "fc"]
SPAN = 20
TONES = ("#c0392b", "#2563a8")


def images_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)


def from_folder(folder: Path, classes: int, per_class: int = 500) -> tuple[Data, Data]:
    """Return training and held-out images (one in five) of the first classes of a folder."""
    root = folder / "train" if (folder / "train").is_dir() else folder
    found = [
        images[:per_class]
        for sub in sorted(root.iterdir())
        if sub.is_dir() and (images := images_in(sub))
    ]
    if len(found) < 2:
        raise SystemExit(
            f"{folder} must have a folder of images for each of two or more classes, got "
            f"{len(found)}"
        )
    files = [(path, label) for label, images in enumerate(found[:classes]) for path in images]
    pixels = as_pixels(Image.open(path) for path, _ in files)
    labels = torch.tensor([label for _, label in files])
    held_out = torch.arange(len(files)) % 5 == 0
    return Data(pixels[~held_out], labels[~held_out]), Data(pixels[held_out], labels[held_out])


def from_photos(per_photo: int = 500) -> tuple[Data, Data]:
    """Return crops of the photos in assets/, to be told by photo; the held-out ones come from the
    right quarter."""
    random = np.random.default_rng(0)
    photos = [
        Image.open(path).convert("RGB") for path in images_in(ASSETS) if path.parent == ASSETS
    ]
    parts = []
    for share, (start, end) in ((0.8, (0, 0.75)), (0.2, (0.75, 1))):
        crops = []
        labels = []
        for label, photo in enumerate(photos):
            left = round(start * photo.width)
            right = round(end * photo.width) - 2 * SIDE
            for _ in range(round(share * per_photo)):
                x = random.integers(left, right + 1)
                y = random.integers(0, photo.height - 2 * SIDE + 1)
                crops.append(photo.crop((x, y, x + 2 * SIDE, y + 2 * SIDE)))
                labels.append(label)
        parts.append(Data(as_pixels(crops), torch.tensor(labels)))
    return parts[0], parts[1]


def as_pixels(images: Iterable[Image.Image]) -> torch.Tensor:
    found = [
        np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        for image in images
    ]
    return torch.from_numpy(np.stack(found)).permute(0, 3, 1, 2).float().div(127.5).sub(1)


def network(variant: Variant, classes: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i in range(1, DEPTH + 1):
        channels = 3 if i == 1 else WIDTH
        stride = 2 if i in (1, DEPTH // 2) else 1
        conv = nn.Conv2d(channels, WIDTH, 3, stride, padding=1, bias=not variant.normalised)
        nn.init.kaiming_normal_(conv.weight, nonlinearity=variant.activation.__name__.lower())
        layers[f"conv{i}"] = conv
        if variant.normalised:
            layers[f"norm{i}"] = nn.BatchNorm2d(WIDTH, affine=False)
        layers[f"act{i}"] = variant.activation()
    layers |= {
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
        "fc": nn.Linear(WIDTH, classes),
    }
    return nn.Sequential(layers)


def train(variant: Variant, data: Data, held_out: Data, steps: int, seed: int) -> Run:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = network(variant, int(data.labels.max()) + 1)
    solver = torch.optim.SGD(model.parameters(), lr=variant.rate, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(solver, 1, 0, steps)
    run = Run(variant, GradientFlow(model))
    clipping = GradientClipper(model, norm=variant.clip) if variant.clip else nullcontext()
    with run.flow, clipping as clipper:
        for step in range(1, steps + 1):
            x, y = data.batch(generator)
            loss = F.cross_entropy(model(x), y)
            run.losses.append(loss.item())
            if not loss.isfinite():
                print(f"    step {step:>4}: the loss is not finite")
                break
            solver.zero_grad()
            loss.backward()
            solver.step()
            schedule.step()
            if step % max(1, steps // 5) == 0:
                print(f"    step {step:>4}: loss {np.mean(run.losses[-SPAN:]):.3f}", flush=True)
    run.accuracy = accuracy(model, held_out)
    run.clipped = sum(clipper.clipped.values()) if clipper else 0
    return run


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    return (model.eval()(data.pixels).argmax(1) == data.labels).float().mean().item()


def report(run: Run, classes: int) -> None:
    print(
        f"    {run.accuracy:.1%} of the held-out images are right, {1 / classes:.1%} would be by "
        "chance"
    )
    verdicts = {
        name: verdict for name, verdict in run.flow.verdicts().items() if name.endswith("weight")
    }
    for verdict in sorted(set(verdicts.values())):
        names = [name for name in verdicts if verdicts[name] == verdict]
        print(f"    {verdict}: {', '.join(names) if len(names) < len(verdicts) else 'all weights'}")
    if not run.flow.steps:
        return
    last = run.flow.steps[-1]
    print(
        f"    zero in the last step: {sum(flow.rms == 0 for flow in last.values())} of {len(last)} "
        "gradients"
    )
    if run.clipped:
        print(f"    clipped: {run.clipped} of {len(run.flow.steps) * len(last)} gradients")


def draw(runs: dict[str, list[Run]]) -> Figure:
    """Return the figure: for each pair of runs, the gradient along the layers and over the steps,
    and the loss."""
    figure = Figure(figsize=(12, 7.6), layout="constrained", dpi=130)
    for part, (title, pair) in zip(
        figure.subfigures(len(runs), 1, hspace=0.06), runs.items(), strict=True
    ):
        part.suptitle(title, fontweight="bold")
        by_layer, by_step, loss = part.subplots(1, 3)
        for run, tone in zip(pair, TONES, strict=True):
            if run.flow.steps:
                by_layer.plot(
                    LAYERS,
                    [np.mean(run.sizes(layer)) for layer in LAYERS],
                    "o-",
                    color=tone,
                    markersize=4,
                )
            over_time(by_step, run, tone)
            label = f"{run.variant.title} ({run.accuracy:.0%} of held-out images right)"
            loss.plot(range(1, 1 + len(run.losses)), smoothed(run.losses), color=tone, label=label)
        by_layer.set(yscale="log", title="gradient of each layer, mean of all steps")
        by_layer.set_ylabel("root mean square", fontsize=9)
        by_layer.tick_params("x", rotation=60)
        by_step.set(
            yscale="log", title="gradient of the first layer, before clipping if any", xlabel="step"
        )
        loss.set_yscale("log")  # one that explodes would hide the others
        loss.set(title=f"training loss, mean of the last {SPAN} steps or fewer", xlabel="step")
        for axes in (by_layer, by_step, loss):
            axes.title.set_fontsize(10)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        part.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def smoothed(losses: list[float]) -> list[float]:
    """Return, for each step, the mean of the last `SPAN` losses, or of all where there have been
    fewer."""
    return [float(np.mean(losses[max(0, end - SPAN) : end])) for end in range(1, 1 + len(losses))]


def over_time(axes: Axes, run: Run, tone: str) -> None:
    sizes = np.array(run.sizes(LAYERS[0]))
    axes.plot(
        range(1, 1 + len(sizes)), np.where(sizes > 0, sizes, np.nan), color=tone, linewidth=0.8
    )
    alive = np.flatnonzero(sizes)
    if len(alive) and alive[-1] < len(sizes) - 1:
        end = alive[-1] + 1, sizes[alive[-1]]
        note = f"zero from\nstep {end[0] + 1} on"
        axes.annotate(note, end, (10, -20), textcoords="offset points", color=tone, fontsize=8)


def counted(text: str, least: int = 1) -> int:
    """Read a whole number of at least one, as argparse wants it."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of at least {least}, got {text!r}"
        )
    return int(text)


def writable(text: str) -> Path:
    """Read the place of the figure, and refuse it now rather than after all the training."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"must be in a folder that exists, got {text!r}; create the folder first"
        )
    if path.suffix.removeprefix(".").lower() not in (
        known := FigureCanvasAgg.get_supported_filetypes()
    ):
        raise argparse.ArgumentTypeError(
            f"must end in one of {', '.join(sorted(known))}, got {text!r}"
        )
    return path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", help="labelled images; without it, crops of the photos here"
    )
    parser.add_argument(
        "--output", type=writable, default="gradient_flow.png", help="where to write the figure"
    )
    parser.add_argument(
        "--classes", type=partial(counted, least=2), default=10, help="how many classes to learn"
    )
    parser.add_argument("--steps", type=counted, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    data, held_out = (
        from_folder(options.folder, options.classes) if options.folder else from_photos()
    )
    classes = int(data.labels.max()) + 1
    print(
        f"{len(data.labels)} images to learn from, {len(held_out.labels)} held out, {classes} "
        "classes"
    )
    runs: dict[str, list[Run]] = {}
    for title, pair in PAIRS.items():
        for variant in pair:
            print(f"\n{title}: {variant.title}")
            run = train(variant, data, held_out, options.steps, options.seed)
            report(run, classes)
            runs.setdefault(title, []).append(run)
    draw(runs).savefig(options.output)
    print(f"\nfigure of the gradients and losses written to {options.output}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:  # a folder, an image or the figure
        sys.exit(f"training.py: {error}")
