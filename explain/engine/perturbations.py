"""Perturbations and reducers: which rows are run, what is computed for each, and how results are added up.

Methods, metrics and checks give the engine these values. Equal ones are run once for all methods and targets of a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from explain.engine.evidence import Evidence
from explain.engine.needs import Activations, Need

Make = Callable[[torch.Tensor], torch.Tensor]
"""From row numbers ``(b,)`` to ``b`` perturbed inputs or feature maps: new tensors, which the network may overwrite."""


@dataclass(frozen=True)
class PerturbedRows:
    """Perturbed rows: ``owners`` ``(P,)`` has the image of each row, and ``make`` builds the rows with given numbers.

    ``carry`` does to a tensor with a row for each image what was done to the photo's geometry: ``(tensor, rows)`` to
    one row for each perturbed row. None: nothing was moved. ``keep`` returns the masks of rows, if it has any.
    """

    owners: torch.Tensor
    make: Make
    carry: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    keep: Make | None = None


def interleaved(counts: Sequence[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The image of each row, and the number of the row among those of its image.

    The first row of all images comes first, then the second of all that have one, and so on.

    >>> interleaved([1, 2], torch.device("cpu"))
    (tensor([0, 1, 1]), tensor([0, 0, 1]))
    """
    exists = torch.arange(max(counts, default=0), device=device)[:, None] < torch.tensor(counts, device=device)
    numbers, images = exists.nonzero(as_tuple=True)
    return images, numbers


def copies(x: torch.Tensor, count: int, make: Callable[[int, int], torch.Tensor]) -> PerturbedRows:
    """``count`` rows for each image of ``x``, image by image; ``make(image, number)`` builds one of them."""

    def rows(numbers: torch.Tensor) -> torch.Tensor:
        return torch.stack([make(row // count, row % count) for row in numbers.tolist()])

    return PerturbedRows(torch.arange(len(x), device=x.device).repeat_interleave(count), rows)


class Perturbation(ABC):
    """A plan of perturbed rows. Subclasses are frozen dataclasses: equal ones are run once for all methods of a call.

    It may look at the evidence that it ``needs``, and at nothing that depends on the target.
    """

    of_tokens: ClassVar[bool] = False
    """Whether it leaves tokens out before the first block of a transformer: its rows are truth values ``(b, h, w)``,
    true for the tokens that stay, as many in each row. It alters no layer then."""
    is_reference: ClassVar[bool] = False
    """Whether the scores of other rows are compared with those of its rows; it is run first then."""

    full_precision: ClassVar[bool] = False
    """Whether its rows are never run in bfloat16, since they are compared with scores in full precision."""

    @property
    def of_layer(self) -> bool:
        """Whether it alters feature maps ``(b, C, h, w)`` of a layer, and not inputs ``(b, C, H, W)``."""
        return False

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset()

    @abstractmethod
    def count(self, channels: int, size: tuple[int, ...]) -> int:
        """How many rows each image has at most, for a layer with so many channels and a photo of this size.

        Both are 0 or empty where they are not known; the count is 0 where it depends on them.
        """

    @abstractmethod
    def rows(self, evidence: Evidence) -> PerturbedRows:
        """The perturbed rows of the images."""

    def matching_rows(self, evidence: Evidence, first: PerturbedRows) -> PerturbedRows:
        """The perturbed rows of a second explained input, which are run together with the ``first`` one's."""
        return self.rows(evidence)


class Accumulator(ABC):
    """Adds up the results of perturbed rows as they come."""

    @abstractmethod
    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Take what was found for rows ``numbers`` ``(b,)``, which belong to ``images`` ``(b,)``: ``(b, ...)``."""

    @abstractmethod
    def result(self) -> Any: ...

    def enough(self) -> bool:
        """Whether no more rows are needed."""
        return False

    def done(self) -> torch.Tensor | None:
        """Which images ``(N,)`` need no more rows; None where all images need the same rows."""
        return None

    def so_far(self) -> torch.Tensor | None:
        """The map by now, with zeros for images without one; None where there is none before all rows have come."""
        return None

    def partial(self) -> Any:
        """The result by now, marked as unfinished; None where there is none before all rows have come."""
        return None


class Reducer(ABC):
    """A way to add up results of perturbed rows. Subclasses are frozen dataclasses, as perturbations are."""

    @abstractmethod
    def begin(self, evidence: Evidence) -> Accumulator: ...


@dataclass(frozen=True)
class InOrder(Reducer):
    """Keeps the result of each row, in the order of the rows."""

    def begin(self, evidence: Evidence) -> Accumulator:
        return _InOrder(evidence.score)


class _InOrder(Accumulator):
    def __init__(self, like: torch.Tensor) -> None:
        self._values, self._numbers = [like.new_zeros(0)], [torch.zeros(0, dtype=torch.long, device=like.device)]

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        self._values.append(values)
        self._numbers.append(numbers)

    def result(self) -> torch.Tensor:
        return torch.cat(self._values)[torch.argsort(torch.cat(self._numbers))]


class SumOfRows(Accumulator):
    """The sum over the rows of each of ``count`` images of ``weigh(images, numbers, values)``."""

    def __init__(self, count: int, weigh: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self._count, self._weigh = count, weigh
        self._total: torch.Tensor | None = None

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        weighted = self._weigh(images, numbers, values)
        if self._total is None:
            self._total = weighted.new_zeros(self._count, *weighted.shape[1:])
        self._total.index_add_(0, images, weighted)

    def result(self) -> torch.Tensor | None:
        return self._total


class Attributor(Protocol):
    """A method, as far as the engine uses it."""

    @property
    def needs(self) -> frozenset[Need[Any]]: ...

    def __call__(self, evidence: Evidence) -> torch.Tensor: ...


@dataclass(frozen=True)
class Scores(Need[torch.Tensor]):
    """The score ``(P,)`` of each perturbed row; for other numbers than the score's, the class scores ``(P, K)``."""

    of: Perturbation
    logits: bool = False

    @property
    def of_layer(self) -> bool:
        return self.of.of_layer or any(need.of_layer for need in self.of.needs)

    @property
    def also(self) -> frozenset[Need[Any]]:
        return self.of.needs


@dataclass(frozen=True)
class Attributions(Need[Any]):
    """The results of a method for all perturbed rows, added up by a reducer."""

    of: Perturbation
    method: Attributor
    fold: Reducer

    @property
    def of_layer(self) -> bool:
        return any(need.of_layer for need in (*self.method.needs, *self.of.needs))

    @property
    def of_input(self) -> bool:
        return any(need.of_input for need in self.method.needs)

    @property
    def also(self) -> frozenset[Need[Any]]:
        return self.of.needs


class OneForEach(Perturbation):
    """A perturbation with one row for each image."""

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return 1

    @abstractmethod
    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        """The row of each image ``(N, ...)``."""

    def rows(self, evidence: Evidence) -> PerturbedRows:
        perturbed = self.perturbed(evidence)
        return PerturbedRows(torch.arange(len(perturbed), device=perturbed.device), lambda rows: perturbed[rows])


@dataclass(frozen=True)
class Unperturbed(OneForEach):
    """The photo, or a layer's feature maps, as they are: a reference for the scores of other rows."""

    of_layer: bool = False

    is_reference = True

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({Activations()}) if self.of_layer else frozenset()

    def __str__(self) -> str:
        return "the layer's own maps" if self.of_layer else "the photo itself"

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        return evidence.activations if self.of_layer else evidence.inputs


@dataclass(frozen=True)
class ZeroInput(OneForEach):
    """A photo of zeros, which is what preprocessing makes of the training data's mean colour."""

    is_reference = True
    full_precision = True

    def __str__(self) -> str:
        return "a blank photo"

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        return torch.zeros_like(evidence.inputs)


@dataclass(frozen=True)
class PerturbationRuns(Need[Any]):
    """A `PerturbationRunner`, for perturbed rows that depend on earlier scores; ``of_layer`` for a layer's maps."""

    of_layer: bool = False
