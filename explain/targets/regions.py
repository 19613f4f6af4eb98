"""A class within a region of the image as the target, for models that give maps of classes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from explain._utils.errors import TargetError, short_repr, warn
from explain.targets.base import (
    READER,
    CheckedTarget,
    Labels,
    Picked,
    check_one_per_image,
    class_index,
    find_tensor,
    items_named,
    unsuitable,
)
from explain.targets.detector_outputs import SOFTMAX
from explain.targets.labels import find_category
from explain.targets.outputs import FinalActivation, Outputs, adds_up, is_fractional, outputs_like


class ClassMaps(NamedTuple):
    """Maps of classes ``(N, K, H, W)`` or ``(N, K, D, H, W)`` and their layout. Masks of all
    prompts are in K, and ``quality`` ``(N, K)`` is the model's own estimate of each."""

    maps: torch.Tensor
    layout: str
    quality: torch.Tensor | None = None


def read_class_maps(output: Any, count: int) -> ClassMaps | None:
    """Return the maps of classes in the output of a segmenter, or None. They may be smaller than
    the input."""
    # MaskFormer, Mask2Former, OneFormer, DETR: class logits (N, Q, K + 1), the last for "no
    # object", and mask logits (N, Q, h, w); the map of a class sums its probability times the masks
    for names in (("class_queries_logits", "masks_queries_logits"), ("logits", "pred_masks")):
        logits, masks = _of_images(output, names, count)
        if logits.ndim == 3 and masks.ndim == 4 and logits.shape[:2] == masks.shape[:2]:
            # transformers' other models with boxes: Conditional DETR, RF-DETR
            has_sigmoids = hasattr(output, "pred_boxes") and type(output).__name__ not in SOFTMAX
            shares = logits.sigmoid() if has_sigmoids else logits.softmax(-1)[..., :-1]
            return ClassMaps(torch.einsum("nqk,nqhw->nkhw", shares, masks.sigmoid()), "queries")
    # SAM: M masks (N, P, M, h, w) for each of P prompts, and their quality (N, P, M)
    masks, quality = _of_images(output, ("pred_masks", "iou_scores"), count)
    if masks.ndim == 5 and masks.shape[:3] == quality.shape:
        return ClassMaps(masks.flatten(1, 2), "prompts", quality.detach().flatten(1))
    # (N, K, H, W): torchvision ("out"), SegFormer, UPerNet, DPT ("logits")
    maps = find_tensor(output, count, (4, 5), ("out", "logits"))
    return None if maps is None else ClassMaps(maps, "class maps")


def _of_images(output: Any, names: tuple[str, ...], count: int) -> list[torch.Tensor]:
    """The tensors of an output with these names for ``count`` samples; ``tensor(0)`` in the place
    of one that is missing."""
    tensors = []
    for part in items_named(output, names):
        fits = isinstance(part, torch.Tensor) and part.ndim > 0 and len(part) == count
        tensors.append(part if fits else torch.tensor(0))
    return tensors


@dataclass(frozen=True, eq=False)
class Segmentation(CheckedTarget):
    """The mean score of a class over a region, for a model that gives class maps ``(N, K, H, W)``,
    or of volumes.

    What the model returns may have any of the layouts of `explain.targets.regions.read_class_maps`;
    that of the resolved target says which it was. Models that are prompted (SAM) give masks instead
    of classes.

    Args:
        category: the class: its index or label, or a tuple with an index for each image; of a
            prompted model, the number of the mask. None is the class that is predicted at the
            point, or in most places of the mask or else of the image; of a single map, its class;
            of a prompted model, the mask that it expects to be the best.
        mask: the region, true or nonzero inside: ``(H, W)``, or ``(N, H, W)`` with one for each
            image, over the model's whole input and at any resolution; of volumes with the depth
            before the height. None is where the model predicts the class in the images as they are:
            where its score is the largest; for a single map, and for classes of which several may
            be at one place, where it is more probable than not. Methods that alter the images keep
            to that region.
        point: only the connected part of where the class is predicted around this point ``(x, y)``,
            each a share from 0 to 1 of the model's input; of volumes ``(x, y, z)``.

    Raises:
        TargetError: a mask of another shape, or an empty one.

    >>> maps = torch.tensor([[[[1.0, 2.0]], [[5.0, 0.0]]]])  # one image, two classes, two pixels
    >>> (
    ...     Segmentation(1).pick({"out": maps}, 1)[0],
    ...     Segmentation(1, torch.tensor([[1, 1]])).pick(maps, 1)[0],
    ... )
    (tensor([5.]), tensor([2.5000]))
    >>> Segmentation(point=(0.9, 0.5)).resolved(maps, 1).category
    (0,)
    """

    category: int | str | tuple[int, ...] | None = None
    mask: torch.Tensor | None = None
    point: tuple[float, ...] | None = None
    layout: str = field(default="", compare=False)
    """The layout of the output that it was resolved on; leave it out."""

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Check the options, and convert the mask to a boolean tensor."""
        super().__post_init__()
        if self.mask is None:
            return
        mask = torch.as_tensor(self.mask).detach().bool()
        if mask.ndim not in (2, 3, 4):
            raise TargetError(
                f"mask must have the shape (H, W) or (N, H, W), got {tuple(mask.shape)}"
            )
        object.__setattr__(self, "mask", mask)

    @property
    def name(self) -> str:
        """The target in messages and captions, and in results and records: "cat where predicted",
        "3 in the mask"."""
        what: Any = "prediction" if self.category is None else self.category
        if isinstance(what, tuple) and len(set(what)) == 1:
            what = what[0]
        if self.point is not None:
            return f"{what} at one place"
        return f"{what} {'where predicted' if self.mask is None else 'in the mask'}"

    def pick(self, output: Any, count: int) -> Picked:
        """The mean score ``(count,)`` of each image's class over its region; resolves the target if
        that has not been done."""
        if not self.layout:
            return self.resolved(output, count).pick(output, count)
        own_maps = of_class(self._read(output, count).maps, self.category)
        means = self._means(own_maps[:, None])  # (count, 1)
        return means[:, 0], None

    def resolved(self, output: Any, count: int) -> "Segmentation":
        """Choose a class and a region for each image, on the output for the images as they are.

        Methods that alter the images keep to that region. Returned as it is if it is resolved.
        """
        if self.layout:
            return self
        class_maps = self._read(output, count)
        class_maps = class_maps._replace(maps=class_maps.maps.detach())
        masked = replace(self, mask=self._masks(class_maps.maps), layout=class_maps.layout)
        categories = masked._categories(class_maps)
        mask = masked.mask
        if mask is None:
            mask = masked._predicted(class_maps, categories)
        return replace(masked, category=categories, mask=mask)

    def rows(self, images: torch.Tensor) -> "Segmentation":
        """The segmentation target for a batch of perturbed copies of the given images: their
        classes and masks."""
        if self.mask is None or not isinstance(self.category, tuple):
            return self
        categories = tuple(self.category[image] for image in images.tolist())
        return replace(self, category=categories, mask=self.mask[images.to(self.mask.device)])

    def labelled(self, categories: Labels) -> "Segmentation":
        return replace(self, category=find_category(self.category, categories))

    def class_scores(self, output: Any, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The mean scores ``(count, K)`` of all classes over each image's region, and the classes
        that are explained; None for prompted models."""
        if self.layout == "prompts":
            return None
        scores = self._means(self._read(output, count).maps.detach())
        return scores, torch.tensor(self.category, device=scores.device)

    def of_classes(self, classes: tuple[int, ...]) -> "Segmentation":
        return replace(self, category=classes)

    def _read(self, output: Any, count: int) -> ClassMaps:
        """The class maps in a segmenter's output."""
        class_maps = read_class_maps(output, count)
        if class_maps is None:
            raise unsuitable(self.name, f"class maps (N, K, H, W), for {count} images", output)
        return class_maps

    def _masks(self, maps: torch.Tensor) -> torch.Tensor | None:
        """The caller's mask for each image ``(N, H, W)``; None without one.
        ``maps`` are the class maps ``(N, K, H, W)``.
        """
        mask = self.mask
        if mask is None:
            return None
        if mask.ndim == maps.ndim - 2:
            mask = mask.expand(len(maps), *mask.shape)
        check_one_per_image("mask", len(mask), len(maps))
        if not mask.flatten(1).any(1).all():
            raise TargetError(
                "mask must be true somewhere for each image, got an empty one; None is where "
                "predicted"
            )
        return mask

    def _categories(self, class_maps: ClassMaps) -> tuple[int, ...]:
        """The class of each image in a segmentation: the one that the caller gave, or that the maps
        predict at the point or in the mask.
        """
        count, classes = class_maps.maps.shape[:2]
        if self.category is not None:
            category = find_category(self.category, None)
            chosen = category if isinstance(category, tuple) else (category,) * count
            check_one_per_image("category", len(chosen), count)
            return tuple(class_index(index, classes) for index in chosen)
        if class_maps.quality is not None:
            return tuple(class_maps.quality.argmax(1).tolist())
        predicted = class_maps.maps.argmax(1)
        if self.point is not None:
            return tuple(predicted[_at(self.point, predicted)].tolist())
        if classes == 1:
            return (0,) * count
        weights: Any = 1 if self.mask is None else self._weights(predicted)
        # how much of the image, or of the mask, has each class
        shares = [(weights * (predicted == k)).flatten(1).sum(1) for k in range(classes)]
        most_frequent = torch.stack(shares, 1).argmax(1).tolist()
        if self.mask is None:
            classes_in_words = ", ".join(map(str, dict.fromkeys(most_frequent)))
            warn(
                "target is the class that is predicted in most places of the image, "
                f"{classes_in_words}; explain.targets.Segmentation(category) is another"
            )
        return tuple(most_frequent)

    def _predicted(self, class_maps: ClassMaps, categories: tuple[int, ...]) -> torch.Tensor:
        """The region where the class of each image is predicted, or its connected part at the
        point: boolean masks ``(N, H, W)``.
        """
        maps = class_maps.maps
        outputs = _outputs_of(class_maps)
        has_several_classes = class_maps.quality is None and maps.shape[1] > 1
        if has_several_classes and outputs.kind != "labels":
            best = maps.argmax(1)
            wanted = torch.tensor(categories, device=best.device)
            mask = best == wanted.reshape(-1, *[1] * (best.ndim - 1))
        else:
            mask = of_class(maps, categories) > outputs.threshold
        is_predicted = mask.flatten(1).any(1).tolist()
        if not all(is_predicted):
            image = is_predicted.index(False)
            predicted_classes = []
            if has_several_classes:
                predicted_classes = sorted(set(maps[image].argmax(0).flatten().tolist()))[:5]
            raise TargetError(
                f"class {categories[image]} must be predicted somewhere in each image, but is "
                f"not in image {image}; give a mask, or a class predicted there "
                f"{predicted_classes}"
            )
        return mask if self.point is None else _connected(mask, self.point, self.name)

    def _means(self, maps: torch.Tensor) -> torch.Tensor:
        """The means of class maps ``(N, K, H, W)`` over the mask: ``(N, K)``."""
        weights = self._weights(maps[:, 0])[:, None]
        return (maps.to(weights) * weights).flatten(2).sum(2) / weights.flatten(2).sum(2)

    def _weights(self, maps: torch.Tensor) -> torch.Tensor:
        """The share of each cell of maps ``(N, h, w)`` that the mask covers, in [0, 1], in their
        shape.
        """
        assert self.mask is not None
        mask = self.mask.to(maps.device)
        size = tuple(maps.shape[1:])
        rows, columns = mask.shape[-2:]
        height, width = size[-2:]
        # sides of maps are rounded: aspect ratios may differ by less than a cell
        rounding = max(rows * width / height, columns * height / width)
        if abs(rows * width - columns * height) > rounding:
            raise TargetError(
                f"mask must cover the whole input, whose maps are {height} x {width} (height x "
                f"width), got {rows} x {columns}; give it in the shape of the input"
            )
        floating = maps.dtype if maps.is_floating_point() else torch.float32
        # half precision cannot count the pixels
        weights = mask.to(torch.promote_types(floating, torch.float32))
        if mask.shape[1:] == size:
            return weights
        pool: Any = F.adaptive_avg_pool2d if len(size) == 2 else F.adaptive_avg_pool3d
        shares: torch.Tensor = pool(weights, size)
        return shares


def _outputs_of(class_maps: ClassMaps) -> Outputs:
    """What a segmenter's class maps hold: scores or probabilities, of classes of which one is at
    each place, or of labels of which several may be. It decides where a class counts as predicted.
    """
    if class_maps.layout == "queries":
        return Outputs("none")
    if class_maps.layout == "prompts":
        return Outputs("sigmoid", "labels")
    reader = READER.get()
    # without its model, an output's values at all places decide together
    if reader is None:
        classes = class_maps.maps.shape[1] if adds_up(class_maps.maps) else 0
        # whole numbers may be votes, and show no activation
        seen = FinalActivation(classes) if is_fractional(class_maps.maps) else None
        outputs = outputs_like(class_maps.maps, seen=lambda: seen)
        activation_of_caller = None
    else:
        outputs = reader.outputs(class_maps.maps, _class_maps)
        activation_of_caller = reader.activation
    # a single map has scores, unless the caller says that it holds numbers
    is_one_score_map = outputs.kind == "numbers" and activation_of_caller is None
    return Outputs("sigmoid", "labels") if is_one_score_map else outputs


def _class_maps(output: Any, count: int) -> torch.Tensor | None:
    """The tensor of class maps ``(N, K, H, W)`` in an output; None without any."""
    class_maps = read_class_maps(output, count)
    return None if class_maps is None else class_maps.maps


def of_class(maps: torch.Tensor, categories: Any) -> torch.Tensor:
    """The map of each image's own class: from maps ``(N, K, H, W)`` and N class indices to ``(N, H,
    W)``."""
    images = torch.arange(len(maps), device=maps.device)
    return maps[images, torch.tensor(categories, device=maps.device)]


def _at(point: Sequence[float], masks: torch.Tensor) -> Any:
    """The index into masks ``(N, H, W)`` or ``(N, D, H, W)`` that selects one point in all of them.
    ``point`` is x, y (and z), in shares of the width, height (and depth).
    """
    if len(point) != masks.ndim - 1 or not all(0 <= share <= 1 for share in point):
        raise TargetError(
            f"point must be {masks.ndim - 1} shares from 0 to 1 of the model's input, got {point}; "
            "give x and y, and z in a volume"
        )
    places = zip(reversed(point), masks.shape[1:], strict=True)
    return slice(None), *(min(int(share * length), length - 1) for share, length in places)


def _connected(masks: torch.Tensor, point: Sequence[float], name: str) -> torch.Tensor:
    """The connected region of each mask ``(N, H, W)`` around a point: a flood fill.
    ``point`` is in shares of width and height; ``name`` is the target's in messages.
    """
    place = _at(point, masks)
    region = torch.zeros_like(masks)
    region[place] = masks[place]
    if not region.flatten(1).any(1).all():
        raise TargetError(
            f"target {name} must be predicted at this point of the image, but is not; give a point "
            "in it"
        )
    pool = F.max_pool2d if masks.ndim == 3 else F.max_pool3d
    while True:  # it grows by a pixel to each side
        neighbourhood = pool(region[:, None].float(), kernel_size=3, stride=1, padding=1)
        grown_region = (neighbourhood[:, 0] > 0) & masks
        if torch.equal(grown_region, region):
            return region
        region = grown_region
