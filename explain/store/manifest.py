"""What fixes a run, compared: a run that is continued must have the manifest with which it was begun."""

import hashlib
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from explain._utils.errors import RunError
from explain.attribution.encoding import class_name, encode_fields, unknown
from explain.methods import Method

TOLERANCES = {"test_inputs": 1e-4, "test_scores": 5e-3}  # devices differ in the last digits
FREE = frozenset(["begun", "ended", "device", "batch_size"])
"""Keys that may differ when a run is continued: they do not change the results."""


def alike(key: str, one: Any, other: Any) -> bool:
    """Whether two values under a key of `identity` are the same, as far as devices compute the same.

    >>> alike("weights", 1.0, 1.000001)
    False
    """
    if key not in TOLERANCES or one == other:
        return bool(one == other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(alike(key, *pair) for pair in zip(one, other, strict=True))
    if not isinstance(one, dict) or not isinstance(other, dict) or one["shape"] != other["shape"]:
        return False
    error = np.abs(np.subtract(one["waves"], other["waves"])).max()
    return bool(error <= TOLERANCES[key] * max(one["rms"], other["rms"]))


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers of a model, with their names.

    >>> digest_of(nn.ReLU()) == digest_of(nn.Tanh()), digest_of(nn.ReLU()) == digest_of(nn.Linear(1, 1))
    (True, False)
    """
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        kind = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        found.update(f"{name} {kind}\n".encode())
        found.update(tensor_bytes(value))
    return found.hexdigest()


def tensor_bytes(value: Any) -> Any:
    """The bytes of a tensor, or of anything else as PyTorch saves it."""
    try:
        return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    except (AttributeError, RuntimeError, TypeError, ValueError):  # quantised, sparse, or no tensor
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer.getvalue()


def described_method(method: Method) -> dict[str, Any]:
    """Return a method in plain values: its class in this package, and its options."""
    return {"class": class_name(method), "options": encode_fields(method)}


def must_agree(before: Mapping[str, Any], now: Mapping[str, Any], file: str, *, more: bool = False) -> None:
    """Refuse to continue a run that was begun with other options, or with some that cannot be compared.

    With ``more``, there may be further methods and metrics.

    Raises:
        RunError: the first thing that differs is named, with both values.
    """
    for key in [*now, *(key for key in before if key not in now)]:
        if key in FREE:
            continue
        own = unknown(now.get(key))
        if own:
            raise RunError(f"run {file!r} cannot be continued: {own[0]} in its {key} is your own; give another output")
        old = before.get(key)
        new = now.get(key)
        by_name = more and key in ("methods", "metrics") and isinstance(now.get("methods"), dict)
        added = by_name and isinstance(old, dict) and isinstance(new, dict) and old.items() <= new.items()
        if not alike(key, old, new) and not added:
            difference = _difference(key, old, new)
            raise RunError(f"run {file!r} must be continued as it was begun, but {difference}; give another output")


def _difference(key: str, old: Any, new: Any) -> str:
    """Both values of a key, or of the one key inside it in which two dictionaries differ."""
    while isinstance(old, dict) and isinstance(new, dict):
        keys = [each for each in {**old, **new} if old.get(each) != new.get(each)]
        if len(keys) != 1:
            break
        key = f"{key}, {keys[0]}"
        old = old.get(keys[0])
        new = new.get(keys[0])
    values = [json.dumps(value, ensure_ascii=False) for value in (old, new)]
    before, now = (value if len(value) <= 80 else f"{value[:79]}…" for value in values)
    return f"its {key} was {before} and is now {now}"
