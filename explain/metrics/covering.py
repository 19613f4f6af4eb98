"""`Covering`: does the part of an image that a map marks matter more than equal parts elsewhere?"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch

from explain._utils.random_numbers import seeded
from explain.baselines.replacements import Blur, Mean, blurred
from explain.methods.base import spatial_dims
from explain.methods.masking import Score
from explain.metrics.base import (
    MetricInput,
    MetricResult,
    ScoreMetric,
    ScoreRequest,
    covered_by_masks,
    register,
)
from explain.metrics.maps import Sign, ranks_of

Against = Literal["elsewhere", "edges", "middle"]


def edges_of(images: torch.Tensor) -> torch.Tensor:
    """Return a map ``(N, H, W)`` of the edges in images ``(N, C, H, W)``: magnitudes of differences
    of neighbours, in depth or time too, blurred by a sixteenth of the shorter side."""
    edges = torch.zeros_like(images)
    for dim in spatial_dims(images):
        edges.narrow(dim, 0, images.shape[dim] - 1).add_(images.diff(dim=dim).abs())
    return blurred(edges.sum(1), min(images.shape[-2:]) / 16)


def middle_of(images: torch.Tensor) -> torch.Tensor:
    """A map ``(N, H, W)`` that is largest in the middle of images ``(N, C, H, W)``."""
    distances = torch.zeros(())
    for length in images.shape[2:]:
        distances = distances[..., None] + ((torch.arange(length) + 0.5) / length - 0.5).square()
    return -distances.to(images).expand_as(images[:, 0])


def elsewhere(areas: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Return areas ``(N, H, W)`` in ``count`` other places, ``(N, count, H, W)``, moved at random
    around the borders (in depth and time too), every other one mirrored; the same for all N."""
    size = areas.shape[1:]
    draws = torch.rand(count, len(size), generator=seeded(seed)).tolist()
    placed = []
    for number, shares in enumerate(draws):
        area = areas.flip(-1) if number % 2 else areas
        moves = [int(share * length) for share, length in zip(shares, size, strict=True)]
        # what leaves on one side comes in on the other, so that the area stays as large
        placed.append(area.roll(moves, tuple(range(1, area.ndim))))
    return torch.stack(placed, 1)


@register(uncover=True)
@register(against="middle")
@register(against="edges")
@register
class Covering(ScoreMetric):
    r"""How much more the score falls where the map's largest values are covered than for as much
    elsewhere.

    The marked part :math:`m` is where the map is largest, a fifth of the photo. The figure is
    :math:`\frac{1}{K}\sum_k p(x \setminus m_k) - p(x \setminus m)` for K parts that it is
    compared with, the mean over two baselines, the mean colour and a strong blur; with ``uncover``,
    :math:`p(m) - \frac{1}{K}\sum_k p(m_k)` of photos of which all else is covered. More is better;
    a map in a random place gets 0 on average.

    ``parts`` has the probability of the photo, "original" ``(N,)``, that for the marked part,
    "marked" ``(N,)``, and those for what it is compared with, "others" ``(N, K)``.

    Args:
        against: the marked part in other places ("elsewhere"), as much of the photo where its
            "edges" are, or its "middle"; the last two are maps that ask no model.
        share: how much of the photo is marked.
        placements: how many other places.
        uncover: cover all but the marked part.
        score: "probability" of the class (default) or the target's own "logit".
        sign: how values become one number for each pixel, see `explain.metrics.maps.Sign`.
        seed: of the places, which are the same for all maps, and of the order of equal values.

    Samek et al., "Evaluating the Visualization of What a Deep Neural Network Has Learned", TNNLS
    2017, for what flipped pixels take from the score, in comparison with random ones.

    >>> Covering().name, Covering(against="edges").name, Covering(uncover=True).name
    ('covering', 'covering-edges', 'uncovering')
    """

    against: Against = "elsewhere"
    share: float = 0.2
    placements: int = 16
    uncover: bool = False
    score: Score = "probability"
    sign: Sign = "own"
    seed: int = 0

    units = "difference of probabilities"
    minimums: ClassVar = {"placements": 1}
    below: ClassVar = {"share": 1}

    def described(self) -> Mapping[str, str]:
        """The name and the summary for what is covered, and what that is compared with."""
        places = {"elsewhere": "elsewhere", "edges": "at edges", "middle": "in the middle"}
        name = "uncovering" if self.uncover else "covering"
        if self.against != "elsewhere":
            name += f"-{self.against}"
        measured = "fall of the probability without the marked fifth"
        if self.uncover:
            measured = "probability of the marked fifth alone"
        return {"name": name, "summary": f"{measured}, less that of as much {places[self.against]}"}

    def marked(self, data: MetricInput, maps: torch.Tensor | None = None) -> torch.Tensor:
        """The part ``(N, H, W)`` of each photo that its map marks, or one of ``maps``."""
        ranks = data.ranks(self.sign, self.seed) if maps is None else ranks_of(maps, self.seed)
        return ranks < max(1, round(self.share * data.pixels))

    def areas(self, data: MetricInput) -> tuple[torch.Tensor, torch.Tensor]:
        """The marked part ``(N, 1, H, W)``, and those that it is compared with ``(N, K, H, W)``."""
        marked = self.marked(data)
        if self.against == "elsewhere":
            return marked[:, None], elsewhere(marked, self.placements, self.seed)
        other_map = {"edges": edges_of, "middle": middle_of}[self.against](data.images)
        return marked[:, None], self.marked(data, other_map)[:, None]

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        """The photos without the marked part, by each baseline, and then without what it is
        compared with; with ``uncover``, those with nothing else."""
        side = min(data.size[-2:])
        strong_blur = Blur(kernel=2 * (side // 8) + 1, sigma=max(1.0, side / 12))
        kept = [areas if self.uncover else ~areas for areas in self.areas(data)]
        return [
            ScoreRequest(covered_by_masks(areas, baseline), self.score)
            for areas in kept
            for baseline in (Mean(), strong_blur)
        ]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        # in the order of `requests`: by the mean colour and the blur each
        marked_mean, marked_blur, others_mean, others_blur = scores
        marked = (marked_mean + marked_blur)[:, 0] / 2
        elsewhere_scores = (others_mean + others_blur) / 2
        difference = elsewhere_scores.mean(1) - marked
        value = -difference if self.uncover else difference
        parts = {
            "original": data.original(self.score),
            "marked": marked,
            "others": elsewhere_scores,
        }
        return MetricResult(value, parts=parts)
