"""The altered photos that metrics ask for, as values; each distinct one is run once for all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from explain.engine import Evidence, Need, Rows
from explain.fills import Cover, Fill, covering
from explain.metrics.base import Case, Judged, Metric, Read

Make = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From whose row each is ``(b,)`` and which of its image's rows it is ``(b,)``, to altered photos ``(b, C, H, W)``."""

AS_IT_IS = "the photo as it is"


class Altered(Protocol):
    """Altered photos, ``count`` of each image."""

    @property
    def count(self) -> int: ...

    def keys(self, image: int) -> Sequence[Hashable]:
        """For each altered photo of an image, what it is known by: equal keys are equal photos."""
        ...

    def make(self, images: torch.Tensor, cover: Callable[[Fill], Cover]) -> Make:
        """Prepare to build rows of these images; ``cover`` prepares a fill for them."""
        ...


@dataclass(frozen=True, eq=False)
class Ask:
    """Altered photos, and what is to be read of each."""

    of: Altered
    reading: Read


@runtime_checkable
class OfScores(Metric, Protocol):
    """A metric that looks at how the model answers to altered photos."""

    def asks(self, case: Case) -> Sequence[Ask]:
        """The altered photos that it wants scored."""
        ...

    def __call__(self, case: Case, scores: Sequence[torch.Tensor]) -> Judged:
        """Turn the scores ``(N, count)`` of each ask into a figure for each image."""
        ...


@dataclass(frozen=True, eq=False)
class Ranked:
    """Photos whose pixels are covered by rank: row k covers those with ``start[k] <= rank < end[k]``.

    ``ranks`` ``(N, H, W)`` has the rank of each pixel, and ``start`` and ``end`` ``(N, K)`` whole numbers.
    """

    ranks: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    fill: Fill

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
        return (self.fill,) if (start, end) == (0, last) else (self.fill, digest, start, end)

    def make(self, images: torch.Tensor, cover: Callable[[Fill], Cover]) -> Make:
        covered = cover(self.fill)

        def make(owners: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            ranks = self.ranks if len(self.ranks) == 1 else self.ranks[owners]
            start, end = (each[owners, numbers].reshape(-1, 1, 1) for each in (self.start, self.end))
            keep = (ranks < start).logical_or_(ranks >= end)
            return covered(owners, keep[:, None].to(images))

        return make


def covered_by_rank(
    ranks: torch.Tensor, fill: Fill, start: Sequence[int] | torch.Tensor, end: Sequence[int] | torch.Tensor
) -> Ranked:
    """Cover the pixels whose rank is from ``start`` to before ``end``: for all images, or for each ``(N, K)``."""
    ends = [torch.as_tensor(each, device=ranks.device).expand(len(ranks), -1) for each in (start, end)]
    return Ranked(ranks, ends[0], ends[1], fill)


@dataclass(frozen=True, eq=False)
class Soft:
    """Photos seen through one mask each, ``keep`` ``(N, H, W)`` in [0, 1]."""

    keep: torch.Tensor
    fill: Fill
    count: ClassVar[int] = 1

    def keys(self, image: int) -> list[Hashable]:
        keep = self.keep[image]
        if not keep.any():
            return [(self.fill,)]
        return [AS_IT_IS if bool((keep == 1).all()) else (self.fill, "soft", digest_of(keep))]

    def make(self, images: torch.Tensor, cover: Callable[[Fill], Cover]) -> Make:
        covered = cover(self.fill)
        return lambda owners, numbers: covered(owners, self.keep[owners][:, None].to(images))


class Book:
    """Keeps one row for each distinct altered photo of N images ``(N, C, H, W)``."""

    def __init__(self, images: torch.Tensor) -> None:
        self._images = images
        self._rows: list[dict[Hashable, int]] = [{} for _ in range(len(images))]
        self._owners: list[int] = []
        self._sources: list[tuple[int, int]] = []
        self._altered: list[Altered] = []

    def __len__(self) -> int:
        return len(self._owners)

    def enter(self, altered: Altered) -> torch.Tensor:
        """Enter altered photos; return the number of each one's row ``(N, count)``, or -1 where nothing is altered."""
        self._altered.append(altered)
        found = [self._of_image(image, altered.keys(image)) for image in range(len(self._images))]
        return torch.tensor(found, dtype=torch.long, device=self._images.device)

    def blank(self) -> dict[Fill, torch.Tensor]:
        """For each fill that covers a photo all over, the number of each image's row ``(N,)``, or -1."""
        keys = dict.fromkeys(key for known in self._rows for key in known)
        fills: list[Fill] = [key[0] for key in keys if isinstance(key, tuple) and len(key) == 1]
        rows = {fill: [known.get((fill,), -1) for known in self._rows] for fill in fills}
        return {fill: torch.tensor(found, device=self._images.device) for fill, found in rows.items()}

    def _of_image(self, image: int, keys: Sequence[Hashable]) -> list[int]:
        known = self._rows[image]
        for number, key in enumerate(keys):
            if key is not AS_IT_IS and key not in known:
                known[key] = len(self._owners)
                self._owners.append(image)
                self._sources.append((len(self._altered) - 1, number))
        return [-1 if key is AS_IT_IS else known[key] for key in keys]

    def rows(self) -> Rows:
        """All rows; each is built when it is run."""
        device = self._images.device
        owners = torch.tensor(self._owners, dtype=torch.long, device=device)
        sources = torch.tensor(self._sources, dtype=torch.long).reshape(-1, 2)
        covers: dict[Fill, Cover] = {}
        makers: dict[int, Make] = {}

        def cover(fill: Fill) -> Cover:
            if fill not in covers:
                covers[fill] = covering(fill, self._images)
            return covers[fill]

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

        return Rows(owners, make)


@dataclass(frozen=True, eq=False)
class Entered:
    """The rows of a book, as the engine takes them."""

    book: Book

    of_layer: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __str__(self) -> str:
        return "photos altered for metrics"

    def count(self, channels: int) -> int:
        return len(self.book)

    def rows(self, evidence: Evidence) -> Rows:
        return self.book.rows()


def digest_of(tensor: torch.Tensor) -> bytes:
    """What equal tensors have in common, and others have not."""
    return hashlib.blake2b(tensor.cpu().contiguous().numpy().tobytes(), digest_size=16).digest()
