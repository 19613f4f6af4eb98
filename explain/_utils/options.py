"""Options of methods, metrics and baselines.

`CheckedFields` checks each against the type of its field as soon as an object is made.

`read_written` reads a name with options, as people type it: ``integratedgradients(steps=20)``.
Nothing in it is ever run. Values are literals of Python (numbers, texts in quotes, True, False,
None, tuples and lists of these) or plain words, which stand for themselves: ``blur``, or again a
name with options.
"""

import ast
import fnmatch
import math
import operator
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np
import torch

from explain._utils.errors import (
    CALLED_ELSEWHERE,
    ArgumentError,
    BaselineError,
    ExplainError,
    MethodError,
    did_you_mean,
    python_or_command,
    shown,
)
from explain._utils.plugins import load_plugins

T = TypeVar("T")
_REFUSED = object()
"""Stands for the value of an option that is not of its field's type."""
_UNIONS = (UnionType, typing.Union)
_CASTS: dict[type, Any] = {bool: (bool, np.bool_), str: str}
"""By type of a field, what is cast to it."""
_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    NoneType: "None",
    torch.Tensor: "a tensor of finite numbers",
    Callable: "a function",
}

Check = Callable[[str, Any, str], None]
"""Refuses an object, given the name of the method, the object and the name of the option."""


class _TypeReader(NamedTuple):
    """How options of a registered type are named in messages, made from a value, and checked."""

    words: str
    plain: Callable[[Any], Any]
    check: Check | None


_readers: dict[type, _TypeReader] = {}


def register_reader(
    kind: type, words: str, plain: Callable[[Any], Any], check: Check | None = None
) -> None:
    """Let fields of `CheckedFields` have the type ``kind`` of a later subpackage: ``words`` name it
    in messages, ``plain`` makes one from a value (or returns the value), ``check`` refuses.
    """
    _readers[kind] = _TypeReader(words, plain, check)


class CheckedFields:
    """The base of frozen dataclasses whose fields are options. Unknown options, and values not of
    their field's type, are refused in one line; the others get their field's plain form."""

    # Numbers of NumPy become Python's, lists become tuples, arrays tensors, and a name stands for
    # its method or baseline. Numbers must be finite. Types are bool, int, float, str, Literal,
    # tensors, those of `register_reader`, and tuples and unions of these; what a type says nothing
    # of is left alone. A class may give a `summary` for lists; else it is the first paragraph of
    # its docstring.
    error: ClassVar[type[ExplainError]] = MethodError
    """What a wrong option raises."""
    minimums: ClassVar[Mapping[str, float]] = {}
    """By name of an option, the smallest number that it may be."""
    maximums: ClassVar[Mapping[str, float]] = {}
    """By name of an option that is a number, the largest that it may be."""
    below: ClassVar[Mapping[str, float]] = {}
    """By name of an option that must be above 0, the number that it, and each of several, must be
    below."""

    def __init_subclass__(cls) -> None:
        """Give the class a ``summary`` for lists: the first paragraph of its docstring, without the
        capital and the full stop."""
        super().__init_subclass__()
        if cls.__doc__ and "summary" not in vars(cls):
            first_paragraph = cls.__doc__.partition("\n\n")[0]
            word, *rest = first_paragraph.strip().removesuffix(".").split()
            if word.istitle() and "-" not in word:  # but not "Grad-CAM"
                word = word.lower()
            type.__setattr__(cls, "summary", " ".join([word, *rest]))

    def __new__(cls, /, *args: Any, **options: Any) -> Self:
        """Refuse unknown options with a hint, before the ``__init__`` of the dataclass raises a
        plain TypeError."""
        names = _options_of(cls).names
        if not options.keys() <= names:
            wrong = next(name for name in options if name not in names)
            hint = did_you_mean(wrong, sorted(names))
            if CALLED_ELSEWHERE.get(wrong, wrong) == "layer":
                hint = "explain.attribute(layer=...) takes it"
            raise ArgumentError(f"{cls.__name__} has no option {wrong!r}; {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check each option against the type of its field, and store its plain form. Values that
        are the default are not checked again.
        """
        for checked in _options_of(type(self)).checked:
            value = getattr(self, checked.name)
            if value is not checked.plain_default:
                object.__setattr__(self, checked.name, self._checked(checked, value))

    def _checked(self, checked: "_CheckedField", value: Any) -> Any:
        """The plain form of an option's value after checks of type, ``minimums``, ``maximums``,
        ``below`` and the registered type; raises ``self.error`` with what the option must be.
        """
        option = checked.name
        own_class: Any = type(self)  # for mypy, a type is not hashable
        # of the class: the name of an instance may depend on an option that is not checked yet
        class_name = getattr(own_class, "name", None)
        name = (
            class_name if isinstance(class_name, str) and class_name else own_class.__name__.lower()
        )
        minimum = self.minimums.get(option)
        maximum = self.maximums.get(option)
        try:
            read = _read(value, checked.kind, minimum)
        except BaselineError as error:
            raise self.error(
                f"{option} of {name} must be a baseline or the name of one: {error}"
            ) from None
        # more than a tensor of int64 holds; seeds are taken modulo 2**63
        too_large = type(read) is int and option != "seed" and not -(2**63) <= read < 2**63
        if maximum is not None and read is not _REFUSED and read is not None:
            too_large = too_large or read > maximum
        if read is _REFUSED or too_large:
            most = "" if maximum is None else f" to {maximum:g}"
            raise self.error(
                f"{option} of {name} must be {_word(checked.kind, minimum)}{most}, "
                f"got {shown(value)}"
            )
        for kind, reader in _readers.items():
            if reader.check is not None and isinstance(read, kind):
                reader.check(name, read, option)
        upper_end = self.below.get(option)
        if upper_end is None or read is None:
            return read
        numbers = read if isinstance(read, tuple) else (read,)
        if numbers and all(0 < n < upper_end for n in numbers):
            return read
        and_below = "" if upper_end == math.inf else f" and below {upper_end:g}"
        raise self.error(
            f"{option} of {name} must be above 0{and_below}, got {shown(value)}; leave it out"
        )


class _CheckedField(NamedTuple):
    """An option, the type that its values must have, and its default where that needs no check,
    else `_REFUSED`."""

    name: str
    kind: Any
    plain_default: Any


class _ClassOptions(NamedTuple):
    """The names of the options that a class takes, and those of its fields that are checked."""

    names: frozenset[str]
    checked: list[_CheckedField]


_options_by_class: dict[Any, _ClassOptions] = {}


def _options_of(cls: Any) -> _ClassOptions:
    """The options of a class of `CheckedFields`, looked up once (not by `lru_cache`, of which
    `torch.compile` warns). Fields whose type says nothing are not in ``checked``.
    """
    if cls in _options_by_class:
        return _options_by_class[cls]
    kinds = _kinds(cls)
    checked = []
    for option in fields(cls):
        if option.name not in kinds:
            continue
        kind = kinds[option.name]
        # such a default is in plain form already
        is_plain = isinstance(option.default, (bool, int, float, NoneType, tuple))
        is_plain = is_plain or typing.get_origin(kind) is typing.Literal
        default = option.default if is_plain else _REFUSED
        checked.append(_CheckedField(option.name, kind, default))
    names = frozenset([option.name for option in fields(cls) if option.init])
    _options_by_class[cls] = _ClassOptions(names, checked)
    return _options_by_class[cls]


def by_name(
    wanted: Any,
    get: Callable[[Any], T],
    error: type[ExplainError],
    what: str,
    *,
    tell_apart: bool = False,
) -> dict[str, T]:
    """The objects (by ``get``) of the ``wanted`` names or objects, equal ones once. With
    ``tell_apart``, those of one name get the options in which they differ: "rise(seed=1)".
    """
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        item = get(wanted)
        return {item.name: item}  # type: ignore[attr-defined]
    items: list[T] = []
    for item in map(get, wanted):  # not by ``in``, which raises where tensors are options
        if not any(item is other or _are_equal(item, other) for other in items):
            items.append(item)
    chosen: dict[str, T] = {}
    for item in items:
        name = item.name  # type: ignore[attr-defined]
        of_one_name = [other for other in items if other.name == name]  # type: ignore[attr-defined]
        if tell_apart and len(of_one_name) > 1:
            name = _with_differences(item, of_one_name)
        if name in chosen:
            turns = python_or_command("two calls", "two commands, the second with another --output")
            raise error(
                f"{what}s must have different names, got two of {name!r}; run them in {turns}"
            )
        chosen[name] = item
    if not chosen:
        raise error(f"{what}s must name at least one {what}, got none; see explain.list_{what}s()")
    return chosen


def _with_differences(item: Any, of_one_name: Sequence[Any]) -> str:
    """The name of a method with the options in which it differs from others of this name, as people
    type them; defaults, and options that cannot be typed, are left out."""
    differences = []
    for option in fields(item):
        value = getattr(item, option.name)
        if _are_equal(value, option.default) or all(
            _are_equal(getattr(other, option.name, _REFUSED), value) for other in of_one_name
        ):
            continue
        name_of_value = getattr(value, "name", value)
        if _is_plain(name_of_value):
            is_word = isinstance(name_of_value, str) and _NAME.fullmatch(name_of_value)
            differences.append(f"{option.name}={name_of_value if is_word else repr(value)}")
    name: str = item.name
    if not differences:
        return name
    # a name may have brackets already, as "smooth(gradcam)": the options go into these
    start = f"{name[:-1]}, " if name.endswith(")") else f"{name}("
    return f"{start}{', '.join(differences)})"


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two methods, metrics or options are equal; tensors, and what has some among its
    options, cannot be compared by ``==``, and are not."""
    try:
        return bool(one == other)
    except RuntimeError:  # ``==`` of tensors gives no single answer
        return False


def enter(registry: dict[str, Any], it: Any, what: str, **options: Any) -> Any:
    """Add ``it``, an object or a class (made a frozen dataclass), to a registry by its name, and
    return it. ``what`` is its word in messages; refused if the name is taken.
    """
    if isinstance(it, type) and "__dataclass_params__" not in vars(it):
        dataclass(frozen=True)(it)
    registered = it(**options) if isinstance(it, type) else it
    if not re.fullmatch(r"[a-z0-9+._-]+", registered.name):
        raise registered.error(
            f"name of a {what} must be of a-z, 0-9 and + . _ -, got {registered.name!r}; change it"
        )
    # an equal one may be entered again
    if registry.setdefault(registered.name, registered) != registered:
        other = type(registry[registered.name]).__qualname__
        raise registered.error(
            f"{what} {registered.name!r} is already registered by {other}; choose another name"
        )
    return it


def names_like(registry: Mapping[str, Any], pattern: str, error: type[ExplainError]) -> list[str]:
    """The names in a registry, those of plug-ins too, that match a glob pattern, in alphabetical
    order; ``error`` is raised of a pattern that is no text."""
    if not isinstance(pattern, str):
        raise error(f"pattern must be a text such as '*cam*', got {shown(pattern)}")
    load_plugins()
    return sorted(name for name in registry if fnmatch.fnmatchcase(name, pattern))


def named_in(
    registry: Mapping[str, T], text: str, what: str, error: type[ExplainError], example: str
) -> T:
    """The object of a registry that a text names, with the options in its brackets, as in the
    ``example``; ``what`` is its word in messages, and ``error`` is raised where there is none."""
    if text in registry:
        return registry[text]
    try:
        # a text without brackets is taken as it is: where `read_written` would refuse its form,
        # the names that it may stand for say more
        written = read_written(text) if "(" in text else WrittenName(text.strip().lower())
        if written.name not in registry:
            load_plugins()
        if written.name in registry and not written.values:
            return replace(registry[written.name], **written.options)  # type: ignore[type-var]
    except (SpecError, ArgumentError) as wrong:
        raise error(f"{what} {wrong}; write it like {example}") from None
    if written.name in registry:
        got = shown(written.values[0])
        raise error(f"{what} {written.name} must get options by name, got {got}")
    hint = did_you_mean(written.name, sorted(registry))
    raise error(f"{what} {shown(text)} is unknown; {hint}")


def _kinds(cls: type) -> dict[str, Any]:
    """The types of a class's fields by name. Where a name in an annotation cannot be resolved, as
    inside a function, only the fields of bases have types and are checked.
    """
    with suppress(NameError, TypeError):
        return typing.get_type_hints(cls, include_extras=True)
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        with suppress(NameError, TypeError):
            hints.update(typing.get_type_hints(base))
    return hints


def _read(value: Any, kind: Any, least: float | None) -> Any:
    """An option's value in the plain form of the type ``kind`` (the first of a union that takes
    it), or `_REFUSED`, also below ``least``. `_word` must have words for each type here.
    """
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin in _UNIONS:
        for part in args:
            read = _read(value, part, least)
            if read is not _REFUSED:
                return read
        return _REFUSED
    if origin is typing.Literal:
        return str(value) if isinstance(value, str) and value in args else _REFUSED
    if origin is tuple:
        return _tuple(value, args, least)
    if origin is Callable:
        return value if callable(value) else _REFUSED
    if kind in _CASTS:
        return kind(value) if isinstance(value, _CASTS[kind]) else _REFUSED
    if kind in (int, float):
        return _number(value, kind, least)
    if kind is torch.Tensor:
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
            value = torch.from_numpy(value)
        is_real = isinstance(value, torch.Tensor) and not value.is_complex()
        return value if is_real and bool(torch.isfinite(value).all()) else _REFUSED
    if kind in _readers:
        read = _readers[kind].plain(value)
        return read if isinstance(read, kind) else _REFUSED
    if kind is NoneType:
        return None if value is None else _REFUSED
    return value  # a type that nothing is known of, as Any, takes all


def _number(value: Any, kind: type, least: float | None) -> Any:
    """A number of Python, NumPy or torch as an int, or a finite float where ``kind`` is float;
    `_REFUSED` for anything else (bools too), and below ``least``.
    """
    try:
        if isinstance(value, (bool, np.bool_)):
            return _REFUSED
        if kind is int:
            number: Any = int(operator.index(value))
        elif isinstance(value, Real) and math.isfinite(value):
            # a whole number stays one, as it was written, if a tensor can hold it
            is_kept = isinstance(value, int) and abs(value) < 2**63
            number = value if is_kept else float(value)
        else:
            return _REFUSED
    # what Python, NumPy and torch say of other things, such as an array of several numbers
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return _REFUSED
    return number if least is None or number >= least else _REFUSED


def _tuple(value: Any, kinds: Sequence[Any], least: float | None) -> Any:
    """A list, tuple, array or single item as a tuple of these ``kinds``, the arguments of
    ``tuple[...]`` (``...`` for any number), or `_REFUSED`.
    """
    items = value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value
    items = items if isinstance(items, (list, tuple)) else [items]
    if kinds[-1] is ...:  # as in tuple[int, ...]
        kinds = [kinds[0]] * len(items)
    if len(items) != len(kinds):
        return _REFUSED
    read = tuple(_read(item, kind, least) for item, kind in zip(items, kinds, strict=True))
    return _REFUSED if any(item is _REFUSED for item in read) else read


def _word(kind: Any, least: float | None) -> str:
    """Return what error messages call the type of an option, as in "must be a whole number from
    1"; ``least`` is the smallest number allowed."""
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(args)}"
    words = [_word(part, least) for part in args if part is not ...]
    if origin in _UNIONS:
        return " or ".join([", ".join(words[:-1]), words[-1]])
    if origin is tuple:
        several = len(words) > 1
        return f"a list of {' and '.join(words)}" if several else f"a list, each item {words[0]}"
    name = _readers[kind].words if kind in _readers else _WORDS.get(origin or kind, str(kind))
    return name if least is None or kind not in (int, float) else f"{name} from {least}"


LONGEST = 1000  # characters; more is not typed by hand

_NAME = re.compile(r"\s*(?P<name>[\w+.-]+)\s*(?:\((?P<options>.*)\)\s*)?", re.DOTALL)
_OPTION = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*=(?P<value>.*)", re.DOTALL)
_PLAIN_WORDS = {"true": True, "false": False, "none": None}
_ENDS = {"(": ")", "[": "]"}


class SpecError(ExplainError):
    """A text is no name with options; the message says why, and goes on after what it should
    be."""


@dataclass(frozen=True)
class WrittenName:
    """A name in small letters, the values in its brackets that have no name, and those that have
    one."""

    name: str
    values: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def read_written(text: str) -> WrittenName:
    """Read a name with options, as people type methods, metrics and baselines:
    ``rise(samples=500)``. Whether there is such a method is not looked up."""
    if len(text) > LONGEST:
        raise SpecError(f"must have at most {LONGEST} characters, got {len(text)}")
    match = _NAME.fullmatch(text)
    if match is None:
        raise SpecError(f"must be a name, or a name with options in brackets, got {shown(text)}")
    values = list[Any]()
    options = dict[str, Any]()
    for part in _parts(match["options"] or "", text):
        option = _OPTION.fullmatch(part)
        if option is None:
            if options:
                raise SpecError(
                    f"must have options with names behind those without, got {shown(text)}"
                )
            values.append(_value(part, text))
            continue
        name = option["name"]
        if name in options:
            raise SpecError(f"must have each option once, got {name!r} twice in {shown(text)}")
        options[name] = _value(option["value"], text)
    return WrittenName(match["name"].lower(), tuple(values), options)


def _parts(arguments: str, text: str) -> Iterator[str]:
    """Yield the ``arguments`` between the brackets of a typed name, split at commas that are in no
    quotes and no inner brackets; ``text`` is the whole, for messages.
    """
    start = 0
    closing_brackets = list[str]()
    quote = ""
    for place, character in enumerate(arguments):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _ENDS:
            closing_brackets.append(_ENDS[character])
        elif character in ")]":
            if not closing_brackets or closing_brackets.pop() != character:
                raise SpecError(
                    f"must have a closing bracket for each opening one, got {shown(text)}"
                )
        elif character == "," and not closing_brackets:
            yield arguments[start:place]
            start = place + 1
    if closing_brackets or quote:
        raise SpecError(
            f"must have closing brackets and quotes for all opening ones, got {shown(text)}"
        )
    if arguments[start:].strip():  # a comma may end the list
        yield arguments[start:]


def _value(written: str, text: str) -> Any:
    """A typed option as a Python literal (True, False, None in any capitals); words and names with
    options stay texts. Nothing is evaluated; ``text`` is the whole, for messages.
    """
    word = written.strip()
    if word.lower() in _PLAIN_WORDS:
        return _PLAIN_WORDS[word.lower()]
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = word if _NAME.fullmatch(word) else ...  # which is not plain, so refused
    if not _is_plain(value):
        raise SpecError(
            f"must have numbers, words or quoted texts for values, got {shown(word)} in "
            f"{shown(text)}"
        )
    return value


def _is_plain(value: Any) -> bool:
    """Whether the value of a typed option is a number, text, bool or None, or a list or tuple of
    these; dicts, sets, bytes and ``...`` are not."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
