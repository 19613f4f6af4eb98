"""Targets beyond a class of the image: regions, boxes, one logit, likeness, differences; and what models return."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn, retinanet_resnet50_fpn
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large, fcn_resnet50

import explain
from explain import ExplainError, LayerError, ModelError, TargetError
from explain.methods import GradCAM, IntegratedGradients, Saliency
from explain.targets import (
    BinaryLogit,
    ClassTarget,
    Detection,
    Difference,
    ScoreTarget,
    Segmentation,
    Similarity,
    Target,
    TopClass,
    as_target,
)
from explain.targets.base import Sum, find_logits
from explain.targets.regions import find_detections, overlaps
from tests.conftest import TinyNet, settled, snapshot

SIGNED = [Saliency(absolute=False), "inputxgradient", GradCAM(relu=False), IntegratedGradients(steps=4)]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Dense(nn.Module):
    """Class maps at the input's resolution, as torchvision's segmenters return them."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, 1, 1))
        self.head = nn.Conv2d(6, classes, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        maps = self.head(F.relu(self.features(x)))
        return {"out": F.interpolate(maps, size=x.shape[-2:], mode="bilinear", align_corners=False), "aux": maps}


class Windows(nn.Module):
    """The four quarters of the image as boxes; those that score below the threshold are not returned."""

    def __init__(self, threshold: float | torch.Tensor = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(inplace=True))
        self.head = nn.Linear(6, 3)
        self.threshold = threshold

    def forward(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        x = torch.stack(list(images))
        h, w = x.shape[-2] / 2, x.shape[-1] / 2
        boxes = torch.tensor([[0, 0, w, h], [w, 0, 2 * w, h], [0, h, w, 2 * h], [w, h, 2 * w, 2 * h]]).to(x)
        maps = F.adaptive_avg_pool2d(self.features(x), 2).flatten(2).transpose(1, 2)
        scores, labels = self.head(maps).softmax(2).max(2)
        limits = torch.as_tensor(self.threshold).expand(len(x))
        kept = [
            (s >= t).nonzero()[:, 0][s[s >= t].argsort(descending=True)] for s, t in zip(scores, limits, strict=True)
        ]
        return [
            {"boxes": boxes[k], "labels": labels[i][k], "scores": scores[i][k]} for i, k in enumerate(kept)
        ]  # fmt: skip


@pytest.fixture
def dense() -> nn.Module:
    return settled(Dense(), seed=2).double().eval()


@pytest.fixture
def windows() -> nn.Module:
    return settled(Windows(), seed=2).double().eval()


def values(model: nn.Module, x: torch.Tensor, method: Any, target: Any, **options: Any) -> torch.Tensor:
    return explain.attribute(model, x, method, target=target, **options).values


# --- regions


@pytest.mark.parametrize("method", [*SIGNED, "gradcam", "guidedbackprop", "scorecam", "ablationcam"])
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_a_mask_of_one_pixel_asks_for_that_pixels_logit(method: Any, dense: nn.Module, x: torch.Tensor) -> None:
    mask = torch.zeros(12, 10, dtype=torch.bool)
    mask[4, 7] = True
    found = explain.attribute(dense, x, method, target=Segmentation(2, mask), layer="features")
    expected = explain.attribute(dense, x, method, target=lambda output: output["out"][:, 2, 4, 7], layer="features")
    torch.testing.assert_close(found.values, expected.values, **EXACT)
    torch.testing.assert_close(found.score, expected.score, **EXACT)
    assert found.target == "2 in the mask"
    assert found.logits is None


def predicted(dense: nn.Module, x: torch.Tensor) -> tuple[int, torch.Tensor]:
    """A class that is predicted somewhere in each image, and where."""
    best = dense(x)["out"].argmax(1)
    category = next(c for c in range(4) if (best == c).flatten(1).any(1).all())
    return category, best == category


@pytest.mark.parametrize("method", ["gradcam", "integratedgradients", "smoothgrad", "scorecam", "ablationcam"])
def test_the_predicted_region_is_that_of_the_unaltered_image(method: str, dense: nn.Module, x: torch.Tensor) -> None:
    category, mask = predicted(dense, x)
    assert 0 < mask.float().mean() < 1
    found = values(dense, x, method, Segmentation(category), layer="features", batch_size=5)
    torch.testing.assert_close(found, values(dense, x, method, Segmentation(category, mask), layer="features"), **EXACT)
    elsewhere = values(dense, x, method, Segmentation(category, ~mask), layer="features")
    assert not torch.allclose(found, elsewhere)


def test_the_score_of_a_region_is_the_mean_of_its_logits(dense: nn.Module, x: torch.Tensor) -> None:
    maps = dense(x)["out"]
    category, mask = predicted(dense, x)
    expected = torch.stack([maps[i, category][mask[i]].mean() for i in range(3)])
    torch.testing.assert_close(Segmentation(category).pick({"out": maps}, 3)[0], expected, **EXACT)
    finer = mask[0].repeat_interleave(2, 0).repeat_interleave(2, 1).numpy().astype(np.uint8) * 255
    torch.testing.assert_close(Segmentation(category, finer).pick(maps[:1], 1)[0], expected[:1], **EXACT)
    coarse = Segmentation(category, mask[0]).pick(SimpleNamespace(logits=F.avg_pool2d(maps[:1], 2)), 1)[0]
    torch.testing.assert_close(coarse, _weighted(F.avg_pool2d(maps[0, category][None], 2)[0], mask[0]), **EXACT)
    single = Segmentation(0).pick(maps[:, :1] - maps[:, :1].mean((2, 3), keepdim=True), 3)[0]
    assert (single > 0).all()


def _weighted(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    share = F.avg_pool2d(mask.double()[None], 2)[0]
    return ((logits * share).sum() / share.sum())[None]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: Segmentation(9), "class"),
        (lambda: Segmentation("cat"), "labels are not known"),
        (lambda: Segmentation(0, torch.zeros(12, 10)), "mask must"),
        (lambda: Segmentation(0, torch.ones(12)), r"\(H, W\) or \(N, H, W\), got \(12,\)"),
        (lambda: Segmentation(0, torch.ones(10, 12)), "swapped"),
        (lambda: Segmentation(0, torch.ones(2, 12, 10)), "images"),
        (lambda: Detection(0), "'out'"),
        (lambda: None, "'out'"),
    ],
)
def test_regions_that_do_not_fit_are_refused(target: Any, message: str, dense: nn.Module, x: torch.Tensor) -> None:
    before = snapshot(dense)
    with pytest.raises((TargetError, ModelError), match=message):
        explain.attribute(dense, x, "saliency", target=target())
    assert snapshot(dense) == before


def test_a_class_that_is_predicted_nowhere_is_refused_with_those_that_are(dense: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        dense.head.bias[1] = -1e3
    with pytest.raises(TargetError, match="class 1 must"):
        explain.attribute(dense, x, "saliency", target=Segmentation(1))


# --- boxes


@pytest.mark.parametrize("target", [Detection(), Detection(box=(0, 0, 5, 5)), Detection(box=[[5, 6, 10, 12]] * 3)])
def test_a_detections_score_is_the_models_own(target: Detection, windows: nn.Module, x: torch.Tensor) -> None:
    found = explain.attribute(windows, x, "gradcam", target=target, layer="features")
    for i, each in enumerate(windows(x)):
        if target.box is None:
            expected = each["scores"][0]
        else:
            box = torch.as_tensor(target.box).reshape(-1, 4)[0]
            expected = each["scores"][overlaps(each["boxes"], box).argmax()]
        torch.testing.assert_close(found.score[i], expected.detach(), **EXACT)
    assert found.target == target.name
    assert found.logits is None


def own_score(place: int) -> Any:
    """The score of the quarter at a place, whatever its label."""

    def score(output: Any) -> torch.Tensor:
        corners = torch.tensor([[0, 0], [5, 0], [0, 6], [5, 6]])
        return torch.stack([each["scores"][(each["boxes"][:, :2] == corners[place]).all(1)][0] for each in output])

    return score


@pytest.mark.parametrize("method", [Saliency(absolute=False), "gradcam", "layercam", "guidedbackprop"])
def test_a_detection_is_explained_like_its_score(method: Any, windows: nn.Module, x: torch.Tensor) -> None:
    target = Detection(box=(5, 0, 10, 6))
    found = values(windows, x, method, target, layer="features")
    torch.testing.assert_close(found, values(windows, x, method, own_score(1), layer="features"), **EXACT)


AGAIN = ["integratedgradients", "smoothgrad", "scorecam", "ablationcam"]


@pytest.mark.parametrize("method", AGAIN)
def test_altered_images_are_asked_for_the_box_and_label_of_the_unaltered_one(
    method: str, windows: nn.Module, x: torch.Tensor
) -> None:
    x, box = x[:1], torch.tensor([0.0, 0, 5, 6])
    clean = windows(x)[0]["labels"][overlaps(windows(x)[0]["boxes"], box).argmax()]

    def by_hand(output: Any) -> torch.Tensor:
        mine = [(overlaps(each["boxes"], box) > 0.9) & (each["labels"] == clean) for each in output]
        return torch.stack([each["scores"][m].sum() for each, m in zip(output, mine, strict=True)])

    found = values(windows, x, method, Detection(box=box), layer="features")
    torch.testing.assert_close(found, values(windows, x, method, by_hand, layer="features"), **EXACT)


@pytest.mark.parametrize("method", AGAIN)
@pytest.mark.parametrize("threshold", [0.5, 2.0])
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_altered_images_without_the_box_score_0(
    method: str, threshold: float, windows: nn.Module, x: torch.Tensor
) -> None:
    def raise_threshold(module: nn.Module, args: Any) -> None:
        altered = [not any(torch.equal(image, own) for own in x) for image in args[0]]
        module.threshold = torch.tensor(altered) * threshold

    windows.register_forward_pre_hook(raise_threshold)
    found = explain.attribute(windows, x, method, target=Detection(), layer="features", batch_size=4)
    assert torch.isfinite(found.values).all()
    assert (found.score > 0).all()
    if threshold == 2.0 and method in ("integratedgradients", "smoothgrad"):
        assert not found.values.any()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lambda: Detection(9), "unaltered"),
        (lambda: Detection(box=(4, 4, 6, 8)), "detection"),
        (lambda: Detection(box=(4, 4, 4, 8)), "x1 < x2 and y1 < y2"),
        (lambda: Detection(box=(4, 4, 8)), "box must be"),
        (lambda: Detection(box=torch.tensor([[0, 0, 5, 6]] * 2)), "images"),
        (lambda: Detection(overlap=2), "share"),
        (lambda: Detection("cat"), "labels are not known"),
        (lambda: Segmentation(0), "class"),
        (lambda: None, "Detection"),
    ],
)
def test_boxes_that_do_not_fit_are_refused(target: Any, message: str, windows: nn.Module, x: torch.Tensor) -> None:
    before = snapshot(windows)
    with pytest.raises((TargetError, ModelError), match=message):
        explain.attribute(windows, x, "saliency", target=target())
    assert snapshot(windows) == before


def test_no_detection_at_all_is_refused_in_the_image_and_scores_0_in_altered_ones(
    windows: nn.Module, x: torch.Tensor
) -> None:
    clean = Detection().settled(windows(x), 3)
    windows.threshold = 2.0
    with pytest.raises(TargetError, match="labels found there"):
        explain.attribute(windows, x, "saliency", target=Detection())
    x.requires_grad_()
    score = clean.pick(windows(x), 3)[0]
    assert score.tolist() == [0, 0, 0]
    assert not torch.autograd.grad(score.sum(), x)[0].any()


def test_a_box_without_area_overlaps_itself_alone() -> None:
    boxes = torch.tensor([[1.0, 1, 1, 3], [0, 0, 2, 2], [1, 1, 1, 3.5]])
    assert overlaps(boxes, boxes[0]).tolist() == [1, 0, 0]
    assert find_detections({"boxes": boxes, "labels": boxes[:, 0], "scores": boxes[:, 1]}, 1, "it")[0][0] is not None


# --- torchvision's own


SIZE = {"weights": None, "weights_backbone": None, "num_classes": 4}
SEGMENTERS = {
    "deeplabv3_mobilenet": (deeplabv3_mobilenet_v3_large, {}, "backbone", "classifier.3"),
    "fcn_resnet50": (fcn_resnet50, {"aux_loss": True}, "backbone.layer4", "classifier.3"),
}
FRUGAL = {"min_size": 64, "rpn_pre_nms_top_n_test": 40, "rpn_post_nms_top_n_test": 20, "box_score_thresh": 0.0}
DETECTORS = {
    "fasterrcnn": (fasterrcnn_mobilenet_v3_large_320_fpn, FRUGAL, ["backbone.body", "backbone.fpn.layer_blocks.0"]),
    "retinanet": (
        retinanet_resnet50_fpn,
        {"min_size": 64, "score_thresh": 0.0, "topk_candidates": 20},
        ["backbone.body.layer4", "backbone.fpn.layer_blocks.1"],
    ),
}


@pytest.mark.parametrize("name", SEGMENTERS)
def test_torchvisions_segmenters(name: str) -> None:
    torch.manual_seed(0)
    build, options, layer, default = SEGMENTERS[name]
    model, x = build(**SIZE, **options).eval(), torch.randn(2, 3, 64, 48)
    best = model(x)["out"].argmax(1)
    category = int(best[0].flatten().mode().values)
    mask = torch.zeros(64, 48)
    mask[20:40, 10:30] = 1
    before = snapshot(model)
    found = explain.attribute(model, x, ["gradcam", "saliency"], target=Segmentation(category, mask), layer=layer)
    expected = values(model, x, "saliency", lambda o: o["out"][:, category, 20:40, 10:30].mean((1, 2)))
    torch.testing.assert_close(found["saliency"].values, expected, rtol=1e-3, atol=1e-6)
    assert found["gradcam"].heatmap.shape == (2, 64, 48)
    alone = explain.attribute(model, x, GradCAM(relu=False), target=Segmentation(category, mask))
    assert alone.layer == default  # neither the map of classes itself, nor a second head that the target does not read
    assert alone.values.flatten(1).any(1).all()
    only = explain.attribute(model, x[:1], IntegratedGradients(steps=2), target=Segmentation(category))
    torch.testing.assert_close(only.score[0], model(x[:1])["out"][0, category][best[0] == category].mean().detach())
    assert torch.isfinite(only.values).all()
    assert snapshot(model) == before


@pytest.mark.parametrize("name", DETECTORS)
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")  # random weights may have nothing to say
def test_torchvisions_detectors(name: str) -> None:
    torch.manual_seed(0)
    build, options, layers = DETECTORS[name]
    model, x = build(**SIZE, **options).eval(), torch.rand(2, 3, 64, 64)
    own = model(list(x))
    before = snapshot(model)
    found = explain.attribute(model, x, ["gradcam", "saliency", "guidedbackprop"], target=Detection(), layer=layers[1])
    for i, each in enumerate(own):
        torch.testing.assert_close(found["gradcam"].score[i], each["scores"].max().detach(), rtol=1e-5, atol=1e-7)
    assert found["saliency"].values.any()
    assert all(torch.isfinite(a.values).all() for a in found.values())
    box, label = own[0]["boxes"][3].detach(), int(own[0]["labels"][3])
    target = Detection(label, box)
    one = explain.attribute(model, x[:1], ["gradcam", IntegratedGradients(steps=2)], target=target, layer=layers[0])
    torch.testing.assert_close(one["gradcam"].score[0], own[0]["scores"][3].detach(), rtol=1e-5, atol=1e-7)
    assert torch.isfinite(one["integratedgradients"].values).all()
    default = explain.attribute(model, x[:1], "gradcam", target=target).layer
    x_layer = x[:1].clone().requires_grad_()
    with explain.hooks.capture(model, default) as seen:
        torch.autograd.grad(model(list(x_layer))[0]["scores"][3], x_layer)
    assert (seen.gradients[default] != 0).any(1).sum() > 1  # the score reads it in more than one place
    assert snapshot(model) == before
    if name == "fasterrcnn":
        assert default == "backbone"  # the level of the pyramid that the box was pooled from
        with pytest.raises(LayerError, match="images"):
            explain.attribute(model, x, "gradcam", target=Detection(), layer="roi_heads.box_head")


# --- a batch


@pytest.mark.parametrize("method", ["gradcam", "saliency", "integratedgradients", "scorecam"])
@pytest.mark.parametrize("kind", ["predicted region", "masks", "best box", "boxes", "similarity", "difference"])
def test_a_batch_equals_its_images_one_by_one(
    method: str, kind: str, dense: nn.Module, windows: nn.Module, net: TinyNet, x: torch.Tensor
) -> None:
    category, _ = predicted(dense, x)
    masks = torch.rand(3, 12, 10, generator=torch.Generator().manual_seed(0)) > 0.5
    boxes = torch.tensor([[0.0, 0, 5, 6], [5, 0, 10, 6], [5, 6, 10, 12]])
    others = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    cases: dict[str, tuple[nn.Module, Any]] = {
        "predicted region": (dense, lambda i: Segmentation(category)),
        "masks": (dense, lambda i: Segmentation(1, masks[i])),
        "best box": (windows, lambda i: Detection()),
        "boxes": (windows, lambda i: Detection(box=boxes[i])),
        "similarity": (net, lambda i: Similarity(others[i])),
        "difference": (net, lambda i: Difference(None, TopClass(1)) + 2 * ClassTarget(3)),
    }
    model, of = cases[kind]
    layer = "layer2" if model is net else "features"
    whole = values(model, x, method, of(slice(None)), layer=layer, batch_size=7)
    for i in range(3):
        torch.testing.assert_close(whole[i], values(model, x[i : i + 1], method, of(i), layer=layer)[0], **EXACT)


# --- this rather than that


@pytest.mark.parametrize("method", SIGNED)
def test_a_difference_is_explained_by_the_difference(method: Any, net: TinyNet, x: torch.Tensor) -> None:
    first, second = values(net, x, method, 3), values(net, x, method, 1)
    torch.testing.assert_close(values(net, x, method, Difference(3, 1)), first - second, **EXACT)
    torch.testing.assert_close(values(net, x, method, ClassTarget(3) - ClassTarget(1)), first - second, **EXACT)
    torch.testing.assert_close(
        values(net, x, method, -(as_target(3) * 0.5 + as_target(1))), -first / 2 - second, **EXACT
    )


def test_differences_may_be_of_anything(dense: nn.Module, x: torch.Tensor) -> None:
    mask = torch.ones(12, 10)
    target = Segmentation(0, mask) - Segmentation(1, mask)
    found = values(dense, x, "saliency", target)
    torch.testing.assert_close(
        found, values(dense, x, "saliency", lambda o: (o["out"][:, 0] - o["out"][:, 1]).mean((1, 2))), **EXACT
    )
    assert target.name == "0 in the mask − 1 in the mask"
    with pytest.raises(TargetError, match="targets"):
        ClassTarget(0) + 3  # type: ignore[operator]


def test_a_difference_of_top_classes_stays_with_those_of_the_unaltered_image(net: TinyNet, x: torch.Tensor) -> None:
    best, second = net(x).topk(2).indices.T
    for method in ("integratedgradients", "scorecam", "ablationcam"):
        found = values(net, x, method, Difference(None, TopClass(1)), layer="layer2")
        expected = values(net, x, method, Difference(best.tolist(), second), layer="layer2")
        torch.testing.assert_close(found, expected, **EXACT)


def test_labels_are_found_wherever_they_are_named() -> None:
    labels = ["tabby cat", "espresso", "lemon"]
    target = as_target(Difference("tabby", "espresso"), labels)
    assert isinstance(target, Sum)
    assert target.name == "tabby cat − espresso"
    assert target.pick(torch.tensor([[5.0, 2.0, 0.0]]), 1)[0].tolist() == [3.0]
    assert as_target(Segmentation("lemon"), labels).name == "lemon where predicted"
    assert as_target(-1 * Detection("lemon"), labels).name == "− best lemon detection"
    assert as_target("tabby", labels) == ClassTarget(0)
    assert pickle.loads(pickle.dumps(target)).name == copy.deepcopy(target).name == target.name
    with pytest.raises(TargetError, match="labels are not known"):
        Difference("tabby", 3).pick(torch.zeros(1, 3), 1)
    with pytest.raises(TargetError, match="label"):
        as_target(Difference("tabby", "esspresso"), labels)


def test_methods_that_compare_classes_refuse_what_is_none(net: TinyNet, x: torch.Tensor) -> None:
    with pytest.raises(TargetError, match="compares"):
        explain.attribute(net, x, "finercam", target=Difference(3, 1))


# --- one number, and likeness


class Squeezed(nn.Module):
    def __init__(self, net: nn.Module, squeeze: Any) -> None:
        super().__init__()
        self.net, self.squeeze = net, squeeze

    def forward(self, x: torch.Tensor) -> Any:
        return self.squeeze(self.net(x)[:, :1])


@pytest.mark.parametrize("squeeze", [lambda y: y, lambda y: y[:, 0], lambda y: (y.squeeze(1), None)])
@pytest.mark.parametrize("count", [1, 3])
def test_one_number_per_image_needs_no_target(squeeze: Any, count: int, net: TinyNet, x: torch.Tensor) -> None:
    model, x = Squeezed(net, squeeze).eval(), x[:count]
    method = Saliency(absolute=False)
    expected = values(net, x, method, 0)
    for target in (None, 0, BinaryLogit()):
        torch.testing.assert_close(values(model, x, method, target), expected, **EXACT)
    torch.testing.assert_close(values(model, x, method, BinaryLogit(positive=False)), -expected, **EXACT)
    found = explain.attribute(model, x, "gradcam", target=BinaryLogit(positive=False), layer="net.layer2")
    assert found.target == "negative"
    torch.testing.assert_close(found.score, -net(x)[:, 0].detach(), **EXACT)
    with pytest.raises(TargetError, match="class"):
        values(model, x, method, 1)
    with pytest.raises(TargetError, match="logit"):
        values(net, x, method, BinaryLogit())


def test_a_single_image_may_come_back_as_a_single_number(net: TinyNet, x: torch.Tensor) -> None:
    model = Squeezed(net, torch.squeeze)
    torch.testing.assert_close(values(model, x[:1], "saliency", None), values(net, x[:1], "saliency", 0), **EXACT)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5), (3, 5, 1, 1)])
def test_similarity_is_the_cosine_to_another_embedding(shape: Any, net: TinyNet, x: torch.Tensor) -> None:
    other = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    flat = other.detach().double().reshape(-1, 5)

    def by_hand(embedding: torch.Tensor) -> torch.Tensor:
        dot = (embedding * flat).sum(1)
        return dot / embedding.pow(2).sum(1).sqrt() / flat.pow(2).sum(1).sqrt()

    found = explain.attribute(net, x, Saliency(absolute=False), target=Similarity(other))
    torch.testing.assert_close(found.values, values(net, x, Saliency(absolute=False), by_hand), **EXACT)
    torch.testing.assert_close(found.score, by_hand(net(x)).detach(), **EXACT)
    assert found.target == "similarity"


def test_an_image_is_as_similar_to_itself_as_can_be(net: TinyNet, x: torch.Tensor) -> None:
    found = explain.attribute(net, x[:1], IntegratedGradients(steps=3), target=Similarity(net(x[:1])))
    assert found.score.item() == pytest.approx(1)
    maps = SimpleNamespace(embeddings=torch.ones(2, 4, 1, 1))
    assert Similarity(np.ones(4, np.float32)).pick(maps, 2)[0].tolist() == pytest.approx([1, 1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        (torch.zeros(5), "got only zeros"),
        (torch.tensor([1.0, torch.nan]), "finite numbers"),
        (torch.tensor(3.0), "float32"),
        (torch.tensor([1, 2]), "got torch.int64"),
        (torch.ones(4), "shape"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(
    embedding: torch.Tensor, message: str, net: TinyNet, x: torch.Tensor
) -> None:
    with pytest.raises(TargetError, match=message):
        explain.attribute(net, x, "saliency", target=Similarity(embedding))
    with pytest.raises(TargetError, match="returns embeddings"):
        Similarity(torch.ones(4)).pick({"mask": torch.zeros(3, 3, 3)}, 3)


# --- what models return


@dataclass
class Output:
    loss: None
    features: torch.Tensor
    scores: torch.Tensor


LOGITS, MAPS = torch.randn(2, 3), torch.randn(2, 4, 5, 5)
Named = namedtuple("Named", ["features", "logits"])


@pytest.mark.parametrize(
    "output",
    [
        LOGITS,
        (MAPS, LOGITS),
        [None, {"not": "looked into"}, LOGITS],
        {"out": LOGITS, "aux": 1},
        {"features": MAPS, "scores": LOGITS},
        Output(None, MAPS, LOGITS),
        Named(torch.randn(2, 7), LOGITS),
        SimpleNamespace(logits=LOGITS),
        (torch.randn(2), LOGITS),
    ],
)
def test_class_scores_are_found_among_other_things(output: Any) -> None:
    assert find_logits(output, 2) is LOGITS
    assert torch.equal(as_target(None).pick(output, 2)[0], LOGITS.amax(1))


@pytest.mark.parametrize(
    "output", [torch.zeros(3), (torch.zeros(3), "text"), {}, None, Output(None, MAPS, MAPS), torch.zeros(3, 3)]
)
def test_what_has_no_scores_is_described(output: Any) -> None:
    with pytest.raises(ModelError, match="callable"):
        find_logits(output, 2)


class Multi(nn.Module):
    def __init__(self, net: nn.Module, wrap: Any) -> None:
        super().__init__()
        self.net, self.wrap = net, wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.net(x))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: (y, None),
        lambda y: [y],
        lambda y: {"loss": None, "scores": y},
        lambda y: Output(None, y[:, :, None, None], y),
    ],
)
def test_models_may_wrap_their_scores(wrap: Any, net: TinyNet, x: torch.Tensor) -> None:
    for method in ("gradcam", "scorecam", "finercam", "integratedgradients"):
        found = values(Multi(net, wrap), x, method, None, layer="net.layer2")
        torch.testing.assert_close(found, values(net, x, method, None, layer="layer2"), **EXACT)


@pytest.mark.parametrize(
    "target",
    [Segmentation(0), Detection(), Similarity(torch.ones(2)), BinaryLogit(), Difference(0, 1), ScoreTarget(len)],
)
def test_targets_are_values_with_a_name(target: Target) -> None:
    assert isinstance(target, Target)
    assert isinstance(target.name, str)
    assert hash(target) == hash(target)
    assert as_target(target, ["a", "b"]).name == target.name
    with pytest.raises(AttributeError):
        target.name = "other"  # type: ignore[misc]


class Attributes(dict[str, Any]):
    """A dictionary whose keys are attributes, as in many people's code."""

    __getattr__ = dict.__getitem__  # type: ignore[assignment]


@pytest.mark.parametrize("key", ["logits", "out", "scores"])
def test_models_may_return_dictionaries_whose_keys_are_attributes(key: str, net: TinyNet, x: torch.Tensor) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.config = net, Attributes(classes=5)

        def forward(self, x: torch.Tensor) -> Attributes:
            return Attributes({key: self.net(x)})

    named = Named().eval()
    expected = explain.attribute(net, x, "saliency", target=1).values
    torch.testing.assert_close(explain.attribute(named, x, "saliency", target=1).values, expected, rtol=0, atol=0)
    assert explain.Explainer(named, preprocess=lambda photo: x[0]).name


def test_such_a_dictionary_is_refused_in_one_line_where_a_path_belongs() -> None:
    with pytest.raises(ExplainError, match="file"):
        explain.load(Attributes(a=1))  # type: ignore[arg-type]
