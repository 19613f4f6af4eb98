"""The tracer: the one `TorchFunctionMode` that all who record, replace or count the calls of this thread extend."""

from __future__ import annotations

import sys
import threading
from typing import Any, ClassVar, Self, TypeAlias

from torch import nn
from torch.overrides import TorchFunctionMode

from explain.tracing.calls import opened

Running: TypeAlias = "tuple[str | None, nn.Module | None]"
"""The module that runs, and its name."""
_MODULE_CALL = nn.Module._call_impl.__code__


class Tracer(TorchFunctionMode):
    """Makes the calls of a forward pass in the place of PyTorch, for as long as its ``with`` block lasts.

    With ``opens`` it is shown the calls inside functions of `torch.nn.functional` that are written in Python, instead
    of those functions. While it makes a call it is shown nothing; tracers that were entered before it are. Calls of
    other threads than the one that entered it are left alone.

    >>> class Names(Tracer):
    ...     def __init__(self):
    ...         self.names = []
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
        """Make a call, and return its result."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        inner = opened(func) if self.opens else None
        if inner is None:
            return self.called(func, args, kwargs)
        with self:
            return inner(*args, **kwargs)


class ModuleTracker:
    """Tells the innermost module of a model that runs, and the first of its names.

    The calls are read from Python's stack, which costs nothing before.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}

    def __call__(self) -> Running:
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _MODULE_CALL and (module := frame.f_locals["self"]) in self._names:
                return self._names[module], module
            frame = frame.f_back  # type: ignore[assignment]
        return None, None
