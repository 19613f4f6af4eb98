"""The autograd graph behind a tensor, as Nodes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.graph import Node


def graph(output: torch.Tensor) -> Iterator[Node]:
    """Yield every autograd Node behind ``output`` once, nearest first.

    >>> x = torch.ones(2, requires_grad=True)
    >>> [node.name() for node in graph(x.relu().sum())]
    ['SumBackward0', 'ReluBackward0', 'torch::autograd::AccumulateGrad']
    """
    if output.grad_fn is None:
        return
    seen = {output.grad_fn}
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        yield node
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
