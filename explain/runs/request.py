"""What is asked of every photo of a run: maps, metrics and labels of a batch, as they are stored."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from explain._utils.errors import RunError, TargetError, naming, overheard, shown
from explain.attribution.api import attribute
from explain.attribution.encoding import encode
from explain.attribution.records import versions
from explain.attribution.result import Attribution
from explain.attribution.selection import select
from explain.explanation.explainer import Explainer
from explain.explanation.photos import rows_are_apart
from explain.hooks import intervene
from explain.methods.base import Method, MethodLike
from explain.metrics import Metric, ReattributionMetric, evaluate, get_metric
from explain.runs import preparing
from explain.runs.labels import Labels
from explain.runs.manifest import identity, named_layer
from explain.runs.preparing import Prepared, Ready
from explain.store.manifest import described_method
from explain.store.sources import Failed, Source, boxes_as_text, labels_as_text, on_input
from explain.store.writing import FORMAT, MapRecord, PhotoRecord, pack
from explain.targets.outputs import Outputs, Prediction
from explain.targets.resolve import TargetLike, one_per_image

TIME = "%Y-%m-%dT%H:%M:%SZ"
Figures = dict[str, float | None]


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
        if explainer.layout is not None:
            got = f"one of frames or tiles, layout {explainer.layout}"
            raise RunError(f"explainer must be one of photos in a run, got {got}; take explainer.each")
        if one_per_image(target) is not None:
            raise TargetError(f"target must be one for all photos, got {shown(target)}; targets= takes several")
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

    def manifest(self, source: Source, *, trained: bool = False) -> dict[str, Any]:
        """What fixes a run, in values of JSON; ``trained`` says that the model changes meanwhile."""
        methods: Any = self.requested
        if not isinstance(methods, str):
            methods = {method.name: described_method(method) for method in methods}
        options = {name: encode(value) for name, value in self.options.items() if name != "layer"}
        for name in ("progress", "keep_partial"):
            options.pop(name, None)
        found = {
            "format": FORMAT,
            "source": source.identity(),
            **identity(self.explainer, trained=trained),
            "methods": methods,
            "targets": [encode(target) for target in self.targets],
            "metrics": {metric.name: repr(metric) for metric in self.metrics},
            "layer": named_layer(self.explainer.model, self.options.get("layer")),
            **options,
            "versions": {name: version for name, version in versions().items() if name != "torchvision"},
            "device": str(self.device),
            "begun": time.strftime(TIME, time.gmtime()),
        }
        plain: dict[str, Any] = json.loads(json.dumps(found))  # so that it compares with what was read
        return plain

    def at_once(self, photo: Prepared) -> int:
        """How many photos like this one are explained together."""
        if self._independent is False:
            return 1
        return self.batch_size or preparing.at_once(photo.x, self.device)

    def each(self, ready: Iterable[Ready], labels: Labels) -> Iterator[list[PhotoRecord | Failed]]:
        """Explain photos in batches, as they come; the results of each batch."""
        for batch in preparing.in_batches(ready, self.at_once):
            if isinstance(batch, Failed):
                yield [batch]
            else:
                with intervene(self.explainer.model, self.explainer.interventions):
                    found = preparing.each_explained(batch, lambda photos: self.answers(photos, labels))
                yield found

    def answers(self, photos: list[Prepared], labels: Labels) -> list[PhotoRecord]:
        """Explain photos whose inputs have one shape, together where that is the same as each alone."""
        if self._independent is None and len(photos) > 1:
            self._independent = rows_are_apart(self.explainer.model, self._batch(photos[:1]))
        if len(photos) > 1 and not self._independent:
            return [answer for photo in photos for answer in self.answers([photo], labels)]
        notes: list[str] = []
        with overheard(notes), naming([photo.entry.name for photo in photos]):
            x = self._batch(photos)
            found = self._explained(x, photos[0].lacking)  # of a batch, all photos lack the same
            logits = next(iter(found[0].values())).logits
            probabilities = self.explainer._probabilities(x, logits)
            predictions = self.explainer._answers(len(photos), probabilities, logits)
            of_photos: list[torch.Tensor | None] = [None] * len(photos)
            if probabilities is not None:
                of_photos = list(probabilities.float().cpu())
            results: list[list[MapRecord]] = [[] for _ in photos]
            for target, maps in zip(self.targets, found, strict=False):
                figures = self._evaluated(photos, x, maps, target)
                for name, attribution in maps.items():
                    rows = self._results(attribution.converted(torch.Tensor.cpu), of_photos)
                    for i, row in enumerate(rows):
                        results[i].append(replace(row, metrics={**row.metrics, **figures[i][name]}))
        records_of_photos = []
        for i, photo in enumerate(photos):
            columns = self._columns(photo, labels, of_photos[i], predictions[i])
            said = photo.notes if i else (*photo.notes, *notes)
            records_of_photos.append(PhotoRecord(columns, tuple(results[i]), said, photo.lacking is not None))
        return records_of_photos

    def _batch(self, photos: list[Prepared]) -> torch.Tensor:
        return self.explainer._placed(torch.stack([photo.x for photo in photos]))

    def _explained(self, x: torch.Tensor, lacking: frozenset[str] | None) -> list[dict[str, Attribution]]:
        """The maps of a batch for each target, by methods: all of the run, or those that the photos lack."""
        explainer = self.explainer
        if self.methods is None:  # those of a group are chosen by the first photo
            selection = select(
                explainer.model,
                x[:1],
                str(self.requested),
                layer=self.options.get("layer"),
                target=self.targets[0],
                categories=explainer.categories,
            )
            self.methods = explainer._methods(selection.methods)
        return attribute(
            explainer.model,
            x,
            [method for method in self.methods if lacking is None or method.name in lacking],
            targets=self.targets,
            categories=explainer.categories,
            activation=explainer.activation,
            **self.options,
        )

    def _evaluated(
        self, photos: Sequence[Prepared], x: torch.Tensor, maps: Mapping[str, Attribution], target: TargetLike
    ) -> list[dict[str, Figures]]:
        """The metrics of each photo by method, None where one is not defined: those of boxes need photos with boxes."""
        boxes = [on_input(photo.boxes, photo.box, photo.x.shape[-2:]) for photo in photos]
        of_objects = [metric for metric in self.metrics if metric.needs_object]
        others = [metric for metric in self.metrics if not metric.needs_object]
        undefined: Figures = {metric.name: None for metric in self.metrics}
        figures = [{name: dict(undefined) for name in maps} for _ in photos]
        everywhere = list(range(len(photos)))
        with_boxes = [i for i in everywhere if boxes[i]]
        for metrics, rows in ((others, everywhere), (of_objects, with_boxes)):
            if not metrics or not rows:
                continue
            chosen = {name: _rows(attribution, rows) for name, attribution in maps.items()}
            objects = [boxes[i] for i in rows] if metrics is of_objects else None
            for name, columns in self._table(x[rows], chosen, metrics, target, objects).items():
                for metric, values in columns.items():
                    for i, value in zip(rows, values.tolist(), strict=True):
                        figures[i][name][metric] = None if math.isnan(value) else value
        return figures

    def _table(
        self,
        x: torch.Tensor,
        maps: Mapping[str, Attribution],
        metrics: Sequence[Metric],
        target: TargetLike,
        boxes: Any,
    ) -> Mapping[str, Mapping[str, torch.Tensor]]:
        judged: Any = maps
        if any(isinstance(metric, ReattributionMetric) for metric in metrics):
            judged = {method.name: method for method in self.methods or () if method.name in maps}
        classes = next(iter(maps.values())).target
        return evaluate(
            self.explainer.model,
            x,
            judged,
            metrics,
            boxes=boxes,
            target=target if isinstance(classes, str) else classes,
            activation=self.explainer.activation,
            layer=self.options.get("layer"),
            fuse=self.options.get("fuse"),
            batch_size=self.options.get("batch_size"),
        )

    def _results(self, attribution: Attribution, probabilities: Sequence[torch.Tensor | None]) -> Iterator[MapRecord]:
        """The rows of one method and target, one for each photo, whose ``probabilities`` are known."""
        outputs = self.explainer._outputs or Outputs()
        classes = None if attribution.logits is None else attribution.logits.shape[1]
        layer = json.dumps(attribution.layer) if isinstance(attribution.layer, tuple) else attribution.layer
        errors = attribution.relative_error
        for image, of_photo in enumerate(probabilities):
            index = None if isinstance(attribution.target, str) else int(attribution.target[image])
            target = str(attribution.target)
            if index is not None:
                target = outputs.label(self.explainer.categories, index, classes)
            samples = _figure(attribution.spent, image)
            yield MapRecord(
                method=attribution.method,
                target=target,
                index=index,
                score=float(attribution.score[image]),
                probability=_probability(of_photo, index),
                layer=layer,
                map=pack(attribution.values[image].float().numpy()),
                delta=_figure(attribution.delta, image),
                runs=None if samples is None else int(samples),
                error=_figure(errors, image),
                metrics=_set_figures(attribution, image),
            )

    def _columns(
        self, photo: Prepared, labels: Labels, probabilities: torch.Tensor | None, best: Prediction | None
    ) -> dict[str, Any]:
        """The columns of ``photos``."""
        true_labels = labels.of(photo.label)
        index, label = _most_probable(true_labels, probabilities)
        # Labels of a model with one output may be 0 for no and 1 for yes: its class 0 is none of them.
        single = probabilities is not None and len(probabilities) == 1
        prediction = None if best is None else best.amount if best.probability is None else best.label
        is_class = best is not None and best.probability is not None and not single
        width, height = photo.size
        input_height, input_width = photo.x.shape[-2:]
        return {
            "name": photo.entry.name,
            "path": photo.entry.path,
            "stamp": photo.entry.stamp,
            "sha256": photo.sha256,
            "width": width,
            "height": height,
            "label": label,
            "label_class": index,
            "label_probability": None if single else _probability(probabilities, index),
            "prediction": prediction,
            "prediction_class": best.category if best is not None and is_class else None,
            "probability": None if best is None else best.probability,
            "left": float(photo.box.left),
            "top": float(photo.box.top),
            "right": float(photo.box.right),
            "bottom": float(photo.box.bottom),
            "input_height": int(input_height),
            "input_width": int(input_width),
            "boxes": boxes_as_text(photo.boxes),
            "labels": labels_as_text(true_labels),
        }


def _rows(attribution: Attribution, rows: list[int]) -> Attribution:
    return attribution.converted(lambda tensor: tensor[rows])


def _figure(values: torch.Tensor | None, image: int) -> float | None:
    """The figure of an image, None where it is not known."""
    if values is None or values[image].isnan():
        return None
    return float(values[image])


def _set_figures(attribution: Attribution, image: int) -> Figures:
    """The share of the photo in its first set of regions, and the scores with it alone and without it."""
    if attribution.sets is None:
        return {}
    sets = attribution.sets[image]
    return {f"set_{name}": getattr(sets[0], name) if sets else None for name in ("size", "alone", "without")}


def _most_probable(
    labels: Sequence[tuple[int | None, str]], probabilities: torch.Tensor | None
) -> tuple[int | None, str | None]:
    """Of several labels that are true, the one that the model finds most probable: a prediction of any is right."""
    if not labels:
        return None, None
    return max(labels, key=lambda label: _probability(probabilities, label[0]) or 0.0)


def _probability(probabilities: torch.Tensor | None, index: int | None) -> float | None:
    """The probability of a class, where it is one of the model's."""
    if probabilities is None or index is None or index >= len(probabilities):
        return None
    return float(probabilities[index])
