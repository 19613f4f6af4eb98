"""Values by tensors, looked up often: within a pass that is recorded, at every call."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch

Value = TypeVar("Value")


class ByTensor(Generic[Value]):
    """Values by tensors, which are compared by identity and not kept alive.

    >>> known, x = ByTensor[str](), torch.ones(2)
    >>> known[x] = "ones"
    >>> known.get(x), known.get(torch.ones(2)), x in known
    ('ones', None, True)
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[torch.Tensor], Value]] = {}

    def __setitem__(self, tensor: torch.Tensor, value: Value) -> None:
        self._found[id(tensor)] = weakref.ref(tensor), value

    def get(self, tensor: torch.Tensor) -> Value | None:
        """The value of a tensor; None if it has none."""
        found = self._found.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def __contains__(self, tensor: torch.Tensor) -> bool:
        found = self._found.get(id(tensor))
        return found is not None and found[0]() is tensor

    def discard(self, tensor: torch.Tensor) -> None:
        self._found.pop(id(tensor), None)
