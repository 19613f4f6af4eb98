"""Attention that the explained input does not reach, kept within reach of a backward pass.

Words attend to each other before they meet a photo. A backward pass to the photo does not come by there, and with
frozen weights there is not even a graph. Zeros that ask for a gradient, added to what such an attention is given,
change that: a pass that goes to them as well finds the gradient in the attention, whoever trains the network.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from explain.relevance.propagation import sources_behind
from explain.tracing.calls import opened
from explain.tracing.operations import kind_of


class ZeroLeaves(TorchFunctionMode):
    """Adds zeros to what softmaxes and attentions are given that ``sources`` do not reach; ``leaves`` has them.

    >>> photo, words = torch.zeros(2, requires_grad=True), torch.zeros(2)
    >>> with ZeroLeaves([photo]) as awake:
    ...     total = ((photo + words.softmax(0)) * photo.softmax(0)).sum()
    >>> [tuple(found.shape) for found in torch.autograd.grad(total, awake.leaves)]
    [(2,)]
    """

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.leaves: list[torch.Tensor] = []
        self._sources, self._thread = sources, threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        shown = opened(func)
        if shown is not None:
            with self:
                return shown(*args, **kwargs)
        if kind_of(func) in ("softmax", "scaled_dot_product_attention") and torch.is_grad_enabled():
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            if args and args[0] is given[0] and not any(self._is_reached(each) for each in given):
                leaf = torch.zeros_like(given[0], requires_grad=True)
                self.leaves.append(leaf)
                args = (given[0] + leaf, *args[1:])
        return func(*args, **kwargs)

    def _is_reached(self, tensor: torch.Tensor) -> bool:
        if any(tensor is source for source in self._sources):
            return True
        return any(True for _ in sources_behind(tensor.grad_fn, self._sources))
