"""A check and its result; the checks of a map: does it depend on model and class, is it faithful, is it stable?"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F

from explain._utils.errors import MetricError
from explain._utils.random_numbers import normal, permutation, seeded
from explain.baselines import Mean
from explain.baselines.base import Baseline
from explain.methods.base import over_all
from explain.metrics.base import Metric, MetricInput, MetricResult, Score, ScoreMetric, ScoreRequest, cover_ranks
from explain.metrics.faithfulness import share_counts
from explain.metrics.maps import Maps, Sign, Similarity, correlation, similarity
from explain.metrics.randomisation import zero_everywhere
from explain.metrics.variants import ModelContext, ReattributionMetric, Variant, VariantResult

MARKS = {True: "✓", False: "✗", None: "–"}

SIMILAR = 0.5**0.5
"""The correlation from which on two maps share half of their variation, or more."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of one map.

    ``figure`` is what was measured, and NaN where nothing could be; ``passed`` is None where the check is not
    applicable, as of the class where a model has only one; ``reason`` says in one line why it passed or failed.

    >>> print(CheckResult("faithful", "faithful", 0.025, True, "no other position is as good"))
    ✓ faithful 0.025: no other position is as good
    """

    check: str
    word: str
    figure: float
    passed: bool | None
    reason: str

    @property
    def mark(self) -> str:
        """✓, ✗, or – where the check is not applicable."""
        return MARKS[self.passed]

    @property
    def shown(self) -> str:
        """The figure, rounded."""
        if math.isnan(self.figure):
            return "–"
        return f"{self.figure:.2f}" if abs(self.figure) >= 0.1 else f"{self.figure:.3f}"

    def to_dict(self) -> dict[str, Any]:
        figure = None if math.isnan(self.figure) else self.figure
        return {"passed": self.passed, "figure": figure, "reason": self.reason}

    def __str__(self) -> str:
        return f"{self.mark} {self.word} {self.shown}: {self.reason}"


@dataclass(frozen=True)
class Check(Metric):
    """A metric with a threshold: a frozen dataclass, which is a `ScoreMetric` or a `ReattributionMetric` as well.

    ``word`` names it under a picture; ``fewest`` are the options of the fewest runs.
    """

    word: ClassVar[str] = ""
    fewest: ClassVar[Mapping[str, int]] = {}

    def not_applicable(self, context: ModelContext, data: MetricInput) -> str:
        """Why it is not applicable here; empty if it is."""
        return ""

    @property
    def reduced(self) -> Self:
        """The same check with the fewest runs, for methods that take long."""
        return replace(self, **self.fewest)

    def decide(self, result: MetricResult) -> CheckResult:
        """Compare the figure of the first image with the threshold."""
        raise NotImplementedError

    def result(self, figure: float, passed: bool | None, reason: str) -> CheckResult:
        return CheckResult(self.name, self.word, figure, passed, reason)


@dataclass(frozen=True)
class DependsOnClass(Check, ReattributionMetric):
    """How similar the map is to those of classes far down the ranking.

    They are taken at equal distances from its lower half, and not from its top: the maps of a tabby and of an Egyptian
    cat should be similar. Of a region or a box, they are other classes in the same place. The figure is the mean
    similarity. Less is better.

    Args:
        classes: how many.
        most: the similarity from which on the map fails; at 0.71, half of a map's variation is that of the other.
        similarity, sign: as for `MPRT`.

    Sixt et al., "When Explanations Lie", ICML 2020, for comparing the maps of classes.

    >>> DependsOnClass(classes=2).better
    'less'
    """

    classes: int = 3
    most: float = SIMILAR
    similarity: Similarity = "spearman"
    sign: Sign = "own"

    name = "depends_on_class"
    word = "class"
    units = "similarity"
    better = "less"
    minimums: ClassVar = {"classes": 1}
    fewest: ClassVar = {"classes": 1}

    def not_applicable(self, context: ModelContext, data: MetricInput) -> str:
        if context.ranking is None:
            return "the target is no class, or the output has no scores of other classes for it to be compared with"
        return "" if context.ranking[0].shape[1] > 1 else "the model has one class only"

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        if context.ranking is None or context.ranking[0].shape[1] < 2:
            raise MetricError(f"target must be one of several classes for {self.name}; leave that check out")
        scores, classes = context.ranking
        scores = scores.scatter(1, classes[:, None], torch.inf)
        others = scores.sort(dim=1, descending=True, stable=True).indices
        for rank in far_down(others.shape[1] - 1, self.classes):
            yield Variant(("ranked", rank), classes=others[:, rank])

    def compare(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        similar = similarity(self.similarity, data.maps.per_pixel(self.sign), found.maps.per_pixel(self.sign))
        return torch.stack([similar.double(), zero_everywhere(found).double()], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        return MetricResult(numbers[..., 0].mean(1), parts={"alike": numbers[..., 0], "zeros": numbers[..., 1]})

    def decide(self, result: MetricResult) -> CheckResult:
        figure, count = float(result.value[0]), result.parts["alike"].shape[1]
        others = f"the maps of {count} classes" if count > 1 else "the map of a class"
        reason = f"similarity {figure:.2f} to {others} far down the ranking{_zeros(result)}"
        return self.result(figure, figure < self.most, f"{reason} (must be below {self.most:.2g})")


def far_down(others: int, count: int) -> list[int]:
    """Positions at equal distances in the lower half of a ranking with ``others`` classes after the first.

    >>> far_down(999, 3), far_down(2, 3), far_down(1, 3)
    ([583, 750, 916], [2], [1])
    """
    first = others / 2
    return sorted({min(others, 1 + int(first + (number + 0.5) / count * first)) for number in range(count)})


LEAST = 0.05
"""Details are compared where both maps are, on average around, at least this share as strong as at their strongest."""


@dataclass(frozen=True)
class DependsOnModel(Check, ReattributionMetric):
    """How similar the map is to those of copies of the model whose upper layers are randomised.

    We reinitialise the upper half of the layers with weights, in the order in which a forward pass uses them, each as
    its class does it, normalisations with their statistics; the model's prediction is lost then. Maps that show what
    the first layers detect, such as edges, do not change. (If all layers were reinitialised, the first filters would
    detect something else, and such a map would seem to depend on the model.)

    Two things are compared, and the figure is the larger one. **Places**: the mean similarity over the copies. For maps
    with a value for each pixel, also **details**: the absolute correlation of values divided by the mean magnitude
    around them, where both maps are strong, at its largest over the copies. Multiplied by a coarse map, or by minus
    one, a map has the same details. The mean similarity among the copies' maps is in ``parts`` ("among"). A map that is
    zero everywhere is similar to no other. Less is better.

    Args:
        copies: how many.
        most: the figure from which on the map fails; at 0.71, half of a map's variation is that of the other.
        similarity, sign: of places, as for `MPRT`.
        seed: of the weights.

    Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018, whose cascade from the output this is halfway.

    >>> DependsOnModel().copies
    3
    """

    copies: int = 3
    most: float = SIMILAR
    similarity: Similarity = "spearman"
    sign: Sign = "own"
    seed: int = 0

    name = "depends_on_model"
    word = "model"
    units = "similarity"
    better = "less"
    minimums: ClassVar = {"copies": 1}
    fewest: ClassVar = {"copies": 1}

    def not_applicable(self, context: ModelContext, data: MetricInput) -> str:
        return "" if context.randomised.layers else "the model has no weights that could be others"

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        layers = context.randomised.layers
        upper = layers[len(layers) // 2 :]
        for seed in range(self.seed * 1009, self.seed * 1009 + self.copies):
            yield Variant(("model", frozenset(upper), seed, ()), model=partial(context.randomised.of, upper, seed))

    def compare(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        """The similarity of details, and the map of the copy: ``(N, 1 + H * W)``."""
        details = same_details(data.maps, found.maps, self.sign)
        return torch.cat([details[:, None], found.maps.per_pixel(self.sign).flatten(1).double()], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        details = numbers[..., 0].amax(1)
        others = numbers[..., 1:].reshape(*numbers.shape[:2], *data.size).unbind(1)
        own = data.maps.per_pixel(self.sign).double()
        places = torch.stack([similarity(self.similarity, own, other) for other in others], 1).mean(1)
        pairs = [similarity(self.similarity, one, other) for one, other in combinations(others, 2)]
        among = torch.stack(pairs, 1).mean(1) if pairs else torch.full_like(places, torch.nan)
        parts = {"places": places, "details": details, "among": among, "zeros": (numbers[..., 1:] == 0).all(2)}
        return MetricResult(torch.where(details > places, details, places), parts=parts)

    def decide(self, result: MetricResult) -> CheckResult:
        figure, among = float(result.value[0]), float(result.parts["among"][0])
        kind = " in details" if result.parts["details"][0] > result.parts["places"][0] else ""
        copies = result.parts["zeros"].shape[1]
        others = f"the maps of {copies} copies" if copies > 1 else "the map of a copy"
        threshold = f"must be below {self.most:.2g}" + ("" if math.isnan(among) else f"; these are {among:.2f} alike")
        reason = f"similarity {figure:.2f}{kind} to {others} with random upper layers{_zeros(result)} ({threshold})"
        return self.result(figure, figure < self.most, reason)


def _zeros(result: MetricResult) -> str:
    """How many of the other maps are zero everywhere, which count as not similar."""
    zeros = int(result.parts["zeros"][0].sum())
    return f", {zeros} of which are zero everywhere" if zeros else ""


def same_details(one: Maps, other: Maps, sign: Sign) -> torch.Tensor:
    """The similarity of the details of two maps, where both are strong: ``(N,)``, NaN for maps of a layer.

    >>> values = torch.randn(1, 1, 40, 40, dtype=torch.float64)
    >>> ramp = torch.linspace(1, 3, 40, dtype=torch.float64)
    >>> same_details(Maps("a", values, (40, 40)), Maps("b", -values * ramp, (40, 40)), "own") > 0.99
    tensor([True])
    """
    maps = [each.per_pixel(sign).double() for each in (one, other)]
    if one.values.ndim == 3 or other.values.ndim == 3:
        return torch.full_like(maps[0][:, 0, 0], torch.nan)
    around = [_around(each.abs()) for each in maps]
    both = torch.stack([each > LEAST * each.flatten(1).amax(1)[:, None, None] for each in around]).all(0)
    ratios = [each / torch.where(mean > 0, mean, 1) for each, mean in zip(maps, around, strict=True)]
    pairs = ([each[where][None] for each in (a, b)] for a, b, where in zip(*ratios, both, strict=True))
    found = [correlation(*pair) if pair[0].numel() else maps[0].new_zeros(1) for pair in pairs]
    return torch.cat(found).nan_to_num(0).abs()


def _around(maps: torch.Tensor) -> torch.Tensor:
    """The mean around each pixel, in a square of a twentieth of the shorter side."""
    side = max(3, round(min(maps.shape[1:]) / 20) // 2 * 2 + 1)
    return F.avg_pool2d(maps[:, None], side, stride=1, padding=side // 2, count_include_pad=False)[:, 0]


@dataclass(frozen=True)
class Faithful(Check, ScoreMetric):
    r"""p-value of insertion less deletion among those of the same map laid elsewhere.

    Does the map find the evidence better than copies of it that are rolled, flipped and turned?

    What counts is insertion minus deletion,
    :math:`\frac{1}{|Q|}\sum_q f(\mathrm{top}_q) - f(x \setminus \mathrm{top}_q)`: the score with nothing but the share
    q of the photo that the map ranks highest, less that without it. A copy has the same values, as sparse and as
    blurred, in other places. The figure is the p-value of a permutation test, :math:`p = (1 + k) / (1 + n)`, where k of
    the n copies are at least as good. Less is better.

    Copies in the same place, such as the flips of a blob in the middle, count as well: ``parts`` has the "overlap" of
    each with the map, from 0 to 1. Without them, a map with a random location could pass.

    The copies are drawn from the group of all rolls by thirds of the height and width, with all flips and, of square
    photos, turns, so that a map with a uniformly random location passes with a probability of at most ``level``.

    Args:
        copies: n, at most how many there are.
        percentiles: Q, in per cent.
        baseline: what replaces the pixels that are not shown.
        score: the target's own "logit", or "probability".
        level: the largest p-value that passes.
        sign: how values become one number for each pixel.
        seed: of the draw, and of the order of equal values.

    Phipson and Smyth, "Permutation P-values Should Never Be Zero", 2010, for the test; insertion and deletion as in
    Petsiuk et al., BMVC 2018.

    >>> Faithful().better
    'less'
    """

    copies: int = 39
    percentiles: tuple[float, ...] = (25, 50)
    baseline: Baseline = field(default_factory=Mean)
    score: Score = "logit"
    level: float = 0.05
    sign: Sign = "own"
    seed: int = 0

    name = "faithful"
    word = "faithful"
    units = "p-value"
    better = "less"
    minimums: ClassVar = {"copies": 1, "level": 0}
    below = {"percentiles": 100, "level": 1}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level * (1 + self.copies) < 1:
            got = f"{self.level:g} with {self.copies} copies"
            raise MetricError(f"level of faithful must be at least 1 / (1 + copies), got {got}; give more, at most 71")

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        counts, own = share_counts(data, self.percentiles), data.ranks(self.sign, self.seed)
        start, end = counts + [0] * len(counts), [data.pixels] * len(counts) + counts  # shown alone, and covered
        copies = [own, *(placed(own, placement) for placement in self.placements(data.size))]
        return [cover_ranks(ranks, start, end, self.baseline, self.score) for ranks in copies]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        half = len(self.percentiles)
        each = torch.stack([found[:, :half].mean(1) - found[:, half:].mean(1) for found in scores], 1)
        better = (each[:, 1:] >= each[:, :1]).sum(1)
        copies = each.shape[1] - 1
        unchanged = (data.loss(self.score, torch.cat(list(scores), 1)) == 0).all(1)
        value = data.undefined(self, (1 + better.double()) / (1 + copies), unchanged, UNCHANGED)
        own = data.ranks(self.sign, self.seed)
        tops = torch.stack([own < count for count in share_counts(data, self.percentiles)])  # (Q, N, H, W)
        others = (placed(tops.flatten(0, 1), each).reshape(tops.shape) for each in self.placements(data.size))
        overlap = [((other & tops).flatten(2).sum(2) / tops.flatten(2).sum(2)).mean(0) for other in others]
        parts = {"better": better, "own": each[:, 0], "copies": each[:, 1:]}
        return MetricResult(value, parts={**parts, "overlap": torch.stack(overlap, 1)})

    def decide(self, result: MetricResult) -> CheckResult:
        figure, better, parts = float(result.value[0]), int(result.parts["better"][0]), result.parts
        copies = parts["copies"].shape[1]
        if math.isnan(figure):
            return self.result(figure, None, UNCHANGED)
        most = int(self.level * (1 + copies) + 1e-9) - 1
        if most < 0:  # a photo that is no square has fewer placements
            return self.result(figure, None, f"{copies} places are too few for a p-value of {self.level:g}")
        near = int(((parts["copies"] >= parts["own"][:, None]) & (parts["overlap"] > 0.5))[0].sum())
        overlap = f"; {near} of these share more than half of the map's place" if near else ""
        reason = f"{better} of {copies} copies of the map in other places explain the score at least as well"
        return self.result(figure, better <= most, f"{reason} (at most {most} may){overlap}")

    def placements(self, size: tuple[int, int]) -> "list[Placement]":
        """A draw from all placements but the map's own."""
        known = all_placements(size)
        return [known[number] for number in permutation(len(known), self.seed)[: self.copies].tolist()]


UNCHANGED = "to cover the photo, or parts of it, does not change the score"

Placement = tuple[int, bool, float, float]
"""How a copy is placed: quarter turns, whether it is flipped, and how far it is rolled down and to the right, in shares
of the height and the width."""

ORIGINAL: Placement = (0, False, 0.0, 0.0)


def all_placements(size: tuple[int, int]) -> list[Placement]:
    """All placements but the map's own: rolls by thirds, flips, and turns, by quarters if the photo is square.

    With the map's own, they are a group if 3 divides the sides: two placements in sequence are another one of them. For
    other sides they are a group to within a pixel.

    >>> len(all_placements((224, 224))), len(all_placements((224, 300)))
    (71, 35)
    """
    turns, thirds = range(4) if size[0] == size[1] else (0, 2), (0.0, 1 / 3, 2 / 3)
    return list(product(turns, (False, True), thirds, thirds))[1:]


def placed(maps: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Place maps ``(N, H, W)``.

    >>> placed(torch.tensor([[[1, 2, 3]]]), (0, False, 0.0, 1 / 3))
    tensor([[[3, 1, 2]]])
    """
    turns, flipped, down, across = placement
    found = torch.rot90(maps, turns, (1, 2))
    found = found.flip(2) if flipped else found
    return found.roll((round(down * found.shape[1]), round(across * found.shape[2])), (1, 2))


def with_noise(images: torch.Tensor, sigma: float, seed: int) -> torch.Tensor:
    """Add normal noise; ``sigma`` is its deviation, relative to the range of the photo's values."""
    return images + sigma * span(images) * normal(images.shape[1:], seeded(seed)).to(images)


def brightened(images: torch.Tensor, by: float) -> torch.Tensor:
    """Raise all values by a share of their range."""
    return images + by * span(images)


def with_contrast(images: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply each channel's distance from its mean by a factor."""
    mean = images.mean((2, 3), keepdim=True)
    return mean + factor * (images - mean)


def span(images: torch.Tensor) -> torch.Tensor:
    """The range of each photo's values ``(N, 1, 1, 1)``."""
    least, most = images.flatten(1).aminmax(dim=1)
    return over_all(most - least, images)


@dataclass(frozen=True)
class Stable(Check, ReattributionMetric):
    """Similarity of the map to those of changed photos with the same scores.

    The photo gets noise, more or less light, and more or less contrast. Changes that move the class's probability by
    more than ``slack`` (without classes, the score by more than this share of it) do not count. The figure is the mean
    similarity over the others. More is better.

    Args:
        noises: deviations of the noise, relative to the range of the photo's values.
        light: shares of that range by which all values are raised.
        contrast: factors for the distance of values from their channel's mean.
        slack: how far the scores may move.
        least: the smallest similarity that passes.
        similarity, sign: as for `MPRT`.
        seed: of the noise.

    Ghorbani et al., "Interpretation of Neural Networks is Fragile", AAAI 2019.

    >>> Stable().better
    'more'
    """

    noises: tuple[float, ...] = (0.005, 0.01)
    light: tuple[float, ...] = (-0.03, 0.03)
    contrast: tuple[float, ...] = (0.95, 1.05)
    slack: float = 0.05
    least: float = SIMILAR
    similarity: Similarity = "spearman"
    sign: Sign = "own"
    seed: int = 0

    name = "stable"
    word = "stable"
    units = "similarity"
    minimums: ClassVar = {"slack": 0}

    @property
    def reduced(self) -> Self:
        return replace(self, noises=self.noises[-1:], light=(), contrast=())

    @property
    def changes(self) -> list[partial[torch.Tensor]]:
        """Functions of the photos."""
        seeds = range(self.seed * 1009, self.seed * 1009 + len(self.noises))
        noises = [partial(with_noise, sigma=sigma, seed=seed) for sigma, seed in zip(self.noises, seeds, strict=True)]
        light = [partial(brightened, by=by) for by in self.light]
        return [*noises, *light, *(partial(with_contrast, factor=factor) for factor in self.contrast)]

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        for change in self.changes:
            yield Variant(("changed", change.func, *change.keywords.values()), partial(change, context.images))

    def compare(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        alike = similarity(self.similarity, data.maps.per_pixel(self.sign), found.maps.per_pixel(self.sign))
        if data.probability is None or data.classes is None or found.logits is None:
            least = torch.finfo(data.target_score.dtype).tiny
            moved = (found.score - data.target_score).abs() / data.target_score.abs().clamp(min=least)
        else:
            moved = (data.outputs.of_classes(found.logits, data.classes) - data.probability).abs()
        return torch.stack([alike.double(), moved.double()], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        alike, still = numbers[..., 0], numbers[..., 1] <= self.slack
        value = torch.where(still, alike, 0).sum(1) / still.sum(1)  # NaN where no change counts
        least = torch.where(still, alike, torch.inf).amin(1)
        return MetricResult(value, parts={"alike": alike, "counted": still.sum(1), "least": least})

    def decide(self, result: MetricResult) -> CheckResult:
        figure, counted = float(result.value[0]), int(result.parts["counted"][0])
        of = result.parts["alike"].shape[1]
        if not counted:
            return self.result(figure, None, "every small change of the photo moved the scores")
        words = f"similarity {figure:.2f} over {counted} of {of} small changes that left the scores alone"
        return self.result(figure, figure >= self.least, f"{words} (must be at least {self.least:.2g})")


def default_checks(seed: int = 0) -> tuple[Check, ...]:
    """The checks of every map, in this order.

    >>> [check.word for check in default_checks()]
    ['model', 'class', 'faithful', 'stable']
    """
    return DependsOnModel(seed=seed), DependsOnClass(), Faithful(seed=seed), Stable(seed=seed)
