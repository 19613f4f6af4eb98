"""Detected boxes: each layout of a detector's output against a slow decoding, and what is explained
of a box."""

from __future__ import annotations

import math
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.detection._utils import BoxCoder, BoxLinearCoder
from torchvision.ops import box_iou, nms

import explain
from explain import TargetError
from explain.methods import HiResCAM, Occlusion, Saliency
from explain.targets import Detections, Difference, as_target
from explain.targets.detections import as_place, suppressed
from explain.targets.detector_outputs import find_layout, read

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}

SIZE = (64, 96)


@pytest.fixture
def rand() -> Any:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)


def around(rows: Tensor) -> Tensor:
    """Boxes ``(..., 4)`` from middles, widths and heights."""
    x, y, width, height = rows.unbind(-1)
    return torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], -1)


def cells(*levels: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """The middles ``(cells, 2)``, in cells, and the strides ``(cells, 1)`` of maps of these
    heights, widths and strides."""
    rows = [
        (x + 0.5, y + 0.5, stride)
        for height, width, stride in levels
        for y in range(height)
        for x in range(width)
    ]
    table = torch.tensor(rows, dtype=torch.float64)
    return table[:, :2], table[:, 2:]


def flat(maps: list[Tensor]) -> Tensor:
    """What all cells of maps have, one map after the other: ``(N, cells, channels)``."""
    return torch.cat([level.flatten(2).mT for level in maps], 1)


def from_sides(middles: Tensor, sides: Tensor) -> Tensor:
    """Boxes ``(..., 4)`` from the distances of a point to their sides."""
    return torch.cat([middles - sides[..., :2], middles + sides[..., 2:]], -1)


# Each gives an output for two images, their scores and their boxes.


def detr(rand: Any) -> Any:
    logits = 4 * rand(2, 7, 4)
    boxes = rand(2, 7, 4)
    shares = logits.exp() / logits.exp().sum(-1, keepdim=True)
    in_pixels = around(boxes) * torch.tensor([96, 64, 96, 64])
    return {"pred_logits": logits, "pred_boxes": boxes}, shares[..., :3], in_pixels


def deformable_detr(rand: Any) -> Any:
    output, _, boxes = detr(rand)
    logits = output["pred_logits"]
    return SimpleNamespace(logits=logits, pred_boxes=output["pred_boxes"]), logits.sigmoid(), boxes


def yolov8(rand: Any) -> Any:
    raw = torch.cat([40 * rand(2, 4, 60), rand(2, 3, 60)], 1)
    maps = [rand(2, 67, 4, 6), rand(2, 67, 2, 3)]
    return (raw, maps), raw[:, 4:].mT, around(raw[:, :4].mT)


def masks(rand: Any) -> Any:
    (raw, maps), scores, boxes = yolov8(rand)
    factors = rand(2, 32, 60)
    prototypes = rand(2, 32, 8, 12)
    return (torch.cat([raw, factors], 1), (maps, factors, prototypes)), scores, boxes


def masks_beside(rand: Any) -> Any:
    """As ultralytics returns them since its heads give their parts by name."""
    (raw, maps), scores, boxes = yolov8(rand)
    factors = rand(2, 32, 60)
    prototypes = rand(2, 32, 8, 12)
    parts = {"boxes": rand(2, 64, 60), "scores": rand(2, 3, 60), "feats": maps}
    parts |= {"mask_coefficient": factors, "proto": prototypes}
    return ((torch.cat([raw, factors], 1), prototypes), parts), scores, boxes


def masks_of_two_heads(rand: Any) -> Any:
    ((columns, prototypes), parts), scores, boxes = masks_beside(rand)
    return ((columns, prototypes), {"one2many": parts, "one2one": dict(parts)}), scores, boxes


def masks_of_corners(rand: Any) -> Any:
    raw, scores, boxes = yolov10(rand)
    factors = rand(2, 9, 32)
    prototypes = rand(2, 32, 8, 12)
    heads = {key: {"mask_coefficient": rand(2, 32, 60)} for key in ("one2many", "one2one")}
    return ((torch.cat([raw, factors], 2), prototypes), heads), scores, boxes


def turned_without_suppression(rand: Any) -> Any:
    (columns, (maps, angle)), scores, boxes = turned(rand)
    labels = scores.argmax(-1, keepdim=True)
    best = scores.gather(2, labels)
    rows = torch.cat([columns[:, :4].mT, best, labels, angle.mT], 2)
    parts = {"boxes": rand(2, 4, 70), "scores": rand(2, 3, 70), "angle": rand(2, 1, 70)}
    is_label = labels == torch.arange(3)
    heads = {"one2many": {**parts, "feats": maps}, "one2one": {**parts, "feats": maps}}
    return (rows, heads), torch.where(is_label, best, -math.inf), boxes


def turned(rand: Any) -> Any:
    (raw, maps), scores, _ = yolov8(rand)
    angle = 3 * rand(2, 1, 60) - 1
    along = torch.cat([angle.cos(), angle.sin()], 1) * raw[:, 2:3] / 2
    across = torch.cat([-angle.sin(), angle.cos()], 1) * raw[:, 3:4] / 2
    corners = [raw[:, :2] + a * along + b * across for a in (-1, 1) for b in (-1, 1)]
    edges = torch.stack(corners)
    boxes = torch.cat([edges.amin(0), edges.amax(0)], 1).mT
    return (torch.cat([raw, angle], 1), (maps, angle)), scores, boxes


def yolov5(rand: Any) -> Any:
    raw = torch.cat([40 * rand(2, 30, 4), rand(2, 30, 4)], 2)
    return raw, raw[..., 4:5] * raw[..., 5:], around(raw[..., :4])


def yolox(rand: Any) -> Any:
    raw = torch.cat([6 * rand(2, 126, 2) - 3, 3 * rand(2, 126, 2) - 1.5, rand(2, 126, 4)], 2)
    places, strides = cells((8, 12, 8), (4, 6, 16), (2, 3, 32))
    rows = strides * torch.cat([places - 0.5 + raw[..., :2], raw[..., 2:4].exp()], -1)
    return raw, raw[..., 4:5] * raw[..., 5:], around(rows)


def yolov10(rand: Any) -> Any:
    corners = 40 * rand(2, 9, 2)
    labels = (3 * rand(2, 9, 1)).floor()
    raw = torch.cat([corners, corners + 1 + 20 * rand(2, 9, 2), rand(2, 9, 1), labels], 2)
    is_label = labels == torch.arange(1 + int(labels.max()))
    return raw, torch.where(is_label, raw[..., 4:5], -math.inf), raw[..., :4]


def yolov8_maps(rand: Any) -> Any:
    maps = [6 * rand(2, 67, 8, 12) - 3, 6 * rand(2, 67, 4, 6) - 3]
    rows = flat(maps)
    powers = rows[..., :64].exp().unflatten(-1, (4, 16))
    means = (powers * torch.arange(16)).sum(-1) / powers.sum(-1)
    places, strides = cells((8, 12, 8), (4, 6, 16))
    return maps, rows[..., 64:].sigmoid(), strides * from_sides(places, means)


def fcos(rand: Any) -> Any:
    sizes = [(8, 12), (4, 6)]
    logits, sides, centred = ([6 * rand(2, k, *size) for size in sizes] for k in (3, 4, 1))
    scores = (flat(logits).sigmoid() * flat(centred).sigmoid()).sqrt()
    places, strides = cells((8, 12, 8), (4, 6, 16))
    return (logits, sides, centred), scores, from_sides(strides * places, flat(sides))


def centernet(rand: Any) -> Any:
    heat = 6 * rand(2, 3, 16, 24) - 3
    wide = 9 * rand(2, 2, 16, 24)
    offset = rand(2, 2, 16, 24)
    corners = cells((16, 24, 4))[0] - 0.5 + flat([offset])
    boxes = 4 * around(torch.cat([corners, flat([wide])], -1))
    return [{"hm": heat, "wh": wide, "reg": offset}], flat([heat]).sigmoid(), boxes


def decoded(coder: Any, output: dict[str, Tensor]) -> Tensor:
    """The boxes of anchors by torchvision's own code."""
    rows = [coder(deltas, output["anchors"]) for deltas in output["bbox_regression"]]
    return torch.stack(rows)


def retinanet(rand: Any) -> Any:
    corners = 40 * rand(11, 2)
    anchors = torch.cat([corners, corners + 4 + 20 * rand(11, 2)], 1)
    logits = 4 * rand(2, 11, 3) - 2
    output = {"cls_logits": logits, "bbox_regression": rand(2, 11, 4) - 0.5, "anchors": anchors}
    coder = BoxCoder((1.0, 1.0, 1.0, 1.0)).decode_single
    return output, logits.sigmoid(), decoded(coder, output)


def centred(rand: Any) -> Any:
    output, scores, _ = retinanet(rand)
    output["bbox_ctrness"] = rand(2, 11, 1) - 0.5
    output["bbox_regression"] = rand(2, 11, 4)
    coder = BoxLinearCoder(normalize_by_size=True).decode
    scores = (scores * output["bbox_ctrness"].sigmoid()).sqrt()
    return output, scores, decoded(coder, output)


def ssd(rand: Any) -> Any:
    output, _, _ = retinanet(rand)
    scores = output["cls_logits"].softmax(-1)
    scores[..., 0] = -math.inf
    return output, scores, decoded(BoxCoder((10.0, 10.0, 5.0, 5.0)).decode_single, output)


def results(rand: Any) -> Any:
    raw, scores, boxes = yolov10(rand)
    images = [{"boxes": r[:, :4], "scores": r[:, 4], "labels": r[:, 5].long()} for r in raw]
    return images, scores, boxes


def objects(rand: Any) -> Any:
    raw, scores, boxes = yolov10(rand)
    images = [SimpleNamespace(xyxy=row[:, :4], conf=row[:, 4], cls=row[:, 5]) for row in raw]
    return [SimpleNamespace(boxes=image, obb=None) for image in images], scores, boxes


OUTPUTS: dict[str, Any] = {
    "results": results,
    "objects": objects,
    "detr": detr,
    "deformable detr": deformable_detr,
    "retinanet": retinanet,
    "centred": centred,
    "ssd": ssd,
    "centernet": centernet,
    "fcos": fcos,
    "yolov10": yolov10,
    "yolov8": yolov8,
    "masks": masks,
    "masks beside": masks_beside,
    "masks of two heads": masks_of_two_heads,
    "masks of corners": masks_of_corners,
    "turned": turned,
    "turned without suppression": turned_without_suppression,
    "yolov5": yolov5,
    "yolox": yolox,
    "yolov8 maps": yolov8_maps,
}
NAMES = {"objects": "results", "centred": "retinanet", "masks": "yolov8", "turned": "yolov8"}
NAMES |= {
    "turned without suppression": "yolov10",
    "masks beside": "yolov8",
    "masks of two heads": "yolov8",
    "masks of corners": "yolov10",
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_a_layout_is_found_out_and_read_as_a_slow_decoding_reads_it(kind: str, rand: Any) -> None:
    output, scores, boxes = OUTPUTS[kind](rand)
    layout = NAMES.get(kind, kind)
    target = Detections(decode=layout if kind == "ssd" else None, size=SIZE, threshold=0.0)
    values = read(output, 2, SIZE, target.decode)
    assert values.layout == layout
    settled = target.resolved(output, 2)
    assert settled.layout == layout
    assert_close(settled.pick(output, 2)[0], scores.amax((1, 2)))
    for i in range(2):
        assert_close(values.scores[i], scores[i], **EXACT)
        assert_close(values.boxes[i], boxes[i], **EXACT)
        cell, label = divmod(int(scores[i].argmax()), scores.shape[2])
        assert settled.labels[i] == label
        assert_close(settled.boxes[i], boxes[i, cell], **EXACT)


def test_a_layout_with_a_name_may_have_fewer_cells_than_columns(rand: Any) -> None:
    rows = torch.cat([40 * rand(1, 6, 4), rand(1, 6, 81)], 2)  # 6 cells, 80 classes
    values = read(rows, 1, SIZE, "yolov5")
    assert_close(values.scores[0], rows[0, :, 4:5] * rows[0, :, 5:], **EXACT)
    columns = torch.cat([40 * rand(1, 4, 6), rand(1, 80, 6)], 1)
    assert_close(read(columns, 1, SIZE, "yolov8").scores[0], columns[0, 4:].mT, **EXACT)
    # without a name, the longer side has the cells
    assert find_layout(torch.cat([rows] * 20, 1), 1, SIZE).layout == "yolov5"
    assert find_layout(torch.cat([columns] * 20, 2), 1, SIZE).layout == "yolov8"
    # nor with maps beside it, which have as many cells
    maps = [rand(1, 144, 2, 2), rand(1, 144, 1, 2)]
    for output in (
        (columns, maps),
        (columns, {"feats": maps}),
        ((columns, rand(1, 3, 4, 4)), maps),
    ):
        found = find_layout(output, 1, SIZE)
        assert found is not None
        assert found.layout == "yolov8"
        assert_close(found.boxes[0], around(columns[0, :4].mT), **EXACT)
    of_anchors = [rand(1, 3, 1, 2, 85)]
    found = find_layout((rows, of_anchors), 1, SIZE)
    assert found is not None
    assert found.layout == "yolov5"
    assert_close(found.boxes[0], around(rows[0, :, :4]), **EXACT)


def test_what_is_no_detection_is_refused_in_one_line(rand: Any) -> None:
    classifiers = [rand(2, 5), {"logits": rand(2, 5)}]
    segmenters = [rand(2, 3, 8, 8), rand(2, 40, 40)]
    without_anchors = [rand(2, 3, 8 // side, 12 // side, 9) for side in (1, 2)]
    cases = [
        ({"size": SIZE}, output, "boxes with scores")
        for output in [*classifiers, *segmenters, 9 * rand(2, 40, 9) - 5, without_anchors]
    ]
    cases += [
        ({"decode": "detr"}, rand(2, 5), "layout 'detr'"),
        ({"decode": "yolo99"}, rand(2, 5), "one of results, cells"),
        ({"decode": lambda output: (output, output)}, rand(2, 5), "decode must return"),
        ({"of": "area"}, None, "of of detections must be one of"),
        ({"overlap": 2}, None, "overlap of detections must be"),
        ({"box": (3, 3, 2, 4)}, None, "box must be"),
    ]
    for options, output, message in cases:
        with pytest.raises(TargetError, match=message):
            Detections(**options).pick(output, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_box_that_is_no_number_is_no_detection(value: float, rand: Any) -> None:
    output, scores, boxes = detr(rand)
    best = int(scores[0].amax(1).argmax())
    output["pred_boxes"][0, best, 2] = value
    settled = Detections(size=SIZE, threshold=0.0).resolved(output, 2)
    scores[0, best] = 0  # the rest is as it was
    cell = int(scores[0].amax(1).argmax())
    assert_close(settled.boxes[0], boxes[0, cell], **EXACT)
    assert_close(settled.pick(output, 2)[0], scores.amax((1, 2)))
    output["pred_boxes"][:] = value  # the network has failed
    assert settled.pick(output, 2)[0].isnan().all()


def test_each_of_boxes_that_coincide_is_explained_itself() -> None:
    boxes = torch.tensor([[2.0, 2, 9, 9], [2, 2, 9.1, 9], [2, 2, 9, 9], [10, 10, 15, 15]])
    scores = torch.tensor([0.9, 0.6, 0.8, 0.7], requires_grad=True)
    output = [{"boxes": boxes, "labels": torch.ones(4), "scores": scores}]
    for index, place in enumerate((0, 2, 3, 1)):
        score = Detections(index=index).pick(output, 1)[0]
        (gradient,) = torch.autograd.grad(score, scores)
        assert gradient.tolist() == torch.eye(4)[place].tolist()


def test_fillers_are_no_detections_and_a_box_without_an_area_is_itself() -> None:
    boxes = torch.tensor([[4.0, 4, 4, 9], [9, 9, 3, 2], [0, 0, 2, 2]])  # flat; corners exchanged
    output = {"boxes": boxes, "labels": torch.zeros(3), "scores": torch.tensor([0.9, 0.8, 0.7])}
    for index, score in enumerate((0.9, 0.8, 0.7)):
        assert float(Detections(index=index).pick([output], 1)[0]) == pytest.approx(score)
    assert float(Detections(box=(0, 0, 2, 2)).pick(output, 1)[0]) == pytest.approx(0.7)
    output["labels"] = torch.tensor([-1, 0, 1])  # what fills up a list
    assert float(Detections().pick([output], 1)[0]) == pytest.approx(0.8)
    assert len(Detections().detected([output], 1, 0)) == 2
    with pytest.raises(TargetError, match="detected"):
        Detections(-1).pick([output], 1)


def test_centernets_maps_are_known_by_other_names_and_by_their_shapes(rand: Any) -> None:
    (maps,), scores, boxes = centernet(rand)
    heat, wide, offset = maps.values()
    outputs = [
        {"heatmap": heat, "size": wide, "offset": offset},
        (heat, wide, offset),
        ([heat], [wide], [offset]),
        {"a": heat, "b": wide, "c": offset},
        {"offset": offset, "heatmap": heat.sigmoid(), "box_sizes": wide},
        SimpleNamespace(hm=heat, wh=wide, reg=offset),
    ]
    for output in outputs:
        values = read(output, 2, SIZE)
        assert values.layout == "centernet"
        assert_close(torch.stack(values.scores), scores, **EXACT)
        assert_close(torch.stack(list(values.boxes)), boxes, **EXACT)
    with pytest.warns(explain.ExplainWarning, match="CenterNet"):
        Detections(size=SIZE).resolved((heat, wide), 2)
    # a segmenter with two heads returns such maps, too
    assert find_layout((heat, wide), 2, SIZE) is None
    assert find_layout((wide, wide, wide), 2, SIZE) is None


def test_pred_logits_that_sigmoids_have_trained_have_no_class_for_nothing(rand: Any) -> None:
    boxes = torch.cat([0.3 + 0.4 * rand(1, 50, 2), 0.1 + 0.1 * rand(1, 50, 2)], -1)
    logits = rand(1, 50, 80) - 5  # as a focal loss leaves them where there is nothing
    logits[0, 7, 79] = 2
    nothing = torch.cat([logits, logits.new_full((1, 50, 1), 1)], -1)  # a softmax has one more
    for layout, values, score in (
        ("deformable detr", logits, logits[0, 7, 79].sigmoid()),
        ("detr", nothing, nothing[0, 7].softmax(0)[79]),
    ):
        output = {"pred_logits": values, "pred_boxes": boxes}
        target = Detections(size=SIZE, threshold=0.2).resolved(output, 1)
        assert (target.layout, target.labels) == (layout, (79,))
        assert_close(target.pick(output, 1)[0][0], score)
    unclear = {"pred_logits": logits + 9, "pred_boxes": boxes}
    with pytest.warns(explain.ExplainWarning, match="pred_logits"):
        Detections(size=SIZE, threshold=0.0).resolved(unclear, 1)
    as_sigmoids = Detections(size=SIZE, threshold=0.0, decode="deformable detr")
    assert as_sigmoids.resolved(unclear, 1).labels == (79,)


# --- one box of a network


class Small(nn.Module):
    """A detector like YOLOv8: from each cell of 8 x 8 pixels, a box around it and two scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 4, 4), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU()
        )
        self.head = nn.Conv2d(8, 6, 1)

    def forward(self, x: Tensor) -> Any:
        maps = self.head(self.features(x))
        raw = maps.flatten(2)
        middles, _ = cells((x.shape[-2] // 8, x.shape[-1] // 8, 8))
        places = 8 * middles.T + 2 * raw[:, :2].tanh()
        sides = 16 + 4 * raw[:, 2:4].tanh()
        return torch.cat([places, sides, (4 * raw[:, 4:]).sigmoid()], 1), [maps]


@pytest.fixture
def model() -> nn.Module:
    return Small().double().eval()


@pytest.fixture
def photos() -> Tensor:
    return torch.rand(2, 3, 48, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def plain(output: Any) -> tuple[Tensor, Tensor]:
    """Boxes ``(N, Q, 4)`` and scores ``(N, Q, 2)``."""
    rows = output[0].mT
    return around(rows[..., :4]), rows[..., 4:]


PARTS: dict[str, Any] = {
    "score": lambda box, scores: scores[1],
    "existence": lambda box, scores: scores.max(),
    "left": lambda box, scores: box[0],
    "bottom": lambda box, scores: box[3],
}


@pytest.mark.parametrize("of", PARTS)
def test_each_part_of_a_box_is_explained_as_that_number(
    of: Any, model: nn.Module, photos: Tensor
) -> None:
    _, scores = plain(model(photos))
    cells = [int(scores[i, :, 1].argmax()) for i in range(2)]

    def by_hand(output: Any) -> Tensor:
        boxes, scores = plain(output)
        parts = [PARTS[of](boxes[i, cell], scores[i, cell]) for i, cell in enumerate(cells)]
        return torch.stack(parts)

    methods = [Saliency(absolute=False), "layercam"]
    target = Detections(1, of=of, threshold=0.0)
    maps = explain.attribute(model, photos, methods, target=target, layer="features")
    expected = explain.attribute(model, photos, methods, target=by_hand, layer="features")
    for name, attribution in expected.items():
        assert_close(maps[name].score, attribution.score, **EXACT)
        assert_close(maps[name].values, attribution.values, **EXACT)
        assert attribution.values.flatten(1).any(1).all()


def test_boxes_together_are_read_once_and_explained_as_each_alone(
    model: nn.Module, photos: Tensor
) -> None:
    outputs = []
    passes = []
    model.register_forward_hook(lambda module, args, output: passes.append(len(args[0])))

    def decode(output: Any) -> tuple[Tensor, Tensor]:
        outputs.append(output)
        boxes, scores = plain(output)
        return scores, boxes

    boxes = [Detections(label, decode=decode, threshold=0.0) for label in (0, 1)]
    targets = [*boxes, boxes[0] - boxes[1]]
    together = explain.attribute(
        model, photos, HiResCAM(), targets=targets, layer="features", placement="even"
    )
    assert (len(outputs), passes) == (1, [2])
    for target, attribution in zip(targets, together, strict=True):
        alone = explain.attribute(model, photos, HiResCAM(), target=target, layer="features")
        assert torch.equal(attribution.values, alone.values)
    outputs.clear()
    passes.clear()
    explain.attribute(model, photos, Occlusion((16, 16), (16, 16)), targets=targets)
    assert len(outputs) == len(passes)


def test_of_the_best_detections_there_are_as_many_as_the_photo_has(
    model: nn.Module, photos: Tensor
) -> None:
    x = -10 * photos[:1]  # where some scores are high enough
    best = explain.attribute(model, x, "saliency", top_k=99)
    assert 2 < len(best) == len(Detections(size=(48, 64)).detected(model(x), 1, 0))
    for index in (0, 2):
        alone = explain.attribute(model, x, "saliency", target=Detections(index=index))
        assert torch.equal(best[index].values, alone.values)


def kept(output: Any, image: int, label: int) -> list[int]:
    """The cells of the detections of a class in one image, best first, by torchvision."""
    boxes, scores = plain(output)
    above = (scores[image, :, label] > 0.35).nonzero()[:, 0]
    return above[nms(boxes[image, above], scores[image, above, label], 0.6)].tolist()


@pytest.mark.parametrize("of", ["score", "left"])
def test_all_boxes_of_a_class_are_explained_as_the_sum_of_them(
    of: Any, model: nn.Module, photos: Tensor
) -> None:
    x = -10 * photos
    chosen = [kept(model(x), image, 0) for image in range(2)]
    assert 1 < len(chosen[0]) < len(chosen[1])

    def summed(output: Any) -> Tensor:
        boxes, scores = plain(output)
        values = scores[..., 0] if of == "score" else boxes[..., 0]
        return torch.stack([values[image, cells].sum() for image, cells in enumerate(chosen)])

    leaf = x.clone().requires_grad_()
    sums = summed(model(leaf))
    (gradient,) = torch.autograd.grad(sums.sum(), leaf)
    saliency = Saliency(absolute=False)
    target = Detections(0, index="all", of=of)
    a = explain.attribute(model, x, saliency, target=target)
    assert_close(a.score, sums.detach(), **EXACT)
    by_hand = explain.attribute(model, x, saliency, target=summed)
    assert_close(a.values, by_hand.values, **EXACT)
    assert_close(a.values, gradient, **EXACT)
    for image in range(2):
        alone = explain.attribute(model, x[image : image + 1], saliency, target=target)
        assert_close(alone.values[0], a.values[image], **EXACT)
    if of == "score":  # an index of a class is all of its boxes too
        by_class = explain.attribute(model, x, saliency, target=0)
        assert torch.equal(by_class.values, a.values)


@pytest.mark.parametrize("method", [Occlusion((16, 16), (16, 16)), "drise(samples=40)"])
def test_boxes_together_have_the_sum_of_their_maps(
    method: Any, model: nn.Module, photos: Tensor
) -> None:
    x = -10 * photos[:1]
    count = len(kept(model(x), 0, 0))
    each = [Detections(0, index=index) for index in range(count)]
    together, *alone = explain.attribute(
        model, x, method, targets=[Detections(0, index="all"), *each]
    )
    assert_close(together.values, torch.stack([a.values for a in alone]).sum(0))
    assert together.values.any()


def test_after_suppression_all_are_those_above_the_threshold_or_the_best() -> None:
    scores = torch.tensor([0.9, 0.5, 0.3, 0.2, 0.1])
    boxes = torch.tensor([[10.0 * i, 0, 10 * i + 9, 9] for i in range(5)])
    output = [{"boxes": boxes, "labels": torch.tensor([1, 1, 1, 2, 2]), "scores": scores}]
    sums = {
        Detections(1, index="all"): 1.4,
        Detections(1, index="all", threshold=0.25): 1.7,
        Detections(2, index="all"): 0.2,
        Detections(index="all"): 1.4,
        Detections(1, index="all", point=(12, 3)): 0.5,
    }
    for target, expected in sums.items():
        assert float(target.pick(output, 1)[0]) == pytest.approx(expected)
    with pytest.raises(TargetError, match="must be detected"):
        Detections(3, index="all").pick(output, 1)


@pytest.mark.parametrize(
    "options", [{"index": -1}, {"index": "first"}, {"index": "all", "box": (0, 0, 4, 4)}]
)
def test_a_number_that_no_detection_has_is_refused(options: Any) -> None:
    with pytest.raises(TargetError, match="index") as refused:
        Detections(1, **options)
    assert "\n" not in str(refused.value)


def test_a_box_is_followed_through_covered_photos(model: nn.Module, photos: Tensor) -> None:
    """Its score there is the best of those that overlap it nearly best; 0 under a half."""
    x = photos[:1]
    boxes, scores = plain(model(x))
    cell = int(scores[0, :, 0].argmax())
    target = Detections(0, threshold=0.0)
    drops = explain.attribute(model, x, Occlusion((16, 16), (16, 16)), target=target).values
    for top in range(0, 48, 16):
        for left in range(0, 64, 16):
            covered = x.clone()
            covered[..., top : top + 16, left : left + 16] = 0
            there, scores_there = plain(model(covered))
            shared = box_iou(there[0], boxes[0, cell][None])[:, 0]
            best = scores_there[0, shared >= 0.9 * shared.max(), 0].max()
            score = best if shared.max() >= 0.5 else 0.0
            assert_close(drops[..., top + 3, left + 3].sum(), (scores[0, cell, 0] - score).detach())


def test_likeness_is_the_best_overlap_times_score_before_suppression(
    model: nn.Module, photos: Tensor
) -> None:
    boxes, scores = plain(model(photos[:1]))
    cell = int(scores[0, :, 0].argmax())
    target = Detections(0, threshold=0.0).resolved(model(photos[:1]), 1)
    darker = model(0.5 * photos[:1])
    shared = box_iou(plain(darker)[0][0], boxes[0, cell][None])[:, 0]
    expected = (shared * plain(darker)[1][0, :, 0]).max()
    assert_close(target.likeness(darker, 1)[0].double(), expected, atol=1e-6, rtol=1e-6)


def test_why_a_box_has_no_other_class_and_how_much_it_overlaps_a_place(
    model: nn.Module, photos: Tensor
) -> None:
    x = photos[:1]
    boxes, scores = plain(model(x))
    cell = int(scores[0].amin(1).argmin())  # none is found there
    box = boxes[0, cell].tolist()
    why = Difference(Detections(1, box), Detections(0, box))
    near = box_iou(boxes[0], boxes[0, cell][None])[:, 0] >= 0.9
    expected = scores[0, near, 1].max() - scores[0, near, 0].max()
    assert_close(why.resolved(model(x), 1).pick(model(x), 1)[0][0], expected)
    shifted = boxes[0, 20].detach() + torch.tensor([2.0, 1, 3, 2])
    overlap = Detections(0, shifted, of="overlap").pick(model(x), 1)[0]
    best = box_iou(boxes[0], shifted[None]).max().item()
    assert best - 0.1 < overlap.item() <= best < 1


def test_detections_are_numbered_and_named_by_the_index() -> None:
    output = {
        "boxes": torch.tensor([[0.0, 0, 9, 9], [20, 0, 29, 9], [40, 0, 49, 9]]),
        "labels": torch.tensor([1, 2, 1]),
        "scores": torch.tensor([0.7, 0.9, 0.8]),
    }
    labels = ["none", "cup", "tie"]
    scores = {
        "cup": 1.5,
        "cup@1": 0.8,
        "cup@2": 0.7,
        "tie": 0.9,
        "@25,5": 0.9,
        "box 1,0,9,9": 0.7,
        None: 0.9,
    }
    scores["cup box 39,0,48,9"] = 0.8
    for text, score in scores.items():
        settled = as_target(text, labels).resolved([output], 1)
        assert float(settled.pick([output], 1)[0]) == pytest.approx(score)
    with pytest.raises(TargetError, match=r"got 2 of them; take what is: tie box 20,0,29,9, "):
        as_target("cup@3", labels).resolved([output], 1)


# --- networks of other packages, small and random


@pytest.mark.parametrize(
    "name",
    ["detr.modeling_detr.Detr", "conditional_detr.modeling_conditional_detr.ConditionalDetr"],
)
def test_queries_of_transformers_are_what_their_processor_makes_of_them(
    name: str, rand: Any
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    queries = pkgutil.resolve_name(f"transformers.models.{name}ObjectDetectionOutput")
    output = queries(logits=4 * rand(1, 5, 4), pred_boxes=rand(1, 5, 4))
    kind = name.rpartition(".")[2]
    processor = getattr(transformers, f"{kind}ImageProcessorPil")()
    (expected,) = processor.post_process_object_detection(
        output, 0.0, target_sizes=torch.tensor([SIZE])
    )
    cell = int(expected["scores"].argmax())
    settled = Detections(size=SIZE, threshold=0.0).resolved(output, 1)
    assert settled.labels == (int(expected["labels"][cell]),)
    assert_close(settled.boxes[0], expected["boxes"][cell].double(), rtol=1e-5, atol=1e-4)
    assert_close(settled.pick(output, 1)[0][0], expected["scores"][cell])


def test_a_label_of_digits_that_are_no_number_is_a_word() -> None:
    place = as_place("²@2")
    assert place is not None
    assert place.label == "²"


@pytest.mark.parametrize("edge", [-1.0, math.nan, math.inf])
def test_a_box_beside_the_image_or_nowhere_leaves_the_suppression_of_others(edge: float) -> None:
    beside = [-9.0, -9.0, edge, edge]
    boxes = torch.tensor([beside, [-8.0, -8, -1, -1], [-8.0, -8, -1, -1.5]])
    scores = torch.tensor([[0.1, 0.1], [0.9, 0.6], [0.8, 0.7]])
    assert suppressed(scores, boxes, 0.5) == [(1, 0), (2, 1)]
