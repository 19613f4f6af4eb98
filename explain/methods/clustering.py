"""Rows of numbers that are alike, put together: by complete linkage, and around means."""

from __future__ import annotations

import torch

ROUNDS = 100  # after which means need not stand still


def complete_linkage(distances: torch.Tensor, most: float) -> torch.Tensor:
    """Put together what lies apart by less than ``most``: the number of each row's cluster ``(n,)``.

    Two clusters lie apart by the largest of the ``distances`` ``(n, n)`` between their members. Clusters are numbered
    by their first members. Each merger joins two clusters of which each is the other's nearest. These do not come in
    the order of their distances, which does not matter, since no merger brings clusters closer together.

    >>> places = torch.tensor([0.0, 1.0, 5.0, 5.5, 9.0])
    >>> complete_linkage((places[:, None] - places).abs(), 2.0).tolist()
    [0, 0, 1, 1, 2]
    """
    apart = distances.double().cpu().clone()
    count = len(apart)
    apart.fill_diagonal_(float("inf"))
    labels, chain, alive = torch.arange(count), list[int](), torch.ones(count, dtype=torch.bool)
    while int(alive.sum()) > 1:
        if not chain:
            chain = [int(alive.nonzero()[0])]
        here = chain[-1]
        nearest = int(apart[here].argmin())
        if len(chain) > 1 and apart[here, chain[-2]] <= apart[here, nearest]:
            nearest = chain[-2]
        else:
            chain.append(nearest)
            continue
        chain = chain[:-2]
        if apart[here, nearest] < most:
            labels[labels == here] = nearest
        elif not bool((apart[alive][:, alive] < most).any()):
            break
        joined = torch.maximum(apart[here], apart[nearest])
        joined[nearest] = float("inf")
        apart[nearest], apart[:, nearest] = joined, joined
        apart[here], apart[:, here], alive[here] = float("inf"), float("inf"), False
    return _numbered(labels)


def _numbered(labels: torch.Tensor) -> torch.Tensor:
    """Labels as whole numbers from 0, in the order in which they come first."""
    numbers: dict[int, int] = {}
    return torch.tensor([numbers.setdefault(label, len(numbers)) for label in labels.tolist()])


def means(points: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """The centres ``(k, D)`` of clusters of points ``(n, D)``: each point belongs to the nearest, and they are means.

    They begin at points that the seed draws (Lloyd's algorithm), and stop when no point changes its cluster. There are
    no more of them than different points.

    >>> means(torch.tensor([[0.0], [1.0], [8.0], [9.0]]), 2, seed=0).sort(0).values.flatten().tolist()
    [0.5, 8.5]
    """
    distinct: torch.Tensor = torch.unique(points, dim=0)
    if len(distinct) <= count:
        return distinct
    order = torch.randperm(len(distinct), generator=torch.Generator("cpu").manual_seed(seed % 2**63), device="cpu")
    centres: torch.Tensor = distinct[order[:count].to(points.device)]
    belongs = torch.full((len(points),), -1, device=points.device)
    for _ in range(ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        if torch.equal(nearest, belongs):
            break
        belongs = nearest
        sums = torch.zeros_like(centres).index_add_(0, belongs, points)
        sizes = torch.bincount(belongs, minlength=count)[:, None]
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)  # one that has lost its points stays
    return centres
