"""How many passes each method takes, and the curves of deletion and insertion of each map."""

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
    from explain.metrics.base import MetricLike

DIGITS = 5
STEPS, FEWEST_STEPS = 20, 8
FULL_STEPS_MAPS = 8
"""Maps that get curves in `STEPS` steps; where there are more, each gets fewer, so that the total stays the same."""


def costs(subject: Subject) -> dict[str, float]:
    """Return the passes of each method, where they are known; empty without a model."""
    if not has_model(subject):
        return {}
    methods = []
    for name in subject.methods:
        try:
            options = {each: encode(value) for each, value in subject.results[0][name].options.items()}
            methods.append(method_of({**subject.record(name), "options": options}))
        except ExplainError:  # a method of the caller's own
            continue
    if not methods:
        return {}
    try:
        with muted():
            found = plan(subject.explainer.model, subject.explainer.as_input(subject.photo), methods, target=0)
    except ExplainError:
        return {}
    each = {
        name: replace(found, wanted={name: needs}, targets=1, images=1).cost() for name, needs in found.wanted.items()
    }
    return {name: passes_run(cost, subject.results[0].get(name)) for name, cost in each.items() if math.isfinite(cost)}


def passes_run(cost: float, attribution: Attribution | None) -> float:
    """Return the passes of a method that takes ``cost`` of them, less those that were left out by stopping early.

    >>> one = torch.ones(1)
    >>> found = Attribution("rise", one, "score", one, None, (1,), spent=8 * one, planned=20 * one, finished=one > 1)
    >>> passes_run(21, found)
    9.0
    """
    if attribution is None or not attribution.stopped or attribution.spent is None or attribution.planned is None:
        return cost
    return max(0.0, cost - float(attribution.planned.max() - attribution.spent.max()))


def has_model(subject: Subject) -> bool:
    """Whether metrics can run: the model is available, and the maps are of one crop."""
    return subject.explainer is not None and not subject.crops


def steps_for(maps: int) -> int:
    """Return the default number of steps of the curves of so many maps.

    >>> steps_for(1), steps_for(8), steps_for(12), steps_for(46)
    (20, 20, 13, 8)
    """
    return max(FEWEST_STEPS, min(STEPS, STEPS * FULL_STEPS_MAPS // max(1, maps)))


def curves(subject: Subject, steps: int | None, progress: Progress | None = None) -> list[dict[str, dict[str, Any]]]:
    """Return for each target and method the curves of deletion and insertion; ``steps`` None means `steps_for`.

    Each takes as many passes of the model as steps. Targets that are no class and cannot be computed again have none.
    """
    count = steps_for(sum(map(len, subject.results))) if steps is None else steps
    if not count or not has_model(subject):
        return [{} for _ in subject.results]
    return [_of_target(subject, index, each, count, progress) for index, each in enumerate(subject.results)]


def curve(
    subject: Subject, index: int, method: str, steps: int = STEPS, progress: Progress | None = None
) -> dict[str, Any] | None:
    """Return the curves of one map; None where it can have none."""
    if not has_model(subject):
        return None
    maps = {method: subject.results[index][method]}
    return _of_target(subject, index, maps, steps, progress).get(method)


def _of_target(
    subject: Subject, index: int, maps: Mapping[str, Attribution], steps: int, progress: Progress | None
) -> dict[str, dict[str, Any]]:
    from explain.metrics import Deletion, Insertion, evaluate  # slow to load

    target, score = _target_and_score(subject, index)
    if target is None or not maps:
        return {}
    metrics: list[MetricLike] = [Deletion(steps=steps, score=score), Insertion(steps=steps, score=score)]
    explainer = subject.explainer
    try:
        table = evaluate(
            explainer.model, explainer.as_input(subject.photo), maps, metrics, target=target, progress=progress,
            activation=explainer.activation,
        )  # fmt: skip
    except ExplainError:  # a map or target without this metric has no curve
        return {}
    found = {}
    for name in maps:
        at, deletion = table.curve(name, "deletion")
        insertion = table.curve(name, "insertion")[1]
        found[name] = {
            "at": _rounded(at),
            "deletion": _rounded(deletion[0]),
            "insertion": _rounded(insertion[0]),
            "areas": {each: round(float(table[name][each][0]), DIGITS) for each in ("deletion", "insertion")},
            "reading": "score" if score == "logit" else score,
        }
    return found


def _target_and_score(subject: Subject, index: int) -> tuple[Any, Any]:
    """Return the target of some maps for `evaluate`, and which score of it; a target None cannot be computed again."""
    chosen = next(iter(subject.results[index].values())).target
    requested = subject.question.target(index)
    if requested is None and isinstance(chosen, torch.Tensor):
        several = subject.probabilities is not None and len(subject.probabilities) > 1
        return int(chosen[0]), "probability" if several else "logit"
    try:
        return None if unknown(requested) else decode(requested), "logit"
    except ExplainError:
        return None, "logit"


def _rounded(values: torch.Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.double().tolist()]
