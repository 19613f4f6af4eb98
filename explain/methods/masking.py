"""Images of which masks cover a part with a baseline, and the scores that their scores are compared
with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from explain._utils.errors import MethodError
from explain.baselines.base import Baseline
from explain.engine import Evidence, Perturbation, PerturbedRows
from explain.engine.perturbations import (
    OneForEach,
    ScoreKind,
    ScoreOf,
    Scores,
    Unperturbed,
    one_by_one,
    one_sample_each,
    samples_of,
)
from explain.methods.regions import Cell, pixels_of

Score = Literal["logit", "probability"]
"""What is explained: the score as the target picks it, or the probability of its class."""


class MaskedInputs(Perturbation):
    """Images of which masks cover a part with a baseline.
    A subclass is a frozen dataclass with the field ``baseline``, and makes the `masks`.
    """

    baseline: Baseline

    covered_by = ""
    """What a plan of runs calls the masks."""

    def __str__(self) -> str:
        return f"photos covered by {self.covered_by}; baseline: {self.baseline.name}"

    def masks(self, evidence: Evidence) -> PerturbedRows:
        """The masks ``(b, 1, H, W)`` in [0, 1]: 1 where an image stays as it is, 0 where it is
        covered."""
        raise NotImplementedError

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """The images with their masked parts replaced by the baseline: one perturbed input for each
        mask. An input without pixels, such as a table of numbers, has one, and stays as it is.
        """
        x = evidence.inputs
        if not evidence.size:  # no picture to cover
            return one_sample_each(x)
        return self._covered(x, self.masks(evidence))

    def matching_rows(self, evidence: Evidence, first: PerturbedRows) -> PerturbedRows:
        """Cover the same part of another explained input ``evidence.inputs``, such as the second
        image of a pair, with the masks of the ``first`` input brought to its size.
        """
        x = evidence.inputs
        make_masks = first.masks
        # without a picture, or where nothing was covered of the first one: as it is in each sample
        if not evidence.size or make_masks is None:
            return replace(first, build=lambda images, numbers: x[images])

        def resized_masks(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            """The masks of the first input for these perturbed inputs, brought to the size of this
            one.
            """
            masks = make_masks(images, numbers).to(x)
            if masks.ndim != x.ndim:
                raise MethodError(
                    "explained must name inputs of one kind where parts are covered, got "
                    f"{masks.ndim} and {x.ndim} dimensions; leave out words=True, or use "
                    "integratedgradients"
                )
            return F.interpolate(masks, evidence.size, mode="nearest-exact")

        return self._covered(x, replace(first, build=resized_masks))

    def _covered(self, x: torch.Tensor, masks: PerturbedRows) -> PerturbedRows:
        """The perturbed inputs in which masks ``(b, 1, H, W)`` cover the images ``x`` ``(N, C, H,
        W)`` with the baseline; masks are made when they are run.
        """
        cover = self.baseline.covering(x)

        def covered(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            return cover(images, masks.build(images, numbers).to(x))

        return replace(masks, build=covered, masks=masks.build)


@dataclass(frozen=True, eq=False)
class ShownParts(MaskedInputs):
    """Perturbed images of one image, number ``image``: one for each of some ``parts``,
    which shows this part and covers all else. ``mask`` makes the mask ``(H, W)`` of a part."""

    baseline: Baseline
    image: int
    parts: Sequence[Any]
    mask: Callable[[Any], torch.Tensor]

    covered_by = "all but some parts"

    def count(self, channels: int, size: tuple[int, ...]) -> int:
        return len(self.parts)

    def masks(self, evidence: Evidence) -> PerturbedRows:
        """The masks ``(b, 1, H, W)`` of one image's parts: 1 in the part, 0 elsewhere. The other
        images of the batch have none.
        """
        counts = [0] * len(evidence.inputs)
        counts[self.image] = len(self.parts)

        mask_of = one_by_one(lambda image, number: self.mask(self.parts[number])[None])
        return samples_of(counts, evidence.inputs.device, mask_of)


@dataclass(frozen=True)
class FullyMasked(OneForEach):
    """Images that a baseline covers entirely: a reference for the scores of others."""

    baseline: Baseline

    is_reference = True

    def __str__(self) -> str:
        return f"photos covered wholly; baseline: {self.baseline.name}"

    def perturbed(self, evidence: Evidence) -> torch.Tensor:
        """The images ``(N, C, H, W)`` with the baseline in every pixel; an input without pixels
        stays as it is."""
        x = evidence.inputs
        if not evidence.size:
            return x
        nothing = torch.zeros_like(x[:, :1])
        return self.baseline.covering(x)(torch.arange(len(x), device=x.device), nothing)


def box_mask(cells: Sequence[Cell], like: torch.Tensor) -> torch.Tensor:
    """A mask ``(H, W)`` that is 1 in the boxes ``cells``, 0 elsewhere, of the size, type and device
    of images ``like`` ``(N, C, H, W)``."""
    mask = like.new_zeros(like.shape[2:])
    for cell in cells:
        mask[pixels_of(cell)] = 1
    return mask


def blank_score(baseline: Baseline, score: ScoreKind) -> Scores:
    """The need for the score ``(N,)`` of images that the baseline covers entirely, as logit or
    probability: what "nothing seen" scores."""
    return Scores(FullyMasked(baseline), ScoreOf(score))


def whole_score(score: ScoreKind) -> Scores:
    """The need for the score ``(N,)`` of the images as they are, in the precision of the perturbed
    ones."""
    return Scores(Unperturbed(), ScoreOf(score))
