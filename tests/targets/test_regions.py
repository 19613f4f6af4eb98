"""What segmenters return: every layout as class maps, every target and kind of method, and models
of transformers."""

from __future__ import annotations

import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

import explain
from explain.methods import GradCAM, IntegratedGradients, Occlusion, Saliency
from explain.models import Stitched
from explain.targets import Segmentation
from explain.targets.detections import as_place
from explain.targets.regions import read_class_maps
from tests.conftest import Made, settled

EXACT = {"rtol": 1e-9, "atol": 1e-11}
METHODS = [
    Saliency(absolute=False),
    GradCAM(relu=False),
    IntegratedGradients(steps=3),
    Occlusion(4, 4),
]
CLASSES = 3
QUERIES = 4
MASKS = 2


class Segmenter(nn.Module):
    """A small network whose output has one of the layouts."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.layout = layout
        conv: Any = nn.Conv3d if layout == "volume" else nn.Conv2d
        self.features = nn.Sequential(conv(3, 6, 3, 2, 1), nn.Tanh())
        self.head = conv(6, CLASSES if layout != "prompts" else 2 * MASKS, 1)
        self.masks = nn.Conv2d(6, QUERIES, 1)
        self.queries = nn.Linear(6, QUERIES * (CLASSES + 1))

    def forward(self, x: Tensor) -> Any:
        features = self.features(x)
        maps = self.head(features)
        if self.layout == "out":
            return {"out": F.interpolate(maps, size=x.shape[2:], mode="bilinear"), "aux": maps}
        if self.layout == "logits":
            return SimpleNamespace(loss=None, logits=maps)
        if self.layout in ("queries", "detr"):
            logits = self.queries(features.mean((2, 3))).unflatten(1, (QUERIES, CLASSES + 1))
            masks = self.masks(features)
            if self.layout == "queries":
                return {"class_queries_logits": logits, "masks_queries_logits": masks}
            boxes = logits[..., :4].sigmoid()
            return {"pred_boxes": boxes, "logits": logits, "pred_masks": masks}
        if self.layout == "prompts":
            masks = maps.unflatten(1, (2, MASKS))
            return {"iou_scores": masks.mean((3, 4)), "pred_masks": masks}
        return maps


def class_maps(layout: str, output: Any) -> Tensor:
    """The maps of all classes in plain steps."""
    if layout in ("queries", "detr"):
        logits, masks = list(output.values())[-2:]
        shares = logits.exp() / logits.exp().sum(-1, keepdim=True)
        return torch.einsum("nqk,nqhw->nkhw", shares[..., :CLASSES], masks.sigmoid())
    if layout == "prompts":
        return output["pred_masks"].flatten(1, 2)
    if layout == "out":
        return output["out"]
    return output.logits if layout == "logits" else output


NAMES = {"out": "class maps", "logits": "class maps", "volume": "class maps", "detr": "queries"}


def segmenter(layout: str) -> tuple[nn.Module, Tensor]:
    model = settled(Segmenter(layout), seed=4).double().eval()
    sizes = (4, 6, 6) if layout == "volume" else (8, 12)
    return model, torch.randn(
        2, 3, *sizes, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def test_a_point_beside_the_input_is_refused() -> None:
    maps = torch.ones(1, 1, 4, 4)
    for point in ((-0.2, 0.5), (0.5, 1.2)):
        with pytest.raises(explain.TargetError, match="point"):
            Segmentation(0, point=point).resolved(maps, 1)
        place = as_place(f"@{point[0] * 40},{point[1] * 40}")
        assert place is not None
        with pytest.raises(explain.TargetError, match="point"):
            place.for_input_size((40, 40)).resolved(maps, 1)


@pytest.mark.parametrize("layout", ["out", "logits", "queries", "detr", "prompts", "volume"])
@pytest.mark.parametrize("kind", ["predicted", "mask", "point", "chosen"])
def test_every_layout_target_and_method_equals_the_plain_computation(
    layout: str, kind: str
) -> None:
    model, x = segmenter(layout)
    output = model(x)
    maps = class_maps(layout, output)[:, :CLASSES].detach()
    one_by_one = layout == "prompts"
    best = maps.argmax(1)
    index = int(best.flatten(1).mode(1).values[0])
    predicted = maps[:, index] > 0 if one_by_one else best == index
    categories = [index] * 2
    if kind == "predicted":
        target = Segmentation(index)
        region = predicted
    elif kind == "point":
        at = next(place for place in zip(*predicted.all(0).nonzero(as_tuple=True), strict=True))
        shares = [(float(i) + 0.5) / n for i, n in zip(at, predicted.shape[1:], strict=True)]
        target = Segmentation(index, point=tuple(reversed(shares)))
        grown = torch.zeros(predicted.shape)
        grown[(slice(None), *at)] = 1
        pool = F.max_pool3d if layout == "volume" else F.max_pool2d
        for _ in range(predicted[0].numel()):  # by neighbours
            grown = pool(grown, 3, 1, 1) * predicted
        region = grown > 0
    else:
        mask = torch.zeros(maps.shape[2:], dtype=torch.bool)
        mask[..., 1:3, 1:3] = True
        region = mask.expand(2, *mask.shape)
        if kind == "chosen" and one_by_one:
            categories = output["iou_scores"].flatten(1).argmax(1).tolist()
        elif kind == "chosen":
            categories = [int(best[i][mask].mode().values) for i in range(2)]
        target = Segmentation(index if kind == "mask" else None, mask)

    assert target.resolved(output, 2).layout == NAMES.get(layout, layout)
    found = explain.attribute(model, x, METHODS, target=target, layer="features", batch_size=2)
    for i in range(2):

        def score(output: Any, i: int = i) -> Tensor:
            return class_maps(layout, output)[:, categories[i], region[i]].mean(1)

        alone = explain.attribute(model, x[i : i + 1], METHODS, target=score, layer="features")
        for method, attribution in alone.items():
            assert_close(found[method].values[i], attribution.values[0], **EXACT)
            assert_close(found[method].score[i], attribution.score[0], **EXACT)


def labelling(labels: int, last: Any) -> nn.Module:
    """Maps of scores of both signs, with what comes last; several labels may be at one place."""

    def scores(model: nn.Module, x: Tensor) -> Tensor:
        maps = model.head(model.features(x))
        return 20 * (maps - maps.mean((2, 3), keepdim=True))

    features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh())
    logits = Made(scores, features=features, head=nn.Conv2d(8, labels, 1))
    return Made(lambda model, x: last(model.logits(x)), logits=logits).eval()


ENDS: dict[str, tuple[Any, Any]] = {
    "a sigmoid": (torch.sigmoid, None),
    "a sigmoid in a dictionary": (lambda s: {"out": s.sigmoid()}, None),
    "a sigmoid, said to be probabilities": (torch.sigmoid, "none"),
    "a sigmoid in half precision": (lambda s: s.half().sigmoid(), None),
    "the mean of two sigmoids": (lambda s: (s.sigmoid() + (1 - (-s).sigmoid())) / 2, None),
    "the logarithm of a sigmoid": (F.logsigmoid, None),
    "scores, said to be of a sigmoid": (lambda s: s, "sigmoid"),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("labels", [1, 3])
def test_a_label_is_predicted_where_it_is_more_probable_than_not(end: str, labels: int) -> None:
    last, activation = ENDS[end]
    model = labelling(labels, last)
    x = torch.rand(2, 3, 8, 8)
    index = labels - 1
    region = model.logits(x).detach()[:, index] > 0
    assert 0 < region.float().mean() < 1
    maps = last(model.logits(x).detach())
    maps = maps["out"] if isinstance(maps, dict) else maps
    expected = torch.stack([maps[i, index].double()[region[i]].mean() for i in range(2)])
    a = explain.attribute(model, x, "saliency", target=Segmentation(index), activation=activation)
    assert_close(a.score.double(), expected, rtol=2e-3 if "half" in end else 1e-5, atol=1e-6)


def test_an_output_alone_is_read_by_its_values_at_all_places() -> None:
    scores = 6 * torch.randn(2, 3, 8, 8)
    for maps, expected in (
        (scores.sigmoid(), scores[:, 1] > 0),
        (scores.softmax(1), scores.argmax(1) == 1),
    ):
        assert torch.equal(Segmentation(1).resolved(maps, 2).mask, expected)
    assert torch.equal(Segmentation().resolved(scores[:, :1].sigmoid(), 2).mask, scores[:, 0] > 0)


def test_a_mask_of_truth_values_that_are_all_false_has_no_region() -> None:
    with pytest.raises(explain.TargetError):
        Segmentation(0).resolved(torch.zeros(1, 1, 4, 4, dtype=torch.bool), 1)


def test_small_scores_of_a_map_are_no_probabilities() -> None:
    model = labelling(1, lambda s: 0.1 + 0.01 * s.abs())
    x = torch.rand(1, 3, 8, 8)
    a = explain.attribute(model, x, "saliency", target=Segmentation())
    # each is positive: predicted everywhere
    assert_close(a.score, model(x).detach().mean((1, 2, 3)))


def test_windows_of_a_segmenter_that_ends_in_a_sigmoid_are_stitched_to_probabilities() -> None:
    model = labelling(1, torch.sigmoid)
    x = torch.rand(1, 3, 12, 12)
    stitched = Stitched(model, window=8)
    maps = stitched(x).detach()
    a = explain.attribute(stitched, x, "saliency", target=Segmentation())
    assert_close(a.score, maps[maps > 0.5].mean()[None])


def test_a_place_without_a_label_is_the_class_that_is_predicted_there() -> None:
    maps = torch.zeros(1, 3, 4, 4)
    maps[0, 1, :, :2] = 1.0
    maps[0, 2, :, 2:] = 2.0
    for text, expected in {"@0,0": 1, "@3,1": 2, "box 0,0,3,4": 1, "box 1,0,4,4": 2}.items():
        place = as_place(text)
        assert place is not None
        target: Any = place.for_input_size((4, 4)).resolved(maps, 1)
        assert target.category == (expected,)
        assert_close(target.pick(maps, 1)[0], maps[0, expected][target.mask[0]].mean()[None])
    classes, own = target.class_scores(maps, 1)
    assert_close(classes, torch.stack([maps[0, k][target.mask[0]].mean() for k in range(3)])[None])
    assert own.tolist() == [2]


@pytest.mark.parametrize(
    "name",
    ["detr.modeling_detr.Detr", "conditional_detr.modeling_conditional_detr.ConditionalDetr"],
)
def test_queries_with_boxes_have_a_softmax_with_nothing_or_sigmoids(name: str) -> None:
    pytest.importorskip("transformers")
    output = pkgutil.resolve_name(f"transformers.models.{name}SegmentationOutput")
    logits = torch.randn(1, 2, 3, dtype=torch.float64)
    masks = torch.randn(1, 2, 4, 5, dtype=torch.float64)
    queries = output(logits=logits, pred_boxes=logits.sigmoid(), pred_masks=masks)
    class_maps: Any = read_class_maps(queries, 1)
    shares = logits[0].sigmoid()
    if name.startswith("detr"):
        shares = logits[0].softmax(1)[:, :2]
    assert_close(class_maps.maps[0], torch.einsum("qk,qhw->khw", shares, masks[0].sigmoid()))
