"""The autograd graph behind a tensor, as Nodes, and where gradients leave custom operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node

from explain._utils.errors import HookError
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


Answer = Callable[[torch.Tensor | None], torch.Tensor | None]


class Entrance:
    """One entrance: ``node`` is its Node in the graph, ``tensor`` what the operation is to be given.

    >>> x = torch.ones(2, requires_grad=True)
    >>> entrance = Entrance(x)
    >>> y = entrance.tensor.exp().sum()
    >>> entrance.give(lambda gradient: torch.zeros(2))
    >>> torch.autograd.grad(y, x, retain_graph=True)[0], torch.autograd.grad(y, x)[0]
    (tensor([0., 0.]), tensor([2.7183, 2.7183]))
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._told = _Told()
        self._tensor: torch.Tensor | None = _Entrance.apply(tensor, self._told)
        assert self._tensor is not None
        self.node = self._tensor.grad_fn

    @property
    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None
        return self._tensor

    def entered(self) -> None:
        """Let go of the alias: the operation has it."""
        self._tensor = None

    def give(self, answer: Answer | None) -> None:
        """Say what the next gradient is replaced by; None takes back what was said."""
        self._told.answer = answer


class _Told:
    """What an entrance has been told; apart from it, for the graph holds this, and the entrance holds the graph."""

    answer: Answer | None = None


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, told: _Told) -> torch.Tensor:
        ctx.told = told
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        answer, ctx.told.answer = ctx.told.answer, None
        return (gradient if answer is None else answer(gradient)), None
