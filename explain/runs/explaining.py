"""Explaining batches of photos: maps, metrics, labels, as they are stored."""

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
from explain.runs.known_photos import Labels, boxes_as_text
from explain.runs.preparing import Failed, Prepared, Ready, at_once, each_explained, in_batches
from explain.runs.schema import pack
from explain.runs.sources import Corners
from explain.runs.store import MapRecord, PhotoRecord
from explain.targets.resolve import TargetLike, one_per_image


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


class RunRequest:
    """What to explain of every photo of a run, and how.

    Args:
        explainer: the model with all that belongs to it.
        methods, target, options: as for calling an `Explainer`.
        metrics: how the maps are evaluated.

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
        if one_per_image(target) is not None:
            raise TargetError(
                f"target must be one for all photos of a run, got {shown(target)}; targets= takes several"
            )
        request = explainer._request(methods, target, **options)
        self.explainer = explainer
        self.requested: Sequence[Method] | str = request.methods
        self.methods = None if isinstance(request.methods, str) else list(request.methods)
        self.targets = request.targets
        self.options: Any = request.options
        self.metrics = list({metric.name: metric for metric in map(get_metric, metrics)}.values())
        self.batch_size: int | None = options.get("batch_size")
        self._independent: bool | None = False if request.alone else None

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next((p.device for p in self.explainer.model.parameters()), torch.device("cpu"))

    def at_once(self, photo: Prepared) -> int:
        """How many photos like this one are explained together."""
        if self._independent is False:
            return 1
        return self.batch_size or at_once(photo.x, self.device)

    def each(self, ready: Iterable[Ready], labels: Labels) -> Iterator[list[PhotoRecord | Failed]]:
        """Explain photos in batches, as they come; the results of each batch."""
        for batch in in_batches(ready, self.at_once):
            if isinstance(batch, Failed):
                yield [batch]
            else:
                yield each_explained(batch, lambda photos: self.answers(photos, labels))

    def answers(self, photos: list[Prepared], labels: Labels) -> list[PhotoRecord]:
        """Explain photos whose inputs have one shape, together where that is the same as each alone."""
        if self._independent is None and len(photos) > 1:
            self._independent = rows_are_apart(self.explainer.model, self._batch(photos[:1]))
        if len(photos) > 1 and not self._independent:
            return [answer for photo in photos for answer in self.answers([photo], labels)]
        if self.metrics:  # those with boxes first, so that each kind is one slice of the batch
            photos = sorted(photos, key=lambda photo: not boxes_on_input(photo))
        notes: list[str] = []
        with overheard(notes), naming([photo.entry.name for photo in photos]):
            x = self._batch(photos)
            if self.methods is None:
                self.methods = self._of_group(x[:1])
            found = attribute(
                self.explainer.model, x, self.methods, targets=self.targets, categories=self.explainer.categories,
                activation=self.explainer.activation, **self.options,
            )  # fmt: skip
            return self._records(photos, x, found, labels, notes)

    def _batch(self, photos: list[Prepared]) -> torch.Tensor:
        return self.explainer._placed(torch.stack([photo.x for photo in photos]))

    def _of_group(self, x: torch.Tensor) -> list[Method]:
        """The methods of a group, chosen by the first photo."""
        assert isinstance(self.requested, str)
        names = select(
            self.explainer.model, x, self.requested, layer=self.options.get("layer"), target=self.targets[0],
            categories=self.explainer.categories,
        ).methods  # fmt: skip
        return self.explainer._methods(names)

    def _records(
        self,
        photos: list[Prepared],
        x: torch.Tensor,
        found: Sequence[dict[str, Attribution]],
        labels: Labels,
        notes: list[str],
    ) -> list[PhotoRecord]:
        logits = next(iter(found[0].values())).logits
        probabilities = self.explainer._probabilities(x, logits)
        probabilities = None if probabilities is None else probabilities.float().cpu()
        results: list[list[MapRecord]] = [[] for _ in photos]
        for target, of_target in zip(self.targets, found, strict=True):
            metrics = self._evaluated(photos, x, of_target, target)
            for name, attribution in of_target.items():
                for i, result in enumerate(self._results(attribution, probabilities)):
                    results[i].append(replace(result, metrics=metrics[i][name]))
        return [
            PhotoRecord(
                self._columns(photo, labels, None if probabilities is None else probabilities[i]),
                tuple(results[i]),
                (*photo.notes, *(notes if i == 0 else ())),
            )
            for i, photo in enumerate(photos)
        ]

    def _evaluated(
        self, photos: Sequence[Prepared], x: torch.Tensor, found: Mapping[str, Attribution], target: TargetLike
    ) -> list[dict[str, dict[str, float | None]]]:
        """The metrics of each photo by method, None where one is not defined: those of boxes need photos with boxes."""
        by_box = any(metric.needs_object for metric in self.metrics)
        boxes = [boxes_on_input(photo) for photo in photos]
        with_boxes = sum(map(bool, boxes)) if by_box else len(photos)
        others = [metric for metric in self.metrics if not metric.needs_object]
        parts = [(slice(0, with_boxes), self.metrics), (slice(with_boxes, len(photos)), others)]
        undefined: dict[str, float | None] = {metric.name: None for metric in self.metrics}
        figures = [{name: dict(undefined) for name in found} for _ in photos]
        reattributes = any(isinstance(metric, ReattributionMetric) for metric in self.metrics)
        methods = {method.name: method for method in self.methods or ()}
        options = {name: self.options.get(name) for name in ("layer", "fuse", "batch_size")}
        for part, metrics in parts:
            if not metrics or not photos[part]:
                continue
            maps = {name: attribution[part] for name, attribution in found.items()}
            classes = next(iter(maps.values())).target
            given: Any = {name: methods[name] for name in maps} if reattributes else maps
            table = evaluate(
                self.explainer.model, x[part], given, metrics, boxes=boxes[part] if by_box and not part.start else None,
                target=target if isinstance(classes, str) else classes, activation=self.explainer.activation, **options,
            )  # fmt: skip
            for name in maps:
                for metric, values in table[name].items():
                    for i, value in enumerate(values.tolist(), part.start):
                        figures[i][name][metric] = None if math.isnan(value) else value
        return figures

    def _results(self, attribution: Attribution, probabilities: torch.Tensor | None) -> list[MapRecord]:
        """The rows of one method and target, one for each photo."""
        values: np.ndarray[Any, Any] = attribution.values.float().cpu().numpy()
        layer = attribution.layer if not isinstance(attribution.layer, tuple) else json.dumps(attribution.layer)
        optional = (attribution.delta, attribution.relative_error, attribution.spent)
        deltas, errors, spent = ([math.nan] * len(values) if each is None else each.tolist() for each in optional)
        found = []
        for i, score in enumerate(attribution.score.tolist()):
            index = None if isinstance(attribution.target, str) else int(attribution.target[i])
            known = probabilities is not None and index is not None and index < probabilities.shape[1]
            found.append(MapRecord(
                method=attribution.method,
                target=str(attribution.target) if index is None else class_label(self.explainer.categories, index),
                index=index,
                score=float(score),
                probability=float(probabilities[i, index]) if known else None,  # type: ignore[index]
                layer=layer,
                map=pack(values[i]),
                delta=None if math.isnan(deltas[i]) else deltas[i],
                runs=None if math.isnan(spent[i]) else int(spent[i]),
                error=None if math.isnan(errors[i]) else errors[i],
            ))  # fmt: skip
        return found

    def _columns(self, photo: Prepared, labels: Labels, probabilities: torch.Tensor | None) -> tuple[Any, ...]:
        """The columns of ``photos``."""
        index, label = labels.of(photo.label)
        best, outputs = None, self.explainer._outputs
        if probabilities is not None and outputs is not None:
            best = replace(outputs, exclusive=True).predicted(probabilities, self.explainer.categories, 1)[0]
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
