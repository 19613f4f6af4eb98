"""Weights in files: tensors only, never code."""

import hashlib
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import nn

from explain._utils.errors import ModelError, did_you_mean, quiet
from explain.models.classifier import Classifier


def with_weights(classifier: Classifier, path: str | Path) -> Classifier:
    """Load a state dict into a classifier's model, and say so in the classifier."""
    fit_weights(classifier.model, read_weights(path), path)
    return replace(classifier, weights=describe_weights(path))


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
    except pickle.UnpicklingError:
        told = "a PyTorch file with nothing but tensors, but is another or runs code; save model.state_dict()"
        raise ModelError(f"weights {str(path)!r} must be {told}") from None
    except Exception as error:  # a damaged file may break the reader anywhere
        told = " ".join(str(error).split())[:100]  # which may be no more than a number
        reason = told if re.search("[a-z]{3}", told) else "it is not a file of PyTorch"
        raise ModelError(f"weights {str(path)!r} cannot be read ({reason}); save them again") from None
    if isinstance(content, Mapping):
        inside = (content.get(key) for key in ("state_dict", "model_state_dict", "model"))
        content = next((each for each in inside if isinstance(each, Mapping)), content)
    is_state = isinstance(content, Mapping) and all(isinstance(value, torch.Tensor) for value in content.values())
    if not is_state or not content:
        raise ModelError(f"weights {str(path)!r} must hold a state dict of tensors; save model.state_dict()")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def _read(path: Path) -> Any:
    if path.suffix.lower() == ".safetensors":
        return safetensors.torch.load_file(path)
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
    if wrong:
        first = f"{wrong[0]} is {tuple(state[wrong[0]].shape)} instead of {tuple(own[wrong[0]].shape)}"
    elif missing:
        first = f"{missing[0]} is missing"
    elif extra:
        first = f"{extra[0]} is not in the model; {did_you_mean(extra[0], own)}"
    else:
        model.load_state_dict(state)
        return
    kinds = {"missing": missing, "unknown": extra, "of another shape": wrong}
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in kinds.items() if names)
    told = f"of their tensors {counts} ({first}); take those of this very network"
    raise ModelError(f"weights {str(path)!r} must fit the model, but {told}")


def describe_weights(path: str | Path) -> str:
    """Return the name of a file of weights and its SHA-256, for a record."""
    with Path(path).open("rb") as file:
        return f"{path} (sha256 {hashlib.file_digest(file, 'sha256').hexdigest()})"
