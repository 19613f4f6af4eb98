"""Metrics of the maps of a batch; photos without boxes are left out where a metric needs them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from explain.attribution import Attribution
from explain.images import Box
from explain.methods import Method
from explain.metrics import Metric, OfMethod, OfObject, evaluate
from explain.runs.preparing import Prepared
from explain.runs.sources import Corners
from explain.targets import TargetLike

Figures = list[dict[str, dict[str, float | None]]]
"""For each photo, by method: a figure for each metric, None where it is not defined."""


def boxes_on_input(photo: Prepared) -> list[Corners]:
    """Return the boxes of a photo in pixels of the model's input, as far as the model saw them."""
    return on_input(photo.boxes, photo.box, photo.x.shape[-2:])


def on_input(boxes: Iterable[Corners], seen: Box, size: Sequence[int]) -> list[Corners]:
    """Return boxes in pixels of an input of ``size`` (height, width) that shows the part ``seen`` of a photo.

    >>> on_input([(10, 0, 30, 20)], Box(20, 0, 40, 20), (10, 10))
    [(0.0, 0.0, 5.0, 10.0)]
    """
    height, width = size
    across, down = width / seen.width, height / seen.height
    found = []
    for x0, y0, x1, y1 in boxes:
        left, right = ((x - seen.left) * across for x in (x0, x1))
        top, bottom = ((y - seen.top) * down for y in (y0, y1))
        edges = (max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height)))
        if round(edges[0]) < round(edges[2]) and round(edges[1]) < round(edges[3]):
            found.append(edges)
    return found


def judged(
    model: torch.nn.Module,
    x: torch.Tensor,
    photos: Sequence[Prepared],
    found: Mapping[str, Attribution],
    methods: Mapping[str, Method],
    metrics: Sequence[Metric],
    target: TargetLike,
    **options: Any,
) -> Figures:
    """Judge the maps of a batch.

    Args:
        model, x: the model, and its inputs ``(N, C, H, W)``, those with boxes first.
        photos: what they were made of.
        found: the maps by method.
        methods: the methods, which are run again where a metric asks for it.
        metrics: how to judge.
        target: what was explained, where it is no class.
        options: as for `explain.evaluate`.
    """
    again = any(isinstance(metric, OfMethod) for metric in metrics)
    placed = [metric for metric in metrics if isinstance(metric, OfObject)]
    boxes = [boxes_on_input(photo) for photo in photos] if placed else []
    with_boxes = sum(map(bool, boxes))
    empty: dict[str, float | None] = {metric.name: None for metric in metrics}
    figures: Figures = [{name: dict(empty) for name in found} for _ in photos]
    parts = [(slice(0, len(photos)), list(metrics))]
    if placed:
        parts = [
            (slice(0, with_boxes), list(metrics)),
            (slice(with_boxes, len(photos)), [metric for metric in metrics if metric not in placed]),
        ]
    for rows, asked in parts:
        if not asked or not len(photos[rows]):
            continue
        maps = {name: each[rows] for name, each in found.items()}
        classes = next(iter(maps.values())).target
        given: Any = {name: methods[name] for name in maps} if again else maps
        known = boxes[rows] if placed and rows.start == 0 else None
        table = evaluate(
            model, x[rows], given, asked, boxes=known, target=target if isinstance(classes, str) else classes, **options
        )
        for name in maps:
            for metric, values in table[name].items():
                for place, value in enumerate(values.tolist()):
                    figures[rows.start + place][name][metric] = None if math.isnan(value) else value
    return figures
