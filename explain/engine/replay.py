"""What lies before a layer, run once and replayed: for work that alters only what the layer gives.

A tape notes what every functional call returned, up to the layer. A replay hands these results out again in the same
order, and computes nothing until the layer is reached. Tensors that nothing refers to by then are not kept: only their
shapes are needed, for code that asks for them.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class ReplayError(RuntimeError):
    """The network does something else than it did when the tape was made."""


class Tape(TorchFunctionMode):
    """Notes what functional calls of this thread return, until `stop`.

    >>> x = torch.ones(2)
    >>> with Tape() as tape:
    ...     y = x + 1
    >>> tape.stop()
    >>> with Replay(tape):
    ...     x + 1 is y
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any]] = []
        self.stopped = False
        self._thread = threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.stopped and threading.get_ident() == self._thread:
            self.calls.append((func, _weakly(result)))
        return result

    def stop(self) -> None:
        """Keep from now on what is still referred to, and only the shapes of the rest."""
        self.stopped = True
        self.calls = [(func, _kept(result)) for func, result in self.calls]
        self._versions = [(tensor, tensor._version) for tensor in self._tensors()]

    def is_intact(self) -> bool:
        """Whether nothing that the tape keeps has been overwritten."""
        return all(tensor._version == version for tensor, version in self._versions)

    def _tensors(self) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for _, result in self.calls:
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, torch.Tensor) and not value.is_inference():
                    found[id(value)] = value
        return list(found.values())


class Replay(TorchFunctionMode):
    """Hands out what a tape noted, in its order, until it is made ``live``.

    Raises:
        ReplayError: another function is called than the one that was noted.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.live = False
        self._calls = tape.calls
        self._next = 0
        self._thread = threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self.live or threading.get_ident() != self._thread:
            return func(*args, **(kwargs or {}))
        if self._next >= len(self._calls) or self._calls[self._next][0] != func:
            raise ReplayError(f"another function is called than before: {getattr(func, '__name__', func)}")
        self._next += 1
        return self._calls[self._next - 1][1]


class _Weak:
    """A tensor that may no longer be needed, and what stands for it then."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._like = tensor.shape, tensor.dtype, tensor.device

    def kept(self) -> torch.Tensor:
        tensor = self._tensor()
        if tensor is not None:
            return tensor
        shape, dtype, device = self._like
        return torch.zeros((), dtype=dtype, device=device).expand(shape)


class _Several:
    """A tuple or list of results; named tuples stay what they are."""

    def __init__(self, results: Any) -> None:
        self._like = type(results)
        self._named = hasattr(results, "_fields") or type(results).__module__ == "torch.return_types"
        self._values = [_weakly(value) for value in results]

    def kept(self) -> Any:
        values = [_kept(value) for value in self._values]
        if self._like.__module__ == "torch.return_types":
            return self._like(values)
        return self._like(*values) if self._named else self._like(values)


def _weakly(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return _Weak(result)
    if isinstance(result, (tuple, list)) and not isinstance(result, torch.Size):
        return _Several(result)
    return result


def _kept(result: Any) -> Any:
    return result.kept() if isinstance(result, (_Weak, _Several)) else result
