"""`check_maps`: maps of one photo in, a `Verdict` out; what methods have in common is run once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from explain.attribution import attribute_targets, plan
from explain.engine import check_inputs, outputs_of
from explain.errors import ExplainError, MetricError, muted
from explain.hooks import unwrapped
from explain.inputs import Inputs
from explain.layers import shares_behind
from explain.methods import Method
from explain.metrics.again import Asked, OfMethod, World, asked_again
from explain.metrics.base import Case, Judged
from explain.metrics.evaluation import evaluate, probability_of
from explain.metrics.maps import Maps
from explain.metrics.rows import OfScores
from explain.metrics.verdict.answers import Answer, Answers, Verdict
from explain.metrics.verdict.asking import Question, answered
from explain.metrics.verdict.classes import DependsOnClass
from explain.metrics.verdict.lighter import COSTLY, FEW, asked_lightly
from explain.metrics.verdict.places import Faithful
from explain.metrics.verdict.randomness import DependsOnModel
from explain.metrics.verdict.stability import Stable
from explain.request import Options, Settings
from explain.result import Attribution
from explain.targets import Outputs, Target


def questions(seed: int = 0) -> tuple[Question, ...]:
    """What every map is asked, in this order.

    >>> [question.word for question in questions()]
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
    asked: Sequence[Question] | None = None,
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
        asked: other questions than `questions`.
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
    return _Check(model, inputs, named, target, options).verdict(asked or questions(seed), label, seed)


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
        self.world = World(model, self.images, self.classes, count, self.logits, inputs)
        self.notes: dict[str, list[str]] = {name: [] for name in maps}
        self.failed: dict[tuple[str, str], str] = {}

    def verdict(self, asked: Sequence[Question], label: str, seed: int) -> Verdict:
        cases = {name: self._case(name, each) for name, (_, each) in self.maps.items()}
        empty = {name: "" if not case.maps.flat[0] else _nothing(case) for name, case in cases.items()}
        full = {name: case for name, case in cases.items() if not empty[name]}
        judged = self._by_scores(asked, full) | self._by_asking(asked, full)
        answers = {}
        for name, case in cases.items():
            given = [self._answer(question, case, judged.get((name, question.name)), empty[name]) for question in asked]
            answers[name] = Answers(name, tuple(given), tuple(self.notes[name]))
        return Verdict(label, answers, seed)

    def _case(self, name: str, attribution: Attribution) -> Case:
        probability = probability_of(self.outputs, self.classes, self.logits)
        maps = Maps.of(name, attribution, self.images)
        score = attribution.score.to(self.images.device)
        return Case(maps, self.images, score, probability, self.classes, outputs=self.outputs)

    def _answer(self, question: Question, case: Case, judged: Judged | None, empty: str) -> Answer:
        if empty:
            return answered(question, math.nan, False, empty)
        if judged is None:
            return answered(question, math.nan, None, self._unasked(question, case))
        return question.judge(judged)

    def _unasked(self, question: Question, case: Case) -> str:
        """Why a question cannot be asked about a map, or could not; nothing where it can."""
        if (case.maps.name, question.name) in self.failed:
            return self.failed[case.maps.name, question.name]
        try:
            return question.unasked(self.world, case)
        except ExplainError as error:
            return str(error)

    def _by_scores(self, asked: Sequence[Question], cases: Mapping[str, Case]) -> dict[tuple[str, str], Judged]:
        """What becomes of the score where the photo is covered; all maps of one call are run together."""
        metrics = [question for question in asked if isinstance(question, OfScores)]
        if not metrics or not cases:
            return {}
        given: dict[str, Any] = {name: self.maps[name][1] for name in cases}

        def judged(metrics: Sequence[Any]) -> dict[tuple[str, str], Judged]:
            table = evaluate(self.model, self.inputs, given, metrics, target=self.target, **self.options)
            return {(name, metric): each for name, row in table.judged.items() for metric, each in row.items()}

        return self._each(judged, metrics, cases)

    def _by_asking(self, asked: Sequence[Question], cases: Mapping[str, Case]) -> dict[tuple[str, str], Judged]:
        """What the methods say in other settings, those that run the model very often with fewer samples."""
        metrics = [
            question
            for question in asked
            if isinstance(question, OfMethod) and not any(self._unasked(question, case) for case in cases.values())
        ]
        if not metrics or not cases:
            return {}
        groups: dict[tuple[Any, bool], dict[str, Asked]] = {}
        for name, case in cases.items():
            method, attribution = self.maps[name]
            asked_as, long = self._lighter(name, method, attribution, case)
            groups.setdefault((attribution.fuse, long), {})[name] = asked_as
        found: dict[tuple[str, str], Judged] = {}
        for (fuse, long), group in groups.items():
            options: Options = {**self.options, "fuse": fuse}  # type: ignore[typeddict-item]
            given: list[Any] = [question.brief for question in metrics] if long else metrics

            def judged(
                metrics: Sequence[Any], group: Mapping[str, Asked] = group, options: Options = options
            ) -> dict[tuple[str, str], Judged]:
                return asked_again(metrics, group, self.world, self.inputs, self.target, options)

            found |= self._each(judged, given, group)
        return found

    def _each(
        self, judge: Callable[[Sequence[Any]], dict[tuple[str, str], Judged]], asked: Sequence[Any], maps: Iterable[str]
    ) -> dict[tuple[str, str], Judged]:
        """Ask all questions together; if one of them fails, each alone, so that the others have an answer."""
        with muted():  # the answers say it
            try:
                return judge(asked)
            except ExplainError as error:
                if len(asked) > 1:
                    return {key: each for one in asked for key, each in self._each(judge, [one], maps).items()}
                self.failed |= {(name, asked[0].name): str(error) for name in maps}
                return {}

    def _lighter(self, name: str, method: Method, attribution: Attribution, case: Case) -> tuple[Asked, bool]:
        """The method as it is asked again: with fewer samples, if each of its maps takes many passes.

        And whether it takes long all the same, since it has no such option.
        """
        cost = self._cost(method, attribution)
        if cost <= COSTLY:
            return Asked(method, attribution, case), False

        def ask(fewer: Method) -> Attribution:
            with muted():
                options = {**self.options, "progress": None, "layer": attribution.layer, "fuse": attribution.fuse}
                found: Attribution = attribute_targets(self.model, self.inputs, fewer, [self.target], **options)[0][
                    fewer.name
                ]
            return found

        lighter = asked_lightly(method, FEW, ask)
        if lighter is None:
            self.notes[name].append(f"asked again as seldom as can be, since a map takes {_counted(cost)} passes")
            return Asked(method, attribution, case), True
        fewer, found, how = lighter
        self.notes[name].append(f"asked again with {how}, since a map takes {_counted(cost)} passes")
        return Asked(fewer, found, self._case(name, found)), False

    def _cost(self, method: Method, attribution: Attribution) -> float:
        """How many passes a map takes."""
        layer = attribution.layer
        planned = plan(self.model, self.inputs, method, [self.target], layer=layer, fuse=attribution.fuse)
        layers = {ask.layer for asks in planned.wanted.values() for ask in asks if ask.layer is not None}
        return planned.cost(shares_behind(self.model, self.inputs, layers))


def _nothing(case: Case) -> str:
    zero = not bool(case.maps.values.any())
    return "the map is zero everywhere" if zero else "the map says the same everywhere"


def _counted(cost: float) -> str:
    return f"{cost:.0f}" if math.isfinite(cost) else "many"
