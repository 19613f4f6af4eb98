"""What the same explanation costs in this package, grad-cam, Captum and torchcam, in bare forward
passes of the model.

    python examples/benchmarks/peers.py [--rows scorecam] [--rounds 7] [--threads 2] [--json file]
    [--quick]

All run in one process on the same model, input and layer, in turn, each between two runs of
``model(x)`` in inference mode. A figure is the median over the rounds, after one run to warm up, of
its time by the mean of these two; work that takes over 100 passes gets two rounds. Behind it, the
peak of what torch allocates, by that of the bare pass (not for such long work). Networks have
random weights and normalisations that have seen data. The peers are in the extra ``peers``;
``--quick`` shrinks everything and says nothing about speed.

Work that runs the network on many altered photos is also told by the batched forward pass, per
photo: the best of batches of 4, 8, 16 and 32 in both memory layouts, all of them run in the same
rounds.

What is printed is the table in docs/benchmarks.md: time, and the memory behind it in brackets.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fnmatch
import importlib.metadata
import io
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torchvision
from covered import cases
from tables import Table, line, shown
from timing import peak_bytes
from torch import nn

import explain
from explain.methods import LRP, IntegratedGradients
from explain.relevance.composites import attn_lrp

# the profiler, which measures memory, need not say when it starts
os.environ["KINETO_LOG_LEVEL"] = "99"
# at every call, that it hooks ReLUs and asks inputs for gradients
warnings.filterwarnings("ignore", module="captum")

COLUMNS = {
    "explain": "explain-hooks",
    "grad-cam": "grad-cam",
    "Captum": "captum",
    "torchcam": "torchcam",
    "zennit": "zennit",
}
SEVEN = ["gradcam", "gradcam++", "xgradcam", "hirescam", "elementwisecam", "layercam", "eigencam"]
COVERING = ["occlusion", "featureablation", "shapleysampling", "kernelshap", "lime"]
STAGES = ["layer1", "layer2", "layer3", "layer4"]
RELEVANCE = {"Epsilon": 2.6, "EpsilonPlusFlat": 3.5, "EpsilonAlpha2Beta1Flat": 6.0}
TARGET = 1
LONG = 100
BATCHES = (4, 8, 16, 32)
LAYOUTS = (torch.contiguous_format, torch.channels_last)
Work = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One line of the table: a piece of work in each package's words, where it has any."""

    name: str
    goal: float | None
    model: nn.Module
    x: torch.Tensor
    works: dict[str, Work]
    per: int = 1
    notes: dict[str, str] = field(default_factory=dict)
    batched: bool = False
    """Whether the time is told by that of the batched forward pass too."""

    def bare(self) -> object:
        with torch.inference_mode():
            return self.model(self.x)


@cache
def network(name: str) -> nn.Module:
    """A network whose normalisations know what they normalise, so that its numbers are of the usual
    size."""
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    if isinstance(model, torchvision.models.VisionTransformer):
        nn.init.normal_(model.heads[-1].weight, std=0.02)  # it begins with zeros, which say nothing
        return model.eval()
    with torch.no_grad():
        model.train()(torch.randn(8, 3, 112, 112))
    return model.eval()


# Each package in its own words


def ours(model: nn.Module, x: torch.Tensor, methods: list[Any], **more: Any) -> Work:
    return lambda: explain.attribute(model, x, methods, target=TARGET, **more)


def grad_cam(
    model: nn.Module, x: torch.Tensor, *names: str, layers: list[str], targets: Any = (TARGET,)
) -> Work:
    def work() -> None:
        import pytorch_grad_cam
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        modules = [model.get_submodule(layer) for layer in layers]
        with contextlib.redirect_stderr(io.StringIO()):  # where it draws a bar for every image
            for name in names:
                for target in targets:
                    with getattr(pytorch_grad_cam, name)(model, modules) as cam:
                        cam(x, [ClassifierOutputTarget(target)] * len(x))

    return work


def torchcam(
    model: nn.Module, x: torch.Tensor, *names: str, layers: list[str], targets: Any = (TARGET,)
) -> Work:
    def work() -> None:
        from torchcam import methods

        for name in names:
            with getattr(methods, name)(model, layers, input_shape=tuple(x.shape[1:])) as extractor:
                if name == "ScoreCAM":
                    with torch.inference_mode():
                        model(x)
                    extractor(TARGET, normalized=False)
                    continue
                scores = model(x)
                for target in targets:
                    extractor(target, scores, normalized=False, retain_graph=target != targets[-1])

    return work


def captum(
    name: str,
    model: nn.Module,
    x: torch.Tensor,
    layer: str | None = None,
    targets: Any = (TARGET,),
    **more: Any,
) -> Work:
    def work() -> None:
        import captum.attr

        where = [] if layer is None else [model.get_submodule(layer)]
        for target in targets:
            getattr(captum.attr, name)(model, *where).attribute(x, target=target, **more)

    return work


def guided_grad_cam(model: nn.Module, x: torch.Tensor) -> Work:
    lent = copy.deepcopy(model)  # it exchanges the modules

    def work() -> None:
        from pytorch_grad_cam import GuidedBackpropReLUModel

        GuidedBackpropReLUModel(lent)(x.clone(), TARGET)

    return work


def zennit(model: nn.Module, x: torch.Tensor, composite: str) -> Work:
    def work() -> None:
        from zennit import composites, rules, types
        from zennit.attribution import Gradient
        from zennit.torchvision import ResNetCanonizer

        if composite == "Epsilon":
            everywhere = ((types.Convolution, rules.Epsilon()), (nn.Linear, rules.Epsilon()))
            layers = [*composites.layer_map_base(), *everywhere]
            made = composites.LayerMapComposite(layers, canonizers=[ResNetCanonizer()])
        else:
            made = getattr(composites, composite)(canonizers=[ResNetCanonizer()])
        with Gradient(model=model, composite=made) as attributor:
            attributor(x, torch.eye(1000)[[TARGET] * len(x)])

    return work


def together(*works: Work) -> Work:
    return lambda: [work() for work in works]


def by_hand(model: nn.Module, x: torch.Tensor) -> Work:
    """The gradient in the pixels in plain torch: what no package can do without."""

    def work() -> torch.Tensor:
        pixels = x.clone().requires_grad_()
        return torch.autograd.grad(model(pixels)[:, TARGET].sum(), pixels)[0]

    return work


# The table


def table(versions: dict[str, str | None]) -> Table:
    heads = (
        f"{name} {versions[name]}" if name != "explain" and versions[name] else name
        for name in COLUMNS
    )
    return Table("peers", ("work", *heads), tuple((name,) for name, _, _ in rows(False)))


def rows(quick: bool) -> Iterator[tuple[str, float | None, Callable[[str, float | None], Row]]]:
    """The name, the goal and what builds each row, when its turn comes."""
    large, side, last = ("resnet18", 64, "layer4") if quick else ("resnet50", 224, "layer4")
    steps, layer, channels = (4, "layer1", 64) if quick else (50, "layer4", 512)
    batches, covered = ((1, 2), 32) if quick else ((1, 16), 96)

    def photo(batch: int = 1) -> torch.Tensor:
        return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(batch))

    def gradcam(name: str, goal: float | None, batch: int) -> Row:
        model = network(large)
        x = photo(batch)
        works = {
            "explain": ours(model, x, ["gradcam"], layer=last),
            "grad-cam": grad_cam(model, x, "GradCAM", layers=[last]),
            "Captum": captum("LayerGradCam", model, x, last, relu_attributions=True),
            "torchcam": torchcam(model, x, "GradCAM", layers=[last]),
        }
        return Row(name, goal, model, x, works)

    def seven(name: str, goal: float | None) -> Row:
        model = network(large)
        x = photo()
        theirs = [
            "GradCAM",
            "GradCAMPlusPlus",
            "XGradCAM",
            "HiResCAM",
            "GradCAMElementWise",
            "LayerCAM",
            "EigenCAM",
        ]
        works = {
            "explain": ours(model, x, SEVEN, layer=last),
            "grad-cam": grad_cam(model, x, *theirs, layers=[last]),
            "Captum": together(
                *(captum(n, model, x, last) for n in ("LayerGradCam", "LayerGradientXActivation"))
            ),
            "torchcam": torchcam(
                model, x, "GradCAM", "GradCAMpp", "XGradCAM", "LayerCAM", layers=[last]
            ),
        }
        return Row(name, goal, model, x, works, notes={"Captum": "2 of 7", "torchcam": "4 of 7"})

    def top_five(name: str, goal: float | None) -> Row:
        model = network(large)
        x = photo()
        five = range(5)
        works = {
            "explain": lambda: explain.attribute(
                model, x, ["gradcam"], top_k=len(five), layer=last
            ),
            "grad-cam": grad_cam(model, x, "GradCAM", layers=[last], targets=five),
            "Captum": captum("LayerGradCam", model, x, last, targets=five),
            "torchcam": torchcam(model, x, "GradCAM", layers=[last], targets=five),
        }
        return Row(name, goal, model, x, works)

    def stages(name: str, goal: float | None) -> Row:
        model = network(large)
        x = photo()
        works = {
            "explain": ours(model, x, ["gradcam"], layer=STAGES),
            "grad-cam": grad_cam(model, x, "GradCAM", layers=STAGES),
            "Captum": together(*(captum("LayerGradCam", model, x, stage) for stage in STAGES)),
            "torchcam": torchcam(model, x, "GradCAM", layers=STAGES),
        }
        return Row(name, goal, model, x, works)

    def ablation(name: str, goal: float | None) -> Row:
        model = network("resnet18")
        x = photo()
        one_by_one = {
            "layer_mask": torch.arange(channels)[None, :, None, None],
            "perturbations_per_eval": 32,
        }
        works = {
            "explain": ours(model, x, ["ablationcam"], layer=layer),
            "grad-cam": grad_cam(model, x, "AblationCAM", layers=[layer]),
            "Captum": captum("LayerFeatureAblation", model, x, layer, **one_by_one),
        }
        return Row(name, goal, model, x, works)

    def score(name: str, goal: float | None) -> Row:
        model = network("resnet18")
        x = photo()
        works = {
            "explain": ours(model, x, ["scorecam"], layer=layer),
            "grad-cam": grad_cam(model, x, "ScoreCAM", layers=[layer]),
            "torchcam": torchcam(model, x, "ScoreCAM", layers=[layer]),
        }
        return Row(name, goal, model, x, works, per=channels, batched=True)

    def pixels(name: str, goal: float | None, method: str, theirs: str) -> Row:
        model = network(large)
        x = photo()
        works = {"explain": ours(model, x, [method]), "Captum": captum(theirs, model, x)}
        if method == "guidedbackprop":
            works["grad-cam"] = guided_grad_cam(model, x)
        return Row(name, goal, model, x, works)

    def path(name: str, goal: float | None) -> Row:
        model = network(large)
        x = photo()
        works = {
            "explain": ours(model, x, [IntegratedGradients(steps)]),
            # else gigabytes
            "Captum": captum(
                "IntegratedGradients", model, x, n_steps=steps, internal_batch_size=10
            ),
        }
        return Row(name, goal, model, x, works, per=steps, batched=True)

    def covering(name: str, goal: float | None, method: str) -> Row:
        model = network("resnet18")
        x = photo()
        case = next(case for case in cases(x, covered) if case.name == method)
        works = {"explain": ours(model, x, [case.method])}
        if case.theirs is not None:
            works["Captum"] = captum(case.theirs, model, x, **case.given)
        return Row(name, goal, model, x, works, per=case.photos, batched=True)

    def plain(name: str, goal: float | None) -> Row:
        model = network(large)
        x = photo()
        return Row(
            name, goal, model, x, {"explain": by_hand(model, x)}, notes={"explain": "plain torch"}
        )

    def relevance(name: str, goal: float | None, composite: str) -> Row:
        model = network(large)
        x = photo()
        works = {"explain": ours(model, x, [LRP(composite)]), "zennit": zennit(model, x, composite)}
        return Row(name, goal, model, x, works)

    def of_transformer(name: str, goal: float | None, gamma: float) -> Row:
        x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
        model = network("vit_b_32" if quick else "vit_b_16")
        return Row(name, goal, model, x, {"explain": ours(model, x, [LRP(attn_lrp(gamma=gamma))])})

    few, many = batches
    integrated = f"integratedgradients, each of {steps} steps"
    yield "gradcam", 1.10, partial(gradcam, batch=few)
    yield f"gradcam, {many} images", 1.10, partial(gradcam, batch=many)
    yield "7 CAMs together, one layer", 1.30, seven
    yield "gradcam for the top 5 classes", 1.25, top_five
    yield "gradcam at four stages", 2.2, stages
    yield f"ablationcam, ResNet-18, {channels} channels", 2.5, ablation
    yield "scorecam, ResNet-18, each channel", None, score
    yield "`torch.autograd.grad` in the pixels, by hand", None, plain
    yield "saliency", 2.2, partial(pixels, method="saliency", theirs="Saliency")
    yield "inputxgradient", 2.2, partial(pixels, method="inputxgradient", theirs="InputXGradient")
    yield "guidedbackprop", 2.4, partial(pixels, method="guidedbackprop", theirs="GuidedBackprop")
    for composite, goal in RELEVANCE.items():
        yield f"lrp, {composite}", goal, partial(relevance, composite=composite)
    yield "attnlrp, epsilon, ViT-B/16", 2.6, partial(of_transformer, gamma=0.0)
    yield "attnlrp, gamma, ViT-B/16", 6.0, partial(of_transformer, gamma=0.25)
    yield integrated, 1.8, path
    for method in COVERING:
        yield f"{method}, ResNet-18, each covered photo", None, partial(covering, method=method)


# Measuring


def seconds(work: Work) -> float:
    """The seconds of a piece of work; with one thread those of the processor, whatever else runs on
    the machine."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def pass_seconds(bare: Work) -> float:
    """The median of as many bare passes as fit into a quarter of a second, but no more than
    five."""
    first = seconds(bare)
    return statistics.median([first] + [seconds(bare) for _ in range(min(4, int(0.25 / first)))])


def warmed(row: Row) -> tuple[dict[str, float], dict[str, str]]:
    """The seconds of everything's first run, and how what failed failed, which is then left out."""
    took = {}
    failed = {}
    row.bare()
    for name, work in list(row.works.items()):
        try:
            took[name] = seconds(work)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
            del row.works[name]
    return took, failed


def ratios(row: Row, rounds: int, first: dict[str, float]) -> tuple[dict[str, list[float]], float]:
    """For each package its times by those of the passes around it, and the median of these passes
    in seconds."""
    passes: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in row.works}
    for turn in range(rounds):
        before = pass_seconds(row.bare)
        for name, work in row.works.items():
            if first[name] > LONG * before and turn >= 2:
                continue
            took = seconds(work)
            row.model.zero_grad()  # grad-cam leaves gradients in the parameters
            after = pass_seconds(row.bare)
            found[name].append(2 * took / (before + after))
            passes.append(after)
            before = after
    return found, statistics.median(passes or [pass_seconds(row.bare)])


def of_batch(row: Row, batch: int, layout: torch.memory_format) -> Work:
    x = row.x[:1].repeat(batch, 1, 1, 1).contiguous(memory_format=layout)

    def work() -> object:
        with torch.inference_mode():
            return row.model(x)

    return work


def by_batched(row: Row, rounds: int) -> tuple[float, float]:
    """Our time for each photo by that of the batched pass, and that of this pass by the bare one of
    one photo."""
    passes = {
        (batch, layout): of_batch(row, batch, layout) for batch in BATCHES for layout in LAYOUTS
    }
    for each in passes.values():
        each()
    ours: list[float] = []
    bare: list[float] = []
    each_photo: dict[Any, list[float]] = {way: [] for way in passes}
    for _ in range(rounds):
        for way, work in passes.items():
            each_photo[way].append(seconds(work) / way[0])
        bare.append(pass_seconds(row.bare))
        ours.append(seconds(row.works["explain"]) / row.per)
    best = min(passes, key=lambda way: statistics.median(each_photo[way]))
    pairs = zip(ours, bare, each_photo[best], strict=True)
    found = [(one / batched, batched / alone) for one, alone, batched in pairs]
    return statistics.median(a for a, _ in found), statistics.median(b for _, b in found)


def measure(row: Row, rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "work": row.name,
        "goal": row.goal,
        "batch": len(row.x),
        "pixels": row.x.shape[-1],
    }
    first, found["failed"] = warmed(row)
    every, took = ratios(row, rounds, first)
    found["bare_ms"] = 1e3 * took
    found["time"] = {name: statistics.median(each) / row.per for name, each in every.items()}
    found["rounds"] = {name: len(each) for name, each in every.items()}
    if row.batched and "explain" in row.works:
        found["by_batched"], found["batched_by_bare"] = by_batched(row, min(3, rounds))
    short = {
        n: work for n, work in row.works.items() if statistics.median(every.get(n, [0])) <= LONG
    }
    bare = peak_bytes(row.bare)
    found["memory"] = {name: peak_bytes(work) / bare for name, work in short.items()}
    row.model.zero_grad()
    found["notes"] = row.notes
    found["per"] = row.per
    return found


def cell(
    name: str, found: dict[str, Any], versions: dict[str, str | None], offered: set[str]
) -> str:
    if name not in offered:
        return "–"
    if versions[name] is None:
        return "not installed"
    if name in found["failed"]:
        return found["failed"][name].partition(":")[0]
    memory = (
        f" ({shown(found['memory'][name])})"
        if name in found["memory"] and found["per"] == 1
        else ""
    )
    notes = [found["notes"][name]] if name in found["notes"] else []
    if name == "explain" and "by_batched" in found:
        notes.append(f"{shown(found['by_batched'])} of the batched pass")
    return ", ".join([f"{shown(found['time'][name])}{memory}", *notes])


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
        "--rows", default="", help="a part of the names of the rows to run, or a glob pattern"
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rounds = options.rounds or (1 if options.quick else 7)
    versions = {name: version(distribution) for name, distribution in COLUMNS.items()}
    about = {
        "torch": torch.__version__,
        "threads": options.threads,
        "load": os.getloadavg()[0],
        "versions": versions,
    }
    print(
        f"torch {torch.__version__}, {options.threads} threads; in bare forward passes: time (peak "
        "memory)\n"
    )
    print(table(versions).head())
    lines = []
    for name, goal, build in rows(options.quick):
        if not fnmatch.fnmatch(name, f"*{options.rows}*"):
            continue
        row = build(name, goal)
        offered = set(row.works)
        for absent in offered & {name for name, found in versions.items() if found is None}:
            del row.works[absent]
        found = measure(row, rounds)
        lines.append(found)
        print(
            line([name, *(cell(column, found, versions, offered) for column in versions)]),
            flush=True,
        )
        if goal is not None and found["time"].get("explain", 0) > goal:
            print(f"over the goal of {goal}: {name}", file=sys.stderr)
    if options.json:
        options.json.write_text(
            json.dumps({**about, "rows": lines}, indent=2, ensure_ascii=False) + "\n"
        )


if __name__ == "__main__":
    main()
