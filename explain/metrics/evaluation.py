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
from explain.metrics.base import MapMetric, Metric, MetricInput, MetricResult, ScoreKind
from explain.metrics.ground_truth import Boxes, as_boxes, as_regions
from explain.metrics.maps import Maps, MapsLike
from explain.metrics.perturbed_inputs import ClassScore, PerturbedPhotoPool, ScoreMetric, covered_but_recognised
from explain.metrics.registry import MetricLike, by_name
from explain.metrics.table import Table
from explain.metrics.variants import EvaluatedMethod, ModelContext, ReattributionMetric, reattribute
from explain.targets import ClassTarget, Target, as_target
from explain.targets.outputs import Outputs
from explain.targets.resolve import TargetLike

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
        self.outputs = Outputs()
        self.images = inputs.x if inputs.x.dtype in (torch.float32, torch.float64) else inputs.x.float()

    def of(self, given: Mapping[str, Judgeable], boxes: Boxes | None, masks: Any) -> Table:
        count, size = len(self.images), (int(self.images.shape[2]), int(self.images.shape[3]))
        known_boxes = None if boxes is None else as_boxes(boxes, count, size)
        regions = as_regions(masks, known_boxes, count, size)
        maps = self._maps(given)
        score, classes, logits = self._original_scores()
        if logits is not None:
            self.outputs = outputs_of(self.model, self.inputs, logits, self.settings.activation)
        probability = probability_of(self.outputs, classes, logits)
        known = (self.images, score, probability, classes, known_boxes, regions, self.outputs)
        self.judged: dict[str, dict[str, MetricResult]] = {name: {} for name in maps}
        with calculating(self.images.device.type):
            data = {name: MetricInput(Maps.of(name, each, self.images), *known) for name, each in maps.items()}
            for metric in self.metrics.values():
                if isinstance(metric, MapMetric):
                    for name, each in data.items():
                        self.judged[name][metric.name] = metric(each)
        context = ModelContext(
            self.model, self.images, classes, None if logits is None else int(logits.shape[1]), logits, self.inputs
        )
        self._by_scores(data, context)
        self._by_reattribution(data, context, maps)
        ordered = {name: {metric: row[metric] for metric in self.metrics} for name, row in self.judged.items()}
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

    def _original_scores(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Score ``(N,)``, class ``(N,)`` and class scores ``(N, K)`` of the unperturbed photos."""
        target = as_target(self.target, self.settings.categories)
        if self.ours is None:
            evidence = gather(self.model, self.inputs, Plan({}), [target], self.settings.work)[0](None)
            score, classes, logits = evidence.score, evidence.classes, evidence.logits
        else:
            chosen = self.ours.target
            score, classes = self.ours.score, None if isinstance(chosen, str) else chosen
            logits = self.ours.logits
        self.resolved: Target = target if classes is None else ClassTarget(tuple(classes.tolist()))
        return score, classes, logits

    def _by_reattribution(
        self, data: Mapping[str, MetricInput], context: ModelContext, maps: Mapping[str, MapsLike]
    ) -> None:
        """Run the methods again on perturbed photos, other classes and other models."""
        metrics = [metric for metric in self.metrics.values() if isinstance(metric, ReattributionMetric)]
        if not metrics:
            return
        methods: dict[str, EvaluatedMethod] = {}
        for name, each in data.items():
            attribution = maps[name]
            if name not in self.methods or not isinstance(attribution, Attribution):
                raise MetricError(
                    f"metric {metrics[0].name!r} runs the method again, so it needs a method, got the map {name!r}; "
                    "give the method instead of its map"
                )
            methods[name] = EvaluatedMethod(self.methods[name], attribution, each)
        options: Options = {**self.options, "activation": self.outputs.activation}
        found = reattribute(metrics, methods, context, self.inputs, self.resolved, options)
        for (name, metric), result in found.items():
            self.judged[name][metric] = result

    def _by_scores(self, data: Mapping[str, MetricInput], context: ModelContext) -> None:
        """Run the perturbed photos that metrics request, each distinct one once."""
        metrics = [metric for metric in self.metrics.values() if isinstance(metric, ScoreMetric)]
        if not metrics:
            return
        pool = PerturbedPhotoPool(self.images)
        wanted: list[tuple[str, ScoreMetric, list[tuple[ScoreKind, torch.Tensor]]]] = []
        with calculating(self.images.device.type):
            for name, each in data.items():
                for metric in metrics:
                    requests = [(request.score, pool.add(request.photos)) for request in metric.requests(each)]
                    wanted.append((name, metric, requests))
        kinds = dict.fromkeys(kind for _, _, requests in wanted for kind, _ in requests)
        scores = self._scores(pool, list(kinds), context.classes)
        if "probability" in scores and context.count is not None:
            count = context.count if self.outputs.exclusive else 2  # each class is true or not
            self.notes += covered_but_recognised(pool.fully_covered(), *scores["probability"], count)
        # the original scores in the same precision as those of the perturbed photos
        exact = {
            field: scores[kind][0]
            for kind, field in (("logit", "target_score"), ("probability", "probability"))
            if kind in scores
        }
        for name, metric, requests in wanted:
            found = []
            for kind, rows in requests:
                original, perturbed = scores[kind]
                known = original[:, None].expand(rows.shape)
                found.append(torch.where(rows < 0, known, perturbed[rows.clamp(min=0)]) if len(pool) else known.clone())
            with calculating(self.images.device.type):
                self.judged[name][metric.name] = metric(replace(data[name], **exact), found)  # type: ignore[arg-type]

    def _scores(
        self, pool: PerturbedPhotoPool, kinds: Sequence[ScoreKind], classes: torch.Tensor | None
    ) -> dict[ScoreKind, tuple[torch.Tensor, torch.Tensor]]:
        """The scores of the unperturbed photos ``(N,)``, and of all perturbed ones ``(P,)``."""
        targets: list[Target] = []
        for kind in kinds:
            if kind != "logit" and classes is None:
                raise MetricError(
                    f"target must be a class for a metric of its {kind}, got {self.resolved.name}; choose score='logit'"
                )
            indices = () if classes is None else tuple(classes.tolist())
            targets.append(self.resolved if kind == "logit" else ClassScore(kind, indices, self.outputs))
        if not targets:
            return {}
        original, perturbed = Scores(Unperturbed()), Scores(pool)
        needs = {"metrics": asks_of([original, *([perturbed] if len(pool) else [])], [])}
        plan = Plan(needs, len(targets), len(self.images))
        scores = {}
        for kind, evidence_of in zip(
            kinds, gather(self.model, self.inputs, plan, targets, self.settings.work), strict=True
        ):
            evidence = evidence_of(None)
            scores[kind] = evidence[original], evidence[perturbed] if len(pool) else evidence.score[:0]
        return scores


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
            names = [
                a.target if isinstance(a.target, str) else f"classes {a.target.tolist()}"
                for a in (attributions[0], each)
            ]
            raise MetricError(f"attributions must be of one target, got {names[0]} and {names[1]}; judge them in turn")
    return first


def probability_of(outputs: Outputs, classes: torch.Tensor | None, logits: torch.Tensor | None) -> torch.Tensor | None:
    """The probability of the class; None where there is none, or where it is the only one."""
    if classes is None or logits is None or logits.shape[1] < 2 or outputs.probabilities(logits) is None:
        return None
    return outputs.of_classes(logits, classes)
