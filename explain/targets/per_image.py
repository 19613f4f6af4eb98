"""A target of its own for each image, and single numbers of an output with several dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from explain._utils.errors import TargetError
from explain.targets.base import Labels, Picked, Target, described, find_tensor
from explain.targets.classes import ClassTarget
from explain.targets.rows import must_follow_rows, take


@dataclass(frozen=True)
class Element(Target):
    """One number for each image of an output with several dimensions: ``output[:, 3, 2, 1]``.

    Args:
        index: where it is, behind the dimension of the images.

    Raises:
        TargetError: not whole numbers; or, when it is picked, outside of the output.

    >>> Element((1, 0)).pick(torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), 1)[0]
    tensor([3.])
    """

    index: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.index or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in self.index):
            raise TargetError(
                f"index must hold whole numbers from 0, one for each dimension behind the images, got {self.index!r}; "
                "(3, 2, 1) is output[:, 3, 2, 1]"
            )

    @property
    def name(self) -> str:
        return str(self.index)

    def pick(self, output: Any, count: int) -> Picked:
        found = find_tensor(output, count, (len(self.index) + 1,))
        if found is None:
            raise TargetError(
                f"target {self.name} must be asked of an output with {len(self.index) + 1} dimensions, the images "
                f"first, got {described(output)}; give an index for each dimension behind the first"
            )
        if any(i >= size for i, size in zip(self.index, found.shape[1:], strict=True)):
            raise TargetError(
                f"target {self.name} must lie within the output, got one of shape {tuple(found.shape)}; count from 0"
            )
        return found[(slice(None), *self.index)], None


@dataclass(frozen=True)
class Tuple(Target):
    """Whole numbers that are a class for each image where the output has class scores, and else an `Element`."""

    index: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.index)

    def pick(self, output: Any, count: int) -> Picked:
        return self.settled(output, count).pick(output, count)

    def settled(self, output: Any, count: int) -> Target:
        place = find_tensor(output, count, (len(self.index) + 1,)) is not None
        scores = find_tensor(output, count, (2,)) is not None
        return Element(self.index) if place and not scores else ClassTarget(self.index)


@dataclass(frozen=True)
class Separate(Target):
    """A target of its own for each image.

    Each reads the output of the whole batch, and the score in the row of its own image counts.

    Args:
        targets: N of them, in the order of the images.
        images: whose rows the output has; None is a row for each image in turn.

    >>> from explain.targets import ClassTarget, Difference
    >>> both = Separate((ClassTarget(2), Difference(0, 1)))
    >>> both.name, both.pick(torch.tensor([[1.0, 2.0, 3.0], [4.0, 6.0, 8.0]]), 2)[0]
    ('2, 0 − 1', tensor([ 3., -2.]))
    """

    targets: tuple[Target, ...]
    images: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        names = [target.name for target in self.targets]
        return ", ".join(names[:4]) + f", ... ({len(names)})" * (len(names) > 4)

    @property
    def may_ignore_rows(self) -> bool:
        return self.images is None and any(target.may_ignore_rows for target in self.targets)

    def pick(self, output: Any, count: int) -> Picked:
        images = self._images(count)
        used = sorted(set(images))
        alike = torch.zeros(count, dtype=torch.long)  # each target is settled for one image, and asked of all rows
        found = [self.targets[image].rows(alike).pick(output, count) for image in used]
        scores = torch.stack([score for score, _ in found])
        row = torch.tensor([[used.index(image) for image in images]], device=scores.device)
        classes = [own for _, own in found if own is not None]
        picked = torch.stack(classes).gather(0, row)[0] if len(classes) == len(found) else None
        return scores.gather(0, row)[0], picked

    def settled(self, output: Any, count: int) -> Separate:
        if self.images is not None:
            return self
        self._images(count)
        chosen = tuple(_settled(target, output, count, image) for image, target in enumerate(self.targets))
        must_follow_rows(made := replace(self, targets=chosen), output, count)
        return made

    def rows(self, images: torch.Tensor) -> Separate:
        rows = images.tolist()
        return replace(self, images=tuple(rows if self.images is None else (self.images[row] for row in rows)))

    def labelled(self, categories: Labels) -> Separate:
        return replace(self, targets=tuple(target.labelled(categories) for target in self.targets))

    def _images(self, count: int) -> Sequence[int]:
        images = range(len(self.targets)) if self.images is None else self.images
        if len(images) != count:
            raise TargetError(
                f"target must hold one target for each of the {count} images, got {len(images)}; targets= takes "
                "several for every image"
            )
        return images


def _settled(target: Target, output: Any, count: int, image: int) -> Target:
    """A target that has made its choices on the rows of one image alone."""
    if target.may_ignore_rows:
        return target.settled(output, count)
    alone = take(output, count, [image])
    chosen = target.settled(alone, 1)
    chosen.pick(alone, 1)  # one that holds something for several images is refused here
    return chosen
