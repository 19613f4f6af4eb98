"""Regions of similar colour by a graph of pixels, without another package."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from explain.errors import MethodError
from explain.methods.blurred import blurred
from explain.methods.checks import check_options
from explain.methods.regions import in_a_row

USUAL_AREA = 224 * 224  # that the numbers of the literature are for


@dataclass(frozen=True)
class Felzenszwalb:
    """Regions of similar colour (Felzenszwalb and Huttenlocher, 2004): pixels are joined where they differ least.

    Two regions are joined where the difference between them is smaller than the largest one within either, plus
    ``scale`` over its number of pixels. Then regions that are too small are joined to a neighbour. Colours are brought
    to the range from -1 to 1. Numbers are meant for 224 x 224 pixels, and grow with the area.

    Args:
        scale: larger values give larger regions.
        sigma: the standard deviation in pixels of the Gaussian that is laid over the photo first.
        least: how many pixels a region has at least.

    >>> x = torch.zeros(1, 3, 4, 6)
    >>> x[..., 3:] = 1
    >>> Felzenszwalb(sigma=0)(x)[0, 0]
    tensor([0, 0, 0, 1, 1, 1])
    """

    scale: float = 100.0
    sigma: float = 0.8
    least: int = 150

    def __post_init__(self) -> None:
        check_options(self, scale=0, sigma=0, least=1)

    def __str__(self) -> str:
        return f"regions of similar colour (scale {self.scale:g})"

    def most(self, size: tuple[int, ...]) -> int:
        return 0

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if images.ndim != 4:
            raise MethodError(
                f"regions by Felzenszwalb must be of photos (N, C, H, W), got {tuple(images.shape)}; take Squares()"
            )
        return torch.stack([self._of(image.double().cpu()) for image in images]).to(images.device)

    def _of(self, image: torch.Tensor) -> torch.Tensor:
        low, high = image.aminmax()
        area = image[0].numel() / USUAL_AREA
        smooth = blurred(2 * (image - low) / torch.where(high > low, high - low, 1) - 1, self.sigma)
        return joined(smooth, self.scale / 255 * area, max(1, round(self.least * area)))


def joined(image: torch.Tensor, scale: float, least: int) -> torch.Tensor:
    """Join the pixels of ``image`` ``(C, H, W)`` to regions of at least so many: their numbers ``(H, W)``."""
    weights, ends = _edges(image)
    order = weights.argsort(stable=True)
    pairs = list(zip(weights[order].tolist(), *(end[order].tolist() for end in ends), strict=True))
    roots, sizes, inner = list(range(image[0].numel())), [1] * image[0].numel(), [0.0] * image[0].numel()

    def root(i: int) -> int:
        while roots[i] != i:
            roots[i] = roots[roots[i]]
            i = roots[i]
        return i

    for by_size in (False, True):
        for weight, a, b in pairs:
            a, b = root(a), root(b)
            if a == b:
                continue
            if by_size:
                join = sizes[a] < least or sizes[b] < least
            else:
                join = weight < min(inner[a] + scale / sizes[a], inner[b] + scale / sizes[b])
            if join:
                roots[b] = a
                sizes[a] += sizes[b]
                inner[a] = weight
    return in_a_row(torch.tensor([root(i) for i in range(len(roots))])).reshape(image.shape[1:])


def _edges(image: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """The differences of all neighbours, also across corners, and where each begins and ends."""
    height, width = image.shape[1:]
    numbers = torch.arange(height * width).reshape(height, width)
    pairs = [(numbers[:, :-1], numbers[:, 1:]), (numbers[:-1], numbers[1:]), (numbers[:-1, :-1], numbers[1:, 1:]),
             (numbers[:-1, 1:], numbers[1:, :-1])]  # fmt: skip
    begin, end = (torch.cat([pair[i].reshape(-1) for pair in pairs]) for i in (0, 1))
    flat = image.flatten(1)
    return (flat[:, begin] - flat[:, end]).square().sum(0).sqrt(), (begin, end)
