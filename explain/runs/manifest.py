"""What fixes a run: model, weights, methods, targets, options and versions, as plain values."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from explain._utils.errors import RunError
from explain.attribution.records import class_name, encode, encode_fields, unknown, versions
from explain.explanation.explainer import Explainer
from explain.methods import Method
from explain.metrics import Metric
from explain.runs.fingerprint import alike, identity
from explain.runs.schema import FORMAT
from explain.runs.sources import Source
from explain.targets import Target

FREE = frozenset(["begun", "ended", "device", "batch_size"])
"""What may differ when a run is continued: it changes when results come, but not what they are."""


def manifest_of(
    *,
    source: Source,
    explainer: Explainer,
    methods: Sequence[Method] | str,
    targets: Sequence[Target],
    metrics: Sequence[Metric],
    options: Mapping[str, Any],
    trained: bool = False,
) -> dict[str, Any]:
    """Return what a run is, in values that JSON can hold; ``trained`` says that the model changes meanwhile."""
    model = explainer.model
    about = {name: value for name, value in options.items() if name not in ("layer", "progress", "keep_partial")}
    found = {
        "format": FORMAT,
        "source": source.identity(),
        **identity(explainer, trained=trained),
        "methods": methods if isinstance(methods, str) else {each.name: described_method(each) for each in methods},
        "targets": [encode(each) for each in targets],
        "metrics": {metric.name: repr(metric) for metric in metrics},
        "layer": named_layer(model, options.get("layer")),
        **{name: encode(value) for name, value in about.items()},
        "versions": {name: version for name, version in versions().items() if name != "torchvision"},
        "device": str(next((p.device for p in model.parameters()), "cpu")),
        "begun": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))  # so that it compares with what was read
    return plain


def described_method(method: Method) -> dict[str, Any]:
    """Return a method in plain values: its class in this package, and its options."""
    return {"class": class_name(method), "options": encode_fields(method)}


def must_agree(before: Mapping[str, Any], now: Mapping[str, Any], file: str) -> None:
    """Refuse to continue a run that was begun with something else, or with what cannot be compared.

    Raises:
        RunError: the first thing that differs is named, with both values.
    """
    for key in [*now, *(key for key in before if key not in now)]:
        if key in FREE:
            continue
        own = unknown(now.get(key))
        if own:
            raise RunError(
                f"run {file!r} cannot be continued, since its {key} have {own[0]}, which is your own and cannot be "
                "compared; give another output, or what this package has"
            )
        if not alike(key, before.get(key), now.get(key)):
            place, old, new = _where_they_differ(key, before.get(key), now.get(key))
            raise RunError(
                f"run {file!r} must be continued as it was begun, but its {place} was {_brief(old)} and is now "
                f"{_brief(new)}; give the same, or another output"
            )


def named_layer(model: nn.Module, layer: Any) -> Any:
    """Return the names of layers that were given as modules or names."""
    if isinstance(layer, (list, tuple)):
        return [named_layer(model, each) for each in layer]
    if isinstance(layer, nn.Module):
        return next((name for name, module in model.named_modules() if module is layer), type(layer).__name__)
    return layer


def _where_they_differ(place: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Of two dictionaries that differ in one key, that key, and so on."""
    while isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        if len(keys) != 1:
            break
        place, old, new = f"{place}, {keys[0]}", old.get(keys[0]), new.get(keys[0])
    return place, old, new


def _brief(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 80 else f"{shown[:79]}…"
