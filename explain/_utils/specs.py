"""A name with options, as people type it: ``integratedgradients(steps=20)``. Nothing in it is ever run.

Values are literals of Python (numbers, texts in quotes, True, False, None, tuples and lists of these) or plain words,
which stand for themselves: ``blur``, or again a name with options.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from explain._utils.errors import ExplainError, shown

LONGEST = 1000  # characters; more is not typed by hand

_NAME = re.compile(r"\s*([\w+.-]+)\s*(?:\((.*)\)\s*)?", re.DOTALL)
_NAMED = re.compile(r"\s*([A-Za-z_]\w*)\s*=(.*)", re.DOTALL)
_WORDS = {"true": True, "false": False, "none": None}
_ENDS = {"(": ")", "[": "]"}


class SpecError(ExplainError):
    """A text is no name with options; the message says where it is not."""


@dataclass(frozen=True)
class MethodSpec:
    """A name in small letters, the values in its brackets that have no name, and those that have one."""

    name: str
    values: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def read_written(text: str) -> MethodSpec:
    """Read a name with options.

    Raises:
        SpecError: it is none; the message goes on after "...", since the caller knows what it is about.

    >>> read_written("Smooth(gradcam++(), samples=5)")
    MethodSpec(name='smooth', values=('gradcam++()',), options={'samples': 5})
    >>> read_written("kpcacam(kernel=rbf, gamma=None)").options
    {'kernel': 'rbf', 'gamma': None}
    """
    if len(text) > LONGEST:
        raise SpecError(f"must have at most {LONGEST} characters, got {len(text)}")
    found = _NAME.fullmatch(text)
    if found is None:
        raise SpecError(f"must be a name, or a name with options in brackets, got {shown(text)}")
    values, options = list[Any](), dict[str, Any]()
    for part in _parts(found[2] or "", text):
        named = _NAMED.fullmatch(part)
        if named is None:
            if options:
                raise SpecError(f"must have options with names behind those without, got {shown(text)}")
            values.append(_value(part, text))
        elif named[1] in options:
            raise SpecError(f"must have each option once, got {named[1]!r} twice in {shown(text)}")
        else:
            options[named[1]] = _value(named[2], text)
    return MethodSpec(found[1].lower(), tuple(values), options)


def _parts(inside: str, text: str) -> Iterator[str]:
    """What stands between the outermost commas."""
    start, open_, quote = 0, list[str](), ""
    for place, character in enumerate(inside):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _ENDS:
            open_.append(_ENDS[character])
        elif character in ")]":
            if not open_ or open_.pop() != character:
                raise SpecError(f"must have a closing bracket for each opening one, got {shown(text)}")
        elif character == "," and not open_:
            yield inside[start:place]
            start = place + 1
    if open_ or quote:
        raise SpecError(f"must have closing brackets and quotes for all opening ones, got {shown(text)}")
    if inside[start:].strip():  # a comma may end the list
        yield inside[start:]


def _value(given: str, text: str) -> Any:
    """The value of a literal; a plain word, or a name with options, as it is."""
    word = given.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = word if _NAME.fullmatch(word) else ...
    if not _is_plain(value):
        raise SpecError(f"must have numbers, words or quoted texts for values, got {shown(word)} in {shown(text)}")
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
