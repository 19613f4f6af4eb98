"""The autograd graph of a tensor: its Nodes, entrances where gradients are replaced, histories given to tensors.

Other code may hold a tensor as well: in a list, as an attribute, as a second output. It sees a new history only if the
object itself has it, so the object is not replaced here where that can be avoided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import Node

from explain._utils.errors import HookError
from explain.hooks.preserve import recording


def graph(output: torch.Tensor) -> Iterator[Node]:
    """Yield every autograd Node of the graph of ``output`` once, nearest first.

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
        self._replacement = _Replacement()
        self._tensor: torch.Tensor | None = _Entrance.apply(tensor, self._replacement)
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
        """Replace the next gradient by ``answer`` of it; None lets it pass."""
        self._replacement.answer = answer


class _Replacement:
    """What replaces the next gradient; apart from the entrance, for the graph holds this and the entrance the graph."""

    answer: Answer | None = None


class _Entrance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, replacement: _Replacement) -> torch.Tensor:
        ctx.replacement = replacement
        ctx.set_materialize_grads(False)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        answer, ctx.replacement.answer = ctx.replacement.answer, None
        return (gradient if answer is None else answer(gradient)), None


class _Alias(torch.autograd.Function):
    """The same memory and version counter; autograd does not treat it as a view, so it may be overwritten."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _Marked(torch.autograd.Function):
    """A place in the history of a tensor: the gradient that arrives there passes on, and to ``mark`` as well."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient


class Overwritten(torch.autograd.Function):
    """Gives a tensor the history of the alias through which it was overwritten."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, alias: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return None, gradient


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return another name for a tensor's memory, which is in the graph even if the tensor is not."""
    made: torch.Tensor = _Alias.apply(tensor, torch.empty(0, requires_grad=True))
    return made


def is_alias(tensor: torch.Tensor) -> bool:
    """Whether a tensor is what `alias` returned, unaltered."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() == "_AliasBackward"


def copy_with_history(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the same memory layout that is in the graph; if the tensor is not, a leaf begins the graph."""
    start = tensor if tensor.requires_grad else tensor.detach().requires_grad_()
    return torch.empty_like(start).copy_(start)


def mark(tensor: torch.Tensor) -> torch.Tensor | None:
    """Mark the present place in a tensor's history; return a leaf that will have the gradient of all later uses.

    It is None where autograd does not allow that: nothing may overwrite such a tensor either, or (of a view that was
    made while gradients were off) nothing with gradients on.
    """
    leaf = tensor.detach().requires_grad_()
    return leaf if _in_place(_Marked, tensor, leaf) else None


def go_on_from(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Let a tensor's history go on from the alias through which it was overwritten; say whether autograd allows it."""
    return _in_place(Overwritten, tensor, other)


def _in_place(function: type[torch.autograd.Function], tensor: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        # Its values stay as they are, so nothing is lost for code that has saved it.
        with torch.enable_grad(), _unsafe_preserve_version_counter(tensor):
            function.apply(tensor, other)
    except RuntimeError:
        return False
    return True
