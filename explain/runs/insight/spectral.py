"""Spectral clustering of some hundred maps: neighbours, embedding, eigengap, groups."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from explain.methods.clusters import means

FLOOR = 1e-3  # below it, eigenvalues count as the same: as zero
STARTS = 10  # of the means, of which the best end is taken


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Points as a graph of nearest neighbours sees them.

    ``values`` ``(E,)`` are the smallest eigenvalues of the normalised Laplacian, which lie between 0 and 2, and
    ``vectors`` ``(N, E)`` the eigenvectors.
    """

    values: torch.Tensor
    vectors: torch.Tensor

    @property
    def gaps(self) -> torch.Tensor:
        """By which factor each eigenvalue is larger than the one before, ``(E - 1,)``.

        A large one behind the k-th says that there are k groups. Differences would say less: eigenvalues lie the
        further apart, the larger they are, also where there are no groups.
        """
        raised = self.values + FLOOR
        return raised[1:] / raised[:-1]

    @property
    def count(self) -> int:
        """How many groups there are, from 2: the number of eigenvalues before the largest gap."""
        return int(self.gaps[1:].argmax()) + 2 if len(self.gaps) > 1 else 1

    @property
    def gap(self) -> float:
        """The largest gap."""
        return float(self.gaps[self.count - 1])

    def groups(self, count: int, seed: int = 0) -> torch.Tensor:
        """Put the points into groups by their places among the first eigenvectors: a number for each, ``(N,)``.

        Each point is brought to length 1 there (Ng, Jordan and Weiss, NIPS 2001).
        """
        if count < 2:
            return torch.zeros(len(self.vectors), dtype=torch.long)
        places = self.vectors[:, :count]
        places = places / places.norm(dim=1, keepdim=True).clamp(min=1e-12)
        best, least = torch.zeros(len(places), dtype=torch.long), math.inf
        for start in range(STARTS):
            apart = torch.cdist(places, means(places, count, seed + start))
            total = float(apart.amin(1).square().sum())
            if total < least:
                best, least = apart.argmin(1), total
        return best


def distances(maps: torch.Tensor) -> torch.Tensor:
    r"""How far maps of shares ``(N, ...)`` lie apart, ``(N, N)``: 0 if they are the same, 1 without a common place.

    The Hellinger distance :math:`\sqrt{1 - \sum_i \sqrt{p_i q_i}}`.

    >>> distances(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))[0]
    tensor([0., 1., 0.], dtype=torch.float64)
    """
    roots = maps.flatten(1).double().sqrt()
    apart: torch.Tensor = (1 - roots @ roots.T).clamp(0, 1).sqrt()
    apart.fill_diagonal_(0)
    return apart


def spectrum(apart: torch.Tensor, most: int = 8) -> Spectrum:
    r"""Look at points as a graph in which each is joined to its nearest neighbours.

    Twice as many neighbours as the logarithm of the number of points, at least 5: the logarithm keeps a graph together
    (von Luxburg, 2007), and with no more than that, groups of some tens of points fall apart by chance. An edge that
    only one end asks for counts half. Neighbours weigh :math:`\exp(-d^2 / \sigma_i \sigma_j)`, where
    :math:`\sigma_i` is the distance to the last neighbour (Zelnik-Manor and Perona, NIPS 2004).

    Args:
        apart: their distances ``(N, N)``.
        most: how many groups there may be.
    """
    count = len(apart)
    near = min(count - 1, max(5, round(2 * math.log(count))))
    order = apart.clone().fill_diagonal_(math.inf).topk(near, largest=False)
    scale = order.values[:, -1].clamp(min=1e-12)
    weights = torch.zeros_like(apart)
    close = torch.exp(-order.values.square() / (scale[:, None] * scale[order.indices]))
    weights.scatter_(1, order.indices, close)
    weights = (weights + weights.T) / 2
    degree = weights.sum(1).clamp(min=1e-12).rsqrt()
    laplacian = torch.eye(count, dtype=apart.dtype) - degree[:, None] * weights * degree
    found = torch.linalg.eigh(laplacian)
    kept = min(count, most + 1)
    return Spectrum(found.eigenvalues[:kept].clamp(min=0), found.eigenvectors[:, :kept])


def silhouettes(apart: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """How well each point fits its group, ``(N,)``: 1 if the others are far away, below 0 if another group is nearer.

    The mean distance to the nearest other group less that to its own, over the larger (Rousseeuw, 1987); 0 for a
    point that is alone.
    """
    numbers: torch.Tensor = torch.unique(groups)
    if len(numbers) < 2:
        return torch.zeros(len(apart), dtype=apart.dtype)
    member = (groups[:, None] == numbers).to(apart)
    sizes = member.sum(0)
    sums = apart @ member
    own = member.bool()
    to_own = sums[own] / (sizes - 1).clamp(min=1).expand_as(sums)[own]
    to_other = (sums / sizes).masked_fill(own, math.inf).amin(1)
    alone = sizes.expand_as(sums)[own] < 2
    larger = torch.maximum(to_own, to_other).clamp(min=1e-12)
    return torch.where(alone, 0.0, (to_other - to_own) / larger)
