"""What detectors return, in one form: class scores and boxes of each image, before or after
non-maximum suppression."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from explain._utils import nested
from explain._utils.errors import TargetError, shown
from explain.targets.base import find_tensor, items_named, summary_of_output

Size: TypeAlias = tuple[int, ...]
Decode: TypeAlias = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
# pixels between the cells of maps, from the finest on, where the input is not known
STRIDES = (8, 16, 32, 64, 128)
BINS = 16  # of the distances of ultralytics' heads, in strides
SOFTMAX = (
    "DetrObjectDetectionOutput",
    "DetrSegmentationOutput",
    "TableTransformerObjectDetectionOutput",
    "YolosObjectDetectionOutput",
)
"""The outputs of transformers whose last class is "no object"; the others' classes have a sigmoid
each."""
CENTERNET = {
    "offset": ("reg", "off"),
    "sizes": ("wh", "size", "dim"),
    "heat": ("hm", "heat", "keypoint", "center"),
}
"""What the names of CenterNet's maps hold, in the packages that have it."""
MAYBE_MAPS = (
    "the model's maps have no names and are read as those of CenterNet; if they are others, pass "
    "decode= with a function that returns scores and boxes"
)
MAYBE_SIGMOIDS = (
    'the model\'s pred_logits are read as a softmax with "no object" last (DETR), but "no object" '
    'is best for few queries; take decode="deformable detr" if each class has a sigmoid, or "detr"'
)
NOTHING = 0.2
"""At least for this share of a DETR's queries, "no object" is the best class; usually for most."""


OfImages: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""A tensor with a row for each image, or one tensor for each, where images have different numbers
of boxes."""


@dataclass(frozen=True, eq=False)
class Boxes:
    """The boxes ``boxes[i]`` ``(Q, 4)`` of each image, with ``scores[i]`` ``(Q, K)``, minus
    infinity for labels that a box does not have."""

    scores: OfImages
    boxes: OfImages
    logits: OfImages | None = None
    # ``(Q,)`` each: whether there is anything in a box
    existence: OfImages | None = None
    # before non-maximum suppression
    dense: bool = True
    layout: str = ""
    # what else the output may mean
    doubt: str = ""
    detections: dict[Any, list[tuple[int, int]]] = field(init=False, default_factory=dict)
    """Positions and labels of detections, best first, by image, label and least score, once a
    target has asked for them."""


_readings: ContextVar[dict[Any, Any] | None] = ContextVar("readings", default=None)
"""The latest output, and its boxes as they were read in each way."""


@contextmanager
def reading_once() -> Iterator[None]:
    """Within this block, the boxes in an output are read once for all targets together, and
    kept."""
    token = _readings.set({})
    try:
        yield
    finally:
        _readings.reset(token)


def read(
    output: Any, count: int, size: Size | None, decode: Decode | str | None = None, name: str = "it"
) -> Boxes:
    """Read the boxes in a detector's output for ``count`` images, in pixels of the model's input
    ``size`` (height, width). ``name`` is what messages call the target.
    """
    if isinstance(decode, str) and decode not in LAYOUTS:
        raise TargetError(
            f"decode must be a function or one of {', '.join(LAYOUTS)}, got {shown(decode)}"
        )
    boxes = find_layout(output, count, size, decode, is_detector=True)
    if boxes is None:
        needs = "boxes with scores" if decode is None else f"boxes in the layout {decode!r}"
        raise TargetError(
            f"target {name} must have a model that returns {needs} for each of {count} images, "
            f"got {summary_of_output(output)}; take that of evaluation mode, or pass decode=, "
            "which returns scores and boxes"
        )
    return boxes


def find_layout(
    output: Any,
    count: int,
    size: Size | None = None,
    decode: Decode | str | None = None,
    *,
    is_detector: bool = False,
) -> Boxes | None:
    """Return the boxes of an output in the first layout that fits, or in that of ``decode``, or
    None. Maps of a segmenter may look like boxes; they count only if the model ``is_detector``."""
    readings = _readings.get()
    if readings is None:  # outside of `reading_once`, nothing is kept
        readings = {}
    if readings.get("output") is not output:
        readings.clear()
        readings["output"] = output
    reading_options = (count, size, torch.is_grad_enabled(), is_detector)
    layout = id(decode) if callable(decode) else decode  # of a function, its identity
    if (reading_options, layout) not in readings:
        if callable(decode):
            boxes: Boxes | None = _decoded(output, count, decode)
        else:
            boxes = _in_layout(output, count, size, decode, is_detector)
        if boxes is not None:
            boxes = _without_broken(boxes)
            # a target that was resolved asks for this layout by its name
            readings[reading_options, layout or boxes.layout] = boxes
        readings[reading_options, layout] = boxes
    boxes_in_layout: Boxes | None = readings[reading_options, layout]
    return boxes_in_layout


def _decoded(output: Any, count: int, decode: Decode) -> Boxes:
    """Read the boxes in a detector's output with the caller's function ``decode``."""
    scores, boxes = decode(output)
    if scores.ndim != 3 or len(scores) != count or boxes.shape != (*scores.shape[:2], 4):
        raise TargetError(
            f"decode must return scores ({count}, Q, K) and boxes ({count}, Q, 4), got "
            f"{tuple(scores.shape)} and {tuple(boxes.shape)}"
        )
    return Boxes(scores, boxes, layout=getattr(decode, "__name__", "decode"))


def _in_layout(
    output: Any, count: int, size: Size | None, layout: str | None, is_detector: bool
) -> Boxes | None:
    """Read the boxes in a detector's output in one layout of `LAYOUTS`, or for None in the first
    that fits; None if it does not fit."""
    if layout is not None:
        boxes = LAYOUTS[layout](output, count, size)
        return None if boxes is None else replace(boxes, layout=layout)
    for name, read_layout in LAYOUTS.items():
        # one that looks like another, where this output does not look more like it
        if name in UNSURE and not UNSURE[name](output, count):
            continue
        boxes = read_layout(output, count, size)
        # maps without names may be those of a segmenter
        if boxes is not None and (is_detector or boxes.doubt != MAYBE_MAPS):
            return replace(boxes, layout=name)
    return None


def _without_broken(boxes: Boxes) -> Boxes:
    """Set scores that are NaN, or whose box has no finite area, to minus infinity, so nothing is
    detected there. If all before suppression are so, the network has failed: they become NaN.
    """
    usable_scores = []
    for scores, corners in zip(boxes.scores, boxes.boxes, strict=True):
        areas = (corners[:, 2:] - corners[:, :2]).detach().float().prod(1)
        broken = scores.isnan() | ~areas.isfinite()[:, None]
        if bool(broken.any()):
            has_failed = boxes.dense and bool(broken.all())
            scores = scores.masked_fill(broken, torch.nan if has_failed else -torch.inf)
        usable_scores.append(scores)
    return replace(boxes, scores=usable_scores)


def _part(output: Any, *names: str) -> Any:
    """The first item or attribute of a detector's output that has one of these names; None without
    any."""
    return next((part for part in items_named(output, names) if part is not None), None)


def _results(output: Any, count: int, size: Size | None) -> Boxes | None:
    """The layout "results": boxes, labels and scores of each image, as of torchvision, transformers
    and ultralytics (of oriented boxes, the upright ones around them); None for other outputs.
    """
    images = [output] if isinstance(output, Mapping) and count == 1 else output
    if not isinstance(images, (list, tuple)) or len(images) != count:
        return None
    results = [_result(image) for image in images]
    if any(result is None for result in results):
        return None
    return _of_results(results)


def _of_results(results: Sequence[Any]) -> Boxes:
    """`Boxes` from a list with (boxes ``(Q, 4)``, labels ``(Q,)``, scores ``(Q,)``) for each image,
    after suppression. What fills up a list of detections has a label below 0.
    """
    labels_of_all = torch.cat([labels for _, labels, _ in results])
    classes = 1 + max([0, *labels_of_all.tolist()])
    scores_of_images = []
    for _, labels, scores in results:
        # each box has the score of its own label alone
        empty_scores = scores.new_full((len(scores), classes), -torch.inf)
        labelled = scores.masked_fill(labels < 0, -torch.inf)
        scores_of_images.append(
            empty_scores.scatter(1, labels.clamp(min=0)[:, None], labelled[:, None])
        )
    return Boxes(scores_of_images, [boxes for boxes, *_ in results], dense=False)


def _result(image: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The boxes, labels and scores ``(Q,)`` of one image in a detector's result; None where one is
    missing. A label that is NaN becomes -1."""
    boxes, labels, scores = items_named(image, ("boxes", "labels", "scores"))
    for holder in items_named(image, ("obb", "boxes")):  # ultralytics' objects with all three
        if not isinstance(labels, torch.Tensor):
            boxes, labels, scores = items_named(holder, ("xyxy", "cls", "conf"))
    if not all(isinstance(part, torch.Tensor) for part in (boxes, labels, scores)):
        return None
    if labels.ndim != 1 or not len(boxes) == len(labels) == len(scores):
        return None
    return boxes, torch.where(labels.isnan(), -1, labels.long()), scores


def _are_of_cells(scores: Any, boxes: Any, count: int) -> bool:
    """Whether these are scores ``(N, Q, K)`` and boxes ``(N, Q, 4)`` of as many cells or queries of
    a detector."""
    if not (isinstance(scores, torch.Tensor) and isinstance(boxes, torch.Tensor)):
        return False
    return scores.ndim == 3 and boxes.shape == (count, scores.shape[1], 4)


def _cells(output: Any, count: int, size: Size | None) -> Boxes | None:
    """Read the layout "cells": "scores" and "boxes" for each cell or query, before suppression."""
    scores = _part(output, "scores")
    boxes = _part(output, "boxes")
    if not _are_of_cells(scores, boxes, count):
        return None
    return Boxes(scores, boxes, _part(output, "logits"))


def _queries(output: Any, count: int, size: Size | None, background: bool) -> Boxes | None:
    """A DETR's logits and boxes (middle, width, height in shares of the input); None for others.
    ``background``: a softmax whose last class is "no object", rather than sigmoids.
    """
    logits = _part(output, "logits", "pred_logits")
    shares = _part(output, "pred_boxes")
    if not _are_of_cells(logits, shares, count):
        return None
    boxes = _around(shares[..., :2], shares[..., 2:])
    if size is not None:
        height, width = size[-2:]
        boxes = boxes * boxes.new_tensor([width, height, width, height])
    if not background:
        return Boxes(logits.sigmoid(), boxes, logits)
    scores = logits.softmax(-1)
    existence = 1 - scores[..., -1]
    doubt = ""
    # what is not known by its class may have sigmoids: behind a softmax, many queries are nothing
    if type(output).__name__ not in SOFTMAX:
        is_nothing = logits.detach().argmax(-1) == logits.shape[-1] - 1
        is_sure = float(is_nothing.float().mean()) >= NOTHING
        doubt = "" if is_sure else MAYBE_SIGMOIDS
    return Boxes(scores[..., :-1], boxes, logits[..., :-1], existence=existence, doubt=doubt)


def _rtdetr(output: Any, count: int, size: Size | None) -> Boxes | None:
    """The layout "rtdetr", of ultralytics: final rows, then boxes and logits of the decoder's
    layers; None for other outputs."""
    layers = output[1] if isinstance(output, (tuple, list)) and len(output) == 2 else None
    if not isinstance(layers, (tuple, list)) or len(layers) < 2:
        return None
    if not all(isinstance(part, torch.Tensor) and part.ndim == 4 for part in layers[:2]):
        return None
    boxes_of_layers, logits_of_layers, *_ = layers
    last = {"logits": logits_of_layers[-1], "pred_boxes": boxes_of_layers[-1]}
    return _queries(last, count, size, background=False)


def _ends_in_no_object(output: Any, count: int) -> bool:
    """Whether a DETR's queries have a softmax whose last class is "no object", not sigmoids: by
    transformers' names; else unless queries come in two stages or most best logits are below 0.
    """
    logits = _part(output, "pred_logits")
    if logits is None:
        return type(output).__name__ in SOFTMAX
    if _part(output, "enc_outputs") is not None:
        return False
    # of sigmoids, the logits of a query that finds nothing are all below 0
    is_nothing = logits.detach().amax(-1) < 0
    return logits.shape[-1] > 1 and float(is_nothing.float().mean()) <= 0.5


def _are_corners(output: Any, count: int) -> bool:
    """Whether the rows ``(N, Q, 6)`` of a detector are corners, score and label (YOLOv10), rather
    than middle, size and two shares."""
    rows = _final_rows(output, count)
    if rows is None:
        return False
    labels = rows[..., 5]
    is_fraction = (labels != labels.round()) & ~labels.isnan()
    # a turned box has middle and size where others have corners
    is_swapped = (rows[..., 2:4] < rows[..., :2]).any(-1) & (not _has_angle(rows))
    return not bool((is_fraction | is_swapped).any())


def _has_columns_in(columns: int, output: Any, count: int) -> bool:
    """Whether dimension ``columns`` (1 or 2) of a detector's table ``(N, ..., ...)`` holds the
    columns of the table, and the other one the cells."""
    table = _tensor(output, count)
    if table is None:
        return False
    cells: dict[Any, int] = {}  # by the list that the maps of all levels are in
    for path, tensor in nested.paths(output):
        if tensor.ndim == 4:
            cells[path[:-1]] = cells.get(path[:-1], 0) + math.prod(tensor.shape[2:])
        elif tensor.ndim == 5:  # (N, anchors, h, w, columns)
            cells[path[:-1]] = cells.get(path[:-1], 0) + math.prod(tensor.shape[1:4])
    # cells are as many as the maps beside the table have; without such maps, more than columns
    counts = set(cells.values())
    length = table.shape[3 - columns]  # of the other dimension
    if counts.isdisjoint(table.shape[1:]):
        return table.shape[columns] <= length
    return length in counts


def _end_to_end(output: Any, count: int, size: Size | None) -> Boxes | None:
    """The rows of YOLOv10 and YOLO26: corners, score and label of final boxes; None for others."""
    rows = _final_rows(output, count)
    if rows is None:
        return None
    corners = _around_turned(rows) if _has_angle(rows) else rows[..., :4]
    scores = rows[..., 4]
    labels = rows[..., 5]
    # a label below 0 marks what is no detection
    labels = torch.where(labels.isnan(), -1, labels.long())
    return _of_results(list(zip(corners, labels, scores, strict=True)))


def _final_rows(output: Any, count: int) -> torch.Tensor | None:
    """Rows ``(N, Q, 6)`` that may be final boxes with score and label, behind which factors of
    masks, key points or an angle may follow, if the output has them; None for others."""
    rows = _tensor(output, count)
    if rows is None:
        return None
    columns_behind = sum(_columns_beside(rows, output, named=True)) or _factors(output)
    return rows if rows.shape[2] in (6, 6 + columns_behind) else None


def _has_angle(rows: torch.Tensor) -> bool:
    """Whether final rows are of turned boxes, with an angle alone behind the label."""
    return rows.shape[2] == 7


def _yolov8(output: Any, count: int, size: Size | None) -> Boxes | None:
    """The columns ``(N, 4 + K, cells)`` of YOLOv8 to 11: middle, width, height and class scores;
    None for others. Factors of masks, key points or the box's angle may follow the scores.
    """
    columns = _tensor(output, count)
    if columns is None or columns.shape[1] < 5:
        return None
    columns_behind = _columns_beside(columns, output)
    has_angle = 1 in columns_behind  # the part with one column
    classes = columns.shape[1] - 4 - sum(columns_behind)
    rows = columns.transpose(1, 2)
    scores = rows[..., 4 : 4 + classes]
    if classes < 1 or not _within(scores) or not _in_pixels(rows):
        return None
    boxes = _around_turned(rows) if has_angle else _around(rows[..., :2], rows[..., 2:4])
    return Boxes(scores, boxes)


def _yolov5(output: Any, count: int, size: Size | None) -> Boxes | None:
    """The rows ``(N, cells, 5 + K)`` of YOLOv3 to v7 and YOLOX: middle, width, height, existence,
    class scores; None for others. As many factors of masks as prototypes may follow.
    """
    rows = _tensor(output, count)
    if rows is None or rows.shape[2] < 6:
        return None
    classes = rows.shape[2] - 5 - _factors(output)
    existence = rows[..., 4]
    scores = rows[..., 5 : 5 + classes]
    if classes < 1 or not (_within(existence) and _within(scores) and _in_pixels(rows)):
        return None
    return Boxes(
        existence[..., None] * scores, _around(rows[..., :2], rows[..., 2:4]), existence=existence
    )


def _yolox(output: Any, count: int, size: Size | None) -> Boxes | None:
    """YOLOX's rows before decoding: as `_yolov5`, but middles relative to the cell and logarithms
    of sizes, in cells. None without the input's ``size`` and for other outputs.
    """
    rows = _tensor(output, count)
    if rows is None or rows.shape[2] < 6 or size is None:
        return None
    # probabilities alone are no boxes, and scores have gone through a sigmoid
    if _within(rows[..., :4]) or not _within(rows[..., 4:]):
        return None
    corner_levels = []
    stride_levels = []
    for stride in STRIDES[:3]:  # YOLOX has three levels, whose cells follow each other
        level = rows.new_empty(size[-2] // stride, size[-1] // stride)
        corner_levels.append(stride * (cell_middles(level) - 0.5))  # what middles count from
        stride_levels.append(rows.new_full((level.numel(), 1), stride))
    strides = torch.cat(stride_levels)  # (cells, 1)
    if len(strides) != rows.shape[1]:
        return None
    middles = torch.cat(corner_levels) + strides * rows[..., :2]
    boxes = _around(middles, strides * rows[..., 2:4].exp())
    return Boxes(rows[..., 4:5] * rows[..., 5:], boxes, existence=rows[..., 4])


def _yolov8_maps(output: Any, count: int, size: Size | None) -> Boxes | None:
    """Read YOLOv8's maps in training ``(N, 64 + K, h, w)``: logits of the distances to the four
    sides, and of the classes."""
    maps = _levels(output, count)
    if maps is None or maps[0].shape[1] <= 4 * BINS:
        return None
    logits, boxes = read_bins(maps, _strides(maps, size), bins=BINS, first=0)
    return Boxes(logits.sigmoid(), boxes, logits)


def _fcos(output: Any, count: int, size: Size | None) -> Boxes | None:
    """FCOS's maps: class logits ``(N, K, h, w)``, distances to the sides in pixels, and maybe
    centredness, by which scores are the root of the product; None for other outputs.
    """
    if not isinstance(output, (list, tuple)) or len(output) not in (2, 3):
        return None
    levels_of_parts = [levels for part in output if (levels := _levels(part, count)) is not None]
    level_counts = {len(levels) for levels in levels_of_parts}
    if len(levels_of_parts) < len(output) or len(level_counts) > 1:
        return None
    logits, distances, *centredness = [
        torch.cat([level.flatten(2).mT for level in levels], 1) for levels in levels_of_parts
    ]
    if distances.shape[-1] != 4 or any(level.shape[-1] != 1 for level in centredness):
        return None
    levels = levels_of_parts[0]
    strides = _strides(levels, size)
    middles = torch.cat(
        [stride * cell_middles(level) for level, stride in zip(levels, strides, strict=True)]
    )
    scores = logits.sigmoid()
    if centredness:
        scores = (scores * centredness[0].sigmoid()).sqrt()
    return Boxes(scores, boxes_from_sides(middles, distances), logits)


def _anchors(
    output: Any, count: int, size: Size | None, scales: tuple[float, float], background: bool
) -> Boxes | None:
    """torchvision's "cls_logits", "bbox_regression" and "anchors" ``(Q, 4)``; None for other
    outputs. ``scales`` divide the deltas; ``background``: class 0 is "nothing".
    """
    logits = _part(output, "cls_logits")
    deltas = _part(output, "bbox_regression")
    anchors = _part(output, "anchors")
    if anchors is None or not _are_of_cells(logits, deltas, count):
        return None
    if isinstance(anchors, (list, tuple)):
        anchors = torch.stack(list(anchors))
    anchor_sizes = anchors[..., 2:] - anchors[..., :2]
    middles = anchors[..., :2] + anchor_sizes / 2
    centredness = _part(output, "bbox_ctrness")
    if centredness is not None:  # FCOS: distances to the sides, in sizes of the anchor
        scores = (logits.sigmoid() * centredness.sigmoid()).sqrt()
        return Boxes(
            scores,
            boxes_from_sides(middles, deltas * torch.cat([anchor_sizes, anchor_sizes], -1)),
            logits,
        )
    of_middle, of_size = scales
    middles = middles + deltas[..., :2] / of_middle * anchor_sizes
    # torchvision's limit: no box is more than 1000 / 16 times as large as its anchor
    growths = (deltas[..., 2:] / of_size).clamp(max=4.135).exp()
    boxes = _around(middles, anchor_sizes * growths)
    if not background:
        return Boxes(logits.sigmoid(), boxes, logits)
    scores = logits.softmax(-1)  # class 0 is the background, and labels count from there
    existence = 1 - scores[..., 0]
    is_background = torch.arange(scores.shape[-1], device=scores.device) == 0
    scores = scores.masked_fill(is_background, -torch.inf)
    return Boxes(scores, boxes, logits, existence=existence)


def _centernet(output: Any, count: int, size: Size | None) -> Boxes | None:
    """Read CenterNet's maps: heat ``(N, K, h, w)``, logits or probabilities of a middle there;
    sizes ``(N, 2, h, w)`` in cells; maybe offsets in the cell. None for other outputs.
    """
    maps, is_certain = _centernet_maps(output, count)
    heat = maps.get("heat")
    sizes = maps.get("sizes")
    offset = maps.get("offset")
    if heat is None or sizes is None or len({tensor.shape[2:] for tensor in maps.values()}) > 1:
        return None
    # without the input's size, that of the published networks
    stride = 4.0 if size is None else size[-1] / heat.shape[-1]
    middles = cell_middles(heat)
    if offset is not None:  # from the cell's corner
        middles = middles - 0.5 + offset.flatten(2).mT
    boxes = stride * _around(middles, sizes.flatten(2).mT)
    doubt = "" if is_certain else MAYBE_MAPS
    heat_of_cells = heat.flatten(2).mT
    if _within(heat):  # as probabilities, which are the scores
        return Boxes(heat_of_cells, boxes, doubt=doubt)
    return Boxes(heat_of_cells.sigmoid(), boxes, logits=heat_of_cells, doubt=doubt)


def _centernet_maps(output: Any, count: int) -> tuple[dict[str, torch.Tensor], bool]:
    """CenterNet's maps by role ("heat", "sizes", "offset"), from names, else from channels and
    order, and whether the roles are certain. No roles if maps are left over.
    """
    stages = output if isinstance(output, (list, tuple)) else [output]
    # of several stages, the last one counts; a list of tensors is one stage
    is_stage = bool(stages) and not isinstance(stages[-1], (list, tuple, torch.Tensor))
    heads = stages[-1] if is_stage else output
    if not nested.items(heads):
        heads = getattr(heads, "__dict__", {})
    maps: dict[str, torch.Tensor] = {}
    many_channel_maps: list[torch.Tensor] = []  # without a name that says it
    two_channel_maps: list[torch.Tensor] = []
    for path, tensor in nested.paths(heads):
        if tensor.ndim != 4 or len(tensor) != count:
            continue
        name = next((key.lower() for key in reversed(path) if isinstance(key, str)), "")
        roles = [role for role, parts in CENTERNET.items() if any(part in name for part in parts)]
        role = roles[0] if roles else None
        if role == "heat" or (role is not None and tensor.shape[1] == 2):
            maps.setdefault(role, tensor)
        elif tensor.shape[1] == 2:
            two_channel_maps.append(tensor)
        else:
            many_channel_maps.append(tensor)
    # a name says which is which, or there is one way alone to assign what has no name
    is_certain = (
        "heat" in maps
        or "sizes" in maps
        or (len(many_channel_maps) == 1 and len(two_channel_maps) == 2 - len(maps))
    )
    if "heat" not in maps:
        if not many_channel_maps and two_channel_maps:  # two classes; their map comes first
            many_channel_maps.append(two_channel_maps.pop(0))
        if len(many_channel_maps) != 1:
            return {}, False
        maps["heat"] = many_channel_maps[0]
    for role in ("sizes", "offset"):
        if role not in maps and two_channel_maps:
            maps[role] = two_channel_maps.pop(0)
    return ({}, False) if two_channel_maps else (maps, is_certain)


LAYOUTS: dict[str, Callable[[Any, int, Size | None], Boxes | None]] = {
    "results": _results,
    "cells": _cells,
    "detr": partial(_queries, background=True),
    "deformable detr": partial(_queries, background=False),
    "rtdetr": _rtdetr,
    "retinanet": partial(_anchors, scales=(1.0, 1.0), background=False),
    "ssd": partial(_anchors, scales=(10.0, 5.0), background=True),
    "centernet": _centernet,
    "fcos": _fcos,
    "yolov10": _end_to_end,
    "yolov8": _yolov8,
    "yolov5": _yolov5,
    "yolox": _yolox,
    "yolov8 maps": _yolov8_maps,
}
"""What is tried in turn; the first that fits is it. Each returns None for outputs of another
kind."""
UNSURE: dict[str, Callable[[Any, int], bool]] = {
    "detr": _ends_in_no_object,
    "ssd": lambda output, count: False,
    "yolov10": _are_corners,
    "yolov8": partial(_has_columns_in, 1),
    "yolov5": partial(_has_columns_in, 2),
}
"""Layouts that look like others, and when to try them without their name."""


def _innermost(output: Any) -> Any:
    """The first of the tuples in a detector's output that has no tuple as its first item, as boxes
    and prototypes of masks in ``((boxes, prototypes), others)``."""
    while isinstance(output, (tuple, list)) and output and isinstance(output[0], (tuple, list)):
        output = output[0]
    return output


def _tensor(output: Any, count: int) -> torch.Tensor | None:
    """The first floating-point tensor of three dimensions in a detector's output, with ``count``
    rows; None without one."""
    tensor = find_tensor(_innermost(output), count, (3,), ())
    return tensor if tensor is not None and tensor.is_floating_point() else None


def _factors(output: Any) -> int:
    """How many factors of masks a detector gives for each box: as many as prototypes ``(N, M, h,
    w)`` of masks have channels."""
    parts = [part for _, part in nested.items(_innermost(output)) if isinstance(part, torch.Tensor)]
    return sum(tensor.shape[1] for tensor in parts if tensor.ndim == 4)


def _columns_beside(columns: torch.Tensor, output: Any, *, named: bool = False) -> list[int]:
    """How many columns of ``(N, columns, cells)`` belong to each part that the output has beside it
    (factors of masks, key points, an angle); parts of the same name in two heads count once.
    """
    counts = {}
    for path, tensor in nested.paths(output):
        if tensor.ndim != 3 or tensor is columns or path[-1] in ("boxes", "scores"):
            continue
        # final boxes are fewer than the cells of the parts, which are known by their names then
        has_name = isinstance(path[-1], str)
        has_same_cells = tensor.shape[::2] == columns.shape[::2]  # and as many images
        is_beside = has_name if named else has_same_cells
        if is_beside:
            counts[path[-1]] = tensor.shape[1]
    return list(counts.values())


def _levels(output: Any, count: int) -> list[torch.Tensor] | None:
    """A detector's output as a list of maps ``(N, C, h, w)`` from fine to coarse, all with C
    channels; None if it is no such list."""
    if not isinstance(output, (list, tuple)) or len(output) < 2:
        return None
    for level in output:
        if not isinstance(level, torch.Tensor) or level.ndim != 4:
            return None
        if level.shape[:2] != (count, output[0].shape[1]):
            return None
    if any(coarser.shape[-1] >= finer.shape[-1] for finer, coarser in pairwise(output)):
        return None
    return list(output)


def _strides(maps: Sequence[torch.Tensor], size: Size | None) -> Sequence[float]:
    """How many pixels of a detector's input lie between the cells of each of its maps; the usual
    ones where ``size`` is not known."""
    if size is None:
        return STRIDES[: len(maps)]
    return [2.0 ** round(math.log2(size[-1] / level.shape[-1])) for level in maps]


def cell_middles(maps: torch.Tensor) -> torch.Tensor:
    """The middles (x, y) ``(h * w, 2)`` of the cells of maps ``(..., h, w)``, row by row, in units
    of cells."""
    height, width = maps.shape[-2:]
    rows = torch.arange(height).to(maps) + 0.5
    columns = torch.arange(width).to(maps) + 0.5
    return torch.stack([columns.repeat(height), rows.repeat_interleave(width)], 1)


def boxes_from_sides(middles: torch.Tensor, sides: torch.Tensor) -> torch.Tensor:
    """Boxes ``(..., 4)`` with corners, from points and the distances of the left, top, right and
    bottom sides from them."""
    return torch.cat([middles - sides[..., :2], middles + sides[..., 2:]], -1)


def read_bins(
    maps: Sequence[torch.Tensor], strides: Sequence[float], bins: int, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Class logits ``(N, cells, K)`` and boxes ``(N, cells, 4)`` from maps ``(N, K + 4 * bins, h,
    w)``, whose bins begin at channel ``first``; distances are means of softmaxes over strides
    ("Generalized Focal Loss", 2020)."""
    logits = []
    boxes = []
    for raw, stride in zip(maps, strides, strict=True):
        rows = raw.flatten(2).transpose(1, 2)
        bin_shares = (
            rows[..., first : first + 4 * bins].reshape(*rows.shape[:2], 4, bins).softmax(-1)
        )
        boxes.append(
            stride * boxes_from_sides(cell_middles(raw), bin_shares @ torch.arange(bins).to(raw))
        )
        logits.append(torch.cat([rows[..., :first], rows[..., first + 4 * bins :]], -1))
    return torch.cat(logits, 1), torch.cat(boxes, 1)


def _around_turned(rows: torch.Tensor) -> torch.Tensor:
    """The upright boxes ``(..., 4)`` around turned ones, rows that begin with (middle, width,
    height) and end with the angle."""
    sides = rows[..., 2:4]
    angles = rows[..., -1:]
    sides = sides * angles.cos().abs() + sides.flip(-1) * angles.sin().abs()
    return _around(rows[..., :2], sides)


def _around(middles: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Detected boxes ``(..., 4)`` with corners, from middles ``(..., 2)`` and widths and heights
    ``(..., 2)``."""
    return torch.cat([middles - sizes / 2, middles + sizes / 2], -1)


def _in_pixels(rows: torch.Tensor) -> bool:
    """Whether a detector's rows begin with middle, width and height in pixels, rather than with
    probabilities or logits."""
    return not _within(rows[..., :4]) and not bool((rows[..., 2:4] < 0).any())


def _within(values: torch.Tensor) -> bool:
    """Whether all values of a detector's output lie in [0, 1], as probabilities do; NaN counts as
    inside."""
    return not bool(((values < 0) | (values > 1)).any())
