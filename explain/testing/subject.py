"""A model under test with the photos that it is tested on."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from explain._utils.errors import ArgumentError, ModelError, muted, shown
from explain.attribution.api import attribute
from explain.baselines.base import Baseline
from explain.data.boxes import Box, locate
from explain.data.images import load_image
from explain.explanation.explainer import Explainer
from explain.explanation.photos import in_batches
from explain.hooks import intervene
from explain.hooks.preserve import untouched
from explain.insight.reattribution import images_of
from explain.methods.base import MethodLike
from explain.models import Classifier
from explain.targets import ClassTarget, TopClass, as_target
from explain.targets.base import find_logits
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
    """A model, the photos as its inputs, and the region in each.

    Raises:
        ArgumentError: there are too few photos, or a region that cannot be tested.
    """

    def __init__(self, model: ModelLike, photos: Any, region: RegionLike | None = None) -> None:
        self.explainer = _explainer(model, photos)
        self.photos = [
            self._photo(image, region, place)
            for place, image in enumerate(images_of(photos, "photos"))
        ]
        count = len(self.photos)
        if count < LEAST:
            raise ArgumentError(f"photos must be {LEAST} or more to decide, got {count}; give more")
        is_listed = region is not None and not callable(region) and not is_one_region(region)
        if is_listed and len(region) != count:  # type: ignore[arg-type]
            raise ArgumentError(
                f"region must be {MUST}, got {len(region)} for {count} photos"  # type: ignore[arg-type]
            )

    def _photo(self, image: Any, region: RegionLike | None, place: int) -> PhotoUnderTest:
        """A photo as an input, with the region in it."""
        if isinstance(image, torch.Tensor):
            photo: Any = image
            x = self.explainer._placed(image[None])
            height, width = image.shape[-2:]
            seen = Box.whole((width, height))
        else:
            photo = load_image(image)
            x = self.explainer.as_input(photo)
            width, height = photo.size
            seen = locate(self.explainer.preprocess, photo.size)
        if x.ndim != 4:
            raise ArgumentError(
                f"photos must become inputs (C, H, W), got {tuple(x.shape[1:])}; frames and tiles "
                "cannot be tested"
            )
        size = (int(x.shape[2]), int(x.shape[3]))
        mask = torch.zeros(size, dtype=torch.bool)
        if region is not None:
            on_photo = mask_on_photo(region_for(region, photo, place), (height, width))
            mask = mask_on_input(on_photo, seen, size)
            share = float(mask.double().mean())
            if share == 0:
                raise ArgumentError(
                    f"region must lie in the part of photo {place} that the model sees, got one "
                    "outside; give another one, or Explainer(model, crop='whole')"
                )
            if share > LARGEST:
                raise ArgumentError(
                    f"region must be at most {LARGEST:.0%} of what the model sees, so that the "
                    f"same area fits elsewhere, got {share:.0%} of photo {place}; test the rest"
                )
        return PhotoUnderTest(place, x[0], mask)

    def batches(self) -> Iterator[list[PhotoUnderTest]]:
        """The photos, together where their inputs have one shape."""
        return in_batches(self.photos, lambda photo: photo.x.shape, lambda photo: BATCH)

    def probabilities(self, x: torch.Tensor) -> torch.Tensor:
        """The probabilities ``(N, K)`` of inputs.

        Raises:
            ModelError: the model gives none.
        """
        model = self.explainer.model
        with untouched(model), torch.no_grad(), intervene(model, self.explainer.interventions):
            scores = find_logits(model(x), len(x))
            probabilities = self.explainer._probabilities(x, scores)
        if probabilities is None:
            raise ModelError(
                "model must give probabilities of classes for this test, got numbers; "
                "Explainer(model, activation='softmax') says what its outputs are"
            )
        return probabilities.double().cpu()

    def classes(self, few: Sequence[PhotoUnderTest], x: torch.Tensor, target: Any) -> torch.Tensor:
        """The class ``(N,)`` of each of some photos: the target, or what the model says."""
        wanted = as_target(target, self.explainer.categories)
        if isinstance(wanted, TopClass):
            return self.probabilities(x).argmax(1)
        if not isinstance(wanted, ClassTarget):
            raise ArgumentError(
                f"target must be a class, or one for each photo, got {shown(target)}; None takes "
                "the model's own"
            )
        index = wanted.index
        if not isinstance(index, tuple):
            return torch.full((len(few),), int(index))
        if len(index) != len(self.photos):
            raise ArgumentError(
                f"target must be a class, or one for each photo, got {len(index)} for "
                f"{len(self.photos)} photos"
            )
        return torch.tensor([index[photo.place] for photo in few])

    def changes(
        self,
        x: torch.Tensor,
        classes: torch.Tensor,
        regions: torch.Tensor,
        controls: torch.Tensor,
        fillings: Sequence[Baseline],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By how much the probability of each photo's class changes.

        Args:
            x: inputs ``(N, C, H, W)``.
            classes: ``(N,)``.
            regions: what is covered, ``(N, H, W)``.
            controls: what is covered instead, ``(N, P, H, W)``.
            fillings: what stands for covered pixels.

        Returns:
            The change without the region ``(N,)``, and that without a control ``(N,)``, the median
            of its places; both are means over what covers them.
        """
        rows = torch.arange(len(x), device=x.device)
        masks = torch.cat([regions[:, None], controls], 1).to(x.device)
        probabilities = self.probabilities(x)
        count = probabilities.shape[1]
        target_list = classes.tolist()
        if not 0 <= min(target_list) <= max(target_list) < count:
            raise ArgumentError(
                f"target must be a class from 0 to {count - 1}, got {shown(target_list)}; give "
                "another"
            )
        intact = probabilities.gather(1, classes[:, None])[:, 0]
        of_fillings = []
        for filling in fillings:
            cover = filling.covering(x)
            changes = []
            for mask in masks.unbind(1):
                covered = self.probabilities(cover(rows, (~mask[:, None]).to(x)))
                changes.append((covered.gather(1, classes[:, None])[:, 0] - intact).abs())
            of_fillings.append(torch.stack([changes[0], torch.stack(changes[1:]).median(0).values]))
        without, control = torch.stack(of_fillings).mean(0)
        return without, control

    def heatmaps(self, x: torch.Tensor, method: MethodLike, classes: torch.Tensor) -> torch.Tensor:
        """The heatmaps ``(N, H, W)`` of each photo's class."""
        explainer = self.explainer
        chosen = explainer._methods(method)[0]
        with muted(), intervene(explainer.model, explainer.interventions):
            attribution = attribute(
                explainer.model,
                x,
                chosen,
                target=classes.tolist(),
                activation=explainer.activation,
            )
        return attribution.heatmap.double().cpu()


def _explainer(model: ModelLike, photos: Any) -> Explainer:
    """The explainer of a model; how photos become inputs does not matter where they are some."""
    if isinstance(model, Explainer):
        return model
    first = photos[0] if isinstance(photos, list | tuple) and photos else photos
    with muted() if isinstance(first, torch.Tensor) else nullcontext():
        return Explainer(model)
