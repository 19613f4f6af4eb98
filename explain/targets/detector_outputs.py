"""What detectors return, in one form: class scores and boxes of each image, before or after non-maximum suppression."""

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
from explain.targets.base import described, find_tensor, named

Size: TypeAlias = tuple[int, ...]
Decode: TypeAlias = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
STRIDES = (8, 16, 32, 64, 128)  # pixels between the cells of maps, from the finest on, where the input is not known
BINS = 16  # of the distances of ultralytics' heads, in strides
SOFTMAX = (
    "DetrObjectDetectionOutput",
    "DetrSegmentationOutput",
    "TableTransformerObjectDetectionOutput",
    "YolosObjectDetectionOutput",
)
"""The outputs of transformers whose last class is "no object"; the others' classes have a sigmoid each."""
CENTERNET = {
    "offset": ("reg", "off"),
    "sizes": ("wh", "size", "dim"),
    "heat": ("hm", "heat", "keypoint", "center"),
}
"""What is in the names of CenterNet's maps, of whatever package."""
MAYBE_MAPS = (
    "the model's maps have no names and are read as those of CenterNet; if they are others, pass "
    "decode= with a function that returns scores and boxes"
)
MAYBE_SIGMOIDS = (
    'the model\'s pred_logits are read as a softmax with "no object" last (DETR), but "no object" is '
    'best for few queries; take decode="deformable detr" if each class has a sigmoid, or "detr"'
)
NOTHING = 0.2  # of a DETR's queries, at least this share has "no object" as its best class; usually most have


OfImages: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
"""A tensor with a row for each image, or one tensor for each, where images have different numbers of boxes."""


@dataclass(frozen=True, eq=False)
class Found:
    """The boxes of each image: ``scores[i]`` ``(Q, K)``, minus infinity for other labels, and ``boxes[i]`` ``(Q, 4)``.

    ``dense`` boxes come before non-maximum suppression. ``existence[i]`` ``(Q,)`` says that there is anything in a box.
    ``doubt`` says what else the output may mean.
    """

    scores: OfImages
    boxes: OfImages
    logits: OfImages | None = None
    existence: OfImages | None = None
    dense: bool = True
    layout: str = ""
    doubt: str = ""


@dataclass
class _LastRead:
    """The boxes of the latest output, as they were read of it."""

    output: Any = None
    found: dict[Any, Found | None] = field(default_factory=dict)


_LAST_READ: ContextVar[_LastRead | None] = ContextVar("last_read", default=None)


@contextmanager
def reading_once() -> Iterator[None]:
    """Within this block, the boxes of an output are read once, for all targets together."""
    token = _LAST_READ.set(_LastRead())
    try:
        yield
    finally:
        _LAST_READ.reset(token)


def read(output: Any, count: int, size: Size | None, decode: Decode | str | None = None, name: str = "it") -> Found:
    """Return the boxes in a model's output for ``count`` images of ``size`` (height, width), in pixels of the input.

    Raises:
        TargetError: the output has none of the known layouts, or not the one that is named.
    """
    if isinstance(decode, str) and decode not in LAYOUTS:
        raise TargetError(f"decode must be a function or one of {', '.join(LAYOUTS)}, got {shown(decode)}")
    found = find_layout(output, count, size, decode, is_detector=True)
    if found is None:
        needs = "boxes with scores" if decode is None else f"boxes in the layout {decode!r}"
        got = f"{described(output)}; take that of evaluation mode, or pass decode=, which returns scores and boxes"
        raise TargetError(f"target {name} must have a model that returns {needs} for each of {count} images, got {got}")
    return found


def find_layout(
    output: Any, count: int, size: Size | None = None, decode: Decode | str | None = None, *, is_detector: bool = False
) -> Found | None:
    """Return the boxes in a model's output in the first layout that fits, or in the one that is named; else None.

    Maps that a segmenter may return too are boxes only if the model ``is_detector``.

    >>> find_layout({"scores": torch.zeros(1, 7, 2), "boxes": torch.zeros(1, 7, 4)}, 1).layout
    'cells'
    """
    last = _LAST_READ.get() or _LastRead()
    if last.output is not output:
        last.output, last.found = output, {}
    about = (count, size, torch.is_grad_enabled(), is_detector)
    way = id(decode) if callable(decode) else decode
    if (*about, way) not in last.found:
        read: Found | None
        if callable(decode):
            read = _decoded(output, count, decode)
        else:
            read = _in_layout(output, count, size, decode, is_detector)
        found = None if read is None else _without_broken(read)
        last.found[*about, way] = found
        if found is not None:
            last.found[*about, way or found.layout] = found
    return last.found[*about, way]


def _decoded(output: Any, count: int, decode: Decode) -> Found:
    scores, boxes = decode(output)
    if scores.ndim != 3 or len(scores) != count or boxes.shape != (*scores.shape[:2], 4):
        got = f"{tuple(scores.shape)} and {tuple(boxes.shape)}"
        raise TargetError(f"decode must return scores ({count}, Q, K) and boxes ({count}, Q, 4), got {got}")
    return Found(scores, boxes, layout=getattr(decode, "__name__", "decode"))


def _in_layout(output: Any, count: int, size: Size | None, layout: str | None, is_detector: bool) -> Found | None:
    for name, read_as in LAYOUTS.items() if layout is None else [(layout, LAYOUTS[layout])]:
        if layout is None and name in UNSURE and not UNSURE[name](output, count):
            continue
        found = read_as(output, count, size)
        if found is None or (layout is None and found.doubt == MAYBE_MAPS and not is_detector):
            continue
        return replace(found, layout=name)
    return None


def _without_broken(found: Found) -> Found:
    """Give minus infinity to scores that are no numbers, and to those of boxes without a finite area.

    Such a box overlaps no other, and such a score exceeds no threshold: nothing is detected there. Where no cell of an
    image has a number, the network has failed: its scores stay NaN, which is refused like that of a class.
    """
    kept = []
    for scores, boxes in zip(found.scores, found.boxes, strict=True):
        areas = (boxes[:, 2:] - boxes[:, :2]).detach().float().prod(1)
        if not bool(areas.sum().isfinite()) or bool(scores.detach().sum().isnan()):
            broken = scores.isnan() | ~areas.isfinite()[:, None]
            excluded = torch.nan if found.dense and bool(broken.all()) else -torch.inf
            scores = scores.masked_fill(broken, excluded)
        kept.append(scores)
    return replace(found, scores=kept)


def _part(value: Any, *names: str) -> Any:
    """The first of these items or attributes that there is."""
    return next((each for each in named(value, names) if each is not None), None)


def _results(output: Any, count: int, size: Size | None) -> Found | None:
    """Boxes, labels and scores of each image, as torchvision and the processors of transformers give them.

    So do the result objects of ultralytics, of which oriented boxes count with the upright boxes around them.
    """
    images = [output] if isinstance(output, Mapping) and count == 1 else output
    if not isinstance(images, (list, tuple)) or len(images) != count:
        return None
    found = [each for image in images if (each := _result(image)) is not None]
    if len(found) != count:
        return None
    classes = 1 + max((int(labels.max()) for _, labels, _ in found if len(labels)), default=0)
    scores = []
    for _, labels, own in found:
        labelled = own.masked_fill(labels < 0, -torch.inf)  # what fills up a list of detections has the label -1
        nothing = own.new_full((len(own), classes), -torch.inf)
        scores.append(nothing.scatter(1, labels.clamp(min=0)[:, None], labelled[:, None]))
    return Found(scores, [boxes for boxes, *_ in found], dense=False)


def _result(image: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    ours, theirs = ("boxes", "labels", "scores"), ("xyxy", "cls", "conf")
    for holder, names in ((image, ours), (_part(image, "obb"), theirs), (_part(image, "boxes"), theirs)):
        boxes, labels, scores = (_part(holder, name) for name in names)
        tensors = all(isinstance(each, torch.Tensor) for each in (boxes, labels, scores))
        if tensors and labels.ndim == 1 and len(boxes) == len(labels) == len(scores):
            return boxes, torch.where(labels.isnan(), -1, labels.long()), scores
    return None


def _pair(output: Any, count: int, scores: Sequence[str], boxes: Sequence[str]) -> Any:
    """Two tensors ``(N, Q, K)`` and ``(N, Q, 4)`` under some of these names, or None."""
    first, second = _part(output, *scores), _part(output, *boxes)
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return None
    return (first, second) if first.ndim == 3 and second.shape == (count, first.shape[1], 4) else None


def _cells(output: Any, count: int, size: Size | None) -> Found | None:
    """ "scores" and "boxes" for each cell or query."""
    found = _pair(output, count, ["scores"], ["boxes"])
    return None if found is None else Found(found[0], found[1], _part(output, "logits"))


def _queries(output: Any, count: int, size: Size | None, background: bool) -> Found | None:
    """Logits and boxes for each query, whose middle, width and height are shares of the input."""
    found = _pair(output, count, ["logits", "pred_logits"], ["pred_boxes"])
    if found is None:
        return None
    logits, boxes = found
    boxes = _around(boxes[..., :2], boxes[..., 2:])
    boxes = boxes if size is None else boxes * boxes.new_tensor([size[-1], size[-2]] * 2)
    if not background:
        return Found(logits.sigmoid(), boxes, logits)
    is_typed = type(output).__name__ in SOFTMAX
    doubt = "" if is_typed or _share_of_nothing(logits) >= NOTHING else MAYBE_SIGMOIDS
    shares = logits.softmax(-1)
    return Found(shares[..., :-1], boxes, logits[..., :-1], 1 - shares[..., -1], doubt=doubt)


def _share_of_nothing(logits: torch.Tensor) -> float:
    """For how many of all queries ``(N, Q, K)`` the last class is the best."""
    last = logits.shape[-1] - 1
    return float((logits.detach().argmax(-1) == last).float().mean())


def _ends_in_no_object(output: Any, count: int) -> bool:
    """Whether queries have a softmax whose last class is "no object", and not a sigmoid for each class.

    The names of transformers' outputs say it. Of "pred_logits", the name of all DETRs elsewhere, it is not so where
    queries were chosen in two stages, or where the best class of most queries has a logit below 0: a sigmoid that was
    trained says "nothing here" so, but in a softmax the logit of "no object" is high then.
    """
    logits = _part(output, "pred_logits")
    if logits is None:
        return type(output).__name__ in SOFTMAX
    if _part(output, "enc_outputs") is not None:
        return False
    return logits.shape[-1] > 1 and float((logits.detach().amax(-1) < 0).float().mean()) <= 0.5


def _are_corners(output: Any, count: int) -> bool:
    """Whether rows are corners, a score and a label, rather than a middle, a size and two shares."""
    rows = _tensor(output, count)
    if rows is None or rows.shape[2] != 6:
        return False
    fractions = (rows[..., 5] != rows[..., 5].round()) & ~rows[..., 5].isnan()
    swapped = (rows[..., 2:4] < rows[..., :2]).any(-1)
    return not bool((fractions | swapped).any())


def _end_to_end(output: Any, count: int, size: Size | None) -> Found | None:
    """``(N, Q, 6)``: the corners, score and label of boxes that need no suppression (YOLOv10)."""
    found = _tensor(output, count)
    if found is None or found.shape[2] != 6:
        return None
    return _results([{"boxes": each[:, :4], "scores": each[:, 4], "labels": each[:, 5]} for each in found], count, size)


def _yolov8(output: Any, count: int, size: Size | None) -> Found | None:
    """``(N, 4 + K, cells)``: middle, width, height and scores (YOLOv8 to 11).

    What else is returned for each cell follows the scores: factors of masks, key points, or the angle of the box.
    """
    found = _tensor(output, count)
    if found is None or found.shape[1] < 5 or found.shape[1] > found.shape[2]:
        return None
    rest = nested.items(output)[1:] if not isinstance(output, torch.Tensor) else []
    more = [
        each for path, each in nested.paths([inner for _, inner in rest])
        if each.ndim == 3 and each.shape[::2] == found.shape[::2] and path[-1] not in ("boxes", "scores")
    ]  # fmt: skip
    classes = found.shape[1] - 4 - sum(each.shape[1] for each in more)
    rows = found.transpose(1, 2)
    scores, wide = rows[..., 4 : 4 + classes], rows[..., 2:4]
    if classes < 1 or not _within(scores) or not _in_pixels(rows):
        return None
    if any(each.shape[1] == 1 for each in more):  # the upright box around a turned one
        cos, sin = rows[..., -1:].cos().abs(), rows[..., -1:].sin().abs()
        wide = wide * cos + wide.flip(-1) * sin
    return Found(scores, _around(rows[..., :2], wide))


def _yolov5(output: Any, count: int, size: Size | None) -> Found | None:
    """``(N, cells, 5 + K)``: middle, width, height, existence, and scores where there is something (v3 to v7, YOLOX).

    Factors of masks may follow, as many as the prototypes have channels.
    """
    found = _tensor(output, count)
    if found is None or found.shape[2] < 6 or found.shape[2] > found.shape[1]:
        return None
    prototypes = [each for _, each in nested.items(output)[1:] if isinstance(each, torch.Tensor) and each.ndim == 4]
    classes = found.shape[2] - 5 - sum(each.shape[1] for each in prototypes)
    existence, scores = found[..., 4], found[..., 5 : 5 + classes]
    if classes < 1 or not (_within(found[..., 4 : 5 + classes]) and _in_pixels(found)):
        return None
    return Found(existence[..., None] * scores, _around(found[..., :2], found[..., 2:4]), existence=existence)


def _yolox(output: Any, count: int, size: Size | None) -> Found | None:
    """The same before decoding: middles in cells from the corner of a cell, and logarithms of the sizes in cells."""
    found = _tensor(output, count)
    if found is None or found.shape[2] < 6 or size is None or _within(found[..., :4]) or not _within(found[..., 4:]):
        return None
    levels = [found.new_empty(size[-2] // stride, size[-1] // stride) for stride in STRIDES[:3]]
    if sum(each.numel() for each in levels) != found.shape[1]:
        return None
    corners = torch.cat([stride * (cell_middles(each) - 0.5) for stride, each in zip(STRIDES, levels, strict=False)])
    strides = torch.cat([each.new_full((each.numel(), 1), s) for s, each in zip(STRIDES, levels, strict=False)])
    boxes = _around(corners + strides * found[..., :2], strides * found[..., 2:4].exp())
    return Found(found[..., 4:5] * found[..., 5:], boxes, existence=found[..., 4])


def _yolov8_maps(output: Any, count: int, size: Size | None) -> Found | None:
    """Maps ``(N, 64 + K, h, w)``: logits of the distances to the four sides, and of the classes (in training)."""
    maps = _levels(output, count)
    if maps is None or maps[0].shape[1] <= 4 * BINS:
        return None
    logits, boxes = read_bins(maps, _strides(maps, size), BINS, 0)
    return Found(logits.sigmoid(), boxes, logits)


def _fcos(output: Any, count: int, size: Size | None) -> Found | None:
    """Lists of maps: class logits ``(N, K, h, w)``, distances to the sides in pixels, and a centredness, if there is.

    Scores are the roots of the products of class and centredness.
    """
    if not isinstance(output, (list, tuple)) or len(output) not in (2, 3):
        return None
    lists = [_levels(each, count) for each in output]
    if any(each is None or len(each) != len(lists[0] or ()) for each in lists):
        return None
    flat = [torch.cat([raw.flatten(2).transpose(1, 2) for raw in maps or ()], 1) for maps in lists]
    if flat[1].shape[-1] != 4 or [each.shape[-1] for each in flat[2:]] not in ([], [1]):
        return None
    first = lists[0] or []
    middles = torch.cat([stride * cell_middles(raw) for raw, stride in zip(first, _strides(first, size), strict=True)])
    scores = flat[0].sigmoid() if len(flat) == 2 else (flat[0].sigmoid() * flat[2].sigmoid()).sqrt()
    return Found(scores, boxes_from_sides(middles, flat[1]), flat[0])


def _anchors(output: Any, count: int, size: Size | None, scales: tuple[float, float], background: bool) -> Found | None:
    """ "cls_logits", "bbox_regression" and "anchors" ``(Q, 4)``: what torchvision's heads give, with their anchors."""
    found, anchors = _pair(output, count, ["cls_logits"], ["bbox_regression"]), _part(output, "anchors")
    if found is None or anchors is None:
        return None
    logits, deltas = found
    corners = torch.stack(list(anchors)) if isinstance(anchors, (list, tuple)) else anchors
    wide = corners[..., 2:] - corners[..., :2]
    if _part(output, "bbox_ctrness") is not None:
        scores = (logits.sigmoid() * output["bbox_ctrness"].sigmoid()).sqrt()
        sides = deltas * torch.cat([wide, wide], -1)
        return Found(scores, boxes_from_sides((corners[..., :2] + corners[..., 2:]) / 2, sides), logits)
    middles = corners[..., :2] + wide / 2 + deltas[..., :2] / scales[0] * wide
    boxes = _around(middles, wide * (deltas[..., 2:] / scales[1]).clamp(max=4.135).exp())
    if not background:
        return Found(logits.sigmoid(), boxes, logits)
    shares = logits.softmax(-1)  # class 0 is the background, and labels count from there
    there = torch.arange(shares.shape[-1], device=shares.device) > 0
    return Found(shares.masked_fill(~there, -torch.inf), boxes, logits, 1 - shares[..., 0])


def _centernet(output: Any, count: int, size: Size | None) -> Found | None:
    """Maps of middles ``(N, K, h, w)``, and ``(N, 2, h, w)`` of sizes in cells and, if there are, of where in the cell.

    Middles are logits or probabilities.
    """
    maps, is_sure = _centernet_maps(output, count)
    heat = maps.get("heat")
    sizes = maps.get("sizes")
    offset = maps.get("offset")
    if heat is None or sizes is None or len({raw.shape[2:] for raw in maps.values()}) > 1:
        return None
    stride = 4.0 if size is None else size[-1] / heat.shape[-1]
    classes, wide = (raw.flatten(2).transpose(1, 2) for raw in (heat, sizes))
    middles = cell_middles(heat) - 0.5 + (0.5 if offset is None else offset.flatten(2).transpose(1, 2))
    boxes = stride * _around(middles, wide)
    doubt = "" if is_sure else MAYBE_MAPS
    if _within(heat):
        return Found(classes, boxes, doubt=doubt)
    return Found(classes.sigmoid(), boxes, classes, doubt=doubt)


def _centernet_maps(output: Any, count: int) -> tuple[dict[str, torch.Tensor], bool]:
    """CenterNet's maps by what they hold, and whether that is sure: by names, and else by channels and order."""
    stages = output if isinstance(output, (list, tuple)) else [output]
    heads = stages[-1] if stages and not isinstance(stages[-1], (list, tuple, torch.Tensor)) else output
    if not nested.items(heads) and hasattr(heads, "__dict__"):
        heads = vars(heads)
    maps: dict[str, torch.Tensor] = {}
    pairs, others = list[torch.Tensor](), list[torch.Tensor]()
    for path, raw in nested.paths(heads):
        if raw.ndim != 4 or len(raw) != count:
            continue
        name = next((key.lower() for key in reversed(path) if isinstance(key, str)), "")
        fitting = [role for role, parts in CENTERNET.items() if any(part in name for part in parts)]
        role = fitting[0] if fitting else None
        if role == "heat" or (role is not None and raw.shape[1] == 2):
            maps.setdefault(role, raw)
        else:
            (pairs if raw.shape[1] == 2 else others).append(raw)
    is_named = bool({"heat", "sizes"} & set(maps))
    is_sure = is_named or (len(others) == 1 and len(pairs) == 2 - len(maps))
    if "heat" not in maps:
        heats = others or pairs[:1]
        if len(heats) != 1:
            return {}, False
        maps["heat"] = heats[0]
        pairs = pairs if others else pairs[1:]
    for role in ("sizes", "offset"):
        if role not in maps and pairs:
            maps[role] = pairs.pop(0)
    return ({}, False) if pairs else (maps, is_sure)


LAYOUTS: dict[str, Callable[[Any, int, Size | None], Found | None]] = {
    "results": _results, "cells": _cells, "detr": partial(_queries, background=True),
    "deformable detr": partial(_queries, background=False),
    "retinanet": partial(_anchors, scales=(1.0, 1.0), background=False),
    "ssd": partial(_anchors, scales=(10.0, 5.0), background=True), "centernet": _centernet, "fcos": _fcos,
    "yolov10": _end_to_end, "yolov8": _yolov8, "yolov5": _yolov5, "yolox": _yolox, "yolov8 maps": _yolov8_maps,
}  # fmt: skip
"""What is tried in turn; the first that fits is it. Each returns None for outputs of another kind."""
UNSURE: dict[str, Callable[[Any, int], bool]] = {
    "detr": _ends_in_no_object,
    "ssd": lambda output, count: False,
    "yolov10": _are_corners,
}
"""Layouts that look like others, and when to try them without their name."""


def _tensor(output: Any, count: int) -> torch.Tensor | None:
    found = find_tensor(output, count, (3,), ())
    return found if found is not None and found.is_floating_point() else None


def _levels(output: Any, count: int) -> list[torch.Tensor] | None:
    """Maps of several resolutions with the same channels."""
    maps = list(output) if isinstance(output, (list, tuple)) else []
    if len(maps) < 2 or not all(isinstance(each, torch.Tensor) and each.ndim == 4 for each in maps):
        return None
    halves = all(one.shape[-1] > other.shape[-1] for one, other in pairwise(maps))
    return maps if halves and {each.shape[:2] for each in maps} == {(count, maps[0].shape[1])} else None


def _strides(maps: Sequence[torch.Tensor], size: Size | None) -> Sequence[float]:
    if size is None:
        return STRIDES[: len(maps)]
    return [2.0 ** round(torch.tensor(size[-1] / each.shape[-1]).log2().item()) for each in maps]


def cell_middles(maps: torch.Tensor) -> torch.Tensor:
    """The middle ``(cells, 2)`` of each cell of maps, in cells."""
    y, x = torch.meshgrid(*(torch.arange(n).to(maps) + 0.5 for n in maps.shape[-2:]), indexing="ij")
    return torch.stack([x, y], -1).flatten(0, 1)


def boxes_from_sides(middles: torch.Tensor, sides: torch.Tensor) -> torch.Tensor:
    """Boxes whose left, top, right and bottom have these distances from a point."""
    return torch.cat([middles - sides[..., :2], middles + sides[..., 2:]], -1)


def read_bins(
    maps: Sequence[torch.Tensor], strides: Sequence[float], bins: int, before: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The class logits and boxes in maps ``(N, K + 4 * bins, h, w)``, with as many classes ``before`` the bins.

    The distances to the four sides are the means of softmaxes over 0, 1, ... strides (Li et al., "Generalized Focal
    Loss", NeurIPS 2020).
    """
    logits, boxes = [], []
    for raw, stride in zip(maps, strides, strict=True):
        cells = raw.flatten(2).transpose(1, 2)
        shares = cells[..., before : before + 4 * bins].reshape(*cells.shape[:2], 4, bins).softmax(-1)
        boxes.append(stride * boxes_from_sides(cell_middles(raw), shares @ torch.arange(bins).to(raw)))
        logits.append(torch.cat([cells[..., :before], cells[..., before + 4 * bins :]], -1))
    return torch.cat(logits, 1), torch.cat(boxes, 1)


def _around(middles: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    """Boxes of this width and height around their middles."""
    return torch.cat([middles - wide / 2, middles + wide / 2], -1)


def _in_pixels(rows: torch.Tensor) -> bool:
    """Whether rows begin with a middle, a width and a height in pixels, rather than with probabilities or logits."""
    return not _within(rows[..., :4]) and not bool((rows[..., 2:4] < 0).any())


def _within(values: torch.Tensor) -> bool:
    """Whether no value lies outside 0 to 1; one that is no number does not."""
    return not bool(((values < 0) | (values > 1)).any())
