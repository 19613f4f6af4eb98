"""Metrics that score perturbed photos. All requested photos run together, each distinct one once."""

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


@dataclass(frozen=True)
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
    first, stop = (torch.as_tensor(each, device=ranks.device).expand(len(ranks), -1) for each in (start, end))

    def keep(owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        own = ranks if len(ranks) == 1 else ranks[owners]
        low, high = (each[owners, numbers].reshape(-1, 1, 1) for each in (first, stop))
        return (own < low).logical_or_(own >= high)

    keys: list[list[Hashable]] = []
    for own, low, high in zip(ranks, first.clamp(min=0), stop, strict=True):
        count, digest = int(own.max()) + 1, digest_of(own)
        keys.append(
            [_range_key(baseline, digest, a, b, count) for a, b in zip(low.tolist(), high.tolist(), strict=True)]
        )
    return cover(keys, keep, baseline, score)


def _range_key(baseline: Baseline, digest: bytes, start: int, end: int, count: int) -> Hashable:
    if start >= end:
        return UNCHANGED
    return (baseline,) if start == 0 and end >= count else (baseline, digest, start, min(end, count))


def cover_softly(mask: torch.Tensor, baseline: Baseline, score: ScoreKind) -> ScoreRequest:
    """Request one photo of each image, mixed with a baseline by a mask ``(N, H, W)`` in [0, 1]."""
    keys: list[list[Hashable]] = []
    for own in mask:
        soft = UNCHANGED if bool((own == 1).all()) else (baseline, "soft", digest_of(own))
        keys.append([soft if own.any() else (baseline,)])
    return cover(keys, lambda owners, numbers: mask[owners], baseline, score)


class PerturbedPhotoPool(Perturbation):
    """The requested photos of N images ``(N, C, H, W)``, each distinct one once, as a `Perturbation` of the engine."""

    def __init__(self, images: torch.Tensor) -> None:
        self._images = images
        self._rows: list[dict[Hashable, int]] = [{} for _ in range(len(images))]  # by image and key
        self._owners: list[int] = []
        self._sources: list[tuple[int, int]] = []  # for each row: the request, and the photo's number in it
        self._requests: list[ScoreRequest] = []

    def __len__(self) -> int:
        return len(self._owners)

    def __str__(self) -> str:
        return "photos perturbed for metrics"

    def add(self, request: ScoreRequest) -> torch.Tensor:
        """Add photos; return the number of each one's row ``(N, K)``, or -1 where nothing is changed."""
        found = [[self._row(image, key, k) for k, key in enumerate(keys)] for image, keys in enumerate(request.keys)]
        self._requests.append(request)
        return torch.tensor(found, dtype=torch.long, device=self._images.device)

    def _row(self, image: int, key: Hashable, number: int) -> int:
        if key is UNCHANGED:
            return -1
        if key not in self._rows[image]:
            self._rows[image][key] = len(self)
            self._owners.append(image)
            self._sources.append((len(self._requests), number))
        return self._rows[image][key]

    def fully_covered(self) -> dict[Baseline, torch.Tensor]:
        """For each baseline that covers an entire photo, the number of each image's row ``(N,)``, or -1."""
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
            requests, numbers = sources[rows.cpu()].unbind(1)
            found = images.new_empty(len(rows), *images.shape[1:])
            for request in sorted(set(requests.tolist())):
                own = (requests == request).nonzero().flatten()
                at = own.to(images.device)
                build = self._requests[request].build
                built: torch.Tensor = build(images, covers, owners[rows[at]], numbers[own].to(images.device))
                if len(own) == len(rows):
                    return built
                found[at] = built
            return found

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
    outputs: Outputs = field(default_factory=Outputs)

    @property
    def name(self) -> str:
        return f"{self.of} of {self.classes}"

    def pick(self, output: Any, count: int) -> tuple[torch.Tensor, None]:
        logits = find_logits(output, count)
        if logits.shape[1] < 2:
            raise TargetError("model must have at least two classes for their probabilities, got one; choose "
                              "score='logit'")  # fmt: skip
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        chosen = torch.tensor(self.classes, device=logits.device)[:, None]
        if self.of == "probability":
            return self.outputs.of_classes(logits, chosen[:, 0]), None
        others = logits.scatter(1, chosen, -torch.inf)
        return logits.gather(1, chosen)[:, 0] - others.amax(1), None

    def rows(self, images: torch.Tensor) -> Target:
        return replace(self, classes=tuple(self.classes[image] for image in images.tolist()))


def recognised_when_covered(
    covered: Mapping[Baseline, torch.Tensor], photos: torch.Tensor, scores: torch.Tensor, classes: int
) -> Iterator[str]:
    """Notes on photos that keep their class although a baseline covers them entirely: their curves say little.

    A photo keeps it if nine tenths of its probability are left, and this is more than half of the way from chance,
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
        recognised = (found > least).nonzero().flatten().tolist()
        if recognised:
            images, share = ", ".join(map(image_name, recognised)), f"{found[recognised].min().item():.2f}"
            yield (
                f"image {images} keeps its class with a probability of {share} or more where the baseline "
                f"{baseline.name!r} covers all of it, so that figures by this baseline say little; choose another "
                "baseline"
            )
