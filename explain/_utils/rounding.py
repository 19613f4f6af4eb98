"""Sums of which nothing but rounding errors is left."""

import torch
from torch import Tensor

Dims = int | tuple[int, ...]
_ROUNDING = 16
"""By how many rounding errors, as large as n random ones add up to, a sum of n terms may be off. Gradients before an
instance normalisation, which add up to zero, were off by up to 6."""


def rounding_error(terms: Tensor, dim: Dims) -> Tensor:
    """How far the sum over some dimensions may be off."""
    sizes: Tensor = torch.linalg.vector_norm(terms, 1, dim)
    count = terms.numel() / max(1, sizes.numel())
    error: Tensor = _ROUNDING * torch.finfo(terms.dtype).eps * count**0.5 * sizes
    return error


def all_cancel(terms: Tensor, dim: Dims) -> Tensor:
    """Whether nothing but rounding errors is left of all sums of an image over some dimensions: ``(N,)``.

    In some channels, the terms themselves may be rounding errors; so sums are compared with the largest error of any.

    >>> all_cancel(torch.tensor([[[0.1, 0.2, -0.3], [1e-9, 0, 0]], [[0.1, 0.2, -0.3], [0.1, 0, 0]]]), dim=2)
    tensor([ True, False])
    """
    sums = terms.sum(dim).flatten(1)
    error = rounding_error(terms, dim).flatten(1).amax(1, keepdim=True)
    return (sums.abs() <= error).all(1)
