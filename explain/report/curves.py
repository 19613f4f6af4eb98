"""What happens to the score while the evidence is covered, or shown: the curves of deletion and insertion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from explain.engine import Progress
from explain.errors import ExplainError
from explain.record import decode, unknown
from explain.report.subject import Subject
from explain.result import Attribution

if TYPE_CHECKING:
    from explain.metrics import MetricLike

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

    target, reading = _asked(subject, index, maps)
    if target is None:
        return {}
    metrics: list[MetricLike] = [Deletion(steps=steps, reading=reading), Insertion(steps=steps, reading=reading)]
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
            "reading": reading,
        }
    return found


def _asked(subject: Subject, index: int, maps: Mapping[str, Attribution]) -> tuple[Any, Any]:
    """The target to ask again, and what to read; None where that cannot be done."""
    if not maps:
        return None, "score"
    chosen = next(iter(maps.values())).target
    asked = subject.question.target(index)
    if isinstance(chosen, torch.Tensor) and asked is None:
        several = subject.probabilities is not None and len(subject.probabilities) > 1
        return int(chosen[0]), "probability" if several else "score"
    if asked is None or unknown(asked):
        return None, "score"
    try:
        return decode(asked), "score"
    except ExplainError:
        return None, "score"


def _plain(values: torch.Tensor) -> list[float]:
    return [round(value, DIGITS) for value in values.double().tolist()]
