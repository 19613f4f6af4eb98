"""Altered rows for masks: photos that are covered here and there, drawn when they are needed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
import torch.nn.functional as F

from explain._utils.errors import BaselineError, MethodError
from explain.baselines.base import Baseline
from explain.baselines.registry import get_baseline
from explain.engine import Attributions, Evidence, Need, Perturbation, PerturbedRows
from explain.engine.perturbations import InOrder, Make, Unperturbed

Score = Literal["logit", "probability"]
"""What is explained: the score as the target picks it, or the probability of its class."""


class Drawn(Protocol):
    """Masks for the photos of a question.

    ``counts`` says how many each image has; ``keep`` gives those with some numbers, of some images: ``(b, 1, H, W)`` in
    [0, 1], 1 where the photo stays as it is.
    """

    counts: list[int]

    def keep(self, images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor: ...


class Masks(Hashable, Protocol):
    """A plan of masks, as a frozen value: equal ones are run once for all methods and targets of a call."""

    @property
    def needs(self) -> frozenset[Need[Any]]: ...

    def most(self, size: tuple[int, ...]) -> int:
        """How many there are at most for a photo of this size; 0 if that is not known."""
        ...

    def drawn(self, evidence: Evidence) -> Drawn: ...


@dataclass(frozen=True)
class Order:
    """In which order masks are run: the first of all images, then the second of all that have one, and so on."""

    images: torch.Tensor
    numbers: torch.Tensor

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> Order:
        most = max(counts, default=0)
        there = torch.arange(most, device=device)[:, None] < torch.tensor(counts, device=device)
        numbers, images = there.nonzero(as_tuple=True)
        return cls(images, numbers)


@dataclass(frozen=True)
class MaskedInputs(Perturbation):
    """Photos covered by masks."""

    masks: Masks
    baseline: Baseline

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return self.masks.needs

    def __str__(self) -> str:
        return f"photos covered by {self.masks}; baseline: {self.baseline.name}"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return self.masks.most(size) if size else 0

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x = evidence.inputs
        if not evidence.size:
            return PerturbedRows(
                torch.arange(len(x), device=x.device), lambda rows: x[rows % len(x)]
            )  # no picture to cover
        drawn = self.masks.drawn(evidence)
        order = Order.of(drawn.counts, x.device)
        return self._of(x, order.images, lambda rows: drawn.keep(order.images[rows], order.numbers[rows]).to(x))

    def matching_rows(self, evidence: Evidence, first: PerturbedRows) -> PerturbedRows:
        """Cover the same part of another input: the masks of the first one, brought to its size.

        Raises:
            MethodError: one is a photo, the other a video.
        """
        x, keep = evidence.inputs, first.keep
        if not evidence.size or keep is None:
            return PerturbedRows(first.owners, lambda rows: x[first.owners[rows].to(x.device)])

        def brought(rows: torch.Tensor) -> torch.Tensor:
            masks = keep(rows).to(x)
            if masks.ndim != x.ndim:
                raise MethodError(
                    f"explained must name inputs with the same dimensions to be covered alike, got {masks.ndim} and "
                    f"{x.ndim}; name one of them"
                )
            return F.interpolate(masks, evidence.size, mode="nearest-exact")

        return self._of(x, first.owners.to(x.device), brought)

    def _of(self, x: torch.Tensor, owners: torch.Tensor, keep: Make) -> PerturbedRows:
        cover = self.baseline.covering(x)
        return PerturbedRows(owners, lambda rows: cover(owners[rows], keep(rows)), keep=keep)


@dataclass(frozen=True)
class FullyMasked(Perturbation):
    """Photos of which nothing is left but the baseline: what others are compared with."""

    baseline: Baseline

    is_reference: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"photos covered wholly; baseline: {self.baseline.name}"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return 1

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x = evidence.inputs
        if not evidence.size:
            return PerturbedRows(torch.arange(len(x), device=x.device), lambda rows: x[rows])
        cover = self.baseline.covering(x)
        return PerturbedRows(
            torch.arange(len(x), device=x.device), lambda rows: cover(rows, x.new_zeros(len(rows), 1, *x.shape[2:]))
        )


@dataclass(frozen=True)
class ScoreOf:
    """The score of each row, as the target picks it or as the probability of its class.

    Of targets that are no class, such as a detected box, it is the score in either case.
    """

    kind: Score = "logit"

    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        classes, logits = evidence.classes, evidence.logits
        if self.kind == "logit" or classes is None or logits is None:
            return evidence.score
        return evidence.outputs.of_classes(logits, classes)


def blank_score(baseline: Baseline, score: Score) -> Attributions:
    """What asks for the score ``(N,)`` of photos of which nothing is left."""
    return Attributions(FullyMasked(baseline), ScoreOf(score), InOrder())


def whole_score(score: Score) -> Attributions:
    """What asks for the score ``(N,)`` of the photos as they are, in the precision of the altered ones."""
    return Attributions(Unperturbed(), ScoreOf(score), InOrder())


def baseline_of(method: str, value: Any, option: str = "baseline") -> Baseline:
    """Return the baseline that an option stands for.

    Raises:
        MethodError: it stands for none.
    """
    try:
        return get_baseline(value)
    except (BaselineError, AttributeError, TypeError) as error:
        raise MethodError(f"{option} of {method} must be a baseline or the name of one: {error}") from None
