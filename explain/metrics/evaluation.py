"""`evaluate`: a model, photos, methods and metrics in, a `Table` out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, Unpack

import numpy as np
import torch
from torch import nn

from explain._utils.errors import MetricError, keywords, shown
from explain.attribution.api import attribute
from explain.attribution.options import Options, Settings
from explain.attribution.result import Attribution
from explain.data.inputs import Inputs, InputsLike
from explain.engine import Plan, Scores, Unperturbed, asks_of, check_inputs, gather, outputs_of
from explain.hooks import calculating, unwrapped
from explain.methods import Method, MethodLike, get_method
from explain.metrics.base import MapMetric, Metric, MetricInput, MetricResult, Read
from explain.metrics.ground_truth import Boxes, as_boxes, as_regions
from explain.metrics.maps import Maps, MapsLike
from explain.metrics.perturbed_inputs import ClassScore, PerturbedPhotoPool, PooledPhotos, ScoreMetric, recognised
from explain.metrics.registry import MetricLike, by_name
from explain.metrics.table import Table
from explain.metrics.variants import EvaluatedMethod, ModelContext, ReattributionMetric, asked_again, must_be_method
from explain.targets import ClassTarget, Outputs, Target, TargetLike, as_target

Judgeable: TypeAlias = "MethodLike | MapsLike"


@keywords(Options)
def evaluate(
    model: nn.Module,
    x: InputsLike,
    methods: Judgeable | Iterable[MethodLike | Attribution] | Mapping[str, Judgeable],
    metrics: MetricLike | Iterable[MetricLike],
    *,
    target: TargetLike = None,
    boxes: Boxes | None = None,
    masks: torch.Tensor | np.ndarray[Any, Any] | None = None,
    **options: Unpack[Options],
) -> Table:
    """Judge methods, or maps, by metrics; all altered photos of one call are run together, each distinct one once.

    Args:
        model: any ``nn.Module``; it is left as it was found.
        x: preprocessed photos ``(N, C, H, W)``, or what `explain.attribute` takes for them.
        methods: names or method objects, which are run; or attributions, which are judged as they are. A mapping gives
            each a name, and may hold arrays too: maps ``(N, h, w)``, or ``(N, C, H, W)`` for each pixel.
        metrics: names from `list_metrics`, or metric objects.
        target: as for `explain.attribute`; None is the attributions' own target, or each image's top class.
        boxes: where the object is: ``(N, 4)`` with x0 y0 x1 y1 in input pixels, x1 and y1 exclusive; or a list with
            ``(k, 4)`` for each photo, for several objects.
        masks: the same as truth values ``(N, H, W)``; of whole numbers, those above 0 are the object.
        options: as for `explain.attribute`: ``layer``, ``categories``, ``batch_size``, ``progress``, ``precision`` …

    Returns:
        A `Table`: ``table[method][metric]`` is a tensor ``(N,)``.

    Raises:
        MetricError: one line that says which metric, map or box does not fit.
        ExplainError: as for `explain.attribute`.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    >>> table = evaluate(model, torch.rand(2, 3, 8, 8), ["gradcam", "saliency"], ["deletion", "insertion"])
    >>> table["gradcam"]["deletion"].shape, list(table)
    (torch.Size([2]), ['gradcam', 'saliency'])
    """
    model = unwrapped(model)
    inputs = check_inputs(model, x)
    if inputs.x.ndim != 4:
        raise MetricError(f"x must be photos (N, C, H, W) to be judged, got shape {tuple(inputs.x.shape)}; give frames")
    chosen = by_name(metrics)
    return _Evaluation(model, inputs, chosen, target, options).of(_named(methods), boxes, masks)


class _Evaluation:
    """One call of `evaluate`."""

    def __init__(
        self, model: nn.Module, inputs: Inputs, metrics: Mapping[str, Metric], target: TargetLike, options: Options
    ) -> None:
        self.model, self.inputs, self.metrics, self.options = model, inputs, metrics, options
        self.settings = Settings(**options)
        self.target = target
        self.ours: Attribution | None = None
        self.notes: list[str] = []
        self.images = inputs.x if inputs.x.dtype in (torch.float32, torch.float64) else inputs.x.float()

    def of(self, given: Mapping[str, Judgeable], boxes: Boxes | None, masks: Any) -> Table:
        count, size = len(self.images), (int(self.images.shape[2]), int(self.images.shape[3]))
        known_boxes = None if boxes is None else as_boxes(boxes, count, size)
        regions = as_regions(masks, known_boxes, count, size)
        maps = self._maps(given)
        score, classes, logits = self._scores_as_they_are()
        self.outputs = Outputs()
        if logits is not None:
            self.outputs = outputs_of(self.model, self.inputs, logits, self.settings.activation)
        probability = probability_of(self.outputs, classes, logits)
        with calculating(self.images.device.type):
            cases = {
                name: MetricInput(
                    Maps.of(name, each, self.images),
                    self.images,
                    score,
                    probability,
                    classes,
                    known_boxes,
                    regions,
                    self.outputs,
                )
                for name, each in maps.items()
            }
        judged: dict[str, dict[str, MetricResult]] = {name: {} for name in cases}
        for metric in self.metrics.values():
            if isinstance(metric, MapMetric) and not isinstance(metric, (ScoreMetric, ReattributionMetric)):
                for name, case in cases.items():
                    with calculating(self.images.device.type):
                        judged[name][metric.name] = metric(case)
        self._by_scores(cases, classes, _count(logits), judged)
        world = ModelContext(self.model, self.images, classes, _count(logits), logits, self.inputs)
        self._by_asking(cases, world, maps, judged)
        ordered = {name: {metric: row[metric] for metric in self.metrics} for name, row in judged.items()}
        return Table(dict(self.metrics), ordered, tuple(self.notes))

    def _maps(self, given: Mapping[str, Judgeable]) -> dict[str, MapsLike]:
        """The maps of all methods, which are run together, and those that were given."""
        self.methods = {name: get_method(each) for name, each in given.items() if isinstance(each, (str, Method))}
        others: dict[str, Any] = {name: each for name, each in given.items() if name not in self.methods}
        for name, each in others.items():
            Maps.of(name, each, self.images)  # before anything is run
        attributions = [each for each in others.values() if isinstance(each, Attribution)]
        if self.target is None and attributions:
            self.target = _common_target(attributions)
        found: dict[str, Attribution] = {}
        waiting = dict(self.methods)
        while waiting:  # methods of one name, with other options, go in turn
            turn = {method.name: name for name, method in reversed(waiting.items())}
            these = [waiting[name] for name in turn.values()]
            answers = attribute(self.model, self.inputs, these, target=self.target, **self.options)
            found |= {turn[name]: each for name, each in answers.items()}
            self.ours = next(iter(answers.values()))
            waiting = {name: method for name, method in waiting.items() if name not in found}
        return {name: found[name] if name in found else others[name] for name in given}

    def _scores_as_they_are(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Score ``(N,)``, class ``(N,)`` and class scores ``(N, K)`` of the photos as they are."""
        target = as_target(self.target, self.settings.categories)
        if self.ours is None:
            evidence = gather(self.model, self.inputs, Plan({}), [target], self.settings.work)[0](None)
            score, classes, logits = evidence.score, evidence.classes, evidence.logits
        else:
            chosen = self.ours.target
            score, classes = self.ours.score, None if isinstance(chosen, str) else chosen
            logits = self.ours.logits
        self.settled: Target = target if classes is None else ClassTarget(tuple(classes.tolist()))
        return score, classes, logits

    def _by_asking(
        self,
        cases: Mapping[str, MetricInput],
        world: ModelContext,
        maps: Mapping[str, MapsLike],
        judged: Mapping[str, dict[str, MetricResult]],
    ) -> None:
        """Ask the methods again, of altered photos, other classes and other models."""
        metrics = [metric for metric in self.metrics.values() if isinstance(metric, ReattributionMetric)]
        if not metrics:
            return
        asked: dict[str, EvaluatedMethod] = {}
        for name, case in cases.items():
            attribution = maps[name]
            if name not in self.methods or not isinstance(attribution, Attribution):
                raise must_be_method(metrics[0], name)
            asked[name] = EvaluatedMethod(self.methods[name], attribution, case)
        options: Options = {**self.options, "activation": self.outputs.activation}
        found = asked_again(metrics, asked, world, self.inputs, self.settled, options)
        for (name, metric), each in found.items():
            judged[name][metric] = each

    def _by_scores(
        self,
        cases: Mapping[str, MetricInput],
        classes: torch.Tensor | None,
        count: int | None,
        judged: Mapping[str, dict[str, MetricResult]],
    ) -> None:
        """Run the altered photos that metrics ask for, each distinct one once."""
        metrics = [metric for metric in self.metrics.values() if isinstance(metric, ScoreMetric)]
        if not metrics:
            return
        book = PerturbedPhotoPool(self.images)
        with calculating(self.images.device.type):
            asks = {(name, m.name): m.asks(case) for name, case in cases.items() for m in metrics}
            rows = {key: [book.enter(ask.of) for ask in each] for key, each in asks.items()}
        readings: list[Read] = list(dict.fromkeys(ask.reading for each in asks.values() for ask in each))
        scores = self._run(book, readings, classes)
        if "probability" in scores and count is not None:
            count = count if self.outputs.exclusive else 2  # each class is true or not
            self.notes += recognised(book.blank(), *scores["probability"], count)
        for (name, metric), each in asks.items():
            found = [_looked_up(scores[ask.reading], row) for ask, row in zip(each, rows[name, metric], strict=True)]
            case = self._as_read(cases[name], scores)
            with calculating(self.images.device.type):
                one: Any = self.metrics[metric]
                judged[name][metric] = one(case, found)

    def _run(
        self, book: PerturbedPhotoPool, readings: Sequence[Read], classes: torch.Tensor | None
    ) -> dict[Read, tuple[torch.Tensor, torch.Tensor]]:
        """For each reading, what it is of the photos as they are ``(N,)`` and of all altered ones ``(P,)``."""
        targets = [self._read_as(reading, classes) for reading in readings]
        if not targets:
            return {}
        altered, plain = Scores(PooledPhotos(book)), Scores(Unperturbed())
        plan = Plan(
            {"metrics": asks_of([plain, *([altered] if len(book) else [])], [])}, len(targets), len(self.images)
        )
        found = gather(self.model, self.inputs, plan, targets, self.settings.work)
        results: dict[Read, tuple[torch.Tensor, torch.Tensor]] = {}
        for reading, evidence_of in zip(readings, found, strict=True):
            evidence = evidence_of(None)
            results[reading] = evidence[plain], evidence[altered] if len(book) else evidence.score[:0]
        return results

    def _read_as(self, reading: Read, classes: torch.Tensor | None) -> Target:
        if reading == "score":
            return self.settled
        if classes is None:
            raise MetricError(
                f"target must be a class for a metric that reads its {reading}, got {self.settled.name}; choose "
                "reading='score'"
            )
        return ClassScore(reading, tuple(classes.tolist()), self.outputs)

    def _as_read(self, case: MetricInput, scores: Mapping[Read, tuple[torch.Tensor, torch.Tensor]]) -> MetricInput:
        """The case with what was read of the photos as they are in the same precision as of the altered ones."""
        score = scores["score"][0] if "score" in scores else case.score
        probability = scores["probability"][0] if "probability" in scores else case.probability
        return replace(case, score=score, probability=probability)


def _named(methods: Any) -> dict[str, Judgeable]:
    """Methods and maps by their names."""
    if isinstance(methods, Mapping):
        named = {str(name): each for name, each in methods.items()}
    elif isinstance(methods, (torch.Tensor, np.ndarray)):
        named = {"map": methods}
    else:
        single = isinstance(methods, (str, Attribution, Method)) or not isinstance(methods, Iterable)
        given = [methods] if single else list(methods)
        named = {}
        for each in given:
            if isinstance(each, (torch.Tensor, np.ndarray)):
                raise MetricError("maps must have names, got several arrays without; give a mapping from names to maps")
            name = each.method if isinstance(each, Attribution) else get_method(each).name
            if named.setdefault(name, each) is not each and named[name] != each:
                raise MetricError(f"methods must have different names, got two of {name!r}; give a mapping from names")
    if not named:
        raise MetricError("methods must name at least one method or map, got none; see explain.list_methods()")
    for name, each in named.items():
        if not isinstance(each, (str, Method, Attribution, torch.Tensor, np.ndarray)):
            raise MetricError(f"method {name!r} must be a name, method, Attribution or array, got {shown(each)}; see "
                              "explain.list_methods()")  # fmt: skip
    return named


def _common_target(attributions: Sequence[Attribution]) -> TargetLike:
    """The classes that attributions are of, which must be the same ones."""
    first = attributions[0].target
    for each in attributions:
        if isinstance(each.target, str):
            raise MetricError(f"target must be given for attributions of {each.target}, which is no class; add target=")
        same = isinstance(first, torch.Tensor) and first.shape == each.target.shape and torch.equal(first, each.target)
        if not same:
            raise MetricError(
                f"attributions must be of one target, got {_told(first)} and {_told(each.target)}; judge them in turn"
            )
    return first


def _told(target: torch.Tensor | str) -> str:
    return target if isinstance(target, str) else f"classes {shown(target.tolist())}"


def probability_of(outputs: Outputs, classes: torch.Tensor | None, logits: torch.Tensor | None) -> torch.Tensor | None:
    """The probability of the class; None where there is none, or where it is the only one."""
    if classes is None or logits is None or logits.shape[1] < 2 or outputs.probabilities(logits) is None:
        return None
    return outputs.of_classes(logits, classes)


def _count(logits: torch.Tensor | None) -> int | None:
    return None if logits is None else int(logits.shape[1])


def _looked_up(scores: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """The scores of rows ``(N, count)``, of which -1 stands for the photo as it is."""
    plain, altered = scores
    known = plain[:, None].expand(rows.shape)
    return known.clone() if not len(altered) else torch.where(rows < 0, known, altered[rows.clamp(min=0)])
