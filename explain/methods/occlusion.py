"""Occlusion and RISE: what the score loses where the photo is covered, and what random masks say."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from explain._utils.errors import MethodError
from explain._utils.random_numbers import uniform
from explain.baselines import Zero
from explain.baselines.base import Baseline
from explain.engine import Evidence, Need
from explain.engine.needs import DetectionSimilarity
from explain.methods.bibliography import cited
from explain.methods.estimates import EstimateMethod, Estimator, Guess, honest
from explain.methods.masks import DrawnMasks, MaskedInputs, Masks, Score, box_mask, whole_score
from explain.methods.regions import Cell
from explain.methods.registry import register

BLOCK = 32  # masks that come from one seed
FEWEST = 4  # masks that say how far their scores differ


@dataclass(frozen=True)
class Windows(Masks):
    """A window at every ``stride``-th place; None takes a seventh of each side, at every half of that.

    Windows begin at multiples of the stride; the last ones are cut off at the border.
    """

    window: int | tuple[int, ...] | None = None
    stride: int | tuple[int, ...] | None = None

    def __str__(self) -> str:
        return "a sliding window"

    def most(self, size: tuple[int, ...]) -> int:
        return len(self.boxes(size))

    def boxes(self, size: tuple[int, ...]) -> list[Cell]:
        """Where the windows lie in a photo of this size.

        Raises:
            MethodError: a window that is larger than the photo, or a stride that leaves gaps.

        >>> Windows(2, 2).boxes((2, 5))
        [((0, 2), (0, 2)), ((0, 2), (2, 4)), ((0, 2), (4, 5))]
        """
        window = _by_side("window", self.window, [max(1, round(side / 7)) for side in size])
        stride = _by_side("stride", self.stride, [(length + 1) // 2 for length in window])
        if any(length > side for length, side in zip(window, size, strict=True)):
            raise MethodError(
                f"window of occlusion must be no larger than the photo of {size}, got {tuple(window)}; take a smaller "
                "one"
            )
        if any(step > length for step, length in zip(stride, window, strict=True)):
            raise MethodError(
                f"stride of occlusion must be no larger than the window of {tuple(window)}, or gaps are left, got "
                f"{tuple(stride)}; take a smaller one"
            )
        found: list[Cell] = [()]
        for side, length, step in zip(size, window, stride, strict=True):
            starts = [k * step for k in range(-(-(side - length) // step) + 1)]
            found = [(*before, (start, min(start + length, side))) for before in found for start in starts]
        return found

    def drawn(self, evidence: Evidence) -> DrawnMasks:
        x, boxes = evidence.inputs, self.boxes(evidence.size)

        def keep(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            return 1 - torch.stack([box_mask([boxes[number]], x) for number in numbers.tolist()])

        return DrawnMasks([len(boxes)] * len(x), keep)


def _by_side(option: str, given: int | tuple[int, ...] | None, usual: list[int]) -> list[int]:
    """A length for each side; a single one is for height and width."""
    if given is None:
        return usual
    if isinstance(given, int):
        return [*usual[:-2], given, given]
    if len(given) != len(usual):
        raise MethodError(
            f"{option} of occlusion must be a whole number or {len(usual)} of them for this photo, got {given}; give "
            "one for each side"
        )
    return list(given)


class _MeanDrop(Estimator):
    """The mean drop of the score over the windows that cover each pixel."""

    def __init__(self, boxes: list[Cell], evidence: Evidence, whole: torch.Tensor) -> None:
        self._boxes, self._whole = boxes, whole
        self.counts = [len(boxes)] * len(evidence.inputs)
        self._sums = evidence.inputs.new_zeros(len(evidence.inputs), *evidence.size)
        self._times = torch.zeros_like(self._sums)

    def take(self, image: int, first: int, scores: torch.Tensor) -> None:
        for drop, box in zip(self._whole[image] - scores, self._boxes[first:], strict=False):
            where = tuple(slice(*ends) for ends in box)
            self._sums[image][where] += drop
            self._times[image][where] += 1

    def guess(self, image: int) -> Guess:
        return Guess(self._sums[image] / self._times[image].clamp(min=1))


@register
@dataclass(frozen=True)
class Occlusion(EstimateMethod):
    r"""Cover the photo with a sliding window, and see what the score loses.

    Each pixel gets the mean drop :math:`y(x) - y(x_{\setminus W})` over the windows W that cover it. Windows begin at
    multiples of the stride; those at the far border are cut off, so that every pixel is covered.

    Args:
        window: side of the window in pixels, or one number for each direction; None takes a seventh of the photo.
        stride: how far it moves, or one number for each direction; None takes half of the window.
        baseline: what takes the place of what is covered: one of `explain.baselines`, or its name.
        score: explain the ``logit``, or the ``probability`` of the class.

    Returns:
        ``(N, H, W)`` in units of the score; of a video ``(N, T, H, W)``.

    Zeiler and Fergus, "Visualizing and Understanding Convolutional Networks", ECCV 2014 (arXiv:1311.2901).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    >>> x = torch.rand(1, 3, 2, 2)
    >>> a = explain.attribute(model, x, Occlusion(window=1), target=1)
    >>> torch.allclose(a.values, (model[1].weight[1].reshape(3, 2, 2) * x).sum(1), atol=1e-6)
    True
    """

    window: int | tuple[int, ...] | None = None
    stride: int | tuple[int, ...] | None = None
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "logit"

    name = "occlusion"
    about = "drop of the score where a sliding window covers the photo"
    source = cited("zeiler2014occlusion")
    minimums: ClassVar[Mapping[str, float]] = {"window": 1, "stride": 1}
    style = "signed"

    @property
    def _windows(self) -> Windows:
        return Windows(self.window, self.stride)

    @property
    def perturbation(self) -> MaskedInputs:
        return MaskedInputs(self._windows, self.baseline)

    def estimator(self, evidence: Evidence) -> Estimator:
        return _MeanDrop(self._windows.boxes(evidence.size), evidence, evidence[whole_score(self.score)])


@dataclass(frozen=True)
class SmoothGrids(Masks):
    """Random grids of zeros and ones, enlarged to more than the photo and shifted by less than a cell.

    They come from the seed in blocks, so that each is the same whenever it is drawn, and none is kept.
    """

    samples: int
    grid: int
    probability: float
    seed: int

    def __str__(self) -> str:
        return "random smooth masks"

    def most(self, size: tuple[int, ...]) -> int:
        return self.samples

    def drawn(self, evidence: Evidence) -> DrawnMasks:
        grids = _DrawnGrids(self, evidence)
        return DrawnMasks([self.samples] * len(evidence.inputs), grids.keep)


class _DrawnGrids:
    """Random smooth masks for the photos of a question."""

    def __init__(self, grids: SmoothGrids, evidence: Evidence) -> None:
        self._of, self._size, self._like = grids, evidence.size, evidence.inputs
        self._cells = [min(grids.grid, side) for side in self._size]
        self._step = [-(-side // cells) for side, cells in zip(self._size, self._cells, strict=True)]
        self._enlarged = [
            _enlarging(cells, (cells + 1) * step).to(self._like)
            for cells, step in zip(self._cells, self._step, strict=True)
        ]
        self._block: tuple[int, torch.Tensor] = (-1, self._like)

    def keep(self, images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """The masks ``(b, 1, H, W)`` of these numbers; they are the same for all images."""
        found = []
        for block, numbers_in_it in _by_block(numbers.tolist()):
            if self._block[0] != block:
                self._block = block, self._drawn(block)
            found.append(self._block[1][numbers_in_it])
        return torch.cat(found)[:, None]

    def _drawn(self, block: int) -> torch.Tensor:
        generator = torch.Generator("cpu").manual_seed((self._of.seed * 1_000_003 + block) % 2**63)
        cells = uniform((BLOCK, *self._cells), generator) < self._of.probability
        masks = cells.to(self._like)
        for dim, (side, step, enlarged) in enumerate(zip(self._size, self._step, self._enlarged, strict=True)):
            shifts = torch.randint(step, (BLOCK,), generator=generator, device="cpu").to(self._like.device)
            rows = enlarged[shifts[:, None] + torch.arange(side, device=self._like.device)]  # (BLOCK, side, cells)
            moved = masks.movedim(dim + 1, 1)
            shape = moved.shape
            masks = torch.bmm(rows, moved.reshape(BLOCK, shape[1], -1)).reshape(BLOCK, side, *shape[2:])
            masks = masks.movedim(1, dim + 1)
        return masks.clamp_(0, 1)


def _by_block(numbers: list[int]) -> list[tuple[int, list[int]]]:
    """Numbers as places within blocks, in their order."""
    found: list[tuple[int, list[int]]] = []
    for number in numbers:
        block, place = divmod(number, BLOCK)
        if not found or found[-1][0] != block:
            found.append((block, []))
        found[-1][1].append(place)
    return found


def _enlarging(cells: int, length: int) -> torch.Tensor:
    """The matrix ``(length, cells)`` that enlarges a row of cells linearly."""
    eye = torch.eye(cells, dtype=torch.float64, device="cpu")
    return F.interpolate(eye[None], size=length, mode="linear", align_corners=False)[0].T


class _ScoreWeightedMasks(Estimator):
    """The mean of masks times their scores, divided by the probability that a cell is kept.

    If ``centred``, the scores are taken from their mean on. ``whole`` is the score of the photo itself, which one more
    mask could have too, so that errors include it.
    """

    def __init__(self, masks: SmoothGrids, centred: bool, whole: torch.Tensor | None, evidence: Evidence) -> None:
        drawn, like = masks.drawn(evidence), evidence.inputs
        self._keep, self._probability, self._like = drawn.keep, masks.probability, like
        self.counts, self._centred, self._whole = drawn.counts, centred, whole
        self._sums = torch.zeros(len(like), 5, math.prod(evidence.size), dtype=torch.float64, device=like.device)
        self._scores: list[list[torch.Tensor]] = [[] for _ in self.counts]

    def take(self, image: int, first: int, scores: torch.Tensor) -> None:
        numbers = torch.arange(first, first + len(scores), device=scores.device)
        masks = self._keep(torch.full_like(numbers, image), numbers)[:, 0].flatten(1).double()
        scores = scores.double()
        ones = torch.ones_like(scores)
        self._sums[image][:2].addmm_(torch.stack([scores, ones]), masks)
        self._sums[image][2:].addmm_(torch.stack([scores.square(), scores, ones]), masks.square_())
        self._scores[image].append(scores)

    def guess(self, image: int) -> Guess:
        scores = torch.cat(self._scores[image])
        n, average = len(scores), float(scores.mean())
        centre = average if self._centred else 0.0
        means = (self._sums[image] / n).reshape(5, *self._like.shape[2:])
        weighted, seen, squares, products, seen_twice = means
        mean = weighted - centre * seen
        error, known = None, scores if self._whole is None else torch.cat([scores, self._whole[image, None]])
        reach = float((known - centre).abs().max())
        if n >= FEWEST and float(scores.max() - scores.min()) > 1e-6 * float(scores.abs().max()):
            variance = squares - 2 * centre * products + centre**2 * seen_twice - mean.square()
            once_more = (reach / n) ** 2  # the variance that one more mask with the farthest score would bring
            error = honest(variance.clamp(min=0) / (n - 1) + once_more, n - 1)
            error = (error / self._probability).to(self._like)
        neutral = None if self._centred else average
        return Guess((mean / self._probability).to(self._like), error, neutral=neutral)


class SmoothGridMethod(EstimateMethod):
    """A method that averages random smooth masks, weighted by their scores: `RISE` and `DRISE`."""

    name: ClassVar[str]
    samples: int
    grid: int
    probability: float
    centred: bool
    baseline: Baseline
    seed: int
    tolerance: float | None
    max_seconds: float | None

    minimums: ClassVar[Mapping[str, float]] = {"samples": 2, "grid": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.probability < 1:
            raise MethodError(
                f"probability of {self.name} must be a number between 0 and 1, got {self.probability}; 0.5 is usual"
            )

    @property
    def masks(self) -> SmoothGrids:
        return SmoothGrids(self.samples, self.grid, self.probability, self.seed)

    @property
    def perturbation(self) -> MaskedInputs:
        return MaskedInputs(self.masks, self.baseline)

    def estimator(self, evidence: Evidence) -> Estimator:
        whole = next((evidence[reference].double() for reference in self.references), None)
        return _ScoreWeightedMasks(self.masks, self.centred, whole, evidence)


@register
@dataclass(frozen=True)
class RISE(SmoothGridMethod):
    r"""Show the photo through random smooth masks, and add up the masks, each weighted by its score.

    :math:`S = \frac{1}{n p} \sum_i y(x \odot m_i)\, m_i`, the expected score given that a pixel is seen. A mask is an
    s × s grid of cells that are 1 with probability p, enlarged bilinearly to (s + 1) ⌈H / s⌉ and shifted at random by
    less than a cell. (The authors' program for batches leaves the division by p out.)

    A pixel that does not matter has the mean score of all masks, not 0. With ``centred``, this is subtracted, so that
    positive values are those of pixels that help. Pictures, `Attribution.signed` and `Attribution.heatmap` show the
    difference from it in either case.

    Args:
        samples: the number n of masks; the paper takes 4,000 to 8,000.
        grid: the number s of cells along a side.
        probability: p, that a cell is kept.
        centred: subtract the mean score over the masks.
        baseline: what is seen where the photo is not; the paper's is zero.
        score: explain the ``probability`` of the class, as published, or its ``logit``.
        seed: of the masks; every image gets the same.
        tolerance, max_seconds: stop early, when the largest error over the largest magnitude is at most ``tolerance``,
            or after so many seconds.

    Returns:
        ``(N, H, W)`` in units of the score, with the error of each value, once masks differ in their scores.

    Petsiuk, Das and Saenko, "RISE: Randomized Input Sampling for Explanation of Black-box Models", BMVC 2018
    (arXiv:1806.07421).

    >>> import explain
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    >>> a = explain.attribute(model, torch.rand(1, 3, 8, 8), RISE(samples=32), target=1)
    >>> a.values.shape == a.error.shape, a.samples
    (True, 32)
    """

    samples: int = 2000
    grid: int = 7
    probability: float = 0.5
    centred: bool = False
    baseline: Baseline = field(default_factory=Zero)
    score: Score = "probability"
    seed: int = 0
    tolerance: float | None = None
    max_seconds: float | None = None

    name = "rise"
    about = "random smooth masks weighted by the score of the masked photo"
    source = cited("petsiuk2018rise")
    style = "signed"


@dataclass(frozen=True)
class LikenessOf:
    """How much the best detection in each row is like the one that is explained."""

    needs = frozenset({DetectionSimilarity()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return evidence[DetectionSimilarity()]


@register
@dataclass(frozen=True)
class DRISE(SmoothGridMethod):
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
    about = "random smooth masks weighted by the detection of a box in the masked photo"
    source = cited("petsiuk2021drise")
    style = "signed"
    only_for = "detected boxes"

    @property
    def read(self) -> LikenessOf:
        return LikenessOf()

    @property
    def references(self) -> frozenset[Need[Any]]:
        return frozenset()
