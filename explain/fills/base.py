"""What a fill is: photos and a mask in, covered photos out."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol, runtime_checkable

import torch
from PIL import Image

from explain.errors import FillError, shown
from explain.fills.look import Preprocess, looked_at

Cover = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From whose row each is ``(b,)`` and what to keep ``(b, 1, H, W)``, to covered photos ``(b, C, H, W)``."""


@runtime_checkable
class Fill(Protocol):
    """What takes the place of covered pixels, as a frozen value.

    It is called with ``images`` ``(N, C, H, W)``, or videos ``(N, C, T, H, W)``, as the model takes them, and with
    ``keep`` ``(N, 1, H, W)`` in [0, 1], or one for all: 1 leaves a pixel as it is, 0 shows the fill. What a photo
    becomes does not depend on those beside it. ``depends_on_mask`` says whether the fill looks at ``keep``.
    """

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    @property
    def depends_on_mask(self) -> bool: ...

    def __call__(self, images: torch.Tensor, keep: torch.Tensor) -> torch.Tensor: ...

    def picture(
        self, photo: Image.Image, preprocess: Preprocess | None = None, keep: torch.Tensor | None = None
    ) -> Image.Image: ...


@runtime_checkable
class Replacing(Fill, Protocol):
    """A fill that does not look at the mask: each photo has one ``replacement`` ``(N, C, H, W)``."""

    def replacement(self, images: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class Prepared(Fill, Protocol):
    """A fill that can be prepared for photos: what ``covering`` gives covers them by many masks."""

    def covering(self, images: torch.Tensor) -> Cover: ...


class Looked:
    """What all fills share: a picture to look at."""

    def picture(
        self: Fill, photo: Image.Image, preprocess: Preprocess | None = None, keep: torch.Tensor | None = None
    ) -> Image.Image:
        """Return a photo with this fill, to look at.

        Args:
            photo: any picture.
            preprocess: ``PIL.Image -> (C, H, W)``; the picture then shows what the model sees. None takes the photo's
                own pixels, between 0 and 1, where zero is black.
            keep: ``(H, W)`` or ``(1, H, W)`` in [0, 1]; None covers the middle, half as wide and half as high.

        Raises:
            FillError: the preprocessing does more to a colour than to scale and shift it.

        >>> from explain.fills import Blur
        >>> Blur().picture(Image.new("RGB", (30, 20), "orange")).size
        (30, 20)
        """
        return looked_at(self, photo, preprocess, keep)


class Replaced(Looked):
    """What fills share that do not look at the mask."""

    depends_on_mask: ClassVar[bool] = False

    def __call__(self: Replacing, images: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        checked(images, keep)
        return blend(images, self.replacement(images), keep)


def blend(images: torch.Tensor, replacement: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return the images where ``keep`` is 1, their replacement where it is 0, and shares of both between.

    Both ends are exact, in every precision.

    >>> blend(torch.tensor([[[5.0, 5.0]]]), torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[1.0, 0.25]]]))
    tensor([[[5., 2.]]])
    """
    return torch.lerp(replacement, images, keep.to(images))


def covering(fill: Fill, images: torch.Tensor) -> Cover:
    """Cover the same photos ``(N, C, H, W)`` by many masks; a replacement is computed once for each photo.

    >>> from explain.fills import Zero
    >>> cover = covering(Zero(), torch.ones(2, 1, 1, 2))
    >>> cover(torch.tensor([1]), torch.tensor([[[[0.0, 1.0]]]]))
    tensor([[[[0., 1.]]]])
    """
    if isinstance(fill, Prepared):
        return fill.covering(images)
    if fill.depends_on_mask or not isinstance(fill, Replacing):
        return lambda owners, keep: fill(images[owners], keep)
    replacement = fill.replacement(images)
    if len(images) == 1:  # whose copies need not be made before they are blended
        return lambda owners, keep: blend(images, replacement, keep)
    return lambda owners, keep: blend(images[owners], replacement[owners], keep)


def checked(images: torch.Tensor, keep: torch.Tensor) -> None:
    """Refuse images and masks that do not fit each other.

    Raises:
        FillError: no floating-point images ``(N, C, H, W)``, or no mask for each of them, or one for all, in [0, 1].
    """
    if not isinstance(images, torch.Tensor) or images.ndim < 4 or not images.is_floating_point():
        raise FillError(f"images must be a floating-point tensor (N, C, H, W), got {shown(images)}; add dimensions")
    if not isinstance(keep, torch.Tensor) or keep.ndim != images.ndim or keep.shape[1] != 1 or len(keep) == 0:
        raise FillError(
            f"keep must be a tensor {(len(images), 1, *images.shape[2:])} for these images, got {shown(keep)}; it has "
            "one channel"
        )
    if keep.shape[2:] != images.shape[2:] or len(keep) not in (1, len(images)):
        raise FillError(
            f"keep must have the shape {(len(images), 1, *images.shape[2:])} for these images, got "
            f"{tuple(keep.shape)}; enlarge it first"
        )
    if keep.is_complex() or not bool(((keep >= 0) & (keep <= 1)).all()):
        raise FillError("keep must lie between 0 (covered) and 1 (kept), got other values; divide by the largest")
