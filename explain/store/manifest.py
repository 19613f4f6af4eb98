"""What fixes a run, compared: a run that is continued must have the manifest with which it was
begun."""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from explain._utils.errors import RunError
from explain.attribution.encoding import class_name, encode_fields, unknown
from explain.methods import Method
from explain.targets.labels import class_label

TOLERANCES = {"test_inputs": 1e-4, "test_scores": 5e-3}  # devices differ in the last digits
MAY_DIFFER = frozenset(["begun", "ended", "device", "batch_size"])
"""Keys of a manifest that may differ when a run is continued: they do not change the results."""


def alike(key: str, one: Any, other: Any) -> bool:
    """Whether two values under a key of a manifest are the same; summaries of tensors, up to the
    rounding of different devices (`TOLERANCES`)."""
    if key not in TOLERANCES or not one or not other:
        return bool(one == other)
    if [summary["shape"] for summary in one] != [summary["shape"] for summary in other]:
        return False
    one_numbers = np.array([summary["numbers"] for summary in one])
    other_numbers = np.array([summary["numbers"] for summary in other])
    norm = np.maximum(one_numbers, other_numbers)[:, :1]
    return bool((np.abs(one_numbers - other_numbers) <= TOLERANCES[key] * norm).all())


def digest_of_model(model: nn.Module) -> str:
    """Return the SHA-256 of the names, types, shapes and values of all parameters and buffers;
    manifests keep it as ``weights``."""
    sha256 = hashlib.sha256()
    for name, value in model.state_dict().items():
        kind = (
            f"{value.dtype} {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else type(value).__name__
        )
        sha256.update(f"{name} {kind}\n".encode())
        sha256.update(tensor_bytes(value))
    return sha256.hexdigest()


def tensor_bytes(value: Any) -> Any:
    """The bytes of a tensor's values, wherever it is stored, for a digest; of anything else, and of
    tensors that are quantised or sparse, the bytes of a file of PyTorch."""
    try:
        return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    except (AttributeError, RuntimeError, TypeError, ValueError):  # quantised, sparse, or no tensor
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()


def described_method(method: Method) -> dict[str, Any]:
    """Return a method in plain values, as manifests and the table ``methods`` keep it: its class in
    this package, and its options."""
    return {"class": class_name(method), "options": encode_fields(method)}


def must_agree(
    stored: Mapping[str, Any], now: Mapping[str, Any], file: str, *, more: bool = False
) -> None:
    """Refuse to continue a run whose manifest differs from ``now`` (both values are named), or has
    the caller's own functions, which cannot be compared. ``more`` allows new methods and metrics.
    """
    for key, value in now.items():
        callers_parts = unknown(value)
        if callers_parts:
            raise RunError(
                f"run {file!r} cannot be continued: {callers_parts[0]} in its {key} is your own; "
                "give another output"
            )
    changes = changes_in_words(stored, now, more=more)
    if changes:
        most = "; ".join(changes[:MOST_CHANGES])
        rest = len(changes) - MOST_CHANGES
        raise RunError(
            f"run {file!r} must be continued as it was begun, but {most}"
            f"{f'; and {rest} more changes' if rest > 0 else ''}; ask for the same again"
            f"{_names_to_add(stored, now) if more else ''}, or give another output"
        )


def _names_to_add(stored: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A clause for messages: which methods or metrics, old and new, to ask for, so that the run
    only adds new ones. Empty where something else differs too.
    """
    old_and_new = {
        name: {**stored[name], **now[name]}
        for name in ("methods", "metrics")
        if isinstance(stored.get(name), Mapping) and isinstance(now.get(name), Mapping)
    }
    if changes_in_words(stored, {**now, **old_and_new}, more=True):
        return ""
    phrases = [
        f"the {name} {_in_words([*all_of_them], None)}"
        for name, all_of_them in old_and_new.items()
        if all_of_them.keys() > stored[name].keys() and all_of_them.keys() > now[name].keys()
    ]
    return f", name {' and '.join(phrases)} to add what is new" if phrases else ""


MOST_CHANGES = 3  # that a message names
IMPLIED_CHANGES = (
    ("model", "network", "weights", "structure", "weights_from", "categories", "temperature"),
    ("model", "explainer", "preprocess", "test_inputs"),
    ("model", "weights", "structure", "temperature", "explainer", "test_inputs", "test_scores"),
)
"""Properties of which a change of one changes those that follow it: only the first is told."""
DIGESTS = ("weights", "structure", "test_inputs", "test_scores")
"""Numbers that say only whether something is the same."""
WORDS = {"test_inputs": "preprocessed photos", "test_scores": "answers of the model"}


def changes_in_words(
    stored: Mapping[str, Any], now: Mapping[str, Any], *, more: bool = False
) -> list[str]:
    """Say what differs between two manifests, a phrase for each key; empty where the run can be
    continued. ``more`` allows further methods and metrics."""
    old = dict(_leaves("", stored))
    new = dict(_leaves("", now))
    changed: dict[str, list[str]] = {}
    for key in {**old, **new}:
        first, *rest = key.split(", ")
        added = more and rest and first in ("methods", "metrics") and key not in old
        if not (added or first in MAY_DIFFER or alike(first, old.get(key), new.get(key))):
            changed.setdefault(first, []).append(key)
    for group in IMPLIED_CHANGES:
        for name in [name for name in group if name in changed][1:]:
            del changed[name]
    categories = now.get("categories")
    lines = []
    for name, keys in changed.items():
        if name in DIGESTS:
            lines.append(f"{WORDS.get(name, name)}: others than before")
            continue
        collections = ("methods", "metrics")
        if name in collections and list(stored.get(name) or ()) != list(now.get(name) or ()):
            keys = [name]  # not what belongs to each of them
        for key in keys:
            earlier = _in_words(old.get(key, stored.get(key)), categories)
            later = _in_words(new.get(key, now.get(key)), categories)
            shown_key = key.replace(", options", "").replace("explainer, arguments, ", "")
            lines.append(f"{shown_key}: {earlier} before, {later} now")
    return lines


def _in_words(value: Any, categories: Sequence[str] | None) -> str:
    """A value of a manifest in words for a message: "none" for nothing, methods and targets by
    their names, at most five of several; a long text, such as a path, keeps its beginning and end.
    """
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, Mapping) and value.keys() == {"class", "options"}:
        return _target_in_words(value["class"], value["options"], categories)
    if isinstance(value, (list, Mapping)):
        words = [_in_words(item, categories) for item in value]
        if len(words) > 5:
            return f"{', '.join(words[:5])} and {len(words) - 5} more"
        return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)
    plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return plain if len(plain) <= 80 else f"{plain[:39]}…{plain[-40:]}"


def _target_in_words(
    name: str | None, options: Mapping[str, Any], categories: Sequence[str] | None
) -> str:
    """A target, or another class with options, in words: "the top class", the label of a class, or
    the class with its options.
    """
    if name == "TopClass":
        rank = options.get("rank", 0)
        return "the top class" if not rank else f"class {rank + 1} from the top"
    index = options.get("index")
    if name == "ClassTarget" and isinstance(index, Mapping) and "label" in index:
        return str(index["label"])
    if name == "ClassTarget" and isinstance(index, int):
        return class_label(categories, index)
    listed = ", ".join(f"{key}={_in_words(value, None)}" for key, value in options.items())
    return f"{name}({listed})"


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Flatten nested dictionaries: each value with the keys that lead to it, joined by ", ";
    `changes_in_words` splits them there."""
    if isinstance(value, Mapping):
        for name, nested_value in value.items():
            yield from _leaves(f"{key}, {name}" if key else name, nested_value)
    else:
        yield key, value
