"""Does a map depend on the class? Classes that have nothing to do with the photo must have other maps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from explain.errors import MetricError
from explain.metrics.again import Found, Setting, World
from explain.metrics.base import Better, Case, Judged, check
from explain.metrics.maps import Sign
from explain.metrics.similarity import Similarity, similarity
from explain.metrics.verdict.answers import Answer
from explain.metrics.verdict.asking import SAME, answered, figure_of, of_zeros, with_zeros


@dataclass(frozen=True)
class DependsOnClass:
    """How alike the map is to those of classes far down the model's ranking.

    They are taken at equal distances from its lower half, and not from its top: a tabby and an Egyptian cat should look
    alike. The figure is the mean similarity. Less is better.

    Args:
        classes: how many.
        most: the similarity from which on the map fails; at 0.71, half of a map's variation is that of the other.
        similarity, sign: as for `MPRT`.

    Sixt et al., "When Explanations Lie", ICML 2020, for comparing the maps of classes.

    >>> DependsOnClass(classes=2).better
    'less'
    """

    classes: int = 3
    most: float = SAME
    similarity: Similarity = "spearman"
    sign: Sign = "own"

    name: ClassVar[str] = "depends_on_class"
    word: ClassVar[str] = "class"
    about: ClassVar[str] = "how alike the map is to those of classes far down the ranking"
    paper: ClassVar[str] = "Sixt et al., ICML 2020"
    units: ClassVar[str] = "similarity"
    better: ClassVar[Better] = "less"

    def __post_init__(self) -> None:
        check(self, classes=1)

    def unasked(self, world: World, case: Case) -> str:
        if world.classes is None or world.logits is None:
            return "the target is no class, so there are no others to compare with"
        return "" if world.logits.shape[1] > 1 else "the model has one class only"

    @property
    def brief(self) -> DependsOnClass:
        return replace(self, classes=1)

    def settings(self, world: World, case: Case) -> Iterator[Setting]:
        if world.classes is None or world.logits is None or world.logits.shape[1] < 2:
            raise MetricError(f"target must be one of several classes for {self.name}: {self.unasked(world, case)}")
        scores = world.logits.scatter(1, world.classes[:, None], torch.inf)
        others = scores.sort(dim=1, descending=True, stable=True).indices
        for place in far_down(others.shape[1] - 1, self.classes):
            yield Setting(("ranked", place), classes=others[:, place])

    def compare(self, case: Case, found: Found) -> torch.Tensor:
        alike = similarity(self.similarity, case.maps.of_places(self.sign), found.maps.of_places(self.sign))
        return with_zeros(alike, found)

    def __call__(self, case: Case, numbers: torch.Tensor) -> Judged:
        return Judged(numbers[..., 0].mean(1), parts={"alike": numbers[..., 0], "zeros": numbers[..., 1]})

    def judge(self, judged: Judged) -> Answer:
        figure = figure_of(judged)
        count = judged.parts["alike"].shape[1]
        whose = f"the maps of {count} classes" if count > 1 else "the map of a class"
        what = f"similarity {figure:.2f} to {whose} far down the ranking{of_zeros(judged)}"
        return answered(self, figure, figure < self.most, f"{what} (must be below {self.most:.2g})")


def far_down(others: int, count: int) -> list[int]:
    """Places in a ranking with ``others`` classes behind the first, at equal distances in its lower half.

    >>> far_down(999, 3), far_down(2, 3), far_down(1, 3)
    ([583, 750, 916], [2], [1])
    """
    first = others / 2
    return sorted({min(others, 1 + int(first + (number + 0.5) / count * first)) for number in range(count)})
