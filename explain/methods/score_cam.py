"""Masks that a network's own feature maps or tokens make: Score-CAM and its relatives, ViT-CX,
transformer input sampling; and feature maps taken away (Ablation-CAM)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence

from explain._utils.errors import MethodError
from explain._utils.random_numbers import permutation
from explain.baselines.replacements import to_unit
from explain.engine import Activations, Evidence, Need, PerturbedRows
from explain.engine.needs import BlockTokens
from explain.engine.perturbations import Scores, one_sample_each, samples_of
from explain.layers.placement import Placement, draw
from explain.methods.base import Outcome, Style, over_all, ratio, register
from explain.methods.cam import unless_rounding, weighted_maps
from explain.methods.estimates import ScoredSamplesMethod
from explain.methods.masking import Score
from explain.methods.occlusion import enlarging
from explain.methods.path import PathStart
from explain.methods.wrappers import noises, span


class ScoreWeightedMethod(ScoredSamplesMethod):
    """A method that weighs each feature map by the softmax of the scores of images that it masks,
    enlarged and scaled to [0, 1]; a subclass may run it several ``times``."""

    looks_at = frozenset({Activations()})
    words = "the photo seen through each map"

    @property
    def times(self) -> int:
        return 1

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        """How many perturbed inputs each image has at most: one for each channel and time."""
        return channels * self.times

    def seen(self, evidence: Evidence) -> torch.Tensor:
        """Which feature maps ``(N, C)`` mask the image in a run: those that are not constant.
        `perturbed` makes inputs for these alone.
        """
        least, most = evidence.activations.flatten(2).aminmax(dim=2)
        return most > least

    def masked(
        self,
        photos: torch.Tensor,
        maps: torch.Tensor,
        numbers: torch.Tensor,
        placement: Placement | None,
    ) -> torch.Tensor:
        """Mask images ``(b, C, H, W)`` with feature maps ``(b, h, w)``, drawn on them and brought
        to [0, 1]; ``numbers`` ``(b,)`` say which of the runs of a map it is.
        """
        return photos * masks(maps, tuple(photos.shape[2:]), placement)

    def perturbed(self, evidence: Evidence) -> PerturbedRows:
        """The masked images, for each feature map that `seen` names ``times`` copies one after the
        other.
        """
        x = evidence.inputs
        a = evidence.activations
        placement = evidence.placement
        channels = [
            is_seen.nonzero()[:, 0].to(x.device).repeat_interleave(self.times)
            for is_seen in self.seen(evidence)
        ]

        def through_maps(
            images: torch.Tensor, channel: torch.Tensor, numbers: torch.Tensor
        ) -> torch.Tensor:
            """The masked images of these images and ``channel`` numbers ``(b,)``; an input without
            pixels beside the image stays as it is.
            """
            if not evidence.size:  # an input beside the image that is no picture
                return x[images]
            # where the cells look in each of these images, which may differ
            places = placement and placement.converted(lambda centres: centres[images.cpu()])
            # the runs of a map follow each other: the remainder says which one it is
            return self.masked(x[images], a[images, channel], numbers % self.times, places)

        return samples_of_items(channels, through_maps)

    @property
    def needs(self) -> frozenset[Need[Any]]:
        """As for all perturbation methods, and the score of a blank image, for maps that mask
        everything.
        """
        return super().needs | {Scores(PathStart())}

    def map(self, evidence: Evidence, scores: Sequence[torch.Tensor]) -> torch.Tensor:
        """The positive part ``(N, h, w)`` of the feature maps' sum, weighted by the softmax over
        channels of their mean scores; a map that masks everything has a blank image's score.
        """
        seen = self.seen(evidence)
        map_scores = evidence[Scores(PathStart())][:, None].repeat(1, seen.shape[1])
        map_scores[seen] = torch.cat(list(scores)).reshape(-1, self.times).mean(1)
        return weighted_maps(map_scores.softmax(1), evidence, relu=True)

    def outcome(self, evidence: Evidence) -> Outcome:
        return Outcome()


@register
class ScoreCAM(ScoreWeightedMethod):
    r"""Feature maps weighted by the score of the photo masked by them.

    Weigh each feature map by the score of the photo seen through it.

    The map, enlarged to the input and brought to [0, 1], masks the input; the softmax over all
    channels of the scores that result are the weights: :math:`\mathrm{ReLU}\bigl(\sum_k
    \mathrm{softmax}_k(y(x \odot M_k))\,A^k\bigr)`. (The paper subtracts the score of a black image
    from each, which a softmax does not see.) A map that is constant masks everything. The cost is
    one forward pass for each channel.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations.

    Wang et al., "Score-CAM: Score-Weighted Visual Explanations", CVPR Workshops 2020
    (arXiv:1910.01279).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> _ = [torch.nn.init.uniform_(weight) for weight in model.parameters()]
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), ScoreCAM(), target=1, layer="0"
    ... ).values.shape
    torch.Size([1, 6, 6])
    """


@register
class SSCAM(ScoreWeightedMethod):
    """Score-CAM averaged over noise.

    Score-CAM with each score averaged over noise, in the feature map or in the masked input.

    Args:
        noise: where it is added: ``maps`` before they are enlarged and normalised, or ``input``
            behind the mask.
        samples: how many; the paper takes 35.
        sigma: its standard deviation relative to the range of the map or input. The paper's is 2 in
            absolute terms, which means something else for every network.
        seed: of the noise; every image and channel gets the same.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations.

    Wang et al., "SS-CAM: Smoothed Score-CAM for Sharper Visual Feature Localization", 2020
    (arXiv:2006.14255).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> _ = [torch.nn.init.uniform_(weight) for weight in model.parameters()]
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), SSCAM(samples=2), target=1, layer="0"
    ... ).values.shape
    torch.Size([1, 6, 6])
    """

    noise: Literal["maps", "input"] = "maps"
    samples: int = 10
    sigma: float = 0.15
    seed: int = 0

    minimums = {"samples": 1, "sigma": 0}

    @property
    def times(self) -> int:
        return self.samples

    def seen(self, evidence: Evidence) -> torch.Tensor:
        seen = super().seen(evidence)
        return torch.ones_like(seen) if self.noise == "input" else seen

    def masked(
        self,
        photos: torch.Tensor,
        maps: torch.Tensor,
        numbers: torch.Tensor,
        placement: Placement | None,
    ) -> torch.Tensor:
        """Mask the photos with noise added: to the maps before they are brought to [0, 1], or to
        the masked photos. Noise ``number`` is the same for all channels.
        """
        like = maps[0] if self.noise == "maps" else photos[0]
        added = self.sigma * noises(self.seed, numbers, like)
        if self.noise == "maps":
            return super().masked(photos, maps + span(maps) * added, numbers, placement)
        return super().masked(photos, maps, numbers, placement) + span(photos) * added


@register
class ISCAM(ScoreWeightedMethod):
    r"""Score-CAM averaged while the mask fades in.

    Score-CAM with each score averaged while the mask fades in.

    The score of a channel is :math:`\frac1n\sum_{i=1}^n y(\tfrac in\,x \odot M_k)`.

    Args:
        steps: the number n of masks.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations.

    Naidu et al., "IS-CAM: Integrated Score-CAM for axiomatic-based explanations", 2020
    (arXiv:2010.03023).

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> _ = [torch.nn.init.uniform_(weight) for weight in model.parameters()]
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), ISCAM(steps=2), target=1, layer="0"
    ... ).values.shape
    torch.Size([1, 6, 6])
    """

    steps: int = 10

    minimums = {"steps": 1}

    @property
    def times(self) -> int:
        return self.steps

    def masked(
        self,
        photos: torch.Tensor,
        maps: torch.Tensor,
        numbers: torch.Tensor,
        placement: Placement | None,
    ) -> torch.Tensor:
        """Mask the photos, and fade them in: run ``i`` of n has the masked photo times ``(i + 1) /
        n``.
        """
        return super().masked(photos, maps, numbers, placement) * over_all(
            (numbers + 1).to(photos) / self.steps, photos
        )


@register
class AblationCAM(ScoredSamplesMethod):
    r"""Feature maps weighted by the drop of the score without them.

    Weigh each feature map by what the score loses without it: :math:`w_k = (y - y_{\setminus k}) /
    y`.

    The network is run once up to the layer and, from there on, for all ablations together. A map
    that is zero is not run: it takes nothing away.

    Args:
        relu: keep the positive part, as published.

    Returns:
        ``(N, h, w)`` at the layer's resolution, in units of the activations. A negative score
        reverses all signs, as the formula says, and is warned of: what supports the target is
        then negative.

    Desai and Ramaswamy, "Ablation-CAM", WACV 2020.

    >>> import explain, torch
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    ... )
    >>> _ = [torch.nn.init.uniform_(weight) for weight in model.parameters()]
    >>> explain.attribute(
    ...     model, torch.rand(1, 3, 8, 8), AblationCAM(), target=1, layer="0"
    ... ).values.shape
    torch.Size([1, 6, 6])
    """

    relu: bool = True

    by_score = True
    alters_layer = True
    looks_at = frozenset({Activations()})
    words = "the layer's maps without one of them"

    @property
    def style(self) -> Style:
        return "heat" if self.relu else "signed"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return channels

    def perturbed(self, evidence: Evidence) -> PerturbedRows:
        """The layer's feature maps ``(b, C, h, w)`` with one channel set to zero, one input for
        each channel that is not zero already.
        """
        a = evidence.activations

        def ablated(images: torch.Tensor, channel: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            """The feature maps for these images and ``channel`` numbers ``(b,)``: new tensors,
            which the network may overwrite.
            """
            # copies whole maps, where indexing copies value by value
            maps = a.index_select(0, images)
            maps[torch.arange(len(images), device=images.device), channel] = 0
            return maps

        return samples_of_items([is_alive.nonzero()[:, 0] for is_alive in _alive(a)], ablated)

    def map(self, evidence: Evidence, scores: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make the map of `AblationCAM`: sum the feature maps, each weighted by the share of the
        score that is lost without it: ``(N, h, w)``. A channel that was zero already keeps the
        score. Drops that are rounding errors count as 0.
        """
        a = evidence.activations
        # differences are taken in one precision
        score = evidence[self.whole][:, None]
        without = score.repeat(1, a.shape[1]).to(a.dtype)
        without[_alive(a)] = torch.cat(list(scores)).to(a.dtype)
        drops = unless_rounding(score - without, score)
        return weighted_maps(ratio(drops, score.expand_as(without)), evidence, relu=self.relu)

    def outcome(self, evidence: Evidence) -> Outcome:
        return Outcome()


def samples_of_items(
    items: Sequence[torch.Tensor],
    build: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
) -> PerturbedRows:
    """One perturbed input for each item ``(K, ...)`` of each image, K may differ; ``build`` makes
    them from the images' numbers ``(b,)``, the items ``(b, ...)`` and their numbers ``(b,)``.
    """
    padded = pad_sequence(list(items), batch_first=True)
    return samples_of(
        [len(image_items) for image_items in items],
        padded.device,
        lambda images, numbers: build(images, padded[images, numbers], numbers),
    )


def masks(
    maps: torch.Tensor, size: tuple[int, ...], placement: Placement | None = None
) -> torch.Tensor:
    """Draw feature maps ``(b, h, w)`` on images of ``size`` and bring each to [0, 1]: masks ``(b,
    1, H, W)``; a constant map gives a mask of zeros."""
    return to_unit(draw(maps[:, None], size, placement))


def _alive(maps: torch.Tensor) -> torch.Tensor:
    """Which feature maps ``(N, C)`` are not zero everywhere."""
    return (maps != 0).flatten(2).any(2)


TOGETHER = 64  # masks that are enlarged at a time


def clustered(
    maps: torch.Tensor,
    size: tuple[int, ...],
    distance: float,
    placement: Placement | None = None,
) -> torch.Tensor:
    """Sums ``(K, h, w)`` of one image's feature maps ``(C, h, w)`` whose masks have a cosine above
    1 - ``distance`` (complete linkage); without constant maps. Masks are drawn linearly, so that
    products of the small maps give those of the large masks.
    """
    extremes = [
        draw(batch[:, None], size, placement, smooth=False).flatten(1).aminmax(dim=1)
        for batch in torch.split(maps, TOGETHER)
    ]
    least = torch.cat([low for low, _ in extremes]).double()
    spans = torch.cat([high for _, high in extremes]).double() - least
    varies = spans > 0
    if not bool(varies.any()):
        return maps[:0].double()
    maps = maps[varies].double()
    least = least[varies, None]
    height, width = maps.shape[1:]
    flat = maps.flatten(1)
    if placement is None or placement.is_even:
        along_height = enlarging(height, size[0]).to(maps)
        along_width = enlarging(width, size[1]).to(maps)
        # (C, h, w): each map enlarged, and brought back by the transpose
        drawn_twice = along_height.T @ along_height @ maps @ (along_width.T @ along_width)
        of_cells = torch.outer(along_height.sum(0), along_width.sum(0)).flatten()
        products = drawn_twice.flatten(1) @ flat.T
    else:  # each cell has a drawing of its own
        alone = torch.eye(height * width).to(maps).reshape(-1, 1, height, width)
        cells = draw(alone, size, placement, smooth=False).flatten(1)
        of_cells = cells.sum(1)
        products = flat @ (cells @ cells.T) @ flat.T
    # of_cells is what a cell of value 1 adds to the sum over the drawn map
    sums = (flat @ of_cells)[:, None]
    # of drawn maps less their least values: masks, but for the spans, which a cosine does not see
    shifted = products - least * sums.T - sums * least.T + (size[0] * size[1]) * least * least.T
    lengths = shifted.diagonal().sqrt()
    cosines = shifted / lengths[:, None] / lengths
    labels = complete_linkage(1 - cosines, distance).to(maps.device)
    clusters = maps.new_zeros((int(labels.max()) + 1, height, width))
    return clusters.index_add_(0, labels, maps / spans[varies, None, None])


@register
class ViTCX(ScoredSamplesMethod):
    r"""Clusters of a transformer's maps weighted by the score of the masked photo.

    Show the photo through clusters of a transformer's own maps, each weighted by what it makes the
    model say.

    Each channel of the layer's tokens, enlarged to the photo and brought to [0, 1], is a mask.
    Masks whose cosines are near to 1 are added up (complete linkage), and brought to [0, 1] again.
    A mask M has the weight
    :math:`y(x \odot M + z \odot (1 - M)) - y(x + z \odot (1 - M)) + y(x)` with noise z: what the
    model says of what is seen, less what the noise alone does to it. A pixel's value is the mean of
    the weights, weighted by the masks. (The authors' program divides by their number once more.)

    Args:
        distance: below which masks are put together: one minus their cosine.
        sigma: standard deviation of the noise, in units of the input.
        score: explain the ``probability`` of the class, as published, or its ``logit``.
        seed: of the noise; every image gets the same.

    Returns:
        ``(N, H, W)`` in units of the score. The paper's layer is the first normalisation of the
        last block.

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

    minimums = {"distance": 0, "sigma": 0}
    only_for = "vision transformers"
    looks_at = frozenset({Activations(), BlockTokens()})
    words = "the photo seen through clusters of maps, and with the noise of each"

    def tried(self) -> "ViTCX":
        """The method with all maps in one cluster: few runs that still show whether a network
        fits."""
        return replace(self, distance=4.0)  # one minus a cosine is 2 at most

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return 2 * channels

    def clusters(self, evidence: Evidence) -> list[torch.Tensor]:
        """The sums of the feature maps in each cluster ``(K, h, w)``, for each image. Worked out
        again in `map`, as it is for `perturbed`: a pure function of the evidence.
        """
        if len(evidence[BlockTokens()]) < 2:
            raise MethodError(
                "vitcx must have at least two transformer blocks, got fewer; take scorecam"
            )
        return [
            clustered(maps, evidence.size, self.distance, placement)
            for maps, placement in zip(evidence.activations, _placements(evidence), strict=True)
        ]

    def perturbed(self, evidence: Evidence) -> PerturbedRows:
        """Two photos for each cluster, one after the other: the photo seen through the mask with
        noise where it is covered, and the whole photo with that same noise. `map` takes their
        difference.
        """
        x = evidence.inputs
        if len(evidence.size) != 2:
            return one_sample_each(x)  # no image
        clusters = [maps.to(x).repeat_interleave(2, 0) for maps in self.clusters(evidence)]
        placement = evidence.placement

        def masked_or_noise(
            images: torch.Tensor, maps: torch.Tensor, numbers: torch.Tensor
        ) -> torch.Tensor:
            """The photos for cluster maps ``(b, h, w)``; even numbers are the masked photo, odd
            ones the whole photo with the noise.
            """
            # where the cells look in each of these images, which may differ
            places = placement and placement.converted(lambda centres: centres[images.cpu()])
            keep = masks(maps, evidence.size, places)
            added = noises(self.seed, numbers // 2, x[0])
            seen = torch.where((numbers % 2 == 0)[:, None, None, None], keep, 1)
            return x[images] * seen + self.sigma * added * (1 - keep)

        return samples_of_items(clusters, masked_or_noise)

    def map(self, evidence: Evidence, scores: Sequence[torch.Tensor]) -> torch.Tensor:
        """The map of `ViTCX` ``(N, H, W)``: the mean at each pixel of the clusters' weights (masked
        score less noisy score, plus the photo's), weighted by the masks."""
        values = []
        per_image = zip(
            self.clusters(evidence),
            scores,
            evidence[self.whole],
            _placements(evidence),
            strict=True,
        )
        for cluster_maps, sample_scores, photo_score, placement in per_image:
            # of each cluster, the masked photo and the one with the noise follow each other
            masked_scores, noise_scores = sample_scores.reshape(-1, 2).unbind(1)
            weights = masked_scores - noise_scores + photo_score
            values.append(
                weighted_mean(cluster_maps.to(photo_score), weights, evidence.size, placement)
            )
        return torch.stack(values)


def _placements(evidence: Evidence) -> list[Placement | None]:
    """The placement of the layer's map for each image."""
    placement = evidence.placement
    return [placement and placement[image] for image in range(len(evidence.inputs))]


def weighted_mean(
    maps: torch.Tensor,
    weights: torch.Tensor,
    size: tuple[int, ...],
    placement: Placement | None = None,
) -> torch.Tensor:
    """The mean of ``weights`` ``(K,)`` at each pixel ``(H, W)``, weighted by the masks of feature
    maps ``(K, h, w)``; 0 where no mask shows it. `TOGETHER` at a time, for the memory.
    """
    total = maps.new_zeros(size)
    seen = maps.new_zeros(size)
    for batch, batch_weights in zip(
        torch.split(maps, TOGETHER), torch.split(weights.to(maps), TOGETHER), strict=True
    ):
        keep = masks(batch, size, placement)[:, 0]
        total += torch.einsum("k,khw->hw", batch_weights, keep)
        seen += keep.sum(0)
    return ratio(total, seen)


@register
class TIS(ScoredSamplesMethod):
    r"""Random subsets of a transformer's tokens, weighted by the score with only these.

    Run a transformer on samples of its tokens, and average the scores at each token over the
    samples that have it.

    A photo's tokens are left out after they were given their places, so the model sees fewer
    tokens, and no baseline. The channels of all blocks are put together by k-means; each centre, as
    a map of tokens, is a mask that keeps the share of tokens where it is largest. A token's value
    is :math:`\sum_i y_i m_i / \sum_i m_i`; 0 if no mask keeps it.

    Args:
        samples: how many masks, at most; there are no more than different channels.
        share: of the tokens that each mask keeps.
        score: explain the ``probability`` of the class, as published, or its ``logit``.
        seed: of the points where k-means begins.

    Returns:
        ``(N, h, w)``, one value for each patch, in units of the score.

    Englebert et al., "Explaining through Transformer Input Sampling", ICCV Workshops 2023. For
    transformers with a class token, or whose head takes the mean of the tokens, and with places
    that are added before the first block.

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

    minimums = {"samples": 1}
    below = {"share": 1}
    only_for = "vision transformers"
    looks_at = frozenset({BlockTokens()})
    of_tokens = True

    @property
    def words(self) -> str:  # type: ignore[override]
        return f"{self.share:.0%} of the tokens"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return self.samples

    def tokens(self, evidence: Evidence) -> list[torch.Tensor]:
        """Which tokens each mask keeps: for each image ``(K, h, w)`` truth values, from k-means
        centres over the channels of all blocks; a mask keeps the ``share`` of the tokens where its
        centre is largest.
        """
        blocks = evidence[BlockTokens()]
        sizes = {tuple(block.shape[2:]) for block in blocks}
        if len(blocks) < 2 or len(sizes) != 1:
            listed_sizes = ", ".join(map(str, sorted(sizes)))
            got = f"{len(blocks)} with maps of {listed_sizes}" if blocks else "none"
            raise MethodError(
                f"tis must have two transformer blocks with the same tokens, got {got}; take rise"
            )
        tokens_of_images = []
        for maps in torch.cat(blocks, 1):
            centres = means(maps.flatten(1), self.samples, self.seed)
            kept = centres.topk(max(1, int(self.share * centres.shape[1])), dim=1).indices
            mask = torch.zeros_like(centres, dtype=torch.bool).scatter_(1, kept, value=True)
            tokens_of_images.append(mask.reshape((-1, *maps.shape[1:])))
        return tokens_of_images

    def perturbed(self, evidence: Evidence) -> PerturbedRows:
        return samples_of_items(self.tokens(evidence), lambda images, masks, numbers: masks)

    def map(self, evidence: Evidence, scores: Sequence[torch.Tensor]) -> torch.Tensor:
        """The map of `TIS` ``(N, h, w)``: the mean score of the masks that keep each token; 0 for a
        token that no mask keeps."""
        values = []
        for image_tokens, mask_scores in zip(self.tokens(evidence), scores, strict=True):
            keep = image_tokens.to(mask_scores)
            values.append(ratio(torch.einsum("k,khw->hw", mask_scores, keep), keep.sum(0)))
        return torch.stack(values)


ROUNDS = 100  # after which means need not stand still


def complete_linkage(distances: torch.Tensor, most: float) -> torch.Tensor:
    """Return the number of each point's cluster ``(n,)``: the nearest two are joined while the
    largest of the ``distances`` ``(n, n)`` between members is below ``most``."""
    apart: Any = distances.double().cpu().clone().fill_diagonal_(torch.inf).numpy()
    labels = torch.arange(len(apart))
    while apart.min(initial=torch.inf) < most:
        # row and column of the nearest two, of which the first one stands for both from now on
        first, other = sorted(divmod(int(apart.argmin()), len(apart)))
        labels[labels == other] = first
        joined = apart[[first, other]].max(0)  # the farther of both, which makes it complete
        joined[first] = torch.inf
        apart[first] = joined
        apart[:, first] = joined
        apart[other] = torch.inf
        apart[:, other] = torch.inf
    return torch.unique(labels, return_inverse=True)[1]  # type: ignore[no-any-return]


def means(points: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Return the centres ``(k, D)`` of at most ``count`` clusters of ``points`` ``(n, D)`` by
    Lloyd's k-means, from points drawn by the ``seed``; no more centres than different points."""
    distinct: torch.Tensor = torch.unique(points, dim=0)
    if len(distinct) <= count:
        return distinct
    beginnings = permutation(len(distinct), seed)[:count]
    centres: torch.Tensor = distinct[beginnings.to(points.device)]
    cluster = torch.full((len(points),), -1, device=points.device)  # none yet
    for _ in range(ROUNDS):
        nearest = torch.cdist(points, centres).argmin(1)
        if torch.equal(nearest, cluster):
            break
        cluster = nearest
        sums = torch.zeros_like(centres).index_add_(0, cluster, points)
        sizes = torch.bincount(cluster, minlength=count)[:, None]
        # a centre that has lost its points stays where it is
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    return centres
