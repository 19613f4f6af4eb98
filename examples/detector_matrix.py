"""Detectors by what they return, what is explained of a box, and methods, each against a plain
computation.

    python examples/detector_matrix.py [--pattern 'detr*']

NanoDet has its weights; the others, of torchvision and transformers, have random ones and small
inputs. Each is decoded here a second time, by the functions of its own package or by hand. A figure
is the largest difference to the plain map, divided by the largest value of that:

* ``gradient``: the gradient of the number in the pixels, times the pixels;
* ``hirescam``: activations times gradients at one layer;
* ``occlusion``: the fall of the number with each of a few squares covered, where the box is matched
  again by hand.

A number that does not depend on a layer, such as a side of a box whose head leaves the trunk before
it, is ``-``.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models import detection
from torchvision.models.detection._utils import BoxCoder
from torchvision.ops import box_convert, box_iou

import explain
from explain.hooks import HookGroup
from explain.methods import HiResCAM, InputXGradient, Occlusion
from explain.targets import Detections

ASSETS = Path(__file__).resolve().parents[1] / "assets"
METHODS = ("gradient", "hirescam", "occlusion")
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Boxes:
    """What one photo has: scores ``(Q, K)``, boxes ``(Q, 4)``, and whether there is anything
    ``(Q,)``."""

    scores: Tensor
    boxes: Tensor
    existence: Tensor


@dataclass(frozen=True)
class Subject:
    """A detector, a photo ``(1, 3, H, W)``, a layer of it, and a plain decoding of its output."""

    model: nn.Module
    x: Tensor
    layer: str
    decode: Callable[[Any], Boxes]
    named: str | None = None
    """The layout, where it cannot be told from another one."""


class Heads(nn.Module):
    """What the heads of a detector of torchvision give before non-maximum suppression, with the
    anchors."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = list(self.detector.backbone(x).values())
        images = detection.image_list.ImageList(x, [tuple(x.shape[-2:])] * len(x))
        return {
            **self.detector.head(maps),
            "anchors": self.detector.anchor_generator(images, maps)[0],
        }


class Results(nn.Module):
    """A detector of torchvision as it is, for inputs that are one tensor."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, x: Tensor) -> Any:
        return self.detector(list(x))


def of_cells(output: dict[str, Tensor]) -> Boxes:
    return Boxes(output["scores"][0], output["boxes"][0], output["scores"][0].amax(1))


def of_results(output: Any) -> Boxes:
    (found,) = output
    scores = torch.full((len(found["boxes"]), 8), -torch.inf)
    scores[range(len(scores)), found["labels"]] = found["scores"]
    return Boxes(scores, found["boxes"], found["scores"])


def of_anchors(output: dict[str, Tensor], weights: tuple[float, ...], background: bool) -> Boxes:
    logits = output["cls_logits"][0]
    boxes = BoxCoder(weights).decode_single(output["bbox_regression"][0], output["anchors"])
    if not background:
        return Boxes(logits.sigmoid(), boxes, logits.sigmoid().amax(1))
    shares = logits.softmax(1)
    of_classes = torch.cat([torch.full_like(shares[:, :1], -torch.inf), shares[:, 1:]], 1)
    return Boxes(of_classes, boxes, shares[:, 1:].sum(1))


def of_queries(output: Any, size: tuple[int, int], background: bool) -> Boxes:
    boxes = box_convert(output.pred_boxes[0], "cxcywh", "xyxy") * torch.tensor(
        [size[1], size[0]] * 2
    )
    if not background:
        scores = output.logits[0].sigmoid()
        return Boxes(scores, boxes, scores.amax(1))
    shares = output.logits[0].softmax(1)
    return Boxes(shares[:, :-1], boxes, shares[:, :-1].sum(1))


def subjects() -> Iterator[tuple[str, Callable[[], Subject]]]:
    """Each subject by its name, and what makes it."""
    yield "nanodet", nanodet
    for name in (
        "retinanet_resnet50_fpn",
        "ssdlite320_mobilenet_v3_large",
        "fasterrcnn_mobilenet_v3_large_320_fpn",
    ):
        yield f"{name}, results", lambda name=name: of_torchvision(name, heads=False)
    for name in ("retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large"):
        yield f"{name}, heads", lambda name=name: of_torchvision(name, heads=True)
    for name in ("detr", "yolos", "rt_detr"):
        yield name, lambda name=name: of_transformers(name)


def nanodet() -> Subject:
    explainer = explain.Explainer("nanodet")
    x = explainer.as_input(ASSETS / "grace_hopper.jpg").double()
    return Subject(explainer.model.double(), x, "neck.reduce.2", of_cells)


def of_torchvision(name: str, *, heads: bool) -> Subject:
    side = 320 if "320" in name else 64
    options: dict[str, Any] = {
        "weights": None,
        "weights_backbone": None,
        "num_classes": 3,
        "min_size": side,
    }
    found = (
        getattr(detection, name)(**options, max_size=side, box_score_thresh=0.0)
        if "faster" in name
        else None
    )
    if found is None and side == 64:
        found = getattr(detection, name)(**options, max_size=side, score_thresh=0.0)
    elif found is None:
        found = getattr(detection, name)(
            weights=None, weights_backbone=None, num_classes=3, score_thresh=0.0
        )
    if "ssd" in name:  # its random weights give hardly anything without the statistics of a batch
        for module in found.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
        with torch.no_grad():
            found.train().backbone(torch.rand(4, 3, side, side))
    x = torch.rand(1, 3, side, side)
    layer = "detector.backbone.body.layer3"
    if "resnet" not in name:
        layer = "detector.backbone.body.12" if "faster" in name else "detector.backbone.features.0"
    if not heads:
        return Subject(Results(found.eval()), x, layer, of_results)
    if "ssd" in name:
        weights = 10.0, 10.0, 5.0, 5.0
        return Subject(Heads(found.eval()), x, layer, lambda o: of_anchors(o, weights, True), "ssd")
    return Subject(Heads(found.eval()), x, layer, lambda o: of_anchors(o, (1.0,) * 4, False))


def of_transformers(name: str) -> Subject:
    import transformers

    size = (64, 96)
    options = {"num_labels": 3}
    if name == "yolos":
        config = transformers.YolosConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=[64, 96],
            patch_size=8,
            num_detection_tokens=5,
            use_mid_position_embeddings=False,
            **options,
        )
        model = transformers.YolosForObjectDetection(config).eval()
        layer = "vit.embeddings.patch_embeddings.projection"
        return Subject(model, torch.rand(1, 3, *size), layer, lambda o: of_queries(o, size, True))
    stages = {
        "embedding_size": 8,
        "hidden_sizes": [8, 16, 16, 16],
        "depths": [1, 1, 1, 1],
        "layer_type": "basic",
    }
    common = {
        "d_model": 16,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "num_queries": 5,
        **options,
    }
    if name == "detr":
        backbone = transformers.ResNetConfig(**stages, out_features=["stage4"])
        config = transformers.DetrConfig(
            **common,
            encoder_layers=1,
            decoder_layers=1,
            use_timm_backbone=False,
            backbone_config=backbone,
            use_pretrained_backbone=False,
            backbone=None,
        )
        model = transformers.DetrForObjectDetection(config).eval()
        layer = "model.input_projection"
        return Subject(model, torch.rand(1, 3, *size), layer, lambda o: of_queries(o, size, True))
    backbone = transformers.RTDetrResNetConfig(
        **stages, out_features=["stage2", "stage3", "stage4"]
    )
    config = transformers.RTDetrConfig(
        **common,
        encoder_hidden_dim=16,
        encoder_in_channels=[16, 16, 16],
        decoder_in_channels=[16, 16, 16],
        backbone_config=backbone,
        encoder_layers=1,
        decoder_layers=1,
        anchor_image_size=None,
    )
    model = transformers.RTDetrForObjectDetection(config).eval()
    layer = "model.encoder_input_proj.2"
    return Subject(model, torch.rand(1, 3, *size), layer, lambda o: of_queries(o, size, False))


def number(boxes: Boxes, cell: int, label: int, of: str) -> Tensor:
    """The number of a box that is explained."""
    if of in ("left", "top", "right", "bottom"):
        return boxes.boxes[cell, ("left", "top", "right", "bottom").index(of)]
    return boxes.existence[cell] if of == "existence" else boxes.scores[cell, label]


def followed(boxes: Boxes, box: Tensor, label: int, of: str) -> float:
    """The number of the box that is the same one in a covered photo; without a box that overlaps by
    half, 0."""
    may = boxes.scores[:, label] > -torch.inf
    if not bool(may.any()):
        return 0.0
    shared = torch.where(may, box_iou(boxes.boxes, box[None])[:, 0], -1.0)
    near = [q for q in range(len(shared)) if shared[q] >= 0.9 * shared.max() and may[q]]
    cell = max(near, key=lambda q: float(boxes.scores[q, label]))
    return (
        float(number(boxes, cell, label, of))
        if shared[cell] >= 0.5 or of in ("left", "right")
        else 0.0
    )


def with_contiguous_gradient(module: nn.Module, args: Any, output: Tensor) -> None:
    """PyTorch's batch normalisation is wrong for one image whose gradient arrives laid out channels
    last."""
    if output.requires_grad:
        output.register_hook(Tensor.contiguous)


def plain_maps(
    subject: Subject, cell: int, label: int, of: str, window: int
) -> dict[str, Tensor | None]:
    """The map of each method, by hand."""
    kept: list[Tensor] = []
    x = subject.x.clone().requires_grad_()
    norms = [module for module in subject.model.modules() if isinstance(module, nn.BatchNorm2d)]
    with HookGroup(subject.model) as group:
        group.forward(subject.layer, lambda module, args, output: kept.append(output))
        for norm in norms:
            group.forward(norm, with_contiguous_gradient)
        boxes = subject.decode(subject.model(x))
    score = number(boxes, cell, label, of)
    of_input, of_layer = torch.autograd.grad(score, [x, kept[-1]], allow_unused=True)
    box = boxes.boxes[cell].detach()
    fall = torch.zeros(subject.x.shape[-2:])
    for top in range(0, fall.shape[0], window):
        for left in range(0, fall.shape[1], window):
            covered = subject.x.clone()
            covered[..., top : top + window, left : left + window] = 0
            with torch.no_grad():
                seen = followed(subject.decode(subject.model(covered)), box, label, of)
            fall[top : top + window, left : left + window] = float(score) - seen
    cam = None if of_layer is None else (of_layer * kept[-1]).sum(1).detach()[0]
    return {
        "gradient": None if of_input is None else (of_input * x).detach()[0],
        "hirescam": cam,
        "occlusion": fall,
    }


def examine(subject: Subject) -> Iterator[tuple[str, str, list[float | None]]]:
    """For each target: the layout that was found, and the difference of each method's map to the
    plain one."""
    with torch.no_grad():
        output = subject.model(subject.x)
        boxes = subject.decode(output)
    cell, label = divmod(int(boxes.scores.flatten().argmax()), boxes.scores.shape[1])
    quiet = int(boxes.scores.amax(1).argmin())  # a region where least is found
    of_quiet = int(boxes.scores[quiet].argmax())
    window = max(subject.x.shape[-2:]) // 3
    methods = [
        InputXGradient(),
        HiResCAM(relu=False),
        Occlusion((window, window), (window, window)),
    ]
    cases: dict[str, tuple[int, int, str, dict[str, Any]]] = {
        "the best box": (cell, label, "score", {}),
        "its left side": (cell, label, "left", {}),
        "its existence": (cell, label, "existence", {}),
        "a region": (quiet, of_quiet, "score", {"label": of_quiet, "box": boxes.boxes[quiet]}),
    }
    for name, (own, of_class, of, how) in cases.items():
        target = Detections(**how, of=of, decode=subject.named, threshold=0.0).for_input_size(
            tuple(subject.x.shape[2:])
        )
        resolved = target.resolved(output, 1)
        # of boxes that overlap it as much, the one with the best score is taken
        if name == "a region":
            near = (
                (box_iou(boxes.boxes, boxes.boxes[own][None])[:, 0] >= 0.9)
                .nonzero()
                .flatten()
                .tolist()
            )
            own = max(near, key=lambda q: float(boxes.scores[q, of_class]))
            resolved_box = boxes.boxes[own]
            target = Detections(of_class, resolved_box, decode=subject.named).for_input_size(
                tuple(subject.x.shape[2:])
            )
        expected = plain_maps(subject, own, of_class, of, window)
        found: list[float | None] = []
        for key, method in zip(METHODS, methods, strict=True):
            right = expected[key]
            if right is None:
                found.append(None)
                continue
            layer = subject.layer if key == "hirescam" else None
            values = explain.attribute(
                subject.model, subject.x, method, target=target, layer=layer
            ).values[0]
            right = right if values.shape == right.shape else right.expand_as(values)
            found.append(float((values - right).abs().max() / right.abs().max().clamp(min=1e-12)))
        yield name, resolved.layout, found


def main(pattern: str) -> int:
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    failed = 0
    print(
        "| detector | layout | target | "
        + " | ".join(METHODS)
        + " |\n|---|---|---|"
        + "---|" * len(METHODS)
    )
    for name, make in subjects():
        if not fnmatch.fnmatch(name, pattern):
            continue
        torch.manual_seed(0)
        for target, layout, found in examine(make()):
            failed += sum(each is not None and not each <= TOLERANCE for each in found)
            cells = ["-" if each is None else f"{each:.0e}" for each in found]
            print(f"| {name} | {layout} | {target} | {' | '.join(cells)} |", flush=True)
    print(f"{failed} maps differ by more than {TOLERANCE:g}")
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pattern", default="*", help="of the names of detectors, such as 'detr*'")
    sys.exit(main(parser.parse_args().pattern))
