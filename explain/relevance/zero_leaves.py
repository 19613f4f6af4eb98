"""Zero leaves at attention that the explained input does not reach, so that a backward pass can.

Words attend to each other before they meet a photo. A backward pass to the photo does not reach that
attention, and with frozen weights there is not even a graph. So zeros that require a gradient are added to the input
of such an attention: a pass that goes to them as well finds the gradient there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from explain.relevance.propagation import sources_behind
from explain.tracing.table import operation_name
from explain.tracing.tracer import Tracer


class ZeroLeaves(Tracer):
    """Adds zeros to what softmaxes and attentions are given that ``sources`` do not reach; ``leaves`` has them.

    >>> photo, words = torch.zeros(2, requires_grad=True), torch.zeros(2)
    >>> with ZeroLeaves([photo]) as recorder:
    ...     total = ((photo + words.softmax(0)) * photo.softmax(0)).sum()
    >>> [tuple(found.shape) for found in torch.autograd.grad(total, recorder.leaves)]
    [(2,)]
    """

    def __init__(self, sources: Sequence[torch.Tensor]) -> None:
        self.leaves: list[torch.Tensor] = []
        self._sources = sources

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if operation_name(func) in ("softmax", "scaled_dot_product_attention") and torch.is_grad_enabled():
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
