"""A target of its own for each image, and single numbers of an output."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from explain._utils.errors import TargetError
from explain._utils.nested import items, with_items
from explain.targets.base import (
    Picked,
    Target,
    check_one_per_image,
    find_tensor,
    images_of_samples,
    need_tensor,
)
from explain.targets.classes import ClassTarget
from explain.targets.functions import ScoreTarget


@dataclass(frozen=True)
class Element(Target):
    """One number of each image's output at ``index``: ``output[:, 3, 2, 1]``. With ``or_classes``,
    a class for each image instead where the output has class scores and no such dimensions."""

    index: tuple[int, ...]
    or_classes: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        return str(self.index)

    def pick(self, output: Any, count: int) -> Picked:
        """One number of an output as the target: ``output[:, i, j, ...]`` of each image,
        ``(count,)``.
        """
        if self.or_classes:
            return self.resolved(output, count).pick(output, count)
        dimensions = len(self.index) + 1
        tensor = need_tensor(output, count, (dimensions,), self, shape=f"{dimensions} dimensions")
        sizes = tensor.shape[1:]
        if any(not -size <= i < size for i, size in zip(self.index, sizes, strict=True)):
            got = tuple(tensor.shape)
            raise TargetError(
                f"target {self.name} must lie within the output, got one of shape {got}; count "
                "from 0"
            )
        place: Any = (slice(None), *self.index)
        return tensor[place], None

    def resolved(self, output: Any, count: int) -> Target:
        """The target for this output: a place in it, or with ``or_classes`` a class for each image
        if it has class scores."""
        if not self.or_classes:
            return self
        has_place = find_tensor(output, count, (len(self.index) + 1,)) is not None
        has_scores = find_tensor(output, count, (2,)) is not None
        return Element(self.index) if has_place and not has_scores else ClassTarget(self.index)


@dataclass(frozen=True)
class Separate(Target):
    """A target for each image, which reads the output of the whole batch. ``images`` says which
    image each sample belongs to; None takes them in turn."""

    targets: tuple[Target, ...]
    images: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The first four targets' names, in messages and captions, and in results and records."""
        names = [target.name for target in self.targets]
        more = f", ... ({len(names)})" if len(names) > 4 else ""
        return ", ".join(names[:4]) + more

    def pick(self, output: Any, count: int) -> Picked:
        """The score ``(count,)`` of each sample by the target of its own image, and the classes if
        all targets have them."""
        images = self._images(count)
        # each target was resolved on one image (number 0), and scores all samples
        all_first_image = torch.zeros(count, dtype=torch.long)
        scores = {}
        classes = {}
        for image in set(images):
            scores[image], classes[image] = (
                self.targets[image].rows(all_first_image).pick(output, count)
            )
        picked = torch.stack([scores[image][sample] for sample, image in enumerate(images)])
        indices = []
        for sample, image in enumerate(images):
            image_classes = classes[image]
            if image_classes is None:
                return picked, None
            indices.append(image_classes[sample])
        return picked, torch.stack(indices)

    def probability(self, probabilities: torch.Tensor) -> torch.Tensor | None:
        count = len(probabilities)
        # each target was resolved on one image (number 0), and reads all samples
        all_first_image = torch.zeros(count, dtype=torch.long)
        samples = []
        for sample, image in enumerate(self._images(count)):
            target = self.targets[image].rows(all_first_image)
            of_all = target.probability(probabilities)
            if of_all is None:
                return None
            samples.append(of_all[sample])
        return torch.stack(samples)

    def resolved(self, output: Any, count: int) -> "Separate":
        """Resolve each image's target on the sample of its image alone."""
        if self.images is not None:  # that of perturbed copies, which is resolved
            return self
        check_one_per_image("target", len(self.targets), count)
        resolved: list[Target] = []
        for image, target in enumerate(self.targets):
            # a function gets the whole output, as `as_target` says, and chooses nothing beforehand
            if not isinstance(target, ScoreTarget):
                sample = take(output, count, [image])
                target = target.resolved(sample, 1)
                target.pick(sample, 1)  # refuses a target that holds something for several images
            resolved.append(target)
        return replace(self, targets=tuple(resolved))

    def rows(self, images: torch.Tensor) -> "Separate":
        """The targets for a batch of perturbed copies of the given images: which image's target
        each sample has."""
        return replace(self, images=images_of_samples(self.images, images))

    def mapped(self, change: Callable[[Target], Target]) -> "Separate":
        return replace(self, targets=tuple(map(change, self.targets)))

    def _images(self, count: int) -> Sequence[int]:
        """The image whose target each of the ``count`` samples of an output has, where each image
        has its own. Raises `TargetError` if there are more or fewer samples than images."""
        images = range(len(self.targets)) if self.images is None else self.images
        check_one_per_image("target", len(images), count)
        return images


def take(value: Any, count: int, samples: Sequence[int]) -> Any:
    """Return a model's output with these ``samples`` of its ``count``, in their order, in
    tensors and lists anywhere in it; what has no entry for each sample stays as it is."""
    if isinstance(value, torch.Tensor):
        return value[list(samples)] if value.ndim and len(value) == count else value
    members = [member for _, member in items(value)]
    has_tensors = any(isinstance(member, torch.Tensor) for member in members)
    # tensors in a list, such as those of several levels, have the samples inside
    if type(value) is list and len(value) == count and not has_tensors:
        return [value[sample] for sample in samples]
    if not members:
        return value
    return with_items(value, [take(member, count, samples) for member in members])
