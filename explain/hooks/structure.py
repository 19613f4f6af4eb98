"""What hooks read and change of what modules take and give; see `explain.nested` for how containers are walked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from explain import nested
from explain.errors import HookError

rebuilt = nested.with_items


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return the first tensor of a module's output: the output itself, or the first in its containers."""
    found = nested.find(output)
    return None if found is None else found[1]


def replace_first(output: Any, new: torch.Tensor) -> Any:
    """Return ``output`` with its first tensor replaced by ``new``, wherever it is; containers are copied, never edited.

    >>> replace_first((torch.zeros(1), "state"), torch.ones(1))
    (tensor([1.]), 'state')
    """
    old = first_tensor(output)
    if old is None:
        raise HookError(f"a module's output must be a tensor or hold one, got {type(output).__name__}")
    return nested.replace(output, lambda path, tensor: new if tensor is old else tensor)


def as_sources(inputs: Iterable[Any]) -> list[Any]:
    """Return inputs with each floating-point tensor replaced by a leaf that requires a gradient."""
    return [x.detach().clone().requires_grad_() if _differentiable(x) else x for x in inputs]


def _differentiable(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()
