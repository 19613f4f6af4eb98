"""A model under test with the photos that it is tested on."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from explain._utils.errors import ArgumentError, LayerError, ModelError, muted, shown
from explain.baselines.base import Baseline
from explain.data.boxes import Box, locate
from explain.data.images import load_image
from explain.explanation.explainer import Explainer
from explain.explanation.photos import in_batches
from explain.hooks.unwrap import unwrapped
from explain.insight.reattribution import images_of
from explain.layers import default_layer
from explain.methods.base import MethodLike, get_method, uses_layer
from explain.models import Classifier
from explain.targets import ClassTarget, TopClass, as_target
from explain.testing.regions import (
    LARGEST,
    MUST,
    RegionLike,
    is_one_region,
    mask_on_input,
    mask_on_photo,
    region_for,
)

ModelLike: TypeAlias = nn.Module | Classifier | str | Explainer
LEAST = 8
"""Photos without which nothing is decided: what decides three photos in ten would be in none of
seven with a probability of 8 %."""
BATCH = 32


@dataclass(frozen=True, eq=False)
class PhotoUnderTest:
    """A photo as an input ``(C, H, W)``, and the region in it ``(H, W)``: none where none was
    given."""

    place: int
    x: torch.Tensor
    mask: torch.Tensor


class ModelUnderTest:
    """A model, the photos as its inputs, and the region in each."""

    def __init__(self, model: ModelLike, photos: Any, region: RegionLike | None = None) -> None:
        """Preprocess the photos, and find the region on each: ``region`` is one for all, a function
        of the photo, a list with one for each, or None for assertions without.
        """
        self.explainer = _explainer(model, photos)
        images = images_of(photos, "photos")
        count = len(images)
        if count < LEAST:
            raise ArgumentError(f"photos must be {LEAST} or more to decide, got {count}; give more")
        is_listed = region is not None and not callable(region) and not is_one_region(region)
        if is_listed and len(region) != count:  # type: ignore[arg-type]
            raise ArgumentError(
                f"region must be {MUST}, got {len(region)} for {count} photos"  # type: ignore[arg-type]
            )
        self.photos = [self._photo(image, region, place) for place, image in enumerate(images)]

    def _photo(self, image: Any, region: RegionLike | None, place: int) -> PhotoUnderTest:
        """The preprocessed photo (a path, PIL image or input ``(C, H, W)``) at this place, and its
        region as a mask of the input's pixels; refused if beyond what is seen or `LARGEST`.
        """
        if isinstance(image, torch.Tensor):
            photo: Any = image
            x = self.explainer.batch(image[None])
            height, width = image.shape[-2:]
            visible_box = Box.whole((width, height))
        else:
            photo = load_image(image)
            x = self.explainer.as_input(photo)
            width, height = photo.size
            visible_box = locate(self.explainer.preprocess, photo.size)
        if x.ndim != 4:
            raise ArgumentError(
                f"photos must become inputs (C, H, W), got {tuple(x.shape[1:])}; frames and tiles "
                "cannot be tested"
            )
        size = (int(x.shape[2]), int(x.shape[3]))
        mask = torch.zeros(size, dtype=torch.bool)
        if region is not None:
            photo_mask = mask_on_photo(region_for(region, photo, place), (height, width))
            mask = mask_on_input(photo_mask, visible_box, size)
            region_share = float(mask.double().mean())
            if region_share == 0:
                raise ArgumentError(
                    f"region must lie in the part of photo {place} that the model sees, got one "
                    "outside; give another one, or Explainer(model, crop='whole')"
                )
            if region_share > LARGEST:
                raise ArgumentError(
                    f"region must be at most {LARGEST:.0%} of what the model sees, so that the "
                    f"same area fits elsewhere, got {region_share:.0%} of photo {place}; "
                    "test the rest"
                )
        return PhotoUnderTest(place, x[0], mask)

    def batches(self) -> Iterator[list[PhotoUnderTest]]:
        """Yield the photos in batches of at most `BATCH`, whose inputs all have one shape, so that
        they can be stacked."""
        return in_batches(self.photos, lambda photo: photo.x.shape, lambda photo: BATCH)

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        """Run the model on inputs ``(N, C, H, W)``, and return the probabilities ``(N, K)`` of its
        classes, in float64 on the CPU.
        """
        probabilities = self.explainer.probabilities(x)
        if probabilities is None:
            raise ModelError(
                "model must give probabilities of classes for this test, got numbers; "
                "Explainer(model, activation='softmax') says what its outputs are"
            )
        return probabilities.double().cpu()

    def classes(
        self, batch: Sequence[PhotoUnderTest], x: torch.Tensor, target: Any
    ) -> torch.Tensor:
        """The class ``(N,)`` of each photo of a batch ``x``: the caller's target (of a list, one
        for each photo of all batches), or the model's top class where it is None.
        """
        class_target = as_target(target, self.explainer.categories)
        if isinstance(class_target, TopClass):
            return self.probabilities(x).argmax(1)
        if not isinstance(class_target, ClassTarget):
            raise ArgumentError(
                f"target must be a class, or one for each photo, got {shown(target)}; None takes "
                "the model's own"
            )
        class_index = class_target.index
        if not isinstance(class_index, tuple):
            return torch.full((len(batch),), int(class_index))
        if len(class_index) != len(self.photos):
            raise ArgumentError(
                f"target must be a class, or one for each photo, got {len(class_index)} for "
                f"{len(self.photos)} photos"
            )
        return torch.tensor([class_index[photo.place] for photo in batch])

    def changes(
        self,
        x: torch.Tensor,
        classes: torch.Tensor,
        regions: torch.Tensor,
        controls: torch.Tensor,
        fillings: Sequence[Baseline],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By how much a class's probability changes (magnitude, ``(N,)``) with ``regions`` ``(N, H,
        W)`` covered, and with ``controls`` ``(N, P, H, W)`` (median), means over ``fillings``.
        """
        image_indices = torch.arange(len(x), device=x.device)
        masks = torch.cat([regions[:, None], controls], 1).to(x.device)  # the region is the first
        probabilities = self.probabilities(x)
        class_count = probabilities.shape[1]
        target_list = classes.tolist()
        if not 0 <= min(target_list) <= max(target_list) < class_count:
            raise ArgumentError(
                f"target must be a class from 0 to {class_count - 1}, got {shown(target_list)}; "
                "give another"
            )
        intact_probabilities = probabilities.gather(1, classes[:, None])[:, 0]
        changes_by_filling = []
        for filling in fillings:
            cover = filling.covering(x)
            changes = []
            for mask in masks.unbind(1):
                # it takes what is kept, not what is covered
                covered = self.probabilities(cover(image_indices, (~mask[:, None]).to(x)))
                changes.append(
                    (covered.gather(1, classes[:, None])[:, 0] - intact_probabilities).abs()
                )
            of_region, *of_controls = changes
            changes_by_filling.append(
                torch.stack([of_region, torch.stack(of_controls).median(0).values])
            )
        without, control = torch.stack(changes_by_filling).mean(0)
        return without, control

    def fitting(self, method: MethodLike | None) -> MethodLike | None:
        """Return the method; None where it looks at a layer, and none of the model's has a map, so
        that covering alone decides."""
        if method is None or not uses_layer(get_method(method)):
            return method
        try:
            default_layer(unwrapped(self.explainer.model), self.photos[0].x[None])
        except LayerError:
            return None
        return method

    def heatmaps(self, x: torch.Tensor, method: MethodLike, classes: torch.Tensor) -> torch.Tensor:
        """Return the heatmap of each photo's class by a method, ``(N, H, W)`` from 0 to 1, in
        float64 on the CPU; 0 all over where a map is zero."""
        session = self.explainer.session(method, classes.tolist())
        with muted():
            answers = session(x)
        (attribution,) = answers.results[0].values()
        return attribution.heatmap.double().cpu()


def _explainer(model: ModelLike, photos: Any) -> Explainer:
    """Return the explainer of the model under test. Where the photos are tensors, they are inputs
    already, so that the warning of an unknown preprocessing is muted."""
    if isinstance(model, Explainer):
        return model
    first = photos[0] if isinstance(photos, list | tuple) and photos else photos
    with muted() if isinstance(first, torch.Tensor) else nullcontext():
        return Explainer(model)
