"""The history of a tensor in autograd, given to tensors that exist already.

Other code may hold a tensor as well: in a list, as an attribute, as a second output. It sees a new history only if the
object itself has it, so the object is not replaced here where that can be avoided.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


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
