"""What stands for "absent": photos and a mask in, photos without the masked part out; and how a baseline looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import BaselineError, shown

Preprocess: TypeAlias = Callable[[Image.Image], torch.Tensor]


def scale_of(preprocess: Preprocess) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what black becomes ``(C,)``, and by how much white lies above it ``(C,)``, in the model's units.

    Raises:
        BaselineError: the preprocessing does more to a colour than to scale and shift it.

    >>> from explain.models import CenterCrop
    >>> black, range_ = scale_of(CenterCrop(8, mean=(0.5,) * 3, std=(0.25,) * 3))
    >>> black.tolist(), range_.tolist()
    ([-2.0, -2.0, -2.0], [4.0, 4.0, 4.0])
    """
    black, grey, white = (_became(preprocess, level) for level in (0, 51, 255))
    if not torch.allclose(grey, torch.lerp(black, white, 0.2), atol=1e-3 * float((white - black).abs().max())):
        raise BaselineError(
            "preprocess must do no more to colours than to scale and shift each channel for a baseline to know black, "
            "but "
            "does; give Black(mean=..., std=...)"
        )
    return black, white - black


def range_of(preprocess: Preprocess) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the least and largest values that a preprocessing makes; None where it does more than scale and shift.

    >>> from explain.models import CenterCrop
    >>> range_of(CenterCrop(8, mean=(0.5,) * 3, std=(0.25,) * 3))
    ((-2.0, -2.0, -2.0), (2.0, 2.0, 2.0))
    """
    try:
        black, span = scale_of(preprocess)
    except Exception:  # the caller's own preprocessing raises anything; the first photo that it is given tells of it
        return None
    ends = torch.stack([black, black + span])
    return tuple(ends.amin(0).tolist()), tuple(ends.amax(0).tolist())


def _became(preprocess: Preprocess, level: int) -> torch.Tensor:
    x = preprocess(Image.new("RGB", (256, 256), (level, level, level)))
    if not isinstance(x, torch.Tensor) or x.ndim != 3:
        raise BaselineError(f"preprocess must return a tensor (C, H, W), got {shown(x)}; leave the batch dimension out")
    return x[:, x.shape[1] // 2, x.shape[2] // 2].float()


def looked_at(
    baseline: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    photo: Image.Image,
    preprocess: Preprocess | None,
    keep: torch.Tensor | None,
) -> Image.Image:
    """Cover a photo with a baseline, and turn the result back into a picture."""
    to_input = preprocess or _pixels
    black, span = scale_of(to_input)
    x = to_input(photo.convert("RGB"))[None].float()
    mask = _middle(x) if keep is None else keep.reshape(1, 1, *keep.shape[-2:])
    levels = (baseline(x, mask)[0].cpu() - black.view(-1, 1, 1)) / span.view(-1, 1, 1)
    pixels: np.ndarray[Any, Any] = (levels.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def _pixels(photo: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(photo)).permute(2, 0, 1).float() / 255


def _middle(x: torch.Tensor) -> torch.Tensor:
    """Cover the middle: half of the height and half of the width."""
    keep = x.new_ones(1, 1, *x.shape[2:])
    height, width = x.shape[2:]
    keep[..., height // 4 : height - height // 4, width // 4 : width - width // 4] = 0
    return keep


Cover = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From whose row each is ``(b,)`` and what to keep ``(b, 1, H, W)``, to covered photos ``(b, C, H, W)``."""


@runtime_checkable
class Baseline(Protocol):
    """What takes the place of covered pixels, as a frozen value.

    It is called with ``images`` ``(N, C, H, W)``, or videos ``(N, C, T, H, W)``, as the model takes them, and with
    ``keep`` ``(N, 1, H, W)`` in [0, 1], or one for all: 1 leaves a pixel as it is, 0 shows the baseline. What a photo
    becomes does not depend on those beside it. ``depends_on_mask`` says whether the baseline looks at ``keep``.
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
class ImageBaseline(Baseline, Protocol):
    """A baseline that does not look at the mask: each photo has one ``replacement`` ``(N, C, H, W)``."""

    def replacement(self, images: torch.Tensor) -> torch.Tensor: ...


@runtime_checkable
class PreparedBaseline(Baseline, Protocol):
    """A baseline that can be prepared for photos: what ``covering`` gives covers them by many masks."""

    def covering(self, images: torch.Tensor) -> Cover: ...


known: dict[str, Baseline] = {}
R = TypeVar("R", bound="Baseline | type[Baseline]")


def register(baseline: R) -> R:
    """Make a baseline known by its name: above a class, as ``@register``, with its default options.

    Raises:
        BaselineError: the name is taken by another baseline.
    """
    made: Baseline = baseline() if isinstance(baseline, type) else baseline
    if known.setdefault(made.name, made) != made:
        raise BaselineError(f"baseline {made.name!r} is already registered; choose another name")
    return baseline


class ShowsItself:
    """What all baselines share: a picture to look at."""

    def picture(
        self: Baseline, photo: Image.Image, preprocess: Preprocess | None = None, keep: torch.Tensor | None = None
    ) -> Image.Image:
        """Return a photo with this baseline, to look at.

        Args:
            photo: any picture.
            preprocess: ``PIL.Image -> (C, H, W)``; the picture then shows what the model sees. None takes the photo's
                own pixels, between 0 and 1, where zero is black.
            keep: ``(H, W)`` or ``(1, H, W)`` in [0, 1]; None covers the middle, half as wide and half as high.

        Raises:
            BaselineError: the preprocessing does more to a colour than to scale and shift it.

        >>> from explain.baselines import Blur
        >>> Blur().picture(Image.new("RGB", (30, 20), "orange")).size
        (30, 20)
        """
        return looked_at(self, photo, preprocess, keep)


class ReplacesAll(ShowsItself):
    """What baselines share that do not look at the mask."""

    depends_on_mask: ClassVar[bool] = False

    def __call__(self: ImageBaseline, images: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        checked(images, keep)
        return blend(images, self.replacement(images), keep)


def blend(images: torch.Tensor, replacement: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return the images where ``keep`` is 1, their replacement where it is 0, and shares of both between.

    Both ends are exact, in every precision.

    >>> blend(torch.tensor([[[5.0, 5.0]]]), torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[1.0, 0.25]]]))
    tensor([[[5., 2.]]])
    """
    return torch.lerp(replacement, images, keep.to(images))


def covering(baseline: Baseline, images: torch.Tensor) -> Cover:
    """Cover the same photos ``(N, C, H, W)`` by many masks; a replacement is computed once for each photo.

    >>> from explain.baselines import Zero
    >>> cover = covering(Zero(), torch.ones(2, 1, 1, 2))
    >>> cover(torch.tensor([1]), torch.tensor([[[[0.0, 1.0]]]]))
    tensor([[[[0., 1.]]]])
    """
    if isinstance(baseline, PreparedBaseline):
        return baseline.covering(images)
    if baseline.depends_on_mask or not isinstance(baseline, ImageBaseline):
        return lambda owners, keep: baseline(images[owners], keep)
    replacement = baseline.replacement(images)
    if len(images) == 1:  # whose copies need not be made before they are blended
        return lambda owners, keep: blend(images, replacement, keep)
    return lambda owners, keep: blend(images[owners], replacement[owners], keep)


def checked(images: torch.Tensor, keep: torch.Tensor) -> None:
    """Refuse images and masks that do not fit each other.

    Raises:
        BaselineError: no floating-point images ``(N, C, H, W)``, or no mask for each or one for all, in [0, 1].
    """
    if not isinstance(images, torch.Tensor) or images.ndim < 4 or not images.is_floating_point():
        raise BaselineError(f"images must be a floating-point tensor (N, C, H, W), got {shown(images)}; add dimensions")
    if not isinstance(keep, torch.Tensor) or keep.ndim != images.ndim or keep.shape[1] != 1 or len(keep) == 0:
        raise BaselineError(
            f"keep must be a tensor {(len(images), 1, *images.shape[2:])} for these images, got {shown(keep)}; it has "
            "one channel"
        )
    if keep.shape[2:] != images.shape[2:] or len(keep) not in (1, len(images)):
        raise BaselineError(
            f"keep must have the shape {(len(images), 1, *images.shape[2:])} for these images, got "
            f"{tuple(keep.shape)}; enlarge it first"
        )
    if keep.is_complex() or not bool(((keep >= 0) & (keep <= 1)).all()):
        raise BaselineError("keep must lie between 0 (covered) and 1 (kept), got other values; divide by the largest")
