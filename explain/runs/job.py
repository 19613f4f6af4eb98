"""`Job`: what is explained of every photo of a source, and how; its answers as they are stored."""

import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from explain._utils.errors import (
    MethodError,
    RunError,
    TargetError,
    collect_warnings,
    naming,
    shown,
)
from explain._utils.modules import parameters_of
from explain._utils.options import by_name
from explain._utils.rounding import finite_or_none
from explain.attribution.encoding import encode
from explain.attribution.records import versions
from explain.attribution.result import Attribution, set_figures
from explain.data.boxes import Corners
from explain.explanation.detected import Located
from explain.explanation.explainer import Explainer, Session
from explain.explanation.photos import explained, samples_are_apart
from explain.explanation.tiles import canvas_of, tiles_on_photo
from explain.layers.intervening import intervene
from explain.methods.base import Method, MethodLike, get_method
from explain.metrics import Metric, evaluate, get_metric
from explain.metrics.evaluation import with_check
from explain.models import Classifier
from explain.runs import preparing
from explain.runs.labels import Labels, true_labels
from explain.runs.preparing import Prepared, Preparer, Ready
from explain.store.identity import model_identity, named_layer
from explain.store.lists import source_of
from explain.store.manifest import described_method
from explain.store.sources import (
    Failed,
    boxes_as_text,
    boxes_of_class,
    boxes_on_input,
    labels_as_text,
    path_text,
)
from explain.store.writing import FORMAT, PhotoRecord, packed
from explain.targets.labels import class_label
from explain.targets.outputs import Prediction
from explain.targets.resolve import TargetLike, one_per_image

MOST_CLASSES = 256
"""The largest number of classes (of which one is true) of which a photo's row keeps every
probability."""
TIME = "%Y-%m-%dT%H:%M:%SZ"


class Job:
    """All that fixes a run, whatever machine does it; it can be sent to others. Arguments are those
    of `explain.run`.
    """

    is_training = False
    """Whether the model is in training: its weights change, and do not identify the run. The job of
    `explain.training` says True."""

    def __init__(
        self,
        source: Any,
        explainer: Explainer | nn.Module | Classifier | str | None,
        methods: MethodLike | Iterable[MethodLike],
        target: TargetLike = None,
        metrics: Iterable[Metric | str] = (),
        **options: Any,
    ) -> None:
        """Check all arguments before a photo is read. ``methods`` stays None for a group,
        ``_independent`` until it is known whether photos of a batch influence each other.
        """
        self.source = source_of(source)
        self.explainer = explainer if isinstance(explainer, Explainer) else Explainer(explainer)
        if self.explainer.layout is not None:
            raise RunError(
                "explainer must be one of photos, channels first, in a run, got one of layout "
                f"{self.explainer.layout}; take explainer.each"
            )
        if one_per_image(target) is not None:
            raise TargetError(
                f"target must be one for all photos, got {shown(target)}; targets= takes several"
            )
        # such a model takes all bands or slices of a file at once
        self.source.files_are_photos = self.explainer.sees_bands or self.explainer.sees_volumes
        session = self.explainer.session(methods, target, **options)
        if self.source.count == 0:
            where = path_text(str(source))
            raise RunError(f"source must have photos, but {where!r} has none; check its content")
        self.session = session
        self.methods = None if isinstance(session.methods, str) else session.methods
        if self.methods is not None:  # refuses two of one name, under which maps are stored
            by_name(self.methods, get_method, MethodError, "method")
        self.metrics = list(  # each once
            {metric.name: metric for metric in map(get_metric, with_check(metrics))}.values()
        )
        self.labels = Labels(
            self.explainer.categories,
            self.source.classes,
            by_label=self.explainer.activation == "sigmoid",
        )
        self.preparer = Preparer(
            self.source,
            self.explainer.preprocess,
            window=self.explainer.window,
            stack=self.explainer.sees_volumes,
        )
        # where photos must come one at a time, whether they influence each other is not asked
        self._independent: bool | None = False if session.alone else None

    @property
    def device(self) -> torch.device:
        """The device that the model is on; the CPU for a model without parameters."""
        return next((p.device for p in parameters_of(self.explainer.model)), torch.device("cpu"))

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """What fixes a run, in values of JSON: a continued run must have the same, apart from
        `explain.store.manifest.MAY_DIFFER`, so keys and values must stay.
        """
        package_versions = versions()
        package_versions.pop("torchvision", None)  # there only if something has imported it
        content = {
            "format": FORMAT,
            "source": self.source.identity(),
            **self._described,
            "versions": package_versions,
            "device": str(self.device),
            "begun": time.strftime(TIME, time.gmtime()),
        }
        # tuples become lists, as in the stored manifest that this one is compared with
        plain: dict[str, Any] = json.loads(json.dumps(content))
        return plain

    @property
    def _described(self) -> dict[str, Any]:
        """The part of the manifest that says what is explained, and how."""
        session = self.session
        methods: Any = session.methods
        if not isinstance(methods, str):
            methods = {method.name: described_method(method) for method in methods}
        options = {
            name: encode(value)
            for name, value in session.options.items()
            # the layer is added by its name below; the others do not change what is stored
            if name not in ("layer", "progress", "keep_partial")
        }
        return {
            **model_identity(self.explainer, trained=self.is_training),
            "methods": methods,
            "targets": [encode(target) for target in session.targets],
            "metrics": {metric.name: repr(metric) for metric in self.metrics},
            "layer": named_layer(self.explainer.model, session.options.get("layer")),
            **options,
            **({"stack": True} if self.explainer.sees_volumes else {}),
        }

    def explained(self, ready: Iterable[Ready]) -> Iterator[list[PhotoRecord | Failed]]:
        """Explain prepared photos in batches of one kind, as they come; yields each batch's records
        or failures, in the order of ``ready``.
        """
        batches = explained(
            ready, self.answers, alike=self._kind, at_once=self._at_once, apart=self._probe_apart
        )
        for batch in batches:
            yield [preparing.answer_of(photo, result) for photo, result in batch]

    def _at_once(self, photo: Any) -> int:
        """How many photos like this one make a batch: at most ``batch_size``, or what suits the
        input's size; 1 for a model whose photos influence each other.
        """
        if self._independent is False:
            return 1
        most = self.session.options.get("batch_size") or preparing.at_once(photo.x, self.device)
        return self.session.at_once(photo.x[None], most)

    def _kind(self, photo: Ready) -> object:
        """What photos must have in common to be explained in one batch: shape and type of the
        input, and the methods that they lack. None marks a photo that failed, which is passed on.
        """
        if isinstance(photo, Failed):
            return None
        return photo.x.shape, photo.x.dtype, photo.lacking

    def _probe_apart(self, photo: Any) -> bool:
        """Run the model once, on the first photo, to see whether photos of a batch do not influence
        each other: each has the same values as alone. The answer holds for the run."""
        if self._independent is None:
            with intervene(self.explainer.model, self.explainer.interventions):
                self._independent = samples_are_apart(self.explainer.model, self._batch([photo]))
        return self._independent

    def answers(self, photos: Sequence[Any]) -> list[PhotoRecord]:
        """Explain a batch of `Prepared` photos of one kind, and return the record of each, in their
        order. Warnings of the batch become notes of its first photo.
        """
        notes: list[str] = []
        with (
            intervene(self.explainer.model, self.explainer.interventions),
            collect_warnings(notes),
            naming([photo.entry.name for photo in photos]),
        ):
            x = self._batch(photos)
            lacking = photos[0].lacking  # all lack the same: see `_kind`
            # with the targets of this photo, where they are "predicted": it then comes alone
            session = self.session.of_photo(x)
            methods = self._chosen(session, x)
            if lacking is not None:
                methods = [method for method in methods if method.name in lacking]
            session = replace(session, methods=methods)
            # in volumes nothing is located, as a detection is a box in one picture
            answered = session(x, [photo.box for photo in photos if not photo.crops])
            probabilities = answered.probabilities
            photo_probabilities = (
                [None] * len(photos) if probabilities is None else list(probabilities.float().cpu())
            )
            rows_of_photos: list[list[dict[str, Any]]] = [[] for _ in photos]
            for number, maps in enumerate(answered.results):  # of each target
                names = self._names(next(iter(maps.values())), answered.located, number)
                figures = self._evaluated(photos, x, maps, session.targets[number], names)
                for method, attribution in maps.items():
                    on_cpu = attribution.converted(torch.Tensor.cpu)
                    for image, rows in enumerate(rows_of_photos):
                        row = self._result(
                            on_cpu,
                            image=image,
                            photo=photos[image],
                            probabilities=photo_probabilities[image],
                            figures=figures[method],
                        )
                        rows.append({**row, "target": names[image]})
        records = []
        for image, photo in enumerate(photos):
            columns = self._columns(
                photo,
                probabilities=photo_probabilities[image],
                best=answered.predictions[image],
                places=answered.located[image],
            )
            photo_notes = [*photo.notes, *self.labels.notes(photo.label)]
            if image == 0:
                photo_notes += notes
            is_added = photo.lacking is not None
            records.append(
                PhotoRecord(
                    columns, tuple(rows_of_photos[image]), tuple(photo_notes), added=is_added
                )
            )
        return records

    def _batch(self, photos: Sequence[Prepared]) -> torch.Tensor:
        """The inputs of some photos of one shape as a batch ``(N, C, H, W)``, on the device of the
        model."""
        return self.explainer.batch([photo.x for photo in photos])

    def _chosen(self, session: Session, x: torch.Tensor) -> list[Method]:
        """The methods of the run. Those of a group, such as "all", are chosen for the layer and the
        class of the first photo ``x`` ``(N, C, H, W)``, and stay the same for the run."""
        if self.methods is None:
            self.methods = session.methods_for(x[:1])
        return self.methods

    def _names(
        self, attribution: Attribution, places: Sequence[Located | None], number: int
    ) -> list[str]:
        """A target's name on each photo of a batch: the label of its class, or of what was detected
        (``places``; None for a classifier). ``number`` is its position among the targets.
        """
        if isinstance(attribution.target, str):  # no class, but a box, a region or a function
            return [place.names[number] if place else attribution.target for place in places]
        outputs = self.explainer.outputs
        class_count = None if attribution.logits is None else attribution.logits.shape[1]
        indices = attribution.target.tolist()
        return [outputs.label(self.explainer.categories, index, class_count) for index in indices]

    def _evaluated(
        self,
        photos: Sequence[Prepared],
        x: torch.Tensor,
        maps: Mapping[str, Attribution],
        target: TargetLike,
        names: Sequence[str],
    ) -> dict[str, dict[str, list[float]]]:
        """A value for each photo, by method and then metric, of one target in a batch; NaN for
        metrics that need boxes where a photo has none of the target (``names``).
        """
        boxes = [self._boxes(photo, name) for photo, name in zip(photos, names, strict=True)]
        # without any box in the batch, metrics that need one are left out
        metrics = [metric for metric in self.metrics if any(boxes) or not metric.needs_object]
        box_metrics = [metric.name for metric in metrics if metric.needs_object]
        height, width = x.shape[-2:]
        all_undefined = {metric.name: [math.nan] * len(photos) for metric in self.metrics}
        if not metrics:
            return dict.fromkeys(maps, all_undefined)
        # with its method, a metric can explain altered photos again
        methods = {method.name: method for method in self.methods or ()}
        pairs: Any = {
            name: (methods[name], attribution) if name in methods else attribution
            for name, attribution in maps.items()
        }
        # the index of the class for each photo, or the name of a target that is no class
        explained_target = next(iter(maps.values())).target
        option_names = ("layer", "fuse", "batch_size")
        options: Any = {name: self.session.options.get(name) for name in option_names}
        table = evaluate(
            self.explainer.model,
            x,
            pairs,
            metrics,
            # Metrics want a box for every photo: those without get a dummy, whose values are
            # replaced by NaN below. It is half a photo, since metrics warn of whole ones.
            boxes=[of_photo or [(0, 0, max(1, width // 2), height)] for of_photo in boxes]
            if box_metrics
            else None,
            target=target if isinstance(explained_target, str) else explained_target,
            activation=self.explainer.activation,
            **options,
        )
        has_none = torch.tensor([not of_photo for of_photo in boxes])
        figures = {}
        for name, columns in table.items():
            figures[name] = dict(all_undefined)
            for metric, values in columns.items():
                defined = values.cpu()
                if metric in box_metrics:
                    defined = defined.masked_fill(has_none, math.nan)
                figures[name][metric] = defined.tolist()
        return figures

    def _boxes(self, photo: Prepared, target: str) -> list[Corners]:
        """The boxes of the object that count for a target, by the target's name on the photo, in
        pixels of the input; none where no box is known, and of volumes."""
        boxes = boxes_of_class(self.labels.of_boxes(photo.boxes), target)
        return boxes_on_input(boxes, photo.box, photo.x.shape[-2:])

    def _result(
        self,
        attribution: Attribution,
        *,
        image: int,
        photo: Prepared,
        probabilities: torch.Tensor | None,
        figures: Mapping[str, list[float]],
    ) -> dict[str, Any]:
        """Return the columns of ``results``, but the target's name, for a ``photo``, number
        ``image`` of a batch; ``figures`` are each metric's for the batch."""
        one = attribution[image]
        if photo.crops:
            # maps of slices lie on the picture of all of them
            one = tiles_on_photo(one, photo.crops, photo.size)
        index = None if isinstance(attribution.target, str) else int(attribution.target[image])
        spent_runs = _figure(attribution.spent, image)
        metrics: dict[str, float | None] = {
            metric: values[image] for metric, values in figures.items()
        }
        metrics |= set_figures(attribution, image)
        layer = attribution.layer
        placement = None if one.placement is None else one.placement[0]
        return {
            "method": attribution.method,
            "class": index,
            "score": float(attribution.score[image]),
            "probability": _probability(probabilities, index),
            "layer": json.dumps(layer) if isinstance(layer, tuple) else layer,
            "delta": _figure(attribution.delta, image),
            "runs": None if spent_runs is None else int(spent_runs),
            "error": _figure(attribution.relative_error, image),
            "metrics": json.dumps(
                {name: finite_or_none(metrics[name]) for name in sorted(metrics)}
            ),
            **packed(one.values[0].float().numpy(), placement),
        }

    def _columns(
        self,
        photo: Prepared,
        *,
        probabilities: torch.Tensor | None,
        best: Prediction | None,
        places: Located | None,
    ) -> dict[str, Any]:
        """The columns of ``photos`` for one photo of a batch, named as in ``tables.sql``;
        ``probabilities`` ``(K,)``, ``best`` and ``places`` are None where the model has none.
        """
        labels = self.labels.of(photo.label)
        index, label = _most_probable(true_labels(labels), probabilities)
        # To a model with one output, labels may say no (0) and yes (1). These are no indices of
        # its outputs, so that neither the label nor the prediction can be compared as a class.
        has_classes = probabilities is None or len(probabilities) > 1
        prediction = None
        prediction_class = None
        if best is not None and best.probability is None:  # a number, as of a regression
            prediction = best.amount
        elif best is not None:
            prediction = best.label
            prediction_class = best.category if has_classes else None
        width, height = photo.size
        map_size: tuple[int, int] = (photo.x.shape[-2], photo.x.shape[-1])
        if photo.crops:  # maps of slices lie on the picture of all of them, as in `_result`
            map_size = canvas_of(photo.crops, photo.size, map_size)
        return {
            "name": photo.entry.name,
            "path": photo.entry.path,
            "stamp": photo.entry.stamp,
            "sha256": photo.sha256,
            "width": width,
            "height": height,
            "label": label,
            "label_class": index,
            "label_probability": _probability(probabilities, index) if has_classes else None,
            "prediction": prediction,
            "prediction_class": prediction_class,
            "probability": None if best is None else best.probability,
            **{side: float(edge) for side, edge in vars(photo.box).items()},
            "input_height": map_size[0],
            "input_width": map_size[1],
            "boxes": boxes_as_text(self.labels.of_boxes(photo.boxes)),
            "labels": labels_as_text(labels),
            "probabilities": self._every_probability(probabilities),
            "detections": None if places is None else self._detections(places),
        }

    def _every_probability(self, probabilities: torch.Tensor | None) -> str | None:
        """All probabilities as JSON; None for more than `MOST_CLASSES` classes, and for a single
        output without a name, which may be that of its class or of "no".
        """
        if probabilities is None:
            return None
        kind = self.explainer.outputs.kind
        if len(probabilities) == 1 and self.explainer.categories is None:
            return None  # whether 0 is its class or says no is not known
        if kind == "classes" and len(probabilities) > MOST_CLASSES:
            return None
        return json.dumps({kind: [_short(value) for value in probabilities.tolist()]})

    def _detections(self, places: Located) -> str:
        """All that a detector found on a photo, as JSON for the column ``detections``: label,
        score, x0, y0, x1, y1 and class of each.
        """
        rows = []
        for detection in places.detections:
            category = detection.category  # never None here: only the answer "no" has no class
            label = class_label(self.explainer.categories, category or 0)
            figures = [_short(value) for value in (detection.value, *(detection.box or ()))]
            rows.append([label, *figures, category])
        return json.dumps(rows, ensure_ascii=False)


def _figure(values: torch.Tensor | None, image: int) -> float | None:
    """The value of photo number ``image`` in values ``(N,)`` of a batch; None where there are none,
    or this one is NaN."""
    if values is None or values[image].isnan():
        return None
    return float(values[image])


def _short(value: float) -> float:
    """A float32 number without the digits that are only rounding, so that JSON stays small."""
    return float(f"{value:.7g}")


def _most_probable(
    labels: Sequence[tuple[int | None, str]], probabilities: torch.Tensor | None
) -> tuple[int | None, str | None]:
    """Of the labels that are true of a photo, the one most probable for the model, so that a
    prediction of any counts as right; ``(None, None)`` without labels.
    """
    if not labels:
        return None, None
    # labels that are none of the model's come last
    return max(labels, key=lambda label: _probability(probabilities, label[0]) or 0.0)


def _probability(probabilities: torch.Tensor | None, index: int | None) -> float | None:
    """The probability of a class in ``(K,)``; None where there is no class, or it is none of the
    model's."""
    if probabilities is None or index is None or index >= len(probabilities):
        return None
    return float(probabilities[index])
