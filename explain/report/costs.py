"""How many passes each method takes, for one photo and target."""

from __future__ import annotations

import math
from dataclasses import replace

from explain.attribution import plan
from explain.errors import ExplainError, muted
from explain.record import encode, method_of
from explain.report.subject import Subject
from explain.result import Attribution


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
            found = plan(subject.explainer.model, subject.explainer.as_input(subject.photo), methods, [0])
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
