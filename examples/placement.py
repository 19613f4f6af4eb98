"""Where maps are drawn, and where the networks looked: spread evenly, as other packages draw them,
and each cell where it looks.

    python examples/placement.py [cells spots planted trainings changes detectors photos]
                                 [--photos FOLDER] [--update]

cells      each cell of a layer against the centre of its squared gradient in the pixels; the mean
           distance in pixels
spots      the effect of a changed spot of the photo against that spot; mean distances in pixels
planted    networks that learn to find a spot of seven pixels: pointing game, share of the map on
           the spot (relevance mass) and deletion, with the maps of other packages beside
trainings  the same networks trained in other ways: where the spots lie that a cell answers most
changes    what a network may do to the photo first: the centre of the map against that of the object
detectors  the same behind the padding and resizing of torchvision's detectors
photos     ImageNet's photos, with boxes of the small detector: the pointing game of the default model

Networks have random weights, but those that come along with the package. `--update` puts the tables
into docs/placement.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.transform import GeneralizedRCNNTransform

import explain
from explain.layers import cell_centres
from explain.methods import Occlusion

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples" / "benchmarks"))
from tables import Table, line, page_of, replaced  # noqa: E402

MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
NETWORKS: dict[str, tuple[str, str, tuple[int, int]]] = {
    "EfficientNet-Lite0, trained (the default model)": ("default", "features", (224, 224)),
    "`tiny`, trained": ("tiny", "layer3", (64, 64)),
    "ResNet-18": ("resnet18", "layer4", (224, 224)),
    "ResNet-18, 250 × 300": ("resnet18", "layer4", (250, 300)),
    "ResNet-50": ("resnet50", "layer4", (224, 224)),
    "EfficientNet-B0": ("efficientnet_b0", "features", (224, 224)),
    "MobileNetV3, small": ("mobilenet_v3_small", "features", (224, 224)),
    "RegNetY-400MF, 225 × 225": ("regnet_y_400mf", "trunk_output", (225, 225)),
    "ShuffleNetV2": ("shufflenet_v2_x1_0", "conv5", (224, 224)),
    "DenseNet-121, 250 × 250": ("densenet121", "features", (250, 250)),
    "VGG-11": ("vgg11", "features", (224, 224)),
    "ConvNeXt, atto (timm)": ("timm:convnext_atto", "stages", (224, 224)),
    "ViT-Tiny (timm)": ("timm:vit_tiny_patch16_224", "blocks.11", (224, 224)),
    "Swin-Tiny (timm)": ("timm:swin_tiny_patch4_window7_224", "layers.3", (224, 224)),
    "ViT-Tiny on a ResNet (timm, hybrid)": ("timm:vit_tiny_r_s16_p8_224", "blocks.11", (224, 224)),
}
CELLS = ("network", "looks at: even", "followed", "standard error")
SPOTS = ("network", "a changed spot: even", "placed")
LEAST, MOST = 6, 60  # photos over which squared gradients are looked at
ERROR = 0.4  # pixels, of the mean of their centres: the standard error at which it is enough
PLANTED = ("map", "centre beside the spot, px", "pointing game", "on the spot", "deletion")
CHANGED = ("before the first layer", "even", "placed")
PHOTOS = ("map", "pointing game, 95 % interval")


def network(name: str) -> nn.Module:
    """A network with random weights, or one that comes along with its own."""
    torch.manual_seed(0)
    if name in ("default", "tiny"):
        model = explain.Explainer(None if name == "default" else name).model
    elif name.startswith("timm:"):
        import timm

        model = timm.create_model(name.removeprefix("timm:"), pretrained=False)
    else:
        import torchvision

        model = torchvision.models.get_model(name, weights=None)
    model.eval().requires_grad_(False)
    return model


def photos(size: tuple[int, int], count: int, folder: Path | None) -> Tensor:
    """Photos of a folder, resized and normalised; noise without one."""
    if folder is None:
        return torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(0))
    from PIL import Image
    from torchvision.transforms.functional import pil_to_tensor

    files = sorted(folder.glob("*.jpg"))
    read = [
        Image.open(file).convert("RGB").resize(size[::-1]) for file in files[:: len(files) // count]
    ]
    return torch.stack([(pil_to_tensor(photo) / 255 - MEAN) / STD for photo in read[:count]])


class Output:
    """The maps ``(N, C, h, w)`` that a layer gives in each pass: tokens on their grid."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        self._handle = model.get_submodule(layer).register_forward_hook(self._note)
        self.maps = torch.empty(0)

    def _note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.ndim == 3:  # a class token, and patches
            side = math.isqrt(output.shape[1])
            output = output[:, output.shape[1] - side**2 :].mT.unflatten(2, (side, side))
        elif output.shape[1] == output.shape[2]:  # channels last
            output = output.movedim(3, 1)
        self.maps = output

    def remove(self) -> None:
        self._handle.remove()


def centroid(weight: Tensor) -> Tensor:
    """The centre of non-negative values ``(..., H, W)``, in pixels."""
    rows, columns = (torch.arange(n) + 0.5 for n in weight.shape[-2:])
    total = weight.sum((-2, -1))
    return torch.stack(
        [(weight.sum(-1) * rows).sum(-1) / total, (weight.sum(-2) * columns).sum(-1) / total], -1
    )


def looked_at(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """The centre of the squared gradient of each cell in the pixels ``(photos, h, w, 2)``, of as
    many photos as it takes until the mean of these is known to `ERROR`."""
    output = Output(model, layer)
    generator = torch.Generator().manual_seed(1)
    centres: list[Tensor] = []
    for photo in x:
        image = photo[None].clone().requires_grad_()
        model(image)
        maps = output.maps[0]
        signs = torch.randn(len(maps), generator=generator)
        cells = (maps * signs[:, None, None]).sum(0)
        of_photo = torch.zeros(*cells.shape, 2)
        for i, j in itertools.product(*map(range, cells.shape)):
            (gradient,) = torch.autograd.grad(cells[i, j], image, retain_graph=True)
            of_photo[i, j] = centroid(gradient[0].square().sum(0))
        centres.append(of_photo)
        if len(centres) >= LEAST and standard_error(torch.stack(centres)) < ERROR:
            break
    output.remove()
    return torch.stack(centres)


def standard_error(centres: Tensor) -> float:
    """How far the mean of centres ``(photos, h, w, 2)`` is from the right one, in pixels."""
    return float((centres.std(0) / len(centres) ** 0.5).norm(dim=-1).mean())


def even_centres(cells: Sequence[int], size: Sequence[int]) -> Tensor:
    axes = [(torch.arange(n) + 0.5) * length / n for n, length in zip(cells, size, strict=True)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1)


def of_spots(model: nn.Module, layer: str, x: Tensor, spots: int) -> dict[str, float]:
    """The mean distance between a spot of noise in a photo, and where the change of the layer's map
    that it makes is drawn, at all places of a grid of spots."""
    output = Output(model, layer)
    height, width = x.shape[2] // spots, x.shape[3] // spots
    generator = torch.Generator().manual_seed(2)
    beside: dict[str, list[float]] = {"even": [], "cells": []}
    for photo in x:
        model(photo[None])
        usual = output.maps
        changed = []
        places = []
        for i, j in itertools.product(range(spots), range(spots)):
            copy = photo.clone()
            area = copy[:, i * height : (i + 1) * height, j * width : (j + 1) * width]
            area.copy_(torch.randn(area.shape, generator=generator))
            changed.append(copy)
            places.append(torch.tensor([(i + 0.5) * height, (j + 0.5) * width]))
        effects = []
        for batch in torch.stack(changed).split(28):
            model(batch)
            effects.append((output.maps - usual).square().sum(1))
        maps = torch.cat(effects)
        for placement in beside:
            found = explain.attribute(
                model, x[:1], "hirescam", target=0, layer=layer, placement=placement
            )
            drawn = (
                found.placement.on_photo(maps[:, None], smooth=True)
                if found.placement
                else (F.interpolate(maps[:, None], x.shape[2:], mode="bilinear"))
            )
            bright = drawn[:, 0] * (drawn[:, 0] >= 0.6 * drawn[:, 0].amax((1, 2), keepdim=True))
            beside[placement] += (centroid(bright) - torch.stack(places)).norm(dim=1).tolist()
    output.remove()
    return {placement: sum(each) / len(each) for placement, each in beside.items()}


def networks_named(named: str, quick: bool) -> list[tuple[str, tuple[str, str, tuple[int, int]]]]:
    """The networks with ``named`` in their titles; the second alone if ``quick``."""
    networks = list(NETWORKS.items())
    chosen = networks[1:2] if quick else networks
    return [each for each in chosen if fnmatch.fnmatch(each[0], f"*{named}*")]


def cells_table(folder: Path | None, quick: bool, named: str = "") -> Iterator[str]:
    yield Table("", CELLS, ()).head()
    for title, (name, layer, size) in networks_named(named, quick):
        model = network(name)
        is_trained = "trained" in title
        x = photos(size, MOST if not quick else 2, folder if is_trained else None)
        centres = looked_at(model, layer, x)
        looked = centres.mean(0)
        followed = cell_centres(model, x[:1], layer)
        even = even_centres(looked.shape[:2], size)
        off = [float((each - looked).norm(dim=-1).mean()) for each in (even, followed)]
        off.append(standard_error(centres))
        yield line([title, *(f"{px:.1f}" for px in off)])


def spots_table(folder: Path | None, quick: bool, named: str = "") -> Iterator[str]:
    yield Table("", SPOTS, ()).head()
    for title, (name, layer, size) in networks_named(named, quick):
        many = "trained" in title and not quick
        x = photos(size, 2 if many else 1, folder)
        beside = of_spots(network(name), layer, x, 14 if many else 7)
        yield line([title, *(f"{beside[placement]:.1f}" for placement in ("even", "cells"))])


SIDE = 64
SPOT = 7
STEPS = 300
STRIDE = 8
MARGIN = 12
WIDTHS = (3, 16, 24, 32)


@dataclass(frozen=True)
class Training:
    """How a network learns to find spots: how far from the border these lie, at least, on photos
    of which size, by which optimiser."""

    margin: int = MARGIN
    side: int = SIDE
    optimiser: str = "SGD"


TRAININGS = {
    "as above": Training(),
    "Adam": Training(optimiser="Adam"),
    "spots anywhere": Training(margin=0),
    "spots anywhere, 65 px": Training(margin=0, side=65),
    "spots anywhere, Adam": Training(margin=0, optimiser="Adam"),
}
TRAINED = (
    *("trained", "right", "spot beside its cell, px", "spread, px"),
    *("centre: even", "placed", "pointing game: even", "placed"),
)


def spotted(
    count: int, seed: int, training: Training = TRAININGS["as above"]
) -> tuple[Tensor, Tensor, list[tuple[int, int, int, int]]]:
    """Noise, and in class 1 a bright spot in it; and the boxes of the spots."""
    generator = torch.Generator().manual_seed(seed)
    side, margin = training.side, training.margin
    x = 0.3 * torch.randn(count, 3, side, side, generator=generator)
    labels = torch.randint(2, (count,), generator=generator)
    boxes = []
    for image, label in zip(x, labels.tolist(), strict=True):
        places = margin + torch.randint(side - SPOT - 2 * margin, (2,), generator=generator)
        row, column = places.tolist()
        image[:, row : row + SPOT, column : column + SPOT] += 1.5 * label
        boxes.append((column, row, column + SPOT, row + SPOT))
    return x, labels, boxes


def with_spots(
    count: int, seed: int, training: Training = TRAININGS["as above"]
) -> tuple[Tensor, Tensor, list[tuple[int, int, int, int]]]:
    """Those of twice as many that have a spot."""
    x, labels, boxes = spotted(2 * count, seed, training)
    has_spot = labels == 1
    kept = [box for box, has in zip(boxes, has_spot.tolist(), strict=True) if has]
    return x[has_spot], labels[has_spot], kept


def finder(seed: int, steps: int, training: Training = TRAININGS["as above"]) -> nn.Module:
    """A stack of convolutions with stride 2, trained to tell whether there is a spot."""
    torch.manual_seed(seed)
    blocks: list[nn.Module] = []
    for width, wider in itertools.pairwise(WIDTHS):
        convolution = nn.Conv2d(width, wider, 3, 2, 1, bias=False)
        blocks.append(nn.Sequential(convolution, nn.BatchNorm2d(wider), nn.ReLU()))
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], 2)]
    model = nn.Sequential(nn.Sequential(*blocks), *head)
    optimiser: torch.optim.Optimizer
    if training.optimiser == "Adam":
        optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    else:
        optimiser = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=5e-4)
    for step in range(steps):
        x, labels, _ = spotted(16, 100_000 * (seed + 1) + step, training)
        optimiser.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimiser.step()
    return model.eval()


def maps_of_peers(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The Grad-CAM maps ``(N, H, W)`` of other packages, as they draw them."""
    found = {}
    layer = model[0]  # type: ignore[index]
    try:
        from pytorch_grad_cam import GradCAM
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

        with GradCAM(model, [layer]) as cam:
            targets = [ClassifierOutputTarget(label) for label in labels.tolist()]
            found["pytorch-grad-cam"] = torch.from_numpy(cam(x.clone(), targets))
    except ImportError:
        print("pytorch-grad-cam is not installed", file=sys.stderr)
    try:
        from captum.attr import LayerAttribution, LayerGradCam

        maps = LayerGradCam(model, layer).attribute(x, labels, relu_attributions=True)
        found["Captum"] = LayerAttribution.interpolate(maps, (SIDE, SIDE), "bilinear")[
            :, 0
        ].detach()
    except ImportError:
        print("Captum is not installed", file=sys.stderr)
    try:
        from torchcam.methods import GradCAM as TorchCAM
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.functional import resize

        drawn = []
        with TorchCAM(model, layer) as extractor:
            for image, label in zip(x, labels.tolist(), strict=True):
                cam = extractor(label, model(image[None].requires_grad_()))[0]
                drawn.append(resize(cam, [SIDE, SIDE], InterpolationMode.BICUBIC)[0])
        found["torchcam"] = torch.stack(drawn).clamp(min=0).detach()
    except ImportError:
        print("torchcam is not installed", file=sys.stderr)
    return found


def planted_table(quick: bool) -> Iterator[str]:
    yield Table("", PLANTED, ()).head()
    metrics = ["pointinggame", "relevancemass", "deletion"]
    figures: dict[str, list[list[float]]] = {}
    for seed in range(1 if quick else 5):
        model = finder(seed, STEPS)
        x, labels, boxes = with_spots(40, 999_000 + seed)
        maps: dict[str, Any] = maps_of_peers(model, x, labels)
        for placement in ("even", "cells"):
            found = explain.attribute(
                model, x, "gradcam", target=labels, layer="0", placement=placement
            )
            maps["even" if placement == "even" else "placed"] = found.heatmap
        scores: Any = explain.evaluate(
            model, x, maps, metrics, target=labels, boxes=[[box] for box in boxes]
        )
        middles = torch.tensor([[(box[1] + box[3]) / 2, (box[0] + box[2]) / 2] for box in boxes])
        for name, of_map in maps.items():
            is_there = of_map.flatten(1).amax(1) > 0
            centres = torch.stack([bright_centre(each) for each in of_map[is_there]])
            off = (centres - middles[is_there]).norm(dim=1).mean()
            of_metrics = [
                torch.as_tensor(scores[name][metric]).double().nanmean() for metric in metrics
            ]
            figures.setdefault(name, []).append([float(each) for each in (off, *of_metrics)])
    for name, of_seeds in figures.items():
        off, *means = torch.tensor(of_seeds).mean(0).tolist()
        yield line([name, f"{off:.1f}", *(f"{mean:.3f}" for mean in means)])


def trainings_table(quick: bool, named: str = "") -> Iterator[str]:
    """Networks that are trained in several ways: the mean vector from the cell with the largest
    value of Grad-CAM, in a plain stack of strides, to the spot, and how far the spots of a cell
    spread, both along an axis; and the maps."""
    yield Table("", TRAINED, ()).head()
    for name, training in TRAININGS.items():
        if not fnmatch.fnmatch(name, f"*{named}*"):
            continue
        of_seeds = []
        seeds = 5 if training == Training() else 2
        for seed in range(1 if quick else seeds):
            model = finder(seed, STEPS, training).requires_grad_(False)
            x, labels, _ = spotted(200, 888_000 + seed, training)
            right = float((model(x).argmax(1) == labels).float().mean())
            x, labels, boxes = with_spots(60, 999_000 + seed, training)
            middles = torch.tensor(
                [[(top + down) / 2, (x0 + x1) / 2] for x0, top, x1, down in boxes]
            )
            figures = {}
            for placement in ("even", "cells"):
                found = explain.attribute(
                    model, x, "gradcam", target=labels, layer="0", placement=placement
                )
                scores: Any = explain.evaluate(
                    model,
                    x,
                    {"map": found.heatmap},
                    ["pointinggame"],
                    target=labels,
                    boxes=[[box] for box in boxes],
                )
                pointing = torch.as_tensor(scores["map"]["pointinggame"]).double().nanmean()
                centres = torch.stack([bright_centre(each) for each in found.heatmap])
                off = (centres - middles).norm(dim=1).nanmean()
                figures[placement] = [float(off), float(pointing)]
            largest = cells_of_gradcam(model, x, labels).flatten(1).max(1)
            side = math.ceil(training.side / STRIDE)
            cells = torch.stack([largest.indices // side, largest.indices % side], 1)
            beside = middles - (STRIDE * cells + 0.5)
            inner = (middles - training.side / 2).abs().amax(1) < training.side / 2 - MARGIN
            beside = beside[inner & (largest.values > 0)]
            of_seeds.append(
                [right, float(beside.mean()), float(beside.std(0).mean())]
                + [figures[each][i] for i in (0, 1) for each in ("even", "cells")]
            )
        right, mean, spread, *of_maps = torch.tensor(of_seeds).mean(0).tolist()
        cells_of_row = [f"{right:.3f}", f"{mean:.1f}", f"{spread:.1f}"]
        cells_of_row += [f"{figure:.1f}" for figure in of_maps[:2]]
        cells_of_row += [f"{figure:.3f}" for figure in of_maps[2:]]
        yield line([name, *cells_of_row])


def cells_of_gradcam(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Grad-CAM of the last map ``(N, h, w)``, not drawn."""
    blocks, *head = model.children()
    maps = blocks(x).detach().requires_grad_()
    scores = nn.Sequential(*head)(maps).gather(1, labels[:, None])
    (gradient,) = torch.autograd.grad(scores.sum(), maps)
    return (gradient.mean((2, 3), keepdim=True) * maps).sum(1).clamp(min=0).detach()


class Bright(nn.Module):
    """Class 0 is the brightness of cells of 8 × 8 pixels, squared, behind a change of the photo."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.cells = nn.Conv2d(3, 2, 8, 8)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2, 2, bias=False)
        self.cells.weight.data.fill_(1 / 192)
        self.cells.bias.data.zero_()  # type: ignore[union-attr]
        self.head.weight.data = torch.eye(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.relu(self.cells(self.change(x))).square()).flatten(1))


def warped(x: Tensor) -> Tensor:
    theta = torch.tensor([[[0.5, 0, 0.0], [0, 0.5, 0.0]]])
    grid = F.affine_grid(theta.expand(len(x), -1, -1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int]]] = {
    "a centre crop": (lambda x: x[..., 32:96, 32:96], (40, 56)),
    "padding": (lambda x: F.pad(x, (16, 48, 0, 32)), (32, 64)),
    "a mirror": (lambda x: x.flip(3), (32, 16)),
    "transposing": (lambda x: x.transpose(2, 3), (96, 16)),
    "rolling": (lambda x: x.roll((32, 48), (2, 3)), (16, 24)),
    "turning": (lambda x: x.rot90(1, (2, 3)), (80, 24)),
    "exchanged halves": (lambda x: torch.cat([x[..., 64:], x[..., :64]], 3), (32, 16)),
    "half the size": (lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"), (32, 64)),
    "a spatial transformer": (warped, (40, 56)),
    "writing in place": (lambda x: torch.zeros_like(x).copy_(x.flip(2)), (96, 40)),
}
METHODS = [
    *("gradcam", "gradcam++", "hirescam", "xgradcam", "layercam"),
    *("elementwisecam", "scorecam", "ablationcam", "guidedgradcam", "refinecam"),
]


def bright_centre(heatmap: Tensor) -> Tensor:
    """The centre of what is at least 0.6 of the largest value."""
    return centroid(heatmap * (heatmap >= 0.6 * heatmap.max()))


def photo_with(place: tuple[int, int], size: tuple[int, int] = (128, 128)) -> Tensor:
    photo = torch.zeros(1, 3, *size)
    photo[:, :, place[0] : place[0] + 16, place[1] : place[1] + 16] = 1
    return photo


def changes_table() -> Iterator[str]:
    yield Table("", CHANGED, ()).head()
    for name, (change, place) in CHANGES.items():
        model = Bright(change).eval()
        photo = photo_with(place)
        covered = explain.attribute(
            model, photo, Occlusion(window=8, stride=8, baseline=0.0), target=0
        )
        expected = bright_centre(covered.heatmap[0])
        worst = []
        for placement in ("even", "cells"):
            with warnings.catch_warnings():
                # spread evenly, guided Grad-CAM has its map and its gradients in different places
                warnings.filterwarnings("ignore", ".*guidedgradcam is zero")
                maps = explain.attribute(model, photo, METHODS, target=0, placement=placement)
            heatmaps = [found.heatmap[0] for found in maps.values()]
            if placement == "even":
                heatmaps = [heatmap for heatmap in heatmaps if heatmap.any()]
            off = [(bright_centre(heatmap) - expected).norm() for heatmap in heatmaps]
            worst.append(max(map(float, off)))
        yield line([name, *(f"{px:.1f}" for px in worst)])


def detectors_table() -> Iterator[str]:
    yield Table("", ("photo in a detector of torchvision", "even", "placed"), ()).head()
    for size in ((96, 128), (128, 96), (120, 136), (64, 200)):
        transform = GeneralizedRCNNTransform(160, 240, [0.0] * 3, [1.0] * 3).eval()
        model = Bright(lambda x, transform=transform: transform(list(x))[0].tensors).eval()
        photo = photo_with((32, 24), size)
        off = []
        for placement in ("even", "cells"):
            found = explain.attribute(
                model, photo, "gradcam", target=0, layer="cells", placement=placement
            )
            off.append(float((bright_centre(found.heatmap[0]) - torch.tensor([40.0, 32.0])).norm()))
        yield line([f"{size[0]} × {size[1]}", *(f"{px:.1f}" for px in off)])


def interval(hits: int, count: int) -> str:
    """A share with its interval by Wilson's formula."""
    z = 1.96
    share = hits / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2))
    return f"{share:.2f} ({middle - half:.2f} to {middle + half:.2f}), {count} photos"


def photos_table(folder: Path, quick: bool) -> Iterator[str]:
    yield Table("", PHOTOS, ()).head()
    classifier, detector = explain.Explainer(), explain.Explainer("nanodet")
    hits = {"even": 0, "cells": 0}
    count = 0
    for file in sorted(folder.glob("*.jpg"))[: 10 if quick else None]:
        try:
            detected = detector(file, methods=["saliency"]).detections[0]
        except explain.TargetError:
            continue
        if detected.box is None:
            continue
        label = int(file.name[:3])
        found = {
            placement: classifier(file, methods=["gradcam"], target=label, placement=placement)
            for placement in hits
        }
        seen = found["even"].box
        x0, y0, x1, y1 = seen.left, seen.top, seen.right, seen.bottom
        left, top, right, bottom = detected.box
        if (right - left) * (bottom - top) > 0.5 * (x1 - x0) * (y1 - y0):
            continue  # a box that hardly can be missed
        count += 1
        for placement, explanation in found.items():
            heatmap = explanation["gradcam"].heatmap[0]
            row, column = divmod(int(heatmap.argmax()), heatmap.shape[1])
            y = y0 + (row + 0.5) / heatmap.shape[0] * (y1 - y0)
            x = x0 + (column + 0.5) / heatmap.shape[1] * (x1 - x0)
            hits[placement] += int(left <= x < right and top <= y < bottom)
    for placement, number in hits.items():
        yield line(["even" if placement == "even" else "placed", interval(number, max(count, 1))])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("cells", "spots", "planted", "trainings", "changes", "detectors", "photos")
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=list(parts))
    parser.add_argument(
        "--photos", type=Path, help="a folder of photos named by their ImageNet class"
    )
    parser.add_argument(
        "--networks", default="", help="those with this in their titles, of cells and trainings"
    )
    parser.add_argument("--update", action="store_true", help="write the tables into docs/")
    parser.add_argument("--quick", action="store_true", help="little of each: shows that it runs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for part in options.parts:
        if part == "photos" and options.photos is None:
            print("no folder of photos: see --photos", file=sys.stderr)
            continue
        rows = {
            "cells": lambda: cells_table(options.photos, options.quick, options.networks),
            "spots": lambda: spots_table(options.photos, options.quick, options.networks),
            "planted": lambda: planted_table(options.quick),
            "trainings": lambda: trainings_table(options.quick, options.networks),
            "changes": changes_table,
            "detectors": detectors_table,
            "photos": lambda: photos_table(options.photos, options.quick),
        }[part]()
        printed = []
        for row in rows:
            print(row, flush=True)
            printed.append(row)
        print()
        if options.update:
            name = f"placement-{part}"
            page = page_of(name)
            page.write_text(replaced(page.read_text("utf-8"), name, "\n".join(printed)), "utf-8")


if __name__ == "__main__":
    main()
