"""Metrics that score perturbed photos: the photos as values, of which each distinct one is run once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch

from explain._utils.errors import TargetError, image_name
from explain.baselines.base import Baseline, Cover
from explain.engine import Evidence, Perturbation, PerturbedRows
from explain.metrics.base import Metric, MetricInput, MetricResult, ScoreKind
from explain.targets import Target
from explain.targets.base import find_logits
from explain.targets.outputs import Outputs

UNCHANGED = "the photo itself"
"""The key of a perturbed photo in which nothing is changed."""

Covers = Callable[[Baseline], Cover]


class PerturbedPhotos:
    """Perturbed photos, ``count`` of each image: by default, photos of which a baseline covers what is not kept."""

    baseline: Baseline

    @property
    def count(self) -> int:
        raise NotImplementedError

    def keys(self, image: int) -> Sequence[Hashable]:
        """A key for each perturbed photo of an image: equal keys are equal photos."""
        raise NotImplementedError

    def keep(self, owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """What is kept ``(b, H, W)``, 0 to 1, of photos ``numbers`` ``(b,)`` of the images ``owners`` ``(b,)``."""
        raise NotImplementedError

    def build(self, images: torch.Tensor, covers: Covers, owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Perturbed photos ``(b, C, H, W)``; ``covers`` has each baseline, prepared for the images."""
        return covers(self.baseline)(owners, self.keep(owners, numbers)[:, None].to(images))


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """Perturbed photos, and which score of each counts."""

    photos: PerturbedPhotos
    score: ScoreKind


@dataclass(frozen=True)
class ScoreMetric(Metric):
    """A metric of the model's scores for perturbed photos."""

    def requests(self, data: MetricInput) -> Sequence[ScoreRequest]:
        """The perturbed photos to score."""
        raise NotImplementedError

    def __call__(self, data: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """Return a figure for each image, from the scores ``(N, count)`` of each request."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class RankedRemoval(PerturbedPhotos):
    """Photos whose pixels are covered by rank: photo k covers those with ``start[k] <= rank < end[k]``.

    ``ranks`` ``(N, H, W)`` has the rank of each pixel, and ``start`` and ``end`` ``(N, K)`` whole numbers.
    """

    ranks: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    baseline: Baseline

    @property
    def count(self) -> int:
        return self.start.shape[1]

    def keys(self, image: int) -> list[Hashable]:
        ranks = self.ranks[image]
        last, digest = int(ranks.max()) + 1, digest_of(ranks)
        keys: list[Hashable] = []
        for start, end in zip(
            self.start[image].clamp(min=0).tolist(), self.end[image].clamp(max=last).tolist(), strict=True
        ):
            covers_all = (start, end) == (0, last)
            key = (self.baseline,) if covers_all else (self.baseline, digest, start, end)
            keys.append(UNCHANGED if start >= end else key)
        return keys

    def keep(self, owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        ranks = self.ranks if len(self.ranks) == 1 else self.ranks[owners]
        start, end = (each[owners, numbers].reshape(-1, 1, 1) for each in (self.start, self.end))
        return (ranks < start).logical_or_(ranks >= end)


def covered_by_rank(
    ranks: torch.Tensor, baseline: Baseline, start: Sequence[int] | torch.Tensor, end: Sequence[int] | torch.Tensor
) -> RankedRemoval:
    """Cover the pixels whose rank is from ``start`` to before ``end``: for all images, or for each ``(N, K)``."""
    ends = [torch.as_tensor(each, device=ranks.device).expand(len(ranks), -1) for each in (start, end)]
    return RankedRemoval(ranks, ends[0], ends[1], baseline)


@dataclass(frozen=True, eq=False)
class SoftMasked(PerturbedPhotos):
    """Photos seen through one mask each, ``mask`` ``(N, H, W)`` in [0, 1]."""

    mask: torch.Tensor
    baseline: Baseline
    count = 1

    def keys(self, image: int) -> list[Hashable]:
        mask = self.mask[image]
        if not mask.any():
            return [(self.baseline,)]
        return [UNCHANGED if bool((mask == 1).all()) else (self.baseline, "soft", digest_of(mask))]

    def keep(self, owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.mask[owners]


class PerturbedPhotoPool(Perturbation):
    """All perturbed photos of N images ``(N, C, H, W)``, each distinct one once, as a `Perturbation` of the engine."""

    def __init__(self, images: torch.Tensor) -> None:
        self._images = images
        self._rows: list[dict[Hashable, int]] = [{} for _ in range(len(images))]  # for each image, by key
        self._owners: list[int] = []
        self._sources: list[tuple[int, int]] = []  # for each row, which photos of `_added`, and which one of them
        self._added: list[PerturbedPhotos] = []

    def __len__(self) -> int:
        return len(self._owners)

    def __str__(self) -> str:
        return "photos perturbed for metrics"

    def add(self, photos: PerturbedPhotos) -> torch.Tensor:
        """Add photos; return the number of each one's row ``(N, count)``, or -1 where nothing is changed."""
        found = [
            [self._row(image, key, i) for i, key in enumerate(photos.keys(image))] for image in range(len(self._rows))
        ]
        self._added.append(photos)
        return torch.tensor(found, dtype=torch.long, device=self._images.device)

    def _row(self, image: int, key: Hashable, number: int) -> int:
        if key is UNCHANGED:
            return -1
        if key not in self._rows[image]:
            self._rows[image][key] = len(self)
            self._owners.append(image)
            self._sources.append((len(self._added), number))
        return self._rows[image][key]

    def fully_covered(self) -> dict[Baseline, torch.Tensor]:
        """For each baseline that covers a whole photo, the number of each image's row ``(N,)``, or -1."""
        keys = dict.fromkeys(key for known in self._rows for key in known)
        baselines: list[Baseline] = [key[0] for key in keys if isinstance(key, tuple) and len(key) == 1]
        rows = {baseline: [known.get((baseline,), -1) for known in self._rows] for baseline in baselines}
        return {baseline: torch.tensor(found, device=self._images.device) for baseline, found in rows.items()}

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return len(self)

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """All rows; each is built when it is run."""
        images = self._images
        owners = torch.tensor(self._owners, dtype=torch.long, device=images.device)
        sources = torch.tensor(self._sources, dtype=torch.long).reshape(-1, 2)
        covers: Any = cache(lambda baseline: baseline.covering(images))

        def make(rows: torch.Tensor) -> torch.Tensor:
            wanted = sources[rows.cpu()]
            found = images.new_empty(len(rows), *images.shape[1:])
            for source in sorted(set(wanted[:, 0].tolist())):
                mine = (wanted[:, 0] == source).nonzero().flatten()
                here, numbers = mine.to(images.device), wanted[mine, 1].to(images.device)
                built: torch.Tensor = self._added[source].build(images, covers, owners[rows[here]], numbers)
                if len(mine) == len(rows):
                    return built
                found[here] = built
            return found

        return PerturbedRows(owners, make)


def digest_of(tensor: torch.Tensor) -> bytes:
    """A hash of a tensor's values."""
    return hashlib.blake2b(tensor.cpu().contiguous().numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class ClassScore(Target):
    """Another number than the logit of each image's class: its ``probability``, or its ``margin`` over all others.

    >>> ClassScore("margin", (1,)).pick(torch.tensor([[1.0, 5.0, 3.0]]), 1)[0]
    tensor([2.])
    """

    of: Literal["probability", "margin"]
    classes: tuple[int, ...]
    outputs: Outputs = field(default_factory=Outputs)

    @property
    def name(self) -> str:
        return f"{self.of} of {self.classes}"

    def pick(self, output: Any, count: int) -> tuple[torch.Tensor, None]:
        logits = find_logits(output, count)
        if logits.shape[1] < 2:
            raise TargetError(
                "model must score at least two classes for a metric to read their probabilities, got one; choose "
                "score='logit'"
            )
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        chosen = torch.tensor(self.classes, device=logits.device)[:, None]
        if self.of == "probability":
            return self.outputs.of_classes(logits, chosen[:, 0]), None
        others = logits.scatter(1, chosen, -torch.inf)
        return logits.gather(1, chosen)[:, 0] - others.amax(1), None

    def rows(self, images: torch.Tensor) -> Target:
        return replace(self, classes=tuple(self.classes[image] for image in images.tolist()))


def covered_but_recognised(
    covered: Mapping[Baseline, torch.Tensor], photos: torch.Tensor, scores: torch.Tensor, classes: int
) -> Iterator[str]:
    """Say which photos keep their class although a baseline covers all of it: curves that end there say little.

    A photo keeps it where nine tenths of its probability are left, and this is more than half of the way from chance,
    1 / K, to 1.

    Args:
        covered: for each baseline, the number of each image's covered row ``(N,)``, or -1 where none was run.
        photos: the probability of the unperturbed photos ``(N,)``.
        scores: that of all perturbed rows ``(P,)``.
        classes: K.
    """
    least = (0.9 * photos).clamp(min=(1 + 1 / classes) / 2)
    for baseline, rows in covered.items():
        found = torch.where(rows >= 0, scores[rows.clamp(min=0)], 0)
        kept = (found > least).nonzero().flatten().tolist()
        if kept:
            images, share = ", ".join(map(image_name, kept)), f"{found[kept].min().item():.2f}"
            yield (
                f"image {images} keeps its class with a probability of {share} or more where the baseline "
                f"{baseline.name!r} covers all of it, so that figures by this baseline say little; choose another "
                "baseline"
            )
