"""Entrances: where a gradient leaves an operation that something else than autograd differentiates.

An entrance hands an operation an alias of its input. In a backward pass it hands on the gradient that it is given;
or, once, what it has been told to give instead. Whoever tells it stops the gradient at the operation's output, so that
autograd does nothing in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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
