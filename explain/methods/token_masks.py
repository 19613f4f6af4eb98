"""Masks from a transformer's own tokens: ViT-CX, and transformer input sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from explain._utils.errors import MethodError
from explain.engine import Activations, Attributions, Evidence, Need, Perturbation, PerturbedRows
from explain.engine.needs import BlockTokens
from explain.engine.perturbations import InOrder, interleaved
from explain.layers.feature_maps import enlarge
from explain.methods.base import ALTERED, Method, Outcome
from explain.methods.bibliography import cited
from explain.methods.clustering import complete_linkage, means
from explain.methods.masks import Score, ScoreOf, whole_score
from explain.methods.registry import register
from explain.methods.score_cam import masks
from explain.methods.wrappers import noise

TOGETHER = 64  # masks that are enlarged at a time


@dataclass(frozen=True)
class ClusterMaskedInputs(Perturbation):
    """The photo seen through each cluster of a layer's maps, with noise where it is covered; and with the noise alone.

    Each cluster has two rows, one of each kind.
    """

    distance: float
    sigma: float
    seed: int

    needs = frozenset({Activations(), BlockTokens()})

    def __str__(self) -> str:
        return "the photo seen through clusters of maps, and with the noise of each"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return 2 * channels

    def clusters(self, evidence: Evidence) -> list[torch.Tensor]:
        """Of each image, the sum of the maps of each cluster ``(K, h, w)``."""
        if len(evidence[BlockTokens()]) < 2:
            raise MethodError(
                "vitcx must have at least two transformer blocks to take masks from their tokens, got "
                f"{len(evidence[BlockTokens()])}; use it for vision transformers (ViT, DeiT, Swin), and scorecam "
                "otherwise"
            )
        return [clustered(maps, evidence.size, self.distance) for maps in evidence.activations]

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x, size = evidence.inputs, evidence.size
        if len(size) != 2:
            return PerturbedRows(torch.arange(len(x), device=x.device), lambda rows: x[rows])  # no photo
        clusters = self.clusters(evidence)
        owners, rank = interleaved([2 * len(each) for each in clusters], x.device)

        def make(rows: torch.Tensor) -> torch.Tensor:
            images, numbers = owners[rows], rank[rows]
            pairs = list(zip(images.tolist(), (numbers // 2).tolist(), strict=True))
            keep = masks(torch.stack([clusters[image][number] for image, number in pairs]).to(x), size)
            added = torch.stack([noise(self.seed, number, x[0]) for _, number in pairs])
            seen = torch.where((numbers % 2 == 0)[:, None, None, None], keep, torch.ones_like(keep))
            return x[images] * seen + self.sigma * added * (1 - keep)

        return PerturbedRows(owners, make)


def clustered(maps: torch.Tensor, size: tuple[int, ...], distance: float) -> torch.Tensor:
    """The sums ``(K, h, w)`` of maps ``(C, h, w)`` that look alike, each enlarged and brought to [0, 1] before.

    Two masks lie apart by one minus their cosine. Enlarging is linear, so the cosines are those of the small maps with
    the products of the enlarging; what is subtracted from each map is a constant, which no mask shows.
    """
    least, most = (torch.cat(ends) for ends in zip(*_ends(maps, size), strict=True))
    varies = most > least
    maps, least, span = maps[varies].double(), least[varies].double(), (most - least)[varies].double()
    if not len(maps):
        return maps
    down, across = (_enlarging(*sides).to(maps) for sides in zip(maps.shape[1:], size, strict=True))
    seen = down.T @ down @ maps @ (across.T @ across)  # (C, h, w): each map enlarged, and brought back by the transpose
    inner = seen.flatten(1) @ maps.flatten(1).T
    sums = torch.einsum("cij,i,j->c", maps, down.sum(0), across.sum(0))
    places = size[0] * size[1]
    shifted = inner - least[:, None] * sums - sums[:, None] * least + places * least[:, None] * least
    cosines = shifted / shifted.diagonal().sqrt()[:, None] / shifted.diagonal().sqrt()
    labels = complete_linkage(1 - cosines, distance).to(maps.device)
    found = maps.new_zeros(int(labels.max()) + 1, *maps.shape[1:])
    return found.index_add_(0, labels, maps / span[:, None, None])


def _ends(maps: torch.Tensor, size: tuple[int, ...]) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """The least and the largest value of each enlarged map, a few maps at a time."""
    return [enlarge(some[:, None], size).flatten(1).aminmax(dim=1) for some in torch.split(maps, TOGETHER)]


def _enlarging(cells: int, length: int) -> torch.Tensor:
    """The matrix ``(length, cells)`` that enlarges a row of cells."""
    return enlarge(torch.eye(cells, dtype=torch.float64)[None], (length,))[0].T


@register
@dataclass(frozen=True)
class ViTCX(Method):
    r"""Show the photo through clusters of a transformer's own maps, each weighted by what it makes the model say.

    Each channel of the layer's tokens, enlarged to the photo and brought to [0, 1], is a mask. Masks whose cosines are
    near to 1 are added up (complete linkage), and brought to [0, 1] again. A mask M has the weight
    :math:`y(x \odot M + z \odot (1 - M)) - y(x + z \odot (1 - M)) + y(x)` with noise z: what the model says of what is
    seen, less what the noise alone does to it. A pixel's value is the mean of the weights, weighted by the masks.
    (The authors' program divides by their number once more.)

    Args:
        distance: below which masks are put together: one minus their cosine.
        sigma: standard deviation of the noise, in units of the input.
        score: explain the ``probability`` of the class, as published, or its ``logit``.
        seed: of the noise; every image gets the same.

    Returns:
        ``(N, H, W)`` in units of the score. The paper's layer is the first normalisation of the last block.

    Xie et al., "ViT-CX: Causal Explanation of Vision Transformers", IJCAI 2023 (arXiv:2211.03064).

    >>> import explain
    >>> from torchvision.models import VisionTransformer
    >>> model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3)
    >>> explain.attribute(model, torch.rand(1, 3, 16, 16), ViTCX(), target=1).values.shape
    torch.Size([1, 16, 16])
    """

    distance: float = 0.1
    sigma: float = 0.1
    score: Score = "probability"
    seed: int = 0

    name = "vitcx"
    about = "clusters of a transformer's maps weighted by the score of the masked photo"
    source = cited("xie2023vitcx")
    family = ALTERED
    minimums: ClassVar[Mapping[str, float]] = {"distance": 0, "sigma": 0}
    only_for = "vision transformers"

    def tried(self) -> ViTCX:
        """With as few masks as show whether a network fits."""
        return replace(self, distance=4.0)

    @property
    def _seen(self) -> ClusterMaskedInputs:
        return ClusterMaskedInputs(self.distance, self.sigma, self.seed)

    @property
    def _scores(self) -> Attributions:
        return Attributions(self._seen, ScoreOf(self.score), InOrder())

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self._scores, whole_score(self.score), Activations(), BlockTokens()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        clusters, whole = self._seen.clusters(evidence), evidence[whole_score(self.score)]
        owners, _ = interleaved([2 * len(each) for each in clusters], whole.device)
        found = []
        for image, maps in enumerate(clusters):
            mine = evidence[self._scores][owners == image]
            found.append(weighted_mean(maps.to(evidence.inputs), mine[::2] - mine[1::2] + whole[image], evidence.size))
        return torch.stack(found)

    def outcome(self, evidence: Evidence) -> Outcome:
        counts = [2 * len(each) for each in self._seen.clusters(evidence)]
        return Outcome(samples=torch.tensor(counts, device=evidence.inputs.device))


def weighted_mean(maps: torch.Tensor, weights: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """The mean of weights ``(K,)`` at each place, weighted by the masks that maps ``(K, h, w)`` make; 0 without any."""
    total, seen = maps.new_zeros(2, *size)
    for some, mine in zip(torch.split(maps, TOGETHER), torch.split(weights.to(maps), TOGETHER), strict=True):
        keep = masks(some, size)[:, 0]
        total += torch.einsum("k,khw->hw", mine, keep)
        seen += keep.sum(0)
    return torch.where(seen > 0, total / torch.where(seen > 0, seen, 1), 0)


@dataclass(frozen=True)
class SampledTokens(Perturbation):
    """A transformer's photo with some of its tokens: each mask keeps those where the mean of like channels is largest.

    The channels of all blocks are put together around means; each mean is a map of tokens.
    """

    samples: int
    share: float
    seed: int

    of_tokens = True
    needs = frozenset({BlockTokens()})

    def __str__(self) -> str:
        return f"{self.share:.0%} of the tokens"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return self.samples

    def drawn(self, evidence: Evidence) -> list[torch.Tensor]:
        """Of each image, which tokens its masks keep ``(K, h, w)``."""
        blocks = evidence[BlockTokens()]
        sizes = {tuple(block.shape[2:]) for block in blocks}
        if len(blocks) < 2 or len(sizes) != 1:
            found = "none" if not blocks else f"{len(blocks)} with maps of {', '.join(map(str, sorted(sizes)))}"
            raise MethodError(
                f"tis must have at least two transformer blocks with the same tokens, got {found}; use it for vision "
                "transformers (ViT, DeiT), and rise otherwise"
            )
        return [self._of_image(torch.cat([block[image] for block in blocks])) for image in range(len(blocks[0]))]

    def _of_image(self, maps: torch.Tensor) -> torch.Tensor:
        centres = means(maps.flatten(1), self.samples, self.seed)
        kept = max(1, int(self.share * centres.shape[1]))
        found = torch.zeros_like(centres, dtype=torch.bool)
        found.scatter_(1, centres.topk(kept, dim=1).indices, value=True)
        return found.reshape(-1, *maps.shape[1:])

    def rows(self, evidence: Evidence) -> PerturbedRows:
        drawn = self.drawn(evidence)
        owners, numbers = interleaved([len(each) for each in drawn], evidence.inputs.device)

        def make(rows: torch.Tensor) -> torch.Tensor:
            pairs = zip(owners[rows].tolist(), numbers[rows].tolist(), strict=True)
            return torch.stack([drawn[image][number] for image, number in pairs])

        return PerturbedRows(owners, make)


@register
@dataclass(frozen=True)
class TIS(Method):
    r"""Run a transformer on samples of its tokens, and average the scores at each token over the samples that have it.

    A photo's tokens are left out after they were given their places, so the model sees fewer tokens, and no baseline.
    The channels of all blocks are put together by k-means; each centre, as a map of tokens, is a mask that keeps the
    share of tokens where it is largest. A token's value is :math:`\sum_i y_i m_i / \sum_i m_i`; 0 if no mask keeps it.

    Args:
        samples: how many masks, at most; there are no more than different channels.
        share: of the tokens that each mask keeps.
        score: explain the ``probability`` of the class, as published, or its ``logit``.
        seed: of the points where k-means begins.

    Returns:
        ``(N, h, w)``, one value for each patch, in units of the score.

    Englebert et al., "Explaining through Transformer Input Sampling", ICCV Workshops 2023. For transformers with a
    class token, or whose head takes the mean of the tokens, and with places that are added before the first block.

    >>> import explain
    >>> from torchvision.models import VisionTransformer
    >>> model = VisionTransformer(16, 4, 2, 2, 8, 16, num_classes=3)
    >>> explain.attribute(model, torch.rand(1, 3, 16, 16), TIS(samples=8), target=1).values.shape
    torch.Size([1, 4, 4])
    """

    samples: int = 1024
    share: float = 0.5
    score: Score = "probability"
    seed: int = 0

    name = "tis"
    about = "random subsets of a transformer's tokens, weighted by the score with only these"
    source = cited("englebert2023tis")
    family = ALTERED
    minimums: ClassVar[Mapping[str, float]] = {"samples": 1}
    only_for = "vision transformers"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.share < 1:
            raise MethodError(f"share of tis must be a number between 0 and 1, got {self.share}; 0.5 is usual")

    @property
    def _sampled(self) -> SampledTokens:
        return SampledTokens(self.samples, self.share, self.seed)

    @property
    def _scores(self) -> Attributions:
        return Attributions(self._sampled, ScoreOf(self.score), InOrder())

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({self._scores, BlockTokens()})

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        drawn, scores = self._sampled.drawn(evidence), evidence[self._scores]
        owners, _ = interleaved([len(each) for each in drawn], scores.device)
        found = []
        for image, keep in enumerate(drawn):
            seen = keep.to(scores).sum(0)
            total = torch.einsum("k,khw->hw", scores[owners == image], keep.to(scores))
            found.append(torch.where(seen > 0, total / seen.clamp(min=1), 0))
        return torch.stack(found)

    def outcome(self, evidence: Evidence) -> Outcome:
        counts = [len(each) for each in self._sampled.drawn(evidence)]
        return Outcome(samples=torch.tensor(counts, device=evidence.inputs.device))
