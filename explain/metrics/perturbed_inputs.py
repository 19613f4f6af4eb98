"""The perturbed inputs that metrics need, as values, and what is read of the scores; each distinct one is run once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch

from explain._utils.errors import TargetError, image_name
from explain.baselines import Baseline, Cover, covering
from explain.engine import Evidence, Perturbation, PerturbedRows
from explain.metrics.base import Metric, MetricInput, MetricResult, Read
from explain.targets import Outputs, Target, find_logits

Make = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From whose row each is ``(b,)`` and which of its image's rows it is ``(b,)``, to altered photos ``(b, C, H, W)``."""

AS_IT_IS = "the photo as it is"


class PerturbedPhotos(Protocol):
    """Altered photos, ``count`` of each image."""

    @property
    def count(self) -> int: ...

    def keys(self, image: int) -> Sequence[Hashable]:
        """For each altered photo of an image, what it is known by: equal keys are equal photos."""
        ...

    def make(self, images: torch.Tensor, cover: Callable[[Baseline], Cover]) -> Make:
        """Prepare to build rows of these images; ``cover`` prepares a baseline for them."""
        ...


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """Altered photos, and what is to be read of each."""

    of: PerturbedPhotos
    reading: Read


@runtime_checkable
class ScoreMetric(Metric, Protocol):
    """A metric that looks at how the model answers to altered photos."""

    def asks(self, case: MetricInput) -> Sequence[ScoreRequest]:
        """The altered photos that it wants scored."""
        ...

    def __call__(self, case: MetricInput, scores: Sequence[torch.Tensor]) -> MetricResult:
        """Turn the scores ``(N, count)`` of each ask into a figure for each image."""
        ...


@dataclass(frozen=True, eq=False)
class RankedRemoval:
    """Photos whose pixels are covered by rank: row k covers those with ``start[k] <= rank < end[k]``.

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
        pairs = zip(self.start[image].tolist(), self.end[image].tolist(), strict=True)
        return [self._key(digest, last, start, end) for start, end in pairs]

    def _key(self, digest: bytes, last: int, start: int, end: int) -> Hashable:
        start, end = max(start, 0), min(end, last)
        if start >= end:
            return AS_IT_IS
        return (self.baseline,) if (start, end) == (0, last) else (self.baseline, digest, start, end)

    def make(self, images: torch.Tensor, cover: Callable[[Baseline], Cover]) -> Make:
        covered = cover(self.baseline)

        def make(owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            ranks = self.ranks if len(self.ranks) == 1 else self.ranks[owners]
            start, end = (each[owners, numbers].reshape(-1, 1, 1) for each in (self.start, self.end))
            keep = (ranks < start).logical_or_(ranks >= end)
            return covered(owners, keep[:, None].to(images))

        return make


def covered_by_rank(
    ranks: torch.Tensor, baseline: Baseline, start: Sequence[int] | torch.Tensor, end: Sequence[int] | torch.Tensor
) -> RankedRemoval:
    """Cover the pixels whose rank is from ``start`` to before ``end``: for all images, or for each ``(N, K)``."""
    ends = [torch.as_tensor(each, device=ranks.device).expand(len(ranks), -1) for each in (start, end)]
    return RankedRemoval(ranks, ends[0], ends[1], baseline)


@dataclass(frozen=True, eq=False)
class SoftMasked:
    """Photos seen through one mask each, ``keep`` ``(N, H, W)`` in [0, 1]."""

    keep: torch.Tensor
    baseline: Baseline
    count: ClassVar[int] = 1

    def keys(self, image: int) -> list[Hashable]:
        keep = self.keep[image]
        if not keep.any():
            return [(self.baseline,)]
        return [AS_IT_IS if bool((keep == 1).all()) else (self.baseline, "soft", digest_of(keep))]

    def make(self, images: torch.Tensor, cover: Callable[[Baseline], Cover]) -> Make:
        covered = cover(self.baseline)
        return lambda owners, numbers: covered(owners, self.keep[owners][:, None].to(images))


class PerturbedPhotoPool:
    """Keeps one row for each distinct altered photo of N images ``(N, C, H, W)``."""

    def __init__(self, images: torch.Tensor) -> None:
        self._images = images
        self._rows: list[dict[Hashable, int]] = [{} for _ in range(len(images))]
        self._owners: list[int] = []
        self._sources: list[tuple[int, int]] = []
        self._altered: list[PerturbedPhotos] = []

    def __len__(self) -> int:
        return len(self._owners)

    def enter(self, altered: PerturbedPhotos) -> torch.Tensor:
        """Enter altered photos; return the number of each one's row ``(N, count)``, or -1 where nothing is altered."""
        self._altered.append(altered)
        found = [self._of_image(image, altered.keys(image)) for image in range(len(self._images))]
        return torch.tensor(found, dtype=torch.long, device=self._images.device)

    def blank(self) -> dict[Baseline, torch.Tensor]:
        """For each baseline that covers a photo all over, the number of each image's row ``(N,)``, or -1."""
        keys = dict.fromkeys(key for known in self._rows for key in known)
        baselines: list[Baseline] = [key[0] for key in keys if isinstance(key, tuple) and len(key) == 1]
        rows = {baseline: [known.get((baseline,), -1) for known in self._rows] for baseline in baselines}
        return {baseline: torch.tensor(found, device=self._images.device) for baseline, found in rows.items()}

    def _of_image(self, image: int, keys: Sequence[Hashable]) -> list[int]:
        known = self._rows[image]
        for number, key in enumerate(keys):
            if key is not AS_IT_IS and key not in known:
                known[key] = len(self._owners)
                self._owners.append(image)
                self._sources.append((len(self._altered) - 1, number))
        return [-1 if key is AS_IT_IS else known[key] for key in keys]

    def rows(self) -> PerturbedRows:
        """All rows; each is built when it is run."""
        device = self._images.device
        owners = torch.tensor(self._owners, dtype=torch.long, device=device)
        sources = torch.tensor(self._sources, dtype=torch.long).reshape(-1, 2)
        covers: dict[Baseline, Cover] = {}
        makers: dict[int, Make] = {}

        def cover(baseline: Baseline) -> Cover:
            if baseline not in covers:
                covers[baseline] = covering(baseline, self._images)
            return covers[baseline]

        def make(rows: torch.Tensor) -> torch.Tensor:
            wanted = sources[rows.cpu()]
            found = torch.empty(len(rows), *self._images.shape[1:], dtype=self._images.dtype, device=device)
            for source in sorted(set(wanted[:, 0].tolist())):
                if source not in makers:
                    makers[source] = self._altered[source].make(self._images, cover)
                mine = (wanted[:, 0] == source).nonzero().flatten()
                numbers = wanted[mine, 1].to(device)
                built = makers[source](owners[rows[mine.to(device)]], numbers)
                if len(mine) == len(rows):
                    return built
                found[mine.to(device)] = built
            return found

        return PerturbedRows(owners, make)


@dataclass(frozen=True, eq=False)
class PooledPhotos(Perturbation):
    """The rows of a book, as the engine takes them."""

    book: PerturbedPhotoPool

    def __str__(self) -> str:
        return "photos altered for metrics"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return len(self.book)

    def rows(self, evidence: Evidence) -> PerturbedRows:
        return self.book.rows()


def digest_of(tensor: torch.Tensor) -> bytes:
    """What equal tensors have in common, and others have not."""
    return hashlib.blake2b(tensor.cpu().contiguous().numpy().tobytes(), digest_size=16).digest()


@dataclass(frozen=True)
class ClassScore:
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
                "reading='score'"
            )
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        chosen = torch.tensor(self.classes, device=logits.device)[:, None]
        if self.of == "probability":
            return self.outputs.of_classes(logits, chosen[:, 0]), None
        others = logits.scatter(1, chosen, -torch.inf)
        return logits.gather(1, chosen)[:, 0] - others.amax(1), None

    def rows(self, images: torch.Tensor) -> Target:
        return replace(self, classes=tuple(self.classes[image] for image in images.tolist()))


KEPT = 0.9


def recognised(
    blank: Mapping[Baseline, torch.Tensor], photos: torch.Tensor, altered: torch.Tensor, classes: int
) -> Iterator[str]:
    """Say which photos keep their class though all of them is covered: curves that end there say little.

    A photo keeps it where nine tenths of its probability are left, and this is more than half of the way from chance,
    1 / K, to 1.

    Args:
        blank: for each baseline, the number of each image's covered row ``(N,)``, or -1 where none was run.
        photos: the probability of the photos as they are ``(N,)``.
        altered: that of all altered rows ``(P,)``.
        classes: K.
    """
    least = (KEPT * photos).clamp(min=(1 + 1 / classes) / 2)
    for baseline, rows in blank.items():
        found = torch.where(rows >= 0, altered[rows.clamp(min=0)], 0)
        kept = (found > least).nonzero().flatten().tolist()
        if kept:
            images, share = ", ".join(map(image_name, kept)), f"{found[kept].min().item():.2f}"
            yield (
                f"image {images} keeps its class with a probability of {share} or more where the baseline "
                f"{baseline.name!r} "
                "covers all of it, so that figures by this baseline say little; choose another baseline"
            )
