"""Weights in files: tensors only, never code."""

import hashlib
import os
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from explain._utils.errors import ModelError, quiet, reason_of, shown
from explain.models.classifier import Classifier


def with_weights(classifier: Classifier, path: str | Path) -> Classifier:
    """Load a state dict from a file into a classifier's model, in place, and return the classifier
    with the file as its ``weights``."""
    fit_weights(classifier.model, read_weights(path), path)
    return replace(classifier, weights=describe_weights(path))


def check_file(what: str, path: Any) -> None:
    """Refuse a ``path`` to ``what`` that is none, or where no file is."""
    is_path = isinstance(path, (str, os.PathLike))
    if not is_path or not os.path.isfile(path):
        got = repr(os.fspath(path)) if is_path else shown(path)
        raise ModelError(f"{what} must be a file that is there, got {got}; check the path")


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Read a state dict that was saved with ``torch.save``, alone or under "state_dict", "model" or
    "model_state_dict", or a file of safetensors, which is known by its name.
    """
    check_file("weights", path)
    path = Path(path)
    try:
        with quiet():  # no warnings of old formats: what cannot be read is refused below
            content = _read(path)
    except Exception as error:  # a damaged file may break the reader anywhere
        reason = reason_of(error)
        if isinstance(error, pickle.UnpicklingError):
            reason = "it must hold nothing but tensors, and no code"
        # other bytes are read as instructions of pickle: one of these takes what was never stored
        # (KeyError), or the last one never comes
        elif isinstance(error, (KeyError, EOFError)):
            reason = "it is not a file of PyTorch"
        raise ModelError(
            f"weights {str(path)!r} cannot be read ({reason}); save model.state_dict()"
        ) from None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    is_state = isinstance(content, Mapping) and all(
        isinstance(value, torch.Tensor) for value in content.values()
    )
    if not is_state or not content:
        raise ModelError(
            f"weights {str(path)!r} must hold a state dict of tensors; save model.state_dict()"
        )
    # nn.DataParallel puts "module." before each name
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def _read(path: Path) -> Any:
    """The content of a weights file, read without running any code in it; compressed archives that
    would become larger are refused."""
    if path.suffix.lower() == ".safetensors":
        return safetensors.torch.load_file(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > path.stat().st_size:  # torch.save compresses none
            raise ValueError("it would become larger when it is unpacked")
    return torch.load(path, weights_only=True, map_location="cpu")


def fit_weights(model: nn.Module, state: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Load a state dict into a model of the same kind."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ModelError(
            f"weights {str(path)!r} must fit the model, but {reason_of(error, 200)}; take its own"
        ) from None


def describe_weights(path: str | Path) -> str:
    """Return the name of a file of weights and its SHA-256, for a record."""
    with Path(path).open("rb") as file:
        return f"{path} (sha256 {hashlib.file_digest(file, 'sha256').hexdigest()})"
