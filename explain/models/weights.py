"""Weights from a file: tensors only, never code."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from explain.errors import ModelError, did_you_mean, quiet
from explain.models.safetensors import read_safetensors


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Read a state dict that was saved with ``torch.save``, alone or under "state_dict", "model" or "model_state_dict",
    or a file of safetensors, which is known by its name.

    Raises:
        ModelError: missing, damaged, or a file that holds more than tensors and would have to run code to load.
    """
    path = Path(path)
    if not os.path.isfile(path):  # unlike Path.is_file, this takes any name for an answer
        raise ModelError(f"weights {str(path)!r} must be a file, but there is none; check the path")
    try:
        with quiet():  # of old formats: what cannot be read is refused below
            content: Any = _read(path)
    except ModelError:
        raise
    except pickle.UnpicklingError:
        raise ModelError(
            f"weights {str(path)!r} must be a PyTorch file with nothing but tensors, but it is of another kind, or has "
            "to run code to load; save model.state_dict() and use that"
        ) from None
    except Exception as error:  # a damaged file may break the reader anywhere
        reason = " ".join(str(error).split())[:100]
        if not re.search("[a-z]{3}", reason):  # a damaged file may break the reader without a clear reason
            reason = "it is not a file of PyTorch"
        raise ModelError(f"weights {str(path)!r} cannot be read ({reason}); save them again with torch.save") from None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
            break
    if (
        not isinstance(content, Mapping)
        or not content
        or not all(isinstance(v, torch.Tensor) for v in content.values())
    ):
        raise ModelError(
            f"weights {str(path)!r} must hold a state dict of tensors; save model.state_dict() and use that"
        )
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def _read(path: Path) -> Any:
    if path.suffix.lower() == ".safetensors":
        return read_safetensors(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(each.file_size for each in archive.infolist()) > path.stat().st_size:  # torch.save compresses none
                raise ValueError("it would become larger when it is unpacked")
    return torch.load(path, weights_only=True, map_location="cpu")


def fit_weights(model: nn.Module, state: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Load a state dict into a model of the same kind.

    Raises:
        ModelError: names or shapes differ; the message names the first that does.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    extra = [name for name in state if name not in own]
    wrong = [name for name in own if name in state and own[name].shape != state[name].shape]
    if missing or extra or wrong:
        if wrong:
            first = f"{wrong[0]} is {tuple(state[wrong[0]].shape)} instead of {tuple(own[wrong[0]].shape)}"
        elif missing:
            first = f"{missing[0]} is missing"
        else:
            first = f"{extra[0]} is not in the model; {did_you_mean(extra[0], own)}"
        raise ModelError(
            f"weights {str(path)!r} must fit the model, but {_told(missing, extra, wrong)} ({first}); take those of "
            "this very network"
        )
    model.load_state_dict(state)


def _told(missing: list[str], extra: list[str], wrong: list[str]) -> str:
    """Say how many tensors do not fit, and why.

    >>> _told(["a"], [], ["b", "c"])
    '1 tensor is missing and 2 tensors have another shape'
    """
    kinds = [(missing, "is missing", "are missing"), (extra, "is unknown", "are unknown")]
    kinds.append((wrong, "has another shape", "have another shape"))
    return " and ".join(
        f"1 tensor {one}" if len(names) == 1 else f"{len(names)} tensors {several}"
        for names, one, several in kinds
        if names
    )


def describe_weights(path: str | Path) -> str:
    """Return the name of a file of weights and its SHA-256, for a record."""
    with Path(path).open("rb") as file:
        return f"{path} (sha256 {hashlib.file_digest(file, 'sha256').hexdigest()})"
