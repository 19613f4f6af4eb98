"""Clusters of maps: photos of one class that are explained in the same way, and unlike the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from explain.insight.class_statistics import Mean, percent, plain, short
from explain.insight.maps import RunMaps
from explain.methods.clustering import means

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


LEAST = 20
"""Maps of a class without which no clusters are looked for."""
SMALLEST = 4  # photos of a cluster that is told
MOST = 8  # clusters of a class
AT_ONCE = 2000
"""Maps of a class that are clustered: of more, as many are drawn by chance."""
SHOWN = 9  # photos that stand for a cluster


@dataclass(frozen=True, eq=False)
class Cluster:
    """Photos of one class with the same reason.

    ``stands_out`` is the mean silhouette of its maps: near 1, they are alike and unlike all others of the class, and
    about 0, they differ from the others as much as from each other. ``share`` is its part of the maps of the class,
    ``mean`` ``(16, 16)`` their mean. ``gap`` is the largest factor between
    eigenvalues of the class that follow each other, whose place says how many clusters there are. ``photos`` names
    those that are most alike the rest of the cluster, and ``rows`` has the numbers of all its maps.
    """

    target: str
    size: int
    share: float
    stands_out: float
    gap: float
    of: int
    accuracy: float
    on_object: Mean
    at_border: Mean
    entropy: Mean
    photos: tuple[str, ...]
    mean: torch.Tensor = field(repr=False)
    rows: torch.Tensor = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target, "size": self.size, "share": plain(self.share),
            "stands_out": plain(self.stands_out), "gap": plain(self.gap), "clusters_of_target": self.of,
            "accuracy": plain(self.accuracy), "on_object": self.on_object.to_dict(),
            "at_border": self.at_border.to_dict(), "entropy": self.entropy.to_dict(), "photos": list(self.photos),
            "map": [[round(v, 6) for v in row] for row in self.mean.tolist()],
        }  # fmt: skip


def reasons(maps: RunMaps, *, least: int = LEAST, most: int = MOST, seed: int = 0) -> list[Cluster]:
    """Cluster the maps of each class, and rank all clusters by how much they stand out.

    Args:
        maps: the maps of a run.
        least: how many maps a class must have.
        most: how many clusters a class may have.
        seed: of what is drawn by chance.

    Lapuschkin et al., "Unmasking Clever Hans predictors and assessing what machines really learn", Nature
    Communications 2019 (SpRAy).
    """
    found = []
    for rows in maps.of_target.values():
        if len(rows) >= least:
            found += clusters_of(maps, rows, most=most, seed=seed)
    return sorted(found, key=lambda cluster: (-cluster.stands_out, -cluster.size, cluster.target))


def clusters_of(maps: RunMaps, rows: torch.Tensor, *, most: int = MOST, seed: int = 0) -> list[Cluster]:
    """Cluster the maps with these numbers; those of one class that has a single cluster are none."""
    if len(rows) > AT_ONCE:
        drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:AT_ONCE]
        rows = rows[drawn.sort().values]
    apart = distances(maps.values[rows])
    seen = spectrum(apart, min(most, len(rows) - 1))
    groups = seen.groups(seen.count, seed)
    fits = silhouettes(apart, groups)
    numbers = sorted(set(groups.tolist()))
    if len(numbers) < 2:
        return []
    found = []
    for number in numbers:
        inside = (groups == number).nonzero().flatten()
        if len(inside) < SMALLEST:
            continue
        own = maps[rows[inside]]
        central = apart[inside][:, inside].mean(1).argsort()[:SHOWN]
        found.append(Cluster(
            target=own.targets[0],
            size=len(inside),
            share=len(inside) / len(rows),
            stands_out=float(fits[inside].mean()),
            gap=seen.gap,
            of=len(numbers),
            accuracy=Mean.of(own.correct).value,
            on_object=Mean.of(own.on_object),
            at_border=Mean.of(own.at_border),
            entropy=Mean.of(own.entropy),
            photos=tuple(own.names[i] for i in central.tolist()),
            mean=own.values.mean(0),
            rows=rows[inside],
        ))  # fmt: skip
    return found


def table_rows(found: Sequence[Cluster], most: int = 10) -> list[list[str]]:
    """The rows of a table for people: the heading first."""
    head = ["class", "photos", "of class", "stands out", "right", "on object", "at border", "as in"]
    rows = [
        [
            cluster.target, str(cluster.size), percent(cluster.share), f"{cluster.stands_out:.2f}",
            percent(cluster.accuracy), percent(cluster.on_object.value), percent(cluster.at_border.value),
            ", ".join(map(short, cluster.photos[:2])),
        ]
        for cluster in list(found)[:most]
    ]  # fmt: skip
    return [head, *rows]
