"""Photos that are partly masked, the masks drawn when they are needed; and the scores that they are compared with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F

from explain._utils.errors import MethodError
from explain.baselines.base import Baseline
from explain.engine import Attributions, Evidence, Need, Perturbation, PerturbedRows
from explain.engine.perturbations import InOrder, Make, OneForEach, Unperturbed, interleaved
from explain.methods.regions import Cell

Score = Literal["logit", "probability"]
"""What is explained: the score as the target picks it, or the probability of its class."""


@dataclass(frozen=True)
class DrawnMasks:
    """Masks for some photos.

    ``counts`` says how many each image has. ``keep(images, numbers)`` gives those with some numbers, of some images:
    ``(b, 1, H, W)`` in [0, 1], 1 where the photo stays as it is.
    """

    counts: list[int]
    keep: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Masks(ABC):
    """A plan of masks. Subclasses are frozen dataclasses: equal ones are run once for all methods of a call."""

    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    @abstractmethod
    def most(self, size: tuple[int, ...]) -> int:
        """How many there are at most for a photo of this size; 0 if that is not known."""

    @abstractmethod
    def drawn(self, evidence: Evidence) -> DrawnMasks: ...


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
        if not evidence.size:  # no picture to cover
            return PerturbedRows(torch.arange(len(x), device=x.device), lambda rows: x[rows % len(x)])
        drawn = self.masks.drawn(evidence)
        images, numbers = interleaved(drawn.counts, x.device)
        return self._covered(x, images, lambda rows: drawn.keep(images[rows], numbers[rows]).to(x))

    def matching_rows(self, evidence: Evidence, first: PerturbedRows) -> PerturbedRows:
        """Cover the same part of another input: the masks of the first one, brought to its size.

        Raises:
            MethodError: one is a photo, the other a video.
        """
        x, keep = evidence.inputs, first.keep
        if not evidence.size or keep is None:
            return PerturbedRows(first.owners, lambda rows: x[first.owners[rows].to(x.device)])

        def resized(rows: torch.Tensor) -> torch.Tensor:
            masks = keep(rows).to(x)
            if masks.ndim != x.ndim:
                raise MethodError(
                    f"explained must name inputs with the same dimensions to be covered alike, got {masks.ndim} and "
                    f"{x.ndim}; name one of them"
                )
            return F.interpolate(masks, evidence.size, mode="nearest-exact")

        return self._covered(x, first.owners.to(x.device), resized)

    def _covered(self, x: torch.Tensor, owners: torch.Tensor, keep: Make) -> PerturbedRows:
        cover = self.baseline.covering(x)
        return PerturbedRows(owners, lambda rows: cover(owners[rows], keep(rows)), keep=keep)


@dataclass(frozen=True)
class FullyMasked(OneForEach):
    """Photos of which nothing is left but the baseline: a reference for the scores of others."""

    baseline: Baseline

    is_reference = True

    def __str__(self) -> str:
        return f"photos covered wholly; baseline: {self.baseline.name}"

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        x = evidence.inputs
        if not evidence.size:
            return x
        nothing = x.new_zeros(len(x), 1, *x.shape[2:])
        return self.baseline.covering(x)(torch.arange(len(x), device=x.device), nothing)


def box_mask(cells: Sequence[Cell], like: torch.Tensor) -> torch.Tensor:
    """A mask ``(1, H, W)`` for photos such as ``like``: 1 in the cells, 0 elsewhere."""
    mask = like.new_zeros(1, *like.shape[2:])
    for cell in cells:
        mask[0][tuple(slice(*ends) for ends in cell)] = 1
    return mask


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
    """The need for the score ``(N,)`` of fully masked photos."""
    return Attributions(FullyMasked(baseline), ScoreOf(score), InOrder())


def whole_score(score: Score) -> Attributions:
    """The need for the score ``(N,)`` of the photos as they are, in the precision of the perturbed ones."""
    return Attributions(Unperturbed(), ScoreOf(score), InOrder())
