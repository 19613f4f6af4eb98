"""Options, methods and targets as plain values, exact enough to be made again.

What JSON cannot express is written as an object with one tag: ``{"tuple": [...]}``, ``{"mapping":
[[key, value], ...]}``, ``{"float": "inf"}``, ``{"tensor": ...}``, ``{"category": ...}`` (a class
index with its label), or ``{"class": ..., "options": {...}}`` for a method or target of this
package. Anything else is the caller's own; ``{"unknown": ...}`` says what it was. Nothing that is
named is ever imported or run.
"""

import base64
import importlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pkgutil import iter_modules
from typing import Any

import torch

from explain import baselines, methods, targets
from explain._utils.errors import ExplainError, RecordError, shown
from explain.hooks import interventions
from explain.methods import Method
from explain.methods.base import get_method
from explain.targets import ClassTarget, Target, TopClass
from explain.targets.base import Sum
from explain.targets.labels import Category

LARGEST = 2**25  # bytes of a tensor that is written; a baseline has less than a million


def name_of_callable(function: Any) -> str:
    """Return a function's name, or how a callable object shows itself, on one line and without its
    address. Records keep this text, so it must be the same in another process.

    >>> name_of_callable(len), name_of_callable(slice(1))
    ('len', 'slice(None, 1, None)')
    """
    text = getattr(function, "__qualname__", None) or " ".join(repr(function).split())
    return re.sub(r" at 0x[0-9a-fA-F]+", "", str(text))


def encode(value: Any) -> Any:
    """Write an option, method, target or intervention in values of JSON; what is not of this
    package becomes ``{"unknown": ...}``. Saved files hold the tags, so they must stay.

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
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, Mapping):
        return {"mapping": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value)
    name = class_name(value)
    if name is None:
        return {"unknown": name_of_callable(value)}
    return {"class": name, "options": encode_fields(value)}


def encode_fields(value: Any) -> dict[str, Any]:
    """Write the fields that a dataclass is made with, by name, as `encode` writes values.
    Fields that are neither compared nor shown, such as caches, are left out.
    """
    return {
        option.name: encode(getattr(value, option.name))
        for option in fields(value)
        if option.init and (option.compare or option.repr)
    }


def encode_target(target: Target) -> Any:
    """Write a target for a record if it is more than a class; None for a class, which the record's
    ``target`` has."""
    return None if isinstance(target, (ClassTarget, TopClass)) else encode(target)


def class_name(value: Any) -> str | None:
    """The class name of a method, target, baseline or intervention of this package, else None.
    Records hold these names, so a renamed class cannot be read from older files.
    """
    # a `Difference` is written as the `Sum` that it is
    kind = Sum if isinstance(value, Sum) else type(value)
    return kind.__name__ if _classes().get(kind.__name__) is kind else None


def decode(value: Any) -> Any:
    """Read what `encode` has written: options, methods, targets or interventions from a record.
    Nothing that is named is imported or run, so records of strangers are safe to read.

    >>> decode({"class": "HiResCAM", "options": {"relu": True}})
    HiResCAM(relu=True)
    """
    try:
        return _decode(value)
    except ExplainError:
        raise
    # damaged pairs, keys, numbers or bytes; or endless nesting
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise RecordError(
            f"record must hold values as they were written, got {shown(value)}; give them"
        ) from None


def _decode(value: Any) -> Any:
    """Read an encoded value of a record; `decode` turns the errors of damaged ones into one line.
    Each tag that `encode` has ever written must stay readable.
    """
    match value:
        case list():
            return [_decode(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
        case {"float": str(text)}:
            return float(text)
        case {"category": int(index), "label": str(label)}:
            return Category(index, label)
        case {"tuple": [*values]}:
            return tuple(_decode(item) for item in values)
        case {"mapping": [*pairs]}:
            return {_decode(key): _decode(item) for key, item in pairs}
        case {"tensor": str(text), "dtype": str(dtype), "shape": [*shape]}:
            return _decode_tensor(text, dtype, shape)
        case {"class": str(name), "options": dict(options)} if name in _classes():
            return make(_classes()[name], options)
    raise RecordError(
        f"record must hold values of this package, got {shown(value)}; give that part yourself"
    )


def make(kind: type, options: Mapping[str, Any]) -> Any:
    """Make an object of class ``kind``, such as a method, with the encoded options of a record."""
    arguments = {name: decode(value) for name, value in options.items()}
    try:
        return kind(**arguments)
    except (ExplainError, TypeError, ValueError) as error:
        raise RecordError(
            f"record must hold options of {kind.__name__}, but they are refused: {error}"
        ) from None


def method_of(name: str, options: Mapping[str, Any]) -> Method:
    """Make a method again from its name and encoded options in a record; one of the caller's own
    must be registered.

    >>> method_of("hirescam", {"relu": True})
    HiResCAM(relu=True)
    """
    try:
        kind = type(get_method(name))
    except ExplainError as error:
        raise RecordError(str(error)) from None
    method: Method = make(kind, options)
    return method


def unknown(value: Any) -> list[str]:
    """The names of the caller's own objects in an encoded value, which a record cannot make
    again."""
    return [
        mapping["unknown"]
        for mapping in _mappings(value)
        if isinstance(mapping.get("unknown"), str)
    ]


def has_tensor(value: Any) -> bool:
    """Whether an encoded value of a record holds a tensor."""
    return any("tensor" in mapping for mapping in _mappings(value))


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping in an encoded value, however deep, in the order in which they are written.
    Without recursion, as a damaged record may be nested very deep.
    """
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping):
            yield item
            item = list(item.values())
        if isinstance(item, list):
            waiting += reversed(item)


@cache
def _classes() -> dict[str, type]:
    """The public dataclasses that records may name: methods, targets, baselines, interventions and
    their parts, by name. Only these are ever made by `decode`.
    """
    modules = [interventions]
    for package in (methods, targets, baselines):
        modules += [
            importlib.import_module(f"{package.__name__}.{info.name}")
            for info in iter_modules(package.__path__)
        ]
    classes: dict[str, type] = {}
    for module in modules:
        for name, value in vars(module).items():
            if not isinstance(value, type) or value.__module__ != module.__name__:
                continue
            if is_dataclass(value) and not name.startswith("_"):
                classes[name] = value
    return classes


def _encode_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """Write a tensor of any type and shape for a record: its bytes as base64; unknown if it is too
    large.
    """
    # larger tensors would make a record that is refused when it is read
    if tensor.numel() * tensor.element_size() > LARGEST:
        return {"unknown": f"a tensor of shape {tuple(tensor.shape)}"}
    plain = tensor.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    text = base64.b64encode(content).decode("ascii")
    return {
        "tensor": text,
        "dtype": str(plain.dtype).removeprefix("torch."),
        "shape": list(plain.shape),
    }


def _decode_tensor(text: str, dtype: str, shape: list[int]) -> torch.Tensor:
    """Read a tensor that `_encode_tensor` has written; a ``ValueError`` or ``RuntimeError`` if it
    is damaged. The result owns its memory, and may be changed.
    """
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError
    content = bytearray(base64.b64decode(text, validate=True))
    flat = torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)
    return flat.reshape(shape)
