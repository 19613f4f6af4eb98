"""Gradients whose rows are mostly left out, as those of embeddings with ``sparse=True``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from explain.errors import HookError


def merged(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient in which each element occurs once: rows of a sparse one may come in several parts.

    Raises:
        HookError: its layout is neither dense nor sparse in coordinates.
    """
    if gradient.layout == torch.sparse_coo:
        return gradient.coalesce()
    if gradient.layout != torch.strided:
        raise HookError(
            f"the gradient of {name!r} must be dense or sparse_coo, got {str(gradient.layout).removeprefix('torch.')}; "
            "leave this parameter frozen, or convert the gradient in a hook of your own"
        )
    return gradient


def values_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements that a `merged` gradient holds; those that a sparse one leaves out are zero."""
    return gradient.values() if gradient.is_sparse else gradient


def with_values(gradient: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a `merged` gradient of the same layout whose elements have been changed."""
    if not gradient.is_sparse:
        return change(gradient)
    return torch.sparse_coo_tensor(
        gradient.indices(), change(gradient.values()), gradient.shape, check_invariants=False, is_coalesced=True
    )
