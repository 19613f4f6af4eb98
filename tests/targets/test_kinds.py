"""Targets beyond a class of the image: regions, boxes, one logit, likeness, differences; and what
models return."""

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
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.models.segmentation import deeplabv3_mobilenet_v3_large

import explain
from explain import ExplainError, LayerError, ModelError, TargetError
from explain.methods import GradCAM, IntegratedGradients, Saliency
from explain.targets import (
    BinaryLogit,
    ClassTarget,
    Detections,
    Difference,
    ScoreTarget,
    Segmentation,
    Similarity,
    Target,
    TopClass,
    as_target,
)
from explain.targets.base import Sum, find_logits
from explain.targets.detections import overlaps
from tests.conftest import Made, TinyNet, settled, snapshot

SIGNED = [
    Saliency(absolute=False),
    "inputxgradient",
    GradCAM(relu=False),
    IntegratedGradients(steps=4),
]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


class Dense(nn.Module):
    """Class maps at the input's resolution, as torchvision's segmenters return them."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, 1, 1)
        )
        self.head = nn.Conv2d(6, classes, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.head(F.relu(self.features(x)))
        return {
            "out": F.interpolate(maps, size=x.shape[-2:], mode="bilinear", align_corners=False),
            "aux": maps,
        }


class Windows(nn.Module):
    """The four quarters of the image as boxes; those that score below the threshold are not
    returned."""

    def __init__(self, threshold: float | Tensor = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(inplace=True))
        self.head = nn.Linear(6, 3)
        self.threshold = threshold

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        x = torch.stack(list(images))
        h = x.shape[-2] / 2
        w = x.shape[-1] / 2
        boxes = torch.tensor(
            [[0, 0, w, h], [w, 0, 2 * w, h], [0, h, w, 2 * h], [w, h, 2 * w, 2 * h]]
        ).to(x)
        maps = F.adaptive_avg_pool2d(self.features(x), 2).flatten(2).transpose(1, 2)
        scores, labels = self.head(maps).softmax(2).max(2)
        limits = torch.as_tensor(self.threshold).expand(len(x))
        kept = [
            (s >= t).nonzero()[:, 0][s[s >= t].argsort(descending=True)]
            for s, t in zip(scores, limits, strict=True)
        ]
        return [
            {"boxes": boxes[k], "labels": labels[i][k], "scores": scores[i][k]}
            for i, k in enumerate(kept)
        ]


@pytest.fixture
def dense() -> nn.Module:
    return settled(Dense(), seed=2).double().eval()


@pytest.fixture
def windows() -> nn.Module:
    return settled(Windows(), seed=2).double().eval()


def values(model: nn.Module, x: Tensor, method: Any, target: Any, **options: Any) -> Tensor:
    return explain.attribute(model, x, method, target=target, **options).values


# --- regions


@pytest.mark.parametrize("method", [Saliency(absolute=False), "gradcam", "scorecam"])
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_a_mask_of_one_pixel_asks_for_that_pixels_logit(
    method: Any, dense: nn.Module, x: Tensor
) -> None:
    mask = torch.zeros(12, 10, dtype=torch.bool)
    mask[4, 7] = True
    found = explain.attribute(dense, x, method, target=Segmentation(2, mask), layer="features")
    expected = explain.attribute(
        dense, x, method, target=lambda output: output["out"][:, 2, 4, 7], layer="features"
    )
    assert_close(found.values, expected.values, **EXACT)
    assert_close(found.score, expected.score, **EXACT)
    assert found.target == "2 in the mask"
    assert found.logits is None


def predicted(dense: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """A class that is predicted somewhere in each image, and where."""
    best = dense(x)["out"].argmax(1)
    category = next(c for c in range(4) if (best == c).flatten(1).any(1).all())
    return category, best == category


@pytest.mark.parametrize("method", ["gradcam", "integratedgradients", "ablationcam"])
def test_the_predicted_region_is_that_of_the_unaltered_image(
    method: str, dense: nn.Module, x: Tensor
) -> None:
    category, mask = predicted(dense, x)
    assert 0 < mask.float().mean() < 1
    found = values(dense, x, method, Segmentation(category), layer="features", batch_size=5)
    assert_close(
        found, values(dense, x, method, Segmentation(category, mask), layer="features"), **EXACT
    )
    elsewhere = values(dense, x, method, Segmentation(category, ~mask), layer="features")
    assert not torch.allclose(found, elsewhere)


def test_the_score_of_a_region_is_the_mean_of_its_logits(dense: nn.Module, x: Tensor) -> None:
    maps = dense(x)["out"]
    category, mask = predicted(dense, x)
    expected = torch.stack([maps[i, category][mask[i]].mean() for i in range(3)])
    assert_close(Segmentation(category).pick({"out": maps}, 3)[0], expected, **EXACT)
    finer = mask[0].repeat_interleave(2, 0).repeat_interleave(2, 1).numpy().astype(np.uint8) * 255
    assert_close(Segmentation(category, finer).pick(maps[:1], 1)[0], expected[:1], **EXACT)
    coarse = Segmentation(category, mask[0]).pick(
        SimpleNamespace(logits=F.avg_pool2d(maps[:1], 2)), 1
    )[0]
    assert_close(coarse, _weighted(F.avg_pool2d(maps[0, category][None], 2)[0], mask[0]), **EXACT)
    single = Segmentation(0).pick(maps[:, :1] - maps[:, :1].mean((2, 3), keepdim=True), 3)[0]
    assert (single > 0).all()


def _weighted(logits: Tensor, mask: Tensor) -> Tensor:
    share = F.avg_pool2d(mask.double()[None], 2)[0]
    return ((logits * share).sum() / share.sum())[None]


def test_a_class_that_is_predicted_nowhere_is_refused_with_those_that_are(
    dense: nn.Module, x: Tensor
) -> None:
    with torch.no_grad():
        dense.head.bias[1] = -1e3
    with pytest.raises(TargetError, match="class 1 must"):
        explain.attribute(dense, x, "saliency", target=Segmentation(1))


# --- boxes


@pytest.mark.parametrize(
    "target", [Detections(), Detections(box=(0, 0, 5, 5)), Detections(box=[[5, 6, 10, 12]] * 3)]
)
def test_a_detections_score_is_the_models_own(
    target: Detections, windows: nn.Module, x: Tensor
) -> None:
    found = explain.attribute(windows, x, "gradcam", target=target, layer="features")
    for i, each in enumerate(windows(x)):
        if target.box is None:
            expected = each["scores"][0]
        else:
            box = torch.as_tensor(target.box).reshape(-1, 4)[0]
            expected = each["scores"][overlaps(each["boxes"], box).argmax()]
        assert_close(found.score[i], expected.detach(), **EXACT)
    assert found.target == target.name
    assert found.logits is None


def own_score(place: int) -> Any:
    """The score of the quarter at a place, whatever its label."""

    def score(output: Any) -> Tensor:
        corners = torch.tensor([[0, 0], [5, 0], [0, 6], [5, 6]])
        return torch.stack(
            [each["scores"][(each["boxes"][:, :2] == corners[place]).all(1)][0] for each in output]
        )

    return score


@pytest.mark.parametrize("method", [Saliency(absolute=False), "layercam"])
def test_a_detection_is_explained_like_its_score(
    method: Any, windows: nn.Module, x: Tensor
) -> None:
    target = Detections(box=(5, 0, 10, 6))
    found = values(windows, x, method, target, layer="features")
    assert_close(found, values(windows, x, method, own_score(1), layer="features"), **EXACT)


AGAIN = ["integratedgradients", "scorecam"]


@pytest.mark.parametrize("method", AGAIN)
def test_altered_images_are_asked_for_the_box_of_the_unaltered_one(
    method: str, windows: nn.Module, x: Tensor
) -> None:
    x = x[:1]
    box = torch.tensor([0.0, 0, 5, 6])
    clean = windows(x)[0]["labels"][overlaps(windows(x)[0]["boxes"], box).argmax()]

    def by_hand(output: Any) -> Tensor:
        mine = [(overlaps(each["boxes"], box) > 0.9) & (each["labels"] == clean) for each in output]
        return torch.stack([each["scores"][m].sum() for each, m in zip(output, mine, strict=True)])

    found = values(windows, x, method, Detections(box=box), layer="features")
    assert_close(found, values(windows, x, method, by_hand, layer="features"), **EXACT)


@pytest.mark.filterwarnings("ignore:integratedgradients misses")  # a box that is lost is a jump
@pytest.mark.parametrize("method", AGAIN)
@pytest.mark.parametrize("threshold", [0.5, 2.0])
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_altered_images_without_the_box_score_0(
    method: str, threshold: float, windows: nn.Module, x: Tensor
) -> None:
    def raise_threshold(module: nn.Module, args: Any) -> None:
        altered = [not any(torch.equal(image, own) for own in x) for image in args[0]]
        module.threshold = torch.tensor(altered) * threshold

    windows.register_forward_pre_hook(raise_threshold)
    found = explain.attribute(
        windows, x, method, target=Detections(), layer="features", batch_size=4
    )
    assert torch.isfinite(found.values).all()
    assert (found.score > 0).all()
    if threshold == 2.0 and method in ("integratedgradients", "smoothgrad"):
        assert not found.values.any()


@pytest.mark.parametrize(
    ("of", "target", "message"),
    [
        ("windows", lambda: Detections(9), "unaltered"),
        ("windows", lambda: Detections(box=(4, 4, 6, 8)), "detection"),
        ("windows", lambda: Detections(box=(4, 4, 4, 8)), "box must"),
        ("windows", lambda: Segmentation(0), "class"),
        ("windows", lambda: Detections(box=(4, 4, 8)), "box must"),
        ("windows", lambda: Detections(overlap=2), "share"),
        ("windows", lambda: Detections(box=torch.tensor([[0, 0, 5, 6]] * 2)), "images"),
        ("windows", lambda: Detections("cat"), "labels are not known"),
        ("dense", lambda: Segmentation(9), "class"),
        ("dense", lambda: Segmentation("cat"), "labels are not known"),
        ("dense", lambda: Detections(0), "'out'"),
        ("dense", lambda: Segmentation(0, torch.zeros(12, 10)), "mask must"),
        ("dense", lambda: None, "category"),
        ("dense", lambda: Segmentation(0, torch.ones(12)), r"got \(12,\)"),
        ("dense", lambda: Segmentation(0, torch.ones(10, 12)), "mask must"),
        ("dense", lambda: Segmentation(0, torch.ones(2, 12, 10)), "images"),
    ],
)
def test_what_does_not_fit_is_refused(
    of: str, target: Any, message: str, x: Tensor, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(of)
    before = snapshot(model)
    with pytest.raises((TargetError, ModelError), match=message):
        explain.attribute(model, x, "saliency", target=target())
    assert snapshot(model) == before


def test_no_detection_is_refused_in_the_image_and_scores_0_in_altered_ones(
    windows: nn.Module, x: Tensor
) -> None:
    clean = Detections().settled(windows(x), 3)
    windows.threshold = 2.0
    with pytest.raises(TargetError, match="labels found there"):
        explain.attribute(windows, x, "saliency", target=Detections())
    x.requires_grad_()
    score = clean.pick(windows(x), 3)[0]
    assert score.tolist() == [0, 0, 0]
    assert not torch.autograd.grad(score.sum(), x)[0].any()


def test_a_box_without_area_overlaps_itself_alone() -> None:
    boxes = torch.tensor([[1.0, 1, 1, 3], [0, 0, 2, 2], [1, 1, 1, 3.5]])
    assert overlaps(boxes, boxes[0]).tolist() == [1, 0, 0]
    found = {
        "boxes": boxes,
        "labels": torch.tensor([0, 1, 0]),
        "scores": torch.tensor([0.2, 0.9, 0.1]),
    }
    # one image without a list
    assert Detections(box=(0, 0, 2, 2)).pick(found, 1)[0].tolist() == pytest.approx([0.9])


# --- torchvision's own


SIZE = {"weights": None, "weights_backbone": None, "num_classes": 4}


def test_a_segmenter_of_torchvision() -> None:
    torch.manual_seed(0)
    model = deeplabv3_mobilenet_v3_large(**SIZE, aux_loss=True).eval()
    layer = "backbone"
    x = torch.randn(2, 3, 64, 48)
    best = model(x)["out"].argmax(1)
    category = int(best[0].flatten().mode().values)
    mask = torch.zeros(64, 48)
    mask[20:40, 10:30] = 1
    before = snapshot(model)
    found = explain.attribute(
        model, x, ["gradcam", "saliency"], target=Segmentation(category, mask), layer=layer
    )
    expected = values(
        model, x, "saliency", lambda o: o["out"][:, category, 20:40, 10:30].mean((1, 2))
    )
    assert_close(found["saliency"].values, expected, rtol=1e-3, atol=1e-6)
    assert found["gradcam"].heatmap.shape == (2, 64, 48)
    alone = explain.attribute(model, x, GradCAM(relu=False), target=Segmentation(category, mask))
    # neither the class maps, nor a head that the target does not read
    assert alone.layer == "classifier.3"
    assert alone.values.flatten(1).any(1).all()
    only = explain.attribute(
        model, x[:1], IntegratedGradients(steps=2), target=Segmentation(category)
    )
    assert_close(
        only.score[0], model(x[:1])["out"][0, category][best[0] == category].mean().detach()
    )
    assert torch.isfinite(only.values).all()
    assert snapshot(model) == before


# random weights may have nothing to say
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_a_detector_of_torchvision() -> None:
    torch.manual_seed(0)
    frugal = {
        "min_size": 64,
        "rpn_pre_nms_top_n_test": 40,
        "rpn_post_nms_top_n_test": 20,
        "box_score_thresh": 0.0,
    }
    model = fasterrcnn_mobilenet_v3_large_320_fpn(**SIZE, **frugal).eval()
    x = torch.rand(2, 3, 64, 64)
    layers = ["backbone.body", "backbone.fpn.layer_blocks.0"]
    own = model(list(x))
    before = snapshot(model)
    found = explain.attribute(
        model, x, ["gradcam", "saliency", "guidedbackprop"], target=Detections(), layer=layers[1]
    )
    for i, each in enumerate(own):
        assert_close(found["gradcam"].score[i], each["scores"].max().detach(), rtol=1e-5, atol=1e-7)
    assert found["saliency"].values.any()
    assert all(torch.isfinite(a.values).all() for a in found.values())
    box = own[0]["boxes"][3].detach()
    label = int(own[0]["labels"][3])
    target = Detections(label, box)
    one = explain.attribute(
        model, x[:1], ["gradcam", IntegratedGradients(steps=2)], target=target, layer=layers[0]
    )
    assert_close(one["gradcam"].score[0], own[0]["scores"][3].detach(), rtol=1e-5, atol=1e-7)
    assert torch.isfinite(one["integratedgradients"].values).all()
    default = explain.attribute(model, x[:1], "gradcam", target=target).layer
    x_layer = x[:1].clone().requires_grad_()
    with explain.hooks.capture(model, default) as seen:
        torch.autograd.grad(model(list(x_layer))[0]["scores"][3], x_layer)
    # the score reads it in more than one place
    assert (seen.gradients[default] != 0).any(1).sum() > 1
    assert snapshot(model) == before
    assert default == "backbone"  # the level of the pyramid that the box was pooled from
    with pytest.raises(LayerError, match="map"):
        explain.attribute(model, x, "gradcam", target=Detections(), layer="roi_heads.box_head")


# --- a batch


@pytest.mark.parametrize("method", ["gradcam", "scorecam"])
@pytest.mark.parametrize(
    "kind", ["predicted region", "masks", "best box", "boxes", "similarity", "difference"]
)
def test_a_batch_equals_its_images(
    method: str, kind: str, dense: nn.Module, windows: nn.Module, net: TinyNet, x: Tensor
) -> None:
    category, _ = predicted(dense, x)
    masks = torch.rand(3, 12, 10, generator=torch.Generator().manual_seed(0)) > 0.5
    boxes = torch.tensor([[0.0, 0, 5, 6], [5, 0, 10, 6], [5, 6, 10, 12]])
    others = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    cases: dict[str, tuple[nn.Module, Any]] = {
        "predicted region": (dense, lambda i: Segmentation(category)),
        "masks": (dense, lambda i: Segmentation(1, masks[i])),
        "best box": (windows, lambda i: Detections()),
        "boxes": (windows, lambda i: Detections(box=boxes[i])),
        "similarity": (net, lambda i: Similarity(others[i])),
        "difference": (net, lambda i: Difference(None, TopClass(1)) + 2 * ClassTarget(3)),
    }
    model, of = cases[kind]
    layer = "layer2" if model is net else "features"
    whole = values(model, x, method, of(slice(None)), layer=layer, batch_size=7)
    for i in range(3):
        assert_close(whole[i], values(model, x[i : i + 1], method, of(i), layer=layer)[0], **EXACT)


# --- this rather than that


@pytest.mark.parametrize("method", SIGNED)
def test_a_difference_is_explained_by_the_difference(method: Any, net: TinyNet, x: Tensor) -> None:
    first = values(net, x, method, 3)
    second = values(net, x, method, 1)
    assert_close(values(net, x, method, Difference(3, 1)), first - second, **EXACT)
    assert_close(values(net, x, method, ClassTarget(3) - ClassTarget(1)), first - second, **EXACT)
    assert_close(
        values(net, x, method, -(as_target(3) * 0.5 + as_target(1))), -first / 2 - second, **EXACT
    )


def test_differences_may_be_of_anything(dense: nn.Module, x: Tensor) -> None:
    mask = torch.ones(12, 10)
    target = Segmentation(0, mask) - Segmentation(1, mask)
    found = values(dense, x, "saliency", target)
    assert_close(
        found,
        values(dense, x, "saliency", lambda o: (o["out"][:, 0] - o["out"][:, 1]).mean((1, 2))),
        **EXACT,
    )
    assert target.name == "0 in the mask − 1 in the mask"
    with pytest.raises(TargetError, match="targets"):
        ClassTarget(0) + 3  # type: ignore[operator]


def test_a_difference_of_top_classes_stays_with_those_of_the_unaltered_image(
    net: TinyNet, x: Tensor
) -> None:
    best, second = net(x).topk(2).indices.T
    for method in ("integratedgradients", "scorecam", "ablationcam"):
        found = values(net, x, method, Difference(None, TopClass(1)), layer="layer2")
        expected = values(net, x, method, Difference(best.tolist(), second), layer="layer2")
        assert_close(found, expected, **EXACT)


def test_labels_are_found_wherever_they_are_named() -> None:
    labels = ["tabby cat", "espresso", "lemon"]
    target = as_target(Difference("tabby", "espresso"), labels)
    assert isinstance(target, Sum)
    assert target.name == "tabby cat − espresso"
    assert target.pick(torch.tensor([[5.0, 2.0, 0.0]]), 1)[0].tolist() == [3.0]
    assert as_target(Segmentation("lemon"), labels).name == "lemon where predicted"
    assert as_target(-1 * Detections("lemon"), labels).name == "− best lemon detection"
    assert as_target("tabby", labels) == ClassTarget(0)
    assert pickle.loads(pickle.dumps(target)).name == copy.deepcopy(target).name == target.name
    with pytest.raises(TargetError, match="labels are not known"):
        Difference("tabby", 3).pick(torch.zeros(1, 3), 1)
    with pytest.raises(TargetError, match="label"):
        as_target(Difference("tabby", "esspresso"), labels)


def test_methods_that_compare_classes_refuse_what_is_none(net: TinyNet, x: Tensor) -> None:
    with pytest.raises(TargetError, match="compared"):
        explain.attribute(net, x, "finercam", target=Difference(3, 1))


# --- one number, and likeness


def multi(net: nn.Module, wrap: Any) -> nn.Module:
    return Made(lambda made, x: wrap(made.net(x)), net=net)


@pytest.mark.parametrize(
    "squeeze", [lambda y: y, lambda y: y[:, 0], lambda y: (y.squeeze(1), None)]
)
@pytest.mark.parametrize("count", [1, 3])
def test_one_number_per_image_needs_no_target(
    squeeze: Any, count: int, net: TinyNet, x: Tensor
) -> None:
    model = multi(net, lambda y: squeeze(y[:, :1])).eval()
    x = x[:count]
    method = Saliency(absolute=False)
    expected = values(net, x, method, 0)
    for target in (None, 0, BinaryLogit(), "yes"):
        assert_close(values(model, x, method, target), expected, **EXACT)
    for target in (BinaryLogit(positive=False), "no"):
        assert_close(values(model, x, method, target), -expected, **EXACT)
    for target, sign in (("not this", -1), ("no", -1), ("yes", 1), ("this", 1)):
        named = explain.attribute(model, x, method, target=target, categories=["this"])
        assert_close(named.values, sign * expected, **EXACT)
    found = explain.attribute(
        model, x, "gradcam", target=BinaryLogit(positive=False), layer="net.layer2"
    )
    assert found.target == "no"
    assert_close(found.score, -net(x)[:, 0].detach(), **EXACT)
    with pytest.raises(TargetError, match="class"):
        values(model, x, method, 1)
    with pytest.raises(TargetError, match="logit"):
        values(net, x, method, BinaryLogit())


def test_a_single_image_may_come_back_as_a_single_number(net: TinyNet, x: Tensor) -> None:
    model = multi(net, lambda y: y[:, :1].squeeze())
    assert_close(values(model, x[:1], "saliency", None), values(net, x[:1], "saliency", 0), **EXACT)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5), (3, 5, 1, 1)])
def test_similarity_is_the_cosine_to_another_embedding(shape: Any, net: TinyNet, x: Tensor) -> None:
    other = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    flat = other.detach().double().reshape(-1, 5)

    def by_hand(embedding: Tensor) -> Tensor:
        dot = (embedding * flat).sum(1)
        return dot / embedding.pow(2).sum(1).sqrt() / flat.pow(2).sum(1).sqrt()

    found = explain.attribute(net, x, Saliency(absolute=False), target=Similarity(other))
    assert_close(found.values, values(net, x, Saliency(absolute=False), by_hand), **EXACT)
    assert_close(found.score, by_hand(net(x)).detach(), **EXACT)
    assert found.target == "similarity"


def test_an_image_is_as_similar_to_itself_as_can_be(net: TinyNet, x: Tensor) -> None:
    found = explain.attribute(
        net, x[:1], IntegratedGradients(steps=3), target=Similarity(net(x[:1]))
    )
    assert found.score.item() == pytest.approx(1)
    maps = SimpleNamespace(embeddings=torch.ones(2, 4, 1, 1))
    assert Similarity(np.ones(4, np.float32)).pick(maps, 2)[0].tolist() == pytest.approx([1, 1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("embedding", "message"),
    [
        (torch.zeros(5), "only zeros"),
        (torch.tensor(3.0), "embedding"),
        (torch.ones(4), "shape"),
    ],
)
def test_embeddings_that_do_not_fit_are_refused(
    embedding: Tensor, message: str, net: TinyNet, x: Tensor
) -> None:
    with pytest.raises(TargetError, match=message):
        explain.attribute(net, x, "saliency", target=Similarity(embedding))
    with pytest.raises(TargetError, match="returns embeddings"):
        Similarity(torch.ones(4)).pick({"mask": torch.zeros(3, 3, 3)}, 3)


# --- what models return


@dataclass
class Output:
    loss: None
    features: Tensor
    scores: Tensor


LOGITS = torch.randn(2, 3)
MAPS = torch.randn(2, 4, 5, 5)
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
    "output",
    [
        torch.zeros(3),
        (torch.zeros(3), "text"),
        {},
        None,
        Output(None, MAPS, MAPS),
        torch.zeros(3, 3),
    ],
)
def test_what_has_no_scores_is_described(output: Any) -> None:
    with pytest.raises(ModelError, match="callable"):
        find_logits(output, 2)


class Attributes(dict[str, Any]):
    """A dictionary whose keys are attributes, as in many people's code."""

    __getattr__ = dict.__getitem__  # type: ignore[assignment]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda y: [y, None],
        lambda y: Output(None, y[:, :, None, None], y),
        lambda y: Attributes(logits=y),
        lambda y: Attributes(out=y),
        lambda y: Attributes(scores=y),
    ],
)
def test_models_may_wrap_their_scores(wrap: Any, net: TinyNet, x: Tensor) -> None:
    for method in ("gradcam", "scorecam", "finercam", "integratedgradients(steps=3)"):
        found = values(multi(net, wrap), x, method, None, layer="net.layer2")
        assert_close(found, values(net, x, method, None, layer="layer2"), **EXACT)
    assert explain.Explainer(multi(net, wrap).eval(), preprocess=lambda photo: x[0]).name


@pytest.mark.parametrize(
    "target",
    [
        Segmentation(0),
        Detections(),
        Similarity(torch.ones(2)),
        BinaryLogit(),
        Difference(0, 1),
        ScoreTarget(len),
    ],
)
def test_targets_are_values_with_a_name(target: Target) -> None:
    assert isinstance(target, Target)
    assert isinstance(target.name, str)
    assert hash(target) == hash(target)
    assert as_target(target, ["a", "b"]).name == target.name
    with pytest.raises(AttributeError):
        target.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "options",
    [
        {"target": Attributes(a=1)},
        {"targets": [Attributes(a=1)]},
        {"layer": Attributes(a=1)},
        {"method": [Attributes(a=1)]},
        {"activation": Attributes(a=1)},
        {"categories": Attributes(a=1)},
        {"progress": Attributes(a=1), "method": "occlusion"},
    ],
)
def test_such_dictionaries_are_refused_as_arguments(options: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ExplainError):
        explain.attribute(model, torch.rand(1, 3, 8, 8), **{"method": "saliency", **options})
    with pytest.raises(ExplainError, match="file"):
        explain.load(Attributes(a=1))  # type: ignore[arg-type]
    with pytest.raises(ExplainError, match="baseline"):
        IntegratedGradients(baseline=Attributes(a=1))  # type: ignore[arg-type]
