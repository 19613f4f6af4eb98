"""What metrics cost in this package, Quantus, grad-cam and Captum, in bare forward passes of the
model.

    python examples/benchmarks/metrics.py [--rows road] [--rounds 3] [--threads 2] [--json file]
        [--update] [--quick]

All run in one process on the same ResNet-18, photo and map, in turn, each between two runs of
``model(x)`` for one photo in inference mode. A figure is the median over the rounds, after one run
to warm up, of its time by the mean of these two. Behind ours stands, for each altered photo, its
time by the batched forward pass: the best of batches of 8, 16 and 32 in both memory layouts, run in
the same rounds. Peers that take over 100 passes get one round. The last rows say what sharing
saves, several methods, or metrics, in one call by the sum of a call for each; and how much more
memory many steps take than few.

The photo has 216 pixels a side, not 224: Quantus counts each channel's pixel as a step of its own,
and takes only steps that divide height by width, so that three channels go together only where
these can be divided by three. Its ROAD fails with photos of three channels, so that a row has it
with a grey one, where it runs the most relevant pixels only, half of what ours does.

What is printed is the table in docs/benchmarks.md. The peers are in the extra ``peers``; ``--quick``
shrinks everything and says nothing about speed.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.metadata
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from tables import Table, line, page_of, replaced
from timing import peak_bytes
from torch import nn

import explain
from explain.baselines import Zero
from explain.methods import Saliency
from explain.metrics import MPRT, ROAD, Deletion, Infidelity, Insertion, PixelFlipping, Sensitivity

# the profiler, which measures memory, need not say when it starts
os.environ["KINETO_LOG_LEVEL"] = "99"
warnings.filterwarnings("ignore")  # of the peers, about this and that
COLUMNS = {"explain": "explain", "Quantus": "quantus", "grad-cam": "grad-cam", "Captum": "captum"}
TARGET = 1
LONG = 100
EIGHT = [
    "gradcam",
    "gradcam++",
    "hirescam",
    "layercam",
    "saliency",
    "inputxgradient",
    "guidedbackprop",
    "randomcam",
]
Work = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """A piece of work in each package's words; ``photos`` is how many altered photos ours runs."""

    name: str
    works: dict[str, Work]
    photos: int | None = None
    apart: Work | None = None
    """The same in several calls, to say what sharing saves."""
    notes: dict[str, str] = field(default_factory=dict)
    few: Work | None = None
    """The same work with fewer steps, to say whether memory grows with them."""


def network() -> nn.Module:
    """A ResNet-18 whose normalisations know what they normalise."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18(weights=None)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 112, 112))
    return model.eval()


class Grey(nn.Module):
    """A network of colours that is shown photos of one channel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(x.expand(-1, 3, -1, -1))
        return found


def table(versions: dict[str, str | None]) -> Table:
    heads = (
        f"{name} {versions[name]}" if name != "explain" and versions[name] else name
        for name in COLUMNS
    )
    return Table("metrics", ("work", *heads), tuple((name,) for name, _ in rows(False)))


def quantus_work(
    name: str, model: nn.Module, x: torch.Tensor, maps: torch.Tensor, **options: Any
) -> Work:
    def work() -> Any:
        import quantus

        metric = getattr(quantus, name)(
            normalise=False, abs=False, disable_warnings=True, display_progressbar=False, **options
        )
        return metric(
            model=model,
            x_batch=x.numpy(),
            y_batch=np.array([TARGET]),
            a_batch=maps[:, None].numpy(),
            softmax=True,
            device="cpu",
        )

    return work


def quantus_mprt(model: nn.Module, x: torch.Tensor) -> Work:
    def gradient(model: nn.Module, inputs: Any, targets: Any, **_: Any) -> np.ndarray[Any, Any]:
        pixels = torch.as_tensor(inputs).float().requires_grad_()
        score = model(pixels).gather(1, torch.as_tensor(targets)[:, None]).sum()
        return torch.autograd.grad(score, pixels)[0].abs().amax(1, keepdim=True).numpy()

    def work() -> Any:
        import quantus

        metric = quantus.MPRT(
            disable_warnings=True, display_progressbar=False, layer_order="top_down"
        )
        return metric(
            model=model,
            x_batch=x.numpy(),
            y_batch=np.array([TARGET]),
            a_batch=None,
            device="cpu",
            explain_func=gradient,
        )

    return work


def grad_cam_road(
    model: nn.Module, x: torch.Tensor, maps: torch.Tensor, percentiles: tuple[int, ...]
) -> Work:
    def work() -> Any:
        from pytorch_grad_cam.metrics.road import ROADCombined
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputSoftmaxTarget

        targets = [ClassifierOutputSoftmaxTarget(TARGET)]
        return ROADCombined(percentiles=list(percentiles))(x, maps.numpy(), targets, model)

    return work


def captum_infidelity(model: nn.Module, x: torch.Tensor, samples: int) -> Work:
    def perturb(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        noise = 0.2 * torch.randn_like(inputs)
        return noise, inputs - noise

    def work() -> Any:
        from captum.metrics import infidelity

        return infidelity(
            model, perturb, x, x, target=TARGET, n_perturb_samples=samples, normalize=True
        )

    return work


def captum_sensitivity(model: nn.Module, x: torch.Tensor, samples: int) -> Work:
    def work() -> Any:
        from captum.attr import Saliency as Theirs
        from captum.metrics import sensitivity_max

        return sensitivity_max(Theirs(model).attribute, x, n_perturb_samples=samples, target=TARGET)

    return work


def rows(quick: bool) -> Iterator[tuple[str, Callable[[nn.Module, torch.Tensor], Row]]]:
    """The name and what builds each row, when its turn comes."""
    steps, samples = (12, 2) if quick else (216, 10)
    shares = (30, 60) if quick else (10, 20, 30, 40, 50, 60, 70, 80, 90)

    def judge(model: nn.Module, x: torch.Tensor, given: Any, metrics: Any, **more: Any) -> Work:
        return lambda: explain.evaluate(model, x, given, metrics, target=TARGET, **more)

    def maps_of(x: torch.Tensor) -> torch.Tensor:
        coarse = torch.rand(1, 1, 7, 7, generator=torch.Generator().manual_seed(3))
        return nn.functional.interpolate(coarse, size=tuple(x.shape[2:]), mode="bicubic")[:, 0]

    def flipping(model: nn.Module, x: torch.Tensor) -> Row:
        maps = maps_of(x)
        pixels = maps[0].numel() // steps
        works = {
            "explain": judge(model, x, {"map": maps}, PixelFlipping(steps=steps, baseline=Zero())),
            "Quantus": quantus_work(
                "PixelFlipping", model, x, maps, features_in_step=3 * pixels, perturb_baseline=0.0
            ),
        }
        return Row("", works, photos=steps)

    def road(model: nn.Module, x: torch.Tensor) -> Row:
        maps = maps_of(x)
        works = {
            "explain": judge(model, x, {"map": maps}, ROAD(shares)),
            "grad-cam": grad_cam_road(model, x, maps, shares),
            "Quantus": quantus_work("ROAD", model, x, maps, percentages=list(shares)),
        }
        return Row("", works, photos=2 * len(shares))

    def grey_road(model: nn.Module, x: torch.Tensor) -> Row:
        grey = Grey(model).eval()
        photo = x.mean(1, keepdim=True)
        maps = maps_of(x)
        works = {
            "explain": judge(grey, photo, {"map": maps}, ROAD(shares)),
            "Quantus": quantus_work("ROAD", grey, photo, maps, percentages=list(shares)),
        }
        return Row("", works, photos=2 * len(shares))

    def memory(model: nn.Module, x: torch.Tensor) -> Row:
        maps = maps_of(x)
        few = max(1, steps // 8)
        many, some = (
            judge(
                model,
                x,
                {"map": maps},
                PixelFlipping(steps=count, baseline=Zero()),
                batch_size=1 if quick else 16,
            )
            for count in (steps, few)
        )
        return Row("", {"explain": many}, few=some)

    def infidelity(model: nn.Module, x: torch.Tensor) -> Row:
        works = {
            "explain": judge(model, x, {"map": x}, Infidelity(samples)),
            "Captum": captum_infidelity(model, x, samples),
        }
        return Row("", works, photos=samples)

    def sensitivity(model: nn.Module, x: torch.Tensor) -> Row:
        works = {
            "explain": judge(model, x, Saliency(), Sensitivity(samples=samples)),
            "Captum": captum_sensitivity(model, x, samples),
        }
        return Row("", works)

    def randomisation(model: nn.Module, x: torch.Tensor) -> Row:
        count = 2 if quick else None
        works = {
            "explain": judge(model, x, Saliency(), MPRT(steps=count)),
            "Quantus": quantus_mprt(model, x),
        }
        return Row("", works)

    def methods(model: nn.Module, x: torch.Tensor) -> Row:
        metrics = ["infidelity", "faithfulnesscorrelation", "sensitivityn", "nonsensitivity"]
        metrics = metrics[:1] if quick else metrics
        apart = [judge(model, x, name, metrics) for name in EIGHT]
        return Row(
            "",
            {"explain": judge(model, x, EIGHT, metrics)},
            apart=lambda: [work() for work in apart],
        )

    def metrics(model: nn.Module, x: torch.Tensor) -> Row:
        baseline = Zero()
        count = 4 if quick else 64
        several = [
            Deletion(count, baseline),
            Insertion(count, baseline),
            PixelFlipping("morf", count, baseline),
            PixelFlipping("lerf", count, baseline),
        ]
        apart = [judge(model, x, "saliency", metric) for metric in several]
        together = judge(model, x, "saliency", several)
        return Row("", {"explain": together}, apart=lambda: [work() for work in apart])

    yield f"pixel flipping, {steps} steps", flipping
    yield f"ROAD, {len(shares)} percentiles, both orders", road
    yield f"ROAD of a grey photo, {len(shares)} percentiles", grey_road
    yield f"infidelity, {samples} samples", infidelity
    yield f"largest sensitivity of saliency, {samples} samples", sensitivity
    yield "parameter randomisation of saliency, layer by layer from the top", randomisation
    yield "8 methods in one call, metrics with the same altered photos", methods
    yield "deletion, insertion, MoRF and LeRF in one call", metrics
    yield f"memory of {steps} steps of pixel flipping, by that of an eighth of them", memory


def seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def batches(model: nn.Module, x: torch.Tensor) -> list[tuple[int, Work]]:
    """Forward passes of many photos, in the sizes and layouts of which the best is compared
    with."""
    found = []
    for size in (8, 16, 32):
        for layout in (torch.contiguous_format, torch.channels_last):
            many = x.repeat(size, 1, 1, 1).contiguous(memory_format=layout)
            found.append((size, lambda many=many: model(many)))
    return found


def measured(row: Row, model: nn.Module, x: torch.Tensor, rounds: int) -> dict[str, str]:
    """The cells of a row, by column."""
    cells = dict(row.notes)
    if row.few is not None:
        return {
            "explain": f"{peak_bytes(row.works['explain']) / peak_bytes(row.few):.2f} times as much"
        }
    passes = batches(model, x) if row.photos is not None else []
    each_photo: dict[int, list[float]] = {number: [] for number in range(len(passes))}

    def bare() -> float:
        with torch.inference_mode():
            return statistics.median(seconds(lambda: model(x)) for _ in range(5))

    works = {**row.works, **({} if row.apart is None else {"apart": row.apart})}
    first = {}
    for name, work in list(works.items()):
        try:
            first[name] = seconds(work)
        except Exception as error:
            cells[name] = (
                "not installed" if isinstance(error, ImportError) else type(error).__name__
            )
            del works[name]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for turn in range(rounds):
        before = bare()
        for name, work in works.items():
            if turn and first[name] > LONG * before:
                continue
            took = seconds(work)
            after = bare()
            found[name].append((took / (before + after) * 2, took))
            before = after
        with torch.inference_mode():
            for number, (size, work) in enumerate(passes):
                if not turn:
                    work()
                each_photo[number].append(seconds(work) / size)
    ratios = {name: statistics.median(each for each, _ in pairs) for name, pairs in found.items()}
    for name in row.works:
        if name in ratios:
            cells[name] = f"{ratios[name]:.1f}"
    if "explain" in ratios and row.photos is not None:
        took = statistics.median(took for _, took in found["explain"])
        best = min(statistics.median(times) for times in each_photo.values())
        cells["explain"] += f" ({took / row.photos / best:.2f} of the batched pass each)"
    if "apart" in ratios and "explain" in ratios:
        cells["explain"] += f" ({ratios['apart'] / ratios['explain']:.1f} × less than apart)"
    return cells


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default="*", help="only rows whose name has this in it, or fits it as a pattern"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--update", action="store_true", help="put the table into its page of docs/"
    )
    parser.add_argument(
        "--quick", action="store_true", help="small and quick, to see that everything runs"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    side = 48 if options.quick else 216
    model = network()
    x = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    print(table({name: version(of) for name, of in COLUMNS.items()}).head(), flush=True)
    document = {}
    printed = []
    if options.update and options.quick:
        parser.error("--update is for measured tables; leave out --quick")
    for name, build in rows(options.quick):
        if options.rows.lower() not in name.lower() and not fnmatch.fnmatch(name, options.rows):
            continue
        cells = measured(build(model, x), model, x, 1 if options.quick else options.rounds)
        document[name] = cells
        printed.append(line([name, *(cells.get(column, "–") for column in COLUMNS)]))
        print(printed[-1], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1), "utf-8")
    if options.update and options.rows == "*":
        page = page_of("metrics")
        found = "\n".join(
            [table({name: version(of) for name, of in COLUMNS.items()}).head(), *printed]
        )
        page.write_text(replaced(page.read_text("utf-8"), "metrics", found), "utf-8")
        print(f"written to {page}")


if __name__ == "__main__":
    main()
