"""`check_maps`: maps of one photo in, a `Verdict` out; what methods have in common is run once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from math import isqrt
from typing import Any, Protocol

import torch
from PIL import Image
from torch import nn

from explain._utils.errors import ExplainError, MethodError, MetricError, muted, naming
from explain.attribution.api import attribute, plan
from explain.attribution.options import Options, Settings
from explain.attribution.result import Attribution
from explain.checks.answers import Answers, Verdict
from explain.checks.dependence import DependsOnClass, DependsOnModel
from explain.checks.faithfulness import Faithful
from explain.checks.questions import Question
from explain.checks.stability import Stable
from explain.data.inputs import Inputs
from explain.engine.output_activation import outputs_of
from explain.engine.validation import check_inputs
from explain.hooks.unwrap import unwrapped
from explain.layers.calls import shares_behind
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
"""Passes from which on a method is asked again with fewer samples."""

FEW = 32
"""Samples that it is then asked with, at first."""

COUNTS = ("samples", "steps")


def lighter(method: Method, most: int) -> Iterator[Method]:
    """The method with fewer samples: first ``most`` of them, then twice as many, for those that take no fewer.

    A method that it wraps gets its share of them. Nothing where there is no such option, or no smaller number.

    >>> from explain.methods import IntegratedGradients, RISE
    >>> next(lighter(RISE(), 32)).samples, [each.steps for each in lighter(IntegratedGradients(steps=50), 32)]
    (32, [32])
    """
    inner = options(method).get("method")
    wrapped = inner if isinstance(inner, Method) and _size(inner) > 1 else None
    while most < _size(method):
        own = most if wrapped is None else isqrt(most)
        fewer: dict[str, Any] = {name: min(value, own) for name, value in _counts(method).items()}
        if wrapped is not None:
            fewer["method"] = next(lighter(wrapped, most // own), wrapped)
        with suppress(MethodError):  # it takes no fewer than some number
            yield replace(method, **fewer)
        most *= 2


def _counts(method: Method) -> dict[str, int]:
    return {name: value for name in COUNTS if isinstance(value := options(method).get(name), int)}


def _size(method: Method) -> int:
    """How many samples it takes, those of a method that it wraps for each of its own."""
    inner = options(method).get("method")
    return max(_counts(method).values(), default=1) * (_size(inner) if isinstance(inner, Method) else 1)


def _shown_counts(method: Method) -> list[str]:
    inner = options(method).get("method")
    mine = [f"{name}={value}" for name, value in _counts(method).items()]
    return mine + (_shown_counts(inner) if isinstance(inner, Method) else [])


def default_questions(seed: int = 0) -> tuple[Question, ...]:
    """The questions about every map, in this order.

    >>> [question.word for question in default_questions()]
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
    questions: Sequence[Question] | None = None,
    **options: Any,
) -> Verdict:
    """Ask all questions about maps of one photo.

    Args:
        model: any ``nn.Module``; it is left as it was found.
        x: the photo as the model is given it, ``(1, C, H, W)``.
        maps: methods, and what each said of this photo and target.
        target: what was explained.
        label: what people call it.
        seed: of random weights, copies and noise.
        questions: other ones than `default_questions`.
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
    return _Check(model, inputs, named, target, options).verdict(questions or default_questions(seed), label, seed)


Results = dict[tuple[str, str], MetricResult]
"""By method and question."""


class _Check:
    """One call of `check_maps`."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        maps: Mapping[str, tuple[Method, Attribution]],
        target: Target,
        options: Mapping[str, Any],
    ) -> None:
        _ = Settings(**options).work  # refused here, and not once for each question
        self.model, self.inputs, self.maps, self.target, self.options = model, inputs, maps, target, options
        self.images = inputs.x if inputs.x.dtype in (torch.float32, torch.float64) else inputs.x.float()
        first = next(iter(maps.values()))[1]
        self.classes = None if isinstance(first.target, str) else first.target.to(self.images.device)
        self.logits = None if first.logits is None else first.logits.to(self.images.device)
        count = None if self.logits is None else self.logits.shape[1]
        self.outputs = Outputs()
        if self.logits is not None:
            self.outputs = outputs_of(model, inputs, self.logits, options.get("activation"))
            self.options = {**options, "activation": self.outputs.activation}
        self.context = ModelContext(model, self.images, self.classes, count, self.logits, inputs)
        self.notes: dict[str, list[str]] = {name: [] for name in maps}
        self.failed: dict[tuple[str, str], str] = {}

    def verdict(self, questions: Sequence[Question], label: str, seed: int) -> Verdict:
        data = {name: self._data(name, attribution) for name, (_, attribution) in self.maps.items()}
        flat = {name: each for name, each in data.items() if each.maps.flat[0]}
        varied = {name: each for name, each in data.items() if name not in flat}
        results: Results = {}
        if varied:
            results = self._by_scores(questions, varied) | self._by_reattribution(questions, varied)
        answers = {}
        for name, each in data.items():
            given = []
            for question in questions:
                result = results.get((name, question.name))
                if name in flat:
                    what = "says the same everywhere" if bool(each.maps.values.any()) else "is zero everywhere"
                    given.append(question.answer(math.nan, False, f"the map {what}"))
                elif result is None:
                    given.append(question.answer(math.nan, None, self._not_applicable(question, each)))
                else:
                    given.append(question.judge(result))
            answers[name] = Answers(name, tuple(given), tuple(self.notes[name]))
        return Verdict(label, answers, seed)

    def _data(self, name: str, attribution: Attribution) -> MetricInput:
        probability = probability_of(self.outputs, self.classes, self.logits)
        maps = Maps.of(name, attribution, self.images)
        score = attribution.score.to(self.images.device)
        return MetricInput(maps, self.images, score, probability, self.classes, outputs=self.outputs)

    def _not_applicable(self, question: Question, data: MetricInput) -> str:
        """Why a question cannot be answered about a map, or failed; empty where it can."""
        if (data.maps.name, question.name) in self.failed:
            return self.failed[data.maps.name, question.name]
        try:
            return question.not_applicable(self.context, data)
        except ExplainError as error:
            return str(error)

    def _by_scores(self, questions: Sequence[Question], data: Mapping[str, MetricInput]) -> Results:
        """The results of score metrics; the perturbed photos of all maps run together."""
        metrics = [question for question in questions if isinstance(question, ScoreMetric)]
        if not metrics:
            return {}
        maps: dict[str, Any] = {name: self.maps[name][1] for name in data}

        def evaluated(metrics: Sequence[Any]) -> Results:
            table = evaluate(self.model, self.inputs, maps, metrics, target=self.target, **self.options)
            return {(name, metric): each for name, row in table.judged.items() for metric, each in row.items()}

        return self._each(evaluated, metrics, data)

    def _by_reattribution(self, questions: Sequence[Question], data: Mapping[str, MetricInput]) -> Results:
        """The results of metrics that run the methods again; methods of many passes run with fewer samples."""
        metrics = [
            question
            for question in questions
            if isinstance(question, ReattributionMetric)
            and not any(self._not_applicable(question, each) for each in data.values())
        ]
        if not metrics:
            return {}
        groups: dict[tuple[Any, bool], dict[str, EvaluatedMethod]] = {}
        for name, each in data.items():
            method, attribution = self.maps[name]
            evaluated, long = self._with_fewer_samples(EvaluatedMethod(method, attribution, each))
            groups.setdefault((attribution.fuse, long), {})[name] = evaluated
        found: Results = {}
        for (fuse, long), group in groups.items():
            options: Options = {**self.options, "fuse": fuse}  # type: ignore[typeddict-item]
            rerun = partial(
                reattribute,
                methods=group,
                context=self.context,
                inputs=self.inputs,
                target=self.target,
                options=options,
            )
            found |= self._each(rerun, [question.reduced for question in metrics] if long else metrics, group)
        return found

    def _each(
        self, evaluate: Callable[[Sequence[Any]], Results], questions: Sequence[Question], maps: Iterable[str]
    ) -> Results:
        """Evaluate all questions together; if one of them fails, each alone, so that the others have an answer."""
        with muted():  # the answers say it
            try:
                return evaluate(questions)
            except ExplainError as error:
                if len(questions) > 1:
                    return {key: each for one in questions for key, each in self._each(evaluate, [one], maps).items()}
                self.failed |= {(name, questions[0].name): str(error) for name in maps}
                return {}

    def _with_fewer_samples(self, evaluated: EvaluatedMethod) -> tuple[EvaluatedMethod, bool]:
        """The method with fewer samples, if each of its maps takes many passes; and whether it still takes long."""
        attribution, name = evaluated.attribution, evaluated.data.maps.name
        cost = self._cost(evaluated.method, attribution)
        if cost <= COSTLY:
            return evaluated, False
        why = f"since a map takes {cost:.0f} passes" if math.isfinite(cost) else "since a map takes many passes"
        options: Any = {**self.options, "progress": None, "layer": attribution.layer, "fuse": attribution.fuse}
        for fewer in lighter(evaluated.method, FEW):
            try:
                with muted():
                    found = attribute(self.model, self.inputs, fewer, target=self.target, **options)
            except MethodError:
                continue
            self.notes[name].append(f"run again with {', '.join(_shown_counts(fewer))}, {why}")
            return EvaluatedMethod(fewer, found, self._data(name, found)), False
        self.notes[name].append(f"run again as few times as possible, {why}")
        return evaluated, True

    def _cost(self, method: Method, attribution: Attribution) -> float:
        """How many passes a map takes."""
        layer = attribution.layer
        planned = plan(self.model, self.inputs, method, target=self.target, layer=layer, fuse=attribution.fuse)
        layers = {ask.layer for asks in planned.wanted.values() for ask in asks if ask.layer is not None}
        return planned.cost(shares_behind(self.model, self.inputs, layers))


class CheckedExplanation(Protocol):
    """An explanation, as far as it takes to check its maps."""

    @property
    def photo(self) -> Image.Image: ...

    @property
    def source(self) -> str | None: ...

    @property
    def explainer(self) -> Any: ...

    @property
    def request(self) -> Any: ...

    @property
    def crops(self) -> Sequence[Any]: ...

    @property
    def targets(self) -> list[str]: ...

    @property
    def question(self) -> Any: ...

    @property
    def verdicts(self) -> dict[int, Verdict]: ...


def check_explained(
    explanation: CheckedExplanation, found: Sequence[Attribution], index: int, **options: Any
) -> Verdict:
    """Check maps of the target at a position, and keep the verdict among those of the explanation.

    Raises:
        MetricError: it is a copy, and has no model to ask; or the maps are of several crops.
    """
    if explanation.explainer is None or explanation.request is None:
        raise MetricError("explanation must have its model to be checked, but is a copy; explain the photo again")
    if explanation.crops:
        raise MetricError("maps must be of one crop to be checked, got some of five; use crop='center'")
    chosen, request, explainer = found[0].target, explanation.request, explanation.explainer
    own = request.targets[index]
    target = own if isinstance(chosen, str) else ClassTarget((int(chosen[0]),))
    given = [] if isinstance(request.methods, str) else request.methods
    maps = [(method_behind(each, given), each) for each in found]
    precision, label = explanation.question.precision, explanation.targets[index]
    with naming([explanation.source]):
        x = explainer.as_input(explanation.photo)
        verdict = check_maps(
            explainer.model, x, maps, target, label, precision=precision, activation=explainer.activation, **options
        )
    known = explanation.verdicts.get(index)
    explanation.verdicts[index] = verdict if known is None else known.with_answers(verdict)
    return verdict


def answers_of(explanation: CheckedExplanation, method: str, index: int) -> Answers | None:
    """The answers about a map, if it was checked."""
    verdict = explanation.verdicts.get(index)
    return None if verdict is None else verdict.answers.get(method)


def method_behind(attribution: Attribution, given: Sequence[Method] = ()) -> Method:
    """The method that made an attribution, with its options; one of these, or one that is known by its name.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> method_behind(Attribution("gradcam", one, "score", one[0, 0], None, (1, 1), options={"relu": False}))
    GradCAM(relu=False)
    """
    method = next((each for each in given if each.name == attribution.method), None) or get_method(attribution.method)
    made_with = {each.name for each in fields(method) if each.init}
    options = {name: value for name, value in attribution.options.items() if name in made_with}
    return replace(method, **options)
