"""A check and its result; the checks of a map: does it depend on model and class, is it faithful,
is it stable?"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F

from explain._utils.errors import MetricError
from explain._utils.random_numbers import normal, seeded
from explain.engine import Evidence
from explain.engine.perturbations import OneForEach
from explain.methods.wrappers import span
from explain.metrics.base import Metric, MetricInput, MetricResult, ScoreMetric, ScoreRequest
from explain.metrics.maps import Sign, Similarity
from explain.metrics.masked_scores import MaskedScores, RandomMasks, strata_of
from explain.metrics.variants import (
    ModelContext,
    RandomWeights,
    ReattributionMetric,
    Variant,
    VariantResult,
)

Answer = Literal["supported", "not shown", "contradicted", "not applicable"]

MARKS: Mapping[Answer, str] = {
    "supported": "✓",
    "not shown": "?",
    "contradicted": "✗",
    "not applicable": "–",
}

SIMILAR = 0.5**0.5
"""The correlation from which on two maps share half of their variation, or more."""

TINY = torch.finfo(torch.float64).tiny

LEVEL = 0.05
"""The largest p-value that passes."""


@dataclass(frozen=True)
class Claim:
    """What a map claims, in a form that can be tested by covering parts of the photo.

    What K masks cover of ``maps`` ``(m, H, W)`` predicts ``drops`` of the score, ``(K,)`` or ``(m,
    K)``. And the area that ``marked`` ``(H, W)`` marks matters to what it is a claim ``of``: the
    score of the target, that score more than those of other classes, or the score of a copy of the
    model. ``level`` is the largest p-value that shows it.
    """

    maps: torch.Tensor
    drops: torch.Tensor
    marked: torch.Tensor
    level: float
    of: Literal["target", "class", "copy"] = "target"


@dataclass(frozen=True)
class CoverResult:
    """What the tests of a map's claims say: random masks, and areas that the map marks.

    ``p_value`` and ``opposite`` (of the map with the other sign) are corrected for the number of
    tests. ``correlation`` is that of the map with what ``masks`` masks take from the score, and
    ``needed`` how many masks would probably do. ``controls`` is how many of ``of_controls`` maps of
    the photo alone mark an area that matters as much.
    """

    p_value: float = 1.0
    opposite: float = 1.0
    correlation: float = math.nan
    masks: int = 0
    needed: float = math.inf
    controls: int = 0
    of_controls: int = 0

    @property
    def is_typical(self) -> bool:
        """Whether half of the photo's own maps do as well, and more masks would not help."""
        typical = self.of_controls > 0 and self.controls >= self.of_controls / 2
        return typical and math.isinf(self.needed)

    @property
    def more(self) -> str:
        """What more masks would do, as a report says it."""
        if math.isinf(self.needed):
            return "more masks would hardly help"
        return f"about {round(self.needed, -1 if self.needed < 1000 else -2):.0f} would do"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of one map.

    ``figure`` is what decided, and NaN where nothing could be measured; ``symbol`` names it where
    it is no similarity. ``passed`` says whether the check supports the map, and is None where it is
    not applicable, as of the class where a model has only one. A map that does not pass is
    contradicted, or it is ``undecided``: the masks do not show it. ``reason`` says why in one line.

    >>> print(CheckResult("faithful", "faithful", 0.025, True, "no other position is as good", "p"))
    ✓ faithful p 0.025: no other position is as good
    """

    check: str
    word: str
    figure: float
    passed: bool | None
    reason: str
    symbol: str = ""
    undecided: bool = False

    @property
    def answer(self) -> Answer:
        """What the check says of the map."""
        if self.passed is None:
            return "not applicable"
        if self.passed:
            return "supported"
        return "not shown" if self.undecided else "contradicted"

    @property
    def mark(self) -> str:
        """✓ where it supports the map, ✗ where it contradicts it, ? where that is not shown, and –
        where it is not applicable."""
        return MARKS[self.answer]

    @property
    def shown(self) -> str:
        """The figure, rounded, after its symbol if it has one."""
        if math.isnan(self.figure):
            return "–"
        rounded = f"{self.figure:.2f}" if abs(self.figure) >= 0.1 else f"{self.figure:.3f}"
        return f"{self.symbol} {rounded}".lstrip()

    def to_dict(self) -> dict[str, Any]:
        figure = None if math.isnan(self.figure) else self.figure
        return {
            "answer": self.answer,
            "passed": self.passed,
            "figure": figure,
            "symbol": self.symbol,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        return f"{self.mark} {self.word} {self.shown}: {self.reason}"


@dataclass(frozen=True)
class Check(Metric):
    """A metric with a threshold: a frozen dataclass, which is a `ScoreMetric` or a
    `ReattributionMetric` as well.

    ``word`` names it under a picture; ``fewest`` are the options of the fewest runs. ``advice`` is
    what to do about maps that it does not support; the methods in ``suggested`` are put into its
    braces.
    """

    word: ClassVar[str] = ""
    fewest: ClassVar[Mapping[str, int]] = {}
    advice: ClassVar[str] = ""
    suggested: ClassVar[tuple[str, ...]] = ()

    def not_applicable(self, context: ModelContext, data: MetricInput) -> str:
        """Why the check does not apply to this model and map, as a clause for the report; empty if
        it does."""
        return ""

    @property
    def reduced(self) -> Self:
        """The check with the fewest runs, for methods that take long."""
        return replace(self, **self.fewest)

    def decide(self, result: MetricResult, tested: CoverResult | None) -> CheckResult:
        """Compare the figure of the first image, and what the tests of its claims say, with the
        threshold. ``tested`` is None where nothing was covered, as in `explain.evaluate`."""
        raise NotImplementedError

    def claims(
        self, data: MetricInput, result: MetricResult, masked: MaskedScores
    ) -> tuple[Claim, ...]:
        """What the map claims of the scores, to be tested by covering parts of the photo; all
        claims must hold. Empty where the check has failed already, which needs no test."""
        return ()

    def result(
        self,
        figure: float,
        passed: bool | None,
        reason: str,
        symbol: str = "",
        *,
        undecided: bool = False,
    ) -> CheckResult:
        """Make the result of this check, with its name and word."""
        return CheckResult(self.name, self.word, figure, passed, reason, symbol, undecided)

    def advice_for(self, failed: Collection[str]) -> str:
        """The advice for maps of the methods named ``failed``, which the check did not support;
        empty if all methods that it could suggest are among these.

        >>> DependsOnClass().advice_for(["gradcam"]), Stable().advice_for(["smooth(saliency)"])
        ('take a method that asks for one class, such as lrp', '')
        """
        names = {name for method in failed for name in re.split(r"\W", method)}
        untried = [name for name in self.suggested if name.split("(")[0] not in names]
        if self.suggested and not untried:
            return ""
        return self.advice.format(" or ".join(untried))


@dataclass(frozen=True)
class DependenceCheck(Check, ReattributionMetric):
    """A check that compares the map with the method's maps in other settings, and their difference
    with the scores.

    The figure is the mean similarity to the other maps (``parts`` has "alike", for each of them).
    Less is better. A map to which a pattern was added that differs from class to class, or from
    model to model, is not similar either; so the maps must also say something of the scores, which
    `Claim` states and `explain.metrics.checking.check_maps` tests. Where masks are not run, as in
    `explain.evaluate`, the check is not applicable to maps that are not similar.

    Args:
        most: the similarity from which on the map fails; at 0.71, half of a map's variation is that
            of the other.
        level: the largest p-value that passes.
        similarity, sign: as for `MPRT`.
    """

    most: float = SIMILAR
    level: float = LEVEL
    similarity: Similarity = "spearman"
    sign: Sign = "own"

    units = "similarity"
    better = "less"
    compared_with: ClassVar[tuple[str, str]] = ("the map of another", "the maps of {} others")
    says: ClassVar[str] = ""

    def compare(self, data: MetricInput, variant: VariantResult) -> torch.Tensor:
        """What `DependsOnClass` and `DependsOnModel` keep of one variant: the similarity of its map
        to the map, and that map with its signs, flattened: ``(N, 1 + H * W)`` float64, which
        `__call__` takes apart."""
        alike = self.similarity_to(data, variant)
        return torch.cat([alike[:, None].double(), variant.maps.contributions.flatten(1)], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        """The figure of `DependsOnClass` and `DependsOnModel`: the mean similarity to the maps of
        all V variants ``(N,)``, from ``numbers`` ``(N, V, 1 + H * W)``. With ``keeps_maps``,
        ``parts["maps"]`` has the map and those of the variants at length one, ``(N, 1 + V, H, W)``,
        for `claims`."""
        alike = numbers[..., 0]
        other_maps = numbers[..., 1:]
        parts = {"alike": alike, "zeros": (other_maps == 0).all(2)}
        if data.keeps_maps:
            model_map = data.maps.contributions.flatten(1)[:, None]
            maps = F.normalize(torch.cat([model_map, other_maps], 1), dim=2, eps=TINY)
            parts["maps"] = maps.reshape((*maps.shape[:2], *data.size))
        return MetricResult(alike.mean(1), parts=parts)

    def decide(self, result: MetricResult, tested: CoverResult | None) -> CheckResult:
        """For `DependsOnClass` and `DependsOnModel`, decide by the similarity first, which
        contradicts a map; then by the p-value of the claims, without which the map is not shown to
        depend on it."""
        figure = float(result.value[0])
        count = result.parts["alike"].shape[1]
        zeros = int(result.parts["zeros"][0].sum())
        compared = self.compared_with[count > 1].format(count)
        if zeros:
            compared += f", {zeros} of which are zero everywhere"
        limit = f"similarity {figure:.2f} to {compared}"
        if not figure < self.most:
            return self.result(figure, False, f"{limit} (must be below {self.most:.2g})")
        reason = f"{limit} (below {self.most:.2g})"
        if tested is None:
            unknown = f"whether {self.says} was not tested, which takes the check Faithful"
            return self.result(figure, None, f"{reason}; {unknown}")
        limit = f"p = {tested.p_value:.2g}, must be at most {self.level:g}"
        if tested.p_value <= self.level:
            return self.result(figure, True, f"{reason}; {self.says} ({limit})")
        unknown = f"{reason}; not shown with {tested.masks} masks that {self.says} ({limit})"
        return self.result(tested.p_value, False, unknown, "p", undecided=True)


@dataclass(frozen=True)
class DependsOnClass(DependenceCheck):
    """How similar the map is to those of classes far down the ranking, and whether what differs
    predicts the scores.

    They are taken at equal distances from its lower half, and not from its top: the maps of a tabby
    and of an Egyptian cat should be similar. Of a region or a box, they are other classes in the
    same place. What differs must predict the difference of the classes' scores.

    Args:
        classes: how many.
        most, level, similarity, sign: as for `DependenceCheck`.

    Sixt et al., "When Explanations Lie", ICML 2020, for comparing the maps of classes.

    >>> DependsOnClass(classes=2).better
    'less'
    """

    classes: int = 3

    name = "depends_on_class"
    word = "class"
    minimums: ClassVar = {"classes": 1}
    fewest: ClassVar = {"classes": 1}
    compared_with = (
        "the map of a class far down the ranking",
        "the maps of {} classes far down the ranking",
    )
    says = "what differs predicts the difference of the classes' scores"
    advice = "take a method that asks for one class, such as {}"
    suggested = ("gradcam", "lrp")

    def not_applicable(self, context: ModelContext, data: MetricInput) -> str:
        """Why the map cannot be compared with those of other classes; empty if it can."""
        if context.ranking is None:
            return (
                "the target is no class, or the output has no scores of other classes for it to "
                "be compared with"
            )
        return "" if context.ranking[0].shape[1] > 1 else "the model has one class only"

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        for classes in self.other_classes(context):
            yield Variant(classes=tuple(classes.tolist()))

    def other_classes(self, context: ModelContext) -> list[torch.Tensor]:
        """The classes to compare with, far down the ranking of each photo's own scores: a list of
        ``(N,)``. The explained class is ranked first, whatever its score."""
        if context.ranking is None or context.ranking[0].shape[1] < 2:
            raise MetricError(
                f"target must be one of several classes for {self.name}; leave that check out"
            )
        scores, classes = context.ranking
        scores = scores.scatter(1, classes[:, None], torch.inf)
        ranked = scores.sort(dim=1, descending=True, stable=True).indices
        return [ranked[:, rank] for rank in far_down(ranked.shape[1] - 1, self.classes)]

    def claims(
        self, data: MetricInput, result: MetricResult, masked: MaskedScores
    ) -> tuple[Claim, ...]:
        """For `DependsOnClass`, the claim that the difference to the maps of other classes predicts
        the difference of the scores under masks; none if the maps are too similar."""
        if not float(result.value[0]) < self.most:
            return ()
        maps = result.parts["maps"][0]
        differences = maps[0] - maps[1:]
        drops = masked.drops - masked.other_drops[len(differences)]
        return (Claim(differences, drops, differences.mean(0), self.level, "class"),)


def far_down(behind: int, count: int) -> list[int]:
    """Positions at equal distances in the lower half of a ranking with ``behind`` classes after the
    first.

    >>> far_down(999, 3), far_down(2, 3), far_down(1, 3)
    ([583, 750, 916], [2], [1])
    """
    first = behind / 2
    return sorted(
        {min(behind, 1 + int(first + (number + 0.5) / count * first)) for number in range(count)}
    )


@dataclass(frozen=True)
class DependsOnModel(DependenceCheck):
    """How similar the map is to those of models with random upper layers, and whether what differs
    predicts the scores.

    We reinitialise the upper half of the layers with weights, in the order in which a forward pass
    uses them, each as its class does it, normalisations with their statistics; the model's
    prediction is lost then. Maps that show what the first layers detect, such as edges, do not
    change. (If all layers were reinitialised, the first filters would detect something else, and
    such a map would seem to depend on the model.) A map that is zero everywhere is similar to no
    other. The map of a copy must predict the copy's scores, and what it has more than the model's
    map must do so, too: what only looks like an explanation of this model explains no other.

    Args:
        copies: how many.
        seed: of the weights.
        most, level, similarity, sign: as for `DependenceCheck`.

    Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018, whose cascade from the output
    this is halfway.

    >>> DependsOnModel().copies
    2
    """

    copies: int = 2
    seed: int = 0

    name = "depends_on_model"
    word = "model"
    minimums: ClassVar = {"copies": 1}
    fewest: ClassVar = {"copies": 1}
    compared_with = (
        "the map of a copy with random upper layers",
        "the maps of {} copies with random upper layers",
    )
    says = "they predict the scores of the copies"
    advice = "take a method that follows the upper layers, such as {}"
    suggested = ("gradcam", "lrp")

    def not_applicable(self, context: ModelContext, data: MetricInput) -> str:
        return "" if context.randomised.layers else "the model has no weights that could be others"

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        for copy in self.copied(context):
            yield Variant(model=copy)

    def copied(self, context: ModelContext) -> list[RandomWeights]:
        """The copies of the model to compare with: the upper half of the layers reinitialised, each
        copy with a seed of its own."""
        layers = context.randomised.layers
        upper = frozenset(layers[len(layers) // 2 :])
        first = self.seed * 1009
        return [RandomWeights(upper, seed) for seed in range(first, first + self.copies)]

    def claims(
        self, data: MetricInput, result: MetricResult, masked: MaskedScores
    ) -> tuple[Claim, ...]:
        """For `DependsOnModel`, the claims that the map of each copy predicts the copy's scores
        under masks, and so does what it has more than the model's map; none if the maps are too
        similar."""
        if not float(result.value[0]) < self.most:
            return ()
        model_map, *copies = result.parts["maps"][0]
        copy_maps = torch.stack(copies)
        drops = masked.copy_drops[: len(copies)]
        # the first fails where copies get noise, the second where noise is added for each
        pairs = (copy_maps, copy_maps - model_map)
        return tuple(Claim(maps, drops, maps[0], self.level, "copy") for maps in pairs)


@dataclass(frozen=True)
class Faithful(Check, ScoreMetric):
    """p-value: the map predicts what masks take from the score, better than the same map in other
    places.

    The photo is masked at random, with several baselines in turn: the mean colour, a strong blur,
    noise, and the photo itself rolled by half. The statistic is the partial correlation between
    what a mask covers of the map and what the score loses, given what the covered area, the
    baseline, and maps of the photo alone explain (contrast, edges, the distance from the mean
    colour, blobs in the middle, and products of these): see
    `explain.metrics.masked_scores.photo_maps`. A map that such a map of the photo explains fails.

    The null hypothesis is that the map's place has nothing to do with the model's evidence. The
    figure is the share of the placements of the map (turned, flipped, rolled by sixths; its own
    among them) whose correlation is at least as large, so that a map with a random place passes
    with a probability of at most ``level``. Less is better. ``parts`` has the "correlation".

    Args:
        samples: the number of masks.
        level: the largest p-value that passes.
        seed: of the masks, which differ from photo to photo.

    Phipson and Smyth, "Permutation P-values Should Never Be Zero", 2010, for the test; random masks
    as in Petsiuk et al., BMVC 2018.

    >>> Faithful().better
    'less'
    """

    samples: int = 60
    level: float = LEVEL
    seed: int = 0

    name = "faithful"
    word = "faithful"
    advice = (
        "try another layer or method, or ask for the smallest evidence ({}), which needs no map"
    )
    suggested = ("sufficient",)
    units = "p-value"
    better = "less"
    minimums: ClassVar = {"samples": 40, "level": 0.01}
    below = {"level": 1}

    @property
    def masked(self) -> RandomMasks:
        """The masked photos."""
        return RandomMasks(self.samples, self.seed)

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        return [ScoreRequest(self.masked, "logit")]

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """The figure of `Faithful`: the p-value of each image's map ``(N,)`` from the scores of its
        randomly masked photos, with the correlation in ``parts``; NaN where masks change
        nothing."""
        masks = self.masked.masks(data.images)
        drops = data.loss("logit", scores[0]).cpu().double()
        strata = strata_of(self.samples)
        tests = []
        for photo, photo_masks, photo_drops, maps in zip(
            data.images, masks, drops, data.maps.contributions, strict=True
        ):
            placed = MaskedScores(photo, photo_masks, strata, photo_drops).test(
                maps[None], photo_drops
            )
            tests.append((placed.correlation, placed.p_value))
        correlation, p_value = torch.tensor(tests, dtype=torch.float64).unbind(1)
        value = data.undefined(self, p_value, (drops == 0).all(1), UNCHANGED)
        return MetricResult(value, parts={"correlation": correlation})

    def claims(
        self, data: MetricInput, result: MetricResult, masked: MaskedScores
    ) -> tuple[Claim, ...]:
        """For `Faithful`, the claim that what masks cover of the map predicts what the score loses;
        none if no mask changed the score."""
        if not bool(masked.drops.any()):
            return ()
        values = data.maps.contributions[0]
        return (Claim(values[None], masked.drops, values, self.level),)

    def decide(self, result: MetricResult, tested: CoverResult | None) -> CheckResult:
        """For `Faithful`, decide by the p-value after all tests, and give the reason: explained by
        the photo alone, better than other places, opposite in sign, typical of photos, or
        undecided."""
        if tested is None:
            return self.result(math.nan, None, UNCHANGED, "p")
        figure = tested.p_value
        limit = f"p = {figure:.2g}, must be at most {self.level:g}"
        correlation = f"{tested.correlation:.2f}"
        if tested.correlation <= -1:
            reason = "contrast, edges, colours and the middle of the photo explain the map"
            return self.result(figure, False, f"{reason} ({limit})", "p")
        if figure <= self.level:
            reason = "what it marks matters more to the score than the same in other places"
            return self.result(figure, True, f"{reason} ({limit})", "p")
        if tested.opposite <= self.level:
            reason = f"the score rises where it is covered: its correlation is {correlation}"
            return self.result(figure, False, f"{reason} ({limit})", "p")
        if tested.is_typical:
            controls = f"{tested.controls} of {tested.of_controls}"
            reason = f"{controls} maps of the photo alone mark areas that matter as much"
            return self.result(figure, False, f"{reason} ({limit})", "p")
        reason = f"not shown with {tested.masks} masks ({limit}); {tested.more}"
        return self.result(figure, False, reason, "p", undecided=True)


UNCHANGED = "to mask the photo does not change the score"


@dataclass(frozen=True)
class NormalNoise(OneForEach):
    """Photos with normal noise; ``sigma`` is its deviation, relative to the range of the photo's
    values."""

    sigma: float
    seed: int

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        """For the check `Stable`, the photos ``(N, C, H, W)`` plus the same noise, scaled by each
        photo's range."""
        x = evidence.inputs
        return x + self.sigma * span(x) * normal(x.shape[1:], seeded(self.seed)).to(x)


@dataclass(frozen=True)
class Brighter(OneForEach):
    """Photos whose values are all raised by a share of their range."""

    by: float

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        return evidence.inputs + self.by * span(evidence.inputs)


@dataclass(frozen=True)
class ScaledContrast(OneForEach):
    """Photos whose channels' distances from their means are multiplied by a factor."""

    factor: float

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        """For the check `Stable`, the photos ``(N, C, H, W)`` with each channel stretched about its
        mean."""
        x = evidence.inputs
        mean = x.mean((2, 3), keepdim=True)
        return mean + self.factor * (x - mean)


@dataclass(frozen=True)
class Stable(Check, ReattributionMetric):
    """Similarity of the map to those of changed photos with the same scores.

    The photo gets noise, more or less light, and more or less contrast. Changes that move the
    class's probability by more than ``slack`` (without classes, the score by more than this share
    of it) do not count. The figure is the mean similarity over the others. More is better.

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
    advice = "take the mean over noise, such as {}"
    suggested = ("smooth(saliency)",)
    units = "similarity"
    minimums: ClassVar = {"slack": 0}

    @property
    def reduced(self) -> Self:
        return replace(self, noises=self.noises[-1:], light=(), contrast=())

    @property
    def changes(self) -> list[OneForEach]:
        """The perturbations of the photo that `Stable` compares with: noises, then light, then
        contrast."""
        noises = [
            NormalNoise(sigma, self.seed * 1009 + number)
            for number, sigma in enumerate(self.noises)
        ]
        return [*noises, *map(Brighter, self.light), *map(ScaledContrast, self.contrast)]

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        for change in self.changes:
            yield Variant(change)

    def compare(self, data: MetricInput, variant: VariantResult) -> torch.Tensor:
        """What `Stable` keeps of one changed photo ``(N, 2)``: the similarity of its map to the
        map, and by how much the probability (or, relatively, the score) has moved."""
        alike = self.similarity_to(data, variant)
        if data.probability is None or data.classes is None or variant.logits is None:
            tiny = torch.finfo(data.target_score.dtype).tiny
            moved = (variant.score - data.target_score).abs() / data.target_score.abs().clamp(
                min=tiny
            )
        else:
            moved = (data.outputs.of_classes(variant.logits, data.classes) - data.probability).abs()
        return torch.stack([alike.double(), moved.double()], 1)

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        """The figure of `Stable`: the mean similarity ``(N,)`` over the changes that left the
        scores alone, from ``numbers`` ``(N, V, 2)``; NaN where every change moved them."""
        alike = numbers[..., 0]
        still = numbers[..., 1] <= self.slack
        value = torch.where(still, alike, 0).sum(1) / still.sum(1)  # NaN where no change counts
        return MetricResult(value, parts={"alike": alike, "counted": still.sum(1)})

    def decide(self, result: MetricResult, tested: CoverResult | None) -> CheckResult:
        """For `Stable`, decide by the mean similarity; not applicable where every change moved the
        scores."""
        figure = float(result.value[0])
        counted = int(result.parts["counted"][0])
        changes = result.parts["alike"].shape[1]
        if not counted:
            return self.result(figure, None, "every small change of the photo moved the scores")
        words = (
            f"similarity {figure:.2f} over {counted} of {changes} small changes that left the "
            "scores alone"
        )
        return self.result(
            figure, figure >= self.least, f"{words} (must be at least {self.least:.2g})"
        )


MASKS = 480
"""Masks of a photo in a check."""


def default_checks(seed: int = 0, samples: int = MASKS) -> tuple[Check, ...]:
    """The checks of every map, in this order; all maps of a photo share its masks, of which there
    are ``samples``.

    >>> [check.word for check in default_checks()]
    ['model', 'class', 'faithful', 'stable']
    """
    return (
        DependsOnModel(seed=seed),
        DependsOnClass(),
        Faithful(samples, seed=seed),
        Stable(seed=seed),
    )
