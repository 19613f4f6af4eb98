"""`evaluate`: a model, photos, methods and metrics in, a `Table` out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
from explain.engine.execution import gather
from explain.engine.needs import asks_of
from explain.engine.output_activation import outputs_of
from explain.engine.perturbations import Scores, Unperturbed
from explain.engine.plan import Plan
from explain.engine.validation import check_inputs
from explain.hooks.preserve import calculating
from explain.hooks.unwrap import unwrapped
from explain.methods import Method
from explain.methods.registry import MethodLike, get_method
from explain.metrics.base import MapMetric, Metric, MetricInput, MetricLike, MetricResult, ScoreKind, by_name
from explain.metrics.ground_truth import Boxes, as_boxes, as_regions
from explain.metrics.maps import Maps, MapsLike
from explain.metrics.perturbed_inputs import ClassScore, PerturbedPhotoPool, ScoreMetric, recognised_when_covered
from explain.metrics.table import Table
from explain.metrics.variants import EvaluatedMethod, ModelContext, ReattributionMetric, reattribute
from explain.targets import ClassTarget, Target, as_target
from explain.targets.outputs import Outputs
from explain.targets.resolve import TargetLike

MapSource: TypeAlias = "MethodLike | MapsLike"


@keywords(Options)
def evaluate(
    model: nn.Module,
    x: InputsLike,
    methods: MapSource | Iterable[MethodLike | Attribution] | Mapping[str, MapSource],
    metrics: MetricLike | Iterable[MetricLike],
    *,
    target: TargetLike = None,
    boxes: Boxes | None = None,
    masks: torch.Tensor | np.ndarray[Any, Any] | None = None,
    **options: Unpack[Options],
) -> Table:
    """Evaluate methods, or maps, by metrics; all perturbed photos of one call run together, each distinct one once.

    Args:
        model: any ``nn.Module``; it is left as it was found.
        x: preprocessed photos ``(N, C, H, W)``, or what `explain.attribute` takes for them.
        methods: names or method objects, which are run; or attributions. A mapping gives
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
        raise MetricError(f"x must be photos (N, C, H, W) for metrics, got shape {tuple(inputs.x.shape)}; give frames")
    return _Evaluation(model, inputs, by_name(metrics), target, options).table(_named(methods), boxes, masks)


class _Evaluation:
    """One call of `evaluate`."""

    def __init__(
        self, model: nn.Module, inputs: Inputs, metrics: Mapping[str, Metric], target: TargetLike, options: Options
    ) -> None:
        self.model, self.inputs, self.metrics, self.options = model, inputs, metrics, options
        self.settings, self.target = Settings(**options), target
        self.images = inputs.x if inputs.x.dtype in (torch.float32, torch.float64) else inputs.x.float()
        self.results: dict[str, dict[str, MetricResult]] = {}
        self.notes: list[str] = []

    def table(self, methods: Mapping[str, MapSource], boxes: Boxes | None, masks: Any) -> Table:
        count, size = len(self.images), (int(self.images.shape[2]), int(self.images.shape[3]))
        known_boxes = None if boxes is None else as_boxes(boxes, count, size)
        regions = as_regions(masks, known_boxes, count, size)
        maps = self._maps(methods)
        score, classes, logits = self._original_scores(methods, maps)
        self.resolved = as_target(self.target, self.settings.categories)
        if classes is not None:
            self.resolved = ClassTarget(tuple(classes.tolist()))
        self.outputs = (
            Outputs() if logits is None else outputs_of(self.model, self.inputs, logits, self.settings.activation)
        )
        probability = probability_of(self.outputs, classes, logits)
        known = (self.images, score, probability, classes, known_boxes, regions, self.outputs)
        with calculating(self.images.device.type):
            data = {name: MetricInput(Maps.of(name, each, self.images), *known) for name, each in maps.items()}
            for name, each in data.items():
                of_map = {m.name: m(each) for m in self.metrics.values() if isinstance(m, MapMetric)}
                self.results[name] = of_map
        context = ModelContext(self.model, self.images, self.inputs, classes, logits)
        self._by_scores(data, context)
        self._by_reattribution(data, context, methods, maps)
        ordered = {name: {metric: row[metric] for metric in self.metrics} for name, row in self.results.items()}
        return Table(dict(self.metrics), ordered, tuple(self.notes))

    def _maps(self, methods: Mapping[str, MapSource]) -> dict[str, MapsLike]:
        """The maps of the methods, which run together, and the other maps as they are."""
        waiting = {name: get_method(each) for name, each in methods.items() if isinstance(each, (str, Method))}
        maps: dict[str, Any] = {name: each for name, each in methods.items() if name not in waiting}
        for name, each in maps.items():
            Maps.of(name, each, self.images)  # refused before anything is run
        attributions = [each for each in maps.values() if isinstance(each, Attribution)]
        if self.target is None and attributions:
            self.target = _common_target(attributions)
        while waiting:  # methods of one name, with other options, run in turn
            turn = {method.name: name for name, method in reversed(waiting.items())}
            objects = [waiting.pop(name) for name in turn.values()]
            found = attribute(self.model, self.inputs, objects, target=self.target, **self.options)
            maps |= {turn[name]: each for name, each in found.items()}
        return {name: maps[name] for name in methods}

    def _original_scores(
        self, methods: Mapping[str, MapSource], maps: Mapping[str, MapsLike]
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Score ``(N,)``, class ``(N,)`` and class scores ``(N, K)`` of the unperturbed photos."""
        for name, each in maps.items():
            if isinstance(each, Attribution) and each is not methods[name]:  # made by this call
                return each.score, None if isinstance(each.target, str) else each.target, each.logits
        target = as_target(self.target, self.settings.categories)
        evidence = gather(self.model, self.inputs, Plan({}), [target], self.settings.work)[0](None)
        return evidence.score, evidence.classes, evidence.logits

    def _by_reattribution(
        self,
        data: Mapping[str, MetricInput],
        context: ModelContext,
        methods: Mapping[str, MapSource],
        maps: Mapping[str, MapsLike],
    ) -> None:
        """Run the methods again on other photos, classes and models."""
        metrics = [metric for metric in self.metrics.values() if isinstance(metric, ReattributionMetric)]
        if not metrics:
            return
        evaluated: dict[str, EvaluatedMethod] = {}
        for name, each in data.items():
            method, attribution = methods[name], maps[name]
            if not isinstance(method, (str, Method)) or not isinstance(attribution, Attribution):
                raise MetricError(
                    f"metric {metrics[0].name!r} runs the method again, so it needs a method, got the map {name!r}; "
                    "give the method instead of its map"
                )
            evaluated[name] = EvaluatedMethod(get_method(method), attribution, each)
        options: Options = {**self.options, "activation": self.outputs.activation}
        for (name, metric), result in reattribute(metrics, evaluated, context, self.resolved, options).items():
            self.results[name][metric] = result

    def _by_scores(self, data: Mapping[str, MetricInput], context: ModelContext) -> None:
        """Run the perturbed photos that metrics request, each distinct one once."""
        pool = PerturbedPhotoPool(self.images)
        requested: list[tuple[str, ScoreMetric, list[tuple[ScoreKind, torch.Tensor]]]] = []
        with calculating(self.images.device.type):
            for name, each in data.items():
                for metric in self.metrics.values():
                    if isinstance(metric, ScoreMetric):
                        rows = [(request.score, pool.add(request)) for request in metric.requests(each)]
                        requested.append((name, metric, rows))
        scores = self._scores(pool, {kind for _, _, rows in requested for kind, _ in rows}, context.classes)
        if "probability" in scores and context.count is not None:
            count = context.count if self.outputs.exclusive else 2  # each class is true or not
            self.notes += recognised_when_covered(pool.fully_covered(), *scores["probability"], count)
        # The original scores in the same precision as those of the perturbed photos:
        names: dict[ScoreKind, str] = {"logit": "target_score", "probability": "probability"}
        exact: dict[str, Any] = {field: scores[kind][0] for kind, field in names.items() if kind in scores}
        for name, metric, rows in requested:
            found = []
            for kind, numbers in rows:
                original, perturbed = scores[kind]
                padded = torch.cat([perturbed, original.new_zeros(1)])
                found.append(torch.where(numbers < 0, original[:, None], padded[numbers]))
            with calculating(self.images.device.type):
                self.results[name][metric.name] = metric(replace(data[name], **exact), found)

    def _scores(
        self, pool: PerturbedPhotoPool, kinds: Collection[ScoreKind], classes: torch.Tensor | None
    ) -> dict[ScoreKind, tuple[torch.Tensor, torch.Tensor]]:
        """The scores of the unperturbed photos ``(N,)``, and of all perturbed ones ``(P,)``."""
        targets: dict[ScoreKind, Target] = {}
        for kind in sorted(kinds):
            if kind == "logit":
                targets[kind] = self.resolved
            elif classes is None:
                raise MetricError(
                    f"target must be a class for a metric of its {kind}, got {self.resolved.name}; choose score='logit'"
                )
            else:
                targets[kind] = ClassScore(kind, tuple(classes.tolist()), self.outputs)
        if not targets:
            return {}
        original, perturbed = Scores(Unperturbed()), Scores(pool)
        needs = {"metrics": asks_of([original, *([perturbed] if len(pool) else [])], [])}
        plan = Plan(needs, len(targets), len(self.images))
        gathered = gather(self.model, self.inputs, plan, list(targets.values()), self.settings.work)
        scores = {}
        for kind, evidence_of in zip(targets, gathered, strict=True):
            evidence = evidence_of(None)
            scores[kind] = evidence[original], evidence[perturbed] if len(pool) else evidence.score[:0]
        return scores


def _named(methods: Any) -> dict[str, MapSource]:
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
    found: list[str] = []
    for each in attributions:
        if isinstance(each.target, str):
            raise MetricError(f"target must be given for attributions of {each.target}, which is no class; add target=")
        found.append(f"classes {each.target.tolist()}")
        if found[-1] != found[0]:
            raise MetricError(
                f"attributions must be of one target, got {found[0]} and {found[-1]}; evaluate them in turn"
            )
    return attributions[0].target


def probability_of(outputs: Outputs, classes: torch.Tensor | None, logits: torch.Tensor | None) -> torch.Tensor | None:
    """The probability of the class; None where there is none, or where it is the only one."""
    if classes is None or logits is None or logits.shape[1] < 2 or outputs.probabilities(logits) is None:
        return None
    return outputs.of_classes(logits, classes)
