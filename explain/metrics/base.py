"""What a metric is, its input and its result; metrics that score perturbed images, each distinct
one run once; metrics by name."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias, dataclass_transform

import torch

from explain._utils.errors import (
    MetricError,
    TargetError,
    keywords,
    shown,
    warn,
)
from explain._utils.options import CheckedFields, enter, named_in, names_like
from explain.attribution.diagnostics import image_names
from explain.baselines.base import Baseline
from explain.engine import Evidence, Perturbation, PerturbedRows
from explain.engine.perturbations import ScoreKind, ScoreOf, Scores, samples_of
from explain.layers.layouts import Size
from explain.methods.base import over_all
from explain.methods.masking import MaskedInputs, Score, blank_score, whole_score
from explain.metrics.maps import Maps, Sign, ranks_of
from explain.targets.outputs import Outputs

Better = Literal["more", "less"]
"""Whether more or less of a figure is better."""

ROUNDING = 128
"""How many of the last bits of a score may be rounding errors."""

PAPER = re.compile(
    r"""((?:[A-Z][\w-]+)(?: et al\.| and [A-Z][\w-]+)?), "[^"]+", ([^;.(,"]*?\d{4})"""
)
"""Authors, title, venue and year in a docstring."""

NO_SCORE = torch.tensor(torch.nan)
ZERO = "its map is zero everywhere"
CONSTANT = "its map is constant"
NOTHING = "its map has no positive value"


@dataclass(frozen=True, eq=False)
class MetricInput:
    """What a metric sees: N photos, and one method's maps of them.

    ``images`` ``(N, C, H, W)`` are the model's inputs, of volumes and videos ``(N, C, T, H, W)``:
    then all else that has a height and width has the slices or frames before them.
    ``target_score`` ``(N,)`` is the score that was explained, and ``probability`` ``(N,)`` that of
    the class, where the target is one of ``classes`` ``(N,)``; ``outputs`` says how the model's
    outputs become probabilities. Where only maps are measured, the model is not run, and the score
    is NaN. ``boxes`` and ``regions`` say where the object is: a tensor of boxes ``(k, 4)`` for
    each photo, and truth values ``(N, H, W)``.
    """

    maps: Maps
    images: torch.Tensor
    target_score: torch.Tensor = NO_SCORE
    probability: torch.Tensor | None = None
    classes: torch.Tensor | None = None
    boxes: Sequence[torch.Tensor] | None = None
    regions: torch.Tensor | None = None
    outputs: Outputs = Outputs()
    _ranks: dict[tuple[Sign, int], torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> Size:
        return tuple(self.images.shape[2:])

    @property
    def pixels(self) -> int:
        return math.prod(self.size)

    def ranks(self, sign: Sign, seed: int) -> torch.Tensor:
        """The rank of each pixel ``(N, H, W)`` by the map's value, 0 for the largest; equal values
        are shuffled by the seed. Kept, so that metrics with the same options share one sort."""
        if (sign, seed) not in self._ranks:
            self._ranks[sign, seed] = ranks_of(self.maps.per_pixel(sign), seed)
        return self._ranks[sign, seed]

    def original(self, score: Score) -> torch.Tensor:
        """The score of the unperturbed photos ``(N,)``, as logit or probability."""
        return self.target_score if score == "logit" else self.need_probability()

    def need_probability(self, remedy: str = "choose score='logit'") -> torch.Tensor:
        """The probability of the class ``(N,)``.

        Raises:
            MetricError: the target is no class. TargetError: it is the only class, or a number.
        """
        if self.probability is not None:
            return self.probability
        must = "target must be one of several classes for a metric of its probability"
        if self.classes is None:
            raise MetricError(f"{must}, got none; {remedy}")
        raise TargetError(f"{must}, got the only one, or a number; {remedy}")

    def loss(self, score: Score, scores: torch.Tensor) -> torch.Tensor:
        """The original score less the ``scores`` ``(N, K)`` of the perturbed photos; zero within
        rounding errors.

        Rounding errors depend on the other photos of a batch, and must not decide a figure.
        """
        original = self.original(score)[:, None]
        loss = original - scores
        largest = torch.maximum(original.abs(), scores.abs().amax(1, keepdim=True))
        rounding = ROUNDING * torch.finfo(scores.dtype).eps * largest
        return torch.where(loss.abs() <= rounding, 0, loss)

    def undefined(
        self, metric: "Metric", value: torch.Tensor, wrong: torch.Tensor, why: str
    ) -> torch.Tensor:
        """Set a metric's figure ``value`` ``(N,)`` to NaN for the images where it is not defined,
        ``wrong`` ``(N,)``, and warn of these with the reason ``why``. Tables leave NaN out of their
        means."""
        if wrong.any():
            images = image_names(wrong)
            warn(
                f"{metric.name} of {self.maps.name} is not defined for image {images}: {why}; it "
                "is NaN there"
            )
        return torch.where(wrong, torch.nan, value)


@dataclass(frozen=True, eq=False)
class MetricResult:
    """One figure for each image ``(N,)``; its ``curve`` ``(N, K)`` over the shares ``at`` ``(K,)``,
    where it has one; and other ``parts`` of it, each ``(N,)`` or ``(N, ...)``."""

    value: torch.Tensor
    curve: torch.Tensor | None = None
    at: torch.Tensor | None = None
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass_transform(frozen_default=True)  # of which `register` makes dataclasses
@dataclass(frozen=True)
class Metric(CheckedFields):
    """A measure of how good a map is, as a frozen dataclass: its fields are its options, checked
    against their types.

    A metric is a subclass of `MapMetric`, which sees the map and nothing else, of `ScoreMetric`,
    which scores perturbed photos, or of `ReattributionMetric`, which runs the method again. Class
    attributes describe it:

    - ``name``, ``summary`` and ``paper``, as in a list of metrics: the class's name in lower case,
      the first line of its docstring, and the paper that this cites, where they are not given;
    - ``units`` of its figure, and whether more or less of it is ``better``;
    - ``needs_object``: whether it needs boxes or masks of the object;
    - ``minimums`` and ``below``: by name of an option, the smallest number that it may be; what it
      must be below.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    units: ClassVar[str] = "0 to 1"
    better: ClassVar[Better] = "more"
    needs_object: ClassVar[bool] = False
    error = MetricError

    def __init_subclass__(cls) -> None:
        """Derive the class attributes ``name`` and ``paper`` that a subclass does not give: from
        the name of the class, and from the citation in its docstring."""
        super().__init_subclass__()
        # in one line, as a citation may be broken
        docstring = " ".join((cls.__doc__ or "").split())
        cited = PAPER.search(docstring)
        # vars: what the base class has does not count
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()
        if cited and "paper" not in vars(cls):
            cls.paper = ", ".join(cited.groups())

    def __post_init__(self) -> None:
        """Check the options, and set the attributes that depend on them (`described`) on the frozen
        object."""
        super().__post_init__()
        for name, value in self.described().items():
            object.__setattr__(self, name, value)

    def described(self) -> Mapping[str, str]:
        """The class attributes that depend on the options, such as the name "lerf" of
        `PixelFlipping`, by their names; set once for each object."""
        return {}


class MapMetric(Metric):
    """A metric of the map alone, and of where the object is."""

    def __call__(self, data: MetricInput) -> MetricResult:
        """Return the figure of each image ``(N,)`` from its map."""
        raise NotImplementedError


MetricLike: TypeAlias = str | Metric

_known: dict[str, Metric] = {}


def register(metric: type[Metric] | None = None, /, **options: Any) -> Any:
    """Make a metric known by its name: ``@register`` with its default options,
    ``@register(order="lerf")`` with others.

    A class that is no dataclass yet becomes a frozen one.

    Raises:
        MetricError: the name is taken by another metric, or cannot be one.
    """
    if metric is None:
        return partial(register, **options)
    return enter(_known, metric, "metric", **options)


@keywords()
def list_metrics(pattern: str = "*") -> list[str]:
    """Return the names of the metrics that match a glob pattern, in alphabetical order.

    >>> list_metrics("delet*")
    ['deletion']
    """
    return names_like(_known, pattern, MetricError)


def get_metric(metric: MetricLike) -> Metric:
    """Return the metric for a name, which may have options; a metric is returned as it is.

    Raises:
        MetricError: the name is unknown, the metric has no such option, or the object is no metric.

    >>> get_metric("insertion").better, get_metric("insertion(steps=8)").steps
    ('more', 8)
    """
    if isinstance(metric, str):
        return named_in(_known, metric, "metric", MetricError, "deletion(steps=32)")
    if not isinstance(metric, Metric):
        raise MetricError(
            f"metric must be a name or an object, got {shown(metric)}; see explain.list_metrics()"
        )
    return metric


UNCHANGED = -1
"""The place of a perturbed image that equals the original."""
COVERED = -2
"""The place of one that a baseline covers entirely."""

Ranks = Sequence[int] | torch.Tensor


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """A request for the scores of K perturbed images of each of N images, which ``of`` makes; equal
    perturbations are run once for all metrics and maps."""

    of: Perturbation
    score: ScoreKind
    # ``(N, K)``: which of its perturbed images each one is (those of the first image come first),
    # or `UNCHANGED`, or `COVERED` entirely; None where each image has K, in order
    places: torch.Tensor | None = None

    @property
    def whole(self) -> Scores:
        """The need for the scores of the images as they are."""
        return whole_score(self.score)

    @property
    def blank(self) -> Scores | None:
        """The need for the scores of images that a baseline covers entirely, which all metrics
        share; None if the request has no such image."""
        if self.places is None or not bool((self.places == COVERED).any()):
            return None
        return blank_score(self.of.baseline, self.score)  # type: ignore[attr-defined]

    @property
    def perturbed(self) -> Scores | None:
        """The need for the scores of the partly perturbed images; None if the request has none."""
        has_samples = self.places is None or bool((self.places >= 0).any())
        return Scores(self.of, ScoreOf(self.score)) if has_samples else None

    @property
    def needs(self) -> frozenset[Scores]:
        """All needs of the request, which the engine answers before `scores` is called."""
        needs = (self.whole, self.blank, self.perturbed)
        return frozenset(need for need in needs if need is not None)

    def scores(self, evidence: Evidence) -> torch.Tensor:
        """The scores ``(N, K)`` of the requested images: of the image itself, of the fully covered
        one, and of the perturbed ones at ``places``."""
        scores = evidence[self.whole][:, None]
        if self.places is None:
            return evidence[self.perturbed].reshape(len(scores), -1)  # type: ignore[index,no-any-return]
        if self.blank is not None:
            scores = torch.where(self.places == COVERED, evidence[self.blank][:, None], scores)
        if self.perturbed is not None:
            # UNCHANGED and COVERED are negative: they get any score here, which is not taken
            sample_scores = evidence[self.perturbed][self.places.clamp(min=0)]
            scores = torch.where(self.places >= 0, sample_scores, scores)
        return scores.expand(self.places.shape)  # type: ignore[no-any-return]


class ScoreMetric(Metric):
    """A metric of the model's scores for perturbed photos."""

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        """The perturbed photos to score; `__call__` gets the scores in the same order."""
        raise NotImplementedError

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """Return a figure for each image, from the scores ``(N, K)`` of each request."""
        raise NotImplementedError


@dataclass(frozen=True)
class CoveredRanks(MaskedInputs):
    """P images with the pixels in an interval of ``ranks`` ``(N, H, W)`` covered. ``intervals``
    ``(P, 3)`` has image, first covered rank, and the one behind the last."""

    baseline: Baseline
    # identifies both tensors
    content: bytes = field(repr=False)
    ranks: torch.Tensor = field(compare=False, repr=False)
    intervals: torch.Tensor = field(compare=False, repr=False)

    covered_by = "pixels in the order of a map"

    def masks(self, evidence: Evidence) -> PerturbedRows:
        """The masks of a `cover_ranks` request ``(b, 1, H, W)``: 0 for pixels whose rank is within
        the interval of the image, 1 elsewhere. Masks are in the order of the intervals."""
        owners, starts, ends = self.intervals.unbind(1)

        def kept(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            """Which pixels stay, ``(b, 1, H, W)``, for numbers of images and intervals ``(b,)``:
            those whose rank is outside of the interval.
            """
            ranks = self.ranks[images]
            low = over_all(starts[numbers], ranks)
            high = over_all(ends[numbers], ranks)
            return (ranks < low).logical_or_(ranks >= high)[:, None]

        return PerturbedRows(owners, torch.arange(len(owners), device=owners.device), kept)


def cover_ranks(
    ranks: torch.Tensor, start: Ranks, end: Ranks, baseline: Baseline, score: ScoreKind
) -> ScoreRequest:
    """Request the scores of K copies of each image with ``start <= rank < end`` (for all, or ``(N,
    K)``) of ``ranks`` ``(N, H, W)`` covered; equal ones run once.
    """
    most = ranks.flatten(1).amax(1, keepdim=True) + 1
    low = torch.as_tensor(start).to(ranks).expand(len(ranks), -1).clamp(min=0)
    high = torch.minimum(torch.as_tensor(end).to(ranks).expand(len(ranks), -1), most)
    images = torch.arange(len(ranks)).to(ranks)[:, None].expand_as(low)
    places = torch.where(low >= high, UNCHANGED, torch.full_like(low, COVERED))
    # neither nothing nor all: these need perturbed images of their own, one for equal intervals
    is_part = (low < high) & ((low > 0) | (high < most))
    intervals = torch.stack([images, low, high], -1)[is_part]
    intervals, places[is_part] = torch.unique(intervals, dim=0, return_inverse=True)
    content = digest_of_tensor(ranks) + digest_of_tensor(intervals)
    return ScoreRequest(CoveredRanks(baseline, content, ranks, intervals), score, places)


@dataclass(frozen=True)
class CoveredByMasks(MaskedInputs):
    """P copies of each image, mixed with a baseline by masks ``kept`` ``(N, P, H, W)`` in [0, 1],
    which ``content`` identifies."""

    baseline: Baseline
    content: bytes = field(repr=False)
    kept: torch.Tensor = field(compare=False, repr=False)

    covered_by = "a map"

    def masks(self, evidence: Evidence) -> PerturbedRows:
        count, masks = self.kept.shape[:2]

        def of_samples(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            return self.kept[images, numbers][:, None]

        return samples_of([masks] * count, self.kept.device, of_samples)


def covered_by_masks(kept: torch.Tensor, baseline: Baseline) -> CoveredByMasks:
    """P copies of each image, mixed with a baseline by masks ``(N, P, H, W)`` in [0, 1]."""
    return CoveredByMasks(baseline, digest_of_tensor(kept), kept)


def cover_softly(mask: torch.Tensor, baseline: Baseline, score: ScoreKind) -> ScoreRequest:
    """Request the score of each image mixed with a baseline by its mask ``(N, H, W)`` in [0, 1], 1
    for pixels that stay; masks of ones or zeros alone need no image of their own."""
    flat = mask.flatten(1)
    places = torch.arange(len(mask), device=mask.device)
    places = torch.where((flat == 1).all(1), UNCHANGED, places)
    places = torch.where((flat == 0).all(1), COVERED, places)
    return ScoreRequest(covered_by_masks(mask[:, None], baseline), score, places[:, None])


def digest_of_tensor(tensor: torch.Tensor) -> bytes:
    """A hash (16 bytes) of a tensor's values, by which frozen perturbations with tensors compare
    equal. Shape and dtype are not part of it."""
    return hashlib.blake2b(tensor.cpu().contiguous().numpy().tobytes(), digest_size=16).digest()
