"""The tracer: the one `TorchFunctionMode` that all who record, replace or count the calls of this
thread extend."""

import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Self, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode  # of PyTorch 2.6 to 2.15

Running: TypeAlias = tuple[str | None, nn.Module | None]
"""The module that runs, and its name."""
_MODULE_CALL = nn.Module._call_impl.__code__


class Tracer(TorchFunctionMode):
    """Makes the calls of a forward pass in the place of PyTorch, for as long as its ``with`` block
    lasts.

    With ``opens`` it is shown the calls inside functions of `torch.nn.functional` that are written
    in Python, instead of those functions. While it makes a call it is shown nothing; tracers that
    were entered before it are. Calls of other threads than the one that entered it are left alone.

    >>> class Names(Tracer):
    ...     def __init__(self):
    ...         self.names = []
    ...
    ...     def called(self, func, args, kwargs):
    ...         self.names.append(func.__name__)
    ...         return func(*args, **kwargs)
    >>> import torch
    >>> with Names() as seen:
    ...     total = torch.ones(2).exp().sum()
    >>> seen.names
    ['ones', 'exp', 'sum']
    """

    opens: ClassVar[bool] = True

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a PyTorch function in its place, and return its result.

        Subclasses record or change the call here. While it runs, this tracer is shown no calls.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Push this mode on torch's stack, for calls of the present thread."""
        self._thread = threading.get_ident()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """Remove this mode from torch's stack, and keep modes that lie above it.

        After an interrupt, a mode that was entered later may still be there.
        """
        inner_modes = []
        while torch._C._len_torch_function_stack() and (inner_mode := _pop_mode()) is not self:  # type: ignore[no-untyped-call]
            inner_modes.append(inner_mode)
        for inner_mode in reversed(inner_modes):
            _push_mode(inner_mode)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Pass a call of PyTorch to `called`; open functions of `torch.nn.functional` to the calls
        inside, if ``opens``.

        Calls of other threads are made as they are.
        """
        kwargs = kwargs or {}
        if threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        opened_function = transparent_copy(func) if self.opens else None
        if opened_function is None:
            return self.called(func, args, kwargs)
        with self:
            return opened_function(*args, **kwargs)


def running_modules(frame: types.FrameType | None) -> Iterator[nn.Module]:
    """Yield the modules whose calls led to a frame of Python's stack, the innermost first."""
    while frame is not None:
        if frame.f_code is _MODULE_CALL:
            yield frame.f_locals["self"]
        frame = frame.f_back


_MODE_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_opened: dict[Any, Callable[..., Any] | None] = {}


def transparent_copy(function: Any) -> Callable[..., Any] | None:
    """A copy of a function of `torch.nn.functional` that shows the calls inside it to modes; None
    for other functions.

    PyTorch shows a mode the function alone: the function checks for a mode, and passes the call to
    it. A copy of the function without that check shows the calls inside.

    >>> from torch.nn import functional as F
    >>> transparent_copy(F.multi_head_attention_forward).__name__, transparent_copy(F.conv2d)
    ('multi_head_attention_forward', None)
    """
    if not isinstance(function, types.FunctionType) or function.__module__ != "torch.nn.functional":
        return None
    if function not in _opened:
        checks = any(name in _MODE_CHECKS for name in function.__code__.co_names)
        _opened[function] = _copy(function) if checks and function.__name__ not in _CLOSED else None
    return _opened[function]


_CLOSED = frozenset(["softsign", "gumbel_softmax", "interpolate", "grid_sample", "embedding"])
"""Functions that are shown as one call, as operations of their own."""


def _copy(function: types.FunctionType) -> Callable[..., Any]:
    """A copy of a function of `torch.nn.functional` whose checks for function modes
    (`_MODE_CHECKS`) always say no.

    A tracer then sees the calls inside it.
    """
    globals_without_modes = {
        **function.__globals__,
        **dict.fromkeys(_MODE_CHECKS, lambda *values: False),
    }
    copy = types.FunctionType(
        function.__code__,
        globals_without_modes,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
