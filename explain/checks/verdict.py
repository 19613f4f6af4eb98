"""`check_maps`: maps of one photo in, a `Verdict` out; what methods have in common is run once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from math import isqrt
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ExplainError, MethodError, MetricError, muted, naming
from explain.attribution.api import attribute, plan
from explain.attribution.options import Settings
from explain.attribution.result import Attribution
from explain.checks.base import Check, CheckResults, Verdict
from explain.checks.dependence import DependsOnClass, DependsOnModel
from explain.checks.faithfulness import Faithful
from explain.checks.stability import Stable
from explain.data.inputs import Inputs
from explain.engine.output_activation import outputs_of
from explain.engine.validation import check_inputs
from explain.hooks.unwrap import unwrapped
from explain.layers.calls import cost_after
from explain.methods import Method
from explain.methods.base import options
from explain.methods.registry import get_method
from explain.metrics.base import MetricInput, MetricResult
from explain.metrics.evaluation import evaluate, probability_of
from explain.metrics.maps import Maps
from explain.metrics.perturbed_inputs import ScoreMetric
from explain.metrics.variants import EvaluatedMethod, ModelContext, ReattributionMetric, reattribute
from explain.targets import ClassTarget, Target
from explain.targets.outputs import Outputs

COSTLY = 60
"""Passes from which on a method is run again with fewer samples."""

FEW = 32
"""Samples that it is then run with, at first."""

COUNTS = ("samples", "steps")


def with_fewer_samples(method: Method, most: int) -> Iterator[Method]:
    """The method with fewer samples: first ``most`` of them, then twice as many, for those that take no fewer.

    A wrapped method gets its share of them. Empty if the method has no such option, or no more samples.

    >>> from explain.methods import IntegratedGradients, RISE
    >>> few = [each.steps for each in with_fewer_samples(IntegratedGradients(steps=50), 32)]
    >>> next(with_fewer_samples(RISE(), 32)).samples, few
    (32, [32])
    """
    inner = options(method).get("method")
    wrapped = inner if isinstance(inner, Method) and _samples(inner) > 1 else None
    while most < _samples(method):
        own = most if wrapped is None else isqrt(most)
        fewer: dict[str, Any] = {name: min(value, own) for name, value in _counts(method).items()}
        if wrapped is not None:
            fewer["method"] = next(with_fewer_samples(wrapped, most // own), wrapped)
        with suppress(MethodError):  # it has a minimum
            yield replace(method, **fewer)
        most *= 2


def _counts(method: Method) -> dict[str, int]:
    return {name: value for name in COUNTS if isinstance(value := options(method).get(name), int)}


def _samples(method: Method) -> int:
    """The number of samples, times those of a wrapped method."""
    inner = options(method).get("method")
    return max(_counts(method).values(), default=1) * (_samples(inner) if isinstance(inner, Method) else 1)


def _shown_counts(method: Method) -> list[str]:
    inner = options(method).get("method")
    own = [f"{name}={value}" for name, value in _counts(method).items()]
    return own + (_shown_counts(inner) if isinstance(inner, Method) else [])


def default_checks(seed: int = 0) -> tuple[Check, ...]:
    """The checks of every map, in this order.

    >>> [check.word for check in default_checks()]
    ['model', 'class', 'faithful', 'stable']
    """
    return DependsOnModel(seed=seed), DependsOnClass(), Faithful(seed=seed), Stable(seed=seed)


def check_maps(
    model: nn.Module,
    x: Any,
    maps: Sequence[tuple[Method, Attribution]],
    target: Target,
    label: str,
    *,
    seed: int = 0,
    checks: Sequence[Check] | None = None,
    **options: Any,
) -> Verdict:
    """Run sanity checks on maps of one photo.

    Args:
        model: any ``nn.Module``; it is left as it was found.
        x: the photo as the model is given it, ``(1, C, H, W)``.
        maps: methods with their attributions for this photo and target.
        target: what was explained.
        label: the name of the target in the verdict.
        seed: of random weights, copies and noise.
        checks: other ones than `default_checks`.
        options: ``batch_size``, ``progress`` and ``precision`` as for `explain.attribute`.

    Raises:
        MetricError: x is no single photo, or there is no map.
    """
    model = unwrapped(model)
    inputs = check_inputs(model, x)
    if inputs.x.ndim != 4 or len(inputs.x) != 1:
        raise MetricError(f"x must be one photo (1, C, H, W) to be checked, got shape {tuple(inputs.x.shape)}")
    if not maps:
        raise MetricError("maps must hold at least one map to be checked, got none; explain the photo first")
    named = {attribution.method: (method, attribution) for method, attribution in maps}
    return _Checks(model, inputs, named, target, options).verdict(checks or default_checks(seed), label, seed)


Results = dict[tuple[str, str], MetricResult]
"""By method and check."""


class _Checks:
    """One call of `check_maps`."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        maps: Mapping[str, tuple[Method, Attribution]],
        target: Target,
        options: Mapping[str, Any],
    ) -> None:
        _ = Settings(**options).work  # refused here, and not once for each check
        self.model, self.inputs, self.maps, self.target, self.options = model, inputs, maps, target, options
        self.images = inputs.x if inputs.x.dtype in (torch.float32, torch.float64) else inputs.x.float()
        first = next(iter(maps.values()))[1]
        classes = None if isinstance(first.target, str) else first.target.to(self.images.device)
        logits = None if first.logits is None else first.logits.to(self.images.device)
        self.outputs = Outputs()
        if logits is not None:
            self.outputs = outputs_of(model, inputs, logits, options.get("activation"))
            self.options = {**options, "activation": self.outputs.activation}
        self.context = ModelContext(model, self.images, inputs, classes, logits)
        self.notes: dict[str, list[str]] = {name: [] for name in maps}
        self.failed: dict[tuple[str, str], str] = {}

    def verdict(self, checks: Sequence[Check], label: str, seed: int) -> Verdict:
        data = {name: self._data(name, attribution) for name, (_, attribution) in self.maps.items()}
        varied = {name: each for name, each in data.items() if not each.maps.constant[0]}
        found: Results = {}
        if varied:
            found = self._by_scores(checks, varied) | self._by_reattribution(checks, varied)
        results = {}
        for name, each in data.items():
            own = []
            for check in checks:
                if name not in varied:
                    what = "is constant" if bool(each.maps.values.any()) else "is zero everywhere"
                    own.append(check.result(math.nan, False, f"the map {what}"))
                elif (name, check.name) in found:
                    own.append(check.decide(found[name, check.name]))
                else:
                    own.append(check.result(math.nan, None, self._not_applicable(check, each)))
            results[name] = CheckResults(name, tuple(own), tuple(self.notes[name]))
        return Verdict(label, results, seed)

    def _data(self, name: str, attribution: Attribution) -> MetricInput:
        classes = self.context.classes
        probability = probability_of(self.outputs, classes, self.context.logits)
        maps = Maps.of(name, attribution, self.images)
        score = attribution.score.to(self.images.device)
        return MetricInput(maps, self.images, score, probability, classes, outputs=self.outputs)

    def _not_applicable(self, check: Check, data: MetricInput) -> str:
        """Why a check is not applicable to a map, or failed; empty if it is."""
        if (data.maps.name, check.name) in self.failed:
            return self.failed[data.maps.name, check.name]
        try:
            return check.not_applicable(self.context, data)
        except ExplainError as error:
            return str(error)

    def _by_scores(self, checks: Sequence[Check], data: Mapping[str, MetricInput]) -> Results:
        """The results of score metrics; the perturbed photos of all maps run together."""
        maps: dict[str, Any] = {name: self.maps[name][1] for name in data}

        def evaluated(metrics: Sequence[Any]) -> Results:
            table = evaluate(self.model, self.inputs, maps, metrics, target=self.target, **self.options)
            return {(name, metric): each for name, row in table.results.items() for metric, each in row.items()}

        return self._each(evaluated, [check for check in checks if isinstance(check, ScoreMetric)], data)

    def _by_reattribution(self, checks: Sequence[Check], data: Mapping[str, MetricInput]) -> Results:
        """The results of metrics that run the methods again; methods of many passes run with fewer samples."""
        metrics = [
            check
            for check in checks
            if isinstance(check, ReattributionMetric)
            and not any(self._not_applicable(check, each) for each in data.values())
        ]
        if not metrics:
            return {}
        groups: dict[tuple[Any, bool], dict[str, EvaluatedMethod]] = {}
        for name, each in data.items():
            method, attribution = self.maps[name]
            evaluated, long = self._cheaper(EvaluatedMethod(method, attribution, each))
            groups.setdefault((attribution.fuse, long), {})[name] = evaluated
        found: Results = {}
        for (fuse, long), group in groups.items():
            options: Any = {**self.options, "fuse": fuse}
            rerun = partial(reattribute, methods=group, context=self.context, target=self.target, options=options)
            found |= self._each(rerun, [check.reduced for check in metrics] if long else metrics, group)
        return found

    def _each(
        self, evaluate: Callable[[Sequence[Any]], Results], checks: Sequence[Check], maps: Iterable[str]
    ) -> Results:
        """Run all checks together; if one of them fails, each alone, so that the others have a result."""
        if not checks:
            return {}
        with muted():  # the results contain it
            try:
                return evaluate(checks)
            except ExplainError as error:
                if len(checks) > 1:
                    return {key: each for one in checks for key, each in self._each(evaluate, [one], maps).items()}
                self.failed |= {(name, checks[0].name): str(error) for name in maps}
                return {}

    def _cheaper(self, evaluated: EvaluatedMethod) -> tuple[EvaluatedMethod, bool]:
        """The method with fewer samples, if each of its maps takes many passes; and whether it still takes long."""
        attribution, name = evaluated.attribution, evaluated.data.maps.name
        where: Any = {"layer": attribution.layer, "fuse": attribution.fuse}
        planned = plan(self.model, self.inputs, evaluated.method, target=self.target, **where)
        layers = {need.layer for needs in planned.wanted.values() for need in needs if need.layer is not None}
        cost = planned.cost(cost_after(self.model, self.inputs, layers))
        if cost <= COSTLY:
            return evaluated, False
        why = f"since a map takes {cost:.0f} passes" if math.isfinite(cost) else "since a map takes many passes"
        options: Any = {**self.options, "progress": None, **where}
        for fewer in with_fewer_samples(evaluated.method, FEW):
            with muted(), suppress(MethodError):
                found = attribute(self.model, self.inputs, fewer, target=self.target, **options)
                self.notes[name].append(f"run again with {', '.join(_shown_counts(fewer))}, {why}")
                return EvaluatedMethod(fewer, found, self._data(name, found)), False
        self.notes[name].append(f"run again as few times as possible, {why}")
        return evaluated, True


def check_explained(explanation: Any, found: Sequence[Attribution], index: int, **options: Any) -> Verdict:
    """Check maps of the target at a position of an `explain.Explanation`, and add the verdict to the explanation.

    Raises:
        MetricError: it is a copy without a model; or the maps are of several crops.
    """
    if explanation.explainer is None or explanation.request is None:
        raise MetricError("explanation must have its model to be checked, but is a copy; explain the photo again")
    if explanation.crops:
        raise MetricError("maps must be of one crop to be checked, got some of five; use crop='center'")
    chosen, request, explainer = found[0].target, explanation.request, explanation.explainer
    target = request.targets[index] if isinstance(chosen, str) else ClassTarget((int(chosen[0]),))
    given = [] if isinstance(request.methods, str) else request.methods
    maps = [(method_of(each, given), each) for each in found]
    options = {"precision": explanation.question.precision, "activation": explainer.activation, **options}
    with naming([explanation.source]):
        x = explainer.as_input(explanation.photo)
        verdict = check_maps(explainer.model, x, maps, target, explanation.targets[index], **options)
    known = explanation.verdicts.get(index)
    explanation.verdicts[index] = verdict if known is None else known.updated(verdict)
    return verdict


def method_of(attribution: Attribution, methods: Sequence[Method] = ()) -> Method:
    """The method that made an attribution, with its options; one of these, or one that is known by its name.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> method_of(Attribution("gradcam", one, "score", one[0, 0], None, (1, 1), options={"relu": False}))
    GradCAM(relu=False)
    """
    method = next((each for each in methods if each.name == attribution.method), None) or get_method(attribution.method)
    made_with = {each.name for each in fields(method) if each.init}
    options = {name: value for name, value in attribution.options.items() if name in made_with}
    return replace(method, **options)
