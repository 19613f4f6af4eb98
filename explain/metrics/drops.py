"""What the probability does when the photo is seen through its own heatmap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from explain.fills import Fill, Zero
from explain.metrics.base import Better, Case, Judged, Reading, check
from explain.metrics.curves import by_original
from explain.metrics.rows import Ask, Soft


@dataclass(frozen=True)
class AverageDrop:
    r"""What share of the probability is lost when the photo is seen through its heatmap.

    :math:`\max(0, y - o) / y`, where o is what is read of the photo behind its heatmap, which is divided by its largest
    value. Less is better. Not defined where y is next to nothing. A map without a positive value covers everything.

    Args:
        fill: what is seen where the heatmap is 0; the paper multiplies the photo by the map.
        reading: "probability" of the class (default) or the target's own "score".

    Chattopadhay et al., "Grad-CAM++", WACV 2018.

    >>> AverageDrop().better
    'less'
    """

    fill: Fill = field(default_factory=Zero)
    reading: Reading = "probability"

    name: ClassVar[str] = "averagedrop"
    about: ClassVar[str] = "share of the probability that is lost when the photo is seen through its heatmap"
    paper: ClassVar[str] = "Chattopadhay et al., WACV 2018"
    units: ClassVar[str] = "share of the probability"
    better: ClassVar[Better] = "less"

    def __post_init__(self) -> None:
        check(self)

    def asks(self, case: Case) -> Sequence[Ask]:
        return [Ask(Soft(case.maps.heatmap, self.fill), self.reading)]

    def __call__(self, case: Case, scores: Sequence[torch.Tensor]) -> Judged:
        original, seen = case.original(self.reading), scores[0][:, 0]
        drop = (original - seen).clamp(min=0) / torch.where(original == 0, 1, original)
        return Judged(by_original(self.name, case, self.reading, drop, original, seen), parts={"seen": seen})


@dataclass(frozen=True)
class IncreaseInConfidence:
    """Whether the probability rises when the photo is seen through its heatmap: 1 or 0. More is better.

    A map without a positive value covers everything.

    Args:
        fill, reading: as for `AverageDrop`.

    Chattopadhay et al., "Grad-CAM++", WACV 2018.

    >>> IncreaseInConfidence().better
    'more'
    """

    fill: Fill = field(default_factory=Zero)
    reading: Reading = "probability"

    name: ClassVar[str] = "increase"
    about: ClassVar[str] = "whether the probability rises when the photo is seen through its heatmap"
    paper: ClassVar[str] = "Chattopadhay et al., WACV 2018"
    units: ClassVar[str] = "0 or 1"
    better: ClassVar[Better] = "more"

    def __post_init__(self) -> None:
        check(self)

    def asks(self, case: Case) -> Sequence[Ask]:
        return [Ask(Soft(case.maps.heatmap, self.fill), self.reading)]

    def __call__(self, case: Case, scores: Sequence[torch.Tensor]) -> Judged:
        original, seen = case.original(self.reading), scores[0][:, 0]
        return Judged((seen > original).to(seen), parts={"seen": seen})
