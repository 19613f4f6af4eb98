"""Detected boxes: each layout of a detector's output against a slow decoding, and what is explained
of a box."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torchvision.models.detection import retinanet_resnet50_fpn, ssdlite320_mobilenet_v3_large
from torchvision.models.detection._utils import BoxCoder, BoxLinearCoder
from torchvision.ops import box_iou

import explain
from explain import TargetError
from explain.methods import DRISE, GradCAM, HiResCAM, Occlusion, Saliency
from explain.targets import Detections, Difference, as_target
from explain.targets.detections import suppressed
from explain.targets.detector_outputs import LAYOUTS, find_layout, read

EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}

SIZE = (64, 96)


@pytest.fixture
def rand() -> Any:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.rand(*shape, generator=generator, dtype=torch.float64)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value) for value in values]
    return [power / sum(powers) for power in powers]


def around(x: float, y: float, w: float, h: float) -> list[float]:
    return [x - w / 2, y - h / 2, x + w / 2, y + h / 2]


def cells_of(raw: Tensor) -> list[tuple[int, int]]:
    return [(y, x) for y in range(raw.shape[-2]) for x in range(raw.shape[-1])]


# Each gives an output for two images, and the slow decoding of image i: scores, boxes.


def detr(rand: Any) -> Any:
    logits = 4 * rand(2, 7, 4)
    boxes = rand(2, 7, 4)
    return {"pred_logits": logits, "pred_boxes": boxes}, lambda i: (
        [softmax(row)[:3] for row in logits[i].tolist()],
        [
            [96 * a if k % 2 == 0 else 64 * a for k, a in enumerate(around(*row))]
            for row in boxes[i].tolist()
        ],
    )


def deformable_detr(rand: Any) -> Any:
    output, slow = detr(rand)
    logits = output["pred_logits"]
    return SimpleNamespace(logits=logits, pred_boxes=output["pred_boxes"]), lambda i: (
        [[sigmoid(a) for a in row] for row in logits[i].tolist()],
        slow(i)[1],
    )


def yolov8(rand: Any) -> Any:
    raw = torch.cat([40 * rand(2, 4, 60), rand(2, 3, 60)], 1)
    maps = [rand(2, 67, 4, 6), rand(2, 67, 2, 3)]
    return (raw, maps), lambda i: (
        [[float(raw[i, 4 + k, c]) for k in range(3)] for c in range(60)],
        [around(*raw[i, :4, c].tolist()) for c in range(60)],
    )


def masks(rand: Any) -> Any:
    (raw, maps), slow = yolov8(rand)
    factors = rand(2, 32, 60)
    prototypes = rand(2, 32, 8, 12)
    return (torch.cat([raw, factors], 1), (maps, factors, prototypes)), slow


def turned(rand: Any) -> Any:
    (raw, maps), slow = yolov8(rand)
    angle = 3 * rand(2, 1, 60) - 1

    def boxes(i: int) -> list[list[float]]:
        found = []
        for c in range(60):
            x, y, w, h = raw[i, :4, c].tolist()
            t = float(angle[i, 0, c])
            cos = math.cos(t) / 2
            sin = math.sin(t) / 2
            signs = [(a, b) for a in (-1, 1) for b in (-1, 1)]
            corners = [
                (x + a * w * cos - b * h * sin, y + a * w * sin + b * h * cos) for a, b in signs
            ]
            across, down = zip(*corners, strict=True)
            found.append([min(across), min(down), max(across), max(down)])
        return found

    return (torch.cat([raw, angle], 1), (maps, angle)), lambda i: (slow(i)[0], boxes(i))


def yolov5(rand: Any) -> Any:
    raw = torch.cat([40 * rand(2, 30, 4), rand(2, 30, 4)], 2)
    return raw, lambda i: (
        [[float(row[4] * row[5 + k]) for k in range(3)] for row in raw[i]],
        [around(*row[:4].tolist()) for row in raw[i]],
    )


def yolox(rand: Any) -> Any:
    raw = torch.cat([6 * rand(2, 126, 2) - 3, 3 * rand(2, 126, 2) - 1.5, rand(2, 126, 4)], 2)
    cells = [
        (stride, y, x)
        for stride in (8, 16, 32)
        for y in range(64 // stride)
        for x in range(96 // stride)
    ]

    def box(stride: int, y: int, x: int, cell: list[float]) -> list[float]:
        wide = stride * math.exp(cell[2])
        high = stride * math.exp(cell[3])
        return around(stride * (x + cell[0]), stride * (y + cell[1]), wide, high)

    return raw, lambda i: (
        [[float(row[4] * row[5 + k]) for k in range(3)] for row in raw[i]],
        [box(*cell, row[:4].tolist()) for cell, row in zip(cells, raw[i], strict=True)],
    )


def yolov10(rand: Any) -> Any:
    corners = 40 * rand(2, 9, 2)
    labels = (3 * rand(2, 9, 1)).floor()
    raw = torch.cat([corners, corners + 1 + 20 * rand(2, 9, 2), rand(2, 9, 1), labels], 2)
    nothing = -math.inf
    count = 1 + int(labels.max())
    return raw, lambda i: (
        [[float(row[4]) if k == int(row[5]) else nothing for k in range(count)] for row in raw[i]],
        raw[i, :, :4].tolist(),
    )


def yolov8_maps(rand: Any) -> Any:
    maps = [6 * rand(2, 67, 8, 12) - 3, 6 * rand(2, 67, 4, 6) - 3]

    def slow(i: int) -> Any:
        scores = []
        boxes = []
        for raw, stride in zip(maps, (8, 16), strict=True):
            for y, x in cells_of(raw):
                cell = raw[i, :, y, x].tolist()
                sides = [
                    sum(k * p for k, p in enumerate(softmax(cell[16 * s : 16 * s + 16])))
                    for s in range(4)
                ]
                edges = (
                    x + 0.5 - sides[0],
                    y + 0.5 - sides[1],
                    x + 0.5 + sides[2],
                    y + 0.5 + sides[3],
                )
                boxes.append([stride * edge for edge in edges])
                scores.append([sigmoid(a) for a in cell[64:]])
        return scores, boxes

    return maps, slow


def fcos(rand: Any) -> Any:
    sizes = [(8, 12), (4, 6)]
    logits, sides, centred = ([6 * rand(2, k, *size) for size in sizes] for k in (3, 4, 1))

    def slow(i: int) -> Any:
        scores = []
        boxes = []
        for level, stride in enumerate((8, 16)):
            for y, x in cells_of(logits[level]):
                middle = sigmoid(float(centred[level][i, 0, y, x]))
                scores.append(
                    [math.sqrt(sigmoid(a) * middle) for a in logits[level][i, :, y, x].tolist()]
                )
                a, b, c, d = sides[level][i, :, y, x].tolist()
                across = stride * (x + 0.5)
                down = stride * (y + 0.5)
                boxes.append([across - a, down - b, across + c, down + d])
        return scores, boxes

    return (logits, sides, centred), slow


def centernet(rand: Any) -> Any:
    heat = 6 * rand(2, 3, 16, 24) - 3
    wide = 9 * rand(2, 2, 16, 24)
    offset = rand(2, 2, 16, 24)
    return [{"hm": heat, "wh": wide, "reg": offset}], lambda i: (
        [[sigmoid(a) for a in heat[i, :, y, x].tolist()] for y, x in cells_of(heat)],
        [
            around(
                4 * (x + float(offset[i, 0, y, x])),
                4 * (y + float(offset[i, 1, y, x])),
                4 * float(wide[i, 0, y, x]),
                4 * float(wide[i, 1, y, x]),
            )
            for y, x in cells_of(heat)
        ],
    )


def retinanet(rand: Any) -> Any:
    corners = 40 * rand(11, 2)
    anchors = torch.cat([corners, corners + 4 + 20 * rand(11, 2)], 1)
    logits = 4 * rand(2, 11, 3) - 2
    deltas = rand(2, 11, 4) - 0.5
    coder = BoxCoder((1.0, 1.0, 1.0, 1.0))
    return {"cls_logits": logits, "bbox_regression": deltas, "anchors": anchors}, lambda i: (
        [[sigmoid(a) for a in row] for row in logits[i].tolist()],
        coder.decode_single(deltas[i], anchors).tolist(),
    )


def centred(rand: Any) -> Any:
    output, _ = retinanet(rand)
    middle = rand(2, 11, 1) - 0.5
    sides = rand(2, 11, 4)
    made = {**output, "bbox_ctrness": middle, "bbox_regression": sides}
    coder = BoxLinearCoder(normalize_by_size=True)
    logits = output["cls_logits"]
    return made, lambda i: (
        [
            [math.sqrt(sigmoid(a) * sigmoid(float(middle[i, q, 0]))) for a in logits[i, q].tolist()]
            for q in range(11)
        ],
        coder.decode(sides[i], output["anchors"]).tolist(),
    )


def ssd(rand: Any) -> Any:
    output, _ = retinanet(rand)
    coder = BoxCoder((10.0, 10.0, 5.0, 5.0))
    logits = output["cls_logits"]
    return output, lambda i: (
        [[-math.inf, *softmax(row)[1:]] for row in logits[i].tolist()],
        coder.decode_single(output["bbox_regression"][i], output["anchors"]).tolist(),
    )


def results(rand: Any) -> Any:
    (rows, slow) = yolov10(rand)
    return [{"boxes": r[:, :4], "scores": r[:, 4], "labels": r[:, 5].long()} for r in rows], slow


def objects(rand: Any) -> Any:
    (rows, slow) = yolov10(rand)
    made = [SimpleNamespace(xyxy=row[:, :4], conf=row[:, 4], cls=row[:, 5]) for row in rows]
    return [SimpleNamespace(boxes=each, obb=None) for each in made], slow


MADE: dict[str, Any] = {
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


@pytest.mark.parametrize("kind", MADE)
def test_a_layout_is_found_out_and_read_as_a_slow_decoding_reads_it(kind: str, rand: Any) -> None:
    output, slow = MADE[kind](rand)
    layout = NAMES.get(kind, kind)
    named = Detections(decode=layout if kind == "ssd" else None, size=SIZE, threshold=0.0)
    found = read(output, 2, SIZE, named.decode)
    assert found.layout == layout
    for i in range(2):
        scores, boxes = (torch.tensor(each, dtype=torch.float64) for each in slow(i))
        assert_close(found.scores[i], scores, **EXACT)
        assert_close(found.boxes[i], boxes, **EXACT)
        cell, label = divmod(int(scores.flatten().argmax()), scores.shape[1])
        best = named.settled(output, 2)
        assert (best.labels[i], best.layout) == (label, layout)
        assert_close(best.boxes[i], boxes[cell], **EXACT)
        assert float(best.pick(output, 2)[0][i]) == pytest.approx(float(scores[cell, label]))


def test_every_layout_is_tested() -> None:
    assert set(LAYOUTS) - {"cells"} == {NAMES.get(kind, kind) for kind in MADE}


def test_what_is_no_detection_is_refused_in_one_line(rand: Any) -> None:
    for output in (
        rand(2, 5),
        rand(2, 3, 8, 8),
        [rand(2, 3)],
        {"logits": rand(2, 5)},
        rand(2, 40, 40),
        rand(2, 40, 9),
        9 * rand(2, 40, 9) - 5,
    ):
        with pytest.raises(TargetError, match="boxes with scores"):
            Detections().pick(output, 2)
    # YOLOv5 in training, which needs its anchors
    levels = [rand(2, 3, 8 // side, 12 // side, 9) for side in (1, 2)]
    with pytest.raises(TargetError, match="evaluation mode, or pass decode="):
        Detections(size=SIZE).pick(levels, 2)
    with pytest.raises(TargetError, match="layout 'detr'"):
        Detections(decode="detr").pick(rand(2, 5), 2)
    with pytest.raises(TargetError, match="one of results, cells"):
        Detections(decode="yolo99").pick(rand(2, 5), 2)
    with pytest.raises(TargetError, match="decode must return"):
        Detections(decode=lambda output: (output, output)).pick(rand(2, 5), 2)


@pytest.mark.parametrize(
    "kind", ["results", "detr", "deformable detr", "fcos", "yolov8", "yolov5", "yolov10"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_box_or_a_score_that_is_no_number_is_no_detection(
    kind: str, value: float, rand: Any
) -> None:
    output, slow = MADE[kind](rand)
    scores, boxes = (torch.tensor(each, dtype=torch.float64) for each in slow(0))
    best = int(scores.amax(1).argmax())
    if kind == "results":
        output[0]["boxes"][best, 2] = value
    elif kind == "fcos":
        level, cell = divmod(best, 96)
        output[1][level][0, 2].flatten()[cell] = value
    else:
        rows = {"detr": "pred_boxes", "deformable detr": "pred_boxes"}
        raw = output[rows[kind]] if kind == "detr" else getattr(output, rows.get(kind, ""), output)
        raw = raw[0].transpose(1, 2) if kind == "yolov8" else raw
        raw[0, best, 2] = value
    target = Detections(size=SIZE, threshold=0.0)
    settled = target.settled(output, 2)
    scores[best] = -math.inf  # all others are as they were
    cell, label = divmod(int(scores.argmax()), scores.shape[1])
    assert settled.labels[0] == label
    assert_close(settled.boxes[0], boxes[cell], **EXACT)
    assert float(settled.pick(output, 2)[0][0]) == pytest.approx(float(scores[cell, label]))


class Fragile(nn.Module):
    """Three fixed boxes with scores of their corners' brightness; one box is 0 / 0 where the photo
    is dark."""

    def forward(self, x: Tensor) -> Any:
        scores = torch.stack(
            [
                0.9 * x[:, 0, :4, :4].mean((1, 2)),
                0.8 * x[:, 0, 8:, 8:].mean((1, 2)),
                0.7 * x[:, 0, 0, 0],
            ]
        )
        third = 12 + x[:, 0, :4, 8:].sum((1, 2)) / x[:, 0, :4, 8:].sum((1, 2))
        zero = torch.zeros_like(third)
        boxes = [
            [zero, zero, zero + 6, zero + 6],
            [zero + 8, zero + 8, zero + 16, zero + 16],
            [zero + 8, zero, third, zero + 4],
        ]
        return {
            "scores": scores.T[..., None],
            "boxes": torch.stack([torch.stack(box, -1) for box in boxes], 1),
        }


def test_a_broken_box_in_one_covered_photo_changes_nothing_elsewhere() -> None:
    x = (
        torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        + 0.5
    )
    target = Detections(box=(8, 8, 16, 16))
    found = explain.attribute(Fragile(), x, Occlusion((4, 4), (4, 4)), target=target).values[0]
    for top in range(0, 16, 4):
        for left in range(0, 16, 4):
            covered = x.clone()
            covered[..., top : top + 4, left : left + 4] = 0
            drop = 0.8 * (x[0, 0, 8:, 8:].mean() - covered[0, 0, 8:, 8:].mean())
            assert float(found.reshape(16, 16)[top, left]) == pytest.approx(float(drop), abs=1e-12)


def test_a_network_whose_cells_are_all_broken_is_refused() -> None:
    class Dark(nn.Module):
        def forward(self, x: Tensor) -> Any:
            whole = x[:, 0, :4, :4].sum((1, 2)) / x[:, 0, :4, :4].sum((1, 2))
            return {
                "scores": whole[:, None, None].expand(-1, 2, 1),
                "boxes": 4 * whole[:, None, None] * torch.tensor([0, 0, 1, 1]).expand(1, 2, 4),
            }

    with pytest.raises(explain.ModelError, match="finite"):
        explain.attribute(
            Dark(), torch.ones(1, 3, 8, 8), Occlusion((4, 4), (4, 4)), target=Detections()
        )


@pytest.mark.parametrize("form", ["results", "yolov10"])
def test_each_of_boxes_that_coincide_is_explained_itself(form: str) -> None:
    class Twice(nn.Module):
        """Boxes without suppression: three of one label coincide, up to a tenth of a pixel, and one
        is apart."""

        def forward(self, x: Tensor) -> Any:
            scores = torch.stack(
                [
                    x[:, 0, :, :4].mean((1, 2)),
                    x[:, 0, :, 4:8].mean((1, 2)),
                    x[:, 0, :, 8:12].mean((1, 2)),
                    x[:, 0, :, 12:].mean((1, 2)),
                ],
                1,
            )
            boxes = torch.tensor(
                [[2.0, 2, 9, 9], [2, 2, 9.1, 9], [2, 2, 9, 9], [10, 10, 15, 15]]
            ).to(x)
            if form == "results":
                return [
                    {"boxes": boxes, "labels": torch.ones(4).long(), "scores": own}
                    for own in scores
                ]
            rest = torch.stack([scores, torch.ones_like(scores)], -1)
            return torch.cat([boxes.expand(len(x), -1, -1), rest], -1)

    x = torch.zeros(1, 3, 16, 16, dtype=torch.float64)
    for column, brightness in enumerate((0.9, 0.6, 0.8, 0.7)):
        x[..., 4 * column : 4 * column + 4] = brightness
    for index, column in enumerate((0, 2, 3, 1)):
        both = [Saliency(absolute=False), Occlusion((16, 4), (16, 4))]
        found = explain.attribute(Twice(), x, both, target=Detections(index=index))
        assert float(found["saliency"].score[0]) == pytest.approx((0.9, 0.6, 0.8, 0.7)[column])
        expected = torch.zeros(16, 16, dtype=torch.float64)
        expected[:, 4 * column : 4 * column + 4] = 1 / 64
        assert_close(found["saliency"].values[0].reshape(3, 16, 16)[0], expected)


def test_what_fills_up_a_list_of_detections_is_none() -> None:
    boxes = torch.tensor([[0.0, 0, 4, 4], [4, 4, 8, 8], [0, 0, 0, 0]])
    filled = {
        "boxes": boxes,
        "labels": torch.tensor([1, 0, -1]),
        "scores": torch.tensor([0.6, 0.5, 0.9]),
    }
    assert Detections().pick([filled], 1)[0].tolist() == [pytest.approx(0.6)]
    assert len(Detections().detected([filled], 1, 0)) == 2
    with pytest.raises(TargetError, match="detected"):
        Detections(-1).pick([filled], 1)


def test_a_box_without_an_area_is_itself() -> None:
    # flat; with its corners exchanged
    boxes = torch.tensor([[4.0, 4, 4, 9], [9, 9, 3, 2], [0, 0, 2, 2]])
    for index, score in enumerate((0.9, 0.8, 0.7)):
        output = [
            {
                "boxes": boxes,
                "labels": torch.zeros(3).long(),
                "scores": torch.tensor([0.9, 0.8, 0.7]),
            }
        ]
        assert Detections(index=index).pick(output, 1)[0].tolist() == [pytest.approx(score)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_one_class_that_is_always_certain_is_no_column_of_labels(
    dtype: torch.dtype, rand: Any
) -> None:
    raw = torch.cat([40 * rand(1, 30, 4), rand(1, 30, 1), torch.ones(1, 30, 1)], 2).to(dtype)
    target = Detections(size=SIZE, threshold=0.0).settled(raw, 1)
    assert target.layout == "yolov5"
    cell = int(raw[0, :, 4].argmax())
    assert_close(
        target.boxes[0].double(),
        torch.tensor(around(*raw[0, cell, :4].tolist())).double(),
        rtol=0.01,
        atol=0.3,
    )
    assert float(target.pick(raw, 1)[0]) == float(raw[0, cell, 4])


def test_centernets_maps_are_known_by_other_names_and_by_their_shapes(rand: Any) -> None:
    ((maps,), slow) = centernet(rand)
    heat, wide, offset = maps.values()
    outputs = [
        {"heatmap": heat, "size": wide, "offset": offset},
        {"keypoints": heat, "reg": offset, "wh": wide},
        (heat, wide, offset),
        ([heat], [wide], [offset]),
        {"a": heat, "b": wide, "c": offset},
        {"offset": offset, "heatmap": heat.sigmoid(), "box_sizes": wide},
        SimpleNamespace(hm=heat, wh=wide, reg=offset),
    ]
    for output in outputs:
        found = read(output, 2, SIZE)
        assert found.layout == "centernet"
        for i in range(2):
            scores, boxes = (torch.tensor(each, dtype=torch.float64) for each in slow(i))
            assert_close(found.scores[i], scores, **EXACT)
            assert_close(found.boxes[i], boxes, **EXACT)
    with pytest.warns(explain.ExplainWarning, match="CenterNet"):
        Detections(size=SIZE).settled((heat, wide), 2)
    # a segmenter with two heads returns such maps, too
    assert find_layout((heat, wide), 2, SIZE) is None
    assert find_layout((wide, wide, wide), 2, SIZE) is None


@pytest.mark.parametrize("classes", [1, 2, 80])
def test_pred_logits_that_sigmoids_have_trained_have_no_class_for_nothing(
    classes: int, rand: Any
) -> None:
    boxes = torch.cat([0.3 + 0.4 * rand(1, 50, 2), 0.1 + 0.1 * rand(1, 50, 2)], -1)
    logits = rand(1, 50, classes) - 5  # as a focal loss leaves them where there is nothing
    logits[0, 7, -1] = 2
    target = Detections(size=SIZE).settled({"pred_logits": logits, "pred_boxes": boxes}, 1)
    assert (target.layout, target.labels) == ("deformable detr", (classes - 1,))
    assert float(target.pick({"pred_logits": logits, "pred_boxes": boxes}, 1)[0]) == pytest.approx(
        sigmoid(2)
    )
    # a softmax for one class more
    nothing = torch.cat([logits, logits.new_full((1, 50, 1), 1)], -1)
    target = Detections(size=SIZE, threshold=0.2).settled(
        {"pred_logits": nothing, "pred_boxes": boxes}, 1
    )
    assert (target.layout, target.labels) == ("detr", (classes - 1,))
    expected = softmax(nothing[0, 7].tolist())[classes - 1]
    assert float(target.pick({"pred_logits": nothing, "pred_boxes": boxes}, 1)[0]) == pytest.approx(
        expected
    )
    unclear = {"pred_logits": logits + 9, "pred_boxes": boxes}
    if classes == 80:
        with pytest.warns(explain.ExplainWarning, match="pred_logits"):
            Detections(size=SIZE, threshold=0.0).settled(unclear, 1)
        named = Detections(size=SIZE, threshold=0.0, decode="deformable detr")
        assert named.settled(unclear, 1).labels == (79,)


# --- one box of a network


class Small(nn.Module):
    """A detector like YOLOv8: from each cell of 8 x 8 pixels, a box around it and two scores; in
    ``form``."""

    def __init__(self, form: str = "yolov8") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 4, 4), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU()
        )
        self.head = nn.Conv2d(8, 6, 1)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        raw = self.head(self.features(x))
        y, across = torch.meshgrid(
            *(8.0 * torch.arange(n, dtype=x.dtype) + 4 for n in raw.shape[-2:]), indexing="ij"
        )
        middles = torch.stack([across, y]) + 2 * raw[:, :2].tanh()
        found = torch.cat(
            [middles, 16 + 4 * raw[:, 2:4].tanh(), (4 * raw[:, 4:]).sigmoid()], 1
        ).flatten(2)
        rows = found.transpose(1, 2)
        logits = (4 * raw[:, 4:]).flatten(2).transpose(1, 2)
        middles = rows[..., :2]
        wide = rows[..., 2:4]
        scores = rows[..., 4:]
        boxes = torch.cat([middles - wide / 2, middles + wide / 2], -1)
        size = torch.tensor([x.shape[-1], x.shape[-2]] * 2, dtype=x.dtype)
        # every box is returned once for each class
        labels = torch.arange(2).repeat_interleave(boxes.shape[1])
        both = torch.cat([boxes, boxes], 1)
        each = scores.transpose(1, 2).flatten(1)
        forms: dict[str, Callable[[], Any]] = {
            "yolov8": lambda: (found, [raw]),
            "a function": lambda: (boxes, scores),
            "cells": lambda: {"scores": scores, "boxes": boxes},
            "yolov5": lambda: torch.cat(
                [rows[..., :4], torch.ones_like(rows[..., :1]), scores], -1
            ),
            "yolov10": lambda: torch.cat(
                [both, each[..., None], labels[None, :, None].expand(len(x), -1, 1)], -1
            ),
            "deformable detr": lambda: {
                "logits": logits,
                "pred_boxes": torch.cat([middles, wide], -1) / size,
            },
            "retinanet": lambda: {
                "cls_logits": logits,
                "anchors": 16 * torch.tensor([0, 0, 1, 1]).to(x).repeat(len(rows[0]), 1),
                "bbox_regression": torch.cat([middles / 16 - 0.5, (wide / 16).log()], -1),
            },
            "results": lambda: [
                {"boxes": own, "labels": labels, "scores": score}
                for own, score in zip(both, each, strict=True)
            ],
        }
        return forms[self.form]()


@pytest.fixture
def photos() -> Tensor:
    return torch.rand(2, 3, 48, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def plain(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Boxes ``(N, Q, 4)`` and scores ``(N, Q, 2)``."""
    rows = model(x)[0].transpose(1, 2)
    return torch.cat(
        [rows[..., :2] - rows[..., 2:4] / 2, rows[..., :2] + rows[..., 2:4] / 2], -1
    ), rows[..., 4:]


PARTS: dict[str, Any] = {
    "score": lambda box, scores, label: scores[label],
    "existence": lambda box, scores, label: scores.max(),
    "left": lambda box, scores, label: box[0],
    "top": lambda box, scores, label: box[1],
    "right": lambda box, scores, label: box[2],
    "bottom": lambda box, scores, label: box[3],
}


@pytest.mark.parametrize("of", PARTS)
@pytest.mark.parametrize("method", ["gradient", "layercam"])
def test_each_part_of_a_box_is_explained_as_that_number(
    of: Any, method: str, photos: Tensor
) -> None:
    model = Small().double().eval()
    _, scores = plain(model, photos)
    cells = [int(scores[i, :, 1].argmax()) for i in range(2)]

    def by_hand(output: Any) -> Tensor:
        rows = output[0].transpose(1, 2)
        own = torch.cat(
            [rows[..., :2] - rows[..., 2:4] / 2, rows[..., :2] + rows[..., 2:4] / 2], -1
        )
        return torch.stack(
            [PARTS[of](own[i, cell], rows[i, cell, 4:], 1) for i, cell in enumerate(cells)]
        )

    chosen = Saliency(absolute=False) if method == "gradient" else method
    target = Detections(1, of=of, threshold=0.0)
    found, expected = (
        explain.attribute(model, photos, chosen, target=each, layer="features")
        for each in (target, by_hand)
    )
    assert_close(found.score, expected.score, **EXACT)
    assert_close(found.values, expected.values, **EXACT)
    assert expected.values.flatten(1).any(1).all()


FORMS = ["cells", "yolov5", "yolov10", "deformable detr", "retinanet", "results"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "where", [{"label": 1}, {"label": 1, "point": (30.0, 20.0)}, {"of": "left"}], ids=str
)
def test_a_box_is_explained_alike_in_each_layout(form: str, where: Any, photos: Tensor) -> None:
    methods = [
        Saliency(absolute=False),
        HiResCAM(),
        GradCAM(relu=False),
        Occlusion((16, 16), (16, 16)),
    ]
    target = Detections(threshold=0.0, **where)
    found, expected = (
        explain.attribute(
            Small(each).double().eval(), photos, methods, target=target, layer="features"
        )
        for each in (form, "yolov8")
    )
    for name, each in expected.items():
        assert_close(found[name].score, each.score, **EXACT)
        assert_close(found[name].values, each.values, **EXACT)


def test_boxes_together_are_read_once_and_explained_as_each_alone(photos: Tensor) -> None:
    model = Small("a function").double().eval()
    read_outputs = []
    passes = []
    model.register_forward_hook(lambda module, args, output: passes.append(len(args[0])))

    def decode(output: Any) -> tuple[Tensor, Tensor]:
        read_outputs.append(output)
        return output[1], output[0]

    boxes = [
        Detections(label, index=i, decode=decode, threshold=0.0)
        for label in (0, 1)
        for i in range(3)
    ]
    targets = [*boxes, boxes[0] - boxes[3]]
    together = explain.attribute(
        model, photos, [HiResCAM(), GradCAM(relu=False)], targets=targets, layer="features"
    )
    assert (len(read_outputs), passes) == (1, [2])
    for target, found in zip(targets, together, strict=True):
        alone = explain.attribute(
            model, photos, [HiResCAM(), GradCAM(relu=False)], target=target, layer="features"
        )
        for name, each in alone.items():
            assert torch.equal(found[name].values, each.values)
    read_outputs.clear(), passes.clear()
    explain.attribute(model, photos, Occlusion((16, 16), (16, 16)), targets=targets)
    assert len(read_outputs) == len(passes)


def test_of_the_best_detections_there_are_as_many_as_the_photo_has(photos: Tensor) -> None:
    class Three(Small):
        def forward(self, x: Tensor) -> Any:
            return [
                {name: part[:3] for name, part in image.items()} for image in super().forward(x)
            ]

    model = Three("results").double().eval()
    x = photos[:1]
    found = explain.attribute(model, x, HiResCAM(), top_k=5, layer="features")
    assert len(found) == 3
    for index, each in enumerate(found):
        alone = explain.attribute(
            model, x, HiResCAM(), target=Detections(index=index), layer="features"
        )
        assert torch.equal(each.values, alone.values)
    with pytest.raises(TargetError, match="must be detected"):
        explain.attribute(
            model, x, HiResCAM(), targets=[Detections(), Detections(index=3)], layer="features"
        )


def test_of_many_boxes_those_with_the_best_scores_are_ranked() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = (torch.rand(60, 40, generator=generator) * 50).round() / 50  # many are equal
    corners = 200 * torch.rand(60, 2, generator=generator)
    boxes = torch.cat([corners, corners + 40], 1)
    ranked = sorted(
        (-float(scores[q, k]), q, k) for q in range(60) for k in range(40) if scores[q, k] > 0.1
    )[:1000]
    expected: list[tuple[int, int]] = []
    for _, q, k in ranked:
        same = [at for at, label in expected if label == k]
        if not same or float(box_iou(boxes[q : q + 1], boxes[same]).max()) <= 0.6:
            expected.append((q, k))
    assert list(suppressed(scores, boxes, 0.1)) == expected


def followed(model: nn.Module, x: Tensor, box: Tensor, label: int) -> Tensor:
    """The score of a box in other photos: of those that overlap it nearly best, the best score; 0
    under a half."""
    boxes, scores = (each.detach() for each in plain(model, x))
    found = []
    for own, score in zip(boxes, scores[..., label], strict=True):
        shared = box_iou(own, box[None])[:, 0]
        candidates = [
            float(s) for s, o in zip(score, shared, strict=True) if o >= 0.9 * shared.max()
        ]
        found.append(max(candidates) if shared.max() >= 0.5 else 0.0)
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("form", ["yolov8", "a function"])
def test_a_box_is_followed_through_covered_photos(form: str, photos: Tensor) -> None:
    model = Small().double().eval()
    x = photos[:1]
    boxes, scores = plain(model, x)
    cell = int(scores[0, :, 0].argmax())
    decode = None if form == "yolov8" else lambda output: (output[1], output[0])
    other = Small(form).double().eval()
    found = (
        explain.attribute(
            other,
            x,
            Occlusion((16, 16), (16, 16)),
            target=Detections(0, decode=decode, threshold=0.0),
        )
        .values[0]
        .reshape(48, 64)
    )
    for top in range(0, 48, 16):
        for left in range(0, 64, 16):
            covered = x.clone()
            covered[..., top : top + 16, left : left + 16] = 0
            fall = (
                scores[0, cell, 0].detach()
                - followed(model, covered, boxes[0, cell].detach(), 0)[0]
            )
            assert float(found[top + 3, left + 3]) == pytest.approx(float(fall), abs=1e-9)


def test_d_rise_compares_all_boxes_before_suppression(photos: Tensor) -> None:
    model = Small().double().eval()
    x = photos[:1]
    boxes, scores = plain(model, x)
    cell = int(scores[0, :, 0].argmax())
    target = Detections(0, threshold=0.0).settled(model(x), 1)
    shared = box_iou(plain(model, 0.5 * x)[0][0], boxes[0, cell][None])[:, 0]
    expected = (shared * plain(model, 0.5 * x)[1][0, :, 0]).max()
    assert_close(target.likeness(model(0.5 * x), 1)[0].double(), expected, atol=1e-6, rtol=1e-6)
    found = explain.attribute(
        model, x, DRISE(samples=32, grid=4), target=Detections(0, threshold=0.0)
    )
    assert found.values.any()


def test_why_not_another_class_and_a_region_where_nothing_was_found(photos: Tensor) -> None:
    model = Small().double().eval()
    x = photos[:1]
    boxes, scores = plain(model, x)
    cell = int(scores[0].amin(1).argmin())
    box = boxes[0, cell].tolist()
    with pytest.raises(TargetError, match="is not; take one of"):
        Detections(1, threshold=0.999).pick(model(x), 1)
    with pytest.raises(
        TargetError, match=r"best cup detection must .* found there \(none at all\)"
    ):
        as_target("cup", ["tie", "cup"]).settled(model(x), 1)
    with pytest.raises(TargetError, match=r"best bus detection must .* found there \(tie, cup\)"):
        as_target("bus", ["tie", "cup", "bus"]).settled(Small("results").double().eval()(x), 1)
    why = Difference(Detections(1, box), Detections(0, box))
    found = explain.attribute(model, x, Saliency(absolute=False), target=why)
    boxes_near = box_iou(boxes[0], boxes[0, cell][None])[:, 0] >= 0.9
    expected = scores[0, boxes_near, 1].max() - scores[0, boxes_near, 0].max()
    assert_close(found.score[0], expected.detach(), **EXACT)
    far = (200.0, 200.0, 220.0, 220.0)
    with pytest.raises(TargetError, match="must overlap a detection"):
        Detections(1, far).pick(model(x), 1)


def test_the_overlap_is_with_the_box_that_was_given(photos: Tensor) -> None:
    model = Small().double().eval()
    x = photos[:1]
    boxes, _ = plain(model, x)
    given = boxes[0, 20].detach() + torch.tensor([2.0, 1, 3, 2])
    picked = Detections(0, given, of="overlap").pick(model(x), 1)[0]
    near = box_iou(boxes[0], given[None])[:, 0].detach()
    assert float(picked[0].detach()) == pytest.approx(float(near.max()), abs=0.1)
    assert float(picked[0].detach()) < 1
    (gradient,) = torch.autograd.grad(picked, model.head.bias)
    assert gradient[:4].abs().sum() > 0


def test_detections_are_numbered_and_named_by_the_index(photos: Tensor) -> None:
    output = {
        "boxes": torch.tensor([[0.0, 0, 9, 9], [20, 0, 29, 9], [40, 0, 49, 9]]),
        "labels": torch.tensor([1, 2, 1]),
        "scores": torch.tensor([0.7, 0.9, 0.8]),
    }
    labels = ["none", "cup", "tie"]
    for text, score in (
        ("cup", 0.8),
        ("cup@2", 0.7),
        ("@25,5", 0.9),
        ("box 1,0,9,9", 0.7),
        ("cup box 39,0,48,9", 0.8),
    ):
        assert as_target(text, labels).settled([output], 1).pick([output], 1)[0].tolist() == [
            pytest.approx(score)
        ]
    assert as_target(None).settled([output], 1).pick([output], 1)[0].tolist() == [
        pytest.approx(0.9)
    ]
    with pytest.raises(TargetError, match=r"found there \(cup, tie\)"):
        as_target("cup@3", labels).settled([output], 1)


@pytest.mark.parametrize("wrong", [{"of": "area"}, {"overlap": 2}, {"box": (3, 3, 2, 4)}])
def test_what_no_detection_can_be_is_refused(wrong: Any) -> None:
    with pytest.raises(TargetError, match="must be"):
        Detections(**wrong)


# --- networks of other packages, small and random


def after_and_before_suppression(model: Any, x: Tensor) -> tuple[Any, dict[str, Any]]:
    """What a detector of torchvision returns for one photo, and what its head gives, with the
    anchors."""
    with torch.no_grad():
        (after,) = model(list(x))
        images, _ = model.transform(list(x))
        maps = list(model.backbone(images.tensors).values())
        return after, {**model.head(maps), "anchors": model.anchor_generator(images, maps)}


def test_a_retinanet_before_suppression_is_the_one_after(rand: Any) -> None:
    torch.manual_seed(0)
    model = retinanet_resnet50_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=3,
        min_size=64,
        max_size=64,
        score_thresh=0.0,
    ).eval()
    x = rand(1, 3, 64, 64).float()
    after, dense = after_and_before_suppression(model, x)
    every = read(dense, 1, (64, 64))
    best = after["boxes"][0]
    label = int(after["labels"][0])
    near = box_iou(every.boxes[0].clamp(0, 64), best[None])[:, 0]
    assert float(near.max()) > 0.999
    assert_close(
        every.scores[0][near > 0.999, label].max(), after["scores"][0], rtol=1e-5, atol=1e-6
    )


def test_an_ssd_before_suppression_is_the_one_after(rand: Any) -> None:
    torch.manual_seed(0)
    model = ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3, score_thresh=0.0
    ).eval()
    x = rand(1, 3, 320, 320).float()
    after, dense = after_and_before_suppression(model, x)
    target = Detections(int(after["labels"][0]), after["boxes"][0], decode="ssd")
    score = target.pick(dense, 1)[0]
    assert_close(score[0], after["scores"][0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["detr", "panoptic", "conditional", "yolos"])
def test_queries_of_transformers_are_what_their_processor_makes_of_them(
    kind: str, rand: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes: Any = {"num_labels": 3}
    if kind == "yolos":
        config = transformers.YolosConfig(
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=[32, 48],
            patch_size=8,
            num_detection_tokens=5,
            use_mid_position_embeddings=False,
            **sizes,
        )
        model = transformers.YolosForObjectDetection(config).eval()
        shape = (32, 48)
        process = transformers.YolosImageProcessorPil().post_process_object_detection
    else:
        stages = {
            "embedding_size": 8,
            "hidden_sizes": [8] * 4,
            "depths": [1] * 4,
            "layer_type": "basic",
        }
        levels = [f"stage{i}" for i in range(1, 5)] if kind == "panoptic" else ["stage2"]
        name = "ConditionalDetr" if kind == "conditional" else "Detr"
        config = getattr(transformers, f"{name}Config")(
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_queries=5,
            backbone_config=transformers.ResNetConfig(**stages, out_features=levels),
            **sizes,
        )
        task = "Segmentation" if kind == "panoptic" else "ObjectDetection"
        model = getattr(transformers, f"{name}For{task}")(config).eval()
        shape = (64, 96)
        process = getattr(transformers, f"{name}ImageProcessorPil")().post_process_object_detection
    x = rand(1, 3, *shape).float()
    with torch.no_grad():
        output = model(x)
    (expected,) = process(output, 0.0, target_sizes=torch.tensor([shape]))
    cell = int(expected["scores"].argmax())
    target = Detections(size=shape, threshold=0.0)
    settled = target.settled(output, 1)
    assert settled.layout == ("deformable detr" if kind == "conditional" else "detr")
    assert settled.labels == (int(expected["labels"][cell]),)
    assert_close(settled.boxes[0], expected["boxes"][cell], rtol=1e-5, atol=1e-4)
    assert_close(target.pick(output, 1)[0][0], expected["scores"][cell])
    found = explain.attribute(
        model, x, ["saliency", "occlusion(window=16, stride=16)"], target=target
    )
    assert all(each.values.any() for each in found.values())
