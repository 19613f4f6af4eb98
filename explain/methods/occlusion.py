"""Occlusion and RISE: what the score loses where the image is covered, and what random masks
say."""

import itertools
import math
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

from explain._utils.errors import MethodError
from explain._utils.random_numbers import seeded, uniform
from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.engine import Evidence, Need, PerturbedRows, needs, perturbations
from explain.engine.perturbations import Build, one_by_one, samples_of
from explain.layers.layouts import enlarge
from explain.methods.base import register
from explain.methods.estimates import Estimate, EstimateMethod, Estimator, floored_error
from explain.methods.masking import MaskedInputs, Score, box_mask, whole_score
from explain.methods.regions import Cell, pixels_of

BLOCK = 32  # masks that come from one seed
FEWEST = 4  # masks that say how far their scores differ


@dataclass(frozen=True)
class Windows(MaskedInputs):
    """Images covered by a window at each multiple of ``stride``, cut off at the border. None stands
    for a window of a seventh of each side, and for a stride of half a window."""

    baseline: Baseline
    window: int | tuple[int, ...] | None = None
    stride: int | tuple[int, ...] | None = None

    covered_by = "a sliding window"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        """How many windows cover an image of this size, each of which is one perturbed input."""
        return len(self.boxes(size)) if size else 0

    def boxes(self, size: tuple[int, ...]) -> list[Cell]:
        """Return where the windows lie in an image of this size, as (start, end) of each side."""
        usual_window = [max(1, round(side / 7)) for side in size]
        window = _by_side(self.window, usual_window, size)
        stride = _by_side(self.stride, [(length + 1) // 2 for length in window], size)
        if not len(window) == len(stride) == len(size):
            raise MethodError(
                f"window of occlusion must be a number, or one for each of {len(size)} sides, as "
                f"its stride, got {window} and {stride}"
            )
        intervals_of_sides = []
        for side, length, step in zip(size, window, stride, strict=True):
            if length > side:
                got = tuple(window)
                raise MethodError(
                    f"window of occlusion must be within the image of {size}, got {got}; take less"
                )
            if step > length:
                raise MethodError(
                    f"stride of occlusion must not exceed the window {window}, got {stride}; take "
                    "less"
                )
            # the last one may reach over the border
            starts = range(0, side - length + step, step)
            intervals_of_sides.append([(start, min(start + length, side)) for start in starts])
        return list(itertools.product(*intervals_of_sides))

    def masks(self, evidence: Evidence) -> PerturbedRows:
        """One mask for each window, ``(b, 1, H, W)``: 0 in the window, whose pixels the baseline
        replaces, 1 elsewhere. Mask ``number`` of an image belongs to ``boxes(...)[number]``.
        """
        x = evidence.inputs
        boxes = self.boxes(evidence.size)

        outside_window = one_by_one(
            lambda image, number: 1 - box_mask([boxes[number]], like=x)[None]
        )
        return samples_of([len(boxes)] * len(x), x.device, outside_window)


def _by_side(
    lengths: int | tuple[int, ...] | None,
    usual: list[int],
    size: tuple[int, ...],
) -> list[int]:
    """The option "window" or "stride" as a length in pixels for each side of the image (frames,
    height, width): one number is for all but the single row of a signal, None takes the ``usual``.
    """
    if lengths is None:
        return usual
    is_row = len(size) == 2 and size[0] == 1
    if isinstance(lengths, int):
        return [1, lengths] if is_row else [lengths] * len(usual)
    return [1, *lengths] if is_row and len(lengths) == 1 else list(lengths)


class _MeanDrop(Estimator):
    """The mean drop of the score over the windows that cover each pixel; ``zeros`` is a map
    ``(H, W)``."""

    def __init__(self, boxes: list[Cell], whole: torch.Tensor, zeros: torch.Tensor) -> None:
        """``boxes`` are in the order of the runs, ``whole`` is the score of the uncovered image,
        and ``zeros`` ``(H, W)`` has the shape, type and device of the map.
        """
        self.count = len(boxes)
        self._boxes = boxes
        self._whole = whole
        self._drops = zeros.clone()
        self._windows_over = zeros.clone()

    def take(self, first: int, scores: torch.Tensor) -> None:
        """Add the drop of the score by each window to the pixels that it covers; ``scores``
        ``(b,)`` belong to the boxes from ``first`` on.
        """
        for score, box in zip(scores, self._boxes[first:], strict=False):
            pixels = pixels_of(box)
            self._drops[pixels] += self._whole - score
            self._windows_over[pixels] += 1

    def estimate(self) -> Estimate:
        return Estimate(self._drops / self._windows_over.clamp(min=1))


@register
class Occlusion(EstimateMethod):
    r"""Drop of the score where a sliding window covers the photo.

    Cover the photo with a sliding window, and see what the score loses.

    Each pixel gets the mean drop :math:`y(x) - y(x_{\setminus W})` over the windows W that cover
    it. Windows begin at multiples of the stride; those at the far border are cut off, so that every
    pixel is covered.

    Args:
        window: side of the window in pixels, or one number for each direction; None takes a seventh
            of the photo. Of a signal, it is an interval. In a volume, one number is the side of a
            cube. In a video (three
            channels), such a window lasts a seventh of the time; where the frames come before the
            channels, it lies in one frame, tile or patch.
        stride: how far it moves, or one number for each direction; None takes half of the window.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.

    Returns:
        ``(N, H, W)`` in units of the score; of a video ``(N, T, H, W)``.

    Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks", ECCV 2014
    (arXiv:1311.2901).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> x = torch.rand(1, 3, 2, 2)
    >>> a = explain.attribute(model, x, Occlusion(window=1), target=1)
    >>> torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1), atol=1e-6)
    True
    """

    window: int | tuple[int, ...] | None = None
    stride: int | tuple[int, ...] | None = None
    baseline: Baseline = Zero()
    score: Score = "logit"

    minimums = {"window": 1, "stride": 1}
    style = "signed"

    def with_frames(self, x: torch.Tensor, *, frames_first: bool) -> "Occlusion":
        """`Occlusion` for a video: one number for the window or the stride becomes one for each
        direction (frames, height, width). Volumes, whose slices are no frames, keep cubes."""
        is_volume = not frames_first and x.shape[1] != 3
        if is_volume:
            return self
        frames, *sides = x.shape[2:]
        window_frames = 1 if frames_first else max(1, round(frames / 7))
        window = self.window
        stride = self.stride
        # by default it would last a seventh of the frames, which may be tiles of one photo
        if window is None and frames_first:
            window = (1, *(max(1, round(side / 7)) for side in sides))
        elif isinstance(window, int):
            window = (window_frames, window, window)
        if isinstance(stride, int):
            stride = ((window_frames + 1) // 2, stride, stride)
        return replace(self, window=window, stride=stride)

    @property
    def perturbation(self) -> Windows:
        return Windows(self.baseline, self.window, self.stride)

    def estimators(self, evidence: Evidence) -> list[Estimator]:
        """One `_MeanDrop` for each image."""
        boxes = self.perturbation.boxes(evidence.size)
        zeros = evidence.inputs.new_zeros(evidence.size)
        return [_MeanDrop(boxes, score, zeros) for score in evidence[whole_score(self.score)]]


@dataclass(frozen=True)
class SmoothGrids(MaskedInputs):
    """Images covered by random grids of zeros and ones, enlarged beyond the image and shifted by
    less than a cell. Masks depend on the seed and their number alone, and none is kept."""

    baseline: Baseline
    samples: int
    grid: int
    probability: float
    seed: int

    covered_by = "random smooth masks"

    def masks(self, evidence: Evidence) -> PerturbedRows:
        """Masks ``(b, 1, H, W)`` in [0, 1]: 1 keeps a pixel, 0 removes it. They depend on their
        number and the seed alone, so all images have the same; the last block is kept.
        """
        x = evidence.inputs
        block_of = lru_cache(maxsize=1)(partial(self._block, x))
        smooth = one_by_one(lambda image, number: block_of(number // BLOCK)[number % BLOCK][None])
        return samples_of([self.samples] * len(x), x.device, smooth)

    def _block(self, inputs: torch.Tensor, block: int) -> torch.Tensor:
        """Masks ``(BLOCK, H, W)`` from the seed and the number ``block``: random grids of zeros and
        ones, enlarged linearly by one cell more than the image, cut out at a random shift.
        """
        size = inputs.shape[2:]
        cells = [min(self.grid, side) for side in size]
        generator = seeded(self.seed, block)
        masks = (uniform((BLOCK, *cells), generator) < self.probability).to(inputs)
        # one side after the other: a matrix for each mask enlarges and cuts out its rows at once
        for dim, (count, side) in enumerate(zip(cells, size, strict=True), start=1):
            cell_length = math.ceil(side / count)
            shifts = torch.randint(cell_length, (BLOCK,), generator=generator, device="cpu")
            enlarged_row = enlarging(count, (count + 1) * cell_length)
            pixels = shifts[:, None] + torch.arange(side, device="cpu")
            matrices = enlarged_row[pixels].to(inputs)  # (BLOCK, side, cells)
            masks_along_dim = masks.movedim(dim, 1)
            enlarged = torch.bmm(matrices, masks_along_dim.flatten(2))
            masks = enlarged.reshape(matrices.shape[:2] + masks_along_dim.shape[2:]).movedim(1, dim)
        return masks.clamp_(0, 1)  # rounding may have led a little beyond


def enlarging(cells: int, length: int) -> torch.Tensor:
    """The matrix ``(length, cells)`` that enlarges a row of ``cells`` values linearly to ``length``
    values."""
    return enlarge(torch.eye(cells, dtype=torch.float64, device="cpu")[None], (length,))[0].T


class _ScoreWeightedMasks(Estimator):
    """Estimates the mean of masks times their scores, over the probability that a cell is kept; if
    ``centred``, of scores less their mean."""

    def __init__(
        self, method: "SmoothGridMethod", masks: Build, whole: torch.Tensor, size: tuple[int, ...]
    ) -> None:
        """Take the method's options, the builder of its ``masks``, the score ``whole`` of the image
        itself ``(1,)``, ``(0,)`` where it has none, and the ``size`` of the map.
        """
        self.count = method.samples
        self._masks = masks
        self._method = method
        # one more mask could have this score too, so errors include it
        self._whole = whole
        # of masks m with scores s, the sums of s m, m, s² m², s m² and m²
        self._sums = torch.zeros((5, *size), dtype=torch.float64, device=whole.device)
        self._scores = torch.zeros(0, dtype=torch.float64, device=whole.device)

    def take(self, first: int, scores: torch.Tensor) -> None:
        """Add the masks from ``first`` on to the running sums, weighted by powers of their
        ``scores`` ``(b,)``. Masks are made again: thousands of them would not fit the memory.
        """
        numbers = torch.arange(first, first + len(scores), device=scores.device)
        first_image = torch.zeros_like(numbers)  # all images have the same masks
        masks = self._masks(first_image, numbers).flatten(1).double()
        scores = scores.double()
        ones = torch.ones_like(scores)
        sums = self._sums.flatten(1)
        sums[:2].addmm_(torch.stack([scores, ones]), masks)
        sums[2:].addmm_(torch.stack([scores.square(), scores, ones]), masks.square_())
        self._scores = torch.cat([self._scores, scores])

    def estimate(self) -> Estimate:
        """The map of RISE from the masks by now, with the standard error of each pixel; no error
        before 4 masks, or while their scores do not differ."""
        scores = self._scores
        n = len(scores)
        mean_score = float(scores.mean())
        centre = mean_score if self._method.centred else 0.0
        # the means of s m, m, s² m², s m² and m² over masks m with scores s
        weighted, seen, squares, products, seen_squares = self._sums / n
        mean = weighted - centre * seen
        error = None
        spread = float(scores.max() - scores.min())
        if n >= FEWEST and spread > 1e-6 * float(scores.abs().max()):
            # the mean of ((s - centre) m)², multiplied out, less the square of the mean
            variance = squares - 2 * centre * products + centre**2 * seen_squares - mean.square()
            farthest = float((torch.cat([scores, self._whole]) - centre).abs().max())
            # the variance that one more mask with the farthest score would bring
            once_more = (farthest / n) ** 2
            variance_of_mean = variance.clamp(min=0) / (n - 1) + once_more
            error = floored_error(variance_of_mean, n - 1) / self._method.probability
        # what a pixel that makes no difference has
        neutral = None if self._method.centred else mean_score
        return Estimate(mean / self._method.probability, error, neutral=neutral)


@dataclass(frozen=True)
class SmoothGridMethod(EstimateMethod):
    """A method that averages random smooth masks, weighted by their scores: `RISE` and `DRISE`."""

    samples: int = 2000
    grid: int = 7
    probability: float = 0.5
    centred: bool = False
    baseline: Baseline = Zero()
    seed: int = 0
    tolerance: float | None = None
    max_seconds: float | None = None

    style = "signed"
    minimums = {"samples": 2, "grid": 1}
    below = EstimateMethod.below | {"probability": 1}

    @property
    def perturbation(self) -> SmoothGrids:
        return SmoothGrids(self.baseline, self.samples, self.grid, self.probability, self.seed)

    def estimators(self, evidence: Evidence) -> list[Estimator]:
        """One `_ScoreWeightedMasks` for each image, with the score of the whole image where the
        method has one (`DRISE` has none).
        """
        # detections have no score of the whole image to compare with
        scores = [evidence[reference].double() for reference in self.references]
        whole = (
            torch.stack(scores, 1) if scores else evidence.score.new_zeros(len(evidence.inputs), 0)
        )
        masks = self.perturbation.masks(evidence).build  # all images have the same
        return [_ScoreWeightedMasks(self, masks, score, evidence.size) for score in whole]


@register
class RISE(SmoothGridMethod):
    r"""Random smooth masks weighted by the score of the masked photo.

    Show the photo through random smooth masks, and add up the masks, each weighted by its score.

    :math:`S = \frac{1}{n p} \sum_i y(x \odot m_i)\, m_i`, the expected score given that a pixel is
    seen. A mask is an s × s grid of cells that are 1 with probability p, enlarged bilinearly to (s
    + 1) ⌈H / s⌉ and shifted at random by less than a cell. (The authors' program for batches leaves
    the division by p out.)

    A pixel that does not matter has the mean score of all masks, not 0. With ``centred``, this is
    subtracted, so that positive values are those of pixels that help. Pictures,
    `Attribution.signed` and `Attribution.heatmap` show the difference from it in either case.

    Args:
        samples: the number n of masks; the paper takes 4,000 to 8,000.
        grid: the number s of cells along a side.
        probability: p, that a cell is kept.
        centred: subtract the mean score over the masks.
        baseline: what is seen where the photo is not; the paper's is zero.
        score: explain the ``probability`` of the class, as published, or its ``logit``.
        seed: of the masks; every image gets the same.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at
            most ``tolerance``, or after so many seconds.

    Returns:
        ``(N, H, W)`` in units of the score, with the error of each value, once masks differ in
        their scores.

    Petsiuk, Das and Saenko, "RISE: Randomized Input Sampling for Explanation of Black-box Models",
    BMVC 2018 (arXiv:1806.07421).

    >>> import explain
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> a = explain.attribute(model, torch.rand(1, 3, 8, 8), RISE(samples=32), target=1)
    >>> a.values.shape == a.error.shape, a.samples
    (True, 32)
    """

    score: Score = "probability"


@register
class DRISE(SmoothGridMethod):
    r"""Random smooth masks weighted by the detection of a box in the masked photo.

    RISE for a detected box: each mask is weighted by how much the best detection through it is like
    that box.

    Likeness is the overlap of the boxes (intersection over union) times the score of the detection,
    if it has the same
    label: detectors hand out a label for each box, of which the cosine between class distributions
    is 1 or 0. The largest one over all detections counts. The target has to be an
    `explain.targets.Detections`.

    Masks are those of `RISE`, as in the paper (the authors' program enlarges grids without
    interpolation).

    Args:
        samples: the number of masks; the paper takes 5,000.
        grid: cells along a side.
        probability: that a cell is kept.
        centred: subtract the mean likeness over the masks.
        baseline: what is seen where the photo is not.
        seed: of the masks; every image gets the same.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at
            most ``tolerance``, or after so many seconds.

    Returns:
        ``(N, H, W)``, with the error of each value.

    Petsiuk et al., "Black-box Explanation of Object Detectors via Saliency Maps", CVPR 2021
    (arXiv:2006.03204).

    >>> import explain
    >>> class Detector(torch.nn.Module):
    ...     def forward(self, x):
    ...         box, label = torch.tensor([[1.0, 1, 4, 4]]), torch.tensor([1])
    ...         return [
    ...             {"boxes": box, "labels": label, "scores": each[:, 1:4, 1:4].mean()[None]}
    ...             for each in x
    ...         ]
    >>> target = explain.targets.Detections()
    >>> a = explain.attribute(
    ...     Detector(), torch.ones(1, 3, 8, 8), DRISE(samples=64, grid=4), target=target
    ... )
    >>> bool(a.values[0, 1:4, 1:4].mean() > a.values[0, 4:].mean())
    True
    """

    grid: int = 16

    only_for = "detected boxes"

    read = perturbations.AnswerTo(needs.DetectionSimilarity())
    references = frozenset[Need[Any]]()
