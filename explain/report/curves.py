"""What each method costs, and what happens to the score while the evidence is removed or shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from explain._utils.errors import ExplainError, muted
from explain.attribution.api import plan
from explain.attribution.records import decode, encode, method_of, unknown
from explain.attribution.result import Attribution
from explain.engine.settings import Progress
from explain.report.subject import Subject

if TYPE_CHECKING:
    from explain.metrics import MetricLike


def costs(subject: Subject) -> dict[str, float]:
    """Return the passes of each method, as far as they are known before it runs; nothing where the model is away."""
    if subject.explainer is None or subject.crops:
        return {}
    methods = []
    for name in subject.methods:
        try:
            asked = {each: encode(value) for each, value in subject.results[0][name].options.items()}
            methods.append(method_of({**subject.record(name), "options": asked}))
        except ExplainError:  # one of the caller's own
            continue
    if not methods:
        return {}
    try:
        with muted():
            found = plan(subject.explainer.model, subject.explainer.as_input(subject.photo), methods, target=0)
    except ExplainError:
        return {}
    each = {
        name: replace(found, wanted={name: asks}, targets=1, images=1).cost() for name, asks in found.wanted.items()
    }
    return {name: run_of(cost, subject.results[0].get(name)) for name, cost in each.items() if math.isfinite(cost)}


def run_of(cost: float, attribution: Attribution | None) -> float:
    """The passes that were really run, of a method that takes ``cost`` of them: fewer where it was stopped early.

    >>> one = torch.ones(1)
    >>> found = Attribution("rise", one, "score", one, None, (1,), spent=8 * one, planned=20 * one, finished=one > 1)
    >>> run_of(21, found)
    9.0
    """
    if attribution is None or not attribution.stopped or attribution.spent is None or attribution.planned is None:
        return cost
    return max(0.0, cost - float(attribution.planned.max() - attribution.spent.max()))


DIGITS = 5
STEPS, FEWEST = 20, 8
MOST = 8
"""Maps that get curves in `STEPS` steps; where there are more, each gets fewer, so that they take no longer."""


def can_be_run(subject: Subject) -> bool:
    """Whether the model is at hand, and saw one part of the photo."""
    return subject.explainer is not None and not subject.crops


def steps_for(maps: int) -> int:
    """In how many steps the evidence of each of so many maps is covered, unless told otherwise.

    >>> steps_for(1), steps_for(8), steps_for(12), steps_for(46)
    (20, 20, 13, 8)
    """
    return max(FEWEST, min(STEPS, STEPS * MOST // max(1, maps)))


def curves(subject: Subject, steps: int | None, progress: Progress | None = None) -> list[dict[str, dict[str, Any]]]:
    """Return for each target and method the curves of deletion and insertion, in so many steps; None is `steps_for`.

    Each takes as many runs of the model as steps. A target is left without where it is no class and cannot be asked
    again, and so is everything where the model is not at hand.
    """
    count = steps_for(sum(map(len, subject.results))) if steps is None else steps
    if not count or not can_be_run(subject):
        return [{} for _ in subject.results]
    x = subject.explainer.as_input(subject.photo)
    return [_of_target(subject, x, index, each, count, progress) for index, each in enumerate(subject.results)]


def curve(
    subject: Subject, index: int, method: str, steps: int = STEPS, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Return the curves of one map; None where it can have none."""
    if not can_be_run(subject):
        return None
    x, maps = subject.explainer.as_input(subject.photo), {method: subject.results[index][method]}
    return _of_target(subject, x, index, maps, steps, progress).get(method)


def _of_target(
    subject: Subject,
    x: torch.Tensor,
    index: int,
    maps: Mapping[str, Attribution],
    steps: int,
    progress: Progress | None,
) -> dict[str, dict[str, Any]]:
    from explain.metrics import Deletion, Insertion, evaluate  # loading them takes longer than drawing a picture

    target, score = _asked(subject, index, maps)
    if target is None:
        return {}
    metrics: list[MetricLike] = [Deletion(steps=steps, score=score), Insertion(steps=steps, score=score)]
    try:
        explainer = subject.explainer
        table = evaluate(
            explainer.model, x, maps, metrics, target=target, progress=progress, activation=explainer.activation
        )
    except ExplainError:  # a map or target that cannot be judged has no curve
        return {}
    found = {}
    for name in maps:
        at, deletion = table.curve(name, "deletion")
        insertion = table.curve(name, "insertion")[1]
        found[name] = {
            "at": _plain(at),
            "deletion": _plain(deletion[0]),
            "insertion": _plain(insertion[0]),
            "areas": {each: round(float(table[name][each][0]), DIGITS) for each in ("deletion", "insertion")},
            "reading": "score" if score == "logit" else score,
        }
    return found


def _asked(subject: Subject, index: int, maps: Mapping[str, Attribution]) -> tuple[Any, Any]:
    """The target to ask again, and which score of it; None where that cannot be done."""
    if not maps:
        return None, "logit"
    chosen = next(iter(maps.values())).target
    asked = subject.question.target(index)
    if isinstance(chosen, torch.Tensor) and asked is None:
        several = subject.probabilities is not None and len(subject.probabilities) > 1
        return int(chosen[0]), "probability" if several else "logit"
    if asked is None or unknown(asked):
        return None, "logit"
    try:
        return decode(asked), "logit"
    except ExplainError:
        return None, "logit"


def _plain(values: torch.Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.double().tolist()]
