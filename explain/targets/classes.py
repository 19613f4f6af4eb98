"""One score for a whole image: a class, a yes or no, a likeness."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

import torch
import torch.nn.functional as F

from explain._utils.errors import TargetError, image_name, short_repr, shown, warn
from explain.targets import detections, detector_outputs, regions
from explain.targets.base import (
    CheckedTarget,
    Labels,
    Picked,
    Target,
    check_one_per_image,
    class_index,
    find_logits,
    find_scores,
    find_tensor,
    need_tensor,
)
from explain.targets.labels import Category, class_label, find_category, from_start
from explain.targets.outputs import THRESHOLD, Kind, label_of_no

PREDICTED = ("predicted", "all")
EMBEDDINGS = (
    "embedding",
    "embeddings",
    "image_embeds",
    "pooler_output",
    "features",
    "out",
    "logits",
)


@dataclass(frozen=True)
class ClassTarget(Target):
    """The logit of a class: one index for every image, or one index for each; or its label, until
    labels are known.

    Where a model gives boxes, it stands for all `Detections` of the class together, and where it
    gives maps of classes for its `Segmentation`.
    """

    index: int | str | tuple[int, ...]
    categories: Labels = field(default=None, repr=False, compare=False)
    """The labels of the classes, for messages."""

    def __post_init__(self) -> None:
        """Refuse a class that is no index, label or tuple of indices."""
        if not isinstance(self.index, (int, str, tuple)):
            raise TargetError(
                "index must be a class index, a label, or a tuple with an index for each image, "
                f"got {shown(self.index)}"
            )

    @property
    def name(self) -> str:
        return str(self.index)

    def pick(self, output: Any, count: int) -> Picked:
        """The score ``(count,)`` of the class that is explained, and its index for each image."""
        if isinstance(self.index, str):  # "yes" or "no"; without labels all others are refused
            return self.labelled(None).pick(output, count)
        scores = find_logits(output, count)
        classes = scores.shape[1]
        if isinstance(self.index, int):  # indexing by an int spares a copy to the device
            index = class_index(self.index, classes)
            return scores[:, index], torch.full((count,), index, device=scores.device)
        check_one_per_image("target", len(self.index), count)
        indices = [class_index(index, classes) for index in self.index]
        chosen = torch.tensor(indices, device=scores.device)
        return scores.gather(1, chosen[:, None])[:, 0], chosen

    def resolved(self, output: Any, count: int) -> Target:
        """The same target for a model of class scores; for a detector all boxes of the class, for a
        segmenter its region."""
        if isinstance(output, torch.Tensor) and output.ndim == 2:
            return self
        elsewhere = _elsewhere(
            output, count, label=self.index, rank="all", categories=self.categories
        )
        return elsewhere or self

    def probability(self, probabilities: torch.Tensor) -> torch.Tensor:
        return self.pick(probabilities, len(probabilities))[0]

    def rows(self, images: torch.Tensor) -> "ClassTarget":
        """The class as the target for a batch of perturbed copies of the given images."""
        if not isinstance(self.index, tuple):
            return self
        return ClassTarget(tuple(self.index[image] for image in images.tolist()))

    def labelled(self, categories: Labels) -> Target:
        """The target with its label replaced by the class index; "yes" and "no" of a model with one
        output become a `BinaryLogit`."""
        label = self.index
        if not isinstance(label, str):
            return self if categories is None else ClassTarget(label, categories)
        may_be_yes_or_no = categories is None or (len(categories) == 1 and label != categories[0])
        if may_be_yes_or_no and label in ("yes", "no", label_of_no(categories)):
            return BinaryLogit(label == "yes")
        return ClassTarget(find_category(label, categories), categories)


@dataclass(frozen=True, eq=False)
class ChosenClasses(Target):
    """The logit of a class of each image that was read from the output: its indices ``(N,)`` stay
    on the device, which nobody waits for."""

    indices: torch.Tensor
    width: int
    """How many classes there were to choose from."""

    name = "the class of each image"

    def pick(self, output: Any, count: int) -> Picked:
        """The scores ``(count,)`` of the classes that were chosen on the images as they are, and
        their indices.
        """
        scores = find_logits(output, count)
        if scores.shape[1] < self.width:
            raise TargetError(
                f"output must have as many classes for altered images, got {scores.shape[1]} "
                f"and before {self.width}; explain images of one kind"
            )
        check_one_per_image("target", len(self.indices), count)
        return scores.gather(1, self.indices[:, None])[:, 0], self.indices

    def probability(self, probabilities: torch.Tensor) -> torch.Tensor:
        return self.pick(probabilities, len(probabilities))[0]

    def rows(self, images: torch.Tensor) -> "ChosenClasses":
        return ChosenClasses(self.indices[images], self.width)


@dataclass(frozen=True)
class TopClass(CheckedTarget):
    """Each image's best class, or with ``rank`` its second best (1), third best (2) and so on.

    Where a model gives boxes, these are its best detections; where it gives one map, the region
    that it predicts.
    """

    rank: int = 0
    top_k: int | None = field(default=None, repr=False, compare=False)
    """How many best classes the caller asked for, for messages."""

    @property
    def name(self) -> str:
        return f"top-{self.rank + 1}"

    def resolved(self, output: Any, count: int) -> Target:
        """The classes of this rank (best, second best, ...) in the images as they are, fixed for
        all perturbed copies; boxes or regions where the model gives these."""
        elsewhere = _elsewhere(output, count, label=None, rank=self.rank)
        if elsewhere is not None:
            return elsewhere
        scores = find_logits(output, count).detach()
        if not 0 <= self.rank < scores.shape[1]:
            raise TargetError(
                f"top_k must be at most {scores.shape[1]}, the number of the model's classes, got "
                f"{self.top_k or self.rank + 1}; give fewer"
            )
        top_indices = scores.topk(self.rank + 1, dim=1).indices
        return ChosenClasses(top_indices[:, self.rank], scores.shape[1])


def _elsewhere(
    output: Any,
    count: int,
    label: int | str | tuple[int, ...] | None,
    rank: int | Literal["all"],
    categories: Labels = None,
) -> Target | None:
    """The resolved target for a class if the output has boxes or maps instead of class scores; else
    None. ``label`` is the class (None is any, or the top one), ``rank`` which of its detections.
    """
    if _has_class_scores(output, count):
        return None
    if detector_outputs.find_layout(output, count) is not None:
        boxes = detections.Detections(label, index=rank, categories=categories)
        return boxes.resolved(output, count)
    if regions.read_class_maps(output, count) is not None:
        if rank != "all" and rank > 0:
            raise TargetError(
                "top_k must be 1 for a model that gives maps of classes, got more; name classes "
                "with targets="
            )
        return regions.Segmentation(label).resolved(output, count)
    return None


def _has_class_scores(output: Any, count: int) -> bool:
    """Whether an output has class scores ``(count, K)``, and so is that of no detector."""
    if isinstance(output, torch.Tensor) and find_scores(output, count) is not None:
        return True
    has_boxes = isinstance(output, Mapping) and "boxes" in output
    return not has_boxes and find_tensor(output, count, (2,)) is not None


@dataclass(frozen=True)
class Predicted(Target):
    """All labels that are predicted of a photo, or all detections on it: a target of its own for
    each, the most probable first; also as "predicted" or "all".

    An `explain.Explainer` and a run take it, since photos have different numbers of them. Where no
    label is predicted, the most probable one is explained, with a warning if several may be true.

    Args:
        threshold: from which probability on a label is predicted: one for all, or a mapping from
            labels or indices to theirs; that of labels which it leaves out, and without one of all,
            is 0.5, and of detections 0.35.

    Raises:
        TargetError: a threshold is not from 0 to 1.

    >>> Predicted({"cat": 0.3}).labelled(["cat", "dog"]).classes_in(
    ...     torch.tensor([0.4, 0.4]), "labels"
    ... )
    [ClassTarget(index=0)]
    """

    threshold: float | Mapping[Any, float] | None = field(default=None, hash=False)

    name = PREDICTED[0]

    def __post_init__(self) -> None:
        """Refuse a threshold that is no probability."""
        if self.threshold is None:
            return
        of_labels = self.threshold if isinstance(self.threshold, Mapping) else {"": self.threshold}
        for value in of_labels.values():
            if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
                raise TargetError(
                    f"threshold must be a probability from 0 to 1, or one for each label, got "
                    f"{shown(value)}; leave it out for 0.5"
                )

    def labelled(self, categories: Labels) -> "Predicted":
        """The target with the labels of its thresholds replaced by the indices of the classes."""
        if not isinstance(self.threshold, Mapping):
            return self
        of_classes = {
            find_category(label, categories): value for label, value in self.threshold.items()
        }
        return Predicted(of_classes)

    def limits(self, count: int) -> torch.Tensor:
        """From which probability on each of ``count`` labels is predicted: ``(count,)`` float64."""
        thresholds = torch.full((count,), THRESHOLD, dtype=torch.float64, device="cpu")
        if isinstance(self.threshold, Mapping):
            for index, value in self.threshold.items():
                thresholds[class_index(int(index), count)] = value
        elif self.threshold is not None:
            thresholds[:] = self.threshold
        return thresholds

    def classes_in(self, probabilities: torch.Tensor, kind: Kind) -> list[ClassTarget]:
        """The classes that are predicted of one photo, the most probable first, from the
        probabilities ``(K,)`` of outputs of this kind."""
        limits = self.limits(len(probabilities)).to(probabilities)
        order = probabilities.argsort(descending=True, stable=True)
        chosen = order[(probabilities >= limits)[order]].tolist()
        if not chosen and kind == "labels":
            warn(
                f"no label reaches the threshold on {image_name(0)}; its most probable one is "
                "explained"
            )
        return [ClassTarget(index) for index in chosen or order[:1].tolist()]

    def detections_in(
        self, output: Any, size: detector_outputs.Size, categories: Labels
    ) -> list[Target] | None:
        """The detections in a detector's output for one image of ``size``, best first, each a
        target: the second of a class has the index 1. None for an output without boxes.
        """
        if _has_class_scores(output, 1):
            return None
        boxes = detector_outputs.find_layout(output, 1, size)
        if boxes is None:
            return None
        default = detections.Detections.threshold  # of classes that have none of their own
        thresholds: Mapping[Any, float] = {}
        if isinstance(self.threshold, Mapping):
            class_count = len(categories or ())
            # as plain ints, since NumPy's would not be counted from the start
            thresholds = {
                from_start(int(index), class_count): value
                for index, value in self.threshold.items()
            }
        elif self.threshold is not None:
            default = self.threshold
        # A target takes its `index` among the detections of its class above its threshold. All get
        # the least one, so that what is counted here is what they count.
        least = min([default, *thresholds.values()])
        chosen: list[Target] = []
        counts: Counter[int] = Counter()
        all_boxes = detections.Detections(size=size, threshold=least)
        for position, category in all_boxes.detected(output, count=1, image=0):
            if float(boxes.scores[0][position, category]) > thresholds.get(category, default):
                name = Category(category, class_label(categories, category))
                index = counts[category]
                chosen.append(detections.Detections(name, index=index, threshold=least))
            counts[category] += 1
        if not chosen:
            of_labels = "".join(
                f", {value:g} for {class_label(categories, category)}"
                for category, value in thresholds.items()
            )
            raise detections.NotDetectedError(
                f"target 'all' must be detected on {image_name(0)} with a score above "
                f"{default:g}{of_labels}, but nothing is; lower the threshold, or name a target"
            )
        return chosen

    def resolved(self, output: Any, count: int) -> Target:
        raise TargetError(
            "target 'predicted' stands for as many classes as a photo has, so it must be given to "
            "an Explainer or a run; name targets here"
        )


@dataclass(frozen=True)
class BinaryLogit(CheckedTarget):
    """The answer of a model with one logit for each image, ``(N,)`` or ``(N, 1)``: yes, or with
    ``positive=False`` no.

    A plain class index 0, or no target at all, also stands for yes.

    >>> BinaryLogit(positive=False).pick(torch.tensor([3.0, -1.0]), 2)[0]
    tensor([-3.,  1.])
    """

    positive: bool = True

    activation = "sigmoid"  # turns the score of a yes into its probability

    @property
    def name(self) -> str:
        return "yes" if self.positive else "no"

    def pick(self, output: Any, count: int) -> Picked:
        """The model's one logit ``(count,)`` for "yes", or its negative for "no"; the class index
        is 0 for "yes", None for "no".

        Raises:
            TargetError: the model gives several logits.
        """
        logits = find_logits(output, count)
        if logits.shape[1] != 1:
            raise TargetError(
                f"target {self.name} must have a model with one logit per image, got "
                f"{logits.shape[1]}; give a class"
            )
        yes = logits[:, 0]
        return (yes, torch.zeros_like(yes, dtype=torch.long)) if self.positive else (-yes, None)

    def probability(self, probabilities: torch.Tensor) -> torch.Tensor:
        yes = probabilities[:, 0]
        return yes if self.positive else 1 - yes


@dataclass(frozen=True, eq=False)
class Similarity(Target):
    """The cosine between the embedding that a model gives and another one: what makes this image
    similar to that one?

    Args:
        embedding: ``(D,)``, or ``(N, D)`` with one for each image; what the model says of a second
            image, for example.

    Raises:
        TargetError: not a vector, or only zeros, which point nowhere.

    >>> Similarity(torch.tensor([3.0, 4.0])).pick(torch.tensor([[1.0, 0.0], [6.0, 8.0]]), 2)[0]
    tensor([0.6000, 1.0000])
    """

    embedding: torch.Tensor

    name = "similarity"
    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Check the embedding to compare with, and flatten it to ``(D,)`` or ``(N, D)``."""
        embedding = torch.as_tensor(self.embedding).detach()
        flat = embedding.flatten(1) if embedding.ndim > 1 else embedding
        flat = flat[0] if flat.ndim == 2 and len(flat) == 1 else flat  # one for all images
        if flat.ndim == 0 or bool((flat == 0).all(-1).any()):
            raise TargetError(
                "embedding must hold numbers (D,) or (N, D), not only zeros, got shape "
                f"{tuple(embedding.shape)}; take an output"
            )
        object.__setattr__(self, "embedding", flat)

    def pick(self, output: Any, count: int) -> Picked:
        """The cosine ``(count,)`` between the model's embedding of each image and the given one."""
        # (N, D), or (N, D, 1, 1) as behind a pooling
        embeddings = need_tensor(
            output, count, (2, 4), self, shape="embeddings (N, D)", names=EMBEDDINGS
        ).flatten(1)
        reference = self.embedding.to(embeddings)
        if reference.shape not in (embeddings.shape, embeddings.shape[1:]):
            raise TargetError(
                f"embedding must have the shape {tuple(embeddings.shape)} of the model's, or "
                f"that of one image, got {tuple(reference.shape)}"
            )
        return F.cosine_similarity(embeddings, reference.expand_as(embeddings), dim=1), None

    def rows(self, images: torch.Tensor) -> "Similarity":
        """The similarity target for a batch of perturbed copies of the given images: their
        embeddings."""
        is_for_all_images = self.embedding.ndim == 1
        return (
            self
            if is_for_all_images
            else Similarity(self.embedding[images.to(self.embedding.device)])
        )
