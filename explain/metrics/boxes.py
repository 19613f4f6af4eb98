"""MaxBoxAccV2: boxes around the parts of a map above a threshold, against the boxes of the objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from explain.errors import MetricError
from explain.metrics.base import Better, Case, Judged, check
from explain.metrics.curves import check_shares
from explain.metrics.maps import Sign


@dataclass(frozen=True)
class MaxBoxAccV2:
    r"""Whether boxes around the parts of the map meet the object's boxes, at three degrees of overlap.

    The map is brought to [0, 1]. For each threshold :math:`\tau`, every connected part of the pixels at or above it
    gets its tightest box, and the best overlap (IoU) with any of the object's boxes counts. The published figure is of
    a **data set**: for each degree :math:`\delta`, the share of the photos with an overlap from :math:`\delta` on, at
    the one threshold that is best for all, on average over the degrees. `of_data_set` computes it from the ``parts``
    "overlaps" ``(N, T)`` of any number of photos. The figure of a single photo is the same with that photo as the data
    set, which is an upper bound: each photo has its own best threshold. More is better.

    A map that says the same everywhere is one part at every threshold: the whole photo.

    Args:
        thresholds: T, from 0 in equal steps to below 1. (The authors' code has 1,000 of them.)
        overlaps: the degrees, in per cent.
        sign: as for `explain.metrics.PointingGame`.

    Choe et al., "Evaluation for Weakly Supervised Object Localization: Protocol, Metrics, and Datasets", TPAMI 2022.

    >>> MaxBoxAccV2().of_data_set(torch.tensor([[0.2, 0.6], [0.8, 0.4]]))  # at 30 % both, at 50 % and 70 % one
    0.6666666666666666
    """

    thresholds: int = 100
    overlaps: tuple[float, ...] = (30, 50, 70)
    sign: Sign = "own"

    name: ClassVar[str] = "maxboxaccv2"
    of_object: ClassVar[bool] = True
    about: ClassVar[str] = "whether boxes around the map's parts meet the object's boxes; see its docstring"
    paper: ClassVar[str] = "Choe et al., TPAMI 2022"
    units: ClassVar[str] = "share of degrees of overlap"
    better: ClassVar[Better] = "more"

    def __post_init__(self) -> None:
        check(self, thresholds=1)
        check_shares(self.name, "overlaps", self.overlaps)

    def __call__(self, case: Case) -> Judged:
        if case.boxes is None:
            raise MetricError("metric 'maxboxaccv2' needs the boxes of the object; give boxes= to evaluate")
        maps = case.maps.of_places(self.sign).double()
        least, most = (ends.reshape(-1, 1, 1) for ends in maps.flatten(1).aminmax(dim=1))
        levels = torch.where(most > least, (maps - least) / torch.where(most > least, most - least, 1), 1).cpu().numpy()
        found = [self._overlaps(level, boxes.double().numpy()) for level, boxes in zip(levels, case.boxes, strict=True)]
        overlaps = torch.from_numpy(np.stack(found)).to(case.maps.values)
        value = torch.stack([self._reached(row[None]).mean() for row in overlaps])
        return Judged(value.to(overlaps), overlaps, torch.from_numpy(self._at), {"overlaps": overlaps})

    def of_data_set(self, overlaps: torch.Tensor) -> float:
        """The published figure, from the best overlaps ``(N, T)`` of all photos of a data set."""
        return float(self._reached(overlaps).mean())

    def _reached(self, overlaps: torch.Tensor) -> torch.Tensor:
        """For each degree, the share of the photos that reach it, at the best threshold."""
        shares = [(overlaps >= degree / 100).double().mean(0).amax() for degree in self.overlaps]
        return torch.stack(shares)

    @property
    def _at(self) -> NDArray[np.float64]:
        return np.arange(self.thresholds) / self.thresholds

    def _overlaps(self, levels: NDArray[np.float64], boxes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The best overlap at each threshold."""
        import cv2

        found = np.zeros(self.thresholds)
        for i, threshold in enumerate(self._at):
            above = (levels >= threshold).astype(np.uint8)
            parts = cv2.connectedComponentsWithStats(above, connectivity=8)[2][1:].astype(np.float64)
            x0, y0, width, height = parts[:, 0], parts[:, 1], parts[:, 2], parts[:, 3]
            around = np.stack([x0, y0, x0 + width, y0 + height], 1)
            found[i] = overlap(around[:, None], boxes[None]).max()
        return found


def overlap(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """The intersection over union of boxes ``(..., 4)``, ends exclusive."""
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    common = np.prod(sides.clip(min=0), -1)
    areas = [np.prod(each[..., 2:] - each[..., :2], -1) for each in (one, other)]
    found: NDArray[np.float64] = common / (areas[0] + areas[1] - common)
    return found
