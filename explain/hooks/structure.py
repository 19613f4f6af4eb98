"""What modules take and return: tensors, alone or in containers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from explain.errors import HookError


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor of a module's output: the output itself, or the first in a tuple, list or dict."""
    if isinstance(output, torch.Tensor):
        return output
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return next((value for value in values if isinstance(value, torch.Tensor)), None)


def replace_first(output: Any, new: torch.Tensor) -> Any:
    """Return ``output`` with its first tensor replaced by ``new``; containers are copied, never edited.

    >>> replace_first((torch.zeros(1), "state"), torch.ones(1))
    (tensor([1.]), 'state')
    """
    if isinstance(output, torch.Tensor):
        return new
    if isinstance(output, dict):
        key = next(key for key, value in output.items() if isinstance(value, torch.Tensor))
        copy = output.copy()
        copy[key] = new
        return copy
    if not isinstance(output, (tuple, list)):
        raise HookError(f"a module's output must be a tensor or hold one, got {type(output).__name__}")
    position = next(i for i, value in enumerate(output) if isinstance(value, torch.Tensor))
    items = [new if i == position else value for i, value in enumerate(output)]
    return rebuilt(output, items)


def rebuilt(like: Any, values: Iterable[Any]) -> Any:
    """Return ``values`` in a tuple, list or named tuple of the kind of ``like``."""
    return type(like)(*values) if hasattr(like, "_fields") else type(like)(values)


def as_sources(inputs: Iterable[Any]) -> list[Any]:
    """Return inputs with each floating-point tensor replaced by a leaf that requires a gradient."""
    return [x.detach().clone().requires_grad_() if _differentiable(x) else x for x in inputs]


def _differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()
