"""What stands for "absent": photos and a mask in, photos without the masked part out; and how a
baseline looks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias, TypeVar, dataclass_transform

import numpy as np
import torch
from PIL import Image

from explain._utils.errors import BaselineError, shown
from explain._utils.options import CheckedFields, enter

Preprocess: TypeAlias = Callable[[Image.Image], torch.Tensor]
Cover: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From the number of each sample's photo ``(b,)`` and what to keep ``(b, 1, H, W)``, to covered
photos ``(b, C, H, W)``."""


@dataclass(frozen=True)
class Baseline(CheckedFields):
    """What takes the place of covered pixels, as a frozen dataclass: its fields are its options.

    It is called with ``images`` ``(N, C, H, W)``, or videos ``(N, C, T, H, W)``, as the model takes
    them, and with ``keep`` ``(N, 1, H, W)`` in [0, 1], or one for all: 1 leaves a pixel as it is, 0
    shows the baseline. What a photo becomes does not depend on the other photos.

    A baseline of your own is a subclass with a ``replacement``; registered, its name is that of the
    class in small letters, unless it has a ``name``. One that depends on the mask says
    ``depends_on_mask = True``, and writes ``__call__`` in its place. Options are checked against
    the type of their field, and against ``minimums``.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    depends_on_mask: ClassVar[bool] = False
    error = BaselineError

    def replacement(self, images: torch.Tensor) -> torch.Tensor:
        """Return what each photo ``(N, C, H, W)`` becomes where all of it is covered, in the same
        shape. It must not depend on the other photos: `covering` takes single ones of it."""
        raise NotImplementedError

    def __call__(self, images: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        check_mask(images, keep)
        return blend(images, self.replacement(images), keep)

    def covering(self, images: torch.Tensor) -> Cover:
        """A function that covers the photos ``(N, C, H, W)``: from numbers of photos ``(b,)`` and
        masks ``(b, 1, H, W)`` to covered photos. Replacements are computed once.

        >>> from explain.baselines import Zero
        >>> cover = Zero().covering(torch.ones(2, 1, 1, 2))
        >>> cover(torch.tensor([1]), torch.tensor([[[[0.0, 1.0]]]]))
        tensor([[[[0., 1.]]]])
        """
        if self.depends_on_mask:
            return lambda numbers, keep: self(images[numbers], keep)
        replacement = self.replacement(images)
        if len(images) == 1:  # no copies are made before they are blended
            return lambda numbers, keep: blend(images, replacement, keep)
        return lambda numbers, keep: blend(images[numbers], replacement[numbers], keep)

    def picture(
        self,
        photo: Image.Image,
        preprocess: Preprocess | None = None,
        keep: torch.Tensor | None = None,
    ) -> Image.Image:
        """Return a photo with this baseline, to look at.

        Args:
            photo: any picture.
            preprocess: ``PIL.Image -> (C, H, W)``; the picture then shows what the model sees. None
                takes the photo's own pixels, between 0 and 1, where zero is black.
            keep: ``(H, W)`` or ``(1, H, W)`` in [0, 1]; None covers the middle, half as wide and
                half as high.

        Raises:
            BaselineError: the preprocessing does more to a colour than to scale and shift it.

        >>> from explain.baselines import Blur
        >>> Blur().picture(Image.new("RGB", (30, 20), "orange")).size
        (30, 20)
        """
        to_input = preprocess or pil_to_unit
        black, span = scale_of(to_input)
        x = to_input(photo.convert("RGB"))[None].float()
        height, width = x.shape[2:]
        if keep is None:
            keep = x.new_ones(height, width)
            keep[height // 4 : height - height // 4, width // 4 : width - width // 4] = 0
        covered = self(x, keep.reshape(1, 1, height, width))[0].cpu()
        levels = (covered - black.view(-1, 1, 1)) / span.view(-1, 1, 1)
        in_bytes = (levels.clamp(0, 1) * 255).round().byte()
        pixels: np.ndarray[Any, Any] = in_bytes.permute(1, 2, 0).numpy()
        return Image.fromarray(pixels[..., 0] if len(levels) == 1 else pixels)


def pil_to_unit(photo: Image.Image) -> torch.Tensor:
    """The pixels of a picture between 0 and 1: ``(C, H, W)``."""
    return torch.from_numpy(np.array(photo)).permute(2, 0, 1).float() / 255


registered: dict[str, Baseline] = {}
B = TypeVar("B", bound=Baseline)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register(kind: type[B]) -> type[B]:
    """Make a class a frozen dataclass, if it is none yet, and the baseline known by its name, with
    default options. Raises `BaselineError` if the name is taken by another baseline.
    """
    kind.name = kind.name or kind.__name__.lower()
    return enter(registered, kind, "baseline")  # type: ignore[no-any-return]


def blend(images: torch.Tensor, replacement: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Return the images where ``keep`` is 1, their replacement where it is 0 (both exact, in every
    precision), and shares of both between."""
    return torch.lerp(replacement, images, keep.to(images))


def scale_of(preprocess: Preprocess) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what black becomes by a preprocessing ``(C,)``, and by how much white lies above it
    ``(C,)``, in the model's units. `BaselineError` if it does more than scale and shift."""
    colors = []
    for level in (0, 51, 255):  # black, a fifth of white, white
        x = preprocess(Image.new("RGB", (256, 256), (level, level, level)))
        if not isinstance(x, torch.Tensor) or x.ndim != 3:
            raise BaselineError(
                f"preprocess must return a tensor (C, H, W), got {shown(x)}; drop the batch "
                "dimension"
            )
        # in the middle, where no crop or padding changes it
        colors.append(x[:, x.shape[1] // 2, x.shape[2] // 2].float())
    black, grey, white = colors
    # a straight line through black and white meets grey too
    if not torch.allclose(
        grey, torch.lerp(black, white, 0.2), atol=1e-3 * float((white - black).abs().max())
    ):
        raise BaselineError(
            "preprocess must scale and shift channels for black to be known; give Black(mean=...)"
        )
    return black, white - black


def range_of(preprocess: Preprocess) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the least and the largest value of each channel that a preprocessing makes, from black
    and white; None where it does more than scale and shift, or fails."""
    try:
        black, span = scale_of(preprocess)
    except Exception:  # whatever the caller's own preprocessing raises, the first photo shows it
        return None
    ends = torch.stack([black, black + span])
    return tuple(ends.amin(0).tolist()), tuple(ends.amax(0).tolist())


def check_mask(images: torch.Tensor, keep: torch.Tensor) -> None:
    """Refuse images that are no floating-point ``(N, C, H, W)``, and masks ``keep`` that are not in
    [0, 1] or do not fit them.
    """
    if not isinstance(images, torch.Tensor) or images.ndim < 4 or not images.is_floating_point():
        raise BaselineError(
            f"images must be a floating-point tensor (N, C, H, W), got {shown(images)}; add "
            "dimensions"
        )
    shape = (1, *images.shape[2:])
    fits = (
        isinstance(keep, torch.Tensor) and keep.shape[1:] == shape and len(keep) in (1, len(images))
    )
    if not fits or len(keep) == 0:
        raise BaselineError(
            f"keep must be a tensor {(len(images), *shape)}, got {shown(keep)}; resize it first"
        )
    if keep.is_complex() or not bool(((keep >= 0) & (keep <= 1)).all()):
        raise BaselineError(
            "keep must lie between 0 (covered) and 1 (kept), got other values; divide by the "
            "largest"
        )
