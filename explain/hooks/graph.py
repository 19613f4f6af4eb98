"""The autograd graph behind a tensor, as Nodes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.graph import Node

from explain.errors import HookError
from explain.hooks.preserve import recording


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


def accumulator(leaf: torch.Tensor) -> Node:
    """Return the Node that adds a leaf's gradient into ``leaf.grad``.

    Raises:
        HookError: the tensor is not a leaf that requires a gradient.

    >>> accumulator(torch.ones(2, requires_grad=True)).name()
    'torch::autograd::AccumulateGrad'
    """
    if not (leaf.is_leaf and leaf.requires_grad):
        raise HookError("leaf must be a leaf that requires a gradient, such as a parameter, for it to be accumulated")
    with recording(True):
        parent = leaf.expand_as(leaf).grad_fn
    assert parent is not None
    node: Node = parent.next_functions[0][0]  # type: ignore[assignment]
    return node
