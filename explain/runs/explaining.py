"""What is asked of every photo of a run, and the answers for a batch of photos: maps, metrics, labels."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from explain._utils.errors import RunError, TargetError, either, naming, overheard, shown
from explain.attribution.api import attribute
from explain.attribution.result import Attribution
from explain.attribution.selection import select
from explain.data.images import Box
from explain.explanation.explainer import Explainer
from explain.explanation.photos import rows_are_apart
from explain.methods import Method
from explain.methods.registry import MethodLike
from explain.metrics import Metric, ReattributionMetric, evaluate, get_metric
from explain.models import FiveCrops
from explain.models.classifier import class_label
from explain.runs.labels import Labels
from explain.runs.photo_identity import boxes_as_text
from explain.runs.preparing import Failed, Prepared, Ready, at_once, each_explained, in_batches
from explain.runs.schema import pack
from explain.runs.sources import Corners
from explain.runs.store import MapRecord, PhotoRecord
from explain.targets.outputs import Prediction
from explain.targets.resolve import TargetLike, one_per_image

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
    again = any(isinstance(metric, ReattributionMetric) for metric in metrics)
    placed = [metric for metric in metrics if metric.needs_object]
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


class RunRequest:
    """What is asked of every photo of a run.

    Args:
        explainer: the model with all that belongs to it.
        methods, target, options: as for calling an `Explainer`.
        metrics: how the maps are judged.

    Raises:
        ExplainError: something of it is unknown, or does not go together.
    """

    def __init__(
        self,
        explainer: Explainer,
        methods: MethodLike | Iterable[MethodLike],
        target: TargetLike,
        metrics: Sequence[Metric | str],
        **options: Any,
    ) -> None:
        if isinstance(explainer.preprocess, FiveCrops):
            remedy = either("use crop='whole'", "use --crop whole")
            raise RunError(f"explainer must see one part of each photo in a run, got five crops; {remedy}")
        self.explainer = explainer
        if one_per_image(target) is not None:
            raise TargetError(
                f"target must be one for all photos of a run, got {shown(target)}; targets= takes several"
            )
        request = explainer._request(methods, target, **options)
        self.asked: Sequence[Method] | str = request.methods
        self.methods = None if isinstance(request.methods, str) else list(request.methods)
        self.targets = request.targets
        self.options: Any = request.options
        self.metrics = list({metric.name: metric for metric in map(get_metric, metrics)}.values())
        self.batch_size: int | None = options.get("batch_size")
        self._apart: bool | None = False if request.alone else None

    def at_once(self, photo: Prepared) -> int:
        """How many photos like this one are explained together."""
        if self._apart is False:
            return 1
        return self.batch_size or at_once(photo.x, self._device)

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self.explainer.model.parameters()), torch.device("cpu"))

    def each(self, ready: Iterable[Ready], labels: Labels) -> Iterator[list[PhotoRecord | Failed]]:
        """Explain photos in batches, as they come; the results of each batch."""
        for batch in in_batches(ready, self.at_once):
            if isinstance(batch, Failed):
                yield [batch]
            else:
                yield each_explained(batch, lambda photos: self.answers(photos, labels))

    def answers(self, photos: list[Prepared], labels: Labels) -> list[PhotoRecord]:
        """Explain photos whose inputs have one shape, together where that is the same as each alone."""
        if self._apart is None and len(photos) > 1:
            self._apart = rows_are_apart(self.explainer.model, self._batch(photos[:1]))
        if len(photos) > 1 and not self._apart:
            return [answer for photo in photos for answer in self.answers([photo], labels)]
        if self.metrics:  # those with boxes first, so that each kind is a part in one piece
            photos = sorted(photos, key=lambda photo: not boxes_on_input(photo))
        notes: list[str] = []
        with overheard(notes), naming([photo.entry.name for photo in photos]):
            x = self._batch(photos)
            if self.methods is None:
                self.methods = self._chosen(x[:1])
            found = attribute(
                self.explainer.model, x, self.methods, targets=self.targets, categories=self.explainer.categories,
                activation=self.explainer.activation, **self.options,
            )  # fmt: skip
            return self._stored(photos, x, found, labels, notes)

    def _batch(self, photos: list[Prepared]) -> torch.Tensor:
        return self.explainer._placed(torch.stack([photo.x for photo in photos]))

    def _chosen(self, x: torch.Tensor) -> list[Method]:
        """The methods of a group, which are chosen by the first photo."""
        assert isinstance(self.asked, str)
        names = select(
            self.explainer.model, x, self.asked, layer=self.options.get("layer"), target=self.targets[0],
            categories=self.explainer.categories,
        ).methods  # fmt: skip
        return self.explainer._methods(names)

    def _stored(
        self,
        photos: list[Prepared],
        x: torch.Tensor,
        found: Sequence[dict[str, Attribution]],
        labels: Labels,
        notes: list[str],
    ) -> list[PhotoRecord]:
        given = self.explainer._probabilities(x, next(iter(found[0].values())).logits)
        probabilities = None if given is None else given.float().cpu()
        results: list[list[MapRecord]] = [[] for _ in photos]
        for place, of_target in enumerate(found):
            figures = self._figures(photos, x, of_target, place)
            for name, attribution in of_target.items():
                for i, result in enumerate(self._results(attribution, probabilities)):
                    results[i].append(replace(result, metrics=figures[i][name] if figures else {}))
        return [
            PhotoRecord(
                self._row(photo, labels, None if probabilities is None else probabilities[i]), tuple(results[i]),
                   (*photo.notes, *(notes if not i else ())))
            for i, photo in enumerate(photos)
        ]  # fmt: skip

    def _figures(self, photos: list[Prepared], x: torch.Tensor, found: dict[str, Attribution], place: int) -> Any:
        if not self.metrics:
            return None
        methods = {method.name: method for method in self.methods or ()}
        options = {name: self.options.get(name) for name in ("layer", "fuse", "batch_size")}
        options["activation"] = self.explainer.activation
        return judged(self.explainer.model, x, photos, found, methods, self.metrics, self.targets[place], **options)

    def _results(self, attribution: Attribution, probabilities: torch.Tensor | None) -> list[MapRecord]:
        """The rows of one method and target, one for each photo."""
        values: np.ndarray[Any, Any] = attribution.values.float().cpu().numpy()
        layer = attribution.layer if not isinstance(attribution.layer, tuple) else json.dumps(attribution.layer)
        columns = [
            _numbers(each, len(values)) for each in (attribution.score, attribution.delta, attribution.relative_error)
        ]
        spent = _numbers(attribution.spent, len(values))
        found = []
        for i, (score, delta, error) in enumerate(zip(*columns, strict=True)):
            index = None if isinstance(attribution.target, str) else int(attribution.target[i])
            known = probabilities is not None and index is not None and index < probabilities.shape[1]
            found.append(MapRecord(
                method=attribution.method,
                target=str(attribution.target) if index is None else class_label(self.explainer.categories, index),
                index=index,
                score=score or 0.0,
                probability=float(probabilities[i, index]) if known else None,  # type: ignore[index]
                layer=layer,
                map=pack(values[i]),
                delta=delta,
                runs=None if spent[i] is None else int(spent[i]),  # type: ignore[arg-type]
                error=None if error is None or math.isnan(error) else error,
            ))  # fmt: skip
        return found

    def _row(self, photo: Prepared, labels: Labels, probabilities: torch.Tensor | None) -> tuple[Any, ...]:
        """The columns of ``photos``."""
        index, label = labels.of(photo.label)
        best = self._prediction(probabilities)
        # Labels of a model with one output may be 0 for no and 1 for yes: its class 0 is none of them.
        single = probabilities is not None and len(probabilities) == 1
        known = probabilities is not None and index is not None and index < len(probabilities) and not single
        return (
            photo.entry.name, photo.entry.path, photo.entry.stamp, photo.sha256, *photo.size, label, index,
            float(probabilities[index]) if known else None,  # type: ignore[index]
            None if best is None else best.label, None if best is None or single else best.category,
            None if best is None else best.probability,
            photo.box.left, photo.box.top, photo.box.right, photo.box.bottom, *map(int, photo.x.shape[-2:]),
            boxes_as_text(photo.boxes),
        )  # fmt: skip

    def _prediction(self, probabilities: torch.Tensor | None) -> Prediction | None:
        """The most probable label."""
        outputs = self.explainer._outputs
        if probabilities is None or outputs is None:
            return None
        return replace(outputs, exclusive=True).predicted(probabilities, self.explainer.categories, 1)[0]


def _numbers(values: torch.Tensor | None, count: int) -> list[float | None]:
    return [None] * count if values is None else [float(value) for value in values.tolist()]
