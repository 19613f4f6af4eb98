"""Options of methods: each is checked against the type of its field as soon as a method is made."""

from __future__ import annotations

import math
import operator
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Real
from types import NoneType, UnionType
from typing import Any

import numpy as np
import torch

from explain._utils.errors import BaselineError, MethodError, shown
from explain.baselines.base import Baseline
from explain.baselines.registry import get_baseline

_REFUSED = object()
_WORDS = {
    bool: "True or False", int: "a whole number", float: "a number", str: "a text", NoneType: "None",
    torch.Tensor: "a tensor of finite numbers",
}  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """How options of a type are read that is defined elsewhere.

    ``words`` are what the type is called; ``plain`` brings a value into its plain form, and ``check``, given the name
    of the method, an object of the type and the name of the option, refuses objects that cannot stand there.
    """

    words: str
    plain: Callable[[Any], Any]
    check: Callable[[str, Any, str], None] = lambda method, value, option: None


_readers: dict[type, Reader] = {Baseline: Reader("a baseline", get_baseline)}


def register_reader(kind: type, reader: Reader) -> None:
    """Let options be of a type of objects."""
    _readers[kind] = reader


def check_options(method: Any, **least: float) -> None:
    """Refuse options that are not of their field's type, and bring those that are into its plain form.

    To be called from ``__post_init__``. Numbers of NumPy become Python's, lists become tuples, arrays tensors, and a
    name stands for its method. Numbers must be finite. What a type says nothing of is left alone.

    Args:
        method: a dataclass whose fields are bool, int, float, str, `Literal`, tensors, methods, or tuples or unions of
            these.
        least: by name of an option, the smallest number that it may be.

    Raises:
        MethodError: an option of another type, too small, infinite or not a number.

    >>> from explain.methods import GradCAM, Smooth
    >>> Smooth("gradcam", samples=np.int64(4)) == Smooth(GradCAM(), samples=4)
    True
    >>> GradCAM(relu="yes")
    Traceback (most recent call last):
    explain.MethodError: relu of gradcam must be True or False, got 'yes'
    """
    name = _name(method)
    of: Any = type(method)  # for mypy, a type is not hashable
    kinds = _kinds(of)
    for field in fields(method):
        if field.name not in kinds:
            continue
        value, low = getattr(method, field.name), least.get(field.name)
        try:
            read = _read(value, kinds[field.name], low)
        except (BaselineError, AttributeError) as error:
            raise MethodError(f"{field.name} of {name} must be a baseline or the name of one: {error}") from None
        if type(read) is int and field.name != "seed" and not -(2**63) <= read < 2**63:  # no tensor holds it
            read = _REFUSED
        if read is _REFUSED:
            wanted = _listed([_word(kind, low) for kind in _members(kinds[field.name])])
            raise MethodError(f"{field.name} of {name} must be {wanted}, got {shown(value)}")
        object.__setattr__(method, field.name, read)
        for kind, reader in _readers.items():
            if isinstance(read, kind):
                reader.check(name, read, field.name)


def _name(method: Any) -> str:
    """What a method is called; that of a wrapper may depend on an option that is wrong."""
    name = getattr(type(method), "name", None)
    return name if isinstance(name, str) and name else type(method).__name__.lower()


@lru_cache(maxsize=256)
def _kinds(of: type) -> dict[str, Any]:
    """The types of the fields; without those that are known nowhere."""
    found: dict[str, Any] = {}
    for each in reversed(of.__mro__):
        try:
            found.update(typing.get_type_hints(each))
        except NameError:  # of a class within a function, say
            continue
    return found


def _members(kind: Any) -> Iterator[Any]:
    if typing.get_origin(kind) in (UnionType, typing.Union):
        yield from typing.get_args(kind)
    else:
        yield kind


def _read(value: Any, kind: Any, least: float | None) -> Any:
    """The value as one of this type, or `_REFUSED`."""
    for member in _members(kind):
        read = _read_one(value, member, least)
        if read is not _REFUSED:
            return read
    return _REFUSED


def _read_one(value: Any, kind: Any, least: float | None) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return str(value) if isinstance(value, str) and value in args else _REFUSED
    if origin is tuple:
        return _tuple(value, args[0], least)
    if kind is bool:
        return bool(value) if isinstance(value, (bool, np.bool_)) else _REFUSED
    if kind in (int, float):
        return _number(value, kind, least)
    if kind is torch.Tensor:
        return _tensor(value)
    if kind in _readers:
        read = _readers[kind].plain(value)
        return read if isinstance(read, kind) else _REFUSED
    if kind in (str, NoneType):
        return value if isinstance(value, kind) else _REFUSED
    return value


def _number(value: Any, kind: type, least: float | None) -> Any:
    try:
        number = _whole(value) if kind is int else _finite(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # what Python, NumPy and torch say of other things
        return _REFUSED
    return number if least is None or number >= least else _REFUSED


def _whole(value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError("a truth value is no number")
    return int(operator.index(value))


def _finite(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise TypeError("no finite number")
    return value if isinstance(value, int) and abs(value) < 2**63 else float(value)


def _tuple(value: Any, kind: Any, least: float | None) -> Any:
    if isinstance(value, np.ndarray):
        value = value.tolist()
    read = [_read(item, kind, least) for item in (value if isinstance(value, (list, tuple)) else [value])]
    return _REFUSED if any(item is _REFUSED for item in read) else tuple(read)


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        value = torch.from_numpy(value)
    fits = isinstance(value, torch.Tensor) and not value.is_complex() and bool(torch.isfinite(value).all())
    return value if fits else _REFUSED


def _word(kind: Any, least: float | None) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return f"one of {', '.join(typing.get_args(kind))}"
    if typing.get_origin(kind) is tuple:
        return f"a list, each item {_word(typing.get_args(kind)[0], least)}"
    words = _readers[kind].words if kind in _readers else _WORDS.get(kind, str(kind))
    return words if least is None or kind not in (int, float) else f"{words} from {least}"


def _listed(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
