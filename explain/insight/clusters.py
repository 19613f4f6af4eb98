"""Clusters of the maps of each class: photos with a reason of their own (SpRAy)."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from explain._utils.random_numbers import permutation
from explain.insight.class_statistics import MapStatistics
from explain.insight.maps import Names, RunMaps
from explain.methods.score_cam import means

FLOOR = 1e-3  # is added to eigenvalues, so that much smaller ones all count as zero
STARTS = 10  # random starts of k-means, of which the best result is taken


def distances(maps: torch.Tensor) -> torch.Tensor:
    """Return the Hellinger distances ``(N, N)`` of maps of shares ``(N, ...)``: 0 for equal maps, 1
    for maps without a common position."""
    roots = maps.flatten(1).double().sqrt()
    # sqrt(1 - sum_i sqrt(p_i q_i))
    apart: torch.Tensor = (1 - roots @ roots.T).clamp(0, 1).sqrt()
    apart.fill_diagonal_(0)
    return apart


def spectrum(apart: torch.Tensor, most: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest eigenvalues ``(E,)`` (0 to 2) and eigenvectors ``(N, E)`` of the
    normalised Laplacian of points at distances ``apart`` ``(N, N)``, for up to ``most`` groups."""
    count = len(apart)
    # log N neighbours keep a graph together (von Luxburg, 2007)
    neighbours = min(count - 1, max(5, round(2 * math.log(count))))
    nearest = apart.clone().fill_diagonal_(math.inf).topk(neighbours, largest=False)
    scale = nearest.values[:, -1].clamp(min=1e-12)
    # exp(-d^2 / s_i s_j), s_i the distance to the last neighbour (Zelnik-Manor and Perona, NIPS
    # 2004)
    similarity = torch.exp(-nearest.values.square() / (scale[:, None] * scale[nearest.indices]))
    weights = torch.zeros_like(apart).scatter_(1, nearest.indices, similarity)
    # half if only one of the two chooses the other
    weights = (weights + weights.T) / 2
    inverse_root_degree = weights.sum(1).clamp(min=1e-12).rsqrt()
    laplacian = (
        torch.eye(count, dtype=apart.dtype)
        - inverse_root_degree[:, None] * weights * inverse_root_degree
    )
    values, vectors = torch.linalg.eigh(laplacian)
    # one more than groups, as the gap behind the last one counts too
    return values[: most + 1].clamp(min=0), vectors[:, : most + 1]


def number_of_groups(values: torch.Tensor) -> tuple[int, float]:
    """The number of groups, from 2 (1 for two eigenvalues), and the gap: the largest factor between
    successive eigenvalues; differences grow with eigenvalues even without groups.
    """
    gaps = (values[1:] + FLOOR) / (values[:-1] + FLOOR)
    # n groups have n eigenvalues near zero, so that the gap at n - 1 is the largest; the one at 0,
    # of a single group, is left out where there are others
    count = int(gaps[1:].argmax()) + 2 if len(gaps) > 1 else 1
    return count, float(gaps[count - 1])


def cluster_numbers(vectors: torch.Tensor, count: int, seed: int = 0) -> torch.Tensor:
    """The group of each point ``(N,)`` by k-means in the first ``count`` eigenvectors ``(N, E)`` of
    `spectrum`, points scaled to length 1 (Ng, Jordan and Weiss, NIPS 2001).
    """
    best = torch.zeros(len(vectors), dtype=torch.long)
    if count < 2:
        return best
    least_error = math.inf
    places = vectors[:, :count] / vectors[:, :count].norm(dim=1, keepdim=True).clamp(min=1e-12)
    for start in range(STARTS):
        to_centres = torch.cdist(places, means(places, count, seed + start))
        error = float(to_centres.amin(1).square().sum())
        if error < least_error:
            best = to_centres.argmin(1)
            least_error = error
    return best


def silhouettes(apart: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """How well N points at distances ``apart`` ``(N, N)`` fit two or more ``groups`` ``(N,)``
    (Rousseeuw, 1987): 1 far from others, below 0 nearer another group, 0 for a point alone.
    """
    is_member = groups[:, None] == torch.unique(groups)  # one true value for each point
    sizes = is_member.sum(0)
    own_size = sizes.expand_as(is_member)[is_member]
    sums = apart @ is_member.to(apart)
    to_own = sums[is_member] / (own_size - 1).clamp(min=1)  # without the point itself
    to_other = (sums / sizes).masked_fill(is_member, math.inf).amin(1)
    fits = (to_other - to_own) / torch.maximum(to_own, to_other).clamp(min=1e-12)
    return torch.where(own_size < 2, 0.0, fits)


LEAST_MAPS = 20
"""Maps of a class without which no clusters are looked for."""
SMALLEST = 4  # photos of a cluster that is listed
MOST = 8  # clusters of a class
AT_ONCE = 2000
"""Maps of a class that are clustered: of more, as many are drawn by chance."""
CENTRAL = 9  # photos that stand for a cluster
MAX_LIKENESS = 0.9
"""The cosine of two mean maps from which on they show the same places."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Cluster(MapStatistics):
    """Photos of one class with the same reason: a cluster of the class's maps."""

    size: int
    # its part of the maps of the class
    share: float
    # the mean silhouette: near 1, its maps are alike and unlike all others of the class; near 0,
    # they differ from the others as much as from each other
    stands_out: float
    # the largest factor between neighbouring eigenvalues of the class; its place says how many
    # clusters there are
    gap: float
    clusters_of_target: int
    # those that are most like the rest of the cluster
    photos: Names
    # the numbers of its maps
    rows: torch.Tensor = field(repr=False)
    # ``(16, 16)``, the mean map less that of the others of the class
    excess: torch.Tensor = field(repr=False)


def map_clusters(maps: RunMaps, *, seed: int = 0) -> list[Cluster]:
    """Cluster the maps of each class, and rank all clusters by how much they stand out (SpRAy;
    Lapuschkin et al., "Unmasking Clever Hans predictors", Nature Communications 2019).
    """
    clusters = []
    for rows in maps.of_finding.values():
        if len(rows) >= LEAST_MAPS:
            clusters += clusters_of(maps, rows, seed)
    return sorted(clusters, key=lambda cluster: (-cluster.stands_out, -cluster.size, cluster.title))


def clusters_of(maps: RunMaps, rows: torch.Tensor, seed: int = 0) -> list[Cluster]:
    """The clusters of a class's maps numbered ``rows``; none if they form a single group. One whose
    mean map shows the same places as the others' has no reason of its own, and is left out.
    """
    if len(rows) > AT_ONCE:
        rows = rows[permutation(len(rows), seed)[:AT_ONCE].sort().values]
    apart = distances(maps.values[rows])
    values, vectors = spectrum(apart, min(MOST, len(rows) - 1))
    count, gap = number_of_groups(values)
    groups = cluster_numbers(vectors, count, seed)
    numbers = sorted(set(groups.tolist()))
    if len(numbers) < 2:
        return []
    fits = silhouettes(apart, groups)
    clusters: list[Cluster] = []
    for number in numbers:
        within = (groups == number).nonzero().flatten()
        if len(within) < SMALLEST:
            continue
        members = maps[rows[within]]
        mean = members.values.mean(0)
        mean_of_others = maps.values[rows[groups != number]].mean(0)
        if F.cosine_similarity(mean.flatten(), mean_of_others.flatten(), dim=0) >= MAX_LIKENESS:
            continue
        central = apart[within][:, within].mean(1).argsort()[:CENTRAL]
        clusters.append(
            Cluster.of(
                members,
                size=len(within),
                share=len(within) / len(rows),
                stands_out=float(fits[within].mean()),
                gap=gap,
                clusters_of_target=len(numbers),
                photos=Names(members.names[i] for i in central.tolist()),
                rows=rows[within],
                excess=mean - mean_of_others,
            )
        )
    return clusters
