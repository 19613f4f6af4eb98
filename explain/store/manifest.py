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
FREE = frozenset(["begun", "ended", "device", "batch_size"])
"""Keys that may differ when a run is continued: they do not change the results."""


def alike(key: str, one: Any, other: Any) -> bool:
    """Whether two values under a key of `model_identity` are the same, as far as devices
    compute the same.

    >>> alike("weights", 1.0, 1.000001)
    False
    """
    if key not in TOLERANCES or not one or not other:
        return bool(one == other)
    if [summary["shape"] for summary in one] != [summary["shape"] for summary in other]:
        return False
    numbers = np.array([summary["numbers"] for summary in one])
    other_numbers = np.array([summary["numbers"] for summary in other])
    size = np.maximum(numbers, other_numbers)[:, :1]
    return bool((np.abs(numbers - other_numbers) <= TOLERANCES[key] * size).all())


def digest_of_model(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers of a model, with their names.

    >>> (
    ...     digest_of_model(nn.ReLU()) == digest_of_model(nn.Tanh()),
    ...     digest_of_model(nn.ReLU()) == digest_of_model(nn.Linear(1, 1)),
    ... )
    (True, False)
    """
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


def must_agree(
    stored: Mapping[str, Any], now: Mapping[str, Any], file: str, *, more: bool = False
) -> None:
    """Refuse to continue a run that was begun with other options, or with some that cannot be
    compared.

    With ``more``, there may be further methods and metrics.

    Raises:
        RunError: the first thing that differs is named, with both values.
    """
    for key, value in now.items():
        callers_parts = unknown(value)
        if callers_parts:
            raise RunError(
                f"run {file!r} cannot be continued: {callers_parts[0]} in its {key} is your own; "
                "give another output"
            )
    old = dict(_leaves("", stored))
    new = dict(_leaves("", now))
    for key in {**new, **old}:
        first, *rest = key.split(", ")
        added = more and rest and first in ("methods", "metrics") and key not in old
        if added or first in FREE or alike(first, old.get(key), new.get(key)):
            continue
        values = [json.dumps(leaves.get(key), ensure_ascii=False) for leaves in (old, new)]
        was, is_now = (value if len(value) <= 80 else f"{value[:79]}…" for value in values)
        difference = f"its {key} was {was} and is now {is_now}"
        raise RunError(
            f"run {file!r} must be continued as it was begun, but {difference}; give another output"
        )


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The values inside of nested dictionaries, by all keys that lead there."""
    if isinstance(value, Mapping):
        for name, nested_value in value.items():
            yield from _leaves(f"{key}, {name}" if key else name, nested_value)
    else:
        yield key, value
