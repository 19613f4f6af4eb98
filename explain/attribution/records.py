"""What was done, as plain values: with a version, without a model inside, and exact enough to do it again.

A record is a dictionary of what JSON can hold; `explain.attribution.encoding` says how options and targets are written.
"""

import hashlib
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image

from explain._utils.version import __version__
from explain.attribution import pictures, result
from explain.attribution.encoding import encode
from explain.data.boxes import Box
from explain.engine.settings import Precision

FORMAT = 1
"""The version of the records."""


@dataclass(frozen=True)
class ModelOrigin:
    """What is known of the model behind a result, without the model.

    ``weights`` and ``preprocess`` describe these. ``arguments`` are those of an `Explainer` that loads the model
    again; ``own`` says which parts were the caller's, so that no argument brings them back. ``hooks`` names hooks of
    the caller's that were on the model: whether they altered it is unknown.
    """

    name: str
    weights: str | None
    preprocess: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The part of a record that says how to make the explainer again."""
        return {"arguments": encode(dict(self.arguments)), "own": list(self.own), "hooks": list(self.hooks)}


@dataclass(frozen=True)
class RecordedRequest:
    """A request, as far as its results do not show it.

    ``classes`` has the class of each method of this package by the method's name, and None for the caller's own;
    ``targets`` what `encode_target` writes for each target. ``request`` are all arguments, where the caller wants to
    recognise the request later.
    """

    classes: Mapping[str, str | None]
    targets: tuple[Any, ...] = ()
    precision: Precision = "full"
    request: Mapping[str, Any] | None = None

    def target(self, index: int) -> Any:
        """The target at a position, where the class in the result is not enough to repeat it."""
        return self.targets[index] if index < len(self.targets) else None


def digest(content: bytes) -> str:
    """Return the SHA-256 of some bytes, in the form that records use."""
    return hashlib.sha256(content).hexdigest()


def identity(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The shape and digest of an array, as records have them."""
    return {"shape": list(values.shape), "sha256": digest(values.tobytes())}


def versions() -> dict[str, str]:
    """The versions of the packages that every explanation uses."""
    modules = {"numpy": np, "pillow": PIL, "torch": torch, "torchvision": sys.modules.get("torchvision")}
    packages = {name: str(module.__version__) for name, module in modules.items() if module}  # torchvision if used
    return {"explain": __version__, "python": platform.python_version(), **packages}


def origin_of(
    photo: Image.Image, source: str | None, model: ModelOrigin, seen: Box, input_size: tuple[int, ...]
) -> dict[str, Any]:
    """The photo, the model and the packages behind a result: the fields that all records have."""
    return {
        "image": {"path": source, "size": list(photo.size), "sha256": digest(photo.tobytes())},
        "model": model.name,
        "weights": model.weights,
        "preprocess": model.preprocess,
        "explainer": model.to_dict(),
        "input_size": list(input_size),
        "seen": asdict(seen),
        "versions": versions(),
    }


def estimate_of(attribution: result.Attribution) -> dict[str, Any] | None:
    """How many covered photos a map took, and what was reached: the largest error over the largest value, if known."""
    if attribution.samples is None:
        return None
    error = number_of(attribution.relative_error)
    return {
        "samples": attribution.samples,
        "planned": None if attribution.planned is None else int(attribution.planned.max()),
        "stopped": attribution.stopped or None,
        "finished": attribution.finished is None or bool(attribution.finished[0]),
        "error": None if error != error else error,  # NaN as long as the runs are too few
        "r2": number_of(attribution.r2),
    }


def number_of(tensor: torch.Tensor | None) -> float | None:
    """The number of the first image; None for none."""
    return None if tensor is None else float(tensor[0])


def options_run(attribution: result.Attribution) -> dict[str, Any]:
    """The options of a method, encoded; of one that was stopped early, those that make as many runs as it has made."""
    options = dict(attribution.options)
    if attribution.stopped:
        ran = {"samples": attribution.samples, "max_seconds": None}
        options |= {name: value for name, value in ran.items() if name in options}
    return {name: encode(value) for name, value in options.items()}


def values_of(attribution: result.Attribution) -> dict[str, Any]:
    """How to recognise the array that belongs to a record, and how to read it."""
    fields = identity(pictures.array(attribution.values[0]))
    fields |= {"size": list(attribution.size), "style": attribution.style, "input": attribution.input}
    if attribution.neutral is not None:
        fields["neutral"] = float(attribution.neutral[0])
    if attribution.sets is not None:
        fields["sets"] = attribution.sets.described(0)
    return fields
