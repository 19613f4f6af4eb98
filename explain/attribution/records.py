"""What was done, as plain values: with a version, without a model inside, and exact enough to do it
again.

A record is written as an object of JSON; `explain.attribution.encoding` says how options and
targets are written.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
import PIL
import torch
from PIL import Image

from explain._utils.errors import RecordError, shown
from explain._utils.options import CheckedFields, register_reader
from explain._utils.rounding import finite_or_none
from explain._utils.version import __version__
from explain.attribution import pictures, result
from explain.attribution.encoding import encode
from explain.data.bands import bytes_of
from explain.data.boxes import Box
from explain.methods.base import Fusion, Style
from explain.methods.evidence import Proof

FORMAT = 1
"""The version of the records."""

SIDE = 2**16
"""Rows and columns of a map are fewer: a damaged record must not ask for any amount of memory."""

Size: TypeAlias = tuple[int, int] | tuple[int, int, int]
Pixels: TypeAlias = tuple[tuple[int, int], str]
if TYPE_CHECKING:
    Object: TypeAlias = dict[str, Any]
else:
    Object = dict  # whose values are not checked

register_reader(dict, "an object", lambda value: value)


class Part(CheckedFields):
    """A part of a record: written with all of its fields, and checked by their types when it is
    read."""

    name: ClassVar[str]
    error: ClassVar[type[RecordError]] = RecordError
    minimums: ClassVar[Mapping[str, float]] = {"input_size": 1, "size": 1}
    below: ClassVar[Mapping[str, float]] = {"input_size": SIDE, "size": SIDE}

    def __init_subclass__(cls) -> None:
        """Register how this part of a record is read from an object of JSON, for fields of its
        type."""
        super().__init_subclass__()
        register_reader(cls, "an object", cls.read)

    @classmethod
    def read(cls, value: Any) -> Any:
        """Make a part of a record from an object of JSON; any other value is returned, for the
        field's check to refuse.
        """
        if not isinstance(value, dict):
            return value
        options = fields(cls)  # type: ignore[arg-type]
        needed = [option.name for option in options if option.default is MISSING]
        missing = [name for name in needed if name not in value]
        if missing:
            raise RecordError(f"{cls.name} must have {', '.join(missing)}, got {shown(value)}")
        return cls(
            **{option.name: value[option.name] for option in options if option.name in value}
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the part of a record in values of JSON, as it is written to files.
        Tuples become lists, as in the files that are read back.
        """
        plain: dict[str, Any] = json.loads(json.dumps(self, default=vars))
        return plain


@dataclass(frozen=True)
class RecordedImage(Part):
    """The photo: its file, if it had one, (width, height), and the digest of its pixels."""

    name: ClassVar[str] = "image"

    path: str | None
    size: tuple[int, int]
    sha256: str

    @property
    def pixels(self) -> Pixels:
        """What `size_and_digest` says of the photo."""
        return self.size, self.sha256


@dataclass(frozen=True)
class RecordedExplainer(Part):
    """How to make the explainer again: its arguments, encoded; the parts that were the caller's
    own; and hooks."""

    name: ClassVar[str] = "explainer"

    arguments: Object
    from_caller: tuple[str, ...]
    hooks: tuple[str, ...]


@dataclass(frozen=True)
class RecordedSet(Part):
    """What is known of a set of regions: what is proved of it, and the scores with it alone and
    without it."""

    name: ClassVar[str] = "set"

    proof: Proof
    alone: float | None
    without: float | None


@dataclass(frozen=True)
class RecordedValues(Part):
    """How to recognise the array that belongs to a record."""

    name: ClassVar[str] = "values"

    shape: tuple[int, ...]
    sha256: str
    format: Literal["npy", "npz"] = "npy"

    def are(self, values: np.ndarray[Any, Any]) -> bool:
        """Whether an array has the shape and digest that the record has of its values."""
        return {"shape": list(self.shape), "sha256": self.sha256} == shape_and_digest(values)


@dataclass(frozen=True)
class Record(Part):
    """All inputs and results of one map: enough to read it, and to compute it again. ``asked`` is
    the target where it was more than a class, as `encode_target` writes it. ``request`` are all
    arguments, where the caller wants to recognise the request later. ``placement`` says where the
    cells of a layer's map look; None where they are spread evenly, as in older records.
    """

    name: ClassVar[str] = "record"

    format: int
    image: RecordedImage
    model: str
    weights: str | None
    preprocess: str
    explainer: RecordedExplainer
    input_size: Size
    seen: Any
    versions: Any
    method: str
    options: Object
    layer: str | tuple[str, ...] | None
    target: int | str
    label: str
    score: float | None
    values: RecordedValues
    size: Size
    style: Style = "heat"
    input: str | None = None
    neutral: float | None = None
    radius: float | None = None
    sets: tuple[RecordedSet, ...] | None = None
    asked: Any = None
    crops: Any = ()
    fuse: Fusion | None = None
    probability: Any = None
    number: Any = None
    unit: str | None = None
    activation: str | None = None
    predictions: Any = ()
    delta: float | None = None
    estimate: Object | None = None
    interventions: Any = ()
    check: Object | None = None
    request: Any = None
    placement: Object | None = None


@dataclass(frozen=True)
class ModelOrigin:
    """What is known of the model behind a result, without the model.

    ``weights`` and ``preprocess`` describe these. ``arguments`` are those of an `Explainer` that
    loads the model again; ``from_caller`` says which parts were the caller's, so that no argument
    brings them back. ``hooks`` names hooks of the caller's that were on the model: whether they
    altered it is unknown.
    """

    name: str
    weights: str | None
    preprocess: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    from_caller: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The part of a record that says how to make the explainer again; the keys are those of
        `RecordedExplainer`."""
        arguments = {name: encode(value) for name, value in self.arguments.items()}
        return {
            "arguments": arguments,
            "from_caller": list(self.from_caller),
            "hooks": list(self.hooks),
        }


def sha256_of(content: bytes) -> str:
    """Return the SHA-256 of some bytes as hexadecimal digits, the form that records use."""
    return hashlib.sha256(content).hexdigest()


def size_and_digest(photo: Image.Image) -> Pixels:
    """The size and the SHA-256 of a photo's pixels: other rows may have the same bytes."""
    return photo.size, sha256_of(bytes_of(photo))


def shape_and_digest(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The shape and SHA-256 of an array, as records have them; the bytes are those in memory."""
    return {"shape": list(values.shape), "sha256": sha256_of(values.tobytes())}


def versions() -> dict[str, str]:
    """The versions of explain, Python and the packages that every explanation uses, by names that
    records keep. Torchvision is there only if it was imported.
    """
    modules = {
        "numpy": np,
        "pillow": PIL,
        "torch": torch,
        "torchvision": sys.modules.get("torchvision"),
    }
    # torchvision only if it is imported
    packages = {name: str(module.__version__) for name, module in modules.items() if module}
    return {"explain": __version__, "python": platform.python_version(), **packages}


def origin_of(
    photo: Image.Image,
    source: str | None,
    model: ModelOrigin,
    seen: Box,
    input_size: tuple[int, ...],
) -> dict[str, Any]:
    """The photo, the model and the package versions behind a result, as fields of `Record`.
    ``seen`` is the part of the photo that the model saw, ``input_size`` in pixels.
    """
    size, digest = size_and_digest(photo)
    return {
        "format": FORMAT,
        "image": {"path": source, "size": list(size), "sha256": digest},
        "model": model.name,
        "weights": model.weights,
        "preprocess": model.preprocess,
        "explainer": model.to_dict(),
        "input_size": list(input_size),
        "seen": vars(seen),
        "versions": versions(),
    }


FIELDS = ("method", "layer", "size", "style", "input", "fuse")
"""What records and attributions both have."""
NUMBERS = ("score", "delta", "neutral", "radius")
"""The same of tensors ``(N,)``, of which records have the number of the one image."""


def results_of(attribution: result.Attribution) -> dict[str, Any]:
    """A map's method, place, target, score and digest, as fields of `Record`. The samples are those
    that ran, so that a method that stopped early makes the same map again.
    """
    options = dict(attribution.options)
    placement = attribution.placement
    if attribution.stopped:  # as many runs again, however long they take
        options_of_run = {"samples": attribution.samples, "max_seconds": None}
        options |= {name: value for name, value in options_of_run.items() if name in options}
    estimate = None
    if attribution.samples is not None:
        estimate = {
            "samples": attribution.samples,
            "planned": None if attribution.planned is None else int(attribution.planned.max()),
            "stopped": attribution.stopped or None,
            "finished": attribution.finished is None or bool(attribution.finished[0]),
            "error": number_of(attribution.relative_error),
            "r2": number_of(attribution.r2),
        }
    return {
        **{name: getattr(attribution, name) for name in FIELDS},
        **{name: number_of(getattr(attribution, name)) for name in NUMBERS},
        "options": {name: encode(value) for name, value in options.items()},
        "target": attribution.target
        if isinstance(attribution.target, str)
        else int(attribution.target[0]),
        "estimate": estimate,
        "values": shape_and_digest(pictures.array(attribution.values[0])),
        "sets": None if attribution.sets is None else attribution.sets.described(0),
        "interventions": encode(list(attribution.interventions)),
        "placement": None if placement is None else placement[0].described,
    }


def number_of(tensor: torch.Tensor | None) -> float | None:
    """The number of the first image in a tensor ``(N,)``; None for no tensor, and for NaN or
    infinity."""
    return None if tensor is None else finite_or_none(float(tensor[0]))
