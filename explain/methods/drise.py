"""D-RISE: random masks, and how much what is detected through them is like the box that is explained."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.engine import Attributions, Evidence
from explain.engine.needs import DetectionSimilarity
from explain.methods.bibliography import cited
from explain.methods.occlusion import FromSmoothGrids
from explain.methods.registry import register


@dataclass(frozen=True)
class LikenessOf:
    """How much the best detection in each row is like the one that is explained."""

    needs = frozenset({DetectionSimilarity()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence[DetectionSimilarity()]


@register
@dataclass(frozen=True)
class DRISE(FromSmoothGrids):
    r"""RISE for a detected box: each mask is weighted by how much the best detection through it is like that box.

    Likeness is the overlap of the boxes (intersection over union) times the score of the detection, if it has the same
    label: detectors hand out a label for each box, of which the cosine between class distributions is 1 or 0. The
    largest one over all detections counts. The target has to be an `explain.targets.Detection`.

    Masks are those of `RISE`, as in the paper (the authors' program enlarges grids without interpolation).

    Args:
        samples: the number of masks; the paper takes 5,000.
        grid: cells along a side.
        probability: that a cell is kept.
        centred: subtract the mean likeness over the masks.
        baseline: what is seen where the photo is not.
        seed: of the masks; every image gets the same.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at most ``tolerance``,
            or after so many seconds.

    Returns:
        ``(N, H, W)``, with the error of each value.

    Petsiuk et al., "Black-box Explanation of Object Detectors via Saliency Maps", CVPR 2021 (arXiv:2006.03204).

    >>> import explain
    >>> class Detector(torch.nn.Module):
    ...     def forward(self, x):
    ...         box, label = torch.tensor([[1.0, 1, 4, 4]]), torch.tensor([1])
    ...         return [{"boxes": box, "labels": label, "scores": each[:, 1:4, 1:4].mean()[None]} for each in x]
    >>> target = explain.targets.Detection()
    >>> a = explain.attribute(Detector(), torch.ones(1, 3, 8, 8), DRISE(samples=64, grid=4), target=target)
    >>> bool(a.values[0, 1:4, 1:4].mean() > a.values[0, 4:].mean())
    True
    """

    samples: int = 2000
    grid: int = 16
    probability: float = 0.5
    centred: bool = False
    baseline: Baseline = field(default_factory=Zero)
    seed: int = 0
    tolerance: float | None = None
    max_seconds: float | None = None

    name = "drise"
    about = "random smooth masks weighted by how a box is detected through them"
    source = cited("petsiuk2021drise")
    style = "signed"
    only_for = "detected boxes"

    @property
    def found(self) -> Attributions:
        return self.weighted_by(LikenessOf())
