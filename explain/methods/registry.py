"""Names of methods, what they stand for, and the families that they belong to."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeAlias, TypeVar

from explain._utils.errors import MethodError, either, keywords, shown
from explain._utils.specs import MethodSpec, SpecError, read_written
from explain._utils.spelling import did_you_mean
from explain.methods.base import OTHERS, Method, one_layer
from explain.methods.options import Reader, register_reader

MethodLike: TypeAlias = "str | Method"
M = TypeVar("M", bound="Method | type[Method]")

DEEPEST = 5
"""How many methods may be within each other, the innermost counted; their runs multiply."""

_known: dict[str, Method] = {}
_wrappers: dict[str, Callable[..., Method]] = {}


def register(method: M) -> M:
    """Make a method known by its name.

    Above a class, as ``@register``, it is the method with its default options; an object is registered as it is.

    Raises:
        MethodError: the name is taken by another method, or cannot be one.
    """
    known: Method = method() if isinstance(method, type) else method
    name = known.name
    if not re.fullmatch(r"[a-z0-9+._-]+", name):
        raise MethodError(f"a method's name must be of lower-case letters, digits and + . _ -, got {name!r}; change it")
    if _known.setdefault(name, known) != known:
        raise MethodError(
            f"method {name!r} is already registered by {type(_known[name]).__qualname__}; choose another name"
        )
    return method


def register_wrapper(name: str, wrapper: Callable[..., Method]) -> None:
    """Make ``name(inner, option=value)`` mean ``wrapper(inner, option=value)`` for every method."""
    _wrappers[name] = wrapper


@keywords()
def list_methods(pattern: str = "*") -> list[str]:
    """Return the names of the methods that match a glob pattern, in alphabetical order.

    Any of them can stand in the brackets of ``smooth(...)`` and ``augmented(...)`` too.

    >>> list_methods("guided*")
    ['guidedbackprop', 'guidedgradcam', 'guidedintegratedgradients']
    """
    if not isinstance(pattern, str):
        raise MethodError(f"pattern must be a text such as 'guided*', got {shown(pattern)}")
    return sorted(name for name in _known if fnmatch.fnmatchcase(name, pattern))


def get_method(method: MethodLike) -> Method:
    """Return the method object for a name, which may have options; a method object is returned as it is.

    Options are literals or plain words; those that are methods themselves are names again, with options or without.

    Raises:
        MethodError: the name is unknown, the method has no such option, or the object is no method.

    >>> get_method("smooth(gradcam)").name
    'smooth(gradcam)'
    >>> get_method("integratedgradients(steps=20, baseline=blur)").steps
    20
    >>> get_method("smooth(gradcam(relu=False), samples=5)").samples
    5
    """
    if isinstance(method, str):
        return _by_text(method.strip())
    if isinstance(method, type):
        raise MethodError(
            f"method must be a name or an object, got the class {method.__name__}; use {method.__name__}()"
        )
    if not isinstance(method, Method):
        raise MethodError(f"method must be a name or a method object, got {shown(method)}; see explain.list_methods()")
    return method


def _by_text(text: str) -> Method:
    if "(" not in text:
        return _known_as(text.lower(), text)
    if _depth(text) > DEEPEST:  # which options may add one to
        raise MethodError(
            f"method must hold at most {DEEPEST - 1} methods within each other, got {shown(text)}; take more samples "
            "of fewer"
        )
    try:
        read = read_written(text)
    except SpecError as error:
        raise MethodError(f"method {error}; write it like integratedgradients(steps=20)") from None
    if read.name in _wrappers:
        return _wrapped(read)
    method = _known_as(read.name, text)
    if read.values:
        names = [field.name for field in fields(method)]
        raise MethodError(
            f"method {read.name} must be given its options by name, got {shown(read.values[0])}; write "
            f"{read.name}({f'{names[0]}=...' if names else ''})"
        )
    _check_names(read, method)
    return replace(method, **read.options)


def _wrapped(read: MethodSpec) -> Method:
    """The method that a wrapper makes of another."""
    inner, *more = read.values or (read.options.pop("method", None),)
    if more or not isinstance(inner, str):
        got = shown(more[0] if more else inner) if read.values else "none"
        raise MethodError(
            f"method {read.name} must have one method in its brackets, and options by name, got {got}; write "
            f"{read.name}(gradcam)"
        )
    wrapper, method = _wrappers[read.name], _by_text(inner.strip())
    _check_names(read, wrapper(method))
    try:
        return wrapper(method, **read.options)
    except TypeError:  # it takes a method, and nothing else
        raise MethodError(
            f"method {read.name} takes no options, got {', '.join(read.options)}; make the object and pass it"
        ) from None


def _check_names(read: MethodSpec, method: Method) -> None:
    """Refuse options that a method does not have."""
    known = [field.name for field in fields(method) if field.init]
    for name in read.options:
        if name not in known:
            hint = did_you_mean(name, known) if known else "it takes none"
            raise MethodError(f"method {read.name} has no option {name!r}; {hint}")


def _known_as(name: str, text: str) -> Method:
    if name not in _known:
        several = [part.strip() for part in text.lower().split(",")]
        if len(several) > 1 and set(several) <= set(list_methods()):
            each = either(f"give a list, {several}", f"write {' '.join(f'--method {part}' for part in several)}")
            raise MethodError(f"method must be one name, got {len(several)} in {shown(text)}; {each}")
        guess, _, inside = text.lower().partition("(")
        forms = []
        if inside and "=" not in inside:  # a method within another, it seems
            guess, forms = text.lower(), [f"{wrapper}({inside}" for wrapper in _wrappers]
        raise MethodError(f"method {shown(text)} is unknown; {did_you_mean(guess, [*list_methods(), *forms])}")
    return _known[name]


def _depth(text: str) -> int:
    """How many brackets are open at most."""
    steps = accumulate({"(": 1, ")": -1}.get(character, 0) for character in text)
    return max(steps, default=0)


def _by_name(value: Any) -> Any:
    """The method that an option names; other values as they are."""
    return get_method(value) if isinstance(value, str) else value


def _check_inner(name: str, inner: Method, option: str) -> None:
    """Refuse methods of several layers, and methods around methods around methods, whose runs multiply."""
    one_layer(name, inner, option)
    if _levels(inner) >= DEEPEST:
        raise MethodError(
            f"{option} of {name} must hold at most {DEEPEST - 1} methods within each other, got "
            f"{shown(inner.name)}; take more samples of fewer"
        )


def _levels(method: Method) -> int:
    """How many methods are within each other, the outermost counted."""
    options = [getattr(method, field.name) for field in fields(method)] if is_dataclass(method) else []
    return 1 + max((_levels(option) for option in options if isinstance(option, Method)), default=0)


register_reader(Method, Reader("a method object or a name", _by_name, _check_inner))


def family(method: str | Method) -> str:
    """Return the family of a method, one of `FAMILIES`; one that wraps another has the other's.

    >>> family("gradcam"), family("smooth(saliency)"), family("my own")
    ('class activation maps', 'gradients', 'other methods')
    """
    try:
        found = get_method(method)
    except MethodError:
        return OTHERS
    inner = getattr(found, "method", None)
    return family(inner) if isinstance(inner, Method) else found.family


def control(method: str | Method) -> str:
    """Return what a method does that explains nothing and is there to compare with; "" for all others.

    >>> control("randomcam"), control("smooth(randomcam)"), control("gradcam")
    ('random weights', 'random weights', '')
    """
    try:
        found = get_method(method)
    except MethodError:
        return ""
    inner = getattr(found, "method", None)
    return control(inner) if isinstance(inner, Method) else found.control


def divides_by_score(method: str | Method) -> bool:
    """Whether a method divides by the score, so that a negative one reverses all signs.

    >>> divides_by_score("ablationcam"), divides_by_score("gradcam")
    (True, False)
    """
    try:
        return get_method(method).by_score
    except MethodError:
        return False
