"""How many passes each method takes, for one photo and target."""

from __future__ import annotations

import math
from dataclasses import replace

from explain.attribution import plan
from explain.errors import ExplainError, muted
from explain.record import method_of
from explain.report.subject import Subject


def costs(subject: Subject) -> dict[str, float]:
    """Return the passes of each method, as far as they are known before it runs; nothing where the model is away."""
    if subject.explainer is None or subject.crops:
        return {}
    methods = []
    for name in subject.methods:
        try:
            methods.append(method_of(subject.record(name)))
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
    return {name: cost for name, cost in each.items() if math.isfinite(cost)}
