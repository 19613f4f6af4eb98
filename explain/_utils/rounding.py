"""Numbers that are none, and means of which nothing but rounding errors is left."""

import math

import torch
from torch import Tensor

Dims = int | tuple[int, ...]
_ROUNDING = 8
"""Gradients before an instance normalisation, of which the mean over n places is zero, had means of
up to 6 rounding errors of their mean magnitude times the root of n."""


def finite_or_none(number: float | None) -> float | None:
    """Return a number as JSON can hold it: None for NaN, infinity and None."""
    return number if number is not None and math.isfinite(number) else None


def rounding_error(terms: Tensor, dim: Dims) -> Tensor:
    """Return how large the mean of terms along ``dim``, which is removed, may be by rounding alone
    where the terms cancel; also for the mean of a part of these terms."""
    norm: Tensor = torch.linalg.vector_norm(terms, dim=dim)
    return norm.mul(_ROUNDING * torch.finfo(terms.dtype).eps)


def likeness(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine between the values ``(N, ...)`` of each image in two maps ``(N,)``, however
    small they are; 1 where one has none."""
    rows = [values.detach().flatten(1) for values in (one, other)]
    rows = [values / values.abs().amax(1, keepdim=True) for values in rows]
    return torch.cosine_similarity(rows[0], rows[1]).nan_to_num(1)


def all_cancel(means: Tensor, terms: Tensor) -> Tensor:
    """For each of N images, whether all of its means ``(N, ...)`` of ``terms`` ``(N, ...)`` may be
    rounding errors. All terms of an image count, as some may be such errors themselves."""
    error = rounding_error(terms, tuple(range(1, terms.ndim)))
    largest: Tensor = torch.linalg.vector_norm(means.flatten(1), math.inf, dim=1)
    return largest <= error
