"""What fixes a run, compared: a run that is continued must have the manifest with which it was
begun."""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from explain._utils.errors import RunError
from explain.attribution.encoding import class_name, encode_fields, unknown
from explain.methods import Method

TOLERANCES = {"test_inputs": 1e-4, "test_scores": 5e-3}  # devices differ in the last digits
MAY_DIFFER = frozenset(["begun", "ended", "device", "batch_size"])
"""Keys of a manifest that may differ when a run is continued: they do not change the results."""


def alike(key: str, one: Any, other: Any) -> bool:
    """Whether two values under a key of a manifest are the same; summaries of tensors, up to the
    rounding of different devices (`TOLERANCES`)."""
    if key not in TOLERANCES or not one or not other:  # no summaries, or none on one side
        return bool(one == other)
    if [summary["shape"] for summary in one] != [summary["shape"] for summary in other]:
        return False
    one_numbers = np.array([summary["numbers"] for summary in one])
    other_numbers = np.array([summary["numbers"] for summary in other])
    # A summary begins with the norm of its tensor, which says how large rounding may be. Its other
    # numbers are sums with signs: they may be nearly zero, and the rounding in them is not.
    norms = np.maximum(one_numbers, other_numbers)[:, :1]
    return bool((np.abs(one_numbers - other_numbers) <= TOLERANCES[key] * norms).all())


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
        listed = "; ".join(changes[:MOST_CHANGES])
        rest = len(changes) - MOST_CHANGES
        raise RunError(
            f"run {file!r} must be continued as it was begun, but {listed}"
            f"{f'; and {rest} more changes' if rest > 0 else ''}; ask for the same again, "
            f"or give another output{' (methods and metrics can be added)' if more else ''}"
        )


MOST_CHANGES = 3  # that a message names
DIGESTS = ("weights", "structure", "test_inputs", "test_scores")
"""Numbers that say only whether something is the same."""
WORDS = {"test_inputs": "preprocessed photos", "test_scores": "answers of the model"}


def changes_in_words(
    stored: Mapping[str, Any], now: Mapping[str, Any], *, more: bool = False
) -> list[str]:
    """Say what differs between two manifests, a phrase for each value; empty where the run can be
    continued. ``more`` allows further methods and metrics."""
    phrases: list[str] = []
    for key in {**stored, **now}:
        earlier: Any = stored.get(key)
        later: Any = now.get(key)
        if more and key in ("methods", "metrics") and isinstance(later, Mapping):
            earlier = earlier or {}
            # without those that are added
            later = {name: later[name] for name in later if name in earlier}
        if key in MAY_DIFFER or alike(key, earlier, later):
            continue
        if key in DIGESTS:
            phrases.append(f"{WORDS.get(key, key)}: others than before")
        else:
            phrases += _changes(key, earlier, later)
    return phrases


def _changes(key: str, earlier: Any, later: Any) -> Iterator[str]:
    """Yield a phrase for each value that differs, with the keys that lead to it."""
    if isinstance(earlier, Mapping) and isinstance(later, Mapping):
        for name in {**earlier, **later}:
            # the word "options" would only make the phrase longer
            whole_key = key if name == "options" else f"{key}, {name}"
            yield from _changes(whole_key, earlier.get(name), later.get(name))
    elif earlier != later:
        yield f"{key}: {_in_words(earlier)} before, {_in_words(later)} now"


def _in_words(value: Any) -> str:
    """A value of a manifest in words for a message: "none" for nothing, a class with its options; a
    long text, such as a path, keeps its beginning and end.
    """
    if isinstance(value, Mapping):
        options = value.get("options", value)
        listed = ", ".join(f"{name}={_in_words(option)}" for name, option in options.items())
        words = f"{value.get('class', '')}({listed})"
    elif isinstance(value, list):
        words = ", ".join(map(_in_words, value))
    else:
        words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    words = "none" if words in ("", "null") else words
    return words if len(words) <= 80 else f"{words[:39]}…{words[-40:]}"
