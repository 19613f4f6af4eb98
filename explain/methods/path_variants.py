"""What is built on integrated gradients: a path that the network chooses (GIG), changes of the
score shared out by direction (IDGI), and regions that are ranked (XRAI)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from explain._utils.errors import MethodError, short_repr
from explain.baselines.base import Baseline
from explain.engine import Accumulator, Attributions, Evidence, Need, Reducer
from explain.engine.perturbations import Scores, Search, Searches, Steps, given_sample
from explain.methods.base import GRADIENTS, Method, check_range, ratio, register
from explain.methods.path import (
    CompleteMethod,
    IntegratedGradients,
    PathStart,
    ScoreAndGradient,
    StraightPath,
)
from explain.methods.regions import USUAL_AREA, Felzenszwalb, Regions, pixels_near

TINY = 1e-12  # share of the whole path that counts as rounding errors


def _in_coarse_steps(gradient: torch.Tensor) -> torch.Tensor:
    """The magnitudes of a gradient ``(C, H, W)`` in whole steps, so coarse that rounding does not
    decide which of two equal values is smaller: all machines take the same path.
    """
    size = gradient.abs()
    dtype = torch.finfo(gradient.dtype)
    step = size.max().clamp(min=dtype.tiny) * dtype.eps ** (2 / 3)
    return torch.round(size / step).double()


def _searches(method: Any) -> Searches:
    """The need for searches by the scores and gradients of points, of which guided paths are
    made."""
    return Searches(method, ScoreAndGradient())


@register
class GuidedIntegratedGradients(CompleteMethod):
    r"""Gradients integrated along a path that changes pixels with small gradients first.

    Add up gradients along a path that goes first where the gradient is small.

    In each of equal steps the distance to the photo (the sum of magnitudes) falls by the same
    amount. Of the values that are not there yet, those move whose gradient is among the smallest
    ``fraction``, until the distance is right; gradients that differ by no more than rounding does
    count as equal. No value may be further ahead of the straight line, or behind it, than
    ``distance``. The values add up to
    :math:`y(x) - y(b)`, and by how much the steps miss that is the attribution's ``delta``.

    Args:
        steps: how many; each needs the gradient of the one before. The authors take 200.
        baseline: as for integrated gradients.
        fraction: the share of values that may move at once.
        distance: how far from the straight line, as a share of its length. 1 leaves the path free,
            as in the paper's first algorithm; the default is that of the authors' program, for
            their path with anchors.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive supports the target, negative
        opposes it.

    Kapishnikov et al., "Guided Integrated Gradients: An Adaptive Path Method for Removing Noise",
    CVPR 2021.

    >>> import explain
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ... )
    >>> a = explain.attribute(model, torch.rand(2, 3, 2, 2), GuidedIntegratedGradients(), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 0.05).all())
    (torch.Size([2, 3, 2, 2]), True)
    """

    steps: int = 50
    baseline: float | str | torch.Tensor | Baseline = 0.0
    fraction: float = 0.25
    distance: float = 0.02

    __repr__ = short_repr

    minimums = {"steps": 1, "fraction": 0, "distance": 0}
    maximums = {"fraction": 1, "distance": 1}
    one_input = True

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({_searches(self), self.baseline_score})

    def searches(self, evidence: Evidence, *, by_direction: bool = False) -> list[Search]:
        """One search of `GuidedIntegratedGradients` for each image. Rounding differs with the
        number of images that a network runs at once, and so little decides which values are next:
        an image on its own has the same path in any batch."""
        images = range(len(evidence.inputs))
        return [Walk(self, evidence, image, by_direction=by_direction) for image in images]

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        return joined(evidence[_searches(self)])

    def further(
        self, share: torch.Tensor, gradient: torch.Tensor, difference: torch.Tensor, step: int
    ) -> torch.Tensor:
        """The share of its path ``(C, H, W)``, 0 at the baseline and 1 at the photo, that each
        value of one image has gone after step number ``step``.

        ``share`` is what it had before, ``gradient`` that of the score there, and ``difference``
        the photo less the baseline, all ``(C, H, W)``. Values with small gradients move first,
        within ``distance`` of the straight line, until the distance to the photo is right.
        """
        if step == self.steps - 1:  # at the photo, however the steps before were rounded
            return torch.ones_like(share)
        share_on_line = (step + 1) / self.steps
        lowest = max(share_on_line - self.distance, 0.0)
        highest = min(share_on_line + self.distance, 1.0)
        length = difference.abs().double()
        gradient_size = _in_coarse_steps(gradient)
        whole = length.sum()
        share = share.clamp(min=lowest)
        rank = int((share.numel() - 1) * self.fraction) + 1
        while True:
            # by how much the distance to the photo has to fall yet
            missing = (length * (1 - share)).sum() - whole * (1 - share_on_line)
            can_move = (share < highest) & (length > 0)
            if missing <= TINY * whole or not bool(can_move.any()):
                return share
            # infinite, so that all of them move, where fewer than the fraction can
            threshold = (
                torch.where(can_move, gradient_size, torch.inf).flatten().kthvalue(rank).values
            )
            chosen = can_move & (gradient_size <= threshold)
            # by how much the distance falls if all of these go as far as they may
            gain = (length * (highest - share))[chosen].sum()
            if bool(missing < gain):
                return torch.where(chosen, share + missing / gain * (highest - share), share)
            share = torch.where(chosen, highest, share)


class Walk(Search):
    """The search along a guided path of one image. It adds up gradients times steps, or
    ``by_direction``, shares out the changes of the score along the path."""

    has_result = False

    def __init__(
        self,
        method: GuidedIntegratedGradients,
        evidence: Evidence,
        image: int,
        *,
        by_direction: bool,
    ) -> None:
        """Begin at the baseline of an ``image``; ``by_direction`` shares out the changes of the
        score (`IDGI`), else gradients times steps are added up.
        """
        self._method = method
        self._inputs = evidence.inputs
        self._image = image
        self._start = method.start.perturbed(evidence)[image]
        self._changes = _Changes(evidence) if by_direction else None
        self._values = torch.zeros_like(self._start)

    @property
    def planned(self) -> int:
        return self._method.steps

    def steps(self) -> Steps:
        """Ask the engine for the score and gradient at the present point of the image, and move on;
        the path depends on the answers.
        """
        x = self._inputs[self._image]
        difference = x - self._start
        images = torch.tensor([self._image], device=x.device)
        # of the way to the photo, gone by each value
        share = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for step in range(self._method.steps):
            point = self._start + share.to(x) * difference
            sample = given_sample(point, self._image, words="points of a path", inputs=self._inputs)
            score_and_gradient = yield Scores(sample, ScoreAndGradient())
            gradient = score_and_gradient[0, 1:].reshape(x.shape)
            further = self._method.further(share, gradient, difference, step)
            if self._changes is None:
                self._values += gradient * ((further - share).to(x) * difference)
            else:
                # the points' numbers, any here, are not looked at
                self._changes.add(images, images, score_and_gradient)
            share = further

    def map(self) -> torch.Tensor:
        """The values of the image ``(1, C, H, W)``."""
        if self._changes is None:
            return self._values[None]
        return self._changes.result()[self._image, None]


def joined(searches: Sequence[Search]) -> torch.Tensor:
    """The values of guided paths, one image after the other ``(N, C, H, W)``."""
    return torch.cat([search.map() for search in searches])


@dataclass(frozen=True)
class ByDirection(Reducer):
    """Shares out the change of the score from each point to the next by the squared gradient; the
    image comes after the last point."""

    def begin(self, evidence: Evidence) -> Accumulator:
        return _Changes(evidence)


class _Changes(Accumulator):
    """The sum of the changes of the score from point to point, shared out by the squared gradient
    ``(N, C, H, W)``; of the latest point of each image, the score and the shares are kept."""

    def __init__(self, evidence: Evidence) -> None:
        """Begin with zeros for each image; the score of the image itself comes after the last
        point.
        """
        self._x = evidence.inputs
        self._scores_of_images = evidence.score
        self._latest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._total = torch.zeros_like(evidence.inputs)

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Take the score and gradient ``(b, 1 + C * H * W)`` of points: the change of the score
        since the image's last point is shared out by the squared gradient there.
        """
        # points of an image come in the order of its path
        for image, score_and_gradient in zip(images.tolist(), values, strict=True):
            self._share_out(image, score_and_gradient[0])
            gradient = score_and_gradient[1:].reshape(self._x.shape[1:])
            tiny = torch.finfo(gradient.dtype).tiny
            # squares of a small gradient itself would vanish
            square = (gradient / gradient.abs().max().clamp(min=tiny)).square()
            # zero where all of the gradient is
            self._latest[image] = score_and_gradient[0], ratio(square, square.sum())

    def _share_out(self, image: int, score: torch.Tensor) -> None:
        """Share out what the score has changed by since the latest point of the image, by the
        squared gradient at that point; forgets the point.
        """
        if image in self._latest:
            last_score, direction = self._latest.pop(image)
            self._total[image] += (score - last_score).to(direction) * direction

    def result(self) -> torch.Tensor:
        """The values of `IDGI` ``(N, C, H, W)`` after the last step, which leads to the image."""
        for image in list(self._latest):
            self._share_out(image, self._scores_of_images[image])
        return self._total


@register
class IDGI(CompleteMethod):
    r"""Changes of the score along a path, distributed by the squared gradient.

    Share out what each step of a path changes of the score in proportion to the squared gradient.

    :math:`\sum_j \frac{\nabla y(x_j) \odot \nabla y(x_j)}{\lVert\nabla y(x_j)\rVert^2}\,(y(x_{j+1})
    - y(x_j))`: a step counts only along the gradient, in whose direction alone the score changes;
    what it moves besides is noise. The values add up to :math:`y(x) - y(b)` exactly, but for steps
    from where the gradient is zero, which ``delta`` has.

    Args:
        path: the method whose path is taken: integrated gradients, also guided, or blurred. Points
            lie at the beginnings of its steps, whatever its rule.

    Returns:
        ``(N, C, H, W)``, in units of the score; positive supports the target, negative
        opposes it.

    Yang, Wang and Bilgic, "IDGI: A Framework to Eliminate Explanation Noise from Integrated
    Gradients", CVPR 2023.

    >>> import explain
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ... )
    >>> a = explain.attribute(model, torch.rand(2, 3, 2, 2), IDGI(), target=0)
    >>> a.values.shape, bool((a.delta.abs() < 1e-5).all())
    (torch.Size([2, 3, 2, 2]), True)
    """

    path: Method = IntegratedGradients()

    one_input = True

    def __post_init__(self) -> None:
        """Refuse a path that is not one of a method that integrates gradients."""
        super().__post_init__()
        if not isinstance(self.path, CompleteMethod) or not hasattr(self.path, "steps"):
            raise MethodError(
                f"path of {self.name} must be a method that integrates gradients, got "
                f"{self.path.name}"
            )

    @property
    def _changes(self) -> Attributions | None:
        """The need for the changes of the score along the path, shared out by squared gradients;
        None for guided paths, whose points depend on gradients and have to be searched.
        """
        if isinstance(self.path, GuidedIntegratedGradients):
            return None
        along: Any = self.path.along  # type: ignore[attr-defined]
        beginnings = {"rule": "left"} if isinstance(along, StraightPath) else {"middle": False}
        return Attributions(replace(along, **beginnings), ScoreAndGradient(), ByDirection())

    @property
    def baseline_score(self) -> Scores:
        assert isinstance(self.path, CompleteMethod)
        return self.path.baseline_score

    @property
    def needs(self) -> frozenset[Need[Any]]:
        changes = self._changes
        return frozenset({_searches(self) if changes is None else changes, self.baseline_score})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The values of `IDGI` ``(N, C, H, W)``, from the points of the path or, for a guided path,
        from the search along it."""
        changes = self._changes
        if changes is None:
            return joined(evidence[_searches(self)])
        return evidence[changes]  # type: ignore[no-any-return]

    def searches(self, evidence: Evidence) -> list[Search]:
        """A search along the guided path of each image; only for guided paths."""
        assert isinstance(self.path, GuidedIntegratedGradients)
        return self.path.searches(evidence, by_direction=True)


SCALES = (50, 100, 150, 250, 500, 1200)
"""The sizes of regions that Kapishnikov et al. take together."""
DILATION = 5  # pixels by which regions grow, at 224 x 224
LEAST = 50  # new pixels that a region must bring, at 224 x 224


@register
class XRAI(Method):
    r"""Regions ranked by integrated gradients.

    Rank regions by how much each of their pixels supports the target on average.

    Integrated gradients from black and from white are averaged; of each pixel, the channel with the
    largest value counts. From regions of similar colour of several sizes, the one whose pixels that
    are not covered yet have the largest mean is taken, again and again, until all is covered; its
    mean becomes the value of these pixels.

    Args:
        steps: the number of points on each of the two paths; the authors take 100.
        regions: how the photo is cut, as for ``lime``. None takes `Felzenszwalb` regions of six
            sizes together, each grown by a few pixels, as published.
        low, high: what black and white are for the model, one value for each channel or one for
            all. None takes the photo's own least and largest values, channel by channel; an
            `Explainer` gives what its preprocessing makes of black and of white.

    Returns:
        ``(N, H, W)``: the mean of the region that each pixel was first covered by, in units of the
        score per pixel.

    Kapishnikov et al., "XRAI: Better Attributions Through Regions", ICCV 2019.

    >>> import explain
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(144, 2)
    ... )
    >>> explain.attribute(model, torch.rand(2, 3, 8, 8), XRAI(steps=4), target=0).values.shape
    torch.Size([2, 8, 8])
    """

    steps: int = 25
    regions: Regions | None = None
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    family = GRADIENTS
    minimums = {"steps": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.name, self.low, self.high)

    @property
    def lacks_range(self) -> bool:
        return self.low is None

    @property
    def _gradients(self) -> dict[PathStart, Attributions]:
        """The need for the mean gradient from each of the two baselines."""
        starts = [PathStart(end) for end in (self.low or "least", self.high or "most")]
        return {
            start: StraightPath(self.steps, start, "gausslegendre").gradients for start in starts
        }

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset(self._gradients.values())

    differentiable = False

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The map of `XRAI` ``(N, H, W)``: regions ranked by integrated gradients from black and
        from white, with the largest channel of each pixel."""
        x = evidence.inputs
        path_values = [
            (x - start.perturbed(evidence)) * evidence[need]
            for start, need in self._gradients.items()
        ]
        pixels = (sum(path_values, torch.zeros_like(x)) / 2).amax(1)
        # ranked on the CPU in float64
        images = zip(pixels.double().cpu(), torch.split(x, 1), strict=True)
        return torch.stack(
            [self._of_image(image_pixels, image) for image_pixels, image in images]
        ).to(x)

    def _of_image(self, pixels: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Cut one image ``(1, C, H, W)`` into regions, and rank these by the attributions of its
        ``pixels`` ``(H, W)``. The paper's pixel counts are scaled to the image's area.
        """
        side_ratio = (pixels.numel() / USUAL_AREA) ** 0.5
        cuts: list[Regions] = [Felzenszwalb(scale) for scale in SCALES]
        if self.regions is not None:
            cuts = [self.regions]
        regions_of_all_cuts = []
        for cut in cuts:
            labels = cut(image)[0].cpu()
            regions_of_all_cuts += [labels == number for number in range(int(labels.max()) + 1)]
        masks = torch.stack(regions_of_all_cuts)
        if self.regions is None:  # the paper's own regions are grown; given ones stay
            masks = pixels_near(masks, by=round(DILATION * side_ratio))
        return ranked(pixels, masks, least=max(1, round(LEAST * side_ratio**2)))


def ranked(pixels: torch.Tensor, masks: torch.Tensor, least: int) -> torch.Tensor:
    """Rank regions ``(S, H, W)`` by the mean of pixels that no better region covers, ``(H, W)``.
    Regions that bring fewer than ``least`` are dropped; uncovered pixels get their own mean."""
    flat = pixels.reshape(-1)
    regions = masks.flatten(1)
    sums = torch.stack([flat[region].sum() for region in regions])
    counts = regions.sum(1)
    values = torch.zeros_like(flat)
    uncovered = torch.ones_like(flat, dtype=torch.bool)
    while bool((counts >= least).any()):
        means = torch.where(counts >= least, sums / counts.clamp(min=1), -torch.inf)
        newly_covered = regions[int(means.argmax())] & uncovered  # by the best region left
        values[newly_covered] = flat[newly_covered].mean()
        uncovered &= ~newly_covered
        # they do not count for any region from now on
        in_region = regions[:, newly_covered]
        sums -= in_region.to(flat) @ flat[newly_covered]
        counts -= in_region.sum(1)
    if bool(uncovered.any()):
        values[uncovered] = flat[uncovered].mean()
    return values.reshape(pixels.shape)
