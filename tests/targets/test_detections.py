"""Detected boxes: each layout of a detector's output against a slow decoding, and what is explained
of a box."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.detection._utils import BoxCoder, BoxLinearCoder
from torchvision.ops import box_iou

import explain
from explain import TargetError
from explain.methods import HiResCAM, Occlusion, Saliency
from explain.targets import Detections, Difference, as_target
from explain.targets.detections import as_place
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


def middles(height: int, width: int) -> Tensor:
    """The middles ``(cells, 2)`` of cells, one row after the other."""
    cells = [(x + 0.5, y + 0.5) for y in range(height) for x in range(width)]
    return torch.tensor(cells, dtype=torch.float64)


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
    strides = torch.tensor([[8.0]] * 96 + [[16.0]] * 24 + [[32.0]] * 6)
    cells = torch.cat([middles(8, 12), middles(4, 6), middles(2, 3)]) - 0.5
    boxes = around(torch.cat([strides * (cells + raw[..., :2]), strides * raw[..., 2:4].exp()], -1))
    return raw, raw[..., 4:5] * raw[..., 5:], boxes


def yolov10(rand: Any) -> Any:
    corners = 40 * rand(2, 9, 2)
    labels = (3 * rand(2, 9, 1)).floor()
    raw = torch.cat([corners, corners + 1 + 20 * rand(2, 9, 2), rand(2, 9, 1), labels], 2)
    is_label = labels == torch.arange(1 + int(labels.max()))
    return raw, torch.where(is_label, raw[..., 4:5], -math.inf), raw[..., :4]


def yolov8_maps(rand: Any) -> Any:
    maps = [6 * rand(2, 67, 8, 12) - 3, 6 * rand(2, 67, 4, 6) - 3]
    scores = []
    boxes = []
    for raw, stride in zip(maps, (8, 16), strict=True):
        cells = raw.flatten(2).mT
        powers = cells[..., :64].exp().unflatten(-1, (4, 16))
        means = (powers * torch.arange(16)).sum(-1) / powers.sum(-1)
        own = middles(*raw.shape[-2:])
        boxes.append(stride * torch.cat([own - means[..., :2], own + means[..., 2:]], -1))
        scores.append(cells[..., 64:].sigmoid())
    return maps, torch.cat(scores, 1), torch.cat(boxes, 1)


def fcos(rand: Any) -> Any:
    sizes = [(8, 12), (4, 6)]
    logits, sides, centred = ([6 * rand(2, k, *size) for size in sizes] for k in (3, 4, 1))
    scores = []
    boxes = []
    for level, stride in enumerate((8, 16)):
        product = logits[level].sigmoid() * centred[level].sigmoid()
        scores.append(product.sqrt().flatten(2).mT)
        distances = sides[level].flatten(2).mT
        own = stride * middles(*sizes[level])
        boxes.append(torch.cat([own - distances[..., :2], own + distances[..., 2:]], -1))
    return (logits, sides, centred), torch.cat(scores, 1), torch.cat(boxes, 1)


def centernet(rand: Any) -> Any:
    heat = 6 * rand(2, 3, 16, 24) - 3
    wide = 9 * rand(2, 2, 16, 24)
    offset = rand(2, 2, 16, 24)
    corners = middles(16, 24) - 0.5 + offset.flatten(2).mT
    boxes = 4 * around(torch.cat([corners, wide.flatten(2).mT], -1))
    return [{"hm": heat, "wh": wide, "reg": offset}], heat.sigmoid().flatten(2).mT, boxes


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
    "turned": turned,
    "yolov5": yolov5,
    "yolox": yolox,
    "yolov8 maps": yolov8_maps,
}
NAMES = {"objects": "results", "centred": "retinanet", "masks": "yolov8", "turned": "yolov8"}


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


def no_boxes(rand: Any) -> list[Any]:
    """Outputs of classifiers and segmenters, and of YOLOv5 in training, which needs its anchors."""
    tensors = [rand(2, 5), rand(2, 3, 8, 8), rand(2, 40, 40), 9 * rand(2, 40, 9) - 5]
    levels = [rand(2, 3, 8 // side, 12 // side, 9) for side in (1, 2)]
    return [*tensors, {"logits": rand(2, 5)}, levels]


def test_what_is_no_detection_is_refused_in_one_line(rand: Any) -> None:
    cases = [({"size": SIZE}, output, "boxes with scores") for output in no_boxes(rand)]
    cases += [
        ({"decode": "detr"}, rand(2, 5), "layout 'detr'"),
        ({"decode": "yolo99"}, rand(2, 5), "one of results, cells"),
        ({"decode": lambda output: (output, output)}, rand(2, 5), "decode must return"),
        ({"of": "area"}, None, "of of detections must be one of"),
        ({"overlap": 2}, None, "overlap must be"),
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


class Fragile(nn.Module):
    """Boxes with scores of the photo's brightness; the first ``broken`` are 0 / 0 in the dark."""

    def __init__(self, broken: int) -> None:
        super().__init__()
        self.broken = broken

    def forward(self, x: Tensor) -> Any:
        bright = x[:, 0, :4, :4].mean((1, 2))
        whole = (bright / bright)[:, None, None]
        boxes = torch.tensor([[8.0, 0, 12, 4], [8, 8, 16, 16]]).to(x).repeat(len(x), 1, 1)
        scores = torch.stack([bright, x[:, 0, 8:, 8:].mean((1, 2))], 1)[..., None]
        number = torch.arange(2)[:, None]
        return {"scores": scores, "boxes": torch.where(number < self.broken, boxes * whole, boxes)}


def test_a_broken_box_changes_nothing_elsewhere_and_broken_boxes_alone_are_refused() -> None:
    x = torch.rand(1, 3, 16, 16, dtype=torch.float64) + 0.5
    covering = Occlusion((4, 4), (4, 4))
    target = Detections(box=(8, 8, 16, 16))
    drops = explain.attribute(Fragile(1), x, covering, target=target).values.reshape(16, 16)
    for top, left in [(0, 0), (8, 8), (12, 8)]:
        covered = x.clone()
        covered[..., top : top + 4, left : left + 4] = 0
        drop = x[0, 0, 8:, 8:].mean() - covered[0, 0, 8:, 8:].mean()
        assert float(drops[top, left]) == pytest.approx(float(drop), abs=1e-12)
    with pytest.raises(explain.ModelError, match="finite"):
        explain.attribute(Fragile(2), x, covering, target=Detections())


@pytest.mark.parametrize("form", ["results", "yolov10"])
def test_each_of_boxes_that_coincide_is_explained_itself(form: str) -> None:
    boxes = torch.tensor([[2.0, 2, 9, 9], [2, 2, 9.1, 9], [2, 2, 9, 9], [10, 10, 15, 15]])
    best = torch.tensor([0.9, 0.6, 0.8, 0.7])

    def output(scores: Tensor) -> Any:
        labels = torch.ones(4)
        if form == "results":
            return [{"boxes": boxes, "labels": labels, "scores": scores}]
        return torch.cat([boxes, scores[:, None], labels[:, None]], 1)[None]

    scores = best.clone().requires_grad_()
    for index, place in enumerate((0, 2, 3, 1)):
        settled = Detections(index=index).resolved(output(best), 1)
        score = settled.pick(output(scores), 1)[0]
        assert score.item() == pytest.approx(best[place].item())
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


@pytest.mark.parametrize("classes", [1, 80])
def test_pred_logits_that_sigmoids_have_trained_have_no_class_for_nothing(
    classes: int, rand: Any
) -> None:
    boxes = torch.cat([0.3 + 0.4 * rand(1, 50, 2), 0.1 + 0.1 * rand(1, 50, 2)], -1)
    logits = rand(1, 50, classes) - 5  # as a focal loss leaves them where there is nothing
    logits[0, 7, -1] = 2
    nothing = torch.cat([logits, logits.new_full((1, 50, 1), 1)], -1)  # a softmax has one more
    shares = nothing[0, 7].softmax(0)
    scores = {"deformable detr": 1 / (1 + math.exp(-2)), "detr": float(shares[classes - 1])}
    for layout, values in (("deformable detr", logits), ("detr", nothing)):
        output = {"pred_logits": values, "pred_boxes": boxes}
        target = Detections(size=SIZE, threshold=0.2).resolved(output, 1)
        assert (target.layout, target.labels) == (layout, (classes - 1,))
        assert float(target.pick(output, 1)[0]) == pytest.approx(scores[layout])
    if classes == 80:
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
        places = 8 * middles(x.shape[-2] // 8, x.shape[-1] // 8).T + 2 * raw[:, :2].tanh()
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
    together = explain.attribute(model, photos, HiResCAM(), targets=targets, layer="features")
    assert (len(outputs), passes) == (1, [2])
    for target, attribution in zip(targets, together, strict=True):
        alone = explain.attribute(model, photos, HiResCAM(), target=target, layer="features")
        assert torch.equal(attribution.values, alone.values)
    outputs.clear()
    passes.clear()
    explain.attribute(model, photos, Occlusion((16, 16), (16, 16)), targets=targets)
    assert len(outputs) == len(passes)


def followed(output: Any, box: Tensor, label: int) -> float:
    """The score of a box in another photo: of those that overlap it nearly best, the best score; 0
    under a half."""
    boxes, scores = plain(output)
    shared = box_iou(boxes[0], box[None])[:, 0]
    candidates = scores[0, shared >= 0.9 * shared.max(), label]
    return candidates.max().item() if shared.max() >= 0.5 else 0.0


def test_a_box_is_followed_through_covered_photos(model: nn.Module, photos: Tensor) -> None:
    x = photos[:1]
    boxes, scores = (values.detach() for values in plain(model(x)))
    cell = int(scores[0, :, 0].argmax())
    covering = Occlusion((16, 16), (16, 16))
    target = Detections(0, threshold=0.0)
    drops = explain.attribute(model, x, covering, target=target).values.reshape(48, 64)
    for top in range(0, 48, 16):
        for left in range(0, 64, 16):
            covered = x.clone()
            covered[..., top : top + 16, left : left + 16] = 0
            drop = float(scores[0, cell, 0]) - followed(model(covered), boxes[0, cell], 0)
            assert float(drops[top + 3, left + 3]) == pytest.approx(drop, abs=1e-9)


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


def test_why_not_another_class_and_a_region_where_nothing_was_found(
    model: nn.Module, photos: Tensor
) -> None:
    x = photos[:1]
    boxes, scores = plain(model(x))
    cell = int(scores[0].amin(1).argmin())
    box = boxes[0, cell].tolist()
    with pytest.raises(TargetError, match=r"cup detection .* nothing is detected"):
        as_target("cup", ["tie", "cup"]).resolved(model(x), 1)
    why = Difference(Detections(1, box), Detections(0, box))
    attribution = explain.attribute(model, x, "saliency", target=why)
    near = box_iou(boxes[0], boxes[0, cell][None])[:, 0] >= 0.9
    expected = scores[0, near, 1].max() - scores[0, near, 0].max()
    assert_close(attribution.score[0], expected.detach(), **EXACT)
    with pytest.raises(TargetError, match="must overlap a box"):
        Detections(1, (200.0, 200.0, 220.0, 220.0)).pick(model(x), 1)
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
    scores = {"cup": 0.8, "cup@2": 0.7, "@25,5": 0.9, "box 1,0,9,9": 0.7, None: 0.9}
    scores["cup box 39,0,48,9"] = 0.8
    for text, score in scores.items():
        settled = as_target(text, labels).resolved([output], 1)
        assert float(settled.pick([output], 1)[0]) == pytest.approx(score)
    with pytest.raises(TargetError, match=r"only 2 are; take what is: tie box 20,0,29,9, "):
        as_target("cup@3", labels).resolved([output], 1)


# --- networks of other packages, small and random


@pytest.mark.parametrize("kind", ["Detr", "ConditionalDetr"])
def test_queries_of_transformers_are_what_their_processor_makes_of_them(
    kind: str, rand: Any
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is an extra")
    torch.manual_seed(0)
    stages = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4}
    backbone = transformers.ResNetConfig(**stages, layer_type="basic", out_features=["stage2"])
    sizes = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_attention_heads": 8 for part in ("encoder", "decoder")}
    sizes |= {f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")}
    config = getattr(transformers, f"{kind}Config")(
        d_model=32, num_queries=5, num_labels=3, backbone_config=backbone, **sizes
    )
    model = getattr(transformers, f"{kind}ForObjectDetection")(config).eval()
    processor = getattr(transformers, f"{kind}ImageProcessorPil")()
    with torch.no_grad():
        output = model(rand(1, 3, *SIZE).float())
    (expected,) = processor.post_process_object_detection(
        output, 0.0, target_sizes=torch.tensor([SIZE])
    )
    cell = int(expected["scores"].argmax())
    target = Detections(size=SIZE, threshold=0.0)
    settled = target.resolved(output, 1)
    assert settled.layout == ("detr" if kind == "Detr" else "deformable detr")
    assert settled.labels == (int(expected["labels"][cell]),)
    assert_close(settled.boxes[0], expected["boxes"][cell], rtol=1e-5, atol=1e-4)
    assert_close(target.pick(output, 1)[0][0], expected["scores"][cell])


def test_a_label_of_digits_that_are_no_number_is_a_word() -> None:
    place = as_place("²@2")
    assert place is not None
    assert place.label == "²"
