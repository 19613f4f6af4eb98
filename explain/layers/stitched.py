"""A segmenter on windows of an image or volume: where they are, and how scores and maps are
stitched."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explain._utils.errors import ModelError, keywords, shown
from explain.data.inputs import Inputs
from explain.hooks.layer_names import LayerPlace
from explain.layers.layouts import Size, enlarge
from explain.layers.placement import Placement, draw
from explain.targets.base import summary_of_output
from explain.targets.regions import read_class_maps

SIGMA = 1 / 8  # of the gaussian, in window lengths
LEAST = 1e-3  # of the largest weight


class Stitched(nn.Module):
    """A segmenter that sees one window of an image or volume after the other, and whose class maps
    are stitched.

    As in MONAI's ``sliding_window_inference``, the windows stand ``window * (1 - overlap)`` apart,
    the last ones at the edge; what is smaller than a window is padded with zeros around. Where
    windows overlap, the result is the mean of their class maps, weighted by ``weights``. The result
    is differentiable, so that methods explain the whole.

    The maps of a layer (class activation maps) are made in each window, from the gradient of the
    stitched score, and stitched with the same weights. Such a layer is named as it is in the
    segmenter, with ``"model."`` before it; its calls are counted within a window. Each step runs
    one window of all images, so that without gradients no more than this is in memory.

    Args:
        model: gives class maps for a window, in any of the layouts of
            `explain.targets.Segmentation`. Those of another resolution are enlarged to the window.
        window: height and width of a window in pixels, of volumes with the depth before them; one
            number for all.
        overlap: the share of a window that the next one overlaps, from 0 to below 1.
        weights: "gaussian", with a standard deviation of an eighth of the window, and at least a
            thousandth of the largest weight (MONAI, nnU-Net); or "uniform".
        recompute: compute each window again for its gradients, instead of keeping what all windows
            need for theirs: about a third slower.

    Raises:
        ModelError: an option that is out of range, or a model that gives no class maps.

    >>> stitched = Stitched(nn.Conv2d(3, 2, 1), window=8)
    >>> stitched(torch.zeros(1, 3, 12, 20)).shape, stitched.starts((12, 20))
    (torch.Size([1, 2, 12, 20]), [[0, 4], [0, 4, 8, 12]])
    """

    @keywords()
    def __init__(
        self,
        model: nn.Module,
        window: int | Sequence[int],
        overlap: float = 0.5,
        weights: Literal["gaussian", "uniform"] = "gaussian",
        recompute: bool = False,
    ) -> None:
        """Check the options and keep them; windows are laid out when images of a size come."""
        super().__init__()
        sides = [window] if isinstance(window, int) else [*window]
        if (
            isinstance(window, bool)
            or not sides
            or not all(isinstance(side, int) and side > 0 for side in sides)
        ):
            raise ModelError(
                "window must be a whole number of pixels, or one for each side, got "
                f"{shown(window)}"
            )
        if not 0 <= overlap < 1:
            raise ModelError(
                f"overlap must be a share from 0 to below 1, got {shown(overlap)}; 0.5 is usual"
            )
        if weights not in ("gaussian", "uniform"):
            raise ModelError(
                f"weights must be 'gaussian' or 'uniform', got {shown(weights)}; leave them out"
            )
        self.model = model
        self.window = sides
        self.overlap = overlap
        self.weights = weights
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        """The class maps ``(N, K, H, W)`` of whole images, stitched from those of all windows.
        Differentiable; with ``recompute``, windows run again in the backward pass."""
        scores = self.scores
        if self.recompute and torch.is_grad_enabled():
            scores = partial(checkpoint, self.scores, use_reentrant=False)
        return self.stitch([scores(window) for window in self.windows(x)], x.shape[2:])

    def scores(self, window: Tensor) -> Tensor:
        """The class maps ``(N, K, h, w)`` that the segmenter gives for one window of all images."""
        return self.maps(self.model(window), len(window))

    def maps(self, output: Any, count: int) -> Tensor:
        """The class maps ``(N, K, h, w)`` in what the segmenter returned for ``count`` windows.
        Refuses outputs without class maps."""
        class_maps = read_class_maps(output, count)
        if class_maps is None:
            raise ModelError(
                "model must give class maps (N, K, H, W) to be stitched, got "
                f"{summary_of_output(output)}; wrap it in a module that does"
            )
        return class_maps.maps

    def energy(self, inputs: Inputs) -> Callable[[Any], Tensor]:
        """The score by which the segmenter's layer is chosen: from an output, the sum of all
        squared class maps ``(N,)``. It depends on no class, so that all windows share a layer.
        """
        return lambda output: self.maps(output, len(inputs)).square().flatten(1).sum(1)

    def sides(self, size: Size) -> Size:
        """The side lengths of a window, in pixels, on images of this size. One number stands for
        all sides; refuses another number of sides than images have."""
        sides = self.window * len(size) if len(self.window) == 1 else self.window
        if len(sides) != len(size):
            raise ModelError(
                f"window must have {len(size)} sides for x of size {tuple(size)}, got "
                f"{tuple(sides)}"
            )
        return tuple(sides)

    def starts(self, size: Size) -> list[list[int]]:
        """The pixels at which windows start, along each side of an image of this size with its
        padding. `windows`, `stitch` and the names of layers' calls rely on this order."""
        starts = []
        for length, side in zip(size, self.sides(size), strict=True):
            last = max(length - side, 0)
            apart = max(1, int(side * (1 - self.overlap)))
            # what would reach beyond the edge stands at the edge
            starts.append([min(start, last) for start in range(0, last + apart, apart)])
        return starts

    def windows(self, x: Tensor) -> list[Tensor]:
        """Cut images ``(N, C, H, W)`` into their windows, row by row; small images are padded with
        zeros. In the order of `starts`; views of the images where nothing is padded."""
        size = x.shape[2:]
        sides = self.sides(size)
        missing = [max(side - length, 0) for length, side in zip(size, sides, strict=True)]
        if any(missing):
            halves = [
                half
                for padding in reversed(missing)  # the last dimension comes first
                for half in (padding // 2, padding - padding // 2)
            ]
            x = F.pad(x, halves)
        slices_by_side = [
            [slice(start, start + side) for start in side_starts]
            for side_starts, side in zip(self.starts(size), sides, strict=True)
        ]
        all_before: Any = ...  # all images and channels
        return [x[(all_before, *window_slices)] for window_slices in product(*slices_by_side)]

    def stitch(self, parts: Sequence[Tensor], size: Size) -> Tensor:
        """Stitch what the windows gave, ``(N, K, h, w)`` each, to ``(N, K, H, W)`` for images of
        ``size``.

        Windows of another resolution are enlarged; overlaps are weighted means; padding is cut off.
        Scores and attribution maps go through this with the same weights, so both mean the same
        pixels.
        """
        sides = self.sides(size)
        starts = self.starts(size)
        weights = self._weights(sides).to(parts[0])
        parts = [
            weights * (part if part.shape[2:] == sides else enlarge(part, sides)) for part in parts
        ]
        lengths = [max(length, side) for length, side in zip(size, sides, strict=True)]
        total_weights = sum_of_windows([weights] * len(parts), starts, lengths)
        stitched = sum_of_windows(parts, starts, lengths) / total_weights
        for dim, (length, padded_length) in enumerate(zip(size, lengths, strict=True), start=2):
            if length < padded_length:  # half of the padding lies before the image
                stitched = stitched.narrow(dim, (padded_length - length) // 2, length)
        return stitched

    def stitch_maps(
        self, maps: Sequence[Tensor], size: Size, placement: Placement | None = None
    ) -> Tensor:
        """Stitch the attribution maps ``(N, h, w)`` of a layer in each window to one map ``(N, H,
        W)``; ``placement`` is that of the layer in a window."""
        sides = self.sides(size)
        pixels = [draw(of_window[:, None], sides, placement) for of_window in maps]
        return self.stitch(pixels, size)[:, 0]

    def place_in_segmenter(self, place: LayerPlace) -> LayerPlace:
        """The place of a layer in the segmenter, by its place in this module: without "model." in
        its name."""
        return place._replace(module=place.module.removeprefix("model").removeprefix("."))

    def first(self, inputs: Inputs) -> Inputs:
        """The first window of images as inputs of the segmenter, on which its layers are looked
        at."""
        return Inputs((self.windows(inputs.x)[0],))

    def count(self, size: Size) -> int:
        """The number of windows on images of this size."""
        return prod(map(len, self.starts(size)))

    def _weights(self, sides: Size) -> Tensor:
        """How much each pixel of a window counts where windows overlap: ``(1, 1, h, w)``. Never
        zero, since sums of weights are divided by."""
        weights = torch.ones((1, 1, *sides), dtype=torch.float64)
        if self.weights == "uniform":
            return weights
        for dim, side in enumerate(sides, start=2):
            gaussian = torch.signal.windows.gaussian(side, std=SIGMA * side, dtype=torch.float64)
            weights = weights * gaussian.reshape(
                [-1 if i == dim else 1 for i in range(weights.ndim)]
            )
        return weights.clamp(min=LEAST)


def sum_of_windows(
    parts: Sequence[Tensor], starts: Sequence[Sequence[int]], lengths: Sequence[int]
) -> Tensor:
    """Lay the maps of windows down at their ``starts`` along each side, row by row, and add them
    where they overlap. ``lengths`` are the sides of the whole."""
    # each row of windows is joined first, along the last side, so that no more is added than needed
    for dim, length in reversed(list(enumerate(lengths))):
        rows = [
            parts[first_part : first_part + len(starts[dim])]
            for first_part in range(0, len(parts), len(starts[dim]))
        ]
        padding_of_later_sides = [0, 0] * (len(lengths) - 1 - dim)
        parts = []
        for row in rows:
            paddings = [
                (start, length - start - part.shape[dim + 2])
                for start, part in zip(starts[dim], row, strict=True)
            ]
            padded_parts = [
                F.pad(part, [*padding_of_later_sides, *padding])
                for part, padding in zip(row, paddings, strict=True)
            ]
            parts.append(sum(padded_parts[1:], start=padded_parts[0]))
    return parts[0]
