"""Regions in the order in which they speak for the target, by the gradients along two paths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from explain._utils.errors import MethodError
from explain.engine import Attributions, Evidence, Need
from explain.methods.base import GRADIENTS, Method, check_range
from explain.methods.bibliography import cited
from explain.methods.gradients import Saliency
from explain.methods.path import PathStart, Quadrature, StraightPath
from explain.methods.regions import USUAL_AREA, Felzenszwalb, Regions
from explain.methods.registry import register

SCALES = (50, 100, 150, 250, 500, 1200)
"""The sizes of regions that Kapishnikov et al. take together."""
DILATION, LEAST = 5, 50
"""By how many pixels regions grow, and how many new ones a region must bring, at 224 x 224 pixels."""


@register
@dataclass(frozen=True)
class XRAI(Method):
    r"""Rank regions by how much each of their pixels speaks for the target on average.

    Integrated gradients from black and from white are averaged; of each pixel, the channel with the largest value
    counts. From regions of similar colour of several sizes, the one whose pixels that are not covered yet have the
    largest mean is taken, again and again, until all is covered; its mean becomes the value of these pixels.

    Args:
        steps: the number of points on each of the two paths; the authors take 100.
        regions: how the photo is cut, as for ``lime``. None takes `Felzenszwalb` regions of six sizes together, each
            grown by a few pixels, as published.
        low, high: what black and white are for the model, one value for each channel or one for all. None takes the
            photo's own least and largest values, channel by channel; an `Explainer` gives what its preprocessing makes
            of black and of white.

    Returns:
        ``(N, H, W)``: the mean of the region that each pixel was first covered by, in units of the score per pixel.

    Kapishnikov et al., "XRAI: Better Attributions Through Regions", ICCV 2019.

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2))
    >>> explain.attribute(model, torch.rand(2, 3, 8, 8), XRAI(steps=4), target=0).values.shape
    torch.Size([2, 8, 8])
    """

    steps: int = 25
    regions: Regions | None = None
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    name = "xrai"
    about = "regions ranked by integrated gradients"
    source = cited("kapishnikov2019xrai")
    family = GRADIENTS
    minimums: ClassVar[Mapping[str, float]] = {"steps": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.name, self.low, self.high)

    def within(self, low: tuple[float, ...], high: tuple[float, ...]) -> XRAI:
        """The same, for inputs whose values lie between these; what is set already stays."""
        return self if self.low is not None else replace(self, low=low, high=high)

    @property
    def _starts(self) -> tuple[PathStart, PathStart]:
        ends = (("least", self.low), ("most", self.high))
        return tuple(PathStart(name if own is None else own, self.name) for name, own in ends)  # type: ignore[return-value]

    def _gradients(self, start: PathStart) -> Attributions:
        path = StraightPath(self.steps, start, "gausslegendre")
        return Attributions(path, Saliency(absolute=False), Quadrature(self.steps, "gausslegendre"))

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset(map(self._gradients, self._starts))

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        x = evidence.inputs
        if x.ndim != 4:
            raise MethodError(
                f"input of {self.name} must be a photo (N, C, H, W), got {tuple(x.shape)}; take integratedgradients"
            )
        ways = [(x - start.perturbed(evidence)) * evidence[self._gradients(start)] for start in self._starts]
        pixels = (sum(ways, torch.zeros_like(x)) / len(ways)).amax(1)
        found = [self._ranked(each, x[i : i + 1]) for i, each in enumerate(pixels.double().cpu())]
        return torch.stack(found).to(x)

    def _ranked(self, pixels: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        share = (pixels.numel() / USUAL_AREA) ** 0.5
        cuts = [self.regions] if self.regions is not None else [Felzenszwalb(scale) for scale in SCALES]
        maps = [cut(image)[0].cpu() for cut in cuts]
        masks = torch.cat([torch.stack([each == number for number in range(int(each.max()) + 1)]) for each in maps])
        grown = masks if self.regions is not None else dilated(masks, round(DILATION * share))
        return ranked(pixels, grown, max(1, round(LEAST * share**2)))


def dilated(masks: torch.Tensor, radius: int) -> torch.Tensor:
    """Regions ``(S, H, W)`` with all pixels that are no further than so many from them.

    >>> dilated(torch.tensor([[[1, 0, 0, 0]]]) > 0, 1).int().tolist()
    [[[1, 1, 0, 0]]]
    """
    found, (height, width) = masks.clone(), masks.shape[1:]
    for down in range(-radius, radius + 1):
        for across in range(-radius, radius + 1):
            if down**2 + across**2 > radius**2 or abs(down) >= height or abs(across) >= width:
                continue
            to = slice(max(down, 0), height + min(down, 0)), slice(max(across, 0), width + min(across, 0))
            of = slice(max(-down, 0), height + min(-down, 0)), slice(max(-across, 0), width + min(-across, 0))
            found[:, to[0], to[1]] |= masks[:, of[0], of[1]]
    return found


def ranked(pixels: torch.Tensor, masks: torch.Tensor, least: int) -> torch.Tensor:
    """The mean over the new pixels of each region ``(S, H, W)``, the largest first, at these pixels.

    Regions that bring less than ``least`` pixels are dropped; what none covers gets its own mean.

    >>> ranked(torch.tensor([[1.0, 5.0, 3.0]]), torch.tensor([[[1, 1, 0]], [[0, 1, 1]]]) > 0, 1).tolist()
    [[1.0, 4.0, 4.0]]
    """
    flat, of = pixels.reshape(-1), masks.flatten(1)
    sums = torch.stack([flat[each].sum() for each in of])
    counts = of.sum(1)
    found, left = torch.zeros_like(flat), torch.ones_like(flat, dtype=torch.bool)
    while bool((counts >= least).any()):
        means = torch.where(counts >= least, sums / counts.clamp(min=1), -torch.inf)
        best = int(means.argmax())
        new = of[best] & left
        found[new] = flat[new].mean()
        left &= ~new
        gone = of[:, new]
        sums -= gone.to(flat) @ flat[new]
        counts -= gone.sum(1)
    if bool(left.any()):
        found[left] = flat[left].mean()
    return found.reshape(pixels.shape)
