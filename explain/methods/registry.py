"""Names of methods, and what they stand for."""

from __future__ import annotations

import fnmatch
from typing import TypeAlias

from explain.errors import MethodError, did_you_mean
from explain.methods.base import Method

MethodLike: TypeAlias = "str | Method"

_known: dict[str, type] = {}


def register(method: type) -> type:
    """Make a method class known by its ``name``, in its default form.

    Raises:
        MethodError: the name is taken by another class.
    """
    name: str = method.name  # type: ignore[attr-defined]
    if _known.setdefault(name, method) is not method:
        raise MethodError(f"method {name!r} is already registered by {_known[name].__qualname__}; choose another name")
    return method


def list_methods(pattern: str = "*") -> list[str]:
    """Return the names of the methods that match a glob pattern, in alphabetical order.

    >>> list_methods("guided*")
    ['guidedbackprop', 'guidedgradcam']
    """
    return sorted(name for name in _known if fnmatch.fnmatchcase(name, pattern))


def get_method(method: MethodLike) -> Method:
    """Return the method object for a name; a method object is returned as it is.

    Raises:
        MethodError: the name is unknown, or the object is no method.
    """
    if isinstance(method, str):
        if method.lower() not in _known:
            raise MethodError(f"method {method!r} is unknown; {did_you_mean(method.lower(), list_methods())}")
        made: Method = _known[method.lower()]()
        return made
    if isinstance(method, type):
        raise MethodError(
            f"method must be a name or an object, got the class {method.__name__}; use {method.__name__}()"
        )
    if not isinstance(method, Method):
        raise MethodError(f"method must be a name or a method object, got {method!r}; see explain.list_methods()")
    return method
