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
from explain.engine import Attributions, Evidence, Need
from explain.engine.perturbations import Attributor
from explain.methods.bibliography import cited
from explain.methods.estimates import Estimating, FromScores, Gradually, Guess, honest
from explain.methods.masks import MaskedInputs, Score, ScoreOf, whole_score
from explain.methods.regions import Cell
from explain.methods.registry import register

NOTHING: frozenset[Need[Any]] = frozenset()
BLOCK = 32  # masks that come from one seed
FEWEST = 4  # masks that say how far their scores differ


@dataclass(frozen=True)
class Windows:
    """A window at every ``stride``-th place; None takes a seventh of each side, at every half of that.

    Windows begin at multiples of the stride; the last ones are cut off at the border.
    """

    window: int | tuple[int, ...] | None = None
    stride: int | tuple[int, ...] | None = None

    needs = NOTHING

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

    def drawn(self, evidence: Evidence) -> _DrawnWindows:
        return _DrawnWindows(self.boxes(evidence.size), evidence)


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


class _DrawnWindows:
    def __init__(self, boxes: list[Cell], evidence: Evidence) -> None:
        self._boxes, self._like = boxes, evidence.inputs
        self.counts = [len(boxes)] * len(evidence.inputs)

    def keep(self, images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        found = self._like.new_ones(len(numbers), 1, *self._like.shape[2:])
        for row, number in zip(found, numbers.tolist(), strict=True):
            row[0][tuple(slice(*ends) for ends in self._boxes[number])] = 0
        return found


@dataclass(frozen=True)
class MeanDrop:
    """The mean drop of the score over the windows that cover each pixel."""

    windows: Windows
    score: Score

    def begin(self, evidence: Evidence) -> Estimating:
        return _MeanDrop(self.windows.boxes(evidence.size), evidence, evidence[whole_score(self.score)])


class _MeanDrop:
    unit = 1

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
class Occlusion(FromScores):
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
    about = "what the score loses where a sliding window covers the photo"
    source = cited("zeiler2014occlusion")
    minimums: ClassVar[Mapping[str, float]] = {"window": 1, "stride": 1}
    style = "signed"

    @property
    def found(self) -> Attributions:
        windows = Windows(self.window, self.stride)
        return Attributions(
            MaskedInputs(windows, self.baseline), ScoreOf(self.score), Gradually(MeanDrop(windows, self.score))
        )

    @property
    def beside(self) -> frozenset[Need[Any]]:
        return frozenset({whole_score(self.score)})


@dataclass(frozen=True)
class SmoothGrids:
    """Random grids of zeros and ones, enlarged to more than the photo and shifted by less than a cell.

    They come from the seed in blocks, so that each is the same whenever it is drawn, and none is kept.
    """

    samples: int
    grid: int
    probability: float
    seed: int

    needs = NOTHING

    def __str__(self) -> str:
        return "random smooth masks"

    def most(self, size: tuple[int, ...]) -> int:
        return self.samples

    def drawn(self, evidence: Evidence) -> DrawnGrids:
        return DrawnGrids(self, evidence)


class DrawnGrids:
    """Random smooth masks for the photos of a question."""

    def __init__(self, grids: SmoothGrids, evidence: Evidence) -> None:
        self._of, self._size, self._like = grids, evidence.size, evidence.inputs
        self.counts = [grids.samples] * len(evidence.inputs)
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


@dataclass(frozen=True)
class ScoreWeightedMasks:
    """The mean of masks times their scores, divided by the probability that a cell is kept.

    If ``centred``, the scores are taken from their mean on. ``whole`` needs the score of the photo itself, which one
    more mask could have too, so that errors know of it.
    """

    masks: SmoothGrids
    centred: bool = False
    whole: Need[torch.Tensor] | None = None

    def begin(self, evidence: Evidence) -> Estimating:
        whole = None if self.whole is None else evidence[self.whole].double()
        return _ScoreWeightedMasks(self.masks, self.centred, whole, evidence)


class _ScoreWeightedMasks:
    unit = 1

    def __init__(self, masks: SmoothGrids, centred: bool, whole: torch.Tensor | None, evidence: Evidence) -> None:
        self._drawn, self._probability, self._like = masks.drawn(evidence), masks.probability, evidence.inputs
        self.counts, self._centred, self._whole = self._drawn.counts, centred, whole
        like = evidence.inputs
        self._sums = torch.zeros(len(like), 5, math.prod(evidence.size), dtype=torch.float64, device=like.device)
        self._scores: list[list[torch.Tensor]] = [[] for _ in self.counts]

    def take(self, image: int, first: int, scores: torch.Tensor) -> None:
        numbers = torch.arange(first, first + len(scores), device=scores.device)
        masks = self._drawn.keep(torch.full_like(numbers, image), numbers)[:, 0].flatten(1).double()
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


class FromSmoothGrids(FromScores):
    """What `RISE` and D-RISE share: the options of their masks, and how these are weighted by what is read."""

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

    def weighted_by(self, read: Attributor, whole: Need[torch.Tensor] | None = None) -> Attributions:
        """The masks, each weighted by what is read of the photo seen through it."""
        fold = Gradually(ScoreWeightedMasks(self.masks, self.centred, whole), self.tolerance, self.max_seconds)
        return Attributions(MaskedInputs(self.masks, self.baseline), read, fold)


@register
@dataclass(frozen=True)
class RISE(FromSmoothGrids):
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
    about = "random smooth masks weighted by the score of the photo seen through them"
    source = cited("petsiuk2018rise")
    style = "signed"

    @property
    def found(self) -> Attributions:
        return self.weighted_by(ScoreOf(self.score), whole_score(self.score))

    @property
    def beside(self) -> frozenset[Need[Any]]:
        return frozenset({whole_score(self.score)})
