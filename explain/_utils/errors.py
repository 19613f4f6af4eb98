"""Every error and warning this package raises on its own account.

Each message is one line that says which argument, what it must be, what it was, and what to do
about it. What the user's own model, target or callback raises is never wrapped: it comes through as
it is. (What torch says of an input that does not fit the model's weights is told in our words; it
stays there as the cause.)
"""

import functools
import importlib
import inspect
import logging
import re
import sys
import threading
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, ParamSpec, TypeVar

from explain._utils.signals import Shared, temporarily
from explain._utils.spelling import close_to as close_to
from explain._utils.spelling import did_you_mean as did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def printable(text: object) -> str:
    """A text on one line, with escapes for what cannot be seen (control characters, line breaks,
    marks of direction), so that it cannot steer a terminal. Joiners stay, as in emoji.

    >>> printable("tabby\\x1b[2J\\ncat")
    'tabby\\\\x1b[2J\\\\ncat'
    """
    hidden_characters = {c for c in str(text) if unicodedata.category(c) in _STEERING} - _JOINERS
    return str(text).translate(
        {ord(c): c.encode("unicode_escape").decode("ascii") for c in hidden_characters}
    )


_STEERING = frozenset(["Cc", "Cf", "Cs", "Zl", "Zp"])
_JOINERS = frozenset("\u200c\u200d\u00ad")  # and the soft hyphen


class ExplainError(ValueError):
    """Something could not be explained; the message names the argument, the requirement, the value
    and the remedy.

    It is a ``ValueError``. A wrong argument is a ``TypeError`` as well, and a name that is not in a
    mapping a ``KeyError``.
    """

    def __str__(self) -> str:
        """The message on one line that cannot steer a terminal: names and labels in it come from
        anywhere. (Not by ``super()``: a ``KeyError`` would put it in quotes.)"""
        return printable(Exception.__str__(self))


class ArgumentError(ExplainError, TypeError):
    """A function was called with an argument that it does not have."""


def imported_later(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for the package ``module`` that imports names (each in the module that
    ``homes`` says) when first used, so that slow modules do not delay ``import explain``.
    """

    def load(name: str) -> Any:
        """Import and return the object of this name."""
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return load


class ImageError(ExplainError):
    """An image could not be read or turned into what a model takes."""


class LayerError(ExplainError):
    """A layer is unknown, was never called, or holds nothing that the method can use."""


class NotRecordedError(LayerError, KeyError):
    """Nothing was recorded of a layer under this name."""


class UnusedLayerError(LayerError):
    """A layer was called, but the score does not depend on it."""


class TargetError(ExplainError):
    """A target does not fit the model's output."""


class MethodError(ExplainError):
    """A method is unknown, or was asked for something that it does not do."""


class ModelError(ExplainError):
    """A model could not be found, loaded or run, or gave something that is not a score."""


class LabelsError(ModelError):
    """The labels that were given are not those of the model's classes."""


class BaselineError(ExplainError):
    """What takes the place of covered pixels is unknown, or does not fit the images or the mask."""


class MetricError(ExplainError):
    """A metric is unknown, or was asked of something that it cannot judge."""


class OutputError(ExplainError):
    """A result could not be written."""


class FolderError(OutputError):
    """The folder for results cannot be written, so that no other result could be written there
    either."""


class RecordError(ExplainError):
    """A record cannot be read, or lacks what is needed to repeat it."""


class RunError(ExplainError):
    """A run over many photos cannot be written, continued or read, or its source cannot be used."""


class AppError(ExplainError):
    """The app cannot be started, or not so."""


class PhotoError(ExplainError):
    """One of several photos could not be explained; ``__cause__`` is what went wrong."""


class PhotosError(ExplainError):
    """Some of several photos could not be explained.

    ``results`` has an `Explanation` for each photo that could, and None for the others, in the
    order of the photos; ``errors`` has a `PhotoError` for each of the others, by its place.
    """

    def __init__(self, message: str, results: list[Any], errors: dict[int, PhotoError]) -> None:
        super().__init__(message)
        self.results = results
        self.errors = errors

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with all arguments: exceptions keep only those of ``Exception.__init__``."""
        return type(self), (*self.args, self.results, self.errors)


class HookError(ExplainError):
    """A hook was used in a way that cannot work."""


class ExplainWarning(UserWarning):
    """The result is right, but it may not show what its reader expects; the message says why."""


class _Here(threading.local):
    """How the messages of this thread are worded, and where its warnings go."""

    images: Sequence[str | None] = ()
    """The names of a batch's images; see `naming`."""
    typed = False
    """Whether somebody types commands; see `typed`."""
    collect_warnings: list[str] | None = None
    """The list for warnings; see `collect_warnings`."""


_here = _Here()

for _kind in (
    *ExplainError.__subclasses__(),
    *OutputError.__subclasses__(),
    *LayerError.__subclasses__(),
):
    _kind.__module__ = "explain"  # where users import them from
LabelsError.__module__ = ExplainError.__module__ = ExplainWarning.__module__ = "explain"


def naming(images: Sequence[str | None]) -> AbstractContextManager[None]:
    """Within this block, let error messages of this thread call the images of a batch by these
    names (see `image_name`); images whose name is None are called by their numbers."""
    return temporarily(_here, images=images)


def image_name(number: int) -> str:
    """Return how error messages call the image with this number in a batch: by the name that
    `naming` gave it, else by its number.

    >>> with naming(["cat.jpg", "dog.jpg"]):
    ...     image_name(1)
    'dog.jpg'
    >>> image_name(1)
    '1'
    """
    return (_here.images[number] if number < len(_here.images) else None) or str(number)


def typed() -> AbstractContextManager[None]:
    """Within this block, let error messages of this thread name options as on the command line
    (``--batch-size``), not as in Python; the command line runs each command in it."""
    return temporarily(_here, typed=True)


def python_or_command(python: str, command: str) -> str:
    """Return the wording of a message for the one who reads it: ``python`` for a caller from
    Python, ``command`` within `typed`, for somebody who types a command.

    >>> with typed():
    ...     python_or_command("pass overwrite=True", "give --force")
    'give --force'
    >>> python_or_command("pass overwrite=True", "give --force")
    'pass overwrite=True'
    """
    return command if _here.typed else python


def option_name(name: str) -> str:
    """Return how error messages call an argument: by its name, or within `typed` as the option of
    the command line.

    >>> with typed():
    ...     option_name("batch_size")
    '--batch-size'
    >>> option_name("batch_size")
    'batch_size'
    """
    return python_or_command(name, f"--{name.replace('_', '-')}")


def check_whole_number(
    name: str,
    value: Any,
    least: int,
    *,
    optional: bool = True,
    error: type[ExplainError] = RunError,
) -> None:
    """Refuse an option called ``name`` whose value is no whole number from ``least``. ``optional``
    is whether None is allowed, for a default; ``error`` is the class that is raised.
    """
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise error(f"{name} must be a whole number from {least}, got {shown(value)}; leave it out")


def check_choice(
    name: str, value: Any, choices: Sequence[str], *, error: type[ExplainError] = ArgumentError
) -> None:
    """Refuse an option called ``name`` whose value is not one of ``choices``; ``error`` is the
    class that is raised."""
    if value not in choices:
        raise error(
            f"{name} must be one of {', '.join(choices)}, got {shown(value)}; choose one of them"
        )


def muted() -> AbstractContextManager[None]:
    """Within this block, drop this package's own warnings (`warn`) in this thread; those of
    libraries are not affected, for which see `quiet`."""
    return collect_warnings([])


def collect_warnings(messages: list[str]) -> AbstractContextManager[None]:
    """Within this block, append this package's own warnings (`warn`) in this thread to a list of
    the caller's, instead of showing them.

    >>> said: list[str] = []
    >>> with collect_warnings(said):
    ...     warn("the map is empty")
    >>> said
    ['the map is empty']
    """
    return temporarily(_here, collect_warnings=messages)


def quiet() -> AbstractContextManager[None]:
    """Within this block, ignore all Python warnings. Filters belong to the process: the first of
    several threads sets them and the last restores them.
    """
    return Shared({"warnings": _ignore_warnings})


def _ignore_warnings() -> AbstractContextManager[Any]:
    """Ignore Python's warnings from now on, and return the entered context whose exit restores the
    filters.
    """
    caught = warnings.catch_warnings(action="ignore")
    caught.__enter__()
    return caught


def note(message: str) -> None:
    """Log a message at the level INFO of the logger "explain": that a slower way is taken, which is
    no fault, but costs time. ``logging.basicConfig(level=logging.INFO)`` shows them.
    """
    logging.getLogger("explain").info(printable(message))


def warn(message: str) -> None:
    """Give an `ExplainWarning` for the line outside this package, ``level`` frames up, or append
    the message to the list of `collect_warnings`.
    """
    if _here.collect_warnings is not None:
        _here.collect_warnings.append(printable(message))
        return
    frame = sys._getframe(1)
    level = 2  # as ``stacklevel`` counts: this function is 1
    while (
        frame.f_back is not None
        and str(frame.f_globals.get("__name__", "")).split(".")[0] == "explain"
    ):
        frame = frame.f_back
        level += 1
    warnings.warn(printable(message), ExplainWarning, stacklevel=level)


CALLED_ELSEWHERE = {
    **dict.fromkeys(("target_layer", "target_layers", "layers", "layer_name"), "layer"),
    **dict.fromkeys(("target_category", "class_idx", "class_index", "label"), "target"),
    **dict.fromkeys(("input_tensor", "inputs", "input"), "x"),
}
"""Arguments as other packages call them, and what they are here."""
LEFT_TO_CALLER = {"precision": "call it within torch.autocast(device_type, torch.bfloat16)"}
"""What PyTorch does around any call."""


def keywords(
    *more: type, elsewhere: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for public functions: unknown keyword arguments are refused in one line
    with a hint, and tensors are made on the CPU, whatever the caller's default device is.

    Args:
        more: typed dictionaries of what its ``**options`` may hold.
        elsewhere: for names that a caller may look for here, what takes them.

    Raises:
        ArgumentError: an argument is unknown; like all that Python says of arguments, it is a
            ``TypeError`` too.

    >>> @keywords(elsewhere={"model": "Explainer(model=...) takes it"})
    ... def explain(image: str, methods: str = "gradcam") -> str:
    ...     return methods
    >>> explain("cat.jpg", metod="lrp")
    Traceback (most recent call last):
    explain.ArgumentError: explain has no argument 'metod'; did you mean 'methods'?
    """

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with the check around it; the names that it accepts are read once."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(function).parameters.items()
        accepted = dict.fromkeys(name for name, parameter in parameters if parameter.kind in kinds)
        for typed_dict in more:
            accepted.update(dict.fromkeys(typed_dict.__annotations__))
        accepted.pop("self", None)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            """Call the function if it has all keyword arguments, with the CPU as the default device
            where the caller has set one."""
            if not kwargs.keys() <= accepted.keys():
                wrong = next(name for name in kwargs if name not in accepted)
                meant = CALLED_ELSEWHERE.get(wrong, wrong)
                hints = {**LEFT_TO_CALLER, **(elsewhere or {})}
                hint = hints.get(wrong) or did_you_mean(meant, accepted)
                # a constructor is called by its class
                name = re.sub(r"\.__\w+__$", "", function.__qualname__)
                raise ArgumentError(f"{name} has no argument {wrong!r}; {hint}")
            # without torch, or without a function mode, as which torch keeps a default device,
            # there is none to replace
            torch = sys.modules.get("torch")
            if torch is None or not torch._C._len_torch_function_stack():
                return function(*args, **kwargs)
            from explain._utils.default_device import cpu_by_default

            with cpu_by_default():
                return function(*args, **kwargs)

        return checked

    return mark


def raised(error: BaseException) -> str:
    """Return on one line what code other than ours raised, for the end of an error message: the
    kind of error and the first line of its message.

    >>> raised(ValueError("no\\nmore"))
    'raised ValueError: no'
    """
    return f"raised {type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def reason_of(error: BaseException, most: int = 100) -> str:
    """Return the message of an error in one line of at most ``most`` letters: only the reason of a
    system error, and the name of its class if there is no message."""
    words = " ".join(str(getattr(error, "strerror", None) or error).split())
    return words[:most] or type(error).__name__


def shown(value: object, width: int = 60) -> str:
    """Return an argument's value as error messages print it: its ``repr`` on one line of at most
    ``width`` characters; of arrays and tensors, the kind and shape.

    >>> shown("0.6"), shown([1] * 100, 12)
    ("'0.6'", '[1, 1, 1, ...')
    """
    # a mapping may have a key "shape" that it gives as an attribute
    shape = None if isinstance(value, Mapping) else getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    words = " ".join(repr(value).split())
    return words if len(words) <= width else f"{words[: width - 3].rstrip()} ..."


def optional(module: str, why: str, extra: str, error: type[ExplainError]) -> Any:
    """Import a module of an optional package, which comes with an ``extra`` of this one; else raise
    ``error`` with the command that installs it. ``why`` ends "must be installed ...".

    >>> optional("nothing.at.all", "for this", "app", AppError)
    Traceback (most recent call last):
    explain.AppError: nothing must be installed for this; run pip install 'explain-hooks[app]'
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise error(
            f"{package} must be installed {why}; run pip install 'explain-hooks[{extra}]'"
        ) from None


def short_repr(value: Any) -> str:
    """A ``__repr__`` for dataclasses that shows arrays and tensors as their kind and shape.

    >>> import dataclasses, numpy
    >>> @dataclasses.dataclass
    ... class Point:
    ...     x: object
    ...     __repr__ = short_repr
    >>> Point(3), Point(numpy.zeros((2, 4)))
    (Point(x=3), Point(x=<ndarray of shape (2, 4)>))
    """
    options = []
    for field in fields(value):
        if field.repr:
            option = getattr(value, field.name)
            is_array = isinstance(getattr(option, "shape", None), tuple)
            text = f"<{shown(option)}>" if is_array else repr(option)
            options.append(f"{field.name}={text}")
    return f"{type(value).__name__}({', '.join(options)})"
