"""What a metric is, its input and its result; metrics that score perturbed photos, each distinct one run once; metrics
by name."""

import fnmatch
import hashlib
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal, TypeAlias, dataclass_transform

import torch

from explain._utils.errors import MetricError, TargetError, did_you_mean, keywords, shown, warn
from explain._utils.options import Options, enter
from explain.attribution.diagnostics import image_names
from explain.baselines.base import Baseline, Cover
from explain.engine import Evidence, Perturbation, PerturbedRows
from explain.metrics.maps import Maps, Sign, ranks_of
from explain.targets.base import Target, find_logits
from explain.targets.outputs import Outputs

Better = Literal["more", "less"]
"""Whether more or less of a figure is better."""

Score = Literal["logit", "probability"]
"""Which score of a perturbed photo counts: the target's own (of a class, its logit), or the class's probability."""

ScoreKind = Literal["logit", "probability", "margin"]
"""The same, or the margin of the class's logit over the best other one."""

ROUNDING = 128
"""How many of the last bits of a score may be rounding errors."""

PAPER = re.compile(r"""((?:[A-Z][\w-]+)(?: et al\.| and [A-Z][\w-]+)?), "[^"]+", ([^;.(,"]*?\d{4})""")
"""Authors, title, venue and year in a docstring."""

ZERO = "its map is zero everywhere"
CONSTANT = "its map is constant"


@dataclass(frozen=True, eq=False)
class MetricInput:
    """What a metric sees: N photos, and one method's maps of them.

    ``images`` ``(N, C, H, W)`` are the model's inputs, ``target_score`` ``(N,)`` is the score that was explained and
    ``probability`` ``(N,)`` that of the class, where the target is one of ``classes`` ``(N,)``; ``outputs`` says how
    the model's outputs become probabilities. Where the object is: ``boxes`` are lists of boxes ``(k, 4)``, one for each
    photo, and ``regions`` truth values ``(N, H, W)``. ``masked`` are the
    `explain.metrics.masked_scores.MaskedScores` of one photo, where they were run.
    """

    maps: Maps
    images: torch.Tensor
    target_score: torch.Tensor
    probability: torch.Tensor | None = None
    classes: torch.Tensor | None = None
    boxes: Sequence[torch.Tensor] | None = None
    regions: torch.Tensor | None = None
    outputs: Outputs = Outputs()
    masked: Any = None
    _ranks: dict[tuple[Sign, int], torch.Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def size(self) -> tuple[int, int]:
        return int(self.images.shape[-2]), int(self.images.shape[-1])

    @property
    def pixels(self) -> int:
        return self.size[0] * self.size[1]

    def ranks(self, sign: Sign, seed: int) -> torch.Tensor:
        """The rank of each pixel ``(N, H, W)``, 0 for the largest value; equal values are shuffled."""
        if (sign, seed) not in self._ranks:
            self._ranks[sign, seed] = ranks_of(self.maps.per_pixel(sign), seed)
        return self._ranks[sign, seed]

    def original(self, score: Score) -> torch.Tensor:
        """The score of the unperturbed photos ``(N,)``."""
        return self.target_score if score == "logit" else need_probability(self.probability)

    def loss(self, score: Score, scores: torch.Tensor) -> torch.Tensor:
        """The original score less those of the perturbed photos ``(N, K)``; zero within rounding errors.

        Rounding errors depend on the other photos of a batch, and must not decide a figure.
        """
        original = self.original(score)[:, None]
        loss = original - scores
        largest = torch.maximum(original.abs(), scores.abs().amax(1, keepdim=True))
        return torch.where(loss.abs() <= ROUNDING * torch.finfo(scores.dtype).eps * largest, 0, loss)

    def undefined(self, metric: "Metric", value: torch.Tensor, wrong: torch.Tensor, why: str) -> torch.Tensor:
        """Put NaN where a figure is not defined, and warn of it."""
        if wrong.any():
            images = image_names(wrong)
            warn(f"{metric.name} of {self.maps.name} is not defined for image {images}: {why}; it is NaN there")
        return torch.where(wrong, torch.nan, value)


@dataclass(frozen=True, eq=False)
class MetricResult:
    """One figure for each image ``(N,)``; its ``curve`` ``(N, K)`` over the shares ``at`` ``(K,)``, where it has one;
    and other ``parts`` of it, each ``(N,)`` or ``(N, ...)``."""

    value: torch.Tensor
    curve: torch.Tensor | None = None
    at: torch.Tensor | None = None
    parts: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass_transform(frozen_default=True)  # of which `register` makes dataclasses
@dataclass(frozen=True)
class Metric(Options):
    """A measure of how good a map is, as a frozen dataclass: its fields are its options, checked against their types.

    A metric is a subclass of `MapMetric`, which sees the map and nothing else, of `ScoreMetric`, which scores perturbed
    photos, or of `ReattributionMetric`, which runs the method again. Class attributes describe it:

    - ``name``, ``about`` and ``paper``, as in a list of metrics: the class's name in lower case, the first line of its
      docstring, and the paper that this cites, where they are not given;
    - ``units`` of its figure, and whether more or less of it is ``better``;
    - ``needs_object``: whether it needs boxes or masks of the object;
    - ``minimums`` and ``below``: by name of an option, the smallest number that it may be; what it must be below.
    """

    name: ClassVar[str] = ""
    about: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    units: ClassVar[str] = "0 to 1"
    better: ClassVar[Better] = "more"
    needs_object: ClassVar[bool] = False
    error = MetricError

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cited = PAPER.search(" ".join((cls.__doc__ or "").split()))
        known = {"name": cls.__name__.lower(), "paper": ", ".join(cited.groups()) if cited else cls.paper}
        for name in known.keys() - vars(cls).keys():
            setattr(cls, name, known[name])

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in self.described().items():
            object.__setattr__(self, name, value)

    def described(self) -> Mapping[str, str]:
        """The class attributes, such as the name, that depend on the options."""
        return {}


class MapMetric(Metric):
    """A metric of the map alone, and of where the object is."""

    def __call__(self, data: MetricInput) -> MetricResult:
        """Return a figure for each image."""
        raise NotImplementedError


def need_probability(probability: torch.Tensor | None, remedy: str = "choose score='logit'") -> torch.Tensor:
    """The probability of the class; refused where there is none."""
    if probability is None:
        raise MetricError(f"target must be one of several classes for a metric of its probability, got none; {remedy}")
    return probability


MetricLike: TypeAlias = str | Metric

_known: dict[str, Metric] = {}


def register(metric: type[Metric] | None = None, /, **options: Any) -> Any:
    """Make a metric known by its name: ``@register`` with its default options, ``@register(order="lerf")`` with others.

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
    if not isinstance(pattern, str):
        raise MetricError(f"pattern must be a text such as 'delet*', got {shown(pattern)}")
    return sorted(name for name in _known if fnmatch.fnmatchcase(name, pattern))


def get_metric(metric: MetricLike) -> Metric:
    """Return the metric for a name; a metric is returned as it is.

    Raises:
        MetricError: the name is unknown, or the object is no metric.

    >>> get_metric("insertion").better
    'more'
    """
    if isinstance(metric, str):
        name = metric.strip().lower()
        if name not in _known:
            raise MetricError(f"metric {shown(metric)} is unknown; {did_you_mean(name, list_metrics())}")
        return _known[name]
    if not isinstance(metric, Metric):
        remedy = f"use {metric.__name__}()" if isinstance(metric, type) else "see explain.list_metrics()"
        raise MetricError(f"metric must be a name or a metric, got {shown(metric)}; {remedy}")
    return metric


UNCHANGED = "unchanged"
"""The key of a perturbed photo that equals the original."""

Covers = Callable[[Baseline], Cover]
Build = Callable[[torch.Tensor, Covers, torch.Tensor, torch.Tensor], torch.Tensor]
Keep = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Ranks = Sequence[int] | torch.Tensor


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """A request for the scores of K perturbed photos of each of N images.

    ``keys`` has a list of K keys for each image; photos of an image with equal keys are equal, and run once.
    ``build(images, covers, owners, numbers)`` makes the photos ``numbers`` ``(b,)`` of the images ``owners`` ``(b,)``:
    ``(b, C, H, W)``. ``covers`` prepares a baseline for the images.
    """

    keys: Sequence[Sequence[Hashable]]
    build: Build
    score: ScoreKind


class ScoreMetric(Metric):
    """A metric of the model's scores for perturbed photos."""

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        """The perturbed photos to score."""
        raise NotImplementedError

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """Return a figure for each image, from the scores ``(N, K)`` of each request."""
        raise NotImplementedError


def cover(keys: Sequence[Sequence[Hashable]], keep: Keep, baseline: Baseline, score: ScoreKind) -> ScoreRequest:
    """Request photos of which a baseline covers a part.

    Args:
        keys: as for `ScoreRequest`.
        keep: from ``owners`` and ``numbers`` to the share of each pixel that stays, ``(b, H, W)``.
        baseline: what replaces the other pixels.
        score: which score counts.
    """

    def build(images: torch.Tensor, covers: Covers, owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return covers(baseline)(owners, keep(owners, numbers)[:, None].to(images))

    return ScoreRequest(keys, build, score)


def cover_ranks(ranks: torch.Tensor, start: Ranks, end: Ranks, baseline: Baseline, score: ScoreKind) -> ScoreRequest:
    """Request photos of which the pixels with ``start <= rank < end`` are covered.

    Args:
        ranks: the rank of each pixel, ``(N, H, W)`` whole numbers from 0.
        start, end: K ranks for all images, or for each ``(N, K)``.
        baseline, score: as for `cover`.
    """
    first = torch.as_tensor(start).to(ranks.device).expand(len(ranks), -1)
    stop = torch.as_tensor(end).to(ranks.device).expand(len(ranks), -1)

    def keep(owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        own = ranks if len(ranks) == 1 else ranks[owners]
        low = first[owners, numbers].reshape(-1, 1, 1)
        high = stop[owners, numbers].reshape(-1, 1, 1)
        return (own < low).logical_or_(own >= high)

    def key(digest: bytes, low: int, high: int, count: int) -> Hashable:
        if low >= high:
            return UNCHANGED
        return (baseline,) if low <= 0 and high >= count else (baseline, digest, max(low, 0), min(high, count))

    keys: list[list[Hashable]] = []
    for own, lows, highs in zip(ranks, first.tolist(), stop.tolist(), strict=True):
        count = int(own.max()) + 1
        digest = digest_of(own)
        keys.append([key(digest, low, high, count) for low, high in zip(lows, highs, strict=True)])
    return cover(keys, keep, baseline, score)


def cover_softly(mask: torch.Tensor, baseline: Baseline, score: ScoreKind) -> ScoreRequest:
    """Request one photo of each image, mixed with a baseline by a mask ``(N, H, W)`` in [0, 1]."""

    def key(own: torch.Tensor) -> Hashable:
        if not own.any():
            return (baseline,)
        return UNCHANGED if bool((own == 1).all()) else (baseline, "soft", digest_of(own))

    return cover([[key(own)] for own in mask], lambda owners, numbers: mask[owners], baseline, score)


class PerturbedPhotoPool(Perturbation):
    """The requested photos of N images ``(N, C, H, W)``, each distinct one once, as a `Perturbation` of the engine."""

    words = "photos perturbed for metrics"

    def __init__(self, images: torch.Tensor) -> None:
        self._images = images
        self._rows: dict[tuple[int, Hashable], tuple[int, Build, int]] = {}
        """By image and key: the row, what builds it, and its number there."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request: ScoreRequest) -> torch.Tensor:
        """Add photos; return the number of each one's row ``(N, K)``, or -1 where nothing is changed."""
        rows = []
        for image, keys in enumerate(request.keys):
            of_image = []
            for number, key in enumerate(keys):
                new = len(self), request.build, number
                of_image.append(-1 if key is UNCHANGED else self._rows.setdefault((image, key), new)[0])
            rows.append(of_image)
        return torch.tensor(rows, dtype=torch.long, device=self._images.device)

    def recognised(self, photos: torch.Tensor, scores: torch.Tensor, classes: int) -> Iterator[str]:
        """Notes on photos that keep their class although a baseline covers them entirely: their curves say little.

        A photo keeps it if nine tenths of its probability are left, and this is more than half of the way from chance,
        1 / K, to 1.

        Args:
            photos: the probability of the unperturbed photos ``(N,)``.
            scores: that of all rows ``(P,)``.
            classes: K.
        """
        least = (0.9 * photos).clamp(min=(1 + 1 / classes) / 2)
        covered: dict[Baseline, torch.Tensor] = {}  # the probability of each photo that is covered entirely
        for (image, key), (row, _, _) in self._rows.items():
            if isinstance(key, tuple) and len(key) == 1:
                covered.setdefault(key[0], torch.zeros_like(photos))[image] = scores[row]
        for baseline, probability in covered.items():
            kept = probability > least
            if kept.any():
                where = f"{probability[kept].min():.2f} or more where the baseline {baseline.name!r} covers all of it"
                keeps = f"image {image_names(kept)} keeps its class with a probability of {where}"
                yield f"{keeps}, so that figures by this baseline say little; choose another baseline"

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """All rows; each is built when it is run."""
        images = self._images
        owners = torch.tensor([image for image, _ in self._rows], dtype=torch.long, device=images.device)
        builds = [(build, number) for _, build, number in self._rows.values()]
        covers: Any = cache(lambda baseline: baseline.covering(images))

        def make(rows: torch.Tensor) -> torch.Tensor:
            places: dict[Build, list[int]] = {}
            for place, row in enumerate(rows.tolist()):
                places.setdefault(builds[row][0], []).append(place)
            photos = images.new_empty(len(rows), *images.shape[1:])
            for build, own in places.items():
                at = torch.tensor(own, device=images.device)
                numbers = torch.tensor([builds[row][1] for row in rows[at].tolist()], device=images.device)
                built: torch.Tensor = build(images, covers, owners[rows[at]], numbers)
                if len(own) == len(rows):
                    return built
                photos[at] = built
            return photos

        return PerturbedRows(owners, make)


def digest_of(tensor: torch.Tensor) -> bytes:
    """A hash of a tensor's values."""
    return hashlib.blake2b(tensor.cpu().contiguous().numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class ClassScore(Target):
    """Another score of each image's class than its logit: its ``probability``, or its ``margin`` over all others.

    >>> ClassScore("margin", (1,)).pick(torch.tensor([[1.0, 5.0, 3.0]]), 1)[0]
    tensor([2.])
    """

    of: Literal["probability", "margin"]
    classes: tuple[int, ...]
    outputs: Outputs = Outputs()

    @property
    def name(self) -> str:
        return f"{self.of} of {self.classes}"

    def pick(self, output: Any, count: int) -> tuple[torch.Tensor, None]:
        logits = find_logits(output, count)
        if logits.shape[1] < 2:
            raise TargetError("model must have two classes for probabilities, got one; choose score='logit'")
        if self.of == "probability" and self.outputs.kind == "numbers":
            raise TargetError("model must give probabilities for metrics of one, got numbers; choose score='logit'")
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        chosen = torch.tensor(self.classes, device=logits.device)[:, None]
        if self.of == "probability":
            return self.outputs.of_classes(logits, chosen[:, 0]), None
        return logits.gather(1, chosen)[:, 0] - logits.scatter(1, chosen, -torch.inf).amax(1), None

    def rows(self, images: torch.Tensor) -> Target:
        return replace(self, classes=tuple(self.classes[image] for image in images.tolist()))
