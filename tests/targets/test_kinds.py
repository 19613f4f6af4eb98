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

import explain
from explain import TargetError
from explain.methods import GradCAM, IntegratedGradients, Occlusion, Saliency
from explain.targets import (
    BinaryLogit,
    ClassTarget,
    Detections,
    Difference,
    Predicted,
    Segmentation,
    Similarity,
    TopClass,
    as_target,
)
from explain.targets.base import find_logits
from tests.conftest import Made, TinyNet, layer_for, settled
from tests.targets.test_detections import Small

SIGNED = [Saliency(absolute=False), GradCAM(relu=False), IntegratedGradients(steps=4)]
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def of_maps(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Class maps at the input's resolution, as torchvision's segmenters return them."""
    maps = model.head(F.relu(model.features(x)))
    return {"out": F.interpolate(maps, size=x.shape[-2:], mode="bilinear"), "aux": maps}


@pytest.fixture
def dense() -> nn.Module:
    layers = [nn.Conv2d(3, 6, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(6, 6, 3, 1, 1)]
    model = Made(of_maps, features=nn.Sequential(*layers), head=nn.Conv2d(6, 4, 1))
    return settled(model, seed=2).double().eval()


def values(model: nn.Module, x: Tensor, method: Any, target: Any, **options: Any) -> Tensor:
    return explain.attribute(model, x, method, target=target, **options).values


# --- regions


def predicted(dense: nn.Module, x: Tensor) -> tuple[int, Tensor]:
    """A class that is predicted somewhere in each image, and where."""
    best = dense(x)["out"].argmax(1)
    category = next(c for c in range(4) if (best == c).flatten(1).any(1).all())
    return category, best == category


def test_the_score_of_a_region_is_the_mean_of_its_logits(dense: nn.Module, x: Tensor) -> None:
    maps = dense(x)["out"]
    category, mask = predicted(dense, x)
    expected = torch.stack([maps[i, category][mask[i]].mean() for i in range(3)])
    assert_close(Segmentation(category).pick({"out": maps}, 3)[0], expected, **EXACT)
    finer = mask[0].repeat_interleave(2, 0).repeat_interleave(2, 1).numpy().astype(np.uint8) * 255
    assert_close(Segmentation(category, finer).pick(maps[:1], 1)[0], expected[:1], **EXACT)
    small = F.avg_pool2d(maps[:1], 2)  # each place counts by its share of the region
    share = F.avg_pool2d(mask[:1].double(), 2)
    coarse = Segmentation(category, mask[0]).pick(SimpleNamespace(logits=small), 1)[0]
    assert_close(coarse[0], (small[0, category] * share).sum() / share.sum(), **EXACT)
    of_one_class = maps[:, :1] - maps[:, :1].mean((2, 3), keepdim=True)
    assert (Segmentation(0).pick(of_one_class, 3)[0] > 0).all()


# --- boxes


def test_no_detection_is_refused_in_the_image_and_scores_0_in_altered_ones() -> None:
    boxes = torch.tensor([[0.0, 0, 4, 4]])
    scores = torch.tensor([0.9], requires_grad=True)
    nothing = [{"boxes": boxes[:0], "labels": torch.ones(0), "scores": scores[:0]}]
    target = Detections().resolved([{"boxes": boxes, "labels": torch.ones(1), "scores": scores}], 1)
    with pytest.raises(TargetError, match="got 0 of them; nothing is detected"):
        Detections().resolved(nothing, 1)
    score = target.pick(nothing, 1)[0]
    assert score.tolist() == torch.autograd.grad(score.sum(), scores)[0].tolist() == [0]


def test_nothing_above_the_thresholds_names_them_all() -> None:
    box = torch.tensor([[0.0, 0, 4, 4]])
    output = [{"boxes": box, "labels": torch.tensor([1]), "scores": torch.tensor([0.5])}]
    labels = ["nothing", "person", "tie"]
    for threshold, named in (
        (0.9, "0.9"),
        ({1: 0.6, -1: 0.8}, "0.35, 0.6 for person, 0.8 for tie"),
    ):
        with pytest.raises(TargetError, match=f"a score above {named}, but nothing is"):
            Predicted(threshold).detections_in(output, (8, 8), labels)


@pytest.mark.long
# random weights may have nothing to say
@pytest.mark.filterwarnings("ignore:.* is zero everywhere")
def test_a_detector_of_torchvision() -> None:
    model = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=4,
        min_size=64,
        rpn_pre_nms_top_n_test=40,
        rpn_post_nms_top_n_test=20,
        box_score_thresh=0.0,
    ).eval()
    x = torch.rand(2, 3, 64, 64)
    images = model(list(x))
    best = explain.attribute(model, x, "saliency", target=Detections())
    for score, image in zip(best.score, images, strict=True):
        assert_close(score, image["scores"].max().detach(), rtol=1e-5, atol=1e-7)
    target = Detections(int(images[0]["labels"][3]), images[0]["boxes"][3].detach())
    of_box = explain.attribute(model, x[:1], "gradcam", target=target)
    assert_close(of_box.score[0], images[0]["scores"][3].detach(), rtol=1e-5, atol=1e-7)
    assert of_box.layer == "backbone"  # the level of the pyramid that the box was pooled from


# --- a batch


@pytest.mark.parametrize(
    "kind", ["predicted region", "masks", "best box", "boxes", "similarity", "difference"]
)
def test_a_batch_equals_its_images(kind: str, dense: nn.Module, net: TinyNet, x: Tensor) -> None:
    category, _ = predicted(dense, x)
    masks = torch.rand(3, 12, 10) > 0.5
    boxes = torch.tensor([[0.0, 0, 15, 18], [15, 0, 30, 18], [15, 18, 30, 36]])
    others = torch.randn(3, 5)
    cases: dict[str, tuple[nn.Module, Any]] = {
        "predicted region": (dense, lambda i: Segmentation(category)),
        "masks": (dense, lambda i: Segmentation(1, masks[i])),
        "best box": (Small().double().eval(), lambda i: Detections(threshold=0.0)),
        "boxes": (Small().double().eval(), lambda i: Detections(box=boxes[i], overlap=0.1)),
        "similarity": (net, lambda i: Similarity(others[i])),
        "difference": (net, lambda i: Difference(None, TopClass(1)) + 2 * ClassTarget(3)),
    }
    model, of = cases[kind]
    layer = "layer2" if model is net else "features"
    if "box" in kind:
        x = F.interpolate(x, (48, 40))
    whole = values(model, x, "scorecam", of(slice(None)), layer=layer, batch_size=7)
    for i in range(3):
        alone = values(model, x[i : i + 1], "scorecam", of(i), layer=layer)
        assert_close(whole[i], alone[0], **EXACT)


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


@pytest.mark.filterwarnings("ignore:integratedgradients misses")  # of scores that are nearly equal
def test_a_difference_of_top_classes_stays_with_those_of_the_unaltered_image(
    net: TinyNet, x: Tensor
) -> None:
    best, second = net(x).topk(2).indices.T
    for method in ("integratedgradients", "scorecam", "ablationcam"):
        layer = layer_for(method, "layer2")
        maps = values(net, x, method, Difference(None, TopClass(1)), layer=layer)
        expected = values(net, x, method, Difference(best.tolist(), second), layer=layer)
        assert_close(maps, expected, **EXACT)


def test_labels_are_found_wherever_they_are_named() -> None:
    labels = ["tabby cat", "espresso", "lemon"]
    target = as_target(Difference("tabby", "espresso"), labels)
    assert target.name == "tabby cat − espresso"
    assert target.pick(torch.tensor([[5.0, 2.0, 0.0]]), 1)[0].tolist() == [3.0]
    assert as_target(Segmentation("lemon"), labels).name == "lemon where predicted"
    assert as_target(-1 * Detections("lemon"), labels).name == "− best lemon detection"
    assert pickle.loads(pickle.dumps(target)).name == copy.deepcopy(target).name == target.name


@pytest.mark.filterwarnings("ignore:integratedgradients misses")  # of scores that are nearly equal
def test_maps_of_one_place_are_class_scores(net: TinyNet, x: Tensor) -> None:
    model = wrapping(net, lambda y: y[:, :, None, None])
    for target in (None, 2, Difference(2, -1)):
        attribution = explain.attribute(model, x, "integratedgradients", target=target)
        expected = explain.attribute(net, x, "integratedgradients", target=target)
        assert_close(attribution.values, expected.values, **EXACT)
        assert_close(attribution.logits, expected.logits, **EXACT)


# --- one number, and likeness


def wrapping(net: nn.Module, wrap: Any) -> nn.Module:
    return Made(lambda model, x: wrap(model.net(x)), net=net).eval()


@pytest.mark.parametrize(
    "wrap",
    [lambda y: y[:, 0], lambda y: (y[:, :1], None), lambda y: y[:, :1, None, None]],
    ids=["alone", "among others", "as a map of one place"],
)
def test_one_number_per_image_needs_no_target(wrap: Any, net: TinyNet, x: Tensor) -> None:
    model = wrapping(net, wrap)
    method = Saliency(absolute=False)
    expected = values(net, x, method, 0)
    signs = {None: 1, 0: 1, BinaryLogit(): 1, BinaryLogit(positive=False): -1}
    signs |= {"yes": 1, "no": -1, "this": 1, "not this": -1}
    for target, sign in signs.items():
        labels = ["this"] if isinstance(target, str) else None
        signed = values(model, x, method, target, categories=labels)
        assert_close(signed, sign * expected, **EXACT)
    single = wrapping(net, lambda y: y[:, :1].squeeze())  # of one image, a number alone
    assert_close(values(single, x[:1], method, "no"), -expected[:1], **EXACT)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 5, 1, 1)])
def test_similarity_is_the_cosine_to_another_embedding(shape: Any, net: TinyNet, x: Tensor) -> None:
    other = torch.randn(shape).requires_grad_()
    flat = other.detach().double().reshape(-1, 5)

    def by_hand(embedding: Tensor) -> Tensor:
        dot = (embedding * flat).sum(1)
        return dot / embedding.pow(2).sum(1).sqrt() / flat.pow(2).sum(1).sqrt()

    similar = explain.attribute(net, x, Saliency(absolute=False), target=Similarity(other))
    assert_close(similar.values, values(net, x, Saliency(absolute=False), by_hand), **EXACT)
    assert_close(similar.score, by_hand(net(x)).detach(), **EXACT)


# --- what models return


@dataclass
class Output:
    loss: None
    features: Tensor
    scores: Tensor


class Attributes(dict[str, Any]):
    """A dictionary whose keys are attributes, as in many people's code."""

    __getattr__ = dict.__getitem__  # type: ignore[assignment]


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
        Attributes(logits=LOGITS),
    ],
    ids=lambda output: type(output).__name__,
)
def test_class_scores_are_found_among_other_things(output: Any) -> None:
    assert find_logits(output, 2) is LOGITS
    assert torch.equal(as_target(None).pick(output, 2)[0], LOGITS.amax(1))


def yes(scores: Tensor) -> Tensor:
    """The probability of a yes, from its logit."""
    return scores[:, 0].sigmoid()


@pytest.mark.parametrize(
    ("target", "score", "classes"),
    [
        (BinaryLogit(positive=False), lambda scores: 1 - yes(scores), 1),
        (BinaryLogit() - BinaryLogit(positive=False), lambda scores: 2 * yes(scores) - 1, 1),
        (Difference(2, 0), lambda scores: scores.softmax(1)[:, 2] - scores.softmax(1)[:, 0], 5),
        (
            [Difference(2, 0), 1],
            lambda scores: (
                scores.softmax(1) * torch.tensor([[-1, 0, 1, 0, 0], [0, 1, 0, 0, 0]])
            ).sum(1),
            5,
        ),
    ],
)
def test_the_probability_of_a_sum_of_classes_is_the_sum_of_theirs(
    target: Any, score: Any, classes: int
) -> None:
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes)]
    model = settled(nn.Sequential(*layers), seed=3).double().eval()
    x = torch.arange(2 * 3 * 64, dtype=torch.float64).sin().reshape(2, 3, 8, 8)
    method = Occlusion(window=4, stride=4, baseline=0.0, score="probability")
    activation = "sigmoid" if classes == 1 else None
    maps = values(model, x, method, target, activation=activation)[:, ::4, ::4]
    with torch.no_grad():
        for row in (0, 1):
            for column in (0, 1):
                covered = x.clone()
                covered[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = 0
                drop = score(model(x)) - score(model(covered))
                assert_close(maps[:, row, column], drop, **EXACT)


# --- indices that count from the last class


def test_a_negative_index_is_the_class_that_it_is_in_python(net: TinyNet, x: Tensor) -> None:
    classes = net(x).shape[1]
    for given, same in ((-1, classes - 1), ([-1, 0, -classes], [classes - 1, 0, 0])):
        a = explain.attribute(net, x, "integratedgradients", target=given)
        expected = explain.attribute(net, x, "integratedgradients", target=same)
        assert_close(a.values, expected.values, rtol=0, atol=0)
        assert a.target.tolist() == expected.target.tolist()
    contrast = values(net, x, "saliency", Difference(-1, -2))
    assert_close(contrast, values(net, x, "saliency", Difference(classes - 1, classes - 2)))
    for index in (-classes - 1, classes):
        with pytest.raises(TargetError, match=str(index)):
            values(net, x, "saliency", index)


def test_a_negative_index_counts_maps_boxes_and_places_too(dense: nn.Module, x: Tensor) -> None:
    mask = torch.ones(x.shape[-2:])
    of_last = Segmentation(-1, mask).resolved(of_maps(dense, x), 3)
    assert of_last.category == (3, 3, 3)
    assert_close(of_last.pick(of_maps(dense, x), 3)[0], dense(x)["out"][:, 3].mean((1, 2)))
    place = as_target((-1, -2, 0)).pick(dense(x)["aux"], 3)[0]
    assert_close(place, dense(x)["aux"][:, -1, -2, 0])
    boxes = torch.tensor([[[0.0, 0, 4, 4], [5, 5, 9, 9]]])
    dense_output = {"scores": torch.tensor([[[0.9, 0.1, 0.2], [0.4, 0.1, 0.8]]]), "boxes": boxes}
    found = Detections(-1).resolved(dense_output, 1)
    assert (found.labels, found.name) == ((2,), "best 2 detection")
    kept = {"boxes": boxes[0], "scores": torch.tensor([0.9, 0.8]), "labels": torch.tensor([0, 2])}
    with pytest.raises(TargetError, match="detected"):
        Detections(-1).resolved([kept], 1)
    assert as_target(-2, ["cup", "tie", "cat", "dog"]).resolved([kept], 1).labels == (2,)
