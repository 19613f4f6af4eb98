"""Hooks that never fired: which of them to report when their group closes, and why they did not.

It matters that a hook did not fire only if something was computed that it was there for. So nothing is said about a
group in which apparently nothing ran, and nothing about hooks of this package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from explain.hooks.full_backward import FullBackward


class Expected:
    """What there was when a hook was registered: to be compared with what there is when its group closes."""

    __slots__ = ("_calls", "_gates", "_gradient", "_leaf", "_operations", "code")

    def __init__(self, fn: Any, model: nn.Module | None, gates: Sequence[FullBackward] = ()) -> None:
        self.code = getattr(fn, "__code__", id(fn))
        self._operations = torch._C._autograd._get_sequence_nr()
        self._leaf = None if model is None else next((p for p in model.parameters() if p.requires_grad), None)
        self._gradient = self._mark()
        self._gates = gates
        self._calls = sum(gate.calls for gate in gates)

    def in_vain(self) -> bool:
        """Whether this thread has recorded operations since, or a gradient has been accumulated."""
        if torch._C._autograd._get_sequence_nr() != self._operations:
            return True
        now = self._mark()
        return now is not None and now != self._gradient

    def reason(self, direction: str) -> str:
        if direction.startswith("forward"):
            return "the layer did not run after the hook was registered, or did so in another thread"
        if self._gates and sum(gate.calls for gate in self._gates) == self._calls:
            return "its layer did not run after it was registered; register it before the forward pass"
        return "no gradient came to it; keep the group open until the backward pass is done"

    def _mark(self) -> Any:
        gradient = None if self._leaf is None else self._leaf.grad
        return None if gradient is None else (id(gradient), gradient._version)
