"""What was done, as plain values: with a version, without a model inside, and exact enough to do it again.

A record is a dictionary of what JSON can hold. Options and targets that JSON cannot express are written as an object
with one tag: ``{"tuple": [...]}``, ``{"mapping": [[key, value], ...]}``, ``{"float": "inf"}``, ``{"tensor": ...}``,
``{"category": ...}`` (a class index with its label), or ``{"class": ..., "options": {...}}`` for a method or target of
this package. Anything else is the caller's own; ``{"unknown": ...}`` says what it was. Nothing that a record names is
ever imported or run.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import importlib
import math
import platform
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pkgutil import iter_modules
from typing import Any

import numpy as np
import PIL
import torch

from explain import baselines, methods, targets
from explain._utils.errors import ExplainError, RecordError
from explain._utils.version import __version__
from explain.attribution.pictures import array
from explain.attribution.result import Attribution
from explain.data.images import MAX_PIXELS
from explain.engine.settings import Precision
from explain.methods import Method
from explain.methods.registry import get_method
from explain.targets import ClassTarget, Target, TopClass
from explain.targets.base import Sum
from explain.targets.classes import Category

FORMAT = 3
"""The version of the records that are written; those of version 2 are read as well."""

UNPACKED = 2**28  # bytes that the tensors of a record have together; a baseline has a few millions
MOST_DIMENSIONS = 64  # of a tensor

NEEDED = ("image", "model", "method", "options", "layer", "target", "score", "input_size")


@dataclass(frozen=True)
class ModelOrigin:
    """What is known of the model behind a result, without the model.

    ``weights`` and ``preprocess`` describe these. ``arguments`` are those of an `Explainer` that loads the model
    again; ``own`` says which parts were the caller's, so that no argument brings them back. ``hooks`` names hooks of
    the caller's that were on the model: whether they altered it cannot be told.
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
    """What was asked, as far as the answers do not show it.

    ``classes`` has the class of each method of this package by the method's name, and None for the caller's own;
    ``targets`` what `asked` writes for each target. ``request`` is all that was asked of whom, where the caller wants
    to recognise it later.
    """

    classes: Mapping[str, str | None]
    targets: tuple[Any, ...] = ()
    precision: Precision = "full"
    request: Mapping[str, Any] | None = None

    def target(self, index: int) -> Any:
        """What was asked, if a class alone is not enough to ask it again."""
        return self.targets[index] if index < len(self.targets) else None


def described(function: Any) -> str:
    """Return a function's name, or how a callable object shows itself, on one line and without its address.

    >>> described(len), described(slice(1))
    ('len', 'slice(None, 1, None)')
    """
    shown = getattr(function, "__qualname__", None) or " ".join(repr(function).split())
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(shown))


def digest(content: bytes) -> str:
    """Return the SHA-256 of some bytes, in the form that records use."""
    return hashlib.sha256(content).hexdigest()


def encode(value: Any) -> Any:
    """Write an option, method or target in plain values.

    >>> from explain.methods import Augmented, GradCAM
    >>> encode(Augmented(GradCAM(), scales=(1.0, 0.9)))["options"]["scales"]
    {'tuple': [1.0, 0.9]}
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Category):
        return {"category": int(value), "label": value.label}
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value)
    if isinstance(value, tuple):
        return {"tuple": [encode(each) for each in value]}
    if isinstance(value, list):
        return [encode(each) for each in value]
    if isinstance(value, Mapping):
        return {"mapping": [[encode(key), encode(each)] for key, each in value.items()]}
    name = class_name(value)
    return {"unknown": described(value)} if name is None else {"class": name, "options": encode_fields(value)}


def encode_fields(value: Any) -> dict[str, Any]:
    """Write the fields that a dataclass is made with."""
    return {each.name: encode(getattr(value, each.name)) for each in fields(value) if each.init}


def class_name(value: Any) -> str | None:
    """The name of a method's or target's class in this package, or None for any other value."""
    kind = Sum if isinstance(value, Sum) else type(value)  # a Difference is a sum, and made in another way
    return kind.__name__ if _classes().get(kind.__name__) is kind else None


def is_number(value: Any) -> bool:
    """Whether a field holds a number that a tensor can hold."""
    return isinstance(value, float) or (type(value) is int and -(2**63) <= value < 2**63)


def is_size(value: Any) -> bool:
    """Whether a field holds a height and a width, of a video with the frames before them."""
    whole = isinstance(value, list) and len(value) in (2, 3) and all(type(each) is int and each > 0 for each in value)
    return whole and math.prod(value) <= MAX_PIXELS


def check_unpacked(value: Any, name: str = "record") -> None:
    """Refuse an encoded value whose tensors would need more memory than any that is written here.

    They are compressed: a file of megabytes may stand for any number of gigabytes.

    Raises:
        RecordError: it has too many bytes when it is unpacked.
    """
    if sum(_unpacked(each) for each in _mappings(value) if "tensor" in each) > UNPACKED:
        raise RecordError(
            f"{name} must hold tensors of at most {UNPACKED} bytes together, got more; give a record that was saved"
        )


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping in an encoded value, however deep, in their order."""
    waiting = [value]
    while waiting:
        inside = waiting.pop()
        if isinstance(inside, Mapping):
            yield inside
            inside = list(inside.values())
        if isinstance(inside, list):
            waiting += reversed(inside)


def _unpacked(value: Mapping[str, Any]) -> int:
    """How many bytes an encoded tensor says it has; none where it says nothing that can be read."""
    dtype, shape = getattr(torch, str(value.get("dtype")), None), value.get("shape")
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        return 0
    return dtype.itemsize * math.prod(shape) if all(is_number(each) and each >= 0 for each in shape) else 0


def decode(value: Any) -> Any:
    """Read what `encode` has written.

    Raises:
        RecordError: it holds something of the caller's own, or something that no version has written, or too much.

    >>> decode({"class": "GradCAM", "options": {"relu": False}})
    GradCAM(relu=False)
    """
    check_unpacked(value)
    return _decode(value)


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    try:
        return _decode_tagged(value)
    except ExplainError:
        raise
    except (TypeError, ValueError, RecursionError):  # what are not pairs, keys or numbers; or they never end
        raise RecordError(
            f"record must hold values as they were written, got {_brief(value)}; give that part yourself"
        ) from None


def _decode_tagged(value: Mapping[str, Any]) -> Any:
    match value:
        case {"float": str(text)}:
            return float(text)
        case {"category": int(index), "label": str(label)}:
            return Category(index, label)
        case {"tuple": [*values]}:
            return tuple(map(_decode, values))
        case {"mapping": [*pairs]}:
            return {_decode(key): _decode(each) for key, each in pairs}
        case {"tensor": str(), "dtype": str(), "shape": [*_]}:
            return _decode_tensor(value)
        case {"class": str(name), "options": dict(options)} if name in _classes():
            return make(_classes()[name], options)
    raise RecordError(f"record must hold values of this package, got {_brief(value)}; give that part yourself")


def make(kind: type, options: Mapping[str, Any]) -> Any:
    """Make a method or target with options as a record has them.

    Raises:
        RecordError: its class has no such options, or refuses them.
    """
    read = {name: decode(value) for name, value in options.items()}
    try:
        return kind(**read)
    except (ExplainError, TypeError, ValueError) as error:
        raise RecordError(f"record must hold options of {kind.__name__}, but they are refused: {error}") from None


def method_of(record: Mapping[str, Any]) -> Method:
    """Make the method of a record again; one of the caller's own must be registered.

    Raises:
        RecordError: it is unknown here, or was made with something that no record can hold.

    >>> method_of({"method": "gradcam", "class": "GradCAM", "options": {"relu": False}})
    GradCAM(relu=False)
    """
    kind = _classes().get(str(record.get("class")))
    if kind is None:
        try:
            kind = type(get_method(str(record["method"])))
        except ExplainError as error:
            raise RecordError(str(error)) from None
    made: Method = make(kind, record["options"])
    return made


def asked(target: Target) -> Any:
    """Write a target that is more than a class; None for a class, which needs nothing more."""
    return None if isinstance(target, (ClassTarget, TopClass)) else encode(target)


def unknown(value: Any) -> list[str]:
    """What an encoded value holds that was the caller's own."""
    return [each["unknown"] for each in _mappings(value) if isinstance(each.get("unknown"), str)]


def has_tensor(value: Any) -> bool:
    """Whether an encoded value holds a tensor."""
    return any("tensor" in each for each in _mappings(value))


def versions() -> dict[str, str]:
    """The versions of the packages that every explanation uses."""
    packages = {"numpy": np.__version__, "pillow": PIL.__version__, "torch": str(torch.__version__)}
    torchvision = getattr(sys.modules.get("torchvision"), "__version__", None)  # only if it was used for this
    if torchvision is not None:
        packages["torchvision"] = str(torchvision)
    return {"explain": __version__, "python": platform.python_version(), **packages}


def estimate_of(attribution: Attribution) -> dict[str, Any] | None:
    """How many covered photos a map took, and what was reached: the largest error over the largest value, if known."""
    if attribution.samples is None:
        return None
    reached, r2, finished = attribution.relative_error, attribution.r2, attribution.finished
    return {
        "samples": attribution.samples,
        "planned": None if attribution.planned is None else int(attribution.planned.max()),
        "stopped": attribution.stopped or None,
        "error": None if reached is None or bool(reached[0].isnan()) else float(reached[0]),
        "finished": finished is None or bool(finished[0]),
        "r2": None if r2 is None else float(r2[0]),
    }


def options_run(attribution: Attribution, crops: int = 1) -> dict[str, Any]:
    """The options of a method, encoded; of one that was stopped early, those that make as many runs as it has made.

    The runs of several crops are counted together, and no option says how many each has.
    """
    found = dict(attribution.options)
    if attribution.stopped and crops == 1:
        found |= {
            name: value for name, value in (("samples", attribution.samples), ("max_seconds", None)) if name in found
        }
    return {name: encode(value) for name, value in found.items()}


def values_of(attribution: Attribution) -> dict[str, Any]:
    """How to recognise the array that belongs to a record, and how to read it."""
    values = array(attribution.values[0])
    about: dict[str, Any] = {"size": list(attribution.size), "style": attribution.style, "input": attribution.input}
    if attribution.neutral is not None:
        about["neutral"] = float(attribution.neutral[0])
    return {"shape": list(values.shape), "sha256": digest(values.tobytes()), **about}


def upgraded(record: Any, name: str = "record") -> dict[str, Any]:
    """Convert a record of an older version to this one, and check it.

    Raises:
        RecordError: it is not a record, lacks a field, or was written by a later version of this package.
    """
    if not isinstance(record, Mapping):
        raise RecordError(f"{name} must hold a JSON object, got {type(record).__name__}; give a record that was saved")
    version = record.get("format")
    if not isinstance(version, int) or not 2 <= version <= FORMAT:
        remedy = "update this package" if isinstance(version, int) and version > FORMAT else "explain the photo again"
        raise RecordError(f"{name} must have format 2 to {FORMAT}, got {_brief(version)}; {remedy}")
    lacking = [key for key in NEEDED if key not in record]
    if lacking:
        raise RecordError(f"{name} must have the field {lacking[0]!r}, but has not; give a record that was saved")
    check_unpacked(record, name)
    found = dict(record)
    if version < FORMAT:
        found |= {key: _renamed(found[key]) for key in ("options", "asked", "explainer") if key in found}
        found["options"] = {_NEW_OPTIONS.get(name, name): value for name, value in found["options"].items()}
        if isinstance(found.get("estimate"), Mapping):
            found["estimate"] = {_NEW_OPTIONS.get(name, name): value for name, value in found["estimate"].items()}
        found["format"] = FORMAT
    return found


_NEW_OPTIONS = {
    "runs": "samples",
    "until": "tolerance",
    "seconds": "max_seconds",
    "fill": "baseline",
    "baselines": "baseline",
}
_NEW_CLASSES = {"Photo": "OtherPhoto", "Given": "GivenRegions"}


def _renamed(value: Any) -> Any:
    """An encoded value of format 2 with the classes and options of format 3."""
    if isinstance(value, list):
        return [_renamed(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _renamed(each) for key, each in value.items()}
    if isinstance(found.get("class"), str) and isinstance(found.get("options"), dict):
        found["class"] = _NEW_CLASSES.get(found["class"], found["class"])
        found["options"] = {_NEW_OPTIONS.get(name, name): each for name, each in found["options"].items()}
    return found


@cache
def _classes() -> dict[str, type]:
    """The methods, targets, baselines and what they are made of in this package, by the names of their classes."""
    found: dict[str, type] = {}
    for room in (methods, targets, baselines):
        for module in iter_modules(room.__path__, f"{room.__name__}."):
            kinds = vars(importlib.import_module(module.name)).values()
            own = [kind for kind in kinds if isinstance(kind, type) and kind.__module__ == module.name]
            found |= {kind.__name__: kind for kind in own if is_dataclass(kind) and not kind.__name__.startswith("_")}
    return found


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.numel() * tensor.element_size() > UNPACKED:  # no record that holds it would be read again
        return {"unknown": f"a tensor of shape {tuple(tensor.shape)}"}
    plain = tensor.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    text = base64.b64encode(zlib.compress(content)).decode("ascii")
    return {"tensor": text, "dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}


def _decode_tensor(value: Mapping[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, value["dtype"], None)
    try:
        if not isinstance(dtype, torch.dtype) or len(value["shape"]) > MOST_DIMENSIONS:
            raise ValueError
        size = dtype.itemsize * math.prod(value["shape"])
        content = zlib.decompressobj().decompress(base64.b64decode(value["tensor"], validate=True), size + 1)
        if len(content) != size:
            raise ValueError
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if size else torch.empty(0, dtype=dtype)
        return flat.reshape(value["shape"])
    except (binascii.Error, zlib.error, OverflowError, RuntimeError, TypeError, ValueError):
        raise RecordError(
            "record must hold tensors as they were written, got a damaged one; take another copy of it"
        ) from None


def _brief(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:59]}…"
