"""What was done, as plain values: with a version, without a model inside, and exact enough to do it again.

A record is a dictionary of what JSON can hold. Options and targets that JSON cannot express are written as an object
with one tag: ``{"tuple": [...]}``, ``{"mapping": [[key, value], ...]}``, ``{"float": "inf"}``, ``{"tensor": ...}``,
``{"category": ...}`` (a class index with its label), or ``{"class": ..., "options": {...}}`` for a method or target of
this package. Anything else is the caller's own; ``{"unknown": ...}`` says what it was. Nothing that a record names is
ever imported or run.
"""

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
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pkgutil import iter_modules
from types import UnionType
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image

from explain import baselines, methods, targets
from explain._utils.errors import ExplainError, RecordError, shown
from explain._utils.version import __version__
from explain.attribution import pictures, result
from explain.data.boxes import Box
from explain.data.images import MAX_PIXELS
from explain.engine.settings import Precision
from explain.hooks import interventions
from explain.methods import Method
from explain.methods.base import get_method
from explain.targets import ClassTarget, Target, TopClass
from explain.targets.base import Sum
from explain.targets.labels import Category

FORMAT = 3
"""The version of the records that are written; those of version 2 are read as well."""

UNPACKED = 2**28  # bytes that the tensors of a record have together; a baseline has a few millions
MOST_DIMENSIONS = 64  # of a tensor


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
    if isinstance(value, int):
        return {"category": int(value), "label": value.label} if isinstance(value, Category) else int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value)
    if isinstance(value, (tuple, list)):
        items = [encode(each) for each in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {"mapping": [[encode(key), encode(each)] for key, each in value.items()]}
    name = class_name(value)
    return {"unknown": described(value)} if name is None else {"class": name, "options": encode_fields(value)}


def encode_fields(value: Any) -> dict[str, Any]:
    """Write the fields that a dataclass is made with."""
    return {f.name: encode(getattr(value, f.name)) for f in fields(value) if f.init and (f.compare or f.repr)}


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
        raise RecordError(f"{name} must hold tensors of at most {UNPACKED} bytes together, got more; save it again")


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
    """How many bytes an encoded tensor says it has; 0 where its dtype or shape cannot be read."""
    dtype, shape = getattr(torch, str(value.get("dtype")), None), value.get("shape")
    if not isinstance(dtype, torch.dtype) or not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        return 0
    return dtype.itemsize * math.prod(shape) if all(is_number(each) and each >= 0 for each in shape) else 0


def decode(value: Any) -> Any:
    """Read what `encode` has written.

    Raises:
        RecordError: it holds something of the caller's own, or something that no version has written, or too much.

    >>> decode({"class": "HiResCAM", "options": {"relu": True}})
    HiResCAM(relu=True)
    """
    check_unpacked(value)
    try:
        return _decode(value)
    except ExplainError:
        raise
    except (TypeError, ValueError, RecursionError):  # what are not pairs, keys or numbers; or they never end
        raise RecordError(f"record must hold values as they were written, got {shown(value)}; give them") from None


def _decode(value: Any) -> Any:
    match value:
        case list():
            return list(map(_decode, value))
        case None | bool() | int() | float() | str():
            return value
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
        case {"class": "Detection", "options": dict(options)}:  # as it was called once
            renamed = {"label" if name == "category" else name: value for name, value in options.items()}
            return make(_classes()["Detections"], renamed)
        case {"class": str(name), "options": dict(options)} if name in _classes():
            return make(_classes()[name], options)
    raise RecordError(f"record must hold values of this package, got {shown(value)}; give that part yourself")


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

    >>> method_of({"method": "hirescam", "class": "HiResCAM", "options": {"relu": True}})
    HiResCAM(relu=True)
    """
    try:
        kind = _classes().get(str(record.get("class"))) or type(get_method(str(record["method"])))
    except ExplainError as error:
        raise RecordError(str(error)) from None
    made: Method = make(kind, record["options"])
    return made


def encode_target(target: Target) -> Any:
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
    modules = {"numpy": np, "pillow": PIL, "torch": torch, "torchvision": sys.modules.get("torchvision")}
    packages = {name: str(each.__version__) for name, each in modules.items() if each}  # torchvision only if used
    return {"explain": __version__, "python": platform.python_version(), **packages}


def origin_of(
    photo: Image.Image, source: str | None, model: ModelOrigin, seen: Box, input_size: tuple[int, ...]
) -> dict[str, Any]:
    """The photo, the model and the packages behind a result: the fields that all records have."""
    return {
        "image": {"path": source, "size": list(photo.size), "sha256": digest(photo.tobytes())},
        "model": model.name, "weights": model.weights, "preprocess": model.preprocess, "explainer": model.to_dict(),
        "input_size": list(input_size), "seen": asdict(seen), "versions": versions(),
    }  # fmt: skip


def estimate_of(attribution: result.Attribution) -> dict[str, Any] | None:
    """How many covered photos a map took, and what was reached: the largest error over the largest value, if known."""
    if attribution.samples is None:
        return None
    error, planned, finished = attribution.relative_error, attribution.planned, attribution.finished
    return {
        "samples": attribution.samples, "planned": None if planned is None else int(planned.max()),
        "stopped": attribution.stopped or None, "finished": finished is None or bool(finished[0]),
        "error": None if error is None or bool(error[0].isnan()) else float(error[0]), "r2": number_of(attribution.r2),
    }  # fmt: skip


def number_of(tensor: torch.Tensor | None) -> float | None:
    """The number of the first image; None for none."""
    return None if tensor is None else float(tensor[0])


def options_run(attribution: result.Attribution) -> dict[str, Any]:
    """The options of a method, encoded; of one that was stopped early, those that make as many runs as it has made."""
    found = dict(attribution.options)
    if attribution.stopped:
        ran = {"samples": attribution.samples, "max_seconds": None}
        found |= {name: value for name, value in ran.items() if name in found}
    return {name: encode(value) for name, value in found.items()}


def values_of(attribution: result.Attribution) -> dict[str, Any]:
    """How to recognise the array that belongs to a record, and how to read it."""
    about: dict[str, Any] = {"size": list(attribution.size), "style": attribution.style, "input": attribution.input}
    if attribution.neutral is not None:
        about["neutral"] = float(attribution.neutral[0])
    if attribution.sets is not None:
        about["sets"] = attribution.sets.described(0)
    return {**identity(pictures.array(attribution.values[0])), **about}


def identity(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The shape and digest of an array, as records have them."""
    return {"shape": list(values.shape), "sha256": digest(values.tobytes())}


def checked(record: Any, name: str = "record") -> dict[str, Any]:
    """Return a record after checking its format.

    Raises:
        RecordError: it is not a record, lacks a field, or was written by another version of this package.
    """
    if not isinstance(record, Mapping):
        raise RecordError(f"{name} must hold a JSON object, got {type(record).__name__}; give a record that was saved")
    version = record.get("format")
    if version != FORMAT:
        remedy = "update this package" if isinstance(version, int) and version > FORMAT else "explain the photo again"
        raise RecordError(f"{name} must have format {FORMAT}, got {shown(version)}; {remedy}")
    check_unpacked(record, name)
    return dict(record)


def check_fields(record: Mapping[str, Any], rules: Mapping[str, Any], name: str) -> None:
    """Refuse a record without a field, or with a value that none has.

    ``rules`` has a type, a tuple of choices or a test for each field that is read; a dot leads into a field, and "?"
    ends an optional one.

    Raises:
        RecordError: a field is not what it must be.

    >>> check_fields({"score": 1.0, "values": {}}, {"score": is_number, "values": dict, "values.size?": is_size}, "it")
    """
    for field_name, rule in rules.items():
        *outer, last = field_name.removesuffix("?").split(".")
        inside: Any = record
        for key in outer:
            inside = inside.get(key)
        if inside is None or (field_name.endswith("?") and last not in inside):
            continue
        if last not in inside or not _fits(inside[last], rule):
            full, got = ".".join([*outer, last]), shown(inside[last]) if last in inside else "none"
            raise RecordError(f"{name} must have another value for {full!r}, got {got}; give a record that was saved")


def _fits(value: Any, rule: Any) -> bool:
    if isinstance(rule, tuple):
        return any(value is each or (isinstance(value, str) and value == each) for each in rule)
    return isinstance(value, rule) if isinstance(rule, type | UnionType) else rule(value)


@cache
def _classes() -> dict[str, type]:
    """The methods, targets, baselines and interventions of this package, and their parts, by their classes' names."""
    rooms = (methods, targets, baselines)
    names = [f"{room.__name__}.{each.name}" for room in rooms for each in iter_modules(room.__path__)]
    found: dict[str, type] = {}
    for module in [interventions, *map(importlib.import_module, names)]:
        own = {name: kind for name, kind in vars(module).items() if getattr(kind, "__module__", "") == module.__name__}
        found |= {n: k for n, k in own.items() if isinstance(k, type) and is_dataclass(k) and n[0] != "_"}
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
        raise RecordError("record must hold tensors as they were written, got a damaged one; copy it again") from None
