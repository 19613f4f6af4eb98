"""Whether a finding is true: remove the evidence from its photos, and see how far the accuracy falls."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from explain.errors import RunError, shown
from explain.fills import FillLike, covering, get_fill
from explain.runs.insight.again import Photos
from explain.runs.insight.looking import plain
from explain.runs.reading import Row


@dataclass(frozen=True)
class Removal:
    """What removing the evidence did to some photos.

    ``before``, ``after`` and ``control`` are the shares of the photos whose class the model gave: as they are, without
    the ``share`` of the pixels where the map is highest, and without the same area half a photo further down and to the
    right, where what leaves one side comes in at the other. With this control, it counts what is covered, and not that
    something is. ``chance`` is the probability that ``after`` falls as far below ``control`` by chance.
    """

    photos: int
    share: float
    before: float
    after: float
    control: float
    chance: float

    def to_json(self) -> dict[str, Any]:
        return {name: plain(float(value)) for name, value in vars(self).items()}

    def __str__(self) -> str:
        return (
            f"{self.photos} photos: {self.before:.0%} as they are, {self.after:.0%} without the {self.share:.0%} of "
            f"the pixels with most evidence, {self.control:.0%} without as many elsewhere (p = {self.chance:.2g})"
        )


def removed(
    photos: Photos,
    method: str,
    wanted: Collection[tuple[str, str]],
    *,
    share: float = 0.1,
    fill: FillLike = "blur",
    as_predicted: bool = False,
) -> Removal:
    """Remove the evidence from some photos, and count how often the model still gives their class.

    Args:
        photos: the photos of a run, and the model.
        method: whose maps say where the evidence is.
        wanted: names of photos with the targets that were explained, as in ``zip(maps.names, maps.targets)``.
        share: of the pixels of each photo that are removed.
        fill: what takes their place.
        as_predicted: count how often the model gives the target that was explained, and not the label of the photo;
            it also does so where there is no label.

    Raises:
        RunError: the share is no share, or none of these photos can be read.
        FillError: there is no such fill.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
        raise RunError(f"share must lie between 0 and 1, got {shown(share)}; 0.1 is usual")
    keys = set(wanted)
    rows = [row for row in photos.run.rows(method) if (row.name, row.target) in keys]
    filling, counts, total = get_fill(fill), [0] * 5, 0
    for batch in photos.batches(rows):
        classes = torch.tensor([_class_of(row, as_predicted) for row in batch.rows], device=batch.x.device)
        evidence = torch.stack([_highest(row.heatmap, share) for row in batch.rows]).to(batch.x.device)[:, None]
        elsewhere = evidence.roll([side // 2 for side in evidence.shape[2:]], [2, 3])
        cover = covering(filling, batch.x)
        owners = torch.arange(len(batch.x), device=batch.x.device)
        with torch.inference_mode():
            asked = [batch.x, *(cover(owners, (~mask).to(batch.x)) for mask in (evidence, elsewhere))]
            right = [photos.explainer.model(x).argmax(1) == classes for x in asked]
        only = (right[2] & ~right[1], right[1] & ~right[2])
        for place, each in enumerate((*right, *only)):
            counts[place] += int(each.sum())
        total += len(batch.x)
    if not total:
        raise RunError("wanted must name photos of the run that can be read, got none; choose others")
    before, after, control = (count / total for count in counts[:3])
    return Removal(total, float(share), before, after, control, _sign_test(counts[3], counts[4]))


def _class_of(row: Row, as_predicted: bool) -> int:
    known = row.target_class if as_predicted or row.label_class is None else row.label_class
    return -1 if known is None else known


def _highest(heatmap: torch.Tensor, share: float) -> torch.Tensor:
    """The share of the pixels with the highest values ``(H, W)``; of equal ones, the first."""
    count = max(1, round(share * heatmap.numel()))
    found = torch.zeros(heatmap.numel(), dtype=torch.bool)
    found[heatmap.flatten().argsort(descending=True, stable=True)[:count]] = True
    return found.reshape(heatmap.shape)


def _sign_test(falls: int, rises: int) -> float:
    """How probable so many falls or more are among those that differ, if both were as likely (McNemar's test)."""
    many = falls + rises
    as_many: int = sum(math.comb(many, k) for k in range(falls, many + 1))
    return float(as_many / 2**many)
