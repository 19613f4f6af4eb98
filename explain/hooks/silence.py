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

    __slots__ = ("_calls", "_gates", "_gradient", "_leaf", "_operations", "around_ran", "code")

    def __init__(self, fn: Any, model: nn.Module | None, gates: Sequence[FullBackward] = ()) -> None:
        self.code = getattr(fn, "__code__", id(fn))
        self._operations = torch._C._autograd._get_sequence_nr()
        self._leaf = None if model is None else next((p for p in model.parameters() if p.requires_grad), None)
        self._gradient = self._mark()
        self._gates = gates
        self.around_ran = False
        """Whether a module that the hook's layer is in has run since: set where it is known."""
        self._calls = sum(gate.calls for gate in gates)

    def in_vain(self) -> bool:
        """Whether a module around it ran, this thread has recorded operations, or a gradient was accumulated since."""
        if self.around_ran or torch._C._autograd._get_sequence_nr() != self._operations:
            return True
        now = self._mark()
        return now is not None and now != self._gradient

    def note_run(self, *given: Any) -> None:
        """Note that a module around the hook's layer runs."""
        self.around_ran = True

    def reason(self, direction: str) -> str:
        if direction.startswith("forward"):
            if self.around_ran:
                return (
                    "the module that it is in ran without this call of it (as nn.MultiheadAttention, which reads the "
                    "weights of out_proj itself); hook that module"
                )
            return "the layer did not run after the hook was registered, or did so in another thread"
        if self._gates and sum(gate.calls for gate in self._gates) == self._calls:
            return "its layer did not run after it was registered; register it before the forward pass"
        return "no gradient came to it; keep the group open until the backward pass is done"

    def _mark(self) -> Any:
        gradient = None if self._leaf is None else self._leaf.grad
        return None if gradient is None else (id(gradient), gradient._version)
