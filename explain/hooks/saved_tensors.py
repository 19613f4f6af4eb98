"""Hooks on saved tensors that may end in any order, and in any thread.

PyTorch keeps those of a thread on a stack, where only the last one acts, and only the last one can be taken away. A
pair of hooks that ends while others lie above it stays there without effect: it does what the one below it would. It
goes when its turn comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from explain._utils.errors import HookError

_stack = torch._C._autograd
_here = threading.local()


class SavedTensors:
    """A pair of hooks on this thread's stack, in effect until it is removed.

    What is packed while it is in effect is unpacked by it, also when it has ended.
    """

    def __init__(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        self._pack, self._unpack = pack, unpack
        self._ended = False
        self._pair = (self._packed, _unpacked)
        _drop_ended()
        self._below = _stack._top_saved_tensors_default_hooks(True)
        try:
            _stack._push_saved_tensors_default_hooks(*self._pair)
        except RuntimeError as error:
            raise HookError(
                f"saved_tensors() must be called where PyTorch allows such hooks, but it says: {error}; call it outside"
            ) from error
        _own().append(self)

    def remove(self) -> None:
        self._ended = True
        _drop_ended()

    def _packed(self, tensor: torch.Tensor) -> tuple[Callable[[Any], torch.Tensor], Any]:
        if not self._ended:
            return self._unpack, self._pack(tensor)
        if self._below is None:
            return _unchanged, (tensor.detach(), tensor._version)
        pack, unpack = self._below
        return unpack, pack(tensor)

    def is_on_top(self) -> bool:
        top = _stack._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] == self._pair[0]

    @property
    def ended(self) -> bool:
        return self._ended


def _unpacked(packed: tuple[Callable[[Any], torch.Tensor], Any]) -> torch.Tensor:
    unpack, value = packed
    return unpack(value)


def _unchanged(kept: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a tensor that was saved as it is; autograd leaves it to hooks to see whether it still is."""
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version {version}"
        )
    return tensor


def _own() -> list[SavedTensors]:
    """The pairs that this thread has put on its stack, the last one last."""
    if not hasattr(_here, "pairs"):
        _here.pairs = []
    pairs: list[SavedTensors] = _here.pairs
    return pairs


def _drop_ended() -> None:
    pairs = _own()
    while pairs and pairs[-1].ended and pairs[-1].is_on_top():
        _stack._pop_saved_tensors_default_hooks()
        pairs.pop()
