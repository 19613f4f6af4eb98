"""Names of methods, and what they stand for."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from explain.errors import MethodError, did_you_mean, shown
from explain.methods.base import Method

MethodLike: TypeAlias = "str | Method"
M = TypeVar("M", bound=Method)

DEEPEST = 5
"""How many methods may be within each other, the innermost counted; their runs multiply."""

_known: dict[str, Method] = {}
_wrappers: dict[str, Callable[[Method], Method]] = {}


def register(method: M) -> M:
    """Make a method known by its name, with the options that it has.

    Raises:
        MethodError: the name is taken by another method, or cannot be one.
    """
    name = method.name
    if not re.fullmatch(r"[a-z0-9+._-]+", name):
        raise MethodError(f"a method's name must be of lower-case letters, digits and + . _ -, got {name!r}; change it")
    if _known.setdefault(name, method) != method:
        raise MethodError(
            f"method {name!r} is already registered by {type(_known[name]).__qualname__}; choose another name"
        )
    return method


def register_wrapper(name: str, wrapper: Callable[[Method], Method]) -> None:
    """Make ``name(inner)`` mean ``wrapper(inner)`` for every method."""
    _wrappers[name] = wrapper


def list_methods(pattern: str = "*") -> list[str]:
    """Return the names of the methods that match a glob pattern, in alphabetical order.

    Any of them can stand in the brackets of ``smooth(...)`` and ``augmented(...)`` too.

    >>> list_methods("guided*")
    ['guidedbackprop', 'guidedgradcam']
    """
    return sorted(name for name in _known if fnmatch.fnmatchcase(name, pattern))


def get_method(method: MethodLike) -> Method:
    """Return the method object for a name; a method object is returned as it is.

    Raises:
        MethodError: the name is unknown, or the object is no method.

    >>> get_method("smooth(gradcam)").name
    'smooth(gradcam)'
    """
    if isinstance(method, str):
        if method.count("(") >= DEEPEST:
            raise MethodError(
                f"method must hold at most {DEEPEST - 1} methods within each other, got {shown(method)}; take more "
                "samples of fewer"
            )
        return _by_name(method.strip().lower())
    if isinstance(method, type):
        raise MethodError(
            f"method must be a name or an object, got the class {method.__name__}; use {method.__name__}()"
        )
    if not isinstance(method, Method):
        raise MethodError(f"method must be a name or a method object, got {shown(method)}; see explain.list_methods()")
    return method


def _by_name(name: str) -> Method:
    wrapped = re.fullmatch(r"(\w+)\((.+)\)", name)
    if wrapped and wrapped[1] in _wrappers:
        return _wrappers[wrapped[1]](_by_name(wrapped[2].strip()))
    if name not in _known:
        forms = [f"{wrapper}({wrapped[2]})" for wrapper in _wrappers] if wrapped else []
        raise MethodError(f"method {shown(name)} is unknown; {did_you_mean(name, [*list_methods(), *forms])}")
    return _known[name]
