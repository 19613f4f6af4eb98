"""Clusters of reasons: photos of one class that are explained in the same way, and unlike the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from explain.runs.insight.gathering import Maps
from explain.runs.insight.looking import Mean, percent, plain, short
from explain.runs.insight.spectral import distances, silhouettes, spectrum

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

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target, "size": self.size, "share": plain(self.share),
            "stands_out": plain(self.stands_out), "gap": plain(self.gap), "clusters_of_target": self.of,
            "accuracy": plain(self.accuracy), "on_object": self.on_object.to_json(),
            "at_border": self.at_border.to_json(), "entropy": self.entropy.to_json(), "photos": list(self.photos),
            "map": [[round(v, 6) for v in row] for row in self.mean.tolist()],
        }  # fmt: skip


def reasons(maps: Maps, *, least: int = LEAST, most: int = MOST, seed: int = 0) -> list[Cluster]:
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


def clusters_of(maps: Maps, rows: torch.Tensor, *, most: int = MOST, seed: int = 0) -> list[Cluster]:
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


def told(found: Sequence[Cluster], most: int = 10) -> list[list[str]]:
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
